/* SPDX-License-Identifier: MIT */
/*
 * Files of events. `record` appends to one as events come:
 *
 *   struct file_head, then chunks: struct chunk and its payload
 *     CHUNK_SOURCE  struct file_source, infos, values (as in the segment)
 *     CHUNK_TRACK   struct file_track
 *     CHUNK_EVENTS  struct file_events, n times four words as in the ring
 *
 * in the host's byte order. Sources and tracks are numbered from 0 in the order
 * in which they stand there. A file that ends inside a chunk (its recorder was
 * killed) is read up to there.
 */
#include "tools/ctl_trace.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC       "EXDREC01"
#define BYTE_ORDER_ 0x01020304u
#define PAYLOAD_MAX (UINT32_C(1) << 22)
#define EVENTS_EACH 16384u
#define POLL_NS     20000000
#define LOOK_EACH   10u /* polls */

enum { CHUNK_SOURCE = 1, CHUNK_TRACK, CHUNK_EVENTS };

struct file_head {
    char magic[8];
    uint32_t byte_order, reserved;
    uint64_t reserved2[2];
};
struct chunk {
    uint32_t type, bytes; /* of the payload */
};
struct file_source {
    uint32_t pid, infos, values, reserved;
    uint64_t start;
    int64_t realtime_ns;
    char program[16];
};
struct file_track {
    uint32_t source, pid;
    uint64_t session;
    char thread[16], name[64];
};
struct file_events {
    uint32_t track, n;
    uint64_t older, lost; /* of the track, so far */
};
struct file_event {
    uint64_t word, at_ns, field[2]; /* word: number << 8 | kind */
};
_Static_assert(sizeof(struct file_head) == 32 && sizeof(struct file_source) == 48 &&
                   sizeof(struct file_track) == 96 && sizeof(struct file_events) == 24 &&
                   sizeof(struct file_event) == 32,
               "file format");

/* ---- reading ---- */

#define NAME_ONE "name a file that 'expertctl trace record' wrote, or none for what runs"

static int damaged(struct shm_error *err, const char *path, const char *what)
{
    return shm_error_set(err, EBADMSG, "%.300s: damaged: %s: " NAME_ONE, path, what);
}

static int load_source(struct trace *t, const uint8_t *p, uint32_t bytes, const char **ret_bad)
{
    struct file_source f;
    if (bytes < sizeof f)
        return *ret_bad = "a source that is too short", -EBADMSG;
    memcpy(&f, p, sizeof f);
    if (f.infos > SHM_EVENT_KINDS_MAX || f.values > SHM_EVENT_VALUES_MAX ||
        bytes !=
            sizeof f + f.infos * sizeof(struct shm_event_info) + f.values * sizeof(struct shm_event_value))
        return *ret_bad = "a source whose tables have another size", -EBADMSG;
    uint32_t id;
    int rc = trace_add_source(t, &id);
    if (rc)
        return rc;
    struct trace_source *s = &t->source[id];
    memcpy(s->program, f.program, sizeof s->program);
    shm_event_text_check(s->program, sizeof s->program);
    s->pid = f.pid;
    s->start = f.start;
    s->realtime_ns = f.realtime_ns;
    p += sizeof f;
    for (uint32_t i = 0; !rc && i < f.infos; i++, p += sizeof(struct shm_event_info)) {
        struct shm_event_info info;
        memcpy(&info, p, sizeof info);
        shm_event_info_check(&info);
        rc = trace_add_info(s, &info);
    }
    for (uint32_t i = 0; !rc && i < f.values; i++, p += sizeof(struct shm_event_value)) {
        struct shm_event_value value;
        memcpy(&value, p, sizeof value);
        shm_event_text_check(value.name, sizeof value.name);
        rc = trace_add_value(s, &value);
    }
    return rc;
}

static int load_track(struct trace *t, const uint8_t *p, uint32_t bytes, const char **ret_bad)
{
    struct file_track f;
    if (bytes != sizeof f)
        return *ret_bad = "a track of another size", -EBADMSG;
    memcpy(&f, p, sizeof f);
    if (f.source >= t->sources)
        return *ret_bad = "a track of a source that is not there", -EBADMSG;
    uint32_t id;
    int rc = trace_add_track(t, &id);
    if (rc)
        return rc;
    struct trace_track *k = &t->track[id];
    k->source = f.source;
    k->pid = f.pid;
    k->session = f.session;
    memcpy(k->thread, f.thread, sizeof k->thread);
    memcpy(k->name, f.name, sizeof k->name);
    shm_event_text_check(k->thread, sizeof k->thread);
    shm_event_text_check(k->name, sizeof k->name);
    return 0;
}

static int load_events(struct trace *t, const uint8_t *p, uint32_t bytes, const char **ret_bad)
{
    struct file_events f;
    if (bytes < sizeof f)
        return *ret_bad = "events that are too short", -EBADMSG;
    memcpy(&f, p, sizeof f);
    if (f.track >= t->tracks || f.n > EVENTS_EACH || bytes != sizeof f + f.n * sizeof(struct file_event))
        return *ret_bad = "events of another size, or of a track that is not there", -EBADMSG;
    struct trace_track *k = &t->track[f.track];
    k->older = f.older;
    k->lost = f.lost;
    p += sizeof f;
    for (uint32_t i = 0; i < f.n; i++, p += sizeof(struct file_event)) {
        struct file_event e;
        memcpy(&e, p, sizeof e);
        int rc = trace_add_event(k, &(struct shm_event){.number = e.word >> 8,
                                                        .kind = e.word & 0xff,
                                                        .at_ns = e.at_ns,
                                                        .field = {e.field[0], e.field[1]}});
        if (rc)
            return rc;
    }
    return 0;
}

static int load_chunks(FILE *f, const char *path, struct trace *t, struct shm_error *err)
{
    uint8_t *payload = malloc(PAYLOAD_MAX);
    int rc = payload ? 0 : -ENOMEM;
    const char *bad = NULL;
    bool cut = false;
    while (!rc && !cut) {
        struct chunk c;
        size_t n = fread(&c, 1, sizeof c, f);
        if (n == 0)
            break;
        cut = n < sizeof c;
        if (!cut && c.bytes > PAYLOAD_MAX)
            rc = (bad = "a chunk that is too large", -EBADMSG);
        if (!rc && !cut)
            cut = fread(payload, 1, c.bytes, f) < c.bytes;
        if (rc || cut)
            break;
        if (c.type == CHUNK_SOURCE)
            rc = load_source(t, payload, c.bytes, &bad);
        else if (c.type == CHUNK_TRACK)
            rc = load_track(t, payload, c.bytes, &bad);
        else if (c.type == CHUNK_EVENTS)
            rc = load_events(t, payload, c.bytes, &bad);
        /* others are of a later version: what they say can be done without */
    }
    free(payload);
    if (rc)
        return bad ? damaged(err, path, bad) : trace_full(rc, path, err);
    if (ferror(f))
        return shm_error_set(err, EIO, "%.300s: cannot be read to its end: " NAME_ONE, path);
    if (cut)
        snprintf(t->note, sizeof t->note, "%.400s ends inside of a chunk: its recorder was killed", path);
    return 0;
}

/* A segment as a dead expertd left it. */
static int load_segment(FILE *f, const char *path, struct trace *t, struct shm_error *err)
{
    struct stat st;
    if (fstat(fileno(f), &st) < 0 || st.st_size <= 0 || (uint64_t)st.st_size > SHM_EVENT_SEGMENT_MAX)
        return damaged(err, path, "its length cannot be that of a segment of events");
    size_t bytes = (size_t)st.st_size;
    void *base = malloc(bytes); /* a copy: nobody shortens it under us */
    if (!base)
        return shm_error_set(err, ENOMEM, "%s: no memory for %zu bytes; free some", path, bytes);
    struct shm_event_view view;
    int rc = fread(base, 1, bytes, f) == bytes ? 0 : damaged(err, path, "it cannot be read whole");
    if (!rc)
        rc = shm_event_open(base, bytes, path, &view, err);
    if (!rc && (rc = trace_take_segment(t, &view)))
        trace_full(rc, path, err);
    free(base);
    return rc;
}

int trace_load(const char *path, struct trace *t, struct shm_error *err)
{
    struct file_head head = {0};
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    if (!f) {
        int rc = shm_error_set(err, errno, "%.300s: %s: " NAME_ONE, path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    int rc = 0;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        rc = shm_error_set(err, EBADMSG, "%.300s: is not a regular file: " NAME_ONE, path);
    else if (fread(&head, 1, sizeof head, f) != sizeof head)
        rc = damaged(err, path, "it is too short");
    else if (memcmp(head.magic, MAGIC, sizeof head.magic) == 0)
        rc = head.byte_order == BYTE_ORDER_ ? load_chunks(f, path, t, err)
                                            : damaged(err, path, "another byte order");
    else if (memcmp(head.magic, "EXDEVT", 6) == 0)
        rc = fseek(f, 0, SEEK_SET) ? damaged(err, path, "it cannot be read again")
                                   : load_segment(f, path, t, err);
    else
        rc = shm_error_set(err, EPROTO, "%.300s: neither a recording nor the events of an expertd: " NAME_ONE,
                           path);
    fclose(f);
    return rc;
}

/* ---- recording ---- */

static void write_chunk(FILE *f, uint32_t type, const void *head, size_t head_bytes, const void *rest,
                        size_t rest_bytes)
{
    struct chunk c = {.type = type, .bytes = (uint32_t)(head_bytes + rest_bytes)};
    fwrite(&c, sizeof c, 1, f);
    fwrite(head, head_bytes, 1, f);
    if (rest_bytes)
        fwrite(rest, rest_bytes, 1, f);
}

static void write_source(FILE *f, const struct trace_source *s)
{
    struct file_source head = {.pid = s->pid, .start = s->start, .realtime_ns = s->realtime_ns};
    memcpy(head.program, s->program, sizeof head.program);
    static uint8_t rest[(SHM_EVENT_KINDS_MAX + 1) * sizeof(struct shm_event_info) +
                        SHM_EVENT_VALUES_MAX * sizeof(struct shm_event_value)];
    size_t at = 0;
    for (uint32_t kind = 0; kind <= SHM_EVENT_KINDS_MAX; kind++)
        if (s->info[kind].name[0] && head.infos < SHM_EVENT_KINDS_MAX) {
            memcpy(rest + at, &s->info[kind], sizeof s->info[kind]);
            at += sizeof s->info[kind];
            head.infos++;
        }
    head.values = s->values;
    if (s->values)
        memcpy(rest + at, s->value, s->values * sizeof *s->value);
    write_chunk(f, CHUNK_SOURCE, &head, sizeof head, rest, at + s->values * sizeof *s->value);
}

static void write_track(FILE *f, const struct trace_track *k)
{
    struct file_track head = {.source = k->source, .pid = k->pid, .session = k->session};
    memcpy(head.thread, k->thread, sizeof head.thread);
    memcpy(head.name, k->name, sizeof head.name);
    write_chunk(f, CHUNK_TRACK, &head, sizeof head, NULL, 0);
}

/* Writes what the track holds and empties it. */
static void write_events(FILE *f, uint32_t track, struct trace_track *k)
{
    static struct file_event rest[EVENTS_EACH];
    for (uint32_t at = 0; at < k->n;) {
        struct file_events head = {.track = track, .older = k->older, .lost = k->lost};
        for (; head.n < EVENTS_EACH && at < k->n; at++) {
            const struct shm_event *e = &k->event[at];
            rest[head.n++] =
                (struct file_event){e->number << 8 | e->kind, e->at_ns, {e->field[0], e->field[1]}};
        }
        write_chunk(f, CHUNK_EVENTS, &head, sizeof head, rest, head.n * sizeof *rest);
    }
    k->written += k->n;
    k->n = k->room = 0;
    free(k->event); /* most tracks are of who is gone, in a long recording */
    k->event = NULL;
}

static int write_new(FILE *f, struct trace *t, uint32_t *sources, uint32_t *tracks)
{
    for (; *sources < t->sources; ++*sources)
        write_source(f, &t->source[*sources]);
    for (; *tracks < t->tracks; ++*tracks)
        write_track(f, &t->track[*tracks]);
    for (uint32_t i = 0; i < t->tracks; i++)
        write_events(f, i, &t->track[i]);
    return fflush(f) || ferror(f) ? -(errno ? errno : EIO) : 0;
}

static void print_summary(const struct trace *t, const struct ctl_options *o)
{
    uint64_t events = 0, older = 0, lost = 0;
    for (uint32_t i = 0; i < t->tracks; i++) {
        events += t->track[i].written;
        older += t->track[i].older;
        lost += t->track[i].lost;
    }
    if (o->json) {
        json_t *summary = json_object();
        json_object_set_new(summary, "file", ctl_json_text(o->trace_file, strlen(o->trace_file)));
        json_object_set_new(summary, "events", json_integer((json_int_t)events));
        json_object_set_new(summary, "rings", json_integer(t->tracks));
        json_object_set_new(summary, "older", json_integer((json_int_t)older));
        json_object_set_new(summary, "lost", json_integer((json_int_t)lost));
        ctl_json_print(summary);
    } else
        printf("recorded %" PRIu64 " events of %u rings, lost %" PRIu64 "; %" PRIu64
               " older ones were written over before\n",
               events, t->tracks, lost, older);
    if (t->note[0])
        fprintf(stderr, "expertctl: not looked at: %s\n", t->note);
}

/* For writing. A file that is neither empty nor a recording stays as it is: it may be the events of a running
 * expertd, which would not survive that. */
static int open_output(const char *path, struct shm_error *err)
{
    char magic[sizeof MAGIC - 1];
    struct stat st;
    bool special = stat(path, &st) == 0 && !S_ISREG(st.st_mode);
    int fd = special ? open(path, O_WRONLY | O_CLOEXEC | O_NOCTTY)
                     : open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY, 0600);
    if (fd < 0)
        return shm_error_set(err, errno, "%s: %s%s: name another file", path, strerror(errno),
                             shm_error_remedy(errno));
    int rc = 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        if (st.st_size &&
            (pread(fd, magic, sizeof magic, 0) != sizeof magic || memcmp(magic, MAGIC, sizeof magic) != 0))
            rc = shm_error_set(err, EEXIST, "%s: is there and no recording: name another file, or remove it",
                               path);
        else if (ftruncate(fd, 0) < 0)
            rc = shm_error_set(err, errno, "%s: cannot be emptied: %s: name another file", path,
                               strerror(errno));
    }
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

int trace_record(const struct ctl_options *o, const volatile sig_atomic_t *stop, struct shm_error *err)
{
    struct trace t = {0};
    struct trace_live *live;
    int rc = trace_live_open(o->runtime_dir, o->instance, &t, &live, err);
    if (rc) {
        trace_free(&t);
        return rc;
    }
    int fd = open_output(o->trace_file, err);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f)
        rc = fd < 0 ? fd
                    : shm_error_set(err, errno, "%s: %s%s", o->trace_file, strerror(errno),
                                    shm_error_remedy(errno));
    uint32_t sources = 0, tracks = 0;
    if (!rc) {
        struct file_head head = {.magic = MAGIC, .byte_order = BYTE_ORDER_};
        fwrite(&head, sizeof head, 1, f);
        rc = write_new(f, &t, &sources, &tracks);
    }
    uint64_t end_ns = o->seconds < 0 ? UINT64_MAX : shm_now_ns() + (uint64_t)(o->seconds * 1e9);
    for (uint32_t i = 1; !rc && !*stop && shm_now_ns() < end_ns; i++) {
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        if ((rc = trace_live_poll(live, i % LOOK_EACH == 0, err)))
            break;
        rc = write_new(f, &t, &sources, &tracks);
    }
    if (f && fclose(f) && !rc)
        rc = -errno;
    else if (!f && fd >= 0)
        close(fd);
    if (rc && !err->code)
        shm_error_set(err, rc, "%s: %s%s: name another file", o->trace_file, strerror(-rc),
                      shm_error_remedy(rc));
    if (!rc)
        print_summary(&t, o);
    trace_live_close(&live);
    trace_free(&t);
    return rc;
}
