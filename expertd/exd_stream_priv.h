/* SPDX-License-Identifier: MIT */
/* Inside of a stream, shared by exd_stream.c (its life), exd_stream_env.c (what the walk sees and does) and
 * exd_stream_report.c (its end and what is told of it). */
#ifndef EXD_STREAM_PRIV_H
#define EXD_STREAM_PRIV_H

#include "expertd/exd_event.h"
#include "expertd/exd_starved.h"
#include "expertd/exd_stream.h"
#include "expertd/exd_trace.h"
#include "expertd/exd_trust.h"

struct exd_stream {
    const struct shm_arena_view *arena;
    struct shm_worker_view control;
    struct shm_geometry geometry;
    struct krn_link *link;
    const char *name;
    struct exd_walk *walk;

    /* Private copies of what the worker wrote; [layers] each. */
    struct shm_mask *resident, *routed, *issued, *spoken; /* spoken: issued once the layer was published */
    bool *published;
    uint64_t *published_at_ns, *last_copy; /* when seen; number of its last copy, from 1, 0: none */
    uint32_t *expected_row;                /* [experts], of the layer named next */
    uint32_t expected_layer;
    enum exd_expectation expected_from;
    uint32_t sure;                   /* of that row */
    struct exd_trust_counts trust;   /* how right they were, over the worker's life */
    struct exd_trace *trace;         /* NULL: none */
    struct shm_event_writer *events; /* NULL: none */
    uint32_t asleep;                 /* SHM_SLEEP_*, as last told; 0: awake */
    uint64_t step_ns; /* of events that follow each other within a step; 0: look at the clock */

    uint64_t seq, group_base, groups;
    uint64_t landed_base, landed, released, signalled, cpu_ns;
    uint32_t flags, published_layers;
    struct exd_stream_plan plan;
    uint64_t bytes, copies;
    uint32_t landed_layers;                    /* layers whose last copy has landed */
    uint64_t counted_busy_ns, counted_wait_ns; /* of this stream, so far */
    struct exd_starved starved;                /* on a link that nobody tells of landings */
    uint64_t published_ns, period_ns;          /* the last publication; least time between two lately */
    struct shm_error violation;
};

static inline struct shm_worker *worker(const struct exd_stream *stream)
{
    return stream->control.worker;
}

/* exd_stream_env.c. What the walk calls; ctx is the stream. */
void exd_stream_env(struct exd_stream *stream, struct exd_walk_env *ret_env);

/* Groups that the worker has released, copies that have landed, of this stream. A number that breaks the
 * protocol is not believed: it is kept as the violation. */
uint64_t exd_stream_released(struct exd_stream *stream);
uint64_t exd_stream_landed(struct exd_stream *stream);

/* The layer's routing set once published, else NULL; looks at shared memory the first time. */
const struct shm_mask *exd_stream_published(struct exd_stream *stream, uint32_t layer);

/* The sleep that was told of is over, if there was one. */
void exd_stream_awake(struct exd_stream *stream);

/* exd_stream_report.c. Layers whose last copy has landed: how long after the router spoke. */
void exd_stream_count_lags(struct exd_stream *stream);

uint64_t exd_stream_cpu_now_ns(void); /* CPU time of the calling thread */

#endif
