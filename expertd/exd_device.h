/* SPDX-License-Identifier: MIT */
/*
 * Device: what links copy to. Always host memory; CUDA GPUs, too, when a
 * driver is there and asked for. Owns the opened GPUs and the registration of
 * the arena with them. Opened by the start-up thread, used by sessions.
 */
#ifndef EXD_DEVICE_H
#define EXD_DEVICE_H

#include "kernels/krn_cuda.h"
#include "shm/shm_arena.h"
#include "shm/shm_word.h"

#include <stdatomic.h>
#include <stdbool.h>

#define EXD_DEVICES_MAX SHM_DEVICE_GPUS_MAX

enum exd_device_kind {
    EXD_DEVICE_AUTO = SHM_DEVICE_AUTO,
    EXD_DEVICE_HOST = SHM_DEVICE_HOST,
    EXD_DEVICE_CUDA = SHM_DEVICE_CUDA
};

struct exd_device;

/* Opens the GPUs, all (ordinal -1) or one, in the background, for it takes the driver a moment; end waits for
 * them. CUDA: an error when there is none that can serve; AUTO: the host device then, said in one line of the
 * log. */
int exd_device_begin(enum exd_device_kind kind, int ordinal, struct exd_device **ret_device,
                     struct shm_error *err);
int exd_device_end(struct exd_device *device, struct shm_error *err);

/* GPUs that serve, after end; none once a registration failed. */
int exd_device_gpus(const struct exd_device *device);

/* Registers the arena (mapped at base, as long as the view says) for copying, which pins it, too; nothing on
 * the host device. adopted: its pages hold data already. Before sessions are opened. Progress and rate are
 * logged. AUTO: a failure is logged and CUDA given up. */
int exd_device_register(struct exd_device *device, const struct shm_arena_view *arena, void *base,
                        bool adopted, const atomic_int *cancel, struct shm_error *err);

/* The GPU with that UUID. -ENOTSUP no CUDA here (why), -ENODEV another GPU than those opened. */
int exd_device_find(struct exd_device *device, const uint8_t uuid[16], struct krn_cuda_device **ret_gpu,
                    struct shm_error *err);

/* For status: "CUDA: NVIDIA H200, ..." or "host (no CUDA driver: ...)". Valid until close. */
const char *exd_device_text(const struct exd_device *device);

/* Unregisters, closes the GPUs. No link may be open. Accepts NULL, nulls. */
void exd_device_close(struct exd_device **device);

#endif
