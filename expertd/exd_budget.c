/* SPDX-License-Identifier: MIT */
#include "expertd/exd_budget.h"

#include "expertd/exd_log.h"
#include "proto/prt_claim.h"
#include "proto/prt_file.h"
#include "proto/prt_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOCK_MS 10000

/* With the lock held (or, without a budget, not to be had). */
static int check(struct exd_budget *b, bool park_auto, struct shm_error *err)
{
    struct prt_claim *claims = calloc(PRT_CLAIM_MAX, sizeof *claims);
    char holders[200], need[24], arena[24], park[24], limit[24], left[24];
    if (!claims)
        return shm_error_set(err, ENOMEM, "no memory; free some");
    uint64_t held =
        prt_claim_text(claims, prt_claim_list(b->paths, b->paths->instance, claims), holders, sizeof holders);
    free(claims);
    uint64_t free_bytes = b->limit_bytes > held ? b->limit_bytes - held : 0;
    if (park_auto && b->arena_bytes < free_bytes)
        b->park_bytes = (free_bytes - b->arena_bytes) / PRT_PARK_SHARE & ~UINT64_C(0xfffff);
    if (b->arena_bytes <= free_bytes && b->park_bytes <= free_bytes - b->arena_bytes)
        return 0;
    prt_size_text(b->arena_bytes + b->park_bytes, need);
    prt_size_text(b->arena_bytes, arena);
    prt_size_text(b->park_bytes, park);
    prt_size_text(b->limit_bytes, limit);
    prt_size_text(free_bytes, left);
    return shm_error_set(
        err, ENOMEM,
        "--memory-budget: the model needs %s (arena %s, park %s), the budget is %s, in use: %s; %s "
        "are left: stop an instance, drop a kept arena (expertctl evict NAME), or raise the budget",
        need, arena, park, limit, holders, left);
}

static void claim_of(const struct exd_budget *b, const char *arena_path, struct prt_claim *ret_claim)
{
    struct prt_claim c = {
        .arena_bytes = b->arena_bytes, .park_bytes = b->park_bytes, .pid = (uint32_t)getpid()};
    prt_process_start(getpid(), &c.start);
    snprintf(c.arena_path, sizeof c.arena_path, "%s", arena_path);
    *ret_claim = c;
}

int exd_budget_claim(const struct prt_paths *paths, uint64_t limit_bytes, uint64_t arena_bytes,
                     uint64_t park_bytes, bool park_auto, struct exd_budget *ret_budget,
                     struct shm_error *err)
{
    struct exd_budget b = {
        .paths = paths, .limit_bytes = limit_bytes, .arena_bytes = arena_bytes, .park_bytes = park_bytes};
    struct prt_claim own, before;
    struct shm_error why = {0};
    int lock = -1, rc = prt_claim_lock(paths, LOCK_MS, &lock, &why);
    if (!rc && limit_bytes)
        rc = check(&b, park_auto, &why);
    if (!rc) {
        /* A kept arena of ours counts until the new place is known. */
        struct shm_error ignored = {0};
        bool kept = prt_claim_read(paths, &before, &ignored) == 0;
        claim_of(&b, kept ? before.arena_path : "", &own);
        rc = prt_claim_write(paths, &own, &why);
    }
    if (lock >= 0)
        close(lock);
    if (rc && limit_bytes) {
        *err = why;
        return rc;
    }
    if (rc) /* others count without us, which is all that is lost */
        exd_log(EXD_LOG_WARNING, "other instances with a memory budget won't count this one: %s",
                shm_error_text(&why));
    *ret_budget = b;
    return 0;
}

void exd_budget_settle(struct exd_budget *b, const char *arena_path, uint64_t park_bytes)
{
    struct prt_claim own, before;
    struct shm_error why = {0}, ignored = {0};
    b->park_bytes = park_bytes;
    claim_of(b, arena_path, &own);
    /* After this, nothing would know of it. */
    if (prt_claim_read(b->paths, &before, &ignored) == 0 && before.arena_path[0] &&
        strcmp(before.arena_path, own.arena_path) != 0 && access(before.arena_path, F_OK) == 0)
        exd_log(EXD_LOG_WARNING,
                "an earlier arena of this instance is kept at another place (--arena-dir), unused: rm %s",
                before.arena_path);
    if (prt_claim_write(b->paths, &own, &why))
        exd_log(EXD_LOG_WARNING, "what this instance holds can't be told: %s", shm_error_text(&why));
}

void exd_budget_release(struct exd_budget *b)
{
    struct prt_claim own;
    struct shm_error ignored = {0};
    if (!b->paths)
        return;
    if (prt_claim_read(b->paths, &own, &ignored) || !own.arena_path[0] || access(own.arena_path, F_OK) != 0)
        prt_claim_remove(b->paths);
    b->paths = NULL;
}

void exd_budget_explain(const struct prt_paths *paths, struct shm_error *err)
{
    struct prt_claim *claims = calloc(PRT_CLAIM_MAX, sizeof *claims);
    char holders[160], text[SHM_ERROR_TEXT_BYTES];
    int n = claims ? prt_claim_list(paths, paths->instance, claims) : 0;
    if (n > 0) {
        prt_claim_text(claims, n, holders, sizeof holders);
        snprintf(text, sizeof text, "%s", shm_error_text(err));
        shm_error_set(err, -err->code, "%.320s; other instances hold: %s", text, holders);
    }
    free(claims);
}
