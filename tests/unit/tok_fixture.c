/* SPDX-License-Identifier: MIT */
#include "tok_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/prt_gguf.h"

#define MUST(what)                                                                                           \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "fixture: %s failed: %s\n", #what, shm_error_text(&err));                        \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

const char *tok_fixture_path(const char *name)
{
    static char path[4096];
    const char *root = getenv("EXPERTD_SRC");
    snprintf(path, sizeof path, "%s/%s", root ? root : EXPERTD_SRC_DEFAULT, name);
    return path;
}

static void pack(const struct prt_gguf *gguf, const char *key, struct inf_string_table *table,
                 uint32_t **ret_offsets, char **ret_bytes)
{
    struct shm_error err = {0};
    struct prt_gguf_strings strings;
    struct prt_str s;
    MUST(prt_gguf_strings(gguf, key, &strings, &err) == 0);
    uint32_t *offsets = malloc((strings.count + 1) * sizeof *offsets), n = 0, at = 0;
    char *bytes = malloc(strings.size_bytes + 1);
    MUST(offsets && bytes);
    while (prt_gguf_strings_next(&strings, &s)) {
        offsets[n++] = at;
        memcpy(bytes + at, s.data, s.len);
        at += (uint32_t)s.len;
    }
    offsets[n] = at;
    *table = (struct inf_string_table){.n = n, .offsets = offsets, .bytes = bytes, .size_bytes = at};
    *ret_offsets = offsets;
    *ret_bytes = bytes;
}

void tok_fixture_open(struct tok_fixture *f)
{
    struct shm_error err = {0};
    struct prt_gguf *gguf = NULL;
    struct prt_gguf_i32s types;
    struct prt_str pre, chat;
    uint32_t eos;
    memset(f, 0, sizeof *f);
    MUST(prt_gguf_open(tok_fixture_path("tools/model/story-q4_k.gguf"), &gguf, &err) == 0);
    pack(gguf, "tokenizer.ggml.tokens", &f->src.tokens, &f->token_offsets, &f->token_bytes);
    pack(gguf, "tokenizer.ggml.merges", &f->src.merges, &f->merge_offsets, &f->merge_bytes);
    MUST(prt_gguf_i32s(gguf, "tokenizer.ggml.token_type", &types, &err) == 0);
    MUST(types.count == f->src.tokens.n);
    f->types = malloc(types.count * sizeof *f->types);
    MUST(f->types);
    for (uint64_t i = 0; i < types.count; i++)
        f->types[i] = prt_gguf_i32_at(&types, i);
    MUST(prt_gguf_str(gguf, "tokenizer.ggml.pre", &pre, &err) == 0 && pre.len < sizeof f->pre);
    memcpy(f->pre, pre.data, pre.len);
    MUST(prt_gguf_str(gguf, "tokenizer.chat_template", &chat, &err) == 0);
    f->chat_template = malloc(chat.len + 1);
    MUST(f->chat_template);
    memcpy(f->chat_template, chat.data, chat.len);
    f->chat_template_len = chat.len;
    MUST(prt_gguf_u32(gguf, "tokenizer.ggml.eos_token_id", &eos, &err) == 0);
    f->src.types = f->types;
    f->src.pre = f->pre;
    f->src.pre_len = pre.len;
    f->src.eos_id = (int32_t)eos;
    f->src.bos_id = -1;
    prt_gguf_close(&gguf);
}

void tok_fixture_close(struct tok_fixture *f)
{
    free(f->token_offsets);
    free(f->merge_offsets);
    free(f->token_bytes);
    free(f->merge_bytes);
    free(f->types);
    free(f->chat_template);
    memset(f, 0, sizeof *f);
}

struct inf_tokenizer *tok_fixture_tokenizer(void)
{
    struct shm_error err = {0};
    struct tok_fixture f;
    struct inf_tokenizer *tok = NULL;
    tok_fixture_open(&f);
    MUST(inf_tokenizer_create(&f.src, &err, &tok) == 0);
    tok_fixture_close(&f);
    return tok;
}
