/* SPDX-License-Identifier: MIT */
/*
 * Session: one attached worker: its control segment and ring as mapped here,
 * the link that copies into the ring, the issuer that runs its streams, and
 * the pidfd that tells of its death.
 *
 * Opened and closed by the main loop's thread. Closing stops issuer and link,
 * which may wait for a blob on a slow link; it is done on a thread of its
 * own, so that the loop goes on watching the other workers. Nothing a worker
 * writes is trusted: what must agree is copied once, compared, then used.
 */
#ifndef EXD_SESSION_H
#define EXD_SESSION_H

#include "expertd/exd_device.h"
#include "expertd/exd_event.h"
#include "expertd/exd_issuer.h"
#include "proto/prt_control_gen.h"

#include <stdbool.h>
#include <sys/types.h>

struct exd_session;

struct exd_session_config {
    const struct shm_arena_view *arena; /* outlives all sessions */
    struct exd_device *device;          /* likewise */
    struct exd_stream_settings stream;  /* defaults; the request's own win */
    double link_gbps, link_latency_us;  /* likewise */
    uint64_t watchdog_ns;
    uint32_t batch; /* copies handed to a GPU's driver in one call; 0: the link's default */
    bool trace;
    const char *trace_file;    /* NULL: none */
    struct exd_events *events; /* NULL: none */
    int wake_fd; /* eventfd: written from other threads when a session has faulted or is closed */
};

/* Checks every field of the request and both segments, maps them, starts link and issuer. number: not 0.
 * Errors as in control.spec (ATTACH), each with a line; nothing is left behind. */
int exd_session_open(const struct exd_session_config *config, const struct prt_attach_request *request,
                     uint64_t number, struct exd_session **ret_session, struct shm_error *err);

uint64_t exd_session_number(const struct exd_session *session);
pid_t exd_session_pid(const struct exd_session *session);
const char *exd_session_name(const struct exd_session *session); /* printable */
int exd_session_pidfd(const struct exd_session *session);        /* owned by the session */
uint32_t exd_session_gpu(const struct exd_session *session);     /* its number; 0 for the host device */

/* True between a stream's descriptor and its end. */
bool exd_session_busy(struct exd_session *session);

/* Effective settings; link values as paced. */
struct exd_session_settings {
    struct exd_stream_settings stream;
    double link_gbps, link_latency_us;
};
struct exd_session_settings exd_session_settings(struct exd_session *session);

/* As CONFIGURE in control.spec: -EINVAL, -EBUSY. All or nothing. */
int exd_session_configure(struct exd_session *session, const struct prt_configure_request *request,
                          struct shm_error *err);

/* No new streams: the worker gets `why` for those it posts. */
void exd_session_drain(struct exd_session *session, const char *why);

/* True, with the line, when the issuer gave the worker up. */
bool exd_session_faulted(struct exd_session *session, struct shm_error *ret_line);

/* Begins to close: a thread of the session's stops issuer and link, then tells the worker `why` (NULL:
 * nothing to tell: it is dead, or asked for it), unmaps. Returns at once. Only exd_session_closed, _name and
 * _free may follow. */
void exd_session_close(struct exd_session *session, const char *why);

/* True once closing is done: exd_session_free does not block. */
bool exd_session_closed(const struct exd_session *session);

/* Waits for the closing, frees. Accepts NULL, nulls. */
void exd_session_free(struct exd_session **session);

#endif
