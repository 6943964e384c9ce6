/* SPDX-License-Identifier: MIT */
#include "inferd/inf_router.h"

#include <string.h>

#define LANES      8  /* partial sums of a dot product */
#define TOKENS     4  /* that share one load of the weights */
#define BLOCK      16 /* tokens of a task */
#define EXPERT_MAX 1024

typedef double vd __attribute__((vector_size(LANES * sizeof(double))));
typedef float vf __attribute__((vector_size(LANES * sizeof(float))));

struct job {
    const float *w, *x;
    uint32_t experts, hidden, tokens;
    float *scores;
};

/* Clones with wider registers give the same bits: contraction is off for this file. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void
dot_rows(const float *w, uint32_t experts, uint32_t hidden, const float *const x[TOKENS],
         double (*ret)[EXPERT_MAX])
{
    for (uint32_t e = 0; e < experts; e++) {
        const float *row = w + (size_t)e * hidden;
        vd sum[TOKENS] = {{0}};
        for (uint32_t i = 0; i < hidden; i += LANES) {
            vf piece;
            memcpy(&piece, row + i, sizeof piece);
            vd weight = __builtin_convertvector(piece, vd);
            for (int t = 0; t < TOKENS; t++) {
                memcpy(&piece, x[t] + i, sizeof piece);
                sum[t] += weight * __builtin_convertvector(piece, vd);
            }
        }
        for (int t = 0; t < TOKENS; t++) {
            vd v = sum[t];
            ret[t][e] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
    }
}

static void run_block(void *arg, uint32_t task, uint32_t thread)
{
    const struct job *j = arg;
    double score[TOKENS][EXPERT_MAX];
    (void)thread;
    for (uint32_t t0 = task * BLOCK; t0 < (task + 1) * BLOCK && t0 < j->tokens; t0 += TOKENS) {
        uint32_t n = j->tokens - t0 < TOKENS ? j->tokens - t0 : TOKENS;
        const float *x[TOKENS];
        for (uint32_t t = 0; t < TOKENS; t++) /* a short tail repeats its last token */
            x[t] = j->x + (size_t)(t0 + (t < n ? t : n - 1)) * j->hidden;
        dot_rows(j->w, j->experts, j->hidden, x, score);
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
    struct job j = {.w = w, .x = x, .experts = experts, .hidden = hidden, .tokens = tokens, .scores = scores};
    krn_pool_run(pool, (tokens + BLOCK - 1) / BLOCK, run_block, &j);
}
