/* SPDX-License-Identifier: MIT */
/*
 * Events: what a process did lately, in rings of fixed-size events in shared
 * memory that are always written and read by whoever wants to look.
 *
 * A segment holds rings, one a thread, each with one writer, and says itself
 * what its events are called and which fields they have: who reads it needs
 * nothing of the program that wrote it but the structs below. All offsets are
 * bytes from the segment's beginning; sizes of the structs stand beside them,
 * so that a later version may append to each.
 *
 * The writer never waits and never looks at a reader. An event's first word
 * is 0 while it is written, then (number + 1) << 8 | kind; a reader copies
 * the event and looks at that word again. What was written over before it was
 * read is counted as lost.
 *
 * expertd: file `events` in the instance's directory, rings of its main loop
 * and, for each session, of issuer and link. inferd: a sealed memfd named in
 * the control segment (trace_fd), one ring.
 */
#ifndef SHM_EVENT_H
#define SHM_EVENT_H

#include "shm/shm_header.h"

#include <stdbool.h>

#define SHM_EVENT_MAGIC       "EXDEVT01"
#define SHM_EVENT_WORDS       4u
#define SHM_EVENT_NAME        24
#define SHM_EVENT_FIELDS      6u                    /* of a kind, at most */
#define SHM_EVENT_RINGS_MAX   256u                  /* of a segment */
#define SHM_EVENT_RING_MAX    (1u << 20)            /* events of a ring, a power of two */
#define SHM_EVENT_SEGMENT_MAX (UINT64_C(256) << 20) /* bytes */
#define SHM_EVENT_KINDS_MAX   255u
#define SHM_EVENT_VALUES_MAX  1024u

/* Numbers never change and are never used again: a reader may know them. */
enum shm_event_kind {
    SHM_EVENT_NONE = 0,
    /* expertd's main loop */
    SHM_EVENT_STATE = 1,
    SHM_EVENT_ATTACH = 2,
    SHM_EVENT_DETACH = 3,
    SHM_EVENT_DEATH = 4,
    SHM_EVENT_FAULT = 5,
    /* issuer */
    SHM_EVENT_STREAM_BEGIN = 16,
    SHM_EVENT_STREAM_END = 17,
    SHM_EVENT_ISSUE = 18,
    SHM_EVENT_DROP = 19,
    SHM_EVENT_PUBLISH_SEEN = 20,
    SHM_EVENT_LAND_SEEN = 21,
    SHM_EVENT_RELEASE_SEEN = 22,
    SHM_EVENT_SLEEP_BEGIN = 23,
    SHM_EVENT_SLEEP_END = 24,
    /* link's thread */
    SHM_EVENT_LAND = 32,
    /* worker */
    SHM_EVENT_JOIN = 48,
    SHM_EVENT_PASS_BEGIN = 49,
    SHM_EVENT_PASS_END = 50,
    SHM_EVENT_PUBLISH = 51,
    SHM_EVENT_RELEASE = 52,
    SHM_EVENT_WAIT_BEGIN = 53,
    SHM_EVENT_WAIT_END = 54,
};

/* What SLEEP_BEGIN and WAIT_BEGIN wait for. */
#define SHM_SLEEP_RELEASE      1u
#define SHM_SLEEP_LANDING      2u
#define SHM_SLEEP_PUBLICATION  3u
#define SHM_SLEEP_LOADING      4u
#define SHM_SLEEP_LAST_RELEASE 5u
#define SHM_WAIT_GROUP         1u
#define SHM_WAIT_REPORT        2u /* end of the stream before, or of this one */

#define SHM_EVENT_INSTANT 0u
#define SHM_EVENT_BEGIN   1u /* of a span; ends with the next END of the same span in the ring */
#define SHM_EVENT_END     2u
#define SHM_EVENT_SPAN                                                                                       \
    3u /* a whole one that ended when the event says; field at 0, 8 bytes: ns that it took */

#define SHM_EVENT_NUMBER 0u
#define SHM_EVENT_NS     1u
#define SHM_EVENT_BYTES  2u
#define SHM_EVENT_VALUE  3u /* its word is among the segment's values, under `set` */

struct shm_event_field {
    char name[16];
    uint8_t offset, bytes; /* within the event's last two words, in the host's byte order; 1, 2, 4 or 8 */
    uint8_t format, set;
    uint32_t reserved;
};
struct shm_event_info {
    char name[SHM_EVENT_NAME];
    char span[16]; /* what BEGIN, END and SPAN are called together */
    uint8_t kind, phase, fields;
    uint8_t pad[5];
    struct shm_event_field field[SHM_EVENT_FIELDS];
};
struct shm_event_value {
    uint32_t set, value;
    char name[SHM_EVENT_NAME];
};

/* A ring's head. Its owner changes in expertd as sessions come and go: what lies before `first` is of an
 * earlier one. */
struct shm_event_ring {
    _Atomic uint64_t next; /* events so far; release after the event; readers: acquire */
    uint64_t pad[7];
    uint64_t offset, capacity; /* of its events; constant */
    _Atomic uint64_t first;    /* number of the owner's first one */
    _Atomic uint32_t owned;    /* odd while the owner changes; 0: none yet (release; readers re-check) */
    uint32_t pid;              /* of the worker it is about */
    uint64_t session;          /* likewise; 0: of expertd as a whole */
    char thread[16];           /* main, issuer, link, worker */
    char name[64];             /* of the worker */
    uint64_t reserved;
};

struct shm_event_segment {
    struct shm_header header;
    char program[16];
    int64_t realtime_ns; /* CLOCK_REALTIME minus CLOCK_MONOTONIC when it was made */
    uint32_t infos, info_bytes, values, value_bytes, rings, ring_bytes, event_bytes, reserved;
    uint64_t infos_offset, values_offset, rings_offset;
    uint64_t pad[6];
};
_Static_assert(sizeof(struct shm_event_field) == 24 && sizeof(struct shm_event_info) == 192 &&
                   sizeof(struct shm_event_value) == 32 && sizeof(struct shm_event_ring) == 192 &&
                   sizeof(struct shm_event_segment) == 192,
               "shared layout");

/* ---- writing ---- */

/* Private to the writing thread. A NULL writer writes nothing. */
struct shm_event_writer {
    struct shm_event_ring *ring;
    _Atomic uint64_t *events;
    uint64_t next, mask;
};

/* Bytes of a segment with rings of these capacities. */
uint64_t shm_event_bytes(const uint32_t *capacities, uint32_t rings);

/* Fills a zeroed segment, all but the epoch (shm_header_publish). Events are not touched. */
void shm_event_init(void *base, const char *program, const uint32_t *capacities, uint32_t rings, uint32_t pid,
                    uint64_t start);

/* Where a ring's events lie: for those who must have memory there before they write. */
void shm_event_place(const void *base, uint32_t ring, uint64_t *ret_offset, uint64_t *ret_bytes);

/* Gives a ring to a new owner, behind what is there. One thread at a time, and no other writer of it. */
void shm_event_own(void *base, uint32_t ring, const char *thread, const char *name, uint32_t pid,
                   uint64_t session, struct shm_event_writer *ret_writer);

/* fields: the event's last two words. */
static inline void shm_event_put(struct shm_event_writer *w, enum shm_event_kind kind, uint64_t at_ns,
                                 uint64_t field0, uint64_t field1)
{
    if (!w)
        return;
    _Atomic uint64_t *e = w->events + (w->next & w->mask) * SHM_EVENT_WORDS;
    uint64_t number = ++w->next;
    atomic_store_explicit(&e[0], 0, memory_order_relaxed);
    /* release, pairs with the reader's acquire of each: who sees one of them sees the 0 before */
    atomic_store_explicit(&e[1], at_ns, memory_order_release);
    atomic_store_explicit(&e[2], field0, memory_order_release);
    atomic_store_explicit(&e[3], field1, memory_order_release);
    /* release, pairs with the reader's first acquire: the event is whole */
    atomic_store_explicit(&e[0], number << 8 | kind, memory_order_release);
    atomic_store_explicit(&w->ring->next, number, memory_order_release);
}

/* Little-endian hosts only, as the rest of the shared layout: field at byte 0 in the low bits. */
#define SHM_EVENT_U16(value, byte) ((uint64_t)(uint16_t)(value) << (8 * (byte)))
#define SHM_EVENT_U32(value, byte) ((uint64_t)(uint32_t)(value) << (8 * (byte)))
#define SHM_EVENT_U8(value, byte)  ((uint64_t)(uint8_t)(value) << (8 * (byte)))

/* ---- reading: nothing in the segment is trusted ---- */

struct shm_event {
    uint64_t number; /* counted from 0 */
    uint64_t at_ns;  /* CLOCK_MONOTONIC */
    uint64_t field[2];
    uint32_t kind;
};

/* A checked segment: private copies of all that leads into it. */
struct shm_event_view {
    const uint8_t *base;
    uint64_t bytes;
    struct shm_event_segment head;
};

/* Checks header, tables and sizes of a mapping of `bytes`. As shm_header_check; -EBADMSG: a table that does
 * not fit is named. */
int shm_event_open(const void *base, uint64_t bytes, const char *name, struct shm_event_view *ret_view,
                   struct shm_error *err);

/* Copies with text made printable, and fields that do not fit in an event left out. */
void shm_event_info_at(const struct shm_event_view *view, uint32_t index, struct shm_event_info *ret_info);
void shm_event_value_at(const struct shm_event_view *view, uint32_t index, struct shm_event_value *ret_value);
/* The same for what stood in a file. */
void shm_event_info_check(struct shm_event_info *info);
void shm_event_text_check(char *text, size_t capacity);

/* A ring's owner at one moment. 0; -ENOENT: none yet; -EAGAIN: changing; -EBADMSG: it lies outside. */
struct shm_event_owner {
    uint64_t offset, capacity, first, session;
    uint32_t pid, owned;
    char thread[16], name[64];
};
int shm_event_owner_at(const struct shm_event_view *view, uint32_t ring, struct shm_event_owner *ret_owner);

/* Copies up to n events from number *next on (0: from the owner's first one), oldest first, moves *next
 * behind them, adds to *lost what was written over before it could be read. Returns how many. */
uint32_t shm_event_read(const struct shm_event_view *view, uint32_t ring, const struct shm_event_owner *owner,
                        uint64_t *next, struct shm_event *ret_events, uint32_t n, uint64_t *lost);

/* A field's value. field: of a checked info. */
uint64_t shm_event_field(const struct shm_event *event, const struct shm_event_field *field);

#endif
