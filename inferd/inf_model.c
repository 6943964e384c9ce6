/* SPDX-License-Identifier: MIT */
#include "inferd/inf_model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct inf_arch *const arch_table[] = {
    &inf_arch_qwen3moe,
};
#define ARCHS (sizeof arch_table / sizeof arch_table[0])

static int find_tensor(const struct inf_model *m, const char *name, const struct shm_tensor **ret_tensor,
                       const struct krn_type **ret_type, struct shm_error *err)
{
    const struct shm_tensor *t = shm_arena_tensor(m->arena, name);
    if (!t)
        return shm_error_set(err, ENOENT, "model '%s': tensor %s is missing", m->hparams.name, name);
    const struct krn_type *type = krn_type_find(t->type);
    if (!type)
        return shm_error_set(err, ENOTSUP, "model '%s': tensor %s has storage type %u, which no kernel reads",
                             m->hparams.name, name, t->type);
    *ret_tensor = t;
    *ret_type = type;
    return 0;
}

static int check_tensor(const struct inf_model *m, const struct shm_tensor *t, const struct krn_type *type,
                        uint64_t rows, uint64_t cols, struct shm_error *err)
{
    uint64_t row_bytes;
    if (t->dim[0] != cols || t->dim[1] != rows || t->dim[2] != 1 || t->dim[3] != 1)
        return shm_error_set(err, EINVAL, "model '%s': tensor %s is %llu x %llu, expected %llu x %llu",
                             m->hparams.name, t->name, (unsigned long long)t->dim[0],
                             (unsigned long long)t->dim[1], (unsigned long long)cols,
                             (unsigned long long)rows);
    if (krn_row_bytes(type, cols, &row_bytes) || row_bytes > UINT64_MAX / rows ||
        row_bytes * rows != t->bytes)
        return shm_error_set(err, EINVAL,
                             "model '%s': tensor %s has %llu bytes, its shape needs another size",
                             m->hparams.name, t->name, (unsigned long long)t->bytes);
    return 0;
}

int inf_model_matrix(struct inf_model *m, const char *name, uint32_t rows, uint32_t cols,
                     struct krn_mat *ret_mat, struct shm_error *err)
{
    const struct shm_tensor *t;
    const struct krn_type *type;
    int rc = find_tensor(m, name, &t, &type, err);
    if (rc || (rc = check_tensor(m, t, type, rows, cols, err)))
        return rc;
    if (cols % 16)
        return shm_error_set(err, EINVAL, "model '%s': tensor %s has rows of %u, not a multiple of 16",
                             m->hparams.name, name, cols);
    *ret_mat = (struct krn_mat){.data = m->arena->base + t->offset, .type = type, .rows = rows, .cols = cols};
    if (cols > m->max_cols)
        m->max_cols = cols;
    return 0;
}

/* De-quantizes a whole tensor into memory that the model owns. */
static int copy_floats(struct inf_model *m, const struct shm_tensor *t, const struct krn_type *type, size_t n,
                       const float **ret_floats)
{
    if (m->n_vectors == m->cap_vectors) {
        uint32_t cap = m->cap_vectors ? 2 * m->cap_vectors : 64;
        float **grown = realloc(m->vectors, cap * sizeof *grown);
        if (!grown)
            return -ENOMEM;
        m->vectors = grown;
        m->cap_vectors = cap;
    }
    float *v = aligned_alloc(64, (n * sizeof *v + 63) & ~(size_t)63);
    if (!v)
        return -ENOMEM;
    krn_dequant_row(type, m->arena->base + t->offset, v, n);
    m->vectors[m->n_vectors++] = v;
    *ret_floats = v;
    return 0;
}

int inf_model_vector(struct inf_model *m, const char *name, uint32_t n, const float **ret_vector,
                     struct shm_error *err)
{
    const struct shm_tensor *t;
    const struct krn_type *type;
    int rc = find_tensor(m, name, &t, &type, err);
    if (rc || (rc = check_tensor(m, t, type, 1, n, err)))
        return rc;
    return copy_floats(m, t, type, n, ret_vector);
}

int inf_model_floats(struct inf_model *m, const char *name, uint32_t rows, uint32_t cols,
                     const float **ret_floats, struct shm_error *err)
{
    const struct shm_tensor *t;
    const struct krn_type *type;
    int rc = find_tensor(m, name, &t, &type, err);
    if (rc || (rc = check_tensor(m, t, type, rows, cols, err)))
        return rc;
    if (type->ggml_id == KRN_F32) {
        *ret_floats = (const float *)(m->arena->base + t->offset);
        return 0;
    }
    return copy_floats(m, t, type, (size_t)rows * cols, ret_floats);
}

static int check_part(const struct inf_model *m, uint32_t layer, const char *what, const struct shm_part *p,
                      uint32_t rows, uint32_t cols, const struct krn_type **ret_type, struct shm_error *err)
{
    uint64_t row_bytes;
    const struct krn_type *type = krn_type_find(p->type);
    if (!type)
        return shm_error_set(err, ENOTSUP,
                             "model '%s': layer %u: %s experts have storage type %u, which no "
                             "kernel reads",
                             m->hparams.name, layer, what, p->type);
    if (p->rows != rows || p->cols != cols || krn_row_bytes(type, cols, &row_bytes) ||
        row_bytes * rows != p->bytes)
        return shm_error_set(err, EINVAL, "model '%s': layer %u: %s experts are %u x %u, expected %u x %u",
                             m->hparams.name, layer, what, p->rows, p->cols, rows, cols);
    *ret_type = type;
    return 0;
}

int inf_model_experts(struct inf_model *m, uint32_t layer, struct shm_error *err)
{
    const struct shm_hparams *h = &m->hparams;
    struct inf_layer *l = &m->layer[layer];
    l->gate = m->arena->layers[layer].gate;
    l->up = m->arena->layers[layer].up;
    l->down = m->arena->layers[layer].down;
    int rc;
    if ((rc = check_part(m, layer, "gate", &l->gate, h->expert_ffn, h->hidden, &l->gate_type, err)) ||
        (rc = check_part(m, layer, "up", &l->up, h->expert_ffn, h->hidden, &l->up_type, err)) ||
        (rc = check_part(m, layer, "down", &l->down, h->hidden, h->expert_ffn, &l->down_type, err)))
        return rc;
    return 0;
}

static int check_hparams(const struct shm_hparams *h, struct krn_shape *ret_shape, struct shm_error *err)
{
    const struct {
        const char *name;
        uint32_t value, max;
    } range[] = {
        {"layers", h->layers, SHM_LAYERS_MAX},
        {"hidden size", h->hidden, 1u << 20},
        {"vocabulary", h->vocab, 1u << 24},
        {"context", h->context, 1u << 27},
        {"heads", h->heads, 1u << 12},
        {"KV heads", h->kv_heads, 1u << 12},
        {"head size", h->head_dim, 1u << 12},
        {"experts", h->experts, SHM_EXPERTS_MAX},
        {"experts used", h->experts_used, h->experts},
        {"expert width", h->expert_ffn, 1u << 20},
    };
    for (size_t i = 0; i < sizeof range / sizeof range[0]; i++)
        if (range[i].value < 1 || range[i].value > range[i].max)
            return shm_error_set(err, EINVAL, "model '%s': %s is %u, allowed are 1 to %u", h->name,
                                 range[i].name, range[i].value, range[i].max);
    if (h->value_dim != h->head_dim)
        return shm_error_set(err, ENOTSUP, "model '%s': values of %u beside keys of %u are not supported",
                             h->name, h->value_dim, h->head_dim);
    struct krn_shape shape = {.hidden = h->hidden,
                              .heads = h->heads,
                              .kv_heads = h->kv_heads,
                              .head_dim = h->head_dim,
                              .experts = h->experts,
                              .top_k = h->experts_used,
                              .width = h->expert_ffn};
    int rc = krn_host_shape_check(&shape, err);
    if (!rc)
        *ret_shape = shape;
    return rc;
}

int inf_model_open(const struct shm_arena_view *arena, struct shm_error *err, struct inf_model **ret_model)
{
    struct inf_model *m = calloc(1, sizeof *m);
    if (!m)
        return -ENOMEM;
    m->arena = arena;
    m->hparams = arena->catalog->hparams;
    int rc;
    for (size_t i = 0; i < ARCHS; i++)
        if (strcmp(arch_table[i]->name, m->hparams.architecture) == 0)
            m->arch = arch_table[i];
    if (!m->arch) {
        rc = shm_error_set(err, ENOTSUP, "model '%s': architecture '%s' is not known; known is: %s",
                           m->hparams.name, m->hparams.architecture, arch_table[0]->name);
        goto fail;
    }
    if ((rc = check_hparams(&m->hparams, &m->shape, err)))
        goto fail;
    m->layer = calloc(m->hparams.layers, sizeof *m->layer);
    if (!m->layer) {
        rc = -ENOMEM;
        goto fail;
    }
    m->max_cols = m->hparams.expert_ffn > m->hparams.hidden ? m->hparams.expert_ffn : m->hparams.hidden;
    if ((rc = m->arch->resolve(m, err)))
        goto fail;
    *ret_model = m;
    return 0;
fail:
    inf_model_close(&m);
    return rc;
}

void inf_model_close(struct inf_model **model)
{
    struct inf_model *m = *model;
    if (!m)
        return;
    for (uint32_t i = 0; i < m->n_vectors; i++)
        free(m->vectors[i]);
    free(m->vectors);
    free(m->layer);
    free(m);
    *model = NULL;
}
