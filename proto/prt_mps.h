/* SPDX-License-Identifier: MIT */
/*
 * NVIDIA's Multi-Process Service: whether processes that share a GPU would
 * share it evenly, or take turns. Only looked for; nothing is started.
 */
#ifndef PRT_MPS_H
#define PRT_MPS_H

#include <stdbool.h>
#include <stddef.h>

/* A control daemon answers in $CUDA_MPS_PIPE_DIRECTORY (default /tmp/nvidia-mps): its socket can be connected
 * to. ret_where: that directory, cut to n bytes. Does not block. */
bool prt_mps_found(char *ret_where, size_t n);

#endif
