/* SPDX-License-Identifier: MIT */
/*
 * Answer: tokens sampled and read one after the other behind a prompt.
 *
 * The last token sampled is not read (nobody needs its logits); a stop token
 * never is. The caller keeps that in mind for the next turn.
 */
#ifndef INF_ANSWER_H
#define INF_ANSWER_H

#include "inferd/inf_conversation.h"
#include "inferd/inf_sampler.h"

enum inf_stop {
    INF_STOP_LENGTH,    /* n tokens were written */
    INF_STOP_TOKEN,     /* the model ended its answer */
    INF_STOP_CONTEXT,   /* the context is full */
    INF_STOP_CANCELLED, /* by the cancel flag; no error */
    INF_STOP_FAILED,
    INF_STOP_COUNT
};

const char *inf_stop_name(enum inf_stop stop);

struct inf_answer_options {
    uint32_t n;      /* most tokens to write */
    bool ignore_eos; /* stop tokens are tokens like any other */
    /* Each token as it is sampled, with the logits it came from; stop tokens are not shown. false: stop
     * (as if cancelled). */
    bool (*on_token)(void *ctx, int32_t id, const float *logits);
    /* Logits of each token read (one row), and the chunk's report; may be NULL. */
    void (*on_logits)(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits);
    void (*on_chunk)(void *ctx, const struct inf_chunk *chunk);
    void *ctx;
};

/* Goes on from the logits of the conversation's last token ([vocab], written
 * over). Appends to ret_ids what was written, without a stop token. *ret_pending:
 * the last id written, when it was not read, else -1. 0, or a negative errno with INF_STOP_FAILED. */
int inf_answer(struct inf_engine *engine, struct inf_conversation *conversation, struct inf_sampler *sampler,
               const struct inf_answer_options *options, float *logits, struct shm_error *err,
               struct inf_ids *ret_ids, int32_t *ret_pending, enum inf_stop *ret_stop);

#endif
