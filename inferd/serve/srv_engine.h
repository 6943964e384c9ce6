/* SPDX-License-Identifier: MIT */
/*
 * Engine thread: owns the engine, its tie to expertd, and keys and values;
 * takes jobs from the queue and puts what they write. Up to `parallel` jobs
 * run at once: their prompts are read in the same passes, their answers step
 * together (srv_sched.h). What a job writes does not depend on the others.
 *
 * A job starts when there is room for all tokens that it may come to have. What was read is kept as long as
 * nobody else needs the room: a prompt that begins alike reads only what is new. When expertd goes away, the
 * thread waits for the next one; jobs that run then go on where they were, unless that takes longer than
 * resume_ms.
 */
#ifndef SRV_ENGINE_H
#define SRV_ENGINE_H

#include "inferd/inf_options.h"
#include "inferd/inf_prefix.h"
#include "inferd/serve/srv_stats.h"

struct srv_engine;

struct srv_engine_config {
    struct inf_options *options; /* borrowed */
    struct srv_queue *queue;     /* borrowed; opened when the engine is ready */
    struct srv_stats *stats;     /* borrowed */
    unsigned parallel;           /* most jobs that run at once, up to SRV_PARALLEL_MAX */
    unsigned gap_ms;             /* longest between two tokens of an answer while prompts are read; 0: any */
    unsigned resume_ms;          /* how long a job waits for the next expertd */
    int event_fd;                /* written to when the state changes */
};

enum srv_state {
    SRV_STARTING, /* attaching; expertd may still load */
    SRV_READY,
    SRV_AWAY,   /* waits for the next expertd */
    SRV_FAILED, /* for good; the line says why */
    SRV_ENDED,  /* after srv_queue_finish */
};
const char *srv_state_name(enum srv_state state);

/* What does not change once it was ready. */
struct srv_info {
    char model[128];
    uint32_t vocab, ctx, chunk, layers, experts, experts_used;
    uint32_t kv_tokens, parallel; /* room for keys and values; most jobs at once */
    double kv_mib;
    char device[192], device_note[256];
    struct inf_tokenizer *tokenizer; /* the engine's; safe in any thread */
    const char *chat_template;
    size_t chat_template_bytes;
};

struct srv_status {
    enum srv_state state;
    char error[512];
    uint64_t session, attach_ns, resident_bytes, ring_bytes, activation_bytes;
    uint32_t ring, resident;
    struct inf_settings settings;
    struct {
        uint32_t blocks, free; /* of INF_KV_BLOCK tokens: in all, and of them nobody's */
        uint32_t reserved;     /* what the running jobs may come to need, a block that several hold once */
        uint64_t block_bytes;
    } kv;
    struct inf_prefix_stats prefix;
};

int srv_engine_start(const struct srv_engine_config *config, struct srv_engine **ret_engine);

/* After srv_queue_finish: waits for the thread. */
void srv_engine_join(struct srv_engine **engine);

enum srv_state srv_engine_state(struct srv_engine *e);
void srv_engine_status(struct srv_engine *e, struct srv_status *ret_status);

/* NULL before it was ready for the first time. */
const struct srv_info *srv_engine_info(struct srv_engine *e);

#endif
