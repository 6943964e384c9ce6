/* SPDX-License-Identifier: MIT */
/*
 * kernels/krn_cu_sm90.cuh's instructions on a CPU (see emu_device.h). Products
 * happen at once, matrices are found through their views as the hardware
 * does; barriers count, and whoever waits lets others run.
 */
#ifndef EMU_SM90_H
#define EMU_SM90_H

#include "tests/gpu/emu_device.h"

void emu_yield(); /* emu_run.cpp */

/* Element of a matrix view; row: of 128 swizzled bytes. */
static inline float emu_viewed(uint64_t view, uint32_t row, uint32_t col, uint32_t panel_rows)
{
    uint32_t start = (view & 0x3fff) << 4, stride = (view >> 32 & 0x3fff) << 4;
    uint32_t at = start + row / 8 * stride + row % 8 * 128 + col * 2 + panel_rows;
    at ^= (at >> 7 & 7) << 4; /* of the address itself */
    uint16_t h;
    if (view >> 62 != 1 || at + 2 > EMU_SHARED_BYTES)
        abort();
    memcpy(&h, emu_shared + at, 2);
    return krn_f16_to_f32(h);
}

static inline void wg_product(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    const uint32_t lane = emu_lane(), row0 = emu_thread.x / 32 % 4 * 16 + lane / 4;
    for (uint32_t i = 0; i < 64; i++) {
        const uint32_t row = row0 + (i & 2) * 4, col = i / 4 * 8 + lane % 4 * 2 + (i & 1);
        float sum = 0;
        for (uint32_t k = 0; k < 16; k++)
            sum += emu_viewed(a, row, k, 0) * emu_viewed(b, col, k, 0);
        d[i] = add ? d[i] + sum : sum;
    }
}

/* Both rows of 16 that a lane's registers and its neighbours' hold of a. */
static inline void emu_rows(const uint32_t (&a)[4], float (&A)[2][16])
{
    emu_lanes *all = emu_exchange(a, sizeof a, nullptr);
    for (uint32_t k = 0; k < 16; k++)
        for (uint32_t h = 0; h < 2; h++) {
            uint32_t w[4];
            memcpy(w, (*all)[emu_lane() / 4 * 4 + k % 8 / 2], sizeof w);
            A[h][k] = krn_f16_to_f32((uint16_t)(w[k / 8 * 2 + h] >> 16 * (k & 1)));
        }
}

static inline void wg_product(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add)
{
    float A[2][16];
    emu_rows(a, A);
    for (uint32_t i = 0; i < 64; i++) {
        const uint32_t col = i / 4 * 8 + emu_lane() % 4 * 2 + (i & 1);
        float sum = 0;
        for (uint32_t k = 0; k < 16; k++)
            sum += A[i >> 1 & 1][k] * emu_viewed(b, col, k, 0);
        d[i] = add ? d[i] + sum : sum;
    }
}

template <int N> static inline void wg_product(float (&d)[N], const uint32_t (&a)[4], uint64_t b)
{
    const uint32_t panel = (b >> 16 & 0x3fff) << 4;
    float A[2][16];
    emu_rows(a, A);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t col = i / 4 * 8 + emu_lane() % 4 * 2 + (i & 1);
        float sum = 0;
        for (uint32_t k = 0; k < 16; k++)
            sum += A[i >> 1 & 1][k] * emu_viewed(b, k, col % 64, col / 64 * panel);
        d[i] += sum;
    }
}

/* Weights times tokens, a warp at a time. */
template <int N> static inline void wgmma(float (&d)[N / 2], const uint32_t *a, uint64_t b)
{
    emu_lanes *all = emu_exchange(a, 16, nullptr);
    const uint32_t lane = emu_lane(), base = (uint32_t)(b & 0x3fff) << 4;
    float row[2][16];
    if (b >> 62 != 1 || (b >> 32 & 0x3fff) != 64 || (b >> 49 & 7) != 0 || base + N * 128 > EMU_SHARED_BYTES)
        abort();
    for (uint32_t t = 0; t < 4; t++) {
        uint32_t f[4];
        memcpy(f, (*all)[lane / 4 * 4 + t], 16);
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++)
                row[i & 1][2 * t + e + (i >> 1) * 8] = f16_to((uint16_t)(f[i] >> 16 * e));
    }
    for (uint32_t i = 0; i < N / 8; i++)
        for (uint32_t e = 0; e < 2; e++) {
            float sum[2] = {0, 0};
            for (uint32_t k = 0; k < 16; k++) {
                uint32_t at = base + (8 * i + 2 * (lane % 4) + e) * 128 + 2 * k;
                uint16_t h;
                memcpy(&h, emu_shared + (at ^ (at >> 7 & 7) << 4), 2);
                sum[0] += row[0][k] * f16_to(h);
                sum[1] += row[1][k] * f16_to(h);
            }
            d[4 * i + e] += sum[0];
            d[4 * i + 2 + e] += sum[1];
        }
}

static inline void wg_begin() {}
static inline void wg_commit() {}
template <int N> static inline void wg_wait() {}
template <int N> static inline void wg_pin(float (&)[N]) {}
static inline void products_see() {}

/* In shared memory: phases gone by, arrivals of a phase, arrivals and bytes missing. */
struct emu_barrier_state {
    uint16_t phase;
    uint8_t arrivals, missing;
    int32_t bytes;
};
static inline emu_barrier_state *emu_barrier_at(uint32_t barrier)
{
    if (barrier % 8 || barrier + 8 > EMU_SHARED_BYTES)
        abort();
    return (emu_barrier_state *)(emu_shared + barrier);
}
static inline void emu_barrier_count(uint32_t barrier, uint8_t arrivals, int32_t bytes)
{
    emu_barrier_state *b = emu_barrier_at(barrier);
    b->missing -= arrivals;
    b->bytes += bytes;
    if (b->missing == 0 && b->bytes == 0) {
        b->missing = b->arrivals;
        b->phase++;
    }
}
static inline void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    *emu_barrier_at(barrier) = {0, (uint8_t)arrivals, (uint8_t)arrivals, 0};
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
    const uint64_t *m = map.opaque, rows = m[6] * m[7];
    if (target % 1024 || target + rows * 128 > EMU_SHARED_BYTES)
        abort();
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < 64; c++) {
            const uint64_t at[] = {x + c, y + r % m[6], z + r / m[6]};
            uint16_t h = 0;
            if (at[0] < m[1] && at[1] < m[2] && at[2] < m[3])
                memcpy(&h, (const uint8_t *)m[0] + at[0] * 2 + at[1] * m[4] + at[2] * m[5], 2);
            memcpy(emu_shared + target + r * 128 + (((c / 8) ^ (r % 8)) << 4) + c % 8 * 2, &h, 2);
        }
    emu_barrier_count(barrier, 0, -(int32_t)(rows * 128));
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

template <int N> static inline void registers_take() {}
template <int N> static inline void registers_give() {}

#endif
