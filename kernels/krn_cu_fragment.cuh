/* SPDX-License-Identifier: MIT */
/*
 * Weights as a matrix instruction wants them in registers, two at a time in
 * half precision: of 64 weights of a row, lane t of four holds 8 p + 2 t and
 * the one behind it, for each piece p = 0 .. 7.
 *
 * Whole numbers become halves by their place behind the exponent of 1024;
 * taking 1024 off again is exact. Block scales are clamped, so that no weight
 * of a quantized format becomes an infinity.
 */
#ifndef KRN_CU_FRAGMENT_CUH
#define KRN_CU_FRAGMENT_CUH

#include "kernels/krn_cu_dequant.cuh"

#define HALF2_MAGIC 0x64006400u /* 1024 */
#define HALF2_MINUS 0xe400e400u /* -1024 */
#define HALF2_M1032 0xe408e408u
#define HALF2_M1152 0xe480e480u
#define HALF2_16TH  0x2c002c00u /* 1 / 16 */
#define HALF2_64    0x54005400u
#define HALF2_M96   0xd600d600u
#define HALF2_M72   0xd480d480u
#define K_LIMITS    0x60004c00u /* 512 and 16: 512 * 63 is 32,256 and 16 * 63 * 31 31,248 */
#define BLOCK_LIMIT 0x5ffc5ffcu /* 511, of which 128 are 65,408 */
#define Q6_LIMIT    0x4bff4bffu /* almost 16, of which 4,096 are 65,504 */

/* Bytes 0 and 1, each in a half of its own; behind the exponent of 1024. */
DEV uint32_t two_bytes(const uint8_t *p)
{
    return __byte_perm(*(const uint16_t *)p, 0, 0x4140);
}
DEV uint32_t two_numbers(const uint8_t *p)
{
    return __byte_perm(*(const uint16_t *)p, HALF2_MAGIC, 0x7170);
}

/*
 * Sub-blocks 2j and 2j + 1 of Q4_K and Q5_K. A weight is d * (scale * q) - min, scale * q a whole number below 2048
 * and so exact: scale[n] and base[n] (that times -1024) make it from the number behind the exponent of 1024, in the
 * second sub-block divided by `unit`.
 */
struct k_block {
    uint32_t d, scale[2], base[2], min[2];
};

/* The first 16 bytes of a block, d and dmin within their limits. */
DEV uint4 k_head(const uint8_t *sb)
{
    uint4 head = *(const uint4 *)sb;
    head.x = half2_clamp(head.x, K_LIMITS);
    return head;
}

DEV k_block k_block_of(const uint4 &head, uint32_t j, uint32_t unit)
{
    const uint32_t shift = 16 * (j & 1), y = head.y >> shift, z = head.z >> shift, w = head.w >> shift;
    const uint32_t s = j < 2 ? y & 0x3f3fu : (w & 0x0f0fu) | (y & 0xc0c0u) >> 2;
    const uint32_t m = j < 2 ? z & 0x3f3fu : (w >> 4 & 0x0f0fu) | (z & 0xc0c0u) >> 2;
    const uint32_t d = head.x;
    const uint32_t scale = half2_mul(half2_add(__byte_perm(s, HALF2_MAGIC, 0x7170), HALF2_MINUS), unit);
    const uint32_t base = half2_mul(scale, HALF2_MINUS);
    const uint32_t min = half2_mul(half2_add(__byte_perm(m, HALF2_MAGIC, 0x7170), HALF2_MINUS), half2_high(d) ^ 0x80008000u);
    return {half2_low(d), {half2_low(scale), half2_high(scale)}, {half2_low(base), half2_high(base)}, {half2_low(min), half2_high(min)}};
}

/* q: behind the exponent. */
DEV uint32_t k_weights(const k_block &b, int n, uint32_t q)
{
    return half2_fma(half2_fma(q, b.scale[n], b.base[n]), b.d, b.min[n]);
}

/* head: k_head(sb). */
DEV void fragment_q4_k(const uint4 &head, const uint8_t *sb, uint32_t j, uint32_t t, uint32_t (&w)[8])
{
    const k_block b = k_block_of(head, j, 0x2c003c00u); /* 1/16 in the second */
    const uint8_t *q = sb + 16 + 32 * j + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t v = two_numbers(q + 8 * i);
        w[i] = k_weights(b, 0, v & 0xff0fff0fu);
        w[4 + i] = k_weights(b, 1, v & 0xfff0fff0u);
    }
}

DEV void fragment_q5_k(const uint8_t *sb, uint32_t j, uint32_t t, uint32_t (&w)[8])
{
    const k_block b = k_block_of(k_head(sb), j, 0x3c003c00u);
    const uint8_t *q = sb + 48 + 32 * j + 2 * t, *h = sb + 16 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t v = two_bytes(q + 8 * i), high = two_bytes(h + 8 * i) >> 2 * j;
        w[i] = k_weights(b, 0, (v & 0x000f000fu) | (high & 0x00010001u) << 4 | HALF2_MAGIC);
        w[4 + i] = k_weights(b, 1, (v >> 4 & 0x000f000fu) | (high & 0x00020002u) << 3 | HALF2_MAGIC);
    }
}

/* Likewise d * (scale * (q - 32)), of 12 bits at most. Here q is behind the exponent of 64: a smaller base, as a
 * scale may be 127. Addresses are multiples of 2. */
DEV void fragment_q6_k(const uint8_t *sb, uint32_t j, uint32_t t, uint32_t (&w)[8])
{
    const uint32_t half = j >> 1, pair = j & 1;
    const uint8_t *q = sb + 64 * half + 2 * t, *h = sb + 128 + 32 * half + 2 * t, *sc = sb + 192 + 8 * half + 4 * pair;
    const uint32_t d = half2_clamp(half2_low(*(const uint16_t *)(sb + 208)), Q6_LIMIT);
    uint32_t scale[4], base[4]; /* of 16 weights each */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t two = half2_add(two_numbers(sc + 2 * i) ^ 0x00800080u, HALF2_M1152);
        const uint32_t two_base = half2_mul(two, HALF2_M96);
        scale[2 * i] = half2_low(two);
        scale[2 * i + 1] = half2_high(two);
        base[2 * i] = half2_low(two_base);
        base[2 * i + 1] = half2_high(two_base);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t high = two_bytes(h + 8 * i) >> 4 * pair;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint32_t low = (two_bytes(q + 32 * n + 8 * i) << 4 >> 4 * pair) & 0x00f000f0u;
            const uint32_t q6 = low | (n ? (high & 0x000c000cu) << 6 : (high & 0x00030003u) << 8);
            w[4 * n + i] = half2_mul(half2_fma(q6 | HALF2_64, scale[2 * n + i / 2], base[2 * n + i / 2]), d);
        }
    }
}

DEV void fragment_q4_0(const uint8_t *block, uint32_t t, uint32_t *w)
{
    const uint32_t d = half2_clamp(half2_low(*(const uint16_t *)block), BLOCK_LIMIT);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t v = two_numbers(block + 2 + 8 * i + 2 * t);
        w[i] = half2_mul(half2_add(v & 0xff0fff0fu, HALF2_M1032), d);
        w[2 + i] = half2_mul(half2_fma(v & 0xfff0fff0u, HALF2_16TH, HALF2_M72), d);
    }
}

DEV void fragment_q8_0(const uint8_t *block, uint32_t t, uint32_t *w)
{
    const uint32_t d = half2_clamp(half2_low(*(const uint16_t *)block), BLOCK_LIMIT);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t v = two_numbers(block + 2 + 8 * i + 2 * t) ^ 0x00800080u;
        w[i] = half2_mul(half2_add(v, HALF2_M1152), d);
    }
}

/* Weights k .. k + 63 of what begins at p (a multiple of a block), k a multiple of 64; of n, a multiple of 16:
 * zeros from there on. */
DEV void fragment64(uint32_t type, const uint8_t *p, uint32_t k, uint32_t n, uint32_t t, uint32_t (&w)[8])
{
    switch (type) {
    case KRN_Q4_K:
        p += (k >> 8) * 144;
        return fragment_q4_k(k_head(p), p, k >> 6 & 3, t, w);
    case KRN_Q5_K:
        return fragment_q5_k(p + (k >> 8) * 176, k >> 6 & 3, t, w);
    case KRN_Q6_K:
        return fragment_q6_k(p + (k >> 8) * 210, k >> 6 & 3, t, w);
    case KRN_Q4_0:
    case KRN_Q8_0:
#pragma unroll
        for (int b = 0; b < 2; b++) {
            if ((uint32_t)b * 32 >= n)
                w[4 * b] = w[4 * b + 1] = w[4 * b + 2] = w[4 * b + 3] = 0;
            else if (type == KRN_Q4_0)
                fragment_q4_0(p + (k / 32 + b) * 18, t, w + 4 * b);
            else
                fragment_q8_0(p + (k / 32 + b) * 34, t, w + 4 * b);
        }
        return;
    default: /* F16, BF16, F32 */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t at = k + 8 * i + 2 * t;
            w[i] = 0;
            if ((uint32_t)i * 8 >= n)
                continue;
            if (type == KRN_F32) {
                float2 f = *(const float2 *)(p + at * 4);
                w[i] = pack_f16(f.x, f.y);
            } else {
                uint32_t v = *(const uint32_t *)(p + at * 2);
                w[i] = type == KRN_BF16 ? pack_f16(bf16_lo(v), bf16_hi(v)) : v;
            }
        }
    }
}

#endif
