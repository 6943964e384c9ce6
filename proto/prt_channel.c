/* SPDX-License-Identifier: MIT */
#include "proto/prt_channel.h"
#include "proto/prt_control_gen.h"
#include "proto/prt_path.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <limits.h>
#include <nanomsg/nn.h>
#include <nanomsg/reqrep.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define DESCRIPTORS_NEEDED 10 /* a socket of the library with its first connection, and some air */

struct prt_server {
    int socket, fd;
    char path[PRT_SOCKET_BYTES];
};

struct prt_channel {
    int socket, fd;
};

/* Errors of the library's own numbers become EIO: callers know errno only. */
static int library_errno(void)
{
    int e = nn_errno();
    return e > 0 && e < 4096 ? -e : -EIO;
}

/* The library spins for ever in nn_socket() when it runs out of descriptors there: asked for beforehand. */
static int check_descriptors(struct shm_error *err)
{
    int fd[DESCRIPTORS_NEEDED], n = 0, rc = 0;
    while (n < DESCRIPTORS_NEEDED && (fd[n] = eventfd(0, EFD_CLOEXEC)) >= 0)
        n++;
    if (n < DESCRIPTORS_NEEDED) {
        struct rlimit limit = {0};
        rc = errno;
        getrlimit(RLIMIT_NOFILE, &limit);
        rc = shm_error_set(err, rc,
                           "control channel: %s: %d more file descriptors are needed, the limit is "
                           "%llu in all: raise it (ulimit -n)",
                           strerror(rc), DESCRIPTORS_NEEDED, (unsigned long long)limit.rlim_cur);
    }
    while (n > 0)
        close(fd[--n]);
    return rc;
}

/* A socket of the protocol with every default that could hurt replaced: size limit, endless waits. */
static int open_socket(int protocol, int *ret_socket, int *ret_fd, struct shm_error *err)
{
    int rc = check_descriptors(err);
    if (rc < 0)
        return rc;
    int s = nn_socket(AF_SP, protocol);
    if (s < 0)
        return shm_error_set(err, library_errno(), "control channel: %s", nn_strerror(nn_errno()));
    int limit = (int)PRT_MESSAGE_MAX, timeout_ms = 1000, fd = -1;
    size_t n = sizeof(fd);
    if (nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVMAXSIZE, &limit, sizeof(limit)) < 0 ||
        nn_setsockopt(s, NN_SOL_SOCKET, NN_SNDTIMEO, &timeout_ms, sizeof(timeout_ms)) < 0 ||
        nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout_ms, sizeof(timeout_ms)) < 0 ||
        nn_getsockopt(s, NN_SOL_SOCKET, NN_RCVFD, &fd, &n) < 0) {
        rc = shm_error_set(err, library_errno(), "control channel: %s", nn_strerror(nn_errno()));
        nn_close(s);
        return rc;
    }
    *ret_socket = s;
    *ret_fd = fd;
    return 0;
}

static int make_address(const char *path, char address[PRT_SOCKET_BYTES + 8], struct shm_error *err)
{
    if (strlen(path) >= PRT_SOCKET_BYTES) /* the library aborts on these */
        return shm_error_set(err, ENAMETOOLONG, "socket path '%.150s' has %zu bytes, at most %d fit", path,
                             strlen(path), PRT_SOCKET_BYTES - 1);
    snprintf(address, PRT_SOCKET_BYTES + 8, "ipc://%s", path);
    return 0;
}

/* Does somebody listen at path? Asked before the library binds there: it would find out as well, but
 * leaks memory when it does. */
static bool listening(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool live = fd >= 0 && (connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0 ||
                            errno == EAGAIN); /* EAGAIN: its queue is full */
    if (fd >= 0)
        close(fd);
    return live;
}

int prt_server_open(const char *path, struct prt_server **ret_server, struct shm_error *err)
{
    char address[PRT_SOCKET_BYTES + 8];
    int rc = make_address(path, address, err);
    if (rc < 0)
        return rc;
    if (listening(path))
        return shm_error_set(err, EADDRINUSE, "cannot listen on %s: another process does", path);
    struct prt_server *server = calloc(1, sizeof(*server));
    if (!server)
        return shm_error_set(err, ENOMEM, "control channel: no memory; free some");
    rc = open_socket(NN_REP, &server->socket, &server->fd, err);
    if (rc < 0) {
        free(server);
        return rc;
    }
    mode_t mask = umask(077);
    int endpoint = nn_bind(server->socket, address);
    rc = endpoint < 0 ? library_errno() : 0;
    umask(mask);
    if (rc < 0) {
        shm_error_set(err, rc, "cannot listen on %s: %s", path, strerror(-rc));
        nn_close(server->socket);
        free(server);
        return rc;
    }
    snprintf(server->path, sizeof(server->path), "%s", path);
    *ret_server = server;
    return 0;
}

int prt_server_fd(const struct prt_server *server)
{
    return server->fd;
}

int prt_server_receive(struct prt_server *server, void *buffer, size_t capacity, size_t *ret_bytes)
{
    int n = nn_recv(server->socket, buffer, capacity, NN_DONTWAIT);
    if (n < 0)
        return library_errno();
    if ((size_t)n > capacity)
        return -EMSGSIZE;
    *ret_bytes = (size_t)n;
    return 0;
}

int prt_server_reply(struct prt_server *server, const void *bytes, size_t n)
{
    if (n > PRT_MESSAGE_MAX)
        return -EMSGSIZE;
    return nn_send(server->socket, bytes, n, NN_DONTWAIT) < 0 ? library_errno() : 0;
}

void prt_server_close(struct prt_server **server)
{
    if (!*server)
        return;
    nn_close((*server)->socket);
    unlink((*server)->path);
    free(*server);
    *server = NULL;
}

int prt_channel_connect(const char *path, struct prt_channel **ret_channel, struct shm_error *err)
{
    char address[PRT_SOCKET_BYTES + 8];
    int rc = make_address(path, address, err);
    if (rc < 0)
        return rc;
    struct prt_channel *channel = calloc(1, sizeof(*channel));
    if (!channel)
        return shm_error_set(err, ENOMEM, "control channel: no memory; free some");
    rc = open_socket(NN_REQ, &channel->socket, &channel->fd, err);
    if (rc < 0) {
        free(channel);
        return rc;
    }
    /* we resend nothing by time: an expertd that is slow would only do it twice */
    int never_ms = INT_MAX, retry_ms = 10, retry_max_ms = 200;
    if (nn_setsockopt(channel->socket, NN_REQ, NN_REQ_RESEND_IVL, &never_ms, sizeof(never_ms)) < 0 ||
        nn_setsockopt(channel->socket, NN_SOL_SOCKET, NN_RECONNECT_IVL, &retry_ms, sizeof(retry_ms)) < 0 ||
        nn_setsockopt(channel->socket, NN_SOL_SOCKET, NN_RECONNECT_IVL_MAX, &retry_max_ms,
                      sizeof(retry_max_ms)) < 0 ||
        nn_connect(channel->socket, address) < 0) {
        rc = shm_error_set(err, library_errno(), "cannot connect to %s: %s", path, nn_strerror(nn_errno()));
        nn_close(channel->socket);
        free(channel);
        return rc;
    }
    *ret_channel = channel;
    return 0;
}

int prt_channel_request(struct prt_channel *channel, const void *request, size_t n, void *reply,
                        size_t capacity, size_t *ret_bytes, int peer_pidfd, uint32_t timeout_ms)
{
    if (n > PRT_MESSAGE_MAX)
        return -EMSGSIZE;
    int sent;
    do
        sent = nn_send(channel->socket, request, n, 0) < 0 ? library_errno() : 0;
    while (sent == -EINTR); /* each try is bounded by SNDTIMEO */
    if (sent < 0)
        return sent;
    uint64_t deadline_ns = shm_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        int got = nn_recv(channel->socket, reply, capacity, NN_DONTWAIT);
        if (got >= 0) {
            if ((size_t)got > capacity)
                return -EMSGSIZE;
            *ret_bytes = (size_t)got;
            return 0;
        }
        int rc = library_errno();
        if (rc != -EAGAIN && rc != -EINTR)
            return rc;
        uint64_t now_ns = shm_now_ns();
        if (now_ns >= deadline_ns)
            return -ETIMEDOUT;
        struct pollfd fds[2] = {{.fd = channel->fd, .events = POLLIN},
                                {.fd = peer_pidfd, .events = POLLIN}}; /* -1 is ignored by poll */
        int ms = (int)((deadline_ns - now_ns) / 1000000u) + 1;
        if (poll(fds, 2, ms) < 0 && errno != EINTR)
            return -errno;
        if (fds[1].revents && !fds[0].revents)
            return -ESRCH;
    }
}

void prt_channel_close(struct prt_channel **channel)
{
    if (!*channel)
        return;
    nn_close((*channel)->socket);
    free(*channel);
    *channel = NULL;
}
