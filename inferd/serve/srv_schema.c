/* SPDX-License-Identifier: MIT */
/*
 * JSON and JSON Schema as grammars.
 *
 * Known: type (also a list), properties, required, additionalProperties, items, minItems, maxItems,
 * minLength, maxLength, enum, const, anyOf, oneOf (as anyOf), allOf with one member, $ref inside the schema,
 * $defs, and annotations. Any other keyword is refused by name: an answer never breaks a rule that was given.
 * Objects get their properties in the schema's order, and no others where it lists some.
 */
#include "inferd/serve/srv_grammar_priv.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ITEMS_MAX   1024
#define LENGTH_MAX  4096
#define RULES_MAX   4096
#define NESTING_MAX 64
#define TYPES_MAX   7

int srv_grammar_json(struct shm_error *err, struct srv_grammar **ret_grammar)
{
    struct srv_build *b = srv_build_new();
    if (!b)
        return -ENOMEM;
    int start = srv_build_call(b, srv_build_json(b, SRV_JSON_OBJECT), srv_build_return(b));
    return srv_build_finish(&b, start, err, ret_grammar);
}

struct compile {
    struct srv_build *b;
    const json_t *root;
    struct shm_error *err;
    struct {
        const json_t *schema;
        int node;
    } rules[RULES_MAX];
    int n_rules;
};

static int schema_rule(struct compile *c, const json_t *schema, const char *path, int nesting);

static const char *const annotations[] = {"title",    "description", "default", "examples",    "$schema",
                                          "$id",      "$comment",    "$defs",   "definitions", "deprecated",
                                          "readOnly", "writeOnly",   "$anchor"};

/* Refuses each keyword that is neither in `known` nor an annotation. */
static int check_keywords(struct compile *c, const json_t *schema, const char *path, const char *const *known)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)schema, key, value)
    {
        bool ok = false;
        for (size_t i = 0; !ok && i < sizeof annotations / sizeof annotations[0]; i++)
            ok = strcmp(key, annotations[i]) == 0;
        for (size_t i = 0; !ok && known[i]; i++)
            ok = strcmp(key, known[i]) == 0;
        if (!ok)
            return shm_error_set(c->err, ENOTSUP, "%s: keyword '%.60s' is not supported", path, key);
    }
    return 0;
}

/* A count of a keyword; `absent` where it is not there. */
static int count(struct compile *c, const json_t *schema, const char *path, const char *key, int most,
                 int absent, int *ret_count)
{
    const json_t *value = json_object_get(schema, key);
    *ret_count = absent;
    if (!value)
        return 0;
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return shm_error_set(c->err, EINVAL, "%s.%s: not a number of 0 or more", path, key);
    if (json_integer_value(value) > most)
        return shm_error_set(c->err, ENOTSUP, "%s.%s: at most %d is supported", path, key, most);
    *ret_count = (int)json_integer_value(value);
    return 0;
}

/* A value as it stands. */
static int constant(struct compile *c, const json_t *value, const char *path, int next)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    if (!text)
        return shm_error_set(c->err, EINVAL, "%s: a value that cannot be written", path);
    int node = srv_build_text(c->b, text, next);
    free(text);
    return node;
}

static int add_either(struct compile *c, int one, int other)
{
    return one == INT32_MAX ? other : srv_build_either(c->b, one, other);
}

static bool is_one(const char *type, const json_t *value)
{
    if (strcmp(type, "integer") == 0)
        return json_is_integer(value) ||
               (json_is_real(value) && floor(json_real_value(value)) == json_real_value(value));
    const struct {
        const char *type;
        bool yes;
    } is[] = {{"object", json_is_object(value)},   {"array", json_is_array(value)},
              {"string", json_is_string(value)},   {"number", json_is_number(value)},
              {"boolean", json_is_boolean(value)}, {"null", json_is_null(value)}};
    for (size_t i = 0; i < sizeof is / sizeof is[0]; i++)
        if (strcmp(type, is[i].type) == 0)
            return is[i].yes;
    return false;
}

/* Whether a value of enum or const is of the type that stands beside it. */
static bool fits(const json_t *schema, const json_t *value)
{
    const json_t *type = json_object_get(schema, "type");
    bool ok = !type || (json_is_string(type) && is_one(json_string_value(type), value));
    for (size_t i = 0; !ok && i < json_array_size(type) && i < TYPES_MAX; i++) {
        const char *name = json_string_value(json_array_get(type, i));
        ok = name && is_one(name, value);
    }
    return ok;
}

static int of_enum(struct compile *c, const json_t *schema, const char *path)
{
    static const char *const known[] = {"enum", "type", NULL};
    const json_t *list = json_object_get(schema, "enum");
    int end = srv_build_return(c->b), all = INT32_MAX, rc = check_keywords(c, schema, path, known);
    if (rc)
        return rc;
    if (!json_array_size(list))
        return shm_error_set(c->err, EINVAL, "%s.enum: not a list with values", path);
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (!fits(schema, json_array_get(list, i)))
            continue;
        int node = constant(c, json_array_get(list, i), path, end);
        if (node < 0)
            return node;
        all = add_either(c, all, node);
    }
    return all == INT32_MAX ? shm_error_set(c->err, EINVAL, "%s.enum: no value of the type beside it", path)
                            : all;
}

static int of_alternatives(struct compile *c, const json_t *schema, const char *path, const char *key,
                           int nesting)
{
    const char *const known[] = {key, NULL};
    const json_t *list = json_object_get(schema, key);
    int end = srv_build_return(c->b), all = INT32_MAX, rc = check_keywords(c, schema, path, known);
    if (rc)
        return rc;
    if (!json_array_size(list))
        return shm_error_set(c->err, EINVAL, "%s.%s: not a list with schemas", path, key);
    if (strcmp(key, "allOf") == 0 && json_array_size(list) != 1)
        return shm_error_set(c->err, ENOTSUP, "%s: keyword 'allOf' is supported with one member only", path);
    for (size_t i = 0; i < json_array_size(list); i++) {
        char at[200];
        snprintf(at, sizeof at, "%.150s.%s[%zu]", path, key, i);
        int rule = schema_rule(c, json_array_get(list, i), at, nesting + 1);
        if (rule < 0)
            return rule;
        all = add_either(c, all, srv_build_call(c->b, rule, end));
    }
    return all;
}

static int of_ref(struct compile *c, const json_t *schema, const char *path, int nesting)
{
    static const char *const known[] = {"$ref", NULL};
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    int rc = check_keywords(c, schema, path, known);
    if (rc)
        return rc;
    if (!ref || ref[0] != '#')
        return shm_error_set(c->err, ENOTSUP, "%s: $ref is supported inside the schema only (#/...)", path);
    const json_t *at = c->root;
    char name[256];
    for (const char *p = ref + 1; at && *p;) {
        size_t n = 0;
        if (*p++ != '/')
            at = NULL;
        for (; *p && *p != '/' && n + 1 < sizeof name; p++) {
            char ch = *p;
            if (ch == '~' && (p[1] == '0' || p[1] == '1'))
                ch = *++p == '0' ? '~' : '/';
            name[n++] = ch;
        }
        name[n] = '\0';
        at = json_is_array(at) ? json_array_get(at, (size_t)strtoul(name, NULL, 10))
                               : json_object_get(at, name);
    }
    if (!at)
        return shm_error_set(c->err, EINVAL, "%s: $ref '%.100s' leads nowhere", path, ref);
    return schema_rule(c, at, ref, nesting + 1);
}

/* Names as keys: a list would be gone through for each property. */
static json_t *set_of(const json_t *names)
{
    json_t *set = json_object();
    for (size_t i = 0; set && i < json_array_size(names); i++)
        if (json_object_set_new(set, json_string_value(json_array_get(names, i)), json_true())) {
            json_decref(set);
            return NULL;
        }
    return set;
}

/* Properties in order; `behind[first]`: what may follow where nothing (first) or something was written. */
static int of_object(struct compile *c, const json_t *schema, const char *path, int nesting)
{
    struct srv_build *b = c->b;
    const json_t *properties = json_object_get(schema, "properties");
    const json_t *required = json_object_get(schema, "required");
    const json_t *others = json_object_get(schema, "additionalProperties");
    if (properties && !json_is_object(properties))
        return shm_error_set(c->err, EINVAL, "%s.properties: not an object", path);
    if (required && !json_is_array(required))
        return shm_error_set(c->err, EINVAL, "%s.required: not a list", path);
    if (others && !json_is_boolean(others) && !json_is_object(others))
        return shm_error_set(c->err, EINVAL, "%s.additionalProperties: neither a schema nor true or false",
                             path);
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        if (!name || !json_object_get(properties, name))
            return shm_error_set(c->err, ENOTSUP, "%s.required: '%.60s' is not among the properties", path,
                                 name ? name : "?");
    }
    size_t n = json_object_size(properties);
    int end = srv_build_return(b);
    if (!n) {
        if (json_is_false(others))
            return srv_build_bytes(b, "{", 1, srv_build_space(b, srv_build_bytes(b, "}", 1, end)));
        if (!json_is_object(others))
            return srv_build_call(b, srv_build_json(b, SRV_JSON_OBJECT), end);
        char at[200];
        snprintf(at, sizeof at, "%.170s.additionalProperties", path);
        int rule = schema_rule(c, others, at, nesting + 1);
        return rule < 0 ? rule : srv_build_map(b, rule);
    }
    const char **keys = calloc(n, sizeof *keys), *key;
    json_t *value;
    json_t *needed = set_of(required);
    size_t i = 0;
    if (!keys || !needed) {
        free(keys);
        json_decref(needed);
        return -ENOMEM;
    }
    json_object_foreach((json_t *)properties, key, value) keys[i++] = key;
    int close = srv_build_space(b, srv_build_bytes(b, "}", 1, end)), first = close, later = close;
    while (i-- > 0 && later >= 0 && first >= 0) {
        char at[200];
        snprintf(at, sizeof at, "%.100s.properties.%.60s", path, keys[i]);
        int rule = schema_rule(c, json_object_get(properties, keys[i]), at, nesting + 1);
        json_t *name = json_string(keys[i]);
        int pair =
            rule < 0 ? rule : srv_build_bytes(b, ":", 1, srv_build_space(b, srv_build_call(b, rule, later)));
        if (pair >= 0)
            pair = constant(c, name, path, pair);
        json_decref(name);
        bool optional = !json_object_get(needed, keys[i]);
        int one = srv_build_space(b, pair), other = srv_build_bytes(b, ",", 1, srv_build_space(b, pair));
        first = optional ? srv_build_either(b, one, first) : one;
        later = optional ? srv_build_either(b, other, later) : other;
    }
    json_decref(needed);
    free(keys);
    return srv_build_bytes(b, "{", 1, first);
}

static int of_array(struct compile *c, const json_t *schema, const char *path, int nesting)
{
    const json_t *items = json_object_get(schema, "items");
    int least, most, rc;
    if ((rc = count(c, schema, path, "minItems", ITEMS_MAX, 0, &least)) ||
        (rc = count(c, schema, path, "maxItems", ITEMS_MAX, -1, &most)))
        return rc;
    if (most >= 0 && least > most)
        return shm_error_set(c->err, EINVAL, "%s: minItems is above maxItems", path);
    char at[200];
    snprintf(at, sizeof at, "%.180s.items", path);
    int rule = items ? schema_rule(c, items, at, nesting + 1) : srv_build_json(c->b, SRV_JSON_VALUE);
    return rule < 0 ? rule : srv_build_list(c->b, rule, least, most);
}

static int of_string(struct compile *c, const json_t *schema, const char *path)
{
    struct srv_build *b = c->b;
    int least, most, rc, character = srv_build_json(b, SRV_JSON_CHAR);
    if ((rc = count(c, schema, path, "minLength", LENGTH_MAX, 0, &least)) ||
        (rc = count(c, schema, path, "maxLength", LENGTH_MAX, -1, &most)))
        return rc;
    if (most >= 0 && least > most)
        return shm_error_set(c->err, EINVAL, "%s: minLength is above maxLength", path);
    int at, close = srv_build_bytes(b, "\"", 1, srv_build_return(b));
    if (most < 0) {
        at = srv_build_later(b);
        srv_build_set(b, at, srv_build_either(b, close, srv_build_call(b, character, at)));
        most = least;
    } else {
        at = close;
    }
    for (int n = most - 1; n >= 0; n--) {
        int more = srv_build_call(b, character, at);
        at = n >= least ? srv_build_either(b, close, more) : more;
    }
    return srv_build_bytes(b, "\"", 1, at);
}

/* One type, with the keywords that go with it. */
static int of_type(struct compile *c, const json_t *schema, const char *type, const char *path, int nesting)
{
    struct srv_build *b = c->b;
    int end = srv_build_return(b);
    if (strcmp(type, "object") == 0)
        return of_object(c, schema, path, nesting);
    if (strcmp(type, "array") == 0)
        return of_array(c, schema, path, nesting);
    if (strcmp(type, "string") == 0)
        return of_string(c, schema, path);
    if (strcmp(type, "number") == 0)
        return srv_build_call(b, srv_build_json(b, SRV_JSON_NUMBER), end);
    if (strcmp(type, "integer") == 0)
        return srv_build_call(b, srv_build_json(b, SRV_JSON_INTEGER), end);
    if (strcmp(type, "boolean") == 0)
        return srv_build_either(b, srv_build_text(b, "true", end), srv_build_text(b, "false", end));
    if (strcmp(type, "null") == 0)
        return srv_build_text(b, "null", end);
    return shm_error_set(c->err, EINVAL, "%s.type: '%.40s' is no type", path, type);
}

static int of_types(struct compile *c, const json_t *schema, const char *path, int nesting)
{
    static const char *const known[] = {"type",      "properties", "required", "additionalProperties",
                                        "items",     "minItems",   "maxItems", "minLength",
                                        "maxLength", NULL};
    const json_t *type = json_object_get(schema, "type");
    int rc = check_keywords(c, schema, path, known), all = INT32_MAX, end = srv_build_return(c->b);
    if (rc)
        return rc;
    if (!type && (json_object_get(schema, "properties") || json_object_get(schema, "required")))
        return of_object(c, schema, path, nesting);
    if (!type) {
        static const char *const alone[] = {NULL};
        if ((rc = check_keywords(c, schema, path, alone)))
            return shm_error_set(c->err, ENOTSUP, "%s: keywords without 'type' are not supported", path);
        return srv_build_call(c->b, srv_build_json(c->b, SRV_JSON_VALUE), end);
    }
    if (json_array_size(type) > TYPES_MAX)
        return shm_error_set(c->err, EINVAL, "%s.type: more names than there are types", path);
    if (json_is_string(type))
        return of_type(c, schema, json_string_value(type), path, nesting);
    for (size_t i = 0; i < json_array_size(type); i++) {
        const char *name = json_string_value(json_array_get(type, i));
        int node = of_type(c, schema, name ? name : "?", path, nesting);
        if (node < 0)
            return node;
        all = add_either(c, all, node);
    }
    return all == INT32_MAX
               ? shm_error_set(c->err, EINVAL, "%s.type: neither a name nor a list of names", path)
               : all;
}

static int compile(struct compile *c, const json_t *schema, const char *path, int nesting)
{
    if (json_is_true(schema))
        return srv_build_call(c->b, srv_build_json(c->b, SRV_JSON_VALUE), srv_build_return(c->b));
    if (!json_is_object(schema))
        return shm_error_set(c->err, EINVAL, "%s: not a schema", path);
    if (json_object_get(schema, "$ref"))
        return of_ref(c, schema, path, nesting);
    if (json_object_get(schema, "enum"))
        return of_enum(c, schema, path);
    if (json_object_get(schema, "const")) {
        static const char *const known[] = {"const", "type", NULL};
        int rc = check_keywords(c, schema, path, known);
        if (!rc && !fits(schema, json_object_get(schema, "const")))
            rc = shm_error_set(c->err, EINVAL, "%s.const: not of the type beside it", path);
        return rc ? rc : constant(c, json_object_get(schema, "const"), path, srv_build_return(c->b));
    }
    static const char *const choices[] = {"anyOf", "oneOf", "allOf"};
    for (size_t i = 0; i < 3; i++)
        if (json_object_get(schema, choices[i]))
            return of_alternatives(c, schema, path, choices[i], nesting);
    return of_types(c, schema, path, nesting);
}

/* Each schema once, so that they may refer to each other. */
static int schema_rule(struct compile *c, const json_t *schema, const char *path, int nesting)
{
    for (int i = 0; i < c->n_rules; i++)
        if (c->rules[i].schema == schema)
            return c->rules[i].node;
    if (c->n_rules == RULES_MAX || nesting > NESTING_MAX)
        return shm_error_set(c->err, E2BIG, "%s: the schema is too large or too deep", path);
    int later = srv_build_later(c->b);
    c->rules[c->n_rules].schema = schema;
    c->rules[c->n_rules++].node = later;
    int node = compile(c, schema, path, nesting);
    srv_build_set(c->b, later, node);
    return node < 0 ? node : later;
}

int srv_build_schema(struct srv_build *b, const json_t *schema, const char *path, struct shm_error *err)
{
    struct compile *c = calloc(1, sizeof *c);
    if (!c)
        return -ENOMEM;
    c->b = b;
    c->root = schema;
    c->err = err;
    int rule = schema_rule(c, schema, path, 0);
    free(c);
    return rule;
}

int srv_grammar_schema(const json_t *schema, const char *path, struct shm_error *err,
                       struct srv_grammar **ret_grammar)
{
    struct srv_build *b = srv_build_new();
    if (!b)
        return -ENOMEM;
    int rule = srv_build_schema(b, schema, path, err);
    if (rule < 0) {
        srv_build_free(&b);
        return err->code ? err->code : shm_error_set(err, rule, "%s: the schema is too large", path);
    }
    return srv_build_finish(&b, srv_build_call(b, rule, srv_build_return(b)), err, ret_grammar);
}
