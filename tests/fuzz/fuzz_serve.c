/* SPDX-License-Identifier: MIT */
/*
 * What a client can send: the first byte picks a request's head, a chunked body (the same whatever the
 * pieces), a body of one of the APIs, or a schema. Refusals are one line of UTF-8; a schema that was taken is
 * walked by its own mask-less steps over the input.
 */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_utf8.h"
#include "inferd/serve/srv_grammar.h"
#include "inferd/serve/srv_parse.h"
#include "inferd/serve/srv_request.h"
#include "tests/fuzz/fuzz.h"

#define MUST(what) ((what) ? (void)0 : abort())

static void check_line(const char *text)
{
    size_t n = strlen(text), step;
    MUST(n > 0);
    for (size_t i = 0; i < n; i += step) {
        MUST((unsigned char)text[i] >= 0x20);
        MUST(inf_utf8_step((const unsigned char *)text + i, n - i, &step) == INF_UTF8_OK);
    }
}

static void fuzz_head(const uint8_t *data, size_t size)
{
    static struct srv_head head;
    const char *why = NULL;
    char *text = malloc(size + 1);
    MUST(text);
    memcpy(text, data, size);
    int status = srv_head_parse(text, size, &head, &why);
    if (status) {
        MUST(status >= 400 && status < 600);
        check_line(why);
    } else {
        MUST(head.path[0] == '/' && head.n_fields <= SRV_HEADERS_MAX && !(head.chunked && head.body_bytes));
        for (unsigned i = 0; i < head.n_fields; i++)
            MUST(srv_head_field(&head, head.field[i].name) && strlen(head.field[i].value) < size);
    }
    free(text);
}

/* Result and body of a chunked one, fed in pieces of `step`. */
static int chunked(const uint8_t *data, size_t size, size_t step, char *out, size_t *ret_n)
{
    struct srv_chunked c = {0};
    size_t at = 0, n = 0, used, data_n;
    int rc = 0;
    while (!rc && at < size) {
        const char *piece;
        size_t take = size - at < step ? size - at : step;
        rc = srv_chunked_step(&c, (const char *)data + at, take, &used, &piece, &data_n);
        if (rc < 0)
            break;
        MUST(used > 0 && used <= take && data_n <= used && n + data_n <= size);
        memcpy(out + n, piece, data_n);
        n += data_n;
        at += used;
    }
    *ret_n = n;
    return rc;
}

static void fuzz_chunked(const uint8_t *data, size_t size)
{
    char *one = malloc(size + 1), *other = malloc(size + 1);
    size_t n_one, n_other;
    MUST(one && other);
    int rc_one = chunked(data, size, size, one, &n_one),
        rc_other = chunked(data, size, 1 + size % 7, other, &n_other);
    MUST(rc_one == rc_other);
    MUST(rc_one < 0 || (n_one == n_other && memcmp(one, other, n_one) == 0));
    free(one);
    free(other);
}

static void fuzz_request(enum srv_api api, const uint8_t *data, size_t size)
{
    struct inf_sampler_params defaults;
    struct srv_request r = {0};
    struct srv_refusal refusal = {0};
    inf_sampler_params_default(&defaults);
    int rc = srv_request_parse(api, (const char *)data, size, &defaults, &r, &refusal);
    if (rc) {
        MUST(refusal.status >= 400 && refusal.status < 600 && refusal.type);
        check_line(refusal.message);
    } else {
        for (size_t i = 0; i < r.n_messages; i++)
            MUST(r.messages[i].role && (r.messages[i].content || r.messages[i].n_calls));
        MUST(api == SRV_API_COMPLETION || r.n_messages);
    }
    srv_request_clear(&r);
}

/* A schema, a NUL, a text. */
static void fuzz_schema(const uint8_t *data, size_t size)
{
    const uint8_t *end = memchr(data, 0, size);
    size_t n = end ? (size_t)(end - data) : size;
    json_t *schema = json_loadb((const char *)data, n, JSON_DECODE_ANY, NULL);
    struct srv_grammar *g = NULL;
    struct shm_error err = {0};
    if (!schema)
        return;
    if (srv_grammar_schema(schema, "schema", &err, &g)) {
        MUST(shm_error_text(&err)[0]);
    } else {
        for (size_t i = n + 1; i < size && i < n + 2000; i++)
            if (srv_grammar_accept(g, (const char *)data + i, 1))
                break;
        (void)srv_grammar_may_end(g);
    }
    srv_grammar_destroy(&g);
    json_decref(schema);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    uint8_t kind = *data++;
    size--;
    switch (kind) {
    case 'h':
        fuzz_head(data, size);
        break;
    case 'k':
        fuzz_chunked(data, size);
        break;
    case 's':
        fuzz_schema(data, size);
        break;
    case 'p':
        fuzz_request(SRV_API_COMPLETION, data, size);
        break;
    case 'm':
        fuzz_request(SRV_API_MESSAGES, data, size);
        break;
    default:
        fuzz_request(SRV_API_CHAT, data, size);
    }
    return 0;
}
