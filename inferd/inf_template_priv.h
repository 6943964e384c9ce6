/* SPDX-License-Identifier: MIT */
/*
 * Inside of the chat templates: what a family is (struct inf_template), and
 * what its renderer writes with. Errors are sticky: after the first one
 * nothing more is written, so renderers need not look at each call. Nobody
 * else includes it.
 */
#ifndef INF_TEMPLATE_PRIV_H
#define INF_TEMPLATE_PRIV_H

#include "inferd/inf_template.h"
#include "shm/shm_text.h"

#include <jansson.h>
#include <string.h>

struct inf_slice {
    const char *at;
    size_t n;
};

/* How answers of a family are written (inf_parser.c). */
enum inf_style {
    INF_STYLE_PLAIN,
    INF_STYLE_QWEN,     /* <think>, <tool_call>{json}</tool_call> */
    INF_STYLE_CODER,    /* <tool_call><function=F><parameter=P> */
    INF_STYLE_LLAMA,    /* the whole answer is {"name":, "parameters":} */
    INF_STYLE_MISTRAL,  /* [TOOL_CALLS][{json}, ...] or [TOOL_CALLS]F[CALL_ID]I[ARGS]{json} */
    INF_STYLE_HARMONY,  /* channels */
    INF_STYLE_DEEPSEEK, /* <think>, tool calls between full-width bars */
    INF_STYLE_GLM,      /* <think>, <tool_call>F<arg_key>K</arg_key><arg_value>V</arg_value> */
};

struct inf_render {
    const struct inf_template *template;
    const struct inf_template_input *in;
    const struct inf_message *messages; /* what is left to write */
    size_t n;
    json_t *tools; /* array, not empty; NULL: none */
    struct shm_error *err;
    struct inf_template_text *out;
    int rc;
};

#define INF_MARKS 8

struct inf_template {
    const char *name;
    const char *marks[INF_MARKS]; /* all are in the text; one that starts with '!' must not be */
    void (*render)(struct inf_render *r);
    int variant; /* for the renderer */
    enum inf_style style;
    bool tools, thinking;
    const char *stops[4];
};

void inf_render_chatml(struct inf_render *r);
void inf_render_qwen25(struct inf_render *r);
void inf_render_qwen3(struct inf_render *r);
void inf_render_coder(struct inf_render *r);
void inf_render_llama(struct inf_render *r);
void inf_render_mistral(struct inf_render *r);
void inf_render_mistral_v13(struct inf_render *r);
void inf_render_harmony(struct inf_render *r);
void inf_render_deepseek(struct inf_render *r);
void inf_render_deepseek31(struct inf_render *r);
void inf_render_glm4(struct inf_render *r);
void inf_render_glm45(struct inf_render *r);

enum inf_qwen_variant { INF_QWEN3_HYBRID, INF_QWEN3_THINKING, INF_QWEN3_INSTRUCT };
enum inf_llama_variant { INF_LLAMA_3, INF_LLAMA_3_1, INF_LLAMA_3_2 };
enum inf_mistral_variant { INF_MISTRAL_V1, INF_MISTRAL_V3, INF_MISTRAL_V7, INF_MISTRAL_NEMO };
enum inf_deepseek_variant { INF_DEEPSEEK_DISTILL, INF_DEEPSEEK_R1, INF_DEEPSEEK_V3 };
enum inf_glm_variant { INF_GLM_45, INF_GLM_47 };

/* What the template writes (may hold control tokens), and what comes from the conversation. */
void inf_put(struct inf_render *r, const char *text);
void inf_put_from(struct inf_render *r, struct inf_slice content);
void inf_put_string(struct inf_render *r, const char *content);
void inf_put_json(struct inf_render *r, const json_t *value, int indent); /* indent 0: one line */
void inf_put_date(struct inf_render *r, bool by_name);                    /* 2026-03-05, or 05 Mar 2026 */
__attribute__((format(printf, 3, 4))) void inf_refuse(struct inf_render *r, int code, const char *format,
                                                      ...);

/* Content of a message, null as empty. */
struct inf_slice inf_content(const struct inf_message *m);
bool inf_is(const struct inf_message *m, const char *role); /* "developer" is "system" */

/* Arguments of a call as an object, new reference; NULL: refused. */
json_t *inf_arguments(struct inf_render *r, const struct inf_tool_call *call);

/* Python's str methods. Strip takes Unicode white space; newlines: '\n' only. */
struct inf_slice inf_strip(struct inf_slice s);
struct inf_slice inf_lstrip_newlines(struct inf_slice s);
struct inf_slice inf_rstrip_newlines(struct inf_slice s);
bool inf_has(struct inf_slice s, const char *part);
bool inf_starts(struct inf_slice s, const char *part);
bool inf_ends(struct inf_slice s, const char *part);
bool inf_same(struct inf_slice a, struct inf_slice b);
struct inf_slice inf_before_first(struct inf_slice s, const char *part);
struct inf_slice inf_after_last(struct inf_slice s, const char *part);
struct inf_slice inf_after_first(struct inf_slice s, const char *part);

/* content = reasoning inside <think> tags and the rest, as most templates take
 * it apart where no reasoning is given by itself. */
void inf_split_thinking(const struct inf_message *m, struct inf_slice *ret_content,
                        struct inf_slice *ret_reasoning);

void inf_buf_put(struct shm_text *buf, const char *bytes, size_t n);
void inf_buf_string(struct shm_text *buf, const char *text);

/* As Python's json.dumps(ensure_ascii=False) and str() write it. */
void inf_json_dump(struct shm_text *buf, const json_t *value, int indent);
void inf_json_str(struct shm_text *buf, const json_t *value);

bool inf_json_true(const json_t *value); /* Python's truth; NULL: false */

#endif
