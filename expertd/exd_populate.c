/* SPDX-License-Identifier: MIT */
#include "expertd/exd_populate.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14, headers from glibc 2.35 on */
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif
#define SLICE   (UINT64_C(16) << 20)
#define THREADS 8
#define NAP_NS  200000

struct exd_populate {
    uint8_t *base;
    uint64_t bytes;
    int advice;
    const atomic_int *cancel;
    _Atomic uint64_t next;
    int threads;
    pthread_t thread[THREADS];
    atomic_uchar done[]; /* [slices] */
};

static void *populate(void *arg)
{
    struct exd_populate *p = arg;
    for (;;) {
        uint64_t at = atomic_fetch_add(&p->next, SLICE);
        if (at >= p->bytes)
            return NULL;
        uint64_t n = p->bytes - at < SLICE ? p->bytes - at : SLICE;
        if (!p->cancel || !atomic_load(p->cancel))
            madvise(p->base + at, n, p->advice); /* refused: the registration does it, slower */
        atomic_store_explicit(&p->done[at / SLICE], 1, memory_order_release);
    }
}

struct exd_populate *exd_populate_start(uint8_t *base, uint64_t bytes, bool write, const atomic_int *cancel)
{
    uint64_t slices = (bytes + SLICE - 1) / SLICE;
    struct exd_populate *p = calloc(1, sizeof(*p) + slices * sizeof(p->done[0]));
    if (!p)
        return NULL;
    p->base = base;
    p->bytes = bytes;
    p->advice = write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    p->cancel = cancel;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    while (p->threads < THREADS && p->threads < cpus &&
           pthread_create(&p->thread[p->threads], NULL, populate, p) == 0)
        p->threads++;
    if (!p->threads) {
        free(p);
        return NULL;
    }
    return p;
}

void exd_populate_wait(struct exd_populate *p, uint64_t end)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    end = end > p->bytes ? p->bytes : end;
    for (uint64_t i = 0; i * SLICE < end; i++)
        while (!atomic_load_explicit(&p->done[i], memory_order_acquire))
            nanosleep(&nap, NULL);
}

void exd_populate_end(struct exd_populate **populate)
{
    struct exd_populate *p = *populate;
    if (!p)
        return;
    while (p->threads)
        pthread_join(p->thread[--p->threads], NULL);
    free(p);
    *populate = NULL;
}
