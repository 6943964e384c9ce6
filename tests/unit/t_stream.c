/* SPDX-License-Identifier: MIT */
/*
 * The worker's side of a stream against a scripted expertd: what is written,
 * in which order it may be relied on, and how every wait ends.
 */
#include "inferd/inf_stream.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

TestSuite(stream, .timeout = 30);

#define LAYERS  2u
#define EXPERTS 6u
#define RING    4u /* groups of 2, 3 groups a layer */
#define SLOT    256u
#define GROUPS  3u

static struct shm_worker_layout layout;
static struct shm_worker_view v;
static uint8_t *ring;
static struct inf_stream *s;
static _Atomic bool cancel;
static struct shm_error err;
static struct inf_stream_config config;

static void setup(void)
{
    struct shm_geometry g = {.layers = LAYERS, .experts = EXPERTS, .ring = RING, .slot_bytes = SLOT};
    g.group_entries = shm_group_entries(RING);
    g.groups_per_layer = shm_groups_per_layer(EXPERTS, g.group_entries);
    cr_assert_eq(g.groups_per_layer, GROUPS);
    cr_assert_eq(shm_worker_layout(&g, &layout, &err), 0);
    void *base = mmap(NULL, layout.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ring = mmap(NULL, RING * SLOT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert(base != MAP_FAILED && ring != MAP_FAILED);
    shm_worker_view(base, &layout, &v);
    config = (struct inf_stream_config){.control = v,
                                        .geometry = g,
                                        .ring = ring,
                                        .expertd_pidfd = -1,
                                        .watchdog_ns = UINT64_C(5000000000),
                                        .cancel = &cancel};
    cr_assert_eq(inf_stream_create(&config, &s), 0);
}

static void again(void)
{
    inf_stream_destroy(&s);
    cr_assert_eq(inf_stream_create(&config, &s), 0);
}

static void entry(uint32_t layer, uint32_t expert, uint32_t state, uint32_t group, uint32_t slot)
{
    atomic_store(&v.table[layer * EXPERTS + expert], shm_entry_make(state, group, slot));
}

static void land(uint64_t groups)
{
    atomic_store_explicit(&v.worker->landed_groups, groups, memory_order_release);
    shm_bell_ring(&v.worker->landed_bell);
}

static void done(uint64_t seq, uint32_t result)
{
    struct shm_report r = {.seq = seq, .result = result, .copied = 7};
    shm_report_write(v.worker, &r);
    atomic_store(&v.worker->result, result);
    atomic_store_explicit(&v.worker->done_seq, seq, memory_order_release);
    shm_bell_ring(&v.worker->landed_bell);
}

/* Lets the whole stream through that the caller began as number seq. */
static void run_through(uint64_t seq)
{
    static const uint32_t counts[EXPERTS] = {1};
    uint32_t first, end;
    struct shm_report report;
    for (uint32_t l = 0; l < LAYERS; l++) {
        inf_stream_publish(s, l, counts, NULL);
        land((seq - 1) * LAYERS * GROUPS + (l + 1) * GROUPS);
        cr_assert_eq(inf_stream_wait(s, l, &first, &end, &err), 0, "%s", err.text);
        cr_expect_eq(first, 0);
        cr_expect_eq(end, GROUPS, "several landed groups are one step");
        inf_stream_release(s, l, end);
        cr_assert_eq(inf_stream_wait(s, l, &first, &end, &err), 0);
        cr_expect_eq(first, GROUPS);
        cr_expect_eq(end, GROUPS);
    }
    cr_expect_eq(atomic_load(&v.worker->released_groups), seq * LAYERS * GROUPS);
    done(seq, SHM_RESULT_OK);
    cr_assert_eq(inf_stream_end(s, &report, &err), 0, "%s", err.text);
    cr_expect_eq(report.seq, seq);
    cr_expect_eq(report.copied, 7);
}

Test(stream, words_in_order, .init = setup)
{
    uint32_t recent[LAYERS * EXPERTS], counts[EXPERTS] = {0, 3, 0, 0, 5, 0},
                                       predicted[EXPERTS] = {9, 8, 7, 6, 5, 4};
    uint32_t first, end;
    for (uint32_t i = 0; i < LAYERS * EXPERTS; i++)
        recent[i] = 100 + i;
    cr_assert_eq(inf_stream_begin(s, 11, 22, recent, recent, &err), 0);
    cr_expect_eq(atomic_load(&v.worker->stream_seq), 1);
    const struct shm_descriptor *d = &v.worker->descriptor;
    cr_expect(d->seq == 1 && d->group_base == 0 && d->tokens == 11 && d->position == 22 &&
              d->flags == SHM_STREAM_PREDICTS);
    cr_expect_eq(memcmp(v.recent, recent, sizeof recent), 0);

    cr_expect_eq(atomic_load(&v.route[0].seq), 0);
    inf_stream_publish(s, 0, counts, predicted);
    cr_expect_eq(atomic_load(&v.route[0].seq), 1);
    cr_expect_eq(v.route[0].mask.word[0], 1u << 1 | 1u << 4);
    cr_expect_eq(memcmp(v.tokens, counts, sizeof counts), 0);
    cr_expect_eq(memcmp(v.predicted + EXPERTS, predicted, sizeof predicted), 0, "belongs to the next layer");

    /* One group: expert 4 in slot 2; expert 1 in a group that has not landed. */
    entry(0, 4, SHM_ENTRY_SLOT, 0, 2);
    entry(0, 1, SHM_ENTRY_SLOT, 1, 3);
    land(1);
    cr_assert_eq(inf_stream_wait(s, 0, &first, &end, &err), 0);
    cr_expect(first == 0 && end == 1);
    cr_expect_eq(inf_stream_slot(s, 0, 4, first, end), ring + 2 * SLOT);
    cr_expect_null(inf_stream_slot(s, 0, 1, first, end));
    inf_stream_release(s, 0, end);
    cr_expect_eq(atomic_load(&v.worker->released_groups), 1);
    land(GROUPS);
    cr_assert_eq(inf_stream_wait(s, 0, &first, &end, &err), 0);
    cr_expect(first == 1 && end == GROUPS);
    cr_expect_eq(inf_stream_slot(s, 0, 1, first, end), ring + 3 * SLOT);
    cr_expect_null(inf_stream_slot(s, 0, 4, first, end), "was released");
    inf_stream_release(s, 0, end);

    inf_stream_publish(s, 1, counts, predicted); /* the last layer: there is no row to write */
    land(2 * GROUPS);
    cr_assert_eq(inf_stream_wait(s, 1, &first, &end, &err), 0);
    inf_stream_release(s, 1, end);
    done(1, SHM_RESULT_OK);
    struct shm_report report;
    cr_assert_eq(inf_stream_end(s, &report, &err), 0);

    cr_assert_eq(inf_stream_begin(s, 1, 33, NULL, NULL, &err), 0);
    cr_expect_eq(v.worker->descriptor.group_base, LAYERS * GROUPS, "groups count over the worker's life");
    cr_expect_eq(v.worker->descriptor.flags, 0);
    cr_expect_eq(v.recent[0], 0);
    run_through(2);
}

/* For measurements: all rows are there from the start, for one stream only. */
Test(stream, told_ahead, .init = setup)
{
    uint32_t known[LAYERS * EXPERTS];
    for (uint32_t i = 0; i < LAYERS * EXPERTS; i++)
        known[i] = i % 3;
    inf_stream_know(s, known);
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    cr_expect_eq(v.worker->descriptor.flags, SHM_STREAM_PREDICTS | SHM_STREAM_KNOWN);
    cr_expect_eq(memcmp(v.predicted, known, sizeof known), 0);
    run_through(1);
    cr_assert_eq(inf_stream_begin(s, 1, 1, NULL, NULL, &err), 0);
    cr_expect_eq(v.worker->descriptor.flags, 0);
    run_through(2);
    inf_stream_know(s, known);
    inf_stream_know(s, NULL);
    cr_assert_eq(inf_stream_begin(s, 1, 2, NULL, NULL, &err), 0);
    cr_expect_eq(v.worker->descriptor.flags, 0);
    run_through(3);
}

/* Only what the table says of landed groups, and only inside the ring. */
Test(stream, hostile_table, .init = setup)
{
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    entry(0, 0, SHM_ENTRY_SLOT, 0, RING);
    entry(0, 1, SHM_ENTRY_SLOT, 0, 0xfffff);
    entry(0, 2, SHM_ENTRY_DROPPED, 0, 0);
    entry(0, 3, SHM_ENTRY_RESIDENT, 0, 0);
    entry(0, 4, SHM_ENTRY_NONE, 0, 0);
    entry(0, 5, SHM_ENTRY_SLOT, 0x3ff, 0);
    for (uint32_t e = 0; e < EXPERTS; e++)
        cr_expect_null(inf_stream_slot(s, 0, e, 0, GROUPS), "expert %u", e);
    uint32_t first, end;
    inf_stream_publish(s, 0, (const uint32_t[EXPERTS]){1}, NULL);
    land(UINT64_MAX); /* beyond everything */
    cr_assert_eq(inf_stream_wait(s, 0, &first, &end, &err), 0);
    cr_expect_eq(end, GROUPS);
}

Test(stream, poison, .init = setup)
{
    config.poison = true;
    memset(ring, 0x11, RING * SLOT);
    again();
    for (uint32_t i = 0; i < RING * SLOT; i++)
        cr_assert_eq(ring[i], 0xff, "the ring is poisoned at the start");
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    inf_stream_publish(s, 0, (const uint32_t[EXPERTS]){1}, NULL);
    memset(ring, 0x22, RING * SLOT); /* "copied" */
    entry(0, 0, SHM_ENTRY_SLOT, 0, 1);
    entry(0, 5, SHM_ENTRY_SLOT, 0, 2); /* nobody's: poisoned all the same */
    entry(0, 2, SHM_ENTRY_SLOT, 1, 3); /* of a group that is still to come */
    land(1);
    uint32_t first, end;
    cr_assert_eq(inf_stream_wait(s, 0, &first, &end, &err), 0);
    inf_stream_release(s, 0, end);
    for (uint32_t slot = 0; slot < RING; slot++)
        for (uint32_t i = 0; i < SLOT; i++)
            cr_assert_eq(ring[slot * SLOT + i], slot == 1 || slot == 2 ? 0xff : 0x22, "slot %u", slot);
}

static void *cancel_soon(void *arg)
{
    (void)arg;
    usleep(50000);
    atomic_store(&cancel, true);
    return NULL;
}

/* Ends what was begun: as expertd does on a cancel. */
static void *let_go(void *arg)
{
    uint64_t seq = (uint64_t)(uintptr_t)arg;
    while (atomic_load(&v.worker->cancel_seq) != seq)
        usleep(1000);
    usleep(20000);
    land(seq * LAYERS * GROUPS);
    done(seq, SHM_RESULT_CANCELLED);
    return NULL;
}

Test(stream, cancelled, .init = setup)
{
    pthread_t a, b;
    uint32_t first, end;
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    inf_stream_publish(s, 0, (const uint32_t[EXPERTS]){1}, NULL);
    pthread_create(&a, NULL, cancel_soon, NULL);
    uint64_t start = shm_now_ns();
    cr_expect_eq(inf_stream_wait(s, 0, &first, &end, &err), -ECANCELED);
    cr_expect_lt(shm_now_ns() - start, UINT64_C(1000000000));
    cr_expect_gt(inf_stream_wait_ns(s), UINT64_C(1000000),
                 "sleeping is counted"); /* 50 ms, less a late start */
    pthread_join(a, NULL);
    pthread_create(&b, NULL, let_go, (void *)(uintptr_t)1);
    cr_expect_eq(inf_stream_cancel(s, &err), 0, "%s", err.text);
    cr_expect_eq(atomic_load(&v.worker->done_seq), 1, "waits until expertd has let go");
    cr_expect_eq(atomic_load(&v.worker->released_groups), LAYERS * GROUPS);
    pthread_join(b, NULL);
    atomic_store(&cancel, false);
    cr_expect(inf_stream_alive(s));
    cr_expect_eq(inf_stream_cancel(s, &err), 0, "nothing runs: nothing to do");
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    cr_expect_eq(v.worker->descriptor.group_base, LAYERS * GROUPS);
    run_through(2);
}

Test(stream, failed_stream, .init = setup)
{
    uint32_t first, end;
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    inf_stream_publish(s, 0, (const uint32_t[EXPERTS]){1}, NULL);
    memset(v.worker->error_text, 'A', sizeof v.worker->error_text); /* without an end */
    land(LAYERS * GROUPS);
    done(1, SHM_RESULT_FAILED);
    cr_expect_eq(inf_stream_wait(s, 0, &first, &end, &err), -EIO, "a failed stream lands nothing");
    cr_expect_lt(strlen(err.text), sizeof err.text);
    cr_expect(strstr(err.text, "stream 1: AAAA"), "%s", err.text);
    cr_expect_eq(inf_stream_cancel(s, &err), 0);
    strcpy(v.worker->error_text, "draining");
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    struct shm_report report;
    done(2, SHM_RESULT_FAILED);
    cr_expect_eq(inf_stream_end(s, &report, &err), -EIO);
    cr_expect(strstr(err.text, "draining"), "%s", err.text);
    cr_expect_eq(inf_stream_cancel(s, &err), 0);
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    run_through(3);
}

Test(stream, detached, .init = setup)
{
    uint32_t first, end;
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    strcpy(v.worker->error_text, "broke the protocol");
    atomic_store(&v.worker->detached, 1);
    cr_expect_not(inf_stream_alive(s));
    cr_expect_eq(inf_stream_wait(s, 0, &first, &end, &err), -ECONNRESET);
    cr_expect(strstr(err.text, "broke the protocol"), "%s", err.text);
    cr_expect_neq(inf_stream_cancel(s, NULL), 0, "the session is lost");
    cr_expect_neq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
}

Test(stream, watchdog_names_the_word, .init = setup)
{
    uint32_t first, end;
    config.watchdog_ns = 250000000;
    again();
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    inf_stream_publish(s, 0, (const uint32_t[EXPERTS]){1}, NULL);
    land(1);
    cr_assert_eq(inf_stream_wait(s, 0, &first, &end, &err), 0);
    inf_stream_release(s, 0, end);
    uint64_t start = shm_now_ns();
    cr_expect_eq(inf_stream_wait(s, 0, &first, &end, &err), -ETIMEDOUT);
    cr_expect_geq(shm_now_ns() - start, UINT64_C(250000000));
    cr_expect_lt(shm_now_ns() - start, UINT64_C(3000000000));
    cr_expect(strstr(err.text, "layer 0, group 1") && strstr(err.text, "landed_groups >= 2, it is 1"), "%s",
              err.text);
}

Test(stream, expertd_dies, .init = setup)
{
    uint32_t first, end;
    pid_t pid;
    char *argv[] = {(char *)"sleep", (char *)"20", NULL};
    cr_assert_eq(posix_spawnp(&pid, "sleep", NULL, NULL, argv, NULL), 0);
    config.expertd_pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    cr_assert_geq(config.expertd_pidfd, 0);
    again();
    cr_assert_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), 0);
    inf_stream_publish(s, 0, (const uint32_t[EXPERTS]){1}, NULL);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    uint64_t start = shm_now_ns();
    cr_expect_eq(inf_stream_wait(s, 0, &first, &end, &err), -ESHUTDOWN);
    cr_expect_lt(shm_now_ns() - start, UINT64_C(1000000000));
    cr_expect_not(inf_stream_alive(s));
    start = shm_now_ns();
    cr_expect_neq(inf_stream_cancel(s, &err), 0);
    cr_expect_lt(shm_now_ns() - start, UINT64_C(1000000000), "does not wait for the dead");
    cr_expect_eq(inf_stream_begin(s, 1, 0, NULL, NULL, &err), -ESHUTDOWN);
    close(config.expertd_pidfd);
}
