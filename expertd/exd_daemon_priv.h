/* SPDX-License-Identifier: MIT */
/*
 * Inside of the daemon, shared by exd_daemon.c (life, loop), exd_roster.c
 * (workers), exd_control.c (requests) and exd_start.c (model, arena, loading).
 * Main loop's thread only, except where said.
 */
#ifndef EXD_DAEMON_PRIV_H
#define EXD_DAEMON_PRIV_H

#include "expertd/exd_arena.h"
#include "expertd/exd_budget.h"
#include "expertd/exd_device.h"
#include "expertd/exd_event.h"
#include "expertd/exd_loader.h"
#include "expertd/exd_options.h"
#include "expertd/exd_park.h"
#include "expertd/exd_progress.h"
#include "expertd/exd_session.h"
#include "expertd/exd_store.h"
#include "proto/prt_channel.h"
#include "proto/prt_path.h"
#include "proto/prt_replay.h"

#include <pthread.h>

/* Sessions being closed at one time. ATTACH is refused while attached and closing ones together are this
 * many, so that each attached one has its place here when it ends. */
#define EXD_CLOSING_MAX 128
_Static_assert(EXD_CLOSING_MAX >= 2 * SHM_STORE_WORKERS,
               "a full table's workers may all be replaced at once");

/* Model, arena, loader. Filled by the start-up thread, read by the loop once that was joined. */
struct exd_start {
    struct prt_gguf *gguf;
    struct exd_model *model;
    struct exd_plan *plan;
    struct exd_arena *arena;
    struct exd_device *device;
    struct exd_park *park;          /* NULL: nothing is parked */
    char park_note[SHM_NOTE_BYTES]; /* where, or why not */
    struct exd_budget budget;
    struct exd_loader *loader; /* NULL: the arena was adopted, or is loaded */
    struct exd_progress progress;
    bool show_progress;
    struct shm_store *segment; /* load counters: written by loader threads (atomics) */
    pthread_t thread;
    bool running; /* thread not joined yet */
    int done_fd;  /* eventfd, written when it ends */
    atomic_int cancel;
    int status;
    struct shm_error error;
};

struct exd_daemon {
    const struct exd_options *options;
    struct prt_paths paths;
    char model_path[SHM_PATH_BYTES];
    uint64_t began_ns;
    int lock_fd, ready_fd;
    int epoll_fd, signal_fd, timer_fd, wake_fd;
    struct exd_store *store;
    struct exd_events *events; /* NULL: none */
    struct prt_server *server;
    struct prt_replay *replay;
    struct exd_start start;
    bool serving; /* arena is there: ATTACH is taken */
    struct exd_session *session[SHM_STORE_WORKERS];
    struct exd_session *closing[EXD_CLOSING_MAX];
    uint64_t sessions; /* so far: numbers */
    bool draining, stopping, broken_off;
    uint64_t drain_deadline_ns;
    uint64_t refusals_since_ns; /* see log_refusal */
    uint32_t refusals;
    bool look_soon;   /* at the arena's memory */
    uint32_t beats;   /* since it was looked at */
    uint64_t look_ns; /* what that took */
    int exit_status;
    _Alignas(8) uint8_t message[PRT_MESSAGE_MAX];
};

/* exd_start.c. Counts what the kernel says of the arena's memory; returns the nanoseconds that took. Not
 * while the start-up thread runs. */
uint64_t exd_start_look(struct exd_start *s);

/* exd_start.c. begin: starts the thread. cancel: ends it and the loading soon. finish: joins the thread and
 * returns its status. loaded: gives back what only the loading needed. destroy: joins, and gives everything
 * back; keep: the arena stays. */
int exd_start_begin(struct exd_daemon *d, struct shm_error *err);
void exd_start_cancel(struct exd_start *s);
int exd_start_finish(struct exd_start *s, struct shm_error *err);
void exd_start_loaded(struct exd_start *s);
void exd_start_destroy(struct exd_start *s, bool keep);

/* exd_start.c. Shows the park's numbers in the store. */
void exd_start_show_park(struct exd_daemon *d);

/* exd_control.c. Takes and answers the requests that wait. */
void exd_control_handle(struct exd_daemon *d);

/* exd_mps.c. Says so when the worker in slot `index` is the second one of its GPU and MPS does not run. */
void exd_mps_advise(struct exd_daemon *d, uint32_t index);

/* exd_roster.c. Begins to close the session in slot `index`; why as in exd_session_close. */
void exd_daemon_close_session(struct exd_daemon *d, uint32_t index, const char *why);
/* Adds a session (opened) to the table; -EBUSY when full. */
int exd_daemon_add_session(struct exd_daemon *d, const struct prt_attach_request *request,
                           struct exd_session **ret_session, struct shm_error *err);
/* Workers with a stream under way. */
uint32_t exd_daemon_busy(struct exd_daemon *d);
/* exd_roster.c. ended: the process of this session has. look: an issuer has something to say: sessions that
 * are closed by now, those that failed. close: all of them, or those with a stream. end: all, and waits; does
 * not return where a link does not stop. */
void exd_roster_ended(struct exd_daemon *d, uint64_t session);
void exd_roster_look(struct exd_daemon *d);
void exd_roster_close(struct exd_daemon *d, bool busy_only, const char *why);
void exd_roster_end(struct exd_daemon *d);

/* What an epoll event is about: a source, or a worker's pidfd with its session's number above it. */
enum exd_source {
    EXD_ON_SIGNAL,
    EXD_ON_TIMER,
    EXD_ON_CONTROL,
    EXD_ON_WAKE,
    EXD_ON_STARTED,
    EXD_ON_LOADED,
    EXD_ON_PEER,
    EXD_SOURCE_COUNT
};
#define EXD_SOURCE_BITS 8

/* exd_daemon.c. */
int exd_daemon_watch(struct exd_daemon *d, int fd, uint64_t what, struct shm_error *err);
void exd_daemon_drain(struct exd_daemon *d, uint32_t deadline_ms, bool stop, const char *who);
uint32_t exd_daemon_state(struct exd_daemon *d);
void exd_daemon_set_state(struct exd_daemon *d, uint32_t state);

#endif
