/* SPDX-License-Identifier: MIT */
/*
 * File reading engine, io_uring back end. Each worker has a ring of its own and
 * a share of the depth: while it copies one piece its other reads go on in the
 * disk, and no buffer ever changes hands between threads. Rings live as long as
 * a run because SINGLE_ISSUER binds a ring to the thread that made it.
 */
#include "expertd/exd_reader_priv.h"

#include <errno.h>
#include <liburing.h>
#include <string.h>
#include <sys/uio.h>

#define SUBMIT_TRIES_MAX 1000u

/* Best flags first; an older kernel answers EINVAL. */
static int setup_ring(const struct exd_reader *reader, unsigned entries, struct io_uring *ring)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int r = -EINVAL;

    if (reader->faults && reader->faults->setup) {
        r = reader->faults->setup(reader->faults->ctx);
        if (r < 0)
            return r;
    }
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        r = io_uring_queue_init(entries, ring, flags[i]);
        if (r != -EINVAL)
            break;
    }
    return r;
}

/* One buffer covers the worker's whole share of the pool (at most 64 MiB, the
 * kernel's limit being 1 GiB). */
static int register_pool(const struct exd_reader *reader, struct io_uring *ring, unsigned char *base,
                         size_t bytes)
{
    struct iovec iov = {.iov_base = base, .iov_len = bytes};

    if (reader->faults && reader->faults->register_buffers) {
        int r = reader->faults->register_buffers(reader->faults->ctx);
        if (r < 0)
            return r;
    }
    return io_uring_register_buffers(ring, &iov, 1);
}

int exd_uring_probe(struct exd_reader *reader, int *ret_register)
{
    struct io_uring ring;
    struct io_uring_probe *probe;
    int r = setup_ring(reader, reader->depth, &ring);

    if (r < 0)
        return r;
    probe = io_uring_get_probe_ring(&ring);
    if (!probe || !io_uring_opcode_supported(probe, IORING_OP_READ) ||
        !io_uring_opcode_supported(probe, IORING_OP_READ_FIXED))
        r = -ENOSYS;
    else
        *ret_register = register_pool(reader, &ring, reader->pool, reader->pool_bytes);
    if (probe)
        io_uring_free_probe(probe);
    io_uring_queue_exit(&ring);
    return r;
}

static void prepare(const struct exd_run *run, struct io_uring *ring, struct exd_piece *piece, bool fixed)
{
    /* Never NULL: the ring has an entry for each of the worker's pieces. */
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    int fd = run->reader->files[piece->file].fd;
    void *to = piece->buf + piece->got;
    unsigned n = piece->length - piece->got;
    uint64_t at = piece->offset + piece->got;

    if (fixed)
        io_uring_prep_read_fixed(sqe, fd, to, n, at, 0);
    else
        io_uring_prep_read(sqe, fd, to, n, at);
    io_uring_sqe_set_data(sqe, piece);
    piece->in_flight = true;
    exd_reader_live(run->reader, 1);
}

/* Submits what is prepared and waits for one completion, at most a second, so
 * that a hung disk is noticed. 1 with *ret_cqe, 0 on time-out, or negative. */
static int submit_and_wait(struct io_uring *ring, struct io_uring_cqe **ret_cqe)
{
    struct __kernel_timespec second = {.tv_sec = 1};
    struct io_uring_cqe *cqe = NULL;
    unsigned tries = 0;
    int r;

    do {
        r = io_uring_submit_and_wait_timeout(ring, &cqe, 1, &second, NULL);
        if (cqe) {
            *ret_cqe = cqe;
            return 1;
        }
    } while ((r == -EINTR || r == -EAGAIN || r == -EBUSY) && ++tries < SUBMIT_TRIES_MAX);
    if (r == -ETIME || r >= 0)
        return 0;
    return r;
}

/* The kernel may still write into the pool: leave it be. */
static void abandon(struct exd_worker *worker, uint32_t n, int code)
{
    struct exd_run *run = worker->run;
    const struct exd_piece *stuck = worker->pieces;

    while (!stuck->in_flight) /* n > 0 are */
        stuck++;
    atomic_store(&run->reader->leak, true);
    exd_reader_fail(run, code,
                    "%s: %u reads do not come back (one of %u bytes at offset %llu): %s; try --io pread",
                    run->reader->files[stuck->file].path, n, stuck->length, (unsigned long long)stuck->offset,
                    strerror(code));
}

static void work(struct exd_worker *worker, struct io_uring *ring, bool fixed)
{
    struct exd_run *run = worker->run;
    struct exd_piece *free_pieces[EXD_READER_DEPTH_MAX];
    uint32_t n_free = 0, in_flight = 0;
    uint64_t last_ns = shm_now_ns();
    bool more = true;

    for (uint32_t i = 0; i < worker->n_pieces; i++)
        free_pieces[n_free++] = &worker->pieces[i];
    for (;;) {
        struct io_uring_cqe *cqe;
        struct exd_piece *piece;
        enum exd_settled state;
        int r;

        while (more && n_free) {
            more = !exd_reader_stopped(run) && exd_reader_plan(run, free_pieces[n_free - 1]) > 0;
            if (!more)
                break;
            worker->took_part = true;
            prepare(run, ring, free_pieces[--n_free], fixed);
            in_flight++;
        }
        if (!in_flight)
            return;
        r = submit_and_wait(ring, &cqe);
        if (r == 0 && shm_now_ns() - last_ns > EXD_READER_STALL_NS)
            r = -ETIMEDOUT;
        if (r < 0) {
            abandon(worker, in_flight, -r);
            return;
        }
        if (r == 0)
            continue;
        piece = io_uring_cqe_get_data(cqe);
        exd_reader_live(run->reader, -1);
        state = exd_reader_settle(run, piece, cqe->res);
        io_uring_cqe_seen(ring, cqe);
        if (state == EXD_PIECE_AGAIN && !exd_reader_stopped(run)) {
            prepare(run, ring, piece, fixed);
        } else {
            if (state == EXD_PIECE_DONE && !exd_reader_stopped(run))
                exd_reader_deliver(run, piece);
            piece->in_flight = false;
            free_pieces[n_free++] = piece;
            in_flight--;
        }
        last_ns = shm_now_ns();
    }
}

void exd_uring_work(struct exd_worker *worker)
{
    struct exd_reader *reader = worker->run->reader;
    struct io_uring ring;
    bool fixed = false;
    int r = setup_ring(reader, worker->n_pieces, &ring);

    if (r < 0) {
        /* Helpers may stay away; worker 0 must not, or nobody would read. */
        if (worker->index == 0)
            exd_reader_fail(worker->run, r, "io_uring_setup: %s; try --io pread", strerror(-r));
        return;
    }
    if (reader->registered)
        fixed = register_pool(reader, &ring, worker->pieces[0].buf,
                              (size_t)worker->n_pieces * reader->piece_bytes) == 0;
    work(worker, &ring, fixed);
    io_uring_queue_exit(&ring);
}
