/* SPDX-License-Identifier: MIT */
/*
 * Claims: what memory each instance of a runtime directory holds, so that
 * several share one budget. Each expertd keeps one small text file,
 * `arena.claim`, in its instance's directory: sizes, its process, the arena's
 * path. It stays with a kept arena, and goes with it.
 *
 * A claim counts in full while its process lives (it may still be filling the
 * arena); after that as much as what it left has: the arena, one that was being
 * made, and parked keys and values, when it was killed. Adding a claim is done
 * under prt_claim_lock(), so that two that start at once are not both let in;
 * so is taking one away with what it claims (expertctl evict).
 */
#ifndef PRT_CLAIM_H
#define PRT_CLAIM_H

#include "proto/prt_path.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define PRT_CLAIM_MAX 64 /* instances looked at */

/* What a claim is for lies under these names where the arena is; the park, where that is no memory file
 * system, in the instance's directory. */
#define PRT_ARENA_FILE "arena"
#define PRT_ARENA_NEW  "arena.new" /* while its memory is allocated */
#define PRT_ARENA_LOCK "arena.lock"
#define PRT_PARK_FILE  "park"

struct prt_claim {
    char instance[PRT_INSTANCE_MAX + 1];
    uint64_t arena_bytes, park_bytes;
    uint32_t pid; /* of expertd, with its start time */
    uint64_t start;
    char arena_path[PRT_PATH_BYTES]; /* "": not known yet */
    /* as found by a look: */
    bool running;        /* that very process lives */
    uint64_t held_bytes; /* that count */
};

/* Waits up to timeout_ms for the lock of a runtime directory's claims; paths->runtime/expertd exists. The
 * caller closes ret_fd, which unlocks. -ETIMEDOUT and others with one line. */
int prt_claim_lock(const struct prt_paths *paths, uint32_t timeout_ms, int *ret_fd, struct shm_error *err);

/* Writes the claim of paths' instance (its fields but instance, running, held_bytes), whole at any time. */
int prt_claim_write(const struct prt_paths *paths, const struct prt_claim *claim, struct shm_error *err);

/* -ENOENT: none; -EBADMSG, -EPERM. */
int prt_claim_read(const struct prt_paths *paths, struct prt_claim *ret_claim, struct shm_error *err);

void prt_claim_remove(const struct prt_paths *paths);

/* Claims of all instances that hold something, by name, but that of `except` (NULL: none is left out).
 * Returns their number, at most PRT_CLAIM_MAX. What can't be read is left out. */
int prt_claim_list(const struct prt_paths *paths, const char *except,
                   struct prt_claim ret_claims[PRT_CLAIM_MAX]);

/* "a 1.0 GiB (runs), b 2.0 GiB (kept)", cut to n bytes, or "none". Returns the sum. */
uint64_t prt_claim_text(const struct prt_claim *claims, int n_claims, char *ret_text, size_t n);

#endif
