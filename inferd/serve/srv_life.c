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

static char *cmdline(size_t *ret_n)
{
    size_t n = 0, cap = 4096;
    char *text = malloc(cap);
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && text) {
        ssize_t got = read(fd, text + n, cap - n - 1);
        if (got <= 0)
            break;
        n += (size_t)got;
        if (cap - n < 2) {
            char *more = realloc(text, cap *= 2);
            if (!more) {
                free(text);
                text = NULL;
                break;
            }
            text = more;
        }
    }
    if (fd >= 0)
        close(fd);
    if (text)
        text[n] = '\0';
    *ret_n = n;
    return text;
}

int srv_life_note(struct srv_life *life)
{
    size_t n, words = 0;
    ssize_t got = readlink("/proc/self/exe", life->path, sizeof life->path - 1);
    if (got < 0)
        return -errno;
    life->path[got] = '\0';
    life->text = cmdline(&n);
    if (!life->text || !n) {
        srv_life_clear(life);
        return -ENOMEM;
    }
    for (size_t i = 0; i < n; i++)
        words += !life->text[i];
    life->argv = calloc(words + 2, sizeof *life->argv);
    if (!life->argv) {
        srv_life_clear(life);
        return -ENOMEM;
    }
    size_t word = 0;
    for (size_t at = 0; at < n; at += strlen(life->text + at) + 1)
        life->argv[word++] = life->text + at;
    return 0;
}

void srv_life_clear(struct srv_life *life)
{
    free(life->text);
    free(life->argv);
    *life = (struct srv_life){0};
}

int srv_life_check(const struct srv_life *life, struct shm_error *err)
{
    if (!life->argv)
        return shm_error_set(err, ENOENT, "restart: /proc/self was not readable at the start");
    if (access(life->path, X_OK))
        return shm_error_set(err, errno, "restart: %.300s: %s: install it again", life->path,
                             strerror(errno));
    return 0;
}

int srv_life_again(const struct srv_life *life, int listen_fd, struct shm_error *err)
{
    char pid[16];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    if (listen_fd == FIRST_FD ? fcntl(FIRST_FD, F_SETFD, 0) : dup2(listen_fd, FIRST_FD) < 0)
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
