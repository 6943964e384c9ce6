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

/* Tasks of a call, span by span: `each` rows a task, for every KV head. Of a span the last rows come first:
 * they see most. */
struct span_tasks {
    const struct krn_kv_span *span;
    uint32_t kv_heads, rows_a_token, each;
};

static uint32_t tasks_of(const struct span_tasks *s, const struct krn_kv_span *span)
{
    return (uint32_t)(((uint64_t)span->tokens * s->rows_a_token + s->each - 1) / s->each) * s->kv_heads;
}

/* Its span, the tokens of the spans before that one, and which of the span's tasks it is. */
static const struct krn_kv_span *find_task(const struct span_tasks *s, uint32_t *task, size_t *ret_before)
{
    const struct krn_kv_span *span = s->span;
    size_t before = 0;
    for (uint32_t n; *task >= (n = tasks_of(s, span)); span++) {
        *task -= n;
        before += span->tokens;
    }
    *ret_before = before;
    return span;
}

static uint32_t all_tasks(const struct span_tasks *s, uint32_t spans)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < spans; i++)
        n += tasks_of(s, &s->span[i]);
    return n;
}

struct kv_arg {
    const struct krn_kv *kv;
    const float *k, *v;
    struct span_tasks tasks;
};

#define APPEND_TOKENS 64

static void append_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct kv_arg *a = p;
    const struct krn_kv *kv = a->kv;
    size_t before;
    const struct krn_kv_span *span = find_task(&a->tasks, &task, &before);
    uint32_t hd = kv->head_dim, head = task % kv->kv_heads, t0 = task / kv->kv_heads * APPEND_TOKENS;
    float *k = kv->k + (size_t)head * kv->ctx * hd, *v = kv->v + (size_t)head * kv->ctx * hd;
    for (uint32_t t = t0; t < span->tokens && t < t0 + APPEND_TOKENS; t++) {
        size_t row = krn_kv_row(span->block, span->pos0 + t),
               from = ((before + t) * kv->kv_heads + head) * hd;
        float *column = k + row / 16 * 16 * hd + row % 16;
        for (uint32_t d = 0; d < hd; d++)
            column[(size_t)d * 16] = a->k[from + d];
        memcpy(v + row * hd, a->v + from, hd * sizeof *v);
    }
}

void krn_host_kv_append(struct krn_host *host, const struct krn_kv *kv, const struct krn_kv_span *span,
                        uint32_t spans, const float *k, const float *v)
{
    struct kv_arg a = {kv, k, v, {span, kv->kv_heads, 1, APPEND_TOKENS}};
    krn_pool_run(host->pool, all_tasks(&a.tasks, spans), append_task, &a);
}

struct attn_arg {
    struct krn_host *host;
    const struct krn_kv *kv;
    const float *q;
    float *y;
    uint32_t heads;
    struct span_tasks tasks;
};

/* The rows of a KV head: (token, head of its group), tokens ascending. */
static void attn_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct attn_arg *a = p;
    size_t before;
    const struct krn_kv_span *span = find_task(&a->tasks, &task, &before);
    const uint32_t hd = a->kv->head_dim, kv_heads = a->kv->kv_heads, kv_head = task % kv_heads,
                   group = a->tasks.rows_a_token, each = a->tasks.each;
    const uint64_t block = tasks_of(&a->tasks, span) / kv_heads - 1 - task / kv_heads,
                   rows = (uint64_t)span->tokens * group;
    const float *q[KRN_ATTN_ROWS];
    float *y[KRN_ATTN_ROWS];
    uint32_t pos[KRN_ATTN_ROWS], n = 0;
    for (uint64_t r = block * each; r < rows && n < each; r++, n++) {
        size_t at = ((before + r / group) * a->heads + (uint64_t)kv_head * group + r % group) * hd;
        q[n] = a->q + at;
        y[n] = a->y + at;
        pos[n] = span->pos0 + (uint32_t)(r / group);
    }
    a->host->ops->attn(a->kv, span->block, kv_head, q, pos, n, y);
}

void krn_host_attention(struct krn_host *host, const struct krn_kv *kv, const struct krn_kv_span *span,
                        uint32_t spans, uint32_t heads, const float *q, float *y)
{
    struct attn_arg a = {host, kv, q, y, heads, {span, kv->kv_heads, heads / kv->kv_heads, KRN_ATTN_ROWS}};
    while (a.tasks.each > 1 && all_tasks(&a.tasks, spans) < host->threads)
        a.tasks.each /= 2;
    krn_pool_run(host->pool, all_tasks(&a.tasks, spans), attn_task, &a);
}
