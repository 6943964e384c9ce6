/* SPDX-License-Identifier: MIT */
/* Responses of /v1/messages. */
#include "inferd/serve/srv_server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum block { TEXT, THINKING, TOOL };

static json_t *usage_json(const struct srv_result *r)
{
    /* input_tokens counts what had to be read. */
    return json_pack("{s:I, s:I, s:I, s:I}", "input_tokens",
                     (json_int_t)(r->prompt_tokens - r->cached_tokens), "cache_creation_input_tokens",
                     (json_int_t)0, "cache_read_input_tokens", (json_int_t)r->cached_tokens, "output_tokens",
                     (json_int_t)r->written_tokens);
}

static const char *stop_reason(const struct srv_answer *a, const struct srv_result *r)
{
    if (a->n_calls)
        return "tool_use";
    if (r->end == SRV_END_TOKEN)
        return "end_turn";
    return r->end == SRV_END_STRING ? "stop_sequence" : "max_tokens";
}

static const char *stop_sequence(const struct srv_answer *a, const struct srv_result *r)
{
    return r->end == SRV_END_STRING && !a->n_calls ? a->stops[r->stop] : NULL;
}

static json_t *message(const struct srv_answer *a, json_t *content, const char *reason, const char *sequence,
                       json_t *usage)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:o, s:s?, s:s?, s:o}", "id", a->id, "type", "message", "role",
                     "assistant", "model", srv_model_name(a->server), "content", content, "stop_reason",
                     reason, "stop_sequence", sequence, "usage", usage);
}

static void begin(struct srv_answer *a)
{
    if (a->begun)
        return;
    const struct srv_result so_far = {.prompt_tokens = (uint32_t)a->job->prompt.n,
                                      .cached_tokens = atomic_load(&a->job->cached)};
    srv_answer_event(a, "message_start",
                     json_pack("{s:s, s:o}", "type", "message_start", "message",
                               message(a, json_array(), NULL, NULL, usage_json(&so_far))));
}

static void close_block(struct srv_answer *a)
{
    if (a->block < 0)
        return;
    srv_answer_event(a, "content_block_stop",
                     json_pack("{s:s, s:i}", "type", "content_block_stop", "index", (int)a->n_blocks - 1));
    a->block = -1;
}

/* Takes the block. */
static void open_block(struct srv_answer *a, enum block kind, json_t *block)
{
    begin(a);
    close_block(a);
    srv_answer_event(a, "content_block_start",
                     json_pack("{s:s, s:i, s:o}", "type", "content_block_start", "index", (int)a->n_blocks,
                               "content_block", block));
    a->n_blocks++;
    a->block = (int)kind;
}

static void delta(struct srv_answer *a, const char *type, const char *key, json_t *value)
{
    srv_answer_event(a, "content_block_delta",
                     json_pack("{s:s, s:i, s:{s:s, s:o}}", "type", "content_block_delta", "index",
                               (int)a->n_blocks - 1, "delta", "type", type, key, value));
}

static void part(struct srv_answer *a, enum inf_part kind, const char *text, size_t n)
{
    bool thinking = kind == INF_PART_REASONING;
    if (!a->stream) {
        shm_text_add(thinking ? &a->reasoning : &a->content, text, n);
        return;
    }
    if (a->block != (thinking ? THINKING : TEXT))
        open_block(a, thinking ? THINKING : TEXT,
                   thinking
                       ? json_pack("{s:s, s:s, s:s}", "type", "thinking", "thinking", "", "signature", "")
                       : json_pack("{s:s, s:s}", "type", "text", "text", ""));
    delta(a, thinking ? "thinking_delta" : "text_delta", thinking ? "thinking" : "text",
          json_stringn(text, n));
}

static void call(struct srv_answer *a, const struct inf_tool_call *c)
{
    char id[96];
    if (a->one_call && a->n_calls)
        return;
    snprintf(id, sizeof id, "toolu_%.40s%u", a->id + strlen("msg_"), a->n_calls);
    json_t *input = a->stream ? json_object() : json_loads(c->arguments, 0, NULL);
    json_t *block =
        json_pack("{s:s, s:s, s:s, s:o}", "type", "tool_use", "id", id, "name", c->name, "input", input);
    if (!a->stream) {
        if (!a->calls)
            a->calls = json_array();
        json_array_append_new(a->calls, block);
        return;
    }
    open_block(a, TOOL, block);
    delta(a, "input_json_delta", "partial_json", json_string(c->arguments));
}

static void tokens(struct srv_answer *a)
{
    (void)a; /* this API has no log-probabilities */
}

static void end(struct srv_answer *a, const struct srv_result *r)
{
    const char *reason = stop_reason(a, r), *sequence = stop_sequence(a, r);
    if (a->stream) {
        begin(a);
        close_block(a);
        srv_answer_event(a, "message_delta",
                         json_pack("{s:s, s:{s:s, s:s?}, s:o}", "type", "message_delta", "delta",
                                   "stop_reason", reason, "stop_sequence", sequence, "usage", usage_json(r)));
        srv_answer_event(a, "message_stop", json_pack("{s:s}", "type", "message_stop"));
        srv_answer_end_stream(a);
        return;
    }
    json_t *content = json_array();
    if (a->reasoning.n)
        json_array_append_new(content, json_pack("{s:s, s:s%, s:s}", "type", "thinking", "thinking",
                                                 a->reasoning.bytes, a->reasoning.n, "signature", ""));
    if (a->content.n)
        json_array_append_new(
            content, json_pack("{s:s, s:s%}", "type", "text", "text", a->content.bytes, a->content.n));
    if (a->calls)
        json_array_extend(content, a->calls);
    srv_answer_reply(a, 200, message(a, content, reason, sequence, usage_json(r)));
}

static void fail(struct srv_answer *a, const struct srv_refusal *refusal)
{
    srv_answer_event(a, "error", srv_refusal_json(refusal, true));
}

const struct srv_format srv_format_anthropic = {
    .part = part, .call = call, .tokens = tokens, .end = end, .fail = fail};
