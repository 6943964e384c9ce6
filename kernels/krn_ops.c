/* SPDX-License-Identifier: MIT */
/*
 * Inner loops, built once per instruction set (KRN_ISA). Sums run as
 * krn_ops.h says; the tiles below only differ in how many independent sums
 * they keep in registers, never in a sum's own order.
 */
#include "kernels/krn_ops.h"

#include "kernels/krn_dequant.h"
#include "kernels/krn_vec.h"

/* Tile in registers. 16 vector registers hold 8 sums, 4 weights, 1 input; with
 * 32 of them 24 sums fit. Where 16 lanes are several vectors, each part is a
 * pass of its own over k, so that the registers suffice. */
#if VL == 16
#define TILE_T 6
#else
#define TILE_T 2
#endif
#define TILE_R 4

INLINE void micro(const float *const *x, const float *w, uint32_t cols, float *const *y, uint32_t r0,
                  const int T, const int R)
{
    vf part[LANE_VECS][TILE_T * TILE_R];
#pragma GCC unroll 4
    for (int h = 0; h < LANE_VECS; h++) {
        vf acc[TILE_T * TILE_R];
#pragma GCC unroll 24
        for (int i = 0; i < T * R; i++)
            acc[i] = (vf){0};
        for (uint32_t k = (uint32_t)h * VL; k < cols; k += 16) {
            vf wk[TILE_R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                wk[r] = load(w + (size_t)r * cols + k);
#pragma GCC unroll 6
            for (int t = 0; t < T; t++) {
                vf xk = load(x[t] + k);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    acc[t * R + r] = fma_vf(xk, wk[r], acc[t * R + r]);
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < T * R; i++)
            part[h][i] = acc[i];
    }
    vf sum[TILE_T * TILE_R];
#pragma GCC unroll 24
    for (int i = 0; i < T * R; i++) {
#if LANE_VECS == 1
        sum[i] = part[0][i];
#elif LANE_VECS == 2
        sum[i] = part[0][i] + part[1][i];
#else
        sum[i] = (part[0][i] + part[2][i]) + (part[1][i] + part[3][i]);
#endif
    }
    reduce_lanes(sum, T * R);
    float flat[TILE_T * TILE_R + VL];
#pragma GCC unroll 8
    for (int i = 0; i < (T * R + VL - 1) / VL; i++)
        store(flat + i * VL, sum[i]);
#pragma GCC unroll 6
    for (int t = 0; t < T; t++)
        memcpy(y[t] + r0, flat + t * R, (size_t)R * 4);
}

#define MICRO(T, R)                                                                                          \
    static void micro_##T##x##R(const float *const *x, const float *w, uint32_t cols, float *const *y,       \
                                uint32_t r0)                                                                 \
    {                                                                                                        \
        micro(x, w, cols, y, r0, T, R);                                                                      \
    }
MICRO(1, 1)
MICRO(2, 1)
MICRO(1, 4)
MICRO(2, 4)
#if TILE_T == 6
MICRO(3, 1)
MICRO(4, 1)
MICRO(3, 4)
MICRO(4, 4)
MICRO(5, 1)
MICRO(6, 1)
MICRO(5, 4)
MICRO(6, 4)
#endif

typedef void (*micro_fn)(const float *const *, const float *, uint32_t, float *const *, uint32_t);

static void tile(const float *const *x, uint32_t nt, const float *w, uint32_t cols, uint32_t nr,
                 float *const *y)
{
#if TILE_T == 6
    static const micro_fn by4[] = {micro_1x4, micro_2x4, micro_3x4, micro_4x4, micro_5x4, micro_6x4};
    static const micro_fn by1[] = {micro_1x1, micro_2x1, micro_3x1, micro_4x1, micro_5x1, micro_6x1};
#else
    static const micro_fn by4[] = {micro_1x4, micro_2x4};
    static const micro_fn by1[] = {micro_1x1, micro_2x1};
#endif
    for (uint32_t t = 0; t < nt; t += TILE_T) {
        uint32_t n = nt - t < TILE_T ? nt - t : TILE_T, r = 0;
        for (; r + 4 <= nr; r += 4)
            by4[n - 1](x + t, w + (size_t)r * cols, cols, y + t, r);
        for (; r < nr; r++)
            by1[n - 1](x + t, w + (size_t)r * cols, cols, y + t, r);
    }
}

static void silu_mul(float *g, const float *u, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += VL) {
        uint32_t m = n - i < VL ? n - i : VL;
        float gt[VL] = {0}, ut[VL] = {0};
        vf a, b;
        if (m == VL) {
            a = load(g + i);
            b = load(u + i);
        } else {
            memcpy(gt, g + i, m * 4);
            memcpy(ut, u + i, m * 4);
            a = load(gt);
            b = load(ut);
        }
        vf y = a / (1.0f + exp_vf(-a)) * b;
        if (m == VL) {
            store(g + i, y);
        } else {
            store(gt, y);
            memcpy(g + i, gt, m * 4);
        }
    }
}

static void softmax(float *x, uint32_t n)
{
    float max = x[0];
    for (uint32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    vf sum[LANE_VECS];
    for (int h = 0; h < LANE_VECS; h++)
        sum[h] = (vf){0};
    uint32_t padded = (n + 15) / 16 * 16;
    for (uint32_t i = n; i < padded; i++)
        x[i] = -__builtin_inff();
    for (uint32_t i = 0; i < padded; i += 16)
        for (int h = 0; h < LANE_VECS; h++) {
            vf e = exp_vf(load(x + i + h * VL) - max);
            store(x + i + h * VL, e);
            sum[h] += e;
        }
    float inv = 1.0f / sum_lanes(sum);
    for (uint32_t i = 0; i < padded; i += VL)
        store(x + i, load(x + i) * inv);
}

const struct krn_ops KRN_CAT(krn_ops_, KRN_ISA) = {
    .isa = KRN_ISA_NAME,
    .dequant = KRN_CAT(krn_dequant_, KRN_ISA),
    .tile = tile,
    .silu_mul = silu_mul,
    .softmax = softmax,
    .attn = KRN_CAT(krn_attn_, KRN_ISA),
};
