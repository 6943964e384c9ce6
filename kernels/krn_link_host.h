/* SPDX-License-Identifier: MIT */
/*
 * Host link: a thread that copies blobs into a ring in shared memory, in
 * order, optionally paced like a real link, so that link-bound behaviour can
 * be studied on any machine (DESIGN 9).
 *
 * Pacing: copy i occupies the link for latency + bytes / rate, starting when
 * it was enqueued or when copy i - 1 landed, whichever is later. Landing times
 * follow that schedule, so a late wake-up never adds up.
 */
#ifndef KRN_LINK_HOST_H
#define KRN_LINK_HOST_H

#include "kernels/krn_link.h"
#include "shm/shm_event.h"

struct krn_link_host_config {
    void *ring; /* mapped read-write; must outlive the link */
    uint64_t ring_bytes;
    uint64_t slot_bytes;             /* for what is told of it; may be 0 */
    _Atomic uint64_t *landed_word;   /* worker's, in shared memory */
    struct shm_bell *landed_bell;    /* rung after each signal */
    struct shm_bell *issuer_bell;    /* rung after each landing; may be NULL */
    double gbps;                     /* 1e9 bytes per second; 0: unpaced */
    double latency_us;               /* per copy; 0: none */
    uint32_t queue;                  /* operations that fit, power of two; 0: 4096 */
    struct shm_event_writer *events; /* the thread's ring (shm_event.h); NULL: none */
    const char *name;                /* of the thread, at most 15 characters */
};

/* Starts the thread. Returns 0 or a negative errno with err. The caller owns *ret_link. */
int krn_link_host_create(const struct krn_link_host_config *config, struct krn_link **ret_link,
                         struct shm_error *err);

/* Changes the pacing of an idle link. */
void krn_link_host_pace(struct krn_link *link, double gbps, double latency_us);

#endif
