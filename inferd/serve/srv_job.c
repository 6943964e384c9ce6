/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_job.h"

#include "inferd/serve/srv_grammar.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define CLIENTS_MAX 1024 /* whose turns are remembered */

struct client {
    char name[SRV_CLIENT_MAX];
    uint64_t turn;
};

struct srv_queue {
    pthread_mutex_t lock;
    pthread_cond_t work;
    int fd;
    unsigned limit;
    bool open, finishing;
    struct srv_job *waiting, **waiting_last;
    struct srv_job *running;
    struct srv_job *ready, **ready_last;
    struct client *clients; /* [CLIENTS_MAX] */
    unsigned n_clients;
    uint64_t turn; /* of the last job taken */
    uint64_t numbers;
    _Atomic bool interrupt;
    struct srv_counts counts;
    struct shm_server *shown; /* NULL: nowhere */
};

const char *srv_end_name(enum srv_end end)
{
    static const char *const name[SRV_END_COUNT] = {"stop token",   "stop string", "length",
                                                    "context full", "cancelled",   "failed"};
    return name[end];
}

struct srv_job *srv_job_new(void)
{
    struct srv_job *j = calloc(1, sizeof *j);
    if (j) {
        j->references = 1;
        j->last = &j->first;
    }
    return j;
}

static void free_events(struct srv_event *e)
{
    while (e) {
        struct srv_event *next = e->next;
        free(e->text);
        free(e);
        e = next;
    }
}

static void free_job(struct srv_job *j)
{
    free_events(j->first);
    inf_ids_clear(&j->prompt);
    for (unsigned i = 0; i < j->n_stops; i++)
        free(j->stops[i]);
    free(j->bias);
    srv_grammar_destroy(&j->grammar);
    free(j);
}

/* Under the lock. */
static void release(struct srv_job *j)
{
    if (--j->references == 0)
        free_job(j);
}

void srv_job_release(struct srv_queue *q, struct srv_job **job)
{
    if (!*job)
        return;
    pthread_mutex_lock(&q->lock);
    (*job)->user = NULL;
    (*job)->on_event = NULL;
    release(*job);
    pthread_mutex_unlock(&q->lock);
    *job = NULL;
}

int srv_queue_create(unsigned limit, struct srv_queue **ret_queue)
{
    struct srv_queue *q = calloc(1, sizeof *q);
    if (!q || !(q->clients = calloc(CLIENTS_MAX, sizeof *q->clients))) {
        free(q);
        return -ENOMEM;
    }
    q->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (q->fd < 0) {
        int rc = -errno;
        free(q->clients);
        free(q);
        return rc;
    }
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&q->work, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&q->lock, NULL);
    q->limit = q->counts.limit = limit;
    q->waiting_last = &q->waiting;
    q->ready_last = &q->ready;
    *ret_queue = q;
    return 0;
}

void srv_queue_destroy(struct srv_queue **queue)
{
    struct srv_queue *q = *queue;
    if (!q)
        return;
    for (struct srv_job *j = q->waiting, *next; j; j = next) {
        next = j->next;
        release(j);
    }
    for (struct srv_job *j = q->ready, *next; j; j = next) {
        next = j->next_ready;
        release(j);
    }
    close(q->fd);
    pthread_cond_destroy(&q->work);
    pthread_mutex_destroy(&q->lock);
    free(q->clients);
    free(q);
    *queue = NULL;
}

int srv_queue_fd(const struct srv_queue *q)
{
    return q->fd;
}

static void put(struct srv_queue *q, struct srv_job *j, struct srv_event *e)
{
    *j->last = e;
    j->last = &e->next;
    if (j->ready)
        return;
    j->ready = true;
    j->references++;
    j->next_ready = NULL;
    *q->ready_last = j;
    q->ready_last = &j->next_ready;
    uint64_t one = 1;
    if (write(q->fd, &one, sizeof one) < 0)
        return; /* full: it is readable already */
}

static struct srv_event *end_event(const struct srv_result *result)
{
    struct srv_event *e = srv_event_new(NULL, 0, 0);
    if (e) {
        e->ended = true;
        e->result = *result;
    }
    return e;
}

/* Takes a job out of a list; `last` may be NULL. */
static bool unlink_job(struct srv_job **list, struct srv_job ***last, struct srv_job *j)
{
    for (struct srv_job **at = list; *at; at = &(*at)->next) {
        if (*at != j)
            continue;
        *at = j->next;
        if (last && !*at)
            *last = at;
        j->next = NULL;
        return true;
    }
    return false;
}

/* All that the pass is for is cancelled. */
static void set_interrupt(struct srv_queue *q)
{
    bool any = false, all = true;
    for (const struct srv_job *j = q->running; j; j = j->next) {
        if (!j->passing)
            continue;
        any = true;
        all = all && atomic_load(&j->cancelled);
    }
    atomic_store(&q->interrupt, any && all);
}

void srv_queue_pass(struct srv_queue *q, struct srv_job *const *jobs, unsigned n)
{
    pthread_mutex_lock(&q->lock);
    for (struct srv_job *j = q->running; j; j = j->next)
        j->passing = false;
    for (unsigned i = 0; i < n; i++)
        jobs[i]->passing = true;
    set_interrupt(q);
    pthread_mutex_unlock(&q->lock);
}

/* Under the lock; the job is in no list any more. */
static void end(struct srv_queue *q, struct srv_job *j, const struct srv_result *result)
{
    struct srv_event *e = end_event(result);
    while (!e) { /* the end must not be lost, whatever else is */
        struct timespec pause = {.tv_nsec = 10000000};
        nanosleep(&pause, NULL);
        e = end_event(result);
    }
    j->done = true;
    q->counts.done++;
    if (result->end == SRV_END_CANCELLED)
        q->counts.cancelled++;
    put(q, j, e);
    release(j);
}

void srv_queue_deliver(struct srv_queue *q)
{
    uint64_t n;
    if (read(q->fd, &n, sizeof n) < 0 && errno != EAGAIN)
        return;
    pthread_mutex_lock(&q->lock);
    struct srv_job *j;
    while ((j = q->ready)) {
        q->ready = j->next_ready;
        if (!q->ready)
            q->ready_last = &q->ready;
        struct srv_event *e = j->first, *all = e;
        j->first = NULL;
        j->last = &j->first;
        j->ready = false;
        for (; e; e = e->next) {
            void (*on_event)(struct srv_job *, const struct srv_event *) = j->on_event;
            pthread_mutex_unlock(&q->lock);
            if (on_event)
                on_event(j, e);
            pthread_mutex_lock(&q->lock);
        }
        free_events(all);
        release(j);
    }
    pthread_mutex_unlock(&q->lock);
}

/* Under the lock, after something changed. Those that wait stand in the order in which they came. */
static void tell(struct srv_queue *q)
{
    if (!q->shown)
        return;
    struct shm_server_counters *c = &q->shown->counters;
    shm_counter_set(&c->queue_waiting, q->counts.waiting);
    shm_counter_set(&c->queue_limit, q->counts.limit);
    shm_counter_set(&c->running, q->counts.running);
    shm_counter_set(&c->queue_submitted, q->counts.submitted);
    shm_counter_set(&c->queue_refused, q->counts.refused);
    shm_counter_set(&c->queue_cancelled, q->counts.cancelled);
    shm_counter_set(&q->shown->oldest_ns, q->waiting ? q->waiting->submit_ns : 0);
}

void srv_queue_show(struct srv_queue *q, struct shm_server *segment)
{
    pthread_mutex_lock(&q->lock);
    q->shown = segment;
    tell(q);
    pthread_mutex_unlock(&q->lock);
}

/* The turn that a new job of this client gets. */
static uint64_t next_turn(struct srv_queue *q, const char *name)
{
    struct client *c = NULL, *oldest = &q->clients[0];
    for (unsigned i = 0; i < q->n_clients && !c; i++) {
        if (strcmp(q->clients[i].name, name) == 0)
            c = &q->clients[i];
        else if (q->clients[i].turn < oldest->turn)
            oldest = &q->clients[i];
    }
    if (!c) {
        c = q->n_clients < CLIENTS_MAX ? &q->clients[q->n_clients++] : oldest;
        snprintf(c->name, sizeof c->name, "%s", name);
        c->turn = 0;
    }
    c->turn = (c->turn > q->turn ? c->turn : q->turn) + 1;
    return c->turn;
}

int srv_queue_submit(struct srv_queue *q, struct srv_job *j)
{
    int rc = 0;
    pthread_mutex_lock(&q->lock);
    if (!q->open || q->finishing) {
        rc = -ESHUTDOWN;
    } else if (q->counts.waiting >= q->limit) {
        q->counts.refused++;
        rc = -EBUSY;
    } else {
        j->submit_ns = shm_now_ns();
        j->number = ++q->numbers;
        j->turn = next_turn(q, j->client);
        j->references++;
        j->next = NULL;
        *q->waiting_last = j;
        q->waiting_last = &j->next;
        q->counts.waiting++;
        q->counts.submitted++;
        pthread_cond_signal(&q->work);
    }
    tell(q);
    pthread_mutex_unlock(&q->lock);
    return rc;
}

void srv_queue_cancel(struct srv_queue *q, struct srv_job *j)
{
    pthread_mutex_lock(&q->lock);
    if (!j->done) {
        atomic_store(&j->cancelled, true);
        if (unlink_job(&q->waiting, &q->waiting_last, j)) {
            const struct srv_result result = {.end = SRV_END_CANCELLED,
                                              .prompt_tokens = (uint32_t)j->prompt.n,
                                              .queued_ns = shm_now_ns() - j->submit_ns};
            q->counts.waiting--;
            end(q, j, &result);
            tell(q);
        }
        set_interrupt(q);
    }
    pthread_mutex_unlock(&q->lock);
}

void srv_queue_open(struct srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->open = true;
    pthread_mutex_unlock(&q->lock);
}

void srv_queue_pause(struct srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->open = false;
    pthread_mutex_unlock(&q->lock);
}

void srv_queue_close(struct srv_queue *q, int code, const char *why)
{
    struct srv_result result = {.end = SRV_END_FAILED, .code = code};
    snprintf(result.error, sizeof result.error, "%s", why);
    pthread_mutex_lock(&q->lock);
    q->open = false;
    struct srv_job *j;
    while ((j = q->waiting)) {
        unlink_job(&q->waiting, &q->waiting_last, j);
        q->counts.waiting--;
        result.prompt_tokens = (uint32_t)j->prompt.n;
        end(q, j, &result);
    }
    tell(q);
    pthread_mutex_unlock(&q->lock);
}

bool srv_queue_is_open(struct srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    bool open = q->open && !q->finishing;
    pthread_mutex_unlock(&q->lock);
    return open;
}

void srv_queue_finish(struct srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->finishing = true;
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&q->lock);
}

bool srv_queue_finished(struct srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    bool finished = q->finishing && !q->waiting && !q->running;
    pthread_mutex_unlock(&q->lock);
    return finished;
}

struct srv_job *srv_queue_take(struct srv_queue *q, unsigned wait_ms,
                               bool (*fits)(void *ctx, const struct srv_job *job), void *ctx)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += wait_ms / 1000;
    until.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&q->lock);
    while (!q->waiting && !q->finishing && wait_ms)
        if (pthread_cond_timedwait(&q->work, &q->lock, &until))
            break;
    struct srv_job *best = q->waiting;
    for (struct srv_job *j = best; j; j = j->next)
        if (j->turn < best->turn)
            best = j;
    if (best && fits && !fits(ctx, best))
        best = NULL;
    if (best) {
        unlink_job(&q->waiting, &q->waiting_last, best);
        q->counts.waiting--;
        q->counts.running++;
        q->turn = best->turn;
        best->next = q->running;
        q->running = best;
        atomic_store(&best->running, true);
        tell(q);
    }
    pthread_mutex_unlock(&q->lock);
    return best;
}

void srv_queue_put(struct srv_queue *q, struct srv_job *j, struct srv_event *e)
{
    pthread_mutex_lock(&q->lock);
    put(q, j, e);
    pthread_mutex_unlock(&q->lock);
}

void srv_queue_end(struct srv_queue *q, struct srv_job *j, const struct srv_result *result)
{
    pthread_mutex_lock(&q->lock);
    unlink_job(&q->running, NULL, j);
    q->counts.running--;
    double s = (double)(result->total_ns - result->queued_ns) / 1e9;
    q->counts.mean_s = q->counts.mean_s > 0 ? 0.9 * q->counts.mean_s + 0.1 * s : s;
    end(q, j, result);
    tell(q);
    set_interrupt(q);
    pthread_mutex_unlock(&q->lock);
}

_Atomic bool *srv_queue_interrupt(struct srv_queue *q)
{
    return &q->interrupt;
}

struct srv_counts srv_queue_counts(struct srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    struct srv_counts counts = q->counts;
    pthread_mutex_unlock(&q->lock);
    return counts;
}

void srv_queue_each(struct srv_queue *q, void (*see)(void *ctx, const struct srv_job *job, bool running),
                    void *ctx)
{
    pthread_mutex_lock(&q->lock);
    for (const struct srv_job *j = q->running; j; j = j->next)
        see(ctx, j, true);
    for (const struct srv_job *j = q->waiting; j; j = j->next)
        see(ctx, j, false);
    pthread_mutex_unlock(&q->lock);
}

struct srv_event *srv_event_new(const char *text, size_t bytes, unsigned n_top)
{
    struct srv_event *e = calloc(1, sizeof *e + n_top * sizeof e->top[0]);
    if (!e)
        return NULL;
    e->id = -1;
    e->n_top = n_top;
    if (bytes) {
        e->text = malloc(bytes + 1);
        if (!e->text) {
            free(e);
            return NULL;
        }
        memcpy(e->text, text, bytes);
        e->text[bytes] = '\0';
        e->bytes = bytes;
    }
    return e;
}
