/* SPDX-License-Identifier: MIT */
#include "expertd/exd_trace.h"

#include "expertd/exd_log.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

struct exd_trace {
    struct exd_trace_head head;
    uint32_t entries_max, events_max;
    bool told; /* a failure to write */
    struct exd_trace_layer *layer;
    struct exd_trace_entry *entry;
    struct exd_trace_event *event;
    uint32_t last_wait;
};

struct exd_trace *exd_trace_new(uint32_t layers, uint32_t experts)
{
    struct exd_trace *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->entries_max = layers * experts;
    t->events_max = 6 * t->entries_max + 64;
    t->layer = calloc(layers, sizeof *t->layer);
    t->entry = calloc(t->entries_max, sizeof *t->entry);
    t->event = calloc(t->events_max, sizeof *t->event);
    if (!t->layer || !t->entry || !t->event)
        exd_trace_free(&t);
    return t;
}

void exd_trace_free(struct exd_trace **trace)
{
    struct exd_trace *t = *trace;
    if (!t)
        return;
    free(t->layer);
    free(t->entry);
    free(t->event);
    free(t);
    *trace = NULL;
}

void exd_trace_begin(struct exd_trace *t, const struct exd_trace_head *head)
{
    if (!t)
        return;
    t->head = *head;
    memcpy(t->head.magic, EXD_TRACE_MAGIC, sizeof t->head.magic);
    t->head.begin_ns = shm_now_ns();
    t->head.entries = t->head.events = 0;
    t->last_wait = 0;
    memset(t->layer, 0, head->layers * sizeof *t->layer);
}

void exd_trace_layer(struct exd_trace *t, uint32_t layer, uint64_t published_ns)
{
    if (t)
        t->layer[layer] = (struct exd_trace_layer){published_ns, shm_now_ns()};
}

void exd_trace_entry(struct exd_trace *t, uint32_t layer, uint32_t expert, uint64_t group, uint32_t flags)
{
    if (!t || t->head.entries == t->entries_max)
        return;
    t->entry[t->head.entries++] = (struct exd_trace_entry){.issued_ns = shm_now_ns(),
                                                           .group = (uint32_t)group,
                                                           .layer = (uint16_t)layer,
                                                           .expert = (uint16_t)(expert | flags)};
    t->last_wait = 0;
}

void exd_trace_event(struct exd_trace *t, enum exd_trace_kind kind, uint64_t value)
{
    if (!t || t->head.events == t->events_max)
        return;
    if (kind == EXD_TRACE_WAIT) { /* it looks again and again while it waits for one thing */
        if (t->last_wait == value)
            return;
        t->last_wait = (uint32_t)value;
    }
    t->event[t->head.events++] =
        (struct exd_trace_event){.at_ns = shm_now_ns(), .kind = kind, .value = (uint32_t)value};
}

void exd_trace_end(struct exd_trace *t, uint32_t result, const struct shm_mask *routed)
{
    if (!t)
        return;
    t->head.end_ns = shm_now_ns();
    t->head.result = result;
    for (uint32_t i = 0; i < t->head.entries; i++) {
        struct exd_trace_entry *e = &t->entry[i];
        uint32_t expert = e->expert & (EXD_TRACE_UNUSED - 1);
        if (t->layer[e->layer].seen_ns && !shm_mask_test(&routed[e->layer], expert))
            e->expert |= EXD_TRACE_UNUSED;
    }
}

void exd_trace_write(struct exd_trace *t, const char *path)
{
    if (!t || !t->head.begin_ns)
        return;
    struct exd_trace_head *h = &t->head;
    struct iovec part[] = {{h, sizeof *h},
                           {t->layer, h->layers * sizeof *t->layer},
                           {t->entry, h->entries * sizeof *t->entry},
                           {t->event, h->events * sizeof *t->event}};
    size_t total = 0;
    for (size_t i = 0; i < sizeof part / sizeof part[0]; i++)
        total += part[i].iov_len;
    h->total_bytes = (uint32_t)total;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    ssize_t n = fd < 0 ? -1 : writev(fd, part, sizeof part / sizeof part[0]);
    if (n != (ssize_t)total && !t->told) {
        t->told = true;
        exd_log(EXD_LOG_WARNING, "trace file %s cannot be written: %s", path,
                n < 0 ? strerror(errno) : "it is full");
    }
    if (fd >= 0)
        close(fd);
}
