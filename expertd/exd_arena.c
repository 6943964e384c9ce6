/* SPDX-License-Identifier: MIT */
#include "expertd/exd_arena.h"

#include "expertd/exd_arena_priv.h"
#include "proto/prt_file.h"
#include "proto/prt_guard.h"
#include "proto/prt_memory.h"
#include "shm/shm_verify.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14, headers from glibc 2.35 on */
#define MADV_POPULATE_READ 22
#endif

#define TOUCH_PIECE (64ull << 20)

static const char *const found_name[EXD_FOUND_COUNT] = {"none",   "adopted",   "foreign", "torn",
                                                        "layout", "truncated", "damaged", "unusable"};

const char *exd_found_name(enum exd_found found)
{
    return (unsigned)found < EXD_FOUND_COUNT ? found_name[found] : "unknown";
}

int exd_pin_parse(const char *text, enum exd_pin *ret_pin)
{
    static const char *const name[EXD_PIN_COUNT] = {"auto", "require", "off"};
    for (unsigned i = 0; i < EXD_PIN_COUNT; i++)
        if (strcmp(text, name[i]) == 0) {
            *ret_pin = (enum exd_pin)i;
            return 0;
        }
    return -EINVAL;
}

static void say(const struct exd_arena_config *c, bool warning, const char *line)
{
    if (c->log)
        c->log(c->log_ctx, warning, line);
}

static struct shm_arena *header(struct exd_arena *a)
{
    return (struct shm_arena *)a->base;
}

static uint64_t own_start(void)
{
    uint64_t start;
    return prt_process_start(getpid(), &start) == 0 ? start : 0;
}

static int map(struct exd_arena *a, uint64_t bytes, struct shm_error *err)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0);
    if (base == MAP_FAILED)
        return shm_error_set(err, errno, "arena %s: cannot map %llu bytes: %m%s", a->path,
                             (unsigned long long)bytes, shm_error_remedy(errno));
    madvise(base, bytes, MADV_DONTDUMP); /* a core file need not hold the model */
    a->base = base;
    a->bytes = bytes;
    prt_guard_add(base, bytes, "arena", a->path, "start expertd again, which builds it anew");
    return 0;
}

static void unmap(struct exd_arena *a)
{
    prt_guard_remove(a->base);
    if (a->base)
        munmap(a->base, a->bytes);
    if (a->fd >= 0)
        close(a->fd);
    a->base = NULL;
    a->fd = -1;
}

/* Opens for writing what is kept at 0400, so that a worker can only read. */
static int open_existing(struct exd_arena *a, struct stat *ret_st, struct shm_error *err)
{
    int fd = openat(a->place.dir_fd, EXD_ARENA_FILE, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return shm_error_set(err, errno, "cannot be opened: %m");
    int rc = 0;
    if (fstat(fd, ret_st) != 0)
        rc = shm_error_set(err, errno, "%m");
    else if (!S_ISREG(ret_st->st_mode) || ret_st->st_uid != geteuid())
        rc = shm_error_set(err, EPERM, "is not a file of user %u", (unsigned)geteuid());
    else if (fchmod(fd, 0600) != 0 ||
             (a->fd = openat(a->place.dir_fd, EXD_ARENA_FILE, O_RDWR | O_NOFOLLOW | O_CLOEXEC)) < 0 ||
             fchmod(fd, 0400) != 0) {
        rc = shm_error_set(err, errno, "cannot be opened for writing: %m");
        fchmod(fd, 0400);
    }
    close(fd);
    return rc;
}

/* The five rules of shm_arena.h over a mapped file; err: why not. */
static enum exd_found judge(struct exd_arena *a, const struct exd_plan *plan, struct shm_error *err)
{
    const struct shm_arena *h = header(a);
    int rc = shm_header_check(&h->header, SHM_ARENA_MAGIC, a->bytes, "it", err);
    if (rc)
        return rc == -EAGAIN ? EXD_FOUND_TORN : rc == -EPROTO ? EXD_FOUND_LAYOUT : EXD_FOUND_TRUNCATED;
    if (h->header.total_bytes != a->bytes) {
        shm_error_set(err, EBADMSG, "truncated: it has %llu bytes and should have %llu",
                      (unsigned long long)a->bytes, (unsigned long long)h->header.total_bytes);
        return EXD_FOUND_TRUNCATED;
    }
    if (memcmp(h->fingerprint, plan->fingerprint, sizeof h->fingerprint) != 0) {
        shm_error_set(err, EBADMSG,
                      "wrong fingerprint: it is of another model file, or the file was changed");
        return EXD_FOUND_FOREIGN;
    }
    uint32_t state = atomic_load_explicit(&h->state, memory_order_acquire);
    if (state == SHM_ARENA_LOADING) {
        shm_error_set(err, EBADMSG, "torn: its loading did not end");
        return EXD_FOUND_TORN;
    }
    if ((rc = shm_arena_open(a->base, a->bytes, a->path, &a->view, err)))
        return EXD_FOUND_DAMAGED;
    uint32_t units = a->view.units;
    const char *what = NULL;
    if (state != SHM_ARENA_COMPLETE)
        what = "state";
    else if (h->catalog_sum != XXH3_64bits(a->view.catalog, h->catalog_bytes))
        what = "checksum of the catalog";
    else if (h->sums_sum != XXH3_64bits(a->view.sums, (uint64_t)units * 8))
        what = "checksum of the checksums";
    for (uint32_t i = 0; i < units && !what; i++)
        if (!shm_arena_ready(&a->view, i))
            what = "table of what is loaded";
    if (what) {
        shm_error_set(err, EBADMSG, "damaged: its %s is wrong", what);
        return EXD_FOUND_DAMAGED;
    }
    if (h->catalog_sum != plan->catalog_sum || h->catalog_offset != plan->catalog_offset ||
        h->sums_offset != plan->sums_offset || h->ready_offset != plan->ready_offset ||
        h->data_offset != plan->data_offset || a->bytes != plan->total_bytes) {
        shm_error_set(err, EBADMSG, "laid out by another version of expertd");
        return EXD_FOUND_LAYOUT;
    }
    return EXD_FOUND_ADOPTED;
}

static enum exd_found adopt(struct exd_arena *a, const struct exd_plan *plan, struct shm_error *err)
{
    struct stat st;
    if (fstatat(a->place.dir_fd, EXD_ARENA_FILE, &st, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
        return EXD_FOUND_NONE;
    if (open_existing(a, &st, err) != 0)
        return EXD_FOUND_UNUSABLE;
    if ((uint64_t)st.st_size < sizeof(struct shm_arena)) {
        shm_error_set(err, EBADMSG, "truncated: it has only %lld bytes", (long long)st.st_size);
        return EXD_FOUND_TRUNCATED;
    }
    if (map(a, (uint64_t)st.st_size, err) != 0)
        return EXD_FOUND_UNUSABLE;
    enum exd_found found = judge(a, plan, err);
    if (found != EXD_FOUND_ADOPTED)
        return found;
    struct shm_arena *h = header(a);
    h->header.writer_pid = (uint32_t)getpid();
    h->header.writer_start = own_start();
    /* release: a reader that sees the new life sees its writer */
    atomic_fetch_add_explicit(&h->generation, 1, memory_order_release);
    a->huge = exd_memory_huge(&a->place, a->base, a->bytes, a->base + plan->data_offset, false);
    return EXD_FOUND_ADOPTED;
}

static void fill_header(struct exd_arena *a, const struct exd_plan *p)
{
    struct shm_arena *h = header(a);
    shm_header_init(&h->header, SHM_ARENA_MAGIC, p->total_bytes, (uint32_t)getpid(), own_start());
    memcpy(h->fingerprint, p->fingerprint, sizeof h->fingerprint);
    h->catalog_offset = p->catalog_offset;
    h->catalog_bytes = p->catalog_bytes;
    h->catalog_sum = p->catalog_sum;
    h->sums_offset = p->sums_offset;
    h->ready_offset = p->ready_offset;
    h->data_offset = p->data_offset;
    h->data_bytes = p->data_bytes;
    memcpy(a->base + p->catalog_offset, p->catalog, p->catalog_bytes);
    atomic_store_explicit(&h->generation, 1, memory_order_relaxed);
    /* release, pairs with the acquire of who judges or waits; the epoch's release follows */
    atomic_store_explicit(&h->state, SHM_ARENA_LOADING, memory_order_release);
    shm_header_publish(&h->header, prt_random_epoch());
}

/* On failure the caller removes both names. */
static int create(struct exd_arena *a, const struct exd_arena_config *c, const struct exd_plan *plan,
                  struct shm_error *err)
{
    struct exd_limits_need need = {.dir = a->place.dir,
                                   .file_bytes = plan->total_bytes,
                                   .memory_bytes = PRT_LOADER_BYTES,
                                   .locked = c->pin == EXD_PIN_REQUIRE && a->place.fs != EXD_FS_HUGETLB,
                                   .root = c->limits_root};
    int dir_fd = a->place.dir_fd;
    int rc = exd_limits_check(&need, err);
    if (rc)
        return rc;
    a->fd = openat(dir_fd, EXD_ARENA_NEW, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (a->fd < 0)
        return shm_error_set(err, errno, "arena %s: cannot create it: %m", a->path);
    if (ftruncate(a->fd, (off_t)plan->total_bytes) != 0)
        return shm_error_set(err, errno, "arena %s: cannot give it %llu bytes: %m", a->path,
                             (unsigned long long)plan->total_bytes);
    if ((rc = map(a, plan->total_bytes, err)))
        return rc;
    a->huge = exd_memory_huge(&a->place, a->base, a->bytes, a->base + plan->data_offset, true);
    rc = exd_memory_allocate(&a->place, a->fd, a->base, a->bytes, a->huge, c->cancel, err);
    if (rc)
        return rc;
    fill_header(a, plan);
    if ((rc = shm_arena_open(a->base, a->bytes, a->path, &a->view, err)))
        return rc;
    if (fchmod(a->fd, 0400) != 0 || renameat(dir_fd, EXD_ARENA_NEW, dir_fd, EXD_ARENA_FILE) != 0)
        return shm_error_set(err, errno, "arena %s: cannot put it in place: %m", a->path);
    return 0;
}

static void *touch(void *arg)
{
    struct exd_arena *a = arg;
    for (uint64_t at = 0; at < a->bytes && !atomic_load_explicit(&a->touch_stop, memory_order_relaxed);
         at += TOUCH_PIECE) {
        uint64_t n = a->bytes - at < TOUCH_PIECE ? a->bytes - at : TOUCH_PIECE;
        if (madvise(a->base + at, n, MADV_POPULATE_READ) != 0)
            break; /* then pages are locked as they are used */
    }
    return NULL;
}

static int pin(struct exd_arena *a, const struct exd_arena_config *c, struct shm_error *err)
{
    if (c->pin == EXD_PIN_OFF)
        return 0;
    int rc = exd_memory_lock(&a->place, a->base, a->bytes);
    if (rc == 0) {
        a->pinned = true;
        if (a->found == EXD_FOUND_ADOPTED)
            a->touching = pthread_create(&a->touch_thread, NULL, touch, a) == 0;
        return 0;
    }
    char size[24];
    prt_size_text(a->bytes, size);
    if (c->pin == EXD_PIN_REQUIRE)
        return shm_error_set(
            err, rc,
            "arena %s: cannot lock %s of memory (%s): raise RLIMIT_MEMLOCK (ulimit -l; systemd: "
            "LimitMEMLOCK=infinity) or use --pin=auto",
            a->path, size, strerror(-rc));
    if (!*a->warning)
        snprintf(a->warning, sizeof a->warning,
                 "arena is not locked in memory (%s): raise RLIMIT_MEMLOCK to %s, or use --pin=off",
                 strerror(-rc), size);
    return 0;
}

static void remove_files(struct exd_arena *a)
{
    unlinkat(a->place.dir_fd, EXD_ARENA_FILE, 0);
    unlinkat(a->place.dir_fd, EXD_ARENA_NEW, 0);
}

static void describe(const struct exd_arena *a, const struct exd_arena_config *c)
{
    static const char *const fs_name[EXD_FS_COUNT] = {"tmpfs", "hugetlbfs", "disk"};
    char size[24], line[EXD_ARENA_PATH_MAX + 256];
    prt_size_text(a->bytes, size);
    snprintf(line, sizeof line, "arena %s: %s%s on %s, %s pages, %s, generation %llu", a->path,
             a->found == EXD_FOUND_ADOPTED ? "adopted, " : "", size, fs_name[a->place.fs],
             a->huge ? "huge" : "ordinary",
             a->registered ? "registered"
             : a->pinned   ? "locked"
                           : "not locked",
             (unsigned long long)atomic_load(&a->view.arena->generation));
    say(c, false, line);
    if (*a->warning)
        say(c, true, a->warning);
}

int exd_arena_open(const struct exd_arena_config *config, const struct exd_plan *plan,
                   struct exd_arena **ret_arena, struct shm_error *err)
{
    struct exd_arena *a = calloc(1, sizeof *a);
    if (!a)
        return shm_error_set(err, ENOMEM, "arena: no memory; free some");
    a->fd = -1;
    int rc = exd_place_open(config, &a->place, err);
    if (rc) {
        free(a);
        return rc;
    }
    snprintf(a->path, sizeof a->path, "%.*s/%s", EXD_ARENA_PATH_MAX - 16, a->place.dir, EXD_ARENA_FILE);
    snprintf(a->warning, sizeof a->warning, "%s", a->place.warning);
    if (config->placed)
        config->placed(config->placed_ctx, a->path);
    unlinkat(a->place.dir_fd, EXD_ARENA_NEW, 0); /* of a life that ended before its arena was in place */

    struct shm_error why = {0};
    a->found = adopt(a, plan, &why);
    /* Nothing is wrong with it: it is not given up for what is short just now. */
    const bool keep = a->found == EXD_FOUND_ADOPTED ||
                      (a->found == EXD_FOUND_UNUSABLE &&
                       (why.code == -ENOMEM || why.code == -EMFILE || why.code == -ENFILE));
    if (a->found != EXD_FOUND_ADOPTED && keep) {
        rc = shm_error_set(err, why.code, "arena %.200s is there and stays, but not to be had now: %s",
                           a->path, shm_error_text(&why));
    } else if (!keep) {
        unmap(a);
        if (a->found != EXD_FOUND_NONE) {
            char line[EXD_ARENA_PATH_MAX + SHM_ERROR_TEXT_BYTES + 64];
            snprintf(line, sizeof line, "arena %s: not adopted (%s): %s; building it anew", a->path,
                     exd_found_name(a->found), shm_error_text(&why));
            say(config, true, line);
        }
        remove_files(a);
        rc = create(a, config, plan, err);
    }
    if (!rc && !config->pin_later)
        rc = pin(a, config, err);
    if (rc) {
        unmap(a);
        if (!keep)
            remove_files(a);
        exd_place_close(&a->place, !keep);
        free(a);
        return rc;
    }
    if (!config->pin_later)
        describe(a, config);
    *ret_arena = a;
    return 0;
}

int exd_arena_pin(struct exd_arena *a, const struct exd_arena_config *config, bool registered,
                  struct shm_error *err)
{
    /* A lock on top would only cost time: registered pages are neither swapped nor moved. */
    a->registered = registered && config->pin != EXD_PIN_REQUIRE;
    a->pinned = a->registered;
    int rc = a->registered ? 0 : pin(a, config, err);
    if (!rc)
        describe(a, config);
    return rc;
}

void exd_arena_close(struct exd_arena **arena, bool keep)
{
    struct exd_arena *a = *arena;
    if (!a)
        return;
    *arena = NULL;
    if (a->touching) {
        atomic_store_explicit(&a->touch_stop, 1, memory_order_relaxed);
        pthread_join(a->touch_thread, NULL);
    }
    bool remove = !keep || !exd_arena_complete(a);
    unmap(a);
    if (remove)
        remove_files(a);
    exd_place_close(&a->place, remove);
    free(a);
}

const struct shm_arena_view *exd_arena_view(const struct exd_arena *arena)
{
    return &arena->view;
}

uint8_t *exd_arena_base(struct exd_arena *arena)
{
    return arena->base;
}

bool exd_arena_complete(const struct exd_arena *arena)
{
    /* acquire, pairs with the release in exd_arena_seal */
    return atomic_load_explicit(&arena->view.arena->state, memory_order_acquire) == SHM_ARENA_COMPLETE;
}

void exd_arena_info(const struct exd_arena *arena, struct exd_arena_info *ret_info)
{
    *ret_info = (struct exd_arena_info){
        .path = arena->path,
        .found = arena->found,
        .fs = arena->place.fs,
        .pinned = arena->pinned,
        .huge = arena->huge,
        .bytes = arena->bytes,
        .generation = atomic_load_explicit(&arena->view.arena->generation, memory_order_relaxed),
        .warning = arena->warning};
}

int exd_arena_put(struct exd_arena *arena, uint64_t offset, const void *bytes, size_t n)
{
    if (arena->huge) { /* populated already; and hugetlbfs has no write */
        memcpy(arena->base + offset, bytes, n);
        return 0;
    }
    for (const uint8_t *from = bytes; n;) {
        ssize_t put = pwrite(arena->fd, from, n, (off_t)offset);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return put < 0 ? -errno : -EIO;
        from += put;
        offset += (uint64_t)put;
        n -= (size_t)put;
    }
    return 0;
}

void exd_arena_unit_done(struct exd_arena *arena, uint32_t unit, uint64_t sum)
{
    const struct shm_arena *h = arena->view.arena;
    ((uint64_t *)(arena->base + h->sums_offset))[unit] = sum;
    /* release, pairs with shm_arena_ready: bytes and sum are there */
    atomic_store_explicit((_Atomic uint8_t *)(arena->base + h->ready_offset) + unit, 1, memory_order_release);
}

int exd_arena_seal(struct exd_arena *arena, struct shm_error *err)
{
    struct shm_arena *h = header(arena);
    char name[SHM_UNIT_NAME_BYTES];
    for (uint32_t i = 0; i < arena->view.units; i++)
        if (!shm_arena_ready(&arena->view, i)) {
            shm_unit_name(&arena->view, i, name);
            return shm_error_set(err, EBADMSG, "arena %s: %s was not loaded", arena->path, name);
        }
    /* Shortened while it was written, it has grown again, with holes where something was loaded. */
    struct stat st;
    if (arena->place.fs == EXD_FS_TMPFS &&
        (fstat(arena->fd, &st) != 0 || (uint64_t)st.st_size != arena->bytes ||
         (uint64_t)st.st_blocks * 512 < arena->bytes))
        return shm_error_set(err, EBADMSG,
                             "arena %s was truncated while it was loaded: start expertd again, which builds "
                             "it anew",
                             arena->path);
    h->sums_sum = XXH3_64bits(arena->view.sums, (uint64_t)arena->view.units * 8);
    /* A disk's file outlives a power cut, so its data must be there before it claims to be complete. */
    if (arena->place.fs == EXD_FS_OTHER && fsync(arena->fd) != 0)
        return shm_error_set(err, errno, "arena %s: cannot write it to the disk: %m", arena->path);
    /* release, pairs with exd_arena_complete and the judge of the next life */
    atomic_store_explicit(&h->state, SHM_ARENA_COMPLETE, memory_order_release);
    return 0;
}
