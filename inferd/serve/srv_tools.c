/* SPDX-License-Identifier: MIT */
/* A call that must be made (tool_choice): the grammar of a family's calls, for families that write them as
 * JSON. */
#include "inferd/serve/srv_grammar.h"
#include "inferd/serve/srv_server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a family writes around name and arguments; found by the beginning of the template's name. */
static const struct style {
    const char *family, *before, *between, *behind;
} styles[] = {
    {"qwen3-coder", NULL, NULL, NULL}, /* not JSON */
    {"qwen", "<tool_call>\n{\"name\": ", ", \"arguments\": ", "}\n</tool_call>"},
    {"llama3.", "{\"name\": ", ", \"parameters\": ", "}"},
};

static const struct style *style_of(const struct inf_template *t)
{
    for (size_t i = 0; i < sizeof styles / sizeof styles[0]; i++)
        if (strncmp(inf_template_name(t), styles[i].family, strlen(styles[i].family)) == 0)
            return styles[i].before ? &styles[i] : NULL;
    return NULL;
}

/* One tool's call, in front of `next`. */
static int call_of(struct srv_build *b, const struct style *s, const json_t *function, int next,
                   struct shm_error *err)
{
    const char *name = json_string_value(json_object_get(function, "name"));
    const json_t *schema = json_object_get(function, "parameters");
    char path[128];
    snprintf(path, sizeof path, "tools.%.60s.parameters", name);
    int rule = schema && !json_is_null(schema) ? srv_build_schema(b, schema, path, err)
                                               : srv_build_json(b, SRV_JSON_OBJECT);
    json_t *quoted = json_string(name);
    char *text = json_dumps(quoted, JSON_ENCODE_ANY);
    json_decref(quoted);
    if (rule < 0 || !text) {
        free(text);
        return rule < 0 ? rule : -ENOMEM;
    }
    int node = srv_build_call(b, rule, srv_build_bytes(b, s->behind, strlen(s->behind), next));
    node = srv_build_bytes(b, s->between, strlen(s->between), node);
    node = srv_build_bytes(b, text, strlen(text), node);
    free(text);
    return srv_build_bytes(b, s->before, strlen(s->before), node);
}

int srv_tools_grammar(const struct inf_template *t, const json_t *tools, const char *only,
                      struct shm_error *err, struct srv_grammar **ret_grammar)
{
    const struct style *s = style_of(t);
    if (!s)
        return shm_error_set(
            err, ENOTSUP,
            "'tool_choice': with this model's chat template (%s) only auto and none are supported",
            inf_template_name(t));
    struct srv_build *b = srv_build_new();
    if (!b)
        return -ENOMEM;
    int end = srv_build_return(b), all = INT32_MAX, rc = 0;
    for (size_t i = 0; !rc && i < json_array_size(tools); i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        const char *name = json_string_value(json_object_get(function, "name"));
        if (only && strcmp(only, name) != 0)
            continue;
        int node = call_of(b, s, function, end, err);
        rc = node < 0 ? node : 0;
        all = all == INT32_MAX ? node : srv_build_either(b, all, node);
    }
    if (!rc && all == INT32_MAX)
        rc = shm_error_set(err, EINVAL, "'tool_choice': there is no tool '%.60s'", only ? only : "");
    if (rc) {
        srv_build_free(&b);
        return err->code ? err->code : shm_error_set(err, rc, "the grammar of the tools is too large");
    }
    return srv_build_finish(&b, all, err, ret_grammar);
}
