/* SPDX-License-Identifier: MIT */
/*
 * expertd's events: its segment (shm/shm_event.h) and, for each of them, one
 * function that writes it and fires the probe of the same name.
 *
 * The segment is the file `events` in the instance's directory, so that what
 * a killed expertd did last can still be read: by then it is `events.before`
 * of the next one. It has a ring of the main loop and a place of two rings for each
 * session. Off with EXPERTD_EVENTS=0; without memory for it expertd runs all
 * the same. Main loop's thread, but for the writers, each of which belongs to
 * one thread.
 */
#ifndef EXD_EVENT_H
#define EXD_EVENT_H

#include "proto/prt_path.h"
#include "shm/shm_bell.h"
#include "shm/shm_event.h"
#include "shm/shm_probe.h"

struct exd_events;

/* NULL in *ret_events when they are off, or (logged) when there is no room. Never fails. */
void exd_events_create(const struct prt_paths *paths, struct exd_events **ret_events);
/* Removes the files. Accepts NULL, nulls. */
void exd_events_destroy(struct exd_events **events);

/* Of the main loop; NULL: nothing is written. */
struct shm_event_writer *exd_events_main(struct exd_events *events);

/* A session's rings; NULL writers: none. */
struct exd_event_place {
    struct exd_events *events;
    uint32_t index;
    struct shm_event_writer writers[2];
    struct shm_event_writer *issuer, *link;
};
/* Takes a place for a session: of those without one the one left longest ago, so that what the last
 * sessions did stays there. */
void exd_events_take(struct exd_events *events, const char *name, uint32_t pid, uint64_t session,
                     struct exd_event_place *ret_place);
/* Once nothing writes there any more. Accepts one that was not taken. */
void exd_events_leave(struct exd_event_place *place);

/* ---- main loop ---- */

static inline void exd_event_state(struct exd_events *events, uint32_t state)
{
    if (events)
        shm_event_put(exd_events_main(events), SHM_EVENT_STATE, shm_now_ns(), state, 0);
}

static inline void exd_event_attach(struct exd_events *events, uint64_t session, uint32_t pid, uint32_t slots)
{
    SHM_PROBE(expertd, attach, session, pid, slots);
    if (events)
        shm_event_put(exd_events_main(events), SHM_EVENT_ATTACH, shm_now_ns(),
                      SHM_EVENT_U32(session, 0) | SHM_EVENT_U32(pid, 4), slots);
}

static inline void exd_event_detach(struct exd_events *events, uint64_t session, uint32_t pid)
{
    SHM_PROBE(expertd, detach, session, pid);
    if (events)
        shm_event_put(exd_events_main(events), SHM_EVENT_DETACH, shm_now_ns(),
                      SHM_EVENT_U32(session, 0) | SHM_EVENT_U32(pid, 4), 0);
}

static inline void exd_event_death(struct exd_events *events, uint64_t session, uint32_t pid)
{
    SHM_PROBE(expertd, death, session, pid);
    if (events)
        shm_event_put(exd_events_main(events), SHM_EVENT_DEATH, shm_now_ns(),
                      SHM_EVENT_U32(session, 0) | SHM_EVENT_U32(pid, 4), 0);
}

static inline void exd_event_fault(struct exd_events *events, uint64_t session, uint32_t pid)
{
    SHM_PROBE(expertd, fault, session, pid);
    if (events)
        shm_event_put(exd_events_main(events), SHM_EVENT_FAULT, shm_now_ns(),
                      SHM_EVENT_U32(session, 0) | SHM_EVENT_U32(pid, 4), 0);
}

/* ---- issuer ---- */

static inline void exd_event_stream_begin(struct shm_event_writer *w, uint64_t stream, uint32_t tokens,
                                          uint32_t policy, uint32_t order, uint32_t held_off, uint32_t depth)
{
    SHM_PROBE(expertd, stream_begin, stream, tokens, policy, order);
    if (w)
        shm_event_put(w, SHM_EVENT_STREAM_BEGIN, shm_now_ns(),
                      SHM_EVENT_U32(stream, 0) | SHM_EVENT_U32(tokens, 4),
                      SHM_EVENT_U8(policy, 0) | SHM_EVENT_U8(order, 1) | SHM_EVENT_U8(held_off, 2) |
                          SHM_EVENT_U32(depth, 4));
}

static inline void exd_event_stream_end(struct shm_event_writer *w, uint64_t stream, uint64_t copied,
                                        uint64_t dropped, uint32_t result)
{
    SHM_PROBE(expertd, stream_end, stream, copied, dropped, result);
    if (w)
        shm_event_put(w, SHM_EVENT_STREAM_END, shm_now_ns(),
                      SHM_EVENT_U32(stream, 0) | SHM_EVENT_U32(copied, 4),
                      SHM_EVENT_U32(dropped, 0) | SHM_EVENT_U8(result, 4));
}

/* at_ns: before the copy was enqueued, so that it comes before its landing. group: of the layer. */
static inline void exd_event_issue(struct shm_event_writer *w, uint64_t at_ns, uint64_t stream,
                                   uint32_t layer, uint32_t expert, uint32_t slot, uint32_t group,
                                   bool certain)
{
    SHM_PROBE(expertd, issue, stream, layer, expert, slot, group, certain);
    shm_event_put(w, SHM_EVENT_ISSUE, at_ns,
                  SHM_EVENT_U32(stream, 0) | SHM_EVENT_U16(layer, 4) | SHM_EVENT_U16(expert, 6),
                  SHM_EVENT_U32(slot, 0) | SHM_EVENT_U16(group, 4) | SHM_EVENT_U8(certain, 6));
}

static inline void exd_event_drop(struct shm_event_writer *w, uint64_t at_ns, uint64_t stream, uint32_t layer,
                                  uint32_t expert)
{
    SHM_PROBE(expertd, drop, stream, layer, expert);
    shm_event_put(w, SHM_EVENT_DROP, at_ns,
                  SHM_EVENT_U32(stream, 0) | SHM_EVENT_U16(layer, 4) | SHM_EVENT_U16(expert, 6), 0);
}

static inline void exd_event_publish_seen(struct shm_event_writer *w, uint64_t now_ns, uint64_t stream,
                                          uint32_t layer, uint32_t routed, uint64_t published_ns)
{
    uint64_t after_ns = now_ns > published_ns ? now_ns - published_ns : 0;
    SHM_PROBE(expertd, publish_seen, stream, layer, routed, after_ns);
    shm_event_put(w, SHM_EVENT_PUBLISH_SEEN, now_ns,
                  SHM_EVENT_U32(stream, 0) | SHM_EVENT_U16(layer, 4) | SHM_EVENT_U16(routed, 6), after_ns);
}

static inline void exd_event_land_seen(struct shm_event_writer *w, uint64_t stream, uint64_t copies)
{
    SHM_PROBE(expertd, land_seen, stream, copies);
    if (w)
        shm_event_put(w, SHM_EVENT_LAND_SEEN, shm_now_ns(),
                      SHM_EVENT_U32(stream, 0) | SHM_EVENT_U32(copies, 4), 0);
}

static inline void exd_event_release_seen(struct shm_event_writer *w, uint64_t now_ns, uint64_t stream,
                                          uint64_t groups)
{
    SHM_PROBE(expertd, release_seen, stream, groups);
    shm_event_put(w, SHM_EVENT_RELEASE_SEEN, now_ns, SHM_EVENT_U32(stream, 0) | SHM_EVENT_U32(groups, 4), 0);
}

static inline void exd_event_sleep_begin(struct shm_event_writer *w, uint64_t at_ns, uint64_t stream,
                                         uint32_t why)
{
    shm_event_put(w, SHM_EVENT_SLEEP_BEGIN, at_ns, SHM_EVENT_U32(stream, 0) | SHM_EVENT_U8(why, 4), 0);
}

static inline void exd_event_sleep_end(struct shm_event_writer *w, uint64_t at_ns, uint64_t stream)
{
    shm_event_put(w, SHM_EVENT_SLEEP_END, at_ns, SHM_EVENT_U32(stream, 0), 0);
}

#endif
