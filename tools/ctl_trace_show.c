/* SPDX-License-Identifier: MIT */
#include "tools/ctl_trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NS_PER_S INT64_C(1000000000)

static int by_time(const void *a, const void *b)
{
    const struct trace_place *x = a, *y = b;
    if (x->at_ns != y->at_ns)
        return x->at_ns < y->at_ns ? -1 : 1;
    if (x->track != y->track)
        return x->track < y->track ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

int trace_order(const struct trace *t, uint32_t pid, struct trace_place **ret_order, uint64_t *ret_n)
{
    uint64_t n = 0, at = 0;
    for (uint32_t i = 0; i < t->tracks; i++)
        n += !pid || t->track[i].pid == pid ? t->track[i].n : 0;
    struct trace_place *order = calloc(n ? n : 1, sizeof *order);
    if (!order)
        return -ENOMEM;
    for (uint32_t i = 0; i < t->tracks; i++)
        for (uint32_t k = 0; (!pid || t->track[i].pid == pid) && k < t->track[i].n; k++)
            order[at++] = (struct trace_place){t->track[i].event[k].at_ns, i, k};
    qsort(order, n, sizeof *order, by_time);
    *ret_order = order;
    *ret_n = n;
    return 0;
}

static const char *name_of(const struct trace *t, const struct trace_track *k)
{
    return k->name[0] ? k->name : t->source[k->source].program;
}

static void print_clock(int64_t real_ns)
{
    time_t s = (time_t)(real_ns / NS_PER_S);
    struct tm tm;
    if (real_ns < 0 || !localtime_r(&s, &tm))
        printf("%18" PRId64, real_ns);
    else
        printf("%02d:%02d:%02d.%09" PRId64, tm.tm_hour, tm.tm_min, tm.tm_sec, real_ns % NS_PER_S);
}

static void print_field(const struct trace_source *s, const struct shm_event *e,
                        const struct shm_event_field *f)
{
    uint64_t value = shm_event_field(e, f);
    const char *word = trace_word(s, f, value);
    if (word)
        printf("  %s %s", f->name, word);
    else if (f->format == SHM_EVENT_NS)
        printf("  %s %.3f us", f->name, (double)value / 1e3);
    else
        printf("  %s %" PRIu64, f->name, value);
}

static void print_event(const struct trace *t, const struct trace_place *p, uint64_t before_ns)
{
    const struct trace_track *k = &t->track[p->track];
    const struct trace_source *s = &t->source[k->source];
    const struct shm_event *e = &k->event[p->index];
    const struct shm_event_info *info = trace_info(s, e->kind);
    print_clock((int64_t)((uint64_t)s->realtime_ns + e->at_ns)); /* wraps, should it be nonsense */
    printf(" %+12.3f  %7u %s/%-7s %-12s", (double)(int64_t)(e->at_ns - before_ns) / 1e3, k->pid,
           name_of(t, k), k->thread, info ? info->name : "?");
    if (!info)
        printf("  kind %u", e->kind);
    for (uint32_t i = 0; info && i < info->fields; i++)
        print_field(s, e, &info->field[i]);
    putchar('\n');
}

static void print_losses(const struct trace *t, uint32_t pid)
{
    for (uint32_t i = 0; i < t->tracks; i++) {
        const struct trace_track *k = &t->track[i];
        if ((pid && k->pid != pid) || (!k->older && !k->lost))
            continue;
        printf("overrun: %u %s/%s:", k->pid, name_of(t, k), k->thread);
        if (k->older)
            printf(" %" PRIu64 " older ones were written over before they were looked at%s", k->older,
                   k->lost ? "," : "");
        if (k->lost)
            printf(" %" PRIu64 " were lost in between", k->lost);
        putchar('\n');
    }
}

static json_t *json_track(const struct trace *t, const struct trace_track *k)
{
    json_t *o = json_object();
    json_object_set_new(o, "pid", json_integer(k->pid));
    json_object_set_new(o, "program", json_string(t->source[k->source].program));
    json_object_set_new(o, "name", json_string(name_of(t, k)));
    json_object_set_new(o, "thread", json_string(k->thread));
    json_object_set_new(o, "session", json_integer((json_int_t)k->session));
    json_object_set_new(o, "events", json_integer(k->n));
    json_object_set_new(o, "older", json_integer((json_int_t)k->older));
    json_object_set_new(o, "lost", json_integer((json_int_t)k->lost));
    return o;
}

static json_t *json_event(const struct trace *t, const struct trace_place *p)
{
    const struct trace_track *k = &t->track[p->track];
    const struct trace_source *s = &t->source[k->source];
    const struct shm_event *e = &k->event[p->index];
    const struct shm_event_info *info = trace_info(s, e->kind);
    json_t *o = json_object(), *fields = json_object();
    json_object_set_new(o, "at_ns", json_integer((json_int_t)e->at_ns));
    json_object_set_new(o, "track", json_integer(p->track));
    json_object_set_new(o, "event", info ? json_string(info->name) : json_integer(e->kind));
    for (uint32_t i = 0; info && i < info->fields; i++) {
        uint64_t value = shm_event_field(e, &info->field[i]);
        const char *word = trace_word(s, &info->field[i], value);
        json_object_set_new(fields, info->field[i].name,
                            word ? json_string(word) : json_integer((json_int_t)value));
    }
    json_object_set_new(o, "fields", fields);
    return o;
}

int trace_show(const struct trace *t, const struct ctl_options *options)
{
    struct trace_place *order;
    uint64_t n;
    if (trace_order(t, options->worker, &order, &n)) {
        fputs("expertctl: no memory; free some\n", stderr);
        return CTL_EXIT_PROBLEM;
    }
    uint32_t count = options->count ? options->count : TRACE_SHOW_DEFAULT;
    uint64_t first = n > count ? n - count : 0;
    if (options->json) {
        json_t *o = json_object(), *tracks = json_array(), *events = json_array();
        for (uint32_t i = 0; i < t->tracks; i++)
            json_array_append_new(tracks, json_track(t, &t->track[i]));
        for (uint64_t i = first; i < n; i++)
            json_array_append_new(events, json_event(t, &order[i]));
        json_object_set_new(o, "tracks", tracks);
        json_object_set_new(o, "events", events);
        if (t->note[0])
            json_object_set_new(o, "note", ctl_json_text(t->note, sizeof t->note));
        ctl_json_print(o);
    } else {
        if (n)
            printf("%-18s %12s  %7s %s\n", "TIME", "AFTER us", "PID", "WHO EVENT");
        for (uint64_t i = first; i < n; i++)
            print_event(t, &order[i], i > first ? order[i - 1].at_ns : order[i].at_ns);
        if (!n)
            puts("no events");
        print_losses(t, options->worker);
        if (t->note[0])
            printf("not looked at: %s\n", t->note);
    }
    free(order);
    return CTL_EXIT_OK;
}
