/* SPDX-License-Identifier: MIT */
/* Typed access to GGUF metadata, and the tables of value and tensor types. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "proto/prt_gguf_priv.h"

static const struct {
    const char *name;
    uint32_t bytes;
} value_type[PRT_GGUF_VALUE_COUNT] = {
    [PRT_GGUF_U8] = {"u8", 1},       [PRT_GGUF_I8] = {"i8", 1},     [PRT_GGUF_U16] = {"u16", 2},
    [PRT_GGUF_I16] = {"i16", 2},     [PRT_GGUF_U32] = {"u32", 4},   [PRT_GGUF_I32] = {"i32", 4},
    [PRT_GGUF_F32] = {"f32", 4},     [PRT_GGUF_BOOL] = {"bool", 1}, [PRT_GGUF_STRING] = {"string", 0},
    [PRT_GGUF_ARRAY] = {"array", 0}, [PRT_GGUF_U64] = {"u64", 8},   [PRT_GGUF_I64] = {"i64", 8},
    [PRT_GGUF_F64] = {"f64", 8},
};

/* Every type the format defines, so that a file that holds one we cannot compute
 * with is still measured and named. */
static const struct prt_gguf_type_info tensor_type[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},
    [3] = {"Q4_1", 32, 20},      [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},
    [8] = {"Q8_0", 32, 34},      [9] = {"Q8_1", 32, 36},      [10] = {"Q2_K", 256, 84},
    [11] = {"Q3_K", 256, 110},   [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},
    [14] = {"Q6_K", 256, 210},   [15] = {"Q8_K", 256, 292},   [16] = {"IQ2_XXS", 256, 66},
    [17] = {"IQ2_XS", 256, 74},  [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},
    [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},  [22] = {"IQ2_S", 256, 82},
    [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},         [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},
    [29] = {"IQ1_M", 256, 56},   [30] = {"BF16", 1, 2},       [34] = {"TQ1_0", 256, 54},
    [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},
};

const struct prt_gguf_type_info *prt_gguf_type_info(uint32_t type)
{
    if (type >= sizeof(tensor_type) / sizeof(tensor_type[0]) || !tensor_type[type].name)
        return NULL;
    return &tensor_type[type];
}

const char *prt_gguf_type_name(uint32_t type)
{
    const struct prt_gguf_type_info *info = prt_gguf_type_info(type);

    return info ? info->name : NULL;
}

uint32_t prt_gguf_value_bytes(uint32_t type)
{
    return type < PRT_GGUF_VALUE_COUNT ? value_type[type].bytes : 0;
}

const struct prt_gguf_kv *prt_gguf_part_find(const struct prt_gguf_part *part, const char *key)
{
    struct prt_str want = {key, strlen(key)};
    uint32_t lo = 0, hi = part->n_kv;

    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        int c = prt_str_cmp(want, prt_gguf_kv_key(part, part->kv_sorted[mid]));

        if (c == 0)
            return &part->kv[part->kv_sorted[mid]];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

static int missing(const struct prt_gguf_part *part, const char *key, struct shm_error *err)
{
    return shm_error_set(err, ENOENT, "%s: key %s is missing", part->path, key);
}

static int wrong_type(const struct prt_gguf_part *part, const char *key, const struct prt_gguf_kv *kv,
                      const char *expected, struct shm_error *err)
{
    if (kv->type == PRT_GGUF_ARRAY)
        return shm_error_set(err, EINVAL, "%s: key %s is an array of %s, expected %s", part->path, key,
                             value_type[kv->elem_type].name, expected);
    return shm_error_set(err, EINVAL, "%s: key %s is of type %s, expected %s", part->path, key,
                         value_type[kv->type].name, expected);
}

/* Any integer value: magnitude and sign. False for other types. */
static bool integer(uint32_t type, const uint8_t *p, uint64_t *ret_value, bool *ret_negative)
{
    int64_t s = 0;

    *ret_negative = false;
    switch (type) {
    case PRT_GGUF_U8:
        *ret_value = p[0];
        return true;
    case PRT_GGUF_U16:
        *ret_value = (uint64_t)p[0] | (uint64_t)p[1] << 8;
        return true;
    case PRT_GGUF_U32:
        *ret_value = prt_le32(p);
        return true;
    case PRT_GGUF_U64:
        *ret_value = prt_le64(p);
        return true;
    case PRT_GGUF_I8:
        s = (int8_t)p[0];
        break;
    case PRT_GGUF_I16:
        s = (int16_t)(p[0] | p[1] << 8);
        break;
    case PRT_GGUF_I32:
        s = (int32_t)prt_le32(p);
        break;
    case PRT_GGUF_I64:
        s = (int64_t)prt_le64(p);
        break;
    default:
        return false;
    }
    *ret_negative = s < 0;
    *ret_value = (uint64_t)s;
    return true;
}

static int get_integer(const struct prt_gguf_part *part, const char *key, uint64_t max, uint64_t *ret_value,
                       struct shm_error *err)
{
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);
    bool negative;
    uint64_t v;

    if (!kv)
        return missing(part, key, err);
    if (!integer(kv->type, part->header + kv->value_offset, &v, &negative))
        return wrong_type(part, key, kv, "an integer", err);
    if (negative)
        return shm_error_set(err, EINVAL, "%s: key %s is %" PRId64 ", must not be negative", part->path, key,
                             (int64_t)v);
    if (v > max)
        return shm_error_set(err, EINVAL, "%s: key %s is %" PRIu64 ", the most allowed is %" PRIu64,
                             part->path, key, v, max);
    *ret_value = v;
    return 0;
}

int prt_gguf_part_u64(const struct prt_gguf_part *part, const char *key, uint64_t *ret_value,
                      struct shm_error *err)
{
    return get_integer(part, key, UINT64_MAX, ret_value, err);
}

int prt_gguf_u32(const struct prt_gguf *gguf, const char *key, uint32_t *ret_value, struct shm_error *err)
{
    uint64_t v;
    int r = get_integer(&gguf->part[0], key, UINT32_MAX, &v, err);

    if (r < 0)
        return r;
    *ret_value = (uint32_t)v;
    return 0;
}

int prt_gguf_f32(const struct prt_gguf *gguf, const char *key, float *ret_value, struct shm_error *err)
{
    const struct prt_gguf_part *part = &gguf->part[0];
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);
    double v;

    if (!kv)
        return missing(part, key, err);
    if (kv->type == PRT_GGUF_F32) {
        uint32_t bits = prt_le32(part->header + kv->value_offset);
        float f;

        memcpy(&f, &bits, sizeof(f));
        v = (double)f;
    } else if (kv->type == PRT_GGUF_F64) {
        uint64_t bits = prt_le64(part->header + kv->value_offset);

        memcpy(&v, &bits, sizeof(v));
    } else {
        return wrong_type(part, key, kv, "a float", err);
    }
    /* In double, so that an f64 beyond float's range is seen before it is converted. */
    if (!(fabs(v) <= 3.4028234663852886e38))
        return shm_error_set(err, EINVAL, "%s: key %s is %g, not a finite 32-bit float", part->path, key, v);
    *ret_value = (float)v;
    return 0;
}

int prt_gguf_bool(const struct prt_gguf *gguf, const char *key, bool *ret_value, struct shm_error *err)
{
    const struct prt_gguf_part *part = &gguf->part[0];
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);

    if (!kv)
        return missing(part, key, err);
    if (kv->type != PRT_GGUF_BOOL)
        return wrong_type(part, key, kv, "a bool", err);
    if (part->header[kv->value_offset] > 1)
        return shm_error_set(err, EINVAL, "%s: key %s is %u, a bool is 0 or 1", part->path, key,
                             part->header[kv->value_offset]);
    *ret_value = part->header[kv->value_offset] == 1;
    return 0;
}

int prt_gguf_str(const struct prt_gguf *gguf, const char *key, struct prt_str *ret_value,
                 struct shm_error *err)
{
    const struct prt_gguf_part *part = &gguf->part[0];
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);

    if (!kv)
        return missing(part, key, err);
    if (kv->type != PRT_GGUF_STRING)
        return wrong_type(part, key, kv, "a string", err);
    ret_value->data = (const char *)part->header + kv->value_offset;
    ret_value->len = kv->value_end - kv->value_offset;
    return 0;
}

int prt_gguf_strings(const struct prt_gguf *gguf, const char *key, struct prt_gguf_strings *ret_strings,
                     struct shm_error *err)
{
    const struct prt_gguf_part *part = &gguf->part[0];
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);

    if (!kv)
        return missing(part, key, err);
    if (kv->type != PRT_GGUF_ARRAY || kv->elem_type != PRT_GGUF_STRING)
        return wrong_type(part, key, kv, "an array of strings", err);
    *ret_strings = (struct prt_gguf_strings){
        .count = kv->elem_count,
        .left = kv->elem_count,
        .cursor = part->header + kv->value_offset,
        .size_bytes = kv->value_end - kv->value_offset - kv->elem_count * 8,
    };
    return 0;
}

bool prt_gguf_strings_next(struct prt_gguf_strings *strings, struct prt_str *ret_value)
{
    uint64_t len;

    if (strings->left == 0)
        return false;
    len = prt_le64(strings->cursor);
    ret_value->data = (const char *)strings->cursor + 8;
    ret_value->len = len;
    strings->cursor += 8 + len;
    strings->left--;
    return true;
}

int prt_gguf_i32s(const struct prt_gguf *gguf, const char *key, struct prt_gguf_i32s *ret_array,
                  struct shm_error *err)
{
    const struct prt_gguf_part *part = &gguf->part[0];
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);
    struct prt_gguf_i32s a;

    if (!kv)
        return missing(part, key, err);
    if (kv->type != PRT_GGUF_ARRAY || (kv->elem_type != PRT_GGUF_I32 && kv->elem_type != PRT_GGUF_U32))
        return wrong_type(part, key, kv, "an array of 32-bit integers", err);
    a = (struct prt_gguf_i32s){.count = kv->elem_count, .data = part->header + kv->value_offset};
    for (uint64_t i = 0; kv->elem_type == PRT_GGUF_U32 && i < a.count; i++)
        if (prt_gguf_i32_at(&a, i) < 0)
            return shm_error_set(err, EINVAL,
                                 "%s: key %s: element %" PRIu64 " does not fit in a signed 32-bit integer",
                                 part->path, key, i);
    *ret_array = a;
    return 0;
}

int32_t prt_gguf_i32_at(const struct prt_gguf_i32s *array, uint64_t index)
{
    return (int32_t)prt_le32(array->data + index * 4);
}

int prt_gguf_f32s(const struct prt_gguf *gguf, const char *key, struct prt_gguf_f32s *ret_array,
                  struct shm_error *err)
{
    const struct prt_gguf_part *part = &gguf->part[0];
    const struct prt_gguf_kv *kv = prt_gguf_part_find(part, key);

    if (!kv)
        return missing(part, key, err);
    if (kv->type != PRT_GGUF_ARRAY || kv->elem_type != PRT_GGUF_F32)
        return wrong_type(part, key, kv, "an array of 32-bit floats", err);
    *ret_array = (struct prt_gguf_f32s){.count = kv->elem_count, .data = part->header + kv->value_offset};
    return 0;
}

float prt_gguf_f32_at(const struct prt_gguf_f32s *array, uint64_t index)
{
    uint32_t bits = prt_le32(array->data + index * 4);
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}
