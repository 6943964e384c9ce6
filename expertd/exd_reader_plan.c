/* SPDX-License-Identifier: MIT */
/*
 * File reading engine: cutting requests into aligned windows, judging what a
 * read returned, delivering. No I/O here, so both back ends behave alike.
 */
#include "expertd/exd_reader_priv.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define TRIES_MAX 1000u

static void fail_locked(struct exd_run *run, int code, const char *fmt, va_list ap)
{
    char line[SHM_ERROR_TEXT_BYTES];

    if (!run->error) {
        vsnprintf(line, sizeof line, fmt, ap);
        run->error = shm_error_set(&run->text, code, "%s", line);
    }
    atomic_store(&run->stop, true);
}

void exd_reader_fail(struct exd_run *run, int code, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    pthread_mutex_lock(&run->lock);
    fail_locked(run, code, fmt, ap);
    pthread_mutex_unlock(&run->lock);
    va_end(ap);
}

/* For callers that hold the lock. */
static void plan_fail(struct exd_run *run, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void plan_fail(struct exd_run *run, int code, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    run->ended = true;
    fail_locked(run, code, fmt, ap);
    va_end(ap);
}

bool exd_reader_stopped(struct exd_run *run)
{
    if (atomic_load(&run->stop))
        return true;
    if (run->job->cancel && atomic_load(run->job->cancel)) {
        exd_reader_fail(run, ECANCELED, "reading was cancelled");
        return true;
    }
    return false;
}

/* Makes run->current a request with bytes left. 1, 0 at the end, or negative. */
static int fetch_request(struct exd_run *run)
{
    const struct exd_reader *reader = run->reader;

    while (!run->have_current) {
        struct exd_reader_request rq = {0};
        int r;

        if (run->ended)
            return 0;
        r = run->job->next(run->job->ctx, &rq);
        if (r < 0) {
            plan_fail(run, r, "the list of ranges to read ended early: %s", strerror(-r));
            return r;
        }
        if (r == 0) {
            run->ended = true;
            return 0;
        }
        if (rq.file >= reader->n_files) {
            plan_fail(run, ERANGE, "range of file %u asked for, but only %u files are open", rq.file,
                      reader->n_files);
            return -ERANGE;
        }
        if (rq.offset > reader->files[rq.file].size || rq.length > reader->files[rq.file].size - rq.offset) {
            plan_fail(run, ERANGE,
                      "%s: %llu bytes at offset %llu lie beyond the file's end (%llu bytes); "
                      "the file is truncated, get it again",
                      reader->files[rq.file].path, (unsigned long long)rq.length,
                      (unsigned long long)rq.offset, (unsigned long long)reader->files[rq.file].size);
            return -ERANGE;
        }
        if (rq.length == 0)
            continue;
        run->current = rq;
        run->current_done = 0;
        run->have_current = true;
    }
    return 1;
}

/* Puts as much of the current request into the window as fits. */
static void take_segment(struct exd_run *run, struct exd_piece *piece, uint64_t window_end)
{
    struct exd_reader_request *rq = &run->current;
    struct exd_segment *seg = &piece->segments[piece->n_segments++];
    uint64_t n = window_end - rq->offset;

    if (n > rq->length)
        n = rq->length;
    seg->tag = rq->tag;
    seg->request_offset = run->current_done;
    seg->piece_offset = (uint32_t)(rq->offset - piece->offset);
    seg->n = (uint32_t)n;
    if (seg->piece_offset + seg->n > piece->need)
        piece->need = seg->piece_offset + seg->n;
    rq->offset += n;
    rq->length -= n;
    run->current_done += n;
    if (rq->length == 0)
        run->have_current = false;
}

int exd_reader_plan(struct exd_run *run, struct exd_piece *piece)
{
    const struct exd_reader *reader = run->reader;
    uint64_t align, window_end;
    int r;

    pthread_mutex_lock(&run->lock);
    r = run->error ? run->error : fetch_request(run);
    if (r <= 0)
        goto unlock;
    align = reader->files[run->current.file].align;
    piece->file = run->current.file;
    piece->offset = run->current.offset - run->current.offset % align;
    piece->need = piece->got = piece->high = piece->tries = piece->n_segments = 0;
    window_end = piece->offset + reader->piece_bytes;
    take_segment(run, piece, window_end);
    /* Neighbours ride along: small tensors and unaligned borders then cost no read of their own. */
    while (piece->n_segments < EXD_PIECE_SEGMENTS_MAX) {
        uint64_t end = piece->offset + piece->need;

        r = fetch_request(run);
        if (r < 0)
            goto unlock;
        if (r == 0 || run->current.file != piece->file || run->current.offset < piece->offset ||
            run->current.offset > end + EXD_READER_GAP_BYTES || run->current.offset >= window_end)
            break;
        take_segment(run, piece, window_end);
    }
    piece->length = (uint32_t)((piece->need + align - 1) / align * align);
    r = 1;
unlock:
    pthread_mutex_unlock(&run->lock);
    return r;
}

enum exd_settled exd_reader_settle(struct exd_run *run, struct exd_piece *piece, int32_t result)
{
    const struct exd_reader *reader = run->reader;
    const struct exd_reader_open_file *file = &reader->files[piece->file];
    uint64_t at = piece->offset + piece->got;
    uint32_t asked = piece->length - piece->got, total;
    uint64_t seq = atomic_fetch_add(&run->seq, 1);

    atomic_fetch_add(&run->reads, 1);
    if (reader->faults && reader->faults->after_read)
        result = reader->faults->after_read(reader->faults->ctx, seq, piece->file, at, asked, result);
    if (result == -EINTR || result == -EAGAIN) {
        if (++piece->tries < TRIES_MAX) {
            atomic_fetch_add(&run->retries, 1);
            return EXD_PIECE_AGAIN;
        }
    }
    if (result < 0 || (uint32_t)result > asked) {
        int code = result < 0 ? -result : EIO;
        exd_reader_fail(run, code, "%s: reading %u bytes at offset %llu: %s; check the disk (dmesg)",
                        file->path, asked, (unsigned long long)at, strerror(code));
        return EXD_PIECE_FAILED;
    }
    atomic_fetch_add(&run->bytes_read, (uint64_t)result);
    total = piece->got + (uint32_t)result;
    if (total >= piece->need)
        return EXD_PIECE_DONE;
    if (total <= piece->high) { /* a second look brought nothing: this is the end of the file */
        exd_reader_fail(run, ENODATA,
                        "%s: the file ends at byte %llu, inside the range %llu to %llu; "
                        "it was cut or replaced while being read",
                        file->path, (unsigned long long)(piece->offset + piece->high),
                        (unsigned long long)piece->offset, (unsigned long long)(piece->offset + piece->need));
        return EXD_PIECE_FAILED;
    }
    piece->high = total;
    piece->got = total - total % file->align;
    piece->tries = 0;
    atomic_fetch_add(&run->retries, 1);
    return EXD_PIECE_AGAIN;
}

int exd_reader_deliver(struct exd_run *run, const struct exd_piece *piece)
{
    const struct exd_reader_job *job = run->job;

    for (uint32_t i = 0; i < piece->n_segments; i++) {
        const struct exd_segment *seg = &piece->segments[i];
        int r = job->consume(job->ctx, seg->tag, seg->request_offset, piece->buf + seg->piece_offset, seg->n);

        if (r < 0) {
            exd_reader_fail(run, r, "%s: storing %u bytes read at offset %llu: %s",
                            run->reader->files[piece->file].path, seg->n,
                            (unsigned long long)(piece->offset + seg->piece_offset), strerror(-r));
            return r;
        }
        atomic_fetch_add_explicit(&run->bytes_wanted, seg->n, memory_order_relaxed);
    }
    return 0;
}
