/* SPDX-License-Identifier: MIT */
/* Memory of an arena: allocated up front, huge where possible, locked on demand. */
#include "expertd/exd_arena_priv.h"
#include "proto/prt_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14, headers from glibc 2.35 on */
#define MADV_POPULATE_WRITE 23
#endif

#define PIECE       (256ull << 20) /* between two looks at cancel */
#define ZERO_BYTES  (1u << 20)
#define HUGE_BYTES  (2ull << 20)
#define SMAPS_BYTES 512

/* A field of /proc/self/smaps, in KiB, of the mapping that starts at or holds addr. */
static uint64_t smaps_kib(const uint8_t *addr, const char *key)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    if (!f)
        return 0;
    char line[SMAPS_BYTES];
    bool inside = false;
    uint64_t kib = 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long long a, b;
        if (sscanf(line, "%llx-%llx ", &a, &b) == 2) {
            if (inside)
                break;
            inside = (uintptr_t)addr >= a && (uintptr_t)addr < b;
        } else if (inside && strncmp(line, key, strlen(key)) == 0) {
            kib = strtoull(line + strlen(key), NULL, 10);
            break;
        }
    }
    fclose(f);
    return kib;
}

bool exd_memory_huge(const struct exd_place *place, uint8_t *base, uint64_t bytes, uint8_t *probe, bool write)
{
    if (place->fs == EXD_FS_HUGETLB)
        return true;
    if (place->fs != EXD_FS_TMPFS || madvise(base, bytes, MADV_HUGEPAGE) != 0)
        return false;
    if (write && madvise(probe, HUGE_BYTES, MADV_POPULATE_WRITE) != 0)
        return false;
    if (!write) {
        uint8_t byte = *(const volatile uint8_t *)probe;
        (void)byte;
    }
    return smaps_kib(probe, "ShmemPmdMapped:") > 0;
}

static int full(const struct exd_place *place, int code, uint64_t done, uint64_t bytes, struct shm_error *err)
{
    char a[24], b[24];
    prt_size_text(done, a);
    prt_size_text(bytes, b);
    return shm_error_set(
        err, code,
        "arena directory %s: no more memory after %s of %s (%s): free some, or choose another "
        "with --arena-dir",
        place->dir, a, b, strerror(code));
}

/* For file systems that have no fallocate. */
static int write_zeros(int fd, uint64_t offset, uint64_t bytes)
{
    void *zeros = calloc(1, ZERO_BYTES);
    if (!zeros)
        return -ENOMEM;
    int rc = 0;
    for (uint64_t at = 0; at < bytes && rc == 0;) {
        uint64_t n = bytes - at < ZERO_BYTES ? bytes - at : ZERO_BYTES;
        ssize_t got = pwrite(fd, zeros, n, (off_t)(offset + at));
        if (got > 0)
            at += (uint64_t)got;
        else if (got == 0 || errno != EINTR)
            rc = got == 0 ? -EIO : -errno;
    }
    free(zeros);
    return rc;
}

int exd_memory_allocate(const struct exd_place *place, int fd, uint8_t *base, uint64_t bytes, bool huge,
                        const atomic_int *cancel, struct shm_error *err)
{
    /* fallocate takes the pages without clearing them, which then happens where they
     * are filled; but it never gives huge ones on tmpfs, a page fault does. */
    bool populate = huge && place->fs == EXD_FS_TMPFS;
    for (uint64_t at = 0; at < bytes;) {
        uint64_t n = bytes - at < PIECE ? bytes - at : PIECE;
        if (cancel && atomic_load_explicit(cancel, memory_order_relaxed))
            return shm_error_set(err, ECANCELED, "arena directory %s: allocation was cancelled", place->dir);
        int code = 0;
        if (populate) {
            if (madvise(base + at, n, MADV_POPULATE_WRITE) != 0)
                code = errno == EFAULT ? ENOSPC : errno; /* EFAULT: a touch would have raised SIGBUS */
        } else if (fallocate(fd, 0, (off_t)at, (off_t)n) != 0) {
            code = errno;
            if (code == EOPNOTSUPP || code == ENOSYS)
                code = -write_zeros(fd, at, n);
        }
        if (code == EINTR)
            continue;
        if (populate && code == EINVAL) { /* kernel before 5.14 */
            populate = false;
            continue;
        }
        if (code)
            return full(place, code, at, bytes, err);
        at += n;
    }
    return 0;
}

int exd_memory_lock(const struct exd_place *place, uint8_t *base, uint64_t bytes)
{
    if (place->fs == EXD_FS_HUGETLB)
        return 0; /* never swapped */
    return mlock2(base, bytes, MLOCK_ONFAULT) == 0 ? 0 : -errno;
}
