/* SPDX-License-Identifier: MIT */
/*
 * A conversation at the terminal: messages to the token ids of one turn, by
 * the chat template of the model.
 *
 * Usually only what is new is read: what the template writes behind the last
 * answer. Where the template writes the past differently from how it was
 * read (reasoning is dropped, white space cut), the turn begins where the two
 * part. The tokenizer is borrowed; what has been read (the KV cache) is the
 * caller's.
 */
#ifndef INF_CHAT_H
#define INF_CHAT_H

#include "inferd/inf_template.h"

struct inf_chat_message {
    const char *role; /* "system", "user", ... */
    const char *content;
    size_t content_len; /* bytes */
};

#define INF_CHAT_KEEP_ALL SIZE_MAX

struct inf_chat;

/* template_text: the chat template the model carries, NULL where it has none;
 * name: what --chat-template says, NULL: nothing. -ENOTSUP, -ENOENT as
 * inf_template_find(); -ENOTSUP where the vocabulary lacks the tokens; -ENOMEM. */
int inf_chat_create(struct inf_tokenizer *tok, const char *template_text, size_t template_len,
                    const char *name, enum inf_thinking thinking, struct shm_error *err,
                    struct inf_chat **ret_chat);
void inf_chat_destroy(struct inf_chat **chat);

/* No turn was answered yet, or all was forgotten. */
bool inf_chat_is_new(const struct inf_chat *chat);

/* Appends the ids of a turn that ends with the opening of an answer. read:
 * the tokens read so far. *ret_keep: how many of them to keep, the others are
 * to be forgotten before ids are read, and so is a token that was sampled but
 * not read; INF_CHAT_KEEP_ALL: forget nothing, not even that. Messages of a
 * turn that was not answered are as if they had never come. -EINVAL: bad role
 * or what the template refuses; -ENOMEM, -E2BIG. */
int inf_chat_turn(struct inf_chat *chat, const struct inf_chat_message *messages, size_t n_messages,
                  const int32_t *read, size_t n_read, struct shm_error *err, size_t *ret_keep,
                  struct inf_ids *ret_ids);

/* The answer to the last turn, without the token that ended it; n_read: tokens
 * read by now. -ENOMEM. */
int inf_chat_answered(struct inf_chat *chat, const int32_t *ids, size_t n, size_t n_read,
                      struct shm_error *err);

void inf_chat_forget(struct inf_chat *chat);

#endif
