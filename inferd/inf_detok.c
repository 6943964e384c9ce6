/* SPDX-License-Identifier: MIT */
#include "inferd/inf_detok.h"
#include "inferd/inf_utf8.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HELD_MAX 3 /* bytes of a character that lacks its last one */

static const char replacement[3] = {(char)0xEF, (char)0xBF, (char)0xBD}; /* U+FFFD */

struct inf_detok {
    const struct inf_tokenizer *tok;
    bool show_special;
    size_t n_held;
    unsigned char *in; /* what is held back, then the token: HELD_MAX + longest */
    char *text;        /* three times as much, and a NUL: each byte may become U+FFFD */
};

int inf_detok_create(const struct inf_tokenizer *tok, bool show_special, struct inf_detok **ret_detok)
{
    struct inf_detok *d = calloc(1, sizeof *d);
    if (!d)
        return -ENOMEM;
    size_t size = HELD_MAX + inf_tokenizer_longest(tok);
    d->tok = tok;
    d->show_special = show_special;
    d->in = malloc(size);
    d->text = malloc(sizeof replacement * size + 1);
    if (!d->in || !d->text) {
        inf_detok_destroy(&d);
        return -ENOMEM;
    }
    *ret_detok = d;
    return 0;
}

void inf_detok_destroy(struct inf_detok **detok)
{
    if (!detok || !*detok)
        return;
    free((*detok)->text);
    free((*detok)->in);
    free(*detok);
    *detok = NULL;
}

/* Writes in[0..n) as characters; an unfinished one at the end stays in. */
static size_t convert(struct inf_detok *d, size_t n)
{
    size_t at = 0, out = 0, step;
    d->n_held = 0;
    while (at < n) {
        enum inf_utf8_kind kind = inf_utf8_step(d->in + at, n - at, &step);
        if (kind == INF_UTF8_PARTIAL) {
            d->n_held = n - at;
            memmove(d->in, d->in + at, d->n_held);
            break;
        }
        bool ok = kind == INF_UTF8_OK;
        memcpy(d->text + out, ok ? (const char *)d->in + at : replacement, ok ? step : sizeof replacement);
        out += ok ? step : sizeof replacement;
        at += step;
    }
    d->text[out] = 0;
    return out;
}

int inf_detok_push(struct inf_detok *d, int32_t id, const char **ret_text, size_t *ret_len)
{
    const char *bytes;
    size_t len;
    int rc = inf_tokenizer_bytes(d->tok, id, &bytes, &len);
    if (rc)
        return rc;
    if (!d->show_special && inf_tokenizer_is_control(d->tok, id))
        len = 0;
    memcpy(d->in + d->n_held, bytes, len);
    *ret_len = convert(d, d->n_held + len);
    *ret_text = d->text;
    return 0;
}

void inf_detok_flush(struct inf_detok *d, const char **ret_text, size_t *ret_len)
{
    *ret_len = d->n_held ? sizeof replacement : 0;
    memcpy(d->text, replacement, *ret_len);
    d->text[*ret_len] = 0;
    *ret_text = d->text;
    d->n_held = 0;
}
