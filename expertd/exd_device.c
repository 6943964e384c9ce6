/* SPDX-License-Identifier: MIT */
#include "expertd/exd_device.h"

#include "expertd/exd_log.h"
#include "expertd/exd_populate.h"
#include "kernels/krn_register.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct exd_device {
    enum exd_device_kind kind;
    struct krn_cuda_device *gpu[EXD_DEVICES_MAX];
    int gpus;
    struct krn_register *registration;
    pthread_t thread; /* opens the GPUs */
    bool opening;
    int ordinal, opened; /* asked for; result */
    struct shm_error opened_error;
    char text[128]; /* as the store shows it */
    char why[256];  /* no CUDA: the reason */
};

static void close_gpus(struct exd_device *d)
{
    krn_register_release(&d->registration);
    while (d->gpus)
        krn_cuda_device_close(&d->gpu[--d->gpus]);
}

static void be_host(struct exd_device *d, const char *why)
{
    close_gpus(d);
    snprintf(d->why, sizeof(d->why), "%s", why);
    snprintf(d->text, sizeof(d->text), "host (%.120s)", why);
}

/* One GPU, by a thread of its own where there are several: a context takes the driver most of a second. */
struct opening {
    pthread_t thread;
    bool running;
    int ordinal, rc;
    uint64_t ns;
    struct krn_cuda_device *gpu;
    struct shm_error err;
};

static void *open_one(void *arg)
{
    struct opening *o = arg;
    uint64_t begin_ns = shm_now_ns();
    o->rc = krn_cuda_device_open(o->ordinal, &o->gpu, &o->err);
    o->ns = shm_now_ns() - begin_ns;
    return NULL;
}

/* Takes an opened one if it can serve. */
static int take_gpu(struct exd_device *d, struct opening *o)
{
    if (o->rc < 0)
        return o->rc;
    struct krn_cuda_device *gpu = o->gpu;
    if (!gpu->ipc || !gpu->memops || !gpu->host_register) {
        o->rc = shm_error_set(&o->err, ENOTSUP, "CUDA device %d (%s) cannot serve workers: it lacks %s",
                              o->ordinal, gpu->name, gpu->missing);
        krn_cuda_device_close(&gpu);
        return o->rc;
    }
    d->gpu[d->gpus++] = gpu;
    char text[160];
    krn_cuda_device_describe(gpu, text, sizeof(text));
    exd_log(EXD_LOG_INFO, "CUDA device %d: %s, opened in %.0f ms%s%s", o->ordinal, text, (double)o->ns / 1e6,
            gpu->missing[0] ? "; lacks " : "", gpu->missing);
    return 0;
}

static int open_gpus(struct exd_device *d, int ordinal, struct shm_error *err)
{
    struct opening one[EXD_DEVICES_MAX] = {0};
    int rc = krn_cuda_load(err);
    if (rc < 0)
        return rc;
    int count = ordinal >= 0 ? 1 : krn_cuda_count();
    if (count > EXD_DEVICES_MAX)
        count = EXD_DEVICES_MAX;
    for (int i = 0; i < count; i++) {
        one[i].ordinal = ordinal >= 0 ? ordinal : i;
        one[i].running = i + 1 < count && pthread_create(&one[i].thread, NULL, open_one, &one[i]) == 0;
        if (!one[i].running)
            open_one(&one[i]);
    }
    for (int i = 0; i < count; i++)
        if (one[i].running)
            pthread_join(one[i].thread, NULL);
    for (int i = 0; i < count; i++) {
        rc = take_gpu(d, &one[i]);
        if (rc == 0)
            continue;
        if (count > 1) /* the others may do */
            exd_log(EXD_LOG_WARNING, "%s", shm_error_text(&one[i].err));
        *err = one[i].err;
    }
    return d->gpus ? 0 : rc;
}

static void *open_in_background(void *arg)
{
    struct exd_device *d = arg;
    d->opened = open_gpus(d, d->ordinal, &d->opened_error);
    return NULL;
}

int exd_device_begin(enum exd_device_kind kind, int ordinal, struct exd_device **ret_device,
                     struct shm_error *err)
{
    struct exd_device *d = calloc(1, sizeof(*d));
    if (!d)
        return shm_error_set(err, ENOMEM, "device: no memory; free some");
    d->kind = kind;
    d->ordinal = ordinal;
    if (kind == EXD_DEVICE_HOST) {
        d->opened = shm_error_set(&d->opened_error, ENOTSUP, "expertd runs with --device host");
    } else {
        d->opening = pthread_create(&d->thread, NULL, open_in_background, d) == 0;
        if (!d->opening)
            open_in_background(d);
    }
    *ret_device = d;
    return 0;
}

static void join(struct exd_device *d)
{
    if (d->opening)
        pthread_join(d->thread, NULL);
    d->opening = false;
}

int exd_device_end(struct exd_device *d, struct shm_error *err)
{
    join(d);
    const char *why = shm_error_text(&d->opened_error);
    if (d->opened < 0 && d->kind == EXD_DEVICE_CUDA)
        return shm_error_set(err, d->opened, "--device cuda: %.400s; --device host copies to host memory",
                             why);
    if (d->opened < 0) {
        be_host(d, d->kind == EXD_DEVICE_HOST ? "--device host" : why);
        if (d->kind == EXD_DEVICE_AUTO)
            exd_log(EXD_LOG_INFO, "--device auto: the host device: %s", why);
    } else {
        snprintf(d->text, sizeof(d->text), "CUDA: %d of %s, compute capability %d.%d, driver CUDA %d.%d",
                 d->gpus, d->gpu[0]->name, d->gpu[0]->major, d->gpu[0]->minor, krn_cuda_version() / 1000,
                 krn_cuda_version() % 1000 / 10);
    }
    return 0;
}

/* ---- registration ---- */

static void on_piece(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    (void)ctx;
    exd_log(EXD_LOG_DEBUG, "registered %.2f of %.2f GB with CUDA", (double)done_bytes / 1e9,
            (double)total_bytes / 1e9);
}

struct before {
    struct exd_populate *populate;
    uint64_t waited_ns;
};

static void before_piece(void *ctx, uint64_t begin, uint64_t end)
{
    struct before *b = ctx;
    uint64_t at_ns = shm_now_ns();
    (void)begin;
    if (b->populate)
        exd_populate_wait(b->populate, end);
    b->waited_ns += shm_now_ns() - at_ns;
}

int exd_device_register(struct exd_device *d, const struct shm_arena_view *arena, void *base, bool adopted,
                        const atomic_int *cancel, struct shm_error *err)
{
    if (!d->gpus)
        return 0;
    uint64_t begin_ns = shm_now_ns();
    struct before before = {.populate = exd_populate_start(base, arena->mapped_bytes, !adopted, cancel)};
    struct krn_register_config config = {.device = d->gpu[0],
                                         .base = base,
                                         .bytes = arena->mapped_bytes,
                                         .cut = krn_register_arena_cut,
                                         .cut_ctx = arena,
                                         .before = before_piece,
                                         .before_ctx = &before,
                                         .progress = on_piece,
                                         .cancel = cancel};
    int rc = krn_register_memory(&config, &d->registration, err);
    exd_populate_end(&before.populate);
    if (rc == 0) {
        double seconds = (double)(shm_now_ns() - begin_ns) / 1e9;
        exd_log(EXD_LOG_INFO, "registered %.2f GB with CUDA in %.3f s, %u pieces (pages %.3f s)",
                (double)arena->mapped_bytes / 1e9, seconds, krn_register_pieces(d->registration),
                (double)before.waited_ns / 1e9);
        return 0;
    }
    if (rc == -ECANCELED || d->kind == EXD_DEVICE_CUDA)
        return rc;
    exd_log(EXD_LOG_WARNING, "--device auto: the host device: %s", shm_error_text(err));
    be_host(d, shm_error_text(err));
    *err = (struct shm_error){0};
    return 0;
}

int exd_device_gpus(const struct exd_device *d)
{
    return d->gpus;
}

int exd_device_find(struct exd_device *d, const uint8_t uuid[16], struct krn_cuda_device **ret_gpu,
                    struct shm_error *err)
{
    if (!d->gpus)
        return shm_error_set(err, ENOTSUP, "ATTACH: device: this expertd serves the host device only: %s",
                             d->why);
    for (int i = 0; i < d->gpus; i++)
        if (memcmp(d->gpu[i]->uuid, uuid, 16) == 0) {
            *ret_gpu = d->gpu[i];
            return 0;
        }
    return shm_error_set(err, ENODEV,
                         "ATTACH: device_uuid: the worker's GPU is none of the %d that this expertd opened: "
                         "start it with --device cuda",
                         d->gpus);
}

const char *exd_device_text(const struct exd_device *device)
{
    return device->text;
}

void exd_device_close(struct exd_device **device)
{
    struct exd_device *d = *device;
    if (!d)
        return;
    join(d);
    close_gpus(d);
    free(d);
    *device = NULL;
}
