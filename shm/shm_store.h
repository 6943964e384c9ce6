/* SPDX-License-Identifier: MIT */
/*
 * Store segment: what expertd shows of itself. File `store` in the instance's
 * directory, created anew by each expertd (write to a temporary name, rename),
 * written by expertd alone, mapped read-only by workers and tools.
 */
#ifndef SHM_STORE_H
#define SHM_STORE_H

#include "shm/shm_counter.h"
#include "shm/shm_header.h"

#define SHM_STORE_MAGIC   "EXDSTO04"
#define SHM_STORE_WORKERS 64
#define SHM_NAME_BYTES    64
#define SHM_PATH_BYTES    1024
#define SHM_NOTE_BYTES    128

#define SHM_STORE_STARTING 1u /* reads the model's header, checks memory */
#define SHM_STORE_LOADING  2u /* serves already; experts that are not there yet are waited for */
#define SHM_STORE_SERVING  3u
#define SHM_STORE_DRAINING 4u /* no new streams */
#define SHM_STORE_STOPPED  5u /* left on a clean exit */

/* One attached worker; written by expertd's main loop. pid is stored last
 * (release) and cleared first, so a reader that sees a pid sees the rest. */
struct shm_store_worker {
    _Atomic uint32_t pid;      /* 0: free */
    uint32_t control_fd;       /* the worker's descriptor of its control segment: /proc/PID/fd/N */
    uint64_t start;            /* the worker's start time, as in shm_header */
    uint64_t session;          /* number expertd gave the session */
    uint64_t attached_ns;      /* CLOCK_MONOTONIC */
    char name[SHM_NAME_BYTES]; /* as the worker calls itself */
    uint32_t layers, experts, ring, groups_per_layer;
    uint64_t slot_bytes;
    uint32_t device;       /* PRT_DEVICE_* */
    uint32_t device_index; /* CUDA: the GPU's number in expertd */
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct shm_store_worker) == 144, "shared layout");

struct shm_store {
    struct shm_header header;
    _Atomic uint32_t state; /* SHM_STORE_* ; release after what it speaks of */
    uint32_t layout_reserved;
    char instance[SHM_NAME_BYTES];
    char model_path[SHM_PATH_BYTES]; /* absolute, first shard */
    char model_name[SHM_NAME_BYTES * 2];
    char arena_path[SHM_PATH_BYTES]; /* absolute */
    uint8_t fingerprint[16];         /* of the model file, as in the arena */
    uint64_t arena_bytes;
    _Atomic uint32_t pinned;              /* 1: mlocked, or registered */
    _Atomic uint32_t huge_pages;          /* 1: huge pages asked for and granted by the mapping */
    char reader[128];                     /* exd_reader_describe(); before state LOADING */
    char detail[256];                     /* last notable event, one line, for status */
    uint32_t policy, order, depth, floor; /* defaults for sessions; SHM_POLICY_*, SHM_ORDER_* */
    double link_gbps;                     /* pacing of the host link, 0: unpaced */
    double link_latency_us;
    _Atomic uint64_t heartbeat_ns;  /* CLOCK_MONOTONIC, main loop, about once a second */
    char device[128];               /* what links copy to, and why not CUDA; before state LOADING */
    char park_note[SHM_NOTE_BYTES]; /* where keys and values are parked, or why they are not */
    uint64_t pad[6];
    struct shm_store_counters
        counters; /* written by the main loop, load_* and io_* by the loader's threads */
    struct shm_store_worker worker[SHM_STORE_WORKERS];
};
/* Changing it needs a new magic; shm_layout.c has every offset. */
_Static_assert(sizeof(struct shm_store) == 12800, "shared layout");

#endif
