/* SPDX-License-Identifier: MIT */
#include "inferd/inf_options.h"

#include "inferd/inf_conversation.h"
#include "shm/shm_word.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROMPT_BYTES_MAX (256u << 20)

const char *argp_program_version = "inferd " EXPERTD_VERSION;
error_t argp_err_exit_status = 2;

enum key {
    KEY_INSTANCE = 'i',
    KEY_RUNTIME = 0x100,
    KEY_DEVICE,
    KEY_MODEL,
    KEY_CHUNK,
    KEY_CTX,
    KEY_THREADS,
    KEY_RING,
    KEY_STREAM,
    KEY_ORDER,
    KEY_DEPTH,
    KEY_FLOOR,
    KEY_GBPS,
    KEY_LATENCY,
    KEY_RESIDENT,
    KEY_POISON,
    KEY_PROFILE,
    KEY_WATCHDOG,
    KEY_PROMPT,
    KEY_PROMPT_FILE,
    KEY_SYSTEM,
    KEY_CHAT_TEMPLATE,
    KEY_THINKING,
    KEY_RAW,
    KEY_TEMPERATURE,
    KEY_TOP_K,
    KEY_TOP_P,
    KEY_MIN_P,
    KEY_PENALTY,
    KEY_SEED,
    KEY_IGNORE_EOS,
    KEY_JSON,
    KEY_HASH,
    KEY_QUIET,
    KEY_IDS,
    KEY_POSITIONS,
    KEY_ROUTES,
    KEY_URL,
    KEY_REMOTE_KEY,
    KEY_READS,
    KEY_KEEP,
};

static const struct group {
    unsigned group;
    struct argp_option option;
} table[] = {
    {INF_GROUP_ENGINE, {0, 0, 0, 0, "Which expertd:", 1}},
    {INF_GROUP_ENGINE, {"instance", KEY_INSTANCE, "NAME", 0, "Instance of expertd (default: default)", 0}},
    {INF_GROUP_ENGINE,
     {"runtime-dir", KEY_RUNTIME, "DIR", 0, "Where instances live (default: $XDG_RUNTIME_DIR; /run for root)",
      0}},
    {INF_GROUP_ENGINE,
     {"model", KEY_MODEL, "FILE", 0,
      "Use the expertd that holds this GGUF file; start one in the background if there is none", 0}},
    {INF_GROUP_ENGINE,
     {"device", KEY_DEVICE, "auto|host|cuda[:N]", 0, "Where to compute (default: auto)", 0}},
    {INF_GROUP_ENGINE, {0, 0, 0, 0, "Reading and the stream (default: as expertd was started):", 4}},
    {INF_GROUP_ENGINE,
     {"chunk", KEY_CHUNK, "TOKENS", 0,
      "Most tokens read in one pass (default: 4096; on a GPU what fits, up to 32768)", 0}},
    {INF_GROUP_ENGINE,
     {"ctx", KEY_CTX, "TOKENS", 0, "Tokens of a conversation (default: the model's context)", 0}},
    {INF_GROUP_ENGINE,
     {"threads", KEY_THREADS, "N", 0, "Compute threads (default: every CPU we may use)", 0}},
    {INF_GROUP_ENGINE,
     {"ring", KEY_RING, "SLOTS", 0, "Slots of the ring (default: two layers' experts, at most 1 GiB)", 0}},
    {INF_GROUP_ENGINE,
     {"stream", KEY_STREAM, "full|routed", 0, "Copy every expert, or drop what no token needs", 0}},
    {INF_GROUP_ENGINE,
     {"order", KEY_ORDER, "index|recent|predicted", 0, "Order of the experts inside a layer", 0}},
    {INF_GROUP_ENGINE, {"depth", KEY_DEPTH, "COPIES", 0, "Most guesses under way (routed)", 0}},
    {INF_GROUP_ENGINE,
     {"floor", KEY_FLOOR, "TOKENS", 0, "Chunks below it copy routed experts only, after the router", 0}},
    {INF_GROUP_ENGINE, {"link-gbps", KEY_GBPS, "GB/S", 0, "Pace this worker's link (below 0: unpaced)", 0}},
    {INF_GROUP_ENGINE, {"link-latency-us", KEY_LATENCY, "US", 0, "Latency of each copy (below 0: none)", 0}},
    {INF_GROUP_ENGINE,
     {"resident", KEY_RESIDENT, "N", 0, "Keep the first N experts of each layer in memory", 0}},
    {INF_GROUP_ENGINE,
     {"poison", KEY_POISON, 0, 0, "For tests: fill every slot with 0xFF before its release", 0}},
    {INF_GROUP_ENGINE, {"profile", KEY_PROFILE, 0, 0, "On a GPU: tell where its time went (-v, --json)", 0}},
    {INF_GROUP_ENGINE,
     {"watchdog", KEY_WATCHDOG, "S", 0, "Give up after S seconds without progress (default: 60)", 0}},
    {INF_GROUP_PROMPT, {0, 0, 0, 0, "Prompt (- reads it from standard input):", 2}},
    {INF_GROUP_PROMPT, {"prompt", KEY_PROMPT, "TEXT", 0, "The prompt itself", 0}},
    {INF_GROUP_PROMPT, {"prompt-file", KEY_PROMPT_FILE, "FILE", 0, "A file that holds it", 0}},
    {INF_GROUP_PROMPT | INF_GROUP_SAMPLING,
     {"system", KEY_SYSTEM, "TEXT", 0, "System message before the first turn", 0}},
    {INF_GROUP_PROMPT | INF_GROUP_SAMPLING | INF_GROUP_SERVE,
     {"chat-template", KEY_CHAT_TEMPLATE, "NAME", 0, "Chat template (default: recognized from the model's)",
      2}},
    {INF_GROUP_PROMPT | INF_GROUP_SAMPLING,
     {"thinking", KEY_THINKING, "on|off", 0, "Reasoning before the answer, where the template has a switch",
      0}},
    {INF_GROUP_PROMPT, {"raw", KEY_RAW, 0, 0, "The text as it is, without the chat template", 0}},
    {INF_GROUP_LOGITS, {"ids", KEY_IDS, "N,N,...", 0, "Token ids instead of a text", 0}},
    {INF_GROUP_LOGITS,
     {"positions", KEY_POSITIONS, "LIST", 0, "Whose logits are printed: numbers, last, all (default: last)",
      0}},
    {INF_GROUP_LOGITS, {"routes", KEY_ROUTES, 0, 0, "Print the experts of every layer and token", 0}},
    {INF_GROUP_LOGITS,
     {"reads", KEY_READS, "FILE", 0,
      "Many reads in one process: each line of FILE (-: of standard input) holds the options of one", 0}},
    {INF_GROUP_LOGITS,
     {"keep", KEY_KEEP, 0, 0, "In a line of --reads: go on behind what the read before it left", 0}},
    {INF_GROUP_SAMPLING | INF_GROUP_LOGITS | INF_GROUP_SERVE, {0, 0, 0, 0, "Answer:", 3}},
    {INF_GROUP_SAMPLING | INF_GROUP_LOGITS,
     {0, 'n', "N", 0, "Most tokens to write (default: 128; chat: 512; logits: 0)", 0}},
    {INF_GROUP_SAMPLING | INF_GROUP_SERVE,
     {"temperature", KEY_TEMPERATURE, "T", 0, "0: always the likeliest token (default: 0.7)", 0}},
    {INF_GROUP_SAMPLING | INF_GROUP_SERVE,
     {"top-k", KEY_TOP_K, "K", 0, "Only the K likeliest; 0: off (default: 20)", 0}},
    {INF_GROUP_SAMPLING | INF_GROUP_SERVE,
     {"top-p", KEY_TOP_P, "P", 0, "Only the likeliest that sum up to P; 1: off (default: 0.8)", 0}},
    {INF_GROUP_SAMPLING | INF_GROUP_SERVE,
     {"min-p", KEY_MIN_P, "P", 0, "Only those at least P times as likely as the first (default: 0)", 0}},
    {INF_GROUP_SAMPLING | INF_GROUP_SERVE,
     {"repeat-penalty", KEY_PENALTY, "R", 0, "Make repeated tokens less likely; 1: off (default: 1)", 0}},
    {INF_GROUP_SAMPLING, {"seed", KEY_SEED, "N", 0, "Of the random numbers (default: 0)", 0}},
    {INF_GROUP_SAMPLING,
     {"ignore-eos", KEY_IGNORE_EOS, 0, 0, "Go on after the model has ended its answer", 0}},
    {INF_GROUP_REMOTE, {0, 0, 0, 0, "A server instead of an engine of our own:", 6}},
    {INF_GROUP_REMOTE, {"url", KEY_URL, "URL", 0, "Talk to this inferd serve: http://ADDRESS:PORT", 0}},
    {INF_GROUP_REMOTE,
     {"api-key-file", KEY_REMOTE_KEY, "FILE", 0, "The key for it: the file's first line", 0}},
    {INF_GROUP_REPORT, {0, 0, 0, 0, "Output:", 5}},
    {INF_GROUP_REPORT, {"json", KEY_JSON, 0, 0, "One JSON object a turn instead of the text", 0}},
    {INF_GROUP_REPORT, {"hash", KEY_HASH, 0, 0, "Compute all logits and print their XXH3-64", 0}},
    {INF_GROUP_ENGINE, {"verbose", 'v', 0, 0, "Memory and where the time went, too", 5}},
    {INF_GROUP_REPORT, {"quiet", KEY_QUIET, 0, 0, "No progress, no report", 0}},
};
#define SERVE_MAX 24
#define ENTRIES   (sizeof table / sizeof table[0])

/* What a parser of shm_word.h says, through argp. */
static void complain(struct argp_state *state, const struct shm_error *err)
{
    if (err->code)
        argp_error(state, "%s", shm_error_text(err));
}

static uint64_t number(struct argp_state *state, const char *option, const char *arg, uint64_t low,
                       uint64_t high)
{
    struct shm_error err = {0};
    uint64_t value = 0;
    shm_number_parse(option, arg, low, high, &value, &err);
    complain(state, &err);
    return value;
}

static double real(struct argp_state *state, const char *option, const char *arg)
{
    char *end;
    double value = strtod(arg, &end);
    if (end == arg || *end || !isfinite(value))
        argp_error(state, "%s: '%s' is not a number", option, arg);
    return value;
}

/* Of the paced link; below 0 means none. */
static double pace(struct argp_state *state, const char *option, const char *arg)
{
    struct shm_error err = {0};
    double value = 0;
    shm_real_parse(option, arg, -1, 1e6, &value, &err);
    complain(state, &err);
    return value;
}

static void choose_device(struct argp_state *state, const char *arg, struct inf_engine_config *e)
{
    struct shm_error err = {0};
    uint32_t device = SHM_DEVICE_AUTO;
    shm_device_parse("--device", arg, &device, &e->gpu, &err);
    complain(state, &err);
    e->device = (enum inf_device_choice)device;
}

static error_t parse_engine(int key, char *arg, struct argp_state *state, struct inf_options *o)
{
    struct inf_store_config *s = &o->engine.store;
    struct shm_error err = {0};
    switch (key) {
    case KEY_INSTANCE:
        s->instance = arg;
        o->instance_given = true;
        break;
    case KEY_RUNTIME:
        s->runtime_dir = arg;
        break;
    case KEY_MODEL:
        o->model = arg;
        break;
    case KEY_DEVICE:
        choose_device(state, arg, &o->engine);
        break;
    case KEY_CHUNK:
        o->engine.chunk = (uint32_t)number(state, "--chunk", arg, 1, INF_CHUNK_MAX);
        break;
    case KEY_CTX:
        o->engine.ctx = (uint32_t)number(state, "--ctx", arg, 1, 1u << 27);
        break;
    case KEY_THREADS:
        o->engine.threads = (uint32_t)number(state, "--threads", arg, 1, KRN_POOL_THREADS_MAX);
        break;
    case KEY_RING:
        s->ring = (uint32_t)number(state, "--ring", arg, 1, SHM_RING_MAX);
        break;
    case KEY_STREAM:
        shm_policy_parse("--stream", arg, &s->policy, &err);
        break;
    case KEY_ORDER:
        shm_order_parse("--order", arg, &s->order, &err);
        break;
    case KEY_DEPTH:
        s->depth = (uint32_t)number(state, "--depth", arg, 1, SHM_RING_MAX);
        break;
    case KEY_FLOOR:
        s->floor = (uint32_t)number(state, "--floor", arg, 1, UINT32_MAX);
        break;
    case KEY_GBPS:
        s->link_gbps = pace(state, "--link-gbps", arg);
        break;
    case KEY_LATENCY:
        s->link_latency_us = pace(state, "--link-latency-us", arg);
        break;
    case KEY_RESIDENT:
        s->resident = (uint32_t)number(state, "--resident", arg, 0, SHM_EXPERTS_MAX);
        break;
    case KEY_POISON:
        s->poison = true;
        break;
    case KEY_PROFILE:
        o->engine.profile = true;
        break;
    case KEY_WATCHDOG:
        s->watchdog_ns = number(state, "--watchdog", arg, 1, 86400) * 1000000000u;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    complain(state, &err);
    return 0;
}

static error_t parse_text(int key, char *arg, struct argp_state *state, struct inf_options *o)
{
    struct inf_sampler_params *p = &o->sampler;
    switch (key) {
    case KEY_PROMPT:
        o->prompt = arg;
        break;
    case KEY_PROMPT_FILE:
        o->prompt_file = arg;
        break;
    case KEY_SYSTEM:
        o->system = arg;
        break;
    case KEY_CHAT_TEMPLATE:
        o->chat_template = arg;
        break;
    case KEY_THINKING:
        if (strcmp(arg, "on") && strcmp(arg, "off"))
            argp_error(state, "--thinking: '%s' is not on or off", arg);
        o->thinking = strcmp(arg, "on") ? INF_THINKING_OFF : INF_THINKING_ON;
        break;
    case KEY_RAW:
        o->raw = true;
        break;
    case KEY_IDS:
        o->ids = arg;
        break;
    case KEY_POSITIONS:
        o->positions = arg;
        break;
    case KEY_ROUTES:
        o->routes = true;
        break;
    case KEY_READS:
        o->reads = arg;
        break;
    case KEY_KEEP:
        o->keep = true;
        break;
    case 'n':
        o->n = (uint32_t)number(state, "-n", arg, 0, 1u << 27);
        o->n_given = true;
        break;
    case KEY_TEMPERATURE:
        p->temperature = (float)real(state, "--temperature", arg);
        break;
    case KEY_TOP_K:
        p->top_k = (int32_t)number(state, "--top-k", arg, 0, INT32_MAX);
        break;
    case KEY_TOP_P:
        p->top_p = (float)real(state, "--top-p", arg);
        break;
    case KEY_MIN_P:
        p->min_p = (float)real(state, "--min-p", arg);
        break;
    case KEY_PENALTY:
        p->repeat_penalty = (float)real(state, "--repeat-penalty", arg);
        break;
    case KEY_SEED:
        p->seed = number(state, "--seed", arg, 0, UINT64_MAX);
        break;
    case KEY_IGNORE_EOS:
        o->ignore_eos = true;
        break;
    case KEY_URL:
        o->url = arg;
        break;
    case KEY_REMOTE_KEY:
        o->serve.api_key_file = arg;
        break;
    case KEY_JSON:
        o->json = true;
        break;
    case KEY_HASH:
        o->hash = true;
        break;
    case KEY_QUIET:
        o->quiet = true;
        break;
    case 'v':
        o->verbose = true;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

struct parse {
    unsigned groups;
    struct inf_options *o;
};

/* What only all options together, or other parts of inferd, can tell to be wrong. */
static void check(struct argp_state *state, const struct inf_options *o)
{
    struct shm_error err = {0};
    const struct inf_template *template;
    if (!inf_sampler_check(&o->sampler, &err) && o->chat_template)
        inf_template_find(NULL, 0, o->chat_template, &err, &template);
    complain(state, &err);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct parse *p = state->input;
    if (key == ARGP_KEY_END) {
        check(state, p->o);
        return 0;
    }
    if (key == ARGP_KEY_ARG) {
        if (!(p->groups & INF_GROUP_PROMPT) || strcmp(arg, "-") != 0)
            argp_error(state, "'%s' is not an option; a prompt is given by --prompt, --prompt-file or -",
                       arg);
        p->o->prompt_stdin = true;
        return 0;
    }
    error_t rc = parse_engine(key, arg, state, p->o);
    if (rc == ARGP_ERR_UNKNOWN)
        rc = parse_text(key, arg, state, p->o);
    return rc == ARGP_ERR_UNKNOWN && (p->groups & INF_GROUP_SERVE)
               ? inf_serve_parse(key, arg, state, &p->o->serve)
               : rc;
}

void inf_options_parse(int argc, char **argv, unsigned groups, const char *doc,
                       struct inf_options *ret_options)
{
    struct inf_options o = {.n = 128, .engine.gpu = -1};
    struct argp_option options[ENTRIES + SERVE_MAX + 1] = {{0}};
    size_t n = 0;
    for (size_t i = 0; i < ENTRIES; i++)
        if (table[i].group & groups)
            options[n++] = table[i].option;
    for (size_t i = 0; (groups & INF_GROUP_SERVE) && i < SERVE_MAX; i++) {
        if (!inf_serve_table[i].name && !inf_serve_table[i].doc)
            break;
        options[n++] = inf_serve_table[i];
    }
    inf_serve_default(&o.serve);
    inf_sampler_params_default(&o.sampler);
    o.engine.store.name = "inferd";
    const struct argp argp = {.options = options,
                              .parser = parse,
                              .args_doc = groups & INF_GROUP_PROMPT ? "[-]" : NULL,
                              .doc = doc};
    struct parse input = {.groups = groups, .o = &o};
    argp_parse(&argp, argc, argv, 0, NULL, &input);
    *ret_options = o;
}

static int read_all(FILE *f, const char *name, char **ret_text, size_t *ret_bytes, struct shm_error *err)
{
    size_t n = 0, cap = 1 << 16;
    char *text = malloc(cap);
    while (text) {
        n += fread(text + n, 1, cap - n, f);
        if (n < cap)
            break;
        if (cap >= PROMPT_BYTES_MAX) {
            free(text);
            return shm_error_set(err, E2BIG, "%s: longer than %u MiB: shorten the prompt", name,
                                 PROMPT_BYTES_MAX >> 20);
        }
        char *grown = realloc(text, cap *= 2);
        if (!grown)
            free(text);
        text = grown;
    }
    if (!text)
        return shm_error_set(err, ENOMEM, "%s: no memory for the prompt; free some", name);
    if (ferror(f)) {
        free(text);
        return shm_error_set(err, EIO, "%s: cannot be read: %s", name, strerror(errno));
    }
    *ret_text = text;
    *ret_bytes = n;
    return 0;
}

int inf_options_prompt(const struct inf_options *o, char **ret_text, size_t *ret_bytes, struct shm_error *err)
{
    int sources = !!o->prompt + !!o->prompt_file + o->prompt_stdin;
    if (sources != 1)
        return shm_error_set(err, EINVAL, "%s prompt: give one of --prompt TEXT, --prompt-file FILE, -",
                             sources ? "more than one" : "no");
    char *text = NULL;
    size_t n = 0;
    int rc = 0;
    if (o->prompt) {
        n = strlen(o->prompt);
        if (!(text = strdup(o->prompt)))
            return -ENOMEM;
    } else if (o->prompt_file) {
        FILE *f = fopen(o->prompt_file, "re");
        if (!f)
            return shm_error_set(err, errno, "prompt file %s cannot be opened: %s", o->prompt_file,
                                 strerror(errno));
        rc = read_all(f, o->prompt_file, &text, &n, err);
        fclose(f);
    } else {
        rc = read_all(stdin, "standard input", &text, &n, err);
    }
    if (!rc && !n) {
        free(text);
        return shm_error_set(err, EINVAL, "the prompt is empty: nothing to answer");
    }
    if (!rc) {
        *ret_text = text;
        *ret_bytes = n;
    }
    return rc;
}

int inf_options_ids(const char *text, struct inf_ids *ret_ids, struct shm_error *err)
{
    for (const char *at = text; *at;) {
        char *end;
        errno = 0;
        long value = strtol(at, &end, 10);
        int32_t id = (int32_t)value;
        if (errno || end == at || value < 0 || value > INT32_MAX || (*end && *end != ','))
            return shm_error_set(err, EINVAL, "--ids: '%.20s' is not a token id", at);
        int rc = inf_ids_append(ret_ids, &id, 1);
        if (rc)
            return rc;
        at = *end ? end + 1 : end;
    }
    if (!ret_ids->n)
        return shm_error_set(err, EINVAL, "--ids: the list is empty");
    return 0;
}
