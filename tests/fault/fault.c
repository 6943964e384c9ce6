/* SPDX-License-Identifier: MIT */
/*
 * Fault injection: a library for LD_PRELOAD that makes the Nth call of a kind
 * fail, once, and lets all others through.
 *
 *   FAULT=KIND:N     which one; nothing fails without it
 *   FAULT_LOG=FILE   a line is appended when it failed: KIND N FUNCTION +OFFSET (of the caller, in the
 *                    program). No line: the run had fewer than N such calls.
 *
 *   alloc     malloc calloc realloc aligned_alloc posix_memalign   ENOMEM
 *   map       mmap memfd_create ftruncate posix_fallocate          ENOMEM, ENOSPC
 *   file      open openat mkdir rename write pwrite                EIO
 *   read      read pread                                           EIO
 *   short     read pread: half of what was asked for, if that is more than a byte
 *   uring     set-up, registration of buffers, submission          ENOMEM
 *   complete  a completion's result becomes EIO
 *   thread    pthread_create                                       EAGAIN
 *   watch     epoll_create1 epoll_ctl eventfd timerfd_create signalfd   EMFILE, ENOSPC
 *   message   nn_socket nn_setsockopt nn_bind nn_connect nn_send nn_recv   EIO
 *
 * Only calls that the program itself makes count, not those of the libraries
 * that it uses: what they do without memory is not ours to change.
 */
#undef _FILE_OFFSET_BITS /* both names of open, mmap, pread... are defined here */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define EXPORT __attribute__((visibility("default")))

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);

static uintptr_t low, high; /* of the program's code */
static char kind[16];
static _Atomic long left; /* calls until the one that fails; 0: none will */

static int first_object(struct dl_phdr_info *info, size_t bytes, void *ctx)
{
    (void)bytes;
    (void)ctx;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && p->p_flags & PF_X) {
            low = info->dlpi_addr + p->p_vaddr;
            high = low + p->p_memsz;
        }
    }
    return 1; /* the program comes first */
}

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("FAULT");
    long n = 0;
    dl_iterate_phdr(first_object, NULL);
    if (text && sscanf(text, "%15[^:]:%ld", kind, &n) == 2 && n > 0)
        atomic_store(&left, n);
}

static void report(const char *function, uintptr_t caller)
{
    const char *path = getenv("FAULT_LOG");
    char line[128];
    int n = snprintf(line, sizeof(line), "%s %s %s +0x%lx\n", getenv("FAULT"), kind, function,
                     (unsigned long)(caller - low));
    int fd =
        path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        syscall(SYS_write, fd, line, (size_t)n);
        syscall(SYS_close, fd);
    }
}

static bool fails(const char *of, const char *function, void *caller)
{
    uintptr_t at = (uintptr_t)caller;
    if (!atomic_load_explicit(&left, memory_order_relaxed) || strcmp(of, kind) != 0 || at < low || at >= high)
        return false;
    long was = atomic_load(&left);
    while (was > 0 && !atomic_compare_exchange_weak(&left, &was, was - 1))
        ;
    if (was != 1)
        return false;
    report(function, at);
    return true;
}

#define CALLER    __builtin_return_address(0)
#define FAILS(of) fails(of, __func__, CALLER)
#define REAL(type, name)                                                                                     \
    static __typeof__(type) real;                                                                            \
    if (!real)                                                                                               \
    real = (type)dlsym(RTLD_NEXT, name)
#define FAIL_WITH(of, e, value)                                                                              \
    do {                                                                                                     \
        if (FAILS(of)) {                                                                                     \
            errno = (e);                                                                                     \
            return (value);                                                                                  \
        }                                                                                                    \
    } while (0)

/* ---- alloc ---- */

EXPORT void *malloc(size_t n)
{
    FAIL_WITH("alloc", ENOMEM, NULL);
    return __libc_malloc(n);
}

EXPORT void *calloc(size_t n, size_t size)
{
    FAIL_WITH("alloc", ENOMEM, NULL);
    return __libc_calloc(n, size);
}

EXPORT void *realloc(void *p, size_t n)
{
    FAIL_WITH("alloc", ENOMEM, NULL);
    return __libc_realloc(p, n);
}

EXPORT void *aligned_alloc(size_t align, size_t n)
{
    FAIL_WITH("alloc", ENOMEM, NULL);
    return __libc_memalign(align, n);
}

EXPORT int posix_memalign(void **p, size_t align, size_t n)
{
    if (FAILS("alloc"))
        return ENOMEM;
    void *got = __libc_memalign(align, n);
    if (!got)
        return ENOMEM;
    *p = got;
    return 0;
}

/* ---- map ---- */

EXPORT void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    FAIL_WITH("map", ENOMEM, MAP_FAILED);
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}

EXPORT void *mmap64(void *at, size_t n, int prot, int flags, int fd, off64_t offset)
{
    FAIL_WITH("map", ENOMEM, MAP_FAILED);
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}

EXPORT int memfd_create(const char *name, unsigned flags)
{
    FAIL_WITH("map", ENOMEM, -1);
    return (int)syscall(SYS_memfd_create, name, flags);
}

EXPORT int ftruncate(int fd, off_t n)
{
    FAIL_WITH("map", ENOSPC, -1);
    return (int)syscall(SYS_ftruncate, fd, n);
}

EXPORT int ftruncate64(int fd, off64_t n)
{
    FAIL_WITH("map", ENOSPC, -1);
    return (int)syscall(SYS_ftruncate, fd, n);
}

EXPORT int posix_fallocate(int fd, off_t offset, off_t n)
{
    if (FAILS("map"))
        return ENOSPC;
    return syscall(SYS_fallocate, fd, 0, offset, n) < 0 ? errno : 0;
}

EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t n)
{
    if (FAILS("map"))
        return ENOSPC;
    return syscall(SYS_fallocate, fd, 0, offset, n) < 0 ? errno : 0;
}

/* ---- file, read ---- */

static mode_t mode_of(int flags, va_list args)
{
    return flags & (O_CREAT | O_TMPFILE) ? (mode_t)va_arg(args, int) : 0;
}

#define OPEN(name)                                                                                           \
    EXPORT int name(const char *path, int flags, ...)                                                        \
    {                                                                                                        \
        va_list args;                                                                                        \
        va_start(args, flags);                                                                               \
        mode_t mode = mode_of(flags, args);                                                                  \
        va_end(args);                                                                                        \
        FAIL_WITH("file", EIO, -1);                                                                          \
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);                                        \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                         \
    EXPORT int name(int dir, const char *path, int flags, ...)                                               \
    {                                                                                                        \
        va_list args;                                                                                        \
        va_start(args, flags);                                                                               \
        mode_t mode = mode_of(flags, args);                                                                  \
        va_end(args);                                                                                        \
        FAIL_WITH("file", EIO, -1);                                                                          \
        return (int)syscall(SYS_openat, dir, path, flags, mode);                                             \
    }
OPENAT(openat)
OPENAT(openat64)

EXPORT int mkdir(const char *path, mode_t mode)
{
    FAIL_WITH("file", EIO, -1);
    return (int)syscall(SYS_mkdir, path, mode);
}

EXPORT int rename(const char *from, const char *to)
{
    FAIL_WITH("file", EIO, -1);
    return (int)syscall(SYS_rename, from, to);
}

EXPORT ssize_t write(int fd, const void *bytes, size_t n)
{
    if (n != sizeof(uint64_t)) /* an event's count: it can't fail */
        FAIL_WITH("file", EIO, -1);
    return syscall(SYS_write, fd, bytes, n);
}

#define PWRITE(name, type)                                                                                   \
    EXPORT ssize_t name(int fd, const void *bytes, size_t n, type at)                                        \
    {                                                                                                        \
        FAIL_WITH("file", EIO, -1);                                                                          \
        return syscall(SYS_pwrite64, fd, bytes, n, at);                                                      \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

EXPORT ssize_t read(int fd, void *bytes, size_t n)
{
    FAIL_WITH("read", EIO, -1);
    if (n > 1 && FAILS("short"))
        n /= 2;
    return syscall(SYS_read, fd, bytes, n);
}

#define PREAD(name, type)                                                                                    \
    EXPORT ssize_t name(int fd, void *bytes, size_t n, type at)                                              \
    {                                                                                                        \
        FAIL_WITH("read", EIO, -1);                                                                          \
        if (n > 1 && FAILS("short"))                                                                         \
            n /= 2;                                                                                          \
        return syscall(SYS_pread64, fd, bytes, n, at);                                                       \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

/* ---- uring, complete ---- */

EXPORT int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
    REAL(int (*)(unsigned, struct io_uring *, unsigned), "io_uring_queue_init");
    return FAILS("uring") ? -ENOMEM : real(entries, ring, flags);
}

EXPORT int io_uring_register_buffers(struct io_uring *ring, const struct iovec *iov, unsigned n)
{
    REAL(int (*)(struct io_uring *, const struct iovec *, unsigned), "io_uring_register_buffers");
    return FAILS("uring") ? -ENOMEM : real(ring, iov, n);
}

EXPORT int io_uring_submit_and_wait_timeout(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned n,
                                            struct __kernel_timespec *ts, sigset_t *mask)
{
    REAL(int (*)(struct io_uring *, struct io_uring_cqe **, unsigned, struct __kernel_timespec *, sigset_t *),
         "io_uring_submit_and_wait_timeout");
    if (FAILS("uring"))
        return -ENOMEM;
    int rc = real(ring, cqe, n, ts, mask);
    if (*cqe && FAILS("complete"))
        (*cqe)->res = -EIO;
    return rc;
}

/* ---- thread, watch ---- */

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    REAL(int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *), "pthread_create");
    return FAILS("thread") ? EAGAIN : real(thread, attr, run, arg);
}

EXPORT int epoll_create1(int flags)
{
    FAIL_WITH("watch", EMFILE, -1);
    return (int)syscall(SYS_epoll_create1, flags);
}

EXPORT int epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
    if (op == EPOLL_CTL_ADD)
        FAIL_WITH("watch", ENOSPC, -1);
    return (int)syscall(SYS_epoll_ctl, epoll, op, fd, event);
}

EXPORT int eventfd(unsigned value, int flags)
{
    FAIL_WITH("watch", EMFILE, -1);
    return (int)syscall(SYS_eventfd2, value, flags);
}

EXPORT int timerfd_create(int clock, int flags)
{
    FAIL_WITH("watch", EMFILE, -1);
    return (int)syscall(SYS_timerfd_create, clock, flags);
}

EXPORT int signalfd(int fd, const sigset_t *mask, int flags)
{
    FAIL_WITH("watch", EMFILE, -1);
    return (int)syscall(SYS_signalfd4, fd, mask, _NSIG / 8, flags);
}

/* ---- message ---- */

EXPORT int nn_socket(int domain, int protocol)
{
    REAL(int (*)(int, int), "nn_socket");
    FAIL_WITH("message", EIO, -1);
    return real(domain, protocol);
}

EXPORT int nn_setsockopt(int s, int level, int option, const void *value, size_t n)
{
    REAL(int (*)(int, int, int, const void *, size_t), "nn_setsockopt");
    FAIL_WITH("message", EIO, -1);
    return real(s, level, option, value, n);
}

EXPORT int nn_bind(int s, const char *address)
{
    REAL(int (*)(int, const char *), "nn_bind");
    FAIL_WITH("message", EIO, -1);
    return real(s, address);
}

EXPORT int nn_connect(int s, const char *address)
{
    REAL(int (*)(int, const char *), "nn_connect");
    FAIL_WITH("message", EIO, -1);
    return real(s, address);
}

EXPORT int nn_send(int s, const void *bytes, size_t n, int flags)
{
    REAL(int (*)(int, const void *, size_t, int), "nn_send");
    FAIL_WITH("message", EIO, -1);
    return real(s, bytes, n, flags);
}

EXPORT int nn_recv(int s, void *bytes, size_t n, int flags)
{
    REAL(int (*)(int, void *, size_t, int), "nn_recv");
    FAIL_WITH("message", EIO, -1);
    return real(s, bytes, n, flags);
}
