/* SPDX-License-Identifier: MIT */
#include "tools/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct spread {
    double low, median, high;
};

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct spread spread_of(double *values, uint32_t n)
{
    if (!n)
        return (struct spread){0};
    qsort(values, n, sizeof *values, compare);
    double median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
    return (struct spread){values[0], median, values[n - 1]};
}

/* What is printed of one arm. */
struct summary {
    struct spread time_ms, ratio;
    struct bench_sample middle; /* counters of the read nearest the median time */
    double link_gbps;           /* bytes over the link's busy time */
    double efficiency;          /* bytes that had to move / (peak x time) */
    double waste;               /* bytes moved that no token used / bytes moved */
    double routed_share;
};

static bool paced(const struct bench_results *r)
{
    return r->options->link_gbps && strtod(r->options->link_gbps, NULL) > 0;
}

/* Peak of the link: as paced, else the best rate that any read saw while its link was busy. */
static double peak_gbps(const struct bench_results *r)
{
    if (paced(r))
        return strtod(r->options->link_gbps, NULL);
    double peak = 0;
    for (uint32_t a = 0; a <= r->options->arms; a++)
        for (uint32_t p = 0; p < r->pairs; p++) {
            const struct bench_sample *s = &r->arm[a][p];
            double gbps = s->link_ms > 0 ? (double)s->bytes / 1e6 / s->link_ms : 0;
            peak = gbps > peak ? gbps : peak;
        }
    return peak;
}

static struct summary summarize(const struct bench_results *r, uint32_t arm, double peak)
{
    double time[BENCH_PAIRS_MAX] = {0}, ratio[BENCH_PAIRS_MAX] = {0};
    for (uint32_t p = 0; p < r->pairs; p++) {
        time[p] = r->arm[arm][p].read_ms;
        ratio[p] = r->base[arm][p].read_ms / r->arm[arm][p].read_ms;
    }
    struct summary s = {.time_ms = spread_of(time, r->pairs), .ratio = spread_of(ratio, r->pairs)};
    s.middle = r->arm[arm][0];
    for (uint32_t p = 1; p < r->pairs; p++) {
        double d = r->arm[arm][p].read_ms - s.time_ms.median, best = s.middle.read_ms - s.time_ms.median;
        if (d * d < best * best)
            s.middle = r->arm[arm][p];
    }
    const struct bench_sample *m = &s.middle;
    s.link_gbps = m->link_ms > 0 ? (double)m->bytes / 1e6 / m->link_ms : 0;
    s.waste = m->bytes ? (double)m->bytes_wasted / (double)m->bytes : 0;
    s.routed_share = m->entries ? (double)m->routed / (double)m->entries : 0;
    s.efficiency =
        peak > 0 && m->read_ms > 0 ? (double)(m->bytes - m->bytes_wasted) / 1e6 / (peak * m->read_ms) : 0;
    return s;
}

bool bench_same_bits(const struct bench_results *r)
{
    for (uint32_t a = 1; a < r->options->arms; a++)
        if (strcmp(r->hash[a], r->hash[0]) != 0)
            return false;
    return true;
}

static const char *arm_name(const struct bench_results *r, uint32_t arm)
{
    return arm < r->options->arms ? r->options->arm[arm].name : "(identical pair)";
}

void bench_print_table(const struct bench_results *r)
{
    double peak = peak_gbps(r);
    const struct bench_sample *first = &r->arm[0][0];
    printf("%llu tokens, ring %llu slots, %u pairs, baseline %s, link peak %.3f GB/s (%s), logits %s\n\n",
           (unsigned long long)first->tokens, (unsigned long long)first->ring, r->pairs,
           r->options->arm[0].name, peak, paced(r) ? "paced" : "best seen",
           bench_same_bits(r) ? "equal under all settings" : "DIFFER");
    printf("%-22s %9s %19s %7s %7s %7s %7s %6s %6s %8s %8s\n", "setting", "read ms", "ratio (low..high)",
           "routed", "copied", "dropped", "unrouted", "waste", "link", "link ms", "wait ms");
    for (uint32_t a = 0; a <= r->options->arms; a++) {
        struct summary s = summarize(r, a, peak);
        printf("%-22s %9.2f %6.3f (%.3f..%.3f) %6.1f%% %7llu %7llu %8llu %5.1f%% %5.1f%% %8.2f %8.2f\n",
               arm_name(r, a), s.time_ms.median, s.ratio.median, s.ratio.low, s.ratio.high,
               100 * s.routed_share, (unsigned long long)s.middle.copied,
               (unsigned long long)s.middle.dropped, (unsigned long long)s.middle.wasted, 100 * s.waste,
               100 * s.efficiency, s.middle.link_ms, s.middle.wait_ms);
    }
    printf("\nratio: baseline / setting within a pair, above 1 is faster; ratios inside the identical pair's "
           "band are "
           "noise.\nlink: efficiency = routed bytes / (peak x read time). waste: bytes copied that no token "
           "used.\n");
}

static json_t *json_spread(struct spread s)
{
    return json_pack("{s:f, s:f, s:f}", "low", s.low, "median", s.median, "high", s.high);
}

void bench_print_json(const struct bench_results *r)
{
    double peak = peak_gbps(r);
    json_t *arms = json_array();
    for (uint32_t a = 0; a <= r->options->arms; a++) {
        struct summary s = summarize(r, a, peak);
        const struct bench_sample *m = &s.middle;
        json_t *o = json_pack("{s:s, s:b, s:o, s:o}", "setting", arm_name(r, a), "identical_pair",
                              a == r->options->arms, "read_ms", json_spread(s.time_ms), "ratio",
                              json_spread(s.ratio));
        json_object_set_new(o, "routed_share", json_real(s.routed_share));
        json_object_set_new(o, "entries", json_integer((json_int_t)m->entries));
        json_object_set_new(o, "copied", json_integer((json_int_t)m->copied));
        json_object_set_new(o, "dropped", json_integer((json_int_t)m->dropped));
        json_object_set_new(o, "wasted", json_integer((json_int_t)m->wasted));
        json_object_set_new(o, "bytes_copied", json_integer((json_int_t)m->bytes));
        json_object_set_new(o, "bytes_wasted", json_integer((json_int_t)m->bytes_wasted));
        json_object_set_new(o, "waste", json_real(s.waste));
        json_object_set_new(o, "link_efficiency", json_real(s.efficiency));
        json_object_set_new(o, "link_gbps", json_real(s.link_gbps));
        json_object_set_new(o, "link_ms", json_real(m->link_ms));
        json_object_set_new(o, "wait_ms", json_real(m->wait_ms));
        json_array_append_new(arms, o);
    }
    json_t *all = json_pack("{s:I, s:I, s:i, s:f, s:b, s:b, s:o}", "tokens", (json_int_t)r->arm[0][0].tokens,
                            "ring", (json_int_t)r->arm[0][0].ring, "pairs", (int)r->pairs, "peak_gbps", peak,
                            "paced", (int)paced(r), "same_bits", bench_same_bits(r), "settings", arms);
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    putchar('\n');
    json_decref(all);
}
