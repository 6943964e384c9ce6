/* SPDX-License-Identifier: MIT */
/*
 * A worker's surroundings inside one process, for tests: an arena in private
 * memory, filled from a GGUF file, and a session with the real issuer and host
 * link over it. No daemon, no files but the model. Failures end the test.
 */
#ifndef WORKER_FIXTURE_H
#define WORKER_FIXTURE_H

#include "expertd/exd_issuer.h"
#include "inferd/inf_conversation.h"
#include "kernels/krn_link_host.h"

struct fix_arena {
    void *base;
    uint64_t bytes;
    struct shm_arena_view view;
};

/* path: absolute, or relative to the source tree. */
void fix_arena_load(const char *path, struct fix_arena *ret_arena);
void fix_arena_free(struct fix_arena *arena);

struct fix_setup {
    uint32_t ring, policy, order, depth, floor, resident;
    double link_gbps;
    uint32_t threads, chunk, kv_tokens;
    bool poison;
};

/* An engine tied to an in-process issuer instead of a daemon. */
struct fix_worker {
    struct inf_engine engine;
    struct krn_link *link;
    struct exd_issuer *issuer;
    _Atomic bool cancel;
    _Atomic uint32_t faults;
    char fault[256];
};

void fix_worker_start(const struct fix_arena *arena, const struct fix_setup *setup, struct fix_worker *w);
void fix_worker_stop(struct fix_worker *w);

/* The source tree. */
const char *fix_src(void);

#endif
