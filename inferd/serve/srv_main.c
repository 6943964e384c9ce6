/* SPDX-License-Identifier: MIT */
/* The command `serve`: starts the parts, runs the event loop, ends them. */
#include "inferd/inf_cmd.h"
#include "inferd/serve/srv_drain.h"
#include "proto/prt_log.h"
#include "proto/prt_notify.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define HOLD_S 10 /* what connections wait for the model before they are told to come back */

struct serve {
    struct srv_server server;
    struct inf_options o;
    int state_fd, status;
    char name[128];
    bool announced;
    struct event *jobs, *state, *hangup, *beat, *hold, *watchdog;
    struct srv_life life;
    struct srv_drain drain;
    uint64_t progress;
};

static void on_jobs(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    (void)fd;
    (void)what;
    srv_queue_deliver(v->server.queue);
}

static void become_ready(struct serve *v)
{
    struct srv_server *s = &v->server;
    const struct srv_info *info = srv_engine_info(s->engine);
    if (!s->informed) {
        s->informed = true;
        if (inf_template_find(info->chat_template, info->chat_template_bytes, v->o.chat_template,
                              &s->chat_error, &s->chat)) {
            s->chat = NULL;
            prt_log(PRT_LOG_WARNING, "no chat (completions work): %s", shm_error_text(&s->chat_error));
        }
    }
    if (v->announced)
        return;
    v->announced = true;
    srv_drain_announce(&v->drain, v->name);
    srv_http_hold(s->http, false);
    prt_log(PRT_LOG_NOTICE,
            "serving '%s' (%s; context %u, %u requests at once, keys and values of %u tokens: "
            "%.1f MiB, template %s) on %s",
            srv_model_name(s), info->device, info->ctx, info->parallel, info->kv_tokens, info->kv_mib,
            s->chat ? inf_template_name(s->chat) : "none", v->name);
    prt_notify("READY=1");
}

/* The engine's state changed. */
static void on_state(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    uint64_t n;
    (void)what;
    if (read(fd, &n, sizeof n) < 0 && errno != EAGAIN)
        return;
    enum srv_state state = srv_engine_state(v->server.engine);
    srv_status_count(&v->server);
    if (state == SRV_READY) {
        become_ready(v);
        srv_drain_note(&v->drain);
    } else if (state == SRV_AWAY) {
        srv_drain_note(&v->drain);
    } else if (state == SRV_FAILED) {
        struct srv_status *status = malloc(sizeof *status);
        if (status) {
            srv_engine_status(v->server.engine, status);
            prt_log(PRT_LOG_ERROR, "%s", status->error);
        }
        free(status);
        v->status = 1;
        event_base_loopbreak(v->server.base);
    }
}

static void on_beat(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    (void)fd;
    (void)what;
    srv_answers_beat(&v->server);
    srv_status_count(&v->server);
}

/* What can be read anew while it runs is: keys and log level. Requests that were let in go on. */
static void on_hangup(evutil_socket_t sig, short what, void *ctx)
{
    struct serve *v = ctx;
    struct srv_server *s = &v->server;
    struct shm_error err = {0};
    char **keys = NULL;
    unsigned n = 0;
    const char *file = s->options->api_key_file;
    (void)sig;
    (void)what;
    bool any = prt_log_reload(s->options->log_level);
    if (file && srv_keys_read(file, &keys, &n, &err)) {
        prt_log(PRT_LOG_WARNING, "SIGHUP: the keys stay as they were: %s", shm_error_text(&err));
    } else if (file) {
        srv_keys_free(&s->keys, s->n_keys);
        s->keys = keys;
        s->n_keys = n;
        prt_log(PRT_LOG_NOTICE, "SIGHUP: %u keys, read anew from %.300s", n, file);
    }
    prt_log(PRT_LOG_NOTICE,
            "SIGHUP: %s stays as it was at the start: 'expertctl workers restart %d' starts the program "
            "anew, which "
            "makes an upgrade of it take effect; options change by another start",
            any || file ? "everything else"
                        : "everything (there is no --api-key-file and no --log-level @FILE)",
            (int)getpid());
}

/* Connections have waited for the model long enough. */
static void on_hold(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    (void)fd;
    (void)what;
    srv_http_hold(v->server.http, false);
}

static void add_progress(void *ctx, const struct srv_job *job, bool running)
{
    uint64_t *sum = ctx;
    (void)running;
    *sum += (uint64_t)atomic_load(&job->read) + atomic_load(&job->written);
}

/* The service manager's dog is petted by this loop, and only while what is computed gets on: a stuck engine
 * would otherwise look alive. Waiting for an expertd is no reason to be killed. */
static void on_watchdog(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    struct srv_counts c = srv_queue_counts(v->server.queue);
    uint64_t progress = c.done + c.cancelled + c.submitted;
    (void)fd;
    (void)what;
    srv_queue_each(v->server.queue, add_progress, &progress);
    if (progress != v->progress || !c.running || srv_engine_state(v->server.engine) != SRV_READY)
        prt_notify("WATCHDOG=1");
    v->progress = progress;
}

/* An event of the loop; NULL event: no memory. */
static int add(struct serve *v, struct event **event, int fd, short what, event_callback_fn call,
               const struct timeval *every)
{
    *event = event_new(v->server.base, fd, what, call, v);
    if (!*event)
        return -ENOMEM;
    if (every || fd >= 0)
        event_add(*event, every);
    return 0;
}

static int add_events(struct serve *v, bool inherited)
{
    const struct timeval beat = {.tv_sec = SRV_BEAT_S}, hold = {.tv_sec = HOLD_S};
    uint64_t watchdog_us = prt_watchdog_ns() / 3000;
    const struct timeval pet = {.tv_sec = (time_t)(watchdog_us / 1000000),
                                .tv_usec = (suseconds_t)(watchdog_us % 1000000)};
    if (add(v, &v->jobs, srv_queue_fd(v->server.queue), EV_READ | EV_PERSIST, on_jobs, NULL) ||
        add(v, &v->state, v->state_fd, EV_READ | EV_PERSIST, on_state, NULL) ||
        add(v, &v->hangup, SIGHUP, EV_SIGNAL | EV_PERSIST, on_hangup, NULL) ||
        add(v, &v->beat, -1, EV_PERSIST, on_beat, &beat) ||
        add(v, &v->hold, -1, 0, on_hold, inherited ? &hold : NULL) ||
        add(v, &v->watchdog, -1, EV_PERSIST, on_watchdog, watchdog_us ? &pet : NULL) ||
        srv_drain_open(&v->server, &v->life, &v->drain))
        return -ENOMEM;
    if (inherited) /* somebody keeps the socket over lives of ours: its connections wait for the model */
        srv_http_hold(v->server.http, true);
    return 0;
}

static int open_parts(struct serve *v, struct shm_error *err)
{
    struct srv_server *s = &v->server;
    const struct inf_serve_options *o = s->options;
    bool public = false, inherited = false;
    int fd = -1, rc = 0;
    if (o->api_key_file && (rc = srv_keys_read(o->api_key_file, &s->keys, &s->n_keys, err)))
        return rc;
    if ((rc = srv_listen(o->listen, v->name, &public, &inherited, &fd, err)))
        return rc;
    if (public && !s->n_keys)
        prt_log(PRT_LOG_WARNING,
                "%s can be reached from other machines and needs no key: consider --api-key-file", v->name);
    v->state_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->base = event_base_new();
    s->stats = srv_stats_new();
    if (v->state_fd < 0 || !s->base || !s->stats || (rc = srv_queue_create(o->queue, &s->queue))) {
        close(fd);
        return rc ? rc : -ENOMEM;
    }
    srv_queue_show(s->queue, srv_stats_segment(s->stats));
    const struct srv_http_config http = {.fd = fd,
                                         .header_max = (size_t)o->header_kb << 10,
                                         .body_max = (size_t)o->body_mb << 20,
                                         .output_max = (size_t)o->send_kb << 10,
                                         .connections_max = o->connections,
                                         .header_s = o->read_s,
                                         .body_s = o->read_s,
                                         .idle_s = 2 * o->read_s,
                                         .write_s = o->write_s,
                                         .on_head = srv_on_head,
                                         .on_request = srv_on_request,
                                         .on_refuse = srv_on_refuse,
                                         .on_done = srv_on_done,
                                         .ctx = s};
    v->life.listen_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if ((rc = srv_http_create(s->base, &http, &s->http))) {
        close(fd);
        return rc;
    }
    if ((rc = add_events(v, inherited)))
        return rc;
    const struct srv_engine_config engine = {.options = &v->o,
                                             .queue = s->queue,
                                             .stats = s->stats,
                                             .parallel = o->parallel,
                                             .gap_ms = o->gap_ms,
                                             .resume_ms = o->resume_s * 1000,
                                             .event_fd = v->state_fd};
    return srv_engine_start(&engine, &s->engine);
}

static void close_parts(struct serve *v)
{
    struct srv_server *s = &v->server;
    struct event *events[] = {v->jobs, v->state, v->hangup, v->beat, v->hold, v->watchdog};
    if (s->http)
        srv_http_destroy(&s->http); /* cancels what still runs */
    if (s->queue)
        srv_queue_finish(s->queue);
    if (s->engine)
        srv_engine_join(&s->engine);
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i])
            event_free(events[i]);
    srv_drain_close(&v->drain);
    srv_queue_destroy(&s->queue);
    srv_stats_free(&s->stats);
    srv_keys_free(&s->keys, s->n_keys);
    srv_http_base_free(&s->base);
    if (v->state_fd >= 0)
        close(v->state_fd);
}

static int fail(int rc, const struct shm_error *err)
{
    if (err->code)
        prt_log(PRT_LOG_ERROR, "%s", shm_error_text(err));
    else
        prt_log(PRT_LOG_ERROR, "%s%s", strerror(-rc), shm_error_remedy(rc));
    return 1;
}

int inf_cmd_serve(int argc, char **argv)
{
    struct serve v = {.state_fd = -1};
    struct shm_error err = {0};
    if (srv_life_note(&v.life, argc, argv))
        srv_life_clear(&v.life);
    inf_options_parse(
        argc, argv, INF_GROUP_ENGINE | INF_GROUP_SERVE,
        "Serves the model over HTTP: OpenAI's chat completions and completions, Anthropic's messages.", &v.o);
    prt_log_set_level(v.o.serve.level);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    v.server.options = &v.o.serve;
    v.server.defaults = &v.o;
    v.server.start_ns = shm_now_ns();
    v.server.created = time(NULL);
    int rc = open_parts(&v, &err);
    if (rc)
        v.status = fail(rc, &err);
    else
        event_base_dispatch(v.server.base);
    close_parts(&v);
    if (v.drain.again) {
        srv_life_again(&v.life, &err);
        v.status = fail(err.code, &err);
    }
    srv_drain_forget(&v.drain);
    srv_life_clear(&v.life);
    return v.status;
}
