/* SPDX-License-Identifier: MIT */
/*
 * Builds small GGUF files in memory, right ones and wrong ones. Test code: it
 * aborts when memory runs out. Values go in as they are given, nothing is checked.
 */
#ifndef GGUF_BUILD_H
#define GGUF_BUILD_H

#include <stddef.h>
#include <stdint.h>

struct gb_bytes {
    uint8_t *data;
    size_t len;
    size_t cap;
};

struct gb_tensor {
    char name[300];
    uint32_t type;
    uint32_t n_dims;
    uint64_t dims[8];
    uint64_t size_bytes; /* by type and dims, 0 for an unknown type */
    uint64_t offset;     /* UINT64_MAX: the next aligned place */
};

struct gb {
    uint32_t version;
    uint32_t alignment; /* used for the layout; the key is not written by itself */
    uint64_t n_kv;
    uint64_t n_kv_claim, n_tensors_claim; /* UINT64_MAX: the true counts */
    struct gb_bytes kv;
    struct gb_tensor *tensor;
    size_t n_tensors;
};

void gb_init(struct gb *b);
void gb_free(struct gb *b);

void gb_put(struct gb_bytes *out, const void *data, size_t len);
void gb_put_u32(struct gb_bytes *out, uint32_t v);
void gb_put_u64(struct gb_bytes *out, uint64_t v);
void gb_put_str(struct gb_bytes *out, const char *s);

void gb_key(struct gb *b, const char *key, uint32_t type, const void *value, size_t len);
void gb_u32(struct gb *b, const char *key, uint32_t v);
void gb_f32(struct gb *b, const char *key, float v);
void gb_bool(struct gb *b, const char *key, uint8_t v);
void gb_str(struct gb *b, const char *key, const char *v);
void gb_i32s(struct gb *b, const char *key, const int32_t *v, size_t n);
void gb_f32s(struct gb *b, const char *key, size_t n); /* 0, -1, -2, ... */
/* An array of n strings "PREFIX0", "PREFIX1"... */
void gb_strs(struct gb *b, const char *key, const char *prefix, size_t n);

/* Returned so that a test can change it; valid until the next one is added. */
struct gb_tensor *gb_tensor(struct gb *b, const char *name, uint32_t type, uint32_t n_dims,
                            const uint64_t *dims);

/* The whole file; tensor data is a fixed pattern. The caller frees ->data. */
struct gb_bytes gb_finish(const struct gb *b);

/* A complete qwen3moe model of 12 KiB: 1 layer, hidden 32, 1 head of 32, 2
 * experts (1 used) of width 32, 4 tokens, Q8_0. */
struct gb_model {
    uint32_t layers;         /* 0: 1 */
    uint32_t shard, shards;  /* shards 0: one file, no split keys */
    const char *skip_key;    /* left out: the test adds its own or none */
    const char *skip_tensor; /* likewise */
    uint32_t untied;         /* with output.weight */
    uint32_t add_bos;        /* value of that key */
};

void gb_model(struct gb *b, const struct gb_model *opt);

#endif
