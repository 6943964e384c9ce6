/* SPDX-License-Identifier: MIT */
/*
 * What the arena's and the loader's tests share: the shipped model opened and
 * planned, a private instance directory on tmpfs, the log lines, clean-up.
 */
#ifndef ARENA_FIXTURE_H
#define ARENA_FIXTURE_H

#include "expertd/exd_arena.h"
#include "expertd/exd_loader.h"

struct arena_fixture {
    struct prt_gguf *gguf;
    struct exd_model *model;
    struct exd_plan *plan;
    char dir[256]; /* instance directory, 0700, on tmpfs */
    char file[300];
    char instance[64];
    struct exd_arena_config config; /* of that directory */
    char log[4096];                 /* lines logged, newline-terminated */
    unsigned warnings;
};

void fixture_open(struct arena_fixture *f);
/* Another model instead of the shipped one. */
void fixture_model(struct arena_fixture *f, const char *path);
/* Removes the directory and what the arena leaves in it; asserts that nothing else is there. */
void fixture_close(struct arena_fixture *f);

/* Opens the arena, loads it if it is not complete, asserts that all went well. */
struct exd_arena *fixture_loaded(struct arena_fixture *f);

/* Recomputes all checksums: as shm_verify. */
int fixture_verify(const struct exd_arena *arena, uint32_t threads, struct shm_error *err);

/* Names in a directory but . and .. */
unsigned fixture_count(const char *dir);

void fixture_write(const char *path, const char *text); /* makes the directories too */

#endif
