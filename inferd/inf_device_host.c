/* SPDX-License-Identifier: MIT */
#include "inferd/inf_device.h"
#include "inferd/inf_graph.h"
#include "inferd/inf_kv.h"
#include "proto/prt_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK_DEFAULT 4096u
#define KV_SHARE      2 /* of available memory one of so many parts, for several conversations */

struct host {
    struct inf_device base;
    struct krn_pool *pool;
    const struct inf_model *model;
    struct inf_graph *graph; /* NULL until planned */
    void *resident;
    uint64_t resident_bytes;
    struct krn_kv *kv; /* [layers]; NULL until opened */
    void *kv_memory;
    size_t kv_bytes;
};

static struct host *host(struct inf_device *d)
{
    return (struct host *)d;
}

static void host_kv_close(struct inf_device *d);

static void host_close(struct inf_device *d)
{
    struct host *h = host(d);
    host_kv_close(d);
    inf_graph_destroy(&h->graph);
    krn_pool_destroy(&h->pool);
    if (h->resident)
        munmap(h->resident, h->resident_bytes);
    free(h);
}

static int host_ring_open(struct inf_device *d, const struct shm_geometry *g,
                          const struct shm_worker_view *control, uint64_t control_bytes,
                          struct inf_ring *ret_ring, struct prt_attach_request *request,
                          struct shm_error *err)
{
    struct inf_ring ring = {.bytes = g->ring * g->slot_bytes, .fd = -1};
    (void)d;
    (void)control;
    (void)control_bytes;
    int rc = prt_segment_create("inferd-ring", ring.bytes, &ring.fd, &ring.host, err);
    if (rc)
        return rc;
    madvise(ring.host, ring.bytes, MADV_HUGEPAGE); /* a hint; refused is fine */
    request->device = PRT_DEVICE_HOST;
    request->ring_fd = (uint32_t)ring.fd;
    *ret_ring = ring;
    return 0;
}

static void host_ring_close(struct inf_device *d, struct inf_ring *ring)
{
    (void)d;
    if (ring->host)
        munmap(ring->host, ring->bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    *ring = (struct inf_ring){.fd = -1};
}

static int host_resident_open(struct inf_device *d, uint64_t bytes, uint8_t **ret_address,
                              struct shm_error *err)
{
    struct host *h = host(d);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return shm_error_set(err, ENOMEM, "the resident experts need %.1f MiB: choose a smaller --resident",
                             (double)bytes / 1048576);
    h->resident = memory;
    h->resident_bytes = bytes;
    *ret_address = memory;
    return 0;
}

static int host_resident_put(struct inf_device *d, uint8_t *address, const void *blob, uint64_t bytes,
                             struct shm_error *err)
{
    (void)d;
    (void)err;
    memcpy(address, blob, bytes);
    return 0;
}

static int host_resident_done(struct inf_device *d, const uint8_t *const *table, uint32_t layers,
                              uint32_t experts, struct shm_error *err)
{
    (void)d;
    (void)table;
    (void)layers;
    (void)experts;
    (void)err;
    return 0; /* each pass brings the table */
}

static int host_set_model(struct inf_device *d, const struct inf_model *model, struct shm_error *err)
{
    struct host *h = host(d);
    (void)err;
    int rc = h->graph ? inf_graph_set_model(h->graph, model) : 0;
    if (rc)
        return rc;
    h->model = model;
    h->base.kv_block_bytes = UINT64_C(2) * model->hparams.layers * model->shape.kv_heads * INF_KV_BLOCK *
                             model->shape.head_dim * sizeof(float);
    return 0;
}

/* Bytes that may still be taken, as the system says; 0: it doesn't. */
static uint64_t available_bytes(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib * UINT64_C(1024);
}

/* Of several conversations: all of them full, if that takes no more than KV_SHARE of what is available. */
static uint32_t pool_tokens(const struct host *h, uint32_t conversations, uint32_t ctx)
{
    uint64_t most = available_bytes() / KV_SHARE / h->base.kv_block_bytes, one = inf_kv_blocks(ctx),
             all = one * (conversations ? conversations : 1);
    if (most > UINT32_MAX / INF_KV_BLOCK)
        most = UINT32_MAX / INF_KV_BLOCK;
    if (all > most)
        all = most;
    return (uint32_t)(all > one ? all : one) * INF_KV_BLOCK;
}

static int host_plan(struct inf_device *d, uint32_t conversations, uint32_t *chunk, uint32_t *ctx,
                     uint32_t *kv_tokens, struct shm_error *err)
{
    struct host *h = host(d);
    uint32_t context = *ctx ? *ctx : h->model->hparams.context;
    uint32_t tokens = *chunk ? *chunk : CHUNK_DEFAULT;
    if (tokens > context)
        tokens = context;
    int rc = inf_graph_create(h->model, h->pool, tokens, err, &h->graph);
    if (rc)
        return rc;
    h->base.activation_bytes = h->graph->bytes;
    h->base.token_bytes = h->graph->bytes / tokens;
    *chunk = tokens;
    *ctx = context;
    if (!*kv_tokens)
        *kv_tokens = pool_tokens(h, conversations, context);
    return 0;
}

/* ---- keys and values: float32; of each layer and KV head the blocks one after the other ---- */

static void host_kv_close(struct inf_device *d)
{
    struct host *h = host(d);
    if (h->kv_memory)
        munmap(h->kv_memory, h->kv_bytes);
    free(h->kv);
    h->kv_memory = NULL;
    h->kv = NULL;
    if (h->graph)
        h->graph->kv = NULL;
}

static int host_kv_open(struct inf_device *d, uint32_t tokens, struct shm_error *err)
{
    struct host *h = host(d);
    const struct inf_model *m = h->model;
    const uint32_t layers = m->hparams.layers;
    uint32_t capacity;
    size_t floats;
    int rc = krn_host_kv_size(tokens, m->shape.kv_heads, m->shape.head_dim, &capacity, &floats);
    if (rc || floats > SIZE_MAX / (2 * sizeof(float)) / layers)
        return shm_error_set(
            err, EOVERFLOW,
            "keys and values of %u tokens cannot be addressed: choose a smaller --ctx or --kv-tokens",
            tokens);
    h->kv = calloc(layers, sizeof *h->kv);
    if (!h->kv)
        return -ENOMEM;
    h->kv_bytes = 2 * floats * sizeof(float) * layers;
    /* Pages come as they are used. */
    void *memory =
        mmap(NULL, h->kv_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        host_kv_close(d);
        return shm_error_set(err, ENOMEM,
                             "keys and values of %u tokens need %.1f MiB, which the system refuses: "
                             "choose a smaller --ctx or --kv-tokens",
                             tokens, (double)h->kv_bytes / 1048576);
    }
    h->kv_memory = memory;
    float *at = memory;
    for (uint32_t l = 0; l < layers; l++, at += 2 * floats)
        h->kv[l] = (struct krn_kv){.k = at,
                                   .v = at + floats,
                                   .ctx = capacity,
                                   .kv_heads = m->shape.kv_heads,
                                   .head_dim = m->shape.head_dim};
    h->graph->kv = h->kv;
    return 0;
}

/* The i-th piece of a block: of a layer, keys or values, and a KV head; in this order, as in memory. */
static float *piece_of(const struct host *h, uint32_t block, uint32_t i)
{
    return (float *)h->kv_memory + ((size_t)i * h->kv->ctx + (size_t)block * INF_KV_BLOCK) * h->kv->head_dim;
}

static uint32_t pieces_of(const struct host *h)
{
    return h->model->hparams.layers * 2 * h->kv->kv_heads;
}

static int host_kv_copy(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err)
{
    const struct host *h = host(d);
    (void)err;
    const size_t floats = (size_t)INF_KV_BLOCK * h->kv->head_dim;
    for (uint32_t i = 0; i < pieces_of(h); i++)
        memcpy(piece_of(h, to, i), piece_of(h, from, i), floats * sizeof(float));
    return 0;
}

static int host_kv_read(struct inf_device *d, uint32_t block, void *to, struct shm_error *err)
{
    const struct host *h = host(d);
    (void)err;
    const size_t bytes = (size_t)INF_KV_BLOCK * h->kv->head_dim * sizeof(float);
    for (uint32_t i = 0; i < pieces_of(h); i++)
        memcpy((char *)to + i * bytes, piece_of(h, block, i), bytes);
    return 0;
}

static int host_kv_write(struct inf_device *d, uint32_t block, const void *from, struct shm_error *err)
{
    const struct host *h = host(d);
    (void)err;
    const size_t bytes = (size_t)INF_KV_BLOCK * h->kv->head_dim * sizeof(float);
    for (uint32_t i = 0; i < pieces_of(h); i++)
        memcpy(piece_of(h, block, i), (const char *)from + i * bytes, bytes);
    return 0;
}

/* The times are the graph's. */
static void note_times(struct host *h)
{
    h->base.times = h->graph->times;
}

static int host_embed(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    (void)err;
    inf_graph_embed(host(d)->graph, p);
    return 0;
}

static int host_predict_first(struct inf_device *d, const struct inf_pass *p, const uint32_t **ret_counts,
                              struct shm_error *err)
{
    (void)err;
    *ret_counts = inf_graph_predict_first(host(d)->graph, p);
    return 0;
}

static int host_attention(struct inf_device *d, const struct inf_pass *p, uint32_t layer,
                          struct shm_error *err)
{
    (void)err;
    inf_graph_attention(host(d)->graph, p, layer);
    return 0;
}

static int host_experts(struct inf_device *d, const struct inf_pass *p, uint32_t layer, struct shm_error *err)
{
    int rc = inf_graph_experts(host(d)->graph, p, layer, err);
    note_times(host(d));
    return rc;
}

static int host_head(struct inf_device *d, const struct inf_pass *p, struct shm_error *err)
{
    (void)err;
    inf_graph_head(host(d)->graph, p);
    note_times(host(d));
    return 0;
}

static void host_quiesce(struct inf_device *d, uint64_t end_group)
{
    (void)d; /* steps compute at once: nothing runs between them */
    (void)end_group;
}

static const struct inf_device_ops host_ops = {.close = host_close,
                                               .ring_open = host_ring_open,
                                               .ring_close = host_ring_close,
                                               .resident_open = host_resident_open,
                                               .resident_put = host_resident_put,
                                               .resident_done = host_resident_done,
                                               .set_model = host_set_model,
                                               .plan = host_plan,
                                               .kv_open = host_kv_open,
                                               .kv_close = host_kv_close,
                                               .kv_copy = host_kv_copy,
                                               .kv_read = host_kv_read,
                                               .kv_write = host_kv_write,
                                               .embed = host_embed,
                                               .predict_first = host_predict_first,
                                               .attention = host_attention,
                                               .experts = host_experts,
                                               .head = host_head,
                                               .quiesce = host_quiesce};

int inf_device_host_open(uint32_t threads, struct shm_error *err, struct inf_device **ret_device)
{
    struct host *h = calloc(1, sizeof *h);
    if (!h)
        return -ENOMEM;
    h->base.ops = &host_ops;
    h->base.kind = PRT_DEVICE_HOST;
    snprintf(h->base.kv_layout, sizeof h->base.kv_layout, "host f32, keys by 16");
    int rc = krn_pool_create(threads, &h->pool);
    if (rc) {
        shm_error_set(err, rc, "compute threads cannot be started: %s: choose fewer by --threads",
                      strerror(-rc));
        free(h);
        return rc;
    }
    snprintf(h->base.text, sizeof h->base.text, "host, %u threads, kernels %s", krn_pool_threads(h->pool),
             krn_host_isa());
    *ret_device = &h->base;
    return 0;
}
