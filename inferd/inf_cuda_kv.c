/* SPDX-License-Identifier: MIT */
/*
 * Keys and values on the GPU: one allocation for all blocks. Of each layer keys, then values; of each KV head
 * block after block: so the pieces of a block lie at one distance from each other.
 */
#include "inferd/inf_cuda.h"

#include "inferd/inf_kv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t pieces_of(const struct inf_cuda *c)
{
    return c->model->hparams.layers * 2 * c->model->shape.kv_heads;
}

/* A piece: f16 [INF_KV_BLOCK][head_dim]. */
static uint64_t piece_bytes(const struct inf_cuda *c)
{
    return (uint64_t)INF_KV_BLOCK * c->model->shape.head_dim * 2;
}

/* One side of a copy of a block: a piece a row. */
struct side {
    uint32_t type;
    uint64_t at, pitch;
};

static struct side in_pool(const struct inf_cuda *c, uint32_t block)
{
    return (struct side){KRN_CUDA_MEMORY_DEVICE, c->kv_memory + block * piece_bytes(c),
                         c->kv->ctx / INF_KV_BLOCK * piece_bytes(c)};
}

static struct side in_host(const struct inf_cuda *c, const void *at)
{
    return (struct side){KRN_CUDA_MEMORY_HOST, (uint64_t)(uintptr_t)at, piece_bytes(c)};
}

static int copy(struct inf_cuda *c, struct side from, struct side to)
{
    const struct krn_cuda_copy_2d copy = {.source_type = from.type,
                                          .source_host = (const void *)(uintptr_t)from.at,
                                          .source_device = from.at,
                                          .source_pitch = from.pitch,
                                          .target_type = to.type,
                                          .target_host = (void *)(uintptr_t)to.at,
                                          .target_device = to.at,
                                          .target_pitch = to.pitch,
                                          .bytes = piece_bytes(c),
                                          .rows = pieces_of(c)};
    return KRN_CUDA(copy_2d_async, &copy, c->stream);
}

int inf_cuda_kv_open(struct inf_device *d, uint32_t tokens, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    const struct inf_model *m = c->model;
    const uint32_t layers = m->hparams.layers, blocks = inf_kv_blocks(tokens);
    const uint64_t bytes = blocks * c->base.kv_block_bytes;
    c->kv = calloc(layers, sizeof *c->kv);
    if (!c->kv)
        return -ENOMEM;
    int rc = krn_cuda_enter(c->gpu);
    if (!rc && (rc = KRN_CUDA(mem_alloc, &c->kv_memory, bytes)))
        c->kv_memory = 0;
    /* Kernels multiply whole steps of keys, by zero where there are none: that must not be a NaN. */
    if (!rc)
        rc = KRN_CUDA(memset_8_async, c->kv_memory, 0, bytes, c->stream);
    if (rc) {
        char what[128];
        snprintf(what, sizeof what,
                 "keys and values of %u tokens, %.1f MiB (choose a smaller --ctx or --kv-tokens)",
                 blocks * INF_KV_BLOCK, (double)bytes / 1048576);
        inf_cuda_kv_close(d);
        return krn_cuda_explain(rc, what, err);
    }
    const uint64_t each = bytes / layers / 2;
    for (uint32_t l = 0; l < layers; l++)
        c->kv[l] = (struct krn_cu_kv){.k = c->kv_memory + 2 * l * each,
                                      .v = c->kv_memory + (2 * l + 1) * each,
                                      .ctx = blocks * INF_KV_BLOCK,
                                      .kv_heads = m->shape.kv_heads,
                                      .head_dim = m->shape.head_dim};
    return 0;
}

void inf_cuda_kv_close(struct inf_device *d)
{
    struct inf_cuda *c = inf_cuda_of(d);
    if (c->broken && c->stream)
        return; /* what is enqueued may still write there: freed when the device is closed */
    if (krn_cuda_enter(c->gpu) == 0) {
        if (c->stream)
            krn_cuda.stream_synchronize(c->stream);
        if (c->kv_memory)
            krn_cuda.mem_free(c->kv_memory);
    }
    free(c->kv);
    c->kv_memory = 0;
    c->kv = NULL;
}

int inf_cuda_kv_copy(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = inf_cuda_begin(c, err);
    if (rc)
        return rc;
    rc = copy(c, in_pool(c, from), in_pool(c, to));
    return rc ? inf_cuda_failed(c, rc, err) : 0;
}

static int copy_and_wait(struct inf_cuda *c, struct side from, struct side to, struct shm_error *err)
{
    int rc = inf_cuda_begin(c, err);
    if (rc)
        return rc;
    if ((rc = copy(c, from, to)) || (rc = KRN_CUDA(stream_synchronize, c->stream)))
        return inf_cuda_failed(c, rc, err);
    return 0;
}

int inf_cuda_kv_read(struct inf_device *d, uint32_t block, void *to, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    return copy_and_wait(c, in_pool(c, block), in_host(c, to), err);
}

int inf_cuda_kv_write(struct inf_device *d, uint32_t block, const void *from, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    return copy_and_wait(c, in_host(c, from), in_pool(c, block), err);
}

int inf_cuda_stage_open(struct inf_device *d, uint64_t bytes, void **ret_memory, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    void *memory;
    int rc = inf_cuda_begin(c, err);
    if (rc)
        return rc;
    rc = KRN_CUDA(host_alloc, &memory, bytes, KRN_CUDA_HOST_PORTABLE);
    if (rc)
        return krn_cuda_explain(rc, "pinned memory of a block of keys and values", err);
    *ret_memory = memory;
    return 0;
}

void inf_cuda_stage_close(struct inf_device *d, void *memory)
{
    if (krn_cuda_enter(inf_cuda_of(d)->gpu) == 0)
        krn_cuda.host_free(memory);
}
