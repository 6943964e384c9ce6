/* SPDX-License-Identifier: MIT */
/*
 * A client of `inferd serve` (or of any server that speaks OpenAI's chat
 * completions over plain HTTP): one request a connection, the body as it
 * comes. TLS is not spoken. Blocks; ends early when *cancel is set.
 */
#ifndef INF_REMOTE_H
#define INF_REMOTE_H

#include "shm/shm_error.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct inf_remote {
    char host[256], port[8], prefix[256]; /* prefix: what comes before /v1/... */
    char key[512];                        /* "" if none is needed */
    _Atomic bool *cancel;
};

/* url: http://HOST[:PORT][/PREFIX][/v1]; key_file (NULL: none): its first line is the key. -EINVAL, or
 * those of opening the file. */
int inf_remote_open(const char *url, const char *key_file, _Atomic bool *cancel, struct shm_error *err,
                    struct inf_remote *ret_remote);

/* Sends body (NULL: a GET) and hands each piece of the response's body to on_data; false from it ends the
 * request. The status, or a negative errno: -ECANCELED, -ENOTCONN and others with one line; -EPROTO: no HTTP.
 */
int inf_remote_request(const struct inf_remote *remote, const char *path, const char *body,
                       bool (*on_data)(void *ctx, const char *data, size_t n), void *ctx,
                       struct shm_error *err);

#endif
