/* SPDX-License-Identifier: MIT */
/*
 * A fixed pool of threads for the host device.
 *
 * The calling thread works too, so a pool of 1 starts no thread. Tasks are
 * handed out by an atomic counter; idle workers spin for a few microseconds
 * and then sleep on a futex. One run at a time: krn_pool_run is called from
 * one thread only (the pool's owner) and not from inside a task.
 */
#ifndef KRN_POOL_H
#define KRN_POOL_H

#include <stdint.h>

#define KRN_POOL_THREADS_MAX 256

struct krn_pool;

/* One task: index 0 <= task < n_tasks, run by thread 0 <= thread < threads
 * (0 is the caller of krn_pool_run). */
typedef void (*krn_task_fn)(void *arg, uint32_t task, uint32_t thread);

/* threads: in all, the caller included; 0 means as many as the process may
 * run on (sched_getaffinity). -EINVAL above the maximum, -ENOMEM, or what
 * pthread_create says. */
int krn_pool_create(uint32_t threads, struct krn_pool **ret_pool);
void krn_pool_destroy(struct krn_pool **pool);

uint32_t krn_pool_threads(const struct krn_pool *pool);

/* Runs fn for every task and returns when all have ended; what the tasks
 * wrote is visible to the caller. No allocation. */
void krn_pool_run(struct krn_pool *pool, uint32_t n_tasks, krn_task_fn fn, void *arg);

#endif
