/* SPDX-License-Identifier: MIT */
/*
 * Any bytes through the tokenizer and back: the tokens' bytes are the input,
 * and the detokenizer's text is UTF-8. The first byte picks the flags.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/inf_detok.h"
#include "inferd/inf_utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/tok_fixture.h"

#define MUST(what) ((what) ? (void)0 : abort())

static void check_utf8(const char *text, size_t len)
{
    size_t step;
    for (size_t i = 0; i < len; i += step)
        MUST(inf_utf8_step((const unsigned char *)text + i, len - i, &step) == INF_UTF8_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct inf_tokenizer *tok;
    struct inf_ids ids = {0};
    struct inf_detok *detok = NULL;
    const char *bytes;
    size_t at = 0, n;
    if (!tok)
        tok = tok_fixture_tokenizer();
    if (!size)
        return 0;
    unsigned flags = *data & INF_ENCODE_SPECIAL;
    MUST(inf_detok_create(tok, *data & 2, &detok) == 0);
    data++;
    size--;
    MUST(inf_tokenizer_encode(tok, (const char *)data, size, flags, NULL, &ids) == 0);
    for (size_t i = 0; i < ids.n; i++) {
        MUST(inf_tokenizer_bytes(tok, ids.ids[i], &bytes, &n) == 0);
        MUST(n <= size - at && !memcmp(data + at, bytes, n));
        at += n;
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
