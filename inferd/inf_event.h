/* SPDX-License-Identifier: MIT */
/*
 * A worker's events: for each of them one function that writes it to the
 * worker's ring (shm/shm_event.h) and fires the probe of the same name.
 *
 * The ring is a sealed memfd of its own that outlives the sessions; the
 * control segment names it. One thread: that of the streams. On a GPU the
 * device publishes, waits and releases by itself: there the ring has only
 * passes, and expertd's rings tell when it saw the rest.
 */
#ifndef INF_EVENT_H
#define INF_EVENT_H

#include "shm/shm_bell.h"
#include "shm/shm_event.h"
#include "shm/shm_probe.h"

struct inf_events {
    int fd; /* -1: none */
    void *base;
    uint64_t bytes;
    struct shm_event_writer writer;
};

/* Off with EXPERTD_EVENTS=0; without memory for them there are none. Returns the writer, or NULL. */
struct shm_event_writer *inf_events_open(struct inf_events *events, const char *name);
void inf_events_close(struct inf_events *events);

static inline void inf_event_join(struct shm_event_writer *w, uint64_t session, uint32_t slots)
{
    SHM_PROBE(inferd, join, session, slots);
    if (w)
        shm_event_put(w, SHM_EVENT_JOIN, shm_now_ns(), SHM_EVENT_U32(session, 0) | SHM_EVENT_U32(slots, 4),
                      0);
}

static inline void inf_event_pass_begin(struct shm_event_writer *w, uint64_t stream, uint32_t tokens,
                                        uint32_t position)
{
    SHM_PROBE(inferd, pass_begin, stream, tokens, position);
    if (w)
        shm_event_put(w, SHM_EVENT_PASS_BEGIN, shm_now_ns(),
                      SHM_EVENT_U32(stream, 0) | SHM_EVENT_U32(tokens, 4), position);
}

static inline void inf_event_pass_end(struct shm_event_writer *w, uint64_t stream, uint32_t result)
{
    SHM_PROBE(inferd, pass_end, stream, result);
    if (w)
        shm_event_put(w, SHM_EVENT_PASS_END, shm_now_ns(), SHM_EVENT_U32(stream, 0) | SHM_EVENT_U8(result, 4),
                      0);
}

static inline void inf_event_publish(struct shm_event_writer *w, uint64_t now_ns, uint64_t stream,
                                     uint32_t layer, uint32_t routed)
{
    SHM_PROBE(inferd, publish, stream, layer, routed);
    shm_event_put(w, SHM_EVENT_PUBLISH, now_ns,
                  SHM_EVENT_U32(stream, 0) | SHM_EVENT_U16(layer, 4) | SHM_EVENT_U16(routed, 6), 0);
}

/* groups: of the layer, so far. */
static inline void inf_event_release(struct shm_event_writer *w, uint64_t stream, uint32_t layer,
                                     uint32_t groups)
{
    SHM_PROBE(inferd, release, stream, layer, groups);
    if (w)
        shm_event_put(w, SHM_EVENT_RELEASE, shm_now_ns(),
                      SHM_EVENT_U32(stream, 0) | SHM_EVENT_U16(layer, 4) | SHM_EVENT_U16(groups, 6), 0);
}

static inline void inf_event_wait_begin(struct shm_event_writer *w, uint64_t now_ns, uint64_t stream,
                                        uint32_t layer, uint32_t group, uint32_t what)
{
    SHM_PROBE(inferd, wait_begin, stream, layer, group, what);
    shm_event_put(w, SHM_EVENT_WAIT_BEGIN, now_ns,
                  SHM_EVENT_U32(stream, 0) | SHM_EVENT_U16(layer, 4) | SHM_EVENT_U16(group, 6), what);
}

static inline void inf_event_wait_end(struct shm_event_writer *w, uint64_t now_ns, uint64_t stream, int rc)
{
    SHM_PROBE(inferd, wait_end, stream, rc);
    shm_event_put(w, SHM_EVENT_WAIT_END, now_ns, SHM_EVENT_U32(stream, 0) | SHM_EVENT_U32(-rc, 4), 0);
}

#endif
