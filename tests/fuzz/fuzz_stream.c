/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: expertd's side of the stream against a worker that writes
 * whatever it likes into its control segment, whenever it likes.
 *
 * The input is a geometry, settings, and a list of acts: raw bytes anywhere in
 * the segment, or something a worker would do (post, publish, release,
 * cancel), true or nearly. The walk runs for real over a link that checks what
 * it is asked: copies end inside the ring, come from the arena, are no more
 * than the walk allows at once and no more than one an entry, signals only grow. Segment,
 * ring and arena are exact allocations, so that a sanitizer sees a step beside.
 *
 * Some inputs run the issuer's thread instead, with a short watchdog: it must
 * come to an end, whatever the worker wrote.
 */
#include "expertd/exd_issuer.h"
#include "expertd/exd_log.h"
#include "expertd/exd_stream.h"
#include "tests/fuzz/fuzz.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MUST(x)                                                                                              \
    do {                                                                                                     \
        if (!(x))                                                                                            \
            abort();                                                                                         \
    } while (0)

#define BLOB        256u
#define STREAMS_MAX 8u
#define WATCHDOG_NS UINT64_C(3000000)
#define ISSUER_NS   UINT64_C(60000000000) /* far beyond, on a busy machine too: a hang */
#define STEPS_MAX   200000u

/* ---- input ---- */

struct input {
    const uint8_t *at, *end;
};

static uint8_t byte(struct input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

static uint32_t word(struct input *in)
{
    uint32_t low = byte(in);
    return low | (uint32_t)byte(in) << 8;
}

/* ---- arena ---- */

struct arena {
    struct shm_catalog catalog;
    struct shm_layer layers[4];
    struct shm_arena_view view;
    uint8_t *blobs;
    _Atomic uint8_t *ready;
};

static void arena_make(struct arena *a, uint32_t layers, uint32_t experts)
{
    memset(a, 0, sizeof *a);
    a->catalog.hparams.layers = a->catalog.n_layers = layers;
    a->catalog.hparams.experts = experts;
    a->blobs = aligned_alloc(BLOB, (size_t)layers * experts * BLOB);
    a->ready = malloc(layers * experts);
    MUST(a->blobs && a->ready);
    memset(a->blobs, 0x5a, (size_t)layers * experts * BLOB);
    memset((void *)a->ready, 1, layers * experts);
    for (uint32_t l = 0; l < layers; l++)
        a->layers[l] = (struct shm_layer){
            .blobs_offset = (uint64_t)l * experts * BLOB, .blob_bytes = BLOB - 8 * l, .blob_stride = BLOB};
    a->view = (struct shm_arena_view){.base = a->blobs,
                                      .mapped_bytes = (uint64_t)layers * experts * BLOB,
                                      .catalog = &a->catalog,
                                      .layers = a->layers,
                                      .ready = a->ready,
                                      .units = layers * experts,
                                      .blob_bytes_max = BLOB};
}

/* ---- link ---- */

struct link {
    struct krn_link base;
    const struct arena *arena;
    struct shm_worker *worker;
    uint8_t *ring;
    uint64_t ring_bytes;
    uint64_t copies, landed, stream_copies, signalled;
    uint32_t most; /* copies at once; 0: not limited */
    bool lazy;     /* copies land only when the input says so */
};

static struct link *self(struct krn_link *l)
{
    return (struct link *)l;
}

static int link_copy(struct krn_link *base, uint64_t offset, const void *src, size_t bytes, bool more)
{
    struct link *l = self(base);
    const uint8_t *from = src;
    (void)more;
    MUST(bytes <= BLOB && offset % BLOB == 0 && offset <= l->ring_bytes - bytes);
    MUST(from >= l->arena->blobs && from + bytes <= l->arena->blobs + (size_t)l->arena->view.units * BLOB);
    MUST((size_t)(from - l->arena->blobs) % BLOB == 0);
    memcpy(l->ring + offset, src, bytes);
    l->copies++;
    MUST(++l->stream_copies <= l->arena->view.units);
    MUST(!l->most || l->copies - l->landed <= l->most);
    if (!l->lazy)
        l->landed = l->copies;
    return 0;
}

static int link_signal(struct krn_link *base, uint64_t value)
{
    struct link *l = self(base);
    MUST(value >= l->signalled);
    l->signalled = value;
    atomic_store_explicit(&l->worker->landed_groups, value, memory_order_release);
    return 0;
}

static uint64_t link_landed(struct krn_link *base)
{
    return self(base)->landed;
}

static int link_drain(struct krn_link *base, uint64_t timeout_ns)
{
    (void)timeout_ns;
    self(base)->landed = self(base)->copies;
    return 0;
}

static void link_mark(struct krn_link *base)
{
    self(base)->stream_copies = 0;
}

static void link_stats(struct krn_link *base, struct krn_link_stats *ret)
{
    *ret = (struct krn_link_stats){.copies = self(base)->copies};
}

static const struct krn_link_ops link_ops = {.copy = link_copy,
                                             .signal = link_signal,
                                             .landed = link_landed,
                                             .drain = link_drain,
                                             .mark = link_mark,
                                             .stats = link_stats};

/* ---- the worker ---- */

struct world {
    struct arena arena;
    struct shm_geometry geometry;
    struct shm_worker_layout layout;
    struct shm_worker_view view;
    struct link link;
    uint8_t *control;
    uint64_t seq, group_base; /* of the stream that is due or runs */
    struct exd_stream_settings settings;
};

static void post(struct world *w, uint32_t tokens, uint32_t flags)
{
    struct shm_worker *s = w->view.worker;
    s->descriptor =
        (struct shm_descriptor){.seq = w->seq, .group_base = w->group_base, .tokens = tokens, .flags = flags};
    atomic_store(&s->released_groups, w->group_base);
    atomic_store(&s->stream_seq, w->seq);
    shm_bell_ring(&s->issuer_bell);
}

static void publish(struct world *w, uint32_t layer, uint8_t pattern)
{
    struct shm_route *r = &w->view.route[layer % w->geometry.layers];
    memset(&r->mask, pattern, sizeof r->mask);
    atomic_store(&r->seq, w->seq);
}

/* One act of the input. Returns false at its end. */
static bool act(struct world *w, struct input *in)
{
    struct shm_worker *s = w->view.worker;
    if (in->at >= in->end)
        return false;
    uint8_t kind = byte(in);
    switch (kind % 12) {
    case 0: /* some bytes somewhere */
    case 1: {
        uint64_t at = (word(in) | (uint64_t)word(in) << 16) % w->layout.total_bytes;
        uint32_t n = 1 + byte(in) % 16u;
        for (uint32_t i = 0; i < n && at + i < w->layout.total_bytes; i++)
            w->control[at + i] = byte(in);
        break;
    }
    case 2: { /* a word of the head, aligned: mostly one that means something */
        uint64_t at = word(in) % (offsetof(struct shm_worker, report) / 8) * 8, v = word(in);
        if (v & 0x8000)
            v = ~v;
        memcpy(w->control + at, &v, sizeof v);
        break;
    }
    case 3: {
        uint8_t layer = byte(in);
        publish(w, layer, byte(in));
        break;
    }
    case 4: /* what was signalled, give or take */
        atomic_store(&s->released_groups, w->link.signalled + (uint64_t)(int64_t)(int8_t)byte(in));
        break;
    case 5:
    case 6:
        atomic_store(&s->released_groups, w->link.signalled);
        break;
    case 7:
        atomic_store(&s->cancel_seq, w->seq + byte(in) % 2);
        break;
    case 8:
        w->link.landed += w->link.landed < w->link.copies;
        break;
    case 9:
        w->arena.ready[word(in) % w->arena.view.units] = byte(in) & 1;
        break;
    case 10:
        memset(w->control, byte(in), w->layout.total_bytes);
        break;
    default:
        for (uint32_t l = 0; l < w->geometry.layers; l++)
            publish(w, l, 0xff);
        w->link.landed = w->link.copies;
    }
    shm_bell_ring(&s->issuer_bell);
    return true;
}

/* One stream by the walk alone, an act at every wait. False: the worker would be detached. */
static bool direct(struct world *w, struct exd_stream *stream, struct input *in)
{
    struct exd_stream_plan plan;
    struct shm_error err = {0};
    uint32_t tokens = 1 + word(in);
    post(w, tokens, byte(in));
    if (byte(in) % 4 == 0)
        act(w, in);
    if (exd_stream_begin(stream, w->seq, w->group_base, &w->settings, &plan, &err)) {
        MUST(err.code && err.text[0]);
        return false;
    }
    MUST(plan.policy == SHM_POLICY_FULL || plan.policy == SHM_POLICY_ROUTED ||
         plan.policy == SHM_POLICY_DEMAND);
    const uint32_t most = plan.depth > EXD_WALK_CERTAIN_MAX ? plan.depth : EXD_WALK_CERTAIN_MAX;
    w->link.most = plan.policy == SHM_POLICY_FULL ? 0 : most;
    uint32_t result = SHM_RESULT_OK, idle = 0;
    for (uint32_t steps = 0;; steps++) {
        MUST(steps < STEPS_MAX);
        enum exd_step step = exd_stream_step(stream);
        exd_stream_progress(stream);
        if (exd_stream_violation(stream, &err)) {
            result = SHM_RESULT_FAILED;
            break;
        }
        MUST(step < EXD_STEP_COUNT && step != EXD_STEP_FAILED);
        if (atomic_load(&w->view.worker->cancel_seq) == w->seq) {
            result = SHM_RESULT_CANCELLED;
            break;
        }
        if (step == EXD_STEP_DONE && exd_stream_consumed(stream))
            break;
        if (step == EXD_STEP_AGAIN ? steps % 7 != 0 : false)
            continue;
        if (!act(w, in) && step != EXD_STEP_AGAIN && ++idle > 2) {
            exd_stream_stuck(stream, step, 1, &err);
            MUST(err.code && strlen(err.text) < sizeof err.text);
            result = SHM_RESULT_FAILED;
            break;
        }
    }
    exd_stream_end(stream, result, 0, NULL);
    MUST(exd_stream_end_group(stream) ==
         w->group_base + w->layout.geometry.layers * (uint64_t)w->layout.geometry.groups_per_layer);
    w->group_base = exd_stream_end_group(stream);
    w->seq++;
    return result != SHM_RESULT_FAILED;
}

static void on_fault(void *ctx, const char *line)
{
    MUST(line[0]);
    atomic_store((_Atomic bool *)ctx, true);
}

/* The issuer's thread. Its end is all that is asked for. */
static void threaded(struct world *w, struct input *in)
{
    _Atomic bool fault = false;
    struct shm_error err = {0};
    struct exd_issuer *issuer = NULL;
    const struct exd_issuer_config config = {.arena = &w->arena.view,
                                             .control = w->view,
                                             .geometry = w->geometry,
                                             .link = &w->link.base,
                                             .settings = w->settings,
                                             .watchdog_ns = WATCHDOG_NS,
                                             .name = "fuzz",
                                             .fault = on_fault,
                                             .ctx = &fault};
    w->link.base.poll_ns = 500000;
    w->link.lazy = false; /* the acts must not touch the link beside its thread */
    MUST(exd_issuer_start(&config, &issuer, &err) == 0);
    uint64_t start_ns = shm_now_ns();
    uint32_t tokens = 1 + word(in);
    uint8_t flags = byte(in);
    post(w, tokens, flags);
    byte(in); /* as in direct() */
    while (act(w, in) && !atomic_load(&fault)) {
        struct timespec pause = {.tv_nsec = 20000};
        nanosleep(&pause, NULL);
        if (atomic_load(&w->view.worker->done_seq) == w->seq) {
            w->seq++;
            w->group_base += (uint64_t)w->geometry.layers * w->geometry.groups_per_layer;
            post(w, tokens, flags);
        }
    }
    while (exd_issuer_busy(issuer)) { /* the watchdog ends what the worker has left standing */
        struct timespec pause = {.tv_nsec = 500000};
        nanosleep(&pause, NULL);
        MUST(shm_now_ns() - start_ns < ISSUER_NS);
    }
    exd_issuer_stop(&issuer);
    MUST(!issuer && shm_now_ns() - start_ns < ISSUER_NS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    exd_log_set_level(EXD_LOG_ERROR);
    struct input in = {data, data + (size > 2048 ? 2048 : size)};
    struct world w = {.seq = 1};
    struct shm_error err = {0};
    uint8_t mode = byte(&in);
    uint32_t layers = 1 + byte(&in) % 4u, experts = 1 + byte(&in) % 130u, ring = 1 + byte(&in) % 40u;
    w.settings = (struct exd_stream_settings){.policy = SHM_POLICY_FULL + byte(&in) % 2u,
                                              .order = SHM_ORDER_INDEX + byte(&in) % 3u,
                                              .depth = 1 + byte(&in) % 20u,
                                              .floor = 1 + byte(&in)};
    arena_make(&w.arena, layers, experts);
    w.geometry = (struct shm_geometry){.layers = layers,
                                       .experts = experts,
                                       .ring = ring,
                                       .group_entries = shm_group_entries(ring),
                                       .slot_bytes = BLOB};
    w.geometry.groups_per_layer = shm_groups_per_layer(experts, w.geometry.group_entries);
    MUST(shm_worker_layout(&w.geometry, &w.layout, &err) == 0);
    w.control = aligned_alloc(64, w.layout.total_bytes);
    uint8_t *ring_memory = aligned_alloc(BLOB, ring * BLOB);
    MUST(w.control && ring_memory);
    memset(w.control, 0, w.layout.total_bytes);
    shm_worker_view(w.control, &w.layout, &w.view);
    w.link = (struct link){.base = {.ops = &link_ops},
                           .arena = &w.arena,
                           .worker = w.view.worker,
                           .ring = ring_memory,
                           .ring_bytes = ring * BLOB,
                           .lazy = mode & 1};
    if (mode >= 250) {
        threaded(&w, &in);
    } else {
        struct exd_stream *stream = exd_stream_new(&w.arena.view, &w.view, &w.geometry, &w.link.base, "fuzz");
        MUST(stream);
        for (uint32_t i = 0; i < STREAMS_MAX && in.at < in.end && direct(&w, stream, &in); i++)
            ;
        exd_stream_free(&stream);
    }
    free(ring_memory);
    free(w.control);
    free((void *)w.arena.ready);
    free(w.arena.blobs);
    return 0;
}
