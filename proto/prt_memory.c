/* SPDX-License-Identifier: MIT */
#include "proto/prt_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES 4096

void prt_size_text(uint64_t bytes, char ret_text[24])
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

bool prt_text_read(const char *root, const char *path, char *text, size_t size)
{
    char full[PATH_BYTES + 256];
    if ((size_t)snprintf(full, sizeof full, "%s%s", root ? root : "", path) >= sizeof full)
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

bool prt_text_field(const char *text, const char *key, uint64_t *ret_value)
{
    size_t n = strlen(key);
    for (const char *line = text; line; line = (line = strchr(line, '\n')) ? line + 1 : NULL)
        if (strncmp(line, key, n) == 0 && (line[n] == ' ' || line[n] == ':'))
            return sscanf(line + n + 1, "%" SCNu64, ret_value) == 1;
    return false;
}

bool prt_memory_available(const char *root, uint64_t *ret_bytes)
{
    char text[8192];
    uint64_t kib;
    if (!prt_text_read(root, "/proc/meminfo", text, sizeof text) ||
        !prt_text_field(text, "MemAvailable", &kib) || kib > UINT64_MAX / 1024)
        return false;
    *ret_bytes = kib * 1024;
    return true;
}

bool prt_memory_may_lock(const char *root)
{
    char text[8192];
    const char *line;
    return prt_text_read(root, "/proc/self/status", text, sizeof text) &&
           (line = strstr(text, "\nCapEff:")) && strtoull(line + 8, NULL, 16) >> 14 & 1;
}

uint64_t prt_huge_pages_free(const char *root, uint64_t page_bytes)
{
    static const char *const name[] = {"free_hugepages", "nr_overcommit_hugepages", "resv_hugepages",
                                       "surplus_hugepages"};
    uint64_t value[4] = {0};
    for (unsigned i = 0; i < 4; i++) {
        char path[128], text[64];
        snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/%s", page_bytes / 1024,
                 name[i]);
        if (prt_text_read(root, path, text, sizeof text))
            sscanf(text, "%" SCNu64, &value[i]);
    }
    uint64_t have = value[0] + value[1], taken = value[2] + value[3];
    return have > taken ? have - taken : 0;
}

const char *prt_memory_group_file(const struct prt_memory_group *group)
{
    return group->v2 ? "memory.max" : "memory.limit_in_bytes";
}

/* Keeps the tighter of *best and the group in dir; best->limit_bytes 0: none yet. */
static void look_group(const char *root, const char *dir, bool v2, struct prt_memory_group *best)
{
    char path[PATH_BYTES + 64], text[8192];
    struct prt_memory_group g = {.v2 = v2};
    uint64_t used, active = 0, inactive = 0;
    snprintf(path, sizeof path, "%s/%s", dir, prt_memory_group_file(&g));
    /* "max" (v2) is not a number, and v1's "none" is a huge one */
    if (!prt_text_read(root, path, text, sizeof text) || sscanf(text, "%" SCNu64, &g.limit_bytes) != 1 ||
        g.limit_bytes > INT64_MAX / 2)
        return;
    snprintf(path, sizeof path, "%s/%s", dir, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!prt_text_read(root, path, text, sizeof text) || sscanf(text, "%" SCNu64, &used) != 1)
        used = 0;
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    if (prt_text_read(root, path, text, sizeof text)) {
        prt_text_field(text, v2 ? "inactive_file" : "total_inactive_file", &inactive);
        prt_text_field(text, v2 ? "active_file" : "total_active_file", &active);
        uint64_t cache = inactive <= used && active <= used - inactive ? inactive + active : 0;
        used -= cache; /* page cache of files gives way; that of tmpfs is not in these two */
    }
    g.free_bytes = used < g.limit_bytes ? g.limit_bytes - used : 0;
    snprintf(g.dir, sizeof g.dir, "%.1000s", dir);
    if (!best->dir[0] || g.free_bytes < best->free_bytes)
        *best = g;
}

/* path and every ancestor up to the mount. In a container the path may be the
 * host's while the mount shows the container's own group at its root: a
 * directory that is not there is passed over. */
static void look_path(const char *root, const char *mount, const char *of, bool v2,
                      struct prt_memory_group *best)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%.4000s", of);
    for (;;) {
        char dir[PATH_BYTES];
        size_t n = strlen(path);
        while (n && path[n - 1] == '/')
            path[--n] = 0;
        if ((size_t)snprintf(dir, sizeof dir, "%s%s", mount, path) >= sizeof dir)
            return;
        look_group(root, dir, v2, best);
        if (n == 0)
            return;
        char *slash = strrchr(path, '/');
        *(slash ? slash : path) = 0;
    }
}

bool prt_memory_group(const char *root, struct prt_memory_group *ret_group)
{
    char text[8192];
    struct prt_memory_group best = {0};
    if (!prt_text_read(root, "/proc/self/cgroup", text, sizeof text))
        return false;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        /* hierarchy:controllers:path */
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        controllers++;
        if (*controllers == 0) {
            look_path(root, "/sys/fs/cgroup", path, true, &best);
            look_path(root, "/sys/fs/cgroup/unified", path, true, &best); /* v1 and v2 side by side */
            continue;
        }
        char *save_c = NULL;
        for (char *c = strtok_r(controllers, ",", &save_c); c; c = strtok_r(NULL, ",", &save_c))
            if (strcmp(c, "memory") == 0) {
                look_path(root, "/sys/fs/cgroup/memory", path, false, &best);
                break;
            }
    }
    if (best.dir[0])
        *ret_group = best;
    return best.dir[0] != 0;
}
