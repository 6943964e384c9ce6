/* SPDX-License-Identifier: MIT */
/*
 * Test mode: checksums of what kernels wrote and of what the link brought,
 * made on the device, so that the first wrong step of a pass can be named.
 * Nothing of a normal pass. Sums of whole numbers: no order matters.
 */
#ifndef KRN_CU_TRACE_H
#define KRN_CU_TRACE_H

#include <stdbool.h>

#include "kernels/krn_cu_trace_args.h"
#include "kernels/krn_cuda.h"

struct krn_cu_trace;

/* Needs an entered device; loads a module of its own. */
int krn_cu_trace_create(struct shm_error *err, struct krn_cu_trace **ret_trace);
void krn_cu_trace_destroy(struct krn_cu_trace **trace);

/* Adds the checksum of rows x row_bytes at data, `stride` bytes apart, to sums: uint64
 * [2 * KRN_CU_TRACE_PIECES], of 32 equal pieces of the rows, then of the columns. row_bytes: a multiple of 4.
 */
int krn_cu_trace_hash(struct krn_cu_trace *t, void *stream, krn_cuda_ptr data, uint64_t rows,
                      uint64_t row_bytes, uint64_t stride, krn_cuda_ptr sums);

/* Compares the slots of a layer's groups group .. group_end - 1, as its table names them and as far as they
 * have tokens, piece by piece with what `want` says, and notes what differs in `report`. */
int krn_cu_trace_slots(struct krn_cu_trace *t, void *stream, const struct krn_cu_trace_slots_args *args);

/* Behind a layer's groups: were as many experts in them as have tokens and are no residents? */
int krn_cu_trace_layer(struct krn_cu_trace *t, void *stream, const struct krn_cu_trace_slots_args *args);

/* What `want` wants of a blob: one sum for every KRN_CU_TRACE_PIECE bytes, the last piece may be short. */
void krn_cu_trace_expect(const void *blob, uint64_t bytes, uint64_t *ret_sums);

#endif
