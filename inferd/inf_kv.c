/* SPDX-License-Identifier: MIT */
#include "inferd/inf_kv.h"

#include <errno.h>
#include <stdlib.h>

int inf_kv_pool_create(struct inf_device *d, uint32_t tokens, struct shm_error *err,
                       struct inf_kv_pool **ret_pool)
{
    struct inf_kv_pool *p = calloc(1, sizeof *p);
    if (!p)
        return -ENOMEM;
    p->blocks = p->free =
        tokens <= UINT32_MAX - INF_KV_BLOCK ? inf_kv_blocks(tokens ? tokens : 1) : UINT32_MAX / INF_KV_BLOCK;
    p->references = calloc(p->blocks, sizeof *p->references);
    p->stack = calloc(p->blocks, sizeof *p->stack);
    int rc = p->references && p->stack ? d->ops->kv_open(d, p->blocks * INF_KV_BLOCK, err) : -ENOMEM;
    if (rc) {
        inf_kv_pool_destroy(&p);
        return rc;
    }
    p->device = d;
    for (uint32_t i = 0; i < p->blocks; i++)
        p->stack[i] = p->blocks - 1 - i; /* the first ones first */
    *ret_pool = p;
    return 0;
}

void inf_kv_pool_destroy(struct inf_kv_pool **pool)
{
    struct inf_kv_pool *p = *pool;
    if (!p)
        return;
    if (p->device)
        p->device->ops->kv_close(p->device);
    free(p->references);
    free(p->stack);
    free(p);
    *pool = NULL;
}

int inf_kv_pool_take(struct inf_kv_pool *p, uint32_t *ret_block)
{
    if (!p->free)
        return -ENOSPC;
    uint32_t block = p->stack[--p->free];
    p->references[block] = 1;
    *ret_block = block;
    return 0;
}

void inf_kv_pool_ref(struct inf_kv_pool *p, uint32_t block)
{
    p->references[block]++;
}

void inf_kv_pool_unref(struct inf_kv_pool *p, uint32_t block)
{
    if (--p->references[block] == 0)
        p->stack[p->free++] = block;
}

int inf_kv_create(struct inf_kv_pool *pool, uint32_t ctx, struct inf_kv **ret_kv)
{
    struct inf_kv *kv = calloc(1, sizeof *kv);
    if (!kv)
        return -ENOMEM;
    kv->block = calloc(inf_kv_blocks(ctx), sizeof *kv->block);
    if (!kv->block) {
        free(kv);
        return -ENOMEM;
    }
    kv->pool = pool;
    kv->ctx = ctx;
    *ret_kv = kv;
    return 0;
}

void inf_kv_destroy(struct inf_kv **kv)
{
    struct inf_kv *k = *kv;
    if (!k)
        return;
    inf_kv_truncate(k, 0);
    free(k->block);
    free(k);
    *kv = NULL;
}

static bool shared(const struct inf_kv *kv, uint32_t i)
{
    return i < kv->blocks && kv->pool->references[kv->block[i]] > 1;
}

uint32_t inf_kv_need(const struct inf_kv *kv, uint32_t from, uint32_t to)
{
    if (from >= to)
        return 0;
    uint32_t end = inf_kv_blocks(to), n = end > kv->blocks ? end - kv->blocks : 0;
    for (uint32_t i = from / INF_KV_BLOCK; i < end && i < kv->blocks; i++)
        n += shared(kv, i);
    return n;
}

int inf_kv_prepare(struct inf_kv *kv, uint32_t from, uint32_t to, struct shm_error *err)
{
    struct inf_kv_pool *p = kv->pool;
    if (from >= to)
        return 0;
    if (to > kv->ctx)
        return shm_error_set(err, E2BIG, "%u tokens do not fit: the context holds %u: raise --ctx", to,
                             kv->ctx);
    const uint32_t first = from / INF_KV_BLOCK, end = inf_kv_blocks(to), need = inf_kv_need(kv, from, to);
    if (need > p->free)
        return shm_error_set(err, ENOSPC,
                             "keys and values of %u more tokens need %u blocks of %u, %u of %u are free: "
                             "raise --kv-tokens or have fewer conversations",
                             to - from, need, INF_KV_BLOCK, p->free, p->blocks);
    /* Only of the first block something is kept, and only its copy can fail: it comes first. */
    if (shared(kv, first) && from % INF_KV_BLOCK) {
        int rc = p->device->ops->kv_copy(p->device, kv->block[first], p->stack[p->free - 1], err);
        if (rc)
            return rc;
    }
    for (uint32_t i = first; i < end && i < kv->blocks; i++)
        if (shared(kv, i)) {
            const uint32_t old = kv->block[i];
            inf_kv_pool_take(p, &kv->block[i]);
            inf_kv_pool_unref(p, old);
        }
    while (kv->blocks < end)
        inf_kv_pool_take(p, &kv->block[kv->blocks++]);
    return 0;
}

void inf_kv_truncate(struct inf_kv *kv, uint32_t tokens)
{
    while (kv->blocks > inf_kv_blocks(tokens))
        inf_kv_pool_unref(kv->pool, kv->block[--kv->blocks]);
}

void inf_kv_share(struct inf_kv *kv, uint32_t i, uint32_t block)
{
    if (i != kv->blocks || i >= inf_kv_blocks(kv->ctx))
        return; /* a caller's mistake; holds nothing it did not hold */
    inf_kv_pool_ref(kv->pool, block);
    kv->block[kv->blocks++] = block;
}
