/* SPDX-License-Identifier: MIT */
/*
 * What krn_cu.c and krn_cu_token.c know of each other: the first owns the
 * kernels of chunks and everything common, the second those of generated
 * tokens with their launches. Not for others.
 */
#ifndef KRN_CU_PRIV_H
#define KRN_CU_PRIV_H

#include <math.h>

#include "kernels/krn_cu.h"

struct krn_cu_token;

/* The device's context is current. */
int krn_cu_token_create(struct krn_cuda_device *device, struct shm_error *err,
                        struct krn_cu_token **ret_token);
void krn_cu_token_destroy(struct krn_cu_token **token);
struct krn_cu_token *krn_cu_token_of(struct krn_cu *cu);

/* krn_cu_experts of generated tokens: where they are, hidden rows, outputs (or, weighed, onto the residual).
 */
int krn_cu_token_experts(struct krn_cu_token *t, void *stream, const struct krn_cu_expert_run *run);

static inline float krn_cu_score_scale(uint32_t head_dim)
{
    return (float)(1.4426950408889634 / sqrt((double)head_dim));
}

#endif
