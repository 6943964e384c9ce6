/* SPDX-License-Identifier: MIT */
/*
 * Hand-shakes with expertd that a kernel makes: publication of a routing set
 * into host shared memory, and (for tests) kernels that keep the compute
 * engine busy. Words of struct shm_route and struct shm_worker are passed as
 * device addresses of the registered control segment.
 */
#include <stdint.h>

/* Publishes one layer's routing set: tokens per expert and the mask first, then, once all of that is visible
 * to the host, the sequence word. One block; `counts` is [experts] in device memory. mask, tokens and seq are
 * the segment's. Everything is stored by the block's threads, so the barrier orders it before the fence. */
extern "C" __global__ void krn_publish(const uint32_t *counts, uint32_t experts, uint64_t *mask, uint32_t *tokens,
                                       uint64_t *seq, uint64_t value)
{
    for (uint32_t word = threadIdx.x; word * 64 < experts; word += blockDim.x) {
        uint64_t bits = 0;
        for (uint32_t bit = 0; bit < 64 && word * 64 + bit < experts; bit++)
            bits |= (uint64_t)(counts[word * 64 + bit] != 0) << bit;
        mask[word] = bits;
    }
    for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x)
        tokens[e] = counts[e];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *(volatile uint64_t *)seq = value;
    }
}

/* Says that groups below `value` were read for the last time. Launched behind the kernels that read them. */
extern "C" __global__ void krn_release(uint64_t *released_groups, uint64_t value)
{
    __threadfence_system();
    *(volatile uint64_t *)released_groups = value;
}

/* Keeps every multiprocessor that it is launched on busy for so many nanoseconds. */
extern "C" __global__ void krn_spin(uint64_t ns, float *sink)
{
    uint64_t begin, now;
    float x = (float)threadIdx.x;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        for (int i = 0; i < 64; i++)
            x = x * 1.0001f + 0.5f;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
    if (x < 0)
        *sink = x;
}

/* Counts 32-bit words of a slot that are not `stamp`: adds to *wrong. For tests of the hand-shake: launched
 * behind a wait for the slot's group. */
extern "C" __global__ void krn_check_stamp(const uint32_t *slot, uint64_t words, uint32_t stamp,
                                           unsigned long long *wrong)
{
    unsigned long long mine = 0;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (uint64_t)gridDim.x * blockDim.x)
        mine += slot[i] != stamp;
    if (mine)
        atomicAdd(wrong, mine);
}
