/* SPDX-License-Identifier: MIT */
/* Opening GGUF files: shards, the joint tensor table, the fingerprint. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/prt_gguf.h"
#include "proto/prt_gguf_priv.h"

#define SHARD_SUFFIX_BYTES 20 /* "-00001-of-00003.gguf" */

static bool five_digits(const char *s, uint32_t *ret_value)
{
    uint32_t v = 0;

    for (int i = 0; i < 5; i++) {
        if (s[i] < '0' || s[i] > '9')
            return false;
        v = v * 10 + (uint32_t)(s[i] - '0');
    }
    *ret_value = v;
    return true;
}

/* Whether path ends in "-NNNNN-of-NNNNN.gguf", with a sensible pair of numbers. */
static bool shard_name(const char *path, uint32_t *ret_number, uint32_t *ret_count)
{
    size_t len = strlen(path);
    const char *s;
    uint32_t number, count;

    if (len < SHARD_SUFFIX_BYTES)
        return false;
    s = path + len - SHARD_SUFFIX_BYTES;
    if (s[0] != '-' || memcmp(s + 6, "-of-", 4) != 0 || strcmp(s + 15, ".gguf") != 0)
        return false;
    if (!five_digits(s + 1, &number) || !five_digits(s + 10, &count) || number < 1 || number > count)
        return false;
    *ret_number = number;
    *ret_count = count;
    return true;
}

/* The path of shard number (from 1) beside the given one; caller frees. NULL: no memory. */
static char *shard_path(const char *path, uint32_t number, uint32_t count)
{
    char *out;

    if (asprintf(&out, "%.*s-%05" PRIu32 "-of-%05" PRIu32 ".gguf", (int)(strlen(path) - SHARD_SUFFIX_BYTES),
                 path, number, count) < 0)
        return NULL;
    return out;
}

/* True when some process has the file open for writing. A write changes the time of modification when it
 * begins, not when it ends: of a file opened in between no later look at that time would tell. A lease for
 * reading is refused while there is a writer; where leases are not to be had (another's file, other file
 * systems) nobody knows, and the answer is no. */
static bool has_writer(int fd)
{
    fcntl(fd, F_SETSIG, SIGURG); /* if somebody opens it in this very moment; ignored, unlike SIGIO */
    if (fcntl(fd, F_SETLEASE, F_RDLCK) == 0) {
        fcntl(fd, F_SETLEASE, F_UNLCK);
        return false;
    }
    return errno == EAGAIN;
}

static int open_file(struct prt_gguf_part *part, struct shm_error *err)
{
    struct stat st;
    int flags;

    /* O_NONBLOCK: a FIFO by that name must not hang us. Cleared below, because
     * io_uring takes it as "fail rather than wait" even for regular files. */
    part->pub.fd = open(part->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (part->pub.fd < 0)
        return shm_error_set(err, errno, "%s: cannot open: %s%s: name another with --model", part->path,
                             strerror(errno), shm_error_remedy(errno));
    if (fstat(part->pub.fd, &st) < 0)
        return shm_error_set(err, errno, "%s: cannot stat: %s", part->path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return shm_error_set(err, EINVAL, "%s: not a regular file: name another with --model", part->path);
    flags = fcntl(part->pub.fd, F_GETFL);
    if (flags < 0 || fcntl(part->pub.fd, F_SETFL, flags & ~O_NONBLOCK) < 0)
        return shm_error_set(err, errno, "%s: cannot set flags: %s", part->path, strerror(errno));
    if (has_writer(part->pub.fd))
        return shm_error_set(err, ETXTBSY,
                             "%s: is open for writing in another process: start again when it is whole",
                             part->path);
    if (fstat(part->pub.fd, &st) < 0) /* once more: now no write is under way */
        return shm_error_set(err, errno, "%s: cannot stat: %s", part->path, strerror(errno));
    part->pub.size_bytes = (uint64_t)st.st_size;
    part->pub.mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    return 0;
}

/* That shard i of the model says it is that. */
static int check_split(const struct prt_gguf *g, uint32_t i, struct shm_error *err)
{
    const struct prt_gguf_part *part = &g->part[i];
    uint64_t count = 1, no = 0;
    int r = prt_gguf_part_u64(part, "split.count", &count, err);

    if (r < 0 && (r != -ENOENT || g->n_parts > 1))
        return r == -ENOENT ? shm_error_set(err, EINVAL,
                                            "%s: named as shard %" PRIu32 " of %" PRIu32
                                            ", but key split.count is missing",
                                            part->path, i + 1, g->n_parts)
                            : r;
    if (count != g->n_parts && !(count == 0 && g->n_parts == 1))
        return shm_error_set(err, EINVAL,
                             "%s: key split.count is %" PRIu64 ", but the name stands for %" PRIu32
                             " (shards must be named NAME-00001-of-0000N.gguf)",
                             part->path, count, g->n_parts);
    if (g->n_parts == 1)
        return 0;
    r = prt_gguf_part_u64(part, "split.no", &no, err);
    if (r < 0)
        return r == -ENOENT ? shm_error_set(err, EINVAL, "%s: key split.no is missing", part->path) : r;
    if (no != i)
        return shm_error_set(err, EINVAL, "%s: key split.no is %" PRIu64 ", expected %" PRIu32 " by its name",
                             part->path, no, i);
    return 0;
}

static int cmp_tensor(const void *a, const void *b, void *arg)
{
    const struct prt_gguf_tensor *t = arg;

    return prt_str_cmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

/* One table over all shards, in file order, with an index by name. */
static int join_tensors(struct prt_gguf *g, struct shm_error *err)
{
    uint64_t total = 0, claimed, n = 0;
    int r;

    for (uint32_t i = 0; i < g->n_parts; i++)
        total += g->part[i].n_raw;
    for (uint32_t i = 0; i < g->n_parts && g->n_parts > 1; i++) {
        r = prt_gguf_part_u64(&g->part[i], "split.tensors.count", &claimed, err);
        if (r == -ENOENT)
            continue;
        if (r < 0)
            return r;
        if (claimed != total)
            return shm_error_set(err, EINVAL,
                                 "%s: key split.tensors.count is %" PRIu64 ", but the shards hold %" PRIu64,
                                 g->part[i].path, claimed, total);
    }
    if (total > PRT_GGUF_TENSORS_MAX)
        return shm_error_set(err, EINVAL, "%s: %" PRIu64 " tensors, at most %u are supported",
                             g->part[0].path, total, PRT_GGUF_TENSORS_MAX);
    g->tensor = calloc(total ? total : 1, sizeof(*g->tensor));
    g->tensor_sorted = calloc(total ? total : 1, sizeof(*g->tensor_sorted));
    if (!g->tensor || !g->tensor_sorted)
        return shm_error_set(err, ENOMEM, "%s: no memory for %" PRIu64 " tensors; free some", g->part[0].path,
                             total);
    for (uint32_t i = 0; i < g->n_parts; i++) {
        struct prt_gguf_part *part = &g->part[i];

        for (uint32_t k = 0; k < part->n_raw; k++, n++) {
            const struct prt_gguf_raw_tensor *raw = &part->raw[k];
            struct prt_gguf_tensor *t = &g->tensor[n];

            t->name = (struct prt_str){(const char *)part->header + raw->name_offset, raw->name_len};
            t->type = raw->type;
            t->n_dims = raw->n_dims;
            memcpy(t->dims, raw->dims, sizeof(t->dims));
            t->shard = i;
            t->offset = part->pub.data_offset + raw->offset;
            t->size_bytes = raw->size_bytes;
            g->tensor_sorted[n] = (uint32_t)n;
        }
        free(part->raw);
        part->raw = NULL;
    }
    g->n_tensors = (uint32_t)n;
    qsort_r(g->tensor_sorted, n, sizeof(*g->tensor_sorted), cmp_tensor, g->tensor);
    for (uint32_t i = 1; i < g->n_tensors; i++) {
        const struct prt_gguf_tensor *t = &g->tensor[g->tensor_sorted[i]];

        if (prt_str_cmp(t->name, g->tensor[g->tensor_sorted[i - 1]].name) == 0)
            return shm_error_set(err, EINVAL, "%s: tensor %.*s appears twice", g->part[t->shard].path,
                                 PRT_STR(t->name));
    }
    return 0;
}

static struct prt_gguf *allocate(uint32_t n_parts)
{
    struct prt_gguf *g = calloc(1, sizeof(*g));

    if (!g)
        return NULL;
    g->part = calloc(n_parts, sizeof(*g->part));
    if (!g->part) {
        free(g);
        return NULL;
    }
    g->n_parts = n_parts;
    for (uint32_t i = 0; i < n_parts; i++)
        g->part[i].pub.fd = -1;
    return g;
}

/* Parses the n shards whose path, size and source are set. */
static int read_all(struct prt_gguf *g, const struct prt_gguf_memory *src, struct shm_error *err)
{
    uint64_t budget = PRT_GGUF_HEADER_BYTES_MAX;
    int r;

    for (uint32_t i = 0; i < g->n_parts; i++) {
        struct prt_gguf_part *part = &g->part[i];

        part->pub.path = part->path;
        r = prt_gguf_parse(part, src ? src[i].data : NULL, budget, err);
        if (r < 0)
            return r;
        budget -= part->pub.header_bytes;
        r = check_split(g, i, err);
        if (r < 0)
            return r;
    }
    return join_tensors(g, err);
}

int prt_gguf_open(const char *path, struct prt_gguf **ret_gguf, struct shm_error *err)
{
    uint32_t number = 0, count = 1;
    bool split = shard_name(path, &number, &count) && count > 1;
    struct prt_gguf *g;
    int r;

    if (split && count > PRT_GGUF_SHARDS_MAX)
        return shm_error_set(err, EINVAL, "%s: %" PRIu32 " shards, at most %u are supported", path, count,
                             PRT_GGUF_SHARDS_MAX);
    g = allocate(split ? count : 1);
    if (!g)
        return shm_error_set(err, ENOMEM, "%s: no memory to open it; free some", path);
    for (uint32_t i = 0; i < g->n_parts; i++) {
        struct prt_gguf_part *part = &g->part[i];

        part->path = split ? shard_path(path, i + 1, count) : strdup(path);
        if (!part->path) {
            r = shm_error_set(err, ENOMEM, "%s: no memory to open it; free some", path);
            goto fail;
        }
        r = open_file(part, err);
        if (r == -ENOENT && split)
            r = shm_error_set(err, ENOENT,
                              "%s: shard %" PRIu32 " of %" PRIu32
                              " is missing; all shards must be in one folder",
                              part->path, i + 1, count);
        if (r < 0)
            goto fail;
    }
    r = read_all(g, NULL, err);
    if (r < 0)
        goto fail;
    *ret_gguf = g;
    return 0;
fail:
    prt_gguf_close(&g);
    return r;
}

int prt_gguf_open_memory(const struct prt_gguf_memory *src, size_t n, struct prt_gguf **ret_gguf,
                         struct shm_error *err)
{
    struct prt_gguf *g;
    int r;

    if (n < 1 || n > PRT_GGUF_SHARDS_MAX)
        return shm_error_set(err, EINVAL, "%zu shards given, supported are 1 to %u", n, PRT_GGUF_SHARDS_MAX);
    g = allocate((uint32_t)n);
    if (!g)
        return shm_error_set(err, ENOMEM, "%s: no memory to open it; free some", src[0].name);
    for (size_t i = 0; i < n; i++) {
        g->part[i].path = strdup(src[i].name);
        if (!g->part[i].path) {
            r = shm_error_set(err, ENOMEM, "%s: no memory to open it; free some", src[0].name);
            goto fail;
        }
        g->part[i].pub.size_bytes = src[i].size_bytes;
    }
    r = read_all(g, src, err);
    if (r < 0)
        goto fail;
    *ret_gguf = g;
    return 0;
fail:
    prt_gguf_close(&g);
    return r;
}

void prt_gguf_close(struct prt_gguf **gguf)
{
    struct prt_gguf *g = *gguf;

    *gguf = NULL;
    if (!g)
        return;
    for (uint32_t i = 0; i < g->n_parts; i++) {
        struct prt_gguf_part *part = &g->part[i];

        if (part->pub.fd >= 0)
            close(part->pub.fd);
        free(part->raw);
        free(part->kv_sorted);
        free(part->kv);
        free(part->header);
        free(part->path);
    }
    free(g->tensor_sorted);
    free(g->tensor);
    free(g->part);
    free(g);
}

uint32_t prt_gguf_shard_count(const struct prt_gguf *gguf)
{
    return gguf->n_parts;
}

const struct prt_gguf_shard *prt_gguf_shard(const struct prt_gguf *gguf, uint32_t index)
{
    return index < gguf->n_parts ? &gguf->part[index].pub : NULL;
}

const char *prt_gguf_path(const struct prt_gguf *gguf)
{
    return gguf->part[0].path;
}

void prt_gguf_fingerprint(const struct prt_gguf *gguf, uint8_t ret_hash[16])
{
    XXH128_canonical_t canon = {{0}};

    /* A chain: each link covers the hash so far and one shard. */
    for (uint32_t i = 0; i < gguf->n_parts; i++) {
        const struct prt_gguf_shard *s = &gguf->part[i].pub;
        uint64_t size = htole64(s->size_bytes), mtime = htole64((uint64_t)s->mtime_ns);
        uint8_t link[48];

        memcpy(link, canon.digest, 16);
        XXH128_canonicalFromHash(&canon, XXH3_128bits(s->header, s->header_bytes));
        memcpy(link + 16, canon.digest, 16);
        memcpy(link + 32, &size, 8);
        memcpy(link + 40, &mtime, 8);
        XXH128_canonicalFromHash(&canon, XXH3_128bits(link, sizeof(link)));
    }
    memcpy(ret_hash, canon.digest, 16);
}

int prt_gguf_unchanged(const struct prt_gguf *gguf, struct shm_error *err)
{
    for (uint32_t i = 0; i < gguf->n_parts; i++) {
        const struct prt_gguf_shard *s = &gguf->part[i].pub;
        struct stat st;

        if (s->fd < 0) /* a memory source */
            continue;
        if (fstat(s->fd, &st) < 0)
            return shm_error_set(err, errno, "%s: cannot stat: %s", s->path, strerror(errno));
        if ((uint64_t)st.st_size != s->size_bytes ||
            (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec != s->mtime_ns)
            return shm_error_set(err, ESTALE,
                                 "%s was written while it was read: start expertd again when the file is "
                                 "whole",
                                 s->path);
    }
    return 0;
}

uint32_t prt_gguf_tensor_count(const struct prt_gguf *gguf)
{
    return gguf->n_tensors;
}

const struct prt_gguf_tensor *prt_gguf_tensor(const struct prt_gguf *gguf, uint32_t index)
{
    return index < gguf->n_tensors ? &gguf->tensor[index] : NULL;
}

const struct prt_gguf_tensor *prt_gguf_find_tensor(const struct prt_gguf *gguf, const char *name)
{
    struct prt_str want = {name, strlen(name)};
    uint32_t lo = 0, hi = gguf->n_tensors;

    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        const struct prt_gguf_tensor *t = &gguf->tensor[gguf->tensor_sorted[mid]];
        int c = prt_str_cmp(want, t->name);

        if (c == 0)
            return t;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

uint32_t prt_gguf_key_count(const struct prt_gguf *gguf)
{
    return gguf->part[0].n_kv;
}

struct prt_str prt_gguf_key(const struct prt_gguf *gguf, uint32_t index)
{
    return index < gguf->part[0].n_kv ? prt_gguf_kv_key(&gguf->part[0], index) : (struct prt_str){"", 0};
}

bool prt_gguf_has(const struct prt_gguf *gguf, const char *key)
{
    return prt_gguf_part_find(&gguf->part[0], key) != NULL;
}
