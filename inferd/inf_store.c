/* SPDX-License-Identifier: MIT */
#include "inferd/inf_store.h"

#include "proto/prt_file.h"
#include "proto/prt_guard.h"
#include "proto/prt_log.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RING_BYTES_AUTO  (UINT64_C(1) << 30)
#define STALL_NS         UINT64_C(60000000000) /* loading without progress */
#define OPEN_INTERVAL_MS 20
#define START_NS         UINT64_C(600000000000) /* registering hundreds of GB takes its time */
#define START_TELL_NS    UINT64_C(2000000000)
#define START_SLICE_MS   100u

void inf_store_init(struct inf_store *s, const struct inf_store_config *config, struct inf_device *device)
{
    *s = (struct inf_store){
        .config = *config, .device = device, .control_fd = -1, .ring = {.fd = -1}, .events = {.fd = -1}};
}

static bool cancelled(const struct inf_store *s)
{
    return s->config.cancel && atomic_load_explicit(s->config.cancel, memory_order_relaxed);
}

static void close_session(struct inf_store *s)
{
    if (s->stream)
        inf_stream_cancel(s->stream, NULL);
    if (s->session && s->client && s->stream && inf_stream_alive(s->stream))
        prt_client_detach(s->client, s->session, NULL);
    s->session = 0;
    inf_stream_destroy(&s->stream);
    if (s->ring_open)
        s->device->ops->ring_close(s->device, &s->ring);
    s->ring_open = false;
    if (s->control_base)
        munmap(s->control_base, s->layout.total_bytes);
    if (s->control_fd >= 0)
        close(s->control_fd);
    s->control_base = NULL;
    s->control_fd = -1;
}

static void close_life(struct inf_store *s)
{
    close_session(s);
    prt_guard_remove(s->arena_base);
    if (s->arena_base)
        munmap(s->arena_base, s->arena_bytes);
    s->arena_base = NULL;
    prt_client_close(&s->client);
}

void inf_store_close(struct inf_store *s)
{
    close_life(s);
    free(s->resident);
    inf_events_close(&s->events);
    inf_store_init(s, &(struct inf_store_config){0}, NULL);
}

bool inf_store_alive(const struct inf_store *s)
{
    if (!s->stream || !inf_stream_alive(s->stream))
        return false;
    /* A draining one begins no stream any more: the next one is to be waited for. acquire as for any state */
    return !s->client || atomic_load_explicit(&prt_client_store(s->client)->state, memory_order_acquire) <
                             SHM_STORE_DRAINING;
}

/* expertd is there, and takes workers once its memory is made and registered. */
static int wait_serving(struct inf_store *s, uint64_t limit_ns, struct shm_error *err)
{
    const uint64_t start_ns = shm_now_ns();
    bool told = false;
    for (;;) {
        int rc = prt_client_wait_serving(s->client, START_SLICE_MS, err);
        if (rc != -ETIMEDOUT)
            return rc;
        if (cancelled(s))
            return shm_error_set(err, ECANCELED, "cancelled");
        const uint64_t ns = shm_now_ns() - start_ns;
        if (ns > limit_ns)
            return shm_error_set(err, ETIMEDOUT,
                                 "expertd of instance '%s' is still starting after %.1f s: its log says what "
                                 "it does; try again",
                                 s->config.instance ? s->config.instance : "default", (double)ns / 1e9);
        if (!told && ns > START_TELL_NS) {
            told = true;
            prt_log(PRT_LOG_NOTICE, "expertd is starting: waiting until it takes workers");
        }
    }
}

static int open_client(struct inf_store *s, uint32_t wait_ms, struct shm_error *err)
{
    uint64_t deadline_ns = shm_now_ns() + (uint64_t)wait_ms * 1000000u;
    for (;;) {
        int rc = prt_client_open(s->config.runtime_dir, s->config.instance, 0, &s->client, err);
        if (!rc)
            rc = wait_serving(s, wait_ms ? wait_ms * UINT64_C(1000000) : START_NS, err);
        /* One that drains would refuse, and log it, as often as it is asked. acquire as for any state */
        if (!rc && atomic_load_explicit(&prt_client_store(s->client)->state, memory_order_acquire) ==
                       SHM_STORE_DRAINING)
            rc = shm_error_set(err, ESHUTDOWN, "expertd is ending: attach to the next one");
        if (!rc)
            return 0;
        prt_client_close(&s->client);
        if (rc != -ENOENT && rc != -ESTALE && rc != -EAGAIN && rc != -ESRCH)
            return rc;
        if (cancelled(s))
            return shm_error_set(err, ECANCELED, "cancelled");
        /* A store that is just being written is worth a moment in any case. */
        if (shm_now_ns() > deadline_ns + (rc == -EAGAIN ? UINT64_C(2000000000) : 0))
            return rc;
        poll(NULL, 0, OPEN_INTERVAL_MS);
    }
}

/* Waits until `unit` is loaded, as long as the loader makes progress. */
static int wait_ready(struct inf_store *s, uint32_t unit, struct shm_error *err)
{
    const struct shm_store *store = prt_client_store(s->client);
    uint64_t done = 0, moved_ns = 0;
    while (!shm_arena_ready(&s->arena, unit)) {
        struct pollfd p = {.fd = prt_client_expertd_pidfd(s->client), .events = POLLIN};
        if (poll(&p, 1, 2) > 0)
            return shm_error_set(err, ESHUTDOWN, "expertd ended while it was loading the model: see its log");
        if (cancelled(s))
            return shm_error_set(err, ECANCELED, "cancelled");
        uint64_t now_done = shm_counter_get(&store->counters.load_bytes);
        uint64_t now_ns = shm_now_ns();
        if (!moved_ns || now_done != done) {
            done = now_done;
            moved_ns = now_ns;
        } else if (now_ns - moved_ns > STALL_NS) {
            return shm_error_set(err, ETIMEDOUT,
                                 "expertd has loaded nothing for 60 s (waiting for unit %u of the arena): "
                                 "see 'expertctl status'",
                                 unit);
        }
    }
    return 0;
}

void inf_store_touch(const struct inf_store *s)
{
    if (s->arena_base)
        (void)*((const volatile uint8_t *)s->arena_base + s->arena_bytes - 1);
}

static int open_arena(struct inf_store *s, struct shm_error *err)
{
    const struct shm_store *store = prt_client_store(s->client);
    char path[SHM_PATH_BYTES];
    memcpy(path, store->arena_path, sizeof path);
    path[sizeof path - 1] = '\0';
    int rc = prt_file_map_path(path, sizeof(struct shm_arena), false, &s->arena_base, &s->arena_bytes, err);
    if (rc)
        return rc;
    prt_guard_add(s->arena_base, s->arena_bytes, "arena", path,
                  "start expertd again, which builds it anew, then inferd");
    rc = shm_arena_open(s->arena_base, s->arena_bytes, path, &s->arena, err);
    if (rc)
        return rc;
    if (s->bound && memcmp(s->fingerprint, s->arena.arena->fingerprint, sizeof s->fingerprint) != 0)
        return shm_error_set(err, EUCLEAN, "expertd now serves another model ('%s'): start inferd anew",
                             s->arena.catalog->hparams.name);
    memcpy(s->fingerprint, s->arena.arena->fingerprint, sizeof s->fingerprint);
    s->bound = true;
    for (uint32_t unit = 0; unit < s->arena.catalog->n_dense; unit++)
        if ((rc = wait_ready(s, unit, err)))
            return rc;
    return 0;
}

static int copy_residents(struct inf_store *s, struct shm_error *err)
{
    const struct shm_hparams *h = &s->arena.catalog->hparams;
    uint32_t n = s->config.resident < h->experts ? s->config.resident : h->experts;
    if (s->resident || !n)
        return 0;
    uint64_t bytes = 0, at = 0;
    for (uint32_t l = 0; l < h->layers; l++)
        bytes += s->arena.layers[l].blob_stride * n;
    const struct inf_device_ops *ops = s->device->ops;
    const uint8_t **table = calloc((size_t)h->layers * h->experts, sizeof *table);
    if (!table)
        return -ENOMEM;
    uint8_t *memory;
    int rc = ops->resident_open(s->device, bytes, &memory, err);
    for (uint32_t l = 0; !rc && l < h->layers; l++) {
        for (uint32_t e = 0; !rc && e < n; e++) {
            rc = wait_ready(s, shm_arena_blob_unit(&s->arena, l, e), err);
            if (!rc)
                rc = ops->resident_put(s->device, memory + at, shm_arena_blob(&s->arena, l, e),
                                       s->arena.layers[l].blob_bytes, err);
            table[(size_t)l * h->experts + e] = memory + at;
            at += s->arena.layers[l].blob_stride;
        }
    }
    if (!rc)
        rc = ops->resident_done(s->device, table, h->layers, h->experts, err);
    if (rc) {
        free(table);
        return rc;
    }
    s->resident = table;
    s->resident_bytes = s->filled_bytes = bytes;
    s->all_resident = n == h->experts;
    return 0;
}

/* Control segment and ring for this arena. */
static int create_segments(struct inf_store *s, struct prt_attach_request *request, struct shm_error *err)
{
    const struct shm_hparams *h = &s->arena.catalog->hparams;
    struct shm_geometry g = {.layers = h->layers, .experts = h->experts, .ring = s->config.ring};
    g.slot_bytes = (s->arena.blob_bytes_max + 255) & ~UINT64_C(255);
    if (!g.ring) {
        uint64_t fits = RING_BYTES_AUTO / g.slot_bytes, want = 2 * (uint64_t)h->experts;
        g.ring = (uint32_t)(fits < 2 ? 2 : fits < want ? fits : want);
    }
    g.group_entries = shm_group_entries(g.ring);
    g.groups_per_layer = shm_groups_per_layer(g.experts, g.group_entries);
    int rc = shm_worker_layout(&g, &s->layout, err);
    if (rc)
        return rc;
    rc = prt_segment_create("inferd-control", s->layout.total_bytes, &s->control_fd, &s->control_base, err);
    if (rc)
        return rc;
    shm_worker_view(s->control_base, &s->layout, &s->control);
    rc = s->device->ops->ring_open(s->device, &g, &s->control, s->layout.total_bytes, &s->ring, request, err);
    if (rc)
        return rc;
    s->ring_open = true;
    uint64_t start;
    if ((rc = prt_process_start(getpid(), &start)))
        return shm_error_set(err, rc, "/proc/self/stat cannot be read: %s", strerror(rc < 0 ? -rc : rc));
    s->control.worker->geometry = g;
    for (uint32_t l = 0; s->resident && l < g.layers; l++)
        for (uint32_t e = 0; e < g.experts; e++)
            if (s->resident[(size_t)l * g.experts + e])
                shm_mask_set(&s->control.resident[l], e);
    s->control.worker->server_fd = s->config.server_fd;
    if (inf_events_open(&s->events, s->config.name))
        s->control.worker->trace_fd = (uint32_t)s->events.fd;
    struct shm_compute_counters *c = &s->control.worker->compute;
    shm_counter_set(&c->resident_bytes, s->resident_bytes);
    shm_counter_set(&c->resident_fill_bytes, s->filled_bytes);
    shm_counter_set(&c->resident_experts,
                    s->resident ? (uint64_t)g.layers *
                                      (s->config.resident < g.experts ? s->config.resident : g.experts)
                                : 0);
    s->filled_bytes = 0; /* told once: they stay over the next attach */
    shm_header_init(&s->control.worker->header, SHM_WORKER_MAGIC, s->layout.total_bytes, (uint32_t)getpid(),
                    start);
    shm_header_publish(&s->control.worker->header, prt_random_epoch());
    return 0;
}

static void quiesce(void *ctx, uint64_t end_group)
{
    struct inf_device *d = ctx;
    d->ops->quiesce(d, end_group);
}

static int attach(struct inf_store *s, struct prt_attach_request *request, struct shm_error *err)
{
    const struct shm_geometry *g = &s->layout.geometry;
    request->pid = (uint32_t)getpid();
    request->start = s->control.worker->header.writer_start;
    request->control_fd = (uint32_t)s->control_fd;
    request->layers = g->layers;
    request->experts = g->experts;
    request->ring = g->ring;
    request->group_entries = g->group_entries;
    request->groups_per_layer = g->groups_per_layer;
    request->slot_bytes = g->slot_bytes;
    request->policy = s->config.policy;
    request->order = s->config.order;
    request->depth = s->config.depth;
    request->floor = s->config.floor;
    request->link_gbps = s->config.link_gbps;
    request->link_latency_us = s->config.link_latency_us;
    strncpy(request->name, s->config.name, sizeof request->name - 1);
    struct prt_attach_reply reply;
    int rc = prt_client_attach(s->client, request, &reply, err);
    if (s->device->ops->ring_attached)
        s->device->ops->ring_attached(s->device);
    if (rc)
        return rc;
    s->session = reply.session;
    struct shm_event_writer *events = s->events.fd < 0 ? NULL : &s->events.writer;
    inf_event_join(events, s->session, g->ring);
    shm_counter_set(&s->control.worker->compute.link_floor, reply.floor);
    s->settings = (struct inf_settings){.policy = reply.policy,
                                        .order = reply.order,
                                        .depth = reply.depth,
                                        .floor = reply.floor,
                                        .link_gbps = reply.link_gbps,
                                        .link_latency_us = reply.link_latency_us};
    const struct inf_stream_config c = {.control = s->control,
                                        .geometry = *g,
                                        .ring = s->ring.host,
                                        .quiesce = quiesce,
                                        .quiesce_ctx = s->device,
                                        .expertd_pidfd = prt_client_expertd_pidfd(s->client),
                                        .watchdog_ns = s->config.watchdog_ns,
                                        .cancel = s->config.cancel,
                                        .events = events,
                                        .poison = s->config.poison && s->ring.host};
    return inf_stream_create(&c, &s->stream);
}

int inf_store_find(struct inf_store *s, uint32_t wait_ms, struct shm_error *err)
{
    close_life(s);
    int rc;
    if ((rc = open_client(s, wait_ms, err)) || (rc = open_arena(s, err)))
        close_life(s);
    return rc;
}

int inf_store_join(struct inf_store *s, struct shm_error *err)
{
    int rc;
    struct prt_attach_request request = {0};
    if ((rc = copy_residents(s, err)) || (rc = create_segments(s, &request, err)) ||
        (rc = attach(s, &request, err)))
        close_life(s);
    return rc;
}

int inf_store_attach(struct inf_store *s, uint32_t wait_ms, struct shm_error *err)
{
    int rc = inf_store_find(s, wait_ms, err);
    return rc ? rc : inf_store_join(s, err);
}

int inf_store_configure(struct inf_store *s, const struct inf_settings *set, struct shm_error *err)
{
    if (!s->session)
        return shm_error_set(err, ESHUTDOWN, "no expertd is attached: start expertd");
    struct prt_configure_request request = {.session = s->session,
                                            .policy = set->policy,
                                            .order = set->order,
                                            .depth = set->depth,
                                            .floor = set->floor,
                                            .link_gbps = set->link_gbps,
                                            .link_latency_us = set->link_latency_us};
    struct prt_configure_reply reply;
    int rc = prt_client_configure(s->client, &request, &reply, err);
    if (rc)
        return rc;
    s->settings = (struct inf_settings){.policy = reply.policy,
                                        .order = reply.order,
                                        .depth = reply.depth,
                                        .floor = reply.floor,
                                        .link_gbps = reply.link_gbps,
                                        .link_latency_us = reply.link_latency_us};
    return 0;
}
