/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_stats.h"

#include "proto/prt_file.h"
#include "proto/prt_metrics.h"
#include "shm/shm_word.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct srv_stats {
    pthread_mutex_t lock; /* of those that both threads add to */
    struct shm_server *segment;
    int fd; /* -1: no shared memory, tools see nothing */
    uint32_t held_off;
    const struct shm_labels *codes; /* of responses */
};

_Static_assert((int)SRV_AT_COUNT == SHM_ENDPOINT_COUNT && (int)SRV_AT_OTHER == SHM_ENDPOINT_OTHER &&
                   (int)SRV_AT_MESSAGES == SHM_ENDPOINT_V1_MESSAGES,
               "endpoints as in counters.spec");
_Static_assert((int)SRV_END_COUNT == SHM_ANSWER_END_COUNT && (int)SRV_END_LENGTH == SHM_ANSWER_END_LENGTH &&
                   (int)SRV_END_FAILED == SHM_ANSWER_END_FAILED,
               "ends as in counters.spec");

struct srv_stats *srv_stats_new(void)
{
    struct srv_stats *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    void *base = NULL;
    if (prt_segment_create("inferd-server", sizeof *s->segment, &s->fd, &base, NULL)) {
        s->fd = -1;
        base = aligned_alloc(SHM_SERVER_ALIGN, sizeof *s->segment);
        if (!base) {
            free(s);
            return NULL;
        }
        memset(base, 0, sizeof *s->segment);
    }
    s->segment = base;
    s->codes = shm_counter_find(SHM_BLOCK_SERVER, "http_responses")->labels[1];
    pthread_mutex_init(&s->lock, NULL);
    uint64_t start = 0;
    struct timespec now;
    prt_process_start(getpid(), &start);
    clock_gettime(CLOCK_REALTIME, &now);
    shm_header_init(&s->segment->header, SHM_SERVER_MAGIC, sizeof *s->segment, (uint32_t)getpid(), start);
    shm_counter_set(&s->segment->counters.start_time_ns,
                    (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    shm_header_publish(&s->segment->header, prt_random_epoch());
    return s;
}

void srv_stats_free(struct srv_stats **stats)
{
    struct srv_stats *s = *stats;
    if (!s)
        return;
    pthread_mutex_destroy(&s->lock);
    if (s->fd >= 0) {
        munmap(s->segment, sizeof *s->segment);
        close(s->fd);
    } else {
        free(s->segment);
    }
    free(s);
    *stats = NULL;
}

struct shm_server *srv_stats_segment(struct srv_stats *s)
{
    return s->segment;
}

uint32_t srv_stats_fd(const struct srv_stats *s)
{
    return s->fd > 0 ? (uint32_t)s->fd : 0;
}

void srv_stats_response(struct srv_stats *s, enum srv_endpoint endpoint, int status)
{
    uint32_t code = 0;
    while (code < SHM_HTTP_STATUS_OTHER && atoi(s->codes->value[code]) != status)
        code++;
    pthread_mutex_lock(&s->lock);
    shm_counter_add(&s->segment->counters.http_responses[(uint32_t)endpoint * SHM_HTTP_STATUS_COUNT + code],
                    1);
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_job(struct srv_stats *s, const struct srv_result *r)
{
    struct shm_server_counters *c = &s->segment->counters;
    pthread_mutex_lock(&s->lock);
    shm_counter_add(&c->answers[r->end], 1);
    shm_counter_add(&c->prompt_tokens, r->prompt_tokens);
    shm_counter_add(&c->cached_tokens, r->cached_tokens);
    shm_counter_add(&c->written_tokens, r->written_tokens);
    SHM_HISTOGRAM_ADD(c->queue_ns, shm_bounds_long, r->queued_ns);
    if (r->first_ns)
        SHM_HISTOGRAM_ADD(c->first_token_ns, shm_bounds_long, r->first_ns);
    if (r->total_ns)
        SHM_HISTOGRAM_ADD(c->answer_ns, shm_bounds_long, r->total_ns);
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_gap(struct srv_stats *s, uint64_t ns)
{
    pthread_mutex_lock(&s->lock);
    SHM_HISTOGRAM_ADD(s->segment->counters.token_gap_ns, shm_bounds_long, ns);
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_chunk(struct srv_stats *s, const struct inf_chunk *chunk, bool generated)
{
    struct shm_server_counters *c = &s->segment->counters;
    const struct shm_report *r = &chunk->stream;
    uint32_t phase = generated ? SHM_PHASE_DECODE : SHM_PHASE_READ;
    pthread_mutex_lock(&s->lock);
    shm_counter_add(&c->stream_tokens[phase], chunk->tokens);
    shm_counter_add(&c->stream_chunks[phase], 1);
    shm_counter_add(&c->stream_routed[phase], r->routed);
    shm_counter_add(&c->stream_copied[phase], r->copied);
    shm_counter_add(&c->stream_dropped[phase], r->dropped);
    shm_counter_add(&c->stream_wasted[phase], r->wasted);
    shm_counter_add(&c->stream_bytes[phase], r->bytes);
    shm_counter_add(&c->stream_ns[phase], chunk->ns);
    if (!generated)
        s->held_off = r->held_off;
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_pass(struct srv_stats *s, unsigned n, bool generated)
{
    uint32_t phase = generated ? SHM_PHASE_DECODE : SHM_PHASE_READ;
    pthread_mutex_lock(&s->lock);
    shm_counter_add(&s->segment->counters.batches[phase], 1);
    shm_counter_add(&s->segment->counters.batch_sequences[phase], n);
    pthread_mutex_unlock(&s->lock);
}

void srv_stats_attached(struct srv_stats *s)
{
    pthread_mutex_lock(&s->lock);
    shm_counter_add(&s->segment->counters.attached_again, 1);
    pthread_mutex_unlock(&s->lock);
}

uint32_t srv_stats_held_off(struct srv_stats *s)
{
    pthread_mutex_lock(&s->lock);
    uint32_t held_off = s->held_off;
    pthread_mutex_unlock(&s->lock);
    return held_off;
}

void srv_stats_write(struct srv_stats *s, FILE *f)
{
    uint64_t words[SHM_SERVER_WORDS];
    shm_counters_copy(SHM_BLOCK_SERVER, &s->segment->counters, words);
    words[SHM_SERVER_WORD_QUEUE_OLDEST_NS] = shm_server_oldest_ns(s->segment, shm_now_ns());
    prt_metrics_block(f, SHM_BLOCK_SERVER, &(struct prt_series){.words = words, .labels = ""}, 1, true);
}

static json_int_t both(const uint64_t *words, const char *name)
{
    return (json_int_t)shm_counter_total(shm_counter_find(SHM_BLOCK_SERVER, name), words);
}

json_t *srv_stats_json(struct srv_stats *s)
{
    uint64_t w[SHM_SERVER_WORDS];
    shm_counters_copy(SHM_BLOCK_SERVER, &s->segment->counters, w);
    json_t *ends = json_object();
    for (int i = 0; i < SRV_END_COUNT; i++)
        json_object_set_new(ends, srv_end_name((enum srv_end)i),
                            json_integer((json_int_t)w[SHM_SERVER_WORD_ANSWERS + i]));
    return json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "answers",
                     ends, "prompt_tokens", (json_int_t)w[SHM_SERVER_WORD_PROMPT_TOKENS], "cached_tokens",
                     (json_int_t)w[SHM_SERVER_WORD_CACHED_TOKENS], "written_tokens",
                     (json_int_t)w[SHM_SERVER_WORD_WRITTEN_TOKENS], "read_tokens",
                     (json_int_t)w[SHM_SERVER_WORD_STREAM_TOKENS + SHM_PHASE_READ], "decode_tokens",
                     (json_int_t)w[SHM_SERVER_WORD_STREAM_TOKENS + SHM_PHASE_DECODE], "reads",
                     (json_int_t)w[SHM_SERVER_WORD_BATCHES + SHM_PHASE_READ], "read_sequences",
                     (json_int_t)w[SHM_SERVER_WORD_BATCH_SEQUENCES + SHM_PHASE_READ], "steps",
                     (json_int_t)w[SHM_SERVER_WORD_BATCHES + SHM_PHASE_DECODE], "step_sequences",
                     (json_int_t)w[SHM_SERVER_WORD_BATCH_SEQUENCES + SHM_PHASE_DECODE], "experts_copied",
                     both(w, "stream_copied"), "experts_dropped", both(w, "stream_dropped"), "bytes_copied",
                     both(w, "stream_bytes"), "attached_again",
                     (json_int_t)w[SHM_SERVER_WORD_ATTACHED_AGAIN]);
}
