/* SPDX-License-Identifier: MIT */
#include "inferd/inf_router.h"

#include "kernels/krn_host.h"

#include <string.h>

#define LANES      8 /* partial sums of a dot product */
#define TOKENS     4 /* a tile of TOKENS x EXPERTS products shares its loads */
#define EXPERTS    4
#define BLOCK      16 /* tokens of a task */
#define EXPERT_MAX 1024

typedef double vd __attribute__((vector_size(LANES * sizeof(double))));
typedef float vf __attribute__((vector_size(LANES * sizeof(float))));

static inline __attribute__((always_inline)) void dot_tile(const float *const w[EXPERTS], uint32_t hidden,
                                                           const float *const x[TOKENS],
                                                           double ret[TOKENS][EXPERTS])
{
    vd sum[TOKENS][EXPERTS] = {{{0}}};
    for (uint32_t i = 0; i < hidden; i += LANES) {
        vd weight[EXPERTS], value;
        vf piece;
        for (int e = 0; e < EXPERTS; e++) {
            memcpy(&piece, w[e] + i, sizeof piece);
            weight[e] = __builtin_convertvector(piece, vd);
        }
        for (int t = 0; t < TOKENS; t++) {
            memcpy(&piece, x[t] + i, sizeof piece);
            value = __builtin_convertvector(piece, vd);
            for (int e = 0; e < EXPERTS; e++)
                sum[t][e] += weight[e] * value;
        }
    }
    for (int t = 0; t < TOKENS; t++)
        for (int e = 0; e < EXPERTS; e++) {
            vd v = sum[t][e];
            ret[t][e] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
}

typedef void dot_tile_fn(const float *const w[EXPERTS], uint32_t hidden, const float *const x[TOKENS],
                         double ret[TOKENS][EXPERTS]);

/* The same source for each instruction set. v3 and v4 give the same bits; the
 * plain one has no fused multiply-add and may differ in the last bit of a double. */
#define DOT_TILE(name, target)                                                                               \
    static target void name(const float *const w[EXPERTS], uint32_t hidden, const float *const x[TOKENS],    \
                            double ret[TOKENS][EXPERTS])                                                     \
    {                                                                                                        \
        dot_tile(w, hidden, x, ret);                                                                         \
    }
DOT_TILE(dot_tile_baseline, )
#ifdef __x86_64__
DOT_TILE(dot_tile_v3, __attribute__((target("avx2,fma"))))
DOT_TILE(dot_tile_v4, __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma"))))
#endif

static dot_tile_fn *choose(void)
{
#ifdef __x86_64__
    const char *isa = krn_host_isa();
    if (strcmp(isa, "v4") == 0)
        return dot_tile_v4;
    if (strcmp(isa, "v3") == 0)
        return dot_tile_v3;
#endif
    return dot_tile_baseline;
}

struct job {
    const float *w, *x;
    uint32_t experts, hidden, tokens;
    float *scores;
    dot_tile_fn *dot_tile;
};

/* Scores of up to TOKENS tokens; short tails repeat their last row. */
static void score_rows(const struct job *j, uint32_t t0, uint32_t n, double (*ret)[EXPERT_MAX])
{
    const float *x[TOKENS], *w[EXPERTS];
    for (uint32_t t = 0; t < TOKENS; t++)
        x[t] = j->x + (size_t)(t0 + (t < n ? t : n - 1)) * j->hidden;
    for (uint32_t e0 = 0; e0 < j->experts; e0 += EXPERTS) {
        double tile[TOKENS][EXPERTS];
        uint32_t m = j->experts - e0 < EXPERTS ? j->experts - e0 : EXPERTS;
        for (uint32_t e = 0; e < EXPERTS; e++)
            w[e] = j->w + (size_t)(e0 + (e < m ? e : m - 1)) * j->hidden;
        j->dot_tile(w, j->hidden, x, tile);
        for (uint32_t t = 0; t < n; t++)
            memcpy(ret[t] + e0, tile[t], m * sizeof tile[t][0]);
    }
}

static void run_block(void *arg, uint32_t task, uint32_t thread)
{
    const struct job *j = arg;
    double score[TOKENS][EXPERT_MAX];
    (void)thread;
    for (uint32_t t0 = task * BLOCK; t0 < (task + 1) * BLOCK && t0 < j->tokens; t0 += TOKENS) {
        uint32_t n = j->tokens - t0 < TOKENS ? j->tokens - t0 : TOKENS;
        score_rows(j, t0, n, score);
        for (uint32_t t = 0; t < n; t++) {
            double max = score[t][0];
            for (uint32_t e = 1; e < j->experts; e++)
                max = score[t][e] > max ? score[t][e] : max;
            for (uint32_t e = 0; e < j->experts; e++)
                j->scores[(size_t)(t0 + t) * j->experts + e] = (float)(score[t][e] - max);
        }
    }
}

void inf_router_scores(struct krn_pool *pool, const float *w, uint32_t experts, uint32_t hidden,
                       const float *x, uint32_t tokens, float *scores)
{
    struct job j = {.w = w,
                    .x = x,
                    .experts = experts,
                    .hidden = hidden,
                    .tokens = tokens,
                    .scores = scores,
                    .dot_tile = choose()};
    krn_pool_run(pool, (tokens + BLOCK - 1) / BLOCK, run_block, &j);
}
