/* SPDX-License-Identifier: MIT */
#include "inferd/inf_answer.h"

#include <errno.h>
#include <string.h>

const char *inf_stop_name(enum inf_stop stop)
{
    static const char *const name[INF_STOP_COUNT] = {"length", "stop token", "context full", "cancelled",
                                                     "failed"};
    return name[stop];
}

struct relay {
    const struct inf_answer_options *o;
    float *logits;
    size_t vocab;
};

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct relay *r = ctx;
    memcpy(r->logits, logits, r->vocab * sizeof *logits);
    if (r->o->on_logits)
        r->o->on_logits(r->o->ctx, piece, position, rows, logits);
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    struct relay *r = ctx;
    if (r->o->on_chunk)
        r->o->on_chunk(r->o->ctx, chunk);
}

int inf_answer(struct inf_engine *e, struct inf_conversation *c, struct inf_sampler *sampler,
               const struct inf_answer_options *o, float *logits, struct shm_error *err,
               struct inf_ids *ret_ids, int32_t *ret_pending, enum inf_stop *ret_stop)
{
    struct relay relay = {.o = o, .logits = logits, .vocab = e->model->hparams.vocab};
    const struct inf_read_options read = {.logits = INF_LOGITS_LAST,
                                          .on_logits = on_logits,
                                          .on_chunk = on_chunk,
                                          .ctx = &relay,
                                          .generated = true};
    _Atomic bool *cancel = e->store.config.cancel;
    *ret_pending = -1;
    for (uint32_t i = 0;; i++) {
        if (i >= o->n) {
            *ret_stop = INF_STOP_LENGTH;
            return 0;
        }
        if (cancel && atomic_load(cancel)) {
            *ret_stop = INF_STOP_CANCELLED;
            return 0;
        }
        int32_t id = inf_sampler_next(sampler, logits);
        if (id < 0) {
            *ret_stop = INF_STOP_FAILED;
            return shm_error_set(err, EDOM,
                                 "the model gave no usable logits after token %u: its weights are "
                                 "damaged ('expertctl verify')",
                                 c->n);
        }
        if (!o->ignore_eos && inf_tokenizer_is_stop(e->tokenizer, id)) {
            *ret_stop = INF_STOP_TOKEN;
            return 0;
        }
        int rc = inf_ids_append(ret_ids, &id, 1);
        if (rc) {
            *ret_stop = INF_STOP_FAILED;
            return rc;
        }
        inf_sampler_accept(sampler, id);
        *ret_pending = id;
        if (o->on_token && !o->on_token(o->ctx, id, logits)) {
            *ret_stop = INF_STOP_CANCELLED;
            return 0;
        }
        if (i + 1 == o->n)
            continue;
        if (c->n == c->capacity) {
            *ret_stop = INF_STOP_CONTEXT;
            return 0;
        }
        rc = inf_read(e, c, &id, 1, &read, err);
        if (rc) {
            *ret_stop = rc == -ECANCELED ? INF_STOP_CANCELLED : INF_STOP_FAILED;
            return rc == -ECANCELED ? 0 : rc;
        }
        *ret_pending = -1;
    }
}
