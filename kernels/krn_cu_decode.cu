/* SPDX-License-Identifier: MIT */
/*
 * Causal attention of generated tokens over an f16 KV cache, k and v
 * [kv_heads][ctx][head_dim]: parts of 256 keys at absolute multiples, each on
 * its own; then the parts are joined in ascending order.
 */
#include "kernels/krn_cu_common.cuh"

#define THREADS  128
#define NEGATIVE __int_as_float(0xff800000)

/* part: for each (token, head, part): head_dim sums, then maximum (of scaled scores) and total. */
KERNEL(__launch_bounds__(THREADS), decode_part, krn_cu_decode_args)
{
    constexpr int HEADS = KRN_CU_SPLIT_HEADS, SPLIT = KRN_CU_SPLIT_KEYS;
    __shared__ __align__(16) float q[128 * HEADS]; /* [dim][head] */
    __shared__ __align__(16) float p[SPLIT * HEADS]; /* [key][head] */
    __shared__ float top[HEADS], total[HEADS];
    const uint32_t group = a.heads / a.kv_heads, sets = div_up(group, HEADS);
    const uint32_t part = blockIdx.x, kv_head = blockIdx.y / sets, set = blockIdx.y % sets, token = blockIdx.z;
    const uint32_t key0 = part * SPLIT, keys_all = a.position + token + 1, hd = a.head_dim, tid = threadIdx.x;
    if (key0 >= keys_all)
        return;
    const uint32_t keys = keys_all - key0 < SPLIT ? keys_all - key0 : SPLIT;
    const uint32_t head0 = kv_head * group + set * HEADS;
    const uint32_t n_heads = group - set * HEADS < HEADS ? group - set * HEADS : HEADS;
    const uint16_t *source = at<uint16_t>(a.q) + ((uint64_t)token * a.heads + head0) * hd;
    for (uint32_t i = tid; i < HEADS * hd; i += THREADS) {
        uint32_t h = i / hd, d = i % hd;
        q[d * HEADS + h] = h < n_heads ? half_float(source[i]) : 0.0f;
    }
    __syncthreads();
    const uint64_t base = ((uint64_t)kv_head * a.ctx + key0) * hd;
    for (uint32_t key = tid; key < SPLIT; key += THREADS) {
        float s[HEADS] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (key < keys) {
            const uint4 *row = (const uint4 *)(at<uint16_t>(a.k) + base + (uint64_t)key * hd);
#pragma unroll 4
            for (uint32_t piece = 0; piece < hd / 8; piece++) {
                uint4 w4 = row[piece];
                const uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float x = i & 1 ? f16_hi(w[i / 2]) : f16_lo(w[i / 2]);
                    const float *qd = q + (piece * 8 + i) * HEADS;
#pragma unroll
                    for (int h = 0; h < HEADS; h++)
                        s[h] = __fmaf_rn(x, qd[h], s[h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            p[key * HEADS + h] = key < keys ? s[h] * a.scale_log2 : NEGATIVE;
    }
    __syncthreads();
    for (uint32_t h = tid / 32; h < HEADS; h += THREADS / 32) {
        float m = NEGATIVE, sum = 0.0f;
        for (uint32_t key = tid % 32; key < SPLIT; key += 32)
            m = fmaxf(m, p[key * HEADS + h]);
        m = warp_max(m);
        for (uint32_t key = tid % 32; key < SPLIT; key += 32) {
            float e = exp2_fast(p[key * HEADS + h] - m);
            p[key * HEADS + h] = e;
            sum = __fadd_rn(sum, e);
        }
        sum = warp_sum(sum);
        if (tid % 32 == 0) {
            top[h] = m;
            total[h] = sum;
        }
    }
    __syncthreads();
    float *out = at<float>(a.part);
    if (tid < hd) {
        float o[HEADS] = {0, 0, 0, 0, 0, 0, 0, 0};
        const uint16_t *v = at<uint16_t>(a.v) + base + tid;
#pragma unroll 4
        for (uint32_t key = 0; key < keys; key++) {
            float x = half_float(v[(uint64_t)key * hd]);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                o[h] = __fmaf_rn(x, p[key * HEADS + h], o[h]);
        }
        for (uint32_t h = 0; h < n_heads; h++)
            out[(((uint64_t)token * a.heads + head0 + h) * a.parts + part) * (hd + 2) + tid] = o[h];
    }
    if (tid < n_heads) {
        float *end = out + (((uint64_t)token * a.heads + head0 + tid) * a.parts + part) * (hd + 2) + hd;
        end[0] = top[tid];
        end[1] = total[tid];
    }
}

/* A block a (head, token), a thread a dimension: parts in ascending order. */
KERNEL(__launch_bounds__(THREADS), decode_join, krn_cu_decode_args)
{
    const uint32_t hd = a.head_dim, parts = div_up(a.position + blockIdx.y + 1, KRN_CU_SPLIT_KEYS);
    const uint64_t row = (uint64_t)blockIdx.y * a.heads + blockIdx.x;
    const float *part = at<float>(a.part) + row * a.parts * (hd + 2);
    if (threadIdx.x >= hd)
        return;
    float m = NEGATIVE, sum = 0.0f, o = 0.0f;
    for (uint32_t i = 0; i < parts; i++, part += hd + 2) {
        float top = fmaxf(m, part[hd]), shrink = exp2_fast(m - top), grow = exp2_fast(part[hd] - top);
        o = __fmaf_rn(part[threadIdx.x], grow, __fmul_rn(o, shrink));
        sum = __fmaf_rn(part[hd + 1], grow, __fmul_rn(sum, shrink));
        m = top;
    }
    at<uint16_t>(a.y)[row * hd + threadIdx.x] = to_f16(o / sum);
}
