/* SPDX-License-Identifier: MIT */
/*
 * Host kernels against the reference, on odd sizes, poisoned memory and every
 * storage type, once per instruction set; and batch invariance, bit by bit.
 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "kernels/krn_host.h"
#include "kernels/krn_host_priv.h"
#include "kernels/krn_ref.h"
#include "tests/unit/krn_data.h"

TestSuite(kernels, .timeout = 60);

static const uint32_t TOKENS[] = {1, 2, 3, 5, 17, 64, 65, 131};
#define N_TOKENS (sizeof TOKENS / sizeof *TOKENS)

struct isa {
    char name[12];
};
static struct isa ISAS[] = {{"baseline"}, {"v3"}, {"v4"}};

/* Every test is a process of its own, so the choice is made anew. */
static void use_isa(const struct isa *isa)
{
    setenv("EXPERTD_ISA", isa->name, 1);
    if (strcmp(krn_host_isa(), isa->name) != 0)
        cr_skip_test("this CPU has no %s", isa->name);
}

#define EACH_ISA(name)                                                                                       \
    static void check_##name(void);                                                                          \
    ParameterizedTestParameters(kernels, name)                                                               \
    {                                                                                                        \
        return cr_make_param_array(struct isa, ISAS, sizeof ISAS / sizeof *ISAS);                            \
    }                                                                                                        \
    ParameterizedTest(struct isa *isa, kernels, name)                                                        \
    {                                                                                                        \
        use_isa(isa);                                                                                        \
        check_##name();                                                                                      \
    }                                                                                                        \
    static void check_##name(void)

static struct krn_rng rng = {42};

static struct krn_host *make_host(uint32_t threads, uint32_t max_cols)
{
    struct krn_pool *pool;
    struct krn_host *host;
    cr_assert(krn_pool_create(threads, &pool) == 0);
    cr_assert(krn_host_create(pool, max_cols, &host) == 0);
    memset(host->scratch, 0xff, host->threads * host->thread_floats * 4); /* NaN */
    return host;
}

static void drop_host(struct krn_host *host)
{
    struct krn_pool *pool = host->pool;
    krn_host_destroy(&host);
    krn_pool_destroy(&pool);
}

static float *poison(size_t n)
{
    float *p = krn_alloc((n + 1) * 4);
    memset(p, 0xff, (n + 1) * 4);
    return p;
}

static bool poisoned(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u == UINT32_MAX;
}

static void near(const float *got, const float *want, size_t n, double tol, const char *what)
{
    for (size_t i = 0; i < n; i++)
        cr_assert(fabs((double)got[i] - (double)want[i]) <= tol, "%s[%zu]: %.9g, reference %.9g", what, i,
                  (double)got[i], (double)want[i]);
    cr_assert(poisoned(got[n]), "%s: written past the end", what);
}

static void same(const float *a, const float *b, size_t n, const char *what)
{
    cr_assert(memcmp(a, b, n * 4) == 0, "%s: other bits", what);
}

static struct krn_mat make_mat(const struct krn_type *type, uint32_t rows, uint32_t cols)
{
    return (struct krn_mat){krn_rand_weights(&rng, type, rows, cols), type, rows, cols};
}

EACH_ISA(matmul_parity)
{
    struct krn_host *host = make_host(2, 8192);
    static const uint32_t rows[] = {1, 5, 67, 130};
    for (int ty = 0; ty < KRN_TYPE_COUNT; ty++) {
        const struct krn_type *type = &krn_type_table()[ty];
        uint32_t cols[] = {type->block_elems < 16 ? 16 : type->block_elems, type->block_elems < 32 ? 80 : 256,
                           768};
        for (int c = 0; c < 3; c++)
            for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
                struct krn_mat m = make_mat(type, rows[r], cols[c]);
                for (size_t t = 0; t < N_TOKENS; t++) {
                    if (t > 2 && r == 3 && c == 2)
                        continue; /* the reference is slow */
                    float *x = krn_rand_floats(&rng, (size_t)TOKENS[t] * cols[c], 1);
                    size_t n = (size_t)TOKENS[t] * rows[r];
                    float *y = poison(n), *want = poison(n);
                    krn_host_matmul(host, &m, x, TOKENS[t], y);
                    krn_ref_matmul(&m, x, TOKENS[t], want);
                    near(y, want, n, 2e-6 * cols[c], type->name);
                    free(x);
                    free(y);
                    free(want);
                }
                free((void *)m.data);
            }
    }
    /* a row longer than a tile */
    struct krn_mat m = make_mat(krn_type_find(KRN_Q4_0), 9, 8192);
    float *x = krn_rand_floats(&rng, 3 * 8192, 1), *y = poison(27), *want = poison(27);
    krn_host_matmul(host, &m, x, 3, y);
    krn_ref_matmul(&m, x, 3, want);
    near(y, want, 27, 2e-3, "long row");
    free((void *)m.data);
    free(x);
    free(y);
    free(want);
    drop_host(host);
}

EACH_ISA(matmul_bits)
{
    static const uint32_t threads[] = {2, 3, 5};
    struct krn_host *one = make_host(1, 512);
    for (int ty = 0; ty < KRN_TYPE_COUNT; ty++) {
        struct krn_mat m = make_mat(&krn_type_table()[ty], 139, 512);
        uint32_t T = 150;
        float *x = krn_rand_floats(&rng, T * 512, 1), *y = poison(T * 139), *z = poison(T * 139);
        krn_host_matmul(one, &m, x, T, y);
        for (uint32_t t = 0; t < T; t += 7) {
            krn_host_matmul(one, &m, x + t * 512, 1, z);
            same(z, y + t * 139, 139, "token alone");
            uint32_t n = T - t < 6 ? T - t : 6;
            krn_host_matmul(one, &m, x + t * 512, n, z);
            same(z, y + t * 139, n * 139, "token at another index");
        }
        for (int i = 0; i < 3; i++) {
            struct krn_host *many = make_host(threads[i], 512);
            memset(z, 0xff, T * 139 * 4);
            krn_host_matmul(many, &m, x, T, z);
            same(z, y, T * 139, "threads");
            krn_host_matmul(many, &m, x, 1, z);
            same(z, y, 139, "threads, one token");
            drop_host(many);
        }
        /* rows of another matrix, that is, at another place in the tiles */
        uint64_t row_bytes;
        cr_assert(krn_row_bytes(m.type, 512, &row_bytes) == 0);
        struct krn_mat part = {(const char *)m.data + 3 * row_bytes, m.type, 5, 512};
        krn_host_matmul(one, &part, x, T, z);
        for (uint32_t t = 0; t < T; t++)
            same(z + t * 5, y + t * 139 + 3, 5, "rows at another index");
        free(x);
        free(y);
        free(z);
        free((void *)m.data);
    }
    drop_host(one);
}

EACH_ISA(rows_parity_and_bits)
{
    struct krn_host *host = make_host(3, 256), *one = make_host(1, 256);
    for (size_t i = 0; i < N_TOKENS; i++) {
        uint32_t T = TOKENS[i], dim = 272;
        float *x = krn_rand_floats(&rng, T * dim, 3), *w = krn_rand_floats(&rng, dim, 2);
        float *y = poison(T * dim), *want = poison(T * dim);
        krn_host_rmsnorm(host, x, w, 1e-6f, T, dim, y);
        krn_ref_rmsnorm(x, w, 1e-6f, T, dim, want);
        near(y, want, T * dim, 1e-5, "rmsnorm");
        krn_host_rmsnorm(one, x + (T - 1) * dim, w, 1e-6f, 1, dim, want);
        same(want, y + (T - 1) * dim, dim, "rmsnorm alone");
        memcpy(want, x, T * dim * 4);
        krn_host_rmsnorm(host, want, w, 1e-6f, T, dim, want);
        same(want, y, T * dim, "rmsnorm in place");
        memcpy(want, y, T * dim * 4);
        krn_host_add(host, x, T * dim, y);
        for (uint32_t j = 0; j < T * dim; j++)
            cr_assert(y[j] == want[j] + x[j]);

        uint32_t ids[131];
        struct krn_mat m = make_mat(krn_type_find(KRN_Q6_K), 50, 256);
        for (uint32_t t = 0; t < T; t++)
            ids[t] = krn_rand(&rng) % 50;
        float *e = poison(T * 256), row[256];
        krn_host_embed(host, &m, ids, T, e);
        for (uint32_t t = 0; t < T; t++) {
            krn_dequant_row(m.type, (const char *)m.data + ids[t] * 210, row, 256);
            same(e + t * 256, row, 256, "embed");
        }
        cr_assert(poisoned(e[T * 256]));
        free(e);
        free((void *)m.data);
        free(x);
        free(w);
        free(y);
        free(want);
    }
    drop_host(host);
    drop_host(one);
}

EACH_ISA(head_norm_rope)
{
    struct krn_host *host = make_host(2, 64);
    static const uint32_t dims[] = {16, 64, 80, 128, 256};
    for (int i = 0; i < 5; i++)
        for (int with = 0; with < 4; with++) {
            uint32_t hd = dims[i], T = 37, heads = 3;
            size_t n = (size_t)T * heads * hd;
            uint32_t pos[37];
            for (uint32_t t = 0; t < T; t++)
                pos[t] = t < 30 ? 11 + t : krn_rand(&rng) % 4000;
            float *w = krn_rand_floats(&rng, hd, 2), *in = krn_rand_floats(&rng, n, 2);
            float *table = poison((size_t)T * hd), *x = poison(n), *want = poison(n);
            memcpy(x, in, n * 4);
            memcpy(want, in, n * 4);
            krn_host_rope_table(host, pos, T, hd, 10000.0f, table);
            cr_assert(poisoned(table[T * hd]));
            krn_host_head_norm_rope(host, x, with & 1 ? w : NULL, 1e-6f, with & 2 ? table : NULL, T, heads,
                                    hd);
            krn_ref_head_norm_rope(want, with & 1 ? w : NULL, 1e-6f, with & 2 ? pos : NULL, 10000.0f, T,
                                   heads, hd);
            near(x, want, n, 2e-3, "rope"); /* the angle is float32: 4000 * 2^-24, and the values reach 4 */
            float alone[3 * 256];
            memcpy(alone, in + 33 * heads * hd, heads * hd * 4);
            float table1[256];
            krn_host_rope_table(host, pos + 33, 1, hd, 10000.0f, table1);
            krn_host_head_norm_rope(host, alone, with & 1 ? w : NULL, 1e-6f, with & 2 ? table1 : NULL, 1,
                                    heads, hd);
            same(alone, x + 33 * heads * hd, heads * hd, "rope alone");
            free(w);
            free(in);
            free(table);
            free(x);
            free(want);
        }
    drop_host(host);
}

static struct krn_kv make_kv(uint32_t ctx, uint32_t kv_heads, uint32_t hd)
{
    struct krn_kv kv = {.kv_heads = kv_heads, .head_dim = hd};
    size_t n;
    cr_assert(krn_host_kv_size(ctx, kv_heads, hd, &kv.ctx, &n) == 0);
    kv.k = poison(n);
    kv.v = poison(n);
    return kv;
}

static void append(struct krn_host *h, const struct krn_kv *kv, uint32_t pos0, uint32_t tokens,
                   const float *k, const float *v)
{
    krn_host_kv_append(h, kv, &(struct krn_kv_span){NULL, pos0, tokens}, 1, k, v);
}

static void attend(struct krn_host *h, const struct krn_kv *kv, uint32_t pos0, uint32_t tokens,
                   uint32_t heads, const float *q, float *y)
{
    krn_host_attention(h, kv, &(struct krn_kv_span){NULL, pos0, tokens}, 1, heads, q, y);
}

static void free_kv(struct krn_kv *kv)
{
    free(kv->k);
    free(kv->v);
}

EACH_ISA(attention_parity)
{
    struct krn_host *host = make_host(2, 64);
    static const struct {
        uint32_t hd, heads, kv_heads;
    } shapes[] = {{64, 8, 2}, {128, 4, 4}, {16, 3, 1}, {80, 6, 2}, {256, 2, 1}, {64, 16, 1}};
    static const uint32_t starts[] = {0, 1, 15, 63, 64, 100};
    for (int s = 0; s < 6; s++)
        for (size_t i = 0; i < N_TOKENS; i++) {
            uint32_t hd = shapes[s].hd, heads = shapes[s].heads, kvh = shapes[s].kv_heads;
            uint32_t T = TOKENS[i], pos0 = starts[(i + (size_t)s) % 6], all = pos0 + T;
            size_t row = (size_t)kvh * hd, n = (size_t)T * heads * hd;
            float *k = krn_rand_floats(&rng, all * row, 1), *v = krn_rand_floats(&rng, all * row, 1);
            float *q = krn_rand_floats(&rng, n, 3), *y = poison(n), *want = poison(n);
            struct krn_kv kv = make_kv(all, kvh, hd);
            append(host, &kv, 0, pos0, k, v);
            append(host, &kv, pos0, T, k + pos0 * row, v + pos0 * row);
            attend(host, &kv, pos0, T, heads, q, y);
            krn_ref_attention(k, v, kvh, hd, pos0, T, heads, q, want);
            near(y, want, n, 2e-5, "attention");
            memcpy(want, q, n * 4);
            attend(host, &kv, pos0, T, heads, want, want);
            same(want, y, n, "attention in place");
            free_kv(&kv);
            free(k);
            free(v);
            free(q);
            free(y);
            free(want);
        }
    drop_host(host);
}

EACH_ISA(attention_bits)
{
    struct krn_host *hosts[] = {make_host(1, 64), make_host(2, 64), make_host(5, 64)};
    static const uint32_t chunks[] = {1, 5, 64, 83, 1000};
    static const uint32_t dims[] = {64, 128, 48};
    for (int i = 0; i < 3; i++) {
        uint32_t T = 205, heads = 8, kvh = 2, hd = dims[i];
        size_t row = kvh * hd, out = heads * hd;
        float *k = krn_rand_floats(&rng, T * row, 1), *v = krn_rand_floats(&rng, T * row, 1);
        float *q = krn_rand_floats(&rng, T * out, 4), *y = poison(T * out), *z = poison(T * out);
        struct krn_kv kv = make_kv(T + 300, kvh, hd);
        append(hosts[0], &kv, 0, T, k, v);
        attend(hosts[0], &kv, 0, T, heads, q, y);
        free_kv(&kv);
        for (int c = 0; c < 5; c++)
            for (int h = 0; h < 3; h++) {
                kv = make_kv(T, kvh, hd);
                memset(z, 0xff, T * out * 4);
                for (uint32_t p = 0; p < T; p += chunks[c]) {
                    uint32_t n = T - p < chunks[c] ? T - p : chunks[c];
                    append(hosts[h], &kv, p, n, k + p * row, v + p * row);
                    attend(hosts[h], &kv, p, n, heads, q + p * out, z + p * out);
                }
                same(z, y, T * out, "attention in chunks");
                free_kv(&kv);
            }
        free(k);
        free(v);
        free(q);
        free(y);
        free(z);
    }
    for (int h = 0; h < 3; h++)
        drop_host(hosts[h]);
}

/* Sequences whose blocks are strewn over the memory, several in a call: each as alone in memory of its own.
 */
EACH_ISA(attention_blocks)
{
    struct krn_host *hosts[] = {make_host(1, 64), make_host(3, 64)};
    static const uint32_t before[] = {0, 127, 200, 3, 128}, tokens[] = {130, 1, 5, 64, 1};
    static const uint32_t table[5][3] = {{9, 2, 0}, {4, 8, 0}, {1, 6, 0}, {7, 0, 0}, {3, 5, 0}};
    enum { SPANS = 5, HEADS = 8, KVH = 2, HD = 48, ROW = KVH * HD, OUT = HEADS * HD };
    struct krn_kv all = make_kv(10 * KRN_KV_BLOCK, KVH, HD);
    struct krn_kv_span first[SPANS], span[SPANS];
    uint32_t rows0 = 0, rows = 0;
    for (int i = 0; i < SPANS; i++) {
        first[i] = (struct krn_kv_span){table[i], 0, before[i]};
        span[i] = (struct krn_kv_span){table[i], before[i], tokens[i]};
        rows0 += before[i];
        rows += tokens[i];
    }
    float *k0 = krn_rand_floats(&rng, rows0 * ROW, 1), *v0 = krn_rand_floats(&rng, rows0 * ROW, 1);
    float *k = krn_rand_floats(&rng, rows * ROW, 1), *v = krn_rand_floats(&rng, rows * ROW, 1);
    float *q = krn_rand_floats(&rng, rows * OUT, 4), *want = poison(rows * OUT), *y = poison(rows * OUT);
    for (uint32_t i = 0, at0 = 0, at = 0; i < SPANS; at0 += before[i], at += tokens[i++]) {
        struct krn_kv kv = make_kv(before[i] + tokens[i], KVH, HD);
        append(hosts[0], &kv, 0, before[i], k0 + at0 * ROW, v0 + at0 * ROW);
        append(hosts[0], &kv, before[i], tokens[i], k + at * ROW, v + at * ROW);
        attend(hosts[0], &kv, before[i], tokens[i], HEADS, q + at * OUT, want + at * OUT);
        free_kv(&kv);
    }
    for (int h = 0; h < 2; h++) {
        krn_host_kv_append(hosts[h], &all, first, SPANS, k0, v0);
        krn_host_kv_append(hosts[h], &all, span, SPANS, k, v);
        memset(y, 0xff, rows * OUT * 4);
        krn_host_attention(hosts[h], &all, span, SPANS, HEADS, q, y);
        same(y, want, rows * OUT, "attention over blocks");
        drop_host(hosts[h]);
    }
    free_kv(&all);
    free(k0);
    free(v0);
    free(k);
    free(v);
    free(q);
    free(want);
    free(y);
}

EACH_ISA(router)
{
    struct krn_host *host = make_host(2, 64);
    static const uint32_t sizes[][2] = {{48, 8}, {128, 8}, {5, 5}, {1, 1}, {1000, 3}};
    for (int s = 0; s < 5; s++)
        for (int renorm = 0; renorm < 2; renorm++) {
            uint32_t E = sizes[s][0], K = sizes[s][1], T = 67;
            float *l = krn_rand_floats(&rng, T * E, 5), *w = poison(T * K), *want = poison(T * K);
            uint32_t ids[67 * 8], want_ids[67 * 8];
            krn_host_router(host, l, T, E, K, renorm, ids, w);
            krn_ref_router(l, T, E, K, renorm, want_ids, want);
            cr_assert(memcmp(ids, want_ids, T * K * 4) == 0);
            near(w, want, T * K, 1e-6, "router");
            krn_host_router(host, l + 40 * E, 1, E, K, renorm, want_ids, want);
            cr_assert(memcmp(ids + 40 * K, want_ids, K * 4) == 0);
            same(want, w + 40 * K, K, "router alone");
            free(l);
            free(w);
            free(want);
        }
    /* ties go to the lower id; whatever comes in, ids are valid and distinct */
    float tie[3][7] = {
        {1, 3, 2, 3, 2, 3, 0}, {0, 0, 0, 0, 0, 0, 0}, {NAN, 1, INFINITY, -INFINITY, NAN, 2, NAN}};
    uint32_t ids[12];
    float w[12];
    krn_host_router(host, tie[0], 3, 7, 4, true, ids, w);
    static const uint32_t want[12] = {1, 3, 5, 2, 0, 1, 2, 3, 2, 0, 1, 3};
    for (int i = 0; i < 12; i++)
        cr_assert(ids[i] == want[i], "tie %d: %u", i, ids[i]);
    drop_host(host);
}

Test(kernels, group)
{
    static const uint32_t ids[] = {3, 1, 0, 3, 1, 3, 5, 0};
    uint32_t off[7], slots[8];
    krn_host_group(ids, 4, 6, 2, off, slots);
    static const uint32_t want_off[] = {0, 2, 4, 4, 7, 7, 8}, want[] = {2, 7, 1, 4, 0, 3, 5, 6};
    cr_assert(memcmp(off, want_off, sizeof off) == 0);
    cr_assert(memcmp(slots, want, sizeof slots) == 0);
}

EACH_ISA(silu_and_softmax_accuracy)
{
    struct krn_host *host = make_host(1, 64);
    float g[401], one[401];
    for (int i = 0; i <= 400; i++) {
        g[i] = (float)(i - 200) * 0.4337f;
        one[i] = 1.0f;
    }
    host->ops->silu_mul(g, one, 401);
    for (int i = 0; i <= 400; i++) {
        double x = (double)((float)(i - 200) * 0.4337f), want = x / (1.0 + exp(-x));
        cr_assert(fabs((double)g[i] - want) <= 5e-7 * fabs(want) + 1e-36, "silu(%g) = %.9g, not %.9g", x,
                  (double)g[i], want);
    }
    float p[304], *in = krn_rand_floats(&rng, 304, 4);
    double sum = 0;
    memcpy(p, in, sizeof p);
    host->ops->softmax(p, 299);
    for (int i = 0; i < 299; i++)
        sum += exp((double)in[i]);
    for (int i = 0; i < 299; i++) {
        double want = exp((double)in[i]) / sum;
        cr_assert(fabs((double)p[i] - want) <= 1.5e-6 * want, "softmax: %.9g, not %.9g", (double)p[i], want);
    }
    free(in);
    drop_host(host);
}

struct layer {
    struct krn_expert_job jobs[9];
    uint32_t offsets[10], slots[131 * 3];
};

static void make_jobs(struct layer *l, const uint32_t *ids, uint32_t tokens)
{
    krn_host_group(ids, tokens, 9, 3, l->offsets, l->slots);
    for (uint32_t e = 0; e < 9; e++) {
        l->jobs[e].slots = l->slots + l->offsets[e];
        l->jobs[e].n_slots = l->offsets[e + 1] - l->offsets[e];
    }
}

EACH_ISA(experts)
{
    enum { H = 256, W = 144, E = 9, K = 3 };
    struct krn_host *host = make_host(3, H), *one = make_host(1, H);
    for (int run = 0; run < KRN_TYPE_COUNT; run++) {
        const struct krn_type *type = &krn_type_table()[run];
        /* the down rows are too short for the 256-element types */
        const struct krn_type *down = krn_type_find(run & 1 ? KRN_BF16 : KRN_F16);
        struct layer all, few;
        for (int e = 0; e < E; e++)
            all.jobs[e] = few.jobs[e] = (struct krn_expert_job){
                .gate = krn_rand_weights(&rng, type, W, H),
                .up = krn_rand_weights(&rng, type, W, H),
                .down = krn_rand_weights(&rng, down, H, W),
                .gate_type = type,
                .up_type = type,
                .down_type = down,
            };
        uint32_t T = TOKENS[run], ids[131 * K];
        for (uint32_t t = 0; t < T; t++) /* expert 4 is never chosen, 0 and 1 by all */
            for (uint32_t s = 0; s < K; s++)
                ids[t * K + s] = (uint32_t[]){t & 1, 1 - (t & 1), 5 + t % 4}[s];
        make_jobs(&all, ids, T);
        size_t n = (size_t)T * K * H;
        float *x = krn_rand_floats(&rng, T * H, 0.3f), *out = poison(n), *want = poison(n), *z = poison(n);
        float *scratch = poison(krn_host_expert_scratch_bytes(T * K, W) / 4);
        krn_host_experts(host, all.jobs, E, x, K, H, W, scratch, out);
        cr_assert(poisoned(scratch[T * K * W]), "scratch too small");
        krn_ref_experts(all.jobs, E, x, K, H, W, want);
        double size = 0;
        for (size_t i = 0; i < n; i++)
            size = fmax(size, fabs((double)want[i]));
        near(out, want, n, 5e-6 * size, type->name);
        /* one expert a call, in another order, on one thread */
        for (int e = E - 1; e >= 0; e--)
            krn_host_experts(one, &all.jobs[e], 1, x, K, H, W, scratch, z);
        same(z, out, n, "experts one by one");
        for (uint32_t t = 0; t < T; t += 11) {
            memset(z, 0xff, n * 4);
            make_jobs(&few, ids + t * K, 1);
            krn_host_experts(host, few.jobs, E, x + t * H, K, H, W, scratch, z);
            same(z, out + t * K * H, K * H, "experts, token alone");
        }
        /* combine */
        float *w = krn_rand_floats(&rng, T * K, 1), *y = poison(T * H), *yr = poison(T * H);
        for (uint32_t i = 0; i < T * H; i++)
            y[i] = yr[i] = x[i];
        krn_host_combine(host, out, w, T, K, H, y);
        krn_ref_combine(out, w, T, K, H, yr);
        near(y, yr, T * H, 3e-6 * size + 1e-6, "combine");
        memcpy(z, x + (T - 1) * H, H * 4);
        krn_host_combine(one, out + (T - 1) * K * H, w + (T - 1) * K, 1, K, H, z);
        same(z, y + (T - 1) * H, H, "combine alone");
        for (uint32_t i = 0; i < H; i++) { /* in top-k order, exactly */
            volatile float sum = 0;
            for (uint32_t s = 0; s < K; s++) {
                volatile float product = w[s] * out[s * H + i];
                sum += product;
            }
            cr_assert(y[i] == x[i] + sum);
        }
        krn_host_experts(host, all.jobs + 4, 1, x, K, H, W, NULL, NULL); /* no slot: nothing to do */
        for (int e = 0; e < E; e++) {
            free((void *)all.jobs[e].gate);
            free((void *)all.jobs[e].up);
            free((void *)all.jobs[e].down);
        }
        free(x);
        free(out);
        free(want);
        free(z);
        free(scratch);
        free(w);
        free(y);
        free(yr);
    }
    drop_host(host);
    drop_host(one);
}

#ifdef __x86_64__
Test(kernels, v3_and_v4_agree)
{
    const struct krn_ops *a = &krn_ops_v3, *b = &krn_ops_v4;
    if (strcmp(krn_host_isa(), "v4") != 0)
        cr_skip_test("this CPU has no v4");
    float *w = krn_rand_floats(&rng, 13 * 272, 1), *x = krn_rand_floats(&rng, 4 * 272, 30);
    float y[2][4][16];
    memset(y, 0xff, sizeof y);
    const float *xs[4] = {x, x + 272, x + 544, x + 816};
    for (uint32_t nt = 1; nt <= 4; nt++)
        for (int i = 0; i < 2; i++)
            (i ? b : a)->tile(xs, nt, w, 272, 13, (float *const[]){y[i][0], y[i][1], y[i][2], y[i][3]});
    cr_assert(memcmp(y[0], y[1], sizeof y[0]) == 0);
    float s[2][400], u[400];
    for (int i = 0; i < 400; i++) {
        s[0][i] = s[1][i] = x[i];
        u[i] = w[i];
    }
    a->silu_mul(s[0], u, 391);
    b->silu_mul(s[1], u, 391);
    cr_assert(memcmp(s[0], s[1], sizeof s[0]) == 0);
    a->softmax(s[0], 375);
    b->softmax(s[1], 375);
    cr_assert(memcmp(s[0], s[1], sizeof s[0]) == 0);
    float *k = krn_rand_floats(&rng, 192 * 80, 2), *v = krn_rand_floats(&rng, 192 * 80, 2);
    struct krn_kv kv = {k, v, 192, 1, 80};
    const float *q[7];
    float o[2][7][80];
    uint32_t pos[7];
    for (uint32_t i = 0; i < 7; i++) {
        q[i] = x + 100 * i;
        pos[i] = 120 + i;
    }
    for (int i = 0; i < 2; i++)
        (i ? b : a)->attn(&kv, NULL, 0, q, pos, 7,
                          (float *const[]){o[i][0], o[i][1], o[i][2], o[i][3], o[i][4], o[i][5], o[i][6]});
    cr_assert(memcmp(o[0], o[1], sizeof o[0]) == 0);
    free(w);
    free(x);
    free(k);
    free(v);
}
#endif

Test(kernels, limits)
{
    struct krn_shape ok = {256, 8, 2, 64, 48, 8, 64}, s;
    struct shm_error err;
    cr_assert(krn_host_shape_check(&ok, &err) == 0);
#define BAD(field, value)                                                                                    \
    s = ok;                                                                                                  \
    s.field = value;                                                                                         \
    cr_assert(krn_host_shape_check(&s, &err) == -EINVAL && err.text[0], #field)
    BAD(hidden, 250);
    BAD(hidden, 0);
    BAD(width, 60);
    BAD(width, 0);
    BAD(head_dim, 272);
    BAD(head_dim, 40);
    BAD(kv_heads, 3);
    BAD(kv_heads, 0);
    BAD(heads, 0);
    BAD(experts, 1025);
    BAD(experts, 0);
    BAD(top_k, 49);
    BAD(top_k, 0);
    uint32_t ctx = 7;
    size_t n = 7;
    cr_assert(krn_host_kv_size(65, 2, 64, &ctx, &n) == 0 && ctx == 128 && n == 128 * 2 * 64);
    cr_assert(krn_host_kv_size(0, 2, 64, &ctx, &n) == -EINVAL);
    cr_assert(krn_host_kv_size(UINT32_MAX, 2, 64, &ctx, &n) == -EOVERFLOW);
    cr_assert(krn_host_kv_size(UINT32_MAX / 2, UINT32_MAX, UINT32_MAX, &ctx, &n) == -EOVERFLOW && ctx == 128);
    struct krn_host *host = NULL;
    struct krn_pool *pool;
    cr_assert(krn_pool_create(1, &pool) == 0);
    cr_assert(krn_host_create(NULL, 64, &host) == -EINVAL && krn_host_create(pool, 0, &host) == -EINVAL);
    cr_assert(host == NULL);
    krn_host_destroy(&host);
    krn_host_destroy(NULL);
    krn_pool_destroy(&pool);
}
