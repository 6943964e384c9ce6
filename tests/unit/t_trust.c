/* SPDX-License-Identifier: MIT */
/* How far expectations are relied on (expertd/exd_trust.h). */
#include "expertd/exd_trust.h"

#include <criterion/criterion.h>
#include <string.h>

TestSuite(trust, .timeout = 10);

#define EXPERTS 128

static struct exd_trust_counts counts;
static uint32_t expected[EXPERTS];
static struct shm_mask routed, nobody;

static void begin(void)
{
    exd_trust_begin(&counts);
    exd_trust_stream(&counts);
    memset(expected, 0, sizeof expected);
    memset(&routed, 0, sizeof routed);
}

static void learn(enum exd_expectation from, int times)
{
    for (int i = 0; i < times; i++)
        exd_trust_learn(&counts, from, expected, &routed, &nobody, EXPERTS);
}

Test(trust, begins_with_many_predicted_tokens_only, .init = begin)
{
    uint32_t sure = exd_trust_sure(&counts, EXD_EXPECT_PREDICTION);
    cr_expect(sure > 1 && sure <= 32, "%u", sure);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), UINT32_MAX);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_NOTHING), UINT32_MAX);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_KNOWN), 1);
}

/* Experts expected by one token always come: one is enough from then on. Of three expected by 40 tokens one
 * does not: none are. */
Test(trust, learns_from_what_came, .init = begin)
{
    for (uint32_t e = 0; e < 40; e++) {
        expected[e] = 1 + e % 8;
        shm_mask_set(&routed, e);
    }
    learn(EXD_EXPECT_PREDICTION, 400);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_PREDICTION), 1);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), UINT32_MAX, "each kind for itself");
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_FIRST), UINT32_MAX);
    memset(expected, 0, sizeof expected);
    expected[1] = expected[2] = expected[100] = 40;
    learn(EXD_EXPECT_PREDICTION, 4000);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_PREDICTION), UINT32_MAX);
}

/* The bins above decide, too: what is uncertain with many tokens is not certain with fewer. */
Test(trust, fewer_tokens_are_never_surer, .init = begin)
{
    for (uint32_t e = 0; e < EXPERTS; e++)
        expected[e] = e % 2 ? 1 : 4;
    for (uint32_t e = 1; e < EXPERTS; e += 2)
        shm_mask_set(&routed, e);
    learn(EXD_EXPECT_PREDICTION, 400);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_PREDICTION), 8);
}

Test(trust, nearly_everything_routed_makes_all_certain_but_predictions, .init = begin)
{
    for (uint32_t e = 0; e < EXPERTS - 4; e++)
        shm_mask_set(&routed, e);
    learn(EXD_EXPECT_RECENT, 1);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), 0);
    cr_expect_neq(exd_trust_sure(&counts, EXD_EXPECT_PREDICTION), 0, "0 predicted tokens say more");
    exd_trust_stream(&counts);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), UINT32_MAX, "another stream, other tokens");
    memset(&routed, 0, sizeof routed);
    learn(EXD_EXPECT_RECENT, 3);
    for (uint32_t e = 0; e < EXPERTS; e++)
        shm_mask_set(&routed, e);
    learn(EXD_EXPECT_RECENT, 3);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), UINT32_MAX, "half of them lately");
    learn(EXD_EXPECT_RECENT, 30);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), 0, "old layers fade");
}

/* Residents are not copied, so they say nothing. */
Test(trust, residents_do_not_count, .init = begin)
{
    struct shm_mask resident = {{0}};
    for (uint32_t e = 0; e < EXPERTS; e++) {
        expected[e] = 1 + e % 8;
        if (e < 64)
            shm_mask_set(&resident, e);
        else
            shm_mask_set(&routed, e);
    }
    for (int i = 0; i < 400; i++)
        exd_trust_learn(&counts, EXD_EXPECT_PREDICTION, expected, &routed, &resident, EXPERTS);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_PREDICTION), 1);
    cr_expect_eq(exd_trust_sure(&counts, EXD_EXPECT_RECENT), 0);
}
