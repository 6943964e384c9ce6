/* SPDX-License-Identifier: MIT */
/*
 * Service manager: what expertd and inferd tell the one that started them, by
 * systemd's protocol (datagrams to $NOTIFY_SOCKET). Nothing is linked for it;
 * without such a manager every call does nothing.
 */
#ifndef PRT_NOTIFY_H
#define PRT_NOTIFY_H

#include <stdint.h>

/* Sends lines such as "READY=1". Does not block. 0, or a negative errno (nobody asked: 0). */
int prt_notify(const char *text);

/* The manager's time limit between two "WATCHDOG=1" ($WATCHDOG_USEC, for this process); 0: it has none. */
uint64_t prt_watchdog_ns(void);

#endif
