/* SPDX-License-Identifier: MIT */
/* Chat templates against the reference engine's texts; forged markers; refusals; answers. */
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_template.h"
#include "tok_fixture.h"

TestSuite(template, .timeout = 60);

#define MESSAGES_MAX 16
#define CALLS_MAX    4

struct talk {
    struct inf_message messages[MESSAGES_MAX];
    struct inf_tool_call calls[MESSAGES_MAX][CALLS_MAX];
    size_t n;
    char *tools;
};

static json_t *load_goldens(void)
{
    char command[4200], *text = NULL;
    size_t n = 0, cap = 0, got;
    snprintf(command, sizeof command, "gzip -dc '%s'",
             tok_fixture_path("tests/data/goldens/templates.json.gz"));
    FILE *in = popen(command, "r");
    cr_assert(in);
    do {
        cap = cap ? cap * 2 : 1 << 20;
        text = realloc(text, cap);
        cr_assert(text);
        got = fread(text + n, 1, cap - n, in);
        n += got;
    } while (got);
    cr_assert_eq(pclose(in), 0);
    json_error_t e;
    json_t *all = json_loadb(text, n, JSON_ALLOW_NUL, &e);
    cr_assert(all, "%s", e.text);
    free(text);
    return all;
}

static const char *member(const json_t *o, const char *key)
{
    return json_string_value(json_object_get(o, key));
}

static void open_talk(json_t *o, struct talk *t)
{
    size_t i, k;
    json_t *m, *c;
    memset(t, 0, sizeof *t);
    json_array_foreach(json_object_get(o, "messages"), i, m)
    {
        struct inf_message *to = &t->messages[t->n];
        cr_assert_lt(t->n, MESSAGES_MAX);
        const json_t *content = json_object_get(m, "content"), *reasoning = json_object_get(m, "reasoning");
        to->role = member(m, "role");
        to->content = json_string_value(content);
        to->content_bytes = json_string_length(content);
        to->reasoning = json_string_value(reasoning);
        to->reasoning_bytes = json_string_length(reasoning);
        to->name = member(m, "name");
        to->tool_call_id = member(m, "tool_call_id");
        to->calls = t->calls[t->n];
        json_array_foreach(json_object_get(m, "calls"), k, c)
        {
            cr_assert_lt(k, CALLS_MAX);
            t->calls[t->n][k] =
                (struct inf_tool_call){member(c, "id"), member(c, "name"), member(c, "arguments")};
            to->n_calls++;
        }
        t->n++;
    }
    json_t *tools = json_object_get(o, "tools");
    t->tools = json_is_array(tools) ? json_dumps(tools, JSON_COMPACT) : NULL;
}

static void check_pieces(const struct inf_template_text *text)
{
    size_t at = 0;
    for (size_t i = 0; i < text->n_pieces; i++) {
        cr_assert_gt(text->pieces[i].end, at);
        at = text->pieces[i].end;
        if (i)
            cr_assert_neq(text->pieces[i].from_template, text->pieces[i - 1].from_template);
    }
    cr_assert_eq(at, text->n_bytes);
}

/* What came from the messages is never marked as the template's: the conversations called "forged" say "obey"
 * or "z". */
static void check_forged(const struct inf_template_text *text, const struct talk *t, const char *name)
{
    size_t from = 0;
    for (size_t i = 0; i < text->n_pieces; from = text->pieces[i++].end) {
        size_t n = text->pieces[i].end - from;
        cr_assert(!text->pieces[i].from_template ||
                      !memmem(text->bytes + from, n, t->messages[0].content, t->messages[0].content_bytes),
                  "%s", name);
    }
}

static size_t check_family(json_t *talks, const char *name, json_t *family, time_t now)
{
    const struct inf_template *t = NULL;
    struct inf_template_text text = {0};
    size_t i, n_talks = 0;
    json_t *c;
    cr_assert_eq(inf_template_find(NULL, 0, name, NULL, &t), 0, "%s", name);
    cr_assert_str_eq(inf_template_name(t), name);
    json_int_t before = -1;
    json_array_foreach(json_object_get(family, "cases"), i, c)
    {
        struct talk talk;
        struct shm_error err = {0};
        json_int_t which = json_integer_value(json_array_get(c, 0));
        json_t *o = json_array_get(talks, (size_t)which), *want = json_array_get(c, 3);
        open_talk(o, &talk);
        struct inf_template_input in = {.messages = talk.messages,
                                        .n_messages = talk.n,
                                        .tools = inf_template_has_tools(t) ? talk.tools : NULL,
                                        .tools_bytes = talk.tools ? strlen(talk.tools) : 0,
                                        .add_generation_prompt = json_integer_value(json_array_get(c, 1)),
                                        .thinking =
                                            (enum inf_thinking)json_integer_value(json_array_get(c, 2)),
                                        .now = now};
        int rc = inf_template_render(t, &in, &err, &text);
        if (json_is_null(want)) {
            cr_expect(rc == -EINVAL && !text.n_bytes && err.text[0] && !strchr(err.text, '\n'), "%s: %s: %d",
                      name, member(o, "name"), rc);
        } else {
            cr_assert_eq(rc, 0, "%s: %s: %s", name, member(o, "name"), shm_error_text(&err));
            check_pieces(&text);
            if (!strncmp(member(o, "name"), "forged", 6))
                check_forged(&text, &talk, name);
            size_t n = json_string_length(want);
            const char *w = json_string_value(want);
            size_t same = 0;
            while (same < n && same < text.n_bytes && w[same] == text.bytes[same])
                same++;
            cr_expect(n == text.n_bytes && same == n,
                      "%s: %s (prompt %d, thinking %d) differs at %zu:\n want ...%.60s\n  got ...%.60s", name,
                      member(o, "name"), in.add_generation_prompt, in.thinking, same, w + same,
                      text.bytes ? text.bytes + same : "");
            if (which != before)
                n_talks++;
            before = which;
        }
        free(talk.tools);
    }
    inf_template_text_clear(&text);
    return n_talks;
}

Test(template, equal_reference_engine)
{
    json_t *all = load_goldens(), *family;
    const char *name;
    size_t n = 0;
    json_object_foreach(json_object_get(all, "families"), name, family)
    {
        size_t talks = check_family(json_object_get(all, "conversations"), name, family,
                                    (time_t)json_integer_value(json_object_get(all, "now")));
        cr_expect(talks >= 36, "%s: %zu conversations", name, talks);
        n++;
    }
    while (inf_template_name_at(n))
        n++;
    cr_assert_eq(n, json_object_size(json_object_get(all, "families")), "families without reference texts");
    json_decref(all);
}
