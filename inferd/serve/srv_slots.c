/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_engine_priv.h"

#include <errno.h>
#include <stdlib.h>

static int add_slot(struct srv_engine *e, struct shm_error *err)
{
    int rc = inf_conversation_create(e->engine, err, &e->slots[e->n_slots].conversation);
    if (!rc)
        e->n_slots++;
    return rc;
}

int srv_slots_open(struct srv_engine *e, struct shm_error *err)
{
    e->slots = calloc(e->config.conversations, sizeof *e->slots);
    return e->slots ? add_slot(e, err) : -ENOMEM;
}

void srv_slots_close(struct srv_engine *e)
{
    for (unsigned i = 0; i < e->n_slots; i++)
        inf_conversation_destroy(&e->slots[i].conversation);
    free(e->slots);
    e->slots = NULL;
    e->n_slots = 0;
}

static uint32_t common(const struct inf_conversation *c, const int32_t *ids, size_t n)
{
    uint32_t i = 0;
    while (i < c->n && i < n && c->tokens[i] == ids[i])
        i++;
    return i;
}

/* Another prompt's conversation is cut only if most of it stays, or nothing else is left: the one used
 * longest ago. */
int srv_slots_pick(struct srv_engine *e, const int32_t *ids, size_t n, struct srv_slot **ret_slot,
                   uint32_t *ret_common)
{
    struct srv_slot *best = NULL, *oldest = NULL, *empty = NULL;
    uint32_t shared = 0;
    for (unsigned i = 0; i < e->n_slots; i++) {
        struct srv_slot *s = &e->slots[i];
        if (s->busy)
            continue;
        uint32_t k = common(s->conversation, ids, n);
        if (k > shared && (k >= s->conversation->n / 2 || k + 1 >= n)) {
            shared = k;
            best = s;
        }
        if (!s->conversation->n)
            empty = s;
        if (!oldest || s->used_ns < oldest->used_ns)
            oldest = s;
    }
    if (!best && !empty && e->n_slots < e->config.conversations) {
        struct shm_error err = {0};
        if (add_slot(e, &err) == 0)
            empty = &e->slots[e->n_slots - 1];
        else
            e->config.conversations = e->n_slots; /* no memory for more */
    }
    struct srv_slot *s = best ? best : empty ? empty : oldest;
    if (!s)
        return -EBUSY;
    uint32_t k = common(s->conversation, ids, n);
    if (k >= n)
        k = (uint32_t)n - 1; /* the last token's logits are needed */
    inf_conversation_truncate(s->conversation, k);
    *ret_slot = s;
    *ret_common = k;
    return 0;
}
