/* SPDX-License-Identifier: MIT */
/*
 * expertctl: its commands and what they share.
 *
 * Looking (status, workers, rings, trace, counters, metrics, verify, doctor) maps shared memory read-only
 * and asks expertd nothing, so it works while expertd is stopped and disturbs
 * no stream. Only configure, drain and stop send a message, and workers with
 * drain or restart a signal to the workers.
 *
 * Exit status: 0 as it should be, 1 a problem was seen, 2 can't attach, 3
 * other layout or protocol version.
 */
#ifndef CTL_H
#define CTL_H

#include "proto/prt_claim.h"
#include "proto/prt_client.h"
#include "shm/shm_server.h"
#include "shm/shm_word.h"
#include "shm/shm_worker.h"

#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>

#define CTL_EXIT_OK      0
#define CTL_EXIT_PROBLEM 1
#define CTL_EXIT_ATTACH  2
#define CTL_EXIT_VERSION 3

struct ctl_options {
    const char *runtime_dir, *instance;
    bool json;
    double watch_s;                        /* 0: once */
    uint32_t count;                        /* trace: chunks shown a worker, or events; 0: default */
    const char *trace_action;              /* trace: "show", "record", "export", or NULL: chunks */
    const char *trace_file;                /* likewise: to write or read; NULL: the rings */
    double seconds;                        /* trace record: how long; negative: until interrupted */
    uint32_t worker;                       /* pid; 0: all */
    bool list, detail;                     /* counters, metrics */
    const char *output, *listen;           /* metrics */
    double deadline_s;                     /* drain, stop; workers: for each one */
    const char *worker_action;             /* workers: "drain", "restart", or NULL: show */
    bool all;                              /* workers drain|restart: every server */
    const char *model, *arena_dir;         /* doctor; NULL: none, expertd's choice */
    uint32_t pids[64], n_pids;             /* likewise: these */
    struct prt_configure_request settings; /* configure; its session 0: that of the worker */
};

/* One worker as it was at one moment. Fields of the segment were copied once; they may be torn against
 * each other, never within themselves. */
struct ctl_worker {
    struct shm_store_worker row;
    bool alive, mapped;
    char why[SHM_ERROR_TEXT_BYTES]; /* not mapped: why */
    struct shm_geometry geometry;
    uint64_t stream_seq, done_seq, released_groups, landed_groups, group_base;
    uint64_t issued, landed, dropped, issue_layer, layer;
    uint32_t policy, order, depth, held_off, result, detached, tokens;
    uint64_t link[SHM_LINK_WORDS], compute[SHM_COMPUTE_WORDS];
    uint64_t *layers; /* [geometry.layers][SHM_LAYER_WORDS], owned */
    bool serves;      /* a server segment was found: */
    uint64_t server[SHM_SERVER_WORDS];
    bool suspended;                        /* by SIGSTOP or a debugger */
    uint64_t *slots;                       /* [geometry.ring], owned */
    struct shm_report report[SHM_REPORTS]; /* whole ones, oldest first */
    uint32_t reports;
    uint32_t overrun; /* of the last ones: written over, or being written, while they were read */
};

/* An instance at one moment. */
struct ctl_snapshot {
    const struct shm_store *store; /* live mapping */
    const struct prt_paths *paths;
    enum prt_liveness liveness;
    bool suspended; /* expertd is stopped by SIGSTOP or a debugger */
    uint64_t counters[SHM_STORE_WORDS];
    struct ctl_worker worker[SHM_STORE_WORKERS];
    uint32_t workers;
    struct prt_claim claim[PRT_CLAIM_MAX]; /* who holds what of the budget, by name */
    int claims;                            /* 0, too, where there is no budget */
};

void ctl_snapshot_take(struct prt_client *client, uint32_t only_pid, struct ctl_snapshot *ret_snapshot);
void ctl_snapshot_free(struct ctl_snapshot *snapshot);

/* Name of a SHM_STORE_* state; "?" for an unknown one. */
const char *ctl_state(uint32_t state);

/* Where a slot is in its life. */
enum ctl_slot { CTL_SLOT_FREE, CTL_SLOT_ISSUED, CTL_SLOT_LANDED, CTL_SLOT_USED, CTL_SLOT_COUNT };
enum ctl_slot ctl_slot_state(const struct ctl_worker *worker, uint64_t word);

/* Printers: one snapshot each, as text or JSON, to stdout. Return an exit status. */
int ctl_show_status(const struct ctl_snapshot *snapshot, const struct ctl_options *options);
int ctl_show_workers(const struct ctl_snapshot *snapshot, const struct ctl_options *options);
int ctl_show_rings(const struct ctl_snapshot *snapshot, const struct ctl_options *options);
int ctl_show_trace(const struct ctl_snapshot *snapshot, const struct ctl_options *options);

json_t *ctl_json_worker(const struct ctl_worker *worker);
json_t *ctl_json_report(const struct shm_report *report);

/* ctl_counters.c. Fills what only a looker-on can tell (marked "look" in counters.spec). */
void ctl_counters_look(struct ctl_snapshot *snapshot);

/* Words of an earlier look, for rates: by worker's session. */
struct ctl_history;
struct ctl_history *ctl_history_new(void); /* NULL: no memory */
void ctl_history_free(struct ctl_history **history);
/* Keeps a copy of the snapshot's words in place of those before. */
void ctl_history_put(struct ctl_history *history, const struct ctl_snapshot *snapshot);
/* Words of a block when last put, or NULL: of the store (worker NULL), or of a worker; a layer's with its
 * number. */
const uint64_t *ctl_history_words(const struct ctl_history *history, enum shm_block block,
                                  const struct ctl_worker *worker, uint32_t layer);

/* Names of all counters (--list), or their values. Returns an exit status. */
int ctl_show_counters(const struct ctl_snapshot *snapshot, const struct ctl_options *options);
int ctl_list_counters(const struct ctl_options *options);

/* A block's words as an object: plain ones, arrays by label, histograms; shares and rates since `before`. */
json_t *ctl_json_counters(enum shm_block block, const uint64_t *words, const uint64_t *before, bool detail);

/* For Prometheus, to stdout or --output; with --listen: answers GET /metrics until interrupted. */
int ctl_show_metrics(const struct ctl_snapshot *snapshot, const struct ctl_options *options);
void ctl_metrics_write(FILE *f, const struct ctl_snapshot *snapshot, bool detail);
int ctl_metrics_serve(const struct ctl_options *options, const volatile sig_atomic_t *stop,
                      struct shm_error *err);

/* Strings of another process as valid UTF-8: bad bytes become '?'. */
json_t *ctl_json_text(const char *bytes, size_t capacity);

/* Prints a JSON value on one line or indented, and releases it. */
void ctl_json_print(json_t *value);

/* Recomputes every checksum of the arena; names the first bad tensor or expert. */
int ctl_verify(const struct ctl_snapshot *snapshot, const struct ctl_options *options);

/* Drops the arena that an instance keeps; of one that runs only when it was drained and has no workers, which
 * ends it. Returns an exit status. */
int ctl_evict(const struct ctl_options *options, struct shm_error *err);

/* Changes what is given of a live worker's settings from its next stream on, prints all of them. */
int ctl_configure(struct prt_client *client, const struct ctl_options *options, struct shm_error *err);

/* Drains or restarts servers, one line each as they are through; ends at the first that fails. */
int ctl_workers(const struct ctl_options *options, struct shm_error *err);

/* ctl_trace_file.c, ctl_trace_show.c. Events: shows, exports or records them as the options say. Returns an
 * exit status, with err set where it is neither 0 nor told. */
int ctl_trace(const struct ctl_options *options, const volatile sig_atomic_t *stop, struct shm_error *err);

/* What serves HTTP, as text. */
void ctl_show_servers(const struct prt_paths *paths);

#endif
