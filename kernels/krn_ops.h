/* SPDX-License-Identifier: MIT */
/*
 * Private to kernels/: the inner loops that are built once per instruction
 * set (krn_ops.c, krn_ops_attn.c) and chosen at run time by krn_host.c.
 *
 * Numbers: every dot product over weights runs in 16 lanes (lane = k mod 16,
 * ascending k) that are then added as a fixed tree (lane i with i + 8, then
 * +4, +2, +1), whatever the width of the machine's vectors. exp() is one
 * polynomial everywhere.
 */
#ifndef KRN_OPS_H
#define KRN_OPS_H

#include <stdint.h>

#include "kernels/krn_host.h"

#define KRN_PANEL_TOKENS 6  /* most tokens of one tile call */
#define KRN_ATTN_ROWS    32 /* most query rows of one attn call */
#define KRN_ATTN_BLOCK   64 /* keys of one softmax step; blocks are absolute */

struct krn_ops {
    const char *isa;

    void (*dequant)(uint32_t ggml_id, const void *src, float *dst, uint64_t n);

    /* y[t][r] = dot(x[t], w + r * cols), t < nt <= KRN_PANEL_TOKENS, r < nr. */
    void (*tile)(const float *const *x, uint32_t nt, const float *w, uint32_t cols, uint32_t nr,
                 float *const *y);

    /* g[i] = silu(g[i]) * u[i] */
    void (*silu_mul)(float *g, const float *u, uint32_t n);

    /* Softmax of n finite values in place; x has room up to a multiple of 16. */
    void (*softmax)(float *x, uint32_t n);

    /* Rows of one KV head of a sequence, ascending positions: row i sees keys 0 .. pos[i]. block: as in
     * krn_kv_span. y[i] may be q[i]. */
    void (*attn)(const struct krn_kv *kv, const uint32_t *block, uint32_t kv_head, const float *const *q,
                 const uint32_t *pos, uint32_t rows, float *const *y);
};

extern const struct krn_ops krn_ops_baseline, krn_ops_v3, krn_ops_v4;

/* Between krn_ops.c and krn_ops_attn.c of one set. */
#define KRN_CAT2(a, b) a##b
#define KRN_CAT(a, b)  KRN_CAT2(a, b)
#ifdef KRN_ISA
void KRN_CAT(krn_attn_, KRN_ISA)(const struct krn_kv *kv, const uint32_t *block, uint32_t kv_head,
                                 const float *const *q, const uint32_t *pos, uint32_t rows, float *const *y);
#endif

#endif
