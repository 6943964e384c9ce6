/* SPDX-License-Identifier: MIT */
/* Inside of the HTTP server: connections (srv_http.c), what is read from them (srv_http_request.c) and
 * written on them (srv_http_reply.c). */
#ifndef SRV_HTTP_PRIV_H
#define SRV_HTTP_PRIV_H

#include "inferd/serve/srv_http.h"
#include "shm/shm_text.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/listener.h>
#include <netinet/in.h>

enum srv_http_state {
    HEAD,   /* waits for a request's head */
    BODY,   /* reads its body */
    BUSY,   /* the handler has it */
    FINISH, /* the last response leaves, then the connection ends */
    LINGER, /* it has left: what the client still sends is thrown away, so that no reset overtakes the
               response */
    DEAD,   /* about to be freed */
};

struct srv_connection {
    struct srv_http *http;
    struct srv_connection *next, **at;
    struct bufferevent *bev;
    struct event *timer; /* time-outs of the state; and what must not run inside a callback */
    enum srv_http_state state;
    bool served;     /* had a response already */
    bool started;    /* the response has begun */
    bool chunked;    /* those are framed */
    bool keep;       /* another request may follow */
    bool in_process; /* no recursion */
    int status;
    uint64_t lingered;
    char *head;
    struct shm_text body;
    struct srv_chunked chunks;
    struct evbuffer *headers; /* of the response */
    struct srv_exchange x;
    char peer[INET6_ADDRSTRLEN];
};

struct srv_http {
    struct event_base *base;
    struct srv_http_config config;
    struct evconnlistener *listener;
    struct event *accept_again;
    struct srv_connection *connections;
    struct srv_http_counters counters;
    bool draining, held;
};

/* Starts the time-out of the connection's state. 0: its handler runs from the event loop. */
void srv_http_arm(struct srv_connection *c, unsigned s);

/* The response is complete in the output queue: the exchange ends. */
void srv_http_finished(struct srv_connection *c);

/* Reads what has come, and hands out what is complete. */
void srv_http_process(struct srv_connection *c);

/* Hands the exchange out, as a refusal where status is set. */
void srv_http_hand_out(struct srv_connection *c, int status, const char *why);

#endif
