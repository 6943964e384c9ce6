/* SPDX-License-Identifier: MIT */
/*
 * How fast the CUDA kernels are, at the shapes of a 30B-A3B model: one line a
 * case with its time and its rate. Median of a few runs, inputs random, weights
 * larger than the cache. Exit 77 without a driver.
 *
 *     b_cu_kernels [NAME...]      only these: experts tokens dense attention decode token small; hunt: by
 * name alone
 *
 * REPEAT=N or REPEAT_S=SECONDS (of each case): the prompt's products and attention run so often or so long
 * more, and every result must be the first one, bit for bit, as a checksum made on the device says; exit 1 if
 * one was not, with the pieces (of 32) of its rows and columns that were other. BESIDE=1: while copies come
 * from the host.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "kernels/krn_cu_trace.h"

#include "shm/shm_bell.h"
#include "tests/gpu/cu_kit.h"

#define HIDDEN  2048u
#define WIDTH   768u
#define EXPERTS 128u
#define TOP_K   8u
#define RUNS    7

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median ms of RUNS calls after two more. */
static double time_ms(void (*run)(void *), void *ctx)
{
    void *begin, *end;
    float ms[RUNS];
    NEED(KRN_CUDA(event_create, &begin, 0) || KRN_CUDA(event_create, &end, 0));
    for (int i = -2; i < RUNS; i++) {
        NEED(KRN_CUDA(event_record, begin, stream));
        run(ctx);
        NEED(KRN_CUDA(event_record, end, stream) || KRN_CUDA(event_synchronize, end));
        if (i >= 0)
            NEED(KRN_CUDA(event_elapsed, &ms[i], begin, end));
    }
    krn_cuda.event_destroy(begin);
    krn_cuda.event_destroy(end);
    qsort(ms, RUNS, sizeof *ms, by_value);
    return ms[RUNS / 2];
}

static void line(const char *what, double ms, double flop, double bytes)
{
    printf("%-46s %9.3f ms", what, ms);
    if (flop > 0)
        printf(" %8.1f TFLOP/s", flop / ms * 1e-9);
    if (bytes > 0)
        printf(" %8.1f GB/s", bytes / ms * 1e-6);
    putchar('\n');
    fflush(stdout);
}

#define SUMS (2 * KRN_CU_TRACE_PIECES)

static unsigned long repeats;
static double repeat_s;
static bool differed;
static struct krn_cu_trace *trace;
static krn_cuda_ptr sums;

/* Copies of an expert's size from pinned memory, one behind the other, until told to end. */
#define BESIDE_BYTES ((size_t)2654208)
#define BESIDE_SLOTS 16u
static _Atomic bool beside_ends;
static unsigned long long beside_copies;

static void *beside(void *arg)
{
    void *pinned, *own;
    krn_cuda_ptr slots;
    (void)arg;
    NEED(krn_cuda_enter(device));
    NEED(KRN_CUDA(host_alloc, &pinned, BESIDE_BYTES, 0));
    NEED(KRN_CUDA(mem_alloc, &slots, BESIDE_BYTES * BESIDE_SLOTS));
    NEED(KRN_CUDA(stream_create, &own, KRN_CUDA_STREAM_NON_BLOCKING));
    memset(pinned, 1, BESIDE_BYTES);
    while (!atomic_load(&beside_ends)) {
        for (uint32_t i = 0; i < BESIDE_SLOTS; i++)
            NEED(KRN_CUDA(copy_in_async, slots + i * BESIDE_BYTES, pinned, BESIDE_BYTES, own));
        NEED(KRN_CUDA(stream_synchronize, own));
        beside_copies += BESIDE_SLOTS;
    }
    krn_cuda.stream_destroy(own);
    krn_cuda.mem_free(slots);
    krn_cuda.host_free(pinned);
    return NULL;
}

static void sum_up(void (*run)(void *), void *ctx, krn_cuda_ptr y, size_t rows, size_t row_bytes,
                   uint64_t (*ret_sums)[SUMS])
{
    NEED(KRN_CUDA(memset_8_async, sums, 0, sizeof *ret_sums, stream));
    run(ctx);
    NEED(krn_cu_trace_hash(trace, stream, y, rows, row_bytes, row_bytes, sums));
    NEED(KRN_CUDA(copy_out_async, *ret_sums, sums, sizeof *ret_sums, stream));
    cu_wait();
}

static void print_pieces(const char *what, const uint64_t *a, const uint64_t *b)
{
    printf(" %s", what);
    for (uint32_t i = 0; i < KRN_CU_TRACE_PIECES; i++)
        if (a[i] != b[i])
            printf(" %u", i);
}

/* What run writes to y, again and again. */
static void repeat(void (*run)(void *), void *ctx, krn_cuda_ptr y, size_t rows, size_t row_bytes)
{
    unsigned long different = 0, i = 0;
    uint64_t want[SUMS], got[SUMS];
    if (!repeats && repeat_s <= 0)
        return;
    sum_up(run, ctx, y, rows, row_bytes, &want);
    const uint64_t start_ns = shm_now_ns(), limit_ns = (uint64_t)(repeat_s * 1e9);
    for (; i < repeats || shm_now_ns() - start_ns < limit_ns; i++) {
        sum_up(run, ctx, y, rows, row_bytes, &got);
        if (memcmp(got, want, sizeof got) == 0 || different++ >= 5)
            continue;
        printf("    repeat %lu differs:", i);
        print_pieces("rows", want, got);
        print_pieces("columns", want + KRN_CU_TRACE_PIECES, got + KRN_CU_TRACE_PIECES);
        putchar('\n');
    }
    printf("  %lu repeats, %lu different\n", i, different);
    fflush(stdout);
    differed |= different != 0;
}

static const struct krn_type *type_of(const char *name)
{
    return krn_type_by_name(name);
}

/* rows x cols of random weights; large ones repeat a piece. */
static struct krn_cu_matrix weights(const struct krn_type *type, uint32_t rows, uint32_t cols)
{
    uint32_t piece = rows < 1024 ? rows : 1024;
    struct krn_mat m = {krn_rand_weights(&rng, type, piece, cols), type, rows, cols};
    struct krn_cu_matrix r = krn_cu_matrix_of(&m, 0);
    r.data = cu_alloc((size_t)rows * r.row_bytes);
    for (uint32_t at = 0; at < rows; at += piece)
        cu_put(r.data + (size_t)at * r.row_bytes, m.data,
               (size_t)(rows - at < piece ? rows - at : piece) * r.row_bytes);
    free((void *)m.data);
    return r;
}

static krn_cuda_ptr activations(size_t n)
{
    size_t piece = n < 1u << 20 ? n : 1u << 20;
    float *x = krn_rand_floats(&rng, piece, 1);
    uint16_t *h = f16_round(x, piece);
    krn_cuda_ptr p = cu_alloc(n * 2);
    for (size_t at = 0; at < n; at += piece)
        cu_put(p + at * 2, h, (n - at < piece ? n - at : piece) * 2);
    free(x), free(h);
    return p;
}

static krn_cuda_ptr random_floats(size_t n)
{
    float *x = krn_rand_floats(&rng, n, 1);
    krn_cuda_ptr p = cu_copy(x, n * 4);
    free(x);
    return p;
}

struct expert_bench {
    struct krn_cu_expert_run run;
    struct krn_cu_expert_shape shape;
    struct krn_cu_groups groups;
    krn_cuda_ptr ids;
};

static void run_experts(void *ctx)
{
    struct expert_bench *b = ctx;
    NEED(krn_cu_experts(cu, stream, &b->run));
}

static void bench_experts(const char *up_name, const char *down_name, uint32_t tokens, bool decode)
{
    const struct krn_type *up = type_of(up_name), *down = type_of(down_name);
    uint64_t ru, rd;
    NEED(krn_row_bytes(up, HIDDEN, &ru) || krn_row_bytes(down, WIDTH, &rd));
    size_t part = ru * WIDTH, blob = 2 * part + rd * HIDDEN, stride = (blob + 255) & ~(size_t)255;
    krn_cuda_ptr store = cu_alloc(stride * EXPERTS);
    uint64_t address[EXPERTS];
    for (uint32_t first = 0; first < 3; first++) { /* no expert is like its neighbours */
        void *g = krn_rand_weights(&rng, up, 2 * WIDTH, HIDDEN),
             *d = krn_rand_weights(&rng, down, HIDDEN, WIDTH);
        for (uint32_t e = first; e < EXPERTS; e += 3) {
            address[e] = store + e * stride;
            cu_put(address[e], g, 2 * part);
            cu_put(address[e] + 2 * part, d, rd * HIDDEN);
        }
        free(g), free(d);
    }
    size_t slots = (size_t)tokens * TOP_K;
    uint32_t *ids = krn_alloc(slots * 4);
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t s = 0; s < TOP_K; s++)
            ids[t * TOP_K + s] = (krn_rand(&rng) % (EXPERTS / TOP_K)) * TOP_K + s;
    struct expert_bench b = {.shape = {{0, up->ggml_id, WIDTH, HIDDEN, (uint32_t)ru},
                                       {part, up->ggml_id, WIDTH, HIDDEN, (uint32_t)ru},
                                       {2 * part, down->ggml_id, HIDDEN, WIDTH, (uint32_t)rd},
                                       EXPERTS,
                                       TOP_K},
                             .groups = {cu_alloc(EXPERTS * 4), cu_alloc(EXPERTS * 4 + 4), cu_alloc(slots * 4),
                                        cu_alloc(krn_cu_hist_bytes(tokens, TOP_K, EXPERTS)), 0},
                             .ids = cu_copy(ids, slots * 4)};
    NEED(krn_cu_group(cu, stream, b.ids, 0, tokens, EXPERTS, TOP_K, NULL, &b.groups));
    b.run = (struct krn_cu_expert_run){.shape = &b.shape,
                                       .groups = &b.groups,
                                       .resident = cu_copy(address, sizeof address),
                                       .tokens = tokens,
                                       .decode = decode,
                                       .ids = b.ids,
                                       .x_f16 = activations((size_t)tokens * HIDDEN),
                                       .plan = cu_alloc(krn_cu_plan_bytes(tokens, TOP_K, EXPERTS)),
                                       .hidden_rows = cu_alloc(slots * WIDTH * 2),
                                       .out = cu_alloc(slots * HIDDEN * 4)};
    uint8_t used[EXPERTS] = {0};
    double n_used = 0;
    for (size_t i = 0; i < slots; i++)
        used[ids[i]] = 1;
    for (uint32_t e = 0; e < EXPERTS; e++)
        n_used += used[e];
    char what[64];
    snprintf(what, sizeof what, "experts %s/%s, %u tokens%s", up_name, down_name, tokens,
             decode ? ", decode" : "");
    line(what, time_ms(run_experts, &b), 6.0 * HIDDEN * WIDTH * (double)slots, n_used * (double)blob);
    if (!decode)
        repeat(run_experts, &b, b.run.out, slots, HIDDEN * 4);
    free(ids);
    cu_free_all();
}

struct dense_bench {
    struct krn_cu_matrix m[8];
    uint32_t copies, tokens, next;
    krn_cuda_ptr x, y, scratch;
};

static void run_dense(void *ctx)
{
    struct dense_bench *b = ctx;
    NEED(krn_cu_dense(cu, stream, &b->m[b->next++ % b->copies], b->x, b->tokens, false, b->scratch, b->y));
}

static void bench_dense(const char *type, uint32_t rows, uint32_t cols, uint32_t tokens)
{
    struct dense_bench b = {.copies = 1, .tokens = tokens};
    b.m[0] = weights(type_of(type), rows, cols);
    b.x = activations((size_t)tokens * cols);
    b.y = cu_alloc((size_t)tokens * rows * 4);
    b.scratch = cu_alloc((size_t)rows * cols * 2);
    char what[64];
    snprintf(what, sizeof what, "dense %s %u x %u, %u tokens", type, rows, cols, tokens);
    line(what, time_ms(run_dense, &b), 2.0 * rows * cols * tokens,
         tokens <= 64 ? (double)rows * b.m[0].row_bytes : 0);
    repeat(run_dense, &b, b.y, tokens, (size_t)rows * 4);
    cu_free_all();
}

/* A sequence whose blocks follow each other. */
static krn_cuda_ptr blocks_in_order(uint32_t keys)
{
    const uint32_t n = (keys + KRN_CU_KV_BLOCK - 1) / KRN_CU_KV_BLOCK;
    uint32_t *block = krn_alloc(n * sizeof *block);
    for (uint32_t i = 0; i < n; i++)
        block[i] = i;
    const krn_cuda_ptr at = cu_copy(block, n * sizeof *block);
    free(block);
    return at;
}

static struct krn_cu_rows one_row(krn_cuda_ptr blocks, uint32_t position)
{
    const struct krn_cu_row row = {.blocks = blocks, .position = position};
    return (struct krn_cu_rows){cu_copy(&row, sizeof row), 1, position};
}

struct attention_bench {
    struct krn_cu_kv kv;
    struct krn_cu_rows rows;
    uint32_t position, tokens, heads;
    krn_cuda_ptr q, y, scratch;
};

static void run_attention(void *ctx)
{
    struct attention_bench *b = ctx;
    NEED(krn_cu_attention(cu, stream, &b->kv, b->position, b->tokens, b->heads, b->q, b->y));
}

static void run_decode(void *ctx)
{
    struct attention_bench *b = ctx;
    NEED(krn_cu_decode(cu, stream, &b->kv, &b->rows, b->heads, b->q, b->scratch, b->y));
}

static void bench_attention(uint32_t position, uint32_t tokens, uint32_t head_dim, bool decode)
{
    const uint32_t heads = 4096 / head_dim, kv_heads = 4, ctx = (position + tokens + 127) / 128 * 128;
    size_t cache = (size_t)ctx * kv_heads * head_dim, n = (size_t)tokens * heads * head_dim;
    const krn_cuda_ptr blocks = blocks_in_order(ctx);
    struct attention_bench b = {{activations(cache), activations(cache), blocks, ctx, kv_heads, head_dim},
                                one_row(blocks, position + tokens - 1),
                                position,
                                tokens,
                                heads,
                                activations(n),
                                cu_alloc(n * 2),
                                decode ? cu_alloc(krn_cu_decode_scratch_bytes(ctx, tokens, heads, head_dim))
                                       : 0};
    double pairs = (double)tokens * position + 0.5 * (double)tokens * ((double)tokens + 1);
    char what[64];
    snprintf(what, sizeof what, "%s attention hd %u, %u tokens at %u", decode ? "decode" : "prompt", head_dim,
             tokens, position);
    line(what, time_ms(decode ? run_decode : run_attention, &b), 4.0 * head_dim * heads * pairs,
         decode ? 4.0 * (double)cache : 0);
    if (!decode)
        repeat(run_attention, &b, b.y, tokens, (size_t)heads * head_dim * 2);
    cu_free_all();
}

/* Everything around the products, for a chunk of so many tokens. */
struct small_bench {
    uint32_t tokens;
    krn_cuda_ptr x, w, f32, f16, router, scores, ids, weights, out, q, k, v, table, qh;
    struct krn_cu_groups groups;
    struct krn_cu_kv kv;
};

static void run_norm(void *ctx)
{
    struct small_bench *b = ctx;
    NEED(krn_cu_rmsnorm(cu, stream, b->x, b->w, 1e-6f, b->tokens, HIDDEN, b->f32, b->f16));
}
static void run_scores(void *ctx)
{
    struct small_bench *b = ctx;
    NEED(krn_cu_scores(cu, stream, b->f32, b->router, b->tokens, EXPERTS, HIDDEN, b->scores));
}
static void run_select(void *ctx)
{
    struct small_bench *b = ctx;
    NEED(krn_cu_select(cu, stream, b->scores, b->tokens, EXPERTS, TOP_K, true, b->ids, b->weights));
}
static void run_group(void *ctx)
{
    struct small_bench *b = ctx;
    NEED(krn_cu_group(cu, stream, b->ids, b->ids, b->tokens, EXPERTS, TOP_K, NULL, &b->groups));
}
static void run_combine(void *ctx)
{
    struct small_bench *b = ctx;
    NEED(krn_cu_combine(cu, stream, b->out, b->weights, b->tokens, TOP_K, HIDDEN, b->x));
}
static void run_qkv(void *ctx)
{
    struct small_bench *b = ctx;
    NEED(krn_cu_qkv(cu, stream, &b->kv, 0, b->tokens, 32, b->q, b->k, b->v, b->w, b->w, 1e-6f, b->table,
                    b->qh));
}

static void bench_small(uint32_t tokens)
{
    size_t t = tokens, hist = krn_cu_hist_bytes(tokens, TOP_K, EXPERTS);
    struct small_bench b = {
        .tokens = tokens,
        .x = random_floats(t * HIDDEN),
        .w = random_floats(HIDDEN),
        .f32 = cu_alloc(t * HIDDEN * 4),
        .f16 = cu_alloc(t * HIDDEN * 2),
        .router = random_floats(EXPERTS * HIDDEN),
        .scores = cu_alloc(t * EXPERTS * 4),
        .ids = cu_alloc(t * TOP_K * 4),
        .weights = cu_alloc(t * TOP_K * 4),
        .out = cu_alloc(t * TOP_K * HIDDEN * 4),
        .q = random_floats(t * 4096),
        .k = random_floats(t * 512),
        .v = random_floats(t * 512),
        .table = cu_alloc(t * 128 * 4),
        .qh = cu_alloc(t * 4096 * 2),
        .groups = {cu_alloc(EXPERTS * 4), cu_alloc(EXPERTS * 4 + 4), cu_alloc(t * TOP_K * 4), cu_alloc(hist),
                   cu_alloc(hist)},
        .kv = {cu_alloc(t * 512 * 2), cu_alloc(t * 512 * 2), blocks_in_order(tokens), tokens, 4, 128},
    };
    NEED(krn_cu_rope_table(cu, stream, 0, tokens, 128, 1e6f, b.table));
    printf("%u tokens:\n", tokens);
    line("  norm", time_ms(run_norm, &b), 0, (double)t * HIDDEN * 14);
    line("  scores", time_ms(run_scores, &b), 2.0 * t * HIDDEN * EXPERTS, 0);
    line("  choice", time_ms(run_select, &b), 0, (double)t * EXPERTS * 4);
    line("  grouping with prediction", time_ms(run_group, &b), 0, 0);
    line("  combine", time_ms(run_combine, &b), 0, (double)t * HIDDEN * (TOP_K * 4 + 8));
    line("  norm, rotation, KV", time_ms(run_qkv, &b), 0, (double)t * 5120 * 6);
    cu_free_all();
}

/* Generated tokens: products large and small, and all kernels of a token's layers one after another. Weights
 * are not uploaded: what is in them takes no time. */
#define LAYERS   48u
#define ROTATING (UINT64_C(256) << 20) /* bytes of matrices that take turns: more than the cache */

struct rotation {
    struct krn_cu_product p;
    struct krn_cu_matrix m;
    uint32_t count;
    uint64_t bytes;
};

static void run_rotation(void *ctx)
{
    struct rotation *r = ctx;
    for (uint32_t i = 0; i < r->count; i++) {
        struct krn_cu_matrix m = r->m;
        m.data += i * r->bytes;
        r->p.m[0] = &m;
        NEED(krn_cu_gemv_of(cu, stream, &r->p));
    }
}

static void bench_product(const char *type, uint32_t rows, uint32_t cols)
{
    uint64_t row_bytes;
    NEED(krn_row_bytes(type_of(type), cols, &row_bytes));
    struct rotation r = {.bytes = (rows * row_bytes + 271) & ~UINT64_C(255)};
    r.count = (uint32_t)(ROTATING / r.bytes) + 1;
    r.m = (struct krn_cu_matrix){cu_alloc(r.count * r.bytes), type_of(type)->ggml_id, rows, cols,
                                 (uint32_t)row_bytes};
    r.p = (struct krn_cu_product){.y = {cu_alloc(rows * 4)}, .count = 1, .x = activations(cols), .tokens = 1};
    char what[64];
    double ms[2];
    for (int overlap = 0; overlap < 2; overlap++) {
        krn_cu_overlap(cu, overlap);
        ms[overlap] = time_ms(run_rotation, &r) / r.count;
    }
    snprintf(what, sizeof what, "gemv %s %u x %u", type, rows, cols);
    printf("%-34s %8.2f us %7.0f GB/s; overlapping %8.2f us %7.0f GB/s\n", what, ms[0] * 1e3,
           (double)(rows * row_bytes) / ms[0] * 1e-6, ms[1] * 1e3, (double)(rows * row_bytes) / ms[1] * 1e-6);
    fflush(stdout);
    cu_free_all();
}

enum { QKV = 1, ATTENTION = 2, OUTPUT = 4, ROUTER = 8, CHOSEN = 16, EVERYTHING = 31 };

struct token_bench {
    int steps;
    struct krn_cu_rows rows;
    struct {
        struct krn_cu_matrix q, k, v, o;
        struct krn_cu_expert_shape experts;
        krn_cuda_ptr resident, router, norm;
        struct krn_cu_kv kv;
    } layer[LAYERS];
    krn_cuda_ptr x, q, k, v, y16, table, scratch, scores, ids, weights, plan, hidden;
    double enqueue_ms;
};

static void run_token(void *ctx)
{
    struct token_bench *b = ctx;
    const double from = (double)shm_now_ns();
    for (uint32_t i = 0; i < LAYERS; i++) {
        const krn_cuda_ptr norm = b->layer[i].norm;
        const struct krn_cu_product p = {.m = {&b->layer[i].q, &b->layer[i].k, &b->layer[i].v},
                                         .y = {b->q, b->k, b->v},
                                         .count = 3,
                                         .x = b->x,
                                         .norm = norm,
                                         .eps = 1e-6f,
                                         .tokens = 1};
        const struct krn_cu_token_heads h = {.q = b->q,
                                             .k = b->k,
                                             .v = b->v,
                                             .q_weight = norm,
                                             .k_weight = norm,
                                             .table = b->table,
                                             .scratch = b->scratch,
                                             .y_f16 = b->y16,
                                             .rows = b->rows,
                                             .heads = 32,
                                             .eps = 1e-6f};
        const struct krn_cu_token_route r = {.x = b->x,
                                             .norm = norm,
                                             .w = b->layer[i].router,
                                             .scores = b->scores,
                                             .ids = b->ids,
                                             .weights = b->weights,
                                             .blobs = b->plan,
                                             .resident = b->layer[i].resident,
                                             .tokens = 1,
                                             .hidden = HIDDEN,
                                             .experts = EXPERTS,
                                             .top_k = TOP_K,
                                             .eps = 1e-6f,
                                             .renorm = true};
        const struct krn_cu_expert_run e = {.shape = &b->layer[i].experts,
                                            .tokens = 1,
                                            .decode = true,
                                            .located = true,
                                            .ids = b->ids,
                                            .x_f32 = b->x,
                                            .norm = norm,
                                            .eps = 1e-6f,
                                            .weights = b->weights,
                                            .plan = b->plan,
                                            .hidden_rows = b->hidden,
                                            .out = b->x};
        if (b->steps & QKV)
            NEED(krn_cu_gemv_of(cu, stream, &p));
        if (b->steps & ATTENTION)
            NEED(krn_cu_token_attention(cu, stream, &b->layer[i].kv, &h));
        if (b->steps & OUTPUT)
            NEED(krn_cu_gemv(cu, stream, &b->layer[i].o, b->y16, 1, true, b->x));
        if (b->steps & ROUTER)
            NEED(krn_cu_token_router(cu, stream, &r));
        if (b->steps & CHOSEN)
            NEED(krn_cu_experts(cu, stream, &e));
    }
    b->enqueue_ms = ((double)shm_now_ns() - from) * 1e-6;
}

static void bench_token(const char *name, uint32_t context)
{
    const struct krn_type *type = type_of(name);
    uint64_t row, out_row, down_row;
    NEED(krn_row_bytes(type, HIDDEN, &row) || krn_row_bytes(type, 4096, &out_row) ||
         krn_row_bytes(type, WIDTH, &down_row));
    const uint64_t part = WIDTH * row, blob = (2 * part + HIDDEN * down_row + 255) & ~UINT64_C(255);
    static struct token_bench b;
    b = (struct token_bench){.x = random_floats(HIDDEN),
                             .q = random_floats(4096),
                             .k = random_floats(512),
                             .v = random_floats(512),
                             .y16 = activations(4096),
                             .table = random_floats(128),
                             .scratch = cu_alloc(krn_cu_decode_scratch_bytes(context, 1, 32, 128)),
                             .scores = cu_alloc(EXPERTS * 4),
                             .ids = cu_alloc(TOP_K * 4),
                             .weights = cu_alloc(TOP_K * 4),
                             .plan = cu_alloc(krn_cu_plan_bytes(1, TOP_K, EXPERTS)),
                             .hidden = cu_alloc(TOP_K * WIDTH * 2)};
    const krn_cuda_ptr norm = random_floats(HIDDEN), blocks = blocks_in_order(context);
    for (uint32_t i = 0; i < LAYERS; i++) {
        const krn_cuda_ptr dense = cu_alloc(5120 * row + HIDDEN * out_row), store = cu_alloc(EXPERTS * blob);
        uint64_t address[EXPERTS];
        for (uint32_t e = 0; e < EXPERTS; e++)
            address[e] = store + (e * 37 + i * 11) % EXPERTS * blob;
        const struct krn_cu_matrix m = {0, type->ggml_id, WIDTH, HIDDEN, (uint32_t)row};
        b.layer[i].q = (struct krn_cu_matrix){dense, type->ggml_id, 4096, HIDDEN, (uint32_t)row};
        b.layer[i].k = (struct krn_cu_matrix){dense + 4096 * row, type->ggml_id, 512, HIDDEN, (uint32_t)row};
        b.layer[i].v = b.layer[i].k;
        b.layer[i].v.data += 512 * row;
        b.layer[i].o =
            (struct krn_cu_matrix){dense + 5120 * row, type->ggml_id, HIDDEN, 4096, (uint32_t)out_row};
        b.layer[i].experts = (struct krn_cu_expert_shape){m, m, m, EXPERTS, TOP_K};
        b.layer[i].experts.up.data = part;
        b.layer[i].experts.down =
            (struct krn_cu_matrix){2 * part, type->ggml_id, HIDDEN, WIDTH, (uint32_t)down_row};
        b.layer[i].resident = cu_copy(address, sizeof address);
        b.layer[i].router = cu_alloc(EXPERTS * HIDDEN * 4);
        b.layer[i].norm = norm;
        const size_t cache = (size_t)context * 512 * 2;
        b.layer[i].kv = (struct krn_cu_kv){cu_alloc(cache), cu_alloc(cache), blocks, context, 4, 128};
    }
    static const struct {
        const char *name;
        int steps;
    } steps[] = {{"q, k, v", QKV},   {"attention", ATTENTION}, {"output", OUTPUT},
                 {"router", ROUTER}, {"experts", CHOSEN},      {"no attention", EVERYTHING & ~ATTENTION},
                 {"all", EVERYTHING}};
    static const uint32_t positions[] = {200, 1500, 4095, 32767};
    for (int overlap = 0; overlap < 2; overlap++)
        for (size_t s = 0; s < sizeof steps / sizeof *steps; s++)
            for (size_t at = 0; at < sizeof positions / sizeof *positions; at++) {
                if (positions[at] >= context || (at && !(steps[s].steps & ATTENTION)))
                    continue;
                krn_cu_overlap(cu, overlap);
                b.steps = steps[s].steps;
                b.rows = one_row(blocks, positions[at]);
                double ms = time_ms(run_token, &b);
                printf("token %s%s, %-12s at %5u: %7.2f us a layer, %7.3f ms, enqueued in %6.3f ms\n", name,
                       overlap ? " overlapping" : "", steps[s].name, positions[at], ms * 1e3 / LAYERS, ms,
                       b.enqueue_ms);
            }
    fflush(stdout);
    cu_free_all();
}

struct copy_bench {
    krn_cuda_ptr from, to;
};

static void run_copy(void *ctx)
{
    struct copy_bench *b = ctx;
    NEED(KRN_CUDA(copy_device_async, b->to, b->from, 1u << 30, stream));
}

int main(int argc, char **argv)
{
    int rc = cu_open();
    if (rc)
        return rc;
    char text[128];
    krn_cuda_device_describe(device, text, sizeof text);
    printf("%s\n", text);
    repeats = getenv("REPEAT") ? strtoul(getenv("REPEAT"), NULL, 10) : 0;
    repeat_s = getenv("REPEAT_S") ? strtod(getenv("REPEAT_S"), NULL) : 0;
    struct shm_error err = {0};
    if (krn_cu_trace_create(&err, &trace)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    NEED(KRN_CUDA(mem_alloc, &sums, SUMS * sizeof(uint64_t)));
    pthread_t copier;
    const bool copies = getenv("BESIDE") && pthread_create(&copier, NULL, beside, NULL) == 0;
    bool all = argc < 2;
#define WANTED(name) (all || strstr(args, " " name " "))
    char args[256] = " ";
    for (int i = 1; i < argc && strlen(args) + strlen(argv[i]) + 2 < sizeof args; i++) {
        strcat(args, argv[i]);
        strcat(args, " ");
    }
    if (WANTED("experts")) {
        bench_experts("Q4_K", "Q4_K", 4096, false);
        bench_experts("Q4_K", "Q6_K", 4096, false);
        static const char *const types[] = {"Q8_0", "Q4_0", "Q5_K", "Q6_K", "F16", "BF16", "F32"};
        for (int i = 0; i < 7; i++)
            bench_experts(types[i], types[i], 4096, false);
        bench_experts("Q4_K", "Q4_K", 1, true);
        bench_experts("Q4_K", "Q4_K", 8, true);
    }
    if (WANTED("tokens")) {
        static const uint32_t tokens[] = {64, 256, 512, 1024, 2048, 4096, 8192, 32768};
        for (int i = 0; i < 8; i++)
            bench_experts("Q4_K", "Q4_K", tokens[i], false);
    }
    if (WANTED("dense")) {
        static const char *const types[] = {"F16", "BF16", "Q4_K", "Q6_K", "Q8_0"};
        for (int i = 0; i < 5; i++) {
            bench_dense(types[i], 4096, 2048, 4096);
            bench_dense(types[i], 2048, 4096, 4096);
        }
        bench_dense("Q4_K", 512, 2048, 4096);
        bench_dense("F16", 8192, 8192, 8192);
        bench_dense("Q4_K", 4096, 2048, 1024);
        bench_dense("Q4_K", 4096, 2048, 32);
    }
    if (WANTED("attention")) {
        bench_attention(0, 4096, 128, false);
        bench_attention(0, 32768, 128, false);
        bench_attention(18800, 1790, 128, false);
        bench_attention(0, 512, 128, false);
        bench_attention(16384, 512, 128, false);
        bench_attention(0, 32768, 64, false);
    }
    if (!all && WANTED("hunt")) { /* of a prompt of 4,608 tokens in chunks of 1,024 */
        bench_experts("Q4_K", "Q4_K", 512, false);
        bench_experts("Q4_K", "Q4_K", 1024, false);
        bench_experts("Q4_K", "Q6_K", 1024, false);
        bench_dense("Q4_K", 4096, 2048, 1024);
        bench_dense("Q4_K", 2048, 4096, 512);
        for (uint32_t i = 0; i < 4; i++)
            bench_attention(i * 1024, 1024, 128, false);
        bench_attention(4096, 512, 128, false);
        bench_attention(0, 4608, 128, false);
    }
    if (WANTED("decode")) {
        bench_attention(32767, 1, 128, true);
        bench_attention(4095, 1, 128, true);
    }
    if (WANTED("token")) {
        struct copy_bench copy = {cu_alloc(1u << 30), cu_alloc(1u << 30)};
        line("copy of 1 GiB, read and written", time_ms(run_copy, &copy), 0, 2.0 * (1u << 30));
        cu_free_all();
        static const char *const types[] = {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "F16", "BF16", "F32"};
        for (int i = 0; i < 8; i++) {
            bench_product(types[i], 151936, 2048);
            bench_product(types[i], 4096, 2048);
        }
        bench_product("Q4_K", 512, 2048);
        bench_product("Q4_K", 2048, 4096);
        bench_product("Q4_K", 16384, 4096);
        bench_token("Q4_K", 32768);
    }
    if (WANTED("small")) {
        bench_small(1);
        bench_small(1024);
        bench_small(4096);
        bench_small(32768);
    }
    if (copies) {
        atomic_store(&beside_ends, true);
        pthread_join(copier, NULL);
        printf("beside %.1f GB of copies\n", (double)beside_copies * (double)BESIDE_BYTES * 1e-9);
    }
    krn_cuda.mem_free(sums);
    krn_cu_trace_destroy(&trace);
    krn_cuda.stream_destroy(stream);
    krn_cu_destroy(&cu);
    krn_cuda_device_close(&device);
    return differed;
}
