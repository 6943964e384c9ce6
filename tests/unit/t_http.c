/* SPDX-License-Identifier: MIT */
/* The HTTP layer stopped at every possible point: after each single callback of the event loop. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "inferd/serve/srv_http.h"

TestSuite(http, .timeout = 120);

#define BIG 300000

struct bench {
    struct event_base *base;
    struct srv_http *http;
    struct srv_exchange *x; /* handed out, not answered yet */
    struct sockaddr_in address;
    unsigned requests, gone, done;
    bool later; /* requests wait for an answer from outside the loop */
};

static unsigned open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    unsigned n = 0;
    cr_assert(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static bool on_head(void *ctx, struct srv_exchange *x)
{
    (void)ctx;
    (void)x;
    return true;
}

static void on_gone(struct srv_exchange *x)
{
    struct bench *b = x->user;
    b->gone++;
    b->x = NULL;
}

static void on_request(void *ctx, struct srv_exchange *x)
{
    struct bench *b = ctx;
    b->requests++;
    if (!b->later) {
        srv_reply(x, 200, "text/plain", "yes\n", 4);
        return;
    }
    x->user = b;
    x->on_gone = on_gone;
    b->x = x;
}

static void on_refuse(void *ctx, struct srv_exchange *x, int status, const char *why)
{
    (void)ctx;
    srv_reply(x, status, "text/plain", why, strlen(why));
}

static void on_done(void *ctx, const struct srv_exchange *x, int status, bool left)
{
    struct bench *b = ctx;
    (void)x;
    (void)status;
    b->done += !left;
}

/* A base that runs one callback a call of event_base_loop. */
static void start(struct bench *b, bool later)
{
    signal(SIGPIPE, SIG_IGN);
    *b = (struct bench){.later = later};
    struct event_config *config = event_config_new();
    event_config_set_max_dispatch_interval(config, NULL, 1, 0);
    b->base = event_base_new_with_config(config);
    event_config_free(config);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t n = sizeof b->address;
    b->address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    cr_assert(fd >= 0 && bind(fd, (struct sockaddr *)&b->address, n) == 0 && listen(fd, 8) == 0 &&
              getsockname(fd, (struct sockaddr *)&b->address, &n) == 0);
    const struct srv_http_config http = {.fd = fd,
                                         .header_max = 4096,
                                         .body_max = 1 << 20,
                                         .output_max = 1 << 20,
                                         .connections_max = 8,
                                         .header_s = 60,
                                         .body_s = 60,
                                         .idle_s = 60,
                                         .write_s = 60,
                                         .on_head = on_head,
                                         .on_request = on_request,
                                         .on_refuse = on_refuse,
                                         .on_done = on_done,
                                         .ctx = b};
    cr_assert_eq(srv_http_create(b->base, &http, &b->http), 0);
}

static int client(const struct bench *b, const char *text)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert(fd >= 0 && connect(fd, (const struct sockaddr *)&b->address, sizeof b->address) == 0);
    cr_assert_eq(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
    return fd;
}

static void steps(struct bench *b, unsigned n)
{
    while (n--)
        event_base_loop(b->base, EVLOOP_NONBLOCK);
}

static void end(struct bench *b)
{
    srv_http_destroy(&b->http);
    cr_assert_null(b->x, "one under way is told");
    srv_http_base_free(&b->base);
    cr_assert_null(b->base);
}

#define GET  "GET / HTTP/1.1\r\nHost: h\r\n\r\n"
#define LAST "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
#define POST "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nsome"

enum answer { NOW, WHOLE, PIECES, NEVER };

/* n callbacks before the answer and the client's leave, m after them, then the end. */
static void life(const char *text, enum answer answer, bool leaves, bool drains, unsigned n, unsigned m)
{
    static char big[BIG];
    struct bench b;
    unsigned before = open_descriptors();
    start(&b, answer != NOW);
    int fd = client(&b, text), idle = client(&b, "");
    steps(&b, n);
    if (b.x && answer == WHOLE) {
        srv_reply(b.x, 200, "text/plain", big, sizeof big);
        b.x = NULL;
    } else if (b.x && answer == PIECES) {
        srv_stream_begin(b.x, 200, "text/event-stream");
        srv_stream_write(b.x, "data: 1\n\n", 9);
    }
    if (leaves) {
        close(fd);
        close(idle);
    }
    if (drains)
        srv_http_drain(b.http, false);
    steps(&b, m);
    end(&b);
    if (!leaves) {
        close(fd);
        close(idle);
    }
    cr_assert_eq(open_descriptors(), before,
                 "a socket is left open: %.8s answer %d leaves %d drains %d %u+%u", text, answer, leaves,
                 drains, n, m);
}

Test(http, a_stop_at_any_point_releases_all)
{
    static const char *const texts[] = {GET, GET GET, LAST, POST, "GET / HT", "x\r\n\r\n"};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++)
        for (enum answer a = NOW; a <= NEVER; a++)
            for (int how = 0; how < 4; how++)
                for (unsigned n = 0; n <= 12; n += n < 6 ? 1 : 3)
                    for (unsigned m = 0; m <= 8; m += m < 4 ? 1 : 2)
                        life(texts[t], a, how & 1, how & 2, n, m);
}

/* The least case: the answer comes from outside the loop, and what follows it has no more round. */
Test(http, a_callback_put_off_does_not_outlive_the_base)
{
    struct bench b;
    char text[1000];
    start(&b, true);
    int fd = client(&b, GET);
    for (unsigned i = 0; i < 100000 && !b.x; i++)
        steps(&b, 1);
    cr_assert(b.x);
    srv_reply(b.x, 204, NULL, "", 0);
    b.x = NULL;
    cr_assert_eq(b.done, 1);
    end(&b);
    struct timeval tv = {.tv_sec = 10};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
    cr_assert_eq(recv(fd, text, sizeof text, 0), 0, "the socket is closed");
    close(fd);
}

/* drained: before the response is queued, else while it is on its way. */
static void drained(bool before)
{
    static char big[BIG], got[BIG];
    struct bench b;
    start(&b, true);
    int fd = client(&b, GET);
    for (unsigned i = 0; i < 100000 && !b.x; i++)
        steps(&b, 1);
    cr_assert(b.x);
    if (before)
        srv_http_drain(b.http, false);
    srv_reply(b.x, 200, "text/plain", big, sizeof big);
    b.x = NULL;
    if (!before)
        srv_http_drain(b.http, false);
    cr_assert(srv_http_sending(b.http));
    size_t n = 0;
    ssize_t r;
    while ((r = recv(fd, got, sizeof got, MSG_DONTWAIT))) {
        n += r > 0 ? (size_t)r : 0;
        steps(&b, 1);
    }
    cr_assert_gt(n, sizeof big);
    shutdown(fd, SHUT_WR);
    while (srv_http_counters(b.http)->connections)
        steps(&b, 1);
    end(&b);
    close(fd);
}

Test(http, all_is_sent_when_drained)
{
    drained(true);
    drained(false);
}
