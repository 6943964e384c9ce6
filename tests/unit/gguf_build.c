/* SPDX-License-Identifier: MIT */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/prt_gguf_priv.h"
#include "tests/unit/gguf_build.h"

#define Q8_0 8u
#define F32  0u

void gb_put(struct gb_bytes *out, const void *data, size_t len)
{
    if (out->len + len > out->cap) {
        out->cap = (out->len + len) * 2;
        out->data = realloc(out->data, out->cap);
        if (!out->data)
            abort();
    }
    if (len)
        memcpy(out->data + out->len, data, len);
    out->len += len;
}

void gb_put_u32(struct gb_bytes *out, uint32_t v)
{
    v = htole32(v);
    gb_put(out, &v, 4);
}

void gb_put_u64(struct gb_bytes *out, uint64_t v)
{
    v = htole64(v);
    gb_put(out, &v, 8);
}

void gb_put_str(struct gb_bytes *out, const char *s)
{
    gb_put_u64(out, strlen(s));
    gb_put(out, s, strlen(s));
}

void gb_init(struct gb *b)
{
    *b = (struct gb){.version = 3, .alignment = 32, .n_kv_claim = UINT64_MAX, .n_tensors_claim = UINT64_MAX};
}

void gb_free(struct gb *b)
{
    free(b->kv.data);
    free(b->tensor);
    memset(b, 0, sizeof(*b));
}

void gb_key(struct gb *b, const char *key, uint32_t type, const void *value, size_t len)
{
    gb_put_str(&b->kv, key);
    gb_put_u32(&b->kv, type);
    gb_put(&b->kv, value, len);
    b->n_kv++;
}

void gb_u32(struct gb *b, const char *key, uint32_t v)
{
    v = htole32(v);
    gb_key(b, key, PRT_GGUF_U32, &v, 4);
}

void gb_f32(struct gb *b, const char *key, float v)
{
    gb_key(b, key, PRT_GGUF_F32, &v, 4);
}

void gb_bool(struct gb *b, const char *key, uint8_t v)
{
    gb_key(b, key, PRT_GGUF_BOOL, &v, 1);
}

void gb_str(struct gb *b, const char *key, const char *v)
{
    gb_key(b, key, PRT_GGUF_STRING, NULL, 0);
    gb_put_str(&b->kv, v);
}

static void array_head(struct gb *b, const char *key, uint32_t type, size_t n)
{
    gb_key(b, key, PRT_GGUF_ARRAY, NULL, 0);
    gb_put_u32(&b->kv, type);
    gb_put_u64(&b->kv, n);
}

void gb_i32s(struct gb *b, const char *key, const int32_t *v, size_t n)
{
    array_head(b, key, PRT_GGUF_I32, n);
    for (size_t i = 0; i < n; i++)
        gb_put_u32(&b->kv, (uint32_t)v[i]);
}

void gb_f32s(struct gb *b, const char *key, size_t n)
{
    array_head(b, key, PRT_GGUF_F32, n);
    for (size_t i = 0; i < n; i++) {
        float value = -(float)i;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        gb_put_u32(&b->kv, bits);
    }
}

void gb_strs(struct gb *b, const char *key, const char *prefix, size_t n)
{
    array_head(b, key, PRT_GGUF_STRING, n);
    for (size_t i = 0; i < n; i++) {
        char s[64];

        snprintf(s, sizeof(s), "%s%zu", prefix, i);
        gb_put_str(&b->kv, s);
    }
}

struct gb_tensor *gb_tensor(struct gb *b, const char *name, uint32_t type, uint32_t n_dims,
                            const uint64_t *dims)
{
    const struct prt_gguf_type_info *info = prt_gguf_type_info(type);
    struct gb_tensor *t;

    b->tensor = realloc(b->tensor, (b->n_tensors + 1) * sizeof(*b->tensor));
    if (!b->tensor)
        abort();
    t = &b->tensor[b->n_tensors++];
    *t = (struct gb_tensor){.type = type, .n_dims = n_dims, .offset = UINT64_MAX, .size_bytes = 1};
    snprintf(t->name, sizeof(t->name), "%s", name);
    for (uint32_t i = 0; i < n_dims && i < 8; i++) {
        t->dims[i] = dims[i];
        t->size_bytes *= dims[i];
    }
    t->size_bytes = info ? t->size_bytes / info->block_elems * info->block_bytes : 0;
    return t;
}

struct gb_bytes gb_finish(const struct gb *b)
{
    struct gb_bytes out = {0};
    uint64_t next = 0;

    gb_put(&out, "GGUF", 4);
    gb_put_u32(&out, b->version);
    gb_put_u64(&out, b->n_tensors_claim == UINT64_MAX ? b->n_tensors : b->n_tensors_claim);
    gb_put_u64(&out, b->n_kv_claim == UINT64_MAX ? b->n_kv : b->n_kv_claim);
    gb_put(&out, b->kv.data, b->kv.len);
    for (size_t i = 0; i < b->n_tensors; i++) {
        const struct gb_tensor *t = &b->tensor[i];

        gb_put_str(&out, t->name);
        gb_put_u32(&out, t->n_dims);
        for (uint32_t d = 0; d < t->n_dims && d < 8; d++)
            gb_put_u64(&out, t->dims[d]);
        gb_put_u32(&out, t->type);
        gb_put_u64(&out, t->offset == UINT64_MAX ? next : t->offset);
        next = (next + t->size_bytes + b->alignment - 1) / b->alignment * b->alignment;
    }
    if (b->n_tensors)
        while (out.len % b->alignment)
            gb_put(&out, "", 1);
    for (size_t i = 0, n = 0; i < b->n_tensors; i++) {
        for (uint64_t k = 0; k < b->tensor[i].size_bytes; k++, n++)
            gb_put(&out, &(uint8_t){(uint8_t)(k * 7 + i)}, 1);
        while (i + 1 < b->n_tensors && n % b->alignment) {
            gb_put(&out, "", 1);
            n++;
        }
    }
    return out;
}

struct want {
    const char *name;
    uint32_t type;
    uint64_t dims[3];
};

static void model_tensor(struct gb *b, const struct gb_model *opt, const char *name, const struct want *w,
                         unsigned *index)
{
    uint32_t n_dims = w->dims[2] ? 3 : w->dims[1] ? 2 : 1;

    if (opt->shards && (*index)++ % opt->shards != opt->shard)
        return;
    if (!opt->skip_tensor || strcmp(opt->skip_tensor, name) != 0)
        gb_tensor(b, name, w->type, n_dims, w->dims);
}

static void model_keys(struct gb *b, const struct gb_model *opt)
{
    static const int32_t types[4] = {1, 1, 1, 3};
    const struct {
        const char *name;
        uint32_t value;
    } ints[] = {
        {"qwen3moe.block_count", opt->layers ? opt->layers : 1},
        {"qwen3moe.context_length", 64},
        {"qwen3moe.embedding_length", 32},
        {"qwen3moe.attention.head_count", 1},
        {"qwen3moe.attention.head_count_kv", 1},
        {"qwen3moe.attention.key_length", 32},
        {"qwen3moe.attention.value_length", 32},
        {"qwen3moe.expert_count", 2},
        {"qwen3moe.expert_used_count", 1},
        {"qwen3moe.expert_feed_forward_length", 32},
        {"tokenizer.ggml.bos_token_id", 2},
        {"tokenizer.ggml.eos_token_id", 3},
    };
    const char *skip = opt->skip_key ? opt->skip_key : "";

    if (strcmp(skip, "general.architecture"))
        gb_str(b, "general.architecture", "qwen3moe");
    gb_str(b, "general.name", "tiny");
    for (size_t i = 0; i < sizeof(ints) / sizeof(ints[0]); i++)
        if (strcmp(skip, ints[i].name))
            gb_u32(b, ints[i].name, ints[i].value);
    if (strcmp(skip, "qwen3moe.attention.layer_norm_rms_epsilon"))
        gb_f32(b, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
    if (strcmp(skip, "qwen3moe.rope.freq_base"))
        gb_f32(b, "qwen3moe.rope.freq_base", 1e6f);
    if (strcmp(skip, "tokenizer.ggml.model"))
        gb_str(b, "tokenizer.ggml.model", "gpt2");
    if (strcmp(skip, "tokenizer.ggml.pre"))
        gb_str(b, "tokenizer.ggml.pre", "qwen2");
    if (strcmp(skip, "tokenizer.ggml.tokens"))
        gb_strs(b, "tokenizer.ggml.tokens", "t", 4);
    if (strcmp(skip, "tokenizer.ggml.token_type"))
        gb_i32s(b, "tokenizer.ggml.token_type", types, 4);
    if (strcmp(skip, "tokenizer.ggml.merges"))
        gb_strs(b, "tokenizer.ggml.merges", "a b", 2);
    if (strcmp(skip, "tokenizer.ggml.add_bos_token"))
        gb_bool(b, "tokenizer.ggml.add_bos_token", (uint8_t)opt->add_bos);
    gb_str(b, "tokenizer.chat_template", "{{ x }}");
}

void gb_model(struct gb *b, const struct gb_model *opt)
{
    static const struct want global[] = {{"token_embd.weight", Q8_0, {32, 4}},
                                         {"output_norm.weight", F32, {32}},
                                         {"output.weight", Q8_0, {32, 4}}};
    static const struct want layer[] = {
        {"attn_norm.weight", F32, {32}},           {"attn_q.weight", Q8_0, {32, 32}},
        {"attn_k.weight", Q8_0, {32, 32}},         {"attn_v.weight", Q8_0, {32, 32}},
        {"attn_output.weight", Q8_0, {32, 32}},    {"attn_q_norm.weight", F32, {32}},
        {"attn_k_norm.weight", F32, {32}},         {"ffn_norm.weight", F32, {32}},
        {"ffn_gate_inp.weight", F32, {32, 2}},     {"ffn_gate_exps.weight", Q8_0, {32, 32, 2}},
        {"ffn_up_exps.weight", Q8_0, {32, 32, 2}}, {"ffn_down_exps.weight", Q8_0, {32, 32, 2}},
    };
    uint32_t layers = opt->layers ? opt->layers : 1;
    unsigned index = 0;

    if (opt->shard == 0)
        model_keys(b, opt);
    if (opt->shards) {
        uint16_t no = htole16((uint16_t)opt->shard), count = htole16((uint16_t)opt->shards);
        int32_t total = (int32_t)((opt->untied ? 3 : 2) + 12 * layers);

        gb_key(b, "split.no", PRT_GGUF_U16, &no, 2);
        gb_key(b, "split.count", PRT_GGUF_U16, &count, 2);
        if (!opt->skip_key || strcmp(opt->skip_key, "split.tensors.count"))
            gb_key(b, "split.tensors.count", PRT_GGUF_I32, &total, 4);
    }
    for (size_t i = 0; i < (opt->untied ? 3 : 2); i++)
        model_tensor(b, opt, global[i].name, &global[i], &index);
    for (uint32_t l = 0; l < layers; l++)
        for (size_t i = 0; i < sizeof(layer) / sizeof(layer[0]); i++) {
            char name[64];

            snprintf(name, sizeof(name), "blk.%u.%s", l, layer[i].name);
            model_tensor(b, opt, name, &layer[i], &index);
        }
}
