/* SPDX-License-Identifier: MIT */
/*
 * Prefix cache and parking, on a device that holds one number a token, and with expertd's own park behind the
 * calls. What a block's row holds is a function of all tokens up to there: a table with a wrong block or a
 * block that somebody wrote into is seen at once.
 */
#include "expertd/exd_park.h"
#include "inferd/inf_park.h"
#include "inferd/inf_prefix.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define B      INF_KV_BLOCK
#define BLOCKS 64u
#define LONG   4000u

TestSuite(prefix, .timeout = 120);

/* ---- the device ---- */

struct fake {
    struct inf_device base;
    uint64_t *rows; /* [blocks * B] */
    uint32_t copies;
};

static int kv_open(struct inf_device *d, uint32_t tokens, struct shm_error *err)
{
    (void)err;
    ((struct fake *)d)->rows = calloc(tokens, 8);
    return 0;
}
static void kv_close(struct inf_device *d)
{
    free(((struct fake *)d)->rows);
}
static int kv_copy(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err)
{
    struct fake *f = (struct fake *)d;
    (void)err;
    memcpy(f->rows + to * B, f->rows + from * B, B * 8);
    f->copies++;
    return 0;
}
static int kv_read(struct inf_device *d, uint32_t block, void *to, struct shm_error *err)
{
    (void)err;
    memcpy(to, ((struct fake *)d)->rows + block * B, B * 8);
    return 0;
}
static int kv_write(struct inf_device *d, uint32_t block, const void *from, struct shm_error *err)
{
    (void)err;
    memcpy(((struct fake *)d)->rows + block * B, from, B * 8);
    return 0;
}
static const struct inf_device_ops ops = {
    .kv_open = kv_open, .kv_close = kv_close, .kv_copy = kv_copy, .kv_read = kv_read, .kv_write = kv_write};

static uint64_t step(uint64_t state, int32_t id)
{
    return (state ^ (uint64_t)(uint32_t)id) * UINT64_C(0x9e3779b97f4a7c15) + 1;
}

/* ---- a worker ---- */

static uint64_t clock_ns = 1000000000; /* moves when a test says so */
static uint64_t now_ns(void)
{
    return clock_ns;
}

struct worker {
    struct fake device;
    struct inf_kv_pool *pool;
    struct inf_prefix *prefix;
    struct inf_park_config park;
    struct exd_park *expertd;
    struct krn_pool *threads; /* every other worker has some */
    int broken;               /* errno that calls give */
};

#define CALL(name, what)                                                                                     \
    static int call_##name(void *ctx, struct prt_park##what##_request *q, struct prt_park##what##_reply *r,  \
                           struct shm_error *err)                                                            \
    {                                                                                                        \
        struct worker *w = ctx;                                                                              \
        memset(r, 0, sizeof *r);                                                                             \
        if (w->broken)                                                                                       \
            return shm_error_set(err, w->broken, "broken");                                                  \
        return exd_park_##name(w->expertd, q, r, err);                                                       \
    }
CALL(join, open)
CALL(find, find)
CALL(reserve, reserve)
CALL(commit, commit)
CALL(done, done)

static uint64_t sessions;

static void start(struct worker *w, struct exd_park *expertd, const char *build, uint32_t blocks, bool exact)
{
    memset(w, 0, sizeof *w);
    w->device.base.ops = &ops;
    w->device.base.kind = PRT_DEVICE_HOST;
    w->device.base.kv_block_bytes = B * 8;
    strcpy(w->device.base.kv_layout, "numbers");
    strcpy(w->device.base.text, "host, 3 threads, kernels v1");
    cr_assert_eq(inf_kv_pool_create(&w->device.base, blocks * B, NULL, &w->pool), 0);
    w->expertd = expertd;
    w->park = (struct inf_park_config){.calls = {.ctx = w,
                                                 .open = call_join,
                                                 .find = call_find,
                                                 .reserve = call_reserve,
                                                 .commit = call_commit,
                                                 .done = call_done},
                                       .session = ++sessions,
                                       .device = &w->device.base,
                                       .build = build};
    if (sessions % 2)
        cr_assert_eq(krn_pool_create(3, &w->threads), 0);
    struct inf_prefix_config c = {.pool = w->pool,
                                  .exact = exact,
                                  .threads = w->threads,
                                  .park = expertd ? &w->park : NULL,
                                  .now_ns = now_ns};
    cr_assert_eq(inf_prefix_create(&c, &w->prefix), 0);
}

/* Its process has ended: expertd sees that, nobody tidies up. */
static void end(struct worker *w)
{
    inf_prefix_destroy(&w->prefix);
    krn_pool_destroy(&w->threads);
    cr_assert_eq(w->pool->free, w->pool->blocks, "every block was given back");
    inf_kv_pool_destroy(&w->pool);
    if (w->expertd)
        exd_park_leave(w->expertd, w->park.session);
}

static struct inf_prefix_stats stats(const struct worker *w)
{
    struct inf_prefix_stats s;
    inf_prefix_stats(w->prefix, &s);
    return s;
}

/* The table's rows are those of ids. */
static bool right(const struct worker *w, const struct inf_kv *kv, const int32_t *ids, uint32_t n)
{
    uint64_t state = 0;
    for (uint32_t i = 0; i < n; i++) {
        state = step(state, ids[i]);
        if (i / B >= kv->blocks || w->device.rows[kv->block[i / B] * B + i % B] != state)
            return false;
    }
    return true;
}

/* Reads ids from..to-1 into kv. */
static void read_ids(struct worker *w, struct inf_kv *kv, const int32_t *ids, uint32_t from, uint32_t to)
{
    uint32_t need = inf_kv_need(kv, from, to);
    if (need > w->pool->free)
        inf_prefix_evict(w->prefix, need - w->pool->free);
    cr_assert_eq(inf_kv_prepare(kv, from, to, NULL), 0, "%u blocks, %u free", need, w->pool->free);
    uint64_t state = 0;
    for (uint32_t i = 0; i < to; i++) {
        state = step(state, ids[i]);
        if (i >= from)
            w->device.rows[kv->block[i / B] * B + i % B] = state;
    }
}

/* One turn: how many tokens were there already. Generated ones: the last `written`. */
static struct inf_prefix_found turn(struct worker *w, const int32_t *ids, uint32_t n, uint32_t written)
{
    struct inf_kv *kv;
    struct inf_prefix_found f;
    uint32_t tokens = 0, exact;
    cr_assert_eq(inf_kv_create(w->pool, 8192, &kv), 0);
    do {
        f = inf_prefix_take(w->prefix, kv, ids, n - written, BLOCKS);
        cr_assert(f.tokens >= tokens && f.tokens < n - written && f.exact <= f.tokens);
        cr_assert_eq(kv->blocks, inf_kv_blocks(f.tokens));
        tokens = f.tokens;
    } while (f.more);
    inf_prefix_count(w->prefix, n - written, f.tokens);
    cr_assert(right(w, kv, ids, f.tokens), "what was taken");
    read_ids(w, kv, ids, f.tokens, n);
    cr_assert(right(w, kv, ids, n), "and read");
    exact = f.exact == f.tokens ? n - written : f.exact;
    inf_prefix_put(w->prefix, kv, ids, n, exact);
    inf_kv_destroy(&kv);
    return f;
}

static void park_all(struct worker *w)
{
    clock_ns += (INF_PREFIX_PARK_MS + 1) * UINT64_C(1000000);
    for (int i = 0; inf_prefix_idle_ms(w->prefix) == 0 && i < 100000; i++)
        inf_prefix_idle(w->prefix);
}

static int32_t *text(uint32_t n, unsigned seed)
{
    int32_t *ids = calloc(n, sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)((i * 2654435761u + seed * 40503u) >> 8 & 0x7fff);
    return ids;
}

static char dir[64];
static struct exd_park *expertd(uint64_t bytes)
{
    snprintf(dir, sizeof dir, "/dev/shm/t-prefix-XXXXXX");
    cr_assert(mkdtemp(dir));
    struct exd_park *p = NULL;
    cr_assert_eq(exd_park_open(&(struct exd_park_config){.dir = dir, .bytes = bytes}, &p, NULL), 0);
    return p;
}
static void expertd_ends(struct exd_park **p)
{
    const char *broken = exd_park_check(*p);
    struct exd_park_stats s;
    exd_park_stats(*p, &s);
    cr_assert_null(broken, "%s", broken);
    cr_assert(!s.held && !s.reserved && s.held_bytes <= s.bytes);
    exd_park_close(p);
    rmdir(dir);
}
#define SLOT shm_park_slot_bytes(B * 8)

/* ---- the cache alone ---- */

Test(prefix, a_follow_up_reads_only_what_is_new)
{
    struct worker w;
    int32_t *a = text(LONG, 1), *b = text(LONG, 1);
    start(&w, NULL, "x", BLOCKS, false);
    cr_assert_eq(turn(&w, a, 1000, 100).tokens, 0);
    uint32_t copies = w.device.copies;
    cr_assert_eq(turn(&w, a, 1500, 100).tokens, 1000, "all of the turn before, its answer included");
    cr_assert_eq(w.device.copies, copies + 1, "only the unfinished block is copied");
    cr_assert_eq(turn(&w, a, 1500, 0).tokens, 1499, "one is read in any case");
    b[700] = -1 - b[700]; /* another conversation that begins the same: 60 tokens into a block */
    cr_assert_eq(turn(&w, b, 1200, 50).tokens, 700);
    cr_assert_eq(turn(&w, a, 1800, 0).tokens, 1500, "the first one is as it was");
    cr_assert_eq(turn(&w, b, 1300, 0).tokens, 1200);
    b[0]++;
    cr_assert_eq(turn(&w, b, 1300, 0).tokens, 0);
    struct inf_prefix_stats s = stats(&w);
    cr_assert(s.prompts == 7 && s.hits == 5 && s.hit_tokens == 1000 + 1499 + 700 + 1500 + 1200);
    end(&w);
    free(a);
    free(b);
}

Test(prefix, exact_takes_no_generated_token)
{
    struct worker w;
    int32_t *a = text(LONG, 1);
    start(&w, NULL, "x", BLOCKS, false);
    turn(&w, a, 1000, 100);
    struct inf_prefix_found f = turn(&w, a, 1200, 0);
    cr_assert(f.tokens == 1000 && f.exact == 900, "%u %u", f.tokens, f.exact);
    f = turn(&w, a, 1300, 0);
    cr_assert(f.tokens == 1200 && f.exact == 900, "nothing behind a generated token is exact");
    end(&w);
    start(&w, NULL, "x", BLOCKS, true);
    turn(&w, a, 1000, 100);
    f = turn(&w, a, 1200, 0);
    cr_assert(f.tokens == 900 && f.exact == 900, "%u %u", f.tokens, f.exact);
    f = turn(&w, a, 1300, 0);
    cr_assert(f.tokens == 1200 && f.exact == 1200);
    end(&w);
    free(a);
}

Test(prefix, least_recently_used_leaves_go_first)
{
    struct worker w;
    int32_t *a = text(LONG, 1), *b = text(LONG, 2);
    start(&w, NULL, "x", 16, false);
    turn(&w, a, 6 * B, 0);
    turn(&w, b, 6 * B, 0);
    turn(&w, a, 6 * B + 1, 0);
    struct inf_kv *kv;
    inf_kv_create(w.pool, 8192, &kv);
    struct inf_prefix_found f = inf_prefix_take(w.prefix, kv, b, 3 * B, 0);
    bool held[16] = {false};
    for (uint32_t i = 0; i < f.tokens / B; i++)
        held[kv->block[i]] = true;
    cr_assert_eq(inf_prefix_held(w.prefix, b, 6 * B, held), 2, "one is held in part only");
    cr_assert_eq(inf_prefix_held(w.prefix, b, 2 * B, held), 1, "one token is read in any case");
    cr_assert_eq(inf_prefix_held(w.prefix, a, 6 * B, held), 0);
    cr_assert_eq(inf_prefix_evict(w.prefix, 2), 2);
    cr_assert_eq(inf_prefix_evict(w.prefix, 99), 8);
    cr_assert(right(&w, kv, b, f.tokens) && f.tokens == 3 * B - 1);
    inf_kv_destroy(&kv);
    cr_assert_eq(inf_prefix_evict(w.prefix, 99), 3);
    cr_assert_eq(w.pool->free, 16);
    end(&w);
    free(a);
    free(b);
}

/* Two that read the same at the same time: the second one's own blocks are not kept, but what it goes on with
 * is a child of the first one's. That parent stays as long as its child does, though nobody else holds it. */
Test(prefix, a_parent_stays_with_its_child)
{
    struct worker w;
    int32_t *a = text(LONG, 1);
    struct inf_kv *first, *second;
    start(&w, NULL, "x", 16, false);
    inf_kv_create(w.pool, 8192, &first);
    inf_kv_create(w.pool, 8192, &second);
    read_ids(&w, first, a, 0, 2 * B);
    read_ids(&w, second, a, 0, 3 * B);
    inf_prefix_put(w.prefix, first, a, 2 * B, 2 * B);
    inf_prefix_put(w.prefix, second, a, 3 * B, 3 * B);
    cr_assert_eq(stats(&w).kept_blocks, 3);
    inf_kv_destroy(&first);
    cr_assert_eq(inf_prefix_evict(w.prefix, 99), 0);
    inf_kv_destroy(&second);
    cr_assert_eq(turn(&w, a, 3 * B + 1, 0).tokens, 3 * B);
    end(&w);
    free(a);
}

/* ---- parking ---- */

Test(prefix, parked_for_the_next_life_and_for_others)
{
    struct exd_park *x = expertd(200 * SLOT);
    struct worker w, v;
    int32_t *a = text(LONG, 1), *b = text(LONG, 1);
    start(&w, x, "x", BLOCKS, false);
    turn(&w, a, 3010, 40);
    cr_assert(!inf_prefix_idle(w.prefix) && stats(&w).parked == 0, "not before its time");
    cr_assert(inf_prefix_idle_ms(w.prefix) > 0 && inf_prefix_idle_ms(w.prefix) <= INF_PREFIX_PARK_MS);
    park_all(&w);
    cr_assert_eq(stats(&w).parked, 24);
    cr_assert_eq(inf_prefix_idle_ms(w.prefix), UINT32_MAX);
    end(&w);
    start(&w, x, "x", BLOCKS, false);
    start(&v, x, "x", BLOCKS, false);
    struct inf_prefix_found f = turn(&w, a, 3200, 0);
    cr_assert(f.tokens == 3010 && f.exact == 2970, "%u %u", f.tokens, f.exact);
    cr_assert_eq(stats(&w).loaded, 24);
    b[500] = -5;
    cr_assert_eq(turn(&v, b, 3200, 0).tokens, 500, "a second worker, a parked block in part");
    cr_assert_eq(stats(&v).loaded, 4);
    park_all(&w);
    cr_assert_eq(stats(&w).parked, 2, "the rest is there already");
    cr_assert_eq(turn(&v, a, 3300, 0).tokens, 3200);
    end(&w);
    end(&v);
    expertd_ends(&x);
    free(a);
    free(b);
}

Test(prefix, killed_between_two_blocks)
{
    struct exd_park *x = expertd(200 * SLOT);
    struct worker w;
    int32_t *a = text(LONG, 1);
    for (int steps = 0; steps < 60; steps += 7) {
        uint32_t before = stats((start(&w, x, "x", BLOCKS, false), &w)).parked;
        cr_assert_eq(before, 0);
        turn(&w, a, 3000, 0);
        clock_ns += UINT64_C(1000000000);
        for (int i = 0; i < steps; i++)
            inf_prefix_idle(w.prefix);
        end(&w);
    }
    cr_assert_null(exd_park_check(x));
    start(&w, x, "x", BLOCKS, false);
    cr_assert_eq(turn(&w, a, 3200, 0).tokens, 3000);
    end(&w);
    expertd_ends(&x);
    free(a);
}

Test(prefix, another_build_is_ignored_and_said)
{
    struct exd_park *x = expertd(200 * SLOT);
    struct worker w;
    int32_t *a = text(LONG, 1);
    start(&w, x, "x", BLOCKS, false);
    turn(&w, a, 1000, 0);
    inf_prefix_flush(w.prefix, 1000);
    cr_assert_eq(stats(&w).parked, 8);
    end(&w);
    start(&w, x, "y", BLOCKS, false);
    cr_assert_eq(turn(&w, a, 1100, 0).tokens, 0);
    struct inf_prefix_stats s = stats(&w);
    cr_assert(s.park_ignored == 1 && strstr(s.park_reason, "build"), "%s", s.park_reason);
    end(&w);
    start(&w, x, "x", BLOCKS, false);
    strcpy(w.device.base.kv_layout, "other");
    cr_assert_eq(turn(&w, a, 1100, 0).tokens, 0);
    s = stats(&w);
    cr_assert(s.park_ignored == 1 && strstr(s.park_reason, "form"), "%s", s.park_reason);
    end(&w);
    start(&w, x, "x", BLOCKS, true);
    cr_assert_eq(turn(&w, a, 1100, 0).tokens, 0, "one that takes exact ones only has its own");
    end(&w);
    expertd_ends(&x);
    free(a);
}

/* Every byte of the park is somebody else's to write: wrong ones are seen, given up, and read anew. */
Test(prefix, damaged_blocks_are_not_used)
{
    struct exd_park *x = expertd(64 * SLOT);
    struct worker w;
    int32_t *a = text(LONG, 1);
    unsigned rng = 3;
    for (int round = 0; round < 40; round++) {
        start(&w, x, "x", BLOCKS, false);
        turn(&w, a, 2000, 0);
        park_all(&w);
        end(&w);
        int fd = open(exd_park_path(x), O_RDWR);
        uint64_t at = (uint64_t)rand_r(&rng) % (16 * SLOT);
        uint8_t byte;
        cr_assert_eq(pread(fd, &byte, 1, (off_t)at), 1);
        byte ^= (uint8_t)(1 << rand_r(&rng) % 8);
        cr_assert_eq(pwrite(fd, &byte, 1, (off_t)at), 1);
        close(fd);
        start(&w, x, "x", BLOCKS, false);
        uint32_t found = turn(&w, a, 2100, 0).tokens; /* right or it fails */
        bool padding = at % SLOT >= SHM_PARK_HEAD_BYTES + B * 8;
        cr_assert(padding ? found >= 2000 : found >= at / SLOT * B || round, "%u", found);
        park_all(&w);
        cr_assert_eq(stats(&w).park_damaged, found < 2000, "at %llu found %u", (unsigned long long)at, found);
        end(&w);
        start(&w, x, "x", BLOCKS, false);
        cr_assert_eq(turn(&w, a, 2100, 0).tokens, 2099, "it was parked again");
        cr_assert_eq(stats(&w).park_damaged, 0);
        end(&w);
    }
    expertd_ends(&x);
    free(a);
}

Test(prefix, a_full_park_keeps_the_beginning)
{
    struct exd_park *x = expertd(10 * SLOT);
    struct worker w;
    int32_t *a = text(LONG, 1), *b = text(LONG, 2);
    start(&w, x, "x", BLOCKS, false);
    turn(&w, b, 600, 0);
    park_all(&w);
    turn(&w, a, 3000, 0);
    park_all(&w);
    struct inf_prefix_stats s = stats(&w);
    cr_assert(s.park_full && s.unparked_blocks, "said, and tried again later");
    uint32_t idle = inf_prefix_idle_ms(w.prefix);
    cr_assert(idle > 0 && idle < UINT32_MAX);
    end(&w);
    start(&w, x, "x", BLOCKS, false);
    cr_assert_eq(turn(&w, a, 3000, 0).tokens, 10 * B);
    end(&w);
    expertd_ends(&x);
    free(a);
    free(b);
}

Test(prefix, more_than_the_pool_comes_back_from_the_park)
{
    struct exd_park *x = expertd(200 * SLOT);
    struct worker w;
    int32_t *t[6];
    start(&w, x, "x", 16, false);
    for (unsigned i = 0; i < 6; i++) {
        t[i] = text(LONG, i);
        turn(&w, t[i], 1500, 0);
        park_all(&w);
    }
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(turn(&w, t[i], 1600, 0).tokens, 1500);
    cr_assert_eq(stats(&w).kept_blocks <= 16, true);
    end(&w);
    expertd_ends(&x);
    for (unsigned i = 0; i < 6; i++)
        free(t[i]);
}

Test(prefix, expertd_away_and_back)
{
    struct exd_park *x = expertd(200 * SLOT);
    struct worker w;
    int32_t *a = text(LONG, 1);
    start(&w, x, "x", BLOCKS, false);
    turn(&w, a, 1000, 0);
    park_all(&w);
    w.broken = ETIMEDOUT;
    cr_assert_eq(turn(&w, a, 1200, 0).tokens, 1000, "what is in the pool needs nobody");
    cr_assert_str_eq(stats(&w).park, "away");
    clock_ns += UINT64_C(1000000000);
    inf_prefix_idle(w.prefix);
    cr_assert(inf_prefix_idle_ms(w.prefix) > 1000, "not asked again at once");
    w.broken = 0;
    clock_ns += UINT64_C(20000000000);
    park_all(&w);
    cr_assert_str_eq(stats(&w).park, "on");
    cr_assert_eq(stats(&w).unparked_blocks, 0);
    /* another life of expertd: nothing is there, and all that is kept goes there again */
    char old[64];
    strcpy(old, dir);
    expertd_ends(&x);
    x = w.expertd = expertd(200 * SLOT);
    w.park.session = 0;
    cr_assert_eq(inf_prefix_idle(w.prefix), false);
    w.park.session = ++sessions;
    cr_assert_eq(inf_prefix_idle_ms(w.prefix), 0, "it is seen that it is another one");
    inf_prefix_idle(w.prefix);
    cr_assert_eq(stats(&w).unparked_blocks, 10);
    park_all(&w);
    cr_assert_eq(stats(&w).unparked_blocks, 0);
    cr_assert_eq(turn(&w, a, 1201, 0).tokens, 1200);
    park_all(&w);
    end(&w);
    start(&w, x, "x", BLOCKS, false);
    cr_assert_eq(turn(&w, a, 1300, 0).tokens, 1201);
    w.broken = ENOTSUP;
    end(&w);
    start(&w, x, "x", BLOCKS, false);
    w.broken = ENOTSUP;
    cr_assert_eq(turn(&w, a, 1300, 0).tokens, 0);
    park_all(&w);
    cr_assert_str_eq(stats(&w).park, "off");
    cr_assert(strcmp(stats(&w).park_reason, "broken") == 0);
    w.broken = 0;
    end(&w);
    expertd_ends(&x);
    free(a);
}

/* ---- against a model ---- */

/* Several workers, conversations that branch, pools and park too small, deaths, damage: whatever is taken has
 * the rows of its tokens; with room enough it is the longest beginning that was put. */
static void random_operations(unsigned seed, uint32_t pool_blocks, uint32_t park_slots, bool deaths)
{
    enum { WORKERS = 2, TEXTS = 12, STEPS = 600 };
    struct exd_park *x = expertd(park_slots * SLOT);
    struct worker w[WORKERS];
    int32_t *t[TEXTS];
    uint32_t longest[WORKERS][TEXTS] = {0}; /* of each text: what this worker has put */
    unsigned rng = seed;
    for (int i = 0; i < WORKERS; i++)
        start(&w[i], x, "x", pool_blocks, false);
    for (unsigned i = 0; i < TEXTS; i++) {
        t[i] = text(LONG, i % 3); /* three beginnings, each branching at other places */
        for (uint32_t k = 300 * (i / 3) + 37 * i; i >= 3 && k < LONG; k++)
            t[i][k] += (int32_t)i * 100000;
    }
    for (int s = 0; s < STEPS; s++) {
        unsigned i = (unsigned)rand_r(&rng) % WORKERS, k = (unsigned)rand_r(&rng) % TEXTS;
        uint32_t n = 2 + (uint32_t)rand_r(&rng) % 1400, expect = 0;
        for (unsigned j = 0; j < TEXTS; j++) {
            uint32_t same = 0;
            while (same < longest[i][j] && same < n - 1 && t[j][same] == t[k][same])
                same++;
            expect = same > expect ? same : expect;
        }
        uint32_t got = turn(&w[i], t[k], n, 0).tokens;
        if (pool_blocks >= 400)
            cr_assert(got >= expect, "step %d: %u, %u were put", s, got, expect);
        longest[i][k] = n > longest[i][k] ? n : longest[i][k];
        if (rand_r(&rng) % 3 == 0)
            park_all(&w[i]);
        for (int idle = rand_r(&rng) % 4; idle > 0; idle--)
            inf_prefix_idle(w[i].prefix);
        if (rand_r(&rng) % 5 == 0)
            inf_prefix_evict(w[i].prefix, pool_blocks >= 400 ? 0 : (uint32_t)rand_r(&rng) % 8);
        if (deaths && rand_r(&rng) % 20 == 0) {
            end(&w[i]);
            start(&w[i], x, "x", pool_blocks, false);
            memset(longest[i], 0, sizeof longest[i]);
        }
        cr_assert_eq(w[i].pool->free + stats(&w[i]).kept_blocks, w[i].pool->blocks);
        cr_assert_null(exd_park_check(x), "%s", exd_park_check(x));
    }
    for (int i = 0; i < WORKERS; i++)
        end(&w[i]);
    expertd_ends(&x);
    for (unsigned i = 0; i < TEXTS; i++)
        free(t[i]);
}

Test(prefix, random_with_room)
{
    random_operations(1, 400, 400, false);
}
Test(prefix, random_small_pool)
{
    random_operations(2, 24, 400, true);
}
Test(prefix, random_small_park)
{
    random_operations(3, 40, 20, true);
}
