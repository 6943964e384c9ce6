/* SPDX-License-Identifier: MIT */
#include "inferd/inf_sampler.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints4 __attribute__((vector_size(16)));

#define BLOCK 64u   /* logits looked at together */
#define FEW   1024u /* top-k for which the best are kept on the way; beyond that a heap of all */

struct candidate {
    float logit;
    int32_t id;
};

struct inf_sampler {
    struct inf_sampler_params params;
    uint32_t n_vocab;
    uint64_t random[4];
    struct candidate *cands; /* n_vocab */
    double *weights;         /* n_vocab */
    int32_t *window;         /* ring of the last accepted ids */
    uint32_t window_size, window_n, window_at;
    uint32_t *seen;    /* n_vocab: how often in the window */
    uint32_t *written; /* n_vocab: how often in the answer; NULL: no such penalty */
    float *bias;       /* n_vocab; NULL: none */
    const uint64_t *allowed;
    struct {
        uint64_t random[4];
        int32_t *window;
        uint32_t window_n, window_at;
    } mark;
};

void inf_sampler_params_default(struct inf_sampler_params *params)
{
    *params = (struct inf_sampler_params){
        .temperature = 0.7f, .top_k = 20, .top_p = 0.8f, .repeat_penalty = 1, .repeat_last_n = 64};
}

static uint64_t rotate_left(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

static uint64_t random_next(uint64_t s[4])
{
    uint64_t result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

static void random_seed(uint64_t s[4], uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        seed += 0x9E3779B97F4A7C15u;
        uint64_t z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        s[i] = z ^ z >> 31;
    }
}

int inf_sampler_check(const struct inf_sampler_params *p, struct shm_error *err)
{
    /* Comparisons written so that NaN fails them. */
    if (!(p->temperature >= 0 && p->temperature <= 100))
        return shm_error_set(err, EINVAL, "sampler: temperature %g; use 0 (greedy) to 100", p->temperature);
    if (p->top_k < 0)
        return shm_error_set(err, EINVAL, "sampler: top-k %d; use 0 (off) or more", p->top_k);
    if (!(p->top_p > 0 && p->top_p <= 1))
        return shm_error_set(err, EINVAL, "sampler: top-p %g; use a value above 0, up to 1 (off)", p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1))
        return shm_error_set(err, EINVAL, "sampler: min-p %g; use 0 (off) to 1", p->min_p);
    if (!(p->repeat_penalty > 0 && p->repeat_penalty <= 100))
        return shm_error_set(err, EINVAL,
                             "sampler: repeat penalty %g; use a value above 0, up to 100; 1 is off",
                             p->repeat_penalty);
    if (!(p->presence_penalty >= -2 && p->presence_penalty <= 2))
        return shm_error_set(err, EINVAL, "sampler: presence penalty %g; use -2 to 2, 0 is off",
                             p->presence_penalty);
    if (!(p->frequency_penalty >= -2 && p->frequency_penalty <= 2))
        return shm_error_set(err, EINVAL, "sampler: frequency penalty %g; use -2 to 2, 0 is off",
                             p->frequency_penalty);
    if (p->repeat_last_n > INF_SAMPLER_WINDOW_MAX)
        return shm_error_set(err, EINVAL, "sampler: repeat window of %u ids; use at most %u",
                             p->repeat_last_n, INF_SAMPLER_WINDOW_MAX);
    return 0;
}

int inf_sampler_create(const struct inf_sampler_params *params, uint32_t n_vocab, struct shm_error *err,
                       struct inf_sampler **ret_sampler)
{
    int rc = inf_sampler_check(params, err);
    if (rc)
        return rc;
    if (!n_vocab || n_vocab > INT32_MAX)
        return shm_error_set(err, EINVAL, "sampler: vocabulary of %u tokens; use a model with a vocabulary",
                             n_vocab);
    struct inf_sampler *s = calloc(1, sizeof *s);
    if (s) {
        s->params = *params;
        s->n_vocab = n_vocab;
        s->window_size = params->repeat_penalty == 1 ? 0 : params->repeat_last_n;
        s->cands = calloc(n_vocab, sizeof *s->cands);
        s->weights = calloc(n_vocab, sizeof *s->weights);
        s->window = calloc((size_t)s->window_size + 1, sizeof *s->window);
        s->mark.window = calloc((size_t)s->window_size + 1, sizeof *s->mark.window);
        s->seen = calloc(n_vocab, sizeof *s->seen);
    }
    bool count = params->presence_penalty != 0 || params->frequency_penalty != 0;
    if (s && count)
        s->written = calloc(n_vocab, sizeof *s->written);
    if (!s || (count && !s->written) || !s->cands || !s->weights || !s->window || !s->mark.window ||
        !s->seen) {
        inf_sampler_destroy(&s);
        return shm_error_set(err, ENOMEM, "sampler: no memory for %u logits; free some", n_vocab);
    }
    random_seed(s->random, params->seed);
    inf_sampler_mark(s);
    *ret_sampler = s;
    return 0;
}

void inf_sampler_destroy(struct inf_sampler **sampler)
{
    struct inf_sampler *s = sampler ? *sampler : NULL;
    if (!s)
        return;
    free(s->bias);
    free(s->written);
    free(s->seen);
    free(s->mark.window);
    free(s->window);
    free(s->weights);
    free(s->cands);
    free(s);
    *sampler = NULL;
}

void inf_sampler_accept(struct inf_sampler *s, int32_t id)
{
    if (id < 0 || (uint32_t)id >= s->n_vocab || !s->window_size)
        return;
    if (s->window_n == s->window_size)
        s->seen[s->window[s->window_at]]--;
    else
        s->window_n++;
    s->window[s->window_at] = id;
    s->seen[id]++;
    s->window_at = (s->window_at + 1) % s->window_size;
}

void inf_sampler_written(struct inf_sampler *s, int32_t id)
{
    if (s->written && id >= 0 && (uint32_t)id < s->n_vocab)
        s->written[id]++;
}

int inf_sampler_bias(struct inf_sampler *s, int32_t id, float bias)
{
    if (id < 0 || (uint32_t)id >= s->n_vocab)
        return -ERANGE;
    if (!s->bias && !(s->bias = calloc(s->n_vocab, sizeof *s->bias)))
        return -ENOMEM;
    s->bias[id] += bias;
    return 0;
}

void inf_sampler_allow(struct inf_sampler *s, const uint64_t *bits)
{
    s->allowed = bits;
}

void inf_sampler_reset(struct inf_sampler *s, uint64_t seed)
{
    if (s->written)
        memset(s->written, 0, s->n_vocab * sizeof *s->written);
    memset(s->seen, 0, s->n_vocab * sizeof *s->seen);
    s->window_n = s->window_at = 0;
    random_seed(s->random, seed);
}

void inf_sampler_mark(struct inf_sampler *s)
{
    memcpy(s->mark.random, s->random, sizeof s->random);
    memcpy(s->mark.window, s->window, s->window_n * sizeof *s->window);
    s->mark.window_n = s->window_n;
    s->mark.window_at = s->window_at;
}

void inf_sampler_rewind(struct inf_sampler *s)
{
    memcpy(s->random, s->mark.random, sizeof s->random);
    memcpy(s->window, s->mark.window, s->mark.window_n * sizeof *s->window);
    s->window_n = s->mark.window_n;
    s->window_at = s->mark.window_at;
    memset(s->seen, 0, s->n_vocab * sizeof *s->seen);
    for (uint32_t i = 0; i < s->window_n; i++)
        s->seen[s->window[i]]++;
}

static float penalized(const struct inf_sampler *s, float logit, uint32_t id)
{
    if (s->bias)
        logit += s->bias[id];
    if (s->written && s->written[id])
        logit -= s->params.presence_penalty + s->params.frequency_penalty * (float)s->written[id];
    if (!s->seen[id])
        return logit;
    return logit > 0 ? logit / s->params.repeat_penalty : logit * s->params.repeat_penalty;
}

static bool before(const struct candidate *a, const struct candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static void sift_down(struct candidate *heap, uint32_t n, uint32_t at)
{
    struct candidate moved = heap[at];
    for (;;) {
        size_t child = 2 * (size_t)at + 1;
        if (child >= n)
            break;
        if (child + 1 < n && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &moved))
            break;
        heap[at] = heap[child];
        at = (uint32_t)child;
    }
    heap[at] = moved;
}

/* The same with the worst on top. */
static void sift_worst(struct candidate *heap, uint32_t n, uint32_t at)
{
    const struct candidate moved = heap[at];
    for (;;) {
        size_t child = 2 * (size_t)at + 1;
        if (child >= n)
            break;
        if (child + 1 < n && before(&heap[child], &heap[child + 1]))
            child++;
        if (!before(&moved, &heap[child]))
            break;
        heap[at] = heap[child];
        at = (uint32_t)child;
    }
    heap[at] = moved;
}

/* Takes the best candidate off the heap and puts it at heap[n - 1]. */
static const struct candidate *pop(struct candidate *heap, uint32_t n)
{
    struct candidate top = heap[0];
    heap[0] = heap[n - 1];
    sift_down(heap, n - 1, 0);
    heap[n - 1] = top;
    return &heap[n - 1];
}

/* False: the token is out of question. */
static bool candidate_of(const struct inf_sampler *s, const float *logits, uint32_t i,
                         struct candidate *ret_candidate)
{
    const float logit = logits[i];
    if (isnan(logit) || (isinf(logit) && logit < 0))
        return false;
    if (s->allowed && !(s->allowed[i / 64] >> (i % 64) & 1))
        return false;
    if (s->bias && isinf(s->bias[i]) && s->bias[i] < 0)
        return false;
    /* Finite from here on, so that differences are numbers. */
    *ret_candidate = (struct candidate){.logit = fmaxf(-FLT_MAX, fminf(FLT_MAX, penalized(s, logit, i))),
                                        .id = (int32_t)i};
    return true;
}

static bool any_above(const float *block, float limit)
{
    const floats4 t = {limit, limit, limit, limit};
    ints4 above = {0};
    for (uint32_t j = 0; j < BLOCK; j += 4) {
        floats4 v;
        memcpy(&v, block + j, sizeof v);
        above |= v > t;
    }
    return above[0] | above[1] | above[2] | above[3];
}

/* The k best, k at most n_vocab: cands[k - 1] first, as pops of a whole heap would leave them. Returns how
 * many there are. Most logits are below the worst that is kept, which a look at many at a time shows. */
static uint32_t best_of(struct inf_sampler *s, const float *logits, uint32_t k)
{
    struct candidate *kept = s->cands;                             /* a heap with the worst on top */
    const bool plain = !s->window_size && !s->bias && !s->written; /* no logit is changed */
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_vocab;) {
        if (plain && n == k) {
            const float worst = kept[0].logit;
            while (i + BLOCK <= s->n_vocab) {
                if (any_above(logits + i, worst))
                    break;
                i += BLOCK;
            }
        }
        const uint32_t end = s->n_vocab - i < BLOCK ? s->n_vocab : i + BLOCK;
        for (; i < end; i++) {
            struct candidate c;
            if (!candidate_of(s, logits, i, &c))
                continue;
            if (n < k) {
                uint32_t at = n++;
                for (; at && before(&kept[(at - 1) / 2], &c); at = (at - 1) / 2)
                    kept[at] = kept[(at - 1) / 2];
                kept[at] = c;
            } else if (before(&c, &kept[0])) {
                kept[0] = c;
                sift_worst(kept, k, 0);
            }
        }
    }
    for (uint32_t left = n; left > 1; left--) { /* the worst to the end, then the other way round */
        const struct candidate worst = kept[0];
        kept[0] = kept[left - 1];
        sift_worst(kept, left - 1, 0);
        kept[left - 1] = worst;
    }
    for (uint32_t i = 0; i < n / 2; i++) {
        const struct candidate c = kept[i];
        kept[i] = kept[n - 1 - i];
        kept[n - 1 - i] = c;
    }
    return n;
}

static int32_t draw(struct inf_sampler *s, const struct candidate *cands, uint32_t n, int step, double sum)
{
    double at = (double)(random_next(s->random) >> 11) * 0x1p-53 * sum;
    int32_t last = -1;
    for (uint32_t i = 0; i < n; i++, cands += step) {
        if (s->weights[i] <= 0)
            continue;
        last = cands->id;
        if (at < s->weights[i])
            return last;
        at -= s->weights[i];
    }
    return last; /* rounding ate the rest */
}

int32_t inf_sampler_next(struct inf_sampler *s, const float *logits)
{
    const struct inf_sampler_params *p = &s->params;
    const uint32_t few = p->temperature == 0 ? 1 : (uint32_t)p->top_k;
    const bool sorted = few && few <= FEW && few < s->n_vocab && best_of(s, logits, few) == few;
    struct candidate best = {0};
    uint32_t n = 0;
    if (sorted) {
        n = few;
        best = s->cands[n - 1];
    } else {
        for (uint32_t i = 0; i < s->n_vocab; i++) {
            struct candidate c;
            if (!candidate_of(s, logits, i, &c))
                continue;
            if (!n || before(&c, &best))
                best = c;
            s->cands[n++] = c;
        }
    }
    if (!n)
        return -EDOM;
    if (p->temperature == 0)
        return best.id;

    double scale = 1.0 / (double)p->temperature, sum = 0, kept = 0;
    if (!p->top_k && p->top_p >= 1 && p->min_p <= 0) { /* nothing is cut: no order is needed */
        for (uint32_t i = 0; i < n; i++)
            sum += s->weights[i] = exp(((double)s->cands[i].logit - (double)best.logit) * scale);
        return draw(s, s->cands, n, 1, sum);
    }
    for (uint32_t i = n / 2; i-- > 0 && !sorted;)
        sift_down(s->cands, n, i);
    /* The best come off the heap to the array's end, s->cands[n - 1] first.
     * Without top-k the heap is opened only as far as needed: mostly a few. */
    bool cut = sorted || (p->top_k && (uint32_t)p->top_k < n);
    uint32_t limit = cut ? (uint32_t)p->top_k : n, n_kept = 0;
    for (uint32_t i = 0; i < limit; i++) {
        const struct candidate *c = sorted ? &s->cands[n - 1 - i] : cut ? pop(s->cands, n - i) : &s->cands[i];
        if (cut || p->top_p < 1)
            sum += s->weights[i] = exp(((double)c->logit - (double)best.logit) * scale);
    }
    while (n_kept < limit) {
        const struct candidate *c = cut ? &s->cands[n - 1 - n_kept] : pop(s->cands, n - n_kept);
        double weight = exp(((double)c->logit - (double)best.logit) * scale);
        if (weight < (double)p->min_p) /* the top one's is 1 */
            break;
        s->weights[n_kept++] = weight;
        kept += weight;
        if (p->top_p < 1 && kept >= (double)p->top_p * sum)
            break;
    }
    return draw(s, s->cands + n - 1, n_kept, -1, kept);
}
