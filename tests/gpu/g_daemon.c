/* SPDX-License-Identifier: MIT */
/*
 * expertd --device cuda, seen by a hand-made worker whose ring is device
 * memory: whole streams with every slot compared to the arena, no bell rung
 * while they run; attaching, leaving and wrong requests. On the fake driver,
 * what expertd asked of it is read from its log: copy engines only.
 *
 *     g_daemon EXPERTD MODEL      exit 77 without a driver
 */
#include "shm/shm_bell.h"
#include "tests/gpu/g_worker.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define RING 12u

static int failures;
#define CHECK(what, ...)                                                                                     \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            failures++;                                                                                      \
            fprintf(stderr, "FAILED %s:%d: %s: ", __FILE__, __LINE__, #what);                                \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
        }                                                                                                    \
    } while (0)

/* Token counts of a layer: some experts get none. */
static uint32_t tokens_of(uint64_t seq, uint32_t layer, uint32_t expert)
{
    return (expert * 2654435761u + layer * 40503u + (uint32_t)seq * 977u) >> 16 & 1;
}

/* As the device does it: words change, nothing rings. */
static void publish(struct worker *k, uint32_t layer)
{
    struct shm_worker_view *v = &k->w.view;
    uint32_t experts = k->w.request.experts;
    struct shm_mask mask = {{0}};
    for (uint32_t e = 0; e < experts; e++) {
        v->tokens[(size_t)layer * experts + e] = tokens_of(k->seq, layer, e);
        if (tokens_of(k->seq, layer, e))
            shm_mask_set(&mask, e);
    }
    v->route[layer].mask = mask;
    atomic_store_explicit(&v->route[layer].seq, k->seq, memory_order_release);
}

/* All experts that the table puts in group g of the layer, compared with the arena. */
static uint32_t compare_group(struct worker *k, uint32_t layer, uint32_t group)
{
    uint32_t n = 0, experts = k->w.request.experts;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t entry = atomic_load(&k->w.view.table[(size_t)layer * experts + e]);
        if (shm_entry_state(entry) != SHM_ENTRY_SLOT || shm_entry_group(entry) != group)
            continue;
        uint64_t bytes = k->arena.layers[layer].blob_bytes;
        CHECK(KRN_CUDA(copy_out_async, k->slot, k->ring + shm_entry_slot(entry) * k->w.request.slot_bytes,
                       bytes, k->stream) == 0 &&
                  KRN_CUDA(stream_synchronize, k->stream) == 0,
              "%s", krn_cuda_detail()->name);
        k->wrong += memcmp(k->slot, shm_arena_blob(&k->arena, layer, e), bytes) != 0;
        n += tokens_of(k->seq, layer, e);
    }
    return n;
}

static bool done(void *ctx)
{
    struct worker *k = ctx;
    return atomic_load_explicit(&k->w.view.worker->done_seq, memory_order_acquire) == k->seq;
}

/* One stream from descriptor to done_seq. */
static void run_stream(struct worker *k, uint32_t policy)
{
    struct shm_worker *s = k->w.view.worker;
    const struct shm_geometry *g = &k->w.layout.geometry;
    uint32_t routed = 0, seen = 0;
    kit_worker_post(&k->w, ++k->seq, 2048);
    for (uint32_t l = 0; l < g->layers; l++) {
        publish(k, l);
        for (uint32_t e = 0; e < g->experts; e++)
            routed += tokens_of(k->seq, l, e);
        for (uint32_t group = 0; group < g->groups_per_layer; group++) {
            uint64_t number = k->group_base + (uint64_t)l * g->groups_per_layer + group;
            CHECK(KRN_CUDA(wait_32, k->stream, k->flag, (uint32_t)number + 1, KRN_CUDA_WAIT_GEQ) == 0 &&
                      KRN_CUDA(stream_synchronize, k->stream) == 0,
                  "%s", krn_cuda_detail()->name);
            seen += compare_group(k, l, group);
            atomic_store_explicit(&s->released_groups, number + 1, memory_order_release);
        }
    }
    k->group_base += (uint64_t)g->layers * g->groups_per_layer;
    CHECK(kit_until(done, k, 5000), "stream %d: not done", (int)k->seq);
    CHECK(atomic_load(&s->result) == SHM_RESULT_OK, "%.200s", s->error_text);
    CHECK(atomic_load(&s->landed_groups) == k->group_base, "landed_groups lags behind the flag");
    struct shm_report r = {0};
    CHECK(shm_report_read(s, k->seq, &r) == 0 && r.routed == routed && seen == routed && k->wrong == 0 &&
              r.copied + r.dropped == r.entries && r.policy == policy,
          "routed %u, reported %d, seen %u, wrong slots %d, copied %d, dropped %d of %d, policy %u", routed,
          (int)r.routed, seen, (int)k->wrong, (int)r.copied, (int)r.dropped, (int)r.entries, r.policy);
    if (policy == SHM_POLICY_FULL)
        CHECK(r.dropped == 0, "full policy dropped %d", (int)r.dropped);
    else
        CHECK(r.dropped > 0 && r.outstanding_max <= r.depth, "routed dropped %d, %d outstanding of %u",
              (int)r.dropped, (int)r.outstanding_max, r.depth);
}

static void configure(struct worker *k, uint32_t policy, uint32_t order, uint32_t depth,
                      uint32_t floor_tokens)
{
    struct prt_configure_request r = {
        .session = k->session, .policy = policy, .order = order, .depth = depth, .floor = floor_tokens};
    struct shm_error err = {0};
    CHECK(prt_client_configure(k->kit->client, &r, NULL, &err) == 0, "%s", err.text);
}

static void test_streams(struct kit *kit, struct krn_cuda_device *device)
{
    struct worker k;
    struct shm_error err = {0};
    worker_make(&k, kit, device, RING);
    CHECK(worker_attach(&k, &err) == 0, "%s", err.text);
    for (uint32_t order = SHM_ORDER_INDEX; order <= SHM_ORDER_RECENT; order++)
        for (uint32_t depth = 1; depth <= 16; depth *= 4) {
            configure(&k, SHM_POLICY_ROUTED, order, depth, 1024);
            run_stream(&k, SHM_POLICY_ROUTED);
        }
    configure(&k, SHM_POLICY_FULL, 0, 0, 0);
    run_stream(&k, SHM_POLICY_FULL);
    configure(&k, SHM_POLICY_ROUTED, 0, 0, 4096);
    run_stream(&k, SHM_POLICY_DEMAND);
    struct prt_configure_request paced = {.session = k.session, .link_gbps = 5};
    CHECK(prt_client_configure(kit->client, &paced, NULL, &err) == -EINVAL, "a real link was paced");
    /* broken off in the middle: flag and landed_groups go to the stream's end */
    kit_worker_post(&k.w, ++k.seq, 2048);
    usleep(20000);
    atomic_store(&k.w.view.worker->cancel_seq, k.seq);
    shm_bell_ring(&k.w.view.worker->issuer_bell);
    CHECK(kit_until(done, &k, 5000) && atomic_load(&k.w.view.worker->result) == SHM_RESULT_CANCELLED,
          "cancel");
    const struct shm_geometry *g = &k.w.layout.geometry;
    k.group_base += (uint64_t)g->layers * g->groups_per_layer;
    uint32_t flag = 0;
    CHECK(KRN_CUDA(copy_out_async, &flag, k.flag, 4, k.stream) == 0 &&
              KRN_CUDA(stream_synchronize, k.stream) == 0 && flag == (uint32_t)k.group_base &&
              atomic_load(&k.w.view.worker->landed_groups) == k.group_base,
          "flag %u, landed %d, due %d", flag, (int)atomic_load(&k.w.view.worker->landed_groups),
          (int)k.group_base);
    atomic_store(&k.w.view.worker->released_groups, k.group_base);
    configure(&k, SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 16, 1024);
    run_stream(&k, SHM_POLICY_ROUTED);
    CHECK(prt_client_detach(kit->client, k.session, &err) == 0, "%s", err.text);
    worker_free(&k);
}

static void refused(struct worker *k, const char *what, int rc, const char *word)
{
    struct shm_error err = {0};
    int got = worker_attach(k, &err);
    CHECK(got == rc && strstr(err.text, word), "%s: %d, %s", what, got, err.text);
}

static void test_refusals(struct kit *kit, struct krn_cuda_device *device)
{
    struct worker k;
    worker_make(&k, kit, device, RING);
    struct prt_attach_request good = k.w.request;
    k.w.request.ring_handle[0] ^= 0xff, k.w.request.ring_handle[9] ^= 0xff;
    memset(k.w.request.ring_handle, 0x5a, 40);
    struct shm_error err = {0};
    CHECK(worker_attach(&k, &err) < 0 && strstr(err.text, "handle"), "a wrong handle: %s", err.text);
    k.w.request = good, k.w.request.device_uuid[0]++;
    refused(&k, "another GPU", -ENODEV, "device_uuid");
    k.w.request = good, k.w.request.flag_offset = 64;
    refused(&k, "the flag inside the ring", -EINVAL, "flag");
    k.w.request = good, k.w.request.flag_offset += 2;
    refused(&k, "the flag off its boundary", -EINVAL, "flag");
    k.w.request = good, k.w.request.flag_offset = UINT64_C(1) << 40;
    refused(&k, "the flag outside the allocation", -EINVAL, "allocation");
    k.w.request = good, k.w.request.flag_offset = UINT64_MAX - 3;
    refused(&k, "the flag at the end of all", -EINVAL, "flag");
    k.w.request = good;
    worker_free(&k);
}

struct held {
    struct kit *kit;
    struct kit_holds before;
};
static bool as_before(void *ctx)
{
    struct held *h = ctx;
    struct kit_holds now = kit_holds(h->kit->pid);
    return now.fds <= h->before.fds && now.maps <= h->before.maps && now.threads <= h->before.threads;
}

/* Attach, run, leave: expertd holds what it held. */
static void test_coming_and_going(struct kit *kit, struct krn_cuda_device *device)
{
    struct held h = {.kit = kit};
    for (int i = 0; i < 12; i++) {
        struct worker k;
        struct shm_error err = {0};
        worker_make(&k, kit, device, RING);
        CHECK(worker_attach(&k, &err) == 0, "%s", err.text);
        run_stream(&k, SHM_POLICY_ROUTED);
        CHECK(prt_client_detach(kit->client, k.session, &err) == 0, "%s", err.text);
        worker_free(&k);
        if (i == 3) {
            usleep(200000);
            h.before = kit_holds(kit->pid);
        }
    }
    CHECK(kit_until(as_before, &h, 5000), "expertd holds more than before");
}

/* A process that attaches, posts a stream and reads nothing: killed while the issuer copies. */
static int victim_main(char **argv)
{
    struct kit k = {.expertd = argv[2]};
    struct worker w;
    struct krn_cuda_device *device;
    struct shm_error err = {0};
    snprintf(k.runtime, sizeof(k.runtime), "%s", argv[3]);
    if (krn_cuda_device_open(0, &device, &err) < 0 ||
        prt_client_open(k.runtime, NULL, 0, &k.client, &err) < 0)
        return 1;
    worker_make(&w, &k, device, 48);
    if (worker_attach(&w, &err) < 0)
        return 1;
    for (uint32_t l = 0; l < w.w.layout.geometry.layers; l++)
        publish(&w, l);
    w.seq = 1;
    kit_worker_post(&w.w, 1, 2048);
    if (write(1, "r", 1) != 1)
        return 1;
    for (;;)
        pause();
}

static bool nobody(void *ctx)
{
    return kit_workers(ctx) == 0;
}

static void test_worker_killed(struct kit *kit, int rounds)
{
    size_t before = 0, after = 0, total;
    CHECK(KRN_CUDA(memory_info, &before, &total) == 0, "memory");
    struct held h = {.kit = kit};
    for (int i = 0; i < rounds; i++) {
        int out[2];
        char ready = 0;
        if (i == 1)
            h.before = kit_holds(kit->pid);
        CHECK(pipe2(out, O_CLOEXEC) == 0, "pipe");
        pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            dup2(out[1], 1);
            execl("/proc/self/exe", "g_daemon", "--victim", kit->expertd, kit->runtime, (char *)NULL);
            _exit(127);
        }
        close(out[1]);
        CHECK(read(out[0], &ready, 1) == 1 && ready == 'r', "the victim did not start");
        close(out[0]);
        usleep((useconds_t)(i % 5) * 300);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        CHECK(kit_until(nobody, kit, 5000), "its session stays");
    }
    CHECK(kit_until(as_before, &h, 5000), "expertd holds more than before");
    for (int i = 0; i < 100 && after + (64u << 20) < before; i++) {
        usleep(20000);
        CHECK(KRN_CUDA(memory_info, &after, &total) == 0, "memory");
    }
    CHECK(after + (64u << 20) >= before, "device memory: %zu free before, %zu after", before, after);
    printf("worker killed -9 in mid-stream, %d times: sessions gone, device memory %+.1f MB\n", rounds,
           ((double)after - (double)before) / 1e6);
}

/* ---- the fake driver's log ---- */

#define STREAMS 4096
static void check_log(const char *path, pid_t expertd)
{
    FILE *f = fopen(path, "re");
    char line[256], call[64];
    int pid, stream, opens = 0, closes = 0, copies = 0, batches = 0, streams = 0, of;
    static bool used[STREAMS], created[STREAMS];
    unsigned long long bytes;
    CHECK(f != NULL, "no log");
    while (f && fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%d %63s %d %llu of %d", &pid, call, &stream, &bytes, &of) < 3 ||
            pid != (int)expertd)
            continue;
        if (stream < 0 || stream >= STREAMS)
            continue;
        bool copy = strcmp(call, "cuMemcpyHtoDAsync") == 0 || strcmp(call, "cuMemcpyBatchAsync") == 0;
        bool memop = strncmp(call, "cuStreamWriteValue", 18) == 0 || strcmp(call, "cuStreamBatchMemOp") == 0;
        CHECK(strcmp(call, "cuLaunchKernel") && strncmp(call, "cuMemset", 8) &&
                  strncmp(call, "cuMemcpyDtoD", 12) && strncmp(call, "cuModule", 8) &&
                  strcmp(call, "cuMemcpyDtoHAsync") && strcmp(call, "cuEventRecord"),
              "expertd called %s", call);
        CHECK(!copy || bytes >= KRN_CUDA_COPY_MIN, "a copy of %llu bytes", bytes);
        CHECK(!memop || used[stream], "%s is the first operation of its stream", call);
        /* registration holds up every copy: all of it before the first link */
        CHECK(strcmp(call, "cuMemHostRegister") || !opens, "a registration while serving");
        if (copy)
            used[stream] = true;
        copies += copy, batches += strcmp(call, "cuMemcpyBatchAsync") == 0;
        opens += strcmp(call, "cuIpcOpenMemHandle") == 0;
        closes += strcmp(call, "cuIpcCloseMemHandle") == 0;
        if (strcmp(call, "cuStreamCreate") == 0)
            created[stream] = true;
    }
    if (f)
        fclose(f);
    for (int i = 0; i < STREAMS; i++)
        streams += created[i];
    /* one trial at start, one for each link; a wrong handle was opened for nothing, and closed ranges refused
     */
    CHECK(streams > 1 && streams <= opens + 1, "%d copy streams for %d links", streams, opens);
    CHECK(closes == opens - 1, "%d rings opened (one wrong), %d closed", opens, closes);
    CHECK(copies > 100 && batches > 20, "%d copies, %d in batches", copies, batches);
    printf("fake driver: expertd made %d copies (%d in batches) on %d streams, %d rings\n", copies, batches,
           streams, opens);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    if (argc == 4 && strcmp(argv[1], "--victim") == 0)
        return victim_main(argv);
    struct shm_error err = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (krn_cuda_load(&err) < 0) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    bool fake = getenv(KRN_CUDA_LIBRARY_ENV) != NULL;
    struct kit k;
    worker_kit(&k, argv[1], argv[2]);
    char log[96];
    snprintf(log, sizeof(log), "%s/fakecuda.log", k.runtime);
    if (fake)
        setenv("FAKECUDA_LOG", log, 1);
    struct krn_cuda_device *device;
    if (krn_cuda_device_open(0, &device, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    const char *options[] = {"--device", "cuda", "--log-level", "debug", "--trace", NULL};
    uint64_t begin_ns = shm_now_ns();
    int rc = kit_start(&k, options);
    CHECK(rc == 0, "expertd did not start: exit status %d", rc);
    printf("expertd: ready after %.0f ms\n", (double)(shm_now_ns() - begin_ns) / 1e6);
    if (rc == 0) {
        CHECK(strncmp(prt_client_store(k.client)->device, "CUDA: 1 of", 10) == 0, "store: %s",
              prt_client_store(k.client)->device);
        pid_t expertd = k.pid;
        test_streams(&k, device);
        test_refusals(&k, device);
        test_coming_and_going(&k, device);
        test_worker_killed(&k, fake ? 6 : 20);
        CHECK(kit_logged(&k, "registered") && kit_logged(&k, "a flag write t"), "log lines");
        CHECK(prt_client_stop(k.client, 100, true, &err) == 0, "%s", err.text);
        CHECK(kit_wait(&k, 10000) == 0, "exit status");
        if (fake)
            check_log(log, expertd);
        begin_ns = shm_now_ns();
        CHECK(kit_start(&k, options) == 0, "no second start");
        printf("expertd: adopted and ready after %.0f ms\n", (double)(shm_now_ns() - begin_ns) / 1e6);
    }
    if (failures || !fake) {
        char command[128];
        snprintf(command, sizeof(command), "grep -v trace %s/log >&2", k.runtime);
        if (system(command))
            fputs("no log\n", stderr);
    }
    kit_end(&k);
    krn_cuda_device_close(&device);
    fprintf(stderr, failures ? "%d checks FAILED\n" : "all passed\n", failures);
    return failures ? 1 : 0;
}
