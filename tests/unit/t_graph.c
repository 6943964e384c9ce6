/* SPDX-License-Identifier: MIT */
/*
 * The shipped model through graph, stream, issuer and link, in one process,
 * against the reference outputs: logits, routing, greedy text; and the same
 * bits under every setting of the stream.
 */
#include "tests/unit/worker_fixture.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

TestSuite(graph, .timeout = 120);

static struct fix_arena arena;
static json_t *prompts, *golden;

static json_t *load(const char *name)
{
    char path[4096];
    json_error_t error;
    snprintf(path, sizeof path, "%s/tests/data/goldens/%s", fix_src(), name);
    json_t *j = json_load_file(path, 0, &error);
    cr_assert(j, "%s: %s", path, error.text);
    return j;
}

static void setup(void)
{
    fix_arena_load("tools/model/story-q4_k.gguf", &arena);
    prompts = load("prompts.json");
    golden = load("story-q4_k.json");
}

static const json_t *named(const json_t *list, const char *name)
{
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) if (strcmp(json_string_value(json_object_get(item, "name")), name) ==
                                          0) return item;
    cr_assert_fail("no golden named %s", name);
    return NULL;
}

/* ids of a prompt; the caller frees. */
static int32_t *prompt_ids(const char *name, uint32_t *ret_n)
{
    const json_t *ids = json_object_get(named(json_object_get(prompts, "prompts"), name), "ids");
    *ret_n = (uint32_t)json_array_size(ids);
    int32_t *at = calloc(*ret_n, sizeof *at);
    for (uint32_t i = 0; i < *ret_n; i++)
        at[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    return at;
}

struct seen {
    uint32_t vocab, rows;
    float *last; /* [vocab] */
    XXH64_hash_t hash;
    uint8_t *routes; /* [layers][tokens][8] or NULL */
    uint32_t tokens;
    struct inf_stream_sum sum;
};

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct seen *s = ctx;
    (void)piece;
    (void)position;
    s->rows += rows;
    memcpy(s->last, logits + (size_t)(rows - 1) * s->vocab, s->vocab * sizeof *logits);
    for (uint32_t r = 0; r < rows; r++)
        s->hash = XXH3_64bits_withSeed(logits + (size_t)r * s->vocab, s->vocab * sizeof *logits, s->hash);
}

static void on_routes(void *ctx, uint32_t piece, uint32_t layer, uint32_t position, uint32_t tokens,
                      const uint32_t *ids, const float *weights)
{
    struct seen *s = ctx;
    (void)piece;
    (void)weights;
    for (size_t i = 0; s->routes && i < (size_t)tokens * 8; i++)
        s->routes[((size_t)layer * s->tokens + position) * 8 + i] = (uint8_t)ids[i];
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    inf_stream_sum_add(&((struct seen *)ctx)->sum, chunk);
}

static struct inf_read_options options(struct seen *s, enum inf_logits_wanted logits)
{
    s->vocab = arena.view.catalog->hparams.vocab;
    s->last = calloc(s->vocab, sizeof *s->last);
    return (struct inf_read_options){
        .logits = logits, .on_logits = on_logits, .on_routes = on_routes, .on_chunk = on_chunk, .ctx = s};
}

static int by_value(const void *a, const void *b)
{
    return *(const uint8_t *)a - *(const uint8_t *)b;
}

/* Routing sets of every token, those named as close calls aside. */
static void check_routes(const json_t *want, const struct seen *s)
{
    const json_t *close = json_object_get(want, "close_calls"), *routes = json_object_get(want, "routes");
    size_t layer, i, different = 0;
    json_t *hex, *call;
    json_array_foreach(routes, layer, hex)
    {
        const char *text = json_string_value(hex);
        for (uint32_t t = 0; t < s->tokens; t++) {
            uint8_t mine[8], theirs[8];
            bool tie = false;
            memcpy(mine, s->routes + (layer * s->tokens + t) * 8, 8);
            for (int k = 0; k < 8; k++) {
                unsigned byte;
                cr_assert(sscanf(text + (size_t)t * 16 + k * 2, "%2x", &byte) == 1);
                theirs[k] = (uint8_t)byte;
            }
            qsort(mine, 8, 1, by_value);
            qsort(theirs, 8, 1, by_value);
            json_array_foreach(close, i, call) tie |=
                json_integer_value(json_array_get(call, 0)) == (json_int_t)layer &&
                json_integer_value(json_array_get(call, 1)) == t;
            different += !tie && memcmp(mine, theirs, 8) != 0;
        }
    }
    cr_expect_eq(different, 0, "%zu routing sets differ", different);
}

static void check_top20(const json_t *want, const struct seen *s)
{
    const json_t *ids = json_object_get(want, "top20_ids"), *logits = json_object_get(want, "top20_logits");
    for (size_t i = 0; i < 20; i++) {
        double theirs = json_number_value(json_array_get(logits, i));
        float mine = s->last[json_integer_value(json_array_get(ids, i))];
        cr_expect(fabs(mine - theirs) <= 1e-3 * fmax(1, fabs(theirs)), "top %zu: %g, reference %g", i, mine,
                  theirs);
    }
}

static void check_prompt(const char *name, const struct fix_setup *set)
{
    struct shm_error err = {0};
    struct fix_worker w;
    struct inf_conversation *c = NULL;
    struct seen s = {0};
    const json_t *want = named(json_object_get(golden, "results"), name);
    fix_worker_start(&arena, set, &w);
    cr_assert_eq(inf_conversation_create(&w.engine, &err, &c), 0, "%s", err.text);
    int32_t *ids = prompt_ids(name, &s.tokens);
    struct inf_read_options o = options(&s, INF_LOGITS_LAST);
    s.routes = calloc((size_t)w.engine.model->hparams.layers * s.tokens, 8);
    cr_assert_eq(inf_read(&w.engine, c, ids, s.tokens, &o, &err), 0, "%s: %s", name, err.text);
    cr_expect_eq(c->n, s.tokens);
    cr_expect_eq(s.rows, 1);
    check_top20(want, &s);
    if (json_is_array(json_object_get(want, "routes")))
        check_routes(want, &s);

    /* Greedy continuation, 64 tokens, end tokens not special. */
    free(s.routes);
    s.routes = NULL;
    const json_t *greedy = json_object_get(want, "greedy_ids");
    for (size_t i = 0; i < json_array_size(greedy); i++) {
        int32_t best = 0;
        for (uint32_t v = 1; v < s.vocab; v++)
            if (s.last[v] > s.last[best])
                best = (int32_t)v;
        cr_assert_eq(best, json_integer_value(json_array_get(greedy, i)), "%s: token %zu", name, i);
        cr_assert_eq(inf_read(&w.engine, c, &best, 1, &o, &err), 0, "%s", err.text);
    }
    cr_expect_eq(w.faults, 0, "%s", w.fault);
    inf_conversation_destroy(&c);
    free(s.last);
    free(ids);
    fix_worker_stop(&w);
}

static const struct fix_setup usual = {.ring = 96,
                                       .policy = SHM_POLICY_ROUTED,
                                       .order = SHM_ORDER_RECENT,
                                       .depth = 16,
                                       .floor = 16,
                                       .threads = 2};

Test(graph, short_goldens, .init = setup)
{
    check_prompt("p5", &usual);
    check_prompt("p40", &usual);
    check_prompt("p300", &usual);
}

Test(graph, long_goldens, .init = setup)
{
    check_prompt("p1100", &usual);
    check_prompt("p1900", &usual);
}

Test(graph, chat_goldens, .init = setup)
{
    check_prompt("chat1", &usual);
    check_prompt("chat2", &usual);
}

/* All logits of p300, as one number. */
static XXH64_hash_t hash_with(const struct fix_setup *set, struct inf_stream_sum *ret_sum)
{
    struct shm_error err = {0};
    struct fix_worker w;
    struct inf_conversation *c = NULL;
    struct seen s = {0};
    fix_worker_start(&arena, set, &w);
    cr_assert_eq(inf_conversation_create(&w.engine, &err, &c), 0, "%s", err.text);
    int32_t *ids = prompt_ids("p300", &s.tokens);
    struct inf_read_options o = options(&s, INF_LOGITS_ALL);
    cr_assert_eq(inf_read(&w.engine, c, ids, s.tokens, &o, &err), 0, "%s", err.text);
    cr_expect_eq(s.rows, s.tokens);
    cr_expect_eq(w.faults, 0, "%s", w.fault);
    *ret_sum = s.sum;
    inf_conversation_destroy(&c);
    free(s.last);
    free(ids);
    fix_worker_stop(&w);
    return s.hash;
}

/* Invariant 6, and 7 by poison: an unrouted or stale slot that is read makes NaNs. */
Test(graph, same_bits, .init = setup)
{
    struct inf_stream_sum sum;
    struct fix_setup base = usual;
    base.policy = SHM_POLICY_FULL;
    base.order = SHM_ORDER_INDEX;
    const XXH64_hash_t want = hash_with(&base, &sum);
    cr_expect_eq(sum.copied, sum.entries);
    cr_expect_eq(sum.dropped, 0);
    const struct fix_setup varied[] = {
        {.ring = 1, .policy = SHM_POLICY_ROUTED, .order = SHM_ORDER_INDEX, .depth = 1, .floor = 16},
        {.ring = 48, .policy = SHM_POLICY_ROUTED, .order = SHM_ORDER_INDEX, .depth = 16, .floor = 16},
        {.ring = 120, .policy = SHM_POLICY_ROUTED, .order = SHM_ORDER_PREDICTED, .depth = 64, .floor = 16},
        {.ring = 7,
         .policy = SHM_POLICY_ROUTED,
         .order = SHM_ORDER_RECENT,
         .depth = 2,
         .floor = 16,
         .chunk = 70},
        {.ring = 48, .policy = SHM_POLICY_ROUTED, .order = SHM_ORDER_RECENT, .depth = 16, .floor = 1024},
        {.ring = 48,
         .policy = SHM_POLICY_FULL,
         .order = SHM_ORDER_RECENT,
         .depth = 16,
         .floor = 16,
         .chunk = 128},
        {.ring = 33,
         .policy = SHM_POLICY_ROUTED,
         .order = SHM_ORDER_PREDICTED,
         .depth = 16,
         .floor = 16,
         .resident = 11,
         .chunk = 101},
        {.ring = 48,
         .policy = SHM_POLICY_ROUTED,
         .order = SHM_ORDER_PREDICTED,
         .depth = 16,
         .floor = 16,
         .link_gbps = 0.2},
    };
    for (size_t i = 0; i < sizeof varied / sizeof varied[0]; i++) {
        struct fix_setup set = varied[i];
        set.poison = true;
        set.threads = 1 + (uint32_t)(i % 2);
        cr_expect_eq(hash_with(&set, &sum), want, "setting %zu gives other bits", i);
        if (set.policy == SHM_POLICY_FULL)
            cr_expect_eq(sum.dropped, 0);
        else if (set.link_gbps > 0) /* an unpaced link may be done before the router is */
            cr_expect_gt(sum.dropped, 0, "setting %zu dropped nothing", i);
        cr_expect_eq(sum.copied + sum.dropped, sum.entries, "setting %zu", i);
        cr_expect_eq(sum.copied - sum.wasted, sum.routed, "setting %zu", i);
    }
}

/* A turn cut in the middle leaves the conversation as it was; the next turn is as if nothing had happened. */
static void cancel_late(void *ctx, double tokens)
{
    struct fix_worker *w = ctx;
    if (tokens > 130)
        atomic_store(&w->cancel, true);
}

Test(graph, cancel_keeps_conversation, .init = setup)
{
    struct shm_error err = {0};
    struct fix_worker w;
    struct inf_conversation *c = NULL;
    struct seen s = {0}, whole = {0};
    struct fix_setup set = usual;
    set.chunk = 100;
    fix_worker_start(&arena, &set, &w);
    cr_assert_eq(inf_conversation_create(&w.engine, &err, &c), 0, "%s", err.text);
    int32_t *ids = prompt_ids("p300", &s.tokens);
    struct inf_read_options o = options(&s, INF_LOGITS_ALL);
    struct inf_read_options cut = {.on_progress = cancel_late, .ctx = &w};
    cr_expect_eq(inf_read(&w.engine, c, ids, s.tokens, &cut, &err), -ECANCELED);
    cr_expect_eq(c->n, 100, "one chunk was completed, %u tokens are kept", c->n);
    atomic_store(&w.cancel, false);
    cr_expect(inf_store_alive(&w.engine.store));
    cr_assert_eq(inf_read(&w.engine, c, ids + c->n, s.tokens - c->n, &o, &err), 0, "%s", err.text);

    /* Read again from the start: the last row must be the same bits. */
    struct inf_read_options o2 = options(&whole, INF_LOGITS_LAST);
    inf_conversation_truncate(c, 0);
    cr_assert_eq(inf_read(&w.engine, c, ids, s.tokens, &o2, &err), 0, "%s", err.text);
    cr_expect_eq(memcmp(s.last, whole.last, s.vocab * sizeof *s.last), 0);
    cr_expect_eq(w.faults, 0, "%s", w.fault);
    inf_conversation_destroy(&c);
    free(s.last);
    free(whole.last);
    free(ids);
    fix_worker_stop(&w);
}

/* A conversation is taken back to a mark as if what came behind had not been read, recent routing included.
 */
Test(graph, rewinds_to_a_mark, .init = setup)
{
    struct shm_error err = {0};
    struct fix_worker w;
    struct inf_conversation *c = NULL;
    struct inf_mark mark = {0};
    struct seen once = {0}, again = {0};
    fix_worker_start(&arena, &usual, &w);
    cr_assert_eq(inf_conversation_create(&w.engine, &err, &c), 0, "%s", err.text);
    uint32_t n;
    int32_t *ids = prompt_ids("p300", &n);
    struct inf_read_options o = options(&once, INF_LOGITS_LAST), o2 = options(&again, INF_LOGITS_LAST);
    cr_assert_eq(inf_read(&w.engine, c, ids, 200, &(struct inf_read_options){0}, &err), 0, "%s", err.text);
    cr_assert_eq(inf_conversation_mark(c, &mark), 0);
    size_t pairs = (size_t)c->layers * c->experts;
    cr_expect_eq(memcmp(mark.recent, c->recent, pairs * sizeof *c->recent), 0);
    cr_assert_eq(inf_read(&w.engine, c, ids + 200, n - 200, &o, &err), 0, "%s", err.text);
    cr_expect_neq(memcmp(mark.recent, c->recent, pairs * sizeof *c->recent), 0);
    inf_conversation_rewind(c, &mark);
    cr_expect(c->n == 200 && c->recent_tokens == 200);
    cr_expect_eq(memcmp(mark.recent, c->recent, pairs * sizeof *c->recent), 0);
    cr_assert_eq(inf_read(&w.engine, c, ids + 200, n - 200, &o2, &err), 0, "%s", err.text);
    cr_expect_eq(memcmp(once.last, again.last, once.vocab * sizeof *once.last), 0);

    /* Told what will be routed, expertd copies that and nothing else. */
    uint32_t *known = malloc(pairs * sizeof *known);
    memcpy(known, c->counts, pairs * sizeof *known);
    inf_conversation_rewind(c, &mark);
    struct inf_read_options o3 = {.known = known};
    cr_assert_eq(inf_read(&w.engine, c, ids + 200, n - 200, &o3, &err), 0, "%s", err.text);
    cr_expect_eq(memcmp(known, c->counts, pairs * sizeof *known), 0);
    o3.known = known;
    w.engine.chunk = 10;
    cr_expect_eq(inf_read(&w.engine, c, ids + 200, 11, &o3, &err), -EINVAL, "several chunks");
    cr_expect_eq(w.faults, 0, "%s", w.fault);
    free(known);
    inf_mark_clear(&mark);
    inf_conversation_destroy(&c);
    free(once.last);
    free(again.last);
    free(ids);
    fix_worker_stop(&w);
}

Test(graph, refuses, .init = setup)
{
    struct shm_error err = {0};
    struct fix_worker w;
    struct inf_conversation *c = NULL;
    struct inf_read_options o = {0};
    fix_worker_start(&arena, &usual, &w);
    cr_assert_eq(inf_conversation_create(&w.engine, &err, &c), 0, "%s", err.text);
    int32_t *many = calloc(c->capacity + 1, sizeof *many);
    cr_expect_eq(inf_read(&w.engine, c, many, c->capacity + 1, &o, &err), -E2BIG);
    cr_expect(strstr(err.text, "--ctx"), "%s", err.text);
    many[0] = 4096;
    cr_expect_eq(inf_read(&w.engine, c, many, 1, &o, &err), -EINVAL);
    many[0] = -1;
    cr_expect_eq(inf_read(&w.engine, c, many, 1, &o, &err), -EINVAL);
    cr_expect_eq(c->n, 0);
    free(many);
    inf_conversation_destroy(&c);
    fix_worker_stop(&w);
}
