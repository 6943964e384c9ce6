/* SPDX-License-Identifier: MIT */
/* Test mode: checksums (krn_cu_trace.h). */
#include "kernels/krn_cu_common.cuh"
#include "kernels/krn_cu_trace_args.h"

#define TRACE_THREADS 128

DEV uint64_t block_sum(uint64_t sum)
{
    __shared__ uint64_t part[TRACE_THREADS / 32];
#pragma unroll
    for (int d = 16; d; d >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < TRACE_THREADS / 32; i++)
        sum += part[i];
    return sum;
}

/* Grid: pieces of the columns, blocks that share the pieces of the rows. */
KERNEL(__launch_bounds__(TRACE_THREADS), trace_hash, krn_cu_trace_hash_args)
{
    const uint64_t col0 = a.words * blockIdx.x / KRN_CU_TRACE_PIECES, col1 = a.words * (blockIdx.x + 1) / KRN_CU_TRACE_PIECES;
    for (uint32_t piece = blockIdx.y; piece < KRN_CU_TRACE_PIECES; piece += gridDim.y) {
        const uint64_t row0 = a.rows * piece / KRN_CU_TRACE_PIECES, row1 = a.rows * (piece + 1) / KRN_CU_TRACE_PIECES;
        const uint64_t cols = col1 - col0, n = (row1 - row0) * cols;
        uint64_t sum = 0;
        if (!n)
            continue;
        for (uint64_t i = threadIdx.x; i < n; i += TRACE_THREADS) {
            const uint64_t row = row0 + i / cols, col = col0 + i % cols;
            sum += krn_cu_trace_mix(at<uint32_t>(a.data + row * a.stride)[col], row * a.words + col);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) {
            atomicAdd(&at<unsigned long long>(a.sums)[piece], (unsigned long long)sum);
            atomicAdd(&at<unsigned long long>(a.sums)[KRN_CU_TRACE_PIECES + blockIdx.x], (unsigned long long)sum);
        }
    }
}

DEV void note(const krn_cu_trace_slots_args &a, const krn_cu_trace_note &n)
{
    krn_cu_trace_report *r = at<krn_cu_trace_report>(a.report);
    const uint32_t i = atomicAdd(&r->notes, 1u);
    if (i < KRN_CU_TRACE_NOTES)
        r->note[i] = n;
}

/* Grid: experts, any number of blocks that share the slot's pieces. */
KERNEL(__launch_bounds__(TRACE_THREADS), trace_slots, krn_cu_trace_slots_args)
{
    const uint32_t e = blockIdx.x, entry = at<volatile uint32_t>(a.table)[e];
    const uint32_t group = entry >> 20 & 0x3ff, slot = entry & 0xfffff;
    krn_cu_trace_report *r = at<krn_cu_trace_report>(a.report);
    if (entry >> 30 != 2 || group < a.group || group >= a.group_end || slot >= a.ring_slots || !at<uint32_t>(a.counts)[e])
        return;
    if (threadIdx.x == 0 && blockIdx.y == 0 && !a.behind)
        atomicAdd(&r->seen, 1u);
    const uint32_t *words = at<uint32_t>(a.ring + slot * a.slot_bytes);
    for (uint32_t piece = blockIdx.y; piece < a.pieces; piece += gridDim.y) {
        const uint64_t first = (uint64_t)piece * (KRN_CU_TRACE_PIECE / 4);
        const uint64_t left = a.blob_bytes / 4 - first, n = left < KRN_CU_TRACE_PIECE / 4 ? left : KRN_CU_TRACE_PIECE / 4;
        uint64_t sum = 0;
        for (uint64_t i = threadIdx.x; i < n; i += TRACE_THREADS)
            sum += krn_cu_trace_mix(words[first + i], first + i);
        sum = block_sum(sum);
        if (threadIdx.x != 0)
            continue;
        atomicAdd(&r->checked, 1ull);
        if (sum != at<uint64_t>(a.want)[(uint64_t)e * a.want_pieces + piece]) {
            atomicAdd(&r->bad, 1ull);
            note(a, {a.layer, e, slot, piece, a.behind, a.chunk});
        }
    }
}

/* One thread. */
KERNEL(, trace_layer, krn_cu_trace_slots_args)
{
    krn_cu_trace_report *r = at<krn_cu_trace_report>(a.report);
    uint32_t want = 0;
    for (uint32_t e = 0; e < a.experts; e++)
        want += at<uint32_t>(a.counts)[e] && !(a.resident && at<uint64_t>(a.resident)[e]);
    if (r->seen != want)
        note(a, {a.layer, 0, r->seen, want, 2, a.chunk});
    r->seen = 0;
}
