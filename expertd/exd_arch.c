/* SPDX-License-Identifier: MIT */
/* Helpers that architectures state their keys and tensors with. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "expertd/exd_arch.h"
#include "kernels/krn_quant.h"

#define KEY_BYTES 96 /* our own key and tensor names are short */

static void key_of(const struct exd_build *b, const char *name, char ret_key[KEY_BYTES])
{
    snprintf(ret_key, KEY_BYTES, "%s.%s", b->arch->name, name);
}

static int missing_key(const struct exd_build *b, const char *key)
{
    return shm_error_set(b->err, EINVAL, "%s: key %s is missing, %s needs it", prt_gguf_path(b->gguf), key,
                         b->arch->name);
}

int exd_build_opt_u32(struct exd_build *build, const char *name, uint32_t min, uint32_t max, uint32_t *value)
{
    char key[KEY_BYTES];
    uint32_t v;
    int r;

    key_of(build, name, key);
    r = prt_gguf_u32(build->gguf, key, &v, build->err);
    if (r == -ENOENT)
        return 0;
    if (r < 0)
        return r;
    if (v < min || v > max)
        return shm_error_set(build->err, EINVAL,
                             min == max ? "%s: key %s is %" PRIu32 ", supported is %" PRIu32
                                        : "%s: key %s is %" PRIu32 ", supported are %" PRIu32 " to %" PRIu32,
                             prt_gguf_path(build->gguf), key, v, min, max);
    *value = v;
    return 0;
}

int exd_build_u32(struct exd_build *build, const char *name, uint32_t min, uint32_t max, uint32_t *ret_value)
{
    char key[KEY_BYTES];

    key_of(build, name, key);
    if (!prt_gguf_has(build->gguf, key))
        return missing_key(build, key);
    return exd_build_opt_u32(build, name, min, max, ret_value);
}

int exd_build_opt_f32(struct exd_build *build, const char *name, float *value)
{
    char key[KEY_BYTES];
    float v;
    int r;

    key_of(build, name, key);
    r = prt_gguf_f32(build->gguf, key, &v, build->err);
    if (r == -ENOENT)
        return 0;
    if (r < 0)
        return r;
    if (!(v > 0.0f))
        return shm_error_set(build->err, EINVAL, "%s: key %s is %g, must be above 0",
                             prt_gguf_path(build->gguf), key, (double)v);
    *value = v;
    return 0;
}

int exd_build_f32(struct exd_build *build, const char *name, float *ret_value)
{
    char key[KEY_BYTES];

    key_of(build, name, key);
    if (!prt_gguf_has(build->gguf, key))
        return missing_key(build, key);
    return exd_build_opt_f32(build, name, ret_value);
}

int exd_build_opt_bool(struct exd_build *build, const char *name, bool *value)
{
    char key[KEY_BYTES];
    int r;

    key_of(build, name, key);
    r = prt_gguf_bool(build->gguf, key, value, build->err);
    return r == -ENOENT ? 0 : r;
}

int exd_build_only(struct exd_build *build, const char *name, uint32_t supported)
{
    uint32_t v = supported;

    return exd_build_opt_u32(build, name, supported, supported, &v);
}

int exd_build_no_rope_scaling(struct exd_build *build)
{
    char type_key[KEY_BYTES], prefix[KEY_BYTES], factor[KEY_BYTES];
    const char *path = prt_gguf_path(build->gguf);
    struct prt_str type;
    float f;
    int r;

    key_of(build, "rope.scaling.type", type_key);
    key_of(build, "rope.scaling.", prefix);
    key_of(build, "rope.scaling.factor", factor);
    r = prt_gguf_str(build->gguf, type_key, &type, build->err);
    if (r == 0) {
        if (type.len == 4 && memcmp(type.data, "none", 4) == 0)
            return 0; /* the other keys then say nothing */
        return shm_error_set(build->err, EINVAL, "%s: key %s is %.*s; supported: none", path, type_key,
                             PRT_STR(type));
    }
    if (r != -ENOENT)
        return r;
    for (uint32_t i = 0; i < prt_gguf_key_count(build->gguf); i++) {
        struct prt_str k = prt_gguf_key(build->gguf, i);

        if (k.len < strlen(prefix) || memcmp(k.data, prefix, strlen(prefix)) != 0)
            continue;
        /* A factor of 1 is no scaling. */
        if (k.len == strlen(factor) && memcmp(k.data, factor, k.len) == 0 &&
            prt_gguf_f32(build->gguf, factor, &f, build->err) == 0 && f == 1.0f)
            continue;
        return shm_error_set(build->err, EINVAL,
                             "%s: key %.*s: position scaling is not supported (%s is not none)", path,
                             PRT_STR(k), type_key);
    }
    return 0;
}

/* "[64][256]", slowest dimension first, as the tensor's shape is written elsewhere. */
static void format_shape(const uint64_t *dims, unsigned n, char *buf, size_t size)
{
    size_t used = 0;

    buf[0] = '\0';
    while (n-- > 0 && used < size)
        used += (size_t)snprintf(buf + used, size - used, "[%" PRIu64 "]", dims[n]);
}

static bool type_allowed(uint32_t type, enum exd_allow allow)
{
    const struct krn_type *t = krn_type_find(type);

    if (!t)
        return false;
    if (allow == EXD_ALLOW_F32)
        return type == KRN_F32;
    if (allow == EXD_ALLOW_FLOAT)
        return type == KRN_F32 || type == KRN_F16 || type == KRN_BF16;
    return true;
}

static void format_allowed(enum exd_allow allow, char *buf, size_t size)
{
    const struct krn_type *table = krn_type_table();
    size_t used = 0;

    buf[0] = '\0';
    for (unsigned i = 0; i < KRN_TYPE_COUNT && used < size; i++)
        if (type_allowed(table[i].ggml_id, allow))
            used += (size_t)snprintf(buf + used, size - used, "%s%s", used ? ", " : "", table[i].name);
}

/* The tensor of that name with these dimensions (ggml order, fastest first). */
static int take_tensor(struct exd_build *b, int32_t layer, const char *name, const uint64_t *dims,
                       unsigned n_dims, enum exd_allow allow, const struct prt_gguf_tensor **ret_tensor,
                       uint64_t *ret_row_bytes)
{
    const char *path = prt_gguf_path(b->gguf);
    const struct prt_gguf_tensor *t;
    char full[KEY_BYTES];
    uint64_t row_bytes;
    bool same = true;

    if (layer < 0)
        snprintf(full, sizeof(full), "%s", name);
    else
        snprintf(full, sizeof(full), "blk.%" PRId32 ".%s", layer, name);
    t = prt_gguf_find_tensor(b->gguf, full);
    if (!t)
        return shm_error_set(b->err, EINVAL, "%s: tensor %s is missing, %s needs it", path, full,
                             b->arch->name);
    path = prt_gguf_shard(b->gguf, t->shard)->path;
    for (unsigned i = 0; i < PRT_GGUF_DIMS_MAX; i++)
        same = same && t->dims[i] == (i < n_dims ? dims[i] : 1);
    if (!same) {
        char found[96], expected[96];

        format_shape(t->dims, t->n_dims, found, sizeof(found));
        format_shape(dims, n_dims, expected, sizeof(expected));
        return shm_error_set(b->err, EINVAL, "%s: tensor %s has shape %s, expected %s", path, full, found,
                             expected);
    }
    if (!type_allowed(t->type, allow)) {
        char allowed[96];

        format_allowed(allow, allowed, sizeof(allowed));
        return shm_error_set(b->err, EINVAL, "%s: tensor %s is of type %s; supported: %s", path, full,
                             prt_gguf_type_name(t->type), allowed);
    }
    if (krn_row_bytes(krn_type_find(t->type), dims[0], &row_bytes) < 0)
        return shm_error_set(b->err, EINVAL,
                             "%s: tensor %s: rows of %" PRIu64 " elements do not divide into %s blocks", path,
                             full, dims[0], prt_gguf_type_name(t->type));
    b->n_used++;
    *ret_tensor = t;
    *ret_row_bytes = row_bytes;
    return 0;
}

int exd_build_dense(struct exd_build *build, enum exd_role role, int32_t layer, const char *name,
                    uint64_t rows, uint64_t cols, enum exd_allow allow)
{
    struct exd_model *m = build->model;
    uint64_t dims[2] = {cols, rows}, row_bytes;
    const struct prt_gguf_tensor *t;
    int r = take_tensor(build, layer, name, dims, rows == 1 ? 1 : 2, allow, &t, &row_bytes);

    if (r < 0)
        return r;
    if (m->n_dense == build->dense_cap) /* the architecture's own counts are wrong */
        return shm_error_set(build->err, EOVERFLOW, "%s: more dense tensors than %s announced",
                             prt_gguf_path(build->gguf), build->arch->name);
    m->dense[m->n_dense++] = (struct exd_dense){.role = role,
                                                .layer = layer,
                                                .type = t->type,
                                                .rows = rows,
                                                .cols = cols,
                                                .row_bytes = row_bytes,
                                                .tensor = t};
    return 0;
}

int exd_build_experts(struct exd_build *build, uint32_t layer, enum exd_part part, const char *name,
                      uint32_t rows, uint32_t cols)
{
    uint64_t dims[3] = {cols, rows, build->model->hp.experts}, row_bytes;
    const struct prt_gguf_tensor *t;
    int r = take_tensor(build, (int32_t)layer, name, dims, 3, EXD_ALLOW_ANY, &t, &row_bytes);

    if (r < 0)
        return r;
    /* rows * row_bytes * experts = size_bytes, which the reader has bounded. */
    build->model->layer[layer].part[part] = (struct exd_experts){
        .type = t->type, .rows = rows, .cols = cols, .part_bytes = rows * row_bytes, .tensor = t};
    return 0;
}
