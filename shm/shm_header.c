/* SPDX-License-Identifier: MIT */
#include "shm/shm_header.h"

#include "shm/shm_bell.h"
#include "shm/shm_counter.h"

#include <errno.h>
#include <string.h>

void shm_header_init(struct shm_header *h, const char *magic, uint64_t total_bytes, uint32_t pid,
                     uint64_t start)
{
    memset(h, 0, sizeof *h);
    memcpy(h->magic, magic, SHM_MAGIC_BYTES);
    h->header_bytes = sizeof *h;
    h->writer_pid = pid;
    h->writer_start = start;
    h->total_bytes = total_bytes;
    h->created_ns = shm_now_ns();
    h->counters = SHM_COUNTERS_LAYOUT;
}

void shm_header_publish(struct shm_header *h, uint64_t epoch)
{
    /* release, pairs with the acquire in shm_header_check: the whole segment is filled */
    atomic_store_explicit(&h->epoch, epoch, memory_order_release);
}

int shm_header_check(const struct shm_header *h, const char *magic, uint64_t mapped_bytes, const char *name,
                     struct shm_error *err)
{
    if (mapped_bytes < sizeof *h)
        return shm_error_set(err, EBADMSG, "%s: %llu bytes is too short for a segment header", name,
                             (unsigned long long)mapped_bytes);
    /* acquire, pairs with the release in shm_header_publish */
    if (atomic_load_explicit(&h->epoch, memory_order_acquire) == 0)
        return shm_error_set(err, EAGAIN, "%s: its writer has not finished it", name);
    if (memcmp(h->magic, magic, SHM_MAGIC_BYTES) != 0) {
        char shown[SHM_MAGIC_BYTES]; /* it may be anything, and goes to logs and terminals */
        memcpy(shown, h->magic, sizeof shown);
        for (size_t i = 0; i < sizeof shown; i++)
            if (shown[i] < 0x20 || shown[i] > 0x7e)
                shown[i] = '?';
        return shm_error_set(err, EPROTO,
                             "%s: layout is '%.8s', this program knows '%.8s': use matching versions", name,
                             shown, magic);
    }
    if (h->header_bytes != sizeof *h || h->features != 0)
        return shm_error_set(err, EPROTO, "%s: header of %u bytes with feature bits 0x%llx is not known here",
                             name, h->header_bytes, (unsigned long long)h->features);
    if (h->total_bytes > mapped_bytes)
        return shm_error_set(err, EBADMSG, "%s: claims %llu bytes but has %llu: torn or truncated", name,
                             (unsigned long long)h->total_bytes, (unsigned long long)mapped_bytes);
    return 0;
}

int shm_header_check_counters(const struct shm_header *h, const char *name, struct shm_error *err)
{
    uint64_t layout = h->counters;
    if (layout == SHM_COUNTERS_LAYOUT)
        return 0;
    return shm_error_set(err, EPROTO,
                         "%s: its counters are laid out as %016llx, this program knows %016llx: use "
                         "matching versions",
                         name, (unsigned long long)layout, (unsigned long long)SHM_COUNTERS_LAYOUT);
}
