/* SPDX-License-Identifier: MIT */
/*
 * Inside of the prefix cache: the tree (inf_prefix.c) and what is parked of it
 * (inf_prefix_park.c).
 *
 * By age: whoever uses a node uses all above it, from the node upwards, so
 * that a child is always older than its parent.
 */
#ifndef INF_PREFIX_PRIV_H
#define INF_PREFIX_PRIV_H

#include "inferd/inf_park.h"
#include "inferd/inf_prefix.h"
#include "inferd/inf_store.h"
#include "shm/shm_bell.h"

struct inf_node {
    struct inf_node *parent, *child, *next, *prev; /* child: the first; next, prev: siblings */
    struct inf_node *older, *newer;
    struct inf_node *queue_next, *queue_prev; /* of those to be parked */
    bool parked, queued, batched;             /* batched: in the batch, or about to be */
    uint64_t due_ns;
    uint64_t key[2];
    uint32_t block; /* of the pool, one reference is ours */
    uint32_t tokens, exact;
    int32_t ids[INF_KV_BLOCK];
};

/* Blocks that are being parked: slots are reserved. */
struct inf_batch {
    uint32_t n, stored;
    struct inf_node *node[PRT_PARK_BATCH]; /* NULL: gone meanwhile, or not stored */
    uint32_t slot[PRT_PARK_BATCH];
    uint64_t checksum[2 * PRT_PARK_BATCH];
};

struct inf_prefix {
    struct inf_prefix_config config;
    struct inf_kv_pool *pool;
    struct inf_node root; /* no block; key zero */
    struct inf_node *oldest, *newest;
    struct inf_node *queue, *queue_last;
    uint32_t queued;       /* nodes in it */
    uint64_t queue_due_ns; /* none of them is due before */
    struct inf_batch batch;
    struct inf_prefix_stats stats;

    struct inf_park *park;   /* NULL: none now */
    uint64_t epoch, session; /* of the expertd that it was asked of, and what came of it */
    uint64_t retry_ns;       /* not asked again before; UINT64_MAX: never in this session */
    const char *state;
};

static inline uint64_t inf_prefix_now(const struct inf_prefix *p)
{
    return p->config.now_ns ? p->config.now_ns() : shm_now_ns();
}

/* How many of ids agree with the node's, at most n. */
uint32_t inf_node_common(const struct inf_node *node, const int32_t *ids, uint32_t n);
/* The child that holds exactly these tokens. NULL. */
struct inf_node *inf_node_find(struct inf_node *parent, const int32_t *ids, uint32_t tokens);
/* A child with one more reference to block; not parked. NULL: no memory. */
struct inf_node *inf_node_add(struct inf_prefix *p, struct inf_node *parent, const int32_t *ids,
                              uint32_t tokens, uint32_t exact, uint32_t block);
/* A leaf. */
void inf_node_remove(struct inf_prefix *p, struct inf_node *node);
void inf_node_use(struct inf_prefix *p, struct inf_node *node);

/* Parking. look: the store's expertd is the one that the park is of, else it is opened anew, closed or left
 * out; true where there is one. enqueue: to be parked in delay_ms. forget: the node goes. */
bool inf_prefix_park_look(struct inf_prefix *p);
void inf_prefix_park_enqueue(struct inf_prefix *p, struct inf_node *node, uint32_t delay_ms);
void inf_prefix_park_forget(struct inf_prefix *p, struct inf_node *node);
void inf_prefix_park_close(struct inf_prefix *p);

/* Loads children of node, and theirs, that hold ids: up to `blocks` whole ones, into new blocks of the pool;
 * the last one may agree in part only (more than `least` tokens of ids). kv takes part of each whole one.
 * Returns the last whole one loaded, or node; *ret_more: there is more of it. */
struct inf_node *inf_prefix_park_load(struct inf_prefix *p, struct inf_node *node, struct inf_kv *kv,
                                      const int32_t *ids, uint32_t n, uint32_t blocks, uint32_t least,
                                      bool *ret_more);

#endif
