/* SPDX-License-Identifier: MIT */
#include "inferd/inf_template.h"
#include "inferd/inf_template_priv.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define TEXT_BYTES_MAX (256ul << 20)

void inf_refuse(struct inf_render *r, int code, const char *format, ...)
{
    char text[256];
    va_list args;
    if (r->rc)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    r->rc = shm_error_set(r->err, code, "chat template %s: %s", r->template->name, text);
}

static int grow(void **array, size_t *cap, size_t need, size_t item)
{
    size_t want = *cap ? *cap : 64;
    while (want < need)
        want *= 2;
    if (want == *cap)
        return 0;
    void *grown = realloc(*array, want * item);
    if (!grown)
        return -ENOMEM;
    *array = grown;
    *cap = want;
    return 0;
}

static void put(struct inf_render *r, const char *bytes, size_t n, bool from_template)
{
    struct inf_template_text *t = r->out;
    if (r->rc || !n)
        return;
    if (n > TEXT_BYTES_MAX - t->n_bytes) {
        inf_refuse(r, E2BIG, "the conversation has over 256 MiB; shorten it");
        return;
    }
    bool same = t->n_pieces && t->pieces[t->n_pieces - 1].from_template == from_template;
    if (grow((void **)&t->bytes, &t->cap_bytes, t->n_bytes + n + 1, 1) ||
        grow((void **)&t->pieces, &t->cap_pieces, t->n_pieces + 1, sizeof *t->pieces)) {
        inf_refuse(r, ENOMEM, "no memory for the conversation; free some");
        return;
    }
    memcpy(t->bytes + t->n_bytes, bytes, n);
    t->n_bytes += n;
    t->bytes[t->n_bytes] = '\0';
    if (!same)
        t->pieces[t->n_pieces++].from_template = from_template;
    t->pieces[t->n_pieces - 1].end = t->n_bytes;
}

void inf_put(struct inf_render *r, const char *text)
{
    put(r, text, strlen(text), true);
}

void inf_put_from(struct inf_render *r, struct inf_slice content)
{
    put(r, content.at, content.n, false);
}

void inf_put_string(struct inf_render *r, const char *content)
{
    put(r, content, strlen(content), false);
}

void inf_put_json(struct inf_render *r, const json_t *value, int indent)
{
    struct shm_text buf = {0};
    if (r->rc)
        return;
    inf_json_dump(&buf, value, indent);
    if (buf.rc)
        inf_refuse(r, -buf.rc, "no room for a JSON text; shorten it");
    else
        put(r, buf.bytes, buf.n, false);
    free(buf.bytes);
}

void inf_put_date(struct inf_render *r, bool by_name)
{
    static const char months[12][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                       "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    char text[64] = "";
    struct tm tm;
    if (!localtime_r(&r->in->now, &tm) || tm.tm_year < -900 || tm.tm_year > 8099)
        inf_refuse(r, EINVAL, "the date cannot be written; set the clock");
    else if (by_name)
        snprintf(text, sizeof text, "%02d %s %d", tm.tm_mday, months[tm.tm_mon], tm.tm_year + 1900);
    else
        snprintf(text, sizeof text, "%d-%02d-%02d", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday);
    inf_put(r, text);
}

struct inf_slice inf_content(const struct inf_message *m)
{
    return (struct inf_slice){m->content ? m->content : "", m->content ? m->content_bytes : 0};
}

bool inf_is(const struct inf_message *m, const char *role)
{
    return strcmp(strcmp(m->role, "developer") == 0 ? "system" : m->role, role) == 0;
}

json_t *inf_arguments(struct inf_render *r, const struct inf_tool_call *call)
{
    json_t *value = r->rc ? NULL : json_loads(call->arguments, JSON_ALLOW_NUL, NULL);
    if (json_is_object(value))
        return value;
    json_decref(value);
    inf_refuse(r, EINVAL,
               "the arguments of the call of \"%.60s\" are no JSON object; send {} where there are none",
               call->name);
    return NULL;
}

void inf_split_thinking(const struct inf_message *m, struct inf_slice *ret_content,
                        struct inf_slice *ret_reasoning)
{
    struct inf_slice content = inf_content(m);
    *ret_content = content;
    *ret_reasoning = (struct inf_slice){"", 0};
    if (m->reasoning) {
        *ret_reasoning = (struct inf_slice){m->reasoning, m->reasoning_bytes};
    } else if (inf_has(content, "</think>")) {
        struct inf_slice before = inf_rstrip_newlines(inf_before_first(content, "</think>"));
        *ret_reasoning = inf_lstrip_newlines(inf_after_last(before, "<think>"));
        *ret_content = inf_lstrip_newlines(inf_after_last(content, "</think>"));
    }
}

static void check_messages(struct inf_render *r)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    for (size_t i = 0; i < r->in->n_messages; i++) {
        const struct inf_message *m = &r->in->messages[i];
        bool known = false;
        for (size_t k = 0; k < sizeof roles / sizeof roles[0]; k++)
            known |= m->role && strcmp(m->role, roles[k]) == 0;
        if (!known)
            inf_refuse(r, EINVAL,
                       "message %zu has role \"%.40s\"; known are system, developer, user, assistant, tool",
                       i, m->role ? m->role : "");
        else if (m->n_calls && strcmp(m->role, "assistant"))
            inf_refuse(r, EINVAL, "message %zu is of role %s and calls tools; only the assistant can", i,
                       m->role);
        for (size_t k = 0; k < m->n_calls && !r->rc; k++)
            if (!m->calls[k].name || !m->calls[k].arguments)
                inf_refuse(r, EINVAL, "call %zu of message %zu has no name or no arguments; send both", k, i);
    }
}

static void load_tools(struct inf_render *r)
{
    json_error_t why;
    if (!r->in->tools || r->rc)
        return;
    r->tools = json_loadb(r->in->tools, r->in->tools_bytes, JSON_ALLOW_NUL, &why);
    if (!r->tools)
        inf_refuse(r, EINVAL, "the tools are no JSON that can be read: %.100s", why.text);
    else if (!json_is_array(r->tools))
        inf_refuse(r, EINVAL, "the tools are no JSON array; send [{\"type\":\"function\",...}]");
    else if (!json_array_size(r->tools)) {
        json_decref(r->tools);
        r->tools = NULL;
    }
    size_t i;
    json_t *tool;
    json_array_foreach(r->tools, i, tool)
    {
        const json_t *function = json_object_get(tool, "function");
        if (!json_is_string(json_object_get(function, "name")))
            inf_refuse(
                r, EINVAL,
                "tool %zu has no function with a name; send {\"type\":\"function\",\"function\":{...}}", i);
    }
    if (r->tools && !r->template->tools)
        inf_refuse(r, ENOTSUP, "has no place for tools; ask without them or take a model whose template has");
}

int inf_template_render(const struct inf_template *t, const struct inf_template_input *in,
                        struct shm_error *err, struct inf_template_text *ret_text)
{
    struct inf_render r = {
        .template = t, .in = in, .messages = in->messages, .n = in->n_messages, .err = err, .out = ret_text};
    ret_text->n_bytes = ret_text->n_pieces = 0;
    check_messages(&r);
    load_tools(&r);
    if (!r.rc)
        t->render(&r);
    json_decref(r.tools);
    if (r.rc)
        ret_text->n_bytes = ret_text->n_pieces = 0;
    return r.rc;
}

void inf_template_text_clear(struct inf_template_text *text)
{
    free(text->bytes);
    free(text->pieces);
    *text = (struct inf_template_text){0};
}

size_t inf_template_stops(const struct inf_template *t, const struct inf_tokenizer *tok, int32_t *ret_ids,
                          size_t n_max)
{
    size_t n = 0;
    for (size_t i = 0; i < sizeof t->stops / sizeof t->stops[0] && t->stops[i] && n < n_max; i++) {
        int32_t id = inf_tokenizer_find(tok, t->stops[i], strlen(t->stops[i]));
        if (id >= 0)
            ret_ids[n++] = id;
    }
    return n;
}

/* The token that the model wants in front of everything, or -1. */
static int32_t bos_of(struct inf_tokenizer *tok)
{
    struct inf_ids one = {0};
    int32_t bos = inf_tokenizer_encode(tok, "", 0, INF_ENCODE_BOS, NULL, &one) || !one.n ? -1 : one.ids[0];
    inf_ids_clear(&one);
    return bos;
}

int inf_template_encode(struct inf_tokenizer *tok, const struct inf_template_text *text, size_t from,
                        struct shm_error *err, struct inf_ids *ret_ids)
{
    struct inf_ids ids = {0};
    size_t n = 0, n_before = ret_ids->n;
    if (from > text->n_bytes)
        return shm_error_set(err, EINVAL, "chat template: byte %zu of a text of %zu; report this", from,
                             text->n_bytes);
    struct inf_span *spans = malloc((text->n_pieces + 1) * sizeof *spans);
    if (!spans)
        return shm_error_set(err, ENOMEM, "chat template: no memory for %zu pieces; free some",
                             text->n_pieces);
    for (size_t i = 0; i < text->n_pieces; i++)
        if (text->pieces[i].end > from)
            spans[n++] = (struct inf_span){text->pieces[i].end - from, text->pieces[i].from_template};
    int rc = inf_tokenizer_encode_spans(tok, text->n_bytes ? text->bytes + from : "", spans, n, 0, err, &ids);
    int32_t bos = rc || from ? -1 : bos_of(tok);
    if (bos >= 0 && (!ids.n || ids.ids[0] != bos))
        rc = inf_ids_append(ret_ids, &bos, 1);
    if (!rc)
        rc = inf_ids_append(ret_ids, ids.ids, ids.n);
    if (rc)
        ret_ids->n = n_before;
    free(spans);
    inf_ids_clear(&ids);
    return rc == -ENOMEM ? shm_error_set(err, ENOMEM, "chat template: no memory for the tokens; free some")
                         : rc;
}
