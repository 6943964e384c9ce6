/* SPDX-License-Identifier: MIT */
/* The vocabulary in order of its bytes, and masks over it. */
#include "inferd/serve/srv_grammar_priv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct srv_vocab {
    const struct inf_tokenizer *tok;
    uint32_t n, words; /* tokens that are text; words of a mask */
    struct entry {
        const char *bytes;
        uint32_t len, common; /* bytes; of them as the entry before */
        int32_t id;
    } * entries;
    size_t longest;
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
    if (!v->entries) {
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
    if (*vocab)
        free((*vocab)->entries);
    free(*vocab);
    *vocab = NULL;
}

/* Sets the bit of each token that leads somewhere. Tokens that share a dead beginning are passed over. */
static int walk(struct srv_grammar *g, const struct srv_vocab *v, int *states, uint64_t *bits)
{
    uint32_t dead = UINT32_MAX; /* this many bytes of the last token lead nowhere */
    states[0] = g->now;
    for (uint32_t i = 0; i < v->n; i++) {
        const struct entry *e = &v->entries[i];
        if (e->common >= dead)
            continue;
        dead = UINT32_MAX;
        for (uint32_t k = e->common; k < e->len; k++) {
            int to = srv_grammar_step(g, states[k], (unsigned char)e->bytes[k]);
            if (to == SRV_UNKNOWN)
                return g->error;
            if (to == SRV_DEAD) {
                dead = k + 1;
                break;
            }
            states[k + 1] = to;
        }
        if (dead == UINT32_MAX)
            bits[e->id / 64] |= (uint64_t)1 << e->id % 64;
    }
    return 0;
}

static int fill(struct srv_grammar *g, const struct srv_vocab *v, uint64_t *bits)
{
    int *states =
        malloc((v->longest + 1) * sizeof *states); /* of the walk: grammars may share a vocabulary */
    int rc = states ? walk(g, v, states, bits) : -ENOMEM;
    free(states);
    return rc;
}

const uint64_t *srv_grammar_mask(struct srv_grammar *g, const struct srv_vocab *v, const int32_t *stop_ids,
                                 unsigned n_stop_ids, int *ret_rc)
{
    *ret_rc = -ENOMEM;
    for (unsigned i = 0; i < SRV_MASKS_MAX; i++)
        if (g->masks[i].bits && g->masks[i].state == g->now)
            return g->masks[i].bits;
    if (g->now < 0) {
        *ret_rc = g->error;
        return NULL;
    }
    struct mask *m = &g->masks[g->next_mask++ % SRV_MASKS_MAX];
    if (!m->bits)
        m->bits = malloc(v->words * sizeof *m->bits);
    if (!m->bits)
        return NULL;
    memset(m->bits, 0, v->words * sizeof *m->bits);
    m->state = g->now;
    int rc = fill(g, v, m->bits);
    if (rc == -E2BIG && srv_grammar_compact(g) == 0) { /* the masks are gone, too */
        m = &g->masks[g->next_mask++ % SRV_MASKS_MAX];
        m->bits = calloc(v->words, sizeof *m->bits);
        m->state = g->now;
        rc = m->bits ? fill(g, v, m->bits) : -ENOMEM;
    }
    if (rc) {
        m->state = SRV_DEAD;
        *ret_rc = rc;
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
