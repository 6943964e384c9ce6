/* SPDX-License-Identifier: MIT */
/*
 * The ring between two processes, either of which is killed at any moment.
 *
 * First this process plays expertd (issuer and link) and kills its worker;
 * then it plays the worker and kills its expertd. After each kill: nothing
 * hangs, the issuer and link end within their bound, the next pair starts
 * clean on new memory, and over all rounds no descriptor or mapping is left.
 * Every fourth pair runs undisturbed to its end. Arguments: kills, seed.
 */
#include "expertd/exd_issuer.h"
#include "kernels/krn_link_host.h"
#include "race_fixture.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KILL_WITHIN_US 6000
#define FULL_STREAMS   4 /* of an undisturbed pair */
#define STOP_BOUND_MS  2000
#define GONE_BOUND_MS  1000

enum { WORKER_OK = 0, WORKER_BROKEN = 1, WORKER_PEER_GONE = 3 };

static const struct {
    uint32_t ring;
    double gbps;
} shapes[] = {{1, 0}, {5, 0}, {24, 0}, {60, 0}, {24, 0.05}, {60, 0.2}};

static struct race_arena arena;
static _Atomic int faults;
static _Atomic bool stopping; /* a stream that a stop ends is no fault of its worker */

static void on_fault(void *ctx, const char *line)
{
    (void)ctx;
    if (stopping)
        return;
    fprintf(stderr, "p_ring_process: fault: %s\n", line);
    faults++;
}

static void sleep_us(uint64_t us)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000 * 1000)},
              NULL);
}

/* Streams until told otherwise (count) or until the peer goes. */
static int play_worker(struct race_worker *w, uint32_t count)
{
    uint32_t groups = w->geometry.layers * w->geometry.groups_per_layer;
    for (uint32_t n = 0; n < count; n++) {
        struct race_stream s = {
            .tokens = 1000,
            .policy = SHM_POLICY_ROUTED,
            .order = SHM_ORDER_PREDICTED,
            .depth = 16,
            .predicts = true,
            .cancel_at = n % 3 == 2 ? race_random(&w->rng) % groups : UINT64_MAX,
        };
        int rc = race_worker_stream(w, &s);
        if (rc == -EPIPE)
            return WORKER_PEER_GONE;
        if (rc && rc != -ECANCELED)
            return fprintf(stderr, "p_ring_process: worker: %d %s %s\n", rc, w->error,
                           w->view.worker->error_text),
                   WORKER_BROKEN;
    }
    return WORKER_OK;
}

struct expertd {
    struct krn_link *link;
    struct exd_issuer *issuer;
};

static int expertd_start(struct race_worker *w, double gbps, struct expertd *ret_expertd)
{
    struct shm_error err;
    struct krn_link_host_config lc = {.ring = w->ring,
                                      .ring_bytes = w->ring_bytes,
                                      .landed_word = &w->view.worker->landed_groups,
                                      .landed_bell = &w->view.worker->landed_bell,
                                      .issuer_bell = &w->view.worker->issuer_bell,
                                      .gbps = gbps};
    struct exd_issuer_config ic = {.arena = &arena.view,
                                   .control = w->view,
                                   .geometry = w->geometry,
                                   .settings = {SHM_POLICY_ROUTED, SHM_ORDER_PREDICTED, 16, 1},
                                   .name = "ring",
                                   .fault = on_fault};
    if (krn_link_host_create(&lc, &ret_expertd->link, &err))
        return fprintf(stderr, "link: %s\n", err.text), 1;
    ic.link = ret_expertd->link;
    if (exd_issuer_start(&ic, &ret_expertd->issuer, &err))
        return fprintf(stderr, "issuer: %s\n", err.text), 1;
    return 0;
}

/* Returns 0 when both ended within the bound. */
static int expertd_stop(struct expertd *d)
{
    uint64_t start = shm_now_ns();
    stopping = true;
    exd_issuer_stop(&d->issuer);
    stopping = false;
    krn_link_destroy(&d->link);
    uint64_t took_ms = (shm_now_ns() - start) / 1000000;
    if (took_ms > STOP_BOUND_MS)
        fprintf(stderr, "p_ring_process: issuer and link took %llu ms to stop\n",
                (unsigned long long)took_ms);
    return took_ms > STOP_BOUND_MS;
}

static pid_t spawn(void)
{
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(WORKER_PEER_GONE);
    }
    return pid;
}

/* expertd here, worker in the child. */
static int round_kill_worker(uint32_t n, uint64_t *rng, bool undisturbed)
{
    uint32_t shape = n % (sizeof shapes / sizeof shapes[0]);
    struct race_worker w;
    struct expertd d;
    if (race_worker_create(&arena, shapes[shape].ring, race_random(rng), &w))
        return perror("worker"), 1;
    w.slow = n % 2;
    pid_t pid = spawn(); /* no thread of ours is running */
    if (pid < 0)
        return perror("fork"), 1;
    if (pid == 0)
        _exit(play_worker(&w, undisturbed ? FULL_STREAMS : UINT32_MAX));
    int bad = expertd_start(&w, shapes[shape].gbps, &d), status;
    if (!undisturbed) {
        sleep_us(race_random(rng) % KILL_WITHIN_US);
        kill(pid, SIGKILL);
    }
    if (waitpid(pid, &status, 0) != pid)
        bad = 1;
    else if (undisturbed ? !WIFEXITED(status) || WEXITSTATUS(status) != WORKER_OK : !WIFSIGNALED(status))
        bad = fprintf(stderr, "p_ring_process: worker of round %u ended with status %x\n", n, status);
    bad |= expertd_stop(&d);
    race_worker_destroy(&w);
    return bad;
}

/* Worker here, expertd in the child. */
static int round_kill_expertd(uint32_t n, uint64_t *rng, bool undisturbed)
{
    uint32_t shape = n % (sizeof shapes / sizeof shapes[0]);
    struct race_worker w;
    if (race_worker_create(&arena, shapes[shape].ring, race_random(rng), &w))
        return perror("worker"), 1;
    w.slow = n % 2;
    uint64_t delay_us = race_random(rng) % KILL_WITHIN_US;
    pid_t pid = spawn();
    if (pid < 0)
        return perror("fork"), 1;
    if (pid == 0) {
        struct expertd d;
        if (expertd_start(&w, shapes[shape].gbps, &d))
            _exit(1);
        sleep_us(undisturbed ? 30000000 : delay_us);
        kill(getpid(), SIGKILL); /* in the middle of whatever its threads do */
    }
    w.peer_pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (w.peer_pidfd < 0)
        return perror("pidfd_open"), 1;
    uint64_t start = shm_now_ns();
    int rc = play_worker(&w, undisturbed ? FULL_STREAMS : UINT32_MAX), status;
    uint64_t took_ms = (shm_now_ns() - start) / 1000000;
    int bad = 0;
    if (rc != (undisturbed ? WORKER_OK : WORKER_PEER_GONE))
        bad = fprintf(stderr, "p_ring_process: worker beside expertd %u ended with %d\n", n, rc);
    if (!undisturbed && took_ms > KILL_WITHIN_US / 1000 + GONE_BOUND_MS)
        bad = fprintf(stderr, "p_ring_process: a dead expertd went unnoticed for %llu ms\n",
                      (unsigned long long)took_ms);
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    close(w.peer_pidfd);
    race_worker_destroy(&w);
    return bad;
}

static int run(const char *what, int (*round)(uint32_t, uint64_t *, bool), uint32_t kills, uint64_t *rng)
{
    int fds = 0, maps = 0, ours = race_count_maps("race-");
    uint32_t killed = 0, whole = 0;
    for (uint32_t n = 0; killed < kills; n++) {
        if (n == 12) { /* allocator arenas and thread stacks are warm */
            fds = race_count_fds();
            maps = race_count_maps("");
        }
        bool undisturbed = n % 4 == 3;
        if (round(n, rng, undisturbed) || faults)
            return fprintf(stderr, "p_ring_process: %s: round %u failed\n", what, n), 1;
        whole += undisturbed;
        killed += !undisturbed;
    }
    int fds_after = race_count_fds(), maps_after = race_count_maps("");
    printf("%s: %u killed, %u whole; descriptors %d -> %d, mappings %d -> %d\n", what, killed, whole, fds,
           fds_after, maps, maps_after);
    /* A sanitizer's own allocator goes on mapping memory; ours is counted by name. */
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    maps = maps_after;
#endif
    if (race_count_maps("race-") != ours || (kills > 12 && (fds_after > fds || maps_after > maps + 4)))
        return fprintf(stderr, "p_ring_process: %s: leaks\n", what), 1;
    return 0;
}

int main(int argc, char **argv)
{
    uint32_t kills = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 100;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL), rng = seed;
    printf("seed %llu\n", (unsigned long long)seed);
    if (race_arena_create(3, 24, 3000, true, &arena))
        return perror("arena"), 1;
    int bad =
        run("worker", round_kill_worker, kills, &rng) || run("expertd", round_kill_expertd, kills, &rng);
    race_arena_destroy(&arena);
    return bad;
}
