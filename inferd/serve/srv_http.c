/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_http_priv.h"
#include "proto/prt_log.h"
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
    free(c->body.bytes);
    c->head = NULL;
    c->body = (struct shm_text){0};
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

static void on_read(struct bufferevent *bev, void *ctx)
{
    struct srv_connection *c = ctx;
    struct evbuffer *in = bufferevent_get_input(bev);
    size_t n = evbuffer_get_length(in);
    if (c->state == HEAD || c->state == BODY) {
        srv_http_process(c);
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
        srv_http_hand_out(c, 408, "the request did not arrive in time");
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
