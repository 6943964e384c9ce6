/* SPDX-License-Identifier: MIT */
/* One fatbin as read-only data: KRN_SYMBOL_begin .. KRN_SYMBOL_end. Assembled by a custom target whose input is
 * the fatbin, so that a changed kernel is always embedded anew. */
#define JOIN2(a, b) a##b
#define JOIN(a, b)  JOIN2(a, b)
    .section .rodata
    .balign 64
    .globl JOIN(KRN_SYMBOL, _begin)
JOIN(KRN_SYMBOL, _begin):
    .incbin KRN_FATBIN
    .globl JOIN(KRN_SYMBOL, _end)
JOIN(KRN_SYMBOL, _end):
    .byte 0
    .section .note.GNU-stack, "", @progbits
