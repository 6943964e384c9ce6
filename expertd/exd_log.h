/* SPDX-License-Identifier: MIT */
/*
 * Log: one line per event on stderr, whole lines in one write, safe from any
 * thread. Away from a terminal each line carries the "<N>" level prefix that
 * the journal reads. Bytes that could forge a line are replaced.
 */
#ifndef EXD_LOG_H
#define EXD_LOG_H

#include <stdbool.h>

/* syslog's numbers, as the prefix needs them */
#define EXD_LOG_ERROR   3
#define EXD_LOG_WARNING 4
#define EXD_LOG_INFO    6
#define EXD_LOG_DEBUG   7

/* Lines above this level are left out. Before any thread is started. */
void exd_log_set_level(int level);

/* "error", "warning", "info", "debug" to a level; -EINVAL otherwise. */
int exd_log_parse_level(const char *text);

/* A progress bar stands on the terminal's current line: wipe it before the next line. */
void exd_log_set_bar(bool drawn);

void exd_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
