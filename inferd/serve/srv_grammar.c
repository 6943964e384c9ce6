/* SPDX-License-Identifier: MIT */
/* A network as an automaton that is made while it is used. */
#include "inferd/serve/srv_grammar_priv.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define STATES_MAX     32768
#define STACKS_MAX     (1 << 20)
#define DEPTH_MAX      256  /* of nesting */
#define THREADS_MAX    4096 /* alternatives open at a time */
#define PATH_MAX_NODES (1 << 16)
#define FUEL_MAX       (1 << 20)  /* nodes followed for one byte */
#define END            (1u << 30) /* node number of the end of the whole */

static uint64_t mix(uint64_t h)
{
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9u;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

/* The stack with a return address on top; -1 sets g->error. */
static int push(struct srv_grammar *g, int node, int below)
{
    if (2 * g->n_stacks >= g->stack_table_size) {
        int size = 2 * g->stack_table_size + 1024;
        int *table = calloc((size_t)size, sizeof *table);
        if (!table)
            return g->error = -ENOMEM, -1;
        for (int i = 1; i < g->n_stacks; i++) {
            uint64_t at =
                mix((uint64_t)g->stacks[i].node << 32 | (unsigned)g->stacks[i].below) % (uint64_t)size;
            while (table[at])
                at = (at + 1) % (uint64_t)size;
            table[at] = i;
        }
        free(g->stack_table);
        g->stack_table = table;
        g->stack_table_size = size;
    }
    uint64_t at = mix((uint64_t)node << 32 | (unsigned)below) % (uint64_t)g->stack_table_size;
    for (int i; (i = g->stack_table[at]); at = (at + 1) % (uint64_t)g->stack_table_size)
        if (g->stacks[i].node == node && g->stacks[i].below == below)
            return i;
    if (g->n_stacks == g->cap_stacks) {
        int cap = 2 * g->cap_stacks + 1024;
        struct srv_stack *stacks =
            g->n_stacks < STACKS_MAX ? realloc(g->stacks, (size_t)cap * sizeof *stacks) : NULL;
        if (!stacks)
            return g->error = g->n_stacks < STACKS_MAX ? -ENOMEM : -E2BIG, -1;
        g->stacks = stacks;
        g->cap_stacks = cap;
    }
    g->stacks[g->n_stacks] = (struct srv_stack){node, below, g->stacks[below].depth + 1};
    return g->stack_table[at] = g->n_stacks++;
}

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* In order, each once. */
static void tidy(struct srv_grammar *g)
{
    unsigned n = 0;
    qsort(g->threads, g->n_threads, sizeof *g->threads, by_value);
    for (unsigned i = 0; i < g->n_threads; i++)
        if (!n || g->threads[i] != g->threads[n - 1])
            g->threads[n++] = g->threads[i];
    g->n_threads = n;
}

static void collect(struct srv_grammar *g, uint64_t thread)
{
    if (g->n_threads == THREADS_MAX)
        tidy(g);
    if (g->n_threads == THREADS_MAX)
        g->error = -E2BIG;
    else
        g->threads[g->n_threads++] = thread;
}

static void begin_pass(struct srv_grammar *g)
{
    g->pass++;
    g->n_seen = 0;
    g->n_threads = 0;
    g->fuel = FUEL_MAX;
}

/* Whether this pass comes here for the first time. Alternatives that meet again are followed once, else their
 * number would double at each meeting; and a rule that calls itself first adds nothing. */
static bool first_time(struct srv_grammar *g, int node, int stack)
{
    if (2 * g->n_seen >= g->seen_size) {
        unsigned size = 4 * g->seen_size + 256;
        void *old = g->seen;
        __typeof__(g->seen) seen = calloc(size, sizeof *seen);
        if (!seen)
            return g->error = -ENOMEM, false;
        for (unsigned i = 0; i < g->seen_size; i++) {
            if (g->seen[i].pass != g->pass)
                continue;
            uint64_t h = mix(g->seen[i].at) % size;
            while (seen[h].pass)
                h = (h + 1) % size;
            seen[h] = g->seen[i];
        }
        free(old);
        g->seen = seen;
        g->seen_size = size;
    }
    uint64_t at = (uint64_t)node << 32 | (unsigned)stack, h = mix(at) % g->seen_size;
    for (; g->seen[h].pass == g->pass; h = (h + 1) % g->seen_size)
        if (g->seen[h].at == at)
            return false;
    g->seen[h].at = at;
    g->seen[h].pass = g->pass;
    g->n_seen++;
    return true;
}

/* Follows everything that takes no byte and may still end. Recursion is bounded by `fuel`. */
static void follow(struct srv_grammar *g, int node, int stack, int fuel)
{
    while (!g->error) {
        const struct srv_node *n = &g->build->nodes[node];
        if (!fuel-- || !g->fuel--) {
            g->error = -E2BIG;
            return;
        }
        if (!n->live || ((n->kind == EITHER || n->kind == JUMP) && !first_time(g, node, stack)))
            return;
        switch (n->kind) {
        case BYTES:
            collect(g, (uint64_t)node << 32 | (unsigned)stack);
            return;
        case EITHER:
            follow(g, n->b, stack,
                   fuel); /* lists of alternatives nest in the first one: no recursion there */
            node = n->a;
            break;
        case JUMP:
            node = n->a;
            break;
        case CALL:
            if (g->build->nodes[n->b].kind != RETURN) { /* else its return is ours */
                if (g->stacks[stack].depth >= DEPTH_MAX)
                    return;
                int b = n->b;
                int rule = n->a;
                stack = push(g, b, stack);
                if (stack < 0)
                    return;
                node = rule;
            } else {
                node = n->a;
            }
            break;
        case RETURN:
            if (!stack) {
                collect(g, (uint64_t)END << 32);
                return;
            }
            node = g->stacks[stack].node;
            stack = g->stacks[stack].below;
            break;
        }
    }
}

/* The state of the collected threads; SRV_DEAD for none, SRV_UNKNOWN sets g->error. */
static int intern(struct srv_grammar *g)
{
    if (g->error)
        return SRV_UNKNOWN;
    if (!g->n_threads)
        return SRV_DEAD;
    tidy(g);
    if (2 * g->n_states >= g->state_table_size) {
        int size = 2 * g->state_table_size + 512;
        int *table = calloc((size_t)size, sizeof *table); /* number + 1 */
        if (!table)
            return g->error = -ENOMEM, SRV_UNKNOWN;
        for (int i = 0; i < g->n_states; i++) {
            uint64_t h = 0;
            for (unsigned k = 0; k < g->states[i].n; k++)
                h = mix(h ^ g->states[i].threads[k]);
            h %= (uint64_t)size;
            while (table[h])
                h = (h + 1) % (uint64_t)size;
            table[h] = i + 1;
        }
        free(g->state_table);
        g->state_table = table;
        g->state_table_size = size;
    }
    uint64_t h = 0;
    size_t bytes = g->n_threads * sizeof *g->threads;
    for (unsigned k = 0; k < g->n_threads; k++)
        h = mix(h ^ g->threads[k]);
    h %= (uint64_t)g->state_table_size;
    for (int i; (i = g->state_table[h]); h = (h + 1) % (uint64_t)g->state_table_size)
        if (g->states[i - 1].n == g->n_threads && memcmp(g->states[i - 1].threads, g->threads, bytes) == 0)
            return i - 1;
    if (g->n_states == g->cap_states) {
        int cap = 2 * g->cap_states + 256;
        struct srv_state_set *states =
            g->n_states < STATES_MAX ? realloc(g->states, (size_t)cap * sizeof *states) : NULL;
        if (!states)
            return g->error = g->n_states < STATES_MAX ? -ENOMEM : -E2BIG, SRV_UNKNOWN;
        g->states = states;
        g->cap_states = cap;
    }
    struct srv_state_set *s = &g->states[g->n_states];
    *s = (struct srv_state_set){.n = g->n_threads, .threads = malloc(bytes)};
    if (!s->threads)
        return g->error = -ENOMEM, SRV_UNKNOWN;
    memcpy(s->threads, g->threads, bytes);
    g->state_table[h] = g->n_states + 1;
    return g->n_states++;
}

/* Where a byte leads: a state, SRV_DEAD, or SRV_UNKNOWN with g->error set. */
int srv_grammar_step(struct srv_grammar *g, int state, unsigned char byte)
{
    struct srv_state_set *s = &g->states[state];
    if (!s->step) {
        s->step = malloc(256 * sizeof *s->step);
        if (!s->step)
            return g->error = -ENOMEM, SRV_UNKNOWN;
        for (int i = 0; i < 256; i++)
            s->step[i] = SRV_UNKNOWN;
    }
    if (s->step[byte] != SRV_UNKNOWN)
        return s->step[byte];
    begin_pass(g);
    for (unsigned i = 0; i < g->states[state].n && !g->error; i++) {
        uint64_t t = g->states[state].threads[i];
        if (t >> 32 == END)
            continue;
        const struct srv_node *n = &g->build->nodes[t >> 32];
        if (g->build->sets[n->a].bits[byte / 64] >> byte % 64 & 1)
            follow(g, n->b, (int)(uint32_t)t, PATH_MAX_NODES);
    }
    int to = intern(g);
    if (to != SRV_UNKNOWN)
        g->states[state].step[byte] = to;
    return to;
}

int srv_build_finish(struct srv_build **build, int start, struct shm_error *err,
                     struct srv_grammar **ret_grammar)
{
    struct srv_grammar *g = calloc(1, sizeof *g);
    int rc = start < 0 ? start : 0;
    if (g) {
        g->build = *build;
        *build = NULL;
        g->n_stacks = 1;
        g->cap_stacks = 256;
        g->stacks = calloc((size_t)g->cap_stacks, sizeof *g->stacks);
        g->threads = calloc(THREADS_MAX, sizeof *g->threads);
    } else {
        srv_build_free(build);
    }
    if (!g || !g->stacks || !g->threads)
        rc = -ENOMEM;
    if (!rc) {
        srv_build_live(g->build);
        begin_pass(g);
        follow(g, start, 0, PATH_MAX_NODES);
        g->now = intern(g);
        rc = g->error ? g->error : g->now == SRV_DEAD ? -EINVAL : 0;
    }
    if (rc) {
        srv_grammar_destroy(&g);
        return shm_error_set(err, rc,
                             rc == -E2BIG    ? "the grammar is too large"
                             : rc == -EINVAL ? "the grammar allows nothing: no value has an end"
                                             : "no memory for the grammar");
    }
    *ret_grammar = g;
    return 0;
}

/* All that was remembered. */
static void forget(struct srv_grammar *g)
{
    for (int i = 0; i < g->n_states; i++) {
        free(g->states[i].threads);
        free(g->states[i].step);
    }
    for (unsigned i = 0; i < SRV_MASKS_MAX; i++)
        free(g->masks[i].bits);
    memset(g->masks, 0, sizeof g->masks);
    free(g->states);
    free(g->state_table);
    free(g->stacks);
    free(g->stack_table);
    g->states = NULL;
    g->stacks = NULL;
    g->state_table = g->stack_table = NULL;
    g->n_states = g->cap_states = g->state_table_size = 0;
    g->n_stacks = g->cap_stacks = g->stack_table_size = 0;
}

void srv_grammar_destroy(struct srv_grammar **grammar)
{
    struct srv_grammar *g = *grammar;
    if (!g)
        return;
    srv_build_free(&g->build);
    forget(g);
    free(g->seen);
    free(g->threads);
    free(g);
    *grammar = NULL;
}

int srv_grammar_compact(struct srv_grammar *g)
{
    const struct srv_state_set *now = &g->states[g->now];
    unsigned n = now->n;
    /* Each thread's node, then its return addresses from the bottom, then -1. */
    size_t words = 0, at = 0;
    for (unsigned i = 0; i < n; i++)
        words += 2 + (size_t)g->stacks[(uint32_t)now->threads[i]].depth;
    int *kept = calloc(words + 1, sizeof *kept);
    if (!kept)
        return -ENOMEM;
    for (unsigned i = 0; i < n; i++) {
        int stack = (int)(uint32_t)now->threads[i], depth = g->stacks[stack].depth;
        kept[at] = (int)(now->threads[i] >> 32);
        for (int k = depth; k >= 1; k--, stack = g->stacks[stack].below)
            kept[at + (size_t)k] = g->stacks[stack].node;
        at += (size_t)depth + 1;
        kept[at++] = -1;
    }
    forget(g);
    g->error = 0;
    g->n_threads = 0;
    g->n_stacks = 1;
    g->cap_stacks = 256;
    g->stacks = calloc((size_t)g->cap_stacks, sizeof *g->stacks);
    at = 0;
    for (unsigned i = 0; g->stacks && i < n; i++) {
        int node = kept[at++], stack = 0;
        for (; kept[at] >= 0 && stack >= 0; at++)
            stack = push(g, kept[at], stack);
        at++;
        if (stack >= 0)
            collect(g, (uint64_t)(unsigned)node << 32 | (unsigned)stack);
    }
    free(kept);
    g->now = g->stacks ? intern(g) : SRV_UNKNOWN;
    if (g->now >= 0)
        return 0;
    g->error = -ENOMEM;
    return g->error;
}

static int accept_bytes(struct srv_grammar *g, const char *bytes, size_t n)
{
    int state = g->now;
    for (size_t i = 0; i < n; i++) {
        state = srv_grammar_step(g, state, (unsigned char)bytes[i]);
        if (state == SRV_UNKNOWN)
            return g->error;
        if (state == SRV_DEAD)
            return -EINVAL;
    }
    g->now = state;
    return 0;
}

int srv_grammar_accept(struct srv_grammar *g, const char *bytes, size_t n)
{
    if (g->now < 0)
        return g->error;
    int rc = accept_bytes(g, bytes, n);
    if (rc == -E2BIG && srv_grammar_compact(g) == 0)
        rc = accept_bytes(g, bytes, n);
    return rc;
}

bool srv_grammar_may_end(const struct srv_grammar *g)
{
    const struct srv_state_set *s = g->now < 0 ? NULL : &g->states[g->now];
    return s && s->threads[s->n - 1] >> 32 == END;
}

bool srv_grammar_must_end(const struct srv_grammar *g)
{
    return srv_grammar_may_end(g) && g->states[g->now].n == 1;
}
