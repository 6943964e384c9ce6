/* SPDX-License-Identifier: MIT */
/*
 * How a server ends: what was accepted finishes, what runs too long is cut,
 * connections get time to close, then the loop is left, for good or to execute
 * the program anew; by the signals that ask for it. And what it tells about
 * that: the record that others find it by (proto/prt_serve.h). In the thread
 * of the event loop.
 */
#ifndef SRV_DRAIN_H
#define SRV_DRAIN_H

#include "inferd/serve/srv_server.h"
#include "proto/prt_serve.h"

struct srv_drain {
    struct srv_server *server;
    const struct srv_life *life;
    struct event *term, *interrupt, *drain, *restart, *tick;
    enum srv_ending { SRV_END_NONE, SRV_END_RESTART, SRV_END_STOP } ending;
    bool cancelled, closed; /* closed: no new connections */
    bool again;             /* when the loop has ended: execute the program anew */
    uint64_t drain_ns;      /* since when it drains; 0: no more patience */
    uint64_t quiet_ns;      /* since when nothing is under way any more */
    struct prt_paths paths;
    struct prt_serve record; /* without a url: not announced yet */
    bool recorded;
};

/* Handles the signals from now on; server and life are borrowed. 0 or -ENOMEM; srv_drain_close() in any case.
 */
int srv_drain_open(struct srv_server *server, const struct srv_life *life, struct srv_drain *ret_drain);
void srv_drain_close(struct srv_drain *drain);

/* Once the server is ready: the record may be written. name: URL, or a path of a socket. */
void srv_drain_announce(struct srv_drain *drain, const char *name);

/* Writes the record as it is now, where something changed. */
void srv_drain_note(struct srv_drain *drain);

/* Removes the record. */
void srv_drain_forget(struct srv_drain *drain);

#endif
