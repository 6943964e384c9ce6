/* SPDX-License-Identifier: MIT */
/* Chunk reports: one writer as fast as it can, a reader that must never get a torn one. All reports go to one
 * place of the table, so that they meet there. */
#include "shm/shm_bell.h"
#include "shm/shm_worker.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RUN_NS UINT64_C(1500000000)
#define WHOLE  1000 /* read at least; a run goes on for up to 20 times RUN_NS to get them */

static struct shm_worker *worker;
static _Atomic int stop;

static void fill(struct shm_report *r, uint64_t seq)
{
    uint64_t *words = (uint64_t *)(void *)r;
    for (size_t i = 1; i < sizeof *r / 8; i++)
        words[i] = seq * 1000 + i;
    r->seq = seq;
}

static void *write_reports(void *arg)
{
    (void)arg;
    for (uint64_t seq = SHM_REPORTS; !atomic_load_explicit(&stop, memory_order_relaxed); seq += SHM_REPORTS) {
        struct shm_report r = {0};
        fill(&r, seq);
        shm_report_write(worker, &r);
    }
    return NULL;
}

int main(void)
{
    worker = calloc(1, (sizeof *worker + 63) / 64 * 64);
    pthread_t writer;
    if (!worker || pthread_create(&writer, NULL, write_reports, NULL))
        return 2;
    uint64_t whole = 0, lapped = 0, torn = 0, until_ns = shm_now_ns() + RUN_NS,
             end_ns = until_ns + 19 * RUN_NS;
    for (uint64_t now = 0; now < until_ns || (whole < WHOLE && now < end_ns); now = shm_now_ns())
        for (int i = 0; i < 1000; i++) {
            /* the newest that is there, in the making or not */
            uint64_t seq = atomic_load_explicit(&worker->report[0].generation, memory_order_relaxed) / 2;
            struct shm_report got = {0}, want = {0};
            if (seq == 0 || shm_report_read(worker, seq, &got)) {
                lapped++;
                continue;
            }
            fill(&want, seq);
            atomic_init(&want.generation, 2 * seq);
            torn += memcmp(&got, &want, sizeof got) != 0;
            whole++;
        }
    atomic_store(&stop, 1);
    pthread_join(writer, NULL);
    fprintf(stderr, "%llu whole, %llu lapped, %llu torn\n", (unsigned long long)whole,
            (unsigned long long)lapped, (unsigned long long)torn);
    free(worker);
    return torn || whole < WHOLE ? 1 : 0;
}
