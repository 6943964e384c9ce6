/* SPDX-License-Identifier: MIT */
#include "kernels/krn_cu_priv.h"
#include "kernels/krn_fatbin.h"

#include <errno.h>
#include <stdlib.h>

#define MODULES    3
#define GEMV_WARPS (KRN_CU_GEMV_THREADS / 32)
#define GEMV_ROWS  4u    /* of an item */
#define DOWN_WIDE  1024u /* columns beyond which down takes a row at a time */

/* X(kernel, module) */
#define KERNELS(X)                                                                                           \
    X(gemv, gemv)                                                                                            \
    X(gate_up_gemv, gemv)                                                                                    \
    X(down_gemv, gemv)                                                                                       \
    X(down_gemv_wide, gemv)                                                                                  \
    X(token_router, token)                                                                                   \
    X(token_locate, token)                                                                                   \
    X(decode_part_64, decode)                                                                                \
    X(decode_part_128, decode)                                                                               \
    X(decode_join_64, decode)                                                                                \
    X(decode_join_128, decode)

#define ENUM(kernel, module) K_##kernel,
enum kernel { KERNELS(ENUM) KERNEL_COUNT };
enum module { M_gemv, M_token, M_decode };
static const char *const module_names[MODULES] = {"krn_cu_gemv", "krn_cu_token", "krn_cu_decode"};
#define ROW(kernel, module) {"krn_dev_" #kernel, M_##module},
static const struct {
    const char *name;
    enum module module;
} kernels[KERNEL_COUNT] = {KERNELS(ROW)};

struct krn_cu_token {
    struct krn_cuda_device *device;
    void *module[MODULES];
    void *function[KERNEL_COUNT];
    bool overlap;          /* kernels may start before the one before them has ended */
    krn_cuda_ptr counters; /* KRN_CU_COUNTERS words, then the router's; zero between launches */
};

#define COUNTERS_BYTES ((KRN_CU_COUNTERS + KRN_CU_ROWS_MAX) * 4)

static uint32_t div_up(uint64_t a, uint32_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* What launches may ask for: kernels have up to 8 KiB of their own. */
static uint32_t shared_of(const struct krn_cuda_device *device)
{
    return (uint32_t)device->shared_max - 8192;
}

static int make_counters(struct krn_cu_token *t)
{
    void *stream;
    int rc = KRN_CUDA(stream_create, &stream, KRN_CUDA_STREAM_NON_BLOCKING);
    if (rc)
        return rc;
    if (!(rc = KRN_CUDA(mem_alloc, &t->counters, COUNTERS_BYTES)) &&
        !(rc = KRN_CUDA(memset_8_async, t->counters, 0, COUNTERS_BYTES, stream)))
        rc = KRN_CUDA(stream_synchronize, stream);
    krn_cuda.stream_destroy(stream);
    return rc;
}

static bool can_overlap(const struct krn_cu_token *t)
{
    return t->device->major >= 9 && krn_cuda.launch_ex;
}

int krn_cu_token_create(struct krn_cuda_device *device, struct shm_error *err,
                        struct krn_cu_token **ret_token)
{
    struct krn_cu_token *t = calloc(1, sizeof *t);
    if (!t)
        return -ENOMEM;
    t->device = device;
    t->overlap = can_overlap(t);
    int rc = 0;
    for (int m = 0; rc == 0 && m < MODULES; m++)
        rc = krn_cuda_module(module_names[m], &t->module[m], err);
    for (int k = 0; rc == 0 && k < KERNEL_COUNT; k++) {
        const unsigned shared = k == K_token_locate ? 0 : shared_of(device);
        rc = krn_cuda_kernel(t->module[kernels[k].module], kernels[k].name, shared, &t->function[k], err);
        /* Neighbours on a multiprocessor must want it divided the same way. A wish: its failure is none. */
        if (rc == 0 && krn_cuda.function_attribute)
            krn_cuda.function_attribute(t->function[k], KRN_CUDA_FUNC_ATTR_CARVEOUT, 100);
    }
    if (rc == 0 && (rc = make_counters(t)))
        krn_cuda_explain(rc, "counters of the kernels", err);
    if (rc) {
        krn_cu_token_destroy(&t);
        return rc;
    }
    *ret_token = t;
    return 0;
}

void krn_cu_token_destroy(struct krn_cu_token **token)
{
    struct krn_cu_token *t = *token;
    if (!t)
        return;
    if (t->counters)
        krn_cuda.mem_free(t->counters);
    for (int m = 0; m < MODULES; m++)
        if (t->module[m])
            krn_cuda.module_unload(t->module[m]);
    free(t);
    *token = NULL;
}

bool krn_cu_overlap(struct krn_cu *cu, bool wanted)
{
    struct krn_cu_token *t = krn_cu_token_of(cu);
    return t->overlap = wanted && can_overlap(t);
}

struct grid {
    uint32_t x, y, z, threads, shared;
};

static int launch(struct krn_cu_token *t, enum kernel k, struct grid g, void *stream, const void *args)
{
    void *params[] = {(void *)args};
    return krn_cuda_check(
        krn_cuda.launch(t->function[k], g.x, g.y, g.z, g.threads, 1, 1, g.shared, stream, params, NULL),
        kernels[k].name);
}

/* A kernel that takes its turn by itself (grid_turn). */
static int launch_early(struct krn_cu_token *t, enum kernel k, struct grid g, void *stream, const void *args)
{
    if (!t->overlap)
        return launch(t, k, g, stream, args);
    void *params[] = {(void *)args};
    struct krn_cuda_launch_attr attr = {.id = KRN_CUDA_LAUNCH_OVERLAP, .value = 1};
    const struct krn_cuda_launch l = {
        .grid = {g.x, g.y, g.z},
        .block = {g.threads, 1, 1},
        .shared_bytes = g.shared,
        .stream = stream,
        .attrs = &attr,
        .attr_count = 1,
    };
    return krn_cuda_check(krn_cuda.launch_ex(&l, t->function[k], params, NULL), kernels[k].name);
}

#define X_INTS   1u
#define X_FLOATS 2u

static bool is_float(uint32_t type)
{
    return type == KRN_F32 || type == KRN_F16 || type == KRN_BF16;
}

static uint32_t form_of(uint32_t type)
{
    return is_float(type) ? X_FLOATS : X_INTS;
}

/* As krn_cu_vector.cuh lays it out, and apart so that eight vectors do not meet in a bank. */
static void place_vector(struct krn_cu_x *x)
{
    uint32_t units = div_up(x->cols, 64), bytes = x->forms & X_INTS ? (units * 152 + 15) & ~15u : 0;
    if (x->forms & X_FLOATS)
        bytes += units * 256;
    x->stride = (bytes + 63) / 128 * 128 + 64;
}

static uint32_t chunk_bytes(const struct krn_cu_matrix *m)
{
    const struct krn_type *type = krn_type_find(m->type);
    uint64_t bytes = 0;
    if (type && !is_float(m->type))
        krn_row_bytes(type, m->cols < KRN_CU_GEMV_CHUNK ? m->cols : KRN_CU_GEMV_CHUNK, &bytes);
    return (uint32_t)bytes;
}

static uint32_t row_slot(const struct krn_cu_matrix *m)
{
    return is_float(m->type) ? 0 : KRN_CU_ROW_SLOT(chunk_bytes(m));
}

/* Blocks and stages for so many items: about as many blocks as fit, with room in shared memory for the warps
 * that have items. 0: does not fit. */
static uint32_t fit_items(const struct krn_cu_token *t, uint32_t items, uint32_t vector, uint32_t slot,
                          uint32_t *ret_stages, uint32_t *ret_shared)
{
    const uint32_t sms = (uint32_t)t->device->multiprocessors, most = shared_of(t->device);
    uint32_t blocks = items <= sms * GEMV_WARPS ? sms : 2 * sms, stage = GEMV_ROWS * slot;
    if (blocks > items)
        blocks = items;
    uint32_t warps = div_up(items, blocks), stages = 1;
    if (warps > GEMV_WARPS) {
        warps = GEMV_WARPS;
        if (vector + 2 * warps * stage < most / 2)
            stages = 2;
    }
    while (vector + stages * warps * stage > most) {
        if (warps == 1)
            return 0;
        warps--;
        blocks = div_up(items, warps);
    }
    *ret_stages = stages;
    *ret_shared = vector + stages * warps * stage;
    return blocks;
}

int krn_cu_gemv_of(struct krn_cu *cu, void *stream, const struct krn_cu_product *p)
{
    struct krn_cu_token *t = krn_cu_token_of(cu);
    struct krn_cu_gemv_args a = {.x = {.x = p->x, .norm = p->norm, .eps = p->eps, .cols = p->m[0]->cols},
                                 .count = p->count,
                                 .add = p->add};
    uint32_t items = 0, slot = 0, shared = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        const uint32_t s = row_slot(p->m[i]);
        if (p->m[i]->cols != a.x.cols)
            return -EINVAL;
        a.m[i] = *p->m[i];
        a.y[i] = p->y[i];
        a.x.forms |= form_of(a.m[i].type);
        items += div_up(a.m[i].rows, GEMV_ROWS);
        slot = s > slot ? s : slot;
    }
    place_vector(&a.x);
    uint32_t blocks = fit_items(t, items, a.x.stride, slot, &a.stages, &shared);
    if (!blocks)
        return -EINVAL;
    return launch_early(t, K_gemv, (struct grid){blocks, p->tokens, 1, KRN_CU_GEMV_THREADS, shared}, stream,
                        &a);
}

int krn_cu_gemv(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr x,
                uint32_t tokens, bool add, krn_cuda_ptr y)
{
    const struct krn_cu_product p = {.m = {m}, .y = {y}, .count = 1, .x = x, .tokens = tokens, .add = add};
    return krn_cu_gemv_of(cu, stream, &p);
}

int krn_cu_token_router(struct krn_cu *cu, void *stream, const struct krn_cu_token_route *r)
{
    struct krn_cu_token *t = krn_cu_token_of(cu);
    struct krn_cu_token_router_args a = {.x = {r->x, r->norm, r->eps, r->hidden, X_FLOATS, 0},
                                         .w = r->w,
                                         .scores = r->scores,
                                         .ids = r->ids,
                                         .weights = r->weights,
                                         .blobs = r->blobs,
                                         .resident = r->resident,
                                         .predicted_ids = r->predicted_ids,
                                         .counter = t->counters + KRN_CU_COUNTERS * 4,
                                         .ran = r->ran,
                                         .experts = r->experts,
                                         .top_k = r->top_k,
                                         .renorm = r->renorm};
    if (r->experts > KRN_CU_EXPERTS_MAX || r->top_k > r->experts || r->top_k > KRN_CU_TOP_K_MAX ||
        r->hidden % 16 || !r->tokens || r->tokens > KRN_CU_ROWS_MAX || (r->publication && r->tokens > 1))
        return -EINVAL;
    if (r->publication)
        a.publication = *r->publication;
    place_vector(&a.x);
    return launch_early(
        t, K_token_router,
        (struct grid){div_up(r->experts, KRN_CU_ROUTER_EACH), r->tokens, 1, KRN_CU_GEMV_THREADS, a.x.stride},
        stream, &a);
}

/* Experts of generated tokens: where they are, hidden rows, outputs (or, weighed, onto the residual). */
int krn_cu_token_experts(struct krn_cu_token *t, void *stream, const struct krn_cu_expert_run *run)
{
    const struct krn_cu_expert_shape *s = run->shape;
    const uint32_t slots = run->tokens * s->top_k, sms = (uint32_t)t->device->multiprocessors,
                   most = shared_of(t->device);
    const bool norm = run->norm != 0;
    struct krn_cu_locate_args where = {.ids = run->ids,
                                       .resident = run->resident,
                                       .table = run->table,
                                       .ring = run->ring,
                                       .slot_bytes = run->slot_bytes,
                                       .blobs = run->plan,
                                       .ran = run->ran,
                                       .slots = slots,
                                       .group = run->group,
                                       .group_end = run->group_end,
                                       .ring_slots = run->ring_slots,
                                       .all = run->all};
    struct krn_cu_expert_gemv_args up = {.x = {norm ? run->x_f32 : run->x_f16, run->norm, run->eps,
                                               s->gate.cols, form_of(s->gate.type) | form_of(s->up.type), 0},
                                         .a = s->gate,
                                         .b = s->up,
                                         .blobs = run->plan,
                                         .y = run->hidden_rows,
                                         .top_k = s->top_k};
    struct krn_cu_expert_gemv_args down = {
        .x = {run->hidden_rows, 0, 0, s->down.cols, form_of(s->down.type), 0},
        .a = s->down,
        .b = s->down,
        .blobs = run->plan,
        .weights = run->weights,
        .y = run->out,
        .top_k = s->top_k};
    if (s->top_k > KRN_CU_TOP_K_MAX)
        return -EINVAL;
    place_vector(&up.x);
    place_vector(&down.x);
    uint32_t slot = row_slot(&s->gate), other = row_slot(&s->up), shared = 0;
    uint32_t blocks = fit_items(t, div_up(s->gate.rows, 2) * s->top_k, up.x.stride,
                                slot > other ? slot : other, &up.stages, &shared);
    if (!blocks)
        return -EINVAL;

    /* Down: two rows of eight experts a warp, one where they are long. */
    const bool wide = s->down.cols > DOWN_WIDE;
    const uint32_t segment =
        is_float(s->down.type) ? 0 : KRN_CU_SEGMENT((wide ? 1 : 2) * chunk_bytes(&s->down));
    uint32_t items = s->down.rows / (wide ? 1 : 2), down_blocks = sms < items ? sms : items;
    uint32_t warps = div_up(items, down_blocks), vectors = s->top_k * down.x.stride;
    if (warps > GEMV_WARPS)
        warps = GEMV_WARPS;
    while (vectors + warps * 8 * segment > most) {
        if (warps == 1)
            return -EINVAL;
        warps--;
        down_blocks = div_up(items, warps);
    }
    int rc = run->located ? 0 : launch(t, K_token_locate, (struct grid){1, 1, 1, 32, 0}, stream, &where);
    if (rc == 0)
        rc = launch_early(t, K_gate_up_gemv,
                          (struct grid){blocks, run->tokens, 1, KRN_CU_GEMV_THREADS, shared}, stream, &up);
    if (rc == 0)
        rc = launch_early(
            t, wide ? K_down_gemv_wide : K_down_gemv,
            (struct grid){down_blocks, run->tokens, 1, KRN_CU_GEMV_THREADS, vectors + warps * 8 * segment},
            stream, &down);
    return rc;
}

/* The most parts that up to so many keys have, each of them `blocks` blocks. */
static uint32_t parts_most(uint64_t keys, uint32_t blocks)
{
    const uint32_t parts = div_up(keys, KRN_CU_SPLIT_KEYS),
                   most = blocks > KRN_CU_SPLIT_BLOCKS ? 1 : KRN_CU_SPLIT_BLOCKS / blocks;
    return parts < most ? parts : most;
}

uint64_t krn_cu_decode_scratch_bytes(uint32_t ctx, uint32_t tokens, uint32_t heads, uint32_t head_dim)
{
    /* A part's blocks take up to SPLIT_HEADS heads each. */
    return (uint64_t)parts_most(ctx, div_up(heads, KRN_CU_SPLIT_HEADS)) * tokens * heads * (head_dim + 4) *
           sizeof(float);
}

/* Parts of so many keys (krn_cu_decode.cu). */
static uint32_t parts_of(uint64_t keys, uint32_t blocks)
{
    uint32_t n = KRN_CU_SPLIT_KEYS, most = blocks > KRN_CU_SPLIT_BLOCKS ? blocks : KRN_CU_SPLIT_BLOCKS;
    while ((uint64_t)div_up(keys, n) * blocks > most)
        n *= 2;
    return div_up(keys, n);
}

static int decode(struct krn_cu_token *t, void *stream, const struct krn_cu_kv *kv, uint64_t keys_most,
                  struct krn_cu_decode_args *a)
{
    a->k = kv->k;
    a->v = kv->v;
    a->kv_heads = kv->kv_heads;
    a->head_dim = kv->head_dim;
    a->ctx = kv->ctx;
    a->scale_log2 = krn_cu_score_scale(kv->head_dim);
    a->blocks = kv->kv_heads * div_up(a->heads / kv->kv_heads, KRN_CU_SPLIT_HEADS);
    if ((kv->head_dim != 64 && kv->head_dim != 128) || !a->tokens || a->tokens > KRN_CU_ROWS_MAX)
        return -EINVAL;
    /* Of several tokens each one's keys are not known here. */
    a->parts = a->tokens == 1 ? parts_of(keys_most, a->blocks) : parts_most(keys_most, a->blocks);
    const bool wide = kv->head_dim == 128;
    if (a->parts <= KRN_CU_JOIN_FEW && a->tokens * a->blocks <= KRN_CU_COUNTERS)
        a->counters = t->counters;
    /* queries, and of each of eight warps stages of 16 keys and values */
    const uint32_t queries = KRN_CU_SPLIT_HEADS * kv->head_dim * 2, stage = 8 * 2 * 16 * kv->head_dim * 2;
    a->stages = queries + 2 * stage <= shared_of(t->device) ? 2 : 1;
    int rc = launch_early(t, wide ? K_decode_part_128 : K_decode_part_64,
                          (struct grid){a->parts, a->blocks, a->tokens, 256, queries + a->stages * stage},
                          stream, a);
    if (rc || a->counters || a->parts == 1)
        return rc;
    return launch_early(t, wide ? K_decode_join_128 : K_decode_join_64,
                        (struct grid){a->heads, a->tokens, 1, 256, a->parts * 4}, stream, a);
}

int krn_cu_decode(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv, const struct krn_cu_rows *rows,
                  uint32_t heads, krn_cuda_ptr q, krn_cuda_ptr scratch, krn_cuda_ptr y)
{
    struct krn_cu_decode_args a = {
        .q = q, .y = y, .part = scratch, .rows = rows->at, .tokens = rows->tokens, .heads = heads};
    return decode(krn_cu_token_of(cu), stream, kv, (uint64_t)rows->position_most + 1, &a);
}

int krn_cu_token_attention(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv,
                           const struct krn_cu_token_heads *h)
{
    struct krn_cu_decode_args a = {.q = h->q,
                                   .y = h->y_f16,
                                   .part = h->scratch,
                                   .rows = h->rows.at,
                                   .tokens = h->rows.tokens,
                                   .heads = h->heads,
                                   .k_f32 = h->k,
                                   .v_f32 = h->v,
                                   .q_weight = h->q_weight,
                                   .k_weight = h->k_weight,
                                   .table = h->table,
                                   .eps = h->eps,
                                   .projects = 1};
    return decode(krn_cu_token_of(cu), stream, kv, (uint64_t)h->rows.position_most + 1, &a);
}
