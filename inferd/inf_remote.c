/* SPDX-License-Identifier: MIT */
#include "inferd/inf_remote.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HEAD_MAX   16384
#define POLL_MS    100
#define CONNECT_MS 10000

int inf_remote_open(const char *url, const char *key_file, _Atomic bool *cancel, struct shm_error *err,
                    struct inf_remote *ret_remote)
{
    struct inf_remote r = {.port = "80", .cancel = cancel};
    const char *at = url;
    if (strncmp(at, "http://", 7) != 0)
        return shm_error_set(err, EINVAL, "--url %.200s: must be http://HOST:PORT (TLS is not spoken here)",
                             url);
    at += 7;
    bool brackets = *at == '[';
    size_t n = brackets ? strcspn(++at, "]") : strcspn(at, ":/");
    if (!n || n >= sizeof r.host || (brackets && at[n] != ']'))
        return shm_error_set(err, EINVAL, "--url %.200s: no host in it: http://HOST:PORT is needed", url);
    memcpy(r.host, at, n);
    at += n + brackets;
    if (*at == ':') {
        n = strcspn(++at, "/");
        if (!n || n >= sizeof r.port || strspn(at, "0123456789") < n)
            return shm_error_set(err, EINVAL, "--url %.200s: the port is not a number", url);
        memcpy(r.port, at, n);
        r.port[n] = '\0';
        at += n;
    }
    n = strlen(at);
    while (n && at[n - 1] == '/')
        n--;
    if (n >= 3 && strncmp(at + n - 3, "/v1", 3) == 0)
        n -= 3;
    if (n >= sizeof r.prefix || (n && *at != '/') || strcspn(at, " \r\n") < n)
        return shm_error_set(err, EINVAL, "--url %.200s: not an address", url);
    memcpy(r.prefix, at, n);
    if (key_file) {
        FILE *f = fopen(key_file, "re");
        if (!f)
            return shm_error_set(err, errno, "--api-key-file %.200s: %s", key_file, strerror(errno));
        if (!fgets(r.key, sizeof r.key, f))
            r.key[0] = '\0';
        fclose(f);
        r.key[strcspn(r.key, " \t\r\n")] = '\0';
        if (!r.key[0])
            return shm_error_set(err, EINVAL, "--api-key-file %.200s: the first line holds no key", key_file);
    }
    *ret_remote = r;
    return 0;
}

/* Until fd can do what `events` say. */
static int wait_for(const struct inf_remote *r, int fd, short events, int limit_ms)
{
    for (int waited = 0; limit_ms < 0 || waited < limit_ms; waited += POLL_MS) {
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, POLL_MS);
        if (r->cancel && atomic_load(r->cancel))
            return -ECANCELED;
        if (n > 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return -errno;
    }
    return -ETIMEDOUT;
}

static int connect_to(const struct inf_remote *r, struct shm_error *err, int *ret_fd)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    int rc = getaddrinfo(r->host, r->port, &hints, &list);
    if (rc)
        return shm_error_set(err, ENOTCONN, "%s: %s: check --url", r->host, gai_strerror(rc));
    rc = -ENOTCONN;
    for (const struct addrinfo *a = list; a && rc && rc != -ECANCELED; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), failed = 0;
        socklen_t size = sizeof failed;
        if (fd < 0)
            continue;
        rc = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : -errno;
        if (rc == -EINPROGRESS && (rc = wait_for(r, fd, POLLOUT, CONNECT_MS)) == 0) {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &size);
            rc = -failed;
        }
        if (!rc)
            *ret_fd = fd;
        else
            close(fd);
    }
    freeaddrinfo(list);
    return rc && rc != -ECANCELED ? shm_error_set(err, rc, "%s port %s: %s: is 'inferd serve' running there?",
                                                  r->host, r->port, strerror(-rc))
                                  : rc;
}

static int send_all(const struct inf_remote *r, int fd, const char *data, size_t n)
{
    while (n) {
        ssize_t sent = send(fd, data, n, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR)
            return errno == EPIPE || errno == ECONNRESET ? 0
                                                         : -errno; /* there may be an answer all the same */
        if (sent > 0) {
            data += sent;
            n -= (size_t)sent;
            continue;
        }
        int rc = wait_for(r, fd, POLLOUT, -1);
        if (rc)
            return rc;
    }
    return 0;
}

/* HTTP/1.0: the body ends where the connection does. */
static int receive(const struct inf_remote *r, int fd, bool (*on_data)(void *, const char *, size_t),
                   void *ctx, struct shm_error *err)
{
    char head[HEAD_MAX + 1], piece[16384];
    size_t n = 0;
    int status = 0, rc;
    for (;;) {
        if ((rc = wait_for(r, fd, POLLIN, -1)))
            return rc;
        ssize_t got = status ? recv(fd, piece, sizeof piece, 0) : recv(fd, head + n, HEAD_MAX - n, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (got < 0 && !status)
            return shm_error_set(err, errno, "%s: %s", r->host, strerror(errno));
        if (got <= 0)
            break;
        if (status) {
            if (!on_data(ctx, piece, (size_t)got))
                return -ECANCELED;
            continue;
        }
        n += (size_t)got;
        head[n] = '\0';
        char *body = strstr(head, "\r\n\r\n");
        if (!body && n < HEAD_MAX)
            continue;
        if (!body || sscanf(head, "HTTP/1.%*1[01] %3d", &status) != 1 || status < 100)
            return shm_error_set(err, EPROTO, "%s port %s: does not answer by HTTP: check --url", r->host,
                                 r->port);
        body += 4;
        if (body < head + n && !on_data(ctx, body, (size_t)(head + n - body)))
            return -ECANCELED;
    }
    return status ? status
                  : shm_error_set(err, EPROTO, "%s port %s: closed the connection without an answer", r->host,
                                  r->port);
}

int inf_remote_request(const struct inf_remote *r, const char *path, const char *body,
                       bool (*on_data)(void *ctx, const char *data, size_t n), void *ctx,
                       struct shm_error *err)
{
    char head[2048];
    int fd = -1, rc = connect_to(r, err, &fd);
    if (rc)
        return rc;
    size_t n_body = body ? strlen(body) : 0;
    int n = snprintf(head, sizeof head,
                     "%s %s%s HTTP/1.0\r\nHost: %s:%s\r\n%s%s%sContent-Type: application/json\r\n"
                     "Content-Length: %zu\r\n\r\n",
                     body ? "POST" : "GET", r->prefix, path, r->host, r->port,
                     r->key[0] ? "Authorization: Bearer " : "", r->key, r->key[0] ? "\r\n" : "", n_body);
    rc = send_all(r, fd, head, (size_t)n);
    if (!rc && n_body)
        rc = send_all(r, fd, body, n_body);
    if (!rc)
        rc = receive(r, fd, on_data, ctx, err);
    else if (rc != -ECANCELED)
        shm_error_set(err, rc, "%s: %s", r->host, strerror(-rc));
    close(fd);
    return rc;
}
