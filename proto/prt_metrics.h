/* SPDX-License-Identifier: MIT */
/*
 * Counters as text for Prometheus (exposition format 0.0.4): HELP, TYPE and
 * samples of a block, times in seconds. Formats words that the caller copied;
 * touches no shared memory.
 */
#ifndef PRT_METRICS_H
#define PRT_METRICS_H

#include "shm/shm_counter.h"

#include <stdio.h>

#define PRT_METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* One of those that a block speaks of. */
struct prt_series {
    const uint64_t *words; /* of the block */
    const char *labels;    /* a="b",c="d", or "" */
    const char *info;      /* more of them for counters of kind info; NULL: none */
};

/* Writes the block's counters, those of level detail only if asked for; shares and rates are left out.
 * Counters with two labels leave out samples of 0. Nothing for n == 0. */
void prt_metrics_block(FILE *f, enum shm_block block, const struct prt_series *series, size_t n, bool detail);

/* Appends name="value" (after a comma, unless it is the first) to the string in text, escaped; control bytes
 * and what is no UTF-8 become '?'. Cut where it does not fit, in whole labels. */
void prt_metrics_label(char *text, size_t size, const char *name, const char *value);

#endif
