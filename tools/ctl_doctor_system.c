/* SPDX-License-Identifier: MIT */
/* Doctor: what the kernel and its settings grant. */
#include "proto/prt_memory.h"
#include "tools/ctl_doctor.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <mntent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define HUGE_PAGE     (2u << 20)
#define AWAY_SHARE    10 /* more than a tenth of the arena on another node is told */
#define SECCOMP_NAMES "io_uring_setup, io_uring_enter and io_uring_register"

/* ---- namespaces ---- */

/* "ipc:[4026531839]" of a process ("self" or its number). */
static bool namespace_of(const struct doctor *d, const char *process, const char *kind, char text[64])
{
    char path[512];
    snprintf(path, sizeof path, "%.400s/proc/%.16s/ns/%s", d->root, process, kind);
    ssize_t n = readlink(path, text, 63);
    text[n < 0 ? 0 : n] = 0;
    return n > 0;
}

/* A difference between two processes; what: how the other one is called. */
static bool check_pair(struct doctor *d, const char *one, const char *other, const char *what)
{
    static const char check[] = "ipc", *const kinds[] = {"ipc", "pid"};
    static const char *const meaning[] = {"GPU memory can't be handed over",
                                          "processes don't see each other"};
    for (int i = 0; i < 2; i++) {
        char a[64], b[64];
        if (!namespace_of(d, one, kinds[i], a) || !namespace_of(d, other, kinds[i], b)) {
            doctor_say(d, DOCTOR_WARNING, check,
                       "%s (pid %s): its namespaces can't be read: ask as its user or as root", what, other);
            return true;
        }
        if (strcmp(a, b) != 0) {
            doctor_say(d, DOCTOR_PROBLEM, check,
                       "%s (pid %s) is in another %s namespace than %s: %s; start both in one (containers: "
                       "--ipc and --pid of host or of one container)",
                       what, other, kinds[i], strcmp(one, "self") == 0 ? "this one" : "expertd", meaning[i]);
            return true;
        }
    }
    return false;
}

void doctor_check_ipc(struct doctor *d)
{
    static const char check[] = "ipc";
    char expertd[16], pid[16], ipc_ns[64], pid_ns[64];
    bool told = false;
    if (d->instance && d->instance->liveness == PRT_LIVE) {
        snprintf(expertd, sizeof expertd, "%u", d->instance->store->header.writer_pid);
        told = check_pair(d, "self", expertd, "expertd");
        for (uint32_t i = 0; i < d->instance->workers; i++) {
            snprintf(pid, sizeof pid, "%u", atomic_load(&d->instance->worker[i].row.pid));
            told |= check_pair(d, expertd, pid, "worker");
        }
        if (!told)
            doctor_say(d, DOCTOR_OK, check,
                       "expertd, its workers and this program share IPC and PID namespaces");
        return;
    }
    if (!namespace_of(d, "self", "ipc", ipc_ns) || !namespace_of(d, "self", "pid", pid_ns)) {
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "/proc/self/ns can't be read: mount /proc; expertd and its workers find each other there");
        return;
    }
    /* The numbers of the namespaces that a system starts with are fixed (the kernel's proc_ns.h). */
    if (strcmp(ipc_ns, "ipc:[4026531839]") != 0 || strcmp(pid_ns, "pid:[4026531836]") != 0)
        doctor_say(
            d, DOCTOR_WARNING, check,
            "this is a container's IPC or PID namespace: expertd and all its workers must be in it, too "
            "(containers: --ipc and --pid of one of them)");
    else
        doctor_say(d, DOCTOR_OK, check, "the host's own IPC and PID namespaces");
}

/* ---- locked memory ---- */

void doctor_check_memlock(struct doctor *d)
{
    static const char check[] = "memlock", key[] = "Max locked memory";
    char text[8192], a[24], b[24];
    if (d->instance && d->instance->liveness == PRT_LIVE && d->instance->store->arena_bytes &&
        !atomic_load(&d->instance->store->pinned))
        doctor_say(d, DOCTOR_WARNING, check,
                   "the running arena is not locked in memory, it may be swapped out: start expertd with "
                   "LimitMEMLOCK=infinity (ulimit -l unlimited)");
    const char *line =
        prt_text_read(d->root, "/proc/self/limits", text, sizeof text) ? strstr(text, key) : NULL;
    if (!line) {
        doctor_say(d, DOCTOR_WARNING, check, "/proc/self/limits can't be read: mount /proc");
        return;
    }
    line += strlen(key) + strspn(line + strlen(key), " ");
    bool unlimited = strncmp(line, "unlimited", 9) == 0, capable = prt_memory_may_lock(d->root);
    uint64_t limit = strtoull(line, NULL, 10);
    uint64_t need = d->known ? d->model.arena_bytes : UINT64_C(1) << 30;
    prt_size_text(limit, a);
    prt_size_text(need, b);
    if (unlimited || capable)
        doctor_say(d, DOCTOR_OK, check, "%s",
                   unlimited ? "locked memory is not limited" : "CAP_IPC_LOCK: no limit on locked memory");
    else if (limit >= need)
        doctor_say(d, DOCTOR_OK, check, "%s may be locked%s%s", a, d->known ? ", the arena has about " : "",
                   d->known ? b : "");
    else
        doctor_say(
            d, DOCTOR_WARNING, check,
            "%s may be locked (RLIMIT_MEMLOCK), %s %s: without a GPU's driver the arena may be swapped out; "
            "raise it (ulimit -l unlimited; systemd: LimitMEMLOCK=infinity)",
            a, d->known ? "the arena has about" : "an arena has more than", b);
}

/* ---- huge pages ---- */

/* A pool of reserved pages, and whether it can be reached. */
static void check_pool(struct doctor *d)
{
    static const char check[] = "hugepages";
    static const char dir[] = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    char path[128], text[16384], size[24];
    snprintf(path, sizeof path, "%s/nr_hugepages", dir);
    uint64_t pages = prt_text_read(d->root, path, text, sizeof text) ? strtoull(text, NULL, 10) : 0;
    if (!pages)
        return;
    uint64_t free_bytes = prt_huge_pages_free(d->root, HUGE_PAGE) * HUGE_PAGE;
    prt_size_text(free_bytes, size);
    bool mounted =
        prt_text_read(d->root, "/proc/self/mounts", text, sizeof text) && strstr(text, " hugetlbfs ");
    if (!mounted)
        doctor_say(d, DOCTOR_WARNING, check,
                   "%" PRIu64 " pages of 2 MiB are set aside and no hugetlbfs is mounted: mount one with "
                   "pagesize=2M and give it by --arena-dir, or set vm.nr_hugepages to 0",
                   pages);
    else if (d->known && !d->held && free_bytes < d->model.arena_bytes)
        doctor_say(d, DOCTOR_WARNING, check,
                   "hugetlbfs: %s of pages are free, the arena has about %.1f GiB: raise vm.nr_hugepages if "
                   "it is to "
                   "go there",
                   size, (double)d->model.arena_bytes / (1 << 30));
    else
        doctor_say(d, DOCTOR_OK, check, "hugetlbfs: %s of pages of 2 MiB are free for --arena-dir", size);
}

/* The mount that holds the arena: of all that lead to it the longest, of equal ones the last. False: none
 * found. */
static bool arena_mount(const struct doctor *d, char ret_dir[512], char ret_type[64], char ret_huge[32])
{
    char dir[PRT_PATH_BYTES + 512], real[PATH_MAX], path[512], line[4096];
    struct statfs fs;
    struct mntent m;
    if (d->instance && d->instance->liveness == PRT_LIVE && d->instance->store->arena_path[0])
        snprintf(dir, sizeof dir, "%.1023s", d->instance->store->arena_path);
    else if (!doctor_arena_place(d, dir, &fs))
        return false;
    size_t root = strlen(d->root);
    const char *at = root && strncmp(dir, d->root, root) == 0 ? dir + root : realpath(dir, real);
    snprintf(path, sizeof path, "%.400s/proc/self/mounts", d->root);
    FILE *f = at ? setmntent(path, "re") : NULL;
    if (!f)
        return false;
    bool found = false;
    size_t longest = 0;
    while (getmntent_r(f, &m, line, sizeof line)) {
        size_t n = strcmp(m.mnt_dir, "/") == 0 ? 0 : strlen(m.mnt_dir);
        if (strncmp(at, m.mnt_dir, n) != 0 || (at[n] && at[n] != '/') || (found && n < longest))
            continue;
        const char *huge = hasmntopt(&m, "huge");
        found = true;
        longest = n;
        snprintf(ret_dir, 512, "%.511s", m.mnt_dir);
        snprintf(ret_type, 64, "%.63s", m.mnt_type);
        snprintf(ret_huge, 32, "never");
        if (huge)
            sscanf(huge, "huge=%31[a-z_]", ret_huge);
    }
    endmntent(f);
    return found;
}

/* tmpfs gives what its mount says; the kernel's setting is for mounts of its own, but deny and force go for
 * all. */
void doctor_check_pages(struct doctor *d)
{
    static const char check[] = "hugepages", file[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    char text[256] = "", chosen[32] = "", dir[512], type[64], huge[32];
    if (prt_text_read(d->root, file, text, sizeof text)) {
        const char *open = strchr(text, '[');
        sscanf(open ? open + 1 : "", "%31[a-z_]", chosen);
    }
    if (d->instance && d->instance->liveness == PRT_LIVE && d->instance->store->arena_bytes &&
        !atomic_load(&d->instance->store->huge_pages))
        doctor_say(
            d, DOCTOR_WARNING, check,
            "the running arena is in small pages, which makes registration and access slower: mount its "
            "tmpfs with huge=advise, stop expertd, 'expertctl evict INSTANCE', and start it");
    if (!chosen[0])
        doctor_say(
            d, DOCTOR_WARNING, check,
            "%s can't be read: this kernel has no huge pages for tmpfs; use a hugetlbfs with --arena-dir",
            file);
    else if (strcmp(chosen, "deny") == 0)
        doctor_say(d, DOCTOR_WARNING, check,
                   "%s is deny, no tmpfs gets huge pages: echo never into it (then mounts decide) before "
                   "expertd starts",
                   file);
    else if (strcmp(chosen, "force") == 0)
        doctor_say(d, DOCTOR_OK, check, "tmpfs: the kernel gives transparent huge pages to all (force)");
    else if (!arena_mount(d, dir, type, huge))
        doctor_say(d, DOCTOR_OK, check, "not known: the arena's folder is in no mount that can be looked at");
    else if (strcmp(type, "tmpfs") != 0)
        doctor_say(d, DOCTOR_OK, check, "the arena goes to %.200s, a %s: nothing to set", dir, type);
    else if (strcmp(huge, "never") == 0)
        doctor_say(d, DOCTOR_WARNING, check,
                   "%.200s is mounted without huge pages, an arena there gets small ones: as root, mount -o "
                   "remount,huge=advise %.200s before expertd starts",
                   dir, dir);
    else
        doctor_say(d, DOCTOR_OK, check, "%.200s: huge=%s: the arena gets huge pages", dir, huge);
    check_pool(d);
}

/* ---- io_uring ---- */

int doctor_probe_uring(void)
{
    struct io_uring_params p = {0};
    long fd = syscall(SYS_io_uring_setup, 1, &p);
    if (fd < 0)
        return -errno;
    close((int)fd);
    return 0;
}

void doctor_check_uring(struct doctor *d)
{
    static const char check[] = "io_uring", instead[] = "the model is read by threads instead, more slowly";
    char text[8192];
    long setting = prt_text_read(d->root, "/proc/sys/kernel/io_uring_disabled", text, sizeof text)
                       ? strtol(text, NULL, 10)
                       : 0;
    int rc = setting == 2 ? -EPERM : d->uring();
    uint64_t seccomp = 0;
    if (prt_text_read(d->root, "/proc/self/status", text, sizeof text))
        prt_text_field(text, "Seccomp", &seccomp);
    if (!rc)
        doctor_say(d, DOCTOR_OK, check, "works");
    else if (setting == 1 || setting == 2)
        doctor_say(d, DOCTOR_WARNING, check,
                   "kernel.io_uring_disabled is %ld: %s; sysctl kernel.io_uring_disabled=0%s", setting,
                   instead, setting == 1 ? ", or run expertd in the group kernel.io_uring_group" : "");
    else if (rc == -EPERM || rc == -EACCES || (rc == -ENOSYS && seccomp))
        doctor_say(d, DOCTOR_WARNING, check,
                   "%s refuses it: %s; allow " SECCOMP_NAMES " in the container's or unit's filter",
                   seccomp ? "a system call filter (seccomp)" : "a security module", instead);
    else
        doctor_say(d, DOCTOR_WARNING, check, "%s: %s; %s", strerror(-rc), instead,
                   rc == -ENOMEM ? "raise RLIMIT_MEMLOCK (ulimit -l)" : "Linux 5.6 or later has it");
}

/* ---- NUMA ---- */

/* Nodes in a list such as "0-1,4". */
static uint32_t count_nodes(const char *list)
{
    uint32_t n = 0;
    for (const char *at = list; *at >= '0' && *at <= '9' && n < 4096;) {
        char *end;
        unsigned long a = strtoul(at, &end, 10), b = a;
        if (*end == '-')
            b = strtoul(end + 1, &end, 10);
        n += b >= a && b - a < 4096 ? (uint32_t)(b - a) + 1 : 0;
        at = *end == ',' ? end + 1 : end;
    }
    return n;
}

void doctor_check_numa(struct doctor *d)
{
    static const char check[] = "numa";
    char text[256];
    uint32_t nodes =
        prt_text_read(d->root, "/sys/devices/system/node/online", text, sizeof text) ? count_nodes(text) : 1;
    if (nodes < 2) {
        doctor_say(d, DOCTOR_OK, check, "one memory node: nothing to place");
        return;
    }
    const uint64_t *counters = d->instance ? d->instance->counters : NULL;
    uint64_t sampled = counters ? counters[SHM_STORE_WORD_ARENA_NUMA_SAMPLED] : 0;
    if (!counters || d->instance->liveness != PRT_LIVE || !sampled) {
        int node = d->gpus ? d->gpu[0].node : -1;
        if (node >= 0)
            doctor_say(d, DOCTOR_OK, check,
                       "%u memory nodes; GPU %s is on node %d: numactl --preferred=%d expertd ... puts the "
                       "arena there",
                       nodes, d->gpu[0].address, node, node);
        else
            doctor_say(d, DOCTOR_OK, check, "%u memory nodes; no arena to look at, no GPU to be near to",
                       nodes);
        return;
    }
    int64_t node = (int64_t)counters[SHM_STORE_WORD_ARENA_NUMA_NODE];
    uint64_t away = counters[SHM_STORE_WORD_ARENA_NUMA_AWAY];
    if (away * AWAY_SHARE > sampled) {
        doctor_say(
            d, DOCTOR_WARNING, check,
            "%" PRIu64 " of %" PRIu64 " sampled pages of the arena are not on node %" PRId64
            " like the rest: free memory there and build the arena anew under numactl --membind=%" PRId64,
            away, sampled, node, node);
        return;
    }
    for (uint32_t i = 0; i < d->gpus; i++)
        if (d->gpu[i].node >= 0 && d->gpu[i].node != node) {
            doctor_say(d, DOCTOR_WARNING, check,
                       "the arena is on node %" PRId64
                       ", GPU %s on node %d: copies cross between the nodes; build "
                       "the arena anew under numactl --preferred=%d, or use the GPU beside it",
                       node, d->gpu[i].address, d->gpu[i].node, d->gpu[i].node);
            return;
        }
    doctor_say(d, DOCTOR_OK, check,
               "the arena is on node %" PRId64 " of %u%s (%" PRIu64 " of %" PRIu64
               " sampled pages elsewhere)",
               node, nodes, d->gpus ? ", beside the GPU" : "", away, sampled);
}
