/* SPDX-License-Identifier: MIT */
/* The lines of a conversation at the terminal. */
#include "inferd/inf_cmd.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A line of input without its end; -1 at the end of input. */
static ssize_t ask(const struct inf_lines *l, char **line, size_t *cap)
{
    for (;;) {
        atomic_store(&inf_cancel, false);
        if (l->terminal) {
            fputs("> ", stdout);
            fflush(stdout);
        }
        clearerr(stdin);
        ssize_t n = atomic_load(&inf_terminate) ? -1 : getline(line, cap, stdin);
        if (atomic_load(&inf_terminate))
            return -1;
        if (n < 0 && atomic_load(&inf_cancel) && !feof(stdin)) {
            if (!l->terminal)
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
static void print_failure(const struct inf_lines *l, int rc, const struct shm_error *err)
{
    json_t *text = json_string(err->code ? shm_error_text(err) : strerror(-rc)); /* NULL: not UTF-8 */
    json_t *j = json_pack("{s:o}", "error", text ? text : json_string("failed: see standard error"));
    if (l->failed)
        l->failed(l->ctx, j);
    json_dumpf(j, stdout, JSON_COMPACT);
    json_decref(j);
    putchar('\n');
    fflush(stdout);
}

int inf_cmd_lines(const struct inf_lines *l)
{
    char *line = NULL;
    size_t cap = 0;
    int status = 0;
    for (ssize_t n; (n = ask(l, &line, &cap)) >= 0;) {
        struct shm_error err = {0};
        if (n == 0)
            continue;
        if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0)
            break;
        if (strcmp(line, "/clear") == 0) {
            l->clear(l->ctx);
            continue;
        }
        if (line[0] == '/') {
            fputs("/clear forgets the conversation, /quit ends it; Ctrl-C cuts an answer\n", stderr);
            continue;
        }
        int rc = l->turn(l->ctx, line, (size_t)n, &err);
        status = rc ? inf_cmd_fail(rc, &err) : 0;
        if (rc && l->json)
            print_failure(l, rc, &err);
        if (rc == -EUCLEAN || ferror(stdout))
            break;
    }
    free(line);
    if (atomic_load(&inf_terminate))
        return 128 + SIGTERM;
    return status == 130 ? 0 : status; /* cancelling a turn is no failure */
}
