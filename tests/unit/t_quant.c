/* SPDX-License-Identifier: MIT */
/* Storage formats against reference blocks, bit by bit, in every build of the de-quantizer. */
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/krn_dequant.h"
#include "kernels/krn_quant.h"

TestSuite(quant, .timeout = 30);

typedef void (*dequant_fn)(uint32_t, const void *, float *, uint64_t);

static size_t unhex(const char *s, uint8_t **ret)
{
    size_t n = strlen(s) / 2;
    uint8_t *b = malloc(n + 1);
    for (size_t i = 0; i < n; i++) {
        unsigned v;
        cr_assert(sscanf(s + 2 * i, "%2x", &v) == 1);
        b[i] = (uint8_t)v;
    }
    *ret = b;
    return n;
}

static void check_goldens(dequant_fn fn, const char *who)
{
    const char *root = getenv("EXPERTD_SRC");
    char path[4096];
    snprintf(path, sizeof path, "%s/tests/data/blocks.json", root ? root : EXPERTD_SRC_DEFAULT);
    json_error_t e;
    json_t *all = json_load_file(path, 0, &e);
    cr_assert(all != NULL, "%s: %s", path, e.text);
    cr_assert(json_object_size(all) == KRN_TYPE_COUNT);
    for (int t = 0; t < KRN_TYPE_COUNT; t++) {
        const struct krn_type *type = &krn_type_table()[t];
        json_t *o = json_object_get(all, type->name);
        cr_assert(o != NULL, "%s", type->name);
        uint8_t *bytes, *values;
        size_t n_bytes = unhex(json_string_value(json_object_get(o, "bytes")), &bytes);
        uint64_t n = unhex(json_string_value(json_object_get(o, "values")), &values) / 4, want;
        cr_assert(krn_row_bytes(type, n, &want) == 0 && want == n_bytes, "%s", type->name);
        /* an odd address and a poisoned, guarded output */
        uint8_t *odd = malloc(n_bytes + 1);
        memcpy(odd + 1, bytes, n_bytes);
        float *got = malloc((n + 1) * 4);
        memset(got, 0xff, (n + 1) * 4);
        fn(type->ggml_id, odd + 1, got, n);
        for (uint64_t i = 0; i < n; i++) {
            uint32_t a, b;
            memcpy(&a, &got[i], 4);
            memcpy(&b, values + 4 * i, 4);
            cr_assert(a == b, "%s %s: element %lu is %08x, not %08x", who, type->name, (unsigned long)i, a,
                      b);
        }
        uint32_t guard;
        memcpy(&guard, &got[n], 4);
        cr_assert(guard == UINT32_MAX, "%s wrote past the row", type->name);
        free(odd);
        free(got);
        free(bytes);
        free(values);
    }
    json_decref(all);
}

static void public_row(uint32_t id, const void *src, float *dst, uint64_t n)
{
    krn_dequant_row(krn_type_find(id), src, dst, n);
}

Test(quant, goldens_public)
{
    check_goldens(public_row, "public");
}

Test(quant, goldens_each_isa)
{
    check_goldens(krn_dequant_baseline, "baseline");
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        check_goldens(krn_dequant_v3, "v3");
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        check_goldens(krn_dequant_v4, "v4");
#endif
}

Test(quant, table)
{
    static const struct {
        uint32_t id, elems, bytes;
        const char *name;
    } want[] = {{0, 1, 4, "F32"},       {1, 1, 2, "F16"},       {2, 32, 18, "Q4_0"},    {8, 32, 34, "Q8_0"},
                {12, 256, 144, "Q4_K"}, {13, 256, 176, "Q5_K"}, {14, 256, 210, "Q6_K"}, {30, 1, 2, "BF16"}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const struct krn_type *t = krn_type_find(want[i].id);
        cr_assert(t != NULL && t == krn_type_by_name(want[i].name));
        cr_assert(t->block_elems == want[i].elems && t->block_bytes == want[i].bytes);
    }
    cr_assert(krn_type_find(3) == NULL && krn_type_find(31) == NULL && krn_type_find(UINT32_MAX) == NULL);
    cr_assert(krn_type_by_name("Q9") == NULL && krn_type_by_name(NULL) == NULL);
    cr_assert(krn_type_by_name("q4_k") == krn_type_find(12));
}

Test(quant, row_bytes_limits)
{
    uint64_t r = 77;
    cr_assert(krn_row_bytes(NULL, 32, &r) == -EINVAL);
    cr_assert(krn_row_bytes(krn_type_find(KRN_Q8_0), 33, &r) == -EINVAL);
    cr_assert(krn_row_bytes(krn_type_find(KRN_Q4_K), 128, &r) == -EINVAL);
    cr_assert(krn_row_bytes(krn_type_find(KRN_F32), UINT64_MAX / 4 + 1, &r) == -EOVERFLOW);
    cr_assert(krn_row_bytes(krn_type_find(KRN_Q8_0), UINT64_MAX - 31, &r) == -EOVERFLOW);
    cr_assert(r == 77, "written on failure");
    cr_assert(krn_row_bytes(krn_type_find(KRN_F32), UINT64_MAX / 4, &r) == 0 && r == UINT64_MAX - 3);
    cr_assert(krn_row_bytes(krn_type_find(KRN_Q6_K), 0, &r) == 0 && r == 0);
}

Test(quant, half_is_exact)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        int e = (h >> 10) & 31;
        double m = h & 1023, want = e == 0 ? ldexp(m, -24) : ldexp(1024 + m, e - 25);
        float got = krn_f16_to_f32((uint16_t)h);
        if (e == 31) {
            cr_assert(m != 0 ? isnan(got) : isinf(got));
            want = INFINITY;
        } else {
            cr_assert(fabs((double)got) == want, "%04x: %g", h, (double)got);
        }
        cr_assert(!signbit(got) == !(h & 0x8000));
    }
}
