/* SPDX-License-Identifier: MIT */
/* The daemon's workers: who is attached, whose session is being closed. */
#include "expertd/exd_daemon_priv.h"
#include "expertd/exd_log.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define CLOSE_WAIT_NS                                                                                        \
    UINT64_C(8000000000) /* of all sessions at the end; an issuer gives its link up after 5 s */

uint32_t exd_daemon_busy(struct exd_daemon *d)
{
    uint32_t busy = 0;
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        busy += d->session[i] && exd_session_busy(d->session[i]);
    return busy;
}

static void reap(struct exd_daemon *d)
{
    for (uint32_t i = 0; i < EXD_CLOSING_MAX; i++)
        if (d->closing[i] && exd_session_closed(d->closing[i]))
            exd_session_free(&d->closing[i]);
}

void exd_daemon_close_session(struct exd_daemon *d, uint32_t index, const char *why)
{
    struct exd_session *s = d->session[index];
    exd_store_clear_worker(d->store, index);
    epoll_ctl(d->epoll_fd, EPOLL_CTL_DEL, exd_session_pidfd(s), NULL);
    d->session[index] = NULL;
    if (d->start.park) {
        exd_park_leave(d->start.park, exd_session_number(s));
        exd_start_show_park(d);
    }
    exd_session_close(s, why);
    uint32_t free = 0;
    while (d->closing[free]) /* there is one: exd_daemon_add_session */
        free++;
    d->closing[free] = s;
}

/* Attached sessions and those still being closed. */
static uint32_t held(const struct exd_daemon *d)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        n += d->session[i] != NULL;
    for (uint32_t i = 0; i < EXD_CLOSING_MAX; i++)
        n += d->closing[i] != NULL;
    return n;
}

int exd_daemon_add_session(struct exd_daemon *d, const struct prt_attach_request *request,
                           struct exd_session **ret_session, struct shm_error *err)
{
    if (d->draining)
        return shm_error_set(err, ESHUTDOWN, "expertd is ending: attach to the next one");
    if (!d->serving)
        return shm_error_set(err, EAGAIN,
                             "expertd is still starting: attach when its state is loading or serving");
    uint32_t index = 0;
    while (index < SHM_STORE_WORKERS && d->session[index])
        index++;
    if (index == SHM_STORE_WORKERS)
        return shm_error_set(err, EBUSY,
                             "%u workers are attached, more do not fit: stop one, or use another instance",
                             SHM_STORE_WORKERS);
    if (held(d) >= EXD_CLOSING_MAX)
        return shm_error_set(
            err, EBUSY,
            "too many sessions are still being closed, their links are slow: attach again in "
            "a few seconds");
    const struct exd_options *o = d->options;
    struct exd_session_config config = {.arena = exd_arena_view(d->start.arena),
                                        .device = d->start.device,
                                        .stream = o->stream,
                                        .link_gbps = o->link_gbps,
                                        .link_latency_us = o->link_latency_us,
                                        .watchdog_ns = o->watchdog_ns,
                                        .batch = o->batch,
                                        .trace = o->trace,
                                        .trace_file = o->trace_file,
                                        .events = d->events,
                                        .wake_fd = d->wake_fd};
    struct exd_session *session;
    int rc = exd_session_open(&config, request, d->sessions + 1, &session, err);
    if (rc < 0)
        return rc;
    rc = exd_daemon_watch(d, exd_session_pidfd(session), (d->sessions + 1) << EXD_SOURCE_BITS | EXD_ON_PEER,
                          err);
    if (rc < 0) {
        exd_session_free(&session);
        return rc;
    }
    d->sessions++;
    d->session[index] = session;
    exd_store_set_worker(d->store, index, request, d->sessions, exd_session_name(session),
                         exd_session_gpu(session));
    shm_counter_add(&exd_store_segment(d->store)->counters.attaches, 1);
    exd_event_attach(d->events, d->sessions, request->pid, request->ring);
    exd_log(EXD_LOG_INFO, "worker %s (pid %u) attached: session %llu, ring of %u slots",
            exd_session_name(session), request->pid, (unsigned long long)d->sessions, request->ring);
    exd_mps_advise(d, index);
    *ret_session = session;
    return 0;
}

void exd_roster_ended(struct exd_daemon *d, uint64_t number)
{
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        if (d->session[i] && exd_session_number(d->session[i]) == number) {
            exd_log(EXD_LOG_INFO, "worker %s (pid %d) has ended: session %llu closed",
                    exd_session_name(d->session[i]), (int)exd_session_pid(d->session[i]),
                    (unsigned long long)number);
            shm_counter_add(&exd_store_segment(d->store)->counters.deaths, 1);
            exd_event_death(d->events, number, (uint32_t)exd_session_pid(d->session[i]));
            exd_daemon_close_session(d, i, NULL);
            return;
        }
}

void exd_roster_look(struct exd_daemon *d)
{
    uint64_t count;
    ssize_t ignored = read(d->wake_fd, &count, sizeof(count));
    (void)ignored;
    reap(d);
    struct shm_error line = {0};
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        if (d->session[i] && exd_session_faulted(d->session[i], &line)) {
            exd_log(EXD_LOG_WARNING, "worker %s (pid %d) is detached: %s", exd_session_name(d->session[i]),
                    (int)exd_session_pid(d->session[i]), line.text);
            exd_store_detail(d->store, line.text);
            shm_counter_add(&exd_store_segment(d->store)->counters.faults, 1);
            exd_event_fault(d->events, exd_session_number(d->session[i]),
                            (uint32_t)exd_session_pid(d->session[i]));
            exd_daemon_close_session(d, i, line.text);
        }
}

void exd_roster_close(struct exd_daemon *d, bool busy_only, const char *why)
{
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        if (d->session[i] && (!busy_only || exd_session_busy(d->session[i])))
            exd_daemon_close_session(d, i, why);
}

void exd_roster_end(struct exd_daemon *d)
{
    exd_roster_close(d, false, "expertd has ended: attach to the next one");
    uint64_t deadline_ns = shm_now_ns() + CLOSE_WAIT_NS;
    for (uint32_t i = 0; i < EXD_CLOSING_MAX; i++) {
        while (d->closing[i] && !exd_session_closed(d->closing[i]) && shm_now_ns() < deadline_ns)
            usleep(500);
        if (d->closing[i] && !exd_session_closed(d->closing[i])) {
            exd_log(EXD_LOG_ERROR, "worker %s: its link does not stop: ending without it",
                    exd_session_name(d->closing[i]));
            d->exit_status = 1;
            prt_server_close(&d->server);
            exd_store_destroy(&d->store);
            exd_store_unlock(&d->paths, &d->lock_fd);
            _exit(1); /* threads still use the arena: nothing below may be unmapped */
        }
        exd_session_free(&d->closing[i]);
    }
}
