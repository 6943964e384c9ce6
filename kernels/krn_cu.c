/* SPDX-License-Identifier: MIT */
#include "kernels/krn_cu.h"

#include "kernels/krn_cu_launch.h"
#include "kernels/krn_cu_priv.h"
#include "kernels/krn_fatbin.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WORDS_BLOCKS 64u
#define SCORES_FEW   32u
static const char *const module_names[KRN_CU_MODULES] = {
    "krn_cu_basic", "krn_cu_router", "krn_cu_gemm", "krn_cu_attn", "krn_cu_attn_sm90", "krn_cu_experts_sm90"};
#define ROW(kernel, module) {"krn_dev_" #kernel, M_##module},
static const struct {
    const char *name;
    enum krn_cu_module module;
} kernels[KRN_CU_KERNEL_COUNT] = {KRN_CU_KERNELS(ROW)};

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
    for (int m = 0; rc == 0 && m < KRN_CU_MODULES; m++)
        if ((m != M_attn_sm90 && m != M_experts_sm90) ||
            (device->major == 9 && krn_cuda.tensor_map && krn_fatbin_find(module_names[m]) &&
             !without(module_names[m] + strlen("krn_cu_"))))
            rc = krn_cuda_module(module_names[m], &cu->module[m], err);
    for (int k = 0; rc == 0 && k < KRN_CU_KERNEL_COUNT; k++) {
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
    for (int m = 0; m < KRN_CU_MODULES; m++)
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

int krn_cu_launch(struct krn_cu *cu, enum krn_cu_kernel k, struct krn_cu_grid g, void *stream,
                  const void *args)
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
    return krn_cu_launch(cu, K_embed, (struct krn_cu_grid){tokens, 1, 1, 64, 0}, stream, &a);
}

int krn_cu_expand(struct krn_cu *cu, void *stream, const struct krn_cu_matrix *m, krn_cuda_ptr y)
{
    struct krn_cu_expand_args a = {.m = *m, .y = y};
    uint64_t units = (uint64_t)div_up(m->cols, 64) * m->rows;
    uint32_t blocks = div_up(units, THREADS), most = (uint32_t)cu->device->multiprocessors * 32;
    return krn_cu_launch(cu, K_expand, (struct krn_cu_grid){blocks < most ? blocks : most, 1, 1, THREADS, 0},
                         stream, &a);
}

int krn_cu_rmsnorm(struct krn_cu *cu, void *stream, krn_cuda_ptr x, krn_cuda_ptr weight, float eps,
                   uint32_t tokens, uint32_t dim, krn_cuda_ptr y_f32, krn_cuda_ptr y_f16)
{
    struct krn_cu_norm_args a = {x, weight, y_f32, y_f16, tokens, dim, eps, 0};
    return krn_cu_launch(cu, K_rmsnorm, (struct krn_cu_grid){tokens, 1, 1, THREADS, 0}, stream, &a);
}

int krn_cu_rope_table(struct krn_cu *cu, void *stream, uint32_t position, uint32_t tokens, uint32_t head_dim,
                      float base, krn_cuda_ptr table)
{
    struct krn_cu_rope_table_args a = {table, 0, position, tokens, head_dim, base};
    uint64_t n = (uint64_t)tokens * (head_dim / 2);
    return krn_cu_launch(cu, K_rope_table, (struct krn_cu_grid){div_up(n, THREADS), 1, 1, THREADS, 0}, stream,
                         &a);
}

int krn_cu_rope_rows(struct krn_cu *cu, void *stream, const struct krn_cu_rows *rows, uint32_t head_dim,
                     float base, krn_cuda_ptr table)
{
    struct krn_cu_rope_table_args a = {table, rows->at, 0, rows->tokens, head_dim, base};
    uint64_t n = (uint64_t)rows->tokens * (head_dim / 2);
    return krn_cu_launch(cu, K_rope_table, (struct krn_cu_grid){div_up(n, THREADS), 1, 1, THREADS, 0}, stream,
                         &a);
}

int krn_cu_words(struct krn_cu *cu, void *stream, krn_cuda_ptr from, uint32_t n, krn_cuda_ptr to)
{
    struct krn_cu_words_args a = {from, to, n, 0};
    const uint32_t blocks = div_up(n, THREADS);
    return krn_cu_launch(
        cu, K_words, (struct krn_cu_grid){blocks < WORDS_BLOCKS ? blocks : WORDS_BLOCKS, 1, 1, THREADS, 0},
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
    return krn_cu_launch(cu, K_qkv, (struct krn_cu_grid){div_up(warps, THREADS / 32), 1, 1, THREADS, 0},
                         stream, &a);
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
    return krn_cu_launch(cu, wide ? K_attention_128_sm90 : K_attention_64_sm90,
                         (struct krn_cu_grid){blocks, 1, 1, (groups + 1) * 128,
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
    return krn_cu_launch(
        cu, kv->head_dim == 128 ? K_attention_128 : K_attention_64,
        (struct krn_cu_grid){heads, div_up(tokens, KRN_CU_QUERY_BLOCK), 1, GEMM_THREADS, shared}, stream, &a);
}

int krn_cu_scores(struct krn_cu *cu, void *stream, krn_cuda_ptr x, krn_cuda_ptr w, uint32_t tokens,
                  uint32_t experts, uint32_t hidden, krn_cuda_ptr scores)
{
    struct krn_cu_scores_args a = {x, w, scores, tokens, experts, hidden, 0};
    if (hidden % 16)
        return -EINVAL;
    if (tokens <= SCORES_FEW)
        return krn_cu_launch(
            cu, K_scores_few,
            (struct krn_cu_grid){tokens, div_up(experts, 32), 1, 256, div_up(hidden, 256) * 32 * 4}, stream,
            &a);
    return krn_cu_launch(
        cu, K_scores, (struct krn_cu_grid){div_up(tokens, 32), div_up(experts, 128), 1, 256, 0}, stream, &a);
}

int krn_cu_select(struct krn_cu *cu, void *stream, krn_cuda_ptr scores, uint32_t tokens, uint32_t experts,
                  uint32_t top_k, bool renorm, krn_cuda_ptr ids, krn_cuda_ptr weights)
{
    struct krn_cu_select_args a = {scores, ids, weights, tokens, experts, top_k, renorm};
    if (experts > KRN_EXPERTS_MAX || top_k > experts)
        return -EINVAL;
    return krn_cu_launch(cu, experts <= 128 ? K_select_128 : K_select_1024,
                         (struct krn_cu_grid){div_up(tokens, 4), 1, 1, 128, 0}, stream, &a);
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
    const struct krn_cu_grid grid = {blocks, 1, 1, THREADS, experts * 4};
    if (experts > KRN_EXPERTS_MAX)
        return -EINVAL;
    if (publication)
        finish.publication = *publication;
    int rc = krn_cu_launch(cu, K_count, grid, stream, &count);
    if (rc == 0 && predicts)
        rc = krn_cu_launch(cu, K_count, grid, stream, &expected);
    if (rc == 0)
        rc = krn_cu_launch(cu, K_finish, (struct krn_cu_grid){1, 1, 1, 1024, 0}, stream, &finish);
    if (rc == 0)
        rc = krn_cu_launch(cu, K_place, (struct krn_cu_grid){blocks, 1, 1, div_up(experts, 32) * 32, 0},
                           stream, &place);
    return rc;
}
