/* SPDX-License-Identifier: MIT */
/* The fake driver's streams: one thread each; copies, memory operations, events. */
#include "fakecuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic int next_stream;

enum op_kind { OP_COPY, OP_WRITE_32, OP_WRITE_64, OP_WAIT_32, OP_FILL, OP_EVENT, OP_LAUNCH };
struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t target, source, value;
    size_t bytes;
    unsigned grid[3], threads; /* OP_LAUNCH: target is the function, source its arguments, to be freed */
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
    case OP_LAUNCH:
        fake_kernel_run(target, op->grid, op->threads, (void *)(uintptr_t)op->source);
        free((void *)(uintptr_t)op->source);
        break;
    }
}

static void *run(void *arg)
{
    struct stream *s = arg;
    int us = fake_number("FAKECUDA_DELAY_US", 0);
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
    if (!copy || !s || !fake_current)
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

int fake_stream_launch(void *stream, void *function, const unsigned grid[3], unsigned threads,
                       void **arguments)
{
    void *args = malloc(FAKE_ARGUMENTS);
    if (!args)
        return KRN_CUDA_OUT_OF_MEMORY;
    fake_kernel_keep(function, grid[0], arguments, args);
    return enqueue(stream, (struct op){.kind = OP_LAUNCH,
                                       .target = (uint64_t)(uintptr_t)function,
                                       .source = (uint64_t)(uintptr_t)args,
                                       .grid = {grid[0], grid[1], grid[2]},
                                       .threads = threads});
}

int fake_stream_number(void *stream)
{
    return stream ? ((struct stream *)stream)->number : 0;
}

int fake_stream_create(void **ret_stream, unsigned flags)
{
    int failed = fake_fails("cuStreamCreate");
    if (failed)
        return failed;
    struct stream *s = calloc(1, sizeof(*s));
    if (!s || !fake_current)
        return free(s), KRN_CUDA_INVALID_CONTEXT;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->idle, NULL);
    s->last = &s->first;
    s->number = atomic_fetch_add(&next_stream, 1) + 1;
    if (pthread_create(&s->thread, NULL, run, s))
        return free(s), KRN_CUDA_OUT_OF_MEMORY;
    fake_note("cuStreamCreate", s->number, "%u", flags);
    *ret_stream = s;
    return 0;
}

int fake_stream_destroy(void *stream)
{
    struct stream *s = stream;
    FAKE_CALL("cuStreamDestroy", s->number, "-");
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
    return 0;
}

int fake_stream_query(void *stream)
{
    struct stream *s = stream;
    int rc = fake_fails("cuStreamQuery");
    if (rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    bool idle = !s->first && !s->busy;
    pthread_mutex_unlock(&s->lock);
    return idle ? 0 : KRN_CUDA_NOT_READY;
}

int fake_stream_synchronize(void *stream)
{
    struct stream *s = stream;
    FAKE_CALL("cuStreamSynchronize", s->number, "-");
    pthread_mutex_lock(&s->lock);
    while (s->first || s->busy)
        pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

int fake_stream_wait_event(void *stream, void *event, unsigned flags)
{
    (void)event, (void)flags;
    FAKE_CALL("cuStreamWaitEvent", fake_stream_number(stream), "-");
    return KRN_CUDA_NOT_SUPPORTED;
}

static int memop(void *stream, enum op_kind kind, uint64_t address, uint64_t value)
{
    if (!fake_inside(address, kind == OP_WRITE_64 ? 8 : 4, FAKE_DEVICE | FAKE_HOST) || address % 4)
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = kind, .target = address, .value = value});
}

int fake_stream_store(void *stream, uint64_t address, uint32_t value)
{
    return memop(stream, OP_WRITE_32, address, value);
}

int fake_write_32(void *stream, krn_cuda_ptr address, uint32_t value, unsigned flags)
{
    FAKE_CALL("cuStreamWriteValue32", fake_stream_number(stream), "%u %u", value, flags);
    return memop(stream, OP_WRITE_32, address, value);
}

int fake_write_64(void *stream, krn_cuda_ptr address, uint64_t value, unsigned flags)
{
    FAKE_CALL("cuStreamWriteValue64", fake_stream_number(stream), "%llu %u", (unsigned long long)value,
              flags);
    return memop(stream, OP_WRITE_64, address, value);
}

int fake_wait_32(void *stream, krn_cuda_ptr address, uint32_t value, unsigned flags)
{
    FAKE_CALL("cuStreamWaitValue32", fake_stream_number(stream), "%u %u", value, flags);
    return flags != KRN_CUDA_WAIT_GEQ ? KRN_CUDA_NOT_SUPPORTED : memop(stream, OP_WAIT_32, address, value);
}

int fake_memops(void *stream, unsigned count, struct krn_cuda_memop *ops, unsigned flags)
{
    FAKE_CALL("cuStreamBatchMemOp", fake_stream_number(stream), "%u %u", count, flags);
    int rc = 0;
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
    if (!fake_inside(target, bytes, FAKE_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    /* from one registration or from pageable memory, not from the border of two */
    bool touches = fake_inside(source, 1, FAKE_HOST) || fake_inside(source + bytes - 1, 1, FAKE_HOST);
    if (touches && !fake_inside(source, bytes, FAKE_HOST))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_COPY, .target = target, .source = source, .bytes = bytes});
}

int fake_copy_in_async(krn_cuda_ptr target, const void *source, size_t bytes, void *stream)
{
    FAKE_CALL("cuMemcpyHtoDAsync", fake_stream_number(stream), "%zu", bytes);
    return copy_in(stream, target, (uint64_t)(uintptr_t)source, bytes);
}

int fake_copy_out_async(void *target, krn_cuda_ptr source, size_t bytes, void *stream)
{
    FAKE_CALL("cuMemcpyDtoHAsync", fake_stream_number(stream), "%zu", bytes);
    if (!fake_inside(source, bytes, FAKE_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_COPY,
                                       .target = (uint64_t)(uintptr_t)target,
                                       .source = source,
                                       .bytes = bytes});
}

int fake_copy_device_async(krn_cuda_ptr target, krn_cuda_ptr source, size_t bytes, void *stream)
{
    FAKE_CALL("cuMemcpyDtoDAsync", fake_stream_number(stream), "%zu", bytes);
    if (!fake_inside(source, bytes, FAKE_DEVICE) || !fake_inside(target, bytes, FAKE_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_COPY, .target = target, .source = source, .bytes = bytes});
}

int fake_copy_2d_async(const struct krn_cuda_copy_2d *c, void *stream)
{
    const bool in = c->source_type == KRN_CUDA_MEMORY_HOST, out = c->target_type == KRN_CUDA_MEMORY_HOST;
    const uint64_t from = in ? (uint64_t)(uintptr_t)c->source_host : c->source_device,
                   to = out ? (uint64_t)(uintptr_t)c->target_host : c->target_device;
    int rc = 0;
    FAKE_CALL("cuMemcpy2DAsync", fake_stream_number(stream), "%zu %zu", c->bytes, c->rows);
    if (c->source_x || c->source_y || c->target_x || c->target_y || c->source_pitch < c->bytes ||
        c->target_pitch < c->bytes)
        return KRN_CUDA_INVALID_VALUE;
    for (size_t i = 0; i < c->rows && !rc; i++) {
        const uint64_t source = from + i * c->source_pitch, target = to + i * c->target_pitch;
        if ((!in && !fake_inside(source, c->bytes, FAKE_DEVICE)) ||
            (!out && !fake_inside(target, c->bytes, FAKE_DEVICE)))
            rc = KRN_CUDA_INVALID_VALUE;
        else
            rc = enqueue(stream,
                         (struct op){.kind = OP_COPY, .target = target, .source = source, .bytes = c->bytes});
    }
    return rc;
}

int fake_memset_8_async(krn_cuda_ptr target, unsigned char value, size_t bytes, void *stream)
{
    FAKE_CALL("cuMemsetD8Async", fake_stream_number(stream), "%zu", bytes);
    if (!fake_inside(target, bytes, FAKE_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return enqueue(stream, (struct op){.kind = OP_FILL, .target = target, .value = value, .bytes = bytes});
}

static int batch(krn_cuda_ptr *targets, krn_cuda_ptr *sources, size_t *sizes, size_t count, void *stream)
{
    int rc = fake_fails("cuMemcpyBatchAsync");
    for (size_t i = 0; i < count && !rc; i++) {
        fake_note("cuMemcpyBatchAsync", fake_stream_number(stream), "%zu of %zu", sizes[i], count);
        rc = copy_in(stream, targets[i], sources[i], sizes[i]);
    }
    return rc;
}

int fake_copy_batch(krn_cuda_ptr *targets, krn_cuda_ptr *sources, size_t *sizes, size_t count,
                    struct krn_cuda_copy_attr *attrs, size_t *attr_first, size_t attr_count, void *stream)
{
    if (attr_count != 1 || attr_first[0] || attrs->source_order != KRN_CUDA_SOURCE_STREAM)
        return KRN_CUDA_INVALID_VALUE;
    return batch(targets, sources, sizes, count, stream);
}

int fake_copy_batch_12(krn_cuda_ptr *targets, krn_cuda_ptr *sources, size_t *sizes, size_t count,
                       struct krn_cuda_copy_attr *attrs, size_t *attr_first, size_t attr_count,
                       size_t *ret_failed, void *stream)
{
    if (!ret_failed)
        return KRN_CUDA_INVALID_VALUE;
    return fake_copy_batch(targets, sources, sizes, count, attrs, attr_first, attr_count, stream);
}

int fake_event_create(void **ret_event, unsigned flags)
{
    (void)flags;
    *ret_event = calloc(1, sizeof(struct event));
    return *ret_event ? 0 : KRN_CUDA_OUT_OF_MEMORY;
}
int fake_event_destroy(void *event)
{
    free(event);
    return 0;
}
int fake_event_record(void *event, void *stream)
{
    struct event *e = event;
    FAKE_CALL("cuEventRecord", fake_stream_number(stream), "-");
    return enqueue(stream, (struct op){.kind = OP_EVENT,
                                       .target = (uint64_t)(uintptr_t)event,
                                       .value = atomic_fetch_add(&e->recorded, 1) + 1});
}
int fake_event_query(void *event)
{
    struct event *e = event;
    return atomic_load(&e->done) == atomic_load(&e->recorded) ? 0 : KRN_CUDA_NOT_READY;
}
int fake_event_synchronize(void *event)
{
    while (fake_event_query(event))
        usleep(20);
    return 0;
}
int fake_event_elapsed(float *ret_ms, void *begin, void *end)
{
    struct event *a = begin, *b = end;
    *ret_ms = (float)((double)(atomic_load(&b->ns) - atomic_load(&a->ns)) / 1e6);
    return 0;
}
