/* SPDX-License-Identifier: MIT */
/*
 * What is told of a worker's waits: its own clock where the host computes; on a
 * link that must be polled (a GPU's) what expertd saw, and a worker that wants
 * experts only once its router has spoken waits for all that the link does.
 */
#include "expertd/exd_issuer.h"
#include "kernels/krn_link_host.h"
#include "race_fixture.h"

#include <inttypes.h>
#include <stdio.h>

#define COPY_US 3000.0

static void on_fault(void *ctx, const char *line)
{
    fprintf(stderr, "fault: %s\n", line);
    *(_Atomic int *)ctx = 1;
}

/* One stream of one token. */
static int run(struct race_worker *w, const struct race_arena *arena, uint64_t poll_ns,
               struct shm_report *ret)
{
    struct shm_error err = {0};
    struct krn_link *link;
    struct exd_issuer *issuer;
    _Atomic int fault = 0;
    struct krn_link_host_config lc = {.ring = w->ring,
                                      .ring_bytes = w->ring_bytes,
                                      .landed_word = &w->view.worker->landed_groups,
                                      .landed_bell = &w->view.worker->landed_bell,
                                      .issuer_bell = &w->view.worker->issuer_bell,
                                      .latency_us = COPY_US};
    if (krn_link_host_create(&lc, &link, &err))
        return fprintf(stderr, "link: %s\n", err.text);
    link->poll_ns = poll_ns;
    struct exd_issuer_config ic = {.arena = &arena->view,
                                   .control = w->view,
                                   .geometry = w->geometry,
                                   .link = link,
                                   .settings = {SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 16, 1000},
                                   .watchdog_ns = UINT64_C(20000000000),
                                   .name = "starved",
                                   .fault = on_fault,
                                   .ctx = &fault};
    if (exd_issuer_start(&ic, &issuer, &err))
        return fprintf(stderr, "issuer: %s\n", err.text);
    const struct race_stream stream = {.tokens = 1,
                                       .policy = SHM_POLICY_DEMAND,
                                       .order = SHM_ORDER_INDEX,
                                       .depth = 16,
                                       .cancel_at = UINT64_MAX};
    int bad = 0;
    if (race_worker_stream(w, &stream))
        bad = fprintf(stderr, "stream: %s %s\n", w->error, w->view.worker->error_text);
    else if (shm_report_read(w->view.worker, w->seq, ret))
        bad = fprintf(stderr, "no report\n");
    exd_issuer_stop(&issuer);
    krn_link_destroy(&link);
    return bad || fault;
}

int main(void)
{
    struct race_arena arena;
    struct race_worker w, polled;
    struct shm_report r;
    if (race_arena_create(4, 24, 2000, true, &arena) || race_worker_create(&arena, 24, 5, &w) ||
        race_worker_create(&arena, 24, 6, &polled))
        return perror("memory"), 1;
    int bad = run(&w, &arena, 0, &r);
    if (!bad && r.wait_ns != w.view.worker->wait_ns)
        bad = fprintf(stderr, "not the worker's own word: %" PRIu64 "\n", r.wait_ns);
    if (!bad && !(bad = run(&polled, &arena, 100000, &r)) && (!r.copied || r.wait_ns < r.link_ns / 10 * 8))
        bad = fprintf(stderr, "%" PRIu64 " copies took the link %.1f ms, the worker waited %.1f\n", r.copied,
                      (double)r.link_ns / 1e6, (double)r.wait_ns / 1e6);
    printf("%" PRIu64 " copies: link busy %.1f ms, starved %.1f ms\n", r.copied, (double)r.link_ns / 1e6,
           (double)r.wait_ns / 1e6);
    race_worker_destroy(&polled);
    race_worker_destroy(&w);
    race_arena_destroy(&arena);
    return bad != 0;
}
