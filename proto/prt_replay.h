/* SPDX-License-Identifier: MIT */
/*
 * Replay table: the last replies by (epoch, id), so that a request that is
 * delivered twice acts once and is answered the same both times. Fixed number
 * of entries, the oldest is given up first. One thread.
 */
#ifndef PRT_REPLAY_H
#define PRT_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#define PRT_REPLAY_ENTRIES 256

struct prt_replay;

struct prt_replay *prt_replay_new(void);
void prt_replay_free(struct prt_replay **replay);

/* The remembered reply, valid until the next call, or NULL. */
const void *prt_replay_find(struct prt_replay *replay, uint64_t epoch, uint64_t id, size_t *ret_bytes);

/* Remembers a copy. Returns 0 or -ENOMEM. */
int prt_replay_add(struct prt_replay *replay, uint64_t epoch, uint64_t id, const void *reply, size_t bytes);

#endif
