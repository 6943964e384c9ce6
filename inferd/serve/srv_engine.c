/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_engine.h"

#include "inferd/inf_cmd.h"
#include "inferd/serve/srv_engine_priv.h"
#include "proto/prt_log.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RETRY_MS    500u  /* an attempt to attach */
#define PARK_MS     2000u /* at the end, for what is not parked yet */
#define HELPERS_MAX 8u    /* threads that sample, and fetch parked blocks */

const char *srv_state_name(enum srv_state state)
{
    static const char *const name[] = {"starting", "ready", "away", "failed", "ended"};
    return name[state];
}

static void tell(struct srv_engine *e, enum srv_state state, const char *error)
{
    pthread_mutex_lock(&e->lock);
    e->status.state = state;
    snprintf(e->status.error, sizeof e->status.error, "%s", error ? error : "");
    pthread_mutex_unlock(&e->lock);
    uint64_t one = 1;
    if (write(e->config.event_fd, &one, sizeof one) < 0)
        return; /* full: readable already */
}

/* Makes what others may look at. */
void srv_engine_publish(struct srv_engine *e)
{
    const struct inf_store *s = &e->engine->store;
    pthread_mutex_lock(&e->lock);
    struct srv_status *t = &e->status;
    t->session = s->session;
    t->settings = s->settings;
    t->ring = s->layout.geometry.ring;
    t->ring_bytes = s->ring.bytes;
    t->resident = s->config.resident;
    t->resident_bytes = s->resident_bytes;
    t->attach_ns = e->engine->attach_ns;
    t->activation_bytes = e->engine->device->activation_bytes;
    t->kv.blocks = e->engine->pool->blocks;
    t->kv.free = e->engine->pool->free;
    if (e->prefix)
        inf_prefix_stats(e->prefix, &t->prefix);
    t->kv.reserved = srv_engine_reserved(e);
    t->kv.block_bytes = e->engine->device->kv_block_bytes;
    pthread_mutex_unlock(&e->lock);
}

static void fill_info(struct srv_engine *e)
{
    const struct inf_engine *g = e->engine;
    const struct shm_hparams *h = &g->model->hparams;
    struct srv_info *i = &e->info;
    snprintf(i->model, sizeof i->model, "%.127s", h->name);
    i->vocab = h->vocab;
    i->ctx = g->ctx;
    i->chunk = g->chunk;
    i->kv_tokens = g->pool->blocks * INF_KV_BLOCK;
    i->kv_mib = (double)(g->pool->blocks * g->device->kv_block_bytes) / 1048576;
    i->parallel = e->config.parallel;
    i->layers = h->layers;
    i->experts = h->experts;
    i->experts_used = h->experts_used;
    snprintf(i->device, sizeof i->device, "%s", g->device->text);
    snprintf(i->device_note, sizeof i->device_note, "%s", g->device->note);
    i->tokenizer = g->tokenizer;
    i->chat_template = g->chat_template;
    i->chat_template_bytes = g->chat_template_bytes;
    atomic_store(&e->informed, true);
}

static uint32_t helpers(void)
{
    cpu_set_t set;
    uint32_t n = sched_getaffinity(0, sizeof set, &set) ? 1 : (uint32_t)CPU_COUNT(&set);
    return n < HELPERS_MAX ? n : HELPERS_MAX;
}

static int open_engine(struct srv_engine *e, struct shm_error *err)
{
    struct inf_options *o = e->config.options;
    o->engine.store.cancel = srv_queue_interrupt(e->config.queue);
    o->engine.store.server_fd = srv_stats_fd(e->config.stats);
    o->engine.conversations = e->config.parallel;
    o->engine.kv_tokens = o->serve.kv_tokens;
    int rc = inf_cmd_launch(o, err);
    if (rc || (rc = inf_engine_open(&o->engine, err, &e->engine)))
        return rc;
    if (e->config.parallel > e->engine->chunk)
        e->config.parallel = e->engine->chunk; /* a step of all must fit in a pass */
    e->vocab = srv_vocab_create(e->engine->tokenizer, e->engine->model->hparams.vocab);
    if (!e->vocab)
        return shm_error_set(err, ENOMEM, "no memory for the vocabulary's tables: free some");
    e->held = calloc(e->engine->pool->blocks, sizeof *e->held);
    if (!e->held)
        return shm_error_set(err, ENOMEM, "no memory for the table of blocks: free some");
    if (e->config.parallel > 1 && (rc = krn_pool_create(helpers(), &e->pool)))
        return shm_error_set(err, -rc, "threads that sample and fetch cannot be started: %s", strerror(-rc));
    const struct inf_prefix_config prefix = {.pool = e->engine->pool,
                                             .store = &e->engine->store,
                                             .exact = o->serve.exact_prefix,
                                             .threads = e->pool};
    if ((rc = inf_prefix_create(&prefix, &e->prefix)))
        return rc;
    return 0;
}

int srv_engine_reattach(struct srv_engine *e, uint32_t wait_ms, struct shm_error *err)
{
    uint64_t start_ns = shm_now_ns();
    bool again;
    srv_queue_pause(e->config.queue);
    tell(e, SRV_AWAY, "expertd is gone; waiting for the next one");
    prt_log(PRT_LOG_WARNING, "expertd is gone: new requests get 503 until the next one is attached");
    for (;;) {
        *err = (struct shm_error){0};
        int rc = inf_engine_ensure(e->engine, RETRY_MS, &again, err);
        if (!rc)
            break;
        if (rc == -EUCLEAN || rc == -EINVAL)
            return rc;
        srv_loop_drop_cancelled(e);
        if (wait_ms && shm_now_ns() - start_ns > (uint64_t)wait_ms * 1000000)
            return shm_error_set(err, ESHUTDOWN, "expertd is away: try again when it is back");
        if (!e->n_seq && srv_queue_finished(e->config.queue))
            return -ECANCELED;
        usleep(20000);
    }
    srv_stats_attached(e->config.stats);
    prt_log(PRT_LOG_NOTICE, "attached to the next expertd in %.1f ms", (double)e->engine->attach_ns / 1e6);
    srv_engine_publish(e);
    srv_queue_open(e->config.queue);
    tell(e, SRV_READY, NULL);
    return 0;
}

static void *run(void *ctx)
{
    struct srv_engine *e = ctx;
    struct shm_error err = {0};
    int rc = open_engine(e, &err);
    if (!rc) {
        fill_info(e);
        srv_engine_publish(e);
        srv_queue_open(e->config.queue);
        tell(e, SRV_READY, NULL);
        rc = srv_loop_run(e, &err);
        if (!rc)
            inf_prefix_flush(e->prefix, PARK_MS);
    }
    if (rc) {
        const char *why = err.code ? shm_error_text(&err) : strerror(-rc);
        srv_queue_close(e->config.queue, rc, why);
        tell(e, SRV_FAILED, why);
    } else {
        tell(e, SRV_ENDED, NULL);
    }
    /* Others use the tokenizer until they finish; and a device is closed by the thread that opened it. */
    while (!srv_queue_finished(e->config.queue))
        usleep(10000);
    inf_prefix_destroy(&e->prefix);
    free(e->held);
    krn_pool_destroy(&e->pool);
    srv_vocab_destroy(&e->vocab);
    inf_engine_close(&e->engine);
    return NULL;
}

int srv_engine_start(const struct srv_engine_config *config, struct srv_engine **ret_engine)
{
    struct srv_engine *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->config = *config;
    pthread_mutex_init(&e->lock, NULL);
    int rc = pthread_create(&e->thread, NULL, run, e);
    if (rc) {
        pthread_mutex_destroy(&e->lock);
        free(e);
        return -rc;
    }
    *ret_engine = e;
    return 0;
}

void srv_engine_join(struct srv_engine **engine)
{
    struct srv_engine *e = *engine;
    if (!e)
        return;
    pthread_join(e->thread, NULL);
    pthread_mutex_destroy(&e->lock);
    while (e->n_logits)
        free(e->logits[--e->n_logits]);
    free(e);
    *engine = NULL;
}

enum srv_state srv_engine_state(struct srv_engine *e)
{
    pthread_mutex_lock(&e->lock);
    enum srv_state state = e->status.state;
    pthread_mutex_unlock(&e->lock);
    return state;
}

void srv_engine_status(struct srv_engine *e, struct srv_status *ret_status)
{
    pthread_mutex_lock(&e->lock);
    *ret_status = e->status;
    pthread_mutex_unlock(&e->lock);
}

const struct srv_info *srv_engine_info(struct srv_engine *e)
{
    return atomic_load(&e->informed) ? &e->info : NULL;
}
