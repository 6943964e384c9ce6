/* SPDX-License-Identifier: MIT */
/*
 * Kernels as built by nvcc and embedded in the program: one fatbin for each
 * kernels/NAME.cu, machine code for several architectures and PTX for later
 * ones. A program that was built without nvcc embeds none.
 */
#ifndef KRN_FATBIN_H
#define KRN_FATBIN_H

#include "shm/shm_error.h"

#include <stddef.h>

#define KRN_FATBIN_MAGIC 0xba55ed50u

struct krn_fatbin {
    const char *name; /* of the .cu, without the ending */
    const void *begin;
    size_t bytes;
};

/* All of them; *ret_count 0 when built without nvcc. */
const struct krn_fatbin *krn_fatbins(size_t *ret_count);

/* By name, or NULL. */
const struct krn_fatbin *krn_fatbin_find(const char *name);

/* Loads a fatbin into the current context (krn_cuda_enter). -ENOENT not embedded, -EOPNOTSUPP no code in it
 * for this GPU or a driver too old for it; one line each. The caller unloads (krn_cuda.module_unload). */
int krn_cuda_module(const char *name, void **ret_module, struct shm_error *err);

/* A kernel of a module. shared_bytes: dynamic shared memory it will be launched with, 0 or up to
 * krn_cuda_device.shared_max (above 48 KiB it must be asked for). */
int krn_cuda_kernel(void *module, const char *name, unsigned shared_bytes, void **ret_function,
                    struct shm_error *err);

#endif
