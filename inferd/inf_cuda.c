/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include "kernels/krn_fatbin.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define BLOCK               (UINT64_C(2) << 20) /* allocations that are shared are whole blocks of the driver */
#define PAGE                UINT64_C(4096)
#define BUSY_NS             UINT64_C(50000000)
#define APART_TRIES         8
#define APART_NS            UINT64_C(50000000)
#define RESIDENT_THREADS    12u
#define RESIDENT_SLOTS      3u
#define RESIDENT_SLOT_BYTES (UINT64_C(2) << 20)
#define PEAK_BYTES          (UINT64_C(1) << 30)

int inf_cuda_failed(struct inf_cuda *c, int rc, struct shm_error *err)
{
    c->broken = true;
    if (!krn_cuda_detail()->result)
        return shm_error_set(err, -rc, "layer %u: no kernel of this GPU fits the model's shape or types",
                             c->layer_now);
    return krn_cuda_explain(rc, "the GPU failed in a pass: start inferd anew", err);
}

/* Residents are many: more threads and larger slots bring them faster, and take longer to make (40 ms, not
 * 10). */
int inf_cuda_upload(struct inf_cuda *c, bool residents, struct shm_error *err)
{
    struct krn_upload_config config = {.device = c->gpu};
    if (residents) {
        unsigned cpus = krn_upload_cpus();
        config.threads = cpus < RESIDENT_THREADS ? cpus : RESIDENT_THREADS;
        config.slots = RESIDENT_SLOTS;
        config.slot_bytes = RESIDENT_SLOT_BYTES;
    }
    return c->upload ? 0 : krn_upload_open(&config, &c->upload, err);
}

static void cuda_close(struct inf_device *d)
{
    struct inf_cuda *c = inf_cuda_of(d);
    krn_upload_close(&c->upload);
    if (c->gpu && krn_cuda_enter(c->gpu) == 0) {
        if (c->stream && !c->broken)
            krn_cuda.stream_synchronize(c->stream);
        if (c->stream)
            krn_cuda.stream_destroy(c->stream);
        c->stream = NULL;
        if (c->aux)
            krn_cuda.stream_destroy(c->aux);
        inf_cuda_kv_close(d);
        inf_cuda_plan_free(c);
        inf_cuda_profile_free(c);
        inf_cuda_trace_close(c);
        if (c->resident)
            krn_cuda.mem_free(c->resident);
        if (c->resident_table)
            krn_cuda.mem_free(c->resident_table);
        if (c->ring)
            krn_cuda.mem_free(c->ring);
        while (c->old_rings)
            krn_cuda.mem_free(c->old_ring[--c->old_rings]);
        if (c->module)
            krn_cuda.module_unload(c->module);
        if (c->done)
            krn_cuda_line_give(c->gpu, (void *)c->done);
        if (c->attached)
            krn_cuda_line_give(c->gpu, (void *)c->attached);
    }
    krn_cu_destroy(&c->cu);
    krn_cuda_device_close(&c->gpu);
    free(c->all_resident);
    free(c);
}

/* ---- ring ---- */

static int make_ring(struct inf_cuda *c, uint64_t bytes, struct shm_error *err)
{
    uint64_t flag_offset = (bytes + 255) & ~UINT64_C(255);
    uint64_t need = (flag_offset + 256 + BLOCK - 1) / BLOCK * BLOCK;
    /* After expertd's death the old allocation serves its successor: its handle is still good. */
    if (c->ring && need <= c->ring_allocated) {
        c->ring_bytes = bytes;
        c->flag = c->ring + flag_offset;
        return 0;
    }
    /* expertd may still hold the smaller one of the last session: it must not be freed under it. */
    if (c->ring) {
        if (c->old_rings == INF_CUDA_OLD_RINGS) {
            krn_cuda.mem_free(c->old_ring[0]); /* long let go of */
            memmove(c->old_ring, c->old_ring + 1, --c->old_rings * sizeof c->old_ring[0]);
        }
        c->old_ring[c->old_rings++] = c->ring;
    }
    c->ring = 0;
    c->ring_allocated = need;
    int rc = KRN_CUDA(mem_alloc, &c->ring, need);
    if (rc) {
        c->ring = 0;
        char what[96];
        snprintf(what, sizeof what, "a ring of %.1f MiB (choose a smaller --ring)", (double)bytes / 1048576);
        return krn_cuda_explain(rc, what, err);
    }
    c->ring_bytes = bytes;
    c->flag = c->ring + flag_offset;
    return 0;
}

/* Until the session is open: expertd measures beside it what a flag write costs. */
static int be_busy(struct inf_cuda *c)
{
    uint64_t limit_ns = BUSY_NS;
    void *arguments[] = {&c->attached_device, &limit_ns};
    atomic_store(c->attached, 0);
    return KRN_CUDA(launch, c->busy_kernel, 1, 1, 1, 1, 1, 1, 0, c->aux, arguments, NULL);
}

static void cuda_ring_attached(struct inf_device *d)
{
    atomic_store(inf_cuda_of(d)->attached, 1);
}

static int cuda_ring_open(struct inf_device *d, const struct shm_geometry *g,
                          const struct shm_worker_view *control, uint64_t control_bytes,
                          struct inf_ring *ret_ring, struct prt_attach_request *request,
                          struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = krn_cuda_enter(c->gpu);
    if (!rc)
        rc = make_ring(c, g->ring * g->slot_bytes, err);
    if (rc)
        return rc;
    struct krn_cuda_ipc handle;
    if ((rc = KRN_CUDA(memset_8_async, c->flag, 0, 64, c->stream)) ||
        (c->poison && (rc = KRN_CUDA(memset_8_async, c->ring, 0xff, c->ring_bytes, c->stream))) ||
        (rc = KRN_CUDA(stream_synchronize, c->stream)) || (rc = KRN_CUDA(ipc_get, &handle, c->ring)) ||
        (rc = be_busy(c)))
        return krn_cuda_explain(rc, "the ring in device memory", err);
    rc = KRN_CUDA(host_register, control->worker, (control_bytes + PAGE - 1) / PAGE * PAGE,
                  KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP);
    if (rc)
        return krn_cuda_explain(rc, "registration of the control segment", err);
    rc = KRN_CUDA(host_pointer, &c->control_device, control->worker, 0);
    if (rc) {
        krn_cuda.host_unregister(control->worker);
        return krn_cuda_explain(rc, "the control segment's device address", err);
    }
    c->geometry = *g;
    c->control = *control;
    c->released = 0;
    request->device = PRT_DEVICE_CUDA;
    request->ring_fd = 0;
    request->flag_offset = c->flag - c->ring;
    memcpy(request->ring_handle, handle.bytes, sizeof request->ring_handle);
    memcpy(request->device_uuid, c->gpu->uuid, sizeof request->device_uuid);
    *ret_ring = (struct inf_ring){.bytes = c->ring_bytes, .fd = -1};
    return 0;
}

static void cuda_ring_close(struct inf_device *d, struct inf_ring *ring)
{
    struct inf_cuda *c = inf_cuda_of(d);
    cuda_ring_attached(d);
    if (c->control_device && krn_cuda_enter(c->gpu) == 0)
        krn_cuda.host_unregister(c->control.worker);
    c->control_device = 0;
    *ring = (struct inf_ring){.fd = -1};
}

/* ---- residents ---- */

static int cuda_resident_open(struct inf_device *d, uint64_t bytes, uint8_t **ret_address,
                              struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = krn_cuda_enter(c->gpu);
    if (!rc)
        rc = KRN_CUDA(mem_alloc, &c->resident, bytes);
    if (rc) {
        c->resident = 0;
        char what[112];
        snprintf(what, sizeof what, "%.1f MiB of resident experts (choose a smaller --resident)",
                 (double)bytes / 1048576);
        return krn_cuda_explain(rc, what, err);
    }
    *ret_address = (uint8_t *)(uintptr_t)c->resident;
    return 0;
}

static int cuda_resident_put(struct inf_device *d, uint8_t *address, const void *blob, uint64_t bytes,
                             struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    int rc = inf_cuda_upload(c, true, err);
    if (rc)
        return rc;
    rc = krn_upload_put(c->upload, (krn_cuda_ptr)(uintptr_t)address, blob, bytes);
    return rc ? krn_cuda_explain(rc, "copy of a resident expert", err) : 0;
}

static int cuda_resident_done(struct inf_device *d, const uint8_t *const *table, uint32_t layers,
                              uint32_t experts, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    _Static_assert(sizeof table[0] == 8, "addresses are 64 bits on the device");
    size_t bytes = sizeof table[0] * layers * experts;
    c->all_resident = calloc(layers, sizeof *c->all_resident);
    if (!c->all_resident)
        return -ENOMEM;
    for (uint32_t l = 0; l < layers; l++) {
        c->all_resident[l] = true;
        for (uint32_t e = 0; e < experts; e++)
            if (!table[(size_t)l * experts + e])
                c->all_resident[l] = false;
    }
    int rc = c->upload ? krn_upload_finish(c->upload) : 0;
    if (rc)
        return krn_cuda_explain(rc, "copy of the resident experts", err);
    rc = KRN_CUDA(mem_alloc, &c->resident_table, bytes);
    if (rc)
        c->resident_table = 0;
    else if (!(rc = KRN_CUDA(copy_in_async, c->resident_table, table, bytes, c->stream)))
        rc = KRN_CUDA(stream_synchronize, c->stream);
    return rc ? krn_cuda_explain(rc, "table of the resident experts", err) : 0;
}

static int cuda_link_peak(struct inf_device *d, double *ret_gbps, struct shm_error *err)
{
    struct inf_cuda *c = inf_cuda_of(d);
    uint64_t bytes = PEAK_BYTES;
    krn_cuda_ptr target = 0;
    void *source = NULL;
    int rc = krn_cuda_enter(c->gpu);
    while (!rc && (rc = KRN_CUDA(mem_alloc, &target, bytes)) && bytes > PEAK_BYTES / 16) {
        bytes /= 2;
        rc = 0;
    }
    if (rc) {
        target = 0;
        goto out;
    }
    if ((rc = KRN_CUDA(host_alloc, &source, bytes, KRN_CUDA_HOST_PORTABLE))) {
        source = NULL;
        goto out;
    }
    memset(source, 0, bytes);
    double best = 0;
    for (int i = 0; i < 4 && !rc; i++) {
        uint64_t start_ns = shm_now_ns();
        if ((rc = KRN_CUDA(copy_in_async, target, source, bytes, c->stream)) ||
            (rc = KRN_CUDA(stream_synchronize, c->stream)))
            break;
        double gbps = (double)bytes / (double)(shm_now_ns() - start_ns);
        best = gbps > best ? gbps : best;
    }
    if (!rc)
        *ret_gbps = best;
out:
    if (source)
        krn_cuda.host_free(source);
    if (target)
        krn_cuda.mem_free(target);
    return rc ? krn_cuda_explain(rc, "measuring the link", err) : 0;
}

static const struct inf_device_ops cuda_ops = {.close = cuda_close,
                                               .ring_open = cuda_ring_open,
                                               .ring_attached = cuda_ring_attached,
                                               .ring_close = cuda_ring_close,
                                               .resident_open = cuda_resident_open,
                                               .resident_put = cuda_resident_put,
                                               .resident_done = cuda_resident_done,
                                               .set_model = inf_cuda_set_model,
                                               .plan = inf_cuda_plan,
                                               .kv_open = inf_cuda_kv_open,
                                               .kv_close = inf_cuda_kv_close,
                                               .kv_copy = inf_cuda_kv_copy,
                                               .kv_read = inf_cuda_kv_read,
                                               .kv_write = inf_cuda_kv_write,
                                               .stage_open = inf_cuda_stage_open,
                                               .stage_close = inf_cuda_stage_close,
                                               .embed = inf_cuda_embed,
                                               .predict_first = inf_cuda_predict_first,
                                               .attention = inf_cuda_attention,
                                               .experts = inf_cuda_experts,
                                               .head = inf_cuda_head,
                                               .link_peak = cuda_link_peak,
                                               .quiesce = inf_cuda_quiesce};

/* ---- open ---- */

static int check_capabilities(const struct krn_cuda_device *gpu, struct shm_error *err)
{
    if (!gpu->ipc || !gpu->memops || !gpu->host_register)
        return shm_error_set(err, ENOTSUP, "%s lacks what a worker needs: %s", gpu->name, gpu->missing);
    if (gpu->major < 8)
        return shm_error_set(err, ENOTSUP, "%s has compute capability %d.%d, the kernels need 8.0", gpu->name,
                             gpu->major, gpu->minor);
    return 0;
}

/* CLOCK_MONOTONIC minus the device's timer, so that a kernel can say when it published. */
static int measure_clock(struct inf_cuda *c)
{
    void *line;
    krn_cuda_ptr address;
    int rc = krn_cuda_line_take(c->gpu, &line, &address);
    if (rc)
        return rc;
    void *arguments[] = {&address};
    for (int i = 0; i < 2 && !rc; i++) { /* the first launch is slow */
        uint64_t before_ns = shm_now_ns();
        if ((rc = KRN_CUDA(launch, c->clock_kernel, 1, 1, 1, 1, 1, 1, 0, c->stream, arguments, NULL)) ||
            (rc = KRN_CUDA(stream_synchronize, c->stream)))
            break;
        uint64_t device_ns = *(volatile uint64_t *)line;
        c->clock_offset_ns = device_ns ? (int64_t)((before_ns + shm_now_ns()) / 2 - device_ns) : 0;
    }
    krn_cuda_line_give(c->gpu, line);
    return rc;
}

/* Does the second stream get through while the first waits? Streams may share one of the device's queues. */
static int passes(struct inf_cuda *c, bool *ret_passes)
{
    const struct timespec nap = {.tv_nsec = 10000};
    uint64_t limit_ns = shm_now_ns() + APART_NS;
    int rc;
    atomic_store(c->done, 0);
    if ((rc = KRN_CUDA(wait_32, c->stream, c->done_device, 1, KRN_CUDA_WAIT_GEQ)) ||
        (rc = KRN_CUDA(write_32, c->aux, c->done_device, 1, 0))) {
        atomic_store(c->done, 1); /* nothing waits behind us */
        return rc;
    }
    while (!(*ret_passes = atomic_load(c->done) == 1) && shm_now_ns() < limit_ns)
        nanosleep(&nap, NULL);
    atomic_store(c->done, 1);
    if (!(rc = KRN_CUDA(stream_synchronize, c->stream)))
        rc = KRN_CUDA(stream_synchronize, c->aux);
    atomic_store(c->done, 0);
    return rc;
}

static int make_apart(struct inf_cuda *c, struct shm_error *err)
{
    void *other[APART_TRIES] = {NULL};
    bool apart = false;
    int rc = 0;
    for (int i = 0; i < APART_TRIES && !rc && !apart; i++) {
        other[i] = c->aux;
        c->aux = NULL;
        rc = KRN_CUDA(stream_create, &c->aux, KRN_CUDA_STREAM_NON_BLOCKING);
        if (!rc)
            rc = passes(c, &apart);
    }
    for (int i = 0; i < APART_TRIES; i++)
        if (other[i])
            krn_cuda.stream_destroy(other[i]);
    if (rc)
        return krn_cuda_explain(rc, "streams of the worker", err);
    return apart ? 0
                 : shm_error_set(err, ENOTSUP,
                                 "%s: no stream gets through while another waits: let "
                                 "CUDA_DEVICE_MAX_CONNECTIONS be 8, its default, or more",
                                 c->gpu->name);
}

static int load_kernels(struct inf_cuda *c, struct shm_error *err)
{
    void *line, *attached;
    int rc = krn_cu_create(c->gpu, err, &c->cu);
    if (rc || (rc = krn_cuda_module("krn_graph", &c->module, err)) ||
        (rc = krn_cuda_kernel(c->module, "krn_poison", 0, &c->poison_kernel, err)) ||
        (rc = krn_cuda_kernel(c->module, "krn_clock", 0, &c->clock_kernel, err)) ||
        (rc = krn_cuda_kernel(c->module, "krn_busy", 0, &c->busy_kernel, err)))
        return rc;
    if ((rc = KRN_CUDA(stream_create, &c->stream, KRN_CUDA_STREAM_NON_BLOCKING)) ||
        (rc = krn_cuda_line_take(c->gpu, &line, &c->done_device)) ||
        (rc = krn_cuda_line_take(c->gpu, &attached, &c->attached_device)))
        return krn_cuda_explain(rc, "streams of the worker", err);
    c->done = line;
    c->attached = attached;
    if ((rc = make_apart(c, err)))
        return rc;
    if ((rc = measure_clock(c)))
        return krn_cuda_explain(rc, "a first kernel", err);
    return 0;
}

void inf_device_cuda_prepare(void)
{
    /* Kernels loaded on first use would wait for a stream that waits. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

int inf_device_cuda_check(int ordinal, struct shm_error *err)
{
    return krn_cuda_device_check(ordinal < 0 ? 0 : ordinal, err);
}

int inf_device_cuda_open(int ordinal, bool poison, struct shm_error *err, struct inf_device **ret_device)
{
    struct inf_cuda *c = calloc(1, sizeof *c);
    if (!c)
        return -ENOMEM;
    c->base.ops = &cuda_ops;
    c->base.kind = PRT_DEVICE_CUDA;
    snprintf(c->base.kv_layout, sizeof c->base.kv_layout, "cuda f16");
    c->poison = poison;
    uint64_t at_ns = shm_now_ns();
    int rc = krn_cuda_device_open(ordinal < 0 ? 0 : ordinal, &c->gpu, err);
    if (rc || (rc = check_capabilities(c->gpu, err)))
        goto fail;
    c->base.phases.context_ns = shm_now_ns() - at_ns;
    at_ns = shm_now_ns();
    if ((rc = load_kernels(c, err)) || (rc = inf_cuda_trace_open(c, err)))
        goto fail;
    c->base.phases.modules_ns = shm_now_ns() - at_ns;
    prctl(PR_SET_TIMERSLACK, 1ul); /* waits for the device are shorter than the default, 50 us */
    snprintf(c->base.text, sizeof c->base.text, "cuda:%d, ", c->gpu->ordinal);
    krn_cuda_device_describe(c->gpu, c->base.text + strlen(c->base.text),
                             sizeof c->base.text - strlen(c->base.text));
    *ret_device = &c->base;
    return 0;
fail:
    cuda_close(&c->base);
    return rc;
}
