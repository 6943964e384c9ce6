/* SPDX-License-Identifier: MIT */
/*
 * Matrix-vector products for generated tokens: bound by reading the weights.
 * A warp takes four rows; lane l sums units of 64 weights l, l + 32, ... in
 * float32, then one tree. Where a block has a scale, it is applied to the sum
 * of eight products, not to each weight.
 */
#include "kernels/krn_cu_dequant.cuh"

#define GEMV_WARPS 4
#define GEMV_ROWS  4 /* of a warp */
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
    SHARED_DYNAMIC(float, v);
    for (uint32_t i = threadIdx.x * 8; i < div_up(cols, 64) * 64; i += blockDim.x * 8) {
        uint4 w = i < cols ? *(const uint4 *)(x + i) : make_uint4(0, 0, 0, 0);
        float *p = v + i + i / 64 * (UNIT - 64);
        *(float4 *)p = make_float4(f16_lo(w.x), f16_hi(w.x), f16_lo(w.y), f16_hi(w.y));
        *(float4 *)(p + 4) = make_float4(f16_lo(w.z), f16_hi(w.z), f16_lo(w.w), f16_hi(w.w));
    }
    __syncthreads();
}

struct rows {
    const uint8_t *row[GEMV_ROWS];
};

template <uint32_t TYPE> DEV float4 dot_rows(const rows &r, uint32_t cols)
{
    SHARED_DYNAMIC(float, v);
    float sum[GEMV_ROWS] = {0, 0, 0, 0};
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
#pragma unroll
        for (int i = 0; i < GEMV_ROWS; i++) {
            dot_sink dot = {x, sums, sum[i]};
            dequant64<dot_sink, 8>(TYPE, r.row[i], k, n, dot);
            sum[i] = dot.sum;
        }
    }
    return make_float4(warp_sum(sum[0]), warp_sum(sum[1]), warp_sum(sum[2]), warp_sum(sum[3]));
}

/* Four rows times the vector in shared memory; every lane gets all. */
static __device__ __noinline__ float4 dot4(uint32_t type, rows r, uint32_t cols)
{
#pragma unroll
    for (int i = 0; i < GEMV_ROWS; i++)
        __builtin_assume(__isGlobal(r.row[i]));
    switch (type) {
    case KRN_Q4_K:
        return dot_rows<KRN_Q4_K>(r, cols);
    case KRN_Q5_K:
        return dot_rows<KRN_Q5_K>(r, cols);
    case KRN_Q6_K:
        return dot_rows<KRN_Q6_K>(r, cols);
    case KRN_Q4_0:
        return dot_rows<KRN_Q4_0>(r, cols);
    case KRN_Q8_0:
        return dot_rows<KRN_Q8_0>(r, cols);
    case KRN_F16:
        return dot_rows<KRN_F16>(r, cols);
    case KRN_BF16:
        return dot_rows<KRN_BF16>(r, cols);
    default:
        return dot_rows<KRN_F32>(r, cols);
    }
}

/* Rows beyond the matrix: its last one, computed and not stored. */
DEV float4 dot_of(const krn_cu_matrix &m, const uint8_t *base, uint32_t row)
{
    rows r;
#pragma unroll
    for (uint32_t i = 0; i < GEMV_ROWS; i++)
        r.row[i] = base + m.data + (uint64_t)(row + i < m.rows ? row + i : m.rows - 1) * m.row_bytes;
    return dot4(m.type, r, m.cols);
}

DEV float pick(const float4 &v, uint32_t i)
{
    return i & 2 ? (i & 1 ? v.w : v.z) : i & 1 ? v.y : v.x;
}

DEV uint32_t first_row()
{
    return (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * GEMV_ROWS;
}

KERNEL(__launch_bounds__(GEMV_WARPS * 32, 3), gemv, krn_cu_gemv_args)
{
    const uint32_t token = blockIdx.y, lane = threadIdx.x % 32, row = first_row();
    load_vector(at<uint16_t>(a.x) + (uint64_t)token * a.m.cols, a.m.cols);
    if (row >= a.m.rows)
        return;
    const float4 sum = dot_of(a.m, nullptr, row);
    if (lane < GEMV_ROWS && row + lane < a.m.rows) {
        float *y = at<float>(a.y) + (uint64_t)token * a.m.rows + row + lane, s = pick(sum, lane);
        *y = a.add ? *y + s : s;
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

KERNEL(__launch_bounds__(GEMV_WARPS * 32, 3), gate_up_gemv, krn_cu_expert_args)
{
    krn_cu_job job;
    uint32_t position;
    if (!find_slot(a, job, position))
        return;
    load_vector(at<uint16_t>(a.x) + (uint64_t)(at<uint32_t>(a.slots)[position] / a.top_k) * a.a.cols, a.a.cols);
    const uint32_t row = first_row(), lane = threadIdx.x % 32;
    if (row >= a.a.rows)
        return;
    const uint8_t *blob = at<uint8_t>(job.blob);
    const float4 g = dot_of(a.a, blob, row), u = dot_of(a.b, blob, row);
    if (lane < GEMV_ROWS && row + lane < a.a.rows) {
        float p = pick(g, lane), q = pick(u, lane);
        at<uint16_t>(a.y)[(uint64_t)position * a.a.rows + row + lane] = to_f16(hidden_value(p, q));
    }
}

KERNEL(__launch_bounds__(GEMV_WARPS * 32, 3), down_gemv, krn_cu_expert_args)
{
    krn_cu_job job;
    uint32_t position;
    if (!find_slot(a, job, position))
        return;
    load_vector(at<uint16_t>(a.x) + (uint64_t)position * a.a.cols, a.a.cols);
    const uint32_t row = first_row(), lane = threadIdx.x % 32;
    if (row >= a.a.rows)
        return;
    const float4 sum = dot_of(a.a, at<uint8_t>(job.blob), row);
    if (lane < GEMV_ROWS && row + lane < a.a.rows)
        at<float>(a.y)[(uint64_t)at<uint32_t>(a.slots)[position] * a.a.rows + row + lane] = pick(sum, lane) * KRN_CU_HIDDEN_SCALE;
}
