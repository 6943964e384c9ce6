/* SPDX-License-Identifier: MIT */
/*
 * A wall clock that jumps, for LD_PRELOAD: CLOCK_JUMP seconds (signed) are
 * added to CLOCK_REALTIME, time() and gettimeofday() in every other 50 ms.
 * CLOCK_MONOTONIC goes on as ever: what waits by it notices nothing.
 */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *ret);
time_t time(time_t *ret);
int gettimeofday(struct timeval *restrict ret, void *restrict zone);

static long jump(void)
{
    struct timespec now;
    const char *text = getenv("CLOCK_JUMP");
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return text && now.tv_nsec / 50000000 % 2 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *ret)
{
    int rc = (int)syscall(SYS_clock_gettime, clock, ret);
    if (rc == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        ret->tv_sec += jump();
    return rc;
}

time_t time(time_t *ret)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (ret)
        *ret = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict ret, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *ret = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
}
