/* SPDX-License-Identifier: MIT */
/*
 * Experts of a plan on GPUs of compute capability 9.0: a warpgroup multiplies
 * 64 weight rows, made half precision in its registers, with up to 256 tokens
 * in shared memory; two warpgroups share the tokens.
 *
 * An output element is one chain over k = 0, 16, 32, ... whatever the number
 * of tokens beside it. These kernels are all that run experts of a chunk on
 * such a GPU, so their bits need not be those of krn_cu_gemm.cu.
 */
#include "kernels/krn_cu_fragment.cuh"
#include "kernels/krn_cu_tile.cuh"
#include "kernels/krn_cu_wgmma.cuh"

#define WG_THREADS 256
#define ANY        0xffffffffu /* type known at run time only */
#define X_STAGES   4u

enum mode { GATE_UP, DOWN };

/* Rows of the tile's lower or upper half in storage form. */
struct wg_rows {
    uint32_t type, shift, chunk_bytes; /* weights of a chunk: 1 << shift */
};

template <uint32_t TYPE> DEV wg_rows make_rows(uint32_t type)
{
    const uint32_t t = TYPE == ANY ? type : TYPE, shift = chunk_shift(t);
    return {t, shift, weight_bytes(t, 1u << shift)};
}

/* Chunks are in two buffers in turn, or in three where a chunk is one step. */
DEV uint32_t ring_of(uint32_t shift, uint32_t chunk)
{
    return shift == 8 ? chunk & 1 : chunk % 3;
}

struct wg_tile {
    const uint8_t *blob;
    uint32_t position, rows, n0; /* first of its sorted slots, how many, first weight row */
};

template <int MODE, uint32_t TYPE, int TOKENS> struct wg_experts {
    static constexpr bool PAIRED = MODE == GATE_UP;
    static constexpr uint32_t OUT = PAIRED ? 64 : 128;
    static constexpr int PIECES = TOKENS / 32; /* of a step's tokens, a thread */

    const krn_cu_expert_args &a;
    const uint32_t tid, lane, t, row; /* row: this thread's first of the tile; the second: other_row */
    const uint32_t cols, steps, stride, x_bytes;
    const wg_rows lower, upper;
    uint32_t x_address, raw_address;
    const uint8_t *raw;
    wg_tile now, next;
    /* for fetching: a thread's weight row (two threads a row) and token rows, as offsets of 16 bytes */
    const uint8_t *source;
    uint32_t x_piece[PIECES];
    uint32_t low[2]; /* low bits of the addresses of the rows that this thread multiplies */

    __device__ __forceinline__ wg_experts(const krn_cu_expert_args &args, uint8_t *smem)
        : a(args), tid(threadIdx.x), lane(tid % 32), t(lane & 3),
          row(PAIRED ? tid / 32 * 8 + (lane >> 2) : tid / 32 * 16 + (lane >> 2)), cols(args.a.cols),
          steps((div_up(args.a.cols, KRN_CU_TILE_K) + 1) & ~1u), stride(args.raw_stride),
          x_bytes(args.tile_tokens * TILE_ROW_BYTES), lower(make_rows<TYPE>(args.a.type)),
          upper(make_rows<TYPE>(args.b.type))
    {
        x_address = shared_address(smem);
        raw = smem + X_STAGES * x_bytes;
        raw_address = shared_address(raw);
    }

    /* Row r of the tile, from 0, in its matrix. */
    __device__ __forceinline__ const uint8_t *row_address(const wg_tile &tile, uint32_t r) const
    {
        const bool second = PAIRED && r >= 64;
        uint32_t n = tile.n0 + (PAIRED ? r & 63 : r);
        n = n < a.a.rows ? n : a.a.rows - 1; /* beyond: computed, never stored */
        return tile.blob + (second ? a.b.data : a.a.data) + (uint64_t)n * (second ? a.b.row_bytes : a.a.row_bytes);
    }

    __device__ __forceinline__ bool look_up(uint32_t tile)
    {
        const uint32_t n_tiles = div_up(a.a.rows, OUT);
        const uint32_t which = at<uint32_t>(a.tiles)[tile / n_tiles];
        const krn_cu_job job = at<krn_cu_job>(a.jobs)[which >> 16];
        /* as many tiles as the plan has, of equal size */
        const uint32_t each = (div_up(job.count, div_up(job.count, a.tile_tokens)) + 7) & ~7u;
        const uint32_t m0 = (which & 0xffff) * each;
        next.blob = at<uint8_t>(job.blob);
        next.n0 = tile % n_tiles * OUT;
        next.position = job.first + m0;
        next.rows = m0 >= job.count ? 0 : job.count - m0 < each ? job.count - m0 : each;
        return next.rows != 0;
    }

    __device__ __forceinline__ void fetch_x(uint32_t step) const
    {
        const uint32_t piece = tid & 7, k = step * KRN_CU_TILE_K + piece * 8;
        const uint32_t target = x_address + (step & (X_STAGES - 1)) * x_bytes + tile_offset(tid / 8, piece);
        const uint8_t *x = at<uint8_t>(a.x) + (k < cols ? k : 0) * 2;
        if (step >= steps)
            return;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (tid / 8 + i * 32 < next.rows)
                copy_async(target + i * 32 * TILE_ROW_BYTES, x + (uint64_t)x_piece[i] * 16, k < cols);
    }

    __device__ __forceinline__ void fetch_raw(uint32_t step) const
    {
        const uint32_t r = tid / 2, k = step * KRN_CU_TILE_K;
        const bool second = PAIRED && r >= 64;
        const wg_rows w = {second ? upper.type : lower.type, second ? upper.shift : lower.shift,
                           second ? upper.chunk_bytes : lower.chunk_bytes};
        if (k >= cols || (k & ((1u << w.shift) - 1)) != 0)
            return;
        const uint32_t chunk = k >> w.shift, target = raw_address + (ring_of(w.shift, chunk) * 128 + r) * stride;
        const uint8_t *p = source + chunk * w.chunk_bytes;
        if constexpr (TYPE == KRN_Q4_K) {
#pragma unroll
            for (int i = 0; i < 5; i++)
                if (i < 4 || (tid & 1) == 0)
                    copy_async(target + (2 * i + (tid & 1)) * 16, p + (2 * i + (tid & 1)) * 16, true);
        } else {
            const uint32_t bytes = cols - k < 1u << w.shift ? weight_bytes(w.type, cols - k) : w.chunk_bytes;
            const uint32_t skew = (uint32_t)(uintptr_t)p & 15u;
            for (uint32_t at = (tid & 1) * 16; at < skew + bytes; at += 32)
                copy_async(target + at, p - skew + at, true);
        }
    }

    /* `next`'s first steps; `next` is the tile from now on. */
    __device__ __forceinline__ void start()
    {
        now = next;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint32_t r = tid / 8 + 32 * i;
            x_piece[i] = 0;
            if (r < now.rows)
                x_piece[i] = (PAIRED ? at<uint32_t>(a.slots)[now.position + r] / a.top_k : now.position + r) * (cols / 8);
        }
        source = row_address(now, tid / 2);
        low[0] = (uint32_t)(uintptr_t)row_address(now, row);
        low[1] = (uint32_t)(uintptr_t)row_address(now, PAIRED ? row + 64 : row + 8);
        fetch_raw(0);
        fetch_raw(1);
        fetch_x(0);
        copy_commit();
        fetch_raw(2);
        fetch_x(1);
        copy_commit();
    }

    __device__ __forceinline__ void expand(uint32_t step, uint32_t (&f)[16]) const
    {
        const uint32_t k = step * KRN_CU_TILE_K;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const wg_rows w = PAIRED && h ? upper : lower;
            const uint32_t r = h ? (PAIRED ? row + 64 : row + 8) : row;
            uint32_t v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (k < cols) {
                const uint32_t chunk = k >> w.shift, skew = TYPE == KRN_Q4_K ? 0 : (low[h] + chunk * w.chunk_bytes) & 15u;
                fragment64(TYPE == ANY ? w.type : TYPE, raw + (ring_of(w.shift, chunk) * 128 + r) * stride + skew,
                           k & ((1u << w.shift) - 1), cols - k < 64 ? cols - k : 64, t, v);
            }
#pragma unroll
            for (int p = 0; p < 8; p++)
                f[p / 2 * 4 + (p & 1) * 2 + h] = v[p];
        }
    }

    /* A step's products for the tile's number of tokens, rounded up to 32; sums beyond are not touched. */
    template <int N> __device__ __forceinline__ void multiply(float (&sum)[TOKENS / 2], const uint32_t (&f)[16], uint64_t tokens)
    {
        wg_begin();
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
            wgmma<N>(*reinterpret_cast<float(*)[N / 2]>(&sum), f + 4 * kk, tokens + 2 * kk);
        wg_commit();
    }

    /* Fragments of this step are in `f`; those of the next one go to `g` while this one is multiplied. */
    __device__ __forceinline__ void step(uint32_t s, float (&sum)[TOKENS / 2], uint32_t (&f)[16], uint32_t (&g)[16])
    {
        const uint64_t tokens = matrix_view(x_address + (s & (X_STAGES - 1)) * x_bytes, 16);
        copy_wait<1>();
        products_see();
        __syncthreads();
        const uint32_t units = div_up(now.rows, 32);
        if (units == TOKENS / 32)
            multiply<TOKENS>(sum, f, tokens);
        else if (units == 1)
            multiply<32>(sum, f, tokens);
        else if (TOKENS > 64 && units == 2)
            multiply<TOKENS < 64 ? TOKENS : 64>(sum, f, tokens);
        else if (TOKENS > 96 && units == 3)
            multiply<TOKENS < 96 ? TOKENS : 96>(sum, f, tokens);
        else if (TOKENS > 128 && units == 4)
            multiply<TOKENS < 128 ? TOKENS : 128>(sum, f, tokens);
        else if (TOKENS > 160 && units == 5)
            multiply<TOKENS < 160 ? TOKENS : 160>(sum, f, tokens);
        else if (TOKENS > 192 && units == 6)
            multiply<TOKENS < 192 ? TOKENS : 192>(sum, f, tokens);
        else if (TOKENS > 224 && units == 7)
            multiply<TOKENS < 224 ? TOKENS : 224>(sum, f, tokens);
        fetch_x(s + 2);
        fetch_raw(s + 3);
        copy_commit();
        wg_wait<1>(); /* of the step before: its fragments and tokens may be overwritten */
        expand(s + 1, g);
    }

    __device__ __forceinline__ void store(const wg_tile &tile, float (&sum)[TOKENS / 2]) const
    {
        const uint32_t odd = lane >> 2 & 1, n = tile.n0 + row - odd;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) {
            if ((uint32_t)i * 8 >= tile.rows)
                break;
            const uint32_t token = 8 * i + 2 * t + odd; /* this lane's, after the exchange with its neighbour */
            const float *c = &sum[4 * i];
            float v[2][2];
            if constexpr (PAIRED) {
                v[0][0] = hidden_value(c[0], c[2]);
                v[0][1] = hidden_value(c[1], c[3]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    v[j / 2][j % 2] = c[j] * KRN_CU_HIDDEN_SCALE;
            }
#pragma unroll
            for (int h = 0; h < (PAIRED ? 1 : 2); h++) { /* two rows of one token in a lane */
                const float got = __shfl_xor_sync(0xffffffffu, odd ? v[h][0] : v[h][1], 4);
                const float lo = odd ? got : v[h][0], hi = odd ? v[h][1] : got;
                if (token >= tile.rows || n + 8 * h >= a.a.rows)
                    continue;
                if constexpr (PAIRED)
                    at<uint32_t>(a.y)[((uint64_t)(tile.position + token) * a.a.rows + n) / 2] = pack_f16(lo, hi);
                else
                    *(float2 *)(at<float>(a.y) + (uint64_t)at<uint32_t>(a.slots)[tile.position + token] * a.a.rows + n +
                                8 * h) = make_float2(lo, hi);
            }
        }
    }

    __device__ __forceinline__ void walk()
    {
        const uint32_t total = at<krn_cu_plan_head>(a.head)->tiles * div_up(a.a.rows, OUT);
        if (blockIdx.x >= total)
            return;
        if (look_up(blockIdx.x))
            start();
        for (uint32_t tile = blockIdx.x; tile < total; tile += gridDim.x) {
            const bool work = next.rows != 0; /* 0: a rounding, for very many tokens */
            float sum[TOKENS / 2];
            uint32_t f[16], g[16];
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i++)
                sum[i] = 0.0f;
            if (work) {
                copy_wait<1>();
                __syncthreads();
                expand(0, f);
                for (uint32_t s = 0; s < steps; s += 2) {
                    step(s, sum, f, g);
                    step(s + 1, sum, g, f);
                }
                wg_wait<0>();
                __syncthreads(); /* what comes next overwrites */
            }
            const wg_tile done = now;
            if (tile + gridDim.x < total && look_up(tile + gridDim.x))
                start();
            if (work)
                store(done, sum);
        }
    }
};

#define EXPERTS(name, mode, type, tokens, blocks)                                                            \
    KERNEL(__launch_bounds__(WG_THREADS, blocks), name, krn_cu_expert_args)                                  \
    {                                                                                                        \
        SHARED_DYNAMIC(uint8_t, smem);                                                                       \
        wg_experts<mode, type, tokens> e(a, smem);                                                           \
        e.walk();                                                                                            \
    }

EXPERTS(wg_gate_up_q4_k, GATE_UP, KRN_Q4_K, 256, 1)
EXPERTS(wg_gate_up_q4_k_few, GATE_UP, KRN_Q4_K, 64, 2)
EXPERTS(wg_down_q4_k, DOWN, KRN_Q4_K, 256, 1)
EXPERTS(wg_down_q4_k_few, DOWN, KRN_Q4_K, 64, 2)
EXPERTS(wg_gate_up, GATE_UP, ANY, 256, 1)
EXPERTS(wg_gate_up_few, GATE_UP, ANY, 64, 1)
EXPERTS(wg_down, DOWN, ANY, 256, 1)
EXPERTS(wg_down_few, DOWN, ANY, 64, 1)
