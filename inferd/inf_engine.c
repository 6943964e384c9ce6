/* SPDX-License-Identifier: MIT */
#include "inferd/inf_engine.h"

#include "inferd/inf_kv.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEARCH_STACK (512u << 10) /* the default's address space may be more than a limit leaves */

static struct inf_string_table table_of(const struct shm_arena_view *a, const struct shm_strings *s)
{
    const char *catalog = (const char *)a->catalog;
    return (struct inf_string_table){.n = s->count,
                                     .offsets = (const uint32_t *)(catalog + s->offsets),
                                     .bytes = catalog + s->bytes,
                                     .size_bytes = a->arena->catalog_bytes - s->bytes};
}

int inf_engine_tokenizer(const struct shm_arena_view *a, struct shm_error *err,
                         struct inf_tokenizer **ret_tokenizer)
{
    const struct shm_tokenizer *t = &a->catalog->tokenizer;
    const struct inf_tokenizer_src src = {
        .tokens = table_of(a, &t->tokens),
        .types = t->types ? (const int32_t *)((const char *)a->catalog + t->types) : NULL,
        .merges = table_of(a, &t->merges),
        .pre = shm_arena_string(a, t->pre),
        .pre_len = t->pre.bytes,
        .bos_id = t->bos == SHM_TOKEN_NONE ? -1 : (int32_t)t->bos,
        .eos_id = t->eos == SHM_TOKEN_NONE ? -1 : (int32_t)t->eos,
        .add_bos = t->add_bos != 0,
        .spm = t->model.bytes == 5 && !memcmp(shm_arena_string(a, t->model), "llama", 5),
        .scores = t->scores ? (const float *)((const char *)a->catalog + t->scores) : NULL,
        .add_space_prefix = t->add_space_prefix != 0};
    return inf_tokenizer_create(&src, err, ret_tokenizer);
}

static int copy_template(struct inf_engine *e)
{
    struct shm_string s = e->store.arena.catalog->tokenizer.chat_template;
    e->chat_template = malloc((size_t)s.bytes + 1);
    if (!e->chat_template)
        return -ENOMEM;
    memcpy(e->chat_template, shm_arena_string(&e->store.arena, s), s.bytes);
    e->chat_template[s.bytes] = '\0';
    e->chat_template_bytes = s.bytes;
    return 0;
}

static int open_device(const struct inf_engine_config *config, bool host, struct shm_error *err,
                       struct inf_device **ret_device)
{
    if (host)
        return inf_device_host_open(config->threads, err, ret_device);
    return inf_device_cuda_open(config->gpu, config->store.poison, err, ret_device);
}

/* What a start needs beside the device: done by another thread while the driver makes its context, which
 * takes longer. */
struct search {
    struct inf_engine *e;
    pthread_t thread;
    bool running;
    int rc;
    struct shm_error err;
};

static void *find(void *arg)
{
    struct search *s = arg;
    struct inf_engine *e = s->e;
    uint64_t at_ns = shm_now_ns();
    if ((s->rc = inf_store_find(&e->store, 0, &s->err)) == 0 &&
        (s->rc = inf_model_open(&e->store.arena, &s->err, &e->model)) == 0 &&
        (s->rc = inf_engine_tokenizer(&e->store.arena, &s->err, &e->tokenizer)) == 0)
        s->rc = copy_template(e);
    e->phases.find_ns = shm_now_ns() - at_ns;
    return NULL;
}

static void begin_search(struct search *s, struct inf_engine *e)
{
    pthread_attr_t attr;
    *s = (struct search){.e = e};
    if (e->model)
        return; /* found before, for another device */
    if (pthread_attr_init(&attr) == 0) {
        pthread_attr_setstacksize(&attr, SEARCH_STACK);
        s->running = pthread_create(&s->thread, &attr, find, s) == 0;
        pthread_attr_destroy(&attr);
    }
    if (!s->running)
        find(s);
}

static int end_search(struct search *s)
{
    if (s->running)
        pthread_join(s->thread, NULL);
    s->running = false;
    return s->rc;
}

static void forget(struct inf_engine *e)
{
    inf_store_close(&e->store);
    inf_kv_pool_destroy(&e->pool);
    inf_model_close(&e->model);
    inf_device_close(&e->device);
    inf_tokenizer_destroy(&e->tokenizer);
    free(e->chat_template);
    e->chat_template = NULL;
}

/* A start on one device. What was found stays where only the device cannot be opened, so that `auto` goes on
 * with the host. */
static int open_on(struct inf_engine *e, const struct inf_engine_config *config, bool host,
                   struct shm_error *err)
{
    struct search search;
    if (!e->model)
        inf_store_init(&e->store, &config->store, NULL);
    begin_search(&search, e);
    int rc = open_device(config, host, err, &e->device);
    uint64_t at_ns = shm_now_ns();
    int found = end_search(&search);
    if (rc)
        return rc;
    if (found) {
        *err = search.err;
        return found;
    }
    e->store.device = e->device;
    e->device->profile = config->profile;
    if ((rc = inf_store_join(&e->store, err)))
        return rc;
    uint64_t find_ns = e->phases.find_ns;
    e->phases = e->device->phases;
    e->phases.find_ns = find_ns;
    e->phases.attach_ns = shm_now_ns() - at_ns;
    at_ns = shm_now_ns();
    e->ctx = config->ctx;
    e->chunk = config->chunk > INF_CHUNK_MAX ? INF_CHUNK_MAX : config->chunk;
    uint32_t kv_tokens = config->kv_tokens;
    if ((rc = e->device->ops->set_model(e->device, e->model, err)) ||
        (rc = e->device->ops->plan(e->device, config->conversations, &e->chunk, &e->ctx, &kv_tokens, err)) ||
        (rc = inf_kv_pool_create(e->device, kv_tokens, err, &e->pool)))
        return rc;
    e->chunk_planned = e->chunk;
    e->phases.dense_ns = shm_now_ns() - at_ns;
    return 0;
}

static int cuda_failed(int rc, struct shm_error *err)
{
    struct shm_error why = *err;
    return shm_error_set(err, -rc, "--device cuda: %.420s; --device host computes on the CPU",
                         shm_error_text(&why));
}

int inf_engine_check(const struct inf_engine_config *config, struct shm_error *err)
{
    if (config->device != INF_DEVICE_CUDA)
        return 0;
    inf_device_cuda_prepare();
    int rc = inf_device_cuda_check(config->gpu, err);
    return rc ? cuda_failed(rc, err) : 0;
}

int inf_engine_open(const struct inf_engine_config *config, struct shm_error *err,
                    struct inf_engine **ret_engine)
{
    struct inf_engine *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    uint64_t start_ns = shm_now_ns();
    int rc;
    if (config->device != INF_DEVICE_HOST)
        inf_device_cuda_prepare();
    if (config->device == INF_DEVICE_AUTO) {
        struct shm_error why = {0};
        rc = open_on(e, config, false, &why);
        /* Without a GPU, or beside an expertd without one, the host does it, and says why it does. */
        if (rc) {
            if (e->device || !e->tokenizer || !e->chat_template)
                forget(e);
            rc = open_on(e, config, true, err);
            if (!rc)
                snprintf(e->device->note, sizeof e->device->note, "%.250s", shm_error_text(&why));
        }
    } else {
        rc = open_on(e, config, config->device == INF_DEVICE_HOST, err);
        if (rc && config->device == INF_DEVICE_CUDA && !e->device)
            cuda_failed(rc, err);
    }
    if (rc)
        goto fail;
    if (inf_tokenizer_size(e->tokenizer) > e->model->hparams.vocab) {
        rc = shm_error_set(err, EINVAL, "model '%s': %u tokens beside an embedding of %u rows",
                           e->model->hparams.name, inf_tokenizer_size(e->tokenizer), e->model->hparams.vocab);
        goto fail;
    }
    e->attach_ns = e->phases.ready_ns = shm_now_ns() - start_ns;
    *ret_engine = e;
    return 0;
fail:
    inf_engine_close(&e);
    return rc;
}

static int attach_again(struct inf_engine *e, uint32_t wait_ms, struct shm_error *err)
{
    uint64_t start_ns = shm_now_ns();
    int rc = inf_store_attach(&e->store, wait_ms, err);
    if (rc)
        return rc;
    /* The old model points into a mapping that is gone. */
    struct inf_model *model;
    if ((rc = inf_model_open(&e->store.arena, err, &model)))
        return rc;
    rc = e->device->ops->set_model(e->device, model, err);
    if (rc) {
        inf_model_close(&model);
        return rc == -EINVAL
                   ? shm_error_set(err, rc,
                                   "expertd's model has another shape than before: start inferd anew")
                   : rc;
    }
    inf_model_close(&e->model);
    e->model = model;
    e->attach_ns = shm_now_ns() - start_ns;
    return 0;
}

int inf_engine_ensure(struct inf_engine *e, uint32_t wait_ms, bool *ret_again, struct shm_error *err)
{
    const bool again = !inf_store_alive(&e->store);
    int rc = again ? attach_again(e, wait_ms, err) : 0;
    if (ret_again)
        *ret_again = again && !rc;
    return rc;
}

/* What CONFIGURE can do: it takes 0 for "as it is", and a floor below the attached one only on the host. */
static bool same_session(const struct inf_store_config *a, const struct inf_store_config *b)
{
    return a->ring == b->ring && a->floor == b->floor && (!a->policy || b->policy) &&
           (!a->order || b->order) && (!a->depth || b->depth) && (a->link_gbps == 0 || b->link_gbps != 0) &&
           (a->link_latency_us == 0 || b->link_latency_us != 0);
}

int inf_engine_configure(struct inf_engine *e, const struct inf_engine_config *config, struct shm_error *err)
{
    struct inf_store *s = &e->store;
    const struct inf_store_config *to = &config->store;
    const struct inf_store_config old = s->config;
    const bool same = same_session(&old, to);
    e->chunk = config->chunk && config->chunk < e->chunk_planned ? config->chunk : e->chunk_planned;
    s->config.ring = to->ring;
    s->config.floor = to->floor;
    s->config.policy = to->policy;
    s->config.order = to->order;
    s->config.depth = to->depth;
    s->config.link_gbps = to->link_gbps;
    s->config.link_latency_us = to->link_latency_us;
    if (!same)
        return attach_again(e, 0, err);
    if (old.policy == to->policy && old.order == to->order && old.depth == to->depth &&
        old.link_gbps == to->link_gbps && old.link_latency_us == to->link_latency_us)
        return 0;
    const struct inf_settings set = {.policy = to->policy,
                                     .order = to->order,
                                     .depth = to->depth,
                                     .link_gbps = to->link_gbps,
                                     .link_latency_us = to->link_latency_us};
    return inf_store_configure(s, &set, err);
}

void inf_engine_close(struct inf_engine **engine)
{
    struct inf_engine *e = *engine;
    if (!e)
        return;
    forget(e);
    free(e);
    *engine = NULL;
}
