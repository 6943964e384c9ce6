/* SPDX-License-Identifier: MIT */
/*
 * Limits that an arena of a given size would run into, looked at before anything
 * is allocated: free space of the file system (tmpfs size, free huge pages),
 * available memory, cgroup memory limits (v1 and v2, of every ancestor), and
 * the process's limits on file size, address space and locked memory.
 *
 * Reads /proc, /sys and statvfs; changes nothing.
 */
#ifndef EXD_LIMITS_H
#define EXD_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "shm/shm_error.h"

enum exd_fs { EXD_FS_TMPFS, EXD_FS_HUGETLB, EXD_FS_OTHER, EXD_FS_COUNT };

struct exd_limits_need {
    const char *dir;       /* existing directory that will hold the file */
    uint64_t file_bytes;   /* size of the arena file */
    uint64_t memory_bytes; /* beyond the file: buffers of the loader */
    bool locked;           /* the mapping must be locked (--pin=require) */
    const char *root;      /* put before /proc and /sys: seam for tests; NULL: "" */
};

/* 0, or one line that names the limit, the need and the remedy: -ENOSPC (file
 * system, pool of huge pages), -EINVAL (huge pages of 1 GiB), -ENOMEM (memory, cgroup, address space), -EFBIG
 * (file size), -EPERM (locked memory), or what statvfs said. */
int exd_limits_check(const struct exd_limits_need *need, struct shm_error *err);

/* Kind of the file system that holds path. 0 or a negative errno. */
int exd_limits_fs(const char *path, enum exd_fs *ret_fs);

#endif
