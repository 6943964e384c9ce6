/* SPDX-License-Identifier: MIT */
/*
 * mkmodel's inside: the shape of a synthetic model, its list of tensors, and
 * what fills them. Everything is a pure function of the shape (seed included),
 * so bytes depend neither on the number of threads nor on their timing. No
 * libm beyond sqrt is used for weights, for the same reason.
 *
 * Weights are random but built so that a forward pass stays finite and routing
 * is skewed and depends on the token (after the Python reference):
 * - token_embd row t = s + z_t: s a +-1 vector common to all tokens, z_t of
 *   variance 1. So each normed hidden state has a fixed share along s.
 * - Router row e = b_e along s + a random row orthogonal to s: the logit of
 *   expert e over tokens is skew * b_e + (mean 0, variance 1). See mkm_route.c.
 * - Layer outputs are small beside the embedding, so that the share along s
 *   outlives the depth; MKM_DRIFT a layer makes up for what it loses.
 */
#ifndef MKM_MODEL_H
#define MKM_MODEL_H

#include "kernels/krn_quant.h"
#include "shm/shm_error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define MKM_ALIGN    32u
#define MKM_DRIFT    0.0003 /* growth of the residual's mean square a layer */
#define MKM_SPECIALS 3u     /* endoftext, im_start, im_end: the last three ids */
#define MKM_NAME_MAX 64u

struct mkm_shape {
    const char *preset;
    uint32_t layers, hidden, heads, kv_heads, head_dim, experts, topk, ffn, vocab, ctx;
    double rope_base;
    double skew; /* 0 = even routing, 1 = calibrated */
    uint64_t seed;
    const struct krn_type *experts_type, *down_type, *attn_type, *embd_type;
};

enum mkm_fill { MKM_ONES, MKM_ROUTER, MKM_EMBD, MKM_OUTPUT, MKM_RANDOM };

struct mkm_tensor {
    char name[MKM_NAME_MAX];
    const struct krn_type *type;
    uint32_t n_dims;
    uint64_t dims[3]; /* GGML order: row length first */
    enum mkm_fill fill;
    uint32_t layer;
    bool is_expert;
    double sigma;                              /* of MKM_RANDOM, MKM_OUTPUT */
    uint64_t offset, bytes, row_bytes, n_rows; /* offset from the start of tensor data */
};

struct mkm_plan {
    struct mkm_tensor *tensors;
    uint32_t n_tensors;
    uint64_t data_bytes, expert_bytes;
};

struct mkm_vocab {
    char *tokens, *merges; /* GGUF strings one after another: u64 length, bytes */
    size_t tokens_bytes, merges_bytes;
    uint64_t *token_at; /* offset of each token in tokens */
    uint32_t n_tokens, n_merges;
    uint32_t first_word; /* ids first_word .. n_words - 1: " bacada", one token each */
    uint32_t n_words;
};

/* -ENOENT: no such preset. Types are Q4_K for experts and Q8_0 else, or what the preset says. */
int mkm_preset(const char *name, struct mkm_shape *ret_shape);
/* A comma-separated list for messages. */
const char *mkm_preset_names(void);

/* Refuses what no engine could load, with one line. Fills down_type where NULL. */
int mkm_check(struct mkm_shape *shape, struct shm_error *err);

int mkm_plan_make(const struct mkm_shape *shape, struct mkm_plan *ret_plan, struct shm_error *err);
void mkm_plan_free(struct mkm_plan *plan);

int mkm_vocab_make(uint32_t vocab, struct mkm_vocab *ret_vocab);
void mkm_vocab_free(struct mkm_vocab *vocab);
/* n words, one token each (in the model of that shape), to out. 0 or -EIO. */
int mkm_text(const struct mkm_shape *shape, const struct mkm_vocab *vocab, uint64_t n, FILE *out);

/* hidden values of +-1. */
void mkm_common_vector(const struct mkm_shape *shape, float *ret_s);
/* experts * hidden, a row an expert. scratch: experts doubles. */
void mkm_router(const struct mkm_shape *shape, uint32_t layer, const float *s, double *scratch, float *ret_w);

#define MKM_SIM_POINTS 7
struct mkm_simulation {
    uint32_t layers;
    uint32_t tokens[MKM_SIM_POINTS];
    double unrouted[MKM_SIM_POINTS], low[MKM_SIM_POINTS],
        high[MKM_SIM_POINTS]; /* shares 0..1 over the layers */
    double used_by[10];       /* share of tokens that use the expert of rank 1, 2, 4, 8, ... */
};
/* Runs random embeddings through the routers of the first layers (at most 6), without attention. */
int mkm_simulate(const struct mkm_shape *shape, uint32_t threads, struct mkm_simulation *ret_sim,
                 struct shm_error *err);

/* n elements (whole blocks) of mean 0 and deviation sigma. state: see mkm_rng.h. */
void mkm_random_blocks(const struct krn_type *type, double sigma, uint64_t *state, void *dst, uint64_t n);
/* Quantizes n float32 (whole blocks). */
void mkm_encode(const struct krn_type *type, const float *src, void *dst, uint64_t n);
uint16_t mkm_f32_to_f16(float x);

/* Makes the header up to the first tensor's data, padded to MKM_ALIGN; the caller frees *ret_head. 0 or
 * -ENOMEM, or what mkm_vocab_make says. */
int mkm_head_make(const struct mkm_shape *shape, const struct mkm_plan *plan, char **ret_head,
                  size_t *ret_bytes);

struct mkm_written {
    uint64_t bytes, expert_bytes;
    uint32_t n_tensors;
    double seconds;
};
/* Writes path by way of path.partial, which is renamed when complete and
 * removed on any failure. cancel (may be NULL) non-zero: -ECANCELED. progress:
 * draw a bar on stderr. Blocks for the time of the writing. */
int mkm_write(const struct mkm_shape *shape, const char *path, uint32_t threads, bool progress,
              const atomic_int *cancel, struct mkm_written *ret_written, struct shm_error *err);

#endif
