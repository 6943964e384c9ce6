/* SPDX-License-Identifier: MIT */
/*
 * Order predicted, step by step: what is copied ahead of a layer's publication
 * is what the prediction expects, nothing is copied ahead of the prediction.
 */
#include "expertd/exd_issuer.h"
#include "kernels/krn_link_host.h"
#include "race_fixture.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define EXPERTS 12u
#define RING    64u

static struct race_worker w;
static int failures;

static void on_fault(void *ctx, const char *line)
{
    (void)ctx;
    fprintf(stderr, "fault: %s\n", line);
    failures++;
}

/* Waits until so many entries were issued, then long enough that one more would show. */
static void expect_issued(const char *when, uint64_t n)
{
    const _Atomic uint64_t *issued = &w.view.worker->issued_entries;
    for (int ms = 0; ms < 5000 && atomic_load(issued) < n; ms++)
        usleep(1000);
    usleep(50000);
    if (atomic_load(issued) != n) {
        failures++;
        fprintf(stderr, "%s: %llu entries were issued, not %llu\n", when,
                (unsigned long long)atomic_load(issued), (unsigned long long)n);
    }
}

static void post(uint64_t seq)
{
    struct shm_worker *sw = w.view.worker;
    sw->descriptor = (struct shm_descriptor){
        .seq = seq, .group_base = w.group_base, .tokens = 1000, .flags = SHM_STREAM_PREDICTS};
    atomic_store_explicit(&sw->stream_seq, seq, memory_order_release);
    shm_bell_ring(&sw->issuer_bell);
}

static void cancel(uint64_t seq)
{
    struct shm_worker *sw = w.view.worker;
    atomic_store_explicit(&sw->cancel_seq, seq, memory_order_release);
    shm_bell_ring(&sw->issuer_bell);
    for (int ms = 0; ms < 5000 && atomic_load(&sw->done_seq) != seq; ms++)
        usleep(1000);
    w.group_base += (uint64_t)w.geometry.layers * w.geometry.groups_per_layer;
    atomic_store(&sw->released_groups, w.group_base);
}

int main(void)
{
    struct race_arena arena;
    struct shm_error err = {0};
    struct krn_link *link;
    struct exd_issuer *issuer;
    if (race_arena_create(3, EXPERTS, 2000, true, &arena) || race_worker_create(&arena, RING, 1, &w))
        return perror("memory"), 1;
    struct krn_link_host_config lc = {.ring = w.ring,
                                      .ring_bytes = w.ring_bytes,
                                      .landed_word = &w.view.worker->landed_groups,
                                      .landed_bell = &w.view.worker->landed_bell,
                                      .issuer_bell = &w.view.worker->issuer_bell};
    if (krn_link_host_create(&lc, &link, &err))
        return fprintf(stderr, "link: %s\n", err.text), 1;
    struct exd_issuer_config ic = {.arena = &arena.view,
                                   .control = w.view,
                                   .geometry = w.geometry,
                                   .link = link,
                                   .settings = {SHM_POLICY_ROUTED, SHM_ORDER_PREDICTED, 16, 1},
                                   .name = "predicting",
                                   .fault = on_fault};
    if (exd_issuer_start(&ic, &issuer, &err))
        return fprintf(stderr, "issuer: %s\n", err.text), 1;
    for (uint32_t i = 0; i < 3 * EXPERTS; i++)
        w.view.recent[i] = 1; /* must not be looked at */

    w.view.predicted[4] = 9;
    post(1);
    expect_issued("one expert of layer 0 is expected", 1);
    cancel(1);

    for (uint32_t e = 0; e < EXPERTS; e++)
        w.view.predicted[e] = 1;
    post(2);
    expect_issued("all of layer 0 are expected, layer 1 is not predicted yet", EXPERTS);
    w.view.predicted[EXPERTS + 3] = w.view.predicted[EXPERTS + 7] = 5;
    shm_mask_set(&w.view.route[0].mask, 1);
    atomic_store_explicit(&w.view.route[0].seq, 2, memory_order_release);
    shm_bell_ring(&w.view.worker->issuer_bell);
    expect_issued("two of layer 1 are expected", EXPERTS + 2);
    uint32_t entry = atomic_load(&w.view.table[EXPERTS + 7]);
    if (shm_entry_state(entry) != SHM_ENTRY_SLOT)
        failures += fprintf(stderr, "an expected expert was not the one that was copied\n") > 0;
    cancel(2);

    exd_issuer_stop(&issuer);
    krn_link_destroy(&link);
    race_worker_destroy(&w);
    race_arena_destroy(&arena);
    return failures != 0;
}
