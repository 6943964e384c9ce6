/* SPDX-License-Identifier: MIT */
/*
 * As much of the driver and of krn_fatbin.h as launching kernels needs, on a
 * CPU: device memory is memory, everything happens at once, a kernel is a
 * function of this program (linked with -rdynamic) of the same name.
 */
#include "kernels/krn_cuda.h"
#include "kernels/krn_fatbin.h"
#include "tests/gpu/emu_map.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SHARED_MAX 232448

void emu_launch(void *function, const unsigned grid[3], unsigned threads, const void *args);

struct krn_cuda_api krn_cuda;
static struct krn_cuda_detail detail;
static struct krn_cuda_device device = {.name = "emulation", .multiprocessors = 3, .shared_max = SHARED_MAX};

static int allocate(krn_cuda_ptr *ret_ptr, size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 511) / 256 * 256);
    *ret_ptr = (uintptr_t)p;
    return p ? KRN_CUDA_SUCCESS : KRN_CUDA_OUT_OF_MEMORY;
}

static int release(krn_cuda_ptr p)
{
    free((void *)(uintptr_t)p);
    return KRN_CUDA_SUCCESS;
}

static int host_alloc(void **ret_memory, size_t bytes, unsigned flags)
{
    krn_cuda_ptr p;
    (void)flags;
    int rc = allocate(&p, bytes);
    *ret_memory = (void *)(uintptr_t)p;
    return rc;
}

static int host_free(void *memory)
{
    free(memory);
    return KRN_CUDA_SUCCESS;
}

static int host_pointer(krn_cuda_ptr *ret_ptr, void *memory, unsigned flags)
{
    (void)flags;
    *ret_ptr = (uintptr_t)memory;
    return KRN_CUDA_SUCCESS;
}

static int stream_create(void **ret_stream, unsigned flags)
{
    (void)flags;
    *ret_stream = NULL;
    return KRN_CUDA_SUCCESS;
}

static int nothing(void *handle)
{
    (void)handle;
    return KRN_CUDA_SUCCESS;
}

static int copy_in(krn_cuda_ptr target, const void *source, size_t bytes, void *stream)
{
    (void)stream;
    memcpy((void *)(uintptr_t)target, source, bytes);
    return KRN_CUDA_SUCCESS;
}

static int copy_out(void *target, krn_cuda_ptr source, size_t bytes, void *stream)
{
    (void)stream;
    memcpy(target, (const void *)(uintptr_t)source, bytes);
    return KRN_CUDA_SUCCESS;
}

static int copy_device(krn_cuda_ptr target, krn_cuda_ptr source, size_t bytes, void *stream)
{
    return copy_in(target, (const void *)(uintptr_t)source, bytes, stream);
}

static int fill(krn_cuda_ptr target, unsigned char value, size_t bytes, void *stream)
{
    (void)stream;
    memset((void *)(uintptr_t)target, value, bytes);
    return KRN_CUDA_SUCCESS;
}

static int tensor_map(void *ret_map, int type, uint32_t rank, void *data, const uint64_t *extents,
                      const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                      int swizzle, int promotion, int fill)
{
    (void)promotion;
    return emu_tensor_map(ret_map, type, rank, data, extents, strides, box, steps, interleave, swizzle, fill);
}

static int launch(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                  unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                  void **extra)
{
    (void)stream;
    if (shared_bytes > (unsigned)device.shared_max || grid_y > 65535 || grid_z > 65535 || block_x > 1024 ||
        block_y != 1 || block_z != 1 || extra)
        return KRN_CUDA_INVALID_VALUE;
    emu_launch(function, (const unsigned[3]){grid_x, grid_y, grid_z}, block_x, arguments[0]);
    return KRN_CUDA_SUCCESS;
}

int krn_cuda_load(struct shm_error *err)
{
    (void)err;
    krn_cuda = (struct krn_cuda_api){.mem_alloc = allocate,
                                     .mem_free = release,
                                     .host_alloc = host_alloc,
                                     .host_free = host_free,
                                     .host_pointer = host_pointer,
                                     .stream_create = stream_create,
                                     .stream_destroy = nothing,
                                     .stream_query = nothing,
                                     .stream_synchronize = nothing,
                                     .copy_in_async = copy_in,
                                     .copy_out_async = copy_out,
                                     .copy_device_async = copy_device,
                                     .memset_8_async = fill,
                                     .module_unload = nothing,
                                     .tensor_map = tensor_map,
                                     .launch = launch};
    return 0;
}

const struct krn_cuda_detail *krn_cuda_detail(void)
{
    return &detail;
}

int krn_cuda_check(int result, const char *call)
{
    detail.call = call;
    return result ? -EINVAL : 0;
}

int krn_cuda_explain(int rc, const char *what, struct shm_error *err)
{
    return shm_error_set(err, -rc, "%s failed", what);
}

int krn_cuda_device_open(int ordinal, struct krn_cuda_device **ret_device, struct shm_error *err)
{
    (void)ordinal;
    (void)err;
    const char *shared_max = getenv("EMU_SHARED_MAX"); /* of a smaller GPU */
    if (shared_max)
        device.shared_max = atoi(shared_max);
    const char *hopper = getenv("EMU_HOPPER"); /* its own kernels, on so many multiprocessors */
    device.major = hopper ? 9 : 8;
    device.multiprocessors = hopper ? atoi(hopper) : device.multiprocessors;
    *ret_device = &device;
    return 0;
}

void krn_cuda_device_close(struct krn_cuda_device **closed)
{
    *closed = NULL;
}

int krn_cuda_enter(const struct krn_cuda_device *entered)
{
    (void)entered;
    return 0;
}

const struct krn_fatbin *krn_fatbin_find(const char *name)
{
    (void)name;
    static const struct krn_fatbin any;
    return &any;
}

int krn_cuda_module(const char *name, void **ret_module, struct shm_error *err)
{
    (void)err;
    *ret_module = (void *)(uintptr_t)name;
    return 0;
}

int krn_cuda_kernel(void *module, const char *name, unsigned shared_bytes, void **ret_function,
                    struct shm_error *err)
{
    (void)module;
    (void)shared_bytes;
    *ret_function = dlsym(RTLD_DEFAULT, name);
    return *ret_function ? 0 : shm_error_set(err, ENOENT, "kernel %s is not in this program", name);
}
