/* SPDX-License-Identifier: MIT */
/*
 * Any bytes through each kind of tokenizer and back: the tokens' bytes are the
 * input, and the detokenizer's text is UTF-8. The first byte picks the flags
 * and the kind.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_detok.h"
#include "inferd/inf_utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/tok_fixture.h"

#define MUST(what) ((what) ? (void)0 : abort())
#define SPM        9 /* the kinds before it are pre-tokenizers */

static void check_utf8(const char *text, size_t len)
{
    size_t step;
    for (size_t i = 0; i < len; i += step)
        MUST(inf_utf8_step((const unsigned char *)text + i, len - i, &step) == INF_UTF8_OK);
}

/* 256 bytes, some characters, and pairs and quadruples of them. */
static struct inf_tokenizer *spm(void)
{
    static const char *const units[] = {"\xE2\x96\x81", "a", "b", "e", "t", "\xC3\xA9", "\xE6\x97\xA5", "1"};
    enum { UNITS = sizeof units / sizeof units[0], N = 2 + 256 + UNITS + UNITS * UNITS + UNITS * UNITS };
    static char bytes[N * 16];
    static uint32_t offsets[N + 1];
    static int32_t types[N];
    static float scores[N];
    struct inf_tokenizer_src src = {
        .types = types, .scores = scores, .spm = true, .add_space_prefix = true, .bos_id = -1, .eos_id = 1};
    struct inf_tokenizer *tok = NULL;
    uint32_t n = 0, at = 0;
    for (int i = 0; i < N; i++) {
        int k = i - 258 - UNITS, q = k - UNITS * UNITS;
        char *to = bytes + at;
        size_t room = sizeof bytes - at;
        types[i] = i < 2 ? INF_TOKEN_CONTROL : i < 258 ? INF_TOKEN_BYTE : INF_TOKEN_NORMAL;
        scores[i] = (float)((i * 37) % 101) - 50;
        int len = i < 2     ? snprintf(to, room, i ? "</s>" : "<s>")
                  : i < 258 ? snprintf(to, room, "<0x%02X>", i - 2)
                  : k < 0   ? snprintf(to, room, "%s", units[i - 258])
                  : q < 0   ? snprintf(to, room, "%s%s", units[k / UNITS], units[k % UNITS])
                            : snprintf(to, room, "%s%s%s%s", units[q / UNITS], units[q % UNITS],
                                       units[q / UNITS], units[q % UNITS]);
        offsets[n++] = at;
        at += (uint32_t)len;
    }
    offsets[n] = at;
    src.tokens = (struct inf_string_table){.n = n, .offsets = offsets, .bytes = bytes, .size_bytes = at};
    MUST(inf_tokenizer_create(&src, NULL, &tok) == 0);
    return tok;
}

static struct inf_tokenizer *tokenizer(unsigned kind)
{
    static const char *const pre[SPM] = {"qwen2", "llama-bpe",   "glm4",         "gpt-4o",        "tekken",
                                         "qwen2", "deepseek-v3", "deepseek-llm", "deepseek-coder"};
    static struct inf_tokenizer *toks[SPM + 1];
    if (toks[kind])
        return toks[kind];
    if (kind == SPM)
        return toks[kind] = spm();
    struct tok_fixture f;
    tok_fixture_open(&f);
    f.src.pre = pre[kind];
    f.src.pre_len = strlen(pre[kind]);
    MUST(inf_tokenizer_create(&f.src, NULL, &toks[kind]) == 0);
    tok_fixture_close(&f);
    return toks[kind];
}

/* What SentencePiece makes of the input: a space in front of it and behind special tokens, U+2581 is one. */
static bool next_is(const uint8_t *data, size_t size, size_t *at, char byte)
{
    if (size - *at >= 3 && !memcmp(data + *at, "\xE2\x96\x81", 3) && byte == ' ') {
        *at += 3;
        return true;
    }
    if (*at < size && (char)data[*at] == byte) {
        ++*at;
        return true;
    }
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct inf_ids ids = {0};
    struct inf_detok *detok = NULL;
    const char *bytes;
    size_t at = 0, n;
    if (!size)
        return 0;
    unsigned flags = *data & INF_ENCODE_SPECIAL, kind = (*data >> 2) % (SPM + 1);
    struct inf_tokenizer *tok = tokenizer(kind);
    MUST(inf_detok_create(tok, *data & 2, &detok) == 0);
    data++;
    size--;
    MUST(inf_tokenizer_encode(tok, (const char *)data, size, flags, NULL, &ids) == 0);
    bool prefix = kind == SPM; /* a space that is not in the input may come */
    for (size_t i = 0; i < ids.n; i++) {
        MUST(inf_tokenizer_bytes(tok, ids.ids[i], &bytes, &n) == 0);
        if (inf_tokenizer_is_control(tok, ids.ids[i])) {
            MUST(flags && n <= size - at && !memcmp(data + at, bytes, n));
            at += n;
            prefix = kind == SPM;
        } else {
            for (size_t k = 0; k < n; k++, prefix = false)
                MUST(prefix        ? bytes[k] == ' '
                     : kind == SPM ? next_is(data, size, &at, bytes[k])
                                   : at < size && (char)data[at++] == bytes[k]);
        }
        MUST(inf_detok_push(detok, ids.ids[i], &bytes, &n) == 0);
        check_utf8(bytes, n);
    }
    MUST(at == size);
    inf_detok_flush(detok, &bytes, &n);
    check_utf8(bytes, n);
    inf_detok_destroy(&detok);
    inf_ids_clear(&ids);
    return 0;
}
