/* SPDX-License-Identifier: MIT */
/* Each pre-tokenizer and SentencePiece against the reference: cuts, ids, bytes. */
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_pretok.h"
#include "inferd/inf_tokenizer.h"
#include "tok_fixture.h"

TestSuite(tokenizers, .timeout = 110);

struct family {
    struct inf_tokenizer_src src;
    uint32_t *offsets[2];
    char *bytes[2];
    int32_t *types;
    float *scores;
};

static json_t *load(void)
{
    const char *other = getenv("EXPERTD_TOKENIZERS");
    char command[4200], *text = NULL;
    size_t n = 0, cap = 0, got;
    snprintf(command, sizeof command, "gzip -dc '%s'",
             other ? other : tok_fixture_path("tests/data/goldens/tokenizers.json.gz"));
    FILE *in = popen(command, "r");
    cr_assert(in);
    do {
        cap = cap ? cap * 2 : 1 << 20;
        text = realloc(text, cap);
        cr_assert(text);
        got = fread(text + n, 1, cap - n, in);
        n += got;
    } while (got);
    cr_assert_eq(pclose(in), 0);
    json_error_t e;
    json_t *all = json_loadb(text, n, JSON_ALLOW_NUL, &e);
    cr_assert(all, "%s", e.text);
    free(text);
    return all;
}

static struct inf_string_table table(const json_t *list, uint32_t **ret_offsets, char **ret_bytes)
{
    size_t n = json_array_size(list), size = 0, at = 0;
    for (size_t i = 0; i < n; i++)
        size += json_string_length(json_array_get(list, i));
    uint32_t *offsets = malloc((n + 1) * sizeof *offsets);
    char *bytes = malloc(size + 1);
    cr_assert(offsets && bytes);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_array_get(list, i);
        offsets[i] = (uint32_t)at;
        memcpy(bytes + at, json_string_value(s), json_string_length(s));
        at += json_string_length(s);
    }
    offsets[n] = (uint32_t)at;
    *ret_offsets = offsets;
    *ret_bytes = bytes;
    return (struct inf_string_table){.n = (uint32_t)n, .offsets = offsets, .bytes = bytes, .size_bytes = at};
}

static void open_family(const json_t *o, struct family *f)
{
    const json_t *types = json_object_get(o, "types"), *scores = json_object_get(o, "scores");
    memset(f, 0, sizeof *f);
    f->src.tokens = table(json_object_get(o, "tokens"), &f->offsets[0], &f->bytes[0]);
    f->src.merges = table(json_object_get(o, "merges"), &f->offsets[1], &f->bytes[1]);
    f->src.pre = json_string_value(json_object_get(o, "pre"));
    f->src.pre_len = f->src.pre ? strlen(f->src.pre) : 0;
    f->src.bos_id = f->src.eos_id = -1;
    f->src.spm = json_is_true(json_object_get(o, "spm"));
    f->src.add_space_prefix = json_is_true(json_object_get(o, "add_space_prefix"));
    f->types = calloc(f->src.tokens.n, sizeof *f->types);
    f->scores = calloc(f->src.tokens.n, sizeof *f->scores);
    cr_assert(f->types && f->scores);
    for (size_t i = 0; i < f->src.tokens.n; i++) {
        f->types[i] = types ? (int32_t)json_integer_value(json_array_get(types, i)) : INF_TOKEN_NORMAL;
        f->scores[i] = (float)json_number_value(json_array_get(scores, i));
    }
    f->src.types = f->types;
    f->src.scores = f->src.spm ? f->scores : NULL;
}

static void close_family(struct family *f)
{
    for (int i = 0; i < 2; i++) {
        free(f->offsets[i]);
        free(f->bytes[i]);
    }
    free(f->types);
    free(f->scores);
}

static void check_cuts(struct inf_pretok *pretok, const char *name, const char *text, size_t len,
                       const json_t *ends)
{
    size_t at = 0, i = 0;
    for (; at < len; i++) {
        long n = inf_pretok_next(pretok, text, len, at);
        cr_assert(n > 0 && (size_t)n <= len - at);
        at += (size_t)n;
        cr_assert_eq((json_int_t)at, json_integer_value(json_array_get(ends, i)),
                     "%s: cut %zu at %zu, not %lld: \"%s\"", name, i, at,
                     (long long)json_integer_value(json_array_get(ends, i)), text);
    }
    cr_assert_eq(i, json_array_size(ends));
}

/* The tokens' bytes are the text; SentencePiece puts a space in front and takes U+2581 for one. */
static void check_bytes(const struct inf_tokenizer *tok, const struct family *f, const struct inf_ids *ids,
                        const char *text, size_t len)
{
    size_t at = 0, skip = f->src.add_space_prefix && len;
    for (size_t i = 0; i < ids->n; i++) {
        const char *bytes;
        size_t n;
        cr_assert_eq(inf_tokenizer_bytes(tok, ids->ids[i], &bytes, &n), 0);
        for (size_t k = 0; k < n; k++) {
            if (skip) {
                cr_assert_eq(bytes[k], ' ');
                skip = 0;
                continue;
            }
            bool space = f->src.spm && len - at >= 3 && !memcmp(text + at, "\xE2\x96\x81", 3);
            cr_assert(at < len && bytes[k] == (space ? ' ' : text[at]), "byte %zu of \"%s\"", at, text);
            at += space ? 3 : 1;
        }
    }
    cr_assert_eq(at, len);
}

static size_t check_family(const char *name, const json_t *o)
{
    struct family f;
    struct inf_tokenizer *tok = NULL;
    struct inf_pretok *pretok = NULL;
    struct shm_error err = {0};
    struct inf_ids ids = {0};
    size_t i;
    json_t *line;
    open_family(o, &f);
    cr_assert_eq(inf_tokenizer_create(&f.src, &err, &tok), 0, "%s: %s", name, shm_error_text(&err));
    if (!f.src.spm)
        cr_assert_eq(inf_pretok_create(f.src.pre, f.src.pre_len, &err, &pretok), 0);
    json_array_foreach(json_object_get(o, "texts"), i, line)
    {
        const json_t *text = json_array_get(line, 0), *want = json_array_get(line, 2);
        const char *s = json_string_value(text);
        size_t len = json_string_length(text);
        if (pretok)
            check_cuts(pretok, name, s, len, json_array_get(line, 1));
        ids.n = 0;
        cr_assert_eq(inf_tokenizer_encode(tok, s, len, 0, &err, &ids), 0);
        cr_assert_eq(ids.n, json_array_size(want), "%s: %zu ids, not %zu: \"%s\"", name, ids.n,
                     json_array_size(want), s);
        for (size_t k = 0; k < ids.n; k++)
            cr_assert_eq(ids.ids[k], json_integer_value(json_array_get(want, k)), "%s: id %zu is %d: \"%s\"",
                         name, k, ids.ids[k], s);
        check_bytes(tok, &f, &ids, s, len);
    }
    inf_ids_clear(&ids);
    inf_pretok_destroy(&pretok);
    inf_tokenizer_destroy(&tok);
    close_family(&f);
    return json_array_size(json_object_get(o, "texts"));
}

Test(tokenizers, equal_reference)
{
    json_t *all = load(), *family;
    const char *name;
    size_t texts = 0, families = 0;
    json_object_foreach(json_object_get(all, "families"), name, family)
    {
        texts += check_family(name, family);
        families++;
    }
    fprintf(stderr, "%zu texts of %zu tokenizers\n", texts, families);
    cr_assert(families == 10 && texts >= 3800);
    json_decref(all);
}

Test(tokenizers, other_names)
{
    static const char *const names[] = {"llama3", "llama-v3", "chatglm-bpe", "deepseek-r1-qwen", "llama4"};
    struct inf_pretok *p = NULL;
    struct shm_error err = {0};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        cr_assert_eq(inf_pretok_create(names[i], strlen(names[i]), NULL, &p), 0);
        inf_pretok_destroy(&p);
    }
    cr_assert_eq(inf_pretok_create("llama-bpe2", 10, &err, &p), -ENOTSUP);
    cr_assert(strstr(err.text, "\"llama-bpe2\"") && strstr(err.text, "deepseek-coder") &&
              !strchr(err.text, '\n'));
    cr_assert_eq(inf_pretok_create("", 0, &err, &p), -ENOTSUP);
}

static struct family family;
static json_t *goldens;

static void open_spm(void)
{
    goldens = load();
    open_family(json_object_get(json_object_get(goldens, "families"), "spm"), &family);
}

static void close_spm(void)
{
    close_family(&family);
    json_decref(goldens);
}

/* A space goes in front of the text and behind each special token, none in front of nothing. */
Test(tokenizers, space_behind_special, .init = open_spm, .fini = close_spm)
{
    struct inf_tokenizer *tok = NULL;
    struct inf_ids ids = {0}, hi = {0};
    cr_assert_eq(inf_tokenizer_create(&family.src, NULL, &tok), 0);
    int32_t end = inf_tokenizer_find(tok, "</s>", 4);
    cr_assert_eq(inf_tokenizer_encode(tok, "hi", 2, 0, NULL, &hi), 0);
    cr_assert_eq(inf_tokenizer_encode(tok, "hi</s>hi</s></s>", 16, INF_ENCODE_SPECIAL, NULL, &ids), 0);
    cr_assert(end >= 0 && ids.n == 2 * hi.n + 3 && ids.ids[hi.n] == end && ids.ids[ids.n - 1] == end);
    cr_assert(!memcmp(ids.ids, hi.ids, hi.n * sizeof *hi.ids) &&
              !memcmp(ids.ids + hi.n + 1, hi.ids, hi.n * sizeof *hi.ids));
    ids.n = 0;
    cr_assert_eq(inf_tokenizer_encode(tok, "</s>", 4, 0, NULL, &ids), 0);
    for (size_t i = 0; i < ids.n; i++)
        cr_assert_neq(ids.ids[i], end);
    ids.n = 0; /* what is not UTF-8 is bytes */
    cr_assert_eq(inf_tokenizer_encode(tok, "a\xFF\xE2\x96", 4, 0, NULL, &ids), 0);
    cr_assert_gt(ids.n, 3);
    for (int i = 0; i < 3; i++) {
        const char *byte;
        size_t n;
        cr_assert_eq(inf_tokenizer_bytes(tok, ids.ids[ids.n - 3 + (size_t)i], &byte, &n), 0);
        cr_assert(n == 1 && *byte == "\xFF\xE2\x96"[i]);
    }
    inf_ids_clear(&ids);
    inf_ids_clear(&hi);
    inf_tokenizer_destroy(&tok);
}

static void refused(const char *word)
{
    struct shm_error err = {0};
    struct inf_tokenizer *tok = NULL;
    cr_expect_eq(inf_tokenizer_create(&family.src, &err, &tok), -EINVAL, "%s", word);
    cr_expect(strstr(err.text, word) && !tok, "\"%s\" lacks \"%s\"", err.text, word);
    inf_tokenizer_destroy(&tok);
    close_family(&family);
    open_family(json_object_get(json_object_get(goldens, "families"), "spm"), &family);
}

Test(tokenizers, damaged_scores_are_refused, .init = open_spm, .fini = close_spm)
{
    family.scores[300] = NAN;
    refused("score of token 300");
    family.scores[7] = -INFINITY;
    refused("score of token 7");
    family.src.scores = NULL;
    refused("no table of scores");
    for (uint32_t i = 0; i < family.src.tokens.n; i++)
        if (family.types[i] == INF_TOKEN_BYTE) {
            family.types[i] = INF_TOKEN_NORMAL;
            break;
        }
    refused("no token for the byte");
    family.bytes[0][family.offsets[0][10] + 1] = 'X'; /* <0x..> is <Xx..> */
    refused("no token for the byte");
}
