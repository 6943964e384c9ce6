/* SPDX-License-Identifier: MIT */
/* Host link: order, signals behind copies, pacing, drain, end with a full queue. */
#include "kernels/krn_link_host.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MS        UINT64_C(1000000)
#define SMALL     28672u
#define LARGE     2621440u
#define SLOTS     8u
#define LONG_WAIT (UINT64_C(10000) * MS)

TestSuite(link, .timeout = 60);

static uint8_t *ring, *source;
static _Atomic uint64_t landed_word;
static struct shm_bell landed_bell, issuer_bell;

static struct krn_link_host_config config(double gbps, double latency_us)
{
    return (struct krn_link_host_config){.ring = ring,
                                         .ring_bytes = (uint64_t)SLOTS * LARGE,
                                         .landed_word = &landed_word,
                                         .landed_bell = &landed_bell,
                                         .issuer_bell = &issuer_bell,
                                         .gbps = gbps,
                                         .latency_us = latency_us,
                                         .name = "t_link"};
}

static struct krn_link *open_link(struct krn_link_host_config c)
{
    struct krn_link *link = NULL;
    struct shm_error err = {0};
    int rc = krn_link_host_create(&c, &link, &err);
    cr_assert(rc == 0, "%s", err.text);
    return link;
}

static void memory_up(void)
{
    ring = malloc((size_t)SLOTS * LARGE);
    source = malloc((size_t)SLOTS * LARGE);
    cr_assert(ring && source);
    memset(ring, 0xdb, (size_t)SLOTS * LARGE);
    for (uint32_t i = 0; i < SLOTS; i++)
        memset(source + (size_t)i * LARGE, (int)(i + 1), LARGE);
}

static void memory_down(void)
{
    free(ring);
    free(source);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* Slot i holds source s, whole. */
static bool holds(uint32_t i, uint32_t s, size_t bytes)
{
    return memcmp(ring + (size_t)i * LARGE, source + (size_t)s * LARGE, bytes) == 0;
}

static int put(struct krn_link *link, uint32_t slot, uint32_t s, size_t bytes)
{
    return krn_link_copy(link, (uint64_t)slot * LARGE, source + (size_t)s * LARGE, bytes, false);
}

/* Everything goes through in the order it was enqueued: the last writer of each slot wins. */
Test(link, in_order, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 0));
    for (uint32_t n = 0; n < 500; n++) {
        cr_assert_eq(put(link, n % 3, n % SLOTS, SMALL), 0);
        cr_assert_eq(krn_link_signal(link, n + 1), 0);
    }
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    cr_assert_eq(krn_link_landed(link), 500u);
    cr_assert_eq(landed_word, 500u);
    cr_expect(holds(499 % 3, 499 % SLOTS, SMALL));
    cr_expect(holds(498 % 3, 498 % SLOTS, SMALL));
    cr_expect(holds(497 % 3, 497 % SLOTS, SMALL));
    cr_expect_eq(ring[SMALL], 0xdb, "bytes past the copy were written");
    struct krn_link_stats st;
    krn_link_stats(link, &st);
    cr_expect_eq(st.copies, 500u);
    cr_expect_eq(st.signals, 500u);
    cr_expect_eq(st.bytes, 500u * SMALL);
    krn_link_destroy(&link);
    cr_assert_null(link);
    krn_link_destroy(&link);
}

/* Whoever sees the signal's value sees the whole copy: first and last byte, and the count. */
Test(link, signal_behind_copy, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 0));
    for (uint32_t n = 0; n < 3000; n++) {
        uint32_t slot = n % 2, s = n % SLOTS;
        size_t bytes = n % 10 ? SMALL : LARGE;
        cr_assert_eq(put(link, slot, s, bytes), 0);
        cr_assert_eq(krn_link_signal(link, n + 1), 0);
        uint64_t deadline = shm_now_ns() + LONG_WAIT;
        while (atomic_load_explicit(&landed_word, memory_order_acquire) < n + 1)
            cr_assert(shm_now_ns() < deadline, "signal %u never came", n + 1);
        const uint8_t *at = ring + (size_t)slot * LARGE;
        cr_assert(at[0] == s + 1 && at[bytes - 1] == s + 1, "signal %u before its copy", n + 1);
        cr_assert(krn_link_landed(link) >= n + 1);
    }
    krn_link_destroy(&link);
}

/* On a slow link: the signal waits for the copy before it, the copy behind it does not hold it up. */
Test(link, signal_in_between, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 100000)); /* 100 ms each */
    cr_assert_eq(put(link, 0, 0, SMALL), 0);
    cr_assert_eq(krn_link_signal(link, 7), 0);
    cr_assert_eq(put(link, 1, 1, SMALL), 0);
    cr_assert_eq(krn_link_signal(link, 8), 0);
    cr_expect_eq(landed_word, 0u, "signalled before the copy landed");
    cr_expect_eq(krn_link_landed(link), 0u);
    uint32_t ticket = shm_bell_prepare(&landed_bell);
    cr_assert_eq(shm_bell_wait(&landed_bell, ticket, LONG_WAIT), 0);
    cr_expect_eq(landed_word, 7u);
    cr_expect_eq(krn_link_landed(link), 1u);
    cr_expect(holds(0, 0, SMALL));
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    cr_expect_eq(landed_word, 8u);
    cr_expect(holds(1, 1, SMALL));
    krn_link_destroy(&link);
}

/* How long threads of this process were ready and had no core. */
static double starved_ns(void)
{
    double all = 0;
    DIR *d = opendir("/proc/self/task");
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[300];
        unsigned long long ran, waited;
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", e->d_name);
        FILE *f = e->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (f && fscanf(f, "%llu %llu", &ran, &waited) == 2)
            all += (double)waited;
        if (f)
            fclose(f);
    }
    if (d)
        closedir(d);
    return all;
}

/* By how much a time is off, where it may be longer by what the machine took. */
static double off_by(double took, double due, double starved)
{
    return took < due ? 1 - took / due : fmax(0, (took - starved) / due - 1);
}

static double pace_error(struct krn_link *link, double gbps, double latency_us, size_t bytes)
{
    double cost_ns = latency_us * 1e3 + (gbps > 0 ? (double)bytes / gbps : 0);
    uint32_t n = (uint32_t)(250e6 / cost_ns) + 1;
    krn_link_mark(link);
    double starved = starved_ns();
    uint64_t start = shm_now_ns();
    for (uint32_t i = 0; i < n; i++)
        cr_assert_eq(put(link, i % SLOTS, i % SLOTS, bytes), 0);
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    double took = (double)(shm_now_ns() - start), due = n * cost_ns;
    starved = starved_ns() - starved;
    struct krn_link_stats st;
    krn_link_stats(link, &st);
    double span = (double)(st.last_ns - st.first_ns);
    cr_expect(took > 0.98 * due, "%g GB/s, %g us, %zu bytes: %.1f ms, due are %.1f", gbps, latency_us, bytes,
              took / 1e6, due / 1e6);
    cr_expect_eq(st.mark_bytes, (uint64_t)n * bytes);
    return fmax(off_by(took, due, starved),
                fmax(off_by(span, due, starved), off_by((double)st.mark_busy_ns, due, starved)));
}

/* Time taken, span and busy time are within 2% over 250 ms, but for the time that the machine had no core for
 * it. A busy machine may spoil some attempts even so; a rate that is off spoils all. */
Test(link, pacing, .init = memory_up, .fini = memory_down, .timeout = 150)
{
    static const struct {
        double gbps, latency_us;
        size_t bytes;
    } cases[] = {{0.2, 0, SMALL}, {1, 0, SMALL},     {0.2, 0, LARGE}, {1, 0, LARGE}, {0.2, 25, SMALL},
                 {1, 25, SMALL},  {0.2, 300, LARGE}, {1, 300, LARGE}, {0, 40, SMALL}};
    struct krn_link *link = open_link(config(0, 0));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        krn_link_host_pace(link, cases[i].gbps, cases[i].latency_us);
        double error = 1;
        for (int attempt = 0; attempt < 20 && error > 0.02; attempt++)
            error = pace_error(link, cases[i].gbps, cases[i].latency_us, cases[i].bytes);
        cr_expect(error <= 0.02, "%g GB/s, %g us, %zu bytes: off by %.1f%%", cases[i].gbps,
                  cases[i].latency_us, cases[i].bytes, 100 * error);
    }
    krn_link_destroy(&link);
}

/* An idle link saves nothing up: the next copy takes its full time. */
Test(link, no_credit_from_idling, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 40000));
    for (int i = 0; i < 2; i++) {
        sleep_ms(100);
        uint64_t start = shm_now_ns();
        cr_assert_eq(put(link, 0, 0, SMALL), 0);
        cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
        uint64_t took = shm_now_ns() - start;
        cr_expect(took >= 39 * MS, "took %.1f ms of 40", (double)took / 1e6);
    }
    krn_link_destroy(&link);
}

Test(link, drain, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 600000)); /* long against any pause of a busy machine */
    cr_expect_eq(krn_link_drain(link, 0), 0, "an empty link is drained");
    cr_assert_eq(put(link, 0, 0, SMALL), 0);
    cr_assert_eq(krn_link_signal(link, 3), 0);
    uint64_t start = shm_now_ns();
    cr_expect_eq(krn_link_drain(link, 20 * MS), -ETIMEDOUT);
    cr_expect(shm_now_ns() - start >= 19 * MS);
    cr_expect_eq(krn_link_drain(link, LONG_WAIT), 0);
    cr_expect_eq(landed_word, 3u, "drained with a signal still queued");
    krn_link_destroy(&link);
}

/* Destroy with a full queue: soon over, what was queued is neither copied nor signalled. */
Test(link, destroy_with_queued_copies, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 100000));
    for (uint32_t i = 0; i < SLOTS; i++) {
        cr_assert_eq(put(link, i, i, SMALL), 0);
        cr_assert_eq(krn_link_signal(link, i + 1), 0);
    }
    sleep_ms(130);
    uint64_t start = shm_now_ns();
    krn_link_destroy(&link);
    uint64_t took = shm_now_ns() - start;
    cr_expect(took < 1000 * MS, "destroy took %.0f ms", (double)took / 1e6);
    cr_expect(landed_word < SLOTS);
    cr_expect_eq(ring[(size_t)(SLOTS - 1) * LARGE], 0xdb, "a queued copy was made after the end");
}

/* A queue smaller than the work makes the producer wait, and loses nothing. */
Test(link, small_queue, .init = memory_up, .fini = memory_down)
{
    struct krn_link_host_config c = config(0, 200);
    c.queue = 2;
    struct krn_link *link = open_link(c);
    for (uint32_t n = 0; n < 200; n++) {
        cr_assert_eq(put(link, n % SLOTS, (n + 1) % SLOTS, SMALL), 0);
        cr_assert_eq(krn_link_signal(link, n + 1), 0);
    }
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    cr_expect_eq(krn_link_landed(link), 200u);
    cr_expect_eq(landed_word, 200u);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_expect(holds(i, (i + 1) % SLOTS, SMALL), "slot %u", i);
    krn_link_destroy(&link);
}

/* The issuer's bell rings at each landing, also without a signal. */
Test(link, landing_rings_the_issuer, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 30000));
    for (uint64_t n = 1; n <= 4; n++) {
        uint32_t ticket = shm_bell_prepare(&issuer_bell);
        cr_assert_eq(put(link, 0, 0, SMALL), 0);
        cr_assert_eq(shm_bell_wait(&issuer_bell, ticket, LONG_WAIT), 0);
        cr_expect_eq(krn_link_landed(link), n);
    }
    krn_link_destroy(&link);
}

Test(link, mark_begins_a_span, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = open_link(config(0, 1000));
    struct krn_link_stats st;
    cr_assert_eq(put(link, 0, 0, SMALL), 0);
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    krn_link_mark(link);
    krn_link_stats(link, &st);
    cr_expect_eq(st.first_ns, 0u);
    cr_expect_eq(st.mark_bytes, 0u);
    cr_expect_eq(st.mark_busy_ns, 0u);
    uint64_t before = shm_now_ns();
    cr_assert_eq(put(link, 0, 0, 1000), 0);
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    krn_link_stats(link, &st);
    cr_expect(st.first_ns >= before && st.last_ns >= st.first_ns && st.last_ns <= shm_now_ns());
    cr_expect_eq(st.mark_bytes, 1000u);
    cr_expect_eq(st.bytes, SMALL + 1000u);
    krn_link_destroy(&link);
}

Test(link, refuses, .init = memory_up, .fini = memory_down)
{
    struct krn_link *link = NULL;
    struct shm_error err = {0};
    struct krn_link_host_config c = config(0, 0);
    c.queue = 3;
    cr_expect_eq(krn_link_host_create(&c, &link, &err), -EINVAL);
    c = config(-1, 0);
    cr_expect_eq(krn_link_host_create(&c, &link, &err), -EINVAL);
    c = config(0, (double)NAN);
    cr_expect_eq(krn_link_host_create(&c, &link, &err), -EINVAL);
    cr_expect_null(link);

    uint64_t end = (uint64_t)SLOTS * LARGE;
    link = open_link(config(0, 0));
    cr_expect_eq(krn_link_copy(link, end - SMALL + 1, source, SMALL, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, end + 1, source, 0, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, UINT64_MAX - 10, source, SMALL, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, 0, source, SIZE_MAX, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, SMALL, source, SIZE_MAX - 100, false), -EINVAL, "offset + bytes wraps");
    cr_expect_eq(krn_link_copy(link, end - SMALL, source, SMALL, false), 0, "the last byte is inside");
    cr_assert_eq(krn_link_drain(link, LONG_WAIT), 0);
    cr_expect_eq(krn_link_landed(link), 1u);
    krn_link_destroy(&link);
}
