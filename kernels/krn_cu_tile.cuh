/* SPDX-License-Identifier: MIT */
/*
 * Tiles in shared memory and the tensor-core step that all matrix kernels
 * share: rows of 64 f16 values, their eight 16-byte pieces XOR-ed with the
 * row number so that neither stores nor ldmatrix meet in a bank.
 *
 * An output element is one chain of m16n8k16 steps over k = 0, 16, 32, ...
 * whatever the tile's size, its place in it or the kernel: that is what makes
 * a token's bits independent of its neighbours.
 */
#ifndef KRN_CU_TILE_CUH
#define KRN_CU_TILE_CUH

#include "kernels/krn_cu_common.cuh"

#define TILE_ROW_BYTES 128u

DEV uint32_t tile_offset(uint32_t row, uint32_t piece)
{
    return row * TILE_ROW_BYTES + ((piece ^ (row & 7)) << 4);
}

/*
 * How WM x WN warps share WM * MI * 16 tokens x 128 weight rows. Fragments of
 * 16 tokens are dealt out in turn, so that a tile with few tokens is spread
 * over the warps; fragments without tokens are not multiplied. PAIRED: the
 * tile's upper 64 rows belong to another matrix (up beside gate), and a warp
 * takes the same rows of both halves.
 */
template <int WM, int WN, int MI_, bool PAIRED> struct warp_tile {
    static constexpr int MI = MI_, NI = 128 / WN / 8, WARPS = WM * WN, THREADS = 32 * WARPS, TOKENS = WM * MI * 16;
    float acc[MI][NI][4];
    uint32_t wm, wn, lane, used; /* used: this warp's fragments that have tokens */

    __device__ __forceinline__ void init()
    {
        uint32_t warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        wm = warp / WN;
        wn = warp % WN;
    }

    __device__ __forceinline__ void begin(uint32_t rows)
    {
        uint32_t fragments = div_up(rows, 16);
        used = fragments > wm ? div_up(fragments - wm, WM) : 0;
#pragma unroll
        for (int m = 0; m < MI; m++)
#pragma unroll
            for (int n = 0; n < NI; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[m][n][i] = 0.0f;
    }

    /* First weight row of fragment n, and first token of fragment m. */
    __device__ __forceinline__ uint32_t row_n(int n) const
    {
        if (!PAIRED)
            return wn * NI * 8 + n * 8;
        return n < NI / 2 ? wn * NI * 4 + n * 8 : 64 + wn * NI * 4 + (n - NI / 2) * 8;
    }
    __device__ __forceinline__ uint32_t row_m(int m) const
    {
        return (m * WM + wm) * 16;
    }

    /* A tile begins on a multiple of 128, so a piece's number is XOR-ed into the address itself. */
    template <int N> __device__ __forceinline__ void multiply(uint32_t a, uint32_t b)
    {
        const uint32_t sw = lane & 7;
        a += (wm * 16 + (lane & 15)) * TILE_ROW_BYTES + (((lane >> 4) ^ sw) << 4);
        b += (wn * NI * (PAIRED ? 4 : 8) + (lane >> 4) * 8 + sw) * TILE_ROW_BYTES + (((lane >> 3 & 1) ^ sw) << 4);
#pragma unroll
        for (int kk = 0; kk < 4; kk++) {
            uint32_t af[N][4], bf[NI / 2][4];
#pragma unroll
            for (int m = 0; m < N; m++)
                load_matrix(af[m], (a ^ kk << 5) + m * WM * 16 * TILE_ROW_BYTES);
#pragma unroll
            for (int n = 0; n < NI / 2; n++) {
                const uint32_t row = PAIRED && n >= NI / 4 ? 64 + (n - NI / 4) * 16 : n * 16;
                load_matrix(bf[n], (b ^ kk << 5) + row * TILE_ROW_BYTES);
            }
#pragma unroll
            for (int m = 0; m < N; m++)
#pragma unroll
                for (int n = 0; n < NI; n++)
                    mma(acc[m][n], af[m], bf[n / 2][2 * (n & 1)], bf[n / 2][2 * (n & 1) + 1]);
        }
    }

    /* One step of 64: tokens at a, weights at b. */
    __device__ __forceinline__ void step(uint32_t a, uint32_t b)
    {
        if (used >= MI)
            return multiply<MI>(a, b);
        if constexpr (MI > 1)
            if (used == 1)
                return multiply<1>(a, b);
        if constexpr (MI > 2)
            if (used == 2)
                return multiply<2>(a, b);
        if constexpr (MI > 3)
            if (used == 3)
                return multiply<3>(a, b);
        static_assert(MI <= 4, "cases above");
    }
};

#endif
