/* SPDX-License-Identifier: MIT */
/* ChatML and the Qwen families built on it. */
#include "inferd/inf_template_priv.h"

#include <errno.h>
#include <stdlib.h>

#define START "<|im_start|>"
#define END   "<|im_end|>\n"

static void open_role(struct inf_render *r, const struct inf_message *m)
{
    inf_put(r, START);
    inf_put(r, inf_is(m, "system") ? "system" : m->role);
    inf_put(r, "\n");
}

static void plain(struct inf_render *r, const struct inf_message *m)
{
    open_role(r, m);
    inf_put_from(r, inf_content(m));
    inf_put(r, END);
}

static void prompt(struct inf_render *r)
{
    if (r->in->add_generation_prompt)
        inf_put(r, START "assistant\n");
}

void inf_render_chatml(struct inf_render *r)
{
    for (size_t i = 0; i < r->n; i++)
        plain(r, &r->messages[i]);
    prompt(r);
}

static bool need_messages(struct inf_render *r)
{
    if (!r->n)
        inf_refuse(r, EINVAL, "there is no message; send at least one");
    return r->n > 0;
}

static void tool_list(struct inf_render *r)
{
    size_t i;
    json_t *tool;
    inf_put(r, "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
               "provided with "
               "function signatures within <tools></tools> XML tags:\n<tools>");
    json_array_foreach(r->tools, i, tool)
    {
        inf_put(r, "\n");
        inf_put_json(r, tool, 0);
    }
    inf_put(
        r,
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
        "<args-json-object>}\n</tool_call>" END);
}

static void tool_call(struct inf_render *r, const struct inf_tool_call *call)
{
    json_t *arguments = inf_arguments(r, call);
    if (!arguments)
        return;
    inf_put(r, "<tool_call>\n{\"name\": \"");
    inf_put_string(r, call->name);
    inf_put(r, "\", \"arguments\": ");
    inf_put_json(r, arguments, 0);
    inf_put(r, "}\n</tool_call>");
    json_decref(arguments);
}

/* Results that follow each other share one user message. */
static void tool_result(struct inf_render *r, size_t i)
{
    if (i == 0 || !inf_is(&r->messages[i - 1], "tool"))
        inf_put(r, START "user");
    inf_put(r, "\n<tool_response>\n");
    inf_put_from(r, inf_content(&r->messages[i]));
    inf_put(r, "\n</tool_response>");
    if (i + 1 == r->n || !inf_is(&r->messages[i + 1], "tool"))
        inf_put(r, END);
}

void inf_render_qwen25(struct inf_render *r)
{
    if (!need_messages(r))
        return;
    inf_put(r, START "system\n");
    if (inf_is(&r->messages[0], "system"))
        inf_put_from(r, inf_content(&r->messages[0]));
    else
        inf_put(r, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
    if (r->tools) {
        inf_put(r, "\n\n");
        tool_list(r);
    } else {
        inf_put(r, END);
    }
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "tool")) {
            tool_result(r, i);
        } else if (m->n_calls) {
            inf_put(r, START "assistant");
            if (inf_content(m).n) {
                inf_put(r, "\n");
                inf_put_from(r, inf_content(m));
            }
            for (size_t k = 0; k < m->n_calls; k++) {
                inf_put(r, "\n");
                tool_call(r, &m->calls[k]);
            }
            inf_put(r, END);
        } else if (i || !inf_is(m, "system")) {
            plain(r, m);
        }
    }
    prompt(r);
}

/* The last user message that is no tool's result; n - 1 where there is none. */
static size_t last_query(const struct inf_render *r)
{
    for (size_t i = r->n; i-- > 0;) {
        struct inf_slice c = inf_content(&r->messages[i]);
        if (inf_is(&r->messages[i], "user") &&
            !(inf_starts(c, "<tool_response>") && inf_ends(c, "</tool_response>")))
            return i;
    }
    return r->n - 1;
}

static void qwen3_answer(struct inf_render *r, size_t i, size_t query)
{
    const struct inf_message *m = &r->messages[i];
    struct inf_slice content = inf_content(m), reasoning = {"", 0};
    bool thinks = r->template->variant != INF_QWEN3_INSTRUCT;
    if (thinks)
        inf_split_thinking(m, &content, &reasoning);
    inf_put(r, START "assistant\n");
    if (thinks && i > query && (i + 1 == r->n || reasoning.n)) {
        inf_put(r, "<think>\n");
        inf_put_from(r, inf_lstrip_newlines(inf_rstrip_newlines(reasoning)));
        inf_put(r, "\n</think>\n\n");
        inf_put_from(r, inf_lstrip_newlines(content));
    } else {
        inf_put_from(r, content);
    }
    for (size_t k = 0; k < m->n_calls; k++) {
        if (k || content.n)
            inf_put(r, "\n");
        tool_call(r, &m->calls[k]);
    }
    inf_put(r, END);
}

void inf_render_qwen3(struct inf_render *r)
{
    if (!need_messages(r))
        return;
    bool system = inf_is(&r->messages[0], "system");
    if (system || r->tools)
        inf_put(r, START "system\n");
    if (system)
        inf_put_from(r, inf_content(&r->messages[0]));
    if (r->tools) {
        inf_put(r, system ? "\n\n" : "");
        tool_list(r);
    } else if (system) {
        inf_put(r, END);
    }
    size_t query = last_query(r);
    for (size_t i = system; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "assistant"))
            qwen3_answer(r, i, query);
        else if (inf_is(m, "tool"))
            tool_result(r, i);
        else
            plain(r, m);
    }
    prompt(r);
    if (!r->in->add_generation_prompt)
        return;
    if (r->template->variant == INF_QWEN3_THINKING)
        inf_put(r, "<think>\n");
    if (r->template->variant == INF_QWEN3_HYBRID && r->in->thinking == INF_THINKING_OFF)
        inf_put(r, "<think>\n\n</think>\n\n");
}

/* <KEY>VALUE</KEY> for what the tool's description has beyond the known keys. */
static void extra_keys(struct shm_text *b, const json_t *object, const char *const known[])
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        bool skip = false;
        for (int i = 0; known[i]; i++)
            skip |= strcmp(key, known[i]) == 0;
        if (skip)
            continue;
        inf_buf_string(b, "\n<");
        inf_buf_string(b, key);
        inf_buf_string(b, ">");
        if (json_is_object(value) || json_is_array(value))
            inf_json_dump(b, value, 0);
        else
            inf_json_str(b, value);
        inf_buf_string(b, "</");
        inf_buf_string(b, key);
        inf_buf_string(b, ">");
    }
}

static void element(struct shm_text *b, const char *name, const json_t *value, bool strip)
{
    struct shm_text text = {0};
    inf_json_str(&text, value);
    struct inf_slice s = {text.bytes ? text.bytes : "", text.n};
    if (strip)
        s = inf_strip(s);
    inf_buf_string(b, "\n<");
    inf_buf_string(b, name);
    inf_buf_string(b, ">");
    inf_buf_put(b, s.at, s.n);
    inf_buf_string(b, "</");
    inf_buf_string(b, name);
    inf_buf_string(b, ">");
    if (text.rc)
        b->rc = text.rc;
    free(text.bytes);
}

static void coder_tool(struct shm_text *b, const json_t *function)
{
    static const char *const of_parameter[] = {"name", "type", "description", NULL};
    static const char *const of_parameters[] = {"type", "properties", NULL};
    static const char *const of_function[] = {"type", "name", "description", "parameters", NULL};
    const json_t *parameters = json_object_get(function, "parameters"), *value;
    const char *key;
    json_t *fields;
    inf_buf_string(b, "\n<function>");
    element(b, "name", json_object_get(function, "name"), false);
    if ((value = json_object_get(function, "description")))
        element(b, "description", value, true);
    inf_buf_string(b, "\n<parameters>");
    json_object_foreach(json_object_get(parameters, "properties"), key, fields)
    {
        inf_buf_string(b, "\n<parameter>\n<name>");
        inf_buf_string(b, key);
        inf_buf_string(b, "</name>");
        if ((value = json_object_get(fields, "type")))
            element(b, "type", value, false);
        if ((value = json_object_get(fields, "description")))
            element(b, "description", value, true);
        extra_keys(b, fields, of_parameter);
        inf_buf_string(b, "\n</parameter>");
    }
    extra_keys(b, parameters, of_parameters);
    inf_buf_string(b, "\n</parameters>");
    extra_keys(b, function, of_function);
    inf_buf_string(b, "\n</function>");
}

static void coder_tools(struct inf_render *r)
{
    struct shm_text b = {0};
    size_t i;
    json_t *tool;
    inf_put(r, "\n\n# Tools\n\nYou have access to the following tools:\n\n<tools>");
    json_array_foreach(r->tools, i, tool) coder_tool(&b, json_object_get(tool, "function"));
    if (b.rc)
        inf_refuse(r, -b.rc, "no room for the tools; send fewer");
    else
        inf_put_from(r, (struct inf_slice){b.bytes, b.n});
    free(b.bytes);
    inf_put(
        r,
        "\n</tools>\n\nIf you choose to call a tool ONLY reply in the following format with NO "
        "suffix:\n\n<tool_call>\n"
        "<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nvalue_2\n</parameter>\n</function>\n</"
        "tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: the tool calling block MUST begin with an "
        "opening "
        "<tool_call> tag and end with a closing </tool_call> tag.\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function "
        "call, "
        "but NOT after\n- If there is no function call available, answer the question like normal with your "
        "current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>");
}

static void coder_call(struct inf_render *r, const struct inf_tool_call *call)
{
    const char *key;
    json_t *value, *arguments = inf_arguments(r, call);
    struct shm_text b = {0};
    inf_put(r, "\n<tool_call>\n<function=");
    inf_put_string(r, call->name);
    inf_put(r, ">\n");
    json_object_foreach(arguments, key, value)
    {
        b.n = 0;
        if (json_is_object(value) || json_is_array(value))
            inf_json_dump(&b, value, 0);
        else
            inf_json_str(&b, value);
        inf_put(r, "<parameter=");
        inf_put_string(r, key);
        inf_put(r, ">\n");
        inf_put_from(r, (struct inf_slice){b.bytes, b.n});
        inf_put(r, "\n</parameter>\n");
    }
    if (b.rc)
        inf_refuse(r, -b.rc, "no room for a call's arguments; shorten them");
    inf_put(r, "</function>\n</tool_call>");
    free(b.bytes);
    json_decref(arguments);
}

void inf_render_coder(struct inf_render *r)
{
    if (!need_messages(r))
        return;
    size_t from = inf_is(&r->messages[0], "system");
    if (from || r->tools)
        inf_put(r, START "system\n");
    if (from)
        inf_put_from(r, inf_content(&r->messages[0]));
    else if (r->tools)
        inf_put(r, "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks.");
    if (r->tools)
        coder_tools(r);
    if (from || r->tools)
        inf_put(r, END);
    for (size_t i = from; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (m->n_calls) {
            struct inf_slice content = inf_strip(inf_content(m));
            inf_put(r, START "assistant");
            if (content.n) {
                inf_put(r, "\n");
                inf_put_from(r, content);
                inf_put(r, "\n");
            }
            for (size_t k = 0; k < m->n_calls; k++)
                coder_call(r, &m->calls[k]);
            inf_put(r, END);
        } else if (inf_is(m, "tool")) {
            if (i > from && !inf_is(&r->messages[i - 1], "tool"))
                inf_put(r, START "user\n");
            inf_put(r, "<tool_response>\n");
            inf_put_from(r, inf_content(m));
            inf_put(r, "\n</tool_response>\n");
            if (i + 1 == r->n || !inf_is(&r->messages[i + 1], "tool"))
                inf_put(r, END);
        } else {
            plain(r, m);
        }
    }
    prompt(r);
}
