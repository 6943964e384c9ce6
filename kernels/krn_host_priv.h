/* SPDX-License-Identifier: MIT */
/* Private to the host device: its context and how work is cut into tasks. */
#ifndef KRN_HOST_PRIV_H
#define KRN_HOST_PRIV_H

#include "kernels/krn_host.h"
#include "kernels/krn_ops.h"

/* A de-quantized weight tile: up to 32 KiB, so that it stays in L1 while a
 * block of tokens passes by. Long rows: at least 16 of them, from L2. */
#define KRN_TILE_FLOATS     8192
#define KRN_TILE_FLOATS_MAX 32768
#define KRN_TILE_FLOATS_FEW 4096 /* for up to KRN_FEW_TOKENS: read once or twice */
#define KRN_FEW_TOKENS      8
#define KRN_TILE_ROWS_MAX   256
#define KRN_TOKEN_BLOCK     192 /* tokens for which a tile is de-quantized once; a multiple of the panel */

struct krn_host {
    struct krn_pool *pool;
    const struct krn_ops *ops;
    uint32_t threads, max_cols;
    size_t thread_floats; /* scratch of one thread: two weight tiles and the outputs of a panel */
    size_t tile_floats;
    float *scratch;
};

static inline uint32_t krn_div_up(uint32_t a, uint32_t b)
{
    return a / b + (a % b != 0);
}

static inline float *krn_host_tile(const struct krn_host *host, uint32_t thread, uint32_t which)
{
    return host->scratch + thread * host->thread_floats + which * host->tile_floats;
}

/* Rows of a weight tile: what fits, fewer where there would be too few tasks
 * (blocks = token blocks of the call, max_block the tokens of the largest) to
 * keep the threads busy, and where the tile is used for a few tokens only.
 * tiles: how many are in use at a time (gate and up: 2). */
uint32_t krn_host_tile_rows(const struct krn_host *host, uint32_t cols, uint32_t rows, uint32_t blocks,
                            uint32_t max_block, uint32_t tiles);

/* The tile's rows as float32: de-quantized into buf, or the data itself. */
const float *krn_host_tile_load(const struct krn_host *host, const struct krn_type *type, const void *data,
                                uint32_t cols, uint32_t row0, uint32_t n_rows, float *buf);

/* RMSNorm of one row; y may be x. dim multiple of 16. */
void krn_host_norm_row(const float *x, const float *weight, float eps, uint32_t dim, float *y);

#endif
