/* SPDX-License-Identifier: MIT */
/*
 * SentencePiece's BPE: characters are joined, always the pair whose token has
 * the best score, leftmost first; a character without a token becomes the
 * tokens of its bytes. The whole text is one word.
 */
#include "inferd/inf_heap.h"
#include "inferd/inf_tokenizer_priv.h"
#include "inferd/inf_utf8.h"

#include <errno.h>
#include <stdlib.h>

/* A symbol: bytes of the text that are one token, or one character. */
struct symbol {
    uint32_t at, len;    /* bytes; len 0: joined to the one before */
    uint32_t prev, next; /* index of the neighbours; the count: none */
    int32_t id;          /* -1: no token */
    uint32_t rank;       /* of the pair with next; a heap entry of another rank is stale */
    int32_t joined;      /* its token */
};

static int32_t find(const struct inf_tokenizer *tok, const char *bytes, size_t len)
{
    uint32_t hash;
    return len <= tok->longest ? inf_name_find(tok, &tok->normal, bytes, len, &hash)->id : -1;
}

static void rate(const struct inf_tokenizer *tok, const char *text, struct symbol *symbols, uint32_t at,
                 uint32_t end)
{
    struct symbol *s = &symbols[at];
    s->joined = s->next == end ? -1 : find(tok, text + s->at, (size_t)s->len + symbols[s->next].len);
    s->rank = s->joined < 0 ? INF_NO_RANK : tok->ranks[s->joined];
}

/* Spaces for U+2581, and the space in front. Writes at most len + 1 bytes. */
static size_t prepare(const struct inf_tokenizer *tok, const char *text, size_t len, char *ret_text)
{
    size_t n = 0;
    if (tok->add_space_prefix)
        ret_text[n++] = ' ';
    for (size_t i = 0; i < len; n++) {
        bool space = len - i >= 3 && !memcmp(text + i, "\xE2\x96\x81", 3);
        ret_text[n] = space ? ' ' : text[i];
        i += space ? 3 : 1;
    }
    return n;
}

static uint32_t split(const struct inf_tokenizer *tok, const char *text, size_t len,
                      struct symbol *ret_symbols)
{
    uint32_t n = 0;
    for (size_t i = 0, step; i < len; i += step, n++) {
        if (inf_utf8_step((const unsigned char *)text + i, len - i, &step) != INF_UTF8_OK)
            step = 1; /* a byte of its own */
        ret_symbols[n] = (struct symbol){.at = (uint32_t)i,
                                         .len = (uint32_t)step,
                                         .prev = n - 1,
                                         .next = n + 1,
                                         .id = find(tok, text + i, step)};
    }
    if (n)
        ret_symbols[0].prev = n;
    return n;
}

static void join(const struct inf_tokenizer *tok, const char *text, struct symbol *symbols, uint32_t end,
                 struct inf_heap *heap)
{
    while (heap->n) {
        uint64_t key = inf_heap_pop(heap);
        uint32_t at = (uint32_t)key;
        struct symbol *s = &symbols[at];
        if (!s->len || s->rank != key >> 32 || s->rank == INF_NO_RANK)
            continue;
        struct symbol *gone = &symbols[s->next];
        s->id = s->joined;
        s->len += gone->len;
        s->next = gone->next;
        gone->len = 0;
        if (s->next != end)
            symbols[s->next].prev = at;
        rate(tok, text, symbols, at, end);
        if (s->rank != INF_NO_RANK)
            inf_heap_push(heap, (uint64_t)s->rank << 32 | at);
        if (s->prev == end)
            continue;
        rate(tok, text, symbols, s->prev, end);
        if (symbols[s->prev].rank != INF_NO_RANK)
            inf_heap_push(heap, (uint64_t)symbols[s->prev].rank << 32 | s->prev);
    }
}

int inf_spm_encode(struct inf_tokenizer *tok, const char *text, size_t len, struct inf_ids *ret_ids)
{
    if (!len)
        return 0;
    /* One heap entry a pair at the start, then at most two for each join. */
    size_t most = len + 1, heap_bytes = 3 * most * sizeof(uint64_t),
           symbol_bytes = most * sizeof(struct symbol);
    size_t need = heap_bytes + symbol_bytes + most;
    if (inf_tokenizer_room(tok, need))
        return -ENOMEM;
    struct inf_heap heap = {.keys = tok->work};
    struct symbol *symbols = (struct symbol *)((char *)tok->work + heap_bytes);
    char *bytes = (char *)(symbols + most);
    uint32_t end = split(tok, bytes, prepare(tok, text, len, bytes), symbols);
    for (uint32_t i = 0; i < end; i++) {
        rate(tok, bytes, symbols, i, end);
        if (symbols[i].rank != INF_NO_RANK)
            heap.keys[heap.n++] = (uint64_t)symbols[i].rank << 32 | i;
    }
    for (size_t i = heap.n / 2; i-- > 0;)
        inf_heap_sift_down(&heap, i);
    join(tok, bytes, symbols, end, &heap);
    int rc = 0;
    for (uint32_t i = 0; i != end && !rc; i = symbols[i].next) {
        if (symbols[i].id >= 0)
            rc = inf_ids_append(ret_ids, &symbols[i].id, 1);
        for (uint32_t k = 0; symbols[i].id < 0 && k < symbols[i].len && !rc; k++)
            rc = inf_ids_append(ret_ids, &tok->byte_ids[(unsigned char)bytes[symbols[i].at + k]], 1);
    }
    return rc;
}
