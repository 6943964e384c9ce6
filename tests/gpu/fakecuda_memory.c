/* SPDX-License-Identifier: MIT */
/* The fake driver's memory: device ranges, IPC handles, pinned host memory. */
#include "fakecuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANGES 256

struct range {
    enum kind kind;
    uint8_t *base;
    size_t bytes;
    int fd;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[RANGES];

static struct range *find(uint64_t address, size_t bytes, unsigned kinds)
{
    for (int i = 0; i < RANGES; i++) {
        struct range *r = &ranges[i];
        uint64_t base = (uint64_t)(uintptr_t)r->base;
        if (r->kind != KIND_FREE && (kinds & 1u << r->kind) && address >= base && address - base < r->bytes &&
            bytes <= r->bytes - (address - base))
            return r;
    }
    return NULL;
}

bool fake_inside(uint64_t address, size_t bytes, unsigned kinds)
{
    pthread_mutex_lock(&lock);
    bool ok = find(address, bytes, kinds) != NULL;
    pthread_mutex_unlock(&lock);
    return ok;
}

static int add(enum kind kind, void *base, size_t bytes, int fd)
{
    pthread_mutex_lock(&lock);
    int rc = KRN_CUDA_OUT_OF_MEMORY;
    for (int i = 0; i < RANGES && rc; i++)
        if (ranges[i].kind == KIND_FREE) {
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
        r->kind = KIND_FREE;
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

int fake_mem_alloc(krn_cuda_ptr *ret_ptr, size_t bytes)
{
    FAKE_CALL("cuMemAlloc", 0, "%zu", bytes);
    if (!fake_current)
        return KRN_CUDA_INVALID_CONTEXT;
    int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        return KRN_CUDA_OUT_OF_MEMORY;
    return map_fd(fd, bytes, KIND_DEVICE, ret_ptr);
}

int fake_mem_free(krn_cuda_ptr ptr)
{
    FAKE_CALL("cuMemFree", 0, "-");
    struct range r;
    int rc = take((void *)(uintptr_t)ptr, 1u << KIND_DEVICE, &r);
    if (rc == 0) {
        munmap(r.base, r.bytes);
        close(r.fd);
    }
    return rc;
}

int fake_address_range(krn_cuda_ptr *ret_base, size_t *ret_bytes, krn_cuda_ptr ptr)
{
    pthread_mutex_lock(&lock);
    struct range *r = find(ptr, 1, FAKE_DEVICE);
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

int fake_ipc_get(struct krn_cuda_ipc *ret_handle, krn_cuda_ptr ptr)
{
    FAKE_CALL("cuIpcGetMemHandle", 0, "-");
    pthread_mutex_lock(&lock);
    struct range *r = find(ptr, 1, 1u << KIND_DEVICE);
    struct stat st;
    if (r && fstat(r->fd, &st) == 0) {
        struct handle h = {HANDLE_MAGIC, (int)getpid(), r->fd, 0, r->bytes, st.st_ino};
        memset(ret_handle, 0, sizeof(*ret_handle));
        memcpy(ret_handle, &h, sizeof(h));
    }
    pthread_mutex_unlock(&lock);
    return r ? 0 : KRN_CUDA_INVALID_VALUE;
}

int fake_ipc_open(krn_cuda_ptr *ret_ptr, struct krn_cuda_ipc handle, unsigned flags)
{
    FAKE_CALL("cuIpcOpenMemHandle", 0, "%u", flags);
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
    return map_fd(fd, h.bytes, KIND_OPENED, ret_ptr);
}

int fake_ipc_close(krn_cuda_ptr ptr)
{
    FAKE_CALL("cuIpcCloseMemHandle", 0, "-");
    struct range r;
    int rc = take((void *)(uintptr_t)ptr, 1u << KIND_OPENED, &r);
    if (rc == 0) {
        munmap(r.base, r.bytes);
        close(r.fd);
    }
    return rc;
}

int fake_host_alloc(void **ret_memory, size_t bytes, unsigned flags)
{
    FAKE_CALL("cuMemHostAlloc", 0, "%zu %u", bytes, flags);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return KRN_CUDA_OUT_OF_MEMORY;
    *ret_memory = memory;
    return add(KIND_HOST, memory, bytes, -1);
}

int fake_host_free(void *memory)
{
    FAKE_CALL("cuMemFreeHost", 0, "-");
    struct range r;
    int rc = take(memory, 1u << KIND_HOST, &r);
    if (rc == 0)
        munmap(r.base, r.bytes);
    return rc;
}

int fake_host_register(void *memory, size_t bytes, unsigned flags)
{
    FAKE_CALL("cuMemHostRegister", 0, "%zu %u", bytes, flags);
    usleep((unsigned)fake_number("FAKECUDA_REGISTER_MS", 0) * 1000);
    uint64_t begin = (uint64_t)(uintptr_t)memory;
    pthread_mutex_lock(&lock);
    bool overlap = find(begin, 1, FAKE_HOST) || find(begin + bytes - 1, 1, FAKE_HOST);
    pthread_mutex_unlock(&lock);
    return overlap ? KRN_CUDA_ALREADY_REGISTERED : add(KIND_REGISTERED, memory, bytes, -1);
}

int fake_host_unregister(void *memory)
{
    FAKE_CALL("cuMemHostUnregister", 0, "-");
    struct range r;
    return take(memory, 1u << KIND_REGISTERED, &r) ? KRN_CUDA_NOT_REGISTERED : 0;
}

int fake_host_pointer(krn_cuda_ptr *ret_ptr, void *memory, unsigned flags)
{
    (void)flags;
    *ret_ptr = (krn_cuda_ptr)(uintptr_t)memory;
    return fake_inside(*ret_ptr, 1, FAKE_HOST) ? 0 : KRN_CUDA_INVALID_VALUE;
}

int fake_memory_info(size_t *ret_free, size_t *ret_total)
{
    const char *mib = getenv("FAKECUDA_FREE_MIB");
    *ret_free = *ret_total = mib ? (size_t)atoi(mib) << 20 : (size_t)1 << 33;
    return 0;
}
