/* SPDX-License-Identifier: MIT */
/*
 * Host device compute: the operations of a qwen3moe-style transformer on the
 * CPU. Activations are float32, row-major [tokens][dim]; weights stay in
 * their storage form and are de-quantized in small tiles on the way.
 *
 * Batch-invariant: the order in which an output element is summed depends on
 * the model's shape alone. A token's result is the same bits whatever the
 * number of tokens in the call, its index, the chunk borders, the number of
 * threads. (Between instruction sets: v3 and v4 agree, baseline has no fused
 * multiply-add and differs in the last bits.)
 *
 * No call below allocates except the _create ones, none blocks except on its
 * own pool. Nothing is checked in the hot calls: shapes must satisfy
 * krn_host_shape_check(), indices and positions are the caller's duty.
 * Buffers need 4-byte alignment only; 64 is faster. Outputs never overlap
 * inputs unless a comment says "in place". One call at a time a context.
 */
#ifndef KRN_HOST_H
#define KRN_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/krn_pool.h"
#include "kernels/krn_quant.h"
#include "shm/shm_error.h"

#define KRN_HEAD_DIM_MAX 256
#define KRN_EXPERTS_MAX  1024
#define KRN_KV_ALIGN     64 /* context capacity is rounded up to this */

/* "v4", "v3" or "baseline": what the CPU can do, lowered by the environment
 * variable EXPERTD_ISA if that names a lower one. Decided once. */
const char *krn_host_isa(void);

/* What the kernels can run. Rules: hidden, width and head_dim multiples of 16,
 * head_dim <= KRN_HEAD_DIM_MAX, heads a multiple of kv_heads, 1 <= top_k <=
 * experts <= KRN_EXPERTS_MAX. -EINVAL with one line in err. */
struct krn_shape {
    uint32_t hidden, heads, kv_heads, head_dim, experts, top_k, width;
};
int krn_host_shape_check(const struct krn_shape *shape, struct shm_error *err);

/* Context: the pool (borrowed, must outlive it) and one tile of scratch a
 * thread. max_cols: the longest weight row of any matmul or expert
 * (max(hidden, heads * head_dim, width)). -EINVAL, -ENOMEM. */
struct krn_host;
int krn_host_create(struct krn_pool *pool, uint32_t max_cols, struct krn_host **ret_host);
void krn_host_destroy(struct krn_host **host);

/* A weight matrix in storage form, rows back to back, row r = outputs' r-th
 * weights: cols elements (multiple of 16 and of the type's block). Borrowed. */
struct krn_mat {
    const void *data;
    const struct krn_type *type;
    uint32_t rows, cols;
};

/* y[t][0..cols) = row ids[t] of m. ids[t] < rows. */
void krn_host_embed(struct krn_host *host, const struct krn_mat *m, const uint32_t *ids, uint32_t tokens,
                    float *y);

/* y[t][i] = x[t][i] / sqrt(mean(x[t]^2) + eps) * weight[i]; in place allowed. */
void krn_host_rmsnorm(struct krn_host *host, const float *x, const float *weight, float eps, uint32_t tokens,
                      uint32_t dim, float *y);

/* y[t][r] = sum_k x[t][k] * m[r][k]; x [tokens][cols], y [tokens][rows].
 * Projections, router (F32 or any type), LM head (give it only the rows of x
 * whose logits are wanted). */
void krn_host_matmul(struct krn_host *host, const struct krn_mat *m, const float *x, uint32_t tokens,
                     float *y);

/* y[i] += x[i], n elements. */
void krn_host_add(struct krn_host *host, const float *x, size_t n, float *y);

/* cos and sin of every position, once a chunk for all layers:
 * table[t][0..hd/2) = cos, table[t][hd/2..hd) = sin of
 * positions[t] * base^(-2i/hd). */
void krn_host_rope_table(struct krn_host *host, const uint32_t *positions, uint32_t tokens, uint32_t head_dim,
                         float base, float *table);

/* In place on x [tokens][heads][head_dim]: RMSNorm of every head with weight
 * [head_dim] (NULL: none), then the NeoX rotation (pairs i, i + hd/2) by the
 * table (NULL: none). Call it for q and for k. */
void krn_host_head_norm_rope(struct krn_host *host, float *x, const float *weight, float eps,
                             const float *table, uint32_t tokens, uint32_t heads, uint32_t head_dim);

/*
 * KV of one layer, of all sequences. ctx = capacity in tokens (multiple of KRN_KV_ALIGN).
 * k: [kv_heads][ctx/16][head_dim][16], keys transposed in blocks of 16 so
 *    that 16 keys' scores are one vector; v: [kv_heads][ctx][head_dim].
 * Memory is the caller's and needs no clearing: nothing beyond the appended
 * positions is used. Truncating = appending at a smaller position.
 * Position p of a sequence lies in row block[p / KRN_KV_BLOCK] * KRN_KV_BLOCK + p % KRN_KV_BLOCK.
 */
#define KRN_KV_BLOCK 128u
struct krn_kv {
    float *k, *v;
    uint32_t ctx, kv_heads, head_dim;
};

/* Rounds ctx up and gives the floats that k and v need (each that many).
 * -EOVERFLOW, -EINVAL. */
int krn_host_kv_size(uint32_t ctx, uint32_t kv_heads, uint32_t head_dim, uint32_t *ret_ctx,
                     size_t *ret_floats_each);

/* Consecutive tokens of one sequence, at positions pos0 .. pos0+tokens-1. The rows of a call are those of its
 * spans, one span after the other; no two spans write to one block. */
struct krn_kv_span {
    const uint32_t *block; /* NULL: block i is i */
    uint32_t pos0, tokens;
};

/* k, v [rows][kv_heads][hd]. */
void krn_host_kv_append(struct krn_host *host, const struct krn_kv *kv, const struct krn_kv_span *span,
                        uint32_t spans, const float *k, const float *v);

/* Causal attention: a token sees its sequence's keys up to its own position,
 * which were appended before. q, y [rows][heads][hd]; query head h uses KV head
 * h / (heads / kv_heads). Scores are scaled by 1/sqrt(hd). y may be q. */
void krn_host_attention(struct krn_host *host, const struct krn_kv *kv, const struct krn_kv_span *span,
                        uint32_t spans, uint32_t heads, const float *q, float *y);

/* A sequence's row of a position. */
static inline uint32_t krn_kv_row(const uint32_t *block, uint32_t position)
{
    return block ? block[position / KRN_KV_BLOCK] * KRN_KV_BLOCK + position % KRN_KV_BLOCK : position;
}

/* Softmax over all experts, then the top_k most probable (ties: lower id
 * first), most probable first; renorm: weights divided by their sum.
 * logits [tokens][experts], ret_ids and ret_weights [tokens][top_k]. NaN
 * logits count as the smallest. */
void krn_host_router(struct krn_host *host, const float *logits, uint32_t tokens, uint32_t experts,
                     uint32_t top_k, bool renorm, uint32_t *ret_ids, float *ret_weights);

/* A slot is t * top_k + s: token t's s-th choice. Sorts all slots by expert;
 * inside an expert they ascend (token order). ret_offsets [experts + 1]:
 * expert e has slots ret_slots[ret_offsets[e] .. ret_offsets[e+1]);
 * ret_slots [tokens * top_k]. Count of e = difference of offsets. */
void krn_host_group(const uint32_t *ids, uint32_t tokens, uint32_t experts, uint32_t top_k,
                    uint32_t *ret_offsets, uint32_t *ret_slots);

/* One expert of a layer and the slots it serves (a piece of ret_slots).
 * gate, up: [width][hidden]; down: [hidden][width], storage forms as typed. */
struct krn_expert_job {
    const void *gate, *up, *down;
    const struct krn_type *gate_type, *up_type, *down_type;
    const uint32_t *slots;
    uint32_t n_slots;
};

/* Bytes of scratch for a call whose jobs have n_slots slots in all. A call
 * over every expert of a chunk has tokens * top_k. */
size_t krn_host_expert_scratch_bytes(size_t n_slots, uint32_t width);

/* For every job and slot: out[slot][0..hidden) = down * (silu(gate * x) * (up * x)),
 * unweighted, x = x[slot / top_k]. x [tokens][hidden], out [tokens * top_k][hidden];
 * only the jobs' slots are written. A call may hold one expert or a group of
 * them (better for many threads); the bits are the same. */
void krn_host_experts(struct krn_host *host, const struct krn_expert_job *jobs, uint32_t n_jobs,
                      const float *x, uint32_t top_k, uint32_t hidden, uint32_t width, void *scratch,
                      float *out);

/* y[t] += sum over s in 0..top_k-1, in that order, of weights[t][s] * out[t * top_k + s].
 * Call it once all experts of the layer have run. */
void krn_host_combine(struct krn_host *host, const float *out, const float *weights, uint32_t tokens,
                      uint32_t top_k, uint32_t hidden, float *y);

#endif
