/* SPDX-License-Identifier: MIT */
/*
 * Context, choice of the instruction set, matrix product and the elementwise
 * operations. This file is built for the baseline without contraction: what
 * is summed here is summed the same way on every machine.
 */
#include "kernels/krn_host.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/krn_host_priv.h"
#include "kernels/krn_vec.h"

static const struct krn_ops *choose_ops(void)
{
#ifdef __x86_64__
    int best = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        best = 3;
    if (best == 3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        best = 4;
    const char *want = getenv("EXPERTD_ISA");
    if (want && strcmp(want, "baseline") == 0)
        best = 0;
    if (want && strcmp(want, "v3") == 0 && best > 3)
        best = 3;
    if (best == 4)
        return &krn_ops_v4;
    if (best == 3)
        return &krn_ops_v3;
#endif
    return &krn_ops_baseline;
}

static const struct krn_ops *active_ops(void)
{
    static const struct krn_ops *ops; /* same value from any thread */
    const struct krn_ops *o = __atomic_load_n(&ops, __ATOMIC_ACQUIRE);
    if (!o) {
        o = choose_ops();
        __atomic_store_n(&ops, o, __ATOMIC_RELEASE);
    }
    return o;
}

const char *krn_host_isa(void)
{
    return active_ops()->isa;
}

int krn_host_shape_check(const struct krn_shape *s, struct shm_error *err)
{
    if (s->hidden == 0 || s->hidden % 16 != 0)
        return shm_error_set(err, EINVAL, "hidden size %u: the host kernels need a multiple of 16",
                             s->hidden);
    if (s->width == 0 || s->width % 16 != 0)
        return shm_error_set(err, EINVAL, "expert width %u: the host kernels need a multiple of 16",
                             s->width);
    if (s->head_dim == 0 || s->head_dim % 16 != 0 || s->head_dim > KRN_HEAD_DIM_MAX)
        return shm_error_set(err, EINVAL, "head size %u: the host kernels need a multiple of 16 up to %d",
                             s->head_dim, KRN_HEAD_DIM_MAX);
    if (s->kv_heads == 0 || s->heads == 0 || s->heads % s->kv_heads != 0)
        return shm_error_set(err, EINVAL, "%u heads, %u KV heads: the first must be a multiple of the second",
                             s->heads, s->kv_heads);
    if (s->experts == 0 || s->experts > KRN_EXPERTS_MAX)
        return shm_error_set(err, EINVAL, "%u experts a layer: 1 to %d are supported", s->experts,
                             KRN_EXPERTS_MAX);
    if (s->top_k == 0 || s->top_k > s->experts)
        return shm_error_set(err, EINVAL, "%u experts a token of %u: must be 1 to all", s->top_k, s->experts);
    return 0;
}

int krn_host_create(struct krn_pool *pool, uint32_t max_cols, struct krn_host **ret_host)
{
    if (!pool || max_cols == 0 || max_cols > (1u << 24))
        return -EINVAL;
    struct krn_host *host = calloc(1, sizeof *host);
    if (!host)
        return -ENOMEM;
    host->pool = pool;
    host->ops = active_ops();
    host->threads = krn_pool_threads(pool);
    host->max_cols = max_cols;
    host->tile_floats =
        (size_t)max_cols * 4 > KRN_TILE_FLOATS_MAX ? (size_t)max_cols * 4 : KRN_TILE_FLOATS_MAX;
    host->tile_floats = (host->tile_floats + 15) / 16 * 16;
    host->thread_floats = 2 * host->tile_floats + (size_t)KRN_PANEL_TOKENS * KRN_TILE_ROWS_MAX;
    host->scratch = aligned_alloc(64, host->threads * host->thread_floats * sizeof(float));
    if (!host->scratch) {
        free(host);
        return -ENOMEM;
    }
    *ret_host = host;
    return 0;
}

void krn_host_destroy(struct krn_host **host)
{
    if (!host || !*host)
        return;
    free((*host)->scratch);
    free(*host);
    *host = NULL;
}

uint32_t krn_host_tile_rows(const struct krn_host *host, uint32_t cols, uint32_t rows, uint32_t blocks,
                            uint32_t max_block, uint32_t tiles)
{
    uint32_t n = (max_block <= KRN_FEW_TOKENS ? KRN_TILE_FLOATS_FEW : KRN_TILE_FLOATS) / cols / tiles / 4 * 4;
    uint32_t least = max_block <= KRN_FEW_TOKENS ? 4 : KRN_TILE_FLOATS_MAX / cols / 4 * 4;
    least = least < 4 ? 4 : least > 16 ? 16 : least;
    n = n < least ? least : n > KRN_TILE_ROWS_MAX ? KRN_TILE_ROWS_MAX : n;
    while (n > 8 && (uint64_t)krn_div_up(rows, n) * blocks < 4 * host->threads && host->threads > 1)
        n = (n / 2 + 3) / 4 * 4;
    return n;
}

const float *krn_host_tile_load(const struct krn_host *host, const struct krn_type *type, const void *data,
                                uint32_t cols, uint32_t row0, uint32_t n_rows, float *buf)
{
    size_t row_bytes = (size_t)(cols / type->block_elems) * type->block_bytes;
    const uint8_t *src = (const uint8_t *)data + row0 * row_bytes;
    if (type->ggml_id == KRN_F32 && (uintptr_t)src % sizeof(float) == 0)
        return (const float *)(const void *)src;
    host->ops->dequant(type->ggml_id, src, buf, (uint64_t)n_rows * cols); /* rows are whole blocks */
    return buf;
}

struct matmul_arg {
    struct krn_host *host;
    const struct krn_mat *m;
    const float *x;
    float *y;
    uint32_t tokens, blocks, tile_rows, task_rows;
};

static void matmul_task(void *p, uint32_t task, uint32_t thread)
{
    const struct matmul_arg *a = p;
    const struct krn_mat *m = a->m;
    uint32_t t0 = task % a->blocks * KRN_TOKEN_BLOCK, row0 = task / a->blocks * a->task_rows;
    uint32_t t1 = t0 + KRN_TOKEN_BLOCK < a->tokens ? t0 + KRN_TOKEN_BLOCK : a->tokens;
    uint32_t row1 = row0 + a->task_rows < m->rows ? row0 + a->task_rows : m->rows;
    float *buf = krn_host_tile(a->host, thread, 0);
    for (uint32_t r = row0; r < row1; r += a->tile_rows) {
        uint32_t nr = row1 - r < a->tile_rows ? row1 - r : a->tile_rows;
        const float *w = krn_host_tile_load(a->host, m->type, m->data, m->cols, r, nr, buf);
        for (uint32_t t = t0; t < t1; t += KRN_PANEL_TOKENS) {
            uint32_t nt = t1 - t < KRN_PANEL_TOKENS ? t1 - t : KRN_PANEL_TOKENS;
            const float *x[KRN_PANEL_TOKENS];
            float *y[KRN_PANEL_TOKENS];
            for (uint32_t i = 0; i < nt; i++) {
                x[i] = a->x + (size_t)(t + i) * m->cols;
                y[i] = a->y + (size_t)(t + i) * m->rows + r;
            }
            a->host->ops->tile(x, nt, w, m->cols, nr, y);
        }
    }
}

void krn_host_matmul(struct krn_host *host, const struct krn_mat *m, const float *x, uint32_t tokens,
                     float *y)
{
    if (tokens == 0 || m->rows == 0)
        return;
    uint32_t blocks = krn_div_up(tokens, KRN_TOKEN_BLOCK);
    uint32_t tile_rows = krn_host_tile_rows(host, m->cols, m->rows, blocks, tokens, 1);
    /* Several tiles a task where there are many: handing out has a price. */
    uint64_t tiles = (uint64_t)krn_div_up(m->rows, tile_rows) * blocks;
    uint64_t a_task = tiles / ((uint64_t)host->threads * 16);
    struct matmul_arg a = {host,   m,      x,         y,
                           tokens, blocks, tile_rows, tile_rows * (uint32_t)(a_task + !a_task)};
    krn_pool_run(host->pool, krn_div_up(m->rows, a.task_rows) * blocks, matmul_task, &a);
}

/* The elementwise operations: tasks of a few tokens each. */
struct rows_arg {
    struct krn_host *host;
    const struct krn_mat *m;
    const uint32_t *ids;
    const float *x, *weight;
    float *y, eps;
    uint32_t tokens, dim, per_task;
};

static uint32_t rows_per_task(const struct krn_host *host, uint32_t tokens)
{
    uint32_t n = tokens / (host->threads * 4);
    return n < 1 ? 1 : n > 64 ? 64 : n;
}

static void embed_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rows_arg *a = p;
    size_t row_bytes = (size_t)(a->m->cols / a->m->type->block_elems) * a->m->type->block_bytes;
    for (uint32_t t = task * a->per_task; t < a->tokens && t < (task + 1) * a->per_task; t++)
        a->host->ops->dequant(a->m->type->ggml_id, (const uint8_t *)a->m->data + a->ids[t] * row_bytes,
                              a->y + (size_t)t * a->m->cols, a->m->cols);
}

void krn_host_embed(struct krn_host *host, const struct krn_mat *m, const uint32_t *ids, uint32_t tokens,
                    float *y)
{
    struct rows_arg a = {.host = host, .m = m, .ids = ids, .y = y, .tokens = tokens};
    a.per_task = rows_per_task(host, tokens);
    krn_pool_run(host->pool, krn_div_up(tokens, a.per_task), embed_task, &a);
}

void krn_host_norm_row(const float *x, const float *weight, float eps, uint32_t dim, float *y)
{
    vf lane[LANE_VECS];
    for (int h = 0; h < LANE_VECS; h++)
        lane[h] = (vf){0};
    for (uint32_t i = 0; i < dim; i += 16)
        for (int h = 0; h < LANE_VECS; h++) {
            vf v = load(x + i + h * VL);
            lane[h] += v * v;
        }
    float r = 1.0f / sqrtf(sum_lanes(lane) / (float)dim + eps);
    for (uint32_t i = 0; i < dim; i += VL)
        store(y + i, load(x + i) * r * load(weight + i));
}

static void rmsnorm_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rows_arg *a = p;
    for (uint32_t t = task * a->per_task; t < a->tokens && t < (task + 1) * a->per_task; t++)
        krn_host_norm_row(a->x + (size_t)t * a->dim, a->weight, a->eps, a->dim, a->y + (size_t)t * a->dim);
}

void krn_host_rmsnorm(struct krn_host *host, const float *x, const float *weight, float eps, uint32_t tokens,
                      uint32_t dim, float *y)
{
    struct rows_arg a = {
        .host = host, .x = x, .weight = weight, .eps = eps, .tokens = tokens, .dim = dim, .y = y};
    a.per_task = rows_per_task(host, tokens);
    krn_pool_run(host->pool, krn_div_up(tokens, a.per_task), rmsnorm_task, &a);
}

#define ADD_FLOATS 16384

struct add_arg {
    const float *x;
    float *y;
    size_t n;
};

static void add_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct add_arg *a = p;
    size_t i0 = (size_t)task * ADD_FLOATS, i1 = a->n - i0 < ADD_FLOATS ? a->n : i0 + ADD_FLOATS;
    const float *restrict x = a->x;
    float *restrict y = a->y;
    for (size_t i = i0; i < i1; i++)
        y[i] += x[i];
}

void krn_host_add(struct krn_host *host, const float *x, size_t n, float *y)
{
    struct add_arg a = {x, y, n};
    krn_pool_run(host->pool, (uint32_t)((n + ADD_FLOATS - 1) / ADD_FLOATS), add_task, &a);
}
