/* SPDX-License-Identifier: MIT */
/* gpt-oss ("harmony"): channels, and tools described as TypeScript. */
#include "inferd/inf_template_priv.h"

#include <errno.h>
#include <stdlib.h>

#define DEPTH_MAX 64
#define LONG_TYPE 50 /* characters; a longer element type of an array becomes any */

static bool is_one_of(const json_t *list, const char *name)
{
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)list, i, item)
    {
        if (json_is_string(item) && strcmp(json_string_value(item), name) == 0)
            return true;
    }
    return false;
}

static void joined(struct shm_text *b, const json_t *list, const char *between)
{
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)list, i, item)
    {
        if (i)
            inf_buf_string(b, between);
        inf_json_str(b, item);
    }
}

static void write_type(struct shm_text *b, const json_t *spec, int depth);

static void write_array(struct shm_text *b, const json_t *spec, int depth)
{
    const json_t *items = json_object_get(spec, "items");
    const json_t *type = json_object_get(items, "type");
    const char *name = json_is_string(type) ? json_string_value(type) : "";
    if (!inf_json_true(items)) {
        inf_buf_string(b, "any[]");
    } else if (strcmp(name, "string") == 0 || strcmp(name, "number") == 0 || strcmp(name, "boolean") == 0) {
        inf_buf_string(b, name);
        inf_buf_string(b, "[]");
    } else if (strcmp(name, "integer") == 0) {
        inf_buf_string(b, "number[]");
    } else {
        struct shm_text inner = {0};
        size_t chars = 0;
        write_type(&inner, items, depth + 1);
        for (size_t i = 0; i < inner.n; i++)
            chars += ((unsigned char)inner.bytes[i] & 0xC0) != 0x80;
        if (inner.rc)
            b->rc = inner.rc;
        else if (chars > LONG_TYPE || (inner.n && strcmp(inner.bytes, "object | object") == 0))
            inf_buf_string(b, "any");
        else
            inf_buf_put(b, inner.bytes ? inner.bytes : "", inner.n);
        inf_buf_string(b, "[]");
        free(inner.bytes);
    }
    if (inf_json_true(json_object_get(spec, "nullable")))
        inf_buf_string(b, " | null");
}

static void write_object(struct shm_text *b, const json_t *spec, int depth)
{
    const json_t *properties = json_object_get(spec, "properties");
    const char *key;
    json_t *value;
    size_t i = 0;
    if (!inf_json_true(properties)) {
        inf_buf_string(b, "object");
        return;
    }
    inf_buf_string(b, "{\n");
    json_object_foreach((json_t *)properties, key, value)
    {
        inf_buf_string(b, i++ ? ", " : "");
        inf_buf_string(b, key);
        if (!is_one_of(json_object_get(spec, "required"), key))
            inf_buf_string(b, "?");
        inf_buf_string(b, ": \n                ");
        write_type(b, value, depth + 1);
    }
    inf_buf_string(b, "}");
}

static void write_union(struct shm_text *b, const json_t *variants, int depth)
{
    size_t i;
    json_t *variant;
    const json_t *value;
    json_array_foreach((json_t *)variants, i, variant)
    {
        inf_buf_string(b, i ? " | \n" : "");
        write_type(b, variant, depth + 1);
        if (inf_json_true(value = json_object_get(variant, "description"))) {
            inf_buf_string(b, "// ");
            inf_json_str(b, value);
        }
        if ((value = json_object_get(variant, "default"))) {
            inf_buf_string(b, "                    // default: ");
            inf_json_dump(b, value, 0);
        }
    }
}

static void write_type(struct shm_text *b, const json_t *spec, int depth)
{
    const json_t *type = json_object_get(spec, "type"), *value;
    const char *name = json_is_string(type) ? json_string_value(type) : "";
    if (depth > DEPTH_MAX) {
        b->rc = b->rc ? b->rc : -E2BIG;
    } else if (strcmp(name, "array") == 0) {
        write_array(b, spec, depth);
    } else if (json_is_array(type) && json_array_size(type)) {
        joined(b, type, " | ");
    } else if (inf_json_true(value = json_object_get(spec, "oneOf"))) {
        write_union(b, value, depth);
    } else if (strcmp(name, "string") == 0) {
        if (inf_json_true(value = json_object_get(spec, "enum"))) {
            inf_buf_string(b, "\"");
            joined(b, value, "\" | \"");
            inf_buf_string(b, "\"");
        } else {
            inf_buf_string(b, "string");
            if (inf_json_true(json_object_get(spec, "nullable")))
                inf_buf_string(b, " | null");
        }
    } else if (strcmp(name, "number") == 0 || strcmp(name, "integer") == 0) {
        inf_buf_string(b, "number");
    } else if (strcmp(name, "boolean") == 0) {
        inf_buf_string(b, "boolean");
    } else if (strcmp(name, "object") == 0) {
        write_object(b, spec, depth);
    } else {
        inf_buf_string(b, "any");
    }
}

static void write_default(struct shm_text *b, const json_t *spec)
{
    const json_t *value = json_object_get(spec, "default");
    bool choice = inf_json_true(json_object_get(spec, "enum")),
         either = inf_json_true(json_object_get(spec, "oneOf"));
    if (!value)
        return;
    inf_buf_string(b, !choice && either ? "// default: " : ", // default: ");
    if (choice || either)
        inf_json_str(b, value);
    else
        inf_json_dump(b, value, 0);
}

static void write_tool(struct shm_text *b, const json_t *function)
{
    const json_t *parameters = json_object_get(function, "parameters"), *value;
    const json_t *properties = json_object_get(parameters, "properties");
    const char *key;
    json_t *spec;
    if ((value = json_object_get(function, "description"))) {
        inf_buf_string(b, "// ");
        inf_json_str(b, value);
        inf_buf_string(b, "\n");
    }
    inf_buf_string(b, "type ");
    inf_json_str(b, json_object_get(function, "name"));
    if (!inf_json_true(properties)) {
        inf_buf_string(b, " = () => any;\n\n");
        return;
    }
    inf_buf_string(b, " = (_: {\n");
    json_object_foreach((json_t *)properties, key, spec)
    {
        if (inf_json_true(value = json_object_get(spec, "description"))) {
            inf_buf_string(b, "// ");
            inf_json_str(b, value);
            inf_buf_string(b, "\n");
        }
        inf_buf_string(b, key);
        if (!is_one_of(json_object_get(parameters, "required"), key))
            inf_buf_string(b, "?");
        inf_buf_string(b, ": ");
        write_type(b, spec, 0);
        write_default(b, spec);
        inf_buf_string(b, ",\n");
    }
    inf_buf_string(b, "}) => any;\n\n");
}

static void tools(struct inf_render *r)
{
    struct shm_text b = {0};
    size_t i;
    json_t *tool;
    inf_put(r, "# Tools\n\n## functions\n\nnamespace functions {\n\n");
    json_array_foreach(r->tools, i, tool) write_tool(&b, json_object_get(tool, "function"));
    if (b.rc)
        inf_refuse(r, -b.rc, "the tools are nested over %d deep or too large; simplify them", DEPTH_MAX);
    else
        inf_put_from(r, (struct inf_slice){b.bytes, b.n});
    inf_put(r, "} // namespace functions");
    free(b.bytes);
}

static bool forged(struct inf_slice s)
{
    return inf_has(s, "<|channel|>analysis<|message|>") || inf_has(s, "<|channel|>final<|message|>");
}

/* Reasoning is shown again only while the tools it led to are at work: until a later final answer. */
static void tool_call(struct inf_render *r, size_t i, const char **last_call)
{
    const struct inf_message *m = &r->messages[i];
    struct inf_slice content = inf_content(m),
                     reasoning = {m->reasoning, m->reasoning ? m->reasoning_bytes : 0};
    bool answered = false;
    for (size_t k = i + 1; k < r->n; k++)
        answered |= inf_is(&r->messages[k], "assistant") && !r->messages[k].n_calls;
    json_t *arguments = inf_arguments(r, &m->calls[0]);
    if (!arguments)
        return;
    if ((content.n || reasoning.n) && !answered) {
        inf_put(r, "<|start|>assistant<|channel|>analysis<|message|>");
        inf_put_from(r, reasoning.n ? reasoning : content);
        inf_put(r, "<|end|>");
    }
    if (content.n && reasoning.n) { /* the published template refuses; the format has a place for it */
        inf_put(r, "<|start|>assistant<|channel|>commentary<|message|>");
        inf_put_from(r, content);
        inf_put(r, "<|end|>");
    }
    inf_put(r, "<|start|>assistant to=functions.");
    inf_put_string(r, m->calls[0].name);
    inf_put(r, "<|channel|>commentary json<|message|>");
    inf_put_json(r, arguments, 0);
    inf_put(r, "<|call|>");
    *last_call = m->calls[0].name;
    json_decref(arguments);
}

static void answer(struct inf_render *r, size_t i)
{
    const struct inf_message *m = &r->messages[i];
    bool training = i + 1 == r->n && !r->in->add_generation_prompt;
    if (training && m->reasoning) {
        inf_put(r, "<|start|>assistant<|channel|>analysis<|message|>");
        inf_put_from(r, (struct inf_slice){m->reasoning, m->reasoning_bytes});
        inf_put(r, "<|end|>");
    }
    inf_put(r, "<|start|>assistant<|channel|>final<|message|>");
    inf_put_from(r, inf_content(m));
    inf_put(r, training ? "<|return|>" : "<|end|>");
}

static void tool_result(struct inf_render *r, const struct inf_message *m, const char *last_call)
{
    struct inf_slice c = inf_content(m);
    json_t *text = json_stringn(c.at, c.n);
    if (!last_call)
        inf_refuse(r, EINVAL, "a tool's result has no call before it; send the call, too");
    else if (!text)
        inf_refuse(r, EINVAL, "a tool's result is not UTF-8; send text");
    if (!r->rc) {
        inf_put(r, "<|start|>functions.");
        inf_put_string(r, last_call);
        inf_put(r, " to=assistant<|channel|>commentary<|message|>");
        inf_put_json(r, text, 0);
        inf_put(r, "<|end|>");
    }
    json_decref(text);
}

static void opening(struct inf_render *r)
{
    const char *effort = r->in->effort ? r->in->effort : "medium";
    if (strcmp(effort, "low") && strcmp(effort, "medium") && strcmp(effort, "high")) {
        inf_refuse(r, EINVAL, "reasoning effort \"%.20s\" is not known; take low, medium or high", effort);
        return;
    }
    inf_put(r, "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
               "Knowledge cutoff: 2024-06\nCurrent date: ");
    inf_put_date(r, false);
    inf_put(r, "\n\nReasoning: ");
    inf_put(r, effort);
    inf_put(r,
            "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.");
    if (r->tools)
        inf_put(r, "\nCalls to these tools must go to the commentary channel: 'functions'.");
    inf_put(r, "<|end|>");
}

void inf_render_harmony(struct inf_render *r)
{
    struct inf_slice developer = {"", 0};
    const char *last_call = NULL;
    if (!r->n) {
        inf_refuse(r, EINVAL, "there is no message; send at least one");
        return;
    }
    opening(r);
    if (inf_is(&r->messages[0], "system")) {
        developer = inf_content(&r->messages[0]);
        r->messages++;
        r->n--;
    }
    if (developer.n || r->tools) {
        inf_put(r, "<|start|>developer<|message|>");
        if (developer.n) {
            inf_put(r, "# Instructions\n\n");
            inf_put_from(r, developer);
            inf_put(r, "\n\n");
        }
        if (r->tools)
            tools(r);
        inf_put(r, "<|end|>");
    }
    for (size_t i = 0; i < r->n && !r->rc; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "tool")) {
            tool_result(r, m, last_call);
        } else if (inf_is(m, "user")) {
            inf_put(r, "<|start|>user<|message|>");
            inf_put_from(r, inf_content(m));
            inf_put(r, "<|end|>");
        } else if (inf_is(m, "assistant")) {
            if (forged(inf_content(m)) ||
                forged((struct inf_slice){m->reasoning, m->reasoning ? m->reasoning_bytes : 0}))
                inf_refuse(r, EINVAL,
                           "message holds channel marks; send the reasoning and the answer by themselves");
            else if (m->n_calls)
                tool_call(r, i, &last_call);
            else {
                answer(r, i);
                if (i + 1 < r->n || r->in->add_generation_prompt)
                    last_call = NULL;
            }
        }
    }
    if (r->in->add_generation_prompt)
        inf_put(r, "<|start|>assistant");
}
