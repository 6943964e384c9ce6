/* SPDX-License-Identifier: MIT */
/*
 * Park, as a worker uses it: expertd's memory mapped, the calls about it, and
 * blocks of keys and values copied between it and the device. What is where is
 * expertd's to know (proto/control.spec, PARKOPEN and so on); what to park and
 * what to look for is inf_prefix's.
 *
 * Bytes of the park prove nothing: other workers can write them at any time. A block is copied into memory of
 * our own, compared with the checksum that expertd was told when it was committed, and only
 * then given to the device; the other way round the checksum is that of our own copy.
 *
 * Bound to one session. One thread, the device's. Calls wait for PRT_PARK_TIMEOUT_MS at most.
 */
#ifndef INF_PARK_H
#define INF_PARK_H

#include "inferd/inf_device.h"
#include "kernels/krn_pool.h"
#include "shm/shm_park.h"

#define INF_PARK_STAGES                                                                                      \
    4u /* slots fetched at once: each takes a block's memory, and soon memory itself is the limit */

struct inf_park;

/* How expertd is asked: prt_client_park* of a client, or something else in tests. */
struct inf_park_calls {
    void *ctx;
    int (*open)(void *ctx, struct prt_parkopen_request *request, struct prt_parkopen_reply *ret_reply,
                struct shm_error *err);
    int (*find)(void *ctx, struct prt_parkfind_request *request, struct prt_parkfind_reply *ret_reply,
                struct shm_error *err);
    int (*reserve)(void *ctx, struct prt_parkreserve_request *request,
                   struct prt_parkreserve_reply *ret_reply, struct shm_error *err);
    int (*commit)(void *ctx, struct prt_parkcommit_request *request, struct prt_parkcommit_reply *ret_reply,
                  struct shm_error *err);
    int (*done)(void *ctx, struct prt_parkdone_request *request, struct prt_parkdone_reply *ret_reply,
                struct shm_error *err);
};

/* Those of a client, which outlives the park. */
struct inf_park_calls inf_park_client_calls(struct prt_client *client);

struct inf_park_config {
    struct inf_park_calls calls;
    uint64_t session;
    struct inf_device *device; /* borrowed; has its model */
    uint8_t model[16];         /* fingerprint */
    const char *build;         /* NULL: of this program's file */
    struct krn_pool *pool;     /* borrowed; fetches several slots at once, from the same thread; NULL: one */
    bool exact;                /* its blocks are none of a worker for which this is otherwise */
};

/* Errors of PARKOPEN in control.spec, and those of mapping the file. */
int inf_park_open(const struct inf_park_config *config, struct inf_park **ret_park, struct shm_error *err);
void inf_park_close(struct inf_park **park);

uint64_t inf_park_bytes(const struct inf_park *park);
uint32_t inf_park_batch(const struct inf_park *park); /* blocks to reserve at once: 1 .. PRT_PARK_BATCH */

/* Blocks of so many keys (two words each), the first continuing parent; then inf_park_fetch and
 * inf_park_load, then inf_park_done, which says which ones were wrong. */
int inf_park_find(struct inf_park *park, const uint64_t *parent, const uint64_t *key, uint32_t keys,
                  struct prt_parkfind_reply *ret_reply, struct shm_error *err);
int inf_park_done(struct inf_park *park, const uint32_t *wrong_slot, uint32_t wrong, struct shm_error *err);

/* The head of a slot as it is now: a hint, to be checked again after loading. 0 or -ERANGE. */
int inf_park_peek(const struct inf_park *park, uint32_t slot, struct shm_park_head *ret_head);

/* Copies of the first of these found slots, of up to n >= 1, with their checksums (two words each) compared:
 * how many. */
uint32_t inf_park_fetch(struct inf_park *park, const uint32_t *slot, const uint64_t *checksum, uint32_t n);

/* The keys and values of the i-th slot that was fetched into the device's block. -EBADMSG: its bytes do not
 * fit the checksum, parent or themselves; device errors. */
int inf_park_load(struct inf_park *park, uint32_t i, const uint64_t *parent, uint32_t block,
                  struct shm_park_head *ret_head, struct shm_error *err);

int inf_park_reserve(struct inf_park *park, const uint64_t *key, const uint64_t *parent, uint32_t blocks,
                     struct prt_parkreserve_reply *ret_reply, struct shm_error *err);
/* The device's block, and the head, into a reserved slot. */
int inf_park_store(struct inf_park *park, uint32_t slot, const struct shm_park_head *head, uint32_t block,
                   uint64_t *ret_checksum, struct shm_error *err);
int inf_park_commit(struct inf_park *park, const uint32_t *slot, const uint64_t *checksum, uint32_t blocks,
                    struct shm_error *err);

/* Key of the block of these tokens behind parent: never zero. */
void inf_park_key(const uint64_t *parent, const int32_t *ids, uint32_t tokens, uint64_t *ret_key);

#endif
