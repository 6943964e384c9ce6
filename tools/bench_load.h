/* SPDX-License-Identifier: MIT */
/*
 * expert-bench serve: a load on running servers, and what their clients see of it.
 * Conversations over OpenAI's chat completions, streamed; knows nothing of the server
 * but HTTP. A load is a number of conversations at once (closed loop: the next begins
 * where one ends) or a rate of them (open loop: Poisson arrivals, however slow the
 * server is). Texts and arrivals come from a seed: each server of a round gets the same.
 * One thread.
 */
#ifndef BENCH_LOAD_H
#define BENCH_LOAD_H

#include "shm/shm_error.h"

#include <event2/event.h>
#include <jansson.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#define LOAD_SERVERS_MAX 8
#define LOAD_URLS_MAX    16
#define LOAD_POINTS_MAX  16
#define LOAD_ROUNDS_MAX  100
#define LOAD_STATUS_MAX  12

struct load_url {
    char host[256]; /* as given, for the Host field */
    struct sockaddr_storage address;
    socklen_t address_bytes;
};

/* One column of a comparison: a server, or several that share the conversations. */
struct load_server {
    const char *name; /* as given */
    struct load_url url[LOAD_URLS_MAX];
    unsigned urls;
    char model[128];
};

struct load_point {
    unsigned conversations; /* at once; 0: by rate */
    double rate;            /* conversations a second */
};

struct load_options {
    struct load_server *server[LOAD_SERVERS_MAX];
    struct load_point point[LOAD_POINTS_MAX];
    unsigned servers, points;
    unsigned rounds;     /* 0: by default */
    unsigned count;      /* conversations of a round; 0: by default */
    double seconds;      /* none begins later; 0: no limit */
    unsigned turns;      /* of a conversation */
    unsigned prompt[2];  /* tokens of the first turn: from, to */
    unsigned turn[2];    /* of later ones; 0: likewise */
    unsigned system;     /* shared tokens before all conversations */
    unsigned max_tokens; /* of an answer */
    bool may_end;        /* answers end where the model ends them */
    double pause_s;      /* between two turns */
    double timeout_s;    /* without a byte */
    unsigned retries;    /* of one turn */
    uint64_t seed;
    const char *model;
    char *key;
    bool json, quiet;
    double base, per_word; /* tokens of a prompt of w words: base + per_word * w, as the server counted */
};

/* Values that grow by one. */
struct load_series {
    double *v;
    size_t n, cap;
};
bool load_series_add(struct load_series *s, double value);

struct load_failure {
    char what[24]; /* status, or "connection", "time-out", "stream" */
    uint64_t n;
};

/* What one server did in one round. */
struct load_run {
    double seconds;
    uint64_t conversations, requests, ok, retries; /* requests: turns, however often tried */
    uint64_t prompt_tokens, cached_tokens, generated_tokens;
    struct load_series ttft_ms, later_ttft_ms, itl_ms, total_ms; /* later: of turns behind the first */
    struct load_failure failure[LOAD_STATUS_MAX];
    unsigned failures, most_at_once;
    double late_ms; /* an arrival by rate that began so much later than drawn, at most */
    char why[256];  /* of the last failure */
};
void load_run_clear(struct load_run *run);

/* ---- bench_load_http.c: one request */

struct load_request;
struct load_reply {
    int status;          /* 0: no answer */
    const char *failure; /* kind, for the count; NULL: all is well */
    const char *why;     /* one line */
    double retry_after_s;
    uint64_t prompt_tokens, cached_tokens, generated_tokens;
    const char *text; /* the answer (of a stream), else the body */
};
/* on_piece: text of a stream came. on_end: once, the request is gone when it returns. */
struct load_handler {
    void (*on_piece)(void *ctx);
    void (*on_end)(void *ctx, const struct load_reply *reply);
    void *ctx;
};
/* body NULL: GET. Text is copied. NULL: no memory. */
struct load_request *load_request_start(struct event_base *base, const struct load_url *url, const char *key,
                                        const char *path, const char *body, double timeout_s,
                                        const struct load_handler *handler);
void load_request_cancel(struct load_request **request); /* without on_end */
int load_url_parse(const char *text, size_t n, struct load_url *ret_url, struct shm_error *err);
/* One request to its end: ret_text (of the answer or body, to be freed), and usage's prompt tokens. */
int load_ask(const struct load_url *url, const struct load_options *o, const char *path, const char *body,
             char **ret_text, uint64_t *ret_prompt_tokens, struct shm_error *err);

/* ---- bench_load_text.c */

uint64_t load_random(uint64_t *state);
double load_uniform(uint64_t *state);              /* above 0, to 1 */
char *load_words(uint64_t *state, unsigned words); /* to be freed; NULL: no memory */
unsigned load_word_count(const struct load_options *o, unsigned tokens, bool whole_prompt);
/* The body of a request; messages is borrowed. To be freed. */
char *load_body(const struct load_options *o, const struct load_server *server, json_t *messages,
                unsigned max_tokens);
/* Asks each server for its model, and the first one what a word costs. */
int load_calibrate(struct load_options *o, struct shm_error *err);

/* ---- bench_load_run.c: one load on one server */

int load_run(const struct load_options *o, const struct load_server *server, const struct load_point *point,
             unsigned round, struct load_run *ret_run, struct shm_error *err);
unsigned load_count(const struct load_options *o, const struct load_point *point);

/* ---- bench_load_print.c */

/* runs: [point][server][round] */
void load_print_table(const struct load_options *o, const struct load_run *runs);
void load_print_json(const struct load_options *o, const struct load_run *runs);
void load_point_name(const struct load_point *point, char *name, size_t room);

/* The command. */
int bench_load_main(int argc, char **argv);

#endif
