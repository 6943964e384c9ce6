/* SPDX-License-Identifier: MIT */
/*
 * The shipped model's tokenizer for tests: tables read from the GGUF file and
 * laid out as the catalog has them. The tables are private, writable copies,
 * so that a test may damage them. A failure aborts the test program.
 */
#ifndef TOK_FIXTURE_H
#define TOK_FIXTURE_H

#include "inferd/inf_tokenizer.h"

struct tok_fixture {
    struct inf_tokenizer_src src;
    uint32_t *token_offsets, *merge_offsets; /* what src points to, writable */
    char *token_bytes, *merge_bytes;
    int32_t *types;
    char pre[64];
    char *chat_template;
    size_t chat_template_len;
};

void tok_fixture_open(struct tok_fixture *ret_fixture);
void tok_fixture_close(struct tok_fixture *fixture);

/* The tokenizer of the undamaged tables. */
struct inf_tokenizer *tok_fixture_tokenizer(void);

/* Path of a file in the source tree, in a static buffer. */
const char *tok_fixture_path(const char *name);

#endif
