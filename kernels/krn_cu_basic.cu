/* SPDX-License-Identifier: MIT */
/* Embedding, norms, rotary positions and KV write, combine, expansion of weights to f16. */
#include "kernels/krn_cu_dequant.cuh"

struct float_sink {
    static constexpr bool RAW = false;
    float *y;
    __device__ __forceinline__ void operator()(int c, const float (&f)[8])
    {
        *(float4 *)(y + 8 * c) = make_float4(f[0], f[1], f[2], f[3]);
        *(float4 *)(y + 8 * c + 4) = make_float4(f[4], f[5], f[6], f[7]);
    }
};

/* For the end of a row: pieces of eight below n. */
template <class Sink> struct short_sink {
    static constexpr bool RAW = false;
    Sink sink;
    uint32_t n;
    __device__ __forceinline__ void operator()(int c, const float (&f)[8])
    {
        if ((uint32_t)c * 8 < n)
            sink(c, f);
    }
};

DEV uint32_t left(uint32_t cols, uint32_t k)
{
    return cols - k < 64 ? cols - k : 64;
}

KERNEL(, embed, krn_cu_embed_args)
{
    uint32_t id = at<uint32_t>(a.ids)[blockIdx.x];
    const uint8_t *row = at<uint8_t>(a.m.data) + (uint64_t)(id < a.m.rows ? id : 0) * a.m.row_bytes;
    for (uint32_t k = threadIdx.x * 64; k < a.m.cols; k += blockDim.x * 64) {
        short_sink<float_sink> sink = {{at<float>(a.y) + (uint64_t)blockIdx.x * a.m.cols + k}, left(a.m.cols, k)};
        dequant64(a.m.type, row, k, sink.n, sink);
    }
}

struct store_f16_sink {
    static constexpr bool RAW = false;
    uint8_t *y;
    __device__ __forceinline__ void operator()(int c, const float (&f)[8])
    {
        *(uint4 *)(y + 16 * c) = pack8(f);
    }
};

/* BF16 may be its own target: a thread reads eight weights and writes them there. */
KERNEL(, expand, krn_cu_expand_args)
{
    const uint32_t units = div_up(a.m.cols, 64);
    const uint64_t n = (uint64_t)units * a.m.rows;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t row = i / units;
        uint32_t k = (uint32_t)(i % units) * 64;
        short_sink<store_f16_sink> sink = {{at<uint8_t>(a.y) + (row * a.m.cols + k) * 2}, left(a.m.cols, k)};
        dequant64(a.m.type, at<uint8_t>(a.m.data) + row * a.m.row_bytes, k, sink.n, sink);
    }
}

#define NORM_THREADS 256

KERNEL(__launch_bounds__(NORM_THREADS), rmsnorm, krn_cu_norm_args)
{
    __shared__ float part[NORM_THREADS / 32];
    const float4 *x = (const float4 *)(at<float>(a.x) + (uint64_t)blockIdx.x * a.dim);
    const float4 *w = at<float4>(a.weight);
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.dim / 4; i += NORM_THREADS) {
        float4 v = x[i];
        sum = __fmaf_rn(v.x, v.x, sum);
        sum = __fmaf_rn(v.y, v.y, sum);
        sum = __fmaf_rn(v.z, v.z, sum);
        sum = __fmaf_rn(v.w, v.w, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NORM_THREADS / 32; i++)
        sum = __fadd_rn(sum, part[i]);
    const float r = 1.0f / sqrtf(__fadd_rn(sum / (float)a.dim, a.eps));
    for (uint32_t i = threadIdx.x; i < a.dim / 4; i += NORM_THREADS) {
        float4 v = x[i], g = w[i];
        v = make_float4(__fmul_rn(__fmul_rn(v.x, r), g.x), __fmul_rn(__fmul_rn(v.y, r), g.y),
                        __fmul_rn(__fmul_rn(v.z, r), g.z), __fmul_rn(__fmul_rn(v.w, r), g.w));
        if (a.y_f32)
            at<float4>(a.y_f32)[(uint64_t)blockIdx.x * (a.dim / 4) + i] = v;
        if (a.y_f16)
            at<uint2>(a.y_f16)[(uint64_t)blockIdx.x * (a.dim / 4) + i] =
                make_uint2(pack_f16(v.x, v.y), pack_f16(v.z, v.w));
    }
}

KERNEL(, words, krn_cu_words_args)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x)
        at<uint32_t>(a.to)[i] = at<volatile uint32_t>(a.from)[i];
}

/* In double: the angle of a far position keeps few bits in float. */
KERNEL(, rope_table, krn_cu_rope_table_args)
{
    const uint32_t half = a.head_dim / 2, i = blockIdx.x * blockDim.x + threadIdx.x, t = i / half, d = i % half;
    if (t >= a.tokens)
        return;
    const uint32_t position = a.rows ? at<krn_cu_row>(a.rows)[t].position : a.position + t;
    double angle = (double)position * pow((double)a.base, -2.0 * d / a.head_dim), s, c;
    sincos(angle, &s, &c);
    float *row = at<float>(a.table) + (uint64_t)t * a.head_dim;
    row[d] = (float)c;
    row[half + d] = (float)s;
}

/* A warp a head of a token: heads of q, then of k, then of v. Lane l holds pairs (i, i + hd/2), i = l, l + 32.. */
KERNEL(, qkv, krn_cu_qkv_args)
{
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const uint32_t per_token = a.heads + 2 * a.kv_heads, t = warp / per_token, h = warp % per_token;
    const uint32_t hd = a.head_dim, half = hd / 2;
    if (t >= a.tokens)
        return;
    const float *x, *weight = nullptr;
    uint16_t *y;
    bool rotate = true;
    const uint32_t position = a.position + t;
    const uint64_t cell = (uint64_t)at<uint32_t>(a.blocks)[position / KRN_CU_KV_BLOCK] * KRN_CU_KV_BLOCK +
                          position % KRN_CU_KV_BLOCK;
    if (h < a.heads) {
        x = at<float>(a.q) + ((uint64_t)t * a.heads + h) * hd;
        weight = at<float>(a.q_weight);
        y = at<uint16_t>(a.q_out) + ((uint64_t)t * a.heads + h) * hd;
    } else if (h < a.heads + a.kv_heads) {
        uint32_t kh = h - a.heads;
        x = at<float>(a.k) + ((uint64_t)t * a.kv_heads + kh) * hd;
        weight = at<float>(a.k_weight);
        y = at<uint16_t>(a.k_cache) + ((uint64_t)kh * a.ctx + cell) * hd;
    } else {
        uint32_t kh = h - a.heads - a.kv_heads;
        x = at<float>(a.v) + ((uint64_t)t * a.kv_heads + kh) * hd;
        y = at<uint16_t>(a.v_cache) + ((uint64_t)kh * a.ctx + cell) * hd;
        rotate = false;
    }
    float v[4][2], sum = 0.0f; /* head_dim <= 256 */
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t i = lane + 32 * j;
        v[j][0] = i < half ? x[i] : 0.0f;
        v[j][1] = i < half ? x[half + i] : 0.0f;
        sum = __fmaf_rn(v[j][0], v[j][0], sum);
        sum = __fmaf_rn(v[j][1], v[j][1], sum);
    }
    float r = 1.0f;
    if (weight)
        r = 1.0f / sqrtf(__fadd_rn(warp_sum(sum) / (float)hd, a.eps));
    const float *table = at<float>(a.table) + (uint64_t)t * hd;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t i = lane + 32 * j;
        if (i >= half)
            break;
        float p = v[j][0], q = v[j][1];
        if (weight) {
            p = __fmul_rn(__fmul_rn(p, r), weight[i]);
            q = __fmul_rn(__fmul_rn(q, r), weight[half + i]);
        }
        if (rotate) {
            float c = table[i], s = table[half + i], old = p;
            p = __fmaf_rn(p, c, -__fmul_rn(q, s));
            q = __fmaf_rn(q, c, __fmul_rn(old, s));
        }
        if (!rotate) {
            p = number(p);
            q = number(q);
        }
        y[i] = to_f16(p);
        y[half + i] = to_f16(q);
    }
}

KERNEL(, combine, krn_cu_combine_args)
{
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t quads = a.hidden / 4;
    const uint64_t t = i / quads;
    if (t >= a.tokens)
        return;
    const float *weights = at<float>(a.weights) + t * a.top_k;
    const float4 *out = at<float4>(a.out) + t * a.top_k * quads + i % quads;
    float4 sum = make_float4(0, 0, 0, 0);
    for (uint32_t s = 0; s < a.top_k; s++) {
        float w = weights[s];
        float4 o = out[(uint64_t)s * quads];
        sum = make_float4(__fmaf_rn(w, o.x, sum.x), __fmaf_rn(w, o.y, sum.y), __fmaf_rn(w, o.z, sum.z),
                          __fmaf_rn(w, o.w, sum.w));
    }
    float4 y = at<float4>(a.y)[i];
    at<float4>(a.y)[i] = make_float4(__fadd_rn(y.x, sum.x), __fadd_rn(y.y, sum.y), __fadd_rn(y.z, sum.z),
                                     __fadd_rn(y.w, sum.w));
}
