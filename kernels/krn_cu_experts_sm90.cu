/* SPDX-License-Identifier: MIT */
/*
 * Experts of a plan on GPUs of compute capability 9.0. Two warpgroups multiply
 * 64 weight rows each, made half precision in their registers, with the same
 * up to 256 tokens in shared memory; a third one fetches tokens and raw
 * weights for them, as far ahead as there are buffers, across tiles. So each
 * of the two stores its results while the other one multiplies.
 *
 * An output element is one chain over k = 0, 16, 32, ... whatever the number
 * of tokens beside it. These kernels are all that run a chunk's experts of
 * their types on such a GPU, so their bits need not be krn_cu_gemm.cu's.
 */
#include "kernels/krn_cu_fragment.cuh"
#include "kernels/krn_cu_tile.cuh"
#include "kernels/krn_cu_wgmma.cuh"

#define CONSUMERS 256u
#define PRODUCERS 128u
#define ANY       0xffffffffu /* type known at run time only */
#define X_STAGES  KRN_CU_X_STAGES
#define RAW_MOST  3u
#define AHEAD     2 /* fetches of a producer that are under way; buffers are enough for one more */
#define HEADER    1024u

enum mode { GATE_UP, DOWN, DENSE };

/* At the beginning of shared memory; HEADER bytes. */
struct header {
    uint64_t full[X_STAGES], empty[X_STAGES], raw_full[RAW_MOST], raw_empty[RAW_MOST];
    uint4 tile[4]; /* the producers' notes: low bits of the blob's address, first sorted slot, how many, first row */
};

/* Shared address of one of the header's barriers. */
template <unsigned long N> DEV uint32_t barrier_of(uint64_t (header::*barriers)[N], uint32_t i)
{
    SHARED_DYNAMIC(uint8_t, smem);
    return shared_address(((header *)smem)->*barriers) + i * 8;
}

/* A place in a ring of buffers and the parity of its round. */
struct cursor {
    uint32_t at, round;
    __device__ __forceinline__ void next(uint32_t size)
    {
        if (++at == size) {
            at = 0;
            round ^= 1;
        }
    }
};

template <int MODE, uint32_t TYPE, int TOKENS> struct wg_experts {
    static constexpr bool PAIRED = MODE == GATE_UP;
    static constexpr uint32_t OUT = PAIRED ? 64 : 128, UNROLL = TYPE == KRN_Q4_K ? 4 : 2;
    static constexpr uint32_t STAGED_PITCH = PAIRED ? 80 : 272; /* bytes of a token on its way out */
    static constexpr int PIECES = TOKENS / (int)(PRODUCERS / 8); /* of a step's tokens, a producer */

    const krn_cu_expert_args &a;
    header *const h;
    const uint32_t type, shift, chunk_bytes, raw_ring; /* 1 << shift weights of a row are fetched together */
    const uint32_t cols, steps, stride, x_bytes, x_address, total;
    uint8_t *const raw;

    __device__ __forceinline__ wg_experts(const krn_cu_expert_args &args, uint8_t *smem)
        : a(args), h((header *)smem), type(TYPE == ANY ? args.a.type : TYPE), shift(chunk_shift(type)),
          chunk_bytes(weight_bytes(type, 1u << shift)), raw_ring(shift == 8 ? 2 : 3), cols(args.a.cols),
          steps((div_up(args.a.cols, KRN_CU_TILE_K) + UNROLL - 1) / UNROLL * UNROLL),
          stride(TYPE == KRN_Q4_K ? 144 : args.raw_stride),
          x_bytes(args.tile_tokens * TILE_ROW_BYTES), x_address(shared_address(smem) + HEADER),
          total((MODE == DENSE ? div_up(args.tokens, args.tile_tokens) : at<krn_cu_plan_head>(args.head)->tiles) *
                div_up(args.a.rows, OUT)),
          raw(smem + HEADER + X_STAGES * x_bytes)
    {
    }

    /* Offset of row r of a tile, from 0, in its expert's blob. */
    __device__ __forceinline__ uint64_t row_offset(uint32_t n0, uint32_t r) const
    {
        const bool second = PAIRED && r >= 64;
        uint32_t n = n0 + (PAIRED ? r & 63 : r);
        n = n < a.a.rows ? n : a.a.rows - 1; /* beyond: computed, never stored */
        return (second ? a.b.data : a.a.data) + (uint64_t)n * a.a.row_bytes;
    }

    /* ---- producers: a thread has one weight row, and the same eighth of several token rows ---- */

    __device__ __forceinline__ void fetch_raw(uint32_t k, const uint8_t *row, uint32_t at) const
    {
        const uint32_t target = shared_address(raw) + (at * 128 + threadIdx.x - CONSUMERS) * stride;
        const uint8_t *p = row + (k >> shift) * chunk_bytes;
        if constexpr (TYPE == KRN_Q4_K) {
#pragma unroll
            for (int i = 0; i < 9; i++)
                copy_async(target + 16 * i, p + 16 * i, true);
        } else {
            const uint32_t bytes = cols - k < 1u << shift ? weight_bytes(type, cols - k) : chunk_bytes;
            const uint32_t skew = (uint32_t)(uintptr_t)p & 15u;
            for (uint32_t i = 0; i < skew + bytes; i += 16)
                copy_async(target + i, p - skew + i, true);
        }
    }

    /* What was fetched AHEAD steps before has landed: says so to the consumers. */
    template <int LEFT> __device__ __forceinline__ void landed(cursor &done, cursor &raw_done, uint32_t &k) const
    {
        copy_wait<LEFT>();
        products_see();
        if ((k & ((1u << shift) - 1)) == 0 && k < cols) {
            barrier_arrive(barrier_of(&header::raw_full, raw_done.at));
            raw_done.next(raw_ring);
        }
        barrier_arrive(barrier_of(&header::full, done.at));
        done.next(X_STAGES);
        k += KRN_CU_TILE_K;
        if (k == steps * KRN_CU_TILE_K)
            k = 0;
    }

    __device__ __forceinline__ void produce() const
    {
        const uint32_t tid = threadIdx.x - CONSUMERS, piece = tid & 7, n_tiles = div_up(a.a.rows, OUT);
        const uint32_t target = x_address + tile_offset(tid / 8, piece);
        cursor now = {0, 1}, raw_now = {0, 1}, done = {0, 0}, raw_done = {0, 0}; /* at first all is empty */
        uint32_t k_done = 0, fetched = 0, note = 0;
        for (uint32_t tile = blockIdx.x; tile < total; tile += gridDim.x) {
            const uint32_t n0 = tile % n_tiles * OUT;
            uint32_t which = tile / n_tiles;
            krn_cu_job job = {0, 0, a.tokens};
            if constexpr (MODE != DENSE) {
                which = at<uint32_t>(a.tiles)[which];
                job = at<krn_cu_job>(a.jobs)[which >> 16];
                which &= 0xffff;
            }
            /* as many tiles as the plan has, of equal size; a last one without tokens repeats one */
            const uint32_t each = (div_up(job.count, div_up(job.count, a.tile_tokens)) + 7) & ~7u;
            const uint32_t m0 = which * each < job.count ? which * each : job.count - 1;
            const uint32_t rows = job.count - m0 < each ? job.count - m0 : each, position = job.first + m0;
            const uint8_t *row = at<uint8_t>(job.blob) + row_offset(n0, tid);
            if (tid == 0)
                h->tile[note] = make_uint4((uint32_t)job.blob, position, rows, n0);
            note = (note + 1) & 3;
            const uint32_t units = div_up(rows, 16); /* the last one's rows beyond: any */
            uint32_t x_piece[PIECES];
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                uint32_t r = tid / 8 + 16 * i;
                r = position + (r < rows ? r : rows - 1);
                x_piece[i] = (PAIRED ? at<uint32_t>(a.slots)[r] / a.top_k : r) * (cols / 8);
            }
            for (uint32_t k = 0; k < steps * KRN_CU_TILE_K; k += KRN_CU_TILE_K) {
                if ((k & ((1u << shift) - 1)) == 0 && k < cols) {
                    barrier_wait(barrier_of(&header::raw_empty, raw_now.at), raw_now.round);
                    fetch_raw(k, row, raw_now.at);
                    raw_now.next(raw_ring);
                }
                barrier_wait(barrier_of(&header::empty, now.at), now.round);
                const bool valid = k + piece * 8 < cols;
                const uint8_t *x = at<uint8_t>(a.x) + (valid ? k + piece * 8 : 0) * 2;
                const uint32_t stage = target + now.at * x_bytes;
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    if ((uint32_t)i >= units)
                        break;
                    copy_async(stage + i * 16 * TILE_ROW_BYTES, x + (uint64_t)x_piece[i] * 16, valid);
                }
                copy_commit();
                now.next(X_STAGES);
                if (fetched++ >= AHEAD)
                    landed<AHEAD>(done, raw_done, k_done);
            }
        }
        const uint32_t rest = fetched < AHEAD ? fetched : AHEAD;
        for (uint32_t i = 0; i < rest; i++)
            landed<0>(done, raw_done, k_done);
    }

    /* ---- consumers ---- */

    struct consumer {
        uint32_t lane, t, row; /* this thread's first row of the tile; its second is other */
        uint32_t other;
        cursor stage, raw; /* of what is multiplied, and expanded, next */
        uint32_t n0, position, rows, low[2];
        uint4 block[2]; /* Q4_K: k_head of the rows' blocks */
    };

    /* Fragments of the next step; J: its number modulo UNROLL. */
    template <int J> __device__ __forceinline__ void expand(consumer &c, uint32_t k, uint32_t (&f)[16]) const
    {
        const uint32_t in_chunk = k & ((1u << shift) - 1);
        if (TYPE == KRN_Q4_K ? J == 0 : in_chunk == 0 && k < cols)
            barrier_wait(barrier_of(&header::raw_full, c.raw.at), c.raw.round);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *p = raw + (c.raw.at * 128 + (i ? c.other : c.row)) * stride;
            uint32_t v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if constexpr (TYPE == KRN_Q4_K) {
                if (J == 0)
                    c.block[i] = k_head(p);
                fragment_q4_k(c.block[i], p, J, c.t, v);
            } else if (k < cols) {
                const uint32_t skew = (c.low[i] + (k >> shift) * chunk_bytes) & 15u;
                fragment64(type, p + skew, in_chunk, cols - k < 64 ? cols - k : 64, c.t, v);
            }
#pragma unroll
            for (int q = 0; q < 8; q++)
                f[q / 2 * 4 + (q & 1) * 2 + i] = v[q];
        }
        const bool last = TYPE == KRN_Q4_K ? J == 3
                                           : k < cols && (in_chunk + KRN_CU_TILE_K == 1u << shift || k + KRN_CU_TILE_K >= cols);
        if (last) { /* each lane for what it read: compute-sanitizer does not see one speak for its warp */
            barrier_arrive(barrier_of(&header::raw_empty, c.raw.at));
            c.raw.next(raw_ring);
        }
    }

    __device__ __forceinline__ void release(const consumer &c, uint32_t stage) const
    {
        if (c.lane == 0)
            barrier_arrive(barrier_of(&header::empty, stage));
    }

    /* A step's products for the tile's number of tokens, rounded up to 32; sums beyond are not touched. */
    template <int N>
    __device__ __forceinline__ void multiply(float (&sum)[TOKENS / 2], const uint32_t (&f)[16], uint64_t tokens) const
    {
        wg_begin();
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
            wgmma<N>(*reinterpret_cast<float(*)[N / 2]>(&sum), f + 4 * kk, tokens + 2 * kk);
        wg_commit();
    }

    /* Fragments of this step are in `f`; those of the next one go to `g` while this one is multiplied. J: the
     * step's number modulo UNROLL. */
    template <int J>
    __device__ __forceinline__ void step(consumer &c, uint32_t s, float (&sum)[TOKENS / 2], uint32_t (&f)[16],
                                         uint32_t (&g)[16]) const
    {
        const uint64_t tokens = matrix_view(x_address + c.stage.at * x_bytes, 16);
        barrier_wait(barrier_of(&header::full, c.stage.at), c.stage.round);
        const uint32_t units = div_up(c.rows, 32);
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
        wg_wait<1>(); /* the step before is done: its fragments and tokens may be overwritten */
        if (s > 0)
            release(c, (c.stage.at ? c.stage.at : X_STAGES) - 1);
        c.stage.next(X_STAGES);
        if (s + 1 < steps)
            expand<(J + 1) % (int)UNROLL>(c, (s + 1) * KRN_CU_TILE_K, g);
    }

    /* Four results of a token, rows col .. col + 3. */
    __device__ __forceinline__ void put_four(uint32_t y_row, uint32_t col, float4 v) const
    {
        float *y = at<float>(a.y) + (uint64_t)y_row * a.a.rows + col;
        if (MODE == DOWN || a.a.rows % 4 == 0) {
            if (MODE == DENSE && a.add) {
                const float4 o = *(const float4 *)y;
                v = make_float4(o.x + v.x, o.y + v.y, o.z + v.z, o.w + v.w);
            }
            *(float4 *)y = v;
            return;
        }
        const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (col + i < a.a.rows)
                y[i] = a.add ? y[i] + f[i] : f[i];
    }

    /* By way of shared memory, 16 tokens at a time, so that a token's rows are stored side by side. A warpgroup on
     * its own: the other one multiplies. */
    __device__ __forceinline__ void store(const consumer &k, float (&sum)[TOKENS / 2]) const
    {
        constexpr uint32_t ROWS = OUT / 2; /* of the warpgroup */
        const uint32_t group = threadIdx.x / 128, tid = threadIdx.x % 128, odd = k.lane >> 2 & 1;
        const uint32_t n = k.n0 + group * ROWS, row = k.row - group * ROWS;
        uint8_t *const staged = raw + raw_ring * 128 * stride + group * 16 * STAGED_PITCH;
        uint32_t y_row[PAIRED ? 1 : TOKENS / 8]; /* of token 8 i + tid / 16 */
        if constexpr (!PAIRED) {
#pragma unroll
            for (int i = 0; i < TOKENS / 8; i++) {
                const uint32_t token = 8 * i + tid / 16, position = k.position + (token < k.rows ? token : k.rows - 1);
                y_row[i] = MODE == DOWN ? at<uint32_t>(a.slots)[position] : position;
            }
        }
#pragma unroll
        for (int first = 0; first < TOKENS / 8; first += 2) {
            if ((uint32_t)first * 8 >= k.rows)
                break;
            meet(1 + group, 128); /* what was there is stored */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float *c = &sum[4 * (first + i)];
                if constexpr (PAIRED) { /* two rows of one token in a lane, by an exchange with its neighbour */
                    const float v0 = hidden_value(c[0], c[2]), v1 = hidden_value(c[1], c[3]);
                    const float got = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 4);
                    *(uint32_t *)(staged + (8 * i + 2 * k.t + odd) * STAGED_PITCH + (row - odd) * 2) =
                        odd ? pack_f16(got, v1) : pack_f16(v0, got);
                } else {
                    float *f = (float *)(staged + (8 * i + 2 * k.t) * STAGED_PITCH) + row;
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        f[(j & 1) * (STAGED_PITCH / 4) + (j >> 1) * 8] = MODE == DOWN ? c[j] * KRN_CU_HIDDEN_SCALE : c[j];
                }
            }
            meet(1 + group, 128);
            if constexpr (PAIRED) {
                const uint32_t token = 8 * first + tid / 4, col = n + tid % 4 * 8;
                if (tid < 64 && token < k.rows && col < a.a.rows)
                    *(uint4 *)(at<uint8_t>(a.y) + ((uint64_t)(k.position + token) * a.a.rows + col) * 2) =
                        *(const uint4 *)(staged + tid / 4 * STAGED_PITCH + tid % 4 * 16);
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t token = 8 * (first + i) + tid / 16, col = n + tid % 16 * 4;
                    if (token < k.rows && col < a.a.rows)
                        put_four(y_row[first + i], col,
                                 *(const float4 *)(staged + (8 * i + tid / 16) * STAGED_PITCH + tid % 16 * 16));
                }
            }
        }
    }

    __device__ __forceinline__ void consume() const
    {
        consumer c;
        c.lane = threadIdx.x % 32;
        c.t = c.lane & 3;
        c.row = PAIRED ? threadIdx.x / 32 * 8 + (c.lane >> 2) : threadIdx.x / 32 * 16 + (c.lane >> 2);
        c.other = PAIRED ? c.row + 64 : c.row + 8;
        c.stage = c.raw = {0, 0};
        uint32_t note = 0;
        for (uint32_t tile = blockIdx.x; tile < total; tile += gridDim.x) {
            float sum[TOKENS / 2];
            uint32_t f[16], g[16];
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i++)
                sum[i] = 0.0f;
            barrier_wait(barrier_of(&header::raw_full, c.raw.at), c.raw.round); /* the note is there too */
            const uint4 info = h->tile[note];
            note = (note + 1) & 3;
            c.position = info.y;
            c.rows = info.z;
            c.n0 = info.w;
            c.low[0] = info.x + (uint32_t)row_offset(c.n0, c.row);
            c.low[1] = info.x + (uint32_t)row_offset(c.n0, c.other);
            expand<0>(c, 0, f);
            for (uint32_t s = 0; s < steps; s += UNROLL) {
                step<0>(c, s, sum, f, g);
                step<1>(c, s + 1, sum, g, f);
                if constexpr (UNROLL == 4) {
                    step<2>(c, s + 2, sum, f, g);
                    step<3>(c, s + 3, sum, g, f);
                }
            }
            wg_wait<0>();
            release(c, (c.stage.at ? c.stage.at : X_STAGES) - 1);
            store(c, sum);
        }
    }
};

template <int MODE, uint32_t TYPE, int TOKENS, int BLOCKS, int CONSUMER_REGISTERS, int PRODUCER_REGISTERS>
DEV void wg_run(const krn_cu_expert_args &a)
{
    /* what the block was launched with is all that its warpgroups can share out */
    static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 65536 / BLOCKS / 384 / 8 * 8 * 3, "registers");
    SHARED_DYNAMIC(uint8_t, smem);
    const wg_experts<MODE, TYPE, TOKENS> e(a, smem);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < X_STAGES; i++) {
            barrier_init(barrier_of(&header::full, i), PRODUCERS);
            barrier_init(barrier_of(&header::empty, i), CONSUMERS / 32);
        }
        for (uint32_t i = 0; i < RAW_MOST; i++) {
            barrier_init(barrier_of(&header::raw_full, i), PRODUCERS);
            barrier_init(barrier_of(&header::raw_empty, i), CONSUMERS);
        }
    }
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        registers_take<CONSUMER_REGISTERS>();
        e.consume();
    } else {
        registers_give<PRODUCER_REGISTERS>();
        e.produce();
    }
}

#define EXPERTS(name, mode, type, tokens, blocks, consumer, producer)                                        \
    KERNEL(__launch_bounds__(CONSUMERS + PRODUCERS, blocks), name, krn_cu_expert_args)                       \
    {                                                                                                        \
        wg_run<mode, type, tokens, blocks, consumer, producer>(a);                                                   \
    }

EXPERTS(wg_gate_up_q4_k, GATE_UP, KRN_Q4_K, 256, 1, 224, 56)
EXPERTS(wg_gate_up_q4_k_few, GATE_UP, KRN_Q4_K, 64, 2, 96, 48)
EXPERTS(wg_down_q4_k, DOWN, KRN_Q4_K, 256, 1, 224, 56)
EXPERTS(wg_down_q4_k_few, DOWN, KRN_Q4_K, 64, 2, 96, 48)
EXPERTS(wg_gate_up, GATE_UP, ANY, 256, 1, 224, 56)
EXPERTS(wg_gate_up_few, GATE_UP, ANY, 64, 2, 96, 48)
EXPERTS(wg_down, DOWN, ANY, 256, 1, 224, 56)
EXPERTS(wg_down_few, DOWN, ANY, 64, 2, 96, 48)
EXPERTS(wg_dense, DENSE, ANY, 256, 1, 224, 56)
EXPERTS(wg_dense_few, DENSE, ANY, 64, 2, 96, 48)
EXPERTS(wg_dense_q4_k, DENSE, KRN_Q4_K, 256, 1, 224, 56)
EXPERTS(wg_dense_q4_k_few, DENSE, KRN_Q4_K, 64, 2, 96, 48)
