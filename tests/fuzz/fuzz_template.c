/* SPDX-License-Identifier: MIT */
/*
 * Any conversation through the renderer of any family: text in whole pieces or
 * one line that says why not; every control token is the template's, and the
 * tokens' bytes are the text. The input is cut at its line breaks: a line is
 * tools (first), then a message each, led by a character for its role.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_template.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/tok_fixture.h"

#define MUST(what)   ((what) ? (void)0 : abort())
#define MESSAGES_MAX 12

static void check(const struct inf_template_text *text, struct inf_tokenizer *tok)
{
    struct inf_ids ids = {0};
    size_t at = 0, ours = 0, written = 0, read = 0;
    const char *bytes;
    size_t n;
    for (size_t i = 0; i < text->n_pieces; i++) {
        MUST(text->pieces[i].end > at && text->pieces[i].end <= text->n_bytes);
        if (text->pieces[i].from_template) { /* how many control tokens are in there */
            struct inf_ids part = {0};
            MUST(inf_tokenizer_encode(tok, text->bytes + at, text->pieces[i].end - at, INF_ENCODE_SPECIAL,
                                      NULL, &part) == 0);
            for (size_t k = 0; k < part.n; k++)
                ours += inf_tokenizer_is_control(tok, part.ids[k]);
            inf_ids_clear(&part);
        }
        at = text->pieces[i].end;
    }
    MUST(at == text->n_bytes);
    MUST(inf_template_encode(tok, text, 0, NULL, &ids) == 0);
    for (size_t i = 0; i < ids.n; i++) {
        written += inf_tokenizer_is_control(tok, ids.ids[i]);
        MUST(inf_tokenizer_bytes(tok, ids.ids[i], &bytes, &n) == 0);
        MUST(n <= text->n_bytes - read && !memcmp(text->bytes + read, bytes, n));
        read += n;
    }
    MUST(read == text->n_bytes && written == ours);
    inf_ids_clear(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool", "developer", "user\n", NULL};
    static struct inf_tokenizer *tok;
    const struct inf_template *t = NULL;
    struct inf_template_text text = {0};
    struct shm_error err = {0};
    struct inf_message messages[MESSAGES_MAX];
    struct inf_tool_call call = {"abcdef123", "f", NULL};
    size_t families = 0, n = 0;
    if (!tok)
        tok = tok_fixture_tokenizer();
    if (size < 2)
        return 0;
    while (inf_template_name_at(families))
        families++;
    MUST(inf_template_find(NULL, 0, inf_template_name_at(data[0] % families), NULL, &t) == 0);
    /* Whatever the text, finding its family is no trouble. */
    const struct inf_template *found = NULL;
    (void)inf_template_find((const char *)data, size, NULL, NULL, &found);
    char *copy = malloc(size + 1), *line = copy, *end;
    MUST(copy);
    memcpy(copy, data + 2, size - 2);
    copy[size - 2] = '\0';
    struct inf_template_input in = {.messages = messages,
                                    .add_generation_prompt = data[1] & 1,
                                    .thinking = (enum inf_thinking)((data[1] >> 1) % 3),
                                    .now = 1772712000};
    for (size_t left = size - 2, i = 0; line && n < MESSAGES_MAX; i++) {
        end = memchr(line, '\n', left);
        size_t len = end ? (size_t)(end - line) : left;
        if (end)
            *end = '\0';
        if (i == 0) {
            in.tools = len && inf_template_has_tools(t) ? line : NULL;
            in.tools_bytes = len;
        } else if (len) {
            unsigned kind = (unsigned char)line[0];
            struct inf_message *m = &messages[n++];
            *m = (struct inf_message){.role = roles[kind % 7], .content = line + 1, .content_bytes = len - 1};
            if (kind & 16) {
                m->reasoning = line + 1;
                m->reasoning_bytes = (len - 1) / 2;
            }
            m->tool_call_id = kind & 32 ? "abcdef123" : NULL;
            if (kind & 8 && kind % 7 == 2) {
                call.arguments = line + 1;
                m->calls = &call;
                m->n_calls = 1;
                m->content = NULL;
            }
        }
        left -= end ? len + 1 : left;
        line = end ? end + 1 : NULL;
    }
    in.n_messages = n;
    int rc = inf_template_render(t, &in, &err, &text);
    if (rc)
        MUST(rc < 0 && !text.n_bytes && !text.n_pieces && err.text[0] && strlen(err.text) < 512);
    else
        check(&text, tok);
    inf_template_text_clear(&text);
    free(copy);
    return 0;
}
