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

static krn_cuda_ptr piece_of(const struct inf_cuda *c, uint32_t block, uint32_t i)
{
    return c->kv_memory + ((uint64_t)i * (c->kv->ctx / INF_KV_BLOCK) + block) * piece_bytes(c);
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
        if (c->kv_stage)
            krn_cuda.host_free(c->kv_stage);
    }
    free(c->kv);
    c->kv_memory = 0;
    c->kv_stage = NULL;
    c->kv = NULL;
}

/* As inf_cuda_begin, and there is a stage. */
static int begin_staged(struct inf_cuda *c, struct shm_error *err)
{
    void *memory;
    int rc = inf_cuda_begin(c, err);
    if (rc || c->kv_stage)
        return rc;
    rc = KRN_CUDA(host_alloc, &memory, c->base.kv_block_bytes, KRN_CUDA_HOST_PORTABLE);
    if (rc)
        return krn_cuda_explain(rc, "pinned memory of a block of keys and values", err);
    c->kv_stage = memory;
    return 0;
}

int inf_cuda_kv_copy(struct inf_device *d, uint32_t from, uint32_t to, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = inf_cuda_begin(c, err);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < pieces_of(c) && !rc; i++)
        rc = KRN_CUDA(copy_device_async, piece_of(c, to, i), piece_of(c, from, i), piece_bytes(c), c->stream);
    return rc ? inf_cuda_failed(c, rc, err) : 0;
}

int inf_cuda_kv_read(struct inf_device *d, uint32_t block, void *to, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = begin_staged(c, err);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < pieces_of(c) && !rc; i++)
        rc = KRN_CUDA(copy_out_async, c->kv_stage + i * piece_bytes(c), piece_of(c, block, i), piece_bytes(c),
                      c->stream);
    if (rc || (rc = KRN_CUDA(stream_synchronize, c->stream)))
        return inf_cuda_failed(c, rc, err);
    memcpy(to, c->kv_stage, c->base.kv_block_bytes);
    return 0;
}

int inf_cuda_kv_write(struct inf_device *d, uint32_t block, const void *from, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = begin_staged(c, err);
    if (rc)
        return rc;
    memcpy(c->kv_stage, from, c->base.kv_block_bytes);
    for (uint32_t i = 0; i < pieces_of(c) && !rc; i++)
        rc = KRN_CUDA(copy_in_async, piece_of(c, block, i), c->kv_stage + i * piece_bytes(c), piece_bytes(c),
                      c->stream);
    if (rc || (rc = KRN_CUDA(stream_synchronize, c->stream)))
        return inf_cuda_failed(c, rc, err);
    return 0;
}
