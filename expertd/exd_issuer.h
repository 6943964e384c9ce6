/* SPDX-License-Identifier: MIT */
/*
 * Issuer: the thread that runs one worker's streams: reads the descriptor,
 * checks it, drives the walk over the link, keeps the counters and the report.
 *
 * It owns nothing but its thread: arena view, control mapping and link belong
 * to the session and outlive it. It trusts no byte of the control segment:
 * each field is read once, checked, then used. When a worker breaks the
 * protocol or a wait runs out, the issuer stops the stream, writes result and
 * error_text, and calls `fault` once; the session then detaches the worker.
 * Asleep (futex) whenever there is nothing to do.
 */
#ifndef EXD_ISSUER_H
#define EXD_ISSUER_H

#include "kernels/krn_link.h"
#include "shm/shm_arena.h"
#include "shm/shm_worker.h"

#include <stdbool.h>

/* What a session may change between streams; 0 keeps what is set. */
struct exd_stream_settings {
    uint32_t policy; /* SHM_POLICY_FULL or _ROUTED */
    uint32_t order;  /* SHM_ORDER_* */
    uint32_t depth;  /* 1 .. SHM_RING_MAX */
    uint32_t floor; /* tokens; chunks below it move routed experts only, after the router, under any policy */
};

struct exd_issuer_config {
    const struct shm_arena_view *arena;
    struct shm_worker_view control; /* mapped read-write */
    struct shm_geometry geometry;   /* checked private copy */
    struct krn_link *link;
    struct exd_stream_settings settings;
    uint64_t watchdog_ns;   /* longest wait without progress; 0: 60 s */
    bool trace;             /* one line per chunk on stderr */
    const char *trace_file; /* what each stream did is appended to it (exd_trace.h); NULL: not. Borrowed */
    struct shm_event_writer *events; /* the thread's ring (exd_event.h); NULL: none */
    const char *name;                /* worker's, for messages; copied */
    /* Called from the issuer's thread, once; the line is one sentence. Must not stop the issuer itself. */
    void (*fault)(void *ctx, const char *line);
    void *ctx;
};

struct exd_issuer;

/* Starts the thread. Returns 0 or a negative errno with err. */
int exd_issuer_start(const struct exd_issuer_config *config, struct exd_issuer **ret_issuer,
                     struct shm_error *err);

/* Applies from the next stream on. Any thread. Returns 0 or -EINVAL with the field named. */
int exd_issuer_configure(struct exd_issuer *issuer, const struct exd_stream_settings *settings,
                         struct shm_error *err);
struct exd_stream_settings exd_issuer_settings(struct exd_issuer *issuer);

/* True from when a stream's descriptor was seen until just before its done_seq. Any thread. */
bool exd_issuer_busy(struct exd_issuer *issuer);

/* No new stream is begun from now on: the worker gets result FAILED with `why`. Running ones go on. */
void exd_issuer_drain(struct exd_issuer *issuer, const char *why);

/* Stops: no further copy is issued, what is on the link lands, the thread ends. Blocks for at most about 6 s:
 * a link that has not emptied after 5 s is given up. Accepts NULL, nulls *issuer. */
void exd_issuer_stop(struct exd_issuer **issuer);

#endif
