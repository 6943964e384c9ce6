/* SPDX-License-Identifier: MIT */
/*
 * Matrix-vector products for generated tokens: bound by reading the weights.
 * A warp takes two rows; lane l sums units of 64 weights l, l + 32, ... in
 * float32, then one tree. Where a block has a scale, it is applied to the sum
 * of eight products, not to each weight.
 */
#include "kernels/krn_cu_dequant.cuh"

#define GEMV_WARPS 4
#define GEMV_ROWS  4 /* of a warp, two at a time */
#define UNIT       68 /* floats of a unit in shared memory: 64 and 4 of padding */

struct dot_sink {
    static constexpr bool RAW = true;
    const float (&x)[64];
    const float (&sums)[8]; /* of eight x */
    float sum;
    __device__ __forceinline__ float eight(int c, const float (&f)[8]) const
    {
        float t = __fmul_rn(f[0], x[8 * c]);
#pragma unroll
        for (int i = 1; i < 8; i++)
            t = __fmaf_rn(f[i], x[8 * c + i], t);
        return t;
    }
    __device__ __forceinline__ void units(int c, const float (&f)[8], float s, float m)
    {
        sum = __fmaf_rn(s, eight(c, f), __fmaf_rn(m, sums[c], sum));
    }
    __device__ __forceinline__ void operator()(int c, const float (&f)[8])
    {
        sum = __fadd_rn(sum, eight(c, f));
    }
};

/* The token's vector as floats in shared memory, zeros up to a multiple of 64. */
DEV void load_vector(const uint16_t *x, uint32_t cols)
{
    extern __shared__ __align__(16) float v[];
    for (uint32_t i = threadIdx.x * 8; i < div_up(cols, 64) * 64; i += blockDim.x * 8) {
        uint4 w = i < cols ? *(const uint4 *)(x + i) : make_uint4(0, 0, 0, 0);
        float *p = v + i + i / 64 * (UNIT - 64);
        *(float4 *)p = make_float4(bf16_lo(w.x), bf16_hi(w.x), bf16_lo(w.y), bf16_hi(w.y));
        *(float4 *)(p + 4) = make_float4(bf16_lo(w.z), bf16_hi(w.z), bf16_lo(w.w), bf16_hi(w.w));
    }
    __syncthreads();
}

template <uint32_t TYPE> DEV float2 dot_rows(const uint8_t *row0, const uint8_t *row1, uint32_t cols)
{
    extern __shared__ __align__(16) float v[];
    float2 sum = make_float2(0, 0);
    for (uint32_t k = threadIdx.x % 32 * 64; k < cols; k += 2048) {
        float x[64], sums[8];
        const float4 *p = (const float4 *)(v + k / 64 * UNIT);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float4 q = p[i];
            x[4 * i] = q.x;
            x[4 * i + 1] = q.y;
            x[4 * i + 2] = q.z;
            x[4 * i + 3] = q.w;
        }
#pragma unroll
        for (int c = 0; c < 8; c++) {
            sums[c] = x[8 * c];
#pragma unroll
            for (int i = 1; i < 8; i++)
                sums[c] = __fadd_rn(sums[c], x[8 * c + i]);
        }
        const uint32_t n = cols - k < 64 ? cols - k : 64;
        dot_sink a = {x, sums, sum.x}, b = {x, sums, sum.y};
        dequant64<dot_sink, 8>(TYPE, row0, k, n, a);
        dequant64<dot_sink, 8>(TYPE, row1, k, n, b);
        sum = make_float2(a.sum, b.sum);
    }
    return make_float2(warp_sum(sum.x), warp_sum(sum.y));
}

/* Two rows times the vector in shared memory; every lane gets both. */
static __device__ __noinline__ float2 dot2(uint32_t type, const uint8_t *row0, const uint8_t *row1, uint32_t cols)
{
    __builtin_assume(__isGlobal(row0));
    __builtin_assume(__isGlobal(row1));
    switch (type) {
    case KRN_Q4_K:
        return dot_rows<KRN_Q4_K>(row0, row1, cols);
    case KRN_Q5_K:
        return dot_rows<KRN_Q5_K>(row0, row1, cols);
    case KRN_Q6_K:
        return dot_rows<KRN_Q6_K>(row0, row1, cols);
    case KRN_Q4_0:
        return dot_rows<KRN_Q4_0>(row0, row1, cols);
    case KRN_Q8_0:
        return dot_rows<KRN_Q8_0>(row0, row1, cols);
    case KRN_F16:
        return dot_rows<KRN_F16>(row0, row1, cols);
    case KRN_BF16:
        return dot_rows<KRN_BF16>(row0, row1, cols);
    default:
        return dot_rows<KRN_F32>(row0, row1, cols);
    }
}

DEV const uint8_t *row_of(const krn_cu_matrix &m, const uint8_t *base, uint32_t row)
{
    return base + m.data + (uint64_t)(row < m.rows ? row : m.rows - 1) * m.row_bytes;
}

KERNEL void __launch_bounds__(GEMV_WARPS * 32, 4) krn_cu_gemv(const __grid_constant__ krn_cu_gemv_args a)
{
    const uint32_t token = blockIdx.y, lane = threadIdx.x % 32;
    load_vector(at<uint16_t>(a.x) + (uint64_t)token * a.m.cols, a.m.cols);
#pragma unroll 1
    for (uint32_t i = 0; i < GEMV_ROWS; i += 2) {
        uint32_t row = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * GEMV_ROWS + i;
        if (row >= a.m.rows)
            return;
        float2 sum = dot2(a.m.type, row_of(a.m, nullptr, row), row_of(a.m, nullptr, row + 1), a.m.cols);
        if (lane < 2 && row + lane < a.m.rows) {
            float *y = at<float>(a.y) + (uint64_t)token * a.m.rows + row + lane, s = lane ? sum.y : sum.x;
            *y = a.add ? *y + s : s;
        }
    }
}

/* The same for experts, a tile of the plan (made with tiles of one token) a block row. */
DEV bool find_slot(const krn_cu_expert_args &a, krn_cu_job &job, uint32_t &position)
{
    if (blockIdx.y >= at<krn_cu_plan_head>(a.head)->tiles)
        return false;
    const uint32_t which = at<uint32_t>(a.tiles)[blockIdx.y];
    job = at<krn_cu_job>(a.jobs)[which >> 16];
    position = job.first + (which & 0xffff);
    return true;
}

KERNEL void __launch_bounds__(GEMV_WARPS * 32, 4) krn_cu_gate_up_gemv(const __grid_constant__ krn_cu_expert_args a)
{
    krn_cu_job job;
    uint32_t position;
    if (!find_slot(a, job, position))
        return;
    load_vector(at<uint16_t>(a.x) + (uint64_t)(at<uint32_t>(a.slots)[position] / a.top_k) * a.a.cols, a.a.cols);
    const uint32_t row = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * 2, lane = threadIdx.x % 32;
    if (row >= a.a.rows)
        return;
    const uint8_t *blob = at<uint8_t>(job.blob);
    float2 g = dot2(a.a.type, row_of(a.a, blob, row), row_of(a.a, blob, row + 1), a.a.cols);
    float2 u = dot2(a.b.type, row_of(a.b, blob, row), row_of(a.b, blob, row + 1), a.b.cols);
    if (lane < 2 && row + lane < a.a.rows) {
        float p = lane ? g.y : g.x, q = lane ? u.y : u.x;
        at<uint16_t>(a.y)[(uint64_t)position * a.a.rows + row + lane] = to_bf16(p / (1.0f + expf(-p)) * q);
    }
}

KERNEL void __launch_bounds__(GEMV_WARPS * 32, 4) krn_cu_down_gemv(const __grid_constant__ krn_cu_expert_args a)
{
    krn_cu_job job;
    uint32_t position;
    if (!find_slot(a, job, position))
        return;
    load_vector(at<uint16_t>(a.x) + (uint64_t)position * a.a.cols, a.a.cols);
    const uint32_t row = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * 2, lane = threadIdx.x % 32;
    if (row >= a.a.rows)
        return;
    const uint8_t *blob = at<uint8_t>(job.blob);
    float2 sum = dot2(a.a.type, row_of(a.a, blob, row), row_of(a.a, blob, row + 1), a.a.cols);
    if (lane < 2 && row + lane < a.a.rows)
        at<float>(a.y)[(uint64_t)at<uint32_t>(a.slots)[position] * a.a.rows + row + lane] = lane ? sum.y : sum.x;
}
