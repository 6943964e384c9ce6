/* SPDX-License-Identifier: MIT */
#include "sim_world.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BIT(i)    (UINT64_C(1) << (i))
#define QUEUE_MAX (2 * SIM_ENTRIES_MAX + SIM_LAYERS_MAX)

enum actor { ACTOR_WALK, ACTOR_LINK, ACTOR_CONSUMER, ACTOR_PUBLISHER, ACTOR_LOADER, ACTOR_COUNT };
enum ending { END_OK, END_CANCEL, END_DEATH, END_FAILED };
enum phase { PHASE_PUBLISH, PHASE_WAIT, PHASE_RUN };

struct op {
    bool signal;
    uint32_t slot, stamp;
    uint64_t groups;
};

struct world {
    uint64_t rng;
    struct sim_checker *c;
    struct sim_stream s;
    struct sim_cover *cover;
    bool verbose;
    /* Pace of this schedule. */
    uint32_t weight[ACTOR_COUNT];
    uint32_t motion;   /* of 64 calls of the environment this many move the world */
    bool ahead;        /* routing sets are published by an actor of their own */
    bool whole_layers; /* see together() */
    /* Shared state. */
    uint64_t loaded[SIM_LAYERS_MAX];
    uint32_t content[SIM_RING_MAX];
    struct op queue[QUEUE_MAX];
    uint32_t head, tail;
    struct shm_mask routed_mask[SIM_LAYERS_MAX], resident_mask[SIM_LAYERS_MAX];
    uint32_t expected[SIM_LAYERS_MAX][SIM_EXPERTS_MAX];
    struct exd_trust trust; /* the last answer about them */
    bool counted;           /* it had counts */
    uint32_t sure;
    uint32_t expects; /* 0 nothing, 1 counts, 2 counts with confidence, 3 any of them at each call */
    /* Consumer. */
    uint32_t layer, group;
    enum phase phase;
    uint32_t publish_next;
    /* Progress. */
    bool changed, moved;
    uint64_t hash, issue_fails_at, signal_fails_at, events;
};

static uint64_t rnd(struct world *w)
{
    w->rng ^= w->rng >> 12;
    w->rng ^= w->rng << 25;
    w->rng ^= w->rng >> 27;
    return w->rng * UINT64_C(0x2545f4914f6cdd1d);
}

static uint32_t below(struct world *w, uint32_t n)
{
    return (uint32_t)((rnd(w) >> 32) * n >> 32);
}

static uint64_t seed_mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    x ^= x >> 31;
    return x ? x : 1;
}

static void mix(struct world *w, uint64_t a)
{
    w->hash = (w->hash ^ a) * UINT64_C(0x100000001b3);
}

#define SAY(w, ...)                                                                                          \
    do {                                                                                                     \
        if ((w)->verbose)                                                                                    \
            printf(__VA_ARGS__);                                                                             \
    } while (0)

/* ---- moves of the world ---- */

static void move_link(struct world *w)
{
    struct op *op = &w->queue[w->head++];
    if (op->signal) {
        SAY(w, "    link: %llu groups landed\n", (unsigned long long)op->groups);
        sim_checker_land_signal(w->c, op->groups);
        return;
    }
    w->content[op->slot] = op->stamp;
    SAY(w, "    link: slot %u landed\n", op->slot);
    sim_checker_land(w->c);
}

static void publish(struct world *w, uint32_t layer)
{
    SAY(w, "    publish layer %u: %llx\n", layer, (unsigned long long)w->s.routed[layer]);
    sim_checker_publish(w->c, layer);
}

/* Reads the routed entries that the table puts into the consumer's group. */
static void read_group(struct world *w, bool again)
{
    const struct sim_stream *s = &w->s;
    uint64_t group = (uint64_t)w->layer * s->groups_per_layer + w->group;
    for (uint64_t m = s->routed[w->layer] & ~s->resident[w->layer]; m; m &= m - 1) {
        uint32_t e = (uint32_t)__builtin_ctzll(m);
        uint32_t entry = w->c->table[w->layer][e], slot = shm_entry_slot(entry);
        if (shm_entry_state(entry) != SHM_ENTRY_SLOT || shm_entry_group(entry) != w->group || slot >= s->ring)
            continue;
        sim_checker_read(w->c, w->layer, e, group, slot, w->content[slot], again);
    }
}

static void release_group(struct world *w)
{
    const struct sim_stream *s = &w->s;
    for (uint32_t e = 0; e < s->experts; e++) {
        uint32_t entry = w->c->table[w->layer][e], slot = shm_entry_slot(entry);
        if (shm_entry_state(entry) == SHM_ENTRY_SLOT && shm_entry_group(entry) == w->group && slot < s->ring)
            w->content[slot] = SIM_POISON;
    }
    SAY(w, "    release layer %u group %u\n", w->layer, w->group);
    sim_checker_release(w->c, (uint64_t)w->layer * s->groups_per_layer + w->group);
}

/* A worker on a GPU takes a layer of a small chunk as a whole where its routed entries fit into the ring. */
static bool together(const struct world *w)
{
    return w->whole_layers && w->s.policy == SHM_POLICY_DEMAND &&
           (uint32_t)__builtin_popcountll(w->s.routed[w->layer] & ~w->s.resident[w->layer]) <= w->s.ring;
}

static bool consumer_can_move(const struct world *w)
{
    if (w->layer == w->s.layers)
        return false;
    if (w->phase == PHASE_PUBLISH)
        return !w->ahead || w->publish_next > w->layer;
    const uint64_t base = (uint64_t)w->layer * w->s.groups_per_layer;
    return w->phase == PHASE_RUN ||
           w->c->landed_groups > base + (together(w) ? w->s.groups_per_layer - 1 : w->group);
}

static void move_consumer(struct world *w)
{
    switch (w->phase) {
    case PHASE_PUBLISH:
        if (!w->ahead)
            publish(w, w->layer);
        w->phase = PHASE_WAIT;
        break;
    case PHASE_WAIT:
        read_group(w, false);
        w->phase = PHASE_RUN;
        break;
    case PHASE_RUN:
        read_group(w, true);
        release_group(w);
        w->phase = PHASE_WAIT;
        if (++w->group < w->s.groups_per_layer)
            break;
        sim_checker_layer_end(w->c, w->layer);
        w->group = 0;
        w->layer++;
        w->phase = PHASE_PUBLISH;
        break;
    }
}

static uint64_t all_experts(const struct sim_stream *s)
{
    return s->experts == 64 ? ~UINT64_C(0) : BIT(s->experts) - 1;
}

static bool loader_can_move(const struct world *w)
{
    for (uint32_t l = 0; l < w->s.layers; l++)
        if (~w->loaded[l] & all_experts(&w->s))
            return true;
    return false;
}

static void move_loader(struct world *w)
{
    uint32_t l = below(w, 4) ? 0 : below(w, w->s.layers);
    while (!(~w->loaded[l] & all_experts(&w->s)))
        l = (l + 1) % w->s.layers;
    uint64_t missing = ~w->loaded[l] & all_experts(&w->s);
    uint32_t e = (uint32_t)__builtin_ctzll(missing);
    if (!below(w, 3))
        e = 63 - (uint32_t)__builtin_clzll(missing);
    w->loaded[l] |= BIT(e);
    sim_checker_load(w->c, l, e);
}

static uint32_t able(const struct world *w)
{
    uint32_t can = 0;
    if (w->head < w->tail)
        can |= 1u << ACTOR_LINK;
    if (consumer_can_move(w))
        can |= 1u << ACTOR_CONSUMER;
    if (w->ahead && w->publish_next < w->s.layers)
        can |= 1u << ACTOR_PUBLISHER;
    if (loader_can_move(w))
        can |= 1u << ACTOR_LOADER;
    return can;
}

static enum actor choose(struct world *w, uint32_t can)
{
    uint32_t sum = 0;
    for (uint32_t a = 0; a < ACTOR_COUNT; a++)
        if (can >> a & 1)
            sum += w->weight[a];
    uint32_t pick = below(w, sum), a = 0;
    for (;; a++) {
        if (!(can >> a & 1))
            continue;
        if (pick < w->weight[a])
            return (enum actor)a;
        pick -= w->weight[a];
    }
}

static void move(struct world *w, enum actor who)
{
    w->changed = true;
    if (who == ACTOR_LINK)
        move_link(w);
    else if (who == ACTOR_CONSUMER)
        move_consumer(w);
    else if (who == ACTOR_PUBLISHER)
        publish(w, w->publish_next++);
    else
        move_loader(w);
}

/* The world does not stand still while the walk makes a step. */
static void drift(struct world *w)
{
    if (!w->motion || below(w, 64) >= w->motion)
        return;
    uint32_t can = able(w);
    if (!can)
        return;
    w->moved = true;
    move(w, choose(w, can));
}

/* ---- environment of the walk ---- */

static uint64_t env_released(void *ctx)
{
    struct world *w = ctx;
    drift(w);
    return w->c->released;
}

static uint64_t env_landed(void *ctx)
{
    struct world *w = ctx;
    drift(w);
    return w->c->n_landed;
}

static const struct shm_mask *env_published(void *ctx, uint32_t layer)
{
    struct world *w = ctx;
    sim_checker_gate_called(w->c, "published");
    drift(w);
    return layer < w->s.layers && (w->c->published & BIT(layer)) ? &w->routed_mask[layer] : NULL;
}

static const uint32_t *env_expected(void *ctx, uint32_t layer, struct exd_trust *ret_trust)
{
    struct world *w = ctx;
    sim_checker_gate_called(w->c, "expected");
    drift(w);
    uint32_t kind = w->expects == 3 ? below(w, 3) : w->expects;
    w->counted = kind;
    w->trust = (struct exd_trust){.confident = kind == 2, .sure = w->sure};
    *ret_trust = w->trust;
    return kind ? w->expected[layer] : NULL;
}

static bool env_loaded(void *ctx, uint32_t layer, uint32_t expert)
{
    struct world *w = ctx;
    drift(w);
    return w->loaded[layer] >> expert & 1;
}

static void env_decide(void *ctx, uint32_t layer, uint32_t expert, uint32_t state, uint32_t group,
                       uint32_t slot)
{
    struct world *w = ctx;
    mix(w, UINT64_C(1) << 60 | (uint64_t)layer << 48 | expert << 2 | state);
    mix(w, (uint64_t)group << 32 | slot);
    sim_checker_decide(w->c, layer, expert, state, group, slot);
}

static int env_issue(void *ctx, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot,
                     uint64_t group, bool certain)
{
    struct world *w = ctx;
    mix(w, UINT64_C(2) << 60 | (uint64_t)layer << 48 | expert);
    if (w->s.policy != SHM_POLICY_FULL && w->s.order != SHM_ORDER_INDEX && !(w->c->published & BIT(layer)) &&
        w->counted && w->trust.confident && !w->expected[layer][expert])
        sim_checker_fail(w->c, 3, "layer %u expert %u copied blind, confidently expected to be unused", layer,
                         expert);
    mix(w, entry << 40 | group << 20 | slot);
    if (w->c->n_issued == w->issue_fails_at)
        return -EIO;
    SAY(w, "  issue entry %llu: layer %u expert %u slot %u group %llu\n", (unsigned long long)entry, layer,
        expert, slot, (unsigned long long)group);
    bool sure = w->s.policy == SHM_POLICY_ROUTED && !(w->c->published & BIT(layer)) &&
                (w->trust.sure == 0 || (w->s.order != SHM_ORDER_INDEX && w->counted &&
                                        w->expected[layer][expert] >= w->trust.sure));
    sim_checker_issue(w->c, layer, expert, entry, slot, group, certain, sure);
    if (w->c->invariant || w->tail == QUEUE_MAX)
        return -EPROTO;
    w->content[slot] = SIM_POISON;
    w->queue[w->tail++] = (struct op){.slot = slot, .stamp = sim_stamp(&w->s, layer, expert)};
    return 0;
}

static int env_signal(void *ctx, uint64_t groups)
{
    struct world *w = ctx;
    mix(w, UINT64_C(3) << 60 | groups);
    if (w->c->n_signals == w->signal_fails_at)
        return -EIO;
    SAY(w, "  signal %llu groups\n", (unsigned long long)groups);
    sim_checker_signal(w->c, groups);
    if (w->c->invariant || w->tail == QUEUE_MAX)
        return -EPROTO;
    w->queue[w->tail++] = (struct op){.signal = true, .groups = groups};
    return 0;
}

/* ---- streams ---- */

static void stuck(struct world *w, enum exd_step step)
{
    sim_checker_fail(w->c, 8,
                     "nothing can move: walk %s, consumer at layer %u group %u, %llu groups signalled, "
                     "%llu landed",
                     exd_step_name(step), w->layer, w->group, (unsigned long long)w->c->signalled,
                     (unsigned long long)w->c->landed_groups);
}

static enum exd_step one_step(struct world *w, struct exd_walk *walk)
{
    w->changed = false;
    w->moved = false;
    sim_checker_step_begin(w->c);
    enum exd_step step = exd_walk_step(walk);
    mix(w, step);
    w->cover->wait[step]++;
    w->cover->steps++;
    sim_checker_step_end(w->c, step, walk);
    if (step != EXD_STEP_AGAIN)
        SAY(w, "  walk: %s\n", exd_step_name(step));
    return step;
}

/* One stream from start to its end or to the event where it is interrupted. */
static enum ending run_stream(struct world *w, struct exd_walk *walk, uint64_t stop_at, enum ending stop_as)
{
    const struct sim_stream *s = &w->s;
    struct exd_walk_config config = {
        .layers = s->layers,
        .experts = s->experts,
        .ring = s->ring,
        .group_entries = s->group_entries,
        .groups_per_layer = s->groups_per_layer,
        .policy = s->policy,
        .order = s->order,
        .depth = s->depth,
        .resident = w->resident_mask,
    };
    struct exd_walk_env env = {w,          env_released, env_landed, env_published, env_expected,
                               env_loaded, env_decide,   env_issue,  env_signal};
    struct shm_error err;

    sim_checker_begin(w->c, s, w->loaded);
    w->head = w->tail = 0;
    w->layer = w->group = w->publish_next = 0;
    w->phase = PHASE_PUBLISH;
    w->hash = 0;
    w->events = 0;
    if (exd_walk_start(walk, &config, &env, &err)) {
        sim_checker_fail(w->c, 10, "start refused: %s", err.text);
        return END_FAILED;
    }
    enum exd_step step = EXD_STEP_AGAIN;
    w->changed = true;
    while (!w->c->invariant) {
        if (w->events++ == stop_at)
            return stop_as;
        if (step == EXD_STEP_DONE && w->layer == s->layers && w->head == w->tail) {
            if (one_step(w, walk) == EXD_STEP_DONE)
                sim_checker_end(w->c, walk);
            return END_OK;
        }
        uint32_t can = able(w);
        /* A walk that waits is asked again when something moved, and now and then for nothing. */
        if (step != EXD_STEP_DONE && (step == EXD_STEP_AGAIN || w->changed || (can && !below(w, 32))))
            can |= 1u << ACTOR_WALK;
        if (!can) {
            stuck(w, step);
            break;
        }
        enum actor who = choose(w, can);
        if (who != ACTOR_WALK) {
            move(w, who);
            continue;
        }
        step = one_step(w, walk);
        if (step != EXD_STEP_FAILED)
            continue;
        if (w->c->invariant)
            break;
        bool told = exd_walk_status(walk) == -EIO && one_step(w, walk) == EXD_STEP_FAILED;
        bool cause = w->issue_fails_at != UINT64_MAX || w->signal_fails_at != UINT64_MAX;
        if (!told || !cause)
            sim_checker_fail(w->c, 10, "failed with status %d", exd_walk_status(walk));
        return END_FAILED;
    }
    return END_FAILED;
}

static uint64_t random_set(struct world *w, uint32_t kind, uint32_t share)
{
    uint64_t set = 0;
    if (kind == 0)
        return 0;
    if (kind == 1)
        return all_experts(&w->s);
    for (uint32_t e = 0; e < w->s.experts; e++) {
        /* Skewed: low numbers are hot. */
        uint32_t p = kind == 2 ? share : 64 * 4 / (e + 4);
        if (below(w, 64) < p)
            set |= BIT(e);
    }
    return set;
}

static uint32_t skewed(struct world *w, uint32_t max)
{
    return 1 + below(w, 1 + below(w, 1 + below(w, max)));
}

static void make_shape(struct world *w)
{
    struct sim_stream *s = &w->s;
    s->layers = skewed(w, SIM_LAYERS_MAX);
    uint32_t size = below(w, 16);
    s->experts = 1 + below(w, size < 8 ? 8 : size < 15 ? 24 : SIM_EXPERTS_MAX);
    switch (below(w, 4)) {
    case 0:
        s->ring = 1 + below(w, 4);
        break;
    case 1:
        s->ring = 1 + below(w, s->experts);
        break;
    default:
        s->ring = 1 + below(w, 3 * s->experts + 4);
    }
    s->group_entries = shm_group_entries(s->ring);
    s->groups_per_layer = shm_groups_per_layer(s->experts, s->group_entries);
}

static void make_stream(struct world *w)
{
    struct sim_stream *s = &w->s;
    s->policy = 1 + below(w, 3);
    s->order = 1 + below(w, 3);
    s->depth = below(w, 2) ? 1 + below(w, 4) : 1 + below(w, 64);
    s->number++;
    uint32_t share = below(w, 65), resident_share = below(w, 3) ? below(w, 32) : 0;
    for (uint32_t l = 0; l < s->layers; l++) {
        s->routed[l] = random_set(w, below(w, 8) < 6 ? 2 + below(w, 2) : below(w, 2), share);
        s->resident[l] = resident_share ? random_set(w, below(w, 16) ? 2 : 1, resident_share) : 0;
        memset(&w->routed_mask[l], 0, sizeof w->routed_mask[l]);
        memset(&w->resident_mask[l], 0, sizeof w->resident_mask[l]);
        w->routed_mask[l].word[0] = s->routed[l];
        w->resident_mask[l].word[0] = s->resident[l];
        for (uint32_t e = 0; e < s->experts; e++)
            w->expected[l][e] = below(w, 3) ? (s->routed[l] >> e & 1) * below(w, 100) : below(w, 3);
    }
    w->expects = below(w, 4);
    w->sure = below(w, 2) ? UINT32_MAX : below(w, 8) ? 1 + below(w, 100) : 0;
    w->issue_fails_at = w->signal_fails_at = UINT64_MAX;
    if (!below(w, 64))
        *(below(w, 2) ? &w->issue_fails_at : &w->signal_fails_at) = below(w, 32);
}

static void make_pace(struct world *w)
{
    static const uint32_t pace[] = {1, 1, 4, 16, 64};
    for (uint32_t a = 0; a < ACTOR_COUNT; a++)
        w->weight[a] = pace[below(w, 5)];
    w->ahead = !below(w, 4);
    w->whole_layers = !below(w, 2);
    w->motion = below(w, 2) ? 0 : 1 + below(w, 16);
}

static int verdict(const struct world *w, uint64_t seed, uint32_t stream, struct sim_result *ret_result)
{
    static const char *const policies[] = {"", "full", "routed", "demand"};
    static const char *const orders[] = {"", "index", "recent", "predicted"};
    const struct sim_stream *s = &w->s;
    ret_result->invariant = w->c->invariant;
    snprintf(
        ret_result->text, sizeof ret_result->text,
        "seed %llu: invariant %d: %s [stream %u, %u layers x %u experts, ring %u, groups of %u, policy %s, "
        "order %s, depth %u]",
        (unsigned long long)seed, w->c->invariant, w->c->text, stream, s->layers, s->experts, s->ring,
        s->group_entries, policies[s->policy], orders[s->order], s->depth);
    return w->c->invariant;
}

static void count_stream(struct world *w, enum ending end)
{
    struct sim_cover *v = w->cover;
    v->streams++;
    v->policy[w->s.policy]++;
    v->order[w->s.order]++;
    v->issued += w->c->n_issued;
    v->dropped += w->c->n_dropped;
    v->cancelled += end == END_CANCEL;
    v->died += end == END_DEATH;
    v->failed += end == END_FAILED;
}

/* Runs the stream that w describes; when it is not the walk's first, a new walk must do exactly the same. */
static enum ending run_compared(struct world *w, struct exd_walk *walk, uint64_t stop_at, enum ending stop_as)
{
    static struct world before;
    static struct sim_checker checker_before;
    before = *w;
    checker_before = *w->c;
    enum ending end = run_stream(w, walk, stop_at, stop_as);
    if (w->c->invariant)
        return end;
    uint64_t hash = w->hash;
    *w = before;
    *w->c = checker_before;
    struct exd_walk *fresh = exd_walk_new(w->s.layers, w->s.experts, w->s.ring);
    if (!fresh)
        abort();
    enum ending again = run_stream(w, fresh, stop_at, stop_as);
    exd_walk_free(&fresh);
    w->cover->compared++;
    if (again != end || w->hash != hash)
        sim_checker_fail(w->c, 10, "a stream after another differs from the same stream on a new walk");
    return end;
}

int sim_schedule(uint64_t seed, bool verbose, struct sim_cover *cover, struct sim_result *ret_result)
{
    static struct sim_checker checker;
    static struct world world;
    struct world *w = &world;
    checker.invariant = 0;
    w->c = &checker;
    w->cover = cover;
    w->verbose = verbose;
    w->rng = seed_mix(seed);
    w->s.number = 0;
    cover->schedules++;

    make_shape(w);
    make_pace(w);
    bool loading = !below(w, 4);
    for (uint32_t l = 0; l < SIM_LAYERS_MAX; l++)
        w->loaded[l] = loading ? 0 : ~UINT64_C(0);
    /* Whatever an earlier life left in table and slots must not matter. */
    for (uint32_t l = 0; l < w->s.layers; l++)
        for (uint32_t e = 0; e < w->s.experts; e++)
            checker.table[l][e] =
                shm_entry_make(below(w, 4), below(w, w->s.groups_per_layer), below(w, w->s.ring));
    for (uint32_t i = 0; i < w->s.ring; i++)
        w->content[i] = SIM_POISON;

    struct exd_walk *walk = exd_walk_new(w->s.layers, w->s.experts, w->s.ring);
    if (!walk)
        abort();
    uint32_t streams = 1 + below(w, 4);
    for (uint32_t i = 0; i < streams && !w->c->invariant; i++) {
        make_stream(w);
        uint64_t stop_at = UINT64_MAX;
        enum ending stop_as = END_CANCEL;
        if (!below(w, 4)) {
            stop_at = below(w, 1 + 6 * w->s.layers * w->s.experts);
            stop_as = below(w, 2) ? END_CANCEL : END_DEATH;
        }
        SAY(w, "stream %u: %u layers x %u experts, ring %u, policy %u, order %u, depth %u\n", i, w->s.layers,
            w->s.experts, w->s.ring, w->s.policy, w->s.order, w->s.depth);
        enum ending end = i && !below(w, 4) ? run_compared(w, walk, stop_at, stop_as)
                                            : run_stream(w, walk, stop_at, stop_as);
        count_stream(w, end);
        if (w->c->invariant)
            return exd_walk_free(&walk), verdict(w, seed, i, ret_result);
        /* Cancelled: what is on the link still lands. A dead worker's copies are gone. */
        while (end == END_CANCEL && w->head < w->tail)
            move_link(w);
    }
    exd_walk_free(&walk);
    ret_result->invariant = 0;
    return 0;
}
