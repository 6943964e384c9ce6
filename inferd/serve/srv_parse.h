/* SPDX-License-Identifier: MIT */
/*
 * HTTP/1.1 from bytes: a request's head, and a chunked body. No I/O, no
 * allocation; every byte is hostile. What two servers in a row could read in two ways
 * (folded lines, both lengths, repeated lengths, bare line feeds) is refused.
 */
#ifndef SRV_PARSE_H
#define SRV_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SRV_HEADERS_MAX 100

struct srv_field {
    const char *name; /* lower case */
    const char *value;
};

struct srv_head {
    const char *method; /* as sent: "GET" */
    const char *path;   /* without the query, not decoded */
    const char *query;  /* behind the '?', "" if there is none */
    unsigned minor;     /* HTTP/1.minor */
    struct srv_field field[SRV_HEADERS_MAX];
    unsigned n_fields;
    bool chunked;
    bool keep_alive;
    bool expect_continue;
    uint64_t body_bytes; /* Content-Length; 0 if there is none */
};

/* Parses the head in text[0..n), which ends with an empty line; text is written over and
 * the strings of *ret_head point into it. 0, or the HTTP status of the refusal with *ret_why: 400, 417, 431,
 * 501, 505. */
int srv_head_parse(char *text, size_t n, struct srv_head *ret_head, const char **ret_why);

/* The value of a header (name in lower case), NULL if it is absent. */
const char *srv_head_field(const struct srv_head *head, const char *name);

/* A chunked body, in pieces as they come. Zero-initialize. */
struct srv_chunked {
    int state;
    uint64_t left;    /* bytes of the chunk still to come */
    unsigned digits;  /* of the size line */
    unsigned skipped; /* bytes of extensions and trailers */
};

/* Takes bytes of in[0..n): *ret_used of them; *ret_data, *ret_n (maybe 0) of those are body. 1: the body is
 * complete, 0: go on with the rest or with more bytes, -1: malformed. */
int srv_chunked_step(struct srv_chunked *c, const char *in, size_t n, size_t *ret_used, const char **ret_data,
                     size_t *ret_n);

#endif
