/* SPDX-License-Identifier: MIT */
/*
 * Inside of the CUDA link, shared by krn_link_cuda.c (copies, signals, what
 * landed) and krn_link_cuda_open.c (its beginning and end).
 */
#ifndef KRN_LINK_CUDA_PRIV_H
#define KRN_LINK_CUDA_PRIV_H

#include "kernels/krn_link_cuda.h"

#include <stdatomic.h>

/* Written by the stream, in pinned memory: low halves of counters that the link keeps in full. */
struct krn_cuda_progress {
    _Atomic uint32_t copies;    /* landed; after the copies' bytes, by stream order */
    _Atomic uint32_t signalled; /* value of the last signal that was written to the flag */
    _Atomic uint32_t probe;
};

struct krn_cuda_link {
    struct krn_link base;
    struct krn_link_cuda_config config;
    char name[64];
    void *stream;
    krn_cuda_ptr allocation, flag;
    struct krn_cuda_progress *progress;
    krn_cuda_ptr progress_device;
    int broken; /* first failure; all operations return it */

    krn_cuda_ptr held_target[KRN_LINK_BATCH_MAX], held_source[KRN_LINK_BATCH_MAX];
    size_t held_bytes[KRN_LINK_BATCH_MAX];
    uint32_t held;

    uint64_t issued;            /* copies handed to the driver */
    uint64_t progress_sent;     /* copies that the last progress write covers */
    uint64_t landed;            /* copies, as last seen */
    uint64_t value, value_seen; /* of the last signal; of the last one seen done */
    uint32_t probes;

    uint64_t busy_ns_landed; /* busy until the last landing that was seen */
    uint64_t bytes, signals, busy_ns, busy_since_ns, first_ns, last_ns, moved_ns;
    uint64_t mark_bytes, mark_busy_ns;
    struct krn_link_cuda_counts counts;
};

extern const struct krn_link_ops krn_link_cuda_ops;

/* Tries the flag for the first time and notes what that took. -ETIMEDOUT after about 2 s. */
int krn_link_cuda_first_write(struct krn_cuda_link *link);

/* Gives back what was opened so far, and the link. */
void krn_link_cuda_release(struct krn_cuda_link *link);

#endif
