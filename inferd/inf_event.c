/* SPDX-License-Identifier: MIT */
#include "inferd/inf_event.h"

#include "proto/prt_file.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const uint32_t capacity = 8192;

struct shm_event_writer *inf_events_open(struct inf_events *e, const char *name)
{
    if (e->fd >= 0)
        return &e->writer;
    const char *set = getenv("EXPERTD_EVENTS");
    uint64_t start;
    if ((set && strcmp(set, "0") == 0) || prt_process_start(getpid(), &start))
        return NULL;
    struct shm_error err = {0};
    e->bytes = shm_event_bytes(&capacity, 1);
    if (prt_segment_create("inferd-events", e->bytes, &e->fd, &e->base, &err))
        return NULL;
    shm_event_init(e->base, "inferd", &capacity, 1, (uint32_t)getpid(), start);
    shm_event_own(e->base, 0, "worker", name, (uint32_t)getpid(), 0, &e->writer);
    shm_header_publish(e->base, prt_random_epoch());
    return &e->writer;
}

void inf_events_close(struct inf_events *e)
{
    if (e->fd < 0)
        return;
    munmap(e->base, e->bytes);
    close(e->fd);
    e->fd = -1;
}
