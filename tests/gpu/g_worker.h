/* SPDX-License-Identifier: MIT */
/*
 * A hand-made worker on a CUDA device for tests of the real expertd: control
 * segment, ring and flag, and the request that attaches them, right in
 * everything; the test spoils or runs what it likes.
 */
#ifndef G_WORKER_H
#define G_WORKER_H

#include "kernels/krn_cuda.h"
#include "tests/unit/daemon_kit.h"

struct worker {
    struct kit *kit;
    struct kit_worker w;
    struct krn_cuda_device *device;
    krn_cuda_ptr ring, flag;
    void *stream;
    struct shm_arena_view arena;
    uint8_t *slot; /* copy of one */
    uint64_t session, seq, group_base, wrong;
};

/* Ends the program when something fails. */
void worker_make(struct worker *k, struct kit *kit, struct krn_cuda_device *device, uint32_t ring);
void worker_free(struct worker *k);
int worker_attach(struct worker *k, struct shm_error *err);

/* kit_begin with a directory on tmpfs: mappings of other files can't be registered for writing. */
void worker_kit(struct kit *k, const char *expertd, const char *model);

#endif
