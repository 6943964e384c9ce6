/* SPDX-License-Identifier: MIT */
/*
 * File reading engine, back end without io_uring: each worker thread reads one
 * piece at a time with pread; the number of threads is the queue depth.
 */
#include "expertd/exd_reader_priv.h"

#include <errno.h>
#include <unistd.h>

static enum exd_settled read_piece(struct exd_run *run, struct exd_piece *piece)
{
    int fd = run->reader->files[piece->file].fd;
    enum exd_settled state;

    do {
        exd_reader_live(run->reader, 1);
        ssize_t n = pread(fd, piece->buf + piece->got, piece->length - piece->got,
                          (off_t)(piece->offset + piece->got));
        int error = errno;
        exd_reader_live(run->reader, -1);
        state = exd_reader_settle(run, piece, n < 0 ? -error : (int32_t)n);
    } while (state == EXD_PIECE_AGAIN && !exd_reader_stopped(run));
    return state;
}

void exd_pread_work(struct exd_worker *worker)
{
    struct exd_run *run = worker->run;
    struct exd_piece *piece = worker->pieces;

    while (!exd_reader_stopped(run) && exd_reader_plan(run, piece) > 0) {
        worker->took_part = true;
        if (read_piece(run, piece) != EXD_PIECE_DONE || exd_reader_stopped(run) ||
            exd_reader_deliver(run, piece) < 0)
            break;
    }
}
