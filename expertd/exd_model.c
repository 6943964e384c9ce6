/* SPDX-License-Identifier: MIT */
/* Model description: the steps common to all architectures. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expertd/exd_arch.h"
#include "expertd/exd_model.h"

static const struct exd_arch *const archs[] = {&exd_arch_qwen3moe};

#define N_ARCHS (sizeof(archs) / sizeof(archs[0]))

static bool str_is(struct prt_str s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.data, text, s.len) == 0;
}

/* A required thing that is not there is a bad file to the caller, not a missing one. */
static int required(int r)
{
    return r == -ENOENT ? -EINVAL : r;
}

static int find_arch(struct exd_build *b)
{
    struct prt_str name;
    char known[256] = "";
    size_t used = 0;
    int r = prt_gguf_str(b->gguf, "general.architecture", &name, b->err);

    if (r < 0)
        return required(r);
    for (size_t i = 0; i < N_ARCHS; i++) {
        if (str_is(name, archs[i]->name)) {
            b->arch = archs[i];
            b->model->arch = archs[i]->name;
            return 0;
        }
        if (used < sizeof(known))
            used +=
                (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", archs[i]->name);
    }
    return shm_error_set(b->err, EINVAL, "%s: architecture %.*s is not supported; supported: %s",
                         prt_gguf_path(b->gguf), PRT_STR(name), known);
}

/* An optional string; absent leaves it empty. */
static int opt_str(struct exd_build *b, const char *key, struct prt_str *value)
{
    int r = prt_gguf_str(b->gguf, key, value, b->err);

    return r == -ENOENT ? 0 : r;
}

/* An optional token id, EXD_TOKEN_NONE when absent; -1 in a signed key also means none. */
static int opt_token(struct exd_build *b, const char *key, uint32_t *ret_id)
{
    uint32_t id = EXD_TOKEN_NONE;
    int r = prt_gguf_u32(b->gguf, key, &id, b->err);

    if (r < 0 && r != -ENOENT)
        return r;
    if (id != EXD_TOKEN_NONE && id >= b->model->hp.vocab)
        return shm_error_set(b->err, EINVAL,
                             "%s: key %s is %" PRIu32 ", but the vocabulary has %" PRIu32 " tokens",
                             prt_gguf_path(b->gguf), key, id, b->model->hp.vocab);
    *ret_id = id;
    return 0;
}

static int check_tokenizer_names(struct exd_build *b)
{
    struct exd_tokenizer *t = &b->model->tok;
    char known[256] = "";
    size_t used = 0;
    int r = prt_gguf_str(b->gguf, "tokenizer.ggml.model", &t->model, b->err);

    if (r < 0)
        return required(r);
    if (str_is(t->model, "llama"))
        return 0; /* cuts nothing beforehand */
    if (!str_is(t->model, "gpt2"))
        return shm_error_set(b->err, EINVAL,
                             "%s: key tokenizer.ggml.model is %.*s; supported: gpt2 (byte-level BPE), llama "
                             "(SentencePiece)",
                             prt_gguf_path(b->gguf), PRT_STR(t->model));
    r = prt_gguf_str(b->gguf, "tokenizer.ggml.pre", &t->pre, b->err);
    if (r < 0)
        return required(r);
    for (size_t i = 0; b->arch->pre[i]; i++) {
        if (str_is(t->pre, b->arch->pre[i]))
            return 0;
        if (used < sizeof(known))
            used +=
                (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", b->arch->pre[i]);
    }
    return shm_error_set(b->err, EINVAL, "%s: key tokenizer.ggml.pre is %.*s; supported with %s: %s",
                         prt_gguf_path(b->gguf), PRT_STR(t->pre), b->arch->name, known);
}

/* What SentencePiece has in place of merges. */
static int read_scores(struct exd_build *b)
{
    struct exd_tokenizer *t = &b->model->tok;
    int r = prt_gguf_f32s(b->gguf, "tokenizer.ggml.scores", &t->scores, b->err);

    if (r < 0)
        return required(r);
    if (t->scores.count != t->tokens.count)
        return shm_error_set(b->err, EINVAL,
                             "%s: key tokenizer.ggml.scores has %" PRIu64 " entries for %" PRIu64 " tokens",
                             prt_gguf_path(b->gguf), t->scores.count, t->tokens.count);
    t->add_space_prefix = true;
    t->add_bos = t->bos != EXD_TOKEN_NONE;
    r = prt_gguf_bool(b->gguf, "tokenizer.ggml.add_space_prefix", &t->add_space_prefix, b->err);
    return r < 0 && r != -ENOENT ? r : 0;
}

static int read_tokenizer(struct exd_build *b)
{
    struct exd_tokenizer *t = &b->model->tok;
    struct exd_hparams *hp = &b->model->hp;
    bool spm;
    int r = check_tokenizer_names(b);

    if (r < 0)
        return r;
    r = prt_gguf_strings(b->gguf, "tokenizer.ggml.tokens", &t->tokens, b->err);
    if (r < 0)
        return required(r);
    if (t->tokens.count < 1 || t->tokens.count > EXD_VOCAB_MAX)
        return shm_error_set(b->err, EINVAL,
                             "%s: key tokenizer.ggml.tokens has %" PRIu64 " tokens, supported are 1 to %u",
                             prt_gguf_path(b->gguf), t->tokens.count, EXD_VOCAB_MAX);
    hp->vocab = (uint32_t)t->tokens.count;
    r = prt_gguf_i32s(b->gguf, "tokenizer.ggml.token_type", &t->types, b->err);
    if (r < 0 && r != -ENOENT)
        return r;
    if (r == 0 && t->types.count != hp->vocab)
        return shm_error_set(b->err, EINVAL,
                             "%s: key tokenizer.ggml.token_type has %" PRIu64 " entries for %" PRIu32
                             " tokens",
                             prt_gguf_path(b->gguf), t->types.count, hp->vocab);
    spm = str_is(t->model, "llama");
    r = spm ? 0 : prt_gguf_strings(b->gguf, "tokenizer.ggml.merges", &t->merges, b->err);
    if (r < 0)
        return required(r);
    if (t->merges.count > EXD_VOCAB_MAX)
        return shm_error_set(b->err, EINVAL,
                             "%s: key tokenizer.ggml.merges has %" PRIu64 " merges, at most %u are supported",
                             prt_gguf_path(b->gguf), t->merges.count, EXD_VOCAB_MAX);
    if ((r = opt_token(b, "tokenizer.ggml.bos_token_id", &t->bos)) < 0 ||
        (r = opt_token(b, "tokenizer.ggml.eos_token_id", &t->eos)) < 0 ||
        (r = opt_token(b, "tokenizer.ggml.eot_token_id", &t->eot)) < 0 ||
        (r = opt_token(b, "tokenizer.ggml.padding_token_id", &t->pad)) < 0)
        return r;
    if (spm && (r = read_scores(b)) < 0)
        return r;
    r = prt_gguf_bool(b->gguf, "tokenizer.ggml.add_bos_token", &t->add_bos, b->err);
    if (r < 0 && r != -ENOENT)
        return r;
    if (t->add_bos && t->bos == EXD_TOKEN_NONE)
        return shm_error_set(
            b->err, EINVAL,
            "%s: key tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing",
            prt_gguf_path(b->gguf));
    return opt_str(b, "tokenizer.chat_template", &t->chat_template);
}

int exd_model_open(const struct prt_gguf *gguf, struct exd_model **ret_model, struct shm_error *err)
{
    struct exd_model *m = calloc(1, sizeof(*m));
    struct exd_build b = {.gguf = gguf, .model = m, .err = err};
    int r;

    if (!m)
        return shm_error_set(err, ENOMEM, "%s: no memory for the model description; free some",
                             prt_gguf_path(gguf));
    m->gguf = gguf;
    if ((r = find_arch(&b)) < 0 || (r = opt_str(&b, "general.name", &m->name)) < 0 ||
        (r = read_tokenizer(&b)) < 0 || (r = b.arch->hparams(&b)) < 0)
        goto fail;
    /* layers was bounded by hparams(). */
    b.dense_cap = b.arch->dense_global + m->hp.layers * b.arch->dense_layer;
    m->dense = calloc(b.dense_cap, sizeof(*m->dense));
    m->layer = calloc(m->hp.layers, sizeof(*m->layer));
    if (!m->dense || !m->layer) {
        r = shm_error_set(err, ENOMEM, "%s: no memory for the model description; free some",
                          prt_gguf_path(gguf));
        goto fail;
    }
    r = b.arch->tensors(&b);
    if (r < 0)
        goto fail;
    m->n_ignored = prt_gguf_tensor_count(gguf) - b.n_used;
    *ret_model = m;
    return 0;
fail:
    exd_model_close(&m);
    return r;
}

void exd_model_close(struct exd_model **model)
{
    struct exd_model *m = *model;

    *model = NULL;
    if (!m)
        return;
    free(m->layer);
    free(m->dense);
    free(m);
}

uint64_t exd_model_part_offset(const struct exd_model *model, uint32_t layer, enum exd_part part,
                               uint32_t expert)
{
    const struct exd_experts *x = &model->layer[layer].part[part];

    return x->tensor->offset + expert * x->part_bytes;
}
