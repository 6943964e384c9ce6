/* SPDX-License-Identifier: MIT */
/*
 * Blocks of keys and values: random operations against a model that keeps
 * every sequence's contents apart, on a device whose blocks hold numbers.
 */
#include "inferd/inf_kv.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS    37u
#define SEQUENCES 12u
#define CTX       (9 * INF_KV_BLOCK - 5)

TestSuite(kv, .timeout = 120);

struct numbers {
    struct inf_device base;
    uint32_t (*block)[INF_KV_BLOCK];
    uint32_t opened, copies;
    int refuse; /* what the next operation of the device returns */
};

static int refused(struct numbers *n, struct shm_error *err)
{
    int rc = n->refuse;
    n->refuse = 0;
    return rc ? shm_error_set(err, -rc, "the device refuses") : 0;
}

static int numbers_open(struct inf_device *d, uint32_t tokens, struct shm_error *err)
{
    struct numbers *n = (struct numbers *)d;
    int rc = refused(n, err);
    if (rc)
        return rc;
    cr_assert_eq(tokens % INF_KV_BLOCK, 0);
    n->block = calloc(tokens / INF_KV_BLOCK, sizeof *n->block);
    n->opened++;
    return 0;
}

static void numbers_close(struct inf_device *d)
{
    struct numbers *n = (struct numbers *)d;
    free(n->block);
    n->block = NULL;
    n->opened--;
}

static int numbers_copy(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err)
{
    struct numbers *n = (struct numbers *)d;
    int rc = refused(n, err);
    if (rc)
        return rc;
    n->copies++;
    memcpy(n->block[to], n->block[from], sizeof *n->block);
    return 0;
}

static const struct inf_device_ops ops = {
    .kv_open = numbers_open, .kv_close = numbers_close, .kv_copy = numbers_copy};

static uint64_t state;

static uint32_t below(uint32_t n)
{
    state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)((state >> 33) % n);
}

/* A sequence as it should be. */
struct model {
    struct inf_kv *kv;
    uint32_t n, value[CTX];
};

static struct numbers device;
static struct inf_kv_pool *pool;
static uint32_t held[BLOCKS], held_all; /* references that nobody's table holds, as a cache of prefixes */

static void check(const struct model *m)
{
    uint32_t references[BLOCKS] = {0}, used = 0;
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        cr_assert_geq(m[s].kv->blocks, inf_kv_blocks(m[s].n));
        for (uint32_t i = 0; i < m[s].kv->blocks; i++) {
            cr_assert_lt(m[s].kv->block[i], BLOCKS);
            references[m[s].kv->block[i]]++;
        }
        for (uint32_t t = 0; t < m[s].n; t++)
            cr_assert_eq(device.block[m[s].kv->block[t / INF_KV_BLOCK]][t % INF_KV_BLOCK], m[s].value[t],
                         "sequence %u, token %u", s, t);
    }
    for (uint32_t i = 0; i < held_all; i++)
        references[held[i]]++;
    for (uint32_t b = 0; b < BLOCKS; b++) {
        cr_assert_eq(pool->references[b], references[b], "block %u", b);
        used += references[b] > 0;
    }
    cr_assert_eq(pool->free, BLOCKS - used);
}

/* Writes tokens behind those that are there; where that fails nothing may have changed. */
static void grow(struct model *m, uint32_t tokens)
{
    struct shm_error err = {0};
    const uint32_t to = m->n + tokens, need = inf_kv_need(m->kv, m->n, to), before = pool->free,
                   blocks = m->kv->blocks;
    uint32_t table[16];
    memcpy(table, m->kv->block, blocks * sizeof *table);
    int rc = inf_kv_prepare(m->kv, m->n, to, &err);
    if (rc) {
        cr_assert((rc == -ENOSPC && need > before && strstr(err.text, "--kv-tokens")) || rc == -EIO, "%d: %s",
                  rc, err.text);
        cr_assert(pool->free == before && m->kv->blocks == blocks &&
                  !memcmp(table, m->kv->block, blocks * sizeof *table));
        return;
    }
    cr_assert_eq(before - pool->free, need);
    for (uint32_t t = m->n; t < to; t++) {
        uint32_t block = m->kv->block[t / INF_KV_BLOCK];
        cr_assert_eq(pool->references[block], 1);
        device.block[block][t % INF_KV_BLOCK] = m->value[t] = below(UINT32_MAX);
    }
    m->n = to;
}

/* Takes the beginning of another sequence. */
static void follow(struct model *m, const struct model *from)
{
    if (!from->n)
        return;
    inf_kv_truncate(m->kv, 0);
    m->n = below(from->n) + 1;
    for (uint32_t i = 0; i < inf_kv_blocks(m->n); i++)
        inf_kv_share(m->kv, i, from->kv->block[i]);
    memcpy(m->value, from->value, m->n * sizeof *m->value);
}

static void start(void)
{
    struct shm_error err = {0};
    device = (struct numbers){.base.ops = &ops, .base.kv_block_bytes = sizeof *device.block};
    held_all = 0;
    cr_assert_eq(inf_kv_pool_create(&device.base, BLOCKS * INF_KV_BLOCK - 7, &err, &pool), 0, "%s", err.text);
    cr_assert(pool->blocks == BLOCKS && pool->free == BLOCKS);
}

Test(kv, random_operations, .init = start)
{
    static struct model m[SEQUENCES];
    uint32_t full = 0;
    state = 4711;
    for (uint32_t s = 0; s < SEQUENCES; s++)
        cr_assert_eq(inf_kv_create(pool, CTX, &m[s].kv), 0);
    for (uint32_t round = 0; round < 20000; round++) {
        struct model *a = &m[below(SEQUENCES)], *b = &m[below(SEQUENCES)];
        switch (below(8)) {
        case 0:
        case 1:
        case 2: {
            uint32_t tokens = below(below(8) ? 40 : 400), room = CTX - a->n;
            device.refuse = below(20) ? 0 : -EIO;
            full += inf_kv_need(a->kv, a->n, a->n + (tokens < room ? tokens : room)) > pool->free;
            grow(a, tokens < room ? tokens : room);
            device.refuse = 0;
            break;
        }
        case 3: { /* blocks ahead of time */
            struct shm_error err = {0};
            inf_kv_prepare(a->kv, a->n, a->n + below(CTX - a->n + 1), &err);
            break;
        }
        case 4:
            a->n -= below(a->n + 1);
            inf_kv_truncate(a->kv, a->n);
            break;
        case 5:
            if (a != b)
                follow(a, b);
            break;
        case 6:
            if (a->n && held_all < BLOCKS) {
                held[held_all] = a->kv->block[below(a->kv->blocks)];
                inf_kv_pool_ref(pool, held[held_all++]);
            } else if (held_all < BLOCKS && inf_kv_pool_take(pool, &held[held_all]) == 0) {
                held_all++;
            }
            break;
        default:
            if (held_all) {
                uint32_t i = below(held_all);
                inf_kv_pool_unref(pool, held[i]);
                held[i] = held[--held_all];
            }
        }
        check(m);
    }
    cr_expect(full > 50 && device.copies > 100, "too tame: %u times full, %u copies", full, device.copies);
    while (held_all)
        inf_kv_pool_unref(pool, held[--held_all]);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        inf_kv_destroy(&m[s].kv);
    cr_expect_eq(pool->free, BLOCKS);
    inf_kv_pool_destroy(&pool);
    cr_expect(!pool && !device.opened);
}

/* Only a block of which something stays is copied. */
Test(kv, copies_what_is_kept, .init = start)
{
    struct shm_error err = {0};
    struct inf_kv *a, *b;
    cr_assert(inf_kv_create(pool, CTX, &a) == 0 && inf_kv_create(pool, CTX, &b) == 0);
    cr_assert_eq(inf_kv_prepare(a, 0, 3 * INF_KV_BLOCK, &err), 0);
    for (uint32_t i = 0; i < 3; i++)
        inf_kv_share(b, i, a->block[i]);
    cr_expect_eq(inf_kv_prepare(b, 2 * INF_KV_BLOCK, 2 * INF_KV_BLOCK + 1, &err), 0);
    cr_expect(device.copies == 0 && b->block[2] != a->block[2] && b->block[1] == a->block[1]);
    cr_expect_eq(inf_kv_prepare(b, INF_KV_BLOCK + 1, 3 * INF_KV_BLOCK, &err), 0);
    cr_expect(device.copies == 1 && b->block[1] != a->block[1] && b->block[0] == a->block[0]);
    inf_kv_share(b, 5, a->block[0]);
    cr_expect(b->blocks == 3 && pool->references[a->block[0]] == 2, "not the table's next one");
    cr_expect_eq(inf_kv_prepare(b, CTX, CTX + 1, &err), -E2BIG);
    inf_kv_destroy(&a);
    inf_kv_destroy(&b);
    inf_kv_destroy(&b);
    inf_kv_pool_destroy(&pool);
}

Test(kv, a_device_without_memory)
{
    struct shm_error err = {0};
    device = (struct numbers){.base.ops = &ops, .refuse = -ENOMEM};
    pool = NULL;
    cr_expect_eq(inf_kv_pool_create(&device.base, 1, &err, &pool), -ENOMEM);
    cr_expect(!pool && !device.opened && strstr(err.text, "refuses"));
    cr_assert_eq(inf_kv_pool_create(&device.base, 1, &err, &pool), 0);
    cr_expect_eq(pool->blocks, 1);
    inf_kv_pool_destroy(&pool);
    inf_kv_pool_destroy(&pool);
}
