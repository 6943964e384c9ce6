/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: routers of calibrated skew, and the check of it without a model.
 *
 * A token's logit for expert e is skew * b_e + noise of variance 1. The bias b
 * has three kinds of experts: 1.5 * topk hot ones that take nearly all places,
 * a flat floor where each expert is used by about 0.08% of the tokens, and 3%
 * cold ones that hardly anything uses. Only a flat floor falls as fast as
 * wanted between 1,046 and 1,979 tokens. HOT was fitted (128 experts, top 8)
 * to 42%, 22% and 3% unrouted after 1,046, 1,979 and 31,000 tokens; since the
 * hot ones grow with topk, other shapes come out near those shares too.
 * A forward pass (16 layers, width 512, with attention and experts) counts 41.9%
 * and 22.6% after 1,046 and 1,979 tokens. Real text repeats tokens and stays on
 * a topic; independent tokens do not. And since layers add little to the
 * residual stream, the next layer's routing is easier to predict than a real
 * model's.
 */
#include "tools/mkm_model.h"
#include "tools/mkm_rng.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define HOT        3.71 /* mean bias of the hot experts above the floor */
#define HOT_SPREAD 0.80 /* hottest and least hot: HOT +- this */
#define FLOOR_HALF 0.03
#define COLD_TOP   (-1.2)
#define COLD_END   (-2.0)

static const uint32_t sim_tokens[MKM_SIM_POINTS] = {64, 512, 1046, 1979, 4096, 8192, 31000};

static double between(double a, double b, uint32_t i, uint32_t n)
{
    return n > 1 ? a + (b - a) * i / (n - 1) : (a + b) / 2;
}

/* Bias by rank, hot to cold, mean 0. */
static void make_bias(uint32_t n, uint32_t topk, double *ret_b)
{
    uint32_t hot = (3 * topk + 1) / 2, cold = (n + 16) / 32, floor_n;
    double mean = 0;

    if (hot > n)
        hot = n;
    if (cold > n - hot)
        cold = n - hot;
    floor_n = n - hot - cold;
    for (uint32_t i = 0; i < n; i++) {
        if (i < hot)
            ret_b[i] = between(HOT + HOT_SPREAD, HOT - HOT_SPREAD, i, hot);
        else if (i < hot + floor_n)
            ret_b[i] = between(FLOOR_HALF, -FLOOR_HALF, i - hot, floor_n);
        else
            ret_b[i] = between(COLD_TOP, COLD_END, i - hot - floor_n, cold);
        mean += ret_b[i] / n;
    }
    for (uint32_t i = 0; i < n; i++)
        ret_b[i] -= mean;
}

void mkm_common_vector(const struct mkm_shape *shape, float *ret_s)
{
    uint64_t state = mkm_stream(shape->seed, MKM_STREAM_COMMON, 0, 0);

    for (uint32_t i = 0; i < shape->hidden; i++)
        ret_s[i] = mkm_next(&state) >> 63 ? 1.0f : -1.0f;
}

void mkm_router(const struct mkm_shape *shape, uint32_t layer, const float *s, double *b, float *ret_w)
{
    uint32_t h = shape->hidden, n = shape->experts;
    uint64_t state = mkm_stream(shape->seed, MKM_STREAM_ROUTER, layer, 0);
    double rms = sqrt(2 + MKM_DRIFT * layer); /* of the residual here */
    double own = sqrt(1 + MKM_DRIFT * layer); /* of its part that differs between tokens */

    make_bias(n, shape->topk, b);
    for (uint32_t i = n - 1; i > 0; i--) { /* other experts are hot in each layer */
        uint32_t j = mkm_below(&state, i + 1);
        double t = b[i];
        b[i] = b[j];
        b[j] = t;
    }
    for (uint32_t e = 0; e < n; e++) {
        float *row = ret_w + (size_t)e * h;
        double along = 0, square = 0, scale;
        for (uint32_t i = 0; i < h; i++) {
            row[i] = mkm_normal(&state);
            along += (double)row[i] * s[i];
        }
        for (uint32_t i = 0; i < h; i++) {
            row[i] -= (float)(along / h) * s[i];
            square += (double)row[i] * row[i];
        }
        /* Exact length: the floor's use depends on the far tail, so 2% of length would be 20% of use. */
        scale = square > 0 ? rms / own / sqrt(square) : 0;
        for (uint32_t i = 0; i < h; i++)
            row[i] = (float)(row[i] * scale + shape->skew * b[e] * rms / h * s[i]);
    }
}

/* ---- simulation ---- */

#define SIM_LAYERS_MAX 6u
#define SIM_TOKENS     31000u
#define SIM_PANEL      32u
#define SIM_BLOCK      50u /* tokens at a time; divides SIM_TOKENS */

struct sim_layer {   /* one layer's router and what it met */
    float *w;        /* hidden rows of experts (transposed, so that the inner loop vectorizes) */
    uint32_t *first; /* first token that used the expert */
    uint64_t *used;
};

struct sim {
    const struct mkm_shape *shape;
    float *s;
    struct sim_layer layers[SIM_LAYERS_MAX];
    uint32_t n_layers;
    atomic_uint next_block;
    pthread_mutex_t lock;
    int error;
};

/* out[e] = x . row e. The sums of one panel stay in registers. */
/* Nine tenths of the time; checked element by element it would take minutes. */
__attribute__((no_sanitize("address", "undefined"))) static void
logits(const float *restrict x, const float *restrict w, uint32_t h, uint32_t n, float *restrict out)
{
    for (uint32_t e = 0; e < n; e += SIM_PANEL, w += (size_t)h * SIM_PANEL) {
        float acc[SIM_PANEL] = {0};
        uint32_t m = n - e < SIM_PANEL ? n - e : SIM_PANEL;
        for (uint32_t i = 0; i < h; i++)
            for (uint32_t j = 0; j < SIM_PANEL; j++)
                acc[j] += x[i] * w[(size_t)i * SIM_PANEL + j];
        memcpy(out + e, acc, m * sizeof *out);
    }
}

/* Marks the topk largest of out, which it destroys. */
static void note_top(struct sim *sim, struct sim_layer *layer, uint32_t token, float *out)
{
    uint32_t n = sim->shape->experts;

    for (uint32_t k = 0; k < sim->shape->topk; k++) {
        uint32_t best = 0;
        for (uint32_t e = 1; e < n; e++)
            if (out[e] > out[best])
                best = e;
        out[best] = -INFINITY;
        layer->used[best]++;
        if (token < layer->first[best])
            layer->first[best] = token;
    }
}

static void simulate_block(struct sim *sim, uint32_t block, float *z, float *x, float *all)
{
    const struct mkm_shape *sh = sim->shape;
    uint32_t h = sh->hidden, n = sh->experts;

    for (uint32_t t = 0; t < SIM_BLOCK; t++) {
        uint64_t state = mkm_stream(sh->seed, MKM_STREAM_SIM, block * SIM_BLOCK + t, 0);
        for (uint32_t i = 0; i < h; i++)
            z[i] = mkm_normal(&state);
        for (uint32_t l = 0; l < sim->n_layers; l++) {
            /* What the layers before added counts as noise. */
            float grow = (float)sqrt(1 + MKM_DRIFT * l), scale;
            double square = 0;
            for (uint32_t i = 0; i < h; i++) {
                x[i] = sim->s[i] + grow * z[i];
                square += (double)x[i] * x[i];
            }
            scale = (float)(1 / sqrt(square / h));
            for (uint32_t i = 0; i < h; i++)
                x[i] *= scale;
            logits(x, sim->layers[l].w, h, n, all + ((size_t)t * sim->n_layers + l) * n);
        }
    }
    pthread_mutex_lock(&sim->lock);
    for (uint32_t t = 0; t < SIM_BLOCK; t++)
        for (uint32_t l = 0; l < sim->n_layers; l++)
            note_top(sim, &sim->layers[l], block * SIM_BLOCK + t, all + ((size_t)t * sim->n_layers + l) * n);
    pthread_mutex_unlock(&sim->lock);
}

static void *sim_main(void *arg)
{
    struct sim *sim = arg;
    float *x = malloc(sim->shape->hidden * sizeof *x), *z = malloc(sim->shape->hidden * sizeof *z);
    float *all = malloc(sizeof *all * SIM_BLOCK * sim->n_layers * sim->shape->experts);
    uint32_t block;

    if (x && z && all) {
        while ((block = atomic_fetch_add(&sim->next_block, 1)) < SIM_TOKENS / SIM_BLOCK)
            simulate_block(sim, block, z, x, all);
    } else {
        pthread_mutex_lock(&sim->lock);
        sim->error = -ENOMEM;
        pthread_mutex_unlock(&sim->lock);
    }
    free(x);
    free(z);
    free(all);
    return NULL;
}

static int sim_prepare(struct sim *sim)
{
    const struct mkm_shape *sh = sim->shape;
    uint32_t h = sh->hidden, n = sh->experts;
    float *w = malloc(sizeof *w * h * n);
    double *b = malloc(sizeof *b * n);
    int r = -ENOMEM;

    sim->s = malloc(sizeof *sim->s * h);
    if (!w || !b || !sim->s)
        goto free_scratch;
    mkm_common_vector(sh, sim->s);
    for (uint32_t l = 0; l < sim->n_layers; l++) {
        struct sim_layer *layer = &sim->layers[l];
        layer->w = calloc((n + SIM_PANEL - 1) / SIM_PANEL * SIM_PANEL, sizeof *w * h);
        layer->first = malloc(sizeof *layer->first * n);
        layer->used = calloc(n, sizeof *layer->used);
        if (!layer->w || !layer->first || !layer->used)
            goto free_scratch;
        mkm_router(sh, l, sim->s, b, w);
        for (uint32_t i = 0; i < h; i++)
            for (uint32_t e = 0; e < n; e++)
                layer->w[((size_t)(e / SIM_PANEL) * h + i) * SIM_PANEL + e % SIM_PANEL] =
                    w[(size_t)e * h + i];
        memset(layer->first, 0xff, sizeof *layer->first * n);
    }
    r = 0;
free_scratch:
    free(w);
    free(b);
    return r;
}

static int descending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

static void sim_result(struct sim *sim, struct mkm_simulation *ret)
{
    uint32_t n = sim->shape->experts;

    *ret = (struct mkm_simulation){.layers = sim->n_layers};
    for (unsigned p = 0; p < MKM_SIM_POINTS; p++) {
        ret->tokens[p] = sim_tokens[p];
        ret->low[p] = 1;
        for (uint32_t l = 0; l < sim->n_layers; l++) {
            double idle = 0;
            for (uint32_t e = 0; e < n; e++)
                idle += sim->layers[l].first[e] >= sim_tokens[p];
            idle /= n;
            ret->unrouted[p] += idle / sim->n_layers;
            ret->low[p] = idle < ret->low[p] ? idle : ret->low[p];
            ret->high[p] = idle > ret->high[p] ? idle : ret->high[p];
        }
    }
    for (uint32_t l = 0; l < sim->n_layers; l++) {
        qsort(sim->layers[l].used, n, sizeof(uint64_t), descending);
        for (unsigned i = 0; i < sizeof ret->used_by / sizeof *ret->used_by && 1u << i <= n; i++)
            ret->used_by[i] += (double)sim->layers[l].used[(1u << i) - 1] / SIM_TOKENS / sim->n_layers;
    }
}

int mkm_simulate(const struct mkm_shape *shape, uint32_t threads, struct mkm_simulation *ret_sim,
                 struct shm_error *err)
{
    struct sim sim = {.shape = shape,
                      .n_layers = shape->layers < SIM_LAYERS_MAX ? shape->layers : SIM_LAYERS_MAX};
    pthread_t ids[64];
    uint32_t started = 0;
    int r;

    pthread_mutex_init(&sim.lock, NULL);
    r = sim_prepare(&sim);
    if (r == 0) {
        while (started + 1 < threads && started < 63 && !pthread_create(&ids[started], NULL, sim_main, &sim))
            started++;
        sim_main(&sim);
        while (started)
            pthread_join(ids[--started], NULL);
        r = sim.error;
    }
    if (r == 0)
        sim_result(&sim, ret_sim);
    else
        shm_error_set(err, r, "no memory for the routers of %u layers of this shape", sim.n_layers);
    for (uint32_t l = 0; l < sim.n_layers; l++) {
        free(sim.layers[l].w);
        free(sim.layers[l].first);
        free(sim.layers[l].used);
    }
    free(sim.s);
    pthread_mutex_destroy(&sim.lock);
    return r;
}
