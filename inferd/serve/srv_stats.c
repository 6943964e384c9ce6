/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_stats.h"

#include "shm/shm_word.h"

#include <pthread.h>
#include <stdlib.h>

#define STATUSES 16

struct histogram {
    uint64_t bucket[24], n;
    double sum;
};

/* Upper bounds in seconds: of times to a token, and of times between two. */
static const double bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                1,     2.5,    5,     10,   25,    50,   100, 250};
#define BOUNDS (sizeof bounds / sizeof bounds[0])

struct srv_stats {
    pthread_mutex_t lock;
    struct {
        int status;
        uint64_t n[SRV_AT_COUNT];
    } responses[STATUSES];
    uint64_t ends[SRV_END_COUNT];
    uint64_t prompt_tokens, cached_tokens, written_tokens;
    struct histogram queued, first, total, gap;
    struct inf_stream_sum read, decode;
    uint64_t read_tokens, decode_tokens, attached;
    uint64_t reads, read_sequences, steps, step_sequences;
    uint32_t held_off;
};

struct srv_stats *srv_stats_new(void)
{
    struct srv_stats *s = calloc(1, sizeof *s);
    if (s)
        pthread_mutex_init(&s->lock, NULL);
    return s;
}

void srv_stats_free(struct srv_stats **stats)
{
    if (*stats)
        pthread_mutex_destroy(&(*stats)->lock);
    free(*stats);
    *stats = NULL;
}

void srv_stats_response(struct srv_stats *s, enum srv_endpoint endpoint, int status)
{
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < STATUSES; i++) {
        if (s->responses[i].status && s->responses[i].status != status)
            continue;
        s->responses[i].status = status;
        s->responses[i].n[endpoint]++;
        break;
    }
    pthread_mutex_unlock(&s->lock);
}

static void put(struct histogram *h, uint64_t ns)
{
    double s = (double)ns / 1e9;
    size_t i = 0;
    while (i < BOUNDS && s > bounds[i])
        i++;
    h->bucket[i]++;
    h->n++;
    h->sum += s;
}

void srv_stats_job(struct srv_stats *s, const struct srv_result *r)
{
    pthread_mutex_lock(&s->lock);
    s->ends[r->end]++;
    s->prompt_tokens += r->prompt_tokens;
    s->cached_tokens += r->cached_tokens;
    s->written_tokens += r->written_tokens;
    put(&s->queued, r->queued_ns);
    if (r->first_ns)
        put(&s->first, r->first_ns);
    if (r->total_ns)
        put(&s->total, r->total_ns);
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_gap(struct srv_stats *s, uint64_t ns)
{
    pthread_mutex_lock(&s->lock);
    put(&s->gap, ns);
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_chunk(struct srv_stats *s, const struct inf_chunk *chunk, bool generated)
{
    pthread_mutex_lock(&s->lock);
    inf_stream_sum_add(generated ? &s->decode : &s->read, chunk);
    *(generated ? &s->decode_tokens : &s->read_tokens) += chunk->tokens;
    if (!generated)
        s->held_off = chunk->stream.held_off;
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_pass(struct srv_stats *s, unsigned n, bool generated)
{
    pthread_mutex_lock(&s->lock);
    *(generated ? &s->steps : &s->reads) += 1;
    *(generated ? &s->step_sequences : &s->read_sequences) += n;
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_attached(struct srv_stats *s)
{
    pthread_mutex_lock(&s->lock);
    s->attached++;
    pthread_mutex_unlock(&s->lock);
}

uint32_t srv_stats_held_off(struct srv_stats *s)
{
    pthread_mutex_lock(&s->lock);
    uint32_t held_off = s->held_off;
    pthread_mutex_unlock(&s->lock);
    return held_off;
}

static const char *const endpoints[SRV_AT_COUNT] = {"/v1/chat/completions", "/v1/completions", "/v1/messages",
                                                    "/v1/models", "other"};

static void counter(FILE *f, const char *name, const char *help)
{
    fprintf(f, "# HELP %s %s\n# TYPE %s counter\n", name, help, name);
}

static void write_histogram(FILE *f, const char *name, const char *help, const struct histogram *h)
{
    uint64_t below = 0;
    fprintf(f, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
    for (size_t i = 0; i < BOUNDS; i++) {
        below += h->bucket[i];
        fprintf(f, "%s_bucket{le=\"%g\"} %llu\n", name, bounds[i], (unsigned long long)below);
    }
    fprintf(f, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum %.9g\n%s_count %llu\n", name, (unsigned long long)h->n,
            name, h->sum, name, (unsigned long long)h->n);
}

static void write_stream(FILE *f, const char *name, const char *help, uint64_t read, uint64_t decode)
{
    counter(f, name, help);
    fprintf(f, "%s{phase=\"read\"} %llu\n%s{phase=\"decode\"} %llu\n", name, (unsigned long long)read, name,
            (unsigned long long)decode);
}

void srv_stats_write(struct srv_stats *shared, FILE *f)
{
    pthread_mutex_lock(&shared->lock);
    struct srv_stats s = *shared;
    pthread_mutex_unlock(&shared->lock);
    counter(f, "inferd_http_responses_total", "Responses by endpoint and status.");
    for (int i = 0; i < STATUSES && s.responses[i].status; i++)
        for (int e = 0; e < SRV_AT_COUNT; e++)
            if (s.responses[i].n[e])
                fprintf(f, "inferd_http_responses_total{endpoint=\"%s\",status=\"%d\"} %llu\n", endpoints[e],
                        s.responses[i].status, (unsigned long long)s.responses[i].n[e]);
    counter(f, "inferd_answers_total", "Answers by how they ended.");
    for (int i = 0; i < SRV_END_COUNT; i++)
        fprintf(f, "inferd_answers_total{end=\"%s\"} %llu\n", srv_end_name((enum srv_end)i),
                (unsigned long long)s.ends[i]);
    counter(f, "inferd_prompt_tokens_total", "Tokens of prompts, cached ones included.");
    fprintf(f, "inferd_prompt_tokens_total %llu\n", (unsigned long long)s.prompt_tokens);
    counter(f, "inferd_cached_tokens_total", "Tokens of prompts that a conversation held already.");
    fprintf(f, "inferd_cached_tokens_total %llu\n", (unsigned long long)s.cached_tokens);
    counter(f, "inferd_written_tokens_total", "Tokens of answers.");
    fprintf(f, "inferd_written_tokens_total %llu\n", (unsigned long long)s.written_tokens);
    write_stream(f, "inferd_stream_tokens_total", "Tokens that went through the layers.", s.read_tokens,
                 s.decode_tokens);
    write_stream(f, "inferd_stream_chunks_total", "Passes over the layers.", s.read.chunks, s.decode.chunks);
    write_stream(f, "inferd_batches_total",
                 "Passes by what they were for: pieces of prompts, a step of answers.", s.reads, s.steps);
    write_stream(f, "inferd_batch_sequences_total", "Prompts and answers in them.", s.read_sequences,
                 s.step_sequences);
    write_stream(f, "inferd_stream_routed_total", "Streamed experts that had a token.", s.read.routed,
                 s.decode.routed);
    write_stream(f, "inferd_stream_copied_total", "Experts copied.", s.read.copied, s.decode.copied);
    write_stream(f, "inferd_stream_dropped_total", "Experts dropped before they were copied.", s.read.dropped,
                 s.decode.dropped);
    write_stream(f, "inferd_stream_wasted_total", "Experts copied that no token used.", s.read.wasted,
                 s.decode.wasted);
    write_stream(f, "inferd_stream_bytes_total", "Bytes copied over the link.", s.read.bytes, s.decode.bytes);
    counter(f, "inferd_attached_again_total", "Times that another life of expertd was attached.");
    fprintf(f, "inferd_attached_again_total %llu\n", (unsigned long long)s.attached);
    write_histogram(f, "inferd_queue_seconds", "Time in the queue.", &s.queued);
    write_histogram(f, "inferd_first_token_seconds", "Submission to the first token.", &s.first);
    write_histogram(f, "inferd_token_gap_seconds", "Between two tokens of an answer.", &s.gap);
    write_histogram(f, "inferd_answer_seconds", "Submission to the end.", &s.total);
}

json_t *srv_stats_json(struct srv_stats *shared)
{
    pthread_mutex_lock(&shared->lock);
    struct srv_stats s = *shared;
    pthread_mutex_unlock(&shared->lock);
    json_t *ends = json_object();
    for (int i = 0; i < SRV_END_COUNT; i++)
        json_object_set_new(ends, srv_end_name((enum srv_end)i), json_integer((json_int_t)s.ends[i]));
    return json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "answers",
                     ends, "prompt_tokens", (json_int_t)s.prompt_tokens, "cached_tokens",
                     (json_int_t)s.cached_tokens, "written_tokens", (json_int_t)s.written_tokens,
                     "read_tokens", (json_int_t)s.read_tokens, "decode_tokens", (json_int_t)s.decode_tokens,
                     "reads", (json_int_t)s.reads, "read_sequences", (json_int_t)s.read_sequences, "steps",
                     (json_int_t)s.steps, "step_sequences", (json_int_t)s.step_sequences, "experts_copied",
                     (json_int_t)(s.read.copied + s.decode.copied), "experts_dropped",
                     (json_int_t)(s.read.dropped + s.decode.dropped), "bytes_copied",
                     (json_int_t)(s.read.bytes + s.decode.bytes), "attached_again", (json_int_t)s.attached);
}
