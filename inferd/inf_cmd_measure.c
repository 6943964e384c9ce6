/* SPDX-License-Identifier: MIT */
/*
 * inferd measure: one worker reads pieces of one prompt as it is told on
 * standard input, one JSON object a line, and says what each took, one object
 * a line. expert-bench drives it: a fresh process for each read would pay for
 * a device context each time, and its reads would not be interleaved closely.
 *
 * Request (all but tokens may be left out):
 *   tokens    how many are read
 *   at        where in the prompt they begin; what lies before is read once, untimed, and kept
 *   policy, order, depth, floor, link_gbps, link_latency_us   as in CONFIGURE; else expertd's defaults
 *   known     true: the routing of the last identical read is told ahead (the oracle)
 *   all       true: all logits are computed and hashed, else the last token's
 *   generate  tokens written behind it, timed by themselves
 */
#include "inferd/inf_cmd.h"
#include "inferd/inf_turn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define LINE_BYTES 4096
#define SEEN_MAX   64 /* reads whose routing is remembered */

/* Routing of a read of one chunk. */
struct seen {
    uint32_t at, tokens;
    uint32_t *counts;
};

struct measure {
    struct inf_engine *engine;
    struct inf_conversation *conversation;
    struct inf_sampler *sampler;
    struct inf_ids ids;
    struct inf_settings defaults;
    struct inf_mark start, mark; /* empty; in front of the last read that began elsewhere */
    struct seen seen[SEEN_MAX];
    float *logits; /* [vocab] */
    XXH3_state_t *hash;
};

struct request {
    uint32_t at, tokens, generate;
    bool known, all;
    struct inf_settings settings;
};

/* Of one read, through the callbacks. */
struct sample {
    struct measure *m;
    struct inf_stream_sum sum, decode;
};

static void on_logits(void *ctx, uint32_t piece, uint32_t position, uint32_t rows, const float *logits)
{
    struct measure *m = ((struct sample *)ctx)->m;
    size_t vocab = m->engine->model->hparams.vocab;
    (void)piece;
    (void)position;
    XXH3_64bits_update(m->hash, logits, rows * vocab * sizeof *logits);
    memcpy(m->logits, logits + (rows - 1) * vocab, vocab * sizeof *logits);
}

static void on_chunk(void *ctx, const struct inf_chunk *chunk)
{
    inf_stream_sum_add(&((struct sample *)ctx)->sum, chunk);
}

static void on_decoded(void *ctx, const struct inf_chunk *chunk)
{
    inf_stream_sum_add(&((struct sample *)ctx)->decode, chunk);
}

/* ---- request ---- */

static int whole(const json_t *o, const char *key, uint32_t *value, struct shm_error *err)
{
    const json_t *v = json_object_get(o, key);
    if (!v)
        return 0;
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > UINT32_MAX)
        return shm_error_set(err, EINVAL, "%s: not a whole number up to %u", key, UINT32_MAX);
    *value = (uint32_t)json_integer_value(v);
    return 0;
}

static int word(const json_t *o, const char *key,
                int (*parse)(const char *, const char *, uint32_t *, struct shm_error *), uint32_t *value,
                struct shm_error *err)
{
    const json_t *v = json_object_get(o, key);
    if (!v)
        return 0;
    if (!json_is_string(v))
        return shm_error_set(err, EINVAL, "%s: not a word", key);
    return parse(key, json_string_value(v), value, err);
}

static int pace(const json_t *o, const char *key, double *value, struct shm_error *err)
{
    const json_t *v = json_object_get(o, key);
    if (!v)
        return 0;
    if (!json_is_number(v))
        return shm_error_set(err, EINVAL, "%s: not a number", key);
    *value = json_number_value(v);
    return 0;
}

static int parse(const struct measure *m, const char *line, struct request *ret_request,
                 struct shm_error *err)
{
    json_error_t where;
    json_t *o = json_loads(line, JSON_REJECT_DUPLICATES, &where);
    if (!json_is_object(o)) {
        json_decref(o);
        return shm_error_set(err, EINVAL, "request: not a JSON object: %s", where.text);
    }
    struct request r = {.settings = m->defaults};
    struct inf_settings *s = &r.settings;
    int rc = 0;
    if ((rc = whole(o, "tokens", &r.tokens, err)) || (rc = whole(o, "at", &r.at, err)) ||
        (rc = whole(o, "generate", &r.generate, err)) || (rc = whole(o, "depth", &s->depth, err)) ||
        (rc = whole(o, "floor", &s->floor, err)) ||
        (rc = word(o, "policy", shm_policy_parse, &s->policy, err)) ||
        (rc = word(o, "order", shm_order_parse, &s->order, err)) ||
        (rc = pace(o, "link_gbps", &s->link_gbps, err)) ||
        (rc = pace(o, "link_latency_us", &s->link_latency_us, err)))
        goto out;
    r.known = json_is_true(json_object_get(o, "known"));
    r.all = json_is_true(json_object_get(o, "all"));
    uint64_t end = (uint64_t)r.at + r.tokens;
    if (!r.tokens || end > m->ids.n)
        rc =
            shm_error_set(err, EINVAL, "tokens: %u from %u on, the prompt has %zu", r.tokens, r.at, m->ids.n);
    else
        *ret_request = r;
out:
    json_decref(o);
    return rc;
}

/* ---- read ---- */

/* Takes the conversation to position `at`, reading what is missing. */
static int go_to(struct measure *m, uint32_t at, struct shm_error *err)
{
    struct inf_conversation *c = m->conversation;
    if (!at) {
        inf_conversation_rewind(c, &m->start);
        return 0;
    }
    if (m->mark.recent && m->mark.n == at) {
        inf_conversation_rewind(c, &m->mark);
        return 0;
    }
    inf_conversation_rewind(c, &m->start);
    int rc = inf_read(m->engine, c, m->ids.ids, at, &(struct inf_read_options){0}, err);
    return rc ? rc : inf_conversation_mark(c, &m->mark);
}

static struct seen *find(struct measure *m, uint32_t at, uint32_t tokens)
{
    for (size_t i = 0; i < SEEN_MAX; i++)
        if (m->seen[i].counts && m->seen[i].at == at && m->seen[i].tokens == tokens)
            return &m->seen[i];
    return NULL;
}

/* Keeps the routing of a read that was one chunk. */
static int remember(struct measure *m, uint32_t at, uint32_t tokens)
{
    const struct inf_conversation *c = m->conversation;
    if (find(m, at, tokens))
        return 0;
    for (size_t i = 0; i < SEEN_MAX; i++) {
        struct seen *s = &m->seen[i];
        if (s->counts)
            continue;
        size_t bytes = sizeof *c->counts * c->layers * c->experts;
        if (!(s->counts = malloc(bytes)))
            return -ENOMEM;
        memcpy(s->counts, c->counts, bytes);
        s->at = at;
        s->tokens = tokens;
        return 0;
    }
    return 0;
}

static int generate(struct measure *m, struct sample *s, uint32_t n, struct shm_error *err, json_t *reply)
{
    const struct inf_answer_options o = {.n = n + 1, /* the last one is not read */
                                         .ignore_eos = true,
                                         .on_chunk = on_decoded,
                                         .ctx = s};
    struct inf_ids written = {0};
    int32_t pending = -1;
    enum inf_stop stop = INF_STOP_FAILED;
    uint64_t start_ns = shm_now_ns();
    int rc =
        inf_answer(m->engine, m->conversation, m->sampler, &o, m->logits, err, &written, &pending, &stop);
    uint64_t ns = shm_now_ns() - start_ns;
    inf_ids_clear(&written);
    if (rc)
        return rc;
    json_object_set_new(reply, "decode_ms", json_real((double)ns / 1e6));
    json_object_set_new(reply, "decode_tokens", json_integer(s->decode.chunks));
    json_object_set_new(reply, "decode_stream", inf_stream_sum_json(&s->decode));
    return 0;
}

static int serve(struct measure *m, const char *line, json_t *reply, struct shm_error *err)
{
    struct request r;
    int rc = parse(m, line, &r, err);
    if (rc || (rc = go_to(m, r.at, err)) || (rc = inf_store_configure(&m->engine->store, &r.settings, err)))
        return rc;
    const struct seen *seen = r.known ? find(m, r.at, r.tokens) : NULL;
    if (r.known && !seen)
        return shm_error_set(err, ENOENT, "known: these tokens were not read before as one chunk");
    struct sample s = {.m = m};
    const struct inf_read_options o = {.logits = r.all ? INF_LOGITS_ALL : INF_LOGITS_LAST,
                                       .on_logits = on_logits,
                                       .on_chunk = on_chunk,
                                       .ctx = &s,
                                       .known = seen ? seen->counts : NULL};
    XXH3_64bits_reset(m->hash);
    uint64_t start_ns = shm_now_ns();
    rc = inf_read(m->engine, m->conversation, m->ids.ids + r.at, r.tokens, &o, err);
    uint64_t ns = shm_now_ns() - start_ns;
    if (rc || (s.sum.chunks == 1 && (rc = remember(m, r.at, r.tokens))))
        return rc;
    char hash[17];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)XXH3_64bits_digest(m->hash));
    json_object_set_new(reply, "tokens", json_integer(r.tokens));
    json_object_set_new(reply, "read_ms", json_real((double)ns / 1e6));
    json_object_set_new(reply, "stream", inf_stream_sum_json(&s.sum));
    json_object_set_new(reply, "logits_hash", json_string(hash));
    return r.generate ? generate(m, &s, r.generate, err, reply) : 0;
}

/* ---- program ---- */

static void answer(json_t *object)
{
    json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putchar('\n');
    fflush(stdout);
    json_decref(object);
}

static int introduce(struct measure *m, struct shm_error *err)
{
    const struct inf_engine *e = m->engine;
    struct inf_device *d = e->device;
    double gbps = 0;
    int rc = d->ops->link_peak ? d->ops->link_peak(d, &gbps, err) : 0;
    if (rc)
        return rc;
    answer(json_pack("{s:I, s:I, s:I, s:I, s:f, s:s}", "prompt_tokens", (json_int_t)m->ids.n, "chunk",
                     (json_int_t)e->chunk, "ctx", (json_int_t)e->ctx, "ring",
                     (json_int_t)e->store.layout.geometry.ring, "peak_gbps", gbps, "device", d->text));
    return 0;
}

/* Requests until the end of input. A read that failed is answered with its line and ends the program. */
static int run(struct measure *m, struct shm_error *err)
{
    char line[LINE_BYTES];
    int rc = introduce(m, err);
    while (!rc && !atomic_load(&inf_cancel) && fgets(line, sizeof line, stdin)) {
        json_t *reply = json_object();
        rc = serve(m, line, reply, err);
        if (rc && err->code)
            json_object_set_new(reply, "error", json_string(shm_error_text(err)));
        answer(reply);
    }
    return rc;
}

static int open_measure(const struct inf_options *o, struct measure *m, struct shm_error *err)
{
    const struct inf_engine *e = m->engine;
    const struct shm_store *store = prt_client_store(e->store.client);
    struct inf_sampler_params greedy;
    inf_sampler_params_default(&greedy);
    greedy.temperature = 0;
    m->defaults =
        (struct inf_settings){.policy = o->engine.store.policy ? o->engine.store.policy : store->policy,
                              .order = o->engine.store.order ? o->engine.store.order : store->order,
                              .depth = o->engine.store.depth ? o->engine.store.depth : store->depth,
                              .floor = store->floor};
    m->logits = calloc(e->model->hparams.vocab, sizeof *m->logits);
    m->hash = XXH3_createState();
    if (!m->logits || !m->hash)
        return -ENOMEM;
    int rc = inf_sampler_create(&greedy, e->model->hparams.vocab, err, &m->sampler);
    if (rc || (rc = inf_conversation_create(e, err, &m->conversation)))
        return rc;
    return inf_conversation_mark(m->conversation, &m->start);
}

static void close_measure(struct measure *m)
{
    for (size_t i = 0; i < SEEN_MAX; i++)
        free(m->seen[i].counts);
    inf_mark_clear(&m->start);
    inf_mark_clear(&m->mark);
    inf_conversation_destroy(&m->conversation);
    inf_sampler_destroy(&m->sampler);
    inf_ids_clear(&m->ids);
    XXH3_freeState(m->hash);
    free(m->logits);
    inf_engine_close(&m->engine);
}

int inf_cmd_measure(int argc, char **argv)
{
    struct inf_options o;
    struct measure m = {0};
    struct shm_error err = {0};
    inf_options_parse(
        argc, argv, INF_GROUP_ENGINE | INF_GROUP_PROMPT,
        "Reads pieces of a prompt as told on standard input, one JSON object a line, and says what each "
        "took; for expert-bench. --floor is the smallest that a request may name.",
        &o);
    o.json = true; /* the introduction tells the device */
    inf_cancel_install();
    int status = inf_cmd_open(&o, &m.engine, &m.ids);
    if (status)
        return status;
    int rc = open_measure(&o, &m, &err);
    if (!rc)
        rc = run(&m, &err);
    if (rc)
        status = inf_cmd_fail(rc, &err);
    close_measure(&m);
    return status;
}
