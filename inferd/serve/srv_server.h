/* SPDX-License-Identifier: MIT */
/*
 * Server: routes requests, checks keys and origins, and turns a request into a
 * job and the job's events into a response. Everything here runs in the thread
 * of the event loop.
 */
#ifndef SRV_SERVER_H
#define SRV_SERVER_H

#include "inferd/serve/srv_engine.h"
#include "inferd/serve/srv_http.h"
#include "inferd/serve/srv_request.h"
#include "shm/shm_text.h"

struct srv_server {
    struct event_base *base;
    struct srv_http *http;
    struct srv_queue *queue;
    struct srv_engine *engine;
    struct srv_stats *stats;
    const struct inf_serve_options *options;
    const struct inf_options *defaults; /* sampling */
    char **keys;
    unsigned n_keys;
    const struct inf_template *chat; /* NULL: none; chat_error says why */
    struct shm_error chat_error;
    bool informed, draining;
    uint64_t start_ns;
    int64_t created;
    struct srv_answer *answers; /* under way */
};

struct srv_answer;

/* How an API writes. Every function may find the client gone (answer->x NULL). */
struct srv_format {
    void (*part)(struct srv_answer *a, enum inf_part part, const char *text, size_t n);
    void (*call)(struct srv_answer *a, const struct inf_tool_call *call);
    void (*tokens)(struct srv_answer *a); /* log-probabilities are left that no text carried */
    void (*end)(struct srv_answer *a, const struct srv_result *result);
    void (*fail)(struct srv_answer *a, const struct srv_refusal *refusal); /* in the middle of a stream */
};

/* One request on its way. */
struct srv_answer {
    struct srv_server *server;
    struct srv_answer *next, **at;
    uint64_t written_ns; /* of the last event */
    struct srv_exchange *x;
    struct srv_job *job;
    const struct srv_format *format;
    enum srv_api api;
    bool stream, include_usage, begun, dead, one_call;
    char id[64];
    int64_t created;
    struct inf_parser *parser; /* chat only */
    unsigned n_calls;
    struct shm_text content, reasoning; /* not streamed */
    json_t *calls;                      /* likewise */
    json_t *logprobs;                   /* not shown yet */
    uint32_t text_offset;               /* completions */
    char *stops[SRV_STOPS_MAX];         /* the job's, borrowed */
    int block;                          /* Anthropic: kind of the open block, -1: none */
    unsigned n_blocks;
};

extern const struct srv_format srv_format_openai, srv_format_anthropic;

/* Sends an object as an event (name NULL: without one); takes it. Begins the stream if need be. */
void srv_answer_event(struct srv_answer *a, const char *name, json_t *object);
void srv_answer_data(struct srv_answer *a, const char *text);
/* The whole response; takes the object. The answer's exchange has ended. */
void srv_answer_reply(struct srv_answer *a, int status, json_t *object);
void srv_answer_end_stream(struct srv_answer *a);

/* Starts on a checked request; takes what it needs of it. Answers by itself if that fails. */
void srv_answer_start(struct srv_server *s, struct srv_exchange *x, struct srv_request *r);

/* Every few seconds: streams in which nothing happened for a while (a long prompt is read) get a comment, so
 * that nobody in between takes them for dead. */
#define SRV_BEAT_S 5
void srv_answers_beat(struct srv_server *s);

/* Prompt's ids of a request, and the parser's needs; -EINVAL with the refusal filled. */
int srv_prompt_ids(struct srv_server *s, struct srv_request *r, struct inf_ids *ret_ids,
                   struct inf_template_text *ret_text, struct srv_refusal *refusal);

/* The grammar of a call to one of the tools (in OpenAI's form), or to the one named. -ENOTSUP: not with this
 * template, or a keyword of a schema; -EINVAL: no such tool. */
int srv_tools_grammar(const struct inf_template *t, const json_t *tools, const char *only,
                      struct shm_error *err, struct srv_grammar **ret_grammar);

/* Replies with an error in the format of the request's API. */
void srv_reply_refusal(struct srv_server *s, struct srv_exchange *x, const struct srv_refusal *refusal);
bool srv_is_anthropic(const struct srv_exchange *x);
json_t *srv_refusal_json(const struct srv_refusal *refusal, bool anthropic);

/* Replies with an object; takes it. */
void srv_reply_json(struct srv_server *s, struct srv_exchange *x, int status, json_t *object);

const char *srv_model_name(const struct srv_server *s);

/* Handlers of srv_http_config. */
bool srv_on_head(void *ctx, struct srv_exchange *x);
void srv_on_request(void *ctx, struct srv_exchange *x);
void srv_on_refuse(void *ctx, struct srv_exchange *x, int status, const char *why);

void srv_on_done(void *ctx, const struct srv_exchange *x, int status, bool left); /* --verbose */

/* 503 while requests can't be answered. */
int srv_ready(struct srv_server *s, struct srv_refusal *refusal);

/* srv_status.c */
json_t *srv_status_json(struct srv_server *s);
void srv_status_count(struct srv_server *s); /* what others than the queue and srv_stats know */
char *srv_metrics_text(struct srv_server *s, size_t *ret_bytes); /* free() */

/* Reads a file of keys, one a line; '#' begins a comment. */
int srv_keys_read(const char *path, char ***ret_keys, unsigned *ret_n, struct shm_error *err);
void srv_keys_free(char ***keys, unsigned n);

/* "ADDRESS:PORT", "[ADDRESS]:PORT" or "PORT": a listening socket; or the one handed over (inherited) by
 * systemd or by the life before (LISTEN_FDS). */
int srv_listen(const char *where, char ret_name[static 128], bool *ret_public, bool *ret_inherited,
               int *ret_fd, struct shm_error *err);

/* srv_life.c: the program executed anew in this process, with the listening socket handed over. */
struct srv_life {
    char path[4096]; /* of the program, as it was started */
    char **argv;     /* to execute it with; the words are the program's own */
    int listen_fd;   /* a second descriptor of the listening socket; -1: not kept. Owned */
};
/* Without a socket yet. At the start, before anybody replaces the program's file and before options are
 * parsed, which may put them in another order; argv as inf_cmd_serve gets it. 0 or a negative errno. */
int srv_life_note(struct srv_life *life, int argc, char **argv);
void srv_life_clear(struct srv_life *life);
/* Why it could not be executed now; 0 when it could. */
int srv_life_check(const struct srv_life *life, struct shm_error *err);
/* Does not return, unless it fails. Every other descriptor above 2 is closed by it. */
int srv_life_again(const struct srv_life *life, struct shm_error *err);

#endif
