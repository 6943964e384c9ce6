/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: writes a synthetic but loadable mixture-of-experts GGUF of a given
 * shape. Command line only; the work is in mkm_*.c.
 */
#include "proto/prt_file.h"
#include "tools/mkm_model.h"

#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *argp_program_version = "mkmodel " EXPERTD_VERSION;
error_t argp_err_exit_status = 2;

enum {
    OPT_PRESET = 256,
    OPT_LAYERS,
    OPT_HIDDEN,
    OPT_HEADS,
    OPT_KV_HEADS,
    OPT_HEAD_DIM,
    OPT_EXPERTS,
    OPT_TOPK,
    OPT_FFN,
    OPT_VOCAB,
    OPT_CTX,
    OPT_ROPE_BASE,
    OPT_EXPERTS_TYPE,
    OPT_DOWN_TYPE,
    OPT_ATTN_TYPE,
    OPT_EMBD_TYPE,
    OPT_SKEW,
    OPT_SEED,
    OPT_THREADS,
    OPT_SIMULATE,
    OPT_TEXT,
    OPT_JSON,
};

static const struct argp_option options[] = {
    {0, 0, 0, 0, "What to do", 1},
    {"simulate", OPT_SIMULATE, 0, 0,
     "Print the share of unrouted experts against prompt length, write nothing", 0},
    {"text", OPT_TEXT, "N", 0, "Print N random words: N tokens of a model of this shape", 0},
    {"json", OPT_JSON, 0, 0, "Report as one JSON object", 0},
    {0, 0, 0, 0, "Shape", 2},
    {"preset", OPT_PRESET, "NAME", 0,
     "tiny (default, a few MB), qwen3-30b-a3b (17 GB), story (the demo model's shape); "
     "the options below override its dimensions",
     0},
    {"layers", OPT_LAYERS, "N", 0, "Layers", 0},
    {"hidden", OPT_HIDDEN, "N", 0, "Width of the hidden state", 0},
    {"heads", OPT_HEADS, "N", 0, "Attention heads", 0},
    {"kv-heads", OPT_KV_HEADS, "N", 0, "Key and value heads", 0},
    {"head-dim", OPT_HEAD_DIM, "N", 0, "Elements a head", 0},
    {"experts", OPT_EXPERTS, "N", 0, "Experts a layer", 0},
    {"topk", OPT_TOPK, "N", 0, "Experts a token", 0},
    {"ffn", OPT_FFN, "N", 0, "Width of an expert", 0},
    {"vocab", OPT_VOCAB, "N", 0, "Tokens in the vocabulary", 0},
    {"ctx", OPT_CTX, "N", 0, "Context length", 0},
    {"rope-base", OPT_ROPE_BASE, "X", 0, "Base of the rotary positions", 0},
    {0, 0, 0, 0, "Contents (TYPE: F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K)", 3},
    {"experts-type", OPT_EXPERTS_TYPE, "TYPE", 0, "Type of the experts (Q4_K)", 0},
    {"down-type", OPT_DOWN_TYPE, "TYPE", 0, "Another type for the down projections", 0},
    {"attn-type", OPT_ATTN_TYPE, "TYPE", 0, "Type of the attention (Q8_0)", 0},
    {"embd-type", OPT_EMBD_TYPE, "TYPE", 0, "Type of embedding and head (Q8_0)", 0},
    {"skew", OPT_SKEW, "X", 0, "Skew of the routing: 0 even, 1 calibrated (default)", 0},
    {"seed", OPT_SEED, "N", 0, "Same seed and shape: same bytes (1)", 0},
    {"threads", OPT_THREADS, "N", 0, "Threads (one a core, at most 16)", 0},
    {0},
};

struct args {
    struct mkm_shape shape; /* whole once parsing is done */
    const char *preset;
    struct mkm_shape over; /* what was said beside the preset; 0 or NULL: nothing */
    bool has_skew, has_seed;
    const char *out;
    uint32_t threads;
    bool simulate, json;
    uint64_t text_words;
};

static uint64_t number(struct argp_state *state, const char *what, const char *text, uint64_t max)
{
    char *end;
    unsigned long long v;

    errno = 0;
    v = strtoull(text, &end, 10);
    if (errno || *end || end == text || *text == '-' || v > max)
        argp_error(state, "%s '%s': not a whole number up to %" PRIu64, what, text, max);
    return v;
}

static double real(struct argp_state *state, const char *what, const char *text)
{
    char *end;
    double v = strtod(text, &end);

    if (*end || end == text)
        argp_error(state, "%s '%s': not a number", what, text);
    return v;
}

static const struct krn_type *type(struct argp_state *state, const char *what, const char *text)
{
    const struct krn_type *t = krn_type_by_name(text);

    if (!t)
        argp_error(state, "%s '%s': must be F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K or Q6_K", what, text);
    return t;
}

static uint32_t *dimension(struct mkm_shape *sh, int opt)
{
    switch (opt) {
    case OPT_LAYERS:
        return &sh->layers;
    case OPT_HIDDEN:
        return &sh->hidden;
    case OPT_HEADS:
        return &sh->heads;
    case OPT_KV_HEADS:
        return &sh->kv_heads;
    case OPT_HEAD_DIM:
        return &sh->head_dim;
    case OPT_EXPERTS:
        return &sh->experts;
    case OPT_TOPK:
        return &sh->topk;
    case OPT_FFN:
        return &sh->ffn;
    case OPT_VOCAB:
        return &sh->vocab;
    case OPT_CTX:
        return &sh->ctx;
    default:
        return NULL;
    }
}

/* "--layers" and so on, for messages. */
static const char *option_name(int opt)
{
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (options[i].key == opt && options[i].name)
            return options[i].name;
    return "?";
}

/* Preset, then overrides, so that the order on the command line does not matter. */
static void complete_shape(struct args *a, struct argp_state *state)
{
    if (mkm_preset(a->preset, &a->shape) < 0)
        argp_error(state, "no preset '%s'; there are %s", a->preset, mkm_preset_names());
    for (int opt = OPT_LAYERS; opt <= OPT_CTX; opt++)
        if (*dimension(&a->over, opt))
            *dimension(&a->shape, opt) = *dimension(&a->over, opt);
    if (a->over.experts_type) {
        a->shape.experts_type = a->over.experts_type;
        if (a->shape.ffn % a->over.experts_type->block_elems == 0) /* else keep what the preset needs */
            a->shape.down_type = NULL;
    }
    if (a->over.down_type)
        a->shape.down_type = a->over.down_type;
    if (a->over.attn_type)
        a->shape.attn_type = a->over.attn_type;
    if (a->over.embd_type)
        a->shape.embd_type = a->over.embd_type;
    if (a->over.rope_base > 0)
        a->shape.rope_base = a->over.rope_base;
    if (a->has_skew)
        a->shape.skew = a->over.skew;
    if (a->has_seed)
        a->shape.seed = a->over.seed;
}

static error_t parse(int opt, char *arg, struct argp_state *state)
{
    struct args *a = state->input;
    uint32_t *dim = dimension(&a->over, opt);

    if (dim) {
        *dim = (uint32_t)number(state, option_name(opt), arg, UINT32_MAX);
        if (*dim == 0)
            argp_error(state, "%s 0: must be at least 1", option_name(opt));
        return 0;
    }
    switch (opt) {
    case OPT_PRESET:
        a->preset = arg;
        break;
    case OPT_ROPE_BASE:
        a->over.rope_base = real(state, "rope-base", arg);
        if (!(a->over.rope_base >= 1 && a->over.rope_base <= 1e9))
            argp_error(state, "rope-base '%s': must be 1 to 1e9", arg);
        break;
    case OPT_EXPERTS_TYPE:
        a->over.experts_type = type(state, "experts-type", arg);
        break;
    case OPT_DOWN_TYPE:
        a->over.down_type = type(state, "down-type", arg);
        break;
    case OPT_ATTN_TYPE:
        a->over.attn_type = type(state, "attn-type", arg);
        break;
    case OPT_EMBD_TYPE:
        a->over.embd_type = type(state, "embd-type", arg);
        break;
    case OPT_SKEW:
        a->over.skew = real(state, "skew", arg);
        a->has_skew = true;
        break;
    case OPT_SEED:
        a->over.seed = number(state, "seed", arg, UINT64_MAX);
        a->has_seed = true;
        break;
    case OPT_THREADS:
        a->threads = (uint32_t)number(state, "threads", arg, 64);
        break;
    case OPT_SIMULATE:
        a->simulate = true;
        break;
    case OPT_TEXT:
        a->text_words = number(state, "text", arg, 1u << 30);
        break;
    case OPT_JSON:
        a->json = true;
        break;
    case ARGP_KEY_ARG:
        if (a->out)
            argp_error(state, "more than one file name");
        a->out = arg;
        break;
    case ARGP_KEY_END:
        if (a->simulate + (a->text_words > 0) + (a->out != NULL) != 1)
            argp_error(state, "give a file to write, or --simulate, or --text N");
        complete_shape(a, state);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

/* The preset first, wherever it stands, so that overrides hold in any order. */
static const struct argp argp = {
    options,
    parse,
    "FILE\n--simulate\n--text=N",
    "Write a synthetic but loadable GGUF of architecture qwen3moe: random weights, finite forward passes, "
    "routing whose skew is calibrated (about 42% of the experts unrouted after 1,046 tokens, 22% after "
    "1,979, "
    "3% after 31,000).\v"
    "FILE appears only when complete: it is written as FILE.partial and renamed.\n"
    "Example: mkmodel --preset=qwen3-30b-a3b --layers=8 --seed=7 model.gguf",
    NULL,
    NULL,
    NULL};

static atomic_int interrupted;

static void on_signal(int signo)
{
    (void)signo;
    atomic_store(&interrupted, 1);
}

static void print_simulation(const struct args *a, const struct mkm_simulation *sim)
{
    const struct mkm_shape *sh = &a->shape;

    if (a->json) {
        printf("{\"experts\": %u, \"topk\": %u, \"skew\": %g, \"seed\": %" PRIu64
               ", \"layers\": %u, \"points\": [",
               sh->experts, sh->topk, sh->skew, sh->seed, sim->layers);
        for (unsigned i = 0; i < MKM_SIM_POINTS; i++)
            printf("%s{\"tokens\": %u, \"unrouted\": %.4f, \"low\": %.4f, \"high\": %.4f}", i ? ", " : "",
                   sim->tokens[i], sim->unrouted[i], sim->low[i], sim->high[i]);
        printf("]}\n");
        return;
    }
    printf("skew %.2f, %u experts, top %u, routers of %u layers, independent tokens\n", sh->skew, sh->experts,
           sh->topk, sim->layers);
    for (unsigned i = 0; i < MKM_SIM_POINTS; i++)
        printf("  %6u tokens: unrouted %5.1f%%  (layers %.1f to %.1f)\n", sim->tokens[i],
               100 * sim->unrouted[i], 100 * sim->low[i], 100 * sim->high[i]);
    printf("  tokens that use the expert of rank r:");
    for (unsigned i = 0; i < 10 && 1u << i <= sh->experts; i++)
        printf("%s %u: %.2g", i ? "," : "", 1u << i, sim->used_by[i]);
    printf("\n");
}

static void print_json_string(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            printf("\\%c", *text);
        else if ((unsigned char)*text < 32)
            printf("\\u%04x", *text);
        else
            putchar(*text);
    }
    putchar('"');
}

static void print_written(const struct args *a, const struct mkm_written *w)
{
    if (a->json) {
        printf("{\"file\": ");
        print_json_string(a->out);
        printf(", \"bytes\": %" PRIu64 ", \"expert_bytes\": %" PRIu64 ", \"tensors\": %u, \"seed\": %" PRIu64
               ", \"experts_type\": \"%s\", \"seconds\": %.3f}\n",
               w->bytes, w->expert_bytes, w->n_tensors, a->shape.seed, a->shape.experts_type->name,
               w->seconds);
        return;
    }
    printf("%s: %.2f GB (experts %.2f GB, %s), %u tensors, %.1f s, %.2f GB/s\n", a->out,
           (double)w->bytes / 1e9, (double)w->expert_bytes / 1e9, a->shape.experts_type->name, w->n_tensors,
           w->seconds, (double)w->bytes / 1e9 / w->seconds);
}

int main(int argc, char **argv)
{
    prt_file_standard();
    struct args a = {.preset = "tiny"};
    struct shm_error err = {0};
    struct mkm_simulation sim;
    struct mkm_written written;
    struct mkm_vocab vocab;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int r;

    a.threads = cores < 1 ? 1 : cores > 16 ? 16 : (uint32_t)cores;
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    if (a.threads < 1)
        a.threads = 1;
    r = mkm_check(&a.shape, &err);
    if (r < 0)
        goto report;
    if (a.simulate) {
        r = mkm_simulate(&a.shape, a.threads, &sim, &err);
        if (r == 0)
            print_simulation(&a, &sim);
    } else if (a.text_words) {
        r = mkm_vocab_make(a.shape.vocab, &vocab);
        if (r < 0)
            goto report;
        r = mkm_text(&a.shape, &vocab, a.text_words, stdout);
        mkm_vocab_free(&vocab);
    } else {
        struct sigaction stop = {.sa_handler = on_signal};
        sigaction(SIGINT, &stop, NULL);
        sigaction(SIGTERM, &stop, NULL);
        sigaction(SIGHUP, &stop, NULL);
        r = mkm_write(&a.shape, a.out, a.threads, isatty(STDERR_FILENO), &interrupted, &written, &err);
        if (r == 0)
            print_written(&a, &written);
    }
report:
    if (r < 0)
        fprintf(stderr, "mkmodel: %s\n", err.text[0] ? err.text : strerror(-r));
    return r == 0 ? 0 : r == -ECANCELED ? 130 : r == -EINVAL ? 2 : 1;
}
