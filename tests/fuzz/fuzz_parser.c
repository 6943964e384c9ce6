/* SPDX-License-Identifier: MIT */
/*
 * Any answer through the parser of any family: in one piece, and in pieces of
 * any size, it gives the same; whatever is given out as a call is one. First
 * byte: the family; second: tools, and how the prompt ends; third: the size of
 * the pieces.
 */
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_template.h"
#include "tests/fuzz/fuzz.h"

#define MUST(what) ((what) ? (void)0 : abort())
#define TOOLS                                                                                                \
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","              \
    "\"properties\":{\"s\":{\"type\":\"string\"}}}}}]"

struct seen {
    char *bytes;
    size_t n;
};

static void add(struct seen *s, const char *text, size_t len)
{
    s->bytes = realloc(s->bytes, s->n + len + 1);
    MUST(s->bytes);
    memcpy(s->bytes + s->n, text, len);
    s->n += len;
}

struct both {
    struct seen part[2], calls;
};

static int on_text(void *ctx, enum inf_part part, const char *text, size_t len)
{
    struct both *b = ctx;
    MUST(len > 0 && part <= INF_PART_REASONING);
    add(&b->part[part], text, len);
    return 0;
}

static int on_call(void *ctx, const struct inf_tool_call *call)
{
    struct both *b = ctx;
    json_t *arguments = json_loads(call->arguments, JSON_ALLOW_NUL, NULL);
    MUST(json_is_object(arguments) && call->name[0]);
    json_decref(arguments);
    add(&b->calls, call->name, strlen(call->name) + 1);
    add(&b->calls, call->arguments, strlen(call->arguments) + 1);
    return 0;
}

static void parse(const struct inf_template *t, const struct inf_template_text *prompt, bool tools,
                  const char *text, size_t len, size_t step, struct both *ret_both)
{
    const struct inf_parse_events events = {.ctx = ret_both, .on_text = on_text, .on_call = on_call};
    struct inf_parser *p = NULL;
    MUST(inf_parser_create(t, prompt, tools ? TOOLS : NULL, strlen(TOOLS), &events, NULL, &p) == 0);
    for (size_t at = 0; at < len; at += step)
        MUST(inf_parser_push(p, text + at, len - at < step ? len - at : step) == 0);
    MUST(inf_parser_finish(p) == 0);
    inf_parser_destroy(&p);
    MUST(ret_both->part[0].n + ret_both->part[1].n <= len);
}

static void same(struct seen *a, struct seen *b)
{
    MUST(a->n == b->n && (!a->n || !memcmp(a->bytes, b->bytes, a->n)));
    free(a->bytes);
    free(b->bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const ends[] = {"", "<think>", "<think>\n", "</think>\n\n"};
    const struct inf_template *t = NULL;
    struct both whole = {0}, pieces = {0};
    size_t families = 0;
    if (size < 3)
        return 0;
    while (inf_template_name_at(families))
        families++;
    MUST(inf_template_find(NULL, 0, inf_template_name_at(data[0] % families), NULL, &t) == 0);
    const char *end = ends[data[1] >> 1 & 3];
    struct inf_template_piece piece = {strlen(end), true};
    struct inf_template_text prompt = {
        .bytes = (char *)end, .n_bytes = strlen(end), .pieces = &piece, .n_pieces = *end ? 1 : 0};
    size_t step = 1 + data[2] % 17, len = size - 3;
    /* A text of its own, so that reading past it is seen. */
    char *text = malloc(len ? len : 1);
    MUST(text);
    memcpy(text, data + 3, len);
    parse(t, &prompt, data[1] & 1, text, len, len ? len : 1, &whole);
    parse(t, &prompt, data[1] & 1, text, len, step, &pieces);
    same(&whole.part[0], &pieces.part[0]);
    same(&whole.part[1], &pieces.part[1]);
    same(&whole.calls, &pieces.calls);
    free(text);
    return 0;
}
