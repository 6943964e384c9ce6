/* SPDX-License-Identifier: MIT */
/* One request on a connection of its own. */
#include "tools/bench_load.h"

#include "shm/shm_text.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <math.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define HEAD_MAX (64u << 10)
#define TEXT_MAX (64u << 20)

enum state { AT_HEAD, AT_BODY, AT_SIZE, AT_CHUNK, AT_CHUNK_END, AT_TRAILER };

struct load_request {
    struct load_handler handler;
    struct bufferevent *bev;
    struct event *timer;
    struct timeval timeout;
    enum state state;
    uint64_t left; /* of the body or chunk; UINT64_MAX: until the connection ends */
    bool events, done, failed;
    struct shm_text line, text;
    struct load_reply reply;
    char why[256];
};

static bool add(struct shm_text *t, const char *bytes, size_t n)
{
    return n <= TEXT_MAX - t->n && !shm_text_add(t, bytes, n);
}

void load_request_cancel(struct load_request **request)
{
    struct load_request *r = *request;
    if (!r)
        return;
    if (r->timer)
        event_free(r->timer);
    if (r->bev)
        bufferevent_free(r->bev);
    free(r->line.bytes);
    free(r->text.bytes);
    free(r);
    *request = NULL;
}

static void end(struct load_request *r, const char *failure, const char *why)
{
    if (!r->reply.failure && failure) {
        r->reply.failure = failure;
        snprintf(r->why, sizeof r->why, "%s", why);
    }
    r->reply.why = r->why;
    r->reply.text = r->text.bytes ? r->text.bytes : "";
    r->handler.on_end(r->handler.ctx, &r->reply);
    load_request_cancel(&r);
}

static uint64_t count_of(const json_t *o, const char *key)
{
    json_int_t n = json_integer_value(json_object_get(o, key));
    return n > 0 ? (uint64_t)n : 0;
}

static void take_error(struct load_request *r, const json_t *o)
{
    const char *text = json_string_value(json_object_get(json_object_get(o, "error"), "message"));
    snprintf(r->why, sizeof r->why, "%s", text ? text : "no reason is given");
}

static void event_line(struct load_request *r)
{
    char *line = r->line.bytes;
    size_t n = r->line.n;
    while (n && (line[n - 1] == '\r' || line[n - 1] == '\n'))
        line[--n] = '\0';
    if (strncmp(line, "data:", 5) != 0)
        return;
    line += 5 + strspn(line + 5, " ");
    if (strcmp(line, "[DONE]") == 0) {
        r->done = true;
        return;
    }
    json_t *o = json_loads(line, 0, NULL);
    if (!o || json_object_get(o, "error")) {
        take_error(r, o);
        r->reply.failure = "stream";
        json_decref(o);
        return;
    }
    const json_t *usage = json_object_get(o, "usage"),
                 *delta = json_object_get(json_array_get(json_object_get(o, "choices"), 0), "delta");
    if (json_is_object(usage)) {
        r->reply.prompt_tokens = count_of(usage, "prompt_tokens");
        r->reply.generated_tokens = count_of(usage, "completion_tokens");
        r->reply.cached_tokens = count_of(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
    }
    const char *content = json_string_value(json_object_get(delta, "content")),
               *reasoning = json_string_value(json_object_get(delta, "reasoning_content"));
    if ((content && *content) || (reasoning && *reasoning)) {
        if (content && !add(&r->text, content, strlen(content)))
            r->failed = true;
        r->handler.on_piece(r->handler.ctx);
    }
    json_decref(o);
}

static void body_bytes(struct load_request *r, const char *data, size_t n)
{
    if (!r->events) {
        r->failed |= !add(&r->text, data, n);
        return;
    }
    while (n && !r->failed) {
        const char *nl = memchr(data, '\n', n);
        size_t m = nl ? (size_t)(nl - data) + 1 : n;
        if (!add(&r->line, data, m)) {
            r->failed = true;
            return;
        }
        if (nl) {
            event_line(r);
            r->line.n = 0;
        }
        data += m;
        n -= m;
    }
}

/* Status line and fields; false: no HTTP. */
static bool head(struct load_request *r, char *text)
{
    if (sscanf(text, "HTTP/1.%*1[01] %3d", &r->reply.status) != 1 || r->reply.status < 100)
        return false;
    r->left = UINT64_MAX;
    r->state = AT_BODY;
    for (char *rest = strchr(text, '\n'), *line; rest && (line = strsep(&rest, "\n"));) {
        char *value = strchr(line, ':');
        if (!value)
            continue;
        *value++ = '\0';
        value += strspn(value, " \t");
        value[strcspn(value, "\r")] = '\0';
        if (strcasecmp(line, "content-length") == 0)
            r->left = strtoull(value, NULL, 10);
        else if (strcasecmp(line, "transfer-encoding") == 0 && strcasestr(value, "chunked"))
            r->state = AT_SIZE;
        else if (strcasecmp(line, "content-type") == 0)
            r->events = r->reply.status == 200 && strncasecmp(value, "text/event-stream", 17) == 0;
        else if (strcasecmp(line, "retry-after") == 0)
            r->reply.retry_after_s = strtod(value, NULL);
    }
    if (!(r->reply.retry_after_s >= 0 && r->reply.retry_after_s < 3600))
        r->reply.retry_after_s = 0;
    return true;
}

/* The response is complete, or as complete as it gets. */
static void complete(struct load_request *r, bool whole)
{
    if (r->failed) {
        end(r, "memory", "the answer is too long");
    } else if (!r->reply.status) {
        end(r, "connection", "the connection ended without an answer");
    } else if (r->reply.status != 200) {
        json_t *o = r->text.bytes ? json_loads(r->text.bytes, 0, NULL) : NULL;
        static char kind[24]; /* read at once */
        snprintf(kind, sizeof kind, "%d", r->reply.status);
        take_error(r, o);
        json_decref(o);
        r->reply.failure = kind;
        end(r, NULL, NULL);
    } else if (!whole || (r->events && !r->done)) {
        end(r, "stream", "the answer broke off");
    } else {
        end(r, NULL, NULL);
    }
}

/* true: complete. */
static bool take(struct load_request *r, struct evbuffer *in)
{
    size_t n;
    char *line;
    while (!r->failed && (n = evbuffer_get_length(in))) {
        if (r->state == AT_HEAD) {
            struct evbuffer_ptr p = evbuffer_search(in, "\r\n\r\n", 4, NULL);
            if (p.pos < 0 && n < HEAD_MAX)
                return false;
            char text[HEAD_MAX + 5];
            size_t m = p.pos < 0 ? HEAD_MAX : (size_t)p.pos + 4;
            if (m > HEAD_MAX)
                m = HEAD_MAX;
            evbuffer_remove(in, text, m);
            text[m] = '\0';
            if (p.pos < 0 || !head(r, text)) {
                r->reply.status = 0;
                return true;
            }
            if (r->reply.status < 200) /* 100 Continue */
                r->state = AT_HEAD;
            else if (r->state == AT_BODY && !r->left)
                return true;
        } else if (r->state == AT_BODY || r->state == AT_CHUNK) {
            char data[16384];
            size_t m = n < sizeof data ? n : sizeof data;
            m = m < r->left ? m : (size_t)r->left;
            evbuffer_remove(in, data, m);
            body_bytes(r, data, m);
            if (r->left != UINT64_MAX)
                r->left -= m;
            if (!r->left && r->state == AT_BODY)
                return true;
            if (!r->left)
                r->state = AT_CHUNK_END;
        } else {
            if (!(line = evbuffer_readln(in, NULL, EVBUFFER_EOL_CRLF)))
                return n > HEAD_MAX;
            if (r->state == AT_CHUNK_END) {
                r->state = AT_SIZE;
            } else if (r->state == AT_SIZE) {
                char *stop;
                r->left = strtoull(line, &stop, 16);
                r->failed = stop == line || r->left > TEXT_MAX;
                r->state = r->left ? AT_CHUNK : AT_TRAILER;
            } else if (!*line) {
                free(line);
                return true;
            }
            free(line);
        }
    }
    return r->failed;
}

static void on_read(struct bufferevent *bev, void *ctx)
{
    struct load_request *r = ctx;
    if (r->timer)
        event_add(r->timer, &r->timeout);
    if (take(r, bufferevent_get_input(bev)))
        complete(r, true);
}

static void on_event(struct bufferevent *bev, short what, void *ctx)
{
    struct load_request *r = ctx;
    (void)bev;
    if (what & BEV_EVENT_CONNECTED)
        return;
    if ((what & BEV_EVENT_ERROR) && !r->reply.status) {
        int error = EVUTIL_SOCKET_ERROR();
        end(r, "connection",
            error == ECONNREFUSED ? "refused: is 'inferd serve' running there?"
                                  : evutil_socket_error_to_string(error));
    } else
        complete(r, r->state == AT_BODY && r->left == UINT64_MAX);
}

static void on_timeout(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    end(ctx, "time-out", "no byte within --timeout");
}

struct load_request *load_request_start(struct event_base *base, const struct load_url *url, const char *key,
                                        const char *path, const char *body, double timeout_s,
                                        const struct load_handler *handler)
{
    struct load_request *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    double whole = floor(timeout_s);
    r->timeout =
        (struct timeval){.tv_sec = (time_t)whole, .tv_usec = (suseconds_t)((timeout_s - whole) * 1e6)};
    r->handler = *handler;
    r->timer = event_new(base, -1, 0, on_timeout, r);
    r->bev = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
    if (!r->timer || !r->bev) {
        load_request_cancel(&r);
        return NULL;
    }
    struct evbuffer *out = bufferevent_get_output(r->bev);
    evbuffer_add_printf(out, "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n", body ? "POST" : "GET",
                        path, url->host);
    if (key)
        evbuffer_add_printf(out, "Authorization: Bearer %s\r\n", key);
    if (body)
        evbuffer_add_printf(out, "Content-Type: application/json\r\nContent-Length: %zu\r\n", strlen(body));
    evbuffer_add(out, "\r\n", 2);
    if (body)
        evbuffer_add(out, body, strlen(body));
    bufferevent_setcb(r->bev, on_read, NULL, on_event, r);
    bufferevent_enable(r->bev, EV_READ | EV_WRITE);
    event_add(r->timer, &r->timeout);
    /* A failure is told from the loop. */
    if (bufferevent_socket_connect(r->bev, (const struct sockaddr *)&url->address, (int)url->address_bytes) <
        0)
        event_active(r->timer, EV_TIMEOUT, 1);
    int fd = bufferevent_getfd(r->bev), one = 1;
    if (fd >= 0)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return r;
}

int load_url_parse(const char *text, size_t n, struct load_url *ret_url, struct shm_error *err)
{
    char host[256], *port;
    if (n > 7 && strncasecmp(text, "http://", 7) == 0) {
        text += 7;
        n -= 7;
    } else {
        return shm_error_set(err, EINVAL, "'%.*s' is not http://HOST:PORT", (int)(n < 200 ? n : 200), text);
    }
    while (n && text[n - 1] == '/')
        n--;
    if (!n || n >= sizeof host || memchr(text, '/', n))
        return shm_error_set(err, EINVAL, "'http://%.*s' is not http://HOST:PORT", (int)(n < 200 ? n : 200),
                             text);
    memcpy(host, text, n);
    host[n] = '\0';
    snprintf(ret_url->host, sizeof ret_url->host, "%s", host);
    char *name = host, *bracket = strchr(host, ']');
    port = strrchr(bracket ? bracket : host, ':');
    if (port)
        *port++ = '\0';
    if (*name == '[' && bracket) {
        name++;
        *bracket = '\0';
    }
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *a = NULL;
    int rc = getaddrinfo(name, port && *port ? port : "80", &hints, &a);
    if (rc || !a)
        return shm_error_set(err, EHOSTUNREACH, "%s: %s", ret_url->host, gai_strerror(rc));
    memcpy(&ret_url->address, a->ai_addr, a->ai_addrlen);
    ret_url->address_bytes = a->ai_addrlen;
    freeaddrinfo(a);
    return 0;
}

struct ask {
    struct shm_error *err;
    const struct load_url *url;
    int rc;
    char *text;
    uint64_t prompt_tokens;
};

static void ask_piece(void *ctx)
{
    (void)ctx;
}

static void ask_end(void *ctx, const struct load_reply *reply)
{
    struct ask *a = ctx;
    a->prompt_tokens = reply->prompt_tokens;
    a->text = strdup(reply->text);
    if (reply->failure)
        a->rc = shm_error_set(a->err, EIO, "http://%s: %s: %s", a->url->host, reply->failure, reply->why);
    else
        a->rc = a->text ? 0 : -ENOMEM;
}

int load_ask(const struct load_url *url, const struct load_options *o, const char *path, const char *body,
             char **ret_text, uint64_t *ret_prompt_tokens, struct shm_error *err)
{
    struct event_base *base = event_base_new();
    struct ask a = {.err = err, .url = url, .rc = -ENOMEM};
    const struct load_handler handler = {.on_piece = ask_piece, .on_end = ask_end, .ctx = &a};
    if (base && load_request_start(base, url, o->key, path, body, o->timeout_s, &handler))
        event_base_dispatch(base);
    if (base)
        event_base_free(base);
    if (a.rc) {
        free(a.text);
        return a.rc == -ENOMEM ? shm_error_set(err, ENOMEM, "no memory") : a.rc;
    }
    *ret_text = a.text;
    if (ret_prompt_tokens)
        *ret_prompt_tokens = a.prompt_tokens;
    return 0;
}
