/* SPDX-License-Identifier: MIT */
#include "kernels/krn_link_host.h"

#include "shm/shm_probe.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define LINE          64 /* cache line */
#define QUEUE_DEFAULT 4096u
#define SLEEP_MAX_NS  UINT64_C(50000000) /* how long a stop may go unnoticed */
#define IDLE_WAIT_NS  UINT64_C(1000000000)
#define COST_MAX_NS   1e15 /* of a copy, paced to next to nothing: 11 days, and it fits in 64 bits */

struct host_op {
    const void *src; /* NULL: signal */
    uint64_t value;  /* copy: ring offset; signal: what to store */
    uint64_t bytes;
    uint64_t enqueued_ns;
};

struct host_link {
    struct krn_link base;
    struct krn_link_host_config config;
    struct host_op *queue;
    uint32_t mask;
    pthread_t thread;
    _Atomic double gbps, latency_us;

    /* Producer: the issuer. Indices run free over 2^64 and are masked on access. */
    _Alignas(LINE) _Atomic uint64_t tail; /* release after the op; thread: acquire */
    struct shm_bell work_bell;            /* rung after tail moved or stop */

    /* Consumer: the link's thread. */
    _Alignas(LINE) _Atomic uint64_t head; /* release after the op is done; producer: acquire */
    struct shm_bell room_bell;            /* rung after head moved */
    _Atomic uint64_t landed;              /* release after the bytes; readers: acquire */
    _Atomic uint64_t bytes, signals, busy_ns, first_ns, last_ns;
    _Atomic bool stop;

    uint64_t mark_bytes, mark_busy_ns; /* producer's: totals at the mark */
};

static struct host_link *host(struct krn_link *link)
{
    return (struct host_link *)link;
}

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* Single writer: the link's thread. */
static void add(_Atomic uint64_t *word, uint64_t n)
{
    atomic_store_explicit(word, load(word) + n, memory_order_relaxed);
}

/* Sleeps until the absolute time, in pieces so that a stop is noticed. */
static void sleep_until(struct host_link *l, uint64_t when_ns)
{
    for (uint64_t now = shm_now_ns(); now < when_ns && !atomic_load(&l->stop); now = shm_now_ns()) {
        uint64_t until = when_ns - now > SLEEP_MAX_NS ? now + SLEEP_MAX_NS : when_ns;
        struct timespec ts = {.tv_sec = (time_t)(until / 1000000000u),
                              .tv_nsec = (long)(until % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);
    }
}

/* The schedule (krn_link_host.h): returns when the copy lands on it, given
 * when the one before did. Unpaced links have no schedule: 0. */
static uint64_t scheduled_landing(struct host_link *l, const struct host_op *op, uint64_t previous_ns,
                                  uint64_t *ret_start_ns)
{
    double gbps = atomic_load_explicit(&l->gbps, memory_order_relaxed);
    double latency_us = atomic_load_explicit(&l->latency_us, memory_order_relaxed);
    *ret_start_ns = previous_ns > op->enqueued_ns ? previous_ns : op->enqueued_ns;
    if (gbps <= 0 && latency_us <= 0)
        return 0;
    double cost_ns = latency_us * 1e3 + (gbps > 0 ? (double)op->bytes / gbps : 0);
    return *ret_start_ns + (uint64_t)((cost_ns < COST_MAX_NS ? cost_ns : COST_MAX_NS) + 0.5);
}

/* Where the link's thread is in time. */
struct clock_hand {
    uint64_t schedule_ns; /* the last copy's landing on the schedule; unpaced: when it landed */
    uint64_t end_ns;      /* when it really landed */
};

static void tell_landed(struct host_link *l, const struct host_op *op, uint64_t began_ns, uint64_t end_ns)
{
    uint64_t slot = l->config.slot_bytes ? op->value / l->config.slot_bytes : 0;
    SHM_PROBE(expertd, land, slot, op->bytes, end_ns - began_ns);
    shm_event_put(l->config.events, SHM_EVENT_LAND, end_ns, end_ns - began_ns,
                  SHM_EVENT_U32(slot, 0) | SHM_EVENT_U32(op->bytes < UINT32_MAX ? op->bytes : UINT32_MAX, 4));
}

static void do_copy(struct host_link *l, const struct host_op *op, struct clock_hand *hand)
{
    uint64_t start_ns, began_ns = shm_now_ns();
    uint64_t landing_ns = scheduled_landing(l, op, hand->schedule_ns, &start_ns);
    memcpy((char *)l->config.ring + op->value, op->src, op->bytes);
    if (landing_ns) {
        sleep_until(l, landing_ns);
        /* Busy as measured, not as scheduled: the pacing can be judged by it. */
        began_ns = op->enqueued_ns > hand->end_ns ? op->enqueued_ns : hand->end_ns;
    }
    uint64_t end_ns = shm_now_ns();
    hand->schedule_ns = landing_ns ? landing_ns : end_ns;
    hand->end_ns = end_ns;
    add(&l->busy_ns, end_ns - began_ns);
    if (!load(&l->first_ns))
        atomic_store_explicit(&l->first_ns, began_ns, memory_order_relaxed);
    atomic_store_explicit(&l->last_ns, end_ns, memory_order_relaxed);
    add(&l->bytes, op->bytes);
    tell_landed(l, op, began_ns, end_ns);
    /* release, pairs with the acquire in host_landed: bytes and counters before the landing */
    atomic_store_explicit(&l->landed, load(&l->landed) + 1, memory_order_release);
    if (l->config.issuer_bell)
        shm_bell_ring(l->config.issuer_bell);
}

static void do_signal(struct host_link *l, const struct host_op *op)
{
    /* release, pairs with the worker's acquire of landed_groups: slots and table rows before the signal */
    atomic_store_explicit(l->config.landed_word, op->value, memory_order_release);
    shm_bell_ring(l->config.landed_bell);
    add(&l->signals, 1);
}

static void *run(void *arg)
{
    struct host_link *l = arg;
    prctl(PR_SET_NAME, l->config.name ? l->config.name : "link");
    prctl(PR_SET_TIMERSLACK, 1ul); /* the default, 50 us, is a blob's time on a fast link */
    struct clock_hand hand = {0};
    for (uint64_t head = 0; !atomic_load(&l->stop);) {
        /* acquire, pairs with the release in enqueue: the op is whole */
        if (head == atomic_load_explicit(&l->tail, memory_order_acquire)) {
            uint32_t ticket = shm_bell_prepare(&l->work_bell);
            if (head != atomic_load_explicit(&l->tail, memory_order_acquire) || atomic_load(&l->stop))
                shm_bell_cancel(&l->work_bell);
            else
                shm_bell_wait(&l->work_bell, ticket, IDLE_WAIT_NS);
            continue;
        }
        const struct host_op *op = &l->queue[head & l->mask];
        if (op->src)
            do_copy(l, op, &hand);
        else
            do_signal(l, op);
        /* release, pairs with the acquire in enqueue and drain: the cell is free, the op is done */
        atomic_store_explicit(&l->head, ++head, memory_order_release);
        shm_bell_ring(&l->room_bell);
    }
    return NULL;
}

/* Waits until at most `queued` operations are left. */
static int wait_queue(struct host_link *l, uint64_t queued, uint64_t timeout_ns)
{
    uint64_t deadline = shm_now_ns() + timeout_ns;
    uint64_t tail = load(&l->tail);
    for (;;) {
        /* acquire, pairs with the release in run */
        if (tail - atomic_load_explicit(&l->head, memory_order_acquire) <= queued)
            return 0;
        uint64_t now = shm_now_ns();
        if (now >= deadline)
            return -ETIMEDOUT;
        uint32_t ticket = shm_bell_prepare(&l->room_bell);
        if (tail - atomic_load_explicit(&l->head, memory_order_acquire) <= queued)
            shm_bell_cancel(&l->room_bell);
        else
            shm_bell_wait(&l->room_bell, ticket, deadline - now);
    }
}

static int enqueue(struct host_link *l, const struct host_op *op)
{
    /* A full queue drains at the link's pace; a minute without room is a stuck link. */
    if (wait_queue(l, l->mask, UINT64_C(60000000000)))
        return -EIO;
    uint64_t tail = load(&l->tail);
    l->queue[tail & l->mask] = *op;
    l->queue[tail & l->mask].enqueued_ns = shm_now_ns();
    /* release, pairs with the acquire in run: the op is whole */
    atomic_store_explicit(&l->tail, tail + 1, memory_order_release);
    shm_bell_ring(&l->work_bell);
    return 0;
}

static int host_copy(struct krn_link *link, uint64_t ring_offset, const void *src, size_t bytes, bool more)
{
    (void)more; /* the thread takes what is there */
    struct host_link *l = host(link);
    if (!src || ring_offset > l->config.ring_bytes || bytes > l->config.ring_bytes - ring_offset)
        return -EINVAL;
    return enqueue(l, &(struct host_op){.src = src, .value = ring_offset, .bytes = bytes});
}

static int host_signal(struct krn_link *link, uint64_t value)
{
    return enqueue(host(link), &(struct host_op){.value = value});
}

static uint64_t host_landed(struct krn_link *link)
{
    /* acquire, pairs with the release in do_copy */
    return atomic_load_explicit(&host(link)->landed, memory_order_acquire);
}

static int host_drain(struct krn_link *link, uint64_t timeout_ns)
{
    return wait_queue(host(link), 0, timeout_ns);
}

static void host_mark(struct krn_link *link)
{
    struct host_link *l = host(link);
    l->mark_bytes = load(&l->bytes);
    l->mark_busy_ns = load(&l->busy_ns);
    atomic_store_explicit(&l->first_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&l->last_ns, 0, memory_order_relaxed);
}

static void host_stats(struct krn_link *link, struct krn_link_stats *ret_stats)
{
    struct host_link *l = host(link);
    *ret_stats = (struct krn_link_stats){
        .copies = host_landed(link),
        .bytes = load(&l->bytes),
        .signals = load(&l->signals),
        .busy_ns = load(&l->busy_ns),
        .first_ns = load(&l->first_ns),
        .last_ns = load(&l->last_ns),
        .mark_bytes = load(&l->bytes) - l->mark_bytes,
        .mark_busy_ns = load(&l->busy_ns) - l->mark_busy_ns,
    };
}

static void host_destroy(struct krn_link *link)
{
    struct host_link *l = host(link);
    atomic_store(&l->stop, true);
    shm_bell_ring(&l->work_bell);
    pthread_join(l->thread, NULL);
    free(l->queue);
    free(l);
}

static const struct krn_link_ops host_ops = {
    .copy = host_copy,
    .signal = host_signal,
    .landed = host_landed,
    .drain = host_drain,
    .mark = host_mark,
    .stats = host_stats,
    .destroy = host_destroy,
};

int krn_link_host_create(const struct krn_link_host_config *config, struct krn_link **ret_link,
                         struct shm_error *err)
{
    uint32_t queue = config->queue ? config->queue : QUEUE_DEFAULT;
    if (queue & (queue - 1))
        return shm_error_set(err, EINVAL, "host link: queue of %u operations is not a power of two", queue);
    if (!(config->gbps >= 0) || !(config->latency_us >= 0))
        return shm_error_set(err, EINVAL, "host link: pacing of %g GB/s and %g us must not be negative",
                             config->gbps, config->latency_us);
    struct host_link *l = aligned_alloc(LINE, (sizeof *l + LINE - 1) / LINE * LINE);
    if (!l)
        return shm_error_set(err, ENOMEM, "host link: no memory; free some");
    memset(l, 0, sizeof *l);
    l->base.ops = &host_ops;
    l->config = *config;
    l->mask = queue - 1;
    l->queue = calloc(queue, sizeof *l->queue);
    krn_link_host_pace(&l->base, config->gbps, config->latency_us);
    int rc = l->queue ? pthread_create(&l->thread, NULL, run, l) : ENOMEM;
    if (rc) {
        free(l->queue);
        free(l);
        return shm_error_set(err, rc, "host link: can't start its thread: %s", strerror(rc));
    }
    *ret_link = &l->base;
    return 0;
}

void krn_link_host_pace(struct krn_link *link, double gbps, double latency_us)
{
    struct host_link *l = host(link);
    atomic_store_explicit(&l->gbps, gbps, memory_order_relaxed);
    atomic_store_explicit(&l->latency_us, latency_us, memory_order_relaxed);
}
