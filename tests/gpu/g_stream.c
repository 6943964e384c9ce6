/* SPDX-License-Identifier: MIT */
/*
 * expertd's issuer on a real link, against a worker whose chunks are enqueued
 * as a whole: per layer a kernel that takes the router's time, the kernel that
 * publishes, and per group a stream wait, a kernel that takes the experts'
 * time, and a write that releases. No host between the layers. Prints time over
 * the link bound of the routed bytes for policies, depths and routed shares.
 *
 *     g_stream EXPERTD MODEL [ROUTER_US EXPERTS_US]     exit 77 without a driver or kernels
 */
#include "kernels/krn_fatbin.h"
#include "shm/shm_bell.h"
#include "tests/gpu/g_worker.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RING 256u

static int failures;
static struct worker k;
static void *module, *spin, *publish;
static krn_cuda_ptr counts, sink, control;
static uint64_t router_ns = 500000, experts_ns = 300000;

static void must(int rc, const char *what)
{
    if (rc == 0)
        return;
    fprintf(stderr, "%s: %s %s\n", what, krn_cuda_detail()->name, krn_cuda_detail()->text);
    exit(1);
}

static bool routed(uint32_t layer, uint32_t expert, uint32_t percent)
{
    uint32_t x = (layer * 1024 + expert) * 2654435761u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return x % 100 < percent;
}

static void kernel_for(uint64_t ns)
{
    if (!ns)
        return;
    void *arguments[] = {&ns, &sink};
    must(KRN_CUDA(launch, spin, (unsigned)k.device->multiprocessors, 1, 1, 1024, 1, 1, 0, k.stream, arguments,
                  NULL),
         "spin");
}

static krn_cuda_ptr segment(const volatile void *field)
{
    return control + (uint64_t)((const volatile uint8_t *)field - (const uint8_t *)k.w.control);
}

static void enqueue_layer(uint32_t l)
{
    const struct shm_geometry *g = &k.w.layout.geometry;
    uint32_t experts = g->experts;
    kernel_for(router_ns);
    krn_cuda_ptr layer_counts = counts + (uint64_t)l * experts * 4, mask = segment(&k.w.view.route[l].mask),
                 tokens = segment(&k.w.view.tokens[(size_t)l * experts]),
                 seq = segment(&k.w.view.route[l].seq);
    void *arguments[] = {&layer_counts, &experts, &mask, &tokens, &seq, &k.seq};
    must(KRN_CUDA(launch, publish, 1, 1, 1, 128, 1, 1, 0, k.stream, arguments, NULL), "publish");
    for (uint32_t group = 0; group < g->groups_per_layer; group++) {
        uint64_t number = k.group_base + (uint64_t)l * g->groups_per_layer + group + 1;
        must(KRN_CUDA(wait_32, k.stream, k.flag, (uint32_t)number, KRN_CUDA_WAIT_GEQ), "wait");
        kernel_for(experts_ns / g->groups_per_layer);
        must(KRN_CUDA(write_64, k.stream, segment(&k.w.view.worker->released_groups), number, 0), "release");
    }
}

/* ns on the CPU of expertd's issuer threads so far. */
static uint64_t issuer_ns(void)
{
    char path[96], name[32] = "";
    uint64_t sum = 0;
    snprintf(path, sizeof(path), "/proc/%d/task", (int)k.kit->pid);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        unsigned long long ns = 0;
        snprintf(path, sizeof(path), "/proc/%d/task/%.12s/comm", (int)k.kit->pid, e->d_name);
        FILE *f = fopen(path, "re");
        if (!f)
            continue;
        bool ours = fgets(name, sizeof(name), f) && strncmp(name, "issuer", 6) == 0;
        fclose(f);
        snprintf(path, sizeof(path), "/proc/%d/task/%.12s/schedstat", (int)k.kit->pid, e->d_name);
        f = ours ? fopen(path, "re") : NULL;
        if (f && fscanf(f, "%llu", &ns) == 1)
            sum += ns;
        if (f)
            fclose(f);
    }
    if (d)
        closedir(d);
    return sum;
}

static bool done(void *ctx)
{
    (void)ctx;
    return atomic_load_explicit(&k.w.view.worker->done_seq, memory_order_acquire) == k.seq;
}

struct setting {
    const char *name;
    uint32_t policy, order, depth, floor;
    bool oracle; /* all routing sets are known before the stream */
};

static void run(const struct setting *s, uint32_t percent, double peak_gbps)
{
    const struct shm_geometry *g = &k.w.layout.geometry;
    struct shm_error err = {0};
    struct prt_configure_request r = {
        .session = k.session, .policy = s->policy, .order = s->order, .depth = s->depth, .floor = s->floor};
    if (prt_client_configure(k.kit->client, &r, NULL, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        failures++;
        return;
    }
    uint32_t *host = calloc(g->layers * g->experts, sizeof(*host));
    if (!host)
        exit(1);
    for (uint32_t l = 0; l < g->layers; l++)
        for (uint32_t e = 0; e < g->experts; e++)
            host[l * g->experts + e] = routed(l, e, percent);
    must(KRN_CUDA(copy_in_async, counts, host, g->layers * g->experts * 4ul, k.stream), "counts");
    must(KRN_CUDA(stream_synchronize, k.stream), "counts");
    free(host);
    double best_ms = 1e9, cpu_us = 0;
    struct shm_report best = {0}, report = {0};
    for (int round = 0; round < 3; round++) {
        k.seq++;
        for (uint32_t l = 0; s->oracle && l < g->layers; l++) {
            struct shm_mask mask = {{0}};
            for (uint32_t e = 0; e < g->experts; e++)
                if (routed(l, e, percent))
                    shm_mask_set(&mask, e);
            k.w.view.route[l].mask = mask;
            atomic_store(&k.w.view.route[l].seq, k.seq);
        }
        uint64_t cpu = issuer_ns(), begin_ns = shm_now_ns();
        kit_worker_post(&k.w, k.seq, 2048);
        for (uint32_t l = 0; l < g->layers; l++)
            enqueue_layer(l);
        bool ok = kit_until(done, NULL, 20000);
        uint64_t ns = shm_now_ns() - begin_ns;
        k.group_base += (uint64_t)g->layers * g->groups_per_layer;
        must(KRN_CUDA(stream_synchronize, k.stream), "stream");
        cpu = issuer_ns() - cpu;
        if (!ok || atomic_load(&k.w.view.worker->result) != SHM_RESULT_OK ||
            shm_report_read(k.w.view.worker, k.seq, &report) < 0) {
            fprintf(stderr, "FAILED %s: %.200s\n", s->name, k.w.view.worker->error_text);
            failures++;
            return;
        }
        if ((double)ns / 1e6 < best_ms) {
            best_ms = (double)ns / 1e6;
            best = report;
            cpu_us = report.copied ? (double)cpu / 1e3 / (double)report.copied : 0;
        }
    }
    double bound_ms = (double)(best.bytes - best.wasted_bytes) / peak_gbps / 1e6;
    printf(
        "%3u%%  %-28s %7.1f ms  x%.3f of the bound  %5.2f GB/s while busy  waste %4.1f%%  outstanding %3d  "
        "issuer %.1f us a copy\n",
        percent, s->name, best_ms, best_ms / bound_ms,
        best.link_ns ? (double)best.bytes / (double)best.link_ns : 0.0,
        best.bytes ? 100.0 * (double)best.wasted_bytes / (double)best.bytes : 0.0, (int)best.outstanding_max,
        cpu_us);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    struct shm_error err = {0};
    struct krn_cuda_device *device;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (krn_cuda_load(&err) < 0 || getenv(KRN_CUDA_LIBRARY_ENV) || !krn_fatbin_find("krn_publish")) {
        printf("skipped: %s\n", err.text[0] ? err.text : "no kernels, or a fake driver");
        return 77;
    }
    if (argc > 4)
        router_ns = strtoull(argv[3], NULL, 10) * 1000, experts_ns = strtoull(argv[4], NULL, 10) * 1000;
    struct kit kit;
    worker_kit(&kit, argv[1], argv[2]);
    const char *options[] = {"--device", "cuda", NULL};
    uint64_t begin_ns = shm_now_ns();
    if (krn_cuda_device_open(0, &device, &err) < 0 || kit_start(&kit, options) != 0) {
        fprintf(stderr, "no start: %s\n", err.text);
        kit_end(&kit);
        return 1;
    }
    while (atomic_load(&prt_client_store(kit.client)->state) != SHM_STORE_SERVING &&
           shm_now_ns() - begin_ns < 120000000000u)
        usleep(10000);
    printf("expertd: loaded and serving after %.1f s\n", (double)(shm_now_ns() - begin_ns) / 1e9);
    worker_make(&k, &kit, device, RING);
    uint64_t control_bytes = (k.w.layout.total_bytes + 4095) / 4096 * 4096;
    must(worker_attach(&k, &err), err.text);
    must(krn_cuda_module("krn_publish", &module, &err), "module");
    must(krn_cuda_kernel(module, "krn_spin", 0, &spin, &err), "spin");
    must(krn_cuda_kernel(module, "krn_publish", 0, &publish, &err), "publish");
    must(KRN_CUDA(mem_alloc, &counts, 4u << 20), "counts");
    must(KRN_CUDA(mem_alloc, &sink, 4096), "sink");
    must(KRN_CUDA(host_register, k.w.control, control_bytes, 3), "register");
    must(KRN_CUDA(host_pointer, &control, k.w.control, 0), "pointer");
    static const struct setting settings[] = {
        {"full", SHM_POLICY_FULL, SHM_ORDER_INDEX, 16, 1, false},
        {"routed, index, depth 2", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 2, 1, false},
        {"routed, index, depth 4", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 4, 1, false},
        {"routed, index, depth 16", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 16, 1, false},
        {"routed, recent, depth 16", SHM_POLICY_ROUTED, SHM_ORDER_RECENT, 16, 1, false},
        {"oracle, depth 16", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 16, 1, true},
        {"oracle, depth 64", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 64, 1, true},
        {"wait for the router, depth 64", SHM_POLICY_ROUTED, SHM_ORDER_INDEX, 64, 1u << 20, false},
    };
    double peak_gbps = 55.2;
    static const uint32_t shares[] = {58, 78, 97, 100};
    printf("%u layers x %u experts x %.2f MB, ring %u, router %.2f + experts %.2f ms a layer; bound at %.1f "
           "GB/s\n",
           k.w.layout.geometry.layers, k.w.layout.geometry.experts, (double)k.arena.blob_bytes_max / 1e6,
           RING, (double)router_ns / 1e6, (double)experts_ns / 1e6, peak_gbps);
    for (size_t p = 0; p < 4; p++)
        for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
            run(&settings[i], shares[p], peak_gbps);
    router_ns = experts_ns = 0;
    printf("no compute:\n");
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
        run(&settings[i], 100, peak_gbps);
    krn_cuda.host_unregister(k.w.control);
    char command[128];
    snprintf(command, sizeof(command), "grep -E 'registered|CUDA device|flag write|warn' %s/log >&2",
             kit.runtime);
    if (system(command))
        fputs("no log\n", stderr);
    prt_client_detach(kit.client, k.session, NULL);
    worker_free(&k);
    kill(kit.pid, SIGKILL);
    kit_wait(&kit, 10000);
    begin_ns = shm_now_ns();
    if (kit_start(&kit, options) == 0)
        printf("expertd killed -9 and back: arena adopted, registered, taking workers after %.2f s\n",
               (double)(shm_now_ns() - begin_ns) / 1e9);
    else
        failures++;
    if (system(command))
        fputs("no log\n", stderr);
    kit_end(&kit);
    return failures ? 1 : 0;
}
