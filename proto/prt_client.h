/* SPDX-License-Identifier: MIT */
/*
 * Client: how a worker or tool meets an instance of expertd. It maps the
 * store segment read-only, watches expertd by pidfd, and makes the control
 * calls.
 *
 * Opening needs no answer from expertd: a look at its store works while it is
 * stopped by SIGSTOP. The socket is connected at the first call. A client
 * belongs to one thread at a time; the store may be read from any. It is bound
 * to one life of expertd: after that ended, open anew.
 */
#ifndef PRT_CLIENT_H
#define PRT_CLIENT_H

#include "proto/prt_control_gen.h"
#include "proto/prt_path.h"
#include "shm/shm_store.h"

#include <stdbool.h>

struct prt_client;

#define PRT_OPEN_STALE 1u /* also the store that a dead or stopped expertd left: for tools that show it */

enum prt_liveness {
    PRT_LIVE,    /* the writer of the store runs */
    PRT_STALE,   /* it died without a clean exit */
    PRT_STOPPED, /* clean exit */
    PRT_LIVENESS_COUNT
};

/* Opens instance (NULL: default) under runtime_dir (NULL: default). Errors: -ENOENT no such instance;
 * -ESTALE (without PRT_OPEN_STALE) only a dead one's remains; -EPERM, -EPROTO (another version), -EBADMSG;
 * -EAGAIN expertd is just starting, try again. */
int prt_client_open(const char *runtime_dir, const char *instance, uint32_t flags,
                    struct prt_client **ret_client, struct shm_error *err);
void prt_client_close(struct prt_client **client);

const struct prt_paths *prt_client_paths(const struct prt_client *client);

/* Mapped read-only as long as the client is open. */
const struct shm_store *prt_client_store(const struct prt_client *client);

/* Readable once expertd ended; owned by the client. -1 when it was dead already. */
int prt_client_expertd_pidfd(const struct prt_client *client);

/* Looks anew; never blocks. */
enum prt_liveness prt_client_liveness(const struct prt_client *client);

/* A copy of row `index` of the store's worker table that was whole while it was copied. 0; -ENOENT: free;
 * -EAGAIN: changing right now. */
int prt_client_worker(const struct prt_client *client, uint32_t index, struct shm_store_worker *ret_worker);

/* Opens the control segment of a worker named in the store and maps it read-only after checking header
 * and geometry. The caller unmaps ret_layout->total_bytes at *ret_base. */
struct shm_worker_layout;
int prt_client_map_worker(const struct shm_store_worker *worker, struct shm_worker_layout *ret_layout,
                          const void **ret_base, struct shm_error *err);

/* Waits until the state is at least LOADING (calls are answered then: SHM_STORE_LOADING or SERVING).
 * 0, -ETIMEDOUT, -ESRCH. */
int prt_client_wait_serving(struct prt_client *client, uint32_t timeout_ms, struct shm_error *err);

/* Calls. The caller fills the request's body (see prt_control_gen.h and control.spec for units and
 * ranges); header, epoch and id are filled here. ret_reply may be NULL. Return 0, the negative errno of
 * the reply with its line, -ESRCH when expertd died, -ETIMEDOUT when it did not answer in time. They block
 * for at most PRT_CALL_TIMEOUT_MS. */
#define PRT_CALL_TIMEOUT_MS 10000u

int prt_client_hello(struct prt_client *client, struct prt_hello_reply *ret_reply, struct shm_error *err);
int prt_client_attach(struct prt_client *client, struct prt_attach_request *request,
                      struct prt_attach_reply *ret_reply, struct shm_error *err);
int prt_client_detach(struct prt_client *client, uint64_t session, struct shm_error *err);
int prt_client_configure(struct prt_client *client, struct prt_configure_request *request,
                         struct prt_configure_reply *ret_reply, struct shm_error *err);
int prt_client_drain(struct prt_client *client, uint32_t deadline_ms, struct prt_drain_reply *ret_reply,
                     struct shm_error *err);

/* The park (shm/shm_park.h). These wait for PRT_PARK_TIMEOUT_MS at most: whoever asks can do without. The
 * request's pid is filled here. */
#define PRT_PARK_TIMEOUT_MS 1000u
int prt_client_parkopen(struct prt_client *client, struct prt_parkopen_request *request,
                        struct prt_parkopen_reply *ret_reply, struct shm_error *err);
int prt_client_parkfind(struct prt_client *client, struct prt_parkfind_request *request,
                        struct prt_parkfind_reply *ret_reply, struct shm_error *err);
int prt_client_parkreserve(struct prt_client *client, struct prt_parkreserve_request *request,
                           struct prt_parkreserve_reply *ret_reply, struct shm_error *err);
int prt_client_parkcommit(struct prt_client *client, struct prt_parkcommit_request *request,
                          struct prt_parkcommit_reply *ret_reply, struct shm_error *err);
int prt_client_parkdone(struct prt_client *client, struct prt_parkdone_request *request,
                        struct prt_parkdone_reply *ret_reply, struct shm_error *err);

/* Asks expertd to drain and end. With wait: returns once the process has ended (deadline_ms + 10 s at most).
 */
int prt_client_stop(struct prt_client *client, uint32_t deadline_ms, bool wait, struct shm_error *err);

#endif
