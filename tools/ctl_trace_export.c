/* SPDX-License-Identifier: MIT */
/*
 * Events as Chrome's trace format (JSON), which Perfetto's viewer opens: a
 * process for expertd and each worker, a thread for each ring. Spans are
 * complete events (X), so that a lost end or beginning breaks nothing; the
 * rest are instants.
 */
#include "tools/ctl_trace.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEPTH_MAX 8
#define SLOTS_MAX (1u << 20)

/* What the slots of a session hold: layer and expert + 1 of its last issue; 0: not known. */
struct slots {
    uint32_t source;
    uint64_t session;
    uint32_t *held; /* [n] */
    uint32_t n;
};

/* Spans that have begun on a track. */
struct open_span {
    uint32_t index[DEPTH_MAX];
    uint32_t depth;
};

struct export
{
    FILE *f;
    const struct trace *trace;
    struct slots *slots; /* [trace->tracks], by the first track of the session */
    struct open_span *open;
    uint64_t base_ns;
    bool comma;
};

static void print_us(FILE *f, uint64_t ns)
{
    fprintf(f, "%" PRIu64 ".%03" PRIu64, ns / 1000, ns % 1000);
}

static void begin(struct export *x, const char *phase, uint32_t track, const char *name)
{
    const struct trace_track *k = &x->trace->track[track];
    fprintf(x->f, "%s\n{\"ph\":\"%s\",\"pid\":%u,\"tid\":%u,\"name\":\"%s\"", x->comma ? "," : "", phase,
            x->trace->source[k->source].pid, track + 1, name);
    x->comma = true;
}

/* More pairs of an args object; returns whether one was printed. */
static bool args(struct export *x, const struct trace_source *s, const struct shm_event *e,
                 const struct shm_event_info *info, bool comma)
{
    for (uint32_t i = 0; i < info->fields; i++) {
        const struct shm_event_field *f = &info->field[i];
        uint64_t value = shm_event_field(e, f);
        const char *word = trace_word(s, f, value);
        fprintf(x->f, "%s\"%s\":", comma ? "," : "", f->name);
        if (word)
            fprintf(x->f, "\"%s\"", word);
        else if (value >> 53) /* more than a viewer's numbers hold */
            fprintf(x->f, "\"%" PRIu64 "\"", value);
        else
            fprintf(x->f, "%" PRIu64, value);
        comma = true;
    }
    return comma;
}

static uint64_t relative(const struct export *x, uint64_t at_ns)
{
    return at_ns > x->base_ns ? at_ns - x->base_ns : 0;
}

/* A whole span; from: its begin, to: its end, or NULL where there is none. */
static void span(struct export *x, uint32_t track, const char *name, uint64_t begin_ns, uint64_t end_ns,
                 const struct shm_event *from, const struct shm_event *to)
{
    const struct trace_source *s = &x->trace->source[x->trace->track[track].source];
    const struct shm_event_info *a = from ? trace_info(s, from->kind) : NULL,
                                *b = to ? trace_info(s, to->kind) : NULL;
    begin(x, "X", track, name);
    fputs(",\"cat\":\"expertd\",\"ts\":", x->f);
    print_us(x->f, relative(x, begin_ns));
    fputs(",\"dur\":", x->f);
    print_us(x->f, end_ns > begin_ns ? end_ns - begin_ns : 0);
    fputs(",\"args\":{", x->f);
    bool comma = a ? args(x, s, from, a, false) : false;
    if (b) /* stream, and whatever else both have, is there already */
        for (uint32_t i = 0; i < b->fields; i++) {
            struct shm_event_info one = {.fields = 1, .field = {b->field[i]}};
            bool twice = false;
            for (uint32_t k = 0; a && k < a->fields; k++)
                twice = twice || strcmp(a->field[k].name, b->field[i].name) == 0;
            if (!twice)
                comma = args(x, s, to, &one, comma);
        }
    if (!to)
        fprintf(x->f, "%s\"unfinished\":true", comma ? "," : "");
    fputs("}}", x->f);
}

static const struct shm_event_field *field(const struct shm_event_info *info, const char *name)
{
    for (uint32_t i = 0; i < info->fields; i++)
        if (strcmp(info->field[i].name, name) == 0)
            return &info->field[i];
    return NULL;
}

/* The value of a field, or `none`. */
static uint64_t value_of(const struct shm_event_info *info, const struct shm_event *e, const char *name,
                         uint64_t none)
{
    const struct shm_event_field *f = field(info, name);
    return f ? shm_event_field(e, f) : none;
}

static struct slots *slots_of(struct export *x, const struct trace_track *k)
{
    for (uint32_t i = 0; i < x->trace->tracks; i++) {
        struct slots *s = &x->slots[i];
        if (!s->held && !s->session)
            *s = (struct slots){.source = k->source, .session = k->session};
        if (s->source == k->source && s->session == k->session)
            return s;
    }
    return NULL; /* not reached: there is one for each track */
}

static void note_issue(struct export *x, const struct trace_track *k, const struct shm_event_info *info,
                       const struct shm_event *e)
{
    uint64_t slot = value_of(info, e, "slot", SLOTS_MAX), layer = value_of(info, e, "layer", 0xffff),
             expert = value_of(info, e, "expert", 0xffff);
    struct slots *s = slots_of(x, k);
    if (!s || slot >= SLOTS_MAX || layer >= 0xffff || expert >= 0xffff)
        return;
    if (slot >= s->n) {
        uint32_t n = s->n ? s->n : 64;
        while (n <= slot)
            n *= 2;
        uint32_t *held = reallocarray(s->held, n, sizeof *held);
        if (!held)
            return; /* its copies have no names, then */
        memset(held + s->n, 0, (n - s->n) * sizeof *held);
        s->held = held;
        s->n = n;
    }
    s->held[slot] = (uint32_t)(layer << 16 | expert) + 1;
}

/* A copy is called by what was last issued to its slot. */
static void name_copy(struct export *x, const struct trace_track *k, const struct shm_event_info *info,
                      const struct shm_event *e, char *ret_name, size_t bytes)
{
    uint64_t slot = value_of(info, e, "slot", SLOTS_MAX);
    const struct slots *s = k->session ? slots_of(x, k) : NULL;
    if (s && slot < s->n && s->held[slot]) {
        uint32_t word = s->held[slot] - 1;
        snprintf(ret_name, bytes, "layer %u expert %u", word >> 16, word & 0xffff);
    } else {
        snprintf(ret_name, bytes, "%s", info->span);
    }
}

static void instant(struct export *x, uint32_t track, const struct shm_event *e,
                    const struct shm_event_info *info)
{
    char unknown[16];
    snprintf(unknown, sizeof unknown, "kind %u", e->kind);
    begin(x, "i", track, info ? info->name : unknown);
    fputs(",\"cat\":\"expertd\",\"s\":\"t\",\"ts\":", x->f);
    print_us(x->f, relative(x, e->at_ns));
    fputs(",\"args\":{", x->f);
    if (info)
        args(x, &x->trace->source[x->trace->track[track].source], e, info, false);
    fputs("}}", x->f);
}

/* Ends the innermost open span of that name, and those within it, whose ends were lost. */
static void end_span(struct export *x, uint32_t track, const struct shm_event *e,
                     const struct shm_event_info *info)
{
    const struct trace_track *k = &x->trace->track[track];
    const struct trace_source *s = &x->trace->source[k->source];
    struct open_span *o = &x->open[track];
    uint32_t depth = o->depth;
    while (depth && strcmp(trace_info(s, k->event[o->index[depth - 1]].kind)->span, info->span) != 0)
        depth--;
    if (!depth) { /* its beginning was written over */
        instant(x, track, e, info);
        return;
    }
    for (; o->depth >= depth; o->depth--) {
        const struct shm_event *from = &k->event[o->index[o->depth - 1]];
        span(x, track, trace_info(s, from->kind)->span, from->at_ns, e->at_ns, from,
             o->depth == depth ? e : NULL);
    }
}

static void event(struct export *x, uint32_t track, uint32_t index)
{
    const struct trace_track *k = &x->trace->track[track];
    const struct shm_event *e = &k->event[index];
    const struct shm_event_info *info = trace_info(&x->trace->source[k->source], e->kind);
    struct open_span *o = &x->open[track];
    char name[64];
    if (e->kind == SHM_EVENT_ISSUE && info && k->session)
        note_issue(x, k, info, e);
    switch (info ? info->phase : SHM_EVENT_INSTANT) {
    case SHM_EVENT_BEGIN:
        if (o->depth < DEPTH_MAX)
            o->index[o->depth++] = index;
        else
            instant(x, track, e, info);
        break;
    case SHM_EVENT_END:
        end_span(x, track, e, info);
        break;
    case SHM_EVENT_SPAN: {
        uint64_t took_ns = shm_event_field(e, &info->field[0]);
        name_copy(x, k, info, e, name, sizeof name);
        span(x, track, name, e->at_ns > took_ns ? e->at_ns - took_ns : 0, e->at_ns, e, e);
        break;
    }
    default:
        instant(x, track, e, info);
    }
}

/* Names of processes and threads. */
static void names(struct export *x)
{
    const struct trace *t = x->trace;
    for (uint32_t i = 0; i < t->tracks; i++) {
        const struct trace_track *k = &t->track[i];
        const struct trace_source *s = &t->source[k->source];
        begin(x, "M", i, "process_name");
        fprintf(x->f, ",\"args\":{\"name\":\"%s\"}}", s->program);
        begin(x, "M", i, "thread_name");
        fprintf(x->f, ",\"args\":{\"name\":\"%s", k->thread);
        if (k->name[0])
            fprintf(x->f, " of %s (%u)", k->name, k->pid);
        fputs("\"}}", x->f);
        begin(x, "M", i, "thread_sort_index");
        fprintf(x->f, ",\"args\":{\"sort_index\":%u}}", i + 1);
    }
}

/* The earliest beginning: an event that tells of a span lies at its end. */
static uint64_t earliest(const struct trace *t, const struct trace_place *order, uint64_t n)
{
    uint64_t least = n ? order[0].at_ns : 0;
    for (uint64_t i = 0; i < n; i++) {
        const struct trace_track *k = &t->track[order[i].track];
        const struct shm_event *e = &k->event[order[i].index];
        const struct shm_event_info *info = trace_info(&t->source[k->source], e->kind);
        if (!info || info->phase != SHM_EVENT_SPAN)
            continue;
        uint64_t took_ns = shm_event_field(e, &info->field[0]);
        uint64_t began_ns = e->at_ns > took_ns ? e->at_ns - took_ns : 0;
        least = began_ns < least ? began_ns : least;
    }
    return least;
}

static void write_all(struct export *x, const struct trace_place *order, uint64_t n)
{
    const struct trace *t = x->trace;
    uint64_t lost = 0;
    for (uint32_t i = 0; i < t->tracks; i++)
        lost += t->track[i].lost;
    x->base_ns = earliest(t, order, n);
    fprintf(x->f,
            "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"monotonic_ns\":\"%" PRIu64
            "\",\"realtime_ns\":\"%" PRId64 "\",\"lost\":\"%" PRIu64 "\"},\"traceEvents\":[",
            x->base_ns, t->sources ? (int64_t)((uint64_t)t->source[0].realtime_ns + x->base_ns) : 0, lost);
    names(x);
    for (uint64_t i = 0; i < n; i++)
        event(x, order[i].track, order[i].index);
    for (uint32_t i = 0; i < t->tracks; i++) /* still going on, or never told of again */
        for (struct open_span *o = &x->open[i]; o->depth; o->depth--) {
            const struct trace_track *k = &t->track[i];
            const struct shm_event *from = &k->event[o->index[o->depth - 1]];
            span(x, i, trace_info(&t->source[k->source], from->kind)->span, from->at_ns,
                 k->event[k->n - 1].at_ns, from, NULL);
        }
    fputs("\n]}\n", x->f);
}

/* Events of an expertd, which may be running and would not survive being cut, or a recording. */
static bool holds_events(const char *path)
{
    char magic[6] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    bool found = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
                 pread(fd, magic, sizeof magic, 0) == sizeof magic &&
                 (memcmp(magic, "EXDEVT", 6) == 0 || memcmp(magic, "EXDREC", 6) == 0);
    if (fd >= 0)
        close(fd);
    return found;
}

int trace_export(const struct trace *t, const struct ctl_options *options, struct shm_error *err)
{
    struct trace_place *order = NULL;
    uint64_t n = 0;
    const char *out = options->output;
    struct export x = {.trace = t, .f = stdout};
    x.slots = calloc(t->tracks + 1, sizeof *x.slots);
    x.open = calloc(t->tracks + 1, sizeof *x.open);
    int rc = x.slots && x.open ? trace_order(t, options->worker, &order, &n) : -ENOMEM;
    if (rc)
        shm_error_set(err, rc, "export of %u rings: no memory: free some, or name one worker with --worker",
                      t->tracks);
    if (!rc && out && holds_events(out))
        rc = shm_error_set(err, EEXIST, "%s: holds events itself: name another file with --output", out);
    if (!rc && out && !(x.f = fopen(out, "we")))
        rc = shm_error_set(err, errno, "%s: %s%s: name another file with --output", out, strerror(errno),
                           shm_error_remedy(errno));
    if (!rc)
        write_all(&x, order, n);
    if (!rc && out && (fflush(x.f) || ferror(x.f)))
        rc = shm_error_set(err, errno ? errno : EIO, "%s: %s%s: name another file with --output", out,
                           strerror(errno ? errno : EIO), shm_error_remedy(errno));
    if (x.f && x.f != stdout)
        fclose(x.f);
    for (uint32_t i = 0; x.slots && i < t->tracks; i++)
        free(x.slots[i].held);
    free(x.slots);
    free(x.open);
    free(order);
    return rc;
}
