/* SPDX-License-Identifier: MIT */
/* `workers drain` and `workers restart`: by the servers' own records and signals, without expertd. */
#include "tools/ctl.h"

#include "proto/prt_serve.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LOOK_US    10000
#define REFUSAL_NS 500000000u /* a refusal is written at once; one that stands since before is older */

struct one {
    struct prt_serve before, now;
    uint64_t begin_ns, drained_ns, end_ns;
    bool done;
};

static double seconds(uint64_t ns)
{
    return (double)ns / 1e9;
}

/* The servers that are meant. */
static int choose(const struct prt_paths *paths, const struct ctl_options *o,
                  struct prt_serve ret_chosen[PRT_SERVE_MAX], struct shm_error *err)
{
    if (!o->all && !o->n_pids)
        return shm_error_set(
            err, EINVAL,
            "workers %s: which? Name process ids, or give --all ('expertctl workers' lists them)",
            o->worker_action);
    if (o->all) {
        int n = prt_serve_list(paths, false, ret_chosen, err);
        return n ? n
                 : shm_error_set(err, ENOENT, "workers %s: no 'inferd serve' runs in instance %s",
                                 o->worker_action, paths->instance);
    }
    for (uint32_t i = 0; i < o->n_pids; i++) {
        int rc = prt_serve_read(paths, o->pids[i], &ret_chosen[i], err);
        if (rc == -ENOENT)
            return shm_error_set(err, ENOENT,
                                 "workers %s: process %u is no 'inferd serve' of instance %s that was ever "
                                 "ready; 'expertctl workers' lists them",
                                 o->worker_action, o->pids[i], paths->instance);
        if (rc)
            return rc;
    }
    return (int)o->n_pids;
}

/* Looks once. 0: not yet; 1: there; or an error. */
static int look(const struct prt_paths *paths, const struct ctl_options *o, struct one *w, bool restart,
                struct shm_error *err)
{
    int rc = prt_serve_read(paths, w->before.pid, &w->now, err);
    if (rc)
        return shm_error_set(err, -rc, "worker %u has ended instead of %s: see its log", w->before.pid,
                             restart ? "starting again" : "draining");
    uint64_t now_ns = shm_now_ns();
    bool next = w->now.life != w->before.life;
    if (!w->drained_ns && (next || w->now.state == PRT_SERVE_DRAINED || w->now.state == PRT_SERVE_RESTARTING))
        w->drained_ns = now_ns;
    if (restart ? next && w->now.state == PRT_SERVE_READY : w->now.state == PRT_SERVE_DRAINED) {
        w->end_ns = now_ns;
        w->done = true;
        return 1;
    }
    if (restart && !next && w->now.state == PRT_SERVE_READY && w->now.note[0] &&
        now_ns - w->begin_ns > REFUSAL_NS)
        return shm_error_set(err, EINVAL, "worker %u goes on as it is: %s", w->before.pid, w->now.note);
    if (seconds(now_ns - w->begin_ns) > o->deadline_s)
        return shm_error_set(
            err, ETIMEDOUT,
            "worker %u is %s with %u requests after %.0f s; what follows is left alone (wait "
            "longer with --deadline)",
            w->before.pid, prt_serve_state_name(w->now.state), w->now.busy, o->deadline_s);
    return 0;
}

static int begin(struct one *w, bool restart, struct shm_error *err)
{
    w->begin_ns = shm_now_ns();
    int rc = 0;
    /* One that has only just begun has no handlers yet. */
    for (int i = 0; i < 100; i++) {
        rc = prt_serve_signal(&w->before, restart ? PRT_SERVE_RESTART : PRT_SERVE_DRAIN, err);
        if (rc != -ENOTSUP)
            return rc;
        usleep(LOOK_US);
    }
    return rc;
}

static int wait_for(const struct prt_paths *paths, const struct ctl_options *o, struct one *w, bool restart,
                    struct shm_error *err)
{
    int rc;
    while (!(rc = look(paths, o, w, restart, err)))
        usleep(LOOK_US);
    return rc < 0 ? rc : 0;
}

static void show(const struct ctl_options *o, const struct one *w, bool restart)
{
    if (o->json)
        return;
    if (restart)
        printf("worker %u (%s): drained in %.2f s, ready again after %.2f s\n", w->now.pid, w->now.url,
               seconds(w->drained_ns - w->begin_ns), seconds(w->end_ns - w->begin_ns));
    else
        printf("worker %u (%s): drained in %.2f s; 'workers restart' brings it back\n", w->now.pid,
               w->now.url, seconds(w->end_ns - w->begin_ns));
    fflush(stdout);
}

int ctl_workers(const struct ctl_options *o, struct shm_error *err)
{
    static struct prt_serve chosen[PRT_SERVE_MAX];
    static struct one all[PRT_SERVE_MAX];
    struct prt_paths paths;
    bool restart = strcmp(o->worker_action, "restart") == 0;
    int rc = prt_paths_make(o->runtime_dir, o->instance, &paths, err);
    if (!rc)
        rc = prt_paths_check(&paths, err);
    int n = rc ? rc : choose(&paths, o, chosen, err);
    if (n < 0)
        return n;
    for (int i = 0; i < n; i++)
        all[i].before = chosen[i];
    /* Draining: all at once. Restarting: one after the other, so that the others answer meanwhile. */
    for (int i = 0; i < n && !rc && !restart; i++)
        rc = begin(&all[i], false, err);
    for (int i = 0; i < n && !rc; i++) {
        if (restart)
            rc = begin(&all[i], true, err);
        if (!rc)
            rc = wait_for(&paths, o, &all[i], restart, err);
        if (!rc)
            show(o, &all[i], restart);
    }
    if (o->json) {
        json_t *list = json_array();
        for (int i = 0; i < n; i++)
            json_array_append_new(
                list, json_pack("{s:I, s:s, s:b, s:f, s:f}", "pid", (json_int_t)all[i].before.pid, "url",
                                all[i].before.url, o->worker_action, all[i].done, "drained_s",
                                all[i].drained_ns ? seconds(all[i].drained_ns - all[i].begin_ns) : 0.0,
                                "seconds", all[i].done ? seconds(all[i].end_ns - all[i].begin_ns) : 0.0));
        ctl_json_print(list);
    }
    return rc;
}

void ctl_show_servers(const struct prt_paths *paths)
{
    static struct prt_serve list[PRT_SERVE_MAX];
    int n = prt_serve_list(paths, false, list, NULL);
    if (n > 0)
        printf("%8s %-12s %8s %s\n", "SERVES", "STATE", "REQUESTS", "URL");
    for (int i = 0; i < n; i++)
        printf("%8u %-12s %8u %s%s%s\n", list[i].pid, prt_serve_state_name(list[i].state), list[i].busy,
               list[i].url, list[i].note[0] ? "  " : "", list[i].note);
}
