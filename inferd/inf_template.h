/* SPDX-License-Identifier: MIT */
/*
 * Chat templates: a conversation to the text a model was trained on, and an
 * answer back to content, reasoning and tool calls.
 *
 * One renderer a family, in C, chosen by marks in the template text that the
 * model carries, or by name. The bytes equal what the reference Jinja engine
 * makes of the family's published template. What the template wrote and what
 * came from messages is kept apart: only the former may become control tokens.
 * Templates are constants: nothing to release, any thread may use them.
 */
#ifndef INF_TEMPLATE_H
#define INF_TEMPLATE_H

#include "inferd/inf_tokenizer.h"

#include <time.h>

struct inf_template;

/* A call that the assistant made, or is to be shown as having made. */
struct inf_tool_call {
    const char *id; /* NULL: none; any text, also where the published template wants 9 characters */
    const char *name;
    const char *arguments; /* JSON text of an object, NUL-terminated */
};

/* Strings are UTF-8, borrowed, NUL-terminated but for content and reasoning. */
struct inf_message {
    const char *role;    /* "system", "developer", "user", "assistant", "tool" */
    const char *content; /* NULL: null, as beside tool calls */
    size_t content_bytes;
    const char *reasoning; /* assistant only; NULL: none */
    size_t reasoning_bytes;
    const char *name;                  /* tool: the function's name, where known; else NULL */
    const char *tool_call_id;          /* tool: which call this answers; NULL: none */
    const struct inf_tool_call *calls; /* assistant only */
    size_t n_calls;
};

enum inf_thinking {
    INF_THINKING_DEFAULT, /* what the template does when nothing is said */
    INF_THINKING_OFF,
    INF_THINKING_ON,
};

struct inf_template_input {
    const struct inf_message *messages;
    size_t n_messages;
    const char *tools; /* JSON text of the array [{"type":"function","function":{...}}, ...]; NULL: none */
    size_t tools_bytes;
    bool add_generation_prompt; /* open the assistant's answer at the end */
    enum inf_thinking thinking; /* ignored by families without a switch */
    const char *effort;         /* gpt-oss: "low", "medium", "high"; NULL: medium */
    time_t now;                 /* for templates that write the date (local time) */
};

/* Text in pieces: piece i ends at pieces[i].end (bytes) and starts where the
 * one before ends. Zero-initialize, release with inf_template_text_clear(). */
struct inf_template_text {
    char *bytes;
    size_t n_bytes;
    struct inf_template_piece {
        size_t end;
        bool from_template; /* written by the template: may hold control tokens */
    } * pieces;
    size_t n_pieces;
    size_t cap_bytes, cap_pieces;
};

/* name: what --chat-template says, NULL or "" to go by the template text
 * (template_text may be NULL where the model has none; not NUL-terminated).
 * -ENOTSUP: unknown text or name (the line lists the names); -ENOENT: no text
 * and no name. */
int inf_template_find(const char *template_text, size_t template_bytes, const char *name,
                      struct shm_error *err, const struct inf_template **ret_template);

const char *inf_template_name(const struct inf_template *t);

/* i-th name that --chat-template takes, NULL behind the last. */
const char *inf_template_name_at(size_t i);

bool inf_template_has_tools(const struct inf_template *t);
bool inf_template_has_thinking(const struct inf_template *t); /* answers may hold reasoning */

/* The whole conversation. ret_text is overwritten. -EINVAL: a message or the
 * tools are not what the template can take (the line says which and why: what
 * the published template raises, too); -ENOTSUP: tools given, template without;
 * -E2BIG: over 256 MiB; -ENOMEM. On failure ret_text is empty. */
int inf_template_render(const struct inf_template *t, const struct inf_template_input *in,
                        struct shm_error *err, struct inf_template_text *ret_text);
void inf_template_text_clear(struct inf_template_text *text);

/* Appends the ids of text[from..): control tokens are recognized inside what
 * the template wrote only, everything between two of them is split as one
 * text. from: a byte offset at which a control token starts, or 0; with 0, bos
 * goes in front where the model wants one and the template wrote none. Errors
 * as inf_tokenizer_encode(). */
int inf_template_encode(struct inf_tokenizer *tok, const struct inf_template_text *text, size_t from,
                        struct shm_error *err, struct inf_ids *ret_ids);

/* Tokens that end an answer, besides the vocabulary's own
 * (inf_tokenizer_is_stop). Writes at most n_max ids, returns how many. */
size_t inf_template_stops(const struct inf_template *t, const struct inf_tokenizer *tok, int32_t *ret_ids,
                          size_t n_max);

/*
 * Answers. The parser is fed the answer's text as it comes (detokenizer with
 * show_special on, without the token that ended it) and reports what is
 * certain at once; what may be the beginning of a marker is held back.
 */
enum inf_part {
    INF_PART_CONTENT,
    INF_PART_REASONING,
};

struct inf_parse_events {
    void *ctx;
    /* A run of text; never empty, whole characters where the input is. 0, or a negative errno that ends the
     * parse. */
    int (*on_text)(void *ctx, enum inf_part part, const char *text, size_t len);
    /* A whole call; call->arguments is the JSON text of an object; call->id NULL where the model gave none.
     */
    int (*on_call)(void *ctx, const struct inf_tool_call *call);
};

struct inf_parser;

/* text: what was rendered for this answer (its end says whether the answer
 * starts inside the reasoning); NULL: the answer starts with content. tools:
 * what was offered, as for rendering (says which arguments are strings); NULL:
 * none, and text that looks like a call is content. Nothing is kept but
 * events->ctx. -ENOMEM; -EINVAL: tools are no array. */
int inf_parser_create(const struct inf_template *t, const struct inf_template_text *text, const char *tools,
                      size_t tools_bytes, const struct inf_parse_events *events, struct shm_error *err,
                      struct inf_parser **ret_parser);
void inf_parser_destroy(struct inf_parser **parser);

/* Next bytes of the answer. 0, -ENOMEM, -E2BIG (a tool call over 16 MiB), or what an event returned. */
int inf_parser_push(struct inf_parser *parser, const char *text, size_t len);

/* End of the answer: what was held back. A call that is cut or is no valid
 * JSON is given out as content, as it was written. */
int inf_parser_finish(struct inf_parser *parser);

/* The same for a whole answer. Release with inf_template_answer_clear(). */
struct inf_template_answer {
    char *content; /* NUL-terminated; NULL: none */
    size_t content_bytes;
    char *reasoning; /* likewise */
    size_t reasoning_bytes;
    struct inf_tool_call *calls; /* strings owned */
    size_t n_calls;
};

int inf_template_parse(const struct inf_template *t, const struct inf_template_text *text, const char *tools,
                       size_t tools_bytes, const char *answer, size_t answer_bytes, struct shm_error *err,
                       struct inf_template_answer *ret_answer);
void inf_template_answer_clear(struct inf_template_answer *answer);

#endif
