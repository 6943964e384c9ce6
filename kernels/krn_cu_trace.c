/* SPDX-License-Identifier: MIT */
#include "kernels/krn_cu_trace.h"

#include "kernels/krn_fatbin.h"

#include <errno.h>
#include <stdlib.h>

#define THREADS     128u
#define SLOT_BLOCKS 16u
#define SLOT_PIECES 8u         /* of a block, at least */
#define MANY_BYTES  (1u << 20) /* from which rows are shared by blocks */

struct krn_cu_trace {
    void *module, *hash, *slots, *layer;
};

int krn_cu_trace_create(struct shm_error *err, struct krn_cu_trace **ret_trace)
{
    struct krn_cu_trace *t = calloc(1, sizeof *t);
    if (!t)
        return -ENOMEM;
    int rc = krn_cuda_module("krn_cu_trace", &t->module, err);
    if (rc == 0)
        rc = krn_cuda_kernel(t->module, "krn_dev_trace_hash", 0, &t->hash, err);
    if (rc == 0)
        rc = krn_cuda_kernel(t->module, "krn_dev_trace_slots", 0, &t->slots, err);
    if (rc == 0)
        rc = krn_cuda_kernel(t->module, "krn_dev_trace_layer", 0, &t->layer, err);
    if (rc) {
        krn_cu_trace_destroy(&t);
        return rc;
    }
    *ret_trace = t;
    return 0;
}

void krn_cu_trace_destroy(struct krn_cu_trace **trace)
{
    if (!*trace)
        return;
    if ((*trace)->module)
        krn_cuda.module_unload((*trace)->module);
    free(*trace);
    *trace = NULL;
}

static int launch(void *kernel, unsigned x, unsigned y, unsigned threads, void *stream, const void *args)
{
    void *params[] = {(void *)args};
    return KRN_CUDA(launch, kernel, x, y, 1, threads, 1, 1, 0, stream, params, NULL);
}

int krn_cu_trace_hash(struct krn_cu_trace *t, void *stream, krn_cuda_ptr data, uint64_t rows,
                      uint64_t row_bytes, uint64_t stride, krn_cuda_ptr sums)
{
    struct krn_cu_trace_hash_args a = {data, sums, rows, row_bytes / 4, stride};
    return launch(t->hash, KRN_CU_TRACE_PIECES, rows * row_bytes < MANY_BYTES ? 1 : KRN_CU_TRACE_PIECES,
                  THREADS, stream, &a);
}

int krn_cu_trace_slots(struct krn_cu_trace *t, void *stream, const struct krn_cu_trace_slots_args *args)
{
    uint32_t blocks = args->pieces / SLOT_PIECES + 1;
    return launch(t->slots, args->experts, blocks < SLOT_BLOCKS ? blocks : SLOT_BLOCKS, THREADS, stream,
                  args);
}

int krn_cu_trace_layer(struct krn_cu_trace *t, void *stream, const struct krn_cu_trace_slots_args *args)
{
    return launch(t->layer, 1, 1, 1, stream, args);
}

void krn_cu_trace_expect(const void *blob, uint64_t bytes, uint64_t *ret_sums)
{
    const uint32_t *words = blob;
    for (uint64_t i = 0; i < bytes / 4; i++) {
        if (i % (KRN_CU_TRACE_PIECE / 4) == 0)
            ret_sums[i / (KRN_CU_TRACE_PIECE / 4)] = 0;
        ret_sums[i / (KRN_CU_TRACE_PIECE / 4)] += krn_cu_trace_mix(words[i], i);
    }
}
