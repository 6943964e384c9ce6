/* SPDX-License-Identifier: MIT */
#include "kernels/krn_cuda.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LINE         64u
#define LINES_BYTES  (KRN_CUDA_LINES * LINE)
#define PINNED_BYTES (LINES_BYTES + KRN_CUDA_COPY_MIN)
#define TRIAL_BYTES  (2u << 20)
#define HOST_BYTES   65536u

static _Thread_local void *current;

int krn_cuda_enter(const struct krn_cuda_device *device)
{
    if (current == device->context)
        return 0;
    int rc = KRN_CUDA(set_current, device->context);
    if (rc == 0)
        current = device->context;
    return rc;
}

int krn_cuda_line_take(struct krn_cuda_device *device, void **ret_line, krn_cuda_ptr *ret_device_address)
{
    for (unsigned i = 0; i < KRN_CUDA_LINES; i++) {
        uint64_t bit = UINT64_C(1) << (i % 64);
        if (atomic_fetch_or(&device->lines_used[i / 64], bit) & bit)
            continue;
        memset(device->pinned + i * LINE, 0, LINE);
        *ret_line = device->pinned + i * LINE;
        *ret_device_address = device->pinned_device + i * LINE;
        return 0;
    }
    return -EBUSY;
}

void krn_cuda_line_give(struct krn_cuda_device *device, void *line)
{
    size_t i = (size_t)((uint8_t *)line - device->pinned) / LINE;
    atomic_fetch_and(&device->lines_used[i / 64], ~(UINT64_C(1) << (i % 64)));
}

int krn_cuda_stream_primed(struct krn_cuda_device *device, krn_cuda_ptr scratch, void **ret_stream)
{
    void *stream = NULL;
    int rc = krn_cuda_enter(device);
    if (rc == 0)
        rc = KRN_CUDA(stream_create, &stream, KRN_CUDA_STREAM_NON_BLOCKING);
    if (rc < 0)
        return rc;
    rc = KRN_CUDA(copy_in_async, scratch, device->pinned + LINES_BYTES, KRN_CUDA_COPY_MIN, stream);
    if (rc == 0)
        rc = KRN_CUDA(stream_synchronize, stream);
    if (rc < 0) {
        krn_cuda.stream_destroy(stream);
        return rc;
    }
    *ret_stream = stream;
    return 0;
}

static void lacks(struct krn_cuda_device *d, const char *what)
{
    size_t n = strlen(d->missing);
    snprintf(d->missing + n, sizeof(d->missing) - n, "%s%s (%s)", n ? ", " : "", what,
             krn_cuda_detail()->name);
}

/* Memory operations: on a primed stream, into pinned memory, and seen there. */
static bool try_memops(struct krn_cuda_device *d, krn_cuda_ptr scratch)
{
    void *stream, *line;
    krn_cuda_ptr address;
    if (krn_cuda_line_take(d, &line, &address) < 0)
        return false;
    bool ok = krn_cuda_stream_primed(d, scratch, &stream) == 0;
    if (ok) {
        struct krn_cuda_memop ops[2] = {
            {.operation = KRN_CUDA_OP_WRITE_32, .address = scratch, .value = 1},
            {.operation = KRN_CUDA_OP_WRITE_32, .address = address + 4, .value = 2}};
        ok = KRN_CUDA(write_32, stream, address, 1, 0) == 0 && KRN_CUDA(memops, stream, 2, ops, 0) == 0 &&
             KRN_CUDA(stream_synchronize, stream) == 0;
        _Atomic uint32_t *word = line;
        ok = ok && atomic_load(word) == 1 && atomic_load(word + 1) == 2;
        krn_cuda.stream_destroy(stream);
    }
    krn_cuda_line_give(d, line);
    return ok;
}

static bool try_register(unsigned flags, int protection)
{
    int fd = memfd_create("cuda-trial", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, HOST_BYTES) < 0) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    void *memory = mmap(NULL, HOST_BYTES, protection, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return false;
    bool ok = KRN_CUDA(host_register, memory, HOST_BYTES, flags) == 0;
    if (ok)
        ok = KRN_CUDA(host_unregister, memory) == 0;
    munmap(memory, HOST_BYTES);
    return ok;
}

static int try_capabilities(struct krn_cuda_device *d, struct shm_error *err)
{
    krn_cuda_ptr scratch;
    int rc = KRN_CUDA(mem_alloc, &scratch, TRIAL_BYTES);
    if (rc < 0)
        return krn_cuda_explain(rc, "CUDA device memory for a trial", err);
    struct krn_cuda_ipc handle;
    d->ipc = KRN_CUDA(ipc_get, &handle, scratch) == 0;
    if (!d->ipc)
        lacks(d, "sharing device memory between processes");
    d->memops = try_memops(d, scratch);
    if (!d->memops)
        lacks(d, "stream memory operations");
    unsigned flags = KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP;
    d->host_register = try_register(flags, PROT_READ | PROT_WRITE);
    if (!d->host_register)
        lacks(d, "registration of host memory");
    d->register_read_only = try_register(flags | KRN_CUDA_REGISTER_READ_ONLY, PROT_READ);
    if (!d->register_read_only)
        lacks(d, "read-only registration");
    d->batch_copy = krn_cuda.copy_batch || krn_cuda.copy_batch_12;
    KRN_CUDA(mem_free, scratch);
    return 0;
}

static int attribute(const struct krn_cuda_device *d, int number)
{
    int value = 0;
    KRN_CUDA(device_attribute, &value, number, d->device);
    return value;
}

int krn_cuda_device_check(int ordinal, struct shm_error *err)
{
    int rc = krn_cuda_load(err);
    if (rc < 0)
        return rc;
    int count = krn_cuda_count();
    if (ordinal < 0 || ordinal >= count)
        return shm_error_set(err, ENODEV, "there is no CUDA device %d: the driver shows %d", ordinal, count);
    return 0;
}

int krn_cuda_device_open(int ordinal, struct krn_cuda_device **ret_device, struct shm_error *err)
{
    int rc = krn_cuda_device_check(ordinal, err);
    if (rc < 0)
        return rc;
    struct krn_cuda_device *d = calloc(1, sizeof(*d));
    if (!d)
        return shm_error_set(err, ENOMEM, "CUDA device %d: no memory; free some", ordinal);
    d->ordinal = ordinal;
    char what[48];
    snprintf(what, sizeof(what), "CUDA device %d", ordinal);
    struct krn_cuda_uuid uuid = {{0}};
    size_t bytes = 0;
    rc = KRN_CUDA(device_get, &d->device, ordinal);
    if (rc == 0)
        rc = KRN_CUDA(device_name, d->name, (int)sizeof(d->name), d->device);
    if (rc == 0)
        rc = KRN_CUDA(device_uuid, &uuid, d->device);
    if (rc == 0)
        rc = KRN_CUDA(device_memory, &bytes, d->device);
    /* a thread that waits in the driver sleeps; refused when the context runs already, which is fine */
    if (rc == 0)
        krn_cuda.primary_flags(d->device, KRN_CUDA_SCHED_BLOCKING_SYNC);
    if (rc == 0)
        rc = KRN_CUDA(primary_retain, &d->context, d->device);
    if (rc < 0) {
        krn_cuda_explain(rc, what, err);
        free(d);
        return rc;
    }
    memcpy(d->uuid, uuid.bytes, sizeof(d->uuid));
    d->name[sizeof(d->name) - 1] = '\0';
    d->memory_bytes = bytes;
    d->major = attribute(d, KRN_CUDA_ATTR_MAJOR);
    d->minor = attribute(d, KRN_CUDA_ATTR_MINOR);
    d->multiprocessors = attribute(d, KRN_CUDA_ATTR_MULTIPROCESSORS);
    d->shared_max = attribute(d, KRN_CUDA_ATTR_SHARED_OPTIN);
    void *pinned = NULL;
    rc = krn_cuda_enter(d);
    if (rc == 0)
        rc = KRN_CUDA(host_alloc, &pinned, PINNED_BYTES, KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP);
    if (rc == 0) {
        d->pinned = pinned;
        memset(pinned, 0, PINNED_BYTES);
        rc = KRN_CUDA(host_pointer, &d->pinned_device, pinned, 0);
    }
    if (rc < 0)
        krn_cuda_explain(rc, what, err);
    else
        rc = try_capabilities(d, err);
    if (rc < 0) {
        krn_cuda_device_close(&d);
        return rc;
    }
    *ret_device = d;
    return 0;
}

void krn_cuda_device_close(struct krn_cuda_device **device)
{
    struct krn_cuda_device *d = *device;
    if (!d)
        return;
    if (d->pinned && krn_cuda_enter(d) == 0)
        krn_cuda.host_free(d->pinned);
    krn_cuda.set_current(NULL);
    current = NULL;
    krn_cuda.primary_release(d->device);
    free(d);
    *device = NULL;
}

void krn_cuda_device_describe(const struct krn_cuda_device *d, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s, compute capability %d.%d, driver CUDA %d.%d", d->name, d->major, d->minor,
             krn_cuda_version() / 1000, krn_cuda_version() % 1000 / 10);
}
