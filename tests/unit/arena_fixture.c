/* SPDX-License-Identifier: MIT */
#include "arena_fixture.h"

#include "shm/shm_verify.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void keep_line(void *ctx, bool warning, const char *line)
{
    struct arena_fixture *f = ctx;
    size_t n = strlen(f->log);
    snprintf(f->log + n, sizeof f->log - n, "%s\n", line);
    f->warnings += warning;
}

void fixture_model(struct arena_fixture *f, const char *path)
{
    struct shm_error err = {0};
    exd_plan_free(&f->plan);
    exd_model_close(&f->model);
    prt_gguf_close(&f->gguf);
    cr_assert_eq(prt_gguf_open(path, &f->gguf, &err), 0, "%s", err.text);
    cr_assert_eq(exd_model_open(f->gguf, &f->model, &err), 0, "%s", err.text);
    cr_assert_eq(exd_plan_make(f->model, &f->plan, &err), 0, "%s", err.text);
}

void fixture_open(struct arena_fixture *f)
{
    char path[512];
    const char *src = getenv("EXPERTD_SRC");
    *f = (struct arena_fixture){0};
    snprintf(path, sizeof path, "%s/tools/model/story-q4_k.gguf", src ? src : EXPERTD_SRC_DEFAULT);
    fixture_model(f, path);
    snprintf(f->dir, sizeof f->dir, "/dev/shm/exd_test_%d_XXXXXX", (int)getpid());
    cr_assert_not_null(mkdtemp(f->dir));
    snprintf(f->file, sizeof f->file, "%s/arena", f->dir);
    snprintf(f->instance, sizeof f->instance, "test%d", (int)getpid());
    f->config = (struct exd_arena_config){
        .instance = f->instance, .instance_dir = f->dir, .log = keep_line, .log_ctx = f};
}

unsigned fixture_count(const char *dir)
{
    unsigned n = 0;
    DIR *d = opendir(dir);
    if (!d)
        return 0;
    for (struct dirent *e; (e = readdir(d));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    return n;
}

void fixture_close(struct arena_fixture *f)
{
    char path[320];
    unlink(f->file);
    snprintf(path, sizeof path, "%s/arena.lock", f->dir);
    unlink(path);
    cr_expect_eq(rmdir(f->dir), 0, "something is left in %s", f->dir);
    exd_plan_free(&f->plan);
    exd_model_close(&f->model);
    prt_gguf_close(&f->gguf);
}

struct exd_arena *fixture_loaded(struct arena_fixture *f)
{
    struct shm_error err = {0};
    struct exd_arena *arena = NULL;
    struct exd_loader *loader = NULL;
    cr_assert_eq(exd_arena_open(&f->config, f->plan, &arena, &err), 0, "%s", err.text);
    if (exd_arena_complete(arena))
        return arena;
    struct exd_loader_config config = {.model = f->model, .arena = arena};
    cr_assert_eq(exd_loader_start(&config, &loader, &err), 0, "%s", err.text);
    cr_assert_eq(exd_loader_wait(loader, NULL, &err), 0, "%s", err.text);
    exd_loader_destroy(&loader);
    cr_assert(exd_arena_complete(arena));
    return arena;
}

int fixture_verify(const struct exd_arena *arena, uint32_t threads, struct shm_error *err)
{
    struct shm_verify_result result;
    return shm_verify(exd_arena_view(arena), threads, NULL, NULL, &result, err);
}

void fixture_write(const char *path, const char *text)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", path);
    for (char *p = dir + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        mkdir(dir, 0700);
        *p = '/';
    }
    FILE *f = fopen(path, "we");
    cr_assert_not_null(f, "%s", path);
    fputs(text, f);
    fclose(f);
}
