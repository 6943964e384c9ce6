/* SPDX-License-Identifier: MIT */
/*
 * File reading engine: many byte ranges of a few files, at the disk's speed.
 *
 * Owns its descriptors (reopened with O_DIRECT where the file system allows),
 * its bounce buffers and its threads. Does not own destinations: the client
 * copies each piece where it belongs. Two back ends behind this interface:
 * io_uring, and a pread pool where io_uring is refused (EPERM, ENOSYS) or not
 * wanted. A reader may be used for several runs, one at a time.
 *
 * Threads: during exd_reader_run the caller's thread is worker 0; further
 * workers live only as long as the run. next() is called by one thread at a
 * time (any worker); consume() by several at once, always for disjoint bytes.
 */
#ifndef EXD_READER_H
#define EXD_READER_H

#include "shm/shm_error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXD_READER_DEPTH_DEFAULT 16u
#define EXD_READER_DEPTH_MAX     256u
#define EXD_READER_PIECE_DEFAULT (1u << 20)
#define EXD_READER_PIECE_MIN     (16u << 10)
#define EXD_READER_PIECE_MAX     (16u << 20)
#define EXD_READER_POOL_MAX      (64u << 20) /* bounce bytes in all: depth is cut to fit */
#define EXD_READER_FILES_MAX     1024u

enum exd_reader_io {
    EXD_READER_AUTO,  /* io_uring, else pread; the environment's EXPERTD_IO=auto|uring|pread decides first */
    EXD_READER_URING, /* io_uring or an error */
    EXD_READER_PREAD,
    EXD_READER_IO_COUNT
};

/* One model file. path is for messages and opening; fd >= 0 (borrowed, may be
 * closed after open) makes sure that the same inode is read, -1 opens path. */
struct exd_reader_file {
    const char *path;
    int fd;
};

/* A range of a file. Cheapest in ascending order within a file: neighbours
 * (gaps up to 64 KiB) share one disk read. length 0 is skipped without a call. */
struct exd_reader_request {
    uint32_t file;   /* index into the files given at open */
    uint64_t offset; /* bytes from the start of the file, any alignment */
    uint64_t length; /* bytes */
    uint64_t tag;    /* the client's, handed back with each piece */
};

/* Seam for tests: each hook may be NULL. Called from any worker thread. */
struct exd_reader_faults {
    /* Result of the seq-th read of the run (0, 1, ...; retries count): returns
     * the result to pretend: bytes, or a negative errno. */
    int32_t (*after_read)(void *ctx, uint64_t seq, uint32_t file, uint64_t offset, uint32_t length,
                          int32_t result);
    int (*setup)(void *ctx);            /* before io_uring_setup: 0, or the negative errno to fail with */
    int (*register_buffers)(void *ctx); /* before buffer registration, likewise */
    int (*open_direct)(void *ctx, uint32_t file); /* before open with O_DIRECT, likewise */
    void *ctx;
};

/* All zero is the default. */
struct exd_reader_config {
    enum exd_reader_io io;
    uint32_t depth;                         /* reads in flight, all workers together (io_uring); 0 = 16 */
    uint32_t piece_bytes;                   /* largest single read, multiple of 4096; 0 = 1 MiB */
    uint32_t threads;                       /* workers; 0 = io_uring: min(2, cores), pread: 4 */
    bool buffered;                          /* no O_DIRECT */
    const struct exd_reader_faults *faults; /* must outlive the reader */
    _Atomic uint64_t *live_depth;           /* set to the reads that may be in flight; may be NULL */
    _Atomic uint64_t *live_reads;           /* those in flight now; may be NULL. Both outlive the reader */
};

struct exd_reader_job {
    void *ctx;
    /* 1 and *ret_request filled, 0 at the end (then not called again), or a
     * negative errno, which ends the run. */
    int (*next)(void *ctx, struct exd_reader_request *ret_request);
    /* n bytes of request tag, from its byte offset_in_request on. Pieces of a
     * request come in any order, each byte exactly once, and never more than
     * piece_bytes at a time. bytes is valid only during the call and has no
     * alignment promise. 0, or a negative errno, which ends the run. */
    int (*consume)(void *ctx, uint64_t tag, uint64_t offset_in_request, const void *bytes, size_t n);
    const atomic_int *cancel; /* may be NULL; non-zero ends the run with -ECANCELED */
};

struct exd_reader_stats {
    uint64_t bytes_wanted; /* consumed */
    uint64_t bytes_read;   /* from the files, alignment and gaps included */
    uint64_t reads;        /* read calls or SQEs, retries included */
    uint64_t retries;      /* after short reads, EINTR, EAGAIN */
    uint64_t elapsed_ns;
    uint32_t workers; /* threads that took part */
};

struct exd_reader;

/* Opens the files, picks the back end by trying it, allocates buffers.
 * Errors name file or setting: -ENOENT and such from open, -EINVAL for a bad
 * setting, -ENOMEM, -EPERM/-ENOSYS when io_uring is demanded and refused. */
int exd_reader_open(const struct exd_reader_config *config, const struct exd_reader_file *files,
                    uint32_t n_files, struct exd_reader **ret_reader, struct shm_error *err);

/* Reads all requests; returns when every byte was consumed, or after the first
 * error, in each case with nothing in flight any more. Blocks for the time of
 * the reading. Errors (file and offset in the text): -EIO and such from the
 * disk, -ENODATA where the file ends before the range does, -ERANGE for a
 * request outside the file as it was at open, -ECANCELED, -ETIMEDOUT when
 * io_uring completes nothing for 60 s, or what next/consume returned (a client
 * with better words for its own failure keeps them itself). ret_stats may be
 * NULL and is filled in every case. A read that hangs in the kernel holds the
 * pread pool until it returns: only io_uring can give up waiting. */
int exd_reader_run(struct exd_reader *reader, const struct exd_reader_job *job,
                   struct exd_reader_stats *ret_stats, struct shm_error *err);

/* One line: which back end is active and why, e.g. "io_uring, O_DIRECT, depth
 * 16 x 1024 KiB, 2 threads, registered buffers" or "pread pool, 4 threads,
 * O_DIRECT: io_uring refused (EPERM)". Valid until close or the next run. */
const char *exd_reader_describe(const struct exd_reader *reader);

/* Size in bytes at open. */
uint64_t exd_reader_file_size(const struct exd_reader *reader, uint32_t file);

/* "auto", "uring" or "pread"; -EINVAL otherwise. */
int exd_reader_parse_io(const char *text, enum exd_reader_io *ret_io);

void exd_reader_close(struct exd_reader **reader);

#endif
