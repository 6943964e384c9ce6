/* SPDX-License-Identifier: MIT */
/*
 * mkmodel: a byte-level BPE vocabulary in which every word is one token, and
 * texts of a known number of tokens.
 *
 * Words are a space and two or three syllables (consonant, vowel), the
 * consonants of each place being its own. So merges never compete: the only
 * way to merge " bacada" ends in its one token.
 */
#include "tools/mkm_model.h"
#include "tools/mkm_rng.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ENTRY_BYTES_MAX 28u
#define SYLLABLES       140u

static const char vowels[] = "aeiouAEIOU";
static const char consonants[] = "bcdfghjklmnpqrstvwxyzBCDFGHJKLMNPQRSTVWXYZ";
static const char *const specials[MKM_SPECIALS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
static const char space[] = "\xc4\xa0"; /* U+0120, the stand-in of byte 32 */

static size_t put_string(char *to, const char *text)
{
    uint64_t n = strlen(text);

    memcpy(to, &n, 8);
    memcpy(to + 8, text, n);
    return 8 + n;
}

static void put_token(struct mkm_vocab *v, const char *text)
{
    v->token_at[v->n_tokens++] = v->tokens_bytes;
    v->tokens_bytes += put_string(v->tokens + v->tokens_bytes, text);
}

/* False when the vocabulary is full. */
static bool merge(struct mkm_vocab *v, const char *left, const char *right)
{
    char text[ENTRY_BYTES_MAX];

    if (v->n_tokens == v->n_words)
        return false;
    snprintf(text, sizeof text, "%s%s", left, right);
    put_token(v, text);
    snprintf(text, sizeof text, "%s %s", left, right);
    v->merges_bytes += put_string(v->merges + v->merges_bytes, text);
    v->n_merges++;
    return true;
}

static const char *syllable(unsigned place, unsigned i, char ret_text[3])
{
    ret_text[0] = consonants[place * 14 + i / 10];
    ret_text[1] = vowels[i % 10];
    ret_text[2] = 0;
    return ret_text;
}

/* The printable stand-ins of the 256 bytes: themselves where printable, else 256, 257... */
static void put_bytes(struct mkm_vocab *v)
{
    unsigned extra = 256;

    for (unsigned b = 0; b < 256; b++) {
        bool keep = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        unsigned c = keep ? b : extra++;
        char text[3] = {(char)c};
        if (c >= 128) {
            text[0] = (char)(0xc0 | c >> 6);
            text[1] = (char)(0x80 | (c & 63));
        }
        put_token(v, text);
    }
}

static void put_words(struct mkm_vocab *v)
{
    char a[3], b[3], c[3], left[8], word[12];

    for (unsigned p = 0; p < 3; p++) {
        for (unsigned i = 0; i < SYLLABLES; i++) {
            syllable(p, i, a);
            merge(v, (char[2]){a[0]}, (char[2]){a[1]});
        }
    }
    for (unsigned i = 0; i < SYLLABLES; i++)
        merge(v, space, syllable(0, i, a));
    v->first_word = v->n_tokens;
    for (unsigned n = 2; n <= 3; n++) {
        for (unsigned i = 0; i < SYLLABLES * SYLLABLES; i++) {
            snprintf(left, sizeof left, "%s%s", space, syllable(0, i / SYLLABLES, a));
            syllable(1, i % SYLLABLES, b);
            if (n == 2) {
                if (!merge(v, left, b))
                    return;
                continue;
            }
            snprintf(word, sizeof word, "%s%s", left, b);
            for (unsigned j = 0; j < SYLLABLES; j++)
                if (!merge(v, word, syllable(2, j, c)))
                    return;
        }
    }
}

int mkm_vocab_make(uint32_t vocab, struct mkm_vocab *ret_vocab)
{
    struct mkm_vocab v = {.n_words = vocab - MKM_SPECIALS};

    v.tokens = malloc((size_t)vocab * ENTRY_BYTES_MAX);
    v.merges = malloc((size_t)vocab * ENTRY_BYTES_MAX);
    v.token_at = malloc(vocab * sizeof *v.token_at);
    if (!v.tokens || !v.merges || !v.token_at) {
        mkm_vocab_free(&v);
        return -ENOMEM;
    }
    put_bytes(&v);
    put_words(&v); /* 2.7 million words are possible: every allowed vocabulary is filled */
    for (unsigned i = 0; i < MKM_SPECIALS; i++)
        put_token(&v, specials[i]);
    *ret_vocab = v;
    return 0;
}

void mkm_vocab_free(struct mkm_vocab *v)
{
    free(v->tokens);
    free(v->merges);
    free(v->token_at);
    *v = (struct mkm_vocab){0};
}

int mkm_text(const struct mkm_shape *shape, const struct mkm_vocab *v, uint64_t n, FILE *out)
{
    uint64_t state = mkm_stream(shape->seed, MKM_STREAM_TEXT, 0, 0);

    for (uint64_t i = 0; i < n && !ferror(out); i++) {
        uint32_t id = v->first_word + mkm_below(&state, v->n_words - v->first_word);
        const char *token = v->tokens + v->token_at[id];
        uint64_t bytes;
        memcpy(&bytes, token, 8);
        fputc(' ', out);
        fwrite(token + 8 + 2, 1, bytes - 2, out); /* without the space's stand-in */
    }
    return fflush(out) || ferror(out) ? -EIO : 0;
}
