/* SPDX-License-Identifier: MIT */
/*
 * Attention rows of one KV head, built once per instruction set (KRN_ISA).
 *
 * Keys are taken in absolute blocks of KRN_ATTN_BLOCK with a running maximum
 * and sum. A row's result depends on its own keys alone: scores are summed
 * over the head's elements in order, a block's probabilities in 16 lanes and
 * the tree, values in key order. Rows that see a whole block go several at a
 * time; the others one by one, up to their own last key, so that no value
 * beyond it is ever multiplied (unwritten memory may hold NaN).
 */
#include <float.h>
#include <math.h>

#include "kernels/krn_ops.h"
#include "kernels/krn_vec.h"

#if VL == 16
#define ROWS 4
#else
#define ROWS 2
#endif
#define COLS 4 /* vectors a row in registers */
struct row {
    float max, sum;
};

_Static_assert(KRN_KV_BLOCK % KRN_ATTN_BLOCK == 0, "keys of a step follow each other in memory");

/* s[t][0..64) = q[t] . keys of the block. kb: the block's first key in the transposed layout. */
INLINE void scores(const float *const *q, const float *kb, uint32_t hd, float s[][KRN_ATTN_BLOCK],
                   const int T)
{
    for (uint32_t j = 0; j < KRN_ATTN_BLOCK; j += COLS * VL) {
        vf acc[ROWS * COLS];
#pragma GCC unroll 16
        for (int i = 0; i < T * COLS; i++)
            acc[i] = (vf){0};
        const float *kc[COLS];
#pragma GCC unroll 4
        for (int c = 0; c < COLS; c++) {
            uint32_t key = j + (uint32_t)c * VL;
            kc[c] = kb + (size_t)(key / 16) * hd * 16 + key % 16;
        }
        for (uint32_t d = 0; d < hd; d++) {
            vf kv[COLS];
#pragma GCC unroll 4
            for (int c = 0; c < COLS; c++)
                kv[c] = load(kc[c] + (size_t)d * 16);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                for (int c = 0; c < COLS; c++)
                    acc[t * COLS + c] = fma_vf(kv[c], splat(q[t][d]), acc[t * COLS + c]);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int c = 0; c < COLS; c++)
                store(s[t] + j + c * VL, acc[t * COLS + c]);
    }
}

/* acc[t][d..d+C*VL) += sum over n keys of p[t][key] * v[key][d..]. */
INLINE void values_part(float p[][KRN_ATTN_BLOCK], const float *v, uint32_t hd, uint32_t n,
                        float acc_out[][KRN_HEAD_DIM_MAX], uint32_t d, const int T, const int C)
{
    vf acc[ROWS * COLS];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            acc[t * C + c] = load(acc_out[t] + d + c * VL);
    for (uint32_t key = 0; key < n; key++) {
        vf vv[COLS];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            vv[c] = load(v + (size_t)key * hd + d + c * VL);
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++)
                acc[t * C + c] = fma_vf(vv[c], splat(p[t][key]), acc[t * C + c]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            store(acc_out[t] + d + c * VL, acc[t * C + c]);
}

INLINE void values(float p[][KRN_ATTN_BLOCK], const float *v, uint32_t hd, uint32_t n,
                   float acc[][KRN_HEAD_DIM_MAX], const int T)
{
    uint32_t d = 0;
    for (; d + COLS * VL <= hd; d += COLS * VL)
        values_part(p, v, hd, n, acc, d, T, COLS);
    for (; d < hd; d += VL)
        values_part(p, v, hd, n, acc, d, T, 1);
}

/* Scores of n keys to probabilities relative to the row's new maximum; what
 * was summed before is scaled to it. */
static void soften(float *s, uint32_t n, float scale, uint32_t hd, struct row *row, float *acc)
{
    for (uint32_t i = n; i < KRN_ATTN_BLOCK; i++)
        s[i] = -INFINITY;
    vf m = splat(-INFINITY);
    for (int i = 0; i < KRN_ATTN_BLOCK; i += VL) {
        vf a = load(s + i) * scale;
        store(s + i, a);
        m = max_vf(m, a);
    }
    float max = row->max;
    for (int i = 0; i < VL; i++)
        max = m[i] > max ? m[i] : max;
    vf sum[LANE_VECS];
    for (int h = 0; h < LANE_VECS; h++)
        sum[h] = (vf){0};
    for (int i = 0; i < KRN_ATTN_BLOCK; i += 16)
        for (int h = 0; h < LANE_VECS; h++) {
            vf e = exp_vf(load(s + i + h * VL) - max);
            store(s + i + h * VL, e);
            sum[h] += e;
        }
    float block_sum = sum_lanes(sum);
    if (max != row->max) { /* else the factor is 1 */
        float factor = exp_vf(splat(row->max - max))[0];
        row->sum *= factor;
        for (uint32_t d = 0; d < hd; d += VL)
            store(acc + d, load(acc + d) * factor);
        row->max = max;
    }
    row->sum += block_sum;
}

void KRN_CAT(krn_attn_, KRN_ISA)(const struct krn_kv *kv, const uint32_t *block, uint32_t kv_head,
                                 const float *const *q, const uint32_t *pos, uint32_t rows, float *const *y)
{
    const uint32_t hd = kv->head_dim;
    const float *k = kv->k + (size_t)kv_head * kv->ctx * hd, *v = kv->v + (size_t)kv_head * kv->ctx * hd;
    const float scale = 1.0f / sqrtf((float)hd);
    float acc[KRN_ATTN_ROWS][KRN_HEAD_DIM_MAX];
    struct row row[KRN_ATTN_ROWS];
    float s[ROWS][KRN_ATTN_BLOCK];
    for (uint32_t i = 0; i < rows; i++) {
        memset(acc[i], 0, hd * sizeof(float));
        row[i] = (struct row){-INFINITY, 0.0f};
    }
    for (uint32_t key = 0; key <= pos[rows - 1]; key += KRN_ATTN_BLOCK) {
        const size_t at = (size_t)krn_kv_row(block, key) * hd; /* a step lies in one block */
        const float *kb = k + at, *vb = v + at;
        for (uint32_t i = 0; i < rows;) {
            if (pos[i] < key) {
                i++;
            } else if (i + ROWS <= rows && pos[i] - key >= KRN_ATTN_BLOCK - 1) {
                scores(q + i, kb, hd, s, ROWS);
                for (int t = 0; t < ROWS; t++)
                    soften(s[t], KRN_ATTN_BLOCK, scale, hd, &row[i + t], acc[i + t]);
                values(s, vb, hd, KRN_ATTN_BLOCK, acc + i, ROWS);
                i += ROWS;
            } else {
                uint32_t n = pos[i] - key + 1;
                n = n < KRN_ATTN_BLOCK ? n : KRN_ATTN_BLOCK;
                scores(q + i, kb, hd, s, 1);
                soften(s[0], n, scale, hd, &row[i], acc[i]);
                values(s, vb, hd, n, acc + i, 1);
                i++;
            }
        }
    }
    for (uint32_t i = 0; i < rows; i++) {
        float inv = 1.0f / row[i].sum;
        for (uint32_t d = 0; d < hd; d++)
            y[i][d] = acc[i][d] * inv;
    }
}
