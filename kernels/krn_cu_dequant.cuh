/* SPDX-License-Identifier: MIT */
/*
 * Storage formats on the device: 64 weights of a row at a time, as floats,
 * handed eight by eight to a sink. One source for every kernel, so that a
 * weight is the same f16 number whether it is expanded ahead or on the way
 * to the tensor cores.
 *
 * Whole numbers below 128 become floats without a conversion: put in the top
 * mantissa bits of 1.0 they read 1 + q/128, and q*s - m is one fused
 * multiply-add with 128*s and -(128*s + m) (its error is 2^-17 of s).
 */
#ifndef KRN_CU_DEQUANT_CUH
#define KRN_CU_DEQUANT_CUH

#include "kernels/krn_cu_common.cuh"

/* Byte b of w, which has its top bit set, as 1 + (byte - 128) / 128. */
DEV float unit_byte(uint32_t w, int b)
{
    return __uint_as_float(__byte_perm(w, 0x3f000000u, 0x7044u | (uint32_t)b << 8));
}

/* N words from an address that is a multiple of 2. */
template <int N> DEV void load_words(const uint8_t *p, uint32_t (&w)[N])
{
    uint32_t off = (uint32_t)(uintptr_t)p & 2u;
    const uint32_t *q = (const uint32_t *)(p - off);
    uint32_t low = q[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t high = i + 1 < N || off ? q[i + 1] : 0u;
        w[i] = __funnelshift_r(low, high, off * 8);
        low = high;
    }
}

/* Two threads may share the 64 weights: 0..31 and 32..63. */
enum dequant_part { WHOLE, FIRST_HALF, SECOND_HALF };

/* Eight weights, scale * byte - min of two words of bytes 0..127: as floats, or as they are to a sink that
 * applies the scale to sums. */
template <class Sink> DEV void emit_bytes(Sink &sink, int c, uint32_t w0, uint32_t w1, float scale, float min)
{
    float f[8], s = 128.0f * scale, m = -__fmaf_rn(128.0f, scale, min);
    w0 |= 0x80808080u;
    w1 |= 0x80808080u;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        f[b] = unit_byte(w0, b);
        f[4 + b] = unit_byte(w1, b);
    }
    if constexpr (Sink::RAW) {
        sink.units(c, f, s, m);
    } else {
#pragma unroll
        for (int b = 0; b < 8; b++)
            f[b] = __fmaf_rn(f[b], s, m);
        sink(c, f);
    }
}

template <class Sink> DEV void emit_zero(Sink &sink, int c)
{
    float f[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    sink(c, f);
}

/* Scales and minima of sub-blocks 2j and 2j + 1 from the 12 bytes of Q4_K and Q5_K. */
DEV void k_scales(uint4 head, uint32_t j, float (&scale)[2], float (&min)[2])
{
    uint32_t shift = 16 * (j & 1), y = head.y >> shift, z = head.z >> shift, w = head.w >> shift;
    uint32_t s = j < 2 ? y & 0x3f3fu : (w & 0x0f0fu) | (y & 0xc0c0u) >> 2;
    uint32_t m = j < 2 ? z & 0x3f3fu : (w >> 4 & 0x0f0fu) | (z & 0xc0c0u) >> 2;
    float d = half_float((uint16_t)head.x), dmin = half_float((uint16_t)(head.x >> 16));
    scale[0] = __fmul_rn(d, (float)(s & 0xff));
    scale[1] = __fmul_rn(d, (float)(s >> 8 & 0xff));
    min[0] = __fmul_rn(dmin, (float)(m & 0xff));
    min[1] = __fmul_rn(dmin, (float)(m >> 8 & 0xff));
}

template <class Sink> DEV void dequant_q4_k(const uint8_t *sb, uint32_t j, Sink &sink, dequant_part part)
{
    float scale[2], min[2];
    uint32_t w[8];
    k_scales(*(const uint4 *)sb, j, scale, min);
    *(uint4 *)&w[0] = *(const uint4 *)(sb + 16 + 32 * j);
    *(uint4 *)&w[4] = *(const uint4 *)(sb + 32 + 32 * j);
    if (part == WHOLE) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                emit_bytes(sink, 4 * n + c, w[2 * c] >> 4 * n & 0x0f0f0f0fu, w[2 * c + 1] >> 4 * n & 0x0f0f0f0fu,
                           scale[n], min[n]);
    } else {
        const uint32_t n = part == SECOND_HALF;
#pragma unroll
        for (int c = 0; c < 4; c++)
            emit_bytes(sink, 4 * n + c, w[2 * c] >> 4 * n & 0x0f0f0f0fu, w[2 * c + 1] >> 4 * n & 0x0f0f0f0fu,
                       n ? scale[1] : scale[0], n ? min[1] : min[0]);
    }
}

template <class Sink> DEV void dequant_q5_k(const uint8_t *sb, uint32_t j, Sink &sink, dequant_part part)
{
    float scale[2], min[2];
    uint32_t w[8], h[8];
    k_scales(*(const uint4 *)sb, j, scale, min);
    *(uint4 *)&h[0] = *(const uint4 *)(sb + 16);
    *(uint4 *)&h[4] = *(const uint4 *)(sb + 32);
    *(uint4 *)&w[0] = *(const uint4 *)(sb + 48 + 32 * j);
    *(uint4 *)&w[4] = *(const uint4 *)(sb + 64 + 32 * j);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        if (part == (n ? FIRST_HALF : SECOND_HALF))
            continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t q0 = (w[2 * c] >> 4 * n & 0x0f0f0f0fu) | (h[2 * c] >> (2 * j + n) & 0x01010101u) << 4;
            uint32_t q1 =
                (w[2 * c + 1] >> 4 * n & 0x0f0f0f0fu) | (h[2 * c + 1] >> (2 * j + n) & 0x01010101u) << 4;
            emit_bytes(sink, 4 * n + c, q0, q1, scale[n], min[n]);
        }
    }
}

/* j: which 64 of the 256. */
template <class Sink> DEV void dequant_q6_k(const uint8_t *sb, uint32_t j, Sink &sink, dequant_part part)
{
    const uint32_t half = j >> 1, pair = j & 1;
    uint32_t high[8], scales[1];
    load_words(sb + 128 + 32 * half, high);
    const uint8_t *sc = sb + 192 + 8 * half + 4 * pair;
    scales[0] = (uint32_t) * (const uint16_t *)sc | (uint32_t) * (const uint16_t *)(sc + 2) << 16;
    float d = half_float(*(const uint16_t *)(sb + 208));
#pragma unroll
    for (int n = 0; n < 2; n++) {
        if (part == (n ? FIRST_HALF : SECOND_HALF))
            continue;
        uint32_t low[8];
        load_words(sb + 64 * half + 32 * n, low);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t shift = 4 * pair + 2 * n;
            uint32_t q0 = (low[2 * c] >> 4 * pair & 0x0f0f0f0fu) | (high[2 * c] >> shift & 0x03030303u) << 4;
            uint32_t q1 =
                (low[2 * c + 1] >> 4 * pair & 0x0f0f0f0fu) | (high[2 * c + 1] >> shift & 0x03030303u) << 4;
            float s = __fmul_rn(d, (float)(int8_t)(scales[0] >> (16 * n + 8 * (c >> 1))));
            emit_bytes(sink, 4 * n + c, q0, q1, s, 32.0f * s);
        }
    }
}

template <class Sink> DEV void dequant_q4_0(const uint8_t *block, int c0, Sink &sink)
{
    float d = half_float(*(const uint16_t *)block);
    uint32_t w[4];
    load_words(block + 2, w);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        emit_bytes(sink, c0 + c, w[2 * c] & 0x0f0f0f0fu, w[2 * c + 1] & 0x0f0f0f0fu, d, 8.0f * d);
        emit_bytes(sink, c0 + 2 + c, w[2 * c] >> 4 & 0x0f0f0f0fu, w[2 * c + 1] >> 4 & 0x0f0f0f0fu, d, 8.0f * d);
    }
}

template <class Sink> DEV void dequant_q8_0(const uint8_t *block, int c0, Sink &sink)
{
    float d = half_float(*(const uint16_t *)block);
    uint32_t w[8];
    load_words(block + 2, w);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float f[8];
#pragma unroll
        for (int b = 0; b < 8; b++) { /* 2^23 + (q + 128), then both taken off again: exact */
            uint32_t u = __byte_perm(w[2 * c + b / 4] ^ 0x80808080u, 0x4b000000u, 0x7440u | (b % 4));
            f[b] = __fmul_rn(__fsub_rn(__uint_as_float(u), 8388736.0f), d);
        }
        sink(c0 + c, f);
    }
}

/* Weights k .. k + n - 1 of what begins at p (a multiple of a block), n <= 64 a multiple of 16, k of 64; zeros
 * up to 64. sink(c, float[8]) gets piece c of 8. */
template <class Sink, int UNROLL = 1>
DEV void dequant64(uint32_t type, const uint8_t *p, uint32_t k, uint32_t n, Sink &sink, dequant_part part = WHOLE)
{
    switch (type) {
    case KRN_Q4_K:
        dequant_q4_k(p + (k >> 8) * 144, k >> 6 & 3, sink, part);
        break;
    case KRN_Q5_K:
        dequant_q5_k(p + (k >> 8) * 176, k >> 6 & 3, sink, part);
        break;
    case KRN_Q6_K:
        dequant_q6_k(p + (k >> 8) * 210, k >> 6 & 3, sink, part);
        break;
    case KRN_Q4_0:
    case KRN_Q8_0:
#pragma unroll UNROLL
        for (int b = part == SECOND_HALF; b < (part == FIRST_HALF ? 1 : 2); b++) {
            if ((uint32_t)b * 32 >= n) {
                for (int c = 0; c < 4; c++)
                    emit_zero(sink, 4 * b + c);
            } else if (type == KRN_Q4_0) {
                dequant_q4_0(p + (k / 32 + b) * 18, 4 * b, sink);
            } else {
                dequant_q8_0(p + (k / 32 + b) * 34, 4 * b, sink);
            }
        }
        break;
    default: /* F16, BF16, F32 */
#pragma unroll UNROLL
        for (int c = part == SECOND_HALF ? 4 : 0; c < (part == FIRST_HALF ? 4 : 8); c++) {
            float f[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if ((uint32_t)c * 8 < n) {
                if (type == KRN_F32) {
                    *(float4 *)&f[0] = *(const float4 *)(p + (k + 8 * c) * 4);
                    *(float4 *)&f[4] = *(const float4 *)(p + (k + 8 * c) * 4 + 16);
                } else {
                    uint4 q = *(const uint4 *)(p + (k + 8 * c) * 2);
                    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        f[2 * i] = type == KRN_BF16 ? bf16_lo(w[i]) : f16_lo(w[i]);
                        f[2 * i + 1] = type == KRN_BF16 ? bf16_hi(w[i]) : f16_hi(w[i]);
                    }
                }
            }
            sink(c, f);
        }
        break;
    }
}

DEV uint4 pack8(const float (&f)[8])
{
    return make_uint4(pack_f16(f[0], f[1]), pack_f16(f[2], f[3]), pack_f16(f[4], f[5]),
                      pack_f16(f[6], f[7]));
}

/* Weights of a row that are fetched together (as a power of two), and their bytes for k valid ones. */
DEV uint32_t chunk_shift(uint32_t type)
{
    return type == KRN_Q4_K || type == KRN_Q5_K || type == KRN_Q6_K || type == KRN_Q4_0 ? 8 : 6;
}

DEV uint32_t weight_bytes(uint32_t type, uint32_t k)
{
    switch (type) {
    case KRN_Q4_K:
        return k / 256 * 144;
    case KRN_Q5_K:
        return k / 256 * 176;
    case KRN_Q6_K:
        return k / 256 * 210;
    case KRN_Q4_0:
        return k / 32 * 18;
    case KRN_Q8_0:
        return k / 32 * 34;
    case KRN_F32:
        return k * 4;
    default:
        return k * 2;
    }
}

#endif
