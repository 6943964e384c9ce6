/* SPDX-License-Identifier: MIT */
/*
 * Channel: request and reply between processes of one user. nanomsg REQ/REP
 * over ipc:// is behind it and seen nowhere else.
 *
 * A request may be delivered more than once: messages carry epoch and id, and
 * the receiving side remembers its replies (prt_replay.h). The library does
 * not survive fork(): a process that opened a channel starts others by
 * posix_spawn only. A channel belongs to one thread at a time.
 */
#ifndef PRT_CHANNEL_H
#define PRT_CHANNEL_H

#include "shm/shm_error.h"

#include <stddef.h>
#include <stdint.h>

struct prt_server;
struct prt_channel;

/* Binds the socket at path (below PRT_SOCKET_BYTES); a stale file there is replaced. Created with umask 077.
 * -EADDRINUSE: a live one listens there. */
int prt_server_open(const char *path, struct prt_server **ret_server, struct shm_error *err);

/* Readable when a request waits; for epoll, level-triggered. Owned by the server. */
int prt_server_fd(const struct prt_server *server);

/* Takes one request, never blocks. 0, -EAGAIN (none), -EMSGSIZE (longer than capacity; dropped). */
int prt_server_receive(struct prt_server *server, void *buffer, size_t capacity, size_t *ret_bytes);

/* Answers the request just received. Never blocks. -EMSGSIZE above PRT_MESSAGE_MAX. */
int prt_server_reply(struct prt_server *server, const void *bytes, size_t n);

/* Closes and removes the socket file. Accepts NULL, nulls. */
void prt_server_close(struct prt_server **server);

/* Connects to the socket at path; succeeds also when nobody listens there (yet). */
int prt_channel_connect(const char *path, struct prt_channel **ret_channel, struct shm_error *err);

/* Sends a request and waits for its reply: at most timeout_ms, and no longer than the process behind
 * peer_pidfd (-1: not watched) lives. After a timeout the next request supersedes the old one; its late reply
 * is discarded. 0, -ETIMEDOUT, -ESRCH (peer died), -EMSGSIZE, or another errno. */
int prt_channel_request(struct prt_channel *channel, const void *request, size_t n, void *reply,
                        size_t capacity, size_t *ret_bytes, int peer_pidfd, uint32_t timeout_ms);

void prt_channel_close(struct prt_channel **channel);

#endif
