/* SPDX-License-Identifier: MIT */
#include "expertd/exd_park.h"

#include "expertd/exd_park_priv.h"
#include "shm/shm_park.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- slots ---- */

/* A slot of nobody's, or 0. */
static uint32_t free_slot(struct exd_park *p)
{
    uint32_t i = p->free;
    if (i) {
        p->free = exd_block(p, i)->older;
        return i;
    }
    if (p->used == p->slots || exd_park_take_memory(p, (p->used + 1) * p->slot_bytes) < 0)
        return 0;
    return ++p->used;
}

static void make_free(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    *b = (struct exd_block){.older = p->free};
    p->free = i;
}

/* Out of the index; free once nobody holds it. */
static void drop(struct exd_park *p, uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    if (b->state == EXD_BLOCK_KEPT) {
        exd_index_age_remove(p, i);
        p->kept--;
    } else if (b->state == EXD_BLOCK_RESERVED) {
        p->reserved--;
    }
    exd_index_remove(p, i);
    p->class[b->class].blocks--;
    if (b->pins) {
        b->state = EXD_BLOCK_DEAD;
        return;
    }
    make_free(p, i);
}

/* The least recently used block that nobody holds is given up for one that continues `spare`, unless it is
 * that one. 0: there is none. */
static uint32_t evict(struct exd_park *p, uint32_t spare)
{
    uint32_t i = p->oldest;
    while (i && exd_block(p, i)->pins)
        i = exd_block(p, i)->newer;
    if (!i || i == spare)
        return 0;
    drop(p, i);
    p->evicted++;
    p->free = exd_block(p, i)->older; /* drop put it there */
    return i;
}

/* ---- sessions ---- */

static struct exd_park_session *session(struct exd_park *p, uint64_t number, const char *what,
                                        struct shm_error *err)
{
    for (uint32_t i = 0; i < EXD_PARK_SESSIONS; i++)
        if (number && p->session[i].number == number)
            return &p->session[i];
    if (what)
        shm_error_set(err, EINVAL, "%s: session %llu has not asked for the park: send PARKOPEN first", what,
                      (unsigned long long)number);
    return NULL;
}

static void unpin(struct exd_park *p, struct exd_park_session *s)
{
    for (uint32_t i = 0; i < s->pins; i++) {
        struct exd_block *b = exd_block(p, s->pin[i]);
        p->pins--;
        if (--b->pins == 0 && b->state == EXD_BLOCK_DEAD)
            make_free(p, s->pin[i]);
    }
    s->pins = 0;
}

static void unreserve(struct exd_park *p, struct exd_park_session *s)
{
    for (uint32_t i = 0; i < s->reservations; i++)
        if (s->reservation[i])
            drop(p, s->reservation[i]);
    s->reservations = 0;
}

void exd_park_leave(struct exd_park *p, uint64_t number)
{
    struct exd_park_session *s = session(p, number, NULL, NULL);
    if (!s)
        return;
    unpin(p, s);
    unreserve(p, s);
    p->class[s->class].sessions--;
    *s = (struct exd_park_session){0};
}

static void drop_class(struct exd_park *p, uint32_t class)
{
    for (uint32_t i = 1; i <= p->used && p->class[class].blocks; i++) {
        struct exd_block *b = exd_block(p, i);
        if (b->class == class && (b->state == EXD_BLOCK_KEPT || b->state == EXD_BLOCK_RESERVED)) {
            p->evicted++;
            drop(p, i);
        }
    }
}

/* All classes taken: there are more than sessions, so one of them has none. */
static uint32_t find_class(struct exd_park *p, const struct prt_parkopen_request *r)
{
    uint32_t unused = EXD_PARK_CLASSES, lonely = 0;
    for (uint32_t i = 0; i < EXD_PARK_CLASSES; i++) {
        struct exd_park_class *c = &p->class[i];
        if ((c->sessions || c->blocks) && c->block_bytes == r->block_bytes &&
            strcmp(c->layout, r->layout) == 0 && strcmp(c->build, r->build) == 0)
            return i;
        if (!c->sessions && !c->blocks)
            unused = i;
        else if (!c->sessions)
            lonely = i;
    }
    if (unused == EXD_PARK_CLASSES) {
        drop_class(p, lonely);
        unused = lonely;
    }
    struct exd_park_class *c = &p->class[unused];
    *c = (struct exd_park_class){.block_bytes = r->block_bytes};
    memcpy(c->layout, r->layout, sizeof c->layout);
    memcpy(c->build, r->build, sizeof c->build);
    return unused;
}

/* Slots of another size: everything kept goes. */
static int lay_out(struct exd_park *p, uint64_t slot_bytes, struct shm_error *err)
{
    uint64_t slots = p->bytes / slot_bytes;
    if (slots > EXD_PARK_SLOTS_MAX)
        slots = EXD_PARK_SLOTS_MAX;
    uint32_t buckets = 1024;
    while (buckets < slots)
        buckets *= 2;
    struct exd_block *block = calloc(slots + 1, sizeof *block);
    uint32_t *by_key = calloc(buckets, sizeof *by_key), *by_parent = calloc(buckets, sizeof *by_parent);
    if (!block || !by_key || !by_parent) {
        free(block);
        free(by_key);
        free(by_parent);
        return shm_error_set(err, ENOMEM, "PARKOPEN: no memory for the index of %llu blocks; free some",
                             (unsigned long long)slots);
    }
    p->evicted += p->kept;
    free(p->block);
    free(p->by_key);
    free(p->by_parent);
    p->block = block;
    p->by_key = by_key;
    p->by_parent = by_parent;
    p->buckets = buckets;
    p->slots = (uint32_t)slots;
    p->slot_bytes = slot_bytes;
    p->used = p->free = p->oldest = p->newest = 0;
    p->kept = p->reserved = 0;
    for (uint32_t i = 0; i < EXD_PARK_CLASSES; i++)
        p->class[i].blocks = 0;
    return 0;
}

int exd_park_join(struct exd_park *p, const struct prt_parkopen_request *r, struct prt_parkopen_reply *reply,
                  struct shm_error *err)
{
    uint64_t slot_bytes = shm_park_slot_bytes(r->block_bytes);
    if (memcmp(r->model, p->model, sizeof p->model) != 0)
        return shm_error_set(err, EUCLEAN, "PARKOPEN: another model than the one served here");
    if (slot_bytes > p->bytes)
        return shm_error_set(err, EFBIG,
                             "PARKOPEN: a block takes %.1f MB, the park has %.1f MB: raise expertd's --park",
                             (double)slot_bytes / 1e6, (double)p->bytes / 1e6);
    exd_park_leave(p, r->session);
    struct exd_park_session *s = NULL;
    uint32_t others = 0;
    for (uint32_t i = 0; i < EXD_PARK_SESSIONS; i++) {
        if (!p->session[i].number)
            s = &p->session[i];
        else
            others++;
    }
    if (!s)
        return shm_error_set(err, EBUSY, "PARKOPEN: %u sessions use the park, more do not fit",
                             EXD_PARK_SESSIONS);
    if (slot_bytes != p->slot_bytes) {
        if (others)
            return shm_error_set(
                err, EBUSY,
                "PARKOPEN: other workers park blocks of %.1f MB, this one's have %.1f MB: what "
                "it reads is not parked; use an instance of its own",
                (double)p->slot_bytes / 1e6, (double)slot_bytes / 1e6);
        int rc = lay_out(p, slot_bytes, err);
        if (rc < 0)
            return rc;
    }
    *s = (struct exd_park_session){.number = r->session, .class = find_class(p, r)};
    p->class[s->class].sessions++;
    reply->park_bytes = p->bytes;
    reply->slot_bytes = p->slot_bytes;
    reply->slots = p->slots;
    reply->kept = p->kept;
    snprintf(reply->park_path, sizeof reply->park_path, "%s", p->path);
    return 0;
}

/* ---- requests ---- */

/* Kept ones of another class under the same key: counted, with the reason. */
static void count_others(struct exd_park *p, const uint64_t *key, uint32_t class,
                         struct prt_parkfind_reply *reply)
{
    const struct exd_park_class *mine = &p->class[class];
    for (uint32_t i = exd_index_first(p, key); i; i = exd_block(p, i)->key_next) {
        const struct exd_block *b = exd_block(p, i);
        if (b->state != EXD_BLOCK_KEPT || b->class == class || memcmp(b->key, key, sizeof b->key) != 0)
            continue;
        const struct exd_park_class *c = &p->class[b->class];
        reply->ignored++;
        reply->ignored_why = strcmp(c->layout, mine->layout) != 0 ? PRT_PARK_WHY_LAYOUT : PRT_PARK_WHY_BUILD;
        p->ignored++;
        return;
    }
}

static void hand_out(struct exd_park *p, struct exd_park_session *s, struct prt_parkfind_reply *reply,
                     uint32_t i)
{
    struct exd_block *b = exd_block(p, i);
    reply->slot[s->pins] = i - 1;
    memcpy(&reply->checksum[2 * s->pins], b->checksum, sizeof b->checksum);
    s->pin[s->pins++] = i;
    b->pins++;
    p->pins++;
}

int exd_park_find(struct exd_park *p, const struct prt_parkfind_request *r, struct prt_parkfind_reply *reply,
                  struct shm_error *err)
{
    struct exd_park_session *s = session(p, r->session, "PARKFIND", err);
    if (!s)
        return -EINVAL;
    unpin(p, s);
    const uint64_t *last = r->parent;
    for (uint32_t k = 0; k < r->keys; k++) {
        uint32_t i = exd_index_find(p, &r->key[2 * k], s->class);
        if (!i || exd_block(p, i)->state != EXD_BLOCK_KEPT) {
            count_others(p, &r->key[2 * k], s->class, reply);
            break;
        }
        hand_out(p, s, reply, i);
        reply->found++;
        last = &r->key[2 * k];
    }
    if (reply->found)
        exd_index_use(p, s->pin[reply->found - 1]);
    uint32_t looked = 0;
    for (uint32_t i = exd_index_first_child(p, last); i && looked < EXD_PARK_LOOK;
         i = exd_block(p, i)->parent_next, looked++) {
        const struct exd_block *b = exd_block(p, i);
        if (reply->others == PRT_PARK_OTHERS)
            break;
        if (b->state != EXD_BLOCK_KEPT || b->class != s->class ||
            memcmp(b->parent, last, sizeof b->parent) != 0)
            continue;
        hand_out(p, s, reply, i);
        reply->others++;
    }
    p->found += reply->found;
    return 0;
}

/* The kept block that a new one continues in the end: through those that the session has just reserved. 0:
 * there is none. *ret_root: it continues nothing. */
static uint32_t anchor(struct exd_park *p, const struct exd_park_session *s, const uint64_t *parent,
                       bool *ret_root)
{
    for (uint32_t steps = 0; steps <= PRT_PARK_BATCH; steps++) {
        if (!parent[0] && !parent[1]) {
            *ret_root = true;
            return 0;
        }
        uint32_t i = exd_index_find(p, parent, s->class);
        if (!i)
            return 0;
        const struct exd_block *b = exd_block(p, i);
        if (b->state == EXD_BLOCK_KEPT)
            return i;
        if (b->session != s->number)
            return 0;
        parent = b->parent;
    }
    return 0;
}

static uint32_t reserve_one(struct exd_park *p, struct exd_park_session *s, const uint64_t *key,
                            const uint64_t *parent, uint32_t *ret_slot)
{
    uint32_t i = exd_index_find(p, key, s->class);
    if (i && exd_block(p, i)->state == EXD_BLOCK_KEPT) {
        exd_index_use(p, i);
        return PRT_PARK_KEPT;
    }
    if (i)
        return exd_block(p, i)->session == s->number ? PRT_PARK_KEPT : PRT_PARK_BUSY;
    bool root = false;
    uint32_t spare = anchor(p, s, parent, &root);
    if (!spare && !root)
        return PRT_PARK_ORPHAN;
    i = free_slot(p);
    if (!i) {
        exd_index_use(p, spare); /* who writes its continuation uses it */
        i = evict(p, spare);
    }
    if (!i)
        return PRT_PARK_FULL;
    struct exd_block *b = exd_block(p, i);
    *b = (struct exd_block){.state = EXD_BLOCK_RESERVED, .session = s->number, .class = s->class};
    memcpy(b->key, key, sizeof b->key);
    memcpy(b->parent, parent, sizeof b->parent);
    exd_index_add(p, i);
    p->class[s->class].blocks++;
    p->reserved++;
    s->reservation[s->reservations++] = i;
    *ret_slot = i - 1;
    return PRT_PARK_SLOT;
}

int exd_park_reserve(struct exd_park *p, const struct prt_parkreserve_request *r,
                     struct prt_parkreserve_reply *reply, struct shm_error *err)
{
    struct exd_park_session *s = session(p, r->session, "PARKRESERVE", err);
    if (!s)
        return -EINVAL;
    for (uint32_t k = 0; k < r->blocks; k++)
        if (!r->key[2 * k] && !r->key[2 * k + 1])
            return shm_error_set(err, EINVAL, "PARKRESERVE: key %u is zero", k);
    unreserve(p, s);
    for (uint32_t k = 0; k < r->blocks; k++)
        reply->state[k] = reserve_one(p, s, &r->key[2 * k], &r->parent[2 * k], &reply->slot[k]);
    return 0;
}

static uint32_t *reservation(struct exd_park *p, struct exd_park_session *s, uint32_t slot)
{
    for (uint32_t i = 0; slot < p->used && i < s->reservations; i++)
        if (s->reservation[i] == slot + 1)
            return &s->reservation[i];
    return NULL;
}

int exd_park_commit(struct exd_park *p, const struct prt_parkcommit_request *r,
                    struct prt_parkcommit_reply *reply, struct shm_error *err)
{
    struct exd_park_session *s = session(p, r->session, "PARKCOMMIT", err);
    if (!s)
        return -EINVAL;
    for (uint32_t k = 0; k < r->blocks; k++)
        if (!reservation(p, s, r->slot[k]))
            return shm_error_set(err, EINVAL, "PARKCOMMIT: slot %u is not reserved by session %llu",
                                 r->slot[k], (unsigned long long)r->session);
    uint32_t kept[PRT_PARK_BATCH], n = 0;
    for (uint32_t k = 0; k < r->blocks; k++) {
        uint32_t *of = reservation(p, s, r->slot[k]);
        if (!of) /* named twice */
            continue;
        struct exd_block *b = exd_block(p, *of);
        memcpy(b->checksum, &r->checksum[2 * k], sizeof b->checksum);
        b->state = EXD_BLOCK_KEPT;
        p->reserved--;
        p->kept++;
        p->committed++;
        exd_index_age_add(p, *of);
        kept[n++] = *of;
        *of = 0;
    }
    reply->kept = n;
    for (uint32_t k = 0; k < n; k++) {
        bool inner = false; /* used by the one that continues it */
        for (uint32_t j = k + 1; j < n && !inner; j++)
            inner =
                memcmp(exd_block(p, kept[j])->parent, exd_block(p, kept[k])->key, sizeof(uint64_t[2])) == 0;
        if (!inner)
            exd_index_use(p, kept[k]);
    }
    return 0;
}

int exd_park_done(struct exd_park *p, const struct prt_parkdone_request *r, struct prt_parkdone_reply *reply,
                  struct shm_error *err)
{
    struct exd_park_session *s = session(p, r->session, "PARKDONE", err);
    if (!s)
        return -EINVAL;
    for (uint32_t k = 0; k < r->wrong; k++) {
        bool held = false;
        for (uint32_t i = 0; i < s->pins; i++)
            held = held || s->pin[i] - 1 == r->slot[k];
        if (!held)
            return shm_error_set(err, EINVAL, "PARKDONE: slot %u was not given to session %llu", r->slot[k],
                                 (unsigned long long)r->session);
    }
    for (uint32_t k = 0; k < r->wrong; k++)
        if (exd_block(p, r->slot[k] + 1)->state == EXD_BLOCK_KEPT) {
            drop(p, r->slot[k] + 1);
            p->wrong++;
            reply->dropped++;
        }
    unpin(p, s);
    return 0;
}
