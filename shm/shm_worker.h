/* SPDX-License-Identifier: MIT */
/*
 * Worker control segment: where one worker and expertd meet while a stream
 * runs. The worker creates it (a sealed memfd, so that it can't shrink under
 * its peers), expertd maps it and writes its own fields, tools map it
 * read-only.
 *
 * Sections, each on its own cache lines, at offsets that follow from the
 * geometry alone (shm_worker_layout), so that nobody trusts an offset that a
 * peer can write:
 *
 *   struct shm_worker              header, geometry, words of both sides, descriptor, reports
 *   struct shm_mask    [layers]    resident set                         worker
 *   struct shm_route   [layers]    routing set with its publication     worker
 *   uint32_t [layers][experts]     tokens per expert of the layer       worker, with the routing set
 *   uint32_t [layers][experts]     expected tokens of a layer           worker, a layer ahead
 *   uint32_t [layers][experts]     recent tokens (this conversation)    worker, before the stream
 *   uint32_t [layers][experts]     slot table                           expertd
 *   uint64_t [ring]                slot map, for tools                  expertd
 *   struct shm_layer_counters [layers]                                  expertd
 *
 * One stream, in order (seq = its number, counted from 1):
 *
 *   worker   waits done_seq == seq - 1; fills descriptor, resident, recent and (if it predicts)
 *            predicted[0]; stream_seq = seq (release); rings issuer_bell
 *   expertd  reads the descriptor once, checks it, walks; writes slot-table rows, then
 *            landed_groups (release, by the link, in copy order); rings landed_bell
 *   worker   per layer: fills tokens (and predicted[layer + 1]), mask, then route.seq = seq
 *            (release); rings issuer_bell. Per group g of the layer: waits landed_groups > g,
 *            runs the experts that the slot table puts in g, released_groups = g + 1 (release),
 *            rings issuer_bell
 *   expertd  when everything landed and was released: report, done_seq = seq (release)
 *
 * Groups are counted over the worker's whole life: group g of layer l of a
 * stream is number group_base + l * groups_per_layer + g; both sides add
 * layers * groups_per_layer to group_base after each stream, however it ended.
 *
 * Cancel: the worker stores cancel_seq = seq and rings; it reads no slot from
 * then on. expertd stops issuing, waits for what is on the link (a slow one
 * takes its time, one that lands nothing is a failure), sets
 * landed_groups to the stream's end and done_seq = seq with result
 * SHM_RESULT_CANCELLED. Only then does the worker set released_groups to the
 * stream's end.
 *
 * On a CUDA device the ring is device memory, and the worker's streams wait
 * for its own 32-bit flag there: the low half of what landed_groups will say,
 * written by the copy engine (ATTACH names it). landed_groups follows later,
 * when the issuer looks, and is for tools and for the worker's CPU.
 * released_groups and the routing sets may be written by the device, which
 * rings no bell: the issuer polls them while a stream runs. A worker's CPU
 * still rings after it posts or cancels a stream.
 *
 * Failure: done_seq = seq with result FAILED and error_text; landed_groups
 * stays where it is, so the worker looks at done_seq whenever it waits. It
 * sets released_groups to the stream's end before the next stream, as after a
 * cancellation.
 */
#ifndef SHM_WORKER_H
#define SHM_WORKER_H

#include "shm/shm_bell.h"
#include "shm/shm_counter.h"
#include "shm/shm_header.h"
#include "shm/shm_mask.h"

#define SHM_WORKER_MAGIC "EXDWRK02"
#define SHM_GROUP_MAX    16               /* entries of a group, at most (DESIGN 7) */
#define SHM_RING_MAX     ((1u << 20) - 1) /* slots; a slot table entry has 20 bits for one */
#define SHM_REPORTS      64               /* chunk reports kept, power of two */
#define SHM_CACHE_LINE   64

/* Values of 32-bit fields. Not enums: their width is the compiler's choice. Their words: shm_word.h. */
#define SHM_POLICY_DEFAULT 0u /* as expertd was started */
#define SHM_POLICY_FULL    1u
#define SHM_POLICY_ROUTED  2u
#define SHM_POLICY_DEMAND  3u /* effective only: below the floor, nothing before the router */

#define SHM_ORDER_DEFAULT   0u
#define SHM_ORDER_INDEX     1u
#define SHM_ORDER_RECENT    2u
#define SHM_ORDER_PREDICTED 3u

#define SHM_RESULT_RUNNING   0u
#define SHM_RESULT_OK        1u
#define SHM_RESULT_CANCELLED 2u
#define SHM_RESULT_FAILED    3u /* error_text says why */

/* Why a stream that asked for the routed policy does not use it (DESIGN 2, "held off"). */
#define SHM_HELD_NONE       0u
#define SHM_HELD_FLOOR      1u /* chunk below the floor: demand */
#define SHM_HELD_POLICY     2u /* the policy is set to full */
#define SHM_HELD_PREDICTION 3u /* order predicted without predictions: recent is used; still routed */

/* Slot-table entry: state in the top 2 bits, then group within the layer (10 bits), then slot (20 bits). */
#define SHM_ENTRY_NONE     0u /* not decided yet */
#define SHM_ENTRY_RESIDENT 1u
#define SHM_ENTRY_SLOT     2u
#define SHM_ENTRY_DROPPED  3u

static inline uint32_t shm_entry_make(uint32_t state, uint32_t group, uint32_t slot)
{
    return state << 30 | group << 20 | slot;
}
static inline uint32_t shm_entry_state(uint32_t entry)
{
    return entry >> 30;
}
static inline uint32_t shm_entry_group(uint32_t entry)
{
    return entry >> 20 & 0x3ff;
}
static inline uint32_t shm_entry_slot(uint32_t entry)
{
    return entry & 0xfffff;
}

/* What both sides must agree on before they share anything. */
struct shm_geometry {
    uint32_t layers;           /* 1 .. SHM_LAYERS_MAX */
    uint32_t experts;          /* per layer, 1 .. SHM_EXPERTS_MAX */
    uint32_t ring;             /* slots, 1 .. SHM_RING_MAX */
    uint32_t group_entries;    /* of a full group: shm_group_entries(ring) */
    uint32_t groups_per_layer; /* shm_groups_per_layer(experts, group_entries) */
    uint32_t reserved;
    uint64_t slot_bytes; /* at least the largest blob, multiple of 256 */
};
_Static_assert(sizeof(struct shm_geometry) == 32, "shared layout");

/* A group must fit in the ring beside another one, so that copying and
 * computing overlap; a ring of one slot is legal and does not overlap. */
static inline uint32_t shm_group_entries(uint32_t ring)
{
    uint32_t half = ring / 2;
    return half < 1 ? 1 : half > SHM_GROUP_MAX ? SHM_GROUP_MAX : half;
}

static inline uint32_t shm_groups_per_layer(uint32_t experts, uint32_t group_entries)
{
    return (experts + group_entries - 1) / group_entries;
}

/* One chunk's stream, written by the worker before stream_seq. */
struct shm_descriptor {
    uint64_t seq;
    uint64_t group_base; /* number of the stream's first group */
    uint32_t tokens;     /* of the chunk */
    uint32_t position;   /* of its first token in the conversation */
    uint32_t flags;      /* SHM_STREAM_* */
    uint32_t reserved;
};
_Static_assert(sizeof(struct shm_descriptor) == 32, "shared layout");

#define SHM_STREAM_PREDICTS 1u /* the worker publishes predicted counts for the next layer */
#define SHM_STREAM_KNOWN    2u /* for measurements: predicted holds all layers' counts from the start */

/* What became of one chunk; written by expertd under the generation word.
 * wait_ns is the worker's own (worker.wait_ns), copied; of a GPU, which waits by itself, what expertd saw. */
struct shm_report {
    _Atomic uint64_t generation; /* odd while written; 2 * seq when whole (release; readers re-check) */
    uint64_t seq;
    uint32_t tokens, policy, order, depth;
    uint32_t ring, held_off, result, layers;
    uint64_t routed;          /* streamed experts with a token, all layers */
    uint64_t entries;         /* streamed experts, all layers */
    uint64_t copied;          /* entries issued and landed */
    uint64_t dropped;         /* entries skipped */
    uint64_t wasted;          /* entries copied that no token routed to */
    uint64_t bytes;           /* copied */
    uint64_t wasted_bytes;    /* of them, for entries no token routed to */
    uint64_t link_ns;         /* link busy with this stream's copies */
    uint64_t span_ns;         /* first issue to last landing */
    uint64_t wait_ns;         /* worker waited for groups */
    uint64_t outstanding_max; /* most copies not landed when a guess was issued (full: any copy) */
    uint64_t cpu_ns;          /* of the issuer's thread */
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct shm_report) == 160, "shared layout");

struct shm_worker {
    struct shm_header header;     /* worker; checked by expertd once, at attach */
    struct shm_geometry geometry; /* worker, before attach; expertd uses its private copy */
    uint8_t pad0[32];

    /* ---- written by the worker ---- */
    _Atomic uint64_t stream_seq;      /* release after the descriptor; expertd: acquire */
    _Atomic uint64_t released_groups; /* release after the group's last read; expertd: acquire */
    _Atomic uint64_t cancel_seq;      /* release; expertd: acquire */
    _Atomic uint64_t wait_ns; /* of the current stream, host device; relaxed, before released_groups */
    _Atomic uint64_t layer;   /* being computed, for tools; relaxed */
    uint64_t pad1[3];
    struct shm_descriptor descriptor; /* before stream_seq */
    uint8_t pad2[32];

    /* ---- written by both: wake-ups only ---- */
    struct shm_bell issuer_bell; /* rung by worker and link, waited on by expertd's issuer */
    struct shm_bell landed_bell; /* rung by the link and the issuer, waited on by the worker */
    uint64_t pad3[6];

    /* ---- written by expertd ---- */
    _Atomic uint64_t
        landed_groups; /* release, by the link in copy order; worker: acquire, reads table and slots */
    uint64_t pad4[7];
    _Atomic uint64_t done_seq;       /* release after result and report; worker: acquire */
    _Atomic uint32_t result;         /* SHM_RESULT_* of stream done_seq */
    _Atomic uint32_t detached;       /* 1: expertd gave this worker up; error_text says why (release) */
    _Atomic uint64_t issued_entries; /* of the current stream; relaxed, for tools */
    _Atomic uint64_t landed_entries; /* likewise */
    _Atomic uint64_t dropped_entries;
    _Atomic uint64_t issue_layer;   /* being issued, for tools */
    _Atomic uint32_t policy, order; /* effective, of the current stream */
    _Atomic uint32_t depth, held_off;
    char error_text[SHM_ERROR_TEXT_BYTES]; /* before result / detached */
    struct shm_report report[SHM_REPORTS]; /* of stream seq: index seq % SHM_REPORTS */
    struct shm_link_counters link;         /* issuer */

    /* ---- written by the worker ---- */
    struct shm_compute_counters compute;
    uint32_t server_fd; /* its descriptor of its server segment (shm_server.h), before attach; 0: none */
    uint32_t trace_fd;  /* likewise of its segment of events (shm_event.h) */
    uint8_t pad5[56];
};

/* Routing set of one layer. expertd reads seq (acquire), then copies the mask once. */
struct shm_route {
    _Atomic uint64_t seq;  /* stream whose set this is; worker: release after mask and counts */
    uint64_t published_ns; /* CLOCK_MONOTONIC, before seq; for tools */
    struct shm_mask mask;
    uint64_t pad[6];
};
_Static_assert(sizeof(struct shm_route) == 192, "shared layout");
_Static_assert(offsetof(struct shm_worker, stream_seq) % SHM_CACHE_LINE == 0, "own cache line");
_Static_assert(offsetof(struct shm_worker, descriptor) % SHM_CACHE_LINE == 0, "own cache line");
_Static_assert(offsetof(struct shm_worker, issuer_bell) % SHM_CACHE_LINE == 0, "own cache line");
_Static_assert(offsetof(struct shm_worker, landed_groups) % SHM_CACHE_LINE == 0, "own cache line");
_Static_assert(offsetof(struct shm_worker, done_seq) % SHM_CACHE_LINE == 0, "own cache line");
/* Changing it needs a new magic; shm_layout.c has every offset. */
_Static_assert(sizeof(struct shm_worker) == 12416, "shared layout");
_Static_assert(sizeof(struct shm_worker) % SHM_CACHE_LINE == 0, "sections start on a cache line");

/* Where the sections are. Made from a geometry, never read from shared memory. */
struct shm_worker_layout {
    struct shm_geometry geometry;
    uint64_t resident, route, tokens, predicted, recent, table, slot_map, layer; /* byte offsets */
    uint64_t total_bytes;
};

/* Checks a geometry (all ranges, group numbers as derived) and lays it out.
 * Returns 0 or -EINVAL with the field, its value and its range named. */
int shm_worker_layout(const struct shm_geometry *geometry, struct shm_worker_layout *ret_layout,
                      struct shm_error *err);

/* A mapped segment with its sections resolved. Private to each process. */
struct shm_worker_view {
    struct shm_worker *worker;
    struct shm_mask *resident; /* [layers] */
    struct shm_route *route;   /* [layers] */
    uint32_t *tokens;          /* [layers][experts] */
    uint32_t *predicted; /* [layers][experts]; row 0 is valid with the descriptor, row l once route[l - 1] is
                            published */
    uint32_t *recent;    /* [layers][experts] */
    _Atomic uint32_t *table;          /* [layers][experts], relaxed; ordered by landed_groups */
    _Atomic uint64_t *slot_map;       /* [ring], relaxed, for tools: see shm_slot_pack */
    struct shm_layer_counters *layer; /* [layers], for tools */
};

/* Points a view into a mapping of layout->total_bytes that starts at base. */
void shm_worker_view(void *base, const struct shm_worker_layout *layout, struct shm_worker_view *ret_view);

/* Slot map word: bit 63 in use at all; 31 bits group number; layer; expert. A
 * slot is issued while landed_groups <= group, landed (or being read) while
 * released_groups <= group, free after. */
static inline uint64_t shm_slot_pack(uint64_t group, uint32_t layer, uint32_t expert)
{
    return UINT64_C(1) << 63 | (group & 0x7fffffff) << 32 | (uint64_t)layer << 16 | expert;
}
static inline uint32_t shm_slot_group(uint64_t word)
{
    return word >> 32 & 0x7fffffff;
}
static inline uint32_t shm_slot_layer(uint64_t word)
{
    return word >> 16 & 0xffff;
}
static inline uint32_t shm_slot_expert(uint64_t word)
{
    return word & 0xffff;
}

/* Copies report `seq` if it is whole. Returns 0, or -EAGAIN (being written, or lapped). */
int shm_report_read(const struct shm_worker *worker, uint64_t seq, struct shm_report *ret_report);

/* Writes a report (one writer: expertd's issuer). */
void shm_report_write(struct shm_worker *worker, const struct shm_report *report);

#endif
