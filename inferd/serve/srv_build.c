/* SPDX-License-Identifier: MIT */
/* Building a network. */
#include "inferd/serve/srv_grammar_priv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NODES_MAX  (1 << 20)
#define JUMPS_MAX  64
#define PASSES_MAX 256

struct srv_build *srv_build_new(void)
{
    struct srv_build *b = calloc(1, sizeof *b);
    for (int i = 0; b && i < SRV_JSON_COUNT; i++)
        b->json[i] = -1;
    return b;
}

void srv_build_free(struct srv_build **build)
{
    if (*build) {
        free((*build)->nodes);
        free((*build)->sets);
    }
    free(*build);
    *build = NULL;
}

static int add(struct srv_build *b, enum srv_kind kind, int x, int y)
{
    if (x < 0 || y < 0)
        return x < 0 ? x : y;
    if (b->n_nodes == b->cap_nodes) {
        if (b->n_nodes >= NODES_MAX)
            return -E2BIG;
        int cap = 2 * b->cap_nodes + 256;
        struct srv_node *nodes = realloc(b->nodes, (size_t)cap * sizeof *nodes);
        if (!nodes)
            return -ENOMEM;
        b->nodes = nodes;
        b->cap_nodes = cap;
    }
    b->nodes[b->n_nodes] = (struct srv_node){kind, x, y, false};
    return b->n_nodes++;
}

static int add_set(struct srv_build *b, const struct srv_set *set)
{
    for (int i = 0; i < b->n_sets; i++)
        if (memcmp(&b->sets[i], set, sizeof *set) == 0)
            return i;
    if (b->n_sets == b->cap_sets) {
        int cap = 2 * b->cap_sets + 64;
        struct srv_set *sets = realloc(b->sets, (size_t)cap * sizeof *sets);
        if (!sets)
            return -ENOMEM;
        b->sets = sets;
        b->cap_sets = cap;
    }
    b->sets[b->n_sets] = *set;
    return b->n_sets++;
}

int srv_build_return(struct srv_build *b)
{
    return add(b, RETURN, 0, 0);
}

int srv_build_class(struct srv_build *b, const char *pairs, int next)
{
    struct srv_set set = {{0}};
    for (; pairs[0] && pairs[1]; pairs += 2)
        for (unsigned c = (unsigned char)pairs[0]; c <= (unsigned char)pairs[1]; c++)
            set.bits[c / 64] |= (uint64_t)1 << c % 64;
    return add(b, BYTES, add_set(b, &set), next);
}

int srv_build_bytes(struct srv_build *b, const char *text, size_t n, int next)
{
    while (n > 0) {
        struct srv_set set = {{0}};
        unsigned c = (unsigned char)text[--n];
        set.bits[c / 64] |= (uint64_t)1 << c % 64;
        next = add(b, BYTES, add_set(b, &set), next);
    }
    return next;
}

int srv_build_call(struct srv_build *b, int rule, int next)
{
    return add(b, CALL, rule, next);
}

int srv_build_either(struct srv_build *b, int one, int other)
{
    return add(b, EITHER, one, other);
}

int srv_build_later(struct srv_build *b)
{
    return add(b, JUMP, 0, 0);
}

void srv_build_set(struct srv_build *b, int later, int node)
{
    if (later >= 0 && node >= 0)
        b->nodes[later].a = node;
}

static bool is_live(const struct srv_build *b, int node)
{
    for (int jumps = 0; b->nodes[node].kind == JUMP; node = b->nodes[node].a)
        if (jumps++ == JUMPS_MAX)
            return b->nodes[node].live;
    return b->nodes[node].live;
}

void srv_build_live(struct srv_build *b)
{
    bool more = true;
    int pass = 0;
    for (; more && pass < PASSES_MAX; pass++) {
        more = false;
        for (int i = 0; i < b->n_nodes; i++) {
            struct srv_node *n = &b->nodes[i];
            if (n->live)
                continue;
            switch (n->kind) {
            case RETURN:
                n->live = true;
                break;
            case BYTES:
                n->live = is_live(b, n->b);
                break;
            case CALL:
                n->live = is_live(b, n->a) && is_live(b, n->b);
                break;
            case EITHER:
                n->live = is_live(b, n->a) || is_live(b, n->b);
                break;
            case JUMP:
                n->live = is_live(b, n->a);
                break;
            }
            more = more || n->live;
        }
    }
    for (int i = 0; more && i < b->n_nodes; i++) /* not known: not refused */
        b->nodes[i].live = true;
}
