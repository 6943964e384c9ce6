/* SPDX-License-Identifier: MIT */
/*
 * The real expertd against hand-made workers: wrong attaches, a broken
 * protocol, death at any time, requests delivered twice, drain, restart.
 *
 * Usage: p_daemon EXPERTD MODEL; and, started by itself, p_daemon --worker
 * RUNTIME idle|busy: attaches, says so on stdout, waits to be killed.
 */
#include "daemon_kit.h"

#include "proto/prt_channel.h"
#include "proto/prt_file.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define CHECK(cond, ...)                                                                                     \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            failures++;                                                                                      \
            fprintf(stderr, "FAILED %s:%d: %s: ", __FILE__, __LINE__, #cond);                                \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
        }                                                                                                    \
    } while (0)

static int park_open(struct prt_client *client, uint64_t session, struct prt_parkopen_reply *ret_reply,
                     struct shm_error *err)
{
    struct prt_parkopen_request open = {
        .session = session, .block_bytes = 100000, .layout = "l", .build = "b"};
    memcpy(open.model, prt_client_store(client)->fingerprint, sizeof(open.model));
    return prt_client_parkopen(client, &open, ret_reply, err);
}

static int park_reserve(struct prt_client *client, uint64_t session, struct prt_parkreserve_reply *ret_reply,
                        struct shm_error *err)
{
    struct prt_parkreserve_request r = {
        .session = session, .blocks = 2, .key = {1, 1, 2, 2}, .parent = {0, 0, 1, 1}};
    return prt_client_parkreserve(client, &r, ret_reply, err);
}

/* Of two blocks one is committed and held, one is only reserved. */
static int park_two(struct prt_client *client, uint64_t session, struct shm_error *err)
{
    struct prt_parkopen_reply open;
    struct prt_parkreserve_reply reserved;
    struct prt_parkcommit_request c = {.session = session, .blocks = 1, .checksum = {7, 8}};
    struct prt_parkcommit_reply committed;
    struct prt_parkfind_request f = {.session = session, .keys = 1, .key = {1, 1}};
    struct prt_parkfind_reply found;
    int rc = park_open(client, session, &open, err);
    if (rc == 0)
        rc = park_reserve(client, session, &reserved, err);
    if (rc == 0) {
        c.slot[0] = reserved.slot[0];
        rc = prt_client_parkcommit(client, &c, &committed, err);
    }
    return rc ? rc : prt_client_parkfind(client, &f, &found, err);
}

static int run_worker(const char *runtime, const char *mode)
{
    struct kit k = {0};
    struct shm_error err = {0};
    struct kit_worker w;
    struct prt_attach_reply reply;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (prt_client_open(runtime, NULL, 0, &k.client, &err) < 0) {
        fprintf(stderr, "worker: %s\n", err.text);
        return 1;
    }
    kit_worker_make(&k, 8, &w);
    if (prt_client_attach(k.client, &w.request, &reply, &err) < 0) {
        fprintf(stderr, "worker: %s\n", err.text);
        return 1;
    }
    if (strcmp(mode, "busy") == 0) {
        kit_worker_post(&w, 1, 4096);
        while (atomic_load(&w.view.worker->landed_groups) == 0 &&
               atomic_load(&w.view.worker->landed_entries) == 0)
            usleep(100);
    }
    if (strcmp(mode, "park") == 0 && park_two(k.client, reply.session, &err) < 0) {
        fprintf(stderr, "worker: %s\n", err.text);
        return 1;
    }
    printf("attached\n");
    fflush(stdout);
    for (;;)
        pause();
}

/* Starts a worker process; returns once it is attached. */
static pid_t spawn_worker(const struct kit *k, const char *mode)
{
    int out[2];
    if (pipe2(out, O_CLOEXEC) < 0)
        exit(1);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(out[1], 1);
        execl("/proc/self/exe", "p_daemon", "--worker", k->runtime, mode, (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    char line[16];
    ssize_t n = read(out[0], line, sizeof(line));
    close(out[0]);
    CHECK(n > 0, "a worker did not attach");
    return pid;
}

static bool no_workers(void *ctx)
{
    return kit_workers(ctx) == 0;
}

static bool serving(void *ctx)
{
    struct kit *k = ctx;
    return atomic_load(&prt_client_store(k->client)->state) == SHM_STORE_SERVING;
}

struct holds_goal {
    pid_t pid;
    struct kit_holds goal, last;
};

static bool holds_at_most(void *ctx)
{
    struct holds_goal *g = ctx;
    g->last = kit_holds(g->pid);
    return g->last.fds <= g->goal.fds && g->last.maps <= g->goal.maps && g->last.threads <= g->goal.threads;
}

static void check_holds(struct kit *k, struct kit_holds before, const char *when)
{
    struct holds_goal g = {.pid = k->pid, .goal = before};
    CHECK(kit_until(holds_at_most, &g, 5000), "%s: fds %d -> %d, maps %d -> %d, threads %d -> %d", when,
          before.fds, g.last.fds, before.maps, g.last.maps, before.threads, g.last.threads);
}

/* ---- wrong attaches ---- */

static void expect_refused(struct kit *k, struct kit_worker *w, const char *name, int rc_wanted,
                           const char *text)
{
    struct shm_error err = {0};
    int rc = prt_client_attach(k->client, &w->request, NULL, &err);
    CHECK(rc == rc_wanted && strstr(err.text, text), "%s: %d (wanted %d), '%s' (wanted '%s')", name, rc,
          rc_wanted, err.text, text);
}

static void test_refusals(struct kit *k)
{
    struct kit_holds before = kit_holds(k->pid);
    struct kit_worker good, w;
    kit_worker_make(k, 8, &good);

    w = good, w.request.layers++;
    expect_refused(k, &w, "layers", -EINVAL, "layers");
    w = good, w.request.experts /= 2;
    expect_refused(k, &w, "experts", -EINVAL, "experts");
    w = good, w.request.slot_bytes -= 256;
    expect_refused(k, &w, "slot_bytes", -EINVAL, "blob");
    w = good, w.request.slot_bytes += 1;
    expect_refused(k, &w, "slot alignment", -EINVAL, "slot_bytes");
    w = good, w.request.group_entries = 1;
    expect_refused(k, &w, "group_entries", -EINVAL, "group_entries");
    w = good, w.request.ring = 4, w.request.group_entries = 2,
    w.request.groups_per_layer = w.request.experts / 2;
    expect_refused(k, &w, "segment of another geometry", -EINVAL, "control segment");
    w = good, w.request.slot_bytes = UINT64_C(1) << 40;
    expect_refused(k, &w, "huge slots", -ERANGE, "slot_bytes");
    w = good, w.request.slot_bytes = UINT64_C(1) << 33;
    expect_refused(k, &w, "slots unlike the ring", -EINVAL, "geometry");
    w = good, w.request.ring = 0;
    expect_refused(k, &w, "no ring", -ERANGE, "ring");
    w = good, memset(w.request.name, 'x', sizeof(w.request.name));
    expect_refused(k, &w, "name without an end", -ERANGE, "name");
    w = good, w.request.link_gbps = 0.0 / 0.0;
    expect_refused(k, &w, "NaN", -ERANGE, "link_gbps");
    w = good, w.request.device = PRT_DEVICE_CUDA;
    expect_refused(k, &w, "device", -ENOTSUP, "device");
    w = good, w.request.start++;
    expect_refused(k, &w, "start time", -ESRCH, "process");
    w = good, w.request.pid = 1;
    expect_refused(k, &w, "somebody else's pid", -ESRCH, "process");

    /* the ring: not sealed, not a memfd, a pipe, not open, of another size */
    w = good;
    int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, (off_t)good.ring_bytes) == 0, "ftruncate");
    w.request.ring_fd = (uint32_t)fd;
    expect_refused(k, &w, "unsealed ring", -EINVAL, "sealed");
    w.request.control_fd = (uint32_t)fd;
    expect_refused(k, &w, "unsealed control", -EINVAL, "sealed");
    close(fd);
    char path[128];
    snprintf(path, sizeof(path), "%s/plain", k->runtime);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(ftruncate(fd, (off_t)good.ring_bytes) == 0, "ftruncate");
    w = good, w.request.ring_fd = (uint32_t)fd;
    expect_refused(k, &w, "plain file", -EINVAL, "memfd");
    close(fd);
    unlink(path);
    fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd >= 0) {
        w.request.ring_fd = (uint32_t)fd;
        expect_refused(k, &w, "huge pages", -EINVAL, "ordinary pages");
        close(fd);
    }
    int pipefd[2];
    CHECK(pipe2(pipefd, O_CLOEXEC) == 0, "pipe");
    w.request.ring_fd = (uint32_t)pipefd[0];
    expect_refused(k, &w, "pipe", -EINVAL, "memfd");
    close(pipefd[0]);
    close(pipefd[1]);
    w.request.ring_fd = 1000000;
    expect_refused(k, &w, "no such descriptor", -ENOENT, "ring");
    w.request.ring_fd = good.request.control_fd;
    expect_refused(k, &w, "ring of another size", -EINVAL, "bytes");

    /* the control segment's own words */
    w = good;
    good.view.worker->header.writer_pid++;
    expect_refused(k, &w, "segment of another process", -EINVAL, "written by");
    good.view.worker->header.writer_pid--;
    good.view.worker->geometry.ring++;
    expect_refused(k, &w, "geometry differs", -EINVAL, "differs");
    good.view.worker->geometry.ring--;
    good.view.worker->header.magic[7]++;
    expect_refused(k, &w, "other layout version", -EPROTO, "EXDWRK");
    good.view.worker->header.magic[7]--;
    atomic_store(&good.view.worker->done_seq, 3);
    expect_refused(k, &w, "used segment", -EINVAL, "used before");
    atomic_store(&good.view.worker->done_seq, 0);

    CHECK(kit_workers(k) == 0, "a refused worker is in the table");
    CHECK(atomic_load(&prt_client_store(k->client)->counters.refused) > 15, "refusals are not counted");
    check_holds(k, before, "after refusals");

    struct shm_error err = {0};
    strcpy(good.request.name, "a\033[2Jb"); /* tools print it on terminals */
    CHECK(prt_client_attach(k->client, &good.request, NULL, &err) == 0, "the right one was refused: %s",
          err.text);
    CHECK(kit_workers(k) == 1, "no worker in the table");
    CHECK(strcmp(prt_client_store(k->client)->worker[0].name, "a?[2Jb") == 0, "control bytes in the store");
    struct prt_attach_reply reply = {0};
    prt_client_attach(k->client, &good.request, &reply,
                      &err); /* same segment again: another session; ours to end */
    kit_worker_free(&good);
    const struct shm_store *s = prt_client_store(k->client);
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        if (atomic_load(&s->worker[i].pid))
            CHECK(prt_client_detach(k->client, s->worker[i].session, &err) == 0, "detach: %s", err.text);
    CHECK(prt_client_detach(k->client, 12345, &err) == -ENOENT, "detach of nothing");
    CHECK(kit_until(no_workers, k, 1000), "still in the table after detach");
    check_holds(k, before, "after detach");
}

/* ---- broken protocol ---- */

static void test_broken_protocol(struct kit *k)
{
    struct kit_holds before = kit_holds(k->pid);
    static const char *const said[] = {"posted stream 7", "posted stream 0", "released group",
                                       "groups released"};
    for (int variant = 0; variant < 4; variant++) {
        struct kit_worker w;
        struct shm_error err = {0};
        kit_worker_make(k, 8, &w);
        CHECK(prt_client_attach(k->client, &w.request, NULL, &err) == 0, "attach: %s", err.text);
        if (variant == 0) {
            kit_worker_post(&w, 7, 100); /* not the next one */
        } else if (variant == 1) {
            w.view.worker->descriptor.flags = UINT32_MAX;
            atomic_store(&w.view.worker->stream_seq, 1);
            shm_bell_ring(&w.view.worker->issuer_bell);
        } else if (variant == 2) {
            kit_worker_post(&w, 1, 4096);
            for (int t = 0; t < 3000 && !atomic_load(&w.view.worker->landed_groups); t++)
                usleep(1000);
            atomic_store(&w.view.worker->released_groups, UINT64_MAX / 2); /* what never landed */
            shm_bell_ring(&w.view.worker->issuer_bell);
        } else {
            atomic_store(&w.view.worker->released_groups, 1); /* before there was a stream */
            kit_worker_post(&w, 1, 4096);
        }
        CHECK(kit_until(no_workers, k, 3000), "variant %d: the worker was kept", variant);
        for (int t = 0; t < 1000 && !atomic_load(&w.view.worker->detached); t++)
            usleep(1000);
        CHECK(atomic_load(&w.view.worker->detached) == 1, "variant %d: not told", variant);
        CHECK(strstr(w.view.worker->error_text, said[variant]), "variant %d: '%s'", variant,
              w.view.worker->error_text);
        kit_worker_free(&w);
    }
    check_holds(k, before, "after broken protocol");
}

/* ---- death ---- */

static void test_deaths(struct kit *k, int kills)
{
    struct kit_holds before = kit_holds(k->pid);
    uint64_t worst_ns = 0;
    int late = 0;
    for (int i = 0; i < kills; i++) {
        pid_t pid = spawn_worker(k, i % 2 ? "busy" : "idle");
        CHECK(kit_workers(k) == 1, "kill %d: %d workers", i, kit_workers(k));
        uint64_t began_ns = shm_now_ns();
        kill(pid, SIGKILL);
        CHECK(kit_until(no_workers, k, 3000), "kill %d: the session stays", i);
        uint64_t ns = shm_now_ns() - began_ns;
        late += ns > 100000000;
        worst_ns = ns > worst_ns ? ns : worst_ns;
        waitpid(pid, NULL, 0);
    }
    fprintf(stderr, "%d kills: worst %.1f ms until the session was gone, %d above 100 ms\n", kills,
            (double)worst_ns / 1e6, late);
    CHECK(late <= kills / 50, "%d of %d deaths were seen after more than 100 ms", late, kills);
    check_holds(k, before, "after kills");
    CHECK(atomic_load(&prt_client_store(k->client)->counters.deaths) == (uint64_t)kills,
          "deaths are not counted");
}

/* The park through the socket: a session is its owner's alone, and a death gives back what it had reserved.
 */
static bool one_worker(void *ctx)
{
    return kit_workers(ctx) == 1;
}

static void test_park(struct kit *k)
{
    struct kit_worker w;
    struct shm_error err = {0};
    struct prt_attach_reply reply;
    struct prt_parkopen_reply open;
    struct prt_parkreserve_reply r;
    struct prt_parkcommit_reply committed;
    struct prt_parkfind_reply found;
    pid_t pid = spawn_worker(k, "park");
    kit_worker_make(k, 8, &w);
    CHECK(park_open(k->client, 999999, &open, &err) == -ENOENT, "a session that never was");
    CHECK(prt_client_attach(k->client, &w.request, &reply, &err) == 0, "attach: %s", err.text);
    CHECK(park_open(k->client, reply.session - 1, &open, &err) == -EPERM && strstr(err.text, "belongs"),
          "another's session: %s", err.text);
    CHECK(park_reserve(k->client, reply.session, &r, &err) == -EINVAL && strstr(err.text, "PARKOPEN"),
          "reserved before PARKOPEN");
    CHECK(park_open(k->client, reply.session, &open, &err) == 0, "PARKOPEN: %s", err.text);
    CHECK(access(open.park_path, R_OK | W_OK) == 0 && open.kept == 1 && open.slots > 0, "%s", open.park_path);
    CHECK(park_reserve(k->client, reply.session, &r, &err) == 0 && r.state[0] == PRT_PARK_KEPT &&
              r.state[1] == PRT_PARK_BUSY,
          "states %u %u", r.state[0], r.state[1]);
    struct prt_parkcommit_request c = {.session = reply.session, .blocks = 1, .slot = {1}};
    CHECK(prt_client_parkcommit(k->client, &c, &committed, &err) == -EINVAL, "another's slot was committed");
    struct prt_parkfind_request f = {.session = reply.session, .keys = 2, .key = {1, 1, 2, 2}};
    CHECK(prt_client_parkfind(k->client, &f, &found, &err) == 0 && found.found == 1 &&
              found.checksum[0] == 7 && found.checksum[1] == 8,
          "found %u", found.found);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    CHECK(kit_until(one_worker, k, 10000), "the dead one's session stays");
    CHECK(park_reserve(k->client, reply.session, &r, &err) == 0 && r.state[1] == PRT_PARK_SLOT,
          "its reservation is held: state %u", r.state[1]);
    CHECK(shm_counter_get(&prt_client_store(k->client)->counters.park_blocks) == 1, "blocks are not counted");
    prt_client_detach(k->client, reply.session, &err);
    CHECK(kit_until(no_workers, k, 10000), "the session stays");
    kit_worker_free(&w);
}

/* ---- control ---- */

static void test_delivered_twice(struct kit *k)
{
    struct kit_worker w;
    struct prt_channel *channel = NULL;
    struct shm_error err = {0};
    struct prt_attach_reply first, second;
    uint8_t bytes[4096];
    size_t n;
    kit_worker_make(k, 8, &w);
    uint64_t attaches = atomic_load(&prt_client_store(k->client)->counters.attaches);
    CHECK(prt_channel_connect(prt_client_paths(k->client)->socket, &channel, &err) == 0, "%s", err.text);
    prt_attach_request_encode(&w.request, 77, 1);
    int rc = prt_channel_request(channel, &w.request, sizeof(w.request), bytes, sizeof(bytes), &n, -1, 5000);
    CHECK(rc == 0 && prt_attach_reply_decode(bytes, n, &first, &err) == 0, "%d %s", rc, err.text);
    rc = prt_channel_request(channel, &w.request, sizeof(w.request), bytes, sizeof(bytes), &n, -1, 5000);
    CHECK(rc == 0 && prt_attach_reply_decode(bytes, n, &second, &err) == 0, "%d %s", rc, err.text);
    CHECK(first.header.status == 0 && memcmp(&first, &second, sizeof(first)) == 0,
          "two answers to one request");
    CHECK(atomic_load(&prt_client_store(k->client)->counters.attaches) == attaches + 1 && kit_workers(k) == 1,
          "a request delivered twice acted twice");

    /* another version: both are named, and the connection lives on */
    struct prt_hello_request hello = {0};
    prt_hello_request_encode(&hello, 77, 2);
    hello.header.version = 9;
    rc = prt_channel_request(channel, &hello, sizeof(hello), bytes, sizeof(bytes), &n, -1, 5000);
    struct prt_hello_reply hi;
    CHECK(rc == 0 && prt_hello_reply_decode(bytes, n, &hi, &err) == 0 && hi.header.status == -EPROTO &&
              strstr(hi.header.error, "version 9") && strstr(hi.header.error, "version 3"),
          "other version: %d %s", rc, err.text);
    /* garbage of every length is answered, too long ones are refused on our side */
    for (size_t len = 1; len < 200; len += 13) {
        memset(bytes, 0xa5, len);
        rc = prt_channel_request(channel, bytes, len, bytes + 512, sizeof(bytes) - 512, &n, -1, 5000);
        CHECK(rc == 0 && n == sizeof(struct prt_reply_header), "garbage of %zu bytes: %d", len, rc);
    }
    void *big = calloc(1, PRT_MESSAGE_MAX + 1);
    CHECK(prt_channel_request(channel, big, PRT_MESSAGE_MAX + 1, bytes, sizeof(bytes), &n, -1, 100) ==
              -EMSGSIZE,
          "an oversized request was sent");
    free(big);
    prt_channel_close(&channel);

    struct prt_configure_request c = {
        .session = first.session, .policy = SHM_POLICY_FULL, .depth = 3, .link_gbps = 2.5};
    struct prt_configure_reply now;
    CHECK(prt_client_configure(k->client, &c, &now, &err) == 0 && now.policy == SHM_POLICY_FULL &&
              now.depth == 3 && now.order == first.order && now.floor == first.floor && now.link_gbps == 2.5,
          "configure: %s", err.text);
    c = (struct prt_configure_request){.session = first.session, .link_gbps = -1};
    CHECK(prt_client_configure(k->client, &c, &now, &err) == 0 && now.depth == 3 && now.link_gbps == 0,
          "configure keeps: %s", err.text);
    c.session = 999;
    CHECK(prt_client_configure(k->client, &c, &now, &err) == -ENOENT, "configure of nothing");
    struct prt_hello_reply h;
    CHECK(prt_client_hello(k->client, &h, &err) == 0 && h.pid == (uint32_t)k->pid && h.workers == 1, "hello");
    CHECK(prt_client_detach(k->client, first.session, &err) == 0, "detach: %s", err.text);
    kit_worker_free(&w);
}

/* ---- life ---- */

/* Sessions that end faster than their slow links let go of: the next one is refused, the loop never waits. */
static void test_many_closing(struct kit *k)
{
    struct shm_error err = {0};
    int attached = 0, rc = 0;
    uint64_t longest_ns = 0;
    while (attached < 200 && rc == 0) {
        struct kit_worker w;
        struct prt_attach_reply reply;
        kit_worker_make(k, 2, &w);
        w.request.link_gbps = 1e-6;
        w.request.policy = SHM_POLICY_FULL;
        uint64_t from_ns = shm_now_ns();
        rc = prt_client_attach(k->client, &w.request, &reply, &err);
        if (rc == 0) {
            attached++;
            kit_worker_post(&w, 1, 4096);
            while (atomic_load(&w.view.worker->issued_entries) == 0)
                usleep(100);
            CHECK(prt_client_detach(k->client, reply.session, &err) == 0, "%s", err.text);
        }
        uint64_t ns = shm_now_ns() - from_ns;
        longest_ns = ns > longest_ns ? ns : longest_ns;
        kit_worker_free(&w);
    }
    CHECK(rc == -EBUSY && strstr(err.text, "being closed"), "%d after %d: %s", rc, attached, err.text);
    CHECK(attached >= 64, "%d", attached);
    CHECK(longest_ns < UINT64_C(2000000000), "the loop stood still for %.1f s", (double)longest_ns / 1e9);
    for (int i = 0; i < 300 && rc == -EBUSY; i++) {
        struct kit_worker w;
        kit_worker_make(k, 2, &w);
        rc = prt_client_attach(k->client, &w.request, NULL, &err);
        kit_worker_free(&w);
        usleep(100000);
    }
    CHECK(rc == 0, "never let in again: %s", err.text);
}

static bool left_behind(const struct kit *k, const char *file)
{
    char path[160];
    snprintf(path, sizeof(path), "%s/%s", k->runtime, file);
    return access(path, F_OK) == 0;
}

static void test_life(struct kit *k)
{
    struct shm_error err = {0};
    /* a second one on the instance */
    struct kit second = *k;
    second.client = NULL;
    char log_before[128], log_after[128];
    snprintf(log_before, sizeof(log_before), "%s/log", k->runtime);
    snprintf(log_after, sizeof(log_after), "%s/log.first", k->runtime);
    rename(log_before, log_after); /* the first keeps writing to its file */
    CHECK(kit_start(&second, NULL) == 1, "a second expertd started");
    char text[64];
    snprintf(text, sizeof(text), "expertd pid %d", (int)k->pid);
    CHECK(kit_logged(k, text), "the second does not name the first");
    CHECK(prt_client_hello(k->client, NULL, &err) == 0, "the first suffered: %s", err.text);

    /* SIGTERM with a stream that never ends: drained for --drain-ms, then broken off */
    struct kit_worker w;
    struct prt_attach_reply reply;
    kit_worker_make(k, 8, &w);
    CHECK(prt_client_attach(k->client, &w.request, &reply, &err) == 0, "attach: %s", err.text);
    kit_worker_post(&w, 1, 4096);
    usleep(20000);
    uint64_t began_ns = shm_now_ns();
    kill(k->pid, SIGTERM);
    usleep(100000);
    struct kit_worker late;
    kit_worker_make(k, 8, &late);
    CHECK(prt_client_attach(k->client, &late.request, NULL, &err) == -ESHUTDOWN, "attached while draining");
    kit_worker_free(&late);
    int status = kit_wait(k, 10000);
    double ms = (double)(shm_now_ns() - began_ns) / 1e6;
    CHECK(status == 0 && ms >= 290 && ms < 3000, "exit status %d after %.0f ms", status, ms);
    CHECK(atomic_load(&w.view.worker->detached) == 1 && w.view.worker->error_text[0],
          "the worker was not told");
    CHECK(prt_client_liveness(k->client) == PRT_STOPPED, "the store does not say stopped");
    CHECK(!left_behind(k, "expertd/default/control.sock") && !left_behind(k, "expertd/default/store") &&
              !left_behind(k, "expertd/default/lock"),
          "files were left behind");
    kit_worker_free(&w);

    /* again: the arena is adopted; killed: callers know at once; again, over the remains */
    CHECK(kit_start(k, NULL) == 0, "no second start");
    CHECK(prt_client_store(k->client)->counters.arena_adopted, "the arena was not adopted");
    kill(k->pid, SIGSTOP);
    CHECK(prt_client_liveness(k->client) == PRT_LIVE, "a stopped process is not dead");
    struct prt_channel *channel = NULL;
    CHECK(prt_channel_connect(prt_client_paths(k->client)->socket, &channel, &err) == 0, "%s", err.text);
    struct prt_hello_request hello = {0};
    uint8_t bytes[4096];
    size_t n;
    prt_hello_request_encode(&hello, 5, 1);
    CHECK(prt_channel_request(channel, &hello, sizeof(hello), bytes, sizeof(bytes), &n,
                              prt_client_expertd_pidfd(k->client), 100) == -ETIMEDOUT,
          "no time limit");
    kill(k->pid, SIGKILL);
    began_ns = shm_now_ns();
    CHECK(prt_channel_request(channel, &hello, sizeof(hello), bytes, sizeof(bytes), &n,
                              prt_client_expertd_pidfd(k->client), 5000) == -ESRCH &&
              shm_now_ns() - began_ns < 500000000,
          "a dead expertd was waited for");
    prt_channel_close(&channel);
    CHECK(prt_client_hello(k->client, NULL, &err) == -ESRCH, "hello from a dead one");
    kit_wait(k, 1000);
    struct prt_client *stale = NULL;
    CHECK(prt_client_open(k->runtime, NULL, 0, &stale, &err) == -ESTALE && !stale,
          "opened a dead one's store");
    CHECK(prt_client_open(k->runtime, NULL, PRT_OPEN_STALE, &stale, &err) == 0 &&
              prt_client_liveness(stale) == PRT_STALE,
          "the remains cannot be looked at");
    prt_client_close(&stale);
    const char *no_keep[] = {"--no-keep", "--quiet", NULL};
    CHECK(kit_start(k, no_keep) == 0, "no start over the remains");
    CHECK(prt_client_store(k->client)->counters.arena_adopted, "the arena was not adopted after a kill");
    CHECK(prt_client_stop(k->client, 100, true, &err) == 0, "stop: %s", err.text);
    CHECK(kit_wait(k, 5000) == 0, "stop: exit status");
    CHECK(!left_behind(k, "arena/default/arena"), "--no-keep kept the arena");

    const char *bad[] = {"--device", "cuda", NULL};
    setenv("EXPERTD_CUDA_LIBRARY", "/nonexistent/libcuda.so.1", 1);
    CHECK(kit_start(k, bad) == 1 && kit_logged(k, "no CUDA driver"), "--device cuda");
    bad[1] = "cuda:x";
    CHECK(kit_start(k, bad) == 2 && kit_logged(k, "number of a GPU"), "--device cuda:x");
    k->model = "/dev/null";
    CHECK(kit_start(k, NULL) == 1 && kit_logged(k, "/dev/null"), "a bad model");
    CHECK(!left_behind(k, "expertd/default/store"), "a failed start left its store");
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "--worker") == 0)
        return run_worker(argv[2], argv[3]);
    if (argc < 3)
        return 2;
    struct kit k;
    kit_begin(&k, argv[1], argv[2]);
    const char *options[] = {"--drain-ms", "300", NULL};
    int rc = kit_start(&k, options);
    CHECK(rc == 0, "expertd did not start: exit status %d", rc);
    if (rc == 0) {
        CHECK(kit_until(serving, &k, 20000), "never serving");
        CHECK(prt_client_hello(k.client, NULL, NULL) == 0, "hello"); /* our connection counts too */
        usleep(100000); /* the loader's threads are gone: what is counted from here on is at rest */
        test_refusals(&k);
        test_broken_protocol(&k);
        test_deaths(&k, argc > 3 ? atoi(argv[3]) : 200);
        test_delivered_twice(&k);
        test_many_closing(&k);
        test_life(&k);
    }
    kit_end(&k);
    /* what is parked needs a memory file system */
    kit_begin(&k, argv[1], argv[2]);
    rmdir(k.runtime);
    snprintf(k.runtime, sizeof(k.runtime), "/dev/shm/exd-test-%d-XXXXXX", (int)getpid());
    const char *parking[] = {"--park", "64M", NULL};
    if (mkdtemp(k.runtime)) {
        rc = kit_start(&k, parking);
        CHECK(rc == 0, "expertd did not start: exit status %d", rc);
        if (rc == 0)
            test_park(&k);
        kit_end(&k);
    } else {
        fprintf(stderr, "parking was not tested: /dev/shm: %m\n");
    }
    fprintf(stderr, failures ? "%d checks FAILED\n" : "all passed\n", failures);
    return failures ? 1 : 0;
}
