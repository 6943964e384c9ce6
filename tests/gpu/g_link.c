/* SPDX-License-Identifier: MIT */
/*
 * The CUDA link between two processes: right, fast, and alive after kill -9 of
 * either. Needs a driver (exit 77 without one); with --small it runs on the
 * fake driver, too, and leaves the measuring out.
 *
 *     g_link [--small]
 */
#include "kernels/krn_fatbin.h"
#include "kernels/krn_link_cuda.h"
#include "kernels/krn_register.h"
#include "tests/gpu/g_owner.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int failures;
static bool small, kernels;
static struct krn_cuda_device *device;
static uint64_t poll_ns;
static uint8_t *source;
static uint64_t source_bytes, blob_bytes, blobs, slots;
static const char *self_name;
static struct krn_register *registration;

#define CHECK(what, ...)                                                                                     \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            failures++;                                                                                      \
            fprintf(stderr, "FAILED %s:%d: %s: ", __FILE__, __LINE__, #what);                                \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
        }                                                                                                    \
    } while (0)

static void on_note(void *ctx, bool warning, const char *line)
{
    (void)ctx;
    printf("  %s%s\n", warning ? "warning: " : "", line);
}

static void nap_us(long us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

static uint64_t thread_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t cut(const void *ctx, uint64_t begin, uint64_t limit)
{
    (void)ctx;
    /* blobs lie at multiples of blob_bytes, which is a multiple of the page */
    uint64_t at = limit / blob_bytes * blob_bytes;
    return at > begin ? at : begin + blob_bytes;
}

static int make_source(uint64_t bytes)
{
    blobs = bytes / blob_bytes;
    while (blobs % slots == 0 || blobs % 7 == 0) /* see stamp_of */
        blobs--;
    source_bytes = (blobs * blob_bytes + 2097151) / 2097152 * 2097152;
    int fd = memfd_create("source", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)source_bytes) < 0)
        return -errno;
    source = mmap(NULL, source_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (source == MAP_FAILED)
        return -errno;
    madvise(source, source_bytes, MADV_HUGEPAGE);
    for (uint64_t b = 0; b < blobs; b++)
        for (uint64_t i = 0; i < blob_bytes / 4; i++)
            ((uint32_t *)(void *)(source + b * blob_bytes))[i] = (uint32_t)b + 1;
    struct shm_error err = {0};
    struct krn_register_config config = {.device = device,
                                         .base = source,
                                         .bytes = source_bytes,
                                         .cut = cut,
                                         .piece_bytes = small ? source_bytes / 3 : 0};
    uint64_t begin_ns = shm_now_ns();
    int rc = krn_register_memory(&config, &registration, &err);
    CHECK(rc == 0, "%s", err.text);
    if (rc == 0)
        printf("register: %.2f GB in %.1f ms, %u pieces: %.1f GB/s\n", (double)source_bytes / 1e9,
               (double)(shm_now_ns() - begin_ns) / 1e6, krn_register_pieces(registration),
               (double)source_bytes / (double)(shm_now_ns() - begin_ns));
    return rc;
}

static struct krn_link *open_link(struct owner *o, uint32_t batch)
{
    struct krn_link_cuda_config config = {.device = device,
                                          .ring_handle = o->opened.handle,
                                          .ring_bytes = slots * blob_bytes,
                                          .slot_bytes = blob_bytes,
                                          .flag_offset = o->opened.flag_offset,
                                          .source = source,
                                          .source_bytes = source_bytes,
                                          .batch = batch,
                                          .poll_ns = poll_ns,
                                          .name = "test",
                                          .note = on_note};
    struct shm_error err = {0};
    struct krn_link *link = NULL;
    int rc = krn_link_cuda_create(&config, &link, &err);
    CHECK(rc == 0, "%s", err.text);
    return link;
}

static int put(struct krn_link *link, uint64_t i, bool more)
{
    return krn_link_copy(link, i % slots * blob_bytes,
                         source + (uint64_t)(stamp_of(i, blobs) - 1) * blob_bytes, blob_bytes, more);
}

/* Messages first .. first + n, each signalled (its number + 1), flow-controlled by the owner's releases. */
static void send_messages(struct krn_link *link, struct owner *o, uint64_t first, uint64_t n, bool more)
{
    uint64_t deadline_ns = shm_now_ns() + UINT64_C(60000000000);
    for (uint64_t i = first; i < first + n; i++) {
        while (i - atomic_load_explicit(&o->words->released, memory_order_acquire) >= slots) {
            krn_link_flush(link);
            nap_us(20);
            if (shm_now_ns() > deadline_ns) {
                CHECK(false, "message %llu: no release", (unsigned long long)i);
                return;
            }
        }
        int rc = put(link, i, more);
        if (rc == 0)
            rc = krn_link_signal(link, i + 1);
        if (rc < 0) {
            CHECK(false, "message %llu: %d", (unsigned long long)i, rc);
            return;
        }
    }
}

static void check_messages(struct krn_link *link, struct owner *o, uint64_t first, uint64_t n, bool by_kernel)
{
    struct owner_message m = {.command = OWNER_CHECK,
                              .first = first,
                              .count = n,
                              .blobs = blobs,
                              .words = blob_bytes / 4,
                              .kernels = by_kernel};
    uint64_t landed = krn_link_landed(link);
    CHECK(owner_send(o, &m) == 0, "owner is gone");
    send_messages(link, o, first, n, n % 2);
    int rc = owner_receive(o, &m);
    CHECK(rc == 0 && m.result == 0, "status %d, %llu wrong words", rc, (unsigned long long)m.result);
    CHECK(krn_link_drain(link, 5000000000u) == 0, "drain");
    CHECK(krn_link_landed(link) == landed + n, "%llu landed", (unsigned long long)krn_link_landed(link));
    printf("stamps: %llu messages of %.2f MB checked by %s, %llu wrong words\n", (unsigned long long)n,
           (double)blob_bytes / 1e6, by_kernel ? "kernels behind stream waits" : "copies out",
           (unsigned long long)m.result);
}

/* The issuer's loop without a walk: at most `window` outstanding, sleeping poll_ns. */
static double throughput(struct owner *o, uint32_t batch, uint64_t n, uint64_t window, uint64_t signal_each,
                         const char *name)
{
    struct krn_link *link = open_link(o, batch ? batch : 1);
    if (!link)
        return 0;
    uint64_t base = krn_link_landed(link), value = 0;
    krn_link_mark(link);
    prctl(PR_SET_TIMERSLACK, 1ul);
    uint64_t begin_ns = shm_now_ns(), cpu_ns = thread_cpu_ns();
    for (uint64_t i = 0; i < n; i++) {
        while (i - (krn_link_landed(link) - base) >= window) {
            krn_link_flush(link);
            nap_us((long)(link->poll_ns / 1000));
        }
        if (put(link, i, batch > 1) < 0)
            break;
        if (signal_each && i % signal_each == signal_each - 1)
            krn_link_signal(link, value += signal_each);
    }
    CHECK(krn_link_drain(link, UINT64_C(20000000000)) == 0, "%s: drain", name);
    uint64_t ns = shm_now_ns() - begin_ns;
    cpu_ns = thread_cpu_ns() - cpu_ns;
    struct krn_link_cuda_counts c;
    struct krn_link_stats stats;
    krn_link_cuda_counts(link, &c);
    krn_link_stats(link, &stats);
    double gbps = (double)(n * blob_bytes) / (double)ns;
    printf(
        "link: %-44s %6.2f GB/s  busy %5.1f%%  CPU %.2f us a copy (driver %.2f), %llu batches, %llu progress "
        "writes, %llu signals\n",
        name, gbps, 100.0 * (double)stats.mark_busy_ns / (double)ns, (double)cpu_ns / 1e3 / (double)n,
        (double)c.call_ns / 1e3 / (double)n, (unsigned long long)c.batches,
        (unsigned long long)c.progress_writes, (unsigned long long)stats.signals);
    krn_link_destroy(&link);
    return gbps;
}

/* One copy of up to 1 GiB, from one registration, timed by the host. */
static double peak(struct owner *o)
{
    krn_cuda_ptr ring;
    void *stream;
    if (KRN_CUDA(ipc_open, &ring, o->opened.handle, KRN_CUDA_IPC_LAZY_PEER) < 0 ||
        krn_cuda_stream_primed(device, ring, &stream) < 0)
        return 0;
    uint64_t bytes = UINT64_C(1) << 30;
    if (bytes > slots * blob_bytes)
        bytes = slots * blob_bytes;
    if (bytes > source_bytes / 2)
        bytes = source_bytes / 2;
    bytes = bytes / blob_bytes * blob_bytes / 16 * 15; /* inside the first piece */
    double best = 0;
    for (int i = 0; i < 5; i++) {
        uint64_t begin_ns = shm_now_ns();
        if (KRN_CUDA(copy_in_async, ring, source, bytes, stream) < 0 ||
            KRN_CUDA(stream_synchronize, stream) < 0) {
            CHECK(false, "peak: %s", krn_cuda_detail()->name);
            break;
        }
        double gbps = (double)bytes / (double)(shm_now_ns() - begin_ns);
        best = gbps > best ? gbps : best;
    }
    krn_cuda.stream_destroy(stream);
    krn_cuda.ipc_close(ring);
    printf("peak: one copy of %.2f GB: %.2f GB/s\n", (double)bytes / 1e9, best);
    return best;
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void flag_latency(struct owner *o, const char *name)
{
    struct krn_link *link = open_link(o, 4);
    enum { N = 300 };
    static uint64_t ns[N];
    for (int i = 0; link && i < N; i++) {
        if (i % 2 && put(link, (uint64_t)i, false) == 0) /* behind a copy every other time */
            krn_link_drain(link, 1000000000u);
        int rc = krn_link_cuda_probe(link, &ns[i]);
        CHECK(rc == 0, "probe: %d", rc);
        nap_us(200);
    }
    qsort(ns, N, sizeof(ns[0]), compare);
    printf("flag write, %s: median %.1f us, p99 %.1f us, max %.1f us\n", name, (double)ns[N / 2] / 1e3,
           (double)ns[N * 99 / 100] / 1e3, (double)ns[N - 1] / 1e3);
    krn_link_destroy(&link);
}

static uint64_t free_bytes(struct owner *o)
{
    struct owner_message m = {.command = OWNER_FREE_BYTES};
    return owner_call(o, &m) == 0 ? m.result : 0;
}

static void test_publication(struct owner *o)
{
    struct owner_message m = {.command = OWNER_PUBLISH, .first = 77};
    CHECK(owner_call(o, &m) == 0 && atomic_load(&o->words->route_seq) == 77, "not published");
    for (uint32_t e = 0; e < 128; e++)
        CHECK((o->words->mask[e / 64] >> e % 64 & 1) == (e % 3 != 0) && o->words->tokens[e] == e % 3,
              "expert %u", e);
    printf("publication: mask and counts of 128 experts as the kernel stored them\n");
}

/* Dies with the owner's ring full of our copies; the link goes on and closes, the memory comes back. */
static void test_owner_killed(void)
{
    struct owner watcher, o;
    bool watched = owner_start(self_name, &watcher) == 0 && owner_open(&watcher, 1, 2u << 20) == 0;
    uint64_t before = watched ? free_bytes(&watcher) : 0;
    for (int round = 0; round < 3; round++) {
        CHECK(owner_start(self_name, &o) == 0 && owner_open(&o, slots, blob_bytes) == 0, "owner");
        struct krn_link *link = open_link(&o, 4);
        for (uint64_t i = 0; link && i < 3 * slots; i++) {
            CHECK(put(link, i, true) == 0, "copy %llu", (unsigned long long)i);
            if (i == slots)
                kill(o.pid, SIGKILL);
        }
        CHECK(link && krn_link_signal(link, 1) == 0 && krn_link_drain(link, 5000000000u) == 0,
              "drain after a kill");
        krn_link_destroy(&link);
        owner_end(&o, true);
    }
    uint64_t after = 0;
    for (int i = 0; watched && i < 100 && after + (32u << 20) < before; i++) {
        after = free_bytes(&watcher);
        nap_us(20000);
    }
    CHECK(!watched || after + (32u << 20) >= before, "device memory: %llu free before, %llu after",
          (unsigned long long)before, (unsigned long long)after);
    if (watched)
        owner_end(&watcher, false);
    printf("owner killed -9 while copied to, 3 times: no error; device memory is back (%.1f MB more)\n",
           ((double)after - (double)before) / 1e6);
}

/* A process that copies to the ring until it is killed. */
static int importer_main(int fd)
{
    struct owner o = {.fd = fd};
    if (read(fd, &o.opened, sizeof(o.opened)) != (ssize_t)sizeof(o.opened))
        return 1;
    struct krn_link *link = open_link(&o, 4);
    if (!link || write(fd, "r", 1) != 1)
        return 1;
    for (uint64_t i = 0;; i++) {
        while (i - krn_link_landed(link) > 8)
            krn_link_flush(link);
        if (put(link, i, true) < 0)
            return 1;
    }
}

static void test_importer_killed(struct owner *o)
{
    for (int round = 0; round < 3; round++) {
        int to[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, to) < 0)
            return;
        pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            char number[16];
            snprintf(number, sizeof(number), "%d", to[1]);
            close(to[0]);
            execl("/proc/self/exe", self_name, "--importer", number, small ? "--small" : NULL, (char *)NULL);
            _exit(127);
        }
        close(to[1]);
        char ready = 0;
        CHECK(write(to[0], &o->opened, sizeof(o->opened)) == (ssize_t)sizeof(o->opened) &&
                  read(to[0], &ready, 1) == 1 && ready == 'r',
              "importer did not start");
        nap_us(20000);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        close(to[0]);
    }
    printf("importer killed -9 while copying, 3 times\n");
}

int main(int argc, char **argv)
{
    self_name = argv[0];
    int importer = -1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0)
            small = true;
        else if (strcmp(argv[i], "--owner") == 0 && i + 1 < argc)
            return owner_main(atoi(argv[i + 1]));
        else if (strcmp(argv[i], "--importer") == 0 && i + 1 < argc)
            importer = atoi(argv[++i]);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct shm_error err = {0};
    if (krn_cuda_load(&err) < 0) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    kernels = !getenv(KRN_CUDA_LIBRARY_ENV) && krn_fatbin_find("krn_publish");
    uint64_t begin_ns = shm_now_ns();
    if (krn_cuda_device_open(0, &device, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    char text[160];
    krn_cuda_device_describe(device, text, sizeof(text));
    slots = small ? 6 : 400;
    blob_bytes = small ? 65536 : 2654208;
    if (importer >= 0)
        return make_source(small ? 40 * blob_bytes : UINT64_C(1) << 28) < 0 ? 1 : importer_main(importer);
    printf("device: %s, opened in %.0f ms; lacks: %s; batch copies %s\n", text,
           (double)(shm_now_ns() - begin_ns) / 1e6, device->missing[0] ? device->missing : "nothing",
           device->batch_copy ? "yes" : "no");
    if (make_source(small ? 100 * blob_bytes : UINT64_C(4) << 30) < 0)
        return 1;
    struct owner o;
    if (owner_start(self_name, &o) < 0 || owner_open(&o, slots, blob_bytes) < 0) {
        fprintf(stderr, "the owner did not start\n");
        return 1;
    }
    printf("worker: context and ring in %.0f ms\n", (double)o.opened.open_ns / 1e6);
    struct krn_link *link = open_link(&o, 4);
    if (!link)
        return 1;
    uint64_t n = small ? 101 : 1500;
    check_messages(link, &o, 0, n, false);
    if (kernels)
        check_messages(link, &o, n, 3 * n, true);
    krn_link_destroy(&link);
    if (kernels)
        test_publication(&o);
    if (!small) {
        peak(&o);
        uint64_t many = 4000;
        throughput(&o, 1, many, 1, 0, "single copies, 1 outstanding");
        throughput(&o, 1, many, 2, 0, "single copies, 2 outstanding");
        throughput(&o, 1, many, 16, 0, "single copies, 16 outstanding");
        throughput(&o, 1, many, 16, 16, "single copies, 16 outstanding, signal each 16");
        throughput(&o, 1, many, 4, 4, "single copies, 4 outstanding, signal each 4");
        throughput(&o, 4, many, 16, 16, "batches of 4, 16 outstanding, signal each 16");
        throughput(&o, 4, many, 64, 16, "batches of 4, 64 outstanding, signal each 16");
        throughput(&o, 8, many, 64, 16, "batches of 8, 64 outstanding, signal each 16");
        throughput(&o, 16, many, 64, 16, "batches of 16, 64 outstanding, signal each 16");
        for (poll_ns = 15000; poll_ns <= 30000; poll_ns *= 2) {
            printf("looking every %d us:\n", (int)(poll_ns / 1000));
            throughput(&o, 1, many / 2, 2, 0, "single copies, 2 outstanding");
            throughput(&o, 1, many / 2, 16, 16, "single copies, 16 outstanding, signal each 16");
            throughput(&o, 8, many / 2, 16, 16, "batches of 8, 16 outstanding, signal each 16");
        }
        poll_ns = 0;
        flag_latency(&o, "worker idle");
    }
    if (kernels) {
        struct owner_message m = {.command = OWNER_BUSY};
        CHECK(owner_call(&o, &m) == 0, "busy");
        flag_latency(&o, "worker busy on all multiprocessors");
        throughput(&o, 4, 4000, 64, 16, "batches of 4, signal each 16, worker busy");
        uint64_t busy_ns = shm_now_ns();
        m = (struct owner_message){.command = OWNER_IDLE};
        owner_send(&o, &m);
        CHECK(owner_receive(&o, &m) == 0, "busy");
        printf("worker's kernels meanwhile: %llu of 1 ms\n", (unsigned long long)m.result);
        CHECK(owner_receive(&o, &m) == 0, "idle");
        (void)busy_ns;
    }
    owner_end(&o, false);
    test_owner_killed();
    if (owner_start(self_name, &o) == 0 && owner_open(&o, slots, blob_bytes) == 0) {
        test_importer_killed(&o);
        link = open_link(&o, 4);
        if (link)
            check_messages(link, &o, 0, n, kernels);
        krn_link_destroy(&link);
        owner_end(&o, false);
    }
    krn_register_release(&registration);
    krn_cuda_device_close(&device);
    printf(failures ? "%d checks FAILED\n" : "all passed\n", failures);
    return failures ? 1 : 0;
}
