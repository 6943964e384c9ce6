/* SPDX-License-Identifier: MIT */
#include "proto/prt_serve.h"

#include "proto/prt_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define VERSION   "serve-1"
#define TEMPORARY ".new" /* of a record that is being written */

static const char *const names[] = {"ready", "away", "draining", "drained", "restarting"};
_Static_assert(sizeof names / sizeof names[0] == PRT_SERVE_STATE_COUNT, "a name each");

const char *prt_serve_state_name(enum prt_serve_state state)
{
    return (unsigned)state < PRT_SERVE_STATE_COUNT ? names[state] : "?";
}

static int path_of(const struct prt_paths *paths, uint32_t pid, const char *suffix, char *path, size_t n)
{
    return snprintf(path, n, "%s/serve-%u%s", paths->dir, pid, suffix) < (int)n ? 0 : -ENAMETOOLONG;
}

int prt_serve_write(const struct prt_paths *paths, const struct prt_serve *r, struct shm_error *err)
{
    char path[PRT_PATH_BYTES + 32], temporary[PRT_PATH_BYTES + 32], text[512];
    int n = snprintf(text, sizeof text, VERSION " %u %" PRIu64 " %" PRIu64 " %s %u %.127s %.255s\n", r->pid,
                     r->start, r->life, prt_serve_state_name(r->state), r->busy, r->url, r->note);
    if (path_of(paths, r->pid, "", path, sizeof path) ||
        path_of(paths, r->pid, TEMPORARY, temporary, sizeof temporary) || n >= (int)sizeof text)
        return shm_error_set(err, ENAMETOOLONG, "%s: its path is too long for a record", paths->dir);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return shm_error_set(err, errno, "%s: %s", temporary, strerror(errno));
    ssize_t written = write(fd, text, (size_t)n);
    int rc = written == n ? 0 : written < 0 ? errno : ENOSPC;
    close(fd);
    if (!rc && rename(temporary, path))
        rc = errno;
    if (!rc)
        return 0;
    unlink(temporary);
    return shm_error_set(err, rc, "%s: %s", path, strerror(rc));
}

void prt_serve_remove(const struct prt_paths *paths)
{
    char path[PRT_PATH_BYTES + 32];
    if (!path_of(paths, (uint32_t)getpid(), "", path, sizeof path))
        unlink(path);
}

static int parse(char *text, uint32_t pid, struct prt_serve *ret)
{
    struct prt_serve r = {.state = PRT_SERVE_STATE_COUNT};
    char state[16];
    int at = 0;
    text[strcspn(text, "\n")] = '\0';
    if (sscanf(text, VERSION " %" SCNu32 " %" SCNu64 " %" SCNu64 " %15s %" SCNu32 " %127s %n", &r.pid,
               &r.start, &r.life, state, &r.busy, r.url, &at) != 6 ||
        !at || r.pid != pid)
        return -EBADMSG;
    for (unsigned i = 0; i < PRT_SERVE_STATE_COUNT; i++)
        if (strcmp(state, names[i]) == 0)
            r.state = (enum prt_serve_state)i;
    snprintf(r.note, sizeof r.note, "%.255s", text + at);
    if (r.state == PRT_SERVE_STATE_COUNT)
        return -EBADMSG;
    *ret = r;
    return 0;
}

/* suffix: "", or TEMPORARY. */
static int read_file(const struct prt_paths *paths, uint32_t pid, const char *suffix,
                     struct prt_serve *ret_record, struct shm_error *err)
{
    char path[PRT_PATH_BYTES + 32], text[1024];
    struct stat st;
    if (path_of(paths, pid, suffix, path, sizeof path))
        return shm_error_set(err, ENAMETOOLONG, "%s: its path is too long for a record", paths->dir);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return shm_error_set(err, errno, "%s: %s", path, strerror(errno));
    ssize_t n = -1;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode))
        n = read(fd, text, sizeof text - 1);
    close(fd);
    struct prt_serve r;
    if (n < 0 || (text[n] = '\0', parse(text, pid, &r)))
        return shm_error_set(err, EBADMSG, "%s: not the record of a server", path);
    if (!prt_process_alive((pid_t)pid, r.start))
        return shm_error_set(err, ESRCH, "worker %u has ended", pid);
    *ret_record = r;
    return 0;
}

int prt_serve_read(const struct prt_paths *paths, uint32_t pid, struct prt_serve *ret_record,
                   struct shm_error *err)
{
    return read_file(paths, pid, "", ret_record, err);
}

/* A file of a server: its record, or with TEMPORARY what it is writing, or was when it was killed. */
static bool file_of(const char *name, uint32_t *ret_pid, const char **ret_suffix)
{
    char *end;
    if (strncmp(name, "serve-", 6) != 0)
        return false;
    unsigned long pid = strtoul(name + 6, &end, 10);
    if (!pid || pid > 4194304 || (*end && strcmp(end, TEMPORARY) != 0))
        return false;
    *ret_pid = (uint32_t)pid;
    *ret_suffix = *end ? TEMPORARY : "";
    return true;
}

/* Whoever was to fill it is gone, by what it says, or, cut as it may be, by its name. */
static bool left_behind(int rc, uint32_t pid)
{
    uint64_t start;
    return rc == -ESRCH || (rc == -EBADMSG && prt_process_start((pid_t)pid, &start) == -ESRCH);
}

static int by_pid(const void *a, const void *b)
{
    uint32_t x = ((const struct prt_serve *)a)->pid, y = ((const struct prt_serve *)b)->pid;
    return x < y ? -1 : x > y;
}

int prt_serve_list(const struct prt_paths *paths, bool sweep, struct prt_serve ret_records[PRT_SERVE_MAX],
                   struct shm_error *err)
{
    int rc = prt_paths_check(paths, err), n = 0;
    if (rc)
        return rc;
    DIR *d = opendir(paths->dir);
    if (!d)
        return shm_error_set(err, errno, "%s: %s", paths->dir, strerror(errno));
    for (struct dirent *e; (e = readdir(d)) && n < PRT_SERVE_MAX;) {
        char path[PRT_PATH_BYTES + 300];
        const char *suffix;
        uint32_t pid;
        if (!file_of(e->d_name, &pid, &suffix))
            continue;
        rc = read_file(paths, pid, suffix, &ret_records[n], NULL);
        if (!rc)
            n += !*suffix;
        else if (sweep && left_behind(rc, pid) &&
                 snprintf(path, sizeof path, "%s/%s", paths->dir, e->d_name) < (int)sizeof path)
            unlink(path);
    }
    closedir(d);
    qsort(ret_records, (size_t)n, sizeof *ret_records, by_pid);
    return n;
}

/* The process has a handler for the signal: others would die of it. */
static bool handles(uint32_t pid, int signo)
{
    char path[64], line[256];
    unsigned long long caught = 0;
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "SigCgt: %llx", &caught) == 1)
            break;
    fclose(f);
    return caught >> (signo - 1) & 1;
}

int prt_serve_signal(const struct prt_serve *record, int signo, struct shm_error *err)
{
    int fd, rc = prt_pidfd_open((pid_t)record->pid, record->start, &fd);
    if (rc)
        return shm_error_set(err, -rc, "worker %u: %s", record->pid, strerror(-rc));
    if (!handles(record->pid, signo))
        rc = shm_error_set(err, ENOTSUP, "worker %u is just starting, or is no server: try again",
                           record->pid);
    else if (syscall(SYS_pidfd_send_signal, fd, signo, NULL, 0u) < 0)
        rc = shm_error_set(err, errno, "worker %u: %s", record->pid, strerror(errno));
    close(fd);
    return rc;
}
