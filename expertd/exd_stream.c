/* SPDX-License-Identifier: MIT */
#include "expertd/exd_stream_priv.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TOKENS_MAX (1u << 24) /* of a chunk: far past any context */

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
        !s->published_at_ns || !s->last_copy || !s->expected_row ||
        exd_starved_init(&s->starved, g->layers, g->groups_per_layer))
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
    exd_starved_free(&s->starved);
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
    exd_starved_begin(&s->starved);
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

    struct exd_walk_env env;
    exd_stream_env(s, &env);
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

void exd_stream_events(struct exd_stream *s, struct shm_event_writer *events)
{
    s->events = events;
}

bool exd_stream_consumed(struct exd_stream *s)
{
    return exd_stream_released(s) == s->groups && exd_stream_landed(s) == exd_walk_counts(s->walk).issued;
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
    return exd_stream_released(s) + exd_stream_landed(s) + entry + layer + s->published_layers +
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
