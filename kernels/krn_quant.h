/* SPDX-License-Identifier: MIT */
/*
 * GGML storage formats: the table of the types we read, their sizes, and a
 * plain C de-quantizer that is bit-exact on every machine.
 *
 * Owns no memory, keeps no state, never blocks; all functions are safe to
 * call from any thread. The fast tile de-quantizers of the host device are
 * behind krn_host.h and give the same bits.
 */
#ifndef KRN_QUANT_H
#define KRN_QUANT_H

#include <stdint.h>

enum krn_ggml_id {
    KRN_F32 = 0,
    KRN_F16 = 1,
    KRN_Q4_0 = 2,
    KRN_Q8_0 = 8,
    KRN_Q4_K = 12,
    KRN_Q5_K = 13,
    KRN_Q6_K = 14,
    KRN_BF16 = 30,
};

struct krn_type {
    const char *name;     /* "Q4_K" */
    uint32_t ggml_id;     /* the number in the GGUF tensor table */
    uint32_t block_elems; /* elements a block; 1 for the plain types */
    uint32_t block_bytes;
};

#define KRN_TYPE_COUNT 8

/* The table, KRN_TYPE_COUNT entries in ascending ggml_id. Static storage. */
const struct krn_type *krn_type_table(void);

/* By GGML number or by name ("q4_k" and "Q4_K"). NULL: not supported. */
const struct krn_type *krn_type_find(uint32_t ggml_id);
const struct krn_type *krn_type_by_name(const char *name);

/* Bytes of a row of elems elements. -EINVAL: type NULL or elems no multiple
 * of the block; -EOVERFLOW: does not fit in 64 bits. */
int krn_row_bytes(const struct krn_type *type, uint64_t elems, uint64_t *ret_bytes);

/* n elements (multiple of block_elems) at src to float32. src needs no
 * alignment. Each value is the format's definition evaluated in float32
 * without fused operations. */
void krn_dequant_row(const struct krn_type *type, const void *src, float *dst, uint64_t n);

/* Half precision to float32, exact (subnormals, infinities and NaN too). */
float krn_f16_to_f32(uint16_t h);

#endif
