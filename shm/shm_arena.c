/* SPDX-License-Identifier: MIT */
#include "shm/shm_arena.h"

#include <errno.h>
#include <string.h>

/* Largest blob that one slot and one copy may have. */
#define BLOB_BYTES_MAX (UINT64_C(1) << 32)

struct check {
    const char *path;
    struct shm_error *err;
};

static bool inside(uint64_t offset, uint64_t bytes, uint64_t total)
{
    return offset <= total && bytes <= total - offset;
}

static int bad(const struct check *c, const char *what, uint64_t value)
{
    return shm_error_set(c->err, EBADMSG, "arena %s: %s (%llu) is out of bounds: damaged, remove the file",
                         c->path, what, (unsigned long long)value);
}

static int check_sections(const struct check *c, const struct shm_arena *a, uint64_t total, uint64_t units)
{
    if (!inside(a->catalog_offset, a->catalog_bytes, total) || a->catalog_offset % 64 ||
        a->catalog_bytes < sizeof(struct shm_catalog) || a->catalog_bytes > UINT32_MAX)
        return bad(c, "catalog", a->catalog_offset);
    if (units && (!inside(a->sums_offset, units * 8, total) || a->sums_offset % 8))
        return bad(c, "checksum table", a->sums_offset);
    if (units && !inside(a->ready_offset, units, total))
        return bad(c, "ready table", a->ready_offset);
    if (!inside(a->data_offset, a->data_bytes, total) || a->data_offset % SHM_ARENA_DATA_ALIGN)
        return bad(c, "data section", a->data_offset);
    return 0;
}

static int check_strings(const struct check *c, const uint8_t *catalog, uint64_t bytes,
                         const struct shm_strings *s, const char *what)
{
    uint64_t n = (uint64_t)s->count + 1;
    if (s->count > 1u << 24 || s->offsets % 8 || !inside(s->offsets, n * 4, bytes) || s->bytes > bytes)
        return bad(c, what, s->count);
    const uint32_t *offset = (const uint32_t *)(catalog + s->offsets);
    for (uint32_t i = 0; i < s->count; i++)
        if (offset[i] > offset[i + 1])
            return bad(c, what, i);
    if (offset[s->count] > bytes - s->bytes)
        return bad(c, what, offset[s->count]);
    return 0;
}

static int check_string(const struct check *c, const uint8_t *catalog, uint64_t bytes, struct shm_string s,
                        const char *what)
{
    if (!inside(s.offset, (uint64_t)s.bytes + 1, bytes) || catalog[s.offset + s.bytes] != 0)
        return bad(c, what, s.offset);
    return 0;
}

static int check_tokenizer(const struct check *c, const uint8_t *catalog, uint64_t bytes,
                           const struct shm_tokenizer *t)
{
    int rc;
    if ((rc = check_string(c, catalog, bytes, t->model, "tokenizer model")) ||
        (rc = check_string(c, catalog, bytes, t->pre, "pre-tokenizer")) ||
        (rc = check_string(c, catalog, bytes, t->chat_template, "chat template")) ||
        (rc = check_strings(c, catalog, bytes, &t->tokens, "token table")) ||
        (rc = check_strings(c, catalog, bytes, &t->merges, "merge table")))
        return rc;
    if (t->types && (t->types % 8 || !inside(t->types, (uint64_t)t->tokens.count * 4, bytes)))
        return bad(c, "token types", t->types);
    if (t->scores && (t->scores % 8 || !inside(t->scores, (uint64_t)t->tokens.count * 4, bytes)))
        return bad(c, "token scores", t->scores);
    return 0;
}

static int check_part(const struct check *c, const struct shm_part *p, uint64_t blob_bytes)
{
    if (p->offset % SHM_ARENA_ALIGN || !inside(p->offset, p->bytes, blob_bytes) || !p->rows || !p->cols)
        return bad(c, "blob part", p->offset);
    return 0;
}

static int check_layer(const struct check *c, const struct shm_layer *l, uint32_t experts, uint64_t total)
{
    int rc;
    if (!l->blob_bytes || l->blob_bytes > BLOB_BYTES_MAX || l->blob_stride < l->blob_bytes ||
        l->blob_stride > BLOB_BYTES_MAX || l->blob_stride % SHM_ARENA_ALIGN)
        return bad(c, "blob size", l->blob_bytes);
    if (l->blobs_offset % SHM_ARENA_ALIGN || !inside(l->blobs_offset, l->blob_stride * experts, total))
        return bad(c, "blob offset", l->blobs_offset);
    if ((rc = check_part(c, &l->gate, l->blob_bytes)) || (rc = check_part(c, &l->up, l->blob_bytes)) ||
        (rc = check_part(c, &l->down, l->blob_bytes)))
        return rc;
    return 0;
}

int shm_arena_open(const void *base, uint64_t mapped_bytes, const char *path, struct shm_arena_view *ret_view,
                   struct shm_error *err)
{
    struct check c = {path, err};
    if (mapped_bytes < sizeof(struct shm_arena))
        return bad(&c, "file size", mapped_bytes);
    const struct shm_arena *a = base;
    int rc = shm_header_check(&a->header, SHM_ARENA_MAGIC, mapped_bytes, path, err);
    if (rc)
        return rc;
    uint64_t total = a->header.total_bytes;
    if ((rc = check_sections(&c, a, total, 0)))
        return rc;

    const uint8_t *catalog_bytes = (const uint8_t *)base + a->catalog_offset;
    const struct shm_catalog *catalog = (const struct shm_catalog *)catalog_bytes;
    const struct shm_hparams *h = &catalog->hparams;
    if (!h->layers || h->layers > SHM_LAYERS_MAX || catalog->n_layers != h->layers)
        return bad(&c, "layer count", h->layers);
    if (!h->experts || h->experts > SHM_EXPERTS_MAX || !h->experts_used || h->experts_used > h->experts)
        return bad(&c, "expert count", h->experts);
    if (memchr(h->architecture, 0, sizeof h->architecture) == NULL ||
        memchr(h->name, 0, sizeof h->name) == NULL)
        return bad(&c, "architecture name", 0);
    if (catalog->n_dense > 1u << 20 || catalog->dense % 8 ||
        !inside(catalog->dense, (uint64_t)catalog->n_dense * sizeof(struct shm_tensor), a->catalog_bytes))
        return bad(&c, "dense table", catalog->n_dense);
    if (catalog->layers % 8 ||
        !inside(catalog->layers, (uint64_t)h->layers * sizeof(struct shm_layer), a->catalog_bytes))
        return bad(&c, "layer table", catalog->layers);
    if ((rc = check_tokenizer(&c, catalog_bytes, a->catalog_bytes, &catalog->tokenizer)))
        return rc;

    struct shm_arena_view v = {.base = base, .mapped_bytes = mapped_bytes, .arena = a, .catalog = catalog};
    v.dense = (const struct shm_tensor *)(catalog_bytes + catalog->dense);
    v.layers = (const struct shm_layer *)(catalog_bytes + catalog->layers);
    v.units = catalog->n_dense + h->layers * h->experts;
    if ((rc = check_sections(&c, a, total, v.units)))
        return rc;
    v.sums = (const uint64_t *)((const uint8_t *)base + a->sums_offset);
    v.ready = (const _Atomic uint8_t *)((const uint8_t *)base + a->ready_offset);

    for (uint32_t i = 0; i < catalog->n_dense; i++) {
        const struct shm_tensor *t = &v.dense[i];
        if (memchr(t->name, 0, sizeof t->name) == NULL || t->n_dims > 4)
            return bad(&c, "dense tensor name", i);
        if (t->offset % SHM_ARENA_ALIGN || !inside(t->offset, t->bytes, total))
            return bad(&c, "dense tensor offset", t->offset);
    }
    for (uint32_t l = 0; l < h->layers; l++) {
        if ((rc = check_layer(&c, &v.layers[l], h->experts, total)))
            return rc;
        if (v.layers[l].blob_bytes > v.blob_bytes_max)
            v.blob_bytes_max = v.layers[l].blob_bytes;
    }
    *ret_view = v;
    return 0;
}

const struct shm_tensor *shm_arena_tensor(const struct shm_arena_view *view, const char *name)
{
    for (uint32_t i = 0; i < view->catalog->n_dense; i++)
        if (strcmp(view->dense[i].name, name) == 0)
            return &view->dense[i];
    return NULL;
}
