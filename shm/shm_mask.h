/* SPDX-License-Identifier: MIT */
/*
 * Bitmask over the experts of a layer: bit e of word e / 64. A routing set is
 * one; so is a layer's resident set.
 */
#ifndef SHM_MASK_H
#define SHM_MASK_H

#include <stdbool.h>
#include <stdint.h>

#define SHM_EXPERTS_MAX 1024 /* per layer; DESIGN names 512, room for one doubling */
#define SHM_LAYERS_MAX  512
#define SHM_MASK_WORDS  (SHM_EXPERTS_MAX / 64)

struct shm_mask {
    uint64_t word[SHM_MASK_WORDS];
};

static inline bool shm_mask_test(const struct shm_mask *m, uint32_t e)
{
    return m->word[e / 64] >> (e % 64) & 1;
}

static inline void shm_mask_set(struct shm_mask *m, uint32_t e)
{
    m->word[e / 64] |= UINT64_C(1) << (e % 64);
}

/* Members below n. */
static inline uint32_t shm_mask_count(const struct shm_mask *m, uint32_t n)
{
    uint32_t count = 0;
    for (uint32_t w = 0; w * 64 < n; w++) {
        uint64_t bits = m->word[w];
        if (n - w * 64 < 64)
            bits &= (UINT64_C(1) << (n - w * 64)) - 1;
        count += (uint32_t)__builtin_popcountll(bits);
    }
    return count;
}

#endif
