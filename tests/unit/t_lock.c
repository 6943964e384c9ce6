/* SPDX-License-Identifier: MIT */
/* Lock files that their holders remove. */
#include "proto/prt_lock.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char top[] = "/tmp/t_lock_XXXXXX";
static int dir;

static void begin(void)
{
    cr_assert_not_null(mkdtemp(top));
    dir = open(top, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert_geq(dir, 0);
}

static void end(void)
{
    unlinkat(dir, "lock", 0);
    close(dir);
    rmdir(top);
}

TestSuite(lock, .init = begin, .fini = end, .timeout = 60);

Test(lock, one_holds_it_and_is_named)
{
    int fd, other = -1;
    cr_assert_eq(prt_lock_holder(dir, "lock"), 0);
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &fd), 0);
    cr_assert_eq(prt_lock_holder(dir, "lock"), (int)getpid());
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &other), -EBUSY);
    cr_assert_eq(prt_lock_take(dir, "lock", 30, &other), -EBUSY);
    cr_assert_eq(other, -1, "not written on failure");
    close(fd);
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &fd), 0, "the file is there, and nobody's");
    close(fd);
}

Test(lock, what_is_no_file_of_ours_is_refused)
{
    int fd;
    cr_assert_eq(prt_lock_take(dir, "nowhere/lock", 0, &fd), -ENOENT);
    cr_assert_eq(symlinkat("/dev/null", dir, "lock"), 0);
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &fd), -ELOOP);
    cr_assert_eq(prt_lock_holder(dir, "lock"), 0);
    unlinkat(dir, "lock", 0);
    cr_assert_eq(mkdirat(dir, "lock", 0700), 0);
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &fd), -EISDIR);
    unlinkat(dir, "lock", AT_REMOVEDIR);
}

/* Its holder may end, and remove the file, between our open and our lock: then that lock is of a file that is
 * gone. removals: so often. */
static int removals, calls;

int flock(int fd, int operation)
{
    calls++;
    if (removals > 0 && removals--)
        unlinkat(dir, "lock", 0);
    return (int)syscall(SYS_flock, fd, operation);
}

Test(lock, one_of_a_file_that_is_gone_is_none)
{
    struct stat ours, named;
    int fd = -1;
    removals = 3;
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &fd), 0);
    cr_assert_eq(calls, 4);
    cr_assert(fstat(fd, &ours) == 0 && fstatat(dir, "lock", &named, 0) == 0 && ours.st_ino == named.st_ino);
    close(fd);
    removals = 1000;
    cr_assert_eq(prt_lock_take(dir, "lock", 0, &fd), -EBUSY, "it ends");
}
