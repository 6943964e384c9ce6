/* SPDX-License-Identifier: MIT */
#include "inferd/inf_parser_priv.h"
#include "inferd/inf_utf8.h"

#include <errno.h>
#include <stdlib.h>

#define CALL_BYTES_MAX   (16ul << 20)
#define HEADER_BYTES_MAX 4096
#define THINK            "<think>"
#define THINK_END        "</think>"
#define MARKS_MAX        4
#define MARK_BYTES_MAX   16 /* of harmony's */

static const char *const harmony_ends[MARKS_MAX + 1] = {"<|end|>", "<|call|>", "<|return|>", "<|start|>"};

static int give_text(struct inf_parser *p, enum inf_part part, const char *text, size_t n)
{
    return n ? p->events.on_text(p->events.ctx, part, text, n) : 0;
}

static void consume(struct inf_parser *p, size_t n)
{
    p->buf.n -= n;
    memmove(p->buf.bytes, p->buf.bytes + n, p->buf.n);
    p->scanned = 0;
}

/* The first of the marks from a place of the buffer on: its place, and which; -1: none. */
static int first_mark(const struct inf_parser *p, const char *const *marks, size_t from, size_t *ret_at)
{
    int which = -1;
    for (int i = 0; marks[i]; i++) {
        const char *hit =
            p->buf.n > from ? memmem(p->buf.bytes + from, p->buf.n - from, marks[i], strlen(marks[i])) : NULL;
        if (hit && (which < 0 || (size_t)(hit - p->buf.bytes) < *ret_at)) {
            *ret_at = (size_t)(hit - p->buf.bytes);
            which = i;
        }
    }
    return which;
}

/* How much of the buffer's end may be the beginning of a mark. */
static size_t held(const struct inf_parser *p, const char *const *marks)
{
    size_t most = 0;
    for (int i = 0; marks[i]; i++) {
        size_t n = strlen(marks[i]) - 1;
        for (n = n < p->buf.n ? n : p->buf.n; n > most; n--)
            if (!memcmp(p->buf.bytes + p->buf.n - n, marks[i], n))
                most = n;
    }
    return most;
}

/* Drops line breaks where they do not count; false: there may be more. */
static bool past_breaks(struct inf_parser *p)
{
    size_t n = 0;
    while (p->fresh && n < p->buf.n && p->buf.bytes[n] == '\n')
        n++;
    if (n)
        consume(p, n);
    p->fresh = p->fresh && !p->buf.n;
    return !p->fresh;
}

/* Text up to a mark. 1: there it is, now at the start of the buffer, *ret_bytes long; 0: more is needed.
 * Line breaks in front of a mark belong to it where trim is set. */
static int until(struct inf_parser *p, const char *const *marks, enum inf_part part, bool trim, bool final,
                 size_t *ret_bytes)
{
    size_t at = p->buf.n;
    if (!past_breaks(p))
        return 0;
    int rc, which = first_mark(p, marks, 0, &at);
    size_t give = which >= 0 ? at : final ? p->buf.n : p->buf.n - held(p, marks);
    while (trim && give && (which >= 0 || !final) && p->buf.bytes[give - 1] == '\n')
        give--;
    if ((rc = give_text(p, part, p->buf.bytes, give)))
        return rc;
    consume(p, give);
    if (which < 0)
        return 0;
    *ret_bytes = at - give + strlen(marks[which]);
    return 1;
}

static int in_reason(struct inf_parser *p, bool final)
{
    static const char *const marks[] = {THINK_END, NULL};
    size_t mark;
    int rc = until(p, marks, INF_PART_REASONING, true, final, &mark);
    if (rc > 0) {
        consume(p, mark);
        p->state = INF_STATE_CONTENT;
        p->fresh = true;
    }
    return rc;
}

/* Reasoning opens the answer or does not come at all. */
static int at_start(struct inf_parser *p, bool final)
{
    size_t space = 0;
    while (space < p->buf.n && strchr("\n ", p->buf.bytes[space]) && p->buf.bytes[space])
        space++;
    struct inf_slice rest = {p->buf.bytes + space, p->buf.n - space};
    if (inf_starts(rest, THINK)) {
        consume(p, space + strlen(THINK));
        p->state = INF_STATE_REASON;
        p->fresh = true;
        return 1;
    }
    if (!final && rest.n < strlen(THINK) && !memcmp(rest.at, THINK, rest.n))
        return 0;
    p->state = INF_STATE_CONTENT;
    return 1;
}

static int in_content(struct inf_parser *p, bool final)
{
    const char *const marks[] = {p->call_start, NULL};
    if (p->style == INF_STYLE_LLAMA && p->call_start && past_breaks(p) && p->buf.n) {
        /* A call is the whole answer and begins with a brace. */
        struct inf_slice s = inf_strip((struct inf_slice){p->buf.bytes, p->buf.n});
        bool brace = inf_starts(s, "{");
        if (brace || inf_starts(s, p->call_start)) {
            p->opening = (size_t)(s.at - p->buf.bytes) + (brace ? 0 : strlen(p->call_start));
            p->state = INF_STATE_CALL;
            return 1;
        }
        size_t n;
        bool cut = s.n && inf_utf8_step((const unsigned char *)s.at, s.n, &n) == INF_UTF8_PARTIAL;
        if (!final && (cut || (s.n < strlen(p->call_start) && !memcmp(s.at, p->call_start, s.n))))
            return 0;
        p->call_start = NULL;
        return 1;
    }
    int rc = until(p, marks, INF_PART_CONTENT, p->call_start != NULL, final, &p->opening);
    if (rc > 0)
        p->state = INF_STATE_CALL;
    return rc;
}

static int in_call(struct inf_parser *p, bool final)
{
    size_t n_end = p->call_end ? strlen(p->call_end) : 0, from = p->opening;
    if (p->scanned > from + n_end)
        from = p->scanned - n_end;
    const char *end = n_end ? memmem(p->buf.bytes + from, p->buf.n - from, p->call_end, n_end) : NULL;
    p->scanned = p->buf.n;
    size_t used = end ? (size_t)(end - p->buf.bytes) + n_end : p->buf.n;
    struct inf_slice body = {p->buf.bytes + p->opening, used - p->opening - (end ? n_end : 0)};
    if (body.n > CALL_BYTES_MAX)
        return -E2BIG;
    if (!end && !final)
        return 0;
    int rc = inf_parse_calls(p, body);
    p->fresh = rc != 0;
    if (rc == 0)
        rc = give_text(p, INF_PART_CONTENT, p->buf.bytes, used); /* as it was written */
    if (rc < 0)
        return rc;
    consume(p, used);
    p->state = INF_STATE_CONTENT;
    return end != NULL;
}

static bool is_word(char c)
{
    return c > ' ' && c != '<' && c != 0x7F;
}

/* [<|start|>assistant] [to=WHO] <|channel|>WHICH [to=WHO] [<|constrain|>json] <|message|>
 * What goes on for longer than HEADER_BYTES_MAX without the last mark is text. */
static int in_header(struct inf_parser *p, bool final)
{
    static const char *const marks[] = {"<|message|>", NULL};
    size_t at, n = 0;
    bool whole = p->buf.n >= HEADER_BYTES_MAX + strlen(marks[0]);
    if (first_mark(p, marks, 0, &at) < 0 || at > HEADER_BYTES_MAX) {
        if (!final && !whole)
            return 0;
        if (!whole) { /* a header that was cut means nothing yet; text without any marks does */
            struct inf_slice rest = {p->buf.bytes, p->buf.n};
            int rc = inf_has(rest, "<|") ? 0 : give_text(p, INF_PART_CONTENT, rest.at, rest.n);
            consume(p, p->buf.n);
            return rc;
        }
        p->state = INF_STATE_BODY;
        p->part = INF_PART_CONTENT;
        p->name.n = 0;
        return 1;
    }
    struct inf_slice header = {p->buf.bytes, at};
    struct inf_slice channel =
        inf_has(header, "<|channel|>") ? inf_after_first(header, "<|channel|>") : (struct inf_slice){"", 0};
    struct inf_slice to = inf_has(header, "to=functions.") ? inf_after_first(header, "to=functions.")
                                                           : (struct inf_slice){"", 0};
    while (n < to.n && is_word(to.at[n]))
        n++;
    p->name.n = 0;
    inf_buf_put(&p->name, to.at, p->call_start ? n : 0);
    p->part = inf_starts(channel, "analysis") ? INF_PART_REASONING : INF_PART_CONTENT;
    p->state = INF_STATE_BODY;
    consume(p, at + strlen(marks[0]));
    return p->name.rc ? p->name.rc : 1;
}

static int in_body(struct inf_parser *p, bool final)
{
    int rc;
    size_t at;
    if (!p->name.n) {
        rc = until(p, harmony_ends, p->part, false, final, &at);
        if (rc > 0) {
            consume(p, at);
            p->state = INF_STATE_HEADER;
        }
        return rc;
    }
    int which =
        first_mark(p, harmony_ends, p->scanned > MARK_BYTES_MAX ? p->scanned - MARK_BYTES_MAX : 0, &at);
    p->scanned = p->buf.n;
    struct inf_slice body = {p->buf.bytes ? p->buf.bytes : "", which < 0 ? p->buf.n : at};
    if (body.n > CALL_BYTES_MAX)
        return -E2BIG;
    if (which < 0 && !final)
        return 0;
    rc = inf_parse_call(p, (struct inf_slice){p->name.bytes, p->name.n}, body);
    if (rc == 0)
        rc = give_text(p, INF_PART_CONTENT, body.at, body.n);
    if (rc < 0)
        return rc;
    consume(p, body.n + (which < 0 ? 0 : strlen(harmony_ends[which])));
    p->state = INF_STATE_HEADER;
    return which >= 0;
}

static int run(struct inf_parser *p, bool final)
{
    int rc;
    do {
        switch (p->state) {
        case INF_STATE_START:
            rc = at_start(p, final);
            break;
        case INF_STATE_REASON:
            rc = in_reason(p, final);
            break;
        case INF_STATE_CONTENT:
            rc = in_content(p, final);
            break;
        case INF_STATE_CALL:
            rc = in_call(p, final);
            break;
        case INF_STATE_HEADER:
            rc = in_header(p, final);
            break;
        default:
            rc = in_body(p, final);
        }
    } while (rc > 0);
    return rc;
}

int inf_parser_push(struct inf_parser *p, const char *text, size_t len)
{
    inf_buf_put(&p->buf, text, len);
    return p->buf.rc ? p->buf.rc : run(p, false);
}

int inf_parser_finish(struct inf_parser *p)
{
    inf_buf_put(&p->buf, "", 0);
    return p->buf.rc ? p->buf.rc : run(p, true);
}

/* Where the answer begins, by what the prompt's end says. */
static enum inf_state first_state(const struct inf_template *t, const struct inf_template_text *text)
{
    if (t->style == INF_STYLE_HARMONY)
        return INF_STATE_HEADER;
    struct inf_slice end = {text ? text->bytes : NULL, text ? text->n_bytes : 0};
    bool ours = text && text->n_pieces && text->pieces[text->n_pieces - 1].from_template;
    end = inf_rstrip_newlines(end);
    if (!t->thinking || (ours && inf_ends(end, THINK_END)))
        return INF_STATE_CONTENT;
    return ours && inf_ends(end, THINK) ? INF_STATE_REASON : INF_STATE_START;
}

int inf_parser_create(const struct inf_template *t, const struct inf_template_text *text, const char *tools,
                      size_t tools_bytes, const struct inf_parse_events *events, struct shm_error *err,
                      struct inf_parser **ret_parser)
{
    static const struct {
        const char *start, *end;
    } marks[] = {
        [INF_STYLE_QWEN] = {"<tool_call>", "</tool_call>"},
        [INF_STYLE_CODER] = {"<tool_call>", "</tool_call>"},
        [INF_STYLE_GLM] = {"<tool_call>", "</tool_call>"},
        [INF_STYLE_LLAMA] = {"<|python_tag|>", NULL},
        [INF_STYLE_MISTRAL] = {"[TOOL_CALLS]", NULL},
        [INF_STYLE_HARMONY] = {"<|channel|>", NULL},
        [INF_STYLE_DEEPSEEK] = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"},
    };
    struct inf_parser *p = calloc(1, sizeof *p);
    if (!p)
        return shm_error_set(err, ENOMEM, "answer: no memory for its parser; free some");
    *p = (struct inf_parser){.style = t->style, .events = *events, .state = first_state(t, text)};
    p->fresh = p->state == INF_STATE_REASON || p->state == INF_STATE_CONTENT;
    if (t->style == INF_STYLE_PLAIN || !t->thinking)
        p->fresh = false;
    if (tools) {
        p->tools = json_loadb(tools, tools_bytes, JSON_ALLOW_NUL, NULL);
        if (!json_is_array(p->tools)) {
            inf_parser_destroy(&p);
            return shm_error_set(err, EINVAL,
                                 "answer: the tools are no JSON array; give those of the question");
        }
        if (json_array_size(p->tools) && t->style != INF_STYLE_PLAIN) {
            p->call_start = marks[t->style].start;
            p->call_end = marks[t->style].end;
        }
    }
    *ret_parser = p;
    return 0;
}

void inf_parser_destroy(struct inf_parser **parser)
{
    struct inf_parser *p = parser ? *parser : NULL;
    if (!p)
        return;
    json_decref(p->tools);
    free(p->buf.bytes);
    free(p->name.bytes);
    free(p);
    *parser = NULL;
}

struct collected {
    struct shm_text part[2];
    struct inf_template_answer *answer;
};

static int collect_text(void *ctx, enum inf_part part, const char *text, size_t len)
{
    struct collected *c = ctx;
    inf_buf_put(&c->part[part], text, len);
    return c->part[part].rc;
}

static int collect_call(void *ctx, const struct inf_tool_call *call)
{
    struct inf_template_answer *a = ((struct collected *)ctx)->answer;
    struct inf_tool_call *grown = realloc(a->calls, (a->n_calls + 1) * sizeof *grown);
    if (!grown)
        return -ENOMEM;
    a->calls = grown;
    char *id = call->id ? strdup(call->id) : NULL, *name = strdup(call->name),
         *arguments = strdup(call->arguments);
    a->calls[a->n_calls++] = (struct inf_tool_call){.id = id, .name = name, .arguments = arguments};
    return name && arguments && (id || !call->id) ? 0 : -ENOMEM;
}

int inf_template_parse(const struct inf_template *t, const struct inf_template_text *text, const char *tools,
                       size_t tools_bytes, const char *answer, size_t answer_bytes, struct shm_error *err,
                       struct inf_template_answer *ret_answer)
{
    struct inf_template_answer got = {0};
    struct collected c = {.answer = &got};
    const struct inf_parse_events events = {.ctx = &c, .on_text = collect_text, .on_call = collect_call};
    struct inf_parser *p = NULL;
    int rc = inf_parser_create(t, text, tools, tools_bytes, &events, err, &p);
    if (rc)
        return rc;
    rc = inf_parser_push(p, answer, answer_bytes);
    if (!rc)
        rc = inf_parser_finish(p);
    inf_parser_destroy(&p);
    got.content = c.part[INF_PART_CONTENT].bytes;
    got.content_bytes = c.part[INF_PART_CONTENT].n;
    got.reasoning = c.part[INF_PART_REASONING].bytes;
    got.reasoning_bytes = c.part[INF_PART_REASONING].n;
    if (!rc) {
        *ret_answer = got;
        return 0;
    }
    inf_template_answer_clear(&got);
    return rc == -ENOMEM
               ? shm_error_set(err, ENOMEM, "answer: no memory for its %zu bytes; free some", answer_bytes)
               : shm_error_set(err, -rc, "answer: a tool call has over 16 MiB; ask for less");
}

void inf_template_answer_clear(struct inf_template_answer *answer)
{
    for (size_t i = 0; i < answer->n_calls; i++) {
        free((char *)answer->calls[i].id);
        free((char *)answer->calls[i].name);
        free((char *)answer->calls[i].arguments);
    }
    free(answer->calls);
    free(answer->content);
    free(answer->reasoning);
    *answer = (struct inf_template_answer){0};
}
