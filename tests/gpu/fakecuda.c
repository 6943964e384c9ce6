/* SPDX-License-Identifier: MIT */
/*
 * A CUDA driver without a device, for tests: EXPERTD_CUDA_LIBRARY names this
 * library. Device memory is a memfd mapped shared, so that an IPC handle opens
 * the same bytes in another process; a device address is the address of the
 * mapping. Each stream is a thread that works its queue in order.
 *
 * It refuses what the real one refuses (copies across registrations, handles
 * of dead processes, double registration) and appends every call to the file
 * FAKECUDA_LOG, one line: pid, call, stream, what.
 *
 *   FAKECUDA_VERSION=12040      driver version
 *   FAKECUDA_MISSING=a,b        functions that it does not have
 *   FAKECUDA_FAIL=call:n:result the nth call and all later ones fail (from 1)
 *   FAKECUDA_DELAY_US=n         each copy takes so long
 *   FAKECUDA_DEVICES=n          devices shown (default 1)
 *   FAKECUDA_FREE_MIB=n         memory said to be free (default 8192)
 */
#include "kernels/krn_cuda_abi.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define RANGES 256
#define EXPORT __attribute__((visibility("default")))

enum kind { FREE, DEVICE, OPENED, HOST, REGISTERED };
struct range {
    enum kind kind;
    uint8_t *base;
    size_t bytes;
    int fd;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[RANGES];
static int log_fd = -1, calls_until_failure = -1, failure;
static char failing[64];
static _Thread_local void *current;
static _Atomic int next_stream;

static void note(const char *call, int stream, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void note(const char *call, int stream, const char *fmt, ...)
{
    const char *path = getenv("FAKECUDA_LOG");
    if (!path)
        return;
    pthread_mutex_lock(&lock);
    if (log_fd < 0)
        log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char line[256];
    int n = snprintf(line, sizeof(line), "%d %s %d ", (int)getpid(), call, stream);
    va_list args;
    va_start(args, fmt);
    n += vsnprintf(line + n, sizeof(line) - (size_t)n - 1, fmt, args);
    va_end(args);
    line[n++] = '\n';
    if (log_fd >= 0 && write(log_fd, line, (size_t)n) < 0)
        abort();
    pthread_mutex_unlock(&lock);
}

/* The result a call is made to return, or 0. */
static int fails(const char *call)
{
    static bool parsed;
    int result = 0;
    pthread_mutex_lock(&lock);
    if (!parsed) {
        const char *text = getenv("FAKECUDA_FAIL");
        if (text && sscanf(text, "%63[^:]:%d:%d", failing, &calls_until_failure, &failure) != 3)
            calls_until_failure = -1;
        parsed = true;
    }
    if (calls_until_failure >= 0 && strcmp(call, failing) == 0) {
        if (calls_until_failure > 0)
            calls_until_failure--;
        if (calls_until_failure == 0)
            result = failure;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text && text[0] ? atoi(text) : otherwise;
}

/* ---- memory ---- */

static struct range *find(uint64_t address, size_t bytes, unsigned kinds)
{
    for (int i = 0; i < RANGES; i++) {
        struct range *r = &ranges[i];
        uint64_t base = (uint64_t)(uintptr_t)r->base;
        if (r->kind != FREE && (kinds & 1u << r->kind) && address >= base && address - base < r->bytes &&
            bytes <= r->bytes - (address - base))
            return r;
    }
    return NULL;
}

static bool inside(uint64_t address, size_t bytes, unsigned kinds)
{
    pthread_mutex_lock(&lock);
    bool ok = find(address, bytes, kinds) != NULL;
    pthread_mutex_unlock(&lock);
    return ok;
}
#define ON_DEVICE (1u << DEVICE | 1u << OPENED)
#define ON_HOST   (1u << HOST | 1u << REGISTERED)

static int add(enum kind kind, void *base, size_t bytes, int fd)
{
    pthread_mutex_lock(&lock);
    int rc = KRN_CUDA_OUT_OF_MEMORY;
    for (int i = 0; i < RANGES && rc; i++)
        if (ranges[i].kind == FREE) {
            ranges[i] = (struct range){kind, base, bytes, fd};
            rc = 0;
        }
    pthread_mutex_unlock(&lock);
    return rc;
}

/* Takes the range that begins there; *ret_range is a copy. */
static int take(void *base, unsigned kinds, struct range *ret_range)
{
    pthread_mutex_lock(&lock);
    struct range *r = find((uint64_t)(uintptr_t)base, 1, kinds);
    int rc = r && r->base == base ? 0 : KRN_CUDA_INVALID_VALUE;
    if (rc == 0) {
        *ret_range = *r;
        r->kind = FREE;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

static int map_fd(int fd, size_t bytes, enum kind kind, krn_cuda_ptr *ret_ptr)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        close(fd);
        return KRN_CUDA_OUT_OF_MEMORY;
    }
    *ret_ptr = (krn_cuda_ptr)(uintptr_t)base;
    return add(kind, base, bytes, fd);
}

static int fake_mem_alloc(krn_cuda_ptr *ret_ptr, size_t bytes)
{
    note("cuMemAlloc", 0, "%zu", bytes);
    int rc = fails("cuMemAlloc");
    if (rc || !current)
        return rc ? rc : KRN_CUDA_INVALID_CONTEXT;
    int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        return KRN_CUDA_OUT_OF_MEMORY;
    return map_fd(fd, bytes, DEVICE, ret_ptr);
}

static int fake_mem_free(krn_cuda_ptr ptr)
{
    note("cuMemFree", 0, "-");
    struct range r;
    int rc = take((void *)(uintptr_t)ptr, 1u << DEVICE, &r);
    if (rc == 0) {
        munmap(r.base, r.bytes);
        close(r.fd);
    }
    return rc;
}

static int fake_address_range(krn_cuda_ptr *ret_base, size_t *ret_bytes, krn_cuda_ptr ptr)
{
    pthread_mutex_lock(&lock);
    struct range *r = find(ptr, 1, ON_DEVICE);
    if (r) {
        *ret_base = (krn_cuda_ptr)(uintptr_t)r->base;
        *ret_bytes = r->bytes;
    }
    pthread_mutex_unlock(&lock);
    return r ? 0 : KRN_CUDA_INVALID_VALUE;
}

struct handle {
    uint32_t magic;
    int pid, fd;
    uint32_t pad;
    uint64_t bytes, inode;
};
#define HANDLE_MAGIC 0x46414b45u

static int fake_ipc_get(struct krn_cuda_ipc *ret_handle, krn_cuda_ptr ptr)
{
    note("cuIpcGetMemHandle", 0, "-");
    int rc = fails("cuIpcGetMemHandle");
    if (rc)
        return rc;
    pthread_mutex_lock(&lock);
    struct range *r = find(ptr, 1, 1u << DEVICE);
    struct stat st;
    if (r && fstat(r->fd, &st) == 0) {
        struct handle h = {HANDLE_MAGIC, (int)getpid(), r->fd, 0, r->bytes, st.st_ino};
        memset(ret_handle, 0, sizeof(*ret_handle));
        memcpy(ret_handle, &h, sizeof(h));
    }
    pthread_mutex_unlock(&lock);
    return r ? 0 : KRN_CUDA_INVALID_VALUE;
}

static int fake_ipc_open(krn_cuda_ptr *ret_ptr, struct krn_cuda_ipc handle, unsigned flags)
{
    note("cuIpcOpenMemHandle", 0, "%u", flags);
    int rc = fails("cuIpcOpenMemHandle");
    if (rc)
        return rc;
    struct handle h;
    memcpy(&h, &handle, sizeof(h));
    if (h.magic != HANDLE_MAGIC)
        return KRN_CUDA_INVALID_VALUE;
    if (h.pid == (int)getpid())
        return KRN_CUDA_INVALID_CONTEXT; /* the real one refuses its own, too */
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0 || st.st_ino != h.inode || (uint64_t)st.st_size != h.bytes) {
        if (fd >= 0)
            close(fd);
        return KRN_CUDA_INVALID_VALUE;
    }
    return map_fd(fd, h.bytes, OPENED, ret_ptr);
}

static int fake_ipc_close(krn_cuda_ptr ptr)
{
    note("cuIpcCloseMemHandle", 0, "-");
    struct range r;
    int rc = take((void *)(uintptr_t)ptr, 1u << OPENED, &r);
    if (rc == 0) {
        munmap(r.base, r.bytes);
        close(r.fd);
    }
    return rc;
}

static int fake_host_alloc(void **ret_memory, size_t bytes, unsigned flags)
{
    note("cuMemHostAlloc", 0, "%zu %u", bytes, flags);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return KRN_CUDA_OUT_OF_MEMORY;
    *ret_memory = memory;
    return add(HOST, memory, bytes, -1);
}

static int fake_host_free(void *memory)
{
    note("cuMemFreeHost", 0, "-");
    struct range r;
    int rc = take(memory, 1u << HOST, &r);
    if (rc == 0)
        munmap(r.base, r.bytes);
    return rc;
}

static int fake_host_register(void *memory, size_t bytes, unsigned flags)
{
    note("cuMemHostRegister", 0, "%zu %u", bytes, flags);
    int rc = fails("cuMemHostRegister");
    if (rc)
        return rc;
    uint64_t begin = (uint64_t)(uintptr_t)memory;
    pthread_mutex_lock(&lock);
    bool overlap = find(begin, 1, ON_HOST) || find(begin + bytes - 1, 1, ON_HOST);
    pthread_mutex_unlock(&lock);
    return overlap ? KRN_CUDA_ALREADY_REGISTERED : add(REGISTERED, memory, bytes, -1);
}

static int fake_host_unregister(void *memory)
{
    note("cuMemHostUnregister", 0, "-");
    struct range r;
    return take(memory, 1u << REGISTERED, &r) ? KRN_CUDA_NOT_REGISTERED : 0;
}

static int fake_host_pointer(krn_cuda_ptr *ret_ptr, void *memory, unsigned flags)
{
    (void)flags;
    *ret_ptr = (krn_cuda_ptr)(uintptr_t)memory;
    return inside(*ret_ptr, 1, ON_HOST) ? 0 : KRN_CUDA_INVALID_VALUE;
}

static int fake_memory_info(size_t *ret_free, size_t *ret_total)
{
    const char *mib = getenv("FAKECUDA_FREE_MIB");
    *ret_free = *ret_total = mib ? (size_t)atoi(mib) << 20 : (size_t)1 << 33;
    return 0;
}

/* ---- streams ---- */

enum op_kind { OP_COPY, OP_WRITE_32, OP_WRITE_64, OP_WAIT_32, OP_FILL, OP_EVENT };
struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t target, source, value;
    size_t bytes;
};
struct event {
    _Atomic uint64_t recorded, done;
    _Atomic uint64_t ns;
};
struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    struct op *first, **last;
    bool busy, stop;
    int number;
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void delay(struct stream *s, const struct op *op, int us)
{
    if (op->kind == OP_COPY && us)
        usleep((useconds_t)us);
    /* a wait that nobody releases ends when its stream is destroyed */
    while (op->kind == OP_WAIT_32 && !s->stop &&
           (int32_t)(atomic_load((_Atomic uint32_t *)(uintptr_t)op->target) - (uint32_t)op->value) < 0)
        usleep(20);
}

static void perform(const struct op *op)
{
    void *target = (void *)(uintptr_t)op->target;
    struct event *e = target;
    switch (op->kind) {
    case OP_COPY:
        memcpy(target, (const void *)(uintptr_t)op->source, op->bytes);
        break;
    case OP_WRITE_32:
        atomic_store((_Atomic uint32_t *)target, (uint32_t)op->value);
        break;
    case OP_WRITE_64:
        atomic_store((_Atomic uint64_t *)target, op->value);
        break;
    case OP_FILL:
        memset(target, (int)op->value, op->bytes);
        break;
    case OP_EVENT:
        atomic_store(&e->ns, now_ns());
        atomic_store(&e->done, op->value);
        break;
    case OP_WAIT_32:
        break;
    }
}

static void *run(void *arg)
{
    struct stream *s = arg;
    int us = number("FAKECUDA_DELAY_US", 0);
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->stop)
            pthread_cond_wait(&s->work, &s->lock);
        if (!s->first)
            break;
        struct op *op = s->first;
        s->first = op->next;
        if (!s->first)
            s->last = &s->first;
        s->busy = true;
        pthread_mutex_unlock(&s->lock);
        delay(s, op, us);
        perform(op);
        free(op);
        pthread_mutex_lock(&s->lock);
        s->busy = false;
        if (!s->first)
            pthread_cond_broadcast(&s->idle);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static int enqueue(struct stream *s, struct op op)
{
    struct op *copy = malloc(sizeof(*copy));
    if (!copy || !s || !current)
        return free(copy), !s ? KRN_CUDA_INVALID_HANDLE : KRN_CUDA_INVALID_CONTEXT;
    *copy = op;
    copy->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->last = copy;
    s->last = &copy->next;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int stream_number(void *stream)
{
    return stream ? ((struct stream *)stream)->number : 0;
}

static int fake_stream_create(void **ret_stream, unsigned flags)
{
    struct stream *s = calloc(1, sizeof(*s));
    if (!s || !current)
        return free(s), KRN_CUDA_INVALID_CONTEXT;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->idle, NULL);
    s->last = &s->first;
    s->number = atomic_fetch_add(&next_stream, 1) + 1;
    if (pthread_create(&s->thread, NULL, run, s))
        return free(s), KRN_CUDA_OUT_OF_MEMORY;
    note("cuStreamCreate", s->number, "%u", flags);
    *ret_stream = s;
    return 0;
}

static int fake_stream_destroy(void *stream)
{
    struct stream *s = stream;
    note("cuStreamDestroy", s->number, "-");
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
    return 0;
}

static int fake_stream_query(void *stream)
{
    struct stream *s = stream;
    int rc = fails("cuStreamQuery");
    if (rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    bool idle = !s->first && !s->busy;
    pthread_mutex_unlock(&s->lock);
    return idle ? 0 : KRN_CUDA_NOT_READY;
}

static int fake_stream_synchronize(void *stream)
{
    struct stream *s = stream;
    note("cuStreamSynchronize", s->number, "-");
    pthread_mutex_lock(&s->lock);
    while (s->first || s->busy)
        pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int fake_stream_wait_event(void *stream, void *event, unsigned flags)
{
    (void)event, (void)flags;
    note("cuStreamWaitEvent", stream_number(stream), "-");
    return KRN_CUDA_NOT_SUPPORTED;
}

static int memop(void *stream, enum op_kind kind, uint64_t address, uint64_t value)
{
    if (!inside(address, kind == OP_WRITE_64 ? 8 : 4, ON_DEVICE | ON_HOST) || address % 4)
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = kind, .target = address, .value = value});
}

static int fake_write_32(void *stream, krn_cuda_ptr address, uint32_t value, unsigned flags)
{
    note("cuStreamWriteValue32", stream_number(stream), "%u %u", value, flags);
    int rc = fails("cuStreamWriteValue32");
    return rc ? rc : memop(stream, OP_WRITE_32, address, value);
}

static int fake_write_64(void *stream, krn_cuda_ptr address, uint64_t value, unsigned flags)
{
    note("cuStreamWriteValue64", stream_number(stream), "%llu %u", (unsigned long long)value, flags);
    return memop(stream, OP_WRITE_64, address, value);
}

static int fake_wait_32(void *stream, krn_cuda_ptr address, uint32_t value, unsigned flags)
{
    note("cuStreamWaitValue32", stream_number(stream), "%u %u", value, flags);
    return flags != KRN_CUDA_WAIT_GEQ ? KRN_CUDA_NOT_SUPPORTED : memop(stream, OP_WAIT_32, address, value);
}

static int fake_memops(void *stream, unsigned count, struct krn_cuda_memop *ops, unsigned flags)
{
    note("cuStreamBatchMemOp", stream_number(stream), "%u %u", count, flags);
    int rc = fails("cuStreamBatchMemOp");
    for (unsigned i = 0; i < count && !rc; i++)
        rc = ops[i].operation == KRN_CUDA_OP_WRITE_32
                 ? memop(stream, OP_WRITE_32, ops[i].address, (uint32_t)ops[i].value)
             : ops[i].operation == KRN_CUDA_OP_WRITE_64
                 ? memop(stream, OP_WRITE_64, ops[i].address, ops[i].value)
             : ops[i].operation == KRN_CUDA_OP_WAIT_32
                 ? memop(stream, OP_WAIT_32, ops[i].address, (uint32_t)ops[i].value)
                 : KRN_CUDA_INVALID_VALUE;
    return rc;
}

static int copy_in(void *stream, uint64_t target, uint64_t source, size_t bytes)
{
    if (!inside(target, bytes, ON_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    /* from one registration or from pageable memory, not from the border of two */
    bool touches = inside(source, 1, ON_HOST) || inside(source + bytes - 1, 1, ON_HOST);
    if (touches && !inside(source, bytes, ON_HOST))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_COPY, .target = target, .source = source, .bytes = bytes});
}

static int fake_copy_in_async(krn_cuda_ptr target, const void *source, size_t bytes, void *stream)
{
    note("cuMemcpyHtoDAsync", stream_number(stream), "%zu", bytes);
    int rc = fails("cuMemcpyHtoDAsync");
    return rc ? rc : copy_in(stream, target, (uint64_t)(uintptr_t)source, bytes);
}

static int fake_copy_out_async(void *target, krn_cuda_ptr source, size_t bytes, void *stream)
{
    note("cuMemcpyDtoHAsync", stream_number(stream), "%zu", bytes);
    if (!inside(source, bytes, ON_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_COPY,
                                       .target = (uint64_t)(uintptr_t)target,
                                       .source = source,
                                       .bytes = bytes});
}

static int fake_copy_device_async(krn_cuda_ptr target, krn_cuda_ptr source, size_t bytes, void *stream)
{
    note("cuMemcpyDtoDAsync", stream_number(stream), "%zu", bytes);
    if (!inside(source, bytes, ON_DEVICE) || !inside(target, bytes, ON_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_COPY, .target = target, .source = source, .bytes = bytes});
}

static int fake_memset_8_async(krn_cuda_ptr target, unsigned char value, size_t bytes, void *stream)
{
    note("cuMemsetD8Async", stream_number(stream), "%zu", bytes);
    if (!inside(target, bytes, ON_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_FILL, .target = target, .value = value, .bytes = bytes});
}

static int batch(krn_cuda_ptr *targets, krn_cuda_ptr *sources, size_t *sizes, size_t count, void *stream)
{
    int rc = fails("cuMemcpyBatchAsync");
    for (size_t i = 0; i < count && !rc; i++) {
        note("cuMemcpyBatchAsync", stream_number(stream), "%zu of %zu", sizes[i], count);
        rc = copy_in(stream, targets[i], sources[i], sizes[i]);
    }
    return rc;
}

static int fake_copy_batch(krn_cuda_ptr *targets, krn_cuda_ptr *sources, size_t *sizes, size_t count,
                           struct krn_cuda_copy_attr *attrs, size_t *attr_first, size_t attr_count,
                           void *stream)
{
    if (attr_count != 1 || attr_first[0] || attrs->source_order != KRN_CUDA_SOURCE_STREAM)
        return KRN_CUDA_INVALID_VALUE;
    return batch(targets, sources, sizes, count, stream);
}

static int fake_copy_batch_12(krn_cuda_ptr *targets, krn_cuda_ptr *sources, size_t *sizes, size_t count,
                              struct krn_cuda_copy_attr *attrs, size_t *attr_first, size_t attr_count,
                              size_t *ret_failed, void *stream)
{
    if (!ret_failed)
        return KRN_CUDA_INVALID_VALUE;
    return fake_copy_batch(targets, sources, sizes, count, attrs, attr_first, attr_count, stream);
}

static int fake_event_create(void **ret_event, unsigned flags)
{
    (void)flags;
    *ret_event = calloc(1, sizeof(struct event));
    return *ret_event ? 0 : KRN_CUDA_OUT_OF_MEMORY;
}
static int fake_event_destroy(void *event)
{
    free(event);
    return 0;
}
static int fake_event_record(void *event, void *stream)
{
    struct event *e = event;
    note("cuEventRecord", stream_number(stream), "-");
    return enqueue(stream, (struct op){.kind = OP_EVENT,
                                       .target = (uint64_t)(uintptr_t)event,
                                       .value = atomic_fetch_add(&e->recorded, 1) + 1});
}
static int fake_event_query(void *event)
{
    struct event *e = event;
    return atomic_load(&e->done) == atomic_load(&e->recorded) ? 0 : KRN_CUDA_NOT_READY;
}
static int fake_event_synchronize(void *event)
{
    while (fake_event_query(event))
        usleep(20);
    return 0;
}
static int fake_event_elapsed(float *ret_ms, void *begin, void *end)
{
    struct event *a = begin, *b = end;
    *ret_ms = (float)((double)(atomic_load(&b->ns) - atomic_load(&a->ns)) / 1e6);
    return 0;
}

/* ---- device, modules, errors ---- */

static int fake_init(unsigned flags)
{
    note("cuInit", 0, "%u", flags);
    return fails("cuInit");
}
static int fake_device_count(int *ret_count)
{
    *ret_count = number("FAKECUDA_DEVICES", 1);
    return 0;
}
static int fake_device_get(krn_cuda_dev *ret_device, int ordinal)
{
    *ret_device = ordinal;
    return ordinal < number("FAKECUDA_DEVICES", 1) ? 0 : KRN_CUDA_INVALID_DEVICE;
}
static int fake_device_name(char *name, int bytes, krn_cuda_dev device)
{
    snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return 0;
}
static int fake_device_uuid(struct krn_cuda_uuid *ret_uuid, krn_cuda_dev device)
{
    memset(ret_uuid, 0xfa, sizeof(*ret_uuid));
    ret_uuid->bytes[15] = (uint8_t)device;
    return 0;
}
static int fake_device_memory(size_t *ret_bytes, krn_cuda_dev device)
{
    (void)device;
    *ret_bytes = (size_t)1 << 33;
    return 0;
}
static int fake_device_attribute(int *ret_value, int attribute, krn_cuda_dev device)
{
    (void)device;
    *ret_value = attribute == KRN_CUDA_ATTR_MAJOR             ? 9
                 : attribute == KRN_CUDA_ATTR_MULTIPROCESSORS ? 132
                 : attribute == KRN_CUDA_ATTR_SHARED_OPTIN    ? 232448
                                                              : 0;
    return 0;
}
static int fake_primary_flags(krn_cuda_dev device, unsigned flags)
{
    (void)device, (void)flags;
    return 0;
}
static int fake_primary_retain(void **ret_context, krn_cuda_dev device)
{
    static char contexts[64];
    note("cuDevicePrimaryCtxRetain", 0, "%d", device);
    *ret_context = &contexts[device];
    return fails("cuDevicePrimaryCtxRetain");
}
static int fake_primary_release(krn_cuda_dev device)
{
    note("cuDevicePrimaryCtxRelease", 0, "%d", device);
    return 0;
}
static int fake_set_current(void *context)
{
    current = context;
    return 0;
}

static int fake_module_load(void **ret_module, const void *image)
{
    uint32_t magic;
    memcpy(&magic, image, sizeof(magic));
    note("cuModuleLoadData", 0, "%x", magic);
    *ret_module = &next_stream;
    return magic == 0xba55ed50u ? 0 : KRN_CUDA_INVALID_IMAGE;
}
static int fake_module_unload(void *module)
{
    (void)module;
    return 0;
}
static int fake_module_function(void **ret_function, void *module, const char *name)
{
    note("cuModuleGetFunction", 0, "%s", name);
    *ret_function = module;
    return strncmp(name, "krn_", 4) ? KRN_CUDA_NOT_FOUND : 0;
}
static int fake_function_attribute(void *function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return 0;
}
static int fake_launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared, void *stream, void **arguments, void **extra)
{
    (void)function, (void)arguments, (void)extra, (void)shared;
    note("cuLaunchKernel", stream_number(stream), "%u %u %u x %u %u %u", gx, gy, gz, bx, by, bz);
    return 0;
}

static int fake_get_error_name(int result, const char **ret_name)
{
    static const struct {
        int result;
        const char *name;
    } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"},
                 {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {100, "CUDA_ERROR_NO_DEVICE"},
                 {201, "CUDA_ERROR_INVALID_CONTEXT"},
                 {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                 {719, "CUDA_ERROR_LAUNCH_FAILED"},
                 {801, "CUDA_ERROR_NOT_SUPPORTED"}};
    *ret_name = "CUDA_ERROR_FAKE";
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].result == result)
            *ret_name = names[i].name;
    return 0;
}
static int fake_get_error_string(int result, const char **ret_text)
{
    (void)result;
    *ret_text = "said the fake driver";
    return 0;
}

EXPORT int cuDriverGetVersion(int *ret_version);
EXPORT int cuDriverGetVersion(int *ret_version)
{
    *ret_version = number("FAKECUDA_VERSION", 13000);
    return 0;
}

struct entry {
    const char *symbol;
    int version;
    void (*function)(void);
};
#define ENTRY(field, symbol, version, required, arguments) {#symbol, version, (void (*)(void))fake_##field},
static const struct entry entries[] = {KRN_CUDA_TABLE(ENTRY)};

static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; at && (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || !at[n]))
            return true;
    return false;
}

/* As the real one: the newest variant not above the version that is asked for. */
EXPORT int cuGetProcAddress_v2(const char *symbol, void **ret, int version, uint64_t flags, int *ret_status);
EXPORT int cuGetProcAddress_v2(const char *symbol, void **ret, int version, uint64_t flags, int *ret_status)
{
    (void)flags;
    const struct entry *best = NULL;
    if (!listed(getenv("FAKECUDA_MISSING"), symbol))
        for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++)
            if (strcmp(entries[i].symbol, symbol) == 0 && entries[i].version <= version &&
                entries[i].version <= number("FAKECUDA_VERSION", 13000) &&
                (!best || entries[i].version > best->version))
                best = &entries[i];
    *ret = NULL;
    *ret_status = best ? 0 : 1;
    if (!best)
        return KRN_CUDA_NOT_FOUND;
    memcpy(ret, &best->function, sizeof(best->function));
    return 0;
}
