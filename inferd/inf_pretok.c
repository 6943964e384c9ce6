/* SPDX-License-Identifier: MIT */
#include "inferd/inf_pretok.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <errno.h>
#include <pcre2.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Unicode White_Space written out: PCRE2's \s also takes U+180E, and
 * \p{White_Space} needs 10.40. For use inside a class. */
#define WS                                                                                                   \
    "\\t-\\r\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

/* A row for each name that GGUF files carry in tokenizer.ggml.pre. Every
 * pattern must match at any position, so that no text is lost. */
static const struct pretok_row {
    const char *name;
    const char *pattern;
} pretok_rows[] = {
    {"qwen2", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
              "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
              "|\\p{N}"
              "| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n]*"
              "|[" WS "]*[\\r\\n]+"
              "|[" WS "]+(?![^" WS "])"
              "|[" WS "]+"},
};

struct inf_pretok {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    bool jit;
};

void inf_pretok_destroy(struct inf_pretok **pretok)
{
    struct inf_pretok *p = pretok ? *pretok : NULL;
    if (!p)
        return;
    pcre2_jit_stack_free(p->stack);
    pcre2_match_context_free(p->context);
    pcre2_match_data_free(p->match);
    pcre2_code_free(p->code);
    free(p);
    *pretok = NULL;
}

int inf_pretok_create(const char *name, size_t name_len, struct shm_error *err,
                      struct inf_pretok **ret_pretok)
{
    const struct pretok_row *row = NULL;
    for (size_t i = 0; i < sizeof pretok_rows / sizeof pretok_rows[0]; i++)
        if (strlen(pretok_rows[i].name) == name_len && !memcmp(pretok_rows[i].name, name, name_len))
            row = &pretok_rows[i];
    if (!row)
        return shm_error_set(err, ENOTSUP,
                             "tokenizer: pre-tokenizer \"%.*s\" (tokenizer.ggml.pre) is not supported; "
                             "use a model with \"qwen2\"",
                             (int)(name_len < 64 ? name_len : 64), name);
    struct inf_pretok *p = calloc(1, sizeof *p);
    if (!p)
        return shm_error_set(err, ENOMEM, "tokenizer: no memory for the pre-tokenizer; free some");
    int code = 0;
    PCRE2_SIZE offset = 0;
    p->code = pcre2_compile((PCRE2_SPTR)row->pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code,
                            &offset, NULL);
    if (!p->code) {
        char text[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        inf_pretok_destroy(&p);
        return shm_error_set(err, EINVAL,
                             "tokenizer: this PCRE2 refuses the pattern of \"%s\" at %zu: %s; "
                             "install PCRE2 built with Unicode support",
                             row->name, (size_t)offset, text);
    }
    /* Writable and executable memory may be forbidden; matching then runs interpreted. */
    p->jit = pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0;
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

long inf_pretok_next(struct inf_pretok *p, const char *text, size_t len, size_t pos)
{
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (p->jit)
        rc = pcre2_jit_match(p->code, (PCRE2_SPTR)text, len, pos, PCRE2_NO_UTF_CHECK, p->match, p->context);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH)
        rc = pcre2_match(p->code, (PCRE2_SPTR)text, len, pos, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, p->match,
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
