/* SPDX-License-Identifier: MIT */
/*
 * Prefix cache: keys and values of tokens read before, kept as blocks of the pool, so that a prompt reads
 * only what is new to it: a follow-up turn, or another conversation with the same system prompt. A tree of
 * blocks: a child continues the tokens of its parent; the last, partly filled block of a sequence is kept
 * too, and a block whose beginning alone agrees is used as far as it does (the reader gets a copy before it
 * writes: inf_kv_prepare). Least recently used leaves go first.
 *
 * With a store, blocks are also parked in memory of expertd (inf_park.h), INF_PREFIX_PARK_MS after they were
 * put, and come back from there: after this worker's restart, in another worker of the instance, or because
 * the pool was too small. Nothing parked is needed for anything: without expertd, or without room there,
 * tokens are read again.
 *
 * One thread, the device's. Owns one reference to each block it keeps, no sequence.
 */
#ifndef INF_PREFIX_H
#define INF_PREFIX_H

#include "inferd/inf_kv.h"

#define INF_PREFIX_PARK_MS 250u /* a block is parked so long after it was put, once there is time for it */
#define INF_PREFIX_LOAD    16u  /* most blocks that one take loads from the park */

struct inf_prefix;
struct inf_store;
struct inf_park_config;
struct krn_pool;

struct inf_prefix_config {
    struct inf_kv_pool *pool; /* borrowed */
    struct inf_store *store;  /* borrowed; its expertd parks, each life of it anew; NULL: nothing is parked */
    /* Only tokens that were read as part of a prompt are used again, none that the model wrote, and none
     * behind those: a device may compute generated tokens by other kernels, whose bits differ
     * (inf_pass.generated). */
    bool exact;
    struct krn_pool *threads; /* borrowed; fetch parked blocks, run from the device's thread; NULL: none */
    /* For tests: expertd's part, instead of the store; and the time, instead of shm_now_ns. */
    const struct inf_park_config *park;
    uint64_t (*now_ns)(void);
};

/* -ENOMEM. */
int inf_prefix_create(const struct inf_prefix_config *config, struct inf_prefix **ret_prefix);
/* Gives its blocks back; before the pool is destroyed. */
void inf_prefix_destroy(struct inf_prefix **prefix);

struct inf_prefix_found {
    uint32_t tokens; /* of the prompt, whose keys and values the table holds now */
    uint32_t exact;  /* of them, from the first on: read as part of a prompt */
    bool more;       /* the park has more: call again */
};

/* The longest kept beginning of ids, of fewer than n tokens: its blocks become the table's. kv is empty, or
 * as an earlier call for the same ids left it that said more. A partly equal last block is shared as well:
 * inf_kv_prepare(kv, tokens, ...) copies it. Up to INF_PREFIX_LOAD blocks a call are loaded from the park,
 * and at most `room` (new blocks of the pool; the cache itself gives up older ones for them): a caller with
 * answers under way calls again between their steps, others at once. The table holds blocks for
 * found.tokens exactly. Blocks for a copy of each block loaded, and for one answer of expertd. */
struct inf_prefix_found inf_prefix_take(struct inf_prefix *prefix, struct inf_kv *kv, const int32_t *ids,
                                        uint32_t n, uint32_t room);

/* Counts a prompt of n tokens, once, when it is read: `found` of them were taken. */
void inf_prefix_count(struct inf_prefix *prefix, uint32_t n, uint32_t found);

/* Whole blocks that inf_prefix_take would find now in the pool and that are marked: held[block]. */
uint32_t inf_prefix_held(struct inf_prefix *prefix, const int32_t *ids, uint32_t n, const bool *held);

/* Remembers the n tokens whose keys and values kv holds; the first `exact` of them (<= n) were read as part
 * of a prompt, as were all before them. Cheap where most is kept already. A sequence that goes on puts whole
 * blocks only (n a multiple of INF_KV_BLOCK), or its last block is copied when it writes again. What
 * can't be kept for lack of memory is not kept. */
void inf_prefix_put(struct inf_prefix *prefix, const struct inf_kv *kv, const int32_t *ids, uint32_t n,
                    uint32_t exact);

/* Gives back up to `blocks` least recently used blocks that nobody else holds; returns how many became
 * free. */
uint32_t inf_prefix_evict(struct inf_prefix *prefix, uint32_t blocks);

/* Parks at most one block that is due. For when there is nothing else to do, and now and then between two
 * steps: it takes one copy of a block and, every 16th time, an answer of expertd. Returns true when more is
 * due now. */
bool inf_prefix_idle(struct inf_prefix *prefix);

/* Milliseconds until inf_prefix_idle has something to do: 0 now, UINT32_MAX: nothing. */
uint32_t inf_prefix_idle_ms(const struct inf_prefix *prefix);

/* Parks what is not parked yet, due or not, for at most ms: before a worker ends. */
void inf_prefix_flush(struct inf_prefix *prefix, uint32_t ms);

/* Counters since create; *_blocks are of now. */
struct inf_prefix_stats {
    uint64_t prompts, hits; /* counted; of them those of which a token was found */
    uint64_t hit_tokens, miss_tokens;
    uint64_t evicted;     /* blocks */
    uint32_t kept_blocks; /* in the pool, by this cache */
    uint32_t unparked_blocks;
    uint64_t parked, loaded; /* blocks to and from the park */
    uint64_t park_ns;        /* spent with both */
    uint64_t park_damaged;   /* blocks whose checksum or contents were wrong: not used, dropped */
    uint64_t park_ignored;   /* parked blocks that fit the tokens, but not this worker */
    uint64_t park_full;      /* blocks for which there was no room */
    char park[32];           /* "on", "off", "refused", "away" */
    char park_reason[160];   /* why it is not on, or why blocks were ignored; "" */
    uint64_t park_bytes;     /* of expertd's memory for it, in all */
};
void inf_prefix_stats(const struct inf_prefix *prefix, struct inf_prefix_stats *ret_stats);

#endif
