/* SPDX-License-Identifier: MIT */
#include "shm/shm_counter.h"

#include <string.h>

const char *shm_kind_name(enum shm_kind kind)
{
    static const char *const names[SHM_KIND_COUNT] = {"counter", "gauge", "histogram",
                                                      "info",    "share", "rate"};
    return kind < SHM_KIND_COUNT ? names[kind] : "?";
}

void shm_counters_copy(enum shm_block block, const void *counters, uint64_t *ret_words)
{
    const _Atomic uint64_t *from = counters;
    for (uint32_t i = 0; i < shm_blocks[block].words; i++)
        ret_words[i] = atomic_load_explicit(&from[i], memory_order_relaxed);
}

uint64_t shm_counter_total(const struct shm_counter *c, const uint64_t *words)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->words - (c->kind == SHM_KIND_HISTOGRAM); i++)
        sum += words[c->word + i];
    return sum;
}

/* The stored one that holds a word of the block. */
static const struct shm_counter *holder(enum shm_block block, uint32_t word)
{
    const struct shm_block_info *b = &shm_blocks[block];
    for (uint32_t i = b->first; i < b->first + b->n; i++)
        if (word >= shm_counters[i].word && word - shm_counters[i].word < shm_counters[i].words)
            return &shm_counters[i];
    return NULL;
}

bool shm_counter_derive(const struct shm_counter *c, const uint64_t *now, const uint64_t *before,
                        double *ret_value)
{
    double side[2] = {0, 0}, scale = 1;
    bool share = c->kind == SHM_KIND_SHARE;
    for (uint32_t i = 0; i < c->n_terms; i++) {
        const struct shm_term *t = &c->terms[i];
        const struct shm_counter *of = holder(c->block, t->word);
        /* an age is a gauge that grows with the clock: it counts, too */
        bool counts = of->kind != SHM_KIND_GAUGE || (of->look && t->below);
        for (uint32_t w = t->word; w < (uint32_t)t->word + t->words; w++) {
            uint64_t value = now[w];
            if (before && counts)
                value = value > before[w] ? value - before[w] : 0;
            side[t->below] += t->sign * (double)value;
        }
        if (!share && t->below && of->kind != SHM_KIND_HISTOGRAM && strcmp(of->unit, "ns") == 0)
            scale = 1e9;
    }
    *ret_value = 0;
    if (!(side[1] > 0))
        return false;
    double value = side[0] > 0 ? side[0] / side[1] * scale : 0;
    *ret_value = share && value > 1 ? 1 : value;
    return true;
}

const struct shm_counter *shm_counter_find(enum shm_block block, const char *name)
{
    const struct shm_block_info *b = &shm_blocks[block];
    for (uint32_t i = b->first; i < b->first + b->n; i++)
        if (strcmp(shm_counters[i].name, name) == 0)
            return &shm_counters[i];
    return NULL;
}
