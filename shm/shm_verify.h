/* SPDX-License-Identifier: MIT */
/*
 * Recomputes the checksums of an arena's units (dense tensors, then blobs) and
 * compares them with its table: what the loader stores, what `expertctl verify`
 * and the tests check. Works on a checked view, reads only.
 */
#ifndef SHM_VERIFY_H
#define SHM_VERIFY_H

#include "shm/shm_arena.h"

#define SHM_UNIT_NAME_BYTES 96

/* First byte and length of a unit's data. unit < view->units. */
const uint8_t *shm_unit_bytes(const struct shm_arena_view *view, uint32_t unit, uint64_t *ret_bytes);

/* XXH3-64 of a unit's bytes. For a blob: from the gate part to the end of the last part. */
uint64_t shm_unit_sum(const struct shm_arena_view *view, uint32_t unit);

/* "tensor blk.0.attn_q.weight" or "layer 3 expert 17". */
void shm_unit_name(const struct shm_arena_view *view, uint32_t unit, char ret_name[SHM_UNIT_NAME_BYTES]);

struct shm_verify_result {
    uint32_t checked; /* units whose bytes were summed */
    uint32_t bad;     /* of these, with another sum than the table's */
    uint32_t missing; /* not loaded yet, not checked */
    uint32_t first_bad;
    uint64_t bytes;
};

/* Sums every ready unit on `threads` threads (1..64; 0: as many as there are
 * processors, at most 8) and blocks until done. done_bytes (may be NULL) counts
 * on while it runs; *cancel != 0 (may be NULL) ends it with -ECANCELED. Returns
 * 0; -EBADMSG with a line that names the first bad unit. *ret is
 * written in every case. */
int shm_verify(const struct shm_arena_view *view, uint32_t threads, _Atomic uint64_t *done_bytes,
               const atomic_int *cancel, struct shm_verify_result *ret, struct shm_error *err);

#endif
