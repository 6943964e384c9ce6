/* SPDX-License-Identifier: MIT */
#include "expertd/exd_event.h"

#include "expertd/exd_log.h"
#include "proto/prt_file.h"
#include "proto/prt_guard.h"
#include "shm/shm_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PLACES       SHM_STORE_WORKERS
#define RINGS        (1 + 2 * PLACES)
#define MAIN_EVENTS  1024u
#define ISSUE_EVENTS 16384u /* two large chunks, or so */
#define LINK_EVENTS  8192u
#define KEEP_PLACES  8u /* fewer are not used again while there are new ones */

_Static_assert(RINGS <= SHM_EVENT_RINGS_MAX, "one segment holds them all");

struct exd_events {
    char path[PRT_PATH_BYTES];
    int fd;
    void *base;
    uint64_t bytes;
    struct shm_event_writer main;
    bool taken[PLACES], told;
    uint64_t left[PLACES]; /* when it was left, counted; 0: never used */
    uint64_t leavings;
};

static void capacities(uint32_t ret_capacity[RINGS])
{
    ret_capacity[0] = MAIN_EVENTS;
    for (uint32_t i = 0; i < PLACES; i++) {
        ret_capacity[1 + 2 * i] = ISSUE_EVENTS;
        ret_capacity[2 + 2 * i] = LINK_EVENTS;
    }
}

/* Memory for a ring, now: a full file system must not become SIGBUS later. */
static int allocate(struct exd_events *e, uint32_t ring)
{
    uint64_t offset, bytes;
    shm_event_place(e->base, ring, &offset, &bytes);
    return -posix_fallocate(e->fd, (off_t)offset, (off_t)bytes);
}

static int create(struct exd_events *e, const char *temporary)
{
    uint32_t capacity[RINGS];
    struct shm_error err = {0};
    capacities(capacity);
    e->bytes = shm_event_bytes(capacity, RINGS);
    e->fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (e->fd < 0 || ftruncate(e->fd, (off_t)e->bytes) < 0)
        return -errno;
    uint64_t tables = e->bytes;
    for (uint32_t i = 0; i < RINGS; i++)
        tables -= capacity[i] * SHM_EVENT_WORDS * 8;
    uint64_t start;
    int rc = -posix_fallocate(e->fd, 0, (off_t)tables);
    if (rc == 0)
        rc = prt_process_start(getpid(), &start);
    if (rc == 0)
        rc = prt_file_map(e->fd, temporary, e->bytes, true, &e->base, &err);
    if (rc < 0)
        return rc;
    prt_guard_add(e->base, e->bytes, "events", e->path, "start expertd again");
    shm_event_init(e->base, "expertd", capacity, RINGS, (uint32_t)getpid(), start);
    rc = allocate(e, 0);
    if (rc < 0)
        return rc;
    shm_event_own(e->base, 0, "main", "", (uint32_t)getpid(), 0, &e->main);
    shm_header_publish(e->base, prt_random_epoch()); /* the last store before others can see it */
    return 0;
}

/* Where the events of the expertd before are. */
static void before_path(const char *path, char ret_path[PRT_PATH_BYTES + 8])
{
    snprintf(ret_path, PRT_PATH_BYTES + 8, "%s.before", path);
}

static void free_events(struct exd_events *e)
{
    prt_guard_remove(e->base);
    if (e->base)
        munmap(e->base, e->bytes);
    if (e->fd >= 0)
        close(e->fd);
    free(e);
}

void exd_events_create(const struct prt_paths *paths, struct exd_events **ret_events)
{
    *ret_events = NULL;
    const char *set = getenv("EXPERTD_EVENTS");
    char temporary[PRT_PATH_BYTES + 8], before[PRT_PATH_BYTES + 8];
    snprintf(temporary, sizeof temporary, "%s.new", paths->events);
    before_path(paths->events, before);
    unlink(temporary);
    if (rename(paths->events, before) < 0) /* under the lock: of one that died */
        unlink(before);                    /* or ended well: nobody asks what came before that */
    if (set && strcmp(set, "0") == 0)
        return;
    struct exd_events *e = calloc(1, sizeof *e);
    int rc = -ENOMEM;
    if (e) {
        e->fd = -1;
        memcpy(e->path, paths->events, sizeof e->path);
        rc = create(e, temporary);
    }
    if (rc == 0 && rename(temporary, paths->events) < 0)
        rc = -errno;
    if (rc == 0) {
        *ret_events = e;
        return;
    }
    exd_log(EXD_LOG_WARNING, "%s: %s: no events are kept", paths->events, strerror(-rc));
    unlink(temporary);
    if (e)
        free_events(e);
}

void exd_events_destroy(struct exd_events **events)
{
    struct exd_events *e = *events;
    if (!e)
        return;
    char before[PRT_PATH_BYTES + 8];
    before_path(e->path, before);
    unlink(e->path);
    unlink(before);
    free_events(e);
    *events = NULL;
}

struct shm_event_writer *exd_events_main(struct exd_events *events)
{
    return &events->main;
}

static uint32_t choose(const struct exd_events *e)
{
    uint32_t oldest = PLACES, unused = PLACES, used = 0;
    for (uint32_t i = 0; i < PLACES; i++) {
        used += e->taken[i] || e->left[i];
        if (e->taken[i])
            continue;
        if (!e->left[i])
            unused = unused < i ? unused : i;
        else if (oldest == PLACES || e->left[i] < e->left[oldest])
            oldest = i;
    }
    return oldest == PLACES || (used < KEEP_PLACES && unused < PLACES) ? unused : oldest;
}

void exd_events_take(struct exd_events *e, const char *name, uint32_t pid, uint64_t session,
                     struct exd_event_place *ret_place)
{
    *ret_place = (struct exd_event_place){0};
    uint32_t i = e ? choose(e) : PLACES;
    if (i == PLACES) /* off, or more sessions are being closed than there are places */
        return;
    int rc = allocate(e, 1 + 2 * i);
    if (rc == 0)
        rc = allocate(e, 2 + 2 * i);
    if (rc < 0) {
        if (!e->told)
            exd_log(EXD_LOG_WARNING, "%s: %s: no events are kept of worker %s", e->path, strerror(-rc), name);
        e->told = true;
        return;
    }
    e->taken[i] = true;
    ret_place->events = e;
    ret_place->index = i;
    shm_event_own(e->base, 1 + 2 * i, "issuer", name, pid, session, &ret_place->writers[0]);
    shm_event_own(e->base, 2 + 2 * i, "link", name, pid, session, &ret_place->writers[1]);
    ret_place->issuer = &ret_place->writers[0];
    ret_place->link = &ret_place->writers[1];
}

void exd_events_leave(struct exd_event_place *place)
{
    if (!place->events)
        return;
    place->events->taken[place->index] = false;
    place->events->left[place->index] = ++place->events->leavings;
    place->events = NULL;
}
