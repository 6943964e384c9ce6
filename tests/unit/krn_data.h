/* SPDX-License-Identifier: MIT */
/* Random inputs for the kernel tests and benches: activations and weights of every storage type. */
#ifndef KRN_DATA_H
#define KRN_DATA_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/krn_quant.h"

struct krn_rng {
    uint64_t s;
};

static inline uint32_t krn_rand(struct krn_rng *g)
{
    g->s = g->s * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = g->s >> 29 ^ g->s;
    return (uint32_t)(x >> 16);
}

/* -1 .. 1 */
static inline float krn_rand_f(struct krn_rng *g)
{
    return (float)((double)krn_rand(g) / 2147483648.0 - 1.0);
}

static inline void *krn_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!p)
        abort();
    return p;
}

static inline float *krn_rand_floats(struct krn_rng *g, size_t n, float scale)
{
    float *x = krn_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = scale * krn_rand_f(g);
    return x;
}

/* A matrix of random bits with scales of about 0.01, so that every pattern of a block occurs. */
static inline void *krn_rand_weights(struct krn_rng *g, const struct krn_type *type, uint32_t rows,
                                     uint32_t cols)
{
    uint64_t row_bytes;
    if (krn_row_bytes(type, cols, &row_bytes) != 0)
        abort();
    size_t n = (size_t)(row_bytes * rows);
    uint8_t *w = krn_alloc(n);
    for (size_t i = 0; i < n; i++)
        w[i] = (uint8_t)krn_rand(g);
    for (size_t b = 0; b < n; b += type->block_bytes) {
        uint16_t h = (uint16_t)((krn_rand(g) & 0x83ff) | 0x2000),
                 h2 = (uint16_t)((krn_rand(g) & 0x03ff) | 0x1c00);
        float f = 0.1f * krn_rand_f(g);
        uint32_t u;
        memcpy(&u, &f, 4);
        uint16_t top = (uint16_t)(u >> 16);
        switch (type->ggml_id) {
        case KRN_F32:
            memcpy(w + b, &f, 4);
            break;
        case KRN_BF16:
            memcpy(w + b, &top, 2);
            break;
        case KRN_F16:
        case KRN_Q8_0:
        case KRN_Q4_0:
            memcpy(w + b, &h, 2);
            break;
        case KRN_Q6_K:
            memcpy(w + b + 208, &h2, 2);
            break;
        default:
            memcpy(w + b, &h2, 2);
            memcpy(w + b + 2, &h2, 2);
            break;
        }
    }
    return w;
}

#endif
