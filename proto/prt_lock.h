/* SPDX-License-Identifier: MIT */
/*
 * Lock files: an exclusive flock on a file that its holder may remove. Who
 * holds the lock has its process number in the file, for messages. Of an
 * instance (paths->lock) and of an arena (PRT_ARENA_LOCK).
 */
#ifndef PRT_LOCK_H
#define PRT_LOCK_H

#include <stdint.h>

/* Creates the file where there is none, and locks the one that is under that name then. Waits up to wait_ms
 * for another process to give it up. dir_fd, name as for openat. 0, -EBUSY: held by another, or what openat
 * and flock fail with. The caller closes *ret_fd, which unlocks, and may unlink the name before. */
int prt_lock_take(int dir_fd, const char *name, uint32_t wait_ms, int *ret_fd);

/* Process number of who holds it, as it wrote there; 0: not known. */
int prt_lock_holder(int dir_fd, const char *name);

#endif
