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

int inf_cmd_launch(struct inf_options *o, struct shm_error *err)
{
    static char instance[PRT_INSTANCE_MAX + 1]; /* the config borrows it */
    struct inf_store_config *s = &o->engine.store;
    if (!o->model)
        return 0;
    int rc = inf_engine_check(&o->engine, err);
    if (!rc)
        rc = inf_launch(s->runtime_dir, s->instance, o->model, o->quiet || o->json, s->cancel, instance, err);
    if (!rc)
        s->instance = instance;
    return rc;
}

/* The prompt as it is given: ids at once, or a text for encode(). */
static int take(const struct inf_options *o, struct shm_error *err, char **ret_text, size_t *ret_bytes,
                struct inf_ids *ret_ids)
{
    return o->ids ? inf_options_ids(o->ids, ret_ids, err) : inf_options_prompt(o, ret_text, ret_bytes, err);
}

static int encode(const struct inf_options *o, struct inf_engine *e, const char *text, size_t bytes,
                  struct shm_error *err, struct inf_ids *ret_ids)
{
    if (!text)
        return 0;
    if (o->raw)
        return inf_tokenizer_encode(e->tokenizer, text, bytes, INF_ENCODE_SPECIAL | INF_ENCODE_BOS, err,
                                    ret_ids);
    struct inf_chat *chat = NULL;
    int rc = inf_chat_create(e->tokenizer, e->chat_template, e->chat_template_bytes, o->chat_template,
                             o->thinking, err, &chat);
    if (rc)
        return rc;
    struct inf_chat_message message[2];
    size_t n = 0, keep;
    if (o->system)
        message[n++] = (struct inf_chat_message){"system", o->system, strlen(o->system)};
    message[n++] = (struct inf_chat_message){"user", text, bytes};
    rc = inf_chat_turn(chat, message, n, NULL, 0, err, &keep, ret_ids);
    inf_chat_destroy(&chat);
    return rc;
}

int inf_cmd_prompt(const struct inf_options *o, struct inf_engine *e, struct shm_error *err,
                   struct inf_ids *ret_ids)
{
    char *text = NULL;
    size_t bytes = 0;
    int rc = take(o, err, &text, &bytes, ret_ids);
    if (!rc)
        rc = encode(o, e, text, bytes, err, ret_ids);
    free(text);
    return rc;
}

int inf_cmd_open(struct inf_options *o, struct inf_engine **ret_engine, struct inf_ids *ret_prompt)
{
    struct shm_error err = {0};
    char *text = NULL;
    size_t bytes = 0;
    o->engine.store.cancel = &inf_cancel;
    int rc = ret_prompt ? take(o, &err, &text, &bytes, ret_prompt) : 0;
    if (!rc)
        rc = inf_cmd_launch(o, &err);
    if (!rc)
        rc = inf_engine_open(&o->engine, &err, ret_engine);
    if (!rc && ret_prompt && (rc = encode(o, *ret_engine, text, bytes, &err, ret_prompt)))
        inf_engine_close(ret_engine);
    free(text);
    if (rc && ret_prompt)
        inf_ids_clear(ret_prompt);
    return rc ? inf_cmd_fail(rc, &err) : 0;
}
