/* SPDX-License-Identifier: MIT */
#include "expertd/exd_stream_priv.h"

#include "expertd/exd_log.h"
#include "shm/shm_word.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PEAK_COPIES 16u /* fewer say little of the link */

/* What grows within a stream is shown with each layer, for those who look meanwhile. */
static void count_times(struct exd_stream *s, uint64_t busy_ns, uint64_t wait_ns)
{
    struct shm_link_counters *c = &worker(s)->link;
    if (busy_ns > s->counted_busy_ns) {
        shm_counter_add(&c->link_busy_ns, busy_ns - s->counted_busy_ns);
        s->counted_busy_ns = busy_ns;
    }
    if (wait_ns > s->counted_wait_ns) {
        shm_counter_add(&c->worker_wait_ns, wait_ns - s->counted_wait_ns);
        s->counted_wait_ns = wait_ns;
    }
}

/* Where the host computes, the worker has a clock beside its waits; a GPU waits by itself. */
static uint64_t waited_ns(const struct exd_stream *s)
{
    return s->link->poll_ns ? exd_starved_ns(&s->starved, shm_now_ns())
                            : atomic_load_explicit(&worker(s)->wait_ns, memory_order_relaxed);
}

static void count_times_so_far(struct exd_stream *s)
{
    struct krn_link_stats link;
    krn_link_stats(s->link, &link);
    count_times(s, link.mark_busy_ns, waited_ns(s));
}

void exd_stream_count_lags(struct exd_stream *s)
{
    struct shm_link_counters *c = &worker(s)->link;
    while (s->landed_layers < s->geometry.layers) {
        uint32_t l = s->landed_layers;
        /* all of its groups are signalled: no further copy of it will come */
        if (s->signalled < (uint64_t)(l + 1) * s->geometry.groups_per_layer || s->landed < s->last_copy[l])
            return;
        s->landed_layers++;
        count_times_so_far(s);
        if (!s->last_copy[l])
            continue;
        uint64_t lag_ns = s->published[l] ? shm_now_ns() - s->published_at_ns[l] : 0;
        SHM_HISTOGRAM_ADD(c->router_to_last_copy_ns, shm_bounds_short, lag_ns);
        shm_counter_add(&s->control.layer[l].layer_lags, 1);
        shm_counter_add(&s->control.layer[l].layer_lag_ns, lag_ns);
    }
}

static uint64_t members(uint64_t word)
{
    return (uint64_t)__builtin_popcountll(word);
}

static void add_copies(struct shm_link_counters *c, uint32_t reason, uint64_t n, uint64_t blob_bytes)
{
    shm_counter_add(&c->link_copies[reason], n);
    shm_counter_add(&c->link_bytes[reason], n * blob_bytes);
}

/* One layer: what was copied, why, and whether a token used it. */
static void count_layer(struct exd_stream *s, uint32_t l, struct shm_report *r)
{
    uint64_t n[SHM_COPY_REASON_COUNT] = {0}, routed = 0, hits = 0, copied = 0;
    uint64_t blob_bytes = s->arena->layers[l].blob_bytes;
    bool published = exd_stream_published(s, l); /* else it was cancelled before: nothing is known of waste */
    for (uint32_t word = 0; word * 64 < s->geometry.experts; word++) {
        uint64_t resident = s->resident[l].word[word], issued = s->issued[l].word[word];
        uint64_t spoken = s->spoken[l].word[word];
        copied += members(issued);
        if (!published)
            continue;
        uint64_t wanted = s->routed[l].word[word];
        routed += members(wanted & ~resident);
        hits += members(wanted & resident);
        n[SHM_COPY_REASON_ROUTED] += members(issued & wanted & spoken);
        n[SHM_COPY_REASON_AHEAD_USED] += members(issued & wanted & ~spoken);
        n[SHM_COPY_REASON_AHEAD_WASTED] += members(issued & ~wanted);
    }
    if (!published)
        n[SHM_COPY_REASON_UNKNOWN] = copied;
    if (s->plan.policy == SHM_POLICY_DEMAND) {
        n[SHM_COPY_REASON_DEMAND] = n[SHM_COPY_REASON_ROUTED];
        n[SHM_COPY_REASON_ROUTED] = 0;
    }
    struct shm_link_counters *c = &worker(s)->link;
    for (uint32_t reason = 0; reason < SHM_COPY_REASON_COUNT; reason++)
        if (n[reason])
            add_copies(c, reason, n[reason], blob_bytes);
    shm_counter_add(&c->stream_resident_hits, hits);
    struct shm_layer_counters *layer = &s->control.layer[l];
    shm_counter_add(&layer->layer_entries,
                    s->geometry.experts - shm_mask_count(&s->resident[l], s->geometry.experts));
    shm_counter_add(&layer->layer_routed, routed);
    shm_counter_add(&layer->layer_copied, copied);
    shm_counter_add(&layer->layer_wasted, n[SHM_COPY_REASON_AHEAD_WASTED]);
    r->routed += routed;
    r->wasted += n[SHM_COPY_REASON_AHEAD_WASTED];
    r->wasted_bytes += n[SHM_COPY_REASON_AHEAD_WASTED] * blob_bytes;
}

static void count_stream(struct exd_stream *s, struct shm_report *r)
{
    static const uint32_t held[] = {[SHM_HELD_FLOOR] = SHM_HELD_REASON_FLOOR,
                                    [SHM_HELD_POLICY] = SHM_HELD_REASON_POLICY,
                                    [SHM_HELD_PREDICTION] = SHM_HELD_REASON_PREDICTION};
    struct shm_link_counters *c = &worker(s)->link;
    for (uint32_t l = 0; l < s->geometry.layers; l++)
        count_layer(s, l, r);
    shm_counter_add(&c->streams[r->result == SHM_RESULT_OK          ? SHM_STREAM_RESULT_OK
                                : r->result == SHM_RESULT_CANCELLED ? SHM_STREAM_RESULT_CANCELLED
                                                                    : SHM_STREAM_RESULT_FAILED],
                    1);
    if (r->held_off != SHM_HELD_NONE)
        shm_counter_add(&c->streams_held_off[held[r->held_off]], 1);
    shm_counter_add(&c->stream_tokens, r->tokens);
    shm_counter_add(&c->stream_entries, r->entries);
    shm_counter_add(&c->stream_routed, r->routed);
    shm_counter_add(
        &c->stream_drops[r->policy == SHM_POLICY_DEMAND ? SHM_DROP_CAUSE_DEMAND : SHM_DROP_CAUSE_UNROUTED],
        r->dropped);
    if (r->entries > r->copied + r->dropped)
        shm_counter_add(&c->stream_drops[SHM_DROP_CAUSE_CANCELLED], r->entries - r->copied - r->dropped);
    shm_counter_add(&c->stream_span_ns, r->span_ns);
    count_times(s, r->link_ns, r->wait_ns);
    shm_counter_add(&c->issuer_cpu_ns, r->cpu_ns);
    if (r->copied >= PEAK_COPIES && r->link_ns) {
        uint64_t rate = (uint64_t)((double)r->bytes * 1e9 / (double)r->link_ns);
        if (rate > shm_counter_get(&c->link_peak))
            shm_counter_set(&c->link_peak, rate);
    }
}

static uint64_t streamed_entries(const struct exd_stream *s)
{
    uint64_t n = 0;
    for (uint32_t l = 0; l < s->geometry.layers; l++)
        n += s->geometry.experts - shm_mask_count(&s->resident[l], s->geometry.experts);
    return n;
}

static void trace_line(const char *name, const struct shm_report *r)
{
    exd_log(EXD_LOG_INFO,
            "trace worker=%s stream=%" PRIu64 " tokens=%u policy=%s order=%s depth=%u ring=%u result=%s "
            "routed=%.1f%% entries=%" PRIu64 " copied=%" PRIu64 " dropped=%" PRIu64 " unrouted=%" PRIu64
            " bytes=%" PRIu64
            " link_gbps=%.4f link_ms=%.3f span_ms=%.3f wait_ms=%.3f outstanding_max=%" PRIu64,
            name, r->seq, r->tokens, shm_policy_name(r->policy), shm_order_name(r->order), r->depth, r->ring,
            shm_result_name(r->result), r->entries ? 100.0 * (double)r->routed / (double)r->entries : 0.0,
            r->entries, r->copied, r->dropped, r->wasted, r->bytes,
            r->link_ns ? (double)r->bytes / (double)r->link_ns : 0.0, (double)r->link_ns / 1e6,
            (double)r->span_ns / 1e6, (double)r->wait_ns / 1e6, r->outstanding_max);
}

void exd_stream_end(struct exd_stream *s, uint32_t result, uint64_t drain_ns, const char *trace)
{
    if (result == SHM_RESULT_CANCELLED)
        krn_link_signal(s->link, s->group_base + s->groups);
    int rc = krn_link_drain(s->link, drain_ns);
    if (rc)
        exd_log(EXD_LOG_WARNING, "worker %s: not all that was on its link has landed after %.1f s (%s)",
                s->name, (double)drain_ns / 1e9, strerror(-rc));
    struct exd_walk_counts c = exd_walk_counts(s->walk);
    struct krn_link_stats link;
    krn_link_stats(s->link, &link);
    struct shm_report r = {
        .seq = s->seq,
        .tokens = s->plan.tokens,
        .policy = s->plan.policy,
        .order = s->plan.order,
        .depth = s->plan.depth,
        .ring = s->geometry.ring,
        .held_off = s->plan.held_off,
        .result = result,
        .layers = s->geometry.layers,
        .entries = streamed_entries(s),
        .copied = c.issued,
        .dropped = c.dropped,
        .bytes = s->bytes,
        .link_ns = link.mark_busy_ns,
        .span_ns = link.first_ns ? link.last_ns - link.first_ns : 0,
        .wait_ns = waited_ns(s),
        .outstanding_max = c.outstanding_max,
        .cpu_ns = exd_stream_cpu_now_ns() - s->cpu_ns,
    };
    s->step_ns = 0;
    exd_stream_awake(s);
    exd_event_stream_end(s->events, s->seq, r.copied, r.dropped, result);
    count_stream(s, &r);
    shm_report_write(worker(s), &r);
    exd_trace_end(s->trace, result, s->routed);
    atomic_store_explicit(&worker(s)->landed_entries, c.issued, memory_order_relaxed);
    if (trace)
        trace_line(trace, &r);
}
