/* SPDX-License-Identifier: MIT */
/* Routes, keys, origins, errors. */
#include "inferd/serve/srv_server.h"

#include "proto/prt_log.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *srv_model_name(const struct srv_server *s)
{
    const struct srv_info *info = srv_engine_info(s->engine);
    return s->options->model_name ? s->options->model_name : info ? info->model : "";
}

bool srv_is_anthropic(const struct srv_exchange *x)
{
    return x->head.path && strncmp(x->head.path, "/v1/messages", 12) == 0;
}

json_t *srv_refusal_json(const struct srv_refusal *r, bool anthropic)
{
    if (!anthropic)
        return json_pack("{s:{s:s, s:s, s:s?, s:s?}}", "error", "message", r->message, "type", r->type,
                         "param", r->param[0] ? r->param : NULL, "code", r->code);
    const char *type = r->status == 404   ? "not_found_error"
                       : r->status == 413 ? "request_too_large"
                       : r->status == 503 ? "overloaded_error"
                       : r->status >= 500 ? "api_error"
                                          : r->type;
    return json_pack("{s:s, s:{s:s, s:s}}", "type", "error", "error", "type", type, "message", r->message);
}

void srv_reply_json(struct srv_server *s, struct srv_exchange *x, int status, json_t *object)
{
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    (void)s;
    json_decref(object);
    if (text)
        srv_reply(x, status, "application/json", text, strlen(text));
    else
        srv_reply(x, 503, "text/plain", "no memory\n", 10);
    free(text);
}

void srv_reply_refusal(struct srv_server *s, struct srv_exchange *x, const struct srv_refusal *r)
{
    const char *path = x->head.path ? x->head.path : "";
    enum srv_endpoint at = strcmp(path, "/v1/chat/completions") == 0 ? SRV_AT_CHAT
                           : strcmp(path, "/v1/completions") == 0    ? SRV_AT_COMPLETIONS
                           : srv_is_anthropic(x)                     ? SRV_AT_MESSAGES
                                                                     : SRV_AT_OTHER;
    srv_stats_response(s->stats, at, r->status);
    srv_reply_json(s, x, r->status, srv_refusal_json(r, srv_is_anthropic(x)));
}

void srv_on_refuse(void *ctx, struct srv_exchange *x, int status, const char *why)
{
    struct srv_refusal refusal;
    srv_refuse(&refusal, status, NULL, NULL, "%s", why);
    srv_reply_refusal(ctx, x, &refusal);
}

/* Takes as long whatever differs. */
static bool same_key(const char *key, const char *given)
{
    size_t n = strlen(key), m = strlen(given);
    unsigned diff = n != m;
    for (size_t i = 0; i < n; i++)
        diff |= (unsigned char)key[i] ^ (unsigned char)given[m ? i % m : 0];
    return !diff;
}

static bool has_key(const struct srv_server *s, const struct srv_exchange *x)
{
    const char *given = srv_head_field(&x->head, "x-api-key"),
               *header = srv_head_field(&x->head, "authorization");
    bool ok = false;
    if (!given && header && strncasecmp(header, "Bearer ", 7) == 0)
        given = header + 7 + strspn(header + 7, " ");
    if (!given)
        return false;
    for (unsigned i = 0; i < s->n_keys; i++)
        ok |= same_key(s->keys[i], given);
    return ok;
}

/* The page at `origin` may use this server. */
static bool allowed_origin(const struct srv_server *s, const char *origin)
{
    const char *list = s->options->cors;
    size_t n = strlen(origin);
    while (list && *list) {
        size_t len = strcspn(list, ",");
        if ((len == 1 && *list == '*') || (len == n && strncasecmp(list, origin, n) == 0))
            return true;
        list += len + (list[len] == ',');
    }
    return false;
}

void srv_on_done(void *ctx, const struct srv_exchange *x, int status, bool left)
{
    const struct srv_server *s = ctx;
    prt_log(s->defaults->verbose ? PRT_LOG_INFO : PRT_LOG_DEBUG, "%s %.10s %.100s %d%s %.1f ms", x->peer,
            x->head.method ? x->head.method : "-", x->head.path ? x->head.path : "-", status,
            left ? " left" : "", x->start_ns ? (double)(shm_now_ns() - x->start_ns) / 1e6 : 0.0);
}

bool srv_on_head(void *ctx, struct srv_exchange *x)
{
    struct srv_server *s = ctx;
    struct srv_refusal refusal;
    const char *origin = srv_head_field(&x->head, "origin");
    if (origin) {
        /* A page that is not on the list must not get to a server on the reader's own machine. */
        if (!allowed_origin(s, origin)) {
            srv_refuse(&refusal, 403, "origin_not_allowed", NULL,
                       "pages of this origin may not use the server (--cors lists those that may)");
            srv_reply_refusal(s, x, &refusal);
            return false;
        }
        srv_header(x, "Access-Control-Allow-Origin", origin);
        srv_header(x, "Vary", "Origin");
        if (strcmp(x->head.method, "OPTIONS") == 0) {
            srv_header(x, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
            srv_header(x, "Access-Control-Allow-Headers",
                       "Authorization, Content-Type, X-Api-Key, Anthropic-Version, Anthropic-Beta, "
                       "Anthropic-Dangerous-Direct-Browser-Access");
            srv_header(x, "Access-Control-Max-Age", "600");
            srv_reply(x, 204, NULL, "", 0);
            return false;
        }
    }
    if (s->n_keys && strcmp(x->head.path, "/health") != 0 && !has_key(s, x)) {
        srv_header(x, "WWW-Authenticate", "Bearer");
        srv_refuse(&refusal, 401, "invalid_api_key", NULL,
                   "a valid API key is needed: Authorization: Bearer KEY");
        srv_reply_refusal(s, x, &refusal);
        return false;
    }
    return true;
}

static json_t *model_json(const struct srv_server *s)
{
    const struct srv_info *info = srv_engine_info(s->engine);
    return json_pack("{s:s, s:s, s:I, s:s, s:I}", "id", srv_model_name(s), "object", "model", "created",
                     (json_int_t)s->created, "owned_by", "expertd", "max_model_len", (json_int_t)info->ctx);
}

/* "%20" and so on; out has room for the whole. */
static void percent_decode(const char *in, char *out)
{
    static const char digits[] = "0123456789abcdef";
    for (; *in; in++) {
        const char *high = *in == '%' && in[1] ? strchr(digits, in[1] | 0x20) : NULL;
        const char *low = high && in[2] ? strchr(digits, in[2] | 0x20) : NULL;
        *out++ = low ? (char)((high - digits) << 4 | (low - digits)) : *in;
        in += low ? 2 : 0;
    }
    *out = '\0';
}

static void get_models(struct srv_server *s, struct srv_exchange *x)
{
    struct srv_refusal refusal;
    char name[512] = "";
    if (!srv_engine_info(s->engine)) {
        srv_ready(s, &refusal);
        srv_header(x, "Retry-After", "1");
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    if (strlen(x->head.path) < sizeof name)
        percent_decode(x->head.path + strlen("/v1/models"), name);
    if (*name && strcmp(name + 1, srv_model_name(s)) != 0) {
        srv_refuse(&refusal, 404, "model_not_found", "model",
                   "the model '%.100s' does not exist; this server has '%.100s'", name + 1,
                   srv_model_name(s));
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    srv_stats_response(s->stats, SRV_AT_MODELS, 200);
    json_t *model = model_json(s);
    srv_reply_json(s, x, 200, *name ? model : json_pack("{s:s, s:[o]}", "object", "list", "data", model));
}

static void get_health(struct srv_server *s, struct srv_exchange *x)
{
    struct srv_refusal refusal = {0};
    int rc = srv_ready(s, &refusal);
    srv_stats_response(s->stats, SRV_AT_OTHER, rc ? 503 : 200);
    if (rc)
        srv_header(x, "Retry-After", "1");
    srv_reply_json(
        s, x, rc ? 503 : 200,
        json_pack("{s:s, s:s?}", "status", rc ? "unavailable" : "ok", "reason", rc ? refusal.message : NULL));
}

static void get_status(struct srv_server *s, struct srv_exchange *x)
{
    srv_stats_response(s->stats, SRV_AT_OTHER, 200);
    srv_reply_json(s, x, 200, srv_status_json(s));
}

static void get_metrics(struct srv_server *s, struct srv_exchange *x)
{
    size_t n = 0;
    char *text = srv_metrics_text(s, &n);
    srv_stats_response(s->stats, SRV_AT_OTHER, 200);
    srv_reply(x, text ? 200 : 503, "text/plain; version=0.0.4; charset=utf-8", text ? text : "", n);
    free(text);
}

static void count_tokens(struct srv_server *s, struct srv_exchange *x, struct srv_request *r)
{
    struct srv_refusal refusal;
    struct inf_ids ids = {0};
    struct inf_template_text text = {0};
    int rc = srv_prompt_ids(s, r, &ids, &text, &refusal);
    inf_template_text_clear(&text);
    if (rc) {
        srv_reply_refusal(s, x, &refusal);
    } else {
        srv_stats_response(s->stats, SRV_AT_MESSAGES, 200);
        srv_reply_json(s, x, 200, json_pack("{s:I}", "input_tokens", (json_int_t)ids.n));
    }
    inf_ids_clear(&ids);
}

static void post(struct srv_server *s, struct srv_exchange *x, enum srv_api api)
{
    struct srv_request r = {0};
    struct srv_refusal refusal = {0};
    if (srv_ready(s, &refusal)) {
        srv_header(x, "Retry-After", "1");
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    int rc = srv_request_parse(api, x->body, x->body_bytes, &s->defaults->sampler, &r, &refusal);
    if (!rc && r.model && strcmp(r.model, srv_model_name(s)) != 0)
        rc = srv_refuse(&refusal, 404, "model_not_found", "model",
                        "the model '%.100s' does not exist; this server has '%.100s'", r.model,
                        srv_model_name(s));
    if (rc)
        srv_reply_refusal(s, x, &refusal);
    else if (api == SRV_API_COUNT)
        count_tokens(s, x, &r);
    else
        srv_answer_start(s, x, &r);
    srv_request_clear(&r);
}

static const struct route {
    const char *path, *method;
    void (*get)(struct srv_server *s, struct srv_exchange *x);
    enum srv_api api;
} routes[] = {
    {"/health", "GET", get_health, 0},
    {"/metrics", "GET", get_metrics, 0},
    {"/v1/status", "GET", get_status, 0},
    {"/v1/models", "GET", get_models, 0},
    {"/v1/completions", "POST", NULL, SRV_API_COMPLETION},
    {"/v1/chat/completions", "POST", NULL, SRV_API_CHAT},
    {"/v1/messages", "POST", NULL, SRV_API_MESSAGES},
    {"/v1/messages/count_tokens", "POST", NULL, SRV_API_COUNT},
};

void srv_on_request(void *ctx, struct srv_exchange *x)
{
    struct srv_server *s = ctx;
    struct srv_refusal refusal;
    const struct route *route = NULL;
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        size_t n = strlen(routes[i].path);
        bool below = routes[i].get == get_models && strncmp(x->head.path, routes[i].path, n) == 0 &&
                     x->head.path[n] == '/';
        if (below || strcmp(routes[i].path, x->head.path) == 0)
            route = &routes[i];
    }
    if (!route) {
        srv_refuse(&refusal, 404, "not_found", NULL, "there is nothing at %.200s", x->head.path);
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    bool head = route->get && strcmp(x->head.method, "HEAD") == 0;
    if (!head && strcmp(x->head.method, route->method) != 0) {
        srv_header(x, "Allow", route->get ? "GET, HEAD" : route->method);
        srv_refuse(&refusal, 405, "method_not_allowed", NULL, "%s takes %s, not %.40s", route->path,
                   route->method, x->head.method);
        srv_reply_refusal(s, x, &refusal);
        return;
    }
    if (route->get)
        route->get(s, x);
    else
        post(s, x, route->api);
}
