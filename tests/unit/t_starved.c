/* SPDX-License-Identifier: MIT */
/* How long a worker waits for experts, as expertd sees it (expertd/exd_starved.h). */
#include "expertd/exd_starved.h"

#include <criterion/criterion.h>

TestSuite(starved, .timeout = 10);

#define LAYERS 3u
#define GROUPS 2u /* a layer */

static struct exd_starved s;
static bool published[LAYERS];

static void begin(void)
{
    cr_assert_eq(exd_starved_init(&s, LAYERS, GROUPS), 0);
    exd_starved_begin(&s);
    for (unsigned l = 0; l < LAYERS; l++)
        published[l] = false;
}

static void end(void)
{
    exd_starved_free(&s);
}

static void look(uint64_t released, uint64_t landed, uint64_t now_ns)
{
    exd_starved_look(&s, released, landed, published, now_ns);
}

/* Decoding: nothing is on its way before the router has spoken. */
Test(starved, from_the_publication_to_the_landing, .init = begin, .fini = end)
{
    look(0, 0, 100);
    cr_expect_eq(exd_starved_ns(&s, 200), 0, "it computes its router");
    published[0] = true;
    look(0, 0, 200);
    cr_expect_eq(exd_starved_ns(&s, 250), 50, "and goes on");
    exd_starved_signal(&s, 1, 8);
    look(0, 0, 300);
    look(0, 7, 400);
    cr_expect_eq(exd_starved_ns(&s, 400), 200, "seven of eight have landed");
    look(0, 8, 500);
    cr_expect_eq(exd_starved_ns(&s, 900), 300, "the group is there: it computes");
    look(1, 8, 1000);
    cr_expect_eq(exd_starved_ns(&s, 1100), 400, "it has released it and wants the next one");
    exd_starved_signal(&s, 2, 8);
    look(1, 8, 1200);
    look(2, 8, 1300);
    cr_expect_eq(exd_starved_ns(&s, 9000), 500, "an empty group has nothing to wait for; then attention");
    published[1] = true;
    look(2, 8, 9000);
    cr_expect_eq(exd_starved_ns(&s, 9010), 510);
}

/* Read ahead: what has landed before the router speaks is not waited for. */
Test(starved, not_where_the_copies_are_ahead, .init = begin, .fini = end)
{
    exd_starved_signal(&s, 1, 16);
    exd_starved_signal(&s, 2, 30);
    exd_starved_signal(&s, 4, 50);
    look(0, 33, 100);
    published[0] = true;
    look(0, 33, 200);
    look(1, 40, 300);
    look(2, 50, 400);
    published[1] = true;
    look(2, 50, 500);
    cr_expect_eq(exd_starved_ns(&s, 600), 0);
    look(4, 50, 700);
    published[2] = true;
    look(4, 50, 800);
    cr_expect_eq(exd_starved_ns(&s, 850), 50);
    exd_starved_signal(&s, 6, 50);
    look(4, 50, 860);
    look(6, 50, 900);
    cr_expect_eq(exd_starved_ns(&s, 5000), 60, "the stream is consumed");
    exd_starved_begin(&s);
    cr_expect_eq(exd_starved_ns(&s, 5000), 0);
}

/* The device is ahead of what is looked at: a release is seen before the landing that it followed. */
Test(starved, releases_seen_first, .init = begin, .fini = end)
{
    published[0] = published[1] = true;
    exd_starved_signal(&s, 2, 20);
    look(2, 5, 100);
    cr_expect_eq(exd_starved_ns(&s, 130), 30, "layer 1 is wanted, nothing of it is there");
    look(2, 20, 140);
    exd_starved_signal(&s, 3, 24);
    look(2, 24, 200);
    cr_expect_eq(exd_starved_ns(&s, 300), 100);
    exd_starved_signal(&s, UINT64_MAX, 24); /* never more than there are */
    look(6, 24, 400);
    cr_expect_eq(exd_starved_ns(&s, 500), 100);
}
