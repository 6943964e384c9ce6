/* SPDX-License-Identifier: MIT */
#include "inferd/inf_prefix_priv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int inf_prefix_create(const struct inf_prefix_config *config, struct inf_prefix **ret_prefix)
{
    struct inf_prefix *p = calloc(1, sizeof *p);
    if (!p)
        return -ENOMEM;
    p->config = *config;
    p->pool = config->pool;
    p->state = config->store || config->park ? "away" : "off";
    *ret_prefix = p;
    return 0;
}

void inf_prefix_destroy(struct inf_prefix **prefix)
{
    struct inf_prefix *p = *prefix;
    if (!p)
        return;
    inf_prefix_park_close(p);
    while (p->oldest)
        inf_node_remove(p, p->oldest); /* children are older than their parents */
    free(p);
    *prefix = NULL;
}

/* ---- nodes ---- */

static void age_add(struct inf_prefix *p, struct inf_node *n)
{
    n->newer = NULL;
    n->older = p->newest;
    if (p->newest)
        p->newest->newer = n;
    else
        p->oldest = n;
    p->newest = n;
}

static void age_remove(struct inf_prefix *p, struct inf_node *n)
{
    if (n->older)
        n->older->newer = n->newer;
    else
        p->oldest = n->newer;
    if (n->newer)
        n->newer->older = n->older;
    else
        p->newest = n->older;
}

void inf_node_use(struct inf_prefix *p, struct inf_node *n)
{
    for (; n != &p->root; n = n->parent) {
        age_remove(p, n);
        age_add(p, n);
    }
}

uint32_t inf_node_common(const struct inf_node *node, const int32_t *ids, uint32_t n)
{
    uint32_t i = 0;
    if (n > node->tokens)
        n = node->tokens;
    while (i < n && node->ids[i] == ids[i])
        i++;
    return i;
}

struct inf_node *inf_node_find(struct inf_node *parent, const int32_t *ids, uint32_t tokens)
{
    for (struct inf_node *c = parent->child; c; c = c->next)
        if (c->tokens == tokens && c->ids[0] == ids[0] && memcmp(c->ids, ids, tokens * sizeof *ids) == 0)
            return c;
    return NULL;
}

struct inf_node *inf_node_add(struct inf_prefix *p, struct inf_node *parent, const int32_t *ids,
                              uint32_t tokens, uint32_t exact, uint32_t block)
{
    struct inf_node *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    n->parent = parent;
    n->next = parent->child;
    if (n->next)
        n->next->prev = n;
    parent->child = n;
    n->tokens = tokens;
    n->exact = exact;
    n->block = block;
    memcpy(n->ids, ids, tokens * sizeof *ids);
    inf_park_key(parent->key, ids, tokens, n->key);
    inf_kv_pool_ref(p->pool, block);
    age_add(p, n);
    p->stats.kept_blocks++;
    return n;
}

void inf_node_remove(struct inf_prefix *p, struct inf_node *n)
{
    inf_prefix_park_forget(p, n);
    age_remove(p, n);
    if (n->prev)
        n->prev->next = n->next;
    else
        n->parent->child = n->next;
    if (n->next)
        n->next->prev = n->prev;
    inf_kv_pool_unref(p->pool, n->block);
    p->stats.kept_blocks--;
    free(n);
}

/* ---- take ---- */

/* The child that agrees with most of ids, and with how much; the lately used first where several do. */
static struct inf_node *best_child(struct inf_node *parent, const int32_t *ids, uint32_t n,
                                   uint32_t *ret_common)
{
    struct inf_node *best = NULL;
    uint32_t most = 0;
    for (struct inf_node *c = parent->child; c; c = c->next) {
        uint32_t common = inf_node_common(c, ids, n);
        if (common > most) {
            most = common;
            best = c;
        }
    }
    *ret_common = most;
    return best;
}

/* Tokens of `used` that were read as part of a prompt, where all before were. */
static void count_exact(struct inf_prefix_found *f, const struct inf_node *n, uint32_t used)
{
    if (f->exact == f->tokens)
        f->exact += n->exact < used ? n->exact : used;
    f->tokens += used;
}

/* What a block continues: the next whole block of ids behind `done` tokens, of which one is left to be read,
 * for its logits. */
static struct inf_node *next_whole(struct inf_node *at, const int32_t *ids, uint32_t n, uint32_t done)
{
    return n > done + INF_KV_BLOCK ? inf_node_find(at, ids + done, INF_KV_BLOCK) : NULL;
}

uint32_t inf_prefix_held(struct inf_prefix *p, const int32_t *ids, uint32_t n, const bool *held)
{
    struct inf_node *at = &p->root;
    uint32_t blocks = 0;
    for (uint32_t done = 0; (at = next_whole(at, ids, n, done)); done += INF_KV_BLOCK)
        blocks += held[at->block];
    return blocks;
}

void inf_prefix_count(struct inf_prefix *p, uint32_t n, uint32_t found)
{
    p->stats.prompts++;
    p->stats.hits += found > 0;
    p->stats.hit_tokens += found;
    p->stats.miss_tokens += n - found;
}

struct inf_prefix_found inf_prefix_take(struct inf_prefix *p, struct inf_kv *kv, const int32_t *ids,
                                        uint32_t n, uint32_t room)
{
    struct inf_prefix_found found = {0};
    struct inf_node *at = &p->root, *c;
    const uint32_t before = kv->blocks, limit = n ? n - 1 : 0;
    while ((c = next_whole(at, ids, n, found.tokens))) {
        if (found.tokens / INF_KV_BLOCK == kv->blocks)
            inf_kv_share(kv, kv->blocks, c->block);
        count_exact(&found, c, INF_KV_BLOCK);
        at = c;
    }
    if (found.tokens / INF_KV_BLOCK < before) { /* of an earlier call, and given up since */
        found.tokens = before * INF_KV_BLOCK;
        found.exact = found.exact < found.tokens ? found.exact : found.tokens;
        room = 0;
    }
    uint32_t common, rest = limit - found.tokens;
    struct inf_node *tail =
        before > found.tokens / INF_KV_BLOCK ? NULL : best_child(at, ids + found.tokens, rest, &common);
    if (!tail)
        common = 0;
    if (room && common < rest && inf_prefix_park_look(p)) {
        struct inf_node *last =
            inf_prefix_park_load(p, at, kv, ids + found.tokens, rest, room, common, &found.more);
        for (c = at; c != last;) {
            c = inf_node_find(c, ids + found.tokens, INF_KV_BLOCK);
            count_exact(&found, c, INF_KV_BLOCK);
        }
        at = last;
        rest = limit - found.tokens;
        tail = best_child(at, ids + found.tokens, rest, &common);
    }
    if (tail && !found.more) {
        inf_kv_share(kv, kv->blocks, tail->block);
        count_exact(&found, tail, common);
        at = tail;
    }
    inf_node_use(p, at);
    return found;
}

/* ---- put ---- */

/* Unfinished blocks that the new child says more of. */
static void drop_shorter(struct inf_prefix *p, const struct inf_node *child)
{
    for (struct inf_node *c = child->parent->child, *next; c; c = next) {
        next = c->next;
        if (c != child && c->tokens < child->tokens &&
            inf_node_common(c, child->ids, child->tokens) == c->tokens)
            inf_node_remove(p, c); /* it has no children: only whole blocks have */
    }
}

void inf_prefix_put(struct inf_prefix *p, const struct inf_kv *kv, const int32_t *ids, uint32_t n,
                    uint32_t exact)
{
    struct inf_node *at = &p->root;
    if (exact > n)
        exact = n;
    if (p->config.exact)
        n = exact;
    for (uint32_t i = 0; i < n; i += INF_KV_BLOCK) {
        uint32_t tokens = n - i < INF_KV_BLOCK ? n - i : INF_KV_BLOCK, common;
        uint32_t known = exact > i ? exact - i : 0;
        struct inf_node *c = NULL;
        if (i / INF_KV_BLOCK >= kv->blocks)
            break;
        if (tokens == INF_KV_BLOCK)
            c = inf_node_find(at, ids + i, tokens);
        else if ((c = best_child(at, ids + i, tokens, &common)) && common < tokens)
            c = NULL;
        if (!c) {
            c = inf_node_add(p, at, ids + i, tokens, known < tokens ? known : tokens,
                             kv->block[i / INF_KV_BLOCK]);
            if (!c)
                break;
            drop_shorter(p, c);
            inf_prefix_park_enqueue(p, c, INF_PREFIX_PARK_MS);
        }
        at = c;
    }
    inf_node_use(p, at);
}

/* ---- evict ---- */

uint32_t inf_prefix_evict(struct inf_prefix *p, uint32_t blocks)
{
    uint32_t n = 0;
    for (struct inf_node *c = p->oldest, *newer; c && n < blocks; c = newer) {
        newer = c->newer; /* its parent, if any, is newer: not looked at yet */
        if (c->child || p->pool->references[c->block] > 1)
            continue;
        inf_node_remove(p, c);
        n++;
    }
    p->stats.evicted += n;
    return n;
}

void inf_prefix_stats(const struct inf_prefix *p, struct inf_prefix_stats *ret_stats)
{
    *ret_stats = p->stats;
    ret_stats->unparked_blocks = p->queued;
    for (uint32_t i = 0; i < p->batch.n; i++)
        ret_stats->unparked_blocks += p->batch.node[i] != NULL;
    strncpy(ret_stats->park, p->state, sizeof ret_stats->park - 1);
    ret_stats->park_bytes = p->park ? inf_park_bytes(p->park) : 0;
}
