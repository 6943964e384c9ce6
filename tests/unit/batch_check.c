/* SPDX-License-Identifier: MIT */
#include "tests/unit/batch_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define MOST 32u

#define REQUIRE(what, ...)                                                                                   \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #what);                                       \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

struct sequence {
    struct inf_conversation *c;
    uint32_t prompt, all;
    int32_t *ids;      /* [all], from position set->from on */
    XXH64_hash_t *row; /* [all] of its logits when read alone */
};

struct check {
    struct inf_engine *e;
    const struct batch_setup *set;
    uint64_t state;
    struct sequence s[MOST];
    bool alone;
    uint32_t of[MOST]; /* pieces of the running pass: whose they are */
    uint32_t rows, together;
};

static uint32_t below(struct check *k, uint32_t n)
{
    k->state = k->state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)((k->state >> 33) % n);
}

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct check *k = ctx;
    struct sequence *s = &k->s[k->of[piece]];
    const size_t vocab = k->e->model->hparams.vocab;
    position -= k->set->from;
    k->rows += rows;
    for (uint32_t r = 0; r < rows; r++) {
        XXH64_hash_t hash = XXH3_64bits(logits + r * vocab, vocab * sizeof *logits);
        REQUIRE(position + r < s->all, "position %u", position + r);
        if (k->alone)
            s->row[position + r] = hash;
        else
            REQUIRE(s->row[position + r] == hash, "sequence %u, token %u: other bits than alone",
                    k->of[piece], position + r);
    }
}

/* A conversation whose keys and values before the first token are numbers of about a tenth, its own ones. */
static struct inf_conversation *begin(const struct check *k, uint32_t of)
{
    struct shm_error err = {0};
    struct inf_conversation *c;
    struct inf_device *d = k->e->device;
    const size_t n = d->kv_block_bytes / 2;
    REQUIRE(inf_conversation_create(k->e, &err, &c) == 0, "%s", err.text);
    if (!k->set->from)
        return c;
    uint16_t *number = calloc(n, sizeof *number);
    uint32_t random = of + 1;
    REQUIRE(inf_kv_prepare(c->kv, 0, k->set->from, &err) == 0, "%s", err.text);
    for (uint32_t b = 0; b < c->kv->blocks; b++) {
        for (size_t i = 0; i < n; i++) {
            random = random * 1664525u + 1013904223u;
            number[i] = (uint16_t)(0x2c00 | (random >> 16 & 0x83ff)); /* a half */
        }
        REQUIRE(d->ops->kv_write(d, c->kv->block[b], number, &err) == 0, "%s", err.text);
    }
    free(number);
    c->n = k->set->from;
    return c;
}

static uint32_t done(const struct check *k, const struct sequence *s)
{
    return s->c->n - k->set->from;
}

static void read_alone(struct check *k, uint32_t i)
{
    struct shm_error err = {0};
    struct sequence *s = &k->s[i];
    struct inf_read_options o = {.logits = INF_LOGITS_ALL, .on_logits = on_logits, .ctx = k};
    k->of[0] = i;
    k->rows = 0;
    s->c = begin(k, i);
    REQUIRE(inf_read(k->e, s->c, s->ids, s->prompt, &o, &err) == 0, "%s", err.text);
    o.generated = true;
    REQUIRE(inf_read(k->e, s->c, s->ids + s->prompt, s->all - s->prompt, &o, &err) == 0, "%s", err.text);
    REQUIRE(k->rows == s->all, "%u rows", k->rows);
    inf_conversation_destroy(&s->c);
}

/* One pass of some of the sequences that still have tokens of this kind. */
static void pass(struct check *k, bool generated)
{
    struct shm_error err = {0};
    struct inf_piece piece[MOST];
    const struct inf_read_options o = {.on_logits = on_logits, .ctx = k, .generated = generated};
    uint32_t order[MOST], n = 0, tokens = 0, most = k->set->together;
    if (!k->set->whole)
        most = 1 + below(k, most);
    for (uint32_t i = 0; i < k->set->sequences; i++) {
        uint32_t other = below(k, i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    for (uint32_t i = 0; i < k->set->sequences && n < most; i++) {
        struct sequence *s = &k->s[order[i]];
        const bool answers = done(k, s) >= s->prompt;
        if (done(k, s) == s->all || (generated ? !answers : answers && !k->set->mixed))
            continue;
        uint32_t rest = answers ? 1 : s->prompt - done(k, s), room = k->e->chunk - tokens, take = rest;
        if (!k->set->whole && below(k, 3))
            take = 1 + below(k, rest);
        if (!room)
            break;
        take = take < room ? take : room;
        piece[n] = (struct inf_piece){s->c, s->ids + done(k, s), take, INF_LOGITS_ALL};
        k->of[n++] = order[i];
        tokens += take;
    }
    if (!n)
        return;
    k->rows = 0;
    REQUIRE(inf_read_batch(k->e, piece, n, &o, &err) == 0, "%s", err.text);
    REQUIRE(k->rows == tokens, "%u rows of %u tokens", k->rows, tokens);
    k->together += n > 1;
}

static bool unread(const struct check *k)
{
    for (uint32_t i = 0; i < k->set->sequences; i++)
        if (done(k, &k->s[i]) < k->s[i].all)
            return true;
    return false;
}

static void strew(struct check *k)
{
    struct inf_kv_pool *p = k->e->pool;
    for (uint32_t i = 1; i < p->free; i++) {
        uint32_t other = below(k, i + 1), block = p->stack[i];
        p->stack[i] = p->stack[other];
        p->stack[other] = block;
    }
}

uint32_t batch_check(struct inf_engine *e, const struct batch_setup *set)
{
    static const uint32_t sizes[] = {1, 2, 127, 5, 128, 129, 63, 64};
    struct check k = {.e = e, .set = set, .state = set->seed, .alone = true};
    REQUIRE(set->sequences <= MOST && e->pool->free == e->pool->blocks, "a pool in use");
    for (uint32_t i = 0; i < set->sequences; i++) {
        struct sequence *s = &k.s[i];
        s->prompt = 1 + (i < 8 ? sizes[i] - 1 : below(&k, set->prompt_max)) % set->prompt_max;
        s->all = s->prompt + set->answers;
        s->ids = calloc(s->all, sizeof *s->ids);
        s->row = calloc(s->all, sizeof *s->row);
        for (uint32_t t = 0; t < s->all; t++)
            s->ids[t] = (int32_t)below(&k, e->model->hparams.vocab);
        read_alone(&k, i);
    }
    k.alone = false;
    strew(&k);
    for (uint32_t i = 0; i < set->sequences; i++)
        k.s[i].c = begin(&k, i);
    for (uint32_t cut = 0; unread(&k);) {
        pass(&k, below(&k, 2));
        struct sequence *s = &k.s[below(&k, set->sequences)];
        if (set->cuts && done(&k, s) && cut < 2 * set->sequences && !below(&k, 3)) {
            inf_conversation_truncate(s->c, set->from + below(&k, done(&k, s)));
            cut++;
        }
    }
    for (uint32_t i = 0; i < set->sequences; i++) {
        inf_conversation_destroy(&k.s[i].c);
        free(k.s[i].ids);
        free(k.s[i].row);
    }
    REQUIRE(e->pool->free == e->pool->blocks, "%u blocks are lost", e->pool->blocks - e->pool->free);
    return k.together;
}
