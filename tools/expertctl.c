/* SPDX-License-Identifier: MIT */
#include "tools/ctl.h"
#include "tools/ctl_doctor.h"

#include "proto/prt_file.h"

#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *argp_program_version = "expertctl " EXPERTD_VERSION;
error_t argp_err_exit_status = 2;

#define DEADLINE_S        10
#define WORKER_DEADLINE_S 120

static volatile sig_atomic_t interrupted;

static void on_signal(int signo)
{
    (void)signo;
    interrupted = 1;
}

struct command {
    const char *name;
    int (*show)(const struct ctl_snapshot *, const struct ctl_options *); /* NULL: a call */
    int (*call)(struct prt_client *, const struct ctl_options *, struct shm_error *);
    bool prints; /* a call that prints its own answer */
};

static int call_drain(struct prt_client *client, const struct ctl_options *o, struct shm_error *err)
{
    return prt_client_drain(client, (uint32_t)(o->deadline_s * 1e3), NULL, err);
}

static int call_stop(struct prt_client *client, const struct ctl_options *o, struct shm_error *err)
{
    return prt_client_stop(client, (uint32_t)(o->deadline_s * 1e3), true, err);
}

static const struct command commands[] = {
    {"status", ctl_show_status, NULL, false},
    {"workers", ctl_show_workers, NULL, false},
    {"rings", ctl_show_rings, NULL, false},
    {"trace", ctl_show_trace, NULL, false},
    {"counters", ctl_show_counters, NULL, false},
    {"metrics", ctl_show_metrics, NULL, false},
    {"verify", ctl_verify, NULL, false},
    {"configure", NULL, ctl_configure, true},
    {"drain", NULL, call_drain, false},
    {"stop", NULL, call_stop, false},
    {"doctor", NULL, NULL, true},
    {"evict", NULL, NULL, true},
};

static const char doc[] =
    "Looks into a running expertd, changes a worker's settings, or tells it to drain or stop.\v"
    "Commands:\n"
    "  status     the instance: model, arena, defaults, sessions\n"
    "  workers    attached workers and what they did so far; with drain or restart and PID... or --all: see "
    "below\n"
    "  rings      per worker: layers, head, landed, outstanding, dropped, slot states\n"
    "  trace      per worker: what became of its last chunks; with show, record FILE or export: events, see "
    "below\n"
    "  counters   every counter of expertd and its workers\n"
    "  metrics    the same for Prometheus: a file, or over loopback HTTP\n"
    "  verify     recompute every checksum of the arena\n"
    "  doctor     what this host has for expertd and its workers, and what to do about what it lacks\n"
    "  configure  settings of a live worker, from its next stream on\n"
    "  drain      no new streams and sessions from now on\n"
    "  stop       drain, then end expertd; returns when it has ended\n"
    "  evict      give back the memory of the arena that a stopped or drained INSTANCE keeps\n"
    "\n"
    "'workers drain' has servers (inferd serve) finish what they accepted and answer 503 to the rest. "
    "'workers "
    "restart' does so with one after the other, has each execute its program anew with the same arguments "
    "and "
    "listening socket, and waits until it is ready. Both work while expertd is away.\n"
    "\n"
    "'trace show [FILE]' prints the last events of expertd and its workers: streams, issues, drops, "
    "landings, "
    "publications, releases, waits. 'trace record FILE' writes them to a file as they come, until it is "
    "interrupted. 'trace export [FILE]' makes Chrome's trace format of them, for Perfetto. FILE is what "
    "record "
    "wrote, or what a dead expertd left (events.before in the instance's directory); without it the rings of "
    "the instance are read. 'trace chunks' is the same as 'trace' alone.\n"
    "\n"
    "All but these and the last four only look at shared memory, read-only: they work while "
    "expertd is stopped by SIGSTOP and "
    "disturb no stream. Exit status: 0 as it should be, 1 a problem was seen, 2 can't "
    "attach, 3 another layout or "
    "protocol version.";

enum {
    OPT_RUNTIME_DIR = 0x100,
    OPT_JSON,
    OPT_DEADLINE,
    OPT_SESSION,
    OPT_STREAM,
    OPT_ORDER,
    OPT_DEPTH,
    OPT_FLOOR,
    OPT_GBPS,
    OPT_LATENCY,
    OPT_LIST,
    OPT_DETAIL,
    OPT_LISTEN,
    OPT_SECONDS,
    OPT_ARENA_DIR
};

static const struct argp_option options[] = {
    {"instance", 'i', "NAME", 0, "Instance to look at (default: default)", 0},
    {"runtime-dir", OPT_RUNTIME_DIR, "DIR", 0,
     "Where instances live (default: $XDG_RUNTIME_DIR, /run for root)", 0},
    {"json", OPT_JSON, 0, 0, "For programs: one JSON value", 0},
    {"watch", 'w', "SECONDS", 0, "Show again and again until interrupted", 0},
    {"worker", 'p', "PID", 0, "Only this worker", 0},
    {"count", 'n', "N", 0,
     "trace: chunks of each worker, newest last (default: 16); trace show: events (default: 50)", 0},
    {"seconds", OPT_SECONDS, "X", 0, "trace record: so long instead of until interrupted; 0: what is there",
     0},
    {"list", OPT_LIST, 0, 0, "counters: what is counted, with units and meaning; needs no expertd", 0},
    {"detail", OPT_DETAIL, 0, 0, "counters, metrics: also those of each layer and others rarely wanted", 0},
    {"output", 'o', "FILE", 0,
     "metrics: write FILE, whole at any time (node_exporter's textfile collector); trace export: write FILE",
     0},
    {"listen", OPT_LISTEN, "[ADDRESS:]PORT", 0,
     "metrics: answer GET /metrics there, a loopback address, until interrupted; 0: any port", 0},
    {"deadline", OPT_DEADLINE, "SECONDS", 0,
     "drain, stop: how long running streams may take (default: 10); workers drain, restart: how long each "
     "may take (default: 120)",
     0},
    {"model", 'm', "FILE", 0, "doctor: a model (of a split one: any shard) whose needs are looked at", 0},
    {"arena-dir", OPT_ARENA_DIR, "DIR", 0, "doctor: where its arena is to go (default: as expertd chooses)",
     0},
    {"all", 'a', 0, 0, "workers drain, restart: every server of the instance", 0},
    {"session", OPT_SESSION, "N", 0, "configure: the worker by its session (else by --worker)", 0},
    {"stream", OPT_STREAM, "full|routed", 0, "configure: copy every streamed expert, or only routed ones", 0},
    {"order", OPT_ORDER, "index|recent|predicted", 0, "configure: order inside a layer", 0},
    {"depth", OPT_DEPTH, "N", 0, "configure: most guesses outstanding (routed)", 0},
    {"floor", OPT_FLOOR, "TOKENS", 0, "configure: smallest chunk that streams ahead of the router", 0},
    {"link-gbps", OPT_GBPS, "X", 0, "configure: pace the link to X * 1e9 bytes a second; 0: unpaced", 0},
    {"link-latency-us", OPT_LATENCY, "X", 0, "configure: add X microseconds to each copy; 0: none", 0},
    {0},
};

struct parsed {
    struct ctl_options options;
    const struct command *command;
};

/* A number in (low, high]; complains through argp. */
static double number(struct argp_state *state, const char *option, const char *arg, double low, double high)
{
    char *end;
    errno = 0;
    double value = strtod(arg, &end);
    if (errno || *end || end == arg || !(value > low && value <= high))
        argp_error(state, "--%s: '%s' is not a number above %g and up to %g", option, arg, low, high);
    return value;
}

/* A whole one from 1 on. */
static uint32_t whole(struct argp_state *state, const char *option, const char *arg, uint64_t high)
{
    uint64_t n = 0;
    struct shm_error err = {0};
    if (shm_number_parse(option, arg, 1, high, &n, &err))
        argp_error(state, "%s", shm_error_text(&err));
    return (uint32_t)n;
}

/* A setting of configure; rc and err from its parser. */
static error_t setting(struct argp_state *state, int rc, const struct shm_error *err)
{
    if (rc)
        argp_error(state, "%s", shm_error_text(err));
    return 0;
}

static error_t parse_setting(int key, const char *arg, struct argp_state *state,
                             struct prt_configure_request *r)
{
    struct shm_error err = {0};
    uint64_t n = 0;
    double *x = key == OPT_GBPS ? &r->link_gbps : &r->link_latency_us;
    switch (key) {
    case OPT_SESSION:
        return setting(state, shm_number_parse("--session", arg, 1, UINT64_MAX, &r->session, &err), &err);
    case OPT_STREAM:
        return setting(state, shm_policy_parse("--stream", arg, &r->policy, &err), &err);
    case OPT_ORDER:
        return setting(state, shm_order_parse("--order", arg, &r->order, &err), &err);
    case OPT_DEPTH:
        setting(state, shm_number_parse("--depth", arg, 1, SHM_RING_MAX, &n, &err), &err);
        r->depth = (uint32_t)n;
        return 0;
    case OPT_FLOOR:
        setting(state, shm_number_parse("--floor", arg, 1, UINT32_MAX, &n, &err), &err);
        r->floor = (uint32_t)n;
        return 0;
    case OPT_GBPS:
    case OPT_LATENCY:
        setting(state,
                shm_real_parse(key == OPT_GBPS ? "--link-gbps" : "--link-latency-us", arg, -1, 1e6, x, &err),
                &err);
        *x = *x > 0 ? *x : -1; /* 0 means "keep" in the request */
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* What follows `workers`: drain or restart, then process ids. */
static error_t parse_worker(struct parsed *p, const char *arg, struct argp_state *state)
{
    struct ctl_options *o = &p->options;
    if (!o->worker_action) {
        if (strcmp(arg, "drain") != 0 && strcmp(arg, "restart") != 0)
            argp_error(state, "workers: '%s' is neither drain nor restart", arg);
        o->worker_action = arg;
        return 0;
    }
    if (o->n_pids == sizeof o->pids / sizeof *o->pids)
        argp_error(state, "workers %s: too many of them: --all means every one", o->worker_action);
    uint64_t pid = 0;
    struct shm_error err = {0};
    if (shm_number_parse("PID", arg, 1, 4194304, &pid, &err))
        argp_error(state, "workers %s: %s", o->worker_action, shm_error_text(&err));
    o->pids[o->n_pids++] = (uint32_t)pid;
    return 0;
}

/* What follows `trace`: what to do, then a file. */
static error_t parse_trace(struct parsed *p, const char *arg, struct argp_state *state)
{
    struct ctl_options *o = &p->options;
    if (state->arg_num == 1 && strcmp(arg, "chunks") == 0)
        return 0;
    if (state->arg_num == 1 &&
        (strcmp(arg, "show") == 0 || strcmp(arg, "record") == 0 || strcmp(arg, "export") == 0))
        return o->trace_action = arg, 0;
    if (!o->trace_action || o->trace_file)
        argp_error(state,
                   state->arg_num == 1 ? "trace: '%s' is not one of chunks, show, record, export"
                                       : "trace: one file at a time, not also '%s'",
                   arg);
    o->trace_file = arg;
    return 0;
}

/* What is given and does nothing there was meant to do something. */
static void check_trace(const struct ctl_options *o, struct argp_state *state)
{
    bool record = strcmp(o->trace_action, "record") == 0, show = strcmp(o->trace_action, "show") == 0;
    if (record && !o->trace_file)
        argp_error(state, "trace record: a file is missing");
    if (o->watch_s > 0)
        argp_error(state, "trace %s: --watch does not go with it; record follows what comes",
                   o->trace_action);
    const char *idle = o->output && (record || show) ? "output"
                       : o->seconds >= 0 && !record  ? "seconds"
                       : o->worker && record         ? "worker"
                       : o->count && !show           ? "count"
                                                     : NULL;
    if (idle)
        argp_error(state, "trace %s: --%s does not go with it", o->trace_action, idle);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct parsed *p = state->input;
    switch (key) {
    case 'i':
        p->options.instance = arg;
        return 0;
    case OPT_RUNTIME_DIR:
        p->options.runtime_dir = arg;
        return 0;
    case OPT_JSON:
        p->options.json = true;
        return 0;
    case 'w':
        p->options.watch_s = number(state, "watch", arg, 0, 86400);
        return 0;
    case 'p':
        p->options.worker = whole(state, "--worker", arg, 4194304);
        return 0;
    case 'n':
        p->options.count = whole(state, "--count", arg, 1000000000);
        return 0;
    case OPT_LIST:
        p->options.list = true;
        return 0;
    case OPT_DETAIL:
        p->options.detail = true;
        return 0;
    case 'o':
        p->options.output = arg;
        return 0;
    case OPT_LISTEN:
        p->options.listen = arg;
        return 0;
    case OPT_SECONDS:
        p->options.seconds = strcmp(arg, "0") == 0 ? 0 : number(state, "seconds", arg, 0, 86400);
        return 0;
    case OPT_DEADLINE:
        p->options.deadline_s = number(state, "deadline", arg, 0, 3600);
        return 0;
    case 'm':
        p->options.model = arg;
        return 0;
    case OPT_ARENA_DIR:
        p->options.arena_dir = arg;
        return 0;
    case 'a':
        p->options.all = true;
        return 0;
    case ARGP_KEY_ARG:
        if (p->command && strcmp(p->command->name, "evict") == 0 && state->arg_num == 1) {
            if (p->options.instance && strcmp(p->options.instance, arg) != 0)
                argp_error(state, "evict: one instance at a time, not both '%s' and --instance '%s'", arg,
                           p->options.instance);
            return p->options.instance = arg, 0;
        }
        if (p->command && p->command->show == ctl_show_workers)
            return parse_worker(p, arg, state);
        if (p->command && p->command->show == ctl_show_trace)
            return parse_trace(p, arg, state);
        for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
            if (state->arg_num == 0 && strcmp(arg, commands[i].name) == 0)
                return p->command = &commands[i], 0;
        argp_error(state, state->arg_num ? "one command at a time, not also '%s'" : "unknown command '%s'",
                   arg);
        return 0;
    case ARGP_KEY_END:
        if (p->options.trace_action)
            check_trace(&p->options, state);
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "a command is missing");
        return 0;
    default:
        return parse_setting(key, arg, state, &p->options.settings);
    }
}

static int exit_status(int rc)
{
    return rc == -EPROTO ? CTL_EXIT_VERSION : CTL_EXIT_ATTACH;
}

static int show_once(const struct parsed *p, struct shm_error *err)
{
    struct prt_client *client = NULL;
    int rc = prt_client_open(p->options.runtime_dir, p->options.instance, PRT_OPEN_STALE, &client, err);
    if (rc)
        return exit_status(rc);
    rc = shm_header_check_counters(&prt_client_store(client)->header, prt_client_paths(client)->store, err);
    if (rc) {
        prt_client_close(&client);
        return exit_status(rc);
    }
    struct ctl_snapshot *snapshot = calloc(1, sizeof *snapshot);
    if (!snapshot) {
        prt_client_close(&client);
        return shm_error_set(err, ENOMEM, "no memory; free some"), CTL_EXIT_ATTACH;
    }
    ctl_snapshot_take(client, p->options.worker, snapshot);
    int status = p->command->show(snapshot, &p->options);
    ctl_snapshot_free(snapshot);
    free(snapshot);
    prt_client_close(&client);
    return status;
}

/* Being interrupted is how a watch ends. */
static void catch_signals(void)
{
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

static int show(const struct parsed *p, struct shm_error *err)
{
    bool screen = p->options.watch_s > 0 && !p->options.json && isatty(STDOUT_FILENO);
    if (p->options.watch_s > 0)
        catch_signals();
    for (;;) {
        if (screen)
            fputs("\033[H\033[J", stdout);
        int status = show_once(p, err);
        if (p->options.watch_s <= 0)
            return status;
        if (err->code) { /* gone for now: say so and keep looking */
            fprintf(p->options.json ? stderr : stdout, "expertctl: %s\n", shm_error_text(err));
            *err = (struct shm_error){0};
        }
        if (!p->options.json)
            putchar('\n');
        if (fflush(stdout)) /* nobody reads any more; or the reader is slow and the signal came meanwhile */
            return interrupted ? status : CTL_EXIT_PROBLEM;
        struct timespec ts = {.tv_sec = (time_t)p->options.watch_s};
        ts.tv_nsec = (long)((p->options.watch_s - (double)ts.tv_sec) * 1e9);
        if (!interrupted)
            nanosleep(&ts, NULL);
        if (interrupted)
            return status;
    }
}

static int call(const struct parsed *p, struct shm_error *err)
{
    struct prt_client *client = NULL;
    struct ctl_options o = p->options;
    if (!o.deadline_s)
        o.deadline_s = DEADLINE_S;
    int rc = prt_client_open(o.runtime_dir, o.instance, 0, &client, err);
    if (rc)
        return exit_status(rc);
    rc = p->command->call(client, &o, err);
    prt_client_close(&client);
    if (rc)
        return rc == -EPROTO ? CTL_EXIT_VERSION : CTL_EXIT_PROBLEM;
    *err = (struct shm_error){0}; /* that it ended before it had answered is no failure of a stop */
    if (p->options.json && !p->command->prints)
        printf("{\"%s\": true}\n", p->command->name);
    return CTL_EXIT_OK;
}

static int workers(struct parsed *p, struct shm_error *err)
{
    struct ctl_options *o = &p->options;
    if (!o->deadline_s)
        o->deadline_s = WORKER_DEADLINE_S;
    if (o->worker && o->n_pids < sizeof o->pids / sizeof *o->pids)
        o->pids[o->n_pids++] = o->worker;
    return ctl_workers(o, err) ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
}

int main(int argc, char **argv)
{
    prt_file_standard();
    static const struct argp argp = {options, parse, "COMMAND", doc, NULL, NULL, NULL};
    struct parsed p = {.options = {.seconds = -1}};
    argp_parse(&argp, argc, argv, 0, NULL, &p);
    struct shm_error err = {0};
    int status;
    if (strcmp(p.command->name, "doctor") == 0) {
        status = ctl_doctor(&p.options, &err);
    } else if (strcmp(p.command->name, "evict") == 0) {
        if (!p.options.instance)
            shm_error_set(&err, EINVAL, "evict: which instance? Name it: expertctl evict INSTANCE");
        status = err.code ? CTL_EXIT_ATTACH : ctl_evict(&p.options, &err);
    } else if (p.options.worker_action) {
        status = workers(&p, &err);
    } else if (p.options.trace_action) {
        catch_signals();
        status = ctl_trace(&p.options, &interrupted, &err);
        interrupted = 0; /* the end of a recording */
    } else if (p.command->show == ctl_show_counters && p.options.list) {
        status = ctl_list_counters(&p.options);
    } else if (p.command->show == ctl_show_metrics && p.options.listen) {
        catch_signals();
        status = ctl_metrics_serve(&p.options, &interrupted, &err) ? CTL_EXIT_ATTACH : CTL_EXIT_OK;
    } else {
        status = p.command->show ? show(&p, &err) : call(&p, &err);
    }
    if (interrupted) /* a watch: what a slow reader has not taken is not waited for */
        _exit(status);
    if (!err.code && (fflush(stdout) || ferror(stdout)))
        status = CTL_EXIT_PROBLEM, shm_error_set(&err, EIO, "standard output cannot be written");
    if (err.code)
        fprintf(stderr, "expertctl: %s\n", shm_error_text(&err));
    return status;
}
