/* SPDX-License-Identifier: MIT */
#include "tests/gpu/g_worker.h"

#include "proto/prt_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void must(bool ok, const char *what, const char *why)
{
    if (ok)
        return;
    fprintf(stderr, "worker: %s: %s\n", what, why);
    exit(1);
}

static void worker_memory(struct worker *k, uint32_t ring)
{
    uint64_t bytes = ring * k->w.request.slot_bytes;
    uint64_t whole = (bytes + (4u << 20)) >> 21 << 21;
    struct krn_cuda_ipc handle = {{0}};
    must(KRN_CUDA(mem_alloc, &k->ring, whole) == 0 && KRN_CUDA(stream_create, &k->stream, 1) == 0 &&
             KRN_CUDA(memset_8_async, k->ring, 0xdb, whole, k->stream) == 0 &&
             KRN_CUDA(stream_synchronize, k->stream) == 0 && KRN_CUDA(ipc_get, &handle, k->ring) == 0,
         "ring", krn_cuda_detail()->name);
    k->w.request.flag_offset = bytes;
    k->flag = k->ring + bytes;
    memcpy(k->w.request.ring_handle, handle.bytes, sizeof(handle.bytes));
    memcpy(k->w.request.device_uuid, k->device->uuid, 16);
    k->w.request.device = PRT_DEVICE_CUDA;
    k->w.request.ring_fd = 0;
    k->slot = malloc(k->w.request.slot_bytes);
    must(k->slot != NULL, "slot", "no memory");
}

void worker_make(struct worker *k, struct kit *kit, struct krn_cuda_device *device, uint32_t ring)
{
    *k = (struct worker){.kit = kit, .device = device};
    kit_worker_make(kit, ring, &k->w);
    if (k->w.request.slot_bytes < KRN_CUDA_COPY_MIN)
        k->w.request.slot_bytes = k->w.view.worker->geometry.slot_bytes = KRN_CUDA_COPY_MIN;
    void *base;
    uint64_t bytes;
    struct shm_error err = {0};
    must(prt_file_map_path(prt_client_store(kit->client)->arena_path, sizeof(struct shm_arena), false, &base,
                           &bytes, &err) == 0 &&
             shm_arena_open(base, bytes, "arena", &k->arena, &err) == 0,
         "arena", err.text);
    worker_memory(k, ring);
}

void worker_free(struct worker *k)
{
    krn_cuda.stream_destroy(k->stream);
    krn_cuda.mem_free(k->ring);
    munmap((void *)(uintptr_t)k->arena.base, k->arena.mapped_bytes);
    free(k->slot);
    kit_worker_free(&k->w);
}

int worker_attach(struct worker *k, struct shm_error *err)
{
    struct prt_attach_reply reply;
    int rc = prt_client_attach(k->kit->client, &k->w.request, &reply, err);
    if (rc == 0)
        k->session = reply.session;
    return rc;
}

void worker_kit(struct kit *k, const char *expertd, const char *model)
{
    *k = (struct kit){.expertd = expertd, .model = model};
    snprintf(k->runtime, sizeof(k->runtime), "/dev/shm/exd-test-%d-XXXXXX", (int)getpid());
    must(mkdtemp(k->runtime) != NULL, "mkdtemp", k->runtime);
}
