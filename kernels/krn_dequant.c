/* SPDX-License-Identifier: MIT */
/*
 * The storage formats, 16 weights at a time in the compiler's vectors. Built
 * once per instruction set with -ffp-contract=off: KRN_ISA names the variant.
 * Blocks are read byte by byte or by memcpy, so src needs no alignment.
 */
#include "kernels/krn_dequant.h"

#include <string.h>

#include "kernels/krn_quant.h"
#include "kernels/krn_vec.h"

#ifndef KRN_ISA
#error "KRN_ISA: baseline, v3 or v4"
#endif
#define CAT2(a, b) a##b
#define CAT(a, b)  CAT2(a, b)

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF data is little-endian and is used in place"
#endif

/* Sixteen whole numbers, and the same as they come from bytes (bits & mask) ^ flip. */
struct i16 {
    vi v[LANE_VECS];
};

INLINE struct i16 bytes16(const uint8_t *p, uint8_t mask, uint8_t flip)
{
    struct i16 r;
#if VL >= 8
    typedef uint8_t vb __attribute__((vector_size(VL)));
    for (int h = 0; h < LANE_VECS; h++) {
        vb b;
        memcpy(&b, p + h * VL, VL);
        r.v[h] = (vi) __builtin_convertvector((b & mask) ^ flip, vu);
    }
#else
    int32_t t[16];
    for (int i = 0; i < 16; i++)
        t[i] = (p[i] & mask) ^ flip;
    memcpy(r.v, t, sizeof t);
#endif
    return r;
}

/* dst[i] = scale * q[i] */
INLINE void scaled16(float *dst, struct i16 q, float scale)
{
    for (int h = 0; h < LANE_VECS; h++)
        store(dst + h * VL, scale * __builtin_convertvector(q.v[h], vf));
}

/* dst[i] = scale * q[i] - min */
INLINE void affine16(float *dst, struct i16 q, float scale, float min)
{
    for (int h = 0; h < LANE_VECS; h++)
        store(dst + h * VL, scale * __builtin_convertvector(q.v[h], vf) - min);
}

INLINE struct i16 shift_right(struct i16 q, int n)
{
    for (int h = 0; h < LANE_VECS; h++)
        q.v[h] = q.v[h] >> n;
    return q;
}

INLINE struct i16 minus(struct i16 q, int32_t x)
{
    for (int h = 0; h < LANE_VECS; h++)
        q.v[h] = q.v[h] - x;
    return q;
}

/* q | (bits >> down) << up */
INLINE struct i16 with_bits(struct i16 q, struct i16 bits, int down, int up)
{
    for (int h = 0; h < LANE_VECS; h++)
        q.v[h] = q.v[h] | ((bits.v[h] >> down) << up);
    return q;
}

INLINE vf half_vf(vu h)
{
    vu sign = (h & 0x8000u) << 16, mag = h & 0x7fffu;
    vu norm = (mag << 13) + (112u << 23), inf_nan = (mag << 13) | 0x7f800000u;
    vu sub = (vu)(__builtin_convertvector((vi)mag, vf) * 0x1p-24f); /* exact: 10 bits times a power of two */
    vu is_sub = (vu)(mag < 0x0400u), is_inf_nan = (vu)(mag >= 0x7c00u);
    return (vf)(sign | (is_sub & sub) | (is_inf_nan & inf_nan) | (~(is_sub | is_inf_nan) & norm));
}

INLINE float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu, u;
    float f = (float)(int32_t)mag * 0x1p-24f;
    memcpy(&u, &f, 4);
    if (mag >= 0x0400u)
        u = mag >= 0x7c00u ? (mag << 13) | 0x7f800000u : (mag << 13) + (112u << 23);
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

typedef uint16_t vh __attribute__((vector_size(VL * 2)));

INLINE vu words(const uint8_t *p)
{
    vh w;
    memcpy(&w, p, sizeof w);
    return __builtin_convertvector(w, vu);
}

static void row_f16(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    uint64_t i = 0;
    for (; i + VL <= n; i += VL)
        store(dst + i, half_vf(words(src + 2 * i)));
    for (; i < n; i++)
        dst[i] = half_at(src + 2 * i);
}

static void row_bf16(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    uint64_t i = 0;
    for (; i + VL <= n; i += VL)
        store(dst + i, (vf)(words(src + 2 * i) << 16));
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, 2);
        uint32_t u = (uint32_t)h << 16;
        memcpy(dst + i, &u, 4);
    }
}

/* f16 scale, 32 signed bytes. */
static void row_q8_0(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 32; b++, src += 34, dst += 32) {
        float d = half_at(src);
        scaled16(dst, minus(bytes16(src + 2, 0xff, 0x80), 128), d);
        scaled16(dst + 16, minus(bytes16(src + 18, 0xff, 0x80), 128), d);
    }
}

/* f16 scale, 16 bytes: low nibbles are weights 0..15, high ones 16..31. */
static void row_q4_0(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 32; b++, src += 18, dst += 32) {
        float d = half_at(src);
        scaled16(dst, minus(bytes16(src + 2, 0x0f, 0), 8), d);
        scaled16(dst + 16, minus(shift_right(bytes16(src + 2, 0xf0, 0), 4), 8), d);
    }
}

/* Eight 6-bit scales and minima in 12 bytes: bytes 0-3 and 4-7 hold the low
 * six bits of the first four of each, their top two bits belong to the last
 * four, whose low nibbles are in bytes 8-11. */
INLINE void k_scales(const uint8_t *p, float d, float dmin, float *scale, float *min)
{
    for (int j = 0; j < 4; j++) {
        scale[j] = d * (float)(p[j] & 63);
        min[j] = dmin * (float)(p[4 + j] & 63);
        scale[4 + j] = d * (float)((p[8 + j] & 15) | (p[j] >> 6 << 4));
        min[4 + j] = dmin * (float)((p[8 + j] >> 4) | (p[4 + j] >> 6 << 4));
    }
}

/* f16 d and dmin, scales and minima, 32 bytes of nibbles for two sub-blocks of 32. */
static void row_q4_k(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 256; b++, src += 144, dst += 256) {
        float scale[8], min[8];
        k_scales(src + 4, half_at(src), half_at(src + 2), scale, min);
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i += 16) {
                const uint8_t *q = src + 16 + 32 * j + i;
                float *y = dst + 64 * j + i;
                affine16(y, bytes16(q, 0x0f, 0), scale[2 * j], min[2 * j]);
                affine16(y + 32, shift_right(bytes16(q, 0xf0, 0), 4), scale[2 * j + 1], min[2 * j + 1]);
            }
    }
}

/* As Q4_K, with bit j of byte i of the 32 bytes before the nibbles as the
 * fifth bit of weight i of sub-block j. */
static void row_q5_k(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 256; b++, src += 176, dst += 256) {
        float scale[8], min[8];
        k_scales(src + 4, half_at(src), half_at(src + 2), scale, min);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i += 16) {
                const uint8_t *q = src + 48 + 32 * j + i, *h = src + 16 + i;
                float *y = dst + 64 * j + i;
                struct i16 h0 = bytes16(h, (uint8_t)(1 << (2 * j)), 0),
                           h1 = bytes16(h, (uint8_t)(2 << (2 * j)), 0);
                affine16(y, with_bits(bytes16(q, 0x0f, 0), h0, 2 * j, 4), scale[2 * j], min[2 * j]);
                affine16(y + 32, with_bits(shift_right(bytes16(q, 0xf0, 0), 4), h1, 2 * j + 1, 4),
                         scale[2 * j + 1], min[2 * j + 1]);
            }
    }
}

/* Halves of 128 weights: 64 bytes of nibbles, 32 of bit pairs; sixteen int8
 * scales (16 weights each), f16 d. Quarter g of a half takes its nibbles from
 * bytes (g & 1) * 32, low ones for g < 2, and bit pair g. */
static void row_q6_k(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 256; b++, src += 210, dst += 256) {
        float scale[16], d = half_at(src + 208);
        for (int i = 0; i < 16; i++)
            scale[i] = d * (float)(int8_t)src[192 + i];
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++)
#pragma GCC unroll 2
                for (int p = 0; p < 2; p++) {
                    const uint8_t *l = src + 64 * half + 32 * (g & 1) + 16 * p;
                    const uint8_t *h = src + 128 + 32 * half + 16 * p;
                    struct i16 q = g < 2 ? bytes16(l, 0x0f, 0) : shift_right(bytes16(l, 0xf0, 0), 4);
                    q = with_bits(q, bytes16(h, (uint8_t)(3 << (2 * g)), 0), 2 * g, 4);
                    scaled16(dst + 128 * half + 32 * g + 16 * p, minus(q, 32), scale[8 * half + 2 * g + p]);
                }
    }
}

void CAT(krn_dequant_, KRN_ISA)(uint32_t ggml_id, const void *src, float *dst, uint64_t n)
{
    switch (ggml_id) {
    case KRN_F32:
        memcpy(dst, src, n * 4);
        break;
    case KRN_F16:
        row_f16(src, dst, n);
        break;
    case KRN_BF16:
        row_bf16(src, dst, n);
        break;
    case KRN_Q8_0:
        row_q8_0(src, dst, n);
        break;
    case KRN_Q4_0:
        row_q4_0(src, dst, n);
        break;
    case KRN_Q4_K:
        row_q4_k(src, dst, n);
        break;
    case KRN_Q5_K:
        row_q5_k(src, dst, n);
        break;
    case KRN_Q6_K:
        row_q6_k(src, dst, n);
        break;
    default:
        break;
    }
}
