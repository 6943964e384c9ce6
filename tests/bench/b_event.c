/* SPDX-License-Identifier: MIT */
/*
 * What an event costs who writes it: nanoseconds of a write by itself, and of
 * one with its own look at the clock, over a ring as large as an issuer's.
 *
 *   b_event [EVENTS]
 */
#include "shm/shm_bell.h"
#include "shm/shm_event.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

#define ROUNDS 21

/* Median of the rounds. */
static double measure(struct shm_event_writer *w, uint64_t n, bool clock)
{
    double ns[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t begin_ns = shm_now_ns();
        for (uint64_t i = 0; i < n; i++)
            shm_event_put(w, SHM_EVENT_ISSUE, clock ? shm_now_ns() : begin_ns, i, i);
        ns[r] = (double)(shm_now_ns() - begin_ns) / (double)n;
    }
    qsort(ns, ROUNDS, sizeof *ns, compare);
    return ns[ROUNDS / 2];
}

int main(int argc, char **argv)
{
    static const uint32_t capacity = 16384;
    uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 200000;
    size_t bytes = (shm_event_bytes(&capacity, 1) + 4095) & ~(size_t)4095;
    void *base = aligned_alloc(4096, bytes);
    struct shm_event_writer w;
    if (!base || !n)
        return 1;
    memset(base, 0, bytes);
    shm_event_init(base, "b_event", &capacity, 1, 1, 1);
    shm_event_own(base, 0, "bench", "", 1, 1, &w);
    double alone = measure(&w, n, false), with_clock = measure(&w, n, true);
    printf("an event: %.1f ns, with a look at the clock %.1f ns\n", alone, with_clock);
    free(base);
    return 0;
}
