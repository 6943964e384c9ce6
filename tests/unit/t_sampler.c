/* SPDX-License-Identifier: MIT */
/* Sampler against its written definition, ties, odd numbers, seeds, frequencies. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_sampler.h"

TestSuite(sampler, .timeout = 30);

static const struct inf_sampler_params plain = {.temperature = 1, .top_p = 1, .repeat_penalty = 1};

static struct inf_sampler *make(struct inf_sampler_params p, uint32_t n)
{
    struct inf_sampler *s = NULL;
    struct shm_error err = {0};
    cr_assert_eq(inf_sampler_create(&p, n, &err, &s), 0, "%s", shm_error_text(&err));
    return s;
}

static int32_t once(struct inf_sampler_params p, const float *logits, uint32_t n)
{
    struct inf_sampler *s = make(p, n);
    int32_t id = inf_sampler_next(s, logits);
    inf_sampler_destroy(&s);
    return id;
}

Test(sampler, greedy_takes_lowest_of_equals)
{
    struct inf_sampler_params p = plain;
    p.temperature = 0;
    cr_assert_eq(once(p, (float[]){1, 3, 2, 3}, 4), 1);
    cr_assert_eq(once(p, (float[]){-5, -5, -5}, 3), 0);
    cr_assert_eq(once(p, (float[]){NAN, -INFINITY, -3e38f, NAN}, 4), 2);
    cr_assert_eq(once(p, (float[]){1, INFINITY, 5}, 3), 1);
    cr_assert_eq(once(p, (float[]){7}, 1), 0);
}

Test(sampler, no_number_no_token)
{
    float none[] = {NAN, -INFINITY, NAN};
    struct inf_sampler_params p = plain;
    cr_assert_eq(once(p, none, 3), -EDOM);
    p.temperature = 0;
    cr_assert_eq(once(p, none, 3), -EDOM);
    p.temperature = 1;
    p.top_k = 2;
    cr_assert_eq(once(p, none, 3), -EDOM);
    none[1] = INFINITY;
    cr_assert_eq(once(p, none, 3), 1);
    none[1] = -3.4e38f;
    p.repeat_penalty = 2; /* would be minus infinity */
    p.repeat_last_n = 4;
    struct inf_sampler *s = make(p, 3);
    inf_sampler_accept(s, 1);
    cr_assert_eq(inf_sampler_next(s, none), 1);
    inf_sampler_destroy(&s);
}

Test(sampler, same_seed_same_ids)
{
    enum { N = 500 };
    float logits[N];
    for (int i = 0; i < N; i++)
        logits[i] = (float)((i * 7919) % 101) / 20;
    struct inf_sampler_params p = plain;
    p.seed = 42;
    struct inf_sampler *a = make(p, N), *b = make(p, N);
    int differ = 0;
    int32_t first[100];
    for (int i = 0; i < 100; i++) {
        first[i] = inf_sampler_next(a, logits);
        cr_assert_eq(first[i], inf_sampler_next(b, logits));
    }
    inf_sampler_reset(b, 43);
    for (int i = 0; i < 100; i++)
        differ += first[i] != inf_sampler_next(b, logits);
    cr_assert_gt(differ, 80);
    inf_sampler_reset(a, 42);
    for (int i = 0; i < 100; i++)
        cr_assert_eq(first[i], inf_sampler_next(a, logits));
    inf_sampler_destroy(&a);
    inf_sampler_destroy(&b);
}

struct ranked {
    double logit;
    int id;
};

static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->logit != y->logit ? (x->logit < y->logit) - (x->logit > y->logit) : x->id - y->id;
}

/* The definition of the header, word for word. Gives each id's probability. */
static void define(const struct inf_sampler_params *p, const float *logits, int n, const int *window,
                   int n_window, double *ret_prob)
{
    struct ranked *r = calloc((size_t)n, sizeof *r);
    double sum = 0, run = 0, kept = 0;
    for (int i = 0; i < n; i++) {
        float l = logits[i];
        bool seen = false;
        for (int k = n_window > (int)p->repeat_last_n ? n_window - (int)p->repeat_last_n : 0; k < n_window;
             k++)
            seen |= window[k] == i;
        if (seen)
            l = l > 0 ? l / p->repeat_penalty : l * p->repeat_penalty;
        r[i] = (struct ranked){(double)l / (double)p->temperature, i};
        ret_prob[i] = 0;
    }
    qsort(r, (size_t)n, sizeof *r, by_rank);
    int k = p->top_k && p->top_k < n ? p->top_k : n, m = 0;
    for (int i = 0; i < k; i++)
        sum += exp(r[i].logit - r[0].logit);
    while (m < k) {
        run += exp(r[m++].logit - r[0].logit) / sum;
        if (p->top_p < 1 && run >= (double)p->top_p)
            break;
    }
    while (m > 1 && exp(r[m - 1].logit - r[0].logit) < (double)p->min_p)
        m--;
    for (int i = 0; i < m; i++)
        kept += exp(r[i].logit - r[0].logit);
    for (int i = 0; i < m; i++)
        ret_prob[r[i].id] = exp(r[i].logit - r[0].logit) / kept;
    free(r);
}

/* Frequencies over many draws within five standard deviations, and never an
 * id that was cut. */
Test(sampler, equals_definition)
{
    enum { N = 60, DRAWS = 20000 };
    static const struct inf_sampler_params cases[] = {
        {.temperature = 1, .top_p = 1, .repeat_penalty = 1},
        {.temperature = 0.5f, .top_p = 1, .repeat_penalty = 1},
        {.temperature = 2, .top_p = 1, .repeat_penalty = 1, .top_k = 7},
        {.temperature = 1, .top_p = 0.6f, .repeat_penalty = 1},
        {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .min_p = 0.2f},
        {.temperature = 1.5f, .top_p = 0.7f, .repeat_penalty = 1, .top_k = 12, .min_p = 0.3f},
        {.temperature = 1.5f, .top_p = 0.95f, .repeat_penalty = 1, .top_k = 1000, .min_p = 0.1f},
        {.temperature = 3, .top_p = 0.9f, .repeat_penalty = 1, .top_k = 5},
        {.temperature = 1, .top_p = 0.01f, .repeat_penalty = 1},
        {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .top_k = 1},
        {.temperature = 1, .top_p = 1, .repeat_penalty = 1, .min_p = 1},
        {.temperature = 1, .top_p = 1, .repeat_penalty = 1.5f, .repeat_last_n = 10},
        {.temperature = 0.7f, .top_p = 0.8f, .repeat_penalty = 3, .repeat_last_n = 100, .top_k = 20},
        {.temperature = 1, .top_p = 1, .repeat_penalty = 0.5f, .repeat_last_n = 3, .top_k = 10},
    };
    float logits[N];
    int window[30];
    double prob[N];
    unsigned seed = 5;
    for (int i = 0; i < N; i++)
        logits[i] = (float)(rand_r(&seed) % 400) / 100 - 2; /* both signs, some ties */
    for (int i = 0; i < 30; i++)
        window[i] = rand_r(&seed) % N;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        int count[N] = {0};
        struct inf_sampler_params p = cases[c];
        p.seed = c;
        struct inf_sampler *s = make(p, N);
        for (int i = 0; i < 30; i++)
            inf_sampler_accept(s, window[i]);
        define(&p, logits, N, window, 30, prob);
        for (int i = 0; i < DRAWS; i++) {
            int32_t id = inf_sampler_next(s, logits);
            cr_assert(id >= 0 && id < N);
            count[id]++;
        }
        for (int i = 0; i < N; i++) {
            double want = prob[i] * DRAWS, room = 5 * sqrt(want * (1 - prob[i])) + 1e-9;
            cr_assert(fabs(count[i] - want) <= room, "case %zu, id %d: %d draws, %.1f expected", c, i,
                      count[i], want);
        }
        inf_sampler_destroy(&s);
    }
}

Test(sampler, penalty_window_forgets)
{
    struct inf_sampler_params p = {.top_p = 1, .repeat_penalty = 2, .repeat_last_n = 2};
    float logits[] = {4, 3, 2.5f};
    struct inf_sampler *s = make(p, 3);
    inf_sampler_accept(s, 0);
    inf_sampler_accept(s, 0); /* twice in the window counts once: 4/2, not 4/4 */
    cr_assert_eq(inf_sampler_next(s, (float[]){4, 1.5f, 1}), 0);
    cr_assert_eq(inf_sampler_next(s, logits), 1);
    inf_sampler_accept(s, 1);
    cr_assert_eq(inf_sampler_next(s, logits), 2); /* 2, 1.5, 2.5 */
    inf_sampler_accept(s, 1);
    cr_assert_eq(inf_sampler_next(s, logits), 0); /* both zeros have left */
    inf_sampler_accept(s, -1);
    inf_sampler_accept(s, 3);
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    inf_sampler_reset(s, 0);
    inf_sampler_accept(s, 0);
    inf_sampler_reset(s, 0);
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    cr_assert_eq(inf_sampler_next(s, (float[]){-1, -2, -3}), 0);
    inf_sampler_accept(s, 0); /* below zero it moves away too: -2 */
    cr_assert_eq(inf_sampler_next(s, (float[]){-1, -1.5f, -3}), 1);
    inf_sampler_destroy(&s);
}

static void refused(struct inf_sampler_params p, const char *word)
{
    struct shm_error err = {0};
    struct inf_sampler *s = NULL;
    cr_assert_eq(inf_sampler_create(&p, 10, &err, &s), -EINVAL, "%s", word);
    cr_assert(!s && strstr(err.text, word), "%s", err.text);
}

#define BAD(field, value, word)                                                                              \
    do {                                                                                                     \
        struct inf_sampler_params p = plain;                                                                 \
        p.field = value;                                                                                     \
        refused(p, word);                                                                                    \
    } while (0)

Test(sampler, bad_parameters_are_refused)
{
    BAD(temperature, -1, "temperature");
    BAD(temperature, NAN, "temperature");
    BAD(temperature, INFINITY, "temperature");
    BAD(top_k, -1, "top-k");
    BAD(top_p, 0, "top-p");
    BAD(top_p, 1.01f, "top-p");
    BAD(top_p, NAN, "top-p");
    BAD(min_p, -0.1f, "min-p");
    BAD(min_p, 1.1f, "min-p");
    BAD(min_p, NAN, "min-p");
    BAD(repeat_penalty, 0, "repeat penalty");
    BAD(repeat_penalty, NAN, "repeat penalty");
    BAD(repeat_last_n, INF_SAMPLER_WINDOW_MAX + 1, "repeat window");
    struct inf_sampler *s = NULL;
    struct shm_error err = {0};
    cr_assert_eq(inf_sampler_create(&plain, 0, &err, &s), -EINVAL);
    struct inf_sampler_params p;
    inf_sampler_params_default(&p);
    cr_assert_eq(inf_sampler_create(&p, 10, &err, &s), 0);
    inf_sampler_destroy(&s);
    inf_sampler_destroy(&s);
    inf_sampler_destroy(NULL);
}

/* A turn that fails half-way leaves no trace in what the next ones draw. */
Test(sampler, rewind_forgets_a_failed_turn)
{
    struct inf_sampler_params p = plain;
    p.repeat_penalty = 1.5f;
    p.repeat_last_n = 5;
    float logits[50];
    for (int i = 0; i < 50; i++)
        logits[i] = (float)(i % 7);
    struct inf_sampler *s = make(p, 50);
    for (int turn = 0; turn < 4; turn++) { /* the window: empty, part-filled, full, wrapped */
        int32_t first[20];
        inf_sampler_mark(s);
        for (int i = 0; i < 20; i++)
            inf_sampler_accept(s, first[i] = inf_sampler_next(s, logits));
        inf_sampler_rewind(s);
        for (int i = 0; i < 20; i++) {
            int32_t id = inf_sampler_next(s, logits);
            cr_assert_eq(id, first[i], "turn %d, token %d: %d, was %d", turn, i, id, first[i]);
            inf_sampler_accept(s, id);
        }
        inf_sampler_rewind(s);
        for (int i = 0; i < 2 + turn; i++)
            inf_sampler_accept(s, i);
    }
    inf_sampler_destroy(&s);
}

Test(sampler, bias_and_mask)
{
    const float logits[] = {1, 3, 2, 0};
    struct inf_sampler_params p = plain;
    p.temperature = 0;
    struct inf_sampler *s = make(p, 4);
    const uint64_t some = 1 << 0 | 1 << 3, none = 0;
    cr_assert_eq(inf_sampler_next(s, logits), 1);
    inf_sampler_allow(s, &some);
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    inf_sampler_allow(s, &none);
    cr_assert_eq(inf_sampler_next(s, logits), -EDOM);
    inf_sampler_allow(s, NULL);
    cr_assert_eq(inf_sampler_bias(s, 2, 1.5f), 0);
    cr_assert_eq(inf_sampler_next(s, logits), 2);
    cr_assert_eq(inf_sampler_bias(s, 2, -INFINITY), 0);
    cr_assert_eq(inf_sampler_next(s, logits), 1);
    cr_assert_eq(inf_sampler_bias(s, 3, 2), 0);
    cr_assert_eq(inf_sampler_bias(s, 3, 2), 0); /* they add up: 4 */
    cr_assert_eq(inf_sampler_next(s, logits), 3);
    cr_assert_eq(inf_sampler_bias(s, 4, 0), -ERANGE);
    cr_assert_eq(inf_sampler_bias(s, -1, 0), -ERANGE);
    inf_sampler_destroy(&s);
    /* With a draw, too: only what is allowed, in its proportions. */
    s = make(plain, 4);
    const uint64_t two = 1 << 1 | 1 << 2;
    int first = 0;
    inf_sampler_allow(s, &two);
    for (int i = 0; i < 20000; i++) {
        int32_t id = inf_sampler_next(s, logits);
        cr_assert(id == 1 || id == 2);
        first += id == 1;
    }
    double share = exp(1) / (exp(1) + 1);
    cr_assert_float_eq(first / 20000.0, share, 0.015);
    inf_sampler_destroy(&s);
}

Test(sampler, presence_and_frequency_count_the_answer)
{
    const float logits[] = {10, 9.4f, 9};
    struct inf_sampler_params p = plain;
    p.temperature = 0;
    p.presence_penalty = 0.5f;
    p.frequency_penalty = 0.25f;
    struct inf_sampler *s = make(p, 3);
    inf_sampler_accept(s, 0); /* of the prompt: does not count */
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    inf_sampler_written(s, 0); /* 10 - 0.75 */
    cr_assert_eq(inf_sampler_next(s, logits), 1);
    inf_sampler_written(s, 1); /* 9.4 - 0.75 = 8.65 */
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    inf_sampler_written(s, 0); /* 10 - 1.0 = 9: as great as the third, and its id is lower */
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    inf_sampler_written(s, 0);
    cr_assert_eq(inf_sampler_next(s, logits), 2);
    inf_sampler_written(s, -1);
    inf_sampler_written(s, 3); /* no ids: ignored */
    inf_sampler_reset(s, 0);
    cr_assert_eq(inf_sampler_next(s, logits), 0);
    inf_sampler_destroy(&s);
    p = plain;
    p.presence_penalty = 2.5f;
    refused(p, "presence");
    p.presence_penalty = 0;
    p.frequency_penalty = NAN;
    refused(p, "frequency");
}
