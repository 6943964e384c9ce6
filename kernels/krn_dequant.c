/* SPDX-License-Identifier: MIT */
/*
 * The storage formats, written so that the compiler vectorizes them. Built
 * once per instruction set with -ffp-contract=off: KRN_ISA names the variant.
 * Blocks are read byte by byte or by memcpy, so src needs no alignment.
 */
#include "kernels/krn_dequant.h"

#include <string.h>

#include "kernels/krn_quant.h"

#ifndef KRN_ISA
#error "KRN_ISA: baseline, v3 or v4"
#endif
#define CAT2(a, b) a##b
#define CAT(a, b)  CAT2(a, b)

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF data is little-endian and is used in place"
#endif

static inline float f32_of_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline float half_of_bits(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu;
    uint32_t norm = (mag << 13) + (112u << 23);
    uint32_t inf_nan = (mag << 13) | 0x7f800000u;
    float sub = (float)(int32_t)mag * 0x1p-24f; /* exact: 10 bits times a power of two */
    uint32_t sub_bits;
    memcpy(&sub_bits, &sub, 4);
    uint32_t u = mag < 0x0400u ? sub_bits : (mag >= 0x7c00u ? inf_nan : norm);
    return f32_of_bits(u | sign);
}

static inline float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return half_of_bits(h);
}

static void row_f16(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, 2);
        dst[i] = half_of_bits(h);
    }
}

static void row_bf16(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, 2);
        dst[i] = f32_of_bits((uint32_t)h << 16);
    }
}

/* f16 scale, 32 signed bytes. */
static void row_q8_0(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 32; b++, src += 34, dst += 32) {
        float d = half_at(src);
        for (int i = 0; i < 32; i++)
            dst[i] = d * (float)(int8_t)src[2 + i];
    }
}

/* f16 scale, 16 bytes: low nibbles are weights 0..15, high ones 16..31. */
static void row_q4_0(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 32; b++, src += 18, dst += 32) {
        float d = half_at(src);
        for (int i = 0; i < 16; i++)
            dst[i] = d * (float)((src[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++)
            dst[16 + i] = d * (float)((src[2 + i] >> 4) - 8);
    }
}

/* Eight 6-bit scales and minima in 12 bytes: bytes 0-3 and 4-7 hold the low
 * six bits of the first four of each, their top two bits belong to the last
 * four, whose low nibbles are in bytes 8-11. */
static inline void k_scales(const uint8_t *p, float d, float dmin, float *scale, float *min)
{
    for (int j = 0; j < 4; j++) {
        scale[j] = d * (float)(p[j] & 63);
        min[j] = dmin * (float)(p[4 + j] & 63);
        scale[4 + j] = d * (float)((p[8 + j] & 15) | (p[j] >> 6 << 4));
        min[4 + j] = dmin * (float)((p[8 + j] >> 4) | (p[4 + j] >> 6 << 4));
    }
}

static void row_q4_k(const uint8_t *restrict src, float *restrict dst, uint64_t n)
{
    for (uint64_t b = 0; b < n / 256; b++, src += 144, dst += 256) {
        float scale[8], min[8];
        k_scales(src + 4, half_at(src), half_at(src + 2), scale, min);
        for (int j = 0; j < 4; j++) {
            const uint8_t *q = src + 16 + 32 * j;
            float *lo = dst + 64 * j, *hi = lo + 32;
            float s0 = scale[2 * j], m0 = min[2 * j], s1 = scale[2 * j + 1], m1 = min[2 * j + 1];
            for (int i = 0; i < 32; i++)
                lo[i] = s0 * (float)(q[i] & 15) - m0;
            for (int i = 0; i < 32; i++)
                hi[i] = s1 * (float)(q[i] >> 4) - m1;
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
        const uint8_t *h = src + 16;
        for (int j = 0; j < 4; j++) {
            const uint8_t *q = src + 48 + 32 * j;
            float *lo = dst + 64 * j, *hi = lo + 32;
            float s0 = scale[2 * j], m0 = min[2 * j], s1 = scale[2 * j + 1], m1 = min[2 * j + 1];
            for (int i = 0; i < 32; i++)
                lo[i] = s0 * (float)((q[i] & 15) | (((h[i] >> (2 * j)) & 1) << 4)) - m0;
            for (int i = 0; i < 32; i++)
                hi[i] = s1 * (float)((q[i] >> 4) | (((h[i] >> (2 * j + 1)) & 1) << 4)) - m1;
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
        for (int half = 0; half < 2; half++) {
            const uint8_t *l = src + 64 * half, *h = src + 128 + 32 * half;
            for (int g = 0; g < 4; g++) {
                const uint8_t *q = l + 32 * (g & 1);
                float *y = dst + 128 * half + 32 * g;
                int shift = g < 2 ? 0 : 4;
                for (int p = 0; p < 2; p++) {
                    float s = scale[8 * half + 2 * g + p];
                    for (int i = 16 * p; i < 16 * p + 16; i++)
                        y[i] = s * (float)((((q[i] >> shift) & 15) | (((h[i] >> (2 * g)) & 3) << 4)) - 32);
                }
            }
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
