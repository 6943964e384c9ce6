/* SPDX-License-Identifier: MIT */
/* Claims of instances and the budget they share. */
#include "expertd/exd_budget.h"
#include "proto/prt_claim.h"
#include "proto/prt_file.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)

static char top[] = "/tmp/t_claim_XXXXXX";
static struct shm_error err;

static struct prt_paths paths_of(const char *instance)
{
    struct prt_paths p;
    cr_assert_eq(prt_paths_make(top, instance, &p, &err), 0);
    cr_assert_eq(prt_paths_create(&p, &err), 0, "%s", err.text);
    return p;
}

/* A claim of process pid (0: one that is dead), with an arena's file of file_bytes (0: none). */
static void put(const char *instance, uint32_t pid, uint64_t arena_bytes, uint64_t file_bytes)
{
    struct prt_paths p = paths_of(instance);
    struct prt_claim c = {.arena_bytes = arena_bytes, .park_bytes = MIB, .pid = pid, .start = 1};
    if (pid)
        cr_assert_eq(prt_process_start((pid_t)pid, &c.start), 0);
    snprintf(c.arena_path, sizeof c.arena_path, "%.900s/a place/arena", p.dir);
    if (file_bytes) {
        char dir[PRT_PATH_BYTES + 16];
        snprintf(dir, sizeof dir, "%s/a place", p.dir);
        mkdir(dir, 0700);
        FILE *f = fopen(c.arena_path, "we");
        cr_assert(f && ftruncate(fileno(f), (off_t)file_bytes) == 0);
        fclose(f);
    }
    cr_assert_eq(prt_claim_write(&p, &c, &err), 0, "%s", err.text);
}

static void begin(void)
{
    cr_assert_not_null(mkdtemp(top));
    paths_of("x");
}

static void end(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", top);
    cr_assert_eq(system(command), 0);
}

TestSuite(claim, .init = begin, .fini = end, .timeout = 60);

Test(claim, counts_what_is_there)
{
    struct prt_claim list[PRT_CLAIM_MAX], c;
    char text[256];
    struct prt_paths x = paths_of("x");
    put("runs", (uint32_t)getpid(), 8 * MIB, 0);
    put("kept", 0, 8 * MIB, 4 * MIB);
    put("gone", 0, 8 * MIB, 0);
    put("x", (uint32_t)getpid(), 64 * MIB, 0);
    cr_assert_eq(prt_claim_list(&x, "x", list), 2);
    cr_assert_eq(prt_claim_text(list, 2, text, sizeof text), 13 * MIB);
    cr_assert_str_eq(text, "kept 4.0 MiB (kept), runs 9.0 MiB (runs)");
    cr_assert_eq(prt_claim_text(list, 2, text, 34), 13 * MIB);
    cr_assert_str_eq(text, "kept 4.0 MiB (kept), ...");
    cr_assert_eq(prt_claim_text(list, 0, text, sizeof text), 0);
    cr_assert_str_eq(text, "none");
    struct prt_paths kept = paths_of("kept");
    cr_assert_eq(prt_claim_read(&kept, &c, &err), 0);
    cr_assert(strstr(c.arena_path, "/kept/a place/arena") && !c.running);
    prt_claim_remove(&kept);
    cr_assert_eq(prt_claim_read(&kept, &c, &err), -ENOENT);
    cr_assert_eq(prt_claim_list(&x, NULL, list), 2); /* runs, x */
}

/* A file of so many bytes of memory. */
static void fill(const char *dir, const char *name, size_t bytes)
{
    char path[PRT_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    char *data = malloc(bytes);
    memset(data, 7, bytes);
    FILE *f = fopen(path, "we");
    cr_assert(f && fwrite(data, bytes, 1, f) == 1 && fclose(f) == 0);
    free(data);
}

Test(claim, counts_what_a_killed_one_left)
{
    struct prt_claim c;
    char dir[PRT_PATH_BYTES + 16];
    put("k", 0, 8 * MIB, 4 * MIB);
    struct prt_paths k = paths_of("k");
    snprintf(dir, sizeof dir, "%s/a place", k.dir);
    fill(dir, "park", MIB);
    cr_assert_eq(prt_claim_read(&k, &c, &err), 0);
    cr_assert(c.held_bytes >= 5 * MIB && c.held_bytes < 6 * MIB);
    fill(k.dir, "park", 2 * MIB); /* where it is when the arena is on no memory file system */
    fill(dir, "arena.new", 4 * MIB);
    unlink(c.arena_path);
    cr_assert_eq(prt_claim_read(&k, &c, &err), 0);
    cr_assert(c.held_bytes >= 7 * MIB && c.held_bytes < 8 * MIB);
}

Test(claim, damaged_ones_are_refused)
{
    static const char *const texts[] = {"",
                                        "\n",
                                        "1 2 3 4 5",
                                        "1 2 3 4 5\n",
                                        "2 1 1 1 1 /a\n",
                                        "1 99999999999999999 1 1 1 /a\n",
                                        "1 a 1 1 1 /a\n",
                                        "1 1 1 1 1 /a"};
    struct prt_paths x = paths_of("x");
    struct prt_claim c, list[PRT_CLAIM_MAX];
    char path[PRT_PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/arena.claim", x.dir);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        FILE *f = fopen(path, "we");
        cr_assert(f && fputs(texts[i], f) >= 0 && fclose(f) == 0);
        cr_assert_eq(prt_claim_read(&x, &c, &err), -EBADMSG, "'%s'", texts[i]);
        cr_assert_eq(prt_claim_list(&x, NULL, list), 0);
    }
    unlink(path);
    cr_assert_eq(symlink("/etc/passwd", path), 0);
    cr_assert_eq(prt_claim_read(&x, &c, &err), -ELOOP);
}

Test(claim, a_budget_is_kept)
{
    struct prt_paths x = paths_of("x");
    struct exd_budget b = {0};
    struct prt_claim c;
    put("a", (uint32_t)getpid(), 9 * MIB, 0); /* and 1 MiB of park */
    put("b", 0, 8 * MIB, 4 * MIB);
    put("x", 0, 7 * MIB, 7 * MIB); /* our own of before: given up or adopted */
    cr_assert_eq(exd_budget_claim(&x, 20 * MIB, 5 * MIB, 2 * MIB, false, &b, &err), -ENOMEM);
    for (const char *const *w =
             (const char *const[]){"needs 7.0 MiB (arena 5.0 MiB, park 2.0 MiB)", "budget is 20.0 MiB",
                                   "a 10.0 MiB (runs), b 4.0 MiB (kept)", "6.0 MiB are left",
                                   "expertctl evict", NULL};
         *w; w++)
        cr_assert(strstr(err.text, *w), "'%s' lacks '%s'", err.text, *w);
    cr_assert_eq(exd_budget_claim(&x, 20 * MIB, 5 * MIB, MIB, false, &b, &err), 0);
    cr_assert_eq(prt_claim_read(&x, &c, &err), 0);
    cr_assert(c.running);
    cr_assert_eq(c.held_bytes, 6 * MIB);
    /* what the budget leaves, an eighth of it for the park */
    cr_assert_eq(exd_budget_claim(&x, 38 * MIB, 8 * MIB, 0, true, &b, &err), 0);
    cr_assert_eq(b.park_bytes, 2 * MIB);
    /* a model larger than the budget, without wrap-around */
    cr_assert_eq(exd_budget_claim(&x, 20 * MIB, 30 * MIB, 0, true, &b, &err), -ENOMEM);
    cr_assert_eq(exd_budget_claim(&x, 0, 1000 * MIB, 0, true, &b, &err), 0); /* no budget */
    exd_budget_settle(&b, "/nonexistent/arena", 3 * MIB);
    cr_assert_eq(prt_claim_read(&x, &c, &err), 0);
    cr_assert_eq(c.held_bytes, 1003 * MIB);
    exd_budget_release(&b);
    cr_assert_eq(prt_claim_read(&x, &c, &err), -ENOENT);
}

Test(claim, an_error_of_memory_names_who_holds_some)
{
    struct prt_paths x = paths_of("x");
    struct shm_error e = {0};
    shm_error_set(&e, ENOSPC, "tmpfs has too little");
    exd_budget_explain(&x, &e);
    cr_assert_str_eq(e.text, "tmpfs has too little");
    put("b", 0, 8 * MIB, 4 * MIB);
    exd_budget_explain(&x, &e);
    cr_assert_str_eq(e.text, "tmpfs has too little; other instances hold: b 4.0 MiB (kept)");
    cr_assert_eq(e.code, -ENOSPC);
}

#define STARTS 6

static void *start_one(void *arg)
{
    char name[8];
    struct prt_paths p;
    struct exd_budget b;
    struct shm_error e = {0};
    snprintf(name, sizeof name, "i%d", (int)(intptr_t)arg);
    int rc = prt_paths_make(top, name, &p, &e);
    if (!rc)
        rc = prt_paths_create(&p, &e);
    if (!rc)
        rc = exd_budget_claim(&p, 25 * MIB, 10 * MIB, 0, false, &b, &e);
    return (void *)(intptr_t)rc;
}

/* All claims are of this process, which lives: they count. */
Test(claim, those_that_start_at_once_are_not_all_let_in)
{
    pthread_t thread[STARTS];
    int in = 0;
    for (int i = 0; i < STARTS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, start_one, (void *)(intptr_t)i), 0);
    for (int i = 0; i < STARTS; i++) {
        void *rc;
        pthread_join(thread[i], &rc);
        cr_assert(!rc || (intptr_t)rc == -ENOMEM, "%d", (int)(intptr_t)rc);
        in += !rc;
    }
    cr_assert_eq(in, 2);
}
