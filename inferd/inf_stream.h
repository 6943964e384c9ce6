/* SPDX-License-Identifier: MIT */
/*
 * Worker's side of the routed stream (shm/shm_worker.h): one chunk's walk over
 * its streamed experts, seen by the one who computes.
 *
 * Per stream: begin; per layer publish, then wait / run / release until all
 * groups of the layer are through; end. Or cancel at any point between begin
 * and end. Owns no memory but a small state: the control segment and the ring
 * are the session's and outlive it. One thread.
 *
 * No wait is unbounded: each wakes at least every 100 ms and ends by success,
 * expertd's death (-ESHUTDOWN), detachment (-ECONNRESET), cancellation
 * (-ECANCELED), a failed stream (-EIO) or the watchdog (-ETIMEDOUT); the line
 * in err names layer, group and the word waited on. After any error but
 * before the next begin the caller calls inf_stream_cancel().
 */
#ifndef INF_STREAM_H
#define INF_STREAM_H

#include "shm/shm_error.h"
#include "shm/shm_event.h"
#include "shm/shm_worker.h"

#include <stdbool.h>

struct inf_stream_config {
    struct shm_worker_view control; /* mapped read-write */
    struct shm_geometry geometry;   /* private copy, as laid out */
    uint8_t *ring;                  /* geometry.ring * geometry.slot_bytes; written in poison mode only */
    int expertd_pidfd;              /* -1: not watched */
    uint64_t watchdog_ns;           /* longest wait without progress; 0: 60 s */
    _Atomic bool *cancel;           /* set by a signal handler or another thread; NULL: none */
    /* Called when a stream ended early, once expertd writes nothing of it any more: ends what a device still
     * does with it, up to the group number given. NULL: nothing does. */
    void (*quiesce)(void *ctx, uint64_t end_group);
    void *quiesce_ctx;
    struct shm_event_writer *events; /* inf_event.h; NULL: none */
    bool poison;                     /* fill each slot with 0xFF right before its release */
};

struct inf_stream;

/* 0 or -ENOMEM. With poison the whole ring is filled at once. */
int inf_stream_create(const struct inf_stream_config *config, struct inf_stream **ret_stream);
void inf_stream_destroy(struct inf_stream **stream);

/* Begins the next stream: tokens > 0 from `position` on. predicted: [experts], expected
 * counts of layer 0 where the stream publishes predictions, else NULL. recent:
 * [layers][experts] or NULL for zeros; the resident masks lie in the control segment already. */
int inf_stream_begin(struct inf_stream *s, uint32_t tokens, uint32_t position, const uint32_t *predicted,
                     const uint32_t *recent, struct shm_error *err);

/* For measurements: the next stream to begin is told the counts of all its layers, [layers][experts], as an
 * earlier identical read had them; such a stream publishes no predictions of its own. Only a hint, like
 * every prediction: wrong ones cost time and no bits. NULL: takes it back. The memory is read at the begin.
 */
void inf_stream_know(struct inf_stream *s, const uint32_t *counts);

/* Makes a layer's routing set visible: counts [experts] (tokens per expert);
 * predicted [experts] for layer + 1, or NULL. Layers in order, each once. Does not block. */
void inf_stream_publish(struct inf_stream *s, uint32_t layer, const uint32_t *counts,
                        const uint32_t *predicted);

/* Waits until at least one group of the published layer beyond those released
 * has landed. *ret_first, *ret_end: the landed groups [first, end) within the
 * layer; first == groups_per_layer (and end too) means that the layer is done. */
int inf_stream_wait(struct inf_stream *s, uint32_t layer, uint32_t *ret_first, uint32_t *ret_end,
                    struct shm_error *err);

/* Bytes of an expert that a landed group in [first, end) of the layer holds,
 * else NULL. Reads nothing but the slot table. */
const uint8_t *inf_stream_slot(const struct inf_stream *s, uint32_t layer, uint32_t expert, uint32_t first,
                               uint32_t end);

/* Gives groups up to `end` back: their slots are not read after this. */
void inf_stream_release(struct inf_stream *s, uint32_t layer, uint32_t end);

/* After the last layer's last release: waits for the report. */
int inf_stream_end(struct inf_stream *s, struct shm_report *ret_report, struct shm_error *err);

/* Ends a begun stream early; does nothing if none runs. Waits until expertd
 * has let go of the ring (bounded). 0: the next stream may begin; else the
 * session is lost and must be attached anew. */
int inf_stream_cancel(struct inf_stream *s, struct shm_error *err);

/* For a device that publishes, waits and releases by itself: the running stream's number, the number of its
 * first group, and whether something ended it: 0, or the errors of the waits above (without the watchdog). */
uint64_t inf_stream_seq(const struct inf_stream *s);
uint64_t inf_stream_group_base(const struct inf_stream *s);
int inf_stream_check(struct inf_stream *s, struct shm_error *err);
uint64_t inf_stream_watchdog_ns(const struct inf_stream *s);

/* Nanoseconds asleep since the stream began. */
uint64_t inf_stream_wait_ns(const struct inf_stream *s);

/* True while expertd lives and has not detached this worker. */
bool inf_stream_alive(const struct inf_stream *s);

#endif
