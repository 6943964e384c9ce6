/* SPDX-License-Identifier: MIT */
/* Bodies of /v1/completions and /v1/chat/completions. */
#include "inferd/serve/srv_grammar.h"
#include "inferd/serve/srv_request.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGES_MAX 4096
#define BIAS_MAX     4096

#define PARSE(name)                                                                                          \
    static int name(struct srv_request *r, const struct srv_parameter *p, const json_t *value,               \
                    struct srv_refusal *refusal)

static int no_memory(struct srv_refusal *refusal)
{
    return srv_refuse(refusal, 503, NULL, NULL, "no memory");
}

/* A parameter that only one of the two has. */
static int only(struct srv_request *r, const struct srv_parameter *p, enum srv_api api,
                struct srv_refusal *refusal)
{
    if (r->api == api)
        return 0;
    return srv_refuse(refusal, 400, "unsupported_parameter", p->name, "parameter '%s' is not supported here",
                      p->name);
}

static int unsupported_value(const struct srv_parameter *p, const char *what, struct srv_refusal *refusal)
{
    return srv_refuse(refusal, 400, "unsupported_value", p->name, "'%s': only %s is supported", p->name,
                      what);
}

PARSE(parse_seed)
{
    if (!json_is_integer(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'seed' must be a whole number");
    r->sampler.seed = (uint64_t)json_integer_value(value);
    r->seeded = true;
    return 0;
}

PARSE(parse_top_k)
{
    json_int_t k = json_integer_value(value);
    if (!json_is_integer(value) || k < -1 || k > INT32_MAX)
        return srv_refuse(refusal, 400, NULL, p->name,
                          "'top_k' must be a whole number of 0 or more; 0 is off");
    r->sampler.top_k = k < 0 ? 0 : (int32_t)k;
    return 0;
}

PARSE(parse_repeat)
{
    r->sampler.repeat_last_n = r->sampler.repeat_last_n ? r->sampler.repeat_last_n : 64;
    return srv_parse_float(r, p, value, refusal);
}

PARSE(parse_one)
{
    (void)r;
    return json_is_integer(value) && json_integer_value(value) == 1 ? 0 : unsupported_value(p, "1", refusal);
}

PARSE(parse_false)
{
    (void)r;
    return json_is_false(value) ? 0 : unsupported_value(p, "false", refusal);
}

PARSE(parse_tier)
{
    const char *s = json_string_value(value);
    (void)r;
    return s && (strcmp(s, "auto") == 0 || strcmp(s, "default") == 0) ? 0
                                                                      : unsupported_value(p, "auto", refusal);
}

PARSE(parse_modalities)
{
    const char *s = json_string_value(json_array_get(value, 0));
    (void)r;
    return json_array_size(value) == 1 && s && strcmp(s, "text") == 0
               ? 0
               : unsupported_value(p, "[\"text\"]", refusal);
}

PARSE(parse_logprobs)
{
    if (r->api == SRV_API_CHAT) {
        if (!json_is_boolean(value))
            return srv_refuse(refusal, 400, NULL, p->name, "'logprobs' must be true or false");
        r->logprobs = json_is_true(value);
        return 0;
    }
    json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0 || n > 5)
        return srv_refuse(refusal, 400, NULL, p->name, "'logprobs' must be a whole number from 0 to 5");
    r->logprobs = true;
    r->n_top = (unsigned)n;
    return 0;
}

PARSE(parse_top_logprobs)
{
    int rc = only(r, p, SRV_API_CHAT, refusal);
    return rc ? rc : srv_parse_uint(r, p, value, refusal);
}

PARSE(parse_bias)
{
    size_t n = json_object_size(value);
    const char *key;
    json_t *item;
    if (!json_is_object(value) || n > BIAS_MAX)
        return srv_refuse(refusal, 400, NULL, p->name,
                          "'logit_bias' must be an object of at most %d token ids", BIAS_MAX);
    free(r->bias);
    r->n_bias = 0;
    r->bias = calloc(n + 1, sizeof *r->bias);
    if (!r->bias)
        return no_memory(refusal);
    json_object_foreach((json_t *)value, key, item)
    {
        char *end;
        errno = 0;
        long id = strtol(key, &end, 10);
        double bias = json_number_value(item);
        if (*end || end == key || errno || id < 0 || id > INT32_MAX)
            return srv_refuse(refusal, 400, NULL, p->name, "'logit_bias': '%.40s' is not a token id", key);
        if (!json_is_number(item) || !(bias >= -100 && bias <= 100))
            return srv_refuse(refusal, 400, NULL, p->name,
                              "'logit_bias': values are numbers from -100 to 100");
        r->bias[r->n_bias++] = (struct srv_likely){(int32_t)id, bias <= -100 ? -INFINITY : (float)bias};
    }
    return 0;
}

PARSE(parse_stream_options)
{
    const char *key;
    json_t *item;
    if (!json_is_object(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'stream_options' must be an object");
    json_object_foreach((json_t *)value, key, item)
    {
        if (strcmp(key, "include_usage") == 0 && json_is_boolean(item))
            r->include_usage = json_is_true(item);
        else if (!(strcmp(key, "include_obfuscation") == 0 && json_is_false(item)))
            return srv_refuse(refusal, 400, "unsupported_parameter", p->name,
                              "'stream_options.%.60s' is not supported with this value", key);
    }
    return 0;
}

PARSE(parse_prompt)
{
    int rc = only(r, p, SRV_API_COMPLETION, refusal);
    if (rc)
        return rc;
    if (json_array_size(value) == 1 && !json_is_integer(json_array_get(value, 0)))
        value = json_array_get(value, 0);
    if (json_is_string(value)) {
        r->prompt = json_string_value(value);
        r->prompt_bytes = json_string_length(value);
        return 0;
    }
    size_t n = json_array_size(value);
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(value, i);
        json_int_t id = json_integer_value(item);
        int32_t id32 = (int32_t)id;
        if (!json_is_integer(item) || id < 0 || id > INT32_MAX)
            return srv_refuse(refusal, 400, NULL, p->name,
                              "'prompt': one text or one list of token ids; several prompts "
                              "are not supported");
        if (inf_ids_append(&r->ids, &id32, 1))
            return no_memory(refusal);
    }
    if (!json_is_array(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'prompt' must be a string or a list of token ids");
    return 0;
}

PARSE(parse_suffix)
{
    (void)r;
    return json_string_length(value) == 0 && json_is_string(value)
               ? 0
               : unsupported_value(p, "an empty one", refusal);
}

PARSE(parse_response_format)
{
    const char *type = json_string_value(json_object_get(value, "type"));
    struct shm_error err = {0};
    int rc = only(r, p, SRV_API_CHAT, refusal);
    if (rc)
        return rc;
    srv_grammar_destroy(&r->grammar);
    if (type && strcmp(type, "text") == 0)
        return 0;
    if (type && strcmp(type, "json_object") == 0) {
        rc = srv_grammar_json(&err, &r->grammar);
    } else if (type && strcmp(type, "json_schema") == 0) {
        const json_t *outer = json_object_get(value, "json_schema"),
                     *schema = json_object_get(outer, "schema");
        if (!schema)
            return srv_refuse(refusal, 400, NULL, "response_format",
                              "'response_format.json_schema.schema' is missing");
        rc = srv_grammar_schema(schema, "response_format.json_schema.schema", &err, &r->grammar);
    } else {
        return srv_refuse(refusal, 400, NULL, "response_format",
                          "'response_format.type' must be text, json_object or json_schema");
    }
    return rc ? srv_refuse(refusal, rc == -ENOMEM ? 503 : 400, NULL, "response_format", "%s",
                           shm_error_text(&err))
              : 0;
}

/* Calls of an assistant's message. */
static int parse_calls(struct srv_request *r, const json_t *list, struct inf_message *m,
                       struct srv_refusal *refusal)
{
    size_t n = json_array_size(list);
    struct inf_tool_call *calls = srv_request_own(r, calloc(n + 1, sizeof *calls));
    if (!calls)
        return no_memory(refusal);
    for (size_t i = 0; i < n; i++) {
        const json_t *call = json_array_get(list, i), *function = json_object_get(call, "function");
        calls[i].id = json_string_value(json_object_get(call, "id"));
        calls[i].name = json_string_value(json_object_get(function, "name"));
        calls[i].arguments = json_string_value(json_object_get(function, "arguments"));
        if (!calls[i].name || !calls[i].arguments)
            return srv_refuse(refusal, 400, NULL, "messages",
                              "'messages': a tool call without function name or arguments");
        json_t *parsed = json_loads(calls[i].arguments, JSON_REJECT_DUPLICATES, NULL);
        bool ok = json_is_object(parsed);
        json_decref(parsed);
        if (!ok)
            return srv_refuse(refusal, 400, NULL, "messages",
                              "'messages': arguments of the call of '%.60s' are not a JSON object",
                              calls[i].name);
    }
    m->calls = calls;
    m->n_calls = n;
    return 0;
}

static int parse_message(struct srv_request *r, const json_t *item, struct inf_message *m,
                         struct srv_refusal *refusal)
{
    static const char *const known[] = {"role",         "content",           "name",    "tool_calls",
                                        "tool_call_id", "reasoning_content", "refusal", "annotations",
                                        "audio",        "function_call"};
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    const json_t *content = json_object_get(item, "content"), *calls = json_object_get(item, "tool_calls");
    const char *key;
    json_t *value;
    bool role_ok = false;
    if (!json_is_object(item))
        return srv_refuse(refusal, 400, NULL, "messages", "'messages' must hold objects");
    json_object_foreach((json_t *)item, key, value)
    {
        size_t i = 0;
        while (i < 10 && strcmp(known[i], key) != 0)
            i++;
        bool empty = json_is_null(value) || (json_is_array(value) && !json_array_size(value));
        if (i == 10 || (i >= 6 && !empty))
            return srv_refuse(refusal, 400, "unsupported_parameter", "messages",
                              "'messages': '%.60s' is not supported", key);
    }
    m->role = json_string_value(json_object_get(item, "role"));
    for (size_t i = 0; m->role && i < 5; i++)
        role_ok = role_ok || strcmp(m->role, roles[i]) == 0;
    if (!role_ok)
        return srv_refuse(refusal, 400, NULL, "messages",
                          "'messages': role must be system, developer, user, assistant or tool");
    m->name = json_string_value(json_object_get(item, "name"));
    m->tool_call_id = json_string_value(json_object_get(item, "tool_call_id"));
    const json_t *reasoning = json_object_get(item, "reasoning_content");
    if (json_is_string(reasoning)) {
        m->reasoning = json_string_value(reasoning);
        m->reasoning_bytes = json_string_length(reasoning);
    }
    bool assistant = strcmp(m->role, "assistant") == 0;
    if ((m->name || m->tool_call_id) && strcmp(m->role, "tool") != 0)
        return srv_refuse(refusal, 400, "unsupported_parameter", "messages",
                          "'messages': 'name' and 'tool_call_id' are supported in messages of tools only");
    if (m->reasoning && !assistant)
        return srv_refuse(refusal, 400, "unsupported_parameter", "messages",
                          "'messages': 'reasoning_content' is supported in an assistant's messages only");
    if (json_array_size(calls)) {
        if (!assistant)
            return srv_refuse(refusal, 400, NULL, "messages",
                              "'messages': tool_calls outside an assistant's message");
        int rc = parse_calls(r, calls, m, refusal);
        if (rc)
            return rc;
    }
    if ((!content || json_is_null(content)) && (assistant && m->n_calls))
        return 0;
    return srv_text_of(r, content, "messages.content", &m->content, &m->content_bytes, refusal);
}

PARSE(parse_messages)
{
    size_t n = json_array_size(value);
    int rc = only(r, p, SRV_API_CHAT, refusal);
    if (rc)
        return rc;
    if (!n || n > MESSAGES_MAX)
        return srv_refuse(refusal, 400, NULL, p->name, "'messages' must be a list of 1 to %d messages",
                          MESSAGES_MAX);
    r->messages = calloc(n, sizeof *r->messages);
    if (!r->messages)
        return no_memory(refusal);
    r->n_messages = n;
    for (size_t i = 0; i < n && !rc; i++)
        rc = parse_message(r, json_array_get(value, i), &r->messages[i], refusal);
    return rc;
}

PARSE(parse_tools)
{
    int rc = only(r, p, SRV_API_CHAT, refusal);
    if (rc)
        return rc;
    if (!json_is_array(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'tools' must be a list");
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *tool = json_array_get(value, i);
        const char *type = json_string_value(json_object_get(tool, "type"));
        if (!type || strcmp(type, "function") != 0 ||
            !json_string_length(json_object_get(json_object_get(tool, "function"), "name")))
            return srv_refuse(refusal, 400, NULL, p->name, "'tools[%zu]' must be a function with a name", i);
        const json_t *schema = json_object_get(json_object_get(tool, "function"), "parameters");
        if (schema && !json_is_object(schema) && !json_is_null(schema))
            return srv_refuse(refusal, 400, NULL, p->name,
                              "'tools[%zu].function.parameters' must be an object", i);
    }
    for (size_t i = 0; i < json_array_size(value); i++) {
        static const char *const known[] = {"name", "description", "parameters", "strict", NULL};
        const json_t *function = json_object_get(json_array_get(value, i), "function");
        if (srv_only_keys(function, known, p->name, "'tools'", refusal))
            return -EINVAL;
        r->strict_tools = r->strict_tools || json_is_true(json_object_get(function, "strict"));
    }
    if (json_array_size(value))
        r->tool_list = json_incref((json_t *)value);
    return 0;
}

PARSE(parse_tool_choice)
{
    const char *word = json_string_value(value);
    int rc = only(r, p, SRV_API_CHAT, refusal);
    if (rc)
        return rc;
    if (word && strcmp(word, "auto") == 0) {
        r->tool_choice = SRV_TOOLS_AUTO;
    } else if (word && strcmp(word, "none") == 0) {
        r->tool_choice = SRV_TOOLS_NONE;
    } else if (word && strcmp(word, "required") == 0) {
        r->tool_choice = SRV_TOOLS_REQUIRED;
    } else {
        r->tool_name = json_string_value(json_object_get(json_object_get(value, "function"), "name"));
        if (!r->tool_name)
            return srv_refuse(refusal, 400, NULL, p->name,
                              "'tool_choice' must be auto, none, required or a function");
        r->tool_choice = SRV_TOOLS_NAMED;
    }
    return 0;
}

PARSE(parse_parallel)
{
    if (!json_is_boolean(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'%s' must be true or false", p->name);
    r->one_call = json_is_false(value);
    return 0;
}

PARSE(parse_effort)
{
    int rc = only(r, p, SRV_API_CHAT, refusal);
    r->effort = json_string_value(value);
    r->thinking_param = p->name;
    if (rc)
        return rc;
    if (r->effort && strcmp(r->effort, "none") == 0) {
        r->thinking = INF_THINKING_OFF;
        r->effort = NULL;
        return 0;
    }
    if (!r->effort ||
        (strcmp(r->effort, "low") != 0 && strcmp(r->effort, "medium") != 0 && strcmp(r->effort, "high") != 0))
        return unsupported_value(p, "none, low, medium or high", refusal);
    return 0;
}

PARSE(parse_template_options)
{
    const char *key;
    json_t *item;
    int rc = only(r, p, SRV_API_CHAT, refusal);
    if (rc)
        return rc;
    json_object_foreach((json_t *)value, key, item)
    {
        if (strcmp(key, "enable_thinking") != 0 || !json_is_boolean(item))
            return srv_refuse(refusal, 400, "unsupported_parameter", p->name,
                              "'chat_template_kwargs': only enable_thinking, true or false, is supported");
        r->thinking_param = p->name;
        r->thinking = json_is_true(item) ? INF_THINKING_ON : INF_THINKING_OFF;
    }
    return 0;
}

#define AT(field) offsetof(struct srv_request, field)

const struct srv_parameter srv_openai_parameters[] = {
    {"model", srv_parse_model, 0, 0, 0},
    {"prompt", parse_prompt, 0, 0, 0},
    {"messages", parse_messages, 0, 0, 0},
    {"max_tokens", srv_parse_uint, 1, 1 << 27, AT(max_tokens)},
    {"max_completion_tokens", srv_parse_uint, 1, 1 << 27, AT(max_tokens)},
    {"temperature", srv_parse_float, 0, 2, AT(sampler.temperature)},
    {"top_p", srv_parse_float, 0, 1, AT(sampler.top_p)},
    {"top_k", parse_top_k, 0, 0, 0},
    {"min_p", srv_parse_float, 0, 1, AT(sampler.min_p)},
    {"presence_penalty", srv_parse_float, -2, 2, AT(sampler.presence_penalty)},
    {"frequency_penalty", srv_parse_float, -2, 2, AT(sampler.frequency_penalty)},
    {"repeat_penalty", parse_repeat, 0.01, 100, AT(sampler.repeat_penalty)},
    {"repetition_penalty", parse_repeat, 0.01, 100, AT(sampler.repeat_penalty)},
    {"seed", parse_seed, 0, 0, 0},
    {"stop", srv_parse_stops, 0, 0, 0},
    {"logit_bias", parse_bias, 0, 0, 0},
    {"logprobs", parse_logprobs, 0, 0, 0},
    {"top_logprobs", parse_top_logprobs, 0, SRV_TOP_MAX, AT(n_top)},
    {"ignore_eos", srv_parse_bool, 0, 0, AT(ignore_eos)},
    {"stream", srv_parse_bool, 0, 0, AT(stream)},
    {"stream_options", parse_stream_options, 0, 0, 0},
    {"n", parse_one, 0, 0, 0},
    {"best_of", parse_one, 0, 0, 0},
    {"echo", parse_false, 0, 0, 0},
    {"suffix", parse_suffix, 0, 0, 0},
    {"store", parse_false, 0, 0, 0},
    {"service_tier", parse_tier, 0, 0, 0},
    {"modalities", parse_modalities, 0, 0, 0},
    {"response_format", parse_response_format, 0, 0, 0},
    {"tools", parse_tools, 0, 0, 0},
    {"tool_choice", parse_tool_choice, 0, 0, 0},
    {"parallel_tool_calls", parse_parallel, 0, 0, 0},
    {"reasoning_effort", parse_effort, 0, 0, 0},
    {"chat_template_kwargs", parse_template_options, 0, 0, 0},
    /* Labels: for the caller's own records. */
    {"user", srv_parse_label, 0, 0, 0},
    {"metadata", srv_parse_label, 0, 0, 0},
    {"safety_identifier", srv_parse_label, 0, 0, 0},
    {"prompt_cache_key", srv_parse_label, 0, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

int srv_openai_check(struct srv_request *r, struct srv_refusal *refusal)
{
    if (r->api == SRV_API_COMPLETION && !r->prompt && !r->ids.n)
        return srv_refuse(refusal, 400, NULL, "prompt", "'prompt' is missing or empty");
    if (r->api == SRV_API_CHAT && !r->n_messages)
        return srv_refuse(refusal, 400, NULL, "messages", "'messages' is missing");
    if (r->n_top && !r->logprobs)
        return srv_refuse(refusal, 400, NULL, "top_logprobs", "'top_logprobs' needs 'logprobs': true");
    if (r->include_usage && !r->stream)
        return srv_refuse(refusal, 400, NULL, "stream_options", "'stream_options' needs 'stream': true");
    if (r->strict_tools && r->tool_choice == SRV_TOOLS_AUTO)
        return srv_refuse(refusal, 400, "unsupported_value", "tools",
                          "'tools': 'strict' is supported with a 'tool_choice' that forces a call only");
    if ((r->tool_choice == SRV_TOOLS_REQUIRED || r->tool_choice == SRV_TOOLS_NAMED) && !r->tool_list)
        return srv_refuse(refusal, 400, NULL, "tool_choice", "'tool_choice' needs 'tools'");
    return 0;
}
