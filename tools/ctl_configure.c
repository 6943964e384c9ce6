/* SPDX-License-Identifier: MIT */
#include "tools/ctl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

/* The row of the worker that the options name. */
static int find(struct prt_client *client, const struct ctl_options *o, struct shm_store_worker *ret_row,
                struct shm_error *err)
{
    uint64_t session = o->settings.session;
    uint32_t found = 0;
    if (!session && !o->worker)
        return shm_error_set(err, EINVAL,
                             "configure: which worker? Name it with --worker PID or --session N ('expertctl "
                             "workers' lists them)");
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++) {
        struct shm_store_worker row;
        int rc = prt_client_worker(client, i, &row);
        for (int retry = 0; rc == -EAGAIN && retry < 100; retry++)
            rc = prt_client_worker(client, i, &row);
        if (rc || (session && row.session != session) || (o->worker && atomic_load(&row.pid) != o->worker))
            continue;
        *ret_row = row;
        found++;
    }
    if (!found)
        return shm_error_set(err, ENOENT,
                             "configure: no such worker is attached: 'expertctl workers' lists them");
    if (found > 1)
        return shm_error_set(err, EINVAL, "configure: process %u has %u sessions: name one with --session N",
                             o->worker, found);
    return 0;
}

int ctl_configure(struct prt_client *client, const struct ctl_options *o, struct shm_error *err)
{
    struct shm_store_worker row;
    struct prt_configure_request request = o->settings;
    struct prt_configure_reply now;
    int rc = find(client, o, &row, err);
    if (rc)
        return rc;
    request.session = row.session;
    rc = prt_client_configure(client, &request, &now, err);
    if (rc)
        return rc;
    uint32_t pid = atomic_load(&row.pid);
    if (o->json) {
        ctl_json_print(json_pack("{s:I, s:I, s:s, s:s, s:I, s:I, s:f, s:f}", "pid", (json_int_t)pid,
                                 "session", (json_int_t)row.session, "policy", shm_policy_name(now.policy),
                                 "order", shm_order_name(now.order), "depth", (json_int_t)now.depth, "floor",
                                 (json_int_t)now.floor, "link_gbps", now.link_gbps, "link_latency_us",
                                 now.link_latency_us));
        return 0;
    }
    printf("worker %u, session %" PRIu64
           ", from its next stream on: policy %s, order %s, depth %u, floor %u; link ",
           pid, row.session, shm_policy_name(now.policy), shm_order_name(now.order), now.depth, now.floor);
    if (now.link_gbps > 0 || now.link_latency_us > 0)
        printf("%g GB/s + %g us a copy\n", now.link_gbps, now.link_latency_us);
    else
        puts("unpaced");
    return 0;
}
