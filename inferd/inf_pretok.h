/* SPDX-License-Identifier: MIT */
/*
 * Pre-tokenizer: cuts text into the pieces inside which BPE may merge.
 *
 * A table of patterns by GGUF name, compiled by PCRE2 (JIT where the system
 * allows it). Internal to the tokenizer, which serializes the calls. What is a
 * letter or a number follows the Unicode version of the installed PCRE2: 14.0
 * for 10.40 to 10.42, so that characters newer than that are cut as signs.
 */
#ifndef INF_PRETOK_H
#define INF_PRETOK_H

#include "shm/shm_error.h"

#include <stdbool.h>
#include <stddef.h>

#define INF_PRETOK_STAGES 6 /* patterns one after the other */

struct inf_pretok;

/* -ENOTSUP: no row of that name; -ENOMEM; -EINVAL: PCRE2 refuses the pattern. */
int inf_pretok_create(const char *name, size_t name_len, struct shm_error *err,
                      struct inf_pretok **ret_pretok);
void inf_pretok_destroy(struct inf_pretok **pretok);

/* A piece that is a token as a whole is that token, however merging would build it. */
bool inf_pretok_whole_words(const struct inf_pretok *pretok);

/* Length of the piece that starts at pos < len, 1..len - pos, in text that is
 * valid UTF-8 throughout; or a negative errno where PCRE2 gives up. A text is
 * cut from its start on: pos is 0, then the end of the piece before. */
long inf_pretok_next(struct inf_pretok *pretok, const char *text, size_t len, size_t pos);

#endif
