/* SPDX-License-Identifier: MIT */
/*
 * Matrix products: f16 operands, float32 accumulation.
 *
 *   quantized  weights come raw into shared memory (cp.async), are made f16
 *              there while the tensor cores work on the step before; dense, or
 *              the experts of a plan (krn_cu_router.cu) by persistent blocks
 *   plain      f16 weights, three stages of cp.async; for many tokens, after
 *              krn_cu_expand where the weights are quantized
 *
 * Both give the same bits for the same weights.
 */
#include "kernels/krn_cu_dequant.cuh"
#include "kernels/krn_cu_tile.cuh"

enum mode { DENSE, GATE_UP, DOWN };

/* 64 weight rows of a tile: where they come from. Steps must not divide, so the chunk is worked out ahead. */
struct half_tile {
    const uint8_t *base; /* row 0 of the matrix */
    uint32_t row0, rows; /* first row of the half, rows of the matrix */
    uint32_t type, cols, row_bytes;
    uint32_t shift, chunk_bytes; /* weights of a chunk: 1 << shift */
};

DEV half_tile make_half(const krn_cu_matrix &m, const uint8_t *blob, uint32_t row0)
{
    const uint32_t shift = chunk_shift(m.type);
    return {blob + m.data, row0, m.rows, m.type, m.cols, m.row_bytes, shift, weight_bytes(m.type, 1u << shift)};
}

DEV const uint8_t *row_address(const half_tile &h, uint32_t r)
{
    uint32_t row = h.row0 + r < h.rows ? h.row0 + r : h.rows - 1; /* beyond: computed, never stored */
    return h.base + (uint64_t)row * h.row_bytes;
}

/* Raw bytes of the 64 rows from weight k on, if a chunk begins there. All threads. magic: 65536 / pieces + 1. */
template <int THREADS>
DEV void fetch_raw(const half_tile &h, uint32_t k, uint32_t stride, uint32_t pieces, uint32_t magic, uint32_t raw)
{
    const uint32_t chunk = 1u << h.shift, index = k >> h.shift;
    if (k >= h.cols || (k & (chunk - 1)) != 0)
        return;
    const uint32_t bytes = h.cols - k < chunk ? weight_bytes(h.type, h.cols - k) : h.chunk_bytes;
    const uint32_t first = index * h.chunk_bytes;
    raw += (index & 1) * KRN_CU_TILE_N * stride;
    for (uint32_t i = threadIdx.x; i < 64 * pieces; i += THREADS) {
        uint32_t r = i * magic >> 16, piece = i - r * pieces;
        const uint8_t *p = row_address(h, r) + first;
        uint32_t skew = (uint32_t)(uintptr_t)p & 15u;
        if (piece * 16 < skew + bytes)
            copy_async(raw + r * stride + piece * 16, p - skew + piece * 16, true);
    }
}

struct f16_sink {
    static constexpr bool RAW = false;
    uint8_t *row;
    uint32_t swizzle;
    __device__ __forceinline__ void operator()(int c, const float (&f)[8])
    {
        *(uint4 *)(row + (((uint32_t)c ^ swizzle) << 4)) = pack8(f);
    }
};

/* Weights k .. k + 63 of a row of the half, from raw (the row's place in the first chunk's buffer) to its row of
 * the f16 tile. low: the low bits of the row's address. */
DEV void expand_row(const half_tile &h, uint32_t low, uint32_t k, uint32_t stride, const uint8_t *raw, uint8_t *tile,
                    uint32_t swizzle, dequant_part part)
{
    const uint32_t index = k >> h.shift, skew = (low + index * h.chunk_bytes) & 15u;
    f16_sink sink = {tile, swizzle};
    dequant64(h.type, raw + (index & 1) * KRN_CU_TILE_N * stride + skew, k & ((1u << h.shift) - 1),
              h.cols - k < 64 ? h.cols - k : 64, sink, part);
}

/* Shared memory of a tile: two stages of tokens, two of f16 weights, two chunks of raw ones. */
template <class T> struct stages {
    static constexpr uint32_t A_BYTES = T::TOKENS * TILE_ROW_BYTES, B_BYTES = KRN_CU_TILE_N * TILE_ROW_BYTES;
    uint8_t *b, *raw;
    uint32_t a_address, b_address, raw_address, stride, pieces, magic;
    __device__ __forceinline__ stages(uint8_t *smem, uint32_t raw_stride)
        : b(smem + 2 * A_BYTES), raw(b + 2 * B_BYTES),
          a_address(shared_address(smem)), b_address(shared_address(b)), raw_address(shared_address(raw)),
          stride(raw_stride), pieces(raw_stride / 16), magic(65536u / pieces + 1)
    {
    }
    __device__ __forceinline__ void fetch(const half_tile &lower, const half_tile &upper, uint32_t step) const
    {
        fetch_raw<T::THREADS>(lower, step * KRN_CU_TILE_K, stride, pieces, magic, raw_address);
        fetch_raw<T::THREADS>(upper, step * KRN_CU_TILE_K, stride, pieces, magic, raw_address + 64 * stride);
    }
};

/*
 * One tile of tokens x weights over all of k; the raw weights of step 0 were
 * fetched by the caller. x_piece: a thread's token rows, as offsets of 16
 * bytes. While a step is multiplied the next one's weights become f16; half
 * of the warps do that first and the others last, so that the tensor cores
 * and the rest of the multiprocessor are busy at the same time.
 */
template <class T>
DEV void run_tile(T &t, const half_tile &lower, const half_tile &upper, const uint8_t *x,
                  const uint32_t (&x_piece)[T::TOKENS * 8 / T::THREADS], uint32_t rows, const stages<T> &s)
{
    constexpr int PIECES = T::TOKENS * 8 / T::THREADS, EACH = T::THREADS / 8;
    const uint32_t cols = lower.cols, steps = div_up(cols, KRN_CU_TILE_K);
    const uint32_t tid = threadIdx.x, piece = tid & 7;
    /* row numbers go up by multiples of 8 with i, so the swizzle stays */
    const uint32_t a_target = s.a_address + tile_offset(tid / 8, piece);
    const bool first = T::WARPS > 4 && tid >= 128; /* the second warp of each scheduler */

    auto fetch_x = [&](uint32_t step) {
        uint32_t k = step * KRN_CU_TILE_K + piece * 8;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (i * EACH < (int)rows)
                copy_async(a_target + (step & 1) * s.A_BYTES + i * EACH * TILE_ROW_BYTES,
                           x + (uint64_t)(x_piece[i] + (k < cols ? k / 8 : 0)) * 16, k < cols);
    };
    /* a thread's row of weights: a whole unit of 64, or half of it where there are threads enough */
    const uint32_t row = tid & 127;
    const bool low = row < 64;
    const half_tile mine = {low ? lower.base : upper.base,   low ? lower.row0 : upper.row0,
                            low ? lower.rows : upper.rows,   low ? lower.type : upper.type,
                            low ? lower.cols : upper.cols,   low ? lower.row_bytes : upper.row_bytes,
                            low ? lower.shift : upper.shift, low ? lower.chunk_bytes : upper.chunk_bytes};
    const uint32_t low_bits = (uint32_t)(uintptr_t)row_address(mine, row & 63);
    const uint8_t *const raw = s.raw + row * s.stride;
    uint8_t *const tile_row = s.b + row * TILE_ROW_BYTES;
    const dequant_part part = T::THREADS == 128 ? WHOLE : tid < 128 ? FIRST_HALF : SECOND_HALF;
    auto expand = [&](uint32_t step) {
        expand_row(mine, low_bits, step * KRN_CU_TILE_K, s.stride, raw, tile_row + (step & 1) * s.B_BYTES, row & 7,
                   part);
    };

    t.begin(rows);
    /* Step -1 fills the pipeline: the weights of step 0 become f16 while nothing is multiplied yet. */
    for (int step = -1; step < (int)steps; step++) {
        const uint32_t next = step + 1;
        copy_wait<0>();
        __syncthreads();
        if (next < steps)
            fetch_x(next);
        if (next + 1 < steps)
            s.fetch(lower, upper, next + 1);
        copy_commit();
#pragma unroll 1
        for (int phase = 0; phase < 2; phase++) {
            if ((phase == 0) == first) {
                if (next < steps)
                    expand(next);
            } else if (step >= 0) {
                t.step(s.a_address + (step & 1) * s.A_BYTES, s.b_address + (step & 1) * s.B_BYTES);
            }
        }
    }
    __syncthreads(); /* what comes next overwrites */
}

template <class T> DEV void dense_quantized(const krn_cu_gemm_args &a)
{
    SHARED_DYNAMIC(uint8_t, smem);
    constexpr uint32_t BM = T::TOKENS;
    constexpr int PIECES = BM * 8 / T::THREADS;
    const stages<T> s(smem, a.raw_stride);
    T t;
    t.init();
    const uint32_t m0 = blockIdx.y * BM, n0 = blockIdx.x * KRN_CU_TILE_N;
    const uint32_t rows = a.tokens - m0 < BM ? a.tokens - m0 : BM;
    uint32_t x_piece[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        uint32_t r = threadIdx.x / 8 + T::THREADS / 8 * i;
        x_piece[i] = (m0 + (r < rows ? r : rows - 1)) * (a.m.cols / 8);
    }
    const half_tile lower = make_half(a.m, nullptr, n0), upper = make_half(a.m, nullptr, n0 + 64);
    s.fetch(lower, upper, 0);
    copy_commit();
    run_tile(t, lower, upper, at<uint8_t>(a.x), x_piece, rows, s);
    float *y = at<float>(a.y);
#pragma unroll
    for (int m = 0; m < t.MI; m++)
#pragma unroll
        for (int n = 0; n < t.NI; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t row = t.row_m(m) + (t.lane >> 2) + (i >> 1) * 8;
                uint32_t col = n0 + t.row_n(n) + (t.lane & 3) * 2 + (i & 1);
                if (row < rows && col < a.m.rows) {
                    float *p = y + (uint64_t)(m0 + row) * a.m.rows + col;
                    *p = a.add ? *p + t.acc[m][n][i] : t.acc[m][n][i];
                }
            }
}

/* A piece of an expert's work. */
struct expert_tile {
    half_tile lower, upper;
    uint32_t position, rows, n0; /* first of its sorted slots, how many, first weight row */
};

/* Blocks walk over (tile of an expert's tokens, tile of weight rows). */
template <class T, int MODE> DEV void experts(const krn_cu_expert_args &a)
{
    SHARED_DYNAMIC(uint8_t, smem);
    constexpr bool PAIRED = MODE == GATE_UP;
    constexpr uint32_t OUT = PAIRED ? 64 : KRN_CU_TILE_N, BM = T::TOKENS;
    constexpr int PIECES = BM * 8 / T::THREADS;
    const uint32_t *slots = at<uint32_t>(a.slots), *tiles = at<uint32_t>(a.tiles);
    const krn_cu_job *jobs = at<krn_cu_job>(a.jobs);
    const uint32_t n_tiles = div_up(a.a.rows, OUT), total = at<krn_cu_plan_head>(a.head)->tiles * n_tiles;
    const stages<T> s(smem, a.raw_stride);
    T t;
    t.init();
    auto look_up = [&](uint32_t tile) {
        expert_tile e;
        const uint32_t which = tiles[tile / n_tiles];
        const krn_cu_job job = jobs[which >> 16];
        const uint32_t m0 = (which & 0xffff) * BM;
        const uint8_t *blob = at<uint8_t>(job.blob);
        e.n0 = tile % n_tiles * OUT;
        e.position = job.first + m0;
        e.rows = job.count - m0 < BM ? job.count - m0 : BM;
        e.lower = make_half(a.a, blob, e.n0);
        e.upper = make_half(a.b, blob, PAIRED ? e.n0 : e.n0 + 64);
        return e;
    };
    if (blockIdx.x >= total)
        return;
    expert_tile next = look_up(blockIdx.x);
    s.fetch(next.lower, next.upper, 0);
    copy_commit();
    for (uint32_t tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const expert_tile now = next;
        uint32_t x_piece[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            uint32_t r = threadIdx.x / 8 + T::THREADS / 8 * i, position = now.position + (r < now.rows ? r : now.rows - 1);
            x_piece[i] = (PAIRED ? slots[position] / a.top_k : position) * (a.a.cols / 8);
        }
        run_tile(t, now.lower, now.upper, at<uint8_t>(a.x), x_piece, now.rows, s);
        if (tile + gridDim.x < total) { /* its first weights come while this tile is stored */
            next = look_up(tile + gridDim.x);
            s.fetch(next.lower, next.upper, 0);
            copy_commit();
        }
        const uint32_t rows = now.rows, n0 = now.n0;
#pragma unroll
        for (int m = 0; m < t.MI; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t row = t.row_m(m) + (t.lane >> 2) + h * 8, position = now.position + row;
                if (row >= rows)
                    continue;
                if (PAIRED) {
                    uint32_t *y = at<uint32_t>(a.y) + ((uint64_t)position * a.a.rows + n0) / 2;
#pragma unroll
                    for (int n = 0; n < t.NI / 2; n++) {
                        uint32_t col = t.row_n(n) + (t.lane & 3) * 2;
                        const float *g = &t.acc[m][n][2 * h], *u = &t.acc[m][n + t.NI / 2][2 * h];
                        if (n0 + col < a.a.rows)
                            y[col / 2] = pack_f16(hidden_value(g[0], u[0]), hidden_value(g[1], u[1]));
                    }
                } else {
                    float *y = at<float>(a.y) + (uint64_t)slots[position] * a.a.rows + n0;
#pragma unroll
                    for (int n = 0; n < t.NI; n++) {
                        uint32_t col = t.row_n(n) + (t.lane & 3) * 2;
                        if (n0 + col < a.a.rows)
                            *(float2 *)(y + col) = make_float2(t.acc[m][n][2 * h] * KRN_CU_HIDDEN_SCALE,
                                                               t.acc[m][n][2 * h + 1] * KRN_CU_HIDDEN_SCALE);
                    }
                }
            }
    }
}

#define STAGES 3

typedef warp_tile<2, 2, 4, false> plain_tile;

/* f16 weights x f16 tokens, 128 x 128. */
DEV void dense_plain(const krn_cu_gemm_args &a)
{
    SHARED_DYNAMIC(uint8_t, smem);
    constexpr uint32_t BYTES = 128 * TILE_ROW_BYTES;
    plain_tile t;
    t.init();
    const uint32_t m0 = blockIdx.x * 128, n0 = blockIdx.y * 128, cols = a.m.cols;
    const uint32_t rows = a.tokens - m0 < 128 ? a.tokens - m0 : 128;
    t.begin(rows);
    const uint32_t tid = threadIdx.x, piece = tid & 7, steps = div_up(cols, KRN_CU_TILE_K);
    const uint32_t s0 = shared_address(smem), target = s0 + tile_offset(tid / 8, piece);
    uint32_t x_piece[8], w_piece[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t r = tid / 8 + 16 * i;
        x_piece[i] = (m0 + (r < rows ? r : rows - 1)) * (cols / 8);
        w_piece[i] = (n0 + r < a.m.rows ? n0 + r : a.m.rows - 1) * (cols / 8);
    }
    const uint8_t *x = at<uint8_t>(a.x), *w = at<uint8_t>(a.m.data);
    auto fetch = [&](uint32_t step) {
        uint32_t k = step * KRN_CU_TILE_K + piece * 8, stage = step % STAGES * 2 * BYTES;
        bool valid = k < cols;
        uint32_t k8 = valid ? k / 8 : 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            copy_async(target + stage + i * 16 * TILE_ROW_BYTES, x + (uint64_t)(x_piece[i] + k8) * 16, valid);
            copy_async(target + stage + BYTES + i * 16 * TILE_ROW_BYTES, w + (uint64_t)(w_piece[i] + k8) * 16,
                       valid);
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if ((uint32_t)s < steps)
            fetch(s);
        copy_commit();
    }
    for (uint32_t step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps)
            fetch(step + STAGES - 1);
        copy_commit();
        uint32_t stage = s0 + step % STAGES * 2 * BYTES;
        t.step(stage, stage + BYTES);
    }
    float *y = at<float>(a.y);
    const bool pairs = a.m.rows % 2 == 0;
#pragma unroll
    for (int m = 0; m < t.MI; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t row = t.row_m(m) + (t.lane >> 2) + h * 8;
            if (row >= rows)
                continue;
#pragma unroll
            for (int n = 0; n < t.NI; n++) {
                uint32_t col = n0 + t.row_n(n) + (t.lane & 3) * 2;
                float2 v = make_float2(t.acc[m][n][2 * h], t.acc[m][n][2 * h + 1]);
                float *p = y + (uint64_t)(m0 + row) * a.m.rows + col;
                if (pairs && col < a.m.rows) {
                    if (a.add) {
                        float2 o = *(const float2 *)p;
                        v.x = o.x + v.x;
                        v.y = o.y + v.y;
                    }
                    *(float2 *)p = v;
                } else {
                    if (col < a.m.rows)
                        p[0] = a.add ? p[0] + v.x : v.x;
                    if (col + 1 < a.m.rows)
                        p[1] = a.add ? p[1] + v.y : v.y;
                }
            }
        }
}

KERNEL(__launch_bounds__(128, 2), dense, krn_cu_gemm_args)
{
    dense_plain(a);
}
KERNEL(__launch_bounds__(128, 2), dense_few, krn_cu_gemm_args)
{
    dense_quantized<warp_tile<1, 4, 2, false>>(a);
}
KERNEL(__launch_bounds__(256, 1), gate_up, krn_cu_expert_args)
{
    experts<warp_tile<4, 2, 4, true>, GATE_UP>(a);
}
KERNEL(__launch_bounds__(128, 2), gate_up_few, krn_cu_expert_args)
{
    experts<warp_tile<1, 4, 2, true>, GATE_UP>(a);
}
KERNEL(__launch_bounds__(256, 1), down, krn_cu_expert_args)
{
    experts<warp_tile<4, 2, 4, false>, DOWN>(a);
}
KERNEL(__launch_bounds__(128, 2), down_few, krn_cu_expert_args)
{
    experts<warp_tile<1, 4, 2, false>, DOWN>(a);
}
