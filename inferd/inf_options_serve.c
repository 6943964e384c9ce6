/* SPDX-License-Identifier: MIT */
/* Options of `serve`. */
#include "inferd/inf_options.h"

#include "proto/prt_log.h"
#include "shm/shm_word.h"

#include <argp.h>

enum key {
    KEY_LISTEN = 0x400,
    KEY_KEYS,
    KEY_CORS,
    KEY_NAME,
    KEY_QUEUE,
    KEY_KV_TOKENS,
    KEY_CONNECTIONS,
    KEY_MAX_TOKENS,
    KEY_HEADER,
    KEY_BODY,
    KEY_SEND,
    KEY_DRAIN,
    KEY_RESUME,
    KEY_READ,
    KEY_WRITE,
    KEY_PARALLEL,
    KEY_GAP,
    KEY_EXACT,
    KEY_LOG_LEVEL,
};

const struct argp_option inf_serve_table[] = {
    {0, 0, 0, 0, "Server:", 7},
    {"listen", KEY_LISTEN, "ADDRESS:PORT", 0,
     "Where to listen (default: 127.0.0.1:8080); a socket from systemd goes first", 0},
    {"api-key-file", KEY_KEYS, "FILE", 0,
     "Keys, one a line: requests need one of them (default: none needed)", 0},
    {"cors", KEY_CORS, "ORIGIN,...", 0, "Web pages that may use this server, or * for all (default: none)",
     0},
    {"model-name", KEY_NAME, "NAME", 0, "What the model is called (default: the name in its file)", 0},
    {"kv-tokens", KEY_KV_TOKENS, "N", 0,
     "Tokens that there is room for, those of all requests and those kept for later (default: what memory "
     "allows)",
     0},
    {"parallel", KEY_PARALLEL, "N", 0, "Most requests that are computed at once (default: 32)", 0},
    {"answer-gap-ms", KEY_GAP, "MS", 0,
     "Longest between two tokens of an answer while other prompts are read; 0: any (default: 250)", 0},
    {"exact-prefix", KEY_EXACT, 0, 0,
     "Use again only what was read as part of a prompt, no answers: on a GPU their keys and values may "
     "differ in "
     "the last bits",
     0},
    {"log-level", KEY_LOG_LEVEL, "error|warning|info|debug|@FILE", 0,
     "Least important lines shown, or a file whose first word says so, read again at SIGHUP; debug: each "
     "request "
     "(default: info)",
     0},
    {0, 0, 0, 0, "Limits of the server:", 8},
    {"queue", KEY_QUEUE, "N", 0, "Most requests that wait; more get 429 (default: 256)", 0},
    {"connections", KEY_CONNECTIONS, "N", 0, "Most connections (default: 1024)", 0},
    {"max-tokens", KEY_MAX_TOKENS, "N", 0, "Most tokens of an answer (default: the context)", 0},
    {"header-kb", KEY_HEADER, "KIB", 0, "Longest head of a request (default: 32)", 0},
    {"body-mb", KEY_BODY, "MIB", 0, "Longest body of a request (default: 4)", 0},
    {"send-kb", KEY_SEND, "KIB", 0,
     "Most that waits for a slow reader before its work is cancelled (default: 1024)", 0},
    {"read-seconds", KEY_READ, "S", 0, "Longest that a request may take to arrive (default: 60)", 0},
    {"write-seconds", KEY_WRITE, "S", 0, "Longest without a byte taken by the client (default: 30)", 0},
    {"drain-seconds", KEY_DRAIN, "S", 0, "What requests get to finish after SIGTERM (default: 30)", 0},
    {"resume-seconds", KEY_RESUME, "S", 0, "How long a request waits for the next expertd (default: 10)", 0},
    {0},
};

void inf_serve_default(struct inf_serve_options *s)
{
    *s = (struct inf_serve_options){.listen = "127.0.0.1:8080",
                                    .level = PRT_LOG_INFO,
                                    .queue = 256,
                                    .connections = 1024,
                                    .parallel = 32,
                                    .gap_ms = 250,
                                    .header_kb = 32,
                                    .body_mb = 4,
                                    .send_kb = 1024,
                                    .read_s = 60,
                                    .write_s = 30,
                                    .drain_s = 30,
                                    .resume_s = 10};
}

static unsigned number(struct argp_state *state, const char *option, const char *arg, uint64_t low,
                       uint64_t high)
{
    struct shm_error err = {0};
    uint64_t value = 0;
    shm_number_parse(option, arg, low, high, &value, &err);
    if (err.code)
        argp_error(state, "%s", shm_error_text(&err));
    return (unsigned)value;
}

int inf_serve_parse(int key, char *arg, struct argp_state *state, struct inf_serve_options *s)
{
    struct shm_error err = {0};
    switch (key) {
    case KEY_LISTEN:
        s->listen = arg;
        break;
    case KEY_KEYS:
        s->api_key_file = arg;
        break;
    case KEY_LOG_LEVEL:
        s->log_level = arg;
        s->level = prt_log_read_level(arg, &err);
        if (s->level < 0)
            argp_error(state, "%s", shm_error_text(&err));
        break;
    case KEY_CORS:
        s->cors = arg;
        break;
    case KEY_NAME:
        s->model_name = arg;
        break;
    case KEY_QUEUE:
        s->queue = number(state, "--queue", arg, 1, 1 << 20);
        break;
    case KEY_KV_TOKENS:
        s->kv_tokens = number(state, "--kv-tokens", arg, 1, 1u << 30);
        break;
    case KEY_CONNECTIONS:
        s->connections = number(state, "--connections", arg, 1, 1 << 20);
        break;
    case KEY_EXACT:
        s->exact_prefix = true;
        break;
    case KEY_PARALLEL:
        s->parallel = number(state, "--parallel", arg, 1, INF_SPANS_MAX);
        break;
    case KEY_GAP:
        s->gap_ms = number(state, "--answer-gap-ms", arg, 0, 3600000);
        break;
    case KEY_MAX_TOKENS:
        s->max_tokens = number(state, "--max-tokens", arg, 1, 1u << 27);
        break;
    case KEY_HEADER:
        s->header_kb = number(state, "--header-kb", arg, 1, 1024);
        break;
    case KEY_BODY:
        s->body_mb = number(state, "--body-mb", arg, 1, 1024);
        break;
    case KEY_SEND:
        s->send_kb = number(state, "--send-kb", arg, 1, 1 << 20);
        break;
    case KEY_READ:
        s->read_s = number(state, "--read-seconds", arg, 1, 86400);
        break;
    case KEY_WRITE:
        s->write_s = number(state, "--write-seconds", arg, 1, 86400);
        break;
    case KEY_DRAIN:
        s->drain_s = number(state, "--drain-seconds", arg, 0, 86400);
        break;
    case KEY_RESUME:
        s->resume_s = number(state, "--resume-seconds", arg, 0, 86400);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}
