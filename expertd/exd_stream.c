/* SPDX-License-Identifier: MIT */
#include "expertd/exd_stream_priv.h"

#include "shm/shm_word.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TOKENS_MAX (1u << 24) /* of a chunk: far past any context */

static struct shm_worker *worker(const struct exd_stream *s)
{
    return s->control.worker;
}

/* ---- the walk's environment ---- */

static uint64_t env_released(void *ctx)
{
    struct exd_stream *s = ctx;
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
    return s->released = released;
}

static uint64_t env_landed(void *ctx)
{
    struct exd_stream *s = ctx;
    uint64_t landed = krn_link_landed(s->link) - s->landed_base;
    if (landed != s->landed) {
        s->landed = landed;
        exd_trace_event(s->trace, EXD_TRACE_LANDED, landed);
        if (s->link->poll_ns) /* else its thread tells of each */
            exd_event_land_seen(s->events, s->seq, landed);
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
    if (env_landed(s) < exd_walk_counts(s->walk).issued)
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
    exd_event_publish_seen(s->events, now_ns, s->seq, layer, shm_mask_count(&mask, s->geometry.experts),
                           route->published_ns);
    exd_trace_layer(s->trace, layer, route->published_ns);
    bool asked = s->expected_layer == layer; /* what it was issued by, against what came */
    exd_trust_learn(&s->trust, asked ? s->expected_from : EXD_EXPECT_NOTHING, asked ? s->expected_row : NULL,
                    &s->routed[layer], &s->resident[layer], s->geometry.experts);
    return &s->routed[layer];
}

static const struct shm_mask *env_published(void *ctx, uint32_t layer)
{
    return exd_stream_published(ctx, layer);
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
    return env_published(s, layer - 1) ? EXD_EXPECT_PREDICTION : EXD_EXPECT_NOTHING;
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
    atomic_store_explicit(&worker(s)->landed_entries, env_landed(s), memory_order_relaxed);
    return 0;
}

static int env_signal(void *ctx, uint64_t groups)
{
    struct exd_stream *s = ctx;
    s->signalled = groups;
    exd_trace_event(s->trace, EXD_TRACE_SIGNALLED, groups);
    exd_stream_count_lags(s);
    return krn_link_signal(s->link, s->group_base + groups);
}

/* ---- life ---- */

struct exd_stream *exd_stream_new(const struct shm_arena_view *arena, const struct shm_worker_view *control,
                                  const struct shm_geometry *g, struct krn_link *link, const char *name)
{
    struct exd_stream *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->arena = arena;
    s->control = *control;
    s->geometry = *g;
    s->link = link;
    s->name = name;
    exd_trust_begin(&s->trust);
    s->walk = exd_walk_new(g->layers, g->experts, g->ring);
    s->resident = calloc(g->layers, sizeof *s->resident);
    s->routed = calloc(g->layers, sizeof *s->routed);
    s->issued = calloc(g->layers, sizeof *s->issued);
    s->spoken = calloc(g->layers, sizeof *s->spoken);
    s->published = calloc(g->layers, sizeof *s->published);
    s->published_at_ns = calloc(g->layers, sizeof *s->published_at_ns);
    s->last_copy = calloc(g->layers, sizeof *s->last_copy);
    s->expected_row = calloc(g->experts, sizeof *s->expected_row);
    if (!s->walk || !s->resident || !s->routed || !s->issued || !s->spoken || !s->published ||
        !s->published_at_ns || !s->last_copy || !s->expected_row)
        exd_stream_free(&s);
    return s;
}

void exd_stream_free(struct exd_stream **stream)
{
    struct exd_stream *s = *stream;
    if (!s)
        return;
    exd_walk_free(&s->walk);
    free(s->resident);
    free(s->routed);
    free(s->issued);
    free(s->spoken);
    free(s->published);
    free(s->published_at_ns);
    free(s->last_copy);
    free(s->expected_row);
    exd_trace_free(&s->trace);
    free(s);
    *stream = NULL;
}

static struct exd_stream_plan plan_stream(const struct exd_stream *s, const struct exd_stream_settings *set,
                                          uint32_t tokens)
{
    struct exd_stream_plan p = {.tokens = tokens,
                                .policy = set->policy,
                                .order = set->order,
                                .depth = set->depth,
                                .floor = set->floor};
    if (tokens < set->floor) {
        p.policy = SHM_POLICY_DEMAND;
        p.held_off = SHM_HELD_FLOOR;
    } else if (set->policy == SHM_POLICY_FULL) {
        p.order = SHM_ORDER_INDEX;
        p.held_off = SHM_HELD_POLICY;
    } else if (set->order == SHM_ORDER_PREDICTED && !(s->flags & SHM_STREAM_PREDICTS)) {
        p.order = SHM_ORDER_RECENT;
        p.held_off = SHM_HELD_PREDICTION;
    }
    return p;
}

static int check_descriptor(struct exd_stream *s, const struct shm_descriptor *d, struct shm_error *err)
{
    if (d->seq != s->seq || d->group_base != s->group_base)
        return shm_error_set(err, EPROTO,
                             "worker %s posted stream %" PRIu64 " from group %" PRIu64
                             ", expected stream %" PRIu64 " from group %" PRIu64,
                             s->name, d->seq, d->group_base, s->seq, s->group_base);
    if (!d->tokens || d->tokens > TOKENS_MAX)
        return shm_error_set(err, EPROTO, "worker %s posted a chunk of %u tokens, allowed are 1 to %u",
                             s->name, d->tokens, TOKENS_MAX);
    /* acquire, pairs with the worker's release: nothing of earlier streams is read any more */
    uint64_t released = atomic_load_explicit(&worker(s)->released_groups, memory_order_acquire);
    if (released != s->group_base)
        return shm_error_set(err, EPROTO,
                             "worker %s posted stream %" PRIu64 " with %" PRIu64 " groups released, %" PRIu64
                             " were due",
                             s->name, s->seq, released, s->group_base);
    return 0;
}

uint64_t exd_stream_cpu_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int exd_stream_begin(struct exd_stream *s, uint64_t seq, uint64_t group_base,
                     const struct exd_stream_settings *settings, struct exd_stream_plan *ret_plan,
                     struct shm_error *err)
{
    const struct shm_geometry *g = &s->geometry;
    s->seq = seq;
    s->group_base = group_base;
    s->groups = (uint64_t)g->layers * g->groups_per_layer;
    s->released = s->signalled = s->bytes = s->copies = s->landed = 0;
    s->landed_layers = 0;
    s->counted_busy_ns = s->counted_wait_ns = 0;
    s->cpu_ns = exd_stream_cpu_now_ns();
    s->published_ns = s->period_ns = 0;
    exd_trust_stream(&s->trust);
    s->published_layers = 0;
    s->expected_layer = UINT32_MAX;
    s->violation = (struct shm_error){0};
    memset(s->published, 0, g->layers * sizeof *s->published);
    memset(s->issued, 0, g->layers * sizeof *s->issued);
    memset(s->spoken, 0, g->layers * sizeof *s->spoken);
    memset(s->last_copy, 0, g->layers * sizeof *s->last_copy);

    struct shm_descriptor d = worker(s)->descriptor; /* read once */
    int rc = check_descriptor(s, &d, err);
    if (rc)
        return rc;
    s->flags = d.flags;
    memcpy(s->resident, s->control.resident, g->layers * sizeof *s->resident);
    s->plan = plan_stream(s, settings, d.tokens);

    static const struct exd_walk_env env_table = {
        .released = env_released,
        .landed = env_landed,
        .published = env_published,
        .expected = env_expected,
        .loaded = env_loaded,
        .decide = env_decide,
        .issue = env_issue,
        .signal = env_signal,
    };
    struct exd_walk_env env = env_table;
    env.ctx = s;
    struct exd_walk_config c = {
        .layers = g->layers,
        .experts = g->experts,
        .ring = g->ring,
        .group_entries = g->group_entries,
        .groups_per_layer = g->groups_per_layer,
        .policy = s->plan.policy,
        .order = s->plan.order,
        .depth = s->plan.depth,
        .resident = s->resident,
    };
    krn_link_mark(s->link);
    s->landed_base = krn_link_landed(s->link);
    rc = exd_walk_start(s->walk, &c, &env, err);
    if (rc)
        return rc;

    struct exd_trace_head head = {.layers = g->layers,
                                  .experts = g->experts,
                                  .groups_per_layer = g->groups_per_layer,
                                  .ring = g->ring,
                                  .tokens = d.tokens,
                                  .policy = s->plan.policy,
                                  .order = s->plan.order,
                                  .depth = s->plan.depth,
                                  .seq = seq};
    snprintf(head.name, sizeof head.name, "%s", s->name);
    exd_trace_begin(s->trace, &head);
    s->asleep = 0;
    exd_event_stream_begin(s->events, seq, d.tokens, s->plan.policy, s->plan.order, s->plan.held_off,
                           s->plan.depth);

    struct shm_worker *w = worker(s); /* for tools: relaxed */
    shm_counter_set(&w->link.progress_at_ns, shm_now_ns());
    /* any number is legal: it is the worker's word for what it did by itself */
    shm_counter_set(&w->link.link_bytes[SHM_COPY_REASON_RESIDENT],
                    shm_counter_get(&w->compute.resident_fill_bytes));
    atomic_store_explicit(&w->policy, s->plan.policy, memory_order_relaxed);
    atomic_store_explicit(&w->order, s->plan.order, memory_order_relaxed);
    atomic_store_explicit(&w->depth, s->plan.depth, memory_order_relaxed);
    atomic_store_explicit(&w->held_off, s->plan.held_off, memory_order_relaxed);
    atomic_store_explicit(&w->issued_entries, 0, memory_order_relaxed);
    atomic_store_explicit(&w->landed_entries, 0, memory_order_relaxed);
    atomic_store_explicit(&w->dropped_entries, 0, memory_order_relaxed);
    atomic_store_explicit(&w->issue_layer, 0, memory_order_relaxed);
    *ret_plan = s->plan;
    return 0;
}

enum exd_step exd_stream_step(struct exd_stream *s)
{
    s->step_ns = 0;
    enum exd_step step = exd_walk_step(s->walk);
    if (step != EXD_STEP_AGAIN)
        exd_trace_event(s->trace, EXD_TRACE_WAIT, step);
    if (s->asleep && (step == EXD_STEP_AGAIN || step == EXD_STEP_DONE || step == EXD_STEP_FAILED))
        exd_stream_awake(s);
    return step;
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

void exd_stream_events(struct exd_stream *s, struct shm_event_writer *events)
{
    s->events = events;
}

bool exd_stream_consumed(struct exd_stream *s)
{
    return env_released(s) == s->groups && env_landed(s) == exd_walk_counts(s->walk).issued;
}

bool exd_stream_violation(const struct exd_stream *s, struct shm_error *err)
{
    if (s->violation.code)
        *err = s->violation;
    return s->violation.code != 0;
}

void exd_stream_failure(const struct exd_stream *s, struct shm_error *err)
{
    uint32_t layer;
    uint64_t entry;
    exd_walk_position(s->walk, &layer, &entry);
    shm_error_set(err, -exd_walk_status(s->walk),
                  "worker %s: copying entry %" PRIu64 " of layer %u to its ring failed: %s", s->name, entry,
                  layer, strerror(-exd_walk_status(s->walk)));
}

uint64_t exd_stream_progress(struct exd_stream *s)
{
    uint32_t layer;
    uint64_t entry;
    exd_walk_position(s->walk, &layer, &entry);
    return env_released(s) + env_landed(s) + entry + layer + s->published_layers +
           exd_walk_counts(s->walk).dropped;
}

void exd_stream_stuck(struct exd_stream *s, enum exd_step step, uint64_t limit_ns, struct shm_error *err)
{
    static const char *const words[EXD_STEP_COUNT] = {
        [EXD_STEP_WAIT_SLOT] = "released_groups",
        [EXD_STEP_WAIT_DEPTH] = "landed copies of the link",
        [EXD_STEP_WAIT_PUBLISH] = "route.seq",
        [EXD_STEP_WAIT_BLOB] = "ready flag of the arena",
        [EXD_STEP_DONE] = "released_groups (all entries issued)",
    };
    uint32_t layer;
    uint64_t entry;
    exd_walk_position(s->walk, &layer, &entry);
    shm_error_set(err, ETIMEDOUT,
                  "worker %s: no progress for %.1f s in stream %" PRIu64 ", layer %u, entry %" PRIu64
                  ": waited on %s; detached, it may attach again",
                  s->name, (double)limit_ns / 1e9, s->seq, layer, entry,
                  words[step] ? words[step] : "nothing");
}

int exd_stream_trace(struct exd_stream *s)
{
    s->trace = exd_trace_new(s->geometry.layers, s->geometry.experts);
    return s->trace ? 0 : -ENOMEM;
}

void exd_stream_trace_write(struct exd_stream *s, const char *path)
{
    exd_trace_write(s->trace, path);
}

uint64_t exd_stream_end_group(const struct exd_stream *s)
{
    return s->group_base + s->groups;
}
