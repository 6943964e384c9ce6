/* SPDX-License-Identifier: MIT */
/*
 * Router scores in float32, choice of experts, grouping of slots by expert,
 * publication of the routing set into host memory, and the plan of a group's
 * work. No order depends on timing: counts are sums of whole numbers, and a
 * slot's place is found by looking at the slots in order.
 */
#include "kernels/krn_cu_common.cuh"

#define SCORE_TOKENS  32
#define SCORE_EXPERTS 128
#define SCORE_K       32
#define SCORE_THREADS 256
#define SCORE_PART    256u /* a score is the sum, in order, of the chains over so many k */

/* 32 tokens x 128 experts a block; the next 32 k are loaded while these are multiplied. */
KERNEL(__launch_bounds__(SCORE_THREADS), scores, krn_cu_scores_args)
{
    __shared__ __align__(16) float xs[SCORE_K][SCORE_TOKENS + 4];
    __shared__ float ws[SCORE_K][SCORE_EXPERTS + 1];
    const uint32_t t0 = blockIdx.x * SCORE_TOKENS, e0 = blockIdx.y * SCORE_EXPERTS, tid = threadIdx.x;
    const uint32_t lane = tid % 32, ty = tid / 32; /* experts lane + 32 j, tokens 4 ty + i */
    const uint32_t r = tid / 8, c = tid % 8 * 4;   /* 8 threads load a row, 4 values each */
    const float *x = at<float>(a.x), *w = at<float>(a.w);
    float acc[4][4] = {}, total[4][4] = {};
    float4 next_x, next_w[4];
    auto load = [&](uint32_t k0) {
        const float4 zero = make_float4(0, 0, 0, 0);
        const uint32_t k = k0 + c;
        next_x = t0 + r < a.tokens && k < a.hidden ? *(const float4 *)(x + (uint64_t)(t0 + r) * a.hidden + k) : zero;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t row = e0 + r + 32 * i;
            next_w[i] = row < a.experts && k < a.hidden ? *(const float4 *)(w + (uint64_t)row * a.hidden + k) : zero;
        }
    };
    load(0);
    for (uint32_t k0 = 0; k0 < a.hidden; k0 += SCORE_K) {
        xs[c][r] = next_x.x;
        xs[c + 1][r] = next_x.y;
        xs[c + 2][r] = next_x.z;
        xs[c + 3][r] = next_x.w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ws[c][r + 32 * i] = next_w[i].x;
            ws[c + 1][r + 32 * i] = next_w[i].y;
            ws[c + 2][r + 32 * i] = next_w[i].z;
            ws[c + 3][r + 32 * i] = next_w[i].w;
        }
        __syncthreads();
        if (k0 + SCORE_K < a.hidden)
            load(k0 + SCORE_K);
#pragma unroll
        for (int k = 0; k < SCORE_K; k++) {
            float4 p = *(const float4 *)&xs[k][4 * ty];
            const float xv[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float q = ws[k][lane + 32 * j];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[i][j] = __fmaf_rn(xv[i], q, acc[i][j]);
            }
        }
        if ((k0 + SCORE_K) % SCORE_PART == 0 || k0 + SCORE_K >= a.hidden) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    total[i][j] = __fadd_rn(total[i][j], acc[i][j]);
                    acc[i][j] = 0.0f;
                }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t t = t0 + 4 * ty + i, e = e0 + lane + 32 * j;
            if (t < a.tokens && e < a.experts)
                at<float>(a.scores)[(uint64_t)t * a.experts + e] = total[i][j];
        }
}

/* The same sums for a few tokens: one token and 32 experts a block, a warp a part, a lane an expert. */
KERNEL(__launch_bounds__(SCORE_THREADS, 2), scores_few, krn_cu_scores_args)
{
    SHARED_DYNAMIC(float, parts); /* [parts][32] */
    const uint32_t t = blockIdx.x, lane = threadIdx.x % 32, e = blockIdx.y * 32 + lane;
    const uint32_t n_parts = div_up(a.hidden, SCORE_PART);
    const float4 *w = (const float4 *)(at<float>(a.w) + (uint64_t)(e < a.experts ? e : a.experts - 1) * a.hidden);
    const float4 *x = (const float4 *)(at<float>(a.x) + (uint64_t)t * a.hidden);
    for (uint32_t part = threadIdx.x / 32; part < n_parts; part += SCORE_THREADS / 32) {
        const uint32_t end = part + 1 < n_parts ? (part + 1) * (SCORE_PART / 4) : a.hidden / 4;
        float acc = 0.0f;
#pragma unroll 8
        for (uint32_t i = part * (SCORE_PART / 4); i < end; i++) {
            float4 p = x[i], q = w[i];
            acc = __fmaf_rn(p.x, q.x, acc);
            acc = __fmaf_rn(p.y, q.y, acc);
            acc = __fmaf_rn(p.z, q.z, acc);
            acc = __fmaf_rn(p.w, q.w, acc);
        }
        parts[part * 32 + lane] = acc;
    }
    __syncthreads();
    if (threadIdx.x >= 32 || e >= a.experts)
        return;
    float total = 0.0f;
    for (uint32_t part = 0; part < n_parts; part++)
        total = __fadd_rn(total, parts[part * 32 + lane]);
    at<float>(a.scores)[(uint64_t)t * a.experts + e] = total;
}

#define FLOAT_MAX 3.402823466e38f

/* A warp a token; lane l holds experts l, l + 32, ... Chosen by score, so equal probabilities never hide an order. */
template <int EACH> DEV void select(const krn_cu_select_args &a)
{
    const uint32_t t = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (t >= a.tokens)
        return;
    const float *scores = at<float>(a.scores) + (uint64_t)t * a.experts;
    float s[EACH], top = -FLOAT_MAX, total = 0.0f;
    uint32_t taken = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        uint32_t e = lane + 32 * j;
        float x = e < a.experts ? scores[e] : -FLOAT_MAX;
        x = x > -FLOAT_MAX ? x : -FLOAT_MAX; /* NaN too */
        s[j] = x < FLOAT_MAX ? x : FLOAT_MAX;
        top = fmaxf(top, s[j]);
        if (e >= a.experts)
            taken |= 1u << j;
    }
    top = warp_max(top);
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (lane + 32 * j < a.experts)
            total = __fadd_rn(total, expf(s[j] - top));
    total = warp_sum(total);
    float chosen = 0.0f;
    uint32_t *ids = at<uint32_t>(a.ids) + (uint64_t)t * a.top_k;
    float *weights = at<float>(a.weights) + (uint64_t)t * a.top_k;
    for (uint32_t i = 0; i < a.top_k; i++) {
        float best = 0.0f;
        uint32_t id = 0xffffffffu;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (!(taken >> j & 1) && (id == 0xffffffffu || s[j] > best)) {
                best = s[j];
                id = lane + 32 * j;
            }
#pragma unroll
        for (int d = 16; d; d >>= 1) {
            float other = __shfl_xor_sync(0xffffffffu, best, d);
            uint32_t other_id = __shfl_xor_sync(0xffffffffu, id, d);
            if (other_id != 0xffffffffu &&
                (id == 0xffffffffu || other > best || (other == best && other_id < id))) {
                best = other;
                id = other_id;
            }
        }
        if (id % 32 == lane)
            taken |= 1u << (id / 32);
        float p = expf(best - top) / total;
        chosen = __fadd_rn(chosen, p);
        if (lane == 0) {
            ids[i] = id;
            weights[i] = p;
        }
    }
    if (a.renorm) {
        __syncwarp();
        for (uint32_t i = lane; i < a.top_k; i += 32)
            weights[i] = weights[i] / chosen;
    }
}

KERNEL(, select_128, krn_cu_select_args)
{
    select<4>(a);
}
KERNEL(, select_1024, krn_cu_select_args)
{
    select<32>(a);
}

/* hist[block][e] = slots of the block's piece that chose e. blockDim.x >= experts. */
KERNEL(, count, krn_cu_count_args)
{
    SHARED_DYNAMIC(uint32_t, count);
    for (uint32_t e = threadIdx.x; e < a.experts; e += blockDim.x)
        count[e] = 0;
    __syncthreads();
    const uint32_t first = blockIdx.x * KRN_CU_GROUP_SLOTS;
    for (uint32_t i = threadIdx.x; i < KRN_CU_GROUP_SLOTS && first + i < a.slots; i += blockDim.x)
        atomicAdd(&count[at<uint32_t>(a.ids)[first + i]], 1u); /* whole numbers: any order gives the same */
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < a.experts; e += blockDim.x)
        at<uint32_t>(a.hist)[(uint64_t)blockIdx.x * a.experts + e] = count[e];
}

#define FINISH_THREADS 1024

/* Exclusive prefix sum over the block's threads; *total gets the sum. */
DEV uint32_t block_scan(uint32_t x, uint32_t *scratch, uint32_t *total)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = x;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        uint32_t other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= (uint32_t)d)
            sum += other;
    }
    if (lane == 31)
        scratch[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        uint32_t v = lane < blockDim.x / 32 ? scratch[lane] : 0, s = v;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            uint32_t other = __shfl_up_sync(0xffffffffu, s, d);
            if (lane >= (uint32_t)d)
                s += other;
        }
        scratch[lane] = s - v;
        if (lane == 31)
            scratch[32] = s;
    }
    __syncthreads();
    uint32_t result = scratch[warp] + sum - x;
    *total = scratch[32];
    __syncthreads();
    return result;
}

/* One block: totals, offsets, each block's first places, and the publication. */
KERNEL(__launch_bounds__(FINISH_THREADS), finish, krn_cu_finish_args)
{
    __shared__ uint32_t scratch[33];
    const uint32_t e = threadIdx.x;
    const bool mine = e < a.experts;
    uint32_t *hist = at<uint32_t>(a.hist), count = 0, total;
    if (mine)
        for (uint32_t b = 0; b < a.blocks; b++)
            count += hist[(uint64_t)b * a.experts + e];

    const krn_cu_publication &p = a.publication;
    if (p.seq) { /* first of all: expertd is waiting */
        if (mine) {
            at<volatile uint32_t>(p.tokens)[e] = count;
            if (p.predicted && a.predicted_hist) {
                uint32_t expected = 0;
                for (uint32_t b = 0; b < a.blocks; b++)
                    expected += at<uint32_t>(a.predicted_hist)[(uint64_t)b * a.experts + e];
                at<volatile uint32_t>(p.predicted)[e] = expected;
            }
        }
        uint32_t bits = __ballot_sync(0xffffffffu, mine && count != 0);
        if (e % 32 == 0) /* all words of the mask, also those of experts that do not exist */
            at<volatile uint32_t>(p.mask)[e / 32] = bits;
        __threadfence_system();
        __syncthreads();
        if (e == 0) {
            *at<volatile uint64_t>(p.published_ns) = device_clock_ns() + (uint64_t)p.clock_offset_ns;
            __threadfence_system();
            *at<volatile uint64_t>(p.seq) = p.value;
        }
    }
    uint32_t offset = block_scan(count, scratch, &total);
    if (mine) {
        at<uint32_t>(a.counts)[e] = count;
        at<uint32_t>(a.offsets)[e] = offset;
        for (uint32_t b = 0; b < a.blocks; b++) {
            uint32_t n = hist[(uint64_t)b * a.experts + e];
            hist[(uint64_t)b * a.experts + e] = offset;
            offset += n;
        }
    }
    if (e == 0)
        at<uint32_t>(a.offsets)[a.experts] = total;
}

/* A thread an expert: looks at the block's slots in order and takes its own. */
KERNEL(, place, krn_cu_place_args)
{
    __shared__ __align__(16) uint32_t ids[KRN_CU_GROUP_SLOTS];
    const uint32_t first = blockIdx.x * KRN_CU_GROUP_SLOTS;
    for (uint32_t i = threadIdx.x; i < KRN_CU_GROUP_SLOTS; i += blockDim.x)
        ids[i] = first + i < a.n_slots ? at<uint32_t>(a.ids)[first + i] : 0xffffffffu;
    __syncthreads();
    const uint32_t e = threadIdx.x;
    if (e >= a.experts)
        return;
    uint32_t *slots = at<uint32_t>(a.slots) + at<uint32_t>(a.hist)[(uint64_t)blockIdx.x * a.experts + e];
    for (uint32_t i = 0; i < KRN_CU_GROUP_SLOTS; i += 4) {
        uint4 v = *(const uint4 *)&ids[i];
        if (v.x == e)
            *slots++ = first + i;
        if (v.y == e)
            *slots++ = first + i + 1;
        if (v.z == e)
            *slots++ = first + i + 2;
        if (v.w == e)
            *slots++ = first + i + 3;
    }
}

/* One block, a thread an expert: which experts of the group have tokens and where their bytes are. The table
 * row is in host memory that expertd wrote before it signalled the group; slots are checked all the same. */
KERNEL(__launch_bounds__(FINISH_THREADS), plan, krn_cu_plan_args)
{
    __shared__ uint32_t scratch[33];
    const uint32_t e = threadIdx.x;
    uint32_t count = e < a.experts ? at<uint32_t>(a.counts)[e] : 0, jobs, tiles;
    uint64_t blob = 0;
    if (e < a.experts && a.resident)
        blob = at<uint64_t>(a.resident)[e];
    if (a.table) {
        bool resident = blob != 0;
        blob = 0;
        if (count && !resident) {
            uint32_t entry = at<volatile uint32_t>(a.table)[e]; /* shm_entry_make */
            uint32_t group = entry >> 20 & 0x3ff, slot = entry & 0xfffff;
            if (entry >> 30 == 2 && group >= a.group && group < a.group_end && slot < a.ring_slots)
                blob = a.ring + slot * a.slot_bytes;
        }
    }
    if (!blob)
        count = 0;
    if (count && a.ran)
        atomicAdd(at<uint32_t>(a.ran), count);
    uint32_t job = block_scan(count ? 1 : 0, scratch, &jobs);
    uint32_t n_tiles = div_up(count, a.tile_tokens), tile = block_scan(n_tiles, scratch, &tiles);
    if (count)
        at<krn_cu_job>(a.jobs)[job] = {blob, at<uint32_t>(a.offsets)[e], count};
    for (uint32_t i = 0; i < n_tiles; i++)
        at<uint32_t>(a.tiles)[tile + i] = job << 16 | i;
    if (e == 0)
        *at<krn_cu_plan_head>(a.head) = {jobs, tiles, {0, 0}};
}
