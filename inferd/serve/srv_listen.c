/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FIRST_FD 3 /* of those that systemd hands over */
#define KEY_MAX  1024
#define KEYS_MAX 65536

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24 == 127;
    if (a->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
    return a->sa_family == AF_UNIX;
}

static void name_socket(int fd, char name[128], bool *ret_public)
{
    struct sockaddr_storage a = {0};
    socklen_t n = sizeof a;
    char host[INET6_ADDRSTRLEN] = "?", port[16] = "?";
    if (getsockname(fd, (struct sockaddr *)&a, &n) == 0 && a.ss_family != AF_UNIX &&
        getnameinfo((struct sockaddr *)&a, n, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        snprintf(name, 128, a.ss_family == AF_INET6 ? "http://[%s]:%s" : "http://%s:%s", host, port);
    else
        snprintf(name, 128, "a Unix socket");
    *ret_public = !is_loopback((struct sockaddr *)&a);
}

/* The socket of systemd's, -ENOENT if there is none. */
static int inherited(int *ret_fd, struct shm_error *err)
{
    const char *pid = getenv("LISTEN_PID"), *n = getenv("LISTEN_FDS");
    int type = 0, listening = 0;
    socklen_t size = sizeof type;
    if (!pid || !n || strtol(pid, NULL, 10) != getpid())
        return -ENOENT;
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
    if (strcmp(n, "1") != 0)
        return shm_error_set(err, EINVAL, "LISTEN_FDS is %s: exactly one socket is taken", n);
    if (getsockopt(FIRST_FD, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_STREAM ||
        getsockopt(FIRST_FD, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) || !listening)
        return shm_error_set(err, EINVAL, "LISTEN_FDS: descriptor %d is no listening stream socket",
                             FIRST_FD);
    fcntl(FIRST_FD, F_SETFD, FD_CLOEXEC);
    fcntl(FIRST_FD, F_SETFL, fcntl(FIRST_FD, F_GETFL) | O_NONBLOCK);
    *ret_fd = FIRST_FD;
    return 0;
}

int srv_listen(const char *where, char ret_name[static 128], bool *ret_public, bool *ret_inherited,
               int *ret_fd, struct shm_error *err)
{
    int fd = -1, rc = inherited(&fd, err);
    if (rc != -ENOENT) {
        if (!rc) {
            name_socket(fd, ret_name, ret_public);
            *ret_inherited = true;
            *ret_fd = fd;
        }
        return rc;
    }
    char host[128] = "127.0.0.1";
    const char *colon = strrchr(where, ':'), *port = colon ? colon + 1 : where;
    size_t n = colon ? (size_t)(colon - where) : 0;
    if (colon && n < sizeof host) {
        bool brackets = n >= 2 && where[0] == '[' && where[n - 1] == ']';
        snprintf(host, sizeof host, "%.*s", (int)(brackets ? n - 2 : n), where + brackets);
    }
    /* getaddrinfo() takes larger ones, and cuts them to 16 bits. */
    size_t digits = strspn(port, "0123456789");
    bool number = digits && digits <= 5 && !port[digits] && atoi(port) <= 65535;
    const struct addrinfo hints = {.ai_family = AF_UNSPEC,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE};
    struct addrinfo *a = NULL;
    if (n >= sizeof host || !number || getaddrinfo(*host ? host : NULL, port, &hints, &a) || !a)
        return shm_error_set(
            err, EINVAL,
            "--listen %.100s: not ADDRESS:PORT with an address in numbers and a port up to 65535, such as "
            "127.0.0.1:8080 or [::1]:8080",
            where);
    int one = 1;
    fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) ||
        bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, 1024)) {
        rc = shm_error_set(err, errno, "--listen %.100s: %s%s", where, strerror(errno),
                           errno == EADDRINUSE      ? ": another program listens there; choose another port"
                           : errno == EADDRNOTAVAIL ? ": no address of this host; 'ip address' lists them"
                           : errno == EACCES        ? ": not permitted; choose a port from 1024 on"
                                                    : "");
        if (fd >= 0)
            close(fd);
        freeaddrinfo(a);
        return rc;
    }
    freeaddrinfo(a);
    name_socket(fd, ret_name, ret_public);
    *ret_inherited = false;
    *ret_fd = fd;
    return 0;
}

int srv_keys_read(const char *path, char ***ret_keys, unsigned *ret_n, struct shm_error *err)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return shm_error_set(err, errno, "--api-key-file %.200s: %s", path, strerror(errno));
    char **keys = NULL, line[KEY_MAX + 3];
    unsigned n = 0;
    int rc = 0;
    while (!rc && fgets(line, sizeof line, f)) {
        if (n == KEYS_MAX || (!strchr(line, '\n') && !feof(f)))
            rc = shm_error_set(err, E2BIG,
                               "--api-key-file %.200s: more than %d keys, or one longer than %d bytes", path,
                               KEYS_MAX, KEY_MAX);
        line[strcspn(line, " \t\r\n")] = '\0';
        if (rc || !*line || *line == '#')
            continue;
        char **all = realloc(keys, (n + 1) * sizeof *keys);
        if (all)
            keys = all;
        if (!all || !(keys[n] = strdup(line)))
            rc = -ENOMEM;
        else
            n++;
    }
    if (!rc && ferror(f))
        rc = shm_error_set(err, EIO, "--api-key-file %.200s: cannot be read", path);
    if (!rc && !n)
        rc = shm_error_set(err, EINVAL, "--api-key-file %.200s: holds no key (one a line)", path);
    fclose(f);
    if (rc) {
        srv_keys_free(&keys, n);
        return rc;
    }
    *ret_keys = keys;
    *ret_n = n;
    return 0;
}

void srv_keys_free(char ***keys, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        free((*keys)[i]);
    free(*keys);
    *keys = NULL;
}
