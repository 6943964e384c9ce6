/* SPDX-License-Identifier: MIT */
/* Inside the engine thread: its state, the kept conversations (srv_slots.c), one job (srv_run.c). */
#ifndef SRV_ENGINE_PRIV_H
#define SRV_ENGINE_PRIV_H

#include "inferd/inf_detok.h"
#include "inferd/serve/srv_engine.h"
#include "inferd/serve/srv_grammar.h"
#include "shm/shm_bell.h"

#include <pthread.h>

struct srv_slot {
    struct inf_conversation *conversation;
    uint64_t used_ns;
    bool busy;
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
    struct inf_detok *detok, *detok_special;
    float *logits; /* [vocab] */
    struct srv_slot *slots;
    unsigned n_slots;
};

/* One conversation is made at once, so that a server that started can answer. */
int srv_slots_open(struct srv_engine *e, struct shm_error *err);
void srv_slots_close(struct srv_engine *e);

/* The conversation for a prompt, cut to *ret_common tokens that it shares with it (fewer than n). -EBUSY: all
 * are busy. */
int srv_slots_pick(struct srv_engine *e, const int32_t *ids, size_t n, struct srv_slot **ret_slot,
                   uint32_t *ret_common);

/* Runs a job to its end and ends it. */
void srv_run_job(struct srv_engine *e, struct srv_job *job);

void srv_engine_publish(struct srv_engine *e);
int srv_engine_reattach(struct srv_engine *e, uint32_t wait_ms, const struct srv_job *job,
                        struct shm_error *err);

#endif
