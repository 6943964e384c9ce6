/* SPDX-License-Identifier: MIT */
/* Tool calls as each family writes them. */
#include "inferd/inf_parser_priv.h"

#include <errno.h>
#include <stdlib.h>

#define CALLS_MAX      256
#define NAME_BYTES_MAX 256

static struct inf_slice slice(const char *at, size_t n)
{
    return (struct inf_slice){at, n};
}

static struct inf_slice drop(struct inf_slice s, size_t n)
{
    return slice(s.at + n, s.n - n);
}

/* The rest of s behind a mark at its start; false: it does not stand there. */
static bool take(struct inf_slice *s, const char *mark)
{
    if (!inf_starts(*s, mark))
        return false;
    *s = drop(*s, strlen(mark));
    return true;
}

/* Up to a mark, which is taken too; false: there is none. */
static bool take_until(struct inf_slice *s, const char *mark, struct inf_slice *ret_part)
{
    if (!inf_has(*s, mark))
        return false;
    *ret_part = inf_before_first(*s, mark);
    *s = drop(*s, ret_part->n + strlen(mark));
    return true;
}

/* No white space and no control characters: text between marks by chance is no name. */
static bool name_ok(struct inf_slice name)
{
    for (size_t i = 0; i < name.n; i++)
        if ((unsigned char)name.at[i] <= ' ' || name.at[i] == 0x7F)
            return false;
    return name.n > 0 && name.n <= NAME_BYTES_MAX;
}

static int give(struct inf_parser *p, struct inf_slice name, struct inf_slice id, const json_t *arguments)
{
    if (!name_ok(name) || !json_is_object(arguments))
        return 0;
    char *name_text = strndup(name.at, name.n), *id_text = id.n ? strndup(id.at, id.n) : NULL;
    char *text = json_dumps(arguments, JSON_COMPACT);
    int rc = -ENOMEM;
    if (name_text && text && (id_text || !id.n)) {
        struct inf_tool_call call = {.id = id_text, .name = name_text, .arguments = text};
        rc = p->events.on_call(p->events.ctx, &call);
    }
    free(text);
    free(id_text);
    free(name_text);
    return rc < 0 ? rc : 1;
}

static json_t *load(struct inf_slice s, size_t flags)
{
    s = inf_strip(s);
    return json_loadb(s.at, s.n, flags, NULL);
}

int inf_parse_call(struct inf_parser *p, struct inf_slice name, struct inf_slice arguments)
{
    json_t *value = inf_strip(arguments).n ? load(arguments, 0) : json_object();
    int rc = give(p, inf_strip(name), slice("", 0), value);
    json_decref(value);
    return rc;
}

static struct inf_slice text_of(const json_t *value)
{
    return json_is_string(value) ? slice(json_string_value(value), json_string_length(value)) : slice("", 0);
}

/* {"name":, "arguments" or "parameters":}; arguments may be JSON in a string. */
static int from_object(struct inf_parser *p, const json_t *object)
{
    const json_t *arguments = json_object_get(object, "arguments");
    struct inf_slice name = text_of(json_object_get(object, "name"));
    if (!arguments)
        arguments = json_object_get(object, "parameters");
    if (json_is_string(arguments)) {
        json_t *inner = load(text_of(arguments), 0);
        int rc = give(p, name, text_of(json_object_get(object, "id")), inner);
        json_decref(inner);
        return rc;
    }
    return arguments ? give(p, name, text_of(json_object_get(object, "id")), arguments) : 0;
}

static bool object_ok(const json_t *object)
{
    const json_t *arguments = json_object_get(object, "arguments");
    if (!arguments)
        arguments = json_object_get(object, "parameters");
    return text_of(json_object_get(object, "name")).n &&
           (json_is_object(arguments) || json_is_string(arguments));
}

static int from_json(struct inf_parser *p, struct inf_slice body)
{
    json_t *value = load(body, 0), *item;
    size_t i;
    int rc = 0;
    if (json_is_array(value)) {
        bool ok = json_array_size(value) > 0 && json_array_size(value) <= CALLS_MAX;
        json_array_foreach(value, i, item) ok =
            ok && object_ok(item) && json_is_object(json_object_get(item, "arguments"));
        json_array_foreach(value, i, item)
        {
            if (ok && rc >= 0)
                rc = from_object(p, item);
        }
    } else if (value) {
        rc = from_object(p, value);
    }
    json_decref(value);
    return rc;
}

/* Whether the offered tool wants a string there. */
static bool wants_string(const struct inf_parser *p, struct inf_slice name, const char *key)
{
    size_t i;
    json_t *tool;
    json_array_foreach(p->tools, i, tool)
    {
        const json_t *function = json_object_get(tool, "function");
        if (!inf_same(text_of(json_object_get(function, "name")), name))
            continue;
        const json_t *properties = json_object_get(json_object_get(function, "parameters"), "properties");
        const json_t *type = json_object_get(json_object_get(properties, key), "type");
        return json_is_string(type) && strcmp(json_string_value(type), "string") == 0;
    }
    return false;
}

static int set_argument(const struct inf_parser *p, json_t *arguments, struct inf_slice name,
                        struct inf_slice key, struct inf_slice value)
{
    char *key_text = strndup(key.at, key.n);
    if (!key_text)
        return -ENOMEM;
    json_t *v = wants_string(p, name, key_text) ? NULL : load(value, JSON_DECODE_ANY);
    if (!v)
        v = json_stringn(value.at, value.n);
    int rc = v && !json_object_set_new(arguments, key_text, v) ? 0 : -EINVAL;
    free(key_text);
    return rc;
}

/* NAME <arg_key>K</arg_key> <arg_value>V</arg_value> ... */
static int from_glm(struct inf_parser *p, struct inf_slice body)
{
    struct inf_slice name = inf_strip(inf_before_first(body, "<arg_key>")), key, value, gap;
    json_t *arguments = json_object();
    int rc = 0;
    if (!arguments)
        return -ENOMEM;
    body = drop(body, inf_before_first(body, "<arg_key>").n);
    while (!rc && inf_strip(body).n)
        rc = take_until(&body, "<arg_key>", &gap) && take_until(&body, "</arg_key>", &key) &&
                     take_until(&body, "<arg_value>", &gap) && take_until(&body, "</arg_value>", &value)
                 ? set_argument(p, arguments, name, inf_strip(key), value)
                 : -EINVAL;
    if (!rc)
        rc = give(p, name, slice("", 0), arguments);
    json_decref(arguments);
    return rc == -EINVAL ? 0 : rc;
}

/* <function=NAME> <parameter=K>\nV\n</parameter> ... </function> */
static int from_coder(struct inf_parser *p, struct inf_slice body)
{
    struct inf_slice name, key, value, gap;
    json_t *arguments = json_object();
    int rc = arguments ? 0 : -ENOMEM;
    if (!rc && (!take_until(&body, "<function=", &gap) || inf_strip(gap).n || !take_until(&body, ">", &name)))
        rc = -EINVAL;
    while (!rc && (body = inf_strip(body), !take(&body, "</function>"))) {
        rc = take(&body, "<parameter=") && take_until(&body, ">", &key) &&
                     take_until(&body, "</parameter>", &value)
                 ? 0
                 : -EINVAL;
        if (rc)
            break;
        if (value.n && value.at[0] == '\n')
            value = drop(value, 1);
        if (value.n && value.at[value.n - 1] == '\n')
            value.n--;
        rc = set_argument(p, arguments, name, key, value);
    }
    if (!rc)
        rc = give(p, name, slice("", 0), arguments);
    json_decref(arguments);
    return rc == -EINVAL ? 0 : rc;
}

/* [{...}, ...], or NAME[CALL_ID]ID[ARGS]{...} once or more. */
static int from_mistral(struct inf_parser *p, struct inf_slice body)
{
    if (inf_starts(inf_strip(body), "["))
        return from_json(p, body);
    int rc = 1, given = 0;
    for (bool more = true; more && rc > 0;) {
        struct inf_slice one = inf_before_first(body, "[TOOL_CALLS]"), name, id = {"", 0};
        more = one.n < body.n;
        if (more)
            body = inf_after_first(body, "[TOOL_CALLS]");
        if (!take_until(&one, "[ARGS]", &name))
            return given;
        if (inf_has(name, "[CALL_ID]")) {
            id = inf_strip(inf_after_first(name, "[CALL_ID]"));
            name = inf_before_first(name, "[CALL_ID]");
        }
        json_t *arguments = load(one, 0);
        rc = give(p, inf_strip(name), id, arguments);
        json_decref(arguments);
        given |= rc > 0;
    }
    return rc < 0 ? rc : given;
}

/* function<sep>NAME\n```json\n{...}\n``` or NAME<sep>{...}, each between its marks. */
static int from_deepseek(struct inf_parser *p, struct inf_slice body)
{
    struct inf_slice one, gap, name;
    int rc = 0;
    do {
        if (!take_until(&body, "<｜tool▁call▁begin｜>", &gap) || inf_strip(gap).n ||
            !take_until(&body, "<｜tool▁call▁end｜>", &one) || !take_until(&one, "<｜tool▁sep｜>", &name))
            return rc;
        if (inf_has(one, "```json\n")) {
            take_until(&one, "```json\n", &name);
            one = inf_before_first(one, "```");
        }
        rc = inf_parse_call(p, name, one);
    } while (rc > 0 && inf_strip(body).n);
    return rc;
}

int inf_parse_calls(struct inf_parser *p, struct inf_slice body)
{
    switch (p->style) {
    case INF_STYLE_GLM:
        return from_glm(p, body);
    case INF_STYLE_CODER:
        return from_coder(p, body);
    case INF_STYLE_MISTRAL:
        return from_mistral(p, body);
    case INF_STYLE_DEEPSEEK:
        return from_deepseek(p, body);
    default:
        return from_json(p, body);
    }
}
