/* SPDX-License-Identifier: MIT */
/* One job: its conversation, its sampler, the text it has written. */
#include "inferd/serve/srv_engine_priv.h"
#include "inferd/serve/srv_text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Log-probability of the token and the likeliest ones, of the model's own distribution. */
static void fill_logprobs(const struct srv_seq *s, struct srv_event *event, int32_t id, unsigned n_top)
{
    const float *logits = s->logits;
    uint32_t vocab = s->e->info.vocab;
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

static int put_text(struct srv_seq *s, const char *text, size_t n, int32_t id)
{
    struct srv_job *job = s->job;
    if (!n && (!job->logprobs || id < 0))
        return 0;
    struct srv_event *event = srv_event_new(text, n, job->logprobs && id >= 0 ? job->n_top : 0);
    if (!event)
        return -ENOMEM;
    event->id = id;
    if (job->logprobs && id >= 0)
        fill_logprobs(s, event, id, job->n_top);
    srv_queue_put(s->e->config.queue, job, event);
    return 0;
}

static bool ends_answer(const struct srv_seq *s, int32_t id)
{
    for (unsigned i = 0; i < s->job->n_stop_ids; i++)
        if (s->job->stop_ids[i] == id)
            return true;
    return inf_tokenizer_is_stop(s->e->engine->tokenizer, id);
}

/* The next token, or why there is none: -ENODATA the grammar's end, -EBADR what was asked for leaves none. */
static int32_t sample(struct srv_seq *s)
{
    struct srv_job *job = s->job;
    if (job->grammar) {
        if (srv_grammar_must_end(job->grammar))
            return -ENODATA;
        int rc;
        const uint64_t *mask =
            srv_grammar_mask(job->grammar, s->e->vocab, job->stop_ids, job->n_stop_ids, &rc);
        if (!mask && rc == -E2BIG)
            return shm_error_set(&s->err, EBADR,
                                 "the grammar leaves too much open at a time: simplify the schema");
        if (!mask)
            return shm_error_set(&s->err, ENOMEM, "no memory for the grammar");
        inf_sampler_allow(s->sampler, mask);
    }
    int32_t id = inf_sampler_next(s->sampler, s->logits);
    if (id >= 0)
        return id;
    for (uint32_t i = 0; i < s->e->info.vocab && (job->grammar || job->n_bias); i++)
        if (isfinite(s->logits[i])) /* the model had one */
            return shm_error_set(&s->err, EBADR,
                                 job->n_bias ? "'logit_bias' leaves no token that may come next"
                                             : "the grammar leaves no token of the vocabulary");
    return shm_error_set(&s->err, EDOM,
                         "the model gave no usable logits: its weights are damaged ('expertctl verify')");
}

/* Takes a token into the answer. 1: it completed a stop string. */
static int take(struct srv_seq *s, int32_t id)
{
    struct srv_job *job = s->job;
    const struct inf_tokenizer *tok = s->e->engine->tokenizer;
    const char *text = "", *out;
    size_t n = 0, out_n;
    uint64_t now = shm_now_ns();
    if (!s->result.written_tokens)
        s->result.first_ns = now - job->submit_ns;
    else
        srv_stats_gap(s->e->config.stats, now - s->token_ns);
    s->token_ns = now;
    s->result.written_tokens++;
    atomic_store(&job->written, s->result.written_tokens);
    inf_sampler_accept(s->sampler, id);
    inf_sampler_written(s->sampler, id);
    if (job->grammar) {
        const char *bytes;
        size_t len;
        if (inf_tokenizer_bytes(tok, id, &bytes, &len) || srv_grammar_accept(job->grammar, bytes, len))
            return shm_error_set(&s->err, EPROTO,
                                 "response_format: the grammar refused a token that it allowed");
    }
    inf_detok_push(s->detok, id, &text, &n); /* an id without text: none */
    int stop = srv_text_push(s->text, text, n, &out, &out_n);
    if (stop == -2 || put_text(s, out, out_n, id))
        return -ENOMEM;
    if (stop < 0)
        return 0;
    s->result.stop = (uint32_t)stop;
    return 1;
}

static void end(struct srv_seq *s, enum srv_end how, int rc)
{
    s->ended = true;
    s->result.end = how;
    s->rc = rc;
}

void srv_seq_fail(struct srv_seq *s, int rc, const struct shm_error *err)
{
    if (err)
        s->err = *err;
    end(s, SRV_END_FAILED, rc);
}

void srv_seq_advance(struct srv_seq *s)
{
    struct srv_job *job = s->job;
    s->fresh = false;
    if (atomic_load(&job->cancelled)) {
        end(s, SRV_END_CANCELLED, -ECANCELED);
        return;
    }
    int32_t id = sample(s);
    if (id == -ENODATA || (id >= 0 && !job->ignore_eos && ends_answer(s, id))) {
        end(s, SRV_END_TOKEN, 0);
        return;
    }
    int rc = id < 0 ? id : take(s, id);
    if (rc < 0)
        end(s, SRV_END_FAILED, rc);
    else if (rc == 1)
        end(s, SRV_END_STRING, 0);
    else if (s->result.written_tokens >= job->max_tokens)
        end(s, SRV_END_LENGTH, 0);
    else if (s->c->n == s->c->capacity)
        end(s, SRV_END_CONTEXT, 0);
    else
        s->next = id;
}

uint32_t srv_seq_rest(const struct srv_seq *s)
{
    return s->ended || s->loading || s->next >= 0 ? 0 : (uint32_t)(s->job->prompt.n - s->c->n);
}

static uint32_t blocks_of(const struct srv_engine *e, const struct srv_job *job)
{
    return inf_kv_blocks((uint32_t)srv_sched_need(job->prompt.n, job->max_tokens, e->info.ctx));
}

uint32_t srv_engine_reserved(struct srv_engine *e)
{
    uint32_t n = 0;
    memset(e->held, 0, e->engine->pool->blocks * sizeof *e->held);
    for (unsigned i = 0; i < e->n_seq; i++) {
        const struct srv_seq *s = e->seq[i];
        const uint32_t whole = s->c ? s->c->n / INF_KV_BLOCK : 0; /* it writes behind them only */
        n += s->blocks - whole;
        for (uint32_t k = 0; k < whole; k++) {
            bool *held = &e->held[s->c->kv->block[k]];
            n += !*held;
            *held = true;
        }
    }
    return n;
}

uint32_t srv_engine_wants(struct srv_engine *e, const struct srv_job *job)
{
    return blocks_of(e, job) - inf_prefix_held(e->prefix, job->prompt.ids, (uint32_t)job->prompt.n, e->held);
}

void srv_seq_take_prefix(struct srv_seq *s)
{
    const struct inf_ids *prompt = &s->job->prompt;
    struct inf_prefix_found found = inf_prefix_take(s->e->prefix, s->c->kv, prompt->ids, (uint32_t)prompt->n,
                                                    s->blocks - s->c->kv->blocks);
    s->loading = found.more;
    memcpy(s->c->tokens, prompt->ids, found.tokens * sizeof *s->c->tokens);
    s->c->n = s->result.cached_tokens = found.tokens;
    s->exact = found.exact;
    atomic_store(&s->job->cached, found.tokens);
}

void srv_seq_keep(struct srv_seq *s, bool goes_on)
{
    uint32_t n = goes_on ? s->c->n - s->c->n % INF_KV_BLOCK : s->c->n;
    if (n)
        inf_prefix_put(s->e->prefix, s->c->kv, s->c->tokens, n, s->exact < n ? s->exact : n);
}

static int start(struct srv_seq *s)
{
    struct srv_engine *e = s->e;
    struct srv_job *job = s->job;
    int rc = inf_sampler_create(&job->sampler, e->info.vocab, &s->err, &s->sampler);
    for (size_t i = 0; !rc && i < job->n_bias; i++)
        rc = inf_sampler_bias(s->sampler, job->bias[i].id, job->bias[i].logprob);
    if (rc)
        return rc;
    for (size_t i = 0; i < job->prompt.n; i++)
        inf_sampler_accept(s->sampler, job->prompt.ids[i]);
    s->logits = e->n_logits ? e->logits[--e->n_logits] : malloc(e->info.vocab * sizeof *s->logits);
    s->text = srv_text_new(job->stops, job->n_stops);
    if (!s->logits || !s->text || inf_detok_create(e->engine->tokenizer, job->show_special, &s->detok))
        return -ENOMEM;
    s->start_ns = shm_now_ns();
    if ((rc = inf_conversation_create(e->engine, &s->err, &s->c)))
        return rc;
    srv_seq_take_prefix(s);
    return 0;
}

struct srv_seq *srv_seq_new(struct srv_engine *e, struct srv_job *job)
{
    struct srv_result result = {.end = SRV_END_FAILED,
                                .prompt_tokens = (uint32_t)job->prompt.n,
                                .queued_ns = shm_now_ns() - job->submit_ns};
    struct srv_seq *s = calloc(1, sizeof *s);
    if (!s) {
        result.code = -ENOMEM;
        result.total_ns = result.queued_ns;
        snprintf(result.error, sizeof result.error, "no memory");
        srv_stats_job(e->config.stats, &result);
        srv_queue_end(e->config.queue, job, &result);
        return NULL;
    }
    s->e = e;
    s->job = job;
    s->result = result;
    s->next = -1;
    s->blocks = blocks_of(e, job);
    int rc = start(s);
    if (rc && !s->ended)
        srv_seq_fail(s, rc, NULL);
    return s;
}

/* An unfinished character, then what might have become a stop string. */
static int flush(struct srv_seq *s)
{
    const char *out, *held;
    char tail[8];
    size_t n;
    inf_detok_flush(s->detok, &held, &n);
    if (s->result.end == SRV_END_STRING)
        return 0;
    memcpy(tail, held, n);
    int rc = 0;
    if (srv_text_push(s->text, tail, n, &out, &n) == -1 && n)
        rc = put_text(s, out, n, -1);
    srv_text_flush(s->text, &out, &n);
    return rc ? rc : put_text(s, out, n, -1);
}

void srv_seq_finish(struct srv_seq **seq)
{
    struct srv_seq *s = *seq;
    struct srv_engine *e = s->e;
    if (!s->rc)
        s->rc = flush(s);
    if (s->rc == -ECANCELED) {
        s->result.end = SRV_END_CANCELLED;
    } else if (s->rc) {
        s->result.end = SRV_END_FAILED;
        s->result.code = s->rc;
        snprintf(s->result.error, sizeof s->result.error, "%s",
                 s->err.code ? shm_error_text(&s->err) : strerror(-s->rc));
    }
    srv_text_free(&s->text);
    inf_detok_destroy(&s->detok);
    inf_sampler_destroy(&s->sampler);
    if (s->logits)
        e->logits[e->n_logits++] = s->logits;
    if (s->c)
        srv_seq_keep(s, false);
    inf_conversation_destroy(&s->c);
    s->result.total_ns = shm_now_ns() - s->job->submit_ns;
    srv_stats_job(e->config.stats, &s->result);
    srv_queue_end(e->config.queue, s->job, &s->result);
    free(s);
    *seq = NULL;
}
