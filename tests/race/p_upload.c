/* SPDX-License-Identifier: MIT */
/* Uploads by several threads on the fake driver: right bytes, ended at any time; for the thread sanitizer. */
#include "kernels/krn_upload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES  (3u << 20)
#define PIECE  50000u
#define ROUNDS 20

int main(void)
{
    struct shm_error err = {0};
    struct krn_cuda_device *device;
    krn_cuda_ptr target;
    uint8_t *source = malloc(BYTES);
    if (!source || krn_cuda_device_open(0, &device, &err) || KRN_CUDA(mem_alloc, &target, BYTES)) {
        fprintf(stderr, "p_upload: %s\n", shm_error_text(&err));
        return 1;
    }
    int bad = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const struct krn_upload_config config = {.device = device, .threads = 4, .slot_bytes = 32768};
        struct krn_upload *u;
        for (uint32_t i = 0; i < BYTES; i++)
            source[i] = (uint8_t)((i * 7 >> 3) + (uint32_t)round);
        if (krn_upload_open(&config, &u, &err))
            return 1;
        for (uint32_t at = 0; at < BYTES; at += PIECE)
            bad += krn_upload_put(u, target + at, source + at, BYTES - at < PIECE ? BYTES - at : PIECE) != 0;
        if (round % 3) /* else it is ended in the middle */
            bad += krn_upload_finish(u) || memcmp((const void *)(uintptr_t)target, source, BYTES) != 0;
        krn_upload_close(&u);
    }
    KRN_CUDA(mem_free, target);
    krn_cuda_device_close(&device);
    free(source);
    printf("p_upload: %d of %d rounds bad\n", bad, ROUNDS);
    return bad != 0;
}
