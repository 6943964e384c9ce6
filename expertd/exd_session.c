/* SPDX-License-Identifier: MIT */
#include "expertd/exd_session.h"

#include "expertd/exd_log.h"
#include "kernels/krn_link_cuda.h"
#include "kernels/krn_link_host.h"
#include "proto/prt_file.h"
#include "shm/shm_store.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LINK_DRAIN_NS UINT64_C(1000000000)

struct exd_session {
    uint64_t number;
    pid_t pid;
    int pidfd, wake_fd;
    char name[SHM_NAME_BYTES];
    char link_name[16];
    struct shm_worker_layout layout;
    struct shm_worker_view control;
    void *control_base, *ring_base;
    uint64_t ring_bytes;
    bool cuda;    /* the ring is device memory, not mapped here */
    uint32_t gpu; /* its number */
    struct krn_link *link;
    struct exd_issuer *issuer;
    struct exd_event_place events;
    double link_gbps, link_latency_us;
    uint32_t floor; /* as attached */

    pthread_mutex_t lock; /* fault: written by the issuer's thread */
    struct shm_error fault;

    char why[SHM_ERROR_TEXT_BYTES]; /* for the worker; empty: nothing to tell */
    bool closing, threaded;
    pthread_t closer;
    _Atomic bool closed; /* release by the closer after everything is given back */
};

static void wake(int fd)
{
    uint64_t one = 1;
    ssize_t ignored = write(fd, &one, sizeof(one)); /* a full counter wakes just as well */
    (void)ignored;
}

/* From the issuer's thread, once. */
static void on_fault(void *ctx, const char *line)
{
    struct exd_session *s = ctx;
    pthread_mutex_lock(&s->lock);
    shm_error_set(&s->fault, EPROTO, "%s", line);
    pthread_mutex_unlock(&s->lock);
    wake(s->wake_fd);
}

/* The process is who it says, and ours. */
static int check_process(struct exd_session *s, const struct prt_attach_request *r, struct shm_error *err)
{
    int rc = prt_pidfd_open((pid_t)r->pid, r->start, &s->pidfd);
    if (rc == -ESRCH)
        return shm_error_set(err, ESRCH, "ATTACH: there is no process %u that started at %llu", r->pid,
                             (unsigned long long)r->start);
    if (rc < 0)
        return shm_error_set(err, rc, "ATTACH: process %u cannot be watched: %s", r->pid, strerror(-rc));
    uid_t uid;
    rc = prt_process_uid((pid_t)r->pid, &uid);
    if (rc < 0 || uid != geteuid())
        return shm_error_set(err, EPERM, "ATTACH: process %u belongs to another user than expertd (%u)",
                             r->pid, (unsigned)geteuid());
    return 0;
}

static int check_geometry(struct exd_session *s, const struct exd_session_config *config,
                          const struct prt_attach_request *r, struct shm_error *err)
{
    const struct shm_hparams *hp = &config->arena->catalog->hparams;
    if (r->layers != hp->layers || r->experts != hp->experts)
        return shm_error_set(err, EINVAL,
                             "ATTACH: geometry of %u layers x %u experts, the model has %u x %u: build the "
                             "segment from the arena's catalog",
                             r->layers, r->experts, hp->layers, hp->experts);
    if (r->slot_bytes < config->arena->blob_bytes_max)
        return shm_error_set(err, EINVAL, "ATTACH: slots of %llu bytes, the largest blob has %llu",
                             (unsigned long long)r->slot_bytes,
                             (unsigned long long)config->arena->blob_bytes_max);
    struct shm_geometry geometry = {.layers = r->layers,
                                    .experts = r->experts,
                                    .ring = r->ring,
                                    .group_entries = r->group_entries,
                                    .groups_per_layer = r->groups_per_layer,
                                    .slot_bytes = r->slot_bytes};
    int rc = shm_worker_layout(&geometry, &s->layout, err);
    if (rc < 0)
        return rc;
    if (__builtin_mul_overflow((uint64_t)r->ring, r->slot_bytes, &s->ring_bytes))
        return shm_error_set(err, EINVAL, "ATTACH: a ring of %u x %llu bytes is too large", r->ring,
                             (unsigned long long)r->slot_bytes);
    return 0;
}

static int map_peer(const struct prt_attach_request *r, uint32_t fd_number, uint64_t bytes, const char *what,
                    void **ret_base, struct shm_error *err)
{
    int fd;
    int rc = prt_peer_open((pid_t)r->pid, fd_number, bytes, what, &fd, err);
    if (rc < 0)
        return rc;
    rc = prt_file_map(fd, what, bytes, true, ret_base, err);
    close(fd);
    return rc;
}

static int map_segments(struct exd_session *s, const struct prt_attach_request *r, struct shm_error *err)
{
    int rc = map_peer(r, r->control_fd, s->layout.total_bytes, "control segment", &s->control_base, err);
    if (rc < 0)
        return rc;
    rc = shm_header_check(s->control_base, SHM_WORKER_MAGIC, s->layout.total_bytes, "control segment", err);
    if (rc < 0)
        return rc;
    shm_worker_view(s->control_base, &s->layout, &s->control);
    const struct shm_worker *w = s->control.worker;
    struct shm_geometry geometry; /* once, then compared: it may change under us */
    memcpy(&geometry, &w->geometry, sizeof(geometry));
    if (memcmp(&geometry, &s->layout.geometry, sizeof(geometry)) != 0)
        return shm_error_set(err, EINVAL,
                             "ATTACH: the control segment's geometry differs from the request's");
    if (w->header.writer_pid != r->pid || w->header.writer_start != r->start)
        return shm_error_set(err, EINVAL, "ATTACH: the control segment was written by process %u, not by %u",
                             w->header.writer_pid, r->pid);
    /* the issuer counts streams and groups from the segment's birth */
    if (atomic_load(&w->stream_seq) || atomic_load(&w->landed_groups) || atomic_load(&w->done_seq) ||
        atomic_load(&w->detached))
        return shm_error_set(err, EINVAL,
                             "ATTACH: the control segment was used before: attach with a new one");
    if (s->cuda)
        return 0; /* the link opens the ring */
    return map_peer(r, r->ring_fd, s->ring_bytes, "ring", &s->ring_base, err);
}

static double pick(double own, double set)
{
    return own < 0 ? 0 : own > 0 ? own : set;
}

static int start_cuda_link(struct exd_session *s, const struct exd_session_config *config,
                           const struct prt_attach_request *r, struct shm_error *err)
{
    struct krn_cuda_device *device;
    int rc = exd_device_find(config->device, r->device_uuid, &device, err);
    if (rc < 0)
        return rc;
    s->gpu = (uint32_t)device->ordinal;
    struct shm_worker *w = s->control.worker;
    struct krn_link_cuda_config link = {.device = device,
                                        .ring_bytes = s->ring_bytes,
                                        .slot_bytes = r->slot_bytes,
                                        .flag_offset = r->flag_offset,
                                        .source = config->arena->base,
                                        .source_bytes = config->arena->mapped_bytes,
                                        .landed_word = &w->landed_groups,
                                        .landed_bell = &w->landed_bell,
                                        .batch = config->batch,
                                        .name = s->name,
                                        .note = exd_log_note};
    memcpy(link.ring_handle.bytes, r->ring_handle, sizeof(link.ring_handle.bytes));
    return krn_link_cuda_create(&link, &s->link, err);
}

static int start_host_link(struct exd_session *s, const struct exd_session_config *config,
                           const struct prt_attach_request *r, struct shm_error *err)
{
    struct shm_worker *w = s->control.worker;
    s->link_gbps = pick(r->link_gbps, config->link_gbps);
    s->link_latency_us = pick(r->link_latency_us, config->link_latency_us);
    struct krn_link_host_config link = {.ring = s->ring_base,
                                        .ring_bytes = s->ring_bytes,
                                        .slot_bytes = r->slot_bytes,
                                        .landed_word = &w->landed_groups,
                                        .landed_bell = &w->landed_bell,
                                        .issuer_bell = &w->issuer_bell,
                                        .gbps = s->link_gbps,
                                        .latency_us = s->link_latency_us,
                                        .name = s->link_name,
                                        .events = s->events.link};
    return krn_link_host_create(&link, &s->link, err);
}

static void count_pace(struct exd_session *s)
{
    shm_counter_set(&s->control.worker->link.link_pace, (uint64_t)(s->link_gbps * 1e9));
}

static int start_threads(struct exd_session *s, const struct exd_session_config *config,
                         const struct prt_attach_request *r, struct shm_error *err)
{
    int rc = s->cuda ? start_cuda_link(s, config, r, err) : start_host_link(s, config, r, err);
    if (rc < 0)
        return rc;
    struct exd_issuer_config issuer = {.arena = config->arena,
                                       .control = s->control,
                                       .geometry = s->layout.geometry,
                                       .link = s->link,
                                       .settings = config->stream,
                                       .watchdog_ns = config->watchdog_ns,
                                       .trace = config->trace,
                                       .trace_file = config->trace_file,
                                       .events = s->events.issuer,
                                       .name = s->name,
                                       .fault = on_fault,
                                       .ctx = s};
    if (r->policy)
        issuer.settings.policy = r->policy;
    if (r->order)
        issuer.settings.order = r->order;
    if (r->depth)
        issuer.settings.depth = r->depth;
    if (r->floor)
        issuer.settings.floor = r->floor;
    s->floor = issuer.settings.floor;
    struct shm_link_counters *c = &s->control.worker->link;
    shm_counter_set(&c->ring_bytes, s->ring_bytes);
    count_pace(s);
    return exd_issuer_start(&issuer, &s->issuer, err);
}

/* Gives everything back; the worker is told before its segment goes. */
static void release(struct exd_session *s)
{
    exd_issuer_stop(&s->issuer); /* from here on nobody else here writes the segment */
    if (s->link)
        krn_link_drain(s->link, LINK_DRAIN_NS);
    krn_link_destroy(&s->link);
    if (s->why[0] && s->control.worker) {
        struct shm_worker *w = s->control.worker;
        snprintf(w->error_text, sizeof(w->error_text), "%s", s->why);
        /* release, pairs with the worker's acquire: the text is there */
        atomic_store_explicit(&w->detached, 1, memory_order_release);
        shm_bell_ring(&w->landed_bell);
        shm_bell_ring(&w->issuer_bell);
    }
    if (s->ring_base)
        munmap(s->ring_base, s->ring_bytes);
    if (s->control_base)
        munmap(s->control_base, s->layout.total_bytes);
    if (s->pidfd >= 0)
        close(s->pidfd);
    s->pidfd = -1;
}

int exd_session_open(const struct exd_session_config *config, const struct prt_attach_request *request,
                     uint64_t number, struct exd_session **ret_session, struct shm_error *err)
{
    struct exd_session *s = calloc(1, sizeof(*s));
    if (!s)
        return shm_error_set(err, ENOMEM, "ATTACH: no memory for a session; free some");
    s->number = number;
    s->pid = (pid_t)request->pid;
    s->pidfd = -1;
    s->cuda = request->device == PRT_DEVICE_CUDA;
    s->wake_fd = config->wake_fd;
    memcpy(s->name, request->name, sizeof(s->name));
    s->name[sizeof(s->name) - 1] = '\0';
    for (char *c = s->name; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    snprintf(s->link_name, sizeof(s->link_name), "link-%u", (unsigned)(number % 1000000));
    pthread_mutex_init(&s->lock, NULL);
    int rc = check_process(s, request, err);
    if (rc == 0)
        rc = check_geometry(s, config, request, err);
    if (rc == 0)
        rc = map_segments(s, request, err);
    if (rc == 0)
        exd_events_take(config->events, s->name, request->pid, number, &s->events);
    if (rc == 0)
        rc = start_threads(s, config, request, err);
    if (rc < 0) {
        release(s);
        exd_events_leave(&s->events);
        pthread_mutex_destroy(&s->lock);
        free(s);
        return rc;
    }
    *ret_session = s;
    return 0;
}

uint64_t exd_session_number(const struct exd_session *session)
{
    return session->number;
}

pid_t exd_session_pid(const struct exd_session *session)
{
    return session->pid;
}

const char *exd_session_name(const struct exd_session *session)
{
    return session->name;
}

int exd_session_pidfd(const struct exd_session *session)
{
    return session->pidfd;
}

uint32_t exd_session_gpu(const struct exd_session *session)
{
    return session->gpu;
}

bool exd_session_busy(struct exd_session *session)
{
    return !session->closing && exd_issuer_busy(session->issuer);
}

struct exd_session_settings exd_session_settings(struct exd_session *session)
{
    return (struct exd_session_settings){.stream = exd_issuer_settings(session->issuer),
                                         .link_gbps = session->link_gbps,
                                         .link_latency_us = session->link_latency_us};
}

int exd_session_configure(struct exd_session *session, const struct prt_configure_request *r,
                          struct shm_error *err)
{
    double gbps = pick(r->link_gbps, session->link_gbps);
    double latency_us = pick(r->link_latency_us, session->link_latency_us);
    bool pace = gbps != session->link_gbps || latency_us != session->link_latency_us;
    if (pace && session->cuda)
        return shm_error_set(err, EINVAL, "CONFIGURE: link_gbps: the link of worker %s is real, not paced",
                             session->name);
    if (pace && exd_issuer_busy(session->issuer))
        return shm_error_set(err, EBUSY,
                             "CONFIGURE: the link of worker %s is in use: pace it between two streams",
                             session->name);
    /* a worker on a GPU takes a layer of a smaller chunk as a whole, which only works while nothing is copied
     * ahead */
    if (session->cuda && r->floor && r->floor < session->floor)
        return shm_error_set(err, EINVAL,
                             "CONFIGURE: floor: worker %s attached with %u and can't go below: start it with "
                             "--floor %u",
                             session->name, session->floor, r->floor);
    struct exd_stream_settings settings = {
        .policy = r->policy, .order = r->order, .depth = r->depth, .floor = r->floor};
    int rc = exd_issuer_configure(session->issuer, &settings, err);
    if (rc < 0)
        return rc;
    if (pace) {
        krn_link_host_pace(session->link, gbps, latency_us);
        session->link_gbps = gbps;
        session->link_latency_us = latency_us;
        count_pace(session);
    }
    return 0;
}

void exd_session_drain(struct exd_session *session, const char *why)
{
    exd_issuer_drain(session->issuer, why);
}

bool exd_session_faulted(struct exd_session *session, struct shm_error *ret_line)
{
    pthread_mutex_lock(&session->lock);
    bool faulted = session->fault.code != 0;
    if (faulted)
        *ret_line = session->fault;
    pthread_mutex_unlock(&session->lock);
    return faulted;
}

static void *closer(void *arg)
{
    struct exd_session *s = arg;
    int wake_fd = s->wake_fd;
    release(s);
    atomic_store_explicit(&s->closed, true, memory_order_release);
    wake(wake_fd);
    return NULL;
}

void exd_session_close(struct exd_session *session, const char *why)
{
    if (session->closing)
        return;
    session->closing = true;
    if (why) {
        snprintf(session->why, sizeof(session->why), "%s", why);
        exd_session_drain(session, why); /* a stream that is broken off fails with the same words */
    }
    session->threaded = pthread_create(&session->closer, NULL, closer, session) == 0;
    if (!session->threaded)
        closer(session); /* no thread to be had: here, then */
}

bool exd_session_closed(const struct exd_session *session)
{
    return atomic_load_explicit(&session->closed, memory_order_acquire);
}

void exd_session_free(struct exd_session **session)
{
    struct exd_session *s = *session;
    if (!s)
        return;
    exd_session_close(s, NULL);
    if (s->threaded)
        pthread_join(s->closer, NULL);
    exd_events_leave(&s->events);
    pthread_mutex_destroy(&s->lock);
    free(s);
    *session = NULL;
}
