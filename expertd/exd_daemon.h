/* SPDX-License-Identifier: MIT */
/*
 * Daemon: the life of one expertd. It takes the instance, opens the model and
 * the arena on a start-up thread, answers control requests, watches workers,
 * drains and ends. One epoll loop; whatever may block runs elsewhere.
 */
#ifndef EXD_DAEMON_H
#define EXD_DAEMON_H

#include "expertd/exd_options.h"

/* Runs until told to stop. Returns the exit status: 0 after a clean end, 1 after an error that was logged.
 * Call once, before the process has other threads: it blocks signals for all. */
int exd_daemon_run(const struct exd_options *options);

#endif
