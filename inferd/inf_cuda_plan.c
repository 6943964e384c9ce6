/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include "inferd/inf_kv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_MOST  32768u
#define CHUNK_LEAST 64u
#define CHUNK_STEP  64u
/* Left to the driver: local memory of kernels, launches, another worker's context. */
#define RESERVE_BYTES (UINT64_C(384) << 20)
/* Of what is free, for keys and values, when nobody asked for a context. */
#define KV_SHARE 0.6

/* ---- dense weights ---- */

struct upload {
    struct inf_cuda *c;
    uint64_t bytes; /* placed so far */
    enum { PLACE, COPY, EXPAND } round;
    int rc;
};

/* Places n bytes from src behind what is there, copies them in the second round. Readable beyond the end up
 * to 16 bytes, as the kernels want it. */
static krn_cuda_ptr put(struct upload *u, const void *src, uint64_t n)
{
    krn_cuda_ptr at = u->c->dense + u->bytes;
    u->bytes += (n + 16 + 255) & ~UINT64_C(255);
    if (u->round == COPY && !u->rc)
        u->rc = krn_upload_put(u->c->upload, at, src, n);
    return at;
}

static struct krn_cu_matrix put_matrix(struct upload *u, const struct krn_mat *m)
{
    uint64_t row_bytes = 0;
    krn_row_bytes(m->type, m->cols, &row_bytes); /* checked when the model was opened */
    struct krn_cu_matrix r = krn_cu_matrix_of(m, put(u, m->data, row_bytes * m->rows));
    if (r.type == KRN_BF16) { /* once for all: the kernels multiply f16 */
        if (u->round == EXPAND && !u->rc)
            u->rc = krn_cu_expand(u->c->cu, u->c->stream, &r, r.data);
        r.type = KRN_F16;
    }
    return r;
}

static krn_cuda_ptr put_floats(struct upload *u, const float *v, uint64_t n)
{
    return v ? put(u, v, n * sizeof *v) : 0;
}

static struct krn_cu_matrix part_of(const struct shm_part *part, const struct krn_type *type)
{
    const struct krn_mat m = {.type = type, .rows = part->rows, .cols = part->cols};
    return krn_cu_matrix_of(&m, part->offset);
}

static void put_model(struct upload *u, const struct inf_model *m)
{
    struct inf_cuda *c = u->c;
    const struct krn_shape *s = &m->shape;
    u->bytes = 0;
    c->embed = put_matrix(u, &m->embed);
    c->head = m->head.data == m->embed.data ? c->embed : put_matrix(u, &m->head);
    c->output_norm = put_floats(u, m->output_norm, s->hidden);
    for (uint32_t i = 0; i < m->hparams.layers; i++) {
        const struct inf_layer *l = &m->layer[i];
        c->layer[i] =
            (struct inf_cuda_layer){.attn_norm = put_floats(u, l->attn_norm, s->hidden),
                                    .ffn_norm = put_floats(u, l->ffn_norm, s->hidden),
                                    .q_norm = put_floats(u, l->q_norm, s->head_dim),
                                    .k_norm = put_floats(u, l->k_norm, s->head_dim),
                                    .router = put_floats(u, l->router, (uint64_t)s->experts * s->hidden),
                                    .q = put_matrix(u, &l->q),
                                    .k = put_matrix(u, &l->k),
                                    .v = put_matrix(u, &l->v),
                                    .output = put_matrix(u, &l->output),
                                    .experts = {.gate = part_of(&l->gate, l->gate_type),
                                                .up = part_of(&l->up, l->up_type),
                                                .down = part_of(&l->down, l->down_type),
                                                .experts = s->experts,
                                                .top_k = s->top_k}};
    }
}

static int check_shape(const struct inf_model *m, struct shm_error *err)
{
    const struct krn_shape *s = &m->shape;
    if (s->head_dim != 64 && s->head_dim != 128)
        return shm_error_set(err, ENOTSUP,
                             "model '%s': heads of %u, the GPU's kernels know 64 and 128: use --device host",
                             m->hparams.name, s->head_dim);
    return 0;
}

int inf_cuda_set_model(struct inf_device *d, const struct inf_model *model, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    if (c->model) {
        /* The fingerprint is the same (inf_store.h): what was uploaded is still right. */
        if (memcmp(&c->model->shape, &model->shape, sizeof model->shape) != 0 ||
            c->model->hparams.vocab != model->hparams.vocab ||
            c->model->hparams.layers != model->hparams.layers)
            return -EINVAL;
        c->model = model;
        return 0;
    }
    c->base.kv_block_bytes = UINT64_C(2) * model->hparams.layers * model->shape.kv_heads * INF_KV_BLOCK *
                             model->shape.head_dim * 2;
    int rc = check_shape(model, err);
    if (rc || (rc = inf_cuda_upload(c, false, err)))
        return rc;
    c->layer = calloc(model->hparams.layers, sizeof *c->layer);
    if (!c->layer)
        return -ENOMEM;
    struct upload u = {.c = c};
    put_model(&u, model);
    if ((rc = KRN_CUDA(mem_alloc, &c->dense, u.bytes))) {
        c->dense = 0;
        char what[64];
        snprintf(what, sizeof what, "%.1f MiB of dense weights", (double)u.bytes / 1048576);
        return krn_cuda_explain(rc, what, err);
    }
    u.round = COPY;
    put_model(&u, model);
    rc = u.rc ? u.rc : krn_upload_finish(c->upload);
    krn_upload_close(&c->upload);
    if (!rc) {
        u.round = EXPAND;
        put_model(&u, model);
        rc = u.rc ? u.rc : KRN_CUDA(stream_synchronize, c->stream);
    }
    if (rc)
        return krn_cuda_explain(rc, "upload of the dense weights", err);
    c->base.dense_bytes = u.bytes;
    c->model = model;
    return 0;
}

/* ---- activations ---- */

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Of struct inf_cuda_map, each span as long as the context. */
static uint64_t map_bytes(const struct inf_cuda *c, uint32_t ctx)
{
    return sizeof(struct inf_cuda_map) +
           (c->model->hparams.layers + (uint64_t)INF_SPANS_MAX * inf_kv_blocks(ctx)) * 4;
}

/* Everything that a chunk of t tokens needs; base 0 gives the bytes alone. */
static uint64_t place(const struct inf_cuda *c, uint64_t t, uint32_t ctx, krn_cuda_ptr base,
                      struct inf_cuda_act *ret_act)
{
    const struct krn_shape *s = &c->model->shape;
    const struct inf_cuda_layer *l = &c->layer[0];
    const uint64_t slots = t * s->top_k, q = t * s->heads * s->head_dim, kv = t * s->kv_heads * s->head_dim;
    uint64_t dense = 0;
    for (uint32_t i = 0; i < c->model->hparams.layers; i++) {
        l = &c->layer[i];
        dense = most(most(dense, krn_cu_dense_scratch_bytes(&l->q)),
                     most(krn_cu_dense_scratch_bytes(&l->k),
                          most(krn_cu_dense_scratch_bytes(&l->v), krn_cu_dense_scratch_bytes(&l->output))));
    }
    struct inf_cuda_act a;
    krn_cuda_ptr shared_attention, shared_experts;
    const uint64_t hist = krn_cu_hist_bytes((uint32_t)t, s->top_k, s->experts);
    /* Attention and experts take turns with the largest buffers. */
    const struct piece {
        krn_cuda_ptr *at;
        uint64_t bytes;
    } attention[] = {{&a.q, q * 4}, {&a.k, kv * 4}, {&a.v, kv * 4}, {&a.q16, q * 2}, {&a.y16, q * 2}},
      experts[] = {{&a.out, slots * s->hidden * 4}, {&a.hidden_rows, slots * s->width * 2}};
    uint64_t attention_bytes = 0, experts_bytes = 0;
    for (size_t i = 0; i < sizeof attention / sizeof attention[0]; i++)
        attention_bytes += (attention[i].bytes + 255) & ~UINT64_C(255);
    for (size_t i = 0; i < sizeof experts / sizeof experts[0]; i++)
        experts_bytes += (experts[i].bytes + 255) & ~UINT64_C(255);
    const struct piece all[] = {
        {&a.x, t * s->hidden * 4},
        {&a.normed, t * s->hidden * 4},
        {&a.normed16, t * s->hidden * 2},
        {&shared_attention, most(attention_bytes, experts_bytes)},
        {&a.rope, t * s->head_dim * 4},
        {&a.scores, t * s->experts * 4},
        {&a.ids, slots * 4},
        {&a.weights, slots * 4},
        {&a.slots, slots * 4},
        {&a.predicted_ids, slots * 4},
        {&a.predicted_weights, slots * 4},
        {&a.counts, s->experts * UINT64_C(4)},
        {&a.offsets, (s->experts + 1) * UINT64_C(4)},
        {&a.hist, hist},
        {&a.predicted_hist, hist},
        {&a.plan, krn_cu_plan_bytes((uint32_t)t, s->top_k, s->experts)},
        {&a.dense, dense},
        {&a.map, map_bytes(c, ctx)},
        {&a.decode, krn_cu_decode_scratch_bytes(ctx, INF_SPANS_MAX, s->heads, s->head_dim)},
        {&a.logits, INF_CUDA_LOGIT_ROWS * (uint64_t)c->model->hparams.vocab * 4},
    };
    uint64_t at = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        *all[i].at = base + at;
        at += (all[i].bytes + 255) & ~UINT64_C(255);
    }
    shared_experts = shared_attention;
    for (size_t i = 0; i < sizeof attention / sizeof attention[0]; i++) {
        *attention[i].at = shared_attention;
        shared_attention += (attention[i].bytes + 255) & ~UINT64_C(255);
    }
    for (size_t i = 0; i < sizeof experts / sizeof experts[0]; i++) {
        *experts[i].at = shared_experts;
        shared_experts += (experts[i].bytes + 255) & ~UINT64_C(255);
    }
    if (ret_act)
        *ret_act = a;
    return at;
}

/* The largest chunk up to `wanted` that fits in `bytes`; 0: not even the least. */
static uint32_t fit_chunk(const struct inf_cuda *c, uint32_t wanted, uint32_t ctx, uint64_t bytes)
{
    if (place(c, wanted, ctx, 0, NULL) <= bytes)
        return wanted;
    uint32_t low = 0, high = wanted / CHUNK_STEP; /* in steps */
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (place(c, (uint64_t)middle * CHUNK_STEP, ctx, 0, NULL) <= bytes)
            low = middle;
        else
            high = middle - 1;
    }
    return low * CHUNK_STEP;
}

/* Pinned memory for what passes between host and device in small pieces. */
static int make_host(struct inf_cuda *c, uint32_t ctx)
{
    const struct inf_model *m = c->model;
    uint64_t ids = ((uint64_t)c->chunk * 4 + 255) & ~UINT64_C(255);
    uint64_t counts = (m->shape.experts * UINT64_C(4) + 255) & ~UINT64_C(255);
    uint64_t ran = (m->hparams.layers * UINT64_C(4) + 255) & ~UINT64_C(255);
    uint64_t logits = (INF_CUDA_LOGIT_ROWS * (uint64_t)m->hparams.vocab * 4 + 255) & ~UINT64_C(255);
    void *memory;
    int rc = KRN_CUDA(host_alloc, &memory, ids + counts + ran + logits + map_bytes(c, ctx),
                      KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP);
    if (rc)
        return rc;
    c->host = memory;
    c->host_ids = memory;
    c->host_counts = (uint32_t *)(void *)(c->host + ids);
    c->host_ran = (uint32_t *)(void *)(c->host + ids + counts);
    c->host_logits = (float *)(void *)(c->host + ids + counts + ran);
    c->host_map = (struct inf_cuda_map *)(void *)(c->host + ids + counts + ran + logits);
    memset(c->host_map, 0, map_bytes(c, ctx));
    return KRN_CUDA(host_pointer, &c->host_device, memory, 0);
}

/* Blocks of the pool. One conversation: its context; several: what is left of KV_SHARE, but no more than
 * twice what they fill, which leaves as much for beginnings that are kept. */
static uint64_t pool_blocks(const struct inf_cuda *c, uint64_t share, uint32_t conversations, uint32_t ctx)
{
    const uint64_t one = inf_kv_blocks(ctx);
    uint64_t blocks = share / c->base.kv_block_bytes;
    if (conversations < 2)
        return one;
    if (blocks > 2 * one * conversations)
        blocks = 2 * one * conversations;
    return blocks > one ? blocks : one;
}

int inf_cuda_plan(struct inf_device *d, uint32_t conversations, uint32_t *chunk, uint32_t *ctx,
                  uint32_t *kv_tokens, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct inf_model *m = c->model;
    const uint64_t block = c->base.kv_block_bytes;
    size_t free_bytes = 0, total_bytes = 0;
    int rc = KRN_CUDA(memory_info, &free_bytes, &total_bytes);
    if (rc)
        return krn_cuda_explain(rc, "free device memory", err);
    const uint64_t usable = free_bytes > RESERVE_BYTES ? free_bytes - RESERVE_BYTES : 0,
                   share = (uint64_t)(KV_SHARE * (double)usable);
    uint32_t context = *ctx ? *ctx : m->hparams.context;
    if (!*ctx && share / block < inf_kv_blocks(context))
        context = share < block ? CHUNK_LEAST : (uint32_t)(share / block) * INF_KV_BLOCK;
    uint64_t blocks = *kv_tokens ? inf_kv_blocks(*kv_tokens) : pool_blocks(c, share, conversations, context);
    if (blocks > UINT32_MAX / INF_KV_BLOCK)
        blocks = UINT32_MAX / INF_KV_BLOCK;
    const uint64_t kv = blocks * block;
    uint32_t wanted = *chunk ? *chunk : CHUNK_MOST;
    if (wanted > context)
        wanted = context;
    c->chunk = kv < usable ? fit_chunk(c, wanted, context, usable - kv) : 0;
    if (!c->chunk)
        return shm_error_set(
            err, ENOMEM,
            "keys and values of %u tokens (%.1f MiB) and a chunk of %u (%.1f MiB) do not fit in "
            "%.1f MiB of free device memory: choose a smaller --ctx, --ring or --resident",
            (uint32_t)blocks * INF_KV_BLOCK, (double)kv / 1048576, CHUNK_LEAST,
            (double)place(c, CHUNK_LEAST, context, 0, NULL) / 1048576, (double)usable / 1048576);
    uint64_t bytes = place(c, c->chunk, context, 0, NULL);
    rc = KRN_CUDA(mem_alloc, &c->memory, bytes);
    if (rc)
        c->memory = 0;
    else
        rc = make_host(c, context);
    if (rc)
        return krn_cuda_explain(rc, "activation memory", err);
    place(c, c->chunk, context, c->memory, &c->act);
    c->base.activation_bytes = bytes;
    c->base.token_bytes =
        (place(c, 2 * CHUNK_MOST, context, 0, NULL) - place(c, CHUNK_MOST, context, 0, NULL)) / CHUNK_MOST;
    *chunk = c->chunk;
    *ctx = context;
    *kv_tokens = (uint32_t)blocks * INF_KV_BLOCK;
    return 0;
}

void inf_cuda_plan_free(struct inf_cuda *c)
{
    if (c->memory)
        krn_cuda.mem_free(c->memory);
    if (c->dense)
        krn_cuda.mem_free(c->dense);
    if (c->host)
        krn_cuda.host_free(c->host);
    free(c->layer);
    free(c->routes);
    c->memory = c->dense = 0;
    c->host = NULL;
    c->layer = NULL;
    c->routes = NULL;
}
