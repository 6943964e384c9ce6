/* SPDX-License-Identifier: MIT */
#include "expertd/exd_issuer.h"

#include "expertd/exd_log.h"
#include "expertd/exd_stream.h"
#include "shm/shm_word.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define WAIT_NS          UINT64_C(100000000) /* every wait looks again at stop and watchdog this often */
#define WAIT_BLOB_NS     UINT64_C(2000000)   /* the loader rings no bell */
#define WATCHDOG_DEFAULT UINT64_C(60000000000)
#define STOP_DRAIN_NS    UINT64_C(5000000000)
#define NAME_BYTES       64
/* Around the time when a device's next publication is due. */
#define SELDOM_NS    UINT64_C(1000000)
#define EARLY_NS     UINT64_C(25000)
#define SPIN_MAX_NS  UINT64_C(60000)
#define SLEEP_MAX_NS UINT64_C(1000000)

struct exd_issuer {
    struct exd_issuer_config config;
    char name[NAME_BYTES];
    struct exd_stream *stream;
    pthread_t thread;
    pthread_mutex_t lock; /* settings, drain_why */
    struct exd_stream_settings settings;
    char drain_why[SHM_ERROR_TEXT_BYTES]; /* not empty: no new streams */
    _Atomic bool stop; /* exd_issuer_stop to the thread, then the bell: seq_cst, as the bell's own words */
    _Atomic bool busy; /* the thread to exd_issuer_busy */
    uint32_t held_off_told;                /* bit per SHM_HELD_* */
    int link_status;                       /* of the last flush */
    uint64_t waited_for, waiting_since_ns; /* progress when the walk began to wait, and when */
    uint64_t next_seq;                     /* of the next stream */
    uint64_t group_base;                   /* of the next stream */
};

static struct shm_worker *worker(const struct exd_issuer *i)
{
    return i->config.control.worker;
}

/* How long to wait while a stream runs: a device that rings no bell is looked at often. */
static uint64_t stream_wait_ns(const struct exd_issuer *i, uint64_t limit_ns)
{
    uint64_t poll_ns = i->config.link->poll_ns;
    return poll_ns && poll_ns < limit_ns ? poll_ns : limit_ns;
}

/* Sleeps on the worker's bell unless `ready` already holds. Returns false on stop. */
static bool sleep_unless(struct exd_issuer *i, bool (*ready)(struct exd_issuer *), uint64_t timeout_ns)
{
    struct shm_bell *bell = &worker(i)->issuer_bell;
    uint32_t ticket = shm_bell_prepare(bell);
    if (atomic_load(&i->stop) || ready(i))
        shm_bell_cancel(bell);
    else
        shm_bell_wait(bell, ticket, timeout_ns);
    return !atomic_load(&i->stop);
}

static bool stream_posted(struct exd_issuer *i)
{
    /* acquire, pairs with the worker's release: the descriptor is whole */
    return atomic_load_explicit(&worker(i)->stream_seq, memory_order_acquire) != i->next_seq - 1;
}

static bool cancelled(const struct exd_issuer *i)
{
    /* acquire, pairs with the worker's release: it reads no slot from here on */
    return atomic_load_explicit(&worker(i)->cancel_seq, memory_order_acquire) == i->next_seq;
}

/* How long to sleep until a layer is published that a device publishes: until shortly before it is due, as a
 * sleep ends late; then not at all for a while, as the link is idle until it was seen. */
static uint64_t publish_wait_ns(struct exd_issuer *i)
{
    uint64_t wait_ns = stream_wait_ns(i, WAIT_NS), due_ns = exd_stream_due_ns(i->stream);
    if (!i->config.link->poll_ns || !due_ns)
        return wait_ns;
    uint64_t now_ns = shm_now_ns();
    if (now_ns + EARLY_NS < due_ns) {
        uint64_t left_ns = due_ns - EARLY_NS - now_ns;
        return left_ns < SLEEP_MAX_NS ? left_ns : SLEEP_MAX_NS;
    }
    return now_ns < due_ns + SPIN_MAX_NS ? 0 : wait_ns;
}

/* How long the walk may wait for what it waits for. A device is looked at the more seldom the longer nothing
 * came: a late look costs the link a small part of the time that it stood anyway, and a large ring full of
 * copies that are still to be used has time. */
static uint64_t walk_wait_ns(struct exd_issuer *i, enum exd_step step)
{
    uint64_t wait_ns = step == EXD_STEP_WAIT_PUBLISH
                           ? publish_wait_ns(i)
                           : stream_wait_ns(i, step == EXD_STEP_WAIT_BLOB ? WAIT_BLOB_NS : WAIT_NS);
    if (!i->config.link->poll_ns || !wait_ns)
        return wait_ns;
    uint64_t now_ns = shm_now_ns(), value = exd_stream_progress(i->stream);
    if (value != i->waited_for || !i->waiting_since_ns) {
        i->waited_for = value;
        i->waiting_since_ns = now_ns;
    }
    bool full = step == EXD_STEP_WAIT_SLOT && i->config.geometry.ring >= 4 * SHM_GROUP_MAX;
    uint64_t seldom_ns = (now_ns - i->waiting_since_ns) / (full ? 3 : 8);
    seldom_ns = seldom_ns < SELDOM_NS ? seldom_ns : SELDOM_NS;
    return wait_ns > seldom_ns ? wait_ns : seldom_ns;
}

/* One wait of the walk: prepares, steps once more (so that what changed
 * before the bell is seen), sleeps if it still has to wait. */
static enum exd_step step_or_sleep(struct exd_issuer *i)
{
    enum exd_step step = exd_stream_step(i->stream);
    if (step == EXD_STEP_AGAIN || step == EXD_STEP_DONE || step == EXD_STEP_FAILED)
        return step;
    if ((i->link_status = krn_link_flush(i->config.link)))
        return EXD_STEP_FAILED;
    struct shm_bell *bell = &worker(i)->issuer_bell;
    uint32_t ticket = shm_bell_prepare(bell);
    step = exd_stream_step(i->stream);
    uint64_t wait_ns;
    if (step == EXD_STEP_AGAIN || step == EXD_STEP_DONE || step == EXD_STEP_FAILED || cancelled(i) ||
        atomic_load(&i->stop) || !(wait_ns = walk_wait_ns(i, step)))
        shm_bell_cancel(bell);
    else {
        exd_stream_asleep(i->stream, step);
        shm_bell_wait(bell, ticket, wait_ns);
    }
    return step;
}

/* Watchdog over anything that counts up. */
struct watchdog {
    uint64_t last_change_ns, last_value, limit_ns;
};

static bool watchdog_expired(struct watchdog *w, uint64_t value)
{
    uint64_t now = shm_now_ns();
    if (value != w->last_value || !w->last_change_ns) {
        w->last_value = value;
        w->last_change_ns = now;
    }
    return now - w->last_change_ns > w->limit_ns;
}

/* Why no stream is run any more, in the words of whoever said so. */
static uint32_t stopping(struct exd_issuer *i, struct shm_error *err)
{
    pthread_mutex_lock(&i->lock);
    shm_error_set(err, ESHUTDOWN, "%s",
                  i->drain_why[0] ? i->drain_why : "expertd is stopping: read again when it is back");
    pthread_mutex_unlock(&i->lock);
    return SHM_RESULT_FAILED;
}

static uint32_t link_failed(struct exd_issuer *i, struct shm_error *err)
{
    shm_error_set(err, i->link_status, "worker %s: its link failed (%s); detached, it may attach again",
                  i->name, strerror(-i->link_status));
    return SHM_RESULT_FAILED;
}

/* Runs the walk to its end. Returns SHM_RESULT_*; FAILED fills err. */
static uint32_t walk_to_end(struct exd_issuer *i, struct shm_error *err)
{
    struct watchdog dog = {.limit_ns = i->config.watchdog_ns};
    for (enum exd_step step = EXD_STEP_AGAIN;;) {
        if (cancelled(i))
            return SHM_RESULT_CANCELLED;
        if (atomic_load(&i->stop))
            return stopping(i, err);
        if (step == EXD_STEP_DONE)
            return SHM_RESULT_OK;
        step = step_or_sleep(i);
        if (i->link_status)
            return link_failed(i, err);
        if (exd_stream_violation(i->stream, err))
            return SHM_RESULT_FAILED;
        if (step == EXD_STEP_FAILED) {
            exd_stream_failure(i->stream, err);
            return SHM_RESULT_FAILED;
        }
        if (step != EXD_STEP_AGAIN && watchdog_expired(&dog, exd_stream_progress(i->stream))) {
            exd_stream_stuck(i->stream, step, i->config.watchdog_ns, err);
            return SHM_RESULT_FAILED;
        }
    }
}

static bool consumed(struct exd_issuer *i)
{
    return exd_stream_consumed(i->stream) || cancelled(i);
}

/* After the last decision: everything lands and the worker releases it. */
static uint32_t wait_consumed(struct exd_issuer *i, struct shm_error *err)
{
    struct watchdog dog = {.limit_ns = i->config.watchdog_ns};
    for (;;) {
        if (exd_stream_violation(i->stream, err))
            return SHM_RESULT_FAILED;
        if (exd_stream_consumed(i->stream))
            return SHM_RESULT_OK;
        if (cancelled(i))
            return SHM_RESULT_CANCELLED;
        if ((i->link_status = krn_link_flush(i->config.link)))
            return link_failed(i, err);
        exd_stream_asleep(i->stream, EXD_STEP_DONE);
        if (!sleep_unless(i, consumed, stream_wait_ns(i, WAIT_NS)))
            return stopping(i, err);
        if (watchdog_expired(&dog, exd_stream_progress(i->stream))) {
            exd_stream_stuck(i->stream, EXD_STEP_DONE, i->config.watchdog_ns, err);
            return SHM_RESULT_FAILED;
        }
    }
}

/* After a cancellation: the next stream counts from an empty link, so however slow it is, all that is on it
 * lands first. */
static uint32_t wait_landed(struct exd_issuer *i, struct shm_error *err)
{
    struct watchdog dog = {.limit_ns = i->config.watchdog_ns};
    while ((i->link_status = krn_link_drain(i->config.link, WAIT_NS))) {
        if (i->link_status != -ETIMEDOUT)
            return link_failed(i, err);
        if (atomic_load(&i->stop))
            return stopping(i, err);
        if (watchdog_expired(&dog, krn_link_landed(i->config.link))) {
            exd_stream_stuck(i->stream, EXD_STEP_WAIT_DEPTH, i->config.watchdog_ns, err);
            return SHM_RESULT_FAILED;
        }
    }
    return SHM_RESULT_CANCELLED;
}

static void tell_held_off(struct exd_issuer *i, const struct exd_stream_plan *plan)
{
    const char *why = shm_held_off_text(plan->held_off);
    if (!why || plan->held_off == SHM_HELD_POLICY /* set on purpose */ ||
        i->held_off_told & 1u << plan->held_off)
        return;
    i->held_off_told |= 1u << plan->held_off;
    exd_log(EXD_LOG_INFO, "worker %s: routed stream held off for a chunk of %u tokens: %s (floor %u)",
            i->name, plan->tokens, why, plan->floor);
}

/* result and error text, then done_seq: the worker looks at nothing before it. */
static void finish(struct exd_issuer *i, uint32_t result, const struct shm_error *err)
{
    struct shm_worker *w = worker(i);
    if (result == SHM_RESULT_FAILED)
        snprintf(w->error_text, sizeof w->error_text, "%s", shm_error_text(err));
    atomic_store_explicit(&w->result, result, memory_order_relaxed);
    i->group_base = exd_stream_end_group(i->stream);
    atomic_store(&i->busy, false); /* first: a worker that sees done_seq may configure the link */
    /* release, pairs with the worker's acquire: result, error text, report */
    atomic_store_explicit(&w->done_seq, i->next_seq, memory_order_release);
    i->next_seq++;
    shm_bell_ring(&w->landed_bell);
}

/* One stream from its descriptor to done_seq. Returns false when the worker broke the protocol or the
 * watchdog ended it: no further stream is run for it. */
static bool run_stream(struct exd_issuer *i)
{
    struct shm_error err = {0};
    struct exd_stream_settings settings = exd_issuer_settings(i);
    struct exd_stream_plan plan;
    atomic_store(&i->busy, true);
    i->waiting_since_ns = 0;
    int rc = exd_stream_begin(i->stream, i->next_seq, i->group_base, &settings, &plan, &err);
    if (rc) {
        finish(i, SHM_RESULT_FAILED, &err);
        i->config.fault(i->config.ctx, shm_error_text(&err));
        return false;
    }
    pthread_mutex_lock(&i->lock);
    if (i->drain_why[0])
        shm_error_set(&err, ESHUTDOWN, "%s", i->drain_why);
    pthread_mutex_unlock(&i->lock);

    bool keep = true;
    uint32_t result = SHM_RESULT_FAILED;
    if (!err.code) {
        tell_held_off(i, &plan);
        result = walk_to_end(i, &err);
        if (result == SHM_RESULT_OK)
            result = wait_consumed(i, &err);
        if (result == SHM_RESULT_CANCELLED)
            result = wait_landed(i, &err);
        keep = result != SHM_RESULT_FAILED;
    }
    exd_stream_end(i->stream, result, STOP_DRAIN_NS, i->config.trace ? i->name : NULL);
    finish(i, result, &err);
    if (i->config.trace_file)
        exd_stream_trace_write(i->stream, i->config.trace_file);
    if (!keep && !atomic_load(&i->stop)) /* a stop is no fault of the worker */
        i->config.fault(i->config.ctx, shm_error_text(&err));
    return keep;
}

static void *run(void *arg)
{
    struct exd_issuer *i = arg;
    prctl(PR_SET_NAME, "issuer");
    if (i->config.link->poll_ns)
        prctl(PR_SET_TIMERSLACK, 1ul); /* the default, 50 us, is longer than the poll */
    while (!atomic_load(&i->stop)) {
        if (!stream_posted(i)) {
            sleep_unless(i, stream_posted, UINT64_C(10) * WAIT_NS);
            continue;
        }
        if (!run_stream(i))
            break;
    }
    return NULL;
}

static int check_settings(const struct exd_stream_settings *s, struct shm_error *err)
{
    if (s->policy != SHM_POLICY_FULL && s->policy != SHM_POLICY_ROUTED)
        return shm_error_set(err, EINVAL, "stream policy %u is unknown: use full or routed", s->policy);
    if (s->order < SHM_ORDER_INDEX || s->order > SHM_ORDER_PREDICTED)
        return shm_error_set(err, EINVAL, "stream order %u is unknown: use index, recent or predicted",
                             s->order);
    if (!s->depth || s->depth > SHM_RING_MAX)
        return shm_error_set(err, EINVAL, "stream depth %u is not in 1..%u", s->depth, SHM_RING_MAX);
    return 0;
}

int exd_issuer_start(const struct exd_issuer_config *config, struct exd_issuer **ret_issuer,
                     struct shm_error *err)
{
    int rc = check_settings(&config->settings, err);
    if (rc)
        return rc;
    struct exd_issuer *i = calloc(1, sizeof *i);
    if (!i)
        return shm_error_set(err, ENOMEM, "issuer of worker %s: no memory; free some", config->name);
    i->config = *config;
    if (!i->config.watchdog_ns)
        i->config.watchdog_ns = WATCHDOG_DEFAULT;
    snprintf(i->name, sizeof i->name, "%s", config->name ? config->name : "?");
    i->config.name = i->name;
    i->settings = config->settings;
    i->next_seq = 1;
    pthread_mutex_init(&i->lock, NULL);
    i->stream = exd_stream_new(config->arena, &config->control, &config->geometry, config->link, i->name);
    if (!i->stream || (config->trace_file && exd_stream_trace(i->stream))) {
        rc = shm_error_set(err, ENOMEM, "issuer of worker %s: no memory for its tables; free some", i->name);
        goto fail;
    }
    exd_stream_events(i->stream, config->events);
    rc = pthread_create(&i->thread, NULL, run, i);
    if (rc) {
        rc = shm_error_set(err, rc, "issuer of worker %s: can't start its thread: %s%s", i->name,
                           strerror(rc), shm_error_remedy(rc));
        goto fail;
    }
    *ret_issuer = i;
    return 0;
fail:
    exd_stream_free(&i->stream);
    pthread_mutex_destroy(&i->lock);
    free(i);
    return rc;
}

int exd_issuer_configure(struct exd_issuer *i, const struct exd_stream_settings *settings,
                         struct shm_error *err)
{
    struct exd_stream_settings s = exd_issuer_settings(i);
    if (settings->policy)
        s.policy = settings->policy;
    if (settings->order)
        s.order = settings->order;
    if (settings->depth)
        s.depth = settings->depth;
    if (settings->floor)
        s.floor = settings->floor;
    int rc = check_settings(&s, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&i->lock);
    i->settings = s;
    pthread_mutex_unlock(&i->lock);
    return 0;
}

struct exd_stream_settings exd_issuer_settings(struct exd_issuer *i)
{
    pthread_mutex_lock(&i->lock);
    struct exd_stream_settings s = i->settings;
    pthread_mutex_unlock(&i->lock);
    return s;
}

bool exd_issuer_busy(struct exd_issuer *i)
{
    return atomic_load(&i->busy);
}

void exd_issuer_drain(struct exd_issuer *i, const char *why)
{
    pthread_mutex_lock(&i->lock);
    snprintf(i->drain_why, sizeof i->drain_why, "%s", why);
    pthread_mutex_unlock(&i->lock);
}

void exd_issuer_stop(struct exd_issuer **issuer)
{
    struct exd_issuer *i = *issuer;
    if (!i)
        return;
    atomic_store(&i->stop, true);
    shm_bell_ring(&worker(i)->issuer_bell);
    pthread_join(i->thread, NULL);
    exd_stream_free(&i->stream);
    pthread_mutex_destroy(&i->lock);
    free(i);
    *issuer = NULL;
}
