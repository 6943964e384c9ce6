/* SPDX-License-Identifier: MIT */
/* Helpers that the kernels share. Everything is deterministic: rounding is spelled out. */
#ifndef KRN_CU_COMMON_CUH
#define KRN_CU_COMMON_CUH

#include "kernels/krn_cu_args.h"
extern "C" {
#include "kernels/krn_quant.h"
}

#define DEV static __device__ __forceinline__

/* Instructions; tests/gpu/emu_device.h stands in for them where kernels run without a GPU. */
#ifdef KRN_CU_INSTRUCTIONS
#include KRN_CU_INSTRUCTIONS
#else
#include "kernels/krn_cu_ptx.cuh"
#endif

template <class T> DEV T *at(uint64_t address)
{
    return reinterpret_cast<T *>(address);
}

DEV uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

DEV uint16_t to_f16(float x)
{
    return (uint16_t)pack_f16(x, 0.0f);
}

/* Values in the KV memory are numbers: a row behind a sequence's end is multiplied by zero. What went wrong with
 * a token shows in its key. */
DEV float number(float x)
{
    return x == x ? x : 0.0f;
}

DEV float f16_lo(uint32_t w)
{
    return half_float((uint16_t)w);
}

DEV float f16_hi(uint32_t w)
{
    return half_float((uint16_t)(w >> 16));
}

DEV float bf16_lo(uint32_t w)
{
    return __uint_as_float(w << 16);
}

DEV float bf16_hi(uint32_t w)
{
    return __uint_as_float(w & 0xffff0000u);
}

/* SwiGLU as it is stored. */
DEV float hidden_value(float g, float u)
{
    return g / (1.0f + expf(-g)) * u * (1.0f / KRN_CU_HIDDEN_SCALE);
}

/* The same tree whatever the caller: every lane gets the sum. */
DEV float warp_sum(float x)
{
#pragma unroll
    for (int d = 16; d; d >>= 1)
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

DEV float warp_max(float x)
{
#pragma unroll
    for (int d = 16; d; d >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

#endif
