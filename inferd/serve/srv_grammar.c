/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_grammar.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define NODES_MAX   (1 << 20)
#define STATES_MAX  32768
#define STACKS_MAX  (1 << 20)
#define DEPTH_MAX   256  /* of nesting */
#define THREADS_MAX 4096 /* alternatives open at a time */
#define MASKS_MAX   256
#define UNKNOWN     INT32_MIN
#define DEAD        -1

enum kind { BYTES, CALL, EITHER, JUMP, RETURN };

struct node {
    enum kind kind;
    int a, b; /* BYTES: set, next; CALL: rule, next; EITHER: both; JUMP: where to */
};

struct set {
    uint64_t bits[4];
};

struct srv_build {
    struct node *nodes;
    int n_nodes, cap_nodes;
    struct set *sets;
    int n_sets, cap_sets;
    int json[SRV_JSON_COUNT];
};

/* A return address on another stack; 0 is the empty one. */
struct stack {
    int node, below, depth;
};

struct state {
    uint64_t *threads; /* node << 32 | stack, ascending; the end of all is node END */
    unsigned n;
    int32_t *step; /* [256], UNKNOWN, DEAD or a state; NULL: not needed yet */
};

struct srv_grammar {
    struct srv_build *build;
    struct stack *stacks;
    int n_stacks, cap_stacks;
    int *stack_table;
    int stack_table_size;
    struct state *states;
    int n_states, cap_states;
    int *state_table;
    int state_table_size;
    uint64_t *threads; /* being collected */
    unsigned n_threads;
    int now;
    int error;
    struct mask {
        int state;
        uint64_t *bits;
    } masks[MASKS_MAX];
    unsigned next_mask;
};

#define END (1u << 30) /* node number of the end of the whole */

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

static int add(struct srv_build *b, enum kind kind, int x, int y)
{
    if (x < 0 || y < 0)
        return x < 0 ? x : y;
    if (b->n_nodes == b->cap_nodes) {
        if (b->n_nodes >= NODES_MAX)
            return -E2BIG;
        int cap = 2 * b->cap_nodes + 256;
        struct node *nodes = realloc(b->nodes, (size_t)cap * sizeof *nodes);
        if (!nodes)
            return -ENOMEM;
        b->nodes = nodes;
        b->cap_nodes = cap;
    }
    b->nodes[b->n_nodes] = (struct node){kind, x, y};
    return b->n_nodes++;
}

static int add_set(struct srv_build *b, const struct set *set)
{
    for (int i = 0; i < b->n_sets; i++)
        if (memcmp(&b->sets[i], set, sizeof *set) == 0)
            return i;
    if (b->n_sets == b->cap_sets) {
        int cap = 2 * b->cap_sets + 64;
        struct set *sets = realloc(b->sets, (size_t)cap * sizeof *sets);
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
    struct set set = {{0}};
    for (; pairs[0] && pairs[1]; pairs += 2)
        for (unsigned c = (unsigned char)pairs[0]; c <= (unsigned char)pairs[1]; c++)
            set.bits[c / 64] |= (uint64_t)1 << c % 64;
    return add(b, BYTES, add_set(b, &set), next);
}

int srv_build_bytes(struct srv_build *b, const char *text, size_t n, int next)
{
    while (n > 0) {
        struct set set = {{0}};
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

int *srv_build_memo(struct srv_build *b, enum srv_json rule)
{
    return &b->json[rule];
}

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
        struct stack *stacks =
            g->n_stacks < STACKS_MAX ? realloc(g->stacks, (size_t)cap * sizeof *stacks) : NULL;
        if (!stacks)
            return g->error = g->n_stacks < STACKS_MAX ? -ENOMEM : -E2BIG, -1;
        g->stacks = stacks;
        g->cap_stacks = cap;
    }
    g->stacks[g->n_stacks] = (struct stack){node, below, g->stacks[below].depth + 1};
    return g->stack_table[at] = g->n_stacks++;
}

static void collect(struct srv_grammar *g, uint64_t thread)
{
    for (unsigned i = 0; i < g->n_threads; i++)
        if (g->threads[i] == thread)
            return;
    if (g->n_threads == THREADS_MAX) {
        g->error = -E2BIG;
        return;
    }
    g->threads[g->n_threads++] = thread;
}

/* Follows everything that takes no byte. Recursion is bounded by `fuel`: a rule that calls itself first never
 * ends. */
static void follow(struct srv_grammar *g, int node, int stack, int fuel)
{
    while (!g->error) {
        const struct node *n = &g->build->nodes[node];
        if (!fuel--) {
            g->error = -E2BIG;
            return;
        }
        switch (n->kind) {
        case BYTES:
            collect(g, (uint64_t)node << 32 | (unsigned)stack);
            return;
        case EITHER:
            follow(g, n->a, stack, fuel);
            node = n->b;
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

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The state of the collected threads; DEAD for none, UNKNOWN sets g->error. */
static int intern(struct srv_grammar *g)
{
    if (g->error)
        return UNKNOWN;
    if (!g->n_threads)
        return DEAD;
    qsort(g->threads, g->n_threads, sizeof *g->threads, by_value);
    if (2 * g->n_states >= g->state_table_size) {
        int size = 2 * g->state_table_size + 512;
        int *table = calloc((size_t)size, sizeof *table); /* number + 1 */
        if (!table)
            return g->error = -ENOMEM, UNKNOWN;
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
        struct state *states =
            g->n_states < STATES_MAX ? realloc(g->states, (size_t)cap * sizeof *states) : NULL;
        if (!states)
            return g->error = g->n_states < STATES_MAX ? -ENOMEM : -E2BIG, UNKNOWN;
        g->states = states;
        g->cap_states = cap;
    }
    struct state *s = &g->states[g->n_states];
    *s = (struct state){.n = g->n_threads, .threads = malloc(bytes)};
    if (!s->threads)
        return g->error = -ENOMEM, UNKNOWN;
    memcpy(s->threads, g->threads, bytes);
    g->state_table[h] = g->n_states + 1;
    return g->n_states++;
}

/* Where a byte leads: a state, DEAD, or UNKNOWN with g->error set. */
static int step(struct srv_grammar *g, int state, unsigned char byte)
{
    struct state *s = &g->states[state];
    if (!s->step) {
        s->step = malloc(256 * sizeof *s->step);
        if (!s->step)
            return g->error = -ENOMEM, UNKNOWN;
        for (int i = 0; i < 256; i++)
            s->step[i] = UNKNOWN;
    }
    if (s->step[byte] != UNKNOWN)
        return s->step[byte];
    g->n_threads = 0;
    for (unsigned i = 0; i < g->states[state].n && !g->error; i++) {
        uint64_t t = g->states[state].threads[i];
        if (t >> 32 == END)
            continue;
        const struct node *n = &g->build->nodes[t >> 32];
        if (g->build->sets[n->a].bits[byte / 64] >> byte % 64 & 1)
            follow(g, n->b, (int)(uint32_t)t, 1 << 16);
    }
    int to = intern(g);
    if (to != UNKNOWN)
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
        follow(g, start, 0, 1 << 16);
        g->now = intern(g);
        rc = g->error ? g->error : g->now == DEAD ? -EINVAL : 0;
    }
    if (rc) {
        srv_grammar_destroy(&g);
        return shm_error_set(err, rc,
                             rc == -E2BIG    ? "the grammar is too large"
                             : rc == -EINVAL ? "the grammar allows nothing"
                                             : "no memory for the grammar");
    }
    *ret_grammar = g;
    return 0;
}

void srv_grammar_destroy(struct srv_grammar **grammar)
{
    struct srv_grammar *g = *grammar;
    if (!g)
        return;
    srv_build_free(&g->build);
    for (int i = 0; i < g->n_states; i++) {
        free(g->states[i].threads);
        free(g->states[i].step);
    }
    for (unsigned i = 0; i < MASKS_MAX; i++)
        free(g->masks[i].bits);
    free(g->states);
    free(g->state_table);
    free(g->stacks);
    free(g->stack_table);
    free(g->threads);
    free(g);
    *grammar = NULL;
}

int srv_grammar_accept(struct srv_grammar *g, const char *bytes, size_t n)
{
    int state = g->now;
    for (size_t i = 0; i < n; i++) {
        state = step(g, state, (unsigned char)bytes[i]);
        if (state == UNKNOWN)
            return g->error;
        if (state == DEAD)
            return -EINVAL;
    }
    g->now = state;
    return 0;
}

bool srv_grammar_may_end(const struct srv_grammar *g)
{
    const struct state *s = &g->states[g->now];
    return s->threads[s->n - 1] >> 32 == END;
}

bool srv_grammar_must_end(const struct srv_grammar *g)
{
    return g->states[g->now].n == 1 && srv_grammar_may_end(g);
}

struct srv_vocab {
    const struct inf_tokenizer *tok;
    uint32_t n, words; /* tokens that are text; words of a mask */
    struct entry {
        const char *bytes;
        uint32_t len, common; /* bytes; of them as the entry before */
        int32_t id;
    } * entries;
    size_t longest;
    int *states; /* [longest + 1] of a walk */
};

static int by_bytes(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    int c = memcmp(x->bytes, y->bytes, x->len < y->len ? x->len : y->len);
    return c ? c : x->len < y->len ? -1 : x->len > y->len ? 1 : x->id - y->id;
}

struct srv_vocab *srv_vocab_create(const struct inf_tokenizer *tok, uint32_t n_logits)
{
    uint32_t size = inf_tokenizer_size(tok);
    struct srv_vocab *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->tok = tok;
    v->words = (n_logits + 63) / 64;
    v->longest = inf_tokenizer_longest(tok);
    v->entries = calloc(size + 1u, sizeof *v->entries);
    v->states = calloc(v->longest + 1, sizeof *v->states);
    if (!v->entries || !v->states) {
        srv_vocab_destroy(&v);
        return NULL;
    }
    for (uint32_t i = 0; i < size && i < n_logits; i++) {
        const char *bytes;
        size_t len;
        if (inf_tokenizer_is_control(tok, (int32_t)i) || inf_tokenizer_bytes(tok, (int32_t)i, &bytes, &len) ||
            !len)
            continue;
        v->entries[v->n++] = (struct entry){.bytes = bytes, .len = (uint32_t)len, .id = (int32_t)i};
    }
    qsort(v->entries, v->n, sizeof *v->entries, by_bytes);
    for (uint32_t i = 1; i < v->n; i++) {
        const struct entry *before = &v->entries[i - 1];
        struct entry *e = &v->entries[i];
        while (e->common < e->len && e->common < before->len &&
               e->bytes[e->common] == before->bytes[e->common])
            e->common++;
    }
    return v;
}

void srv_vocab_destroy(struct srv_vocab **vocab)
{
    if (*vocab) {
        free((*vocab)->entries);
        free((*vocab)->states);
    }
    free(*vocab);
    *vocab = NULL;
}

/* Sets the bit of each token that leads somewhere. Tokens that share a dead beginning are passed over. */
static int fill(struct srv_grammar *g, const struct srv_vocab *v, uint64_t *bits)
{
    uint32_t dead = UINT32_MAX; /* this many bytes of the last token lead nowhere */
    v->states[0] = g->now;
    for (uint32_t i = 0; i < v->n; i++) {
        const struct entry *e = &v->entries[i];
        if (e->common >= dead)
            continue;
        dead = UINT32_MAX;
        for (uint32_t k = e->common; k < e->len; k++) {
            int to = step(g, v->states[k], (unsigned char)e->bytes[k]);
            if (to == UNKNOWN)
                return g->error;
            if (to == DEAD) {
                dead = k + 1;
                break;
            }
            v->states[k + 1] = to;
        }
        if (dead == UINT32_MAX)
            bits[e->id / 64] |= (uint64_t)1 << e->id % 64;
    }
    return 0;
}

const uint64_t *srv_grammar_mask(struct srv_grammar *g, const struct srv_vocab *v, const int32_t *stop_ids,
                                 unsigned n_stop_ids)
{
    for (unsigned i = 0; i < MASKS_MAX; i++)
        if (g->masks[i].bits && g->masks[i].state == g->now)
            return g->masks[i].bits;
    struct mask *m = &g->masks[g->next_mask++ % MASKS_MAX];
    if (!m->bits)
        m->bits = malloc(v->words * sizeof *m->bits);
    if (!m->bits)
        return NULL;
    memset(m->bits, 0, v->words * sizeof *m->bits);
    m->state = g->now;
    if (fill(g, v, m->bits)) {
        m->state = DEAD;
        return NULL;
    }
    if (srv_grammar_may_end(g)) {
        for (uint32_t i = 0; i < inf_tokenizer_size(v->tok) && i < v->words * 64; i++)
            if (inf_tokenizer_is_stop(v->tok, (int32_t)i))
                m->bits[i / 64] |= (uint64_t)1 << i % 64;
        for (unsigned i = 0; i < n_stop_ids; i++)
            if (stop_ids[i] >= 0 && (uint32_t)stop_ids[i] < v->words * 64)
                m->bits[stop_ids[i] / 64] |= (uint64_t)1 << stop_ids[i] % 64;
    }
    return m->bits;
}
