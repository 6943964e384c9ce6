/* SPDX-License-Identifier: MIT */
/* Layout of an arena and its catalog, from the description of a model. */
#include "expertd/exd_arena.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define PAGE 4096u /* blobs of a layer start on a page: a layer can be registered by itself */

struct builder {
    uint8_t *bytes; /* NULL while measuring */
    uint64_t used;
};

static uint64_t round_up(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* Space for n bytes at a multiple of align. */
static uint64_t take(struct builder *b, uint64_t n, uint64_t align)
{
    uint64_t at = round_up(b->used, align);
    b->used = at + n;
    return at;
}

static struct shm_string put_string(struct builder *b, struct prt_str s)
{
    uint64_t at = take(b, (uint64_t)s.len + 1, 1);
    if (b->bytes && s.len)
        memcpy(b->bytes + at, s.data, s.len);
    return (struct shm_string){.offset = (uint32_t)at, .bytes = (uint32_t)s.len};
}

static struct shm_strings put_strings(struct builder *b, struct prt_gguf_strings walk)
{
    struct shm_strings s = {.count = (uint32_t)walk.count};
    s.offsets = take(b, (walk.count + 1) * 4, 8);
    s.bytes = take(b, walk.size_bytes, 8);
    if (!b->bytes)
        return s;
    uint32_t *offset = (uint32_t *)(b->bytes + s.offsets);
    uint64_t at = 0;
    struct prt_str text;
    for (uint64_t i = 0; i < walk.count; i++) {
        offset[i] = (uint32_t)at;
        /* the sizes were counted when the file was opened; a walk that says otherwise is cut */
        if (!prt_gguf_strings_next(&walk, &text) || text.len > walk.size_bytes - at)
            text.len = 0;
        if (text.len)
            memcpy(b->bytes + s.bytes + at, text.data, text.len);
        at += text.len;
    }
    offset[walk.count] = (uint32_t)at;
    return s;
}

static void put_tokenizer(struct builder *b, const struct exd_tokenizer *tok, struct shm_tokenizer *ret)
{
    struct shm_tokenizer t = {
        .bos = tok->bos, .eos = tok->eos, .pad = tok->pad, .eot = tok->eot, .add_bos = tok->add_bos};
    t.model = put_string(b, tok->model);
    t.pre = put_string(b, tok->pre);
    t.chat_template = put_string(b, tok->chat_template);
    t.tokens = put_strings(b, tok->tokens);
    t.merges = put_strings(b, tok->merges);
    if (tok->types.count) {
        t.types = take(b, tok->types.count * 4, 8);
        if (b->bytes)
            for (uint64_t i = 0; i < tok->types.count; i++)
                ((int32_t *)(b->bytes + t.types))[i] = prt_gguf_i32_at(&tok->types, i);
    }
    t.add_space_prefix = tok->add_space_prefix;
    if (tok->scores.count) {
        t.scores = take(b, tok->scores.count * 4, 8);
        if (b->bytes)
            for (uint64_t i = 0; i < tok->scores.count; i++)
                ((float *)(b->bytes + t.scores))[i] = prt_gguf_f32_at(&tok->scores, i);
    }
    *ret = t;
}

static void copy_name(char *to, size_t size, const char *from, size_t len)
{
    if (len > size - 1)
        len = size - 1;
    memcpy(to, from, len);
    to[strnlen(to, len)] = 0; /* ends at the first NUL of the file's string */
}

static void fill_hparams(const struct exd_model *m, struct shm_hparams *h)
{
    const struct exd_hparams *p = &m->hp;
    copy_name(h->architecture, sizeof h->architecture, m->arch, strlen(m->arch));
    if (m->name.len)
        copy_name(h->name, sizeof h->name, m->name.data, m->name.len);
    h->layers = p->layers;
    h->hidden = p->hidden;
    h->vocab = p->vocab;
    h->context = p->context;
    h->heads = p->heads;
    h->kv_heads = p->kv_heads;
    h->head_dim = p->head_dim_k;
    h->value_dim = p->head_dim_v;
    h->experts = p->experts;
    h->experts_used = p->experts_used;
    h->expert_ffn = p->expert_ffn;
    h->norm_topk = p->norm_topk;
    h->rms_eps = p->rms_eps;
    h->rope_base = p->rope_base;
    h->tied_head = p->tied_embeddings;
}

static void place_part(struct shm_part *to, const struct exd_experts *from, uint64_t *blob_bytes)
{
    uint64_t at = round_up(*blob_bytes, SHM_ARENA_ALIGN);
    *to = (struct shm_part){.type = from->type,
                            .rows = from->rows,
                            .cols = from->cols,
                            .offset = (uint32_t)at,
                            .bytes = from->part_bytes};
    *blob_bytes = at + from->part_bytes;
}

static int check_model(const struct exd_model *m, struct shm_error *err)
{
    const struct exd_tokenizer *t = &m->tok;
    const char *path = prt_gguf_path(m->gguf);
    for (uint32_t i = 0; i < m->n_dense; i++)
        if (m->dense[i].tensor->name.len >= SHM_TENSOR_NAME_BYTES || m->dense[i].tensor->n_dims > 4)
            return shm_error_set(
                err, EINVAL, "model %s: tensor %.*s: name or shape does not fit the catalog (%d characters)",
                path, PRT_STR(m->dense[i].tensor->name), SHM_TENSOR_NAME_BYTES - 1);
    uint64_t strings[] = {t->model.len,    t->pre.len,           t->chat_template.len, t->tokens.size_bytes,
                          t->tokens.count, t->merges.size_bytes, t->merges.count,      t->types.count};
    for (unsigned i = 0; i < sizeof strings / sizeof *strings; i++)
        if (strings[i] > PRT_GGUF_HEADER_BYTES_MAX)
            return shm_error_set(err, EINVAL, "model %s: tokenizer is larger than a catalog can hold", path);
    if (t->tokens.count > 1u << 24 || t->merges.count > 1u << 24 ||
        (t->types.count && t->types.count != t->tokens.count) ||
        (t->scores.count && t->scores.count != t->tokens.count))
        return shm_error_set(err, EINVAL, "model %s: tokenizer has %llu tokens, %llu types and %llu merges",
                             path, (unsigned long long)t->tokens.count, (unsigned long long)t->types.count,
                             (unsigned long long)t->merges.count);
    for (uint32_t l = 0; l < m->hp.layers; l++) {
        uint64_t sum = 0;
        for (unsigned p = 0; p < EXD_PART_COUNT; p++) {
            uint64_t bytes = m->layer[l].part[p].part_bytes;
            if (bytes > UINT32_MAX || (sum += bytes + SHM_ARENA_ALIGN) > UINT32_MAX)
                return shm_error_set(err, EINVAL, "model %s: one expert of layer %u has more than 4 GiB",
                                     path, l);
        }
    }
    return 0;
}

/* Fixed tables and strings of the catalog; fills them when b->bytes is set. */
static void lay_catalog(struct builder *b, const struct exd_model *m)
{
    uint64_t head = take(b, sizeof(struct shm_catalog), 8);
    uint64_t dense = take(b, (uint64_t)m->n_dense * sizeof(struct shm_tensor), 8);
    uint64_t layers = take(b, (uint64_t)m->hp.layers * sizeof(struct shm_layer), 8);
    struct shm_tokenizer tok;
    put_tokenizer(b, &m->tok, &tok);
    if (!b->bytes)
        return;
    struct shm_catalog *c = (struct shm_catalog *)(b->bytes + head);
    fill_hparams(m, &c->hparams);
    c->n_dense = m->n_dense;
    c->n_layers = m->hp.layers;
    c->dense = dense;
    c->layers = layers;
    c->tokenizer = tok;
}

/* Places dense tensors and blobs from plan->data_offset on; returns the end. */
static uint64_t lay_data(struct exd_plan *plan, const struct exd_model *m)
{
    struct shm_catalog *c = (struct shm_catalog *)plan->catalog;
    struct shm_tensor *dense = (struct shm_tensor *)(plan->catalog + c->dense);
    struct shm_layer *layer = (struct shm_layer *)(plan->catalog + c->layers);
    uint64_t at = plan->data_offset;
    for (uint32_t i = 0; i < m->n_dense; i++) {
        const struct prt_gguf_tensor *t = m->dense[i].tensor;
        copy_name(dense[i].name, sizeof dense[i].name, t->name.data, t->name.len);
        dense[i].type = t->type;
        dense[i].n_dims = t->n_dims;
        for (unsigned d = 0; d < 4; d++)
            dense[i].dim[d] = t->dims[d];
        dense[i].offset = at = round_up(at, SHM_ARENA_ALIGN);
        dense[i].bytes = t->size_bytes;
        at += t->size_bytes;
        plan->load_bytes += t->size_bytes;
    }
    for (uint32_t l = 0; l < m->hp.layers; l++) {
        const struct exd_layer *from = &m->layer[l];
        uint64_t bytes = 0;
        place_part(&layer[l].gate, &from->part[EXD_PART_GATE], &bytes);
        place_part(&layer[l].up, &from->part[EXD_PART_UP], &bytes);
        place_part(&layer[l].down, &from->part[EXD_PART_DOWN], &bytes);
        layer[l].blob_bytes = bytes;
        layer[l].blob_stride = round_up(bytes, SHM_ARENA_ALIGN);
        layer[l].blobs_offset = at = round_up(at, PAGE);
        at += layer[l].blob_stride * m->hp.experts;
        for (unsigned p = 0; p < EXD_PART_COUNT; p++)
            plan->load_bytes += from->part[p].part_bytes * m->hp.experts;
    }
    return at;
}

int exd_plan_make(const struct exd_model *model, struct exd_plan **ret_plan, struct shm_error *err)
{
    int rc = check_model(model, err);
    if (rc)
        return rc;
    struct exd_plan *plan = calloc(1, sizeof *plan);
    struct builder b = {0};
    lay_catalog(&b, model);
    if (plan)
        plan->catalog = calloc(1, round_up(b.used, 64));
    if (!plan || !plan->catalog) {
        exd_plan_free(&plan);
        return shm_error_set(err, ENOMEM, "model %s: no memory for a catalog of %llu bytes; free some",
                             prt_gguf_path(model->gguf), (unsigned long long)b.used);
    }
    plan->catalog_bytes = round_up(b.used, 64);
    b = (struct builder){.bytes = plan->catalog};
    lay_catalog(&b, model);

    plan->n_dense = model->n_dense;
    plan->layers = model->hp.layers;
    plan->experts = model->hp.experts;
    plan->units = plan->n_dense + plan->layers * plan->experts;
    plan->catalog_offset = round_up(sizeof(struct shm_arena), 256);
    plan->sums_offset = plan->catalog_offset + plan->catalog_bytes;
    plan->ready_offset = round_up(plan->sums_offset + (uint64_t)plan->units * 8, 64);
    plan->data_offset = round_up(plan->ready_offset + plan->units, SHM_ARENA_DATA_ALIGN);
    uint64_t end = lay_data(plan, model);
    plan->total_bytes = round_up(end, SHM_ARENA_DATA_ALIGN);
    plan->data_bytes = plan->total_bytes - plan->data_offset;
    plan->catalog_sum = XXH3_64bits(plan->catalog, plan->catalog_bytes);
    prt_gguf_fingerprint(model->gguf, plan->fingerprint);
    *ret_plan = plan;
    return 0;
}

void exd_plan_free(struct exd_plan **plan)
{
    if (!*plan)
        return;
    free((*plan)->catalog);
    free(*plan);
    *plan = NULL;
}
