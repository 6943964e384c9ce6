/* SPDX-License-Identifier: MIT */
/*
 * What all control messages share: the fixed headers and their checks. The
 * messages themselves are generated (prt_control_gen.h, from control.spec).
 * Received bytes are hostile: nothing here trusts a length or asserts.
 */
#ifndef PRT_MESSAGE_H
#define PRT_MESSAGE_H

#include "shm/shm_error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PRT_REQUEST_MAGIC 0x51445845u /* "EXDQ" */
#define PRT_REPLY_MAGIC   0x52445845u /* "EXDR" */

/* The same in every version of the protocol. */
struct prt_request_header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint32_t total_bytes;
    uint32_t reserved; /* 0 */
    uint64_t epoch;    /* of the client's process, not 0 */
    uint64_t id;       /* not 0 */
};
_Static_assert(sizeof(struct prt_request_header) == 32, "wire layout");
_Static_assert(offsetof(struct prt_request_header, total_bytes) == 8, "wire layout");
_Static_assert(offsetof(struct prt_request_header, epoch) == 16, "wire layout");
_Static_assert(offsetof(struct prt_request_header, id) == 24, "wire layout");

struct prt_reply_header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint32_t total_bytes;
    int32_t status; /* 0 or a negative errno */
    uint64_t epoch; /* epoch and id of the request */
    uint64_t id;
    char error[SHM_ERROR_TEXT_BYTES]; /* one line when status < 0 */
};
_Static_assert(sizeof(struct prt_reply_header) == 544, "wire layout");
_Static_assert(offsetof(struct prt_reply_header, status) == 12, "wire layout");
_Static_assert(offsetof(struct prt_reply_header, error) == 32, "wire layout");

void prt_request_fill(struct prt_request_header *h, uint32_t version, uint32_t type, size_t bytes,
                      uint64_t epoch, uint64_t id);
void prt_reply_fill(struct prt_reply_header *h, uint32_t version, uint32_t type, size_t bytes,
                    const struct prt_request_header *request, int status, const char *error);

/* The header of n received bytes, copied out: magic, version (both are named when they differ), lengths,
 * epoch and id. Returns 0, -EPROTO (other version) or -EBADMSG. ret_header is filled as far as bytes are
 * there (rest zero) in every case, so that an answer can be addressed. */
int prt_request_peek(const void *bytes, size_t n, uint32_t version, struct prt_request_header *ret_header,
                     struct shm_error *err);

/* The same, and that type and size are those of message `what`. */
int prt_request_check(const void *bytes, size_t n, const char *what, uint32_t version, uint32_t type,
                      size_t size, struct shm_error *err);

/* A reply with status < 0 may be the bare header. Returns 0, -EPROTO or -EBADMSG; not the status. */
int prt_reply_check(const void *bytes, size_t n, const char *what, uint32_t version, uint32_t type,
                    size_t size, struct shm_error *err);

/* For the generated decoders. */
bool prt_text_ok(const char *text, size_t capacity, size_t low, size_t high);
int prt_refuse_text(const char *what, const char *field, size_t low, size_t high, struct shm_error *err);
int prt_refuse_int(const char *what, const char *field, uint64_t value, uint64_t low, uint64_t high,
                   struct shm_error *err);
int prt_refuse_float(const char *what, const char *field, double value, double low, double high,
                     struct shm_error *err);

#endif
