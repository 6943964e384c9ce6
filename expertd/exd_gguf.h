/* SPDX-License-Identifier: MIT */
/*
 * Reader of GGUF model files (version 2 and 3, little-endian), also of models
 * split into shards (NAME-00001-of-0000N.gguf).
 *
 * It reads the header of each shard (metadata and tensor table) into memory
 * with pread and checks every length in it against the bytes that are there;
 * it never reads, maps or copies tensor data. Files are taken as hostile: a bad
 * one gives -EINVAL (or the I/O error) and one line that names file and place.
 *
 * A struct exd_gguf is immutable after it was opened, so that any number of
 * threads may read it. Strings and arrays it hands out point into it.
 */
#ifndef EXD_GGUF_H
#define EXD_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/shm_error.h"

#define EXD_GGUF_HEADER_BYTES_MAX (512ull << 20) /* all shards together */
#define EXD_GGUF_SHARDS_MAX       512u           /* one descriptor each */
#define EXD_GGUF_KEYS_MAX         65536u         /* of one shard */
#define EXD_GGUF_TENSORS_MAX      (1u << 20)     /* of one shard */
#define EXD_GGUF_KEY_BYTES_MAX    65535u         /* the format's own limit */
#define EXD_GGUF_NAME_BYTES_MAX   255u           /* tensor names */
#define EXD_GGUF_DIMS_MAX         4
#define EXD_GGUF_NESTING_MAX      4 /* arrays within arrays */

struct exd_gguf;

/* Bytes inside the header: not terminated, may hold any byte. */
struct exd_str {
    const char *data;
    size_t len;
};

/* For "%.*s": EXD_STR(s) gives length (cut at 200) and pointer. */
#define EXD_STR(s) (int)((s).len < 200 ? (s).len : 200), (s).data

enum exd_gguf_value {
    EXD_GGUF_U8,
    EXD_GGUF_I8,
    EXD_GGUF_U16,
    EXD_GGUF_I16,
    EXD_GGUF_U32,
    EXD_GGUF_I32,
    EXD_GGUF_F32,
    EXD_GGUF_BOOL,
    EXD_GGUF_STRING,
    EXD_GGUF_ARRAY,
    EXD_GGUF_U64,
    EXD_GGUF_I64,
    EXD_GGUF_F64,
    EXD_GGUF_VALUE_COUNT
};

struct exd_gguf_tensor {
    struct exd_str name;
    uint32_t type; /* ggml type number; its storage form is known to exd_gguf_type_name() */
    uint32_t n_dims;
    uint64_t dims[EXD_GGUF_DIMS_MAX]; /* dims[0] = length of a row; 1 beyond n_dims */
    uint32_t shard;
    uint64_t offset;     /* absolute in that shard's file, aligned */
    uint64_t size_bytes; /* never 0; offset + size_bytes is inside the file */
};

struct exd_gguf_shard {
    const char *path;      /* as opened, or the name given to a memory source */
    int fd;                /* O_RDONLY | O_CLOEXEC, owned by the gguf; -1 for a memory source */
    uint64_t size_bytes;   /* of the file */
    int64_t mtime_ns;      /* 0 for a memory source */
    const uint8_t *header; /* first header_bytes bytes of the file, up to the end of the tensor table */
    uint64_t header_bytes;
    uint64_t data_offset; /* where tensor data starts */
    uint32_t alignment;
};

/* A file in memory: the seam for fuzzing and tests. */
struct exd_gguf_memory {
    const char *name;
    const void *data;
    size_t size_bytes;
};

/* Opens the file at path. Of a split model any shard may be given: all are
 * opened, and a missing one is named. Blocks on reads of the headers. Errors:
 * -EINVAL (not a usable GGUF file), -ENOMEM, or what open/fstat/pread said. */
int exd_gguf_open(const char *path, struct exd_gguf **ret_gguf, struct shm_error *err);

/* The same over n complete files in memory, in shard order. The header bytes
 * are copied; src need not outlive the call. */
int exd_gguf_open_memory(const struct exd_gguf_memory *src, size_t n, struct exd_gguf **ret_gguf,
                         struct shm_error *err);

/* Closes the descriptors and frees everything. Accepts NULL, nulls *gguf. */
void exd_gguf_close(struct exd_gguf **gguf);

uint32_t exd_gguf_shard_count(const struct exd_gguf *gguf);
const struct exd_gguf_shard *exd_gguf_shard(const struct exd_gguf *gguf, uint32_t index);

/* Path of the first shard: what error lines call the model. */
const char *exd_gguf_path(const struct exd_gguf *gguf);

/* XXH3-128 (canonical byte order) over each shard's header bytes, size and
 * modification time: changes when the file was written again, costs no I/O. */
void exd_gguf_fingerprint(const struct exd_gguf *gguf, uint8_t ret_hash[16]);

/* -ESTALE when a file was written since it was opened (another size or modification time than the
 * fingerprint's): what was read of it may be of both. -errno when that can't be told. Names the file. */
int exd_gguf_unchanged(const struct exd_gguf *gguf, struct shm_error *err);

/* Tensors of all shards, in file order. */
uint32_t exd_gguf_tensor_count(const struct exd_gguf *gguf);
const struct exd_gguf_tensor *exd_gguf_tensor(const struct exd_gguf *gguf, uint32_t index);

/* The tensor of that name, or NULL. O(log n). */
const struct exd_gguf_tensor *exd_gguf_find_tensor(const struct exd_gguf *gguf, const char *name);

/* Metadata keys (of the first shard), in file order. */
uint32_t exd_gguf_key_count(const struct exd_gguf *gguf);
struct exd_str exd_gguf_key(const struct exd_gguf *gguf, uint32_t index);
bool exd_gguf_has(const struct exd_gguf *gguf, const char *key);

/* Typed values. All return 0, -ENOENT (no such key) or -EINVAL (another type, or
 * out of range), the latter two with a line that names file, key and what was
 * found. u32 takes any integer type whose value fits; f32 takes f32 and
 * f64. Nothing is written on failure. */
int exd_gguf_u32(const struct exd_gguf *gguf, const char *key, uint32_t *ret_value, struct shm_error *err);
int exd_gguf_f32(const struct exd_gguf *gguf, const char *key, float *ret_value, struct shm_error *err);
int exd_gguf_bool(const struct exd_gguf *gguf, const char *key, bool *ret_value, struct shm_error *err);
int exd_gguf_str(const struct exd_gguf *gguf, const char *key, struct exd_str *ret_value,
                 struct shm_error *err);

/* Walks an array of strings: copy the struct to walk again. */
struct exd_gguf_strings {
    uint64_t count;        /* of the whole array */
    uint64_t left;         /* not yet handed out */
    const uint8_t *cursor; /* private */
    size_t size_bytes;     /* of all strings together, without terminators */
};

int exd_gguf_strings(const struct exd_gguf *gguf, const char *key, struct exd_gguf_strings *ret_strings,
                     struct shm_error *err);

/* The next string, false at the end. Lengths were checked when the file was opened. */
bool exd_gguf_strings_next(struct exd_gguf_strings *strings, struct exd_str *ret_value);

/* An array of 32-bit integers (signed or unsigned elements are both read as
 * int32_t; an unsigned one above INT32_MAX is refused). Elements are little-endian and
 * not aligned: read them through exd_gguf_i32_at(). */
struct exd_gguf_i32s {
    uint64_t count;
    const uint8_t *data;
};

int exd_gguf_i32s(const struct exd_gguf *gguf, const char *key, struct exd_gguf_i32s *ret_array,
                  struct shm_error *err);
int32_t exd_gguf_i32_at(const struct exd_gguf_i32s *array, uint64_t index); /* index < count */

/* Array of 32-bit floats, likewise. */
struct exd_gguf_f32s {
    uint64_t count;
    const uint8_t *data;
};

int exd_gguf_f32s(const struct exd_gguf *gguf, const char *key, struct exd_gguf_f32s *ret_array,
                  struct shm_error *err);
float exd_gguf_f32_at(const struct exd_gguf_f32s *array, uint64_t index); /* index < count */

/* Name of a ggml tensor type ("Q4_K"), also of those we cannot compute with;
 * "type N" is not invented: NULL for a number the format does not define. */
const char *exd_gguf_type_name(uint32_t type);

#endif
