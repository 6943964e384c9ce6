/* SPDX-License-Identifier: MIT */
/* The instructions that CUDA C++ has no name for, and what a kernel's declaration needs. */
#ifndef KRN_CU_PTX_CUH
#define KRN_CU_PTX_CUH

/* KERNEL(attributes, name, args): a kernel krn_dev_NAME that gets struct args by value as `a`. */
#define KERNEL(attributes, name, args)                                                                       \
    extern "C" __global__ void attributes krn_dev_##name(const __grid_constant__ args a)
#define SHARED_DYNAMIC(type, name) extern __shared__ __align__(1024) type name[]

/* Beyond the range: the largest number, never an infinity. */
DEV uint32_t pack_f16(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two halves at a time. */
DEV uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

DEV uint32_t half2_add(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEV uint32_t half2_mul(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* The low or the high half twice; an arithmetic instruction takes that in by itself. */
DEV uint32_t half2_low(uint32_t x)
{
    uint32_t r;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\nmov.b32 %0, {lo, lo};\n}" : "=r"(r) : "r"(x));
    return r;
}

DEV uint32_t half2_high(uint32_t x)
{
    uint32_t r;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\nmov.b32 %0, {hi, hi};\n}" : "=r"(r) : "r"(x));
    return r;
}

/* Between -limit and limit; not a number becomes one of them. */
DEV uint32_t half2_clamp(uint32_t x, uint32_t limit)
{
    uint32_t r;
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(limit));
    asm("max.f16x2 %0, %0, %1;" : "+r"(r) : "r"(limit | 0x80008000u));
    return r;
}

/* c + the products of four bytes: of w unsigned (us) or signed (ss), of x signed. */
DEV int dot_us(uint32_t w, uint32_t x, int c)
{
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(w), "r"(x), "r"(c));
    return r;
}

DEV int dot_ss(uint32_t w, uint32_t x, int c)
{
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(w), "r"(x), "r"(c));
    return r;
}

/* What another kernel may have written while this one was being started: not from the first-level cache. */
template <class T> DEV T load_fresh(const T *p)
{
    return __ldcg(p);
}

/* Of kernels launched while the one before still runs (krn_cu.c): waits until that one is through and its
 * stores are visible, then lets the one behind start. So what a kernel does before its turn may read what the
 * kernel before the last one wrote, and what never changes. Without such a launch it does nothing. */
DEV void grid_turn()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEV uint64_t device_clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#endif
