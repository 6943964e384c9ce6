/* SPDX-License-Identifier: MIT */
/*
 * inferd logits: one read, or with --reads one after the other in the same
 * process, each with settings of its own (for tests: a process on a GPU takes
 * most of a second to start).
 */
#include "inferd/inf_cmd.h"
#include "inferd/inf_logits.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GROUPS     (INF_GROUP_ENGINE | INF_GROUP_PROMPT | INF_GROUP_LOGITS | INF_GROUP_REPORT)
#define LINE_WORDS 64
#define AGAIN_MS   10000 /* for the next expertd after one ended */

static const char doc[] = "Prints logits, routing and greedy continuation of a prompt as JSON, for tests.";

static void parse(int argc, char **argv, struct inf_options *ret_options)
{
    inf_options_parse(argc, argv, GROUPS, doc, ret_options);
    if (!ret_options->n_given)
        ret_options->n = 0;
    ret_options->json = true;
}

static bool equal(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* What a line may not change: the process has it already. */
static int check_line(const struct inf_options *base, const struct inf_options *line, struct shm_error *err)
{
    const struct inf_engine_config *a = &base->engine, *b = &line->engine;
    if (!equal(a->store.instance, b->store.instance) || !equal(a->store.runtime_dir, b->store.runtime_dir) ||
        !equal(base->model, line->model) || a->device != b->device || a->gpu != b->gpu ||
        a->threads != b->threads || a->ctx != b->ctx || a->store.resident != b->store.resident ||
        a->store.poison != b->store.poison || a->store.watchdog_ns != b->store.watchdog_ns || line->reads ||
        line->prompt_stdin)
        return shm_error_set(
            err, EINVAL,
            "--reads: a line may set the prompt, what is printed, --chunk and the stream, nothing else");
    return 0;
}

static void print_error(const struct shm_error *err, int rc)
{
    json_t *j = json_pack("{s:s}", "error", err->code ? shm_error_text(err) : strerror(-rc));
    json_dumpf(j, stdout, JSON_COMPACT);
    putchar('\n');
    fflush(stdout);
    json_decref(j);
}

/* One line: the command line's options, then the line's own. */
static int read_line(const struct inf_options *base, int argc, char **argv, char *line, struct inf_engine *e,
                     struct inf_conversation *c, struct shm_error *err)
{
    char *words[LINE_WORDS + 64], *rest = NULL;
    int n = 0;
    for (int i = 0; i < argc && n < 64; i++)
        if (strncmp(argv[i], "--reads", 7) != 0)
            words[n++] = argv[i];
        else if (!argv[i][7])
            i++; /* its file */
    for (char *word = strtok_r(line, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest)) {
        if (n == LINE_WORDS + 63)
            return shm_error_set(err, E2BIG, "--reads: a line of more than %d words", LINE_WORDS);
        words[n++] = word;
    }
    words[n] = NULL;
    struct inf_options o;
    parse(n, words, &o);
    int rc = check_line(base, &o, err);
    if (!rc)
        rc = inf_engine_ensure(e, AGAIN_MS, NULL, err);
    if (!rc)
        rc = inf_engine_configure(e, &o.engine, err);
    if (rc)
        return rc;
    if (!o.keep)
        inf_conversation_truncate(c, 0);
    struct inf_ids ids = {0};
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f)
        return -ENOMEM;
    if (!(rc = inf_cmd_prompt(&o, e, err, &ids)))
        rc = inf_logits_print(&o, e, c, &ids, f, err);
    inf_ids_clear(&ids);
    fclose(f);
    if (!rc && (fwrite(text, 1, bytes, stdout) != bytes || fflush(stdout)))
        rc = shm_error_set(err, EPIPE, "standard output cannot be written");
    free(text);
    return rc;
}

static int read_all(const struct inf_options *base, FILE *f, int argc, char **argv, struct inf_engine *e,
                    struct inf_conversation *c, struct shm_error *err)
{
    char *line = NULL;
    size_t cap = 0;
    int rc = 0;
    while (rc != -EPIPE && rc != -ECANCELED && getline(&line, &cap, f) >= 0) {
        struct shm_error one = {0};
        rc = read_line(base, argc, argv, line, e, c, &one);
        if (rc)
            print_error(&one, rc);
        *err = one;
    }
    free(line);
    return rc == -EPIPE || rc == -ECANCELED ? rc : 0;
}

int inf_cmd_logits(int argc, char **argv)
{
    struct inf_options o;
    struct inf_engine *engine = NULL;
    struct inf_conversation *conversation = NULL;
    struct inf_ids ids = {0};
    struct shm_error err = {0};
    parse(argc, argv, &o);
    inf_cancel_install();
    FILE *reads = !o.reads ? NULL : strcmp(o.reads, "-") == 0 ? stdin : fopen(o.reads, "re");
    if (o.reads && !reads)
        return inf_cmd_fail(
            shm_error_set(&err, errno, "--reads: %s cannot be opened: %s", o.reads, strerror(errno)), &err);
    int status = inf_cmd_open(&o, &engine, reads ? NULL : &ids);
    if (status)
        goto out;
    int rc = inf_conversation_create(engine, &err, &conversation);
    if (!rc)
        rc = reads ? read_all(&o, reads, argc, argv, engine, conversation, &err)
                   : inf_logits_print(&o, engine, conversation, &ids, stdout, &err);
    status = rc ? inf_cmd_fail(rc, &err) : 0;
out:
    inf_conversation_destroy(&conversation);
    inf_engine_close(&engine);
    inf_ids_clear(&ids);
    if (reads && reads != stdin)
        fclose(reads);
    return status;
}
