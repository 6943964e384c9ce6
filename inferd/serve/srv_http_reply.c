/* SPDX-License-Identifier: MIT */
/* Responses. */
#include "inferd/serve/srv_http_priv.h"

#include <errno.h>
#include <string.h>
#include <time.h>

static const char *reason(int status)
{
    switch (status) {
    case 200:
        return "OK";
    case 204:
        return "No Content";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 408:
        return "Request Timeout";
    case 413:
        return "Content Too Large";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 503:
        return "Service Unavailable";
    default:
        return status < 500 ? "Refused" : "Error";
    }
}

void srv_header(struct srv_exchange *x, const char *name, const char *value)
{
    evbuffer_add_printf(x->connection->headers, "%s: %s\r\n", name, value);
}

/* Status line and headers; `bytes` < 0: in pieces. */
static void begin(struct srv_connection *c, int status, const char *type, int64_t bytes)
{
    struct evbuffer *out = bufferevent_get_output(c->bev);
    time_t now = time(NULL);
    struct tm tm;
    char date[40];
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
    c->started = true;
    c->status = status;
    c->chunked = bytes < 0 && c->x.head.minor == 1;
    if (c->http->draining || (bytes < 0 && !c->chunked))
        c->keep = false;
    evbuffer_add_printf(out, "HTTP/1.1 %d %s\r\nDate: %s\r\n", status, reason(status), date);
    if (type)
        evbuffer_add_printf(out, "Content-Type: %s\r\n", type);
    if (c->chunked)
        evbuffer_add_printf(out, "Transfer-Encoding: chunked\r\n");
    else if (bytes >= 0 && status != 204)
        evbuffer_add_printf(out, "Content-Length: %lld\r\n", (long long)bytes);
    if (!c->keep || c->x.head.minor == 0)
        evbuffer_add_printf(out, "Connection: %s\r\n", c->keep ? "keep-alive" : "close");
    evbuffer_add_buffer(out, c->headers);
    evbuffer_add(out, "\r\n", 2);
}

void srv_reply(struct srv_exchange *x, int status, const char *type, const char *body, size_t n)
{
    struct srv_connection *c = x->connection;
    begin(c, status, type, (int64_t)n);
    if (!x->head.method || strcmp(x->head.method, "HEAD") != 0)
        evbuffer_add(bufferevent_get_output(c->bev), body, n);
    srv_http_finished(c);
}

void srv_stream_begin(struct srv_exchange *x, int status, const char *type)
{
    begin(x->connection, status, type, -1);
}

int srv_stream_write(struct srv_exchange *x, const char *data, size_t n)
{
    struct srv_connection *c = x->connection;
    struct evbuffer *out = bufferevent_get_output(c->bev);
    if (!n)
        return 0;
    if (evbuffer_get_length(out) + n > c->http->config.output_max) {
        if (!event_pending(c->timer, EV_TIMEOUT, NULL))
            c->http->counters.slow++;
        srv_http_arm(c, 0);
        return -ENOBUFS;
    }
    if (c->chunked)
        evbuffer_add_printf(out, "%zx\r\n", n);
    evbuffer_add(out, data, n);
    if (c->chunked)
        evbuffer_add(out, "\r\n", 2);
    return 0;
}

void srv_stream_end(struct srv_exchange *x)
{
    struct srv_connection *c = x->connection;
    if (c->chunked)
        evbuffer_add(bufferevent_get_output(c->bev), "0\r\n\r\n", 5);
    srv_http_finished(c);
}
