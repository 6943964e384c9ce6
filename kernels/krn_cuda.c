/* SPDX-License-Identifier: MIT */
#include "kernels/krn_cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

struct krn_cuda_api krn_cuda;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int load_rc, driver_version;
static struct shm_error load_error;
static _Thread_local struct krn_cuda_detail detail;

typedef int (*get_address_fn)(const char *symbol, void **ret, int version, uint64_t flags, int *ret_status);

struct entry {
    const char *symbol;
    int version, required;
    size_t offset;
};
#define ENTRY(field, symbol, version, required, arguments)                                                   \
    {#symbol, version, required, offsetof(struct krn_cuda_api, field)},
static const struct entry entries[] = {KRN_CUDA_TABLE(ENTRY)};

/* dlsym and the driver hand out object pointers; POSIX makes them functions. */
static void *symbol(void *library, const char *name)
{
    return dlsym(library, name);
}

static int fill_table(get_address_fn get_address)
{
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        const struct entry *e = &entries[i];
        void *address = NULL;
        int status = 0;
        int rc = get_address(e->symbol, &address, e->version, 0, &status);
        if (rc || status)
            address = NULL;
        if (!address && e->required)
            return shm_error_set(&load_error, ENOSYS,
                                 "CUDA driver %d.%d lacks %s of version %d.%d: update the NVIDIA driver",
                                 driver_version / 1000, driver_version % 1000 / 10, e->symbol,
                                 e->version / 1000, e->version % 1000 / 10);
        memcpy((char *)&krn_cuda + e->offset, &address, sizeof(address));
    }
    return 0;
}

static int load(void)
{
    const char *path = getenv(KRN_CUDA_LIBRARY_ENV);
    if (!path || !path[0])
        path = LIBRARY;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return shm_error_set(&load_error, ENOENT, "no CUDA driver: %s (is it installed?)", dlerror());
    /* never closed: the driver has threads and exit handlers of its own */
    int (*get_version)(int *) = NULL;
    get_address_fn get_address = NULL;
    void *found = symbol(library, "cuDriverGetVersion");
    memcpy(&get_version, &found, sizeof(found));
    if (!get_version || get_version(&driver_version))
        return shm_error_set(&load_error, ENOSYS, "%s is no CUDA driver: cuDriverGetVersion does not answer",
                             path);
    if (driver_version < KRN_CUDA_DRIVER_MIN)
        return shm_error_set(&load_error, EOPNOTSUPP,
                             "CUDA driver %d.%d is too old: %d.%d or later is needed, update the NVIDIA "
                             "driver",
                             driver_version / 1000, driver_version % 1000 / 10, KRN_CUDA_DRIVER_MIN / 1000,
                             KRN_CUDA_DRIVER_MIN % 1000 / 10);
    found = symbol(library, "cuGetProcAddress_v2");
    memcpy(&get_address, &found, sizeof(found));
    if (!get_address)
        return shm_error_set(&load_error, ENOSYS, "CUDA driver %d.%d in %s lacks cuGetProcAddress_v2",
                             driver_version / 1000, driver_version % 1000 / 10, path);
    int rc = fill_table(get_address);
    if (rc < 0)
        return rc;
    rc = KRN_CUDA(init, 0);
    if (rc < 0)
        return krn_cuda_explain(rc, "CUDA driver", &load_error);
    int count = 0;
    rc = KRN_CUDA(device_count, &count);
    if (rc < 0)
        return krn_cuda_explain(rc, "CUDA devices", &load_error);
    if (!count)
        return shm_error_set(&load_error, ENODEV,
                             "the CUDA driver shows no device: see nvidia-smi and CUDA_VISIBLE_DEVICES");
    return 0;
}

static void load_once(void)
{
    load_rc = load();
    if (load_rc < 0)
        memset(&krn_cuda, 0, sizeof(krn_cuda));
}

int krn_cuda_load(struct shm_error *err)
{
    pthread_once(&once, load_once);
    if (load_rc < 0 && err)
        *err = load_error;
    return load_rc;
}

int krn_cuda_version(void)
{
    return load_rc == 0 ? driver_version : 0;
}

int krn_cuda_count(void)
{
    int count = 0;
    return krn_cuda.device_count && krn_cuda.device_count(&count) == 0 ? count : 0;
}

const struct krn_cuda_detail *krn_cuda_detail(void)
{
    return &detail;
}

static int to_errno(int result)
{
    switch (result) {
    case KRN_CUDA_SUCCESS:
        return 0;
    case KRN_CUDA_INVALID_VALUE:
    case KRN_CUDA_INVALID_HANDLE:
    case KRN_CUDA_INVALID_CONTEXT:
    case KRN_CUDA_NOT_REGISTERED:
        return -EINVAL;
    case KRN_CUDA_OUT_OF_MEMORY:
        return -ENOMEM;
    case KRN_CUDA_NO_DEVICE:
    case KRN_CUDA_INVALID_DEVICE:
    case KRN_CUDA_UNAVAILABLE:
        return -ENODEV;
    case KRN_CUDA_NOT_READY:
        return -EAGAIN;
    case KRN_CUDA_NOT_FOUND:
        return -ENOENT;
    case KRN_CUDA_ALREADY_REGISTERED:
        return -EEXIST;
    case KRN_CUDA_NOT_PERMITTED:
        return -EPERM;
    case KRN_CUDA_NOT_SUPPORTED:
    case KRN_CUDA_NEWER_DRIVER:
    case KRN_CUDA_NO_BINARY:
    case KRN_CUDA_UNSUPPORTED_PTX:
    case KRN_CUDA_DRIVER_MISMATCH:
    case KRN_CUDA_STUB_LIBRARY:
        return -EOPNOTSUPP;
    case KRN_CUDA_INVALID_IMAGE:
    case KRN_CUDA_INVALID_PTX:
        return -ENOEXEC;
    case KRN_CUDA_TIMEOUT:
        return -ETIMEDOUT;
    default:
        return -EIO;
    }
}

int krn_cuda_check(int result, const char *call)
{
    if (result == KRN_CUDA_SUCCESS)
        return 0;
    const char *name = NULL, *text = NULL;
    if (!krn_cuda.get_error_name || krn_cuda.get_error_name(result, &name))
        name = NULL;
    if (!krn_cuda.get_error_string || krn_cuda.get_error_string(result, &text))
        text = NULL;
    detail.result = result;
    detail.call = call;
    snprintf(detail.name, sizeof(detail.name), "%s", name ? name : "unknown");
    snprintf(detail.text, sizeof(detail.text), "%s", text ? text : "no text");
    return to_errno(result);
}

int krn_cuda_explain(int rc, const char *what, struct shm_error *err)
{
    return shm_error_set(err, rc, "%s: %s (%d, %s) from %s", what, detail.name, detail.result, detail.text,
                         detail.call ? detail.call : "?");
}
