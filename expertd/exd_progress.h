/* SPDX-License-Identifier: MIT */
/*
 * Progress of the loading for people: a bar with GB/s and time left, redrawn in
 * place on a terminal; a plain line every few seconds elsewhere. Writes to one
 * descriptor, never blocks the loading on anything else. Not thread-safe: one
 * caller at a time.
 */
#ifndef EXD_PROGRESS_H
#define EXD_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXD_PROGRESS_LINE_NS 5000000000ull /* between plain lines */
#define EXD_PROGRESS_BAR_NS  100000000ull  /* between redraws */

struct exd_progress {
    int fd;
    bool terminal;
    uint32_t columns; /* of the terminal */
    uint64_t last_ns; /* elapsed at the last output */
    bool drawn;       /* a bar stands on the current line */
    const char *what; /* "loading" */
};

/* Looks at fd: terminal or not, how wide. what: first word of each line, borrowed. */
void exd_progress_init(struct exd_progress *p, int fd, const char *what);

/* Shows done of total bytes after elapsed_ns, if it is time to. */
void exd_progress_update(struct exd_progress *p, uint64_t done, uint64_t total, uint64_t elapsed_ns);

/* Last line: what was reached; ok says whether the work ended well. */
void exd_progress_finish(struct exd_progress *p, uint64_t done, uint64_t total, uint64_t elapsed_ns, bool ok);

/* The text itself: a bar of at most `columns` columns, or a plain line (columns
 * 0). NUL-terminated, no line end; cut at size. */
void exd_progress_text(char *text, size_t size, uint32_t columns, const char *what, uint64_t done,
                       uint64_t total, uint64_t elapsed_ns);

#endif
