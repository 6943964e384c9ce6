/* SPDX-License-Identifier: MIT */
#include "tools/ctl_trace.h"

#include "proto/prt_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEGMENTS_MAX 512u
#define BATCH        1024u
#define NO_TRACK     UINT32_MAX

struct ring {
    struct shm_event_owner owner;
    uint64_t next;
    uint32_t track;
};

struct segment {
    void *base;
    uint64_t bytes;
    struct shm_event_view view;
    uint32_t source;
    struct ring *ring; /* [view.head.rings] */
    /* Which one it is: expertd's by its file, a worker's by process and descriptor. */
    ino_t inode;
    uint32_t pid, fd;
    uint64_t start;
    bool gone; /* its process is */
};

struct trace_live {
    const char *runtime_dir, *instance;
    struct prt_paths paths;
    struct trace *trace;
    struct segment segment[SEGMENTS_MAX];
    uint32_t segments;
    struct shm_event batch[BATCH];
};

static int add_source(struct trace *t, const struct shm_event_view *v, uint32_t *ret_source)
{
    int rc = trace_add_source(t, ret_source);
    if (rc)
        return rc;
    struct trace_source *s = &t->source[*ret_source];
    memcpy(s->program, v->head.program, sizeof s->program);
    s->pid = v->head.header.writer_pid;
    s->start = v->head.header.writer_start;
    s->realtime_ns = v->head.realtime_ns;
    for (uint32_t i = 0; !rc && i < v->head.infos; i++) {
        struct shm_event_info info;
        shm_event_info_at(v, i, &info);
        rc = trace_add_info(s, &info);
    }
    for (uint32_t i = 0; !rc && i < v->head.values; i++) {
        struct shm_event_value value;
        shm_event_value_at(v, i, &value);
        rc = trace_add_value(s, &value);
    }
    return rc;
}

static int add_track(struct trace *t, uint32_t source, const struct shm_event_owner *o, uint32_t *ret_track)
{
    int rc = trace_add_track(t, ret_track);
    if (rc)
        return rc;
    struct trace_track *k = &t->track[*ret_track];
    k->source = source;
    k->pid = o->pid;
    k->session = o->session;
    memcpy(k->thread, o->thread, sizeof k->thread);
    memcpy(k->name, o->name, sizeof k->name);
    return 0;
}

/* Reads on in a ring, up to event `end`. */
static int read_ring(struct trace *t, const struct shm_event_view *v, uint32_t index, struct ring *r,
                     uint64_t end, struct shm_event batch[BATCH])
{
    struct trace_track *k = &t->track[r->track];
    bool first = r->next == 0;
    /* At most once around: a writer that is faster than we are does not keep us. */
    for (uint64_t read = 0; read <= r->owner.capacity;) {
        uint64_t lost = 0, from = r->next;
        uint32_t n = shm_event_read(v, index, &r->owner, &r->next, batch, BATCH, &lost);
        *(first ? &k->older : &k->lost) += lost;
        first = false;
        for (uint32_t i = 0; i < n && batch[i].number < end; i++) {
            int rc = trace_add_event(k, &batch[i]);
            if (rc)
                return rc;
        }
        if (r->next == from || n < BATCH)
            break;
        read += n;
    }
    return 0;
}

static int poll_ring(struct trace *t, const struct shm_event_view *v, uint32_t source, uint32_t index,
                     struct ring *r, struct shm_event batch[BATCH])
{
    struct shm_event_owner owner;
    if (shm_event_owner_at(v, index, &owner))
        return 0; /* nobody's, or about to be somebody's, or nonsense */
    int rc;
    if (r->track == NO_TRACK || r->owner.owned != owner.owned) {
        if (r->track != NO_TRACK && (rc = read_ring(t, v, index, r, owner.first, batch)))
            return rc;
        if ((rc = add_track(t, source, &owner, &r->track)))
            return rc;
        r->next = 0;
    }
    r->owner = owner;
    return read_ring(t, v, index, r, UINT64_MAX, batch);
}

int trace_take_segment(struct trace *t, const struct shm_event_view *v)
{
    uint32_t source;
    struct shm_event *batch = calloc(BATCH, sizeof *batch);
    int rc = batch ? add_source(t, v, &source) : -ENOMEM;
    for (uint32_t i = 0; !rc && i < v->head.rings; i++) {
        struct ring r = {.track = NO_TRACK};
        rc = poll_ring(t, v, source, i, &r, batch);
    }
    free(batch);
    return rc;
}

/* Takes the mapping over. */
static int add_segment(struct trace_live *l, const struct segment *from, const char *name,
                       struct shm_error *err)
{
    struct segment s = *from;
    int rc = l->segments == SEGMENTS_MAX
                 ? shm_error_set(err, E2BIG, "%.300s: more than %u processes at once: record while fewer run",
                                 name, SEGMENTS_MAX)
                 : shm_event_open(s.base, s.bytes, name, &s.view, err);
    if (!rc) {
        s.ring = calloc(s.view.head.rings ? s.view.head.rings : 1, sizeof *s.ring);
        rc = s.ring ? add_source(l->trace, &s.view, &s.source) : -ENOMEM;
        if (rc)
            trace_full(rc, name, err);
    }
    if (rc) {
        free(s.ring);
        munmap(s.base, s.bytes);
        return rc;
    }
    for (uint32_t i = 0; i < s.view.head.rings; i++)
        s.ring[i].track = NO_TRACK;
    l->segment[l->segments++] = s;
    return 0;
}

static void drop_segment(struct trace_live *l, uint32_t index)
{
    free(l->segment[index].ring);
    munmap(l->segment[index].base, l->segment[index].bytes);
    l->segment[index] = l->segment[--l->segments];
}

/* Of workers that are gone, once all that they wrote was read: memory is not kept for who comes and goes. */
static void drop_the_dead(struct trace_live *l)
{
    for (uint32_t i = l->segments; i-- > 0;)
        if (l->segment[i].gone)
            drop_segment(l, i);
        else if (l->segment[i].pid && !prt_process_alive((pid_t)l->segment[i].pid, l->segment[i].start))
            l->segment[i].gone = true; /* and read once more */
}

static int look_for_expertd(struct trace_live *l, struct shm_error *err)
{
    struct stat st;
    if (stat(l->paths.events, &st) < 0)
        return shm_error_set(
            err, errno,
            "%s: %s: no expertd runs here, or one without events: start one without EXPERTD_EVENTS=0",
            l->paths.events, strerror(errno));
    for (uint32_t i = 0; i < l->segments; i++)
        if (l->segment[i].inode == st.st_ino)
            return 0;
    struct segment s = {.inode = st.st_ino};
    int rc =
        prt_file_map_path(l->paths.events, sizeof(struct shm_event_segment), false, &s.base, &s.bytes, err);
    return rc ? rc : add_segment(l, &s, l->paths.events, err);
}

/* Its descriptor is the worker's word: what it leads to is checked, not believed. */
static int look_at_worker(struct trace_live *l, const struct shm_store_worker *row, struct shm_error *err)
{
    struct shm_worker_layout layout;
    const void *control;
    struct segment s = {.pid = atomic_load(&row->pid), .start = row->start};
    if (!prt_process_alive((pid_t)s.pid, s.start))
        return 0;
    int rc = prt_client_map_worker(row, &layout, &control, err);
    if (rc)
        return rc;
    s.fd = ((const struct shm_worker *)control)->trace_fd;
    munmap((void *)control, layout.total_bytes);
    if (!s.fd)
        return 0;
    for (uint32_t i = 0; i < l->segments; i++)
        if (l->segment[i].pid == s.pid && l->segment[i].start == s.start && l->segment[i].fd == s.fd)
            return 0;
    int fd;
    rc = prt_peer_open((pid_t)s.pid, s.fd, 0, "segment of events", &fd, err);
    if (rc)
        return rc;
    struct stat st;
    if (fstat(fd, &st) < 0 || st.st_size <= 0 || (uint64_t)st.st_size > SHM_EVENT_SEGMENT_MAX)
        rc = shm_error_set(
            err, EBADMSG,
            "segment of events of process %u: %lld bytes cannot be one: use an inferd of this version", s.pid,
            (long long)st.st_size);
    s.bytes = (uint64_t)st.st_size;
    if (!rc)
        rc = prt_file_map(fd, "segment of events", s.bytes, false, &s.base, err);
    close(fd);
    return rc ? rc : add_segment(l, &s, "segment of events", err);
}

static int look_for_workers(struct trace_live *l, struct shm_error *err)
{
    struct prt_client *client;
    int rc = prt_client_open(l->runtime_dir, l->instance, PRT_OPEN_STALE, &client, err);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++) {
        struct shm_store_worker row;
        struct shm_error one = {0};
        if (prt_client_worker(client, i, &row) == 0 && look_at_worker(l, &row, &one) && !rc) {
            *err = one;
            rc = one.code;
        }
    }
    prt_client_close(&client);
    return rc;
}

int trace_live_open(const char *runtime_dir, const char *instance, struct trace *trace,
                    struct trace_live **ret_live, struct shm_error *err)
{
    struct trace_live *l = calloc(1, sizeof *l);
    if (!l)
        return shm_error_set(err, ENOMEM, "no memory; free some");
    l->runtime_dir = runtime_dir;
    l->instance = instance;
    l->trace = trace;
    int rc = prt_paths_make(runtime_dir, instance, &l->paths, err);
    if (!rc)
        rc = prt_paths_check(&l->paths, err);
    if (!rc)
        rc = look_for_expertd(l, err);
    if (!rc)
        rc = trace_live_poll(l, true, err);
    if (rc)
        trace_live_close(&l);
    else
        *ret_live = l;
    return rc;
}

int trace_live_poll(struct trace_live *l, bool look, struct shm_error *err)
{
    struct shm_error why = {0};
    l->trace->note[0] = '\0';
    if (look)
        drop_the_dead(l);
    if (look && (look_for_expertd(l, &why) || look_for_workers(l, &why)))
        snprintf(l->trace->note, sizeof l->trace->note, "%s", shm_error_text(&why));
    int rc = 0;
    for (uint32_t i = 0; !rc && i < l->segments; i++) {
        struct segment *s = &l->segment[i];
        for (uint32_t k = 0; !rc && k < s->view.head.rings; k++)
            rc = poll_ring(l->trace, &s->view, s->source, k, &s->ring[k], l->batch);
    }
    return rc ? trace_full(rc, l->paths.events, err) : 0;
}

void trace_live_close(struct trace_live **live)
{
    struct trace_live *l = *live;
    if (!l)
        return;
    for (uint32_t i = 0; i < l->segments; i++) {
        free(l->segment[i].ring);
        munmap(l->segment[i].base, l->segment[i].bytes);
    }
    free(l);
    *live = NULL;
}
