/* SPDX-License-Identifier: MIT */
/* What is parked of the tree, and what comes back of it. */
#include "inferd/inf_prefix_priv.h"
#include "proto/prt_log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RETRY_NS UINT64_C(10000000000) /* after expertd did not answer, or refused for now */
#define BUSY_MS  1000u                 /* another worker parks the same block */
#define FULL_MS  30000u                /* no room for it */
#define AWAY_NS  UINT64_C(50000000)    /* until it is looked again whether there is an expertd */

/* ---- the queue of blocks to be parked: parents before their children ---- */

static void dequeue(struct inf_prefix *p, struct inf_node *n)
{
    if (!n->queued)
        return;
    if (n->queue_prev)
        n->queue_prev->queue_next = n->queue_next;
    else
        p->queue = n->queue_next;
    if (n->queue_next)
        n->queue_next->queue_prev = n->queue_prev;
    else
        p->queue_last = n->queue_prev;
    n->queued = false;
    p->queued--;
}

void inf_prefix_park_enqueue(struct inf_prefix *p, struct inf_node *n, uint32_t delay_ms)
{
    if (!p->config.store && !p->config.park)
        return;
    dequeue(p, n);
    n->parked = false;
    n->queued = true;
    n->due_ns = inf_prefix_now(p) + delay_ms * UINT64_C(1000000);
    if (!p->queued++ || n->due_ns < p->queue_due_ns)
        p->queue_due_ns = n->due_ns;
    n->queue_next = NULL;
    n->queue_prev = p->queue_last;
    if (p->queue_last)
        p->queue_last->queue_next = n;
    else
        p->queue = n;
    p->queue_last = n;
}

void inf_prefix_park_forget(struct inf_prefix *p, struct inf_node *n)
{
    dequeue(p, n);
    for (uint32_t i = 0; n->batched && i < p->batch.n; i++)
        if (p->batch.node[i] == n)
            p->batch.node[i] = NULL; /* its slot is given back with the next reservation */
}

/* What was being parked is to be parked. */
static void drop_batch(struct inf_prefix *p)
{
    for (uint32_t i = 0; i < p->batch.n; i++)
        if (p->batch.node[i]) {
            p->batch.node[i]->batched = false;
            inf_prefix_park_enqueue(p, p->batch.node[i], 0);
        }
    p->batch = (struct inf_batch){0};
}

/* ---- expertd ---- */

void inf_prefix_park_close(struct inf_prefix *p)
{
    drop_batch(p);
    inf_park_close(&p->park);
}

/* expertd did not do what was asked: for a while it is not asked again. */
static void failed(struct inf_prefix *p, int rc, const struct shm_error *err)
{
    bool never = rc == -ENOTSUP || rc == -EUCLEAN || rc == -EFBIG;
    inf_prefix_park_close(p);
    p->retry_ns = never ? UINT64_MAX : inf_prefix_now(p) + RETRY_NS;
    p->state = rc == -ENOTSUP ? "off" : never || rc == -EBUSY ? "refused" : "away";
    if (strncmp(p->stats.park_reason, shm_error_text(err), sizeof p->stats.park_reason - 1) != 0)
        prt_log(PRT_LOG_NOTICE, "keys and values are not parked: %s", shm_error_text(err));
    snprintf(p->stats.park_reason, sizeof p->stats.park_reason, "%.159s", shm_error_text(err));
}

static bool alive(const struct inf_prefix *p, uint64_t *ret_epoch, uint64_t *ret_session)
{
    const struct inf_store *s = p->config.store;
    if (p->config.park) {
        *ret_session = *ret_epoch = p->config.park->session;
        return *ret_session != 0;
    }
    if (!s || !s->session || !s->client || !inf_store_alive(s))
        return false;
    *ret_session = s->session;
    *ret_epoch = atomic_load_explicit(&prt_client_store(s->client)->header.epoch, memory_order_relaxed);
    return true;
}

/* Another life of expertd is there: what is kept goes to its park. */
static bool moved(const struct inf_prefix *p)
{
    uint64_t epoch, session;
    return p->newest && alive(p, &epoch, &session) && epoch != p->epoch;
}

bool inf_prefix_park_look(struct inf_prefix *p)
{
    uint64_t epoch = 0, session = 0;
    if (!p->config.store && !p->config.park)
        return false;
    if (!alive(p, &epoch, &session)) {
        inf_prefix_park_close(p);
        p->state = "away";
        p->retry_ns = inf_prefix_now(p) + AWAY_NS;
        return false;
    }
    if (epoch != p->epoch || session != p->session) {
        inf_prefix_park_close(p);
        if (epoch != p->epoch) /* what was parked there is lost; parents are newer */
            for (struct inf_node *n = p->newest; n; n = n->older)
                inf_prefix_park_enqueue(p, n, INF_PREFIX_PARK_MS);
        p->epoch = epoch;
        p->session = session;
        p->retry_ns = 0;
    }
    if (p->park)
        return true;
    if (inf_prefix_now(p) < p->retry_ns)
        return false;
    struct shm_error err = {0};
    struct inf_park_config config = {0};
    if (p->config.park) {
        config = *p->config.park;
    } else {
        config.calls = inf_park_client_calls(p->config.store->client);
        config.session = session;
        config.device = p->pool->device;
        memcpy(config.model, p->config.store->fingerprint, sizeof config.model);
    }
    config.exact = p->config.exact;
    config.pool = p->config.threads;
    int rc = inf_park_open(&config, &p->park, &err);
    if (rc) {
        failed(p, rc, &err);
        return false;
    }
    p->state = "on";
    p->stats.park_reason[0] = '\0';
    return true;
}

/* ---- loading ---- */

static void tell_ignored(struct inf_prefix *p, const struct prt_parkfind_reply *r)
{
    if (!r->ignored)
        return;
    const char *why =
        r->ignored_why == PRT_PARK_WHY_LAYOUT
            ? "parked blocks are ignored: a worker with another form of keys and values parked them"
            : "parked blocks are ignored: another build of inferd parked them";
    if (!p->stats.park_ignored)
        prt_log(PRT_LOG_NOTICE, "%s", why);
    p->stats.park_ignored += r->ignored;
    snprintf(p->stats.park_reason, sizeof p->stats.park_reason, "%s", why);
}

/* The i-th slot that was fetched becomes a child of `at`: of exactly these tokens if `ids` is given.
 * -EBADMSG: it is wrong; -ENOSPC: no block to be had. */
static int load_one(struct inf_prefix *p, struct inf_node *at, uint32_t i, const int32_t *ids,
                    struct inf_node **ret_node, struct shm_error *err)
{
    struct shm_park_head head;
    uint32_t block;
    int rc = inf_kv_pool_take(p->pool, &block);
    if (rc && inf_prefix_evict(p, 1))
        rc = inf_kv_pool_take(p->pool, &block);
    if (rc)
        return rc;
    rc = inf_park_load(p->park, i, at->key, block, &head, err);
    if (!rc && ids && (head.tokens != INF_KV_BLOCK || memcmp(head.ids, ids, sizeof head.ids) != 0))
        rc = shm_error_set(err, EBADMSG, "park: a slot holds other tokens than its key says");
    if (!rc && !inf_node_find(at, head.ids, head.tokens)) {
        *ret_node = inf_node_add(p, at, head.ids, head.tokens, head.exact, block);
        if (*ret_node) {
            (*ret_node)->parked = true;
            p->stats.loaded++;
        } else {
            rc = -ENOMEM;
        }
    }
    inf_kv_pool_unref(p->pool, block);
    return rc;
}

/* Of the slots that continue `at`, the one with most of ids. */
static void load_best(struct inf_prefix *p, struct inf_node *at, const struct prt_parkfind_reply *r,
                      const int32_t *ids, uint32_t n, uint32_t least, uint32_t *wrong, uint32_t *n_wrong,
                      struct shm_error *err)
{
    struct shm_park_head head;
    struct inf_node *loaded = NULL;
    uint32_t best = UINT32_MAX;
    for (uint32_t i = r->found; i < r->found + r->others; i++) {
        uint32_t common = 0;
        if (inf_park_peek(p->park, r->slot[i], &head))
            continue;
        while (common < head.tokens && common < n && head.ids[common] == ids[common])
            common++;
        if (common > least) {
            least = common;
            best = i;
        }
    }
    if (best == UINT32_MAX)
        return;
    inf_park_fetch(p->park, &r->slot[best], &r->checksum[2 * best], 1);
    if (load_one(p, at, 0, NULL, &loaded, err) == -EBADMSG)
        wrong[(*n_wrong)++] = r->slot[best];
}

struct inf_node *inf_prefix_park_load(struct inf_prefix *p, struct inf_node *at, struct inf_kv *kv,
                                      const int32_t *ids, uint32_t n, uint32_t room, uint32_t least,
                                      bool *ret_more)
{
    const uint64_t begin_ns = inf_prefix_now(p);
    const uint32_t whole = n / INF_KV_BLOCK, most = room < INF_PREFIX_LOAD ? room : INF_PREFIX_LOAD;
    const uint32_t keys = whole < most ? whole : most;
    uint64_t key[2 * INF_PREFIX_LOAD];
    uint32_t wrong[INF_PREFIX_LOAD + 1], n_wrong = 0, loaded = 0;
    struct prt_parkfind_reply r = {0};
    struct shm_error err = {0};
    for (uint32_t i = 0; i < keys; i++)
        inf_park_key(i ? &key[2 * (i - 1)] : at->key, ids + i * INF_KV_BLOCK, INF_KV_BLOCK, &key[2 * i]);
    int rc = inf_park_find(p->park, at->key, key, keys, &r, &err);
    if (rc || r.found > keys || r.others > PRT_PARK_OTHERS) {
        failed(p, rc ? rc : shm_error_set(&err, EBADMSG, "PARKFIND: more was found than asked for"), &err);
        return at;
    }
    tell_ignored(p, &r);
    for (uint32_t first = 0, fetched = 0; loaded < r.found; loaded++) {
        struct inf_node *node = NULL;
        if (loaded == first + fetched) {
            first = loaded;
            fetched = inf_park_fetch(p->park, &r.slot[first], &r.checksum[2 * first], r.found - first);
        }
        rc = load_one(p, at, loaded - first, ids + loaded * INF_KV_BLOCK, &node, &err);
        if (rc == -EBADMSG)
            wrong[n_wrong++] = r.slot[loaded];
        if (rc || !node)
            break;
        inf_kv_share(kv, kv->blocks, node->block);
        at = node;
    }
    /* All there was room for in one go: the rest in the next one. */
    *ret_more = loaded == INF_PREFIX_LOAD && whole > loaded && room > loaded;
    if (loaded == r.found && loaded < room && !*ret_more)
        load_best(p, at, &r, ids + loaded * INF_KV_BLOCK, n - loaded * INF_KV_BLOCK, loaded ? 0 : least,
                  wrong, &n_wrong, &err);
    if (n_wrong) {
        prt_log(PRT_LOG_WARNING, "a parked block is damaged and given up: %s", shm_error_text(&err));
        p->stats.park_damaged += n_wrong;
    }
    if (r.found + r.others && (rc = inf_park_done(p->park, wrong, n_wrong, &err)))
        failed(p, rc, &err);
    p->stats.park_ns += inf_prefix_now(p) - begin_ns;
    return at;
}

/* ---- parking ---- */

/* The first ancestor, from the root on, that has to be parked before n or is n itself. */
static struct inf_node *topmost(struct inf_prefix *p, struct inf_node *n)
{
    struct inf_node *top = n;
    for (struct inf_node *a = n->parent; a != &p->root && !a->parked && !a->batched; a = a->parent)
        top = a;
    return top;
}

/* When the queue is looked through again. */
static void find_due(struct inf_prefix *p)
{
    p->queue_due_ns = UINT64_MAX;
    for (const struct inf_node *n = p->queue; n; n = n->queue_next)
        if (n->due_ns < p->queue_due_ns)
            p->queue_due_ns = n->due_ns;
}

static bool reserve(struct inf_prefix *p)
{
    struct inf_batch *b = &p->batch;
    struct inf_node *want[PRT_PARK_BATCH];
    uint64_t key[2 * PRT_PARK_BATCH], parent[2 * PRT_PARK_BATCH], now_ns = inf_prefix_now(p);
    const uint32_t most = inf_park_batch(p->park);
    uint32_t n = 0;
    for (struct inf_node *q = p->queue; q && n < most; q = q->queue_next) {
        while (q->due_ns <= now_ns && !q->batched && n < most) {
            struct inf_node *top = topmost(p, q);
            if (top->due_ns > now_ns) { /* waits for what it continues */
                q->due_ns = top->due_ns;
                break;
            }
            top->batched = true;
            memcpy(&key[2 * n], top->key, sizeof top->key);
            memcpy(&parent[2 * n], top->parent->key, sizeof top->key);
            want[n++] = top;
        }
    }
    if (!n) {
        find_due(p);
        return false;
    }
    struct prt_parkreserve_reply r = {0};
    struct shm_error err = {0};
    int rc = inf_park_reserve(p->park, key, parent, n, &r, &err);
    for (uint32_t i = 0; i < n; i++) {
        struct inf_node *w = want[i];
        w->batched = false;
        if (rc)
            continue;
        switch (r.state[i]) {
        case PRT_PARK_SLOT:
            dequeue(p, w);
            w->batched = true;
            b->slot[b->n] = r.slot[i];
            b->node[b->n++] = w;
            break;
        case PRT_PARK_KEPT:
            dequeue(p, w);
            w->parked = true;
            break;
        case PRT_PARK_ORPHAN: /* what it continues was given up: it is parked again, then this one */
            if (w->parent != &p->root && w->parent->parked)
                inf_prefix_park_enqueue(p, w->parent, 0);
            w->due_ns = now_ns + (w->parent == &p->root ? FULL_MS : 1) * UINT64_C(1000000);
            break;
        case PRT_PARK_FULL:
            p->stats.park_full++;
            w->due_ns = now_ns + FULL_MS * UINT64_C(1000000);
            break;
        default:
            w->due_ns = now_ns + BUSY_MS * UINT64_C(1000000);
        }
    }
    find_due(p);
    if (rc)
        failed(p, rc, &err);
    return !rc;
}

static void store_next(struct inf_prefix *p)
{
    struct inf_batch *b = &p->batch;
    struct inf_node *n = b->node[b->stored];
    if (n) {
        struct shm_park_head head = {.tokens = n->tokens, .exact = n->exact};
        struct shm_error err = {0};
        memcpy(head.key, n->key, sizeof head.key);
        memcpy(head.parent, n->parent->key, sizeof head.parent);
        memcpy(head.ids, n->ids, n->tokens * sizeof *n->ids);
        if (inf_park_store(p->park, b->slot[b->stored], &head, n->block, &b->checksum[2 * b->stored], &err)) {
            n->batched = false;
            inf_prefix_park_enqueue(p, n, FULL_MS);
            b->node[b->stored] = NULL;
        }
    }
    b->stored++;
}

static void commit(struct inf_prefix *p)
{
    struct inf_batch *b = &p->batch;
    uint32_t slot[PRT_PARK_BATCH], n = 0;
    uint64_t checksum[2 * PRT_PARK_BATCH];
    for (uint32_t i = 0; i < b->n; i++)
        if (b->node[i]) {
            slot[n] = b->slot[i];
            memcpy(&checksum[2 * n++], &b->checksum[2 * i], 16);
        }
    struct shm_error err = {0};
    int rc = n ? inf_park_commit(p->park, slot, checksum, n, &err) : 0;
    if (rc) {
        failed(p, rc, &err);
        return;
    }
    for (uint32_t i = 0; i < b->n; i++)
        if (b->node[i]) {
            b->node[i]->batched = false;
            b->node[i]->parked = true;
        }
    p->stats.parked += n;
    *b = (struct inf_batch){0};
}

bool inf_prefix_idle(struct inf_prefix *p)
{
    const uint64_t begin_ns = inf_prefix_now(p);
    if (!p->queue && !p->batch.n && !moved(p))
        return false;
    if (!inf_prefix_park_look(p))
        return false;
    if (!p->batch.n) {
        if (!p->queue || !reserve(p))
            return false;
    } else {
        store_next(p);
        if (p->batch.stored == p->batch.n)
            commit(p);
    }
    p->stats.park_ns += inf_prefix_now(p) - begin_ns;
    return inf_prefix_idle_ms(p) == 0;
}

uint32_t inf_prefix_idle_ms(const struct inf_prefix *p)
{
    if (p->batch.n)
        return 0;
    uint64_t now_ns = inf_prefix_now(p), due_ns = p->queue_due_ns;
    if (!p->queue)
        return moved(p) ? 0 : UINT32_MAX;
    if (!p->park && p->retry_ns > due_ns)
        due_ns = p->retry_ns;
    if (due_ns <= now_ns)
        return 0;
    uint64_t ms = (due_ns - now_ns + 999999) / 1000000;
    return ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX;
}

void inf_prefix_flush(struct inf_prefix *p, uint32_t ms)
{
    uint64_t end_ns = inf_prefix_now(p) + ms * UINT64_C(1000000);
    for (struct inf_node *n = p->queue; n; n = n->queue_next)
        n->due_ns = p->queue_due_ns = 0;
    while (inf_prefix_now(p) < end_ns && inf_prefix_idle(p))
        ;
}
