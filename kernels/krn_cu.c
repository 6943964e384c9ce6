/* SPDX-License-Identifier: MIT */
#include "kernels/krn_cu.h"

#include "kernels/krn_cu_priv.h"
#include "kernels/krn_fatbin.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MODULES      6
#define THREADS      256u
#define WORDS_BLOCKS 64u
#define GEMM_THREADS 128u
#define TILE_BYTES   (128u * 128u) /* 128 rows of 64 f16 */
#define DENSE_SHARED (3 * 2 * TILE_BYTES)
#define TILE_FEW     32u
#define TILE_MANY    256u
#define TILE_PLAIN   128u
#define WGMMA_MANY   256u
#define WGMMA_FEW    64u
#define SCORES_FEW   32u
/* Tokens per expert, on average, from which the large tile pays. */
#define EXPERT_MANY 40u

/* X(kernel, module) */
#define KERNELS(X)                                                                                           \
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
enum kernel { KERNELS(ENUM) KERNEL_COUNT };
enum module { M_basic, M_router, M_gemm, M_attn, M_attn_sm90, M_experts_sm90 };
static const char *const module_names[MODULES] = {"krn_cu_basic", "krn_cu_router",    "krn_cu_gemm",
                                                  "krn_cu_attn",  "krn_cu_attn_sm90", "krn_cu_experts_sm90"};
#define ROW(kernel, module) {"krn_dev_" #kernel, M_##module},
static const struct {
    const char *name;
    enum module module;
} kernels[KERNEL_COUNT] = {KERNELS(ROW)};

struct krn_cu {
    struct krn_cuda_device *device;
    void *module[MODULES];
    void *function[KERNEL_COUNT];
    bool whole_items;           /* test mode: attention cuts none */
    krn_cuda_ptr sums;          /* Hopper's prompt attention: KRN_CU_SUMS_BYTES a multiprocessor */
    struct krn_cu_token *token; /* what generated tokens have of their own */
};

static uint32_t div_up(uint64_t a, uint32_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* Cleared before any other stream could read it: those here do not wait for the default one. */
static int make_zeros(size_t bytes, krn_cuda_ptr *ret_ptr, struct shm_error *err)
{
    void *stream = NULL;
    int rc = KRN_CUDA(mem_alloc, ret_ptr, bytes);
    if (rc)
        *ret_ptr = 0;
    if (!rc)
        rc = KRN_CUDA(stream_create, &stream, KRN_CUDA_STREAM_NON_BLOCKING);
    if (!rc)
        rc = KRN_CUDA(memset_8_async, *ret_ptr, 0, bytes, stream);
    if (!rc)
        rc = KRN_CUDA(stream_synchronize, stream);
    if (rc)
        shm_error_set(err, -rc,
                      "%.1f MiB of device memory for the attention kernels cannot be had or cleared",
                      (double)bytes / 1048576);
    if (stream)
        krn_cuda.stream_destroy(stream);
    return rc;
}

/* Test mode: EXPERTD_WITHOUT names families of Hopper's kernels that are not to be used, "attn_sm90
 * experts_sm90 shared_items" (the last: attention's last items, cut among blocks). */
static bool without(const char *what)
{
    const char *list = getenv("EXPERTD_WITHOUT");
    return list && strstr(list, what);
}

int krn_cu_create(struct krn_cuda_device *device, struct shm_error *err, struct krn_cu **ret_cu)
{
    struct krn_cu *cu = calloc(1, sizeof *cu);
    if (!cu)
        return -ENOMEM;
    cu->device = device;
    cu->whole_items = without("shared_items");
    int rc = krn_cuda_enter(device);
    for (int m = 0; rc == 0 && m < MODULES; m++)
        if ((m != M_attn_sm90 && m != M_experts_sm90) ||
            (device->major == 9 && krn_cuda.tensor_map && krn_fatbin_find(module_names[m]) &&
             !without(module_names[m] + strlen("krn_cu_"))))
            rc = krn_cuda_module(module_names[m], &cu->module[m], err);
    for (int k = 0; rc == 0 && k < KERNEL_COUNT; k++) {
        if (!cu->module[kernels[k].module])
            continue;
        /* these take what the shape at hand needs */
        unsigned shared = kernels[k].module == M_gemm || kernels[k].module == M_attn ||
                                  kernels[k].module == M_attn_sm90 || kernels[k].module == M_experts_sm90
                              ? device->shared_max
                              : 0;
        rc = krn_cuda_kernel(cu->module[kernels[k].module], kernels[k].name, shared, &cu->function[k], err);
    }
    size_t sums = (size_t)device->multiprocessors * KRN_CU_SUMS_BYTES;
    if (rc == 0 && cu->module[M_attn_sm90])
        rc = make_zeros(sums, &cu->sums, err);
    if (rc == 0)
        rc = krn_cu_token_create(device, err, &cu->token);
    if (rc) {
        krn_cu_destroy(&cu);
        return rc;
    }
    *ret_cu = cu;
    return 0;
}

void krn_cu_destroy(struct krn_cu **cu)
{
    if (!*cu)
        return;
    krn_cu_token_destroy(&(*cu)->token);
    for (int m = 0; m < MODULES; m++)
        if ((*cu)->module[m])
            krn_cuda.module_unload((*cu)->module[m]);
    if ((*cu)->sums)
        krn_cuda.mem_free((*cu)->sums);
    free(*cu);
    *cu = NULL;
}

struct krn_cu_matrix krn_cu_matrix_of(const struct krn_mat *m, krn_cuda_ptr data)
{
    uint64_t row_bytes = 0;
    krn_row_bytes(m->type, m->cols, &row_bytes);
    return (struct krn_cu_matrix){data, m->type->ggml_id, m->rows, m->cols, (uint32_t)row_bytes};
}

struct krn_cu_token *krn_cu_token_of(struct krn_cu *cu)
{
    return cu->token;
}

struct grid {
    uint32_t x, y, z, threads, shared;
};

static int launch(struct krn_cu *cu, enum kernel k, struct grid g, void *stream, const void *args)
{
    void *params[] = {(void *)args};
    if (!g.x || !g.y || !g.z)
        return 0;
    return krn_cuda_check(
        krn_cuda.launch(cu->function[k], g.x, g.y, g.z, g.threads, 1, 1, g.shared, stream, params, NULL),
        kernels[k].name);
}

int krn_cu_embed(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr ids,
                 uint32_t tokens, krn_cuda_ptr y)
{
    struct krn_cu_embed_args a = {.m = *m, .ids = ids, .y = y, .tokens = tokens};
    return launch(cu, K_embed, (struct grid){tokens, 1, 1, 64, 0}, stream, &a);
}

int krn_cu_expand(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr y)
{
    struct krn_cu_expand_args a = {.m = *m, .y = y};
    uint64_t units = (uint64_t)div_up(m->cols, 64) * m->rows;
    uint32_t blocks = div_up(units, THREADS), most = (uint32_t)cu->device->multiprocessors * 32;
    return launch(cu, K_expand, (struct grid){blocks < most ? blocks : most, 1, 1, THREADS, 0}, stream, &a);
}

int krn_cu_rmsnorm(struct krn_cu *cu, void *stream, krn_cuda_ptr x, krn_cuda_ptr weight, float eps,
                   uint32_t tokens, uint32_t dim, krn_cuda_ptr y_f32, krn_cuda_ptr y_f16)
{
    struct krn_cu_norm_args a = {x, weight, y_f32, y_f16, tokens, dim, eps, 0};
    return launch(cu, K_rmsnorm, (struct grid){tokens, 1, 1, THREADS, 0}, stream, &a);
}

/* Bytes of a row's raw weights in shared memory: an odd number of 16-byte pieces, so that threads that read a
 * row each do not meet in a bank. */
static uint32_t raw_stride(uint32_t type)
{
    switch (type) {
    case KRN_Q4_K:
        return 144;
    case KRN_Q5_K:
        return 176;
    case KRN_Q6_K:
        return 240; /* 210 from an address that is a multiple of 2 */
    case KRN_Q4_0:
        return 176; /* 144, likewise */
    case KRN_Q8_0:
        return 112; /* 64 weights are 68 bytes */
    case KRN_F32:
        return 272;
    default:
        return 144;
    }
}

static uint32_t quantized_shared(uint32_t tile_tokens, uint32_t stride)
{
    return 2 * tile_tokens * 128 + 2 * TILE_BYTES + 2 * 128 * stride;
}

/* The stride, narrowed where the GPU has less shared memory; 0: does not fit. */
static uint32_t fit_stride(const struct krn_cu *cu, uint32_t type, uint32_t tile_tokens)
{
    uint32_t stride = raw_stride(type), most = (uint32_t)cu->device->shared_max;
    if (quantized_shared(tile_tokens, stride) > most)
        stride -= 16; /* slower, enough for every type but F32's alignment needs none either */
    return quantized_shared(tile_tokens, stride) > most ? 0 : stride;
}

uint64_t krn_cu_dense_scratch_bytes(const struct krn_cu_matrix *m)
{
    return m->type == KRN_F16 ? 0 : (uint64_t)m->rows * m->cols * 2;
}

/* Formats of which 256 weights are fetched together. */
static bool in_large_chunks(uint32_t type)
{
    return type == KRN_Q4_K || type == KRN_Q5_K || type == KRN_Q6_K || type == KRN_Q4_0;
}

/* As raw_stride, for krn_cu_experts_sm90.cu: its room is short with Q6_K. */
static uint32_t stride_sm90(uint32_t type)
{
    return type == KRN_Q6_K ? 224 : raw_stride(type);
}

/* Header, tokens, chunks (three where a chunk is one step, else two), results on their way out. */
static uint32_t wgmma_shared(uint32_t tile_tokens, uint32_t type)
{
    return 1024 + KRN_CU_X_STAGES * tile_tokens * 128 +
           (in_large_chunks(type) ? 2 : 3) * 128 * stride_sm90(type) + 2 * 16 * 272;
}

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* On Hopper. Tiles of fewer tokens where large ones are too few for all multiprocessors. */
static int dense_sm90(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr x,
                      uint32_t tokens, bool add, krn_cuda_ptr y)
{
    const uint32_t stride = stride_sm90(m->type), n_tiles = div_up(m->rows, KRN_CU_TILE_N),
                   processors = (uint32_t)cu->device->multiprocessors;
    const bool many = tokens > WGMMA_FEW, q4_k = m->type == KRN_Q4_K;
    uint32_t tile = many ? WGMMA_MANY : WGMMA_FEW;
    while (tile > WGMMA_FEW && (div_up(tokens, tile) * n_tiles < processors * 3 / 4 ||
                                wgmma_shared(tile, m->type) > (uint32_t)cu->device->shared_max))
        tile /= 2;
    const uint32_t tiles = div_up(tokens, tile) * n_tiles, blocks = processors * (many ? 1 : 2);
    struct krn_cu_expert_args a = {.a = *m,
                                   .b = *m,
                                   .x = x,
                                   .y = y,
                                   .raw_stride = stride,
                                   .tile_tokens = tile,
                                   .tokens = tokens,
                                   .add = add};
    return launch(cu,
                  many   ? q4_k ? K_wg_dense_q4_k : K_wg_dense
                  : q4_k ? K_wg_dense_q4_k_few
                         : K_wg_dense_few,
                  (struct grid){tiles < blocks ? tiles : blocks, 1, 1, 384, wgmma_shared(tile, m->type)},
                  stream, &a);
}

int krn_cu_dense(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr x,
                 uint32_t tokens, bool add, krn_cuda_ptr scratch, krn_cuda_ptr y)
{
    struct krn_cu_gemm_args a = {.m = *m, .x = x, .y = y, .tokens = tokens, .add = add};
    if (m->cols % 16)
        return -EINVAL;
    if (cu->module[M_experts_sm90] && in_large_chunks(m->type) && tokens) /* the others gain nothing */
        return dense_sm90(cu, stream, m, x, tokens, add, y);
    if (tokens <= KRN_CU_DENSE_FEW && (a.raw_stride = fit_stride(cu, m->type, TILE_FEW)))
        return launch(cu, K_dense_few,
                      (struct grid){div_up(m->rows, KRN_CU_TILE_N), div_up(tokens, TILE_FEW), 1, GEMM_THREADS,
                                    quantized_shared(TILE_FEW, a.raw_stride)},
                      stream, &a);
    if (m->type != KRN_F16) {
        int rc = krn_cu_expand(cu, stream, m, scratch);
        if (rc)
            return rc;
        a.m = (struct krn_cu_matrix){scratch, KRN_F16, m->rows, m->cols, m->cols * 2};
    }
    return launch(cu, K_dense,
                  (struct grid){div_up(tokens, TILE_PLAIN), div_up(m->rows, KRN_CU_TILE_N), 1, GEMM_THREADS,
                                DENSE_SHARED},
                  stream, &a);
}

int krn_cu_rope_table(struct krn_cu *cu, void *stream, uint32_t position, uint32_t tokens, uint32_t head_dim,
                      float base, krn_cuda_ptr table)
{
    struct krn_cu_rope_table_args a = {table, 0, position, tokens, head_dim, base};
    uint64_t n = (uint64_t)tokens * (head_dim / 2);
    return launch(cu, K_rope_table, (struct grid){div_up(n, THREADS), 1, 1, THREADS, 0}, stream, &a);
}

int krn_cu_rope_rows(struct krn_cu *cu, void *stream, const struct krn_cu_rows *rows, uint32_t head_dim,
                     float base, krn_cuda_ptr table)
{
    struct krn_cu_rope_table_args a = {table, rows->at, 0, rows->tokens, head_dim, base};
    uint64_t n = (uint64_t)rows->tokens * (head_dim / 2);
    return launch(cu, K_rope_table, (struct grid){div_up(n, THREADS), 1, 1, THREADS, 0}, stream, &a);
}

int krn_cu_words(struct krn_cu *cu, void *stream, krn_cuda_ptr from, uint32_t n, krn_cuda_ptr to)
{
    struct krn_cu_words_args a = {from, to, n, 0};
    const uint32_t blocks = div_up(n, THREADS);
    return launch(cu, K_words, (struct grid){blocks < WORDS_BLOCKS ? blocks : WORDS_BLOCKS, 1, 1, THREADS, 0},
                  stream, &a);
}

int krn_cu_qkv(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv, uint32_t position,
               uint32_t tokens, uint32_t heads, krn_cuda_ptr q, krn_cuda_ptr k, krn_cuda_ptr v,
               krn_cuda_ptr q_weight, krn_cuda_ptr k_weight, float eps, krn_cuda_ptr table,
               krn_cuda_ptr q_f16)
{
    struct krn_cu_qkv_args a = {.q = q,
                                .k = k,
                                .v = v,
                                .q_weight = q_weight,
                                .k_weight = k_weight,
                                .table = table,
                                .q_out = q_f16,
                                .k_cache = kv->k,
                                .v_cache = kv->v,
                                .blocks = kv->blocks,
                                .tokens = tokens,
                                .heads = heads,
                                .kv_heads = kv->kv_heads,
                                .head_dim = kv->head_dim,
                                .position = position,
                                .ctx = kv->ctx,
                                .eps = eps};
    if (kv->head_dim > 256 || kv->head_dim % 16)
        return -EINVAL;
    uint64_t warps = (uint64_t)tokens * (heads + 2 * kv->kv_heads);
    return launch(cu, K_qkv, (struct grid){div_up(warps, THREADS / 32), 1, 1, THREADS, 0}, stream, &a);
}

/* Boxes of 64 columns and `rows` of dimension `along` (1 or 2). */
static int tensor_map(krn_cuda_ptr data, uint32_t cols, uint32_t ys, uint32_t zs, uint64_t y_bytes,
                      uint64_t z_bytes, int along, uint32_t rows, struct krn_cu_tensor_map *ret_map)
{
    const uint64_t extents[] = {cols, ys, zs}, strides[] = {y_bytes, z_bytes};
    const uint32_t box[] = {64, along == 1 ? rows : 1, along == 2 ? rows : 1}, steps[] = {1, 1, 1};
    return KRN_CUDA(tensor_map, ret_map, KRN_CUDA_TENSOR_F16, 3, (void *)(uintptr_t)data, extents, strides,
                    box, steps, 0, KRN_CUDA_TENSOR_SWIZZLE_128, KRN_CUDA_TENSOR_L2_256, 0);
}

/* Hopper's kernel: blocks take (queries, head) items whole, but for the last ones, which would leave blocks
 * idle: those they share evenly, if none has to be cut more than once. */
static int attention_sm90(struct krn_cu *cu, void *stream, const struct krn_cu_attention_args *p)
{
    bool wide = p->head_dim == 128;
    uint32_t groups = wide ? 2 : 3, queries = groups * 64, tiles = div_up(p->tokens, queries),
             items = p->heads * tiles, blocks = (uint32_t)cu->device->multiprocessors, longest = 0,
             row = p->head_dim * 2;
    if (!items)
        return 0;
    if (blocks > items)
        blocks = items;
    struct krn_cu_attention_sm90_args a = {.y = p->y,
                                           .blocks = p->blocks,
                                           .sums = cu->sums,
                                           .tokens = p->tokens,
                                           .position = p->position,
                                           .heads = p->heads,
                                           .kv_heads = p->kv_heads,
                                           .whole = items % blocks ? (items / blocks - 1) * blocks : items,
                                           .scale_log2 = p->scale_log2};
    int rc = tensor_map(p->q, p->head_dim, p->heads, p->tokens, row, (uint64_t)p->heads * row, 2, queries,
                        &a.q_map);
    for (int v = 0; rc == 0 && v < 2; v++)
        rc = tensor_map(v ? p->v : p->k, p->head_dim, p->ctx, p->kv_heads, row, (uint64_t)p->ctx * row, 1,
                        KRN_CU_SM90_KEYS, v ? &a.v_map : &a.k_map);
    if (rc)
        return rc;
    for (uint32_t item = a.whole, alike; item < items; item += alike) {
        uint64_t end = (uint64_t)(tiles - item / a.heads) * queries;
        uint32_t steps = div_up(a.position + (end < a.tokens ? end : a.tokens), KRN_CU_SM90_KEYS);
        alike = a.heads - item % a.heads;
        a.rest += alike * steps;
        longest = longest ? longest : steps;
    }
    if (longest > a.rest / blocks || cu->whole_items) {
        a.whole = items;
        a.rest = 0;
    }
    return launch(cu, wide ? K_attention_128_sm90 : K_attention_64_sm90,
                  (struct grid){blocks, 1, 1, (groups + 1) * 128,
                                2048 + (queries + 4 * KRN_CU_SM90_KEYS) * p->head_dim * 2},
                  stream, &a);
}

int krn_cu_attention(struct krn_cu *cu, void *stream, const struct krn_cu_kv *kv, uint32_t position,
                     uint32_t tokens, uint32_t heads, krn_cuda_ptr q, krn_cuda_ptr y)
{
    struct krn_cu_attention_args a = {.q = q,
                                      .k = kv->k,
                                      .v = kv->v,
                                      .y = y,
                                      .blocks = kv->blocks,
                                      .tokens = tokens,
                                      .position = position,
                                      .heads = heads,
                                      .kv_heads = kv->kv_heads,
                                      .head_dim = kv->head_dim,
                                      .ctx = kv->ctx,
                                      .scale_log2 = krn_cu_score_scale(kv->head_dim)};
    if ((kv->head_dim != 64 && kv->head_dim != 128) || kv->ctx % KRN_CU_KV_BLOCK)
        return -EINVAL;
    if (cu->module[M_attn_sm90])
        return attention_sm90(cu, stream, &a); /* for any number of tokens: bits depend on the kernel */
    uint32_t shared = (KRN_CU_QUERY_BLOCK + 4 * KRN_CU_KEY_BLOCK) * kv->head_dim * 2;
    return launch(cu, kv->head_dim == 128 ? K_attention_128 : K_attention_64,
                  (struct grid){heads, div_up(tokens, KRN_CU_QUERY_BLOCK), 1, GEMM_THREADS, shared}, stream,
                  &a);
}

int krn_cu_scores(struct krn_cu *cu, void *stream, krn_cuda_ptr x, krn_cuda_ptr w, uint32_t tokens,
                  uint32_t experts, uint32_t hidden, krn_cuda_ptr scores)
{
    struct krn_cu_scores_args a = {x, w, scores, tokens, experts, hidden, 0};
    if (hidden % 16)
        return -EINVAL;
    if (tokens <= SCORES_FEW)
        return launch(cu, K_scores_few,
                      (struct grid){tokens, div_up(experts, 32), 1, 256, div_up(hidden, 256) * 32 * 4},
                      stream, &a);
    return launch(cu, K_scores, (struct grid){div_up(tokens, 32), div_up(experts, 128), 1, 256, 0}, stream,
                  &a);
}

int krn_cu_select(struct krn_cu *cu, void *stream, krn_cuda_ptr scores, uint32_t tokens, uint32_t experts,
                  uint32_t top_k, bool renorm, krn_cuda_ptr ids, krn_cuda_ptr weights)
{
    struct krn_cu_select_args a = {scores, ids, weights, tokens, experts, top_k, renorm};
    if (experts > KRN_EXPERTS_MAX || top_k > experts)
        return -EINVAL;
    return launch(cu, experts <= 128 ? K_select_128 : K_select_1024,
                  (struct grid){div_up(tokens, 4), 1, 1, 128, 0}, stream, &a);
}

uint64_t krn_cu_hist_bytes(uint32_t tokens, uint32_t top_k, uint32_t experts)
{
    return (uint64_t)div_up((uint64_t)tokens * top_k, KRN_CU_GROUP_SLOTS) * experts * 4;
}

int krn_cu_group(struct krn_cu *cu, void *stream, krn_cuda_ptr ids, krn_cuda_ptr predicted_ids,
                 uint32_t tokens, uint32_t experts, uint32_t top_k,
                 const struct krn_cu_publication *publication, const struct krn_cu_groups *groups)
{
    uint32_t slots = tokens * top_k, blocks = div_up(slots, KRN_CU_GROUP_SLOTS);
    bool predicts = predicted_ids && groups->predicted_hist;
    struct krn_cu_count_args count = {ids, groups->hist, slots, experts};
    const uint32_t predicted =
        groups->predicted_tokens && groups->predicted_tokens < tokens ? groups->predicted_tokens : tokens;
    struct krn_cu_count_args expected = {predicted_ids, groups->predicted_hist, predicted * top_k, experts};
    struct krn_cu_finish_args finish = {.hist = groups->hist,
                                        .predicted_hist = predicts ? groups->predicted_hist : 0,
                                        .counts = groups->counts,
                                        .offsets = groups->offsets,
                                        .blocks = blocks,
                                        .experts = experts};
    struct krn_cu_place_args place = {ids, groups->hist, groups->slots, slots, experts};
    const struct grid grid = {blocks, 1, 1, THREADS, experts * 4};
    if (experts > KRN_EXPERTS_MAX)
        return -EINVAL;
    if (publication)
        finish.publication = *publication;
    int rc = launch(cu, K_count, grid, stream, &count);
    if (rc == 0 && predicts)
        rc = launch(cu, K_count, grid, stream, &expected);
    if (rc == 0)
        rc = launch(cu, K_finish, (struct grid){1, 1, 1, 1024, 0}, stream, &finish);
    if (rc == 0)
        rc = launch(cu, K_place, (struct grid){blocks, 1, 1, div_up(experts, 32) * 32, 0}, stream, &place);
    return rc;
}

/* The plan: head, jobs [experts], tiles. */
#define PLAN_HEAD 256u

static uint64_t plan_jobs_bytes(uint32_t experts)
{
    return (experts * sizeof(struct krn_cu_job) + 255) & ~UINT64_C(255);
}

uint64_t krn_cu_plan_bytes(uint32_t tokens, uint32_t top_k, uint32_t experts)
{
    uint64_t slots = (uint64_t)tokens * top_k;
    return PLAN_HEAD + plan_jobs_bytes(experts) + 8 * (slots + experts); /* 8: decode's addresses */
}

/* How an expert layer is run: tokens of a tile, raw strides of its products, kernels, and
 * blocks that fit on the GPU at a time; they walk over the tiles. */
struct expert_plan {
    uint32_t tile, stride[2], shared[2], threads, blocks;
    enum kernel kernel[2];
};

static bool plan_wgmma(const struct krn_cu *cu, const struct krn_cu_expert_shape *s, bool many,
                       struct expert_plan *p)
{
    const bool up_q4_k = s->gate.type == KRN_Q4_K && s->up.type == KRN_Q4_K,
               down_q4_k = s->down.type == KRN_Q4_K;
    p->stride[0] = stride_sm90(s->gate.type);
    p->stride[1] = stride_sm90(s->down.type);
    p->tile = many ? WGMMA_MANY : WGMMA_FEW;
    do {
        p->shared[0] = larger(wgmma_shared(p->tile, s->gate.type), wgmma_shared(p->tile, s->up.type));
        p->shared[1] = wgmma_shared(p->tile, s->down.type);
    } while (larger(p->shared[0], p->shared[1]) > (uint32_t)cu->device->shared_max &&
             (p->tile /= 2) >= WGMMA_FEW);
    p->threads = 384;
    p->blocks = many ? 1 : 2;
    p->kernel[0] = many      ? up_q4_k ? K_wg_gate_up_q4_k : K_wg_gate_up
                   : up_q4_k ? K_wg_gate_up_q4_k_few
                             : K_wg_gate_up_few;
    p->kernel[1] = many        ? down_q4_k ? K_wg_down_q4_k : K_wg_down
                   : down_q4_k ? K_wg_down_q4_k_few
                               : K_wg_down_few;
    return p->tile >= WGMMA_FEW;
}

static bool plan_mma(const struct krn_cu *cu, const struct krn_cu_expert_shape *s, bool many,
                     struct expert_plan *p)
{
    const uint32_t gate = fit_stride(cu, s->gate.type, p->tile = many ? TILE_MANY : TILE_FEW),
                   up = fit_stride(cu, s->up.type, p->tile), down = fit_stride(cu, s->down.type, p->tile);
    p->stride[0] = larger(gate, up);
    p->stride[1] = down;
    for (int i = 0; i < 2; i++)
        p->shared[i] = quantized_shared(p->tile, p->stride[i]);
    p->threads = many ? 256 : GEMM_THREADS;
    p->blocks = many ? 1 : 2; /* one of the large tiles' fills the registers */
    p->kernel[0] = many ? K_gate_up : K_gate_up_few;
    p->kernel[1] = many ? K_down : K_down_few;
    return gate && up && down;
}

static bool plan_experts(const struct krn_cu *cu, const struct krn_cu_expert_run *run, struct expert_plan *p)
{
    const struct krn_cu_expert_shape *s = run->shape;
    const bool many = run->tokens * s->top_k / s->experts >= EXPERT_MANY;
    return cu->module[M_experts_sm90] && s->gate.type == s->up.type
               ? plan_wgmma(cu, s, many, p)
               : plan_mma(cu, s, many, p) || plan_mma(cu, s, false, p);
}

int krn_cu_experts(struct krn_cu *cu, void *stream, const struct krn_cu_expert_run *run)
{
    const struct krn_cu_expert_shape *s = run->shape;
    const uint32_t slots = run->tokens * s->top_k;
    struct expert_plan p;
    if (s->gate.cols % 16 || s->down.cols % 16 || s->experts > KRN_EXPERTS_MAX)
        return -EINVAL;
    if (run->decode)
        return krn_cu_token_experts(cu->token, stream, run);
    if (slots / TILE_FEW > 0xffff || !plan_experts(cu, run, &p))
        return -EINVAL;
    struct krn_cu_plan_args plan = {.table = run->table,
                                    .resident = run->resident,
                                    .ring = run->ring,
                                    .slot_bytes = run->slot_bytes,
                                    .counts = run->groups->counts,
                                    .offsets = run->groups->offsets,
                                    .head = run->plan,
                                    .jobs = run->plan + PLAN_HEAD,
                                    .tiles = run->plan + PLAN_HEAD + plan_jobs_bytes(s->experts),
                                    .ran = run->ran,
                                    .experts = s->experts,
                                    .group = run->group,
                                    .group_end = run->group_end,
                                    .tile_tokens = p.tile,
                                    .ring_slots = run->ring_slots};
    struct krn_cu_expert_args up = {.head = plan.head,
                                    .jobs = plan.jobs,
                                    .tiles = plan.tiles,
                                    .slots = run->groups->slots,
                                    .a = s->gate,
                                    .b = s->up,
                                    .x = run->x_f16,
                                    .y = run->hidden_rows,
                                    .top_k = s->top_k,
                                    .raw_stride = p.stride[0],
                                    .tile_tokens = p.tile};
    struct krn_cu_expert_args down = up;
    down.a = down.b = s->down;
    down.x = run->hidden_rows;
    down.y = run->out;
    down.raw_stride = p.stride[1];

    int rc = launch(cu, K_plan, (struct grid){1, 1, 1, 1024, 0}, stream, &plan);
    for (int i = 0; rc == 0 && i < 2; i++) {
        struct grid grid = {p.blocks * (uint32_t)cu->device->multiprocessors, 1, 1, p.threads, p.shared[i]};
        rc = launch(cu, p.kernel[i], grid, stream, i ? &down : &up);
    }
    return rc;
}

int krn_cu_combine(struct krn_cu *cu, void *stream, krn_cuda_ptr out, krn_cuda_ptr weights, uint32_t tokens,
                   uint32_t top_k, uint32_t hidden, krn_cuda_ptr y)
{
    struct krn_cu_combine_args a = {out, weights, y, tokens, top_k, hidden, 0};
    uint64_t n = (uint64_t)tokens * (hidden / 4);
    return launch(cu, K_combine, (struct grid){div_up(n, THREADS), 1, 1, THREADS, 0}, stream, &a);
}
