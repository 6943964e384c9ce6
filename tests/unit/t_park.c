/* SPDX-License-Identifier: MIT */
/* expertd's park: what is kept, for whom, in which order it goes; that a death gives back what it held. */
#include "expertd/exd_park.h"
#include "shm/shm_park.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 7000u
#define SLOT  8192u /* shm_park_slot_bytes(BLOCK) */

TestSuite(park, .timeout = 60);

static char dir[64];
static const uint8_t model[16] = "model";

static struct exd_park *open_park(uint64_t bytes)
{
    struct shm_error err = {0};
    struct exd_park_config c = {.dir = dir, .bytes = bytes};
    memcpy(c.model, model, sizeof c.model);
    struct exd_park *p = NULL;
    snprintf(dir, sizeof dir, "/dev/shm/t-park-XXXXXX");
    cr_assert(mkdtemp(dir));
    cr_assert_eq(exd_park_open(&c, &p, &err), 0, "%s", err.text);
    return p;
}

static void close_park(struct exd_park **p)
{
    exd_park_close(p);
    cr_assert_eq(rmdir(dir), 0, "the file is gone");
}

static int join(struct exd_park *p, uint64_t session, const char *layout, const char *build, uint64_t bytes)
{
    struct prt_parkopen_request r = {.session = session, .block_bytes = bytes};
    struct prt_parkopen_reply reply = {0};
    struct shm_error err = {0};
    memcpy(r.model, model, sizeof r.model);
    snprintf(r.layout, sizeof r.layout, "%s", layout);
    snprintf(r.build, sizeof r.build, "%s", build);
    int rc = exd_park_join(p, &r, &reply, &err);
    cr_assert(rc == 0 || err.text[0]);
    if (rc == 0)
        cr_assert(reply.slot_bytes == shm_park_slot_bytes(bytes) && reply.park_path[0] == '/');
    return rc;
}

/* Key of block `i` of conversation `c`; block i continues i - 1. */
static void key_of(uint64_t *key, uint32_t c, uint32_t i)
{
    key[0] = i ? 1 + c : 0; /* "block 0" is the root: zero */
    key[1] = i;
}

static uint32_t reserve(struct exd_park *p, uint64_t session, uint32_t c, uint32_t i, uint32_t *slot)
{
    struct prt_parkreserve_request r = {.session = session, .blocks = 1};
    struct prt_parkreserve_reply reply = {0};
    struct shm_error err = {0};
    key_of(r.key, c, i);
    key_of(r.parent, c, i - 1);
    cr_assert_eq(exd_park_reserve(p, &r, &reply, &err), 0, "%s", err.text);
    *slot = reply.slot[0];
    return reply.state[0];
}

static int commit(struct exd_park *p, uint64_t session, uint32_t slot, uint64_t sum)
{
    struct prt_parkcommit_request r = {
        .session = session, .blocks = 1, .slot = {slot}, .checksum = {sum, ~sum}};
    struct prt_parkcommit_reply reply = {0};
    struct shm_error err = {0};
    return exd_park_commit(p, &r, &reply, &err);
}

/* Reserves and commits; the state of the first step. */
static uint32_t put(struct exd_park *p, uint64_t session, uint32_t c, uint32_t i)
{
    uint32_t slot, state = reserve(p, session, c, i, &slot);
    if (state == PRT_PARK_SLOT)
        cr_assert_eq(commit(p, session, slot, 1000 * c + i), 0);
    return state;
}

/* How many of the conversation's first n blocks are found; they are held afterwards. */
static struct prt_parkfind_reply find(struct exd_park *p, uint64_t session, uint32_t c, uint32_t n)
{
    struct prt_parkfind_request r = {.session = session, .keys = n};
    struct prt_parkfind_reply reply = {0};
    struct shm_error err = {0};
    for (uint32_t i = 0; i < n; i++)
        key_of(&r.key[2 * i], c, i + 1);
    cr_assert_eq(exd_park_find(p, &r, &reply, &err), 0, "%s", err.text);
    for (uint32_t i = 0; i < reply.found; i++)
        cr_assert(reply.checksum[2 * i] == 1000 * c + i + 1 &&
                  reply.checksum[2 * i + 1] == ~(uint64_t)(1000 * c + i + 1));
    return reply;
}

static int done(struct exd_park *p, uint64_t session, uint32_t wrong, uint32_t slot)
{
    struct prt_parkdone_request r = {.session = session, .wrong = wrong, .slot = {slot}};
    struct prt_parkdone_reply reply = {0};
    struct shm_error err = {0};
    return exd_park_done(p, &r, &reply, &err);
}

#define SOUND(p) cr_assert_null(exd_park_check(p), "%s", exd_park_check(p))

Test(park, found_by_another_session_and_after_a_death)
{
    struct exd_park *p = open_park(16 * SLOT);
    struct stat st;
    cr_assert_eq(stat(exd_park_path(p), &st), 0);
    cr_assert((st.st_mode & 0777) == 0600 && st.st_size == 16 * SLOT && st.st_blocks == 0,
              "nothing is taken yet");
    cr_assert_eq(join(p, 1, "f32", "a", BLOCK), 0);
    for (uint32_t i = 1; i <= 5; i++)
        cr_assert_eq(put(p, 1, 0, i), PRT_PARK_SLOT);
    cr_assert_eq(put(p, 1, 0, 3), PRT_PARK_KEPT);
    uint32_t slot;
    cr_assert_eq(reserve(p, 1, 0, 6, &slot), PRT_PARK_SLOT); /* and dies before it is committed */
    exd_park_leave(p, 1);
    SOUND(p);
    cr_assert_eq(join(p, 2, "f32", "a", BLOCK), 0);
    cr_assert_eq(find(p, 2, 0, 8).found, 5);
    struct prt_parkfind_reply some = find(p, 2, 0, 3);
    cr_assert(some.found == 3 && some.others == 1, "the fourth continues the third");
    exd_park_leave(p, 2);
    struct exd_park_stats s;
    exd_park_stats(p, &s);
    cr_assert(s.kept == 5 && !s.held && !s.reserved && s.committed == 5 && s.held_bytes <= 16 * SLOT);
    close_park(&p);
}

Test(park, another_layout_or_build_is_not_handed_out)
{
    struct exd_park *p = open_park(16 * SLOT);
    cr_assert_eq(join(p, 1, "f32", "a", BLOCK), 0);
    cr_assert_eq(put(p, 1, 0, 1), PRT_PARK_SLOT);
    cr_assert_eq(join(p, 2, "f32", "b", BLOCK), 0);
    cr_assert_eq(join(p, 3, "bf16", "a", BLOCK), 0);
    struct prt_parkfind_reply f = find(p, 2, 0, 1);
    cr_assert(!f.found && f.ignored == 1 && f.ignored_why == PRT_PARK_WHY_BUILD);
    f = find(p, 3, 0, 1);
    cr_assert(!f.found && f.ignored == 1 && f.ignored_why == PRT_PARK_WHY_LAYOUT);
    cr_assert_eq(put(p, 2, 0, 1), PRT_PARK_SLOT, "each build has its own");
    cr_assert(find(p, 1, 0, 1).found == 1 && find(p, 2, 0, 1).found == 1);
    struct prt_parkopen_request r = {.session = 9, .block_bytes = BLOCK, .layout = "f32", .build = "a"};
    struct prt_parkopen_reply reply = {0};
    struct shm_error err = {0};
    memcpy(r.model, "other", 5);
    cr_assert_eq(exd_park_join(p, &r, &reply, &err), -EUCLEAN);
    SOUND(p);
    close_park(&p);
}

Test(park, slots_of_one_size)
{
    struct exd_park *p = open_park(16 * SLOT);
    cr_assert_eq(join(p, 1, "f32", "a", BLOCK), 0);
    cr_assert_eq(put(p, 1, 0, 1), PRT_PARK_SLOT);
    cr_assert_eq(join(p, 2, "bf16", "a", 3 * BLOCK), -EBUSY);
    cr_assert_eq(join(p, 2, "bf16", "a", 17 * SLOT), -EFBIG);
    cr_assert_eq(join(p, 2, "bf16", "a", UINT64_C(1) << 34), -EFBIG);
    exd_park_leave(p, 1);
    cr_assert_eq(join(p, 2, "bf16", "a", 3 * BLOCK), 0);
    cr_assert_eq(find(p, 2, 0, 1).found, 0);
    for (uint32_t i = 1; i <= 4; i++)
        cr_assert_eq(put(p, 2, 0, i), PRT_PARK_SLOT);
    SOUND(p);
    close_park(&p);
}

/* Full: the end of the least recently used conversation goes first, never what is held, never what the new
 * block continues. */
Test(park, full)
{
    struct exd_park *p = open_park(6 * SLOT + 100);
    cr_assert_eq(join(p, 1, "f32", "a", BLOCK), 0);
    cr_assert_eq(join(p, 2, "f32", "a", BLOCK), 0);
    for (uint32_t i = 1; i <= 3; i++)
        cr_assert(put(p, 1, 0, i) == PRT_PARK_SLOT && put(p, 1, 1, i) == PRT_PARK_SLOT);
    cr_assert_eq(find(p, 2, 0, 3).found, 3); /* conversation 0 was used, and is held */
    cr_assert_eq(put(p, 1, 2, 1), PRT_PARK_SLOT);
    cr_assert_eq(find(p, 1, 1, 3).found, 2, "the last block of conversation 1 gave way");
    done(p, 1, 0, 0);
    for (uint32_t i = 2; i <= 3; i++)
        cr_assert_eq(put(p, 1, 2, i), PRT_PARK_SLOT);
    cr_assert_eq(find(p, 1, 1, 3).found, 0);
    cr_assert_eq(put(p, 1, 2, 4), PRT_PARK_FULL, "all that is left is held, or what the block continues");
    cr_assert_eq(put(p, 1, 3, 2), PRT_PARK_ORPHAN);
    cr_assert_eq(find(p, 2, 0, 3).found, 3);
    exd_park_leave(p, 2);
    cr_assert_eq(put(p, 1, 2, 4), PRT_PARK_SLOT);
    SOUND(p);
    exd_park_leave(p, 1);
    /* one conversation longer than the park: its beginning stays */
    cr_assert_eq(join(p, 3, "f32", "a", BLOCK), 0);
    for (uint32_t i = 1; i <= 20; i++)
        cr_assert_eq(put(p, 3, 5, i), i <= 6 ? PRT_PARK_SLOT : i == 7 ? PRT_PARK_FULL : PRT_PARK_ORPHAN);
    cr_assert_eq(find(p, 3, 5, 20).found, 6);
    SOUND(p);
    struct exd_park_stats s;
    exd_park_stats(p, &s);
    cr_assert(s.held_bytes <= 6 * SLOT + 100);
    close_park(&p);
}

static int no_memory(void *ctx, int fd, uint64_t offset, uint64_t bytes)
{
    uint64_t *left = ctx;
    (void)fd;
    (void)offset;
    if (bytes > *left)
        return -ENOSPC;
    *left -= bytes;
    return 0;
}

Test(park, memory_that_runs_out_is_a_smaller_park)
{
    uint64_t left = 4 * SLOT;
    snprintf(dir, sizeof dir, "/dev/shm/t-park-XXXXXX");
    cr_assert(mkdtemp(dir));
    struct exd_park_config c = {.dir = dir, .bytes = 100 * SLOT, .allocate = no_memory, .ctx = &left};
    memcpy(c.model, model, sizeof c.model);
    struct exd_park *p = NULL;
    cr_assert_eq(exd_park_open(&c, &p, NULL), 0);
    cr_assert_eq(join(p, 1, "f32", "a", BLOCK), 0);
    for (uint32_t k = 0; k < 9; k++)
        cr_assert_eq(put(p, 1, k, 1), PRT_PARK_SLOT);
    struct exd_park_stats s;
    exd_park_stats(p, &s);
    cr_assert(s.kept == 4 && s.held_bytes == 4 * SLOT);
    SOUND(p);
    close_park(&p);
}

Test(park, hostile_requests)
{
    struct exd_park *p = open_park(8 * SLOT);
    uint32_t slot, other;
    struct shm_error err = {0};
    struct prt_parkfind_request f = {.session = 77, .keys = 64};
    struct prt_parkfind_reply fr = {0};
    cr_assert_eq(exd_park_find(p, &f, &fr, &err), -EINVAL, "nobody joined");
    cr_assert_eq(join(p, 1, "f32", "a", BLOCK), 0);
    cr_assert_eq(join(p, 2, "f32", "a", BLOCK), 0);
    cr_assert_eq(reserve(p, 1, 0, 1, &slot), PRT_PARK_SLOT);
    cr_assert_eq(reserve(p, 2, 0, 1, &other), PRT_PARK_BUSY);
    cr_assert_eq(commit(p, 2, slot, 1), -EINVAL, "reserved by another");
    cr_assert_eq(commit(p, 1, slot + 1, 1), -EINVAL);
    cr_assert_eq(commit(p, 1, UINT32_MAX, 1), -EINVAL);
    cr_assert_eq(find(p, 2, 0, 1).found, 0, "not committed");
    cr_assert_eq(commit(p, 1, slot, 1), 0);
    cr_assert_eq(commit(p, 1, slot, 1), -EINVAL, "twice");
    cr_assert_eq(done(p, 2, 1, slot), -EINVAL, "was not given to it");
    cr_assert_eq(find(p, 2, 0, 1).found, 1);
    cr_assert_eq(find(p, 1, 0, 1).found, 1);
    cr_assert_eq(done(p, 2, 1, slot), 0);
    SOUND(p);
    cr_assert_eq(find(p, 2, 0, 1).found, 0, "a wrong one is not given out again");
    cr_assert_eq(reserve(p, 2, 1, 1, &other), PRT_PARK_SLOT);
    cr_assert_neq(other, slot, "session 1 still reads it");
    exd_park_leave(p, 1);
    SOUND(p);
    /* blocks that continue each other in a ring, and themselves */
    struct prt_parkreserve_request r = {
        .session = 2, .blocks = 3, .key = {5, 5, 6, 6, 7, 7}, .parent = {0, 0, 5, 5, 6, 6}};
    struct prt_parkreserve_reply rr = {0};
    cr_assert_eq(exd_park_reserve(p, &r, &rr, &err), 0);
    struct prt_parkcommit_request c = {.session = 2, .blocks = 3};
    struct prt_parkcommit_reply cr = {0};
    memcpy(c.slot, rr.slot, sizeof c.slot);
    cr_assert(exd_park_commit(p, &c, &cr, &err) == 0 && cr.kept == 3);
    cr_assert_eq(
        exd_park_find(p, &(struct prt_parkfind_request){.session = 2, .keys = 1, .key = {5, 5}}, &fr, &err),
        0);
    cr_assert_eq(done(p, 2, 1, fr.slot[0]), 0); /* the first goes and comes again, behind the last */
    r = (struct prt_parkreserve_request){
        .session = 2, .blocks = 2, .key = {5, 5, 8, 8}, .parent = {7, 7, 8, 8}};
    cr_assert_eq(exd_park_reserve(p, &r, &rr, &err), 0);
    cr_assert(rr.state[0] == PRT_PARK_SLOT && rr.state[1] == PRT_PARK_ORPHAN);
    c.blocks = 1;
    memcpy(c.slot, rr.slot, sizeof c.slot);
    cr_assert_eq(exd_park_commit(p, &c, &cr, &err), 0);
    cr_assert_eq(
        exd_park_find(p, &(struct prt_parkfind_request){.session = 2, .keys = 1, .key = {6, 6}}, &fr, &err),
        0);
    SOUND(p);
    r = (struct prt_parkreserve_request){.session = 2, .blocks = 1};
    cr_assert_eq(exd_park_reserve(p, &r, &rr, &err), -EINVAL, "a key of zero is the root's");
    /* more classes than there is room for, one after the other */
    for (uint32_t k = 0; k < 300; k++) {
        char build[16];
        snprintf(build, sizeof build, "%u", k);
        cr_assert_eq(join(p, 100 + k, "f32", build, BLOCK), 0);
        cr_assert_eq(put(p, 100 + k, 0, 1), PRT_PARK_SLOT);
        exd_park_leave(p, 100 + k);
        SOUND(p);
    }
    int rc = 0;
    for (uint32_t k = 0; rc == 0; k++)
        rc = join(p, 1000 + k, "f32", "a", BLOCK);
    cr_assert_eq(rc, -EBUSY);
    SOUND(p);
    close_park(&p);
}

/* Random operations of many sessions that die at any point, against what must hold: a block is found with the
 * checksum that it was committed with (in find), a held slot is never given to a writer, the budget holds. */
Test(park, random_operations_and_deaths)
{
    enum { SESSIONS = 6, STEPS = 30000 };
    struct exd_park *p = open_park(40 * SLOT);
    struct {
        bool joined;
        uint32_t held[PRT_PARK_KEYS + PRT_PARK_OTHERS], n;
        uint32_t slot, c, i;
        bool reserved;
    } s[SESSIONS] = {0};
    unsigned rng = 12345;
    uint32_t slots = 0, deaths = 0, found = 0;
    for (int step = 0; step < STEPS; step++) {
        uint32_t k = (uint32_t)rand_r(&rng) % SESSIONS, c = (uint32_t)rand_r(&rng) % 8,
                 i = 1 + (uint32_t)rand_r(&rng) % 12;
        if (!s[k].joined) {
            cr_assert_eq(join(p, 1 + k, "f32", k % 3 ? "a" : "b", BLOCK), 0);
            memset(&s[k], 0, sizeof s[k]);
            s[k].joined = true;
        }
        switch (rand_r(&rng) % 8) {
        case 0:
        case 1:
        case 2:
            s[k].c = c;
            s[k].i = i;
            s[k].reserved = reserve(p, 1 + k, c, i, &s[k].slot) == PRT_PARK_SLOT;
            for (uint32_t j = 0; s[k].reserved && j < SESSIONS; j++) {
                cr_assert(j == k || !s[j].reserved || s[j].slot != s[k].slot, "two write one slot");
                for (uint32_t h = 0; h < s[j].n; h++)
                    cr_assert_neq(s[j].held[h], s[k].slot, "a held slot is written");
            }
            slots += s[k].reserved;
            break;
        case 3:
        case 4:
            cr_assert_eq(commit(p, 1 + k, s[k].slot, 1000 * s[k].c + s[k].i) == 0, s[k].reserved);
            s[k].reserved = false;
            break;
        case 5: {
            struct prt_parkfind_reply f = find(p, 1 + k, c, i);
            s[k].n = f.found + f.others;
            memcpy(s[k].held, f.slot, s[k].n * sizeof *f.slot);
            found += f.found;
            break;
        }
        case 6:
            cr_assert_eq(done(p, 1 + k, s[k].n && rand_r(&rng) % 4 == 0, s[k].held[0]), 0);
            s[k].n = 0;
            break;
        default:
            if (rand_r(&rng) % 8)
                break;
            exd_park_leave(p, 1 + k);
            s[k].joined = false;
            s[k].reserved = false;
            s[k].n = 0;
            deaths++;
        }
        const char *broken = step % 16 ? NULL : exd_park_check(p);
        cr_assert_null(broken, "step %d: %s", step, broken);
    }
    cr_assert(slots > 1000 && deaths > 100 && found > 1000, "%u %u %u: the test did what it should", slots,
              deaths, found);
    for (uint32_t k = 0; k < SESSIONS; k++)
        exd_park_leave(p, 1 + k);
    struct exd_park_stats st;
    exd_park_stats(p, &st);
    cr_assert(!st.held && !st.reserved && st.held_bytes <= 40 * SLOT && st.kept <= 40);
    SOUND(p);
    close_park(&p);
}

Test(park, what_a_killed_one_left_is_removed)
{
    struct exd_park *p = open_park(8 * SLOT);
    cr_assert_eq(access(exd_park_path(p), F_OK), 0);
    struct exd_park_config c = {.dir = dir, .bytes = 4 * SLOT};
    struct exd_park *q = NULL;
    cr_assert_eq(exd_park_open(&c, &q, NULL), 0);
    struct stat st;
    cr_assert(stat(exd_park_path(q), &st) == 0 && st.st_size == 4 * SLOT);
    exd_park_close(&q);
    close_park(&p);
}
