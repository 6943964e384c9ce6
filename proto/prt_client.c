/* SPDX-License-Identifier: MIT */
#include "proto/prt_client.h"

#include "proto/prt_channel.h"
#include "proto/prt_file.h"
#include "shm/shm_bell.h"
#include "shm/shm_worker.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct prt_client {
    struct prt_paths paths;
    const struct shm_store *store;
    uint64_t store_bytes;
    pid_t pid;      /* of expertd, with its start time: read once */
    uint64_t start; /* and compared by pidfd ever after */
    int pidfd;      /* -1: it was dead already */
    struct prt_channel *channel;
    uint64_t epoch, next_id;
    _Alignas(8) uint8_t reply[4096]; /* larger than any reply of this version */
};
_Static_assert(sizeof(struct prt_attach_reply) <= 4096, "the largest reply fits");

int prt_client_open(const char *runtime_dir, const char *instance, uint32_t flags,
                    struct prt_client **ret_client, struct shm_error *err)
{
    struct prt_client *c = calloc(1, sizeof(*c));
    if (!c)
        return shm_error_set(err, ENOMEM, "no memory for a client; free some");
    c->pidfd = -1;
    void *base = NULL;
    int rc = prt_paths_make(runtime_dir, instance, &c->paths, err);
    if (rc == 0)
        rc = prt_paths_check(&c->paths, err);
    if (rc == 0)
        rc = prt_file_map_path(c->paths.store, sizeof(struct shm_header), false, &base, &c->store_bytes, err);
    if (rc == -ENOENT) {
        bool named = strcmp(c->paths.instance, PRT_INSTANCE_DEFAULT) != 0;
        rc = shm_error_set(
            err, ENOENT, "no expertd runs as instance '%s' in %s: start one with expertd --model FILE%s%s",
            c->paths.instance, c->paths.runtime[0] ? c->paths.runtime : "the runtime directory",
            named ? " --instance " : "", named ? c->paths.instance : "");
    }
    if (rc < 0)
        goto fail;
    c->store = base;
    rc = shm_header_check(&c->store->header, SHM_STORE_MAGIC, c->store_bytes, c->paths.store, err);
    if (rc < 0)
        goto fail;
    if (c->store->header.total_bytes != sizeof(struct shm_store)) {
        rc = shm_error_set(err, EPROTO,
                           "%s has %llu bytes, this program knows %zu: expertd is of another version, use "
                           "matching ones",
                           c->paths.store, (unsigned long long)c->store->header.total_bytes,
                           sizeof(struct shm_store));
        goto fail;
    }
    c->pid = (pid_t)c->store->header.writer_pid;
    c->start = c->store->header.writer_start;
    rc = prt_pidfd_open(c->pid, c->start, &c->pidfd);
    if (rc < 0 && rc != -ESRCH) {
        shm_error_set(err, rc, "expertd (pid %d) cannot be watched: %s", (int)c->pid, strerror(-rc));
        goto fail;
    }
    if (!(flags & PRT_OPEN_STALE) && prt_client_liveness(c) != PRT_LIVE) {
        rc = shm_error_set(
            err, ESTALE,
            "expertd (pid %d) of instance '%s' has ended: start it again with expertd --model FILE",
            (int)c->pid, c->paths.instance);
        goto fail;
    }
    c->epoch = prt_random_epoch();
    *ret_client = c;
    return 0;
fail:
    prt_client_close(&c);
    return rc;
}

void prt_client_close(struct prt_client **client)
{
    struct prt_client *c = *client;
    if (!c)
        return;
    prt_channel_close(&c->channel);
    if (c->pidfd >= 0)
        close(c->pidfd);
    if (c->store)
        munmap((void *)(uintptr_t)c->store, c->store_bytes);
    free(c);
    *client = NULL;
}

const struct prt_paths *prt_client_paths(const struct prt_client *client)
{
    return &client->paths;
}

const struct shm_store *prt_client_store(const struct prt_client *client)
{
    return client->store;
}

int prt_client_expertd_pidfd(const struct prt_client *client)
{
    return client->pidfd;
}

enum prt_liveness prt_client_liveness(const struct prt_client *client)
{
    /* acquire: what the state speaks of is there */
    uint32_t state = atomic_load_explicit(&client->store->state, memory_order_acquire);
    if (state == SHM_STORE_STOPPED)
        return PRT_STOPPED;
    struct pollfd ended = {.fd = client->pidfd, .events = POLLIN};
    return client->pidfd < 0 || poll(&ended, 1, 0) > 0 ? PRT_STALE : PRT_LIVE;
}

int prt_client_worker(const struct prt_client *client, uint32_t index, struct shm_store_worker *ret_worker)
{
    if (index >= SHM_STORE_WORKERS)
        return -ENOENT;
    const struct shm_store_worker *row = &client->store->worker[index];
    uint32_t pid = atomic_load_explicit(&row->pid, memory_order_acquire); /* pairs with expertd's release */
    if (!pid)
        return -ENOENT;
    struct shm_store_worker copy;
    memcpy(&copy, (const void *)row, sizeof(copy));
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&row->pid, memory_order_relaxed) != pid || row->session != copy.session)
        return -EAGAIN;
    copy.name[sizeof(copy.name) - 1] = '\0';
    atomic_init(&copy.pid, pid);
    *ret_worker = copy;
    return 0;
}

int prt_client_map_worker(const struct shm_store_worker *worker, struct shm_worker_layout *ret_layout,
                          const void **ret_base, struct shm_error *err)
{
    pid_t pid = (pid_t)atomic_load_explicit(&worker->pid, memory_order_relaxed);
    struct shm_geometry geometry = {.layers = worker->layers,
                                    .experts = worker->experts,
                                    .ring = worker->ring,
                                    .group_entries = shm_group_entries(worker->ring),
                                    .groups_per_layer = worker->groups_per_layer,
                                    .slot_bytes = worker->slot_bytes};
    struct shm_worker_layout layout;
    int rc = shm_worker_layout(&geometry, &layout, err);
    if (rc < 0)
        return rc;
    int fd;
    rc = prt_peer_open(pid, worker->control_fd, layout.total_bytes, "control segment", &fd, err);
    if (rc < 0)
        return rc;
    void *base;
    rc = prt_file_map(fd, "control segment", layout.total_bytes, false, &base, err);
    close(fd);
    if (rc < 0)
        return rc;
    rc = shm_header_check(base, SHM_WORKER_MAGIC, layout.total_bytes, "control segment", err);
    if (rc < 0) {
        munmap(base, layout.total_bytes);
        return rc;
    }
    *ret_layout = layout;
    *ret_base = base;
    return 0;
}

static int expertd_gone(const struct prt_client *c, struct shm_error *err)
{
    return shm_error_set(err, ESRCH, "expertd (pid %d) of instance '%s' has ended", (int)c->pid,
                         c->paths.instance);
}

int prt_client_wait_serving(struct prt_client *client, uint32_t timeout_ms, struct shm_error *err)
{
    uint64_t deadline_ns = shm_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        uint32_t state = atomic_load_explicit(&client->store->state, memory_order_acquire);
        if (prt_client_liveness(client) != PRT_LIVE)
            return expertd_gone(client, err);
        if (state >= SHM_STORE_LOADING)
            return 0;
        if (shm_now_ns() >= deadline_ns)
            return shm_error_set(err, ETIMEDOUT, "expertd (pid %d) is still starting after %u ms",
                                 (int)client->pid, timeout_ms);
        struct pollfd ended = {.fd = client->pidfd, .events = POLLIN};
        poll(&ended, 1, 5);
    }
}

/* Sends the request, receives into client->reply. Checks that it answers this very request. */
static int call(struct prt_client *c, struct prt_request_header *request, uint32_t timeout_ms,
                size_t *ret_bytes, struct shm_error *err)
{
    if (prt_client_liveness(c) != PRT_LIVE)
        return expertd_gone(c, err);
    if (!c->channel) {
        int rc = prt_channel_connect(c->paths.socket, &c->channel, err);
        if (rc < 0)
            return rc;
    }
    size_t n = 0;
    int rc = prt_channel_request(c->channel, request, request->total_bytes, c->reply, sizeof(c->reply), &n,
                                 c->pidfd, timeout_ms);
    if (rc == -ESRCH)
        return expertd_gone(c, err);
    if (rc == -ETIMEDOUT)
        return shm_error_set(err, ETIMEDOUT,
                             "expertd (pid %d) did not answer %s within %u s: it is stopped or stuck",
                             (int)c->pid, prt_type_name(request->type), timeout_ms / 1000);
    if (rc < 0)
        return shm_error_set(err, rc, "control channel %s: %s", c->paths.socket, strerror(-rc));
    const struct prt_reply_header *h = (const struct prt_reply_header *)(const void *)c->reply;
    if (n >= sizeof(*h) && h->version == PRT_VERSION && h->status == 0 &&
        (h->epoch != request->epoch || h->id != request->id))
        return shm_error_set(err, EBADMSG, "control channel %s: the reply is to another request",
                             c->paths.socket);
    *ret_bytes = n;
    return 0;
}

static int refused(const struct prt_reply_header *h, struct shm_error *err)
{
    char line[SHM_ERROR_TEXT_BYTES];
    memcpy(line, h->error, sizeof(line));
    line[sizeof(line) - 1] = '\0';
    return shm_error_set(err, h->status, "%s", line[0] ? line : strerror(-h->status));
}

/* One call: encode, send, decode, status. `message` is the upper-case name's lower-case form. */
#define CALL(c, message, req, rep, e) CALL_FOR(c, message, req, rep, PRT_CALL_TIMEOUT_MS, e)
#define CALL_FOR(c, message, req, rep, ms, e)                                                                \
    ({                                                                                                       \
        size_t n_;                                                                                           \
        prt_##message##_request_encode((req), (c)->epoch, ++(c)->next_id);                                   \
        int rc_ = call((c), &(req)->header, (ms), &n_, (e));                                                 \
        if (rc_ == 0)                                                                                        \
            rc_ = prt_##message##_reply_decode((c)->reply, n_, (rep), (e));                                  \
        if (rc_ == 0 && (rep)->header.status < 0)                                                            \
            rc_ = refused(&(rep)->header, (e));                                                              \
        rc_;                                                                                                 \
    })

int prt_client_hello(struct prt_client *client, struct prt_hello_reply *ret_reply, struct shm_error *err)
{
    struct prt_hello_request request = {0};
    struct prt_hello_reply reply;
    int rc = CALL(client, hello, &request, &reply, err);
    if (rc == 0 && ret_reply)
        *ret_reply = reply;
    return rc;
}

int prt_client_attach(struct prt_client *client, struct prt_attach_request *request,
                      struct prt_attach_reply *ret_reply, struct shm_error *err)
{
    struct prt_attach_reply reply;
    int rc = CALL(client, attach, request, &reply, err);
    if (rc == 0 && ret_reply)
        *ret_reply = reply;
    return rc;
}

int prt_client_detach(struct prt_client *client, uint64_t session, struct shm_error *err)
{
    struct prt_detach_request request = {.session = session, .pid = (uint32_t)getpid()};
    struct prt_detach_reply reply;
    return CALL(client, detach, &request, &reply, err);
}

int prt_client_configure(struct prt_client *client, struct prt_configure_request *request,
                         struct prt_configure_reply *ret_reply, struct shm_error *err)
{
    struct prt_configure_reply reply;
    int rc = CALL(client, configure, request, &reply, err);
    if (rc == 0 && ret_reply)
        *ret_reply = reply;
    return rc;
}

int prt_client_drain(struct prt_client *client, uint32_t deadline_ms, struct prt_drain_reply *ret_reply,
                     struct shm_error *err)
{
    struct prt_drain_request request = {.deadline_ms = deadline_ms};
    struct prt_drain_reply reply;
    int rc = CALL(client, drain, &request, &reply, err);
    if (rc == 0 && ret_reply)
        *ret_reply = reply;
    return rc;
}

int prt_client_stop(struct prt_client *client, uint32_t deadline_ms, bool wait, struct shm_error *err)
{
    struct prt_stop_request request = {.deadline_ms = deadline_ms};
    struct prt_stop_reply reply;
    int rc = CALL(client, stop, &request, &reply, err);
    if (rc == -ESRCH)
        return 0; /* ended before it could answer: what was wanted */
    if (rc < 0 || !wait)
        return rc;
    uint64_t deadline_ns = shm_now_ns() + ((uint64_t)deadline_ms + 10000) * 1000000u;
    struct pollfd ended = {.fd = client->pidfd, .events = POLLIN};
    for (;;) {
        uint64_t now_ns = shm_now_ns();
        if (now_ns >= deadline_ns)
            return shm_error_set(err, ETIMEDOUT,
                                 "expertd (pid %d) still runs %u ms after it was told to stop",
                                 (int)client->pid, deadline_ms + 10000);
        if (poll(&ended, 1, (int)((deadline_ns - now_ns) / 1000000u) + 1) > 0)
            return 0;
    }
}

#define PARK_CALL(message)                                                                                   \
    int prt_client_##message(struct prt_client *client, struct prt_##message##_request *request,             \
                             struct prt_##message##_reply *ret_reply, struct shm_error *err)                 \
    {                                                                                                        \
        request->pid = (uint32_t)getpid();                                                                   \
        return CALL_FOR(client, message, request, ret_reply, PRT_PARK_TIMEOUT_MS, err);                      \
    }
PARK_CALL(parkopen)
PARK_CALL(parkfind)
PARK_CALL(parkreserve)
PARK_CALL(parkcommit)
PARK_CALL(parkdone)
