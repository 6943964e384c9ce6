// SPDX-License-Identifier: MIT
// Runs kernels on a CPU (see emu_device.h): blocks one after another, a block's threads as fibers.
#include "tests/gpu/emu_async.h"

#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
#include <vector>

#undef threadIdx
#undef blockIdx

#define STACK_BYTES (1u << 18)

struct fiber {
    void *sp;
    bool done;
    unsigned x;
};

struct warp {
    emu_lanes lanes[2]; // in turn: the last exchange may still be read while the next one fills
    unsigned arrived, alive, still; // still: times that its threads are passed over
    uint64_t turn;
};

emu_dim emu_thread, emu_block, emu_grid_size, emu_block_size;
alignas(1024) uint8_t emu_shared[EMU_SHARED_BYTES];

static std::vector<fiber> fibers;
static std::vector<warp> warps;
static std::vector<char *> stacks;
static fiber *current;
static void *main_sp;
static unsigned alive, at_barrier;
static uint64_t barrier_turn;
static void (*entry)(const void *);
static const void *entry_args;

extern "C" void emu_switch(void **save, void *to);
asm(".globl emu_switch\n"
    "emu_switch:\n"
    "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
    "    mov %rsp, (%rdi)\n    mov %rsi, %rsp\n"
    "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n    ret\n"
    ".section .note.GNU-stack,\"\",@progbits\n.text\n");

static void yield()
{
    fiber *me = current;
    const size_t n = fibers.size();
    size_t at = me - fibers.data();
    emu_async_turn();
    if (emu_seeded() && me->x % 32 == 31) { // another warp next; this one may stand for long
        if (emu_random(64) == 0)
            warps[me->x / 32].still = emu_random(4000);
        at = emu_random((uint32_t)warps.size()) * 32 + n - 1;
    }
    for (size_t step = 1; step <= 2 * n; step++) {
        fiber &f = fibers[(at + step) % n];
        if (f.done)
            continue;
        warp &w = warps[f.x / 32];
        if (w.still && step < n) {
            w.still--;
            continue;
        }
        if (&f == me)
            return;
        current = &f;
        emu_thread.x = f.x;
        emu_switch(&me->sp, f.sp);
        return;
    }
    emu_switch(&me->sp, main_sp); // the last one
}

static void body()
{
    entry(entry_args);
    emu_async_end();
    current->done = true;
    warps[current->x / 32].alive--;
    if (--alive && at_barrier == alive) { // the others wait only for this one
        at_barrier = 0;
        barrier_turn++;
    }
    yield();
    abort();
}

void emu_barrier()
{
    const uint64_t turn = barrier_turn;
    if (++at_barrier == alive) {
        at_barrier = 0;
        barrier_turn++;
    }
    while (barrier_turn == turn)
        yield();
}

void emu_yield()
{
    yield();
}

void emu_meet(unsigned id, unsigned threads)
{
    static struct {
        unsigned arrived;
        uint64_t turn;
    } meetings[16];
    auto &m = meetings[id];
    const uint64_t turn = m.turn;
    if (++m.arrived == threads) {
        m.arrived = 0;
        m.turn++;
    }
    while (m.turn == turn)
        yield();
}

emu_lanes *emu_exchange(const void *mine, size_t bytes, void (*work)(emu_lanes &))
{
    warp &w = warps[current->x / 32];
    const uint64_t turn = w.turn;
    emu_lanes &lanes = w.lanes[turn & 1];
    if (bytes > EMU_LANE_BYTES)
        abort();
    memcpy(lanes[current->x % 32], mine, bytes);
    if (++w.arrived == w.alive) {
        w.arrived = 0;
        if (work)
            work(lanes);
        w.turn++;
    }
    while (w.turn == turn)
        yield();
    return &lanes;
}

void emu_barrier_count(uint32_t barrier, unsigned arrivals, int32_t bytes)
{
    emu_barrier_state *b = emu_barrier_at(barrier);
    b->missing -= arrivals & 0xfffu;
    b->bytes += bytes;
    if (b->missing == 0 && b->bytes == 0) {
        b->missing = b->arrivals;
        b->phase++;
    }
}

// Blocks in any order, but for kernels whose blocks wait for earlier ones.
static std::vector<uint64_t> order_of(void *function, uint64_t blocks)
{
    std::vector<uint64_t> order(blocks);
    Dl_info info;
    for (uint64_t b = 0; b < blocks; b++)
        order[b] = b;
    if (emu_seeded() && blocks < UINT32_MAX &&
        !(dladdr(function, &info) && info.dli_sname && strstr(info.dli_sname, "attention")))
        for (uint64_t b = 1; b < blocks; b++)
            std::swap(order[b], order[emu_random((uint32_t)b + 1)]);
    return order;
}

// Runs function(args) for every thread of the grid.
extern "C" void emu_launch(void *function, const unsigned (&grid)[3], unsigned threads, const void *args)
{
    while (stacks.size() < threads)
        stacks.push_back((char *)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    entry = (void (*)(const void *))function;
    entry_args = args;
    emu_grid_size = {grid[0], grid[1], grid[2]};
    emu_block_size = {threads, 1, 1};
    static uint64_t number;
    for (uint64_t b : order_of(function, (uint64_t)grid[0] * grid[1] * grid[2])) {
        emu_block = {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]), (unsigned)(b / grid[0] / grid[1])};
        emu_async_block(threads, number++);
        fibers.assign(threads, fiber());
        warps.assign((threads + 31) / 32, warp());
        alive = threads;
        at_barrier = 0;
        for (unsigned i = 0; i < threads; i++) {
            fibers[i].x = i;
            warps[i / 32].alive++;
            void **sp = (void **)(stacks[i] + STACK_BYTES) - 3; // as a call leaves it: 8 beside a multiple of 16
            *--sp = (void *)body;
            sp -= 6;
            fibers[i].sp = sp;
        }
        current = &fibers[0];
        emu_thread = {0, 0, 0};
        emu_switch(&main_sp, fibers[0].sp);
        for (const fiber &f : fibers)
            if (!f.done) {
                fprintf(stderr, "kernel stuck: a thread left a barrier or an exchange of its warp waiting\n");
                abort();
            }
    }
}
