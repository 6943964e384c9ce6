/* SPDX-License-Identifier: MIT */
/*
 * kernels/krn_cu_sm90.cuh's instructions on a CPU (see emu_device.h). Matrices
 * are found through their views as the hardware does; barriers count, and
 * whoever waits lets others run. What is under way: emu_async.h.
 */
#ifndef EMU_SM90_H
#define EMU_SM90_H

#include "tests/gpu/emu_async.h"

/* Loads of these kernels are for a product's registers, and nothing but that product waits for them. */
static inline void load_matrix_late(uint32_t (&r)[4], uint32_t address)
{
    emu_load_issue(r, emu_matrix_of(address, false));
}
#define load_matrix load_matrix_late

/* Both rows of 16 that a lane's registers and its neighbours' hold of a. */
static inline void emu_rows(const uint32_t *a, float (&A)[2][16])
{
    emu_lanes *all = emu_exchange(a, 16, nullptr);
    for (uint32_t k = 0; k < 16; k++)
        for (uint32_t h = 0; h < 2; h++) {
            uint32_t w[4];
            memcpy(w, (*all)[emu_lane() / 4 * 4 + k % 8 / 2], sizeof w);
            A[h][k] = f16_to((uint16_t)(w[k / 8 * 2 + h] >> 16 * (k & 1)));
        }
}

static inline void emu_product_of(emu_kind kind, float *d, int n, const uint32_t *a, uint64_t a_view,
                                  uint64_t b, bool add)
{
    emu_product p = {kind, d, n, add, a == nullptr, a_view, b, {}, a, emu_lane(), emu_thread.x / 32};
    emu_loads_end();
    if (a)
        emu_rows(a, p.rows);
    emu_product_issue(p);
}

static inline void wg_product(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    emu_product_of(EMU_COLUMNS, d, 64, nullptr, a, b, add);
}

static inline void wg_product(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
    emu_product_of(EMU_COLUMNS, d, 64, a, 0, b, add);
}

template <int N> static inline void wg_product(float (&d)[N], const uint32_t (&a)[4], uint64_t b)
{
    emu_product_of(EMU_ROWS, d, N, a, 0, b, true);
}

/* Weights times tokens, a warp at a time. */
template <int N> static inline void wgmma(float (&d)[N / 2], const uint32_t *a, uint64_t b)
{
    if ((b >> 32 & 0x3fff) != 64 || ((b & 0x3fff) << 4) + N * 128 > EMU_SHARED_BYTES)
        abort();
    emu_product_of(EMU_COLUMNS, d, N / 2, a, 0, b, true);
}

static inline void wg_begin() {}
static inline void wg_commit()
{
    emu_product_commit();
}
template <int N> static inline void wg_wait()
{
    emu_product_wait(N);
    if (emu_seeded()) /* a warp waits as a whole */
        __syncwarp();
}
template <int N> static inline void wg_pin(float (&)[N]) {}
static inline void products_see()
{
    emu_see();
}

static inline void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    *emu_barrier_at(barrier) = {0, arrivals & 0xfffu, arrivals & 0xfffu, 0};
}
static inline void barrier_arrive(uint32_t barrier)
{
    emu_barrier_count(barrier, 1, 0);
}
static inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    emu_barrier_count(barrier, 1, (int32_t)bytes);
}
static inline void fetch_box(uint32_t target, const krn_cu_tensor_map &map, uint32_t x, uint32_t y,
                             uint32_t z, uint32_t barrier)
{
    emu_box_issue({map.opaque, target, x, y, z, barrier});
}
static inline bool barrier_passed(uint32_t barrier, uint32_t parity)
{
    return (emu_barrier_at(barrier)->phase & 1) != parity;
}
static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
    while (!barrier_passed(barrier, parity))
        emu_yield();
}

static inline void flag_raise(uint32_t *flag)
{
    __syncwarp();
    *flag = 1;
}
static inline void flag_take(uint32_t *flag)
{
    if (!*flag)
        abort(); /* blocks run one after another, in order */
    __syncwarp();
    *flag = 0;
}
static inline float load_fresh(const float *p)
{
    return *p;
}

static inline void meet(uint32_t id, uint32_t threads)
{
    emu_meet(id, threads);
}
template <int N> static inline void registers_take() {}
template <int N> static inline void registers_give() {}

#endif
