/* SPDX-License-Identifier: MIT */
/* expertd's log: proto/prt_log.h by the names that expertd uses. */
#ifndef EXD_LOG_H
#define EXD_LOG_H

#include "proto/prt_log.h"

#define EXD_LOG_ERROR   PRT_LOG_ERROR
#define EXD_LOG_WARNING PRT_LOG_WARNING
#define EXD_LOG_INFO    PRT_LOG_INFO
#define EXD_LOG_DEBUG   PRT_LOG_DEBUG

#define exd_log(level, ...)       prt_log(level, __VA_ARGS__)
#define exd_log_set_level(level)  prt_log_set_level(level)
#define exd_log_set_bar(drawn)    prt_log_set_bar(drawn)
#define exd_log_parse_level(text) prt_log_parse_level(text)

/* A line from whoever takes a function for it; ctx: none. */
static inline void exd_log_note(void *ctx, bool warning, const char *line)
{
    (void)ctx;
    exd_log(warning ? EXD_LOG_WARNING : EXD_LOG_INFO, "%s", line);
}

#endif
