/* SPDX-License-Identifier: MIT */
#include "inferd/inf_stream.h"

#include "inferd/inf_event.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_SLICE_NS UINT64_C(100000000) /* longest sleep between two looks at the peer */
#define WATCHDOG_NS   UINT64_C(60000000000)

struct inf_stream {
    struct inf_stream_config c;
    struct shm_worker *w;
    uint64_t seq;        /* of the current or last stream */
    uint64_t group_base; /* of the current or next stream */
    uint64_t groups;     /* of a whole stream */
    uint64_t released;   /* groups, over the worker's life */
    uint64_t wait_ns;
    const uint32_t *known; /* for the next stream; NULL: nothing */
    bool running, lost;
};

int inf_stream_create(const struct inf_stream_config *config, struct inf_stream **ret_stream)
{
    struct inf_stream *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->c = *config;
    s->w = config->control.worker;
    s->groups = (uint64_t)config->geometry.layers * config->geometry.groups_per_layer;
    if (!s->c.watchdog_ns)
        s->c.watchdog_ns = WATCHDOG_NS;
    if (s->c.poison)
        memset(s->c.ring, 0xff, config->geometry.ring * config->geometry.slot_bytes);
    *ret_stream = s;
    return 0;
}

void inf_stream_destroy(struct inf_stream **stream)
{
    free(*stream);
    *stream = NULL;
}

static bool peer_dead(const struct inf_stream *s)
{
    struct pollfd p = {.fd = s->c.expertd_pidfd, .events = POLLIN};
    return p.fd >= 0 && poll(&p, 1, 0) > 0;
}

bool inf_stream_alive(const struct inf_stream *s)
{
    /* acquire, pairs with expertd's release: error_text is there */
    return !s->lost && !atomic_load_explicit(&s->w->detached, memory_order_acquire) && !peer_dead(s);
}

/* What a waiter waits for, for the messages and the condition. */
struct want {
    const char *word;
    _Atomic uint64_t *at;
    uint64_t value; /* at least */
    uint32_t layer, group;
    bool ending; /* done_seq is what is waited for; cancellation does not end the wait */
};

static int gone(struct inf_stream *s, struct shm_error *err)
{
    s->lost = true;
    return shm_error_set(err, ESHUTDOWN,
                         "expertd is gone: this read is lost, the conversation is kept; "
                         "start expertd again and repeat the turn");
}

static int detached(struct inf_stream *s, struct shm_error *err)
{
    s->lost = true;
    char text[256];
    memcpy(text, s->w->error_text, sizeof text);
    text[sizeof text - 1] = '\0';
    return shm_error_set(err, ECONNRESET, "expertd detached this worker: %s",
                         text[0] ? text : "no reason given");
}

static int failed(struct inf_stream *s, struct shm_error *err)
{
    char text[256];
    memcpy(text, s->w->error_text, sizeof text);
    text[sizeof text - 1] = '\0';
    return shm_error_set(err, EIO, "expertd gave up stream %llu: %s", (unsigned long long)s->seq,
                         text[0] ? text : "no reason given");
}

/* Something other than progress that ends a wait; 0: none. */
static int check_end(struct inf_stream *s, const struct want *want, struct shm_error *err)
{
    if (atomic_load_explicit(&s->w->detached, memory_order_acquire))
        return detached(s, err);
    /* A failed stream reports through done_seq while we wait for a group. */
    if (!want->ending && atomic_load_explicit(&s->w->done_seq, memory_order_acquire) == s->seq &&
        atomic_load_explicit(&s->w->result, memory_order_relaxed) != SHM_RESULT_OK)
        return failed(s, err);
    if (!want->ending && s->c.cancel && atomic_load_explicit(s->c.cancel, memory_order_relaxed))
        return shm_error_set(err, ECANCELED, "cancelled");
    return 0;
}

static int wait_for(struct inf_stream *s, const struct want *want, struct shm_error *err)
{
    struct shm_bell *bell = &s->w->landed_bell;
    if (!want->ending && s->c.cancel && atomic_load_explicit(s->c.cancel, memory_order_relaxed))
        return shm_error_set(err, ECANCELED, "cancelled");
    uint64_t start_ns = 0, now_ns = 0;
    int rc = 0;
    for (;;) {
        /* acquire, pairs with the link's or issuer's release: slots, table, report */
        uint32_t ticket = shm_bell_prepare(bell);
        if (atomic_load_explicit(want->at, memory_order_acquire) >= want->value) {
            shm_bell_cancel(bell);
            rc = want->ending ? 0 : check_end(s, want, err); /* a failed stream lands everything */
            break;
        }
        if ((rc = check_end(s, want, err))) {
            shm_bell_cancel(bell);
            break;
        }
        if (!start_ns) {
            start_ns = now_ns = shm_now_ns();
            inf_event_wait_begin(s->c.events, now_ns, s->seq, want->layer, want->group,
                                 want->ending ? SHM_WAIT_REPORT : SHM_WAIT_GROUP);
        }
        if (now_ns - start_ns > s->c.watchdog_ns) {
            shm_bell_cancel(bell);
            s->lost = true;
            rc = shm_error_set(err, ETIMEDOUT,
                               "no progress for %llu s: stream %llu, layer %u, group %u, waited for %s >= "
                               "%llu, it is %llu: look at 'expertctl rings'",
                               (unsigned long long)(s->c.watchdog_ns / 1000000000u),
                               (unsigned long long)s->seq, want->layer, want->group, want->word,
                               (unsigned long long)want->value,
                               (unsigned long long)atomic_load_explicit(want->at, memory_order_relaxed));
            break;
        }
        int timed_out = shm_bell_wait(bell, ticket, WAIT_SLICE_NS);
        now_ns = shm_now_ns();
        /* Words first: what a peer finished before it died still counts. */
        if (timed_out && atomic_load_explicit(want->at, memory_order_acquire) < want->value && peer_dead(s)) {
            rc = gone(s, err);
            break;
        }
    }
    if (start_ns) {
        now_ns = shm_now_ns();
        s->wait_ns += now_ns - start_ns;
        inf_event_wait_end(s->c.events, now_ns, s->seq, rc);
    }
    return rc;
}

int inf_stream_begin(struct inf_stream *s, uint32_t tokens, uint32_t position, const uint32_t *predicted,
                     const uint32_t *recent, struct shm_error *err)
{
    if (s->lost || peer_dead(s))
        return gone(s, err);
    const struct want want = {.word = "done_seq", .at = &s->w->done_seq, .value = s->seq, .ending = true};
    int rc = wait_for(s, &want, err);
    if (rc)
        return rc;
    const struct shm_geometry *g = &s->c.geometry;
    size_t bytes = sizeof(uint32_t) * g->layers * g->experts;
    if (recent)
        memcpy(s->c.control.recent, recent, bytes);
    else
        memset(s->c.control.recent, 0, bytes);
    if (s->known)
        memcpy(s->c.control.predicted, s->known, bytes);
    else if (predicted)
        memcpy(s->c.control.predicted, predicted, sizeof *predicted * g->experts);
    const uint32_t flags = s->known    ? SHM_STREAM_PREDICTS | SHM_STREAM_KNOWN
                           : predicted ? SHM_STREAM_PREDICTS
                                       : 0;
    s->known = NULL;
    s->seq++;
    s->wait_ns = 0;
    s->running = true;
    atomic_store_explicit(&s->w->wait_ns, 0, memory_order_relaxed);
    s->w->descriptor = (struct shm_descriptor){
        .seq = s->seq, .group_base = s->group_base, .tokens = tokens, .position = position, .flags = flags};
    /* release, pairs with the issuer's acquire: descriptor, resident, recent, prediction of layer 0 */
    atomic_store_explicit(&s->w->stream_seq, s->seq, memory_order_release);
    inf_event_pass_begin(s->c.events, s->seq, tokens, position);
    shm_bell_ring(&s->w->issuer_bell);
    return 0;
}

void inf_stream_know(struct inf_stream *s, const uint32_t *counts)
{
    s->known = counts;
}

void inf_stream_publish(struct inf_stream *s, uint32_t layer, const uint32_t *counts,
                        const uint32_t *predicted)
{
    uint32_t experts = s->c.geometry.experts;
    struct shm_route *route = &s->c.control.route[layer];
    struct shm_mask mask = {0};
    for (uint32_t e = 0; e < experts; e++)
        if (counts[e])
            shm_mask_set(&mask, e);
    memcpy(s->c.control.tokens + (size_t)layer * experts, counts, sizeof *counts * experts);
    if (predicted && layer + 1 < s->c.geometry.layers)
        memcpy(s->c.control.predicted + (size_t)(layer + 1) * experts, predicted,
               sizeof *predicted * experts);
    route->mask = mask;
    uint64_t now_ns = shm_now_ns();
    route->published_ns = now_ns;
    atomic_store_explicit(&s->w->layer, layer, memory_order_relaxed);
    /* release, pairs with the gate's acquire: mask, counts, predictions */
    atomic_store_explicit(&route->seq, s->seq, memory_order_release);
    shm_bell_ring(&s->w->issuer_bell);
    inf_event_publish(s->c.events, now_ns, s->seq, layer, shm_mask_count(&mask, experts));
}

int inf_stream_wait(struct inf_stream *s, uint32_t layer, uint32_t *ret_first, uint32_t *ret_end,
                    struct shm_error *err)
{
    uint32_t per_layer = s->c.geometry.groups_per_layer;
    uint64_t base = s->group_base + (uint64_t)layer * per_layer;
    uint64_t first = s->released > base ? s->released - base : 0;
    if (first >= per_layer) {
        *ret_first = *ret_end = per_layer;
        return 0;
    }
    const struct want want = {.word = "landed_groups",
                              .at = &s->w->landed_groups,
                              .value = base + first + 1,
                              .layer = layer,
                              .group = (uint32_t)first};
    int rc = wait_for(s, &want, err);
    if (rc)
        return rc;
    uint64_t end = atomic_load_explicit(&s->w->landed_groups, memory_order_acquire) - base;
    *ret_first = (uint32_t)first;
    *ret_end = end > per_layer ? per_layer : (uint32_t)end;
    return 0;
}

const uint8_t *inf_stream_slot(const struct inf_stream *s, uint32_t layer, uint32_t expert, uint32_t first,
                               uint32_t end)
{
    const struct shm_geometry *g = &s->c.geometry;
    /* relaxed: ordered by the acquire of landed_groups */
    uint32_t entry =
        atomic_load_explicit(&s->c.control.table[(size_t)layer * g->experts + expert], memory_order_relaxed);
    uint32_t group = shm_entry_group(entry), slot = shm_entry_slot(entry);
    if (shm_entry_state(entry) != SHM_ENTRY_SLOT || group < first || group >= end || slot >= g->ring)
        return NULL;
    return s->c.ring + slot * g->slot_bytes;
}

void inf_stream_release(struct inf_stream *s, uint32_t layer, uint32_t end)
{
    const struct shm_geometry *g = &s->c.geometry;
    uint64_t base = s->group_base + (uint64_t)layer * g->groups_per_layer;
    if (s->c.poison) {
        uint32_t first = s->released > base ? (uint32_t)(s->released - base) : 0;
        for (uint32_t e = 0; e < g->experts; e++) {
            const uint8_t *slot = inf_stream_slot(s, layer, e, first, end);
            if (slot)
                memset(s->c.ring + (slot - s->c.ring), 0xff, g->slot_bytes);
        }
    }
    atomic_store_explicit(&s->w->wait_ns, s->wait_ns, memory_order_relaxed);
    s->released = base + end;
    /* release, pairs with the issuer's acquire: our last read of the slots came before */
    atomic_store_explicit(&s->w->released_groups, s->released, memory_order_release);
    shm_bell_ring(&s->w->issuer_bell);
    inf_event_release(s->c.events, s->seq, layer, end);
}

static void finish(struct inf_stream *s, uint32_t result)
{
    inf_event_pass_end(s->c.events, s->seq, result);
    s->group_base += s->groups;
    s->released = s->group_base;
    s->running = false;
    atomic_store_explicit(&s->w->released_groups, s->released, memory_order_release);
    shm_bell_ring(&s->w->issuer_bell);
}

int inf_stream_end(struct inf_stream *s, struct shm_report *ret_report, struct shm_error *err)
{
    const struct want want = {.word = "done_seq",
                              .at = &s->w->done_seq,
                              .value = s->seq,
                              .layer = s->c.geometry.layers - 1,
                              .group = s->c.geometry.groups_per_layer - 1,
                              .ending = true};
    int rc = wait_for(s, &want, err);
    if (rc)
        return rc;
    uint32_t result = atomic_load_explicit(&s->w->result, memory_order_relaxed);
    if (result != SHM_RESULT_OK)
        return failed(s, err);
    struct shm_report report;
    rc = shm_report_read(s->w, s->seq, &report);
    finish(s, SHM_RESULT_OK);
    if (rc)
        return shm_error_set(err, EIO, "the report of stream %llu is torn", (unsigned long long)s->seq);
    *ret_report = report;
    return 0;
}

static void quiesce(struct inf_stream *s)
{
    if (s->c.quiesce)
        s->c.quiesce(s->c.quiesce_ctx, s->group_base + s->groups);
}

int inf_stream_cancel(struct inf_stream *s, struct shm_error *err)
{
    if (!s->running)
        return s->lost ? gone(s, err) : 0;
    if (s->lost) {
        s->running = false;
        inf_event_pass_end(s->c.events, s->seq, SHM_RESULT_FAILED);
        quiesce(s);
        return gone(s, err);
    }
    /* release, pairs with the issuer's acquire: we read no slot from here on */
    atomic_store_explicit(&s->w->cancel_seq, s->seq, memory_order_release);
    shm_bell_ring(&s->w->issuer_bell);
    const struct want want = {.word = "done_seq", .at = &s->w->done_seq, .value = s->seq, .ending = true};
    int rc = wait_for(s, &want, err);
    quiesce(s);
    if (rc) {
        s->lost = true;
        s->running = false;
        inf_event_pass_end(s->c.events, s->seq, SHM_RESULT_FAILED);
        return rc;
    }
    if (s->c.poison)
        memset(s->c.ring, 0xff, s->c.geometry.ring * s->c.geometry.slot_bytes);
    finish(s, SHM_RESULT_CANCELLED);
    return 0;
}

uint64_t inf_stream_wait_ns(const struct inf_stream *s)
{
    return s->wait_ns;
}

uint64_t inf_stream_seq(const struct inf_stream *s)
{
    return s->seq;
}

uint64_t inf_stream_group_base(const struct inf_stream *s)
{
    return s->group_base;
}

int inf_stream_check(struct inf_stream *s, struct shm_error *err)
{
    const struct want want = {.ending = !s->running};
    int rc = check_end(s, &want, err);
    return !rc && peer_dead(s) ? gone(s, err) : rc;
}

uint64_t inf_stream_watchdog_ns(const struct inf_stream *s)
{
    return s->c.watchdog_ns;
}
