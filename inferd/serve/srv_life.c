/* SPDX-License-Identifier: MIT */
/* A restart in place: the same process, arguments and listening socket; the program as its file is now. */
#include "inferd/serve/srv_server.h"
#include "proto/prt_serve.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST_FD 3 /* where a handed-over socket is: systemd's number */

int srv_life_note(struct srv_life *life, int argc, char **argv)
{
    static char command[] = "serve";
    *life = (struct srv_life){.listen_fd = -1};
    ssize_t got = readlink("/proc/self/exe", life->path, sizeof life->path - 1);
    if (got < 0)
        return -errno;
    life->path[got] = '\0';
    life->argv = calloc((size_t)argc + 2, sizeof *life->argv);
    if (!life->argv)
        return -ENOMEM;
    life->argv[0] = life->path;
    life->argv[1] = command;
    for (int i = 1; i < argc; i++)
        life->argv[i + 1] = argv[i];
    return 0;
}

void srv_life_clear(struct srv_life *life)
{
    free(life->argv);
    if (life->listen_fd >= 0)
        close(life->listen_fd);
    *life = (struct srv_life){.listen_fd = -1};
}

int srv_life_check(const struct srv_life *life, struct shm_error *err)
{
    if (life->listen_fd < 0)
        return shm_error_set(err, EBADF, "restart: the listening socket was not kept");
    if (!life->argv)
        return shm_error_set(err, ENOENT, "restart: /proc/self/exe was not readable at the start");
    if (access(life->path, X_OK))
        return shm_error_set(err, errno, "restart: %.300s: %s: install it again", life->path,
                             strerror(errno));
    return 0;
}

int srv_life_again(const struct srv_life *life, struct shm_error *err)
{
    char pid[16];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    if (life->listen_fd == FIRST_FD ? fcntl(FIRST_FD, F_SETFD, 0) : dup2(life->listen_fd, FIRST_FD) < 0)
        return shm_error_set(err, errno, "restart: the listening socket: %s", strerror(errno));
    /* Whatever a library left open. Kernels before 5.11: those that their openers marked. */
    close_range(FIRST_FD + 1u, UINT_MAX, CLOSE_RANGE_CLOEXEC);
    setenv("LISTEN_FDS", "1", 1);
    setenv("LISTEN_PID", pid, 1);
    /* Another request for a restart must not end the program before it has its handlers again. */
    signal(PRT_SERVE_DRAIN, SIG_IGN);
    signal(PRT_SERVE_RESTART, SIG_IGN);
    execv(life->path, life->argv);
    return shm_error_set(err, errno, "restart: %.300s: %s", life->path, strerror(errno));
}
