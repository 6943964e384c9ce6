/* SPDX-License-Identifier: MIT */
#include "expertd/exd_daemon_priv.h"
#include "expertd/exd_log.h"

#include "shm/shm_bell.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Large enough for every reply of this version. */
union reply {
    struct prt_reply_header header;
    struct prt_hello_reply hello;
    struct prt_attach_reply attach;
    struct prt_detach_reply detach;
    struct prt_configure_reply configure;
    struct prt_drain_reply drain;
    struct prt_stop_reply stop;
    struct prt_parkopen_reply parkopen;
    struct prt_parkfind_reply parkfind;
    struct prt_parkreserve_reply parkreserve;
    struct prt_parkcommit_reply parkcommit;
    struct prt_parkdone_reply parkdone;
};

/* Refusals are logged up to ten a second: whoever sends garbage shall not fill the disk with lines. */
static void log_refusal(struct exd_daemon *d, const char *who, const char *line)
{
    uint64_t now_ns = shm_now_ns();
    if (now_ns - d->refusals_since_ns > 1000000000u) {
        if (d->refusals > 10)
            exd_log(EXD_LOG_WARNING, "%u more refusals were not logged", d->refusals - 10);
        d->refusals_since_ns = now_ns;
        d->refusals = 0;
    }
    if (d->refusals++ < 10)
        exd_log(EXD_LOG_WARNING, "%s was refused: %s", who, line);
}

static struct exd_session *find(struct exd_daemon *d, uint64_t number, uint32_t *ret_index)
{
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        if (d->session[i] && exd_session_number(d->session[i]) == number) {
            *ret_index = i;
            return d->session[i];
        }
    return NULL;
}

static int no_session(uint64_t number, struct shm_error *err)
{
    return shm_error_set(err, ENOENT, "there is no session %llu: attach first", (unsigned long long)number);
}

/* The session that the sender says is its own. */
static int find_own(struct exd_daemon *d, uint64_t number, uint32_t pid, uint32_t *ret_index,
                    struct shm_error *err)
{
    const struct exd_session *session = find(d, number, ret_index);
    if (!session)
        return no_session(number, err);
    if (exd_session_pid(session) != (pid_t)pid)
        return shm_error_set(err, EPERM, "session %llu belongs to process %d, not to %u",
                             (unsigned long long)number, (int)exd_session_pid(session), pid);
    return 0;
}

static void hello(struct exd_daemon *d, struct prt_hello_reply *reply)
{
    const struct shm_store *s = exd_store_segment(d->store);
    reply->pid = s->header.writer_pid;
    reply->start = s->header.writer_start;
    reply->state = exd_daemon_state(d);
    reply->store_epoch = exd_store_epoch(d->store);
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        reply->workers += d->session[i] != NULL;
    reply->busy = exd_daemon_busy(d);
}

static int attach(struct exd_daemon *d, const struct prt_attach_request *request,
                  struct prt_attach_reply *reply, struct shm_error *err)
{
    struct shm_store *store = exd_store_segment(d->store);
    struct exd_session *session;
    int rc = exd_daemon_add_session(d, request, &session, err);
    if (rc < 0) {
        shm_counter_add(&store->counters.refused, 1);
        char who[32];
        snprintf(who, sizeof(who), "process %u", request->pid);
        log_refusal(d, who, shm_error_text(err));
        return rc;
    }
    struct exd_session_settings settings = exd_session_settings(session);
    reply->session = exd_session_number(session);
    reply->arena_generation = shm_counter_get(&store->counters.arena_generation);
    reply->arena_bytes = store->arena_bytes;
    reply->store_epoch = exd_store_epoch(d->store);
    memcpy(reply->arena_path, store->arena_path, sizeof(reply->arena_path));
    reply->policy = settings.stream.policy;
    reply->order = settings.stream.order;
    reply->depth = settings.stream.depth;
    reply->floor = settings.stream.floor;
    reply->link_gbps = settings.link_gbps;
    reply->link_latency_us = settings.link_latency_us;
    return 0;
}

static int detach(struct exd_daemon *d, const struct prt_detach_request *request, struct shm_error *err)
{
    uint32_t index;
    int rc = find_own(d, request->session, request->pid, &index, err);
    if (rc < 0)
        return rc;
    exd_log(EXD_LOG_INFO, "worker %s (pid %u) detached", exd_session_name(d->session[index]), request->pid);
    shm_counter_add(&exd_store_segment(d->store)->counters.detaches, 1);
    exd_event_detach(d->events, request->session, request->pid);
    exd_daemon_close_session(d, index, NULL);
    return 0;
}

static int configure(struct exd_daemon *d, const struct prt_configure_request *request,
                     struct prt_configure_reply *reply, struct shm_error *err)
{
    uint32_t index;
    struct exd_session *session = find(d, request->session, &index);
    if (!session)
        return no_session(request->session, err);
    int rc = exd_session_configure(session, request, err);
    if (rc < 0)
        return rc;
    struct exd_session_settings settings = exd_session_settings(session);
    reply->policy = settings.stream.policy;
    reply->order = settings.stream.order;
    reply->depth = settings.stream.depth;
    reply->floor = settings.stream.floor;
    reply->link_gbps = settings.link_gbps;
    reply->link_latency_us = settings.link_latency_us;
    return 0;
}

/* For the requests about the park: the session is the sender's, and there is a park. */
static int check_park(struct exd_daemon *d, uint64_t number, uint32_t pid, struct shm_error *err)
{
    uint32_t index;
    int rc = find_own(d, number, pid, &index, err);
    if (rc < 0)
        return rc;
    if (!d->start.park)
        return shm_error_set(err, ENOTSUP, "nothing is parked here: %s", d->start.park_note);
    return 0;
}

/* One case of the dispatch: decode, act, encode. A failure's body is all zero. */
#define HANDLE(name, NAME, action)                                                                           \
    case PRT_##NAME: {                                                                                       \
        struct prt_##name##_request request = {0};                                                           \
        rc = prt_##name##_request_decode(bytes, n, &request, &err);                                          \
        if (rc == 0)                                                                                         \
            rc = (action);                                                                                   \
        if (rc < 0)                                                                                          \
            memset(reply, 0, sizeof(*reply));                                                                \
        return prt_##name##_reply_encode(&reply->name, &h, rc, shm_error_text(&err));                        \
    }

#define HANDLE_PARK(name, NAME, act)                                                                         \
    HANDLE(name, NAME,                                                                                       \
           (rc = check_park(d, request.session, request.pid, &err)) < 0                                      \
               ? rc                                                                                          \
               : (rc = act(d->start.park, &request, &reply->name, &err), exd_start_show_park(d), rc))

/* Answers n bytes; returns the reply's size. */
static size_t answer(struct exd_daemon *d, const void *bytes, size_t n, union reply *reply)
{
    struct shm_error err = {0};
    struct prt_request_header h;
    memset(reply, 0, sizeof(*reply));
    int rc = prt_request_peek(bytes, n, PRT_VERSION, &h, &err);
    if (rc == 0) {
        switch (h.type) {
            HANDLE(hello, HELLO, (hello(d, &reply->hello), 0))
            HANDLE(attach, ATTACH, attach(d, &request, &reply->attach, &err))
            HANDLE(detach, DETACH, detach(d, &request, &err))
            HANDLE(configure, CONFIGURE, configure(d, &request, &reply->configure, &err))
            HANDLE(drain, DRAIN,
                   (exd_daemon_drain(d, request.deadline_ms, false, "a client"),
                    reply->drain.state = exd_daemon_state(d), reply->drain.busy = exd_daemon_busy(d), 0))
            HANDLE(stop, STOP,
                   (exd_daemon_drain(d, request.deadline_ms, true, "a client"),
                    reply->stop.state = exd_daemon_state(d), reply->stop.busy = exd_daemon_busy(d), 0))
            HANDLE_PARK(parkopen, PARKOPEN, exd_park_join)
            HANDLE_PARK(parkfind, PARKFIND, exd_park_find)
            HANDLE_PARK(parkreserve, PARKRESERVE, exd_park_reserve)
            HANDLE_PARK(parkcommit, PARKCOMMIT, exd_park_commit)
            HANDLE_PARK(parkdone, PARKDONE, exd_park_done)
        default:
            rc = shm_error_set(&err, EOPNOTSUPP, "control request of type %u is not in protocol version %u",
                               h.type, PRT_VERSION);
        }
    }
    /* no message of ours: the bare header, which every version understands */
    log_refusal(d, "a control request", shm_error_text(&err));
    prt_reply_fill(&reply->header, PRT_VERSION, h.type, sizeof(reply->header), &h, rc, shm_error_text(&err));
    return sizeof(reply->header);
}

void exd_control_handle(struct exd_daemon *d)
{
    for (int i = 0; i < 64; i++) { /* then let the loop see to its other sources */
        size_t n;
        int rc = prt_server_receive(d->server, d->message, sizeof(d->message), &n);
        if (rc == -EMSGSIZE)
            n = 0; /* answered as a request without a header */
        else if (rc < 0)
            return;
        /* answered before: the same again. Only what has a full header was remembered. */
        const struct prt_request_header *h = (const struct prt_request_header *)(const void *)d->message;
        size_t bytes = 0;
        const void *known = n >= sizeof(*h) ? prt_replay_find(d->replay, h->epoch, h->id, &bytes) : NULL;
        if (known) {
            prt_server_reply(d->server, known, bytes);
            continue;
        }
        union reply reply;
        bytes = answer(d, d->message, n, &reply);
        if (reply.header.epoch && reply.header.id)
            prt_replay_add(d->replay, reply.header.epoch, reply.header.id, &reply, bytes);
        rc = prt_server_reply(d->server, &reply, bytes);
        if (rc < 0 && rc != -EAGAIN)
            exd_log(EXD_LOG_WARNING, "a reply could not be sent: %s", strerror(-rc));
    }
}
