/* SPDX-License-Identifier: MIT */
/* One job: read what is new of its prompt, then sample and read token after token. */
#include "inferd/serve/srv_engine_priv.h"
#include "inferd/serve/srv_text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

struct run {
    struct srv_engine *e;
    struct srv_job *job;
    struct srv_slot *slot;
    struct inf_sampler *sampler;
    struct inf_detok *detok;
    struct srv_text *text;
    struct srv_result *result;
    uint64_t token_ns; /* of the last one */
    bool generated;    /* being read */
};

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct run *r = ctx;
    size_t vocab = r->e->info.vocab;
    (void)piece;
    (void)position;
    memcpy(r->e->logits, logits + (rows - 1) * vocab, vocab * sizeof *logits);
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    struct run *r = ctx;
    srv_stats_chunk(r->e->config.stats, chunk, r->generated);
}

static void on_progress(void *ctx, double tokens)
{
    struct run *r = ctx;
    if (!r->generated)
        atomic_store(&r->job->read, (uint32_t)tokens);
}

/* Reads ids; where expertd goes away in between, goes on with the next one. */
static int read_ids(struct run *r, const int32_t *ids, size_t n, bool generated, struct shm_error *err)
{
    const struct inf_read_options o = {.logits = INF_LOGITS_LAST,
                                       .on_logits = on_logits,
                                       .on_progress = on_progress,
                                       .on_chunk = on_chunk,
                                       .ctx = r,
                                       .generated = generated};
    struct inf_conversation *c = r->slot->conversation;
    r->generated = generated;
    for (;;) {
        uint32_t before = c->n;
        *err = (struct shm_error){0};
        int rc = inf_read(r->e->engine, c, ids, n, &o, err);
        if (!rc)
            return 0;
        ids += c->n - before;
        n -= c->n - before;
        if (atomic_load(&r->job->cancelled))
            return -ECANCELED;
        if (inf_store_alive(&r->e->engine->store)) {
            if (rc == -ECANCELED) /* meant for a job that ended meanwhile */
                continue;
            return rc;
        }
        rc = srv_engine_reattach(r->e, r->e->config.resume_ms, r->job, err);
        if (rc)
            return rc;
    }
}

/* Log-probability of the token and the likeliest ones, of the model's own distribution. */
static void fill_logprobs(const struct run *r, struct srv_event *event, int32_t id, unsigned n_top)
{
    const float *logits = r->e->logits;
    uint32_t vocab = r->e->info.vocab;
    double max = -INFINITY, sum = 0;
    unsigned n = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        float l = logits[i];
        if (!(l > -INFINITY))
            continue;
        if ((double)l > max)
            max = (double)l;
        if (n == n_top && (!n_top || l <= event->top[n - 1].logprob))
            continue;
        unsigned at = n < n_top ? n++ : n - 1;
        for (; at > 0 && event->top[at - 1].logprob < l; at--)
            event->top[at] = event->top[at - 1];
        event->top[at] = (struct srv_likely){(int32_t)i, l};
    }
    for (uint32_t i = 0; i < vocab; i++)
        if (logits[i] > -INFINITY)
            sum += exp((double)logits[i] - max);
    double norm = max + log(sum);
    event->logprob = (float)((double)logits[id] - norm);
    event->n_top = n;
    for (unsigned i = 0; i < n; i++)
        event->top[i].logprob = (float)((double)event->top[i].logprob - norm);
}

static int put_text(struct run *r, const char *text, size_t n, int32_t id)
{
    struct srv_job *job = r->job;
    if (!n && (!job->logprobs || id < 0))
        return 0;
    struct srv_event *event = srv_event_new(text, n, job->logprobs && id >= 0 ? job->n_top : 0);
    if (!event)
        return -ENOMEM;
    event->id = id;
    if (job->logprobs && id >= 0)
        fill_logprobs(r, event, id, job->n_top);
    srv_queue_put(r->e->config.queue, job, event);
    return 0;
}

static bool ends_answer(const struct run *r, int32_t id)
{
    for (unsigned i = 0; i < r->job->n_stop_ids; i++)
        if (r->job->stop_ids[i] == id)
            return true;
    return inf_tokenizer_is_stop(r->e->engine->tokenizer, id);
}

/* The next token, or why there is none: -ENODATA the grammar's end. */
static int32_t sample(struct run *r, struct shm_error *err)
{
    struct srv_job *job = r->job;
    if (job->grammar) {
        if (srv_grammar_must_end(job->grammar))
            return -ENODATA;
        const uint64_t *mask = srv_grammar_mask(job->grammar, r->e->vocab, job->stop_ids, job->n_stop_ids);
        if (!mask)
            return shm_error_set(err, ENOMEM,
                                 "response_format: no memory for the grammar, or too many states");
        inf_sampler_allow(r->sampler, mask);
    }
    int32_t id = inf_sampler_next(r->sampler, r->e->logits);
    if (id >= 0)
        return id;
    if (job->grammar)
        return shm_error_set(err, EDOM, "response_format: no token of the vocabulary can go on");
    return shm_error_set(err, EDOM,
                         "the model gave no usable logits: its weights are damaged ('expertctl verify')");
}

/* Takes a token into the answer. 1: it completed a stop string. */
static int take(struct run *r, int32_t id, struct shm_error *err)
{
    struct srv_job *job = r->job;
    const struct inf_tokenizer *tok = r->e->engine->tokenizer;
    const char *text = "", *out;
    size_t n = 0, out_n;
    uint64_t now = shm_now_ns();
    if (!r->result->written_tokens)
        r->result->first_ns = now - job->submit_ns;
    else
        srv_stats_gap(r->e->config.stats, now - r->token_ns);
    r->token_ns = now;
    r->result->written_tokens++;
    atomic_store(&job->written, r->result->written_tokens);
    inf_sampler_accept(r->sampler, id);
    inf_sampler_written(r->sampler, id);
    if (job->grammar) {
        const char *bytes;
        size_t len;
        if (inf_tokenizer_bytes(tok, id, &bytes, &len) || srv_grammar_accept(job->grammar, bytes, len))
            return shm_error_set(err, EPROTO, "response_format: the grammar refused a token that it allowed");
    }
    inf_detok_push(r->detok, id, &text, &n); /* an id without text: none */
    int stop = srv_text_push(r->text, text, n, &out, &out_n);
    if (stop == -2 || put_text(r, out, out_n, id))
        return -ENOMEM;
    if (stop < 0)
        return 0;
    r->result->stop = (uint32_t)stop;
    return 1;
}

static int answer(struct run *r, struct shm_error *err)
{
    struct srv_job *job = r->job;
    struct inf_conversation *c = r->slot->conversation;
    for (;;) {
        if (atomic_load(&job->cancelled))
            return -ECANCELED;
        if (r->result->written_tokens >= job->max_tokens) {
            r->result->end = SRV_END_LENGTH;
            return 0;
        }
        int32_t id = sample(r, err);
        if (id == -ENODATA || (id >= 0 && !job->ignore_eos && ends_answer(r, id))) {
            r->result->end = SRV_END_TOKEN;
            return 0;
        }
        if (id < 0)
            return id;
        int rc = take(r, id, err);
        if (rc == 1) {
            r->result->end = SRV_END_STRING;
            return 0;
        }
        if (rc)
            return rc;
        if (r->result->written_tokens >= job->max_tokens)
            continue;
        if (c->n == c->capacity) {
            r->result->end = SRV_END_CONTEXT;
            return 0;
        }
        rc = read_ids(r, &id, 1, true, err);
        if (rc)
            return rc;
    }
}

static int run_job(struct run *r, struct shm_error *err)
{
    struct srv_job *job = r->job;
    uint32_t common = 0;
    int rc = inf_sampler_create(&job->sampler, r->e->info.vocab, err, &r->sampler);
    for (size_t i = 0; !rc && i < job->n_bias; i++)
        rc = inf_sampler_bias(r->sampler, job->bias[i].id, job->bias[i].logprob);
    if (rc)
        return rc;
    r->detok = job->show_special ? r->e->detok_special : r->e->detok;
    r->text = srv_text_new(job->stops, job->n_stops);
    if (!r->text)
        return -ENOMEM;
    rc = srv_slots_pick(r->e, job->prompt.ids, job->prompt.n, &r->slot, &common);
    if (rc)
        return rc;
    r->slot->busy = true;
    r->slot->used_ns = shm_now_ns();
    r->result->cached_tokens = common;
    atomic_store(&job->cached, common);
    srv_engine_publish(r->e);
    uint64_t start_ns = shm_now_ns();
    rc = read_ids(r, job->prompt.ids + common, job->prompt.n - common, false, err);
    r->result->read_ns = shm_now_ns() - start_ns;
    if (rc)
        return rc;
    atomic_store(&job->read, (uint32_t)(job->prompt.n - common));
    for (size_t i = 0; i < job->prompt.n; i++)
        inf_sampler_accept(r->sampler, job->prompt.ids[i]);
    return answer(r, err);
}

void srv_run_job(struct srv_engine *e, struct srv_job *job)
{
    struct srv_result result = {.end = SRV_END_FAILED,
                                .prompt_tokens = (uint32_t)job->prompt.n,
                                .queued_ns = shm_now_ns() - job->submit_ns};
    struct run r = {.e = e, .job = job, .result = &result};
    struct shm_error err = {0};
    int rc = run_job(&r, &err);
    const char *out, *held;
    size_t n;
    if (r.detok) { /* an unfinished character, then what might have become a stop string */
        inf_detok_flush(r.detok, &held, &n);
        if (!rc && r.text && result.end != SRV_END_STRING) {
            char tail[8];
            memcpy(tail, held, n);
            if (srv_text_push(r.text, tail, n, &out, &n) == -1 && n)
                rc = put_text(&r, out, n, -1);
            srv_text_flush(r.text, &out, &n);
            if (!rc)
                rc = put_text(&r, out, n, -1);
        }
    }
    srv_text_free(&r.text);
    inf_sampler_destroy(&r.sampler);
    if (r.slot) {
        r.slot->busy = false;
        r.slot->used_ns = shm_now_ns();
    }
    if (rc == -ECANCELED) {
        result.end = SRV_END_CANCELLED;
    } else if (rc) {
        result.end = SRV_END_FAILED;
        result.code = rc;
        snprintf(result.error, sizeof result.error, "%s", err.code ? shm_error_text(&err) : strerror(-rc));
    }
    result.total_ns = shm_now_ns() - job->submit_ns;
    srv_engine_publish(e);
    srv_stats_job(e->config.stats, &result);
    srv_queue_end(e->config.queue, job, &result);
}
