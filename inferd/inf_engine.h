/* SPDX-License-Identifier: MIT */
/*
 * Engine: what one worker process needs to read and answer: the tie to
 * expertd, the model on its arena, tokenizer, threads and activation memory.
 * Conversations (inf_conversation.h) are separate: they outlive a lost expertd,
 * and so does the engine.
 *
 * One thread drives it. Errors are one line, ready to be shown.
 */
#ifndef INF_ENGINE_H
#define INF_ENGINE_H

#include "inferd/inf_device.h"
#include "inferd/inf_store.h"
#include "inferd/inf_tokenizer.h"
#include "shm/shm_word.h"

struct inf_kv_pool;

enum inf_device_choice {
    INF_DEVICE_AUTO = SHM_DEVICE_AUTO,
    INF_DEVICE_HOST = SHM_DEVICE_HOST,
    INF_DEVICE_CUDA = SHM_DEVICE_CUDA
};

#define INF_CHUNK_MAX (1u << 20)

struct inf_engine_config {
    struct inf_store_config store;
    uint32_t threads;       /* 0: as many as the process may run on */
    uint32_t chunk;         /* most tokens in one pass; 0: the device's choice */
    uint32_t ctx;           /* tokens of a conversation; 0: the model's context */
    uint32_t conversations; /* that share the pool of keys and values; 0 is 1 */
    uint32_t kv_tokens;     /* of the pool; 0: ctx for one conversation, else the device's choice */
    enum inf_device_choice device;
    int gpu;      /* which one; -1: the first */
    bool profile; /* tell the GPU's steps apart (struct inf_times) */
};

struct inf_engine {
    struct inf_store store;
    struct inf_model *model;
    struct inf_tokenizer *tokenizer;
    struct inf_device *device;
    struct inf_kv_pool *pool; /* of keys and values */
    uint32_t chunk, ctx;
    uint32_t chunk_planned; /* the largest that memory was planned for */
    char *chat_template;    /* copy, NUL-terminated, "" if there is none */
    size_t chat_template_bytes;
    uint64_t attach_ns;       /* of the last attach, until ready */
    struct inf_phases phases; /* of the first one */
};

/* What can be told before there is an expertd: whether the driver shows the GPU that --device cuda names. */
int inf_engine_check(const struct inf_engine_config *config, struct shm_error *err);

int inf_engine_open(const struct inf_engine_config *config, struct shm_error *err,
                    struct inf_engine **ret_engine);
void inf_engine_close(struct inf_engine **engine);

/* Makes sure that a living expertd is attached; attaches anew if not, waiting
 * at most wait_ms for one to appear. *ret_again (may be NULL): attached anew. */
int inf_engine_ensure(struct inf_engine *engine, uint32_t wait_ms, bool *ret_again, struct shm_error *err);

/* Other settings for the reads to come: chunk (at most what was planned; 0: that), ring, policy, order,
 * depth, floor and the link's pace; the rest of config is not looked at. Between two passes, expertd
 * attached. Asks expertd (CONFIGURE), or attaches anew where that can't do: another ring, another floor, back
 * to expertd's default. */
int inf_engine_configure(struct inf_engine *engine, const struct inf_engine_config *config,
                         struct shm_error *err);

/* A tokenizer from the catalog of a checked arena. */
int inf_engine_tokenizer(const struct shm_arena_view *arena, struct shm_error *err,
                         struct inf_tokenizer **ret_tokenizer);

#endif
