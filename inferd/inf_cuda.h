/* SPDX-License-Identifier: MIT */
/*
 * CUDA device of a worker, private to inf_cuda*.c: inf_cuda.c opens it and
 * holds ring and residents, inf_cuda_plan.c has the memory (dense weights,
 * activations), inf_cuda_kv.c that of keys and values, inf_cuda_pass.c the
 * steps, inf_cuda_wait.c everything that waits.
 *
 * A pass is one stream's queue: nothing in it waits for this process. What
 * waits is the device, for its own flag that expertd's copy engine writes.
 */
#ifndef INF_CUDA_H
#define INF_CUDA_H

#include "inferd/inf_device.h"
#include "kernels/krn_cu.h"
#include "kernels/krn_upload.h"

#define INF_CUDA_LOGIT_ROWS 32u
#define INF_CUDA_OLD_RINGS  4u

struct inf_cuda_layer {
    krn_cuda_ptr attn_norm, ffn_norm, q_norm, k_norm, router; /* float */
    struct krn_cu_matrix q, k, v, output;
    struct krn_cu_expert_shape experts;
};

/* What a pass brings to the device: where its keys and values are, of each span its row (for generated
 * tokens); then words: zeros [layers], in which the device counts the choices whose expert it ran, and the
 * spans' tables of blocks. */
struct inf_cuda_map {
    struct krn_cu_row row[INF_SPANS_MAX];
    uint32_t word[];
};

/* Where everything of a chunk is; offsets until they are placed. */
struct inf_cuda_act {
    krn_cuda_ptr x, normed, normed16; /* float, float, f16 [t][hidden] */
    krn_cuda_ptr q, k, v, q16, y16;   /* float; f16 [t][heads][head_dim] */
    krn_cuda_ptr out, hidden_rows;    /* float [t * top_k][hidden]; f16 [t * top_k][width] */
    krn_cuda_ptr rope, scores;        /* float [t][head_dim], [t][experts] */
    krn_cuda_ptr ids, weights, slots; /* [t * top_k] */
    krn_cuda_ptr predicted_ids, predicted_weights;
    krn_cuda_ptr counts, offsets, hist, predicted_hist, plan;
    krn_cuda_ptr map;           /* struct inf_cuda_map */
    krn_cuda_ptr dense, decode; /* scratch */
    krn_cuda_ptr logits;        /* float [INF_CUDA_LOGIT_ROWS][vocab] */
};

struct inf_cuda {
    struct inf_device base;
    struct krn_cuda_device *gpu;
    struct krn_cu *cu;
    void *module, *poison_kernel, *clock_kernel, *busy_kernel;
    void *stream, *aux; /* the pass; what must get through while the pass waits */
    int64_t clock_offset_ns;
    _Atomic uint32_t *attached; /* ends the busy kernel */
    krn_cuda_ptr attached_device;
    bool poison;

    struct krn_upload *upload; /* while residents and dense weights are brought; NULL */

    const struct inf_model *model; /* NULL until set */
    struct inf_cuda_layer *layer;
    struct krn_cu_matrix embed, head;
    krn_cuda_ptr output_norm, dense;

    krn_cuda_ptr ring, flag; /* one allocation, kept from session to session */
    uint32_t flag_last;      /* what a copy to the flag may still read */
    uint64_t ring_bytes, ring_allocated;
    krn_cuda_ptr old_ring[INF_CUDA_OLD_RINGS]; /* smaller ones of earlier sessions */
    uint32_t old_rings;
    struct shm_geometry geometry;
    struct shm_worker_view control;
    krn_cuda_ptr control_device; /* 0: no session */

    krn_cuda_ptr resident, resident_table; /* uint64 [layers][experts] */
    bool *all_resident;                    /* [layers]; NULL: none is */
    uint64_t released;                     /* groups that the running pass has enqueued the release of */

    uint32_t chunk;
    struct inf_cuda_act act;
    struct krn_cu_kv *kv;   /* [layers], of all blocks, f16; NULL until opened */
    krn_cuda_ptr kv_memory; /* of each layer keys, then values; of each KV head block after block */
    krn_cuda_ptr table[INF_SPANS_MAX]; /* of the pass's spans, in act.map */
    struct krn_cu_rows rows;           /* of the pass, where its tokens are generated */
    krn_cuda_ptr memory;
    uint8_t *host; /* pinned: ids [chunk], counts [experts], choices run [layers], logits, a map */
    krn_cuda_ptr host_device;
    uint32_t *host_ids, *host_counts, *host_ran;
    float *host_logits;
    struct inf_cuda_map *host_map;
    uint32_t *routes; /* [2][chunk * top_k], ids and weights; NULL until wanted */

    _Atomic uint32_t *done; /* operations that the stream has passed, low half of `ops` */
    krn_cuda_ptr done_device;
    uint32_t ops, ops_sent;
    struct inf_cuda_profile *profile; /* NULL until wanted */
    struct inf_cuda_trace *trace;     /* NULL: not in the test mode */
    uint32_t layer_now;               /* being enqueued, for messages */
    bool broken;                      /* the context is lost */
};

static inline struct inf_cuda *inf_cuda_of(struct inf_device *d)
{
    return (struct inf_cuda *)d;
}

/* The device's address of something in the control segment. */
static inline krn_cuda_ptr inf_cuda_control(const struct inf_cuda *c, const void *at)
{
    return c->control_device + (krn_cuda_ptr)((const uint8_t *)at - (const uint8_t *)c->control.worker);
}

/* What brings residents and dense weights: opened by the first of them, closed when all are planned. */
int inf_cuda_upload(struct inf_cuda *c, bool residents, struct shm_error *err);

/* Before anything is enqueued: the device is usable, and this thread's from now on. */
int inf_cuda_begin(struct inf_cuda *c, struct shm_error *err);

/* A driver's failure in a pass as one line; the device is unusable from then on. */
int inf_cuda_failed(struct inf_cuda *c, int rc, struct shm_error *err);

/* A step's operation on the stream, in a function with c, err and rc; the first failure ends that. */
#define INF_CUDA_TRY(call)                                                                                   \
    do {                                                                                                     \
        if ((rc = (call)))                                                                                   \
            return inf_cuda_failed(c, rc, err);                                                              \
    } while (0)

/* Where a layer's choices that are run are counted. */
static inline krn_cuda_ptr inf_cuda_ran(const struct inf_cuda *c, uint32_t layer)
{
    return c->act.map + offsetof(struct inf_cuda_map, word) + layer * UINT64_C(4);
}

/* inf_cuda_wait.c. spend: n operations were enqueued; waits while too many are under way, so that the
 * driver's queue never fills (a call that blocks in the driver could not be ended). finish: waits for all of
 * them. Both end early as inf_stream_check and the pass's cancel flag say, by the watchdog, or on a device
 * error. stream NULL: nobody is watched. */
int inf_cuda_spend(struct inf_cuda *c, const struct inf_pass *p, struct inf_stream *stream, uint32_t n,
                   struct shm_error *err);
int inf_cuda_finish(struct inf_cuda *c, const struct inf_pass *p, struct inf_stream *stream,
                    struct shm_error *err);
void inf_cuda_quiesce(struct inf_device *d, uint64_t end_group);

/* inf_cuda_plan.c */
int inf_cuda_set_model(struct inf_device *d, const struct inf_model *model, struct shm_error *err);
int inf_cuda_plan(struct inf_device *d, uint32_t conversations, uint32_t *chunk, uint32_t *ctx,
                  uint32_t *kv_tokens, struct shm_error *err);
void inf_cuda_plan_free(struct inf_cuda *c);

/* inf_cuda_kv.c */
int inf_cuda_kv_open(struct inf_device *d, uint32_t tokens, struct shm_error *err);
void inf_cuda_kv_close(struct inf_device *d);
int inf_cuda_kv_copy(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err);
int inf_cuda_kv_read(struct inf_device *d, uint32_t block, void *to, struct shm_error *err);
int inf_cuda_kv_write(struct inf_device *d, uint32_t block, const void *from, struct shm_error *err);
int inf_cuda_stage_open(struct inf_device *d, uint64_t bytes, void **ret_memory, struct shm_error *err);
void inf_cuda_stage_close(struct inf_device *d, void *memory);

/* inf_cuda_profile.c: what the GPU does when, by an event behind each step. begin: a pass; stamp: all that
 * was enqueued since the last stamp is `step`; collect: the pass has ended, its times are added to the
 * device's. Nothing happens unless the device's `profile` is set.
 * A layer has many groups, and an event costs about 7 us: in one layer of eight, another one each pass, each
 * group's wait and experts are told apart (stamp_group, STALL and EXPERTS); the others are one step
 * (STREAMED), split alike. */
enum inf_cuda_step {
    INF_STEP_IDLE,
    INF_STEP_HEAD,
    INF_STEP_ATTENTION,
    INF_STEP_ROUTER,
    INF_STEP_STALL,
    INF_STEP_EXPERTS,
    INF_STEP_STREAMED /* stall and experts of a layer together */
};
void inf_cuda_profile_begin(struct inf_cuda *c);
void inf_cuda_stamp(struct inf_cuda *c, enum inf_cuda_step step);
void inf_cuda_stamp_group(struct inf_cuda *c, uint32_t layer, enum inf_cuda_step step);
void inf_cuda_profile_collect(struct inf_cuda *c);
void inf_cuda_profile_free(struct inf_cuda *c);

/* inf_cuda_trace.c: test mode, by the environment. open: for a device; begin, end: of a pass, end behind its
 * last wait. hash: of what a step wrote, rows x row_bytes, stride bytes apart. slots: of the run's groups,
 * before or behind its kernels; layer: behind all its groups. Nothing happens unless it is on. */
int inf_cuda_trace_open(struct inf_cuda *c, struct shm_error *err);
void inf_cuda_trace_close(struct inf_cuda *c);
int inf_cuda_trace_begin(struct inf_cuda *c);
int inf_cuda_trace_end(struct inf_cuda *c, const struct inf_pass *p);
int inf_cuda_trace_attention(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer);
int inf_cuda_trace_experts(struct inf_cuda *c, const struct inf_pass *p, uint32_t layer, int part);
int inf_cuda_trace_slots(struct inf_cuda *c, const struct krn_cu_expert_run *run, uint32_t layer,
                         bool behind);
int inf_cuda_trace_layer(struct inf_cuda *c, const struct krn_cu_expert_run *run, uint32_t layer);

/* inf_cuda_pass.c */
int inf_cuda_embed(struct inf_device *d, const struct inf_pass *p, struct shm_error *err);
int inf_cuda_predict_first(struct inf_device *d, const struct inf_pass *p, const uint32_t **ret_counts,
                           struct shm_error *err);
int inf_cuda_attention(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err);
int inf_cuda_experts(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err);
int inf_cuda_head(struct inf_device *d, const struct inf_pass *p, struct shm_error *err);

#endif
