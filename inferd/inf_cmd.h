/* SPDX-License-Identifier: MIT */
/*
 * Commands of inferd. Each takes argc and argv from its own name on and
 * returns the exit status: 0; 1 an error (one line on stderr); 130 cancelled.
 */
#ifndef INF_CMD_H
#define INF_CMD_H

#include "inferd/inf_options.h"

#include <jansson.h>

int inf_cmd_run(int argc, char **argv);
int inf_cmd_chat(int argc, char **argv);
int inf_cmd_remote(const struct inf_options *options); /* chat --url */
int inf_cmd_serve(int argc, char **argv);              /* serve/srv_main.c */
int inf_cmd_logits(int argc, char **argv);
int inf_cmd_tokenize(int argc, char **argv);
int inf_cmd_measure(int argc, char **argv);

/* Set by SIGINT and SIGTERM; a second signal while it is set ends the process. */
extern _Atomic bool inf_cancel;
/* Set by SIGTERM: a chat ends, too, once its answer is cut. */
extern _Atomic bool inf_terminate;
void inf_cancel_install(void);

/* What --model says: options name the instance then. Nothing is started where the device is wrong. */
int inf_cmd_launch(struct inf_options *options, struct shm_error *err);

/* --model, then the engine. The prompt (NULL: not wanted), as by inf_cmd_prompt(), is read before, for what
 * is wrong with it must start no expertd. Prints the line on errors and returns the exit status. */
int inf_cmd_open(struct inf_options *options, struct inf_engine **ret_engine, struct inf_ids *ret_prompt);

/* A conversation, here or at a server. */
struct inf_lines {
    void *ctx;
    bool terminal; /* somebody types */
    bool json;     /* each turn prints an object, one that failed, too */
    /* A message. 0 or a negative errno: it is as if the message had never come; -EUCLEAN ends it all. */
    int (*turn)(void *ctx, const char *text, size_t bytes, struct shm_error *err);
    void (*clear)(void *ctx);                /* forgets what was said */
    void (*failed)(void *ctx, json_t *turn); /* adds to the object of a turn that failed; NULL: nothing */
};

/* Turn by turn until the input's end, /quit or SIGTERM; the exit status. */
int inf_cmd_lines(const struct inf_lines *lines);

/* "inferd: line" on stderr; the exit status for rc. */
int inf_cmd_fail(int rc, const struct shm_error *err);

/* Prompt of the options as ids: text or --ids, by the chat template unless
 * --raw (or where the model has none). */
int inf_cmd_prompt(const struct inf_options *options, struct inf_engine *engine, struct shm_error *err,
                   struct inf_ids *ret_ids);

#endif
