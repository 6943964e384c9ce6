/* SPDX-License-Identifier: MIT */
/*
 * Inside of the tokenizer, shared by its two source files: tables made at
 * creation (inf_tokenizer.c) and the workspace of the encoder
 * (inf_tokenizer_encode.c). Nobody else includes it.
 */
#ifndef INF_TOKENIZER_PRIV_H
#define INF_TOKENIZER_PRIV_H

#include "inferd/inf_pretok.h"
#include "inferd/inf_tokenizer.h"

#include <pthread.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define INF_NO_RANK      UINT32_MAX
#define INF_WORDS        4096 /* slots of the word cache, a power of two */
#define INF_WORD_BYTES   26   /* longest word in the cache */
#define INF_WORD_IDS     5    /* most ids of such a word */
#define INF_STOP_IDS_MAX 12

/* Bytes to id, open addressing; id < 0: free. */
struct inf_name_slot {
    uint32_t hash;
    int32_t id;
};

struct inf_name_table {
    struct inf_name_slot *slots;
    uint32_t mask;
};

/* (left id, right id) to rank and merged id; rank INF_NO_RANK: free. */
struct inf_pair_slot {
    uint64_t key;
    uint32_t rank;
    int32_t id;
};

struct inf_word {
    int32_t ids[INF_WORD_IDS];
    uint8_t n; /* 0: free */
    uint8_t len;
    char bytes[INF_WORD_BYTES];
};

struct inf_tokenizer {
    uint32_t n_tokens;
    uint32_t *offsets; /* n_tokens + 1, into bytes */
    char *bytes;       /* decoded */
    uint8_t *types;
    size_t longest;
    uint64_t seed; /* of the hashes, so that a crafted model cannot make them collide */
    struct inf_name_table normal, special;
    struct inf_pair_slot *pairs;
    uint64_t pair_mask;
    int32_t byte_ids[256];
    uint32_t *special_lens; /* distinct lengths of special tokens, longest first */
    size_t n_special_lens;
    bool special_first[256]; /* a special token starts with this byte */
    int32_t bos_id, eos_id;
    bool add_bos;
    bool whole_words; /* a piece that is a token is not merged */
    bool spm, add_space_prefix;
    uint32_t *ranks; /* spm: of each token, from its score; the lower the sooner joined */
    int32_t stop_ids[INF_STOP_IDS_MAX];
    unsigned n_stop_ids;

    pthread_mutex_t lock; /* over everything below */
    struct inf_pretok *pretok;
    struct inf_word *words;
    void *work; /* of one long word */
    size_t work_bytes;
};

/* A plain text by SentencePiece's rules, at the start of a text or behind a
 * special token. 0 or -ENOMEM. */
int inf_spm_encode(struct inf_tokenizer *tok, const char *text, size_t len, struct inf_ids *ret_ids);

/* So many bytes of work. 0 or -ENOMEM; what was in it is kept. */
int inf_tokenizer_room(struct inf_tokenizer *tok, size_t bytes);

static inline uint64_t inf_pair_key(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static inline uint64_t inf_pair_hash(const struct inf_tokenizer *tok, uint64_t key)
{
    key = (key ^ tok->seed) * 0x9E3779B97F4A7C15u;
    key = (key ^ key >> 32) * 0xD6E8FEB86659FD93u;
    return key ^ key >> 32;
}

/* The slot of the pair, or the free slot where it belongs. */
static inline struct inf_pair_slot *inf_pair_find(const struct inf_tokenizer *tok, uint64_t key)
{
    uint64_t at = inf_pair_hash(tok, key) & tok->pair_mask;
    while (tok->pairs[at].rank != INF_NO_RANK && tok->pairs[at].key != key)
        at = (at + 1) & tok->pair_mask;
    return &tok->pairs[at];
}

/* The same for a name. */
static inline struct inf_name_slot *inf_name_find(const struct inf_tokenizer *tok,
                                                  const struct inf_name_table *table, const char *bytes,
                                                  size_t len, uint32_t *ret_hash)
{
    uint32_t hash = (uint32_t)XXH3_64bits_withSeed(bytes, len, tok->seed);
    uint32_t at = hash & table->mask;
    for (;; at = (at + 1) & table->mask) {
        struct inf_name_slot *s = &table->slots[at];
        if (s->id < 0 || (s->hash == hash && tok->offsets[s->id + 1] - tok->offsets[s->id] == len &&
                          !memcmp(tok->bytes + tok->offsets[s->id], bytes, len))) {
            *ret_hash = hash;
            return s;
        }
    }
}

#endif
