/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_parse.h"

#include <string.h>
#include <strings.h>

#define SKIPPED_MAX 8192 /* bytes of chunk extensions and trailers, in all */

static bool token_char(unsigned char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

/* NUL-terminates a line at its CRLF and steps behind it; NULL where a line is not whole. */
static char *cut_line(char **at, char *end)
{
    char *line = *at, *cr = memchr(line, '\r', (size_t)(end - line));
    if (!cr || cr + 1 >= end || cr[1] != '\n')
        return NULL;
    for (char *p = line; p < cr; p++)
        if (((unsigned char)*p < 0x20 && *p != '\t') || *p == 0x7f)
            return NULL;
    *cr = '\0';
    *at = cr + 2;
    return line;
}

static int request_line(char *line, struct srv_head *h, const char **ret_why)
{
    char *target = strchr(line, ' '), *version = target ? strchr(target + 1, ' ') : NULL;
    *ret_why = "the request line is not METHOD /PATH HTTP/1.1";
    if (!version || strchr(version + 1, ' ') || strchr(line, '\t'))
        return 400;
    *target++ = '\0';
    *version++ = '\0';
    if (!*line)
        return 400;
    for (const char *p = line; *p; p++)
        if (!token_char((unsigned char)*p))
            return 400;
    if (*target != '/')
        return 400;
    if (strcmp(version, "HTTP/1.1") == 0)
        h->minor = 1;
    else if (strcmp(version, "HTTP/1.0") == 0)
        h->minor = 0;
    else if (strncmp(version, "HTTP/", 5) == 0) {
        *ret_why = "only HTTP/1.0 and HTTP/1.1 are spoken here";
        return 505;
    } else
        return 400;
    h->method = line;
    h->path = target;
    char *query = strchr(target, '?');
    h->query = query ? query + 1 : "";
    if (query)
        *query = '\0';
    return 0;
}

static int header_line(char *line, struct srv_head *h, const char **ret_why)
{
    if (h->n_fields == SRV_HEADERS_MAX) {
        *ret_why = "more than 100 headers";
        return 431;
    }
    char *colon = strchr(line, ':');
    *ret_why = "a header line is not NAME: VALUE";
    if (!colon || colon == line)
        return 400;
    for (char *p = line; p < colon; p++) {
        if (!token_char((unsigned char)*p))
            return 400;
        if (*p >= 'A' && *p <= 'Z')
            *p = (char)(*p + ('a' - 'A'));
    }
    *colon = '\0';
    char *value = colon + 1 + strspn(colon + 1, " \t"), *end = value + strlen(value);
    while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
        *--end = '\0';
    h->field[h->n_fields++] = (struct srv_field){line, value};
    return 0;
}

static int content_length(const char *value, uint64_t *ret_bytes)
{
    uint64_t n = 0;
    if (!*value || strlen(value) > 18)
        return 400;
    for (; *value; value++) {
        if (*value < '0' || *value > '9')
            return 400;
        n = n * 10 + (uint64_t)(*value - '0');
    }
    *ret_bytes = n;
    return 0;
}

/* One word of a comma-separated list. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    while (*list) {
        list += strspn(list, ", \t");
        size_t len = strcspn(list, ", \t");
        if (len == n && strncasecmp(list, word, n) == 0)
            return true;
        list += len;
    }
    return false;
}

/* What the headers say about the body and the connection. */
static int framing(struct srv_head *h, const char **ret_why)
{
    bool length = false, host = false;
    h->keep_alive = h->minor == 1;
    for (unsigned i = 0; i < h->n_fields; i++) {
        const char *name = h->field[i].name, *value = h->field[i].value;
        if (strcmp(name, "content-length") == 0) {
            uint64_t bytes = 0;
            *ret_why = "Content-Length is not one number";
            if (length || content_length(value, &bytes))
                return 400;
            length = true;
            h->body_bytes = bytes;
        } else if (strcmp(name, "transfer-encoding") == 0) {
            *ret_why = "the only transfer encoding known is chunked";
            if (h->chunked || strcasecmp(value, "chunked") != 0)
                return 501;
            h->chunked = true;
        } else if (strcmp(name, "connection") == 0) {
            if (has_word(value, "close"))
                h->keep_alive = false;
            else if (h->minor == 0 && has_word(value, "keep-alive"))
                h->keep_alive = true;
        } else if (strcmp(name, "expect") == 0) {
            *ret_why = "Expect: only 100-continue is known";
            if (strcasecmp(value, "100-continue") != 0)
                return 417;
            h->expect_continue = h->minor == 1;
        } else if (strcmp(name, "host") == 0) {
            *ret_why = "more than one Host header";
            if (host)
                return 400;
            host = true;
        }
    }
    *ret_why = "both Content-Length and Transfer-Encoding";
    if (h->chunked && (length || h->minor == 0))
        return 400;
    *ret_why = "HTTP/1.1 without a Host header";
    return h->minor == 1 && !host ? 400 : 0;
}

int srv_head_parse(char *text, size_t n, struct srv_head *ret_head, const char **ret_why)
{
    struct srv_head h = {0};
    char *at = text, *end = text + n, *line = cut_line(&at, end);
    *ret_why = "the request line is broken";
    if (!line)
        return 400;
    int status = request_line(line, &h, ret_why);
    while (!status) {
        *ret_why = "a header line is broken";
        line = cut_line(&at, end);
        if (!line)
            return 400;
        if (!*line)
            break;
        status = header_line(line, &h, ret_why);
    }
    if (!status)
        status = framing(&h, ret_why);
    if (!status)
        *ret_head = h;
    return status;
}

const char *srv_head_field(const struct srv_head *head, const char *name)
{
    for (unsigned i = 0; i < head->n_fields; i++)
        if (strcmp(head->field[i].name, name) == 0)
            return head->field[i].value;
    return NULL;
}

enum {
    SIZE,      /* hexadecimal digits */
    EXTENSION, /* up to the CR behind them */
    SIZE_LF,   /* the LF behind the size */
    DATA,      /* left bytes */
    DATA_CR,   /* behind them */
    DATA_LF,   /* likewise */
    TRAILER,   /* first byte of a line behind the last chunk */
    TRAILER_LINE /* a trailer, ignored */,
    TRAILER_LF,
    END_LF,
};

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int srv_chunked_step(struct srv_chunked *c, const char *in, size_t n, size_t *ret_used, const char **ret_data,
                     size_t *ret_n)
{
    size_t i = 0;
    *ret_data = in;
    *ret_n = 0;
    while (i < n) {
        char b = in[i];
        if (c->state == DATA) {
            size_t take = n - i < c->left ? n - i : (size_t)c->left;
            *ret_data = in + i;
            *ret_n = take;
            c->left -= take;
            if (!c->left)
                c->state = DATA_CR;
            *ret_used = i + take;
            return 0;
        }
        i++;
        if (c->state == EXTENSION || c->state == TRAILER_LINE) {
            if (++c->skipped > SKIPPED_MAX || b == '\n')
                return -1;
        }
        switch (c->state) {
        case SIZE:
            if (hex(b) >= 0) {
                if (++c->digits > 15)
                    return -1;
                c->left = c->left * 16 + (uint64_t)hex(b);
            } else if (c->digits && (b == ';' || b == ' ' || b == '\t')) {
                c->state = EXTENSION;
            } else if (c->digits && b == '\r') {
                c->state = SIZE_LF;
            } else {
                return -1;
            }
            break;
        case EXTENSION:
            if (b == '\r')
                c->state = SIZE_LF;
            break;
        case SIZE_LF:
            if (b != '\n')
                return -1;
            c->state = c->left ? DATA : TRAILER;
            c->digits = 0;
            break;
        case DATA_CR:
            if (b != '\r')
                return -1;
            c->state = DATA_LF;
            break;
        case DATA_LF:
            if (b != '\n')
                return -1;
            c->state = SIZE;
            break;
        case TRAILER:
            if (b == '\n')
                return -1;
            c->state = b == '\r' ? END_LF : TRAILER_LINE;
            break;
        case TRAILER_LINE:
            if (b == '\r')
                c->state = TRAILER_LF;
            break;
        case TRAILER_LF:
            if (b != '\n')
                return -1;
            c->state = TRAILER;
            break;
        default: /* END_LF */
            if (b != '\n')
                return -1;
            *ret_used = i;
            return 1;
        }
    }
    *ret_used = i;
    return 0;
}
