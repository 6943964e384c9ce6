/* SPDX-License-Identifier: MIT */
/*
 * Upload: many bytes of ordinary host memory into device memory near the
 * link's speed. Threads copy pieces into pinned slots, copy engines take them
 * from there; the driver's own way through pageable memory is several times
 * slower, and to register the source costs more than it saves when it is read
 * once.
 *
 * One owner: open, put any number, finish, close. Targets and sources stay
 * the caller's and as they are until finish.
 */
#ifndef KRN_UPLOAD_H
#define KRN_UPLOAD_H

#include "kernels/krn_cuda.h"

#include <stdint.h>

#define KRN_UPLOAD_THREADS_MAX 16u
#define KRN_UPLOAD_SLOTS_MAX   8u

struct krn_upload_config {
    struct krn_cuda_device *device;
    unsigned threads;    /* 0: as many as pay, at most the CPUs of the process */
    uint64_t slot_bytes; /* 0: the default */
    unsigned slots;      /* of each thread; 0: the default */
};

/* CPUs that this process may use. */
unsigned krn_upload_cpus(void);

struct krn_upload;

/* -ENOMEM, -EAGAIN, or the driver's, with one line. */
int krn_upload_open(const struct krn_upload_config *config, struct krn_upload **ret_upload,
                    struct shm_error *err);

/* Enqueues a copy; does not block. -ENOMEM; or the first failure of an earlier one. */
int krn_upload_put(struct krn_upload *upload, krn_cuda_ptr target, const void *source, uint64_t bytes);

/* Waits until all that was put has arrived. The first failure, as of krn_cuda_check on this thread. */
int krn_upload_finish(struct krn_upload *upload);

/* Ends the threads; what has not begun is not copied. Accepts NULL, nulls. */
void krn_upload_close(struct krn_upload **upload);

#endif
