/* SPDX-License-Identifier: MIT */
/* chat --url: the conversation is kept here, the server computes. */
#include "inferd/inf_cmd.h"
#include "inferd/inf_remote.h"
#include "shm/shm_bell.h"
#include "shm/shm_text.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_MAX_BYTES (1u << 20) /* of an event */

struct chat {
    const struct inf_options *o;
    struct inf_remote remote;
    json_t *messages;
    bool terminal;
    /* Of the turn that runs. */
    struct shm_text line, answer; /* an event so far; what was written */
    struct shm_text other;        /* a body that is no event stream */
    json_t *usage;
    char stop[32], error[512];
    uint64_t start_ns, first_ns;
};

static void take_error(struct chat *c, const json_t *j)
{
    const char *text = json_string_value(json_object_get(json_object_get(j, "error"), "message"));
    snprintf(c->error, sizeof c->error, "%s", text ? text : "the server failed and did not say why");
}

/* One `data:` line. */
static bool event(struct chat *c, const char *data, size_t n)
{
    json_t *j = json_loadb(data, n, 0, NULL);
    const json_t *choice = json_array_get(json_object_get(j, "choices"), 0),
                 *delta = json_object_get(choice, "delta");
    const char *stop = json_string_value(json_object_get(choice, "finish_reason"));
    if (json_object_get(j, "error"))
        take_error(c, j);
    if (stop)
        snprintf(c->stop, sizeof c->stop, "%s", stop);
    if (json_is_object(json_object_get(j, "usage"))) {
        json_decref(c->usage);
        c->usage = json_incref(json_object_get(j, "usage"));
    }
    const json_t *content = json_object_get(delta, "content");
    bool ok = true;
    if (json_string_length(content)) {
        if (!c->first_ns)
            c->first_ns = shm_now_ns();
        ok = !shm_text_add(&c->answer, json_string_value(content), json_string_length(content));
        if (!c->o->json) {
            fwrite(json_string_value(content), 1, json_string_length(content), stdout);
            fflush(stdout);
        }
    }
    json_decref(j);
    return ok && !c->error[0] && !ferror(stdout);
}

static bool on_data(void *ctx, const char *data, size_t n)
{
    struct chat *c = ctx;
    if (c->other.n + n < LINE_MAX_BYTES && shm_text_add(&c->other, data, n))
        return false;
    while (n) {
        const char *end = memchr(data, '\n', n);
        size_t len = end ? (size_t)(end - data) : n;
        if (c->line.n + len > LINE_MAX_BYTES || shm_text_add(&c->line, data, len))
            return false;
        data += len + (end != NULL);
        n -= len + (end != NULL);
        if (!end)
            break;
        size_t line_n = c->line.n;
        c->line.n = 0;
        if (line_n > 6 && strncmp(c->line.bytes, "data: ", 6) == 0 &&
            strncmp(c->line.bytes + 6, "[DONE]", 6) != 0 && !event(c, c->line.bytes + 6, line_n - 6))
            return false;
    }
    return true;
}

static json_t *request(const struct chat *c)
{
    const struct inf_options *o = c->o;
    const struct inf_sampler_params *p = &o->sampler;
    return json_pack("{s:O, s:b, s:{s:b}, s:f, s:f, s:f, s:i, s:f, s:I, s:I, s:b}", "messages", c->messages,
                     "stream", 1, "stream_options", "include_usage", 1, "temperature", (double)p->temperature,
                     "top_p", (double)p->top_p, "min_p", (double)p->min_p, "top_k", (int)p->top_k,
                     "repeat_penalty", (double)p->repeat_penalty, "seed", (json_int_t)p->seed, "max_tokens",
                     (json_int_t)o->n, "ignore_eos", o->ignore_eos);
}

static void print_turn(struct chat *c)
{
    json_t *j =
        json_pack("{s:s%, s:s, s:f, s:f}", "text", c->answer.bytes ? c->answer.bytes : "", c->answer.n,
                  "stop", c->stop, "ttft_ms", c->first_ns ? (double)(c->first_ns - c->start_ns) / 1e6 : 0.0,
                  "answer_ms", c->first_ns ? (double)(shm_now_ns() - c->first_ns) / 1e6 : 0.0);
    json_object_set_new(j, "prompt_tokens", json_incref(json_object_get(c->usage, "prompt_tokens")));
    json_object_set_new(j, "generated_tokens", json_incref(json_object_get(c->usage, "completion_tokens")));
    json_object_set(j, "cached_tokens",
                    json_object_get(json_object_get(c->usage, "prompt_tokens_details"), "cached_tokens"));
    json_dumpf(j, stdout, JSON_COMPACT);
    json_decref(j);
}

/* One user message; on failure it is as if it had never come. */
static int turn(void *ctx, const char *text, size_t bytes, struct shm_error *err)
{
    struct chat *c = ctx;
    c->line.n = c->answer.n = c->other.n = 0;
    c->stop[0] = c->error[0] = '\0';
    c->first_ns = 0;
    c->start_ns = shm_now_ns();
    json_decref(c->usage);
    c->usage = NULL;
    json_t *message = json_pack("{s:s, s:s%}", "role", "user", "content", text, bytes);
    if (!message)
        return shm_error_set(err, EINVAL, "the line is not UTF-8");
    json_array_append_new(c->messages, message);
    json_t *j = request(c);
    char *body = j ? json_dumps(j, JSON_COMPACT) : NULL;
    json_decref(j);
    int status =
        body ? inf_remote_request(&c->remote, "/v1/chat/completions", body, on_data, c, err) : -ENOMEM;
    free(body);
    bool cut = status == -ECANCELED && !c->error[0] && atomic_load(&inf_cancel);
    if (status > 0 && status != 200 && !c->error[0]) {
        json_t *error = json_loadb(c->other.bytes ? c->other.bytes : "", c->other.n, 0, NULL);
        take_error(c, error);
        json_decref(error);
    }
    if (status == 200 && !c->error[0] && !c->stop[0])
        snprintf(c->error, sizeof c->error, "the connection ended in the middle of the answer");
    if (c->error[0])
        status = shm_error_set(err, EREMOTEIO, "%s", c->error);
    if ((status < 0 && !cut) || (cut && !c->answer.n)) {
        json_array_remove(c->messages, json_array_size(c->messages) - 1);
        return status;
    }
    json_array_append_new(c->messages, json_pack("{s:s, s:s%}", "role", "assistant", "content",
                                                 c->answer.bytes ? c->answer.bytes : "", c->answer.n));
    if (cut)
        strcpy(c->stop, "cancelled");
    if (c->o->json)
        print_turn(c);
    putchar('\n');
    fflush(stdout);
    if (cut)
        fputs("inferd: answer cut; the conversation goes on\n", stderr);
    return 0;
}

static void clear(void *ctx)
{
    struct chat *c = ctx;
    json_array_clear(c->messages);
    if (c->o->system)
        json_array_append_new(c->messages,
                              json_pack("{s:s, s:s}", "role", "system", "content", c->o->system));
}

static bool keep(void *ctx, const char *data, size_t n)
{
    struct shm_text *body = ctx;
    return body->n + n < LINE_MAX_BYTES && !shm_text_add(body, data, n);
}

/* Asks for the models: tells early, and in one line, what is wrong with the address. */
static int greet(struct chat *c, struct shm_error *err)
{
    struct shm_text body = {0};
    int status = inf_remote_request(&c->remote, "/v1/models", NULL, keep, &body, err);
    json_t *j = body.n ? json_loadb(body.bytes, body.n, 0, NULL) : NULL;
    if (status > 0 && status != 200) {
        take_error(c, j);
        status = shm_error_set(err, EREMOTEIO, "%.200s: %.250s", c->o->url, c->error);
        c->error[0] = '\0';
    }
    const char *name =
        json_string_value(json_object_get(json_array_get(json_object_get(j, "data"), 0), "id"));
    if (status == 200 && c->terminal)
        fprintf(stderr, "%s at %s. /quit ends, Ctrl-C cuts an answer short.\n", name ? name : "?", c->o->url);
    json_decref(j);
    free(body.bytes);
    return status < 0 ? status : 0;
}

int inf_cmd_remote(const struct inf_options *o)
{
    struct chat c = {
        .o = o, .terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO), .messages = json_array()};
    struct shm_error err = {0};
    int rc =
        c.messages ? inf_remote_open(o->url, o->serve.api_key_file, &inf_cancel, &err, &c.remote) : -ENOMEM;
    if (!rc) {
        clear(&c);
        rc = greet(&c, &err);
    }
    const struct inf_lines lines = {
        .ctx = &c, .terminal = c.terminal, .json = o->json, .turn = turn, .clear = clear};
    int status = rc ? inf_cmd_fail(rc, &err) : inf_cmd_lines(&lines);
    json_decref(c.messages);
    json_decref(c.usage);
    free(c.line.bytes);
    free(c.answer.bytes);
    free(c.other.bytes);
    return status;
}
