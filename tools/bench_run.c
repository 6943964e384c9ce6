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

#define OUTPUT_MAX (64u << 20) /* of inferd --json */
#define ARGS_MAX   64

extern char **environ;

static volatile sig_atomic_t interrupted;
static volatile pid_t reader; /* the running inferd */

static void on_signal(int signo)
{
    (void)signo;
    interrupted = 1;
    if (reader > 0)
        kill(reader, SIGTERM);
}

void bench_catch_signals(void)
{
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL);
}

/* The program beside this one (build tree: ../FOLDER/NAME), else by PATH. */
static const char *find_program(const char *given, const char *folder, const char *name,
                                char buffer[PATH_MAX])
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

struct args {
    const char *v[ARGS_MAX];
    int n;
};

static void add(struct args *a, const char *value)
{
    if (a->n < ARGS_MAX - 1)
        a->v[a->n++] = value;
}

static void add_option(struct args *a, const char *name, const char *value)
{
    if (value && *value) {
        add(a, name);
        add(a, value);
    }
}

/* Starts a program with stdout and stderr redirected. own_group: a Ctrl-C on the terminal doesn't reach it.
 * 0 or -errno. */
static int start(const struct args *a, int out, int err_fd, bool own_group, pid_t *ret_pid)
{
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, own_group ? POSIX_SPAWN_SETPGROUP : 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (out >= 0)
        posix_spawn_file_actions_adddup2(&actions, out, 1);
    posix_spawn_file_actions_adddup2(&actions, err_fd, 2);
    int rc = posix_spawnp(ret_pid, a->v[0], &actions, &attributes, (char *const *)(uintptr_t)a->v, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return -rc;
}

static char *read_all(int fd, size_t *ret_bytes)
{
    char *text = NULL;
    size_t used = 0, room = 0;
    for (;;) {
        if (used == room) {
            room = room ? 2 * room : 65536;
            char *grown = room > OUTPUT_MAX ? NULL : realloc(text, room);
            if (!grown)
                break;
            text = grown;
        }
        ssize_t n = read(fd, text + used, room - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            *ret_bytes = used;
            return text;
        }
        used += (size_t)n;
    }
    free(text);
    return NULL;
}

/* Last line that a program wrote to its error file. */
static void last_line(FILE *f, char *line, size_t room)
{
    char buffer[1024];
    snprintf(line, room, "no message");
    rewind(f);
    while (fgets(buffer, sizeof buffer, f))
        if (buffer[strspn(buffer, " \r\n")] && strncmp(buffer, "Try ", 4) != 0) { /* argp's hint */
            buffer[strcspn(buffer, "\r\n")] = 0;
            snprintf(line, room, "%.399s", buffer);
        }
}

static uint64_t integer(const json_t *object, const char *key, bool *ok)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return *ok = false, 0;
    return (uint64_t)json_integer_value(v);
}

static double real(const json_t *object, const char *key, bool *ok)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_number(v))
        return *ok = false, 0;
    return json_number_value(v);
}

static int parse(const char *text, size_t bytes, struct bench_sample *ret_sample, char *ret_hash,
                 struct shm_error *err)
{
    json_error_t where;
    json_t *o = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (!o)
        return shm_error_set(err, EBADMSG, "inferd printed no JSON object: %s", where.text);
    const json_t *stream = json_object_get(o, "stream");
    bool ok = true;
    struct bench_sample s = {
        .tokens = integer(o, "prompt_tokens", &ok),
        .read_ms = real(o, "read_ms", &ok),
        .link_ms = real(stream, "link_ms", &ok),
        .wait_ms = real(stream, "wait_ms", &ok),
        .ring = integer(stream, "ring", &ok),
        .depth = integer(stream, "depth", &ok),
        .entries = integer(stream, "entries", &ok),
        .routed = integer(stream, "routed", &ok),
        .copied = integer(stream, "copied", &ok),
        .dropped = integer(stream, "dropped", &ok),
        .wasted = integer(stream, "wasted", &ok),
        .bytes = integer(stream, "bytes_copied", &ok),
        .bytes_wasted = integer(stream, "bytes_wasted", &ok),
    };
    const char *hash = json_string_value(json_object_get(o, "logits_hash"));
    if (ret_hash)
        snprintf(ret_hash, BENCH_HASH_BYTES, "%s", hash ? hash : "none");
    json_decref(o);
    if (!ok)
        return shm_error_set(err, EBADMSG,
                             "inferd's JSON lacks a number that the bench needs: other version of inferd?");
    *ret_sample = s;
    return 0;
}

int bench_read(const struct bench_options *o, const struct bench_arm *arm, struct bench_sample *ret_sample,
               char *ret_hash, struct shm_error *err)
{
    char program[PATH_MAX], depth[16] = "";
    struct args a = {0};
    add(&a, find_program(o->inferd, "inferd", "inferd", program));
    add(&a, "run");
    add(&a, "--json");
    add(&a, "--raw");
    if (ret_hash)
        add(&a, "--hash");
    add_option(&a, "-n", "1");
    add_option(&a, "--temperature", "0");
    add_option(&a, "--runtime-dir", o->runtime_dir);
    add_option(&a, "--instance", o->instance);
    add_option(&a, "--prompt", o->prompt);
    add_option(&a, "--prompt-file", o->prompt_file);
    add_option(&a, "--stream", arm->policy);
    add_option(&a, "--order", arm->order);
    if (arm->depth)
        snprintf(depth, sizeof depth, "%u", arm->depth);
    add_option(&a, "--depth", depth);
    add_option(&a, "--link-gbps", o->link_gbps);
    add_option(&a, "--link-latency-us", o->link_latency_us);
    add_option(&a, "--ring", o->ring);
    add_option(&a, "--threads", o->threads);
    add_option(&a, "--chunk", o->chunk);
    add_option(&a, "--floor", o->floor);
    add_option(&a, "--resident", o->resident);

    int pipes[2];
    FILE *messages = tmpfile();
    if (!messages || pipe2(pipes, O_CLOEXEC)) {
        int rc = shm_error_set(err, errno, "can't open a pipe for inferd: %s", strerror(errno));
        if (messages)
            fclose(messages);
        return rc;
    }
    pid_t pid;
    int rc = start(&a, pipes[1], fileno(messages), false, &pid);
    close(pipes[1]);
    if (rc) {
        shm_error_set(err, -rc, "can't start %s: %s: use --inferd", a.v[0], strerror(-rc));
        goto out;
    }
    reader = pid;
    if (interrupted) /* it came before the handler knew whom to tell */
        kill(pid, SIGTERM);
    size_t bytes = 0;
    char *text = read_all(pipes[0], &bytes);
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    reader = 0;
    if (interrupted) {
        rc = shm_error_set(err, EINTR, "interrupted");
    } else if (!text || !WIFEXITED(status) || WEXITSTATUS(status)) {
        char line[400];
        last_line(messages, line, sizeof line);
        rc = shm_error_set(err, EIO, "inferd failed for arm %s: %s", arm->name, line);
    } else {
        rc = parse(text, bytes, ret_sample, ret_hash, err);
    }
    free(text);
out:
    close(pipes[0]);
    fclose(messages);
    return rc;
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
        if (interrupted)
            return shm_error_set(err, EINTR, "interrupted");
        if (waitpid(own->pid, &status, WNOHANG) == own->pid) {
            char line[400];
            own->pid = 0; /* reaped: nothing to signal any more */
            last_line(log, line, sizeof line);
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
    struct args a = {0};
    add(&a, find_program(o->expertd, "expertd", "expertd", program));
    add_option(&a, "--model", o->model);
    add_option(&a, "--runtime-dir", o->runtime_dir);
    add_option(&a, "--instance", o->instance);
    add(&a, "--no-keep");
    FILE *log = tmpfile();
    if (!log)
        return shm_error_set(err, errno, "can't open a log for expertd: %s", strerror(errno));
    pid_t pid = 0;
    int rc = start(&a, fileno(log), fileno(log), true, &pid);
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
