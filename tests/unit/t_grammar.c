/* SPDX-License-Identifier: MIT */
/* Grammars: texts that belong to a schema and texts that don't; masks against the definition; random walks
 * end in JSON. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/serve/srv_grammar.h"
#include "tok_fixture.h"

TestSuite(grammar, .timeout = 60);

static struct srv_grammar *schema(const char *text)
{
    struct shm_error err = {0};
    struct srv_grammar *g = NULL;
    json_t *j = json_loads(text, JSON_DECODE_ANY, NULL);
    cr_assert(j, "%s", text);
    cr_assert_eq(srv_grammar_schema(j, "schema", &err, &g), 0, "%s: %s", text, shm_error_text(&err));
    json_decref(j);
    return g;
}

/* The whole text, and every proper beginning is open. */
static bool belongs(const char *schema_text, const char *text)
{
    struct srv_grammar *g = schema(schema_text);
    bool ok = srv_grammar_accept(g, text, strlen(text)) == 0 && srv_grammar_may_end(g);
    srv_grammar_destroy(&g);
    return ok;
}

#define YES(text) cr_expect(belongs(s, text), "refused: %s", text)
#define NO(text)  cr_expect(!belongs(s, text), "taken: %s", text)

Test(grammar, any_json)
{
    const char *s = "{}";
    YES("null");
    YES("true");
    YES("-0.5e+10");
    YES("\"a\\n\\u00e9\\ud83d\\ude00\xC3\xA9\xE2\x98\x83\xF0\x9F\x98\x80\"");
    YES("[]");
    YES("[1, 2,\n  [3]]");
    YES("{}");
    YES("{\"a\": {\"b\":[{}]}, \"\":false\n}");
    NO("nul");
    NO("01");
    NO("1.");
    NO("+1");
    NO("\"\n\"");
    NO("\"\\x\"");
    NO("\"\\ud83d\"");
    NO("\"\\ude00\"");
    NO("\"\xC3\"");
    NO("\"\xED\xA0\x80\"");
    NO("\"\xC0\x80\"");
    NO("\"\xF4\x90\x80\x80\"");
    NO("[1,]");
    NO("{\"a\"}");
    NO("{a:1}");
    NO("{\"a\":1,}");
    NO("[1] ");
}

Test(grammar, objects)
{
    const char *s =
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":\"string\"},\"c\":"
        "{\"type\":[\"boolean\",\"null\"]}},\"required\":[\"b\"],\"additionalProperties\":false}";
    YES("{\"a\":1,\"b\":\"x\",\"c\":null}");
    YES("{ \"b\": \"\" }");
    YES("{\"b\":\"x\", \"c\":true}");
    NO("{\"a\":1}");
    NO("{\"b\":\"x\",\"a\":1}");
    NO("{\"b\":\"x\",\"d\":1}");
    NO("{\"a\":1.5,\"b\":\"x\"}");
    NO("{,\"b\":\"x\"}");
    NO("{\"b\":\"x\",}");
    NO("{\"b\":\"x\",\"c\":\"x\"}");
    s = "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}}}";
    YES("{}");
    YES("{\"a\":[]}");
    YES("{\"b\":{\"x\":1}}");
    s = "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"}}";
    YES("{\"x\":1,\"y\":2}");
    NO("{\"x\":\"1\"}");
    s = "{\"type\":\"object\",\"additionalProperties\":false}";
    YES("{}");
    NO("{\"x\":1}");
}

Test(grammar, arrays_strings_and_choices)
{
    const char *s = "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":3}";
    NO("[1]");
    YES("[1,2]");
    YES("[1,2,3]");
    NO("[1,2,3,4]");
    s = "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2}";
    NO("[]");
    NO("[1]");
    YES("[1,2]");
    YES("[1,2,3,4,5]");
    s = "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"maxItems\":0}";
    YES("[]");
    NO("[1]");
    s = "{\"type\":\"string\",\"minLength\":1,\"maxLength\":2}";
    NO("\"\"");
    YES("\"\xE2\x98\x83\"");
    YES("\"a\\n\"");
    NO("\"abc\"");
    s = "{\"type\":\"string\",\"minLength\":2}";
    NO("\"a\"");
    YES("\"abcdef\"");
    s = "{\"enum\":[\"red\",\"reddish\",5,null,{\"a\":[1]}]}";
    YES("\"red\"");
    YES("\"reddish\"");
    YES("5");
    YES("{\"a\":[1]}");
    NO("\"redd\"");
    NO("6");
    s = "{\"const\":\"a\\\"b\"}";
    YES("\"a\\\"b\"");
    NO("\"ab\"");
    s = "{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}]}";
    YES("[[],[1,[2]]]");
    NO("[true]");
    s = "{\"$defs\":{\"node\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{"
        "\"anyOf\":[{\"$ref\":"
        "\"#/$defs/node\"},{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"]}},\"$ref\":\"#/$defs/node\"}";
    YES("{\"v\":1,\"next\":{\"v\":2,\"next\":null}}");
    NO("{\"v\":1,\"next\":{\"v\":2}}");
}

/* Ways that meet again are followed once: else this takes 2^40 of them. */
Test(grammar, alternatives_that_meet_again, .timeout = 10)
{
    char text[8192];
    size_t n = (size_t)sprintf(text, "{\"$ref\":\"#/$defs/d0\",\"$defs\":{");
    for (int i = 0; i < 28; i++)
        n += (size_t)sprintf(text + n,
                             "\"d%d\":{\"anyOf\":[{\"$ref\":\"#/$defs/d%d\"},{\"$ref\":\"#/$defs/d%d\"}]},",
                             i, i + 1, i + 1);
    sprintf(text + n, "\"d28\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/d0\"}}}}");
    const char *s = text;
    YES("[[],[[]]]");
    NO("null");
}

Test(grammar, what_leads_to_itself_adds_nothing)
{
    const char *s = "{\"anyOf\":[{\"$ref\":\"#\"},{\"type\":\"null\"}]}";
    YES("null");
    NO("true");
    s = "{\"type\":\"array\",\"items\":{\"anyOf\":[{\"$ref\":\"#/items\"},{\"type\":\"null\"}]}}";
    YES("[null,null]");
    s = "{\"type\":\"array\",\"items\":{\"$ref\":\"#/items\"}}";
    YES("[]");
    NO("[1]");
}

/* A list of names is not gone through for each property: that would take minutes. */
Test(grammar, the_same_name_many_times, .timeout = 15)
{
    json_t *j = json_pack("{s:s, s:{}, s:[]}", "type", "object", "properties", "required");
    char name[16];
    for (int i = 0; i < 1000; i++) {
        snprintf(name, sizeof name, "p%d", i);
        json_object_set_new(json_object_get(j, "properties"), name, json_true());
    }
    json_t *p7 = json_string("p7");
    for (int i = 0; i < 5000000; i++)
        json_array_append(json_object_get(j, "required"), p7);
    json_decref(p7);
    struct shm_error err = {0};
    struct srv_grammar *g = NULL;
    cr_expect_eq(srv_grammar_schema(j, "schema", &err, &g), 0, "%s", shm_error_text(&err));
    cr_expect(g && srv_grammar_accept(g, "{\"p3\":1,\"p7\"", 12) == 0);
    cr_expect(g && srv_grammar_accept(g, ":2,\"p8\":3}", 10) == 0 && srv_grammar_may_end(g));
    srv_grammar_destroy(&g);
    json_decref(j);
}

/* An answer is not led to where it can't end. */
Test(grammar, values_without_an_end_are_not_entered)
{
    const char *s = "{\"$defs\":{\"x\":{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#/$defs/x\"}},"
                    "\"required\":[\"a\"]}},\"anyOf\":[{\"$ref\":\"#/$defs/x\"},{\"type\":\"null\"}]}";
    YES("null");
    struct srv_grammar *g = schema(s);
    cr_expect_eq(srv_grammar_accept(g, "{", 1), -EINVAL);
    srv_grammar_destroy(&g);
}

Test(grammar, values_are_of_the_type_beside_them)
{
    const char *s = "{\"type\":[\"string\",\"integer\"],\"enum\":[\"a\",1,2.0,2.5,null,true]}";
    YES("\"a\"");
    YES("1");
    YES("2.0");
    NO("2.5");
    NO("null");
    NO("true");
}

Test(grammar, other_keywords_are_refused_by_name)
{
    static const struct {
        const char *schema, *word;
    } bad[] = {
        {"{\"type\":\"string\",\"pattern\":\"a\"}", "pattern"},
        {"{\"type\":\"string\",\"format\":\"date\"}", "format"},
        {"{\"type\":\"integer\",\"minimum\":1}", "minimum"},
        {"{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems"},
        {"{\"type\":\"object\",\"properties\":{\"deep\":{\"type\":\"number\",\"multipleOf\":2}}}", "deep"},
        {"{\"not\":{}}", "not"},
        {"{\"allOf\":[{},{}]}", "allOf"},
        {"{\"$ref\":\"http://x/\"}", "$ref"},
        {"{\"$ref\":\"#/nowhere\"}", "nowhere"},
        {"{\"type\":\"thing\"}", "thing"},
        {"{\"type\":\"object\",\"required\":[\"x\"]}", "x"},
        {"{\"type\":\"array\",\"minItems\":3,\"maxItems\":2}", "minItems"},
        {"{\"type\":\"array\",\"maxItems\":100000}", "maxItems"},
        {"{\"minLength\":3}", "type"},
        {"{\"enum\":[]}", "enum"},
        {"3", "schema"},
        {"{\"$ref\":\"#\"}", "grammar"},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}",
         "no value has an end"},
        {"{\"type\":\"array\",\"minItems\":1,\"items\":{\"$ref\":\"#\"}}", "no value has an end"},
        {"{\"type\":\"string\",\"enum\":[1,2]}", "enum"},
        {"{\"type\":\"string\",\"const\":1}", "const"},
        {"{\"type\":[\"null\",\"null\",\"null\",\"null\",\"null\",\"null\",\"null\",\"null\"]}",
         "more names"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct shm_error err = {0};
        struct srv_grammar *g = NULL;
        json_t *j = json_loads(bad[i].schema, JSON_DECODE_ANY, NULL);
        cr_expect_lt(srv_grammar_schema(j, "schema", &err, &g), 0, "%s", bad[i].schema);
        cr_expect(strstr(shm_error_text(&err), bad[i].word), "%s: %s", bad[i].schema, shm_error_text(&err));
        json_decref(j);
        srv_grammar_destroy(&g);
    }
}

Test(grammar, deep_and_wide_texts_end_in_errors_not_in_crashes)
{
    struct srv_grammar *g = schema("{}");
    char deep[4096];
    memset(deep, '[', sizeof deep);
    cr_expect_lt(srv_grammar_accept(g, deep, sizeof deep), 0);
    cr_expect_eq(srv_grammar_accept(g, deep, 200), 0);
    srv_grammar_destroy(&g);
}

Test(grammar, ambiguous_schemas_stay_cheap)
{
    /* Two thousand alternatives that differ at the end only, in arrays of arrays. */
    static char text[200000];
    size_t n = (size_t)sprintf(text, "{\"anyOf\":[");
    for (int i = 0; i < 2000; i++)
        n += (size_t)sprintf(text + n, "%s{\"const\":\"the same beginning %d\"}", i ? "," : "", i);
    for (int i = 0; i < 20; i++)
        n += (size_t)sprintf(text + n, ",{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}");
    sprintf(text + n, "]}");
    cr_expect(belongs(text, "\"the same beginning 1999\""));
    cr_expect(!belongs(text, "\"the same beginning 2000\""));
    /* More alternatives than can be open at a time: refused, not a stack that runs over. */
    static char many[700000];
    struct shm_error err = {0};
    struct srv_grammar *g = NULL;
    n = (size_t)sprintf(many, "{\"enum\":[0");
    for (int i = 1; i < 60000; i++)
        n += (size_t)sprintf(many + n, ",%d", i);
    sprintf(many + n, "]}");
    json_t *j = json_loads(many, 0, NULL);
    cr_expect_lt(srv_grammar_schema(j, "schema", &err, &g), 0);
    json_decref(j);
    char nested[64];
    memset(nested, '[', 20);
    memset(nested + 20, ']', 20);
    nested[40] = '\0';
    (void)belongs(text, nested); /* too many, or not: but soon */
}

static bool allowed(const uint64_t *mask, int32_t id)
{
    return mask[id / 64] >> id % 64 & 1;
}

/* Writes random tokens that the masks allow. At each tenth step the mask is compared with its definition. */
static void walk(struct inf_tokenizer *tok, const struct srv_vocab *vocab, const char *text, unsigned seed)
{
    struct srv_grammar *g = schema(text);
    uint32_t n = inf_tokenizer_size(tok);
    char out[65536];
    size_t at = 0;
    int step = 0;
    srand(seed);
    while (!srv_grammar_must_end(g) && at + 1000 < sizeof out && step++ < 3000) {
        int rc;
        const uint64_t *mask = srv_grammar_mask(g, vocab, NULL, 0, &rc);
        cr_assert(mask);
        int32_t *choice = calloc(n, sizeof *choice), n_choices = 0;
        bool may_end = srv_grammar_may_end(g);
        for (uint32_t i = 0; i < n; i++) {
            const char *bytes;
            size_t len;
            inf_tokenizer_bytes(tok, (int32_t)i, &bytes, &len);
            bool stop = inf_tokenizer_is_stop(tok, (int32_t)i),
                 control = inf_tokenizer_is_control(tok, (int32_t)i);
            if (allowed(mask, (int32_t)i) && !control)
                choice[n_choices++] = (int32_t)i;
            if (stop)
                cr_assert_eq(allowed(mask, (int32_t)i), may_end);
            else if (control)
                cr_assert(!allowed(mask, (int32_t)i));
        }
        for (uint32_t i = (uint32_t)rand() % 300; step % 10 == 1 && i < n; i += (uint32_t)rand() % 300 + 1) {
            const char *bytes;
            size_t len;
            if (inf_tokenizer_is_control(tok, (int32_t)i))
                continue;
            inf_tokenizer_bytes(tok, (int32_t)i, &bytes, &len);
            struct srv_grammar *copy = schema(text); /* accept moves, so that a copy walks the same way */
            cr_assert_eq(srv_grammar_accept(copy, out, at), 0);
            cr_assert_eq(srv_grammar_accept(copy, bytes, len) == 0, allowed(mask, (int32_t)i), "token %u", i);
            srv_grammar_destroy(&copy);
        }
        if (may_end && (!n_choices || step > 300)) {
            free(choice);
            break;
        }
        cr_assert_gt(n_choices, 0, "nothing can follow: %.*s", (int)at, out);
        int32_t id = choice[rand() % n_choices];
        free(choice);
        const char *bytes;
        size_t len;
        inf_tokenizer_bytes(tok, id, &bytes, &len);
        cr_assert_eq(srv_grammar_accept(g, bytes, len), 0);
        memcpy(out + at, bytes, len);
        at += len;
    }
    if (srv_grammar_may_end(g)) {
        json_error_t error;
        json_t *j = json_loadb(out, at, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
        cr_assert(j, "%s: %.*s", error.text, (int)at, out);
        json_decref(j);
    }
    srv_grammar_destroy(&g);
}

Test(grammar, random_walks_under_masks_write_json)
{
    struct inf_tokenizer *tok = tok_fixture_tokenizer();
    struct srv_vocab *vocab = srv_vocab_create(tok, inf_tokenizer_size(tok) + 70);
    cr_assert(vocab);
    for (unsigned seed = 1; seed <= 4; seed++) {
        walk(tok, vocab,
             "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":12},\"age\":{"
             "\"type\":"
             "\"integer\"},\"tags\":{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"ab\",1]},\"maxItems\":4}"
             "},"
             "\"required\":[\"name\",\"age\",\"tags\"]}",
             seed);
        walk(tok, vocab, "{}", seed);
    }
    srv_vocab_destroy(&vocab);
    inf_tokenizer_destroy(&tok);
}

/* More states than are kept: what was remembered is thrown away, the place in the text is not. */
Test(grammar, long_texts_start_to_remember_anew)
{
    struct inf_tokenizer *tok = tok_fixture_tokenizer();
    struct srv_vocab *vocab = srv_vocab_create(tok, inf_tokenizer_size(tok));
    struct srv_grammar *g = schema("{\"type\":\"array\",\"items\":{\"anyOf\":[{\"type\":\"object\","
                                   "\"properties\":{\"s\":{\"type\":\"string\",\"maxLength\":"
                                   "4096}},\"required\":[\"s\"]},{\"type\":\"array\",\"items\":{\"type\":"
                                   "\"string\",\"maxLength\":4096}}]}}");
    int32_t letter = inf_tokenizer_find(tok, "a", 1), quote = inf_tokenizer_find(tok, "\"", 1);
    static const char *const before[] = {"[[\"", "\"],{\"s\":\""};
    for (int part = 0; part < 2; part++) {
        cr_assert_eq(srv_grammar_accept(g, before[part], strlen(before[part])), 0);
        for (int i = 0; i < 4096; i++) {
            int rc;
            const uint64_t *mask = srv_grammar_mask(g, vocab, NULL, 0, &rc);
            cr_assert(mask && allowed(mask, letter) && allowed(mask, quote), "%d", i);
            cr_assert_eq(srv_grammar_accept(g, "a", 1), 0, "%d", i);
        }
        int rc;
        const uint64_t *mask = srv_grammar_mask(g, vocab, NULL, 0, &rc);
        cr_assert(mask && !allowed(mask, letter) && allowed(mask, quote));
    }
    cr_assert_eq(srv_grammar_accept(g, "\"}]", 3), 0);
    cr_assert(srv_grammar_must_end(g));
    srv_grammar_destroy(&g);
    srv_vocab_destroy(&vocab);
    inf_tokenizer_destroy(&tok);
}
