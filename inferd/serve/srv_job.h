/* SPDX-License-Identifier: MIT */
/*
 * Jobs: what the HTTP side wants computed, and the queue between it and the
 * engine thread. The HTTP side submits, cancels and is handed events; the
 * engine takes jobs (any number may run at once) and puts events. Events wait
 * in the job; an eventfd wakes the HTTP loop.
 *
 * Order: clients take turns, the jobs of one client run as they came. A
 * client's turn is counted when its job is submitted, so that many jobs of
 * one don't delay the first one of another.
 *
 * Every function may be called by any thread unless it says otherwise.
 */
#ifndef SRV_JOB_H
#define SRV_JOB_H

#include "inferd/inf_sampler.h"
#include "inferd/inf_tokenizer.h"

#include "shm/shm_server.h"

#include <stdatomic.h>

#define SRV_TOP_MAX    20 /* alternatives with log-probabilities */
#define SRV_STOPS_MAX  16 /* stop strings */
#define SRV_CLIENT_MAX 128

struct srv_grammar;
struct srv_queue;
struct srv_job;

enum srv_end {
    SRV_END_TOKEN,     /* the model ended its answer */
    SRV_END_STRING,    /* a stop string */
    SRV_END_LENGTH,    /* max_tokens */
    SRV_END_CONTEXT,   /* the context is full */
    SRV_END_CANCELLED, /* by srv_queue_cancel */
    SRV_END_FAILED,
    SRV_END_COUNT
};
const char *srv_end_name(enum srv_end end);

struct srv_likely {
    int32_t id;
    float logprob;
};

/* What became of a job. */
struct srv_result {
    enum srv_end end;
    uint32_t stop; /* which stop string */
    int code;      /* negative errno of a failure */
    char error[512];
    uint32_t prompt_tokens, cached_tokens, written_tokens;
    uint64_t queued_ns, read_ns, first_ns,
        total_ns; /* waiting; prompt; submission to first token, to the end */
};

/* A token and the text it completed (maybe none), or the end. */
struct srv_event {
    struct srv_event *next;
    bool ended;
    struct srv_result result; /* ended */
    char *text;               /* UTF-8, whole characters; NULL: none */
    size_t bytes;
    int32_t id; /* of the token, -1: text that was held back */
    float logprob;
    unsigned n_top;
    struct srv_likely top[]; /* likeliest first */
};

struct srv_job {
    /* The submitter's; constant from then on. */
    struct inf_ids prompt;
    struct inf_sampler_params sampler;
    struct srv_likely *bias; /* logit_bias: id and what is added */
    size_t n_bias;
    uint32_t max_tokens;
    bool show_special; /* control tokens are part of the text: for a parser of answers */
    bool ignore_eos;
    bool logprobs;
    unsigned n_top;
    char *stops[SRV_STOPS_MAX];
    unsigned n_stops;
    int32_t stop_ids[8]; /* besides the vocabulary's own */
    unsigned n_stop_ids;
    struct srv_grammar *grammar; /* owned; the engine's from submission on; NULL: free text */
    uint64_t number;             /* the queue's */
    char client[SRV_CLIENT_MAX];
    /* Called by srv_queue_deliver, in its thread, for each event in order; none after the end. */
    void (*on_event)(struct srv_job *job, const struct srv_event *event);
    void *user;

    /* Progress, written by the engine. */
    _Atomic uint32_t read, written, cached;
    _Atomic bool running;
    _Atomic bool cancelled;
    uint64_t submit_ns;

    /* The queue's, under its lock. */
    uint64_t turn;
    unsigned references;
    bool done, ready, passing;
    struct srv_event *first, **last;
    struct srv_job *next, *next_ready;
};

/* Zeroed, with one reference. NULL: no memory. */
struct srv_job *srv_job_new(void);
void srv_job_release(struct srv_queue *q, struct srv_job **job);

struct srv_counts {
    unsigned waiting, running, limit;
    uint64_t submitted, refused, cancelled, done;
    double mean_s; /* of a job's run, lately */
};

/* limit: most jobs that wait. -ENOMEM, or eventfd's. */
int srv_queue_create(unsigned limit, struct srv_queue **ret_queue);
void srv_queue_destroy(struct srv_queue **queue);

/* Counts what becomes of it there from now on. */
void srv_queue_show(struct srv_queue *q, struct shm_server *segment);

/* Readable when srv_queue_deliver has something to do. */
int srv_queue_fd(const struct srv_queue *q);
void srv_queue_deliver(struct srv_queue *q);

/* -EBUSY: full; -ESHUTDOWN: closed, or not open yet. On success the queue holds a reference until the job has
 * ended. */
int srv_queue_submit(struct srv_queue *q, struct srv_job *job);

/* Ends the job early; its end is delivered all the same. */
void srv_queue_cancel(struct srv_queue *q, struct srv_job *job);

/* Whether jobs are taken. Closing ends those that wait, with `why` (a line) as their error, code as its
 * errno; pausing leaves them. */
void srv_queue_open(struct srv_queue *q);
void srv_queue_pause(struct srv_queue *q);
void srv_queue_close(struct srv_queue *q, int code, const char *why);
bool srv_queue_is_open(struct srv_queue *q);

/* No more jobs are taken and none is refused to the engine: srv_queue_take gives NULL at once when all are
 * through. */
void srv_queue_finish(struct srv_queue *q);
bool srv_queue_finished(struct srv_queue *q); /* and no job is left */

/* The engine's: the next job, or NULL after wait_ms. A job that was cancelled while it waited never gets
 * here. fits (NULL: any does), called under the lock: whether there is room for it; where there is none, it
 * stays the next one, so that smaller ones behind it can't keep it waiting for ever, and NULL comes at once.
 */
struct srv_job *srv_queue_take(struct srv_queue *q, unsigned wait_ms,
                               bool (*fits)(void *ctx, const struct srv_job *job), void *ctx);
void srv_queue_put(struct srv_queue *q, struct srv_job *job, struct srv_event *event); /* takes the event */
void srv_queue_end(struct srv_queue *q, struct srv_job *job, const struct srv_result *result);

/* Those of the running jobs that the engine's next pass is for; n 0: it ended. */
void srv_queue_pass(struct srv_queue *q, struct srv_job *const *jobs, unsigned n);

/* Set as long as every job of the pass is cancelled: the engine may break it off. */
_Atomic bool *srv_queue_interrupt(struct srv_queue *q);

struct srv_counts srv_queue_counts(struct srv_queue *q);

/* The jobs that wait or run, oldest first, while the lock is held: short and without calls to the queue. */
void srv_queue_each(struct srv_queue *q, void (*see)(void *ctx, const struct srv_job *job, bool running),
                    void *ctx);

/* An event for a token or text; NULL: no memory. */
struct srv_event *srv_event_new(const char *text, size_t bytes, unsigned n_top);

#endif
