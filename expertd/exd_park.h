/* SPDX-License-Identifier: MIT */
/*
 * Park: memory in which workers leave blocks of keys and values, and the index
 * of what is in it. The file is shm/shm_park.h's; the messages are those of
 * proto/control.spec (PARKOPEN and so on), one function each, which does what
 * is said there.
 *
 * Blocks are found by key, within a class: what has the same layout of keys and values, by the same build of
 * the worker's program. The least recently used block that nobody holds goes first; using a block uses
 * all that it continues, so that what goes is the end of a sequence and not its beginning.
 * Memory is taken slot by slot, up to the budget, and given back when expertd ends. The file's bytes are
 * never read here. Main loop's thread only, but for exd_park_open.
 */
#ifndef EXD_PARK_H
#define EXD_PARK_H

#include "proto/prt_claim.h"
#include "proto/prt_control_gen.h"

#define EXD_PARK_FILE     PRT_PARK_FILE
#define EXD_PARK_SESSIONS 64u /* that use it at one time */

struct exd_park;

struct exd_park_config {
    const char *dir; /* on a memory file system; what an earlier expertd left there is removed */
    uint64_t bytes;  /* the budget, > 0 */
    uint8_t model[16];
    /* Takes memory for a range of the file. NULL: fallocate. Seam for tests. */
    int (*allocate)(void *ctx, int fd, uint64_t offset, uint64_t bytes);
    void *ctx;
};

/* Makes the file (mode 0600), takes no memory yet. Errors with one line. */
int exd_park_open(const struct exd_park_config *config, struct exd_park **ret_park, struct shm_error *err);

/* Removes the file. Accepts NULL, nulls. */
void exd_park_close(struct exd_park **park);

/* Removes what an expertd that was killed left in dir. */
void exd_park_sweep(const char *dir);

/* The session is over: what it held, and slots it had reserved, are free. */
void exd_park_leave(struct exd_park *park, uint64_t session);

/* The session in the request was checked before. */
int exd_park_join(struct exd_park *park, const struct prt_parkopen_request *request,
                  struct prt_parkopen_reply *reply, struct shm_error *err);
int exd_park_find(struct exd_park *park, const struct prt_parkfind_request *request,
                  struct prt_parkfind_reply *reply, struct shm_error *err);
int exd_park_reserve(struct exd_park *park, const struct prt_parkreserve_request *request,
                     struct prt_parkreserve_reply *reply, struct shm_error *err);
int exd_park_commit(struct exd_park *park, const struct prt_parkcommit_request *request,
                    struct prt_parkcommit_reply *reply, struct shm_error *err);
int exd_park_done(struct exd_park *park, const struct prt_parkdone_request *request,
                  struct prt_parkdone_reply *reply, struct shm_error *err);

struct exd_park_stats {
    uint64_t bytes, held_bytes;
    uint64_t kept, held, reserved; /* blocks, now */
    uint64_t committed, found, ignored, evicted, wrong;
};
void exd_park_stats(const struct exd_park *park, struct exd_park_stats *ret_stats);
const char *exd_park_path(const struct exd_park *park);

/* Checks the whole index: for tests. NULL, or what is wrong. */
const char *exd_park_check(const struct exd_park *park);

#endif
