/* SPDX-License-Identifier: MIT */
#include "inferd/inf_chat.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define START    "<|im_start|>"
#define END      "<|im_end|>"
#define ROLE_MAX 32

struct inf_chat {
    struct inf_tokenizer *tok;
    int32_t start_id, end_id;
};

int inf_chat_create(struct inf_tokenizer *tok, const char *template_text, size_t template_len,
                    struct shm_error *err, struct inf_chat **ret_chat)
{
    if (!template_text || !template_len)
        return shm_error_set(err, ENOTSUP,
                             "chat: the model carries no chat template; use --raw for plain text");
    if (!memmem(template_text, template_len, START, strlen(START)))
        return shm_error_set(err, ENOTSUP,
                             "chat: the model's chat template is not ChatML (no " START
                             " in it), the only style supported; use --raw for plain text");
    int32_t start_id = inf_tokenizer_find(tok, START, strlen(START));
    int32_t end_id = inf_tokenizer_find(tok, END, strlen(END));
    if (start_id < 0 || end_id < 0)
        return shm_error_set(err, ENOTSUP,
                             "chat: the model's template is ChatML, but its vocabulary lacks %s; "
                             "use --raw for plain text",
                             start_id < 0 ? START : END);
    struct inf_chat *chat = malloc(sizeof *chat);
    if (!chat)
        return shm_error_set(err, ENOMEM, "chat: no memory; free some");
    *chat = (struct inf_chat){.tok = tok, .start_id = start_id, .end_id = end_id};
    *ret_chat = chat;
    return 0;
}

void inf_chat_destroy(struct inf_chat **chat)
{
    if (!chat)
        return;
    free(*chat);
    *chat = NULL;
}

static bool role_ok(const char *role)
{
    size_t len = role ? strnlen(role, ROLE_MAX + 1) : 0;
    return len > 0 && len <= ROLE_MAX && strspn(role, "abcdefghijklmnopqrstuvwxyz_") == len;
}

static int add_plain(struct inf_chat *chat, const char *text, size_t len, struct shm_error *err,
                     struct inf_ids *ids)
{
    return inf_tokenizer_encode(chat->tok, text, len, 0, err, ids);
}

/* Role and content are encoded as one text: a line break at the content's
 * start joins the one behind the role, as it does in the whole text. */
static int add_message(struct inf_chat *chat, const struct inf_chat_message *message, struct shm_error *err,
                       struct inf_ids *ids)
{
    if (!role_ok(message->role))
        return shm_error_set(err, EINVAL,
                             "chat: role \"%.40s\" is not a name; use system, user, assistant or tool",
                             message->role ? message->role : "");
    size_t n_role = strlen(message->role);
    if (message->content_len > SIZE_MAX - n_role - 1)
        return shm_error_set(err, E2BIG, "chat: message of %zu bytes; shorten it", message->content_len);
    char *text = malloc(n_role + 1 + message->content_len);
    if (!text)
        return shm_error_set(err, ENOMEM, "chat: no memory for a message of %zu bytes; free some",
                             message->content_len);
    memcpy(text, message->role, n_role);
    text[n_role] = '\n';
    if (message->content_len)
        memcpy(text + n_role + 1, message->content, message->content_len);
    int rc = inf_ids_append(ids, &chat->start_id, 1);
    if (!rc)
        rc = add_plain(chat, text, n_role + 1 + message->content_len, err, ids);
    if (!rc)
        rc = inf_ids_append(ids, &chat->end_id, 1);
    if (!rc)
        rc = add_plain(chat, "\n", 1, err, ids);
    free(text);
    return rc;
}

int inf_chat_turn(struct inf_chat *chat, enum inf_chat_tail tail, const struct inf_chat_message *messages,
                  size_t n_messages, struct shm_error *err, struct inf_ids *ret_ids)
{
    size_t n_before = ret_ids->n;
    int rc = 0;
    if (tail == INF_CHAT_FIRST)
        rc = inf_tokenizer_encode(chat->tok, "", 0, INF_ENCODE_BOS, err, ret_ids);
    if (tail == INF_CHAT_OPEN)
        rc = inf_ids_append(ret_ids, &chat->end_id, 1);
    if (!rc && tail != INF_CHAT_FIRST)
        rc = add_plain(chat, "\n", 1, err, ret_ids);
    for (size_t i = 0; i < n_messages && !rc; i++)
        rc = add_message(chat, &messages[i], err, ret_ids);
    if (!rc)
        rc = inf_ids_append(ret_ids, &chat->start_id, 1);
    if (!rc)
        rc = add_plain(chat, "assistant\n", strlen("assistant\n"), err, ret_ids);
    if (!rc)
        return 0;
    ret_ids->n = n_before;
    return rc == -ENOMEM ? shm_error_set(err, ENOMEM, "chat: no memory for the turn; free some") : rc;
}
