/* SPDX-License-Identifier: MIT */
#include "shm/shm_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int shm_error_set(struct shm_error *err, int code, const char *fmt, ...)
{
    int status = code > 0 ? -code : code;
    if (!err)
        return status;
    err->code = status;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    for (char *p = err->text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    return status;
}

const char *shm_error_text(const struct shm_error *err)
{
    if (!err)
        return "unknown error";
    return err->text[0] ? err->text : strerror(-err->code);
}
