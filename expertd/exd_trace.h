/* SPDX-License-Identifier: MIT */
/*
 * Trace: what one stream did when, for tools/timeline. Collected in memory
 * allocated once (an entry and a few events for each expert), appended to a
 * file when the stream is over and its worker has been told, so that nothing
 * of it is in the way. Off unless --trace-file names a file.
 *
 * The file is a row of records in the host's byte order, each:
 *   struct exd_trace_head, then its tables in this order:
 *   struct exd_trace_layer [layers], struct exd_trace_entry [entries],
 *   struct exd_trace_event [events]
 * Times are CLOCK_MONOTONIC in ns. Several streams may append: a record is
 * written with one call.
 */
#ifndef EXD_TRACE_H
#define EXD_TRACE_H

#include "shm/shm_error.h"
#include "shm/shm_mask.h"

#include <stdint.h>

#define EXD_TRACE_MAGIC "EXDTRC01"

struct exd_trace_head {
    char magic[8];
    uint32_t total_bytes; /* of the record */
    uint32_t layers, experts, groups_per_layer, ring, tokens;
    uint32_t policy, order, depth; /* effective */
    uint32_t entries, events;
    uint32_t result;   /* SHM_RESULT_* */
    uint64_t seq;      /* of the stream */
    uint64_t begin_ns; /* its descriptor was seen */
    uint64_t end_ns;   /* everything was released */
    char name[64];     /* of the worker */
};
_Static_assert(sizeof(struct exd_trace_head) == 144, "file format");

struct exd_trace_layer {
    uint64_t published_ns; /* as the worker says */
    uint64_t seen_ns;      /* as the issuer saw it; 0: never */
};

/* One copy, in the order of issue. */
struct exd_trace_entry {
    uint64_t issued_ns;
    uint32_t group; /* of the stream */
    uint16_t layer, expert;
};
#define EXD_TRACE_CERTAIN   0x8000u /* in expert: no guess */
#define EXD_TRACE_PUBLISHED 0x4000u /* in expert: the layer was published when it was issued */
#define EXD_TRACE_UNUSED    0x2000u /* in expert: no token was routed to it */

enum exd_trace_kind {
    EXD_TRACE_LANDED = 1, /* value: copies landed, as seen */
    EXD_TRACE_RELEASED,   /* value: groups released, as seen */
    EXD_TRACE_SIGNALLED,  /* value: groups whose signal was enqueued */
    EXD_TRACE_WAIT        /* value: enum exd_step, the walk went to sleep for it */
};
struct exd_trace_event {
    uint64_t at_ns;
    uint32_t kind, value;
};
_Static_assert(sizeof(struct exd_trace_entry) == 16 && sizeof(struct exd_trace_event) == 16, "file format");

struct exd_trace;

/* NULL: no memory. */
struct exd_trace *exd_trace_new(uint32_t layers, uint32_t experts);
void exd_trace_free(struct exd_trace **trace); /* accepts NULL, nulls */

/* Empties it. The others add; all accept NULL and then do nothing. What does not fit is left out. */
void exd_trace_begin(struct exd_trace *trace, const struct exd_trace_head *head);
void exd_trace_layer(struct exd_trace *trace, uint32_t layer, uint64_t published_ns);
void exd_trace_entry(struct exd_trace *trace, uint32_t layer, uint32_t expert, uint64_t group,
                     uint32_t flags);
void exd_trace_event(struct exd_trace *trace, enum exd_trace_kind kind, uint64_t value);
/* routed: [layers], all zero where a layer was not published. */
void exd_trace_end(struct exd_trace *trace, uint32_t result, const struct shm_mask *routed);

/* Appends the record to a file; failures are logged once. */
void exd_trace_write(struct exd_trace *trace, const char *path);

#endif
