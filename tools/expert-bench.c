/* SPDX-License-Identifier: MIT */
#include "tools/bench.h"

#include "proto/prt_file.h"
#include "shm/shm_word.h"

#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *argp_program_version = "expert-bench " EXPERTD_VERSION;
error_t argp_err_exit_status = 2;

static const char doc[] =
    "Compares settings of the expert stream by interleaved pairs of reads of one prompt.\v"
    "SETTING is POLICY[/ORDER[/DEPTH]]: full, routed/index/16, routed/predicted. The first one is the "
    "baseline. Without "
    "any: full, routed/index, routed/recent, routed/predicted.\n"
    "\n"
    "Each pair is a read with the baseline and one with the setting, their order alternating; the baseline "
    "is also "
    "paired with itself, which gives the noise band. Exit status 1 when the logits (of a read of its own for "
    "each setting) differ.";

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
    {"pairs", 'n', "N", 0, "Pairs of reads for each setting (default: 5)", 2},
    {"link-gbps", OPT_LINK_GBPS, "X", 0, "Pace the link to X GB/s", 3},
    {"link-latency-us", OPT_LINK_LATENCY, "X", 0, "and to X us for each copy on top", 3},
    {"ring", OPT_RING, "SLOTS", 0, "Slots of the ring", 3},
    {"chunk", OPT_CHUNK, "TOKENS", 0, "Tokens read in one pass", 3},
    {"floor", OPT_FLOOR, "TOKENS", 0, "Smallest chunk that streams ahead of the router", 3},
    {"resident", OPT_RESIDENT, "N", 0, "Experts of each layer kept by the worker", 3},
    {"threads", OPT_THREADS, "N", 0, "Compute threads", 3},
    {"inferd", OPT_INFERD, "PROGRAM", 0, "inferd to run (default: the one beside this program, else by PATH)",
     4},
    {"expertd", OPT_EXPERTD, "PROGRAM", 0, "expertd to start with --model (likewise)", 4},
    {"json", OPT_JSON, 0, 0, "For programs: one JSON object", 4},
    {"quiet", 'q', 0, 0, "No progress on stderr", 4},
    {0},
};

static void parse_setting(struct argp_state *state, struct bench_options *o, const char *text)
{
    if (o->arms == BENCH_ARMS_MAX)
        argp_error(state, "at most %d settings", BENCH_ARMS_MAX);
    struct bench_arm *a = &o->arm[o->arms];
    char order[16] = "", rest[2];
    unsigned depth = 0;
    memset(a, 0, sizeof *a);
    int fields = sscanf(text, "%15[a-z]/%15[a-z]/%7u%1s", a->policy, order, &depth, rest);
    uint32_t value;
    bool known = !shm_policy_parse("", a->policy, &value, NULL);
    bool ordered = !*order || !shm_order_parse("", order, &value, NULL);
    size_t slashes = 0;
    for (const char *c = text; *c; c++)
        slashes += *c == '/';
    if (fields < 1 || fields > 3 || !known || !ordered || (fields == 3 && !depth) ||
        slashes + 1 != (size_t)fields)
        argp_error(state,
                   "setting '%s' is not full, routed, routed/ORDER or routed/ORDER/DEPTH with ORDER index, "
                   "recent or "
                   "predicted",
                   text);
    snprintf(a->name, sizeof a->name, "%s", text);
    snprintf(a->order, sizeof a->order, "%s", order);
    a->depth = depth;
    o->arms++;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct bench_options *o = state->input;
    char *end;
    switch (key) {
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
        o->floor = arg;
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
        o->pairs = (uint32_t)strtoul(arg, &end, 10);
        if (*end || *arg == '-' || !o->pairs || o->pairs > BENCH_PAIRS_MAX)
            argp_error(state, "--pairs: '%s' is not in 1..%d", arg, BENCH_PAIRS_MAX);
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

static int run_pairs(const struct bench_options *o, struct bench_results *r, struct shm_error *err)
{
    /* Bits are compared in reads of their own: hashing all logits takes time. They warm the machine up, too.
     */
    struct bench_sample untimed;
    int rc = 0;
    for (uint32_t a = 0; !rc && a < o->arms; a++)
        rc = bench_read(o, &o->arm[a], &untimed, r->hash[a], err);
    for (uint32_t pair = 0; !rc && pair < o->pairs; pair++) {
        for (uint32_t a = 0; !rc && a <= o->arms; a++) {
            const struct bench_arm *arm = a < o->arms ? &o->arm[a] : &o->arm[0];
            bool base_first = (pair + a) % 2 == 0;
            if (!o->quiet && isatty(STDERR_FILENO))
                fprintf(stderr, "\rpair %u of %u, %-24s", pair + 1, o->pairs,
                        a < o->arms ? arm->name : "identical pair");
            if (base_first)
                rc = bench_read(o, &o->arm[0], &r->base[a][pair], NULL, err);
            if (!rc)
                rc = bench_read(o, arm, &r->arm[a][pair], NULL, err);
            if (!rc && !base_first)
                rc = bench_read(o, &o->arm[0], &r->base[a][pair], NULL, err);
        }
        r->pairs = pair + 1;
    }
    if (!o->quiet && isatty(STDERR_FILENO))
        fprintf(stderr, "\r%60s\r", "");
    return rc;
}

int main(int argc, char **argv)
{
    prt_file_standard();
    static const struct argp argp = {options, parse, "[SETTING...]", doc, NULL, NULL, NULL};
    struct bench_options o = {.pairs = 5};
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    struct shm_error err = {0};
    struct bench_own own = {0};
    struct bench_results *r = calloc(1, sizeof *r);
    int status = 2;
    if (!r) {
        fprintf(stderr, "expert-bench: no memory\n");
        return status;
    }
    r->options = &o;
    bench_catch_signals();
    if ((o.model && bench_own_start(&o, &own, &err)) || run_pairs(&o, r, &err)) {
        fprintf(stderr, "expert-bench: %s\n", shm_error_text(&err));
    } else {
        (o.json ? bench_print_json : bench_print_table)(r);
        status = bench_same_bits(r) ? 0 : 1;
        if (fflush(stdout) || ferror(stdout)) {
            fprintf(stderr, "expert-bench: standard output cannot be written\n");
            status = 2;
        }
    }
    bench_own_stop(&own);
    free(r);
    return status;
}
