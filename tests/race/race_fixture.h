/* SPDX-License-Identifier: MIT */
/*
 * Fixture of the race tests: an arena of recognizable blobs, one worker's
 * control segment and ring, and the worker's side of the stream protocol
 * (shm/shm_worker.h) with every slot compared with the arena byte for byte.
 *
 * All memory is memfd-backed and shared, so that a fork()ed peer sees it.
 */
#ifndef RACE_FIXTURE_H
#define RACE_FIXTURE_H

#include "shm/shm_arena.h"
#include "shm/shm_worker.h"

#include <stdbool.h>
#include <stdint.h>

struct race_arena {
    struct shm_arena_view view;
    _Atomic uint8_t *ready; /* writable side of view.ready */
    void *base;
    size_t bytes;
    int fd;
};

/* Blobs of blob_bytes with contents that name layer, expert and position. all_ready: loaded. */
int race_arena_create(uint32_t layers, uint32_t experts, uint32_t blob_bytes, bool all_ready,
                      struct race_arena *ret_arena);
void race_arena_destroy(struct race_arena *arena);

struct race_worker {
    const struct race_arena *arena;
    struct shm_geometry geometry;
    struct shm_worker_view view;
    uint8_t *ring;
    uint64_t ring_bytes;
    void *control;
    size_t control_bytes;
    int control_fd, ring_fd;
    uint64_t seq, group_base, rng;
    int peer_pidfd; /* of the process that plays expertd, or -1 */
    bool slow;      /* random pauses of up to a millisecond, else only yields */
    bool cancelled_late;
    char error[256];
};

int race_worker_create(const struct race_arena *arena, uint32_t ring, uint64_t seed,
                       struct race_worker *ret_worker);
void race_worker_destroy(struct race_worker *worker);

struct race_stream {
    uint32_t tokens;
    uint32_t policy; /* effective, as the report must say: SHM_POLICY_* */
    uint32_t order;  /* likewise */
    uint32_t depth;
    bool predicts;
    uint64_t cancel_at; /* group of the stream at which the worker cancels; UINT64_MAX: never */
};

/* Runs one stream as a worker does. Returns 0; -EPIPE: the peer died; -ECANCELED: cancelled as asked;
 * -ESHUTDOWN: expertd ended it (result FAILED); -EBADMSG: a rule broken, -ETIMEDOUT: nothing came for
 * 20 s, both with worker->error. */
int race_worker_stream(struct race_worker *worker, const struct race_stream *stream);

uint64_t race_random(uint64_t *state);

/* Open descriptors and mappings of this process, to see leaks. name: only mappings with it in their path. */
int race_count_fds(void);
int race_count_maps(const char *name);

#endif
