/* SPDX-License-Identifier: MIT */
#include "expertd/exd_starved.h"

#include <errno.h>
#include <stdlib.h>

int exd_starved_init(struct exd_starved *s, uint32_t layers, uint32_t groups_per_layer)
{
    *s = (struct exd_starved){.layers = layers, .groups_per_layer = groups_per_layer};
    s->copies = calloc((size_t)layers * groups_per_layer, sizeof *s->copies);
    return s->copies ? 0 : -ENOMEM;
}

void exd_starved_free(struct exd_starved *s)
{
    free(s->copies);
    s->copies = NULL;
}

void exd_starved_begin(struct exd_starved *s)
{
    s->signalled = s->arrived = s->since_ns = s->total_ns = 0;
}

void exd_starved_signal(struct exd_starved *s, uint64_t groups, uint64_t copies)
{
    const uint64_t all = (uint64_t)s->layers * s->groups_per_layer;
    while (s->signalled < groups && s->signalled < all)
        s->copies[s->signalled++] = copies;
}

void exd_starved_look(struct exd_starved *s, uint64_t released, uint64_t landed, const bool *published,
                      uint64_t now_ns)
{
    while (s->arrived < s->signalled && s->copies[s->arrived] <= landed)
        s->arrived++;
    /* The device may have released what was not looked at here yet. */
    if (s->arrived < released)
        s->arrived = released;
    const uint64_t layer = released / s->groups_per_layer;
    const bool starved = layer < s->layers && published[layer] && released == s->arrived;
    if (starved && !s->since_ns) {
        s->since_ns = now_ns;
    } else if (!starved && s->since_ns) {
        s->total_ns += now_ns - s->since_ns;
        s->since_ns = 0;
    }
}

uint64_t exd_starved_ns(const struct exd_starved *s, uint64_t now_ns)
{
    return s->total_ns + (s->since_ns ? now_ns - s->since_ns : 0);
}
