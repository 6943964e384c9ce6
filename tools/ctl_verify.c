/* SPDX-License-Identifier: MIT */
#include "tools/ctl.h"

#include "proto/prt_file.h"
#include "proto/prt_guard.h"
#include "shm/shm_arena.h"
#include "shm/shm_bell.h"
#include "shm/shm_verify.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

struct progress {
    _Atomic uint64_t done;
    uint64_t all;
    atomic_int stop;
};

/* On a terminal only; shm_verify blocks meanwhile. */
static void *show_progress(void *arg)
{
    struct progress *p = arg;
    while (!atomic_load(&p->stop)) {
        fprintf(stderr, "\rverify: %5.1f%%",
                p->all ? 100.0 * (double)atomic_load(&p->done) / (double)p->all : 100.0);
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    fputs("\r                \r", stderr);
    return NULL;
}

static int verify_units(const struct shm_arena_view *v, const struct ctl_options *options,
                        struct shm_verify_result *ret_result, struct shm_error *err)
{
    struct progress p = {.all = v->arena->data_bytes};
    pthread_t thread;
    bool shown =
        !options->json && isatty(STDERR_FILENO) && pthread_create(&thread, NULL, show_progress, &p) == 0;
    int rc = shm_verify(v, 0, &p.done, NULL, ret_result, err);
    if (shown) {
        atomic_store(&p.stop, 1);
        pthread_join(thread, NULL);
    }
    return rc;
}

/* Catalog and checksum table against the sums in the header. */
static uint32_t verify_tables(const struct shm_arena_view *v, const char *path, bool complete)
{
    uint32_t bad = 0;
    if (XXH3_64bits(v->catalog, v->arena->catalog_bytes) != v->arena->catalog_sum) {
        fprintf(stderr, "expertctl: arena %s: the catalog does not match its checksum\n", path);
        bad++;
    }
    if (complete && XXH3_64bits(v->sums, (uint64_t)v->units * 8) != v->arena->sums_sum) {
        fprintf(stderr, "expertctl: arena %s: the checksum table does not match its own\n", path);
        bad++;
    }
    return bad;
}

int ctl_verify(const struct ctl_snapshot *snapshot, const struct ctl_options *options)
{
    char path[SHM_PATH_BYTES];
    snprintf(path, sizeof path, "%.1023s", snapshot->store->arena_path);
    struct shm_error err = {0};
    void *base;
    uint64_t bytes;
    if (prt_file_map_path(path, sizeof(struct shm_arena), false, &base, &bytes, &err)) {
        fprintf(stderr, "expertctl: %s\n", shm_error_text(&err));
        return CTL_EXIT_ATTACH;
    }
    prt_guard_add(base, bytes, "arena", path, "start expertd again, which builds it anew");
    struct shm_arena_view v;
    int status = CTL_EXIT_ATTACH;
    if (shm_arena_open(base, bytes, path, &v, &err)) {
        fprintf(stderr, "expertctl: %s\n", shm_error_text(&err));
        goto unmap;
    }
    bool complete = atomic_load_explicit(&v.arena->state, memory_order_acquire) == SHM_ARENA_COMPLETE;
    uint64_t began = shm_now_ns();
    uint32_t bad = verify_tables(&v, path, complete);
    struct shm_verify_result r;
    if (verify_units(&v, options, &r, &err))
        fprintf(stderr, "expertctl: %s\n", shm_error_text(&err));
    bad += r.bad;
    if (complete && r.missing) {
        fprintf(stderr,
                "expertctl: arena %s: %u of its units are not marked as loaded, though it is complete\n",
                path, r.missing);
        bad += r.missing;
    }
    double seconds = (double)(shm_now_ns() - began) / 1e9;
    if (options->json)
        ctl_json_print(json_pack("{s:b, s:b, s:I, s:I, s:I, s:I, s:f, s:s?}", "ok", bad == 0, "complete",
                                 complete, "checked", (json_int_t)r.checked, "missing", (json_int_t)r.missing,
                                 "bytes", (json_int_t)r.bytes, "bad", (json_int_t)bad, "seconds", seconds,
                                 "problem", err.code ? shm_error_text(&err) : NULL));
    else
        printf("%s: %u of %u units, %.1f MB checked in %.2f s, %u bad%s\n", path, r.checked, v.units,
               (double)r.bytes / 1e6, seconds, bad, complete ? "" : " (still loading)");
    status = bad ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
unmap:
    prt_guard_remove(base);
    munmap(base, bytes);
    return status;
}
