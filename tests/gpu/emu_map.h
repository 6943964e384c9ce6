/* SPDX-License-Identifier: MIT */
/* cuTensorMapEncodeTiled of both stand-ins for the driver: takes what the kernels use, and writes what
 * emu_sm90.h reads. */
#ifndef EMU_MAP_H
#define EMU_MAP_H

#include <string.h>

#include "kernels/krn_cuda_abi.h"

static inline int emu_tensor_map(void *ret_map, int type, uint32_t rank, const void *data,
                                 const uint64_t *extents, const uint64_t *strides, const uint32_t *box,
                                 const uint32_t *steps, int interleave, int swizzle, int fill)
{
    if (type != KRN_CUDA_TENSOR_F16 || rank != 3 || (uintptr_t)data % 16 || strides[0] % 16 ||
        strides[1] % 16 || box[0] != 64 || box[1] > 256 || box[2] > 256 ||
        steps[0] * steps[1] * steps[2] != 1 || interleave || swizzle != KRN_CUDA_TENSOR_SWIZZLE_128 || fill)
        return KRN_CUDA_INVALID_VALUE;
    uint64_t *m = ret_map;
    m[0] = (uintptr_t)data;
    memcpy(m + 1, extents, 24);
    memcpy(m + 4, strides, 16);
    m[6] = box[1];
    m[7] = box[2];
    return KRN_CUDA_SUCCESS;
}

#endif
