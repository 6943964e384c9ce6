/* SPDX-License-Identifier: MIT */
/* Matrix products of prompts: dense weights, and the experts of a layer. */
#include "kernels/krn_cu_launch.h"
#include "kernels/krn_cu_priv.h"

#include <errno.h>

#define TILE_BYTES   (128u * 128u) /* 128 rows of 64 f16 */
#define DENSE_SHARED (3 * 2 * TILE_BYTES)
#define TILE_FEW     32u
#define TILE_MANY    256u
#define TILE_PLAIN   128u
#define WGMMA_MANY   256u
#define WGMMA_FEW    64u
/* Tokens per expert, on average, from which the large tile pays. */
#define EXPERT_MANY 40u

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
    return krn_cu_launch(
        cu,
        many   ? q4_k ? K_wg_dense_q4_k : K_wg_dense
        : q4_k ? K_wg_dense_q4_k_few
               : K_wg_dense_few,
        (struct krn_cu_grid){tiles < blocks ? tiles : blocks, 1, 1, 384, wgmma_shared(tile, m->type)}, stream,
        &a);
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
        return krn_cu_launch(cu, K_dense_few,
                             (struct krn_cu_grid){div_up(m->rows, KRN_CU_TILE_N), div_up(tokens, TILE_FEW), 1,
                                                  GEMM_THREADS, quantized_shared(TILE_FEW, a.raw_stride)},
                             stream, &a);
    if (m->type != KRN_F16) {
        int rc = krn_cu_expand(cu, stream, m, scratch);
        if (rc)
            return rc;
        a.m = (struct krn_cu_matrix){scratch, KRN_F16, m->rows, m->cols, m->cols * 2};
    }
    return krn_cu_launch(cu, K_dense,
                         (struct krn_cu_grid){div_up(tokens, TILE_PLAIN), div_up(m->rows, KRN_CU_TILE_N), 1,
                                              GEMM_THREADS, DENSE_SHARED},
                         stream, &a);
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
    enum krn_cu_kernel kernel[2];
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

    int rc = krn_cu_launch(cu, K_plan, (struct krn_cu_grid){1, 1, 1, 1024, 0}, stream, &plan);
    for (int i = 0; rc == 0 && i < 2; i++) {
        struct krn_cu_grid grid = {p.blocks * (uint32_t)cu->device->multiprocessors, 1, 1, p.threads,
                                   p.shared[i]};
        rc = krn_cu_launch(cu, p.kernel[i], grid, stream, i ? &down : &up);
    }
    return rc;
}

int krn_cu_combine(struct krn_cu *cu, void *stream, krn_cuda_ptr out, krn_cuda_ptr weights, uint32_t tokens,
                   uint32_t top_k, uint32_t hidden, krn_cuda_ptr y)
{
    struct krn_cu_combine_args a = {out, weights, y, tokens, top_k, hidden, 0};
    uint64_t n = (uint64_t)tokens * (hidden / 4);
    return krn_cu_launch(cu, K_combine, (struct krn_cu_grid){div_up(n, THREADS), 1, 1, THREADS, 0}, stream,
                         &a);
}
