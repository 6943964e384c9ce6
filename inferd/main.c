/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cmd.h"
#include "proto/prt_file.h"
#include "proto/prt_log.h"

#include <stdio.h>
#include <string.h>

#ifdef INF_WITHOUT_SERVE
int inf_cmd_serve(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    fputs("inferd: built without libevent, so there is no server: install libevent-dev and build again\n",
          stderr);
    return 1;
}
#endif

static const struct {
    const char *name, *help;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run", "read a prompt and write an answer", inf_cmd_run},
    {"chat", "a conversation in the terminal", inf_cmd_chat},
    {"serve", "answer requests over HTTP", inf_cmd_serve},
    {"logits", "logits, routing and greedy continuation as JSON, for tests", inf_cmd_logits},
    {"tokenize", "token ids of a text", inf_cmd_tokenize},
    {"measure", "reads as told on standard input, for expert-bench", inf_cmd_measure},
};
#define COMMANDS (sizeof commands / sizeof commands[0])

static void usage(FILE *f)
{
    fputs("Usage: inferd COMMAND [OPTION...]\n\n", f);
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(f, "  %-9s %s\n", commands[i].name, commands[i].help);
    fputs("\n'inferd COMMAND --help' lists a command's options.\n", f);
}

int main(int argc, char **argv)
{
    prt_file_standard();
    prt_log_set_name("inferd");
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    for (size_t i = 0; i < COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            char name[32];
            snprintf(name, sizeof name, "inferd %s", commands[i].name);
            argv[1] = name;
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-?") == 0) {
        usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        puts("inferd " EXPERTD_VERSION);
        return 0;
    }
    fprintf(stderr, "inferd: '%s' is no command: run, chat, serve, logits, tokenize or measure\n", argv[1]);
    return 2;
}
