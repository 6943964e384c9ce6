/* SPDX-License-Identifier: MIT */
/*
 * Test mode of a CUDA worker, by the environment: with EXPERTD_TRACE_STEPS=FILE each pass adds a line to
 * FILE, JSON, with checksums of what its steps wrote; with EXPERTD_TRACE_SLOTS=1 also each group's slots are
 * compared with the arena before and behind its kernels, and that a layer's groups had all its experts.
 */
#include "inferd/inf_cuda.h"

#include "inferd/inf_kv.h"
#include "kernels/krn_cu_trace.h"
#include "shm/shm_arena.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUMS        (2 * KRN_CU_TRACE_PIECES)
#define LAYER_STEPS 24u /* most of a layer, and of what is before and behind all of them */

struct inf_cuda_trace {
    struct krn_cu_trace *t;
    FILE *f;
    bool slots;
    krn_cuda_ptr sums, report, want;
    uint32_t room, n, pieces, chunk;
    uint64_t *host; /* [room][SUMS] */
    struct step {
        const char *name;
        uint32_t layer;
    } * step;
};

int inf_cuda_trace_open(struct inf_cuda *c, struct shm_error *err)
{
    const char *path = getenv("EXPERTD_TRACE_STEPS"), *slots = getenv("EXPERTD_TRACE_SLOTS");
    if (!path || !*path)
        return 0;
    struct inf_cuda_trace *t = c->trace = calloc(1, sizeof *t);
    if (!t)
        return -ENOMEM;
    t->slots = slots && *slots && *slots != '0';
    t->f = fopen(path, "ae");
    if (!t->f)
        return shm_error_set(err, errno, "EXPERTD_TRACE_STEPS: %s cannot be opened: %s", path,
                             strerror(errno));
    return krn_cu_trace_create(err, &t->t);
}

void inf_cuda_trace_close(struct inf_cuda *c)
{
    struct inf_cuda_trace *t = c->trace;
    if (!t)
        return;
    const krn_cuda_ptr memory[] = {t->sums, t->report, t->want};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        if (memory[i])
            krn_cuda.mem_free(memory[i]);
    krn_cu_trace_destroy(&t->t);
    if (t->f)
        fclose(t->f);
    free(t->host);
    free(t->step);
    free(t);
    c->trace = NULL;
}

/* Device memory, zeroed in the stream's order. */
static int zeros(struct inf_cuda *c, krn_cuda_ptr *at, size_t bytes)
{
    int rc = *at ? 0 : KRN_CUDA(mem_alloc, at, bytes);
    return rc ? rc : KRN_CUDA(memset_8_async, *at, 0, bytes, c->stream);
}

/* What every blob's pieces add up to, by this process from the arena. */
static int expect(struct inf_cuda *c)
{
    struct inf_cuda_trace *t = c->trace;
    const struct shm_arena_view *a = c->model->arena;
    const uint32_t layers = c->model->hparams.layers, experts = c->model->shape.experts;
    for (uint32_t l = 0; l < layers; l++) {
        uint32_t pieces = (uint32_t)((a->layers[l].blob_bytes + KRN_CU_TRACE_PIECE - 1) / KRN_CU_TRACE_PIECE);
        t->pieces = pieces > t->pieces ? pieces : t->pieces;
    }
    size_t bytes = (size_t)layers * experts * t->pieces * sizeof(uint64_t);
    uint64_t *want = calloc(1, bytes);
    if (!want)
        return -ENOMEM;
    for (uint32_t l = 0; l < layers; l++)
        for (uint32_t e = 0; e < experts; e++)
            krn_cu_trace_expect(shm_arena_blob(a, l, e), a->layers[l].blob_bytes,
                                want + ((size_t)l * experts + e) * t->pieces);
    int rc = KRN_CUDA(mem_alloc, &t->want, bytes);
    if (!rc)
        rc = KRN_CUDA(copy_in_async, t->want, want, bytes, c->stream);
    if (!rc)
        rc = KRN_CUDA(stream_synchronize, c->stream);
    free(want);
    return rc;
}

int inf_cuda_trace_begin(struct inf_cuda *c)
{
    struct inf_cuda_trace *t = c->trace;
    int rc = 0;
    if (!t)
        return 0;
    if (!t->room) {
        uint32_t room = (c->model->hparams.layers + 1) * LAYER_STEPS;
        t->host = calloc(room, SUMS * sizeof *t->host);
        t->step = calloc(room, sizeof *t->step);
        if (!t->host || !t->step)
            return -ENOMEM;
        t->room = room;
    }
    if (t->slots && !t->want && (rc = expect(c)))
        return rc;
    t->n = 0;
    t->chunk++;
    rc = zeros(c, &t->sums, (size_t)t->room * SUMS * sizeof(uint64_t));
    return rc ? rc : zeros(c, &t->report, sizeof(struct krn_cu_trace_report));
}

static int hash(struct inf_cuda *c, uint32_t layer, const char *name, krn_cuda_ptr data, uint64_t rows,
                uint64_t row_bytes, uint64_t stride)
{
    struct inf_cuda_trace *t = c->trace;
    if (t->n == t->room)
        return 0;
    t->step[t->n] = (struct step){name, layer};
    return krn_cu_trace_hash(t->t, c->stream, data, rows, row_bytes, stride,
                             t->sums + (uint64_t)t->n++ * SUMS * sizeof(uint64_t));
}

int inf_cuda_trace_attention(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer)
{
    if (!c->trace)
        return 0;
    const struct inf_cuda_act *a = &c->act;
    const struct krn_shape *s = &c->model->shape;
    const struct inf_pass_span *span = p->span; /* keys and values: of the first one */
    const struct krn_cu_kv kv = c->kv[layer];
    const uint64_t q = s->heads * UINT64_C(4) * s->head_dim, k = s->kv_heads * UINT64_C(4) * s->head_dim,
                   cell = s->head_dim * UINT64_C(2), keys = (span->position + span->tokens) * cell,
                   first = span->kv->block[0] * INF_KV_BLOCK * cell; /* one conversation: in order */
    const struct {
        const char *name;
        krn_cuda_ptr at;
        uint64_t rows, row_bytes, stride;
    } step[] = {{"norm", a->normed16, p->tokens, s->hidden * UINT64_C(2), s->hidden * UINT64_C(2)},
                {"q", a->q, p->tokens, q, q},
                {"k", a->k, p->tokens, k, k},
                {"v", a->v, p->tokens, k, k},
                {"q rotated", a->q16, p->tokens, q / 2, q / 2},
                {"keys", kv.k + first, kv.kv_heads, keys, kv.ctx * cell},
                {"values", kv.v + first, kv.kv_heads, keys, kv.ctx * cell},
                {"attention", a->y16, p->tokens, q / 2, q / 2},
                {"residual", a->x, p->tokens, s->hidden * UINT64_C(4), s->hidden * UINT64_C(4)}};
    int rc = 0;
    for (size_t i = 0; i < sizeof step / sizeof step[0] && !rc; i++)
        rc = hash(c, layer, step[i].name, step[i].at, step[i].rows, step[i].row_bytes, step[i].stride);
    return rc;
}

int inf_cuda_trace_experts(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer, int part)
{
    if (!c->trace)
        return 0;
    const struct inf_cuda_act *a = &c->act;
    const struct krn_shape *s = &c->model->shape;
    const uint64_t slots = (uint64_t)p->tokens * s->top_k, hidden = s->hidden * UINT64_C(4),
                   width = c->layer[layer].experts.gate.rows * UINT64_C(2);
    const struct {
        int part;
        const char *name;
        krn_cuda_ptr at;
        uint64_t rows, row_bytes;
    } step[] = {{0, "router's norm", a->normed, p->tokens, hidden},
                {0, "experts' norm", a->normed16, p->tokens, hidden / 2},
                {0, "scores", a->scores, p->tokens, s->experts * UINT64_C(4)},
                {0, "choice", a->ids, p->tokens, s->top_k * UINT64_C(4)},
                {0, "weights", a->weights, p->tokens, s->top_k * UINT64_C(4)},
                {0, "counts", a->counts, s->experts, 4},
                {0, "sorted", a->slots, slots, 4},
                {1, "gate and up", a->hidden_rows, slots, width},
                {1, "down", a->out, slots, hidden},
                {2, "residual behind experts", a->x, p->tokens, hidden}};
    int rc = 0;
    for (size_t i = 0; i < sizeof step / sizeof step[0] && !rc; i++)
        if (step[i].part == part)
            rc = hash(c, layer, step[i].name, step[i].at, step[i].rows, step[i].row_bytes, step[i].row_bytes);
    return rc;
}

static struct krn_cu_trace_slots_args slots_args(const struct inf_cuda *c,
                                                 const struct krn_cu_expert_run *run, uint32_t layer)
{
    const struct inf_cuda_trace *t = c->trace;
    const uint32_t experts = c->model->shape.experts;
    return (struct krn_cu_trace_slots_args){
        .table = run->table,
        .counts = run->groups ? run->groups->counts : 0,
        .resident = run->resident,
        .ring = run->ring,
        .slot_bytes = run->slot_bytes,
        .blob_bytes = c->model->arena->layers[layer].blob_bytes,
        .want = t->want + (uint64_t)layer * experts * t->pieces * sizeof(uint64_t),
        .report = t->report,
        .experts = experts,
        .ring_slots = run->ring_slots,
        .group = run->group,
        .group_end = run->group_end,
        .pieces = (uint32_t)((c->model->arena->layers[layer].blob_bytes + KRN_CU_TRACE_PIECE - 1) /
                             KRN_CU_TRACE_PIECE),
        .want_pieces = t->pieces,
        .layer = layer,
        .chunk = t->chunk};
}

int inf_cuda_trace_slots(struct inf_cuda *c, const struct krn_cu_expert_run *run, uint32_t layer, bool behind)
{
    if (!c->trace || !c->trace->slots || run->decode)
        return 0;
    struct krn_cu_trace_slots_args a = slots_args(c, run, layer);
    a.behind = behind;
    return krn_cu_trace_slots(c->trace->t, c->stream, &a);
}

int inf_cuda_trace_layer(struct inf_cuda *c, const struct krn_cu_expert_run *run, uint32_t layer)
{
    if (!c->trace || !c->trace->slots || run->decode)
        return 0;
    struct krn_cu_trace_slots_args a = slots_args(c, run, layer);
    return krn_cu_trace_layer(c->trace->t, c->stream, &a);
}

static void print_report(FILE *f, const struct krn_cu_trace_report *r)
{
    fprintf(f, ",\"slots\":{\"checked\":%llu,\"bad\":%llu,\"notes\":[", r->checked, r->bad);
    for (uint32_t i = 0; i < r->notes && i < KRN_CU_TRACE_NOTES; i++) {
        const struct krn_cu_trace_note *n = &r->note[i];
        if (n->behind == 2)
            fprintf(f, "%s\"layer %u: %u experts ran, %u should have\"", i ? "," : "", n->layer, n->slot,
                    n->piece);
        else
            fprintf(f, "%s\"layer %u expert %u slot %u piece %u %s its kernels\"", i ? "," : "", n->layer,
                    n->expert, n->slot, n->piece, n->behind ? "behind" : "before");
    }
    fputs("]}", f);
}

int inf_cuda_trace_end(struct inf_cuda *c, const struct inf_pass *p)
{
    struct inf_cuda_trace *t = c->trace;
    struct krn_cu_trace_report report;
    int rc;
    if (!t)
        return 0;
    if ((rc = KRN_CUDA(copy_out_async, t->host, t->sums, (size_t)t->n * SUMS * sizeof *t->host, c->stream)) ||
        (rc = KRN_CUDA(copy_out_async, &report, t->report, sizeof report, c->stream)) ||
        (rc = KRN_CUDA(stream_synchronize, c->stream)))
        return rc;
    fprintf(t->f, "{\"position\":%u,\"tokens\":%u", p->span[0].position, p->tokens);
    if (t->slots)
        print_report(t->f, &report);
    fputs(",\"steps\":[", t->f);
    for (uint32_t i = 0; i < t->n; i++) {
        fprintf(t->f, "%s[\"%u %s\",\"", i ? "," : "", t->step[i].layer, t->step[i].name);
        for (uint32_t k = 0; k < SUMS; k++)
            fprintf(t->f, "%s%" PRIx64, k ? " " : "", t->host[(size_t)i * SUMS + k]);
        fputs("\"]", t->f);
    }
    fputs("]}\n", t->f);
    return fflush(t->f) ? -EIO : 0;
}
