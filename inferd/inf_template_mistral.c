/* SPDX-License-Identifier: MIT */
/* Mistral's templates, and DeepSeek's. */
#include "inferd/inf_template_priv.h"

#include <errno.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define CALL_ID_CHARS 9

/* The id of a call: 9 characters, as the models were trained on. Another id, as
 * the HTTP clients have them, is written as 9 characters that follow from it,
 * the same for a call and its result. */
static void put_id(struct inf_render *r, const char *before, const char *id)
{
    size_t chars = 0;
    for (const char *p = id; p && *p; p++)
        chars += ((unsigned char)*p & 0xC0) != 0x80;
    if (!chars) {
        inf_refuse(r, EINVAL, "a tool call or its result has no id; send one");
        return;
    }
    inf_put(r, before);
    if (chars == CALL_ID_CHARS) {
        inf_put_string(r, id);
        return;
    }
    char nine[CALL_ID_CHARS + 1] = "";
    uint64_t hash = XXH3_64bits(id, strlen(id));
    for (int i = 0; i < CALL_ID_CHARS; i++, hash /= 36)
        nine[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[hash % 36];
    inf_put_string(r, nine);
}

/* Users and assistants take turns, calls and results aside. */
static void check_turns(struct inf_render *r, bool count_calls)
{
    size_t turn = 0;
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (!count_calls && (inf_is(m, "tool") || m->n_calls))
            continue;
        if (inf_is(m, "user") != (turn++ % 2 == 0)) {
            inf_refuse(r, EINVAL,
                       "behind the system message, user and assistant must take turns; merge messages");
            return;
        }
    }
}

/* Written by hand, so that strings are not escaped. */
static void described_tools(struct inf_render *r, const char *space)
{
    size_t i, n;
    json_t *tool, *value;
    const char *key;
    inf_put(r, "[AVAILABLE_TOOLS]");
    inf_put(r, space);
    inf_put(r, "[");
    json_array_foreach(r->tools, i, tool)
    {
        inf_put(r, i ? ", {\"type\": \"function\", \"function\": {"
                     : "{\"type\": \"function\", \"function\": {");
        n = 0;
        json_object_foreach(json_object_get(tool, "function"), key, value)
        {
            if (strcmp(key, "return") == 0)
                continue;
            inf_put(r, n++ ? ", \"" : "\"");
            inf_put_string(r, key);
            if (json_is_string(value)) {
                inf_put(r, "\": \"");
                inf_put_from(r, (struct inf_slice){json_string_value(value), json_string_length(value)});
                inf_put(r, "\"");
            } else {
                inf_put(r, "\": ");
                inf_put_json(r, value, 0);
            }
        }
        inf_put(r, "}}");
    }
    inf_put(r, "][/AVAILABLE_TOOLS]");
}

static void call_list(struct inf_render *r, const struct inf_message *m, const char *space)
{
    inf_put(r, "[TOOL_CALLS]");
    inf_put(r, space);
    inf_put(r, "[");
    for (size_t k = 0; k < m->n_calls; k++) {
        json_t *arguments = inf_arguments(r, &m->calls[k]);
        json_t *name = json_string(m->calls[k].name);
        if (name && arguments) {
            inf_put(r, k ? ", {\"name\": " : "{\"name\": ");
            inf_put_json(r, name, 0);
            inf_put(r, ", \"arguments\": ");
            inf_put_json(r, arguments, 0);
            put_id(r, ", \"id\": \"", m->calls[k].id);
            inf_put(r, "\"}");
        } else {
            inf_refuse(r, EINVAL, "the name of a call is not UTF-8; send text");
        }
        json_decref(name);
        json_decref(arguments);
    }
    inf_put(r, "]</s>");
}

static void tool_result(struct inf_render *r, const struct inf_message *m, const char *space)
{
    inf_put(r, "[TOOL_RESULTS]");
    inf_put(r, space);
    inf_put(r, "{\"content\": ");
    inf_put_from(r, inf_content(m));
    put_id(r, ", \"call_id\": \"", m->tool_call_id);
    inf_put(r, "\"}[/TOOL_RESULTS]");
}

/* Content of the last user message. */
static struct inf_slice last_user(const struct inf_render *r)
{
    for (size_t i = r->n; i-- > 0;)
        if (inf_is(&r->messages[i], "user"))
            return inf_content(&r->messages[i]);
    return (struct inf_slice){"", 0};
}

static void v7(struct inf_render *r)
{
    inf_put(r, "<s>");
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "tool")) {
            inf_refuse(r, EINVAL, "takes messages of user, system and assistant only; leave tools out");
            return;
        }
        inf_put(r, inf_is(m, "user") ? "[INST] " : inf_is(m, "system") ? "[SYSTEM_PROMPT] " : " ");
        inf_put_from(r, inf_content(m));
        inf_put(r, inf_is(m, "user") ? "[/INST]" : inf_is(m, "system") ? "[/SYSTEM_PROMPT]" : "</s>");
    }
}

/* v1 puts the system message into the first user message, v3 into the last one, if that ends the talk. */
void inf_render_mistral(struct inf_render *r)
{
    int variant = r->template->variant;
    bool v1 = variant == INF_MISTRAL_V1;
    const char *space = variant == INF_MISTRAL_NEMO ? "" : " ";
    const struct inf_message *system = NULL;
    if (variant == INF_MISTRAL_V7) {
        v7(r);
        return;
    }
    if (!r->n) {
        inf_refuse(r, EINVAL, "there is no message; send at least one");
        return;
    }
    if (inf_is(&r->messages[0], "system")) {
        system = r->messages++;
        r->n--;
    }
    check_turns(r, v1);
    inf_put(r, "<s>");
    struct inf_slice last = last_user(r);
    for (size_t i = 0; i < r->n && !r->rc; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "user")) {
            if (r->tools && inf_same(inf_content(m), last))
                described_tools(r, space);
            if (v1)
                inf_put(r, " ");
            inf_put(r, "[INST]");
            inf_put(r, space);
            if (system && (v1 ? i == 0 : i + 1 == r->n)) {
                inf_put_from(r, inf_content(system));
                inf_put(r, "\n\n");
            }
            inf_put_from(r, inf_content(m));
            inf_put(r, v1 ? " [/INST]" : "[/INST]");
        } else if (m->n_calls) {
            call_list(r, m, space);
        } else if (inf_is(m, "assistant")) {
            inf_put(r, space);
            inf_put_from(r, variant == INF_MISTRAL_V3 ? inf_strip(inf_content(m)) : inf_content(m));
            inf_put(r, "</s>");
        } else if (inf_is(m, "tool")) {
            tool_result(r, m, space);
        } else {
            inf_refuse(r, EINVAL, "a system message must be the first message; move it there");
        }
    }
}

static void small_default(struct inf_render *r)
{
    inf_put(
        r,
        "You are Mistral Small 3, a Large Language Model (LLM) created by Mistral AI, a French startup "
        "headquartered in Paris.\nYour knowledge base was last updated on 2023-10-01. The current date is ");
    inf_put_date(r, false);
    inf_put(r,
            ".\n\nWhen you're not sure about some information or when the user's request requires up-to-date "
            "or specific "
            "data, you must use the available tools to fetch the information. Do not hesitate to use tools "
            "whenever they "
            "can provide a more accurate or complete response. If no relevant tools are available, then "
            "clearly state "
            "that you don't have the information and avoid making up anything.\n\nIf the user's question is "
            "not clear, "
            "ambiguous, or does not provide enough context for you to accurately answer the question, you do "
            "not try to "
            "answer it right away and you rather ask the user to clarify their request (e.g. \"What are some "
            "good "
            "restaurants around me?\" => \"Where are you?\" or \"When is the next flight to Tokyo\" => "
            "\"Where do you "
            "travel from?\").\nYou are always very attentive to dates, and when asked about information at "
            "specific "
            "dates, you discard information that is at another date.\nYou follow these instructions in all "
            "languages, "
            "and always respond to the user in the language they use or request.\nNext sections describe the "
            "capabilities that you have.\n\n# WEB BROWSING INSTRUCTIONS\n\nYou cannot perform any web search "
            "or access "
            "internet to open URLs, links etc. If it seems like the user is expecting you to do so, you "
            "clarify the "
            "situation and ask the user to copy paste the text directly in the chat.\n\n# MULTI-MODAL "
            "INSTRUCTIONS\n\n"
            "You have the ability to read images, but you cannot generate images. You also cannot transcribe "
            "audio files "
            "or videos.\nYou cannot read nor transcribe audio files or videos.\n\n# TOOL CALLING "
            "INSTRUCTIONS\n\nYou may "
            "have access to tools that you can use to fetch information or perform actions. You must use "
            "these tools in "
            "the following situations:\n\n1. When the request requires up-to-date information.\n2. When the "
            "request "
            "requires specific data that you do not have in your knowledge base.\n3. When the request "
            "involves actions "
            "that you cannot perform without tools.\n\nAlways prioritize using tools to provide the most "
            "accurate and "
            "helpful response. If tools are not available, inform the user that you cannot perform the "
            "requested action "
            "at the moment.");
}

static void small_calls(struct inf_render *r, const struct inf_message *m)
{
    for (size_t k = 0; k < m->n_calls; k++) {
        json_t *arguments = inf_arguments(r, &m->calls[k]);
        if (arguments) {
            inf_put(r, "[TOOL_CALLS]");
            inf_put_string(r, m->calls[k].name);
            put_id(r, "[CALL_ID]", m->calls[k].id);
            inf_put(r, "[ARGS]");
            inf_put_json(r, arguments, 0);
        }
        json_decref(arguments);
    }
}

void inf_render_mistral_v13(struct inf_render *r)
{
    inf_put(r, "<s>[SYSTEM_PROMPT]");
    if (r->n && inf_is(&r->messages[0], "system")) {
        inf_put_from(r, inf_content(&r->messages[0]));
        r->messages++;
        r->n--;
    } else {
        small_default(r);
    }
    inf_put(r, "[/SYSTEM_PROMPT]");
    check_turns(r, false);
    struct inf_slice last = last_user(r);
    for (size_t i = 0; i < r->n && !r->rc; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "user")) {
            if (r->tools && inf_same(inf_content(m), last)) {
                inf_put(r, "[AVAILABLE_TOOLS]");
                inf_put_json(r, r->tools, 0);
                inf_put(r, "[/AVAILABLE_TOOLS]");
            }
            inf_put(r, "[INST]");
            inf_put_from(r, inf_content(m));
            inf_put(r, "[/INST]");
        } else if (inf_is(m, "system")) {
            inf_put(r, "[SYSTEM_PROMPT]");
            inf_put_from(r, inf_content(m));
            inf_put(r, "[/SYSTEM_PROMPT]");
        } else if (inf_is(m, "tool")) {
            put_id(r, "[TOOL_RESULTS]", m->tool_call_id);
            inf_put(r, "[TOOL_CONTENT]");
            inf_put_from(r, inf_content(m));
            inf_put(r, "[/TOOL_RESULTS]");
        } else {
            if (m->n_calls)
                small_calls(r, m);
            else
                inf_put_from(r, inf_content(m));
            inf_put(r, "</s>");
        }
    }
}

#define BOS        "<｜begin▁of▁sentence｜>"
#define EOS        "<｜end▁of▁sentence｜>"
#define ASSISTANT  "<｜Assistant｜>"
#define CALL_BEGIN "<｜tool▁call▁begin｜>"
#define CALL_END   "<｜tool▁call▁end｜>"
#define CALLS_END  "<｜tool▁calls▁end｜>"

/* The system messages, wherever they stand, come first. The distilled models take the last one only. */
static void deepseek_system(struct inf_render *r, bool all)
{
    const struct inf_message *last = NULL;
    size_t n = 0;
    inf_put(r, BOS);
    for (size_t i = 0; i < r->n; i++) {
        if (!inf_is(&r->messages[i], "system"))
            continue;
        last = &r->messages[i];
        if (all) {
            inf_put(r, n++ ? "\n\n" : "");
            inf_put_from(r, inf_content(last));
        }
    }
    if (last && !all)
        inf_put_from(r, inf_content(last));
}

/* The list's opening is written once a conversation, as the published template has it. */
static void deepseek_calls(struct inf_render *r, const struct inf_message *m, bool *opened)
{
    bool distill = r->template->variant == INF_DEEPSEEK_DISTILL;
    for (size_t k = 0; k < m->n_calls; k++) {
        bool first = !*opened;
        if (first) {
            inf_put(r, ASSISTANT);
            inf_put_from(r, inf_content(m));
        }
        inf_put(r, first ? "<｜tool▁calls▁begin｜>" CALL_BEGIN : "\n" CALL_BEGIN);
        inf_put(r, "function<｜tool▁sep｜>");
        inf_put_string(r, m->calls[k].name);
        inf_put(r, "\n```json\n");
        inf_put_string(r, m->calls[k].arguments);
        inf_put(r, "\n```" CALL_END);
        if (distill && !first)
            inf_put(r, CALLS_END EOS);
        *opened = true;
    }
    if (!distill)
        inf_put(r, CALLS_END EOS);
}

void inf_render_deepseek(struct inf_render *r)
{
    bool distill = r->template->variant == INF_DEEPSEEK_DISTILL;
    bool opened = false, in_tool = false, first_output = true;
    deepseek_system(r, !distill);
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "user")) {
            in_tool = false;
            inf_put(r, "<｜User｜>");
            inf_put_from(r, inf_content(m));
        } else if (inf_is(m, "tool")) {
            in_tool = true;
            inf_put(r, first_output ? "<｜tool▁outputs▁begin｜>" : distill ? "\n" : "");
            first_output = false;
            inf_put(r, "<｜tool▁output▁begin｜>");
            inf_put_from(r, inf_content(m));
            inf_put(r, "<｜tool▁output▁end｜>");
        } else if (inf_is(m, "assistant") && (distill ? !m->content : m->n_calls > 0)) {
            in_tool = false;
            deepseek_calls(r, m, &opened);
        } else if (inf_is(m, "assistant")) {
            inf_put(r, in_tool ? "<｜tool▁outputs▁end｜>" : ASSISTANT);
            inf_put_from(r, in_tool ? inf_content(m) : inf_after_last(inf_content(m), "</think>"));
            inf_put(r, EOS);
            in_tool = false;
        }
    }
    if (in_tool)
        inf_put(r, "<｜tool▁outputs▁end｜>");
    else if (r->in->add_generation_prompt)
        inf_put(r, r->template->variant == INF_DEEPSEEK_V3 ? ASSISTANT : ASSISTANT "<think>\n");
}

void inf_render_deepseek31(struct inf_render *r)
{
    bool after_user = false, in_tool = false;
    deepseek_system(r, true);
    for (size_t i = 0; i < r->n; i++) {
        const struct inf_message *m = &r->messages[i];
        if (inf_is(m, "user")) {
            in_tool = false;
            after_user = true;
            inf_put(r, "<｜User｜>");
            inf_put_from(r, inf_content(m));
        } else if (inf_is(m, "tool")) {
            after_user = false;
            in_tool = true;
            inf_put(r, "<｜tool▁output▁begin｜>");
            inf_put_from(r, inf_content(m));
            inf_put(r, "<｜tool▁output▁end｜>");
        } else if (inf_is(m, "assistant")) {
            if (after_user)
                inf_put(r, ASSISTANT "</think>");
            after_user = false;
            if (!m->n_calls) {
                inf_put_from(r, in_tool ? inf_content(m) : inf_after_first(inf_content(m), "</think>"));
            } else {
                inf_put_from(r, inf_content(m));
                inf_put(r, "<｜tool▁calls▁begin｜>");
                for (size_t k = 0; k < m->n_calls; k++) {
                    inf_put(r, CALL_BEGIN);
                    inf_put_string(r, m->calls[k].name);
                    inf_put(r, "<｜tool▁sep｜>");
                    inf_put_string(r, m->calls[k].arguments);
                    inf_put(r, CALL_END);
                }
                inf_put(r, CALLS_END);
            }
            inf_put(r, EOS);
            in_tool = false;
        }
    }
    if (r->in->add_generation_prompt && after_user && !in_tool)
        inf_put(r, r->in->thinking == INF_THINKING_ON ? ASSISTANT "<think>" : ASSISTANT "</think>");
}
