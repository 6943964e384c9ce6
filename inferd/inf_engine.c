/* SPDX-License-Identifier: MIT */
#include "inferd/inf_engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct inf_string_table table_of(const struct shm_arena_view *a, const struct shm_strings *s)
{
    const char *catalog = (const char *)a->catalog;
    return (struct inf_string_table){.n = s->count,
                                     .offsets = (const uint32_t *)(catalog + s->offsets),
                                     .bytes = catalog + s->bytes,
                                     .size_bytes = a->arena->catalog_bytes - s->bytes};
}

int inf_engine_tokenizer(const struct shm_arena_view *a, struct shm_error *err,
                         struct inf_tokenizer **ret_tokenizer)
{
    const struct shm_tokenizer *t = &a->catalog->tokenizer;
    const struct inf_tokenizer_src src = {
        .tokens = table_of(a, &t->tokens),
        .types = t->types ? (const int32_t *)((const char *)a->catalog + t->types) : NULL,
        .merges = table_of(a, &t->merges),
        .pre = shm_arena_string(a, t->pre),
        .pre_len = t->pre.bytes,
        .bos_id = t->bos == SHM_TOKEN_NONE ? -1 : (int32_t)t->bos,
        .eos_id = t->eos == SHM_TOKEN_NONE ? -1 : (int32_t)t->eos,
        .add_bos = t->add_bos != 0};
    return inf_tokenizer_create(&src, err, ret_tokenizer);
}

static int copy_template(struct inf_engine *e)
{
    struct shm_string s = e->store.arena.catalog->tokenizer.chat_template;
    e->chat_template = malloc((size_t)s.bytes + 1);
    if (!e->chat_template)
        return -ENOMEM;
    memcpy(e->chat_template, shm_arena_string(&e->store.arena, s), s.bytes);
    e->chat_template[s.bytes] = '\0';
    e->chat_template_bytes = s.bytes;
    return 0;
}

int inf_engine_open(const struct inf_engine_config *config, struct shm_error *err,
                    struct inf_engine **ret_engine)
{
    struct inf_engine *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    uint64_t start_ns = shm_now_ns();
    inf_store_init(&e->store, &config->store);
    int rc = inf_store_attach(&e->store, 0, err);
    if (rc || (rc = inf_model_open(&e->store.arena, err, &e->model)) ||
        (rc = inf_engine_tokenizer(&e->store.arena, err, &e->tokenizer)) || (rc = copy_template(e)))
        goto fail;
    if (inf_tokenizer_size(e->tokenizer) > e->model->hparams.vocab) {
        rc = shm_error_set(err, EINVAL, "model '%s': %u tokens beside an embedding of %u rows",
                           e->model->hparams.name, inf_tokenizer_size(e->tokenizer), e->model->hparams.vocab);
        goto fail;
    }
    e->ctx = config->ctx ? config->ctx : e->model->hparams.context;
    e->chunk = config->chunk ? config->chunk : INF_CHUNK_DEFAULT;
    if (e->chunk > INF_CHUNK_MAX)
        e->chunk = INF_CHUNK_MAX;
    if (e->chunk > e->ctx)
        e->chunk = e->ctx;
    if ((rc = krn_pool_create(config->threads, &e->pool))) {
        shm_error_set(err, rc, "compute threads cannot be started: %s: choose fewer by --threads",
                      strerror(-rc));
        goto fail;
    }
    if ((rc = inf_graph_create(e->model, e->pool, e->chunk, err, &e->graph)))
        goto fail;
    e->attach_ns = shm_now_ns() - start_ns;
    *ret_engine = e;
    return 0;
fail:
    inf_engine_close(&e);
    return rc;
}

int inf_engine_ensure(struct inf_engine *e, uint32_t wait_ms, bool *ret_again, struct shm_error *err)
{
    if (ret_again)
        *ret_again = false;
    if (inf_store_alive(&e->store))
        return 0;
    uint64_t start_ns = shm_now_ns();
    int rc = inf_store_attach(&e->store, wait_ms, err);
    if (rc)
        return rc;
    /* The old model points into a mapping that is gone. */
    struct inf_model *model;
    if ((rc = inf_model_open(&e->store.arena, err, &model)))
        return rc;
    rc = inf_graph_set_model(e->graph, model);
    if (rc) {
        inf_model_close(&model);
        return shm_error_set(err, rc, "expertd's model has another shape than before: start inferd anew");
    }
    inf_model_close(&e->model);
    e->model = model;
    e->attach_ns = shm_now_ns() - start_ns;
    if (ret_again)
        *ret_again = true;
    return 0;
}

void inf_engine_close(struct inf_engine **engine)
{
    struct inf_engine *e = *engine;
    if (!e)
        return;
    inf_store_close(&e->store);
    inf_graph_destroy(&e->graph);
    krn_pool_destroy(&e->pool);
    inf_tokenizer_destroy(&e->tokenizer);
    inf_model_close(&e->model);
    free(e->chat_template);
    free(e);
    *engine = NULL;
}
