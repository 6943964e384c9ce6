/* SPDX-License-Identifier: MIT */
/*
 * b_kernels [--json] [--cpu] [--model shipped|large] [--threads N] [--tokens N] [--seconds S]
 *
 * GFLOP/s of every host operation on the shapes of the shipped model and of
 * qwen3-30b-a3b, for a long chunk and for one token. Then one whole layer
 * stack of the shipped model's shape as tokens/s (without the sampler). Bytes
 * moved are given where they bound an operation. Median of repetitions. --cpu counts the
 * processor time of all threads instead of the time passed (with --threads 1 on a busy machine).
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/krn_host.h"
#include "tests/unit/krn_data.h"

struct dims {
    const char *name;
    struct krn_shape s;
    uint32_t layers, vocab;
    uint32_t dense, gate_up, down; /* GGML types */
};

static const struct dims SHIPPED = {"shipped", {256, 8, 2, 64, 48, 8, 64}, 5, 4096, KRN_Q4_K, KRN_Q4_K,
                                    KRN_Q4_0};
static const struct dims LARGE = {
    "qwen3-30b-a3b", {2048, 32, 4, 128, 128, 8, 768}, 48, 151936, KRN_Q4_K, KRN_Q4_K, KRN_Q6_K};

static bool json, first_row = true;
static double seconds = 0.15;
static struct krn_rng rng = {7};

static clockid_t bench_clock = CLOCK_MONOTONIC;

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(bench_clock, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_s(void (*fn)(void *), void *arg)
{
    double t[200];
    int n = 0;
    fn(arg);
    for (double end = now_s() + seconds; n < 200 && (n < 3 || now_s() < end); n++) {
        double t0 = now_s();
        fn(arg);
        t[n] = now_s() - t0;
    }
    qsort(t, (size_t)n, sizeof *t, by_value);
    return t[n / 2];
}

static void report(const char *model, const char *op, uint32_t tokens, double flops, double bytes, double s)
{
    if (json) {
        printf(
            "%s{\"model\":\"%s\",\"op\":\"%s\",\"tokens\":%u,\"us\":%.2f,\"gflops\":%.3f,\"gbytes_s\":%.3f}",
            first_row ? "" : ",\n", model, op, tokens, s * 1e6, flops / s * 1e-9, bytes / s * 1e-9);
        first_row = false;
    } else {
        printf("%-14s %-22s %6u tokens %11.1f us %9.2f GFLOP/s %8.2f GB/s\n", model, op, tokens, s * 1e6,
               flops / s * 1e-9, bytes / s * 1e-9);
    }
}

struct state {
    struct krn_host *host;
    struct dims d;
    uint32_t tokens, pos0;
    struct krn_mat q, k, o, router, head, mat;
    struct krn_expert_job *jobs;
    struct krn_kv kv;
    uint32_t *ids, *offsets, *slots, *positions;
    float *x, *h, *qv, *kk, *vv, *att, *logits, *weights, *out, *table, *norm, *y;
    void *scratch;
};

static struct krn_mat make_mat(uint32_t type, uint32_t rows, uint32_t cols)
{
    const struct krn_type *t = krn_type_find(type);
    return (struct krn_mat){krn_rand_weights(&rng, t, rows, cols), t, rows, cols};
}

static struct state make_state(struct krn_host *host, const struct dims *d, uint32_t tokens)
{
    struct krn_shape s = d->s;
    struct state st = {.host = host, .d = *d, .tokens = tokens};
    uint32_t qd = s.heads * s.head_dim, kd = s.kv_heads * s.head_dim;
    st.q = make_mat(d->dense, qd, s.hidden);
    st.k = make_mat(d->dense, kd, s.hidden);
    st.o = make_mat(d->dense, s.hidden, qd);
    st.router = make_mat(KRN_F32, s.experts, s.hidden);
    st.jobs = calloc(s.experts, sizeof *st.jobs);
    if (!st.jobs)
        abort();
    for (uint32_t e = 0; e < s.experts; e++) {
        struct krn_expert_job *j = &st.jobs[e];
        j->gate_type = j->up_type = krn_type_find(d->gate_up);
        j->down_type = krn_type_find(d->down);
        j->gate = krn_rand_weights(&rng, j->gate_type, s.width, s.hidden);
        j->up = krn_rand_weights(&rng, j->up_type, s.width, s.hidden);
        j->down = krn_rand_weights(&rng, j->down_type, s.hidden, s.width);
    }
    size_t n;
    st.kv = (struct krn_kv){.kv_heads = s.kv_heads, .head_dim = s.head_dim};
    if (krn_host_kv_size(tokens + 2048, s.kv_heads, s.head_dim, &st.kv.ctx, &n) != 0)
        abort();
    st.kv.k = krn_rand_floats(&rng, n, 1);
    st.kv.v = krn_rand_floats(&rng, n, 1);
    st.ids = krn_alloc((size_t)tokens * s.top_k * 4);
    st.slots = krn_alloc((size_t)tokens * s.top_k * 4);
    st.offsets = krn_alloc((s.experts + 1) * 4);
    st.positions = krn_alloc(tokens * 4);
    for (uint32_t t = 0; t < tokens; t++)
        st.positions[t] = t;
    st.x = krn_rand_floats(&rng, (size_t)tokens * s.hidden, 1);
    st.h = krn_rand_floats(&rng, (size_t)tokens * s.hidden, 1);
    st.y = krn_rand_floats(&rng, (size_t)tokens * s.hidden, 1);
    st.qv = krn_rand_floats(&rng, (size_t)tokens * qd, 1);
    st.att = krn_rand_floats(&rng, (size_t)tokens * qd, 1);
    st.kk = krn_rand_floats(&rng, (size_t)tokens * kd, 1);
    st.vv = krn_rand_floats(&rng, (size_t)tokens * kd, 1);
    st.logits = krn_rand_floats(&rng, (size_t)tokens * s.experts, 2);
    st.weights = krn_rand_floats(&rng, (size_t)tokens * s.top_k, 1);
    st.out = krn_rand_floats(&rng, (size_t)tokens * s.top_k * s.hidden + d->vocab, 1);
    st.table = krn_rand_floats(&rng, (size_t)tokens * s.head_dim, 1);
    /* Ones: operations run in place again and again here, other weights would drive values to denormals. */
    st.norm = krn_alloc((s.hidden > 256 ? s.hidden : 256) * 4);
    for (uint32_t i = 0; i < s.hidden || i < 256; i++)
        st.norm[i] = 1.0f;
    krn_host_rope_table(host, st.positions, tokens, s.head_dim, 10000.0f, st.table);
    st.scratch = krn_alloc(krn_host_expert_scratch_bytes((size_t)tokens * s.top_k, s.width));
    krn_host_router(host, st.logits, tokens, s.experts, s.top_k, true, st.ids, st.weights);
    krn_host_group(st.ids, tokens, s.experts, s.top_k, st.offsets, st.slots);
    return st;
}

static void free_state(struct state *st)
{
    for (uint32_t e = 0; e < st->d.s.experts; e++) {
        free((void *)st->jobs[e].gate);
        free((void *)st->jobs[e].up);
        free((void *)st->jobs[e].down);
    }
    void *all[] = {(void *)st->q.data,
                   (void *)st->k.data,
                   (void *)st->o.data,
                   (void *)st->router.data,
                   st->jobs,
                   st->kv.k,
                   st->kv.v,
                   st->ids,
                   st->slots,
                   st->offsets,
                   st->positions,
                   st->x,
                   st->h,
                   st->y,
                   st->qv,
                   st->att,
                   st->kk,
                   st->vv,
                   st->logits,
                   st->weights,
                   st->out,
                   st->table,
                   st->norm,
                   st->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void run_mat(void *p)
{
    struct state *st = p;
    krn_host_matmul(st->host, &st->mat, st->mat.cols == st->d.s.hidden ? st->x : st->att, st->tokens,
                    st->mat.rows == st->d.s.hidden ? st->y : st->out);
}

static void run_norm(void *p)
{
    struct state *st = p;
    krn_host_rmsnorm(st->host, st->x, st->norm, 1e-6f, st->tokens, st->d.s.hidden, st->h);
}

static void run_rope(void *p)
{
    struct state *st = p;
    krn_host_head_norm_rope(st->host, st->qv, st->norm, 1e-6f, st->table, st->tokens, st->d.s.heads,
                            st->d.s.head_dim);
}

static void run_append(void *p)
{
    struct state *st = p;
    krn_host_kv_append(st->host, &st->kv, &(struct krn_kv_span){NULL, st->pos0, st->tokens}, 1, st->kk,
                       st->vv);
}

static void run_attn(void *p)
{
    struct state *st = p;
    krn_host_attention(st->host, &st->kv, &(struct krn_kv_span){NULL, st->pos0, st->tokens}, 1, st->d.s.heads,
                       st->qv, st->att);
}

static void run_router(void *p)
{
    struct state *st = p;
    krn_host_router(st->host, st->logits, st->tokens, st->d.s.experts, st->d.s.top_k, true, st->ids,
                    st->weights);
    krn_host_group(st->ids, st->tokens, st->d.s.experts, st->d.s.top_k, st->offsets, st->slots);
}

static void run_experts(void *p)
{
    struct state *st = p;
    struct krn_shape s = st->d.s;
    uint32_t n = 0;
    static struct krn_expert_job jobs[KRN_EXPERTS_MAX];
    for (uint32_t e = 0; e < s.experts; e++) {
        uint32_t slots = st->offsets[e + 1] - st->offsets[e];
        if (slots == 0)
            continue;
        jobs[n] = st->jobs[e];
        jobs[n].slots = st->slots + st->offsets[e];
        jobs[n++].n_slots = slots;
    }
    krn_host_experts(st->host, jobs, n, st->h, s.top_k, s.hidden, s.width, st->scratch, st->out);
}

static void run_combine(void *p)
{
    struct state *st = p;
    krn_host_combine(st->host, st->out, st->weights, st->tokens, st->d.s.top_k, st->d.s.hidden, st->y);
}

static void run_model(void *p)
{
    struct state *st = p;
    struct krn_shape s = st->d.s;
    krn_host_rope_table(st->host, st->positions, st->tokens, s.head_dim, 10000.0f, st->table);
    for (uint32_t layer = 0; layer < st->d.layers; layer++) {
        run_norm(st);
        krn_host_matmul(st->host, &st->q, st->h, st->tokens, st->qv);
        krn_host_matmul(st->host, &st->k, st->h, st->tokens, st->kk);
        krn_host_matmul(st->host, &st->k, st->h, st->tokens, st->vv);
        run_rope(st);
        krn_host_head_norm_rope(st->host, st->kk, st->norm, 1e-6f, st->table, st->tokens, s.kv_heads,
                                s.head_dim);
        run_append(st);
        run_attn(st);
        krn_host_matmul(st->host, &st->o, st->att, st->tokens, st->y);
        krn_host_add(st->host, st->y, (size_t)st->tokens * s.hidden, st->x);
        run_norm(st);
        krn_host_matmul(st->host, &st->router, st->h, st->tokens, st->logits);
        run_router(st);
        run_experts(st);
        run_combine(st);
    }
    krn_host_matmul(st->host, &st->head, st->x, 1, st->out);
}

static void bench(struct krn_host *host, const struct dims *d, uint32_t tokens, bool whole)
{
    struct state st = make_state(host, d, tokens);
    struct krn_shape s = d->s;
    const char *m = d->name;
    double T = tokens;
    static const uint32_t types[] = {KRN_F32,  KRN_F16,  KRN_BF16, KRN_Q8_0,
                                     KRN_Q4_0, KRN_Q4_K, KRN_Q5_K, KRN_Q6_K};
    for (size_t i = 0; i < 8; i++) {
        st.mat = make_mat(types[i], s.heads * s.head_dim, s.hidden);
        uint64_t bytes = 0;
        krn_row_bytes(st.mat.type, s.hidden, &bytes);
        char name[32];
        snprintf(name, sizeof name, "matmul q %s", st.mat.type->name);
        report(m, name, tokens, 2 * T * st.mat.rows * s.hidden, (double)bytes * st.mat.rows,
               median_s(run_mat, &st));
        free((void *)st.mat.data);
    }
    st.mat = st.router;
    report(m, "matmul router F32", tokens, 2 * T * s.experts * s.hidden, 4.0 * s.experts * s.hidden,
           median_s(run_mat, &st));
    report(m, "rmsnorm", tokens, 4 * T * s.hidden, 8 * T * s.hidden, median_s(run_norm, &st));
    report(m, "head norm + rope (q)", tokens, 10 * T * s.heads * s.head_dim, 8 * T * s.heads * s.head_dim,
           median_s(run_rope, &st));
    st.pos0 = tokens == 1 ? 1900 : 0;
    report(m, "kv append", tokens, 0, 16 * T * s.kv_heads * s.head_dim, median_s(run_append, &st));
    double keys = st.pos0 + (T + 1) / 2;
    report(m, tokens == 1 ? "attention at 1,900" : "attention", tokens, 4 * T * keys * s.heads * s.head_dim,
           tokens == 1 ? 8 * keys * s.kv_heads * s.head_dim : 0, median_s(run_attn, &st));
    report(m, "router + group", tokens, 0, 4 * T * s.experts, median_s(run_router, &st));
    uint64_t g = 0, dn = 0;
    krn_row_bytes(krn_type_find(d->gate_up), s.hidden, &g);
    krn_row_bytes(krn_type_find(d->down), s.width, &dn);
    uint32_t used = 0;
    for (uint32_t e = 0; e < s.experts; e++)
        used += st.offsets[e + 1] != st.offsets[e];
    report(m, "experts", tokens, 6 * T * s.top_k * s.hidden * s.width,
           used * (2.0 * (double)g * s.width + (double)dn * s.hidden), median_s(run_experts, &st));
    report(m, "combine", tokens, 2 * T * s.top_k * s.hidden, 4 * T * (s.top_k + 2) * s.hidden,
           median_s(run_combine, &st));
    if (whole) {
        st.head = make_mat(KRN_Q6_K, d->vocab, s.hidden);
        double t = median_s(run_model, &st);
        if (json)
            printf(",\n{\"model\":\"%s\",\"op\":\"whole\",\"tokens\":%u,\"us\":%.1f,\"tokens_s\":%.1f}", m,
                   tokens, t * 1e6, T / t);
        else
            printf("%-14s %-22s %6u tokens %11.1f us %9.1f tokens/s\n", m, "all layers", tokens, t * 1e6,
                   T / t);
        free((void *)st.head.data);
    }
    free_state(&st);
}

int main(int argc, char **argv)
{
    uint32_t threads = 0, tokens = 1900;
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            json = true;
        } else if (strcmp(argv[i], "--cpu") == 0) {
            bench_clock = CLOCK_PROCESS_CPUTIME_ID;
        } else if (strcmp(argv[i], "--model") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
            threads = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--tokens") == 0 && i + 1 < argc) {
            tokens = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
            seconds = strtod(argv[++i], NULL);
        } else {
            fprintf(stderr, "usage: b_kernels [--json] [--cpu] [--model shipped|large] [--threads N] "
                            "[--tokens N] [--seconds S]\n");
            return 2;
        }
    }
    struct krn_pool *pool;
    struct krn_host *host;
    if (tokens == 0 || krn_pool_create(threads, &pool) != 0 || krn_host_create(pool, 4096, &host) != 0) {
        fprintf(stderr, "b_kernels: cannot set up %u threads, %u tokens\n", threads, tokens);
        return 1;
    }
    if (json)
        printf("{\"isa\":\"%s\",\"threads\":%u,\"rows\":[\n", krn_host_isa(), krn_pool_threads(pool));
    else
        printf("instruction set %s, %u threads\n", krn_host_isa(), krn_pool_threads(pool));
    if (!only || strcmp(only, "shipped") == 0) {
        bench(host, &SHIPPED, tokens, true);
        bench(host, &SHIPPED, 1, true);
    }
    if (!only || strcmp(only, "large") == 0) {
        bench(host, &LARGE, 256, false);
        bench(host, &LARGE, 1, false);
    }
    if (json)
        printf("]}\n");
    krn_host_destroy(&host);
    krn_pool_destroy(&pool);
    return 0;
}
