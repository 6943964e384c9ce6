/* SPDX-License-Identifier: MIT */
#include "inferd/inf_turn.h"

#include "shm/shm_word.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#define PROGRESS_NS 100000000u /* between two updates of the line */

int inf_talk_open(struct inf_engine *e, const struct inf_options *o, struct shm_error *err,
                  struct inf_talk *ret_talk)
{
    struct inf_talk t = {.engine = e, .options = o, .pending = -1};
    int rc = inf_sampler_create(&o->sampler, e->model->hparams.vocab, err, &t.sampler);
    if (rc || (rc = inf_detok_create(e->tokenizer, false, &t.detok)) ||
        (rc = inf_conversation_create(e, err, &t.conversation)))
        goto fail;
    t.logits = calloc(e->model->hparams.vocab, sizeof *t.logits);
    if (!t.logits) {
        rc = -ENOMEM;
        goto fail;
    }
    *ret_talk = t;
    return 0;
fail:
    inf_talk_close(&t);
    return rc;
}

void inf_talk_close(struct inf_talk *t)
{
    inf_sampler_destroy(&t->sampler);
    inf_detok_destroy(&t->detok);
    inf_conversation_destroy(&t->conversation);
    free(t->logits);
    t->logits = NULL;
}

struct running {
    struct inf_talk *talk;
    struct inf_turn *turn;
    XXH3_state_t *hash;
    FILE *text; /* into turn->text */
    size_t n;   /* tokens to read */
    bool progress, shown, reading;
    uint64_t shown_ns, first_ns;
};

static void clear_progress(struct running *r)
{
    if (r->shown)
        fputs("\r\033[K", stderr);
    r->shown = false;
}

static void on_progress(void *ctx, double tokens)
{
    struct running *r = ctx;
    uint64_t now = shm_now_ns();
    if (!r->progress || now - r->shown_ns < PROGRESS_NS)
        return;
    fprintf(stderr, "\rreading %.0f of %zu tokens (%.0f%%)", tokens, r->n, 100 * tokens / (double)r->n);
    r->shown = true;
    r->shown_ns = now;
}

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct running *r = ctx;
    size_t vocab = r->talk->engine->model->hparams.vocab;
    (void)piece;
    (void)position;
    if (r->hash)
        XXH3_64bits_update(r->hash, logits, rows * vocab * sizeof *logits);
    if (r->reading)
        memcpy(r->talk->logits, logits + (rows - 1) * vocab, vocab * sizeof *logits);
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    struct running *r = ctx;
    if (!r->reading) {
        inf_stream_sum_add(&r->turn->decode, chunk);
        return;
    }
    inf_stream_sum_add(&r->turn->read, chunk);
    if (r->turn->chunks < INF_TURN_CHUNKS)
        r->turn->chunk[r->turn->chunks] = *chunk;
    r->turn->chunks++;
}

static void show(struct running *r, const char *text, size_t n)
{
    fwrite(text, 1, n, r->text);
    if (r->talk->options->json || !n)
        return;
    fwrite(text, 1, n, stdout);
    fflush(stdout);
}

static bool on_token(void *ctx, int32_t id, const float *logits)
{
    struct running *r = ctx;
    const char *text;
    size_t n;
    (void)logits;
    if (!r->first_ns)
        r->first_ns = shm_now_ns();
    if (inf_detok_push(r->talk->detok, id, &text, &n) == 0)
        show(r, text, n);
    return !ferror(stdout); /* nobody reads it any more */
}

/* Reads pending token and ids, then answers. */
static int read_and_answer(struct running *r, const int32_t *ids, size_t n, uint64_t start_ns,
                           struct shm_error *err)
{
    struct inf_talk *t = r->talk;
    struct inf_ids all = {0};
    int rc = t->pending >= 0 ? inf_ids_append(&all, &t->pending, 1) : 0;
    if (!rc)
        rc = inf_ids_append(&all, ids, n);
    const struct inf_read_options read = {.logits = r->hash ? INF_LOGITS_ALL : INF_LOGITS_LAST,
                                          .on_logits = on_logits,
                                          .on_progress = on_progress,
                                          .on_chunk = on_chunk,
                                          .ctx = r};
    r->reading = true;
    r->n = all.n;
    r->turn->prompt_tokens = (uint32_t)all.n;
    if (!rc)
        rc = inf_read(t->engine, t->conversation, all.ids, all.n, &read, err);
    clear_progress(r);
    r->reading = false;
    r->turn->read_ns = shm_now_ns() - start_ns;
    for (size_t i = 0; !rc && i < n; i++)
        inf_sampler_accept(t->sampler, ids[i]);
    inf_ids_clear(&all);
    if (rc)
        return rc;
    const struct inf_answer_options answer = {.n = t->options->n,
                                              .ignore_eos = t->options->ignore_eos,
                                              .on_token = on_token,
                                              .on_logits = on_logits,
                                              .on_chunk = on_chunk,
                                              .ctx = r};
    rc = inf_answer(t->engine, t->conversation, t->sampler, &answer, t->logits, err, &r->turn->generated,
                    &t->pending, &r->turn->stop);
    if (r->first_ns) {
        r->turn->first_ns = r->first_ns - start_ns;
        r->turn->answer_ns = shm_now_ns() - r->first_ns;
    }
    const char *text;
    size_t bytes;
    inf_detok_flush(t->detok, &text, &bytes);
    show(r, text, bytes);
    return rc;
}

int inf_turn_run(struct inf_talk *t, const int32_t *ids, size_t n, struct inf_turn *ret_turn,
                 struct shm_error *err)
{
    const struct inf_options *o = t->options;
    struct inf_turn turn = {.stop = INF_STOP_FAILED};
    struct running r = {.talk = t, .turn = &turn, .progress = !o->json && !o->quiet && isatty(STDERR_FILENO)};
    const uint32_t before = t->conversation->n;
    const int32_t pending = t->pending;
    inf_sampler_mark(t->sampler);
    uint64_t start_ns = shm_now_ns();
    int rc = -ENOMEM;
    r.text = open_memstream(&turn.text, &turn.text_bytes);
    if (!r.text)
        return rc;
    if (o->hash) {
        if (!(r.hash = XXH3_createState()))
            goto out;
        XXH3_64bits_reset(r.hash);
    }
    rc = read_and_answer(&r, ids, n, start_ns, err);
    if (r.hash)
        turn.hash = XXH3_64bits_digest(r.hash);
out:
    fclose(r.text);
    XXH3_freeState(r.hash);
    if (rc) {
        inf_conversation_truncate(t->conversation, before);
        t->pending = pending;
        inf_sampler_rewind(t->sampler);
        inf_turn_clear(&turn);
        return rc;
    }
    *ret_turn = turn;
    return 0;
}

void inf_turn_clear(struct inf_turn *turn)
{
    inf_ids_clear(&turn->generated);
    free(turn->text);
    turn->text = NULL;
}

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

static double per_second(double n, uint64_t ns)
{
    return ns ? n * 1e9 / (double)ns : 0;
}

/* Tokens that were read after the first was sampled. */
static uint32_t decoded(const struct inf_turn *turn)
{
    return turn->decode.chunks;
}

static void report_memory(const struct inf_talk *t, FILE *f)
{
    const struct inf_engine *e = t->engine;
    const struct inf_device *d = e->device;
    const struct inf_times *at = &d->times;
    const struct inf_phases *p = &e->phases;
    fprintf(f, "device: %s%s%s\n", d->text, d->note[0] ? "; not a GPU: " : "", d->note);
    fprintf(f,
            "memory: activations %.1f MiB (chunk %u, %.1f KiB a token), keys and values up to %.1f MiB (%u "
            "tokens), "
            "ring %.1f MiB (%u slots), residents %.1f MiB\n",
            (double)d->activation_bytes / 1048576, e->chunk, (double)d->token_bytes / 1024,
            (double)(e->pool->blocks * e->device->kv_block_bytes) / 1048576, e->ctx,
            (double)e->store.ring.bytes / 1048576, e->store.layout.geometry.ring,
            (double)e->store.resident_bytes / 1048576);
    fprintf(f,
            "start: context %.1f, modules %.1f, attach %.1f, dense weights %.1f (%.1f MiB), ready %.1f ms; "
            "beside "
            "them, expertd and model found in %.1f ms\n",
            ms(p->context_ns), ms(p->modules_ns), ms(p->attach_ns), ms(p->dense_ns),
            (double)d->dense_bytes / 1048576, ms(p->ready_ns), ms(p->find_ns));
    fprintf(
        f,
        "time so far: attach %.1f ms; attention %.1f, routers %.1f, experts %.1f, waiting for groups %.1f, "
        "embedding and logits %.1f, enqueueing %.1f ms%s\n",
        ms(e->attach_ns), ms(at->attention_ns), ms(at->router_ns), ms(at->experts_ns), ms(at->wait_ns),
        ms(at->head_ns), ms(at->enqueue_ns),
        d->kind == PRT_DEVICE_CUDA && !d->profile ? " (--profile tells the GPU's steps apart)" : "");
    if (d->kind == PRT_DEVICE_CUDA && d->profile)
        fprintf(f, "the GPU waited for groups %.1f ms, for this process %.1f ms\n", ms(at->stall_ns),
                ms(at->idle_ns));
}

void inf_turn_report(const struct inf_talk *t, const struct inf_turn *turn, FILE *f)
{
    const struct inf_stream_sum *s = &turn->read;
    fprintf(f, "read %u tokens in %.3f s (%.0f tokens/s), first token after %.0f ms\n", turn->prompt_tokens,
            ms(turn->read_ns) / 1e3, per_second(turn->prompt_tokens, turn->read_ns), ms(turn->first_ns));
    fprintf(f, "wrote %zu tokens (%.0f tokens/s), ended by: %s\n", turn->generated.n,
            per_second(decoded(turn), turn->answer_ns), inf_stop_name(turn->stop));
    fprintf(
        f,
        "stream: %s, order %s, depth %u, ring %u: of %llu entries %llu copied, %llu dropped, %llu wasted; "
        "%.1f MB, link %.1f ms, waited %.1f ms\n",
        shm_policy_name(s->policy), shm_order_name(s->order), s->depth, s->ring,
        (unsigned long long)s->entries, (unsigned long long)s->copied, (unsigned long long)s->dropped,
        (unsigned long long)s->wasted, (double)s->bytes / 1e6, ms(s->link_ns), ms(s->wait_ns));
    if (shm_held_off_text(s->held_off))
        fprintf(f, "held off: %s\n", shm_held_off_text(s->held_off));
    if (t->options->hash)
        fprintf(f, "logits hash: %016llx\n", (unsigned long long)turn->hash);
    const char *note = t->engine->device->note;
    if (t->options->verbose)
        report_memory(t, f);
    else if (note[0])
        fprintf(f, "computed on the host: %s\n", note);
}

json_t *inf_stream_sum_json(const struct inf_stream_sum *s)
{
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:I, s:I, s:I, s:f}", "policy",
                     shm_policy_name(s->policy), "order", shm_order_name(s->order), "depth",
                     (json_int_t)s->depth, "ring", (json_int_t)s->ring, "entries", (json_int_t)s->entries,
                     "copied", (json_int_t)s->copied, "dropped", (json_int_t)s->dropped, "wasted",
                     (json_int_t)s->wasted, "bytes_copied", (json_int_t)s->bytes, "link_ms", ms(s->link_ns),
                     "wait_ms", ms(s->wait_ns), "bytes_wasted", (json_int_t)s->wasted_bytes, "routed",
                     (json_int_t)s->routed, "chunks", (json_int_t)s->chunks, "issuer_cpu_ms", ms(s->cpu_ns));
}

static json_t *chunks_json(const struct inf_turn *turn)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < turn->chunks && i < INF_TURN_CHUNKS; i++) {
        const struct inf_chunk *c = &turn->chunk[i];
        const struct shm_report *r = &c->stream;
        json_array_append_new(
            list, json_pack("{s:I, s:I, s:f, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:I}",
                            "position", (json_int_t)c->position, "tokens", (json_int_t)c->tokens, "ms",
                            ms(c->ns), "policy", shm_policy_name(r->policy), "order",
                            shm_order_name(r->order), "entries", (json_int_t)r->entries, "routed",
                            (json_int_t)r->routed, "copied", (json_int_t)r->copied, "dropped",
                            (json_int_t)r->dropped, "wasted", (json_int_t)r->wasted, "bytes_copied",
                            (json_int_t)r->bytes, "link_ms", ms(r->link_ns), "span_ms", ms(r->span_ns),
                            "wait_ms", ms(r->wait_ns), "outstanding_max", (json_int_t)r->outstanding_max));
    }
    return list;
}

json_t *inf_turn_json(const struct inf_talk *t, const struct inf_turn *turn)
{
    const struct inf_engine *e = t->engine;
    const struct inf_times *at = &e->device->times;
    const struct inf_phases *p = &e->phases;
    const char *held = shm_held_off_text(turn->read.held_off);
    json_t *ids = json_array();
    for (size_t i = 0; i < turn->generated.n; i++)
        json_array_append_new(ids, json_integer(turn->generated.ids[i]));
    json_t *j = json_pack(
        "{s:I, s:o, s:s%, s:f, s:f, s:f, s:o, s:s?, s:s, s:I, s:f, s:f, s:o, s:o}", "prompt_tokens",
        (json_int_t)turn->prompt_tokens, "generated_tokens", ids, "text", turn->text, turn->text_bytes,
        "ttft_ms", ms(turn->first_ns), "read_tps", per_second(turn->prompt_tokens, turn->read_ns),
        "decode_tps", per_second(decoded(turn), turn->answer_ns), "stream", inf_stream_sum_json(&turn->read),
        "held_off", held, "stop", inf_stop_name(turn->stop), "context_tokens", (json_int_t)t->conversation->n,
        "attach_ms", ms(e->attach_ns), "read_ms", ms(turn->read_ns), "chunks", chunks_json(turn),
        "decode_stream", inf_stream_sum_json(&turn->decode));
    json_t *times = json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "attention", ms(at->attention_ns),
                              "routers", ms(at->router_ns), "experts", ms(at->experts_ns), "wait",
                              ms(at->wait_ns), "head", ms(at->head_ns), "enqueue", ms(at->enqueue_ns),
                              "stall", ms(at->stall_ns), "idle", ms(at->idle_ns));
    json_object_set_new(j, "times_ms", times);
    json_object_set_new(j, "device", json_string(e->device->text));
    json_object_set_new(j, "device_note", e->device->note[0] ? json_string(e->device->note) : json_null());
    json_object_set_new(j, "start_ms",
                        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "find", ms(p->find_ns), "context",
                                  ms(p->context_ns), "modules", ms(p->modules_ns), "attach", ms(p->attach_ns),
                                  "dense", ms(p->dense_ns), "ready", ms(p->ready_ns)));
    json_object_set_new(j, "memory",
                        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "activation_bytes",
                                  (json_int_t)e->device->activation_bytes, "activation_token_bytes",
                                  (json_int_t)e->device->token_bytes, "chunk", (json_int_t)e->chunk,
                                  "kv_bytes", (json_int_t)(e->pool->blocks * e->device->kv_block_bytes),
                                  "ring_bytes", (json_int_t)e->store.ring.bytes, "resident_bytes",
                                  (json_int_t)e->store.resident_bytes));
    if (t->options->hash) {
        char text[17];
        snprintf(text, sizeof text, "%016llx", (unsigned long long)turn->hash);
        json_object_set_new(j, "logits_hash", json_string(text));
    }
    return j;
}
