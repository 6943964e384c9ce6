/* SPDX-License-Identifier: MIT */
/*
 * Router of generated tokens in one kernel: norm, scores in float32, choice,
 * of a single one publication, and where the residents among the chosen are.
 * Of each token's blocks the one that ends last does what comes after the
 * scores; which one that is shows nowhere.
 */
#include "kernels/krn_cu_vector.cuh"

#define FLOAT_MAX 3.402823466e38f
#define WARPS     (GEMV_THREADS / 32)
#define EACH      KRN_CU_ROUTER_EACH /* experts of a block, two warps an expert */
#define AHEAD     8                  /* quads of a lane that are fetched before the vector exists */

struct shared_router {
    float score[KRN_CU_EXPERTS_MAX];
    float part[WARPS], chosen[KRN_CU_TOP_K_MAX];
    uint32_t id[KRN_CU_TOP_K_MAX];
    uint32_t last;
};

/* All blocks but the one that comes last get false. What they stored is visible to it. */
DEV bool comes_last(uint32_t *counter, uint32_t blocks, uint32_t *flag)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *flag = atomicAdd(counter, 1u) == blocks - 1;
        if (*flag)
            *counter = 0; /* for the next launch */
        __threadfence();
    }
    __syncthreads();
    return *flag;
}

DEV void publish(const krn_cu_token_router_args &a, const shared_router &s)
{
    const krn_cu_publication &p = a.publication;
    const uint32_t *predicted = at<uint32_t>(a.predicted_ids);
    for (uint32_t e = threadIdx.x; e < KRN_CU_EXPERTS_MAX; e += GEMV_THREADS) {
        bool routed = false, expected = false;
        for (uint32_t i = 0; i < a.top_k; i++)
            routed |= s.id[i] == e;
        for (uint32_t i = 0; predicted && i < a.top_k; i++)
            expected |= load_fresh(predicted + i) == e;
        if (e < a.experts) {
            at<volatile uint32_t>(p.tokens)[e] = routed;
            if (p.predicted && predicted)
                at<volatile uint32_t>(p.predicted)[e] = expected;
        }
        const uint32_t bits = __ballot_sync(0xffffffffu, routed);
        if (e % 32 == 0) /* all words of the mask, also those of experts that do not exist */
            at<volatile uint32_t>(p.mask)[e / 32] = bits;
    }
    if (threadIdx.x == 0)
        *at<volatile uint64_t>(p.published_ns) = device_clock_ns() + (uint64_t)p.clock_offset_ns;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0)
        *at<volatile uint64_t>(p.seq) = p.value;
}

KERNEL(__launch_bounds__(GEMV_THREADS), token_router, krn_cu_token_router_args)
{
    SHARED_DYNAMIC(uint8_t, shared);
    __shared__ __align__(16) shared_router s;
    const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32, experts = a.experts, token = blockIdx.y;
    float *const scores = at<float>(a.scores) + (uint64_t)token * experts;
    const uint32_t quads = a.x.cols / 4, half = quads / 2, first = warp % 2 * half;
    const uint32_t mine = blockIdx.x * EACH + warp / 2, row = mine < experts ? mine : experts - 1;
    const float4 *w = (const float4 *)(at<float>(a.w) + (uint64_t)row * a.x.cols) + first;
    float4 ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        ahead[i] = lane + 32 * i < half ? w[lane + 32 * i] : make_float4(0, 0, 0, 0);
    x_load_norm(
        shared, a.x, at<float>(a.x.x) + (uint64_t)token * a.x.cols, [] { grid_turn(); }, [] {});
    const x_view v = x_of(shared, a.x);
    float sum = 0.0f;
    auto add = [&](uint32_t k, const float4 &q) {
        const uint32_t t = first + k;
        const float4 p = *(const float4 *)(v.base + v.floats + (t % 2 * v.units * 8 + t / 2) * 16);
        sum = __fmaf_rn(p.x, q.x, sum);
        sum = __fmaf_rn(p.y, q.y, sum);
        sum = __fmaf_rn(p.z, q.z, sum);
        sum = __fmaf_rn(p.w, q.w, sum);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (lane + 32 * i < half)
            add(lane + 32 * i, ahead[i]);
    for (uint32_t k = lane + 32 * AHEAD; k < half; k += 32)
        add(k, w[k]);
    sum = warp_sum(sum);
    if (lane == 0)
        s.part[warp] = sum;
    __syncthreads();
    if (tid < EACH && blockIdx.x * EACH + tid < experts)
        scores[blockIdx.x * EACH + tid] = __fadd_rn(s.part[2 * tid], s.part[2 * tid + 1]);
    if (!comes_last(at<uint32_t>(a.counter) + token, gridDim.x, &s.last))
        return;

    /* Chosen by score, so equal probabilities never hide an order: an expert's place is the number of those
     * before it. */
    const uint32_t padded = div_up(experts, 4) * 4;
    for (uint32_t e = tid; e < padded; e += GEMV_THREADS) {
        float x = -INFINITY;
        if (e < experts) {
            x = load_fresh(scores + e);
            x = x > -FLOAT_MAX ? x : -FLOAT_MAX; /* NaN too */
            x = x < FLOAT_MAX ? x : FLOAT_MAX;
        }
        s.score[e] = x;
    }
    __syncthreads();
    for (uint32_t e = tid; e < experts; e += GEMV_THREADS) {
        const float x = s.score[e];
        uint32_t place = 0;
        for (uint32_t j = 0; j < padded; j += 4) {
            const float4 y = *(const float4 *)&s.score[j];
            place += y.x > x || (y.x == x && j < e);
            place += y.y > x || (y.y == x && j + 1 < e);
            place += y.z > x || (y.z == x && j + 2 < e);
            place += y.w > x || (y.w == x && j + 3 < e);
        }
        if (place < a.top_k)
            s.id[place] = e;
    }
    __syncthreads();
    if (a.publication.seq) /* first of all: expertd is waiting */
        publish(a, s);
    if (tid < a.top_k) {
        at<uint32_t>(a.ids)[token * a.top_k + tid] = s.id[tid];
        const uint64_t blob = a.resident ? at<uint64_t>(a.resident)[s.id[tid]] : 0;
        at<uint64_t>(a.blobs)[token * a.top_k + tid] = blob;
        if (blob && a.ran)
            atomicAdd(at<uint32_t>(a.ran), 1u);
    }
    const float top = s.score[s.id[0]];
    float total = 0.0f;
    for (uint32_t e = tid; e < experts; e += GEMV_THREADS)
        total = __fadd_rn(total, expf(s.score[e] - top));
    total = warp_sum(total);
    if (lane == 0)
        s.part[warp] = total;
    __syncthreads();
    total = s.part[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++)
        total = __fadd_rn(total, s.part[i]);
    float p = 0.0f, chosen = 0.0f;
    if (tid < a.top_k)
        s.chosen[tid] = p = expf(s.score[s.id[tid]] - top) / total;
    __syncthreads();
    for (uint32_t i = 0; i < a.top_k; i++)
        chosen = __fadd_rn(chosen, s.chosen[i]);
    if (tid < a.top_k)
        at<float>(a.weights)[token * a.top_k + tid] = a.renorm ? p / chosen : p;
}

/* Where the bytes of the chosen experts are; 0 where they are not to be run now. The table row is in host
 * memory that expertd wrote before it signalled the groups; slots are checked all the same. */
KERNEL(, token_locate, krn_cu_locate_args)
{
    for (uint32_t i = threadIdx.x; i < a.slots; i += blockDim.x) {
        const uint32_t e = at<uint32_t>(a.ids)[i];
        const uint64_t resident = a.resident ? at<uint64_t>(a.resident)[e] : 0;
        uint64_t blob = a.table && !a.all ? 0 : resident;
        if (a.table && !resident) {
            const uint32_t entry = at<volatile uint32_t>(a.table)[e]; /* shm_entry_make */
            const uint32_t group = entry >> 20 & 0x3ff, slot = entry & 0xfffff;
            if (entry >> 30 == 2 && group >= a.group && group < a.group_end && slot < a.ring_slots) {
                blob = a.ring + slot * a.slot_bytes;
                if (a.ran)
                    atomicAdd(at<uint32_t>(a.ran), 1u);
            }
        }
        at<uint64_t>(a.blobs)[i] = blob;
    }
}
