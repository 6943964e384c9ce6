/* SPDX-License-Identifier: MIT */
/*
 * Inside the engine thread: its state, a job's answer (srv_run.c),
 * and the loop that steps them all (srv_loop.c).
 */
#ifndef SRV_ENGINE_PRIV_H
#define SRV_ENGINE_PRIV_H

#include "inferd/inf_detok.h"
#include "inferd/inf_prefix.h"
#include "inferd/serve/srv_engine.h"
#include "inferd/serve/srv_grammar.h"
#include "inferd/serve/srv_sched.h"
#include "kernels/krn_pool.h"
#include "shm/shm_bell.h"

#include <pthread.h>

/* A job that runs: first its prompt is read, then it writes token after token. */
struct srv_seq {
    struct srv_engine *e;
    struct srv_job *job;
    struct inf_conversation *c;
    uint32_t blocks; /* of keys and values, kept free for it */
    uint32_t exact;  /* tokens that were read as part of a prompt, as were all before them */
    bool loading;    /* more of its beginning comes from the park */
    bool looks;      /* for its beginning again, before its first token: it may be kept by then */
    struct inf_sampler *sampler;
    struct inf_detok *detok;
    struct srv_text *text;
    struct srv_result result;
    float *logits; /* [vocab] behind the last token read */
    bool fresh;    /* not sampled from yet */
    bool ended;    /* result.end or rc says how */
    int32_t next;  /* written, to be read; -1: the prompt is being read */
    uint64_t start_ns, token_ns;
    int rc;
    struct shm_error err;
};

struct srv_engine {
    struct srv_engine_config config;
    pthread_t thread;
    pthread_mutex_t lock; /* of status */
    struct srv_status status;
    struct srv_info info;
    _Atomic bool informed;
    struct inf_engine *engine;
    struct srv_vocab *vocab;
    struct inf_prefix *prefix; /* what was read before */

    struct srv_seq *seq[SRV_PARALLEL_MAX]; /* in the order of their start */
    unsigned n_seq;
    bool *held; /* [blocks of the pool] whole ones that they share or may share: srv_engine_reserved */
    unsigned busy_rounds;            /* since something was parked */
    bool park_stuck;                 /* something is due that can't be parked: no hurry */
    float *logits[SRV_PARALLEL_MAX]; /* not in use: rows for sequences to come */
    unsigned n_logits;
    struct krn_pool *pool; /* samples, fetches parked blocks */
    struct srv_speed read; /* of prompts */
    uint64_t step_ns;      /* the last step of all answers, sampling included */
};

/* Blocks that the running jobs hold or may come to need; one that several hold counts once. */
uint32_t srv_engine_reserved(struct srv_engine *e);

/* Blocks that a job may come to need beside those of srv_engine_reserved, called just before. */
uint32_t srv_engine_wants(struct srv_engine *e, const struct srv_job *job);

/* Takes a job on. Whatever fails ends the sequence (seq->ended); NULL: no memory even for that, and the job
 * has ended. */
struct srv_seq *srv_seq_new(struct srv_engine *e, struct srv_job *job);

/* Tokens of the prompt that are still to be read. */
uint32_t srv_seq_rest(const struct srv_seq *s);

/* Looks for what was read before of the prompt; again as long as seq->loading says so. */
void srv_seq_take_prefix(struct srv_seq *s);

/* Keeps what was read; of a sequence that goes on whole blocks. */
void srv_seq_keep(struct srv_seq *s, bool goes_on);

/* The next token out of fresh logits: seq->next, or seq->ended. Several sequences may do so at once. */
void srv_seq_advance(struct srv_seq *s);

/* Ends the sequence for a reason from outside. */
void srv_seq_fail(struct srv_seq *s, int rc, const struct shm_error *err);

/* Delivers the end of an ended sequence and frees it. */
void srv_seq_finish(struct srv_seq **seq);

/* Steps all jobs until the queue is finished (0) or nothing works any more. */
int srv_loop_run(struct srv_engine *e, struct shm_error *err);

/* Ends the sequences whose job was cancelled. */
void srv_loop_drop_cancelled(struct srv_engine *e);

void srv_engine_publish(struct srv_engine *e);

/* Waits for the next expertd, at most wait_ms (0: as long as it takes, or until the queue is finished:
 * -ECANCELED). Jobs that are cancelled meanwhile end. */
int srv_engine_reattach(struct srv_engine *e, uint32_t wait_ms, struct shm_error *err);

#endif
