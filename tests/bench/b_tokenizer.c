/* SPDX-License-Identifier: MIT */
/*
 * b_tokenizer [FILE]: time to build tokenizers (the shipped model's and one of
 * the size of Qwen3's) and encoding speed on FILE, else on the longest
 * reference prompt. "first" starts with an empty word cache.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "inferd/inf_tokenizer.h"
#include "tests/unit/tok_fixture.h"

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double build_ms(const struct inf_tokenizer_src *src)
{
    double best = 1e9;
    for (int i = 0; i < 7; i++) {
        struct inf_tokenizer *tok = NULL;
        struct shm_error err = {0};
        double start = now_s();
        if (inf_tokenizer_create(src, &err, &tok)) {
            fprintf(stderr, "%s\n", shm_error_text(&err));
            exit(1);
        }
        double took = now_s() - start;
        best = took < best ? took : best;
        inf_tokenizer_destroy(&tok);
    }
    return best * 1e3;
}

struct packer {
    uint32_t *offsets, n;
    char *bytes;
};

static void put(struct packer *p, const char *text)
{
    size_t len = strlen(text);
    memcpy(p->bytes + p->offsets[p->n], text, len);
    p->offsets[p->n + 1] = p->offsets[p->n] + (uint32_t)len;
    p->n++;
}

static struct inf_string_table table_of(const struct packer *p)
{
    return (struct inf_string_table){p->n, p->offsets, p->bytes, p->offsets[p->n]};
}

/* All strings of two and three letters: 143,312 merges. */
static void build_large(const struct tok_fixture *f)
{
    enum { MAX = 150000 };
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    struct packer tokens = {calloc(MAX, 4), 0, malloc(MAX * 8)},
                  merges = {calloc(MAX, 4), 0, malloc(MAX * 8)};
    char text[16];
    if (!tokens.offsets || !tokens.bytes || !merges.offsets || !merges.bytes)
        exit(1);
    for (int i = 0; i < 256; i++) {
        snprintf(text, sizeof text, "%.*s", (int)(f->token_offsets[i + 1] - f->token_offsets[i]),
                 f->token_bytes + f->token_offsets[i]);
        put(&tokens, text);
    }
    for (int k = 2; k <= 3; k++)
        for (int i = 0; i < (k == 2 ? 52 : 52 * 52); i++)
            for (int j = 0; j < 52; j++) {
                char left[3] = {letters[i % 52], k == 3 ? letters[i / 52] : 0, 0};
                snprintf(text, sizeof text, "%s%c", left, letters[j]);
                put(&tokens, text);
                snprintf(text, sizeof text, "%s %c", left, letters[j]);
                put(&merges, text);
            }
    struct inf_tokenizer_src src = f->src;
    src.tokens = table_of(&tokens);
    src.merges = table_of(&merges);
    src.types = NULL;
    src.eos_id = -1;
    printf("build %6u tokens, %6u merges: %7.2f ms\n", src.tokens.n, src.merges.n, build_ms(&src));
    free(tokens.offsets);
    free(tokens.bytes);
    free(merges.offsets);
    free(merges.bytes);
}

int main(int argc, char **argv)
{
    struct tok_fixture f;
    tok_fixture_open(&f);
    printf("build %6u tokens, %6u merges: %7.2f ms\n", f.src.tokens.n, f.src.merges.n, build_ms(&f.src));
    build_large(&f);
    struct inf_tokenizer *tok = tok_fixture_tokenizer();
    const char *path = argc > 1 ? argv[1] : tok_fixture_path("tests/data/goldens/prompts.json");
    FILE *in = fopen(path, "rb");
    size_t cap = 64ul << 20, len;
    char *text = malloc(cap);
    if (!in || !text) {
        perror(path);
        return 1;
    }
    len = fread(text, 1, cap, in);
    fclose(in);
    struct inf_ids ids = {0};
    double best = 1e9, first = 0;
    for (int i = 0; i < 8; i++) {
        ids.n = 0;
        double start = now_s();
        if (inf_tokenizer_encode(tok, text, len, INF_ENCODE_SPECIAL, NULL, &ids))
            return 1;
        double took = now_s() - start;
        first = i ? first : took;
        best = took < best ? took : best;
    }
    printf("encode %s: %.2f MB to %zu ids; first %.1f MB/s, best %.1f MB/s\n", path, (double)len / 1e6, ids.n,
           (double)len / 1e6 / first, (double)len / 1e6 / best);
    inf_ids_clear(&ids);
    inf_tokenizer_destroy(&tok);
    tok_fixture_close(&f);
    free(text);
    return 0;
}
