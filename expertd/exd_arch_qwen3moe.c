/* SPDX-License-Identifier: MIT */
/* qwen3moe: Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B and relatives. */
#include <errno.h>

#include "expertd/exd_arch.h"

#define DIM_MAX      (1u << 20)
#define HEADS_MAX    4096u
#define HEAD_DIM_MAX 1024u

static int head_shape(struct exd_build *b)
{
    struct exd_hparams *hp = &b->model->hp;
    uint32_t rope_dims;
    int r;

    if (hp->heads % hp->kv_heads)
        return shm_error_set(
            b->err, EINVAL, "%s: key qwen3moe.attention.head_count is %u, not a multiple of head_count_kv %u",
            prt_gguf_path(b->gguf), hp->heads, hp->kv_heads);
    hp->head_dim_k = hp->hidden / hp->heads; /* what an absent key stands for */
    r = exd_build_opt_u32(b, "attention.key_length", 2, HEAD_DIM_MAX, &hp->head_dim_k);
    if (r < 0)
        return r;
    hp->head_dim_v = hp->hidden / hp->heads;
    r = exd_build_opt_u32(b, "attention.value_length", 1, HEAD_DIM_MAX, &hp->head_dim_v);
    if (r < 0)
        return r;
    if (hp->head_dim_k % 2 || hp->head_dim_k == 0 || hp->head_dim_k > HEAD_DIM_MAX ||
        hp->head_dim_v != hp->head_dim_k)
        return shm_error_set(
            b->err, EINVAL,
            "%s: keys of %u and values of %u elements a head (qwen3moe.attention.key_length and "
            "value_length); supported are equal, even lengths up to %u",
            prt_gguf_path(b->gguf), hp->head_dim_k, hp->head_dim_v, HEAD_DIM_MAX);
    rope_dims = hp->head_dim_k;
    return exd_build_opt_u32(b, "rope.dimension_count", hp->head_dim_k, hp->head_dim_k, &rope_dims);
}

static int qwen3moe_hparams(struct exd_build *b)
{
    struct exd_hparams *hp = &b->model->hp;
    int r;

    hp->rope_base = 10000.0f;
    hp->norm_topk = true;
    if ((r = exd_build_u32(b, "block_count", 1, EXD_LAYERS_MAX, &hp->layers)) < 0 ||
        (r = exd_build_u32(b, "context_length", 1, 1u << 30, &hp->context)) < 0 ||
        (r = exd_build_u32(b, "embedding_length", 1, DIM_MAX, &hp->hidden)) < 0 ||
        (r = exd_build_u32(b, "attention.head_count", 1, HEADS_MAX, &hp->heads)) < 0)
        return r;
    hp->kv_heads = hp->heads;
    if ((r = exd_build_opt_u32(b, "attention.head_count_kv", 1, HEADS_MAX, &hp->kv_heads)) < 0 ||
        (r = head_shape(b)) < 0 ||
        (r = exd_build_u32(b, "expert_count", 1, EXD_EXPERTS_MAX, &hp->experts)) < 0 ||
        (r = exd_build_u32(b, "expert_used_count", 1, hp->experts, &hp->experts_used)) < 0 ||
        (r = exd_build_u32(b, "expert_feed_forward_length", 1, DIM_MAX, &hp->expert_ffn)) < 0 ||
        (r = exd_build_f32(b, "attention.layer_norm_rms_epsilon", &hp->rms_eps)) < 0 ||
        (r = exd_build_opt_f32(b, "rope.freq_base", &hp->rope_base)) < 0 ||
        (r = exd_build_opt_bool(b, "expert_weights_norm", &hp->norm_topk)) < 0 ||
        (r = exd_build_only(b, "expert_shared_count", 0)) < 0 ||
        (r = exd_build_only(b, "attention.sliding_window", 0)) < 0)
        return r;
    return exd_build_no_rope_scaling(b);
}

static int qwen3moe_tensors(struct exd_build *b)
{
    struct exd_hparams *hp = &b->model->hp;
    uint64_t q = (uint64_t)hp->heads * hp->head_dim_k, k = (uint64_t)hp->kv_heads * hp->head_dim_k;
    uint64_t v = (uint64_t)hp->kv_heads * hp->head_dim_v, o = (uint64_t)hp->heads * hp->head_dim_v;
    uint32_t hidden = hp->hidden, ffn = hp->expert_ffn;
    int r;

    hp->tied_embeddings = !prt_gguf_find_tensor(b->gguf, "output.weight");
    if ((r = exd_build_dense(b, EXD_ROLE_TOKEN_EMBD, -1, "token_embd.weight", hp->vocab, hidden,
                             EXD_ALLOW_ANY)) < 0 ||
        (r = exd_build_dense(b, EXD_ROLE_OUTPUT_NORM, -1, "output_norm.weight", 1, hidden, EXD_ALLOW_F32)) <
            0)
        return r;
    if (!hp->tied_embeddings &&
        (r = exd_build_dense(b, EXD_ROLE_OUTPUT, -1, "output.weight", hp->vocab, hidden, EXD_ALLOW_ANY)) < 0)
        return r;
    for (uint32_t i = 0; i < hp->layers; i++) {
        const struct {
            enum exd_role role;
            const char *name;
            uint64_t rows, cols;
            enum exd_allow allow;
        } want[] = {
            {EXD_ROLE_ATTN_NORM, "attn_norm.weight", 1, hidden, EXD_ALLOW_F32},
            {EXD_ROLE_ATTN_Q, "attn_q.weight", q, hidden, EXD_ALLOW_ANY},
            {EXD_ROLE_ATTN_K, "attn_k.weight", k, hidden, EXD_ALLOW_ANY},
            {EXD_ROLE_ATTN_V, "attn_v.weight", v, hidden, EXD_ALLOW_ANY},
            {EXD_ROLE_ATTN_OUT, "attn_output.weight", hidden, o, EXD_ALLOW_ANY},
            {EXD_ROLE_ATTN_Q_NORM, "attn_q_norm.weight", 1, hp->head_dim_k, EXD_ALLOW_F32},
            {EXD_ROLE_ATTN_K_NORM, "attn_k_norm.weight", 1, hp->head_dim_k, EXD_ALLOW_F32},
            {EXD_ROLE_FFN_NORM, "ffn_norm.weight", 1, hidden, EXD_ALLOW_F32},
            {EXD_ROLE_ROUTER, "ffn_gate_inp.weight", hp->experts, hidden, EXD_ALLOW_FLOAT},
        };

        for (size_t n = 0; n < sizeof(want) / sizeof(want[0]); n++) {
            r = exd_build_dense(b, want[n].role, (int32_t)i, want[n].name, want[n].rows, want[n].cols,
                                want[n].allow);
            if (r < 0)
                return r;
        }
        if ((r = exd_build_experts(b, i, EXD_PART_GATE, "ffn_gate_exps.weight", ffn, hidden)) < 0 ||
            (r = exd_build_experts(b, i, EXD_PART_UP, "ffn_up_exps.weight", ffn, hidden)) < 0 ||
            (r = exd_build_experts(b, i, EXD_PART_DOWN, "ffn_down_exps.weight", hidden, ffn)) < 0)
            return r;
    }
    return 0;
}

/* Qwen's own is the first; models that others trained bring theirs. What the worker knows (inf_pretok.c). */
static const char *const qwen3moe_pre[] = {
    "qwen2",  "deepseek-r1-qwen", "llama-bpe", "llama3",      "llama-v3",     "glm4",           "chatglm-bpe",
    "gpt-4o", "llama4",           "tekken",    "deepseek-v3", "deepseek-llm", "deepseek-coder", NULL};

const struct exd_arch exd_arch_qwen3moe = {
    .name = "qwen3moe",
    .pre = qwen3moe_pre,
    .dense_global = 3,
    .dense_layer = 9,
    .hparams = qwen3moe_hparams,
    .tensors = qwen3moe_tensors,
};
