/* SPDX-License-Identifier: MIT */
#include "tools/ctl.h"

#include "proto/prt_file.h"
#include "shm/shm_arena.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

struct verified {
    uint64_t units, bytes, bad;
    bool complete;
};

static void progress(const struct ctl_options *options, uint64_t done, uint64_t all)
{
    if (!options->json && isatty(STDERR_FILENO))
        fprintf(stderr, "\rverify: %5.1f%%", all ? 100.0 * (double)done / (double)all : 100.0);
}

static void check_unit(const struct shm_arena_view *v, uint32_t unit, const void *bytes, uint64_t n,
                       struct verified *r)
{
    r->units++;
    r->bytes += n;
    if (XXH3_64bits(bytes, n) == v->sums[unit])
        return;
    if (unit < v->catalog->n_dense)
        fprintf(stderr, "expertctl: arena: tensor %s does not match its checksum\n", v->dense[unit].name);
    else {
        uint32_t blob = unit - v->catalog->n_dense, experts = v->catalog->hparams.experts;
        fprintf(stderr, "expertctl: arena: expert %u of layer %u does not match its checksum\n",
                blob % experts, blob / experts);
    }
    r->bad++;
}

static void check_all(const struct shm_arena_view *v, const struct ctl_options *options, struct verified *r)
{
    for (uint32_t i = 0; i < v->catalog->n_dense; i++)
        if (shm_arena_ready(v, i))
            check_unit(v, i, v->base + v->dense[i].offset, v->dense[i].bytes, r);
    for (uint32_t l = 0; l < v->catalog->n_layers; l++) {
        for (uint32_t e = 0; e < v->catalog->hparams.experts; e++) {
            uint32_t unit = shm_arena_blob_unit(v, l, e);
            if (shm_arena_ready(v, unit))
                check_unit(v, unit, shm_arena_blob(v, l, e), v->layers[l].blob_bytes, r);
        }
        progress(options, r->bytes, v->arena->data_bytes);
    }
    if (!options->json && isatty(STDERR_FILENO))
        fputc('\n', stderr);
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
    struct shm_arena_view v;
    struct verified r = {0};
    int status = CTL_EXIT_ATTACH;
    if (shm_arena_open(base, bytes, path, &v, &err)) {
        fprintf(stderr, "expertctl: %s\n", shm_error_text(&err));
        goto unmap;
    }
    r.complete = atomic_load_explicit(&v.arena->state, memory_order_acquire) == SHM_ARENA_COMPLETE;
    uint64_t began = shm_now_ns();
    if (XXH3_64bits(v.catalog, v.arena->catalog_bytes) != v.arena->catalog_sum) {
        fprintf(stderr, "expertctl: arena %s: the catalog does not match its checksum\n", path);
        r.bad++;
    }
    if (r.complete && XXH3_64bits(v.sums, (uint64_t)v.units * 8) != v.arena->sums_sum) {
        fprintf(stderr, "expertctl: arena %s: the checksum table does not match its own\n", path);
        r.bad++;
    }
    check_all(&v, options, &r);
    double seconds = (double)(shm_now_ns() - began) / 1e9;
    if (options->json)
        ctl_json_print(json_pack("{s:b, s:b, s:I, s:I, s:I, s:f}", "ok", r.bad == 0, "complete", r.complete,
                                 "units", (json_int_t)r.units, "bytes", (json_int_t)r.bytes, "bad",
                                 (json_int_t)r.bad, "seconds", seconds));
    else
        printf("%s: %" PRIu64 " of %u units, %.1f MB checked in %.2f s, %" PRIu64 " bad%s\n", path, r.units,
               v.units, (double)r.bytes / 1e6, seconds, r.bad, r.complete ? "" : " (still loading)");
    status = r.bad ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
unmap:
    munmap(base, bytes);
    return status;
}
