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

#define STALL_NS    UINT64_C(120000000000) /* a start without progress */
#define LOCK_NS     UINT64_C(60000000000)  /* another inferd starts an expertd */
#define VISIBLE_NS  UINT64_C(10000000000)  /* from spawn to the store segment */
#define END_WAIT_MS 2000                   /* for an expertd that could not start to be gone */

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
        return shm_error_set(err, errno, "expertd cannot be started: no pipe: %s%s", strerror(errno),
                             shm_error_remedy(errno));
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
        bytes = shm_counter_get(&prt_client_store(client)->counters.load_bytes);
        prt_client_close(&client);
    }
    return bytes;
}

/* One launcher of a runtime directory looks and starts at a time, so that two that come at once for one file
 * end up with one expertd. The lock is the directory's own and ends with the process. */
static int lock_launches(const struct prt_paths *paths, _Atomic bool *cancel, int *ret_fd,
                         struct shm_error *err)
{
    char dir[PRT_PATH_BYTES + 16];
    snprintf(dir, sizeof dir, "%s/expertd", paths->runtime);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return shm_error_set(err, errno, "%s: %s", dir, strerror(errno));
    uint64_t deadline_ns = shm_now_ns() + LOCK_NS;
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        int rc = errno == EWOULDBLOCK || errno == EINTR ? 0 : errno;
        if (!rc && cancel && atomic_load(cancel))
            rc = ECANCELED;
        if (!rc && shm_now_ns() > deadline_ns)
            rc = ETIMEDOUT;
        if (rc) {
            close(fd);
            return shm_error_set(err, rc, "waiting for another inferd that starts an expertd in %s: %s", dir,
                                 strerror(rc));
        }
        poll(NULL, 0, 10);
    }
    *ret_fd = fd;
    return 0;
}

/* Until the started expertd can be found by others, or says that it failed. */
static void wait_visible(const struct prt_paths *paths, const char *path, int pipe_fd, _Atomic bool *cancel)
{
    uint64_t deadline_ns = shm_now_ns() + VISIBLE_NS;
    struct pollfd p = {.fd = pipe_fd, .events = POLLIN};
    while (shm_now_ns() < deadline_ns && !(cancel && atomic_load(cancel)) && poll(&p, 1, 5) == 0)
        if (look(paths->runtime, paths->instance, path) != NOBODY)
            return;
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
    /* Until it is gone, so that trying again does not meet it on its way out. */
    int status;
    for (int i = 0; i < END_WAIT_MS / 10 && waitpid(pid, &status, WNOHANG) == 0; i++)
        poll(NULL, 0, 10);
    if (strncmp(line, "error: ", 7) == 0)
        return shm_error_set(err, ECHILD, "expertd: %s", line + 7);
    return shm_error_set(err, ECHILD, "expertd ended before it was ready: see %s", paths->log);
}

/* Starts expertd as paths->instance. *lock_fd is given up as soon as the new one can be found. */
static int start(const struct prt_paths *paths, const char *path, bool quiet, _Atomic bool *cancel,
                 int *lock_fd, struct shm_error *err)
{
    int pipe_fd = -1;
    pid_t pid = 0;
    int rc = prt_paths_create(paths, err);
    if (rc || (rc = spawn(paths, path, &pipe_fd, &pid, err)))
        return rc;
    if (!quiet)
        fprintf(stderr,
                "inferd: started expertd (process %d, instance %s) on %s; 'expertctl stop --instance %s' "
                "ends it, "
                "its log is %s\n",
                (int)pid, paths->instance, path, paths->instance, paths->log);
    wait_visible(paths, path, pipe_fd, cancel);
    close(*lock_fd);
    *lock_fd = -1;
    rc = wait_ready(paths, pipe_fd, pid, cancel, err);
    close(pipe_fd);
    /* One that was started by hand at the same moment serves as well. */
    return rc == -ECHILD && look(paths->runtime, paths->instance, path) == SERVES_IT ? 0 : rc;
}

/* Who serves path, else the instance to start for it. */
static int choose(const char *runtime_dir, const char *instance, const char *path,
                  char ret_instance[PRT_INSTANCE_MAX + 1], enum found *ret_found, struct shm_error *err)
{
    if (instance) {
        int rc = prt_path_check_instance(instance, err);
        if (rc)
            return rc;
        snprintf(ret_instance, PRT_INSTANCE_MAX + 1, "%s", instance);
    } else {
        if (scan(runtime_dir, path, ret_instance)) {
            *ret_found = SERVES_IT;
            return 0;
        }
        snprintf(ret_instance, PRT_INSTANCE_MAX + 1, "%s", PRT_INSTANCE_DEFAULT);
        if (look(runtime_dir, ret_instance, path) == SERVES_OTHER)
            name_after(path, ret_instance);
    }
    *ret_found = look(runtime_dir, ret_instance, path);
    if (*ret_found == SERVES_OTHER)
        return shm_error_set(
            err, EADDRINUSE,
            "instance %s of expertd serves another file: stop it or choose another --instance", ret_instance);
    return 0;
}

int inf_launch(const char *runtime_dir, const char *instance, const char *model_path, bool quiet,
               _Atomic bool *cancel, char ret_instance[PRT_INSTANCE_MAX + 1], struct shm_error *err)
{
    char path[PATH_MAX], name[PRT_INSTANCE_MAX + 1];
    if (!realpath(model_path, path))
        return shm_error_set(err, errno, "model file %s: %s: name another with --model", model_path,
                             strerror(errno));
    enum found found;
    struct prt_paths paths;
    int lock_fd = -1;
    int rc = choose(runtime_dir, instance, path, name, &found, err);
    if (rc)
        return rc;
    if (found == NOBODY) {
        /* Looked without the lock, for most find somebody; once more with it. */
        if ((rc = prt_paths_make(runtime_dir, name, &paths, err)) || (rc = prt_paths_create(&paths, err)) ||
            (rc = lock_launches(&paths, cancel, &lock_fd, err)) ||
            (rc = choose(runtime_dir, instance, path, name, &found, err)))
            goto out;
        if (found == NOBODY && ((rc = prt_paths_make(runtime_dir, name, &paths, err)) ||
                                (rc = start(&paths, path, quiet, cancel, &lock_fd, err))))
            goto out;
    }
    memcpy(ret_instance, name, sizeof name);
out:
    if (lock_fd >= 0)
        close(lock_fd);
    return rc;
}
