/* SPDX-License-Identifier: MIT */
/*
 * How long a worker waits for experts, seen from expertd: for a worker whose
 * device waits by itself (a GPU), where nobody has a clock.
 *
 * The worker wants experts from a layer's publication on, until it has released
 * all of the layer's groups; it is starved while all groups that have landed are
 * released. Experts of its own (residents) that it computes meanwhile are not
 * known here: with residents this is at most what it waited.
 *
 * Not thread-safe. Numbers are those of one stream, from 0.
 */
#ifndef EXD_STARVED_H
#define EXD_STARVED_H

#include <stdbool.h>
#include <stdint.h>

struct exd_starved {
    uint32_t layers, groups_per_layer;
    uint64_t *copies; /* [layers * groups_per_layer] issued when the group was signalled */
    uint64_t signalled, arrived;
    uint64_t since_ns; /* starved from then on; 0: not starved */
    uint64_t total_ns; /* before */
};

int exd_starved_init(struct exd_starved *s, uint32_t layers, uint32_t groups_per_layer); /* 0 or -ENOMEM */
void exd_starved_free(struct exd_starved *s);

void exd_starved_begin(struct exd_starved *s);

/* Groups before `groups` are signalled, behind so many copies. */
void exd_starved_signal(struct exd_starved *s, uint64_t groups, uint64_t copies);

/* What has come to pass by now: groups released, copies landed, layers published ([layers]). */
void exd_starved_look(struct exd_starved *s, uint64_t released, uint64_t landed, const bool *published,
                      uint64_t now_ns);

uint64_t exd_starved_ns(const struct exd_starved *s, uint64_t now_ns);

#endif
