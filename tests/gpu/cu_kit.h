/* SPDX-License-Identifier: MIT */
/* What the kernels' test and bench share: one device, memory that is given back in one go, copies,
 * comparison. */
#ifndef CU_KIT_H
#define CU_KIT_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/krn_cu.h"
#include "kernels/krn_ref.h"
#include "tests/gpu/f16.h"
#include "tests/unit/krn_data.h"

#define CU_MEMORY_MAX 512

static struct krn_cuda_device *device;
static struct krn_cu *cu;
static void *stream;
static struct krn_rng rng = {42};
static krn_cuda_ptr cu_memory[CU_MEMORY_MAX];
static size_t cu_memory_n;

static inline void cu_need(int rc, const char *what)
{
    if (rc == 0)
        return;
    fprintf(stderr, "%s: %d, %s: %s %s\n", what, rc, krn_cuda_detail()->call ? krn_cuda_detail()->call : "-",
            krn_cuda_detail()->name, krn_cuda_detail()->text);
    exit(1);
}
#define NEED(call) cu_need(call, #call)

/* 0, or 77 with the reason said. */
static inline int cu_open(void)
{
    struct shm_error err = {0};
    if (krn_cuda_load(&err)) {
        fprintf(stderr, "skipped: %s\n", err.text);
        return 77;
    }
    if (krn_cuda_device_open(0, &device, &err) || krn_cuda_enter(device)) {
        fprintf(stderr, "skipped: %s\n", err.text);
        return 77;
    }
    if (getenv("CU_KIT_MMA")) /* the kernels of GPUs without wgmma */
        device->major = 8;
    if (krn_cu_create(device, &err, &cu)) {
        fprintf(stderr, "%s\n", err.text);
        return krn_cuda.mem_alloc && strstr(err.text, "not in this program") ? 77 : 1;
    }
    NEED(KRN_CUDA(stream_create, &stream, 1));
    return 0;
}

static inline void cu_wait(void)
{
    NEED(KRN_CUDA(stream_synchronize, stream));
}

/* Device memory with every byte 0xff (NaN in each float form), until cu_free_all. */
static inline krn_cuda_ptr cu_alloc(size_t bytes)
{
    krn_cuda_ptr p;
    if (cu_memory_n == CU_MEMORY_MAX)
        abort();
    bytes = (bytes + 256 + 15) & ~(size_t)15;
    NEED(KRN_CUDA(mem_alloc, &p, bytes));
    cu_memory[cu_memory_n++] = p;
    NEED(KRN_CUDA(memset_8_async, p, 0xff, bytes, stream));
    cu_wait();
    return p;
}

static inline void cu_free_all(void)
{
    cu_wait();
    while (cu_memory_n)
        krn_cuda.mem_free(cu_memory[--cu_memory_n]);
}

static inline void cu_put(krn_cuda_ptr p, const void *data, size_t bytes)
{
    NEED(KRN_CUDA(copy_in_async, p, data, bytes, stream));
    cu_wait();
}

static inline krn_cuda_ptr cu_copy(const void *data, size_t bytes)
{
    krn_cuda_ptr p = cu_alloc(bytes);
    cu_put(p, data, bytes);
    return p;
}

/* bytes of the device, and 16 more behind them to see overruns. The caller frees. */
static inline void *cu_get(krn_cuda_ptr p, size_t bytes)
{
    void *data = krn_alloc(bytes + 16);
    NEED(KRN_CUDA(copy_out_async, data, p, bytes + 16, stream));
    cu_wait();
    return data;
}

/* n values as f16; x itself is rounded, so that the reference sees what the device sees. */
static inline uint16_t *f16_round(float *x, size_t n)
{
    uint16_t *h = krn_alloc(n * 2);
    for (size_t i = 0; i < n; i++) {
        h[i] = f16_of(x[i]);
        x[i] = f16_to(h[i]);
    }
    return h;
}

#endif
