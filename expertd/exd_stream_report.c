/* SPDX-License-Identifier: MIT */
#include "expertd/exd_stream_priv.h"

#include "expertd/exd_log.h"
#include "shm/shm_word.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static struct shm_worker *worker(const struct exd_stream *s)
{
    return s->control.worker;
}

static void count_waste(struct exd_stream *s, struct shm_report *r)
{
    for (uint32_t l = 0; l < s->geometry.layers; l++) {
        if (!exd_stream_published(s, l))
            continue; /* cancelled before: nothing is known about its waste */
        for (uint32_t word = 0; word * 64 < s->geometry.experts; word++) {
            uint64_t streamed = ~s->resident[l].word[word];
            uint64_t routed = s->routed[l].word[word];
            uint64_t wasted = s->issued[l].word[word] & ~routed;
            r->routed += (uint64_t)__builtin_popcountll(routed & streamed);
            r->wasted += (uint64_t)__builtin_popcountll(wasted);
            r->wasted_bytes += (uint64_t)__builtin_popcountll(wasted) * s->arena->layers[l].blob_bytes;
        }
    }
}

static uint64_t streamed_entries(const struct exd_stream *s)
{
    uint64_t n = 0;
    for (uint32_t l = 0; l < s->geometry.layers; l++)
        n += s->geometry.experts - shm_mask_count(&s->resident[l], s->geometry.experts);
    return n;
}

static void add_total(_Atomic uint64_t *word, uint64_t n)
{
    /* single writer */
    atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + n, memory_order_relaxed);
}

static void add_totals(struct shm_totals *t, const struct shm_report *r)
{
    add_total(&t->streams, 1);
    add_total(&t->cancelled, r->result == SHM_RESULT_CANCELLED);
    add_total(&t->failed, r->result == SHM_RESULT_FAILED);
    add_total(&t->held_off, r->held_off != SHM_HELD_NONE);
    add_total(&t->entries, r->entries);
    add_total(&t->copied, r->copied);
    add_total(&t->dropped, r->dropped);
    add_total(&t->wasted, r->wasted);
    add_total(&t->bytes, r->bytes);
    add_total(&t->wasted_bytes, r->wasted_bytes);
    add_total(&t->link_ns, r->link_ns);
    add_total(&t->wait_ns, r->wait_ns);
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
        .wait_ns = atomic_load_explicit(&worker(s)->wait_ns, memory_order_relaxed),
        .outstanding_max = c.outstanding_max,
        .cpu_ns = exd_stream_cpu_now_ns() - s->cpu_ns,
    };
    count_waste(s, &r);
    shm_report_write(worker(s), &r);
    add_totals(&worker(s)->totals, &r);
    exd_trace_end(s->trace, result, s->routed);
    atomic_store_explicit(&worker(s)->landed_entries, c.issued, memory_order_relaxed);
    if (trace)
        trace_line(trace, &r);
}
