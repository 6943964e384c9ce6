/* SPDX-License-Identifier: MIT */
#include "race_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WAIT_LIMIT_NS UINT64_C(20000000000)
#define WAIT_SLICE_NS UINT64_C(20000000) /* how long a dead peer goes unnoticed */
#define POISON        0xdb

uint64_t race_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static void *shared_memory(const char *name, size_t bytes, int *ret_fd)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0)
        return NULL;
    void *p = MAP_FAILED;
    if (ftruncate(fd, (off_t)bytes) == 0)
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        close(fd);
        return NULL;
    }
    *ret_fd = fd;
    return p;
}

/* ---- arena ---- */

struct arena_memory {
    struct shm_catalog catalog;
    struct shm_layer layers[];
};

int race_arena_create(uint32_t layers, uint32_t experts, uint32_t blob_bytes, bool all_ready,
                      struct race_arena *ret_arena)
{
    uint64_t stride = (blob_bytes + 255u) & ~255u;
    uint64_t tables = sizeof(struct arena_memory) + layers * sizeof(struct shm_layer);
    uint64_t data = (tables + layers * experts + 4095u) & ~UINT64_C(4095);
    struct race_arena a = {.bytes = data + (uint64_t)layers * experts * stride};
    a.base = shared_memory("race-arena", a.bytes, &a.fd);
    if (!a.base)
        return -ENOMEM;
    struct arena_memory *m = a.base;
    m->catalog.hparams.layers = m->catalog.n_layers = layers;
    m->catalog.hparams.experts = experts;
    a.ready = (_Atomic uint8_t *)((char *)a.base + tables);
    for (uint32_t l = 0; l < layers; l++) {
        m->layers[l].blobs_offset = data + (uint64_t)l * experts * stride;
        m->layers[l].blob_bytes = blob_bytes;
        m->layers[l].blob_stride = stride;
        for (uint32_t e = 0; e < experts; e++) {
            uint64_t seed = (uint64_t)l << 32 | e;
            uint64_t *words = (uint64_t *)((char *)a.base + m->layers[l].blobs_offset + e * stride);
            for (uint32_t i = 0; i < stride / 8; i++)
                words[i] = race_random(&seed);
        }
    }
    memset((void *)a.ready, all_ready, layers * experts);
    a.view = (struct shm_arena_view){.base = a.base,
                                     .mapped_bytes = a.bytes,
                                     .catalog = &m->catalog,
                                     .layers = m->layers,
                                     .ready = a.ready,
                                     .units = layers * experts,
                                     .blob_bytes_max = blob_bytes};
    *ret_arena = a;
    return 0;
}

void race_arena_destroy(struct race_arena *a)
{
    munmap(a->base, a->bytes);
    close(a->fd);
}

/* ---- worker ---- */

int race_worker_create(const struct race_arena *arena, uint32_t ring, uint64_t seed,
                       struct race_worker *ret_worker)
{
    struct race_worker w = {.arena = arena, .rng = seed, .peer_pidfd = -1};
    struct shm_worker_layout layout;
    struct shm_error err;
    w.geometry = (struct shm_geometry){
        .layers = arena->view.catalog->hparams.layers,
        .experts = arena->view.catalog->hparams.experts,
        .ring = ring,
        .group_entries = shm_group_entries(ring),
        .slot_bytes = arena->view.layers[0].blob_stride,
    };
    w.geometry.groups_per_layer = shm_groups_per_layer(w.geometry.experts, w.geometry.group_entries);
    int rc = shm_worker_layout(&w.geometry, &layout, &err);
    if (rc)
        return rc;
    w.control_bytes = layout.total_bytes;
    w.ring_bytes = ring * w.geometry.slot_bytes;
    w.control = shared_memory("race-control", w.control_bytes, &w.control_fd);
    if (!w.control)
        return -ENOMEM;
    w.ring = shared_memory("race-ring", w.ring_bytes, &w.ring_fd);
    if (!w.ring) {
        munmap(w.control, w.control_bytes);
        close(w.control_fd);
        return -ENOMEM;
    }
    shm_worker_view(w.control, &layout, &w.view);
    shm_header_init(&w.view.worker->header, SHM_WORKER_MAGIC, w.control_bytes, (uint32_t)getpid(), 1);
    w.view.worker->geometry = w.geometry;
    shm_header_publish(&w.view.worker->header, 1);
    memset(w.ring, POISON, w.ring_bytes);
    *ret_worker = w;
    return 0;
}

void race_worker_destroy(struct race_worker *w)
{
    munmap(w->control, w->control_bytes);
    munmap(w->ring, w->ring_bytes);
    close(w->control_fd);
    close(w->ring_fd);
}

static int broken(struct race_worker *w, const char *what, uint64_t a, uint64_t b)
{
    snprintf(w->error, sizeof w->error, "stream %llu: %s (%llu, %llu)", (unsigned long long)w->seq, what,
             (unsigned long long)a, (unsigned long long)b);
    return -EBADMSG;
}

static uint32_t below(struct race_worker *w, uint32_t n)
{
    return (uint32_t)(race_random(&w->rng) % n);
}

static void pause_some(struct race_worker *w)
{
    uint32_t dice = below(w, 16);
    if (dice < 2)
        sched_yield();
    if (w->slow && dice == 15)
        nanosleep(&(struct timespec){.tv_nsec = (long)below(w, 1000000)}, NULL);
}

static bool peer_gone(const struct race_worker *w)
{
    struct pollfd p = {.fd = w->peer_pidfd, .events = POLLIN};
    return w->peer_pidfd >= 0 && poll(&p, 1, 0) == 1;
}

/* Waits until *word >= value; for landed groups also ends when the stream does. */
static int wait_word(struct race_worker *w, const _Atomic uint64_t *word, uint64_t value, const char *what)
{
    struct shm_worker *sw = w->view.worker;
    uint64_t deadline = shm_now_ns() + WAIT_LIMIT_NS;
    for (;;) {
        if (atomic_load_explicit(word, memory_order_acquire) >= value)
            return 0;
        if (word != &sw->done_seq && atomic_load_explicit(&sw->done_seq, memory_order_acquire) >= w->seq)
            return -ESHUTDOWN;
        uint32_t ticket = shm_bell_prepare(&sw->landed_bell);
        if (atomic_load_explicit(word, memory_order_acquire) >= value ||
            atomic_load_explicit(&sw->done_seq, memory_order_acquire) >= w->seq) {
            shm_bell_cancel(&sw->landed_bell);
            continue;
        }
        if (shm_bell_wait(&sw->landed_bell, ticket, WAIT_SLICE_NS) == 0)
            continue;
        if (peer_gone(w))
            return -EPIPE;
        if (shm_now_ns() > deadline) {
            broken(w, what, value, atomic_load(word));
            return -ETIMEDOUT;
        }
    }
}

static void random_mask(struct race_worker *w, uint32_t kind, struct shm_mask *mask)
{
    memset(mask, 0, sizeof *mask);
    for (uint32_t e = 0; e < w->geometry.experts; e++)
        if (kind == 1 || (kind > 1 && below(w, 8) < kind))
            shm_mask_set(mask, e);
}

static void post(struct race_worker *w, const struct race_stream *s)
{
    const struct shm_geometry *g = &w->geometry;
    struct shm_worker *sw = w->view.worker;
    uint32_t resident = below(w, 3) ? 0 : 2;
    for (uint32_t l = 0; l < g->layers; l++)
        random_mask(w, resident, &w->view.resident[l]);
    for (uint32_t i = 0; i < g->layers * g->experts; i++)
        w->view.recent[i] = below(w, 50);
    atomic_store_explicit(&sw->wait_ns, 0, memory_order_relaxed);
    sw->descriptor = (struct shm_descriptor){.seq = w->seq,
                                             .group_base = w->group_base,
                                             .tokens = s->tokens,
                                             .flags = s->predicts ? SHM_STREAM_PREDICTS : 0};
    atomic_store_explicit(&sw->stream_seq, w->seq, memory_order_release);
    shm_bell_ring(&sw->issuer_bell);
}

static void publish(struct race_worker *w, uint32_t layer, struct shm_mask *ret_routed)
{
    const struct shm_geometry *g = &w->geometry;
    struct shm_route *route = &w->view.route[layer];
    random_mask(w, below(w, 8), ret_routed);
    for (uint32_t e = 0; e < g->experts; e++) {
        w->view.tokens[layer * g->experts + e] = shm_mask_test(ret_routed, e) ? 1 + below(w, 9) : 0;
        if (layer + 1 < g->layers)
            w->view.predicted[(layer + 1) * g->experts + e] = below(w, 2) * below(w, 30);
    }
    route->mask = *ret_routed;
    route->published_ns = shm_now_ns();
    atomic_store_explicit(&route->seq, w->seq, memory_order_release);
    shm_bell_ring(&w->view.worker->issuer_bell);
}

/* Compares the group's routed slots with the arena and poisons them. */
static int run_group(struct race_worker *w, uint32_t layer, uint32_t group, const struct shm_mask *routed,
                     struct shm_mask *ran)
{
    const struct shm_geometry *g = &w->geometry;
    for (uint32_t e = 0; e < g->experts; e++) {
        uint32_t entry = atomic_load_explicit(&w->view.table[layer * g->experts + e], memory_order_relaxed);
        bool resident = shm_mask_test(&w->view.resident[layer], e);
        if (resident || shm_entry_state(entry) != SHM_ENTRY_SLOT || shm_entry_group(entry) != group)
            continue;
        if (shm_entry_slot(entry) >= g->ring)
            return broken(w, "slot past the ring", shm_entry_slot(entry), g->ring);
        uint8_t *slot = w->ring + shm_entry_slot(entry) * g->slot_bytes;
        size_t bytes = w->arena->view.layers[layer].blob_bytes;
        if (shm_mask_test(routed, e)) {
            if (shm_mask_test(ran, e))
                return broken(w, "expert run twice, layer and expert", layer, e);
            shm_mask_set(ran, e);
            if (memcmp(slot, shm_arena_blob(&w->arena->view, layer, e), bytes))
                return broken(w, "slot does not hold the expert, layer and expert", layer, e);
            pause_some(w);
            if (memcmp(slot, shm_arena_blob(&w->arena->view, layer, e), bytes))
                return broken(w, "slot changed during its use, layer and expert", layer, e);
        }
        memset(slot, POISON, bytes);
    }
    return 0;
}

static int check_report(struct race_worker *w, const struct race_stream *s, uint64_t routed,
                        uint64_t streamed)
{
    struct shm_report r;
    if (shm_report_read(w->view.worker, w->seq, &r))
        return broken(w, "report not whole", 0, 0);
    if (r.policy != s->policy || r.order != s->order || r.tokens != s->tokens)
        return broken(w, "report: policy and order", r.policy, r.order);
    if (r.entries != streamed || r.copied + r.dropped != r.entries)
        return broken(w, "report: entries, streamed", r.entries, streamed);
    if (r.routed != routed || r.copied - r.wasted != routed)
        return broken(w, "report: routed experts", r.routed, routed);
    if (r.bytes != r.copied * w->arena->view.layers[0].blob_bytes)
        return broken(w, "report: bytes", r.bytes, r.copied);
    if (s->policy != SHM_POLICY_FULL && r.outstanding_max > s->depth)
        return broken(w, "report: outstanding past depth", r.outstanding_max, s->depth);
    if (s->policy == SHM_POLICY_DEMAND && r.wasted)
        return broken(w, "report: copied on demand without a token", r.wasted, 0);
    if (s->policy == SHM_POLICY_FULL && r.dropped)
        return broken(w, "report: dropped under the full policy", r.dropped, 0);
    return 0;
}

/* The stream is over for both sides: its groups are spent. */
static int finish(struct race_worker *w, uint32_t expected)
{
    struct shm_worker *sw = w->view.worker;
    int rc = wait_word(w, &sw->done_seq, w->seq, "done_seq never came");
    if (rc)
        return rc;
    w->group_base += (uint64_t)w->geometry.layers * w->geometry.groups_per_layer;
    uint32_t result = atomic_load_explicit(&sw->result, memory_order_relaxed);
    atomic_store_explicit(&sw->released_groups, w->group_base, memory_order_release);
    if (result == SHM_RESULT_FAILED)
        return -ESHUTDOWN;
    if (result != expected)
        return broken(w, "result of the stream, expected", result, expected);
    uint64_t landed = atomic_load_explicit(&sw->landed_groups, memory_order_acquire);
    return landed == w->group_base ? 0 : broken(w, "landed groups at the end", landed, w->group_base);
}

static int cancel(struct race_worker *w)
{
    atomic_store_explicit(&w->view.worker->cancel_seq, w->seq, memory_order_release);
    shm_bell_ring(&w->view.worker->issuer_bell);
    int rc = finish(w, SHM_RESULT_CANCELLED);
    memset(w->ring, POISON, w->ring_bytes);
    return rc ? rc : -ECANCELED;
}

int race_worker_stream(struct race_worker *w, const struct race_stream *s)
{
    const struct shm_geometry *g = &w->geometry;
    struct shm_worker *sw = w->view.worker;
    uint64_t number = 0, routed_sum = 0, streamed = 0;
    w->seq++;
    post(w, s);
    for (uint32_t l = 0; l < g->layers; l++) {
        struct shm_mask routed, ran = {{0}};
        pause_some(w);
        if (number >= s->cancel_at)
            return cancel(w);
        publish(w, l, &routed);
        for (uint32_t group = 0; group < g->groups_per_layer; group++, number++) {
            if (number == s->cancel_at)
                return cancel(w);
            int rc = wait_word(w, &sw->landed_groups, w->group_base + number + 1, "group never landed");
            if (rc == -ESHUTDOWN)
                return (rc = finish(w, SHM_RESULT_FAILED)) ? rc : -ESHUTDOWN;
            if (rc || (rc = run_group(w, l, group, &routed, &ran)))
                return rc;
            pause_some(w);
            atomic_store_explicit(&sw->released_groups, w->group_base + number + 1, memory_order_release);
            shm_bell_ring(&sw->issuer_bell);
        }
        for (uint32_t e = 0; e < g->experts; e++) {
            bool resident = shm_mask_test(&w->view.resident[l], e);
            if (shm_mask_test(&ran, e) != (shm_mask_test(&routed, e) && !resident))
                return broken(w, "routed expert that did not run, layer and expert", l, e);
            streamed += !resident;
            routed_sum += shm_mask_test(&routed, e) && !resident;
        }
    }
    int rc = finish(w, SHM_RESULT_OK);
    return rc ? rc : check_report(w, s, routed_sum, streamed);
}

/* ---- leaks ---- */

int race_count_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

int race_count_maps(const char *name)
{
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    int n = 0;
    while (f && fgets(line, sizeof line, f))
        n += strstr(line, name) != NULL;
    if (f)
        fclose(f);
    return n;
}
