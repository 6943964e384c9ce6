/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include "inferd/inf_head.h"
#include "inferd/inf_kv.h"

#include <errno.h>
#include <string.h>

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
    if (p->generated)
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
    INF_CUDA_TRY(map_spans(c, p));
    INF_CUDA_TRY(inf_cuda_trace_begin(c));
    INF_CUDA_TRY(krn_cu_embed(c->cu, c->stream, &c->embed, c->host_device, p->tokens, c->act.x));
    INF_CUDA_TRY(rope(c, p));
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
    INF_CUDA_TRY(krn_cu_gemv_of(c->cu, c->stream, &product));
    INF_CUDA_TRY(krn_cu_token_attention(c->cu, c->stream, kv, &heads));
    INF_CUDA_TRY(krn_cu_gemv(c->cu, c->stream, &l->output, a->y16, p->tokens, true, a->x));
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
        INF_CUDA_TRY(krn_cu_qkv(c->cu, c->stream, &cache, span->position, span->tokens, s->heads,
                                a->q + q * 4, a->k + kv * 4, a->v + kv * 4, l->q_norm, l->k_norm,
                                c->model->hparams.rms_eps, a->rope + q / s->heads * 4, q16));
        INF_CUDA_TRY(krn_cu_attention(c->cu, c->stream, &cache, span->position, span->tokens, s->heads, q16,
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
    if (p->generated) {
        if ((rc = token_attention(c, p, layer, err)))
            return rc;
    } else {
        INF_CUDA_TRY(krn_cu_rmsnorm(c->cu, c->stream, a->x, l->attn_norm, c->model->hparams.rms_eps,
                                    p->tokens, s->hidden, 0, a->normed16));
        INF_CUDA_TRY(dense(c, p, &l->q, a->normed16, false, a->q));
        INF_CUDA_TRY(dense(c, p, &l->k, a->normed16, false, a->k));
        INF_CUDA_TRY(dense(c, p, &l->v, a->normed16, false, a->v));
        if ((rc = prompt_attention(c, p, layer, err)))
            return rc;
        INF_CUDA_TRY(dense(c, p, &l->output, a->y16, true, a->x));
        INF_CUDA_TRY(inf_cuda_trace_attention(c, p, layer));
    }
    inf_cuda_stamp(c, INF_STEP_ATTENTION);
    c->base.times.enqueue_ns += shm_now_ns() - at_ns;
    return inf_cuda_spend(c, p, p->stream, p->generated ? 4 : 12, err);
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
    INF_CUDA_TRY(KRN_CUDA(wait_32, c->stream, c->flag, (uint32_t)end, KRN_CUDA_WAIT_GEQ));
    INF_CUDA_TRY(
        KRN_CUDA(write_64, c->stream, inf_cuda_control(c, &c->control.worker->released_groups), end, 0));
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

/* What inf_head_walk hands back. */
struct head {
    struct inf_cuda *c;
    const struct inf_pass *p;
    struct shm_error *err;
};

static int head_add(void *ctx, uint32_t row, uint32_t rows, uint32_t at)
{
    const struct head *h = ctx;
    struct inf_cuda *c = h->c;
    struct shm_error *err = h->err;
    const uint64_t hidden = c->model->shape.hidden;
    int rc;
    if (!h->p->generated) /* of those the kernel takes the norm itself, where they are */
        INF_CUDA_TRY(krn_cu_rmsnorm(c->cu, c->stream, c->act.x + row * hidden * 4, c->output_norm,
                                    c->model->hparams.rms_eps, rows, c->model->shape.hidden, 0,
                                    c->act.normed16 + at * hidden * 2));
    return 0;
}

static int head_make(void *ctx, uint32_t first, uint32_t rows, const float **ret_logits)
{
    const struct head *h = ctx;
    struct inf_cuda *c = h->c;
    struct shm_error *err = h->err;
    const struct inf_cuda_act *a = &c->act;
    const struct inf_model *m = c->model;
    int rc;
    if (h->p->generated) {
        const struct krn_cu_product product = {.m = {&c->head},
                                               .y = {a->logits},
                                               .count = 1,
                                               .x = a->x + (uint64_t)first * m->shape.hidden * 4,
                                               .norm = c->output_norm,
                                               .eps = m->hparams.rms_eps,
                                               .tokens = rows};
        INF_CUDA_TRY(krn_cu_gemv_of(c->cu, c->stream, &product));
    } else {
        INF_CUDA_TRY(krn_cu_dense(c->cu, c->stream, &c->head, a->normed16, rows, false, a->dense, a->logits));
    }
    INF_CUDA_TRY(
        KRN_CUDA(copy_out_async, c->host_logits, a->logits, (size_t)rows * m->hparams.vocab * 4, c->stream));
    inf_cuda_stamp(c, INF_STEP_HEAD);
    if ((rc = release_rest(c, h->p, err)) || (rc = inf_cuda_finish(c, h->p, h->p->stream, err)) ||
        (rc = check_ran(c, h->p, err)))
        return rc;
    *ret_logits = c->host_logits;
    return 0;
}

int inf_cuda_head(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct inf_model *m = c->model;
    bool wanted = false;
    for (uint32_t i = 0; i < p->spans; i++)
        wanted |= p->span[i].first_logit < p->span[i].tokens;
    int rc;
    INF_CUDA_TRY(KRN_CUDA(copy_out_async, c->host_ran, inf_cuda_ran(c, 0),
                          m->hparams.layers * sizeof *c->host_ran, c->stream));
    struct head head = {c, p, err};
    if (wanted)
        rc = inf_head_walk(p, m->hparams.vocab, INF_CUDA_LOGIT_ROWS, p->generated,
                           &(struct inf_head){.ctx = &head, .add = head_add, .make = head_make});
    else
        rc = release_rest(c, p, err);
    if (!rc && !wanted && !(rc = inf_cuda_finish(c, p, p->stream, err)))
        rc = check_ran(c, p, err);
    if (!rc)
        INF_CUDA_TRY(inf_cuda_trace_end(c, p));
    if (!rc)
        inf_cuda_profile_collect(c);
    if (!rc && p->counts && p->stream) /* the kernels published them; nobody else writes there */
        memcpy(p->counts, c->control.tokens,
               sizeof *p->counts * m->hparams.layers * (size_t)m->shape.experts);
    return rc;
}
