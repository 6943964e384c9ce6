/* SPDX-License-Identifier: MIT */
/*
 * Private to kernels/: the row de-quantizer as compiled for each instruction
 * set from krn_dequant.c. All give the same bits (no contraction there).
 */
#ifndef KRN_DEQUANT_H
#define KRN_DEQUANT_H

#include <stdint.h>

/* n elements of GGML type ggml_id (one of the table's) at src, any alignment. */
void krn_dequant_baseline(uint32_t ggml_id, const void *src, float *dst, uint64_t n);
void krn_dequant_v3(uint32_t ggml_id, const void *src, float *dst, uint64_t n);
void krn_dequant_v4(uint32_t ggml_id, const void *src, float *dst, uint64_t n);

#endif
