/* SPDX-License-Identifier: MIT */
/*
 * The server's queue between its two sides: one thread submits, cancels and is handed events; several take
 * jobs and put events at once. Each job ends exactly once, its events come in order and none after the end,
 * and what a client gave up is freed.
 */
#include "inferd/serve/srv_job.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ENGINES 3
#define JOBS    4000
#define PIECES  5

#define MUST(what)                                                                                           \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

struct client {
    struct srv_job *job;
    int seen;
    bool ended, left;
};

static struct srv_queue *q;
static struct client clients[JOBS];
static unsigned ended, cancelled;

static void on_event(struct srv_job *job, const struct srv_event *e)
{
    struct client *c = job->user;
    MUST(!c->ended && !c->left && c->job == job);
    if (!e->ended) {
        char want[16];
        snprintf(want, sizeof want, "%d", c->seen++);
        MUST(strcmp(e->text, want) == 0);
        return;
    }
    c->ended = true;
    ended++;
    MUST(e->result.end == SRV_END_CANCELLED || c->seen == PIECES);
    cancelled += e->result.end == SRV_END_CANCELLED;
    srv_job_release(q, &c->job);
}

/* There is room every other time. */
static bool fits(void *ctx, const struct srv_job *job)
{
    (void)job;
    return ++*(unsigned *)ctx % 2;
}

static void *engine(void *ctx)
{
    unsigned asked = 0;
    (void)ctx;
    for (;;) {
        struct srv_job *job = srv_queue_take(q, 5, fits, &asked);
        if (!job) {
            if (srv_queue_finished(q))
                return NULL;
            continue;
        }
        struct srv_result r = {.end = SRV_END_LENGTH};
        srv_queue_pass(q, &job, 1);
        for (int i = 0; i < PIECES; i++) {
            char text[16];
            if (atomic_load(&job->cancelled)) {
                r.end = SRV_END_CANCELLED;
                break;
            }
            snprintf(text, sizeof text, "%d", i);
            struct srv_event *e = srv_event_new(text, strlen(text), 0);
            MUST(e);
            srv_queue_put(q, job, e);
        }
        srv_queue_pass(q, NULL, 0);
        srv_queue_end(q, job, &r);
    }
}

static void deliver(int wait_ms)
{
    struct pollfd p = {.fd = srv_queue_fd(q), .events = POLLIN};
    if (poll(&p, 1, wait_ms) > 0)
        srv_queue_deliver(q);
}

int main(void)
{
    pthread_t threads[ENGINES];
    unsigned submitted = 0, full = 0, left = 0;
    MUST(srv_queue_create(8, &q) == 0);
    struct srv_job *early = srv_job_new();
    MUST(srv_queue_submit(q, early) == -ESHUTDOWN);
    srv_job_release(q, &early);
    srv_queue_open(q);
    for (int i = 0; i < ENGINES; i++)
        MUST(pthread_create(&threads[i], NULL, engine, NULL) == 0);
    srand(1);
    while (submitted < JOBS) {
        struct client *c = &clients[submitted];
        c->job = srv_job_new();
        c->job->user = c;
        c->job->on_event = on_event;
        snprintf(c->job->client, sizeof c->job->client, "client %d", rand() % 5);
        int rc = srv_queue_submit(q, c->job);
        if (rc) {
            MUST(rc == -EBUSY);
            srv_job_release(q, &c->job);
            full++;
            deliver(1);
            continue;
        }
        submitted++;
        if (rand() % 4 == 0) {
            srv_queue_cancel(q, c->job);
            if (rand() % 2) { /* the client is gone: nothing more is heard of it */
                c->left = true;
                left++;
                srv_job_release(q, &c->job);
            }
        }
        if (rand() % 3 == 0)
            deliver(0);
    }
    for (int i = 0; ended + left < JOBS && i < 20000; i++)
        deliver(1);
    MUST(ended + left == JOBS);
    srv_queue_finish(q);
    for (int i = 0; i < ENGINES; i++)
        pthread_join(threads[i], NULL);
    struct srv_counts counts = srv_queue_counts(q);
    MUST(counts.done == JOBS && counts.submitted == JOBS && counts.refused == full && !counts.running &&
         !counts.waiting);
    MUST(counts.cancelled >= cancelled && !atomic_load(srv_queue_interrupt(q)));
    srv_queue_destroy(&q);
    printf("%u jobs, %u cancelled, %u clients left, %u refused\n", submitted, cancelled, left, full);
    return 0;
}
