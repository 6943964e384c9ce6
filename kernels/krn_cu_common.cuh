/* SPDX-License-Identifier: MIT */
/* Instructions and helpers that the kernels share. Everything is deterministic: rounding is spelled out. */
#ifndef KRN_CU_COMMON_CUH
#define KRN_CU_COMMON_CUH

#include "kernels/krn_cu_args.h"
#include "kernels/krn_quant.h"

#define KERNEL extern "C" __global__
#define DEV    static __device__ __forceinline__

template <class T> DEV T *at(uint64_t address)
{
    return reinterpret_cast<T *>(address);
}

DEV uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

DEV uint32_t pack_bf16(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

DEV uint16_t to_bf16(float x)
{
    return (uint16_t)pack_bf16(x, 0.0f);
}

DEV float bf16_lo(uint32_t w)
{
    return __uint_as_float(w << 16);
}

DEV float bf16_hi(uint32_t w)
{
    return __uint_as_float(w & 0xffff0000u);
}

DEV float half_float(uint16_t h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEV float exp2_fast(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEV uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory; zeros where !valid. */
DEV void copy_async(uint32_t target, const void *source, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(valid ? 16 : 0));
}

DEV void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> DEV void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8 x 8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8. */
DEV void load_matrix(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

DEV void load_matrix_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* c += a (16 x 16) * b (16 x 8) */
DEV void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
