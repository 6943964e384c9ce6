/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include "inferd/inf_kv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define POISON_BLOCKS 16u
/* Tokens of a chunk whose choices predict the next layer's: all of a small one, of others so many in pieces.
 */
#define PREDICT_ALL    2048u
#define PREDICT_SAMPLE 1024u
#define PREDICT_PIECES 4u

/* A step's operations on the stream; the first failure ends it. */
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if ((rc = (call)))                                                                                   \
            return inf_cuda_failed(c, rc, err);                                                              \
    } while (0)

/* Generated tokens have kernels of their own, bound by memory. */
static bool decodes(const struct inf_pass *p)
{
    return p->generated;
}

int inf_cuda_begin(struct inf_cuda *c, struct shm_error *err)
{
    if (c->broken)
        return shm_error_set(err, EIO, "the GPU failed in an earlier pass: start inferd anew");
    int rc = krn_cuda_enter(c->gpu);
    return rc ? inf_cuda_failed(c, rc, err) : 0;
}

/* Tells the kernels where the spans' keys and values are. The host's memory is the caller's again: no earlier
 * pass reads it any more. */
static int map_spans(struct inf_cuda *c, const struct inf_pass *p)
{
    struct inf_cuda_map *map = c->host_map;
    uint32_t n = c->model->hparams.layers; /* zeros */
    _Static_assert(INF_KV_BLOCK == KRN_CU_KV_BLOCK && INF_SPANS_MAX <= KRN_CU_ROWS_MAX, "the kernels' own");
    c->rows = (struct krn_cu_rows){.at = c->act.map, .tokens = p->spans};
    for (uint32_t i = 0; i < p->spans; i++) {
        const struct inf_pass_span *s = &p->span[i];
        const uint32_t blocks = inf_kv_blocks(s->position + s->tokens);
        if (s->position > c->rows.position_most)
            c->rows.position_most = s->position;
        c->table[i] = c->act.map + offsetof(struct inf_cuda_map, word) + n * sizeof map->word[0];
        map->row[i] = (struct krn_cu_row){.blocks = c->table[i], .position = s->position};
        memcpy(map->word + n, s->kv->block, blocks * sizeof map->word[0]);
        n += blocks;
    }
    const uint32_t words = offsetof(struct inf_cuda_map, word) / sizeof map->word[0] + n;
    return krn_cu_words(c->cu, c->stream, c->host_device + (krn_cuda_ptr)((uint8_t *)map - c->host), words,
                        c->act.map);
}

/* Where a layer's choices that are run are counted. */
static krn_cuda_ptr ran_of(const struct inf_cuda *c, uint32_t layer)
{
    return c->act.map + offsetof(struct inf_cuda_map, word) + layer * UINT64_C(4);
}

/* A layer's keys and values of a span. */
static struct krn_cu_kv kv_of(const struct inf_cuda *c, uint32_t span, uint32_t layer)
{
    struct krn_cu_kv kv = c->kv[layer];
    kv.blocks = c->table[span];
    return kv;
}

/* Angles of all rows. */
static int rope(struct inf_cuda *c, const struct inf_pass *p)
{
    const struct inf_model *m = c->model;
    const uint32_t head_dim = m->shape.head_dim;
    int rc = 0;
    if (decodes(p))
        return krn_cu_rope_rows(c->cu, c->stream, &c->rows, head_dim, m->hparams.rope_base, c->act.rope);
    for (uint32_t i = 0, row = 0; i < p->spans && !rc; row += p->span[i++].tokens)
        rc = krn_cu_rope_table(c->cu, c->stream, p->span[i].position, p->span[i].tokens, head_dim,
                               m->hparams.rope_base, c->act.rope + (uint64_t)row * head_dim * 4);
    return rc;
}

int inf_cuda_embed(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    uint64_t at_ns = shm_now_ns();
    int rc = inf_cuda_begin(c, err);
    if (rc)
        return rc;
    inf_cuda_profile_begin(c);
    memcpy(c->host_ids, p->ids, p->tokens * sizeof *p->ids); /* no earlier pass reads them any more */
    TRY(map_spans(c, p));
    TRY(inf_cuda_trace_begin(c));
    TRY(krn_cu_embed(c->cu, c->stream, &c->embed, c->host_device, p->tokens, c->act.x));
    TRY(rope(c, p));
    inf_cuda_stamp(c, INF_STEP_HEAD);
    c->layer_now = 0;
    c->base.times.enqueue_ns += shm_now_ns() - at_ns;
    return inf_cuda_spend(c, p, NULL, 2 + p->spans, err);
}

static int dense(struct inf_cuda *c, const struct inf_pass *p, const struct krn_cu_matrix *m,
                 krn_cuda_ptr x16, bool add, krn_cuda_ptr y)
{
    return krn_cu_dense(c->cu, c->stream, m, x16, p->tokens, add, c->act.dense, y);
}

/* Generated tokens: projections, then everything until the attention's output, then its projection. */
static int token_attention(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer,
                           struct shm_error *err)
{
    const struct inf_cuda_act *a = &c->act;
    const struct inf_cuda_layer *l = &c->layer[layer];
    const struct krn_cu_kv *kv = &c->kv[layer];
    const float eps = c->model->hparams.rms_eps;
    const struct krn_cu_product product = {.m = {&l->q, &l->k, &l->v},
                                           .y = {a->q, a->k, a->v},
                                           .count = 3,
                                           .x = a->x,
                                           .norm = l->attn_norm,
                                           .eps = eps,
                                           .tokens = p->tokens};
    const struct krn_cu_token_heads heads = {.q = a->q,
                                             .k = a->k,
                                             .v = a->v,
                                             .q_weight = l->q_norm,
                                             .k_weight = l->k_norm,
                                             .table = a->rope,
                                             .scratch = a->decode,
                                             .y_f16 = a->y16,
                                             .rows = c->rows,
                                             .heads = c->model->shape.heads,
                                             .eps = eps};
    int rc;
    TRY(krn_cu_gemv_of(c->cu, c->stream, &product));
    TRY(krn_cu_token_attention(c->cu, c->stream, kv, &heads));
    TRY(krn_cu_gemv(c->cu, c->stream, &l->output, a->y16, p->tokens, true, a->x));
    return 0;
}

/* Norm and rotation of the heads, keys and values written, attention: span after span. */
static int prompt_attention(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer,
                            struct shm_error *err)
{
    const struct inf_cuda_act *a = &c->act;
    const struct inf_cuda_layer *l = &c->layer[layer];
    const struct krn_shape *s = &c->model->shape;
    uint64_t q = 0, kv = 0, head = (uint64_t)s->head_dim; /* elements before the span */
    int rc;
    for (uint32_t i = 0; i < p->spans; i++) {
        const struct inf_pass_span *span = &p->span[i];
        const struct krn_cu_kv cache = kv_of(c, i, layer);
        const krn_cuda_ptr q16 = a->q16 + q * 2;
        TRY(krn_cu_qkv(c->cu, c->stream, &cache, span->position, span->tokens, s->heads, a->q + q * 4,
                       a->k + kv * 4, a->v + kv * 4, l->q_norm, l->k_norm, c->model->hparams.rms_eps,
                       a->rope + q / s->heads * 4, q16));
        TRY(krn_cu_attention(c->cu, c->stream, &cache, span->position, span->tokens, s->heads, q16,
                             a->y16 + q * 2));
        q += span->tokens * s->heads * head;
        kv += span->tokens * s->kv_heads * head;
        if (i && (rc = inf_cuda_spend(c, p, p->stream, 2, err)))
            return rc;
    }
    return 0;
}

int inf_cuda_attention(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct inf_cuda_act *a = &c->act;
    const struct inf_cuda_layer *l = &c->layer[layer];
    const struct krn_shape *s = &c->model->shape;
    uint64_t at_ns = shm_now_ns();
    int rc;
    c->layer_now = layer;
    if (layer == 0) /* the stream was begun meanwhile */
        inf_cuda_stamp(c, INF_STEP_IDLE);
    if (decodes(p)) {
        if ((rc = token_attention(c, p, layer, err)))
            return rc;
    } else {
        TRY(krn_cu_rmsnorm(c->cu, c->stream, a->x, l->attn_norm, c->model->hparams.rms_eps, p->tokens,
                           s->hidden, 0, a->normed16));
        TRY(dense(c, p, &l->q, a->normed16, false, a->q));
        TRY(dense(c, p, &l->k, a->normed16, false, a->k));
        TRY(dense(c, p, &l->v, a->normed16, false, a->v));
        if ((rc = prompt_attention(c, p, layer, err)))
            return rc;
        TRY(dense(c, p, &l->output, a->y16, true, a->x));
        TRY(inf_cuda_trace_attention(c, p, layer));
    }
    inf_cuda_stamp(c, INF_STEP_ATTENTION);
    c->base.times.enqueue_ns += shm_now_ns() - at_ns;
    return inf_cuda_spend(c, p, p->stream, decodes(p) ? 4 : 12, err);
}

/* Tokens that speak for a chunk in a prediction. */
static uint32_t sample_of(const struct inf_pass *p)
{
    return p->tokens <= PREDICT_ALL ? p->tokens : PREDICT_SAMPLE;
}

static struct krn_cu_groups groups_of(const struct inf_cuda *c, const struct inf_pass *p)
{
    const struct inf_cuda_act *a = &c->act;
    return (struct krn_cu_groups){.counts = a->counts,
                                  .offsets = a->offsets,
                                  .slots = a->slots,
                                  .hist = a->hist,
                                  .predicted_hist = a->predicted_hist,
                                  .predicted_tokens = sample_of(p)};
}

/* Choices of a layer to come, from the hidden state as it is now. Of a large chunk some pieces at even
 * distances: where few tokens choose an expert its copy may wait for the publication, and a chunk so large is
 * bound by what is computed. */
static int predict(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer, struct shm_error *err)
{
    const struct inf_cuda_act *a = &c->act;
    const struct inf_cuda_layer *l = &c->layer[layer];
    const struct krn_shape *s = &c->model->shape;
    const uint32_t tokens = sample_of(p), pieces = tokens < p->tokens ? PREDICT_PIECES : 1,
                   rows = tokens / pieces;
    const uint64_t row_bytes = s->hidden * UINT64_C(4);
    int rc;
    for (uint32_t i = 0; i < pieces; i++) {
        uint64_t from = pieces > 1 ? (uint64_t)(p->tokens - rows) * i / (pieces - 1) : 0;
        TRY(krn_cu_rmsnorm(c->cu, c->stream, a->x + from * row_bytes, l->ffn_norm, c->model->hparams.rms_eps,
                           rows, s->hidden, a->normed + (uint64_t)i * rows * row_bytes, 0));
    }
    TRY(krn_cu_scores(c->cu, c->stream, a->normed, l->router, tokens, s->experts, s->hidden, a->scores));
    TRY(krn_cu_select(c->cu, c->stream, a->scores, tokens, s->experts, s->top_k, false, a->predicted_ids,
                      a->predicted_weights));
    return 0;
}

int inf_cuda_predict_first(struct inf_device *d, const struct inf_pass *p, const uint32_t **ret_counts,
                           struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct krn_shape *s = &c->model->shape;
    const struct krn_cu_groups groups = groups_of(c, p);
    int rc = predict(c, p, 0, err);
    if (rc)
        return rc;
    TRY(krn_cu_group(c->cu, c->stream, c->act.predicted_ids, 0, sample_of(p), s->experts, s->top_k, NULL,
                     &groups));
    TRY(KRN_CUDA(copy_out_async, c->host_counts, c->act.counts, s->experts * sizeof *c->host_counts,
                 c->stream));
    inf_cuda_stamp(c, INF_STEP_ROUTER);
    if ((rc = inf_cuda_finish(c, p, NULL, err)))
        return rc;
    *ret_counts = c->host_counts;
    return 0;
}

static struct krn_cu_publication publication_of(const struct inf_cuda *c, const struct inf_pass *p,
                                                uint32_t layer, bool predicts)
{
    const struct shm_worker_view *v = &c->control;
    const uint32_t experts = c->geometry.experts;
    struct shm_route *route = &v->route[layer];
    return (struct krn_cu_publication){
        .mask = inf_cuda_control(c, &route->mask),
        .tokens = inf_cuda_control(c, v->tokens + (size_t)layer * experts),
        .predicted = predicts ? inf_cuda_control(c, v->predicted + (size_t)(layer + 1) * experts) : 0,
        .published_ns = inf_cuda_control(c, &route->published_ns),
        .seq = inf_cuda_control(c, &route->seq),
        .value = inf_stream_seq(p->stream),
        .clock_offset_ns = c->clock_offset_ns};
}

/* Test mode: waits for the layer's choices and shows them. */
static int show_routes(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer, struct shm_error *err)
{
    const size_t slots = (size_t)p->tokens * c->model->shape.top_k;
    int rc;
    if (!c->routes)
        c->routes = calloc(2 * (size_t)c->chunk * c->model->shape.top_k, sizeof *c->routes);
    if (!c->routes)
        return -ENOMEM;
    if ((rc = inf_cuda_finish(c, p, p->stream, err)))
        return rc;
    TRY(KRN_CUDA(copy_out_async, c->routes, c->act.ids, slots * 4, c->stream));
    TRY(KRN_CUDA(copy_out_async, c->routes + slots, c->act.weights, slots * 4, c->stream));
    TRY(KRN_CUDA(stream_synchronize, c->stream));
    p->on_routes(p->ctx, layer, p->tokens, c->routes, (const float *)(const void *)(c->routes + slots));
    return 0;
}

static int poison(struct inf_cuda *c, krn_cuda_ptr table, uint32_t first, uint32_t end)
{
    uint64_t slot_bytes = c->geometry.slot_bytes;
    uint32_t ring = c->geometry.ring;
    void *arguments[] = {&table, &c->ring, &slot_bytes, &ring, &first, &end};
    return KRN_CUDA(launch, c->poison_kernel, c->geometry.experts, POISON_BLOCKS, 1, 256, 1, 1, 0, c->stream,
                    arguments, NULL);
}

/* Groups that are waited for, run and released together. A layer whose entries all fit in the ring needs no
 * release in its middle, so a small chunk, which copies only what it routed, takes it as a whole. */
static uint32_t groups_together(const struct inf_cuda *c, const struct inf_pass *p)
{
    uint64_t routed = (uint64_t)p->tokens * c->model->shape.top_k;
    return p->demand && routed <= c->geometry.ring ? c->geometry.groups_per_layer : 1;
}

static int streamed(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer,
                    struct krn_cu_expert_run run, struct shm_error *err)
{
    const struct shm_geometry *g = &c->geometry;
    const uint64_t base = inf_stream_group_base(p->stream) + (uint64_t)layer * g->groups_per_layer;
    const uint32_t step = groups_together(c, p);
    const krn_cuda_ptr released = inf_cuda_control(c, &c->control.worker->released_groups);
    int rc;
    run.table = inf_cuda_control(c, c->control.table + (size_t)layer * g->experts);
    run.ring = c->ring;
    run.slot_bytes = g->slot_bytes;
    run.ring_slots = g->ring;
    for (uint32_t first = 0; first < g->groups_per_layer; first += step) {
        uint32_t end = g->groups_per_layer - first < step ? g->groups_per_layer : first + step;
        /* The flag holds the low half of a count: GEQ compares cyclically. */
        TRY(KRN_CUDA(wait_32, c->stream, c->flag, (uint32_t)(base + end), KRN_CUDA_WAIT_GEQ));
        inf_cuda_stamp_group(c, layer, INF_STEP_STALL);
        run.group = first;
        run.group_end = end;
        TRY(inf_cuda_trace_slots(c, &run, layer, false));
        TRY(krn_cu_experts(c->cu, c->stream, &run));
        TRY(inf_cuda_trace_slots(c, &run, layer, true));
        if (c->poison)
            TRY(poison(c, run.table, first, end));
        /* Ordered behind the kernels: the slots were read for the last time. */
        TRY(KRN_CUDA(write_64, c->stream, released, base + end, 0));
        inf_cuda_stamp_group(c, layer, INF_STEP_EXPERTS);
        c->released = base + end;
        if ((rc = inf_cuda_spend(c, p, p->stream, 6, err)))
            return rc;
    }
    TRY(inf_cuda_trace_layer(c, &run, layer));
    inf_cuda_stamp_group(c, layer, INF_STEP_STREAMED);
    return 0;
}

/* Generated tokens: the router in one launch, and, of several, another one that publishes; experts that are
 * all in reach in two more, which add to the residual. Else the residents, then group by group, then what
 * they add up to: the same bits. */
static int token_experts(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer, bool predicts,
                         struct shm_error *err)
{
    const struct inf_cuda_act *a = &c->act;
    const struct inf_cuda_layer *l = &c->layer[layer];
    const struct krn_shape *s = &c->model->shape;
    const float eps = c->model->hparams.rms_eps;
    const bool waits = p->stream && !(c->all_resident && c->all_resident[layer]);
    const bool together = !waits || groups_together(c, p) == c->geometry.groups_per_layer;
    struct krn_cu_publication publication = {0};
    int rc;
    const struct krn_cu_groups groups = groups_of(c, p);
    const bool single = p->tokens == 1;
    if (p->stream)
        publication = publication_of(c, p, layer, predicts);
    const struct krn_cu_token_route route = {
        .x = a->x,
        .norm = l->ffn_norm,
        .w = l->router,
        .scores = a->scores,
        .ids = a->ids,
        .weights = a->weights,
        .blobs = a->plan,
        .resident = c->resident_table ? c->resident_table + (uint64_t)layer * s->experts * 8 : 0,
        .predicted_ids = predicts && single ? a->predicted_ids : 0,
        .publication = p->stream && single ? &publication : NULL,
        .ran = ran_of(c, layer),
        .tokens = p->tokens,
        .hidden = s->hidden,
        .experts = s->experts,
        .top_k = s->top_k,
        .eps = eps,
        .renorm = c->model->hparams.norm_topk != 0};
    TRY(krn_cu_token_router(c->cu, c->stream, &route));
    if (p->stream && !single)
        TRY(krn_cu_group(c->cu, c->stream, a->ids, predicts ? a->predicted_ids : 0, p->tokens, s->experts,
                         s->top_k, &publication, &groups));
    inf_cuda_stamp(c, INF_STEP_ROUTER);
    if ((rc = inf_cuda_spend(c, p, p->stream, single ? 1 : 4, err)) ||
        (p->on_routes && (rc = show_routes(c, p, layer, err))))
        return rc;
    if (p->on_layer)
        p->on_layer(p->ctx, layer);
    struct krn_cu_expert_run run = {.shape = &l->experts,
                                    .resident = route.resident,
                                    .tokens = p->tokens,
                                    .decode = true,
                                    .ids = a->ids,
                                    .x_f32 = a->x,
                                    .norm = l->ffn_norm,
                                    .eps = eps,
                                    .plan = a->plan,
                                    .hidden_rows = a->hidden_rows,
                                    .ran = route.ran,
                                    .weights = together ? a->weights : 0,
                                    .out = together ? a->x : a->out};
    if (!waits || (!together && run.resident)) {
        run.located = true;
        TRY(krn_cu_experts(c->cu, c->stream, &run));
        run.located = false;
    }
    run.all = together;
    if (waits && (rc = streamed(c, p, layer, run, err)))
        return rc;
    if (!together)
        TRY(krn_cu_combine(c->cu, c->stream, a->out, a->weights, p->tokens, s->top_k, s->hidden, a->x));
    inf_cuda_stamp(c, INF_STEP_EXPERTS);
    return inf_cuda_spend(c, p, p->stream, 3, err);
}

int inf_cuda_experts(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct inf_cuda_act *a = &c->act;
    const struct inf_cuda_layer *l = &c->layer[layer];
    const struct inf_model *m = c->model;
    const struct krn_shape *s = &m->shape;
    const struct krn_cu_groups groups = groups_of(c, p);
    const bool predicts = p->predict && layer + 1 < m->hparams.layers;
    uint64_t at_ns = shm_now_ns(), waited_ns = c->base.times.wait_ns;
    int rc;
    if (p->cancel && atomic_load_explicit(p->cancel, memory_order_relaxed))
        return shm_error_set(err, ECANCELED, "cancelled");
    if (predicts && (rc = predict(c, p, layer + 1, err)))
        return rc;
    if (decodes(p)) {
        rc = token_experts(c, p, layer, predicts, err);
        c->base.times.enqueue_ns += shm_now_ns() - at_ns - (c->base.times.wait_ns - waited_ns);
        return rc;
    }
    TRY(krn_cu_rmsnorm(c->cu, c->stream, a->x, l->ffn_norm, m->hparams.rms_eps, p->tokens, s->hidden,
                       a->normed, a->normed16));
    TRY(krn_cu_scores(c->cu, c->stream, a->normed, l->router, p->tokens, s->experts, s->hidden, a->scores));
    TRY(krn_cu_select(c->cu, c->stream, a->scores, p->tokens, s->experts, s->top_k, m->hparams.norm_topk != 0,
                      a->ids, a->weights));
    struct krn_cu_publication publication = {0};
    if (p->stream)
        publication = publication_of(c, p, layer, predicts);
    TRY(krn_cu_group(c->cu, c->stream, a->ids, predicts ? a->predicted_ids : 0, p->tokens, s->experts,
                     s->top_k, p->stream ? &publication : NULL, &groups));
    TRY(inf_cuda_trace_experts(c, p, layer, 0));
    inf_cuda_stamp(c, INF_STEP_ROUTER);
    if ((rc = inf_cuda_spend(c, p, p->stream, 12, err)) ||
        (p->on_routes && (rc = show_routes(c, p, layer, err))))
        return rc;
    if (p->on_layer)
        p->on_layer(p->ctx, layer);

    struct krn_cu_expert_run run = {
        .shape = &l->experts,
        .groups = &groups,
        .resident = c->resident_table ? c->resident_table + (uint64_t)layer * s->experts * 8 : 0,
        .tokens = p->tokens,
        .x_f16 = a->normed16,
        .plan = a->plan,
        .hidden_rows = a->hidden_rows,
        .ran = ran_of(c, layer),
        .out = a->out};
    /* The residents run while the link moves the others. */
    if (run.resident)
        TRY(krn_cu_experts(c->cu, c->stream, &run));
    inf_cuda_stamp(c, INF_STEP_EXPERTS);
    /* A layer without streamed experts waits for nobody: its groups are released with later ones. */
    if (p->stream && !(c->all_resident && c->all_resident[layer]) && (rc = streamed(c, p, layer, run, err)))
        return rc;
    TRY(inf_cuda_trace_experts(c, p, layer, 1));
    TRY(krn_cu_combine(c->cu, c->stream, a->out, a->weights, p->tokens, s->top_k, s->hidden, a->x));
    TRY(inf_cuda_trace_experts(c, p, layer, 2));
    inf_cuda_stamp(c, INF_STEP_EXPERTS);
    c->base.times.enqueue_ns += shm_now_ns() - at_ns - (c->base.times.wait_ns - waited_ns);
    return inf_cuda_spend(c, p, p->stream, 4, err);
}

/* Groups of last layers that nothing was waited for; behind the logits, since expertd takes its time. */
static int release_rest(struct inf_cuda *c, const struct inf_pass *p, struct shm_error *err)
{
    if (!p->stream)
        return 0;
    const uint64_t end =
        inf_stream_group_base(p->stream) + (uint64_t)c->geometry.layers * c->geometry.groups_per_layer;
    int rc;
    if (c->released == end)
        return 0;
    TRY(KRN_CUDA(wait_32, c->stream, c->flag, (uint32_t)end, KRN_CUDA_WAIT_GEQ));
    TRY(KRN_CUDA(write_64, c->stream, inf_cuda_control(c, &c->control.worker->released_groups), end, 0));
    c->released = end;
    inf_cuda_stamp(c, INF_STEP_STALL);
    return inf_cuda_spend(c, p, p->stream, 2, err);
}

/* Each choice of each token was computed, or there are no right logits: the pass has ended, host_ran is
 * there. */
static int check_ran(const struct inf_cuda *c, const struct inf_pass *p, struct shm_error *err)
{
    const uint32_t choices = p->tokens * c->model->shape.top_k;
    for (uint32_t layer = 0; layer < c->model->hparams.layers; layer++)
        if (c->host_ran[layer] != choices)
            return shm_error_set(err, EPROTO,
                                 "layer %u: %u of %u choices of experts were run, expertd's slot table led "
                                 "to no others: the read is given up (restart expertd if it comes again)",
                                 layer, c->host_ran[layer], choices);
    return 0;
}

/* Rows whose logits are made together: pieces of spans. */
struct head {
    struct run {
        uint32_t span, position, rows;
    } run[INF_CUDA_LOGIT_ROWS];
    uint32_t runs, rows, first; /* row of the pass, where they follow each other */
};

static int make_logits(struct inf_cuda *c, const struct inf_pass *p, struct head *h, struct shm_error *err)
{
    const struct inf_cuda_act *a = &c->act;
    const struct inf_model *m = c->model;
    const uint32_t vocab = m->hparams.vocab;
    int rc;
    if (!h->rows)
        return 0;
    if (decodes(p)) {
        const struct krn_cu_product product = {.m = {&c->head},
                                               .y = {a->logits},
                                               .count = 1,
                                               .x = a->x + (uint64_t)h->first * m->shape.hidden * 4,
                                               .norm = c->output_norm,
                                               .eps = m->hparams.rms_eps,
                                               .tokens = h->rows};
        TRY(krn_cu_gemv_of(c->cu, c->stream, &product));
    } else {
        TRY(krn_cu_dense(c->cu, c->stream, &c->head, a->normed16, h->rows, false, a->dense, a->logits));
    }
    TRY(KRN_CUDA(copy_out_async, c->host_logits, a->logits, (size_t)h->rows * vocab * 4, c->stream));
    inf_cuda_stamp(c, INF_STEP_HEAD);
    if ((rc = release_rest(c, p, err)) || (rc = inf_cuda_finish(c, p, p->stream, err)) ||
        (rc = check_ran(c, p, err)))
        return rc;
    const float *logits = c->host_logits;
    for (uint32_t i = 0; p->on_logits && i < h->runs; i++) {
        const struct run *r = &h->run[i];
        p->on_logits(p->ctx, r->span, r->position, r->rows, logits);
        logits += (size_t)r->rows * vocab;
    }
    *h = (struct head){0};
    return 0;
}

static int all_logits(struct inf_cuda *c, const struct inf_pass *p, struct shm_error *err)
{
    const uint32_t hidden = c->model->shape.hidden;
    struct head h = {0};
    uint32_t first = 0; /* row of the span */
    int rc;
    for (uint32_t i = 0; i < p->spans; first += p->span[i++].tokens) {
        const struct inf_pass_span *s = &p->span[i];
        for (uint32_t t = s->first_logit, rows; t < s->tokens; t += rows) {
            if ((h.rows == INF_CUDA_LOGIT_ROWS || (decodes(p) && h.first + h.rows != first + t)) &&
                (rc = make_logits(c, p, &h, err)))
                return rc;
            const uint32_t room = INF_CUDA_LOGIT_ROWS - h.rows;
            rows = s->tokens - t < room ? s->tokens - t : room;
            if (!h.rows)
                h.first = first + t;
            if (!decodes(p))
                TRY(krn_cu_rmsnorm(c->cu, c->stream, c->act.x + (uint64_t)(first + t) * hidden * 4,
                                   c->output_norm, c->model->hparams.rms_eps, rows, hidden, 0,
                                   c->act.normed16 + (uint64_t)h.rows * hidden * 2));
            h.run[h.runs++] = (struct run){i, s->position + t, rows};
            h.rows += rows;
        }
    }
    return make_logits(c, p, &h, err);
}

int inf_cuda_head(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct inf_model *m = c->model;
    bool wanted = false;
    for (uint32_t i = 0; i < p->spans; i++)
        wanted |= p->span[i].first_logit < p->span[i].tokens;
    int rc;
    TRY(KRN_CUDA(copy_out_async, c->host_ran, ran_of(c, 0), m->hparams.layers * sizeof *c->host_ran,
                 c->stream));
    rc = wanted ? all_logits(c, p, err) : release_rest(c, p, err);
    if (!rc && !wanted && !(rc = inf_cuda_finish(c, p, p->stream, err)))
        rc = check_ran(c, p, err);
    if (!rc)
        TRY(inf_cuda_trace_end(c, p));
    if (!rc)
        inf_cuda_profile_collect(c);
    if (!rc && p->counts && p->stream) /* the kernels published them; nobody else writes there */
        memcpy(p->counts, c->control.tokens,
               sizeof *p->counts * m->hparams.layers * (size_t)m->shape.experts);
    return rc;
}
