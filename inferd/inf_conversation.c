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
    c->layers = m->hparams.layers;
    c->experts = m->hparams.experts;
    c->capacity = e->ctx;
    size_t pairs = (size_t)c->layers * c->experts;
    c->tokens = calloc(c->capacity, sizeof *c->tokens);
    c->recent = calloc(pairs, sizeof *c->recent);
    c->counts = calloc(pairs, sizeof *c->counts);
    int rc = -ENOMEM;
    if (!c->tokens || !c->recent || !c->counts || (rc = inf_kv_create(e->pool, e->ctx, &c->kv))) {
        shm_error_set(err, -rc, "no memory for a conversation: free some");
        goto fail;
    }
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
    inf_kv_destroy(&c->kv);
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
    inf_kv_truncate(c->kv, c->n);
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

/* One pass, and the caller's callbacks seen from inside it. */
struct batch {
    const struct inf_read_options *o;
    const struct inf_engine *engine;
    const struct inf_piece *piece;
    uint32_t pieces, tokens;
    double before; /* tokens read before it in this call */
    struct inf_pass_span span[INF_SPANS_MAX];
    uint32_t held[INF_SPANS_MAX]; /* blocks of each before */
};

static void relay_logits(void *ctx, uint32_t span, uint32_t position, uint32_t rows, const float *logits)
{
    const struct batch *b = ctx;
    b->o->on_logits(b->o->ctx, span, position, rows, logits);
}

static void relay_routes(void *ctx, uint32_t layer, uint32_t tokens, const uint32_t *ids,
                         const float *weights)
{
    const struct batch *b = ctx;
    const uint32_t top_k = b->engine->model->shape.top_k;
    (void)tokens;
    for (uint32_t i = 0; i < b->pieces; i++) {
        const struct inf_pass_span *s = &b->span[i];
        b->o->on_routes(b->o->ctx, i, layer, s->position, s->tokens, ids, weights);
        ids += (size_t)s->tokens * top_k;
        weights += (size_t)s->tokens * top_k;
    }
}

static void relay_layer(void *ctx, uint32_t layer)
{
    const struct batch *b = ctx;
    b->o->on_progress(b->o->ctx,
                      b->before + (double)b->tokens * (layer + 1) / b->engine->model->hparams.layers);
}

/* Adds the pass's routing to the recent counts of those who were in it. Whose token chose an expert is not
 * known: counts are dealt out by tokens, their remainders to another token at each expert. */
static void remember(const struct batch *b, const uint32_t *counts)
{
    const struct inf_conversation *first = b->piece[0].c;
    const size_t pairs = (size_t)first->layers * first->experts;
    uint32_t turn = 0;
    for (size_t k = 0; k < pairs; k++, turn = turn + 1 < b->tokens ? turn + 1 : 0) {
        uint64_t sum = turn;
        for (uint32_t i = 0; counts[k] && i < b->pieces; i++) {
            sum += (uint64_t)counts[k] * b->piece[i].n;
            if (sum >= b->tokens) { /* rarely, where an expert has fewer tokens than there are pieces */
                b->piece[i].c->recent[k] += (uint32_t)(sum / b->tokens);
                sum %= b->tokens;
            }
        }
    }
    for (uint32_t i = 0; i < b->pieces; i++) {
        struct inf_conversation *c = b->piece[i].c;
        for (c->recent_tokens += b->piece[i].n; c->recent_tokens > INF_RECENT_TOKENS; c->recent_tokens /= 2)
            for (size_t k = 0; k < pairs; k++)
                c->recent[k] /= 2;
    }
}

/* Blocks for what is read, and the spans; all or none. */
static int prepare(struct batch *b, struct shm_error *err)
{
    for (uint32_t i = 0; i < b->pieces; i++) {
        const struct inf_piece *p = &b->piece[i];
        struct inf_conversation *c = p->c;
        uint32_t first = p->n;
        if (b->o->on_logits && p->logits == INF_LOGITS_ALL)
            first = 0;
        else if (b->o->on_logits && p->logits == INF_LOGITS_LAST)
            first = p->n - 1;
        b->held[i] = c->kv->blocks;
        b->span[i] = (struct inf_pass_span){c->kv, p->n, c->n, first};
        int rc = inf_kv_prepare(c->kv, c->n, c->n + p->n, err);
        if (!rc)
            continue;
        while (i--)
            inf_kv_truncate(b->piece[i].c->kv, b->held[i] * INF_KV_BLOCK);
        return rc;
    }
    return 0;
}

/* What the pieces' conversations used lately; of several the sum, in `sum`. */
static const uint32_t *recent_of(const struct batch *b, uint32_t *sum)
{
    const struct inf_conversation *c = b->piece[0].c;
    const size_t pairs = (size_t)c->layers * c->experts;
    if (b->pieces == 1)
        return c->recent;
    memcpy(sum, c->recent, pairs * sizeof *sum);
    for (uint32_t i = 1; i < b->pieces; i++)
        for (size_t k = 0; k < pairs; k++)
            sum[k] += b->piece[i].c->recent[k];
    return sum;
}

static int run_pass(struct inf_engine *e, const struct batch *b, struct inf_pass *pass,
                    struct inf_chunk *chunk, struct shm_error *err)
{
    const uint32_t *predicted = NULL;
    int rc = e->model->arch->embed(e->device, pass, err);
    if (!rc && pass->predict)
        rc = e->device->ops->predict_first(e->device, pass, &predicted, err);
    if (pass->stream)
        inf_stream_know(pass->stream, b->o->known);
    if (!rc && pass->stream)
        rc = inf_stream_begin(pass->stream, b->tokens, b->span[0].position, predicted,
                              recent_of(b, b->piece[b->pieces - 1].c->counts), err);
    if (rc)
        return rc;
    rc = e->model->arch->forward(e->model, e->device, pass, err);
    if (!rc && pass->stream)
        rc = inf_stream_end(pass->stream, &chunk->stream, err);
    inf_store_touch(&e->store);
    if (rc)
        inf_stream_cancel(e->store.stream, NULL); /* a lost stream shows in inf_store_alive */
    return rc;
}

static int read_batch(struct inf_engine *e, struct batch *b, struct shm_error *err)
{
    const struct inf_settings *set = &e->store.settings;
    const struct inf_read_options *o = b->o;
    const struct inf_piece *piece = b->piece;
    uint32_t *counts = piece[0].c->counts, *ids = NULL;
    int rc = prepare(b, err);
    if (rc)
        return rc;
    struct inf_pass pass = {.ids = (const uint32_t *)piece[0].ids,
                            .tokens = b->tokens,
                            .spans = b->pieces,
                            .span = b->span,
                            .generated = o->generated,
                            .stream = e->store.stream,
                            .resident = (const uint8_t *const *)e->store.resident,
                            .demand = b->tokens < set->floor,
                            .counts = counts,
                            .cancel = e->store.config.cancel,
                            .ctx = b};
    if (b->pieces > 1) {
        if (!(ids = malloc(b->tokens * sizeof *ids))) {
            rc = -ENOMEM;
            goto undo;
        }
        for (uint32_t i = 0, at = 0; i < b->pieces; at += piece[i++].n)
            memcpy(ids + at, piece[i].ids, piece[i].n * sizeof *ids);
        pass.ids = ids;
    }
    /* Predictions cost a router a layer: only where they are used. */
    pass.predict = set->order == SHM_ORDER_PREDICTED && set->policy == SHM_POLICY_ROUTED &&
                   b->tokens >= set->floor && !o->known;
    pass.on_logits = o->on_logits ? relay_logits : NULL;
    pass.on_routes = o->on_routes ? relay_routes : NULL;
    pass.on_layer = o->on_progress ? relay_layer : NULL;

    /* A generated token that needs nothing of expertd does not wait for it either. */
    if (o->generated && e->store.all_resident && pass.demand)
        pass.stream = NULL;

    struct inf_chunk chunk = {
        .tokens = b->tokens,
        .position = b->span[0].position,
        .stream = {.policy = SHM_POLICY_DEMAND, .order = set->order, .depth = set->depth}};
    uint64_t start_ns = shm_now_ns();
    if ((rc = run_pass(e, b, &pass, &chunk, err)))
        goto undo;
    chunk.ns = shm_now_ns() - start_ns;
    if (pass.stream && e->device->kind == PRT_DEVICE_HOST) /* a GPU waits by itself: expertd's word */
        chunk.stream.wait_ns = inf_stream_wait_ns(pass.stream);
    for (uint32_t i = 0; i < b->pieces; i++) {
        struct inf_conversation *c = piece[i].c;
        memcpy(c->tokens + c->n, piece[i].ids, piece[i].n * sizeof *c->tokens);
        c->n += piece[i].n;
    }
    if (pass.stream) /* else nothing was counted */
        remember(b, counts);
    free(ids);
    if (o->on_chunk)
        o->on_chunk(o->ctx, &chunk);
    return 0;
undo:
    free(ids);
    for (uint32_t i = 0; i < b->pieces; i++)
        inf_kv_truncate(piece[i].c->kv, b->held[i] * INF_KV_BLOCK);
    return rc;
}

static int check_ids(const struct inf_engine *e, const struct inf_conversation *c, const int32_t *ids,
                     size_t n, struct shm_error *err)
{
    if (n > c->capacity - c->n)
        return shm_error_set(err, E2BIG,
                             "%zu tokens do not fit: the context holds %u, %u are in use: "
                             "shorten the prompt or raise --ctx",
                             n, c->capacity, c->n);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= e->model->hparams.vocab)
            return shm_error_set(err, EINVAL, "token %d is not in the vocabulary of %u", ids[i],
                                 e->model->hparams.vocab);
    return 0;
}

static int check_attached(const struct inf_engine *e, struct shm_error *err)
{
    return e->store.stream
               ? 0
               : shm_error_set(err, ESHUTDOWN, "no expertd is attached: start expertd and repeat the turn");
}

int inf_read_batch(struct inf_engine *e, const struct inf_piece *piece, uint32_t pieces,
                   const struct inf_read_options *o, struct shm_error *err)
{
    int rc = check_attached(e, err);
    if (rc)
        return rc;
    if (!pieces || pieces > INF_SPANS_MAX)
        return shm_error_set(err, EINVAL, "%u pieces in a pass: 1 to %u can be", pieces, INF_SPANS_MAX);
    struct batch b = {.o = o, .engine = e, .piece = piece, .pieces = pieces};
    for (uint32_t i = 0; i < pieces; i++) {
        if ((rc = check_ids(e, piece[i].c, piece[i].ids, piece[i].n, err)))
            return rc;
        for (uint32_t k = 0; k < i; k++)
            if (piece[k].c == piece[i].c)
                return shm_error_set(err, EINVAL, "pieces %u and %u are of one conversation", k, i);
        if (!piece[i].n || (o->generated && piece[i].n > 1) || piece[i].n > e->chunk - b.tokens)
            return shm_error_set(err, EINVAL, "piece %u: %u %s tokens do not fit in a pass of %u", i,
                                 piece[i].n, o->generated ? "generated" : "prompt", e->chunk);
        b.tokens += piece[i].n;
    }
    return read_batch(e, &b, err);
}

int inf_read(struct inf_engine *e, struct inf_conversation *c, const int32_t *ids, size_t n,
             const struct inf_read_options *o, struct shm_error *err)
{
    int rc = check_attached(e, err);
    if (rc || (rc = check_ids(e, c, ids, n, err)))
        return rc;
    const size_t chunks = o->generated ? n : (n + e->chunk - 1) / e->chunk;
    if (o->known && chunks > 1)
        return shm_error_set(err, EINVAL, "the routing of %zu tokens cannot be told ahead: the chunk is %u",
                             n, e->chunk);
    for (size_t i = 0, done = 0; i < chunks; i++) {
        const size_t rest = n - done;
        struct inf_piece piece = {.c = c,
                                  .ids = ids + done,
                                  .n = (uint32_t)((rest + (chunks - i) - 1) / (chunks - i)),
                                  .logits = o->logits};
        if (o->logits == INF_LOGITS_LAST && i + 1 < chunks)
            piece.logits = INF_LOGITS_NONE;
        struct batch b = {
            .o = o, .engine = e, .piece = &piece, .pieces = 1, .tokens = piece.n, .before = (double)done};
        if ((rc = read_batch(e, &b, err)))
            return rc;
        done += piece.n;
    }
    return 0;
}
