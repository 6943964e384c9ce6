/* SPDX-License-Identifier: MIT */
#include "tools/bench.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct bench_worker {
    int pid;
    FILE *to, *from, *messages;
    char *line;
    size_t line_bytes;
};

static volatile sig_atomic_t interrupted;
static volatile pid_t running; /* the worker */

static void on_signal(int signo)
{
    (void)signo;
    interrupted = 1;
    if (running > 0)
        kill(running, SIGTERM);
}

void bench_catch_signals(void)
{
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL);
    signal(SIGPIPE, SIG_IGN); /* a worker that died is an error with its line */
}

bool bench_interrupted(void)
{
    return interrupted != 0;
}

static uint64_t integer(const json_t *object, const char *key, bool *ok)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return *ok = false, 0;
    return (uint64_t)json_integer_value(v);
}

static double real(const json_t *object, const char *key, bool *ok)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_number(v))
        return *ok = false, 0;
    return json_number_value(v);
}

/* Waits for its end. True: it failed, and the line says why. */
static void reap(struct bench_worker *w)
{
    while (w->pid > 0 && waitpid(w->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    w->pid = 0;
    running = 0;
}

/* The worker's next line as an object that the caller owns. */
static int receive(struct bench_worker *w, const char *what, json_t **ret_reply, struct shm_error *err)
{
    ssize_t n;
    do {
        errno = 0;
        n = getline(&w->line, &w->line_bytes, w->from);
        if (n < 0 && errno == EINTR)
            clearerr(w->from);
    } while (n < 0 && errno == EINTR && !interrupted);
    if (n < 0) {
        char line[400];
        if (interrupted)
            return shm_error_set(err, EINTR, "interrupted");
        reap(w);
        bench_last_line(w->messages, line, sizeof line);
        return shm_error_set(err, EIO, "inferd failed for %s: %s", what, line);
    }
    json_error_t where;
    json_t *o = json_loads(w->line, JSON_REJECT_DUPLICATES, &where);
    if (!o)
        return shm_error_set(err, EBADMSG, "inferd printed no JSON object: %s", where.text);
    const char *error = json_string_value(json_object_get(o, "error"));
    if (error) {
        int rc = interrupted ? shm_error_set(err, EINTR, "interrupted")
                             : shm_error_set(err, EIO, "inferd failed for %s: %.400s", what, error);
        json_decref(o);
        return rc;
    }
    *ret_reply = o;
    return 0;
}

static int other_version(struct shm_error *err)
{
    return shm_error_set(err, EBADMSG,
                         "inferd's JSON lacks a number that the bench needs: other version of inferd?");
}

static int spawn(const struct bench_options *o, struct bench_worker *w, struct shm_error *err)
{
    char program[PATH_MAX];
    struct bench_args a = {0};
    bench_add(&a, bench_program(o->inferd, "inferd", "inferd", program));
    bench_add(&a, "measure");
    bench_add(&a, "--raw");
    bench_add_option(&a, "--floor", "1"); /* the least that a request may name */
    bench_add_option(&a, "--runtime-dir", o->runtime_dir);
    bench_add_option(&a, "--instance", o->instance);
    bench_add_option(&a, "--prompt", o->prompt);
    bench_add_option(&a, "--prompt-file", o->prompt_file);
    bench_add_option(&a, "--link-gbps", o->link_gbps);
    bench_add_option(&a, "--link-latency-us", o->link_latency_us);
    bench_add_option(&a, "--ring", o->ring);
    bench_add_option(&a, "--threads", o->threads);
    bench_add_option(&a, "--chunk", o->chunk);
    bench_add_option(&a, "--ctx", o->ctx);
    bench_add_option(&a, "--resident", o->resident);
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC))
        return shm_error_set(err, errno, "can't open a pipe for inferd: %s", strerror(errno));
    if (pipe2(out, O_CLOEXEC)) {
        int rc = shm_error_set(err, errno, "can't open a pipe for inferd: %s", strerror(errno));
        close(in[0]);
        close(in[1]);
        return rc;
    }
    w->messages = tmpfile();
    w->to = fdopen(in[1], "w");
    w->from = fdopen(out[0], "r");
    int rc = w->messages && w->to && w->from
                 ? bench_spawn(&a, in[0], out[1], fileno(w->messages), false, &w->pid)
                 : -ENOMEM;
    close(in[0]);
    close(out[1]);
    if (rc)
        return shm_error_set(err, -rc, "can't start %s: %s: use --inferd", a.v[0], strerror(-rc));
    running = w->pid;
    if (interrupted) /* it came before the handler knew whom to tell */
        kill(w->pid, SIGTERM);
    return 0;
}

int bench_worker_start(const struct bench_options *o, struct bench_worker **ret_worker,
                       struct bench_facts *ret_facts, struct shm_error *err)
{
    struct bench_worker *w = calloc(1, sizeof *w);
    if (!w)
        return shm_error_set(err, ENOMEM, "no memory; free some");
    json_t *reply = NULL;
    int rc = spawn(o, w, err);
    if (!rc)
        rc = receive(w, "the bench", &reply, err);
    if (!rc) {
        bool ok = true;
        const char *device = json_string_value(json_object_get(reply, "device"));
        struct bench_facts f = {.prompt_tokens = integer(reply, "prompt_tokens", &ok),
                                .ring = integer(reply, "ring", &ok),
                                .chunk = integer(reply, "chunk", &ok),
                                .peak_gbps = real(reply, "peak_gbps", &ok)};
        snprintf(f.device, sizeof f.device, "%s", device ? device : "");
        *ret_facts = f;
        rc = ok ? 0 : other_version(err);
    }
    json_decref(reply);
    if (rc)
        bench_worker_stop(&w);
    else
        *ret_worker = w;
    return rc;
}

static int send_request(struct bench_worker *w, const struct bench_options *o, const struct bench_arm *arm,
                        const struct bench_span *span, bool all, struct shm_error *err)
{
    json_t *r = json_pack("{s:I, s:I, s:s, s:b, s:b, s:I}", "tokens", (json_int_t)span->tokens, "at",
                          (json_int_t)span->at, "policy", arm->policy, "known", (int)arm->known, "all",
                          (int)all, "generate", (json_int_t)o->generate);
    if (arm->order[0])
        json_object_set_new(r, "order", json_string(arm->order));
    if (arm->depth)
        json_object_set_new(r, "depth", json_integer(arm->depth));
    uint32_t floor = arm->floor ? arm->floor : o->floor;
    if (floor)
        json_object_set_new(r, "floor", json_integer(floor));
    json_dumpf(r, w->to, JSON_COMPACT);
    json_decref(r);
    fputc('\n', w->to);
    fflush(w->to); /* a dead worker shows when its reply is read */
    clearerr(w->to);
    (void)err;
    return 0;
}

int bench_worker_read(struct bench_worker *w, const struct bench_options *o, const struct bench_arm *arm,
                      const struct bench_span *span, bool all, struct bench_sample *ret_sample,
                      struct shm_error *err)
{
    char what[80];
    json_t *reply;
    snprintf(what, sizeof what, "setting %s", arm->name);
    int rc = send_request(w, o, arm, span, all, err);
    if (rc || (rc = receive(w, what, &reply, err)))
        return rc;
    const json_t *stream = json_object_get(reply, "stream");
    bool ok = true;
    struct bench_sample s = {.read_ms = real(reply, "read_ms", &ok),
                             .link_ms = real(stream, "link_ms", &ok),
                             .wait_ms = real(stream, "wait_ms", &ok),
                             .issuer_ms = real(stream, "issuer_cpu_ms", &ok),
                             .entries = integer(stream, "entries", &ok),
                             .routed = integer(stream, "routed", &ok),
                             .copied = integer(stream, "copied", &ok),
                             .dropped = integer(stream, "dropped", &ok),
                             .wasted = integer(stream, "wasted", &ok),
                             .bytes = integer(stream, "bytes_copied", &ok),
                             .bytes_wasted = integer(stream, "bytes_wasted", &ok)};
    if (o->generate) {
        s.decode_ms = real(reply, "decode_ms", &ok);
        s.decode_tokens = integer(reply, "decode_tokens", &ok);
        const json_t *decode = json_object_get(reply, "decode_stream");
        s.decode_bytes = integer(decode, "bytes_copied", &ok);
        s.decode_copied = integer(decode, "copied", &ok);
        s.decode_issuer_ms = real(decode, "issuer_cpu_ms", &ok);
    }
    const char *hash = json_string_value(json_object_get(reply, "logits_hash"));
    snprintf(s.hash, sizeof s.hash, "%s", hash ? hash : "none");
    json_decref(reply);
    if (!ok)
        return other_version(err);
    *ret_sample = s;
    return 0;
}

void bench_worker_stop(struct bench_worker **worker)
{
    struct bench_worker *w = *worker;
    if (!w)
        return;
    if (w->to)
        fclose(w->to); /* the end of its input */
    if (w->from)
        fclose(w->from);
    reap(w);
    if (w->messages)
        fclose(w->messages);
    free(w->line);
    free(w);
    *worker = NULL;
}
