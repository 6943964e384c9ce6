/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_text.h"

#include "shm/shm_text.h"

#include <stdlib.h>
#include <string.h>

struct srv_text {
    char *const *stops;
    unsigned n_stops;
    struct shm_text held; /* what was shown, then what is held back */
    size_t shown;         /* bytes */
};

struct srv_text *srv_text_new(char *const *stops, unsigned n)
{
    struct srv_text *t = calloc(1, sizeof *t);
    if (t) {
        t->stops = stops;
        t->n_stops = n;
    }
    return t;
}

void srv_text_free(struct srv_text **text)
{
    if (*text)
        free((*text)->held.bytes);
    free(*text);
    *text = NULL;
}

/* What the last call showed is gone. */
static void drop_shown(struct srv_text *t)
{
    if (t->shown)
        memmove(t->held.bytes, t->held.bytes + t->shown, t->held.n - t->shown);
    t->held.n -= t->shown;
    t->shown = 0;
}

/* How a stop string fits at `at`: 1 complete, 0 so far, -1 not. */
static int fits(const char *stop, const char *at, size_t n)
{
    size_t len = strlen(stop);
    if (memcmp(stop, at, n < len ? n : len) != 0)
        return -1;
    return n >= len;
}

int srv_text_push(struct srv_text *t, const char *in, size_t n, const char **ret_out, size_t *ret_n)
{
    drop_shown(t);
    if (shm_text_add(&t->held, in, n))
        return -2;
    *ret_out = t->held.bytes;
    size_t at = 0;
    for (; at < t->held.n; at++) {
        int found = -1;
        size_t longest = 0;
        bool maybe = false;
        for (unsigned i = 0; i < t->n_stops; i++) {
            int f = fits(t->stops[i], t->held.bytes + at, t->held.n - at);
            size_t len = strlen(t->stops[i]);
            maybe = maybe || f == 0;
            if (f == 1 && len > longest) {
                found = (int)i;
                longest = len;
            }
        }
        if (found >= 0) {
            *ret_n = at;
            t->held.n = t->shown = at;
            return found;
        }
        if (maybe)
            break;
    }
    *ret_n = t->shown = at;
    return -1;
}

void srv_text_flush(struct srv_text *t, const char **ret_out, size_t *ret_n)
{
    drop_shown(t);
    *ret_out = t->held.bytes;
    *ret_n = t->shown = t->held.n;
}
