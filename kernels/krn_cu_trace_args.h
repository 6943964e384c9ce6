/* SPDX-License-Identifier: MIT */
/* What krn_cu_trace.cu gets and leaves; read by C and by nvcc. */
#ifndef KRN_CU_TRACE_ARGS_H
#define KRN_CU_TRACE_ARGS_H

#include <stdint.h>

#define KRN_CU_TRACE_PIECES 32u
#define KRN_CU_TRACE_PIECE  16384u /* bytes of a slot that share a sum */
#define KRN_CU_TRACE_NOTES  64u

struct krn_cu_trace_hash_args {
    uint64_t data, sums;
    uint64_t rows, words, stride; /* words of 4 bytes a row; bytes between rows */
};

/* One piece of a slot that differs, or a layer whose groups had not all its experts. */
struct krn_cu_trace_note {
    uint32_t layer, expert, slot, piece;
    uint32_t behind; /* 0: before the kernels of the group, 1: behind them, 2: of a layer `slot` experts ran
                        instead of `piece` */
    uint32_t chunk;  /* as the caller counts */
};

struct krn_cu_trace_report {
    unsigned long long checked, bad; /* pieces */
    uint32_t seen;                   /* experts of the layer's groups so far */
    uint32_t notes;                  /* there may have been more than fit */
    struct krn_cu_trace_note note[KRN_CU_TRACE_NOTES];
};

struct krn_cu_trace_slots_args {
    uint64_t table, counts, resident; /* as in krn_cu_plan_args; resident may be 0 */
    uint64_t ring, slot_bytes, blob_bytes;
    uint64_t want; /* uint64 [experts][want_pieces] of the layer */
    uint64_t report;
    uint32_t experts, ring_slots, group, group_end, pieces, want_pieces;
    uint32_t layer, behind, chunk, reserved;
};

/* Of the 32-bit word at index i. */
static inline
#ifdef __CUDACC__
    __device__ __host__
#endif
        uint64_t
        krn_cu_trace_mix(uint32_t word, uint64_t i)
{
    uint64_t z = (i * 0x9e3779b97f4a7c15u ^ word) * 0xbf58476d1ce4e5b9u;
    return (z ^ z >> 29) * 0x94d049bb133111ebu;
}

#endif
