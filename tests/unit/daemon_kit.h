/* SPDX-License-Identifier: MIT */
/*
 * For tests of the real expertd: start and end it, count what it holds, and a
 * hand-made worker whose every byte can be wrong.
 */
#ifndef DAEMON_KIT_H
#define DAEMON_KIT_H

#include "proto/prt_client.h"
#include "shm/shm_arena.h"
#include "shm/shm_worker.h"

#include <stdbool.h>
#include <sys/types.h>

struct kit {
    const char *expertd, *model;
    char runtime[64]; /* fresh directory, removed by kit_end */
    pid_t pid;        /* of expertd, 0: not running */
    struct prt_client *client;
};

/* Makes the runtime directory. */
void kit_begin(struct kit *k, const char *expertd, const char *model);
/* Kills expertd if it runs, removes the directory and the arena. */
void kit_end(struct kit *k);

/* Starts expertd with up to 8 more options (NULL-terminated), waits for its ready line and opens a client.
 * Returns 0, or the exit status when it did not start; its stderr is in <runtime>/log. */
int kit_start(struct kit *k, const char *const *options);
/* Waits for its end; the exit status, 128 + signal, or -1 after timeout_ms. */
int kit_wait(struct kit *k, uint32_t timeout_ms);
/* Is the text in its log? */
bool kit_logged(const struct kit *k, const char *text);

/* Waits until what is true; false after timeout_ms. */
bool kit_until(bool (*what)(void *ctx), void *ctx, uint32_t timeout_ms);

struct kit_holds {
    int fds, maps, threads;
};
struct kit_holds kit_holds(pid_t pid);

/* Number of workers in the store. */
int kit_workers(const struct kit *k);

/* A worker's segments and request, right in everything; the test spoils what it likes. */
struct kit_worker {
    struct prt_attach_request request;
    struct shm_worker_layout layout;
    struct shm_worker_view view;
    void *control, *ring;
    uint64_t ring_bytes;
    int control_fd, ring_fd;
};
void kit_worker_make(const struct kit *k, uint32_t ring, struct kit_worker *ret_worker);
void kit_worker_free(struct kit_worker *w);

/* Posts stream seq of so many tokens with nothing published: the issuer stays busy. */
void kit_worker_post(struct kit_worker *w, uint64_t seq, uint32_t tokens);

#endif
