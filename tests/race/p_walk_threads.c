/* SPDX-License-Identifier: MIT */
/*
 * The stream on real threads: issuer (production walk), host link, and this
 * thread as the worker, over one mapping, so that TSan sees every access.
 * Every slot read is compared with the arena. Arguments: seed, rounds.
 */
#include "expertd/exd_issuer.h"
#include "kernels/krn_link_host.h"
#include "race_fixture.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define FLOOR 100

struct shape {
    uint32_t layers, experts, ring;
    double gbps, latency_us;
    bool loading, slow;
    uint32_t streams;
};

static const struct shape shapes[] = {
    {4, 12, 1, 0, 0, false, false, 24},   {4, 12, 3, 0, 0, false, true, 24},
    {3, 40, 40, 0, 0, false, false, 24},  {3, 24, 60, 0, 0, false, true, 24},
    {4, 32, 9, 2.0, 5, false, false, 24}, {4, 32, 33, 0.5, 0, false, true, 16},
    {4, 32, 48, 0, 0, true, false, 12},   {1, 1, 1, 0, 0, false, false, 40},
    {2, 70, 20, 0, 20, false, false, 12}, {6, 5, 64, 0, 0, false, true, 30},
};

static void on_fault(void *ctx, const char *line)
{
    fprintf(stderr, "fault: %s\n", line);
    *(_Atomic int *)ctx = 1;
}

static void *load_slowly(void *arg)
{
    struct race_arena *a = arg;
    for (uint32_t i = 0; i < a->view.units; i++) {
        atomic_store_explicit(&a->ready[i], 1, memory_order_release);
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return NULL;
}

static int run_streams(struct race_worker *w, struct exd_issuer *issuer, const struct shape *s,
                       uint32_t *cancelled)
{
    static const uint32_t depths[] = {1, 2, 16, 64};
    struct shm_error err;
    uint32_t groups = w->geometry.layers * w->geometry.groups_per_layer;
    for (uint32_t n = 0; n < s->streams; n++) {
        uint32_t policy = 1 + n % 3, order = 1 + n / 3 % 3;
        struct exd_stream_settings set = {
            .policy = policy == SHM_POLICY_FULL ? SHM_POLICY_FULL : SHM_POLICY_ROUTED,
            .order = order,
            .depth = depths[race_random(&w->rng) % 4],
            .floor = FLOOR,
        };
        bool predicts = race_random(&w->rng) % 4;
        struct race_stream stream = {
            .tokens = policy == SHM_POLICY_DEMAND ? FLOOR - 1 : FLOOR + n,
            .policy = policy,
            .order = order,
            .depth = set.depth,
            .predicts = predicts,
            .cancel_at = race_random(&w->rng) % 5 ? UINT64_MAX : race_random(&w->rng) % groups,
        };
        if (policy == SHM_POLICY_FULL)
            stream.order = SHM_ORDER_INDEX;
        else if (policy == SHM_POLICY_ROUTED && order == SHM_ORDER_PREDICTED && !predicts)
            stream.order = SHM_ORDER_RECENT;
        if (exd_issuer_configure(issuer, &set, &err))
            return fprintf(stderr, "configure: %s\n", err.text), 1;
        int rc = race_worker_stream(w, &stream);
        if (rc == -ECANCELED && stream.cancel_at != UINT64_MAX) {
            ++*cancelled;
            continue;
        }
        if (rc)
            return fprintf(stderr, "policy %u order %u depth %u: %d, %s %s\n", policy, order, set.depth, rc,
                           w->error, w->view.worker->error_text),
                   1;
    }
    return 0;
}

static int run_shape(const struct shape *s, uint64_t seed)
{
    struct race_arena arena;
    struct race_worker w;
    struct shm_error err = {0};
    struct krn_link *link;
    struct exd_issuer *issuer;
    _Atomic int fault = 0;
    pthread_t loader;
    uint32_t cancelled = 0;
    if (race_arena_create(s->layers, s->experts, 2000, !s->loading, &arena) ||
        race_worker_create(&arena, s->ring, seed, &w))
        return perror("memory"), 1;
    w.slow = s->slow;
    struct krn_link_host_config lc = {.ring = w.ring,
                                      .ring_bytes = w.ring_bytes,
                                      .landed_word = &w.view.worker->landed_groups,
                                      .landed_bell = &w.view.worker->landed_bell,
                                      .issuer_bell = &w.view.worker->issuer_bell,
                                      .gbps = s->gbps,
                                      .latency_us = s->latency_us,
                                      .queue = s->ring % 2 ? 8 : 0};
    struct exd_issuer_config ic = {.arena = &arena.view,
                                   .control = w.view,
                                   .geometry = w.geometry,
                                   .settings = {SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 16, FLOOR},
                                   .watchdog_ns = UINT64_C(15000000000),
                                   .name = "race",
                                   .fault = on_fault,
                                   .ctx = &fault};
    if (krn_link_host_create(&lc, &link, &err))
        return fprintf(stderr, "link: %s\n", err.text), 1;
    ic.link = link;
    if (exd_issuer_start(&ic, &issuer, &err))
        return fprintf(stderr, "issuer: %s\n", err.text), 1;
    if (s->loading && pthread_create(&loader, NULL, load_slowly, &arena))
        return perror("loader"), 1;
    int bad = run_streams(&w, issuer, s, &cancelled);
    if (s->loading)
        pthread_join(loader, NULL);
    uint64_t start = shm_now_ns();
    exd_issuer_stop(&issuer);
    krn_link_destroy(&link);
    uint64_t stop_ms = (shm_now_ns() - start) / 1000000;
    if (stop_ms > 2000)
        bad = fprintf(stderr, "stopping an idle issuer took %llu ms\n", (unsigned long long)stop_ms);
    if (fault)
        bad = 1;
    printf("%u layers x %u experts, ring %u: %u streams, %u cancelled%s\n", s->layers, s->experts, s->ring,
           s->streams, cancelled, bad ? ": FAILED" : "");
    race_worker_destroy(&w);
    race_arena_destroy(&arena);
    return bad != 0;
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    uint64_t rounds = argc > 2 ? strtoull(argv[2], NULL, 10) : 8;
    size_t count = sizeof shapes / sizeof shapes[0];
    printf("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < rounds * count; i++)
        if (run_shape(&shapes[i % count], seed + i))
            return fprintf(stderr, "p_walk_threads: replay (timing differs) with %llu\n",
                           (unsigned long long)seed),
                   1;
    return 0;
}
