/* SPDX-License-Identifier: MIT */
/* A pass's experts: routers, what they say to expertd, the experts that are there, and those that come. */
#include "inferd/inf_cuda.h"

#include <errno.h>
#include <stdlib.h>

#define POISON_BLOCKS 16u
/* Tokens of a chunk whose choices predict the next layer's: all of a small one, of others so many in pieces.
 */
#define PREDICT_ALL    2048u
#define PREDICT_SAMPLE 1024u
#define PREDICT_PIECES 4u

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
        INF_CUDA_TRY(krn_cu_rmsnorm(c->cu, c->stream, a->x + from * row_bytes, l->ffn_norm,
                                    c->model->hparams.rms_eps, rows, s->hidden,
                                    a->normed + (uint64_t)i * rows * row_bytes, 0));
    }
    INF_CUDA_TRY(
        krn_cu_scores(c->cu, c->stream, a->normed, l->router, tokens, s->experts, s->hidden, a->scores));
    INF_CUDA_TRY(krn_cu_select(c->cu, c->stream, a->scores, tokens, s->experts, s->top_k, false,
                               a->predicted_ids, a->predicted_weights));
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
    INF_CUDA_TRY(krn_cu_group(c->cu, c->stream, c->act.predicted_ids, 0, sample_of(p), s->experts, s->top_k,
                              NULL, &groups));
    INF_CUDA_TRY(KRN_CUDA(copy_out_async, c->host_counts, c->act.counts, s->experts * sizeof *c->host_counts,
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
    INF_CUDA_TRY(KRN_CUDA(copy_out_async, c->routes, c->act.ids, slots * 4, c->stream));
    INF_CUDA_TRY(KRN_CUDA(copy_out_async, c->routes + slots, c->act.weights, slots * 4, c->stream));
    INF_CUDA_TRY(KRN_CUDA(stream_synchronize, c->stream));
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
        INF_CUDA_TRY(KRN_CUDA(wait_32, c->stream, c->flag, (uint32_t)(base + end), KRN_CUDA_WAIT_GEQ));
        inf_cuda_stamp_group(c, layer, INF_STEP_STALL);
        run.group = first;
        run.group_end = end;
        INF_CUDA_TRY(inf_cuda_trace_slots(c, &run, layer, false));
        INF_CUDA_TRY(krn_cu_experts(c->cu, c->stream, &run));
        INF_CUDA_TRY(inf_cuda_trace_slots(c, &run, layer, true));
        if (c->poison)
            INF_CUDA_TRY(poison(c, run.table, first, end));
        /* Ordered behind the kernels: the slots were read for the last time. */
        INF_CUDA_TRY(KRN_CUDA(write_64, c->stream, released, base + end, 0));
        inf_cuda_stamp_group(c, layer, INF_STEP_EXPERTS);
        c->released = base + end;
        if ((rc = inf_cuda_spend(c, p, p->stream, 6, err)))
            return rc;
    }
    INF_CUDA_TRY(inf_cuda_trace_layer(c, &run, layer));
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
        .ran = inf_cuda_ran(c, layer),
        .tokens = p->tokens,
        .hidden = s->hidden,
        .experts = s->experts,
        .top_k = s->top_k,
        .eps = eps,
        .renorm = c->model->hparams.norm_topk != 0};
    INF_CUDA_TRY(krn_cu_token_router(c->cu, c->stream, &route));
    if (p->stream && !single)
        INF_CUDA_TRY(krn_cu_group(c->cu, c->stream, a->ids, predicts ? a->predicted_ids : 0, p->tokens,
                                  s->experts, s->top_k, &publication, &groups));
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
        INF_CUDA_TRY(krn_cu_experts(c->cu, c->stream, &run));
        run.located = false;
    }
    run.all = together;
    if (waits && (rc = streamed(c, p, layer, run, err)))
        return rc;
    if (!together)
        INF_CUDA_TRY(
            krn_cu_combine(c->cu, c->stream, a->out, a->weights, p->tokens, s->top_k, s->hidden, a->x));
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
    if (p->generated) {
        rc = token_experts(c, p, layer, predicts, err);
        c->base.times.enqueue_ns += shm_now_ns() - at_ns - (c->base.times.wait_ns - waited_ns);
        return rc;
    }
    INF_CUDA_TRY(krn_cu_rmsnorm(c->cu, c->stream, a->x, l->ffn_norm, m->hparams.rms_eps, p->tokens, s->hidden,
                                a->normed, a->normed16));
    INF_CUDA_TRY(
        krn_cu_scores(c->cu, c->stream, a->normed, l->router, p->tokens, s->experts, s->hidden, a->scores));
    INF_CUDA_TRY(krn_cu_select(c->cu, c->stream, a->scores, p->tokens, s->experts, s->top_k,
                               m->hparams.norm_topk != 0, a->ids, a->weights));
    struct krn_cu_publication publication = {0};
    if (p->stream)
        publication = publication_of(c, p, layer, predicts);
    INF_CUDA_TRY(krn_cu_group(c->cu, c->stream, a->ids, predicts ? a->predicted_ids : 0, p->tokens,
                              s->experts, s->top_k, p->stream ? &publication : NULL, &groups));
    INF_CUDA_TRY(inf_cuda_trace_experts(c, p, layer, 0));
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
        .ran = inf_cuda_ran(c, layer),
        .out = a->out};
    /* The residents run while the link moves the others. */
    if (run.resident)
        INF_CUDA_TRY(krn_cu_experts(c->cu, c->stream, &run));
    inf_cuda_stamp(c, INF_STEP_EXPERTS);
    /* A layer without streamed experts waits for nobody: its groups are released with later ones. */
    if (p->stream && !(c->all_resident && c->all_resident[layer]) && (rc = streamed(c, p, layer, run, err)))
        return rc;
    INF_CUDA_TRY(inf_cuda_trace_experts(c, p, layer, 1));
    INF_CUDA_TRY(krn_cu_combine(c->cu, c->stream, a->out, a->weights, p->tokens, s->top_k, s->hidden, a->x));
    INF_CUDA_TRY(inf_cuda_trace_experts(c, p, layer, 2));
    inf_cuda_stamp(c, INF_STEP_EXPERTS);
    c->base.times.enqueue_ns += shm_now_ns() - at_ns - (c->base.times.wait_ns - waited_ns);
    return inf_cuda_spend(c, p, p->stream, 4, err);
}
