/* SPDX-License-Identifier: MIT */
/*
 * Batch invariance of a device, for tests: sequences are read alone, then in
 * passes of shuffled pieces of several of them, their blocks strewn over the
 * pool; each row of logits must be the same bits. Failures end the program.
 */
#ifndef BATCH_CHECK_H
#define BATCH_CHECK_H

#include "inferd/inf_conversation.h"

struct batch_setup {
    uint32_t sequences;  /* up to 32 */
    uint32_t prompt_max; /* tokens */
    uint32_t answers;    /* generated tokens of each */
    uint32_t together;   /* most sequences in a pass */
    uint32_t seed;
    uint32_t
        from;   /* position of the first token: what lies before is made up, so that no time goes into it */
    bool mixed; /* generated tokens in passes of prompts too: a device with one kind of kernels */
    bool whole; /* as many and as much in every pass as there is: few passes */
    bool cuts;  /* sequences are cut back now and then */
};

/* Returns how many passes had several sequences. The engine's pool is empty before and after. */
uint32_t batch_check(struct inf_engine *engine, const struct batch_setup *setup);

#endif
