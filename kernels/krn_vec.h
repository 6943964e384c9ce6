/* SPDX-License-Identifier: MIT */
/*
 * Private to kernels/: vectors of the machine's width by the compiler's
 * vector extension, and the few functions on them. The width follows the
 * instruction set that the including file is built for.
 */
#ifndef KRN_VEC_H
#define KRN_VEC_H

#include <stdint.h>
#include <string.h>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif
#define LANE_VECS (16 / VL) /* vectors that make up the 16 lanes */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float *p)
{
    return *(const vf_mem *)p;
}
INLINE void store(float *p, vf v)
{
    *(vf_mem *)p = v;
}
INLINE vf splat(float x)
{
    return x - (vf){0};
}

/* a * b + c, fused where the set has it. Said explicitly, and contraction is
 * off everywhere: what a compiler chooses to fuse may differ from one copy of
 * a loop to the next, and then so do the bits. */
INLINE vf fma_vf(vf a, vf b, vf c)
{
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vf select_vf(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}
INLINE vf max_vf(vf a, vf b)
{
    return select_vf(a > b, a, b);
}

/* Adds each vector's upper and lower halves of every group of lanes: a's
 * groups land in the lower half of the result, b's in the upper. */
INLINE vf fold16(vf a, vf b, int step)
{
    (void)step;
#if VL == 16
    if (step == 8)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    if (step == 4)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    if (step == 2)
        return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif VL == 8
    if (step == 4)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    if (step == 2)
        return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    if (step == 2)
        return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/* The tree below VL lanes for n vectors at once: afterwards lane i % VL of
 * v[i / VL] is the sum of the i-th. n is a compile-time constant. */
INLINE void reduce_lanes(vf *v, int n)
{
    int m = n;
#pragma GCC unroll 4
    for (int step = VL / 2; step >= 1; step /= 2) {
        int half = (m + 1) / 2;
#pragma GCC unroll 24
        for (int i = 0; i < half; i++)
            v[i] = fold16(v[2 * i], v[2 * i + 1 < m ? 2 * i + 1 : m - 1], step);
        m = half;
    }
}

/* Sum of the 16 lanes in v[LANE_VECS] by the tree. */
INLINE float sum_lanes(const vf *v)
{
    vf s[1];
#if LANE_VECS == 1
    s[0] = v[0];
#elif LANE_VECS == 2
    s[0] = v[0] + v[1];
#else
    s[0] = (v[0] + v[2]) + (v[1] + v[3]);
#endif
    reduce_lanes(s, 1);
    return s[0][0];
}

/* exp(x), about 1 ulp; exactly 0 below -87.3 (and for -inf), capped at
 * exp(88); NaN stays. */
INLINE vf exp_vf(vf x)
{
    vi tiny = x < splat(-87.3f);
    x = select_vf(x > splat(88.0f), splat(88.0f), x);
    x = select_vf(tiny, splat(0.0f), x);
    const float magic = 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the rounded integer */
    vf t = fma_vf(x, splat(1.44269504f), splat(magic));
    vf n = t - magic;
    vf r = x - n * 0.693359375f; /* ln 2 in two parts; this product is exact */
    r = fma_vf(n, splat(2.12194440e-4f), r);
    vf p = fma_vf(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma_vf(p, r, splat(8.3334519073e-3f));
    p = fma_vf(p, r, splat(4.1665795894e-2f));
    p = fma_vf(p, r, splat(1.6666665459e-1f));
    p = fma_vf(p, r, splat(5.0000001201e-1f));
    p = fma_vf(p, r * r, r);
    p = p + 1.0f;
    vi bits = (((vi)t - (vi)splat(magic)) + 127) << 23;
    return select_vf(tiny, splat(0.0f), p * (vf)bits);
}

#endif
