/* SPDX-License-Identifier: MIT */
/*
 * Stop strings across token borders: text goes in as it is written, and out
 * as far as it can't be the beginning of a stop string any more. Works on
 * whole UTF-8 characters if it is given such. One thread.
 */
#ifndef SRV_TEXT_H
#define SRV_TEXT_H

#include <stdbool.h>
#include <stddef.h>

struct srv_text;

/* stops: n NUL-terminated, non-empty strings, borrowed. NULL: no memory. */
struct srv_text *srv_text_new(char *const *stops, unsigned n);
void srv_text_free(struct srv_text **text);

/* *ret_out, *ret_n: what may be shown now; lives until the next call. The number of the stop string that is
 * complete (the text before it is the last one shown), -1: none, -2: no memory. Where two are, the one that
 * begins first; of those the longer one. */
int srv_text_push(struct srv_text *text, const char *in, size_t n, const char **ret_out, size_t *ret_n);

/* The end of the answer: what was held back. */
void srv_text_flush(struct srv_text *text, const char **ret_out, size_t *ret_n);

#endif
