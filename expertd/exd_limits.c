/* SPDX-License-Identifier: MIT */
#include "expertd/exd_limits.h"

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

#define PATH_BYTES 4096

void exd_limits_size(uint64_t bytes, char ret_text[24])
{
    static const char unit[][4] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    unsigned u = 0;
    while (v >= 1024 && u < 4) {
        v /= 1024;
        u++;
    }
    snprintf(ret_text, 24, u ? "%.1f %s" : "%.0f %s", v, unit[u]);
}

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

/* First bytes of root/path, terminated; false if it cannot be read. */
static bool read_text(const char *root, const char *path, char *text, size_t size)
{
    char full[PATH_BYTES];
    if ((size_t)snprintf(full, sizeof full, "%s%s", root, path) >= sizeof full)
        return false;
    FILE *f = fopen(full, "re");
    if (!f)
        return false;
    size_t n = fread(text, 1, size - 1, f);
    bool ok = !ferror(f);
    fclose(f);
    text[n] = 0;
    return ok;
}

/* The number after key at the start of a line. */
static bool field(const char *text, const char *key, uint64_t *ret_value)
{
    size_t n = strlen(key);
    for (const char *line = text; line; line = (line = strchr(line, '\n')) ? line + 1 : NULL)
        if (strncmp(line, key, n) == 0 && (line[n] == ' ' || line[n] == ':'))
            return sscanf(line + n + 1, "%" SCNu64, ret_value) == 1;
    return false;
}

/* Free huge pages of one size, in pages: what the pool has and may still take. */
static uint64_t free_huge_pages(const char *root, uint64_t page_bytes)
{
    static const char *const name[] = {"free_hugepages", "nr_overcommit_hugepages", "resv_hugepages",
                                       "surplus_hugepages"};
    uint64_t value[4] = {0};
    for (unsigned i = 0; i < 4; i++) {
        char path[128], text[64];
        snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/%s", page_bytes / 1024,
                 name[i]);
        if (read_text(root, path, text, sizeof text))
            sscanf(text, "%" SCNu64, &value[i]);
    }
    uint64_t have = value[0] + value[1], taken = value[2] + value[3];
    return have > taken ? have - taken : 0;
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
        uint64_t in_pool = free_huge_pages(need->root ? need->root : "", page) * page;
        if (s.f_blocks == 0 || in_pool < have) /* mounted without size=: the pool is the limit */
            have = in_pool;
    }
    bool unlimited = fs == EXD_FS_TMPFS && s.f_blocks == 0; /* tmpfs mounted with size=0 */
    if (unlimited || have >= need->file_bytes)
        return 0;
    char a[24], b[24];
    exd_limits_size(have, a);
    exd_limits_size(need->file_bytes, b);
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
    char text[8192];
    uint64_t kib;
    if (!read_text(root, "/proc/meminfo", text, sizeof text) || !field(text, "MemAvailable", &kib) ||
        kib > UINT64_MAX / 1024)
        return 0;
    if (kib * 1024 >= bytes)
        return 0;
    char a[24], b[24];
    exd_limits_size(kib * 1024, a);
    exd_limits_size(bytes, b);
    return shm_error_set(
        err, ENOMEM,
        "memory for the arena in %s: %s are available (MemAvailable), the model needs %s: free "
        "memory or use a smaller model",
        need->dir, a, b);
}

/* One cgroup directory: its limit less what it uses and could not give back. */
static int check_cgroup_dir(const char *root, const char *dir, bool v2, uint64_t bytes, struct shm_error *err)
{
    char path[PATH_BYTES + 64], text[8192];
    uint64_t limit, used, active = 0, inactive = 0;
    snprintf(path, sizeof path, "%s/%s", dir, v2 ? "memory.max" : "memory.limit_in_bytes");
    /* "max" (v2) is not a number, and v1's "none" is a huge one */
    if (!read_text(root, path, text, sizeof text) || sscanf(text, "%" SCNu64, &limit) != 1 ||
        limit > INT64_MAX / 2)
        return 0;
    snprintf(path, sizeof path, "%s/%s", dir, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!read_text(root, path, text, sizeof text) || sscanf(text, "%" SCNu64, &used) != 1)
        used = 0;
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    if (read_text(root, path, text, sizeof text)) {
        field(text, v2 ? "inactive_file" : "total_inactive_file", &inactive);
        field(text, v2 ? "active_file" : "total_active_file", &active);
        uint64_t cache = inactive <= used && active <= used - inactive ? inactive + active : 0;
        used -= cache; /* page cache of files gives way; that of tmpfs is not in these two */
    }
    uint64_t have = used < limit ? limit - used : 0;
    if (have >= bytes)
        return 0;
    char a[24], b[24], c[24];
    exd_limits_size(limit, a);
    exd_limits_size(have, b);
    exd_limits_size(bytes, c);
    return shm_error_set(err, ENOMEM,
                         "memory limit of cgroup %s: %s, of which %s are free, the model needs %s: raise %s "
                         "(systemd: MemoryMax=)",
                         dir, a, b, c, v2 ? "memory.max" : "memory.limit_in_bytes");
}

/* path and every ancestor up to the mount. In a container the path may be the
 * host's while the mount shows the container's own group at its root: a
 * directory that is not there is passed over. */
static int check_cgroup_path(const char *root, const char *mount, char *path, bool v2, uint64_t bytes,
                             struct shm_error *err)
{
    for (;;) {
        char dir[PATH_BYTES];
        size_t n = strlen(path);
        while (n && path[n - 1] == '/')
            path[--n] = 0;
        if ((size_t)snprintf(dir, sizeof dir, "%s%s", mount, path) >= sizeof dir)
            return 0;
        int rc = check_cgroup_dir(root, dir, v2, bytes, err);
        if (rc || n == 0)
            return rc;
        char *slash = strrchr(path, '/');
        *(slash ? slash : path) = 0;
    }
}

static int check_cgroups(const char *root, uint64_t bytes, struct shm_error *err)
{
    char text[8192];
    if (!read_text(root, "/proc/self/cgroup", text, sizeof text))
        return 0;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        /* hierarchy:controllers:path */
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        controllers++;
        int rc = 0;
        if (*controllers == 0) {
            char copy[PATH_BYTES];
            snprintf(copy, sizeof copy, "%.4000s", path);
            rc = check_cgroup_path(root, "/sys/fs/cgroup", path, true, bytes, err);
            if (!rc) /* v1 and v2 side by side */
                rc = check_cgroup_path(root, "/sys/fs/cgroup/unified", copy, true, bytes, err);
        } else {
            char *save_c = NULL;
            for (char *c = strtok_r(controllers, ",", &save_c); c; c = strtok_r(NULL, ",", &save_c))
                if (strcmp(c, "memory") == 0) {
                    rc = check_cgroup_path(root, "/sys/fs/cgroup/memory", path, false, bytes, err);
                    break;
                }
        }
        if (rc)
            return rc;
    }
    return 0;
}

static int check_rlimits(const struct exd_limits_need *need, const char *root, struct shm_error *err)
{
    struct rlimit r;
    char a[24], b[24], text[256];
    exd_limits_size(need->file_bytes, b);
    if (getrlimit(RLIMIT_FSIZE, &r) == 0 && r.rlim_cur != RLIM_INFINITY && r.rlim_cur < need->file_bytes) {
        exd_limits_size(r.rlim_cur, a);
        return shm_error_set(
            err, EFBIG,
            "file size limit: %s (RLIMIT_FSIZE), the arena needs %s: raise it (ulimit -f unlimited)", a, b);
    }
    if (getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY) {
        unsigned long long pages = 0;
        if (read_text(root, "/proc/self/statm", text, sizeof text))
            sscanf(text, "%llu", &pages);
        uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
        uint64_t have = used < r.rlim_cur ? r.rlim_cur - used : 0;
        if (have < need->file_bytes + need->memory_bytes) {
            exd_limits_size(r.rlim_cur, a);
            exd_limits_size(need->file_bytes + need->memory_bytes, b);
            return shm_error_set(err, ENOMEM,
                                 "address space limit: %s (RLIMIT_AS), the model needs %s more: raise it "
                                 "(ulimit -v unlimited)",
                                 a, b);
        }
    }
    return 0;
}

/* CAP_IPC_LOCK in the effective set: locked memory is not limited. */
static bool may_lock_any(const char *root)
{
    char text[8192];
    const char *line;
    unsigned long long caps;
    if (!read_text(root, "/proc/self/status", text, sizeof text) || !(line = strstr(text, "\nCapEff:")) ||
        sscanf(line + 8, "%llx", &caps) != 1)
        return false;
    return caps >> 14 & 1;
}

static int check_locked(const struct exd_limits_need *need, const char *root, struct shm_error *err)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_MEMLOCK, &r) != 0 || r.rlim_cur == RLIM_INFINITY || r.rlim_cur >= need->file_bytes ||
        may_lock_any(root))
        return 0;
    char a[24], b[24];
    exd_limits_size(r.rlim_cur, a);
    exd_limits_size(need->file_bytes, b);
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
