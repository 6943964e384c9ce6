/* SPDX-License-Identifier: MIT */
/*
 * Inside of the answer parser: the machine that cuts the text
 * (inf_parser.c) and the reader of tool calls (inf_parser_calls.c).
 */
#ifndef INF_PARSER_PRIV_H
#define INF_PARSER_PRIV_H

#include "inferd/inf_template_priv.h"

struct inf_parser {
    enum inf_style style;
    enum inf_state {
        INF_STATE_START,  /* reasoning may begin here */
        INF_STATE_REASON, /* until </think> */
        INF_STATE_CONTENT,
        INF_STATE_CALL,   /* until the mark that ends a call, or the answer's end */
        INF_STATE_HEADER, /* harmony: until <|message|> */
        INF_STATE_BODY,   /* harmony: until <|end|> and the like */
    } state;
    bool fresh;             /* line breaks that come next are dropped */
    enum inf_part part;     /* harmony: of the body */
    struct shm_text name;   /* harmony: the function that the body calls; n 0: none */
    struct shm_text buf;    /* what was not given out yet */
    size_t opening;         /* of a call: its mark and the white space before it, at the start of buf */
    size_t scanned;         /* bytes of buf in which a call's end was looked for */
    const char *call_start; /* NULL: calls are not looked for */
    const char *call_end;   /* NULL: the answer's end */
    json_t *tools;          /* array or NULL */
    struct inf_parse_events events;
};

/* Gives out the calls of a body, what stands between the marks. 1: done; 0: it
 * is no call, nothing was given out; or a negative errno. */
int inf_parse_calls(struct inf_parser *p, struct inf_slice body);

/* One call with its arguments as JSON text. Results as above. */
int inf_parse_call(struct inf_parser *p, struct inf_slice name, struct inf_slice arguments);

#endif
