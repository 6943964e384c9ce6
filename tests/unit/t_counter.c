/* SPDX-License-Identifier: MIT */
/* Counters: the table made of the spec, sums and shares, the text for Prometheus. */
#include "proto/prt_metrics.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

TestSuite(counter, .timeout = 60);

static const struct shm_counter *need(enum shm_block block, const char *name)
{
    const struct shm_counter *c = shm_counter_find(block, name);
    cr_assert(c, "%s", name);
    return c;
}

Test(counter, words_of_a_block_follow_each_other)
{
    for (uint32_t b = 0; b < SHM_BLOCK_COUNT; b++) {
        uint32_t at = 0;
        for (uint32_t i = shm_blocks[b].first; i < shm_blocks[b].first + shm_blocks[b].n; i++) {
            const struct shm_counter *c = &shm_counters[i];
            cr_expect_eq(c->block, b);
            if (!c->words)
                continue;
            cr_expect_eq(c->word, at, "%s", c->name);
            at += c->words;
            uint32_t n = c->kind == SHM_KIND_HISTOGRAM ? c->n_bounds + 2 : 1;
            for (int k = 0; k < 2 && c->labels[k]; k++)
                n *= c->labels[k]->n;
            cr_expect_eq(c->words, n, "%s", c->name);
        }
        cr_expect_leq(at, shm_blocks[b].words);
    }
    cr_expect_eq(need(SHM_BLOCK_LINK, "link_bytes")->word * 8,
                 offsetof(struct shm_link_counters, link_bytes));
}

Test(counter, histogram_counts_at_and_above_its_bounds)
{
    struct shm_link_counters c = {0};
    uint64_t words[SHM_LINK_WORDS];
    SHM_HISTOGRAM_ADD(c.router_to_last_copy_ns, shm_bounds_short, shm_bounds_short[0]);
    SHM_HISTOGRAM_ADD(c.router_to_last_copy_ns, shm_bounds_short, shm_bounds_short[0] + 1);
    SHM_HISTOGRAM_ADD(c.router_to_last_copy_ns, shm_bounds_short, UINT64_C(5000000000));
    shm_counters_copy(SHM_BLOCK_LINK, &c, words);
    const struct shm_counter *h = need(SHM_BLOCK_LINK, "router_to_last_copy_ns");
    cr_expect_eq(words[h->word], 1);
    cr_expect_eq(words[h->word + 1], 1);
    cr_expect_eq(words[h->word + h->n_bounds], 1);
    cr_expect_eq(words[h->word + h->n_bounds + 1], 2 * shm_bounds_short[0] + 1 + UINT64_C(5000000000));
    cr_expect_eq(shm_counter_total(h, words), 3);
    double mean;
    cr_assert(shm_counter_derive(need(SHM_BLOCK_LINK, "router_to_last_copy"), words, NULL, &mean));
    cr_expect_float_eq(mean, (5e9 + 20001) / 3, 1);
}

Test(counter, shares_and_rates)
{
    uint64_t before[SHM_LINK_WORDS] = {0}, now[SHM_LINK_WORDS] = {0};
    double v;
    const struct shm_counter *waste = need(SHM_BLOCK_LINK, "waste"),
                             *rate = need(SHM_BLOCK_LINK, "link_rate");
    cr_expect_not(shm_counter_derive(waste, now, NULL, &v), "nothing to divide by");
    uint32_t bytes = need(SHM_BLOCK_LINK, "link_bytes")->word;
    before[bytes + SHM_COPY_REASON_ROUTED] = 300, before[bytes + SHM_COPY_REASON_AHEAD_WASTED] = 100;
    memcpy(now, before, sizeof now);
    now[bytes + SHM_COPY_REASON_ROUTED] += 100;
    now[bytes + SHM_COPY_REASON_RESIDENT] += 1000; /* not over expertd's link */
    now[SHM_LINK_WORD_LINK_BUSY_NS] = 50;
    cr_assert(shm_counter_derive(waste, now, NULL, &v));
    cr_expect_float_eq(v, 100.0 / 500, 1e-12);
    cr_assert(shm_counter_derive(waste, now, before, &v));
    cr_expect_float_eq(v, 0, 1e-12, "none of it since");
    cr_assert(shm_counter_derive(rate, now, before, &v));
    cr_expect_float_eq(v, 100 / 50e-9, 1);
    /* the worker waited longer than the link was busy: no overlap, not a negative one */
    now[SHM_LINK_WORD_WORKER_WAIT_NS] = 80;
    cr_assert(shm_counter_derive(need(SHM_BLOCK_LINK, "overlap"), now, NULL, &v));
    cr_expect_eq(v, 0);
    /* an age counts between two looks */
    before[SHM_LINK_WORD_WORKER_ATTACHED_NS] = 1000, now[SHM_LINK_WORD_WORKER_ATTACHED_NS] = 1100;
    cr_assert(shm_counter_derive(need(SHM_BLOCK_LINK, "link_busy"), now, before, &v));
    cr_expect_float_eq(v, 0.5, 1e-12);
    now[SHM_LINK_WORD_LINK_BUSY_NS] = 5000;
    cr_assert(shm_counter_derive(need(SHM_BLOCK_LINK, "link_busy"), now, before, &v));
    cr_expect_eq(v, 1, "a share is at most 1");
    /* gauges are as they are now */
    uint64_t s0[SHM_STORE_WORDS] = {0}, s1[SHM_STORE_WORDS] = {0};
    s0[SHM_STORE_WORD_ARENA_BYTES] = s1[SHM_STORE_WORD_ARENA_BYTES] = 200;
    s0[SHM_STORE_WORD_ARENA_PINNED_BYTES] = s1[SHM_STORE_WORD_ARENA_PINNED_BYTES] = 100;
    cr_assert(shm_counter_derive(need(SHM_BLOCK_STORE, "arena_pinned"), s1, s0, &v));
    cr_expect_float_eq(v, 0.5, 1e-12);
}

static char *written(enum shm_block block, const struct prt_series *series, size_t n, bool detail)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    prt_metrics_block(f, block, series, n, detail);
    fclose(f);
    return text;
}

Test(counter, prometheus_text)
{
    uint64_t a[SHM_STORE_WORDS] = {0}, b[SHM_STORE_WORDS] = {0};
    a[SHM_STORE_WORD_LOAD_NS] = 1500000000, b[SHM_STORE_WORD_LOAD_NS] = 7;
    a[SHM_STORE_WORD_ARENA_NUMA_NODE] = UINT64_MAX;
    a[SHM_STORE_WORD_ATTACHES] = UINT64_MAX;
    struct prt_series series[] = {{a, "store=\"a\"", "version=\"1\""}, {b, "store=\"b\"", NULL}};
    char *text = written(SHM_BLOCK_STORE, series, 2, false);
    cr_expect(
        strstr(text,
               "# TYPE expertd_load_seconds_total counter\nexpertd_load_seconds_total{store=\"a\"} 1.5\n"
               "expertd_load_seconds_total{store=\"b\"} 0.000000007\n"),
        "%s", text);
    cr_expect(strstr(text, "expertd_arena_numa_node{store=\"a\"} -1\n"), "%s", text);
    cr_expect(strstr(text, "expertd_attaches_total{store=\"a\"} 18446744073709551615\n"), "%s", text);
    cr_expect(strstr(text, "expertd_build_info{store=\"a\",version=\"1\"} 0\n"), "%s", text);
    cr_expect(strstr(text, "expertd_state{store=\"b\",state=\"loading\"} 0\n"), "%s", text);
    cr_expect_not(strstr(text, "expertd_io_reads_total"), "detail is left out");
    free(text);
    text = written(SHM_BLOCK_STORE, series, 1, true);
    cr_expect(strstr(text, "expertd_io_reads_total{store=\"a\"} 0\n"));
    free(text);
    text = written(SHM_BLOCK_STORE, series, 0, true);
    cr_expect_str_eq(text, "");
    free(text);
    uint64_t s[SHM_SERVER_WORDS] = {0};
    s[SHM_SERVER_WORD_HTTP_RESPONSES + SHM_ENDPOINT_OTHER * SHM_HTTP_STATUS_COUNT + SHM_HTTP_STATUS_404] = 3;
    text = written(SHM_BLOCK_SERVER, &(struct prt_series){s, "", NULL}, 1, true);
    cr_expect(
        strstr(text, "counter\ninferd_http_responses_total{endpoint=\"other\",status=\"404\"} 3\n# HELP"),
        "%s", text);
    cr_expect(strstr(text, "inferd_queue_seconds_bucket{le=\"+Inf\"} 0\ninferd_queue_seconds_sum 0\n"), "%s",
              text);
    free(text);
}

Test(counter, labels_are_escaped_and_cut_whole)
{
    char text[64] = "";
    prt_metrics_label(text, sizeof text, "a", "x\"\\y\n\xff\xc3\xa9\xed\xa0\x80");
    cr_expect_str_eq(text, "a=\"x\\\"\\\\y??\xc3\xa9???\"");
    prt_metrics_label(text, sizeof text, "b", "0123456789012345678901234567890123456789");
    cr_expect_str_eq(text, "a=\"x\\\"\\\\y??\xc3\xa9???\"", "what does not fit is left out");
    prt_metrics_label(text, sizeof text, "c", "1");
    cr_expect(strstr(text, ",c=\"1\""));
}
