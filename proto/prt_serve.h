/* SPDX-License-Identifier: MIT */
/*
 * Serve records: which workers of an instance answer HTTP, where, and whether
 * they take requests. A server keeps one small text file, `serve-PID`, in the
 * instance's directory, written by it alone (temporary name, then rename) at
 * each change, removed at its end. Tools read it; it needs no expertd, so
 * that a worker can be told to restart while expertd is away. What a killed
 * server left is known by its pid and start time, and removed by the next
 * server that starts.
 *
 * Signals of such a server: PRT_SERVE_DRAIN: finish what was accepted, answer
 * 503 to the rest. PRT_SERVE_RESTART: the same, then execute its program anew
 * in the same process, with the same arguments and listening socket, so that
 * connections wait meanwhile and none is refused.
 */
#ifndef PRT_SERVE_H
#define PRT_SERVE_H

#include "proto/prt_path.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PRT_SERVE_DRAIN   SIGUSR1
#define PRT_SERVE_RESTART SIGUSR2
#define PRT_SERVE_MAX     64

enum prt_serve_state {
    PRT_SERVE_READY,
    PRT_SERVE_AWAY,       /* expertd is gone; the next one is waited for */
    PRT_SERVE_DRAINING,   /* requests still run */
    PRT_SERVE_DRAINED,    /* none does, none is taken */
    PRT_SERVE_RESTARTING, /* about to execute anew, or starting again */
    PRT_SERVE_STATE_COUNT
};
const char *prt_serve_state_name(enum prt_serve_state state);

struct prt_serve {
    uint32_t pid;
    enum prt_serve_state state;
    uint64_t start; /* start time of pid; an execution keeps both */
    uint64_t life;  /* random, of this execution of the program */
    uint32_t busy;  /* requests under way */
    char url[128];
    char note[256]; /* why a restart was refused; or empty */
};

/* Writes the record of this process. 0 or a negative errno. */
int prt_serve_write(const struct prt_paths *paths, const struct prt_serve *record, struct shm_error *err);

/* Removes this process's record. */
void prt_serve_remove(const struct prt_paths *paths);

/* The records whose process lives and is ours, by pid; those of dead ones, and what they had begun to write,
 * are removed with `sweep`. Others are left out. Returns their number, at most PRT_SERVE_MAX, or a negative
 * errno. */
int prt_serve_list(const struct prt_paths *paths, bool sweep, struct prt_serve ret_records[PRT_SERVE_MAX],
                   struct shm_error *err);

/* One record. -ENOENT: none; -ESRCH: its process has ended; -EBADMSG. */
int prt_serve_read(const struct prt_paths *paths, uint32_t pid, struct prt_serve *ret_record,
                   struct shm_error *err);

/* Sends PRT_SERVE_DRAIN or _RESTART to that very process, if it handles the signal. -ESRCH, -ENOTSUP, ... */
int prt_serve_signal(const struct prt_serve *record, int signo, struct shm_error *err);

#endif
