/* SPDX-License-Identifier: MIT */
#include "shm/shm_error.h"

#include <errno.h>
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

const char *shm_error_remedy(int code)
{
    switch (code < 0 ? -code : code) {
    case EMFILE:
        return "; raise the limit on open files (ulimit -n)";
    case ENFILE:
        return "; raise the host's limit on open files (sysctl fs.file-max)";
    case ENOMEM:
        return "; free some memory, or raise the limit on address space (ulimit -v) or on mappings (sysctl "
               "vm.max_map_count)";
    case EAGAIN:
        return "; raise the limit on processes (ulimit -u)";
    case ENOSPC:
    case EDQUOT:
        return "; make room there";
    default:
        return "";
    }
}

const char *shm_error_text(const struct shm_error *err)
{
    if (!err)
        return "unknown error";
    return err->text[0] ? err->text : strerror(-err->code);
}
