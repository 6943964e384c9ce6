/* SPDX-License-Identifier: MIT */
#include "kernels/krn_pool.h"

#include "shm/shm_bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPIN_NS 20000

struct worker {
    struct krn_pool *pool;
    uint32_t index;
    pthread_t thread;
};

/*
 * ticket = tasks of the run << 32 | next task. A thread claims a task by
 * compare-and-swap and only then reads fn and arg: while a claimed task has
 * not ended, krn_pool_run cannot return, so they belong to the same run even
 * if the thread slept through several runs. Hence nobody waits for workers
 * that never woke up.
 */
struct krn_pool {
    _Alignas(64) _Atomic uint64_t ticket; /* run -> workers; release, claimed with acquire */
    krn_task_fn fn;
    void *arg;
    _Alignas(64) _Atomic uint32_t done;  /* tasks ended; release by workers, acquire by the caller; futex */
    _Atomic uint32_t caller_waits;       /* set before the caller sleeps on done (seq_cst with done) */
    _Alignas(64) _Atomic uint32_t epoch; /* bumped by each run and by destroy; futex of idle workers */
    _Atomic uint32_t sleepers;           /* workers about to sleep on epoch (seq_cst with epoch) */
    _Atomic uint32_t stop;
    uint32_t threads;
    struct worker *workers; /* threads - 1 */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, (void *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, (void *)word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins until *word differs from value or the time is over; false: over. */
static bool spin_while(_Atomic uint32_t *word, uint32_t value)
{
    uint64_t end_ns = shm_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return true;
            pause_cpu();
        }
    } while (shm_now_ns() < end_ns);
    return false;
}

static void work(struct krn_pool *pool, uint32_t index)
{
    uint64_t t = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    for (;;) {
        uint32_t n_tasks = (uint32_t)(t >> 32), next = (uint32_t)t;
        if (next >= n_tasks)
            return;
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &t, t + 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        pool->fn(pool->arg, next, index);
        uint32_t done = atomic_fetch_add(&pool->done, 1) + 1;
        if (done == n_tasks && index != 0 && atomic_load(&pool->caller_waits))
            futex_wake(&pool->done, 1);
        t = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct krn_pool *pool = w->pool;
    for (;;) {
        uint32_t epoch = atomic_load(&pool->epoch); /* before looking for work: no run is missed */
        if (atomic_load(&pool->stop))
            return NULL;
        work(pool, w->index);
        if (spin_while(&pool->epoch, epoch))
            continue;
        atomic_fetch_add(&pool->sleepers, 1);
        futex_wait(&pool->epoch, epoch);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
}

int krn_pool_create(uint32_t threads, struct krn_pool **ret_pool)
{
    if (threads > KRN_POOL_THREADS_MAX)
        return -EINVAL;
    if (threads == 0) {
        cpu_set_t set;
        threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;
        threads = threads > KRN_POOL_THREADS_MAX ? KRN_POOL_THREADS_MAX : threads;
    }
    struct krn_pool *pool = aligned_alloc(64, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    *pool = (struct krn_pool){.threads = 1};
    pool->workers = calloc(threads, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return -ENOMEM;
    }
    /* Signals belong to the program's own threads. */
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* of its own doing: blocked, it would kill without asking who handles it */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (uint32_t i = 1; i < threads && rc == 0; i++) {
        struct worker *w = &pool->workers[i - 1];
        *w = (struct worker){.pool = pool, .index = i};
        rc = pthread_create(&w->thread, NULL, worker_main, w);
        if (rc == 0)
            pool->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        krn_pool_destroy(&pool);
        return -rc;
    }
    *ret_pool = pool;
    return 0;
}

void krn_pool_destroy(struct krn_pool **pool)
{
    if (!pool || !*pool)
        return;
    struct krn_pool *p = *pool;
    *pool = NULL;
    atomic_store(&p->stop, 1);
    atomic_fetch_add(&p->epoch, 1);
    futex_wake(&p->epoch, INT_MAX);
    for (uint32_t i = 1; i < p->threads; i++)
        pthread_join(p->workers[i - 1].thread, NULL);
    free(p->workers);
    free(p);
}

uint32_t krn_pool_threads(const struct krn_pool *pool)
{
    return pool->threads;
}

void krn_pool_run(struct krn_pool *pool, uint32_t n_tasks, krn_task_fn fn, void *arg)
{
    if (pool->threads == 1 || n_tasks <= 1) {
        for (uint32_t i = 0; i < n_tasks; i++)
            fn(arg, i, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->ticket, (uint64_t)n_tasks << 32, memory_order_release);
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers))
        futex_wake(&pool->epoch, n_tasks > INT_MAX ? INT_MAX : (int)(n_tasks - 1));
    work(pool, 0);
    uint32_t done;
    while ((done = atomic_load_explicit(&pool->done, memory_order_acquire)) != n_tasks) {
        if (spin_while(&pool->done, done))
            continue;
        atomic_store(&pool->caller_waits, 1);
        if (atomic_load(&pool->done) == done)
            futex_wait(&pool->done, done);
        atomic_store(&pool->caller_waits, 0);
    }
}
