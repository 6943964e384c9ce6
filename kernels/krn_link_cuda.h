/* SPDX-License-Identifier: MIT */
/*
 * CUDA link: one copy stream into a worker's ring in device memory, opened by
 * IPC handle. Touches copy engines only (DESIGN 8): no kernel, no memset, no
 * device-to-device copy, no piece under KRN_CUDA_COPY_MIN where the slot and
 * the source allow padding, one stream whose first operation is a copy.
 *
 * How far it is comes back through two words in pinned memory that the stream
 * itself writes behind the copies; the CPU reads them when it asks. The worker
 * waits on its own flag, a 32-bit word in the ring's allocation: the low half
 * of the last signalled value, to be waited for with cuStreamWaitValue32 GEQ
 * (which compares cyclically).
 */
#ifndef KRN_LINK_CUDA_H
#define KRN_LINK_CUDA_H

#include "kernels/krn_cuda.h"
#include "kernels/krn_link.h"

#define KRN_LINK_BATCH_MAX 16u

struct krn_link_cuda_config {
    struct krn_cuda_device *device;  /* outlives the link */
    struct krn_cuda_ipc ring_handle; /* of the worker's allocation: the ring, then somewhere the flag */
    uint64_t ring_bytes;
    uint64_t slot_bytes;  /* copies below KRN_CUDA_COPY_MIN are padded where this allows it */
    uint64_t flag_offset; /* in the allocation, multiple of 4, not inside the ring */
    const void *source;   /* registered memory that copies come from; pieces as in krn_register.h */
    uint64_t source_bytes;
    _Atomic uint64_t
        *landed_word;             /* in shared memory: follows the flag when the link is asked; may be NULL */
    struct shm_bell *landed_bell; /* rung then; may be NULL */
    uint32_t batch;               /* copies handed over together: 1 .. KRN_LINK_BATCH_MAX; 0: 16 */
    uint64_t poll_ns;             /* shortest time between two looks (struct krn_link); 0: 15 us */
    const char *name;             /* of the worker, for lines; copied */
    void (*note)(void *ctx, bool warning, const char *line); /* any thread that uses the link; may be NULL */
    void *ctx;
};

/* Opens the worker's allocation, checks that ring and flag lie in it, primes the stream and writes the flag
 * once (value 0). Blocks for about a millisecond. -EINVAL a range or a handle; -ENOTSUP a capability is
 * missing (named); driver errors. The caller owns *ret_link; destroy waits at most 5 s for what is on the
 * link, then closes the allocation (or leaves it open and says so). */
int krn_link_cuda_create(const struct krn_link_cuda_config *config, struct krn_link **ret_link,
                         struct shm_error *err);

/* Writes the flag's value once more on an idle link and returns in ns how long it took to be seen: over
 * 500 us says that it waits for the compute engine. At the first krn_link_mark this is done by itself and
 * noted. */
int krn_link_cuda_probe(struct krn_link *link, uint64_t *ret_ns);

struct krn_link_cuda_counts {
    uint64_t batches, batched_copies; /* cuMemcpyBatchAsync calls and copies in them */
    uint64_t progress_writes;         /* stream writes besides signals */
    uint64_t padded, small;           /* copies made longer; copies that had to stay short */
    uint64_t call_ns;                 /* in the driver, enqueueing */
    uint64_t probe_ns;                /* of the last probe; 0: none */
};
void krn_link_cuda_counts(const struct krn_link *link, struct krn_link_cuda_counts *ret_counts);

#endif
