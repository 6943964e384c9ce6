/* SPDX-License-Identifier: MIT */
/* Compiled, never run: the hand-written driver interface against the toolkit's headers. */
#include "kernels/krn_cuda_abi.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours)

/* Each version is one that the toolkit has a typedef of. */
#define HAS_TYPEDEF(field, symbol, version, required, arguments)                                             \
    _Static_assert(sizeof(PFN_##symbol##_v##version) == sizeof(void *), #symbol);
KRN_CUDA_TABLE(HAS_TYPEDEF)

SAME(sizeof(krn_cuda_ptr), sizeof(CUdeviceptr));
SAME(sizeof(krn_cuda_dev), sizeof(CUdevice));
SAME(sizeof(int), sizeof(CUresult));
SAME(sizeof(int), sizeof(CUdevice_attribute));
SAME(sizeof(struct krn_cuda_ipc), sizeof(CUipcMemHandle));
SAME(sizeof(struct krn_cuda_uuid), sizeof(CUuuid));
SAME(sizeof(struct krn_cuda_memop), sizeof(CUstreamBatchMemOpParams));
SAME(offsetof(struct krn_cuda_memop, address), offsetof(CUstreamBatchMemOpParams, writeValue.address));
SAME(offsetof(struct krn_cuda_memop, value), offsetof(CUstreamBatchMemOpParams, writeValue.value));
SAME(offsetof(struct krn_cuda_memop, flags), offsetof(CUstreamBatchMemOpParams, writeValue.flags));
SAME(offsetof(struct krn_cuda_memop, alias), offsetof(CUstreamBatchMemOpParams, writeValue.alias));
SAME(sizeof(struct krn_cuda_copy_attr), sizeof(CUmemcpyAttributes));
SAME(offsetof(struct krn_cuda_copy_attr, source_hint), offsetof(CUmemcpyAttributes, srcLocHint));
SAME(offsetof(struct krn_cuda_copy_attr, target_hint), offsetof(CUmemcpyAttributes, dstLocHint));
SAME(offsetof(struct krn_cuda_copy_attr, flags), offsetof(CUmemcpyAttributes, flags));

SAME(sizeof(struct krn_cuda_launch_attr), sizeof(CUlaunchAttribute));
SAME(offsetof(struct krn_cuda_launch_attr, value),
     offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));
SAME(sizeof(struct krn_cuda_launch), sizeof(CUlaunchConfig));
SAME(offsetof(struct krn_cuda_launch, block), offsetof(CUlaunchConfig, blockDimX));
SAME(offsetof(struct krn_cuda_launch, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
SAME(offsetof(struct krn_cuda_launch, stream), offsetof(CUlaunchConfig, hStream));
SAME(offsetof(struct krn_cuda_launch, attrs), offsetof(CUlaunchConfig, attrs));
SAME(offsetof(struct krn_cuda_launch, attr_count), offsetof(CUlaunchConfig, numAttrs));

SAME(sizeof(struct krn_cuda_copy_2d), sizeof(CUDA_MEMCPY2D));
SAME(offsetof(struct krn_cuda_copy_2d, source_x), offsetof(CUDA_MEMCPY2D, srcXInBytes));
SAME(offsetof(struct krn_cuda_copy_2d, source_y), offsetof(CUDA_MEMCPY2D, srcY));
SAME(offsetof(struct krn_cuda_copy_2d, source_type), offsetof(CUDA_MEMCPY2D, srcMemoryType));
SAME(offsetof(struct krn_cuda_copy_2d, source_host), offsetof(CUDA_MEMCPY2D, srcHost));
SAME(offsetof(struct krn_cuda_copy_2d, source_device), offsetof(CUDA_MEMCPY2D, srcDevice));
SAME(offsetof(struct krn_cuda_copy_2d, source_array), offsetof(CUDA_MEMCPY2D, srcArray));
SAME(offsetof(struct krn_cuda_copy_2d, source_pitch), offsetof(CUDA_MEMCPY2D, srcPitch));
SAME(offsetof(struct krn_cuda_copy_2d, target_x), offsetof(CUDA_MEMCPY2D, dstXInBytes));
SAME(offsetof(struct krn_cuda_copy_2d, target_y), offsetof(CUDA_MEMCPY2D, dstY));
SAME(offsetof(struct krn_cuda_copy_2d, target_type), offsetof(CUDA_MEMCPY2D, dstMemoryType));
SAME(offsetof(struct krn_cuda_copy_2d, target_host), offsetof(CUDA_MEMCPY2D, dstHost));
SAME(offsetof(struct krn_cuda_copy_2d, target_device), offsetof(CUDA_MEMCPY2D, dstDevice));
SAME(offsetof(struct krn_cuda_copy_2d, target_array), offsetof(CUDA_MEMCPY2D, dstArray));
SAME(offsetof(struct krn_cuda_copy_2d, target_pitch), offsetof(CUDA_MEMCPY2D, dstPitch));
SAME(offsetof(struct krn_cuda_copy_2d, bytes), offsetof(CUDA_MEMCPY2D, WidthInBytes));
SAME(offsetof(struct krn_cuda_copy_2d, rows), offsetof(CUDA_MEMCPY2D, Height));

SAME(KRN_CUDA_MEMORY_HOST, CU_MEMORYTYPE_HOST);
SAME(KRN_CUDA_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);
SAME(KRN_CUDA_LAUNCH_OVERLAP, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(KRN_CUDA_TENSOR_F16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME(KRN_CUDA_TENSOR_SWIZZLE_128, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(KRN_CUDA_TENSOR_L2_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME(KRN_CUDA_OP_WAIT_32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME(KRN_CUDA_OP_WRITE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
SAME(KRN_CUDA_OP_WRITE_64, CU_STREAM_MEM_OP_WRITE_VALUE_64);
SAME(KRN_CUDA_SOURCE_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME(KRN_CUDA_WAIT_GEQ, CU_STREAM_WAIT_VALUE_GEQ);
SAME(KRN_CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(KRN_CUDA_EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC);
SAME(KRN_CUDA_EVENT_NO_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(KRN_CUDA_SCHED_BLOCKING_SYNC, CU_CTX_SCHED_BLOCKING_SYNC);
SAME(KRN_CUDA_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(KRN_CUDA_HOST_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(KRN_CUDA_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(KRN_CUDA_HOST_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(KRN_CUDA_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY);
SAME(KRN_CUDA_IPC_LAZY_PEER, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(KRN_CUDA_ATTR_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(KRN_CUDA_ATTR_UNIFIED, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(KRN_CUDA_ATTR_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(KRN_CUDA_ATTR_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(KRN_CUDA_ATTR_SHARED_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(KRN_CUDA_FUNC_ATTR_CARVEOUT, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
SAME(KRN_CUDA_FUNC_ATTR_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(KRN_CUDA_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(KRN_CUDA_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(KRN_CUDA_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(KRN_CUDA_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
SAME(KRN_CUDA_NEWER_DRIVER, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER);
SAME(KRN_CUDA_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME(KRN_CUDA_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(KRN_CUDA_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(KRN_CUDA_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE);
SAME(KRN_CUDA_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(KRN_CUDA_NO_BINARY, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(KRN_CUDA_INVALID_PTX, CUDA_ERROR_INVALID_PTX);
SAME(KRN_CUDA_UNSUPPORTED_PTX, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME(KRN_CUDA_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM);
SAME(KRN_CUDA_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(KRN_CUDA_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(KRN_CUDA_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(KRN_CUDA_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(KRN_CUDA_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(KRN_CUDA_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED);
SAME(KRN_CUDA_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(KRN_CUDA_SYSTEM_NOT_READY, CUDA_ERROR_SYSTEM_NOT_READY);
SAME(KRN_CUDA_DRIVER_MISMATCH, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(KRN_CUDA_TIMEOUT, CUDA_ERROR_TIMEOUT);
SAME(KRN_CUDA_UNKNOWN, CUDA_ERROR_UNKNOWN);
