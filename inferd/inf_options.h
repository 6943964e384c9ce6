/* SPDX-License-Identifier: MIT */
/*
 * Command line of inferd: one struct for all commands; each command names the
 * groups of options it takes, and an option outside them is an error. Strings
 * point into argv.
 */
#ifndef INF_OPTIONS_H
#define INF_OPTIONS_H

#include "inferd/inf_engine.h"
#include "inferd/inf_sampler.h"
#include "inferd/inf_template.h"

#include <argp.h>

#define INF_GROUP_ENGINE   1u /* instance, device, stream, threads: every command that attaches */
#define INF_GROUP_PROMPT   2u /* prompt text and how it is read */
#define INF_GROUP_SAMPLING 4u /* -n, temperature, ... */
#define INF_GROUP_REPORT   8u /* --json, --hash */
#define INF_GROUP_LOGITS   16u
#define INF_GROUP_SERVE    32u /* the HTTP server, and what holds where a request says nothing */
#define INF_GROUP_REMOTE   64u /* --url: a server instead of an engine */

/* Of `serve`; inf_options_serve.c. */
struct inf_serve_options {
    const char *listen, *api_key_file, *cors, *model_name;
    const char *log_level; /* as given; NULL: not */
    int level;             /* PRT_LOG_* that it stands for */
    unsigned queue, connections, parallel, gap_ms, kv_tokens;
    unsigned header_kb, body_mb, send_kb;
    unsigned drain_s, resume_s, read_s, write_s;
    uint32_t max_tokens; /* most of an answer; 0: the context */
    bool exact_prefix;   /* inf_prefix.h */
};

struct inf_options {
    const char *model; /* --model: start expertd if none holds that file */
    bool instance_given;
    struct inf_engine_config engine; /* instance, runtime_dir, stream settings, threads, chunk, ctx */

    const char *prompt, *prompt_file, *ids, *system, *chat_template;
    enum inf_thinking thinking;
    bool prompt_stdin, raw;

    struct inf_sampler_params sampler;
    uint32_t n;
    bool n_given, ignore_eos;

    bool json, hash, verbose, quiet;
    struct inf_serve_options serve;
    const char *url; /* chat --url */

    const char *positions; /* --positions */
    bool routes;
    const char *reads; /* --reads */
    bool keep;
};

/* Parses argv (argv[0]: "inferd COMMAND" for messages). Ends the process on
 * --help, --version and on errors (status 2). */
void inf_options_parse(int argc, char **argv, unsigned groups, const char *doc,
                       struct inf_options *ret_options);

/* The options of the server, up to an empty one, and their parser: 0 or ARGP_ERR_UNKNOWN. For
 * inf_options_parse(). */
extern const struct argp_option inf_serve_table[];
int inf_serve_parse(int key, char *arg, struct argp_state *state, struct inf_serve_options *ret_serve);
void inf_serve_default(struct inf_serve_options *ret_serve);

/* The prompt's bytes, from wherever the options say; the caller frees. NULL
 * with 0 bytes never happens: an empty prompt is an error. */
int inf_options_prompt(const struct inf_options *options, char **ret_text, size_t *ret_bytes,
                       struct shm_error *err);

/* "1,2,3" as token ids. */
int inf_options_ids(const char *text, struct inf_ids *ret_ids, struct shm_error *err);

#endif
