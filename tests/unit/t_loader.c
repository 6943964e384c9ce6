/* SPDX-License-Identifier: MIT */
/* The loader: what is in the arena is what is in the file, whatever goes wrong on the way. */
#include "arena_fixture.h"
#include "gguf_build.h"
#include "shm/shm_verify.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct arena_fixture fx;

static void setup(void)
{
    fixture_open(&fx);
}

static void teardown(void)
{
    fixture_close(&fx);
}

TestSuite(loader, .init = setup, .fini = teardown, .timeout = 60);

static void same_bytes(const struct prt_gguf_tensor *t, uint64_t offset, const uint8_t *have, uint64_t n,
                       const char *what)
{
    uint8_t *want = malloc(n);
    cr_assert_not_null(want);
    cr_assert_eq(pread(prt_gguf_shard(fx.gguf, t->shard)->fd, want, n, (off_t)offset), (ssize_t)n);
    cr_assert(memcmp(want, have, n) == 0, "%s differs from the file", what);
    free(want);
}

static void same_as_file(const struct exd_arena *arena)
{
    const struct shm_arena_view *v = exd_arena_view(arena);
    char what[128];
    for (uint32_t i = 0; i < fx.model->n_dense; i++) {
        const struct prt_gguf_tensor *t = fx.model->dense[i].tensor;
        snprintf(what, sizeof what, "%.*s", PRT_STR(t->name));
        const struct shm_tensor *to = shm_arena_tensor(v, what);
        cr_assert_not_null(to, "%s", what);
        cr_assert_eq(to->bytes, t->size_bytes);
        same_bytes(t, t->offset, v->base + to->offset, t->size_bytes, what);
    }
    for (uint32_t l = 0; l < fx.model->hp.layers; l++) {
        const struct shm_part *part[] = {&v->layers[l].gate, &v->layers[l].up, &v->layers[l].down};
        for (uint32_t e = 0; e < fx.model->hp.experts; e++)
            for (unsigned p = 0; p < EXD_PART_COUNT; p++) {
                const struct exd_experts *x = &fx.model->layer[l].part[p];
                snprintf(what, sizeof what, "part %u of expert %u of layer %u", p, e, l);
                cr_assert_eq(part[p]->bytes * fx.model->hp.experts, x->tensor->size_bytes);
                same_bytes(x->tensor, x->tensor->offset + e * part[p]->bytes,
                           shm_arena_blob(v, l, e) + part[p]->offset, part[p]->bytes, what);
            }
    }
}

static struct exd_arena *opened(void)
{
    struct shm_error err = {0};
    struct exd_arena *arena = NULL;
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    return arena;
}

struct shown {
    unsigned calls, finished;
    uint64_t last;
    bool ok;
};

static void progress(void *ctx, const struct exd_loader_progress *p)
{
    struct shown *s = ctx;
    s->calls++;
    s->finished += p->finished;
    s->ok = p->done_bytes >= s->last && p->done_bytes <= p->total_bytes;
    s->last = p->done_bytes;
}

static void loads_with(struct exd_reader_config reader)
{
    struct shm_error err = {0};
    struct exd_loader *loader = NULL;
    struct exd_reader_stats stats;
    struct exd_loader_progress p;
    struct shown shown = {0};
    struct exd_arena *arena = opened();
    struct exd_loader_config config = {
        .model = fx.model, .arena = arena, .reader = reader, .progress = progress, .progress_ctx = &shown};
    cr_assert_eq(exd_loader_start(&config, &loader, &err), 0, "%s", err.text);
    struct pollfd poll_fd = {.fd = exd_loader_fd(loader), .events = POLLIN};
    cr_assert_eq(poll(&poll_fd, 1, 30000), 1);
    exd_loader_progress(loader, &p);
    cr_assert(p.finished);
    cr_assert_eq(exd_loader_wait(loader, &stats, &err), 0, "%s", err.text);
    cr_assert_eq(exd_loader_wait(loader, NULL, &err), 0);
    cr_assert_eq(stats.bytes_wanted, fx.plan->load_bytes);
    cr_assert_eq(p.done_bytes, fx.plan->load_bytes);
    cr_assert_eq(p.total_bytes, fx.plan->load_bytes);
    cr_assert_eq(p.units_done, fx.plan->units);
    cr_assert(shown.finished == 1 && shown.ok && shown.last == fx.plan->load_bytes);
    cr_assert_gt(strlen(exd_loader_describe(loader)), 5);
    exd_loader_destroy(&loader);
    cr_assert_null(loader);
    cr_assert(exd_arena_complete(arena));
    same_as_file(arena);
    cr_assert_eq(fixture_verify(arena, 2, &err), 0, "%s", err.text);
    exd_arena_close(&arena, false);
    cr_assert_eq(fixture_count(fx.dir), 0);
}

Test(loader, every_byte_is_the_files)
{
    loads_with((struct exd_reader_config){0});
}

Test(loader, every_byte_is_the_files_by_pread_in_odd_pieces)
{
    loads_with((struct exd_reader_config){.io = EXD_READER_PREAD, .piece_bytes = 20480, .threads = 4});
}

static int32_t halves(void *ctx, uint64_t seq, uint32_t file, uint64_t offset, uint32_t length,
                      int32_t result)
{
    (void)ctx, (void)file, (void)offset, (void)length;
    return seq % 3 == 0 && result >= 8192 ? result / 8192 * 4096 : result;
}

Test(loader, short_reads_do_not_matter)
{
    struct exd_reader_faults faults = {.after_read = halves};
    loads_with((struct exd_reader_config){.faults = &faults});
}

/* Each shard's data is filled with other bytes, so that a mix-up shows. */
Test(loader, every_byte_is_the_right_shards)
{
    char dir[] = "/tmp/exd_shards_XXXXXX", path[3][128];
    uint32_t used = 0;
    cr_assert_not_null(mkdtemp(dir));
    for (uint32_t i = 0; i < 3; i++) {
        struct gb b;
        gb_init(&b);
        gb_model(&b, &(struct gb_model){.shard = i, .shards = 3});
        struct gb_bytes bytes = gb_finish(&b);
        snprintf(path[i], sizeof path[i], "%s/m-%05u-of-00003.gguf", dir, i + 1);
        FILE *f = fopen(path[i], "we");
        cr_assert(f && fwrite(bytes.data, 1, bytes.len, f) == bytes.len);
        fclose(f);
        free(bytes.data);
        gb_free(&b);
    }
    fixture_model(&fx, path[0]);
    for (uint32_t i = 0; i < 3; i++) {
        const struct prt_gguf_shard *s = prt_gguf_shard(fx.gguf, i);
        int fd = open(path[i], O_WRONLY | O_CLOEXEC);
        uint32_t x = i + 1;
        for (uint64_t at = s->data_offset; at + 4 <= s->size_bytes; at += 4) {
            x = x * 1664525 + 1013904223;
            cr_assert_eq(pwrite(fd, &x, 4, (off_t)at), 4);
        }
        /* as if it had always been so */
        struct timespec mtime = {.tv_sec = s->mtime_ns / 1000000000, .tv_nsec = s->mtime_ns % 1000000000};
        cr_assert_eq(futimens(fd, (struct timespec[2]){{.tv_nsec = UTIME_OMIT}, mtime}), 0);
        close(fd);
    }
    for (uint32_t l = 0; l < fx.model->hp.layers; l++)
        for (unsigned p = 0; p < EXD_PART_COUNT; p++)
            used |= 1u << fx.model->layer[l].part[p].tensor->shard;
    for (uint32_t i = 0; i < fx.model->n_dense; i++)
        used |= 1u << fx.model->dense[i].tensor->shard;
    cr_assert_eq(used & (used - 1) ? 1 : 0, 1, "all in one shard");
    loads_with((struct exd_reader_config){0});
    for (uint32_t i = 0; i < 3; i++)
        unlink(path[i]);
    rmdir(dir);
}

/* What somebody does to a file while it is loaded. */
struct meddler {
    int fd;
    off_t shorten_to; /* and back; 0: written again, as it was */
};

static int32_t meddle(void *ctx, uint64_t seq, uint32_t file, uint64_t offset, uint32_t length,
                      int32_t result)
{
    const struct meddler *m = ctx;
    struct stat st;
    (void)file, (void)offset, (void)length;
    if (seq == 300 && m->shorten_to && /* much of it is loaded by now */
        fstat(m->fd, &st) == 0 && ftruncate(m->fd, m->shorten_to) == 0)
        return ftruncate(m->fd, st.st_size) == 0 ? result : -EIO;
    if (seq == 1 && !m->shorten_to) {
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1000000000}};
        return futimens(m->fd, times) == 0 ? result : -EIO;
    }
    return result;
}

static void refuses(struct meddler *meddler, struct exd_arena *arena, const char *name, const char *word)
{
    struct shm_error err = {0};
    struct exd_loader *loader = NULL;
    struct exd_reader_faults faults = {.after_read = meddle, .ctx = meddler};
    struct exd_loader_config config = {
        .model = fx.model, .arena = arena, .reader = {.faults = &faults, .piece_bytes = 20480}};
    cr_assert_eq(exd_loader_start(&config, &loader, &err), 0, "%s", err.text);
    cr_assert_lt(exd_loader_wait(loader, NULL, &err), 0);
    cr_assert(strstr(err.text, name) && strstr(err.text, word), "%s", err.text);
    exd_loader_destroy(&loader);
    cr_assert_not(exd_arena_complete(arena));
}

Test(loader, a_model_that_is_written_while_it_is_read)
{
    char path[] = "/tmp/exd_written_XXXXXX";
    int fd = mkstemp(path), from = prt_gguf_shard(fx.gguf, 0)->fd;
    off_t at = 0;
    while (copy_file_range(from, &at, fd, NULL, 1 << 20, 0) > 0)
        ;
    struct prt_gguf *gguf = NULL;
    struct shm_error err = {0};
    cr_assert_eq(prt_gguf_open(path, &gguf, &err), -ETXTBSY, "a writer may be in the middle of it");
    cr_assert(strstr(err.text, path) && strstr(err.text, "open for writing"), "%s", err.text);
    close(fd);
    fixture_model(&fx, path);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    struct exd_arena *arena = opened();
    refuses(&(struct meddler){.fd = fd}, arena, path, "was written while it was read");
    exd_arena_close(&arena, true);
    cr_assert_eq(fixture_count(fx.dir), 0, "what was of two files is not kept");
    close(fd);
    unlink(path);
}

Test(loader, an_arena_that_is_shortened_while_it_is_loaded)
{
    struct exd_arena *arena = opened();
    struct exd_arena_info info;
    exd_arena_info(arena, &info);
    cr_assert_eq(chmod(info.path, 0600), 0);
    int fd = open(info.path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0);
    refuses(&(struct meddler){.fd = fd, .shorten_to = (off_t)(info.bytes / 2)}, arena, info.path,
            "truncated");
    close(fd);
    exd_arena_close(&arena, true);
    cr_assert_eq(fixture_count(fx.dir), 0);
}

/* Units that are ready while the rest is still read can be used. */
struct watcher {
    const struct exd_arena *arena;
    atomic_int stop;
    unsigned early, wrong;
};

static void *watch(void *arg)
{
    struct watcher *w = arg;
    const struct shm_arena_view *v = exd_arena_view(w->arena);
    uint8_t *seen = calloc(1, v->units);
    while (!atomic_load(&w->stop))
        for (uint32_t u = 0; u < v->units; u++)
            if (!seen[u] && shm_arena_ready(v, u)) {
                seen[u] = 1;
                w->early += !exd_arena_complete(w->arena);
                w->wrong += shm_unit_sum(v, u) != v->sums[u] || v->sums[u] == 0;
            }
    free(seen);
    return NULL;
}

static int32_t slowly(void *ctx, uint64_t seq, uint32_t file, uint64_t offset, uint32_t length,
                      int32_t result)
{
    (void)ctx, (void)seq, (void)file, (void)offset, (void)length;
    usleep(1000);
    return result;
}

Test(loader, serves_while_it_loads)
{
    struct exd_reader_faults faults = {.after_read = slowly};
    struct shm_error err = {0};
    struct exd_loader *loader = NULL;
    struct exd_arena *arena = opened();
    struct exd_loader_config config = {
        .model = fx.model, .arena = arena, .reader = {.piece_bytes = 65536, .depth = 4, .faults = &faults}};
    struct watcher w = {.arena = arena};
    pthread_t thread;
    pthread_create(&thread, NULL, watch, &w);
    cr_assert_eq(exd_loader_start(&config, &loader, &err), 0, "%s", err.text);
    cr_assert_eq(exd_loader_wait(loader, NULL, &err), 0, "%s", err.text);
    atomic_store(&w.stop, 1);
    pthread_join(thread, NULL);
    cr_assert_eq(w.wrong, 0);
    cr_assert_gt(w.early, fx.plan->n_dense / 2);
    exd_loader_destroy(&loader);
    exd_arena_close(&arena, false);
}

/* --- failures --- */

struct fault {
    uint64_t at;
    int32_t result;
    struct exd_loader **cancel;
    bool die;
};

static int32_t fault(void *ctx, uint64_t seq, uint32_t file, uint64_t offset, uint32_t length, int32_t result)
{
    const struct fault *f = ctx;
    (void)file, (void)offset, (void)length;
    if (seq != f->at)
        return result;
    if (f->die)
        kill(getpid(), SIGKILL);
    if (f->cancel) {
        while (!*f->cancel) /* the start has not returned yet */
            usleep(100);
        exd_loader_cancel(*f->cancel);
        return result;
    }
    return f->result;
}

Test(loader, a_disk_error_is_named_and_leaves_nothing)
{
    struct shm_error err;
    for (uint64_t at = 0; at < 40; at += 13) {
        struct fault f = {.at = at, .result = -EIO};
        struct exd_reader_faults faults = {.after_read = fault, .ctx = &f};
        struct exd_arena *arena = opened();
        struct exd_loader *loader = NULL;
        struct exd_loader_config config = {
            .model = fx.model, .arena = arena, .reader = {.piece_bytes = 65536, .faults = &faults}};
        err = (struct shm_error){0};
        cr_assert_eq(exd_loader_start(&config, &loader, &err), 0, "%s", err.text);
        cr_assert_eq(exd_loader_wait(loader, NULL, &err), -EIO);
        cr_assert(strstr(err.text, "story-q4_k.gguf") && strstr(err.text, "offset"), "%s", err.text);
        cr_assert(!exd_arena_complete(arena));
        exd_loader_destroy(&loader);
        exd_arena_close(&arena, true);
        cr_assert_eq(fixture_count(fx.dir), 0);
    }
}

Test(loader, can_be_cancelled)
{
    struct shm_error err = {0};
    struct exd_loader *loader = NULL;
    struct fault f = {.at = 20, .cancel = &loader};
    struct exd_reader_faults faults = {.after_read = fault, .ctx = &f};
    struct exd_arena *arena = opened();
    struct exd_loader_config config = {
        .model = fx.model, .arena = arena, .reader = {.piece_bytes = 65536, .depth = 2, .faults = &faults}};
    cr_assert_eq(exd_loader_start(&config, &loader, &err), 0, "%s", err.text);
    cr_assert_eq(exd_loader_wait(loader, NULL, &err), -ECANCELED);
    cr_assert(!exd_arena_complete(arena));
    exd_loader_destroy(&loader);
    exd_loader_destroy(&loader);
    exd_arena_close(&arena, true);
    cr_assert_eq(fixture_count(fx.dir), 0);
}

Test(loader, killed_in_the_middle_is_torn_and_rebuilt)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct fault f = {.at = 60, .die = true};
        struct exd_reader_faults faults = {.after_read = fault, .ctx = &f};
        struct exd_arena *arena = NULL;
        struct exd_loader *loader = NULL;
        if (exd_arena_open(&fx.config, fx.plan, &arena, NULL) != 0)
            _exit(1);
        struct exd_loader_config config = {
            .model = fx.model, .arena = arena, .reader = {.piece_bytes = 65536, .faults = &faults}};
        if (exd_loader_start(&config, &loader, NULL) != 0)
            _exit(2);
        exd_loader_wait(loader, NULL, NULL);
        _exit(3);
    }
    int status;
    waitpid(pid, &status, 0);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %x", status);
    cr_assert_eq(access(fx.file, F_OK), 0);
    struct exd_arena *arena = fixture_loaded(&fx);
    struct exd_arena_info info;
    exd_arena_info(arena, &info);
    cr_assert_eq(info.found, EXD_FOUND_TORN, "%s", fx.log);
    cr_assert(strstr(fx.log, "torn"), "%s", fx.log);
    same_as_file(arena);
    exd_arena_close(&arena, false);
}

/* --- adoption and memory --- */

static uint64_t bytes_read(void)
{
    char line[128];
    unsigned long long n = 0;
    FILE *f = fopen("/proc/self/io", "re");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "rchar: %llu", &n) == 1)
            break;
    fclose(f);
    return n;
}

Test(loader, adoption_reads_no_tensor)
{
    struct exd_arena_info info;
    struct exd_arena *arena = fixture_loaded(&fx);
    exd_arena_close(&arena, true);
    uint64_t before = bytes_read();
    arena = opened();
    uint64_t after = bytes_read();
    exd_arena_info(arena, &info);
    cr_assert_eq(info.found, EXD_FOUND_ADOPTED, "%s", fx.log);
    cr_assert_eq(info.generation, 2);
    cr_assert_lt(after - before, 200000); /* /proc files; the tensors are 11 MB */
    same_as_file(arena);
    exd_arena_close(&arena, false);
}
