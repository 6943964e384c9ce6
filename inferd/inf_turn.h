/* SPDX-License-Identifier: MIT */
/*
 * Turn: read what is new, answer, show it, measure it. What `run` does once
 * and `chat` again and again; and the reports of it, for people and as JSON.
 */
#ifndef INF_TURN_H
#define INF_TURN_H

#include "inferd/inf_answer.h"
#include "inferd/inf_detok.h"
#include "inferd/inf_options.h"

#include <jansson.h>
#include <stdio.h>

/* Someone to talk to. Engine and options are borrowed, the rest is owned. */
struct inf_talk {
    struct inf_engine *engine;
    const struct inf_options *options;
    struct inf_conversation *conversation;
    struct inf_sampler *sampler;
    struct inf_detok *detok;
    float *logits;   /* [vocab] */
    int32_t pending; /* written, but not read yet; -1: none */
};

#define INF_TURN_CHUNKS 64 /* of which each is remembered */

struct inf_turn {
    uint32_t prompt_tokens; /* read before the answer */
    struct inf_ids generated;
    char *text; /* of the answer, UTF-8; free() */
    size_t text_bytes;
    uint64_t read_ns;   /* the prompt, up to its logits */
    uint64_t first_ns;  /* start of the read to the first token */
    uint64_t answer_ns; /* first token to the last */
    struct inf_stream_sum read, decode;
    uint32_t chunks; /* of the prompt; the first INF_TURN_CHUNKS of them: */
    struct inf_chunk chunk[INF_TURN_CHUNKS];
    uint64_t hash; /* XXH3-64 of all logits, in order, if asked for */
    enum inf_stop stop;
};

/* -EINVAL for sampling parameters out of range; -ENOMEM. */
int inf_talk_open(struct inf_engine *engine, const struct inf_options *options, struct shm_error *err,
                  struct inf_talk *ret_talk);
void inf_talk_close(struct inf_talk *talk);

/* Reads n ids (behind a pending one) and answers; writes text to stdout as it
 * comes unless the options ask for JSON. Cancelled while reading or failed at any
 * point: the conversation is as it was before the turn and the error is
 * returned. Cancelled while answering: 0, what was written is kept. */
int inf_turn_run(struct inf_talk *talk, const int32_t *ids, size_t n, struct inf_turn *ret_turn,
                 struct shm_error *err);
void inf_turn_clear(struct inf_turn *turn);

/* A few lines for people; memory and times too if verbose. */
void inf_turn_report(const struct inf_talk *talk, const struct inf_turn *turn, FILE *f);

/* The object of --json, and its "stream" alone; the caller decrefs. NULL: no memory. */
json_t *inf_turn_json(const struct inf_talk *talk, const struct inf_turn *turn);
json_t *inf_stream_sum_json(const struct inf_stream_sum *sum);

#endif
