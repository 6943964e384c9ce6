/* SPDX-License-Identifier: MIT */
#include "daemon_kit.h"

#include "proto/prt_file.h"
#include "shm/shm_bell.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static _Noreturn void die(const char *what, const struct shm_error *err)
{
    fprintf(stderr, "kit: %s: %s\n", what, err ? shm_error_text(err) : strerror(errno));
    exit(1);
}

void kit_begin(struct kit *k, const char *expertd, const char *model)
{
    *k = (struct kit){.expertd = expertd, .model = model};
    snprintf(k->runtime, sizeof(k->runtime), "/tmp/exd-test-%d-XXXXXX", (int)getpid());
    if (!mkdtemp(k->runtime))
        die("mkdtemp", NULL);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

void kit_end(struct kit *k)
{
    prt_client_close(&k->client);
    if (k->pid) {
        kill(k->pid, SIGKILL);
        waitpid(k->pid, NULL, 0);
        k->pid = 0;
    }
    nftw(k->runtime, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

int kit_start(struct kit *k, const char *const *options)
{
    int ready[2];
    char log[128], ready_text[16], arena[96];
    snprintf(log, sizeof(log), "%s/log", k->runtime);
    snprintf(arena, sizeof(arena), "%s/arena", k->runtime);
    if (pipe2(ready, O_CLOEXEC) < 0)
        die("pipe", NULL);
    mkdir(arena, 0700);
    snprintf(ready_text, sizeof(ready_text), "%d", ready[1]);
    const char *argv[24] = {k->expertd,    "--model", k->model,     "--runtime-dir", k->runtime,
                            "--arena-dir", arena,     "--ready-fd", ready_text};
    for (int n = 9; options && *options && n < 22; options++)
        argv[n++] = *options;
    prt_client_close(&k->client);
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        die("fork", NULL);
    if (pid == 0) { /* nothing but system calls until exec: the channel library does not survive a fork */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(126);
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        fcntl(ready[1], F_SETFD, 0);
        execv(k->expertd, (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    close(ready[1]);
    k->pid = pid;
    char line[600];
    ssize_t n = 0;
    struct pollfd p = {.fd = ready[0], .events = POLLIN};
    if (poll(&p, 1, 20000) > 0)
        n = read(ready[0], line, sizeof(line) - 1);
    line[n < 0 ? 0 : n] = '\0';
    close(ready[0]);
    if (strcmp(line, "ready\n") != 0)
        return kit_wait(k, 10000);
    struct shm_error err = {0};
    if (prt_client_open(k->runtime, NULL, 0, &k->client, &err) < 0)
        die("client", &err);
    return 0;
}

int kit_wait(struct kit *k, uint32_t timeout_ms)
{
    for (uint32_t t = 0; t <= timeout_ms; t++) {
        int status;
        if (waitpid(k->pid, &status, WNOHANG) == k->pid) {
            k->pid = 0;
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        usleep(1000);
    }
    return -1;
}

bool kit_logged(const struct kit *k, const char *text)
{
    char path[128], line[2048];
    snprintf(path, sizeof(path), "%s/log", k->runtime);
    FILE *f = fopen(path, "re");
    bool found = false;
    while (f && !found && fgets(line, sizeof(line), f))
        found = strstr(line, text) != NULL;
    if (f)
        fclose(f);
    return found;
}

bool kit_until(bool (*what)(void *ctx), void *ctx, uint32_t timeout_ms)
{
    uint64_t deadline_ns = shm_now_ns() + (uint64_t)timeout_ms * 1000000u;
    while (!what(ctx)) {
        if (shm_now_ns() > deadline_ns)
            return false;
        usleep(500);
    }
    return true;
}

static int entries(pid_t pid, const char *dir)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, dir);
    DIR *d = opendir(path);
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

struct kit_holds kit_holds(pid_t pid)
{
    struct kit_holds h = {.fds = entries(pid, "fd"), .threads = entries(pid, "task")};
    char path[64], line[1024];
    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        h.maps += strstr(line, "memfd:") != NULL; /* the segments; heap and stacks come and go */
    if (f)
        fclose(f);
    return h;
}

int kit_workers(const struct kit *k)
{
    int n = 0;
    const struct shm_store *s = prt_client_store(k->client);
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        n += atomic_load(&s->worker[i].pid) != 0;
    return n;
}

void kit_worker_make(const struct kit *k, uint32_t ring, struct kit_worker *ret_worker)
{
    struct shm_error err = {0};
    void *base;
    uint64_t bytes;
    struct shm_arena_view arena;
    const char *path = prt_client_store(k->client)->arena_path;
    if (prt_file_map_path(path, sizeof(struct shm_arena), false, &base, &bytes, &err) < 0 ||
        shm_arena_open(base, bytes, path, &arena, &err) < 0)
        die("arena", &err);
    struct kit_worker w = {0};
    struct shm_geometry g = {.layers = arena.catalog->hparams.layers,
                             .experts = arena.catalog->hparams.experts,
                             .ring = ring,
                             .group_entries = shm_group_entries(ring),
                             .slot_bytes = (arena.blob_bytes_max + 255) / 256 * 256};
    g.groups_per_layer = shm_groups_per_layer(g.experts, g.group_entries);
    munmap(base, bytes);
    w.ring_bytes = ring * g.slot_bytes;
    uint64_t start = 0;
    prt_process_start(getpid(), &start);
    if (shm_worker_layout(&g, &w.layout, &err) < 0 ||
        prt_segment_create("test-control", w.layout.total_bytes, &w.control_fd, &w.control, &err) < 0 ||
        prt_segment_create("test-ring", w.ring_bytes, &w.ring_fd, &w.ring, &err) < 0)
        die("segments", &err);
    shm_worker_view(w.control, &w.layout, &w.view);
    shm_header_init(&w.view.worker->header, SHM_WORKER_MAGIC, w.layout.total_bytes, (uint32_t)getpid(),
                    start);
    w.view.worker->geometry = g;
    shm_header_publish(&w.view.worker->header, prt_random_epoch());
    w.request = (struct prt_attach_request){.pid = (uint32_t)getpid(),
                                            .device = PRT_DEVICE_HOST,
                                            .start = start,
                                            .name = "test",
                                            .control_fd = (uint32_t)w.control_fd,
                                            .ring_fd = (uint32_t)w.ring_fd,
                                            .layers = g.layers,
                                            .experts = g.experts,
                                            .ring = g.ring,
                                            .group_entries = g.group_entries,
                                            .groups_per_layer = g.groups_per_layer,
                                            .slot_bytes = g.slot_bytes};
    *ret_worker = w;
}

void kit_worker_free(struct kit_worker *w)
{
    munmap(w->control, w->layout.total_bytes);
    munmap(w->ring, w->ring_bytes);
    close(w->control_fd);
    close(w->ring_fd);
}

void kit_worker_post(struct kit_worker *w, uint64_t seq, uint32_t tokens)
{
    struct shm_worker *s = w->view.worker;
    const struct shm_geometry *g = &w->layout.geometry;
    s->descriptor = (struct shm_descriptor){
        .seq = seq, .group_base = (seq - 1) * g->layers * g->groups_per_layer, .tokens = tokens};
    atomic_store_explicit(&s->stream_seq, seq, memory_order_release);
    shm_bell_ring(&s->issuer_bell);
}
