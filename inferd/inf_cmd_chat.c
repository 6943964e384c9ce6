/* SPDX-License-Identifier: MIT */
#include "inferd/inf_chat.h"
#include "inferd/inf_cmd.h"
#include "inferd/inf_turn.h"

#include <errno.h>
#include <signal.h>
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
static int turn(struct chat *c, const char *text, size_t bytes, struct shm_error *err)
{
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

/* A line of input without its end; -1 at the end of input. */
static ssize_t ask(struct chat *c, char **line, size_t *cap)
{
    for (;;) {
        atomic_store(&inf_cancel, false);
        if (c->terminal) {
            fputs("> ", stdout);
            fflush(stdout);
        }
        clearerr(stdin);
        ssize_t n = atomic_load(&inf_terminate) ? -1 : getline(line, cap, stdin);
        if (atomic_load(&inf_terminate))
            return -1;
        if (n < 0 && atomic_load(&inf_cancel) && !feof(stdin)) {
            if (!c->terminal)
                return -1;
            fputs("\n(/quit ends the conversation)\n", stdout);
            continue;
        }
        while (n > 0 && ((*line)[n - 1] == '\n' || (*line)[n - 1] == '\r'))
            (*line)[--n] = '\0';
        return n;
    }
}

/* Whoever reads one object a turn gets one for a turn that failed, too. */
static void print_failure(const struct chat *c, int rc, const struct shm_error *err)
{
    json_t *text = json_string(err->code ? shm_error_text(err) : strerror(-rc)); /* NULL: not UTF-8 */
    json_t *j = json_pack("{s:o, s:I}", "error", text ? text : json_string("failed: see standard error"),
                          "context_tokens", (json_int_t)c->talk.conversation->n);
    json_dumpf(j, stdout, JSON_COMPACT);
    json_decref(j);
    putchar('\n');
    fflush(stdout);
}

static int talk(struct chat *c)
{
    char *line = NULL;
    size_t cap = 0;
    int status = 0;
    for (ssize_t n; (n = ask(c, &line, &cap)) >= 0;) {
        struct shm_error err = {0};
        if (n == 0)
            continue;
        if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0)
            break;
        if (strcmp(line, "/clear") == 0) {
            inf_conversation_truncate(c->talk.conversation, 0);
            inf_chat_forget(c->template);
            c->talk.pending = -1;
            inf_sampler_reset(c->talk.sampler, c->o.sampler.seed);
            continue;
        }
        if (line[0] == '/') {
            fputs("/clear forgets the conversation, /quit ends it; Ctrl-C cuts an answer\n", stderr);
            continue;
        }
        int rc = turn(c, line, (size_t)n, &err);
        status = rc ? inf_cmd_fail(rc, &err) : 0;
        if (rc && c->o.json)
            print_failure(c, rc, &err);
        if (rc == -EUCLEAN || ferror(stdout))
            break;
    }
    free(line);
    if (atomic_load(&inf_terminate))
        return 128 + SIGTERM;
    return status == 130 ? 0 : status; /* cancelling a turn is no failure */
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
    status = rc ? inf_cmd_fail(rc, &err) : talk(&c);
    inf_talk_close(&c.talk);
    inf_chat_destroy(&c.template);
    inf_engine_close(&c.engine);
    return status;
}
