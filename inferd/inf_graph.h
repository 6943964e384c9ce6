/* SPDX-License-Identifier: MIT */
/*
 * Graph: the steps of one pass (one chunk over all layers) on the host device
 * (inf_device_host.c hands them to the architectures).
 *
 * Owns the activation memory, planned from the model's shape before anything
 * is allocated and fixed afterwards; borrows model, pool, KV, stream. One
 * pass at a time, one thread (the pool's owner).
 *
 * A token's result is the same bits in any chunk, whatever the order in which
 * experts arrive: each expert writes rows of its own, and the rows are
 * combined in top-k order once all are there.
 */
#ifndef INF_GRAPH_H
#define INF_GRAPH_H

#include "inferd/inf_device.h"

struct inf_graph {
    const struct inf_model *model;
    struct krn_pool *pool;
    struct krn_host *host;
    const struct krn_kv *kv; /* [layers], the pool's; set before the first pass */
    uint32_t chunk;
    uint64_t bytes; /* planned and mapped */
    struct inf_times times;

    struct krn_kv_span span[INF_SPANS_MAX]; /* of the pass */
    void *memory;
    float *x, *normed;                           /* [chunk][hidden] */
    float *q, *k, *v;                            /* [chunk][heads or kv_heads][head_dim] */
    float *rope;                                 /* [chunk][head_dim] */
    float *scores, *weights;                     /* [chunk][experts], [chunk][top_k] */
    float *out;                                  /* [chunk * top_k][hidden]; shares memory with q, k, v */
    float *logits;                               /* [INF_LOGIT_ROWS][vocab] */
    uint32_t *positions, *ids, *slots, *offsets; /* [chunk], [chunk * top_k] twice, [experts + 1] */
    uint32_t *predicted_ids, *predicted, *counts_now; /* [chunk * top_k], [experts] twice */
    float *predicted_weights;                         /* [chunk * top_k] */
    void *expert_scratch;
    struct krn_expert_job *jobs; /* [experts] */
};

/* Plans and maps the activations of a chunk. -ENOMEM with the need named. */
int inf_graph_create(const struct inf_model *model, struct krn_pool *pool, uint32_t chunk,
                     struct shm_error *err, struct inf_graph **ret_graph);
void inf_graph_destroy(struct inf_graph **graph);

/* After a re-attach: the same model on another mapping. -EINVAL if the shapes differ. */
int inf_graph_set_model(struct inf_graph *graph, const struct inf_model *model);

/* Steps. embed begins a pass, head ends it. */
void inf_graph_embed(struct inf_graph *g, const struct inf_pass *p);
void inf_graph_attention(struct inf_graph *g, const struct inf_pass *p, uint32_t layer);
int inf_graph_experts(struct inf_graph *g, const struct inf_pass *p, uint32_t layer, struct shm_error *err);
/* Expected tokens per expert of layer 0, [experts], from the embeddings alone: for a stream that begins
 * before anything is computed. After embed; valid until the next step. */
const uint32_t *inf_graph_predict_first(struct inf_graph *g, const struct inf_pass *p);

void inf_graph_head(struct inf_graph *g, const struct inf_pass *p);

#endif
