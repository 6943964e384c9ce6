/* SPDX-License-Identifier: MIT */
#include "expertd/exd_device.h"

#include "expertd/exd_log.h"
#include "kernels/krn_register.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14, headers from glibc 2.35 on */
#define MADV_POPULATE_WRITE 23
#endif
#define POPULATE_SLICE   (UINT64_C(64) << 20)
#define POPULATE_THREADS 8

struct exd_device {
    enum exd_device_kind kind;
    struct krn_cuda_device *gpu[EXD_DEVICES_MAX];
    int gpus;
    struct krn_register *registration;
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
    snprintf(d->text, sizeof(d->text), "host (%.110s)", why);
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

int exd_device_open(enum exd_device_kind kind, int ordinal, struct exd_device **ret_device,
                    struct shm_error *err)
{
    struct exd_device *d = calloc(1, sizeof(*d));
    if (!d)
        return shm_error_set(err, ENOMEM, "device: no memory; free some");
    d->kind = kind;
    struct shm_error why = {0};
    int rc = kind == EXD_DEVICE_HOST ? shm_error_set(&why, ENOTSUP, "expertd runs with --device host")
                                     : open_gpus(d, ordinal, &why);
    if (rc < 0 && kind == EXD_DEVICE_CUDA) {
        close_gpus(d);
        free(d);
        return shm_error_set(err, rc, "--device cuda: %.400s", shm_error_text(&why));
    }
    if (rc < 0) {
        be_host(d, kind == EXD_DEVICE_HOST ? "--device host" : shm_error_text(&why));
        if (kind == EXD_DEVICE_AUTO)
            exd_log(EXD_LOG_INFO, "--device auto: the host device: %s", shm_error_text(&why));
    } else {
        snprintf(d->text, sizeof(d->text), "CUDA: %d of %s, compute capability %d.%d, driver CUDA %d.%d",
                 d->gpus, d->gpu[0]->name, d->gpu[0]->major, d->gpu[0]->minor, krn_cuda_version() / 1000,
                 krn_cuda_version() % 1000 / 10);
    }
    *ret_device = d;
    return 0;
}

/* ---- pages ---- */

struct populate {
    uint8_t *base;
    uint64_t bytes;
    const atomic_int *cancel;
    _Atomic uint64_t next;
};

static void *populate_some(void *arg)
{
    struct populate *p = arg;
    for (;;) {
        uint64_t at = atomic_fetch_add(&p->next, POPULATE_SLICE);
        if (at >= p->bytes || (p->cancel && atomic_load(p->cancel)))
            return NULL;
        uint64_t n = p->bytes - at < POPULATE_SLICE ? p->bytes - at : POPULATE_SLICE;
        madvise(p->base + at, n, MADV_POPULATE_WRITE); /* refused: the registration does it, slower */
    }
}

/* Pages that were never touched are cleared where they are first needed: by one thread inside the
 * registration (3 GB/s), or here by several. */
static void populate(uint8_t *base, uint64_t bytes, const atomic_int *cancel)
{
    struct populate p = {.base = base, .bytes = bytes, .cancel = cancel};
    pthread_t thread[POPULATE_THREADS - 1];
    int n = 0;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    while (n < POPULATE_THREADS - 1 && n + 1 < cpus &&
           pthread_create(&thread[n], NULL, populate_some, &p) == 0)
        n++;
    populate_some(&p);
    while (n)
        pthread_join(thread[--n], NULL);
}

static void on_piece(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    (void)ctx;
    exd_log(EXD_LOG_DEBUG, "registered %.2f of %.2f GB with CUDA", (double)done_bytes / 1e9,
            (double)total_bytes / 1e9);
}

int exd_device_register(struct exd_device *d, const struct shm_arena_view *arena, void *base,
                        const atomic_int *cancel, struct shm_error *err)
{
    if (!d->gpus)
        return 0;
    uint64_t begin_ns = shm_now_ns();
    populate(base, arena->mapped_bytes, cancel);
    double populate_s = (double)(shm_now_ns() - begin_ns) / 1e9;
    struct krn_register_config config = {.device = d->gpu[0],
                                         .base = base,
                                         .bytes = arena->mapped_bytes,
                                         .cut = krn_register_arena_cut,
                                         .cut_ctx = arena,
                                         .progress = on_piece,
                                         .cancel = cancel};
    int rc = krn_register_memory(&config, &d->registration, err);
    if (rc == 0) {
        double seconds = (double)(shm_now_ns() - begin_ns) / 1e9;
        exd_log(EXD_LOG_INFO, "registered %.2f GB with CUDA in %.3f s, %u pieces (pages %.3f s)",
                (double)arena->mapped_bytes / 1e9, seconds, krn_register_pieces(d->registration), populate_s);
        return 0;
    }
    if (rc == -ECANCELED || d->kind == EXD_DEVICE_CUDA)
        return rc;
    exd_log(EXD_LOG_WARNING, "--device auto: the host device: %s", shm_error_text(err));
    be_host(d, shm_error_text(err));
    *err = (struct shm_error){0};
    return 0;
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
    close_gpus(d);
    free(d);
    *device = NULL;
}
