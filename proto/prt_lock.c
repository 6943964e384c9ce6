/* SPDX-License-Identifier: MIT */
#include "proto/prt_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define STEP_MS     10u
#define REMOVED_MAX 10u /* each means that a holder just ended and removed the file */

/* A new holder does without, where it can't be written (hugetlbfs, a full file system). */
static void write_holder(int fd)
{
    char text[32];
    int n = snprintf(text, sizeof text, "%d\n", (int)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n)
        return;
}

static bool under_its_name(int fd, int dir_fd, const char *name)
{
    struct stat ours, named;
    return fstat(fd, &ours) == 0 && fstatat(dir_fd, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           ours.st_ino == named.st_ino && ours.st_dev == named.st_dev;
}

int prt_lock_take(int dir_fd, const char *name, uint32_t wait_ms, int *ret_fd)
{
    uint32_t waited_ms = 0, removed = 0;
    for (;;) {
        int fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0)
            return -errno;
        int rc = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
        if (!rc && under_its_name(fd, dir_fd, name)) {
            write_holder(fd);
            *ret_fd = fd;
            return 0;
        }
        close(fd);
        if (rc && rc != EWOULDBLOCK && rc != EINTR)
            return -rc;
        if (rc ? waited_ms >= wait_ms : removed++ == REMOVED_MAX)
            return -EBUSY;
        if (rc) {
            nanosleep(&(struct timespec){.tv_nsec = STEP_MS * 1000000}, NULL);
            waited_ms += STEP_MS;
        }
    }
}

int prt_lock_holder(int dir_fd, const char *name)
{
    char text[32];
    int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n < 0 ? 0 : n] = '\0';
    int pid = atoi(text);
    return pid > 0 ? pid : 0;
}
