/* SPDX-License-Identifier: MIT */
/* Thread pool: every task once, results visible, no lost wake-up, clean end. A plain program, so that it
 * runs under ThreadSanitizer. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/krn_pool.h"

#define CHECK(cond)                                                                                          \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond);                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

struct job {
    uint32_t *hits; /* plain memory on purpose: a race is TSan's to find */
    uint32_t threads, nap_task;
};

static void task(void *arg, uint32_t i, uint32_t thread)
{
    struct job *job = arg;
    CHECK(thread < job->threads);
    if (i == job->nap_task)
        nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
    job->hits[i]++;
}

static double cpu_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

int main(void)
{
    static const uint32_t sizes[] = {1, 2, 3, 8};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        struct krn_pool *pool;
        CHECK(krn_pool_create(sizes[s], &pool) == 0 && krn_pool_threads(pool) == sizes[s]);
        uint32_t hits[257];
        memset(hits, 0, sizeof hits);
        struct job job = {hits, sizes[s], UINT32_MAX};
        uint32_t want[257] = {0};
        for (uint32_t run = 0; run < 3000; run++) {
            uint32_t n = run % 7 == 0 ? 257 : run % 5;
            /* sometimes let the workers, sometimes the caller fall asleep */
            job.nap_task = run % 100 == 3 ? n / 2 : UINT32_MAX;
            if (run % 150 == 0)
                nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
            krn_pool_run(pool, n, task, &job);
            for (uint32_t i = 0; i < n; i++)
                want[i]++;
            CHECK(memcmp(hits, want, sizeof hits) == 0);
        }
        krn_pool_destroy(&pool);
        CHECK(pool == NULL);
    }
    for (int i = 0; i < 200; i++) { /* start and stop, with and without use */
        struct krn_pool *pool;
        CHECK(krn_pool_create(4, &pool) == 0);
        uint32_t hits[9] = {0};
        struct job job = {hits, 4, UINT32_MAX};
        if (i & 1)
            krn_pool_run(pool, 9, task, &job);
        krn_pool_destroy(&pool);
        CHECK(hits[8] == (uint32_t)(i & 1));
    }
    struct krn_pool *pool = NULL;
    CHECK(krn_pool_create(KRN_POOL_THREADS_MAX + 1, &pool) == -EINVAL && pool == NULL);
    krn_pool_destroy(&pool);
    krn_pool_destroy(NULL);
    CHECK(krn_pool_create(0, &pool) == 0 && krn_pool_threads(pool) >= 1);
    krn_pool_destroy(&pool);
    /* idle workers sleep */
    CHECK(krn_pool_create(4, &pool) == 0);
    uint32_t hits[64] = {0};
    struct job job = {hits, 4, UINT32_MAX};
    krn_pool_run(pool, 64, task, &job);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    double before_s = cpu_s();
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    CHECK(cpu_s() - before_s < 0.02);
    krn_pool_destroy(&pool);
    return 0;
}
