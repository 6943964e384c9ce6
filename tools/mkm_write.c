/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: the file. Threads take jobs (a run of rows of one tensor) from a
 * counter, make the bytes from the job's own random stream and pwrite them.
 */
#include "tools/mkm_model.h"
#include "tools/mkm_rng.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define JOB_BYTES   (4u << 20)
#define THREADS_MAX 64u

struct job {
    uint32_t tensor;
    uint64_t first_row, n_rows;
};

struct writer {
    const struct mkm_shape *shape;
    struct mkm_plan plan;
    char *head;
    size_t head_bytes;
    float *s;
    int fd;
    struct job *jobs;
    uint32_t n_jobs;
    uint64_t job_bytes_max;
    atomic_uint next_job;
    atomic_uint_fast64_t done_bytes;
    atomic_int error; /* first negative errno */
    atomic_uint running;
    const atomic_int *cancel;
    pthread_mutex_t lock; /* the end of the last worker */
    pthread_cond_t ended;
};

/* ---- jobs ---- */

/* A router is made whole (its bias is one permutation over the experts). */
static uint64_t rows_per_job(const struct mkm_tensor *t)
{
    if (t->fill == MKM_ROUTER)
        return t->n_rows;
    return t->row_bytes < JOB_BYTES ? JOB_BYTES / t->row_bytes : 1;
}

static int make_jobs(struct writer *w)
{
    for (int pass = 0; pass < 2; pass++) {
        uint64_t n = 0;
        for (uint32_t i = 0; i < w->plan.n_tensors; i++) {
            const struct mkm_tensor *t = &w->plan.tensors[i];
            uint64_t step = rows_per_job(t);
            for (uint64_t row = 0; row < t->n_rows; row += step, n++) {
                uint64_t rows = t->n_rows - row < step ? t->n_rows - row : step;
                if (rows * t->row_bytes > w->job_bytes_max)
                    w->job_bytes_max = rows * t->row_bytes;
                if (pass)
                    w->jobs[n] = (struct job){.tensor = i, .first_row = row, .n_rows = rows};
            }
        }
        if (n > UINT32_MAX / 2)
            return -EOVERFLOW;
        if (!pass) {
            w->n_jobs = (uint32_t)n;
            w->jobs = calloc(n, sizeof *w->jobs);
            if (!w->jobs)
                return -ENOMEM;
        }
    }
    return 0;
}

/* Logit 0 for bytes and special tokens (others have deviation 1, so the best is
 * above 3): greedy output is words, never half a character, never the end token. */
static void silence_rows(const struct mkm_shape *sh, const struct mkm_tensor *t, const struct job *job,
                         unsigned char *out)
{
    for (uint64_t i = 0; i < job->n_rows; i++) {
        uint64_t id = job->first_row + i;
        if (id < 256 || id >= sh->vocab - MKM_SPECIALS)
            memset(out + i * t->row_bytes, 0, t->row_bytes);
    }
}

/* row: hidden floats of scratch; bias: experts doubles. */
static void fill_job(const struct writer *w, const struct job *job, float *row, double *bias,
                     unsigned char *out)
{
    const struct mkm_shape *sh = w->shape;
    const struct mkm_tensor *t = &w->plan.tensors[job->tensor];
    uint64_t state = mkm_stream(sh->seed, MKM_STREAM_BLOCKS, job->tensor, job->first_row);
    float one = 1;

    switch (t->fill) {
    case MKM_ONES:
        for (uint64_t i = 0; i < t->dims[0]; i++)
            memcpy(out + 4 * i, &one, 4);
        break;
    case MKM_ROUTER:
        mkm_router(sh, t->layer, w->s, bias, (float *)(void *)out);
        break;
    case MKM_EMBD:
        for (uint64_t r = 0; r < job->n_rows; r++) {
            state = mkm_stream(sh->seed, MKM_STREAM_EMBD, job->first_row + r, 0);
            for (uint32_t i = 0; i < sh->hidden; i++)
                row[i] = w->s[i] + mkm_normal(&state);
            mkm_encode(t->type, row, out + r * t->row_bytes, sh->hidden);
        }
        break;
    case MKM_OUTPUT:
    case MKM_RANDOM:
        mkm_random_blocks(t->type, t->sigma, &state, out, job->n_rows * t->dims[0]);
        if (t->fill == MKM_OUTPUT)
            silence_rows(sh, t, job, out);
        break;
    }
}

static int pwrite_all(int fd, const void *data, size_t n, uint64_t at)
{
    const char *p = data;

    while (n) {
        ssize_t k = pwrite(fd, p, n, (off_t)at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return k < 0 ? -errno : -EIO;
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return 0;
}

static void fail(struct writer *w, int code)
{
    int none = 0;
    atomic_compare_exchange_strong(&w->error, &none, code);
}

static void *worker_main(void *arg)
{
    struct writer *w = arg;
    unsigned char *out = malloc(w->job_bytes_max);
    float *row = malloc(sizeof *row * w->shape->hidden);
    double *bias = malloc(sizeof *bias * w->shape->experts);
    uint32_t i;

    if (!out || !row || !bias)
        fail(w, -ENOMEM);
    while (!atomic_load(&w->error) && (i = atomic_fetch_add(&w->next_job, 1)) < w->n_jobs) {
        const struct job *job = &w->jobs[i];
        const struct mkm_tensor *t = &w->plan.tensors[job->tensor];
        uint64_t n = job->n_rows * t->row_bytes;
        int r;

        if (w->cancel && atomic_load(w->cancel)) {
            fail(w, -ECANCELED);
            break;
        }
        fill_job(w, job, row, bias, out);
        r = pwrite_all(w->fd, out, n, w->head_bytes + t->offset + job->first_row * t->row_bytes);
        if (r < 0)
            fail(w, r);
        atomic_fetch_add(&w->done_bytes, n);
    }
    free(out);
    free(row);
    free(bias);
    pthread_mutex_lock(&w->lock);
    if (atomic_fetch_sub(&w->running, 1) == 1)
        pthread_cond_signal(&w->ended);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void draw(const struct writer *w, const char *path, double seconds)
{
    double share = (double)atomic_load(&w->done_bytes) / (double)w->plan.data_bytes, gb;
    char bar[31];

    share = share > 1 ? 1 : share;
    gb = share * (double)w->plan.data_bytes / 1e9;
    for (unsigned i = 0; i < 30; i++)
        bar[i] = i < share * 30 ? '#' : '.';
    bar[30] = 0;
    fprintf(stderr, "\r\033[K%s [%s] %3.0f%%  %.2f GB/s  %.0f s left", path, bar, share * 100,
            gb / (seconds + 1e-9), share > 0 ? seconds / share - seconds : 0.0);
}

static int run_workers(struct writer *w, uint32_t threads, const char *path, bool progress)
{
    pthread_t ids[THREADS_MAX];
    double start = now();
    uint32_t n = 0;

    threads = threads < 1 ? 1 : threads > THREADS_MAX ? THREADS_MAX : threads;
    atomic_store(&w->running, threads);
    while (n < threads && !pthread_create(&ids[n], NULL, worker_main, w))
        n++;
    pthread_mutex_lock(&w->lock);
    atomic_fetch_sub(&w->running, threads - n);
    while (n && atomic_load(&w->running)) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 200000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&w->ended, &w->lock, &until);
        if (progress)
            draw(w, path, now() - start);
    }
    pthread_mutex_unlock(&w->lock);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(ids[i], NULL);
    if (progress)
        fputs("\r\033[K", stderr);
    return n ? atomic_load(&w->error) : -EAGAIN;
}

/* ---- the file ---- */

/* Takes path.partial for us alone. */
static int open_partial(const char *partial, struct shm_error *err)
{
    int fd = open(partial, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);

    if (fd < 0)
        return shm_error_set(err, errno, "%s: cannot create: %s", partial, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        close(fd);
        return shm_error_set(err, EBUSY, "%s: another mkmodel is writing it; wait or choose another name",
                             partial);
    }
    return fd;
}

static int write_file(struct writer *w, const char *path, const char *partial, uint32_t threads,
                      bool progress, struct shm_error *err)
{
    uint64_t total = w->head_bytes + w->plan.data_bytes;
    int r = 0;

    if (ftruncate(w->fd, 0) < 0)
        r = -errno;
    /* Space is taken first, so that a full disk is known now and not after ten minutes. */
    if (r == 0)
        r = -posix_fallocate(w->fd, 0, (off_t)total);
    if (r == 0)
        r = pwrite_all(w->fd, w->head, w->head_bytes, 0);
    if (r == 0)
        r = run_workers(w, threads, path, progress);
    if (r == 0 && fdatasync(w->fd) < 0)
        r = -errno;
    if (r == 0 && rename(partial, path) < 0)
        r = -errno;
    if (r == -ECANCELED)
        return shm_error_set(err, ECANCELED, "%s: interrupted, nothing was left behind", path);
    if (r < 0)
        return shm_error_set(err, r, "%s: cannot write %.2f GB: %s", path, (double)total / 1e9, strerror(-r));
    return 0;
}

int mkm_write(const struct mkm_shape *shape, const char *path, uint32_t threads, bool progress,
              const atomic_int *cancel, struct mkm_written *ret_written, struct shm_error *err)
{
    struct writer w = {.shape = shape, .cancel = cancel, .fd = -1};
    double start = now();
    char *partial = NULL;
    int r;

    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.ended, NULL);
    r = mkm_plan_make(shape, &w.plan, err);
    if (r < 0)
        goto destroy;
    w.s = malloc(sizeof *w.s * shape->hidden);
    if (!w.s || asprintf(&partial, "%s.partial", path) < 0) {
        partial = NULL;
        r = shm_error_set(err, ENOMEM, "%s: no memory; free some", path);
        goto destroy;
    }
    mkm_common_vector(shape, w.s);
    r = mkm_head_make(shape, &w.plan, &w.head, &w.head_bytes);
    if (r == 0)
        r = make_jobs(&w);
    if (r < 0) {
        shm_error_set(err, r, "%s: no memory for the header of this shape", path);
        goto destroy;
    }
    r = open_partial(partial, err);
    if (r < 0)
        goto destroy;
    w.fd = r;
    r = write_file(&w, path, partial, threads, progress, err);
    if (r < 0)
        unlink(partial);
    else
        *ret_written = (struct mkm_written){.bytes = w.head_bytes + w.plan.data_bytes,
                                            .expert_bytes = w.plan.expert_bytes,
                                            .n_tensors = w.plan.n_tensors,
                                            .seconds = now() - start};
destroy:
    if (w.fd >= 0)
        close(w.fd);
    free(w.jobs);
    free(w.head);
    free(w.s);
    free(partial);
    mkm_plan_free(&w.plan);
    pthread_cond_destroy(&w.ended);
    pthread_mutex_destroy(&w.lock);
    return r;
}
