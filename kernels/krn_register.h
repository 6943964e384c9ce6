/* SPDX-License-Identifier: MIT */
/*
 * Registration of host memory with the CUDA driver, so that copy engines read
 * it at the link's speed: the arena, once, before serving (a registration
 * holds the lock that every copy call of the process needs).
 *
 * Done in pieces of at most 1 GiB, so that progress can be shown and a start
 * can be cancelled. A copy across two pieces is refused by the driver, so a
 * piece ends only where the caller says that no copy crosses.
 */
#ifndef KRN_REGISTER_H
#define KRN_REGISTER_H

#include "kernels/krn_cuda.h"
#include "shm/shm_arena.h"

#define KRN_REGISTER_PIECE (UINT64_C(1) << 30)

struct krn_register_config {
    struct krn_cuda_device *device; /* any of those that will copy: the registration holds for all */
    void *base;                     /* page-aligned */
    uint64_t bytes;                 /* multiple of the page size */
    bool read_only;                 /* the mapping is PROT_READ (shared): as workers map the arena */
    uint64_t piece_bytes;           /* 0: KRN_REGISTER_PIECE */
    /* Where a piece that begins at `begin` may end: the largest offset in (begin, limit] that no copy
     * crosses, else the smallest above; at most `bytes`. NULL: one piece. Offsets are from base. */
    uint64_t (*cut)(const void *ctx, uint64_t begin, uint64_t limit);
    void (*before)(void *ctx, uint64_t begin, uint64_t end); /* each piece; may be NULL */
    void (*progress)(void *ctx, uint64_t done_bytes,
                     uint64_t total_bytes); /* after each piece; may be NULL */
    const void *cut_ctx;
    void *before_ctx, *progress_ctx;
    const _Atomic int *cancel; /* non-zero ends it with -ECANCELED; may be NULL */
};

struct krn_register; /* what is registered */

/* Blocks (about 0.04 s per GB). -ECANCELED; -ENOMEM, -EPERM... with the driver's words. After an error
 * nothing stays registered. */
int krn_register_memory(const struct krn_register_config *config, struct krn_register **ret_registration,
                        struct shm_error *err);

/* Unregisters all pieces. No copy may be running from them. Accepts NULL, nulls. */
void krn_register_release(struct krn_register **registration);

uint32_t krn_register_pieces(const struct krn_register *registration);

/* A `cut` for an arena mapped at base (ctx: its struct shm_arena_view): page borders that no blob crosses. */
uint64_t krn_register_arena_cut(const void *ctx, uint64_t begin, uint64_t limit);

#endif
