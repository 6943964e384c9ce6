/* SPDX-License-Identifier: MIT */
/*
 * The part of the CUDA driver's binary interface that is used here, declared
 * by hand, so that expertd talks to a driver it finds at run time also when it
 * was built on a machine without the CUDA Toolkit. tests/unit/c_cuda_abi.c
 * compares every size, offset, constant and version with cuda.h where that is
 * installed.
 */
#ifndef KRN_CUDA_ABI_H
#define KRN_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef uint64_t krn_cuda_ptr; /* device address */
typedef int krn_cuda_dev;

struct krn_cuda_ipc {
    uint8_t bytes[64];
};
_Static_assert(sizeof(struct krn_cuda_ipc) == 64, "driver's layout");

struct krn_cuda_uuid {
    uint8_t bytes[16];
};

struct krn_cuda_memop {
    uint32_t operation; /* KRN_CUDA_OP_* */
    uint32_t pad0;
    krn_cuda_ptr address;
    uint64_t value; /* 32-bit operations: the low half */
    uint32_t flags;
    uint32_t pad1;
    uint64_t alias, pad2;
};
_Static_assert(sizeof(struct krn_cuda_memop) == 48, "driver's layout");
_Static_assert(offsetof(struct krn_cuda_memop, flags) == 24, "driver's layout");

struct krn_cuda_copy_attr {
    uint32_t source_order; /* KRN_CUDA_SOURCE_* */
    int source_hint[2], target_hint[2];
    uint32_t flags;
};
_Static_assert(sizeof(struct krn_cuda_copy_attr) == 24, "driver's layout");

struct krn_cuda_launch_attr {
    uint32_t id; /* KRN_CUDA_LAUNCH_* */
    uint32_t pad0;
    int value; /* of those that are numbers */
    uint32_t pad1[15];
};
_Static_assert(sizeof(struct krn_cuda_launch_attr) == 72, "driver's layout");

struct krn_cuda_launch {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    struct krn_cuda_launch_attr *attrs;
    uint32_t attr_count;
};
_Static_assert(sizeof(struct krn_cuda_launch) == 56, "driver's layout");

/* Rows of one length at even distances, on each side. */
struct krn_cuda_copy_2d {
    size_t source_x, source_y;
    uint32_t source_type, pad0; /* KRN_CUDA_MEMORY_* */
    const void *source_host;
    krn_cuda_ptr source_device;
    void *source_array;
    size_t source_pitch;
    size_t target_x, target_y;
    uint32_t target_type, pad1;
    void *target_host;
    krn_cuda_ptr target_device;
    void *target_array;
    size_t target_pitch;
    size_t bytes, rows; /* of a row; how many */
};
_Static_assert(sizeof(struct krn_cuda_copy_2d) == 128, "driver's layout");

#define KRN_CUDA_MEMORY_HOST   1u
#define KRN_CUDA_MEMORY_DEVICE 2u

/* The kernel may start while the one before it runs; it waits for that one itself. */
#define KRN_CUDA_LAUNCH_OVERLAP 6u

#define KRN_CUDA_OP_WAIT_32  1u
#define KRN_CUDA_OP_WRITE_32 2u
#define KRN_CUDA_OP_WRITE_64 5u

#define KRN_CUDA_SOURCE_STREAM 1u

#define KRN_CUDA_WAIT_GEQ            0u
#define KRN_CUDA_STREAM_NON_BLOCKING 1u
#define KRN_CUDA_EVENT_BLOCKING_SYNC 1u
#define KRN_CUDA_EVENT_NO_TIMING     2u
#define KRN_CUDA_SCHED_BLOCKING_SYNC 4u
#define KRN_CUDA_HOST_PORTABLE       1u
#define KRN_CUDA_HOST_DEVICEMAP      2u
#define KRN_CUDA_REGISTER_READ_ONLY  8u
#define KRN_CUDA_IPC_LAZY_PEER       1u

#define KRN_CUDA_ATTR_MULTIPROCESSORS     16
#define KRN_CUDA_ATTR_UNIFIED             41
#define KRN_CUDA_ATTR_MAJOR               75
#define KRN_CUDA_ATTR_MINOR               76
#define KRN_CUDA_ATTR_SHARED_OPTIN        97
#define KRN_CUDA_FUNC_ATTR_DYNAMIC_SHARED 8
#define KRN_CUDA_FUNC_ATTR_CARVEOUT       9 /* percent of the first-level memory that is shared memory */

/* Of tensor_map. */
#define KRN_CUDA_TENSOR_F16         6
#define KRN_CUDA_TENSOR_SWIZZLE_128 3
#define KRN_CUDA_TENSOR_L2_256      3

#define KRN_CUDA_SUCCESS            0
#define KRN_CUDA_INVALID_VALUE      1
#define KRN_CUDA_OUT_OF_MEMORY      2
#define KRN_CUDA_NOT_INITIALIZED    3
#define KRN_CUDA_STUB_LIBRARY       34
#define KRN_CUDA_NEWER_DRIVER       36
#define KRN_CUDA_UNAVAILABLE        46
#define KRN_CUDA_NO_DEVICE          100
#define KRN_CUDA_INVALID_DEVICE     101
#define KRN_CUDA_INVALID_IMAGE      200
#define KRN_CUDA_INVALID_CONTEXT    201
#define KRN_CUDA_NO_BINARY          209
#define KRN_CUDA_INVALID_PTX        218
#define KRN_CUDA_UNSUPPORTED_PTX    222
#define KRN_CUDA_OPERATING_SYSTEM   304
#define KRN_CUDA_INVALID_HANDLE     400
#define KRN_CUDA_NOT_FOUND          500
#define KRN_CUDA_NOT_READY          600
#define KRN_CUDA_ALREADY_REGISTERED 712
#define KRN_CUDA_NOT_REGISTERED     713
#define KRN_CUDA_NOT_PERMITTED      800
#define KRN_CUDA_NOT_SUPPORTED      801
#define KRN_CUDA_SYSTEM_NOT_READY   802
#define KRN_CUDA_DRIVER_MISMATCH    803
#define KRN_CUDA_TIMEOUT            909
#define KRN_CUDA_UNKNOWN            999

#define KRN_CUDA_REQUIRED 1
#define KRN_CUDA_OPTIONAL 0

/*
 * X(field, symbol, version of its typedef in cudaTypedefs.h, required, arguments). The version pins the
 * calling convention: the driver hands out the variant of that version whatever its own is.
 */
#define KRN_CUDA_TABLE(X)                                                                                    \
    X(get_error_name, cuGetErrorName, 6000, KRN_CUDA_REQUIRED, (int result, const char **ret_name))          \
    X(get_error_string, cuGetErrorString, 6000, KRN_CUDA_REQUIRED, (int result, const char **ret_text))      \
    X(init, cuInit, 2000, KRN_CUDA_REQUIRED, (unsigned flags))                                               \
    X(device_count, cuDeviceGetCount, 2000, KRN_CUDA_REQUIRED, (int *ret_count))                             \
    X(device_get, cuDeviceGet, 2000, KRN_CUDA_REQUIRED, (krn_cuda_dev * ret_device, int ordinal))            \
    X(device_name, cuDeviceGetName, 2000, KRN_CUDA_REQUIRED, (char *name, int bytes, krn_cuda_dev device))   \
    X(device_uuid, cuDeviceGetUuid, 11040, KRN_CUDA_REQUIRED,                                                \
      (struct krn_cuda_uuid * ret_uuid, krn_cuda_dev device))                                                \
    X(device_memory, cuDeviceTotalMem, 3020, KRN_CUDA_REQUIRED, (size_t * ret_bytes, krn_cuda_dev device))   \
    X(device_attribute, cuDeviceGetAttribute, 2000, KRN_CUDA_REQUIRED,                                       \
      (int *ret_value, int attribute, krn_cuda_dev device))                                                  \
    X(primary_flags, cuDevicePrimaryCtxSetFlags, 11000, KRN_CUDA_REQUIRED,                                   \
      (krn_cuda_dev device, unsigned flags))                                                                 \
    X(primary_retain, cuDevicePrimaryCtxRetain, 7000, KRN_CUDA_REQUIRED,                                     \
      (void **ret_context, krn_cuda_dev device))                                                             \
    X(primary_release, cuDevicePrimaryCtxRelease, 11000, KRN_CUDA_REQUIRED, (krn_cuda_dev device))           \
    X(set_current, cuCtxSetCurrent, 4000, KRN_CUDA_REQUIRED, (void *context))                                \
    X(memory_info, cuMemGetInfo, 3020, KRN_CUDA_REQUIRED, (size_t * ret_free, size_t * ret_total))           \
    X(mem_alloc, cuMemAlloc, 3020, KRN_CUDA_REQUIRED, (krn_cuda_ptr * ret_ptr, size_t bytes))                \
    X(mem_free, cuMemFree, 3020, KRN_CUDA_REQUIRED, (krn_cuda_ptr ptr))                                      \
    X(address_range, cuMemGetAddressRange, 3020, KRN_CUDA_REQUIRED,                                          \
      (krn_cuda_ptr * ret_base, size_t * ret_bytes, krn_cuda_ptr ptr))                                       \
    X(host_alloc, cuMemHostAlloc, 2020, KRN_CUDA_REQUIRED,                                                   \
      (void **ret_memory, size_t bytes, unsigned flags))                                                     \
    X(host_free, cuMemFreeHost, 2000, KRN_CUDA_REQUIRED, (void *memory))                                     \
    X(host_register, cuMemHostRegister, 6050, KRN_CUDA_REQUIRED,                                             \
      (void *memory, size_t bytes, unsigned flags))                                                          \
    X(host_unregister, cuMemHostUnregister, 4000, KRN_CUDA_REQUIRED, (void *memory))                         \
    X(host_pointer, cuMemHostGetDevicePointer, 3020, KRN_CUDA_REQUIRED,                                      \
      (krn_cuda_ptr * ret_ptr, void *memory, unsigned flags))                                                \
    X(ipc_get, cuIpcGetMemHandle, 4010, KRN_CUDA_REQUIRED,                                                   \
      (struct krn_cuda_ipc * ret_handle, krn_cuda_ptr ptr))                                                  \
    X(ipc_open, cuIpcOpenMemHandle, 11000, KRN_CUDA_REQUIRED,                                                \
      (krn_cuda_ptr * ret_ptr, struct krn_cuda_ipc handle, unsigned flags))                                  \
    X(ipc_close, cuIpcCloseMemHandle, 4010, KRN_CUDA_REQUIRED, (krn_cuda_ptr ptr))                           \
    X(stream_create, cuStreamCreate, 2000, KRN_CUDA_REQUIRED, (void **ret_stream, unsigned flags))           \
    X(stream_destroy, cuStreamDestroy, 4000, KRN_CUDA_REQUIRED, (void *stream))                              \
    X(stream_query, cuStreamQuery, 2000, KRN_CUDA_REQUIRED, (void *stream))                                  \
    X(stream_synchronize, cuStreamSynchronize, 2000, KRN_CUDA_REQUIRED, (void *stream))                      \
    X(stream_wait_event, cuStreamWaitEvent, 3020, KRN_CUDA_REQUIRED,                                         \
      (void *stream, void *event, unsigned flags))                                                           \
    X(write_32, cuStreamWriteValue32, 11070, KRN_CUDA_REQUIRED,                                              \
      (void *stream, krn_cuda_ptr address, uint32_t value, unsigned flags))                                  \
    X(write_64, cuStreamWriteValue64, 11070, KRN_CUDA_REQUIRED,                                              \
      (void *stream, krn_cuda_ptr address, uint64_t value, unsigned flags))                                  \
    X(wait_32, cuStreamWaitValue32, 11070, KRN_CUDA_REQUIRED,                                                \
      (void *stream, krn_cuda_ptr address, uint32_t value, unsigned flags))                                  \
    X(memops, cuStreamBatchMemOp, 11070, KRN_CUDA_REQUIRED,                                                  \
      (void *stream, unsigned count, struct krn_cuda_memop *ops, unsigned flags))                            \
    X(event_create, cuEventCreate, 2000, KRN_CUDA_REQUIRED, (void **ret_event, unsigned flags))              \
    X(event_destroy, cuEventDestroy, 4000, KRN_CUDA_REQUIRED, (void *event))                                 \
    X(event_record, cuEventRecord, 2000, KRN_CUDA_REQUIRED, (void *event, void *stream))                     \
    X(event_query, cuEventQuery, 2000, KRN_CUDA_REQUIRED, (void *event))                                     \
    X(event_synchronize, cuEventSynchronize, 2000, KRN_CUDA_REQUIRED, (void *event))                         \
    X(event_elapsed, cuEventElapsedTime, 2000, KRN_CUDA_REQUIRED, (float *ret_ms, void *begin, void *end))   \
    X(copy_in_async, cuMemcpyHtoDAsync, 3020, KRN_CUDA_REQUIRED,                                             \
      (krn_cuda_ptr target, const void *source, size_t bytes, void *stream))                                 \
    X(copy_out_async, cuMemcpyDtoHAsync, 3020, KRN_CUDA_REQUIRED,                                            \
      (void *target, krn_cuda_ptr source, size_t bytes, void *stream))                                       \
    X(copy_device_async, cuMemcpyDtoDAsync, 3020, KRN_CUDA_REQUIRED,                                         \
      (krn_cuda_ptr target, krn_cuda_ptr source, size_t bytes, void *stream))                                \
    X(copy_2d_async, cuMemcpy2DAsync, 3020, KRN_CUDA_REQUIRED,                                               \
      (const struct krn_cuda_copy_2d *copy, void *stream))                                                   \
    X(memset_8_async, cuMemsetD8Async, 3020, KRN_CUDA_REQUIRED,                                              \
      (krn_cuda_ptr target, unsigned char value, size_t bytes, void *stream))                                \
    X(module_load, cuModuleLoadData, 2000, KRN_CUDA_REQUIRED, (void **ret_module, const void *image))        \
    X(module_unload, cuModuleUnload, 2000, KRN_CUDA_REQUIRED, (void *module))                                \
    X(module_function, cuModuleGetFunction, 2000, KRN_CUDA_REQUIRED,                                         \
      (void **ret_function, void *module, const char *name))                                                 \
    X(function_attribute, cuFuncSetAttribute, 9000, KRN_CUDA_REQUIRED,                                       \
      (void *function, int attribute, int value))                                                            \
    X(launch, cuLaunchKernel, 4000, KRN_CUDA_REQUIRED,                                                       \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,                  \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,            \
       void **extra))                                                                                        \
    X(launch_ex, cuLaunchKernelEx, 11060, KRN_CUDA_OPTIONAL,                                                 \
      (const struct krn_cuda_launch *launch, void *function, void **arguments, void **extra))                \
    X(tensor_map, cuTensorMapEncodeTiled, 12000, KRN_CUDA_OPTIONAL,                                          \
      (void *ret_map, int type, uint32_t rank, void *data, const uint64_t *extents, const uint64_t *strides, \
       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill))    \
    X(copy_batch, cuMemcpyBatchAsync, 13000, KRN_CUDA_OPTIONAL,                                              \
      (krn_cuda_ptr * targets, krn_cuda_ptr * sources, size_t * sizes, size_t count,                         \
       struct krn_cuda_copy_attr * attrs, size_t * attr_first, size_t attr_count, void *stream))             \
    X(copy_batch_12, cuMemcpyBatchAsync, 12080, KRN_CUDA_OPTIONAL,                                           \
      (krn_cuda_ptr * targets, krn_cuda_ptr * sources, size_t * sizes, size_t count,                         \
       struct krn_cuda_copy_attr * attrs, size_t * attr_first, size_t attr_count, size_t * ret_failed,       \
       void *stream))

#endif
