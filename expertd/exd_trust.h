/* SPDX-License-Identifier: MIT */
/*
 * Trust: how often an expectation came true. An expert that is expected by
 * many tokens is routed for certain, one expected by a single token may not
 * be; how many are enough depends on model and text, so it is counted: for
 * each kind of expectation and each power of two of expected tokens, how many
 * experts there were and how many of them turned out routed.
 */
#ifndef EXD_TRUST_H
#define EXD_TRUST_H

#include "shm/shm_mask.h"

#include <stdint.h>

/* Where a row of expected counts comes from. */
enum exd_expectation {
    EXD_EXPECT_NOTHING, /* one will come */
    EXD_EXPECT_RECENT,
    EXD_EXPECT_FIRST, /* layer 0's prediction, from the embeddings: no attention came before */
    EXD_EXPECT_PREDICTION,
    EXD_EXPECT_KNOWN, /* told by a measurement */
    EXD_EXPECT_COUNT
};

#define EXD_TRUST_BINS 6u /* 1, 2, 4, 8, 16, 32 tokens or more */

struct exd_trust_counts {
    uint32_t all, routed; /* experts of the layers published lately in this stream, however expected */
    uint32_t seen[EXD_EXPECT_COUNT][EXD_TRUST_BINS], right[EXD_EXPECT_COUNT][EXD_TRUST_BINS];
};

/* What is believed of a worker that has read nothing. */
void exd_trust_begin(struct exd_trust_counts *counts);

/* A stream begins: how much of a layer is routed depends on its tokens. */
void exd_trust_stream(struct exd_trust_counts *counts);

/* Smallest expected count from which on an expectation of this kind is as good as certain; 0: nearly every
 * expert of the layers before was routed, so that whatever is expected is (not where 0 expected tokens say
 * more: EXD_EXPECT_PREDICTION); UINT32_MAX: none. */
uint32_t exd_trust_sure(const struct exd_trust_counts *counts, enum exd_expectation from);

/* A layer was published: expected [experts] (NULL: nobody asked) against what was routed; residents are of no
 * interest. */
void exd_trust_learn(struct exd_trust_counts *counts, enum exd_expectation from, const uint32_t *expected,
                     const struct shm_mask *routed, const struct shm_mask *resident, uint32_t experts);

#endif
