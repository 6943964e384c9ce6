/* SPDX-License-Identifier: MIT */
#include "inferd/inf_chat.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NO_MEMORY "chat: no memory for the conversation; free some"

struct inf_chat {
    struct inf_tokenizer *tok;
    const struct inf_template *template;
    enum inf_thinking thinking;
    struct inf_message *messages; /* content and reasoning owned, roles are literals */
    size_t n, cap;
    size_t n_answered;               /* the first so many are settled; others belong to a turn under way */
    struct inf_template_text prompt; /* of the turn under way */
    char *read;                      /* what was read: the last prompt and its answer */
    size_t read_bytes, n_read;       /* tokens */
};

int inf_chat_create(struct inf_tokenizer *tok, const char *template_text, size_t template_len,
                    const char *name, enum inf_thinking thinking, struct shm_error *err,
                    struct inf_chat **ret_chat)
{
    const struct inf_template *t;
    int32_t stop;
    int rc = inf_template_find(template_text, template_len, name, err, &t);
    if (rc)
        return rc;
    if (!inf_template_stops(t, tok, &stop, 1))
        return shm_error_set(err, ENOTSUP,
                             "chat: the vocabulary lacks the token that ends an answer of template %s; "
                             "pass --chat-template NAME of the model's family",
                             inf_template_name(t));
    struct inf_chat *chat = calloc(1, sizeof *chat);
    if (!chat)
        return shm_error_set(err, ENOMEM, NO_MEMORY);
    chat->tok = tok;
    chat->template = t;
    chat->thinking = thinking;
    *ret_chat = chat;
    return 0;
}

static void drop(struct inf_chat *chat, size_t n)
{
    while (chat->n > n) {
        struct inf_message *m = &chat->messages[--chat->n];
        free((char *)m->content);
        free((char *)m->reasoning);
    }
}

void inf_chat_forget(struct inf_chat *chat)
{
    drop(chat, 0);
    chat->n_answered = 0;
    free(chat->read);
    chat->read = NULL;
    chat->read_bytes = chat->n_read = 0;
}

void inf_chat_destroy(struct inf_chat **chat)
{
    struct inf_chat *c = chat ? *chat : NULL;
    if (!c)
        return;
    inf_chat_forget(c);
    free(c->messages);
    inf_template_text_clear(&c->prompt);
    free(c);
    *chat = NULL;
}

bool inf_chat_is_new(const struct inf_chat *chat)
{
    return chat->n_answered == 0;
}

static const char *role_named(const char *role)
{
    static const char *const known[] = {"system", "developer", "user", "assistant"};
    for (size_t i = 0; role && i < sizeof known / sizeof known[0]; i++)
        if (strcmp(role, known[i]) == 0)
            return known[i];
    return NULL;
}

static int add(struct inf_chat *chat, const char *role, const char *content, size_t content_len,
               const char *reasoning, size_t reasoning_len)
{
    if (chat->n == chat->cap) {
        size_t cap = chat->cap ? 2 * chat->cap : 16;
        struct inf_message *grown = realloc(chat->messages, cap * sizeof *grown);
        if (!grown)
            return -ENOMEM;
        chat->messages = grown;
        chat->cap = cap;
    }
    char *copy = malloc(content_len + 1), *thought = reasoning ? malloc(reasoning_len + 1) : NULL;
    if (!copy || (reasoning && !thought)) {
        free(copy);
        free(thought);
        return -ENOMEM;
    }
    if (content_len)
        memcpy(copy, content, content_len);
    if (reasoning)
        memcpy(thought, reasoning, reasoning_len);
    chat->messages[chat->n++] = (struct inf_message){.role = role,
                                                     .content = copy,
                                                     .content_bytes = content_len,
                                                     .reasoning = thought,
                                                     .reasoning_bytes = reasoning_len};
    return 0;
}

/* Whether the prompt is what was read and then something that the template wrote. */
static bool goes_on(const struct inf_chat *chat)
{
    const struct inf_template_text *p = &chat->prompt;
    if (!chat->read || p->n_bytes <= chat->read_bytes || memcmp(p->bytes, chat->read, chat->read_bytes))
        return false;
    for (size_t i = 0; i < p->n_pieces; i++)
        if (p->pieces[i].end > chat->read_bytes)
            return p->pieces[i].from_template;
    return false;
}

int inf_chat_turn(struct inf_chat *chat, const struct inf_chat_message *messages, size_t n_messages,
                  const int32_t *read, size_t n_read, struct shm_error *err, size_t *ret_keep,
                  struct inf_ids *ret_ids)
{
    int rc = 0;
    drop(chat, chat->n_answered);
    for (size_t i = 0; i < n_messages && !rc; i++) {
        const char *role = role_named(messages[i].role);
        if (!role)
            return shm_error_set(err, EINVAL,
                                 "chat: role \"%.40s\" is not known; use system, user or assistant",
                                 messages[i].role ? messages[i].role : "");
        rc = add(chat, role, messages[i].content, messages[i].content_len, NULL, 0);
    }
    if (rc)
        return shm_error_set(err, ENOMEM, NO_MEMORY);
    const struct inf_template_input in = {.messages = chat->messages,
                                          .n_messages = chat->n,
                                          .add_generation_prompt = true,
                                          .thinking = chat->thinking,
                                          .now = time(NULL)};
    if ((rc = inf_template_render(chat->template, &in, err, &chat->prompt)))
        return rc;
    if (goes_on(chat) && n_read == chat->n_read) {
        rc = inf_template_encode(chat->tok, &chat->prompt, chat->read_bytes, err, ret_ids);
        if (!rc)
            *ret_keep = INF_CHAT_KEEP_ALL;
        return rc;
    }
    struct inf_ids all = {0};
    size_t same = 0;
    if ((rc = inf_template_encode(chat->tok, &chat->prompt, 0, err, &all)))
        return rc;
    while (same < n_read && same + 1 < all.n && read[same] == all.ids[same])
        same++;
    rc = inf_ids_append(ret_ids, all.ids + same, all.n - same);
    inf_ids_clear(&all);
    if (rc)
        return shm_error_set(err, ENOMEM, NO_MEMORY);
    *ret_keep = same;
    return 0;
}

/* What the ids stand for, written behind the prompt. */
static int join(struct inf_chat *chat, const int32_t *ids, size_t n, char **ret_text, size_t *ret_bytes)
{
    const char *bytes;
    size_t len, at = chat->prompt.n_bytes, size = at + 1;
    for (size_t i = 0; i < n; i++)
        size += inf_tokenizer_bytes(chat->tok, ids[i], &bytes, &len) ? 0 : len;
    char *text = malloc(size);
    if (!text)
        return -ENOMEM;
    if (at)
        memcpy(text, chat->prompt.bytes, at);
    for (size_t i = 0; i < n; i++) {
        if (inf_tokenizer_bytes(chat->tok, ids[i], &bytes, &len))
            continue;
        memcpy(text + at, bytes, len);
        at += len;
    }
    *ret_text = text;
    *ret_bytes = at;
    return 0;
}

int inf_chat_answered(struct inf_chat *chat, const int32_t *ids, size_t n, size_t n_read,
                      struct shm_error *err)
{
    struct inf_template_answer answer = {0};
    char *text;
    size_t bytes, from = chat->prompt.n_bytes;
    if (join(chat, ids, n, &text, &bytes))
        return shm_error_set(err, ENOMEM, NO_MEMORY);
    int rc =
        inf_template_parse(chat->template, &chat->prompt, NULL, 0, text + from, bytes - from, err, &answer);
    if (!rc && add(chat, "assistant", answer.content ? answer.content : "", answer.content_bytes,
                   answer.reasoning, answer.reasoning_bytes))
        rc = shm_error_set(err, ENOMEM, NO_MEMORY);
    inf_template_answer_clear(&answer);
    if (rc) {
        free(text);
        return rc;
    }
    free(chat->read);
    chat->read = text;
    chat->read_bytes = bytes;
    chat->n_read = n_read;
    chat->n_answered = chat->n;
    return 0;
}
