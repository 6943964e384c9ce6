/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: what it writes loads, the same seed gives the same bytes whatever
 * the threads, routing is as skewed as calibrated, impossible shapes are
 * refused in one line, and nothing half-written stays behind.
 */
#include "expertd/exd_model.h"
#include "tools/mkm_model.h"
#include "tools/mkm_rng.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

TestSuite(mkmodel, .timeout = 120);

static char *path_of(const char *what)
{
    static char paths[4][96];
    static unsigned turn;
    char *p = paths[turn++ % 4];

    snprintf(p, sizeof paths[0], "./t_mkmodel.%d.%s", (int)getpid(), what);
    return p;
}

static bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static struct mkm_shape preset(const char *name)
{
    struct mkm_shape sh;
    cr_assert_eq(mkm_preset(name, &sh), 0);
    return sh;
}

static void write_model(struct mkm_shape *sh, const char *path, uint32_t threads)
{
    struct mkm_written written;
    struct shm_error err = {0};
    struct stat st;

    cr_assert_eq(mkm_check(sh, &err), 0, "%s", err.text);
    cr_assert_eq(mkm_write(sh, path, threads, false, NULL, &written, &err), 0, "%s", err.text);
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq((uint64_t)st.st_size, written.bytes);
}

/* ---- formats ---- */

Test(mkmodel, half_precision_is_inverse_of_the_decoder)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        float x = krn_f16_to_f32((uint16_t)h);
        if (!isfinite(x) || h == 0x8000)
            continue;
        cr_assert_eq(mkm_f32_to_f16(x), h, "0x%04x", h);
        if ((h & 0x7fff) < 0x7bff) { /* halfway to the next goes to the even one */
            float next = krn_f16_to_f32((uint16_t)(h + 1));
            cr_assert_eq(mkm_f32_to_f16((x + next) / 2), h & 1 ? h + 1 : h, "0x%04x", h);
        }
    }
    cr_assert_eq(mkm_f32_to_f16(1e9f), 0x7bff);
}

Test(mkmodel, random_blocks_have_the_asked_mean_and_deviation)
{
    enum { N = 1 << 16 };
    static const double sigmas[] = {0.35 / 45.25, 0.5 / 27.7, 0.1,
                                    1.0}; /* those of large models, and others */
    float *x = malloc(N * sizeof *x);
    unsigned char *blocks = malloc(N * 4);

    for (int t = 0; t < KRN_TYPE_COUNT; t++) {
        const struct krn_type *type = &krn_type_table()[t];
        for (size_t s = 0; s < sizeof sigmas / sizeof *sigmas; s++) {
            uint64_t state = 5;
            double sum = 0, square = 0, deviation;
            mkm_random_blocks(type, sigmas[s], &state, blocks, N);
            krn_dequant_row(type, blocks, x, N);
            for (int i = 0; i < N; i++) {
                cr_assert(isfinite(x[i]));
                sum += x[i];
                square += (double)x[i] * x[i];
            }
            deviation = sqrt(square / N);
            cr_assert(fabs(deviation / sigmas[s] - 1) < 0.05, "%s: deviation %g, asked %g", type->name,
                      deviation, sigmas[s]);
            cr_assert(fabs(sum / N) < 0.03 * sigmas[s], "%s: mean %g at deviation %g", type->name, sum / N,
                      sigmas[s]);
        }
    }
    free(x);
    free(blocks);
}

Test(mkmodel, encoder_and_decoder_agree)
{
    enum { N = 4096 };
    static const struct {
        const char *name;
        double error; /* RMS error over RMS */
    } bounds[KRN_TYPE_COUNT] = {{"F32", 0},     {"F16", 4e-4},  {"BF16", 3e-3},  {"Q8_0", 8e-3},
                                {"Q4_0", 0.11}, {"Q4_K", 0.09}, {"Q5_K", 0.045}, {"Q6_K", 0.03}};
    float x[N], y[N];
    unsigned char blocks[N * 4];
    uint64_t state = 3;

    for (int i = 0; i < N; i++)
        x[i] = mkm_normal(&state) + (i % 3 ? 1.0f : -1.0f);
    for (size_t t = 0; t < KRN_TYPE_COUNT; t++) {
        const struct krn_type *type = krn_type_by_name(bounds[t].name);
        double wrong = 0, all = 0;
        mkm_encode(type, x, blocks, N);
        krn_dequant_row(type, blocks, y, N);
        for (int i = 0; i < N; i++) {
            wrong += pow((double)x[i] - y[i], 2);
            all += pow(x[i], 2);
        }
        cr_assert(sqrt(wrong / all) <= bounds[t].error, "%s: %g", type->name, sqrt(wrong / all));
        memset(x, 0, 256 * sizeof *x); /* all-zero blocks stay zero */
        mkm_encode(type, x, blocks, 256);
        krn_dequant_row(type, blocks, y, 256);
        for (int i = 0; i < 256; i++)
            cr_assert_eq(y[i], 0.0f);
    }
}

/* ---- the file ---- */

Test(mkmodel, every_type_loads)
{
    static const char *const types[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"};
    const char *path = path_of("types");

    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct mkm_shape sh = preset("tiny");
        struct prt_gguf *gguf = NULL;
        struct exd_model *model = NULL;
        struct shm_error err = {0};

        sh.layers = 2;
        sh.experts_type = sh.embd_type = sh.attn_type = krn_type_by_name(types[i]);
        sh.down_type = krn_type_by_name(types[(i + 1) % 8]);
        write_model(&sh, path, 2);
        cr_assert_eq(prt_gguf_open(path, &gguf, &err), 0, "%s: %s", types[i], err.text);
        cr_assert_eq(exd_model_open(gguf, &model, &err), 0, "%s: %s", types[i], err.text);
        cr_assert_eq(model->n_ignored, 0);
        cr_assert(model->hp.layers == 2 && model->hp.hidden == 256 && model->hp.experts == 16 &&
                  model->hp.experts_used == 4 && model->hp.vocab == 4096 && model->hp.expert_ffn == 256);
        cr_assert_eq(model->layer[1].part[EXD_PART_DOWN].type, sh.down_type->ggml_id);
        cr_assert_eq(model->layer[0].part[EXD_PART_GATE].type, sh.experts_type->ggml_id);
        cr_assert_eq(model->tok.tokens.count, 4096);
        exd_model_close(&model);
        prt_gguf_close(&gguf);
        unlink(path);
    }
}

Test(mkmodel, story_shape_loads)
{
    struct mkm_shape sh = preset("story");
    const char *path = path_of("story");
    struct prt_gguf *gguf = NULL;
    struct exd_model *model = NULL;
    struct shm_error err = {0};

    write_model(&sh, path, 1);
    cr_assert_eq(prt_gguf_open(path, &gguf, &err), 0, "%s", err.text);
    cr_assert_eq(exd_model_open(gguf, &model, &err), 0, "%s", err.text);
    cr_assert_eq(model->hp.rope_base, 10000.0f);
    exd_model_close(&model);
    prt_gguf_close(&gguf);
    unlink(path);
}

static uint64_t file_hash(const char *path)
{
    unsigned char buf[65536];
    FILE *f = fopen(path, "rb");
    uint64_t h = 1469598103934665603u;
    size_t n;

    cr_assert_not_null(f);
    while ((n = fread(buf, 1, sizeof buf, f)) > 0)
        for (size_t i = 0; i < n; i++)
            h = (h ^ buf[i]) * 1099511628211u;
    fclose(f);
    return h;
}

Test(mkmodel, same_seed_same_bytes_whatever_the_threads)
{
    struct mkm_shape sh = preset("tiny");
    char *a = path_of("a");
    uint64_t one, seven, other;

    sh.hidden = 512; /* several jobs a tensor */
    sh.ffn = 512;
    sh.experts = 64;
    write_model(&sh, a, 1);
    one = file_hash(a);
    write_model(&sh, a, 7); /* over the old one */
    seven = file_hash(a);
    sh.seed = 2;
    write_model(&sh, a, 2);
    other = file_hash(a);
    cr_assert_eq(one, seven);
    cr_assert_neq(one, other);
    cr_assert(!exists(strcat(strcpy((char[128]){0}, a), ".partial")));
    unlink(a);
}

/* Embedding row = s + noise; the head is silent for bytes and special tokens, so output is words. */
Test(mkmodel, embedding_and_head_are_built_as_said)
{
    struct mkm_shape sh = preset("tiny");
    const char *path = path_of("embd");
    struct prt_gguf *gguf = NULL;
    struct shm_error err = {0};
    const char *names[] = {"token_embd.weight", "output.weight"};
    float s[256], row[256];
    FILE *f;

    sh.embd_type = krn_type_by_name("F32");
    write_model(&sh, path, 2);
    mkm_common_vector(&sh, s);
    cr_assert_eq(prt_gguf_open(path, &gguf, &err), 0, "%s", err.text);
    f = fopen(path, "rb");
    for (int n = 0; n < 2; n++) {
        const struct prt_gguf_tensor *t = prt_gguf_find_tensor(gguf, names[n]);
        for (uint32_t id = 0; id < sh.vocab; id += id == 300 ? 3700 : 1) {
            double along = 0, square = 0;
            bool silent = n == 1 && (id < 256 || id >= sh.vocab - MKM_SPECIALS);
            cr_assert_eq(fseek(f, (long)(t->offset + id * sizeof row), SEEK_SET), 0);
            cr_assert_eq(fread(row, 1, sizeof row, f), sizeof row);
            for (int i = 0; i < 256; i++) {
                along += (double)row[i] * s[i] / 256;
                square += (double)row[i] * row[i] / 256;
            }
            if (n == 0)
                cr_assert(fabs(along - 1) < 0.3 && fabs(square - 2) < 0.8, "row %u: %g %g", id, along,
                          square);
            else
                cr_assert_eq(square == 0, silent, "row %u: %g", id, square);
        }
    }
    fclose(f);
    prt_gguf_close(&gguf);
    unlink(path);
}

Test(mkmodel, failures_leave_nothing_behind)
{
    struct mkm_shape sh = preset("tiny");
    struct mkm_written written;
    struct shm_error err = {0};
    atomic_int cancel = 1;
    char *path = path_of("gone"), partial[128];
    struct rlimit small = {1 << 20, 1 << 20};

    snprintf(partial, sizeof partial, "%s.partial", path);
    cr_assert_eq(mkm_check(&sh, &err), 0);
    cr_assert_eq(mkm_write(&sh, path, 2, false, &cancel, &written, &err), -ECANCELED);
    cr_assert(!exists(path) && !exists(partial));
    cr_assert_eq(mkm_write(&sh, "./no/such/dir/x", 2, false, NULL, &written, &err), -ENOENT);
    cr_assert(strstr(err.text, "./no/such/dir/x"), "%s", err.text);

    /* Stands for a full disk: an older file of that name stays as it was. */
    FILE *f = fopen(path, "w");
    fputs("old", f);
    fclose(f);
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    cr_assert_eq(mkm_write(&sh, path, 2, false, NULL, &written, &err), -EFBIG, "%s", err.text);
    cr_assert(strstr(err.text, path), "%s", err.text);
    cr_assert(exists(path) && !exists(partial));
    unlink(path);
}

Test(mkmodel, impossible_shapes_are_refused_in_one_line)
{
    struct {
        const char *what; /* must be named */
        struct mkm_shape sh;
    } bad[12];
    int n = 0;
#define BAD(name, change) (bad[n].what = name, bad[n].sh = preset("tiny"), bad[n].sh.change, n++)
    BAD("--layers", layers = 0);
    BAD("--topk", topk = 17);
    BAD("--kv-heads", kv_heads = 3);
    BAD("--head-dim", head_dim = 63);
    BAD("--vocab", vocab = 300);
    BAD("--experts", experts = 100000);
    BAD("--down-type", ffn = 64);
    BAD("--experts-type", hidden = 96);
    BAD("--skew", skew = -1);
    BAD("--kv-heads", kv_heads = 5);
    BAD("--embd-type", hidden = 272);
#undef BAD
    bad[10].sh.experts_type = bad[10].sh.attn_type = krn_type_by_name("F16");
    for (int i = 0; i < n; i++) {
        struct shm_error err = {0};
        cr_assert_eq(mkm_check(&bad[i].sh, &err), -EINVAL, "%d", i);
        cr_assert(strstr(err.text, bad[i].what) && !strchr(err.text, '\n'), "%d: %s", i, err.text);
    }
    struct mkm_shape huge = preset("tiny");
    struct mkm_plan plan;
    struct shm_error err = {0};
    huge.layers = 1024;
    huge.experts = 1024;
    huge.hidden = huge.ffn = 1 << 20;
    cr_assert_eq(mkm_check(&huge, &err), 0, "%s", err.text);
    cr_assert_eq(mkm_plan_make(&huge, &plan, &err), -EOVERFLOW);
}

/* ---- routing ---- */

/* A minute of arithmetic under sanitizers. */
Test(mkmodel, routing_is_as_skewed_as_calibrated, .timeout = 450)
{
    /* Half the width and fewer layers than qwen3-30b-a3b: the shares are those of E and k. */
    struct mkm_shape sh = preset("qwen3-30b-a3b");
    struct mkm_simulation sim;
    struct shm_error err = {0};
    double at[MKM_SIM_POINTS];

    sh.hidden = 512;
    sh.layers = 4;
    cr_assert_eq(mkm_simulate(&sh, 2, &sim, &err), 0, "%s", err.text);
    for (int i = 0; i < MKM_SIM_POINTS; i++)
        at[i] = sim.unrouted[i];
    cr_assert(sim.tokens[2] == 1046 && at[2] > 0.37 && at[2] < 0.47, "1046: %g", at[2]);
    cr_assert(sim.tokens[3] == 1979 && at[3] > 0.18 && at[3] < 0.26, "1979: %g", at[3]);
    cr_assert(sim.tokens[6] == 31000 && at[6] > 0.015 && at[6] < 0.045, "31000: %g", at[6]);

    sh.skew = 0; /* even: 8 of 128 at random leave nobody out after 1,046 tokens */
    sh.hidden = 256;
    sh.layers = 1;
    cr_assert_eq(mkm_simulate(&sh, 2, &sim, &err), 0, "%s", err.text);
    cr_assert(sim.unrouted[2] == 0 && sim.used_by[0] < 0.12, "%g", sim.used_by[0]);
}

/* ---- text ---- */

/* Where left+right stands among the merges, or UINT32_MAX. */
static uint32_t rank_of(const struct mkm_vocab *v, const char *left, const char *right)
{
    const char *p = v->merges;
    char want[64];
    size_t n = (size_t)snprintf(want, sizeof want, "%s %s", left, right);

    for (uint32_t i = 0; i < v->n_merges; i++) {
        uint64_t bytes;
        memcpy(&bytes, p, 8);
        if (bytes == n && !memcmp(p + 8, want, n))
            return i;
        p += 8 + bytes;
    }
    return UINT32_MAX;
}

/* Number of tokens that byte-pair merging leaves of one word of letters with a space before it. */
static unsigned tokens_of_word(const struct mkm_vocab *v, const char *word, size_t letters,
                               char ret_first[16])
{
    char parts[16][16] = {"\xc4\xa0"};
    unsigned n = 1;

    for (size_t i = 0; i < letters; i++, n++)
        parts[n][0] = word[i];
    for (;;) {
        uint32_t best = UINT32_MAX;
        unsigned at = 0;
        for (unsigned i = 0; i + 1 < n; i++) {
            uint32_t rank = rank_of(v, parts[i], parts[i + 1]);
            if (rank < best) {
                best = rank;
                at = i;
            }
        }
        if (best == UINT32_MAX)
            break;
        memcpy(parts[at] + strnlen(parts[at], 8), parts[at + 1], 8); /* words are at most 8 bytes */
        memmove(parts + at + 1, parts + at + 2, sizeof parts[0] * (n - at - 2));
        memset(parts + n - 1, 0, sizeof parts[0]);
        n--;
    }
    memcpy(ret_first, parts[0], 16);
    return n;
}

Test(mkmodel, each_word_of_text_is_one_token)
{
    struct mkm_shape sh = preset("tiny");
    struct mkm_vocab v;
    char *text = NULL, first[16];
    size_t size;
    FILE *out;
    unsigned words = 0;

    sh.vocab = 22000; /* words of three syllables too */
    cr_assert_eq(mkm_vocab_make(sh.vocab, &v), 0);
    cr_assert_eq(v.n_tokens, 22000);
    out = open_memstream(&text, &size);
    cr_assert_eq(mkm_text(&sh, &v, 400, out), 0);
    fclose(out);
    for (char *p = text; *p == ' '; words++) {
        size_t letters = strcspn(p + 1, " ");
        cr_assert(letters == 4 || letters == 6, "%zu", letters);
        if (words < 40) {
            cr_assert_eq(tokens_of_word(&v, p + 1, letters, first), 1, "word %u", words);
            cr_assert(!strncmp(first + 2, p + 1, letters));
        }
        p += 1 + letters;
    }
    cr_assert_eq(words, 400);
    free(text);
    mkm_vocab_free(&v);
}

/* ---- command line ---- */

static int shell(const char *args, char *ret_out, size_t size)
{
    const char *program = getenv("MKMODEL");
    char command[512];
    FILE *p;
    size_t n;

    snprintf(command, sizeof command, "%s %s 2>&1", program, args);
    p = popen(command, "r");
    cr_assert_not_null(p);
    n = fread(ret_out, 1, size - 1, p);
    ret_out[n] = 0;
    return WEXITSTATUS(pclose(p));
}

Test(mkmodel, command_line)
{
    char out[8192], args[256], *path = path_of("cli");

    if (!getenv("MKMODEL"))
        cr_skip_test("MKMODEL is not set");
    cr_assert_eq(shell("--help", out, sizeof out), 0);
    cr_assert(strstr(out, "--down-type") && strstr(out, "--simulate"));
    cr_assert_eq(shell("--version", out, sizeof out), 0);
    cr_assert_neq(shell("", out, sizeof out), 0);
    cr_assert_neq(shell("--preset=nope x", out, sizeof out), 0);
    cr_assert(strstr(out, "nope") && strstr(out, "qwen3-30b-a3b"), "%s", out);
    cr_assert_neq(shell("--layers=-1 x", out, sizeof out), 0);
    cr_assert_neq(shell("--attn-type=Q3_K x", out, sizeof out), 0);
    cr_assert_eq(shell("--topk=99 x", out, sizeof out), 2);
    cr_assert(strstr(out, "mkmodel: --topk 99"), "%s", out);
    cr_assert(!exists("x") && !exists("x.partial"));
    cr_assert_eq(shell("--text=3", out, sizeof out), 0);
    cr_assert(out[0] == ' ' && strlen(out) >= 15, "%s", out);
    snprintf(args, sizeof args, "--layers=1 %s --preset=tiny --json --seed 9", path); /* order is free */
    cr_assert_eq(shell(args, out, sizeof out), 0, "%s", out);
    cr_assert(out[0] == '{' && strstr(out, "\"tensors\": 15") && strstr(out, "\"seed\": 9"), "%s", out);
    unlink(path);
}
