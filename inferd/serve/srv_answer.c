/* SPDX-License-Identifier: MIT */
/* From a request to a job, and from its events to the API's writer. */
#include "inferd/serve/srv_server.h"

#include "inferd/serve/srv_grammar.h"
#include "inferd/serve/srv_sched.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

static void destroy(struct srv_answer *a)
{
    if (a->at) {
        *a->at = a->next;
        if (a->next)
            a->next->at = a->at;
    }
    inf_parser_destroy(&a->parser);
    if (a->x) {
        a->x->on_gone = NULL;
        a->x->user = NULL;
    }
    srv_job_release(a->server->queue, &a->job);
    json_decref(a->calls);
    json_decref(a->logprobs);
    free(a->content.bytes);
    free(a->reasoning.bytes);
    free(a);
}

static void on_gone(struct srv_exchange *x)
{
    struct srv_answer *a = x->user;
    a->x = NULL;
    srv_queue_cancel(a->server->queue, a->job);
    destroy(a);
}

static void count(struct srv_answer *a, int status)
{
    static const enum srv_endpoint at[] = {SRV_AT_COMPLETIONS, SRV_AT_CHAT, SRV_AT_MESSAGES, SRV_AT_MESSAGES};
    srv_stats_response(a->server->stats, at[a->api], status);
}

/* The client is too slow or gone: on_gone is on its way, and nothing more is written. */
static void write_stream(struct srv_answer *a, const char *text, size_t n)
{
    a->written_ns = shm_now_ns();
    if (a->x && !a->dead && srv_stream_write(a->x, text, n))
        a->dead = true;
}

static void begin(struct srv_answer *a)
{
    if (a->begun || !a->x)
        return;
    a->begun = true;
    count(a, 200);
    srv_header(a->x, "Cache-Control", "no-cache");
    srv_header(a->x, "X-Accel-Buffering", "no"); /* for nginx: pass on what comes */
    srv_stream_begin(a->x, 200, "text/event-stream");
}

void srv_answers_beat(struct srv_server *s)
{
    static const char comment[] = ": still at it\n\n", ping[] = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    uint64_t now_ns = shm_now_ns();
    for (struct srv_answer *a = s->answers; a; a = a->next) {
        if (!a->stream || !a->x || now_ns - a->written_ns < 2 * SRV_BEAT_S * 1000000000ull)
            continue;
        bool ping_it = a->format == &srv_format_anthropic && a->begun;
        begin(a);
        if (ping_it)
            write_stream(a, ping, sizeof ping - 1);
        else
            write_stream(a, comment, sizeof comment - 1);
    }
}

void srv_answer_event(struct srv_answer *a, const char *name, json_t *object)
{
    struct shm_text s = {0};
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
    begin(a);
    if (name) {
        shm_text_add(&s, "event: ", 7);
        shm_text_add(&s, name, strlen(name));
        shm_text_add(&s, "\n", 1);
    }
    shm_text_add(&s, "data: ", 6);
    shm_text_add(&s, text, text ? strlen(text) : 0);
    if (!shm_text_add(&s, "\n\n", 2) && text)
        write_stream(a, s.bytes, s.n);
    free(text);
    free(s.bytes);
}

void srv_answer_data(struct srv_answer *a, const char *text)
{
    begin(a);
    write_stream(a, "data: ", 6);
    write_stream(a, text, strlen(text));
    write_stream(a, "\n\n", 2);
}

void srv_answer_reply(struct srv_answer *a, int status, json_t *object)
{
    struct srv_exchange *x = a->x;
    if (!x) {
        json_decref(object);
        return;
    }
    count(a, status);
    a->x = NULL;
    x->on_gone = NULL;
    srv_reply_json(a->server, x, status, object);
}

void srv_answer_end_stream(struct srv_answer *a)
{
    if (!a->x || a->dead)
        return;
    begin(a);
    struct srv_exchange *x = a->x;
    a->x = NULL;
    srv_stream_end(x);
}

static void fail(struct srv_answer *a, const struct srv_refusal *refusal)
{
    if (a->begun) {
        a->format->fail(a, refusal);
        srv_answer_end_stream(a);
        return;
    }
    if (refusal->status == 503 && a->x)
        srv_header(a->x, "Retry-After", "1");
    srv_answer_reply(a, refusal->status, srv_refusal_json(refusal, a->api >= SRV_API_MESSAGES));
}

static void fail_result(struct srv_answer *a, const struct srv_result *r)
{
    struct srv_refusal refusal;
    int status = r->code == -ESHUTDOWN || r->code == -EUCLEAN || r->code == -ENOMEM ? 503
                 : r->code == -EBADR                                                ? 400
                                                                                    : 500;
    const char *text =
        r->end == SRV_END_CANCELLED
            ? "the server is being stopped or drained: it finishes what it has and takes nothing new"
            : r->error;
    srv_refuse(&refusal, r->end == SRV_END_CANCELLED ? 503 : status, NULL, NULL, "%s", text);
    fail(a, &refusal);
}

/* One token as the APIs list it. */
static json_t *token_json(const struct srv_answer *a, int32_t id, float logprob)
{
    const char *bytes = "";
    size_t n = 0;
    inf_tokenizer_bytes(srv_engine_info(a->server->engine)->tokenizer, id, &bytes, &n);
    json_t *list = json_array(), *text = json_stringn(bytes, n);
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    if (!text) { /* a part of a character */
        struct shm_text s = {0};
        char hex[8];
        for (size_t i = 0; i < n; i++) {
            snprintf(hex, sizeof hex, "\\x%02x", (unsigned char)bytes[i]);
            shm_text_add(&s, hex, 4);
        }
        text = json_string(s.bytes ? s.bytes : "");
        free(s.bytes);
    }
    if (!(logprob > -9999.0f)) /* JSON has no infinity */
        logprob = -9999.0f;
    return json_pack("{s:o, s:f, s:o}", "token", text, "logprob", (double)logprob, "bytes", list);
}

static void add_logprobs(struct srv_answer *a, const struct srv_event *e)
{
    json_t *token = token_json(a, e->id, e->logprob), *top = json_array();
    for (unsigned i = 0; i < e->n_top; i++)
        json_array_append_new(top, token_json(a, e->top[i].id, e->top[i].logprob));
    json_object_set_new(token, "top_logprobs", top);
    if (!a->logprobs)
        a->logprobs = json_array();
    json_array_append_new(a->logprobs, token);
}

static int on_text(void *ctx, enum inf_part part, const char *text, size_t n)
{
    struct srv_answer *a = ctx;
    a->format->part(a, part, text, n);
    return 0;
}

static int on_call(void *ctx, const struct inf_tool_call *call)
{
    struct srv_answer *a = ctx;
    a->format->call(a, call);
    a->n_calls++;
    return 0;
}

static void on_event(struct srv_job *job, const struct srv_event *e)
{
    struct srv_answer *a = job->user;
    if (!a || (a->dead && !e->ended))
        return;
    if (!e->ended) {
        if (job->logprobs && e->id >= 0)
            add_logprobs(a, e);
        if (e->bytes && a->parser)
            inf_parser_push(a->parser, e->text, e->bytes);
        else if (e->bytes)
            on_text(a, INF_PART_CONTENT, e->text, e->bytes);
        if (a->stream && a->logprobs)
            a->format->tokens(a);
        return;
    }
    if (a->dead)
        return; /* on_gone frees it */
    if (e->result.end == SRV_END_FAILED || e->result.end == SRV_END_CANCELLED) {
        fail_result(a, &e->result);
    } else {
        if (a->parser)
            inf_parser_finish(a->parser);
        a->format->end(a, &e->result);
    }
    if (!a->dead)
        destroy(a);
}

int srv_ready(struct srv_server *s, struct srv_refusal *refusal)
{
    struct srv_status *status;
    if (s->draining)
        return srv_refuse(
            refusal, 503, NULL, NULL,
            "the server is being stopped or drained: it finishes what it has and takes nothing new");
    if (srv_queue_is_open(s->queue))
        return 0;
    status = malloc(sizeof *status);
    if (!status)
        return srv_refuse(refusal, 503, NULL, NULL, "no memory");
    srv_engine_status(s->engine, status);
    srv_refuse(refusal, 503, NULL, NULL, "not ready (%s)%s%s", srv_state_name(status->state),
               status->error[0] ? ": " : "", status->error);
    free(status);
    return -EINVAL;
}

/* What could never start is refused; an answer of any length gets what there is room for. */
static int check_room(struct srv_job *job, const struct srv_info *info, bool asked,
                      struct srv_refusal *refusal)
{
    uint64_t need = srv_sched_need(job->prompt.n, job->max_tokens, info->ctx);
    if (need <= info->kv_tokens)
        return 0;
    if (!asked && job->prompt.n <= info->kv_tokens) {
        job->max_tokens = info->kv_tokens - (uint32_t)job->prompt.n + 1;
        return 0;
    }
    return srv_refuse(
        refusal, 400, "context_length_exceeded", "max_tokens",
        "the prompt has %zu tokens, the answer may have %u: the server has room for %u of both. "
        "Ask for less, or start it with a greater --kv-tokens",
        job->prompt.n, job->max_tokens, info->kv_tokens);
}

/* The job of a request; the request gives away what it owns. */
static int make_job(struct srv_answer *a, struct srv_request *r, struct srv_refusal *refusal)
{
    struct srv_server *s = a->server;
    const struct srv_info *info = srv_engine_info(s->engine);
    struct inf_template_text text = {0};
    struct srv_job *job = a->job;
    int rc = srv_prompt_ids(s, r, &job->prompt, &text, refusal);
    if (!rc && !job->prompt.n)
        rc = srv_refuse(refusal, 400, NULL, NULL, "the prompt is empty");
    if (!rc && job->prompt.n >= info->ctx)
        rc = srv_refuse(
            refusal, 400, "context_length_exceeded", r->api == SRV_API_COMPLETION ? "prompt" : "messages",
            "the prompt has %zu tokens; the context holds %u and an answer needs at least one: shorten "
            "the prompt, or start the server with a greater --ctx",
            job->prompt.n, info->ctx);
    for (size_t i = 0; !rc && i < r->n_bias; i++)
        if ((uint32_t)r->bias[i].id >= info->vocab)
            rc = srv_refuse(refusal, 400, NULL, "logit_bias",
                            "'logit_bias': token id %d is not in the vocabulary", r->bias[i].id);
    if (!rc && r->api != SRV_API_COMPLETION) {
        const struct inf_parse_events events = {.ctx = a, .on_text = on_text, .on_call = on_call};
        struct shm_error err = {0};
        /* Where a grammar rules, all of the answer is content. */
        rc = inf_parser_create(s->chat, r->grammar ? NULL : &text, r->tools, r->tools ? strlen(r->tools) : 0,
                               &events, &err, &a->parser);
        if (rc)
            rc = srv_refuse(refusal, rc == -ENOMEM ? 503 : 400, NULL, "tools", "%s", shm_error_text(&err));
        job->n_stop_ids = (unsigned)inf_template_stops(s->chat, info->tokenizer, job->stop_ids,
                                                       sizeof job->stop_ids / sizeof job->stop_ids[0]);
        job->show_special = true;
    }
    inf_template_text_clear(&text);
    if (rc)
        return rc;
    uint32_t most = s->options->max_tokens ? s->options->max_tokens : info->ctx;
    job->sampler = r->sampler;
    job->max_tokens = r->max_tokens && r->max_tokens < most ? r->max_tokens : most;
    if ((rc = check_room(job, info, r->max_tokens != 0, refusal)))
        return rc;
    job->ignore_eos = r->ignore_eos;
    job->logprobs = r->logprobs;
    job->n_top = r->n_top;
    memcpy(job->stops, r->stops, sizeof job->stops);
    memcpy(a->stops, r->stops, sizeof a->stops);
    job->n_stops = r->n_stops;
    r->n_stops = 0;
    job->bias = r->bias;
    job->n_bias = r->n_bias;
    r->bias = NULL;
    job->grammar = r->grammar;
    r->grammar = NULL;
    job->on_event = on_event;
    job->user = a;
    /* Fairness is between keys where there are keys, else between addresses. */
    const char *key = srv_head_field(&a->x->head, "authorization");
    if (!key || !s->n_keys)
        key = s->n_keys ? srv_head_field(&a->x->head, "x-api-key") : NULL;
    snprintf(job->client, sizeof job->client, "%s", key ? key : a->x->peer);
    return 0;
}

void srv_answer_start(struct srv_server *s, struct srv_exchange *x, struct srv_request *r)
{
    struct srv_refusal refusal = {0};
    uint64_t random = 0;
    if (srv_ready(s, &refusal)) {
        srv_header(x, "Retry-After", "1");
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    struct srv_answer *a = calloc(1, sizeof *a);
    struct srv_job *job = srv_job_new();
    if (!a || !job) {
        free(a);
        if (job)
            srv_job_release(s->queue, &job);
        srv_refuse(&refusal, 503, NULL, NULL, "no memory");
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    static const char *const prefix[] = {"cmpl-", "chatcmpl-", "msg_", ""};
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0)
        random = shm_now_ns();
    *a =
        (struct srv_answer){.server = s,
                            .x = x,
                            .job = job,
                            .format = r->api == SRV_API_MESSAGES ? &srv_format_anthropic : &srv_format_openai,
                            .api = r->api,
                            .stream = r->stream,
                            .include_usage = r->include_usage,
                            .one_call = r->one_call,
                            .created = time(NULL),
                            .block = -1};
    snprintf(a->id, sizeof a->id, "%s%016llx%08llx", prefix[r->api], (unsigned long long)random,
             (unsigned long long)(a->created & 0xffffffff));
    int rc = make_job(a, r, &refusal);
    if (!rc && (rc = srv_queue_submit(s->queue, a->job))) {
        if (rc == -EBUSY) {
            struct srv_counts c = srv_queue_counts(s->queue);
            double wait_s = c.mean_s * (c.waiting + 1) / (c.running ? c.running : 1);
            char text[16];
            snprintf(text, sizeof text, "%d", wait_s < 1 ? 1 : wait_s > 60 ? 60 : (int)(wait_s + 0.5));
            srv_header(x, "Retry-After", text);
            srv_refuse(&refusal, 429, "queue_full", NULL, "%u requests wait already: try again later",
                       c.waiting);
        } else {
            srv_header(x, "Retry-After", "1");
            srv_refuse(&refusal, 503, NULL, NULL, "not ready: try again");
        }
    }
    if (rc) {
        a->x = NULL;
        destroy(a);
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    a->written_ns = shm_now_ns();
    a->next = s->answers;
    a->at = &s->answers;
    if (a->next)
        a->next->at = &a->next;
    s->answers = a;
    x->user = a;
    x->on_gone = on_gone;
}
