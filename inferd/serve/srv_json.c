/* SPDX-License-Identifier: MIT */
/* The rules of JSON. */
#include "inferd/serve/srv_grammar_priv.h"

#include <string.h>

#define INDENT_MAX 20

int srv_build_text(struct srv_build *b, const char *text, int next)
{
    return srv_build_bytes(b, text, strlen(text), next);
}

/* Nothing, a space, or a line break and some indentation. Bounded, so that a model can't write space for
 * ever. */
static int rule_space(struct srv_build *b)
{
    int end = srv_build_return(b), indent = end;
    for (int i = 0; i < INDENT_MAX; i++)
        indent = srv_build_either(b, srv_build_bytes(b, " ", 1, indent), end);
    return srv_build_either(
        b, end, srv_build_either(b, srv_build_bytes(b, " ", 1, end), srv_build_bytes(b, "\n", 1, indent)));
}

/* One character of a string: well-formed UTF-8 or an escape. Escaped halves of pairs come in pairs. */
static int rule_char(struct srv_build *b)
{
    int end = srv_build_return(b), tail1 = srv_build_class(b, "\x80\xBF", end);
    int tail2 = srv_build_class(b, "\x80\xBF", tail1);
    int all = srv_build_class(b, "  !!#[]\x7F", end);
    all = srv_build_either(b, all, srv_build_class(b, "\xC2\xDF", tail1));
    all = srv_build_either(b, all, srv_build_bytes(b, "\xE0", 1, srv_build_class(b, "\xA0\xBF", tail1)));
    all = srv_build_either(b, all, srv_build_class(b, "\xE1\xEC\xEE\xEF", tail2));
    all = srv_build_either(b, all, srv_build_bytes(b, "\xED", 1, srv_build_class(b, "\x80\x9F", tail1)));
    all = srv_build_either(b, all, srv_build_bytes(b, "\xF0", 1, srv_build_class(b, "\x90\xBF", tail2)));
    all = srv_build_either(b, all, srv_build_class(b, "\xF1\xF3", srv_build_class(b, "\x80\xBF", tail2)));
    all = srv_build_either(b, all, srv_build_bytes(b, "\xF4", 1, srv_build_class(b, "\x80\x8F", tail2)));
    int hex1 = srv_build_class(b, "09afAF", end), hex2 = srv_build_class(b, "09afAF", hex1);
    int hex3 = srv_build_class(b, "09afAF", hex2);
    int low = srv_build_text(b, "\\u", srv_build_class(b, "ddDD", srv_build_class(b, "cfCF", hex2)));
    int high = srv_build_class(b, "89abAB", srv_build_class(b, "09afAF", srv_build_class(b, "09afAF", low)));
    int code = srv_build_class(b, "09acAC", hex3);
    code = srv_build_either(b, code, srv_build_class(b, "eeEEffFF", hex3));
    code = srv_build_either(
        b, code, srv_build_class(b, "ddDD", srv_build_either(b, srv_build_class(b, "07", hex2), high)));
    int escape = srv_build_either(b, srv_build_class(b, "\"\"\\\\//bbffnnrrtt", end),
                                  srv_build_bytes(b, "u", 1, code));
    return srv_build_either(b, all, srv_build_bytes(b, "\\", 1, escape));
}

static int rule_string(struct srv_build *b)
{
    int loop = srv_build_later(b), character = srv_build_json(b, SRV_JSON_CHAR);
    srv_build_set(b, loop,
                  srv_build_either(b, srv_build_bytes(b, "\"", 1, srv_build_return(b)),
                                   srv_build_call(b, character, loop)));
    return srv_build_bytes(b, "\"", 1, loop);
}

/* At least one digit, up to `most`. */
static int digits(struct srv_build *b, int most, int next)
{
    int at = next;
    for (int i = 1; i < most; i++)
        at = srv_build_either(b, srv_build_class(b, "09", at), next);
    return srv_build_class(b, "09", at);
}

static int rule_integer(struct srv_build *b, int next)
{
    int rest = srv_build_either(b, digits(b, 15, next), next);
    int positive = srv_build_either(b, srv_build_bytes(b, "0", 1, next), srv_build_class(b, "19", rest));
    return srv_build_either(b, positive, srv_build_bytes(b, "-", 1, positive));
}

static int rule_number(struct srv_build *b)
{
    int end = srv_build_return(b), exponent = digits(b, 2, end);
    exponent =
        srv_build_class(b, "eeEE", srv_build_either(b, srv_build_class(b, "++--", exponent), exponent));
    int tail = srv_build_either(b, exponent, end);
    int fraction = srv_build_bytes(b, ".", 1, digits(b, 16, tail));
    return rule_integer(b, srv_build_either(b, fraction, tail));
}

int srv_build_space(struct srv_build *b, int next)
{
    return srv_build_call(b, srv_build_json(b, SRV_JSON_SPACE), next);
}

/* KEY: VALUE, ... of one rule. */
int srv_build_map(struct srv_build *b, int value)
{
    int close = srv_build_space(b, srv_build_bytes(b, "}", 1, srv_build_return(b)));
    int loop = srv_build_later(b), pair = srv_build_later(b);
    srv_build_set(b, loop, srv_build_either(b, close, srv_build_bytes(b, ",", 1, srv_build_space(b, pair))));
    int call = srv_build_call(b, value, loop);
    srv_build_set(b, pair,
                  srv_build_call(b, srv_build_json(b, SRV_JSON_STRING),
                                 srv_build_bytes(b, ":", 1, srv_build_space(b, call))));
    return srv_build_bytes(
        b, "{", 1,
        srv_build_either(b, srv_build_bytes(b, "}", 1, srv_build_return(b)), srv_build_space(b, pair)));
}

/* [VALUE, ...], at least `least`, at most `most` (below 0: any number) of them. */
int srv_build_list(struct srv_build *b, int value, int least, int most)
{
    int end = srv_build_bytes(b, "]", 1, srv_build_return(b)), close = srv_build_space(b, end), at;
    if (most < 0) { /* `at`: behind a value that is not one of the first `least` */
        int loop = srv_build_later(b);
        srv_build_set(
            b, loop,
            srv_build_either(b, close,
                             srv_build_bytes(b, ",", 1, srv_build_space(b, srv_build_call(b, value, loop)))));
        at = loop;
        most = least > 1 ? least : 1;
    } else {
        at = close;
    }
    if (most == 0)
        return srv_build_bytes(b, "[", 1, end);
    for (int n = most - 1; n >= 1; n--) { /* behind n values */
        int more = srv_build_bytes(b, ",", 1, srv_build_space(b, srv_build_call(b, value, at)));
        at = n >= least ? srv_build_either(b, close, more) : more;
    }
    int first = srv_build_space(b, srv_build_call(b, value, at));
    return srv_build_bytes(b, "[", 1, least > 0 ? first : srv_build_either(b, end, first));
}

/* Through a JUMP, so that rules may call each other. */
static int make(struct srv_build *b, enum srv_json rule)
{
    switch (rule) {
    case SRV_JSON_SPACE:
        return rule_space(b);
    case SRV_JSON_CHAR:
        return rule_char(b);
    case SRV_JSON_STRING:
        return rule_string(b);
    case SRV_JSON_NUMBER:
        return rule_number(b);
    case SRV_JSON_INTEGER:
        return rule_integer(b, srv_build_return(b));
    case SRV_JSON_OBJECT:
        return srv_build_map(b, srv_build_json(b, SRV_JSON_VALUE));
    case SRV_JSON_ARRAY:
        return srv_build_list(b, srv_build_json(b, SRV_JSON_VALUE), 0, -1);
    default:
        break;
    }
    int end = srv_build_return(b);
    int all = srv_build_call(b, srv_build_json(b, SRV_JSON_STRING), end);
    all = srv_build_either(b, all, srv_build_call(b, srv_build_json(b, SRV_JSON_NUMBER), end));
    all = srv_build_either(b, all, srv_build_call(b, srv_build_json(b, SRV_JSON_OBJECT), end));
    all = srv_build_either(b, all, srv_build_call(b, srv_build_json(b, SRV_JSON_ARRAY), end));
    all = srv_build_either(b, all, srv_build_text(b, "true", end));
    all = srv_build_either(b, all, srv_build_text(b, "false", end));
    return srv_build_either(b, all, srv_build_text(b, "null", end));
}

int srv_build_json(struct srv_build *b, enum srv_json rule)
{
    int *memo = &b->json[rule];
    if (*memo >= 0)
        return *memo;
    int later = srv_build_later(b);
    *memo = later;
    srv_build_set(b, later, make(b, rule));
    return later;
}
