/* SPDX-License-Identifier: MIT */
#include "expertd/exd_loader.h"

#include "shm/shm_bell.h"
#include "shm/shm_verify.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define PROGRESS_NS 100000000ull

/* One tensor of the files: a dense one, or one part of all experts of a layer. */
struct item {
    uint64_t offset, bytes; /* in its file */
    uint32_t file;
    uint32_t unit; /* the dense tensor's, or that of expert 0 */
    bool blob;
    uint64_t part_bytes; /* blob: of one expert */
    uint64_t to;         /* in the arena: the tensor, or the part of expert 0 */
    uint64_t stride;     /* blob: from one expert to the next */
};

struct exd_loader {
    struct exd_arena *arena;
    const struct prt_gguf *gguf;
    const struct shm_arena_view *view;
    struct exd_reader *reader;
    struct item *item;
    uint32_t n_items, next_item; /* next_item: one worker at a time */
    _Atomic uint64_t *missing;   /* bytes, per unit */
    uint64_t total_bytes;
    uint64_t start_ns;
    _Atomic uint64_t done_bytes, end_ns; /* end_ns 0: running */
    _Atomic uint32_t units_done;
    _Atomic uint64_t shown_ns; /* when progress was last told */
    pthread_mutex_t show_lock;
    void (*progress)(void *ctx, const struct exd_loader_progress *progress);
    void *progress_ctx;

    atomic_int cancel;
    int fd;
    pthread_t thread;
    bool started, joined;
    int rc; /* these three: the thread's until it was joined */
    struct shm_error err;
    struct exd_reader_stats stats;
};

void exd_loader_progress(const struct exd_loader *loader, struct exd_loader_progress *ret_progress)
{
    uint64_t end = atomic_load_explicit(&loader->end_ns, memory_order_acquire);
    *ret_progress = (struct exd_loader_progress){
        .done_bytes = atomic_load_explicit(&loader->done_bytes, memory_order_relaxed),
        .total_bytes = loader->total_bytes,
        .elapsed_ns = (end ? end : shm_now_ns()) - loader->start_ns,
        .units_done = atomic_load_explicit(&loader->units_done, memory_order_relaxed),
        .units = loader->view->units,
        .finished = end != 0};
}

/* Tells the client unless somebody else is at it or it was told just now. */
static void show(struct exd_loader *l, bool last)
{
    if (!l->progress)
        return;
    uint64_t now = shm_now_ns();
    if (!last && now < atomic_load_explicit(&l->shown_ns, memory_order_relaxed) + PROGRESS_NS)
        return;
    if (last)
        pthread_mutex_lock(&l->show_lock);
    else if (pthread_mutex_trylock(&l->show_lock) != 0)
        return;
    atomic_store_explicit(&l->shown_ns, now, memory_order_relaxed);
    struct exd_loader_progress p;
    exd_loader_progress(l, &p);
    l->progress(l->progress_ctx, &p);
    pthread_mutex_unlock(&l->show_lock);
}

/* n bytes of the unit are in place. */
static void arrived(struct exd_loader *l, uint32_t unit, uint64_t n)
{
    /* acq_rel: who takes the last bytes sees what the others copied */
    if (atomic_fetch_sub_explicit(&l->missing[unit], n, memory_order_acq_rel) != n)
        return;
    exd_arena_unit_done(l->arena, unit, shm_unit_sum(l->view, unit));
    atomic_fetch_add_explicit(&l->units_done, 1, memory_order_relaxed);
}

static int consume(void *ctx, uint64_t tag, uint64_t offset, const void *bytes, size_t n)
{
    struct exd_loader *l = ctx;
    const struct item *it = &l->item[tag];
    const uint8_t *from = bytes;
    atomic_fetch_add_explicit(&l->done_bytes, n, memory_order_relaxed);
    while (n) {
        uint64_t expert = it->blob ? offset / it->part_bytes : 0;
        uint64_t in_part = offset - expert * it->part_bytes;
        uint64_t m = it->blob && it->part_bytes - in_part < n ? it->part_bytes - in_part : n;
        int rc = exd_arena_put(l->arena, it->to + expert * it->stride + in_part, from, m);
        if (rc)
            return rc;
        arrived(l, it->unit + (uint32_t)expert, m);
        from += m;
        offset += m;
        n -= m;
    }
    show(l, false);
    return 0;
}

static int next(void *ctx, struct exd_reader_request *ret_request)
{
    struct exd_loader *l = ctx;
    if (l->next_item == l->n_items)
        return 0;
    const struct item *it = &l->item[l->next_item];
    *ret_request = (struct exd_reader_request){
        .file = it->file, .offset = it->offset, .length = it->bytes, .tag = l->next_item};
    l->next_item++;
    return 1;
}

static void *load(void *arg)
{
    struct exd_loader *l = arg;
    struct exd_reader_job job = {.ctx = l, .next = next, .consume = consume, .cancel = &l->cancel};
    l->rc = exd_reader_run(l->reader, &job, &l->stats, &l->err);
    if (!l->rc)
        l->rc = prt_gguf_unchanged(l->gguf, &l->err);
    if (!l->rc)
        l->rc = exd_arena_seal(l->arena, &l->err);
    /* release, pairs with the acquire in exd_loader_progress: the arena's state is final */
    atomic_store_explicit(&l->end_ns, shm_now_ns(), memory_order_release);
    show(l, true);
    uint64_t one = 1;
    ssize_t n = write(l->fd, &one, sizeof one);
    (void)n; /* an eventfd at 0 takes it */
    return NULL;
}

/* Dense tensors first, then in file order. */
static int compare_items(const void *pa, const void *pb)
{
    const struct item *a = pa, *b = pb;
    if (a->blob != b->blob)
        return a->blob ? 1 : -1;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

static int list_items(struct exd_loader *l, const struct exd_model *m, struct shm_error *err)
{
    const struct shm_arena_view *v = l->view;
    uint32_t experts = m->hp.experts;
    if (v->catalog->n_dense != m->n_dense || v->catalog->n_layers != m->hp.layers ||
        v->catalog->hparams.experts != experts)
        return shm_error_set(err, EINVAL, "loader: arena and model do not belong together");
    l->item = calloc(m->n_dense + (size_t)m->hp.layers * EXD_PART_COUNT, sizeof *l->item);
    l->missing = calloc(v->units, sizeof *l->missing);
    if (!l->item || !l->missing)
        return shm_error_set(err, ENOMEM, "loader: no memory; free some");
    for (uint32_t i = 0; i < m->n_dense; i++) {
        const struct prt_gguf_tensor *t = m->dense[i].tensor;
        if (t->size_bytes != v->dense[i].bytes)
            return shm_error_set(err, EINVAL, "loader: arena and model do not belong together");
        l->item[l->n_items++] = (struct item){.offset = t->offset,
                                              .bytes = t->size_bytes,
                                              .file = t->shard,
                                              .unit = i,
                                              .to = v->dense[i].offset};
        l->missing[i] = t->size_bytes;
        l->total_bytes += t->size_bytes;
    }
    for (uint32_t layer = 0; layer < m->hp.layers; layer++) {
        const struct shm_layer *to = &v->layers[layer];
        const struct shm_part *part[EXD_PART_COUNT] = {&to->gate, &to->up, &to->down};
        uint32_t unit = shm_arena_blob_unit(v, layer, 0);
        uint64_t sum = 0;
        for (unsigned p = 0; p < EXD_PART_COUNT; p++) {
            const struct exd_experts *x = &m->layer[layer].part[p];
            if (x->part_bytes != part[p]->bytes)
                return shm_error_set(err, EINVAL, "loader: arena and model do not belong together");
            l->item[l->n_items++] = (struct item){.offset = exd_model_part_offset(m, layer, p, 0),
                                                  .bytes = x->part_bytes * experts,
                                                  .file = x->tensor->shard,
                                                  .unit = unit,
                                                  .blob = true,
                                                  .part_bytes = x->part_bytes,
                                                  .to = to->blobs_offset + part[p]->offset,
                                                  .stride = to->blob_stride};
            sum += x->part_bytes;
            l->total_bytes += x->part_bytes * experts;
        }
        for (uint32_t e = 0; e < experts; e++)
            l->missing[unit + e] = sum;
    }
    qsort(l->item, l->n_items, sizeof *l->item, compare_items);
    return 0;
}

static int open_reader(struct exd_loader *l, const struct exd_loader_config *c, struct shm_error *err)
{
    uint32_t n = prt_gguf_shard_count(c->model->gguf);
    struct exd_reader_file *file = calloc(n, sizeof *file);
    if (!file)
        return shm_error_set(err, ENOMEM, "loader: no memory; free some");
    for (uint32_t i = 0; i < n; i++) {
        const struct prt_gguf_shard *s = prt_gguf_shard(c->model->gguf, i);
        file[i] = (struct exd_reader_file){.path = s->path, .fd = s->fd};
    }
    int rc = exd_reader_open(&c->reader, file, n, &l->reader, err);
    free(file);
    return rc;
}

int exd_loader_start(const struct exd_loader_config *config, struct exd_loader **ret_loader,
                     struct shm_error *err)
{
    struct exd_loader *l = calloc(1, sizeof *l);
    if (!l)
        return shm_error_set(err, ENOMEM, "loader: no memory; free some");
    l->arena = config->arena;
    l->gguf = config->model->gguf;
    l->view = exd_arena_view(config->arena);
    l->progress = config->progress;
    l->progress_ctx = config->progress_ctx;
    pthread_mutex_init(&l->show_lock, NULL);
    int rc = 0;
    l->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->fd < 0)
        rc = shm_error_set(err, errno, "loader: no event descriptor: %m%s", shm_error_remedy(errno));
    if (!rc)
        rc = list_items(l, config->model, err);
    if (!rc)
        rc = open_reader(l, config, err);
    if (!rc) {
        l->start_ns = shm_now_ns();
        int code = pthread_create(&l->thread, NULL, load, l);
        if (code)
            rc = shm_error_set(err, code,
                               "loader: cannot start a thread: %s: raise the limit on processes, memory or "
                               "address space (ulimit -u, ulimit -v)",
                               strerror(code));
        else
            l->started = true;
    }
    if (rc) {
        exd_loader_destroy(&l);
        return rc;
    }
    *ret_loader = l;
    return 0;
}

void exd_loader_cancel(struct exd_loader *loader)
{
    atomic_store_explicit(&loader->cancel, 1, memory_order_relaxed);
}

int exd_loader_fd(const struct exd_loader *loader)
{
    return loader->fd;
}

const char *exd_loader_describe(const struct exd_loader *loader)
{
    return exd_reader_describe(loader->reader);
}

int exd_loader_wait(struct exd_loader *loader, struct exd_reader_stats *ret_stats, struct shm_error *err)
{
    if (loader->started && !loader->joined) {
        pthread_join(loader->thread, NULL);
        loader->joined = true;
    }
    if (ret_stats)
        *ret_stats = loader->stats;
    if (loader->rc && err)
        *err = loader->err;
    return loader->rc;
}

void exd_loader_destroy(struct exd_loader **loader)
{
    struct exd_loader *l = *loader;
    if (!l)
        return;
    *loader = NULL;
    exd_loader_cancel(l);
    exd_loader_wait(l, NULL, NULL);
    exd_reader_close(&l->reader);
    if (l->fd >= 0)
        close(l->fd);
    pthread_mutex_destroy(&l->show_lock);
    free(l->missing);
    free(l->item);
    free(l);
}
