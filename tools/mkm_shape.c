/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: presets, what is a possible shape, and the list of tensors.
 */
#include "tools/mkm_model.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS_MAX  1024u
#define EXPERTS_MAX 1024u /* what expertd takes */
#define DIM_MAX     (1u << 20)
#define VOCAB_MIN   1024u /* bytes, syllables, some words, specials */
#define VOCAB_MAX   1000000u

struct preset {
    struct mkm_shape shape;
    const char *experts, *down;
};

static const struct preset presets[] = {
    {{.preset = "tiny",
      .layers = 3,
      .hidden = 256,
      .heads = 4,
      .kv_heads = 2,
      .head_dim = 64,
      .experts = 16,
      .topk = 4,
      .ffn = 256,
      .vocab = 4096,
      .ctx = 40960,
      .rope_base = 1e6},
     "Q4_K",
     NULL},
    {{.preset = "qwen3-30b-a3b",
      .layers = 48,
      .hidden = 2048,
      .heads = 32,
      .kv_heads = 4,
      .head_dim = 128,
      .experts = 128,
      .topk = 8,
      .ffn = 768,
      .vocab = 151936,
      .ctx = 40960,
      .rope_base = 1e6},
     "Q4_K",
     NULL},
    /* The shape of the demo model; its expert width of 64 is no whole K block. */
    {{.preset = "story",
      .layers = 5,
      .hidden = 256,
      .heads = 8,
      .kv_heads = 2,
      .head_dim = 64,
      .experts = 48,
      .topk = 8,
      .ffn = 64,
      .vocab = 4096,
      .ctx = 2048,
      .rope_base = 1e4},
     "Q4_K",
     "Q8_0"},
};
#define N_PRESETS (sizeof presets / sizeof *presets)

int mkm_preset(const char *name, struct mkm_shape *ret_shape)
{
    for (size_t i = 0; i < N_PRESETS; i++) {
        if (strcmp(name, presets[i].shape.preset))
            continue;
        *ret_shape = presets[i].shape;
        ret_shape->skew = 1;
        ret_shape->seed = 1;
        ret_shape->experts_type = krn_type_by_name(presets[i].experts);
        ret_shape->down_type = presets[i].down ? krn_type_by_name(presets[i].down) : NULL;
        ret_shape->attn_type = ret_shape->embd_type = krn_type_by_name("Q8_0");
        return 0;
    }
    return -ENOENT;
}

const char *mkm_preset_names(void)
{
    return "tiny, qwen3-30b-a3b, story";
}

static int check_range(const char *option, uint64_t value, uint64_t low, uint64_t high, struct shm_error *err)
{
    if (value >= low && value <= high)
        return 0;
    return shm_error_set(err, EINVAL, "--%s %llu: must be %llu to %llu", option, (unsigned long long)value,
                         (unsigned long long)low, (unsigned long long)high);
}

static int check_rows(const struct krn_type *type, const char *type_option, const char *what, uint64_t row,
                      struct shm_error *err)
{
    if (row % type->block_elems == 0)
        return 0;
    return shm_error_set(err, EINVAL,
                         "%s: rows of %llu elements are no multiple of %s's block of %u; choose another --%s",
                         what, (unsigned long long)row, type->name, type->block_elems, type_option);
}

int mkm_check(struct mkm_shape *sh, struct shm_error *err)
{
    const struct {
        const char *option;
        uint64_t value, low, high;
    } ranges[] = {
        {"layers", sh->layers, 1, LAYERS_MAX},
        {"hidden", sh->hidden, 32, DIM_MAX},
        {"heads", sh->heads, 1, 1024},
        {"kv-heads", sh->kv_heads, 1, sh->heads},
        {"head-dim", sh->head_dim, 2, 1024},
        {"experts", sh->experts, 1, EXPERTS_MAX},
        {"topk", sh->topk, 1, sh->experts},
        {"ffn", sh->ffn, 1, DIM_MAX},
        {"vocab", sh->vocab, VOCAB_MIN, VOCAB_MAX},
        {"ctx", sh->ctx, 1, 1u << 24},
    };
    int r;

    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        r = check_range(ranges[i].option, ranges[i].value, ranges[i].low, ranges[i].high, err);
        if (r < 0)
            return r;
    }
    if (sh->heads % sh->kv_heads)
        return shm_error_set(err, EINVAL, "--heads %u is no multiple of --kv-heads %u", sh->heads,
                             sh->kv_heads);
    if (sh->head_dim % 2)
        return shm_error_set(err, EINVAL, "--head-dim %u: rotary positions need an even number",
                             sh->head_dim);
    if (!isfinite(sh->skew) || sh->skew < 0 || sh->skew > 10)
        return shm_error_set(err, EINVAL, "--skew %g: must be 0 to 10", sh->skew);
    if (!sh->down_type)
        sh->down_type = sh->experts_type;
    r = check_rows(sh->experts_type, "experts-type", "ffn_gate_exps", sh->hidden, err);
    if (r == 0)
        r = check_rows(sh->down_type, "down-type", "ffn_down_exps", sh->ffn, err);
    if (r == 0)
        r = check_rows(sh->attn_type, "attn-type", "attn_q", sh->hidden, err);
    if (r == 0)
        r = check_rows(sh->attn_type, "attn-type", "attn_output", (uint64_t)sh->heads * sh->head_dim, err);
    if (r == 0)
        r = check_rows(sh->embd_type, "embd-type", "token_embd", sh->hidden, err);
    return r;
}

struct builder {
    struct mkm_plan *plan;
    uint32_t capacity;
    uint32_t layer;
    bool overflow;
};

/* dims 0 ends the list. gain / sqrt(row length) is the deviation. */
static void add(struct builder *b, const char *name, const struct krn_type *type, uint64_t d0, uint64_t d1,
                uint64_t d2, enum mkm_fill fill, double gain)
{
    struct mkm_tensor *t = &b->plan->tensors[b->plan->n_tensors++];
    uint64_t padded;

    snprintf(t->name, sizeof t->name, "%s.weight", name);
    t->type = type;
    t->dims[0] = d0;
    t->dims[1] = d1;
    t->dims[2] = d2;
    t->n_dims = d2 ? 3 : d1 ? 2 : 1;
    t->fill = fill;
    t->layer = b->layer;
    t->is_expert = d2 != 0;
    t->sigma = gain / sqrt((double)d0);
    t->n_rows = (d1 ? d1 : 1) * (d2 ? d2 : 1); /* at most 2^32 by the ranges above */
    t->offset = b->plan->data_bytes;
    if (krn_row_bytes(type, d0, &t->row_bytes) < 0 ||
        __builtin_mul_overflow(t->row_bytes, t->n_rows, &t->bytes) || t->bytes > (uint64_t)1 << 50) {
        b->overflow = true;
        return;
    }
    padded = (t->bytes + MKM_ALIGN - 1) / MKM_ALIGN * MKM_ALIGN;
    b->plan->data_bytes += padded;
    if (t->is_expert)
        b->plan->expert_bytes += t->bytes;
}

static void add_layer(struct builder *b, const struct mkm_shape *sh)
{
    const struct krn_type *f32 = krn_type_find(KRN_F32), *at = sh->attn_type, *ex = sh->experts_type;
    uint64_t h = sh->hidden, q = (uint64_t)sh->heads * sh->head_dim,
             k = (uint64_t)sh->kv_heads * sh->head_dim;
    char n[MKM_NAME_MAX - 8];
#define NAMED(what) (snprintf(n, sizeof n, "blk.%u." what, b->layer), n)

    add(b, NAMED("attn_norm"), f32, h, 0, 0, MKM_ONES, 0);
    add(b, NAMED("attn_q"), at, h, q, 0, MKM_RANDOM, 1.0);
    add(b, NAMED("attn_k"), at, h, k, 0, MKM_RANDOM, 1.0);
    add(b, NAMED("attn_v"), at, h, k, 0, MKM_RANDOM, 0.3);
    add(b, NAMED("attn_output"), at, q, h, 0, MKM_RANDOM, 0.05);
    add(b, NAMED("attn_q_norm"), f32, sh->head_dim, 0, 0, MKM_ONES, 0);
    add(b, NAMED("attn_k_norm"), f32, sh->head_dim, 0, 0, MKM_ONES, 0);
    add(b, NAMED("ffn_norm"), f32, h, 0, 0, MKM_ONES, 0);
    add(b, NAMED("ffn_gate_inp"), f32, h, sh->experts, 0, MKM_ROUTER, 0);
    add(b, NAMED("ffn_gate_exps"), ex, h, sh->ffn, sh->experts, MKM_RANDOM, 0.35);
    add(b, NAMED("ffn_up_exps"), ex, h, sh->ffn, sh->experts, MKM_RANDOM, 0.35);
    add(b, NAMED("ffn_down_exps"), sh->down_type, sh->ffn, h, sh->experts, MKM_RANDOM, 0.25);
#undef NAMED
}

int mkm_plan_make(const struct mkm_shape *sh, struct mkm_plan *ret_plan, struct shm_error *err)
{
    struct mkm_plan plan = {0};
    struct builder b = {.plan = &plan, .capacity = 3 + 12 * sh->layers};

    plan.tensors = calloc(b.capacity, sizeof *plan.tensors);
    if (!plan.tensors)
        return shm_error_set(err, ENOMEM, "no memory for a list of %u tensors; free some", b.capacity);
    add(&b, "token_embd", sh->embd_type, sh->hidden, sh->vocab, 0, MKM_EMBD, 0);
    for (b.layer = 0; b.layer < sh->layers; b.layer++)
        add_layer(&b, sh);
    b.layer = 0;
    add(&b, "output_norm", krn_type_find(KRN_F32), sh->hidden, 0, 0, MKM_ONES, 0);
    add(&b, "output", sh->embd_type, sh->hidden, sh->vocab, 0, MKM_OUTPUT, 1.0);
    if (b.overflow || plan.data_bytes > (uint64_t)1 << 50) {
        mkm_plan_free(&plan);
        return shm_error_set(err, EOVERFLOW, "a model of this shape is above 1 PiB; make it smaller");
    }
    *ret_plan = plan;
    return 0;
}

void mkm_plan_free(struct mkm_plan *plan)
{
    free(plan->tensors);
    *plan = (struct mkm_plan){0};
}
