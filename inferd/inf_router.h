/* SPDX-License-Identifier: MIT */
/*
 * Router scores in double precision.
 *
 * Scores may be large beside their differences (hundreds, while the 8th and
 * 9th expert are 1e-5 apart), and one swapped expert changes the text. So the
 * products are summed in double and each token's greatest score is subtracted
 * before rounding to float32; a softmax does not notice. The order of
 * summation depends on the row length alone: the same bits in any chunk.
 */
#ifndef INF_ROUTER_H
#define INF_ROUTER_H

#include "kernels/krn_pool.h"

#include <stdint.h>

/* scores[t][e] = x[t] . w[e] - max over e; x [tokens][hidden], w [experts][hidden],
 * scores [tokens][experts]. hidden: a multiple of 16. */
void inf_router_scores(struct krn_pool *pool, const float *w, uint32_t experts, uint32_t hidden,
                       const float *x, uint32_t tokens, float *scores);

#endif
