/* SPDX-License-Identifier: MIT */
#include "inferd/inf_pretok.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <errno.h>
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Unicode White_Space written out: PCRE2's \s also takes U+180E, and
 * \p{White_Space} needs 10.40. For use inside a class. */
#define WS                                                                                                   \
    "\\t-\\r\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

/* The cased letters of the first DeepSeek models: a list, not a property. */
#define CASED                                                                                                \
    "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}"                           \
    "\\x{1C4}-\\x{293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37B}-\\x{37D}"                   \
    "\\x{37F}\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}\\x{3A3}-\\x{3F5}"                            \
    "\\x{3F7}-\\x{481}\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}"                                 \
    "\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}"                           \
    "\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}"                           \
    "\\x{1F18}-\\x{1F1D}\\x{1F20}-\\x{1F45}\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}\\x{1F59}"                  \
    "\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}\\x{1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}\\x{1FBE}"                   \
    "\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}\\x{1FD0}-\\x{1FD3}\\x{1FD6}-\\x{1FDB}"                           \
    "\\x{1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}\\x{1FF6}-\\x{1FFC}\\x{2102}\\x{2107}"                            \
    "\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}\\x{2124}\\x{2126}\\x{2128}"                             \
    "\\x{212A}-\\x{212D}\\x{212F}-\\x{2134}\\x{2139}\\x{213C}-\\x{213F}\\x{2145}-\\x{2149}"                  \
    "\\x{214E}\\x{2183}\\x{2184}\\x{2C00}-\\x{2C7B}\\x{2C7E}-\\x{2CE4}\\x{2CEB}-\\x{2CEE}"                   \
    "\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}\\x{A680}-\\x{A69B}\\x{A722}-\\x{A76F}"                            \
    "\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}\\x{AB70}-\\x{ABBF}\\x{FB00}-\\x{FB06}"                           \
    "\\x{FB13}-\\x{FB17}\\x{FF21}-\\x{FF3A}\\x{FF41}-\\x{FF5A}\\x{10400}-\\x{1044F}"                         \
    "\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}\\x{10C80}-\\x{10CB2}\\x{10CC0}-\\x{10CF2}"                   \
    "\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}"

#define SUFFIX   "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WORD     "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
#define UPPER    "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define CAMEL_1  "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+"
#define CAMEL_2  "[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*"
#define SIGNS    " ?[^" WS "\\p{L}\\p{N}]+"
#define SPACES   "[" WS "]*[\\r\\n]+|[" WS "]+(?![^" WS "])|[" WS "]+"
#define IDEOGRAM "[\\x{4E00}-\\x{9FA5}\\x{800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]+"

/* A row for each way to cut, under the names that GGUF files carry in
 * tokenizer.ggml.pre. A pattern after the first cuts the pieces of the one
 * before; what a pattern does not match is a piece of its own. */
static const struct pretok_row {
    const char *names[4];
    const char *patterns[INF_PRETOK_STAGES];
    bool whole_words;
} pretok_rows[] = {
    {{"qwen2", "deepseek-r1-qwen"}, {SUFFIX "|" WORD "|\\p{N}|" SIGNS "[\\r\\n]*|" SPACES}, false},
    {{"llama-bpe", "llama3", "llama-v3"}, {SUFFIX "|" WORD "|\\p{N}{1,3}|" SIGNS "[\\r\\n]*|" SPACES}, true},
    {{"glm4", "chatglm-bpe"}, {SUFFIX "|" WORD "|\\p{N}{1,3}|" SIGNS "[\\r\\n]*|" SPACES}, false},
    {{"gpt-4o", "llama4"},
     {CAMEL_1 SUFFIX "?|" CAMEL_2 SUFFIX "?|\\p{N}{1,3}|" SIGNS "[\\r\\n/]*|" SPACES},
     false},
    {{"tekken"}, {CAMEL_1 "|" CAMEL_2 "|\\p{N}|" SIGNS "[\\r\\n/]*|" SPACES}, true},
    {{"deepseek-v3"},
     {"\\p{N}{1,3}", "[\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{30FF}]+",
      "[!-/:-@\\[-`{-~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
      "?[\\p{P}\\p{S}]+[\\r\\n]*|" SPACES},
     false},
    {{"deepseek-llm"},
     {"[\\r\\n]", "[" WS "]?[" CASED "]+",
      "[" WS "]?[!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}]+",
      "[" WS "]+$", IDEOGRAM, "\\p{N}"},
     false},
    {{"deepseek-coder"}, {"[\\r\\n]", "[" WS "]?\\p{L}+", "[" WS "]?\\p{P}+", IDEOGRAM, "\\p{N}"}, false},
};

#define N_ROWS (sizeof pretok_rows / sizeof pretok_rows[0])

struct inf_pretok {
    pcre2_code *code[INF_PRETOK_STAGES];
    size_t end[INF_PRETOK_STAGES]; /* of the piece that each stage is in */
    unsigned n;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    bool jit, whole_words;
};

void inf_pretok_destroy(struct inf_pretok **pretok)
{
    struct inf_pretok *p = pretok ? *pretok : NULL;
    if (!p)
        return;
    pcre2_jit_stack_free(p->stack);
    pcre2_match_context_free(p->context);
    pcre2_match_data_free(p->match);
    for (unsigned i = 0; i < p->n; i++)
        pcre2_code_free(p->code[i]);
    free(p);
    *pretok = NULL;
}

static const struct pretok_row *find_row(const char *name, size_t name_len)
{
    for (size_t i = 0; i < N_ROWS; i++)
        for (size_t k = 0; k < sizeof pretok_rows[i].names / sizeof pretok_rows[i].names[0]; k++) {
            const char *known = pretok_rows[i].names[k];
            if (known && strlen(known) == name_len && !memcmp(known, name, name_len))
                return &pretok_rows[i];
        }
    return NULL;
}

int inf_pretok_create(const char *name, size_t name_len, struct shm_error *err,
                      struct inf_pretok **ret_pretok)
{
    const struct pretok_row *row = find_row(name, name_len);
    if (!row) {
        char known[160] = "";
        size_t used = 0;
        for (size_t i = 0; i < N_ROWS; i++)
            used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                                     pretok_rows[i].names[0]);
        return shm_error_set(err, ENOTSUP,
                             "tokenizer: pre-tokenizer \"%.*s\" (tokenizer.ggml.pre) is not supported; "
                             "use a model with one of %s",
                             (int)(name_len < 64 ? name_len : 64), name, known);
    }
    struct inf_pretok *p = calloc(1, sizeof *p);
    if (!p)
        return shm_error_set(err, ENOMEM, "tokenizer: no memory for the pre-tokenizer; free some");
    p->whole_words = row->whole_words;
    p->jit = true;
    for (; p->n < INF_PRETOK_STAGES && row->patterns[p->n]; p->n++) {
        int code = 0;
        PCRE2_SIZE offset = 0;
        p->code[p->n] = pcre2_compile((PCRE2_SPTR)row->patterns[p->n], PCRE2_ZERO_TERMINATED,
                                      PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY, &code, &offset, NULL);
        if (!p->code[p->n]) {
            char text[128];
            pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
            inf_pretok_destroy(&p);
            return shm_error_set(err, EINVAL,
                                 "tokenizer: this PCRE2 refuses the pattern of \"%s\" at %zu: %s; "
                                 "install PCRE2 built with Unicode support",
                                 row->names[0], (size_t)offset, text);
        }
        /* Writable and executable memory may be forbidden; matching then runs interpreted. */
        p->jit = p->jit && pcre2_jit_compile(p->code[p->n], PCRE2_JIT_COMPLETE) == 0;
    }
    p->match = pcre2_match_data_create(1, NULL);
    p->context = pcre2_match_context_create(NULL);
    if (!p->match || !p->context) {
        inf_pretok_destroy(&p);
        return shm_error_set(err, ENOMEM, "tokenizer: no memory for the pre-tokenizer; free some");
    }
    if (p->jit) {
        p->stack = pcre2_jit_stack_create(32 * 1024, 1024 * 1024, NULL);
        if (p->stack)
            pcre2_jit_stack_assign(p->context, NULL, p->stack);
    }
    *ret_pretok = p;
    return 0;
}

bool inf_pretok_whole_words(const struct inf_pretok *p)
{
    return p->whole_words;
}

static long next_of(struct inf_pretok *p, const pcre2_code *code, const char *text, size_t len, size_t pos)
{
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (p->jit)
        rc = pcre2_jit_match(code, (PCRE2_SPTR)text, len, pos, PCRE2_NO_UTF_CHECK, p->match, p->context);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH)
        rc = pcre2_match(code, (PCRE2_SPTR)text, len, pos, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, p->match,
                         p->context);
    if (rc == PCRE2_ERROR_NOMATCH)
        return (long)(len - pos);
    if (rc == PCRE2_ERROR_NOMEMORY)
        return -ENOMEM;
    if (rc < 0)
        return -E2BIG;
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(p->match);
    if (at[0] > pos) /* a gap between matches is a piece of its own */
        return (long)(at[0] - pos);
    return at[1] > pos ? (long)(at[1] - pos) : (long)(len - pos);
}

/* Each stage sees the piece of the stage before as if it were the whole text,
 * as the reference does: looking ahead ends there. */
long inf_pretok_next(struct inf_pretok *p, const char *text, size_t len, size_t pos)
{
    size_t window = len;
    for (unsigned i = 0; i < p->n; i++) {
        if (pos == 0 || pos >= p->end[i]) {
            long n = next_of(p, p->code[i], text, window, pos);
            if (n < 0)
                return n;
            p->end[i] = pos + (size_t)n;
        }
        window = p->end[i];
    }
    return (long)(window - pos);
}
