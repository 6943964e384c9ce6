/* SPDX-License-Identifier: MIT */
/* Host device: router, grouping, experts, combine. */
#include <float.h>
#include <string.h>

#include "kernels/krn_host_priv.h"
#include "kernels/krn_vec.h"

struct router_arg {
    struct krn_host *host;
    const float *logits;
    uint32_t *ids;
    float *weights;
    uint32_t tokens, experts, top_k;
    bool renorm;
};

#define ROUTER_TOKENS 32

static void route_token(const struct router_arg *a, uint32_t t)
{
    float p[(KRN_EXPERTS_MAX + 15) / 16 * 16] __attribute__((aligned(64)));
    const float *logits = a->logits + (size_t)t * a->experts;
    for (uint32_t e = 0; e < a->experts; e++) {
        /* Finite whatever comes in, so that the ids are always valid. */
        float l = logits[e] > -FLT_MAX ? logits[e] : -FLT_MAX;
        p[e] = l < FLT_MAX ? l : FLT_MAX;
    }
    a->host->ops->softmax(p, a->experts);
    uint32_t *ids = a->ids + (size_t)t * a->top_k, n = 0;
    float *weights = a->weights + (size_t)t * a->top_k;
    for (uint32_t e = 0; e < a->experts; e++) {
        if (n == a->top_k && !(p[e] > weights[n - 1]))
            continue;
        uint32_t i = n < a->top_k ? n++ : n - 1;
        for (; i > 0 && p[e] > weights[i - 1]; i--) { /* equals stay in front: lower id first */
            weights[i] = weights[i - 1];
            ids[i] = ids[i - 1];
        }
        weights[i] = p[e];
        ids[i] = e;
    }
    if (a->renorm) {
        float sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += weights[i];
        for (uint32_t i = 0; i < n; i++)
            weights[i] /= sum;
    }
}

static void router_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct router_arg *a = p;
    for (uint32_t t = task * ROUTER_TOKENS; t < a->tokens && t < (task + 1) * ROUTER_TOKENS; t++)
        route_token(a, t);
}

void krn_host_router(struct krn_host *host, const float *logits, uint32_t tokens, uint32_t experts,
                     uint32_t top_k, bool renorm, uint32_t *ret_ids, float *ret_weights)
{
    struct router_arg a = {host, logits, ret_ids, ret_weights, tokens, experts, top_k, renorm};
    krn_pool_run(host->pool, krn_div_up(tokens, ROUTER_TOKENS), router_task, &a);
}

void krn_host_group(const uint32_t *ids, uint32_t tokens, uint32_t experts, uint32_t top_k,
                    uint32_t *ret_offsets, uint32_t *ret_slots)
{
    uint32_t n = tokens * top_k, sum = 0;
    uint32_t next[KRN_EXPERTS_MAX] = {0};
    for (uint32_t i = 0; i < n; i++)
        next[ids[i]]++;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t count = next[e];
        ret_offsets[e] = next[e] = sum;
        sum += count;
    }
    ret_offsets[experts] = sum;
    for (uint32_t i = 0; i < n; i++)
        ret_slots[next[ids[i]]++] = i;
}

size_t krn_host_expert_scratch_bytes(size_t n_slots, uint32_t width)
{
    return n_slots * width * sizeof(float);
}

struct experts_arg {
    struct krn_host *host;
    const struct krn_expert_job *jobs;
    const float *x;
    float *act, *out; /* act [slots of all jobs in order][width] */
    uint32_t n_jobs, top_k, hidden, width, tile_rows, row_tiles;
};

/* A task is (job, block of its slots, tile of rows); jobs differ in size, so
 * it is found by walking over them. */
struct expert_piece {
    const struct krn_expert_job *job;
    uint32_t slot0, n_slots, row0;
    size_t act0;
};

static struct expert_piece find_piece(const struct experts_arg *a, uint32_t task)
{
    size_t before = 0;
    for (uint32_t j = 0; j < a->n_jobs; j++) {
        const struct krn_expert_job *job = &a->jobs[j];
        uint32_t tasks = krn_div_up(job->n_slots, KRN_TOKEN_BLOCK) * a->row_tiles;
        if (task < tasks) {
            uint32_t slot0 = task / a->row_tiles * KRN_TOKEN_BLOCK, left = job->n_slots - slot0;
            return (struct expert_piece){job, slot0, left < KRN_TOKEN_BLOCK ? left : KRN_TOKEN_BLOCK,
                                         task % a->row_tiles * a->tile_rows, before + slot0};
        }
        task -= tasks;
        before += job->n_slots;
    }
    return (struct expert_piece){0};
}

static void gate_up_task(void *p, uint32_t task, uint32_t thread)
{
    const struct experts_arg *a = p;
    struct krn_host *host = a->host;
    struct expert_piece piece = find_piece(a, task);
    const struct krn_expert_job *job = piece.job;
    uint32_t nr = a->width - piece.row0 < a->tile_rows ? a->width - piece.row0 : a->tile_rows;
    const float *gate = krn_host_tile_load(host, job->gate_type, job->gate, a->hidden, piece.row0, nr,
                                           krn_host_tile(host, thread, 0));
    const float *up = krn_host_tile_load(host, job->up_type, job->up, a->hidden, piece.row0, nr,
                                         krn_host_tile(host, thread, 1));
    float *u_buf = krn_host_tile(host, thread, 2);
    for (uint32_t i = 0; i < piece.n_slots; i += KRN_PANEL_TOKENS) {
        uint32_t n = piece.n_slots - i < KRN_PANEL_TOKENS ? piece.n_slots - i : KRN_PANEL_TOKENS;
        const float *x[KRN_PANEL_TOKENS];
        float *g[KRN_PANEL_TOKENS], *u[KRN_PANEL_TOKENS];
        for (uint32_t s = 0; s < n; s++) {
            x[s] = a->x + (size_t)(job->slots[piece.slot0 + i + s] / a->top_k) * a->hidden;
            g[s] = a->act + (piece.act0 + i + s) * a->width + piece.row0;
            u[s] = u_buf + (size_t)s * KRN_TILE_ROWS_MAX;
        }
        host->ops->tile(x, n, gate, a->hidden, nr, g);
        host->ops->tile(x, n, up, a->hidden, nr, u);
        for (uint32_t s = 0; s < n; s++)
            host->ops->silu_mul(g[s], u[s], nr);
    }
}

static void down_task(void *p, uint32_t task, uint32_t thread)
{
    const struct experts_arg *a = p;
    struct krn_host *host = a->host;
    struct expert_piece piece = find_piece(a, task);
    const struct krn_expert_job *job = piece.job;
    uint32_t nr = a->hidden - piece.row0 < a->tile_rows ? a->hidden - piece.row0 : a->tile_rows;
    const float *down = krn_host_tile_load(host, job->down_type, job->down, a->width, piece.row0, nr,
                                           krn_host_tile(host, thread, 0));
    for (uint32_t i = 0; i < piece.n_slots; i += KRN_PANEL_TOKENS) {
        uint32_t n = piece.n_slots - i < KRN_PANEL_TOKENS ? piece.n_slots - i : KRN_PANEL_TOKENS;
        const float *x[KRN_PANEL_TOKENS];
        float *y[KRN_PANEL_TOKENS];
        for (uint32_t s = 0; s < n; s++) {
            x[s] = a->act + (piece.act0 + i + s) * a->width;
            y[s] = a->out + (size_t)job->slots[piece.slot0 + i + s] * a->hidden + piece.row0;
        }
        host->ops->tile(x, n, down, a->width, nr, y);
    }
}

void krn_host_experts(struct krn_host *host, const struct krn_expert_job *jobs, uint32_t n_jobs,
                      const float *x, uint32_t top_k, uint32_t hidden, uint32_t width, void *scratch,
                      float *out)
{
    uint32_t blocks = 0, most = 0;
    for (uint32_t j = 0; j < n_jobs; j++) {
        blocks += krn_div_up(jobs[j].n_slots, KRN_TOKEN_BLOCK);
        most = jobs[j].n_slots > most ? jobs[j].n_slots : most;
    }
    if (blocks == 0)
        return;
    struct experts_arg a = {.host = host, .jobs = jobs, .n_jobs = n_jobs, .x = x, .top_k = top_k};
    a.hidden = hidden;
    a.width = width;
    a.act = scratch;
    a.out = out;
    a.tile_rows = krn_host_tile_rows(host, hidden, width, blocks, most, 2);
    a.row_tiles = krn_div_up(width, a.tile_rows);
    krn_pool_run(host->pool, blocks * a.row_tiles, gate_up_task, &a);
    a.tile_rows = krn_host_tile_rows(host, width, hidden, blocks, most, 1);
    a.row_tiles = krn_div_up(hidden, a.tile_rows);
    krn_pool_run(host->pool, blocks * a.row_tiles, down_task, &a);
}

struct combine_arg {
    const float *out, *weights;
    float *y;
    uint32_t tokens, top_k, hidden;
};

#define COMBINE_TOKENS 8

static void combine_task(void *p, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct combine_arg *a = p;
    for (uint32_t t = task * COMBINE_TOKENS; t < a->tokens && t < (task + 1) * COMBINE_TOKENS; t++) {
        const float *w = a->weights + (size_t)t * a->top_k;
        const float *out = a->out + (size_t)t * a->top_k * a->hidden;
        for (uint32_t i = 0; i < a->hidden; i += 16) {
            vf sum[LANE_VECS];
            for (int h = 0; h < LANE_VECS; h++)
                sum[h] = (vf){0};
            for (uint32_t s = 0; s < a->top_k; s++)
                for (int h = 0; h < LANE_VECS; h++)
                    sum[h] += w[s] * load(out + (size_t)s * a->hidden + i + h * VL);
            float *y = a->y + (size_t)t * a->hidden + i;
            for (int h = 0; h < LANE_VECS; h++)
                store(y + h * VL, load(y + h * VL) + sum[h]);
        }
    }
}

void krn_host_combine(struct krn_host *host, const float *out, const float *weights, uint32_t tokens,
                      uint32_t top_k, uint32_t hidden, float *y)
{
    struct combine_arg a = {out, weights, y, tokens, top_k, hidden};
    krn_pool_run(host->pool, krn_div_up(tokens, COMBINE_TOKENS), combine_task, &a);
}
