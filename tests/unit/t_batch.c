/* SPDX-License-Identifier: MIT */
/*
 * Several conversations in one pass, on the shipped model: the same bits as
 * alone, blocks shared and moved, and all or nothing where a pass fails.
 */
#include "tests/unit/batch_check.h"
#include "tests/unit/worker_fixture.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

TestSuite(batch, .timeout = 300);

static struct fix_arena arena;
static struct fix_worker w;
static struct inf_engine *const e = &w.engine;
static int32_t ids[1000];

static const struct fix_setup usual = {.ring = 96,
                                       .policy = SHM_POLICY_ROUTED,
                                       .order = SHM_ORDER_RECENT,
                                       .depth = 16,
                                       .floor = 16,
                                       .threads = 2,
                                       .chunk = 300,
                                       .kv_tokens = 80 * INF_KV_BLOCK};

static void start_with(const struct fix_setup *set)
{
    fix_arena_load("tools/model/story-q4_k.gguf", &arena);
    fix_worker_start(&arena, set, &w);
    for (uint32_t i = 0; i < sizeof ids / sizeof ids[0]; i++)
        ids[i] = (int32_t)(i * 2654435761u >> 8) % (int32_t)e->model->hparams.vocab;
}

static void start(void)
{
    start_with(&usual);
}

static void stop(void)
{
    cr_expect_eq(w.faults, 0, "%s", w.fault);
    cr_expect_eq(e->pool->free, e->pool->blocks);
    fix_worker_stop(&w);
    fix_arena_free(&arena);
}

static struct inf_conversation *new_conversation(void)
{
    struct shm_error err = {0};
    struct inf_conversation *c = NULL;
    cr_assert_eq(inf_conversation_create(e, &err, &c), 0, "%s", err.text);
    return c;
}

/* Reads ids and keeps the last row. */
static void keep(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    const size_t vocab = e->model->hparams.vocab;
    (void)piece;
    (void)position;
    memcpy(ctx, logits + (rows - 1) * vocab, vocab * sizeof *logits);
}

static float *read_keep(struct inf_conversation *c, const int32_t *at, uint32_t n)
{
    struct shm_error err = {0};
    float *last = calloc(e->model->hparams.vocab, sizeof *last);
    const struct inf_read_options o = {.logits = INF_LOGITS_LAST, .on_logits = keep, .ctx = last};
    cr_assert_eq(inf_read(e, c, at, n, &o, &err), 0, "%s", err.text);
    return last;
}

static void same_row(float *a, float *b, const char *what)
{
    cr_expect_eq(memcmp(a, b, e->model->hparams.vocab * sizeof *a), 0, "%s", what);
    free(a);
    free(b);
}

Test(batch, same_bits_one_thread, .fini = stop)
{
    struct fix_setup set = usual;
    set.threads = 1;
    set.order = SHM_ORDER_PREDICTED;
    start_with(&set);
    cr_expect_gt(
        batch_check(
            e,
            &(struct batch_setup){
                .sequences = 4, .prompt_max = 130, .answers = 4, .together = 4, .seed = 3, .mixed = true}),
        3);
}

Test(batch, same_bits, .init = start, .fini = stop)
{
    struct batch_setup set = {.sequences = 16,
                              .prompt_max = 140,
                              .answers = 5,
                              .together = 16,
                              .seed = 1,
                              .mixed = true,
                              .cuts = true};
    cr_expect_gt(batch_check(e, &set), 10);
    /* Everything at once, and not even a prompt's token beside an answer's. */
    set = (struct batch_setup){
        .sequences = 16, .prompt_max = 9, .answers = 3, .together = 16, .seed = 2, .from = 380};
    cr_expect_gt(batch_check(e, &set), 3);
}

/* A beginning that two share: who writes behind it gets a block of its own, and nobody sees the other's. */
Test(batch, shared_beginning, .init = start, .fini = stop)
{
    struct shm_error err = {0};
    struct inf_conversation *a = new_conversation(), *b = new_conversation();
    free(read_keep(a, ids, 200));
    for (uint32_t i = 0; i < a->kv->blocks; i++)
        inf_kv_share(b->kv, i, a->kv->block[i]);
    memcpy(b->tokens, a->tokens, 200 * sizeof *b->tokens);
    b->n = 200;
    const uint32_t used = e->pool->blocks - e->pool->free;
    cr_expect_eq(used, 2);
    const struct inf_piece piece[] = {{a, ids + 200, 90, INF_LOGITS_NONE},
                                      {b, ids + 500, 70, INF_LOGITS_NONE}};
    cr_assert_eq(inf_read_batch(e, piece, 2, &(struct inf_read_options){0}, &err), 0, "%s", err.text);
    cr_expect_eq(e->pool->blocks - e->pool->free, used + 3, "one copied, two new");
    float *a1 = read_keep(a, ids + 290, 1), *b1 = read_keep(b, ids + 570, 1);

    inf_conversation_truncate(a, 0);
    free(read_keep(a, ids, 290));
    same_row(a1, read_keep(a, ids + 290, 1), "the first one");
    inf_conversation_truncate(b, 0);
    free(read_keep(b, ids, 200));
    free(read_keep(b, ids + 500, 70));
    same_row(b1, read_keep(b, ids + 570, 1), "the one that joined");
    inf_conversation_destroy(&a);
    inf_conversation_destroy(&b);
}

/* Blocks that were taken out as bytes and came back elsewhere, as after a restart. */
Test(batch, blocks_as_bytes, .init = start, .fini = stop)
{
    struct shm_error err = {0};
    struct inf_conversation *a = new_conversation(), *b = new_conversation(), *other = new_conversation();
    const size_t bytes = e->device->kv_block_bytes;
    uint8_t *kept = malloc(3 * bytes + 1);
    kept[3 * bytes] = 77;
    free(read_keep(a, ids, 300));
    cr_assert_eq(a->kv->blocks, 3);
    for (uint32_t i = 0; i < 3; i++)
        cr_assert_eq(e->device->ops->kv_read(e->device, a->kv->block[i], kept + i * bytes, &err), 0);
    cr_expect_eq(kept[3 * bytes], 77);
    float *want = read_keep(a, ids + 300, 5);
    inf_conversation_destroy(&a);
    free(read_keep(other, ids + 400, 130)); /* writes over what was given back */
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t block;
        cr_assert_eq(inf_kv_pool_take(e->pool, &block), 0);
        cr_assert_eq(e->device->ops->kv_write(e->device, block, kept + i * bytes, &err), 0);
        inf_kv_share(b->kv, i, block);
        inf_kv_pool_unref(e->pool, block);
    }
    b->n = 300;
    same_row(want, read_keep(b, ids + 300, 5), "a conversation of copied blocks");
    free(kept);
    inf_conversation_destroy(&b);
    inf_conversation_destroy(&other);
}

static uint64_t sum_of(const struct inf_conversation *c)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < (size_t)c->layers * c->experts; i++)
        sum += c->recent[i];
    return sum;
}

/* Each token's choices are somebody's recent ones, whoever's. */
Test(batch, recent_routing_is_dealt_out, .init = start, .fini = stop)
{
    struct shm_error err = {0};
    struct inf_conversation *c[7];
    struct inf_piece piece[7];
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < 7; i++) {
        c[i] = new_conversation();
        piece[i] = (struct inf_piece){c[i], ids + 10 * i, i < 6 ? 1 : 40, INF_LOGITS_NONE};
        tokens += piece[i].n;
    }
    cr_assert_eq(inf_read_batch(e, piece, 7, &(struct inf_read_options){0}, &err), 0, "%s", err.text);
    const uint64_t each = (uint64_t)e->model->hparams.layers * e->model->shape.top_k;
    uint64_t all = 0;
    for (uint32_t i = 0; i < 7; i++) {
        const uint64_t sum = sum_of(c[i]);
        all += sum;
        cr_expect_eq(c[i]->recent_tokens, piece[i].n);
        cr_expect(sum > piece[i].n * each / 3 && sum < piece[i].n * each * 3, "%u: %llu", i,
                  (unsigned long long)sum);
        inf_conversation_destroy(&c[i]);
    }
    cr_expect_eq(all, tokens * each);
}

struct state {
    uint32_t n, blocks, free;
    uint64_t recent;
};

static struct state state_of(const struct inf_conversation *c)
{
    return (struct state){c->n, c->kv->blocks, e->pool->free, sum_of(c)};
}

static void unchanged(const struct inf_conversation *c, struct state s, const char *what)
{
    struct state now = state_of(c);
    cr_expect(now.n == s.n && now.blocks == s.blocks && now.free == s.free && now.recent == s.recent, "%s",
              what);
}

static void refused(const struct inf_piece *piece, uint32_t n, int want, const char *word)
{
    struct shm_error err = {0};
    struct state a = state_of(piece[0].c), b = state_of(piece[1].c);
    cr_expect_eq(inf_read_batch(e, piece, n, &(struct inf_read_options){0}, &err), want);
    cr_expect(strstr(err.text, word), "%s", err.text);
    unchanged(piece[0].c, a, word);
    unchanged(piece[1].c, b, word);
}

static void cancel_late(void *ctx, double tokens)
{
    (void)ctx;
    if (tokens > 20)
        atomic_store(&w.cancel, true);
}

Test(batch, all_or_nothing, .fini = stop)
{
    struct shm_error err = {0};
    struct fix_setup set = usual;
    set.kv_tokens = 4 * INF_KV_BLOCK;
    start_with(&set);
    struct inf_conversation *a = new_conversation(), *b = new_conversation();
    const struct inf_piece first[] = {{a, ids, 100, INF_LOGITS_NONE}, {b, ids + 7, 120, INF_LOGITS_NONE}};
    cr_assert_eq(inf_read_batch(e, first, 2, &(struct inf_read_options){0}, &err), 0, "%s", err.text);
    cr_assert_eq(inf_kv_prepare(b->kv, b->n, 200, &err), 0); /* ahead of time: must stay */

    struct inf_piece piece[] = {{a, ids + 100, 100, INF_LOGITS_NONE}, {b, ids + 300, 150, INF_LOGITS_NONE}};
    refused(piece, 2, -ENOSPC, "--kv-tokens"); /* one free block, both need one */
    piece[1].n = 50;
    piece[1].ids = (int32_t[50]){[49] = 4096};
    refused(piece, 2, -EINVAL, "vocabulary");
    piece[1] = (struct inf_piece){a, ids, 1, INF_LOGITS_NONE};
    refused(piece, 2, -EINVAL, "one conversation");
    piece[1] = (struct inf_piece){b, ids, 0, INF_LOGITS_NONE};
    refused(piece, 2, -EINVAL, "piece 1");
    refused(piece, 0, -EINVAL, "0 pieces");
    refused(piece, INF_SPANS_MAX + 1, -EINVAL, "1 to 64");
    piece[1].n = 80;
    e->chunk = 179;
    refused(piece, 2, -EINVAL, "a pass of 179");
    e->chunk = 300;
    piece[1].n = (uint32_t)b->capacity;
    refused(piece, 2, -E2BIG, "--ctx");
    piece[1] = (struct inf_piece){b, ids + 300, 60, INF_LOGITS_LAST};
    cr_expect_eq(inf_read_batch(e, piece, 2, &(struct inf_read_options){.generated = true}, &err), -EINVAL);

    struct state at = state_of(a), bt = state_of(b);
    const struct inf_read_options cut = {.on_progress = cancel_late};
    cr_expect_eq(inf_read_batch(e, piece, 2, &cut, &err), -ECANCELED);
    atomic_store(&w.cancel, false);
    unchanged(a, at, "cancelled");
    unchanged(b, bt, "cancelled");
    cr_assert(inf_store_alive(&e->store));

    /* And then as if nothing had been tried. */
    float *last = calloc(e->model->hparams.vocab, sizeof *last);
    const struct inf_read_options o = {.on_logits = keep, .ctx = last};
    cr_assert_eq(inf_read_batch(e, piece, 2, &o, &err), 0, "%s", err.text);
    cr_expect(a->n == 200 && b->n == 180);
    inf_conversation_destroy(&a);
    inf_conversation_truncate(b, 0);
    cr_expect_eq(e->pool->free, e->pool->blocks);
    free(read_keep(b, ids + 7, 120));
    same_row(last, read_keep(b, ids + 300, 60), "after failures");
    inf_conversation_destroy(&b);
}
