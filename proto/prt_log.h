/* SPDX-License-Identifier: MIT */
/*
 * Log of a daemon: one line per event on stderr, whole lines in one write, safe
 * from any thread. Where stderr is the journal's ($JOURNAL_STREAM names it) each
 * line carries the "<N>" level prefix of sd-daemon(3); elsewhere none. Bytes that
 * could forge a line are replaced.
 *
 * The level is that of --log-level: a name, or @FILE whose first word is one,
 * so that it can be changed while the daemon runs: SIGHUP reads FILE anew.
 */
#ifndef PRT_LOG_H
#define PRT_LOG_H

#include "shm/shm_error.h"

#include <stdbool.h>

/* syslog's numbers, as the prefix needs them */
#define PRT_LOG_ERROR   3
#define PRT_LOG_WARNING 4
#define PRT_LOG_NOTICE  5 /* shown with info */
#define PRT_LOG_INFO    6
#define PRT_LOG_DEBUG   7

/* The name lines begin with; borrowed. Before any line. Else "expertd". */
void prt_log_set_name(const char *program);

/* Lines above this level are left out. Any thread, at any time. */
void prt_log_set_level(int level);
int prt_log_level(void);

/* "error", "warning", "info", "debug" to a level; -EINVAL otherwise. */
int prt_log_parse_level(const char *text);
const char *prt_log_level_name(int level);

/* The argument of --log-level: a name or @FILE. Returns the level, or a negative errno with one line. */
int prt_log_read_level(const char *argument, struct shm_error *err);

/* SIGHUP: reads the level anew if the argument (may be NULL) is a @FILE, sets it, and says so in one line; a
 * file that can't be read leaves it as it was. Returns whether there was a file. */
bool prt_log_reload(const char *argument);

/* A progress bar stands on the terminal's current line: wipe it before the next line. */
void prt_log_set_bar(bool drawn);

void prt_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
