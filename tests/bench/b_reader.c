/* SPDX-License-Identifier: MIT */
/*
 * Reads one file with the file reading engine and prints GB/s; b_loader.py sets
 * the figure beside fio's.
 *
 *   b_reader FILE [uring|pread] [depth] [piece KiB] [threads] [discard|copy] [MiB]
 *
 * "copy" copies into fresh tmpfs memory with huge pages advised, as the loader does.
 */
#include "expertd/exd_reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct bench {
    uint64_t left, at;
    unsigned char *to; /* NULL: discard */
};

static int next_request(void *ctx, struct exd_reader_request *ret_request)
{
    struct bench *b = ctx;
    uint64_t n = b->left < (1u << 30) ? b->left : 1u << 30;

    if (!n)
        return 0;
    *ret_request = (struct exd_reader_request){.offset = b->at, .length = n, .tag = b->at};
    b->at += n;
    b->left -= n;
    return 1;
}

static int consume(void *ctx, uint64_t tag, uint64_t offset, const void *bytes, size_t n)
{
    struct bench *b = ctx;

    if (b->to)
        memcpy(b->to + tag + offset, bytes, n);
    return 0;
}

static unsigned number(int argc, char **argv, int i)
{
    return i < argc ? (unsigned)strtoul(argv[i], NULL, 10) : 0;
}

int main(int argc, char **argv)
{
    struct exd_reader_config config = {.io = EXD_READER_URING};
    struct exd_reader_file file = {.path = argc > 1 ? argv[1] : "", .fd = -1};
    struct bench bench = {0};
    struct exd_reader_job job = {.ctx = &bench, .next = next_request, .consume = consume};
    struct exd_reader_stats stats;
    struct exd_reader *reader;
    struct shm_error err = {0};

    if (argc < 2 || (argc > 2 && exd_reader_parse_io(argv[2], &config.io) < 0)) {
        fprintf(stderr,
                "usage: b_reader FILE [uring|pread] [depth] [piece KiB] [threads] [discard|copy] [MiB]\n");
        return 1;
    }
    config.depth = number(argc, argv, 3);
    config.piece_bytes = number(argc, argv, 4) << 10;
    config.threads = number(argc, argv, 5);
    if (exd_reader_open(&config, &file, 1, &reader, &err) < 0) {
        fprintf(stderr, "b_reader: %s\n", shm_error_text(&err));
        return 1;
    }
    bench.left = exd_reader_file_size(reader, 0);
    if (number(argc, argv, 7) && bench.left > (uint64_t)number(argc, argv, 7) << 20)
        bench.left = (uint64_t)number(argc, argv, 7) << 20;
    if (argc > 6 && !strcmp(argv[6], "copy")) {
        int fd = memfd_create("b_reader", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)bench.left) < 0)
            return 1;
        bench.to = mmap(NULL, bench.left, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (bench.to == MAP_FAILED)
            return 1;
        madvise(bench.to, bench.left, MADV_HUGEPAGE);
    }
    if (exd_reader_run(reader, &job, &stats, &err) < 0) {
        fprintf(stderr, "b_reader: %s\n", shm_error_text(&err));
        return 1;
    }
    printf("{\"gbps\": %.3f, \"seconds\": %.3f, \"bytes\": %llu, \"reads\": %llu, \"retries\": %llu, "
           "\"workers\": %u, \"how\": \"%s\"}\n",
           (double)stats.bytes_wanted / (double)stats.elapsed_ns, (double)stats.elapsed_ns / 1e9,
           (unsigned long long)stats.bytes_wanted, (unsigned long long)stats.reads,
           (unsigned long long)stats.retries, stats.workers, exd_reader_describe(reader));
    exd_reader_close(&reader);
    return 0;
}
