/* SPDX-License-Identifier: MIT */
/*
 * Conversation: the tokens read so far, their keys and values (on the device), and
 * how often each expert was used lately. A follow-up turn reads only what is
 * new. Nothing here belongs to expertd: a conversation survives its death.
 *
 * A chunk counts once it went through all layers; one that was cancelled or
 * failed leaves the conversation as it was before that chunk.
 *
 * Recent routing: tokens per layer and expert; all counts are halved whenever
 * they speak of more than INF_RECENT_TOKENS tokens, so that old text fades.
 */
#ifndef INF_CONVERSATION_H
#define INF_CONVERSATION_H

#include "inferd/inf_engine.h"
#include "inferd/inf_kv.h"

#define INF_RECENT_TOKENS 4096u

struct inf_conversation {
    uint32_t capacity; /* tokens */
    uint32_t n;        /* tokens read */
    int32_t *tokens;   /* [capacity] */
    struct inf_kv *kv; /* of the engine's pool */
    uint32_t layers, experts;
    uint32_t *recent; /* [layers][experts] */
    uint32_t recent_tokens;
    uint32_t *counts; /* [layers][experts], of the running chunk */
};

/* Holds no block of keys and values yet. -ENOMEM. */
int inf_conversation_create(const struct inf_engine *engine, struct shm_error *err,
                            struct inf_conversation **ret_conversation);
void inf_conversation_destroy(struct inf_conversation **conversation);

/* Forgets all but the first n tokens (n <= conversation->n); blocks behind them are given back, those taken
 * ahead of time too. */
void inf_conversation_truncate(struct inf_conversation *conversation, uint32_t n);

/* Where a conversation can be taken back to, recent routing included, however often. */
struct inf_mark {
    uint32_t n, recent_tokens;
    uint32_t *recent;
};
/* Copies what is needed; an earlier mark in *mark (zero: none) is replaced. 0 or -ENOMEM. */
int inf_conversation_mark(const struct inf_conversation *conversation, struct inf_mark *mark);
/* Only while the tokens before the mark are those of then: after reads behind it, not after a truncation
 * before it. */
void inf_conversation_rewind(struct inf_conversation *conversation, const struct inf_mark *mark);
void inf_mark_clear(struct inf_mark *mark);

/* What became of one chunk. */
struct inf_chunk {
    uint32_t tokens, position;
    uint64_t ns;
    struct shm_report stream;
};

/* The reports of several chunks, added up; policy, order and so on are those of the largest one. */
struct inf_stream_sum {
    uint32_t chunks, tokens_max;
    uint32_t policy, order, depth, ring, held_off;
    uint64_t routed, entries, copied, dropped, wasted, bytes, wasted_bytes, link_ns, span_ns, wait_ns, cpu_ns;
};
void inf_stream_sum_add(struct inf_stream_sum *sum, const struct inf_chunk *chunk);

enum inf_logits_wanted { INF_LOGITS_NONE, INF_LOGITS_LAST, INF_LOGITS_ALL };

/* Callbacks may be NULL. */
struct inf_read_options {
    enum inf_logits_wanted logits; /* inf_read; a piece has its own */
    /* rows of vocab logits, of the piece's tokens from `position` on; in order. piece: 0 in inf_read. */
    void (*on_logits)(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits);
    /* Of one layer and chunk, piece by piece; ids and weights [tokens][experts_used]. */
    void (*on_routes)(void *ctx, uint32_t piece, uint32_t layer, uint32_t position, uint32_t tokens,
                      const uint32_t *ids, const float *weights);
    /* After each layer: tokens read, of this call, fractions of a chunk included. */
    void (*on_progress)(void *ctx, double tokens);
    void (*on_chunk)(void *ctx, const struct inf_chunk *chunk);
    void *ctx;
    /* For measurements: counts [layers][experts] of an earlier identical read of one chunk, told to expertd
     * before the stream begins (inf_stream_know). NULL: none. */
    const uint32_t *known;
    /* The ids were written by the model, one by one: a device may compute such tokens another way. They are
     * read one a pass, or, by inf_read_batch, one a piece. */
    bool generated;
};

/* Tokens to be read behind what a conversation holds, together with those of others. */
struct inf_piece {
    struct inf_conversation *c;
    const int32_t *ids;
    uint32_t n; /* >= 1 */
    enum inf_logits_wanted logits;
};

/* Reads pieces of different conversations in one pass: up to INF_SPANS_MAX, of engine->chunk tokens in all.
 * All or nothing: after an error every conversation is as before. The same bits for each as alone. Takes the
 * blocks it needs (inf_kv_prepare); where they were taken before, none is missing. Errors: as inf_read, and
 * -ENOSPC: the pool of keys and values has not enough free blocks. */
int inf_read_batch(struct inf_engine *engine, const struct inf_piece *piece, uint32_t pieces,
                   const struct inf_read_options *options, struct shm_error *err);

/* Reads n ids behind what the conversation holds, in chunks of about equal
 * size, none above the engine's chunk, so that no short rest falls below the
 * floor. A lost expertd is not attached anew here (inf_engine_ensure). Errors:
 * -E2BIG does not fit in the context; -EINVAL an id outside the vocabulary;
 * -ENOSPC no free blocks of keys and values; those of inf_stream.h. conversation->n tells what was completed.
 */
int inf_read(struct inf_engine *engine, struct inf_conversation *conversation, const int32_t *ids, size_t n,
             const struct inf_read_options *options, struct shm_error *err);

#endif
