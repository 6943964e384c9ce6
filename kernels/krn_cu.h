/* SPDX-License-Identifier: MIT */
/*
 * CUDA device compute: the operations of krn_host.h on a GPU, enqueued on a
 * stream. Owns the loaded kernels only; memory, streams and their order are
 * the caller's. Addresses are device addresses unless a comment says host
 * (mapped) memory. Nothing here blocks or allocates except _create; all calls
 * return 0, -EINVAL (a shape no kernel has) or the driver's error.
 *
 * Numbers: the residual stream, scores and expert outputs are float32; what a
 * matrix product multiplies is f16 (normed activations, q, attention output,
 * hidden rows, weights on the way), sums are float32. KV is f16. What is
 * beyond f16's range becomes +-65504, never an infinity, in activations as in
 * BF16 and F32 weights; below 6e-5 f16 keeps fewer bits. Hidden rows can be
 * large and are stored as a sixteenth: they end at about a million. Where
 * quantized weights become f16 by half-precision arithmetic (products of a
 * chunk on compute capability 9.0), block scales end at 16 (K formats; their
 * minima at 512) or 511, and a weight may be off by two roundings, not one.
 *
 * Batch-invariant, in two families. A token of a chunk (dense, experts,
 * attention) gets the same bits whatever the chunk's size and its place in it.
 * A decoded token (gemv, decode) gets the same bits whatever else is in the
 * call. The two families sum in different orders, so a token belongs to one
 * of them by what it is - prompt or generated - never by how many there are.
 *
 * Activation buffers are 16-byte aligned; dims are multiples of 16 as in
 * krn_host_shape_check. Weights: see krn_cu_matrix. Head sizes 64 and 128.
 *
 * Memory a token of a chunk, in bytes: residual 4h, normed 4h + 2h, q, k, v as
 * floats 4(q + 2k), q and attention output f16 2q + 2q, scores 4e, choices
 * 16t (this layer's and the predicted), hidden rows 2wt, expert outputs 4ht,
 * where h hidden, q heads * head size, k KV heads * head size, e experts,
 * t top-k, w width. A 30B-A3B model: 133 KiB without sharing, of which q, k, v
 * and the attention output (36 KiB) may share memory with the expert outputs
 * (64 KiB): 97 KiB, 3.0 GiB for 32,768 tokens.
 *
 * A GPU with 99 KiB of shared memory a block (compute capability 8.6, 8.9,
 * 12.0) runs experts and few-token products in tiles of 32 tokens only, and
 * has no room for F32 experts (-EINVAL). On 9.0 the products of a chunk have
 * kernels of their own (krn_cu_experts_sm90.cu): other bits than on other GPUs.
 */
#ifndef KRN_CU_H
#define KRN_CU_H

#include <stdbool.h>

#include "kernels/krn_cu_args.h"
#include "kernels/krn_cuda.h"
#include "kernels/krn_host.h"

struct krn_cu;

/* Loads the embedded kernels into the device's context (entered by the caller's thread from then on). The
 * device outlives it. -ENOENT built without nvcc; -EOPNOTSUPP no code for this GPU. */
int krn_cu_create(struct krn_cuda_device *device, struct shm_error *err, struct krn_cu **ret_cu);
void krn_cu_destroy(struct krn_cu **cu);

/* Kernels of generated tokens may be started before the one before them has ended (the default where the GPU
 * and the driver know it): no other bits, less time. Returns what is now. */
bool krn_cu_overlap(struct krn_cu *cu, bool wanted);

/* m with its bytes at `data` on the device, 16-byte aligned and readable up to the next multiple of 16. */
struct krn_cu_matrix krn_cu_matrix_of(const struct krn_mat *m, krn_cuda_ptr data);

/* Dense. x_f16 [tokens][cols]. */
int krn_cu_embed(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr ids,
                 uint32_t tokens, krn_cuda_ptr y);

/* y_f32 and y_f16 [tokens][dim]: either may be 0. weight float [dim]. */
int krn_cu_rmsnorm(struct krn_cu *cu, void *stream, krn_cuda_ptr x, krn_cuda_ptr weight, float eps,
                   uint32_t tokens, uint32_t dim, krn_cuda_ptr y_f32, krn_cuda_ptr y_f16);

/* Bytes of scratch that krn_cu_dense wants for m (its weights as f16); 0 for F16 weights. */
uint64_t krn_cu_dense_scratch_bytes(const struct krn_cu_matrix *m);

/* y [tokens][rows] = (add: +=) x * m'. Up to KRN_CU_DENSE_FEW tokens, and 4- to 6-bit formats on compute
 * capability 9.0 always, weights are made f16 tile by tile, else once, into scratch; the bits are the same.
 */
#define KRN_CU_DENSE_FEW 64u
int krn_cu_dense(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr x_f16,
                 uint32_t tokens, bool add, krn_cuda_ptr scratch, krn_cuda_ptr y);

/* The same for generated tokens: bound by reading m once a token. -EINVAL: more columns than a block has room
 * for (20,000 and more). */
int krn_cu_gemv(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr x_f16,
                uint32_t tokens, bool add, krn_cuda_ptr y);

/* Up to three matrices on the same vector, in one launch. x float, with norm weights: normed on the way. */
struct krn_cu_product {
    const struct krn_cu_matrix *m[3];
    krn_cuda_ptr y[3]; /* float [tokens][rows] */
    uint32_t count;
    krn_cuda_ptr x;    /* f16 [tokens][cols]; with norm float */
    krn_cuda_ptr norm; /* float [cols]; 0: none */
    float eps;
    uint32_t tokens;
    bool add;
};
int krn_cu_gemv_of(struct krn_cu *cu, void *stream, const struct krn_cu_product *p);

/* n uint32 from (mapped host or device memory) to; for tables and ids that kernels look at often. */
int krn_cu_words(struct krn_cu *cu, void *stream, krn_cuda_ptr from, uint32_t n, krn_cuda_ptr to);

/* Generated tokens, one of each of several sequences: struct krn_cu_row [tokens] in device memory, up to
 * KRN_CU_ROWS_MAX. They are there before the kernel that is enqueued before the first use of them begins. */
struct krn_cu_rows {
    krn_cuda_ptr at;
    uint32_t tokens, position_most; /* the greatest of their positions, or a greater one */
};

/* Attention. table float [tokens][head_dim], as krn_host_rope_table. */
int krn_cu_rope_table(struct krn_cu *cu, void *stream, uint32_t position, uint32_t tokens, uint32_t head_dim,
                      float base, krn_cuda_ptr table);
int krn_cu_rope_rows(struct krn_cu *cu, void *stream, const struct krn_cu_rows *rows, uint32_t head_dim,
                     float base, krn_cuda_ptr table);

/* KV memory of one layer: f16, k and v [kv_heads][ctx][head_dim], ctx a multiple of KRN_CU_KV_BLOCK, all of
 * it numbers. Sequences share it: a sequence's position p lies in row blocks[p / KRN_CU_KV_BLOCK] *
 * KRN_CU_KV_BLOCK + p % KRN_CU_KV_BLOCK. blocks: uint32 in device memory, as many as the call's positions
 * need; where rows are given, theirs count. */
struct krn_cu_kv {
    krn_cuda_ptr k, v, blocks;
    uint32_t ctx, kv_heads, head_dim;
};

/* q, k, v float [tokens][heads or kv_heads][head_dim] from the projections. Norm of each head of q and k
 * (weights float [head_dim], 0: none), rotation, rounding: q to q_f16, k and v into the cache at
 * position .. position + tokens - 1. head_dim <= 256. */
int krn_cu_qkv(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv, uint32_t position,
               uint32_t tokens, uint32_t heads, krn_cuda_ptr q, krn_cuda_ptr k, krn_cuda_ptr v,
               krn_cuda_ptr q_weight, krn_cuda_ptr k_weight, float eps, krn_cuda_ptr table,
               krn_cuda_ptr q_f16);

/* Token t sees keys 0 .. position + t. head_dim 64 or 128. y f16 [tokens][heads][head_dim]. */
int krn_cu_attention(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv, uint32_t position,
                     uint32_t tokens, uint32_t heads, krn_cuda_ptr q_f16, krn_cuda_ptr y_f16);

/* For generated tokens whose keys and values are in the cache. scratch: krn_cu_decode_scratch_bytes, ctx the
 * most keys of one of them. */
uint64_t krn_cu_decode_scratch_bytes(uint32_t ctx, uint32_t tokens, uint32_t heads, uint32_t head_dim);
int krn_cu_decode(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv, const struct krn_cu_rows *rows,
                  uint32_t heads, krn_cuda_ptr q_f16, krn_cuda_ptr scratch, krn_cuda_ptr y_f16);

/* Generated tokens of different sequences from their projections: as krn_cu_qkv, then krn_cu_decode. q, k, v
 * float, y f16, table of krn_cu_rope_rows. Launches of one device's token kernels must not overlap: they
 * share counters. */
struct krn_cu_token_heads {
    krn_cuda_ptr q, k, v, q_weight, k_weight, table, scratch, y_f16;
    struct krn_cu_rows rows;
    uint32_t heads;
    float eps;
};
int krn_cu_token_attention(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv,
                           const struct krn_cu_token_heads *h);

/* Router. scores [tokens][experts] = x_f32 [tokens][hidden] * w [experts][hidden], float32. */
int krn_cu_scores(struct krn_cu *cu, void *stream, krn_cuda_ptr x_f32, krn_cuda_ptr w, uint32_t tokens,
                  uint32_t experts, uint32_t hidden, krn_cuda_ptr scores);

/* As krn_host_router: ids, weights [tokens][top_k]. */
int krn_cu_select(struct krn_cu *cu, void *stream, krn_cuda_ptr scores, uint32_t tokens, uint32_t experts,
                  uint32_t top_k, bool renorm, krn_cuda_ptr ids, krn_cuda_ptr weights);

/* Norm, scores and choice of generated tokens, publication of a single one's (of several: krn_cu_group), and
 * the addresses of the residents chosen: blobs uint64 [tokens * top_k], 0 where an expert is streamed.
 * scores: scratch. top_k <= 64, tokens up to KRN_CU_ROWS_MAX. */
struct krn_cu_token_route {
    krn_cuda_ptr x, norm, w; /* float [tokens][hidden], [hidden], [experts][hidden] */
    krn_cuda_ptr scores, ids, weights, blobs;
    krn_cuda_ptr resident;                        /* uint64 [experts]; 0: none */
    const struct krn_cu_publication *publication; /* NULL: nobody waits */
    krn_cuda_ptr predicted_ids;                   /* [top_k], of the next layer, published with it; 0: none */
    krn_cuda_ptr ran; /* uint32: the number of choices that are residents is added; 0: none */
    uint32_t tokens, hidden, experts, top_k;
    float eps;
    bool renorm;
};
int krn_cu_token_router(struct krn_cu *cu, void *stream, const struct krn_cu_token_route *r);

/* Grouping: slots (t * top_k + s) sorted by expert, ascending inside one, as krn_host_group. */
struct krn_cu_groups {
    krn_cuda_ptr counts, offsets, slots; /* uint32 [experts], [experts + 1], [tokens * top_k] */
    krn_cuda_ptr hist, predicted_hist;   /* scratch, krn_cu_hist_bytes each; predicted_hist may be 0 */
    uint32_t predicted_tokens;           /* whose choices predicted_ids holds, at most tokens; 0: all */
};
uint64_t krn_cu_hist_bytes(uint32_t tokens, uint32_t top_k, uint32_t experts);

/* predicted_ids: 0, or the choices of the next layer's router, whose counts are published with it.
 * publication: NULL, or where the set becomes visible (host memory): mask of KRN_EXPERTS_MAX bits and counts
 * first, then the time, then, after a system-wide fence, seq = value. */
int krn_cu_group(struct krn_cu *cu, void *stream, krn_cuda_ptr ids, krn_cuda_ptr predicted_ids,
                 uint32_t tokens, uint32_t experts, uint32_t top_k,
                 const struct krn_cu_publication *publication, const struct krn_cu_groups *groups);

/* An expert layer's shape: parts of a blob by their offsets (data), in storage form. */
struct krn_cu_expert_shape {
    struct krn_cu_matrix gate, up, down;
    uint32_t experts, top_k;
};

/* Scratch of the experts: plan (head, jobs, tiles), and the hidden rows f16 [tokens * top_k][width]. */
uint64_t krn_cu_plan_bytes(uint32_t tokens, uint32_t top_k, uint32_t experts);

struct krn_cu_expert_run {
    const struct krn_cu_expert_shape *shape;
    const struct krn_cu_groups *groups;
    krn_cuda_ptr resident; /* uint64 [experts] blob addresses, 0 where streamed; 0: none */
    krn_cuda_ptr table;    /* host memory: the layer's slot table; 0: run the residents */
    krn_cuda_ptr ring;     /* with a table: groups group .. group_end - 1 are run */
    uint64_t slot_bytes;
    uint32_t ring_slots, group, group_end;
    uint32_t tokens;
    krn_cuda_ptr x_f16;             /* [tokens][hidden] */
    krn_cuda_ptr plan, hidden_rows; /* scratch */
    krn_cuda_ptr ran; /* uint32: the number of choices whose expert is run is added (decode: of those in the
                         table; krn_cu_token_router has the others); 0: none */
    krn_cuda_ptr out; /* float [tokens * top_k][hidden]: rows of the experts that ran */

    /* The family of generated tokens: by ids, without groups; plan begins with uint64 [tokens * top_k], where
     * the experts' bytes are. top_k <= 64. */
    bool decode;
    bool all;         /* with a table: the residents too */
    bool located;     /* plan was made by krn_cu_token_router: neither resident nor table is looked at */
    krn_cuda_ptr ids; /* [tokens * top_k] */
    krn_cuda_ptr x_f32, norm; /* norm weights: x_f32 is normed on the way, x_f16 not looked at */
    float eps;
    krn_cuda_ptr weights; /* 0, or [tokens * top_k]: out is the residual float [tokens][hidden], added to as
                             by krn_cu_combine */
};
int krn_cu_experts(struct krn_cu *cu, void *stream, const struct krn_cu_expert_run *run);

/* y[t] += sum over s, in order, of weights[t][s] * out[t * top_k + s]. */
int krn_cu_combine(struct krn_cu *cu, void *stream, krn_cuda_ptr out, krn_cuda_ptr weights, uint32_t tokens,
                   uint32_t top_k, uint32_t hidden, krn_cuda_ptr y);

/* Weights to f16 [rows][cols]; BF16 may be converted in place. */
int krn_cu_expand(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr y_f16);

#endif
