/* SPDX-License-Identifier: MIT */
#include "expertd/exd_store.h"

#include "proto/prt_file.h"
#include "proto/prt_lock.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct exd_store {
    struct shm_store *segment;
    char path[PRT_PATH_BYTES];
    uint64_t epoch;
};

int exd_store_lock(const struct prt_paths *paths, int *ret_fd, struct shm_error *err)
{
    int rc = prt_lock_take(AT_FDCWD, paths->lock, 0, ret_fd);
    if (rc == -EBUSY) {
        const int pid = prt_lock_holder(AT_FDCWD, paths->lock);
        char who[48] = "another expertd"; /* which has not written its number yet, or can't */
        if (pid)
            snprintf(who, sizeof who, "expertd pid %d", pid);
        return shm_error_set(err, EBUSY,
                             "instance '%s' is served already by %s: use it, end it with "
                             "'expertctl --instance %s stop', or start this one under another name with "
                             "--instance NAME",
                             paths->instance, who, paths->instance);
    }
    if (rc)
        return shm_error_set(err, rc, "%s: %s%s", paths->lock, strerror(-rc), shm_error_remedy(rc));
    return 0;
}

void exd_store_unlock(const struct prt_paths *paths, int *fd)
{
    if (*fd < 0)
        return;
    unlink(paths->lock);
    close(*fd);
    *fd = -1;
}

int exd_store_create(const struct prt_paths *paths, const char *model_path, const struct exd_options *options,
                     struct exd_store **ret_store, struct shm_error *err)
{
    struct exd_store *store = calloc(1, sizeof(*store));
    if (!store)
        return shm_error_set(err, ENOMEM, "store segment: no memory; free some");
    char temporary[PRT_PATH_BYTES + 8];
    snprintf(temporary, sizeof(temporary), "%s.new", paths->store);
    unlink(temporary);
    int rc;
    int fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
        rc = shm_error_set(err, errno, "%s: %s%s", temporary, strerror(errno), shm_error_remedy(errno));
        goto free_store;
    }
    /* allocated now: a full file system must not become SIGBUS later */
    rc = -posix_fallocate(fd, 0, sizeof(struct shm_store));
    if (rc < 0) {
        shm_error_set(err, rc, "%s: no room for %zu bytes: %s%s", temporary, sizeof(struct shm_store),
                      strerror(-rc), shm_error_remedy(rc));
        goto close_fd;
    }
    void *base;
    rc = prt_file_map(fd, temporary, sizeof(struct shm_store), true, &base, err);
    if (rc < 0)
        goto close_fd;
    struct shm_store *s = base;
    uint64_t start;
    rc = prt_process_start(getpid(),
                           &start); /* clients know us by it: without it all of them take us for dead */
    if (rc < 0) {
        shm_error_set(err, rc, "/proc/self/stat: own start time cannot be read: %s%s", strerror(-rc),
                      shm_error_remedy(rc));
        munmap(s, sizeof(*s));
        goto close_fd;
    }
    memcpy(store->path, paths->store, sizeof(store->path));
    store->segment = s;
    store->epoch = prt_random_epoch();
    shm_header_init(&s->header, SHM_STORE_MAGIC, sizeof(*s), (uint32_t)getpid(), start);
    snprintf(s->instance, sizeof(s->instance), "%s", paths->instance);
    snprintf(s->model_path, sizeof(s->model_path), "%s", model_path);
    atomic_store_explicit(&s->state, SHM_STORE_STARTING, memory_order_relaxed);
    atomic_store_explicit(&s->heartbeat_ns, shm_now_ns(), memory_order_relaxed);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    shm_counter_set(&s->counters.start_time_ns, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    shm_counter_set(&s->counters.arena_numa_node, UINT64_MAX);
    shm_counter_set(&s->counters.budget_bytes, options->memory_budget);
    s->policy = options->stream.policy;
    s->order = options->stream.order;
    s->depth = options->stream.depth;
    s->floor = options->stream.floor;
    s->link_gbps = options->link_gbps;
    s->link_latency_us = options->link_latency_us;
    shm_header_publish(&s->header, store->epoch); /* the last store before others can see it */
    if (rename(temporary, paths->store) < 0) {
        rc = shm_error_set(err, errno, "%s: %s", paths->store, strerror(errno));
        munmap(s, sizeof(*s));
        goto close_fd;
    }
    close(fd);
    *ret_store = store;
    return 0;
close_fd:
    close(fd);
    unlink(temporary);
free_store:
    free(store);
    return rc;
}

void exd_store_destroy(struct exd_store **store)
{
    struct exd_store *s = *store;
    if (!s)
        return;
    exd_store_set_state(s, SHM_STORE_STOPPED);
    unlink(s->path);
    munmap(s->segment, sizeof(*s->segment));
    free(s);
    *store = NULL;
}

struct shm_store *exd_store_segment(struct exd_store *store)
{
    return store->segment;
}

uint64_t exd_store_epoch(const struct exd_store *store)
{
    return store->epoch;
}

void exd_store_set_state(struct exd_store *store, uint32_t state)
{
    /* release, pairs with the readers' acquire: what the state speaks of is there */
    atomic_store_explicit(&store->segment->state, state, memory_order_release);
}

void exd_store_detail(struct exd_store *store, const char *line)
{
    snprintf(store->segment->detail, sizeof(store->segment->detail), "%s", line);
}

void exd_store_set_worker(struct exd_store *store, uint32_t index, const struct prt_attach_request *request,
                          uint64_t session, const char *name, uint32_t gpu)
{
    struct shm_store_worker *w = &store->segment->worker[index];
    w->control_fd = request->control_fd;
    w->start = request->start;
    w->session = session;
    w->attached_ns = shm_now_ns();
    snprintf(w->name, sizeof(w->name), "%s", name);
    w->layers = request->layers;
    w->experts = request->experts;
    w->ring = request->ring;
    w->groups_per_layer = request->groups_per_layer;
    w->slot_bytes = request->slot_bytes;
    w->device = request->device;
    w->device_index = gpu;
    /* release, pairs with the acquire in prt_client_worker: the row before its pid */
    atomic_store_explicit(&w->pid, request->pid, memory_order_release);
}

void exd_store_clear_worker(struct exd_store *store, uint32_t index)
{
    struct shm_store_worker *w = &store->segment->worker[index];
    atomic_store_explicit(&w->pid, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* pid first: who saw it re-checks pid and session */
    w->session = 0;
}
