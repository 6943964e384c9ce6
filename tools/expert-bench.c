/* SPDX-License-Identifier: MIT */
#include "tools/bench.h"

#include "proto/prt_file.h"
#include "shm/shm_bell.h"
#include "shm/shm_word.h"
#include "tools/bench_common.h"

#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef BENCH_WITHOUT_LOAD
#include "tools/bench_load.h"
#else
static int bench_load_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    fputs("expert-bench: built without libevent, which serve needs\n", stderr);
    return 2;
}
#endif

const char *argp_program_version = "expert-bench " EXPERTD_VERSION;
error_t argp_err_exit_status = 2;

static const char doc[] = "Compares settings of the expert stream by interleaved reads of one prompt. "
                          "`expert-bench serve` puts loads on running servers: see its --help.\v"
                          "SETTING is POLICY[/ORDER[/DEPTH]]: full, routed/index/16, routed/predicted; "
                          "demand (never ahead of the router), "
                          "ahead (routed at any size, whatever the floor) or oracle (predicted, told the "
                          "routing of an earlier identical "
                          "read). The first one is the baseline. Without any: full, routed/index, "
                          "routed/recent, routed/predicted.\n"
                          "\n"
                          "A round reads once with each setting and once more with the baseline, which gives "
                          "the noise band; ratios are "
                          "formed within a round. Exit status 1 when the logits differ.";

enum {
    OPT_RUNTIME_DIR = 0x100,
    OPT_MODEL,
    OPT_PROMPT,
    OPT_PROMPT_FILE,
    OPT_LINK_GBPS,
    OPT_LINK_LATENCY,
    OPT_RING,
    OPT_THREADS,
    OPT_CHUNK,
    OPT_FLOOR,
    OPT_RESIDENT,
    OPT_CTX,
    OPT_TOKENS,
    OPT_SECONDS,
    OPT_GENERATE,
    OPT_BITS,
    OPT_TRACE_FILE,
    OPT_INFERD,
    OPT_EXPERTD,
    OPT_JSON
};

static const struct argp_option options[] = {
    {"model", OPT_MODEL, "FILE", 0,
     "Start an expertd of its own on this file (default: use the running instance)", 1},
    {"instance", 'i', "NAME", 0, "Running instance to use (default: default)", 1},
    {"runtime-dir", OPT_RUNTIME_DIR, "DIR", 0,
     "Where instances live (default: $XDG_RUNTIME_DIR, /run for root)", 1},
    {"prompt", OPT_PROMPT, "TEXT", 0, "What is read, as it is", 2},
    {"prompt-file", OPT_PROMPT_FILE, "FILE", 0, "Likewise, from a file", 2},
    {"tokens", OPT_TOKENS, "LIST", 0,
     "What of it is read: 512,4096: its first tokens; 18800+1790: tokens behind others, as a turn (default: "
     "all)",
     2},
    {"pairs", 'n', "N", 0, "Rounds for each read (default: 5)", 2},
    {"seconds", OPT_SECONDS, "S", 0, "No further round of a read after S seconds, but three at least", 2},
    {"generate", OPT_GENERATE, "N", 0, "Write N tokens behind each read, timed by themselves", 2},
    {"bits", OPT_BITS, "all|last|none", 0,
     "Which logits are compared: all, by a read of its own for each setting (default), or the last token's",
     2},
    {"link-gbps", OPT_LINK_GBPS, "X", 0, "Pace the link to X GB/s", 3},
    {"link-latency-us", OPT_LINK_LATENCY, "X", 0, "and to X us for each copy on top", 3},
    {"ring", OPT_RING, "SLOTS", 0, "Slots of the ring", 3},
    {"chunk", OPT_CHUNK, "TOKENS", 0, "Tokens read in one pass", 3},
    {"floor", OPT_FLOOR, "TOKENS", 0, "Smallest chunk that streams ahead of the router", 3},
    {"ctx", OPT_CTX, "TOKENS", 0, "Tokens of a conversation", 3},
    {"resident", OPT_RESIDENT, "N", 0, "Experts of each layer kept by the worker", 3},
    {"threads", OPT_THREADS, "N", 0, "Compute threads", 3},
    {"inferd", OPT_INFERD, "PROGRAM", 0, "inferd to run (default: the one beside this program, else by PATH)",
     4},
    {"expertd", OPT_EXPERTD, "PROGRAM", 0, "expertd to start with --model (likewise)", 4},
    {"trace-file", OPT_TRACE_FILE, "FILE", 0, "With --model: what each chunk did when, for tools/timeline",
     4},
    {"json", OPT_JSON, 0, 0, "For programs: one JSON object", 4},
    {"quiet", 'q', 0, 0, "No progress on stderr", 4},
    {0},
};

/* demand, ahead and oracle are routed with something beside it. */
static bool known_policy(struct bench_arm *a, const char *word)
{
    uint32_t value;
    snprintf(a->policy, sizeof a->policy, "%s", word);
    if (shm_policy_parse("", word, &value, NULL) == 0)
        return true;
    snprintf(a->policy, sizeof a->policy, "routed");
    if (strcmp(word, "demand") == 0)
        a->floor = UINT32_MAX;
    else if (strcmp(word, "ahead") == 0 || strcmp(word, "oracle") == 0)
        a->floor = 1;
    else
        return false;
    if (strcmp(word, "oracle") == 0) {
        a->known = true;
        snprintf(a->order, sizeof a->order, "predicted");
    }
    return true;
}

static void parse_setting(struct argp_state *state, struct bench_options *o, const char *text)
{
    if (o->arms == BENCH_ARMS_MAX)
        argp_error(state, "at most %d settings", BENCH_ARMS_MAX);
    struct bench_arm *a = &o->arm[o->arms];
    char policy[16] = "", order[16] = "", rest[2];
    unsigned depth = 0;
    memset(a, 0, sizeof *a);
    int fields = sscanf(text, "%15[a-z]/%15[a-z]/%7u%1s", policy, order, &depth, rest);
    uint32_t value;
    bool known = known_policy(a, policy);
    bool ordered = !*order || !shm_order_parse("", order, &value, NULL);
    size_t slashes = 0;
    for (const char *c = text; *c; c++)
        slashes += *c == '/';
    if (fields < 1 || fields > 3 || !known || !ordered || (fields == 3 && !depth) ||
        slashes + 1 != (size_t)fields)
        argp_error(state,
                   "setting '%s' is not POLICY, POLICY/ORDER or POLICY/ORDER/DEPTH with POLICY full, routed, "
                   "demand, "
                   "ahead or oracle and ORDER index, recent or predicted",
                   text);
    snprintf(a->name, sizeof a->name, "%s", text);
    if (*order)
        snprintf(a->order, sizeof a->order, "%s", order);
    a->depth = depth;
    o->arms++;
}

static void parse_spans(struct argp_state *state, struct bench_options *o, char *list)
{
    o->spans = 0;
    for (char *rest = list, *item; (item = strsep(&rest, ","));) {
        if (o->spans == BENCH_READS_MAX)
            argp_error(state, "--tokens: at most %d reads", BENCH_READS_MAX);
        struct bench_span *span = &o->span[o->spans++];
        char *tokens = item, *plus = strchr(item, '+');
        if (plus) {
            *plus = 0;
            tokens = plus + 1;
            span->at = (uint32_t)bench_whole(state, "--tokens", item, 1, 1u << 27);
        }
        span->tokens = (uint32_t)bench_whole(state, "--tokens", tokens, 1, 1u << 27);
    }
}

static void parse_bits(struct argp_state *state, struct bench_options *o, const char *text)
{
    static const char *const words[] = {"all", "last", "none"};
    for (size_t i = 0; i < 3; i++)
        if (strcmp(text, words[i]) == 0) {
            o->bits = (enum bench_bits)i;
            return;
        }
    argp_error(state, "--bits: '%s' is not all, last or none", text);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct bench_options *o = state->input;
    char *end;
    switch (key) {
    case OPT_TOKENS:
        parse_spans(state, o, arg);
        return 0;
    case OPT_SECONDS:
        o->seconds = strtod(arg, &end);
        if (*end || end == arg || !(o->seconds > 0))
            argp_error(state, "--seconds: '%s' is not a time above 0", arg);
        return 0;
    case OPT_GENERATE:
        o->generate = (uint32_t)bench_whole(state, "--generate", arg, 1, 1u << 20);
        return 0;
    case OPT_BITS:
        parse_bits(state, o, arg);
        return 0;
    case OPT_TRACE_FILE:
        o->trace_file = arg;
        return 0;
    case OPT_CTX:
        o->ctx = arg;
        return 0;
    case 'i':
        o->instance = arg;
        return 0;
    case 'q':
        o->quiet = true;
        return 0;
    case OPT_RUNTIME_DIR:
        o->runtime_dir = arg;
        return 0;
    case OPT_MODEL:
        o->model = arg;
        return 0;
    case OPT_PROMPT:
        o->prompt = arg;
        return 0;
    case OPT_PROMPT_FILE:
        o->prompt_file = arg;
        return 0;
    case OPT_LINK_GBPS:
        o->link_gbps = arg;
        return 0;
    case OPT_LINK_LATENCY:
        o->link_latency_us = arg;
        return 0;
    case OPT_RING:
        o->ring = arg;
        return 0;
    case OPT_THREADS:
        o->threads = arg;
        return 0;
    case OPT_CHUNK:
        o->chunk = arg;
        return 0;
    case OPT_FLOOR:
        o->floor = (uint32_t)bench_whole(state, "--floor", arg, 1, UINT32_MAX);
        return 0;
    case OPT_RESIDENT:
        o->resident = arg;
        return 0;
    case OPT_INFERD:
        o->inferd = arg;
        return 0;
    case OPT_EXPERTD:
        o->expertd = arg;
        return 0;
    case OPT_JSON:
        o->json = true;
        return 0;
    case 'n':
        o->rounds = (uint32_t)bench_whole(state, "--pairs", arg, 1, BENCH_ROUNDS_MAX);
        return 0;
    case ARGP_KEY_ARG:
        parse_setting(state, o, arg);
        return 0;
    case ARGP_KEY_END:
        if (!o->prompt == !o->prompt_file)
            argp_error(state, "give either --prompt or --prompt-file");
        if (!o->arms)
            for (const char *const *d =
                     (const char *const[]){"full", "routed/index", "routed/recent", "routed/predicted", NULL};
                 *d; d++)
                parse_setting(state, o, *d);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void show(const struct bench_options *o, const struct bench_span *span, const char *what,
                 uint32_t round)
{
    if (!o->quiet && isatty(STDERR_FILENO))
        fprintf(stderr, "\r%u tokens, round %u of %u, %-24s", span->tokens, round + 1, o->rounds, what);
}

/* A read with each setting that is not timed: warms up, shows the bits, and lets the oracle know. */
static int rehearse(const struct bench_options *o, struct bench_worker *w, struct bench_read *r,
                    struct shm_error *err)
{
    struct bench_sample first = {0}, s;
    const struct bench_arm plain = {.name = "full", .policy = "full"};
    int rc = o->arm[0].known ? bench_worker_read(w, o, &plain, &r->span, false, &s, err) : 0;
    for (uint32_t a = 0; !rc && a < o->arms; a++) {
        rc = bench_worker_read(w, o, &o->arm[a], &r->span, o->bits == BENCH_BITS_ALL, &s, err);
        if (a == 0)
            first = s;
        if (o->bits != BENCH_BITS_NONE && !rc && strcmp(s.hash, first.hash) != 0)
            r->same_bits = false;
    }
    return rc;
}

static int run_round(const struct bench_options *o, struct bench_worker *w, struct bench_read *r,
                     struct shm_error *err)
{
    int rc = 0;
    for (uint32_t i = 0; !rc && i <= o->arms; i++) {
        uint32_t a = r->rounds % 2 ? o->arms - i : i;
        const struct bench_arm *arm = a < o->arms ? &o->arm[a] : &o->arm[0];
        show(o, &r->span, a < o->arms ? arm->name : "identical pair", r->rounds);
        rc = bench_worker_read(w, o, arm, &r->span, false, &r->sample[a][r->rounds], err);
        /* The first read of all is arm 0's: it is there by the time of any other. */
        if (!rc && o->bits != BENCH_BITS_NONE &&
            strcmp(r->sample[a][r->rounds].hash, r->sample[0][0].hash) != 0)
            r->same_bits = false;
    }
    if (!rc)
        r->rounds++;
    return rc;
}

static int run(const struct bench_options *o, struct bench_results *res, struct shm_error *err)
{
    struct bench_worker *w = NULL;
    int rc = bench_worker_start(o, &w, &res->facts, err);
    for (uint32_t i = 0; !rc && i < o->spans; i++) {
        struct bench_read *r = &res->read[i];
        r->span = o->span[i];
        if (!r->span.tokens)
            r->span.tokens = (uint32_t)res->facts.prompt_tokens;
        r->same_bits = true;
        uint64_t start_ns = shm_now_ns();
        rc = rehearse(o, w, r, err);
        while (!rc && r->rounds < o->rounds &&
               (r->rounds < 3 || o->seconds <= 0 || (double)(shm_now_ns() - start_ns) / 1e9 < o->seconds))
            rc = run_round(o, w, r, err);
        res->reads = i + 1;
    }
    if (!o->quiet && isatty(STDERR_FILENO))
        fprintf(stderr, "\r%70s\r", "");
    bench_worker_stop(&w);
    return rc;
}

int main(int argc, char **argv)
{
    prt_file_standard();
    if (argc > 1 && strcmp(argv[1], "serve") == 0) {
        static char name[] = "expert-bench serve";
        argv[1] = name;
        return bench_load_main(argc - 1, argv + 1);
    }
    static const struct argp argp = {options, parse, "[SETTING...]", doc, NULL, NULL, NULL};
    struct bench_options o = {.rounds = 5, .spans = 1};
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    struct shm_error err = {0};
    struct bench_own own = {0};
    struct bench_results r = {.options = &o, .read = calloc(o.spans, sizeof *r.read)};
    int status = 2;
    if (!r.read) {
        fprintf(stderr, "expert-bench: no memory\n");
        return status;
    }
    bench_catch_signals();
    if ((o.model && bench_own_start(&o, &own, &err)) || run(&o, &r, &err)) {
        fprintf(stderr, "expert-bench: %s\n", shm_error_text(&err));
    } else {
        (o.json ? bench_print_json : bench_print_table)(&r);
        status = bench_same_bits(&r) ? 0 : 1;
        if (fflush(stdout) || ferror(stdout)) {
            fprintf(stderr, "expert-bench: standard output cannot be written\n");
            status = 2;
        }
    }
    bench_own_stop(&own);
    free(r.read);
    return status;
}
