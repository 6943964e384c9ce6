/* SPDX-License-Identifier: MIT */
/*
 * Counters in shared memory: how they are written and what is known of them.
 *
 * Structs, words and the table below come from counters.spec. Each word has
 * one writer at a time (the spec says who), which adds without a locked
 * instruction: relaxed loads and stores of its own cache lines. Readers copy
 * words; each is exact, together they may be torn.
 */
#ifndef SHM_COUNTER_H
#define SHM_COUNTER_H

#include "shm/shm_counters_gen.h"

#include <stdbool.h>

/* One writer at a time. */
static inline void shm_counter_add(_Atomic uint64_t *word, uint64_t n)
{
    atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + n, memory_order_relaxed);
}
static inline void shm_counter_set(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}
static inline uint64_t shm_counter_get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* A histogram's words: n bounds, one bucket more, the sum. */
static inline void shm_histogram_add(_Atomic uint64_t *words, const uint64_t *bounds, uint32_t n,
                                     uint64_t value)
{
    uint32_t i = 0;
    while (i < n && value > bounds[i])
        i++;
    shm_counter_add(&words[i], 1);
    shm_counter_add(&words[n + 1], value);
}
#define SHM_HISTOGRAM_ADD(words, bounds, value)                                                              \
    shm_histogram_add(words, bounds, (uint32_t)(sizeof(bounds) / sizeof(bounds)[0]), value)

enum shm_kind {
    SHM_KIND_COUNTER,
    SHM_KIND_GAUGE, /* signed */
    SHM_KIND_HISTOGRAM,
    SHM_KIND_INFO,
    SHM_KIND_SHARE,
    SHM_KIND_RATE,
    SHM_KIND_COUNT
};
const char *shm_kind_name(enum shm_kind kind);

struct shm_labels {
    const char *label;
    const char *const *value;
    uint32_t n;
};

/* Words [word, word + words) added up, times sign, above or below the line. */
struct shm_term {
    uint16_t word, words;
    int8_t sign;
    uint8_t below;
};

struct shm_counter {
    enum shm_block block;
    enum shm_kind kind;
    bool detail, look;
    const char *name, *unit, *metric, *help, *text; /* metric: "" for a share or rate */
    uint32_t word, words;                           /* in the block; none of a share or rate */
    const struct shm_labels *labels[2]; /* NULL: none; word of values i, j: i * labels[1]->n + j */
    const uint64_t *bounds;
    uint32_t n_bounds;
    const struct shm_term *terms;
    uint32_t n_terms;
};

struct shm_block_info {
    const char *name, *text;
    const char *labels; /* names, by commas; what the reader adds to each sample */
    uint32_t words, first, n;
};

extern const struct shm_counter shm_counters[]; /* by block */
extern const size_t shm_counters_n;
extern const struct shm_block_info shm_blocks[SHM_BLOCK_COUNT];

/* A block's words, each read once. */
void shm_counters_copy(enum shm_block block, const void *counters, uint64_t *ret_words);

/* A counter's words added up (a histogram's buckets, without the sum). */
uint64_t shm_counter_total(const struct shm_counter *c, const uint64_t *words);

/* A share or rate from words now and, unless NULL, before: counters then count from there, gauges are as
 * now. A rate by nanoseconds is a second's. Never negative, a share at most 1; 0 and false when what it is
 * divided by is 0. */
bool shm_counter_derive(const struct shm_counter *c, const uint64_t *now, const uint64_t *before,
                        double *ret_value);

/* By name in a block; NULL: none. */
const struct shm_counter *shm_counter_find(enum shm_block block, const char *name);

#endif
