/* SPDX-License-Identifier: MIT */
#include "tools/ctl_doctor.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const char *const grade_name[DOCTOR_GRADES] = {"ok", "warning", "problem"};

void doctor_say(struct doctor *d, enum doctor_grade grade, const char *check, const char *fmt, ...)
{
    if (d->findings == DOCTOR_FINDINGS)
        return;
    struct doctor_finding *f = &d->finding[d->findings++];
    f->check = check;
    f->grade = grade;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof f->text, fmt, ap);
    va_end(ap);
    if (d->findings == DOCTOR_FINDINGS)
        snprintf(f->text, sizeof f->text, "there are more findings: put these right first");
    for (char *c = f->text; *c; c++) /* names of files: no line of their own */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

void doctor_examine(struct doctor *d)
{
    doctor_find_gpus(d);
    doctor_check_model(d);
    doctor_check_driver(d);
    doctor_check_ipc(d);
    doctor_check_space(d);
    doctor_check_memory(d);
    doctor_check_held(d);
    doctor_check_memlock(d);
    doctor_check_pages(d);
    doctor_check_numa(d);
    doctor_check_uring(d);
    doctor_check_disk(d);
    doctor_check_link(d);
    doctor_check_mps(d);
}

/* The instance as it is, if there is one. */
static void look_at_instance(struct doctor *d, const struct ctl_options *o, struct prt_client **ret_client,
                             struct ctl_snapshot *snapshot)
{
    static const char check[] = "instance";
    struct shm_error err = {0};
    int rc = prt_client_open(o->runtime_dir, o->instance, PRT_OPEN_STALE, ret_client, &err);
    if (rc == 0)
        rc = shm_header_check_counters(&prt_client_store(*ret_client)->header,
                                       prt_client_paths(*ret_client)->store, &err);
    if (rc == -ENOENT) {
        doctor_say(d, DOCTOR_OK, check, "%s", shm_error_text(&err));
        return;
    }
    if (rc) {
        doctor_say(d, DOCTOR_PROBLEM, check, "%s", shm_error_text(&err));
        return;
    }
    ctl_snapshot_take(*ret_client, 0, snapshot);
    d->instance = snapshot;
    const struct shm_store *s = snapshot->store;
    if (snapshot->suspended)
        doctor_say(d, DOCTOR_PROBLEM, check, "expertd (pid %u) is stopped by SIGSTOP: kill -CONT %u",
                   s->header.writer_pid, s->header.writer_pid);
    else if (snapshot->liveness == PRT_STALE)
        doctor_say(d, DOCTOR_WARNING, check,
                   "expertd (pid %u) of instance %.64s died: start it again, its log says why it ended",
                   s->header.writer_pid, s->instance);
    else
        doctor_say(d, DOCTOR_OK, check, "%.64s: expertd %u, %s, %u workers", s->instance,
                   s->header.writer_pid, ctl_state(atomic_load(&s->state)), snapshot->workers);
}

static int show(const struct doctor *d, bool json)
{
    uint32_t count[DOCTOR_GRADES] = {0};
    json_t *list = json ? json_array() : NULL;
    for (uint32_t i = 0; i < d->findings; i++) {
        const struct doctor_finding *f = &d->finding[i];
        count[f->grade]++;
        if (json)
            json_array_append_new(list, json_pack("{s:s, s:s, s:o}", "check", f->check, "grade",
                                                  grade_name[f->grade], "text",
                                                  ctl_json_text(f->text, sizeof f->text)));
        else
            printf("%-8s %-9s %s\n", grade_name[f->grade], f->check, f->text);
    }
    if (json)
        ctl_json_print(json_pack("{s:b, s:i, s:i, s:o}", "ok", !count[DOCTOR_PROBLEM], "problems",
                                 (int)count[DOCTOR_PROBLEM], "warnings", (int)count[DOCTOR_WARNING],
                                 "findings", list));
    else
        printf("%u problem%s, %u warning%s\n", count[DOCTOR_PROBLEM], count[DOCTOR_PROBLEM] == 1 ? "" : "s",
               count[DOCTOR_WARNING], count[DOCTOR_WARNING] == 1 ? "" : "s");
    return count[DOCTOR_PROBLEM] ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
}

int ctl_doctor(const struct ctl_options *o, struct shm_error *err)
{
    const char *root = getenv("EXPERTCTL_ROOT"), *library = getenv("EXPERTD_CUDA_LIBRARY");
    struct doctor *d = calloc(1, sizeof *d);
    struct ctl_snapshot *snapshot = calloc(1, sizeof *snapshot);
    struct prt_client *client = NULL;
    struct prt_paths paths;
    struct shm_error ignored = {0};
    int status = CTL_EXIT_PROBLEM;
    if (!d || !snapshot) {
        shm_error_set(err, ENOMEM, "no memory; free some");
        goto out;
    }
    d->root = root ? root : "";
    d->library = library && library[0] ? library : "libcuda.so.1";
    d->uring = doctor_probe_uring;
    d->slow_disk_bytes_s = DOCTOR_SLOW_DISK;
    d->model_path = o->model;
    d->arena_dir = o->arena_dir;
    if (prt_paths_make(o->runtime_dir, o->instance, &paths, &ignored) == 0)
        d->paths = &paths;
    look_at_instance(d, o, &client, snapshot);
    doctor_examine(d);
    status = show(d, o->json);
    ctl_snapshot_free(snapshot);
out:
    prt_client_close(&client);
    free(snapshot);
    free(d);
    return status;
}
