/* SPDX-License-Identifier: MIT */
/*
 * ChatML: messages to the token ids of one turn.
 *
 * Only what is new is rendered: the caller keeps what it has read (the KV
 * cache) and says how that ends. Markers become control tokens; role and
 * content are plain text, so a message cannot forge a marker. No state and no
 * conversation is kept here; the tokenizer is borrowed.
 *
 *   <|im_start|>ROLE\nCONTENT<|im_end|>\n ... <|im_start|>assistant\n
 */
#ifndef INF_CHAT_H
#define INF_CHAT_H

#include "inferd/inf_tokenizer.h"

struct inf_chat_message {
    const char *role; /* lower-case letters and '_': "system", "user", "assistant", "tool" */
    const char *content;
    size_t content_len; /* bytes */
};

/* How the text that was read before this turn ends. */
enum inf_chat_tail {
    INF_CHAT_FIRST, /* nothing was read: the conversation starts */
    INF_CHAT_OPEN,  /* in an answer whose <|im_end|> was not read (the usual case: the stop
                     * token was sampled, not computed; also after a cancelled answer) */
    INF_CHAT_ENDED, /* right behind an answer's <|im_end|> */
};

struct inf_chat;

/* template_text: the chat template the model carries, NULL where it has none;
 * only the style is recognized from it. -ENOTSUP where it is not ChatML (the
 * line says that --raw is the remedy), -ENOMEM. */
int inf_chat_create(struct inf_tokenizer *tok, const char *template_text, size_t template_len,
                    struct shm_error *err, struct inf_chat **ret_chat);
void inf_chat_destroy(struct inf_chat **chat);

/* Appends the ids of the turn: what closes the answer before it, the
 * messages, and the opening of the assistant's answer. bos goes in front of
 * the first turn where the model asks for it. -EINVAL: bad role; -ENOMEM,
 * -E2BIG. On failure ret_ids is as before. */
int inf_chat_turn(struct inf_chat *chat, enum inf_chat_tail tail, const struct inf_chat_message *messages,
                  size_t n_messages, struct shm_error *err, struct inf_ids *ret_ids);

#endif
