/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: the arena file as workers and tools read it. A real arena of the
 * shipped model is made once; the input patches its header, tables and catalog
 * (and cuts its end), then it is opened, every range that the view promises is
 * checked, and worker's tokenizer and model are built from it. The patches are
 * undone after each run.
 *
 * An input is a list of patches: where (1 byte: which part, 2 bytes: place in
 * it), how many bytes (1 byte), the bytes. Its first byte says what else is
 * done with an arena that opened.
 */
#include "expertd/exd_arena.h"
#include "expertd/exd_loader.h"
#include "inferd/inf_engine.h"
#include "shm/shm_verify.h"
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MUST(x)                                                                                              \
    do {                                                                                                     \
        if (!(x))                                                                                            \
            abort();                                                                                         \
    } while (0)

#define PATCHES_MAX 64u
#define PATCH_BYTES 32u

static uint8_t *base;
static uint64_t base_bytes;

static void make_base(void)
{
    char path[512], dir[] = "/tmp/fuzz_arena_XXXXXX", file[64];
    const char *src = getenv("EXPERTD_SRC");
    struct shm_error err = {0};
    struct prt_gguf *gguf = NULL;
    struct exd_model *model = NULL;
    struct exd_plan *plan = NULL;
    struct exd_arena *arena = NULL;
    struct exd_loader *loader = NULL;
    MUST(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tools/model/story-q4_k.gguf", src ? src : EXPERTD_SRC_DEFAULT);
    MUST(prt_gguf_open(path, &gguf, &err) == 0 && exd_model_open(gguf, &model, &err) == 0 &&
         exd_plan_make(model, &plan, &err) == 0);
    /* the directory given for it: on a disk is as good as on tmpfs */
    const struct exd_arena_config config = {.instance = "fuzz", .instance_dir = dir, .arena_dir = dir};
    MUST(exd_arena_open(&config, plan, &arena, &err) == 0);
    const struct exd_loader_config load = {.model = model, .arena = arena};
    MUST(exd_loader_start(&load, &loader, &err) == 0 && exd_loader_wait(loader, NULL, &err) == 0);
    exd_loader_destroy(&loader);
    base_bytes = exd_arena_view(arena)->mapped_bytes;
    base = aligned_alloc(4096, (base_bytes + 4095) & ~UINT64_C(4095));
    MUST(base);
    memcpy(base, exd_arena_base(arena), base_bytes);
    exd_arena_close(&arena, false);
    exd_plan_free(&plan);
    exd_model_close(&model);
    prt_gguf_close(&gguf);
    snprintf(file, sizeof file, "%s/fuzz", dir);
    rmdir(file);
    MUST(rmdir(dir) == 0);
}

/* Where patches go. */
static void part_of(uint8_t which, uint64_t *ret_at, uint64_t *ret_bytes)
{
    const struct shm_arena *a = (const struct shm_arena *)(const void *)base;
    const struct shm_catalog *c = (const struct shm_catalog *)(const void *)(base + a->catalog_offset);
    const uint64_t part[][2] = {
        {0, sizeof *a},
        {offsetof(struct shm_arena, catalog_offset), 64},
        {a->catalog_offset, sizeof *c},
        {a->catalog_offset, sizeof *c},
        {a->catalog_offset + offsetof(struct shm_catalog, tokenizer), sizeof c->tokenizer},
        {a->catalog_offset + c->dense, c->n_dense * sizeof(struct shm_tensor)},
        {a->catalog_offset + c->layers, c->n_layers * sizeof(struct shm_layer)},
        {a->catalog_offset + c->tokenizer.tokens.offsets, 4 * (c->tokenizer.tokens.count + 1)},
        {a->catalog_offset + c->tokenizer.merges.offsets, 4 * (c->tokenizer.merges.count + 1)},
        {a->catalog_offset, a->catalog_bytes},
    };
    size_t i = which % (sizeof part / sizeof part[0]);
    *ret_at = part[i][0];
    *ret_bytes = part[i][1];
}

static bool within(const void *p, uint64_t bytes, uint64_t total)
{
    const uint8_t *at = p;
    return at >= base && bytes <= total && (uint64_t)(at - base) <= total - bytes;
}

static void check_matrix(const struct krn_mat *m, uint64_t total)
{
    uint64_t row_bytes;
    MUST(krn_row_bytes(m->type, m->cols, &row_bytes) == 0 && within(m->data, row_bytes * m->rows, total));
}

static void use_model(const struct shm_arena_view *v, uint64_t total)
{
    struct shm_error err = {0};
    struct inf_model *m = NULL;
    if (inf_model_open(v, &err, &m)) {
        MUST(!m && err.text[0]);
        return;
    }
    check_matrix(&m->embed, total);
    check_matrix(&m->head, total);
    for (uint32_t l = 0; l < m->hparams.layers; l++) {
        const struct inf_layer *layer = &m->layer[l];
        check_matrix(&layer->q, total);
        check_matrix(&layer->k, total);
        check_matrix(&layer->v, total);
        check_matrix(&layer->output, total);
        const struct shm_part *part[] = {&layer->gate, &layer->up, &layer->down};
        for (int i = 0; i < 3; i++)
            MUST(part[i]->offset + part[i]->bytes <= v->layers[l].blob_bytes);
    }
    inf_model_close(&m);
}

static void use_tokenizer(const struct shm_arena_view *v)
{
    static const char text[] = "Once upon a time, 3 d\xc3\xb6gs \xff <|im_start|>ran.";
    struct shm_error err = {0};
    struct inf_tokenizer *tok = NULL;
    struct inf_ids ids = {0};
    if (inf_engine_tokenizer(v, &err, &tok)) {
        MUST(!tok && err.text[0]);
        return;
    }
    if (inf_tokenizer_encode(tok, text, sizeof text - 1, INF_ENCODE_SPECIAL | INF_ENCODE_BOS, &err, &ids) ==
        0)
        for (size_t i = 0; i < ids.n; i++)
            MUST(ids.ids[i] >= 0 && (uint32_t)ids.ids[i] < inf_tokenizer_size(tok));
    inf_ids_clear(&ids);
    inf_tokenizer_destroy(&tok);
}

static void use(uint8_t how, uint64_t total)
{
    struct shm_arena_view v;
    struct shm_error err = {0};
    if (shm_arena_open(base, total, "fuzz", &v, &err)) {
        MUST(err.code && err.text[0]);
        return;
    }
    const struct shm_tokenizer *t = &v.catalog->tokenizer;
    MUST(strlen(shm_arena_string(&v, t->chat_template)) < total && v.blob_bytes_max > 0);
    for (uint32_t unit = 0; unit < v.units; unit++) {
        uint64_t bytes;
        const uint8_t *at = shm_unit_bytes(&v, unit, &bytes);
        MUST(within(at, bytes, total) && within(&v.sums[unit], 8, total));
        shm_arena_ready(&v, unit);
    }
    char name[SHM_UNIT_NAME_BYTES];
    shm_unit_name(&v, how % v.units, name);
    shm_unit_sum(&v, v.units - 1);
    shm_arena_tensor(&v, "output_norm.weight");
    if (how % 4 == 0)
        use_model(&v, total);
    if (how % 16 == 1)
        use_tokenizer(&v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct {
        uint64_t at;
        uint32_t n;
        uint8_t was[PATCH_BYTES];
    } patch[PATCHES_MAX];
    if (!base)
        make_base();
    if (size < 3)
        return 0;
    uint8_t how = data[0];
    /* Mostly whole, else cut; never beyond what is there. */
    uint64_t total = data[1] < 240 ? base_bytes : base_bytes / 16 * (data[1] - 240) + data[2];
    uint32_t n_patches = 0;
    for (size_t i = 3; i + 4 <= size && n_patches < PATCHES_MAX;) {
        uint64_t at, bytes;
        part_of(data[i], &at, &bytes); /* after earlier patches: anything may come out */
        uint64_t place = data[i + 1] | (uint64_t)data[i + 2] << 8;
        uint32_t n = 1 + data[i + 3] % PATCH_BYTES;
        i += 4;
        if (n > size - i)
            n = (uint32_t)(size - i);
        at += bytes ? place % bytes : place;
        if (at >= base_bytes || n > base_bytes - at)
            break;
        patch[n_patches].at = at;
        patch[n_patches].n = n;
        memcpy(patch[n_patches].was, base + at, n);
        memcpy(base + at, data + i, n);
        n_patches++;
        i += n;
        const struct shm_arena *a = (const struct shm_arena *)(const void *)base;
        /* a catalog that cannot be there would lead part_of astray */
        if (a->catalog_offset > base_bytes - sizeof(struct shm_catalog) || a->catalog_offset % 8)
            break;
    }
    use(how, total);
    while (n_patches-- > 0)
        memcpy(base + patch[n_patches].at, patch[n_patches].was, patch[n_patches].n);
    return 0;
}
