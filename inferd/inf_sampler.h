/* SPDX-License-Identifier: MIT */
/*
 * From one row of logits to the next token id.
 *
 * Order, each step on the result of the one before:
 *   0. ids that are not allowed (inf_sampler_allow) are left out; then
 *      l + bias (inf_sampler_bias), then l - frequency * n - (n > 0 ? presence : 0)
 *      for an id written n times (inf_sampler_written)
 *   1. repeat penalty r over the distinct ids among the last repeat_last_n
 *      accepted ones: l > 0 ? l / r : l * r
 *   2. temperature t: l / t; t == 0 ends here with the greatest logit (ties:
 *      lowest id)
 *   3. top-k: the k greatest (ties: lower ids first)
 *   4. top-p: of those, renormalized, the shortest run from the top whose
 *      sum is at least p
 *   5. min-p: of those, the ones with at least min_p times the top one's
 *      probability
 *   6. one draw from what is left, renormalized
 * The random numbers are xoshiro256** seeded through splitmix64: the same
 * seed, parameters, accepted ids and logits give the same ids on every
 * machine with the same libm. One thread; no allocation after creation.
 */
#ifndef INF_SAMPLER_H
#define INF_SAMPLER_H

#include "shm/shm_error.h"

#include <stdint.h>

struct inf_sampler_params {
    float temperature;       /* >= 0; 0: greedy */
    int32_t top_k;           /* >= 0; 0: off */
    float top_p;             /* 0 < p <= 1; 1: off */
    float min_p;             /* 0 <= p <= 1; 0: off */
    float repeat_penalty;    /* > 0; 1: off */
    uint32_t repeat_last_n;  /* window; 0: off; at most INF_SAMPLER_WINDOW_MAX */
    float presence_penalty;  /* -2 .. 2; 0: off */
    float frequency_penalty; /* likewise */
    uint64_t seed;
};

#define INF_SAMPLER_WINDOW_MAX (1u << 20)

/* temperature 0.7, top-k 20, top-p 0.8, min-p 0, penalty 1.0 (off) over 64, seed 0. */
void inf_sampler_params_default(struct inf_sampler_params *params);

struct inf_sampler;

/* -EINVAL: a value out of range, as below. */
int inf_sampler_check(const struct inf_sampler_params *params, struct shm_error *err);

/* -EINVAL: a value out of range (the line names option, value and range);
 * -ENOMEM. n_vocab: values in each row of logits. */
int inf_sampler_create(const struct inf_sampler_params *params, uint32_t n_vocab, struct shm_error *err,
                       struct inf_sampler **ret_sampler);
void inf_sampler_destroy(struct inf_sampler **sampler);

/* Puts an id (of the prompt or the answer) into the repeat window. An id out
 * of range is ignored. inf_sampler_next() does not do it by itself. */
void inf_sampler_accept(struct inf_sampler *sampler, int32_t id);

/* The next id from n_vocab float32 logits (not written), or -EDOM where no
 * logit is a number (NaN counts as minus infinity, plus infinity as the
 * greatest float). */
int32_t inf_sampler_next(struct inf_sampler *sampler, const float *logits);

/* Counts an id of the answer for presence and frequency penalty. Mark and rewind leave these counts alone: a
 * sampler with these penalties serves one answer. */
void inf_sampler_written(struct inf_sampler *sampler, int32_t id);

/* Adds to an id's logits from now on; several calls add up. -ERANGE: no such id. Minus infinity forbids it.
 */
int inf_sampler_bias(struct inf_sampler *sampler, int32_t id, float bias);

/* Only ids whose bit (bits[id / 64] >> id % 64) is set may come next. Borrowed until the next call; NULL:
 * all. */
void inf_sampler_allow(struct inf_sampler *sampler, const uint64_t *bits);

/* Remembers window and generator; rewind goes back there, as often as wanted. For turns that fail half-way:
 * the next one must not depend on them. Before the first mark, rewind goes back to the start. */
void inf_sampler_mark(struct inf_sampler *sampler);
void inf_sampler_rewind(struct inf_sampler *sampler);

/* Empties the window, the counts of the answer, and seeds the generator again. */
void inf_sampler_reset(struct inf_sampler *sampler, uint64_t seed);

#endif
