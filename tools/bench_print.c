/* SPDX-License-Identifier: MIT */
#include "tools/bench.h"

#include "tools/bench_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is printed of one setting. */
struct summary {
    struct bench_spread time_ms, ratio;
    struct bench_sample middle; /* counters of the read nearest the median time */
    double tokens_per_s;
    double link_gbps;  /* bytes over the link's busy time */
    double efficiency; /* bytes that had to move / (peak x time) */
    double waste;      /* bytes moved that no token used / bytes moved */
    double routed_share;
    double issuer_us; /* CPU time a copy */
    double decode_tps, decode_bytes, decode_issuer_us;
};

static bool paced(const struct bench_results *r)
{
    return r->options->link_gbps && strtod(r->options->link_gbps, NULL) > 0;
}

static const char *peak_from(const struct bench_results *r)
{
    return paced(r) ? "paced" : r->facts.peak_gbps > 0 ? "a copy of 1 GiB" : "best seen";
}

/* Peak of the link: as paced, as a large copy of this run showed, else the best rate that any read saw while
 * its link was busy. */
static double peak_gbps(const struct bench_results *r)
{
    if (paced(r))
        return strtod(r->options->link_gbps, NULL);
    if (r->facts.peak_gbps > 0)
        return r->facts.peak_gbps;
    double peak = 0;
    for (uint32_t i = 0; i < r->reads; i++)
        for (uint32_t a = 0; a <= r->options->arms; a++)
            for (uint32_t p = 0; p < r->read[i].rounds; p++) {
                const struct bench_sample *s = &r->read[i].sample[a][p];
                double gbps = s->link_ms > 0 ? (double)s->bytes / 1e6 / s->link_ms : 0;
                peak = gbps > peak ? gbps : peak;
            }
    return peak;
}

static struct summary summarize(const struct bench_read *read, uint32_t arm, double peak)
{
    double time[BENCH_ROUNDS_MAX] = {0}, ratio[BENCH_ROUNDS_MAX] = {0}, decode[BENCH_ROUNDS_MAX] = {0};
    const struct bench_sample *sample = read->sample[arm];
    for (uint32_t p = 0; p < read->rounds; p++) {
        time[p] = sample[p].read_ms;
        ratio[p] = read->sample[0][p].read_ms / sample[p].read_ms;
        decode[p] = sample[p].decode_ms > 0 ? (double)sample[p].decode_tokens * 1e3 / sample[p].decode_ms : 0;
    }
    struct summary s = {.time_ms = bench_spread_of(time, read->rounds),
                        .ratio = bench_spread_of(ratio, read->rounds)};
    s.decode_tps = bench_spread_of(decode, read->rounds).median;
    s.middle = sample[0];
    for (uint32_t p = 1; p < read->rounds; p++) {
        double d = sample[p].read_ms - s.time_ms.median, best = s.middle.read_ms - s.time_ms.median;
        if (d * d < best * best)
            s.middle = sample[p];
    }
    const struct bench_sample *m = &s.middle;
    s.tokens_per_s = s.time_ms.median > 0 ? read->span.tokens * 1e3 / s.time_ms.median : 0;
    s.link_gbps = m->link_ms > 0 ? (double)m->bytes / 1e6 / m->link_ms : 0;
    s.waste = m->bytes ? (double)m->bytes_wasted / (double)m->bytes : 0;
    s.routed_share = m->entries ? (double)m->routed / (double)m->entries : 0;
    s.issuer_us = m->copied ? m->issuer_ms * 1e3 / (double)m->copied : 0;
    s.decode_bytes = m->decode_tokens ? (double)m->decode_bytes / (double)m->decode_tokens : 0;
    s.decode_issuer_us = m->decode_copied ? m->decode_issuer_ms * 1e3 / (double)m->decode_copied : 0;
    s.efficiency =
        peak > 0 && m->read_ms > 0 ? (double)(m->bytes - m->bytes_wasted) / 1e6 / (peak * m->read_ms) : 0;
    return s;
}

bool bench_same_bits(const struct bench_results *r)
{
    for (uint32_t i = 0; i < r->reads; i++)
        if (!r->read[i].same_bits)
            return false;
    return true;
}

static const char *arm_name(const struct bench_results *r, uint32_t arm)
{
    return arm < r->options->arms ? r->options->arm[arm].name : "(identical pair)";
}

static void print_read(const struct bench_results *r, const struct bench_read *read, double peak)
{
    const char *bits = r->options->bits == BENCH_BITS_NONE  ? "not compared"
                       : !read->same_bits                   ? "DIFFER"
                       : r->options->bits == BENCH_BITS_ALL ? "equal under all settings"
                                                            : "of the last token equal under all settings";
    printf("\n%u tokens", read->span.tokens);
    if (read->span.at)
        printf(" behind %u", read->span.at);
    printf(", %u rounds, logits %s\n", read->rounds, bits);
    printf("%-20s %22s %9s %21s %7s %9s %6s %6s %8s %8s", "setting", "ms (low..high)", "tokens/s",
           "ratio (low..high)", "routed", "MB copied", "waste", "link", "wait ms", "us/copy");
    puts(r->options->generate ? "  decode/s  MB a token  us/copy" : "");
    for (uint32_t a = 0; a <= r->options->arms; a++) {
        struct summary s = summarize(read, a, peak);
        printf(
            "%-20s %7.1f (%6.1f..%6.1f) %9.0f %6.3f (%.3f..%.3f) %6.1f%% %9.1f %5.1f%% %5.1f%% %8.1f %8.1f",
            arm_name(r, a), s.time_ms.median, s.time_ms.low, s.time_ms.high, s.tokens_per_s, s.ratio.median,
            s.ratio.low, s.ratio.high, 100 * s.routed_share, (double)s.middle.bytes / 1e6, 100 * s.waste,
            100 * s.efficiency, s.middle.wait_ms, s.issuer_us);
        if (r->options->generate)
            printf(" %9.1f %11.1f %8.1f", s.decode_tps, s.decode_bytes / 1e6, s.decode_issuer_us);
        putchar('\n');
    }
}

void bench_print_table(const struct bench_results *r)
{
    double peak = peak_gbps(r);
    printf("%s; ring %llu slots, baseline %s, link peak %.3f GB/s (%s)\n", r->facts.device,
           (unsigned long long)r->facts.ring, r->options->arm[0].name, peak, peak_from(r));
    for (uint32_t i = 0; i < r->reads; i++)
        print_read(r, &r->read[i], peak);
    printf("\nratio: baseline / setting within a round, above 1 is faster; ratios inside the identical "
           "pair's band "
           "are noise.\nlink: efficiency = routed bytes / (peak x read time). waste: share of the copied "
           "bytes that "
           "no token used. us/copy: CPU time of the issuer.\n");
}

static json_t *json_spread(struct bench_spread s)
{
    return json_pack("{s:f, s:f, s:f}", "low", s.low, "median", s.median, "high", s.high);
}

static json_t *json_setting(const struct bench_results *r, const struct bench_read *read, uint32_t a,
                            double peak)
{
    struct summary s = summarize(read, a, peak);
    const struct bench_sample *m = &s.middle;
    json_t *o =
        json_pack("{s:s, s:b, s:o, s:o}", "setting", arm_name(r, a), "identical_pair", a == r->options->arms,
                  "read_ms", json_spread(s.time_ms), "ratio", json_spread(s.ratio));
    json_object_set_new(o, "tokens_per_s", json_real(s.tokens_per_s));
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
    json_object_set_new(o, "issuer_us_per_copy", json_real(s.issuer_us));
    if (r->options->generate) {
        json_object_set_new(o, "decode_tokens_per_s", json_real(s.decode_tps));
        json_object_set_new(o, "decode_bytes_per_token", json_real(s.decode_bytes));
        json_object_set_new(o, "decode_issuer_us_per_copy", json_real(s.decode_issuer_us));
    }
    return o;
}

void bench_print_json(const struct bench_results *r)
{
    double peak = peak_gbps(r);
    json_t *reads = json_array();
    for (uint32_t i = 0; i < r->reads; i++) {
        const struct bench_read *read = &r->read[i];
        json_t *arms = json_array();
        for (uint32_t a = 0; a <= r->options->arms; a++)
            json_array_append_new(arms, json_setting(r, read, a, peak));
        json_array_append_new(reads,
                              json_pack("{s:I, s:I, s:I, s:b, s:o}", "tokens", (json_int_t)read->span.tokens,
                                        "at", (json_int_t)read->span.at, "rounds", (json_int_t)read->rounds,
                                        "same_bits", (int)read->same_bits, "settings", arms));
    }
    json_t *all = json_pack("{s:s, s:I, s:f, s:s, s:b, s:o}", "device", r->facts.device, "ring",
                            (json_int_t)r->facts.ring, "peak_gbps", peak, "peak_from", peak_from(r),
                            "same_bits", (int)bench_same_bits(r), "reads", reads);
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    putchar('\n');
    json_decref(all);
}
