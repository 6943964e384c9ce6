/* SPDX-License-Identifier: MIT */
#include "inferd/inf_launch.h"

#include "proto/prt_client.h"
#include "shm/shm_bell.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define STALL_NS UINT64_C(120000000000) /* a start without progress */

extern char **environ;

enum found { NOBODY, SERVES_IT, SERVES_OTHER };

/* What the instance serves at the moment. */
static enum found look(const char *runtime_dir, const char *instance, const char *path)
{
    struct prt_client *client;
    if (prt_client_open(runtime_dir, instance, 0, &client, NULL))
        return NOBODY;
    char model[SHM_PATH_BYTES], real[PATH_MAX];
    memcpy(model, prt_client_store(client)->model_path, sizeof model);
    model[sizeof model - 1] = '\0';
    prt_client_close(&client);
    return strcmp(realpath(model, real) ? real : model, path) == 0 ? SERVES_IT : SERVES_OTHER;
}

/* Any running instance that serves path. */
static bool scan(const char *runtime_dir, const char *path, char ret_instance[PRT_INSTANCE_MAX + 1])
{
    struct prt_paths paths;
    char dir[PRT_PATH_BYTES + 16];
    if (prt_paths_make(runtime_dir, NULL, &paths, NULL))
        return false;
    snprintf(dir, sizeof dir, "%s/expertd", paths.runtime);
    DIR *d = opendir(dir);
    if (!d)
        return false;
    bool found = false;
    for (struct dirent *entry; !found && (entry = readdir(d));) {
        if (prt_path_check_instance(entry->d_name, NULL) == 0 &&
            look(runtime_dir, entry->d_name, path) == SERVES_IT) {
            snprintf(ret_instance, PRT_INSTANCE_MAX + 1, "%.*s", PRT_INSTANCE_MAX, entry->d_name);
            found = true;
        }
    }
    closedir(d);
    return found;
}

/* "Qwen3-30B.gguf" -> "qwen3-30b". */
static void name_after(const char *path, char ret_instance[PRT_INSTANCE_MAX + 1])
{
    const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    size_t n = strlen(base), at = 0;
    if (n > 5 && strcmp(base + n - 5, ".gguf") == 0)
        n -= 5;
    for (size_t i = 0; i < n && at < PRT_INSTANCE_MAX; i++)
        ret_instance[at++] = isalnum((unsigned char)base[i]) ? (char)tolower((unsigned char)base[i]) : '-';
    ret_instance[at] = '\0';
}

/* expertd of the same build or installation, else the one on $PATH. */
static void find_program(char ret_path[PATH_MAX])
{
    static const char *const beside[] = {"/expertd", "/../expertd/expertd"};
    char self[PATH_MAX - 32];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n > 0) {
        self[n] = '\0';
        *strrchr(self, '/') = '\0';
        for (size_t i = 0; i < sizeof beside / sizeof beside[0]; i++) {
            struct stat st;
            snprintf(ret_path, PATH_MAX, "%s%s", self, beside[i]);
            if (access(ret_path, X_OK) == 0 && stat(ret_path, &st) == 0 && S_ISREG(st.st_mode))
                return;
        }
    }
    snprintf(ret_path, PATH_MAX, "expertd");
}

static int spawn(const struct prt_paths *paths, const char *model, int *ret_pipe, pid_t *ret_pid,
                 struct shm_error *err)
{
    char program[PATH_MAX];
    int fds[2];
    find_program(program);
    if (pipe2(fds, O_CLOEXEC))
        return shm_error_set(err, errno, "expertd cannot be started: no pipe: %s", strerror(errno));
    char *argv[] = {program,
                    (char *)"--model",
                    (char *)model,
                    (char *)"--instance",
                    (char *)paths->instance,
                    (char *)"--runtime-dir",
                    (char *)paths->runtime,
                    (char *)"--ready-fd",
                    (char *)"3",
                    NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, paths->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    /* Its number may be 3 already: dup2 onto itself would keep close-on-exec, but posix_spawn clears it. */
    posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    sigset_t none, defaults;
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGINT);
    sigaddset(&defaults, SIGTERM);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &defaults);
    int rc = posix_spawnp(ret_pid, program, &actions, &attr, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attr);
    close(fds[1]);
    if (rc) {
        close(fds[0]);
        return shm_error_set(err, rc, "%s cannot be started: %s: install it beside inferd or put it on PATH",
                             program, strerror(rc));
    }
    *ret_pipe = fds[0];
    return 0;
}

static uint64_t loaded_bytes(const struct prt_paths *paths)
{
    struct prt_client *client;
    uint64_t bytes = 0;
    if (prt_client_open(paths->runtime, paths->instance, 0, &client, NULL) == 0) {
        bytes = atomic_load_explicit(&prt_client_store(client)->load_done_bytes, memory_order_relaxed);
        prt_client_close(&client);
    }
    return bytes;
}

/* Waits for "ready" (or "error: ...") on the pipe. */
static int wait_ready(const struct prt_paths *paths, int pipe_fd, pid_t pid, _Atomic bool *cancel,
                      struct shm_error *err)
{
    char line[SHM_ERROR_TEXT_BYTES] = "";
    size_t n = 0;
    uint64_t moved_ns = shm_now_ns(), bytes = 0;
    while (!memchr(line, '\n', n)) {
        struct pollfd p = {.fd = pipe_fd, .events = POLLIN};
        if (cancel && atomic_load(cancel))
            return shm_error_set(err, ECANCELED,
                                 "cancelled; expertd goes on loading ('expertctl stop' ends it)");
        if (poll(&p, 1, 200) > 0) {
            ssize_t got = read(pipe_fd, line + n, sizeof line - 1 - n);
            if (got <= 0)
                break;
            n += (size_t)got;
            continue;
        }
        uint64_t now = loaded_bytes(paths);
        if (now != bytes) {
            bytes = now;
            moved_ns = shm_now_ns();
        } else if (shm_now_ns() - moved_ns > STALL_NS) {
            return shm_error_set(err, ETIMEDOUT, "expertd makes no progress: see %s", paths->log);
        }
    }
    line[n] = '\0';
    line[strcspn(line, "\n")] = '\0';
    if (strcmp(line, "ready") == 0)
        return 0;
    int status;
    waitpid(pid, &status, WNOHANG);
    if (strncmp(line, "error: ", 7) == 0)
        return shm_error_set(err, ECHILD, "expertd: %s", line + 7);
    return shm_error_set(err, ECHILD, "expertd ended before it was ready: see %s", paths->log);
}

/* One launcher at a time per instance, so that two workers started together
 * share one expertd: a lock on the instance's directory, gone with the process. */
static int lock_launch(const struct prt_paths *paths, _Atomic bool *cancel, int *ret_fd,
                       struct shm_error *err)
{
    int fd = open(paths->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return shm_error_set(err, errno, "%s cannot be opened: %s", paths->dir, strerror(errno));
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            int rc = shm_error_set(err, errno, "%s cannot be locked: %s", paths->dir, strerror(errno));
            close(fd);
            return rc;
        }
        if (cancel && atomic_load(cancel)) {
            close(fd);
            return shm_error_set(err, ECANCELED, "cancelled");
        }
        poll(NULL, 0, 20); /* the other one is bounded by expertd's progress */
    }
    *ret_fd = fd;
    return 0;
}

static int start(const char *runtime_dir, const char *instance, const char *path, bool quiet,
                 _Atomic bool *cancel, struct shm_error *err)
{
    struct prt_paths paths;
    int pipe_fd = -1, lock_fd = -1;
    pid_t pid = 0;
    int rc = prt_paths_make(runtime_dir, instance, &paths, err);
    if (rc || (rc = prt_paths_create(&paths, err)) || (rc = lock_launch(&paths, cancel, &lock_fd, err)))
        return rc;
    if (look(runtime_dir, instance, path) == SERVES_IT)
        goto out; /* somebody else started it meanwhile */
    if ((rc = spawn(&paths, path, &pipe_fd, &pid, err)))
        goto out;
    if (!quiet)
        fprintf(stderr,
                "inferd: started expertd (process %d, instance %s) on %s; 'expertctl stop --instance %s' "
                "ends it, "
                "its log is %s\n",
                (int)pid, instance, path, instance, paths.log);
    rc = wait_ready(&paths, pipe_fd, pid, cancel, err);
    close(pipe_fd);
out:
    close(lock_fd);
    return rc;
}

int inf_launch(const char *runtime_dir, const char *instance, const char *model_path, bool quiet,
               _Atomic bool *cancel, char ret_instance[PRT_INSTANCE_MAX + 1], struct shm_error *err)
{
    char path[PATH_MAX], name[PRT_INSTANCE_MAX + 1];
    if (!realpath(model_path, path))
        return shm_error_set(err, errno, "model file %s: %s", model_path, strerror(errno));
    int rc;
    if (instance) {
        if ((rc = prt_path_check_instance(instance, err)))
            return rc;
        snprintf(name, sizeof name, "%s", instance);
    } else {
        if (scan(runtime_dir, path, ret_instance))
            return 0;
        snprintf(name, sizeof name, "%s", PRT_INSTANCE_DEFAULT);
        if (look(runtime_dir, name, path) == SERVES_OTHER)
            name_after(path, name);
    }
    enum found found = look(runtime_dir, name, path);
    if (found == SERVES_OTHER)
        return shm_error_set(
            err, EADDRINUSE,
            "instance %s of expertd serves another file: stop it or choose another --instance", name);
    if (found == NOBODY && (rc = start(runtime_dir, name, path, quiet, cancel, err)))
        return rc;
    memcpy(ret_instance, name, sizeof name);
    return 0;
}
