/* SPDX-License-Identifier: MIT */
/*
 * Arena file: all experts and dense tensors of one model in host memory, with
 * the catalog that says where they are. One file on tmpfs (or hugetlbfs),
 * created by expertd, mapped read-only by workers, adopted by the next expertd.
 *
 *   0               struct shm_arena        header, state, fingerprint, sections
 *   catalog         struct shm_catalog      hyper-parameters, tables, tokenizer, strings: never
 *                                           changes once written; catalog_sum covers it
 *   sums            uint64_t [dense + layers * experts]   XXH3-64 of each dense tensor, then of each
 *                                           blob (layer * experts + expert); 0 until loaded
 *   ready           uint8_t  [same count]   1 once loaded (release); readers: acquire
 *   data            dense tensors, then blobs; starts on a multiple of 2 MiB
 *
 * Blob = gate | up | down, each part aligned to 256 bytes, part and blob sizes
 * the same for all experts of a layer. All offsets are from the file's start.
 *
 * Validity of a file found at start: (1) shm_header_check passes with
 * SHM_ARENA_MAGIC, (2) state is SHM_ARENA_COMPLETE, (3) catalog_sum and
 * sums_sum match, (4) the fingerprint is the model file's, (5) the file is
 * total_bytes long. Anything else is named and rebuilt.
 */
#ifndef SHM_ARENA_H
#define SHM_ARENA_H

#include "shm/shm_header.h"
#include "shm/shm_mask.h"

#define SHM_ARENA_MAGIC      "EXDARN02"
#define SHM_ARENA_ALIGN      256u
#define SHM_ARENA_DATA_ALIGN (2u << 20)

#define SHM_ARENA_LOADING  1u
#define SHM_ARENA_COMPLETE 2u

struct shm_arena {
    struct shm_header header;
    _Atomic uint32_t state; /* SHM_ARENA_*; release after everything it speaks of */
    uint32_t reserved;
    _Atomic uint64_t generation; /* expertd lives that served this arena; +1 at each adoption */
    uint8_t fingerprint[16];     /* of the model file (prt_gguf_fingerprint) */
    uint64_t catalog_offset, catalog_bytes;
    uint64_t catalog_sum;  /* XXH3-64 of the catalog */
    uint64_t sums_offset;  /* uint64_t per unit */
    uint64_t sums_sum;     /* XXH3-64 of the sums, with state COMPLETE */
    uint64_t ready_offset; /* uint8_t per unit */
    uint64_t data_offset, data_bytes;
    uint8_t pad[64];
};
_Static_assert(sizeof(struct shm_arena) == 224, "shared layout");

/* A string in the catalog's pool: bytes, no terminator counted, one NUL follows. */
struct shm_string {
    uint32_t offset; /* from the catalog's start */
    uint32_t bytes;
};

#define SHM_TENSOR_NAME_BYTES 64

struct shm_tensor {
    char name[SHM_TENSOR_NAME_BYTES]; /* GGUF name, NUL-terminated */
    uint32_t type;                    /* ggml type id */
    uint32_t n_dims;
    uint64_t dim[4]; /* ggml order: dim[0] is the row length; unused are 1 */
    uint64_t offset; /* in the arena file, multiple of SHM_ARENA_ALIGN */
    uint64_t bytes;
};
_Static_assert(sizeof(struct shm_tensor) == 120, "shared layout");

/* One of gate, up, down inside a blob: a matrix [rows][cols]. */
struct shm_part {
    uint32_t type;   /* ggml type id */
    uint32_t rows;   /* outputs */
    uint32_t cols;   /* inputs; row length */
    uint32_t offset; /* in the blob, multiple of SHM_ARENA_ALIGN */
    uint64_t bytes;
};
_Static_assert(sizeof(struct shm_part) == 24, "shared layout");

struct shm_layer {
    uint64_t blobs_offset; /* of expert 0; expert e follows at e * blob_stride */
    uint64_t blob_bytes;   /* to copy: end of the last part */
    uint64_t blob_stride;  /* multiple of SHM_ARENA_ALIGN */
    struct shm_part gate, up, down;
};
_Static_assert(sizeof(struct shm_layer) == 96, "shared layout");

/* Hyper-parameters, whatever the architecture; those that one lacks are 0. */
struct shm_hparams {
    char architecture[32]; /* GGUF general.architecture */
    char name[SHM_TENSOR_NAME_BYTES * 2];
    uint32_t layers, hidden, vocab, context;
    uint32_t heads, kv_heads, head_dim, value_dim; /* head_dim: of q and k; value_dim: of v */
    uint32_t experts, experts_used, expert_ffn, norm_topk;
    float rms_eps, rope_base;
    uint32_t tied_head; /* 1: the head is token_embd.weight */
    uint32_t reserved[5];
};
_Static_assert(sizeof(struct shm_hparams) == 240, "shared layout");

/* Token text and merges as packed tables: item i is bytes[offset[i] .. offset[i + 1]). */
struct shm_strings {
    uint32_t count;
    uint32_t reserved;
    uint64_t offsets; /* uint32_t [count + 1], from the catalog's start, 8-aligned; relative to `bytes` */
    uint64_t bytes;   /* start of the packed bytes, from the catalog's start */
};
_Static_assert(sizeof(struct shm_strings) == 24, "shared layout");

#define SHM_TOKEN_NONE 0xffffffffu

struct shm_tokenizer {
    struct shm_string model;         /* tokenizer.ggml.model, "gpt2" or "llama" */
    struct shm_string pre;           /* tokenizer.ggml.pre, "qwen2"; may be empty beside "llama" */
    struct shm_string chat_template; /* may be empty */
    struct shm_strings tokens;
    struct shm_strings merges; /* "left right"; none beside "llama" */
    uint64_t types;            /* int32_t [tokens.count], from the catalog's start, 8-aligned; 0: none */
    uint32_t bos, eos, pad;    /* SHM_TOKEN_NONE where the file names none */
    uint32_t add_bos;
    uint32_t eot;              /* end of a chat turn, SHM_TOKEN_NONE where the file names none */
    uint32_t add_space_prefix; /* "llama" only */
    uint64_t scores;           /* float [tokens.count], from the catalog's start, 8-aligned; 0: none */
};
_Static_assert(sizeof(struct shm_tokenizer) == 112, "shared layout");

struct shm_catalog {
    struct shm_hparams hparams;
    uint32_t n_dense;
    uint32_t n_layers; /* == hparams.layers */
    uint64_t dense;    /* struct shm_tensor [n_dense], from the catalog's start, 8-aligned */
    uint64_t layers;   /* struct shm_layer [n_layers], likewise */
    struct shm_tokenizer tokenizer;
};
_Static_assert(sizeof(struct shm_catalog) == 376, "shared layout");

/* A checked arena mapping. Every pointer below was bounds-checked once by
 * shm_arena_open and stays valid as long as the mapping. Read-only. */
struct shm_arena_view {
    const uint8_t *base;
    uint64_t mapped_bytes;
    const struct shm_arena *arena;
    const struct shm_catalog *catalog;
    const struct shm_tensor *dense; /* [catalog->n_dense] */
    const struct shm_layer *layers; /* [catalog->n_layers] */
    const uint64_t *sums;           /* [units] */
    const _Atomic uint8_t *ready;   /* [units] */
    uint32_t units;                 /* n_dense + layers * experts */
    uint64_t blob_bytes_max;        /* largest blob of any layer */
};

/* Checks a mapping of mapped_bytes (header, sections, every table entry,
 * every range inside the file, strings inside the catalog) and resolves it.
 * Does not look at the state nor at checksums: a worker may open an arena that
 * is being loaded. Returns 0, or a negative errno with one line in err. */
int shm_arena_open(const void *base, uint64_t mapped_bytes, const char *path, struct shm_arena_view *ret_view,
                   struct shm_error *err);

/* A dense tensor by its GGUF name, or NULL. */
const struct shm_tensor *shm_arena_tensor(const struct shm_arena_view *view, const char *name);

/* Bytes of a blob: view->layers[layer].blob_bytes of them. Not checked: layer, expert in range. */
static inline const uint8_t *shm_arena_blob(const struct shm_arena_view *v, uint32_t layer, uint32_t expert)
{
    return v->base + v->layers[layer].blobs_offset + (uint64_t)expert * v->layers[layer].blob_stride;
}

/* Unit numbers for sums and ready. */
static inline uint32_t shm_arena_blob_unit(const struct shm_arena_view *v, uint32_t layer, uint32_t expert)
{
    return v->catalog->n_dense + layer * v->catalog->hparams.experts + expert;
}

static inline bool shm_arena_ready(const struct shm_arena_view *v, uint32_t unit)
{
    /* acquire, pairs with the loader's release: the unit's bytes are there */
    return atomic_load_explicit(&v->ready[unit], memory_order_acquire) == 1;
}

/* A catalog string: pointer to its bytes (NUL-terminated). Checked by shm_arena_open for the
 * strings of struct shm_tokenizer. */
static inline const char *shm_arena_string(const struct shm_arena_view *v, struct shm_string s)
{
    return (const char *)v->catalog + s.offset;
}

#endif
