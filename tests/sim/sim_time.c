/* SPDX-License-Identifier: MIT */
/*
 * The walk in time: production walk and trust over a link, an issuer and a
 * worker that take as long as was measured on a GPU (H200, PCIe 5 x16, experts
 * of 2.65 MB). Tells what each order reaches of the link's bound, before it is
 * tried on the device; a test holds it to what it should reach.
 *
 * Arguments: -v prints the table; LAYER_US ATTENTION_US ... see shapes[].
 */
#include "expertd/exd_trust.h"
#include "expertd/exd_walk.h"
#include "shm/shm_worker.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS  48
#define EXPERTS 128
#define RING    256
#define GROUP   16
#define GROUPS  (EXPERTS / GROUP)

/* us */
#define COPY        47.9 /* of a blob, at the peak */
#define CALL        3.6  /* between two calls' copies */
#define IN_BATCH    0.25 /* between two copies of a batch */
#define FLAG        1.5  /* signal or progress write, on the link */
#define CPU_COPY    2.5
#define CPU_BATCHED 1.1
#define CPU_LOOK    1.0
#define POLL        15.0
#define POLL_MAX    100.0
#define WAKE        5.0 /* after a sleep */
#define BATCH_MAX   16

#define SETTINGS 7

struct shape {
    const char *name;
    uint32_t tokens;
    double skew;         /* of the routing */
    double recall;       /* of the predictions */
    double attention_us; /* combine, attention, router: between a layer's last group and its publication */
    double experts_us;   /* of a layer, all groups */
};

/* Computing as measured (tests/bench/LOG.md), routed shares as of a calibrated model. */
static const struct shape shapes[] = {
    {"256 tokens", 256, 3.0, 0.9, 550, 500},      {"1,046 tokens", 1046, 2.0, 0.9, 700, 900},
    {"2,048 tokens", 2048, 1.8, 0.9, 900, 1400},  {"4,096 tokens", 4096, 1.5, 0.9, 1300, 2800},
    {"8,192 tokens", 8192, 1.3, 0.9, 2200, 3500}, {"1,046, weak prediction", 1046, 2.0, 0.5, 700, 900},
};

struct op {
    double us;       /* on the link */
    uint32_t copies; /* landed once it is done, all in all; 0: not told */
    uint64_t groups; /* flag's value; 0: none */
    bool progress;
};

struct event {
    double at;
    uint64_t value;
};

struct world {
    const struct shape *shape;
    uint64_t rng;
    uint32_t order;
    bool known;
    struct shm_mask routed[LAYERS], resident[LAYERS];
    uint32_t counts[LAYERS][EXPERTS], predicted[LAYERS][EXPERTS], recent[LAYERS][EXPERTS];
    struct exd_trust_counts trust;
    double now; /* issuer's */
    /* link: how far its queue reaches, and what becomes visible when */
    double link_end, link_busy;
    uint32_t held, issued, progress_sent, landed_seen;
    struct event progress[LAYERS * EXPERTS * 3];
    uint32_t progress_n, progress_at;
    /* worker */
    double group_landed[LAYERS * GROUPS], group_released[LAYERS * GROUPS], published[LAYERS];
    uint32_t group_entries[LAYERS * GROUPS];
    uint64_t signalled, computed; /* groups whose times are known */
    uint32_t published_known;     /* layers */
    bool learned[LAYERS];
    uint32_t wasted;
};

static uint64_t rnd(struct world *w)
{
    w->rng ^= w->rng >> 12;
    w->rng ^= w->rng << 25;
    w->rng ^= w->rng >> 27;
    return w->rng * UINT64_C(0x2545f4914f6cdd1d);
}

static double uniform(struct world *w)
{
    return ((double)(rnd(w) >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(struct world *w)
{
    return sqrt(-2 * log(uniform(w))) * cos(6.283185307 * uniform(w));
}

static uint32_t poisson(struct world *w, double mean)
{
    if (mean > 40)
        return (uint32_t)fmax(0, mean + sqrt(mean) * normal(w) + 0.5);
    double p = exp(-mean), u = uniform(w), sum = p;
    uint32_t n = 0;
    while (u > sum && n < 200)
        sum += p *= mean / ++n;
    return n;
}

static void make_routing(struct world *w)
{
    double slots = (double)w->shape->tokens * 8;
    for (uint32_t l = 0; l < LAYERS; l++) {
        double weight[EXPERTS], sum = 0;
        for (uint32_t e = 0; e < EXPERTS; e++)
            sum += weight[e] = exp(w->shape->skew * 1.45 * normal(w));
        memset(&w->routed[l], 0, sizeof w->routed[l]);
        for (uint32_t e = 0; e < EXPERTS; e++) {
            double mean = slots * weight[e] / sum, r = w->shape->recall;
            w->counts[l][e] = poisson(w, mean);
            w->recent[l][e] = poisson(w, mean / 2);
            w->predicted[l][e] = poisson(w, mean * (1 - r)) + (uint32_t)((double)w->counts[l][e] * r);
            if (w->counts[l][e])
                shm_mask_set(&w->routed[l], e);
        }
    }
}

/* ---- link ---- */

static void push_progress(struct world *w)
{
    w->link_end += FLAG;
    w->progress[w->progress_n++] = (struct event){w->link_end, w->issued};
    w->progress_sent = w->issued;
}

static uint32_t landed(struct world *w)
{
    while (w->progress_at < w->progress_n && w->progress[w->progress_at].at <= w->now)
        w->landed_seen = (uint32_t)w->progress[w->progress_at++].value;
    return w->landed_seen;
}

static void submit(struct world *w)
{
    if (!w->held)
        return;
    uint32_t queued = (w->issued - landed(w)) / 4, every = queued < 1 ? 1 : queued > 4 ? 4 : queued;
    if (w->issued - w->progress_sent >= every)
        push_progress(w);
    w->now += w->held > 1 ? CPU_BATCHED * w->held : CPU_COPY;
    if (w->link_end < w->now)
        w->link_end = w->now;
    w->link_end += CALL + w->held * (COPY + IN_BATCH);
    w->issued += w->held;
    w->held = 0;
}

static void flush(struct world *w)
{
    double ahead = w->issued - landed(w) > 1 ? (w->issued - landed(w) - 1) * COPY : 0;
    if (w->held && w->held < BATCH_MAX && ahead > 2 * POLL_MAX)
        return;
    submit(w);
    uint32_t queued = (w->issued - landed(w)) / 4, every = queued < 1 ? 1 : queued > 4 ? 4 : queued;
    if (w->progress_sent != w->issued &&
        (w->progress_sent == landed(w) || w->issued - w->progress_sent >= every))
        push_progress(w);
}

/* ---- worker: times of groups as far as they are decided ---- */

static void compute(struct world *w)
{
    const struct shape *s = w->shape;
    for (;;) {
        if (w->published_known == w->computed / GROUPS && w->published_known < LAYERS) {
            uint32_t l = w->published_known;
            double before = l ? w->group_released[l * GROUPS - 1] : 0;
            w->published[l] = before + s->attention_us;
            w->published_known++;
        }
        if (w->computed == w->signalled || w->computed == LAYERS * GROUPS)
            return;
        uint64_t g = w->computed, l = g / GROUPS;
        double begin = g % GROUPS ? w->group_released[g - 1] : w->published[l];
        begin = fmax(begin, w->group_landed[g] + (w->group_entries[g] ? 4 : 0));
        uint32_t all = shm_mask_count(&w->routed[l], EXPERTS);
        w->group_released[g] = begin + s->experts_us * w->group_entries[g] / (all ? all : 1);
        w->computed++;
    }
}

/* ---- environment of the walk ---- */

static uint64_t env_released(void *ctx)
{
    struct world *w = ctx;
    compute(w);
    uint64_t n = 0;
    for (n = w->computed; n && w->group_released[n - 1] > w->now; n--)
        ;
    return n;
}

static uint64_t env_landed(void *ctx)
{
    struct world *w = ctx;
    return landed(w);
}

static const struct shm_mask *env_published(void *ctx, uint32_t layer)
{
    struct world *w = ctx;
    compute(w);
    if (layer >= w->published_known || w->published[layer] > w->now)
        return NULL;
    if (!w->learned[layer]) {
        w->learned[layer] = true;
        bool predicted = w->order == SHM_ORDER_PREDICTED;
        exd_trust_learn(&w->trust, predicted ? EXD_EXPECT_PREDICTION : EXD_EXPECT_RECENT,
                        predicted ? w->predicted[layer] : w->recent[layer], &w->routed[layer],
                        &w->resident[layer], EXPERTS);
    }
    return &w->routed[layer];
}

static const uint32_t *env_expected(void *ctx, uint32_t layer, struct exd_trust *ret_trust)
{
    static const uint32_t nothing[EXPERTS];
    struct world *w = ctx;
    if (w->known) {
        *ret_trust = (struct exd_trust){true, 1};
        return w->counts[layer];
    }
    if (w->order != SHM_ORDER_PREDICTED) {
        *ret_trust = (struct exd_trust){false, exd_trust_sure(&w->trust, EXD_EXPECT_RECENT)};
        return w->recent[layer];
    }
    bool there = layer == 0 || env_published(ctx, layer - 1);
    *ret_trust =
        (struct exd_trust){true, there ? exd_trust_sure(&w->trust, EXD_EXPECT_PREDICTION) : UINT32_MAX};
    return there ? w->predicted[layer] : nothing;
}

static bool env_loaded(void *ctx, uint32_t layer, uint32_t expert)
{
    (void)ctx, (void)layer, (void)expert;
    return true;
}

static void env_decide(void *ctx, uint32_t layer, uint32_t expert, uint32_t state, uint32_t group,
                       uint32_t slot)
{
    (void)ctx, (void)layer, (void)expert, (void)state, (void)group, (void)slot;
}

static int env_issue(void *ctx, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot,
                     uint64_t group, bool certain)
{
    struct world *w = ctx;
    (void)entry, (void)slot;
    if (shm_mask_test(&w->routed[layer], expert))
        w->group_entries[group]++;
    else
        w->wasted++;
    w->held++;
    w->link_busy += COPY;
    if (!certain || w->issued == landed(w) || w->held == BATCH_MAX)
        submit(w);
    return 0;
}

static int env_signal(void *ctx, uint64_t groups)
{
    struct world *w = ctx;
    submit(w);
    w->now += 1;
    if (w->link_end < w->now)
        w->link_end = w->now;
    push_progress(w);
    for (uint64_t g = w->signalled; g < groups; g++)
        w->group_landed[g] = w->link_end;
    w->signalled = groups;
    return 0;
}

struct result {
    double us, bound_us;
    uint32_t issued, wasted;
    double share;
};

static struct result run(struct world *w, uint32_t policy, uint32_t order, bool known, uint32_t depth)
{
    const struct exd_walk_env env = {w,          env_released, env_landed, env_published, env_expected,
                                     env_loaded, env_decide,   env_issue,  env_signal};
    const struct exd_walk_config config = {.layers = LAYERS,
                                           .experts = EXPERTS,
                                           .ring = RING,
                                           .group_entries = GROUP,
                                           .groups_per_layer = GROUPS,
                                           .policy = policy,
                                           .order = order,
                                           .depth = depth,
                                           .resident = w->resident};
    struct shm_error err;
    struct exd_walk *walk = exd_walk_new(LAYERS, EXPERTS, RING);
    exd_trust_stream(&w->trust);
    w->order = order;
    w->known = known;
    w->now = w->link_end = w->link_busy = 0;
    w->held = w->issued = w->progress_sent = w->landed_seen = w->progress_n = w->progress_at = w->wasted = 0;
    w->signalled = w->computed = w->published_known = 0;
    memset(w->group_entries, 0, sizeof w->group_entries);
    memset(w->learned, 0, sizeof w->learned);
    if (!walk || exd_walk_start(walk, &config, &env, &err))
        abort();
    for (uint64_t looks = 0;; looks++) {
        enum exd_step step = exd_walk_step(walk);
        if (step == EXD_STEP_DONE)
            break;
        if (step == EXD_STEP_FAILED || looks > 100000000)
            abort();
        if (step == EXD_STEP_AGAIN)
            continue;
        flush(w);
        double ahead = w->issued - landed(w) > 1 ? (w->issued - landed(w) - 1) * COPY * 0.75 : 0;
        w->now += CPU_LOOK + WAKE + fmax(POLL, fmin(ahead, POLL_MAX));
    }
    struct exd_walk_counts n = exd_walk_counts(walk);
    exd_walk_free(&walk);
    submit(w);
    compute(w);
    struct result r = {
        .us = w->group_released[LAYERS * GROUPS - 1], .issued = (uint32_t)n.issued, .wasted = w->wasted};
    uint32_t routed = 0;
    for (uint32_t l = 0; l < LAYERS; l++)
        routed += shm_mask_count(&w->routed[l], EXPERTS);
    r.bound_us = routed * COPY;
    r.share = (double)routed / (LAYERS * EXPERTS);
    return r;
}

int main(int argc, char **argv)
{
    static struct world w;
    bool verbose = argc > 1 && strcmp(argv[1], "-v") == 0;
    int bad = 0;
    static const struct {
        const char *name;
        uint32_t policy, order;
        bool known;
    } settings[SETTINGS] = {{"full", SHM_POLICY_FULL, SHM_ORDER_INDEX, false},
                            {"demand", SHM_POLICY_DEMAND, SHM_ORDER_INDEX, false},
                            {"index", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, false},
                            {"recent", SHM_POLICY_ROUTED, SHM_ORDER_RECENT, false},
                            {"predicted", SHM_POLICY_ROUTED, SHM_ORDER_PREDICTED, false},
                            {"oracle", SHM_POLICY_ROUTED, SHM_ORDER_PREDICTED, true},
                            {"demand by use", SHM_POLICY_DEMAND, SHM_ORDER_RECENT, false}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        double time[SETTINGS], waste[SETTINGS];
        w.shape = &shapes[i];
        w.rng = 88172645463325252u + i;
        make_routing(&w);
        for (size_t k = 0; k < SETTINGS; k++) {
            exd_trust_begin(&w.trust);
            struct result r = {0};
            for (int again = 0; again < 2; again++) /* the second read has learned from the first */
                r = run(&w, settings[k].policy, settings[k].order, settings[k].known, 16);
            time[k] = r.us;
            waste[k] = r.issued ? (double)r.wasted / r.issued : 0;
            if (verbose)
                printf("%-24s %-13s %8.1f ms, %.3f of the bound, routed %4.1f%%, waste %4.1f%%, full/this "
                       "%.3f\n",
                       shapes[i].name, settings[k].name, r.us / 1e3, r.us / r.bound_us, 100 * r.share,
                       100 * waste[k], time[0] / r.us);
        }
        /* Below the floor nothing runs ahead: there only the demand has to hold. */
        if (time[6] > time[1] * 1.002) {
            printf("sim_time: %s: demand by expected use %.1f ms, by index %.1f\n", shapes[i].name,
                   time[6] / 1e3, time[1] / 1e3);
            bad = 1;
        }
        if (shapes[i].tokens < 1024)
            continue;
        bool weak = shapes[i].recall < 0.8;
        if (time[4] > time[5] * (weak ? 1.06 : 1.03) || waste[4] > (weak ? 0.05 : 0.03) ||
            time[4] > time[0] * 1.005) {
            printf("sim_time: %s: predicted %.1f ms, oracle %.1f, full %.1f, waste %.1f%%\n", shapes[i].name,
                   time[4] / 1e3, time[5] / 1e3, time[0] / 1e3, 100 * waste[4]);
            bad = 1;
        }
    }
    return bad;
}
