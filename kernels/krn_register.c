/* SPDX-License-Identifier: MIT */
#include "kernels/krn_register.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE 4096u

struct krn_register {
    struct krn_cuda_device *device;
    uint8_t *base;
    uint32_t pieces, room;
    uint64_t *begin; /* [pieces] */
};

uint32_t krn_register_pieces(const struct krn_register *registration)
{
    return registration->pieces;
}

/* May a piece end at `at`, a page border? */
static bool clean(const struct shm_arena_view *v, uint64_t at)
{
    uint32_t experts = v->catalog->hparams.experts;
    for (uint32_t l = 0; l < v->catalog->n_layers; l++) {
        const struct shm_layer *layer = &v->layers[l];
        if (at <= layer->blobs_offset || at >= layer->blobs_offset + experts * layer->blob_stride)
            continue;
        uint64_t in = (at - layer->blobs_offset) % layer->blob_stride;
        /* short blobs are copied longer than they are (krn_link_cuda.c) */
        uint64_t copied = layer->blob_bytes < KRN_CUDA_COPY_MIN ? layer->blob_stride : layer->blob_bytes;
        if (layer->blob_stride < KRN_CUDA_COPY_MIN || (in && in < copied))
            return false;
    }
    return true;
}

uint64_t krn_register_arena_cut(const void *ctx, uint64_t begin, uint64_t limit)
{
    const struct shm_arena_view *v = ctx;
    if (limit >= v->mapped_bytes)
        return v->mapped_bytes;
    uint64_t last = limit / PAGE * PAGE;
    for (uint64_t at = last; at > begin; at -= PAGE)
        if (clean(v, at))
            return at;
    for (uint64_t at = last + PAGE; at < v->mapped_bytes; at += PAGE)
        if (at > begin && clean(v, at))
            return at;
    return v->mapped_bytes;
}

static int add_piece(struct krn_register *r, uint64_t begin)
{
    if (r->pieces == r->room) {
        uint32_t room = r->room ? r->room * 2 : 64;
        uint64_t *grown = realloc(r->begin, room * sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        r->begin = grown;
        r->room = room;
    }
    r->begin[r->pieces++] = begin;
    return 0;
}

int krn_register_memory(const struct krn_register_config *c, struct krn_register **ret_registration,
                        struct shm_error *err)
{
    if ((uintptr_t)c->base % PAGE || c->bytes % PAGE || !c->bytes)
        return shm_error_set(err, EINVAL, "registration of %llu bytes: not whole pages",
                             (unsigned long long)c->bytes);
    struct krn_register *r = calloc(1, sizeof(*r));
    if (!r)
        return shm_error_set(err, ENOMEM, "registration: no memory; free some");
    r->device = c->device;
    r->base = c->base;
    unsigned flags = KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP;
    if (c->read_only && c->device->register_read_only)
        flags |= KRN_CUDA_REGISTER_READ_ONLY;
    uint64_t piece = c->piece_bytes ? c->piece_bytes : KRN_REGISTER_PIECE;
    int rc = krn_cuda_enter(c->device);
    for (uint64_t begin = 0, end; rc == 0 && begin < c->bytes; begin = end) {
        if (c->cancel && atomic_load(c->cancel)) {
            rc = shm_error_set(err, ECANCELED, "registration: cancelled");
            break;
        }
        end = c->cut && c->bytes - begin > piece ? c->cut(c->cut_ctx, begin, begin + piece) : c->bytes;
        if (end <= begin || end > c->bytes || end % PAGE)
            end = c->bytes;
        if (c->before)
            c->before(c->before_ctx, begin, end);
        rc = KRN_CUDA(host_register, r->base + begin, end - begin, flags);
        if (rc < 0) {
            char what[96];
            snprintf(what, sizeof(what), "registration of %.2f GB of host memory for CUDA",
                     (double)c->bytes / 1e9);
            krn_cuda_explain(rc, what, err);
        } else {
            rc = add_piece(r, begin);
            if (rc < 0) {
                krn_cuda.host_unregister(r->base + begin);
                shm_error_set(err, ENOMEM, "registration: no memory; free some");
            }
        }
        if (rc == 0 && c->progress)
            c->progress(c->progress_ctx, end, c->bytes);
    }
    if (rc < 0) {
        krn_register_release(&r);
        return rc;
    }
    *ret_registration = r;
    return 0;
}

void krn_register_release(struct krn_register **registration)
{
    struct krn_register *r = *registration;
    if (!r)
        return;
    if (krn_cuda_enter(r->device) == 0)
        for (uint32_t i = 0; i < r->pieces; i++)
            krn_cuda.host_unregister(r->base + r->begin[i]);
    free(r->begin);
    free(r);
    *registration = NULL;
}
