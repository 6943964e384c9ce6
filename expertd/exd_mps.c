/* SPDX-License-Identifier: MIT */
/* Advice where workers share a GPU. */
#include "expertd/exd_daemon_priv.h"
#include "expertd/exd_log.h"
#include "proto/prt_mps.h"

#include <stdio.h>

void exd_mps_advise(struct exd_daemon *d, uint32_t index)
{
    const struct shm_store *s = exd_store_segment(d->store);
    const struct shm_store_worker *own = &s->worker[index];
    char where[256], line[512];
    uint32_t sharing = 0;
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++)
        sharing += d->session[i] && s->worker[i].device == PRT_DEVICE_CUDA &&
                   s->worker[i].device_index == own->device_index;
    if (own->device != PRT_DEVICE_CUDA || sharing != 2 || prt_mps_found(where, sizeof(where)))
        return;
    snprintf(
        line, sizeof(line),
        "%u workers on GPU %u without MPS (none in %.120s): they take turns of about 2 ms and lose a fifth; "
        "nvidia-cuda-mps-control -d before expertd and the workers avoids that",
        sharing, own->device_index, where);
    exd_log(EXD_LOG_WARNING, "%s", line);
    exd_store_detail(d->store, line);
}
