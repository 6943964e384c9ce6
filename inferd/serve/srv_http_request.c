/* SPDX-License-Identifier: MIT */
/* Requests: from bytes that came on a connection to an exchange that the handlers get. */
#include "inferd/serve/srv_http_priv.h"
#include "shm/shm_bell.h"

#include <stdlib.h>
#include <string.h>

void srv_http_hand_out(struct srv_connection *c, int status, const char *why)
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
    c->x.body = c->body.bytes ? c->body.bytes : "";
    c->x.body_bytes = c->body.n;
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
            srv_http_hand_out(c, 431, "the request's head is longer than this server takes (--header-kb)");
        return false;
    }
    n = (size_t)end.pos + 4;
    const char *why = "";
    h->counters.requests++;
    c->keep = false;
    c->head = malloc(n + 1);
    if (!c->head) {
        srv_http_hand_out(c, 503, "no memory");
        return false;
    }
    evbuffer_remove(in, c->head, n);
    int status = srv_head_parse(c->head, n, &c->x.head, &why);
    if (status) {
        srv_http_hand_out(c, status, why);
        return false;
    }
    c->keep = c->x.head.keep_alive;
    if (c->x.head.body_bytes > h->config.body_max) {
        srv_http_hand_out(c, 413, "the request's body is longer than this server takes (--body-mb)");
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

/* true: the body is complete. */
static bool read_body(struct srv_connection *c, struct evbuffer *in)
{
    const struct srv_http_config *k = &c->http->config;
    size_t n;
    while (!c->x.head.chunked) {
        if (c->body.n == c->x.head.body_bytes)
            return true;
        n = evbuffer_get_contiguous_space(in);
        if (!n)
            return false;
        if (n > c->x.head.body_bytes - c->body.n)
            n = (size_t)c->x.head.body_bytes - c->body.n;
        if (shm_text_add(&c->body, (const char *)evbuffer_pullup(in, (ev_ssize_t)n), n)) {
            srv_http_hand_out(c, 503, "no memory for the request's body");
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
            srv_http_hand_out(c, 400, "the chunked body is malformed");
            return false;
        }
        if (data_n > k->body_max - c->body.n) {
            srv_http_hand_out(c, 413, "the request's body is longer than this server takes (--body-mb)");
            return false;
        }
        if (shm_text_add(&c->body, data, data_n)) {
            srv_http_hand_out(c, 503, "no memory for the request's body");
            return false;
        }
        evbuffer_drain(in, used);
        if (rc)
            return true;
    }
    return false;
}

void srv_http_process(struct srv_connection *c)
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
        srv_http_hand_out(c, 0, NULL);
        if (c->state != HEAD) /* else answered at once: there may be another request */
            break;
    }
    c->in_process = false;
}
