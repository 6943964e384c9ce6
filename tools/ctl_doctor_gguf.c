/* SPDX-License-Identifier: MIT */
/* The few numbers of a GGUF header that say how much memory a model takes. */
#include "tools/ctl_doctor.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEYS_MAX   65536u
#define KEY_BYTES  256u /* longer ones are none of ours */
#define SHARDS_MAX 1000u
#define ARENA_PAGE (2u << 20)

enum { TYPE_STRING = 8, TYPE_ARRAY = 9, TYPE_COUNT = 13 };

struct header {
    FILE *f;
    const char *path;
    uint64_t size, at; /* of the file; read so far */
    struct shm_error *err;
};

static int take(struct header *h, void *to, uint64_t n)
{
    if (n > h->size - h->at || fread(to, 1, n, h->f) != n)
        return shm_error_set(h->err, EINVAL,
                             "%.300s: its header ends after %" PRIu64 " bytes: get the whole file", h->path,
                             h->at);
    h->at += n;
    return 0;
}

static int skip(struct header *h, uint64_t n)
{
    uint8_t bytes[4096];
    if (n <= sizeof bytes)
        return take(h, bytes, n);
    if (n > h->size - h->at || fseeko(h->f, (off_t)n, SEEK_CUR) != 0)
        return take(h, bytes, UINT64_MAX); /* past the end: its error */
    h->at += n;
    return 0;
}

/* Little-endian, whatever this machine is. */
static int take_number(struct header *h, unsigned bytes, uint64_t *ret_value)
{
    uint8_t b[8] = {0};
    int rc = take(h, b, bytes);
    if (rc)
        return rc;
    *ret_value = 0;
    for (unsigned i = bytes; i-- > 0;)
        *ret_value = *ret_value << 8 | b[i];
    return 0;
}

static unsigned type_bytes(uint64_t type)
{
    static const uint8_t bytes[TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < TYPE_COUNT ? bytes[type] : 0;
}

static int bad(struct header *h, const char *what)
{
    return shm_error_set(h->err, EINVAL, "%.300s: %s at byte %" PRIu64 ": it is damaged or no GGUF file",
                         h->path, what, h->at);
}

static int skip_string(struct header *h)
{
    uint64_t n;
    int rc = take_number(h, 8, &n);
    return rc ? rc : skip(h, n);
}

/* An array is passed over; of numbers at once. */
static int skip_array(struct header *h)
{
    uint64_t type, count;
    int rc = take_number(h, 4, &type);
    if (rc || (rc = take_number(h, 8, &count)))
        return rc;
    if (count > h->size)
        return bad(h, "an array longer than the file");
    if (type_bytes(type))
        return skip(h, count * type_bytes(type));
    if (type != TYPE_STRING)
        return bad(h, "an array of an unknown type");
    for (uint64_t i = 0; i < count && !rc; i++)
        rc = skip_string(h);
    return rc;
}

enum { LAYERS, CONTEXT, HIDDEN, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, ALIGNMENT, WORDS };

/* Keys of a model begin with its architecture's name: what follows it. */
static int word_of(const char *key)
{
    static const char *const name[WORDS] = {"block_count",
                                            "context_length",
                                            "embedding_length",
                                            "attention.head_count",
                                            "attention.head_count_kv",
                                            "attention.key_length",
                                            "attention.value_length",
                                            "alignment"};
    const char *dot = strchr(key, '.');
    for (int i = 0; dot && i < WORDS; i++)
        if (strcmp(dot + 1, name[i]) == 0)
            return i;
    return -1;
}

static int read_entry(struct header *h, uint64_t word[WORDS])
{
    char key[KEY_BYTES + 1] = "";
    uint64_t n, type, value = 0;
    int rc = take_number(h, 8, &n);
    if (!rc)
        rc = n <= KEY_BYTES ? take(h, key, n) : skip(h, n);
    if (rc || (rc = take_number(h, 4, &type)))
        return rc;
    if (type == TYPE_STRING)
        return skip_string(h);
    if (type == TYPE_ARRAY)
        return skip_array(h);
    if (!type_bytes(type))
        return bad(h, "a value of an unknown type");
    rc = take_number(h, type_bytes(type), &value);
    int w = word_of(key);
    if (!rc && w >= 0 && value <= 1u << 30) /* no number of a model is larger: products fit */
        word[w] = value;
    return rc;
}

/* What so many values take; of types that are not known here: nothing. */
static uint64_t least_bytes(uint64_t type, uint64_t values)
{
    static const struct {
        uint8_t type;
        uint16_t values, bytes; /* of a block */
    } types[] = {{0, 1, 4},      {1, 1, 2},      {2, 32, 18},   {3, 32, 20},    {6, 32, 22},
                 {7, 32, 24},    {8, 32, 34},    {10, 256, 84}, {11, 256, 110}, {12, 256, 144},
                 {13, 256, 176}, {14, 256, 210}, {30, 1, 2},    {39, 32, 17}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (types[i].type == type)
            return values < UINT64_C(1) << 50 ? values / types[i].values * types[i].bytes : UINT64_C(1) << 53;
    return 0;
}

/* Where data would have to end at least: by the beginnings of all tensors and the sizes of common types. */
static int check_data(struct header *h, uint64_t tensors, uint64_t alignment)
{
    uint64_t need = 0;
    for (uint64_t i = 0; i < tensors; i++) {
        uint64_t dims, n, type, offset, values = 1;
        int rc = skip_string(h);
        if (rc || (rc = take_number(h, 4, &dims)))
            return rc;
        if (dims > 4)
            return bad(h, "a tensor of more than 4 dimensions");
        for (uint64_t k = 0; k < dims && !rc; k++) {
            rc = take_number(h, 8, &n);
            if (!rc && __builtin_mul_overflow(values, n, &values))
                return bad(h, "a tensor that is too large");
        }
        if (rc || (rc = take_number(h, 4, &type)) || (rc = take_number(h, 8, &offset)))
            return rc;
        if (__builtin_add_overflow(offset, least_bytes(type, values), &n))
            return bad(h, "a tensor that is too large");
        need = need > n ? need : n;
    }
    uint64_t begin = (h->at + alignment - 1) / alignment * alignment;
    if (tensors && (begin > h->size || need > h->size - begin))
        return shm_error_set(h->err, EINVAL,
                             "%.300s: its data ends after %" PRIu64 " bytes, at least %" PRIu64
                             " belong there (incomplete download?): get the whole file",
                             h->path, h->size > begin ? h->size - begin : 0, need);
    return 0;
}

static int read_header(struct header *h, struct doctor_model *m)
{
    uint64_t magic, version, tensors, keys, word[WORDS] = {0};
    int rc = take_number(h, 4, &magic);
    if (rc || (rc = take_number(h, 4, &version)) || (rc = take_number(h, 8, &tensors)) ||
        (rc = take_number(h, 8, &keys)))
        return rc;
    if (magic != 0x46554747u || version < 2 || version > 3)
        return bad(h, "no header of GGUF 2 or 3");
    if (keys > KEYS_MAX)
        return bad(h, "more keys than a model has");
    for (uint64_t i = 0; i < keys && !rc; i++)
        rc = read_entry(h, word);
    if (rc)
        return rc;
    if ((rc = check_data(h, tensors, word[ALIGNMENT] ? word[ALIGNMENT] : 32)))
        return rc;
    uint64_t heads = word[KV_HEADS] ? word[KV_HEADS] : word[HEADS];
    uint64_t dim = word[HEADS] ? word[HIDDEN] / word[HEADS] : 0;
    uint64_t both = (word[KEY_DIM] ? word[KEY_DIM] : dim) + (word[VALUE_DIM] ? word[VALUE_DIM] : dim);
    uint64_t a, b;
    m->context = word[CONTEXT];
    if (!__builtin_mul_overflow(word[LAYERS] * heads, both, &a) && !__builtin_mul_overflow(a, 2, &b))
        m->kv_token_bytes = b;
    return 0;
}

/* Size of a model's file; of a shard NAME-00001-of-00003.gguf: of all. */
static int add_shards(const char *path, uint64_t own, struct doctor_model *m, struct shm_error *err)
{
    unsigned number, count;
    int end = 0;
    size_t n = strlen(path);
    m->file_bytes = own;
    m->shards = 1;
    const char *tail = n > 20 ? path + n - 20 : "";
    if (sscanf(tail, "-%5u-of-%5u.gguf%n", &number, &count, &end) != 2 || end != 20 || count < 2)
        return 0;
    if (count > SHARDS_MAX)
        return shm_error_set(err, EINVAL, "%.300s: %u shards, at most %u are read", path, count, SHARDS_MAX);
    m->file_bytes = 0;
    m->shards = count;
    for (unsigned i = 1; i <= count; i++) {
        char name[4096];
        struct stat st;
        if (snprintf(name, sizeof name, "%.*s-%05u-of-%05u.gguf", (int)(n - 20), path, i, count) >=
            (int)sizeof name)
            return shm_error_set(err, ENAMETOOLONG, "%.300s: its path is too long", path);
        if (stat(name, &st) != 0)
            return shm_error_set(err, errno, "%.300s: %s: get all %u shards", name, strerror(errno), count);
        m->file_bytes += (uint64_t)st.st_size;
    }
    return 0;
}

/* Keys are in the first shard. */
static void first_shard(const char *path, char first[4096])
{
    unsigned number, count;
    int end = 0;
    size_t n = strlen(path);
    snprintf(first, 4096, "%s", path);
    if (n > 20 && n < 4096 && sscanf(path + n - 20, "-%5u-of-%5u.gguf%n", &number, &count, &end) == 2 &&
        end == 20)
        memcpy(first + n - 20 + 1, "00001", 5);
}

int doctor_read_model(const char *path, struct doctor_model *ret_model, struct shm_error *err)
{
    char first[4096];
    struct stat st;
    struct doctor_model m = {0};
    first_shard(path, first);
    if (stat(first, &st) != 0)
        return shm_error_set(err, errno, "%.300s: %s: give another with --model FILE", first,
                             strerror(errno));
    if (!S_ISREG(st.st_mode)) /* a pipe would be waited for */
        return shm_error_set(err, EINVAL, "%.300s: is no file: give another with --model FILE", first);
    struct header h = {.path = first, .size = (uint64_t)st.st_size, .err = err};
    h.f = fopen(first, "re");
    if (!h.f)
        return shm_error_set(err, errno, "%.300s: %s: let this user read it", first, strerror(errno));
    int rc = read_header(&h, &m);
    fclose(h.f);
    if (!rc)
        rc = add_shards(first, h.size, &m, err);
    if (rc)
        return rc;
    /* Everything of the file goes in; places are rounded up a little. */
    m.arena_bytes = (m.file_bytes / ARENA_PAGE + 2) * ARENA_PAGE;
    *ret_model = m;
    return 0;
}
