/* SPDX-License-Identifier: MIT */
/*
 * Between exd_model.c and the files exd_arch_NAME.c: what an architecture
 * implements, and the helpers it is written with. Private to these files.
 *
 * A new architecture is a new file with a struct exd_arch, named in the table
 * of exd_model.c. Its describe() states keys and tensors one by one through the
 * helpers, each of which checks and, on failure, writes the error line.
 */
#ifndef EXD_ARCH_H
#define EXD_ARCH_H

#include "expertd/exd_model.h"

struct exd_build {
    const struct exd_arch *arch;
    const struct prt_gguf *gguf;
    struct exd_model *model;
    uint32_t dense_cap;
    uint32_t n_used; /* tensors taken */
    struct shm_error *err;
};

struct exd_arch {
    const char *name;       /* general.architecture, and the prefix of its keys */
    const char *const *pre; /* pre-tokenizers that its models use, NULL-terminated */
    uint32_t dense_global;  /* most dense tensors outside of the layers */
    uint32_t dense_layer;   /* dense tensors of a layer */
    /* Fills model->hp. Keys only. */
    int (*hparams)(struct exd_build *build);
    /* States every tensor: globals first, then each layer's. */
    int (*tensors)(struct exd_build *build);
};

extern const struct exd_arch exd_arch_qwen3moe;

/* Types that a dense tensor may have. */
enum exd_allow { EXD_ALLOW_F32, EXD_ALLOW_FLOAT /* F32, F16, BF16 */, EXD_ALLOW_ANY /* all supported */ };

/* Integer key ARCH.name in [min, max]. The opt form leaves *value alone when the key is absent. */
int exd_build_u32(struct exd_build *build, const char *name, uint32_t min, uint32_t max, uint32_t *ret_value);
int exd_build_opt_u32(struct exd_build *build, const char *name, uint32_t min, uint32_t max, uint32_t *value);
/* Float key ARCH.name, > 0. */
int exd_build_f32(struct exd_build *build, const char *name, float *ret_value);
int exd_build_opt_f32(struct exd_build *build, const char *name, float *value);
int exd_build_opt_bool(struct exd_build *build, const char *name, bool *value);

/* Refuses position scaling: ARCH.rope.scaling.* other than none. */
int exd_build_no_rope_scaling(struct exd_build *build);
/* Refuses an integer key that is there with a value other than the only one supported. */
int exd_build_only(struct exd_build *build, const char *name, uint32_t supported);

/* Appends a dense tensor of rows x cols (rows 1: a vector). layer -1: name is
 * the whole tensor name; else the tensor is blk.LAYER.name. */
int exd_build_dense(struct exd_build *build, enum exd_role role, int32_t layer, const char *name,
                    uint64_t rows, uint64_t cols, enum exd_allow allow);

/* Sets one expert matrix of a layer, blk.LAYER.name of [experts][rows][cols]. */
int exd_build_experts(struct exd_build *build, uint32_t layer, enum exd_part part, const char *name,
                      uint32_t rows, uint32_t cols);

#endif
