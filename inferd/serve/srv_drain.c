/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_drain.h"

#include "proto/prt_file.h"
#include "proto/prt_log.h"
#include "proto/prt_notify.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CANCEL_S 5 /* after the drain: for what was cancelled */
#define LEAVE_S  3 /* after the last answer: for clients to close */
#define TICK_US  20000

void srv_drain_note(struct srv_drain *d)
{
    struct prt_serve r = d->record;
    struct shm_error err = {0};
    struct srv_counts c = srv_queue_counts(d->server->queue);
    r.busy = c.waiting + c.running;
    r.state = d->again                                          ? PRT_SERVE_RESTARTING
              : d->server->draining && r.busy                   ? PRT_SERVE_DRAINING
              : d->server->draining                             ? PRT_SERVE_DRAINED
              : srv_engine_state(d->server->engine) == SRV_AWAY ? PRT_SERVE_AWAY
                                                                : PRT_SERVE_READY;
    if (!d->record.url[0] || (d->recorded && memcmp(&r, &d->record, sizeof r) == 0))
        return;
    if (prt_serve_write(&d->paths, &r, &err)) {
        if (!d->recorded)
            prt_log(PRT_LOG_WARNING, "'expertctl workers drain' and 'restart' won't find this worker: %s",
                    shm_error_text(&err));
    } else {
        d->record = r;
    }
    d->recorded = true;
}

void srv_drain_announce(struct srv_drain *d, const char *name)
{
    /* expertd's directory is there, and what the instance is called is known. */
    const struct inf_store_config *c = &d->server->defaults->engine.store;
    struct prt_serve others[PRT_SERVE_MAX];
    d->record.pid = (uint32_t)getpid();
    d->record.life = prt_random_epoch();
    snprintf(d->record.url, sizeof d->record.url, "%s", strncmp(name, "http", 4) == 0 ? name : "unix");
    prt_process_start(getpid(), &d->record.start);
    if (prt_paths_make(c->runtime_dir, c->instance, &d->paths, NULL) == 0)
        prt_serve_list(&d->paths, true, others, NULL);
}

static void cancel_job(void *ctx, const struct srv_job *job, bool running)
{
    struct srv_job ***at = ctx;
    (void)running;
    *(*at)++ = (struct srv_job *)job;
}

static void cancel_all(struct srv_drain *d)
{
    struct srv_counts c = srv_queue_counts(d->server->queue);
    struct srv_job **list = calloc(c.waiting + c.running + 1, sizeof *list), **end = list;
    if (!list)
        return;
    /* Only this thread submits, and jobs live until it has delivered their end. */
    srv_queue_each(d->server->queue, cancel_job, &end);
    while (end-- > list)
        srv_queue_cancel(d->server->queue, *end);
    free(list);
}

/* Requests that run past --drain-seconds are cut. */
static void cut_late(struct srv_drain *d, uint64_t past_ns)
{
    if (d->cancelled || past_ns < (uint64_t)d->server->options->drain_s * 1000000000u)
        return;
    prt_log(PRT_LOG_WARNING, "--drain-seconds are over: %u requests are cut",
            srv_http_counters(d->server->http)->busy);
    d->cancelled = true;
    cancel_all(d);
}

static void finish(struct srv_drain *d)
{
    d->again = d->ending == SRV_END_RESTART;
    if (d->again) { /* from here on a SIGTERM ends the process, as it would at its start */
        event_del(d->term);
        event_del(d->interrupt);
    }
    srv_drain_note(d);
    event_base_loopbreak(d->server->base);
}

static void on_tick(evutil_socket_t fd, short what, void *ctx)
{
    struct srv_drain *d = ctx;
    uint64_t now_ns = shm_now_ns(), past_ns = now_ns - d->drain_ns;
    const struct srv_http_counters *h = srv_http_counters(d->server->http);
    bool over = past_ns > (uint64_t)(d->server->options->drain_s + CANCEL_S) * 1000000000u;
    (void)fd;
    (void)what;
    srv_drain_note(d);
    if (d->ending == SRV_END_NONE) {
        if (d->record.state == PRT_SERVE_DRAINED)
            event_del(d->tick); /* until it is told what next */
        return;
    }
    if (h->busy) {
        d->quiet_ns = 0;
        cut_late(d, past_ns);
        if (over)
            finish(d);
        return;
    }
    if (!d->closed) {
        /* Nothing runs: what comes now waits in the socket's queue for the next life. */
        d->closed = true;
        srv_http_drain(d->server->http, false);
    }
    if (!d->quiet_ns)
        d->quiet_ns = now_ns;
    /* Last bytes on their way have what is left of the drain; a request may be arriving, too. */
    bool patient =
        srv_http_sending(d->server->http) ? !over : now_ns - d->quiet_ns < LEAVE_S * UINT64_C(1000000000);
    if (!h->connections || !patient || !d->drain_ns)
        finish(d);
}

/* Accepted requests finish; others get 503, or (no longer listening) wait in the socket's queue. */
static void begin_drain(struct srv_drain *d, enum srv_ending ending)
{
    struct timeval tick = {.tv_usec = TICK_US};
    bool first = !d->server->draining;
    d->server->draining = true;
    d->drain_ns = shm_now_ns();
    d->quiet_ns = 0;
    d->ending = ending;
    if (ending == SRV_END_STOP) {
        d->closed = true;
        prt_notify("STOPPING=1");
    } else {
        prt_notify(ending ? "STATUS=restarting: requests finish, new ones get 503"
                          : "STATUS=draining: requests finish, new ones get 503");
    }
    if (first || ending)
        prt_log(PRT_LOG_NOTICE, "%s: %u requests finish, new ones get 503",
                ending == SRV_END_STOP ? "stopping"
                : ending               ? "restarting"
                                       : "draining",
                srv_http_counters(d->server->http)->busy);
    srv_http_drain(d->server->http, ending != SRV_END_STOP);
    srv_drain_note(d);
    event_add(d->tick, &tick);
}

static void on_signal(evutil_socket_t sig, short what, void *ctx)
{
    struct srv_drain *d = ctx;
    (void)sig;
    (void)what;
    if (srv_engine_state(d->server->engine) == SRV_STARTING)
        _exit(0); /* nothing was promised to anybody yet */
    if (d->ending == SRV_END_STOP)
        d->drain_ns = 0; /* asked twice: at once */
    else
        begin_drain(d, SRV_END_STOP);
}

static void on_drain(evutil_socket_t sig, short what, void *ctx)
{
    struct srv_drain *d = ctx;
    (void)sig;
    (void)what;
    if (!d->server->draining)
        begin_drain(d, SRV_END_NONE);
}

static void on_restart(evutil_socket_t sig, short what, void *ctx)
{
    struct srv_drain *d = ctx;
    struct shm_error err = {0};
    (void)sig;
    (void)what;
    if (d->ending || srv_engine_state(d->server->engine) == SRV_STARTING)
        return; /* under way */
    if (srv_life_check(d->life, &err) == 0) {
        begin_drain(d, SRV_END_RESTART);
        return;
    }
    prt_log(PRT_LOG_WARNING, "%s", shm_error_text(&err));
    d->recorded = false; /* written whatever it says */
    snprintf(d->record.note, sizeof d->record.note, "%.255s", shm_error_text(&err));
    srv_drain_note(d);
}

static int on_each(struct srv_drain *d, int sig, event_callback_fn call, struct event **ret_event)
{
    *ret_event = evsignal_new(d->server->base, sig, call, d);
    return *ret_event ? event_add(*ret_event, NULL) : -1;
}

int srv_drain_open(struct srv_server *server, const struct srv_life *life, struct srv_drain *d)
{
    *d = (struct srv_drain){.server = server, .life = life};
    d->tick = event_new(server->base, -1, EV_PERSIST, on_tick, d);
    return !d->tick || on_each(d, SIGTERM, on_signal, &d->term) ||
                   on_each(d, SIGINT, on_signal, &d->interrupt) ||
                   on_each(d, PRT_SERVE_DRAIN, on_drain, &d->drain) ||
                   on_each(d, PRT_SERVE_RESTART, on_restart, &d->restart)
               ? -ENOMEM
               : 0;
}

void srv_drain_close(struct srv_drain *d)
{
    struct event **events[] = {&d->term, &d->interrupt, &d->drain, &d->restart, &d->tick};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) {
        if (*events[i])
            event_free(*events[i]);
        *events[i] = NULL;
    }
}

void srv_drain_forget(struct srv_drain *d)
{
    if (d->recorded)
        prt_serve_remove(&d->paths);
}
