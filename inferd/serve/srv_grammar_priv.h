/* SPDX-License-Identifier: MIT */
/* Inside of grammars: the network (srv_build.c), the automaton it becomes (srv_grammar.c), masks
 * (srv_vocab.c). */
#ifndef SRV_GRAMMAR_PRIV_H
#define SRV_GRAMMAR_PRIV_H

#include "inferd/serve/srv_grammar.h"

enum srv_kind { BYTES, CALL, EITHER, JUMP, RETURN };

struct srv_node {
    enum srv_kind kind;
    int a, b;  /* BYTES: set, next; CALL: rule, next; EITHER: both; JUMP: where to */
    bool live; /* its rule's end can be reached from it (srv_build_live) */
};

struct srv_set {
    uint64_t bits[4];
};

struct srv_build {
    struct srv_node *nodes;
    int n_nodes, cap_nodes;
    struct srv_set *sets;
    int n_sets, cap_sets;
    int json[SRV_JSON_COUNT];
};

#define SRV_MASKS_MAX 256
#define SRV_UNKNOWN   INT32_MIN
#define SRV_DEAD      -1

/* A return address on another stack; 0 is the empty one. */
struct srv_stack {
    int node, below, depth;
};

struct srv_state_set {
    uint64_t *threads; /* node << 32 | stack, ascending; the end of all is node END */
    unsigned n;
    int32_t *step; /* [256], SRV_UNKNOWN, SRV_DEAD or a state; NULL: not needed yet */
};

struct srv_grammar {
    struct srv_build *build;
    struct srv_stack *stacks;
    int n_stacks, cap_stacks;
    int *stack_table;
    int stack_table_size;
    struct srv_state_set *states;
    int n_states, cap_states;
    int *state_table;
    int state_table_size;
    uint64_t *threads; /* being collected */
    unsigned n_threads;
    struct {
        uint64_t at; /* node << 32 | stack */
        uint64_t pass;
    } * seen; /* where this pass has been */
    unsigned n_seen, seen_size;
    int fuel; /* nodes that the pass may still follow */
    uint64_t pass;
    int now;
    int error;
    struct mask {
        int state;
        uint64_t *bits;
    } masks[SRV_MASKS_MAX];
    unsigned next_mask;
};

/* Finds the nodes that lead to an end. Schemas may hold values without one ({"a": {"a": ...): no thread is to
 * enter them. */
void srv_build_live(struct srv_build *b);
int srv_build_text(struct srv_build *b, const char *text, int next); /* NUL-terminated */
int srv_build_space(struct srv_build *b, int next);                  /* a little of it, or none */
/* Rules: {"...": VALUE, ...} and [VALUE, ...] of one rule for the values; at least `least` and at most `most`
 * (below 0: any number) of them. */
int srv_build_map(struct srv_build *b, int value);
int srv_build_list(struct srv_build *b, int value, int least, int most);

/* Where a byte leads: a state, SRV_DEAD, or SRV_UNKNOWN with g->error set. */
int srv_grammar_step(struct srv_grammar *g, int state, unsigned char byte);

/* The state that g is in, and nothing else that was remembered. 0 or -ENOMEM. For when there are too many. */
int srv_grammar_compact(struct srv_grammar *g);

#endif
