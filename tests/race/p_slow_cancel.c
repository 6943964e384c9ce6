/* SPDX-License-Identifier: MIT */
/*
 * A stream is cancelled while more is on a slow link than it moves in the time
 * that a stop would give it: everything must have landed before the stream is
 * said to be over, and the next one must count from an empty link.
 */
#include "expertd/exd_issuer.h"
#include "kernels/krn_link_host.h"
#include "race_fixture.h"

#include <errno.h>
#include <stdio.h>

#define RING     48
#define COPY_US  160000.0 /* RING of them: 7.7 s */
#define TOKENS   1000
#define WATCHDOG UINT64_C(3000000000) /* far longer than a copy, shorter than all of them */

static void on_fault(void *ctx, const char *line)
{
    fprintf(stderr, "fault: %s\n", line);
    *(_Atomic int *)ctx = 1;
}

int main(void)
{
    struct race_arena arena;
    struct race_worker w;
    struct shm_error err = {0};
    struct krn_link *link;
    struct exd_issuer *issuer;
    _Atomic int fault = 0;
    if (race_arena_create(2, 40, 2000, true, &arena) || race_worker_create(&arena, RING, 3, &w))
        return perror("memory"), 1;
    struct krn_link_host_config lc = {.ring = w.ring,
                                      .ring_bytes = w.ring_bytes,
                                      .landed_word = &w.view.worker->landed_groups,
                                      .landed_bell = &w.view.worker->landed_bell,
                                      .issuer_bell = &w.view.worker->issuer_bell,
                                      .latency_us = COPY_US};
    if (krn_link_host_create(&lc, &link, &err))
        return fprintf(stderr, "link: %s\n", err.text), 1;
    struct exd_issuer_config ic = {.arena = &arena.view,
                                   .control = w.view,
                                   .geometry = w.geometry,
                                   .link = link,
                                   .settings = {SHM_POLICY_FULL, SHM_ORDER_INDEX, 16, 1},
                                   .watchdog_ns = WATCHDOG,
                                   .name = "slow",
                                   .fault = on_fault,
                                   .ctx = &fault};
    if (exd_issuer_start(&ic, &issuer, &err))
        return fprintf(stderr, "issuer: %s\n", err.text), 1;
    struct race_stream stream = {
        .tokens = TOKENS, .policy = SHM_POLICY_FULL, .order = SHM_ORDER_INDEX, .depth = 16, .cancel_at = 1};
    int bad = 0, rc = race_worker_stream(&w, &stream);
    if (rc != -ECANCELED)
        bad = fprintf(stderr, "cancelled stream: %d, %s\n", rc, w.error);
    krn_link_host_pace(link, 0, 0);
    stream.cancel_at = UINT64_MAX;
    if (!bad && (rc = race_worker_stream(&w, &stream)))
        bad = fprintf(stderr, "stream after it: %d, %s %s\n", rc, w.error, w.view.worker->error_text);
    exd_issuer_stop(&issuer);
    krn_link_destroy(&link);
    race_worker_destroy(&w);
    race_arena_destroy(&arena);
    return bad || fault;
}
