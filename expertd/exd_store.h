/* SPDX-License-Identifier: MIT */
/*
 * Store: the instance's lock, and the store segment that expertd shows of
 * itself (shm/shm_store.h). Used by the main loop's thread alone, but for the
 * atomics of the segment.
 */
#ifndef EXD_STORE_H
#define EXD_STORE_H

#include "expertd/exd_options.h"
#include "proto/prt_control_gen.h"
#include "proto/prt_path.h"
#include "shm/shm_store.h"

/* Takes the instance's lock: an flock on paths->lock, which names us to others. -EBUSY: an expertd runs
 * there (its pid and the remedy are named). The caller passes *ret_fd to exd_store_unlock. */
int exd_store_lock(const struct prt_paths *paths, int *ret_fd, struct shm_error *err);

/* Removes the lock file and gives the lock up. Accepts -1. */
void exd_store_unlock(const struct prt_paths *paths, int *fd);

struct exd_store;

/* Creates the segment in state STARTING with the sessions' defaults, under the lock: it replaces the one a
 * predecessor left. */
int exd_store_create(const struct prt_paths *paths, const char *model_path, const struct exd_options *options,
                     struct exd_store **ret_store, struct shm_error *err);

/* State STOPPED for those who have it mapped, then unmapped and its file removed. Accepts NULL, nulls. */
void exd_store_destroy(struct exd_store **store);

struct shm_store *exd_store_segment(struct exd_store *store);
uint64_t exd_store_epoch(const struct exd_store *store);

void exd_store_set_state(struct exd_store *store, uint32_t state);

/* Last notable event, one line. */
void exd_store_detail(struct exd_store *store, const char *line);

/* Row `index` of the worker table. name: printable, unlike the request's; gpu: its number, 0 for the host. */
void exd_store_set_worker(struct exd_store *store, uint32_t index, const struct prt_attach_request *request,
                          uint64_t session, const char *name, uint32_t gpu);
void exd_store_clear_worker(struct exd_store *store, uint32_t index);

#endif
