/* SPDX-License-Identifier: MIT */
/* The command `metrics`: expertd and its workers for Prometheus, as a file or over loopback HTTP. */
#include "tools/ctl.h"

#include "proto/prt_metrics.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LABELS_BYTES 512
#define INFO_BYTES   4096
#define CLIENTS      16
#define REQUEST_MAX  8192
#define CLIENT_NS    UINT64_C(5000000000) /* to send a request and take its answer */

/* A string of another process, bounded. */
static void label(char *text, size_t size, const char *name, const char *bytes, size_t capacity)
{
    char copy[SHM_PATH_BYTES];
    size_t n = strnlen(bytes, capacity < sizeof copy ? capacity : sizeof copy - 1);
    memcpy(copy, bytes, n);
    copy[n < capacity ? n : capacity - 1] = '\0';
    prt_metrics_label(text, size, name, copy);
}

static void hex(const uint8_t *bytes, size_t n, char *ret_text)
{
    for (size_t i = 0; i < n; i++)
        snprintf(ret_text + 2 * i, 3, "%02x", bytes[i]);
}

struct worker_labels {
    char text[LABELS_BYTES];
};

static void write_layers(FILE *f, const struct ctl_snapshot *n, const struct worker_labels *labels)
{
    size_t count = 0, at = 0;
    for (uint32_t i = 0; i < n->workers; i++)
        count += n->worker[i].layers ? n->worker[i].geometry.layers : 0;
    struct prt_series *series = calloc(count + 1, sizeof *series);
    struct worker_labels *own = calloc(count + 1, sizeof *own);
    for (uint32_t i = 0; i < n->workers && series && own; i++)
        for (uint32_t l = 0; n->worker[i].layers && l < n->worker[i].geometry.layers; l++, at++) {
            char number[16];
            snprintf(number, sizeof number, "%u", l);
            own[at] = labels[i];
            prt_metrics_label(own[at].text, sizeof own[at].text, "layer", number);
            series[at] = (struct prt_series){.words = n->worker[i].layers + (size_t)l * SHM_LAYER_WORDS,
                                             .labels = own[at].text};
        }
    if (series && own)
        prt_metrics_block(f, SHM_BLOCK_LAYER, series, count, true);
    free(series);
    free(own);
}

void ctl_metrics_write(FILE *f, const struct ctl_snapshot *n, bool detail)
{
    const struct shm_store *s = n->store;
    char store[LABELS_BYTES] = "", info[INFO_BYTES] = "", fingerprint[40];
    label(store, sizeof store, "store", s->instance, sizeof s->instance);
    hex(s->fingerprint, sizeof s->fingerprint, fingerprint);
    prt_metrics_label(info, sizeof info, "version", EXPERTD_VERSION);
    label(info, sizeof info, "model", s->model_name, sizeof s->model_name);
    prt_metrics_label(info, sizeof info, "fingerprint", fingerprint);
    label(info, sizeof info, "device", s->device, sizeof s->device);
    prt_metrics_block(f, SHM_BLOCK_STORE,
                      &(struct prt_series){.words = n->counters, .labels = store, .info = info}, 1, detail);
    struct prt_series link[SHM_STORE_WORKERS], compute[SHM_STORE_WORKERS];
    struct worker_labels *labels = calloc(SHM_STORE_WORKERS, sizeof *labels);
    size_t count = 0;
    for (uint32_t i = 0; i < n->workers && labels; i++) {
        const struct ctl_worker *w = &n->worker[i];
        char pid[16];
        snprintf(pid, sizeof pid, "%u", atomic_load(&w->row.pid));
        snprintf(labels[i].text, sizeof labels[i].text, "%s", store);
        label(labels[i].text, sizeof labels[i].text, "worker", w->row.name, sizeof w->row.name);
        prt_metrics_label(labels[i].text, sizeof labels[i].text, "pid", pid);
        if (!w->mapped)
            continue;
        link[count] = (struct prt_series){.words = w->link, .labels = labels[i].text};
        compute[count++] = (struct prt_series){.words = w->compute, .labels = labels[i].text};
    }
    prt_metrics_block(f, SHM_BLOCK_LINK, link, count, detail);
    if (detail && labels)
        write_layers(f, n, labels);
    prt_metrics_block(f, SHM_BLOCK_COMPUTE, compute, count, detail);
    free(labels);
}

/* Under another name, then renamed: whoever collects the file never finds half of it. */
static int write_file(const struct ctl_snapshot *n, const struct ctl_options *o)
{
    char name[SHM_PATH_BYTES + 32];
    snprintf(name, sizeof name, "%.1000s.%d.tmp", o->output, (int)getpid());
    FILE *f = fopen(name, "we");
    if (f) {
        ctl_metrics_write(f, n, o->detail);
        bool failed = fflush(f) || ferror(f);
        failed = fclose(f) || failed;
        if (!failed && rename(name, o->output) == 0)
            return CTL_EXIT_OK;
    }
    fprintf(stderr, "expertctl: %s cannot be written: %s\n", o->output, strerror(errno));
    unlink(name);
    return CTL_EXIT_PROBLEM;
}

int ctl_show_metrics(const struct ctl_snapshot *n, const struct ctl_options *o)
{
    if (o->output)
        return write_file(n, o);
    ctl_metrics_write(stdout, n, o->detail);
    return CTL_EXIT_OK;
}

/* ---- over HTTP ---- */

struct client {
    int fd; /* -1: free */
    uint64_t since_ns;
    char request[REQUEST_MAX];
    size_t got;
    char *answer;
    size_t bytes, sent;
};

/* "PORT", "127.x.y.z:PORT", "[::1]:PORT" or "localhost:PORT": loopback only. */
static int parse_address(const char *text, struct sockaddr_storage *ret_address, socklen_t *ret_bytes,
                         struct shm_error *err)
{
    const char *colon = strrchr(text, ':');
    char host[64] = "127.0.0.1";
    uint64_t port;
    if (colon)
        snprintf(host, sizeof host, "%.*s", (int)(colon - text), text);
    if (strcmp(host, "localhost") == 0)
        snprintf(host, sizeof host, "127.0.0.1");
    int rc = shm_number_parse("--listen", colon ? colon + 1 : text, 0, 65535, &port, err);
    if (rc)
        return rc;
    struct sockaddr_in *four = (struct sockaddr_in *)(void *)ret_address;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)(void *)ret_address;
    memset(ret_address, 0, sizeof *ret_address);
    if (strcmp(host, "[::1]") == 0) {
        *six = (struct sockaddr_in6){
            .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = in6addr_loopback};
        *ret_bytes = sizeof *six;
        return 0;
    }
    four->sin_family = AF_INET;
    four->sin_port = htons((uint16_t)port);
    *ret_bytes = sizeof *four;
    if (inet_pton(AF_INET, host, &four->sin_addr) == 1 && ntohl(four->sin_addr.s_addr) >> 24 == 127)
        return 0;
    return shm_error_set(err, EINVAL,
                         "--listen: '%s' is no loopback address: use PORT, 127.0.0.1:PORT or [::1]:PORT; "
                         "for others put a proxy in front",
                         text);
}

static int open_socket(const char *where, struct shm_error *err)
{
    struct sockaddr_storage address;
    socklen_t bytes;
    int rc = parse_address(where, &address, &bytes, err), one = 1;
    if (rc)
        return rc;
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, bytes) || listen(fd, CLIENTS)) {
        rc = shm_error_set(err, errno, "--listen %s: %s%s", where, strerror(errno),
                           errno == EADDRINUSE ? ": another program listens there; choose another port" : "");
        if (fd >= 0)
            close(fd);
        return rc;
    }
    bytes = sizeof address;
    getsockname(fd, (struct sockaddr *)&address, &bytes);
    fprintf(stderr, "expertctl: metrics on port %u\n",
            ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)(void *)&address)->sin6_port
                                                : ((struct sockaddr_in *)(void *)&address)->sin_port));
    return fd;
}

static char *take_metrics(const struct ctl_options *o, size_t *ret_bytes)
{
    struct prt_client *client = NULL;
    struct shm_error err = {0};
    char *text = NULL;
    FILE *f = open_memstream(&text, ret_bytes);
    if (!f)
        return NULL;
    struct ctl_snapshot *n = calloc(1, sizeof *n);
    int rc = n ? prt_client_open(o->runtime_dir, o->instance, PRT_OPEN_STALE, &client, &err) : -ENOMEM;
    if (rc == 0 && shm_header_check_counters(&prt_client_store(client)->header, "store", &err) == 0) {
        ctl_snapshot_take(client, o->worker, n);
        ctl_metrics_write(f, n, o->detail);
        ctl_snapshot_free(n);
    } else { /* that there is none is a measurement, too */
        char store[LABELS_BYTES] = "";
        prt_metrics_label(store, sizeof store, "store", o->instance ? o->instance : "default");
        fprintf(f, "# HELP expertd_up %s\n# TYPE expertd_up gauge\nexpertd_up{%s} 0\n",
                shm_counter_find(SHM_BLOCK_STORE, "up")->help, store);
    }
    free(n);
    prt_client_close(&client);
    if (fclose(f)) {
        free(text);
        return NULL;
    }
    return text;
}

static void answer(struct client *c, const struct ctl_options *o)
{
    char *end = memchr(c->request, '\r', c->got), *body = NULL;
    size_t bytes = 0;
    const char *status = "404 Not Found", *kind = "text/plain";
    if (!end)
        end = memchr(c->request, '\n', c->got);
    size_t line = end ? (size_t)(end - c->request) : 0;
    bool head = line > 5 && memcmp(c->request, "HEAD ", 5) == 0;
    bool get = line > 4 && memcmp(c->request, "GET ", 4) == 0;
    const char *path = c->request + (head ? 5 : 4);
    size_t n = get || head ? strcspn(path, " ?\r\n") : 0;
    if (!get && !head) {
        status = "405 Method Not Allowed";
    } else if (n == 8 && memcmp(path, "/metrics", 8) == 0) {
        body = take_metrics(o, &bytes);
        status = body ? "200 OK" : "503 Service Unavailable";
        kind = PRT_METRICS_TYPE;
    }
    size_t size = bytes + 512;
    c->answer = malloc(size);
    if (c->answer) {
        c->bytes = (size_t)snprintf(c->answer, size,
                                    "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
                                    "Connection: close\r\n\r\n",
                                    status, kind, bytes);
        if (!head && bytes) {
            memcpy(c->answer + c->bytes, body, bytes);
            c->bytes += bytes;
        }
    }
    free(body);
}

static void hang_up(struct client *c)
{
    close(c->fd);
    free(c->answer);
    *c = (struct client){.fd = -1};
}

/* Reads, answers, writes: whatever can be done without waiting. */
static void serve(struct client *c, const struct ctl_options *o)
{
    if (!c->answer) {
        ssize_t got = recv(c->fd, c->request + c->got, sizeof c->request - 1 - c->got, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (got <= 0) {
            hang_up(c);
            return;
        }
        c->got += (size_t)got;
        c->request[c->got] = '\0';
        bool whole = strstr(c->request, "\r\n\r\n") || strstr(c->request, "\n\n");
        if (!whole && c->got < sizeof c->request - 1)
            return;
        if (whole)
            answer(c, o);
        if (!c->answer) { /* too long, or no memory */
            hang_up(c);
            return;
        }
    }
    ssize_t sent = send(c->fd, c->answer + c->sent, c->bytes - c->sent, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        hang_up(c);
        return;
    }
    c->sent += sent > 0 ? (size_t)sent : 0;
    if (c->sent == c->bytes)
        hang_up(c);
}

int ctl_metrics_serve(const struct ctl_options *o, const volatile sig_atomic_t *stop, struct shm_error *err)
{
    static struct client client[CLIENTS];
    int fd = open_socket(o->listen, err);
    if (fd < 0)
        return fd;
    for (int i = 0; i < CLIENTS; i++)
        client[i].fd = -1;
    while (!*stop) {
        struct pollfd p[CLIENTS + 1];
        int open = 0;
        for (int i = 0; i < CLIENTS; i++) {
            p[i] = (struct pollfd){.fd = client[i].fd, .events = client[i].answer ? POLLOUT : POLLIN};
            open += client[i].fd >= 0;
        }
        p[CLIENTS] = (struct pollfd){.fd = open < CLIENTS ? fd : -1, .events = POLLIN};
        if (poll(p, CLIENTS + 1, open ? 200 : -1) < 0 && errno != EINTR)
            break;
        if (*stop)
            break;
        uint64_t now_ns = shm_now_ns();
        for (int i = 0; i < CLIENTS; i++) {
            if (client[i].fd >= 0 && p[i].fd == client[i].fd && p[i].revents)
                serve(&client[i], o);
            if (client[i].fd >= 0 && now_ns - client[i].since_ns > CLIENT_NS)
                hang_up(&client[i]);
        }
        for (int i = 0; i < CLIENTS && (p[CLIENTS].revents & POLLIN); i++) {
            if (client[i].fd >= 0)
                continue;
            int got = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (got >= 0)
                client[i] = (struct client){.fd = got, .since_ns = now_ns};
            break;
        }
    }
    for (int i = 0; i < CLIENTS; i++)
        if (client[i].fd >= 0)
            hang_up(&client[i]);
    close(fd);
    return 0;
}
