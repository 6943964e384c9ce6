/* SPDX-License-Identifier: MIT */
#include "proto/prt_notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int prt_notify(const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int rc = 0;
    if (!path || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof a.sun_path)
        return 0;
    memcpy(a.sun_path, path, strlen(path));
    if (path[0] == '@')
        a.sun_path[0] = '\0';
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (sendto(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&a,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path))) < 0)
        rc = -errno;
    close(fd);
    return rc;
}

uint64_t prt_watchdog_ns(void)
{
    const char *us = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    char *end;
    if (!us || (pid && strtol(pid, NULL, 10) != getpid()))
        return 0;
    errno = 0;
    unsigned long long n = strtoull(us, &end, 10);
    return errno || *end || end == us || n > UINT64_MAX / 1000 ? 0 : n * 1000;
}
