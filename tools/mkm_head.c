/* SPDX-License-Identifier: MIT */
/* mkmodel: the file's header: keys, tokenizer, table of tensors. */
#include "tools/mkm_model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct buffer {
    char *data;
    size_t size, capacity;
    bool failed;
};

static void put(struct buffer *b, const void *data, size_t n)
{
    if (b->failed)
        return;
    if (b->size + n > b->capacity) {
        size_t capacity = (b->size + n) * 2;
        char *grown = realloc(b->data, capacity);
        if (!grown) {
            b->failed = true;
            return;
        }
        b->data = grown;
        b->capacity = capacity;
    }
    memcpy(b->data + b->size, data, n);
    b->size += n;
}

static void put_u32(struct buffer *b, uint32_t v)
{
    put(b, &v, 4);
}

static void put_u64(struct buffer *b, uint64_t v)
{
    put(b, &v, 8);
}

static void put_str(struct buffer *b, const char *text)
{
    put_u64(b, strlen(text));
    put(b, text, strlen(text));
}

enum { GGUF_U32 = 4, GGUF_I32 = 5, GGUF_F32 = 6, GGUF_BOOL = 7, GGUF_STR = 8, GGUF_ARRAY = 9 };

static void key(struct buffer *b, uint64_t *count, const char *name, uint32_t type)
{
    put_str(b, name);
    put_u32(b, type);
    ++*count;
}

static void key_u32(struct buffer *b, uint64_t *count, const char *name, uint32_t v)
{
    key(b, count, name, GGUF_U32);
    put_u32(b, v);
}

static void key_f32(struct buffer *b, uint64_t *count, const char *name, float v)
{
    key(b, count, name, GGUF_F32);
    put(b, &v, 4);
}

static void key_str(struct buffer *b, uint64_t *count, const char *name, const char *v)
{
    key(b, count, name, GGUF_STR);
    put_str(b, v);
}

static void key_array(struct buffer *b, uint64_t *count, const char *name, uint32_t type, uint64_t n)
{
    key(b, count, name, GGUF_ARRAY);
    put_u32(b, type);
    put_u64(b, n);
}

/* general.file_type: what most of the weights are. */
static uint32_t file_type(const struct krn_type *type)
{
    switch ((enum krn_ggml_id)type->ggml_id) {
    case KRN_F32:
        return 0;
    case KRN_F16:
        return 1;
    case KRN_Q4_0:
        return 2;
    case KRN_Q8_0:
        return 7;
    case KRN_Q4_K:
        return 15;
    case KRN_Q5_K:
        return 17;
    case KRN_Q6_K:
        return 18;
    case KRN_BF16:
        return 32;
    }
    return 0;
}

static void put_model_keys(struct buffer *b, uint64_t *n, const struct mkm_shape *sh)
{
    char name[96];

    snprintf(name, sizeof name, "synthetic %s, seed %llu", sh->preset, (unsigned long long)sh->seed);
    key_str(b, n, "general.architecture", "qwen3moe");
    key_str(b, n, "general.name", name);
    key_u32(b, n, "general.alignment", MKM_ALIGN);
    key_u32(b, n, "general.quantization_version", 2);
    key_u32(b, n, "general.file_type", file_type(sh->experts_type));
    key_u32(b, n, "qwen3moe.block_count", sh->layers);
    key_u32(b, n, "qwen3moe.context_length", sh->ctx);
    key_u32(b, n, "qwen3moe.embedding_length", sh->hidden);
    key_u32(b, n, "qwen3moe.feed_forward_length", sh->ffn * sh->topk);
    key_u32(b, n, "qwen3moe.expert_feed_forward_length", sh->ffn);
    key_u32(b, n, "qwen3moe.attention.head_count", sh->heads);
    key_u32(b, n, "qwen3moe.attention.head_count_kv", sh->kv_heads);
    key_u32(b, n, "qwen3moe.attention.key_length", sh->head_dim);
    key_u32(b, n, "qwen3moe.attention.value_length", sh->head_dim);
    key_f32(b, n, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
    key_f32(b, n, "qwen3moe.rope.freq_base", (float)sh->rope_base);
    key_u32(b, n, "qwen3moe.expert_count", sh->experts);
    key_u32(b, n, "qwen3moe.expert_used_count", sh->topk);
}

static void put_tokenizer_keys(struct buffer *b, uint64_t *n, const struct mkm_vocab *v)
{
    static const char chat[] =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    key_str(b, n, "tokenizer.ggml.model", "gpt2");
    key_str(b, n, "tokenizer.ggml.pre", "qwen2");
    key_array(b, n, "tokenizer.ggml.tokens", GGUF_STR, v->n_tokens);
    put(b, v->tokens, v->tokens_bytes);
    key_array(b, n, "tokenizer.ggml.token_type", GGUF_I32, v->n_tokens);
    for (uint32_t i = 0; i < v->n_tokens; i++)
        put_u32(b, i < v->n_tokens - MKM_SPECIALS ? 1 : 3); /* normal, control */
    key_array(b, n, "tokenizer.ggml.merges", GGUF_STR, v->n_merges);
    put(b, v->merges, v->merges_bytes);
    key_u32(b, n, "tokenizer.ggml.eos_token_id", v->n_tokens - 1);
    key_u32(b, n, "tokenizer.ggml.padding_token_id", v->n_tokens - 3);
    key(b, n, "tokenizer.ggml.add_bos_token", GGUF_BOOL);
    put(b, "", 1);
    key_str(b, n, "tokenizer.chat_template", chat);
}

int mkm_head_make(const struct mkm_shape *shape, const struct mkm_plan *plan, char **ret_head,
                  size_t *ret_bytes)
{
    static const char zeros[MKM_ALIGN];
    struct buffer keys = {0}, b = {0};
    struct mkm_vocab vocab;
    uint64_t n_keys = 0;
    int r = mkm_vocab_make(shape->vocab, &vocab);

    if (r < 0)
        return r;
    put_model_keys(&keys, &n_keys, shape);
    put_tokenizer_keys(&keys, &n_keys, &vocab);
    mkm_vocab_free(&vocab);
    put(&b, "GGUF", 4);
    put_u32(&b, 3);
    put_u64(&b, plan->n_tensors);
    put_u64(&b, n_keys);
    put(&b, keys.data, keys.size);
    for (uint32_t i = 0; i < plan->n_tensors; i++) {
        const struct mkm_tensor *t = &plan->tensors[i];
        put_str(&b, t->name);
        put_u32(&b, t->n_dims);
        put(&b, t->dims, t->n_dims * sizeof *t->dims);
        put_u32(&b, t->type->ggml_id);
        put_u64(&b, t->offset);
    }
    put(&b, zeros, (MKM_ALIGN - b.size % MKM_ALIGN) % MKM_ALIGN);
    r = b.failed || keys.failed ? -ENOMEM : 0;
    free(keys.data);
    if (r < 0) {
        free(b.data);
        return r;
    }
    *ret_head = b.data;
    *ret_bytes = b.size;
    return 0;
}
