/* SPDX-License-Identifier: MIT */
/* The environment that the walk runs in: what the worker and the link have come to, each word of shared
 * memory read once and checked; and what the walk decides, written where the worker looks. */
#include "expertd/exd_stream_priv.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

/* Something of what it asks has changed. Only where the worker can't tell: it has no clock beside a GPU's
 * waits. */
static void look_starved(struct exd_stream *s, uint64_t now_ns)
{
    if (s->link->poll_ns)
        exd_starved_look(&s->starved, s->released, s->landed, s->published, now_ns);
}

uint64_t exd_stream_released(struct exd_stream *s)
{
    /* acquire, pairs with the worker's release: its last reads of the slots are over */
    uint64_t word = atomic_load_explicit(&worker(s)->released_groups, memory_order_acquire);
    uint64_t released = word - s->group_base;
    if (released == s->released)
        return released;
    if (released > s->signalled || released < s->released) {
        if (!s->violation.code)
            shm_error_set(&s->violation, EPROTO,
                          "worker %s released group %" PRIu64 " of stream %" PRIu64 " while %" PRIu64
                          " were signalled and %" PRIu64 " released",
                          s->name, released, s->seq, s->signalled, s->released);
        return s->released;
    }
    exd_trace_event(s->trace, EXD_TRACE_RELEASED, released);
    uint64_t now_ns = shm_now_ns();
    exd_event_release_seen(s->events, now_ns, s->seq, released);
    shm_counter_set(&worker(s)->link.progress_at_ns, now_ns);
    s->released = released;
    look_starved(s, now_ns);
    return released;
}

uint64_t exd_stream_landed(struct exd_stream *s)
{
    uint64_t landed = krn_link_landed(s->link) - s->landed_base;
    if (landed != s->landed) {
        s->landed = landed;
        exd_trace_event(s->trace, EXD_TRACE_LANDED, landed);
        if (s->link->poll_ns) { /* else its thread tells of each */
            exd_event_land_seen(s->events, s->seq, landed);
            look_starved(s, shm_now_ns());
        }
        exd_stream_count_lags(s);
    }
    return landed;
}

/* Layers take about the same time; the least of late is what may come next. */
static void see_publication(struct exd_stream *s, uint32_t layer, uint64_t now_ns)
{
    s->published_at_ns[layer] = now_ns;
    shm_counter_set(&worker(s)->link.progress_at_ns, now_ns);
    if (s->published_ns) {
        uint64_t period_ns = now_ns - s->published_ns;
        s->period_ns = !s->period_ns || period_ns < s->period_ns
                           ? period_ns
                           : s->period_ns + (period_ns - s->period_ns) / 4;
    }
    s->published_ns = now_ns;
}

uint64_t exd_stream_due_ns(struct exd_stream *s)
{
    if (exd_stream_landed(s) < exd_walk_counts(s->walk).issued)
        return 0;
    return s->published_ns && s->period_ns ? s->published_ns + s->period_ns : 0;
}

const struct shm_mask *exd_stream_published(struct exd_stream *s, uint32_t layer)
{
    if (s->published[layer])
        return &s->routed[layer];
    const struct shm_route *route = &s->control.route[layer];
    /* acquire, pairs with the worker's release: the mask is whole */
    if (atomic_load_explicit(&route->seq, memory_order_acquire) != s->seq)
        return NULL;
    /* Bits past the experts mean nothing; masking them keeps every loop inside the tables. */
    struct shm_mask mask = {{0}};
    for (uint32_t word = 0; word * 64 < s->geometry.experts; word++) {
        uint32_t rest = s->geometry.experts - word * 64;
        mask.word[word] = route->mask.word[word] & (rest < 64 ? (UINT64_C(1) << rest) - 1 : UINT64_MAX);
    }
    s->routed[layer] = mask;
    s->published[layer] = true;
    s->published_layers++;
    uint64_t now_ns = shm_now_ns();
    see_publication(s, layer, now_ns);
    look_starved(s, now_ns);
    exd_event_publish_seen(s->events, now_ns, s->seq, layer, shm_mask_count(&mask, s->geometry.experts),
                           route->published_ns);
    exd_trace_layer(s->trace, layer, route->published_ns);
    bool asked = s->expected_layer == layer; /* what it was issued by, against what came */
    exd_trust_learn(&s->trust, asked ? s->expected_from : EXD_EXPECT_NOTHING, asked ? s->expected_row : NULL,
                    &s->routed[layer], &s->resident[layer], s->geometry.experts);
    return &s->routed[layer];
}

/* Where the row comes from: the worker's prediction, for layer 0 from the start, then once the layer before
 * is published; nothing at all until then, if one will come (no blind copy is as good as waiting for it:
 * ahead of the prediction only the ring's length would limit the waste); else this conversation's recent
 * counts. */
static enum exd_expectation expectation_of(struct exd_stream *s, uint32_t layer)
{
    if (s->plan.order != SHM_ORDER_PREDICTED || !(s->flags & SHM_STREAM_PREDICTS))
        return EXD_EXPECT_RECENT;
    if (s->flags & SHM_STREAM_KNOWN)
        return EXD_EXPECT_KNOWN;
    if (layer == 0)
        return EXD_EXPECT_FIRST;
    return exd_stream_published(s, layer - 1) ? EXD_EXPECT_PREDICTION : EXD_EXPECT_NOTHING;
}

/* A layer's row is copied when it is first asked for, and once more when the
 * prediction for it appears. Any values are legal: they only order. */
static const uint32_t *env_expected(void *ctx, uint32_t layer, struct exd_trust *ret_trust)
{
    struct exd_stream *s = ctx;
    enum exd_expectation from = expectation_of(s, layer);
    if (s->expected_layer != layer || s->expected_from != from) {
        size_t row = (size_t)layer * s->geometry.experts,
               bytes = s->geometry.experts * sizeof *s->expected_row;
        if (from == EXD_EXPECT_NOTHING)
            memset(s->expected_row, 0, bytes);
        else
            memcpy(s->expected_row,
                   (from == EXD_EXPECT_RECENT ? s->control.recent : s->control.predicted) + row, bytes);
        s->expected_layer = layer;
        s->expected_from = from;
        s->sure = exd_trust_sure(&s->trust, from);
    }
    *ret_trust = (struct exd_trust){.confident = from != EXD_EXPECT_RECENT, .sure = s->sure};
    return s->expected_row;
}

static bool env_loaded(void *ctx, uint32_t layer, uint32_t expert)
{
    struct exd_stream *s = ctx;
    return shm_arena_ready(s->arena, shm_arena_blob_unit(s->arena, layer, expert));
}

/* A step never waits: events of it that follow each other may have one time. */
static uint64_t step_ns(struct exd_stream *s)
{
    if (!s->step_ns && s->events)
        s->step_ns = shm_now_ns();
    return s->step_ns;
}

void exd_stream_asleep(struct exd_stream *s, enum exd_step step)
{
    static const uint8_t why[EXD_STEP_COUNT] = {
        [EXD_STEP_WAIT_SLOT] = SHM_SLEEP_RELEASE,        [EXD_STEP_WAIT_DEPTH] = SHM_SLEEP_LANDING,
        [EXD_STEP_WAIT_PUBLISH] = SHM_SLEEP_PUBLICATION, [EXD_STEP_WAIT_BLOB] = SHM_SLEEP_LOADING,
        [EXD_STEP_DONE] = SHM_SLEEP_LAST_RELEASE,
    };
    if (s->asleep == why[step]) /* it wakes again and again while it waits for one thing */
        return;
    if (s->asleep)
        exd_stream_awake(s);
    s->asleep = why[step];
    s->step_ns = 0;
    exd_event_sleep_begin(s->events, step_ns(s), s->seq, s->asleep);
    s->step_ns = 0;
}

void exd_stream_awake(struct exd_stream *s)
{
    if (s->asleep)
        exd_event_sleep_end(s->events, step_ns(s), s->seq);
    s->asleep = 0;
}

static void env_decide(void *ctx, uint32_t layer, uint32_t expert, uint32_t state, uint32_t group,
                       uint32_t slot)
{
    struct exd_stream *s = ctx;
    /* relaxed: ordered before the worker's read by the signal (link queue, then landed_groups) */
    atomic_store_explicit(&s->control.table[(size_t)layer * s->geometry.experts + expert],
                          shm_entry_make(state, group, slot), memory_order_relaxed);
    if (state == SHM_ENTRY_SLOT)
        s->step_ns = 0; /* anew: what made room for it was seen a moment ago */
    if (state == SHM_ENTRY_SLOT || state == SHM_ENTRY_DROPPED)
        exd_stream_awake(s);
    if (state != SHM_ENTRY_DROPPED)
        return;
    atomic_store_explicit(&worker(s)->dropped_entries, exd_walk_counts(s->walk).dropped,
                          memory_order_relaxed);
    exd_event_drop(s->events, step_ns(s), s->seq, layer, expert);
}

static int env_issue(void *ctx, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot,
                     uint64_t group, bool certain)
{
    struct exd_stream *s = ctx;
    uint64_t bytes = s->arena->layers[layer].blob_bytes, at_ns = step_ns(s);
    int rc = krn_link_copy(s->link, (uint64_t)slot * s->geometry.slot_bytes,
                           shm_arena_blob(s->arena, layer, expert), bytes, certain);
    if (rc)
        return rc;
    exd_trace_entry(s->trace, layer, expert, group,
                    (certain ? EXD_TRACE_CERTAIN : 0) | (s->published[layer] ? EXD_TRACE_PUBLISHED : 0));
    exd_event_issue(s->events, at_ns, s->seq, layer, expert, slot,
                    (uint32_t)(group - (uint64_t)layer * s->geometry.groups_per_layer), certain);
    s->bytes += bytes;
    s->last_copy[layer] = ++s->copies;
    shm_mask_set(&s->issued[layer], expert);
    if (s->published[layer])
        shm_mask_set(&s->spoken[layer], expert);
    /* relaxed: for tools only */
    atomic_store_explicit(&s->control.slot_map[slot], shm_slot_pack(s->group_base + group, layer, expert),
                          memory_order_relaxed);
    atomic_store_explicit(&worker(s)->issue_layer, layer, memory_order_relaxed);
    atomic_store_explicit(&worker(s)->issued_entries, entry + 1, memory_order_relaxed);
    atomic_store_explicit(&worker(s)->landed_entries, exd_stream_landed(s), memory_order_relaxed);
    return 0;
}

static int env_signal(void *ctx, uint64_t groups)
{
    struct exd_stream *s = ctx;
    s->signalled = groups;
    exd_trace_event(s->trace, EXD_TRACE_SIGNALLED, groups);
    if (s->link->poll_ns) {
        exd_starved_signal(&s->starved, groups, s->copies);
        look_starved(s, shm_now_ns()); /* no copy of it may be under way any more */
    }
    exd_stream_count_lags(s);
    return krn_link_signal(s->link, s->group_base + groups);
}

static uint64_t env_released(void *ctx)
{
    return exd_stream_released(ctx);
}

static uint64_t env_landed(void *ctx)
{
    return exd_stream_landed(ctx);
}

static const struct shm_mask *env_published(void *ctx, uint32_t layer)
{
    return exd_stream_published(ctx, layer);
}

void exd_stream_env(struct exd_stream *s, struct exd_walk_env *ret_env)
{
    *ret_env = (struct exd_walk_env){
        .ctx = s,
        .released = env_released,
        .landed = env_landed,
        .published = env_published,
        .expected = env_expected,
        .loaded = env_loaded,
        .decide = env_decide,
        .issue = env_issue,
        .signal = env_signal,
    };
}
