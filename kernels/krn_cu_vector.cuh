/* SPDX-License-Identifier: MIT */
/*
 * The vector side of matrix-vector products for generated tokens.
 *
 * Quantized weights are whole numbers, so their products are summed as whole
 * numbers: a vector becomes, for each 32 of its values, a scale and 16-bit
 * numbers, kept as two planes of bytes (x = scale * (256 * hi + lo)). That is
 * finer than f16, the sums are exact, and no order of summation shows in them.
 * Weights that are floats are multiplied as floats.
 *
 * A vector in shared memory, units of 64 values: planes [hi 4, lo 4][unit] of
 * 16 bytes (piece p holds values 16 p ..), sums [unit] of each 16 values, and
 * scales [unit] of each 32; then, if wanted, the floats in two planes of quads.
 */
#ifndef KRN_CU_VECTOR_CUH
#define KRN_CU_VECTOR_CUH

#include "kernels/krn_cu_dequant.cuh"

#define GEMV_THREADS KRN_CU_GEMV_THREADS
#define X_INTS       1u
#define X_FLOATS     2u
#define X_MOST       32512.0f /* of 256 * hi + lo: hi stays below 128 */
#define NORM_QUADS   4        /* of a thread, kept in registers */

struct x_view {
    uint8_t *base;
    uint32_t units, floats; /* floats: where they begin; 0 where they are not wanted */
};

DEV x_view x_of(uint8_t *base, const krn_cu_x &x)
{
    const uint32_t units = div_up(x.cols, 64);
    return {base, units, x.forms & X_INTS ? (units * 152 + 15) & ~15u : 0};
}

/* Values k .. k + 3, k a multiple of 4; a warp's lanes hold neighbours. Zeros beyond the end. */
DEV void x_put(const x_view &v, uint32_t forms, uint32_t k, float4 f)
{
    if (forms & X_FLOATS && k < v.units * 64)
        *(float4 *)(v.base + v.floats + (k / 4 % 2 * v.units * 8 + k / 8) * 16) = f;
    if (!(forms & X_INTS))
        return;
    float most = fmaxf(fmaxf(fabsf(f.x), fabsf(f.y)), fmaxf(fabsf(f.z), fabsf(f.w)));
#pragma unroll
    for (int d = 1; d < 8; d <<= 1)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const float inverse = most > 1e-30f ? X_MOST / most : 0.0f;
    const int q[4] = {__float2int_rn(f.x * inverse), __float2int_rn(f.y * inverse), __float2int_rn(f.z * inverse),
                      __float2int_rn(f.w * inverse)};
    uint32_t hi = 0, lo = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        hi |= ((uint32_t)(q[i] + 128) >> 8 & 0xff) << 8 * i;
        lo |= ((uint32_t)q[i] & 0xff) << 8 * i;
    }
    int sum = q[0] + q[1] + q[2] + q[3];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const uint32_t unit = k / 64, piece = k / 16 % 4;
    if (unit >= v.units)
        return;
    uint8_t *plane = v.base + (piece * v.units + unit) * 16 + k % 16;
    *(uint32_t *)plane = hi;
    *(uint32_t *)(plane + 4 * v.units * 16) = lo;
    if (k % 16 == 0)
        *(int *)(v.base + v.units * 128 + unit * 16 + piece * 4) = sum;
    if (k % 32 == 0)
        *(float *)(v.base + v.units * 144 + unit * 8 + k / 32 % 2 * 4) = most * (1.0f / X_MOST);
}

DEV float4 halves(uint2 w)
{
    return make_float4(f16_lo(w.x), f16_hi(w.x), f16_lo(w.y), f16_hi(w.y));
}

/* n vectors of f16, cols apart; so many fetches under way at a time. */
DEV void x_load_f16(uint8_t *base, const krn_cu_x &x, const uint16_t *source, uint32_t n)
{
    constexpr int BATCH = 8;
    const uint32_t padded = div_up(x.cols, 128) * 128, end = n * padded;
    for (uint32_t i0 = threadIdx.x * 4; i0 / 128 * 128 < end; i0 += GEMV_THREADS * 4 * BATCH) {
        uint2 w[BATCH];
        uint32_t which = i0 / padded, k = i0 % padded;
        const uint32_t which0 = which, k0 = k;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            w[j] = which < n && k < x.cols ? load_fresh((const uint2 *)(source + (uint64_t)which * x.cols + k))
                                           : make_uint2(0, 0);
            for (k += GEMV_THREADS * 4; k >= padded; k -= padded)
                which++;
        }
        which = which0, k = k0;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (which < n) /* a warp's 128 values are of one vector */
                x_put(x_of(base + which * x.stride, x), x.forms, k, halves(w[j]));
            for (k += GEMV_THREADS * 4; k >= padded; k -= padded)
                which++;
        }
    }
}

/* A float vector, normed on the way. Barriers inside. Weights are fetched before `begin`, which waits for
 * whoever writes the vector; `meanwhile` runs while the vector is on its way. */
template <class Begin, class Meanwhile>
DEV void x_load_norm(uint8_t *base, const krn_cu_x &x, const float *source, Begin begin, Meanwhile meanwhile)
{
    __shared__ float part[GEMV_THREADS / 32];
    const float4 *from = (const float4 *)source, *weight = at<float4>(x.norm);
    const uint32_t quads = x.cols / 4, padded = div_up(x.cols, 128) * 32;
    const x_view v = x_of(base, x);
    float4 f[NORM_QUADS], w[NORM_QUADS];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++) {
        uint32_t k = threadIdx.x + i * GEMV_THREADS;
        w[i] = k < quads ? weight[k] : make_float4(0, 0, 0, 0);
    }
    begin();
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++) {
        uint32_t k = threadIdx.x + i * GEMV_THREADS;
        f[i] = k < quads ? load_fresh(from + k) : make_float4(0, 0, 0, 0);
    }
    meanwhile();
    auto square = [&](const float4 &q) {
        sum = __fmaf_rn(q.x, q.x, sum);
        sum = __fmaf_rn(q.y, q.y, sum);
        sum = __fmaf_rn(q.z, q.z, sum);
        sum = __fmaf_rn(q.w, q.w, sum);
    };
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++)
        square(f[i]);
    for (uint32_t k = threadIdx.x + NORM_QUADS * GEMV_THREADS; k < quads; k += GEMV_THREADS)
        square(load_fresh(from + k));
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = part[0];
#pragma unroll
    for (int i = 1; i < GEMV_THREADS / 32; i++)
        sum = __fadd_rn(sum, part[i]);
    const float r = 1.0f / sqrtf(__fadd_rn(sum / (float)x.cols, x.eps));
    auto put = [&](uint32_t k, float4 q, float4 g) {
        q = make_float4(__fmul_rn(__fmul_rn(q.x, r), g.x), __fmul_rn(__fmul_rn(q.y, r), g.y),
                        __fmul_rn(__fmul_rn(q.z, r), g.z), __fmul_rn(__fmul_rn(q.w, r), g.w));
        x_put(v, x.forms, 4 * k, q);
    };
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++) {
        uint32_t k = threadIdx.x + i * GEMV_THREADS;
        if (k < padded)
            put(k, f[i], w[i]);
    }
    for (uint32_t k = threadIdx.x + NORM_QUADS * GEMV_THREADS; k < padded; k += GEMV_THREADS)
        put(k, k < quads ? load_fresh(from + k) : make_float4(0, 0, 0, 0),
            k < quads ? weight[k] : make_float4(0, 0, 0, 0));
    __syncthreads();
}

/* A lane's 64 values: two blocks of 32. */
struct x_unit {
    uint32_t hi[16], lo[16];
    int sum[4];
    float scale[2], least[2]; /* least: scale times the sum, for minima */
};

/* Q6_K's bytes hold weights k and k + 64: its units are paired the same way. */
template <uint32_t TYPE> DEV void x_get(const x_view &v, uint32_t unit, x_unit &x)
{
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint32_t u = TYPE == KRN_Q6_K ? (unit & ~1u) + b : unit, block = TYPE == KRN_Q6_K ? unit & 1 : b;
        const uint8_t *plane = v.base + (2 * block * v.units + u) * 16;
        *(uint4 *)&x.hi[8 * b] = *(const uint4 *)plane;
        *(uint4 *)&x.hi[8 * b + 4] = *(const uint4 *)(plane + v.units * 16);
        *(uint4 *)&x.lo[8 * b] = *(const uint4 *)(plane + v.units * 64);
        *(uint4 *)&x.lo[8 * b + 4] = *(const uint4 *)(plane + v.units * 80);
        const int2 s = *(const int2 *)(v.base + v.units * 128 + u * 16 + block * 8);
        x.sum[2 * b] = s.x;
        x.sum[2 * b + 1] = s.y;
        x.scale[b] = *(const float *)(v.base + v.units * 144 + u * 8 + block * 4);
        x.least[b] = __fmul_rn(x.scale[b], (float)(s.x + s.y));
    }
}

/* Four words of bytes times 16 values from word `at`. */
DEV int dot16(const x_unit &x, int at, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3)
{
    int h = dot_us(w0, x.hi[at], 0), l = dot_us(w0, x.lo[at], 0);
    h = dot_us(w1, x.hi[at + 1], h), l = dot_us(w1, x.lo[at + 1], l);
    h = dot_us(w2, x.hi[at + 2], h), l = dot_us(w2, x.lo[at + 2], l);
    h = dot_us(w3, x.hi[at + 3], h), l = dot_us(w3, x.lo[at + 3], l);
    return h * 256 + l;
}

/* A unit of K-quants: whole numbers a and b of its blocks scales and minima from the head. d1: scale of the second. */
DEV float k_sum(const x_unit &x, uint4 head, uint32_t j, float d1, int a, int b)
{
    const bool low = j < 2;
    const uint32_t shift = 16 * (j & 1), y = head.y >> shift, z = head.z >> shift, w = head.w >> shift;
    const uint32_t s = ((low ? y : w) & (low ? 0x3f3fu : 0x0f0fu)) | (y >> 2 & (low ? 0u : 0x3030u));
    const uint32_t m = ((low ? z : w >> 4) & (low ? 0x3f3fu : 0x0f0fu)) | (z >> 2 & (low ? 0u : 0x3030u));
    const float p = __fmul_rn(x.scale[0], (float)a), q = __fmul_rn(d1, (float)b);
    const float scaled = __fmaf_rn((float)(s & 0xff), p, __fmul_rn((float)(s >> 8 & 0xff), q));
    const float least = __fmaf_rn((float)(m & 0xff), x.least[0], __fmul_rn((float)(m >> 8 & 0xff), x.least[1]));
    return __fmaf_rn(half_float((uint16_t)head.x), scaled,
                     -__fmul_rn(half_float((uint16_t)(head.x >> 16)), least));
}

/* Unit u of a row that begins at p in shared memory: a multiple of 16 for Q4_K and Q5_K, of 2 for the others.
 * second: the unit's other 32 weights exist. */
template <uint32_t TYPE> DEV float unit_dot(const uint8_t *p, uint32_t u, bool second, const x_unit &x)
{
    if constexpr (TYPE == KRN_Q4_K || TYPE == KRN_Q5_K) {
        constexpr uint32_t BYTES = TYPE == KRN_Q4_K ? 144 : 176;
        const uint8_t *sb = p + u / 4 * BYTES;
        const uint32_t j = u % 4;
        uint32_t w[8];
        *(uint4 *)&w[0] = *(const uint4 *)(sb + (BYTES - 128) + 32 * j);
        *(uint4 *)&w[4] = *(const uint4 *)(sb + (BYTES - 112) + 32 * j);
        uint32_t low[8], high[8];
        if constexpr (TYPE == KRN_Q4_K) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                low[i] = w[i] & 0x0f0f0f0fu;
                high[i] = w[i] & 0xf0f0f0f0u; /* sixteen times too large, and the scale a sixteenth */
            }
        } else {
            uint32_t h[8];
            *(uint4 *)&h[0] = *(const uint4 *)(sb + 16);
            *(uint4 *)&h[4] = *(const uint4 *)(sb + 32);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                h[i] >>= 2 * j;
                low[i] = (w[i] & 0x0f0f0f0fu) | (h[i] & 0x01010101u) << 4;
                high[i] = (w[i] >> 4 & 0x0f0f0f0fu) | (h[i] & 0x02020202u) << 3;
            }
        }
        const int a = dot16(x, 0, low[0], low[1], low[2], low[3]) + dot16(x, 4, low[4], low[5], low[6], low[7]);
        const int b = dot16(x, 8, high[0], high[1], high[2], high[3]) + dot16(x, 12, high[4], high[5], high[6], high[7]);
        return k_sum(x, *(const uint4 *)sb, j, TYPE == KRN_Q4_K ? x.scale[1] * 0.0625f : x.scale[1], a, b);
    } else if constexpr (TYPE == KRN_Q6_K) {
        const uint8_t *sb = p + u / 4 * 210;
        const uint32_t half = u >> 1 & 1, n = u & 1;
        uint32_t low[8], high[8];
        load_words(sb + 64 * half + 32 * n, low);
        load_words(sb + 128 + 32 * half, high);
        const uint8_t *sc = sb + 192 + 8 * half + 2 * n;
        const uint32_t scales = (uint32_t) * (const uint16_t *)sc | (uint32_t) * (const uint16_t *)(sc + 4) << 16;
        const float d = half_float(*(const uint16_t *)(sb + 208));
        float block[2];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            float t = 0.0f;
#pragma unroll
            for (int g = 0; g < 2; g++) {
                uint32_t q[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    q[i] = (low[4 * g + i] >> 4 * b & 0x0f0f0f0fu) |
                           (high[4 * g + i] >> (2 * n + 4 * b) & 0x03030303u) << 4;
                int s = dot16(x, 8 * b + 4 * g, q[0], q[1], q[2], q[3]) - 32 * x.sum[2 * b + g];
                t = __fmaf_rn((float)(int8_t)(scales >> (16 * b + 8 * g)), (float)s, t);
            }
            block[b] = t;
        }
        return __fmul_rn(d, __fmaf_rn(x.scale[1], block[1], __fmul_rn(x.scale[0], block[0])));
    } else {
        /* Q4_0, Q8_0: two blocks, each a scale and its bytes; brought to a multiple of 4 first. */
        constexpr int WORDS = TYPE == KRN_Q4_0 ? 9 : 17, Q = (WORDS - 1) / 2;
        uint32_t w[WORDS];
        const uint8_t *block = p + u * (WORDS * 4);
        const uint32_t off = (uint32_t)(uintptr_t)block & 2u;
        const uint32_t *from = (const uint32_t *)(block - off);
        uint32_t q[2][Q];
#pragma unroll
        for (int i = 0; i < WORDS; i++) /* what is read beyond the row is not used */
            w[i] = __funnelshift_r(from[i], from[i + 1], off * 8);
#pragma unroll
        for (int i = 0; i < Q; i++) {
            q[0][i] = __funnelshift_r(w[i], w[i + 1], 16);
            q[1][i] = w[Q + 1 + i];
        }
        const float d[2] = {half_float((uint16_t)w[0]), half_float((uint16_t)(w[Q] >> 16))};
        float sum = 0.0f;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            if (b && !second)
                break;
            int s = 0;
            if constexpr (TYPE == KRN_Q4_0) {
                uint32_t n[8];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    n[i] = q[b][i] & 0x0f0f0f0fu;
                    n[4 + i] = q[b][i] & 0xf0f0f0f0u;
                }
                s = dot16(x, 8 * b, n[0], n[1], n[2], n[3]) +
                    (dot16(x, 8 * b + 4, n[4], n[5], n[6], n[7]) >> 4) - /* a multiple of 16 */
                    8 * (x.sum[2 * b] + x.sum[2 * b + 1]);
            } else {
                int h = 0, l = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    h = dot_ss(q[b][i], x.hi[8 * b + i], h);
                    l = dot_ss(q[b][i], x.lo[8 * b + i], l);
                }
                s = h * 256 + l;
            }
            sum = __fmaf_rn(__fmul_rn(d[b], x.scale[b]), (float)s, sum);
        }
        return sum;
    }
}

/* Eight weights from k of a float row in global memory times the vector. */
template <uint32_t TYPE> DEV float eight_dot(const uint8_t *row, uint32_t k, const float4 &x0, const float4 &x1, float sum)
{
    float4 a, b;
    if constexpr (TYPE == KRN_F32) {
        a = *(const float4 *)(row + k * 4);
        b = *(const float4 *)(row + k * 4 + 16);
    } else {
        const uint4 w = *(const uint4 *)(row + k * 2);
        a = TYPE == KRN_BF16 ? make_float4(bf16_lo(w.x), bf16_hi(w.x), bf16_lo(w.y), bf16_hi(w.y))
                             : make_float4(f16_lo(w.x), f16_hi(w.x), f16_lo(w.y), f16_hi(w.y));
        b = TYPE == KRN_BF16 ? make_float4(bf16_lo(w.z), bf16_hi(w.z), bf16_lo(w.w), bf16_hi(w.w))
                             : make_float4(f16_lo(w.z), f16_hi(w.z), f16_lo(w.w), f16_hi(w.w));
    }
    sum = __fmaf_rn(a.x, x0.x, sum);
    sum = __fmaf_rn(a.y, x0.y, sum);
    sum = __fmaf_rn(a.z, x0.z, sum);
    sum = __fmaf_rn(a.w, x0.w, sum);
    sum = __fmaf_rn(b.x, x1.x, sum);
    sum = __fmaf_rn(b.y, x1.y, sum);
    sum = __fmaf_rn(b.z, x1.z, sum);
    return __fmaf_rn(b.w, x1.w, sum);
}

DEV bool is_float(uint32_t type)
{
    return type == KRN_F32 || type == KRN_F16 || type == KRN_BF16;
}

#endif
