/* SPDX-License-Identifier: MIT */
#include "inferd/inf_heap.h"
#include "inferd/inf_tokenizer.h"
#include "inferd/inf_tokenizer_priv.h"
#include "inferd/inf_utf8.h"

#include <errno.h>
#include <stdlib.h>

#define TEXT_BYTES_MAX  (1ul << 30)
#define SHORT_WORD      64          /* up to here a linear scan beats the heap */
#define WORK_BYTES_KEEP (1ul << 20) /* more is given back after the call */

static int push(struct inf_ids *vec, int32_t id)
{
    if (vec->n == vec->cap)
        return inf_ids_append(vec, &id, 1);
    vec->ids[vec->n++] = id;
    return 0;
}

/* Merges n ids in place, always the best rank, leftmost first; returns how
 * many are left. Quadratic, for short words. */
static unsigned merge_short(const struct inf_tokenizer *tok, int32_t *ids, unsigned n)
{
    struct inf_pair_slot pair[SHORT_WORD]; /* of ids[i] and ids[i + 1] */
    for (unsigned i = 0; i + 1 < n; i++)
        pair[i] = *inf_pair_find(tok, inf_pair_key(ids[i], ids[i + 1]));
    while (n > 1) {
        unsigned best = 0;
        for (unsigned i = 1; i + 1 < n; i++)
            if (pair[i].rank < pair[best].rank)
                best = i;
        if (pair[best].rank == INF_NO_RANK)
            break;
        ids[best] = pair[best].id;
        n--;
        for (unsigned i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            pair[i - 1] = pair[i];
        }
        /* The shift put the pair right of the merged one at best; both neighbours are new. */
        if (best + 1 < n)
            pair[best] = *inf_pair_find(tok, inf_pair_key(ids[best], ids[best + 1]));
        if (best > 0)
            pair[best - 1] = *inf_pair_find(tok, inf_pair_key(ids[best - 1], ids[best]));
    }
    return n;
}

/* A node of a long word; index n is the end, its own neighbour. */
struct node {
    int32_t id;
    uint32_t prev, next;
    uint32_t rank; /* of the pair with next; a heap entry of another rank is stale */
    int32_t merged;
};

static void rate(const struct inf_tokenizer *tok, struct node *nodes, uint32_t at, uint32_t end)
{
    uint32_t next = nodes[at].next;
    nodes[at].rank = INF_NO_RANK;
    if (next == end)
        return;
    const struct inf_pair_slot *slot = inf_pair_find(tok, inf_pair_key(nodes[at].id, nodes[next].id));
    nodes[at].rank = slot->rank;
    nodes[at].merged = slot->id;
}

int inf_tokenizer_room(struct inf_tokenizer *tok, size_t bytes)
{
    if (bytes <= tok->work_bytes)
        return 0;
    void *grown = realloc(tok->work, bytes);
    if (!grown)
        return -ENOMEM;
    tok->work = grown;
    tok->work_bytes = bytes;
    return 0;
}

/* The same in n log n, for words of any length. */
static int encode_long(struct inf_tokenizer *tok, const unsigned char *word, size_t len,
                       struct inf_ids *ret_ids)
{
    /* One entry a pair at the start, then at most two for each of the len - 1 merges. */
    size_t heap_bytes = 3 * len * sizeof(uint64_t), need = heap_bytes + len * sizeof(struct node);
    if (inf_tokenizer_room(tok, need))
        return -ENOMEM;
    struct inf_heap heap = {.keys = tok->work};
    struct node *nodes = (struct node *)((char *)tok->work + heap_bytes);
    uint32_t end = (uint32_t)len;
    for (uint32_t i = 0; i < end; i++)
        nodes[i] = (struct node){.id = tok->byte_ids[word[i]], .prev = i ? i - 1 : end, .next = i + 1};
    for (uint32_t i = 0; i < end; i++) {
        rate(tok, nodes, i, end);
        if (nodes[i].rank != INF_NO_RANK)
            heap.keys[heap.n++] = (uint64_t)nodes[i].rank << 32 | i;
    }
    for (size_t i = heap.n / 2; i-- > 0;)
        inf_heap_sift_down(&heap, i);
    while (heap.n) {
        uint64_t key = inf_heap_pop(&heap);
        uint32_t at = (uint32_t)key;
        if (nodes[at].rank != key >> 32)
            continue;
        uint32_t gone = nodes[at].next, next = nodes[gone].next, prev = nodes[at].prev;
        nodes[at].id = nodes[at].merged;
        nodes[at].next = next;
        nodes[gone].rank = INF_NO_RANK;
        if (next != end)
            nodes[next].prev = at;
        rate(tok, nodes, at, end);
        if (nodes[at].rank != INF_NO_RANK)
            inf_heap_push(&heap, (uint64_t)nodes[at].rank << 32 | at);
        if (prev == end)
            continue;
        rate(tok, nodes, prev, end);
        if (nodes[prev].rank != INF_NO_RANK)
            inf_heap_push(&heap, (uint64_t)nodes[prev].rank << 32 | prev);
    }
    int rc = 0;
    for (uint32_t i = 0; i != end && !rc; i = nodes[i].next)
        rc = push(ret_ids, nodes[i].id);
    return rc;
}

static int encode_word(struct inf_tokenizer *tok, const unsigned char *word, size_t len,
                       struct inf_ids *ret_ids)
{
    if (len == 1)
        return push(ret_ids, tok->byte_ids[word[0]]);
    if (tok->whole_words && len > INF_WORD_BYTES) {
        uint32_t hash;
        int32_t id = inf_name_find(tok, &tok->normal, (const char *)word, len, &hash)->id;
        if (id >= 0)
            return push(ret_ids, id);
    }
    if (len > SHORT_WORD)
        return encode_long(tok, word, len, ret_ids);
    struct inf_word *cached = NULL;
    if (len <= INF_WORD_BYTES) {
        cached = &tok->words[XXH3_64bits(word, len) & (INF_WORDS - 1)];
        if (cached->n && cached->len == len && !memcmp(cached->bytes, word, len)) {
            if (ret_ids->cap - ret_ids->n < INF_WORD_IDS)
                return inf_ids_append(ret_ids, cached->ids, cached->n);
            memcpy(ret_ids->ids + ret_ids->n, cached->ids, sizeof cached->ids);
            ret_ids->n += cached->n;
            return 0;
        }
    }
    int32_t ids[SHORT_WORD];
    uint32_t hash;
    unsigned n = 1;
    ids[0] = tok->whole_words && cached ? inf_name_find(tok, &tok->normal, (const char *)word, len, &hash)->id
                                        : -1;
    if (ids[0] < 0) {
        for (size_t i = 0; i < len; i++)
            ids[i] = tok->byte_ids[word[i]];
        n = merge_short(tok, ids, (unsigned)len);
    }
    if (cached && n <= INF_WORD_IDS) {
        memcpy(cached->ids, ids, n * sizeof *ids);
        memcpy(cached->bytes, word, len);
        cached->len = (uint8_t)len;
        cached->n = (uint8_t)n;
    }
    return inf_ids_append(ret_ids, ids, n);
}

/* Length of the valid UTF-8 at the start of p. */
static size_t utf8_run(const unsigned char *p, size_t len)
{
    size_t at = 0;
    while (at < len) {
        uint64_t eight;
        while (len - at >= sizeof eight &&
               (memcpy(&eight, p + at, sizeof eight), !(eight & 0x8080808080808080u)))
            at += sizeof eight;
        size_t step;
        if (at == len || inf_utf8_step(p + at, len - at, &step) != INF_UTF8_OK)
            break;
        at += step;
    }
    return at;
}

/* Text without special tokens, any bytes. */
static int encode_plain(struct inf_tokenizer *tok, const char *text, size_t len, struct inf_ids *ret_ids)
{
    const unsigned char *bytes = (const unsigned char *)text;
    if (tok->spm)
        return inf_spm_encode(tok, text, len, ret_ids);
    for (size_t at = 0; at < len;) {
        size_t run = utf8_run(bytes + at, len - at), pos = 0;
        while (pos < run) {
            long piece = inf_pretok_next(tok->pretok, text + at, run, pos);
            int rc = piece < 0 ? (int)piece : encode_word(tok, bytes + at + pos, (size_t)piece, ret_ids);
            if (rc)
                return rc;
            pos += (size_t)piece;
        }
        at += run;
        for (; at < len; at++) { /* what is not UTF-8 goes through byte by byte */
            size_t step;
            if (inf_utf8_step(bytes + at, len - at, &step) == INF_UTF8_OK)
                break;
            int rc = push(ret_ids, tok->byte_ids[bytes[at]]);
            if (rc)
                return rc;
        }
    }
    return 0;
}

/* The special token at the start of text, longest first, or -1. */
static int32_t special_at(const struct inf_tokenizer *tok, const char *text, size_t len, size_t *ret_len)
{
    for (size_t i = 0; i < tok->n_special_lens; i++) {
        uint32_t hash, want = tok->special_lens[i];
        if (want > len)
            continue;
        int32_t id = inf_name_find(tok, &tok->special, text, want, &hash)->id;
        if (id >= 0) {
            *ret_len = want;
            return id;
        }
    }
    return -1;
}

int inf_tokenizer_encode_spans(struct inf_tokenizer *tok, const char *text, const struct inf_span *spans,
                               size_t n_spans, unsigned flags, struct shm_error *err, struct inf_ids *ret_ids)
{
    size_t n_before = ret_ids->n, plain = 0, at = 0, len = n_spans ? spans[n_spans - 1].end : 0;
    int rc = 0;
    if (len > TEXT_BYTES_MAX)
        return shm_error_set(err, E2BIG, "text: %zu bytes, at most 1 GiB can be read; shorten it", len);
    pthread_mutex_lock(&tok->lock);
    if ((flags & INF_ENCODE_BOS) && tok->add_bos)
        rc = push(ret_ids, tok->bos_id);
    for (size_t i = 0; i < n_spans; at = spans[i++].end) {
        while (spans[i].special && at < spans[i].end && !rc) {
            size_t n = 0;
            int32_t id = tok->special_first[(unsigned char)text[at]]
                             ? special_at(tok, text + at, spans[i].end - at, &n)
                             : -1;
            if (id < 0) {
                at++;
                continue;
            }
            rc = encode_plain(tok, text + plain, at - plain, ret_ids);
            if (!rc)
                rc = push(ret_ids, id);
            plain = at += n;
        }
    }
    if (!rc)
        rc = encode_plain(tok, text + plain, len - plain, ret_ids);
    if (tok->work_bytes > WORK_BYTES_KEEP) {
        free(tok->work);
        tok->work = NULL;
        tok->work_bytes = 0;
    }
    pthread_mutex_unlock(&tok->lock);
    if (!rc)
        return 0;
    ret_ids->n = n_before;
    return rc == -ENOMEM
               ? shm_error_set(err, ENOMEM, "text: no memory to split %zu bytes; free some", len)
               : shm_error_set(err, -rc, "text: %zu bytes are too hard to split into words; shorten it", len);
}

int inf_tokenizer_encode(struct inf_tokenizer *tok, const char *text, size_t len, unsigned flags,
                         struct shm_error *err, struct inf_ids *ret_ids)
{
    const struct inf_span all = {.end = len, .special = flags & INF_ENCODE_SPECIAL};
    return inf_tokenizer_encode_spans(tok, text, &all, 1, flags, err, ret_ids);
}
