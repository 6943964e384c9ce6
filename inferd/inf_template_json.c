/* SPDX-License-Identifier: MIT */
/* JSON as Python's json.dumps and str() write it, and strings as Python's methods cut them. */
#include "inferd/inf_template_priv.h"
#include "inferd/inf_utf8.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define BUF_BYTES_MAX (256ul << 20)

void inf_buf_put(struct shm_text *buf, const char *bytes, size_t n)
{
    if (!buf->rc && n > BUF_BYTES_MAX - buf->n)
        buf->rc = -E2BIG;
    shm_text_add(buf, bytes, n);
}

void inf_buf_string(struct shm_text *buf, const char *text)
{
    inf_buf_put(buf, text, strlen(text));
}

static void newline(struct shm_text *buf, int indent, int depth)
{
    inf_buf_put(buf, "\n", 1);
    for (int i = 0; i < indent * depth; i++)
        inf_buf_put(buf, " ", 1);
}

static void dump_string(struct shm_text *buf, const char *text, size_t n)
{
    inf_buf_put(buf, "\"", 1);
    for (size_t i = 0, from = 0; i <= n; i++) {
        unsigned char c = i < n ? (unsigned char)text[i] : 0;
        if (i < n && c >= 0x20 && c != '"' && c != '\\')
            continue;
        inf_buf_put(buf, text + from, i - from);
        from = i + 1;
        if (i == n)
            break;
        static const char names[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
        const char *at = c ? strchr(names, c) : NULL;
        char escape[8];
        snprintf(escape, sizeof escape, at ? "\\%c" : "\\u%04x", at ? letters[at - names] : c);
        inf_buf_string(buf, escape);
    }
    inf_buf_put(buf, "\"", 1);
}

/* repr(): the fewest digits that read back the same. */
static void put_real(struct shm_text *buf, double value)
{
    char digits[40], out[64];
    int precision = 1;
    do
        snprintf(digits, sizeof digits, "%.*e", precision - 1, value);
    while (strtod(digits, NULL) != value && ++precision <= 17);
    if (isinf(value) || isnan(value)) {
        inf_buf_string(buf, isnan(value) ? "NaN" : value < 0 ? "-Infinity" : "Infinity");
        return;
    }
    char *e = strchr(digits, 'e');
    int exponent = (int)strtol(e + 1, NULL, 10);
    if (exponent >= -4 && exponent < 16) {
        int decimals = precision - 1 - exponent;
        snprintf(out, sizeof out, "%.*f", decimals > 0 ? decimals : 1, value);
        inf_buf_string(buf, out);
        return;
    }
    *e = '\0';
    snprintf(out, sizeof out, "%se%c%02d", digits, exponent < 0 ? '-' : '+', abs(exponent));
    inf_buf_string(buf, out);
}

static void put_integer(struct shm_text *buf, const json_t *value)
{
    char out[32];
    snprintf(out, sizeof out, "%lld", (long long)json_integer_value(value));
    inf_buf_string(buf, out);
}

static void repr_string(struct shm_text *buf, const char *text, size_t n)
{
    char quote = memchr(text, '\'', n) && !memchr(text, '"', n) ? '"' : '\'';
    inf_buf_put(buf, &quote, 1);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        char out[8];
        if (c == '\\' || c == (unsigned char)quote)
            snprintf(out, sizeof out, "\\%c", c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(out, sizeof out, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c < 0x20 || c == 0x7F)
            snprintf(out, sizeof out, "\\x%02x", c);
        else {
            inf_buf_put(buf, text + i, 1);
            continue;
        }
        inf_buf_string(buf, out);
    }
    inf_buf_put(buf, &quote, 1);
}

/* JSON, and what Python's repr() prints, differ in these only. */
struct words {
    void (*string)(struct shm_text *buf, const char *text, size_t n);
    const char *yes, *no, *none;
};
static const struct words json_words = {dump_string, "true", "false", "null"},
                          python_words = {repr_string, "True", "False", "None"};

static void dump(struct shm_text *buf, const struct words *w, const json_t *value, int indent, int depth)
{
    const char *key;
    json_t *item;
    size_t i = 0;
    const char *comma = indent ? "," : ", ";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        inf_buf_put(buf, "{", 1);
        json_object_foreach((json_t *)value, key, item)
        {
            if (i++)
                inf_buf_string(buf, comma);
            if (indent)
                newline(buf, indent, depth + 1);
            w->string(buf, key, strlen(key));
            inf_buf_put(buf, ": ", 2);
            dump(buf, w, item, indent, depth + 1);
        }
        if (i && indent)
            newline(buf, indent, depth);
        inf_buf_put(buf, "}", 1);
        break;
    case JSON_ARRAY:
        inf_buf_put(buf, "[", 1);
        json_array_foreach((json_t *)value, i, item)
        {
            if (i)
                inf_buf_string(buf, comma);
            if (indent)
                newline(buf, indent, depth + 1);
            dump(buf, w, item, indent, depth + 1);
        }
        if (i && indent)
            newline(buf, indent, depth);
        inf_buf_put(buf, "]", 1);
        break;
    case JSON_STRING:
        w->string(buf, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        put_integer(buf, value);
        break;
    case JSON_REAL:
        put_real(buf, json_real_value(value));
        break;
    default:
        inf_buf_string(buf, json_is_true(value) ? w->yes : json_is_false(value) ? w->no : w->none);
    }
}

void inf_json_dump(struct shm_text *buf, const json_t *value, int indent)
{
    dump(buf, &json_words, value, indent, 0);
}

void inf_json_str(struct shm_text *buf, const json_t *value)
{
    if (json_is_string(value))
        inf_buf_put(buf, json_string_value(value), json_string_length(value));
    else
        dump(buf, &python_words, value, 0, 0);
}

bool inf_json_true(const json_t *value)
{
    switch (value ? json_typeof(value) : JSON_NULL) {
    case JSON_OBJECT:
        return json_object_size(value) > 0;
    case JSON_ARRAY:
        return json_array_size(value) > 0;
    case JSON_STRING:
        return json_string_length(value) > 0;
    case JSON_INTEGER:
        return json_integer_value(value) != 0;
    case JSON_REAL:
        return json_real_value(value) != 0;
    default:
        return json_is_true(value);
    }
}

/* Bytes of the white space (str.isspace) at p, 0: none there. */
static size_t space_at(const unsigned char *p, size_t n)
{
    if (n && ((p[0] >= 0x09 && p[0] <= 0x0D) || (p[0] >= 0x1C && p[0] <= 0x20)))
        return 1;
    if (n >= 2 && p[0] == 0xC2 && (p[1] == 0x85 || p[1] == 0xA0))
        return 2;
    if (n < 3)
        return 0;
    unsigned three = (unsigned)p[0] << 16 | (unsigned)p[1] << 8 | p[2];
    return three == 0xE19A80 || (three >= 0xE28080 && three <= 0xE2808A) || three == 0xE280A8 ||
                   three == 0xE280A9 || three == 0xE280AF || three == 0xE2819F || three == 0xE38080
               ? 3
               : 0;
}

struct inf_slice inf_strip(struct inf_slice s)
{
    size_t step;
    while (s.n && (step = space_at((const unsigned char *)s.at, s.n)) != 0) {
        s.at += step;
        s.n -= step;
    }
    for (bool more = s.n > 0; more;) {
        more = false;
        for (size_t back = 1; back <= 3 && back <= s.n && !more; back++) {
            if (space_at((const unsigned char *)s.at + s.n - back, back) == back) {
                s.n -= back;
                more = true;
            }
        }
    }
    return s;
}

struct inf_slice inf_lstrip_newlines(struct inf_slice s)
{
    while (s.n && s.at[0] == '\n') {
        s.at++;
        s.n--;
    }
    return s;
}

struct inf_slice inf_rstrip_newlines(struct inf_slice s)
{
    while (s.n && s.at[s.n - 1] == '\n')
        s.n--;
    return s;
}

bool inf_has(struct inf_slice s, const char *part)
{
    return s.n && memmem(s.at, s.n, part, strlen(part));
}

bool inf_starts(struct inf_slice s, const char *part)
{
    size_t n = strlen(part);
    return s.n >= n && !memcmp(s.at, part, n);
}

bool inf_ends(struct inf_slice s, const char *part)
{
    size_t n = strlen(part);
    return s.n >= n && !memcmp(s.at + s.n - n, part, n);
}

bool inf_same(struct inf_slice a, struct inf_slice b)
{
    return a.n == b.n && (!a.n || !memcmp(a.at, b.at, a.n));
}

struct inf_slice inf_before_first(struct inf_slice s, const char *part)
{
    const char *hit = s.n ? memmem(s.at, s.n, part, strlen(part)) : NULL;
    return hit ? (struct inf_slice){s.at, (size_t)(hit - s.at)} : s;
}

struct inf_slice inf_after_first(struct inf_slice s, const char *part)
{
    struct inf_slice before = inf_before_first(s, part);
    if (before.n == s.n)
        return s;
    size_t skip = before.n + strlen(part);
    return (struct inf_slice){s.at + skip, s.n - skip};
}

struct inf_slice inf_after_last(struct inf_slice s, const char *part)
{
    while (inf_has(s, part))
        s = inf_after_first(s, part);
    return s;
}
