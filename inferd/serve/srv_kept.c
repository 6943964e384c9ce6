/* SPDX-License-Identifier: MIT */
/* Prompts and answers that were read before, whole: who begins alike shares their blocks. */
#include "inferd/serve/srv_engine_priv.h"

#include <stdlib.h>
#include <string.h>

struct kept {
    int32_t *ids;
    uint32_t n;
    struct inf_kv *kv;
    uint64_t used_ns;
};

static void drop(struct srv_engine *e, unsigned i)
{
    struct kept *k = &e->kept[i];
    inf_kv_destroy(&k->kv);
    free(k->ids);
    *k = e->kept[--e->n_kept];
}

void srv_kept_clear(struct srv_engine *e)
{
    while (e->n_kept)
        drop(e, 0);
    free(e->kept);
    e->kept = NULL;
}

static uint32_t common(const struct kept *k, const int32_t *ids, uint32_t n)
{
    uint32_t i = 0;
    while (i < k->n && i < n && k->ids[i] == ids[i])
        i++;
    return i;
}

uint32_t srv_kept_take(struct srv_engine *e, struct inf_kv *kv, const int32_t *ids, uint32_t n)
{
    struct kept *best = NULL;
    uint32_t most = 0;
    for (unsigned i = 0; i < e->n_kept; i++) {
        uint32_t c = common(&e->kept[i], ids, n - 1); /* the last token's logits are needed */
        if (c > most) {
            most = c;
            best = &e->kept[i];
        }
    }
    if (!best)
        return 0;
    best->used_ns = shm_now_ns();
    for (uint32_t i = 0; i < inf_kv_blocks(most); i++)
        inf_kv_share(kv, i, best->kv->block[i]);
    return most;
}

void srv_kept_put(struct srv_engine *e, const struct inf_kv *kv, const int32_t *ids, uint32_t n)
{
    for (unsigned i = 0; i < e->n_kept; i++)
        if (common(&e->kept[i], ids, n) == e->kept[i].n)
            drop(e, i--); /* the beginning of this one */
    if (e->n_kept == e->cap_kept) {
        struct kept *grown = realloc(e->kept, (2 * e->cap_kept + 8) * sizeof *grown);
        if (!grown)
            return;
        e->kept = grown;
        e->cap_kept = 2 * e->cap_kept + 8;
    }
    struct kept *k = &e->kept[e->n_kept];
    *k = (struct kept){.n = n, .used_ns = shm_now_ns(), .ids = malloc((n + 1) * sizeof *ids)};
    if (!k->ids || inf_kv_create(kv->pool, kv->ctx, &k->kv)) {
        free(k->ids);
        return;
    }
    memcpy(k->ids, ids, n * sizeof *ids);
    for (uint32_t i = 0; i < inf_kv_blocks(n); i++)
        inf_kv_share(k->kv, i, kv->block[i]);
    e->n_kept++;
}

uint32_t srv_kept_evict(struct srv_engine *e, uint32_t blocks)
{
    const uint32_t before = e->engine->pool->free;
    while (e->n_kept && e->engine->pool->free - before < blocks) {
        unsigned oldest = 0;
        for (unsigned i = 1; i < e->n_kept; i++)
            if (e->kept[i].used_ns < e->kept[oldest].used_ns)
                oldest = i;
        drop(e, oldest);
    }
    return e->engine->pool->free - before;
}

uint32_t srv_kept_blocks(const struct srv_engine *e)
{
    uint32_t blocks = 0;
    for (unsigned i = 0; i < e->n_kept; i++)
        blocks += e->kept[i].kv->blocks;
    return blocks;
}
