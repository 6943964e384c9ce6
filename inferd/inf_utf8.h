/* SPDX-License-Identifier: MIT */
/*
 * One step through bytes that should be UTF-8.
 *
 * Shared by encoder, detokenizer and tests; no state, no allocation. Follows
 * the Unicode table of well-formed sequences: no surrogates, no overlong
 * forms, nothing above U+10FFFF.
 */
#ifndef INF_UTF8_H
#define INF_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum inf_utf8_kind {
    INF_UTF8_OK,      /* *ret_len bytes are one character */
    INF_UTF8_PARTIAL, /* all n bytes are the start of a character that may still be finished */
    INF_UTF8_BAD,     /* *ret_len bytes (1..3) can never become one */
};

/* n >= 1. *ret_len is set in every case; BAD gives the longest start of a
 * character before the byte that breaks it. */
static inline enum inf_utf8_kind inf_utf8_step(const unsigned char *p, size_t n, size_t *ret_len)
{
    unsigned char lead = p[0], low = 0x80, high = 0xBF;
    size_t want;
    *ret_len = 1;
    if (lead < 0x80)
        return INF_UTF8_OK;
    if (lead < 0xC2 || lead > 0xF4)
        return INF_UTF8_BAD;
    if (lead < 0xE0) {
        want = 2;
    } else if (lead < 0xF0) {
        want = 3;
        if (lead == 0xE0)
            low = 0xA0;
        else if (lead == 0xED)
            high = 0x9F;
    } else {
        want = 4;
        if (lead == 0xF0)
            low = 0x90;
        else if (lead == 0xF4)
            high = 0x8F;
    }
    for (size_t i = 1; i < want; i++) {
        *ret_len = i;
        if (i >= n)
            return INF_UTF8_PARTIAL;
        if (p[i] < low || p[i] > high)
            return INF_UTF8_BAD;
        low = 0x80;
        high = 0xBF;
    }
    *ret_len = want;
    return INF_UTF8_OK;
}

#endif
