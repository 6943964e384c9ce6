/* SPDX-License-Identifier: MIT */
#include "expertd/exd_park_priv.h"

#include <string.h>
#include <xxhash.h>

static uint32_t bucket(const struct exd_park *p, const uint64_t *key)
{
    return (uint32_t)XXH3_64bits_withSeed(key, 2 * sizeof *key, p->seed) & (p->buckets - 1);
}

uint32_t exd_index_first(const struct exd_park *p, const uint64_t *key)
{
    return p->buckets ? p->by_key[bucket(p, key)] : 0;
}

uint32_t exd_index_first_child(const struct exd_park *p, const uint64_t *parent)
{
    return p->buckets ? p->by_parent[bucket(p, parent)] : 0;
}

uint32_t exd_index_find(const struct exd_park *p, const uint64_t *key, uint32_t class)
{
    uint32_t i = exd_index_first(p, key);
    while (i && (exd_block(p, i)->class != class ||
                 memcmp(exd_block(p, i)->key, key, sizeof exd_block(p, i)->key) != 0))
        i = exd_block(p, i)->key_next;
    return i;
}

static void add_child(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    uint32_t *first = &p->by_parent[bucket(p, b->parent)];
    b->parent_prev = 0;
    b->parent_next = *first;
    if (*first)
        exd_block(p, *first)->parent_prev = i;
    *first = i;
}

static void remove_child(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    if (b->parent_prev)
        exd_block(p, b->parent_prev)->parent_next = b->parent_next;
    else
        p->by_parent[bucket(p, b->parent)] = b->parent_next;
    if (b->parent_next)
        exd_block(p, b->parent_next)->parent_prev = b->parent_prev;
}

void exd_index_add(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    uint32_t *first = &p->by_key[bucket(p, b->key)];
    b->key_prev = 0;
    b->key_next = *first;
    if (*first)
        exd_block(p, *first)->key_prev = i;
    *first = i;
    add_child(p, i);
}

void exd_index_remove(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    if (b->key_prev)
        exd_block(p, b->key_prev)->key_next = b->key_next;
    else
        p->by_key[bucket(p, b->key)] = b->key_next;
    if (b->key_next)
        exd_block(p, b->key_next)->key_prev = b->key_prev;
    remove_child(p, i);
}

void exd_index_age_add(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    b->newer = 0;
    b->older = p->newest;
    if (p->newest)
        exd_block(p, p->newest)->newer = i;
    else
        p->oldest = i;
    p->newest = i;
}

void exd_index_age_remove(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    if (b->older)
        exd_block(p, b->older)->newer = b->newer;
    else
        p->oldest = b->newer;
    if (b->newer)
        exd_block(p, b->newer)->older = b->older;
    else
        p->newest = b->older;
}

void exd_index_use(struct exd_park *p, uint32_t i)
{
    /* From the end to the beginning, so that the end becomes the oldest. Parents are what a worker says: the
     * number of steps is bounded by that of blocks, should they form a ring. */
    for (uint32_t steps = 0; i && steps < p->kept; steps++) {
        struct exd_block *b = exd_block(p, i);
        if (b->state != EXD_BLOCK_KEPT)
            return;
        exd_index_age_remove(p, i);
        exd_index_age_add(p, i);
        remove_child(p, i); /* lately used ones first */
        add_child(p, i);
        i = b->parent[0] || b->parent[1] ? exd_index_find(p, b->parent, b->class) : 0;
    }
}

const char *exd_park_check(const struct exd_park *p)
{
    uint32_t kept = 0, reserved = 0, aged = 0, unused = 0, dead = 0;
    uint64_t pins = 0;
    uint32_t blocks[EXD_PARK_CLASSES] = {0};
    for (uint32_t i = 1; i <= p->used; i++) {
        const struct exd_block *b = exd_block(p, i);
        pins += b->pins;
        kept += b->state == EXD_BLOCK_KEPT;
        reserved += b->state == EXD_BLOCK_RESERVED;
        dead += b->state == EXD_BLOCK_DEAD;
        if (b->state == EXD_BLOCK_DEAD && !b->pins)
            return "a dead block that nobody holds";
        if (b->state == EXD_BLOCK_FREE && b->pins)
            return "a free block is held";
        if (b->state != EXD_BLOCK_KEPT && b->state != EXD_BLOCK_RESERVED)
            continue;
        blocks[b->class]++;
        if (exd_index_find(p, b->key, b->class) != i)
            return "a block is not found under its key";
    }
    for (uint32_t i = p->oldest, before = 0; i; before = i, i = exd_block(p, i)->newer, aged++)
        if (aged > p->kept || exd_block(p, i)->older != before || exd_block(p, i)->state != EXD_BLOCK_KEPT)
            return "the list by age is broken";
    for (uint32_t i = p->free; i && unused <= p->used; i = exd_block(p, i)->older, unused++)
        if (exd_block(p, i)->state != EXD_BLOCK_FREE)
            return "a block in use is in the free list";
    if (kept != p->kept || reserved != p->reserved || aged != kept || pins != p->pins)
        return "a count is wrong";
    if (kept + reserved + dead + unused != p->used)
        return "slots are lost";
    for (uint32_t c = 0; c < EXD_PARK_CLASSES; c++)
        if (blocks[c] != p->class[c].blocks)
            return "a class's count is wrong";
    if (p->held_bytes > p->bytes || (uint64_t)p->used * p->slot_bytes > p->held_bytes)
        return "more memory than there may be";
    uint64_t held = 0, reservations = 0;
    for (uint32_t s = 0; s < EXD_PARK_SESSIONS; s++) {
        held += p->session[s].pins;
        for (uint32_t k = 0; k < p->session[s].reservations; k++)
            reservations += p->session[s].reservation[k] != 0;
    }
    if (held != p->pins || reservations != p->reserved)
        return "a session's holds are wrong";
    return NULL;
}
