/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_request.h"

#include "inferd/inf_utf8.h"
#include "inferd/serve/srv_grammar.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define STOP_BYTES_MAX 1024

/* One line of UTF-8, whatever a request brought into it. */
static void printable(char *text)
{
    size_t n = strlen(text), step;
    for (char *at = text; n > 0; at += step, n -= step)
        if (inf_utf8_step((unsigned char *)at, n, &step) != INF_UTF8_OK || (unsigned char)*at < 0x20)
            memset(at, '?', step);
}

int srv_refuse(struct srv_refusal *r, int status, const char *code, const char *param, const char *fmt, ...)
{
    va_list args;
    *r = (struct srv_refusal){.status = status, .type = "invalid_request_error", .code = code};
    if (status == 401)
        r->type = "authentication_error";
    else if (status == 403)
        r->type = "permission_error";
    else if (status == 429)
        r->type = "rate_limit_error";
    else if (status >= 500)
        r->type = status == 503 ? "service_unavailable_error" : "server_error";
    snprintf(r->param, sizeof r->param, "%s", param ? param : "");
    va_start(args, fmt);
    vsnprintf(r->message, sizeof r->message, fmt, args);
    va_end(args);
    printable(r->param);
    printable(r->message);
    return -EINVAL;
}

void *srv_request_own(struct srv_request *r, void *memory)
{
    if (!memory)
        return NULL;
    void **owned = realloc(r->owned, (r->n_owned + 1) * sizeof *owned);
    if (!owned) {
        free(memory);
        return NULL;
    }
    r->owned = owned;
    return owned[r->n_owned++] = memory;
}

void srv_request_clear(struct srv_request *r)
{
    for (size_t i = 0; i < r->n_owned; i++)
        free(r->owned[i]);
    for (unsigned i = 0; i < r->n_stops; i++)
        free(r->stops[i]);
    free(r->owned);
    free(r->messages);
    free(r->bias);
    free(r->tools);
    inf_ids_clear(&r->ids);
    srv_grammar_destroy(&r->grammar);
    json_decref(r->tool_list);
    json_decref(r->root);
    *r = (struct srv_request){0};
}

int srv_parse_float(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal)
{
    double x = json_number_value(value);
    if (!json_is_number(value) || !(x >= p->low && x <= p->high))
        return srv_refuse(refusal, 400, NULL, p->name, "'%s' must be a number from %g to %g", p->name, p->low,
                          p->high);
    *(float *)(void *)((char *)r + p->offset) = (float)x;
    return 0;
}

int srv_parse_uint(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                   struct srv_refusal *refusal)
{
    json_int_t x = json_integer_value(value);
    if (!json_is_integer(value) || (double)x < p->low || (double)x > p->high)
        return srv_refuse(refusal, 400, NULL, p->name, "'%s' must be a whole number from %.0f to %.0f",
                          p->name, p->low, p->high);
    *(uint32_t *)(void *)((char *)r + p->offset) = (uint32_t)x;
    return 0;
}

int srv_parse_bool(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                   struct srv_refusal *refusal)
{
    if (!json_is_boolean(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'%s' must be true or false", p->name);
    *(bool *)(void *)((char *)r + p->offset) = json_is_true(value);
    return 0;
}

int srv_parse_label(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal)
{
    (void)r;
    (void)p;
    (void)value;
    (void)refusal;
    return 0;
}

int srv_parse_model(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal)
{
    r->model = json_string_value(value);
    return r->model ? 0 : srv_refuse(refusal, 400, NULL, p->name, "'model' must be a string");
}

int srv_parse_stops(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal)
{
    bool one = json_is_string(value);
    size_t n = one ? 1 : json_array_size(value);
    if (!one && !json_is_array(value))
        return srv_refuse(refusal, 400, NULL, p->name, "'%s' must be a string or a list of strings", p->name);
    if (n > SRV_STOPS_MAX)
        return srv_refuse(refusal, 400, NULL, p->name, "'%s': at most %d strings", p->name, SRV_STOPS_MAX);
    for (size_t i = 0; i < n; i++) {
        const json_t *item = one ? value : json_array_get(value, i);
        size_t bytes = json_string_length(item);
        if (!json_is_string(item) || !bytes || bytes > STOP_BYTES_MAX)
            return srv_refuse(refusal, 400, NULL, p->name, "'%s' must hold strings of 1 to %d bytes", p->name,
                              STOP_BYTES_MAX);
        char *stop = strdup(json_string_value(item));
        if (!stop)
            return srv_refuse(refusal, 503, NULL, NULL, "no memory");
        r->stops[r->n_stops++] = stop;
    }
    return 0;
}

int srv_only_keys(const json_t *object, const char *const *known, const char *param, const char *where,
                  struct srv_refusal *refusal)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key) != 0)
            i++;
        if (!known[i] && !json_is_null(value))
            return srv_refuse(refusal, 400, "unsupported_parameter", param,
                              "%.100s: '%.60s' is not supported", where, key);
    }
    return 0;
}

int srv_text_of(struct srv_request *r, const json_t *content, const char *param, const char **ret_text,
                size_t *ret_bytes, struct srv_refusal *refusal)
{
    if (json_is_string(content)) {
        *ret_text = json_string_value(content);
        *ret_bytes = json_string_length(content);
        return 0;
    }
    if (!json_is_array(content))
        return srv_refuse(refusal, 400, NULL, param, "'%s' must be a string or a list of text blocks", param);
    size_t bytes = 0, n = json_array_size(content);
    for (size_t i = 0; i < n; i++) {
        const json_t *block = json_array_get(content, i);
        const char *type = json_string_value(json_object_get(block, "type"));
        const json_t *text = json_object_get(block, "text");
        if (!type || strcmp(type, "text") != 0 || !json_is_string(text))
            return srv_refuse(refusal, 400, NULL, param,
                              "'%s[%zu]': blocks of type '%.40s' are not supported here", param, i,
                              type ? type : "?");
        /* cache_control asks for what is done anyway. */
        static const char *const known[] = {"type", "text", "cache_control", NULL};
        if (srv_only_keys(block, known, param, param, refusal))
            return -EINVAL;
        bytes += json_string_length(text);
    }
    char *all = srv_request_own(r, malloc(bytes + 1)), *at = all;
    if (!all)
        return srv_refuse(refusal, 503, NULL, NULL, "no memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_object_get(json_array_get(content, i), "text");
        memcpy(at, json_string_value(text), json_string_length(text));
        at += json_string_length(text);
    }
    *at = '\0';
    *ret_text = all;
    *ret_bytes = bytes;
    return 0;
}

int srv_request_parse(enum srv_api api, const char *body, size_t n, const struct inf_sampler_params *defaults,
                      struct srv_request *ret_request, struct srv_refusal *refusal)
{
    struct srv_request *r = ret_request;
    json_error_t error;
    *r = (struct srv_request){.api = api, .sampler = *defaults};
    r->root = json_loadb(body, n, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(r->root))
        return srv_refuse(refusal, 400, NULL, NULL, "the body is not a JSON object: %.200s",
                          r->root ? "another type" : error.text);
    const struct srv_parameter *table =
        api >= SRV_API_MESSAGES ? srv_anthropic_parameters : srv_openai_parameters;
    const char *key;
    json_t *value;
    json_object_foreach(r->root, key, value)
    {
        if (json_is_null(value))
            continue;
        const struct srv_parameter *p = table;
        while (p->name && strcmp(p->name, key) != 0)
            p++;
        if (!p->name)
            return srv_refuse(refusal, 400, "unsupported_parameter", key,
                              "parameter '%.80s' is not supported", key);
        int rc = p->parse(r, p, value, refusal);
        if (rc)
            return rc;
    }
    if (!r->seeded && getrandom(&r->sampler.seed, sizeof r->sampler.seed, GRND_NONBLOCK) < 0)
        r->sampler.seed = (uint64_t)(uintptr_t)body;
    if (!(r->sampler.top_p > 0)) /* 0 means the likeliest only */
        r->sampler.top_p = 1e-9f;
    return api >= SRV_API_MESSAGES ? srv_anthropic_check(r, refusal) : srv_openai_check(r, refusal);
}
