/* SPDX-License-Identifier: MIT */
/*
 * What a model architecture needs of a GGUF file: hyper-parameters, dense
 * tensors, expert tensors and tokenizer, found and checked (shape, type, limits).
 *
 * It owns no weights and reads none: it says where in which shard they are. The
 * arena builder lays them out, the catalog carries them to the workers. Each
 * architecture is one file (exd_arch_NAME.c) behind struct exd_arch.
 */
#ifndef EXD_MODEL_H
#define EXD_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/prt_gguf.h"
#include "shm/shm_error.h"

#define EXD_LAYERS_MAX  1024u
#define EXD_EXPERTS_MAX 1024u
#define EXD_VOCAB_MAX   (1u << 22)

struct exd_hparams {
    uint32_t layers;
    uint32_t hidden; /* width of the residual stream */
    uint32_t heads;  /* query heads; a multiple of kv_heads */
    uint32_t kv_heads;
    uint32_t head_dim_k; /* per head, queries and keys; even */
    uint32_t head_dim_v; /* per head, values */
    uint32_t experts;    /* per layer */
    uint32_t experts_used;
    uint32_t expert_ffn; /* rows of one expert's gate and up */
    uint32_t vocab;
    uint32_t context; /* tokens the model was trained for */
    float rms_eps;
    float rope_base;
    bool norm_topk;       /* the chosen experts' weights are scaled to sum 1 */
    bool tied_embeddings; /* no output.weight: the head is token_embd */
};

enum exd_role {                       /* values go into the catalog: append only */
                EXD_ROLE_TOKEN_EMBD,  /* [vocab][hidden] */
                EXD_ROLE_OUTPUT_NORM, /* [hidden] */
                EXD_ROLE_OUTPUT,      /* [vocab][hidden]; absent when tied */
                EXD_ROLE_ATTN_NORM,   /* [hidden]; this and the following once per layer */
                EXD_ROLE_ATTN_Q,      /* [heads * head_dim_k][hidden] */
                EXD_ROLE_ATTN_K,      /* [kv_heads * head_dim_k][hidden] */
                EXD_ROLE_ATTN_V,      /* [kv_heads * head_dim_v][hidden] */
                EXD_ROLE_ATTN_OUT,    /* [hidden][heads * head_dim_v] */
                EXD_ROLE_ATTN_Q_NORM, /* [head_dim_k] */
                EXD_ROLE_ATTN_K_NORM, /* [head_dim_k] */
                EXD_ROLE_FFN_NORM,    /* [hidden] */
                EXD_ROLE_ROUTER,      /* [experts][hidden] */
                EXD_ROLE_COUNT
};

struct exd_dense {
    enum exd_role role;
    int32_t layer; /* -1: not of a layer */
    uint32_t type; /* ggml type number: norms F32, router F32/F16/BF16, others any supported */
    uint64_t rows; /* 1 for a vector */
    uint64_t cols; /* contiguous; a whole number of the type's blocks */
    uint64_t row_bytes;
    const struct prt_gguf_tensor *tensor; /* shard, offset, size_bytes = rows * row_bytes */
};

enum exd_part { EXD_PART_GATE, EXD_PART_UP, EXD_PART_DOWN, EXD_PART_COUNT };

/* One of the three matrices of all experts of a layer, [experts][rows][cols]. */
struct exd_experts {
    uint32_t type;
    uint32_t rows;       /* gate, up: expert_ffn; down: hidden */
    uint32_t cols;       /* gate, up: hidden; down: expert_ffn */
    uint64_t part_bytes; /* of one expert; expert e is at tensor->offset + e * part_bytes */
    const struct prt_gguf_tensor *tensor;
};

struct exd_layer {
    struct exd_experts part[EXD_PART_COUNT];
};

#define EXD_TOKEN_NONE UINT32_MAX

struct exd_tokenizer {
    struct prt_str model;           /* "gpt2": byte-level BPE; "llama": SentencePiece */
    struct prt_str pre;             /* name of the pre-tokenizer, "qwen2"; len 0 beside "llama" */
    struct prt_gguf_strings tokens; /* count = vocab */
    struct prt_gguf_i32s types;     /* count = vocab, or 0 when the file has none */
    struct prt_gguf_strings merges; /* "left right"; count 0 beside "llama" */
    struct prt_gguf_f32s scores;    /* "llama": count = vocab; else 0 */
    bool add_space_prefix;          /* "llama": true where the file says nothing */
    uint32_t bos, eos, eot, pad;    /* < vocab or EXD_TOKEN_NONE */
    bool add_bos;
    struct prt_str chat_template; /* raw; len 0 when absent */
};

struct exd_model {
    const char *arch;    /* static, "qwen3moe" */
    struct prt_str name; /* general.name, len 0 when absent */
    const struct prt_gguf *gguf;
    struct exd_hparams hp;
    struct exd_dense *dense; /* globals first, then layer by layer in role order */
    uint32_t n_dense;
    struct exd_layer *layer; /* hp.layers of them */
    struct exd_tokenizer tok;
    uint32_t n_ignored; /* tensors of the file that the architecture does not use */
};

/* Finds and checks everything. The model borrows gguf, which must outlive it.
 * Does not block. -EINVAL with a line naming file, key or tensor, what was found
 * and what is supported; -ENOMEM. */
int exd_model_open(const struct prt_gguf *gguf, struct exd_model **ret_model, struct shm_error *err);
void exd_model_close(struct exd_model **model);

/* File range of one expert's part. part < EXD_PART_COUNT, layer and expert in range. */
uint64_t exd_model_part_offset(const struct exd_model *model, uint32_t layer, enum exd_part part,
                               uint32_t expert);

#endif
