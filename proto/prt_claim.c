/* SPDX-License-Identifier: MIT */
#include "proto/prt_claim.h"

#include "proto/prt_file.h"
#include "proto/prt_memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define VERSION      "1"
#define LOCK_STEP_MS 10u
#define BYTES_MAX    (UINT64_C(1) << 50) /* of one instance: sums do not overflow */

static int path_of(const struct prt_paths *paths, const char *more, char path[PRT_PATH_BYTES + 32])
{
    return snprintf(path, PRT_PATH_BYTES + 32, "%s/arena.claim%s", paths->dir, more);
}

int prt_claim_lock(const struct prt_paths *paths, uint32_t timeout_ms, int *ret_fd, struct shm_error *err)
{
    char dir[PRT_PATH_BYTES + 16];
    snprintf(dir, sizeof dir, "%s/expertd", paths->runtime);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return shm_error_set(err, errno, "%.300s: %s%s", dir, strerror(errno), shm_error_remedy(errno));
    for (uint32_t waited = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; waited += LOCK_STEP_MS) {
        int rc = errno;
        if ((rc == EWOULDBLOCK || rc == EINTR) && waited < timeout_ms) {
            nanosleep(&(struct timespec){.tv_nsec = LOCK_STEP_MS * 1000000}, NULL);
            continue;
        }
        close(fd);
        return shm_error_set(
            err, rc == EWOULDBLOCK ? ETIMEDOUT : rc,
            "%.300s: its lock is not to be had (%s): is another instance stuck in its start?", dir,
            strerror(rc));
    }
    *ret_fd = fd;
    return 0;
}

int prt_claim_write(const struct prt_paths *paths, const struct prt_claim *claim, struct shm_error *err)
{
    char path[PRT_PATH_BYTES + 32], temporary[PRT_PATH_BYTES + 32], text[PRT_PATH_BYTES + 160];
    path_of(paths, "", path);
    path_of(paths, ".new", temporary);
    int n = snprintf(text, sizeof text, VERSION " %" PRIu64 " %" PRIu64 " %" PRIu32 " %" PRIu64 " %s\n",
                     claim->arena_bytes, claim->park_bytes, claim->pid, claim->start, claim->arena_path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    ssize_t put = fd < 0 ? -1 : write(fd, text, (size_t)n);
    int error = put < 0 ? errno : ENOSPC;
    if (fd >= 0)
        close(fd);
    if (put == n && rename(temporary, path) == 0)
        return 0;
    if (put == n)
        error = errno;
    unlink(temporary);
    return shm_error_set(err, error, "%.300s: %s%s", path, strerror(error), shm_error_remedy(error));
}

/* Of a file of ours beside the arena: what it takes, which may be less than its length. */
static uint64_t taken(const char *dir, const char *name)
{
    char path[PRT_PATH_BYTES + 32];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    bool file = lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid();
    return file && (uint64_t)st.st_blocks <= BYTES_MAX / 512 ? (uint64_t)st.st_blocks * 512 : 0;
}

/* What an expertd that is gone left. */
static uint64_t left_behind(const struct prt_paths *paths, const char *arena)
{
    char dir[PRT_PATH_BYTES];
    struct stat st, own;
    uint64_t sum = 0;
    if (stat(arena, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= BYTES_MAX)
        sum = (uint64_t)st.st_size;
    snprintf(dir, sizeof dir, "%s", arena);
    char *slash = strrchr(dir, '/');
    if (slash && slash != dir) {
        *slash = 0;
        sum += taken(dir, PRT_ARENA_NEW);
        if (stat(dir, &st) == 0 && stat(paths->dir, &own) == 0 &&
            (st.st_ino != own.st_ino || st.st_dev != own.st_dev))
            sum += taken(dir, PRT_PARK_FILE);
    }
    sum += taken(paths->dir, PRT_PARK_FILE);
    return sum < BYTES_MAX ? sum : BYTES_MAX;
}

int prt_claim_read(const struct prt_paths *paths, struct prt_claim *ret_claim, struct shm_error *err)
{
    char path[PRT_PATH_BYTES + 32], text[PRT_PATH_BYTES + 160];
    struct prt_claim c = {0};
    struct stat st;
    path_of(paths, "", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return shm_error_set(err, errno, "%.300s: %s", path, strerror(errno));
    ssize_t n = -1;
    bool ours = !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_uid == geteuid();
    if (ours)
        n = read(fd, text, sizeof text - 1);
    close(fd);
    if (!ours)
        return shm_error_set(err, EPERM, "%.300s: is not a file of user %u", path, (unsigned)geteuid());
    text[n < 0 ? 0 : n] = 0;
    int at = 0;
    if (sscanf(text, VERSION " %" SCNu64 " %" SCNu64 " %" SCNu32 " %" SCNu64 "%n", &c.arena_bytes,
               &c.park_bytes, &c.pid, &c.start, &at) != 4 ||
        text[at] != ' ' || text[n - 1] != '\n' || c.arena_bytes > BYTES_MAX || c.park_bytes > BYTES_MAX)
        return shm_error_set(err, EBADMSG, "%.300s: not the claim of an expertd", path);
    text[n - 1] = 0;
    snprintf(c.arena_path, sizeof c.arena_path, "%.1023s", text + at + 1);
    snprintf(c.instance, sizeof c.instance, "%s", paths->instance);
    c.running = c.pid && prt_process_alive((pid_t)c.pid, c.start);
    if (c.running)
        c.held_bytes = c.arena_bytes + c.park_bytes;
    else if (c.arena_path[0])
        c.held_bytes = left_behind(paths, c.arena_path);
    *ret_claim = c;
    return 0;
}

void prt_claim_remove(const struct prt_paths *paths)
{
    char path[PRT_PATH_BYTES + 32];
    path_of(paths, "", path);
    unlink(path);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct prt_claim *)a)->instance, ((const struct prt_claim *)b)->instance);
}

int prt_claim_list(const struct prt_paths *paths, const char *except,
                   struct prt_claim ret_claims[PRT_CLAIM_MAX])
{
    char dir[PRT_PATH_BYTES + 16];
    int n = 0;
    snprintf(dir, sizeof dir, "%s/expertd", paths->runtime);
    DIR *d = opendir(dir);
    if (!d)
        return 0;
    for (struct dirent *e; n < PRT_CLAIM_MAX && (e = readdir(d));) {
        struct prt_paths other;
        struct shm_error ignored = {0};
        if (e->d_name[0] == '.' || (except && strcmp(e->d_name, except) == 0) ||
            prt_path_check_instance(e->d_name, &ignored) ||
            prt_paths_make(paths->runtime, e->d_name, &other, &ignored) || prt_paths_check(&other, &ignored))
            continue;
        if (prt_claim_read(&other, &ret_claims[n], &ignored) == 0 && ret_claims[n].held_bytes)
            n++;
    }
    closedir(d);
    qsort(ret_claims, (size_t)n, sizeof *ret_claims, by_name);
    return n;
}

uint64_t prt_claim_text(const struct prt_claim *claims, int n_claims, char *ret_text, size_t n)
{
    uint64_t sum = 0;
    size_t used = 0;
    snprintf(ret_text, n, "none");
    for (int i = 0; i < n_claims; i++) {
        char size[24], one[96];
        sum += claims[i].held_bytes;
        prt_size_text(claims[i].held_bytes, size);
        int k = snprintf(one, sizeof one, "%s%s %s (%s)", i ? ", " : "", claims[i].instance, size,
                         claims[i].running ? "runs" : "kept");
        if (used + (size_t)k + 8 < n)
            used += (size_t)snprintf(ret_text + used, n - used, "%s", one);
        else if (i && used + 6 < n) {
            snprintf(ret_text + used, n - used, ", ...");
            n = used; /* no more */
        }
    }
    return sum;
}
