/* SPDX-License-Identifier: MIT */
#include "kernels/krn_quant.h"

#include <errno.h>
#include <stddef.h>
#include <strings.h>

#include "kernels/krn_dequant.h"

static const struct krn_type TYPES[KRN_TYPE_COUNT] = {
    {"F32", KRN_F32, 1, 4},       {"F16", KRN_F16, 1, 2},       {"Q4_0", KRN_Q4_0, 32, 18},
    {"Q8_0", KRN_Q8_0, 32, 34},   {"Q4_K", KRN_Q4_K, 256, 144}, {"Q5_K", KRN_Q5_K, 256, 176},
    {"Q6_K", KRN_Q6_K, 256, 210}, {"BF16", KRN_BF16, 1, 2},
};

const struct krn_type *krn_type_table(void)
{
    return TYPES;
}

const struct krn_type *krn_type_find(uint32_t ggml_id)
{
    for (int i = 0; i < KRN_TYPE_COUNT; i++)
        if (TYPES[i].ggml_id == ggml_id)
            return &TYPES[i];
    return NULL;
}

const struct krn_type *krn_type_by_name(const char *name)
{
    for (int i = 0; name && i < KRN_TYPE_COUNT; i++)
        if (strcasecmp(TYPES[i].name, name) == 0)
            return &TYPES[i];
    return NULL;
}

int krn_row_bytes(const struct krn_type *type, uint64_t elems, uint64_t *ret_bytes)
{
    if (!type || elems % type->block_elems != 0)
        return -EINVAL;
    uint64_t bytes;
    if (__builtin_mul_overflow(elems / type->block_elems, (uint64_t)type->block_bytes, &bytes))
        return -EOVERFLOW;
    *ret_bytes = bytes;
    return 0;
}

void krn_dequant_row(const struct krn_type *type, const void *src, float *dst, uint64_t n)
{
    krn_dequant_baseline(type->ggml_id, src, dst, n);
}

float krn_f16_to_f32(uint16_t h)
{
    float f;
    krn_dequant_baseline(KRN_F16, &h, &f, 1);
    return f;
}
