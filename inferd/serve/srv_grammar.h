/* SPDX-License-Identifier: MIT */
/*
 * Grammars over bytes, and which tokens may come next under one.
 *
 * A grammar is a recursive transition network: nodes that take a byte of a set, call
 * another node, branch, or return. What may be at a point of the text is a set of
 * (node, stack) pairs. Stacks and sets are interned and the steps between sets remembered, so that the
 * network becomes an automaton as it is used, and a token costs a table look-up a byte. A mask over the
 * vocabulary is kept for each set that was asked for.
 *
 * Building: from the end to the start; each function gives the node to start from and takes the node to go on
 * with. One thread at a time for a grammar; a vocabulary is only read.
 */
#ifndef SRV_GRAMMAR_H
#define SRV_GRAMMAR_H

#include "inferd/inf_tokenizer.h"
#include "shm/shm_error.h"

#include <jansson.h>

struct srv_grammar;
struct srv_vocab;

/* The vocabulary in the order of its bytes. n_logits: ids in a mask (at least the vocabulary's). Borrows the
 * tokenizer. NULL: no memory. */
struct srv_vocab *srv_vocab_create(const struct inf_tokenizer *tok, uint32_t n_logits);
void srv_vocab_destroy(struct srv_vocab **vocab);

/* Any JSON object. -ENOMEM. */
int srv_grammar_json(struct shm_error *err, struct srv_grammar **ret_grammar);

/* JSON that a schema describes (srv_schema.c says what of it is known). path: what the schema is called in
 * error lines. -ENOTSUP: a keyword is not supported, -EINVAL: the schema is broken (both name it); -E2BIG,
 * -ENOMEM. */
int srv_grammar_schema(const json_t *schema, const char *path, struct shm_error *err,
                       struct srv_grammar **ret_grammar);

void srv_grammar_destroy(struct srv_grammar **grammar);

/* Ids that may come next, stop tokens among them where the text may end: bits as inf_sampler_allow wants
 * them. Lives until the next call. NULL: *ret_rc is -ENOMEM, or -E2BIG where too much is open at a time. */
const uint64_t *srv_grammar_mask(struct srv_grammar *g, const struct srv_vocab *vocab,
                                 const int32_t *stop_ids, unsigned n_stop_ids, int *ret_rc);

/* Goes on by bytes. 0, -EINVAL: not in the language (the state is as before), -E2BIG, -ENOMEM. */
int srv_grammar_accept(struct srv_grammar *g, const char *bytes, size_t n);

/* The text may end here; and nothing but the end may follow. */
bool srv_grammar_may_end(const struct srv_grammar *g);
bool srv_grammar_must_end(const struct srv_grammar *g);

/* Building. Node numbers below 0 are errors (-ENOMEM, -E2BIG) and pass through. */
struct srv_build;
struct srv_build *srv_build_new(void);
void srv_build_free(struct srv_build **build);

int srv_build_return(struct srv_build *b); /* the end of a rule; of the whole for the last one */
int srv_build_bytes(struct srv_build *b, const char *text, size_t n, int next);
int srv_build_class(struct srv_build *b, const char *pairs, int next); /* "azAZ": any byte of a-z, A-Z */
int srv_build_call(struct srv_build *b, int rule, int next);
int srv_build_either(struct srv_build *b, int one, int other);
int srv_build_later(struct srv_build *b); /* a node that srv_build_set makes lead to another */
void srv_build_set(struct srv_build *b, int later, int node);

/* Takes the build, whatever comes of it. */
int srv_build_finish(struct srv_build **build, int start, struct shm_error *err,
                     struct srv_grammar **ret_grammar);

/* JSON rules, to be called: made once a build. */
enum srv_json {
    SRV_JSON_SPACE,
    SRV_JSON_CHAR,
    SRV_JSON_STRING,
    SRV_JSON_NUMBER,
    SRV_JSON_INTEGER,
    SRV_JSON_OBJECT,
    SRV_JSON_ARRAY,
    SRV_JSON_VALUE,
    SRV_JSON_COUNT
};
int srv_build_json(struct srv_build *b, enum srv_json rule);

/* The rule of a schema, to be called. */
int srv_build_schema(struct srv_build *b, const json_t *schema, const char *path, struct shm_error *err);

#endif
