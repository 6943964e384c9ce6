/* SPDX-License-Identifier: MIT */
/*
 * Bytes that grow. Errors are sticky: after the first one nothing more is
 * added, so that writers of many pieces look once, at the end. What is too
 * long is the caller's to say.
 */
#ifndef SHM_TEXT_H
#define SHM_TEXT_H

#include <stddef.h>

/* {0} to begin with; n may be set back. Release with free(text.bytes). */
struct shm_text {
    char *bytes; /* NUL-terminated; NULL before anything was added */
    size_t n, cap;
    int rc; /* 0, or the first failure */
};

/* 0; -ENOMEM, also for what came before, and nothing was added. bytes may be NULL where n is 0. */
int shm_text_add(struct shm_text *text, const char *bytes, size_t n);

#endif
