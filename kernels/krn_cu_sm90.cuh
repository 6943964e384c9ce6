/* SPDX-License-Identifier: MIT */
/*
 * Hopper's own instructions (target sm_90a): products of a warpgroup, barriers
 * that producers and consumers meet at, registers moved between warpgroups.
 * tests/gpu/emu_sm90.h stands in for them where kernels run without a GPU.
 */
#ifndef KRN_CU_SM90_CUH
#define KRN_CU_SM90_CUH

#include "kernels/krn_cu_common.cuh"

/*
 * A matrix in shared memory for a product: rows of 128 bytes, eight rows a
 * block of 1024 bytes (aligned so), 16-byte piece p of row r at p ^ r % 8.
 * panel: bytes to the next 64 columns; matters only to B transposed.
 */
DEV uint64_t matrix_view(uint32_t address, uint32_t panel)
{
    return (uint64_t)(address >> 4) | (uint64_t)(panel >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

#ifdef KRN_CU_SM90_INSTRUCTIONS
#include KRN_CU_SM90_INSTRUCTIONS
#else

#define WG_TYPE   "f16.f16"
#define D4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(d, i)  D4(d, i), D4(d, i + 4)
#define D32(d, i) D8(d, i), D8(d, i + 8), D8(d, i + 16), D8(d, i + 24)

/* d (64 x 128) = or += a (64 x 16) * b (16 x 128), b given by its columns: as the rows of 128 x 16. */
DEV void wg_product(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." WG_TYPE " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                 "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 0;}"
                 : D32(d, 0), D32(d, 32)
                 : "l"(a), "l"(b), "r"(add));
}

/* The same, a of registers: of a lane those that mma takes of the warp's 16 rows. */
DEV void wg_product(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." WG_TYPE " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                 "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
                 : D32(d, 0), D32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* d (64 x 128 or 64 x 64) += a (64 x 16, of registers) * b (16 rows of 128 or 64). */
DEV void wg_product(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." WG_TYPE " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                 "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : D32(d, 0), D32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

DEV void wg_product(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." WG_TYPE " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : D32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* Before the first product on registers that others wrote. */
DEV void wg_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEV void wg_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until all but the newest N commits are done. */
template <int N> DEV void wg_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* What the compiler may not move d's uses over. */
template <int N> DEV void wg_pin(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* What this thread wrote to shared memory becomes visible to the copy engine and to products. */
DEV void products_see()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEV void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEV void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives; the phase ends only once the copy engine has brought so many bytes, too. */
DEV void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* A box of the map from (x, y, z) on, as matrix_view wants it; zeros beyond the map. */
DEV void fetch_box(uint32_t target, const krn_cu_tensor_map &map, uint32_t x, uint32_t y, uint32_t z,
                   uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];" ::"r"(target),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Until the phase of this parity is over. */
DEV void barrier_wait(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    do
        asm volatile("{.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    while (!done);
}

/* What the warp stored is for whoever takes the flag next; until then no other may raise it. */
DEV void flag_raise(uint32_t *flag)
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

/* Waits until the flag is up, takes it down. */
DEV void flag_take(uint32_t *flag)
{
    uint32_t up;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(up) : "l"(flag) : "memory");
    while (!up);
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
}

/* Past the multiprocessor's own cache. */
DEV float load_fresh(const float *p)
{
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}

/* `threads` of the block meet at its barrier of this number (0 is __syncthreads's). */
DEV void meet(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int N> DEV void registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> DEV void registers_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
#endif
