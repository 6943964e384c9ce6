/* SPDX-License-Identifier: MIT */
/*
 * Header that every shared segment begins with, and its check.
 *
 * A segment is written by one process (the writer named here) and read by
 * others. The writer fills everything, then stores `epoch` (non-zero) with
 * release; a reader that sees epoch 0 has a segment that is not ready. The
 * epoch tells two lives of one name apart. No I/O here: mapping files and
 * reading a process's start time is proto/prt_file.h.
 */
#ifndef SHM_HEADER_H
#define SHM_HEADER_H

#include "shm/shm_error.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "shared atomics must be lock-free");

#define SHM_MAGIC_BYTES 8

struct shm_header {
    char magic[SHM_MAGIC_BYTES]; /* text: kind and layout version, e.g. "EXDWRK01" */
    uint32_t header_bytes;       /* size of this struct, as its writer knew it */
    uint32_t writer_pid;
    uint64_t writer_start;  /* start time of writer_pid, clock ticks since boot (/proc/PID/stat, field 22) */
    uint64_t features;      /* bits a reader must know; 0 so far */
    uint64_t total_bytes;   /* of the whole segment */
    _Atomic uint64_t epoch; /* writer: release, last; readers: acquire (shm_header_check), first */
    uint64_t created_ns;    /* CLOCK_MONOTONIC */
    uint64_t counters;      /* how its writer lays counters out: SHM_COUNTERS_LAYOUT */
};
_Static_assert(sizeof(struct shm_header) == 64, "shared layout");
_Static_assert(offsetof(struct shm_header, epoch) == 40, "shared layout");

/* Fills all but the epoch (left 0). magic: exactly 8 characters. */
void shm_header_init(struct shm_header *h, const char *magic, uint64_t total_bytes, uint32_t pid,
                     uint64_t start);

/* Publishes the segment: stores the epoch with release. epoch != 0. */
void shm_header_publish(struct shm_header *h, uint64_t epoch);

/* The counters of a checked segment are laid out as this program knows them. 0 or -EPROTO. */
int shm_header_check_counters(const struct shm_header *h, const char *name, struct shm_error *err);

/* Checks a mapped segment of mapped_bytes: magic (kind and version), header
 * size, features, total size, epoch. `name` goes into the error text.
 * Returns 0; -EAGAIN not ready yet; -EPROTO other kind or version (both
 * versions named); -EBADMSG damaged. */
int shm_header_check(const struct shm_header *h, const char *magic, uint64_t mapped_bytes, const char *name,
                     struct shm_error *err);

#endif
