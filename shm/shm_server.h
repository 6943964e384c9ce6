/* SPDX-License-Identifier: MIT */
/*
 * Server segment: what `inferd serve` shows of its requests. A sealed memfd,
 * created before the first attach and kept over all of them, written by the
 * server's threads (under a lock of theirs), mapped read-only by tools, which
 * find its descriptor in the worker's control segment.
 */
#ifndef SHM_SERVER_H
#define SHM_SERVER_H

#include "shm/shm_counter.h"
#include "shm/shm_header.h"

#define SHM_SERVER_MAGIC "EXDSRV01"
#define SHM_SERVER_ALIGN 64

struct shm_server {
    struct shm_header header;
    _Atomic uint64_t oldest_ns; /* CLOCK_MONOTONIC when the oldest waiting request came; 0: none waits */
    uint64_t pad[7];
    struct shm_server_counters counters;
};
_Static_assert(offsetof(struct shm_server, counters) == 128, "shared layout");

/* How long the oldest waiting request has waited; 0: none waits. */
static inline uint64_t shm_server_oldest_ns(const struct shm_server *s, uint64_t now_ns)
{
    uint64_t since_ns = atomic_load_explicit(&s->oldest_ns, memory_order_relaxed);
    return since_ns && now_ns > since_ns ? now_ns - since_ns : 0;
}

#endif
