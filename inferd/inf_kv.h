/* SPDX-License-Identifier: MIT */
/*
 * Keys and values in blocks: a device's memory for them is one pool of blocks
 * of INF_KV_BLOCK tokens (all layers); a sequence has a table that says which
 * block holds its tokens 128 i .. 128 i + 127. Blocks are counted, so that
 * several sequences (and a cache of prefixes) share those of a common
 * beginning; who writes to a shared one gets a copy first.
 *
 * Contents belong to the device (inf_device.h: kv_open, kv_copy, kv_read,
 * kv_write); here is only who holds what. One thread, the device's.
 */
#ifndef INF_KV_H
#define INF_KV_H

#include "inferd/inf_device.h"

struct inf_kv_pool {
    struct inf_device *device; /* borrowed */
    uint32_t blocks, free;     /* in all; of them nobody's */
    uint32_t *references;      /* [blocks] 0: free */
    uint32_t *stack;           /* [free] the free ones, the next to be taken last */
};

/* Opens the device's memory for `tokens` (rounded up to whole blocks). -ENOMEM and others with one line. */
int inf_kv_pool_create(struct inf_device *device, uint32_t tokens, struct shm_error *err,
                       struct inf_kv_pool **ret_pool);
/* All tables are destroyed before. */
void inf_kv_pool_destroy(struct inf_kv_pool **pool);

/* A free block with one reference, its contents those of an earlier life. -ENOSPC. */
int inf_kv_pool_take(struct inf_kv_pool *pool, uint32_t *ret_block);
void inf_kv_pool_ref(struct inf_kv_pool *pool, uint32_t block);
/* The last reference makes it free. */
void inf_kv_pool_unref(struct inf_kv_pool *pool, uint32_t block);

/* A sequence's table. */
struct inf_kv {
    struct inf_kv_pool *pool;
    uint32_t ctx;    /* tokens it may have */
    uint32_t blocks; /* in the table now: room for blocks * INF_KV_BLOCK tokens */
    uint32_t *block; /* [ctx in blocks] */
};

/* Empty. -ENOMEM. */
int inf_kv_create(struct inf_kv_pool *pool, uint32_t ctx, struct inf_kv **ret_kv);
void inf_kv_destroy(struct inf_kv **kv);

/* Blocks that inf_kv_prepare(kv, from, to) would take from the pool. */
uint32_t inf_kv_need(const struct inf_kv *kv, uint32_t from, uint32_t to);

/* Makes positions from .. to - 1 writable (to <= ctx): their blocks exist and are this table's alone. What
 * lies before `from` in a shared block is copied with it; positions from `from` on hold nothing afterwards.
 * Also good for taking the blocks of tokens to come ahead of time. -ENOSPC: the pool has not enough free
 * blocks; -E2BIG; device errors. On failure nothing has changed. May enqueue copies on the device, does not
 * wait. */
int inf_kv_prepare(struct inf_kv *kv, uint32_t from, uint32_t to, struct shm_error *err);

/* Gives back the blocks behind the first `tokens` tokens. */
void inf_kv_truncate(struct inf_kv *kv, uint32_t tokens);

/* Block `block` becomes the table's i-th, with one more reference; i == kv->blocks, below ctx. */
void inf_kv_share(struct inf_kv *kv, uint32_t i, uint32_t block);

static inline uint32_t inf_kv_blocks(uint32_t tokens)
{
    return tokens / INF_KV_BLOCK + (tokens % INF_KV_BLOCK != 0);
}

#endif
