/* SPDX-License-Identifier: MIT */
/*
 * Text to token ids and a token back to bytes: byte-level BPE (GGUF "gpt2") and
 * SentencePiece's BPE ("llama").
 *
 * Built from tables that lie in the catalog, a read-only mapping another
 * process wrote. Everything needed is copied and checked during creation, so
 * the mapping may change or go away afterwards. The object is immutable but
 * for a workspace behind a mutex: one tokenizer serves several threads.
 * It owns neither chat templates (inf_chat.h) nor UTF-8 output (inf_detok.h).
 */
#ifndef INF_TOKENIZER_H
#define INF_TOKENIZER_H

#include "shm/shm_error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Token types as GGUF numbers them. */
enum inf_token_type {
    INF_TOKEN_NORMAL = 1,
    INF_TOKEN_UNKNOWN = 2,
    INF_TOKEN_CONTROL = 3,
    INF_TOKEN_USER_DEFINED = 4,
    INF_TOKEN_UNUSED = 5,
    INF_TOKEN_BYTE = 6,
};

/* n strings, one behind the other without separators: string i is
 * bytes[offsets[i]] .. bytes[offsets[i + 1]] (not included). */
struct inf_string_table {
    uint32_t n;
    const uint32_t *offsets; /* n + 1, ascending, offsets[n] <= size_bytes */
    const char *bytes;
    uint64_t size_bytes;
};

/* What the catalog says. Borrowed during inf_tokenizer_create() only. */
struct inf_tokenizer_src {
    struct inf_string_table tokens; /* as in GGUF: bytes written in the GPT-2 byte-to-unicode alphabet */
    const int32_t *types;           /* tokens.n values of enum inf_token_type, NULL: all normal */
    struct inf_string_table merges; /* "LEFT RIGHT", best rank first */
    const char *pre;                /* pre-tokenizer's name, not NUL-terminated */
    size_t pre_len;
    /* SentencePiece: tokens are written with U+2581 for a space and <0xNN> for a byte (type
     * INF_TOKEN_BYTE, all 256 are needed); merges and pre are not used. */
    bool spm;
    const float *scores;   /* tokens.n values, the higher the sooner joined */
    bool add_space_prefix; /* a space in front of a text, and behind a special token */
    int32_t bos_id;        /* -1: none */
    int32_t eos_id;        /* -1: none */
    bool add_bos;
};

struct inf_tokenizer;

/* Growable vector of token ids. Zero-initialize, release with
 * inf_ids_clear(). */
struct inf_ids {
    int32_t *ids;
    size_t n;
    size_t cap;
};

/* Appends n ids. Returns 0 or -ENOMEM (vector unchanged). */
int inf_ids_append(struct inf_ids *vec, const int32_t *ids, size_t n);

/* Releases the memory; the vector is empty and usable afterwards. */
void inf_ids_clear(struct inf_ids *vec);

/* Checks and copies the source. -EINVAL: a table is broken (offset out of
 * bounds, unknown merge part, duplicate, a byte value without a token...);
 * -ENOTSUP: unknown pre-tokenizer; -ENOMEM. Does not block. */
int inf_tokenizer_create(const struct inf_tokenizer_src *src, struct shm_error *err,
                         struct inf_tokenizer **ret_tok);
void inf_tokenizer_destroy(struct inf_tokenizer **tok);

enum inf_encode_flags {
    /* Control and user-defined tokens written out in the text become those
     * tokens (longest first). Without it the text is only text. */
    INF_ENCODE_SPECIAL = 1 << 0,
    /* Put the bos token in front, where the model asks for one (add_bos). */
    INF_ENCODE_BOS = 1 << 1,
};

/* Appends the ids of text[0..len) to ret_ids. Any bytes are accepted: bytes
 * that are not UTF-8 become the tokens of the single bytes. SentencePiece
 * does not tell U+2581 from a space. 0, -ENOMEM,
 * -E2BIG (over 1 GiB). On failure ret_ids is as before. */
int inf_tokenizer_encode(struct inf_tokenizer *tok, const char *text, size_t len, unsigned flags,
                         struct shm_error *err, struct inf_ids *ret_ids);

/* A text in parts: part i ends at spans[i].end (bytes, ascending, the last one
 * is the text's length), the first starts at 0. */
struct inf_span {
    size_t end;
    bool special; /* as INF_ENCODE_SPECIAL, for tokens that lie wholly inside */
};

/* The same with the flag given part by part; what lies between two special
 * tokens is split as one text, whatever parts it has. */
int inf_tokenizer_encode_spans(struct inf_tokenizer *tok, const char *text, const struct inf_span *spans,
                               size_t n_spans, unsigned flags, struct shm_error *err,
                               struct inf_ids *ret_ids);

/* The bytes of one token (maybe part of a UTF-8 sequence, not
 * NUL-terminated; control tokens give their written form). Lives as long as the tokenizer.
 * 0 or -ERANGE. */
int inf_tokenizer_bytes(const struct inf_tokenizer *tok, int32_t id, const char **ret_bytes, size_t *ret_len);

/* Id of the token with exactly this written form, control and user-defined
 * ones first, else -ENOENT. Normal tokens are named by their decoded bytes. */
int32_t inf_tokenizer_find(const struct inf_tokenizer *tok, const char *bytes, size_t len);

uint32_t inf_tokenizer_size(const struct inf_tokenizer *tok);
size_t inf_tokenizer_longest(const struct inf_tokenizer *tok); /* bytes of the longest token */

/* Control tokens are not shown to a reader (user-defined ones are). */
bool inf_tokenizer_is_control(const struct inf_tokenizer *tok, int32_t id);

/* Ends an answer: the eos token, or one by whose name every family that has it ends one
 * (<|im_end|>, <|eot_id|>, ...). */
bool inf_tokenizer_is_stop(const struct inf_tokenizer *tok, int32_t id);

#endif
