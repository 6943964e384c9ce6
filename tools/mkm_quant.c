/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: random blocks of each storage format, made directly (a few
 * nanoseconds a block, no floats in between), and a plain quantizer for the
 * embedding rows, which must be s + noise. Little-endian hosts only, like GGUF.
 */
#include "tools/mkm_model.h"
#include "tools/mkm_rng.h"

#include <math.h>
#include <string.h>

#define K_ELEMS 256u

uint16_t mkm_f32_to_f16(float x)
{
    uint32_t u, sign, mant;
    int exp, shift;

    memcpy(&u, &x, 4);
    sign = u >> 16 & 0x8000;
    exp = (int)(u >> 23 & 0xff) - 127 + 15;
    if (exp > 0 && exp < 30) /* nearly always */
        return (uint16_t)(sign | ((((u & 0x7fffffff) + 0xfff + (u >> 13 & 1)) >> 13) - (112u << 10)));
    mant = (u & 0x7fffff) | 0x800000;
    if (exp >= 31) /* too large, infinite or NaN: the largest finite, a weight must be finite */
        return (uint16_t)(sign | 0x7bff);
    if (exp < -10)
        return (uint16_t)sign;
    shift = exp > 0 ? 13 : 14 - exp;
    /* Round to nearest even; a carry runs into the exponent as it should. */
    u = mant >> shift;
    mant &= (1u << shift) - 1;
    if (mant > 1u << (shift - 1) || (mant == 1u << (shift - 1) && (u & 1)))
        u++;
    if (exp > 0)
        u += (uint32_t)(exp - 1) << 10;
    return (uint16_t)(sign | (u > 0x7bff ? 0x7bff : u));
}

static uint16_t to_bf16(float x)
{
    uint32_t u;

    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static void put16(unsigned char *to, uint16_t v)
{
    memcpy(to, &v, 2);
}

static void put_random(unsigned char *to, unsigned n, uint64_t *state)
{
    for (unsigned i = 0; i < n; i += 8) {
        uint64_t z = mkm_next(state);
        memcpy(to + i, &z, 8);
    }
}

/* Six-bit scales and mins of Q4_K and Q5_K: 12 bytes. */
static void put_scales(unsigned char *to, const unsigned char *sc, const unsigned char *mn)
{
    for (unsigned i = 0; i < 4; i++) {
        to[i] = (unsigned char)(sc[i] | (sc[i + 4] >> 4) << 6);
        to[i + 4] = (unsigned char)(mn[i] | (mn[i + 4] >> 4) << 6);
        to[i + 8] = (unsigned char)((sc[i + 4] & 15) | (mn[i + 4] & 15) << 4);
    }
}

/* ---- random ---- */

static float jitter(uint64_t *state)
{
    return 1.0f + 0.1f * mkm_normal(state);
}

/* Odd values of `bits` bits around 0: mean exactly 0, deviation sqrt((h*h - 1) / 3) with h = 2^(bits-1). */
static void random_q8_0(unsigned char *b, float sigma, uint64_t *state)
{
    unsigned bits = 8;
    float d = 0;
    uint64_t keep;

    for (; bits > 4; bits--) { /* fewer bits where the half-precision scale would be subnormal */
        float h = (float)(1 << (bits - 1));
        d = sigma / sqrtf((h * h - 1) / 3);
        if (d > 8e-5f)
            break;
    }
    keep = 0x0101010101010101u * ((1u << bits) - 1);
    put16(b, mkm_f32_to_f16(d * jitter(state)));
    for (unsigned i = 0; i < 32; i += 8) {
        uint64_t z = (mkm_next(state) & keep) | 0x0101010101010101u;
        for (unsigned j = 0; j < 8; j++)
            b[2 + i + j] = (unsigned char)((z >> 8 * j & 0xff) - (1u << (bits - 1)));
    }
}

static void random_q4_0(unsigned char *b, float sigma, uint64_t *state)
{
    put16(b, mkm_f32_to_f16(sigma / sqrtf(21.0f) * jitter(state)));
    for (unsigned i = 0; i < 16; i += 8) {
        uint64_t z = mkm_next(state) | 0x1111111111111111u; /* odd levels: mean 0 around 8 */
        memcpy(b + 2 + i, &z, 8);
    }
}

/* Weight = d * sc * q - dmin * m with m = sc and dmin = d * (largest q) / 2: mean 0. */
static void random_q45_k(unsigned char *b, float sigma, uint64_t *state, float q_max)
{
    float var_q = ((q_max + 1) * (q_max + 1) - 1) / 12, d;
    unsigned char sc[8];
    uint64_t z = mkm_next(state);

    for (unsigned i = 0; i < 8; i++)
        sc[i] = (unsigned char)(6 + ((z >> 8 * i & 0xff) * 15 >> 8)); /* 6 .. 20, mean square 187.7 */
    d = krn_f16_to_f32(mkm_f32_to_f16(sigma / sqrtf(187.7f * var_q) * jitter(state)));
    put16(b, mkm_f32_to_f16(d));
    put16(b + 2, mkm_f32_to_f16(d * q_max / 2));
    put_scales(b + 4, sc, sc);
    put_random(b + 16, q_max > 15 ? 160 : 128, state);
}

static void random_q6_k(unsigned char *b, float sigma, uint64_t *state)
{
    uint64_t z = 0;

    put_random(b, 192, state);
    for (unsigned i = 0; i < 16; i++) { /* 3 .. 12 with a random sign: the levels' mean of -1/2 cancels */
        int v;
        if (i % 8 == 0)
            z = mkm_next(state);
        v = (int)(3 + ((z & 0x7f) * 10 >> 7));
        b[192 + i] = (unsigned char)(z & 0x80 ? -v : v);
        z >>= 8;
    }
    put16(b + 208, mkm_f32_to_f16(sigma / sqrtf(64.5f * 341.5f) * jitter(state)));
}

void mkm_random_blocks(const struct krn_type *type, double sigma_d, uint64_t *state, void *dst, uint64_t n)
{
    unsigned char *b = dst;
    float sigma = (float)sigma_d;

    for (uint64_t i = 0; i < n; i += type->block_elems, b += type->block_bytes) {
        float x;
        switch ((enum krn_ggml_id)type->ggml_id) {
        case KRN_F32:
            x = sigma * mkm_normal(state);
            memcpy(b, &x, 4);
            break;
        case KRN_F16:
            put16(b, mkm_f32_to_f16(sigma * mkm_normal(state)));
            break;
        case KRN_BF16:
            put16(b, to_bf16(sigma * mkm_normal(state)));
            break;
        case KRN_Q8_0:
            random_q8_0(b, sigma, state);
            break;
        case KRN_Q4_0:
            random_q4_0(b, sigma, state);
            break;
        case KRN_Q4_K:
            random_q45_k(b, sigma, state, 15);
            break;
        case KRN_Q5_K:
            random_q45_k(b, sigma, state, 31);
            break;
        case KRN_Q6_K:
            random_q6_k(b, sigma, state);
            break;
        }
    }
}

/* ---- encoding ---- */

static float abs_max(const float *x, unsigned n)
{
    float m = 0;

    for (unsigned i = 0; i < n; i++)
        m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
    return m;
}

/* x * inv + add, rounded, within low .. high. Adding 1.5 * 2^23 leaves the
 * rounded value in the low bits: no branch, no call. */
static int level(float x, float inv, float add, int low, int high)
{
    float v = x * inv + add;
    int32_t bits;

    v = v < (float)low ? (float)low : v;
    v = v > (float)high ? (float)high : v;
    v += 12582912.0f;
    memcpy(&bits, &v, 4);
    return bits - 0x4b400000;
}

static void encode_q8_0(const float *x, unsigned char *b)
{
    uint16_t h = mkm_f32_to_f16(abs_max(x, 32) / 127);
    float d = krn_f16_to_f32(h), inv = d > 0 ? 1 / d : 0;

    put16(b, h);
    for (unsigned i = 0; i < 32; i++)
        b[2 + i] = (unsigned char)level(x[i], inv, 0, -127, 127);
}

static void encode_q4_0(const float *x, unsigned char *b)
{
    uint16_t h = mkm_f32_to_f16(abs_max(x, 32) / 7);
    float d = krn_f16_to_f32(h), inv = d > 0 ? 1 / d : 0;

    put16(b, h);
    for (unsigned i = 0; i < 16; i++)
        b[2 + i] = (unsigned char)(level(x[i], inv, 8, 0, 15) | level(x[i + 16], inv, 8, 0, 15) << 4);
}

static void encode_q45_k(const float *x, unsigned char *b, int q_max)
{
    float lows[8], steps[8], low_max = 0, step_max = 0, d, dmin;
    unsigned char sc[8], mn[8], q[K_ELEMS];

    for (unsigned g = 0; g < 8; g++) {
        float lo = 0, hi = 0;
        for (unsigned i = 0; i < 32; i++) {
            lo = x[g * 32 + i] < lo ? x[g * 32 + i] : lo;
            hi = x[g * 32 + i] > hi ? x[g * 32 + i] : hi;
        }
        lows[g] = -lo;
        steps[g] = (hi - lo) / (float)q_max;
        low_max = lows[g] > low_max ? lows[g] : low_max;
        step_max = steps[g] > step_max ? steps[g] : step_max;
    }
    put16(b, mkm_f32_to_f16(step_max / 63));
    put16(b + 2, mkm_f32_to_f16(low_max / 63));
    d = krn_f16_to_f32(mkm_f32_to_f16(step_max / 63));
    dmin = krn_f16_to_f32(mkm_f32_to_f16(low_max / 63));
    for (unsigned g = 0; g < 8; g++) {
        float step, low;
        sc[g] = (unsigned char)level(steps[g], d > 0 ? 1 / d : 0, 0, 0, 63);
        mn[g] = (unsigned char)level(lows[g], dmin > 0 ? 1 / dmin : 0, 0, 0, 63);
        step = d * (float)sc[g];
        low = dmin * (float)mn[g];
        for (unsigned i = 0; i < 32; i++)
            q[g * 32 + i] = (unsigned char)level(x[g * 32 + i] + low, step > 0 ? 1 / step : 0, 0, 0, q_max);
    }
    put_scales(b + 4, sc, mn);
    b += 16;
    if (q_max > 15) { /* fifth bits: bit g of byte i belongs to element i of group g */
        for (unsigned i = 0; i < 32; i++) {
            unsigned v = 0;
            for (unsigned g = 0; g < 8; g++)
                v |= (unsigned)(q[g * 32 + i] >> 4) << g;
            *b++ = (unsigned char)v;
        }
    }
    for (unsigned g = 0; g < 8; g += 2)
        for (unsigned i = 0; i < 32; i++)
            *b++ = (unsigned char)((q[g * 32 + i] & 15) | (q[g * 32 + 32 + i] & 15) << 4);
}

static void encode_q6_k(const float *x, unsigned char *b)
{
    float steps[16], step_max = 0, d;
    unsigned char q[K_ELEMS];
    uint16_t h;

    for (unsigned g = 0; g < 16; g++) {
        steps[g] = abs_max(x + g * 16, 16) / 31;
        step_max = steps[g] > step_max ? steps[g] : step_max;
    }
    h = mkm_f32_to_f16(step_max / 127);
    d = krn_f16_to_f32(h);
    for (unsigned g = 0; g < 16; g++) {
        int sc = level(steps[g], d > 0 ? 1 / d : 0, 0, 0, 127);
        float step = d * (float)sc;
        b[192 + g] = (unsigned char)sc;
        for (unsigned i = 0; i < 16; i++)
            q[g * 16 + i] = (unsigned char)level(x[g * 16 + i], step > 0 ? 1 / step : 0, 32, 0, 63);
    }
    for (unsigned half = 0; half < 2;
         half++) { /* 128 elements: four rows of 32, low nibbles then top pairs */
        const unsigned char *p = q + half * 128;
        for (unsigned i = 0; i < 32; i++) {
            b[half * 64 + i] = (unsigned char)((p[i] & 15) | (p[64 + i] & 15) << 4);
            b[half * 64 + 32 + i] = (unsigned char)((p[32 + i] & 15) | (p[96 + i] & 15) << 4);
            b[128 + half * 32 + i] = (unsigned char)(p[i] >> 4 | (p[32 + i] >> 4) << 2 |
                                                     (p[64 + i] >> 4) << 4 | (p[96 + i] >> 4) << 6);
        }
    }
    put16(b + 208, h);
}

void mkm_encode(const struct krn_type *type, const float *src, void *dst, uint64_t n)
{
    unsigned char *b = dst;

    for (uint64_t i = 0; i < n; i += type->block_elems, b += type->block_bytes) {
        switch ((enum krn_ggml_id)type->ggml_id) {
        case KRN_F32:
            memcpy(b, &src[i], 4);
            break;
        case KRN_F16:
            put16(b, mkm_f32_to_f16(src[i]));
            break;
        case KRN_BF16:
            put16(b, to_bf16(src[i]));
            break;
        case KRN_Q8_0:
            encode_q8_0(src + i, b);
            break;
        case KRN_Q4_0:
            encode_q4_0(src + i, b);
            break;
        case KRN_Q4_K:
            encode_q45_k(src + i, b, 15);
            break;
        case KRN_Q5_K:
            encode_q45_k(src + i, b, 31);
            break;
        case KRN_Q6_K:
            encode_q6_k(src + i, b);
            break;
        }
    }
}
