/* SPDX-License-Identifier: MIT */
/*
 * Stream: one worker's streams as the issuer sees them: the environment in
 * which the walk runs (control segment, arena, link), and the counting.
 *
 * Used by the issuer's thread alone. Reads each word of the control segment
 * once, checks it, keeps a private copy; what breaks the protocol is kept as
 * a violation that the issuer asks for after each step. No call blocks but
 * exd_stream_end.
 */
#ifndef EXD_STREAM_H
#define EXD_STREAM_H

#include "expertd/exd_issuer.h"
#include "expertd/exd_walk.h"

struct exd_stream;

/* What a stream is run with. */
struct exd_stream_plan {
    uint32_t tokens, policy, order, depth, floor, held_off;
};

/* Memory for all streams of a worker. The arguments must outlive it. NULL: no memory. */
struct exd_stream *exd_stream_new(const struct shm_arena_view *arena, const struct shm_worker_view *control,
                                  const struct shm_geometry *geometry, struct krn_link *link,
                                  const char *name);
void exd_stream_free(struct exd_stream **stream);

/* Reads and checks the descriptor of stream seq whose first group is group_base, plans, starts the walk.
 * Returns 0, or -EPROTO when the worker broke the protocol. */
int exd_stream_begin(struct exd_stream *stream, uint64_t seq, uint64_t group_base,
                     const struct exd_stream_settings *settings, struct exd_stream_plan *ret_plan,
                     struct shm_error *err);

enum exd_step exd_stream_step(struct exd_stream *stream);

/* True once every group was signalled, landed and released. */
bool exd_stream_consumed(struct exd_stream *stream);

/* True, with err filled, when the worker broke the protocol in this stream. */
bool exd_stream_violation(const struct exd_stream *stream, struct shm_error *err);

/* Fills err after EXD_STEP_FAILED. */
void exd_stream_failure(const struct exd_stream *stream, struct shm_error *err);

/* When the next layer is likely to be published, from the time between those before; 0: not known yet, or
 * copies are still on the link, so that nothing is lost by looking late. */
uint64_t exd_stream_due_ns(struct exd_stream *stream);

/* A number that changes whenever something moved. */
uint64_t exd_stream_progress(struct exd_stream *stream);

/* The watchdog's line: worker, layer, entry and the word that did not change. */
void exd_stream_stuck(struct exd_stream *stream, enum exd_step step, uint64_t limit_ns,
                      struct shm_error *err);

/* Ends it: what is on the link lands (waits at most drain_ns); after a cancellation landed_groups goes to
 * the stream's end; report and counters are written, with a trace line for worker `trace` unless NULL. */
void exd_stream_end(struct exd_stream *stream, uint32_t result, uint64_t drain_ns, const char *trace);

/* Where its events go (exd_event.h); NULL: nowhere. */
void exd_stream_events(struct exd_stream *stream, struct shm_event_writer *events);
/* Its issuer goes to sleep for what the step waits for (DONE: for the last release). */
void exd_stream_asleep(struct exd_stream *stream, enum exd_step step);

/* From the next stream on its doings are kept. 0 or -ENOMEM. */
int exd_stream_trace(struct exd_stream *stream);
/* After the end: appends what was kept to the file. */
void exd_stream_trace_write(struct exd_stream *stream, const char *path);

/* Number of the first group after the stream. */
uint64_t exd_stream_end_group(const struct exd_stream *stream);

#endif
