/* SPDX-License-Identifier: MIT */
/* What the server reads: HTTP heads, chunked bodies, request bodies; and stop strings. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/serve/srv_parse.h"
#include "inferd/serve/srv_request.h"
#include "inferd/serve/srv_text.h"

TestSuite(head, .timeout = 10);
TestSuite(chunked, .timeout = 10);
TestSuite(stops, .timeout = 10);
TestSuite(request, .timeout = 10);

static struct srv_head head;
static char head_text[4096];

static int parse_head(const char *text)
{
    const char *why = NULL;
    snprintf(head_text, sizeof head_text, "%s", text);
    int status = srv_head_parse(head_text, strlen(head_text), &head, &why);
    cr_assert(!status || (why && *why));
    return status;
}

Test(head, is_parsed)
{
    cr_assert_eq(parse_head("POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nContent-LENGTH:  12 \r\nX-A: b c\r\n\r\n"),
                 0);
    cr_assert_str_eq(head.method, "POST");
    cr_assert_str_eq(head.path, "/v1/x");
    cr_assert_str_eq(head.query, "a=b");
    cr_assert_eq(head.body_bytes, 12);
    cr_assert(head.keep_alive && !head.chunked && !head.expect_continue);
    cr_assert_str_eq(srv_head_field(&head, "x-a"), "b c");
    cr_assert_null(srv_head_field(&head, "x"));
    cr_assert_eq(parse_head("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"), 0);
    cr_assert(head.keep_alive && head.minor == 0);
    cr_assert_eq(parse_head("GET / HTTP/1.1\r\nHost: h\r\nConnection: foo, close\r\n\r\n"), 0);
    cr_assert(!head.keep_alive);
    cr_assert_eq(
        parse_head(
            "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"),
        0);
    cr_assert(head.chunked && head.expect_continue);
}

Test(head, what_two_servers_could_read_in_two_ways_is_refused)
{
    static const struct {
        const char *text;
        int status;
    } bad[] = {
        {"GET / HTTP/1.1\r\n\r\n", 400},
        {"GET / HTTP/1.1\nHost: h\n\n", 400},
        {"GET / HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nHost: h\r\nA: \x01\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\nHost: h\r\nA: b\nC: d\r\n\r\n", 400},
        {"GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n", 400},
        {"GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400},
        {"G(T / HTTP/1.1\r\nHost: h\r\n\r\n", 400},
        {"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505},
        {"GET /\r\n\r\n", 400},
        {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400},
        {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +1\r\n\r\n", 400},
        {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\n", 400},
        {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999\r\n\r\n", 400},
        {"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
        {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
        {"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501},
        {"POST / HTTP/1.1\r\nHost: h\r\nExpect: wonders\r\n\r\n", 417},
        {"", 400},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_expect_eq(parse_head(bad[i].text), bad[i].status, "%zu: %s", i, bad[i].text);
    strcpy(head_text, "GET / HTTP/1.1\r\nHost: h\r\n");
    for (int i = 0; i < SRV_HEADERS_MAX; i++)
        strcat(head_text, "A: b\r\n");
    strcat(head_text, "\r\n");
    const char *why;
    cr_expect_eq(srv_head_parse(head_text, strlen(head_text), &head, &why), 431);
}

/* Feeds a body in pieces of `step` bytes; the result of the last step. */
static int chunk(const char *in, size_t step, char out[256])
{
    struct srv_chunked c = {0};
    size_t n = strlen(in), at = 0, out_n = 0, used, data_n;
    const char *data;
    while (at < n) {
        size_t take = n - at < step ? n - at : step;
        int rc = srv_chunked_step(&c, in + at, take, &used, &data, &data_n);
        if (rc < 0)
            return rc;
        cr_assert(used <= take && out_n + data_n < 256);
        memcpy(out + out_n, data, data_n);
        out_n += data_n;
        out[out_n] = '\0';
        at += used;
        if (rc)
            return at == n ? 1 : 2;
    }
    return 0;
}

Test(chunked, any_cut_gives_the_same_body)
{
    static const char body[] = "5\r\nhello\r\n1;x=y\r\n,\r\n0A \r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n";
    char out[256];
    for (size_t step = 1; step < sizeof body; step++) {
        out[0] = '\0';
        cr_assert_eq(chunk(body, step, out), 1, "step %zu", step);
        cr_assert_str_eq(out, "hello,0123456789");
    }
    cr_assert_eq(chunk("0\r\n\r\nmore", 1, out), 2);
}

Test(chunked, malformed_ones_are_refused)
{
    static const char *const bad[] = {
        "x\r\n",         "\r\n",     "5\nhello", "5\r\nhelloX\r\n", "1000000000000000\r\n", "-1\r\n",
        "5\r\nhello\rX", "0\r\n\nx", "5 \nx"};
    char out[256];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_expect_eq(chunk(bad[i], 1, out), -1, "%s", bad[i]);
    char endless[20000] = "5;";
    memset(endless + 2, 'x', sizeof endless - 3);
    cr_expect_eq(chunk(endless, 1000, out), -1);
}

/* Text in pieces through the stop strings; what was shown, then the number of the string in brackets. */
static const char *stopped(char *const *stops, unsigned n, const char *const *pieces)
{
    static char shown[256];
    struct srv_text *t = srv_text_new(stops, n);
    const char *out;
    size_t out_n, at = 0;
    int rc = -1;
    for (; *pieces && rc < 0; pieces++) {
        rc = srv_text_push(t, *pieces, strlen(*pieces), &out, &out_n);
        memcpy(shown + at, out, out_n);
        at += out_n;
        shown[at++] = '|';
    }
    if (rc < 0) {
        srv_text_flush(t, &out, &out_n);
        if (out_n)
            memcpy(shown + at, out, out_n);
        at += out_n;
    }
    sprintf(shown + at, "[%d]", rc);
    srv_text_free(&t);
    return shown;
}

Test(stops, across_borders)
{
    static char *const stops[] = {(char *)"STOP", (char *)"\n\n", (char *)"STOPPED"};
    cr_expect_str_eq(stopped(stops, 3, (const char *const[]){"a ST", "OP b", NULL}), "a ||[0]");
    cr_expect_str_eq(stopped(stops, 3, (const char *const[]){"a ST", "AR", "T", NULL}), "a |STAR|T|[-1]");
    cr_expect_str_eq(stopped(stops, 3, (const char *const[]){"a\n", "\nb", NULL}), "a||[1]");
    cr_expect_str_eq(stopped(stops, 3, (const char *const[]){"xSTOPPED", NULL}), "x|[2]");
    cr_expect_str_eq(stopped(stops, 3, (const char *const[]){"x", "S", "S", "T", "O", "P", NULL}),
                     "x||S||||[0]");
    cr_expect_str_eq(stopped(stops, 3, (const char *const[]){"end\n", NULL}), "end|\n[-1]");
    cr_expect_str_eq(stopped(stops, 0, (const char *const[]){"a", "", "b", NULL}), "a||b|[-1]");
    char *const snow[] = {(char *)"\xE2\x98\x83!"};
    cr_expect_str_eq(stopped(snow, 1, (const char *const[]){"a\xE2\x98\x83", "?\xE2\x98\x83", "!", NULL}),
                     "a|\xE2\x98\x83?||[0]");
}

static struct srv_request request;
static struct srv_refusal refusal;

static int parse(enum srv_api api, const char *body)
{
    struct inf_sampler_params defaults;
    inf_sampler_params_default(&defaults);
    srv_request_clear(&request);
    refusal = (struct srv_refusal){0};
    int rc = srv_request_parse(api, body, strlen(body), &defaults, &request, &refusal);
    cr_assert_eq(!rc, !refusal.status, "%s: %s", body, refusal.message);
    cr_assert(!rc || refusal.message[0]);
    return rc ? refusal.status : 0;
}

#define CHAT(rest) parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" rest "}")
#define MESSAGE(rest)                                                                                        \
    parse(SRV_API_MESSAGES,                                                                                  \
          "{\"max_tokens\":5,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" rest "}")

Test(request, parameters_arrive)
{
    cr_assert_eq(
        CHAT(",\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,\"min_p\":0.125,\"max_completion_tokens\":9,"
             "\"seed\":42,\"stop\":[\"a\",\"b\"],\"presence_penalty\":1,\"frequency_penalty\":-1,"
             "\"repeat_penalty\":1.5,\"logit_bias\":{\"5\":-100,\"6\":2.5},\"logprobs\":true,\"top_"
             "logprobs\":3,"
             "\"stream\":true,\"stream_options\":{\"include_usage\":true},\"n\":1,\"user\":\"me\",\"suffix\":"
             "null,"
             "\"ignore_eos\":true,\"model\":\"m\""),
        0);
    cr_expect_eq(request.sampler.temperature, 0.5f);
    cr_expect_eq(request.sampler.top_p, 0.25f);
    cr_expect_eq(request.sampler.top_k, 7);
    cr_expect_eq(request.sampler.min_p, 0.125f);
    cr_expect_eq(request.max_tokens, 9);
    cr_expect_eq(request.sampler.seed, 42);
    cr_expect_eq(request.n_stops, 2);
    cr_expect_str_eq(request.stops[1], "b");
    cr_expect_eq(request.sampler.presence_penalty, 1);
    cr_expect_eq(request.sampler.frequency_penalty, -1);
    cr_expect_eq(request.sampler.repeat_penalty, 1.5f);
    cr_expect_eq(request.n_bias, 2);
    cr_expect(isinf(request.bias[0].logprob) && request.bias[0].logprob < 0 && request.bias[0].id == 5);
    cr_expect_eq(request.bias[1].logprob, 2.5f);
    cr_expect(request.logprobs && request.n_top == 3 && request.stream && request.include_usage &&
              request.ignore_eos);
    cr_expect_str_eq(request.model, "m");
    cr_assert_eq(CHAT(""), 0);
    cr_expect_eq(request.sampler.temperature, 0.7f);
    cr_expect(!request.stream && !request.max_tokens && !request.logprobs);
    uint64_t seed = request.sampler.seed;
    cr_assert_eq(CHAT(""), 0);
    cr_expect_neq(request.sampler.seed, seed);
    srv_request_clear(&request);
}

/* The parameter that the refusal names. */
static void refuses(int status, const char *param)
{
    cr_expect_eq(status, 400, "%s was taken", param);
    cr_expect(strstr(refusal.param, param) || strstr(refusal.message, param), "'%s' is not in: %s / %s",
              param, refusal.param, refusal.message);
}

Test(request, what_cannot_be_honoured_is_refused_by_name)
{
    refuses(CHAT(",\"n\":2"), "n");
    refuses(CHAT(",\"frobnicate\":1"), "frobnicate");
    refuses(CHAT(",\"temperature\":3"), "temperature");
    refuses(CHAT(",\"temperature\":\"hot\""), "temperature");
    refuses(CHAT(",\"top_p\":1.5"), "top_p");
    refuses(CHAT(",\"top_k\":-2"), "top_k");
    refuses(CHAT(",\"max_tokens\":0"), "max_tokens");
    refuses(CHAT(",\"max_tokens\":1.5"), "max_tokens");
    refuses(CHAT(",\"seed\":\"x\""), "seed");
    refuses(CHAT(",\"stop\":\"\""), "stop");
    refuses(CHAT(",\"stop\":[1]"), "stop");
    refuses(CHAT(",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\","
                 "\"e\",\"f\",\"g\","
                 "\"h\"]"),
            "stop");
    refuses(CHAT(",\"top_logprobs\":21,\"logprobs\":true"), "top_logprobs");
    refuses(CHAT(",\"top_logprobs\":2"), "logprobs");
    refuses(CHAT(",\"logprobs\":3"), "logprobs");
    refuses(CHAT(",\"logit_bias\":{\"x\":1}"), "logit_bias");
    refuses(CHAT(",\"logit_bias\":{\"1\":101}"), "logit_bias");
    refuses(CHAT(",\"stream_options\":{\"include_usage\":true}"), "stream_options");
    refuses(CHAT(",\"stream\":true,\"stream_options\":{\"more\":true}"), "more");
    refuses(CHAT(",\"store\":true"), "store");
    refuses(CHAT(",\"echo\":true"), "echo");
    refuses(CHAT(",\"prompt\":\"x\""), "prompt");
    refuses(CHAT(",\"tool_choice\":\"required\""), "tool_choice");
    refuses(CHAT(",\"tools\":[{\"type\":\"web\"}]"), "tools");
    refuses(CHAT(",\"response_format\":{\"type\":\"xml\"}"), "response_format");
    refuses(
        CHAT(
            ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{\"type\":\"string\","
            "\"pattern\":\"a\"}}}"),
        "pattern");
    refuses(CHAT(",\"reasoning_effort\":\"huge\""), "reasoning_effort");
    refuses(CHAT(",\"chat_template_kwargs\":{\"x\":1}"), "enable_thinking");
    refuses(parse(SRV_API_CHAT, "{}"), "messages");
    refuses(parse(SRV_API_CHAT, "{\"messages\":[]}"), "messages");
    refuses(parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"king\",\"content\":\"\"}]}"), "role");
    refuses(parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\"}]}"), "content");
    refuses(parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"mood\":1}]}"), "mood");
    refuses(
        parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}"),
        "image_url");
    refuses(parse(SRV_API_COMPLETION, "{\"prompt\":[\"a\",\"b\"]}"), "prompt");
    refuses(parse(SRV_API_COMPLETION, "{\"prompt\":\"a\",\"best_of\":2}"), "best_of");
    refuses(parse(SRV_API_COMPLETION, "{\"prompt\":\"a\",\"suffix\":\"b\"}"), "suffix");
    refuses(parse(SRV_API_COMPLETION, "{\"prompt\":\"a\",\"logprobs\":6}"), "logprobs");
    refuses(MESSAGE(",\"seed\":1"), "seed");
    refuses(MESSAGE(",\"temperature\":1.5"), "temperature");
    refuses(MESSAGE(",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}"), "thinking");
    refuses(MESSAGE(",\"tools\":[{\"type\":\"bash_20250124\",\"name\":\"bash\"}]"), "tools");
    refuses(parse(SRV_API_MESSAGES, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}"), "max_tokens");
    refuses(
        parse(SRV_API_MESSAGES, "{\"max_tokens\":1,\"messages\":[{\"role\":\"system\",\"content\":\"hi\"}]}"),
        "role");
    refuses(CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true}}]"),
            "strict");
    cr_expect_eq(CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true}}],"
                      "\"tool_choice\":\"required\""),
                 0);
    refuses(CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"color\":1}}]"), "color");
    refuses(parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"name\":\"me\"}]}"),
            "name");
    refuses(parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":"
                                "\"x\",\"bold\":true}]}]}"),
            "bold");
    refuses(MESSAGE(",\"tools\":[{\"name\":\"f\",\"input_schema\":{},\"defer\":true}]"), "defer");
    cr_expect_eq(parse(SRV_API_CHAT, "[]"), 400);
    cr_expect_eq(parse(SRV_API_CHAT, "{\"a\":1,\"a\":1}"), 400);
    cr_expect_eq(parse(SRV_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"\xFF\"}]}"), 400);
    srv_request_clear(&request);
}

Test(request, blocks_become_messages)
{
    cr_assert_eq(
        parse(SRV_API_MESSAGES,
              "{\"max_tokens\":5,\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\","
              "\"content\":[{\"type\":\"text\",\"text\":\"let me "
              "\"},{\"type\":\"text\",\"text\":\"see\"},{\"type\":"
              "\"tool_use\",\"id\":\"t1\",\"name\":\"f\",\"input\":{\"a\":[1,\"x\"]}}]},{\"role\":\"user\","
              "\"content\":"
              "[{\"type\":\"tool_result\",\"tool_use_id\":\"t1\",\"content\":[{\"type\":\"text\",\"text\":"
              "\"42\"}]},"
              "{\"type\":\"text\",\"text\":\"and?\"}]}],\"system\":[{\"type\":\"text\",\"text\":\"be\"}],"
              "\"tools\":[{\"name\":\"f\",\"description\":\"d\",\"input_schema\":{\"type\":\"object\"}}]}"),
        0, "%s", refusal.message);
    cr_assert_eq(request.n_messages, 5);
    static const char *const roles[] = {"system", "user", "assistant", "tool", "user"};
    static const char *const contents[] = {"be", "q", "let me see", "42", "and?"};
    for (size_t i = 0; i < 5; i++) {
        cr_expect_str_eq(request.messages[i].role, roles[i]);
        cr_expect_eq(request.messages[i].content_bytes, strlen(contents[i]));
        cr_expect_str_eq(request.messages[i].content, contents[i]);
    }
    cr_assert_eq(request.messages[2].n_calls, 1);
    cr_expect_str_eq(request.messages[2].calls[0].arguments, "{\"a\":[1,\"x\"]}");
    cr_expect_str_eq(request.messages[3].tool_call_id, "t1");
    char *tools = json_dumps(request.tool_list, JSON_COMPACT);
    cr_expect_str_eq(
        tools, "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"d\",\"parameters\":{"
               "\"type\":\"object\"}}}]");
    free(tools);
    cr_assert_eq(parse(SRV_API_COMPLETION, "{\"prompt\":[1,2,3]}"), 0);
    cr_expect_eq(request.ids.n, 3);
    cr_assert_eq(parse(SRV_API_COMPLETION, "{\"prompt\":[\"a b\"]}"), 0);
    cr_expect_eq(request.prompt_bytes, 3);
    srv_request_clear(&request);
}
