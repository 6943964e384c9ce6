/* SPDX-License-Identifier: MIT */
/*
 * Inside krn_cu: the kernels of prompts, loaded by krn_cu.c, which also has what is no matrix product; those
 * are in krn_cu_gemm.c. Generated tokens have theirs in krn_cu_token.c.
 */
#ifndef KRN_CU_LAUNCH_H
#define KRN_CU_LAUNCH_H

#include "kernels/krn_cu.h"

#define KRN_CU_MODULES 6
#define THREADS        256u
#define GEMM_THREADS   128u

/* X(kernel, module) */
#define KRN_CU_KERNELS(X)                                                                                    \
    X(embed, basic)                                                                                          \
    X(expand, basic)                                                                                         \
    X(rmsnorm, basic)                                                                                        \
    X(words, basic)                                                                                          \
    X(rope_table, basic)                                                                                     \
    X(qkv, basic)                                                                                            \
    X(combine, basic)                                                                                        \
    X(scores, router)                                                                                        \
    X(scores_few, router)                                                                                    \
    X(select_128, router)                                                                                    \
    X(select_1024, router)                                                                                   \
    X(count, router)                                                                                         \
    X(finish, router)                                                                                        \
    X(place, router)                                                                                         \
    X(plan, router)                                                                                          \
    X(dense, gemm)                                                                                           \
    X(dense_few, gemm)                                                                                       \
    X(gate_up, gemm)                                                                                         \
    X(gate_up_few, gemm)                                                                                     \
    X(down, gemm)                                                                                            \
    X(down_few, gemm)                                                                                        \
    X(wg_gate_up, experts_sm90)                                                                              \
    X(wg_gate_up_few, experts_sm90)                                                                          \
    X(wg_gate_up_q4_k, experts_sm90)                                                                         \
    X(wg_gate_up_q4_k_few, experts_sm90)                                                                     \
    X(wg_down, experts_sm90)                                                                                 \
    X(wg_down_few, experts_sm90)                                                                             \
    X(wg_down_q4_k, experts_sm90)                                                                            \
    X(wg_down_q4_k_few, experts_sm90)                                                                        \
    X(wg_dense, experts_sm90)                                                                                \
    X(wg_dense_few, experts_sm90)                                                                            \
    X(wg_dense_q4_k, experts_sm90)                                                                           \
    X(wg_dense_q4_k_few, experts_sm90)                                                                       \
    X(attention_64, attn)                                                                                    \
    X(attention_128, attn)                                                                                   \
    X(attention_64_sm90, attn_sm90)                                                                          \
    X(attention_128_sm90, attn_sm90)

#define ENUM(kernel, module) K_##kernel,
enum krn_cu_kernel { KRN_CU_KERNELS(ENUM) KRN_CU_KERNEL_COUNT };
enum krn_cu_module { M_basic, M_router, M_gemm, M_attn, M_attn_sm90, M_experts_sm90 };

struct krn_cu {
    struct krn_cuda_device *device;
    void *module[KRN_CU_MODULES];
    void *function[KRN_CU_KERNEL_COUNT];
    bool whole_items;           /* test mode: attention cuts none */
    krn_cuda_ptr sums;          /* Hopper's prompt attention: KRN_CU_SUMS_BYTES a multiprocessor */
    struct krn_cu_token *token; /* what generated tokens have of their own */
};

struct krn_cu_grid {
    uint32_t x, y, z, threads, shared;
};

/* One launch; nothing where the grid is empty. */
int krn_cu_launch(struct krn_cu *cu, enum krn_cu_kernel kernel, struct krn_cu_grid grid, void *stream,
                  const void *args);

static inline uint32_t div_up(uint64_t a, uint32_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

#endif
