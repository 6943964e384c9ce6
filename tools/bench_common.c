/* SPDX-License-Identifier: MIT */
#include "tools/bench_common.h"

#include "shm/shm_error.h"
#include "shm/shm_word.h"

#include <argp.h>
#include <stdlib.h>

uint64_t bench_whole(struct argp_state *state, const char *option, const char *text, uint64_t low,
                     uint64_t high)
{
    struct shm_error err = {0};
    uint64_t value = 0;
    shm_number_parse(option, text, low, high, &value, &err);
    if (err.code)
        argp_error(state, "%s", shm_error_text(&err));
    return value;
}

int bench_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct bench_spread bench_spread_of(double *values, size_t n)
{
    if (!n)
        return (struct bench_spread){0};
    qsort(values, n, sizeof *values, bench_compare);
    double median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
    return (struct bench_spread){values[0], median, values[n - 1]};
}
