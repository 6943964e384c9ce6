/* SPDX-License-Identifier: MIT */
/*
 * The obvious form of each operation: one thread, double accumulation, no
 * tiling. It defines what the devices compute up to rounding; tests compare
 * with it. Slow. Shapes and meanings as in krn_host.h. Never blocks;
 * allocates only small rows (aborts if that fails: test code).
 */
#ifndef KRN_REF_H
#define KRN_REF_H

#include "kernels/krn_host.h"

void krn_ref_matmul(const struct krn_mat *m, const float *x, uint32_t tokens, float *y);
void krn_ref_rmsnorm(const float *x, const float *weight, float eps, uint32_t tokens, uint32_t dim, float *y);

/* weight NULL: no norm; positions NULL: no rotation. */
void krn_ref_head_norm_rope(float *x, const float *weight, float eps, const uint32_t *positions, float base,
                            uint32_t tokens, uint32_t heads, uint32_t head_dim);

/* k, v: every key from position 0, [pos0 + tokens][kv_heads][head_dim], not the device's layout. */
void krn_ref_attention(const float *k, const float *v, uint32_t kv_heads, uint32_t head_dim, uint32_t pos0,
                       uint32_t tokens, uint32_t heads, const float *q, float *y);

void krn_ref_router(const float *logits, uint32_t tokens, uint32_t experts, uint32_t top_k, bool renorm,
                    uint32_t *ret_ids, float *ret_weights);
void krn_ref_experts(const struct krn_expert_job *jobs, uint32_t n_jobs, const float *x, uint32_t top_k,
                     uint32_t hidden, uint32_t width, float *out);
void krn_ref_combine(const float *out, const float *weights, uint32_t tokens, uint32_t top_k, uint32_t hidden,
                     float *y);

#endif
