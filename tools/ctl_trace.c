/* SPDX-License-Identifier: MIT */
#include "tools/ctl_trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SOURCES_MAX 4096u
#define TRACKS_MAX  16384u
#define EVENTS_MAX  (1u << 27) /* of a track */

void trace_free(struct trace *t)
{
    for (uint32_t i = 0; i < t->sources; i++)
        free(t->source[i].value);
    for (uint32_t i = 0; i < t->tracks; i++)
        free(t->track[i].event);
    free(t->source);
    free(t->track);
    memset(t, 0, sizeof *t);
}

int trace_full(int rc, const char *name, struct shm_error *err)
{
    if (rc == -E2BIG)
        return shm_error_set(err, E2BIG,
                             "%.300s: more than %u processes, %u rings or %u events of one: record for a "
                             "shorter time",
                             name, SOURCES_MAX, TRACKS_MAX, EVENTS_MAX);
    return shm_error_set(err, rc, "%.300s: no memory for its events: free some, or record for a shorter time",
                         name);
}

/* Room for one more of `size` bytes in an array that grows by doubling. */
static int grow(void **array, uint32_t n, size_t size)
{
    if (n & (n - 1))
        return 0;
    void *larger = reallocarray(*array, n ? 2 * (size_t)n : 1, size);
    if (!larger)
        return -ENOMEM;
    *array = larger;
    return 0;
}

int trace_add_source(struct trace *t, uint32_t *ret_source)
{
    void *array = t->source;
    int rc = t->sources == SOURCES_MAX ? -E2BIG : grow(&array, t->sources, sizeof *t->source);
    if (rc)
        return rc;
    t->source = array;
    memset(&t->source[t->sources], 0, sizeof *t->source);
    *ret_source = t->sources++;
    return 0;
}

int trace_add_track(struct trace *t, uint32_t *ret_track)
{
    void *array = t->track;
    int rc = t->tracks == TRACKS_MAX ? -E2BIG : grow(&array, t->tracks, sizeof *t->track);
    if (rc)
        return rc;
    t->track = array;
    memset(&t->track[t->tracks], 0, sizeof *t->track);
    *ret_track = t->tracks++;
    return 0;
}

int trace_add_event(struct trace_track *track, const struct shm_event *event)
{
    if (track->n == track->room) {
        uint32_t room = track->room ? 2 * track->room : 1024;
        if (room > EVENTS_MAX)
            return -E2BIG;
        struct shm_event *larger = reallocarray(track->event, room, sizeof *larger);
        if (!larger)
            return -ENOMEM;
        track->event = larger;
        track->room = room;
    }
    track->event[track->n++] = *event;
    return 0;
}

int trace_add_info(struct trace_source *source, const struct shm_event_info *info)
{
    source->info[info->kind] = *info;
    return 0;
}

int trace_add_value(struct trace_source *source, const struct shm_event_value *value)
{
    if (source->values == SHM_EVENT_VALUES_MAX)
        return -E2BIG;
    void *array = source->value;
    int rc = grow(&array, source->values, sizeof *source->value);
    if (rc)
        return rc;
    source->value = array;
    source->value[source->values++] = *value;
    return 0;
}

const char *trace_word(const struct trace_source *source, const struct shm_event_field *field, uint64_t value)
{
    if (field->format != SHM_EVENT_VALUE)
        return NULL;
    for (uint32_t i = 0; i < source->values; i++)
        if (source->value[i].set == field->set && source->value[i].value == value)
            return source->value[i].name;
    return NULL;
}

const struct shm_event_info *trace_info(const struct trace_source *source, uint32_t kind)
{
    const struct shm_event_info *info = kind <= SHM_EVENT_KINDS_MAX ? &source->info[kind] : NULL;
    return info && info->name[0] ? info : NULL;
}

int ctl_trace(const struct ctl_options *o, const volatile sig_atomic_t *stop, struct shm_error *err)
{
    struct trace t = {0};
    struct trace_live *live = NULL;
    int rc, status = CTL_EXIT_OK;
    if (strcmp(o->trace_action, "record") == 0) {
        rc = trace_record(o, stop, err);
    } else {
        rc = o->trace_file ? trace_load(o->trace_file, &t, err)
                           : trace_live_open(o->runtime_dir, o->instance, &t, &live, err);
        trace_live_close(&live);
        if (!rc && strcmp(o->trace_action, "export") == 0)
            rc = trace_export(&t, o, err);
        else if (!rc)
            status = trace_show(&t, o);
    }
    trace_free(&t);
    return rc == -EPROTO ? CTL_EXIT_VERSION : rc ? CTL_EXIT_ATTACH : status;
}
