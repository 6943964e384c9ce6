/* SPDX-License-Identifier: MIT */
/*
 * File reading engine: opening, choice of back end, workers' life. See
 * exd_reader.h for the contract, exd_reader_plan.c for the cutting.
 */
#include "expertd/exd_reader_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREAD_THREADS_DEFAULT 4u
#define THREADS_MAX           64u

int exd_reader_parse_io(const char *text, enum exd_reader_io *ret_io)
{
    static const char *const names[EXD_READER_IO_COUNT] = {"auto", "uring", "pread"};

    for (int i = 0; i < EXD_READER_IO_COUNT; i++) {
        if (!strcmp(text, names[i])) {
            *ret_io = (enum exd_reader_io)i;
            return 0;
        }
    }
    return -EINVAL;
}

/* O_DIRECT may be refused at open or only at the first read: try both. */
static int open_direct(const struct exd_reader *reader, uint32_t index, const char *path)
{
    void *probe;
    int fd, r = 0;

    if (reader->faults && reader->faults->open_direct) {
        r = reader->faults->open_direct(reader->faults->ctx, index);
        if (r < 0)
            return r;
    }
    fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0)
        return -errno;
    if (posix_memalign(&probe, EXD_READER_ALIGN, EXD_READER_ALIGN)) {
        r = -ENOMEM;
    } else {
        if (pread(fd, probe, EXD_READER_ALIGN, 0) < 0)
            r = -errno;
        free(probe);
    }
    if (r < 0) {
        close(fd);
        return r;
    }
    return fd;
}

/* ret_refused: 0, or why the file is read through the page cache. */
static int open_file(struct exd_reader *reader, uint32_t index, const struct exd_reader_file *from,
                     bool buffered, int *ret_refused, struct shm_error *err)
{
    struct exd_reader_open_file *file = &reader->files[index];
    char link_path[40];
    const char *name = from->path;
    struct stat st;
    int r = 0;

    file->path = strdup(from->path);
    if (!file->path)
        return shm_error_set(err, ENOMEM, "%s: no memory for the file's name; free some", from->path);
    if (from->fd >= 0) { /* the same inode, whatever the path says by now */
        snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", from->fd);
        name = link_path;
    }
    file->align = 1;
    if (!buffered) {
        r = open_direct(reader, index, name);
        if (r >= 0) {
            file->fd = r;
            file->align = EXD_READER_ALIGN;
        } else {
            *ret_refused = r;
        }
    }
    if (file->fd < 0)
        file->fd = open(name, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0 && from->fd >= 0) /* no /proc */
        file->fd = fcntl(from->fd, F_DUPFD_CLOEXEC, 3);
    if (file->fd < 0 || fstat(file->fd, &st) < 0) {
        r = errno;
        return shm_error_set(err, r, "%s: cannot open for reading: %s%s", from->path, strerror(r),
                             shm_error_remedy(r));
    }
    if (!S_ISREG(st.st_mode))
        return shm_error_set(err, EINVAL, "%s: not a regular file", from->path);
    file->size = (uint64_t)st.st_size;
    return 0;
}

static int check_config(const struct exd_reader_config *config, uint32_t n_files, enum exd_reader_io *ret_io,
                        struct shm_error *err)
{
    const char *env = getenv("EXPERTD_IO");

    *ret_io = config->io;
    if (config->io == EXD_READER_AUTO && env && *env && exd_reader_parse_io(env, ret_io) < 0)
        return shm_error_set(err, EINVAL, "EXPERTD_IO=%.32s: must be auto, uring or pread", env);
    if ((unsigned)*ret_io >= EXD_READER_IO_COUNT)
        return shm_error_set(err, EINVAL, "file reader: unknown back end %d", (int)*ret_io);
    if (config->depth > EXD_READER_DEPTH_MAX)
        return shm_error_set(err, EINVAL, "file reader: depth %u is above %u", config->depth,
                             EXD_READER_DEPTH_MAX);
    if (config->piece_bytes &&
        (config->piece_bytes < EXD_READER_PIECE_MIN || config->piece_bytes > EXD_READER_PIECE_MAX ||
         config->piece_bytes % EXD_READER_ALIGN))
        return shm_error_set(err, EINVAL,
                             "file reader: piece of %u bytes is not a multiple of 4096 from %u to %u",
                             config->piece_bytes, EXD_READER_PIECE_MIN, EXD_READER_PIECE_MAX);
    if (config->threads > THREADS_MAX)
        return shm_error_set(err, EINVAL, "file reader: %u threads are above %u", config->threads,
                             THREADS_MAX);
    if (n_files == 0 || n_files > EXD_READER_FILES_MAX)
        return shm_error_set(err, EINVAL, "file reader: %u files, must be 1 to %u", n_files,
                             EXD_READER_FILES_MAX);
    return 0;
}

static uint32_t cores(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > 64 ? 64 : (uint32_t)n;
}

static void size_pool(struct exd_reader *reader, const struct exd_reader_config *config, bool uring)
{
    uint32_t fit;

    reader->uring = uring;
    reader->piece_bytes = config->piece_bytes ? config->piece_bytes : EXD_READER_PIECE_DEFAULT;
    fit = EXD_READER_POOL_MAX / reader->piece_bytes;
    reader->n_workers = config->threads;
    if (!reader->n_workers)
        reader->n_workers = !uring ? PREAD_THREADS_DEFAULT : cores() < 2 ? 1 : 2;
    reader->depth = !uring ? reader->n_workers : config->depth ? config->depth : EXD_READER_DEPTH_DEFAULT;
    if (reader->depth > fit)
        reader->depth = fit;
    if (reader->n_workers > reader->depth)
        reader->n_workers = reader->depth;
}

static int make_pool(struct exd_reader *reader, struct shm_error *err)
{
    reader->pool_bytes = (size_t)reader->depth * reader->piece_bytes;
    reader->pool = mmap(NULL, reader->pool_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reader->pool == MAP_FAILED) {
        reader->pool = NULL;
        return shm_error_set(err, ENOMEM,
                             "no memory for %zu KiB of read buffers; lower the depth or free some",
                             reader->pool_bytes >> 10);
    }
    madvise(reader->pool, reader->pool_bytes, MADV_HUGEPAGE); /* fewer pages to pin; no matter if refused */
    reader->pieces = calloc(reader->depth, sizeof *reader->pieces);
    if (!reader->pieces)
        return shm_error_set(err, ENOMEM, "no memory for %u read descriptors; free some", reader->depth);
    for (uint32_t i = 0; i < reader->depth; i++)
        reader->pieces[i].buf = reader->pool + (size_t)i * reader->piece_bytes;
    return 0;
}

static void drop_pool(struct exd_reader *reader)
{
    if (reader->pool && !atomic_load(&reader->leak))
        munmap(reader->pool, reader->pool_bytes);
    reader->pool = NULL;
    free(reader->pieces);
    reader->pieces = NULL;
}

static const char *errno_name(int code)
{
    const char *name = strerrorname_np(code);
    return name ? name : "?";
}

static void describe_direct(const struct exd_reader *reader, bool asked_buffered, int refused, char *text,
                            size_t size)
{
    uint32_t direct = 0;

    for (uint32_t i = 0; i < reader->n_files; i++)
        direct += reader->files[i].align > 1;
    if (direct == reader->n_files)
        snprintf(text, size, "O_DIRECT");
    else if (asked_buffered)
        snprintf(text, size, "buffered (asked for)");
    else if (direct)
        snprintf(text, size, "O_DIRECT for %u of %u files (%s)", direct, reader->n_files,
                 errno_name(-refused));
    else
        snprintf(text, size, "buffered (O_DIRECT refused: %s)", errno_name(-refused));
}

static int choose_backend(struct exd_reader *reader, const struct exd_reader_config *config,
                          enum exd_reader_io io, int refused_direct, struct shm_error *err)
{
    char direct[80], pinned[80] = "registered buffers";
    int refused = 0, unregistered = 0, r;

    describe_direct(reader, config->buffered, refused_direct, direct, sizeof direct);
    if (io != EXD_READER_PREAD) {
        size_pool(reader, config, true);
        r = make_pool(reader, err);
        if (r < 0)
            return r;
        refused = exd_uring_probe(reader, &unregistered);
        if (refused == 0) {
            struct rlimit limit = {0};

            reader->registered = unregistered == 0;
            if (unregistered < 0) {
                getrlimit(RLIMIT_MEMLOCK, &limit);
                snprintf(pinned, sizeof pinned, "unregistered buffers (%s, memlock limit %llu KiB)",
                         errno_name(-unregistered), (unsigned long long)limit.rlim_cur >> 10);
            }
            snprintf(reader->describe, sizeof reader->describe,
                     "io_uring, %s, depth %u x %u KiB, %u thread%s, %s", direct, reader->depth,
                     reader->piece_bytes >> 10, reader->n_workers, reader->n_workers == 1 ? "" : "s", pinned);
            return 0;
        }
        if (io == EXD_READER_URING)
            return shm_error_set(err, refused, "io_uring is refused here (%s); use --io auto or --io pread",
                                 errno_name(-refused));
        drop_pool(reader);
    }
    size_pool(reader, config, false);
    r = make_pool(reader, err);
    if (r < 0)
        return r;
    snprintf(reader->describe, sizeof reader->describe,
             "pread pool, %u thread%s x %u KiB, %s: ", reader->n_workers, reader->n_workers == 1 ? "" : "s",
             reader->piece_bytes >> 10, direct);
    r = (int)strlen(reader->describe);
    if (refused)
        snprintf(reader->describe + r, sizeof reader->describe - (size_t)r, "io_uring refused (%s)",
                 errno_name(-refused));
    else
        snprintf(reader->describe + r, sizeof reader->describe - (size_t)r, "asked for");
    return 0;
}

int exd_reader_open(const struct exd_reader_config *config, const struct exd_reader_file *files,
                    uint32_t n_files, struct exd_reader **ret_reader, struct shm_error *err)
{
    static const struct exd_reader_config defaults;
    struct exd_reader *reader;
    enum exd_reader_io io;
    int r, refused_direct = 0;

    if (!config)
        config = &defaults;
    r = check_config(config, n_files, &io, err);
    if (r < 0)
        return r;
    reader = calloc(1, sizeof *reader);
    if (!reader)
        return shm_error_set(err, ENOMEM, "no memory for the file reader; free some");
    reader->faults = config->faults;
    reader->live_reads = config->live_reads;
    reader->files = calloc(n_files, sizeof *reader->files);
    if (!reader->files) {
        r = shm_error_set(err, ENOMEM, "no memory for %u open files; free some", n_files);
        goto close_reader;
    }
    reader->n_files = n_files;
    for (uint32_t i = 0; i < n_files; i++)
        reader->files[i].fd = -1;
    for (uint32_t i = 0; i < n_files; i++) {
        r = open_file(reader, i, &files[i], config->buffered, &refused_direct, err);
        if (r < 0)
            goto close_reader;
    }
    r = choose_backend(reader, config, io, refused_direct, err);
    if (r < 0)
        goto close_reader;
    if (config->live_depth)
        atomic_store_explicit(config->live_depth, reader->depth, memory_order_relaxed);
    *ret_reader = reader;
    return 0;
close_reader:
    exd_reader_close(&reader);
    return r;
}

static void *worker_main(void *arg)
{
    struct exd_worker *worker = arg;

    if (worker->run->reader->uring)
        exd_uring_work(worker);
    else
        exd_pread_work(worker);
    return NULL;
}

int exd_reader_run(struct exd_reader *reader, const struct exd_reader_job *job,
                   struct exd_reader_stats *ret_stats, struct shm_error *err)
{
    struct exd_run run = {.reader = reader, .job = job};
    struct exd_worker workers[THREADS_MAX] = {0};
    uint32_t next_piece = 0, taking_part = 0;
    uint64_t start_ns = shm_now_ns();

    if (atomic_load(&reader->leak))
        return shm_error_set(err, EIO, "%s: a former read never came back from the disk; open the file again",
                             reader->files[0].path);
    pthread_mutex_init(&run.lock, NULL);
    for (uint32_t i = 0; i < reader->n_workers; i++) {
        struct exd_worker *worker = &workers[i];

        worker->run = &run;
        worker->index = i;
        worker->pieces = &reader->pieces[next_piece];
        worker->n_pieces =
            reader->depth / reader->n_workers + (i < reader->depth % reader->n_workers ? 1 : 0);
        next_piece += worker->n_pieces;
        /* Fewer threads than wished for is slower, not wrong. */
        if (i > 0)
            worker->started = pthread_create(&worker->thread, NULL, worker_main, worker) == 0;
    }
    worker_main(&workers[0]);
    for (uint32_t i = 0; i < reader->n_workers; i++) {
        if (workers[i].started)
            pthread_join(workers[i].thread, NULL);
        taking_part += workers[i].took_part;
    }
    pthread_mutex_destroy(&run.lock);
    if (ret_stats) {
        *ret_stats = (struct exd_reader_stats){
            .bytes_wanted = atomic_load(&run.bytes_wanted),
            .bytes_read = atomic_load(&run.bytes_read),
            .reads = atomic_load(&run.reads),
            .retries = atomic_load(&run.retries),
            .elapsed_ns = shm_now_ns() - start_ns,
            .workers = taking_part,
        };
    }
    if (run.error)
        return shm_error_set(err, run.error, "%s", run.text.text);
    return 0;
}

const char *exd_reader_describe(const struct exd_reader *reader)
{
    return reader->describe;
}

uint64_t exd_reader_file_size(const struct exd_reader *reader, uint32_t file)
{
    return file < reader->n_files ? reader->files[file].size : 0;
}

void exd_reader_close(struct exd_reader **reader)
{
    struct exd_reader *r = *reader;

    if (!r)
        return;
    *reader = NULL;
    drop_pool(r);
    for (uint32_t i = 0; i < r->n_files; i++) {
        if (r->files[i].fd >= 0)
            close(r->files[i].fd);
        free(r->files[i].path);
    }
    free(r->files);
    free(r);
}
