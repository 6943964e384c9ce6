/* SPDX-License-Identifier: MIT */
/*
 * Scheduler: what the next pass over the layers reads. Decisions only: no
 * engine, no clock, no memory of its own, so that each can be tested as it is.
 *
 * A round is one pass over pieces of all prompts that are being read, then one
 * step of all answers. Prompts share a pass evenly between clients; those of
 * one client go one after the other. While answers run, a pass is as long as
 * the time between two of their tokens allows (the gap), by the speed that was
 * measured; but never so short that most of it is what any pass costs.
 */
#ifndef SRV_SCHED_H
#define SRV_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#define SRV_PARALLEL_MAX 64
#define SRV_FIRST_TOKENS 256u /* beside answers, as long as no speed is known */

/* What passes took lately: a line through (tokens, ns), older ones count less. Zero: nothing yet. */
struct srv_speed {
    double n, t, tt, y, ty;
};
void srv_speed_note(struct srv_speed *speed, uint32_t tokens, uint64_t ns);

/* A pass of t tokens takes about *ret_fixed_ns + t * *ret_each_ns, neither negative. False: not known yet. */
bool srv_speed_fit(const struct srv_speed *speed, double *ret_fixed_ns, double *ret_each_ns);

struct srv_load {
    uint64_t rest;    /* tokens of all prompts that are still to be read */
    unsigned answers; /* that wait for their next token meanwhile */
    uint64_t step_ns; /* that a step of them takes */
    uint64_t gap_ns;  /* longest between two of their tokens; 0: any */
    uint32_t chunk;   /* most tokens in a pass */
    uint32_t floor;   /* shortest read that streams: shorter ones save little on a link */
};

/* Tokens of the next read, 0 only if nothing is left. Several passes that are needed are about equal. */
uint32_t srv_sched_tokens(const struct srv_load *load, const struct srv_speed *speed);

/* A prompt that is being read. */
struct srv_prompt {
    unsigned client; /* any number < SRV_PARALLEL_MAX, the same for the same client */
    uint64_t turn;   /* order of those of one client, and of clients where tokens can't be divided */
    uint32_t rest;   /* tokens, > 0 */
};

/* Shares `tokens` out: ret_tokens[i] <= prompt[i].rest, and nothing is left over while somebody wants more.
 * n <= SRV_PARALLEL_MAX. */
void srv_sched_share(const struct srv_prompt *prompt, unsigned n, uint32_t tokens, uint32_t *ret_tokens);

/* Tokens that a sequence may come to hold: admission sees to it that there is room for them all. Its last
 * token is never read. */
uint64_t srv_sched_need(uint64_t prompt, uint64_t max_tokens, uint64_t ctx);

#endif
