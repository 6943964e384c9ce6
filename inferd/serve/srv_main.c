/* SPDX-License-Identifier: MIT */
/* The command `serve`: starts the parts, runs the event loop, ends them. */
#include "inferd/inf_cmd.h"
#include "inferd/serve/srv_server.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define CANCEL_S 5 /* after the drain: for what was cancelled */
#define LEAVE_S  3 /* after the last answer: for clients to close */

struct serve {
    struct srv_server server;
    struct inf_options o;
    int state_fd, status;
    char name[128];
    bool announced, cancelled;
    struct event *jobs, *state, *term, *interrupt, *tick, *beat;
    uint64_t drain_ns; /* since when it drains; 0: no more patience */
    uint64_t quiet_ns; /* since when nothing is under way any more */
};

static void stop(struct serve *v, int status)
{
    v->status = status;
    event_base_loopbreak(v->server.base);
}

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
            fprintf(stderr, "<4>inferd: no chat (completions work): %s\n", shm_error_text(&s->chat_error));
        }
    }
    if (v->announced)
        return;
    v->announced = true;
    if (!v->o.quiet)
        fprintf(stderr,
                "<5>inferd: serving '%s' (%s; context %u, %u requests at once, keys and values of %u tokens: "
                "%.1f MiB, template %s) on %s\n",
                srv_model_name(s), info->device, info->ctx, info->parallel, info->kv_tokens, info->kv_mib,
                s->chat ? inf_template_name(s->chat) : "none", v->name);
    srv_notify("READY=1");
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
    if (state == SRV_READY) {
        become_ready(v);
    } else if (state == SRV_FAILED) {
        struct srv_status *status = malloc(sizeof *status);
        if (status) {
            srv_engine_status(v->server.engine, status);
            fprintf(stderr, "inferd: %s\n", status->error);
        }
        free(status);
        stop(v, 1);
    }
}

static void cancel_job(void *ctx, const struct srv_job *job, bool running)
{
    struct srv_job ***at = ctx;
    (void)running;
    *(*at)++ = (struct srv_job *)job;
}

static void cancel_all(struct serve *v)
{
    struct srv_counts c = srv_queue_counts(v->server.queue);
    struct srv_job **list = calloc(c.waiting + c.running + 1, sizeof *list), **end = list;
    if (!list)
        return;
    /* Only this thread submits, and jobs live until it has delivered their end. */
    srv_queue_each(v->server.queue, cancel_job, &end);
    while (end-- > list)
        srv_queue_cancel(v->server.queue, *end);
    free(list);
}

static void on_tick(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    uint64_t now_ns = shm_now_ns(), past_ns = now_ns - v->drain_ns;
    (void)fd;
    (void)what;
    bool over = past_ns > (uint64_t)(v->server.options->drain_s + CANCEL_S) * 1000000000u;
    if (!srv_http_counters(v->server.http)->busy) {
        if (!v->quiet_ns)
            v->quiet_ns = now_ns;
        /* Last bytes on their way have what is left of the drain. */
        bool patient =
            srv_http_sending(v->server.http) ? !over : now_ns - v->quiet_ns < LEAVE_S * 1000000000ull;
        if (!srv_http_counters(v->server.http)->connections || !patient || !v->drain_ns)
            stop(v, 0);
        return;
    }
    v->quiet_ns = 0;
    if (past_ns < (uint64_t)v->server.options->drain_s * 1000000000u)
        return;
    if (!v->cancelled)
        fprintf(stderr, "<4>inferd: --drain-seconds are over: %u requests are cut\n",
                srv_http_counters(v->server.http)->busy);
    v->cancelled = true;
    cancel_all(v);
    if (over)
        stop(v, 0);
}

static void on_beat(evutil_socket_t fd, short what, void *ctx)
{
    struct serve *v = ctx;
    (void)fd;
    (void)what;
    srv_answers_beat(&v->server);
}

static void on_signal(evutil_socket_t sig, short what, void *ctx)
{
    struct serve *v = ctx;
    struct timeval tick = {.tv_usec = 20000};
    (void)sig;
    (void)what;
    if (srv_engine_state(v->server.engine) == SRV_STARTING)
        _exit(0); /* nothing was promised to anybody yet */
    if (v->server.draining) {
        v->drain_ns = 0; /* asked twice: at once */
        return;
    }
    v->server.draining = true;
    v->drain_ns = shm_now_ns();
    srv_notify("STOPPING=1");
    if (!v->o.quiet)
        fprintf(stderr, "<5>inferd: stopping: %u requests finish, new ones get 503\n",
                srv_http_counters(v->server.http)->busy);
    srv_http_drain(v->server.http);
    event_add(v->tick, &tick);
}

static int open_parts(struct serve *v, struct shm_error *err)
{
    struct srv_server *s = &v->server;
    const struct inf_serve_options *o = s->options;
    bool public = false;
    int fd = -1, rc = 0;
    if (o->api_key_file && (rc = srv_keys_read(o->api_key_file, &s->keys, &s->n_keys, err)))
        return rc;
    if ((rc = srv_listen(o->listen, v->name, &public, &fd, err)))
        return rc;
    if (public && !s->n_keys)
        fprintf(
            stderr,
            "<4>inferd: %s can be reached from other machines and needs no key: consider --api-key-file\n",
            v->name);
    v->state_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->base = event_base_new();
    s->stats = srv_stats_new();
    if (v->state_fd < 0 || !s->base || !s->stats || (rc = srv_queue_create(o->queue, &s->queue))) {
        close(fd);
        return rc ? rc : -ENOMEM;
    }
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
    if ((rc = srv_http_create(s->base, &http, &s->http))) {
        close(fd);
        return rc;
    }
    v->jobs = event_new(s->base, srv_queue_fd(s->queue), EV_READ | EV_PERSIST, on_jobs, v);
    v->state = event_new(s->base, v->state_fd, EV_READ | EV_PERSIST, on_state, v);
    v->term = evsignal_new(s->base, SIGTERM, on_signal, v);
    v->interrupt = evsignal_new(s->base, SIGINT, on_signal, v);
    v->tick = event_new(s->base, -1, EV_PERSIST, on_tick, v);
    v->beat = event_new(s->base, -1, EV_PERSIST, on_beat, v);
    if (!v->jobs || !v->state || !v->term || !v->interrupt || !v->tick || !v->beat)
        return -ENOMEM;
    const struct timeval beat = {.tv_sec = SRV_BEAT_S};
    event_add(v->beat, &beat);
    event_add(v->jobs, NULL);
    event_add(v->state, NULL);
    event_add(v->term, NULL);
    event_add(v->interrupt, NULL);
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
    struct event *events[] = {v->jobs, v->state, v->term, v->interrupt, v->tick, v->beat};
    if (s->http)
        srv_http_destroy(&s->http); /* cancels what still runs */
    if (s->queue)
        srv_queue_finish(s->queue);
    if (s->engine)
        srv_engine_join(&s->engine);
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i])
            event_free(events[i]);
    srv_queue_destroy(&s->queue);
    srv_stats_free(&s->stats);
    srv_keys_free(&s->keys, s->n_keys);
    srv_http_base_free(&s->base);
    if (v->state_fd >= 0)
        close(v->state_fd);
}

int inf_cmd_serve(int argc, char **argv)
{
    struct serve v = {.state_fd = -1};
    struct shm_error err = {0};
    inf_options_parse(
        argc, argv, INF_GROUP_ENGINE | INF_GROUP_SERVE,
        "Serves the model over HTTP: OpenAI's chat completions and completions, Anthropic's messages.", &v.o);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    v.server.options = &v.o.serve;
    v.server.defaults = &v.o;
    v.server.start_ns = shm_now_ns();
    v.server.created = time(NULL);
    int rc = open_parts(&v, &err);
    if (rc)
        v.status = inf_cmd_fail(rc, &err);
    else
        event_base_dispatch(v.server.base);
    close_parts(&v);
    return v.status;
}
