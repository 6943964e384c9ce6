/* SPDX-License-Identifier: MIT */
/*
 * Inside of the arena: its place (directory, lock), its memory (allocation,
 * huge pages, locking) and the struct that exd_arena.c owns.
 */
#ifndef EXD_ARENA_PRIV_H
#define EXD_ARENA_PRIV_H

#include "expertd/exd_arena.h"
#include "proto/prt_claim.h"

#include <pthread.h>
#include <stddef.h>

#define EXD_ARENA_FILE     PRT_ARENA_FILE
#define EXD_ARENA_NEW      PRT_ARENA_NEW
#define EXD_ARENA_LOCK     PRT_ARENA_LOCK
#define EXD_ARENA_PATH_MAX 1024 /* of the file, as struct shm_store carries it */

struct exd_place {
    char dir[EXD_ARENA_PATH_MAX];
    int dir_fd;
    int lock_fd;
    enum exd_fs fs;
    bool own_dir;  /* ours alone: goes with the arena; false: the instance's */
    bool user_dir; /* its parent is /dev/shm/expertd-UID: goes with the last one in it */
    char warning[256];
};

/* Picks the directory, creates and opens it. Then takes the lock. Nothing to release after an error. */
int exd_place_open(const struct exd_arena_config *config, struct exd_place *ret_place, struct shm_error *err);
/* Unlocks and closes. remove: lock file and own directory go too, and the user's once it is empty. */
void exd_place_close(struct exd_place *place, bool remove);

/* Allocates the file's memory for good, so that no later access can fail. */
int exd_memory_allocate(const struct exd_place *place, int fd, uint8_t *base, uint64_t bytes, bool huge,
                        const atomic_int *cancel, struct shm_error *err);

/* Asks for huge pages and touches the page at probe (inside the mapping, backed
 * or allocatable): whether it became a huge one. */
bool exd_memory_huge(const struct exd_place *place, uint8_t *base, uint64_t bytes, uint8_t *probe,
                     bool write);

/* Locks the mapping, pages as they are touched. 0 or a negative errno. */
int exd_memory_lock(const struct exd_place *place, uint8_t *base, uint64_t bytes);

struct exd_arena {
    struct exd_place place;
    char path[EXD_ARENA_PATH_MAX];
    char warning[256];
    int fd;
    uint8_t *base;
    uint64_t bytes;
    struct shm_arena_view view;
    enum exd_found found;
    bool pinned, registered, huge;
    /* An adopted arena that is locked is touched from end to end in the background. */
    bool touching;
    atomic_int touch_stop;
    pthread_t touch_thread;
};

#endif
