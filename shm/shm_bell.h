/* SPDX-License-Identifier: MIT */
/*
 * Bell: an event count in shared memory, for sleeping until "something
 * changed" without losing a wake-up.
 *
 * Waiter:  t = shm_bell_prepare(b); if (condition) shm_bell_cancel(b);
 *          else shm_bell_wait(b, t, timeout_ns);
 * Ringer:  change the condition (release); shm_bell_ring(b).
 *
 * Several threads and processes may wait and ring. A hostile peer that writes
 * the words can only cause spurious or missing wake-ups; every wait therefore
 * carries a time limit and its caller looks at the condition again.
 */
#ifndef SHM_BELL_H
#define SHM_BELL_H

#include <stdatomic.h>
#include <stdint.h>

struct shm_bell {
    _Atomic uint32_t count;   /* rings so far, wraps; futex word */
    _Atomic uint32_t waiters; /* threads between prepare and the end of the wait */
};
_Static_assert(sizeof(struct shm_bell) == 8, "shared layout");

/* Announces a waiter and returns the ticket for shm_bell_wait(). */
uint32_t shm_bell_prepare(struct shm_bell *bell);

/* Takes the announcement back, when the condition turned out to hold. */
void shm_bell_cancel(struct shm_bell *bell);

/* Sleeps until the bell rang after prepare() or timeout_ns passed. Returns 0
 * (rang, or spurious) or -ETIMEDOUT. Ends the announcement in every case. */
int shm_bell_wait(struct shm_bell *bell, uint32_t ticket, uint64_t timeout_ns);

/* Wakes all waiters; one atomic add and one load when there are none. */
void shm_bell_ring(struct shm_bell *bell);

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t shm_now_ns(void);

#endif
