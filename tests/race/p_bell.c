/* SPDX-License-Identifier: MIT */
/*
 * Lost wake-ups. First two threads hand a number to and fro, each asleep on
 * its bell while it waits. Then both meet at a barrier and one rings at the
 * very moment when the other goes to sleep, at every small distance. Every
 * wait is limited to 10 s and must never run into it: one wake-up lost in all
 * the rounds fails the test.
 */
#include "shm/shm_bell.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define LIMIT_NS UINT64_C(10000000000)

struct side {
    _Alignas(64) struct shm_bell bell;
    _Alignas(64) _Atomic uint64_t word; /* on another line than the bell, as in the segment */
};

static struct side ping, pong, clash;
static uint64_t rounds;
static _Atomic uint64_t slept, arrived;

static bool wait_for(struct side *s, uint64_t value)
{
    while (atomic_load_explicit(&s->word, memory_order_acquire) != value) {
        uint32_t ticket = shm_bell_prepare(&s->bell);
        if (atomic_load_explicit(&s->word, memory_order_acquire) == value) {
            shm_bell_cancel(&s->bell);
            break;
        }
        atomic_fetch_add_explicit(&slept, 1, memory_order_relaxed);
        if (shm_bell_wait(&s->bell, ticket, LIMIT_NS) == -ETIMEDOUT) {
            fprintf(stderr, "p_bell: wake-up lost in round %llu\n", (unsigned long long)value);
            return false;
        }
    }
    return true;
}

static void tell(struct side *s, uint64_t value)
{
    atomic_store_explicit(&s->word, value, memory_order_release);
    shm_bell_ring(&s->bell);
}

static void spin(uint64_t n)
{
    for (volatile uint64_t left = n; left; left--)
        ;
}

/* Both threads leave it together, awake, as far as the scheduler lets them. */
static void meet(uint64_t round)
{
    atomic_fetch_add(&arrived, 1);
    for (uint32_t n = 0; atomic_load(&arrived) < 2 * round; n++)
        if (n > 1000)
            sched_yield();
}

/* Where in its path into sleep the ring hits the waiter sweeps with the round. */
static bool collide(bool ringer)
{
    for (uint64_t i = 1; i <= 2 * rounds; i++) {
        bool rings = ringer == (i % 2 == 0);
        meet(i);
        /* The bell is in both caches: the ringer's look at it overtakes a store that no barrier holds. */
        (void)atomic_load(&clash.bell.waiters);
        (void)atomic_load(&clash.word);
        spin(rings ? i / 2 % 128 : 40);
        if (rings)
            tell(&clash, i);
        else if (!wait_for(&clash, i))
            return false;
    }
    return true;
}

static void *answer(void *arg)
{
    (void)arg;
    for (uint64_t i = 1; i <= rounds; i++) {
        if (!wait_for(&ping, i))
            exit(1);
        /* A varying pause puts the ring at every point of the other side's prepare and wait. */
        spin(i % 61);
        tell(&pong, i);
    }
    if (!collide(true))
        exit(1);
    return NULL;
}

/* A wait nobody rings for ends by its limit, and announces nobody afterwards. */
static int check_timeout(void)
{
    struct shm_bell bell = {0};
    uint64_t start = shm_now_ns();
    int rc = shm_bell_wait(&bell, shm_bell_prepare(&bell), 30000000);
    uint64_t took_ms = (shm_now_ns() - start) / 1000000;
    if (rc != -ETIMEDOUT || took_ms < 29 || bell.waiters != 0)
        return fprintf(stderr, "p_bell: timeout gave %d after %llu ms, %u waiters\n", rc,
                       (unsigned long long)took_ms, bell.waiters),
               1;
    /* Rung between prepare and wait: must not sleep. */
    uint32_t ticket = shm_bell_prepare(&bell);
    shm_bell_ring(&bell);
    rc = shm_bell_wait(&bell, ticket, LIMIT_NS);
    if (rc || bell.waiters != 0)
        return fprintf(stderr, "p_bell: ring before the wait gave %d, %u waiters\n", rc, bell.waiters), 1;
    return 0;
}

int main(int argc, char **argv)
{
    rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 200000;
    if (check_timeout())
        return 1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, NULL))
        return perror("p_bell"), 1;
    for (uint64_t i = 1; i <= rounds; i++) {
        tell(&ping, i);
        if (!wait_for(&pong, i))
            return 1;
    }
    if (!collide(false))
        return 1;
    pthread_join(thread, NULL);
    printf("%llu rounds, %llu sleeps\n", (unsigned long long)rounds, (unsigned long long)slept);
    return slept ? 0 : (fprintf(stderr, "p_bell: nobody ever slept\n"), 1);
}
