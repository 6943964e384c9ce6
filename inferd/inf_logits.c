/* SPDX-License-Identifier: MIT */
#include "inferd/inf_logits.h"
#include "inferd/inf_turn.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct output {
    FILE *f;
    uint32_t vocab, layers, used, tokens;
    uint32_t first;  /* position in the conversation of this read's first token */
    uint8_t *wanted; /* [tokens] */
    float *last;     /* [vocab] */
    bool comma, hash;
    XXH3_state_t *state;
    struct inf_stream_sum sum;
    uint32_t *ids; /* [layers][tokens][used] */
    float *weights;
};

static void print_row(struct output *out, uint32_t position, const float *row)
{
    fprintf(out->f, "%s{\"position\":%u,\"logits\":[", out->comma ? "," : "", position);
    for (uint32_t v = 0; v < out->vocab; v++)
        fprintf(out->f, "%s%.9g", v ? "," : "", row[v]);
    fputs("]}", out->f);
    out->comma = true;
}

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct output *out = ctx;
    (void)piece;
    position -= out->first;
    if (out->hash)
        XXH3_64bits_update(out->state, logits, (size_t)rows * out->vocab * sizeof *logits);
    for (uint32_t r = 0; r < rows; r++)
        if (out->wanted[position + r])
            print_row(out, position + r, logits + (size_t)r * out->vocab);
    memcpy(out->last, logits + (size_t)(rows - 1) * out->vocab, out->vocab * sizeof *logits);
}

static void on_routes(void *ctx, uint32_t piece, uint32_t layer, uint32_t position, uint32_t tokens,
                      const uint32_t *ids, const float *weights)
{
    struct output *out = ctx;
    (void)piece;
    size_t at = ((size_t)layer * out->tokens + position - out->first) * out->used,
           n = (size_t)tokens * out->used;
    memcpy(out->ids + at, ids, n * sizeof *ids);
    memcpy(out->weights + at, weights, n * sizeof *weights);
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    struct output *out = ctx;
    inf_stream_sum_add(&out->sum, chunk);
}

static void print_routes(const struct output *out)
{
    const size_t n = (size_t)out->tokens * out->used;
    for (int weights = 0; weights < 2; weights++) {
        fprintf(out->f, ",\"%s\":[", weights ? "route_weights" : "routes");
        for (uint32_t l = 0; l < out->layers; l++) {
            fprintf(out->f, "%s[", l ? "," : "");
            for (size_t i = 0; i < n; i++)
                weights ? fprintf(out->f, "%s%.9g", i ? "," : "", out->weights[l * n + i])
                        : fprintf(out->f, "%s%u", i ? "," : "", out->ids[l * n + i]);
            fputc(']', out->f);
        }
        fputc(']', out->f);
    }
}

/* "0,5,last" or "all" or "none". *ret_all: every row is needed. */
static int choose(const char *list, struct output *out, bool *ret_all, struct shm_error *err)
{
    *ret_all = strcmp(list, "last") != 0 && strcmp(list, "none") != 0;
    for (const char *at = list; *at;) {
        size_t n = strcspn(at, ",");
        char *end;
        unsigned long long p = strtoull(at, &end, 10);
        if (n == 3 && strncmp(at, "all", 3) == 0)
            memset(out->wanted, 1, out->tokens);
        else if (n == 4 && strncmp(at, "last", 4) == 0)
            out->wanted[out->tokens - 1] = 1;
        else if (n == 4 && strncmp(at, "none", 4) == 0)
            ;
        else if (end == at + n && n && at[0] != '-' && p < out->tokens)
            out->wanted[p] = 1;
        else
            return shm_error_set(err, EINVAL, "--positions: '%.*s' is no position of the prompt's %u tokens",
                                 (int)(n < 20 ? n : 20), at, out->tokens);
        at += n + (at[n] == ',');
    }
    return 0;
}

static int32_t greatest(const float *logits, uint32_t n, float *ret_margin)
{
    uint32_t best = 0;
    float second = -INFINITY;
    for (uint32_t v = 1; v < n; v++) {
        if (logits[v] > logits[best]) {
            second = logits[best];
            best = v;
        } else if (logits[v] > second) {
            second = logits[v];
        }
    }
    *ret_margin = logits[best] - second;
    return (int32_t)best;
}

static void keep_last(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct output *out = ctx;
    (void)piece;
    (void)position;
    memcpy(out->last, logits + (size_t)(rows - 1) * out->vocab, out->vocab * sizeof *logits);
}

/* End tokens are tokens like any other here. */
static int print_greedy(struct inf_engine *e, struct inf_conversation *c, struct output *out, uint32_t n,
                        struct shm_error *err)
{
    const struct inf_read_options o = {
        .logits = INF_LOGITS_LAST, .on_logits = keep_last, .ctx = out, .generated = true};
    json_t *ids = json_array(), *margins = json_array();
    struct inf_detok *detok = NULL;
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    int rc = f ? inf_detok_create(e->tokenizer, true, &detok) : -ENOMEM;
    const char *piece;
    size_t piece_bytes;
    for (uint32_t i = 0; !rc && i < n; i++) {
        float margin;
        int32_t id = greatest(out->last, out->vocab, &margin);
        json_array_append_new(ids, json_integer(id));
        json_array_append_new(margins, json_real(margin));
        if (inf_detok_push(detok, id, &piece, &piece_bytes) == 0)
            fwrite(piece, 1, piece_bytes, f);
        if (i + 1 < n)
            rc = inf_read(e, c, &id, 1, &o, err);
    }
    if (!rc) {
        inf_detok_flush(detok, &piece, &piece_bytes);
        fwrite(piece, 1, piece_bytes, f);
    }
    if (f)
        fclose(f);
    if (!rc) {
        json_t *j = json_pack("{s:O, s:O, s:s%}", "ids", ids, "margins", margins, "text", text, bytes);
        fputs(",\"greedy\":", out->f);
        json_dumpf(j, out->f, JSON_COMPACT | JSON_REAL_PRECISION(9));
        json_decref(j);
    }
    free(text);
    inf_detok_destroy(&detok);
    json_decref(ids);
    json_decref(margins);
    return rc;
}

static int print_all(const struct inf_options *o, struct inf_engine *e, struct inf_conversation *c,
                     const struct inf_ids *ids, struct output *out, struct shm_error *err)
{
    bool all;
    int rc = choose(o->positions ? o->positions : "last", out, &all, err);
    if (rc)
        return rc;
    const struct inf_read_options read = {.logits = all || o->hash ? INF_LOGITS_ALL : INF_LOGITS_LAST,
                                          .on_logits = on_logits,
                                          .on_routes = o->routes ? on_routes : NULL,
                                          .on_chunk = on_chunk,
                                          .ctx = out};
    fputs("{\"ids\":[", out->f);
    for (size_t i = 0; i < ids->n; i++)
        fprintf(out->f, "%s%d", i ? "," : "", ids->ids[i]);
    fputs("],\"logits\":[", out->f);
    if ((rc = inf_read(e, c, ids->ids, ids->n, &read, err)))
        return rc;
    fputc(']', out->f);
    if (o->hash)
        fprintf(out->f, ",\"hash\":\"%016llx\"", (unsigned long long)XXH3_64bits_digest(out->state));
    if (o->routes)
        print_routes(out);
    if (o->n && (rc = print_greedy(e, c, out, o->n, err)))
        return rc;
    fputs(",\"stream\":", out->f);
    json_t *sum = inf_stream_sum_json(&out->sum);
    json_dumpf(sum, out->f, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(sum);
    fputs("}\n", out->f);
    return fflush(out->f) || ferror(out->f) ? shm_error_set(err, EIO, "the output cannot be written") : 0;
}

int inf_logits_print(const struct inf_options *o, struct inf_engine *e, struct inf_conversation *c,
                     const struct inf_ids *ids, FILE *f, struct shm_error *err)
{
    const struct inf_model *m = e->model;
    for (size_t i = 0; i < ids->n; i++) /* before half an object is printed */
        if ((uint32_t)ids->ids[i] >= m->hparams.vocab)
            return shm_error_set(err, EINVAL, "--ids: token %d is not in the vocabulary of %u", ids->ids[i],
                                 m->hparams.vocab);
    if (c->n + ids->n + o->n > e->ctx)
        return shm_error_set(err, E2BIG, "%zu tokens and %u more do not fit in a context of %u",
                             c->n + ids->n, o->n, e->ctx);
    struct output out = {.f = f,
                         .vocab = m->hparams.vocab,
                         .layers = m->hparams.layers,
                         .used = m->hparams.experts_used,
                         .tokens = (uint32_t)ids->n,
                         .first = c->n,
                         .hash = o->hash};
    size_t routes = o->routes ? (size_t)out.layers * out.tokens * out.used : 1;
    out.wanted = calloc(ids->n, 1);
    out.last = calloc(out.vocab, sizeof *out.last);
    out.ids = calloc(routes, sizeof *out.ids);
    out.weights = calloc(routes, sizeof *out.weights);
    out.state = XXH3_createState();
    int rc = -ENOMEM;
    if (out.wanted && out.last && out.ids && out.weights && out.state) {
        XXH3_64bits_reset(out.state);
        rc = print_all(o, e, c, ids, &out, err);
    }
    free(out.wanted);
    free(out.last);
    free(out.ids);
    free(out.weights);
    XXH3_freeState(out.state);
    return rc;
}
