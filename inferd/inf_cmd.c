/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cmd.h"

#include "inferd/inf_chat.h"
#include "inferd/inf_launch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Atomic bool inf_cancel, inf_terminate;

static void on_signal(int sig)
{
    if (sig == SIGTERM)
        atomic_store(&inf_terminate, true);
    if (atomic_exchange(&inf_cancel, true))
        _exit(130); /* asked twice */
}

void inf_cancel_install(void)
{
    /* No SA_RESTART: a read from the terminal ends too. */
    struct sigaction sa = {.sa_handler = on_signal};
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error with a name, not a death */
}

int inf_cmd_fail(int rc, const struct shm_error *err)
{
    if (err->code)
        fprintf(stderr, "inferd: %s\n", shm_error_text(err));
    else
        fprintf(stderr, "inferd: %s%s\n", strerror(-rc), shm_error_remedy(rc));
    return rc == -ECANCELED ? 130 : 1;
}

int inf_cmd_open(struct inf_options *o, struct inf_engine **ret_engine)
{
    static char instance[PRT_INSTANCE_MAX + 1]; /* the config borrows it */
    struct shm_error err = {0};
    int rc = 0;
    o->engine.store.cancel = &inf_cancel;
    if (o->model) {
        rc = inf_launch(o->engine.store.runtime_dir, o->engine.store.instance, o->model, o->quiet || o->json,
                        &inf_cancel, instance, &err);
        o->engine.store.instance = instance;
    }
    if (!rc)
        rc = inf_engine_open(&o->engine, &err, ret_engine);
    return rc ? inf_cmd_fail(rc, &err) : 0;
}

int inf_cmd_prompt(const struct inf_options *o, struct inf_engine *e, struct shm_error *err,
                   struct inf_ids *ret_ids)
{
    if (o->ids)
        return inf_options_ids(o->ids, ret_ids, err);
    char *text;
    size_t bytes;
    int rc = inf_options_prompt(o, &text, &bytes, err);
    if (rc)
        return rc;
    if (o->raw) {
        rc = inf_tokenizer_encode(e->tokenizer, text, bytes, INF_ENCODE_SPECIAL | INF_ENCODE_BOS, err,
                                  ret_ids);
        goto out;
    }
    struct inf_chat *chat = NULL;
    rc = inf_chat_create(e->tokenizer, e->chat_template, e->chat_template_bytes, o->chat_template,
                         o->thinking, err, &chat);
    if (rc)
        goto out;
    struct inf_chat_message message[2];
    size_t n = 0, keep;
    if (o->system)
        message[n++] = (struct inf_chat_message){"system", o->system, strlen(o->system)};
    message[n++] = (struct inf_chat_message){"user", text, bytes};
    rc = inf_chat_turn(chat, message, n, NULL, 0, err, &keep, ret_ids);
    inf_chat_destroy(&chat);
out:
    free(text);
    return rc;
}
