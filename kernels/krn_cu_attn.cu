/* SPDX-License-Identifier: MIT */
/*
 * Causal attention of a prompt over an f16 KV cache, k and v [kv_heads][ctx][head_dim], in which a sequence's
 * keys lie in blocks of KRN_CU_KV_BLOCK.
 *
 * 128 queries of a head a block, 64 keys a step at absolute multiples of 64,
 * online softmax. A query's result is one chain over the key blocks from 0;
 * blocks beyond its position add exact zeros, so the bits depend neither on
 * the chunk nor on its neighbours.
 */
#include "kernels/krn_cu_common.cuh"

#define THREADS  128
#define KEYS     ((int)KRN_CU_KEY_BLOCK)
#define QUERIES  ((int)KRN_CU_QUERY_BLOCK)
#define NEGATIVE __int_as_float(0xff800000)

/* Rows of HD f16, pieces swizzled. */
template <int HD> DEV uint32_t row_piece(uint32_t row, uint32_t piece)
{
    return row * (HD * 2) + ((piece ^ (row & 7)) << 4);
}

/* rows x HD from global rows `stride` bytes apart; rows from `valid` on are zero. */
template <int HD, int ROWS>
DEV void fetch_rows(uint32_t target, const uint8_t *source, uint64_t stride, uint32_t valid)
{
    constexpr int PIECES = HD / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        uint32_t r = i / PIECES, p = i % PIECES;
        copy_async(target + row_piece<HD>(r, p), source + (r < valid ? r : 0) * stride + p * 16, r < valid);
    }
}

template <int HD> DEV void attention(const krn_cu_attention_args &a)
{
    SHARED_DYNAMIC(uint8_t, smem);
    constexpr int ND = HD / 8, NS = KEYS / 8;
    constexpr uint32_t KV_BYTES = KEYS * HD * 2;
    const uint32_t head = blockIdx.x, q0 = (gridDim.y - 1 - blockIdx.y) * QUERIES; /* the longest first */
    const uint32_t kv_head = head / (a.heads / a.kv_heads);
    const uint32_t n_queries = a.tokens - q0 < QUERIES ? a.tokens - q0 : QUERIES;
    const uint32_t n_keys = a.position + q0 + n_queries, blocks = div_up(n_keys, KEYS);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t sq = shared_address(smem), sk = sq + QUERIES * HD * 2, sv = sk + 2 * KV_BYTES;
    const uint8_t *k = at<uint8_t>(a.k) + (uint64_t)kv_head * a.ctx * HD * 2;
    const uint8_t *v = at<uint8_t>(a.v) + (uint64_t)kv_head * a.ctx * HD * 2;
    const uint64_t q_stride = (uint64_t)a.heads * HD * 2;

    auto fetch = [&](uint32_t block) {
        const uint32_t whole = KRN_CU_KV_BLOCK / KEYS;
        const uint64_t row = at<uint32_t>(a.blocks)[block / whole] * whole + block % whole;
        const uint64_t offset = row * KEYS * HD * 2;
        const uint32_t valid = n_keys - block * KEYS;
        fetch_rows<HD, KEYS>(sk + (block & 1) * KV_BYTES, k + offset, HD * 2, valid);
        fetch_rows<HD, KEYS>(sv + (block & 1) * KV_BYTES, v + offset, HD * 2, valid);
    };
    fetch_rows<HD, QUERIES>(sq, at<uint8_t>(a.q) + (uint64_t)q0 * q_stride + head * HD * 2, q_stride,
                            n_queries);
    fetch(0);
    copy_commit();

    float o[2][ND][4], row_max[2][2], row_sum[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row_max[m][h] = NEGATIVE;
            row_sum[m][h] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < ND; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                o[m][n][i] = 0.0f;
    }
    const uint32_t first_row = warp * 32, position0 = a.position + q0 + first_row;
    const uint32_t sw = lane & 7;

    for (uint32_t block = 0; block < blocks; block++) {
        copy_wait<0>();
        __syncthreads();
        if (block + 1 < blocks)
            fetch(block + 1);
        copy_commit();
        if (block * KEYS > position0 + 31)
            continue; /* beyond every query of this warp */
        const uint32_t tk = sk + (block & 1) * KV_BYTES, tv = sv + (block & 1) * KV_BYTES;

        float s[2][NS][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[m][n][i] = 0.0f;
#pragma unroll
        for (int kk = 0; kk < HD / 16; kk++) {
            uint32_t qf[2][4];
            const uint32_t pq = ((2 * kk + (lane >> 4)) ^ sw) << 4, pk = ((2 * kk + (lane >> 3 & 1)) ^ sw) << 4;
#pragma unroll
            for (int m = 0; m < 2; m++)
                load_matrix(qf[m], sq + (first_row + m * 16 + (lane & 15)) * (HD * 2) + pq);
#pragma unroll
            for (int n = 0; n < NS / 2; n++) {
                uint32_t kf[4];
                load_matrix(kf, tk + (n * 16 + (lane >> 4) * 8 + (lane & 7)) * (HD * 2) + pk);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(s[m][2 * n], qf[m], kf[0], kf[1]);
                    mma(s[m][2 * n + 1], qf[m], kf[2], kf[3]);
                }
            }
        }
        if (block * KEYS + KEYS - 1 > position0) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < NS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        uint32_t key = block * KEYS + n * 8 + (lane & 3) * 2 + (i & 1);
                        if (key > position0 + m * 16 + (lane >> 2) + (i >> 1) * 8)
                            s[m][n][i] = NEGATIVE;
                    }
        }
        uint32_t pf[2][NS / 2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float minus[2], shrink[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = row_max[m][h];
#pragma unroll
                for (int n = 0; n < NS; n++)
                    top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                shrink[h] = exp2_fast((row_max[m][h] - top) * a.scale_log2);
                row_max[m][h] = top;
                minus[h] = -top * a.scale_log2;
                float sum = 0.0f; /* of this lane's keys; the four lanes of a row meet at the end */
#pragma unroll
                for (int n = 0; n < NS; n++)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; i++) {
                        s[m][n][i] = exp2_fast(__fmaf_rn(s[m][n][i], a.scale_log2, minus[h]));
                        sum = __fadd_rn(sum, s[m][n][i]);
                    }
                row_sum[m][h] = __fmaf_rn(row_sum[m][h], shrink[h], sum);
            }
#pragma unroll
            for (int n = 0; n < ND; n++) {
                o[m][n][0] *= shrink[0];
                o[m][n][1] *= shrink[0];
                o[m][n][2] *= shrink[1];
                o[m][n][3] *= shrink[1];
            }
#pragma unroll
            for (int kk = 0; kk < NS / 2; kk++) {
                pf[m][kk][0] = pack_f16(s[m][2 * kk][0], s[m][2 * kk][1]);
                pf[m][kk][1] = pack_f16(s[m][2 * kk][2], s[m][2 * kk][3]);
                pf[m][kk][2] = pack_f16(s[m][2 * kk + 1][0], s[m][2 * kk + 1][1]);
                pf[m][kk][3] = pack_f16(s[m][2 * kk + 1][2], s[m][2 * kk + 1][3]);
            }
        }
#pragma unroll
        for (int kk = 0; kk < NS / 2; kk++)
#pragma unroll
            for (int n = 0; n < ND / 2; n++) {
                uint32_t vf[4];
                load_matrix_trans(vf, tv + (kk * 16 + (lane & 15)) * (HD * 2) +
                                          (((2 * n + (lane >> 4)) ^ sw) << 4));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(o[m][2 * n], pf[m][kk], vf[0], vf[1]);
                    mma(o[m][2 * n + 1], pf[m][kk], vf[2], vf[3]);
                }
            }
    }
    uint32_t *y = at<uint32_t>(a.y);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = row_sum[m][h];
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
            float scale = 1.0f / sum;
            uint32_t row = first_row + m * 16 + (lane >> 2) + h * 8;
            if (row >= n_queries)
                continue;
            uint64_t base = ((uint64_t)(q0 + row) * a.heads + head) * HD / 2 + (lane & 3);
#pragma unroll
            for (int n = 0; n < ND; n++)
                y[base + n * 4] = pack_f16(o[m][n][2 * h] * scale, o[m][n][2 * h + 1] * scale);
        }
}

KERNEL(__launch_bounds__(THREADS, 2), attention_128, krn_cu_attention_args)
{
    attention<128>(a);
}
KERNEL(__launch_bounds__(THREADS, 2), attention_64, krn_cu_attention_args)
{
    attention<64>(a);
}
