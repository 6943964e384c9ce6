/* SPDX-License-Identifier: MIT */
#include "shm/shm_text.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CAP_MIN 256

int shm_text_add(struct shm_text *t, const char *bytes, size_t n)
{
    if (t->rc)
        return t->rc;
    if (n >= SIZE_MAX / 2 - t->n)
        return t->rc = -ENOMEM;
    if (t->n + n + 1 > t->cap) {
        size_t cap = t->cap ? t->cap : CAP_MIN;
        while (cap < t->n + n + 1)
            cap *= 2;
        char *grown = realloc(t->bytes, cap);
        if (!grown)
            return t->rc = -ENOMEM;
        t->bytes = grown;
        t->cap = cap;
    }
    if (n)
        memcpy(t->bytes + t->n, bytes, n);
    t->n += n;
    t->bytes[t->n] = '\0';
    return 0;
}
