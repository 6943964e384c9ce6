/* SPDX-License-Identifier: MIT */
#include "kernels/krn_fatbin.h"

#include "kernels/krn_cuda.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* KRN_FATBIN_LIST(X) comes from the build: X(name) for each embedded fatbin. */
#define DECLARE(name) extern const uint8_t fatbin_##name##_begin[], fatbin_##name##_end[];
KRN_FATBIN_LIST(DECLARE)

const struct krn_fatbin *krn_fatbins(size_t *ret_count)
{
    static struct krn_fatbin table[] = {
#define ROW(name) {#name, fatbin_##name##_begin, 0},
        KRN_FATBIN_LIST(ROW){NULL, NULL, 0}};
    size_t n = 0;
#define SIZE(name) table[n++].bytes = (size_t)(fatbin_##name##_end - fatbin_##name##_begin);
    KRN_FATBIN_LIST(SIZE)
    *ret_count = n;
    return table;
}

const struct krn_fatbin *krn_fatbin_find(const char *name)
{
    size_t n;
    const struct krn_fatbin *table = krn_fatbins(&n);
    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

int krn_cuda_module(const char *name, void **ret_module, struct shm_error *err)
{
    const struct krn_fatbin *f = krn_fatbin_find(name);
    if (!f)
        return shm_error_set(
            err, ENOENT, "kernels '%s' are not in this program: build it with nvcc (meson -Dcuda=enabled)",
            name);
    int rc = KRN_CUDA(module_load, ret_module, f->begin);
    if (rc < 0) {
        char what[96];
        snprintf(what, sizeof(what), "kernels '%s' (driver CUDA %d.%d)", name, krn_cuda_version() / 1000,
                 krn_cuda_version() % 1000 / 10);
        return krn_cuda_explain(rc, what, err);
    }
    return 0;
}

int krn_cuda_kernel(void *module, const char *name, unsigned shared_bytes, void **ret_function,
                    struct shm_error *err)
{
    char what[96];
    snprintf(what, sizeof(what), "kernel %s", name);
    int rc = KRN_CUDA(module_function, ret_function, module, name);
    if (rc == 0 && shared_bytes > 48u * 1024)
        rc =
            KRN_CUDA(function_attribute, *ret_function, KRN_CUDA_FUNC_ATTR_DYNAMIC_SHARED, (int)shared_bytes);
    return rc < 0 ? krn_cuda_explain(rc, what, err) : 0;
}
