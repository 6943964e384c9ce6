/* SPDX-License-Identifier: MIT */
/*
 * Hopper's kernels on the emulated GPU, in orders that hardware may choose: a case runs without a seed, then
 * under several (emu_async.h: copies and products early or late, warps and blocks out of step, other garbage
 * in shared and in scratch memory), and every result must be the first one, bit for bit.
 *
 *     EMU_HOPPER=5 t_cu_races [SEEDS]
 */
#include <stdbool.h>

#include "tests/gpu/cu_kit.h"

void emu_seed(uint64_t seed);

static unsigned seeds;
static int wrong;

/* Scratch and results: NaN, or any numbers. */
static void spoil(krn_cuda_ptr p, size_t bytes, unsigned seed)
{
    NEED(KRN_CUDA(memset_8_async, p, seed % 2 ? 0x5a : 0xff, bytes, stream));
}

static void compare(const char *what, unsigned seed, krn_cuda_ptr y, size_t bytes, void **want)
{
    void *got = cu_get(y, bytes);
    if (seed == 0) {
        *want = got;
        return;
    }
    if (memcmp(got, *want, bytes) != 0) {
        const uint8_t *a = got, *b = *want;
        size_t at = 0;
        while (a[at] == b[at])
            at++;
        fprintf(stderr, "%s: other bits from byte %zu of %zu on under EMU_SEED=%u\n", what, at, bytes, seed);
        wrong++;
    }
    free(got);
}

/* GQA with an odd end, behind `position` keys; beyond the last key the cache has any key and any number. */
static void attention(uint32_t hd, uint32_t heads, uint32_t kv_heads, uint32_t position, uint32_t tokens)
{
    const uint32_t keys = position + tokens, blocks = keys / KRN_CU_KV_BLOCK + 2,
                   ctx = blocks * KRN_CU_KV_BLOCK;
    const size_t cache = (size_t)kv_heads * ctx * hd, n = (size_t)tokens * heads * hd;
    uint16_t *h[3];
    const size_t sizes[] = {cache, cache, n};
    for (int i = 0; i < 3; i++) {
        float *x = krn_rand_floats(&rng, sizes[i], 2);
        h[i] = f16_round(x, sizes[i]);
        free(x);
    }
    krn_cuda_ptr k = cu_alloc(cache * 2), v = cu_alloc(cache * 2), q = cu_copy(h[2], n * 2),
                 y = cu_alloc(n * 2);
    uint32_t *block = krn_alloc(blocks * sizeof *block);
    for (uint32_t i = 0; i < blocks; i++)
        block[i] = i;
    const struct krn_cu_kv kv = {k, v, cu_copy(block, blocks * sizeof *block), ctx, kv_heads, hd};
    free(block);
    void *want = NULL;
    char what[96];
    snprintf(what, sizeof what, "attention hd %u, %u heads, %u tokens at %u", hd, heads, tokens, position);
    for (unsigned seed = 0; seed <= seeds; seed++) {
        for (uint32_t g = 0; g < kv_heads; g++) /* beyond the keys: NaN (keys) or numbers */
            for (int i = 0; i < 2; i++)
                memset(h[i] + ((size_t)g * ctx + keys) * hd,
                       seed % 2 ? 0x5a
                       : i      ? 0x7b
                                : 0xff,
                       (size_t)(ctx - keys) * hd * 2);
        cu_put(k, h[0], cache * 2);
        cu_put(v, h[1], cache * 2);
        spoil(y, n * 2, seed);
        emu_seed(seed);
        NEED(krn_cu_attention(cu, stream, &kv, position, tokens, heads, q, y));
        compare(what, seed, y, n * 2, &want);
    }
    free(want);
    for (int i = 0; i < 3; i++)
        free(h[i]);
    cu_free_all();
}

/* All experts of a chunk, half of them from a ring in two groups. */
static void experts(const char *up_name, const char *down_name, uint32_t tokens, uint32_t count)
{
    enum { HIDDEN = 256, WIDTH = 512, TOP_K = 2, MOST = 16, RING = 5 };
    const struct krn_type *up = krn_type_by_name(up_name), *down = krn_type_by_name(down_name);
    uint64_t up_row, down_row;
    NEED(krn_row_bytes(up, HIDDEN, &up_row) || krn_row_bytes(down, WIDTH, &down_row));
    const size_t part = (up_row * WIDTH + 255) / 256 * 256,
                 blob = (2 * part + down_row * HIDDEN + 271) / 256 * 256, slots = (size_t)tokens * TOP_K;
    const krn_cuda_ptr store = cu_alloc(blob * count), x = cu_alloc((size_t)tokens * HIDDEN * 2);
    uint64_t address[MOST];
    for (uint32_t e = 0; e < count; e++) {
        void *w[3] = {krn_rand_weights(&rng, up, WIDTH, HIDDEN), krn_rand_weights(&rng, up, WIDTH, HIDDEN),
                      krn_rand_weights(&rng, down, HIDDEN, WIDTH)};
        address[e] = store + e * blob;
        for (int i = 0; i < 3; i++) {
            cu_put(address[e] + (size_t)i * part, w[i], i < 2 ? up_row * WIDTH : down_row * HIDDEN);
            free(w[i]);
        }
    }
    uint32_t *ids = krn_alloc(slots * 4);
    for (size_t i = 0; i < slots; i++) /* a few experts have most tokens */
        ids[i] = (uint32_t)(i % TOP_K ? krn_rand(&rng) % count : krn_rand(&rng) % 3 ? count - 1 : 0);
    for (size_t i = 0; i < slots; i += TOP_K)
        ids[i] = ids[i] == ids[i + 1] ? (ids[i] + 1) % count : ids[i];
    float *numbers = krn_rand_floats(&rng, (size_t)tokens * HIDDEN, 1);
    uint16_t *half = f16_round(numbers, (size_t)tokens * HIDDEN);
    cu_put(x, half, (size_t)tokens * HIDDEN * 2);
    struct krn_cu_expert_shape shape = {{0, up->ggml_id, WIDTH, HIDDEN, (uint32_t)up_row},
                                        {part, up->ggml_id, WIDTH, HIDDEN, (uint32_t)up_row},
                                        {2 * part, down->ggml_id, HIDDEN, WIDTH, (uint32_t)down_row},
                                        count,
                                        TOP_K};
    const size_t hist = krn_cu_hist_bytes(tokens, TOP_K, count),
                 plan = krn_cu_plan_bytes(tokens, TOP_K, count), rows = slots * WIDTH * 2,
                 out = slots * HIDDEN * 4;
    const struct krn_cu_groups groups = {
        cu_alloc(count * 4), cu_alloc(count * 4 + 4), cu_alloc(slots * 4), cu_alloc(hist), 0, 0};
    struct krn_cu_expert_run run = {.shape = &shape,
                                    .groups = &groups,
                                    .resident = cu_copy(address, count * 8),
                                    .tokens = tokens,
                                    .x_f16 = x,
                                    .plan = cu_alloc(plan),
                                    .hidden_rows = cu_alloc(rows),
                                    .out = cu_alloc(out)};
    const krn_cuda_ptr chosen = cu_copy(ids, slots * 4);
    void *want = NULL;
    char what[96];
    snprintf(what, sizeof what, "experts %s/%s, %u tokens", up_name, down_name, tokens);
    for (unsigned seed = 0; seed <= seeds; seed++) {
        spoil(run.plan, plan, seed);
        spoil(run.hidden_rows, rows, seed);
        spoil(run.out, out, seed);
        spoil(groups.hist, hist, seed);
        emu_seed(seed);
        NEED(krn_cu_group(cu, stream, chosen, 0, tokens, count, TOP_K, NULL, &groups));
        NEED(krn_cu_experts(cu, stream, &run));
        compare(what, seed, run.out, out, &want);
    }
    free(want), free(ids), free(numbers), free(half);
    cu_free_all();
}

int main(int argc, char **argv)
{
    int rc = cu_open();
    if (rc)
        return rc;
    seeds = argc > 1 ? (unsigned)atoi(argv[1]) : 3;
    attention(128, 4, 1, 300, 150); /* the rest of the items shared by blocks, an item cut in two */
    attention(128, 4, 1, 0, 250);   /* several items of one step each behind one another in a block */
    attention(64, 3, 1, 130, 70);
    experts("Q4_K", "Q6_K", 70, 3);
    experts("Q4_K", "Q4_K", 150, 3);
    experts("Q8_0", "Q8_0", 70, 5);
    krn_cuda.stream_destroy(stream);
    krn_cu_destroy(&cu);
    printf("%u seeds, %d results differ\n", seeds, wrong);
    return wrong != 0;
}
