/* SPDX-License-Identifier: MIT */
/*
 * Model: the catalog's tensors resolved for the graph. Matrices point straight
 * into the read-only arena mapping; norm vectors (small) are copied to float32.
 *
 * The arena view is borrowed and must outlive the model. The dense tensors
 * must be loaded already (their ready flags); experts need not be.
 *
 * An architecture is one entry of the table in inf_model.c: a small file with
 * its resolve, embed and forward functions. Nothing else asks which one it is.
 */
#ifndef INF_MODEL_H
#define INF_MODEL_H

#include "kernels/krn_host.h"
#include "shm/shm_arena.h"
#include "shm/shm_error.h"

struct inf_model;
struct inf_device;
struct inf_pass;

struct inf_arch {
    const char *name; /* general.architecture */
    int (*resolve)(struct inf_model *model, struct shm_error *err);
    /* Begins a pass: the hidden state of its tokens before the first layer. */
    int (*embed)(struct inf_device *device, const struct inf_pass *pass, struct shm_error *err);
    /* The layers and the head; the stream has begun. */
    int (*forward)(const struct inf_model *model, struct inf_device *device, const struct inf_pass *pass,
                   struct shm_error *err);
};

extern const struct inf_arch inf_arch_qwen3moe;

struct inf_layer {
    const float *attn_norm, *ffn_norm; /* [hidden] */
    const float *q_norm, *k_norm;      /* [head_dim]; NULL: the architecture has none */
    struct krn_mat q, k, v, output;    /* projections */
    const float *router;               /* [experts][hidden]; in the arena where it is F32 there */
    struct shm_part gate, up, down;    /* inside a blob */
    const struct krn_type *gate_type, *up_type, *down_type;
};

struct inf_model {
    const struct shm_arena_view *arena;
    const struct inf_arch *arch;
    struct shm_hparams hparams; /* checked private copy */
    struct krn_shape shape;
    struct krn_mat embed, head; /* [vocab][hidden] */
    const float *output_norm;   /* [hidden] */
    struct inf_layer *layer;    /* [layers] */
    uint32_t max_cols;          /* longest weight row */
    float **vectors;            /* owned copies behind the pointers above */
    uint32_t n_vectors, cap_vectors;
};

/* Checks hyper-parameters, names, shapes, types. 0; -ENOTSUP unknown
 * architecture or type; -EINVAL with the tensor named; -ENOMEM. */
int inf_model_open(const struct shm_arena_view *arena, struct shm_error *err, struct inf_model **ret_model);
void inf_model_close(struct inf_model **model);

/* For resolve functions. A matrix is
 * [rows][cols]; a vector has n elements of any supported type. -ENOENT,
 * -EINVAL, -ENOTSUP, -ENOMEM with the tensor named. */
int inf_model_matrix(struct inf_model *model, const char *name, uint32_t rows, uint32_t cols,
                     struct krn_mat *ret_mat, struct shm_error *err);
int inf_model_vector(struct inf_model *model, const char *name, uint32_t n, const float **ret_vector,
                     struct shm_error *err);

/* A matrix as float32: the arena's own bytes where it is stored so, else a copy. */
int inf_model_floats(struct inf_model *model, const char *name, uint32_t rows, uint32_t cols,
                     const float **ret_floats, struct shm_error *err);

/* The expert parts of a layer from the catalog, checked against the shape. */
int inf_model_experts(struct inf_model *model, uint32_t layer, struct shm_error *err);

#endif
