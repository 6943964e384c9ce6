/* SPDX-License-Identifier: MIT */
#include "inferd/inf_device.h"

#include <errno.h>

int inf_device_cuda_open(int ordinal, bool poison, struct shm_error *err, struct inf_device **ret_device)
{
    (void)ordinal;
    (void)poison;
    (void)ret_device;
    return shm_error_set(err, ENOTSUP, "this version has no CUDA device: use --device host");
}
