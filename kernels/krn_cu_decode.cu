/* SPDX-License-Identifier: MIT */
/*
 * Causal attention of generated tokens, each of a sequence of its own or at a
 * position of its own, over an f16 KV cache, k and v [kv_heads][ctx][head_dim],
 * in which a sequence's keys lie in blocks of KRN_CU_KV_BLOCK. Keys come in
 * parts of 256, of more where that would be more blocks than a GPU takes at a
 * time. A block takes a part of one KV head for up to 16 query heads; each of
 * its warps takes every eighth tile of 16 keys, so that they are in one block
 * of the KV memory at a time, brings keys and values into its own stages and
 * keeps maximum, total and sums for itself; they meet once, in the order of
 * warps. Then parts are joined: a few by the block that ends last, many by a
 * kernel of their own.
 *
 * Given projections instead of q, the kernel norms and rotates them on the way
 * and writes the cache's newest row, which no block reads back from there.
 */
#include "kernels/krn_cu_common.cuh"

#define THREADS  256
#define WARPS    8
#define HEADS    ((int)KRN_CU_SPLIT_HEADS)
#define TILE     16 /* keys */
#define NEGATIVE __int_as_float(0xff800000)

static_assert(TILE * WARPS == KRN_CU_KV_BLOCK, "the warps' tiles are one block of the KV memory");

/* Rows of HD f16, pieces swizzled. */
template <int HD> DEV uint32_t row_piece(uint32_t row, uint32_t piece)
{
    return row * (HD * 2) + ((piece ^ (row & 7)) << 4);
}

template <int HD> DEV void fetch_tile(uint32_t target, const uint8_t *source, uint32_t valid)
{
#pragma unroll
    for (int i = threadIdx.x % 32; i < TILE * HD / 8; i += 32) {
        uint32_t r = i / (HD / 8), p = i % (HD / 8);
        copy_async(target + row_piece<HD>(r, p), source + (r < valid ? r : 0) * (HD * 2) + p * 16, r < valid);
    }
}

/* A head's weights and angles in a warp's registers: lane l has i = l, l + 32, ... and i + HD / 2. */
template <int HD> struct half_head {
    float x[HD / 64][2];

    __device__ __forceinline__ void load(const float *p)
    {
#pragma unroll
        for (int j = 0; j < HD / 64; j++) {
            x[j][0] = p ? p[threadIdx.x % 32 + 32 * j] : 1.0f;
            x[j][1] = p ? p[HD / 2 + threadIdx.x % 32 + 32 * j] : 1.0f;
        }
    }
};

/* A head's projection, normed and rotated as in krn_dev_qkv: store(d, x) gets it as f16. A warp. */
template <int HD, class Store>
DEV void head_of(const float *x, bool normed, const half_head<HD> &weight, float eps, const half_head<HD> &turn,
                 bool rotate, Store store)
{
    constexpr int HALF = HD / 2, N = HALF / 32;
    const uint32_t lane = threadIdx.x % 32;
    float v[N][2], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) {
        v[j][0] = load_fresh(x + lane + 32 * j);
        v[j][1] = load_fresh(x + HALF + lane + 32 * j);
        sum = __fmaf_rn(v[j][0], v[j][0], sum);
        sum = __fmaf_rn(v[j][1], v[j][1], sum);
    }
    float r = 1.0f;
    if (normed)
        r = 1.0f / sqrtf(__fadd_rn(warp_sum(sum) / (float)HD, eps));
#pragma unroll
    for (int j = 0; j < N; j++) {
        const uint32_t i = lane + 32 * j;
        float p = v[j][0], q = v[j][1];
        if (normed) {
            p = __fmul_rn(__fmul_rn(p, r), weight.x[j][0]);
            q = __fmul_rn(__fmul_rn(q, r), weight.x[j][1]);
        }
        if (rotate) {
            float c = turn.x[j][0], s = turn.x[j][1], old = p;
            p = __fmaf_rn(p, c, -__fmul_rn(q, s));
            q = __fmaf_rn(q, c, __fmul_rn(old, s));
        } else {
            p = number(p);
            q = number(q);
        }
        store(i, to_f16(p));
        store(HALF + i, to_f16(q));
    }
}

/* Keys of a part, by the token's keys alone: krn_cu_token.c has the same. */
DEV uint32_t part_keys(uint32_t keys, uint32_t blocks)
{
    uint32_t n = KRN_CU_SPLIT_KEYS;
    while (div_up(keys, n) * blocks > max(KRN_CU_SPLIT_BLOCKS, blocks))
        n *= 2;
    return n;
}

/* Floats of a part: head_dim sums, then maximum (of scaled scores), total and two of padding. */
template <int HD> DEV uint64_t part_row(const krn_cu_decode_args &a, uint32_t token, uint32_t head, uint32_t part)
{
    return (((uint64_t)token * a.heads + head) * a.parts + part) * (HD + 4);
}

DEV void add_scaled(float4 &o, const float4 &x, float s)
{
    o = make_float4(__fmaf_rn(x.x, s, o.x), __fmaf_rn(x.y, s, o.y), __fmaf_rn(x.z, s, o.z), __fmaf_rn(x.w, s, o.w));
}

DEV uint2 pack4(const float4 &o, float scale)
{
    return make_uint2(pack_f16(o.x * scale, o.y * scale), pack_f16(o.z * scale, o.w * scale));
}

/* A few parts by one block, in the order of the kernel below: sets p, p + 8, then the sets. */
#define JOIN_SETS 8

template <int HD>
DEV void join_few(const krn_cu_decode_args &a, uint32_t token, uint32_t head0, uint32_t n_heads, uint32_t parts)
{
    for (uint32_t i = threadIdx.x; i < n_heads * (HD / 4); i += THREADS) {
        const uint32_t head = head0 + i / (HD / 4), quad = i % (HD / 4);
        const float *row = at<float>(a.part) + part_row<HD>(a, token, head, 0);
        float2 end[KRN_CU_JOIN_FEW];
        float4 x[KRN_CU_JOIN_FEW], o = make_float4(0, 0, 0, 0);
        float top = NEGATIVE, total = 0.0f;
#pragma unroll
        for (int p = 0; p < (int)KRN_CU_JOIN_FEW; p++)
            if (p < (int)parts) {
                end[p] = load_fresh((const float2 *)(row + p * (HD + 4) + HD));
                x[p] = load_fresh((const float4 *)(row + p * (HD + 4)) + quad);
                top = fmaxf(top, end[p].x);
            }
#pragma unroll
        for (int set = 0; set < JOIN_SETS; set++) {
            float4 sum = make_float4(0, 0, 0, 0);
            float t = 0.0f;
#pragma unroll
            for (int p = set; p < (int)KRN_CU_JOIN_FEW; p += JOIN_SETS)
                if (p < (int)parts) {
                    const float s = exp2_fast(end[p].x - top);
                    add_scaled(sum, x[p], s);
                    t = __fmaf_rn(end[p].y, s, t);
                }
            add_scaled(o, sum, 1.0f);
            total = __fadd_rn(total, t);
        }
        at<uint2>(a.y)[((uint64_t)token * a.heads + head) * (HD / 4) + quad] = pack4(o, 1.0f / total);
    }
}

template <int HD> DEV void decode_part(const krn_cu_decode_args &a)
{
    constexpr int ND = HD / 8;
    constexpr uint32_t TILE_BYTES = TILE * HD * 2;
    SHARED_DYNAMIC(uint8_t, smem); /* queries, then the warps' stages of keys and values */
    __shared__ __align__(16) uint16_t newest[2][HD]; /* key and value */
    __shared__ float tops[WARPS][HEADS], totals[WARPS][HEADS];
    __shared__ uint32_t last;
    const uint32_t group = a.heads / a.kv_heads, sets = div_up(group, HEADS);
    const uint32_t part = blockIdx.x, kv_head = blockIdx.y / sets, set = blockIdx.y % sets, token = blockIdx.z;
    const krn_cu_row of = at<krn_cu_row>(a.rows)[token];
    const uint32_t *blocks = at<uint32_t>(of.blocks);
    const uint32_t keys_all = of.position + 1, keys = part_keys(keys_all, gridDim.y), key0 = part * keys;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (key0 >= keys_all) {
        grid_turn();
        return;
    }
    const uint32_t head0 = kv_head * group + set * HEADS;
    const uint32_t n_heads = group - set * HEADS < HEADS ? group - set * HEADS : HEADS;
    const bool projects = a.projects;
    const uint32_t cached = projects ? keys_all - 1 : keys_all; /* rows that are in the cache */
    const uint32_t tiles = keys / (TILE * WARPS); /* of a warp */
    const uint32_t sq = shared_address(smem), stages = sq + HEADS * HD * 2 + warp * a.stages * 2 * TILE_BYTES;
    auto stage_of = [&](uint32_t i) { return stages + (a.stages == 2 ? i % 2 : 0) * 2 * TILE_BYTES; };
    const uint8_t *k = at<uint8_t>(a.k) + (uint64_t)kv_head * a.ctx * HD * 2;
    const uint8_t *v = at<uint8_t>(a.v) + (uint64_t)kv_head * a.ctx * HD * 2;
    /* The warps' i-th tiles lie in the part's i-th block; asked for one tile ahead. */
    auto block_of = [&](uint32_t i) {
        return i < tiles && key0 + i * KRN_CU_KV_BLOCK < keys_all ? blocks[key0 / KRN_CU_KV_BLOCK + i] : 0;
    };
    uint32_t block_ahead = block_of(0);

    auto fetch = [&](uint32_t i) { /* the warp's i-th tile; called in order */
        const uint32_t row = (i * WARPS + warp) * TILE, stage = stage_of(i);
        const uint64_t cell = ((uint64_t)block_ahead * KRN_CU_KV_BLOCK + warp * TILE) * HD * 2;
        block_ahead = block_of(i + 1);
        if (i < tiles && key0 + row < keys_all) {
            const uint32_t valid = key0 + row < cached ? min(cached - key0 - row, (uint32_t)TILE) : 0;
            fetch_tile<HD>(stage, k + cell, valid);
            fetch_tile<HD>(stage + TILE_BYTES, v + cell, valid);
        }
        copy_commit();
    };
    half_head<HD> q_weight, k_weight, turn;
    if (projects) {
        q_weight.load(at<float>(a.q_weight));
        k_weight.load(at<float>(a.k_weight));
        turn.load(at<float>(a.table) + (uint64_t)token * HD);
    }
    if (projects) /* what the cache has is older than the kernels before this one */
        for (uint32_t i = 0; i < a.stages; i++)
            fetch(i);
    grid_turn();
    if (!projects)
        for (uint32_t i = 0; i < a.stages; i++)
            fetch(i);

    uint8_t *queries = smem;
    auto query = [&](uint32_t h, uint32_t d) {
        return (uint16_t *)(queries + row_piece<HD>(h, d / 8) + d % 8 * 2);
    };
    if (projects) {
        const bool newest_here = key0 + keys > of.position, writes = set == 0 && newest_here;
        const uint64_t cell = (uint64_t)kv_head * a.ctx +
                              (newest_here ? (uint64_t)blocks[of.position / KRN_CU_KV_BLOCK] * KRN_CU_KV_BLOCK : 0) +
                              of.position % KRN_CU_KV_BLOCK;
        for (uint32_t job = warp; job < n_heads + 2; job += WARPS) {
            if (job < n_heads) {
                head_of<HD>(at<float>(a.q) + ((uint64_t)token * a.heads + head0 + job) * HD, a.q_weight, q_weight, a.eps, turn, true,
                            [&](uint32_t d, uint16_t x) { *query(job, d) = x; });
            } else if (newest_here) {
                const uint32_t which = job - n_heads;
                uint16_t *cache = at<uint16_t>(which ? a.v : a.k) + cell * HD;
                head_of<HD>(at<float>(which ? a.v_f32 : a.k_f32) + ((uint64_t)token * a.kv_heads + kv_head) * HD,
                            !which && a.k_weight, k_weight, a.eps, turn, !which,
                            [&](uint32_t d, uint16_t x) {
                                newest[which][d] = x;
                                if (writes)
                                    cache[d] = x;
                            });
            }
        }
    } else {
        for (uint32_t i = threadIdx.x; i < n_heads * ND; i += THREADS)
            *(uint4 *)query(i / ND, i % ND * 8) =
                at<uint4>(a.q)[((uint64_t)token * a.heads + head0 + i / ND) * ND + i % ND];
    }
    for (uint32_t i = n_heads * ND + threadIdx.x; i < HEADS * ND; i += THREADS)
        *(uint4 *)query(i / ND, i % ND * 8) = make_uint4(0, 0, 0, 0);
    __syncthreads();

    const uint32_t sw = lane & 7;
    uint32_t qf[HD / 16][4];
#pragma unroll
    for (int kk = 0; kk < HD / 16; kk++)
        load_matrix(qf[kk], sq + (lane & 15) * (HD * 2) + (((2 * kk + (lane >> 4)) ^ sw) << 4));
    float o[ND][4], row_max[2] = {NEGATIVE, NEGATIVE}, row_sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < ND; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            o[n][i] = 0.0f;

    for (uint32_t i = 0; i < tiles; i++) {
        const uint32_t row = (i * WARPS + warp) * TILE;
        if (a.stages == 2)
            copy_wait<1>();
        else
            copy_wait<0>();
        __syncwarp();
        if (key0 + row < keys_all) {
            const uint32_t tk = stage_of(i), tv = tk + TILE_BYTES;
            if (projects && of.position - key0 - row < TILE) {
                const uint32_t r = of.position - key0 - row, which = lane / 16;
                if (lane % 16 < ND)
                    *(uint4 *)(smem + (which ? tv : tk) - sq + row_piece<HD>(r, lane % 16)) =
                        *(const uint4 *)&newest[which][lane % 16 * 8];
                __syncwarp();
            }
            float s[2][4] = {};
#pragma unroll
            for (int kk = 0; kk < HD / 16; kk++) {
                uint32_t kf[4];
                load_matrix(kf, tk + ((lane >> 4) * 8 + (lane & 7)) * (HD * 2) + (((2 * kk + (lane >> 3 & 1)) ^ sw) << 4));
                mma(s[0], qf[kk], kf[0], kf[1]);
                mma(s[1], qf[kk], kf[2], kf[3]);
            }
            uint32_t pf[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = row_max[h], shrink, sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &x = s[n][2 * h + e];
                        x = key0 + row + n * 8 + (lane & 3) * 2 + e < keys_all ? x * a.scale_log2 : NEGATIVE;
                        top = fmaxf(top, x);
                    }
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                shrink = exp2_fast(row_max[h] - top);
                row_max[h] = top;
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &x = s[n][2 * h + e];
                        x = exp2_fast(x - top);
                        sum = __fadd_rn(sum, x);
                    }
                row_sum[h] = __fmaf_rn(row_sum[h], shrink, sum);
#pragma unroll
                for (int n = 0; n < ND; n++) {
                    o[n][2 * h] *= shrink;
                    o[n][2 * h + 1] *= shrink;
                }
                pf[h] = pack_f16(s[0][2 * h], s[0][2 * h + 1]);
                pf[2 + h] = pack_f16(s[1][2 * h], s[1][2 * h + 1]);
            }
#pragma unroll
            for (int n = 0; n < ND / 2; n++) {
                uint32_t vf[4];
                load_matrix_trans(vf, tv + (lane & 15) * (HD * 2) + (((2 * n + (lane >> 4)) ^ sw) << 4));
                mma(o[2 * n], pf, vf[0], vf[1]);
                mma(o[2 * n + 1], pf, vf[2], vf[3]);
            }
        }
        __syncwarp();
        fetch(i + a.stages);
    }
    copy_wait<0>();

    /* The warps meet: sums in shared memory, rows of HD + 4 floats. */
    float *sums = (float *)smem;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = row_sum[h];
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        const uint32_t row = (lane >> 2) + 8 * h;
        if ((lane & 3) == 0) {
            tops[warp][row] = row_max[h];
            totals[warp][row] = sum;
        }
        if (row < n_heads)
#pragma unroll
            for (int n = 0; n < ND; n++)
                *(float2 *)(sums + (warp * HEADS + row) * (HD + 4) + n * 8 + (lane & 3) * 2) =
                    make_float2(o[n][2 * h], o[n][2 * h + 1]);
    }
    __syncthreads();
    const uint32_t parts = div_up(keys_all, keys);
    const bool only = parts == 1;
    for (uint32_t i = threadIdx.x; i < n_heads * (HD / 4); i += THREADS) {
        const uint32_t h = i / (HD / 4), quad = i % (HD / 4);
        float top = tops[0][h], total = 0.0f;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            top = fmaxf(top, tops[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float e = exp2_fast(tops[w][h] - top);
            add_scaled(sum, *(const float4 *)(sums + (w * HEADS + h) * (HD + 4) + quad * 4), e);
            total = __fmaf_rn(totals[w][h], e, total);
        }
        if (only) {
            at<uint2>(a.y)[((uint64_t)token * a.heads + head0 + h) * (HD / 4) + quad] = pack4(sum, 1.0f / total);
            continue;
        }
        float *out = at<float>(a.part) + part_row<HD>(a, token, head0 + h, part);
        *(float4 *)(out + quad * 4) = sum;
        if (quad == 0)
            *(float2 *)(out + HD) = make_float2(top, total);
    }
    if (only || !a.counters)
        return;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *counter = at<uint32_t>(a.counters) + blockIdx.z * gridDim.y + blockIdx.y;
        __threadfence();
        last = atomicAdd(counter, 1u) == parts - 1;
        if (last)
            *counter = 0; /* for the next launch */
        __threadfence();
    }
    __syncthreads();
    if (last)
        join_few<HD>(a, token, head0, n_heads, parts);
}

KERNEL(__launch_bounds__(THREADS, 1), decode_part_128, krn_cu_decode_args)
{
    decode_part<128>(a);
}
KERNEL(__launch_bounds__(THREADS, 1), decode_part_64, krn_cu_decode_args)
{
    decode_part<64>(a);
}

/* Many parts: a block a (head, token); eight sets of threads take parts p, p + 8, ..., and meet in order. */
#define JOIN_THREADS 256

template <int HD> DEV void decode_join(const krn_cu_decode_args &a)
{
    SHARED_DYNAMIC(float, scale); /* of each part */
    __shared__ float4 sums[JOIN_SETS][HD / 4];
    __shared__ float wide[JOIN_THREADS / 32], totals[JOIN_SETS];
    const uint32_t head = blockIdx.x, token = blockIdx.y, tid = threadIdx.x;
    const uint32_t keys = at<krn_cu_row>(a.rows)[token].position + 1;
    const uint32_t parts = div_up(keys, part_keys(keys, a.blocks));
    const float *row = at<float>(a.part) + part_row<HD>(a, token, head, 0);
    float top = NEGATIVE;
    grid_turn();
    if (parts == 1) /* is there already */
        return;
    for (uint32_t p = tid; p < parts; p += JOIN_THREADS) {
        const float x = load_fresh(row + (uint64_t)p * (HD + 4) + HD);
        scale[p] = x;
        top = fmaxf(top, x);
    }
    top = warp_max(top);
    if (tid % 32 == 0)
        wide[tid / 32] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < JOIN_THREADS / 32; i++)
        top = fmaxf(top, wide[i]);
    for (uint32_t p = tid; p < parts; p += JOIN_THREADS)
        scale[p] = exp2_fast(scale[p] - top);
    __syncthreads();
    const uint32_t quad = tid % 32, set = tid / 32;
    float4 o = make_float4(0, 0, 0, 0);
    float total = 0.0f;
    if (quad < HD / 4) {
#pragma unroll 8
        for (uint32_t p = set; p < parts; p += (uint32_t)JOIN_SETS) {
            const float *x = row + (uint64_t)p * (HD + 4);
            add_scaled(o, load_fresh((const float4 *)x + quad), scale[p]);
            total = __fmaf_rn(load_fresh(x + HD + 1), scale[p], total);
        }
        sums[set][quad] = o;
        if (quad == 0)
            totals[set] = total;
    }
    __syncthreads();
    if (set || quad >= HD / 4)
        return;
    o = make_float4(0, 0, 0, 0);
    total = 0.0f;
    for (int i = 0; i < JOIN_SETS; i++) {
        add_scaled(o, sums[i][quad], 1.0f);
        total = __fadd_rn(total, totals[i]);
    }
    at<uint2>(a.y)[((uint64_t)token * a.heads + head) * (HD / 4) + quad] = pack4(o, 1.0f / total);
}

KERNEL(__launch_bounds__(JOIN_THREADS), decode_join_128, krn_cu_decode_args)
{
    decode_join<128>(a);
}
KERNEL(__launch_bounds__(JOIN_THREADS), decode_join_64, krn_cu_decode_args)
{
    decode_join<64>(a);
}
