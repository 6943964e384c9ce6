/* SPDX-License-Identifier: MIT */
#include "proto/prt_message.h"

#include <errno.h>
#include <string.h>

void prt_request_fill(struct prt_request_header *h, uint32_t version, uint32_t type, size_t bytes,
                      uint64_t epoch, uint64_t id)
{
    *h = (struct prt_request_header){.magic = PRT_REQUEST_MAGIC,
                                     .version = (uint16_t)version,
                                     .type = (uint16_t)type,
                                     .total_bytes = (uint32_t)bytes,
                                     .epoch = epoch,
                                     .id = id};
}

void prt_reply_fill(struct prt_reply_header *h, uint32_t version, uint32_t type, size_t bytes,
                    const struct prt_request_header *request, int status, const char *error)
{
    memset(h, 0, sizeof(*h));
    h->magic = PRT_REPLY_MAGIC;
    h->version = (uint16_t)version;
    h->type = (uint16_t)type;
    h->total_bytes = (uint32_t)bytes;
    h->status = status;
    h->epoch = request->epoch;
    h->id = request->id;
    if (status < 0 && error) {
        size_t len = strnlen(error, sizeof(h->error) - 1);
        memcpy(h->error, error, len);
    }
}

int prt_request_peek(const void *bytes, size_t n, uint32_t version, struct prt_request_header *ret_header,
                     struct shm_error *err)
{
    struct prt_request_header h;
    memset(&h, 0, sizeof(h));
    memcpy(&h, bytes, n < sizeof(h) ? n : sizeof(h));
    *ret_header = h;
    if (n < sizeof(h))
        return shm_error_set(err, EBADMSG, "control request of %zu bytes is shorter than its header (%zu)", n,
                             sizeof(h));
    if (h.magic != PRT_REQUEST_MAGIC)
        return shm_error_set(err, EBADMSG, "control request begins with 0x%08x, not with \"EXDQ\"", h.magic);
    if (h.version != version)
        return shm_error_set(
            err, EPROTO,
            "control protocol version %u was spoken to a version %u: use programs of one release", h.version,
            version);
    if (h.total_bytes != n)
        return shm_error_set(err, EBADMSG, "control request says %u bytes, %zu came", h.total_bytes, n);
    if (h.reserved)
        return shm_error_set(err, EBADMSG, "control request: reserved header field is %u, not 0", h.reserved);
    if (!h.epoch || !h.id)
        return shm_error_set(err, EBADMSG, "control request without epoch or id");
    return 0;
}

int prt_request_check(const void *bytes, size_t n, const char *what, uint32_t version, uint32_t type,
                      size_t size, struct shm_error *err)
{
    struct prt_request_header h;
    int rc = prt_request_peek(bytes, n, version, &h, err);
    if (rc < 0)
        return rc;
    if (h.type != type || n != size)
        return shm_error_set(err, EBADMSG, "%s: type %u of %zu bytes, expected type %u of %zu", what, h.type,
                             n, type, size);
    return 0;
}

int prt_reply_check(const void *bytes, size_t n, const char *what, uint32_t version, uint32_t type,
                    size_t size, struct shm_error *err)
{
    struct prt_reply_header h;
    if (n < sizeof(h))
        return shm_error_set(err, EBADMSG, "%s: %zu bytes are shorter than the header (%zu)", what, n,
                             sizeof(h));
    memcpy(&h, bytes, sizeof(h));
    h.error[sizeof(h.error) - 1] = '\0';
    if (h.magic != PRT_REPLY_MAGIC)
        return shm_error_set(err, EBADMSG, "%s begins with 0x%08x, not with \"EXDR\"", what, h.magic);
    if (h.version != version) {
        if (h.status < 0 && h.error[0])
            return shm_error_set(err, EPROTO, "%s", h.error); /* the other side names both versions */
        return shm_error_set(
            err, EPROTO, "%s: control protocol version %u answered a version %u: use programs of one release",
            what, h.version, version);
    }
    if (h.total_bytes != n)
        return shm_error_set(err, EBADMSG, "%s says %u bytes, %zu came", what, h.total_bytes, n);
    if (h.status > 0 || h.status < -4095)
        return shm_error_set(err, EBADMSG, "%s: status %d is no errno", what, h.status);
    if (h.status < 0 && n == sizeof(h))
        return 0;
    if (h.type != type || n != size)
        return shm_error_set(err, EBADMSG, "%s: type %u of %zu bytes, expected type %u of %zu", what, h.type,
                             n, type, size);
    return 0;
}

bool prt_text_ok(const char *text, size_t capacity, size_t low, size_t high)
{
    size_t len = strnlen(text, capacity);
    return len < capacity && len >= low && len <= high;
}

int prt_refuse_text(const char *what, const char *field, size_t low, size_t high, struct shm_error *err)
{
    return shm_error_set(err, ERANGE, "%s: %s must be a text of %zu to %zu bytes", what, field, low, high);
}

int prt_refuse_int(const char *what, const char *field, uint64_t value, uint64_t low, uint64_t high,
                   struct shm_error *err)
{
    return shm_error_set(err, ERANGE, "%s: %s is %llu, must be %llu to %llu", what, field,
                         (unsigned long long)value, (unsigned long long)low, (unsigned long long)high);
}

int prt_refuse_float(const char *what, const char *field, double value, double low, double high,
                     struct shm_error *err)
{
    return shm_error_set(err, ERANGE, "%s: %s is %g, must be %g to %g", what, field, value, low, high);
}
