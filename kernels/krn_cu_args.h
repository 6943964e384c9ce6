/* SPDX-License-Identifier: MIT */
/*
 * What the C side hands to the CUDA kernels: one plain structure a kernel,
 * passed by value, addresses as 64-bit numbers. Read by C and by nvcc. Shapes
 * and meanings are explained at the functions in krn_cu.h.
 */
#ifndef KRN_CU_ARGS_H
#define KRN_CU_ARGS_H

#include <stdint.h>

#define KRN_CU_TILE_N       128u  /* weight rows of a tile */
#define KRN_CU_TILE_K       64u   /* weights of a row a step */
#define KRN_CU_GROUP_SLOTS  1024u /* slots that one block of the grouping kernels sorts */
#define KRN_CU_SPLIT_KEYS   256u  /* keys of one part of decode attention, or twice as many, ... */
#define KRN_CU_SPLIT_BLOCKS 132u  /* ... while there would be more parts of all KV heads than this */
#define KRN_CU_SPLIT_HEADS  16u   /* query heads that share its loads */
#define KRN_CU_JOIN_FEW     16u   /* parts that are joined by a block that ran one of them */
#define KRN_CU_COUNTERS     1024u /* of blocks that are through, in decode attention */
#define KRN_CU_ROWS_MAX     64u   /* generated tokens that are computed together */
#define KRN_CU_KV_BLOCK     128u  /* tokens of a sequence that lie side by side in the KV memory */
#define KRN_CU_KEY_BLOCK    64u   /* keys of a step of prompt attention, at absolute multiples */
#define KRN_CU_QUERY_BLOCK  128u
#define KRN_CU_SM90_KEYS    128u /* on Hopper */
#define KRN_CU_SUMS_BYTES                                                                                    \
    104576u /* unfinished sums of a block of Hopper's prompt attention: 128 + 384 * 68 * 4 */

/* Steps of tokens in shared memory in krn_cu_experts_sm90.cu. */
#define KRN_CU_X_STAGES 5u

/* Hidden rows are stored divided by this (exactly), so that f16 reaches to a million. */
#define KRN_CU_HIDDEN_SCALE 16.0f

/* Matrix-vector products: threads of a block, experts of a token, experts in all, experts of a block of the
 * router; bytes that a row of so many takes in a warp's stage, what lies before and behind it included; the
 * same of an expert's rows in down, apart so that eight experts do not meet in a bank. */
#define KRN_CU_GEMV_THREADS    256u
#define KRN_CU_GEMV_CHUNK      2048u /* weights of a row fetched at a time */
#define KRN_CU_TOP_K_MAX       64u
#define KRN_CU_EXPERTS_MAX     1024u
#define KRN_CU_ROUTER_EACH     4u
#define KRN_CU_ROW_SLOT(bytes) ((((bytes) + 30u) & ~15u) + 48u)
#define KRN_CU_SEGMENT(bytes)  ((KRN_CU_ROW_SLOT(bytes) + 111u) / 128u * 128u + 16u)

/* A weight matrix in storage form. data: 16-byte aligned, readable up to the next multiple of 16. */
struct krn_cu_matrix {
    uint64_t data;
    uint32_t type; /* enum krn_ggml_id */
    uint32_t rows, cols, row_bytes;
};

struct krn_cu_embed_args {
    struct krn_cu_matrix m;
    uint64_t ids, y;
    uint32_t tokens, reserved;
};

struct krn_cu_norm_args {
    uint64_t x, weight, y_f32, y_f16;
    uint32_t tokens, dim;
    float eps;
    uint32_t reserved;
};

/* A generated token of some sequence: where its sequence's blocks are, uint32 [position / KRN_CU_KV_BLOCK +
 * 1]. */
struct krn_cu_row {
    uint64_t blocks;
    uint32_t position, reserved;
};

struct krn_cu_words_args {
    uint64_t from, to; /* uint32 [n]; from may be host memory */
    uint32_t n, reserved;
};

struct krn_cu_rope_table_args {
    uint64_t table;
    uint64_t rows; /* struct krn_cu_row [tokens]: their positions; 0: position and on */
    uint32_t position, tokens, head_dim;
    float base;
};

struct krn_cu_qkv_args {
    uint64_t q, k, v, q_weight, k_weight, table, q_out, k_cache, v_cache, blocks;
    uint32_t tokens, heads, kv_heads, head_dim, position, ctx;
    float eps;
    uint32_t reserved;
};

struct krn_cu_combine_args {
    uint64_t out, weights, y;
    uint32_t tokens, top_k, hidden, reserved;
};

struct krn_cu_expand_args {
    struct krn_cu_matrix m;
    uint64_t y;
};

struct krn_cu_gemm_args {
    struct krn_cu_matrix m; /* F16 only in the plain kernel */
    uint64_t x, y;          /* f16 [tokens][cols], float [tokens][rows] */
    uint32_t tokens;
    uint32_t add;        /* y += instead of y = */
    uint32_t raw_stride; /* bytes of a row's raw weights in shared memory */
    uint32_t reserved;
};

/* Where a routing set becomes visible to expertd; all zero: nowhere. */
struct krn_cu_publication {
    uint64_t mask, tokens, predicted, published_ns,
        seq;                 /* addresses in mapped host memory; predicted may be 0 */
    uint64_t value;          /* for seq */
    int64_t clock_offset_ns; /* CLOCK_MONOTONIC minus the device's global timer */
};

/* A vector that a block brings into shared memory (krn_cu_vector.cuh). */
struct krn_cu_x {
    uint64_t x;    /* f16; with norm float */
    uint64_t norm; /* weights of an RMS norm on the way; 0: none */
    float eps;
    uint32_t cols, forms;
    uint32_t stride; /* bytes of one in shared memory */
};

struct krn_cu_gemv_args {
    struct krn_cu_x x;
    struct krn_cu_matrix m[3];
    uint64_t y[3];
    uint32_t count, add;
    uint32_t stages, reserved;
};

struct krn_cu_expert_gemv_args {
    struct krn_cu_x x;
    struct krn_cu_matrix a, b; /* data: offset in the blob. gate and up, or down twice */
    uint64_t blobs;            /* uint64 [tokens * top_k]; 0: not to be run */
    uint64_t weights; /* down: 0, or the outputs' weights: then y += their sum, float [tokens][hidden] */
    uint64_t y;       /* f16 [slots][width], or float [slots][hidden] */
    uint32_t top_k, stages;
};

struct krn_cu_token_router_args {
    struct krn_cu_x x;
    uint64_t w, scores, ids, weights, blobs, resident, predicted_ids, counter;
    uint64_t ran; /* uint32, choices of residents are added; 0: none */
    uint32_t experts, top_k, renorm, reserved;
    struct krn_cu_publication publication;
};

struct krn_cu_locate_args {
    uint64_t ids, resident, table, ring, slot_bytes, blobs;
    uint64_t ran; /* uint32, choices found in the table are added; 0: none */
    uint32_t slots, group, group_end, ring_slots;
    uint32_t all, reserved; /* with a table: the residents too */
};

struct krn_cu_scores_args {
    uint64_t x, w, scores;
    uint32_t tokens, experts, hidden, reserved;
};

struct krn_cu_select_args {
    uint64_t scores, ids, weights;
    uint32_t tokens, experts, top_k, renorm;
};

struct krn_cu_count_args {
    uint64_t ids, hist; /* hist [blocks][experts] */
    uint32_t slots, experts;
};

struct krn_cu_finish_args {
    uint64_t hist;           /* in: counts; out: first position of the block's slots of the expert */
    uint64_t predicted_hist; /* 0: none */
    uint64_t counts, offsets;
    uint32_t blocks, experts;
    struct krn_cu_publication publication;
};

struct krn_cu_place_args {
    uint64_t ids, hist, slots;
    uint32_t n_slots, experts;
};

/* One expert that has tokens and weights. */
struct krn_cu_job {
    uint64_t blob;
    uint32_t first, count; /* its piece of the sorted slots */
};

/* Made on the device, group by group. tiles: job << 16 | tile of tokens. */
struct krn_cu_plan_head {
    uint32_t jobs, tiles, reserved[2];
};

struct krn_cu_plan_args {
    uint64_t table;    /* slot table row in host memory; 0: run the residents */
    uint64_t resident; /* blob addresses [experts], 0 where streamed; may be 0 with a table */
    uint64_t ring, slot_bytes, counts, offsets;
    uint64_t head, jobs, tiles; /* out */
    uint64_t ran;               /* uint32, choices whose expert is run are added; 0: none */
    uint32_t experts, group, group_end, tile_tokens, ring_slots, reserved;
};

struct krn_cu_expert_args {
    uint64_t head, jobs, tiles, slots;
    struct krn_cu_matrix a, b; /* data: offset in the blob. gate and up, or down twice */
    uint64_t x;                /* f16 [tokens][hidden], or the hidden rows [slots][width] */
    uint64_t y; /* f16 [slots][width] by sorted position and scaled, or float [slots][hidden] by slot */
    uint32_t top_k, raw_stride, tile_tokens;
    uint32_t tokens, add, reserved; /* dense products in krn_cu_experts_sm90.cu; add: y += instead of y = */
};

struct krn_cu_attention_args {
    uint64_t q, k, v, y; /* f16 */
    uint64_t blocks;     /* where the sequence's keys and values are: uint32 a block of the KV memory */
    uint32_t tokens, position, heads, kv_heads, head_dim, ctx;
    float scale_log2; /* log2(e) / sqrt(head_dim) */
    uint32_t reserved;
};

/* The driver's description of a tensor for the copy engine. */
struct krn_cu_tensor_map {
    uint64_t opaque[16];
} __attribute__((aligned(64)));

struct krn_cu_attention_sm90_args {
    struct krn_cu_tensor_map q_map, k_map, v_map; /* boxes of 64 columns */
    uint64_t y;                                   /* f16 */
    uint64_t blocks;                              /* as above; a step of keys is a block */
    uint64_t sums;                                /* KRN_CU_SUMS_BYTES a block, flags zero before and after */
    uint32_t tokens, position, heads, kv_heads;
    uint32_t whole; /* (queries, head) items that blocks run whole; see krn_cu_attn_sm90.cu */
    uint32_t rest;  /* key blocks of the others */
    float scale_log2;
    uint32_t reserved;
};

struct krn_cu_decode_args {
    uint64_t q, k, v, y, part; /* part: float [tokens][heads][parts][head_dim + 4] */
    uint64_t rows;             /* struct krn_cu_row [tokens] */
    uint32_t tokens, heads, kv_heads, head_dim, ctx, parts; /* parts: of the longest */
    float scale_log2;
    uint32_t reserved;
    uint64_t counters; /* 0: parts are joined by another kernel */
    /* projects: q is float, norm and rotation are still to be done, the cache's newest row to be written */
    uint64_t k_f32, v_f32, q_weight, k_weight, table;
    float eps;
    uint32_t projects, stages;
    uint32_t blocks; /* of a part: KV heads times sets of query heads */
};

#endif
