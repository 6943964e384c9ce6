/* SPDX-License-Identifier: MIT */
#include "expertd/exd_daemon.h"

#include "expertd/exd_daemon_priv.h"
#include "expertd/exd_log.h"
#include "proto/prt_notify.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define HEARTBEAT_NS  UINT64_C(1000000000)
#define LOOK_BEATS    60
#define LOOK_MAX_NS   UINT64_C(5000000)
#define DRAIN_POLL_MS 10 /* how often busy issuers are looked at while draining */
int exd_daemon_watch(struct exd_daemon *d, int fd, uint64_t what, struct shm_error *err)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = what};
    if (epoll_ctl(d->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
        return shm_error_set(err, errno, "epoll: %s%s", strerror(errno), shm_error_remedy(errno));
    return 0;
}

uint32_t exd_daemon_state(struct exd_daemon *d)
{
    return atomic_load_explicit(&exd_store_segment(d->store)->state, memory_order_relaxed);
}

void exd_daemon_set_state(struct exd_daemon *d, uint32_t state)
{
    exd_store_set_state(d->store, state);
    exd_event_state(d->events, state);
}

/* One line to whoever started us and waits, once. */
static void tell_starter(struct exd_daemon *d, const char *line)
{
    if (d->ready_fd < 0)
        return;
    char text[SHM_ERROR_TEXT_BYTES + 16];
    int n = snprintf(text, sizeof(text), "%s\n", line);
    ssize_t ignored = write(d->ready_fd, text, (size_t)n); /* SIGPIPE is ignored: the starter may be gone */
    (void)ignored;
    close(d->ready_fd);
    d->ready_fd = -1;
}

/* An error that ends expertd: logged, shown, told, and the exit status. */
static void fail(struct exd_daemon *d, const struct shm_error *err)
{
    char line[SHM_ERROR_TEXT_BYTES + 16];
    exd_log(EXD_LOG_ERROR, "%s", shm_error_text(err));
    if (d->store)
        exd_store_detail(d->store, shm_error_text(err));
    snprintf(line, sizeof(line), "error: %s", shm_error_text(err));
    tell_starter(d, line);
    d->exit_status = 1;
}

/* ---- start, load, end ---- */

void exd_daemon_drain(struct exd_daemon *d, uint32_t deadline_ms, bool stop, const char *who)
{
    uint64_t deadline_ns = shm_now_ns() + (uint64_t)deadline_ms * 1000000u;
    bool sooner = !d->draining || deadline_ns < d->drain_deadline_ns;
    if (sooner)
        d->drain_deadline_ns = deadline_ns;
    if (!d->draining || (stop && !d->stopping)) {
        exd_log(EXD_LOG_INFO, "%s on behalf of %s: %u of the workers' streams still run, for at most %u ms",
                stop ? "ending" : "draining", who, exd_daemon_busy(d), deadline_ms);
        exd_store_detail(d->store, stop ? "ending" : "draining: no new streams");
        if (stop)
            prt_notify("STOPPING=1");
        if (stop && d->start.running) /* no worker yet that could wait for the rest of the model */
            exd_start_cancel(&d->start);
    }
    d->draining = true;
    d->stopping = d->stopping || stop;
    exd_daemon_set_state(d, SHM_STORE_DRAINING);
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        if (d->session[i])
            exd_session_drain(d->session[i], "expertd is draining: read again when it is back");
}

/* With the beat after something changed, then once a minute where that is cheap. */
static void look_at_memory(struct exd_daemon *d)
{
    if (!d->serving || (!d->look_soon && (++d->beats < LOOK_BEATS || d->look_ns > LOOK_MAX_NS)))
        return;
    d->look_soon = false;
    d->beats = 0;
    d->look_ns = exd_start_look(&d->start);
}

/* The start-up thread is done: the arena is there, or an error ends us. */
static void on_started(struct exd_daemon *d)
{
    uint64_t count;
    ssize_t ignored = read(d->start.done_fd, &count, sizeof(count));
    (void)ignored;
    struct shm_error err = {0};
    int rc = exd_start_finish(&d->start, &err);
    if (rc < 0) {
        if (rc != -ECANCELED || !d->stopping)
            fail(d, &err);
        d->stopping = d->draining = true;
        return;
    }
    struct shm_store *s = exd_store_segment(d->store);
    const struct shm_arena_view *view = exd_arena_view(d->start.arena);
    struct exd_arena_info info;
    exd_arena_info(d->start.arena, &info);
    snprintf(s->arena_path, sizeof(s->arena_path), "%s", info.path);
    snprintf(s->model_name, sizeof(s->model_name), "%.*s", (int)sizeof(view->catalog->hparams.name),
             view->catalog->hparams.name);
    memcpy(s->fingerprint, view->arena->fingerprint, sizeof(s->fingerprint));
    s->arena_bytes = info.bytes;
    shm_counter_set(&s->counters.arena_bytes, info.bytes);
    shm_counter_set(&s->counters.arena_generation, info.generation);
    shm_counter_set(&s->counters.arena_adopted, info.found == EXD_FOUND_ADOPTED);
    atomic_store_explicit(&s->pinned, info.pinned, memory_order_relaxed);
    atomic_store_explicit(&s->huge_pages, info.huge, memory_order_relaxed);
    snprintf(s->device, sizeof(s->device), "%s", exd_device_text(d->start.device));
    snprintf(s->park_note, sizeof(s->park_note), "%s", d->start.park_note);
    exd_start_show_park(d);
    exd_log(EXD_LOG_INFO, "park: %s%s", d->start.park ? "parked keys and values go to " : "", s->park_note);
    if (info.warning[0])
        exd_store_detail(d->store, info.warning);
    if (d->start.loader)
        snprintf(s->reader, sizeof(s->reader), "%s", exd_loader_describe(d->start.loader));
    else
        snprintf(s->reader, sizeof(s->reader), "none: the arena was adopted");
    if (d->start.loader && exd_daemon_watch(d, exd_loader_fd(d->start.loader), EXD_ON_LOADED, &err) < 0) {
        fail(d, &err);
        d->stopping = d->draining = true;
        return;
    }
    d->serving = true;
    d->look_soon = true;
    if (!d->draining)
        exd_daemon_set_state(d, d->start.loader ? SHM_STORE_LOADING : SHM_STORE_SERVING);
    if (!d->start.loader)
        shm_counter_set(&s->counters.ready_ns, shm_now_ns() - d->began_ns);
    exd_log(EXD_LOG_INFO, "instance %s takes workers: %s, %u layers x %u experts, arena %s (%s)%s%s",
            d->paths.instance, s->model_name[0] ? s->model_name : d->model_path,
            view->catalog->hparams.layers, view->catalog->hparams.experts, s->arena_path,
            d->start.loader ? "loading" : "adopted", d->start.loader ? ", " : "",
            d->start.loader ? s->reader : "");
    if (!d->start.loader)
        exd_start_loaded(&d->start);
    tell_starter(d, "ready");
    prt_notify("READY=1");
}

static void on_loaded(struct exd_daemon *d)
{
    struct shm_error err = {0};
    struct exd_reader_stats stats = {0};
    epoll_ctl(d->epoll_fd, EPOLL_CTL_DEL, exd_loader_fd(d->start.loader), NULL);
    int rc = exd_loader_wait(d->start.loader, &stats, &err);
    if (rc < 0) {
        if (rc == -ECANCELED && d->draining)
            return;
        fail(d, &err);
        exd_roster_close(d, false, shm_error_text(&err));
        d->stopping = d->draining = true;
        return;
    }
    struct shm_store *s = exd_store_segment(d->store);
    shm_counter_set(&s->counters.ready_ns, shm_now_ns() - d->began_ns);
    shm_counter_set(&s->counters.io_reads, stats.reads);
    shm_counter_set(&s->counters.io_retries, stats.retries);
    shm_counter_set(&s->counters.io_bytes, stats.bytes_read);
    d->look_soon = true;
    if (!d->draining)
        exd_daemon_set_state(d, SHM_STORE_SERVING);
    exd_log(EXD_LOG_INFO, "loaded %.2f GB in %.2f s (%.2f GB/s)", (double)stats.bytes_wanted / 1e9,
            (double)stats.elapsed_ns / 1e9,
            stats.elapsed_ns ? (double)stats.bytes_wanted / (double)stats.elapsed_ns : 0.0);
    exd_start_loaded(&d->start);
}

static void on_signal(struct exd_daemon *d)
{
    struct signalfd_siginfo info;
    while (read(d->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGHUP) {
            bool any = prt_log_reload(d->options->log_level_given);
            prt_log(PRT_LOG_NOTICE,
                    "SIGHUP: %s as it was at the start (model, arena, all options): start expertd again to "
                    "change "
                    "it",
                    any ? "everything else stays"
                        : "there is no --log-level @FILE to read anew, everything stays");
            continue;
        }
        bool again = d->stopping;
        exd_daemon_drain(d, again ? 0 : d->options->drain_ms, true,
                         info.ssi_signo == SIGINT ? "SIGINT" : "SIGTERM");
    }
}

/* While draining: break off what runs past the deadline. Returns true when it is time to go. */
static bool drained(struct exd_daemon *d)
{
    bool late = shm_now_ns() >= d->drain_deadline_ns;
    uint32_t busy = exd_daemon_busy(d);
    if (late && busy && !d->broken_off) {
        d->broken_off = true;
        exd_log(EXD_LOG_WARNING, "%u streams ran past the deadline and are broken off", busy);
        exd_roster_close(d, true, "expertd ended its streams after the deadline: read again when it is back");
    }
    return d->stopping && !d->start.running && (late || !busy);
}

/* About once a second. The service manager's dog is petted from here only: it lives on the main loop's
 * progress, the issuers have watchdogs of their own. A long start (memory is taken and locked) is no hang. */
static void on_timer(struct exd_daemon *d)
{
    uint64_t count;
    ssize_t ignored = read(d->timer_fd, &count, sizeof(count));
    (void)ignored;
    atomic_store_explicit(&exd_store_segment(d->store)->heartbeat_ns, shm_now_ns(), memory_order_relaxed);
    if (d->start.running)
        prt_notify("EXTEND_TIMEOUT_USEC=60000000");
    else if (prt_watchdog_ns())
        prt_notify("WATCHDOG=1");
}

static void dispatch(struct exd_daemon *d, uint64_t what)
{
    switch ((enum exd_source)(what & ((1u << EXD_SOURCE_BITS) - 1))) {
    case EXD_ON_SIGNAL:
        on_signal(d);
        break;
    case EXD_ON_TIMER:
        on_timer(d);
        look_at_memory(d);
        break;
    case EXD_ON_CONTROL:
        exd_control_handle(d);
        break;
    case EXD_ON_WAKE:
        exd_roster_look(d);
        break;
    case EXD_ON_STARTED:
        on_started(d);
        break;
    case EXD_ON_LOADED:
        on_loaded(d);
        break;
    case EXD_ON_PEER:
        exd_roster_ended(d, what >> EXD_SOURCE_BITS);
        break;
    case EXD_SOURCE_COUNT:
        break;
    }
}

static void loop(struct exd_daemon *d)
{
    while (!d->draining || !drained(d)) {
        struct epoll_event events[16];
        /* drained and waiting to be stopped: nothing to poll for */
        bool poll = d->draining && (d->stopping || exd_daemon_busy(d));
        int n = epoll_wait(d->epoll_fd, events, 16, poll ? DRAIN_POLL_MS : -1);
        for (int i = 0; i < n; i++)
            dispatch(d, events[i].data.u64);
    }
}

/* ---- set-up and end ---- */

static int open_sources(struct exd_daemon *d, struct shm_error *err)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    d->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    d->signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    d->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    d->start.done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->epoll_fd < 0 || d->signal_fd < 0 || d->timer_fd < 0 || d->wake_fd < 0 || d->start.done_fd < 0)
        return shm_error_set(err, errno, "event loop: %s%s", strerror(errno), shm_error_remedy(errno));
    uint64_t beat_ns = prt_watchdog_ns() / 3;
    if (!beat_ns || beat_ns > HEARTBEAT_NS)
        beat_ns = HEARTBEAT_NS;
    const struct timespec every = {.tv_sec = (time_t)(beat_ns / 1000000000),
                                   .tv_nsec = (long)(beat_ns % 1000000000)};
    timerfd_settime(d->timer_fd, 0, &(struct itimerspec){every, every}, NULL);
    int rc = exd_daemon_watch(d, d->signal_fd, EXD_ON_SIGNAL, err);
    if (rc == 0)
        rc = exd_daemon_watch(d, d->timer_fd, EXD_ON_TIMER, err);
    if (rc == 0)
        rc = exd_daemon_watch(d, d->wake_fd, EXD_ON_WAKE, err);
    if (rc == 0)
        rc = exd_daemon_watch(d, d->start.done_fd, EXD_ON_STARTED, err);
    return rc;
}

static int set_up(struct exd_daemon *d, struct shm_error *err)
{
    const struct exd_options *o = d->options;
    int rc = prt_paths_make(o->runtime_dir, o->instance, &d->paths, err);
    if (rc < 0)
        return rc;
    char *model = realpath(o->model, NULL);
    if (!model)
        return shm_error_set(err, errno, "model %s: %s: name another with --model", o->model,
                             strerror(errno));
    size_t n = strlen(model);
    if (n < sizeof(d->model_path))
        memcpy(d->model_path, model, n + 1);
    free(model);
    if (n >= sizeof(d->model_path))
        return shm_error_set(err, ENAMETOOLONG, "model %.100s...: its path has %zu bytes, at most %zu fit",
                             o->model, n, sizeof(d->model_path) - 1);
    rc = prt_paths_create(&d->paths, err);
    if (rc < 0)
        return rc;
    rc = exd_store_lock(&d->paths, &d->lock_fd, err);
    if (rc < 0)
        return rc;
    rc = open_sources(d, err);
    if (rc < 0)
        return rc;
    d->replay = prt_replay_new();
    if (!d->replay)
        return shm_error_set(err, ENOMEM, "no memory for the replay table; free some");
    unlink(d->paths.socket); /* under the lock: whoever made it is dead */
    rc = exd_store_create(&d->paths, d->model_path, o, &d->store, err);
    if (rc < 0)
        return rc;
    exd_events_create(&d->paths, &d->events);
    exd_event_state(d->events, SHM_STORE_STARTING);
    rc = prt_server_open(d->paths.socket, &d->server, err);
    if (rc == 0)
        rc = exd_daemon_watch(d, prt_server_fd(d->server), EXD_ON_CONTROL, err);
    if (rc == 0)
        rc = exd_start_begin(d, err);
    return rc;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

int exd_daemon_run(const struct exd_options *options)
{
    struct exd_daemon *d = calloc(1, sizeof(*d));
    if (!d) {
        exd_log(EXD_LOG_ERROR, "no memory to start with; free some");
        return 1;
    }
    struct shm_error err = {0};
    exd_log_set_level(options->log_level);
    umask(077);
    d->options = options;
    d->began_ns = shm_now_ns();
    d->ready_fd = options->ready_fd;
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error with a name, not a death */
    d->lock_fd = d->epoll_fd = d->signal_fd = d->timer_fd = d->wake_fd = d->start.done_fd = -1;
    if (set_up(d, &err) < 0)
        fail(d, &err);
    else
        loop(d);
    if (d->store)
        exd_roster_end(d);
    prt_server_close(&d->server); /* first: nobody finds what is going away */
    exd_start_destroy(&d->start, options->keep);
    exd_event_state(d->events, SHM_STORE_STOPPED);
    exd_events_destroy(&d->events);
    exd_store_destroy(&d->store);
    exd_store_unlock(&d->paths, &d->lock_fd);
    prt_replay_free(&d->replay);
    int status = d->exit_status;
    if (status == 0) {
        tell_starter(d, "error: stopped before it was ready");
        exd_log(EXD_LOG_INFO, "ended");
    }
    close_fd(&d->ready_fd);
    close_fd(&d->start.done_fd);
    close_fd(&d->wake_fd);
    close_fd(&d->timer_fd);
    close_fd(&d->signal_fd);
    close_fd(&d->epoll_fd);
    free(d);
    return status;
}
