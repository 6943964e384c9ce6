/* SPDX-License-Identifier: MIT */
/*
 * krn_poison on a real device: it fills exactly the slots of the groups it is given, so that a read of a slot
 * that was not copied could not go unseen. Exit status 0, 1, 77 (no driver).
 */
#include "kernels/krn_cuda.h"
#include "kernels/krn_fatbin.h"
#include "shm/shm_worker.h"

#include <stdio.h>
#include <string.h>

#define EXPERTS    40u
#define SLOTS      50u
#define SLOT_BYTES (UINT64_C(3) << 16)

#define NEED(call)                                                                                           \
    do {                                                                                                     \
        int result_ = (call);                                                                                \
        if (result_) {                                                                                       \
            fprintf(stderr, "g_poison: " #call ": %d %s %s\n", result_, krn_cuda_detail()->name,             \
                    shm_error_text(&err));                                                                   \
            return 1;                                                                                        \
        }                                                                                                    \
    } while (0)

int main(void)
{
    struct shm_error err = {0};
    struct krn_cuda_device *device;
    void *graph, *publish, *poison, *check, *stream;
    if (krn_cuda_load(&err) || krn_cuda_device_open(0, &device, &err) || krn_cuda_enter(device)) {
        fprintf(stderr, "skipped: %s\n", shm_error_text(&err));
        return 77;
    }
    NEED(krn_cuda_module("krn_graph", &graph, &err));
    NEED(krn_cuda_module("krn_publish", &publish, &err));
    NEED(krn_cuda_kernel(graph, "krn_poison", 0, &poison, &err));
    NEED(krn_cuda_kernel(publish, "krn_check_stamp", 0, &check, &err));
    NEED(KRN_CUDA(stream_create, &stream, KRN_CUDA_STREAM_NON_BLOCKING));
    krn_cuda_ptr ring, table_device, wrong_device;
    uint32_t *table;
    uint64_t *wrong;
    NEED(KRN_CUDA(mem_alloc, &ring, SLOTS * SLOT_BYTES));
    NEED(KRN_CUDA(host_alloc, (void **)&table, 4096, 0));
    NEED(KRN_CUDA(host_alloc, (void **)&wrong, 4096, 0));
    NEED(KRN_CUDA(host_pointer, &table_device, table, 0));
    NEED(KRN_CUDA(host_pointer, &wrong_device, wrong, 0));
    NEED(KRN_CUDA(memset_8_async, ring, 0x11, SLOTS * SLOT_BYTES, stream));

    /* expert e: slot 49 - e, group e / 16; every fifth dropped, one outside the ring, which must be left
     * alone */
    uint32_t first = 1, end = 2, slots = SLOTS, poisoned = 0;
    bool expect[SLOTS] = {false};
    for (uint32_t e = 0; e < EXPERTS; e++) {
        uint32_t slot = e == 17 ? SLOTS + 3 : SLOTS - 1 - e;
        uint32_t state = e % 5 == 0 ? SHM_ENTRY_DROPPED : SHM_ENTRY_SLOT;
        table[e] = shm_entry_make(state, e / 16, slot);
        if (state == SHM_ENTRY_SLOT && e / 16 == 1 && slot < SLOTS) {
            expect[slot] = true;
            poisoned++;
        }
    }
    uint64_t slot_bytes = SLOT_BYTES;
    void *arguments[] = {&table_device, &ring, &slot_bytes, &slots, &first, &end};
    NEED(KRN_CUDA(launch, poison, EXPERTS, 16, 1, 256, 1, 1, 0, stream, arguments, NULL));
    int failures = 0;
    for (uint32_t s = 0; s < SLOTS; s++) {
        krn_cuda_ptr at = ring + s * SLOT_BYTES;
        uint64_t words = SLOT_BYTES / 4;
        uint32_t stamp = expect[s] ? 0xffffffffu : 0x11111111u;
        *wrong = 0;
        void *check_arguments[] = {&at, &words, &stamp, &wrong_device};
        NEED(KRN_CUDA(launch, check, 8, 1, 1, 256, 1, 1, 0, stream, check_arguments, NULL));
        NEED(KRN_CUDA(stream_synchronize, stream));
        if (*wrong) {
            fprintf(stderr, "slot %u: %llu words are not %08x\n", s, (unsigned long long)*wrong, stamp);
            failures++;
        }
    }
    printf("poison: %u of %u slots filled, %d wrong\n", poisoned, SLOTS, failures);
    krn_cuda.stream_destroy(stream);
    krn_cuda.mem_free(ring);
    krn_cuda.host_free(table);
    krn_cuda.host_free(wrong);
    krn_cuda.module_unload(graph);
    krn_cuda.module_unload(publish);
    krn_cuda_device_close(&device);
    return failures != 0;
}
