/* SPDX-License-Identifier: MIT */
#include "inferd/inf_chat.h"
#include "inferd/inf_cmd.h"
#include "inferd/inf_turn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REATTACH_MS 10000u /* for the next expertd to appear */

struct chat {
    struct inf_options o;
    struct inf_engine *engine;
    struct inf_talk talk;
    struct inf_chat *template;
    bool terminal;
};

/* One user message: 0, or an error that ended the turn (it is as if the message had never come). */
static int turn(void *ctx, const char *text, size_t bytes, struct shm_error *err)
{
    struct chat *c = ctx;
    struct inf_chat_message message[2];
    struct inf_ids ids = {0};
    struct inf_turn done = {0};
    struct inf_conversation *conversation = c->talk.conversation;
    size_t n = 0, keep = 0;
    bool again;
    int rc = inf_engine_ensure(c->engine, REATTACH_MS, &again, err);
    if (rc)
        return rc;
    if (again && !c->o.quiet)
        fprintf(stderr,
                "inferd: attached to the next expertd in %.1f ms; the conversation of %u tokens goes on\n",
                (double)c->engine->attach_ns / 1e6, c->talk.conversation->n);
    if (inf_chat_is_new(c->template) && c->o.system)
        message[n++] = (struct inf_chat_message){"system", c->o.system, strlen(c->o.system)};
    message[n++] = (struct inf_chat_message){"user", text, bytes};
    rc = inf_chat_turn(c->template, message, n, conversation->tokens, conversation->n, err, &keep, &ids);
    if (!rc && keep != INF_CHAT_KEEP_ALL) {
        inf_conversation_truncate(conversation, (uint32_t)keep);
        c->talk.pending = -1;
    }
    if (!rc)
        rc = inf_turn_run(&c->talk, ids.ids, ids.n, &done, err);
    inf_ids_clear(&ids);
    if (!rc)
        rc = inf_chat_answered(c->template, done.generated.ids, done.generated.n, conversation->n, err);
    if (rc) {
        if (!c->o.json)
            putchar('\n');
        if (rc == -E2BIG && c->talk.conversation->n)
            fputs("inferd: /clear begins a new conversation\n", stderr);
        return rc;
    }
    if (c->o.json) {
        json_t *j = inf_turn_json(&c->talk, &done);
        json_object_set_new(j, "attached_again", json_boolean(again));
        json_dumpf(j, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
        json_decref(j);
    }
    putchar('\n');
    fflush(stdout);
    if (done.stop == INF_STOP_CANCELLED)
        fprintf(stderr, "inferd: answer cut; the conversation goes on\n");
    else if (done.stop == INF_STOP_CONTEXT)
        fprintf(stderr, "inferd: the context of %u tokens is full: /clear begins a new conversation\n",
                c->engine->ctx);
    if (c->o.verbose && !c->o.json)
        inf_turn_report(&c->talk, &done, stderr);
    inf_turn_clear(&done);
    return 0;
}

static void clear(void *ctx)
{
    struct chat *c = ctx;
    inf_conversation_truncate(c->talk.conversation, 0);
    inf_chat_forget(c->template);
    c->talk.pending = -1;
    inf_sampler_reset(c->talk.sampler, c->o.sampler.seed);
}

static void failed(void *ctx, json_t *turn)
{
    struct chat *c = ctx;
    json_object_set_new(turn, "context_tokens", json_integer(c->talk.conversation->n));
}

int inf_cmd_chat(int argc, char **argv)
{
    struct chat c = {.terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)};
    struct shm_error err = {0};
    inf_options_parse(
        argc, argv, INF_GROUP_ENGINE | INF_GROUP_SAMPLING | INF_GROUP_REPORT | INF_GROUP_REMOTE,
        "A conversation: one line of input a turn. /clear forgets it, /quit ends it, Ctrl-C cuts an "
        "answer short.",
        &c.o);
    if (!c.o.n_given)
        c.o.n = 512;
    inf_cancel_install();
    if (c.o.url)
        return inf_cmd_remote(&c.o);
    int status = inf_cmd_open(&c.o, &c.engine, NULL);
    if (status)
        return status;
    int rc = inf_chat_create(c.engine->tokenizer, c.engine->chat_template, c.engine->chat_template_bytes,
                             c.o.chat_template, c.o.thinking, &err, &c.template);
    if (!rc)
        rc = inf_talk_open(c.engine, &c.o, &err, &c.talk);
    if (!rc && c.terminal)
        fprintf(stderr, "%s, attached in %.1f ms. /quit ends, Ctrl-C cuts an answer short.\n",
                c.engine->model->hparams.name, (double)c.engine->attach_ns / 1e6);
    if (!rc && c.terminal && c.engine->device->note[0])
        fprintf(stderr, "Computing on the host: %s\n", c.engine->device->note);
    const struct inf_lines lines = {
        .ctx = &c, .terminal = c.terminal, .json = c.o.json, .turn = turn, .clear = clear, .failed = failed};
    status = rc ? inf_cmd_fail(rc, &err) : inf_cmd_lines(&lines);
    inf_talk_close(&c.talk);
    inf_chat_destroy(&c.template);
    inf_engine_close(&c.engine);
    return status;
}
