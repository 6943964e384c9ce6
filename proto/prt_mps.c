/* SPDX-License-Identifier: MIT */
#include "proto/prt_mps.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Somebody listens there, or reads, where it is a pipe. */
static bool answers(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct stat st;
    if (stat(path, &st) || strlen(path) >= sizeof a.sun_path)
        return false;
    if (S_ISFIFO(st.st_mode)) {
        int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0)
            close(fd);
        return fd >= 0;
    }
    if (!S_ISSOCK(st.st_mode))
        return false;
    memcpy(a.sun_path, path, strlen(path));
    static const int types[] = {SOCK_STREAM, SOCK_SEQPACKET};
    bool found = false;
    for (size_t i = 0; i < sizeof types / sizeof types[0] && !found; i++) {
        int fd = socket(AF_UNIX, types[i] | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return false;
        found = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
        close(fd);
    }
    return found;
}

/* By the daemon's own file; -1: there is none. */
static int daemon_alive(const char *dir)
{
    char path[512];
    int pid = 0;
    if (snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid", dir) >= (int)sizeof path)
        return -1;
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    int n = fscanf(f, "%d", &pid);
    fclose(f);
    return n != 1 || pid <= 0 ? -1 : kill(pid, 0) == 0 || errno == EPERM;
}

bool prt_mps_found(char *ret_where, size_t n)
{
    const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char path[512];
    if (!dir || !*dir)
        dir = "/tmp/nvidia-mps";
    snprintf(ret_where, n, "%s", dir);
    int alive = daemon_alive(dir);
    if (alive >= 0)
        return alive;
    return snprintf(path, sizeof path, "%s/control", dir) < (int)sizeof path && answers(path);
}
