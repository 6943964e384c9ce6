/* SPDX-License-Identifier: MIT */
/*
 * Matrix-vector products for generated tokens: bound by reading the weights,
 * and for most matrices of a model by the time until the first of them arrive.
 *
 * A warp takes items of four rows. Quantized rows go as they are, in 16-byte
 * pieces, through the warp's own stages of shared memory, so that much is under
 * way while little is held in registers; the first items are on their way
 * before the vector exists. Lane l sums units of 64 weights l, l + 32, ...,
 * then one tree. Experts' down projections are short: there four lanes take a
 * row and a warp eight experts, so that it can weigh and add their outputs in
 * order.
 */
#include "kernels/krn_cu_vector.cuh"

#define WARPS (GEMV_THREADS / 32)
#define ROWS  4
#define CHUNK KRN_CU_GEMV_CHUNK /* weights of a row in a stage */

DEV uint32_t lane_id()
{
    return threadIdx.x % 32;
}

/* Bytes of a row in a stage, with what may lie before and behind it; krn_cu_token.c has the same. */
DEV uint32_t row_slot(uint32_t type, uint32_t cols)
{
    return is_float(type) ? 0 : KRN_CU_ROW_SLOT(weight_bytes(type, cols < CHUNK ? cols : CHUNK));
}

/* n bytes from p, which is a multiple of 2, to shared memory by the warp; they begin at p % 16 there. */
DEV void fetch(uint32_t target, const uint8_t *p, uint32_t n)
{
    const uint32_t lead = (uint32_t)(uintptr_t)p & 15u;
    for (uint32_t i = lane_id() * 16; i < lead + n; i += 512)
        copy_async(target + i, p - lead + i, true);
}

/* A step's four rows: two matrices may take turns, a and b of two rows each. */
struct quad {
    const uint8_t *row[ROWS];
    uint32_t type[2]; /* of rows 0 and 1, of 2 and 3 */
};

DEV void fetch_quad(uint32_t target, uint32_t slot, const quad &q, uint32_t cols, uint32_t chunk)
{
    const uint32_t k = chunk * CHUNK, n = cols - k < CHUNK ? cols - k : CHUNK;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (!is_float(q.type[r / 2]))
            fetch(target + r * slot, q.row[r] + weight_bytes(q.type[r / 2], k), weight_bytes(q.type[r / 2], n));
}

template <uint32_t TYPE>
DEV void add_units(float (&sum)[ROWS], const uint8_t *stage, uint32_t slot, const quad &q, uint32_t chunk,
                   const x_view &v, uint32_t cols, int from, int end)
{
    const uint32_t unit = chunk * (CHUNK / 64) + lane_id();
    if (unit >= v.units)
        return;
    x_unit x;
    x_get<TYPE>(v, unit, x);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (r >= from && r < end) {
            const uint32_t lead = (uint32_t)(uintptr_t)(q.row[r] + weight_bytes(TYPE, chunk * CHUNK)) & 15u;
            sum[r] = __fadd_rn(
                sum[r], unit_dot<TYPE>(stage + r * slot + lead, unit % (CHUNK / 64), unit * 64 + 32 < cols, x));
        }
}

template <uint32_t TYPE>
DEV void add_floats(float (&sum)[ROWS], const quad &q, const x_view &v, uint32_t cols, int from, int end)
{
    const uint8_t *x = v.base + v.floats;
#pragma unroll 2
    for (uint32_t k = lane_id() * 8; k < cols; k += 256) {
        const float4 x0 = *(const float4 *)(x + k * 2), x1 = *(const float4 *)(x + v.units * 128 + k * 2);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r >= from && r < end)
                sum[r] = eight_dot<TYPE>(q.row[r], k, x0, x1, sum[r]);
    }
}

DEV void add_rows(float (&sum)[ROWS], const uint8_t *stage, uint32_t slot, const quad &q, uint32_t chunk,
                  const x_view &v, uint32_t cols, int from, int end)
{
    switch (q.type[from / 2]) {
    case KRN_Q4_K:
        add_units<KRN_Q4_K>(sum, stage, slot, q, chunk, v, cols, from, end);
        break;
    case KRN_Q5_K:
        add_units<KRN_Q5_K>(sum, stage, slot, q, chunk, v, cols, from, end);
        break;
    case KRN_Q6_K:
        add_units<KRN_Q6_K>(sum, stage, slot, q, chunk, v, cols, from, end);
        break;
    case KRN_Q4_0:
        add_units<KRN_Q4_0>(sum, stage, slot, q, chunk, v, cols, from, end);
        break;
    case KRN_Q8_0:
        add_units<KRN_Q8_0>(sum, stage, slot, q, chunk, v, cols, from, end);
        break;
    default: /* as a whole, from where they are */
        if (chunk)
            break;
        if (q.type[from / 2] == KRN_F16)
            add_floats<KRN_F16>(sum, q, v, cols, from, end);
        else if (q.type[from / 2] == KRN_BF16)
            add_floats<KRN_BF16>(sum, q, v, cols, from, end);
        else
            add_floats<KRN_F32>(sum, q, v, cols, from, end);
    }
}

/* The tree over lanes for four sums at a time: lanes 0, 8, 16 and 24 get rows 0, 1, 2 and 3; the others the
 * sum of the lane below that. */
DEV float sum_rows(const float (&sum)[ROWS])
{
    const bool upper = lane_id() & 16, odd = lane_id() & 8;
    float a = __fadd_rn(upper ? sum[2] : sum[0], __shfl_xor_sync(0xffffffffu, upper ? sum[0] : sum[2], 16));
    float b = __fadd_rn(upper ? sum[3] : sum[1], __shfl_xor_sync(0xffffffffu, upper ? sum[1] : sum[3], 16));
    float c = __fadd_rn(odd ? b : a, __shfl_xor_sync(0xffffffffu, odd ? a : b, 8));
#pragma unroll
    for (int d = 4; d; d >>= 1)
        c = __fadd_rn(c, __shfl_xor_sync(0xffffffffu, c, d));
    return c;
}

/* Items of a block's warps, dealt out one by one over all blocks so that each multiprocessor gets as many. */
struct place {
    uint32_t item, chunk;
};

DEV place first_place()
{
    return {threadIdx.x / 32 * gridDim.x + blockIdx.x, 0};
}

DEV void next_place(place &p, uint32_t chunks)
{
    if (++p.chunk == chunks) {
        p.chunk = 0;
        p.item += WARPS * gridDim.x;
    }
}

/* rows(item) says where an item's rows are; vector(bring) brings the vector, with barriers, and calls bring(),
 * which sends for the first stages, as soon as rows() knows them; store(item, row, sum) takes the result of row
 * 0..3 of an item, four lanes of a warp at a time, all lanes calling. */
template <class Rows, class Vector, class Store>
DEV void walk(uint8_t *stages, uint32_t n_stages, uint32_t slot, const uint32_t &items, const x_view &v, uint32_t cols,
              Rows rows, Vector vector, Store store)
{
    const uint32_t chunks = slot ? div_up(cols, CHUNK) : 1, stage_bytes = ROWS * slot;
    uint8_t *mine = stages + threadIdx.x / 32 * n_stages * stage_bytes;
    const uint32_t target = shared_address(mine);
    place at = first_place(), ahead = at;
    uint32_t next = 0;
    auto bring = [&] {
        if (slot && ahead.item < items)
            fetch_quad(target + next * stage_bytes, slot, rows(ahead.item), cols, ahead.chunk);
        copy_commit();
        next_place(ahead, chunks);
        next = next + 1 == n_stages ? 0 : next + 1;
    };
    vector([&] {
        for (uint32_t i = 0; i < n_stages; i++)
            bring();
    });
    uint32_t stage = 0;
    float sum[ROWS] = {0, 0, 0, 0};
    while (at.item < items) {
        const quad q = rows(at.item);
        if (n_stages == 1)
            copy_wait<0>();
        else
            copy_wait<1>();
        __syncwarp();
        if (q.type[0] == q.type[1]) {
            add_rows(sum, mine + stage * stage_bytes, slot, q, at.chunk, v, cols, 0, 4);
        } else {
            add_rows(sum, mine + stage * stage_bytes, slot, q, at.chunk, v, cols, 0, 2);
            add_rows(sum, mine + stage * stage_bytes, slot, q, at.chunk, v, cols, 2, 4);
        }
        __syncwarp();
        bring(); /* into the stage just read */
        if (at.chunk + 1 == chunks) {
            store(at.item, lane_id() / 8, sum_rows(sum));
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                sum[r] = 0.0f;
        }
        next_place(at, chunks);
        stage = stage + 1 == n_stages ? 0 : stage + 1;
    }
    copy_wait<0>();
}

/* Up to three matrices on one vector, whose items follow each other. */
KERNEL(__launch_bounds__(GEMV_THREADS, 2), gemv, krn_cu_gemv_args)
{
    SHARED_DYNAMIC(uint8_t, shared);
    const uint32_t token = blockIdx.y, cols = a.x.cols;
    const x_view v = x_of(shared, a.x);
    uint32_t items = 0, slot = 0;
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (i < (int)a.count) {
            items += div_up(a.m[i].rows, ROWS);
            slot = max(slot, row_slot(a.m[i].type, cols));
        }
    auto find = [&](uint32_t item, uint32_t &row) {
        int i = 0;
        while (i + 1 < (int)a.count && item >= div_up(a.m[i].rows, ROWS))
            item -= div_up(a.m[i++].rows, ROWS);
        row = item * ROWS;
        return i;
    };
    auto rows = [&](uint32_t item) {
        uint32_t row;
        const krn_cu_matrix &m = a.m[find(item, row)];
        quad q = {{}, {m.type, m.type}};
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) /* beyond the matrix: its last one, computed and not stored */
            q.row[r] = at<uint8_t>(m.data) + (uint64_t)(row + r < m.rows ? row + r : m.rows - 1) * m.row_bytes;
        return q;
    };
    auto vector = [&](auto bring) {
        bring();
        if (a.x.norm) {
            x_load_norm(
                shared, a.x, at<float>(a.x.x) + (uint64_t)token * cols, [] { grid_turn(); }, [] {});
        } else {
            grid_turn();
            x_load_f16(shared, a.x, at<uint16_t>(a.x.x) + (uint64_t)token * cols, 1);
            __syncthreads();
        }
    };
    auto store = [&](uint32_t item, uint32_t r, float s) {
        uint32_t row;
        const int i = find(item, row);
        if (lane_id() % 8 || row + r >= a.m[i].rows)
            return;
        float *y = at<float>(a.y[i]) + (uint64_t)token * a.m[i].rows + row + r;
        *y = a.add ? load_fresh(y) + s : s;
    };
    walk(shared + a.x.stride, a.stages, slot, items, v, cols, rows, vector, store);
}

/* Hidden rows of a token's experts: an item is two rows of gate and the same two of up. */
KERNEL(__launch_bounds__(GEMV_THREADS, 2), gate_up_gemv, krn_cu_expert_gemv_args)
{
    SHARED_DYNAMIC(uint8_t, shared);
    __shared__ uint64_t blobs[KRN_CU_TOP_K_MAX];
    const uint32_t token = blockIdx.y, cols = a.x.cols, width = a.a.rows, each = div_up(width, 2);
    const x_view v = x_of(shared, a.x);
    const uint32_t slot = max(row_slot(a.a.type, cols), row_slot(a.b.type, cols));
    auto rows = [&](uint32_t item) {
        const uint32_t row = item % each * 2, other = row + 1 < width ? row + 1 : row;
        const uint8_t *blob = at<uint8_t>(blobs[item / each]);
        quad q = {{}, {a.a.type, a.b.type}};
        if (!blob) { /* not to be run: reads the first one's and stores nothing */
            for (uint32_t s = 0; s < a.top_k && !blob; s++)
                blob = at<uint8_t>(blobs[s]);
        }
        q.row[0] = blob + a.a.data + (uint64_t)row * a.a.row_bytes;
        q.row[1] = blob + a.a.data + (uint64_t)other * a.a.row_bytes;
        q.row[2] = blob + a.b.data + (uint64_t)row * a.b.row_bytes;
        q.row[3] = blob + a.b.data + (uint64_t)other * a.b.row_bytes;
        return q;
    };
    auto store = [&](uint32_t item, uint32_t r, float s) {
        const float up = __shfl_xor_sync(0xffffffffu, s, 16); /* rows r and r + 2 */
        const uint32_t row = item % each * 2 + r, which = item / each;
        if (lane_id() % 8 == 0 && r < 2 && row < width && blobs[which])
            at<uint16_t>(a.y)[((uint64_t)token * a.top_k + which) * width + row] = to_f16(hidden_value(s, up));
    };
    uint32_t items = each * a.top_k;
    auto vector = [&](auto bring) {
        auto begin = [&] { /* where the experts are, and the first of their rows */
            for (uint32_t s = threadIdx.x; s < a.top_k; s += GEMV_THREADS)
                blobs[s] = load_fresh(at<uint64_t>(a.blobs) + (uint64_t)token * a.top_k + s);
            __syncthreads();
            uint64_t any = 0;
            for (uint32_t s = 0; s < a.top_k; s++)
                any |= blobs[s];
            if (!any)
                items = 0;
            bring();
        };
        if (a.x.norm) {
            x_load_norm(
                shared, a.x, at<float>(a.x.x) + (uint64_t)token * cols, [] { grid_turn(); }, begin);
        } else {
            grid_turn();
            begin();
            x_load_f16(shared, a.x, at<uint16_t>(a.x.x) + (uint64_t)token * cols, 1);
            __syncthreads();
        }
    };
    walk(shared + a.x.stride, a.stages, slot, items, v, cols, rows, vector, store);
}

/* ---- down: four lanes a row, eight experts a warp ---- */

#define SET 8u /* experts of a warp at a time */

template <uint32_t TYPE, int R>
DEV void add_down(float (&sum)[ROWS], const uint8_t *stage, uint32_t bytes, uint32_t chunk, const x_view &v, uint32_t cols)
{
    const uint32_t end = min(v.units, (chunk + 1) * (CHUNK / 64));
    for (uint32_t unit = chunk * (CHUNK / 64) + lane_id() % 4; unit < end; unit += 4) {
        x_unit x;
        x_get<TYPE>(v, unit, x);
#pragma unroll
        for (int r = 0; r < R; r++)
            sum[r] = __fadd_rn(sum[r], unit_dot<TYPE>(stage + r * bytes, unit % (CHUNK / 64), unit * 64 + 32 < cols, x));
    }
}

template <uint32_t TYPE, int R>
DEV void add_down_floats(float (&sum)[ROWS], const uint8_t *row, uint32_t bytes, const x_view &v, uint32_t cols)
{
    const uint8_t *x = v.base + v.floats;
#pragma unroll 2
    for (uint32_t k = lane_id() % 4 * 8; k < cols; k += 32) {
        const float4 x0 = *(const float4 *)(x + k * 2), x1 = *(const float4 *)(x + v.units * 128 + k * 2);
#pragma unroll
        for (int r = 0; r < R; r++)
            sum[r] = eight_dot<TYPE>(row + (uint64_t)r * bytes, k, x0, x1, sum[r]);
    }
}

/* An item: R rows of up to eight experts, fetched a chunk of columns at a time; more than one chunk only with
 * R 1. A model's rows are a multiple of 16. */
template <int R> DEV void down(const krn_cu_expert_gemv_args &a)
{
    SHARED_DYNAMIC(uint8_t, staged);
    __shared__ uint64_t blobs[KRN_CU_TOP_K_MAX];
    __shared__ float weights[KRN_CU_TOP_K_MAX];
    const uint32_t token = blockIdx.y, cols = a.x.cols, lane = lane_id(), type = a.a.type;
    const bool whole = !is_float(type), one = cols <= CHUNK;
    const uint32_t chunks = whole ? div_up(cols, CHUNK) : 1, row_bytes = a.a.row_bytes;
    const uint32_t segment = whole ? KRN_CU_SEGMENT(R * weight_bytes(type, one ? cols : CHUNK)) : 0;
    uint8_t *mine = staged + a.top_k * a.x.stride + threadIdx.x / 32 * SET * segment;
    const uint32_t target = shared_address(mine);

    /* The blobs were found by the kernel before the one that makes the hidden rows, which has waited for it. */
    uint64_t any = 0;
    for (uint32_t s = threadIdx.x; s < a.top_k; s += GEMV_THREADS) {
        blobs[s] = load_fresh(at<uint64_t>(a.blobs) + (uint64_t)token * a.top_k + s);
        weights[s] = a.weights ? load_fresh(at<float>(a.weights) + (uint64_t)token * a.top_k + s) : 0.0f;
    }
    __syncthreads();
    for (uint32_t s = 0; s < a.top_k; s++)
        any |= blobs[s];
    const uint32_t items = a.a.rows / R;
    auto bring = [&](uint32_t item, uint32_t first, uint32_t chunk) {
        const uint32_t n = weight_bytes(type, min(cols - chunk * CHUNK, CHUNK));
        for (uint32_t s = 0; s < SET && first + s < a.top_k; s++)
            if (blobs[first + s])
                fetch(target + s * segment,
                      at<uint8_t>(blobs[first + s] + a.a.data) + weight_bytes(type, chunk * CHUNK) +
                          (uint64_t)item * R * row_bytes,
                      (R - 1) * row_bytes + n);
    };
    uint32_t item = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    if (whole && item < items)
        bring(item, 0, 0);
    copy_commit();
    grid_turn();
    if (!any)
        return;
    x_load_f16(staged, a.x, at<uint16_t>(a.x.x) + (uint64_t)token * a.top_k * cols, a.top_k);
    __syncthreads();
    bool here = true; /* the first piece is under way */
    for (; item < items; item += WARPS * gridDim.x) {
        float total = 0.0f;
        for (uint32_t first = 0; first < a.top_k; first += SET) {
            const uint32_t s = first + lane / 4;
            const bool mine_too = s < a.top_k && blobs[s];
            float sum[ROWS] = {0, 0, 0, 0};
            const x_view v = x_of(staged + (s < a.top_k ? s : 0) * a.x.stride, a.x);
            const uint8_t *m = mine_too ? at<uint8_t>(blobs[s] + a.a.data) : nullptr;
            for (uint32_t chunk = 0; chunk < chunks; chunk++) {
                if (whole && !here)
                    bring(item, first, chunk);
                here = false;
                copy_commit();
                copy_wait<0>();
                __syncwarp();
                if (mine_too) {
                    const uint8_t *from = m + (uint64_t)item * R * row_bytes;
                    const uint32_t lead = (uint32_t)(uintptr_t)(from + weight_bytes(type, chunk * CHUNK)) & 15u;
                    const uint8_t *stage = mine + lane / 4 * segment + lead;
                    switch (type) {
                    case KRN_Q4_K:
                        add_down<KRN_Q4_K, R>(sum, stage, row_bytes, chunk, v, cols);
                        break;
                    case KRN_Q5_K:
                        add_down<KRN_Q5_K, R>(sum, stage, row_bytes, chunk, v, cols);
                        break;
                    case KRN_Q6_K:
                        add_down<KRN_Q6_K, R>(sum, stage, row_bytes, chunk, v, cols);
                        break;
                    case KRN_Q4_0:
                        add_down<KRN_Q4_0, R>(sum, stage, row_bytes, chunk, v, cols);
                        break;
                    case KRN_Q8_0:
                        add_down<KRN_Q8_0, R>(sum, stage, row_bytes, chunk, v, cols);
                        break;
                    case KRN_F16:
                        add_down_floats<KRN_F16, R>(sum, from, row_bytes, v, cols);
                        break;
                    case KRN_BF16:
                        add_down_floats<KRN_BF16, R>(sum, from, row_bytes, v, cols);
                        break;
                    default:
                        add_down_floats<KRN_F32, R>(sum, from, row_bytes, v, cols);
                    }
                }
                __syncwarp();
            }
            /* Four sums over four lanes: lane l gets row l % 4. */
            const bool upper = lane & 2, odd = lane & 1;
            float p = __fadd_rn(upper ? sum[2] : sum[0], __shfl_xor_sync(0xffffffffu, upper ? sum[0] : sum[2], 2));
            float q = __fadd_rn(upper ? sum[3] : sum[1], __shfl_xor_sync(0xffffffffu, upper ? sum[1] : sum[3], 2));
            float out = __fadd_rn(odd ? q : p, __shfl_xor_sync(0xffffffffu, odd ? p : q, 1)) * KRN_CU_HIDDEN_SCALE;
            const uint32_t r = lane % 4, row = item * R + r;
            const bool stored = r < R;
            if (!a.weights) {
                if (stored && mine_too)
                    at<float>(a.y)[((uint64_t)token * a.top_k + s) * a.a.rows + row] = out;
                continue;
            }
#pragma unroll
            for (uint32_t i = 0; i < SET; i++) {
                float o = __shfl_sync(0xffffffffu, out, i * 4 + r);
                if (first + i < a.top_k && blobs[first + i])
                    total = __fmaf_rn(weights[first + i], o, total);
            }
            if (first + SET >= a.top_k && lane < 4 && stored) {
                float *y = at<float>(a.y) + (uint64_t)token * a.a.rows + row;
                *y = __fadd_rn(load_fresh(y), total);
            }
        }
    }
    copy_wait<0>();
}

/* The rows of an item follow from the width: the sum of a row does not depend on it. */
KERNEL(__launch_bounds__(GEMV_THREADS, 2), down_gemv, krn_cu_expert_gemv_args)
{
    down<2>(a);
}
KERNEL(__launch_bounds__(GEMV_THREADS, 2), down_gemv_wide, krn_cu_expert_gemv_args)
{
    down<1>(a);
}
