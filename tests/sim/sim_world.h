/* SPDX-License-Identifier: MIT */
/*
 * World of the simulation: one schedule is a few streams of one worker, made
 * from a seed: shapes, residency, routing sets, speeds, interruptions. The
 * walk is the production code; link, consumer, publisher and loader are
 * simulated, and a seeded choice says who moves next, also in the middle of a
 * step of the walk.
 */
#ifndef SIM_WORLD_H
#define SIM_WORLD_H

#include "sim_checker.h"

struct sim_result {
    int invariant; /* 0: every rule held */
    char text[512];
};

/* What was exercised, summed over schedules, to show that the seeds reach it. */
struct sim_cover {
    uint64_t schedules, streams, steps, issued, dropped;
    uint64_t policy[4], order[4];
    uint64_t wait[EXD_STEP_COUNT];
    uint64_t cancelled, died, failed, compared;
};

/* Runs one schedule. Returns the invariant that was violated, or 0. */
int sim_schedule(uint64_t seed, bool verbose, struct sim_cover *cover, struct sim_result *ret_result);

#endif
