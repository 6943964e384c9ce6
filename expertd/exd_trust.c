/* SPDX-License-Identifier: MIT */
#include "expertd/exd_trust.h"

#include <string.h>

/* So many experts of a bin and of those above it were routed. A guess in vain costs a copy; one that waits
 * for its turn alone costs a tenth of one, as the link takes batches faster. */
#define SURE        0.95
#define SHARE_LEAST 64u    /* experts that say something of all */
#define SHARE_MOST  512u   /* then the older ones count half */
#define SEEN_MAX    16384u /* likewise, of a bin: text changes */
#define PRIOR       128u   /* experts that the beginning stands for */

void exd_trust_begin(struct exd_trust_counts *c)
{
    /* Of the next layer's router on this layer's hidden state, each token's choices are mostly right: many
     * tokens are not all wrong. Recent routing says less. */
    static const uint32_t predicted[EXD_TRUST_BINS] = {96, 108, 120, 126, 128, 128};
    memset(c, 0, sizeof *c);
    for (uint32_t b = 0; b < EXD_TRUST_BINS; b++) {
        c->seen[EXD_EXPECT_PREDICTION][b] = c->seen[EXD_EXPECT_RECENT][b] = c->seen[EXD_EXPECT_FIRST][b] =
            PRIOR;
        c->right[EXD_EXPECT_PREDICTION][b] = predicted[b];
        c->right[EXD_EXPECT_RECENT][b] = c->right[EXD_EXPECT_FIRST][b] = PRIOR / 2;
    }
}

void exd_trust_stream(struct exd_trust_counts *c)
{
    c->all = c->routed = 0;
}

uint32_t exd_trust_sure(const struct exd_trust_counts *c, enum exd_expectation from)
{
    if (from == EXD_EXPECT_KNOWN)
        return 1;
    uint32_t sure = UINT32_MAX;
    if (from == EXD_EXPECT_NOTHING)
        return sure;
    if (from == EXD_EXPECT_RECENT && c->all >= SHARE_LEAST && (double)c->routed >= SURE * (double)c->all)
        return 0;
    for (uint32_t b = EXD_TRUST_BINS; b-- > 0;) {
        if ((double)c->right[from][b] < SURE * (double)c->seen[from][b])
            break;
        sure = UINT32_C(1) << b;
    }
    return sure;
}

void exd_trust_learn(struct exd_trust_counts *c, enum exd_expectation from, const uint32_t *expected,
                     const struct shm_mask *routed, const struct shm_mask *resident, uint32_t experts)
{
    for (uint32_t e = 0; e < experts; e++) {
        c->all += !shm_mask_test(resident, e);
        c->routed += !shm_mask_test(resident, e) && shm_mask_test(routed, e);
    }
    if (c->all > SHARE_MOST) {
        c->all /= 2;
        c->routed /= 2;
    }
    if (!expected || from == EXD_EXPECT_NOTHING || from == EXD_EXPECT_KNOWN)
        return;
    uint32_t most = 0;
    for (uint32_t e = 0; e < experts; e++) {
        if (!expected[e] || shm_mask_test(resident, e))
            continue;
        uint32_t b = 31 - (uint32_t)__builtin_clz(expected[e]);
        b = b < EXD_TRUST_BINS ? b : EXD_TRUST_BINS - 1;
        c->right[from][b] += shm_mask_test(routed, e);
        uint32_t seen = ++c->seen[from][b];
        most = seen > most ? seen : most;
    }
    for (uint32_t b = 0; most > SEEN_MAX && b < EXD_TRUST_BINS; b++) {
        c->seen[from][b] = (c->seen[from][b] + 1) / 2;
        c->right[from][b] /= 2;
    }
}
