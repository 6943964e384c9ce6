/* SPDX-License-Identifier: MIT */
#include "proto/prt_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

int prt_segment_create(const char *name, uint64_t bytes, int *ret_fd, void **ret_base, struct shm_error *err)
{
    if (bytes == 0 || bytes > INT64_MAX)
        return shm_error_set(err, EINVAL, "segment %s of %llu bytes", name, (unsigned long long)bytes);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return shm_error_set(err, errno, "segment %s: memfd_create: %s%s", name, strerror(errno),
                             shm_error_remedy(errno));
    void *base = NULL;
    int rc;
    if (ftruncate(fd, (off_t)bytes) < 0 || fcntl(fd, F_ADD_SEALS, SIZE_SEALS | F_SEAL_SEAL) < 0) {
        rc = shm_error_set(err, errno, "segment %s: cannot make it %llu bytes: %s", name,
                           (unsigned long long)bytes, strerror(errno));
        goto fail;
    }
    if (ret_base) {
        rc = prt_file_map(fd, name, bytes, true, &base, err);
        if (rc < 0)
            goto fail;
        *ret_base = base;
    }
    *ret_fd = fd;
    return 0;
fail:
    close(fd);
    return rc;
}

int prt_file_map(int fd, const char *name, uint64_t bytes, bool writable, void **ret_base,
                 struct shm_error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return shm_error_set(err, errno, "%s: %s", name, strerror(errno));
    if (bytes == 0 || bytes > SIZE_MAX || st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return shm_error_set(err, EBADMSG,
                             "%s has %lld bytes, %llu are needed: damaged or of another version", name,
                             (long long)st.st_size, (unsigned long long)bytes);
    void *base = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return shm_error_set(err, errno, "%s: cannot map %llu bytes: %s%s", name, (unsigned long long)bytes,
                             strerror(errno), shm_error_remedy(errno));
    *ret_base = base;
    return 0;
}

int prt_file_map_path(const char *path, uint64_t min_bytes, bool writable, void **ret_base,
                      uint64_t *ret_bytes, struct shm_error *err)
{
    /* O_NONBLOCK: a pipe put there must not hold us up */
    int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return shm_error_set(err, errno, "%s: %s%s", path, strerror(errno), shm_error_remedy(errno));
    struct stat st;
    int rc;
    if (fstat(fd, &st) < 0) {
        rc = shm_error_set(err, errno, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = shm_error_set(err, EBADMSG, "%s is not a regular file", path);
    } else if (st.st_uid != geteuid() && st.st_uid != 0) {
        rc = shm_error_set(err, EPERM, "%s belongs to user %u", path, (unsigned)st.st_uid);
    } else if ((uint64_t)st.st_size < min_bytes) {
        rc = shm_error_set(err, EBADMSG, "%s has %lld bytes, at least %llu are needed: damaged", path,
                           (long long)st.st_size, (unsigned long long)min_bytes);
    } else {
        rc = prt_file_map(fd, path, (uint64_t)st.st_size, writable, ret_base, err);
        if (rc == 0)
            *ret_bytes = (uint64_t)st.st_size;
    }
    close(fd);
    return rc;
}

int prt_peer_open(pid_t pid, uint32_t fd, uint64_t bytes, const char *what, int *ret_fd,
                  struct shm_error *err)
{
    char link[64], target[64];
    snprintf(link, sizeof(link), "/proc/%d/fd/%u", (int)pid, fd);
    /* O_PATH pins what is there without opening it; checked first, then opened by our own number */
    int pin = open(link, O_PATH | O_CLOEXEC);
    if (pin < 0)
        return shm_error_set(err, errno, "%s (%s): %s%s", what, link, strerror(errno),
                             shm_error_remedy(errno));
    int rc, opened = -1;
    char own[64];
    snprintf(own, sizeof(own), "/proc/self/fd/%d", pin);
    ssize_t n = readlink(own, target, sizeof(target) - 1);
    target[n < 0 ? 0 : n] = '\0';
    struct stat st;
    if (strncmp(target, "/memfd:", 7) != 0 || fstat(pin, &st) < 0 || !S_ISREG(st.st_mode)) {
        rc = shm_error_set(err, EINVAL, "%s (%s) is not a memfd but '%.40s'", what, link, target);
        goto out;
    }
    opened = open(own, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (opened < 0) {
        rc = shm_error_set(err, errno, "%s (%s): %s%s", what, link, strerror(errno), shm_error_remedy(errno));
        goto out;
    }
    struct statfs fs;
    if (fstatfs(opened, &fs) < 0 || fs.f_type != TMPFS_MAGIC) {
        /* of huge pages: the pool can run dry under a mapping, which kills whoever touches it */
        rc = shm_error_set(err, EINVAL, "%s (%s) is not a memfd of ordinary pages", what, link);
        goto out;
    }
    int seals = fcntl(opened, F_GET_SEALS);
    if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS) {
        rc = shm_error_set(err, EINVAL, "%s (%s) is not sealed against shrinking and growing", what, link);
        goto out;
    }
    bool sized = fstat(opened, &st) == 0 && st.st_size > 0;
    if (!sized || (bytes && (uint64_t)st.st_size != bytes)) {
        rc = shm_error_set(err, EINVAL, "%s (%s) has %lld bytes, must have %llu", what, link,
                           (long long)st.st_size, (unsigned long long)bytes);
        goto out;
    }
    *ret_fd = opened;
    opened = -1;
    rc = 0;
out:
    if (opened >= 0)
        close(opened);
    close(pin);
    return rc;
}

/* State letter and start time from /proc/PID/stat; the command in it may hold anything, so count from its
 * end. */
static int read_stat(pid_t pid, char *ret_state, uint64_t *ret_start)
{
    char path[64], buf[1024];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) /* out of descriptors says nothing about the process */
        return errno == ENOENT ? -ESRCH : -errno;
    ssize_t n = read(fd, buf, sizeof(buf) - 1);
    close(fd);
    if (n <= 0)
        return -ESRCH;
    buf[n] = '\0';
    char *at = strrchr(buf, ')');
    if (!at || at[1] != ' ')
        return -ESRCH;
    at += 2;
    *ret_state = *at; /* field 3 */
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (!at)
            return -ESRCH;
        at++;
    }
    char *end;
    errno = 0;
    uint64_t start = strtoull(at, &end, 10);
    if (errno || end == at)
        return -ESRCH;
    *ret_start = start;
    return 0;
}

int prt_process_start(pid_t pid, uint64_t *ret_start)
{
    char state;
    return pid > 0 ? read_stat(pid, &state, ret_start) : -ESRCH;
}

bool prt_process_alive(pid_t pid, uint64_t start)
{
    char state;
    uint64_t now;
    return pid > 0 && read_stat(pid, &state, &now) == 0 && now == start && state != 'Z' && state != 'X';
}

bool prt_process_stopped(pid_t pid)
{
    char state;
    uint64_t start;
    return pid > 0 && read_stat(pid, &state, &start) == 0 && (state == 'T' || state == 't');
}

int prt_process_uid(pid_t pid, uid_t *ret_uid)
{
    char path[64];
    struct stat st;
    snprintf(path, sizeof(path), "/proc/%d", (int)pid);
    if (pid <= 0 || stat(path, &st) < 0)
        return -ESRCH;
    *ret_uid = st.st_uid;
    return 0;
}

int prt_pidfd_open(pid_t pid, uint64_t start, int *ret_fd)
{
    if (pid <= 0)
        return -ESRCH;
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return -errno;
    /* the pidfd holds the process it found: if that has the start time, it is the one meant */
    char state;
    uint64_t now = 0;
    int rc = read_stat(pid, &state, &now);
    if (rc == 0 && (now != start || state == 'Z' || state == 'X'))
        rc = -ESRCH;
    if (rc < 0) {
        close(fd);
        return rc;
    }
    *ret_fd = fd;
    return 0;
}

void prt_file_standard(void)
{
    /* The wrong way round: input that cannot be read, output that cannot be written. */
    static const int mode[3] = {O_WRONLY, O_RDONLY, O_RDONLY};
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", mode[fd]) != fd)
            _exit(1); /* lowest free number: only if /dev/null is missing */
}

uint64_t prt_random_epoch(void)
{
    uint64_t epoch = 0;
    if (getrandom(&epoch, sizeof(epoch), GRND_NONBLOCK) != (ssize_t)sizeof(epoch)) {
        struct timespec ts;
        clock_gettime(CLOCK_REALTIME, &ts);
        epoch = (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec + ((uint64_t)getpid() << 40);
    }
    return epoch ? epoch : 1;
}
