/* SPDX-License-Identifier: MIT */
/* From a request to the ids of its prompt. */
#include "inferd/serve/srv_grammar.h"
#include "inferd/serve/srv_server.h"

#include <errno.h>
#include <string.h>
#include <time.h>

/* A beginning of a text much longer than the context has more tokens than that holds already: the rest need
 * not be looked at, which would keep everybody else waiting. */
static int check_length(struct srv_server *s, const char *param, const char *text, size_t n,
                        struct srv_refusal *refusal)
{
    const struct srv_info *info = srv_engine_info(s->engine);
    struct inf_ids ids = {0};
    int rc = 0;
    if (n / 16 > info->ctx &&
        inf_tokenizer_encode(info->tokenizer, text, (size_t)info->ctx * 8, 0, NULL, &ids) == 0 &&
        ids.n > info->ctx + 64)
        rc = srv_refuse(
            refusal, 400, "context_length_exceeded", param,
            "the prompt has more than %zu tokens; the context holds %u: shorten the prompt, or start the "
            "server with a greater --ctx",
            ids.n, info->ctx);
    inf_ids_clear(&ids);
    return rc;
}

/* What is asked of the reasoning must be in the template's power. */
static int check_thinking(const struct srv_server *s, const struct srv_request *r,
                          struct srv_refusal *refusal)
{
    static const char *const with_switch[] = {"qwen3", "glm4.5", "glm4.7", "deepseek-v3.1"};
    const char *name = inf_template_name(s->chat), *what = NULL;
    bool has_switch = false;
    for (size_t i = 0; i < sizeof with_switch / sizeof with_switch[0]; i++)
        has_switch = has_switch || strcmp(name, with_switch[i]) == 0;
    if (r->effort && strcmp(name, "gpt-oss") != 0)
        what = "has no levels of reasoning effort";
    else if (r->thinking == INF_THINKING_OFF && inf_template_has_thinking(s->chat) && !has_switch)
        what = "has no switch for reasoning: it cannot be turned off";
    else if (r->thinking == INF_THINKING_ON && !inf_template_has_thinking(s->chat))
        what = "has no reasoning: it cannot be turned on";
    return what ? srv_refuse(refusal, 400, "unsupported_value", r->thinking_param,
                             "the model's chat template (%s) %s", name, what)
                : 0;
}

int srv_prompt_ids(struct srv_server *s, struct srv_request *r, struct inf_ids *ret_ids,
                   struct inf_template_text *ret_text, struct srv_refusal *refusal)
{
    struct inf_tokenizer *tok = srv_engine_info(s->engine)->tokenizer;
    struct shm_error err = {0};
    int rc = 0;
    if (r->api == SRV_API_COMPLETION) {
        if (!r->ids.n && check_length(s, "prompt", r->prompt, r->prompt_bytes, refusal))
            return -EINVAL;
        if (!r->ids.n)
            rc = inf_tokenizer_encode(tok, r->prompt, r->prompt_bytes, INF_ENCODE_SPECIAL | INF_ENCODE_BOS,
                                      &err, ret_ids);
        else
            rc = inf_ids_append(ret_ids, r->ids.ids, r->ids.n);
        for (size_t i = 0; i < r->ids.n; i++)
            if ((uint32_t)r->ids.ids[i] >= srv_engine_info(s->engine)->vocab)
                return srv_refuse(refusal, 400, NULL, "prompt", "token id %d is not in the vocabulary",
                                  r->ids.ids[i]);
        return rc ? srv_refuse(refusal, rc == -ENOMEM ? 503 : 400, NULL, "prompt", "%s", shm_error_text(&err))
                  : 0;
    }
    if (!s->chat)
        return srv_refuse(refusal, 400, "no_chat_template", NULL, "%s", shm_error_text(&s->chat_error));
    if (r->tool_list && !inf_template_has_tools(s->chat))
        return srv_refuse(refusal, 400, "unsupported_parameter", "tools",
                          "'tools': the model's chat template (%s) has none", inf_template_name(s->chat));
    if (r->tool_list && r->tool_choice != SRV_TOOLS_NONE) {
        r->tools = json_dumps(r->tool_list, JSON_COMPACT);
        if (!r->tools)
            return srv_refuse(refusal, 503, NULL, NULL, "no memory");
    }
    if (check_thinking(s, r, refusal))
        return -EINVAL;
    if (r->tools && (r->tool_choice == SRV_TOOLS_REQUIRED || r->tool_choice == SRV_TOOLS_NAMED)) {
        if (r->grammar)
            return srv_refuse(refusal, 400, NULL, "tool_choice",
                              "'tool_choice': a call can't be forced beside 'response_format'");
        rc = srv_tools_grammar(s->chat, r->tool_list, r->tool_choice == SRV_TOOLS_NAMED ? r->tool_name : NULL,
                               &err, &r->grammar);
        if (rc)
            return srv_refuse(refusal, rc == -ENOMEM ? 503 : 400, NULL, "tool_choice", "%s",
                              shm_error_text(&err));
    }
    if (r->grammar && r->thinking == INF_THINKING_DEFAULT)
        r->thinking = INF_THINKING_OFF;
    const struct inf_template_input in = {.messages = r->messages,
                                          .n_messages = r->n_messages,
                                          .tools = r->tools,
                                          .tools_bytes = r->tools ? strlen(r->tools) : 0,
                                          .add_generation_prompt = true,
                                          .thinking = r->thinking,
                                          .effort = r->effort,
                                          .now = time(NULL)};
    rc = inf_template_render(s->chat, &in, &err, ret_text);
    if (!rc && check_length(s, "messages", ret_text->bytes, ret_text->n_bytes, refusal))
        return -EINVAL;
    if (!rc)
        rc = inf_template_encode(tok, ret_text, 0, &err, ret_ids);
    return rc ? srv_refuse(refusal, rc == -ENOMEM ? 503 : 400, NULL, "messages", "%s", shm_error_text(&err))
              : 0;
}
