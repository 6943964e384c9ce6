/* SPDX-License-Identifier: MIT */
/*
 * A writer as fast as it can, two readers beside it, one of them slow: each
 * event that is read is whole and in order, and read and lost ones together
 * are all that were written.
 */
#include "shm/shm_event.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_THREAD__ /* many times slower, and it notices by itself */
#define EVENTS 200000u
#else
#define EVENTS 4000000u
#endif

static const uint32_t capacity = 256;
static void *base;
static uint64_t bytes;
static _Atomic bool over;

static void *read_all(void *arg)
{
    bool slow = arg != NULL;
    struct shm_event_view v;
    struct shm_event_owner o;
    struct shm_error err = {0};
    static _Thread_local struct shm_event got[64];
    uint64_t next = 0, lost = 0, read = 0, expected = 0;
    if (shm_event_open(base, bytes, "segment", &v, &err) || shm_event_owner_at(&v, 0, &o))
        return (void *)"no segment";
    for (bool last = false; !last;) {
        last = atomic_load(&over);
        uint32_t n;
        while ((n = shm_event_read(&v, 0, &o, &next, got, slow ? 3 : 64, &lost))) {
            for (uint32_t i = 0; i < n; i++) {
                uint64_t number = got[i].number;
                if (number < expected)
                    return (void *)"an event came twice";
                if (got[i].at_ns != number * 3 || got[i].field[0] != ~number || got[i].field[1] != number ||
                    got[i].kind != (number & 0x7f))
                    return (void *)"an event is torn";
                expected = number + 1;
            }
            read += n;
            if (slow && !last)
                break;
        }
    }
    if (read + lost != EVENTS)
        return (void *)"read and lost ones are not all";
    printf("%s reader: %llu read, %llu lost\n", slow ? "slow" : "fast", (unsigned long long)read,
           (unsigned long long)lost);
    return NULL;
}

int main(void)
{
    struct shm_event_writer w;
    pthread_t reader[2];
    bytes = shm_event_bytes(&capacity, 1);
    base = aligned_alloc(4096, (bytes + 4095) & ~UINT64_C(4095));
    if (!base)
        return 1;
    memset(base, 0, bytes);
    shm_event_init(base, "test", &capacity, 1, 1, 1);
    shm_event_own(base, 0, "writer", "", 1, 1, &w);
    shm_header_publish(base, 1);
    for (uintptr_t i = 0; i < 2; i++)
        if (pthread_create(&reader[i], NULL, read_all, (void *)i))
            return 1;
    for (uint64_t n = 0; n < EVENTS; n++) {
        shm_event_put(&w, n & 0x7f, n * 3, ~n, n);
        if (n % 100 == 0)
            sched_yield(); /* so that the readers come to something */
    }
    atomic_store(&over, true);
    int status = 0;
    for (int i = 0; i < 2; i++) {
        void *bad;
        pthread_join(reader[i], &bad);
        if (bad)
            fprintf(stderr, "p_event: %s\n", (const char *)bad), status = 1;
    }
    free(base);
    return status;
}
