/* SPDX-License-Identifier: MIT */
#include "tools/bench.h"

#include "proto/prt_client.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

/* The program beside this one (build tree: ../FOLDER/NAME), else by PATH. buffer: PATH_MAX bytes. */
const char *bench_program(const char *given, const char *folder, const char *name, char *buffer)
{
    if (given)
        return given;
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n > 0) {
        self[n] = 0;
        const char *dir = dirname(self);
        if (snprintf(buffer, PATH_MAX, "%s/%s", dir, name) < PATH_MAX && access(buffer, X_OK) == 0)
            return buffer;
        if (snprintf(buffer, PATH_MAX, "%s/../%s/%s", dir, folder, name) < PATH_MAX &&
            access(buffer, X_OK) == 0)
            return buffer;
    }
    return name;
}

void bench_add(struct bench_args *a, const char *value)
{
    if (a->n < BENCH_ARGS_MAX - 1)
        a->v[a->n++] = value;
}

void bench_add_option(struct bench_args *a, const char *name, const char *value)
{
    if (value && *value) {
        bench_add(a, name);
        bench_add(a, value);
    }
}

int bench_spawn(const struct bench_args *a, int in, int out, int err_fd, bool own_group, int *ret_pid)
{
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, own_group ? POSIX_SPAWN_SETPGROUP : 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (in >= 0)
        posix_spawn_file_actions_adddup2(&actions, in, 0);
    else
        posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (out >= 0)
        posix_spawn_file_actions_adddup2(&actions, out, 1);
    posix_spawn_file_actions_adddup2(&actions, err_fd, 2);
    int rc = posix_spawnp(ret_pid, a->v[0], &actions, &attributes, (char *const *)(uintptr_t)a->v, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return -rc;
}

void bench_last_line(void *file, char *line, size_t room)
{
    FILE *f = file;
    char buffer[1024];
    snprintf(line, room, "no message");
    rewind(f);
    while (fgets(buffer, sizeof buffer, f))
        if (buffer[strspn(buffer, " \r\n")] && strncmp(buffer, "Try ", 4) != 0) { /* argp's hint */
            buffer[strcspn(buffer, "\r\n")] = 0;
            snprintf(line, room, "%.399s", buffer);
        }
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* Waits until the instance serves. */
static int wait_serving(const struct bench_options *o, struct bench_own *own, FILE *log,
                        struct shm_error *err)
{
    for (;;) {
        int status;
        if (bench_interrupted())
            return shm_error_set(err, EINTR, "interrupted");
        if (waitpid(own->pid, &status, WNOHANG) == own->pid) {
            char line[400];
            own->pid = 0; /* reaped: nothing to signal any more */
            bench_last_line(log, line, sizeof line);
            return shm_error_set(err, EIO, "expertd ended: %s", line);
        }
        struct prt_client *client;
        struct shm_error ignored = {0};
        if (prt_client_open(o->runtime_dir, o->instance, 0, &client, &ignored) == 0) {
            uint32_t state = atomic_load_explicit(&prt_client_store(client)->state, memory_order_acquire);
            prt_client_close(&client);
            if (state == SHM_STORE_SERVING)
                return 0;
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

int bench_own_start(struct bench_options *o, struct bench_own *own, struct shm_error *err)
{
    char program[PATH_MAX];
    const char *tmp = getenv("TMPDIR");
    if (!tmp || tmp[0] != '/' || strlen(tmp) + 32 > sizeof own->dir)
        tmp = "/tmp";
    snprintf(own->dir, sizeof own->dir, "%s/expert-bench.XXXXXX", tmp);
    if (!mkdtemp(own->dir)) {
        own->dir[0] = 0;
        return shm_error_set(err, errno, "can't make a directory in %s: %s", tmp, strerror(errno));
    }
    o->runtime_dir = own->dir;
    /* The arena may lie beside those of other benches: the name tells them apart. */
    snprintf(own->instance, sizeof own->instance, "bench-%d", (int)getpid());
    o->instance = own->instance;
    struct bench_args a = {0};
    bench_add(&a, bench_program(o->expertd, "expertd", "expertd", program));
    bench_add_option(&a, "--model", o->model);
    bench_add_option(&a, "--runtime-dir", o->runtime_dir);
    bench_add_option(&a, "--instance", o->instance);
    bench_add(&a, "--no-keep");
    bench_add_option(&a, "--trace-file", o->trace_file);
    FILE *log = tmpfile();
    if (!log)
        return shm_error_set(err, errno, "can't open a log for expertd: %s", strerror(errno));
    int pid = 0;
    int rc = bench_spawn(&a, -1, fileno(log), fileno(log), true, &pid);
    own->pid = rc ? 0 : pid;
    if (rc)
        shm_error_set(err, -rc, "can't start %s: %s: use --expertd", a.v[0], strerror(-rc));
    else
        rc = wait_serving(o, own, log, err);
    fclose(log);
    return rc;
}

void bench_own_stop(struct bench_own *own)
{
    if (own->pid > 0) {
        kill(own->pid, SIGTERM);
        while (waitpid(own->pid, NULL, 0) < 0 && errno == EINTR)
            ;
        own->pid = 0;
    }
    if (own->dir[0])
        nftw(own->dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    own->dir[0] = 0;
}
