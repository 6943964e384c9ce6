/* SPDX-License-Identifier: MIT */
/* Responses of /v1/completions and /v1/chat/completions. */
#include "inferd/serve/srv_server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *usage_json(const struct srv_result *r)
{
    return json_pack("{s:I, s:I, s:I, s:{s:I}}", "prompt_tokens", (json_int_t)r->prompt_tokens,
                     "completion_tokens", (json_int_t)r->written_tokens, "total_tokens",
                     (json_int_t)r->prompt_tokens + (json_int_t)r->written_tokens, "prompt_tokens_details",
                     "cached_tokens", (json_int_t)r->cached_tokens);
}

static const char *finish_reason(const struct srv_answer *a, const struct srv_result *r)
{
    if (a->n_calls)
        return "tool_calls";
    return r->end == SRV_END_TOKEN || r->end == SRV_END_STRING ? "stop" : "length";
}

/* Completions list them in columns. */
static json_t *columns(struct srv_answer *a, json_t *list)
{
    json_t *tokens = json_array(), *values = json_array(), *tops = json_array(), *offsets = json_array();
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *t = json_array_get(list, i), *top = json_object_get(t, "top_logprobs");
        json_t *object = json_object(), *text = json_object_get(t, "token");
        for (size_t k = 0; k < json_array_size(top); k++) {
            const json_t *other = json_array_get(top, k);
            json_object_set(object, json_string_value(json_object_get(other, "token")),
                            json_object_get(other, "logprob"));
        }
        json_array_append(tokens, text);
        json_array_append(values, json_object_get(t, "logprob"));
        json_array_append_new(tops, object);
        json_array_append_new(offsets, json_integer((json_int_t)a->text_offset));
        a->text_offset += (uint32_t)json_array_size(json_object_get(t, "bytes"));
    }
    return json_pack("{s:o, s:o, s:o, s:o}", "tokens", tokens, "token_logprobs", values, "top_logprobs", tops,
                     "text_offset", offsets);
}

/* What has gathered since the last time; null if nothing was asked for. */
static json_t *take_logprobs(struct srv_answer *a)
{
    json_t *list = a->logprobs;
    a->logprobs = NULL;
    if (!list)
        return json_null();
    if (a->api == SRV_API_CHAT)
        return json_pack("{s:o, s:n}", "content", list, "refusal");
    json_t *all = columns(a, list);
    json_decref(list);
    return all;
}

static json_t *head(const struct srv_answer *a, const char *object, json_t *choices)
{
    return json_pack("{s:s, s:s, s:I, s:s, s:s, s:o}", "id", a->id, "object", object, "created",
                     (json_int_t)a->created, "model", srv_model_name(a->server), "system_fingerprint",
                     "inferd-" EXPERTD_VERSION, "choices", choices);
}

/* One event: of a completion its text, of a chat a delta. Takes delta. */
static void chunk(struct srv_answer *a, json_t *delta, const char *reason)
{
    json_t *choice = json_pack("{s:i, s:o, s:o, s:s?}", "index", 0, a->api == SRV_API_CHAT ? "delta" : "text",
                               delta, "logprobs", take_logprobs(a), "finish_reason", reason);
    json_t *event = head(a, a->api == SRV_API_CHAT ? "chat.completion.chunk" : "text_completion",
                         json_pack("[o]", choice));
    if (a->include_usage)
        json_object_set_new(event, "usage", json_null());
    srv_answer_event(a, NULL, event);
}

static void begin_chat(struct srv_answer *a)
{
    if (!a->begun && a->api == SRV_API_CHAT) {
        json_t *kept = a->logprobs;
        a->logprobs = NULL;
        chunk(a, json_pack("{s:s, s:s}", "role", "assistant", "content", ""), NULL);
        a->logprobs = kept;
    }
}

static void part(struct srv_answer *a, enum inf_part kind, const char *text, size_t n)
{
    const char *name = kind == INF_PART_REASONING ? "reasoning_content" : "content";
    if (!a->stream) {
        shm_text_add(kind == INF_PART_REASONING ? &a->reasoning : &a->content, text, n);
        return;
    }
    begin_chat(a);
    json_t *value = json_stringn(text, n);
    chunk(a, a->api == SRV_API_CHAT ? json_pack("{s:o}", name, value) : value, NULL);
}

static void call(struct srv_answer *a, const struct inf_tool_call *c)
{
    char id[96];
    if (a->one_call && a->n_calls)
        return;
    snprintf(id, sizeof id, "call_%.40s%u", a->id + strlen("chatcmpl-"), a->n_calls);
    json_t *object = json_pack("{s:s, s:s, s:{s:s, s:s}}", "id", id, "type", "function", "function", "name",
                               c->name, "arguments", c->arguments);
    if (!a->stream) {
        if (!a->calls)
            a->calls = json_array();
        json_array_append_new(a->calls, object);
        return;
    }
    begin_chat(a);
    json_object_set_new(object, "index", json_integer((json_int_t)a->n_calls));
    chunk(a, json_pack("{s:[o]}", "tool_calls", object), NULL);
}

static void tokens(struct srv_answer *a)
{
    begin_chat(a);
    chunk(a, a->api == SRV_API_CHAT ? json_pack("{s:s}", "content", "") : json_string(""), NULL);
}

static void end_whole(struct srv_answer *a, const struct srv_result *r)
{
    json_t *logprobs = take_logprobs(a), *choice, *content;
    content = a->content.n || !a->calls ? json_stringn(a->content.bytes ? a->content.bytes : "", a->content.n)
                                        : json_null();
    if (a->api == SRV_API_COMPLETION) {
        choice = json_pack("{s:i, s:o, s:o, s:s}", "index", 0, "text", content, "logprobs", logprobs,
                           "finish_reason", finish_reason(a, r));
    } else {
        json_t *message = json_pack("{s:s, s:o, s:n}", "role", "assistant", "content", content, "refusal");
        if (a->reasoning.n)
            json_object_set_new(message, "reasoning_content",
                                json_stringn(a->reasoning.bytes, a->reasoning.n));
        if (a->calls)
            json_object_set(message, "tool_calls", a->calls);
        choice = json_pack("{s:i, s:o, s:o, s:s}", "index", 0, "message", message, "logprobs", logprobs,
                           "finish_reason", finish_reason(a, r));
    }
    json_t *all =
        head(a, a->api == SRV_API_CHAT ? "chat.completion" : "text_completion", json_pack("[o]", choice));
    json_object_set_new(all, "usage", usage_json(r));
    srv_answer_reply(a, 200, all);
}

static void end(struct srv_answer *a, const struct srv_result *r)
{
    if (!a->stream) {
        end_whole(a, r);
        return;
    }
    begin_chat(a);
    chunk(a, a->api == SRV_API_CHAT ? json_object() : json_string(""), finish_reason(a, r));
    if (a->include_usage) {
        json_t *event =
            head(a, a->api == SRV_API_CHAT ? "chat.completion.chunk" : "text_completion", json_array());
        json_object_set_new(event, "usage", usage_json(r));
        srv_answer_event(a, NULL, event);
    }
    srv_answer_data(a, "[DONE]");
    srv_answer_end_stream(a);
}

static void fail(struct srv_answer *a, const struct srv_refusal *refusal)
{
    srv_answer_event(a, NULL, srv_refusal_json(refusal, false));
}

const struct srv_format srv_format_openai = {
    .part = part, .call = call, .tokens = tokens, .end = end, .fail = fail};
