/* SPDX-License-Identifier: MIT */
#include "expertd/exd_walk.h"

#include "shm/shm_worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Test builds of this file break one rule at a time to prove that the
 * simulation notices (tests/sim). Constant false in production. */
#ifdef EXD_WALK_MUTANTS
#include "tests/sim/sim_mutant.h"
#define EXD_MUTANT(n) (sim_mutant == (n))
#else
#define EXD_MUTANT(n) 0
#endif

struct exd_walk {
    uint32_t layers_max, experts_max, ring_max;
    struct exd_walk_config config;
    struct exd_walk_env env;
    struct exd_walk_counts counts;
    enum exd_step (*decide_next)(struct exd_walk *);
    enum exd_step last;
    int status;

    uint32_t layer;       /* being issued */
    bool layer_open;      /* its table row was reset and todo filled */
    struct shm_mask todo; /* its streamed experts without a decision */
    uint32_t cursor;      /* index order: experts below it are decided */
    uint32_t group;       /* of the layer, being filled */
    uint32_t in_group;    /* entries in it */
    uint32_t group_limit; /* entries that fill a group of this layer */
    uint64_t entry;       /* number of the next entry */
    uint64_t signalled;   /* groups */
    /* Per slot: 1 + group of the last entry that was given the slot in this
     * stream, 0 for none. Releases are in order, so when that group is
     * released every earlier user of the slot is. */
    uint64_t *slot_group;
};

const char *exd_step_name(enum exd_step step)
{
    static const char *const names[EXD_STEP_COUNT] = {
        [EXD_STEP_AGAIN] = "again",
        [EXD_STEP_WAIT_SLOT] = "wait for a release",
        [EXD_STEP_WAIT_DEPTH] = "wait for a landing",
        [EXD_STEP_WAIT_PUBLISH] = "wait for the routing set",
        [EXD_STEP_WAIT_BLOB] = "wait for the expert to be loaded",
        [EXD_STEP_DONE] = "done",
        [EXD_STEP_FAILED] = "failed",
    };
    return step < EXD_STEP_COUNT ? names[step] : "unknown";
}

struct exd_walk *exd_walk_new(uint32_t layers, uint32_t experts, uint32_t ring)
{
    struct exd_walk *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->slot_group = calloc(ring, sizeof *w->slot_group);
    if (!w->slot_group) {
        free(w);
        return NULL;
    }
    w->layers_max = layers;
    w->experts_max = experts;
    w->ring_max = ring;
    w->last = EXD_STEP_DONE;
    return w;
}

void exd_walk_free(struct exd_walk **walk)
{
    if (!*walk)
        return;
    free((*walk)->slot_group);
    free(*walk);
    *walk = NULL;
}

static bool slot_free(const struct exd_walk *w, uint64_t entry)
{
    uint64_t last = w->slot_group[entry % w->config.ring];
    if (EXD_MUTANT(SIM_MUTANT_RING_OVERRUN))
        return last == 0 || w->env.released(w->env.ctx) + 1 >= last;
    return last == 0 || w->env.released(w->env.ctx) >= last;
}

static uint64_t outstanding(const struct exd_walk *w)
{
    return w->counts.issued - w->env.landed(w->env.ctx);
}

/* Room on the link for one more copy. */
static bool room(const struct exd_walk *w, bool certain)
{
    uint64_t limit = w->config.depth;
    if (certain && limit < EXD_WALK_CERTAIN_MAX)
        limit = EXD_WALK_CERTAIN_MAX + (EXD_MUTANT(SIM_MUTANT_CERTAIN_PLUS_ONE) ? 1 : 0);
    else if (!certain && w->config.order != SHM_ORDER_INDEX && limit > EXD_WALK_BLIND_MAX)
        limit = EXD_WALK_BLIND_MAX + (EXD_MUTANT(SIM_MUTANT_BLIND_PLUS_ONE) ? 1 : 0);
    return outstanding(w) < limit + (EXD_MUTANT(SIM_MUTANT_DEPTH_PLUS_ONE) ? 1 : 0);
}

static enum exd_step fail(struct exd_walk *w, int status)
{
    w->status = status;
    return EXD_STEP_FAILED;
}

/* Signals all groups below `groups`, unless that was done. */
static int signal_to(struct exd_walk *w, uint64_t groups)
{
    if (groups <= w->signalled)
        return 0;
    w->signalled = groups;
    w->counts.signals++;
    return w->env.signal(w->env.ctx, groups);
}

static uint64_t first_group(const struct exd_walk *w)
{
    return (uint64_t)w->layer * w->config.groups_per_layer;
}

/* Counts one entry into the open group and closes the group when it is full. */
static int fill_group(struct exd_walk *w)
{
    w->entry++;
    if (++w->in_group < w->group_limit + (EXD_MUTANT(SIM_MUTANT_GROUP_TOO_LARGE) ? 1 : 0))
        return 0;
    w->in_group = 0;
    w->group++;
    return signal_to(w, first_group(w) + w->group);
}

/* A layer begins: nothing of its table row from an earlier stream may be read,
 * so the row is reset before anything of this layer is signalled. */
static void open_layer(struct exd_walk *w)
{
    const struct shm_mask *resident = &w->config.resident[w->layer];
    memset(&w->todo, 0, sizeof w->todo);
    for (uint32_t e = 0; e < w->config.experts; e++) {
        bool is_resident = shm_mask_test(resident, e);
        if (!is_resident) {
            shm_mask_set(&w->todo, e);
            w->counts.entries++;
        }
        if (!EXD_MUTANT(SIM_MUTANT_STALE_TABLE))
            w->env.decide(w->env.ctx, w->layer, e, is_resident ? SHM_ENTRY_RESIDENT : SHM_ENTRY_NONE, 0, 0);
    }
    w->cursor = 0;
    w->group = 0;
    w->in_group = 0;
    w->group_limit = w->config.group_entries;
    w->layer_open = true;
}

/* The layer's entries are all decided: its part-filled and its unused groups
 * are signalled with one store. */
static enum exd_step close_layer(struct exd_walk *w)
{
    if (!EXD_MUTANT(SIM_MUTANT_FORGET_UNUSED_GROUPS)) {
        int rc = signal_to(w, first_group(w) + w->config.groups_per_layer);
        if (rc)
            return fail(w, rc);
    }
    w->layer++;
    w->layer_open = false;
    return EXD_STEP_AGAIN;
}

static void todo_clear(struct exd_walk *w, uint32_t e)
{
    w->todo.word[e / 64] &= ~(UINT64_C(1) << (e % 64));
}

static void drop(struct exd_walk *w, uint32_t e)
{
    todo_clear(w, e);
    w->counts.dropped++;
    w->env.decide(w->env.ctx, w->layer, e, SHM_ENTRY_DROPPED, 0, 0);
}

static enum exd_step issue(struct exd_walk *w, uint32_t e, bool certain)
{
    uint32_t slot = (uint32_t)(w->entry % w->config.ring);
    uint64_t group = first_group(w) + w->group;
    if (EXD_MUTANT(SIM_MUTANT_WRONG_SLOT))
        slot = (uint32_t)((w->entry + 1) % w->config.ring);
    if (!EXD_MUTANT(SIM_MUTANT_COPY_TWICE) || w->entry % 7)
        todo_clear(w, e);
    w->slot_group[slot] = group + 1;
    uint32_t in_layer = w->group;
    if (!EXD_MUTANT(SIM_MUTANT_TABLE_AFTER_SIGNAL))
        w->env.decide(w->env.ctx, w->layer, e, SHM_ENTRY_SLOT, in_layer, slot);
    int rc;
    if (EXD_MUTANT(SIM_MUTANT_SIGNAL_BEFORE_COPY) && w->in_group + 1 == w->config.group_entries &&
        (rc = signal_to(w, group + 1)))
        return fail(w, rc);
    rc = w->env.issue(w->env.ctx, w->layer, e, w->entry, slot, group, certain);
    if (rc)
        return fail(w, rc);
    w->counts.issued++;
    uint64_t queued = certain && w->config.policy != SHM_POLICY_FULL ? 0 : outstanding(w);
    if (queued > w->counts.outstanding_max)
        w->counts.outstanding_max = queued;
    rc = fill_group(w);
    if (EXD_MUTANT(SIM_MUTANT_TABLE_AFTER_SIGNAL))
        w->env.decide(w->env.ctx, w->layer, e, SHM_ENTRY_SLOT, in_layer, slot);
    return rc ? fail(w, rc) : EXD_STEP_AGAIN;
}

/* Next undecided streamed expert by index, or experts. */
static uint32_t next_by_index(struct exd_walk *w)
{
    uint32_t e = w->cursor;
    while (e < w->config.experts && !shm_mask_test(&w->todo, e))
        e++;
    w->cursor = e;
    return e;
}

/* Full: every streamed expert, in the file's order. No gate. */
static enum exd_step step_full(struct exd_walk *w)
{
    uint32_t e = next_by_index(w);
    if (e == w->config.experts)
        return close_layer(w);
    if (EXD_MUTANT(SIM_MUTANT_FULL_LOOKS_AT_GATE))
        w->env.published(w->env.ctx, w->layer);
    if (!slot_free(w, w->entry))
        return EXD_STEP_WAIT_SLOT;
    if (!w->env.loaded(w->env.ctx, w->layer, e) && !EXD_MUTANT(SIM_MUTANT_IGNORE_LOADED))
        return EXD_STEP_WAIT_BLOB;
    return issue(w, e, true);
}

/* Routed by index: a dropped entry keeps its number, so entry k has the slot
 * it has under the full policy. It may be dropped before its slot is free:
 * nothing is written there. */
static enum exd_step step_index(struct exd_walk *w)
{
    static const struct shm_mask nobody; /* for mutants */
    uint32_t e = next_by_index(w);
    if (e == w->config.experts)
        return close_layer(w);
    const struct shm_mask *routed = w->env.published(w->env.ctx, w->layer);
    if (EXD_MUTANT(SIM_MUTANT_DROP_BEFORE_PUBLISH) && !routed && e % 5 == 1)
        routed = &nobody;
    if (EXD_MUTANT(SIM_MUTANT_DROP_ROUTED) && routed && e % 5 == 1)
        routed = &nobody;
    if (EXD_MUTANT(SIM_MUTANT_NO_RECHECK) && w->last != EXD_STEP_AGAIN)
        routed = NULL; /* what was seen before the wait still counts */
    if (routed && !shm_mask_test(routed, e)) {
        drop(w, e);
        w->slot_group[w->entry % w->config.ring] = first_group(w) + w->group + 1;
        if (EXD_MUTANT(SIM_MUTANT_DROPPED_GROUP_NOT_SIGNALLED) &&
            w->in_group + 1 == w->config.group_entries) {
            w->entry++, w->in_group = 0, w->group++;
            return EXD_STEP_AGAIN;
        }
        int rc = fill_group(w);
        return rc ? fail(w, rc) : EXD_STEP_AGAIN;
    }
    if (!slot_free(w, w->entry))
        return EXD_STEP_WAIT_SLOT;
    struct exd_trust trust = {.sure = UINT32_MAX};
    if (!routed)
        w->env.expected(w->env.ctx, w->layer, &trust);
    bool certain = routed || trust.sure == 0 || EXD_MUTANT(SIM_MUTANT_GUESS_IS_CERTAIN);
    if (!room(w, certain))
        return EXD_STEP_WAIT_DEPTH;
    if (!w->env.loaded(w->env.ctx, w->layer, e) && !EXD_MUTANT(SIM_MUTANT_IGNORE_LOADED))
        return EXD_STEP_WAIT_BLOB;
    return issue(w, e, certain);
}

/* Highest expected use among the undecided; lowest id on ties and without
 * expectations. todo is not empty. */
static uint32_t choose(const struct exd_walk *w, const uint32_t *expected)
{
    uint32_t best = UINT32_MAX, best_expected = 0;
    for (uint32_t word = 0; word * 64 < w->config.experts; word++)
        for (uint64_t bits = w->todo.word[word]; bits; bits &= bits - 1) {
            uint32_t e = word * 64 + (uint32_t)__builtin_ctzll(bits);
            uint32_t x = expected ? expected[e] : 0;
            if (best == UINT32_MAX || x > best_expected)
                best = e, best_expected = x;
        }
    return best;
}

static bool todo_empty(const struct exd_walk *w)
{
    uint64_t any = 0;
    for (uint32_t word = 0; word * 64 < w->config.experts; word++)
        any |= w->todo.word[word];
    return any == 0;
}

static void drop_unrouted(struct exd_walk *w, const struct shm_mask *routed)
{
    for (uint32_t word = 0; word * 64 < w->config.experts; word++)
        for (uint64_t bits = w->todo.word[word] & ~routed->word[word]; bits; bits &= bits - 1)
            drop(w, word * 64 + (uint32_t)__builtin_ctzll(bits));
}

/* On demand a layer's copies are all known before the first one and nothing overlaps them but the layer's own
 * computing: its groups are made about equally small, so that the last one does not keep the next layer
 * waiting. A few entries stay together: each signal costs the link a little. */
static void share_groups(struct exd_walk *w)
{
    uint32_t n = shm_mask_count(&w->todo, w->config.experts);
    uint32_t share = (n + w->config.groups_per_layer - 1) / w->config.groups_per_layer;
    if (n <= 2 * EXD_WALK_SHARE_MIN)
        share = n;
    else if (share < EXD_WALK_SHARE_MIN)
        share = EXD_WALK_SHARE_MIN;
    if (share && share < w->group_limit)
        w->group_limit = share;
}

/* Routed by expected use: which expert comes next is decided once a slot and
 * room on the link are there, with the newest knowledge. On demand also by
 * index: what is dropped may take no number there, since a consumer whose
 * routed entries all fit into the ring releases none of a layer's before it has all. */
static enum exd_step step_expected(struct exd_walk *w)
{
    const struct shm_mask *routed = w->env.published(w->env.ctx, w->layer);
    if (EXD_MUTANT(SIM_MUTANT_NO_RECHECK) && w->last != EXD_STEP_AGAIN)
        routed = NULL;
    if (routed)
        drop_unrouted(w, routed);
    if (routed && w->config.policy == SHM_POLICY_DEMAND && !w->group && !w->in_group)
        share_groups(w);
    if (todo_empty(w))
        return close_layer(w);
    if (!routed && w->config.policy == SHM_POLICY_DEMAND && !EXD_MUTANT(SIM_MUTANT_DEMAND_BLIND))
        return EXD_STEP_WAIT_PUBLISH;
    if (!slot_free(w, w->entry))
        return EXD_STEP_WAIT_SLOT;
    struct exd_trust trust = {.sure = UINT32_MAX};
    const uint32_t *expected = NULL;
    if (w->config.order != SHM_ORDER_INDEX)
        expected = w->env.expected(w->env.ctx, w->layer, &trust);
    uint32_t e = choose(w, expected);
    bool certain = routed || trust.sure == 0 || (expected && expected[e] >= trust.sure) ||
                   EXD_MUTANT(SIM_MUTANT_GUESS_IS_CERTAIN);
    if (!routed && trust.confident && expected && expected[e] == 0 &&
        !EXD_MUTANT(SIM_MUTANT_BLIND_UNEXPECTED))
        return EXD_STEP_WAIT_PUBLISH;
    if (!room(w, certain))
        return EXD_STEP_WAIT_DEPTH;
    if (!w->env.loaded(w->env.ctx, w->layer, e) && !EXD_MUTANT(SIM_MUTANT_IGNORE_LOADED))
        return EXD_STEP_WAIT_BLOB;
    return issue(w, e, certain);
}

static int bad_config(struct shm_error *err, const char *field, uint64_t value)
{
    return shm_error_set(err, EINVAL, "stream: %s %llu does not fit this worker", field,
                         (unsigned long long)value);
}

int exd_walk_start(struct exd_walk *w, const struct exd_walk_config *c, const struct exd_walk_env *env,
                   struct shm_error *err)
{
    if (!c->layers || c->layers > w->layers_max)
        return bad_config(err, "layers", c->layers);
    if (!c->experts || c->experts > w->experts_max)
        return bad_config(err, "experts", c->experts);
    if (!c->ring || c->ring > w->ring_max)
        return bad_config(err, "ring", c->ring);
    /* A group larger than the ring could never be completed. */
    if (!c->group_entries || c->group_entries > c->ring || c->group_entries > SHM_GROUP_MAX)
        return bad_config(err, "group_entries", c->group_entries);
    if ((uint64_t)c->groups_per_layer * c->group_entries < c->experts)
        return bad_config(err, "groups_per_layer", c->groups_per_layer);
    if (c->policy == SHM_POLICY_FULL)
        w->decide_next = step_full;
    else if (c->policy == SHM_POLICY_DEMAND)
        w->decide_next = step_expected;
    else if (c->policy == SHM_POLICY_ROUTED)
        w->decide_next = c->order == SHM_ORDER_INDEX ? step_index : step_expected;
    else
        return bad_config(err, "policy", c->policy);
    if (c->policy != SHM_POLICY_FULL && !c->depth)
        return bad_config(err, "depth", c->depth);

    w->config = *c;
    w->env = *env;
    memset(&w->counts, 0, sizeof w->counts);
    w->status = 0;
    w->last = EXD_STEP_AGAIN;
    w->layer = 0;
    if (!EXD_MUTANT(SIM_MUTANT_KEEP_LAYER))
        w->layer_open = false;
    w->entry = 0;
    w->signalled = 0;
    if (!EXD_MUTANT(SIM_MUTANT_KEEP_SLOTS))
        memset(w->slot_group, 0, c->ring * sizeof *w->slot_group);
    return 0;
}

enum exd_step exd_walk_step(struct exd_walk *w)
{
    if (w->last == EXD_STEP_DONE || w->last == EXD_STEP_FAILED)
        return w->last;
    if (w->layer == w->config.layers)
        return w->last = EXD_STEP_DONE;
    if (!w->layer_open)
        open_layer(w);
    return w->last = w->decide_next(w);
}

void exd_walk_position(const struct exd_walk *w, uint32_t *ret_layer, uint64_t *ret_entry)
{
    *ret_layer = w->layer;
    *ret_entry = w->entry;
}

struct exd_walk_counts exd_walk_counts(const struct exd_walk *w)
{
    return w->counts;
}

int exd_walk_status(const struct exd_walk *w)
{
    return w->status;
}
