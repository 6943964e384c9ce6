/* SPDX-License-Identifier: MIT */
/* Tokenizer and detokenizer: reference ids, round trips, every split, damaged tables. */
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_detok.h"
#include "inferd/inf_pretok.h"
#include "inferd/inf_utf8.h"
#include "tok_fixture.h"

TestSuite(tokenizer, .timeout = 50);

static struct inf_tokenizer *tok;

static void open_tok(void)
{
    tok = tok_fixture_tokenizer();
}

static void close_tok(void)
{
    inf_tokenizer_destroy(&tok);
}

static struct inf_ids encode(const char *text, size_t len, unsigned flags)
{
    struct inf_ids ids = {0};
    struct shm_error err = {0};
    cr_assert_eq(inf_tokenizer_encode(tok, text, len, flags, &err, &ids), 0, "%s", shm_error_text(&err));
    return ids;
}

static void check_case(const char *text, size_t len, const json_t *want)
{
    struct inf_ids got = encode(text, len, INF_ENCODE_SPECIAL);
    cr_assert_eq(got.n, json_array_size(want), "%zu ids, not %zu: \"%s\"", got.n, json_array_size(want),
                 text);
    for (size_t i = 0; i < got.n; i++)
        cr_assert_eq(got.ids[i], json_integer_value(json_array_get(want, i)), "id %zu is %d: \"%s\"", i,
                     got.ids[i], text);
    inf_ids_clear(&got);
}

/* Decoding the bytes of all ids gives the text back. */
static void check_bytes(const char *text, size_t len, unsigned flags)
{
    struct inf_ids ids = encode(text, len, flags);
    size_t at = 0;
    for (size_t i = 0; i < ids.n; i++) {
        const char *bytes;
        size_t n;
        cr_assert_eq(inf_tokenizer_bytes(tok, ids.ids[i], &bytes, &n), 0);
        cr_assert(n <= len - at && !memcmp(text + at, bytes, n), "byte %zu of %zu", at, len);
        at += n;
    }
    cr_assert_eq(at, len);
    inf_ids_clear(&ids);
}

/* Through the detokenizer: the text, always whole characters. */
static void check_stream(const char *text, size_t len)
{
    struct inf_ids ids = encode(text, len, INF_ENCODE_SPECIAL);
    struct inf_detok *d = NULL;
    const char *out;
    size_t at = 0, n, step;
    cr_assert_eq(inf_detok_create(tok, true, &d), 0);
    for (size_t i = 0; i < ids.n; i++) {
        cr_assert_eq(inf_detok_push(d, ids.ids[i], &out, &n), 0);
        cr_assert(n <= len - at && !memcmp(text + at, out, n) && out[n] == 0);
        at += n;
        for (size_t k = 0; k < n; k += step)
            cr_assert_eq(inf_utf8_step((const unsigned char *)out + k, n - k, &step), INF_UTF8_OK);
    }
    inf_detok_flush(d, &out, &n);
    cr_assert_eq(n, 0);
    cr_assert_eq(at, len);
    inf_detok_destroy(&d);
    inf_ids_clear(&ids);
}

Test(tokenizer, reference_texts, .init = open_tok, .fini = close_tok)
{
    json_error_t e;
    json_t *all = json_load_file(tok_fixture_path("tests/data/goldens/tokenizer.json"), JSON_ALLOW_NUL, &e);
    cr_assert(all, "%s", e.text);
    cr_assert_eq(json_array_size(all), 47);
    for (size_t i = 0; i < 47; i++) {
        json_t *o = json_array_get(all, i), *text = json_object_get(o, "text");
        check_case(json_string_value(text), json_string_length(text), json_object_get(o, "ids"));
        check_stream(json_string_value(text), json_string_length(text));
    }
    json_decref(all);
}

Test(tokenizer, prompts, .init = open_tok, .fini = close_tok)
{
    json_error_t e;
    json_t *all = json_load_file(tok_fixture_path("tests/data/goldens/prompts.json"), 0, &e);
    cr_assert(all, "%s", e.text);
    json_t *prompts = json_object_get(all, "prompts");
    cr_assert_eq(json_array_size(prompts), 7);
    for (size_t i = 0; i < 7; i++) {
        json_t *o = json_array_get(prompts, i), *text = json_object_get(o, "text");
        check_case(json_string_value(text), json_string_length(text), json_object_get(o, "ids"));
    }
    json_decref(all);
}

Test(tokenizer, ten_thousand_reference_lines, .init = open_tok, .fini = close_tok)
{
    char command[4200], *line = NULL;
    size_t cap = 0, lines = 0;
    snprintf(command, sizeof command, "gzip -dc '%s'",
             tok_fixture_path("tests/data/goldens/tokenizer_fuzz.jsonl.gz"));
    FILE *in = popen(command, "r");
    cr_assert(in);
    for (ssize_t n; (n = getline(&line, &cap, in)) > 0; lines++) {
        json_error_t e;
        json_t *o = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &e), *text = json_array_get(o, 0);
        cr_assert(text, "line %zu: %s", lines + 1, e.text);
        check_case(json_string_value(text), json_string_length(text), json_array_get(o, 1));
        check_bytes(json_string_value(text), json_string_length(text), 0);
        check_stream(json_string_value(text), json_string_length(text));
        json_decref(o);
    }
    free(line);
    cr_assert_eq(pclose(in), 0);
    cr_assert_eq(lines, 10000);
}

/* The cuts by themselves: a small vocabulary hides wrong ones. */
Test(tokenizer, cuts_equal_reference)
{
    FILE *in = fopen(tok_fixture_path("tests/data/pretok_qwen2.jsonl"), "r");
    struct inf_pretok *pretok = NULL;
    char *line = NULL;
    size_t cap = 0, lines = 0;
    cr_assert(in && inf_pretok_create("qwen2", 5, NULL, &pretok) == 0);
    for (ssize_t n; (n = getline(&line, &cap, in)) > 0; lines++) {
        json_t *o = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, NULL), *ends = json_array_get(o, 1);
        cr_assert(ends);
        const char *text = json_string_value(json_array_get(o, 0));
        size_t len = json_string_length(json_array_get(o, 0)), at = 0, i = 0;
        for (; at < len; i++) {
            long piece = inf_pretok_next(pretok, text, len, at);
            cr_assert_gt(piece, 0);
            at += (size_t)piece;
            cr_assert_eq((json_int_t)at, json_integer_value(json_array_get(ends, i)), "line %zu: cut at %zu",
                         lines + 1, at);
        }
        cr_assert_eq(i, json_array_size(ends));
        json_decref(o);
    }
    cr_assert_eq(lines, 632);
    free(line);
    fclose(in);
    inf_pretok_destroy(&pretok);
}

Test(tokenizer, any_bytes_pass_through, .init = open_tok, .fini = close_tok)
{
    unsigned seed = 1;
    static const char *const parts[] = {
        "\xFF", "\xC3", "\xE2\x82",   "\xF0\x9F\x98", "\xED\xA0\x80",     "\xC0\x80",     "hello",
        " the", "\n",   "<|im_end|>", "  ",           "\xF4\x90\x80\x80", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
    for (int round = 0; round < 3000; round++) {
        char text[256];
        size_t len = 0;
        while (len < sizeof text - 16 && rand_r(&seed) % 12) {
            if (rand_r(&seed) % 4 == 0) {
                text[len++] = (char)rand_r(&seed);
            } else {
                const char *part = parts[(unsigned)rand_r(&seed) % (sizeof parts / sizeof parts[0])];
                memcpy(text + len, part, strlen(part));
                len += strlen(part);
            }
        }
        check_bytes(text, len, 0);
        check_bytes(text, len, INF_ENCODE_SPECIAL);
    }
    struct inf_ids ids = encode("a\xFF", 2, 0);
    cr_assert_eq(ids.n, 2);
    cr_assert_eq(ids.ids[1], inf_tokenizer_find(tok, "\xFF", 1));
    inf_ids_clear(&ids);
}

Test(tokenizer, special_only_when_asked_and_longest_first)
{
    struct tok_fixture f;
    tok_fixture_open(&f);
    /* The last three tokens become: x, <y>, <y>z */
    uint32_t n = f.src.tokens.n;
    char *at = f.token_bytes + f.token_offsets[n - 3];
    memcpy(at, "x<y><y>z", 8);
    f.token_offsets[n - 2] = f.token_offsets[n - 3] + 1;
    f.token_offsets[n - 1] = f.token_offsets[n - 3] + 4;
    f.token_offsets[n] = f.token_offsets[n - 3] + 8;
    f.types[n - 1] = INF_TOKEN_USER_DEFINED;
    struct shm_error err = {0};
    cr_assert_eq(inf_tokenizer_create(&f.src, &err, &tok), 0, "%s", shm_error_text(&err));
    struct inf_ids ids = encode("<y>zx<y>", 8, INF_ENCODE_SPECIAL);
    cr_assert(ids.n == 3 && ids.ids[0] == (int32_t)n - 1 && ids.ids[1] == (int32_t)n - 3 &&
              ids.ids[2] == (int32_t)n - 2);
    inf_ids_clear(&ids);
    ids = encode("<y>zx<y>", 8, 0);
    for (size_t i = 0; i < ids.n; i++)
        cr_assert_lt(ids.ids[i], (int32_t)n - 3);
    inf_ids_clear(&ids);
    cr_assert(inf_tokenizer_is_control(tok, (int32_t)n - 2) &&
              !inf_tokenizer_is_control(tok, (int32_t)n - 1));
    close_tok();
    tok_fixture_close(&f);
}

Test(tokenizer, bos_and_stop_ids)
{
    struct tok_fixture f;
    struct shm_error err = {0};
    tok_fixture_open(&f);
    f.src.bos_id = 4093;
    f.src.add_bos = true;
    cr_assert_eq(inf_tokenizer_create(&f.src, &err, &tok), 0, "%s", shm_error_text(&err));
    struct inf_ids ids = encode("a", 1, INF_ENCODE_BOS);
    cr_assert(ids.n == 2 && ids.ids[0] == 4093 && ids.ids[1] == 64);
    inf_ids_clear(&ids);
    ids = encode("a", 1, 0);
    cr_assert(ids.n == 1 && ids.ids[0] == 64);
    inf_ids_clear(&ids);
    cr_assert(inf_tokenizer_is_stop(tok, 4093) && inf_tokenizer_is_stop(tok, 4095) &&
              !inf_tokenizer_is_stop(tok, 4094));
    cr_assert(!inf_tokenizer_is_stop(tok, -1) && inf_tokenizer_find(tok, "<|im_end|>", 10) == 4095);
    close_tok();
    tok_fixture_close(&f);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Words beyond the short path against the definition: again and again the
 * best rank, leftmost. Lower-case letters stand for themselves. */
Test(tokenizer, long_word_equals_definition)
{
    struct tok_fixture f;
    tok_fixture_open(&f);
    uint32_t n_merges = f.src.merges.n;
    char **by_rank = malloc(n_merges * sizeof *by_rank), **sorted = malloc(n_merges * sizeof *sorted);
    for (uint32_t i = 0; i < n_merges; i++)
        sorted[i] = by_rank[i] =
            strndup(f.merge_bytes + f.merge_offsets[i], f.merge_offsets[i + 1] - f.merge_offsets[i]);
    uint32_t *rank = malloc(n_merges * sizeof *rank);
    qsort(sorted, n_merges, sizeof *sorted, by_text);
    for (uint32_t i = 0; i < n_merges; i++)
        rank[(char **)bsearch(&by_rank[i], sorted, n_merges, sizeof *sorted, by_text) - sorted] = i;
    open_tok();
    unsigned seed = 7;
    for (int round = 0; round < 12; round++) {
        enum { LEN = 300 };
        char word[LEN + 1], key[2 * LEN + 2];
        int cut[LEN + 1], n = LEN;
        for (int i = 0; i < LEN; i++)
            word[i] = round % 3 ? "etaoinshrdlu"[rand_r(&seed) % (round % 3 == 1 ? 12 : 3)] : 'o';
        for (int i = 0; i <= LEN; i++)
            cut[i] = i;
        for (;;) {
            uint32_t best = UINT32_MAX;
            int at = 0;
            for (int i = 0; i + 1 < n; i++) {
                snprintf(key, sizeof key, "%.*s %.*s", cut[i + 1] - cut[i], word + cut[i],
                         cut[i + 2] - cut[i + 1], word + cut[i + 1]);
                char *want = key, **hit = bsearch(&want, sorted, n_merges, sizeof *sorted, by_text);
                if (hit && rank[hit - sorted] < best) {
                    best = rank[hit - sorted];
                    at = i;
                }
            }
            if (best == UINT32_MAX)
                break;
            memmove(&cut[at + 1], &cut[at + 2], (size_t)(n - at - 1) * sizeof *cut);
            n--;
        }
        struct inf_ids ids = encode(word, LEN, 0);
        cr_assert_eq(ids.n, (size_t)n);
        for (int i = 0; i < n; i++)
            cr_assert_eq(ids.ids[i], inf_tokenizer_find(tok, word + cut[i], (size_t)(cut[i + 1] - cut[i])));
        inf_ids_clear(&ids);
    }
    close_tok();
    for (uint32_t i = 0; i < n_merges; i++)
        free(by_rank[i]);
    free(by_rank);
    free(sorted);
    free(rank);
    tok_fixture_close(&f);
}

/* A quadratic merge or split would run into the timeout. */
Test(tokenizer, huge_words_and_blanks, .init = open_tok, .fini = close_tok, .timeout = 30)
{
    size_t len = 1 << 20;
    char *text = malloc(len);
    for (const char *c = "a \n!="; *c; c++) {
        memset(text, *c, len);
        check_bytes(text, len, INF_ENCODE_SPECIAL);
    }
    for (size_t i = 0; i < len; i++)
        text[i] = "etaoin"[i * 2654435761u >> 7 & 3];
    check_bytes(text, len, 0);
    free(text);
}

Test(tokenizer, detokenizer_cut_anywhere, .init = open_tok, .fini = close_tok)
{
    static const char text[] = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z\xF0\x9F\x87\xA9\xF0\x9F\x87\xAA.";
    size_t len = sizeof text - 1, n;
    struct inf_detok *d = NULL;
    const char *out;
    cr_assert_eq(inf_detok_create(tok, false, &d), 0);
    for (size_t cut = 0; cut <= len; cut++) {
        char got[128];
        size_t at = 0, whole = 0, step;
        for (size_t i = 0; i < cut; i++) { /* a token a byte: the worst case */
            cr_assert_eq(inf_detok_push(d, inf_tokenizer_find(tok, text + i, 1), &out, &n), 0);
            memcpy(got + at, out, n);
            at += n;
            while (whole <= i &&
                   inf_utf8_step((const unsigned char *)text + whole, i + 1 - whole, &step) == INF_UTF8_OK)
                whole += step;
            cr_assert(at == whole && !memcmp(got, text, at), "a character is late or split");
        }
        inf_detok_flush(d, &out, &n);
        cr_assert_eq(n, cut == whole ? 0 : 3);
        cr_assert(!n || !memcmp(out, "\xEF\xBF\xBD", 4));
    }
    inf_detok_destroy(&d);
}

static void expect_stream(bool show, const char *bytes, const char *want)
{
    struct inf_detok *d = NULL;
    const char *out;
    char got[256];
    size_t n, at = 0;
    cr_assert_eq(inf_detok_create(tok, show, &d), 0);
    for (; *bytes; bytes++) {
        int32_t id = *bytes == '@' ? 4095 : inf_tokenizer_find(tok, bytes, 1);
        cr_assert_eq(inf_detok_push(d, id, &out, &n), 0);
        memcpy(got + at, out, n);
        at += n;
    }
    inf_detok_flush(d, &out, &n);
    memcpy(got + at, out, n + 1);
    cr_assert_str_eq(got, want);
    cr_assert_eq(inf_detok_push(d, -1, &out, &n), -ERANGE);
    cr_assert_eq(inf_detok_push(d, 4096, &out, &n), -ERANGE);
    inf_detok_destroy(&d);
}

/* "@" stands for <|im_end|>, every other byte for its own token. */
Test(tokenizer, detokenizer_broken_and_control, .init = open_tok, .fini = close_tok)
{
#define FFFD "\xEF\xBF\xBD"
    expect_stream(false, "a\xE2\x82z", "a" FFFD "z");
    expect_stream(false, "\xFF\x80\xC3\xA9", FFFD FFFD "\xC3\xA9");
    expect_stream(false, "\xED\xA0\x80", FFFD FFFD FFFD);
    expect_stream(false, "\xF0\x9F\x98\xF0\x9F\x98\x80", FFFD "\xF0\x9F\x98\x80");
    expect_stream(false, "\xC1\xBF", FFFD FFFD);
    expect_stream(false, "\xE0\x9F\xBF", FFFD FFFD FFFD);
    expect_stream(false, "\xF0\x8F\xBF\xBF", FFFD FFFD FFFD FFFD);
    expect_stream(false, "\xF4\x90\x80\x80", FFFD FFFD FFFD FFFD);
    expect_stream(false, "\xF4\x8F\xBF\xBF\xEE\x80\x80", "\xF4\x8F\xBF\xBF\xEE\x80\x80");
    expect_stream(false, "hi@.", "hi.");
    expect_stream(true, "hi@.", "hi<|im_end|>.");
    expect_stream(true, "\xE2@", FFFD "<|im_end|>");
}

/* A token that ends inside a character, behind whole ones. */
Test(tokenizer, detokenizer_holds_a_tokens_end)
{
    struct tok_fixture f;
    struct inf_detok *d = NULL;
    const char *out;
    size_t n;
    tok_fixture_open(&f);
    memcpy(f.token_bytes + f.token_offsets[4095], "zzzzzzzz\xE2\x82", 10);
    f.types[4095] = INF_TOKEN_USER_DEFINED;
    cr_assert_eq(inf_tokenizer_create(&f.src, NULL, &tok), 0);
    cr_assert_eq(inf_detok_create(tok, false, &d), 0);
    cr_assert_eq(inf_detok_push(d, 4095, &out, &n), 0);
    cr_assert_str_eq(out, "zzzzzzzz");
    cr_assert_eq(inf_detok_push(d, inf_tokenizer_find(tok, "\xAC", 1), &out, &n), 0);
    cr_assert_str_eq(out, "\xE2\x82\xAC");
    inf_detok_destroy(&d);
    close_tok();
    tok_fixture_close(&f);
}

static void refused(struct tok_fixture *f, int code, const char *word)
{
    struct shm_error err = {0};
    struct inf_tokenizer *t = NULL;
    int rc = inf_tokenizer_create(&f->src, &err, &t);
    cr_expect(rc == code && !t, "%s: %d", word, rc);
    cr_expect(strstr(err.text, word) && !strchr(err.text, '\n'), "\"%s\" lacks \"%s\"", err.text, word);
    inf_tokenizer_destroy(&t);
    tok_fixture_close(f);
    tok_fixture_open(f);
}

Test(tokenizer, damaged_tables_are_refused)
{
    struct tok_fixture f;
    tok_fixture_open(&f);
    uint32_t n = f.src.tokens.n;

    f.token_offsets[n] = UINT32_MAX;
    refused(&f, -EINVAL, "token 4095 spans");
    f.token_offsets[7] = f.token_offsets[8] + 1;
    refused(&f, -EINVAL, "token 7 spans");
    f.merge_offsets[5] = UINT32_MAX;
    refused(&f, -EINVAL, "merge 4 spans");
    f.src.tokens.size_bytes--;
    refused(&f, -EINVAL, "token 4095 spans");
    f.src.merges.size_bytes = 0;
    refused(&f, -EINVAL, "merge 0 spans");
    f.src.tokens.n = UINT32_MAX;
    refused(&f, -EINVAL, "4294967295 tokens");
    f.src.merges.n = UINT32_MAX;
    refused(&f, -EINVAL, "4294967295 merges");
    f.src.tokens.offsets = NULL;
    refused(&f, -EINVAL, "no table of tokens");
    f.src.merges.bytes = NULL;
    refused(&f, -EINVAL, "no table of merges");
    f.src.tokens.n = 0;
    refused(&f, -EINVAL, "eos token");
    f.src.tokens.n = 100;
    f.src.eos_id = -1;
    refused(&f, -EINVAL, "no token for the byte");

    f.types[3] = 0;
    refused(&f, -EINVAL, "token 3 has type 0");
    f.types[3] = INT32_MIN;
    refused(&f, -EINVAL, "has type -2147483648");
    f.types[64] = INF_TOKEN_CONTROL;
    refused(&f, -EINVAL, "byte 0x61");
    f.token_bytes[f.token_offsets[1]] = '!';
    refused(&f, -EINVAL, "tokens 0 and 1 are the same");

    f.src.eos_id = 4096;
    refused(&f, -EINVAL, "eos token 4096");
    f.src.bos_id = INT32_MIN;
    refused(&f, -EINVAL, "bos token");
    f.src.add_bos = true;
    refused(&f, -EINVAL, "names none");

    char *space = memchr(f.merge_bytes, ' ', f.src.merges.size_bytes);
    *space = 'x';
    refused(&f, -EINVAL, "merge 0");
    f.merge_bytes[0] = ' ';
    refused(&f, -EINVAL, "merge 0");
    f.merge_bytes[f.merge_offsets[9] - 1] = '\xFF';
    refused(&f, -EINVAL, "merge 8");
    f.types[256] = INF_TOKEN_UNUSED; /* what merge 0 makes */
    refused(&f, -EINVAL, "merge 0,");
    f.merge_offsets[1] = f.merge_offsets[0];
    refused(&f, -EINVAL, "merge 0, \"\"");
    memcpy(f.merge_offsets, (uint32_t[]){f.merge_offsets[1], f.merge_offsets[2]},
           8); /* then merge 1 ends before it starts */
    refused(&f, -EINVAL, "merge 1");

    f.src.pre = "nonesuch";
    f.src.pre_len = 8;
    refused(&f, -ENOTSUP, "\"nonesuch\"");
    f.src.pre_len = 0;
    refused(&f, -ENOTSUP, "pre-tokenizer \"\"");
    tok_fixture_close(&f);
}

Test(tokenizer, duplicate_merge_is_refused)
{
    struct tok_fixture f;
    tok_fixture_open(&f);
    uint32_t n = 2, len = f.merge_offsets[1];
    memcpy(f.merge_bytes + len, f.merge_bytes, len);
    f.merge_offsets[2] = 2 * len;
    f.src.merges.n = n;
    refused(&f, -EINVAL, "merges 0 and 1 are the same");
    tok_fixture_close(&f);
}

/* Random damage: refused or harmless, never a crash (run it under ASan too). */
Test(tokenizer, random_damage)
{
    unsigned seed = 3;
    struct tok_fixture f;
    tok_fixture_open(&f);
    for (int round = 0; round < 150; round++) {
        struct inf_string_table *t = round % 2 ? &f.src.tokens : &f.src.merges;
        uint32_t at = (uint32_t)rand_r(&seed) % t->n;
        uint32_t *offset = (round % 2 ? f.token_offsets : f.merge_offsets) + at, was_offset = *offset;
        char *byte = (round % 2 ? f.token_bytes : f.merge_bytes) + (uint32_t)rand_r(&seed) % t->size_bytes,
             was = *byte;
        if (round % 3)
            *byte = (char)rand_r(&seed);
        else
            *offset += (uint32_t)(rand_r(&seed) % 9) - 4;
        struct inf_tokenizer *damaged = NULL;
        if (inf_tokenizer_create(&f.src, NULL, &damaged) == 0) {
            struct inf_ids ids = {0};
            cr_assert_eq(
                inf_tokenizer_encode(damaged, "The king's <|im_end|> \xFF\xE2\x82", 26, 1, NULL, &ids), 0);
            inf_ids_clear(&ids);
            inf_tokenizer_destroy(&damaged);
        }
        *byte = was;
        *offset = was_offset;
    }
    tok_fixture_close(&f);
}
