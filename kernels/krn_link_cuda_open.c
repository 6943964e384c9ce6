/* SPDX-License-Identifier: MIT */
/* The CUDA link's beginning and end: checks, ring, flag, copy stream. */
#include "kernels/krn_link_cuda_priv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Measured by tests/gpu/g_link.c (H200, PCIe 5 x16, driver 580), blobs of 2.65 MB: one copy at a time 51.2
 * GB/s, batches of 4 53.9, of 8 54.6, of 16 55.0; one copy of 1 GB 54.9. Sixteen are a group; the walk
 * lets two of them be under way. */
#define BATCH_DEFAULT   16u
#define POLL_DEFAULT_NS UINT64_C(15000)

void krn_link_cuda_release(struct krn_cuda_link *l)
{
    if (l->stream)
        krn_cuda.stream_destroy(l->stream);
    if (l->allocation)
        krn_cuda.ipc_close(l->allocation);
    if (l->progress)
        krn_cuda_line_give(l->config.device, l->progress);
    free(l);
}

static int check_config(const struct krn_link_cuda_config *c, struct shm_error *err)
{
    if (!c->device->ipc || !c->device->memops || !c->device->host_register)
        return shm_error_set(err, ENOTSUP, "CUDA device %d (%s) cannot serve a link: it lacks %s",
                             c->device->ordinal, c->device->name, c->device->missing);
    if (c->ring_bytes < KRN_CUDA_COPY_MIN)
        return shm_error_set(err, EINVAL, "CUDA link: a ring of %llu bytes is below %u",
                             (unsigned long long)c->ring_bytes, KRN_CUDA_COPY_MIN);
    if (c->flag_offset % 4 || c->flag_offset < c->ring_bytes || c->flag_offset > UINT64_MAX - 4)
        return shm_error_set(err, EINVAL, "CUDA link: the flag at %llu must lie behind the ring (%llu bytes)",
                             (unsigned long long)c->flag_offset, (unsigned long long)c->ring_bytes);
    if (c->batch > KRN_LINK_BATCH_MAX)
        return shm_error_set(err, EINVAL, "CUDA link: batches of %u, at most %u", c->batch,
                             KRN_LINK_BATCH_MAX);
    return 0;
}

static int open_ring(struct krn_cuda_link *l, struct shm_error *err)
{
    const struct krn_link_cuda_config *c = &l->config;
    int rc = KRN_CUDA(ipc_open, &l->allocation, c->ring_handle, KRN_CUDA_IPC_LAZY_PEER);
    if (rc < 0)
        return krn_cuda_explain(rc, "CUDA link: the ring's handle", err);
    krn_cuda_ptr base = 0;
    size_t bytes = 0;
    rc = KRN_CUDA(address_range, &base, &bytes, l->allocation);
    if (rc < 0)
        return krn_cuda_explain(rc, "CUDA link: the ring's size", err);
    if (base != l->allocation || bytes < c->flag_offset + 4)
        return shm_error_set(
            err, EINVAL,
            "CUDA link: the worker's allocation of %zu bytes does not hold a ring of %llu and "
            "the flag at %llu",
            bytes, (unsigned long long)c->ring_bytes, (unsigned long long)c->flag_offset);
    l->flag = l->allocation + c->flag_offset;
    return 0;
}

int krn_link_cuda_create(const struct krn_link_cuda_config *config, struct krn_link **ret_link,
                         struct shm_error *err)
{
    int rc = check_config(config, err);
    if (rc < 0)
        return rc;
    struct krn_cuda_link *l = calloc(1, sizeof(*l));
    if (!l)
        return shm_error_set(err, ENOMEM, "CUDA link: no memory; free some");
    l->base.ops = &krn_link_cuda_ops;
    l->config = *config;
    if (!l->config.poll_ns)
        l->config.poll_ns = POLL_DEFAULT_NS;
    l->base.poll_ns = l->config.poll_ns;
    if (!l->config.batch)
        l->config.batch = BATCH_DEFAULT;
    snprintf(l->name, sizeof(l->name), "%s", config->name ? config->name : "?");
    void *line = NULL;
    rc = krn_cuda_enter(config->device);
    if (rc < 0) {
        krn_cuda_explain(rc, "CUDA link: context", err);
        goto fail;
    }
    rc = krn_cuda_line_take(config->device, &line, &l->progress_device);
    if (rc < 0) {
        shm_error_set(err, rc, "CUDA link: %u are open on this device, more do not fit", KRN_CUDA_LINES);
        goto fail;
    }
    l->progress = line;
    rc = open_ring(l, err);
    if (rc < 0)
        goto fail;
    rc = krn_cuda_stream_primed(config->device, l->allocation, &l->stream);
    if (rc < 0) {
        krn_cuda_explain(rc, "CUDA link: copy stream", err);
        goto fail;
    }
    rc = krn_link_cuda_first_write(l);
    if (rc < 0) {
        shm_error_set(err, rc, "CUDA link: the first flag write failed: %s",
                      rc == -ETIMEDOUT ? "not done within 2 s" : krn_cuda_detail()->text);
        goto fail;
    }
    *ret_link = &l->base;
    return 0;
fail:
    krn_link_cuda_release(l);
    return rc;
}
