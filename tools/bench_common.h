/* SPDX-License-Identifier: MIT */
/* What both kinds of expert-bench's measurements need: options that are numbers, and the spread of a few
 * values. */
#ifndef BENCH_COMMON_H
#define BENCH_COMMON_H

#include <stddef.h>
#include <stdint.h>

struct argp_state;

/* A whole number from low to high, or argp_error, which names the option, and ends. */
uint64_t bench_whole(struct argp_state *state, const char *option, const char *text, uint64_t low,
                     uint64_t high);

struct bench_spread {
    double low, median, high;
};

/* Ascending order of doubles, for qsort. */
int bench_compare(const void *a, const void *b);

/* Sorts values; zeros where there are none. */
struct bench_spread bench_spread_of(double *values, size_t n);

#endif
