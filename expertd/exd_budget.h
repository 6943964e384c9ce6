/* SPDX-License-Identifier: MIT */
/*
 * Budget: the memory that all instances of a runtime directory may hold
 * together (--memory-budget): arenas, also those kept of instances that do not
 * run, and parked keys and values. Says who holds what (proto/prt_claim.h).
 */
#ifndef EXD_BUDGET_H
#define EXD_BUDGET_H

#include "proto/prt_path.h"

#include <stdbool.h>
#include <stdint.h>

struct exd_budget {
    const struct prt_paths *paths; /* NULL: nothing was claimed */
    uint64_t limit_bytes;          /* 0: no budget */
    uint64_t arena_bytes, park_bytes;
};

/* Claims memory for the arena and the park. park_auto: the park gets at most an eighth of what the budget
 * leaves (park_bytes is 0 then). -ENOMEM when it does not fit, with what is needed, the budget, and who holds
 * what. Without a budget a claim that can't be written is no error. Blocks for the lock, 10 s at most. */
int exd_budget_claim(const struct prt_paths *paths, uint64_t limit_bytes, uint64_t arena_bytes,
                     uint64_t park_bytes, bool park_auto, struct exd_budget *ret_budget,
                     struct shm_error *err);

/* Says where the arena is and how large the park became. */
void exd_budget_settle(struct exd_budget *budget, const char *arena_path, uint64_t park_bytes);

/* The claim goes unless the arena's file is still there. After the arena was closed. */
void exd_budget_release(struct exd_budget *budget);

/* Adds to an error for lack of memory or space who holds some. */
void exd_budget_explain(const struct prt_paths *paths, struct shm_error *err);

#endif
