/* SPDX-License-Identifier: MIT */
/* The product of weights in registers and up to 256 tokens (target sm_90a). */
#ifndef KRN_CU_WGMMA_CUH
#define KRN_CU_WGMMA_CUH

#include "kernels/krn_cu_sm90.cuh"

#ifndef KRN_CU_SM90_INSTRUCTIONS

/* d += a (64 x 16, a warp its 16 rows, registers as in mma) * b (16 x N in shared memory, rows of N, swizzled in
 * 128 bytes). The sums are there after a wait. */
template <int N> struct wgmma_step;
template <int N> DEV void wgmma(float (&d)[N / 2], const uint32_t *a, uint64_t b)
{
    wgmma_step<N>::run(d, a, b);
}

#define WGMMA_D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_F(i) WGMMA_F4(i), WGMMA_F4(i + 4), WGMMA_F4(i + 8), WGMMA_F4(i + 12)
#define WGMMA(n, numbers, sums, a0, a1, a2, a3, b0)                                                           \
    template <> struct wgmma_step<n> {                                                                       \
        static __device__ __forceinline__ void run(float (&d)[n / 2], const uint32_t *a, uint64_t b)         \
        {                                                                                                    \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" numbers "}, {%" #a0      \
                         ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0 ", 1, 1, 1, 0;"                            \
                         : sums                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
        }                                                                                                    \
    };
#define COMMA ,
WGMMA(32, WGMMA_D0, WGMMA_F(0), 16, 17, 18, 19, 20)
WGMMA(64, WGMMA_D0 ", " WGMMA_D1, WGMMA_F(0) COMMA WGMMA_F(16), 32, 33, 34, 35, 36)
WGMMA(96, WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2, WGMMA_F(0) COMMA WGMMA_F(16) COMMA WGMMA_F(32), 48, 49, 50, 51, 52)
WGMMA(128, WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2 ", " WGMMA_D3, WGMMA_F(0) COMMA WGMMA_F(16) COMMA WGMMA_F(32) COMMA WGMMA_F(48), 64, 65, 66, 67, 68)
WGMMA(160, WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2 ", " WGMMA_D3 ", " WGMMA_D4, WGMMA_F(0) COMMA WGMMA_F(16) COMMA WGMMA_F(32) COMMA WGMMA_F(48) COMMA WGMMA_F(64), 80, 81, 82, 83, 84)
WGMMA(192, WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2 ", " WGMMA_D3 ", " WGMMA_D4 ", " WGMMA_D5, WGMMA_F(0) COMMA WGMMA_F(16) COMMA WGMMA_F(32) COMMA WGMMA_F(48) COMMA WGMMA_F(64) COMMA WGMMA_F(80), 96, 97, 98, 99, 100)
WGMMA(224, WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2 ", " WGMMA_D3 ", " WGMMA_D4 ", " WGMMA_D5 ", " WGMMA_D6, WGMMA_F(0) COMMA WGMMA_F(16) COMMA WGMMA_F(32) COMMA WGMMA_F(48) COMMA WGMMA_F(64) COMMA WGMMA_F(80) COMMA WGMMA_F(96), 112, 113, 114, 115, 116)
WGMMA(256, WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2 ", " WGMMA_D3 ", " WGMMA_D4 ", " WGMMA_D5 ", " WGMMA_D6 ", " WGMMA_D7, WGMMA_F(0) COMMA WGMMA_F(16) COMMA WGMMA_F(32) COMMA WGMMA_F(48) COMMA WGMMA_F(64) COMMA WGMMA_F(80) COMMA WGMMA_F(96) COMMA WGMMA_F(112), 128, 129, 130, 131, 132)
#undef COMMA

#endif
#endif
