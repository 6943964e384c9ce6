/* SPDX-License-Identifier: MIT */
/*
 * Device: where a worker computes. One table of operations with two
 * implementations, the host (inf_device_host.c) and a CUDA GPU (inf_cuda*.c):
 * memory (ring, residents, dense weights, keys and values, activations) and
 * the steps of a pass, from which an architecture's forward function is put
 * together. An architecture never asks which device it runs on.
 *
 * A step may compute at once (host) or only be enqueued (CUDA); head() ends a
 * pass: when it returned, everything is computed. Steps of one pass at a time,
 * one thread. After a failed step the caller cancels the pass's stream, which
 * calls quiesce(): nothing of the pass runs after that.
 */
#ifndef INF_DEVICE_H
#define INF_DEVICE_H

#include "inferd/inf_model.h"
#include "inferd/inf_stream.h"
#include "proto/prt_client.h"

/* Keys and values come in blocks of so many consecutive tokens of a sequence (inf_kv.h). */
#define INF_KV_BLOCK  128u
#define INF_SPANS_MAX 64u /* most spans in a pass */

struct inf_kv;

/* Where the time of the passes went; cumulative. On a CUDA device the steps are times of the GPU, and told
 * apart only where `profile` was asked for: 0 otherwise. */
struct inf_times {
    uint64_t attention_ns; /* projections, rotary, attention, output */
    uint64_t router_ns;    /* norms, routers, predictions, publication */
    uint64_t experts_ns;   /* kernels and combine */
    uint64_t wait_ns;      /* for groups; CUDA: for the device, in all */
    uint64_t head_ns;      /* embedding and logits */
    uint64_t enqueue_ns;   /* CUDA: handing operations to the driver */
    uint64_t stall_ns;     /* CUDA, profiled: the GPU waited for groups */
    uint64_t idle_ns;      /* CUDA, profiled: it waited for this process, inside of passes */
};

/* What a start took, one after the other; `find` runs beside context and modules, and only what it takes
 * longer is part of `attach`. */
struct inf_phases {
    uint64_t find_ns;    /* expertd found, arena mapped, model and tokenizer made */
    uint64_t context_ns; /* driver and context; 0 on the host */
    uint64_t modules_ns; /* kernels loaded */
    uint64_t attach_ns;  /* residents copied, ring made, session opened */
    uint64_t dense_ns;   /* dense weights uploaded, memory planned */
    uint64_t ready_ns;   /* from the start to ready, all in all */
};

/* Ring of a session. */
struct inf_ring {
    uint64_t bytes;
    void *host; /* its memory; NULL on another device */
    int fd;     /* of that memory; -1 */
};

/* Consecutive tokens of one sequence in a pass. */
struct inf_pass_span {
    const struct inf_kv *kv; /* prepared (inf_kv_prepare) for position .. position + tokens - 1 */
    uint32_t tokens;         /* >= 1 */
    uint32_t position;       /* of the first */
    uint32_t first_logit;    /* logits of the span's tokens from this one on; >= tokens: none */
};

/* One chunk: spans of different sequences, read in one go. Everything is the caller's and stays as it is
 * during the pass. A token's result is the same bits whatever other spans are in the pass. */
struct inf_pass {
    const uint32_t *ids; /* [tokens], < vocab, in the order of the spans */
    uint32_t tokens;     /* of all spans, 1 .. the planned chunk */
    uint32_t spans;      /* 1 .. INF_SPANS_MAX */
    const struct inf_pass_span *span;
    bool generated;                 /* written by the model itself, not part of a prompt: one token a span */
    struct inf_stream *stream;      /* begun; NULL: every expert is resident */
    bool demand;                    /* the stream copies nothing before a layer is published */
    const uint8_t *const *resident; /* [layers * experts] blobs in the device's memory, NULL where streamed;
                                       NULL: none is resident */
    bool predict;                   /* publish expected counts of the next layer */
    uint32_t *counts;               /* [layers * experts] out: tokens per expert, when the pass has ended */
    _Atomic bool *cancel;           /* looked at between layers; NULL: none */

    /* Logits of a span's tokens from first_logit on: span after span, in order, in blocks of one span. */
    void (*on_logits)(void *ctx, uint32_t span, uint32_t position, uint32_t rows, const float *logits);
    /* Routing of a layer: ids and weights [tokens][experts_used]. NULL: not wanted (it costs a wait a layer).
     */
    void (*on_routes)(void *ctx, uint32_t layer, uint32_t tokens, const uint32_t *ids, const float *weights);
    void (*on_layer)(void *ctx, uint32_t layer); /* computed, or about to be; for a progress line */
    void *ctx;
};

#define INF_LOGIT_ROWS 64

struct inf_device;

struct inf_device_ops {
    void (*close)(struct inf_device *d);

    /* The ring of a session, and the request's fields that name it. The control segment of
     * control_bytes is mapped and laid out. From then until ring_attached (which may be NULL), when expertd
     * has taken it, the device is kept busy. ring_close once expertd has let go of it. */
    int (*ring_open)(struct inf_device *d, const struct shm_geometry *g,
                     const struct shm_worker_view *control, uint64_t control_bytes, struct inf_ring *ret_ring,
                     struct prt_attach_request *request, struct shm_error *err);
    void (*ring_attached)(struct inf_device *d);
    void (*ring_close)(struct inf_device *d, struct inf_ring *ring);

    /* Memory of the residents: open, put each blob, done with the table of their addresses. They stay
     * until close. */
    int (*resident_open)(struct inf_device *d, uint64_t bytes, uint8_t **ret_address, struct shm_error *err);
    int (*resident_put)(struct inf_device *d, uint8_t *address, const void *blob, uint64_t bytes,
                        struct shm_error *err);
    int (*resident_done)(struct inf_device *d, const uint8_t *const *table, uint32_t layers, uint32_t experts,
                         struct shm_error *err);

    /* Takes a model: the dense weights go where they are needed. Later calls, after an attach to another
     * life of expertd, bring the same model on another mapping; -EINVAL if the shapes differ. */
    int (*set_model)(struct inf_device *d, const struct inf_model *model, struct shm_error *err);

    /* Plans activations and the pool of keys and values, allocates the former. *chunk and *ctx: as asked for
     * (0: the device's choice), then what was planned; a chunk that does not fit becomes smaller. *kv_tokens:
     * tokens of the pool; 0: one conversation's ctx, or, for several, what memory allows. */
    int (*plan)(struct inf_device *d, uint32_t conversations, uint32_t *chunk, uint32_t *ctx,
                uint32_t *kv_tokens, struct shm_error *err);

    /* Memory of the pool's blocks, a whole number of them: zeroed, so that what was never written is finite.
     * Token `position` of a sequence lies in row block[position / 128] * 128 + position % 128. */
    int (*kv_open)(struct inf_device *d, uint32_t tokens, struct shm_error *err);
    void (*kv_close)(struct inf_device *d);
    /* A block's contents (all layers) to another one, before anything that is enqueued later. */
    int (*kv_copy)(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err);
    /* A block's contents as kv_block_bytes bytes, in the form that kv_layout names. Between passes; wait. */
    int (*kv_read)(struct inf_device *d, uint32_t block, void *to, struct shm_error *err);
    int (*kv_write)(struct inf_device *d, uint32_t block, const void *from, struct shm_error *err);
    /* Memory that kv_read and kv_write are fastest with; closed before the device is. NULL: any is. */
    int (*stage_open)(struct inf_device *d, uint64_t bytes, void **ret_memory, struct shm_error *err);
    void (*stage_close)(struct inf_device *d, void *memory);

    /* Steps. */
    int (*embed)(struct inf_device *d, const struct inf_pass *p, struct shm_error *err);
    /* Expected tokens per expert of layer 0 from the embeddings alone, [experts], for a stream that has not
     * begun; after embed, valid until the next step. May wait for the device. */
    int (*predict_first)(struct inf_device *d, const struct inf_pass *p, const uint32_t **ret_counts,
                         struct shm_error *err);
    int (*attention)(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err);
    int (*experts)(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err);
    int (*head)(struct inf_device *d, const struct inf_pass *p, struct shm_error *err);

    /* What the link to the device can do, 1e9 bytes/s: the best of a few copies of 1 GiB from pinned memory.
     * NULL: there is no real link. Blocks for about a second; allocates and gives back. */
    int (*link_peak)(struct inf_device *d, double *ret_gbps, struct shm_error *err);

    /* The stream ended early and expertd writes nothing of it any more: `end_group` is its end. */
    void (*quiesce)(struct inf_device *d, uint64_t end_group);
};

/* Each device begins with this. */
struct inf_device {
    const struct inf_device_ops *ops;
    uint32_t kind;  /* PRT_DEVICE_* */
    char text[192]; /* "host, 8 threads, kernels v4" */
    char note[256]; /* why it is not the other one (auto); "" */
    struct inf_times times;
    bool profile;             /* set by the owner: tell a pass's steps apart (CUDA; costs it below 1%) */
    struct inf_phases phases; /* the device's own: context, modules */
    uint64_t activation_bytes, token_bytes; /* planned, in all and of each token of a chunk */
    uint64_t dense_bytes;                   /* copied to the device */
    uint64_t kv_block_bytes;                /* of a block of keys and values; 0 before set_model */
    char kv_layout[32];                     /* their form: other text, other bytes */
};

/* The host device: threads as in krn_pool_create. */
int inf_device_host_open(uint32_t threads, struct shm_error *err, struct inf_device **ret_device);

/* Sets what the driver takes from the environment; before any other thread runs. */
void inf_device_cuda_prepare(void);

/* Whether there are a driver and that GPU (as below), without the cost of opening it. */
int inf_device_cuda_check(int ordinal, struct shm_error *err);

/* GPU `ordinal`; -1: the first. -ENOENT no driver, -ENODEV no such GPU, -ENOTSUP a capability is missing
 * (named), others with one line. poison: fill each slot with 0xFF before its release. */
int inf_device_cuda_open(int ordinal, bool poison, struct shm_error *err, struct inf_device **ret_device);

static inline void inf_device_close(struct inf_device **device)
{
    if (*device)
        (*device)->ops->close(*device);
    *device = NULL;
}

/* The steps, for architectures. */
static inline int inf_embed(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    return d->ops->embed(d, p, err);
}
static inline int inf_attention(struct inf_device *d, const struct inf_pass *p, uint32_t layer,
                                struct shm_error *err)
{
    return d->ops->attention(d, p, layer, err);
}
static inline int inf_experts(struct inf_device *d, const struct inf_pass *p, uint32_t layer,
                              struct shm_error *err)
{
    return d->ops->experts(d, p, layer, err);
}
static inline int inf_head(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    return d->ops->head(d, p, err);
}

#endif
