/* SPDX-License-Identifier: MIT */
/*
 * The engine thread's rounds: admit jobs, read pieces of their prompts in one
 * pass, step all answers in another, sample, deliver.
 */
#include "inferd/serve/srv_engine_priv.h"

#include <errno.h>
#include <string.h>

_Static_assert(SRV_PARALLEL_MAX == INF_SPANS_MAX, "a step of all is one pass");

#define IDLE_MS      100        /* between two looks at expertd */
#define PARK_ROUNDS  16         /* between two blocks that are parked while jobs run */
#define SAMPLE_ALONE (1u << 19) /* logits: waking threads for fewer takes longer than they save */

/* One pass over the layers. */
struct pass {
    struct srv_engine *e;
    struct srv_seq *seq[SRV_PARALLEL_MAX];
    struct inf_piece piece[SRV_PARALLEL_MAX];
    uint32_t before[SRV_PARALLEL_MAX]; /* tokens of each */
    unsigned n;
    uint32_t tokens;
    bool generated; /* a step of answers, not a read of prompts */
};

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    const struct pass *p = ctx;
    size_t vocab = p->e->info.vocab;
    (void)position;
    memcpy(p->seq[piece]->logits, logits + (rows - 1) * vocab, vocab * sizeof *logits);
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    const struct pass *p = ctx;
    srv_stats_chunk(p->e->config.stats, chunk, p->generated);
}

static void on_progress(void *ctx, double tokens)
{
    const struct pass *p = ctx;
    for (unsigned i = 0; i < p->n && !p->generated; i++)
        atomic_store(&p->seq[i]->job->read, p->before[i] - p->seq[i]->result.cached_tokens +
                                                (uint32_t)(tokens / p->tokens * p->piece[i].n));
}

static void add(struct pass *p, struct srv_seq *s, const int32_t *ids, uint32_t n, bool last)
{
    p->seq[p->n] = s;
    p->before[p->n] = s->c->n;
    p->piece[p->n++] =
        (struct inf_piece){.c = s->c, .ids = ids, .n = n, .logits = last ? INF_LOGITS_LAST : INF_LOGITS_NONE};
    p->tokens += n;
}

/* Admission saw to it that what is kept for later can make room for it. */
static void make_room(const struct pass *p)
{
    struct srv_engine *e = p->e;
    uint32_t need = 0;
    for (unsigned i = 0; i < p->n; i++)
        need += inf_kv_need(p->seq[i]->c->kv, p->before[i], p->before[i] + p->piece[i].n);
    if (need > e->engine->pool->free)
        inf_prefix_evict(e->prefix, need - e->engine->pool->free);
}

/* A shared last block must be copied before it is written to, and can't make room as long as it is shared.
 * Where even for that there is no room, its tokens are read again; and nobody looks for them in the next
 * round, which would find them, and no room, for ever. */
static bool drop_tails(struct srv_engine *e)
{
    bool any = false;
    for (unsigned i = 0; i < e->n_seq; i++) {
        struct srv_seq *s = e->seq[i];
        uint32_t tail = s->c->n % INF_KV_BLOCK;
        if (s->ended || s->c->n != s->result.cached_tokens || s->next >= 0)
            continue;
        s->looks = false;
        if (!tail)
            continue;
        inf_conversation_truncate(s->c, s->c->n - tail);
        s->result.cached_tokens = s->c->n;
        s->exact = s->exact < s->c->n ? s->exact : s->c->n;
        atomic_store(&s->job->cached, s->c->n);
        any = true;
    }
    return any;
}

/* Where something else than the loss of expertd or the clients went wrong, those who were in it fail. */
static void run_pass(struct pass *p)
{
    struct srv_engine *e = p->e;
    struct srv_queue *q = e->config.queue;
    struct srv_job *jobs[SRV_PARALLEL_MAX];
    struct shm_error err = {0};
    const struct inf_read_options o = {.on_logits = on_logits,
                                       .on_progress = on_progress,
                                       .on_chunk = on_chunk,
                                       .ctx = p,
                                       .generated = p->generated};
    for (unsigned i = 0; i < p->n; i++)
        jobs[i] = p->seq[i]->job;
    make_room(p);
    srv_queue_pass(q, jobs, p->n);
    uint64_t start_ns = shm_now_ns();
    int rc = inf_read_batch(e->engine, p->piece, p->n, &o, &err);
    uint64_t now_ns = shm_now_ns();
    srv_queue_pass(q, NULL, 0);
    if (!rc) {
        srv_stats_pass(e->config.stats, p->n, p->generated);
        if (!p->generated)
            srv_speed_note(&e->read, p->tokens, now_ns - start_ns);
    }
    if (rc == -ENOSPC && drop_tails(e))
        return;
    for (unsigned i = 0; i < p->n; i++) {
        struct srv_seq *s = p->seq[i];
        if (!rc && !p->generated && p->before[i] == s->result.cached_tokens)
            inf_prefix_count(e->prefix, s->result.prompt_tokens, s->result.cached_tokens);
        s->fresh = !rc && !srv_seq_rest(s);
        if (!p->generated) {
            if (s->exact == p->before[i])
                s->exact = s->c->n;
            srv_seq_keep(s, true);
            atomic_store(&s->job->read, s->c->n - s->result.cached_tokens);
            s->result.read_ns = now_ns - s->start_ns;
        }
        if (rc && rc != -ECANCELED && inf_store_alive(&e->engine->store))
            srv_seq_fail(s, rc, &err);
    }
}

static void reap(struct srv_engine *e)
{
    unsigned left = 0;
    for (unsigned i = 0; i < e->n_seq; i++) {
        struct srv_seq *s = e->seq[i];
        if (s->ended)
            srv_seq_finish(&s);
        else
            e->seq[left++] = s;
    }
    bool changed = left != e->n_seq;
    e->n_seq = left;
    if (changed)
        srv_engine_publish(e);
}

void srv_loop_drop_cancelled(struct srv_engine *e)
{
    for (unsigned i = 0; i < e->n_seq; i++)
        if (atomic_load(&e->seq[i]->job->cancelled))
            srv_seq_fail(e->seq[i], -ECANCELED, NULL);
    reap(e);
}

static void fail_all(struct srv_engine *e, int rc, const struct shm_error *err)
{
    for (unsigned i = 0; i < e->n_seq; i++)
        srv_seq_fail(e->seq[i], rc, err);
    reap(e);
}

static void advance(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    srv_seq_advance(((struct srv_seq **)ctx)[task]);
}

/* Every sequence with new logits writes a token. */
static void sample(struct srv_engine *e)
{
    struct srv_seq *fresh[SRV_PARALLEL_MAX];
    unsigned n = 0;
    for (unsigned i = 0; i < e->n_seq; i++)
        if (e->seq[i]->fresh && !e->seq[i]->ended)
            fresh[n++] = e->seq[i];
    if (n > 1 && e->pool && (uint64_t)n * e->info.vocab >= SAMPLE_ALONE)
        krn_pool_run(e->pool, n, advance, fresh);
    else
        for (unsigned i = 0; i < n; i++)
            srv_seq_advance(fresh[i]);
    srv_loop_drop_cancelled(e);
}

static bool answers(const struct srv_seq *s)
{
    return s->next >= 0;
}

/* Of each sequence: the tokens that are to be read of its prompt now, and the same number for those of one
 * client. */
struct reads {
    uint32_t rest[SRV_PARALLEL_MAX];
    unsigned client[SRV_PARALLEL_MAX];
};

static unsigned client_of(const struct srv_engine *e, unsigned i)
{
    unsigned first = 0;
    while (strcmp(e->seq[first]->job->client, e->seq[i]->job->client) != 0)
        first++;
    return first;
}

/* Tokens that its client has before it: they are read first. */
static uint64_t before(const struct reads *r, unsigned i)
{
    uint64_t tokens = 0;
    for (unsigned k = 0; k < i; k++)
        tokens += r->client[k] == r->client[i] ? r->rest[k] : 0;
    return tokens;
}

/* Two prompts have a whole block more in common at their beginning than either has read. */
static bool alike(const struct srv_seq *a, const struct srv_seq *b)
{
    const struct inf_ids *x = &a->job->prompt, *y = &b->job->prompt;
    const uint32_t read = a->c->n > b->c->n ? a->c->n : b->c->n,
                   n = read - read % INF_KV_BLOCK + INF_KV_BLOCK;
    return n < x->n && n < y->n && memcmp(x->ids, y->ids, n * sizeof *x->ids) == 0;
}

/* A prompt that was not begun yet waits for the one that reads its beginning, and takes it from there. That
 * one gets tokens now, or before this one in any case: it is the first of its client, or of the same one. */
static bool waits(const struct srv_engine *e, unsigned i, const struct reads *r)
{
    for (unsigned k = 0; k < i; k++)
        if (r->rest[k] && (r->client[k] == r->client[i] || !before(r, k)) && alike(e->seq[i], e->seq[k]))
            return true;
    return false;
}

/* What has waited, or stood behind another one of its client, looks for its beginning again before its first
 * token: it may have been read meanwhile. */
static void choose(struct srv_engine *e, struct reads *ret_reads)
{
    for (unsigned i = 0; i < e->n_seq; i++) {
        struct srv_seq *s = e->seq[i];
        ret_reads->rest[i] = 0;
        ret_reads->client[i] = client_of(e, i);
        if (!srv_seq_rest(s))
            continue;
        const bool unbegun = s->c->n == s->result.cached_tokens, wait = unbegun && waits(e, i, ret_reads);
        const uint64_t ahead = unbegun ? before(ret_reads, i) : 0;
        if (s->looks && unbegun && !wait && ahead < e->engine->chunk) {
            inf_conversation_truncate(s->c, 0);
            srv_seq_take_prefix(s);
        }
        s->looks = wait || ahead;
        ret_reads->rest[i] = wait ? 0 : srv_seq_rest(s);
    }
}

static void read_prompts(struct srv_engine *e)
{
    struct pass p = {.e = e};
    struct srv_prompt prompt[SRV_PARALLEL_MAX];
    struct srv_seq *of[SRV_PARALLEL_MAX];
    uint32_t tokens[SRV_PARALLEL_MAX];
    struct srv_load load = {.step_ns = e->step_ns,
                            .gap_ns = (uint64_t)e->config.gap_ms * 1000000,
                            .chunk = e->engine->chunk,
                            .floor = e->engine->store.settings.floor};
    struct reads reads;
    unsigned n = 0;
    choose(e, &reads);
    for (unsigned i = 0; i < e->n_seq; i++) {
        struct srv_seq *s = e->seq[i];
        load.answers += answers(s);
        if (!reads.rest[i])
            continue;
        load.rest += reads.rest[i];
        of[n] = s;
        prompt[n++] =
            (struct srv_prompt){.client = reads.client[i], .turn = s->job->turn, .rest = reads.rest[i]};
    }
    if (!n)
        return;
    srv_sched_share(prompt, n, srv_sched_tokens(&load, &e->read), tokens);
    for (unsigned i = 0; i < n; i++) {
        if (!tokens[i])
            continue;
        add(&p, of[i], of[i]->job->prompt.ids + of[i]->c->n, tokens[i], tokens[i] == prompt[i].rest);
    }
    run_pass(&p);
    sample(e);
}

static void step_answers(struct srv_engine *e)
{
    struct pass p = {.e = e, .generated = true};
    uint64_t start_ns = shm_now_ns();
    for (unsigned i = 0; i < e->n_seq; i++) {
        struct srv_seq *s = e->seq[i];
        if (answers(s))
            add(&p, s, &s->next, 1, true);
    }
    if (!p.n)
        return;
    run_pass(&p);
    sample(e);
    e->step_ns = shm_now_ns() - start_ns;
}

static bool fits(void *ctx, const struct srv_job *job)
{
    struct srv_engine *e = ctx;
    const uint32_t reserved = srv_engine_reserved(e);
    return !e->n_seq || reserved + srv_engine_wants(e, job) <= e->engine->pool->blocks;
}

/* How long there is time to wait for a job. */
static unsigned patience_ms(const struct srv_engine *e)
{
    if (e->n_seq)
        return 0;
    uint32_t park_ms = e->park_stuck ? IDLE_MS : inf_prefix_idle_ms(e->prefix);
    return park_ms < IDLE_MS ? park_ms : IDLE_MS;
}

static void admit(struct srv_engine *e)
{
    bool any = false;
    while (e->n_seq < e->config.parallel) {
        struct srv_job *job = srv_queue_take(e->config.queue, patience_ms(e), fits, e);
        if (!job)
            break;
        struct srv_seq *s = srv_seq_new(e, job);
        if (s)
            e->seq[e->n_seq++] = s;
        any = true;
    }
    if (any)
        srv_engine_publish(e);
}

/* Beginnings that come from the park: some blocks a round beside answers, else all at once. */
static void load(struct srv_engine *e)
{
    bool others = false;
    for (unsigned i = 0; i < e->n_seq; i++)
        others |= answers(e->seq[i]);
    for (unsigned i = 0; i < e->n_seq; i++)
        while (e->seq[i]->loading && !e->seq[i]->ended) {
            srv_seq_take_prefix(e->seq[i]);
            if (others || atomic_load(&e->seq[i]->job->cancelled))
                break;
        }
}

/* What is kept is parked when there is time, and now and then when there is none. */
static void park(struct srv_engine *e)
{
    if (e->n_seq && ++e->busy_rounds < PARK_ROUNDS)
        return;
    e->busy_rounds = 0;
    e->park_stuck = false;
    if (inf_prefix_idle_ms(e->prefix))
        return;
    e->park_stuck = !inf_prefix_idle(e->prefix) && !inf_prefix_idle_ms(e->prefix);
    srv_engine_publish(e);
}

/* Expertd is gone: those that run and those that wait have resume_ms for the next one to come. */
static int await(struct srv_engine *e, struct shm_error *err)
{
    int rc = srv_engine_reattach(e, e->config.resume_ms, err);
    if (rc != -ESHUTDOWN)
        return rc;
    fail_all(e, rc, err);
    srv_queue_close(e->config.queue, rc, "expertd is away: try again when it is back");
    return srv_engine_reattach(e, 0, err);
}

int srv_loop_run(struct srv_engine *e, struct shm_error *err)
{
    int rc = 0;
    while (!rc) {
        admit(e);
        srv_loop_drop_cancelled(e);
        load(e);
        read_prompts(e);
        step_answers(e);
        park(e);
        if (!inf_store_alive(&e->engine->store))
            rc = await(e, err);
        else if (!e->n_seq && srv_queue_finished(e->config.queue))
            return 0;
    }
    fail_all(e, rc, err);
    return rc == -ECANCELED ? 0 : rc;
}
