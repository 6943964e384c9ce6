/* SPDX-License-Identifier: MIT */
/*
 * CUDA driver, opened at run time: libcuda.so.1 (or what EXPERTD_CUDA_LIBRARY
 * names: tests put a fake driver there), its functions, its errors as ours,
 * and one opened device with the capabilities proved on it.
 *
 * The library is opened once a process and never closed. A machine without a
 * driver gets one line that says so; nothing else here may be called then.
 * All functions may be called from any thread; a device's context must be made
 * current on each thread (krn_cuda_enter) before the table is used.
 */
#ifndef KRN_CUDA_H
#define KRN_CUDA_H

#include "kernels/krn_cuda_abi.h"
#include "shm/shm_error.h"

#include <stdbool.h>

#define KRN_CUDA_LIBRARY_ENV "EXPERTD_CUDA_LIBRARY"
#define KRN_CUDA_DRIVER_MIN  12000 /* cuGetProcAddress_v2, memory operations without opt-in */

#define KRN_CUDA_FIELD(field, symbol, version, required, arguments) int(*field) arguments;
struct krn_cuda_api {
    KRN_CUDA_TABLE(KRN_CUDA_FIELD)
};

/* Opens the driver and initializes it; later calls return the first one's result. -ENOENT no library;
 * -ENOSYS a required function is missing; -EOPNOTSUPP driver too old; -ENODEV no device; one line each. */
int krn_cuda_load(struct shm_error *err);

/* The table, after krn_cuda_load returned 0. Optional entries may be NULL. */
extern struct krn_cuda_api krn_cuda;

int krn_cuda_version(void); /* of the driver, 13000 is CUDA 13.0; 0: not loaded */

/* What the driver said last on this thread. */
struct krn_cuda_detail {
    int result;       /* CUresult; 0: nothing went wrong yet */
    const char *call; /* "cuMemAlloc" */
    char name[64];    /* "CUDA_ERROR_OUT_OF_MEMORY" */
    char text[128];   /* "out of memory" */
};
const struct krn_cuda_detail *krn_cuda_detail(void);

/* A driver's result as 0 or a negative errno; a failure is kept in the thread's detail. */
int krn_cuda_check(int result, const char *call);
#define KRN_CUDA(field, ...) krn_cuda_check(krn_cuda.field(__VA_ARGS__), #field)

/* "what: CUDA_ERROR_X (text) from call", with rc as returned by krn_cuda_check. Returns rc. */
int krn_cuda_explain(int rc, const char *what, struct shm_error *err);

#define KRN_CUDA_LINES 128 /* progress lines of a device: links and other users */

struct krn_cuda_device {
    int ordinal;
    krn_cuda_dev device;
    void *context; /* the primary one */
    char name[64];
    uint8_t uuid[16];
    int major, minor, multiprocessors;
    int shared_max; /* bytes of shared memory a block may ask for */
    uint64_t memory_bytes;
    /* Proved by trial at open. */
    bool ipc, memops, host_register, register_read_only, batch_copy;
    char missing[160]; /* what failed, with the driver's word; "" if nothing */

    uint8_t *pinned; /* 128 lines of 64 bytes, then KRN_CUDA_COPY_MIN bytes to copy from */
    krn_cuda_ptr pinned_device;
    _Atomic uint64_t lines_used[KRN_CUDA_LINES / 64];
};

/* Smallest copy that surely runs on a copy engine, and first operation of a stream (DESIGN 8). */
#define KRN_CUDA_COPY_MIN 32768u

int krn_cuda_count(void); /* devices visible; 0 when not loaded */

/* Whether there are a driver and that device, before it costs a context. Errors as krn_cuda_device_open(). */
int krn_cuda_device_check(int ordinal, struct shm_error *err);

/* Retains the primary context (0.6 to 1.2 s) and tries what the product needs. Capabilities that are
 * missing are not errors here. -ENODEV no such device. The caller closes. */
int krn_cuda_device_open(int ordinal, struct krn_cuda_device **ret_device, struct shm_error *err);
void krn_cuda_device_close(struct krn_cuda_device **device);

/* Makes the device's context current on the calling thread. Cheap when it is. */
int krn_cuda_enter(const struct krn_cuda_device *device);

/* "NVIDIA H200, compute capability 9.0, driver CUDA 13.0". */
void krn_cuda_device_describe(const struct krn_cuda_device *device, char *text, size_t bytes);

/* A zeroed cache line in pinned memory that the device writes: both its addresses. -EBUSY: all in use. */
int krn_cuda_line_take(struct krn_cuda_device *device, void **ret_line, krn_cuda_ptr *ret_device_address);
void krn_cuda_line_give(struct krn_cuda_device *device, void *line);

/* A stream whose first operation is a copy of KRN_CUDA_COPY_MIN bytes to `scratch` (device memory whose
 * content does not matter), so that memory operations on it stay on the copy engine. Waits for it. */
int krn_cuda_stream_primed(struct krn_cuda_device *device, krn_cuda_ptr scratch, void **ret_stream);

#endif
