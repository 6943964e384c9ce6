/* SPDX-License-Identifier: MIT */
/*
 * What a start on a GPU consists of, ms each: the driver, a context, first
 * allocations; and the ways to bring host memory (a memfd, as the arena is) to
 * the device, GB/s, with cold page tables each time.
 *
 *   b_start [GB]   default 4; exit status 77 without a driver
 */
#include "kernels/krn_fatbin.h"
#include "kernels/krn_register.h"
#include "kernels/krn_upload.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

#define MIB        (UINT64_C(1) << 20)
#define BLOB_BYTES UINT64_C(2654208)

static struct shm_error err;

static void must(int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "b_start: %s: %s\n", what, err.code ? shm_error_text(&err) : krn_cuda_detail()->name);
    exit(1);
}

static double ms_since(uint64_t at_ns)
{
    return (double)(shm_now_ns() - at_ns) / 1e6;
}

static void *map(int fd, uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    must(p == MAP_FAILED ? -errno : 0, "mmap");
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

struct touch {
    uint8_t *base;
    uint64_t bytes;
    _Atomic uint64_t next;
};

static void *touch_some(void *arg)
{
    struct touch *t = arg;
    for (uint64_t at; (at = atomic_fetch_add(&t->next, 16 * MIB)) < t->bytes;)
        madvise(t->base + at, t->bytes - at < 16 * MIB ? t->bytes - at : 16 * MIB, MADV_POPULATE_READ);
    return NULL;
}

static void touch(void *base, uint64_t bytes, unsigned threads)
{
    struct touch t = {.base = base, .bytes = bytes};
    pthread_t thread[16];
    for (unsigned i = 1; i < threads; i++)
        must(-pthread_create(&thread[i], NULL, touch_some, &t), "thread");
    touch_some(&t);
    for (unsigned i = 1; i < threads; i++)
        pthread_join(thread[i], NULL);
}

static void result(const char *what, uint64_t bytes, double ms)
{
    printf("  %-44s %8.1f ms %6.1f GB/s\n", what, ms, (double)bytes / ms / 1e6);
}

static void staged(struct krn_cuda_device *d, int fd, uint64_t bytes, krn_cuda_ptr target, unsigned threads,
                   unsigned slots, uint64_t slot)
{
    void *source = map(fd, bytes);
    struct krn_upload *u;
    uint64_t at = shm_now_ns();
    const struct krn_upload_config config = {
        .device = d, .threads = threads, .slot_bytes = slot, .slots = slots};
    must(krn_upload_open(&config, &u, &err), "upload");
    double opened = ms_since(at);
    for (uint64_t o = 0; o < bytes; o += BLOB_BYTES)
        must(krn_upload_put(u, target + o, (uint8_t *)source + o,
                            bytes - o < BLOB_BYTES ? bytes - o : BLOB_BYTES),
             "put");
    must(krn_upload_finish(u), "finish");
    double done = ms_since(at);
    krn_upload_close(&u);
    char what[80];
    snprintf(what, sizeof what, "staged, %2u threads, %u slots of %llu MiB (open %.1f)", threads, slots,
             (unsigned long long)(slot / MIB), opened);
    result(what, bytes, done);
    munmap(source, bytes);
}

static void registered(int fd, uint64_t bytes, krn_cuda_ptr target, unsigned touchers, uint64_t piece)
{
    uint8_t *source = map(fd, bytes);
    void *stream;
    must(KRN_CUDA(stream_create, &stream, KRN_CUDA_STREAM_NON_BLOCKING), "stream");
    uint64_t at = shm_now_ns();
    if (touchers)
        touch(source, bytes, touchers);
    double touched = ms_since(at);
    for (uint64_t o = 0; o < bytes; o += piece) {
        uint64_t n = bytes - o < piece ? bytes - o : piece;
        must(KRN_CUDA(host_register, source + o, n,
                      KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP | KRN_CUDA_REGISTER_READ_ONLY),
             "register");
        must(KRN_CUDA(copy_in_async, target + o, source + o, n, stream), "copy");
    }
    must(KRN_CUDA(stream_synchronize, stream), "copy");
    double done = ms_since(at);
    for (uint64_t o = 0; o < bytes; o += piece)
        krn_cuda.host_unregister(source + o);
    char what[80];
    snprintf(what, sizeof what, "registered by %4llu MiB%s (pages %.0f, unreg. %.0f)",
             (unsigned long long)(piece / MIB), touchers ? ", touched" : "", touched, ms_since(at) - done);
    result(what, bytes, done);
    krn_cuda.stream_destroy(stream);
    munmap(source, bytes);
}

static void pageable(int fd, uint64_t bytes, krn_cuda_ptr target)
{
    uint8_t *source = map(fd, bytes);
    void *stream;
    must(KRN_CUDA(stream_create, &stream, KRN_CUDA_STREAM_NON_BLOCKING), "stream");
    uint64_t at = shm_now_ns();
    for (uint64_t o = 0; o < bytes; o += BLOB_BYTES)
        must(KRN_CUDA(copy_in_async, target + o, source + o, bytes - o < BLOB_BYTES ? bytes - o : BLOB_BYTES,
                      stream),
             "copy");
    must(KRN_CUDA(stream_synchronize, stream), "copy");
    result("the driver's own way, blob by blob", bytes, ms_since(at));
    krn_cuda.stream_destroy(stream);
    munmap(source, bytes);
}

static void start(struct krn_cuda_device **ret_device)
{
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    uint64_t at = shm_now_ns();
    int rc = krn_cuda_load(&err);
    if (rc) {
        fprintf(stderr, "b_start: %s\n", shm_error_text(&err));
        exit(77);
    }
    double loaded = ms_since(at);
    at = shm_now_ns();
    void *context;
    krn_cuda.primary_flags(0, KRN_CUDA_SCHED_BLOCKING_SYNC);
    must(KRN_CUDA(primary_retain, &context, 0), "context");
    double retained = ms_since(at);
    at = shm_now_ns();
    must(krn_cuda_device_open(0, ret_device, &err), "device");
    double opened = ms_since(at);
    at = shm_now_ns();
    size_t n = 0;
    const struct krn_fatbin *f = krn_fatbins(&n);
    for (size_t i = 0; i < n; i++) {
        void *module;
        must(krn_cuda_module(f[i].name, &module, &err), "module");
    }
    printf("driver %.1f ms (%d devices), context %.1f, first allocations and trials %.1f, %zu modules %.1f\n",
           loaded, krn_cuda_count(), retained, opened, n, ms_since(at));
}

int main(int argc, char **argv)
{
    struct krn_cuda_device *d;
    start(&d);
    double gb = argc > 1 ? atof(argv[1]) : 4;
    if (gb <= 0)
        return 0;
    uint64_t bytes = (uint64_t)(gb * 1e9) / (2 * MIB) * (2 * MIB);
    int fd = memfd_create("b-start", MFD_CLOEXEC);
    must(fd < 0 || ftruncate(fd, (off_t)bytes) ? -errno : 0, "memfd");
    uint8_t *fill = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(fill == MAP_FAILED ? -errno : 0, "mmap");
    madvise(fill, bytes, MADV_HUGEPAGE);
    for (uint64_t i = 0; i < bytes; i += 4096)
        fill[i] = (uint8_t)(i >> 12);
    munmap(fill, bytes);
    krn_cuda_ptr target;
    uint64_t at = shm_now_ns();
    must(KRN_CUDA(mem_alloc, &target, bytes), "device memory");
    printf("%.2f GB of device memory allocated in %.1f ms; brought there, pages cold:\n", (double)bytes / 1e9,
           ms_since(at));
    pageable(fd, bytes, target);
    registered(fd, bytes, target, 8, 1024 * MIB);
    registered(fd, bytes, target, 8, 128 * MIB);
    static const struct {
        unsigned threads, slots;
        uint64_t mib;
    } ways[] = {{4, 2, 4}, {8, 2, 1}, {8, 2, 4},  {8, 3, 2},  {8, 4, 1},
                {8, 4, 2}, {8, 8, 1}, {12, 3, 2}, {16, 3, 1}, {16, 2, 4}};
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++)
        staged(d, fd, bytes, target, ways[i].threads, ways[i].slots, ways[i].mib * MIB);
    KRN_CUDA(mem_free, target);
    krn_cuda_device_close(&d);
    return 0;
}
