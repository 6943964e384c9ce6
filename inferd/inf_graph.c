/* SPDX-License-Identifier: MIT */
#include "inferd/inf_graph.h"

#include "inferd/inf_head.h"
#include "inferd/inf_kv.h"
#include "inferd/inf_router.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

_Static_assert(INF_KV_BLOCK == KRN_KV_BLOCK, "one block for all");

/* One piece of the plan: a pointer to set and how many bytes it needs. */
struct piece {
    void **at;
    uint64_t bytes;
};

static uint64_t place(const struct piece *piece, size_t n, char *base)
{
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (base)
            *piece[i].at = base + at;
        at += (piece[i].bytes + 255) & ~UINT64_C(255);
    }
    return at;
}

int inf_graph_create(const struct inf_model *model, struct krn_pool *pool, uint32_t chunk,
                     struct shm_error *err, struct inf_graph **ret_graph)
{
    const struct krn_shape *s = &model->shape;
    struct inf_graph *g = calloc(1, sizeof *g);
    if (!g)
        return -ENOMEM;
    g->model = model;
    g->chunk = chunk;
    g->pool = pool;
    g->memory = MAP_FAILED;
    uint64_t t = chunk, slots = t * s->top_k, f = sizeof(float);
    uint64_t q_bytes = t * s->heads * s->head_dim * f, kv_bytes = t * s->kv_heads * s->head_dim * f;
    uint64_t attention = q_bytes + 2 * kv_bytes + 512, out = slots * s->hidden * f;
    void *shared = NULL;
    const struct piece plan[] = {
        {(void **)&g->x, t * s->hidden * f},
        {(void **)&g->normed, t * s->hidden * f},
        {&shared, attention > out ? attention : out},
        {(void **)&g->rope, t * s->head_dim * f},
        {(void **)&g->scores, t * s->experts * f},
        {(void **)&g->weights, slots * f},
        {(void **)&g->predicted_weights, slots * f},
        {(void **)&g->logits, (uint64_t)INF_LOGIT_ROWS * model->hparams.vocab * f},
        {(void **)&g->positions, t * 4},
        {(void **)&g->ids, slots * 4},
        {(void **)&g->slots, slots * 4},
        {(void **)&g->predicted_ids, slots * 4},
        {(void **)&g->offsets, (s->experts + 1) * UINT64_C(4)},
        {(void **)&g->predicted, s->experts * UINT64_C(4)},
        {(void **)&g->counts_now, s->experts * UINT64_C(4)},
        {(void **)&g->jobs, s->experts * sizeof *g->jobs},
        {&g->expert_scratch, krn_host_expert_scratch_bytes(slots, s->width)},
    };
    const size_t pieces = sizeof plan / sizeof plan[0];
    int rc;

    g->bytes = place(plan, pieces, NULL);
    g->memory = mmap(NULL, g->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->memory == MAP_FAILED) {
        rc = shm_error_set(err, ENOMEM,
                           "activations of a chunk of %u tokens need %.1f MiB, which the system refuses: "
                           "choose a smaller --chunk",
                           chunk, (double)g->bytes / 1048576);
        goto fail;
    }
    madvise(g->memory, g->bytes, MADV_HUGEPAGE); /* a hint; refused is fine */
    place(plan, pieces, g->memory);
    g->out = shared;
    g->q = shared;
    g->k = (float *)((char *)shared + ((q_bytes + 255) & ~UINT64_C(255)));
    g->v = (float *)((char *)g->k + ((kv_bytes + 255) & ~UINT64_C(255)));
    if ((rc = krn_host_create(pool, model->max_cols, &g->host)))
        goto fail;
    *ret_graph = g;
    return 0;
fail:
    inf_graph_destroy(&g);
    return rc;
}

void inf_graph_destroy(struct inf_graph **graph)
{
    struct inf_graph *g = *graph;
    if (!g)
        return;
    krn_host_destroy(&g->host);
    if (g->memory != MAP_FAILED)
        munmap(g->memory, g->bytes);
    free(g);
    *graph = NULL;
}

int inf_graph_set_model(struct inf_graph *g, const struct inf_model *model)
{
    if (memcmp(&g->model->shape, &model->shape, sizeof model->shape) != 0 ||
        g->model->hparams.vocab != model->hparams.vocab ||
        g->model->hparams.layers != model->hparams.layers || g->model->max_cols != model->max_cols)
        return -EINVAL;
    g->model = model;
    return 0;
}

/* Adds the time since *at to *sum and moves *at to now. */
static void lap(uint64_t *at, uint64_t *sum)
{
    uint64_t now = shm_now_ns();
    *sum += now - *at;
    *at = now;
}

void inf_graph_embed(struct inf_graph *g, const struct inf_pass *p)
{
    uint64_t at = shm_now_ns();
    uint32_t row = 0;
    for (uint32_t i = 0; i < p->spans; i++) {
        const struct inf_pass_span *s = &p->span[i];
        g->span[i] = (struct krn_kv_span){s->kv->block, s->position, s->tokens};
        for (uint32_t t = 0; t < s->tokens; t++)
            g->positions[row++] = s->position + t;
    }
    krn_host_rope_table(g->host, g->positions, p->tokens, g->model->shape.head_dim,
                        g->model->hparams.rope_base, g->rope);
    krn_host_embed(g->host, &g->model->embed, p->ids, p->tokens, g->x);
    lap(&at, &g->times.head_ns);
}

void inf_graph_attention(struct inf_graph *g, const struct inf_pass *p, uint32_t layer)
{
    const struct inf_layer *l = &g->model->layer[layer];
    const struct krn_shape *s = &g->model->shape;
    const float eps = g->model->hparams.rms_eps;
    uint64_t at = shm_now_ns();

    krn_host_rmsnorm(g->host, g->x, l->attn_norm, eps, p->tokens, s->hidden, g->normed);
    krn_host_matmul(g->host, &l->q, g->normed, p->tokens, g->q);
    krn_host_matmul(g->host, &l->k, g->normed, p->tokens, g->k);
    krn_host_matmul(g->host, &l->v, g->normed, p->tokens, g->v);
    krn_host_head_norm_rope(g->host, g->q, l->q_norm, eps, g->rope, p->tokens, s->heads, s->head_dim);
    krn_host_head_norm_rope(g->host, g->k, l->k_norm, eps, g->rope, p->tokens, s->kv_heads, s->head_dim);
    krn_host_kv_append(g->host, &g->kv[layer], g->span, p->spans, g->k, g->v);
    krn_host_attention(g->host, &g->kv[layer], g->span, p->spans, s->heads, g->q, g->q);
    krn_host_matmul(g->host, &l->output, g->q, p->tokens, g->normed);
    krn_host_add(g->host, g->normed, (size_t)p->tokens * s->hidden, g->x);
    lap(&at, &g->times.attention_ns);
}

/* Expected tokens per expert of a layer to come: its norm and router on the
 * hidden state as it is now, which the steps in between change a little. */
static void predict(struct inf_graph *g, const struct inf_pass *p, const struct inf_layer *next)
{
    const struct krn_shape *s = &g->model->shape;
    krn_host_rmsnorm(g->host, g->x, next->ffn_norm, g->model->hparams.rms_eps, p->tokens, s->hidden,
                     g->normed);
    inf_router_scores(g->pool, next->router, s->experts, s->hidden, g->normed, p->tokens, g->scores);
    krn_host_router(g->host, g->scores, p->tokens, s->experts, s->top_k, false, g->predicted_ids,
                    g->predicted_weights);
    memset(g->predicted, 0, s->experts * sizeof *g->predicted);
    for (size_t i = 0; i < (size_t)p->tokens * s->top_k; i++)
        g->predicted[g->predicted_ids[i]]++;
}

const uint32_t *inf_graph_predict_first(struct inf_graph *g, const struct inf_pass *p)
{
    uint64_t at = shm_now_ns();
    predict(g, p, &g->model->layer[0]);
    lap(&at, &g->times.router_ns);
    return g->predicted;
}

static void set_job(const struct inf_graph *g, const struct inf_layer *l, uint32_t expert,
                    const uint8_t *blob, struct krn_expert_job *ret_job)
{
    *ret_job = (struct krn_expert_job){.gate = blob + l->gate.offset,
                                       .up = blob + l->up.offset,
                                       .down = blob + l->down.offset,
                                       .gate_type = l->gate_type,
                                       .up_type = l->up_type,
                                       .down_type = l->down_type,
                                       .slots = g->slots + g->offsets[expert],
                                       .n_slots = g->offsets[expert + 1] - g->offsets[expert]};
}

static void run_jobs(struct inf_graph *g, uint32_t n_jobs)
{
    const struct krn_shape *s = &g->model->shape;
    if (n_jobs)
        krn_host_experts(g->host, g->jobs, n_jobs, g->normed, s->top_k, s->hidden, s->width,
                         g->expert_scratch, g->out);
}

/* Streamed experts of the layer, group by group as they land. `routed` of them have tokens. */
static int run_streamed(struct inf_graph *g, const struct inf_pass *p, uint32_t layer, uint32_t routed,
                        struct shm_error *err)
{
    const struct inf_layer *l = &g->model->layer[layer];
    const struct krn_shape *s = &g->model->shape;
    const uint8_t *const *resident = p->resident ? p->resident + (size_t)layer * s->experts : NULL;
    uint64_t at = shm_now_ns();
    uint32_t ran = 0;
    for (;;) {
        uint32_t first, end, n_jobs = 0;
        int rc = inf_stream_wait(p->stream, layer, &first, &end, err);
        lap(&at, &g->times.wait_ns);
        if (rc)
            return rc;
        if (first == end)
            break;
        for (uint32_t e = 0; e < s->experts; e++) {
            if (!g->counts_now[e] || (resident && resident[e]))
                continue;
            const uint8_t *blob = inf_stream_slot(p->stream, layer, e, first, end);
            if (blob)
                set_job(g, l, e, blob, &g->jobs[n_jobs++]);
        }
        run_jobs(g, n_jobs);
        lap(&at, &g->times.experts_ns);
        inf_stream_release(p->stream, layer, end);
        ran += n_jobs;
    }
    if (ran != routed)
        return shm_error_set(err, EPROTO,
                             "layer %u: expertd's slot table named %u experts, tokens were routed to %u: "
                             "this read is given up",
                             layer, ran, routed);
    return 0;
}

int inf_graph_experts(struct inf_graph *g, const struct inf_pass *p, uint32_t layer, struct shm_error *err)
{
    const struct inf_layer *l = &g->model->layer[layer];
    const struct krn_shape *s = &g->model->shape;
    const uint8_t *const *resident = p->resident ? p->resident + (size_t)layer * s->experts : NULL;
    if (p->cancel && atomic_load_explicit(p->cancel, memory_order_relaxed))
        return shm_error_set(err, ECANCELED, "cancelled");
    uint64_t at = shm_now_ns();

    bool predicts = p->predict && layer + 1 < g->model->hparams.layers;
    if (predicts)
        predict(g, p, l + 1);
    krn_host_rmsnorm(g->host, g->x, l->ffn_norm, g->model->hparams.rms_eps, p->tokens, s->hidden, g->normed);
    inf_router_scores(g->pool, l->router, s->experts, s->hidden, g->normed, p->tokens, g->scores);
    krn_host_router(g->host, g->scores, p->tokens, s->experts, s->top_k, g->model->hparams.norm_topk != 0,
                    g->ids, g->weights);
    krn_host_group(g->ids, p->tokens, s->experts, s->top_k, g->offsets, g->slots);
    uint32_t streamed = 0, n_jobs = 0;
    for (uint32_t e = 0; e < s->experts; e++) {
        g->counts_now[e] = g->offsets[e + 1] - g->offsets[e];
        if (p->counts)
            p->counts[(size_t)layer * s->experts + e] = g->counts_now[e];
        if (!g->counts_now[e])
            continue;
        if (resident && resident[e])
            set_job(g, l, e, resident[e], &g->jobs[n_jobs++]);
        else
            streamed++;
    }
    if (p->stream)
        inf_stream_publish(p->stream, layer, g->counts_now, predicts ? g->predicted : NULL);
    else if (streamed)
        return shm_error_set(err, EINVAL, "layer %u: %u experts are neither resident nor streamed", layer,
                             streamed);
    lap(&at, &g->times.router_ns);
    if (p->on_routes)
        p->on_routes(p->ctx, layer, p->tokens, g->ids, g->weights);
    if (p->on_layer)
        p->on_layer(p->ctx, layer);

    /* The residents run while the link moves the others. */
    run_jobs(g, n_jobs);
    lap(&at, &g->times.experts_ns);
    if (p->stream) {
        int rc = run_streamed(g, p, layer, streamed, err);
        if (rc)
            return rc;
    }
    at = shm_now_ns();
    krn_host_combine(g->host, g->out, g->weights, p->tokens, s->top_k, s->hidden, g->x);
    lap(&at, &g->times.experts_ns);
    return 0;
}

static int head_add(void *ctx, uint32_t row, uint32_t rows, uint32_t at)
{
    struct inf_graph *g = ctx;
    const uint32_t hidden = g->model->shape.hidden;
    uint64_t at_ns = shm_now_ns();
    krn_host_rmsnorm(g->host, g->x + (size_t)row * hidden, g->model->output_norm, g->model->hparams.rms_eps,
                     rows, hidden, g->normed + (size_t)at * hidden);
    lap(&at_ns, &g->times.head_ns);
    return 0;
}

static int head_make(void *ctx, uint32_t first, uint32_t rows, const float **ret_logits)
{
    struct inf_graph *g = ctx;
    uint64_t at_ns = shm_now_ns();
    (void)first;
    krn_host_matmul(g->host, &g->model->head, g->normed, rows, g->logits);
    lap(&at_ns, &g->times.head_ns);
    *ret_logits = g->logits;
    return 0;
}

void inf_graph_head(struct inf_graph *g, const struct inf_pass *p)
{
    inf_head_walk(p, g->model->hparams.vocab, INF_LOGIT_ROWS, false,
                  &(struct inf_head){.ctx = g, .add = head_add, .make = head_make});
}
