/* SPDX-License-Identifier: MIT */
/* Host device: rotary embedding, KV memory and attention tasks. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "kernels/krn_host_priv.h"

struct rope_arg {
    const uint32_t *positions;
    const float *weight, *table_in;
    float *table, *x, base, eps;
    uint32_t tokens, heads, head_dim, per_task;
};

static void rope_table_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rope_arg *a = p;
    uint32_t half = a->head_dim / 2;
    float freq[KRN_HEAD_DIM_MAX / 2];
    for (uint32_t i = 0; i < half; i++)
        freq[i] = 1.0f / (float)pow((double)a->base, (double)((float)(2 * i) / (float)a->head_dim));
    for (uint32_t t = task * a->per_task; t < a->tokens && t < (task + 1) * a->per_task; t++) {
        float *row = a->table + (size_t)t * a->head_dim;
        for (uint32_t i = 0; i < half; i++) {
            /* The angle is float32: models of this family were trained that way. */
            float angle = (float)a->positions[t] * freq[i];
            row[i] = (float)cos((double)angle);
            row[half + i] = (float)sin((double)angle);
        }
    }
}

void krn_host_rope_table(struct krn_host *host, const uint32_t *positions, uint32_t tokens, uint32_t head_dim,
                         float base, float *table)
{
    struct rope_arg a = {.positions = positions, .tokens = tokens, .head_dim = head_dim, .base = base};
    a.table = table;
    a.per_task = 32;
    krn_pool_run(host->pool, krn_div_up(tokens, a.per_task), rope_table_task, &a);
}

static void rotate(float *restrict x, const float *restrict table, uint32_t head_dim)
{
    uint32_t half = head_dim / 2;
    const float *restrict c = table, *restrict s = table + half;
    float *restrict lo = x, *restrict hi = x + half;
    for (uint32_t i = 0; i < half; i++) {
        float a = lo[i], b = hi[i];
        lo[i] = a * c[i] - b * s[i];
        hi[i] = b * c[i] + a * s[i];
    }
}

static void head_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rope_arg *a = p;
    for (uint32_t t = task * a->per_task; t < a->tokens && t < (task + 1) * a->per_task; t++)
        for (uint32_t h = 0; h < a->heads; h++) {
            float *x = a->x + ((size_t)t * a->heads + h) * a->head_dim;
            if (a->weight)
                krn_host_norm_row(x, a->weight, a->eps, a->head_dim, x);
            if (a->table_in)
                rotate(x, a->table_in + (size_t)t * a->head_dim, a->head_dim);
        }
}

void krn_host_head_norm_rope(struct krn_host *host, float *x, const float *weight, float eps,
                             const float *table, uint32_t tokens, uint32_t heads, uint32_t head_dim)
{
    struct rope_arg a = {.x = x, .weight = weight, .eps = eps, .table_in = table, .tokens = tokens};
    a.heads = heads;
    a.head_dim = head_dim;
    a.per_task = 16;
    krn_pool_run(host->pool, krn_div_up(tokens, a.per_task), head_task, &a);
}

int krn_host_kv_size(uint32_t ctx, uint32_t kv_heads, uint32_t head_dim, uint32_t *ret_ctx,
                     size_t *ret_floats_each)
{
    if (ctx == 0 || kv_heads == 0 || head_dim == 0)
        return -EINVAL;
    if (ctx > UINT32_MAX - KRN_KV_ALIGN)
        return -EOVERFLOW;
    uint32_t rounded = (ctx + KRN_KV_ALIGN - 1) / KRN_KV_ALIGN * KRN_KV_ALIGN;
    size_t n;
    if (__builtin_mul_overflow((size_t)rounded, (size_t)kv_heads, &n) ||
        __builtin_mul_overflow(n, (size_t)head_dim, &n) || n > SIZE_MAX / sizeof(float))
        return -EOVERFLOW;
    *ret_ctx = rounded;
    *ret_floats_each = n;
    return 0;
}

struct kv_arg {
    const struct krn_kv *kv;
    const float *k, *v;
    uint32_t pos0, tokens, blocks;
};

#define APPEND_TOKENS 64

static void append_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct kv_arg *a = p;
    const struct krn_kv *kv = a->kv;
    uint32_t hd = kv->head_dim, head = task / a->blocks, t0 = task % a->blocks * APPEND_TOKENS;
    float *k = kv->k + (size_t)head * kv->ctx * hd, *v = kv->v + (size_t)head * kv->ctx * hd;
    for (uint32_t t = t0; t < a->tokens && t < t0 + APPEND_TOKENS; t++) {
        size_t pos = (size_t)a->pos0 + t, from = ((size_t)t * kv->kv_heads + head) * hd;
        float *column = k + pos / 16 * 16 * hd + pos % 16;
        for (uint32_t d = 0; d < hd; d++)
            column[(size_t)d * 16] = a->k[from + d];
        memcpy(v + pos * hd, a->v + from, hd * sizeof *v);
    }
}

void krn_host_kv_append(struct krn_host *host, const struct krn_kv *kv, uint32_t pos0, uint32_t tokens,
                        const float *k, const float *v)
{
    struct kv_arg a = {kv, k, v, pos0, tokens, krn_div_up(tokens, APPEND_TOKENS)};
    krn_pool_run(host->pool, a.blocks * kv->kv_heads, append_task, &a);
}

struct attn_arg {
    struct krn_host *host;
    const struct krn_kv *kv;
    const float *q;
    float *y;
    uint32_t pos0, tokens, heads, group, rows_per_task, blocks;
};

/* The rows of a KV head: (token, head of its group), tokens ascending. */
static void attn_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct attn_arg *a = p;
    uint32_t hd = a->kv->head_dim, kv_head = task % a->kv->kv_heads;
    uint64_t block = a->blocks - 1 - task / a->kv->kv_heads; /* the longest first */
    uint64_t row0 = block * a->rows_per_task, rows = (uint64_t)a->tokens * a->group;
    const float *q[KRN_ATTN_ROWS];
    float *y[KRN_ATTN_ROWS];
    uint32_t pos[KRN_ATTN_ROWS], n = 0;
    for (uint64_t r = row0; r < rows && n < a->rows_per_task; r++, n++) {
        uint64_t t = r / a->group, head = (uint64_t)kv_head * a->group + r % a->group;
        q[n] = a->q + (t * a->heads + head) * hd;
        y[n] = a->y + (t * a->heads + head) * hd;
        pos[n] = a->pos0 + (uint32_t)t;
    }
    a->host->ops->attn(a->kv, kv_head, q, pos, n, y);
}

void krn_host_attention(struct krn_host *host, const struct krn_kv *kv, uint32_t pos0, uint32_t tokens,
                        uint32_t heads, const float *q, float *y)
{
    if (tokens == 0)
        return;
    struct attn_arg a = {
        .host = host, .kv = kv, .pos0 = pos0, .tokens = tokens, .heads = heads, .q = q, .y = y};
    a.group = heads / kv->kv_heads;
    uint64_t rows = (uint64_t)tokens * a.group;
    a.rows_per_task = KRN_ATTN_ROWS;
    while (a.rows_per_task > 1 && rows / a.rows_per_task * kv->kv_heads < host->threads && host->threads > 1)
        a.rows_per_task /= 2;
    a.blocks = (uint32_t)((rows + a.rows_per_task - 1) / a.rows_per_task);
    krn_pool_run(host->pool, a.blocks * kv->kv_heads, attn_task, &a);
}
