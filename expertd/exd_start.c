/* SPDX-License-Identifier: MIT */
#include "expertd/exd_daemon_priv.h"
#include "expertd/exd_log.h"
#include "expertd/exd_region.h"
#include "proto/prt_memory.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* From loader threads, one at a time. */
static void on_progress(void *ctx, const struct exd_loader_progress *p)
{
    struct exd_start *s = ctx;
    struct shm_store_counters *c = &s->segment->counters;
    shm_counter_set(&c->load_wanted_bytes, p->total_bytes);
    shm_counter_set(&c->load_bytes, p->done_bytes);
    shm_counter_set(&c->load_ns, p->elapsed_ns);
    if (!s->show_progress)
        return;
    if (p->finished) {
        exd_progress_finish(&s->progress, p->done_bytes, p->total_bytes, p->elapsed_ns,
                            p->done_bytes == p->total_bytes);
        exd_log_set_bar(false);
    } else {
        exd_progress_update(&s->progress, p->done_bytes, p->total_bytes, p->elapsed_ns);
        exd_log_set_bar(s->progress.drawn);
    }
}

uint64_t exd_start_look(struct exd_start *s)
{
    struct shm_store_counters *c = &s->segment->counters;
    uint64_t begin_ns = shm_now_ns(), registered = shm_counter_get(&c->registered_bytes);
    struct exd_region r;
    exd_region_look(exd_arena_base(s->arena), exd_arena_view(s->arena)->mapped_bytes, &r);
    shm_counter_set(&c->arena_pinned_bytes, registered ? registered : r.locked_bytes);
    shm_counter_set(&c->arena_huge_bytes, r.huge_bytes);
    shm_counter_set(&c->arena_page_bytes, r.page_bytes);
    shm_counter_set(&c->arena_numa_node, (uint64_t)r.node);
    shm_counter_set(&c->arena_numa_sampled, r.sampled);
    shm_counter_set(&c->arena_numa_away, r.away);
    return shm_now_ns() - begin_ns;
}

#define PARK_AUTO_MIN (UINT64_C(16) << 20)

/* The largest file for which nothing stands in the way in dir now, to a MiB or so; 0: not even a small one.
 */
static uint64_t available(const char *dir)
{
    uint64_t low = 0, high = PRT_PARK_SHARE * PRT_PARK_AUTO_MAX;
    struct shm_error ignored;
    while (high - low > (1u << 20) && high - low > high / 64) {
        uint64_t middle = low + (high - low) / 2;
        struct exd_limits_need need = {.dir = dir, .file_bytes = middle};
        if (exd_limits_check(&need, &ignored) == 0)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Beside the arena; where that is no ordinary memory file system, in the instance's directory. What was asked
 * for and can't be had is an error; what nobody asked for is only told. */
static int open_park(struct exd_daemon *d)
{
    struct exd_start *s = &d->start;
    const struct exd_options *o = d->options;
    struct exd_arena_info info;
    exd_arena_info(s->arena, &info);
    char dir[SHM_PATH_BYTES];
    snprintf(dir, sizeof(dir), "%s", info.path);
    *strrchr(dir, '/') = '\0';
    exd_park_sweep(dir);
    exd_park_sweep(d->paths.dir);
    enum exd_fs fs = info.fs;
    if (fs != EXD_FS_TMPFS) {
        snprintf(dir, sizeof(dir), "%s", d->paths.dir);
        if (exd_limits_fs(dir, &fs) < 0)
            fs = EXD_FS_OTHER;
    }
    uint64_t bytes = o->park_bytes;
    if (!o->park_auto && !bytes) {
        snprintf(s->park_note, sizeof(s->park_note), "off (--park)");
        return 0;
    }
    if (fs != EXD_FS_TMPFS) {
        snprintf(s->park_note, sizeof(s->park_note),
                 "off: neither arena nor runtime directory is on a tmpfs: choose one with --runtime-dir");
        if (o->park_auto)
            return 0;
        return shm_error_set(&s->error, ENOTSUP, "--park: parked keys and values are %s, or leave out --park",
                             s->park_note);
    }
    if (o->park_auto) {
        bytes = available(dir) / PRT_PARK_SHARE;
        bytes = bytes > PRT_PARK_AUTO_MAX ? PRT_PARK_AUTO_MAX : bytes & ~UINT64_C(0xfffff);
        if (s->budget.limit_bytes && bytes > s->budget.park_bytes)
            bytes = s->budget.park_bytes;
        if (bytes < PARK_AUTO_MIN) {
            snprintf(s->park_note, sizeof(s->park_note),
                     "off: too little memory is available for it%s: give --park SIZE to have it",
                     s->budget.limit_bytes ? " (--memory-budget)" : "");
            return 0;
        }
    } else {
        struct exd_limits_need need = {.dir = dir, .file_bytes = bytes};
        struct shm_error why;
        int rc = exd_limits_check(&need, &why);
        if (rc < 0) {
            char asked[24], most[24];
            prt_size_text(bytes, asked);
            prt_size_text(available(dir), most);
            return shm_error_set(
                &s->error, rc,
                "--park: %s are asked for, there is room for %s in %.200s (size of the tmpfs, available "
                "memory, cgroup and limits of the process counted): give less, auto or off",
                asked, most, dir);
        }
    }
    struct exd_park_config config = {.dir = dir, .bytes = bytes};
    memcpy(config.model, exd_arena_view(s->arena)->arena->fingerprint, sizeof(config.model));
    struct shm_error why = {0};
    int rc = exd_park_open(&config, &s->park, &why);
    if (rc == 0)
        snprintf(s->park_note, sizeof(s->park_note), "%.127s", exd_park_path(s->park));
    else if (o->park_auto)
        snprintf(s->park_note, sizeof(s->park_note), "off: %.120s", shm_error_text(&why));
    else
        s->error = why;
    return o->park_auto ? 0 : rc;
}

void exd_start_show_park(struct exd_daemon *d)
{
    struct shm_store_counters *c = &exd_store_segment(d->store)->counters;
    struct exd_park_stats now;
    if (!d->start.park)
        return;
    exd_park_stats(d->start.park, &now);
    shm_counter_set(&c->park_bytes, now.bytes);
    shm_counter_set(&c->park_held_bytes, now.held_bytes);
    shm_counter_set(&c->park_blocks, now.kept);
    shm_counter_set(&c->park_committed, now.committed);
    shm_counter_set(&c->park_found, now.found);
    shm_counter_set(&c->park_ignored, now.ignored);
    shm_counter_set(&c->park_evicted, now.evicted);
    shm_counter_set(&c->park_wrong, now.wrong);
}

/* Where everything is, for other instances and for expertctl evict. */
static void settle(struct exd_start *s)
{
    struct exd_arena_info info;
    struct exd_park_stats park = {0};
    exd_arena_info(s->arena, &info);
    if (s->park)
        exd_park_stats(s->park, &park);
    exd_budget_settle(&s->budget, info.path, park.bytes);
}

/* Told before the arena takes memory: who is killed meanwhile leaves nothing that nobody counts. */
static void on_placed(void *ctx, const char *path)
{
    struct exd_start *s = ctx;
    exd_budget_settle(&s->budget, path, s->budget.park_bytes);
}

static int open_all(struct exd_daemon *d)
{
    struct exd_start *s = &d->start;
    const struct exd_options *o = d->options;
    int rc = exd_device_begin(o->device, o->device_ordinal, &s->device, &s->error);
    if (rc < 0)
        return rc;
    rc = prt_gguf_open(d->model_path, &s->gguf, &s->error);
    if (rc < 0)
        return rc;
    rc = exd_model_open(s->gguf, &s->model, &s->error);
    if (rc < 0)
        return rc;
    rc = exd_plan_make(s->model, &s->plan, &s->error);
    if (rc < 0)
        return rc;
    rc = exd_budget_claim(&d->paths, o->memory_budget, s->plan->total_bytes, o->park_bytes, o->park_auto,
                          &s->budget, &s->error);
    if (rc < 0)
        return rc;
    struct exd_arena_config arena = {.instance = d->paths.instance,
                                     .instance_dir = d->paths.dir,
                                     .arena_dir = o->arena_dir,
                                     .pin = o->pin,
                                     .cancel = &s->cancel,
                                     .log = exd_log_note,
                                     .placed = on_placed,
                                     .placed_ctx = s};
    /* Before memory is taken, and before many page faults: they would keep the driver from mapping its own.
     */
    rc = exd_device_end(s->device, &s->error);
    if (rc < 0)
        return rc;
    arena.pin_later = exd_device_gpus(s->device) > 0;
    rc = exd_arena_open(&arena, s->plan, &s->arena, &s->error);
    if (rc == -ENOMEM || rc == -ENOSPC)
        exd_budget_explain(&d->paths, &s->error);
    if (rc < 0)
        return rc;
    if (arena.pin_later) {
        bool adopted = exd_arena_complete(s->arena);
        uint64_t begin_ns = shm_now_ns();
        rc = exd_device_register(s->device, exd_arena_view(s->arena), exd_arena_base(s->arena), adopted,
                                 &s->cancel, &s->error);
        if (rc == 0 && exd_device_gpus(s->device) > 0) {
            shm_counter_set(&s->segment->counters.register_ns, shm_now_ns() - begin_ns);
            shm_counter_set(&s->segment->counters.registered_bytes, exd_arena_view(s->arena)->mapped_bytes);
        }
        if (rc == 0)
            rc = exd_arena_pin(s->arena, &arena, exd_device_gpus(s->device) > 0, &s->error);
        if (rc < 0)
            return rc;
    }
    rc = open_park(d);
    settle(s);
    if (rc < 0 || exd_arena_complete(s->arena))
        return rc;
    struct exd_loader_config loader = {.model = s->model,
                                       .arena = s->arena,
                                       .reader = {.io = o->io,
                                                  .depth = o->io_depth,
                                                  .live_depth = &s->segment->counters.io_depth,
                                                  .live_reads = &s->segment->counters.io_in_flight},
                                       .progress = on_progress,
                                       .progress_ctx = s};
    rc = exd_loader_start(&loader, &s->loader, &s->error);
    if (rc == 0 && atomic_load(&s->cancel))
        exd_loader_cancel(s->loader);
    return rc;
}

static void *run(void *arg)
{
    struct exd_daemon *d = arg;
    d->start.status = open_all(d);
    uint64_t one = 1;
    ssize_t ignored = write(d->start.done_fd, &one, sizeof(one));
    (void)ignored;
    return NULL;
}

int exd_start_begin(struct exd_daemon *d, struct shm_error *err)
{
    struct exd_start *s = &d->start;
    s->segment = exd_store_segment(d->store);
    s->show_progress = !d->options->quiet && d->options->log_level >= EXD_LOG_INFO;
    exd_progress_init(&s->progress, STDERR_FILENO, "loading");
    int rc = pthread_create(&s->thread, NULL, run, d);
    if (rc)
        return shm_error_set(err, rc,
                             "cannot start a thread: %s: raise the limit on processes, memory or address "
                             "space (ulimit -u, ulimit -v)",
                             strerror(rc));
    s->running = true;
    return 0;
}

void exd_start_cancel(struct exd_start *s)
{
    atomic_store(&s->cancel, 1);
    if (!s->running && s->loader)
        exd_loader_cancel(s->loader);
}

int exd_start_finish(struct exd_start *s, struct shm_error *err)
{
    if (s->running)
        pthread_join(s->thread, NULL);
    s->running = false;
    if (s->status < 0)
        *err = s->error;
    return s->status;
}

void exd_start_loaded(struct exd_start *s)
{
    exd_loader_destroy(&s->loader);
    exd_plan_free(&s->plan);
    exd_model_close(&s->model);
    prt_gguf_close(&s->gguf);
}

void exd_start_destroy(struct exd_start *s, bool keep)
{
    struct shm_error ignored = {0};
    exd_start_cancel(s);
    exd_start_finish(s, &ignored);
    exd_loader_destroy(&s->loader); /* writes into the arena until then */
    exd_device_close(&s->device);   /* unregisters: before the arena is unmapped */
    exd_park_close(&s->park);       /* before its directory goes */
    exd_arena_close(&s->arena, keep);
    exd_budget_release(&s->budget);
    exd_start_loaded(s);
}
