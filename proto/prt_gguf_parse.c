/* SPDX-License-Identifier: MIT */
/* Parser of one GGUF header: every byte comes from an untrusted file. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/prt_gguf_priv.h"

#define READ_BYTES_MIN (64u << 10)
#define READ_BYTES_MAX (1u << 20)
#define ALIGNMENT      32u
#define ALIGNMENT_MIN  8u
#define ALIGNMENT_MAX  (1u << 20)
/* Smallest encoding of an entry: bounds the counts by the bytes that are there. */
#define KEY_BYTES_MIN    (8 + 1 + 4 + 1)
#define TENSOR_BYTES_MIN (8 + 1 + 4 + 8 + 4 + 8)

struct cursor {
    struct prt_gguf_part *part;
    const uint8_t *memory;
    uint64_t size;   /* of the file */
    uint64_t limit;  /* header bytes we are willing to hold */
    uint8_t *buf;    /* bytes [0, loaded) of the file */
    uint64_t loaded; /* <= size */
    uint64_t cap;
    uint64_t pos; /* <= loaded */
    struct shm_error *err;
};

static uint64_t bytes_left(const struct cursor *c)
{
    return c->size - c->pos;
}

static int load(struct cursor *c, uint64_t end)
{
    uint64_t step = c->loaded < READ_BYTES_MIN   ? READ_BYTES_MIN
                    : c->loaded > READ_BYTES_MAX ? READ_BYTES_MAX
                                                 : c->loaded;
    uint64_t want = c->loaded + step;

    if (want < end)
        want = end;
    if (want > c->size)
        want = c->size;
    if (want > c->cap) {
        uint64_t cap = c->cap * 2 > want ? c->cap * 2 : want;
        uint8_t *p;

        if (cap > c->size)
            cap = c->size;
        p = realloc(c->buf, cap);
        if (!p)
            return shm_error_set(c->err, ENOMEM, "%s: no memory for a header of %" PRIu64 " bytes; free some",
                                 c->part->path, want);
        c->buf = p;
        c->cap = cap;
    }
    while (c->loaded < want) {
        ssize_t n;

        if (c->memory) {
            memcpy(c->buf + c->loaded, c->memory + c->loaded, want - c->loaded);
            c->loaded = want;
            break;
        }
        n = pread(c->part->pub.fd, c->buf + c->loaded, want - c->loaded, (off_t)c->loaded);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return shm_error_set(c->err, errno, "%s: cannot read at offset %" PRIu64 ": %s", c->part->path,
                                 c->loaded, strerror(errno));
        if (n == 0)
            return shm_error_set(c->err, EIO, "%s: became shorter while it was read", c->part->path);
        c->loaded += (uint64_t)n;
    }
    return 0;
}

/* Makes bytes [pos, pos + n) available. what names the thing for the error line. */
static int need(struct cursor *c, uint64_t n, const char *what)
{
    if (n <= c->loaded - c->pos)
        return 0;
    if (n > bytes_left(c))
        return shm_error_set(c->err, EINVAL,
                             "%s: file ends inside %s at offset %" PRIu64 ": %" PRIu64
                             " bytes needed, %" PRIu64 " there (incomplete download?): get the whole file",
                             c->part->path, what, c->pos, n, bytes_left(c));
    if (n > c->limit - c->pos)
        return shm_error_set(c->err, EINVAL, "%s: header is larger than %llu MiB, the most we read",
                             c->part->path, PRT_GGUF_HEADER_BYTES_MAX >> 20);
    return load(c, c->pos + n);
}

static int take_u32(struct cursor *c, const char *what, uint32_t *ret_value)
{
    int r = need(c, 4, what);

    if (r < 0)
        return r;
    *ret_value = prt_le32(c->buf + c->pos);
    c->pos += 4;
    return 0;
}

static int take_u64(struct cursor *c, const char *what, uint64_t *ret_value)
{
    int r = need(c, 8, what);

    if (r < 0)
        return r;
    *ret_value = prt_le64(c->buf + c->pos);
    c->pos += 8;
    return 0;
}

static int skip(struct cursor *c, uint64_t n, const char *what)
{
    int r = need(c, n, what);

    if (r < 0)
        return r;
    c->pos += n;
    return 0;
}

static int skip_string(struct cursor *c, const char *what)
{
    uint64_t len;
    int r = take_u64(c, what, &len);

    return r < 0 ? r : skip(c, len, what);
}

/* A key or tensor name: bounded, not empty. */
static int take_name(struct cursor *c, const char *what, uint64_t len_max, uint64_t *ret_offset,
                     uint32_t *ret_len)
{
    uint64_t len;
    int r = take_u64(c, what, &len);

    if (r < 0)
        return r;
    if (len == 0 || len > len_max)
        return shm_error_set(c->err, EINVAL,
                             "%s: %s at offset %" PRIu64 " has %" PRIu64 " bytes, allowed are 1 to %" PRIu64,
                             c->part->path, what, c->pos - 8, len, len_max);
    *ret_offset = c->pos;
    *ret_len = (uint32_t)len;
    return skip(c, len, what);
}

static int skip_array(struct cursor *c, unsigned depth, uint32_t *ret_type, uint64_t *ret_count,
                      uint64_t *ret_first)
{
    uint32_t type, size;
    uint64_t count;
    int r = take_u32(c, "an array", &type);

    if (r < 0)
        return r;
    r = take_u64(c, "an array", &count);
    if (r < 0)
        return r;
    if (type >= PRT_GGUF_VALUE_COUNT)
        return shm_error_set(
            c->err, EINVAL, "%s: array at offset %" PRIu64 " has element type %" PRIu32 ", known are 0 to %d",
            c->part->path, c->pos - 12, type, PRT_GGUF_VALUE_COUNT - 1);
    size = prt_gguf_value_bytes(type);
    /* The smallest element: a length word, or an array's head. */
    if (count > bytes_left(c) / (size ? size : type == PRT_GGUF_STRING ? 8 : 12))
        return shm_error_set(c->err, EINVAL,
                             "%s: array at offset %" PRIu64 " claims %" PRIu64
                             " elements, more than the %" PRIu64 " bytes left can hold",
                             c->part->path, c->pos - 12, count, bytes_left(c));
    if (type == PRT_GGUF_ARRAY && depth >= PRT_GGUF_NESTING_MAX)
        return shm_error_set(c->err, EINVAL, "%s: arrays nested deeper than %d at offset %" PRIu64,
                             c->part->path, PRT_GGUF_NESTING_MAX, c->pos - 12);
    *ret_type = type;
    *ret_count = count;
    *ret_first = c->pos;
    if (size)
        return skip(c, count * size, "an array");
    for (uint64_t i = 0; i < count; i++) {
        uint64_t n, first;
        uint32_t t;

        r = type == PRT_GGUF_STRING ? skip_string(c, "an array of strings")
                                    : skip_array(c, depth + 1, &t, &n, &first);
        if (r < 0)
            return r;
    }
    return 0;
}

static int parse_key(struct cursor *c, struct prt_gguf_kv *kv)
{
    int r = take_name(c, "a key", PRT_GGUF_KEY_BYTES_MAX, &kv->key_offset, &kv->key_len);

    if (r < 0)
        return r;
    r = take_u32(c, "a key's type", &kv->type);
    if (r < 0)
        return r;
    kv->value_offset = c->pos;
    if (kv->type == PRT_GGUF_STRING) {
        kv->value_offset += 8;
        r = skip_string(c, "a string");
    } else if (kv->type == PRT_GGUF_ARRAY) {
        r = skip_array(c, 1, &kv->elem_type, &kv->elem_count, &kv->value_offset);
    } else if (kv->type < PRT_GGUF_VALUE_COUNT) {
        r = skip(c, prt_gguf_value_bytes(kv->type), "a value");
    } else {
        struct prt_str k = {(const char *)c->buf + kv->key_offset, kv->key_len};

        r = shm_error_set(c->err, EINVAL, "%s: key %.*s has value type %" PRIu32 ", known are 0 to %d",
                          c->part->path, PRT_STR(k), kv->type, PRT_GGUF_VALUE_COUNT - 1);
    }
    if (r < 0)
        return r;
    kv->value_end = c->pos;
    return 0;
}

static int parse_tensor(struct cursor *c, struct prt_gguf_raw_tensor *t)
{
    const struct prt_gguf_type_info *info;
    struct prt_str name;
    uint64_t elems = 1;
    int r = take_name(c, "a tensor name", PRT_GGUF_NAME_BYTES_MAX, &t->name_offset, &t->name_len);

    if (r < 0)
        return r;
    r = take_u32(c, "a tensor entry", &t->n_dims);
    if (r < 0)
        return r;
    name = (struct prt_str){(const char *)c->buf + t->name_offset, t->name_len};
    if (t->n_dims < 1 || t->n_dims > PRT_GGUF_DIMS_MAX)
        return shm_error_set(c->err, EINVAL,
                             "%s: tensor %.*s has %" PRIu32 " dimensions, supported are 1 to %d",
                             c->part->path, PRT_STR(name), t->n_dims, PRT_GGUF_DIMS_MAX);
    for (unsigned i = 0; i < PRT_GGUF_DIMS_MAX; i++) {
        t->dims[i] = 1;
        r = i < t->n_dims ? take_u64(c, "a tensor entry", &t->dims[i]) : 0;
        if (r < 0)
            return r;
        name.data = (const char *)c->buf + t->name_offset;
        if (t->dims[i] == 0 || __builtin_mul_overflow(elems, t->dims[i], &elems))
            return shm_error_set(c->err, EINVAL, "%s: tensor %.*s: dimension %u is %" PRIu64 ", %s",
                                 c->part->path, PRT_STR(name), i, t->dims[i],
                                 t->dims[i] ? "the number of elements overflows" : "must not be 0");
    }
    r = take_u32(c, "a tensor entry", &t->type);
    if (r < 0)
        return r;
    r = take_u64(c, "a tensor entry", &t->offset);
    if (r < 0)
        return r;
    name.data = (const char *)c->buf + t->name_offset;
    info = prt_gguf_type_info(t->type);
    if (!info)
        return shm_error_set(c->err, EINVAL, "%s: tensor %.*s has type number %" PRIu32 ", not known",
                             c->part->path, PRT_STR(name), t->type);
    if (t->dims[0] % info->block_elems)
        return shm_error_set(c->err, EINVAL,
                             "%s: tensor %.*s: rows of %" PRIu64
                             " elements do not divide into %s blocks of %" PRIu32,
                             c->part->path, PRT_STR(name), t->dims[0], info->name, info->block_elems);
    if (__builtin_mul_overflow(elems / info->block_elems, (uint64_t)info->block_bytes, &t->size_bytes))
        return shm_error_set(c->err, EINVAL, "%s: tensor %.*s: its size in bytes overflows", c->part->path,
                             PRT_STR(name));
    return 0;
}

static int cmp_kv(const void *a, const void *b, void *arg)
{
    return prt_str_cmp(prt_gguf_kv_key(arg, *(const uint32_t *)a),
                       prt_gguf_kv_key(arg, *(const uint32_t *)b));
}

static int cmp_offset(const void *a, const void *b, void *arg)
{
    const struct prt_gguf_raw_tensor *raw = arg;
    uint64_t x = raw[*(const uint32_t *)a].offset, y = raw[*(const uint32_t *)b].offset;

    return (x > y) - (x < y);
}

static int sort_keys(struct prt_gguf_part *part, struct shm_error *err)
{
    part->kv_sorted = malloc((part->n_kv ? part->n_kv : 1) * sizeof(*part->kv_sorted));
    if (!part->kv_sorted)
        return shm_error_set(err, ENOMEM, "%s: no memory for %" PRIu32 " keys; free some", part->path,
                             part->n_kv);
    for (uint32_t i = 0; i < part->n_kv; i++)
        part->kv_sorted[i] = i;
    qsort_r(part->kv_sorted, part->n_kv, sizeof(*part->kv_sorted), cmp_kv, part);
    for (uint32_t i = 1; i < part->n_kv; i++) {
        struct prt_str k = prt_gguf_kv_key(part, part->kv_sorted[i]);

        if (prt_str_cmp(k, prt_gguf_kv_key(part, part->kv_sorted[i - 1])) == 0)
            return shm_error_set(err, EINVAL, "%s: key %.*s appears twice", part->path, PRT_STR(k));
    }
    return 0;
}

static int find_alignment(struct prt_gguf_part *part, struct shm_error *err)
{
    uint64_t a = ALIGNMENT;
    int r = prt_gguf_part_u64(part, "general.alignment", &a, err);

    if (r < 0 && r != -ENOENT)
        return r;
    if (a < ALIGNMENT_MIN || a > ALIGNMENT_MAX || (a & (a - 1)))
        return shm_error_set(err, EINVAL,
                             "%s: key general.alignment is %" PRIu64
                             ", supported are powers of two from %u to %u",
                             part->path, a, ALIGNMENT_MIN, ALIGNMENT_MAX);
    part->pub.alignment = (uint32_t)a;
    /* header_bytes <= size <= INT64_MAX, so this cannot overflow. */
    part->pub.data_offset = (part->pub.header_bytes + a - 1) & ~(a - 1);
    return 0;
}

/* Each tensor aligned, inside the file, not over another. */
static int check_ranges(struct prt_gguf_part *part, struct shm_error *err)
{
    uint64_t size = part->pub.size_bytes, base = part->pub.data_offset, end = 0;
    uint64_t room = size > base ? size - base : 0;
    uint32_t *order = malloc((part->n_raw ? part->n_raw : 1) * sizeof(*order));
    int r = 0;

    if (!order)
        return shm_error_set(err, ENOMEM, "%s: no memory for %" PRIu32 " tensors; free some", part->path,
                             part->n_raw);
    for (uint32_t i = 0; i < part->n_raw; i++)
        order[i] = i;
    qsort_r(order, part->n_raw, sizeof(*order), cmp_offset, part->raw);
    for (uint32_t i = 0; i < part->n_raw && r == 0; i++) {
        const struct prt_gguf_raw_tensor *t = &part->raw[order[i]];
        struct prt_str name = {(const char *)part->header + t->name_offset, t->name_len};

        if (t->offset % part->pub.alignment) {
            r = shm_error_set(err, EINVAL,
                              "%s: tensor %.*s: data offset %" PRIu64 " is not aligned to %" PRIu32,
                              part->path, PRT_STR(name), t->offset, part->pub.alignment);
        } else if (t->offset > room || t->size_bytes > room - t->offset) {
            r = shm_error_set(err, EINVAL,
                              "%s: tensor %.*s: %" PRIu64 " bytes at data offset %" PRIu64
                              ", but the file holds %" PRIu64
                              " bytes of data (incomplete download?): get the whole file",
                              part->path, PRT_STR(name), t->size_bytes, t->offset, room);
        } else if (t->offset < end) {
            const struct prt_gguf_raw_tensor *o = &part->raw[order[i - 1]];
            struct prt_str other = {(const char *)part->header + o->name_offset, o->name_len};

            r = shm_error_set(err, EINVAL, "%s: tensors %.*s and %.*s overlap at data offset %" PRIu64,
                              part->path, PRT_STR(other), PRT_STR(name), t->offset);
        } else {
            end = t->offset + t->size_bytes;
        }
    }
    free(order);
    return r;
}

static int parse_head(struct cursor *c, uint64_t *ret_tensors, uint64_t *ret_keys)
{
    uint32_t version = 0;
    int r = need(c, 8, "the magic");

    if (r < 0)
        return r;
    if (memcmp(c->buf, "GGUF", 4) != 0)
        return shm_error_set(
            c->err, EINVAL,
            "%s: not a GGUF file (it does not begin with \"GGUF\"): name a model in that format",
            c->part->path);
    c->pos = 4;
    r = take_u32(c, "the version", &version);
    if (r < 0)
        return r;
    if (version == __builtin_bswap32(2) || version == __builtin_bswap32(3))
        return shm_error_set(c->err, EINVAL, "%s: big-endian GGUF, only little-endian is supported",
                             c->part->path);
    if (version != 2 && version != 3)
        return shm_error_set(c->err, EINVAL, "%s: GGUF version %" PRIu32 ", supported are 2 and 3",
                             c->part->path, version);
    r = take_u64(c, "the counts", ret_tensors);
    if (r < 0)
        return r;
    r = take_u64(c, "the counts", ret_keys);
    if (r < 0)
        return r;
    if (*ret_keys > PRT_GGUF_KEYS_MAX || *ret_keys > bytes_left(c) / KEY_BYTES_MIN)
        return shm_error_set(
            c->err, EINVAL,
            "%s: claims %" PRIu64
            " keys, more than fit in the file or than %u (incomplete download?): get the whole file",
            c->part->path, *ret_keys, PRT_GGUF_KEYS_MAX);
    if (*ret_tensors > PRT_GGUF_TENSORS_MAX || *ret_tensors > bytes_left(c) / TENSOR_BYTES_MIN)
        return shm_error_set(
            c->err, EINVAL,
            "%s: claims %" PRIu64
            " tensors, more than fit in the file or than %u (incomplete download?): get the whole file",
            c->part->path, *ret_tensors, PRT_GGUF_TENSORS_MAX);
    return 0;
}

static int parse_all(struct cursor *c)
{
    struct prt_gguf_part *part = c->part;
    uint64_t n_tensors = 0, n_keys = 0;
    int r = parse_head(c, &n_tensors, &n_keys);

    if (r < 0)
        return r;
    part->kv = calloc(n_keys ? n_keys : 1, sizeof(*part->kv));
    part->raw = calloc(n_tensors ? n_tensors : 1, sizeof(*part->raw));
    if (!part->kv || !part->raw)
        return shm_error_set(c->err, ENOMEM,
                             "%s: no memory for %" PRIu64 " keys and %" PRIu64 " tensors; free some",
                             part->path, n_keys, n_tensors);
    for (; part->n_kv < n_keys; part->n_kv++) {
        r = parse_key(c, &part->kv[part->n_kv]);
        if (r < 0)
            return r;
    }
    for (; part->n_raw < n_tensors; part->n_raw++) {
        r = parse_tensor(c, &part->raw[part->n_raw]);
        if (r < 0)
            return r;
    }
    return 0;
}

int prt_gguf_parse(struct prt_gguf_part *part, const uint8_t *memory, uint64_t budget, struct shm_error *err)
{
    struct cursor c = {
        .part = part, .memory = memory, .size = part->pub.size_bytes, .limit = budget, .err = err};
    uint8_t *exact;
    int r = parse_all(&c);

    part->header = c.buf;
    if (r < 0)
        return r;
    /* What was read beyond the header is tensor data: give it back. */
    exact = realloc(c.buf, c.pos);
    if (exact)
        part->header = exact;
    part->pub.header = part->header;
    part->pub.header_bytes = c.pos;
    r = sort_keys(part, err);
    if (r < 0)
        return r;
    r = find_alignment(part, err);
    if (r < 0)
        return r;
    return check_ranges(part, err);
}
