/* SPDX-License-Identifier: MIT */
/*
 * qwen3moe: pre-norm decoder, grouped-query attention with a norm per head
 * and rotary positions, every layer a mixture of SwiGLU experts, tied or own
 * head. Qwen3-30B-A3B, Qwen3-Coder-30B-A3B and Qwen3-235B-A22B are of this kind.
 */
#include "inferd/inf_device.h"
#include "inferd/inf_model.h"

#include <stdio.h>

static int resolve_layer(struct inf_model *m, uint32_t i, struct shm_error *err)
{
    const struct shm_hparams *h = &m->hparams;
    struct inf_layer *l = &m->layer[i];
    const struct {
        const char *name;
        uint32_t n;
        const float **at;
    } vector[] = {
        {"attn_norm", h->hidden, &l->attn_norm},
        {"ffn_norm", h->hidden, &l->ffn_norm},
        {"attn_q_norm", h->head_dim, &l->q_norm},
        {"attn_k_norm", h->head_dim, &l->k_norm},
    };
    const struct {
        const char *name;
        uint32_t rows, cols;
        struct krn_mat *at;
    } matrix[] = {
        {"attn_q", h->heads * h->head_dim, h->hidden, &l->q},
        {"attn_k", h->kv_heads * h->head_dim, h->hidden, &l->k},
        {"attn_v", h->kv_heads * h->head_dim, h->hidden, &l->v},
        {"attn_output", h->hidden, h->heads * h->head_dim, &l->output},
    };
    char name[SHM_TENSOR_NAME_BYTES];
    int rc;
    for (size_t k = 0; k < sizeof vector / sizeof vector[0]; k++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", i, vector[k].name);
        if ((rc = inf_model_vector(m, name, vector[k].n, vector[k].at, err)))
            return rc;
    }
    for (size_t k = 0; k < sizeof matrix / sizeof matrix[0]; k++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", i, matrix[k].name);
        if ((rc = inf_model_matrix(m, name, matrix[k].rows, matrix[k].cols, matrix[k].at, err)))
            return rc;
    }
    snprintf(name, sizeof name, "blk.%u.ffn_gate_inp.weight", i);
    if ((rc = inf_model_floats(m, name, h->experts, h->hidden, &l->router, err)))
        return rc;
    return inf_model_experts(m, i, err);
}

static int resolve(struct inf_model *m, struct shm_error *err)
{
    const struct shm_hparams *h = &m->hparams;
    int rc;
    if ((rc = inf_model_matrix(m, "token_embd.weight", h->vocab, h->hidden, &m->embed, err)) ||
        (rc = inf_model_matrix(m, h->tied_head ? "token_embd.weight" : "output.weight", h->vocab, h->hidden,
                               &m->head, err)) ||
        (rc = inf_model_vector(m, "output_norm.weight", h->hidden, &m->output_norm, err)))
        return rc;
    for (uint32_t i = 0; i < h->layers; i++)
        if ((rc = resolve_layer(m, i, err)))
            return rc;
    return 0;
}

static int forward(const struct inf_model *m, struct inf_device *d, const struct inf_pass *pass,
                   struct shm_error *err)
{
    for (uint32_t i = 0; i < m->hparams.layers; i++) {
        int rc = inf_attention(d, pass, i, err);
        if (!rc)
            rc = inf_experts(d, pass, i, err);
        if (rc)
            return rc;
    }
    return inf_head(d, pass, err);
}

const struct inf_arch inf_arch_qwen3moe = {
    .name = "qwen3moe", .resolve = resolve, .embed = inf_embed, .forward = forward};
