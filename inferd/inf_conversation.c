/* SPDX-License-Identifier: MIT */
#include "inferd/inf_conversation.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int inf_conversation_create(const struct inf_engine *e, struct shm_error *err,
                            struct inf_conversation **ret_conversation)
{
    const struct inf_model *m = e->model;
    struct inf_conversation *c = calloc(1, sizeof *c);
    if (!c)
        return -ENOMEM;
    c->device = e->device;
    c->layers = m->hparams.layers;
    c->experts = m->hparams.experts;
    c->capacity = e->ctx;
    size_t pairs = (size_t)c->layers * c->experts;
    c->tokens = calloc(c->capacity, sizeof *c->tokens);
    c->recent = calloc(pairs, sizeof *c->recent);
    c->counts = calloc(pairs, sizeof *c->counts);
    int rc = -ENOMEM;
    if (!c->tokens || !c->recent || !c->counts ||
        (rc = e->device->ops->kv_create(e->device, e->ctx, err, &c->kv)))
        goto fail;
    *ret_conversation = c;
    return 0;
fail:
    inf_conversation_destroy(&c);
    return rc;
}

void inf_conversation_destroy(struct inf_conversation **conversation)
{
    struct inf_conversation *c = *conversation;
    if (!c)
        return;
    c->device->ops->kv_destroy(c->device, &c->kv);
    free(c->tokens);
    free(c->recent);
    free(c->counts);
    free(c);
    *conversation = NULL;
}

void inf_conversation_truncate(struct inf_conversation *c, uint32_t n)
{
    if (n < c->n)
        c->n = n; /* the keys behind it are written over before they are read */
}

int inf_conversation_mark(const struct inf_conversation *c, struct inf_mark *mark)
{
    size_t bytes = sizeof *c->recent * c->layers * c->experts;
    uint32_t *recent = mark->recent ? mark->recent : malloc(bytes);
    if (!recent)
        return -ENOMEM;
    memcpy(recent, c->recent, bytes);
    *mark = (struct inf_mark){.n = c->n, .recent_tokens = c->recent_tokens, .recent = recent};
    return 0;
}

void inf_conversation_rewind(struct inf_conversation *c, const struct inf_mark *mark)
{
    inf_conversation_truncate(c, mark->n);
    memcpy(c->recent, mark->recent, sizeof *c->recent * c->layers * c->experts);
    c->recent_tokens = mark->recent_tokens;
}

void inf_mark_clear(struct inf_mark *mark)
{
    free(mark->recent);
    *mark = (struct inf_mark){0};
}

/* Adds the chunk's routing to the recent counts. */
static void remember(struct inf_conversation *c, uint32_t tokens)
{
    size_t pairs = (size_t)c->layers * c->experts;
    for (size_t i = 0; i < pairs; i++)
        c->recent[i] += c->counts[i];
    c->recent_tokens += tokens;
    while (c->recent_tokens > INF_RECENT_TOKENS) {
        for (size_t i = 0; i < pairs; i++)
            c->recent[i] /= 2;
        c->recent_tokens /= 2;
    }
}

void inf_stream_sum_add(struct inf_stream_sum *sum, const struct inf_chunk *chunk)
{
    const struct shm_report *r = &chunk->stream;
    if (!sum->chunks || chunk->tokens > sum->tokens_max) {
        sum->tokens_max = chunk->tokens;
        sum->policy = r->policy;
        sum->order = r->order;
        sum->depth = r->depth;
        sum->ring = r->ring;
        sum->held_off = r->held_off;
    }
    sum->chunks++;
    sum->routed += r->routed;
    sum->entries += r->entries;
    sum->copied += r->copied;
    sum->dropped += r->dropped;
    sum->wasted += r->wasted;
    sum->bytes += r->bytes;
    sum->wasted_bytes += r->wasted_bytes;
    sum->link_ns += r->link_ns;
    sum->span_ns += r->span_ns;
    sum->wait_ns += r->wait_ns;
    sum->cpu_ns += r->cpu_ns;
}

/* The caller's callbacks, seen from inside a pass. */
struct relay {
    const struct inf_read_options *o;
    const struct inf_engine *engine;
    uint32_t position; /* of the chunk */
    uint32_t tokens;   /* of the chunk */
    double before;     /* tokens read before it in this call */
};

static void relay_logits(void *ctx, uint32_t position, uint32_t rows, const float *logits)
{
    const struct relay *r = ctx;
    r->o->on_logits(r->o->ctx, position, rows, logits);
}

static void relay_routes(void *ctx, uint32_t layer, uint32_t tokens, const uint32_t *ids,
                         const float *weights)
{
    const struct relay *r = ctx;
    r->o->on_routes(r->o->ctx, layer, r->position, tokens, ids, weights);
}

static void relay_layer(void *ctx, uint32_t layer)
{
    const struct relay *r = ctx;
    r->o->on_progress(r->o->ctx,
                      r->before + (double)r->tokens * (layer + 1) / r->engine->model->hparams.layers);
}

static int read_chunk(struct inf_engine *e, struct inf_conversation *c, const int32_t *ids, uint32_t tokens,
                      bool last, double before, const struct inf_read_options *o, struct shm_error *err)
{
    const struct inf_settings *set = &e->store.settings;
    struct relay relay = {.o = o, .engine = e, .position = c->n, .tokens = tokens, .before = before};
    struct inf_pass pass = {.ids = (const uint32_t *)ids,
                            .tokens = tokens,
                            .position = c->n,
                            .generated = o->generated,
                            .kv = c->kv,
                            .stream = e->store.stream,
                            .resident = (const uint8_t *const *)e->store.resident,
                            .demand = tokens < set->floor,
                            .counts = c->counts,
                            .cancel = e->store.config.cancel,
                            .first_logit = tokens,
                            .ctx = &relay};
    /* Predictions cost a router a layer: only where they are used. */
    pass.predict = set->order == SHM_ORDER_PREDICTED && set->policy == SHM_POLICY_ROUTED &&
                   tokens >= set->floor && !o->known;
    if (o->on_logits && o->logits == INF_LOGITS_ALL)
        pass.first_logit = 0;
    else if (o->on_logits && o->logits == INF_LOGITS_LAST && last)
        pass.first_logit = tokens - 1;
    pass.on_logits = o->on_logits ? relay_logits : NULL;
    pass.on_routes = o->on_routes ? relay_routes : NULL;
    pass.on_layer = o->on_progress ? relay_layer : NULL;

    /* A generated token that needs nothing of expertd does not wait for it either. */
    if (o->generated && e->store.all_resident && pass.demand) {
        pass.stream = NULL;
        memset(c->counts, 0, sizeof *c->counts * c->layers * c->experts);
    }

    struct inf_chunk chunk = {
        .tokens = tokens,
        .position = c->n,
        .stream = {.policy = SHM_POLICY_DEMAND, .order = set->order, .depth = set->depth}};
    uint64_t start_ns = shm_now_ns();
    const uint32_t *predicted = NULL;
    int rc = e->model->arch->embed(e->device, &pass, err);
    if (!rc && pass.predict)
        rc = e->device->ops->predict_first(e->device, &pass, &predicted, err);
    if (pass.stream)
        inf_stream_know(pass.stream, o->known);
    if (!rc && pass.stream)
        rc = inf_stream_begin(pass.stream, tokens, c->n, predicted, c->recent, err);
    if (rc)
        return rc;
    rc = e->model->arch->forward(e->model, e->device, &pass, err);
    if (!rc && pass.stream)
        rc = inf_stream_end(pass.stream, &chunk.stream, err);
    if (rc) {
        inf_stream_cancel(e->store.stream, NULL); /* a lost stream shows in inf_store_alive */
        return rc;
    }
    chunk.ns = shm_now_ns() - start_ns;
    if (pass.stream)
        chunk.stream.wait_ns = inf_stream_wait_ns(pass.stream);
    memcpy(c->tokens + c->n, ids, tokens * sizeof *ids);
    c->n += tokens;
    remember(c, tokens);
    if (o->on_chunk)
        o->on_chunk(o->ctx, &chunk);
    return 0;
}

int inf_read(struct inf_engine *e, struct inf_conversation *c, const int32_t *ids, size_t n,
             const struct inf_read_options *o, struct shm_error *err)
{
    if (!e->store.stream)
        return shm_error_set(err, ESHUTDOWN, "no expertd is attached: start expertd and repeat the turn");
    if (n > c->capacity - c->n)
        return shm_error_set(err, E2BIG,
                             "%zu tokens do not fit: the context holds %u, %u are in use: "
                             "shorten the prompt or raise --ctx",
                             n, c->capacity, c->n);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= e->model->hparams.vocab)
            return shm_error_set(err, EINVAL, "token %d is not in the vocabulary of %u", ids[i],
                                 e->model->hparams.vocab);
    size_t chunks = (n + e->chunk - 1) / e->chunk;
    if (o->known && chunks > 1)
        return shm_error_set(err, EINVAL, "the routing of %zu tokens cannot be told ahead: the chunk is %u",
                             n, e->chunk);
    for (size_t i = 0, done = 0; i < chunks; i++) {
        size_t rest = n - done;
        uint32_t tokens = (uint32_t)((rest + (chunks - i) - 1) / (chunks - i));
        int rc = read_chunk(e, c, ids + done, tokens, i + 1 == chunks, (double)done, o, err);
        if (rc)
            return rc;
        done += tokens;
    }
    return 0;
}
