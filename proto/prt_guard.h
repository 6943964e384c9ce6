/* SPDX-License-Identifier: MIT */
/*
 * Guard: mapped files that somebody else may shorten. A touch past the file's
 * end raises SIGBUS; for a guarded mapping that becomes one line which names
 * the file, and exit status 1. What is not guarded dies of the signal as
 * before. Owns neither mappings nor files.
 */
#ifndef PRT_GUARD_H
#define PRT_GUARD_H

#include <stdint.h>

/* From now on a SIGBUS within [base, base + bytes) ends the process with
 *     PROGRAM: WHAT PATH was truncated while it was in use: REMEDY
 * Strings are copied. Any thread. More than 8 at a time are not guarded. */
void prt_guard_add(const void *base, uint64_t bytes, const char *what, const char *path, const char *remedy);

/* Before the mapping goes. Accepts what was never added. */
void prt_guard_remove(const void *base);

#endif
