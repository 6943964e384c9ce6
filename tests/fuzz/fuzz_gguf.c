/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: GGUF reader and model description. The input is one file, or
 * "SHRD" + u32 n + n bytes of a first shard + a second shard. What the reader
 * accepts must keep its promises: ranges in the file, arrays inside the header.
 */
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "expertd/exd_model.h"
#include "tests/fuzz/fuzz.h"

#define MUST(x)                                                                                              \
    do {                                                                                                     \
        if (!(x))                                                                                            \
            abort();                                                                                         \
    } while (0)

static uint64_t touch(struct prt_str s)
{
    uint64_t sum = s.len;

    for (size_t i = 0; i < s.len; i++)
        sum += (uint8_t)s.data[i];
    return sum;
}

static void check_tensors(const struct prt_gguf *g)
{
    for (uint32_t i = 0; i < prt_gguf_tensor_count(g); i++) {
        const struct prt_gguf_tensor *t = prt_gguf_tensor(g, i);
        const struct prt_gguf_shard *s = prt_gguf_shard(g, t->shard);

        MUST(s && t->size_bytes > 0 && t->offset >= s->header_bytes && t->offset <= s->size_bytes);
        MUST(t->size_bytes <= s->size_bytes - t->offset && t->offset % s->alignment == 0);
        MUST(prt_gguf_type_name(t->type));
        touch(t->name);
    }
}

static void check_values(const struct prt_gguf *g)
{
    for (uint32_t i = 0; i < prt_gguf_key_count(g); i++) {
        struct prt_str k = prt_gguf_key(g, i), s;
        struct prt_gguf_strings strs;
        struct prt_gguf_i32s i32s;
        char *key = strndup(k.data, k.len);
        uint32_t u;
        uint64_t sum = 0;
        float f;
        bool b;

        MUST(key);
        prt_gguf_u32(g, key, &u, NULL);
        prt_gguf_f32(g, key, &f, NULL);
        prt_gguf_bool(g, key, &b, NULL);
        if (prt_gguf_str(g, key, &s, NULL) == 0)
            touch(s);
        if (prt_gguf_strings(g, key, &strs, NULL) == 0) {
            size_t bytes = strs.size_bytes;

            while (prt_gguf_strings_next(&strs, &s)) {
                sum += s.len;
                touch(s);
            }
            MUST(sum == bytes);
        }
        if (prt_gguf_i32s(g, key, &i32s, NULL) == 0)
            for (uint64_t n = 0; n < i32s.count; n++)
                sum += (uint64_t)prt_gguf_i32_at(&i32s, n);
        free(key);
    }
}

static void check_model(const struct exd_model *m)
{
    const struct exd_tokenizer *t = &m->tok;

    MUST(m->hp.layers > 0 && m->hp.experts_used <= m->hp.experts && m->hp.heads % m->hp.kv_heads == 0);
    MUST(t->tokens.count == m->hp.vocab && (t->types.count == 0 || t->types.count == m->hp.vocab));
    MUST(t->eos < m->hp.vocab || t->eos == EXD_TOKEN_NONE);
    for (uint32_t i = 0; i < m->n_dense; i++)
        MUST(m->dense[i].rows * m->dense[i].row_bytes == m->dense[i].tensor->size_bytes);
    for (uint32_t l = 0; l < m->hp.layers; l++)
        for (int p = 0; p < EXD_PART_COUNT; p++) {
            const struct exd_experts *x = &m->layer[l].part[p];

            MUST(exd_model_part_offset(m, l, p, m->hp.experts - 1) + x->part_bytes ==
                 x->tensor->offset + x->tensor->size_bytes);
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct prt_gguf_memory src[2] = {{"a", data, size}, {"b", NULL, 0}};
    struct shm_error err = {0};
    struct prt_gguf *g;
    struct exd_model *m;
    uint8_t hash[16];
    size_t n = 1;

    if (size >= 8 && memcmp(data, "SHRD", 4) == 0) {
        uint32_t first;

        memcpy(&first, data + 4, 4);
        first = le32toh(first);
        first = first < size - 8 ? first : (uint32_t)(size - 8);
        src[0] = (struct prt_gguf_memory){"a", data + 8, first};
        src[1] = (struct prt_gguf_memory){"b", data + 8 + first, size - 8 - first};
        n = 2;
    }
    if (prt_gguf_open_memory(src, n, &g, &err) < 0) {
        MUST(err.text[0] && err.code < 0);
        return 0;
    }
    check_tensors(g);
    check_values(g);
    prt_gguf_fingerprint(g, hash);
    if (exd_model_open(g, &m, &err) == 0) {
        check_model(m);
        exd_model_close(&m);
    } else {
        MUST(err.text[0] && err.code < 0);
    }
    prt_gguf_close(&g);
    return 0;
}
