/* SPDX-License-Identifier: MIT */
/*
 * Graph: the steps of one pass (one chunk over all layers) on the host device,
 * from which an architecture's forward function is put together.
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

#include "inferd/inf_model.h"
#include "inferd/inf_stream.h"

/* Where the time of the passes went; cumulative. */
struct inf_times {
    uint64_t attention_ns; /* projections, rotary, attention, output */
    uint64_t router_ns;    /* norms, routers, predictions, publication */
    uint64_t experts_ns;   /* kernels and combine */
    uint64_t wait_ns;      /* for groups */
    uint64_t head_ns;      /* embedding and logits */
};

/* One chunk. Everything is the caller's and stays as it is during the pass. */
struct inf_pass {
    const uint32_t *ids;       /* [tokens], < vocab */
    uint32_t tokens;           /* 1 .. the graph's chunk */
    uint32_t position;         /* of ids[0]; position + tokens <= KV capacity */
    const struct krn_kv *kv;   /* [layers] */
    struct inf_stream *stream; /* begun; NULL: every expert is resident */
    const uint8_t *const
        *resident;        /* [layers * experts] blobs, NULL where streamed; NULL: none is resident */
    bool predict;         /* publish expected counts of the next layer */
    uint32_t *counts;     /* [layers * experts] out: tokens per expert */
    _Atomic bool *cancel; /* looked at between layers; NULL: none */

    /* Logits of tokens first_logit .. tokens - 1, in order, in blocks; first_logit >= tokens: none. */
    uint32_t first_logit;
    void (*on_logits)(void *ctx, uint32_t position, uint32_t rows, const float *logits);
    /* Routing of a layer: ids and weights [tokens][experts_used]. NULL: not wanted. */
    void (*on_routes)(void *ctx, uint32_t layer, uint32_t tokens, const uint32_t *ids, const float *weights);
    void *ctx;
};

struct inf_graph {
    const struct inf_model *model;
    struct krn_pool *pool;
    struct krn_host *host;
    uint32_t chunk;
    uint64_t bytes; /* planned and mapped */
    struct inf_times times;

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

#define INF_LOGIT_ROWS 64

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
