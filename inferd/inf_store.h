/* SPDX-License-Identifier: MIT */
/*
 * Store: this worker's tie to one life of expertd. Opens the instance, maps
 * the arena read-only, makes control segment and ring, attaches, and holds the
 * stream. After expertd's death inf_store_attach() ties it to the next one:
 * arena and segments are mapped anew, resident copies stay.
 *
 * Owns mappings, descriptors and the stream. One thread. Every wait is
 * bounded and watches expertd's pidfd.
 */
#ifndef INF_STORE_H
#define INF_STORE_H

#include "inferd/inf_device.h"
#include "inferd/inf_event.h"
#include "proto/prt_client.h"
#include "shm/shm_arena.h"

struct inf_store_config {
    const char *runtime_dir, *instance; /* NULL: default */
    const char *name;                   /* as this worker calls itself */
    uint32_t ring;                      /* slots; 0: two layers' experts, at most 1 GiB */
    uint32_t resident; /* the first so many experts of each layer are kept in the device's memory */
    uint32_t policy, order, depth, floor; /* as in ATTACH; 0: expertd's */
    double link_gbps, link_latency_us;    /* likewise */
    bool poison;
    uint64_t watchdog_ns; /* 0: 60 s */
    _Atomic bool *cancel; /* ends waits; NULL: none */
    uint32_t server_fd;   /* of the server segment, for tools; 0: none */
};

/* What a session is set to. */
struct inf_settings {
    uint32_t policy, order, depth, floor;
    double link_gbps, link_latency_us;
};

struct inf_store {
    struct inf_store_config config; /* strings borrowed */
    struct inf_device *device;      /* borrowed; outlives the store */
    struct prt_client *client;      /* NULL: not open */
    struct shm_arena_view arena;    /* valid while arena_base is */
    void *arena_base;
    uint64_t arena_bytes;
    uint8_t fingerprint[16]; /* of the first attach: a later one must match */
    bool bound;              /* fingerprint is set */

    uint64_t session; /* 0: not attached */
    struct inf_settings settings;
    struct shm_worker_layout layout;
    struct shm_worker_view control;
    int control_fd;
    void *control_base;
    struct inf_ring ring;
    bool ring_open;
    struct inf_stream *stream; /* NULL: not attached */
    struct inf_events events;  /* kept over attaches */

    const uint8_t **resident; /* [layers * experts] addresses in the device's memory, NULL entries are
                                 streamed; NULL: none */
    uint64_t resident_bytes;
    uint64_t filled_bytes; /* of them copied since the last attach */
    bool all_resident;
};

/* Nothing is opened yet. The config is copied, its strings are borrowed. */
void inf_store_init(struct inf_store *store, const struct inf_store_config *config,
                    struct inf_device *device);

/* After a pass: touches the arena's last page. A shortened file reads as zeros up to the end of its last page
 * and raises SIGBUS only behind that (proto/prt_guard.h): a pass that met the zeros alone must not count. */
void inf_store_touch(const struct inf_store *store);

/* Attaches, or attaches again. Closes what an earlier life left. At most wait_ms for an
 * expertd to appear, and again for it to take workers (0: it must be there, and may take ten minutes to
 * start), then as long as loading makes progress. Pointers into an older arena view are invalid afterwards.
 * -ENOENT, -ESTALE no expertd; -EUCLEAN it serves another model than before; -ECANCELED; others with one
 * line. */
int inf_store_attach(struct inf_store *store, uint32_t wait_ms, struct shm_error *err);

/* The two halves of it, for a start that opens its device meanwhile. find: expertd, its arena mapped, dense
 * tensors loaded; needs no device. join: residents, ring, session. After a failure of either everything is
 * closed. */
int inf_store_find(struct inf_store *store, uint32_t wait_ms, struct shm_error *err);
int inf_store_join(struct inf_store *store, struct shm_error *err);

/* Changes the session's settings from the next stream on: fields as in CONFIGURE, 0 keeps. Call between
 * streams. */
int inf_store_configure(struct inf_store *store, const struct inf_settings *settings, struct shm_error *err);

/* Attached, expertd alive and not ending, session not given up. */
bool inf_store_alive(const struct inf_store *store);

/* Detaches (a running stream is cancelled first) and closes everything; the store is as after init. */
void inf_store_close(struct inf_store *store);

#endif
