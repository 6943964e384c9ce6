/* SPDX-License-Identifier: MIT */
/*
 * b_load MODEL [--arena-dir DIR] [--io auto|uring|pread] [--depth N] [--piece BYTES] [--buffered] [--keep]
 *
 * Loads a model into an arena as expertd does and prints one JSON line: bytes, load seconds, GB/s,
 * seconds of allocation, and the peak of resident memory that is not the arena.
 * With --keep a second run shows adoption.
 */
#include "expertd/exd_arena.h"
#include "expertd/exd_loader.h"
#include "expertd/exd_progress.h"
#include "shm/shm_bell.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Peak of anonymous and file-mapped memory, in bytes; the arena is counted as shmem (or huge pages) and
 * is not in these. Sampled with the progress, there is no kernel counter of its peak. */
static uint64_t resident_beyond_arena(void)
{
    static const char *const key[] = {"RssAnon:", "RssFile:"};
    char line[256];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    while (f && fgets(line, sizeof line, f))
        for (unsigned i = 0; i < 2; i++)
            if (strncmp(line, key[i], strlen(key[i])) == 0)
                kib += strtoull(line + strlen(key[i]), NULL, 10);
    if (f)
        fclose(f);
    return kib * 1024;
}

struct watch {
    struct exd_progress bar;
    uint64_t peak;
};

static void progress(void *ctx, const struct exd_loader_progress *p)
{
    struct watch *w = ctx;
    uint64_t now = resident_beyond_arena();
    if (now > w->peak)
        w->peak = now;
    if (p->finished)
        exd_progress_finish(&w->bar, p->done_bytes, p->total_bytes, p->elapsed_ns, p->units_done == p->units);
    else
        exd_progress_update(&w->bar, p->done_bytes, p->total_bytes, p->elapsed_ns);
}

static void log_line(void *ctx, bool warning, const char *line)
{
    (void)ctx;
    fprintf(stderr, "%s%s\n", warning ? "warning: " : "", line);
}

static int usage(void)
{
    fprintf(stderr, "usage: b_load MODEL [--arena-dir DIR] [--io auto|uring|pread] [--depth N] "
                    "[--piece BYTES] [--buffered] [--keep]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option option[] = {{"arena-dir", required_argument, NULL, 'a'},
                                           {"io", required_argument, NULL, 'i'},
                                           {"depth", required_argument, NULL, 'd'},
                                           {"piece", required_argument, NULL, 'p'},
                                           {"buffered", no_argument, NULL, 'b'},
                                           {"keep", no_argument, NULL, 'k'},
                                           {NULL, 0, NULL, 0}};
    struct exd_arena_config ac = {.instance = "bench", .instance_dir = "/tmp", .log = log_line};
    struct exd_loader_config lc = {.progress = progress};
    bool keep = false;
    int o;
    while ((o = getopt_long(argc, argv, "", option, NULL)) != -1) {
        if (o == 'a')
            ac.arena_dir = optarg;
        else if (o == 'd')
            lc.reader.depth = (uint32_t)strtoul(optarg, NULL, 10);
        else if (o == 'p')
            lc.reader.piece_bytes = (uint32_t)strtoul(optarg, NULL, 10);
        else if (o == 'b')
            lc.reader.buffered = true;
        else if (o == 'k')
            keep = true;
        else if (o != 'i' || exd_reader_parse_io(optarg, &lc.reader.io) != 0)
            return usage();
    }
    if (optind + 1 != argc)
        return usage();

    struct prt_gguf *gguf = NULL;
    struct exd_model *model = NULL;
    struct exd_plan *plan = NULL;
    struct exd_arena *arena = NULL;
    struct exd_loader *loader = NULL;
    struct shm_error err = {0};
    struct exd_reader_stats stats = {0};
    struct watch watch = {0};
    exd_progress_init(&watch.bar, STDERR_FILENO, "loading");
    lc.progress_ctx = &watch;
    uint64_t t0 = shm_now_ns();
    int rc = prt_gguf_open(argv[optind], &gguf, &err);
    if (!rc)
        rc = exd_model_open(gguf, &model, &err);
    if (!rc)
        rc = exd_plan_make(model, &plan, &err);
    uint64_t t1 = shm_now_ns();
    if (!rc)
        rc = exd_arena_open(&ac, plan, &arena, &err);
    uint64_t t2 = shm_now_ns();
    if (!rc && !exd_arena_complete(arena)) {
        lc.model = model;
        lc.arena = arena;
        rc = exd_loader_start(&lc, &loader, &err);
        if (!rc)
            rc = exd_loader_wait(loader, &stats, &err);
        if (!rc)
            fprintf(stderr, "%s\n", exd_loader_describe(loader));
    }
    uint64_t t3 = shm_now_ns();
    if (rc) {
        fprintf(stderr, "b_load: %s\n", shm_error_text(&err));
    } else {
        struct exd_arena_info info;
        exd_arena_info(arena, &info);
        printf("{\"arena_bytes\": %llu, \"adopted\": %s, \"header_s\": %.4f, \"open_s\": %.4f, \"load_s\": "
               "%.4f, "
               "\"bytes\": %llu, \"read\": %llu, \"gbps\": %.3f, \"beyond_arena_bytes\": %llu}\n",
               (unsigned long long)info.bytes, info.found == EXD_FOUND_ADOPTED ? "true" : "false",
               (double)(t1 - t0) / 1e9, (double)(t2 - t1) / 1e9, (double)(t3 - t2) / 1e9,
               (unsigned long long)stats.bytes_wanted, (unsigned long long)stats.bytes_read,
               t3 > t2 ? (double)stats.bytes_wanted / (double)(t3 - t2) : 0, (unsigned long long)watch.peak);
    }
    exd_loader_destroy(&loader);
    exd_arena_close(&arena, keep);
    exd_plan_free(&plan);
    exd_model_close(&model);
    prt_gguf_close(&gguf);
    return rc ? 1 : 0;
}
