/* SPDX-License-Identifier: MIT */
/* The model description: what it finds in a good file, and the line each bad one gets. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expertd/exd_model.h"
#include "kernels/krn_quant.h"
#include "tests/unit/gguf_build.h"

TestSuite(model, .timeout = 30);

struct opened {
    struct gb_bytes file;
    struct prt_gguf *gguf;
    struct exd_model *model;
    struct shm_error err;
};

/* Finishes b and opens it as a model; b is freed. */
static int open_model(struct gb *b, struct opened *o)
{
    struct prt_gguf_memory src;

    memset(o, 0, sizeof(*o));
    o->file = gb_finish(b);
    gb_free(b);
    src = (struct prt_gguf_memory){"m.gguf", o->file.data, o->file.len};
    cr_assert_eq(prt_gguf_open_memory(&src, 1, &o->gguf, &o->err), 0, "%s", o->err.text);
    return exd_model_open(o->gguf, &o->model, &o->err);
}

static void close_model(struct opened *o)
{
    exd_model_close(&o->model);
    prt_gguf_close(&o->gguf);
    free(o->file.data);
}

static void refused(struct gb *b, const char *text)
{
    struct opened o;

    cr_expect_eq(open_model(b, &o), -EINVAL, "expected a refusal: %s", text);
    cr_expect_null(o.model);
    cr_expect(strstr(o.err.text, text) && strstr(o.err.text, "m.gguf"), "'%s' does not say '%s'", o.err.text,
              text);
    close_model(&o);
}

static void accepted(struct gb *b, struct opened *o)
{
    cr_assert_eq(open_model(b, o), 0, "%s", o->err.text);
}

/* A model without one key, for the caller to add another. */
static void without(struct gb *b, const char *key)
{
    gb_init(b);
    gb_model(b, &(struct gb_model){.skip_key = key});
}

static struct gb_tensor *with_tensor(struct gb *b, const char *name, uint32_t type, uint32_t n_dims,
                                     const uint64_t *dims)
{
    gb_init(b);
    gb_model(b, &(struct gb_model){.skip_tensor = name, .untied = 1});
    return gb_tensor(b, name, type, n_dims, dims);
}

Test(model, describes_a_small_one)
{
    static const uint64_t extra[1] = {8};
    struct gb b;
    struct opened o;
    const struct exd_hparams *hp;
    const struct exd_model *m;

    gb_init(&b);
    gb_model(&b, &(struct gb_model){.layers = 3});
    gb_tensor(&b, "blk.0.something_else", 0, 1, extra);
    accepted(&b, &o);
    m = o.model;
    hp = &m->hp;
    cr_expect_str_eq(m->arch, "qwen3moe");
    cr_expect(m->name.len == 4 && !memcmp(m->name.data, "tiny", 4));
    cr_expect(hp->layers == 3 && hp->hidden == 32 && hp->heads == 1 && hp->kv_heads == 1);
    cr_expect(hp->head_dim_k == 32 && hp->head_dim_v == 32 && hp->experts == 2 && hp->experts_used == 1);
    cr_expect(hp->expert_ffn == 32 && hp->vocab == 4 && hp->context == 64);
    cr_expect(hp->rms_eps == 1e-6f && hp->rope_base == 1e6f && hp->norm_topk && hp->tied_embeddings);
    cr_expect_eq(m->n_dense, 2 + 3 * 9);
    cr_expect_eq(m->n_ignored, 1);
    for (uint32_t i = 0; i < m->n_dense; i++) {
        const struct exd_dense *d = &m->dense[i];

        cr_expect_eq(d->layer, i < 2 ? -1 : (int32_t)(i - 2) / 9);
        cr_expect_eq(d->rows * d->row_bytes, d->tensor->size_bytes);
    }
    cr_expect_eq(m->dense[2 + 9 + 1].role, EXD_ROLE_ATTN_Q);
    cr_expect(m->dense[2 + 9 + 1].rows == 32 && m->dense[2 + 9 + 1].row_bytes == 34);
    for (uint32_t l = 0; l < 3; l++)
        for (int p = 0; p < EXD_PART_COUNT; p++) {
            const struct exd_experts *x = &m->layer[l].part[p];

            cr_expect(x->type == KRN_Q8_0 && x->rows == 32 && x->cols == 32 && x->part_bytes == 32 * 34);
            cr_expect_eq(exd_model_part_offset(m, l, p, 1), x->tensor->offset + 32 * 34);
        }
    cr_expect(m->tok.tokens.count == 4 && m->tok.types.count == 4 && m->tok.merges.count == 2);
    cr_expect(m->tok.bos == 2 && m->tok.eos == 3 && m->tok.pad == EXD_TOKEN_NONE && !m->tok.add_bos);
    cr_expect(m->tok.chat_template.len == 7 && m->tok.pre.len == 5);
    close_model(&o);
    exd_model_close(&o.model);
}

Test(model, shapes_tell_gate_from_down)
{
    /* Another width of the experts, so that swapped dimensions would be seen. */
    static const uint64_t in[3] = {32, 64, 2}, out[3] = {64, 32, 2};
    struct gb b;
    struct opened o;

    without(&b, "qwen3moe.expert_feed_forward_length");
    gb_u32(&b, "qwen3moe.expert_feed_forward_length", 64);
    b.n_tensors -= 3;
    gb_tensor(&b, "blk.0.ffn_gate_exps.weight", 8, 3, in);
    gb_tensor(&b, "blk.0.ffn_up_exps.weight", 1, 3, in);
    gb_tensor(&b, "blk.0.ffn_down_exps.weight", 2, 3, out);
    accepted(&b, &o);
    cr_expect(o.model->layer[0].part[EXD_PART_GATE].rows == 64 &&
              o.model->layer[0].part[EXD_PART_GATE].cols == 32);
    cr_expect_eq(o.model->layer[0].part[EXD_PART_GATE].part_bytes, 64 * 34);
    cr_expect_eq(o.model->layer[0].part[EXD_PART_UP].part_bytes, 64 * 32 * 2);
    cr_expect(o.model->layer[0].part[EXD_PART_DOWN].rows == 32 &&
              o.model->layer[0].part[EXD_PART_DOWN].cols == 64);
    cr_expect_eq(o.model->layer[0].part[EXD_PART_DOWN].part_bytes, 32 * 2 * 18);
    close_model(&o);
}

Test(model, needs_each_key)
{
    static const char *const keys[] = {
        "general.architecture",
        "qwen3moe.block_count",
        "qwen3moe.context_length",
        "qwen3moe.embedding_length",
        "qwen3moe.attention.head_count",
        "qwen3moe.expert_count",
        "qwen3moe.expert_used_count",
        "qwen3moe.expert_feed_forward_length",
        "qwen3moe.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    };

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct gb b;
        char text[128];

        snprintf(text, sizeof(text), "key %s is missing", keys[i]);
        without(&b, keys[i]);
        refused(&b, text);
    }
}

Test(model, absent_keys_have_defaults)
{
    static const char *const keys[] = {"qwen3moe.attention.head_count_kv", "qwen3moe.attention.key_length",
                                       "qwen3moe.attention.value_length",  "tokenizer.ggml.token_type",
                                       "tokenizer.ggml.bos_token_id",      "qwen3moe.rope.freq_base"};

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct gb b;
        struct opened o;

        without(&b, keys[i]);
        accepted(&b, &o);
        cr_expect(o.model->hp.head_dim_k == 32 && o.model->hp.head_dim_v == 32 && o.model->hp.kv_heads == 1);
        cr_expect_eq(o.model->hp.rope_base, i == 5 ? 10000.0f : 1e6f);
        cr_expect_eq(o.model->tok.types.count, i == 3 ? 0 : 4);
        cr_expect_eq(o.model->tok.bos, i == 4 ? EXD_TOKEN_NONE : 2);
        close_model(&o);
    }
}

Test(model, needs_each_tensor)
{
    static const char *const names[] = {
        "token_embd.weight",        "output_norm.weight",         "blk.0.attn_norm.weight",
        "blk.0.attn_q.weight",      "blk.0.attn_k.weight",        "blk.0.attn_v.weight",
        "blk.0.attn_output.weight", "blk.0.attn_q_norm.weight",   "blk.0.attn_k_norm.weight",
        "blk.0.ffn_norm.weight",    "blk.0.ffn_gate_inp.weight",  "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight",
    };

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct gb b;
        char text[128];

        gb_init(&b);
        gb_model(&b, &(struct gb_model){.skip_tensor = names[i]});
        snprintf(text, sizeof(text), "tensor %s is missing", names[i]);
        refused(&b, text);
    }
}

Test(model, refuses_bad_keys)
{
    static const struct {
        const char *key;
        uint32_t value;
        const char *text;
    } cases[] = {
        {"block_count", 0, "block_count is 0, supported are 1 to 1024"},
        {"block_count", 4000000000u, "block_count is 4000000000, supported are 1 to 1024"},
        {"block_count", 2, "tensor blk.1.attn_norm.weight is missing"},
        {"embedding_length", 0, "embedding_length is 0"},
        {"embedding_length", 64, "tensor token_embd.weight has shape [4][32], expected [4][64]"},
        {"attention.head_count", 3, "tensor blk.0.attn_q.weight has shape [32][32], expected [96][32]"},
        {"attention.head_count_kv", 2, "head_count is 1, not a multiple of head_count_kv 2"},
        {"attention.key_length", 16, "keys of 16 and values of 32 elements a head"},
        {"attention.value_length", 16, "keys of 32 and values of 16 elements a head"},
        {"expert_count", 0, "expert_count is 0, supported are 1 to 1024"},
        {"expert_count", 3, "tensor blk.0.ffn_gate_inp.weight has shape [2][32], expected [3][32]"},
        {"expert_used_count", 3, "expert_used_count is 3, supported are 1 to 2"},
        {"expert_feed_forward_length", 64,
         "tensor blk.0.ffn_gate_exps.weight has shape [2][32][32], expected [2][64][32]"},
        {"expert_shared_count", 1, "expert_shared_count is 1, supported is 0"},
        {"attention.sliding_window", 128, "attention.sliding_window is 128, supported is 0"},
        {"rope.dimension_count", 16, "rope.dimension_count is 16, supported is 32"},
        {"rope.freq_base", 3, "key qwen3moe.rope.freq_base is of type u32, expected a float"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct gb b;
        char key[96];

        snprintf(key, sizeof(key), "qwen3moe.%s", cases[i].key);
        without(&b, key);
        gb_u32(&b, key, cases[i].value);
        refused(&b, cases[i].text);
    }
}

Test(model, refuses_other_architectures_and_tokenizers)
{
    static const int32_t three[3] = {1, 1, 1};
    struct gb b;

    without(&b, "general.architecture");
    gb_str(&b, "general.architecture", "llama");
    refused(&b, "architecture llama is not supported; supported: qwen3moe");
    without(&b, "general.architecture");
    gb_str(&b, "general.architecture", "two\nlines");
    refused(&b, "architecture two");
    without(&b, "tokenizer.ggml.model");
    gb_str(&b, "tokenizer.ggml.model", "bert");
    refused(&b, "key tokenizer.ggml.model is bert; supported: gpt2 (byte-level BPE), llama");
    without(&b, "tokenizer.ggml.model");
    gb_str(&b, "tokenizer.ggml.model", "llama");
    refused(&b, "tokenizer.ggml.scores");
    without(&b, "tokenizer.ggml.model");
    gb_str(&b, "tokenizer.ggml.model", "llama");
    gb_f32s(&b, "tokenizer.ggml.scores", 3);
    refused(&b, "tokenizer.ggml.scores has 3 entries for 4 tokens");
    without(&b, "tokenizer.ggml.model");
    gb_str(&b, "tokenizer.ggml.model", "llama");
    gb_i32s(&b, "tokenizer.ggml.scores", three, 3);
    refused(&b, "an array of 32-bit floats");
    without(&b, "tokenizer.ggml.pre");
    gb_str(&b, "tokenizer.ggml.pre", "poro-chat");
    refused(
        &b,
        "key tokenizer.ggml.pre is poro-chat; supported with qwen3moe: qwen2, deepseek-r1-qwen, llama-bpe");
    without(&b, "tokenizer.ggml.tokens");
    gb_strs(&b, "tokenizer.ggml.tokens", "t", 5);
    refused(&b, "token_type has 4 entries for 5 tokens");
    without(&b, "tokenizer.ggml.tokens");
    gb_strs(&b, "tokenizer.ggml.tokens", "t", 0);
    refused(&b, "tokenizer.ggml.tokens has 0 tokens");
    without(&b, "tokenizer.ggml.token_type");
    gb_i32s(&b, "tokenizer.ggml.token_type", three, 3);
    refused(&b, "token_type has 3 entries for 4 tokens");
    without(&b, "tokenizer.ggml.eos_token_id");
    gb_u32(&b, "tokenizer.ggml.eos_token_id", 4);
    refused(&b, "key tokenizer.ggml.eos_token_id is 4, but the vocabulary has 4 tokens");
    without(&b, "tokenizer.ggml.add_bos_token");
    gb_u32(&b, "tokenizer.ggml.add_bos_token", 1);
    refused(&b, "tokenizer.ggml.add_bos_token is of type u32, expected a bool");
    gb_init(&b);
    gb_model(&b, &(struct gb_model){.skip_key = "tokenizer.ggml.bos_token_id", .add_bos = 1});
    refused(&b, "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing");
}

Test(model, refuses_rope_scaling)
{
    struct gb b;
    struct opened o;

    without(&b, NULL);
    gb_str(&b, "qwen3moe.rope.scaling.type", "yarn");
    refused(&b, "key qwen3moe.rope.scaling.type is yarn; supported: none");
    without(&b, NULL);
    gb_f32(&b, "qwen3moe.rope.scaling.factor", 4.0f);
    refused(&b, "key qwen3moe.rope.scaling.factor: position scaling is not supported");
    without(&b, NULL);
    gb_f32(&b, "qwen3moe.rope.scaling.factor", 1.0f);
    accepted(&b, &o);
    close_model(&o);
    without(&b, NULL);
    gb_str(&b, "qwen3moe.rope.scaling.type", "none");
    gb_f32(&b, "qwen3moe.rope.scaling.factor", 4.0f);
    accepted(&b, &o);
    close_model(&o);
}

Test(model, refuses_bad_tensors)
{
    static const uint64_t one[1] = {32}, two[2] = {32, 32}, long_row[2] = {32, 33}, embd[2] = {32, 5};
    static const uint64_t exps[3] = {32, 32, 2}, exps3[3] = {32, 32, 3}, router[2] = {32, 2};
    struct gb b;
    struct opened o;

    with_tensor(&b, "blk.0.attn_q.weight", 3, 2, two);
    refused(&b, "tensor blk.0.attn_q.weight is of type Q4_1; supported: F32, F16, Q4_0, Q8_0, Q4_K, Q5_K, "
                "Q6_K, BF16");
    with_tensor(&b, "blk.0.ffn_up_exps.weight", 20, 3, exps);
    refused(&b, "tensor blk.0.ffn_up_exps.weight is of type IQ4_NL; supported: F32");
    with_tensor(&b, "blk.0.ffn_norm.weight", 1, 1, one);
    refused(&b, "tensor blk.0.ffn_norm.weight is of type F16; supported: F32");
    with_tensor(&b, "blk.0.ffn_gate_inp.weight", 8, 2, router);
    refused(&b, "tensor blk.0.ffn_gate_inp.weight is of type Q8_0; supported: F32, F16, BF16");
    with_tensor(&b, "blk.0.attn_k.weight", 8, 2, long_row);
    refused(&b, "tensor blk.0.attn_k.weight has shape [33][32], expected [32][32]");
    with_tensor(&b, "blk.0.attn_k.weight", 8, 1, one);
    refused(&b, "tensor blk.0.attn_k.weight has shape [32], expected [32][32]");
    with_tensor(&b, "blk.0.attn_k.weight", 8, 3, exps);
    refused(&b, "tensor blk.0.attn_k.weight has shape [2][32][32], expected [32][32]");
    with_tensor(&b, "blk.0.ffn_down_exps.weight", 8, 3, exps3);
    refused(&b, "tensor blk.0.ffn_down_exps.weight has shape [3][32][32], expected [2][32][32]");
    with_tensor(&b, "token_embd.weight", 8, 2, embd);
    refused(&b, "tensor token_embd.weight has shape [5][32], expected [4][32]");
    with_tensor(&b, "output.weight", 8, 2, embd);
    refused(&b, "tensor output.weight has shape [5][32], expected [4][32]");
    /* Other storage where it is allowed. */
    with_tensor(&b, "blk.0.ffn_gate_inp.weight", 30, 2, router);
    accepted(&b, &o);
    cr_expect_not(o.model->hp.tied_embeddings);
    cr_expect_eq(o.model->n_dense, 3 + 9);
    close_model(&o);
}

Test(model, sentencepiece_has_scores_in_place_of_merges)
{
    for (uint8_t said = 0; said < 2; said++) {
        struct opened o;
        struct gb b;

        without(&b, "tokenizer.ggml.model");
        gb_str(&b, "tokenizer.ggml.model", "llama");
        gb_f32s(&b, "tokenizer.ggml.scores", 4);
        if (said)
            gb_bool(&b, "tokenizer.ggml.add_space_prefix", 0);
        accepted(&b, &o);
        const struct exd_tokenizer *t = &o.model->tok;
        cr_expect(t->scores.count == 4 && prt_gguf_f32_at(&t->scores, 3) == -3.0f);
        cr_expect(t->merges.count == 0 && t->pre.len == 0 && t->add_space_prefix == !said && !t->add_bos);
        close_model(&o);
    }
}

Test(model, split_over_shards)
{
    struct gb_bytes f[3];
    struct prt_gguf_memory src[3];
    struct prt_gguf *g;
    struct exd_model *m;
    struct shm_error err = {0};

    for (uint32_t i = 0; i < 3; i++) {
        static const char *const name[3] = {"a", "b", "c"};
        struct gb b;

        gb_init(&b);
        gb_model(&b, &(struct gb_model){.shard = i, .shards = 3, .layers = 2});
        f[i] = gb_finish(&b);
        gb_free(&b);
        src[i] = (struct prt_gguf_memory){name[i], f[i].data, f[i].len};
    }
    cr_assert_eq(prt_gguf_open_memory(src, 3, &g, &err), 0, "%s", err.text);
    cr_assert_eq(exd_model_open(g, &m, &err), 0, "%s", err.text);
    cr_expect_eq(m->n_ignored, 0);
    cr_expect_neq(m->layer[0].part[EXD_PART_GATE].tensor->shard, m->layer[0].part[EXD_PART_UP].tensor->shard);
    exd_model_close(&m);
    prt_gguf_close(&g);
    for (int i = 0; i < 3; i++)
        free(f[i].data);
}

Test(model, shipped_model)
{
    const char *src = getenv("EXPERTD_SRC");
    char path[512];
    struct prt_gguf *g;
    struct exd_model *m;
    struct shm_error err = {0};
    struct prt_gguf_strings tokens;
    struct prt_str s = {NULL, 0};

    snprintf(path, sizeof(path), "%s/tools/model/story-q4_k.gguf", src ? src : EXPERTD_SRC_DEFAULT);
    cr_assert_eq(prt_gguf_open(path, &g, &err), 0, "%s", err.text);
    cr_assert_eq(exd_model_open(g, &m, &err), 0, "%s", err.text);
    cr_expect(m->hp.layers == 5 && m->hp.hidden == 256 && m->hp.heads == 8 && m->hp.kv_heads == 2);
    cr_expect(m->hp.head_dim_k == 64 && m->hp.experts == 48 && m->hp.experts_used == 8 &&
              m->hp.expert_ffn == 64);
    cr_expect(m->hp.vocab == 4096 && m->hp.context == 2048 && m->hp.rope_base == 10000.0f);
    cr_expect_not(m->hp.tied_embeddings);
    cr_expect_eq(m->n_ignored, 0);
    cr_expect_eq(m->layer[0].part[EXD_PART_GATE].type, KRN_Q4_K);
    cr_expect_eq(m->layer[0].part[EXD_PART_GATE].part_bytes, 64 * 144);
    cr_expect_eq(m->layer[0].part[EXD_PART_DOWN].type, KRN_Q8_0);
    cr_expect_eq(m->layer[1].part[EXD_PART_DOWN].type, KRN_Q4_0);
    cr_expect_eq(m->layer[1].part[EXD_PART_DOWN].part_bytes, 256 * 2 * 18);
    tokens = m->tok.tokens;
    while (prt_gguf_strings_next(&tokens, &s))
        ;
    cr_expect(s.len == 10 && !memcmp(s.data, "<|im_end|>", 10));
    cr_expect(m->tok.eos == 4095 && prt_gguf_i32_at(&m->tok.types, 4095) == 3);
    exd_model_close(&m);
    prt_gguf_close(&g);
}
