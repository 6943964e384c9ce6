/* SPDX-License-Identifier: MIT */
/* The command `serve`: options, rounds. */
#include "tools/bench_load.h"

#include "shm/shm_word.h"
#include "tools/bench_common.h"

#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char doc[] =
    "Puts loads on running servers (OpenAI's chat completions, streamed) and tells what their clients see.\v"
    "SERVER is http://HOST:PORT, or several of them separated by commas, which share the conversations. With "
    "more "
    "than one SERVER, rounds are interleaved and ratios to the first one are formed within a round. Exit "
    "status 1 "
    "when a request failed.";

enum {
    OPT_CONVERSATIONS = 0x100,
    OPT_RATE,
    OPT_COUNT,
    OPT_SECONDS,
    OPT_TURNS,
    OPT_PROMPT,
    OPT_TURN,
    OPT_SYSTEM,
    OPT_MAX_TOKENS,
    OPT_MAY_END,
    OPT_PAUSE,
    OPT_TIMEOUT,
    OPT_RETRIES,
    OPT_SEED,
    OPT_MODEL,
    OPT_KEY,
    OPT_JSON,
};

static const struct argp_option options[] = {
    {"conversations", OPT_CONVERSATIONS, "LIST", 0, "Loads: so many at once, 1,8,32 (default: 1,8)", 1},
    {"rate", OPT_RATE, "LIST", 0, "Loads: so many begin a second, at random, however slow the answers: 0.5,2",
     1},
    {"count", OPT_COUNT, "N", 0,
     "Conversations of a round (default: twice those at once, 8 at least; 32 by rate)", 1},
    {"pairs", 'n', "N", 0, "Rounds for each load (default: 1; 3 with several servers)", 1},
    {"seconds", OPT_SECONDS, "S", 0, "No conversation begins later than S seconds after the round", 1},
    {"turns", OPT_TURNS, "N", 0, "Turns of a conversation, each behind all before it (default: 1)", 2},
    {"prompt-tokens", OPT_PROMPT, "N[-M]", 0, "Tokens of the first turn (default: 64)", 2},
    {"turn-tokens", OPT_TURN, "N[-M]", 0, "Tokens of later turns (default: as the first)", 2},
    {"system-tokens", OPT_SYSTEM, "N", 0, "A system prompt that all conversations share (default: 0)", 2},
    {"max-tokens", OPT_MAX_TOKENS, "N", 0, "Tokens of an answer (default: 64)", 2},
    {"may-end", OPT_MAY_END, 0, 0, "Answers end where the model ends them (default: ignore_eos is sent)", 2},
    {"pause", OPT_PAUSE, "S", 0, "Seconds between two turns of a conversation (default: 0)", 2},
    {"seed", OPT_SEED, "N", 0, "Makes texts and arrivals (default: 1)", 2},
    {"model", OPT_MODEL, "NAME", 0, "Model to ask for (default: the first one that the server lists)", 3},
    {"api-key-file", OPT_KEY, "FILE", 0, "A file that holds the API key", 3},
    {"timeout", OPT_TIMEOUT, "S", 0, "A request fails after so long without a byte (default: 600)", 3},
    {"retries", OPT_RETRIES, "N", 0, "Tries after 429 and 503, each when Retry-After says (default: 20)", 3},
    {"json", OPT_JSON, 0, 0, "For programs: one JSON object", 4},
    {"quiet", 'q', 0, 0, "No progress on stderr", 4},
    {0},
};

static double real(struct argp_state *state, const char *option, const char *text, double low, double high)
{
    double value = low;
    struct shm_error err = {0};
    if (shm_real_parse(option, text, low, high, &value, &err))
        argp_error(state, "%s", shm_error_text(&err));
    return value;
}

static void parse_points(struct argp_state *state, struct load_options *o, char *list, bool rate)
{
    for (char *rest = list, *item; (item = strsep(&rest, ","));) {
        if (o->points == LOAD_POINTS_MAX)
            argp_error(state, "at most %d loads", LOAD_POINTS_MAX);
        struct load_point *p = &o->point[o->points++];
        if (rate)
            p->rate = real(state, "--rate", item, 0.001, 100000);
        else
            p->conversations = (unsigned)bench_whole(state, "--conversations", item, 1, 4096);
    }
}

static void parse_range(struct argp_state *state, const char *option, char *text, unsigned range[2])
{
    char *to = strchr(text, '-');
    if (to)
        *to++ = '\0';
    range[0] = (unsigned)bench_whole(state, option, text, 1, 1u << 24);
    range[1] = to ? (unsigned)bench_whole(state, option, to, range[0], 1u << 24) : range[0];
}

static void parse_server(struct argp_state *state, struct load_options *o, const char *text)
{
    struct shm_error err = {0};
    struct load_server *s = o->servers < LOAD_SERVERS_MAX ? calloc(1, sizeof *s) : NULL;
    if (!s)
        argp_failure(state, 2, 0, "at most %d servers", LOAD_SERVERS_MAX);
    o->server[o->servers++] = s;
    s->name = text;
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (s->urls == LOAD_URLS_MAX)
            argp_error(state, "at most %d URLs of a server", LOAD_URLS_MAX);
        if (load_url_parse(at, strcspn(at, ","), &s->url[s->urls++], &err))
            argp_error(state, "%s", shm_error_text(&err));
    }
}

static void read_key(struct argp_state *state, struct load_options *o, const char *path)
{
    FILE *f = fopen(path, "re");
    size_t cap = 0;
    free(o->key);
    o->key = NULL;
    if (!f || getline(&o->key, &cap, f) < 0)
        argp_failure(state, 2, f ? 0 : errno, "--api-key-file %.200s%s", path, f ? ": holds no key" : "");
    o->key[strcspn(o->key, " \t\r\n")] = '\0';
    fclose(f);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct load_options *o = state->input;
    switch (key) {
    case OPT_CONVERSATIONS:
    case OPT_RATE:
        parse_points(state, o, arg, key == OPT_RATE);
        return 0;
    case OPT_COUNT:
        o->count = (unsigned)bench_whole(state, "--count", arg, 1, 1u << 24);
        return 0;
    case 'n':
        o->rounds = (unsigned)bench_whole(state, "--pairs", arg, 1, LOAD_ROUNDS_MAX);
        return 0;
    case OPT_SECONDS:
        o->seconds = real(state, "--seconds", arg, 0.001, 1e6);
        return 0;
    case OPT_TURNS:
        o->turns = (unsigned)bench_whole(state, "--turns", arg, 1, 10000);
        return 0;
    case OPT_PROMPT:
        parse_range(state, "--prompt-tokens", arg, o->prompt);
        return 0;
    case OPT_TURN:
        parse_range(state, "--turn-tokens", arg, o->turn);
        return 0;
    case OPT_SYSTEM:
        o->system = (unsigned)bench_whole(state, "--system-tokens", arg, 0, 1u << 24);
        return 0;
    case OPT_MAX_TOKENS:
        o->max_tokens = (unsigned)bench_whole(state, "--max-tokens", arg, 1, 1u << 24);
        return 0;
    case OPT_MAY_END:
        o->may_end = true;
        return 0;
    case OPT_PAUSE:
        o->pause_s = real(state, "--pause", arg, 0, 86400);
        return 0;
    case OPT_TIMEOUT:
        o->timeout_s = real(state, "--timeout", arg, 0.01, 1e6);
        return 0;
    case OPT_RETRIES:
        o->retries = (unsigned)bench_whole(state, "--retries", arg, 0, 1u << 20);
        return 0;
    case OPT_SEED:
        o->seed = bench_whole(state, "--seed", arg, 0, (uint64_t)INT64_MAX);
        return 0;
    case OPT_MODEL:
        o->model = arg;
        return 0;
    case OPT_KEY:
        read_key(state, o, arg);
        return 0;
    case OPT_JSON:
        o->json = true;
        return 0;
    case 'q':
        o->quiet = true;
        return 0;
    case ARGP_KEY_ARG:
        parse_server(state, o, arg);
        return 0;
    case ARGP_KEY_END:
        if (!o->servers)
            argp_error(state, "give a SERVER: http://HOST:PORT");
        if (!o->points)
            o->point[0].conversations = 1, o->point[1].conversations = 8, o->points = 2;
        if (!o->rounds)
            o->rounds = o->servers > 1 ? 3 : 1;
        if (!o->turn[1])
            memcpy(o->turn, o->prompt, sizeof o->turn);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Every other round goes through the servers the other way round. */
static int run(struct load_options *o, struct load_run *runs, struct shm_error *err)
{
    int rc = load_calibrate(o, err);
    for (unsigned p = 0; !rc && p < o->points; p++)
        for (unsigned round = 0; !rc && round < o->rounds; round++)
            for (unsigned i = 0; !rc && i < o->servers; i++) {
                unsigned s = round % 2 ? o->servers - 1 - i : i;
                struct load_run *r = &runs[((size_t)p * o->servers + s) * o->rounds + round];
                rc = load_run(o, o->server[s], &o->point[p], round, r, err);
                if (!rc && !o->quiet && !isatty(STDERR_FILENO)) {
                    char name[48];
                    load_point_name(&o->point[p], name, sizeof name);
                    fprintf(stderr, "%s, round %u of %u, %.100s: %llu of %llu turns in %.1f s\n", name,
                            round + 1, o->rounds, o->server[s]->name, (unsigned long long)r->ok,
                            (unsigned long long)r->requests, r->seconds);
                }
            }
    return rc;
}

int bench_load_main(int argc, char **argv)
{
    static const struct argp argp = {options, parse, "SERVER...", doc, NULL, NULL, NULL};
    struct load_options o = {
        .turns = 1, .prompt = {64, 64}, .max_tokens = 64, .timeout_s = 600, .retries = 20, .seed = 1};
    struct shm_error err = {0};
    int status = 2;
    signal(SIGPIPE, SIG_IGN);
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    size_t n = (size_t)o.points * o.servers * o.rounds;
    struct load_run *runs = calloc(n, sizeof *runs);
    if (!runs) {
        fprintf(stderr, "expert-bench: no memory\n");
    } else if (run(&o, runs, &err)) {
        fprintf(stderr, "expert-bench: %s\n", shm_error_text(&err));
    } else {
        (o.json ? load_print_json : load_print_table)(&o, runs);
        status = 0;
        for (size_t i = 0; i < n; i++)
            if (runs[i].failures)
                status = 1;
        if (fflush(stdout) || ferror(stdout)) {
            fprintf(stderr, "expert-bench: standard output cannot be written\n");
            status = 2;
        }
    }
    for (size_t i = 0; runs && i < n; i++)
        load_run_clear(&runs[i]);
    free(runs);
    for (unsigned i = 0; i < o.servers; i++)
        free(o.server[i]);
    free(o.key);
    return status;
}
