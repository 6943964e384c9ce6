/* SPDX-License-Identifier: MIT */
/*
 * Small kernels of a worker's pass that are no arithmetic: filling the slots
 * of finished groups (test mode), the device's clock, and keeping the device busy.
 */
#include <stdint.h>

/* Fills the slots of groups first .. end - 1 of a layer with 0xFF, as its slot table names them (in mapped
 * host memory; shm_entry_make). Grid (experts, any): launched behind the kernels that read the slots, before
 * the groups are released. slot_bytes: a multiple of 16. */
extern "C" __global__ void krn_poison(const volatile uint32_t *table, uint8_t *ring, uint64_t slot_bytes,
                                      uint32_t ring_slots, uint32_t first, uint32_t end)
{
    const uint32_t entry = table[blockIdx.x], group = entry >> 20 & 0x3ff, slot = entry & 0xfffff;
    if (entry >> 30 != 2 || group < first || group >= end || slot >= ring_slots)
        return;
    uint4 *at = (uint4 *)(ring + slot * slot_bytes);
    const uint4 ones = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
    const uint64_t n = slot_bytes / 16, step = (uint64_t)gridDim.y * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.y * blockDim.x + threadIdx.x; i < n; i += step)
        at[i] = ones;
}

/* The global timer, in ns, into mapped host memory. */
extern "C" __global__ void krn_clock(volatile uint64_t *out)
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *out = now;
    __threadfence_system();
}

/* One thread that occupies the compute engine until *end is not 0, at most limit_ns: what expertd's operations cost
 * beside a worker's kernels is measured against it. */
extern "C" __global__ void krn_busy(const volatile uint32_t *end, uint64_t limit_ns)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("nanosleep.u32 500;");
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*end == 0 && now - start < limit_ns);
}
