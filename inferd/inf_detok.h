/* SPDX-License-Identifier: MIT */
/*
 * Token ids to text as they come, always whole UTF-8 characters.
 *
 * Bytes of an unfinished character are held back until the next token
 * finishes it. Bytes that can no longer become a character are replaced by
 * U+FFFD, one for each longest broken piece. One stream, one thread; borrows
 * the tokenizer. No allocation after creation.
 */
#ifndef INF_DETOK_H
#define INF_DETOK_H

#include "inferd/inf_tokenizer.h"

struct inf_detok;

/* show_special: control tokens are written out, else skipped. 0 or -ENOMEM. */
int inf_detok_create(const struct inf_tokenizer *tok, bool show_special, struct inf_detok **ret_detok);
void inf_detok_destroy(struct inf_detok **detok);

/* The text that id completes: valid UTF-8, NUL-terminated, maybe empty; it
 * lives until the next call. 0 or -ERANGE (id not in the vocabulary). */
int inf_detok_push(struct inf_detok *detok, int32_t id, const char **ret_text, size_t *ret_len);

/* End of the answer: what was held back, as U+FFFD, or nothing. The stream is
 * fresh afterwards. */
void inf_detok_flush(struct inf_detok *detok, const char **ret_text, size_t *ret_len);

#endif
