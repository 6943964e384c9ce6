/* SPDX-License-Identifier: MIT */
/*
 * One-line error text beside a status code.
 *
 * A function that can fail for a reason a person must read takes a struct
 * shm_error *. It writes one line that names the object, the cause and the
 * remedy, and returns the code. The caller owns the struct; NULL is accepted
 * where the text is not wanted. Nothing here allocates or blocks.
 */
#ifndef SHM_ERROR_H
#define SHM_ERROR_H

#define SHM_ERROR_TEXT_BYTES 512

struct shm_error {
    int code; /* 0 or a negative errno */
    char text[SHM_ERROR_TEXT_BYTES];
};

/* Formats the line (cut at the buffer's end, line breaks and control bytes
 * replaced, so hostile names cannot forge a second line) and returns
 * -abs(code), so that "return shm_error_set(...)" reads naturally. */
int shm_error_set(struct shm_error *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* What a user can do about a limit that an errno tells of, as the end of a line: "; raise the limit on open
 * files (ulimit -n)"; "" where nothing general can be said. */
const char *shm_error_remedy(int code);

/* The text, or the code's strerror() where no text was written. Never NULL. */
const char *shm_error_text(const struct shm_error *err);

#endif
