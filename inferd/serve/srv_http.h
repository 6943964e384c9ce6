/* SPDX-License-Identifier: MIT */
/*
 * HTTP server on libevent's buffered sockets: connections, limits, time-outs,
 * responses whole or in pieces. Knows nothing of models.
 *
 * A client that leaves is noticed at once, whether its response was begun or not, because
 * every socket is read all the time; a half-closed connection counts as left. A client
 * that reads too slowly is one whose queue passes output_max or makes no progress
 * for write_s. Both end the exchange by on_gone.
 *
 * One thread: that of the event base. TLS is a proxy's job.
 */
#ifndef SRV_HTTP_H
#define SRV_HTTP_H

#include "inferd/serve/srv_parse.h"

#include <event2/event.h>

struct srv_http;
struct srv_connection;

/* One request and its response. Valid until the response has ended (srv_reply, srv_stream_end) or on_gone
 * returned, whichever is first. */
struct srv_exchange {
    struct srv_connection *connection;
    struct srv_head head;
    const char *body; /* NUL-terminated */
    size_t body_bytes;
    const char *peer; /* address without port; "local" for a Unix socket */
    uint64_t start_ns;
    void *user;                              /* the handler's */
    void (*on_gone)(struct srv_exchange *x); /* the client left; NULL: nobody cares */
};

struct srv_http_config {
    int fd; /* listening socket; owned */
    size_t header_max, body_max, output_max;
    unsigned connections_max;
    unsigned header_s, body_s, idle_s, write_s; /* time-outs */
    /* The head is complete, the body is not read yet: true to go on; false after a srv_reply. */
    bool (*on_head)(void *ctx, struct srv_exchange *x);
    void (*on_request)(void *ctx, struct srv_exchange *x);
    /* The HTTP layer itself refuses: answers with srv_reply in the API's own format. The head may be empty
     * (method NULL).
     */
    void (*on_refuse)(void *ctx, struct srv_exchange *x, int status, const char *why);
    /* A response has been queued whole, or the client left before that; NULL: nobody cares. */
    void (*on_done)(void *ctx, const struct srv_exchange *x, int status, bool left);
    void *ctx;
};

struct srv_http_counters {
    uint64_t accepted, requests, gone, slow, refused;
    unsigned connections, busy; /* now; busy: with a request under way */
};

/* 0 or -ENOMEM (fd is not taken then). */
int srv_http_create(struct event_base *base, const struct srv_http_config *config,
                    struct srv_http **ret_http);
/* Closes every connection; on_gone is called for those under way. */
void srv_http_destroy(struct srv_http **http);
/* Frees the base that servers ran on, after them and after all other events: connections that ended in the
 * loop's last round are released (and their sockets closed) only here. NULL is accepted. */
void srv_http_base_free(struct event_base **base);

/* A last response is on its way to somebody. */
bool srv_http_sending(const struct srv_http *http);

/* Connections kept for another request are closed, others after their response. No new ones, and the
 * listening socket is closed; or, with `listening`, new ones are taken as before, for one request each. */
void srv_http_drain(struct srv_http *http, bool listening);

/* New connections wait in the kernel's queue, until this is taken back. */
void srv_http_hold(struct srv_http *http, bool hold);

const struct srv_http_counters *srv_http_counters(const struct srv_http *http);

/* A header of the response, before it begins. Value without line breaks. */
void srv_header(struct srv_exchange *x, const char *name, const char *value);

/* The whole response. Ends the exchange. */
void srv_reply(struct srv_exchange *x, int status, const char *type, const char *body, size_t n);

/* A response in pieces. Write: 0, or -ENOBUFS: the client reads too slowly or is gone; on_gone follows from
 * the event loop. */
void srv_stream_begin(struct srv_exchange *x, int status, const char *type);
int srv_stream_write(struct srv_exchange *x, const char *data, size_t n);
void srv_stream_end(struct srv_exchange *x);

#endif
