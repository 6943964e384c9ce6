/* SPDX-License-Identifier: MIT */
/*
 * Inside the file reading engine: what the planner and the two back ends share.
 *
 * A piece is one disk read into one bounce buffer together with the segments
 * of client requests that it serves. Each piece belongs to one worker, which
 * plans, reads, settles and delivers it; workers meet only in the planner
 * (run->lock) and in the first-error record.
 */
#ifndef EXD_READER_PRIV_H
#define EXD_READER_PRIV_H

#include "expertd/exd_reader.h"
#include "shm/shm_bell.h"

#include <pthread.h>

#define EXD_PIECE_SEGMENTS_MAX 64u
#define EXD_READER_ALIGN       4096u /* offset, length and address under O_DIRECT */
#define EXD_READER_GAP_BYTES   (64u << 10)
#define EXD_READER_STALL_NS    60000000000ull

struct exd_segment {
    uint64_t tag;
    uint64_t request_offset;
    uint32_t piece_offset;
    uint32_t n;
};

struct exd_piece {
    unsigned char *buf;
    uint32_t file;
    uint64_t offset; /* in the file, a multiple of the file's alignment */
    uint32_t need;   /* bytes that the segments want, from offset on */
    uint32_t length; /* need rounded up to the alignment */
    uint32_t got;    /* good bytes to go on from, aligned */
    uint32_t high;   /* most bytes ever seen from offset on: no progress beyond it means end of file */
    uint32_t tries;  /* interrupted attempts in a row */
    bool in_flight;  /* io_uring: the kernel may write into buf */
    uint32_t n_segments;
    struct exd_segment segments[EXD_PIECE_SEGMENTS_MAX];
};

struct exd_reader_open_file {
    char *path;
    int fd;
    uint64_t size;
    uint32_t align; /* EXD_READER_ALIGN with O_DIRECT, else 1 */
};

struct exd_reader {
    struct exd_reader_open_file *files;
    uint32_t n_files;
    bool uring;
    bool registered;
    uint32_t depth; /* pieces in all */
    uint32_t piece_bytes;
    uint32_t n_workers;
    unsigned char *pool; /* depth * piece_bytes, page-aligned; mmap, so that a leak is safe */
    size_t pool_bytes;
    atomic_bool leak; /* the kernel may still write into pool: never unmap it */
    struct exd_piece *pieces;
    const struct exd_reader_faults *faults;
    _Atomic uint64_t *live_reads;
    char describe[256];
};

struct exd_run {
    struct exd_reader *reader;
    const struct exd_reader_job *job;
    pthread_mutex_t lock;              /* planner state and error */
    struct exd_reader_request current; /* what is left of the request being cut */
    uint64_t current_done;             /* bytes of it already planned */
    bool have_current;
    bool ended; /* next() returned 0 or failed */
    int error;  /* first one */
    struct shm_error text;
    atomic_bool stop;
    atomic_uint_fast64_t seq;
    atomic_uint_fast64_t bytes_wanted, bytes_read, reads, retries;
};

struct exd_worker {
    struct exd_run *run;
    uint32_t index;
    struct exd_piece *pieces;
    uint32_t n_pieces;
    pthread_t thread;
    bool started;
    bool took_part;
};

/* Cuts the next window into *piece. 1, 0 at the end, negative after a failure
 * (already recorded in the run). */
int exd_reader_plan(struct exd_run *run, struct exd_piece *piece);

enum exd_settled { EXD_PIECE_DONE, EXD_PIECE_AGAIN, EXD_PIECE_FAILED };

/* Judges the result of a read of piece->length - piece->got bytes at
 * piece->offset + piece->got. AGAIN: read the rest, from the new got. */
enum exd_settled exd_reader_settle(struct exd_run *run, struct exd_piece *piece, int32_t result);

/* Hands a done piece to the client. 0 or the recorded error. */
int exd_reader_deliver(struct exd_run *run, const struct exd_piece *piece);

/* Records the first error and stops all workers. */
void exd_reader_fail(struct exd_run *run, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* A read goes out (1) or came back (-1). */
static inline void exd_reader_live(const struct exd_reader *reader, int64_t change)
{
    if (reader->live_reads)
        atomic_fetch_add_explicit(reader->live_reads, (uint64_t)change, memory_order_relaxed);
}

/* Whether to begin nothing new: an error elsewhere, or cancelled. */
bool exd_reader_stopped(struct exd_run *run);

/* Tries a ring and buffer registration as a run would need them. 0, or the
 * negative errno of io_uring_setup. ret_register: 0 or why registration failed. */
int exd_uring_probe(struct exd_reader *reader, int *ret_register);

/* Work until the requests are used up or the run stops; nothing of the
 * worker's is in flight at return. */
void exd_uring_work(struct exd_worker *worker);
void exd_pread_work(struct exd_worker *worker);

#endif
