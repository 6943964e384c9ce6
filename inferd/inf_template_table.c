/* SPDX-License-Identifier: MIT */
/* Which families of chat templates there are, and by what marks a template's text is known as one of them. */
#include "inferd/inf_template.h"
#include "inferd/inf_template_priv.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define STOPS_QWEN                                                                                           \
    {                                                                                                        \
        "<|im_end|>", "<|endoftext|>",                                                                       \
    }
#define STOPS_LLAMA                                                                                          \
    {                                                                                                        \
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",                                                       \
    }
#define STOPS_MISTRAL                                                                                        \
    {                                                                                                        \
        "</s>",                                                                                              \
    }
#define STOPS_DEEPSEEK                                                                                       \
    {                                                                                                        \
        "<｜end▁of▁sentence｜>",                                                                             \
    }
#define STOPS_GLM                                                                                            \
    {                                                                                                        \
        "<|endoftext|>", "<|user|>", "<|observation|>",                                                      \
    }
#define QWEN_TOOLS "\"# Tools\\n\\nYou may call one or more functions"

/* The first row whose marks fit is taken: special ones stand before general ones. */
static const struct inf_template rows[] = {
    {"gpt-oss",
     {"<|start|>", "<|channel|>", "render_typescript_type", "!{%- if tool.description"},
     inf_render_harmony,
     0,
     INF_STYLE_HARMONY,
     true,
     true,
     {"<|return|>", "<|call|>"}},
    {"deepseek-v3.1",
     {"<｜Assistant｜>", "is_last_user", "!<think></think>", "!DSML"},
     inf_render_deepseek31,
     0,
     INF_STYLE_DEEPSEEK,
     false,
     true,
     STOPS_DEEPSEEK},
    {"deepseek-r1",
     {"<｜Assistant｜><think>\\n", "is_first_sp", "!is_last_user"},
     inf_render_deepseek,
     INF_DEEPSEEK_R1,
     INF_STYLE_DEEPSEEK,
     false,
     true,
     STOPS_DEEPSEEK},
    {"deepseek-r1-distill",
     {"<｜Assistant｜><think>\\n", "is_output_first", "!is_first_sp", "!flush_tool_outputs", "!tojson"},
     inf_render_deepseek,
     INF_DEEPSEEK_DISTILL,
     INF_STYLE_DEEPSEEK,
     false,
     true,
     STOPS_DEEPSEEK},
    {"deepseek-v3",
     {"{{'<｜Assistant｜>'}}{% endif %}", "is_first_sp", "!is_last_user"},
     inf_render_deepseek,
     INF_DEEPSEEK_V3,
     INF_STYLE_DEEPSEEK,
     false,
     true,
     STOPS_DEEPSEEK},
    {"glm4.7",
     {"[gMASK]<sop>", "{function-name}<arg_key>"},
     inf_render_glm45,
     INF_GLM_47,
     INF_STYLE_GLM,
     true,
     true,
     STOPS_GLM},
    {"glm4.5",
     {"[gMASK]<sop>", "{function-name}\n<arg_key>", "/nothink"},
     inf_render_glm45,
     INF_GLM_45,
     INF_STYLE_GLM,
     true,
     true,
     STOPS_GLM},
    {"glm4",
     {"[gMASK]<sop>", "item['metadata']", "!<think>"},
     inf_render_glm4,
     0,
     INF_STYLE_PLAIN,
     false,
     false,
     STOPS_GLM},
    {"mistral-small-3.2",
     {"[CALL_ID]", "You are Mistral Small 3, a Large", "on 2023-10-01.", "action at the moment.\""},
     inf_render_mistral_v13,
     0,
     INF_STYLE_MISTRAL,
     true,
     false,
     STOPS_MISTRAL},
    {"mistral-v7",
     {"[SYSTEM_PROMPT] ' + message", "'[INST] ' + message", "!tool"},
     inf_render_mistral,
     INF_MISTRAL_V7,
     INF_STYLE_PLAIN,
     false,
     false,
     STOPS_MISTRAL},
    {"mistral-nemo",
     {"[AVAILABLE_TOOLS][\"", "[INST]\" + system_message", "[TOOL_RESULTS]{"},
     inf_render_mistral,
     INF_MISTRAL_NEMO,
     INF_STYLE_MISTRAL,
     true,
     false,
     STOPS_MISTRAL},
    {"mistral-v3",
     {"[AVAILABLE_TOOLS] [\"", "[INST] \" + system_message", "[TOOL_RESULTS] {"},
     inf_render_mistral,
     INF_MISTRAL_V3,
     INF_STYLE_MISTRAL,
     true,
     false,
     STOPS_MISTRAL},
    {"mistral-v1",
     {"' [INST] ' + system_message", "!tool"},
     inf_render_mistral,
     INF_MISTRAL_V1,
     INF_STYLE_PLAIN,
     false,
     false,
     STOPS_MISTRAL},
    {"llama3.1",
     {"<|start_header_id|>", "tools_in_user_message", "builtin_tools", "26 Jul 2024", "!strftime_now"},
     inf_render_llama,
     INF_LLAMA_3_1,
     INF_STYLE_LLAMA,
     true,
     false,
     STOPS_LLAMA},
    {"llama3.2",
     {"<|start_header_id|>", "tools_in_user_message", "strftime_now(\"%d %b %Y\")", "!builtin_tools"},
     inf_render_llama,
     INF_LLAMA_3_2,
     INF_STYLE_LLAMA,
     true,
     false,
     STOPS_LLAMA},
    {"llama3",
     {"<|start_header_id|>' + message['role'] + '<|end_header_id|>", "| trim + '<|eot_id|>'",
      "loop.index0 == 0", "!raise_exception", "!tool"},
     inf_render_llama,
     INF_LLAMA_3,
     INF_STYLE_PLAIN,
     false,
     false,
     STOPS_LLAMA},
    {"qwen3-coder",
     {"<|im_start|>", "render_extra_keys", "<function=example_function_name>", "NO suffix", "!think"},
     inf_render_coder,
     0,
     INF_STYLE_CODER,
     true,
     false,
     STOPS_QWEN},
    {"qwen3-thinking",
     {"<|im_start|>", QWEN_TOOLS, "last_query_index", "assistant\\n<think>\\n' }}", "!enable_thinking"},
     inf_render_qwen3,
     INF_QWEN3_THINKING,
     INF_STYLE_QWEN,
     true,
     true,
     STOPS_QWEN},
    {"qwen3",
     {"<|im_start|>", QWEN_TOOLS, "last_query_index", "enable_thinking is false",
      "'<think>\\n\\n</think>\\n\\n'"},
     inf_render_qwen3,
     INF_QWEN3_HYBRID,
     INF_STYLE_QWEN,
     true,
     true,
     STOPS_QWEN},
    {"qwen3-instruct",
     {"<|im_start|>", QWEN_TOOLS, "(loop.first and content)", "!think", "!created by"},
     inf_render_qwen3,
     INF_QWEN3_INSTRUCT,
     INF_STYLE_QWEN,
     true,
     false,
     STOPS_QWEN},
    {"qwen2.5",
     {"<|im_start|>", "\"\\n\\n# Tools\\n\\nYou may call one or more functions",
      "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "!think"},
     inf_render_qwen25,
     0,
     INF_STYLE_QWEN,
     true,
     false,
     STOPS_QWEN},
    {"chatml",
     {"<|im_start|>' + message['role'] + '", "+ message['content'] + '<|im_end|>'", "!tool", "!think",
      "!You are", "!trim"},
     inf_render_chatml,
     0,
     INF_STYLE_PLAIN,
     false,
     false,
     STOPS_QWEN},
};

#define N_ROWS (sizeof rows / sizeof rows[0])

const char *inf_template_name(const struct inf_template *t)
{
    return t->name;
}

const char *inf_template_name_at(size_t i)
{
    return i < N_ROWS ? rows[i].name : NULL;
}

bool inf_template_has_tools(const struct inf_template *t)
{
    return t->tools;
}

bool inf_template_has_thinking(const struct inf_template *t)
{
    return t->thinking;
}

static bool fits(const struct inf_template *t, const char *text, size_t n)
{
    for (int i = 0; i < INF_MARKS && t->marks[i]; i++) {
        const char *mark = t->marks[i];
        bool wanted = mark[0] != '!';
        mark += !wanted;
        if ((memmem(text, n, mark, strlen(mark)) != NULL) != wanted)
            return false;
    }
    return true;
}

int inf_template_find(const char *template_text, size_t template_bytes, const char *name,
                      struct shm_error *err, const struct inf_template **ret_template)
{
    char known[400] = "";
    size_t used = 0;
    bool by_name = name && *name;
    for (size_t i = 0; i < N_ROWS; i++) {
        if (by_name ? strcmp(rows[i].name, name) == 0
                    : template_text && template_bytes && fits(&rows[i], template_text, template_bytes)) {
            *ret_template = &rows[i];
            return 0;
        }
        int n = snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", rows[i].name);
        used += (size_t)n < sizeof known - used ? (size_t)n : 0;
    }
    if (by_name)
        return shm_error_set(err, ENOTSUP, "chat template \"%.40s\" is not known; names are %s", name, known);
    if (!template_text || !template_bytes)
        return shm_error_set(
            err, ENOENT, "the model carries no chat template; pass --chat-template NAME, one of %s", known);
    return shm_error_set(
        err, ENOTSUP, "the model's chat template is of no known family; pass --chat-template NAME, one of %s",
        known);
}
