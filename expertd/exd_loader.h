/* SPDX-License-Identifier: MIT */
/*
 * Loader: fills a created arena from the model's files, through the reading
 * engine. Dense tensors first, then expert tensors in file order, scattered into
 * blobs as pieces arrive. A unit (dense tensor or blob) is summed and marked
 * ready when its last byte is there; when all are, the arena is sealed.
 *
 * Runs on its own threads, so that expertd serves meanwhile. Owns the reader;
 * borrows model and arena, which must outlive it. Memory: the reader's buffers
 * (at most 64 MiB) and a few words per unit.
 */
#ifndef EXD_LOADER_H
#define EXD_LOADER_H

#include "expertd/exd_arena.h"
#include "expertd/exd_reader.h"

struct exd_loader_progress {
    uint64_t done_bytes, total_bytes;
    uint64_t elapsed_ns; /* so far, or in all */
    uint32_t units_done, units;
    bool finished; /* exd_loader_wait will not block */
};

struct exd_loader_config {
    const struct exd_model *model;
    struct exd_arena *arena; /* created, not complete */
    struct exd_reader_config reader;
    /* Called from loader threads, one at a time, about 10 times a second, and once
     * at the end (finished); may be NULL. Must not call the loader. */
    void (*progress)(void *ctx, const struct exd_loader_progress *progress);
    void *progress_ctx;
};

struct exd_loader;

/* Opens the reader and starts to load. Errors as of exd_reader_open, -ENOMEM, -EAGAIN. */
int exd_loader_start(const struct exd_loader_config *config, struct exd_loader **ret_loader,
                     struct shm_error *err);

/* Ends the loading soon with -ECANCELED; returns at once. Safe in a signal handler. */
void exd_loader_cancel(struct exd_loader *loader);

/* Readable (poll, epoll) once loading has ended, well or not; never drained.
 * Owned by the loader. */
int exd_loader_fd(const struct exd_loader *loader);

void exd_loader_progress(const struct exd_loader *loader, struct exd_loader_progress *ret_progress);

/* Which reading back end is active and why; one line, valid until destroy. */
const char *exd_loader_describe(const struct exd_loader *loader);

/* Blocks until loading has ended. 0: the arena is complete; else the first
 * error, with its line (file and offset named). May be called again. ret_stats may be NULL. */
int exd_loader_wait(struct exd_loader *loader, struct exd_reader_stats *ret_stats, struct shm_error *err);

/* Cancels, waits, frees. Accepts NULL, nulls *loader. */
void exd_loader_destroy(struct exd_loader **loader);

#endif
