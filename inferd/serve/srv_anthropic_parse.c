/* SPDX-License-Identifier: MIT */
/* Bodies of /v1/messages: into the same struct, in OpenAI's terms. */
#include "inferd/serve/srv_request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGES_MAX 4096

#define PARSE(name)                                                                                          \
    static int name(struct srv_request *r, const struct srv_parameter *p, const json_t *value,               \
                    struct srv_refusal *refusal)

static int no_memory(struct srv_refusal *refusal)
{
    return srv_refuse(refusal, 503, NULL, NULL, "no memory");
}

PARSE(parse_top_k)
{
    uint32_t k = 0;
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > INT32_MAX)
        return srv_refuse(refusal, 400, NULL, p->name, "'top_k' must be a whole number of 0 or more");
    k = (uint32_t)json_integer_value(value);
    r->sampler.top_k = (int32_t)k;
    return 0;
}

/* One more message behind the others. */
static struct inf_message *add_message(struct srv_request *r, const char *role)
{
    struct inf_message *all = realloc(r->messages, (r->n_messages + 1) * sizeof *all);
    if (!all)
        return NULL;
    r->messages = all;
    all[r->n_messages] = (struct inf_message){.role = role};
    return &all[r->n_messages++];
}

/* Blocks of an assistant's message: texts, then calls. */
static int assistant_blocks(struct srv_request *r, const json_t *content, struct srv_refusal *refusal)
{
    json_t *texts = json_array();
    size_t n = json_array_size(content), n_calls = 0;
    struct inf_tool_call *calls = srv_request_own(r, calloc(n + 1, sizeof *calls));
    struct inf_message *m = add_message(r, "assistant");
    int rc = !texts || !calls || !m ? no_memory(refusal) : 0;
    for (size_t i = 0; i < n && !rc; i++) {
        json_t *block = json_array_get(content, i);
        const char *type = json_string_value(json_object_get(block, "type"));
        if (type && strcmp(type, "tool_use") == 0) {
            const json_t *input = json_object_get(block, "input");
            calls[n_calls].id = json_string_value(json_object_get(block, "id"));
            calls[n_calls].name = json_string_value(json_object_get(block, "name"));
            if (!calls[n_calls].name || !json_is_object(input))
                rc = srv_refuse(refusal, 400, NULL, "messages",
                                "messages: a tool_use block without name or input");
            else if (!(calls[n_calls++].arguments = srv_request_own(r, json_dumps(input, JSON_COMPACT))))
                rc = no_memory(refusal);
        } else if (type && strcmp(type, "thinking") == 0) {
            const json_t *text = json_object_get(block, "thinking");
            m->reasoning = json_string_value(text);
            m->reasoning_bytes = json_string_length(text);
        } else {
            json_array_append(texts, block);
        }
    }
    if (!rc && (json_array_size(texts) || !n_calls))
        rc = srv_text_of(r, texts, "messages.content", &m->content, &m->content_bytes, refusal);
    if (!rc) {
        m->calls = calls;
        m->n_calls = n_calls;
    }
    json_decref(texts);
    return rc;
}

/* Blocks of a user's message: results of tools first, each a message of its own, then the rest. */
static int user_blocks(struct srv_request *r, const json_t *content, struct srv_refusal *refusal)
{
    json_t *texts = json_array();
    size_t n = json_array_size(content), results = 0;
    int rc = texts ? 0 : no_memory(refusal);
    for (size_t i = 0; i < n && !rc; i++) {
        json_t *block = json_array_get(content, i);
        const char *type = json_string_value(json_object_get(block, "type"));
        if (!type || strcmp(type, "tool_result") != 0) {
            json_array_append(texts, block);
            continue;
        }
        struct inf_message *m = add_message(r, "tool");
        const json_t *inner = json_object_get(block, "content");
        const char *text = "";
        size_t bytes = 0;
        if (!m)
            rc = no_memory(refusal);
        else if (inner && !json_is_null(inner))
            rc = srv_text_of(r, inner, "messages.content.tool_result", &text, &bytes, refusal);
        if (rc)
            break;
        results++;
        m->content = text;
        m->content_bytes = bytes;
        m->tool_call_id = json_string_value(json_object_get(block, "tool_use_id"));
    }
    if (!rc && (json_array_size(texts) || !results)) {
        struct inf_message *m = add_message(r, "user");
        rc = m ? srv_text_of(r, texts, "messages.content", &m->content, &m->content_bytes, refusal)
               : no_memory(refusal);
    }
    json_decref(texts);
    return rc;
}

PARSE(parse_messages)
{
    size_t n = json_array_size(value);
    int rc = 0;
    if (!n || n > MESSAGES_MAX)
        return srv_refuse(refusal, 400, NULL, p->name, "messages: a list of 1 to %d messages is needed",
                          MESSAGES_MAX);
    for (size_t i = 0; i < n && !rc; i++) {
        const json_t *item = json_array_get(value, i), *content = json_object_get(item, "content");
        const char *role = json_string_value(json_object_get(item, "role"));
        bool user = role && strcmp(role, "user") == 0;
        static const char *const known[] = {"role", "content", NULL};
        if (srv_only_keys(item, known, p->name, "messages", refusal))
            return -EINVAL;
        if (!user && (!role || strcmp(role, "assistant") != 0))
            return srv_refuse(refusal, 400, NULL, p->name, "messages.%zu.role: must be user or assistant", i);
        if (json_is_array(content)) {
            rc = user ? user_blocks(r, content, refusal) : assistant_blocks(r, content, refusal);
            continue;
        }
        struct inf_message *m = add_message(r, user ? "user" : "assistant");
        rc = m ? srv_text_of(r, content, "messages.content", &m->content, &m->content_bytes, refusal)
               : no_memory(refusal);
    }
    return rc;
}

PARSE(parse_system)
{
    struct inf_message *m = add_message(r, "system");
    return m ? srv_text_of(r, value, p->name, &m->content, &m->content_bytes, refusal) : no_memory(refusal);
}

PARSE(parse_tools)
{
    if (!json_is_array(value))
        return srv_refuse(refusal, 400, NULL, p->name, "tools: a list is needed");
    json_t *list = json_array();
    for (size_t i = 0; list && i < json_array_size(value); i++) {
        json_t *tool = json_array_get(value, i), *schema = json_object_get(tool, "input_schema");
        const char *name = json_string_value(json_object_get(tool, "name"));
        const char *type = json_string_value(json_object_get(tool, "type"));
        if (!name || !*name || !json_is_object(schema) || (type && strcmp(type, "custom") != 0)) {
            json_decref(list);
            return srv_refuse(refusal, 400, NULL, p->name,
                              "tools.%zu: only tools with name and input_schema are supported", i);
        }
        static const char *const known[] = {"name", "description",   "input_schema",
                                            "type", "cache_control", NULL};
        if (srv_only_keys(tool, known, p->name, "tools", refusal)) {
            json_decref(list);
            return -EINVAL;
        }
        json_t *function = json_pack("{s:s}", "name", name);
        if (json_object_get(tool, "description"))
            json_object_set(function, "description", json_object_get(tool, "description"));
        json_object_set(function, "parameters", schema);
        json_array_append_new(list, json_pack("{s:s, s:o}", "type", "function", "function", function));
    }
    if (json_array_size(list))
        r->tool_list = list;
    else
        json_decref(list);
    return 0;
}

PARSE(parse_tool_choice)
{
    static const char *const known[] = {"type", "name", "disable_parallel_tool_use", NULL};
    const char *type = json_string_value(json_object_get(value, "type"));
    if (srv_only_keys(value, known, p->name, "tool_choice", refusal))
        return -EINVAL;
    r->one_call = json_is_true(json_object_get(value, "disable_parallel_tool_use"));
    r->tool_name = json_string_value(json_object_get(value, "name"));
    if (type && strcmp(type, "auto") == 0)
        r->tool_choice = SRV_TOOLS_AUTO;
    else if (type && strcmp(type, "none") == 0)
        r->tool_choice = SRV_TOOLS_NONE;
    else if (type && strcmp(type, "any") == 0)
        r->tool_choice = SRV_TOOLS_REQUIRED;
    else if (type && strcmp(type, "tool") == 0 && r->tool_name)
        r->tool_choice = SRV_TOOLS_NAMED;
    else
        return srv_refuse(refusal, 400, NULL, p->name,
                          "tool_choice.type: must be auto, any, none or tool with a name");
    return 0;
}

PARSE(parse_thinking)
{
    const char *type = json_string_value(json_object_get(value, "type"));
    r->thinking_param = p->name;
    if (type && strcmp(type, "disabled") == 0)
        r->thinking = INF_THINKING_OFF;
    else
        return srv_refuse(
            refusal, 400, "unsupported_value", p->name,
            "thinking.type: only disabled is supported; budgets are not, and a model that thinks does so "
            "when the parameter is left out");
    return 0;
}

PARSE(parse_tier)
{
    const char *s = json_string_value(value);
    (void)r;
    if (s && (strcmp(s, "auto") == 0 || strcmp(s, "standard_only") == 0))
        return 0;
    return srv_refuse(refusal, 400, NULL, p->name, "service_tier: only auto is supported");
}

#define AT(field) offsetof(struct srv_request, field)

const struct srv_parameter srv_anthropic_parameters[] = {
    {"model", srv_parse_model, 0, 0, 0},
    {"messages", parse_messages, 0, 0, 0},
    {"system", parse_system, 0, 0, 0},
    {"max_tokens", srv_parse_uint, 1, 1 << 27, AT(max_tokens)},
    {"stop_sequences", srv_parse_stops, 0, 0, 0},
    {"stream", srv_parse_bool, 0, 0, AT(stream)},
    {"temperature", srv_parse_float, 0, 1, AT(sampler.temperature)},
    {"top_p", srv_parse_float, 0, 1, AT(sampler.top_p)},
    {"top_k", parse_top_k, 0, 0, 0},
    {"tools", parse_tools, 0, 0, 0},
    {"tool_choice", parse_tool_choice, 0, 0, 0},
    {"thinking", parse_thinking, 0, 0, 0},
    {"service_tier", parse_tier, 0, 0, 0},
    /* A label: for the caller's own records. */
    {"metadata", srv_parse_label, 0, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

int srv_anthropic_check(struct srv_request *r, struct srv_refusal *refusal)
{
    size_t n = r->n_messages;
    if (!n || (n == 1 && strcmp(r->messages[0].role, "system") == 0))
        return srv_refuse(refusal, 400, NULL, "messages", "messages: field required");
    if (!r->max_tokens && r->api == SRV_API_MESSAGES)
        return srv_refuse(refusal, 400, NULL, "max_tokens", "max_tokens: field required");
    for (size_t i = 1; i < n; i++) { /* `system` may stand behind `messages` in the body */
        if (strcmp(r->messages[i].role, "system") != 0)
            continue;
        struct inf_message system = r->messages[i];
        memmove(r->messages + 1, r->messages, i * sizeof *r->messages);
        r->messages[0] = system;
    }
    if ((r->tool_choice == SRV_TOOLS_REQUIRED || r->tool_choice == SRV_TOOLS_NAMED) && !r->tool_list)
        return srv_refuse(refusal, 400, NULL, "tool_choice", "tool_choice needs tools");
    return 0;
}
