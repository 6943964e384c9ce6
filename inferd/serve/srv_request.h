/* SPDX-License-Identifier: MIT */
/*
 * Requests: a body of one of the APIs, checked, as one neutral struct. Each
 * parameter is honoured or refused by name; none is ignored. (Labels that ask
 * for nothing, such as user, are taken and have no effect: the tables say
 * which.) Knows no HTTP and no engine.
 */
#ifndef SRV_REQUEST_H
#define SRV_REQUEST_H

#include "inferd/inf_template.h"
#include "inferd/serve/srv_job.h"

#include <jansson.h>

enum srv_api {
    SRV_API_COMPLETION,
    SRV_API_CHAT,
    SRV_API_MESSAGES,
    SRV_API_COUNT, /* of a message's tokens: no max_tokens */
};

enum srv_tool_choice { SRV_TOOLS_AUTO, SRV_TOOLS_NONE, SRV_TOOLS_REQUIRED, SRV_TOOLS_NAMED };

/* Why a request is refused; each API writes it its own way. */
struct srv_refusal {
    int status;
    const char *type, *code; /* as OpenAI calls them; code may be NULL */
    char param[96];          /* "" if it is about no parameter */
    char message[512];
};

/* Fills *r and returns -EINVAL; param and code may be NULL. */
int srv_refuse(struct srv_refusal *r, int status, const char *code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

struct srv_request {
    enum srv_api api;
    json_t *root;      /* the body; strings below may point into it */
    const char *model; /* NULL: not said */
    bool stream, include_usage;

    const char *prompt; /* completions: text, or ids */
    size_t prompt_bytes;
    struct inf_ids ids;

    struct inf_message *messages; /* chat and messages */
    size_t n_messages;
    char *tools; /* JSON text in OpenAI's form; NULL: none */
    json_t *tool_list;
    enum srv_tool_choice tool_choice;
    const char *tool_name;
    bool strict_tools;
    bool one_call; /* parallel_tool_calls: false */
    enum inf_thinking thinking;
    const char *effort;
    const char *thinking_param; /* which parameter asked for either */

    struct inf_sampler_params sampler;
    bool seeded;
    uint32_t max_tokens; /* 0: not said */
    bool ignore_eos;
    bool logprobs;
    unsigned n_top;
    char *stops[SRV_STOPS_MAX];
    unsigned n_stops;
    struct srv_likely *bias;
    size_t n_bias;
    struct srv_grammar *grammar; /* of response_format; NULL: free text */

    void **owned; /* what the messages point to besides root */
    size_t n_owned;
};

/* Parses body[0..n). defaults: what holds where nothing is said. 0, or -EINVAL with *refusal filled; clear in
 * both cases. */
int srv_request_parse(enum srv_api api, const char *body, size_t n, const struct inf_sampler_params *defaults,
                      struct srv_request *ret_request, struct srv_refusal *refusal);
void srv_request_clear(struct srv_request *r);

/* For the parsers of the APIs. */

/* One parameter: its name, a parser, and what that wants to know. The value is never null. */
struct srv_parameter {
    const char *name;
    int (*parse)(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                 struct srv_refusal *refusal);
    double low, high;
    size_t offset; /* into struct srv_request */
};

extern const struct srv_parameter srv_openai_parameters[], srv_anthropic_parameters[]; /* up to a NULL name */

/* What is left when each parameter was seen: required ones, and what they say together. */
int srv_openai_check(struct srv_request *r, struct srv_refusal *refusal);
int srv_anthropic_check(struct srv_request *r, struct srv_refusal *refusal);

int srv_parse_float(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal);
int srv_parse_uint(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                   struct srv_refusal *refusal);
int srv_parse_bool(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                   struct srv_refusal *refusal);
int srv_parse_stops(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal);
/* For labels: a value of any kind, without effect. */
int srv_parse_label(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal);
int srv_parse_model(struct srv_request *r, const struct srv_parameter *p, const json_t *value,
                    struct srv_refusal *refusal);

/* Memory that lives as long as the request. NULL: none. */
void *srv_request_own(struct srv_request *r, void *memory);

/* Refuses each key of an object that is not in the list; `where` is what the object is called. Nulls count as
 * absent. */
int srv_only_keys(const json_t *object, const char *const *known, const char *param, const char *where,
                  struct srv_refusal *refusal);

/* The text of a list of blocks of type `text` (or a string as it is); other blocks are refused. */
int srv_text_of(struct srv_request *r, const json_t *content, const char *param, const char **ret_text,
                size_t *ret_bytes, struct srv_refusal *refusal);

#endif
