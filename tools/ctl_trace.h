/* SPDX-License-Identifier: MIT */
/*
 * expertctl trace: events of expertd and its workers (shm/shm_event.h), read
 * from the rings of a running instance, from what a dead expertd left, or from
 * a file that `record` wrote, into one form that `show` and `export` print.
 *
 * What events are called and made of comes from the segment or file alone.
 * Nothing in either is trusted.
 */
#ifndef CTL_TRACE_H
#define CTL_TRACE_H

#include "shm/shm_event.h"
#include "tools/ctl.h"

/* One segment's writer: a process. */
struct trace_source {
    char program[16];
    uint32_t pid;
    uint64_t start;
    int64_t realtime_ns;
    struct shm_event_info
        info[SHM_EVENT_KINDS_MAX + 1]; /* by kind; fields 0 and name "" where there is none */
    struct shm_event_value *value;     /* owned */
    uint32_t values;
};

/* One thread's events while it had one owner, oldest first. */
struct trace_track {
    uint32_t source, pid;
    uint64_t session;
    char thread[16], name[64];
    uint64_t older, lost; /* written over: before the first look; since then */
    struct shm_event *event;
    uint32_t n, room;
    uint64_t written; /* recording: events that went to the file */
};

struct trace {
    struct trace_source *source;
    struct trace_track *track;
    uint32_t sources, tracks;
    char note[SHM_ERROR_TEXT_BYTES]; /* what could not be looked at; empty: nothing */
};

void trace_free(struct trace *trace);
/* New ones, zeroed. 0 or -ENOMEM, -E2BIG: the line for these is trace_full's; name: of the file or instance.
 */
int trace_full(int rc, const char *name, struct shm_error *err);
int trace_add_source(struct trace *trace, uint32_t *ret_source);
int trace_add_track(struct trace *trace, uint32_t *ret_track);
int trace_add_event(struct trace_track *track, const struct shm_event *event);
int trace_add_info(struct trace_source *source, const struct shm_event_info *info);
int trace_add_value(struct trace_source *source, const struct shm_event_value *value);

/* The word of a field's value, or NULL. */
const char *trace_word(const struct trace_source *source, const struct shm_event_field *field,
                       uint64_t value);
/* Of a kind that nobody described: NULL. */
const struct shm_event_info *trace_info(const struct trace_source *source, uint32_t kind);

/* ---- ctl_trace_live.c: the rings themselves ---- */

struct trace_live;
/* runtime_dir, instance as in prt_paths_make; borrowed. -ENOENT: nothing there. */
int trace_live_open(const char *runtime_dir, const char *instance, struct trace *trace,
                    struct trace_live **ret_live, struct shm_error *err);
/* Adds what came since; `look`: for new workers and a new expertd, too. 0, -ENOMEM, -E2BIG. */
int trace_live_poll(struct trace_live *live, bool look, struct shm_error *err);
void trace_live_close(struct trace_live **live);

/* ---- ctl_trace_file.c: files ---- */

/* A file of `record`, or a segment as it lay there. -EBADMSG: neither, or damaged. */
int trace_load(const char *path, struct trace *trace, struct shm_error *err);
/* Records until `seconds` are over (negative: until *stop). */
int trace_record(const struct ctl_options *options, const volatile sig_atomic_t *stop, struct shm_error *err);
/* Takes a loaded segment in: all that its rings hold. 0, -ENOMEM, -E2BIG. */
int trace_take_segment(struct trace *trace, const struct shm_event_view *view);

/* ---- ctl_trace_show.c ---- */

/* By time over all tracks. order: [n] of (track, index); freed by the caller. */
struct trace_place {
    uint64_t at_ns;
    uint32_t track, index;
};
int trace_order(const struct trace *trace, uint32_t pid, struct trace_place **ret_order, uint64_t *ret_n);

#define TRACE_SHOW_DEFAULT 50u /* events */
int trace_show(const struct trace *trace, const struct ctl_options *options);
int trace_export(const struct trace *trace, const struct ctl_options *options, struct shm_error *err);

#endif
