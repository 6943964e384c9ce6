/* SPDX-License-Identifier: MIT */
/*
 * Random numbers of mkmodel: splitmix64, one stream per (seed, kind, two
 * indices), so that any part of the file can be made on its own.
 */
#ifndef MKM_RNG_H
#define MKM_RNG_H

#include <stdint.h>

enum mkm_stream {
    MKM_STREAM_COMMON = 1,
    MKM_STREAM_EMBD,
    MKM_STREAM_ROUTER,
    MKM_STREAM_BLOCKS,
    MKM_STREAM_SIM,
    MKM_STREAM_TEXT
};

static inline uint64_t mkm_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t mkm_stream(uint64_t seed, enum mkm_stream kind, uint64_t a, uint64_t b)
{
    uint64_t state = seed;

    state = mkm_next(&state) + (uint64_t)kind;
    state = mkm_next(&state) + a;
    state = mkm_next(&state) + b;
    return mkm_next(&state);
}

/* 0 .. n - 1; the bias of at most n / 2^32 does not matter here. */
static inline uint32_t mkm_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)(((mkm_next(state) >> 32) * n) >> 32);
}

/* Mean 0, variance 1: the sum of four uniform numbers of 16 bits, bell-shaped
 * within +-3.46 and the same bits on every machine. */
static inline float mkm_normal(uint64_t *state)
{
    uint64_t z = mkm_next(state);
    int32_t sum = (int32_t)((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48));

    return (float)(2 * sum - 4 * 65535) * (0.5f * 1.7320508f / 65536.0f);
}

#endif
