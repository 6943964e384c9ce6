/* SPDX-License-Identifier: MIT */
#include "shm/shm_bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Dekker: the waiter stores `waiters` then loads `count` and the condition;
 * the ringer changes the condition, adds to `count`, then loads `waiters`.
 * Sequential consistency on the four makes one of the two see the other. */

uint32_t shm_bell_prepare(struct shm_bell *bell)
{
    atomic_fetch_add(&bell->waiters, 1); /* seq_cst, pairs with the load in shm_bell_ring */
    return atomic_load(&bell->count);    /* seq_cst, pairs with the add in shm_bell_ring */
}

void shm_bell_cancel(struct shm_bell *bell)
{
    atomic_fetch_sub(&bell->waiters, 1);
}

int shm_bell_wait(struct shm_bell *bell, uint32_t ticket, uint64_t timeout_ns)
{
    struct timespec ts = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                          .tv_nsec = (long)(timeout_ns % 1000000000u)};
    int status = 0;
    if (atomic_load(&bell->count) == ticket) {
        /* Not FUTEX_PRIVATE: the peer is another process. EAGAIN and EINTR are
         * wake-ups like any other. */
        long rc = syscall(SYS_futex, (uint32_t *)&bell->count, FUTEX_WAIT, ticket, &ts, NULL, 0);
        if (rc < 0 && errno == ETIMEDOUT)
            status = -ETIMEDOUT;
    }
    shm_bell_cancel(bell);
    return status;
}

void shm_bell_ring(struct shm_bell *bell)
{
    atomic_fetch_add(&bell->count, 1);   /* seq_cst, pairs with the load in shm_bell_prepare */
    if (atomic_load(&bell->waiters) > 0) /* seq_cst, pairs with the add in shm_bell_prepare */
        syscall(SYS_futex, (uint32_t *)&bell->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint64_t shm_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
