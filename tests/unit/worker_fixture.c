/* SPDX-License-Identifier: MIT */
#include "tests/unit/worker_fixture.h"

#include "expertd/exd_arena.h"
#include "expertd/exd_model.h"
#include "proto/prt_gguf.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define REQUIRE(what, err)                                                                                   \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what, shm_error_text(err));              \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

const char *fix_src(void)
{
    const char *src = getenv("EXPERTD_SRC");
    return src ? src : EXPERTD_SRC_DEFAULT;
}

static void read_at(int fd, uint64_t offset, void *at, uint64_t n, struct shm_error *err)
{
    for (uint64_t done = 0; done < n;) {
        ssize_t got = pread(fd, (char *)at + done, n - done, (off_t)(offset + done));
        REQUIRE(got > 0, err);
        done += (uint64_t)got;
    }
}

void fix_arena_load(const char *name, struct fix_arena *a)
{
    struct shm_error err = {0};
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", name[0] == '/' ? "" : fix_src(), name[0] == '/' ? "" : "/", name);
    struct prt_gguf *gguf = NULL;
    struct exd_model *model = NULL;
    struct exd_plan *plan = NULL;
    REQUIRE(prt_gguf_open(path, &gguf, &err) == 0, &err);
    REQUIRE(exd_model_open(gguf, &model, &err) == 0, &err);
    REQUIRE(exd_plan_make(model, &plan, &err) == 0, &err);

    a->bytes = plan->total_bytes;
    a->base = mmap(NULL, a->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(a->base != MAP_FAILED, &err);
    struct shm_arena *h = a->base;
    shm_header_init(&h->header, SHM_ARENA_MAGIC, a->bytes, (uint32_t)getpid(), 1);
    memcpy(h->fingerprint, plan->fingerprint, sizeof h->fingerprint);
    h->catalog_offset = plan->catalog_offset, h->catalog_bytes = plan->catalog_bytes;
    h->catalog_sum = plan->catalog_sum;
    h->sums_offset = plan->sums_offset, h->ready_offset = plan->ready_offset;
    h->data_offset = plan->data_offset, h->data_bytes = plan->data_bytes;
    memcpy((char *)a->base + plan->catalog_offset, plan->catalog, plan->catalog_bytes);
    memset((char *)a->base + plan->ready_offset, 1, plan->units);
    atomic_store(&h->state, SHM_ARENA_COMPLETE);
    shm_header_publish(&h->header, 1);
    REQUIRE(shm_arena_open(a->base, a->bytes, path, &a->view, &err) == 0, &err);

    for (uint32_t i = 0; i < model->n_dense; i++) {
        const struct prt_gguf_tensor *t = model->dense[i].tensor;
        read_at(prt_gguf_shard(gguf, t->shard)->fd, t->offset, (char *)a->base + a->view.dense[i].offset,
                t->size_bytes, &err);
    }
    for (uint32_t l = 0; l < model->hp.layers; l++) {
        const struct shm_part *part[] = {&a->view.layers[l].gate, &a->view.layers[l].up,
                                         &a->view.layers[l].down};
        for (uint32_t e = 0; e < model->hp.experts; e++)
            for (int p = 0; p < EXD_PART_COUNT; p++) {
                const struct prt_gguf_tensor *t = model->layer[l].part[p].tensor;
                read_at(prt_gguf_shard(gguf, t->shard)->fd,
                        exd_model_part_offset(model, l, (enum exd_part)p, e),
                        (char *)shm_arena_blob(&a->view, l, e) + part[p]->offset, part[p]->bytes, &err);
            }
    }
    exd_plan_free(&plan);
    exd_model_close(&model);
    prt_gguf_close(&gguf);
    REQUIRE(mprotect(a->base, a->bytes, PROT_READ) == 0, &err); /* as a worker sees it */
}

void fix_arena_free(struct fix_arena *a)
{
    munmap(a->base, a->bytes);
    a->base = NULL;
}

static void on_fault(void *ctx, const char *line)
{
    struct fix_worker *w = ctx;
    snprintf(w->fault, sizeof w->fault, "%s", line);
    atomic_fetch_add(&w->faults, 1);
}

void fix_worker_start(const struct fix_arena *arena, const struct fix_setup *set, struct fix_worker *w)
{
    struct shm_error err = {0};
    const struct shm_hparams *h = &arena->view.catalog->hparams;
    memset(w, 0, sizeof *w);
    struct inf_engine *e = &w->engine;
    struct inf_store *s = &e->store;
    REQUIRE(inf_device_host_open(set->threads, &err, &e->device) == 0, &err);
    inf_store_init(s, &(struct inf_store_config){.cancel = &w->cancel, .poison = set->poison}, e->device);
    s->arena = arena->view;
    s->settings = (struct inf_settings){
        .policy = set->policy, .order = set->order, .depth = set->depth, .floor = set->floor};

    struct shm_geometry g = {.layers = h->layers, .experts = h->experts, .ring = set->ring};
    g.slot_bytes = (arena->view.blob_bytes_max + 255) & ~UINT64_C(255);
    g.group_entries = shm_group_entries(g.ring);
    g.groups_per_layer = shm_groups_per_layer(g.experts, g.group_entries);
    REQUIRE(shm_worker_layout(&g, &s->layout, &err) == 0, &err);
    struct prt_attach_request request;
    REQUIRE(e->device->ops->ring_open(e->device, &g, &s->control, 0, &s->ring, &request, &err) == 0, &err);
    s->ring_open = true;
    s->control_base =
        mmap(NULL, s->layout.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(s->control_base != MAP_FAILED, &err);
    shm_worker_view(s->control_base, &s->layout, &s->control);
    s->control.worker->geometry = g;
    if (set->resident) {
        s->resident = calloc((size_t)h->layers * h->experts, sizeof *s->resident);
        for (uint32_t l = 0; l < h->layers; l++)
            for (uint32_t x = 0; x < set->resident && x < h->experts; x++) {
                s->resident[(size_t)l * h->experts + x] = shm_arena_blob(&arena->view, l, x);
                shm_mask_set(&s->control.resident[l], x);
            }
    }
    shm_header_init(&s->control.worker->header, SHM_WORKER_MAGIC, s->layout.total_bytes, (uint32_t)getpid(),
                    1);
    shm_header_publish(&s->control.worker->header, 1);

    const struct krn_link_host_config lc = {.ring = s->ring.host,
                                            .ring_bytes = s->ring.bytes,
                                            .landed_word = &s->control.worker->landed_groups,
                                            .landed_bell = &s->control.worker->landed_bell,
                                            .issuer_bell = &s->control.worker->issuer_bell,
                                            .gbps = set->link_gbps,
                                            .name = "link"};
    REQUIRE(krn_link_host_create(&lc, &w->link, &err) == 0, &err);
    const struct exd_issuer_config ic = {
        .arena = &arena->view,
        .control = s->control,
        .geometry = g,
        .link = w->link,
        .settings = {.policy = set->policy, .order = set->order, .depth = set->depth, .floor = set->floor},
        .name = "test",
        .fault = on_fault,
        .ctx = w};
    const struct inf_stream_config sc = {.control = s->control,
                                         .geometry = g,
                                         .ring = s->ring.host,
                                         .expertd_pidfd = -1,
                                         .watchdog_ns = UINT64_C(20000000000),
                                         .cancel = &w->cancel,
                                         .poison = set->poison};
    REQUIRE(inf_stream_create(&sc, &s->stream) == 0, &err);
    REQUIRE(exd_issuer_start(&ic, &w->issuer, &err) == 0, &err);
    REQUIRE(inf_model_open(&s->arena, &err, &e->model) == 0, &err);
    REQUIRE(e->device->ops->set_model(e->device, e->model, &err) == 0, &err);
    e->chunk = set->chunk ? set->chunk : e->model->hparams.context;
    uint32_t kv_tokens = set->kv_tokens;
    REQUIRE(e->device->ops->plan(e->device, 1, &e->chunk, &e->ctx, &kv_tokens, &err) == 0, &err);
    REQUIRE(inf_kv_pool_create(e->device, kv_tokens, &err, &e->pool) == 0, &err);
}

void fix_worker_stop(struct fix_worker *w)
{
    struct inf_engine *e = &w->engine;
    exd_issuer_stop(&w->issuer);
    krn_link_destroy(&w->link);
    inf_model_close(&e->model);
    e->store.arena_base = NULL;
    inf_store_close(&e->store);
    inf_kv_pool_destroy(&e->pool);
    inf_device_close(&e->device);
}
