/* SPDX-License-Identifier: MIT */
/* What is said to the server. */
#include "tools/bench_load.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Short and frequent: a token each in most vocabularies. */
static const char *const words[] = {
    "the",  "a",    "and",   "to",   "of",  "was",  "in",    "he",     "she",  "it",    "that",
    "his",  "her",  "with",  "for",  "had", "on",   "you",   "said",   "they", "but",   "at",
    "is",   "all",  "there", "out",  "up",  "one",  "them",  "then",   "so",   "were",  "when",
    "what", "day",  "went",  "see",  "big", "very", "tree",  "home",   "play", "happy", "time",
    "like", "good", "old",   "man",  "dog", "cat",  "bird",  "sun",    "new",  "find",  "water",
    "back", "look", "down",  "some", "red", "ball", "house", "little", "girl"};

uint64_t load_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

double load_uniform(uint64_t *state)
{
    return (double)((load_random(state) >> 11) + 1) * 0x1p-53;
}

char *load_words(uint64_t *state, unsigned n)
{
    char *text = malloc((size_t)n * 8 + 1), *at = text;
    if (!text)
        return NULL;
    for (unsigned i = 0; i < n; i++) {
        const char *word = words[load_random(state) % (sizeof words / sizeof words[0])];
        if (i)
            *at++ = ' ';
        size_t bytes = strlen(word);
        memcpy(at, word, bytes);
        at += bytes;
    }
    *at = '\0';
    return text;
}

unsigned load_word_count(const struct load_options *o, unsigned tokens, bool whole_prompt)
{
    double n = (tokens - (whole_prompt ? o->base : 0)) / o->per_word;
    return n < 1 ? 1 : (unsigned)lround(n);
}

char *load_body(const struct load_options *o, const struct load_server *server, json_t *messages,
                unsigned max_tokens)
{
    json_t *body =
        json_pack("{s:O, s:i, s:b, s:f, s:{s:b}}", "messages", messages, "max_tokens", (int)max_tokens,
                  "stream", 1, "temperature", 0.0, "stream_options", "include_usage", 1);
    if (server->model[0])
        json_object_set_new(body, "model", json_string(server->model));
    if (!o->may_end)
        json_object_set_new(body, "ignore_eos", json_true());
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    return text;
}

static int find_model(const struct load_options *o, struct load_server *server, struct shm_error *err)
{
    char *text = NULL;
    if (o->model) {
        snprintf(server->model, sizeof server->model, "%s", o->model);
        return 0;
    }
    int rc = load_ask(&server->url[0], o, "/v1/models", NULL, &text, NULL, err);
    if (rc)
        return rc;
    json_t *all = json_loads(text, 0, NULL);
    const char *id =
        json_string_value(json_object_get(json_array_get(json_object_get(all, "data"), 0), "id"));
    if (!id)
        rc = shm_error_set(err, EPROTO, "%s: /v1/models names no model: use --model", server->name);
    else
        snprintf(server->model, sizeof server->model, "%s", id);
    json_decref(all);
    free(text);
    return rc;
}

static int prompt_tokens(const struct load_options *o, unsigned n, uint64_t *ret_tokens,
                         struct shm_error *err)
{
    const struct load_server *server = o->server[0];
    uint64_t state = o->seed * 31 + n;
    char *text = load_words(&state, n), *answer = NULL;
    json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", text ? text : "");
    char *body = load_body(o, server, messages, 1);
    int rc = text && body
                 ? load_ask(&server->url[0], o, "/v1/chat/completions", body, &answer, ret_tokens, err)
                 : shm_error_set(err, ENOMEM, "no memory");
    if (!rc && !*ret_tokens)
        rc = shm_error_set(err, EPROTO,
                           "%s: the stream ends without usage: stream_options.include_usage is needed",
                           server->name);
    json_decref(messages);
    free(body);
    free(text);
    free(answer);
    return rc;
}

int load_calibrate(struct load_options *o, struct shm_error *err)
{
    enum { FEW = 16, MANY = 144 };
    uint64_t few = 0, many = 0;
    int rc = 0;
    for (unsigned i = 0; !rc && i < o->servers; i++)
        rc = find_model(o, o->server[i], err);
    if (rc || (rc = prompt_tokens(o, FEW, &few, err)) || (rc = prompt_tokens(o, MANY, &many, err)))
        return rc;
    o->per_word = ((double)many - (double)few) / (MANY - FEW);
    if (!(o->per_word > 0.1))
        return shm_error_set(err, EPROTO, "%s: counts %llu tokens for %d words and %llu for %d",
                             o->server[0]->name, (unsigned long long)few, FEW, (unsigned long long)many,
                             MANY);
    o->base = (double)few - o->per_word * FEW;
    return 0;
}
