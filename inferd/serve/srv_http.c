/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_http_priv.h"
#include "proto/prt_log.h"

#include "shm/shm_bell.h"
#include "shm/shm_error.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define AHEAD_MAX       65536 /* bytes a client may send before its response has ended */
#define SEND_BUFFER     131072
#define LINGER_S        2
#define LINGER_MAX      (64u << 20)
#define ACCEPT_AGAIN_MS 100

static void process(struct srv_connection *c);

void srv_http_arm(struct srv_connection *c, unsigned s)
{
    struct timeval tv = {.tv_sec = s};
    event_add(c->timer, &tv);
}

/* As many connections as may be: the others wait in the kernel's queue. */
static void listen_again(struct srv_http *h)
{
    if (h->listener && !h->held && h->counters.connections < h->config.connections_max)
        evconnlistener_enable(h->listener);
}

static void reset_exchange(struct srv_connection *c)
{
    free(c->head);
    free(c->body);
    c->head = c->body = NULL;
    c->body_n = c->body_cap = 0;
    c->chunks = (struct srv_chunked){0};
    c->started = c->chunked = false;
    c->status = 0;
    evbuffer_drain(c->headers, evbuffer_get_length(c->headers));
    c->x = (struct srv_exchange){.connection = c, .peer = c->peer, .body = ""};
}

static void destroy(struct srv_connection *c)
{
    struct srv_http *h = c->http;
    reset_exchange(c);
    *c->at = c->next;
    if (c->next)
        c->next->at = c->at;
    event_free(c->timer);
    bufferevent_free(c->bev);
    evbuffer_free(c->headers);
    free(c);
    h->counters.connections--;
    listen_again(h);
}

/* The client is not there any more, or must not be. From the event loop only. */
static void gone(struct srv_connection *c)
{
    if (c->state == BUSY) {
        c->http->counters.busy--;
        c->http->counters.gone++;
        c->state = DEAD;
        if (c->http->config.on_done)
            c->http->config.on_done(c->http->config.ctx, &c->x, c->status, true);
        if (c->x.on_gone)
            c->x.on_gone(&c->x);
    }
    destroy(c);
}

static void linger(struct srv_connection *c)
{
    c->state = LINGER;
    shutdown(bufferevent_getfd(c->bev), SHUT_WR);
    bufferevent_disable(c->bev, EV_WRITE);
    evbuffer_drain(bufferevent_get_input(c->bev), evbuffer_get_length(bufferevent_get_input(c->bev)));
    srv_http_arm(c, LINGER_S);
}

/* The response is complete in the output queue. */
void srv_http_finished(struct srv_connection *c)
{
    bool again = c->keep && !c->http->draining;
    c->served = true;
    c->http->counters.busy--;
    if (c->http->config.on_done)
        c->http->config.on_done(c->http->config.ctx, &c->x, c->status, false);
    c->x.on_gone = NULL;
    c->state = again ? HEAD : FINISH;
    reset_exchange(c);
    if (!again) {
        event_del(c->timer);
        if (!evbuffer_get_length(bufferevent_get_output(c->bev)))
            srv_http_arm(c, 0); /* all sent already: nothing else would tell */
        return;
    }
    srv_http_arm(c, c->http->config.idle_s);
    if (!c->in_process)
        bufferevent_trigger(c->bev, EV_READ, BEV_TRIG_DEFER_CALLBACKS | BEV_TRIG_IGNORE_WATERMARKS);
}

/* Hands the exchange out, as a refusal where status is set. */
static void hand_out(struct srv_connection *c, int status, const char *why)
{
    struct srv_http *h = c->http;
    c->state = BUSY;
    h->counters.busy++;
    event_del(c->timer);
    if (status) {
        h->counters.refused++;
        c->keep = false;
        h->config.on_refuse(h->config.ctx, &c->x, status, why);
        return;
    }
    c->x.body = c->body ? c->body : "";
    c->x.body_bytes = c->body_n;
    h->config.on_request(h->config.ctx, &c->x);
}

/* false: more bytes are needed (or the state has changed by a refusal). */
static bool read_head(struct srv_connection *c, struct evbuffer *in)
{
    struct srv_http *h = c->http;
    while (evbuffer_get_length(in) >= 2 && memcmp(evbuffer_pullup(in, 2), "\r\n", 2) == 0)
        evbuffer_drain(in, 2); /* some clients end a body by an empty line */
    size_t n = evbuffer_get_length(in);
    if (!n)
        return false;
    if (!c->x.start_ns) {
        c->x.start_ns = shm_now_ns();
        srv_http_arm(c, h->config.header_s);
    }
    struct evbuffer_ptr end = evbuffer_search(in, "\r\n\r\n", 4, NULL);
    if (end.pos < 0 || (size_t)end.pos + 4 > h->config.header_max) {
        if (n > h->config.header_max || end.pos >= 0)
            hand_out(c, 431, "the request's head is longer than this server takes (--header-kb)");
        return false;
    }
    n = (size_t)end.pos + 4;
    const char *why = "";
    h->counters.requests++;
    c->keep = false;
    c->head = malloc(n + 1);
    if (!c->head) {
        hand_out(c, 503, "no memory");
        return false;
    }
    evbuffer_remove(in, c->head, n);
    int status = srv_head_parse(c->head, n, &c->x.head, &why);
    if (status) {
        hand_out(c, status, why);
        return false;
    }
    c->keep = c->x.head.keep_alive;
    if (c->x.head.body_bytes > h->config.body_max) {
        hand_out(c, 413, "the request's body is longer than this server takes (--body-mb)");
        return false;
    }
    c->state = BUSY; /* a reply ends it here */
    h->counters.busy++;
    bool has_body = c->x.head.chunked || c->x.head.body_bytes;
    bool keep = c->keep;
    if (has_body)
        c->keep = false; /* an answer that does not wait for the body ends the connection */
    if (!h->config.on_head(h->config.ctx, &c->x))
        return false;
    c->keep = keep;
    h->counters.busy--;
    c->state = BODY;
    srv_http_arm(c, h->config.body_s);
    if (has_body && c->x.head.expect_continue && !evbuffer_get_length(in))
        evbuffer_add_printf(bufferevent_get_output(c->bev), "HTTP/1.1 100 Continue\r\n\r\n");
    return true;
}

static bool body_append(struct srv_connection *c, const char *data, size_t n)
{
    if (c->body_n + n + 1 > c->body_cap) {
        size_t cap = 2 * c->body_cap + n + 1;
        char *body = realloc(c->body, cap);
        if (!body)
            return false;
        c->body = body;
        c->body_cap = cap;
    }
    if (n)
        memcpy(c->body + c->body_n, data, n);
    c->body_n += n;
    c->body[c->body_n] = '\0';
    return true;
}

/* true: the body is complete. */
static bool read_body(struct srv_connection *c, struct evbuffer *in)
{
    const struct srv_http_config *k = &c->http->config;
    size_t n;
    while (!c->x.head.chunked) {
        if (c->body_n == c->x.head.body_bytes)
            return true;
        n = evbuffer_get_contiguous_space(in);
        if (!n)
            return false;
        if (n > c->x.head.body_bytes - c->body_n)
            n = (size_t)c->x.head.body_bytes - c->body_n;
        if (!body_append(c, (const char *)evbuffer_pullup(in, (ev_ssize_t)n), n)) {
            hand_out(c, 503, "no memory for the request's body");
            return false;
        }
        evbuffer_drain(in, n);
    }
    while ((n = evbuffer_get_contiguous_space(in))) {
        const char *data;
        size_t used = 0, data_n = 0;
        int rc = srv_chunked_step(&c->chunks, (const char *)evbuffer_pullup(in, (ev_ssize_t)n), n, &used,
                                  &data, &data_n);
        if (rc < 0) {
            hand_out(c, 400, "the chunked body is malformed");
            return false;
        }
        if (data_n > k->body_max - c->body_n) {
            hand_out(c, 413, "the request's body is longer than this server takes (--body-mb)");
            return false;
        }
        if (!body_append(c, data, data_n)) {
            hand_out(c, 503, "no memory for the request's body");
            return false;
        }
        evbuffer_drain(in, used);
        if (rc)
            return true;
    }
    return false;
}

static void process(struct srv_connection *c)
{
    struct evbuffer *in = bufferevent_get_input(c->bev);
    if (c->in_process)
        return;
    c->in_process = true;
    for (;;) {
        if (c->state == HEAD) {
            if (!read_head(c, in) && c->state != HEAD && c->state != BUSY)
                break;
            if (c->state == HEAD && !c->x.start_ns && evbuffer_get_length(in))
                continue; /* on_head answered and the connection goes on */
            if (c->state != BODY)
                break;
        }
        if (c->state != BODY || !read_body(c, in))
            break;
        hand_out(c, 0, NULL);
        if (c->state != HEAD) /* else answered at once: there may be another request */
            break;
    }
    c->in_process = false;
}

/* Between two requests: an end, but not before the last response is out. */
static void end_idle(struct srv_connection *c)
{
    if (!evbuffer_get_length(bufferevent_get_output(c->bev))) {
        destroy(c);
        return;
    }
    event_del(c->timer);
    c->state = FINISH;
}

static void on_timer(evutil_socket_t fd, short what, void *ctx);

static void on_read(struct bufferevent *bev, void *ctx)
{
    struct srv_connection *c = ctx;
    struct evbuffer *in = bufferevent_get_input(bev);
    size_t n = evbuffer_get_length(in);
    if (c->state == HEAD || c->state == BODY) {
        process(c);
        n = evbuffer_get_length(in);
    }
    if (c->state == BUSY && n > AHEAD_MAX) {
        gone(c);
    } else if (c->state == FINISH || c->state == LINGER) {
        evbuffer_drain(in, n);
        if ((c->lingered += n) > LINGER_MAX)
            destroy(c);
    }
}

/* Everything queued has been sent. */
static void on_write(struct bufferevent *bev, void *ctx)
{
    struct srv_connection *c = ctx;
    if (c->state == FINISH && !evbuffer_get_length(bufferevent_get_output(bev)))
        linger(c);
}

static void on_event(struct bufferevent *bev, short what, void *ctx)
{
    struct srv_connection *c = ctx;
    (void)bev;
    if ((what & BEV_EVENT_TIMEOUT) && (what & BEV_EVENT_WRITING))
        c->http->counters.slow++;
    else if (!(what & (BEV_EVENT_EOF | BEV_EVENT_ERROR)))
        return;
    gone(c);
}

static void on_timer(evutil_socket_t fd, short what, void *ctx)
{
    struct srv_connection *c = ctx;
    (void)fd;
    (void)what;
    if (c->state == BUSY) /* a write found the client too slow */
        gone(c);
    else if (c->state == FINISH)
        linger(c);
    else if (c->state == HEAD && !c->x.start_ns)
        end_idle(c);
    else if (c->state == HEAD || c->state == BODY)
        hand_out(c, 408, "the request did not arrive in time");
    else
        destroy(c);
}

static void on_accept(struct evconnlistener *l, evutil_socket_t fd, struct sockaddr *address, int len,
                      void *ctx)
{
    struct srv_http *h = ctx;
    (void)len;
    struct srv_connection *c = calloc(1, sizeof *c);
    int one = 1, buffer = SEND_BUFFER;
    if (c) {
        c->http = h;
        c->headers = evbuffer_new();
        c->timer = event_new(h->base, -1, 0, on_timer, c);
        c->bev = bufferevent_socket_new(h->base, fd, BEV_OPT_CLOSE_ON_FREE | BEV_OPT_DEFER_CALLBACKS);
    }
    if (!c || !c->headers || !c->timer || !c->bev) {
        if (c) {
            if (c->headers)
                evbuffer_free(c->headers);
            if (c->timer)
                event_free(c->timer);
            if (c->bev)
                bufferevent_free(c->bev);
            else
                close(fd);
            free(c);
        } else {
            close(fd);
        }
        return;
    }
    if (address->sa_family == AF_INET)
        inet_ntop(AF_INET, &((struct sockaddr_in *)(void *)address)->sin_addr, c->peer, sizeof c->peer);
    else if (address->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((struct sockaddr_in6 *)(void *)address)->sin6_addr, c->peer, sizeof c->peer);
    else
        strcpy(c->peer, "local");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer); /* what a slow reader can hide */
    c->next = h->connections;
    c->at = &h->connections;
    if (c->next)
        c->next->at = &c->next;
    h->connections = c;
    h->counters.accepted++;
    reset_exchange(c);
    struct timeval write = {.tv_sec = h->config.write_s};
    bufferevent_setcb(c->bev, on_read, on_write, on_event, c);
    bufferevent_set_timeouts(c->bev, NULL, &write);
    bufferevent_enable(c->bev, EV_READ | EV_WRITE);
    srv_http_arm(c, h->config.header_s);
    if (++h->counters.connections >= h->config.connections_max)
        evconnlistener_disable(l); /* the others wait in the kernel's queue */
}

static void on_accept_again(evutil_socket_t fd, short what, void *ctx)
{
    struct srv_http *h = ctx;
    (void)fd;
    (void)what;
    listen_again(h);
}

/* Out of descriptors, mostly: a pause instead of a loop. */
static void on_accept_error(struct evconnlistener *l, void *ctx)
{
    struct srv_http *h = ctx;
    struct timeval tv = {.tv_usec = ACCEPT_AGAIN_MS * 1000};
    static bool said;
    if (!said)
        prt_log(PRT_LOG_WARNING, "a connection cannot be accepted: %s%s", strerror(errno),
                shm_error_remedy(errno));
    said = true;
    evconnlistener_disable(l);
    event_add(h->accept_again, &tv);
}

int srv_http_create(struct event_base *base, const struct srv_http_config *config, struct srv_http **ret_http)
{
    struct srv_http *h = calloc(1, sizeof *h);
    if (!h)
        return -ENOMEM;
    h->base = base;
    h->config = *config;
    h->accept_again = event_new(base, -1, 0, on_accept_again, h);
    if (h->accept_again) /* -1: listens already, or with the system's longest queue */
        h->listener = evconnlistener_new(base, on_accept, h, LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC,
                                         -1, config->fd);
    if (!h->listener) {
        if (h->accept_again)
            event_free(h->accept_again);
        free(h);
        return -ENOMEM;
    }
    evconnlistener_set_error_cb(h->listener, on_accept_error);
    *ret_http = h;
    return 0;
}

void srv_http_destroy(struct srv_http **http)
{
    struct srv_http *h = *http;
    if (!h)
        return;
    h->draining = h->held = true;
    while (h->connections)
        gone(h->connections);
    if (h->listener)
        evconnlistener_free(h->listener);
    event_free(h->accept_again);
    free(h);
    *http = NULL;
}

/* bufferevent_free lets go of one reference; a callback put off (BEV_OPT_DEFER_CALLBACKS) holds another,
 * which event_base_free would throw away together with the callback. Run, it finds no handler and lets go. */
void srv_http_base_free(struct event_base **base)
{
    if (!*base)
        return;
    while (event_base_get_num_events(*base, EVENT_BASE_COUNT_ACTIVE) > 0 &&
           event_base_loop(*base, EVLOOP_NONBLOCK) == 0)
        ;
    event_base_free(*base);
    *base = NULL;
}

void srv_http_hold(struct srv_http *h, bool hold)
{
    h->held = hold;
    if (hold && h->listener)
        evconnlistener_disable(h->listener);
    listen_again(h);
}

/* Kept for another request, of which nothing has come. One that never had a request is about to send it. */
static bool idle(const struct srv_connection *c)
{
    int waiting = 0;
    return c->state == HEAD && !c->x.start_ns && c->served &&
           (ioctl(bufferevent_getfd(c->bev), FIONREAD, &waiting) || !waiting);
}

void srv_http_drain(struct srv_http *h, bool listening)
{
    h->draining = true;
    if (h->listener && !listening) {
        evconnlistener_free(h->listener);
        h->listener = NULL;
    }
    for (struct srv_connection *c = h->connections, *next; c; c = next) {
        next = c->next;
        if (idle(c))
            end_idle(c);
    }
}

bool srv_http_sending(const struct srv_http *h)
{
    for (const struct srv_connection *c = h->connections; c; c = c->next)
        if (c->state == FINISH)
            return true;
    return false;
}

const struct srv_http_counters *srv_http_counters(const struct srv_http *h)
{
    return &h->counters;
}
