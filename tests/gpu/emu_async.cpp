// SPDX-License-Identifier: MIT
#include "tests/gpu/emu_async.h"

#include <stddef.h>
#include <stdio.h>
#include <vector>

struct copy {
    void *target;
    const void *source;
    bool valid, landed;
};

struct product {
    emu_product what;
    uint32_t kept[4];
    bool read, holds; // dots are there; saved has what the sums were before this and all that is under way
    float dots[128], saved[128];
};

struct load {
    uint32_t *registers;
    emu_matrix from;
};

struct thread_state {
    std::vector<load> loads;
    std::vector<copy> open;
    std::vector<std::vector<copy>> groups;
    std::vector<void *> unseen; // brought by this thread, without a fence behind it
    std::vector<product> products;
    std::vector<size_t> committed; // products of each group
    size_t uncommitted;
};

alignas(1024) uint8_t emu_seen[EMU_SHARED_BYTES];
static std::vector<thread_state> threads;
static std::vector<emu_box> boxes;
static uint64_t seed, state;
static bool clean; // emu_seen is as emu_shared was when a block without a seed began

static thread_state &mine()
{
    return threads[emu_thread.x];
}

bool emu_seeded()
{
    static bool known;
    if (!known) {
        const char *s = getenv("EMU_SEED");
        seed = s ? strtoull(s, nullptr, 0) : 0;
        known = true;
    }
    return seed != 0;
}

extern "C" void emu_seed(uint64_t next)
{
    emu_seeded(); /* so that the environment does not take it back */
    seed = next;
}

uint32_t emu_random(uint32_t below) // splitmix64
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 8) % below;
}

void emu_async_block(unsigned n, uint64_t number)
{
    threads.assign(n, thread_state());
    boxes.clear();
    if (emu_seeded()) {
        state = seed * 0x100000001b3u + number;
        for (uint32_t i = 0; i < EMU_SHARED_BYTES; i += 4) { // not only NaN
            const uint32_t w = number & 1 ? 0xffffffffu : emu_random(0x7fffffffu) * 2 + 1;
            memcpy(emu_shared + i, &w, 4);
        }
    } else {
        memset(emu_shared, 0xff, EMU_SHARED_BYTES);
    }
    if (!clean)
        memcpy(emu_seen, emu_shared, EMU_SHARED_BYTES);
    clean = !seed;
}

static void fail(const char *what)
{
    fprintf(stderr, "thread %u of block %u: %s\n", emu_thread.x, emu_block.x, what);
    abort();
}

void emu_async_end()
{
    thread_state &t = mine();
    if (!t.open.empty())
        fail("copies that nobody committed");
    if (!t.loads.empty())
        fail("loads that no product took");
    if (!t.products.empty())
        fail("products that nobody waited for");
}

// ---- loads ----

void emu_load_issue(uint32_t *registers, const emu_matrix &from)
{
    if (seed && emu_random(2))
        mine().loads.push_back({registers, from});
    else
        emu_load_matrix(registers, from);
}

void emu_loads_end()
{
    thread_state &t = mine();
    while (!t.loads.empty() && emu_random(8)) // what this thread said since, others may act on
        emu_yield();
    for (const load &l : t.loads)
        emu_load_matrix(l.registers, l.from);
    t.loads.clear();
}

// ---- copies ----

static void land(copy &c)
{
    if (c.landed)
        return;
    if (c.valid)
        memcpy(c.target, c.source, 16);
    else
        memset(c.target, 0, 16);
    c.landed = true;
}

void emu_copy(uint32_t target, const void *source, bool valid)
{
    if (target % 16 || (uintptr_t)source % 16 || target + 16 > EMU_SHARED_BYTES)
        fail("a copy's address");
    copy c = {emu_shared + target, source, valid, false};
    if (seed && emu_random(2))
        land(c);
    mine().open.push_back(c);
}

void emu_commit()
{
    thread_state &t = mine();
    t.groups.push_back(std::move(t.open));
    t.open.clear();
}

void emu_wait(unsigned left)
{
    thread_state &t = mine();
    for (; t.groups.size() > left; t.groups.erase(t.groups.begin()))
        for (copy &c : t.groups[0]) {
            land(c);
            t.unseen.push_back(c.target);
        }
}

void emu_see()
{
    thread_state &t = mine();
    clean = false;
    for (void *at : t.unseen)
        memcpy(emu_seen + ((uint8_t *)at - emu_shared), at, 16);
    t.unseen.clear();
}

// ---- boxes: 64 columns of m[6] x m[7] rows (emu_map.h), swizzled, zeros beyond the map ----

static void land(const emu_box &b)
{
    clean = false;
    const uint64_t *m = b.map, rows = m[6] * m[7];
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < 64; c++) {
            const uint64_t at[] = {b.x + c, b.y + r % m[6], b.z + r / m[6]};
            const uint64_t to = b.target + r * 128 + (((c / 8) ^ (r % 8)) << 4) + c % 8 * 2;
            uint16_t h = 0;
            if (at[0] < m[1] && at[1] < m[2] && at[2] < m[3])
                memcpy(&h, (const uint8_t *)m[0] + at[0] * 2 + at[1] * m[4] + at[2] * m[5], 2);
            memcpy(emu_shared + to, &h, 2);
            memcpy(emu_seen + to, &h, 2);
        }
    emu_barrier_count(b.barrier, 0, -(int32_t)(rows * 128));
}

void emu_box_issue(const emu_box &b)
{
    if (b.target % 1024 || b.target + b.map[6] * b.map[7] * 128 > EMU_SHARED_BYTES)
        fail("a box's place");
    if (seed)
        boxes.push_back(b);
    else
        land(b);
}

void emu_async_turn()
{
    if (boxes.empty() || emu_random(256))
        return;
    const size_t i = emu_random((uint32_t)boxes.size());
    const emu_box b = boxes[i];
    boxes.erase(boxes.begin() + (ptrdiff_t)i);
    land(b);
}

// ---- products ----

static const float *half_values()
{
    static float *values;
    if (!values) {
        values = (float *)malloc(65536 * sizeof(float));
        for (uint32_t h = 0; h < 65536; h++)
            values[h] = f16_to((uint16_t)h);
    }
    return values;
}

/* Sixteen elements of a matrix view from (row, col) on, each `down` rows below the last or beside it. A row
 * has 128 bytes, its pieces swizzled by the address itself. */
static void viewed(uint64_t view, uint32_t row, uint32_t col, bool down, uint32_t beyond, float (&v)[16])
{
    static const float *values = half_values();
    const uint32_t start = (view & 0x3fff) << 4, stride = (view >> 32 & 0x3fff) << 4;
    if (view >> 62 != 1 || (view >> 49 & 7) != 0)
        fail("a matrix view");
    for (uint32_t k = 0; k < 16; k++) {
        const uint32_t r = down ? row + k : row, c = down ? col : col + k;
        uint32_t at = start + r / 8 * stride + r % 8 * 128 + c * 2 + beyond;
        at ^= (at >> 7 & 7) << 4;
        uint16_t h;
        if (at + 2 > EMU_SHARED_BYTES)
            fail("a matrix view's end");
        memcpy(&h, emu_seen + at, 2);
        v[k] = values[h];
    }
}

static void read(product &p)
{
    const emu_product &w = p.what;
    const uint32_t panel = (w.b >> 16 & 0x3fff) << 4, row0 = w.warp % 4 * 16 + w.lane / 4;
    float a[2][16], b[16];
    memcpy(a, w.rows, sizeof a);
    for (uint32_t h = 0; h < 2 && w.a_shared; h++)
        viewed(w.a, row0 + h * 8, 0, false, 0, a[h]);
    for (int i = 0; i < w.n; i += 4)
        for (int e = 0; e < 2; e++) {
            const uint32_t col = (uint32_t)i * 2 + w.lane % 4 * 2 + (uint32_t)e;
            if (w.kind == EMU_COLUMNS)
                viewed(w.b, col, 0, false, 0, b);
            else
                viewed(w.b, 0, col % 64, true, col / 64 * panel, b);
            for (int h = 0; h < 2; h++) {
                float sum = 0;
                for (uint32_t k = 0; k < 16; k++)
                    sum += a[h][k] * b[k];
                p.dots[i + 2 * h + e] = sum;
            }
        }
    p.read = true;
}

static void add(const product &p)
{
    for (int i = 0; i < p.what.n; i++)
        p.what.sums[i] = p.what.add ? p.what.sums[i] + p.dots[i] : p.dots[i];
}

/* Sums are NaN while a product on them is under way. */
static void hold(product &p)
{
    p.holds = true;
    for (int i = 0; i < p.what.n; i++) {
        p.saved[i] = p.what.sums[i];
        p.what.sums[i] = NAN;
    }
}

void emu_product_issue(const emu_product &w)
{
    thread_state &t = mine();
    product p = {};
    p.what = w;
    if (w.registers)
        memcpy(p.kept, w.registers, sizeof p.kept);
    if (!seed || emu_random(2))
        read(p);
    if (!seed) {
        add(p);
        return;
    }
    bool first = true;
    for (const product &o : t.products)
        first &= o.what.sums != w.sums;
    if (first)
        hold(p);
    t.products.push_back(p);
    t.uncommitted++;
}

void emu_product_commit()
{
    thread_state &t = mine();
    if (!seed)
        return;
    t.committed.push_back(t.uncommitted);
    t.uncommitted = 0;
}

void emu_product_wait(unsigned left)
{
    thread_state &t = mine();
    if (t.committed.size() <= left)
        return;
    while (seed && emu_random(8)) // what this thread said before it waits, others may act on
        emu_yield();
    size_t done = 0;
    for (; t.committed.size() > left; t.committed.erase(t.committed.begin()))
        done += t.committed[0];
    for (size_t i = 0; i < done; i++) {
        product &p = t.products[i];
        if (p.what.registers && memcmp(p.kept, p.what.registers, sizeof p.kept) != 0)
            fail("a product's registers were written before it was waited for");
        if (p.holds)
            memcpy(p.what.sums, p.saved, (size_t)p.what.n * sizeof(float));
        if (!p.read)
            read(p);
        add(p);
    }
    t.products.erase(t.products.begin(), t.products.begin() + (ptrdiff_t)done);
    for (size_t i = 0; i < t.products.size(); i++) {
        bool first = !t.products[i].holds;
        for (size_t j = 0; j < i; j++)
            first &= t.products[j].what.sums != t.products[i].what.sums;
        if (first)
            hold(t.products[i]);
    }
}
