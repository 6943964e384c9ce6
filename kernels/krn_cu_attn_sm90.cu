/* SPDX-License-Identifier: MIT */
/*
 * Causal attention of a prompt as krn_cu_attn.cu computes it, with Hopper's
 * warpgroup products (target sm_90a; its bits differ from the other file's).
 *
 * A block stays on its multiprocessor and takes work after work: 64 queries of
 * one head for each of its warpgroups but the first, of which one thread has
 * the copy engine bring queries, keys and values into shared memory, ahead of
 * the others. A step is 128 keys, at absolute multiples of 128 from key 0: one
 * block of the sequence in the KV memory. Its scores run on the tensor cores
 * beside the weighted values of the step before, and one warpgroup's
 * exponentials beside another's products. A sequence's last block is fetched as
 * a whole: rows behind its end have no weight and hold numbers (krn_cu_qkv).
 */
#include "kernels/krn_cu_sm90.cuh"

static_assert(KRN_CU_SM90_KEYS == KRN_CU_KV_BLOCK, "a step is a block of the KV memory");

#define KEYS     ((int)KRN_CU_SM90_KEYS)
#define STAGES   2
#define NEGATIVE __int_as_float(0xff800000)

/* Barriers in shared memory. full: a stage has its data; empty: all warps that read it are done. */
enum {
    FULL_Q = 0,
    FULL_K = 1,
    FULL_V = FULL_K + STAGES,
    EMPTY_Q = FULL_V + STAGES,
    EMPTY_K = EMPTY_Q + 1,
    EMPTY_V = EMPTY_K + STAGES,
    BARRIERS = EMPTY_V + STAGES
};

/* Shared memory: barriers, queries, keys, values; matrices as panels of 64 columns (matrix_view). */
template <int HD, int GROUPS> struct layout {
    static constexpr uint32_t TILE = KEYS * HD * 2, PANEL = KEYS * 128, QUERIES = 64 * GROUPS, Q = 1024,
                              Q_PANEL = QUERIES * 128, K = Q + QUERIES * HD * 2, V = K + STAGES * TILE;
};

/* Queries of one head and the key blocks to run them over. */
struct work {
    uint32_t head, q0, n_queries, blocks, begin, end; /* blocks: to the last query's key */
};

template <int QUERIES> DEV void describe(const krn_cu_attention_sm90_args &a, uint32_t item, work &w)
{
    w.head = item % a.heads;
    w.q0 = (div_up(a.tokens, QUERIES) - 1 - item / a.heads) * QUERIES; /* the longest first */
    w.n_queries = a.tokens - w.q0 < QUERIES ? a.tokens - w.q0 : QUERIES;
    w.blocks = w.end = div_up(a.position + w.q0 + w.n_queries, KEYS);
    w.begin = 0;
}

/* The item of the rest that has its key block `at`, counted from the rest's first; at becomes the item's own. */
template <int QUERIES> DEV uint32_t find_item(const krn_cu_attention_sm90_args &a, uint32_t &at, work &w)
{
    for (uint32_t item = a.whole;; item = (item / a.heads + 1) * a.heads) {
        describe<QUERIES>(a, item, w); /* all heads of these queries are alike */
        const uint32_t alike = (a.heads - w.head) * w.blocks;
        if (at < alike) {
            item += at / w.blocks;
            at %= w.blocks;
            return item;
        }
        at -= alike;
    }
}

/*
 * A block's work of a round. The first a.whole items go round the grid, to and fro. The rest, too few for
 * another round, is cut into equal pieces of a.rest key blocks in all: a block begins with the item that ends
 * its piece, whose later keys the next block runs at its end, from where this one left the sums. Who waits so
 * waits for an earlier block of the grid.
 */
template <int QUERIES> DEV bool take_work(const krn_cu_attention_sm90_args &a, uint32_t round, work &w)
{
    const uint32_t rounds = div_up(a.whole, gridDim.x);
    if (round < rounds) {
        const uint32_t i = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (i < a.whole)
            describe<QUERIES>(a, i, w);
        return i < a.whole;
    }
    uint32_t from = (uint32_t)((uint64_t)a.rest * blockIdx.x / gridDim.x), first_at = from;
    uint32_t to = (uint32_t)((uint64_t)a.rest * (blockIdx.x + 1) / gridDim.x), last_at = to - 1;
    if (from == to)
        return false;
    const uint32_t first = find_item<QUERIES>(a, first_at, w), last = find_item<QUERIES>(a, last_at, w);
    const uint32_t step = round - rounds;
    if (step > last - first)
        return false;
    describe<QUERIES>(a, step == 0 ? last : step == last - first ? first : first + step, w);
    if (step == 0)
        w.end = last_at + 1;
    if (step == last - first)
        w.begin = first_at;
    return true;
}

/* One thread's work: keys of a step before the values of the step before, as they are consumed. */
template <int HD, int GROUPS> DEV void produce(const krn_cu_attention_sm90_args &a, uint32_t base)
{
    using L = layout<HD, GROUPS>;
    work w = {};
    for (uint32_t round = 0, n = 0; take_work<L::QUERIES>(a, round, w); round++, n += w.end) {
        n -= w.begin; /* block + n: blocks before it, of this and earlier work */
        const uint32_t kv_head = w.head / (a.heads / a.kv_heads);
        auto fetch = [&](uint32_t block, uint32_t full, uint32_t empty, uint32_t place,
                         const krn_cu_tensor_map &map) {
            const uint32_t row = at<uint32_t>(a.blocks)[block] * KEYS;
            const uint32_t stage = (n + block) % STAGES, barrier = base + (full + stage) * 8;
            barrier_wait(base + (empty + stage) * 8, (n + block) / STAGES & 1 ^ 1);
            barrier_expect(barrier, L::TILE);
#pragma unroll
            for (int i = 0; i < HD / 64; i++)
                fetch_box(base + place + stage * L::TILE + i * L::PANEL, map, i * 64, row, kv_head, barrier);
        };
        barrier_wait(base + EMPTY_Q * 8, round & 1 ^ 1);
        barrier_expect(base + FULL_Q * 8, L::QUERIES * HD * 2);
#pragma unroll
        for (int i = 0; i < HD / 64; i++)
            fetch_box(base + L::Q + i * L::Q_PANEL, a.q_map, i * 64, w.head, w.q0, base + FULL_Q * 8);
        for (uint32_t block = w.begin; block <= w.end; block++) {
            if (block < w.end)
                fetch(block, FULL_K, EMPTY_K, L::K, a.k_map);
            if (block > w.begin)
                fetch(block - 1, FULL_V, EMPTY_V, L::V, a.v_map);
        }
    }
}

/* s becomes exp2((s - maximum) * scale); row_max and row_sum go on; returns what older sums shrink by. */
DEV void soften(float (&s)[KEYS / 2], float (&row_max)[2], float (&row_sum)[2], float (&shrink)[2],
                float scale)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top[2] = {row_max[h], s[2 * h]};
#pragma unroll
        for (int n = 0; n < KEYS / 2; n += 4) {
            top[0] = fmaxf(top[0], s[n + 2 * h]);
            top[1] = fmaxf(top[1], s[n + 2 * h + 1]);
        }
        top[0] = fmaxf(top[0], top[1]);
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], 1));
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], 2));
        shrink[h] = exp2_fast((row_max[h] - top[0]) * scale);
        row_max[h] = top[0];
        const float minus = -top[0] * scale;
        float sum[2] = {0.0f, 0.0f}; /* of this lane's keys; the four lanes of a row meet at the end */
#pragma unroll
        for (int n = 0; n < KEYS / 2; n += 4)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float e = exp2_fast(__fmaf_rn(s[n + 2 * h + i], scale, minus));
                s[n + 2 * h + i] = e;
                sum[i] = __fadd_rn(sum[i], e);
            }
        row_sum[h] = __fmaf_rn(row_sum[h], shrink[h], __fadd_rn(sum[0], sum[1]));
    }
}

/* Keys after the query get no weight. past: from the block's first key to this lane's first query. */
DEV void mask(float (&s)[KEYS / 2], int past)
{
    const int key = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        if (key + i / 4 * 8 + (i & 1) > past + (i & 2) * 4)
            s[i] = NEGATIVE;
}

template <int HD, int GROUPS> DEV void consume(const krn_cu_attention_sm90_args &a, uint32_t base)
{
    using L = layout<HD, GROUPS>;
    constexpr int THREADS = 128 * (GROUPS + 1);
    constexpr bool Q_HELD = GROUPS == 2; /* queries in registers: shared memory is read less */
    const uint32_t group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t first_row = group * 64, row = first_row + warp * 16 + lane / 4;
    const uint64_t q = matrix_view(base + L::Q + first_row * 128, L::Q_PANEL);
    float o[HD / 2], s[KEYS / 2], row_max[2], row_sum[2], shrink[2];
    uint32_t p[KEYS / 16][4], q_held[Q_HELD ? HD / 16 : 1][4];
    uint32_t n = 0; /* block + n: key blocks before it, of this and earlier work */
    work w = {};

    auto await = [&](uint32_t full, uint32_t block) {
        barrier_wait(base + (full + (n + block) % STAGES) * 8, (n + block) / STAGES & 1);
    };
    auto leave = [&](uint32_t empty) {
        if (lane == 0)
            barrier_arrive(base + empty * 8);
    };
    /* s = q * k' */
    auto score = [&](uint32_t block) {
        const uint64_t k = matrix_view(base + L::K + (n + block) % STAGES * L::TILE, L::PANEL);
        wg_begin();
#pragma unroll
        for (int i = 0; i < HD / 16; i++)
            if (Q_HELD)
                wg_product(s, q_held[Q_HELD ? i : 0], k + (i / 4 * L::PANEL + i % 4 * 32) / 16, i > 0);
            else
                wg_product(s, q + (i / 4 * L::Q_PANEL + i % 4 * 32) / 16,
                           k + (i / 4 * L::PANEL + i % 4 * 32) / 16, i > 0);
        wg_commit();
    };
    auto scored = [&](uint32_t block) {
        wg_pin(s);
        leave(EMPTY_K + (n + block) % STAGES);
        if (!Q_HELD && block + 1 == w.end)
            leave(EMPTY_Q);
    };
    /* o += p * v */
    auto weigh = [&](uint32_t block) {
        const uint64_t v = matrix_view(base + L::V + (n + block) % STAGES * L::TILE, L::PANEL);
        await(FULL_V, block);
        wg_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            wg_product(o, p[i], v + i * 16 * 128 / 16);
        wg_commit();
    };
    auto weighed = [&](uint32_t block) {
        wg_wait<0>();
        wg_pin(o);
        leave(EMPTY_V + (n + block) % STAGES);
    };
    auto soften_block = [&](uint32_t block) {
        if (block * KEYS + KEYS - 1 > a.position + w.q0 + first_row)
            mask(s, (int)(a.position + w.q0 + row) - (int)(block * KEYS));
        soften(s, row_max, row_sum, shrink, a.scale_log2);
        wg_pin(s);
    };
    auto pack = [&]() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
            p[i / 4][i % 4] = pack_f16(s[2 * i], s[2 * i + 1]);
    };

    auto shrink_sums = [&]() {
#pragma unroll
        for (int i = 0; i < HD / 2; i++)
            o[i] *= shrink[i >> 1 & 1];
    };
    /* A block's unfinished sums in global memory: a flag a warp, then each thread's floats. */
    auto flag_of = [&](uint32_t block) {
        return at<uint32_t>(a.sums + (uint64_t)block * KRN_CU_SUMS_BYTES) + threadIdx.x / 32;
    };
    auto sums_of = [&](uint32_t block) {
        return at<float>(a.sums + (uint64_t)block * KRN_CU_SUMS_BYTES) + 32 + threadIdx.x;
    };

    for (uint32_t round = 0; take_work<L::QUERIES>(a, round, w); round++, n += w.end) {
        n -= w.begin;
        if (w.begin == 0) {
#pragma unroll
            for (int i = 0; i < HD / 2; i++)
                o[i] = 0.0f;
            row_max[0] = row_max[1] = NEGATIVE;
            row_sum[0] = row_sum[1] = 0.0f;
        } else {
            flag_take(flag_of(blockIdx.x - 1));
            const float *sums = sums_of(blockIdx.x - 1);
#pragma unroll
            for (int i = 0; i < HD / 2; i++)
                o[i] = load_fresh(sums + i * THREADS);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row_max[h] = load_fresh(sums + (HD / 2 + h) * THREADS);
                row_sum[h] = load_fresh(sums + (HD / 2 + 2 + h) * THREADS);
            }
        }
        barrier_wait(base + FULL_Q * 8, round & 1);
        if (Q_HELD) {
#pragma unroll
            for (int i = 0; i < HD / 16; i++)
                load_matrix(q_held[Q_HELD ? i : 0],
                            base + L::Q + i / 4 * L::Q_PANEL + (first_row + warp * 16 + lane % 16) * 128 +
                                (((i % 4 * 2 + lane / 16) ^ lane % 8) << 4));
        }
        await(FULL_K, w.begin);
        score(w.begin);
        wg_wait<0>();
        scored(w.begin);
        /* Not before a product took them: an arrival does not wait for loads that were issued before it, which
         * may stand behind all stores of the last item's results while the copy engine brings the next queries. */
        if (Q_HELD)
            leave(EMPTY_Q);
        soften_block(w.begin);
        shrink_sums();
        pack();
        for (uint32_t block = w.begin + 1; block < w.end; block++) {
            if (block == w.begin + 1)
                await(FULL_K, block);
            score(block);
            weigh(block - 1);
            wg_wait<1>();
            scored(block);
            soften_block(block);
            /* The wait for the next keys stands here so that the compiler leaves the exponentials before it:
             * they are computed while the older products run. */
            if (block + 1 < w.end)
                await(FULL_K, block + 1);
            weighed(block - 1);
            wg_pin(s);
            shrink_sums();
            pack();
        }
        weigh(w.end - 1);
        weighed(w.end - 1);
        if (w.end < w.blocks) {
            float *sums = sums_of(blockIdx.x);
#pragma unroll
            for (int i = 0; i < HD / 2; i++)
                sums[i * THREADS] = o[i];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sums[(HD / 2 + h) * THREADS] = row_max[h];
                sums[(HD / 2 + 2 + h) * THREADS] = row_sum[h];
            }
            flag_raise(flag_of(blockIdx.x));
            continue;
        }

        uint32_t *y = at<uint32_t>(a.y);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = row_sum[h];
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
            const float scale = 1.0f / sum;
            if (row + h * 8 >= w.n_queries)
                continue;
            const uint64_t cell = ((uint64_t)(w.q0 + row + h * 8) * a.heads + w.head) * HD / 2 + lane % 4;
#pragma unroll
            for (int i = 0; i < HD / 8; i++)
                y[cell + i * 4] = pack_f16(o[4 * i + 2 * h] * scale, o[4 * i + 2 * h + 1] * scale);
        }
    }
}

template <int HD, int GROUPS> DEV void attention(const krn_cu_attention_sm90_args &a)
{
    SHARED_DYNAMIC(uint8_t, smem);
    const uint32_t base = (shared_address(smem) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < BARRIERS; i++)
            barrier_init(base + i * 8, i < EMPTY_Q ? 1 : 4 * GROUPS); /* warps */
        products_see();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<GROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == 0)
            produce<HD, GROUPS>(a, base);
    } else {
        registers_take<GROUPS == 2 ? 232 : 160>();
        consume<HD, GROUPS>(a, base);
    }
}

KERNEL(__launch_bounds__(384, 1), attention_128_sm90, krn_cu_attention_sm90_args)
{
    attention<128, 2>(a);
}
KERNEL(__launch_bounds__(512, 1), attention_64_sm90, krn_cu_attention_sm90_args)
{
    attention<64, 3>(a);
}
