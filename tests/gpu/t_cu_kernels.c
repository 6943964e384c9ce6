/* SPDX-License-Identifier: MIT */
/*
 * CUDA kernels against the reference, on odd sizes, with poisoned outputs and
 * every storage type; and batch invariance, bit by bit. Exit 77 without a
 * driver or without kernels.
 *
 *     t_cu_kernels [--small] [NAME...]      only these; fewer cases (where kernels run on the CPU)
 */
#include <stdbool.h>

#include "shm/shm_mask.h"
#include "shm/shm_worker.h"
#include "tests/gpu/cu_kit.h"

static int failures;
static bool small;
#define FAIL(...)                                                                                            \
    do {                                                                                                     \
        if (failures++ < 40) {                                                                               \
            fprintf(stderr, "FAILED %s:%d: ", __FILE__, __LINE__);                                           \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
        }                                                                                                    \
    } while (0)

/* ||got - want|| / ||want|| <= tol; NaN fails; the bytes behind are still poison. */
static void close_to(const float *got, const float *want, size_t n, double tol, const char *what)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)got[i] - (double)want[i];
        diff += d * d;
        norm += (double)want[i] * want[i];
    }
    double e = sqrt(diff / (norm > 0 ? norm : 1));
    if (!(e <= tol))
        FAIL("%s: relative error %.3g, allowed %.3g", what, e, tol);
}

static void clean_behind(const void *end, const char *what)
{
    uint32_t u;
    memcpy(&u, end, 4);
    if (u != UINT32_MAX)
        FAIL("%s: written past the end", what);
}

static void same(const void *a, const void *b, size_t bytes, const char *what)
{
    if (memcmp(a, b, bytes) != 0)
        FAIL("%s: other bits", what);
}

static float *floats_of(const uint16_t *h, size_t n)
{
    float *f = krn_alloc(n * 4);
    for (size_t i = 0; i < n; i++)
        f[i] = f16_to(h[i]);
    return f;
}

struct device_mat {
    struct krn_mat host;
    struct krn_cu_matrix m;
};

static struct device_mat make_mat(const struct krn_type *type, uint32_t rows, uint32_t cols)
{
    struct device_mat r = {.host = {krn_rand_weights(&rng, type, rows, cols), type, rows, cols}};
    uint64_t row_bytes;
    NEED(krn_row_bytes(type, cols, &row_bytes));
    r.m = krn_cu_matrix_of(&r.host, cu_copy(r.host.data, (size_t)(row_bytes * rows)));
    return r;
}

/* The matrix with its weights rounded to f16, as the tensor cores see them. The caller frees .data. */
static struct krn_mat rounded(const struct krn_mat *m)
{
    size_t n = (size_t)m->rows * m->cols;
    float *w = krn_alloc(n * 4);
    uint64_t row_bytes = 0;
    NEED(krn_row_bytes(m->type, m->cols, &row_bytes));
    for (uint32_t r = 0; r < m->rows; r++)
        krn_dequant_row(m->type, (const char *)m->data + r * row_bytes, w + (size_t)r * m->cols, m->cols);
    free(f16_round(w, n));
    return (struct krn_mat){w, krn_type_find(KRN_F32), m->rows, m->cols};
}

/* A row length that the type has, near the wanted one. */
static uint32_t fit_cols(const struct krn_type *type, uint32_t cols)
{
    uint32_t step = type->block_elems > 16 ? type->block_elems : 16;
    return (cols + step - 1) / step * step;
}

static void test_dequant(void)
{
    for (int ty = 0; ty < KRN_TYPE_COUNT; ty++) {
        const struct krn_type *type = &krn_type_table()[ty];
        uint32_t rows = 37, cols = fit_cols(type, 336);
        size_t n = (size_t)rows * cols;
        struct device_mat m = make_mat(type, rows, cols);
        uint32_t ids[37];
        for (uint32_t i = 0; i < rows; i++)
            ids[i] = rows - 1 - i;
        krn_cuda_ptr d_ids = cu_copy(ids, sizeof ids), y = cu_alloc(n * 4), h = cu_alloc(n * 2);
        NEED(krn_cu_embed(cu, stream, &m.m, d_ids, rows, y));
        NEED(krn_cu_expand(cu, stream, &m.m, h));
        float *got = cu_get(y, n * 4), *want = krn_alloc(n * 4);
        uint16_t *got_h = cu_get(h, n * 2);
        float *wide = floats_of(got_h, n);
        for (uint32_t r = 0; r < rows; r++)
            krn_dequant_row(type, (const char *)m.host.data + (size_t)r * m.m.row_bytes,
                            want + (size_t)r * cols, cols);
        for (uint32_t r = 0; r < rows; r++)
            close_to(got + (size_t)(rows - 1 - r) * cols, want + (size_t)r * cols, cols, 2e-5, type->name);
        close_to(wide, want, n, 4e-4, type->name);
        for (size_t i = 0; i < n; i++)
            if (!(fabs((double)wide[i] - (double)want[i]) <= fabs((double)want[i]) / 1800 + 1e-5)) {
                FAIL("%s: weight %zu is %g, not %g", type->name, i, (double)wide[i], (double)want[i]);
                break;
            }
        if (type->ggml_id == KRN_F32 || type->ggml_id == KRN_BF16) { /* cut off; and in place */
            const float large[4] = {1e5f, -3e38f, INFINITY, 7e4f};
            uint16_t top[4];
            for (int i = 0; i < 4; i++)
                memcpy(&top[i], (const char *)&large[i] + 2, 2);
            cu_put(m.m.data, type->ggml_id == KRN_F32 ? (const void *)large : (const void *)top,
                   type->ggml_id == KRN_F32 ? sizeof large : sizeof top);
            krn_cuda_ptr target = type->ggml_id == KRN_F32 ? h : m.m.data;
            NEED(krn_cu_expand(cu, stream, &m.m, target));
            uint16_t *cut = cu_get(target, n * 2);
            for (int i = 0; i < 4; i++)
                if (cut[i] != (i == 1 ? 0xfbff : 0x7bff))
                    FAIL("%s: weight %g became %#x", type->name, (double)large[i], cut[i]);
            same(cut + 4, got_h + 4, (n - 4) * 2, "expand in place");
            free(cut);
        }
        clean_behind(got + n, "embed");
        clean_behind(got_h + n, "expand");
        free(got), free(got_h), free(wide), free(want), free((void *)m.host.data);
        cu_free_all();
    }
}

static void test_norm(void)
{
    static const uint32_t dims[] = {16, 80, 2048, 4112};
    for (int d = 0; d < 4; d++) {
        uint32_t dim = dims[d], tokens = 5;
        size_t n = (size_t)dim * tokens;
        float *x = krn_rand_floats(&rng, n, 3), *w = krn_rand_floats(&rng, dim, 1), *want = krn_alloc(n * 4);
        krn_cuda_ptr dx = cu_copy(x, n * 4), dw = cu_copy(w, dim * 4), y = cu_alloc(n * 4),
                     h = cu_alloc(n * 2);
        NEED(krn_cu_rmsnorm(cu, stream, dx, dw, 1e-6f, tokens, dim, y, h));
        krn_ref_rmsnorm(x, w, 1e-6f, tokens, dim, want);
        float *got = cu_get(y, n * 4);
        uint16_t *got_h = cu_get(h, n * 2);
        float *wide = floats_of(got_h, n);
        close_to(got, want, n, 1e-6, "rmsnorm");
        close_to(wide, want, n, 4e-4, "rmsnorm f16");
        for (uint32_t i = 0; i < dim; i++)
            w[i] *= 1e6f;
        cu_put(dw, w, dim * 4);
        NEED(krn_cu_rmsnorm(cu, stream, dx, dw, 1e-6f, tokens, dim, 0, h));
        uint16_t *cut = cu_get(h, n * 2);
        for (size_t i = 0; i < n; i++)
            if (fabs((double)want[i]) > 0.07 && (cut[i] & 0x7fff) != 0x7bff) {
                FAIL("rmsnorm: %g became %#x", 1e6 * (double)want[i], cut[i]);
                break;
            }
        free(cut);
        clean_behind(got + n, "rmsnorm");
        clean_behind(got_h + n, "rmsnorm f16");
        free(x), free(w), free(want), free(got), free(got_h), free(wide);
        cu_free_all();
    }
}

/* Dense and gemv: parity, and a token's bits alone, in a few, among many. */
static void test_dense(void)
{
    static const uint32_t tokens[] = {1, 3, 33, 64, 65, 129, 300}, rows[] = {5, 130, 256};
    enum { TOKENS = 300 };
    for (int ty = 0; ty < KRN_TYPE_COUNT; ty++)
        for (int r = 0; r < 3; r++) {
            const struct krn_type *type = &krn_type_table()[ty];
            uint32_t cols = fit_cols(type, r == 0 ? 16 : r == 1 ? 352 : 768), n = rows[r];
            struct device_mat m = make_mat(type, n, cols);
            float *x = krn_rand_floats(&rng, (size_t)TOKENS * cols, 1),
                  *want = krn_alloc((size_t)TOKENS * n * 4), *exact = krn_alloc((size_t)TOKENS * n * 4);
            uint16_t *xh = f16_round(x, (size_t)TOKENS * cols);
            struct krn_mat coarse = rounded(&m.host);
            krn_ref_matmul(&coarse, x, TOKENS, want);
            krn_ref_matmul(&m.host, x, TOKENS, exact);
            free((void *)coarse.data);
            krn_cuda_ptr dx = cu_copy(xh, (size_t)TOKENS * cols * 2),
                         scratch = cu_alloc((size_t)n * cols * 2);
            float *whole = NULL, *single = NULL;
            for (int t = 6; t >= 0; t--) {
                size_t size = (size_t)tokens[t] * n * 4;
                krn_cuda_ptr y = cu_alloc(size);
                NEED(krn_cu_dense(cu, stream, &m.m, dx, tokens[t], false, scratch, y));
                float *got = cu_get(y, size);
                close_to(got, want, (size_t)tokens[t] * n, 3e-4, type->name);
                clean_behind((char *)got + size, "dense");
                if (whole)
                    same(got, whole, size, "dense: tokens among fewer");
                NEED(krn_cu_dense(cu, stream, &m.m, dx, tokens[t], true, scratch, y));
                float *twice = cu_get(y, size);
                for (size_t i = 0; i < (size_t)tokens[t] * n; i++)
                    if (twice[i] != got[i] + got[i]) {
                        FAIL("%s: adding to y", type->name);
                        break;
                    }
                free(twice);
                if (whole)
                    free(got);
                else
                    whole = got;
            }
            for (uint32_t t = 1; t < TOKENS; t += 97) { /* at another place */
                krn_cuda_ptr y = cu_alloc(70 * n * 4);
                uint32_t count = t + 70 <= TOKENS ? 70 : TOKENS - t;
                NEED(krn_cu_dense(cu, stream, &m.m, dx + (size_t)t * cols * 2, count, false, scratch, y));
                float *got = cu_get(y, (size_t)count * n * 4);
                same(got, whole + (size_t)t * n, (size_t)count * n * 4, "dense: tokens at another place");
                free(got);
            }
            for (uint32_t t = 5; t >= 1 && t <= 5; t -= 2) {
                krn_cuda_ptr y = cu_alloc((size_t)t * n * 4);
                NEED(krn_cu_gemv(cu, stream, &m.m, dx + (5 - t) * cols * 2, t, false, y));
                float *got = cu_get(y, (size_t)t * n * 4);
                close_to(got, exact + (size_t)(5 - t) * n, (size_t)t * n, 1e-4, "gemv");
                clean_behind(got + (size_t)t * n, "gemv");
                if (single)
                    same(got, single + (size_t)(5 - t) * n, (size_t)t * n * 4, "gemv: tokens among fewer");
                if (single)
                    free(got);
                else
                    single = got;
            }
            free(whole), free(single), free(x), free(xh), free(want), free(exact), free((void *)m.host.data);
            cu_free_all();
        }
}

/* A sequence of `blocks` blocks, anywhere among spare + blocks ones of the KV memory. *ret_blocks: free(). */
static krn_cuda_ptr scattered(uint32_t blocks, uint32_t spare, uint32_t **ret_blocks)
{
    uint32_t n = blocks + spare, *order = krn_alloc(n * sizeof *order);
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(krn_rand(&rng) % (i + 1)), old = order[i];
        order[i] = order[j];
        order[j] = old;
    }
    *ret_blocks = order;
    return cu_copy(order, blocks * sizeof *order);
}

/* Where a sequence's position lies. */
static size_t cell_of(const uint32_t *blocks, uint32_t position)
{
    return (size_t)blocks[position / KRN_CU_KV_BLOCK] * KRN_CU_KV_BLOCK + position % KRN_CU_KV_BLOCK;
}

static uint32_t blocks_for(uint32_t keys)
{
    return (keys + KRN_CU_KV_BLOCK - 1) / KRN_CU_KV_BLOCK;
}

static void test_qkv(void)
{
    static const uint32_t dims[] = {16, 64, 128, 256};
    for (int d = 0; d < 4; d++)
        for (int normed = 0; normed < 2; normed++) {
            const uint32_t hd = dims[d], heads = 6, kv_heads = 2, tokens = 7, pos0 = 2301,
                           used = blocks_for(pos0 + tokens), ctx = (used + 2) * KRN_CU_KV_BLOCK;
            size_t nq = (size_t)tokens * heads * hd, nk = (size_t)tokens * kv_heads * hd,
                   cache = (size_t)kv_heads * ctx * hd * 2;
            float *q = krn_rand_floats(&rng, nq, 2), *k = krn_rand_floats(&rng, nk, 2),
                  *v = krn_rand_floats(&rng, nk, 2), *wq = krn_rand_floats(&rng, hd, 1),
                  *wk = krn_rand_floats(&rng, hd, 1);
            uint32_t positions[7];
            for (uint32_t t = 0; t < tokens; t++)
                positions[t] = pos0 + t;
            uint32_t *blocks;
            struct krn_cu_kv kv = {
                cu_alloc(cache), cu_alloc(cache), scattered(used, 2, &blocks), ctx, kv_heads, hd};
            v[3] = NAN; /* of a value: kept out of the memory */
            krn_cuda_ptr dq = cu_copy(q, nq * 4), dk = cu_copy(k, nk * 4), dv = cu_copy(v, nk * 4),
                         table = cu_alloc((size_t)tokens * hd * 4), y = cu_alloc(nq * 2);
            NEED(krn_cu_rope_table(cu, stream, pos0, tokens, hd, 1e6f, table));
            NEED(krn_cu_qkv(cu, stream, &kv, pos0, tokens, heads, dq, dk, dv,
                            normed ? cu_copy(wq, hd * 4) : 0, normed ? cu_copy(wk, hd * 4) : 0, 1e-6f, table,
                            y));
            krn_ref_head_norm_rope(q, normed ? wq : NULL, 1e-6f, positions, 1e6f, tokens, heads, hd);
            krn_ref_head_norm_rope(k, normed ? wk : NULL, 1e-6f, positions, 1e6f, tokens, kv_heads, hd);
            uint16_t *got = cu_get(y, nq * 2), *ck = cu_get(kv.k, cache), *cv = cu_get(kv.v, cache);
            float *wide = floats_of(got, nq);
            close_to(wide, q, nq, 4e-4, "q");
            clean_behind(got + nq, "q");
            v[3] = 0;
            for (uint32_t h = 0; h < kv_heads; h++)
                for (uint32_t t = 0; t < tokens; t++) {
                    size_t at = ((size_t)h * ctx + cell_of(blocks, pos0 + t)) * hd,
                           from = ((size_t)t * kv_heads + h) * hd;
                    float *fk = floats_of(ck + at, hd), *fv = floats_of(cv + at, hd);
                    close_to(fk, k + from, hd, 5e-4, "k cache");
                    close_to(fv, v + from, hd, 5e-4, "v cache");
                    free(fk), free(fv);
                    memset(ck + at, 0xff, hd * 2);
                    memset(cv + at, 0xff, hd * 2);
                }
            for (size_t i = 0; i < (size_t)kv_heads * ctx * hd; i++)
                if (ck[i] != 0xffff || cv[i] != 0xffff) {
                    FAIL("KV written outside its cells");
                    break;
                }
            free(blocks), free(q), free(k), free(v), free(wq), free(wk), free(got), free(ck), free(cv),
                free(wide);
            cu_free_all();
        }
}

/* Random f16 keys and values from position 0 (host: [keys][kv_heads][hd]) in scattered blocks of a memory
 * that is poisoned as far as it may be: keys are no numbers, values as large as they get. */
static struct krn_cu_kv make_kv(uint32_t keys, uint32_t kv_heads, uint32_t hd, float **ret_k, float **ret_v)
{
    const uint32_t used = blocks_for(keys), ctx = (used + 2) * KRN_CU_KV_BLOCK;
    size_t n = (size_t)keys * kv_heads * hd, cache = (size_t)kv_heads * ctx * hd;
    uint16_t *h = krn_alloc(cache * 2);
    uint32_t *blocks;
    struct krn_cu_kv kv = {0, 0, scattered(used, 2, &blocks), ctx, kv_heads, hd};
    for (int which = 0; which < 2; which++) {
        float *x = krn_rand_floats(&rng, n, which ? 1 : 2);
        free(f16_round(x, n));
        for (size_t i = 0; i < cache; i++)
            h[i] = !which ? 0xffff : i % 2 ? 0x7bff : 0xfbff;
        for (uint32_t j = 0; j < keys; j++)
            for (uint32_t g = 0; g < kv_heads; g++)
                for (uint32_t d = 0; d < hd; d++)
                    h[((size_t)g * ctx + cell_of(blocks, j)) * hd + d] =
                        f16_of(x[((size_t)j * kv_heads + g) * hd + d]);
        *(which ? &kv.v : &kv.k) = cu_copy(h, cache * 2);
        *(which ? ret_v : ret_k) = x;
    }
    free(blocks);
    free(h);
    return kv;
}

/* Consecutive tokens of kv's sequence, as rows. */
static struct krn_cu_rows rows_of(const struct krn_cu_kv *kv, uint32_t position, uint32_t tokens)
{
    struct krn_cu_row row[KRN_CU_ROWS_MAX];
    for (uint32_t t = 0; t < tokens; t++)
        row[t] = (struct krn_cu_row){.blocks = kv->blocks, .position = position + t};
    return (struct krn_cu_rows){cu_copy(row, tokens * sizeof *row), tokens, position + tokens - 1};
}

static void test_attention(void)
{
    static const struct {
        uint32_t hd, heads, kv_heads, pos0, tokens;
    } cases[] = {{128, 4, 2, 0, 1},     {128, 8, 1, 0, 63},    {128, 2, 2, 0, 130},
                 {128, 4, 1, 77, 300},  {128, 3, 1, 511, 129}, {64, 4, 2, 0, 65},
                 {64, 12, 1, 200, 257}, {64, 2, 1, 1000, 1},   {128, 64, 1, 200, 300}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c += small ? 3 : 1) {
        const uint32_t hd = cases[c].hd, heads = cases[c].heads, kv_heads = cases[c].kv_heads,
                       pos0 = cases[c].pos0, tokens = cases[c].tokens, keys = pos0 + tokens;
        float *k = NULL, *v = NULL;
        struct krn_cu_kv kv = make_kv(keys, kv_heads, hd, &k, &v);
        size_t row = (size_t)heads * hd, n = tokens * row;
        float *q = krn_rand_floats(&rng, n, 2), *want = krn_alloc(n * 4);
        uint16_t *qh = f16_round(q, n);
        krn_ref_attention(k, v, kv_heads, hd, pos0, tokens, heads, q, want);
        krn_cuda_ptr dq = cu_copy(qh, n * 2), y = cu_alloc(n * 2);
        NEED(krn_cu_attention(cu, stream, &kv, pos0, tokens, heads, dq, y));
        uint16_t *got = cu_get(y, n * 2);
        float *wide = floats_of(got, n);
        close_to(wide, want, n, 6e-4, "attention");
        clean_behind(got + n, "attention");
        static const uint32_t chunks[] = {1, 37, 64, 128, 200};
        for (size_t i = small ? 3 : 0; i < 5; i++) {
            krn_cuda_ptr z = cu_alloc(n * 2);
            for (uint32_t t = 0; t < tokens; t += chunks[i]) {
                uint32_t count = tokens - t < chunks[i] ? tokens - t : chunks[i];
                NEED(krn_cu_attention(cu, stream, &kv, pos0 + t, count, heads, dq + t * row * 2,
                                      z + t * row * 2));
            }
            uint16_t *other = cu_get(z, n * 2);
            same(other, got, n * 2, "attention in chunks");
            free(other);
        }
        /* as generated tokens */
        krn_cuda_ptr z = cu_alloc(n * 2),
                     scratch = cu_alloc(krn_cu_decode_scratch_bytes(kv.ctx, tokens, heads, hd));
        for (uint32_t t = 0; t < tokens; t += KRN_CU_ROWS_MAX) {
            const struct krn_cu_rows rows =
                rows_of(&kv, pos0 + t, tokens - t < KRN_CU_ROWS_MAX ? tokens - t : KRN_CU_ROWS_MAX);
            NEED(krn_cu_decode(cu, stream, &kv, &rows, heads, dq + t * row * 2, scratch, z + t * row * 2));
        }
        uint16_t *one = cu_get(z, n * 2);
        float *wide_one = floats_of(one, n);
        close_to(wide_one, want, n, 4e-4, "decode attention");
        clean_behind(one + n, "decode attention");
        krn_cuda_ptr last = cu_alloc(row * 2);
        const struct krn_cu_rows end = rows_of(&kv, keys - 1, 1);
        NEED(krn_cu_decode(cu, stream, &kv, &end, heads, dq + (tokens - 1) * row * 2, scratch, last));
        uint16_t *alone = cu_get(last, row * 2);
        same(alone, one + (tokens - 1) * row, row * 2, "decode attention alone");
        free(alone), free(one), free(wide_one), free(got), free(wide), free(q), free(qh), free(want), free(k),
            free(v);
        cu_free_all();
    }
}

static void test_router(void)
{
    static const struct {
        uint32_t experts, top_k, hidden, tokens;
    } cases[] = {{128, 8, 2048, 67}, {8, 2, 48, 33},     {1, 1, 16, 3},
                 {200, 200, 256, 5}, {1024, 10, 80, 40}, {512, 8, 64, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int renorm = 0; renorm < 2; renorm++) {
            const uint32_t E = cases[c].experts, K = cases[c].top_k, H = cases[c].hidden, T = cases[c].tokens;
            struct krn_mat m = {krn_rand_weights(&rng, krn_type_find(KRN_F32), E, H), krn_type_find(KRN_F32),
                                E, H};
            float *x = krn_rand_floats(&rng, (size_t)T * H, 3), *want = krn_alloc((size_t)T * E * 4);
            krn_cuda_ptr dx = cu_copy(x, (size_t)T * H * 4), dw = cu_copy(m.data, (size_t)E * H * 4),
                         ds = cu_alloc((size_t)T * E * 4), ids = cu_alloc((size_t)T * K * 4),
                         weights = cu_alloc((size_t)T * K * 4);
            NEED(krn_cu_scores(cu, stream, dx, dw, T, E, H, ds));
            krn_ref_matmul(&m, x, T, want);
            float *scores = cu_get(ds, (size_t)T * E * 4);
            close_to(scores, want, (size_t)T * E, 2e-6, "scores");
            clean_behind(scores + (size_t)T * E, "scores");
            krn_cuda_ptr one = cu_alloc(E * 4);
            NEED(krn_cu_scores(cu, stream, dx + (size_t)(T - 1) * H * 4, dw, 1, E, H, one));
            float *alone = cu_get(one, E * 4);
            same(alone, scores + (size_t)(T - 1) * E, E * 4, "scores alone");
            /* equal scores: the lower id first */
            for (uint32_t e = 0; E > 2 && e < E; e++)
                scores[e] = (float)(e % 3);
            cu_put(ds, scores, (size_t)T * E * 4);
            NEED(krn_cu_select(cu, stream, ds, T, E, K, renorm, ids, weights));
            uint32_t *got = cu_get(ids, (size_t)T * K * 4), *ref = krn_alloc((size_t)T * K * 4);
            float *gw = cu_get(weights, (size_t)T * K * 4), *rw = krn_alloc((size_t)T * K * 4);
            krn_ref_router(scores, T, E, K, renorm, ref, rw);
            same(got, ref, (size_t)T * K * 4, "choice");
            close_to(gw, rw, (size_t)T * K, 1e-5, "router weights");
            clean_behind(got + (size_t)T * K, "ids");
            clean_behind(gw + (size_t)T * K, "weights");
            free(alone), free(got), free(ref), free(gw), free(rw), free(scores), free(want), free(x);
            free((void *)m.data);
            cu_free_all();
        }
    /* not a number: smallest; ids stay valid */
    float nan[4] = {NAN, 1, INFINITY, NAN};
    krn_cuda_ptr s = cu_copy(nan, sizeof nan), ids = cu_alloc(16), weights = cu_alloc(16);
    NEED(krn_cu_select(cu, stream, s, 1, 4, 4, true, ids, weights));
    uint32_t *got = cu_get(ids, 16);
    if (got[0] != 2 || got[1] != 1 || got[2] != 0 || got[3] != 3)
        FAIL("NaN scores: %u %u %u %u", got[0], got[1], got[2], got[3]);
    free(got);
    cu_free_all();
}

static uint32_t *random_choice(uint32_t tokens, uint32_t experts, uint32_t top_k)
{
    uint32_t *ids = krn_alloc((size_t)tokens * top_k * 4);
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t s = 0; s < top_k; s++) {
            uint32_t e, i;
            do {
                e = krn_rand(&rng) % experts;
                e = krn_rand(&rng) % 3 ? e / 2 : e; /* some are rare */
                for (i = 0; i < s && ids[t * top_k + i] != e; i++)
                    ;
            } while (i < s);
            ids[t * top_k + s] = e;
        }
    return ids;
}

static struct krn_cu_groups make_groups(uint32_t tokens, uint32_t experts, uint32_t top_k)
{
    uint64_t hist = krn_cu_hist_bytes(tokens, top_k, experts);
    return (struct krn_cu_groups){cu_alloc(experts * 4),
                                  cu_alloc((experts + 1) * 4),
                                  cu_alloc((size_t)tokens * top_k * 4),
                                  cu_alloc(hist),
                                  cu_alloc(hist),
                                  0};
}

struct published {
    struct shm_mask mask;
    uint32_t tokens[KRN_EXPERTS_MAX], predicted[KRN_EXPERTS_MAX];
    uint64_t published_ns, seq;
};

static void test_group(void)
{
    static const struct {
        uint32_t experts, top_k, tokens;
    } cases[] = {{128, 8, 4096}, {8, 2, 33}, {5, 1, 1}, {1024, 8, 1000}, {100, 4, 513}};
    void *memory;
    krn_cuda_ptr host;
    NEED(KRN_CUDA(host_alloc, &memory, sizeof(struct published), KRN_CUDA_HOST_DEVICEMAP));
    NEED(KRN_CUDA(host_pointer, &host, memory, 0));
    volatile struct published *p = memory;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t E = cases[c].experts, K = cases[c].top_k, T = cases[c].tokens;
        uint32_t *ids = random_choice(T, E, K), *next = random_choice(T, E, K);
        krn_cuda_ptr d_ids = cu_copy(ids, (size_t)T * K * 4), d_next = cu_copy(next, (size_t)T * K * 4);
        struct krn_cu_groups g = make_groups(T, E, K);
        const uint32_t predicted = c % 2 ? T : (T + 2) / 3; /* a sample of them is enough */
        g.predicted_tokens = c % 2 ? 0 : predicted;
        struct krn_cu_publication where = {
            .mask = host + offsetof(struct published, mask),
            .tokens = host + offsetof(struct published, tokens),
            .predicted = host + offsetof(struct published, predicted),
            .published_ns = host + offsetof(struct published, published_ns),
            .seq = host + offsetof(struct published, seq),
            .value = c + 7,
        };
        memset(memory, 0xff, sizeof(struct published));
        NEED(krn_cu_group(cu, stream, d_ids, d_next, T, E, K, &where, &g));
        while (p->seq != c + 7 && krn_cuda.stream_query(stream) == KRN_CUDA_NOT_READY)
            ;
        uint32_t *offsets = krn_alloc((E + 1) * 4), *slots = krn_alloc((size_t)T * K * 4),
                 *expected = krn_alloc(E * 4);
        krn_host_group(ids, T, E, K, offsets, slots);
        memset(expected, 0, E * 4);
        for (uint32_t i = 0; i < predicted * K; i++)
            expected[next[i]]++;
        for (uint32_t e = 0; e < E; e++) {
            uint32_t count = offsets[e + 1] - offsets[e];
            if (p->tokens[e] != count || (p->mask.word[e / 64] >> (e % 64) & 1) != (count != 0) ||
                p->predicted[e] != expected[e]) {
                FAIL("published set of expert %u of %u", e, E);
                break;
            }
        }
        for (uint32_t e = E; e < KRN_EXPERTS_MAX; e++)
            if (p->mask.word[e / 64] >> (e % 64) & 1) {
                FAIL("mask beyond %u experts", E);
                break;
            }
        cu_wait();
        if (p->seq != c + 7)
            FAIL("sequence word not written");
        uint32_t *go = cu_get(g.offsets, (E + 1) * 4), *gs = cu_get(g.slots, (size_t)T * K * 4);
        same(go, offsets, (E + 1) * 4, "offsets");
        same(gs, slots, (size_t)T * K * 4, "slots");
        clean_behind(gs + (size_t)T * K, "slots");
        free(go), free(gs), free(offsets), free(slots), free(expected), free(ids), free(next);
        cu_free_all();
    }
    krn_cuda.host_free(memory);
}

/* Experts: residents, then ring slots group by group as a table says; one expert is in neither. */
struct expert_case {
    const struct krn_type *gate, *up, *down;
    uint32_t experts, top_k, hidden, width, tokens;
    bool decode;
    float scale; /* of the activations */
};

#define GROUPS 3u

/* One expert with everything rounded where the device rounds, summed in double: what is left is the order of
 * summation and weights that fall to the other side (a SwiGLU of sums near zero magnifies rounding). */
static bool hidden_beyond, hidden_cut; /* some were more than f16 reaches, than a sixteenth reaches */

static void reference_expert(const struct expert_case *c, const struct krn_expert_job *job, const float *x,
                             float *out)
{
    const uint32_t H = c->hidden, W = c->width;
    const struct krn_mat stored[] = {
        {job->gate, c->gate, W, H}, {job->up, c->up, W, H}, {job->down, c->down, H, W}};
    struct krn_mat m[3];
    float *g = krn_alloc(W * 4), *u = krn_alloc(W * 4);
    for (int i = 0; i < 3; i++)
        m[i] = c->decode ? stored[i] : rounded(&stored[i]);
    for (uint32_t i = 0; i < job->n_slots; i++) {
        const float *xt = x + (size_t)(job->slots[i] / c->top_k) * H;
        krn_ref_matmul(&m[0], xt, 1, g);
        krn_ref_matmul(&m[1], xt, 1, u);
        for (uint32_t r = 0; r < W; r++) {
            float v = (float)(g[r] / (1.0 + exp(-(double)g[r])) * u[r] / KRN_CU_HIDDEN_SCALE);
            hidden_beyond |= fabsf(v) * KRN_CU_HIDDEN_SCALE > 65504;
            hidden_cut |= fabsf(v) > 65504;
            g[r] = f16_to(f16_of(v)) * KRN_CU_HIDDEN_SCALE;
        }
        krn_ref_matmul(&m[2], g, 1, out + (size_t)job->slots[i] * H);
    }
    for (int i = 0; i < 3 && !c->decode; i++)
        free((void *)m[i].data);
    free(g), free(u);
}

static void run_experts(const struct expert_case *c)
{
    const uint32_t E = c->experts, K = c->top_k, T = c->tokens, H = c->hidden, W = c->width;
    uint64_t rg, ru, rd;
    NEED(krn_row_bytes(c->gate, H, &rg) || krn_row_bytes(c->up, H, &ru) || krn_row_bytes(c->down, W, &rd));
    size_t up_at = (rg * W + 255) & ~(size_t)255, down_at = up_at + ((ru * W + 255) & ~(size_t)255),
           slot_bytes = (down_at + rd * H + 255) & ~(size_t)255, n_slots = (size_t)T * K;
    uint8_t *blobs = krn_alloc(slot_bytes * E);
    memset(blobs, 0xff, slot_bytes * E);
    struct krn_expert_job *jobs = calloc(E, sizeof *jobs);
    for (uint32_t e = 0; e < E; e++) {
        uint8_t *b = blobs + e * slot_bytes;
        void *g = krn_rand_weights(&rng, c->gate, W, H), *u = krn_rand_weights(&rng, c->up, W, H),
             *d = krn_rand_weights(&rng, c->down, H, W);
        memcpy(b, g, rg * W), memcpy(b + up_at, u, ru * W), memcpy(b + down_at, d, rd * H);
        free(g), free(u), free(d);
    }
    float *x = krn_rand_floats(&rng, (size_t)T * H, c->scale), *want = krn_alloc(n_slots * H * 4);
    uint16_t *xh = f16_round(x, (size_t)T * H);
    uint32_t *ids = random_choice(T, E, K), *offsets = krn_alloc((E + 1) * 4),
             *slots = krn_alloc(n_slots * 4);
    krn_host_group(ids, T, E, K, offsets, slots);

    krn_cuda_ptr d_ids = cu_copy(ids, n_slots * 4), dx = cu_copy(xh, (size_t)T * H * 2),
                 store = cu_copy(blobs, slot_bytes * E), ring = cu_alloc(slot_bytes * E);
    struct krn_cu_groups groups = make_groups(T, E, K);
    NEED(krn_cu_group(cu, stream, d_ids, 0, T, E, K, NULL, &groups));
    void *table_memory;
    krn_cuda_ptr table;
    NEED(KRN_CUDA(host_alloc, &table_memory, E * 4, KRN_CUDA_HOST_DEVICEMAP));
    NEED(KRN_CUDA(host_pointer, &table, table_memory, 0));
    uint32_t *entry = table_memory;
    uint64_t *resident = calloc(E, sizeof *resident);
    uint32_t missing = offsets[1] != 0 ? 0 : 1;
    for (uint32_t e = 0; e < E; e++) {
        entry[e] = shm_entry_make(e % 5 == 4 ? SHM_ENTRY_DROPPED : SHM_ENTRY_SLOT, e % GROUPS, E - 1 - e);
        if (e == missing)
            entry[e] = 0;
        else if (e % 4 == 1 || e % 5 == 4) /* resident; its entry must not be looked at */
            resident[e] = store + e * slot_bytes;
        else
            NEED(KRN_CUDA(copy_device_async, ring + (E - 1 - e) * slot_bytes, store + e * slot_bytes,
                          slot_bytes, stream));
    }
    struct krn_cu_expert_shape shape = {
        {0, c->gate->ggml_id, W, H, (uint32_t)rg},
        {up_at, c->up->ggml_id, W, H, (uint32_t)ru},
        {down_at, c->down->ggml_id, H, W, (uint32_t)rd},
        E,
        K,
    };
    static const uint32_t none[1];
    krn_cuda_ptr out = cu_alloc(n_slots * H * 4), ran = cu_copy(none, sizeof none);
    struct krn_cu_expert_run run = {.shape = &shape,
                                    .groups = &groups,
                                    .resident = cu_copy(resident, E * 8),
                                    .ring = ring,
                                    .slot_bytes = slot_bytes,
                                    .ring_slots = E,
                                    .tokens = T,
                                    .decode = c->decode,
                                    .ids = d_ids,
                                    .x_f16 = dx,
                                    .plan = cu_alloc(krn_cu_plan_bytes(T, K, E)),
                                    .hidden_rows = cu_alloc(n_slots * W * 2),
                                    .ran = ran,
                                    .out = out};
    NEED(krn_cu_experts(cu, stream, &run));
    run.table = table;
    for (uint32_t g = 0; g < GROUPS; g++) {
        run.group = g;
        run.group_end = g + 1;
        NEED(krn_cu_experts(cu, stream, &run));
    }
    float *got = cu_get(out, n_slots * H * 4);
    run.ran = 0;
    uint32_t *count_ran = cu_get(ran, 4), due = 0, n_jobs = 0;
    for (uint32_t e = 0; e < E; e++) /* of generated tokens the router counts the residents */
        due += e != missing && (!c->decode || !resident[e]) ? offsets[e + 1] - offsets[e] : 0;
    if (*count_ran != due)
        FAIL("experts %s: %u choices counted, %u run", c->gate->name, *count_ran, due);
    free(count_ran);
    for (uint32_t e = 0; e < E; e++) {
        const uint8_t *b = blobs + e * slot_bytes;
        uint32_t count = offsets[e + 1] - offsets[e];
        if (e != missing && count)
            jobs[n_jobs++] = (struct krn_expert_job){b,     b + up_at, b + down_at,        c->gate,
                                                     c->up, c->down,   slots + offsets[e], count};
    }
    memset(want, 0xff, n_slots * H * 4);
    for (uint32_t j = 0; j < n_jobs; j++)
        reference_expert(c, &jobs[j], x, want);
    for (uint32_t e = 0; e < E; e++)
        for (uint32_t i = offsets[e]; i < offsets[e + 1]; i++) {
            size_t at = (size_t)slots[i] * H;
            if (e == missing)
                same(got + at, want + at, H * 4, "rows of an expert that did not run");
            else
                close_to(got + at, want + at, H, 8e-3, c->gate->name);
        }
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n_slots * H; i++)
        if (!isnan(want[i])) {
            diff += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
            norm += (double)want[i] * want[i];
        }
    if (!(sqrt(diff / norm) < 6e-4))
        FAIL("experts %s: relative error %.3g of the whole", c->gate->name, sqrt(diff / norm));
    clean_behind(got + n_slots * H, "experts");

    /* The last tokens alone, every expert from a pointer: other tiles, other places, same bits. */
    uint32_t few = T > 9 ? 9 : T, t0 = T - few;
    for (uint32_t e = 0; e < E; e++)
        resident[e] = e == missing ? 0 : store + e * slot_bytes;
    krn_cuda_ptr out_few = cu_alloc((size_t)few * K * H * 4);
    NEED(krn_cu_group(cu, stream, d_ids + (size_t)t0 * K * 4, 0, few, E, K, NULL, &groups));
    run.resident = cu_copy(resident, E * 8);
    run.table = 0;
    run.tokens = few;
    run.ids = d_ids + (size_t)t0 * K * 4;
    run.x_f16 = dx + (size_t)t0 * H * 2;
    run.out = out_few;
    NEED(krn_cu_experts(cu, stream, &run));
    float *other = cu_get(out_few, (size_t)few * K * H * 4);
    same(other, got + (size_t)t0 * K * H, (size_t)few * K * H * 4, "experts: tokens among fewer");
    if (c->decode) { /* weighed and added by the last kernel, or by one of its own */
        float *w = krn_rand_floats(&rng, (size_t)few * K, 1), *y = krn_rand_floats(&rng, (size_t)few * H, 1);
        krn_cuda_ptr dw = cu_copy(w, (size_t)few * K * 4), apart = cu_copy(y, (size_t)few * H * 4),
                     joined = cu_copy(y, (size_t)few * H * 4);
        resident[missing] = store + missing * slot_bytes;
        run.resident = cu_copy(resident, E * 8);
        NEED(krn_cu_experts(cu, stream, &run));
        NEED(krn_cu_combine(cu, stream, out_few, dw, few, K, H, apart));
        run.weights = dw;
        run.out = joined;
        NEED(krn_cu_experts(cu, stream, &run));
        float *one = cu_get(apart, (size_t)few * H * 4), *two = cu_get(joined, (size_t)few * H * 4);
        same(two, one, (size_t)few * H * 4, "experts: added by the last kernel");
        clean_behind(two + (size_t)few * H, "experts: added by the last kernel");
        /* the same from the ring and the residents in one go */
        run.table = table;
        run.all = true;
        run.group = 0;
        run.group_end = GROUPS;
        for (uint32_t e = 0; e < E; e++) {
            bool slot = e != missing && e % 4 != 1 && e % 5 != 4;
            resident[e] = slot ? 0 : store + e * slot_bytes;
        }
        run.resident = cu_copy(resident, E * 8);
        run.out = cu_copy(y, (size_t)few * H * 4);
        NEED(krn_cu_experts(cu, stream, &run));
        float *three = cu_get(run.out, (size_t)few * H * 4);
        same(three, one, (size_t)few * H * 4, "experts: from ring and residents");
        free(w), free(y), free(one), free(two), free(three);
    }
    cu_wait();
    krn_cuda.host_free(table_memory);
    free(blobs), free(jobs), free(x), free(xh), free(want), free(ids), free(offsets), free(slots),
        free(resident);
    free(got), free(other);
    cu_free_all();
}

static void test_experts(void)
{
    /* F32 comes first, and its experts need more shared memory than some GPUs have (krn_cu.h) */
    const int first = device->shared_max < 110000, n = KRN_TYPE_COUNT - first;
    for (int ty = 0; ty < n; ty++) {
        const struct krn_type *table = krn_type_table() + first, *t = &table[ty],
                              *next = &table[(ty + 1) % n], *down = &table[(ty + 3) % n];
        run_experts(&(struct expert_case){t, t, t, small ? 3 : 6, 2, 256, 256, 150, false, 1});
        if (!small)
            run_experts(&(struct expert_case){t, next, down, 9, 3, 512, 256, 40, false, 1});
        run_experts(&(struct expert_case){t, t, down, 6, 2, 512, 256, 3, true, 1});
        if (t->block_elems <= 32)
            run_experts(
                &(struct expert_case){t, t, t, 5, 2, fit_cols(t, 80), fit_cols(t, 48), 130, false, 1});
    }
    /* several tiles of tokens for an expert, of every width */
    const struct krn_type *q4_k = krn_type_find(KRN_Q4_K);
    static const uint32_t tokens[] = {300, 60, 180, 440, 620};
    for (int i = 0; i < (small ? 1 : 5); i++)
        run_experts(&(struct expert_case){q4_k, q4_k, q4_k, 2, 1, 512, 256, tokens[i], false, 1});
    const struct krn_type *q6_k = krn_type_find(KRN_Q6_K), *q8_0 = krn_type_find(KRN_Q8_0);
    run_experts(&(struct expert_case){q6_k, q8_0, q6_k, 2, 1, 256, 256, 300, false, 1});
    /* hidden rows of a million and more: scaled, and the largest cut off */
    for (int decode = 0; decode < 2; decode++) {
        hidden_beyond = hidden_cut = false;
        run_experts(&(struct expert_case){q4_k, q4_k, q4_k, 3, 2, 256, 256, decode ? 3 : 40, decode, 60});
        if (!hidden_beyond || !hidden_cut)
            FAIL("the case of large hidden rows has none");
    }
}

static void test_combine(void)
{
    const uint32_t T = 37, K = 3, H = 80;
    float *out = krn_rand_floats(&rng, T * K * H, 1), *w = krn_rand_floats(&rng, T * K, 1),
          *y = krn_rand_floats(&rng, T * H, 1);
    krn_cuda_ptr dy = cu_copy(y, T * H * 4);
    NEED(krn_cu_combine(cu, stream, cu_copy(out, T * K * H * 4), cu_copy(w, T * K * 4), T, K, H, dy));
    krn_ref_combine(out, w, T, K, H, y);
    float *got = cu_get(dy, T * H * 4);
    close_to(got, y, T * H, 1e-6, "combine");
    clean_behind(got + T * H, "combine");
    free(out), free(w), free(y), free(got);
    cu_free_all();
}

/* Three matrices on one normed vector. */
static void test_product(void)
{
    static const uint32_t widths[] = {80, 352, 2048, 4352}, rows[] = {9, 4, 130};
    for (int ty = 0; ty < KRN_TYPE_COUNT; ty++)
        for (int w = small ? 1 : 0; w < 4; w += small ? 2 : 1) {
            const struct krn_type *table = krn_type_table(),
                                  *types[] = {&table[ty], &table[(ty + 3) % KRN_TYPE_COUNT], &table[ty]};
            uint32_t cols = widths[w];
            for (int i = 0; i < 3; i++)
                cols = fit_cols(types[i], cols);
            float *x = krn_rand_floats(&rng, 2 * cols, 2), *norm = krn_rand_floats(&rng, cols, 1),
                  *normed = krn_alloc(2 * cols * 4);
            krn_ref_rmsnorm(x, norm, 1e-6f, 2, cols, normed);
            struct krn_cu_product p = {.count = 3,
                                       .x = cu_copy(x, 2 * cols * 4),
                                       .norm = cu_copy(norm, cols * 4),
                                       .eps = 1e-6f,
                                       .tokens = 2};
            struct device_mat m[3];
            for (int i = 0; i < 3; i++) {
                m[i] = make_mat(types[i], rows[i], cols);
                p.m[i] = &m[i].m;
                p.y[i] = cu_alloc(2 * rows[i] * 4);
            }
            NEED(krn_cu_gemv_of(cu, stream, &p));
            for (int i = 0; i < 3; i++) {
                float *want = krn_alloc(2 * rows[i] * 4), *got = cu_get(p.y[i], 2 * rows[i] * 4);
                krn_ref_matmul(&m[i].host, normed, 2, want);
                close_to(got, want, 2 * rows[i], 1e-4, types[i]->name);
                clean_behind(got + 2 * rows[i], "product");
                struct krn_cu_product one = p;
                one.m[0] = p.m[i];
                one.y[0] = cu_alloc(rows[i] * 4);
                one.count = one.tokens = 1;
                one.x = p.x + cols * 4;
                NEED(krn_cu_gemv_of(cu, stream, &one));
                float *alone = cu_get(one.y[0], rows[i] * 4);
                same(alone, got + rows[i], rows[i] * 4, "product alone");
                free(want), free(got), free(alone), free((void *)m[i].host.data);
            }
            free(x), free(norm), free(normed);
            cu_free_all();
        }
}

/* From projections in one kernel: the same bits as step by step. */
static void test_token_attention(void)
{
    static const struct {
        uint32_t hd, heads, kv_heads, position;
    } cases[] = {{128, 8, 1, 0}, {128, 4, 2, 255}, {64, 40, 2, 256}, {128, 6, 2, 300}, {64, 2, 1, 2500}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t hd = cases[c].hd, heads = cases[c].heads, kv_heads = cases[c].kv_heads,
                       position = cases[c].position;
        float *k = NULL, *v = NULL, *q = krn_rand_floats(&rng, heads * hd, 2),
              *nk = krn_rand_floats(&rng, kv_heads * hd, 2), *nv = krn_rand_floats(&rng, kv_heads * hd, 2),
              *w = krn_rand_floats(&rng, 2 * hd, 1);
        struct krn_cu_kv kv = make_kv(position + 1, kv_heads, hd, &k, &v), other = kv;
        const size_t cache = (size_t)kv_heads * kv.ctx * hd * 2, row = heads * hd * 2;
        void *before = cu_get(kv.k, cache);
        other.k = cu_copy(before, cache);
        free(before);
        before = cu_get(kv.v, cache);
        other.v = cu_copy(before, cache);
        free(before);
        const krn_cuda_ptr q16 = cu_alloc(row), y = cu_alloc(row);
        struct krn_cu_token_heads h = {
            .q = cu_copy(q, heads * hd * 4),
            .k = cu_copy(nk, kv_heads * hd * 4),
            .v = cu_copy(nv, kv_heads * hd * 4),
            .q_weight = c % 2 ? 0 : cu_copy(w, hd * 4),
            .k_weight = c % 2 ? 0 : cu_copy(w + hd, hd * 4),
            .table = cu_alloc(hd * 4),
            .scratch = cu_alloc(krn_cu_decode_scratch_bytes(kv.ctx, 1, heads, hd)),
            .y_f16 = cu_alloc(row),
            .rows = rows_of(&kv, position, 1),
            .heads = heads,
            .eps = 1e-6f,
        };
        NEED(krn_cu_rope_rows(cu, stream, &h.rows, hd, 1e6f, h.table));
        NEED(krn_cu_token_attention(cu, stream, &kv, &h));
        NEED(krn_cu_qkv(cu, stream, &other, position, 1, heads, h.q, h.k, h.v, h.q_weight, h.k_weight, 1e-6f,
                        h.table, q16));
        NEED(krn_cu_decode(cu, stream, &other, &h.rows, heads, q16, h.scratch, y));
        void *got = cu_get(h.y_f16, row), *want = cu_get(y, row), *ka = cu_get(kv.k, cache),
             *kb = cu_get(other.k, cache), *va = cu_get(kv.v, cache), *vb = cu_get(other.v, cache);
        same(got, want, row, "attention from projections");
        clean_behind((char *)got + row, "attention from projections");
        same(ka, kb, cache, "its keys");
        same(va, vb, cache, "its values");
        free(got), free(want), free(ka), free(kb), free(va), free(vb), free(k), free(v), free(q), free(nk),
            free(nv), free(w);
        cu_free_all();
    }
}

/* Tokens of several sequences in one KV memory: each gets the bits that it gets alone. */
static void test_token_rows(void)
{
    static const struct {
        uint32_t hd, heads, kv_heads, rows;
        uint32_t position[6];
    } cases[] = {{128, 8, 1, 6, {0, 127, 128, 300, 5000, 255}},
                 {64, 40, 2, 3, {1, 700, 64}},
                 {128, 4, 4, 5, {2500, 2500, 12, 9000, 256}}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t hd = cases[c].hd, heads = cases[c].heads, kv_heads = cases[c].kv_heads,
                       rows = cases[c].rows;
        uint32_t most = 0, used = 0, *order;
        for (uint32_t r = 0; r < rows; r++) {
            most = cases[c].position[r] > most ? cases[c].position[r] : most;
            used += blocks_for(cases[c].position[r] + 1);
        }
        const uint32_t ctx = (used + 1) * KRN_CU_KV_BLOCK;
        const size_t cells = (size_t)ctx * kv_heads * hd, nq = (size_t)rows * heads * hd,
                     nk = (size_t)rows * kv_heads * hd;
        float *cache = krn_rand_floats(&rng, cells, 2), *q = krn_rand_floats(&rng, nq, 2),
              *k = krn_rand_floats(&rng, nk, 2), *v = krn_rand_floats(&rng, nk, 1),
              *w = krn_rand_floats(&rng, 2 * hd, 1);
        uint16_t *half = f16_round(cache, cells);
        const krn_cuda_ptr blocks = scattered(used, 1, &order);
        struct krn_cu_kv kv = {cu_copy(half, cells * 2), cu_copy(half, cells * 2), 0, ctx, kv_heads, hd};
        struct krn_cu_kv alone_kv = {
            cu_copy(half, cells * 2), cu_copy(half, cells * 2), 0, ctx, kv_heads, hd};
        struct krn_cu_row row[6];
        uint32_t first = 0;
        for (uint32_t r = 0; r < rows; r++) {
            row[r] = (struct krn_cu_row){.blocks = blocks + first * 4, .position = cases[c].position[r]};
            first += blocks_for(cases[c].position[r] + 1);
        }
        struct krn_cu_token_heads h = {
            .q = cu_copy(q, nq * 4),
            .k = cu_copy(k, nk * 4),
            .v = cu_copy(v, nk * 4),
            .q_weight = cu_copy(w, hd * 4),
            .k_weight = cu_copy(w + hd, hd * 4),
            .table = cu_alloc((size_t)rows * hd * 4),
            .scratch = cu_alloc(krn_cu_decode_scratch_bytes(most + 1, rows, heads, hd)),
            .y_f16 = cu_alloc(nq * 2),
            .rows = {cu_copy(row, rows * sizeof *row), rows, most},
            .heads = heads,
            .eps = 1e-6f,
        };
        NEED(krn_cu_rope_rows(cu, stream, &h.rows, hd, 1e6f, h.table));
        NEED(krn_cu_token_attention(cu, stream, &kv, &h));
        uint16_t *together = cu_get(h.y_f16, nq * 2);
        clean_behind(together + nq, "attention of several tokens");
        for (uint32_t r = 0; r < rows; r++) {
            struct krn_cu_token_heads one = h;
            one.q += (krn_cuda_ptr)r * heads * hd * 4;
            one.k += (krn_cuda_ptr)r * kv_heads * hd * 4;
            one.v += (krn_cuda_ptr)r * kv_heads * hd * 4;
            one.table = cu_alloc(hd * 4);
            one.y_f16 = cu_alloc((size_t)heads * hd * 2);
            one.rows = (struct krn_cu_rows){h.rows.at + r * sizeof *row, 1, cases[c].position[r]};
            NEED(krn_cu_rope_rows(cu, stream, &one.rows, hd, 1e6f, one.table));
            NEED(krn_cu_token_attention(cu, stream, &alone_kv, &one));
            void *alone = cu_get(one.y_f16, (size_t)heads * hd * 2);
            same(alone, together + (size_t)r * heads * hd, (size_t)heads * hd * 2, "attention alone");
            free(alone);
        }
        void *ka = cu_get(kv.k, cells * 2), *kb = cu_get(alone_kv.k, cells * 2),
             *va = cu_get(kv.v, cells * 2), *vb = cu_get(alone_kv.v, cells * 2);
        same(ka, kb, cells * 2, "keys of several tokens");
        same(va, vb, cells * 2, "values of several tokens");
        free(ka), free(kb), free(va), free(vb), free(cache), free(q), free(k), free(v), free(w), free(half),
            free(order), free(together);
        cu_free_all();
    }
}

/* Several tokens' choices: each as alone. */
static void test_router_rows(void)
{
    static const struct {
        uint32_t experts, top_k, hidden, tokens;
    } cases[] = {{128, 8, 2048, 5}, {8, 2, 48, KRN_CU_ROWS_MAX}, {1024, 10, 80, 3}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint32_t E = cases[c].experts, K = cases[c].top_k, H = cases[c].hidden, T = cases[c].tokens;
        float *x = krn_rand_floats(&rng, (size_t)T * H, 3), *norm = krn_rand_floats(&rng, H, 1),
              *m = krn_rand_floats(&rng, (size_t)E * H, 1);
        uint64_t *resident = krn_alloc(E * 8);
        for (uint32_t e = 0; e < E; e++)
            resident[e] = e % 3 ? 4096 + e : 0;
        struct krn_cu_token_route r = {
            .x = cu_copy(x, (size_t)T * H * 4),
            .norm = cu_copy(norm, H * 4),
            .w = cu_copy(m, (size_t)E * H * 4),
            .scores = cu_alloc((size_t)T * E * 4),
            .ids = cu_alloc((size_t)T * K * 4),
            .weights = cu_alloc((size_t)T * K * 4),
            .blobs = cu_alloc((size_t)T * K * 8),
            .resident = cu_copy(resident, E * 8),
            .tokens = T,
            .hidden = H,
            .experts = E,
            .top_k = K,
            .eps = 1e-6f,
            .renorm = true,
        };
        NEED(krn_cu_token_router(cu, stream, &r));
        uint32_t *ids = cu_get(r.ids, (size_t)T * K * 4);
        float *w = cu_get(r.weights, (size_t)T * K * 4);
        uint64_t *blobs = cu_get(r.blobs, (size_t)T * K * 8);
        clean_behind(ids + T * K, "tokens' ids");
        clean_behind(w + T * K, "tokens' weights");
        clean_behind(blobs + T * K, "tokens' addresses");
        for (uint32_t t = 0; t < T; t += c == 1 ? 9 : 1) {
            struct krn_cu_token_route one = r;
            one.x += (krn_cuda_ptr)t * H * 4;
            one.tokens = 1;
            one.scores = cu_alloc((size_t)E * 4);
            one.ids = cu_alloc(K * 4);
            one.weights = cu_alloc(K * 4);
            one.blobs = cu_alloc(K * 8);
            NEED(krn_cu_token_router(cu, stream, &one));
            void *i1 = cu_get(one.ids, K * 4), *w1 = cu_get(one.weights, K * 4),
                 *b1 = cu_get(one.blobs, K * 8);
            same(i1, ids + t * K, K * 4, "choice alone");
            same(w1, w + t * K, K * 4, "weights alone");
            same(b1, blobs + t * K, K * 8, "addresses alone");
            free(i1), free(w1), free(b1);
        }
        free(x), free(norm), free(m), free(resident), free(ids), free(w), free(blobs);
        cu_free_all();
    }
}

static void test_token_router(void)
{
    static const struct {
        uint32_t experts, top_k, hidden;
    } cases[] = {{128, 8, 2048}, {8, 2, 48}, {1, 1, 16}, {1024, 10, 2320}, {201, 64, 80}};
    void *memory;
    krn_cuda_ptr host;
    NEED(KRN_CUDA(host_alloc, &memory, sizeof(struct published), KRN_CUDA_HOST_DEVICEMAP));
    NEED(KRN_CUDA(host_pointer, &host, memory, 0));
    volatile struct published *pub = memory;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int renorm = 0; renorm < 2; renorm++) {
            const uint32_t E = cases[c].experts, K = cases[c].top_k, H = cases[c].hidden;
            struct krn_mat m = {krn_rand_weights(&rng, krn_type_find(KRN_F32), E, H), krn_type_find(KRN_F32),
                                E, H};
            float *x = krn_rand_floats(&rng, H, 3), *norm = krn_rand_floats(&rng, H, 1),
                  *normed = krn_alloc(H * 4), *want = krn_alloc(E * 4);
            uint32_t *next = random_choice(1, E, K);
            uint64_t *resident = krn_alloc(E * 8);
            for (uint32_t e = 0; e < E; e++)
                resident[e] = e % 3 ? 4096 + e : 0;
            if (E > 2) /* equal scores: the lower id first */
                memcpy((float *)m.data + (size_t)(E - 1) * H, m.data, H * 4);
            struct krn_cu_publication where = {
                .mask = host + offsetof(struct published, mask),
                .tokens = host + offsetof(struct published, tokens),
                .predicted = host + offsetof(struct published, predicted),
                .published_ns = host + offsetof(struct published, published_ns),
                .seq = host + offsetof(struct published, seq),
                .value = c + 7,
            };
            struct krn_cu_token_route r = {
                .x = cu_copy(x, H * 4),
                .norm = cu_copy(norm, H * 4),
                .w = cu_copy(m.data, (size_t)E * H * 4),
                .scores = cu_alloc(E * 4),
                .ids = cu_alloc(K * 4),
                .weights = cu_alloc(K * 4),
                .blobs = cu_alloc(K * 8),
                .resident = cu_copy(resident, E * 8),
                .publication = &where,
                .predicted_ids = cu_copy(next, K * 4),
                .tokens = 1,
                .hidden = H,
                .experts = E,
                .top_k = K,
                .eps = 1e-6f,
                .renorm = renorm,
            };
            memset(memory, 0xff, sizeof(struct published));
            NEED(krn_cu_token_router(cu, stream, &r));
            krn_ref_rmsnorm(x, norm, 1e-6f, 1, H, normed);
            krn_ref_matmul(&m, normed, 1, want);
            float *scores = cu_get(r.scores, E * 4), *w = cu_get(r.weights, K * 4), *rw = krn_alloc(K * 4);
            uint32_t *ids = cu_get(r.ids, K * 4), *ref = krn_alloc(K * 4);
            uint64_t *blobs = cu_get(r.blobs, K * 8);
            close_to(scores, want, E, 1e-5, "token's scores");
            clean_behind(scores + E, "token's scores");
            krn_ref_router(scores, 1, E, K, renorm, ref, rw);
            same(ids, ref, K * 4, "token's choice");
            close_to(w, rw, K, 1e-5, "token's weights");
            clean_behind(ids + K, "token's ids");
            clean_behind(w + K, "token's weights");
            clean_behind(blobs + K, "token's addresses");
            bool right = pub->seq == c + 7;
            for (uint32_t e = 0; e < KRN_EXPERTS_MAX; e++) {
                bool routed = false, expected = false;
                for (uint32_t i = 0; i < K; i++) {
                    routed |= ids[i] == e;
                    expected |= next[i] == e;
                    right &= blobs[i] == resident[ids[i]];
                }
                right &= (pub->mask.word[e / 64] >> (e % 64) & 1) == routed;
                right &= e >= E || (pub->tokens[e] == routed && pub->predicted[e] == expected);
            }
            if (!right)
                FAIL("token's publication of %u experts", E);
            free(x), free(norm), free(normed), free(want), free(next), free(resident), free(scores), free(w),
                free(rw), free(ids), free(ref), free(blobs), free((void *)m.data);
            cu_free_all();
        }
    krn_cuda.host_free(memory);
}

static void test_token(void)
{
    test_product();
    test_token_attention();
    test_token_rows();
    test_router_rows();
    test_token_router();
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {{"dequant", test_dequant}, {"norm", test_norm},           {"dense", test_dense},
                 {"qkv", test_qkv},         {"attention", test_attention}, {"router", test_router},
                 {"group", test_group},     {"experts", test_experts},     {"combine", test_combine},
                 {"token", test_token}};
    if (argc > 1 && strcmp(argv[1], "--small") == 0) {
        small = true;
        argv++;
        argc--;
    }
    int rc = cu_open();
    if (rc)
        return rc;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = argc < 2;
        for (int a = 1; a < argc; a++)
            wanted |= strcmp(argv[a], tests[i].name) == 0;
        if (!wanted)
            continue;
        int before = failures;
        tests[i].run();
        printf("%-10s %s\n", tests[i].name, failures == before ? "ok" : "FAILED");
        fflush(stdout);
    }
    krn_cuda.stream_destroy(stream);
    krn_cu_destroy(&cu);
    krn_cuda_device_close(&device);
    return failures != 0;
}
