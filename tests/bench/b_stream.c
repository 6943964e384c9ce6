/* SPDX-License-Identifier: MIT */
/*
 * What a stream costs expertd's issuer: CPU time of its thread for each entry
 * walked over, with real threads, an unpaced host link and small blobs.
 *
 *   b_stream [STREAMS [LAYERS EXPERTS]]
 *
 * With EXPERTD_EVENTS=0 no events are written.
 *
 * Prints the median and the least over the streams. Compare two builds in
 * pairs, one after the other and again: a machine's own drift is larger than
 * most changes.
 */
#include "expertd/exd_issuer.h"
#include "kernels/krn_link_host.h"
#include "tests/race/race_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As in exd_event.c: of the issuer and of the link. */
static struct shm_event_writer writers[2];

static bool make_rings(void)
{
    static const uint32_t capacities[2] = {16384, 8192};
    size_t bytes = (shm_event_bytes(capacities, 2) + 4095) & ~(size_t)4095;
    void *base = aligned_alloc(4096, bytes);
    if (!base)
        return false;
    memset(base, 0, bytes);
    shm_event_init(base, "b_stream", capacities, 2, 1, 1);
    for (uint32_t i = 0; i < 2; i++)
        shm_event_own(base, i, i ? "link" : "issuer", "bench", 1, 1, &writers[i]);
    return true;
}

static void on_fault(void *ctx, const char *line)
{
    (void)ctx;
    fprintf(stderr, "b_stream: %s\n", line);
    exit(1);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
    uint32_t n = argc > 1 ? (uint32_t)atoi(argv[1]) : 100;
    uint32_t layers = argc > 3 ? (uint32_t)atoi(argv[2]) : 48,
             experts = argc > 3 ? (uint32_t)atoi(argv[3]) : 128;
    struct race_arena arena;
    struct race_worker w;
    struct shm_error err = {0};
    struct krn_link *link;
    struct exd_issuer *issuer;
    double *per_entry = calloc(n, sizeof *per_entry);
    const char *set = getenv("EXPERTD_EVENTS");
    bool events = !set || strcmp(set, "0") != 0;
    if (!n || !per_entry || (events && !make_rings()) ||
        race_arena_create(layers, experts, 512, true, &arena) || race_worker_create(&arena, 256, 7, &w)) {
        fprintf(stderr, "b_stream: no memory\n");
        return 1;
    }
    struct shm_worker *sw = w.view.worker;
    const struct krn_link_host_config link_config = {.ring = w.ring,
                                                     .ring_bytes = w.ring_bytes,
                                                     .landed_word = &sw->landed_groups,
                                                     .landed_bell = &sw->landed_bell,
                                                     .issuer_bell = &sw->issuer_bell,
                                                     .events = events ? &writers[1] : NULL};
    const struct exd_issuer_config config = {
        .arena = &arena.view,
        .control = w.view,
        .geometry = w.geometry,
        .settings = {.policy = SHM_POLICY_ROUTED, .order = SHM_ORDER_RECENT, .depth = 16, .floor = 1},
        .events = events ? &writers[0] : NULL,
        .name = "bench",
        .fault = on_fault};
    struct exd_issuer_config with_link = config;
    if (krn_link_host_create(&link_config, &link, &err) ||
        (with_link.link = link, exd_issuer_start(&with_link, &issuer, &err))) {
        fprintf(stderr, "b_stream: %s\n", shm_error_text(&err));
        return 1;
    }
    const struct race_stream s = {.tokens = 64,
                                  .policy = SHM_POLICY_ROUTED,
                                  .order = SHM_ORDER_RECENT,
                                  .depth = 16,
                                  .cancel_at = UINT64_MAX};
    for (uint32_t i = 0; i < n; i++) {
        struct shm_report r;
        if (race_worker_stream(&w, &s) || shm_report_read(sw, w.seq, &r)) {
            fprintf(stderr, "b_stream: %s\n", w.error);
            return 1;
        }
        per_entry[i] = r.entries ? (double)r.cpu_ns / (double)r.entries : 0;
    }
    qsort(per_entry, n, sizeof *per_entry, compare);
    printf("%u streams of %u x %u: %.1f ns of CPU an entry, least %.1f\n", n, layers, experts,
           per_entry[n / 2], per_entry[0]);
    exd_issuer_stop(&issuer);
    krn_link_destroy(&link);
    race_worker_destroy(&w);
    race_arena_destroy(&arena);
    free(per_entry);
    return 0;
}
