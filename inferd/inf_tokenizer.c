/* SPDX-License-Identifier: MIT */
#include "inferd/inf_tokenizer.h"
#include "inferd/inf_tokenizer_priv.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#define TOKENS_MAX      (1u << 22)
#define MERGES_MAX      (1u << 23)
#define TOKEN_BYTES_MAX 65535u
#define REMEDY          "check the model file, then restart expertd without keeping the arena"

/* The GPT-2 alphabet: printable Latin-1 bytes stand for themselves, the
 * others for U+0100 upwards in order of their value. */
#define ALPHABET_END 0x144

static void alphabet_init(int16_t byte_of[ALPHABET_END])
{
    int next = 0x100;
    for (int i = 0; i < ALPHABET_END; i++)
        byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool self = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        byte_of[self ? b : next++] = (int16_t)b;
    }
}

/* Writes at most len bytes; -1 where a character is outside the alphabet. */
static long alphabet_decode(const int16_t byte_of[ALPHABET_END], const char *in, size_t len, char *ret_out)
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned c = (unsigned char)in[i];
        if (c >= 0x80) {
            if ((c & 0xE0) != 0xC0 || i + 1 == len || ((unsigned char)in[i + 1] & 0xC0) != 0x80)
                return -1;
            c = (c & 0x1F) << 6 | ((unsigned char)in[++i] & 0x3F);
            if (c < 0x80) /* overlong */
                return -1;
        }
        if (c >= ALPHABET_END || byte_of[c] < 0)
            return -1;
        ret_out[n++] = (char)byte_of[c];
    }
    return (long)n;
}

/* SentencePiece: U+2581 is a space, <0xNN> a byte. Returns the length. */
static size_t spm_decode(const char *in, size_t len, int32_t type, char *ret_out)
{
    unsigned byte;
    char end;
    if (type == INF_TOKEN_BYTE && len == 6 && sscanf(in, "<0x%2X%c", &byte, &end) == 2 && end == '>') {
        *ret_out = (char)byte;
        return 1;
    }
    size_t n = 0;
    for (size_t i = 0; i < len; n++) {
        bool space = len - i >= 3 && !memcmp(in + i, "\xE2\x96\x81", 3);
        ret_out[n] = space ? ' ' : in[i];
        i += space ? 3 : 1;
    }
    return n;
}

int inf_ids_append(struct inf_ids *vec, const int32_t *ids, size_t n)
{
    if (n > vec->cap - vec->n) {
        size_t cap = vec->cap ? vec->cap : 64;
        while (cap - vec->n < n) {
            if (cap > SIZE_MAX / 2 / sizeof *ids)
                return -ENOMEM;
            cap *= 2;
        }
        int32_t *grown = realloc(vec->ids, cap * sizeof *ids);
        if (!grown)
            return -ENOMEM;
        vec->ids = grown;
        vec->cap = cap;
    }
    if (n)
        memcpy(vec->ids + vec->n, ids, n * sizeof *ids);
    vec->n += n;
    return 0;
}

void inf_ids_clear(struct inf_ids *vec)
{
    free(vec->ids);
    *vec = (struct inf_ids){0};
}

/* A private, checked copy of the offsets: the writer may change the mapping
 * at any time, so nothing there is looked at twice. */
static int copy_offsets(const struct inf_string_table *table, const char *what, uint32_t n_max,
                        struct shm_error *err, uint32_t **ret_offsets)
{
    if (table->n > n_max)
        return shm_error_set(err, EINVAL, "tokenizer: %u %ss, at most %u are supported; " REMEDY, table->n,
                             what, n_max);
    if (!table->offsets || (!table->bytes && table->size_bytes))
        return shm_error_set(err, EINVAL, "tokenizer: no table of %ss; " REMEDY, what);
    uint32_t *offsets = malloc(((size_t)table->n + 1) * sizeof *offsets);
    if (!offsets)
        return shm_error_set(err, ENOMEM, "tokenizer: no memory for %u %ss; free some", table->n, what);
    memcpy(offsets, table->offsets, ((size_t)table->n + 1) * sizeof *offsets);
    for (uint32_t i = 0; i < table->n; i++) {
        if (offsets[i] > offsets[i + 1] || offsets[i + 1] > table->size_bytes ||
            offsets[i + 1] - offsets[i] > TOKEN_BYTES_MAX) {
            shm_error_set(err, EINVAL,
                          "tokenizer: %s %u spans bytes %u to %u of a table of %llu (ascending, at most %u "
                          "each); " REMEDY,
                          what, i, offsets[i], offsets[i + 1], (unsigned long long)table->size_bytes,
                          TOKEN_BYTES_MAX);
            free(offsets);
            return -EINVAL;
        }
    }
    *ret_offsets = offsets;
    return 0;
}

static uint32_t table_size(uint32_t n)
{
    uint32_t size = 16;
    while (size < n + n / 2 + 1)
        size *= 2;
    return size;
}

static int name_table_init(struct inf_name_table *table, uint32_t n, struct shm_error *err)
{
    uint32_t size = table_size(n);
    table->slots = malloc(size * sizeof *table->slots);
    if (!table->slots)
        return shm_error_set(err, ENOMEM, "tokenizer: no memory for %u tokens; free some", n);
    memset(table->slots, 0xFF, size * sizeof *table->slots);
    table->mask = size - 1;
    return 0;
}

static int name_insert(struct inf_tokenizer *tok, struct inf_name_table *table, uint32_t id,
                       struct shm_error *err)
{
    uint32_t hash, len = tok->offsets[id + 1] - tok->offsets[id];
    struct inf_name_slot *slot = inf_name_find(tok, table, tok->bytes + tok->offsets[id], len, &hash);
    if (slot->id >= 0)
        return shm_error_set(err, EINVAL, "tokenizer: tokens %d and %u are the same, \"%.*s\"; " REMEDY,
                             slot->id, id, (int)(len < 64 ? len : 64), tok->bytes + tok->offsets[id]);
    *slot = (struct inf_name_slot){.hash = hash, .id = (int32_t)id};
    return 0;
}

/* Copies, classifies and decodes the tokens, and fills the name tables. */
static int load_tokens(struct inf_tokenizer *tok, const struct inf_tokenizer_src *src,
                       const int16_t byte_of[ALPHABET_END], struct shm_error *err)
{
    uint32_t *in = NULL, n_special = 0;
    int rc = copy_offsets(&src->tokens, "token", TOKENS_MAX, err, &in);
    if (rc)
        return rc;
    uint32_t n = tok->n_tokens = src->tokens.n;
    bool *mapped = calloc((size_t)n + 1, sizeof *mapped);
    char *raw = malloc(TOKEN_BYTES_MAX + 1);
    tok->offsets = malloc(((size_t)n + 1) * sizeof *tok->offsets);
    tok->bytes = malloc((size_t)in[n] - in[0] + 1);
    tok->types = malloc((size_t)n + 1);
    if (!mapped || !raw || !tok->offsets || !tok->bytes || !tok->types) {
        rc = shm_error_set(err, ENOMEM, "tokenizer: no memory for %u tokens; free some", n);
        goto out;
    }
    uint32_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t len = in[i + 1] - in[i];
        int32_t type = src->types ? src->types[i] : INF_TOKEN_NORMAL;
        if (type < INF_TOKEN_NORMAL || type > INF_TOKEN_BYTE) {
            rc = shm_error_set(err, EINVAL, "tokenizer: token %u has type %d, known are 1 to 6; " REMEDY, i,
                               type);
            goto out;
        }
        tok->types[i] = (uint8_t)type;
        tok->offsets[i] = at;
        bool special = type == INF_TOKEN_CONTROL || type == INF_TOKEN_USER_DEFINED;
        long got = -1;
        if (len)
            memcpy(raw, src->tokens.bytes + in[i], len);
        raw[len] = '\0';
        if (!special && tok->spm)
            got = (long)spm_decode(raw, len, type, tok->bytes + at);
        else if (!special)
            got = alphabet_decode(byte_of, raw, len, tok->bytes + at);
        if (got < 0 && len) /* written as it is */
            memcpy(tok->bytes + at, raw, len);
        mapped[i] = got > 0 && type != INF_TOKEN_UNKNOWN && type != INF_TOKEN_UNUSED;
        if (tok->spm && type == INF_TOKEN_BYTE) { /* stands in where no token has the character */
            mapped[i] = false;
            if (got == 1 && tok->byte_ids[(unsigned char)tok->bytes[at]] < 0)
                tok->byte_ids[(unsigned char)tok->bytes[at]] = (int32_t)i;
        }
        if (got >= 0)
            len = (size_t)got;
        n_special += special;
        at += (uint32_t)len;
        if (len > tok->longest)
            tok->longest = len;
    }
    tok->offsets[n] = at;
    if ((rc = name_table_init(&tok->normal, n, err)) || (rc = name_table_init(&tok->special, n_special, err)))
        goto out;
    for (uint32_t i = 0; i < n && !rc; i++) {
        if (mapped[i])
            rc = name_insert(tok, &tok->normal, i, err);
        else if ((tok->types[i] == INF_TOKEN_CONTROL || tok->types[i] == INF_TOKEN_USER_DEFINED) &&
                 tok->offsets[i + 1] > tok->offsets[i])
            rc = name_insert(tok, &tok->special, i, err);
    }
out:
    free(raw);
    free(mapped);
    free(in);
    return rc;
}

static int longer_first(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

/* What the search for special tokens needs: first bytes and lengths. */
static int index_special(struct inf_tokenizer *tok, struct shm_error *err)
{
    bool *seen = calloc(TOKEN_BYTES_MAX + 1, sizeof *seen);
    if (!seen)
        goto no_memory;
    for (uint32_t i = 0; i <= tok->special.mask; i++) {
        int32_t id = tok->special.slots[i].id;
        if (id < 0)
            continue;
        uint32_t len = tok->offsets[id + 1] - tok->offsets[id];
        tok->special_first[(unsigned char)tok->bytes[tok->offsets[id]]] = true;
        tok->n_special_lens += !seen[len];
        seen[len] = true;
    }
    tok->special_lens = malloc((tok->n_special_lens + 1) * sizeof *tok->special_lens);
    if (!tok->special_lens)
        goto no_memory;
    for (uint32_t len = 0, n = 0; len <= TOKEN_BYTES_MAX; len++)
        if (seen[len])
            tok->special_lens[n++] = len;
    qsort(tok->special_lens, tok->n_special_lens, sizeof *tok->special_lens, longer_first);
    free(seen);
    return 0;
no_memory:
    free(seen);
    return shm_error_set(err, ENOMEM, "tokenizer: no memory for the control tokens; free some");
}

static int32_t find_normal(const struct inf_tokenizer *tok, const char *bytes, size_t len)
{
    uint32_t hash;
    return inf_name_find(tok, &tok->normal, bytes, len, &hash)->id;
}

static int load_merges(struct inf_tokenizer *tok, const struct inf_tokenizer_src *src,
                       const int16_t byte_of[ALPHABET_END], struct shm_error *err)
{
    uint32_t *in = NULL;
    int rc = copy_offsets(&src->merges, "merge", MERGES_MAX, err, &in);
    if (rc)
        return rc;
    uint32_t n = src->merges.n, size = table_size(n);
    char *raw = malloc(TOKEN_BYTES_MAX), *word = malloc(TOKEN_BYTES_MAX);
    tok->pairs = malloc(size * sizeof *tok->pairs);
    if (!raw || !word || !tok->pairs) {
        rc = shm_error_set(err, ENOMEM, "tokenizer: no memory for %u merges; free some", n);
        goto out;
    }
    memset(tok->pairs, 0xFF, size * sizeof *tok->pairs);
    tok->pair_mask = size - 1;
    for (uint32_t i = 0; i < n; i++) {
        size_t len = in[i + 1] - in[i];
        int32_t left = -1, right = -1, both = -1;
        long n_left = -1, n_right = -1;
        if (len)
            memcpy(raw, src->merges.bytes + in[i], len);
        const char *space = len ? memchr(raw, ' ', len) : NULL;
        if (space) {
            size_t cut = (size_t)(space - raw);
            n_left = alphabet_decode(byte_of, raw, cut, word);
            if (n_left > 0)
                n_right = alphabet_decode(byte_of, space + 1, len - cut - 1, word + n_left);
        }
        if (n_right > 0) {
            left = find_normal(tok, word, (size_t)n_left);
            right = find_normal(tok, word + n_left, (size_t)n_right);
            both = find_normal(tok, word, (size_t)(n_left + n_right));
        }
        if (left < 0 || right < 0 || both < 0) {
            rc = shm_error_set(err, EINVAL,
                               "tokenizer: merge %u, \"%.*s\", does not join two tokens to a third; " REMEDY,
                               i, (int)(len < 64 ? len : 64), raw);
            goto out;
        }
        uint64_t key = inf_pair_key(left, right);
        struct inf_pair_slot *slot = inf_pair_find(tok, key);
        if (slot->rank != INF_NO_RANK) {
            rc = shm_error_set(err, EINVAL, "tokenizer: merges %u and %u are the same, \"%.*s\"; " REMEDY,
                               slot->rank, i, (int)(len < 64 ? len : 64), raw);
            goto out;
        }
        *slot = (struct inf_pair_slot){.key = key, .rank = i, .id = both};
    }
out:
    free(word);
    free(raw);
    free(in);
    return rc;
}

static void add_stop(struct inf_tokenizer *tok, int32_t id)
{
    if (id >= 0 && !inf_tokenizer_is_stop(tok, id))
        tok->stop_ids[tok->n_stop_ids++] = id;
}

static int32_t find_special(const struct inf_tokenizer *tok, const char *text)
{
    uint32_t hash;
    return inf_name_find(tok, &tok->special, text, strlen(text), &hash)->id;
}

static int check_special_ids(struct inf_tokenizer *tok, const struct inf_tokenizer_src *src,
                             struct shm_error *err)
{
    const struct {
        const char *name;
        int32_t id;
    } ids[] = {{"bos", src->bos_id}, {"eos", src->eos_id}};
    for (int i = 0; i < 2; i++)
        if (ids[i].id < -1 || (ids[i].id >= 0 && (uint32_t)ids[i].id >= tok->n_tokens))
            return shm_error_set(err, EINVAL, "tokenizer: %s token %d is not among the %u tokens; " REMEDY,
                                 ids[i].name, ids[i].id, tok->n_tokens);
    tok->bos_id = ids[0].id;
    tok->eos_id = ids[1].id;
    tok->add_bos = src->add_bos;
    if (tok->add_bos && tok->bos_id < 0)
        return shm_error_set(err, EINVAL,
                             "tokenizer: the model wants a bos token in front but names none; " REMEDY);
    static const char *const ends[] = {"<|im_end|>", "<|endoftext|>",         "<|eot_id|>",
                                       "<|eom_id|>", "<|end_of_text|>",       "<|return|>",
                                       "<|call|>",   "<｜end▁of▁sentence｜>", "</s>"};
    static const char *const glm_ends[] = {"<|user|>", "<|observation|>"};
    add_stop(tok, tok->eos_id);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        add_stop(tok, find_special(tok, ends[i]));
    for (size_t i = 0; i < 2 && find_special(tok, "[gMASK]") >= 0; i++)
        add_stop(tok, find_special(tok, glm_ends[i]));
    return 0;
}

/* Scores to ranks: the same order, as whole numbers from the best on. */
static int load_scores(struct inf_tokenizer *tok, const struct inf_tokenizer_src *src, struct shm_error *err)
{
    if (!src->scores)
        return shm_error_set(err, EINVAL, "tokenizer: no table of scores; " REMEDY);
    tok->ranks = malloc(((size_t)tok->n_tokens + 1) * sizeof *tok->ranks);
    if (!tok->ranks)
        return shm_error_set(err, ENOMEM, "tokenizer: no memory for %u scores; free some", tok->n_tokens);
    for (uint32_t i = 0; i < tok->n_tokens; i++) {
        float score = src->scores[i];
        uint32_t bits;
        if (!isfinite(score))
            return shm_error_set(err, EINVAL, "tokenizer: the score of token %u is no number; " REMEDY, i);
        score += 0.0f; /* -0 is 0 */
        memcpy(&bits, &score, sizeof bits);
        tok->ranks[i] = bits >> 31 ? bits : ~(bits | 1u << 31);
    }
    return 0;
}

int inf_tokenizer_create(const struct inf_tokenizer_src *src, struct shm_error *err,
                         struct inf_tokenizer **ret_tok)
{
    int16_t byte_of[ALPHABET_END];
    struct inf_tokenizer *tok = calloc(1, sizeof *tok);
    if (!tok)
        return shm_error_set(err, ENOMEM, "tokenizer: no memory; free some");
    pthread_mutex_init(&tok->lock, NULL);
    if (getrandom(&tok->seed, sizeof tok->seed, GRND_NONBLOCK) != sizeof tok->seed)
        tok->seed = (uint64_t)time(NULL);
    alphabet_init(byte_of);
    tok->spm = src->spm;
    tok->add_space_prefix = src->spm && src->add_space_prefix;
    for (int b = 0; b < 256; b++)
        tok->byte_ids[b] = -1;
    int rc = load_tokens(tok, src, byte_of, err);
    if (rc || (rc = index_special(tok, err)) || (rc = check_special_ids(tok, src, err)))
        goto fail;
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        if (!tok->spm)
            tok->byte_ids[b] = find_normal(tok, &byte, 1);
        if (tok->byte_ids[b] < 0) {
            rc = shm_error_set(
                err, EINVAL,
                "tokenizer: no token for the byte 0x%02x; a vocabulary needs one for each; " REMEDY, b);
            goto fail;
        }
    }
    if (tok->spm ? (rc = load_scores(tok, src, err))
                 : (rc = load_merges(tok, src, byte_of, err)) ||
                       (rc = inf_pretok_create(src->pre, src->pre_len, err, &tok->pretok)))
        goto fail;
    tok->whole_words = !tok->spm && inf_pretok_whole_words(tok->pretok);
    tok->words = calloc(INF_WORDS, sizeof *tok->words);
    if (!tok->words) {
        rc = shm_error_set(err, ENOMEM, "tokenizer: no memory for the word cache; free some");
        goto fail;
    }
    *ret_tok = tok;
    return 0;
fail:
    inf_tokenizer_destroy(&tok);
    return rc;
}

void inf_tokenizer_destroy(struct inf_tokenizer **tok)
{
    struct inf_tokenizer *t = tok ? *tok : NULL;
    if (!t)
        return;
    free(t->work);
    free(t->words);
    free(t->ranks);
    inf_pretok_destroy(&t->pretok);
    free(t->special_lens);
    free(t->pairs);
    free(t->special.slots);
    free(t->normal.slots);
    free(t->types);
    free(t->bytes);
    free(t->offsets);
    pthread_mutex_destroy(&t->lock);
    free(t);
    *tok = NULL;
}

int inf_tokenizer_bytes(const struct inf_tokenizer *tok, int32_t id, const char **ret_bytes, size_t *ret_len)
{
    if (id < 0 || (uint32_t)id >= tok->n_tokens)
        return -ERANGE;
    *ret_bytes = tok->bytes + tok->offsets[id];
    *ret_len = tok->offsets[id + 1] - tok->offsets[id];
    return 0;
}

int32_t inf_tokenizer_find(const struct inf_tokenizer *tok, const char *bytes, size_t len)
{
    uint32_t hash;
    int32_t id = inf_name_find(tok, &tok->special, bytes, len, &hash)->id;
    if (id < 0)
        id = find_normal(tok, bytes, len);
    return id < 0 ? -ENOENT : id;
}

uint32_t inf_tokenizer_size(const struct inf_tokenizer *tok)
{
    return tok->n_tokens;
}

size_t inf_tokenizer_longest(const struct inf_tokenizer *tok)
{
    return tok->longest;
}

bool inf_tokenizer_is_control(const struct inf_tokenizer *tok, int32_t id)
{
    return id >= 0 && (uint32_t)id < tok->n_tokens && tok->types[id] == INF_TOKEN_CONTROL;
}

bool inf_tokenizer_is_stop(const struct inf_tokenizer *tok, int32_t id)
{
    for (unsigned i = 0; i < tok->n_stop_ids; i++)
        if (tok->stop_ids[i] == id)
            return true;
    return false;
}
