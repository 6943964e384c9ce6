/* SPDX-License-Identifier: MIT */
/* Llama 3, and the GLM families. */
#include "inferd/inf_template_priv.h"

#include <errno.h>

static void header(struct inf_render *r, const char *role)
{
    inf_put(r, "<|start_header_id|>");
    inf_put(r, role);
    inf_put(r, "<|end_header_id|>\n\n");
}

static void llama_message(struct inf_render *r, const struct inf_message *m)
{
    header(r, inf_is(m, "system") ? "system" : m->role);
    inf_put_from(r, inf_strip(inf_content(m)));
    inf_put(r, "<|eot_id|>");
}

static void llama_tools(struct inf_render *r)
{
    size_t i;
    json_t *tool;
    header(r, "user");
    inf_put(r, "Given the following functions, please respond with a JSON for a function call with its "
               "proper arguments "
               "that best answers the given prompt.\n\nRespond in the format {\"name\": function name, "
               "\"parameters\": "
               "dictionary of argument name and its value}.Do not use variables.\n\n");
    json_array_foreach(r->tools, i, tool)
    {
        inf_put_json(r, tool, 4);
        inf_put(r, "\n\n");
    }
}

static void llama_call(struct inf_render *r, const struct inf_message *m)
{
    if (m->n_calls != 1) {
        inf_refuse(r, EINVAL, "one call a message is all it takes; split the message");
        return;
    }
    json_t *arguments = inf_arguments(r, &m->calls[0]);
    if (!arguments)
        return;
    header(r, "assistant");
    inf_put(r, "{\"name\": \"");
    inf_put_string(r, m->calls[0].name);
    inf_put(r, "\", \"parameters\": ");
    inf_put_json(r, arguments, 0);
    inf_put(r, "}<|eot_id|>");
    json_decref(arguments);
}

static void llama_result(struct inf_render *r, const struct inf_message *m)
{
    struct inf_slice c = inf_content(m);
    json_t *text = json_stringn(c.at, c.n);
    header(r, "ipython");
    if (text)
        inf_put_json(r, text, 0);
    else
        inf_refuse(r, EINVAL, "a tool's result is not UTF-8; send text");
    inf_put(r, "<|eot_id|>");
    json_decref(text);
}

/* Its own system message comes first, with the date; the tools stand in the first user message. */
static size_t llama_opening(struct inf_render *r)
{
    size_t i = 0;
    if (!r->n) {
        inf_refuse(r, EINVAL, "there is no message; send at least one");
        return 0;
    }
    header(r, "system");
    if (r->tools)
        inf_put(r, "Environment: ipython\n");
    inf_put(r, "Cutting Knowledge Date: December 2023\nToday Date: ");
    if (r->template->variant == INF_LLAMA_3_1)
        inf_put(r, "26 Jul 2024");
    else
        inf_put_date(r, true);
    inf_put(r, "\n\n");
    if (inf_is(&r->messages[0], "system"))
        inf_put_from(r, inf_strip(inf_content(&r->messages[i++])));
    inf_put(r, "<|eot_id|>");
    if (!r->tools)
        return i;
    if (i == r->n) {
        inf_refuse(r, EINVAL, "tools go into the first user message, and there is none; send one");
        return i;
    }
    llama_tools(r);
    inf_put_from(r, inf_strip(inf_content(&r->messages[i])));
    inf_put(r, "<|eot_id|>");
    return i + 1;
}

void inf_render_llama(struct inf_render *r)
{
    bool first = r->template->variant == INF_LLAMA_3;
    if (!first || r->n)
        inf_put(r, "<|begin_of_text|>");
    for (size_t i = first ? 0 : llama_opening(r); i < r->n && !r->rc; i++) {
        const struct inf_message *m = &r->messages[i];
        if (first || (!m->n_calls && !inf_is(m, "tool")))
            llama_message(r, m);
        else if (m->n_calls)
            llama_call(r, m);
        else
            llama_result(r, m);
    }
    if (r->in->add_generation_prompt)
        header(r, "assistant");
}

void inf_render_glm4(struct inf_render *r)
{
    inf_put(r, "[gMASK]<sop>");
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (!inf_content(m).n)
            continue;
        inf_put(r, "<|");
        inf_put(r, inf_is(m, "system") ? "system" : m->role);
        inf_put(r, "|>\n");
        inf_put_from(r, inf_content(m));
    }
    if (r->in->add_generation_prompt)
        inf_put(r, "<|assistant|>\n");
}

static void glm_tools(struct inf_render *r, const char *line)
{
    size_t i;
    json_t *tool;
    inf_put(
        r,
        "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
        "provided with function signatures within <tools></tools> XML tags:\n<tools>\n");
    json_array_foreach(r->tools, i, tool)
    {
        inf_put_json(r, tool, 0);
        inf_put(r, "\n");
    }
    inf_put(
        r,
        "</tools>\n\nFor each function call, output the function name and arguments within the following XML "
        "format:\n<tool_call>{function-name}");
    inf_put(r, line);
    for (int k = 1; k <= 2; k++) {
        inf_put(r, k == 1 ? "<arg_key>{arg-key-1}</arg_key>" : "<arg_key>{arg-key-2}</arg_key>");
        inf_put(r, line);
        inf_put(r, k == 1 ? "<arg_value>{arg-value-1}</arg_value>" : "<arg_value>{arg-value-2}</arg_value>");
        inf_put(r, line);
    }
    inf_put(r, "...");
    inf_put(r, line);
    inf_put(r, "</tool_call>");
}

static void glm_call(struct inf_render *r, const struct inf_tool_call *call, const char *line)
{
    const char *key;
    json_t *value, *arguments = inf_arguments(r, call);
    inf_put(r, line);
    inf_put(r, "<tool_call>");
    inf_put_string(r, call->name);
    inf_put(r, line);
    json_object_foreach(arguments, key, value)
    {
        inf_put(r, "<arg_key>");
        inf_put_string(r, key);
        inf_put(r, "</arg_key>");
        inf_put(r, line);
        inf_put(r, "<arg_value>");
        if (json_is_string(value))
            inf_put_from(r, (struct inf_slice){json_string_value(value), json_string_length(value)});
        else
            inf_put_json(r, value, 0);
        inf_put(r, "</arg_value>");
        inf_put(r, line);
    }
    inf_put(r, "</tool_call>");
    json_decref(arguments);
}

static void glm_answer(struct inf_render *r, const struct inf_message *m, bool current, const char *line)
{
    struct inf_slice content, reasoning;
    inf_split_thinking(m, &content, &reasoning);
    inf_put(r, "<|assistant|>");
    inf_put(r, line);
    if (current && reasoning.n) {
        inf_put(r, "<think>");
        inf_put_from(r, inf_strip(reasoning));
    } else if (*line) {
        inf_put(r, "<think>");
    }
    inf_put(r, "</think>");
    content = inf_strip(content);
    if (content.n)
        inf_put(r, line);
    inf_put_from(r, content);
    for (size_t k = 0; k < m->n_calls; k++)
        glm_call(r, &m->calls[k], line);
}

/* 4.5 puts each thing on a line of its own, 4.7 nothing between. */
void inf_render_glm45(struct inf_render *r)
{
    bool old = r->template->variant == INF_GLM_45, off = r->in->thinking == INF_THINKING_OFF;
    const char *line = old ? "\n" : "";
    size_t last_user = 0; /* + 1 */
    for (size_t i = 0; i < r->n; i++)
        if (inf_is(&r->messages[i], "user"))
            last_user = i + 1;
    inf_put(r, "[gMASK]<sop>");
    if (r->tools)
        glm_tools(r, line);
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "assistant")) {
            glm_answer(r, m, i >= last_user, line);
        } else if (inf_is(m, "tool")) {
            if (i == 0 || !inf_is(&r->messages[i - 1], "tool"))
                inf_put(r, "<|observation|>");
            inf_put(r, line);
            inf_put(r, "<tool_response>");
            inf_put(r, line);
            inf_put_from(r, inf_content(m));
            inf_put(r, line);
            inf_put(r, "</tool_response>");
        } else {
            inf_put(r, inf_is(m, "user") ? "<|user|>" : "<|system|>");
            inf_put(r, line);
            inf_put_from(r, inf_content(m));
            if (old && off && inf_is(m, "user") && !inf_ends(inf_content(m), "/nothink"))
                inf_put(r, "/nothink");
        }
    }
    if (!r->in->add_generation_prompt)
        return;
    inf_put(r, "<|assistant|>");
    if (!old)
        inf_put(r, off ? "</think>" : "<think>");
    else if (off)
        inf_put(r, "\n<think></think>");
}
