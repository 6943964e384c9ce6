/* SPDX-License-Identifier: MIT */
/*
 * CUDA kernels on a CPU, for tests: stands in for kernels/krn_cu_ptx.cuh and
 * for nvcc's own names, so that g++ compiles the .cu files as they are.
 * emu_run.cpp runs a block's threads as fibers, one at a time; shared memory
 * is one array that begins poisoned; a warp's exchange waits for its lanes;
 * misaligned accesses of the copy and matrix instructions abort. What runs
 * beside the threads, and in what order: emu_async.h. Slow, and blind to races
 * of ordinary loads and stores: compute-sanitizer on a GPU finds those.
 */
#ifndef EMU_DEVICE_H
#define EMU_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/f16.h"

struct float2 {
    float x, y;
};
struct uint2 {
    uint32_t x, y;
};
struct int2 {
    int x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}
static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

/* emu_run.cpp */
struct emu_dim {
    unsigned x, y, z;
};
#define EMU_LANE_BYTES 64
typedef uint8_t emu_lanes[32][EMU_LANE_BYTES];
extern emu_dim emu_thread, emu_block, emu_grid_size, emu_block_size;
extern uint8_t emu_shared[];
#define EMU_SHARED_BYTES 232448u
void emu_barrier();
/* Gives this lane's bytes to its warp, waits for the others, lets the last one work on all of them. */
emu_lanes *emu_exchange(const void *mine, size_t bytes, void (*work)(emu_lanes &));
void emu_copy(uint32_t target, const void *source, bool valid); /* emu_async.cpp */
void emu_commit();
void emu_wait(unsigned left);

/* A barrier, in shared memory: phases gone by, arrivals of a phase, arrivals and bytes missing. */
struct emu_barrier_state {
    uint32_t phase : 8, arrivals : 12, missing : 12;
    int32_t bytes;
};
static inline emu_barrier_state *emu_barrier_at(uint32_t barrier)
{
    if (barrier % 8 || barrier + 8 > EMU_SHARED_BYTES)
        abort();
    return (emu_barrier_state *)(emu_shared + barrier);
}

#define threadIdx emu_thread
#define blockIdx  emu_block
#define gridDim   emu_grid_size
#define blockDim  emu_block_size
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__   static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __builtin_assume(condition)    ((void)0)
#define __syncthreads                  emu_barrier
#define __threadfence_system()         ((void)0)
#define __threadfence()                ((void)0)
#define KERNEL(attributes, name, args) extern "C" void krn_dev_##name(const args &a)
#define SHARED_DYNAMIC(type, name)     type *const name = (type *)emu_shared

template <class T> static inline T max(T a, T b)
{
    return a < b ? b : a;
}
template <class T> static inline T min(T a, T b)
{
    return b < a ? b : a;
}

static inline uint32_t emu_lane()
{
    return emu_thread.x % 32;
}

static inline void __syncwarp()
{
    emu_exchange("", 1, nullptr);
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fsub_rn(float a, float b)
{
    return a - b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline int __float2int_rn(float x)
{
    return (int)rintf(x);
}
static inline float __uint_as_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline float __int_as_float(uint32_t u)
{
    return __uint_as_float(u);
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector)
{
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t n)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (n & 31));
}
template <class T> static inline T emu_from(T x, uint32_t lane)
{
    T r;
    memcpy(&r, (*emu_exchange(&x, sizeof x, nullptr))[lane], sizeof r);
    return r;
}
template <class T> static inline T __shfl_xor_sync(uint32_t, T x, uint32_t d)
{
    return emu_from(x, emu_lane() ^ d);
}
template <class T> static inline T __shfl_sync(uint32_t, T x, uint32_t from)
{
    return emu_from(x, from);
}
template <class T> static inline T __shfl_up_sync(uint32_t, T x, uint32_t d)
{
    return emu_from(x, emu_lane() >= d ? emu_lane() - d : emu_lane());
}
static inline uint32_t __ballot_sync(uint32_t, bool p)
{
    uint8_t mine = p;
    emu_lanes *all = emu_exchange(&mine, 1, nullptr);
    uint32_t r = 0;
    for (int i = 0; i < 32; i++)
        r |= (uint32_t)(*all)[i][0] << i;
    return r;
}
template <class T> static inline T atomicAdd(T *p, T x)
{
    T old = *p;
    *p += x;
    return old;
}

/* What krn_cu_ptx.cuh has. */
static inline uint32_t pack_f16(float lo, float hi)
{
    return f16_of(lo) | (uint32_t)f16_of(hi) << 16;
}
static inline float half_float(uint16_t h)
{
    return krn_f16_to_f32(h);
}
static inline float exp2_fast(float x)
{
    return exp2f(x);
}
static inline int emu_dot4(uint32_t w, uint32_t x, int c, bool is_signed)
{
    for (int i = 0; i < 32; i += 8)
        c += (is_signed ? (int8_t)(w >> i) : (int)(w >> i & 0xff)) * (int8_t)(x >> i);
    return c;
}
static inline int dot_us(uint32_t w, uint32_t x, int c)
{
    return emu_dot4(w, x, c, false);
}
static inline int dot_ss(uint32_t w, uint32_t x, int c)
{
    return emu_dot4(w, x, c, true);
}
template <class T> static inline T load_fresh(const T *p)
{
    return *p;
}
static inline void grid_turn() {}
static inline uint64_t device_clock_ns()
{
    return 1;
}
static inline uint32_t shared_address(const void *p)
{
    uintptr_t at = (uintptr_t)p - (uintptr_t)emu_shared;
    if (at > EMU_SHARED_BYTES)
        abort();
    return (uint32_t)at;
}
static inline void copy_async(uint32_t target, const void *source, bool valid)
{
    emu_copy(target, source, valid);
}
static inline void copy_commit()
{
    emu_commit();
}
template <int N> static inline void copy_wait()
{
    emu_wait(N);
}

/* Where the eight halves of a lane's registers are. */
struct emu_matrix {
    uint32_t at[8];
};
static inline emu_matrix emu_matrix_of(uint32_t address, bool transposed)
{
    emu_lanes *all = emu_exchange(&address, 4, nullptr);
    const uint32_t lane = emu_lane();
    emu_matrix x;
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t row = transposed ? 2 * (lane % 4) + i % 2 : lane / 4, from;
        uint32_t col = transposed ? lane / 4 : 2 * (lane % 4) + i % 2;
        memcpy(&from, (*all)[i / 2 * 8 + row], 4);
        if (from % 16 || from + 16 > EMU_SHARED_BYTES)
            abort();
        x.at[i] = from + 2 * col;
    }
    return x;
}
static inline void emu_load_matrix(uint32_t *r, const emu_matrix &x)
{
    for (uint32_t m = 0; m < 4; m++) {
        r[m] = 0;
        for (uint32_t e = 0; e < 2; e++) {
            uint16_t h;
            memcpy(&h, emu_shared + x.at[2 * m + e], 2);
            r[m] |= (uint32_t)h << 16 * e;
        }
    }
}
static inline void load_matrix(uint32_t (&r)[4], uint32_t address)
{
    emu_load_matrix(r, emu_matrix_of(address, false));
}
static inline void load_matrix_trans(uint32_t (&r)[4], uint32_t address)
{
    emu_load_matrix(r, emu_matrix_of(address, true));
}

/* A lane's part of one m16n8k16 step. */
struct emu_fragment {
    float c[4];
    uint32_t a[4], b[2];
};
static inline void emu_multiply(emu_lanes &lanes)
{
    float A[16][16], B[16][8], C[16][8];
    for (int i = 0; i < 32; i++) {
        emu_fragment f;
        memcpy(&f, lanes[i], sizeof f);
        const int g = i / 4, t = i % 4 * 2;
        for (int e = 0; e < 2; e++) {
            for (int r = 0; r < 4; r++)
                A[g + (r & 1) * 8][t + e + (r >> 1) * 8] = krn_f16_to_f32((uint16_t)(f.a[r] >> 16 * e));
            for (int r = 0; r < 2; r++) {
                B[t + e + r * 8][g] = krn_f16_to_f32((uint16_t)(f.b[r] >> 16 * e));
                C[g + r * 8][t + e] = f.c[2 * r + e];
            }
        }
    }
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            float sum = 0;
            for (int k = 0; k < 16; k++)
                sum += A[m][k] * B[k][n];
            C[m][n] += sum;
        }
    for (int i = 0; i < 32; i++) {
        float c[4];
        for (int r = 0; r < 4; r++)
            c[r] = C[i / 4 + (r >> 1) * 8][i % 4 * 2 + (r & 1)];
        memcpy(lanes[i], c, sizeof c);
    }
}
static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emu_fragment f = {{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    memcpy(c, (*emu_exchange(&f, sizeof f, emu_multiply))[emu_lane()], sizeof c);
}

static inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 16)
        r |= (uint32_t)f16_of(f16_to((uint16_t)(a >> i)) * f16_to((uint16_t)(b >> i)) +
                              f16_to((uint16_t)(c >> i)))
             << i;
    return r;
}
static inline uint32_t half2_add(uint32_t a, uint32_t b)
{
    return half2_fma(a, 0x3c003c00u, b);
}
static inline uint32_t half2_mul(uint32_t a, uint32_t b)
{
    return half2_fma(a, b, 0);
}
static inline uint32_t half2_low(uint32_t x)
{
    return (x & 0xffffu) | x << 16;
}
static inline uint32_t half2_high(uint32_t x)
{
    return (x & 0xffff0000u) | x >> 16;
}
static inline uint32_t half2_clamp(uint32_t x, uint32_t limit)
{
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 16) {
        float f = f16_to((uint16_t)(x >> i)), most = f16_to((uint16_t)(limit >> i));
        r |= (uint32_t)f16_of(f > -most ? f < most ? f : most : -most) << i;
    }
    return r;
}

#endif
