/* SPDX-License-Identifier: MIT */
/*
 * Link: the in-order copy path from the arena to one worker's ring.
 *
 * One issuer thread enqueues copies and signals; the device moves them
 * strictly in that order. Two counters tell how far it is: `landed` counts
 * copies, and each signal stores a value to the worker's landed word once all
 * copies before it have landed. What moves the bytes (a host thread here, a
 * copy engine on CUDA) is behind the operations table; issuer and walk see
 * nothing else of a device.
 */
#ifndef KRN_LINK_H
#define KRN_LINK_H

#include "shm/shm_bell.h"
#include "shm/shm_error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Counters of a link since its creation. */
struct krn_link_stats {
    uint64_t copies, bytes, signals;
    uint64_t busy_ns;      /* with a copy in progress */
    uint64_t first_ns;     /* CLOCK_MONOTONIC when the first copy since krn_link_mark began; 0: none */
    uint64_t last_ns;      /* when the last one landed */
    uint64_t mark_bytes;   /* copied since krn_link_mark */
    uint64_t mark_busy_ns; /* busy since krn_link_mark */
};

struct krn_link;

struct krn_link_ops {
    int (*copy)(struct krn_link *link, uint64_t ring_offset, const void *src, size_t bytes, bool more);
    int (*flush)(struct krn_link *link);
    int (*signal)(struct krn_link *link, uint64_t value);
    uint64_t (*landed)(struct krn_link *link);
    int (*drain)(struct krn_link *link, uint64_t timeout_ns);
    void (*mark)(struct krn_link *link);
    void (*stats)(struct krn_link *link, struct krn_link_stats *ret_stats);
    void (*destroy)(struct krn_link *link);
};

/* Each device's link begins with this. */
struct krn_link {
    const struct krn_link_ops *ops;
    /* 0: landings and the worker's words ring the issuer's bell. Else a device writes them and rings nothing:
     * whoever waits for one looks again this often. */
    uint64_t poll_ns;
};

/* Enqueues one copy of bytes from src (stays readable until it landed) to the ring. Does not block for
 * the copy; may wait for room in the queue. Returns 0, -EINVAL outside the ring, -EIO after a device error.
 *
 * more: another copy or a signal will follow at once, so the link may hold this one back and hand several
 * to the device together. Held copies go out, in order, with the next copy without `more`, the next signal,
 * when enough are held, or by krn_link_flush. A guess that may be wrong is copied without `more`: it should
 * not wait, nor should what is certain wait behind a batch of guesses.
 */
static inline int krn_link_copy(struct krn_link *link, uint64_t ring_offset, const void *src, size_t bytes,
                                bool more)
{
    return link->ops->copy(link, ring_offset, src, bytes, more);
}

/* The caller is about to wait: held copies go out, and landings will be counted as they happen. */
static inline int krn_link_flush(struct krn_link *link)
{
    return link->ops->flush ? link->ops->flush(link) : 0;
}

/* Enqueues: once all copies before this have landed, store value (release) to the landed word and ring
 * the worker's bell. */
static inline int krn_link_signal(struct krn_link *link, uint64_t value)
{
    return link->ops->signal(link, value);
}

/* Copies landed so far, over the link's life. Never blocks. The issuer's thread only. */
static inline uint64_t krn_link_landed(struct krn_link *link)
{
    return link->ops->landed(link);
}

/* Waits until everything enqueued is done. Returns 0, -ETIMEDOUT, -EIO. */
static inline int krn_link_drain(struct krn_link *link, uint64_t timeout_ns)
{
    return link->ops->drain(link, timeout_ns);
}

/* Starts a measuring span (a stream): first_ns, mark_* begin anew. Only while the link is empty. */
static inline void krn_link_mark(struct krn_link *link)
{
    link->ops->mark(link);
}

static inline void krn_link_stats(struct krn_link *link, struct krn_link_stats *ret_stats)
{
    link->ops->stats(link, ret_stats);
}

/* Stops the device side after what is in progress; queued copies are dropped. Nulls *link. */
static inline void krn_link_destroy(struct krn_link **link)
{
    if (*link)
        (*link)->ops->destroy(*link);
    *link = NULL;
}

#endif
