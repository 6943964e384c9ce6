/* SPDX-License-Identifier: MIT */
/*
 * File reading engine: same bytes from both back ends at odd offsets and
 * lengths, each error return provoked through the fault hook or a cut file.
 */
#include "expertd/exd_reader.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_BYTES ((3u << 20) + 1237u)
#define MAX_RANGES 512

struct fixture {
    char path[2][64];
    size_t bytes[2];
    struct exd_reader_request ranges[MAX_RANGES];
    unsigned n_ranges, next_range;
    unsigned char *out[MAX_RANGES];  /* what consume stored */
    unsigned char *seen[MAX_RANGES]; /* how often each byte came */
    atomic_uint calls;
    atomic_int cancel;
    unsigned cancel_at_call; /* 0: never */
    int consume_result;
    int next_result; /* at the end instead of 0 */
};

/* Byte i of file f, so that neither a shift nor a swapped file goes unseen. */
static unsigned char byte_at(unsigned f, uint64_t i)
{
    uint64_t x = (i + 1 + f * 1000003u) * 0x9e3779b97f4a7c15u;
    return (unsigned char)(x >> 41);
}

static void make_file(struct fixture *fx, unsigned f, size_t bytes)
{
    unsigned char *data = malloc(bytes + 1);
    FILE *out;

    for (size_t i = 0; i < bytes; i++)
        data[i] = byte_at(f, i);
    snprintf(fx->path[f], sizeof fx->path[f], "./t_reader.%d.%u", (int)getpid(), f);
    out = fopen(fx->path[f], "wb");
    cr_assert(out && fwrite(data, 1, bytes, out) == bytes);
    fclose(out);
    free(data);
    fx->bytes[f] = bytes;
}

static void add(struct fixture *fx, unsigned f, uint64_t offset, uint64_t length)
{
    unsigned i = fx->n_ranges++;

    cr_assert(i < MAX_RANGES);
    fx->ranges[i] = (struct exd_reader_request){.file = f, .offset = offset, .length = length, .tag = i};
    if (length <= FILE_BYTES) {
        fx->out[i] = calloc(1, length + 1);
        fx->seen[i] = calloc(1, length + 1);
    }
}

static int next_range(void *ctx, struct exd_reader_request *ret_request)
{
    struct fixture *fx = ctx;

    if (fx->next_range == fx->n_ranges)
        return fx->next_result;
    *ret_request = fx->ranges[fx->next_range++];
    return 1;
}

static int store(void *ctx, uint64_t tag, uint64_t offset, const void *bytes, size_t n)
{
    struct fixture *fx = ctx;
    unsigned call = atomic_fetch_add(&fx->calls, 1) + 1;

    if (fx->cancel_at_call && call == fx->cancel_at_call)
        atomic_store(&fx->cancel, 1);
    if (fx->consume_result)
        return fx->consume_result;
    if (tag >= fx->n_ranges || offset + n > fx->ranges[tag].length)
        return -ERANGE;
    memcpy(fx->out[tag] + offset, bytes, n);
    for (size_t i = 0; i < n; i++)
        fx->seen[tag][offset + i]++;
    return 0;
}

static void check_bytes(const struct fixture *fx)
{
    for (unsigned r = 0; r < fx->n_ranges; r++) {
        const struct exd_reader_request *rq = &fx->ranges[r];
        for (uint64_t i = 0; i < rq->length; i++)
            cr_assert(fx->seen[r][i] == 1 && fx->out[r][i] == byte_at(rq->file, rq->offset + i),
                      "range %u byte %llu (file %u offset %llu): seen %u", r, (unsigned long long)i, rq->file,
                      (unsigned long long)(rq->offset + i), fx->seen[r][i]);
    }
}

static int run(struct fixture *fx, const struct exd_reader_config *config, struct exd_reader_stats *stats,
               struct shm_error *err)
{
    struct exd_reader_file files[2] = {{fx->path[0], -1}, {fx->path[1], -1}};
    struct exd_reader_job job = {.ctx = fx, .next = next_range, .consume = store, .cancel = &fx->cancel};
    struct exd_reader *reader = NULL;
    int r = exd_reader_open(config, files, fx->path[1][0] ? 2 : 1, &reader, err);

    cr_assert_eq(r, 0, "%s", err->text);
    r = exd_reader_run(reader, &job, stats, err);
    cr_assert_leq(exd_reader_file_size(reader, 0), FILE_BYTES);
    exd_reader_close(&reader);
    cr_assert_null(reader);
    return r;
}

static void drop(struct fixture *fx)
{
    for (unsigned i = 0; i < fx->n_ranges; i++) {
        free(fx->out[i]);
        free(fx->seen[i]);
    }
    for (unsigned f = 0; f < 2; f++)
        if (fx->path[f][0])
            unlink(fx->path[f]);
}

/* ---- the configurations every data test runs with ---- */

static const struct exd_reader_config configs[] = {
    {.io = EXD_READER_AUTO},
    {.io = EXD_READER_URING, .depth = 1, .piece_bytes = 64 << 10},
    {.io = EXD_READER_URING, .depth = 7, .piece_bytes = 16 << 10, .threads = 3},
    {.io = EXD_READER_URING, .depth = 4, .piece_bytes = 128 << 10, .buffered = true},
    {.io = EXD_READER_PREAD},
    {.io = EXD_READER_PREAD, .threads = 1, .piece_bytes = 16 << 10},
    {.io = EXD_READER_PREAD, .threads = 5, .piece_bytes = 16 << 10, .buffered = true},
};
#define N_CONFIGS (sizeof configs / sizeof *configs)

TestSuite(reader, .timeout = 60);

Test(reader, odd_ranges_have_the_files_bytes)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        struct fixture fx = {0};
        struct shm_error err = {0};
        struct exd_reader_stats stats;
        unsigned state = 7;
        uint64_t wanted = 0;

        make_file(&fx, 0, FILE_BYTES);
        make_file(&fx, 1, 5000);
        add(&fx, 0, 0, 1);
        add(&fx, 0, 4095, 2);
        add(&fx, 0, 4097, 300001);
        add(&fx, 0, 304098, 65536); /* joins the one before */
        add(&fx, 0, 100, 0);
        add(&fx, 0, FILE_BYTES - 1237, 1237); /* unaligned tail */
        add(&fx, 0, FILE_BYTES - 1, 1);
        add(&fx, 0, FILE_BYTES, 0);
        add(&fx, 1, 0, 5000);
        add(&fx, 1, 4096, 904);
        add(&fx, 0, 77, (2u << 20) + 5);
        for (unsigned i = 0; i < 200; i++) { /* small neighbours, gaps, steps back, another file */
            uint64_t offset;
            state = state * 1103515245u + 12345u;
            offset = (state >> 8) % (FILE_BYTES - 9000);
            add(&fx, 0, i % 3 ? 50000 + i * 211ull : offset, 1 + (state >> 20) % 8000);
        }
        for (unsigned i = 0; i < fx.n_ranges; i++)
            wanted += fx.ranges[i].length;
        cr_assert_eq(run(&fx, &configs[c], &stats, &err), 0, "config %zu: %s", c, err.text);
        check_bytes(&fx);
        cr_assert_eq(stats.bytes_wanted, wanted);
        cr_assert(stats.reads > 0 && stats.workers >= 1);
        drop(&fx);
    }
}

Test(reader, tiny_and_empty_files)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        struct fixture fx = {0};
        struct shm_error err = {0};

        make_file(&fx, 0, 3);
        make_file(&fx, 1, 0);
        add(&fx, 0, 1, 2);
        add(&fx, 1, 0, 0);
        cr_assert_eq(run(&fx, &configs[c], NULL, &err), 0, "config %zu: %s", c, err.text);
        check_bytes(&fx);
        drop(&fx);
    }
}

Test(reader, neighbours_share_reads)
{
    struct fixture fx = {0};
    struct shm_error err = {0};
    struct exd_reader_stats stats;

    make_file(&fx, 0, FILE_BYTES);
    for (unsigned i = 0; i < 60; i++)
        add(&fx, 0, 33 + i * 9216ull, 9216);
    cr_assert_eq(run(&fx, &configs[0], &stats, &err), 0, "%s", err.text);
    check_bytes(&fx);
    cr_assert_eq(stats.reads, 1);
    cr_assert_leq(stats.bytes_read, 60 * 9216 + 8192);
    drop(&fx);
}

/* ---- faults ---- */

struct fault {
    atomic_uint hits;
    uint64_t first, last; /* reads that are changed */
    int32_t result;       /* negative errno; 0 or more: at most that many bytes */
};

static int32_t change_result(void *ctx, uint64_t seq, uint32_t file, uint64_t offset, uint32_t length,
                             int32_t result)
{
    struct fault *fault = ctx;

    (void)file, (void)offset, (void)length;
    if (seq < fault->first || seq > fault->last)
        return result;
    atomic_fetch_add(&fault->hits, 1);
    return fault->result < 0 || result > fault->result ? fault->result : result;
}

static int run_with_fault(struct fixture *fx, struct exd_reader_config config, struct fault *fault,
                          struct exd_reader_stats *stats, struct shm_error *err)
{
    struct exd_reader_faults hooks = {.after_read = change_result, .ctx = fault};

    config.faults = &hooks;
    make_file(fx, 0, FILE_BYTES);
    add(fx, 0, 5, FILE_BYTES - 5);
    return run(fx, &config, stats, err);
}

/* N = 0, 1, 2...: fail the Nth read, until a run passes without meeting its fault. */
Test(reader, nth_read_fails_with_a_named_error)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        for (uint64_t nth = 0;; nth += nth < 5 ? 1 : 50) {
            struct fixture fx = {0};
            struct fault fault = {.first = nth, .last = nth, .result = -EIO};
            struct shm_error err = {0};
            int r = run_with_fault(&fx, configs[c], &fault, NULL, &err);

            if (fault.hits) {
                cr_assert_eq(r, -EIO);
                cr_assert(strstr(err.text, fx.path[0]) && strstr(err.text, "offset"), "%s", err.text);
            } else {
                cr_assert_eq(r, 0, "%s", err.text);
                check_bytes(&fx);
            }
            drop(&fx);
            if (!fault.hits)
                break;
        }
    }
}

Test(reader, interrupted_and_short_reads_are_continued)
{
    static const int32_t results[] = {-EINTR, -EAGAIN, 1, 4096, 5001, 12000};

    for (size_t c = 0; c < N_CONFIGS; c++) {
        for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
            struct fixture fx = {0};
            /* Only the first read of a piece may be below the alignment, or O_DIRECT cannot get on. */
            struct fault fault = {.first = 0, .last = results[i] > 5000 ? 9 : 0, .result = results[i]};
            struct shm_error err = {0};
            struct exd_reader_stats stats;

            cr_assert_eq(run_with_fault(&fx, configs[c], &fault, &stats, &err), 0, "config %zu result %d: %s",
                         c, results[i], err.text);
            cr_assert(fault.hits && stats.retries > 0);
            check_bytes(&fx);
            drop(&fx);
        }
    }
}

Test(reader, endless_eagain_is_given_up)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        struct fixture fx = {0};
        struct fault fault = {.first = 0, .last = UINT64_MAX, .result = -EAGAIN};
        struct shm_error err = {0};

        cr_assert_eq(run_with_fault(&fx, configs[c], &fault, NULL, &err), -EAGAIN);
        drop(&fx);
    }
}

/* The file shrinks after open: what is read then is an error with the place, never zeros. */
Test(reader, file_cut_while_reading)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        struct fixture fx = {0};
        struct shm_error err = {0};
        struct exd_reader *reader = NULL;
        struct exd_reader_job job = {.ctx = &fx, .next = next_range, .consume = store};
        struct exd_reader_file file;

        make_file(&fx, 0, FILE_BYTES);
        file = (struct exd_reader_file){fx.path[0], -1};
        add(&fx, 0, 0, FILE_BYTES);
        cr_assert_eq(exd_reader_open(&configs[c], &file, 1, &reader, &err), 0, "%s", err.text);
        cr_assert_eq(truncate(fx.path[0], 2000001), 0);
        cr_assert_eq(exd_reader_run(reader, &job, NULL, &err), -ENODATA);
        cr_assert(strstr(err.text, fx.path[0]), "%s", err.text);
        if (configs[c].depth == 1)
            cr_assert(strstr(err.text, "ends at byte 2000001"), "%s", err.text);
        /* A second run of the same reader works where the bytes are there. */
        fx.next_range = 0;
        fx.ranges[0].length = 100;
        memset(fx.seen[0], 0, 100);
        cr_assert_eq(exd_reader_run(reader, &job, NULL, &err), 0, "%s", err.text);
        check_bytes(&fx);
        exd_reader_close(&reader);
        drop(&fx);
    }
}

Test(reader, range_outside_the_file_is_refused)
{
    static const uint64_t bad[][2] = {
        {FILE_BYTES, 1}, {0, FILE_BYTES + 1ull}, {UINT64_MAX, 2}, {2, UINT64_MAX}};

    for (size_t c = 0; c < N_CONFIGS; c++) {
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            struct fixture fx = {0};
            struct shm_error err = {0};

            make_file(&fx, 0, FILE_BYTES);
            add(&fx, 0, 0, 10);
            add(&fx, 0, bad[i][0], bad[i][1]);
            cr_assert_eq(run(&fx, &configs[c], NULL, &err), -ERANGE);
            cr_assert(strstr(err.text, fx.path[0]), "%s", err.text);
            drop(&fx);
        }
    }
    struct fixture fx = {0};
    struct shm_error err = {0};
    make_file(&fx, 0, 10);
    add(&fx, 1, 0, 1);
    cr_assert_eq(run(&fx, &configs[0], NULL, &err), -ERANGE);
    drop(&fx);
}

Test(reader, cancelled_by_the_flag)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        struct fixture fx = {0};
        struct shm_error err = {0};

        make_file(&fx, 0, FILE_BYTES);
        add(&fx, 0, 0, FILE_BYTES);
        fx.cancel_at_call = 2;
        cr_assert_eq(run(&fx, &configs[c], NULL, &err), -ECANCELED);
        cr_assert_leq(fx.calls, 8); /* those already under way, no more */
        drop(&fx);
    }
}

Test(reader, client_errors_end_the_run)
{
    for (size_t c = 0; c < N_CONFIGS; c++) {
        struct fixture fx = {.consume_result = -ENOSPC};
        struct shm_error err = {0};

        make_file(&fx, 0, FILE_BYTES);
        add(&fx, 0, 0, FILE_BYTES);
        cr_assert_eq(run(&fx, &configs[c], NULL, &err), -ENOSPC);
        cr_assert(strstr(err.text, fx.path[0]), "%s", err.text);
        drop(&fx);

        fx = (struct fixture){.next_result = -EBADMSG};
        make_file(&fx, 0, FILE_BYTES);
        add(&fx, 0, 0, 10);
        cr_assert_eq(run(&fx, &configs[c], NULL, &err), -EBADMSG);
        drop(&fx);
    }
}

/* ---- choice of back end ---- */

static int refuse(void *ctx)
{
    return *(int *)ctx;
}

static int refuse_direct(void *ctx, uint32_t file)
{
    (void)file;
    return *(int *)ctx;
}

static void expect_description(const struct exd_reader_config *config, const char *a, const char *b)
{
    struct fixture fx = {0};
    struct shm_error err = {0};
    struct exd_reader *reader = NULL;
    struct exd_reader_job job = {.ctx = &fx, .next = next_range, .consume = store};
    struct exd_reader_file file;

    make_file(&fx, 0, FILE_BYTES);
    file = (struct exd_reader_file){fx.path[0], -1};
    add(&fx, 0, 1, FILE_BYTES - 1);
    cr_assert_eq(exd_reader_open(config, &file, 1, &reader, &err), 0, "%s", err.text);
    cr_assert(strstr(exd_reader_describe(reader), a) && strstr(exd_reader_describe(reader), b), "%s",
              exd_reader_describe(reader));
    cr_assert_eq(exd_reader_run(reader, &job, NULL, &err), 0, "%s", err.text);
    check_bytes(&fx);
    exd_reader_close(&reader);
    drop(&fx);
}

Test(reader, description_says_what_is_active_and_why)
{
    int code = -EPERM;
    struct exd_reader_faults hooks = {.setup = refuse, .ctx = &code};
    struct exd_reader_config config = {.faults = &hooks};
    struct exd_reader_file file = {"/dev/null", -1};
    struct exd_reader *reader = NULL;
    struct shm_error err = {0};

    expect_description(&configs[0], "io_uring, O_DIRECT, depth 16 x 1024 KiB", "registered buffers");
    expect_description(&config, "pread pool, 4 threads", "io_uring refused (EPERM)");
    code = -ENOSYS;
    expect_description(&config, "pread pool, 4 threads", "io_uring refused (ENOSYS)");
    config.io = EXD_READER_PREAD;
    expect_description(&config, "pread pool", "asked for");
    config.io = EXD_READER_URING;
    {
        struct fixture fx = {0};
        make_file(&fx, 0, 10);
        file.path = fx.path[0];
        cr_assert_eq(exd_reader_open(&config, &file, 1, &reader, &err), -ENOSYS);
        drop(&fx);
    }

    code = -ENOMEM;
    hooks = (struct exd_reader_faults){.register_buffers = refuse, .ctx = &code};
    expect_description(&config, "io_uring", "unregistered buffers (ENOMEM, memlock limit");
    code = -EINVAL;
    hooks = (struct exd_reader_faults){.open_direct = refuse_direct, .ctx = &code};
    expect_description(&config, "io_uring", "buffered (O_DIRECT refused: EINVAL)");
    config = (struct exd_reader_config){.depth = 200, .piece_bytes = 1 << 20};
    expect_description(&config, "depth 64 x 1024 KiB", "");

    setenv("EXPERTD_IO", "pread", 1);
    expect_description(&configs[0], "pread pool", "asked for");
    setenv("EXPERTD_IO", "fast", 1);
    cr_assert_eq(exd_reader_open(NULL, &file, 1, &reader, &err), -EINVAL);
    cr_assert(strstr(err.text, "EXPERTD_IO=fast"), "%s", err.text);
    unsetenv("EXPERTD_IO");
}

Test(reader, bad_settings_and_files_are_named)
{
    struct exd_reader_file file = {"./no-such-file", -1};
    struct exd_reader *reader = NULL;
    struct shm_error err = {0};
    struct exd_reader_config bad[] = {{.depth = 257},        {.piece_bytes = 5000},
                                      {.piece_bytes = 4096}, {.piece_bytes = 32 << 20},
                                      {.threads = 1000},     {.io = EXD_READER_IO_COUNT}};

    cr_assert_eq(exd_reader_open(NULL, &file, 1, &reader, &err), -ENOENT);
    cr_assert(strstr(err.text, "./no-such-file"), "%s", err.text);
    file.path = "/tmp";
    cr_assert_lt(exd_reader_open(NULL, &file, 1, &reader, &err), 0);
    cr_assert_eq(exd_reader_open(NULL, &file, 0, &reader, &err), -EINVAL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(exd_reader_open(&bad[i], &file, 1, &reader, &err), -EINVAL, "%zu", i);
    cr_assert_null(reader);
    exd_reader_close(&reader);
}

/* A borrowed descriptor decides which inode is read, also after a rename over the path. */
Test(reader, descriptor_wins_over_path)
{
    struct fixture fx = {0};
    struct shm_error err = {0};
    struct exd_reader *reader = NULL;
    struct exd_reader_job job = {.ctx = &fx, .next = next_range, .consume = store};
    struct exd_reader_file file;
    int fd;

    make_file(&fx, 0, 9000);
    make_file(&fx, 1, 8000);
    fd = open(fx.path[0], O_RDONLY | O_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_eq(rename(fx.path[1], fx.path[0]), 0);
    fx.path[1][0] = 0;
    file = (struct exd_reader_file){fx.path[0], fd};
    cr_assert_eq(exd_reader_open(NULL, &file, 1, &reader, &err), 0, "%s", err.text);
    close(fd);
    cr_assert_eq(exd_reader_file_size(reader, 0), 9000);
    add(&fx, 0, 0, 9000);
    cr_assert_eq(exd_reader_run(reader, &job, NULL, &err), 0, "%s", err.text);
    check_bytes(&fx);
    exd_reader_close(&reader);
    drop(&fx);
}
