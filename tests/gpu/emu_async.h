/* SPDX-License-Identifier: MIT */
/*
 * What an emulated block's threads leave to run beside them (emu_async.cpp): copies to shared memory, boxes
 * of the copy engine, products of a warpgroup. And the seed: with EMU_SEED=n (not 0) all that hardware may do
 * in any order happens in an order drawn from n. A copy lands at once or when it is waited for, a box some
 * time later, a load into a product's registers at once or when the product takes them, a product reads
 * shared memory when it is issued or as late as its wait allows, its sums are NaN until then and its
 * registers are compared; warps take turns unevenly, blocks come in any order (emu_run.cpp). Without a seed
 * copies are as late as allowed and everything else happens at once.
 */
#ifndef EMU_ASYNC_H
#define EMU_ASYNC_H

#include "tests/gpu/emu_device.h"

/* Products read here what the async proxy sees of shared memory: what boxes brought, and what a thread copied
 * before a fence of its own. */
extern uint8_t emu_seen[];

/* One lane's part of a product: its two rows of a (16 columns), or where they are; b by its columns or rows.
 */
enum emu_kind {
    EMU_COLUMNS, /* b: rows of 128 bytes are its columns, n / 2 * 4 of them */
    EMU_ROWS     /* b transposed: 16 rows, in panels of 64 columns */
};
struct emu_product {
    enum emu_kind kind;
    float *sums;
    int n; /* sums */
    bool add, a_shared;
    uint64_t a, b;     /* views; a where a_shared */
    float rows[2][16]; /* else */
    const uint32_t
        *registers; /* they came from, four; must stay as they are until the product was waited for */
    uint32_t lane, warp;
};
struct emu_box {
    const uint64_t *map;
    uint32_t target, x, y, z, barrier;
};

extern "C" void emu_seed(uint64_t seed); /* from the next launch on, instead of EMU_SEED */
bool emu_seeded();
uint32_t emu_random(uint32_t below);
void emu_async_block(unsigned threads, uint64_t number);
/* A thread's turn ends: a box may land. */
void emu_async_turn();
/* A thread ends: nothing of it may be under way. */
void emu_async_end();

void emu_copy(uint32_t target, const void *source, bool valid);
void emu_commit();
void emu_wait(unsigned left);
void emu_see();
void emu_load_issue(uint32_t *registers, const emu_matrix &from);
void emu_loads_end();
void emu_box_issue(const emu_box &box);
void emu_product_issue(const emu_product &p);
void emu_product_commit();
void emu_product_wait(unsigned left);
void emu_yield(); /* emu_run.cpp */
void emu_meet(uint32_t id, uint32_t threads);
/* Its part of a barrier's arrival (bytes: of the copy engine, they came). */
void emu_barrier_count(uint32_t barrier, unsigned arrivals, int32_t bytes);

#endif
