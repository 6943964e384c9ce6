/* SPDX-License-Identifier: MIT */
/*
 * The arena as expertd owns it: planned from a model description, found and
 * adopted or created, mapped, pinned, kept or removed. The file's layout is
 * shm/shm_arena.h; filling it is exd_loader.h.
 *
 * Life of a file: `arena.new` while catalog and memory are prepared, renamed to
 * `arena` in state LOADING (workers may map it), state COMPLETE once every
 * checksum is there. A process killed at any point leaves an `arena.new`, which
 * is removed, or an `arena` in state LOADING, which is recognised as torn.
 *
 * One expertd at a time: an exclusive flock on `arena.lock` beside the file.
 */
#ifndef EXD_ARENA_H
#define EXD_ARENA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "expertd/exd_limits.h"
#include "expertd/exd_model.h"
#include "shm/shm_arena.h"
#include "shm/shm_error.h"

/* Where everything goes. Pure arithmetic and copies: no I/O on the data. */
struct exd_plan {
    uint64_t catalog_offset, catalog_bytes, catalog_sum;
    uint64_t sums_offset, ready_offset;
    uint64_t data_offset, data_bytes;
    uint64_t total_bytes; /* multiple of 2 MiB */
    uint64_t load_bytes;  /* to read from the model's files */
    uint32_t n_dense, layers, experts, units;
    uint8_t fingerprint[16]; /* of the model's files */
    uint8_t *catalog;        /* catalog_bytes, as it goes into the file */
};

/* Builds the plan. -EINVAL with a line when the model does not fit the catalog
 * (name too long, tables above 4 GiB), -ENOMEM. */
int exd_plan_make(const struct exd_model *model, struct exd_plan **ret_plan, struct shm_error *err);
void exd_plan_free(struct exd_plan **plan);

enum exd_pin { EXD_PIN_AUTO, EXD_PIN_REQUIRE, EXD_PIN_OFF, EXD_PIN_COUNT };

/* "auto", "require" or "off"; -EINVAL otherwise. */
int exd_pin_parse(const char *text, enum exd_pin *ret_pin);

/* What was found at start. All but NONE and ADOPTED: removed and built anew; but not what is UNUSABLE for
 * lack of memory or descriptors only. */
enum exd_found {
    EXD_FOUND_NONE,
    EXD_FOUND_ADOPTED,
    EXD_FOUND_FOREIGN,   /* of another model file (fingerprint) */
    EXD_FOUND_TORN,      /* its loading never ended */
    EXD_FOUND_LAYOUT,    /* other layout version, or laid out otherwise */
    EXD_FOUND_TRUNCATED, /* file shorter or longer than it says */
    EXD_FOUND_DAMAGED,   /* a checksum or a table is wrong */
    EXD_FOUND_UNUSABLE,  /* cannot be opened or mapped */
    EXD_FOUND_COUNT
};

const char *exd_found_name(enum exd_found found); /* "none", "adopted", "foreign", ... */

struct exd_arena_config {
    const char *instance;     /* name: a file name, no '/' */
    const char *instance_dir; /* $RUNTIME/expertd/<instance>, exists */
    const char *arena_dir;    /* --arena-dir: the arena goes into <arena_dir>/<instance>; or NULL */
    enum exd_pin pin;
    bool pin_later;           /* exd_arena_pin follows: a registration with a driver may pin it */
    const atomic_int *cancel; /* may be NULL; non-zero ends the allocation with -ECANCELED */
    /* Lines for the log; may be NULL. warning: worth a look. */
    void (*log)(void *ctx, bool warning, const char *line);
    void *log_ctx;
    /* Called with the arena's path once its place is locked, before there is anything; may be NULL. */
    void (*placed)(void *ctx, const char *path);
    void *placed_ctx;
    const char *limits_root; /* exd_limits_need.root: seam for tests; NULL */
};

struct exd_arena;

/* Picks the directory (--arena-dir; else the instance directory where that is on
 * tmpfs or hugetlbfs; else /dev/shm/expertd-<uid>/<instance>-<hash of its directory>; else the instance
 * directory with a warning), takes the lock, adopts the file there or creates
 * one: limits checked, memory allocated (so no SIGBUS later), catalog written, state
 * LOADING. Reads no tensor data. Blocks for the allocation (seconds for large
 * models), not on adoption. Errors, one line each: -EBUSY another expertd has it (pid named),
 * -ENOSPC/-ENOMEM/-EPERM/-EFBIG limits, -ECANCELED, file errors. After an error
 * nothing is left behind. */
int exd_arena_open(const struct exd_arena_config *config, const struct exd_plan *plan,
                   struct exd_arena **ret_arena, struct shm_error *err);

/* The rest of an open with pin_later: locks the memory, or, with `registered`, takes it as pinned. Errors: as
 * above, with --pin=require. */
int exd_arena_pin(struct exd_arena *arena, const struct exd_arena_config *config, bool registered,
                  struct shm_error *err);

/* Unmaps and unlocks. keep: a complete arena stays for the next expertd; false
 * (--no-keep), or an arena that is not complete, removes the file, and the
 * directory if exd_arena_open made it. Accepts NULL, nulls *arena. */
void exd_arena_close(struct exd_arena **arena, bool keep);

/* The mapping, read-write for expertd; valid until close. */
const struct shm_arena_view *exd_arena_view(const struct exd_arena *arena);
uint8_t *exd_arena_base(struct exd_arena *arena);

/* Whether the file is complete: at once after adoption, else when the loader ended. */
bool exd_arena_complete(const struct exd_arena *arena);

struct exd_arena_info {
    const char *path;     /* absolute, of the file; valid until close */
    enum exd_found found; /* at open */
    enum exd_fs fs;
    bool pinned; /* mlocked, or registered with a driver */
    bool huge;   /* huge pages were granted */
    uint64_t bytes;
    uint64_t generation;
    const char *warning; /* one line for status ("" if none); valid until close */
};
void exd_arena_info(const struct exd_arena *arena, struct exd_arena_info *ret_info);

/* For the loader: copies n bytes to offset (inside the data section; not checked). On
 * ordinary pages through the file, which costs a third of faulting them in one by
 * one; any thread. 0, or what pwrite said. */
int exd_arena_put(struct exd_arena *arena, uint64_t offset, const void *bytes, size_t n);

/* For the loader: unit's checksum and ready flag (release; the bytes first). */
void exd_arena_unit_done(struct exd_arena *arena, uint32_t unit, uint64_t sum);

/* For the loader: seals the arena once all units are done: sums_sum, state
 * COMPLETE (release). -EBADMSG if a unit is missing; on a disk also what fsync says. */
int exd_arena_seal(struct exd_arena *arena, struct shm_error *err);

#endif
