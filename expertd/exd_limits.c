/* SPDX-License-Identifier: MIT */
#include "expertd/exd_limits.h"

#include "proto/prt_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

int exd_limits_fs(const char *path, enum exd_fs *ret_fs)
{
    struct statfs s;
    if (statfs(path, &s) != 0)
        return -errno;
    switch ((unsigned long)s.f_type) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
        *ret_fs = EXD_FS_TMPFS;
        return 0;
    case HUGETLBFS_MAGIC:
        *ret_fs = EXD_FS_HUGETLB;
        return 0;
    default:
        *ret_fs = EXD_FS_OTHER;
        return 0;
    }
}

static int check_space(const struct exd_limits_need *need, enum exd_fs fs, struct shm_error *err)
{
    struct statvfs s;
    if (statvfs(need->dir, &s) != 0)
        return shm_error_set(err, errno, "arena directory %s: %m", need->dir);
    uint64_t have = (uint64_t)s.f_bavail * s.f_frsize;
    if (fs == EXD_FS_HUGETLB) {
        uint64_t page = s.f_bsize ? s.f_bsize : 1;
        if (need->file_bytes % page)
            return shm_error_set(err, EINVAL,
                                 "arena directory %s: huge pages of %" PRIu64
                                 " bytes do not divide an arena: mount hugetlbfs with pagesize=2M",
                                 need->dir, page);
        uint64_t in_pool = prt_huge_pages_free(need->root, page) * page;
        if (s.f_blocks == 0 || in_pool < have) /* mounted without size=: the pool is the limit */
            have = in_pool;
    }
    bool unlimited = fs == EXD_FS_TMPFS && s.f_blocks == 0; /* tmpfs mounted with size=0 */
    if (unlimited || have >= need->file_bytes)
        return 0;
    char a[24], b[24];
    prt_size_text(have, a);
    prt_size_text(need->file_bytes, b);
    if (fs == EXD_FS_HUGETLB)
        return shm_error_set(err, ENOSPC,
                             "arena directory %s: %s of huge pages are free, the model needs %s: raise "
                             "vm.nr_hugepages, or leave out --arena-dir to use ordinary pages",
                             need->dir, a, b);
    if (fs == EXD_FS_TMPFS)
        return shm_error_set(
            err, ENOSPC,
            "arena directory %s: tmpfs has %s free, the model needs %s: enlarge it (mount -o "
            "remount,size=...) or choose another with --arena-dir",
            need->dir, a, b);
    return shm_error_set(err, ENOSPC,
                         "arena directory %s: file system has %s free, the model needs %s: free space or "
                         "choose another with --arena-dir",
                         need->dir, a, b);
}

static int check_memory(const struct exd_limits_need *need, const char *root, uint64_t bytes,
                        struct shm_error *err)
{
    uint64_t have;
    if (!prt_memory_available(root, &have) || have >= bytes)
        return 0;
    char a[24], b[24];
    prt_size_text(have, a);
    prt_size_text(bytes, b);
    return shm_error_set(
        err, ENOMEM,
        "memory for the arena in %s: %s are available (MemAvailable), the model needs %s: free "
        "memory or use a smaller model",
        need->dir, a, b);
}

static int check_cgroups(const char *root, uint64_t bytes, struct shm_error *err)
{
    struct prt_memory_group g;
    if (!prt_memory_group(root, &g) || g.free_bytes >= bytes)
        return 0;
    char a[24], b[24], c[24];
    prt_size_text(g.limit_bytes, a);
    prt_size_text(g.free_bytes, b);
    prt_size_text(bytes, c);
    return shm_error_set(err, ENOMEM,
                         "memory limit of cgroup %s: %s, of which %s are free, the model needs %s: raise %s "
                         "(systemd: MemoryMax=)",
                         g.dir, a, b, c, prt_memory_group_file(&g));
}

static int check_rlimits(const struct exd_limits_need *need, const char *root, struct shm_error *err)
{
    struct rlimit r;
    char a[24], b[24], text[256];
    prt_size_text(need->file_bytes, b);
    if (getrlimit(RLIMIT_FSIZE, &r) == 0 && r.rlim_cur != RLIM_INFINITY && r.rlim_cur < need->file_bytes) {
        prt_size_text(r.rlim_cur, a);
        return shm_error_set(
            err, EFBIG,
            "file size limit: %s (RLIMIT_FSIZE), the arena needs %s: raise it (ulimit -f unlimited)", a, b);
    }
    if (getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY) {
        unsigned long long pages = 0;
        if (prt_text_read(root, "/proc/self/statm", text, sizeof text))
            sscanf(text, "%llu", &pages);
        uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
        uint64_t have = used < r.rlim_cur ? r.rlim_cur - used : 0;
        if (have < need->file_bytes + need->memory_bytes) {
            prt_size_text(r.rlim_cur, a);
            prt_size_text(need->file_bytes + need->memory_bytes, b);
            return shm_error_set(err, ENOMEM,
                                 "address space limit: %s (RLIMIT_AS), the model needs %s more: raise it "
                                 "(ulimit -v unlimited)",
                                 a, b);
        }
    }
    return 0;
}

static int check_locked(const struct exd_limits_need *need, const char *root, struct shm_error *err)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_MEMLOCK, &r) != 0 || r.rlim_cur == RLIM_INFINITY || r.rlim_cur >= need->file_bytes ||
        prt_memory_may_lock(root))
        return 0;
    char a[24], b[24];
    prt_size_text(r.rlim_cur, a);
    prt_size_text(need->file_bytes, b);
    return shm_error_set(err, EPERM,
                         "locked memory limit: %s (RLIMIT_MEMLOCK), the arena needs %s: raise it (ulimit -l; "
                         "systemd: LimitMEMLOCK=infinity) or use --pin=auto",
                         a, b);
}

int exd_limits_check(const struct exd_limits_need *need, struct shm_error *err)
{
    const char *root = need->root ? need->root : "";
    if (need->file_bytes > INT64_MAX / 2 || need->memory_bytes > INT64_MAX / 2)
        return shm_error_set(err, ENOMEM, "arena directory %s: an arena of %" PRIu64 " bytes is not possible",
                             need->dir, need->file_bytes);
    enum exd_fs fs;
    int rc = exd_limits_fs(need->dir, &fs);
    if (rc)
        return shm_error_set(err, rc, "arena directory %s: %s", need->dir, strerror(-rc));
    /* A file on a disk is page cache, which gives way; huge pages are set aside already. */
    uint64_t bytes = need->memory_bytes + (fs == EXD_FS_TMPFS ? need->file_bytes : 0);
    if ((rc = check_space(need, fs, err)) || (rc = check_memory(need, root, bytes, err)) ||
        (rc = check_cgroups(root, bytes, err)) || (rc = check_rlimits(need, root, err)))
        return rc;
    return need->locked ? check_locked(need, root, err) : 0;
}
