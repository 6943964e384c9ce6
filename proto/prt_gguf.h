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
 * A struct prt_gguf is immutable after it was opened, so that any number of
 * threads may read it. Strings and arrays it hands out point into it.
 */
#ifndef PRT_GGUF_H
#define PRT_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/shm_error.h"

#define PRT_GGUF_HEADER_BYTES_MAX (512ull << 20) /* all shards together */
#define PRT_GGUF_SHARDS_MAX       512u           /* one descriptor each */
#define PRT_GGUF_KEYS_MAX         65536u         /* of one shard */
#define PRT_GGUF_TENSORS_MAX      (1u << 20)     /* of one shard */
#define PRT_GGUF_KEY_BYTES_MAX    65535u         /* the format's own limit */
#define PRT_GGUF_NAME_BYTES_MAX   255u           /* tensor names */
#define PRT_GGUF_DIMS_MAX         4
#define PRT_GGUF_NESTING_MAX      4 /* arrays within arrays */

struct prt_gguf;

/* Bytes inside the header: not terminated, may hold any byte. */
struct prt_str {
    const char *data;
    size_t len;
};

/* For "%.*s": PRT_STR(s) gives length (cut at 200) and pointer. */
#define PRT_STR(s) (int)((s).len < 200 ? (s).len : 200), (s).data

enum prt_gguf_value {
    PRT_GGUF_U8,
    PRT_GGUF_I8,
    PRT_GGUF_U16,
    PRT_GGUF_I16,
    PRT_GGUF_U32,
    PRT_GGUF_I32,
    PRT_GGUF_F32,
    PRT_GGUF_BOOL,
    PRT_GGUF_STRING,
    PRT_GGUF_ARRAY,
    PRT_GGUF_U64,
    PRT_GGUF_I64,
    PRT_GGUF_F64,
    PRT_GGUF_VALUE_COUNT
};

struct prt_gguf_tensor {
    struct prt_str name;
    uint32_t type; /* ggml type number; its storage form is known to prt_gguf_type_name() */
    uint32_t n_dims;
    uint64_t dims[PRT_GGUF_DIMS_MAX]; /* dims[0] = length of a row; 1 beyond n_dims */
    uint32_t shard;
    uint64_t offset;     /* absolute in that shard's file, aligned */
    uint64_t size_bytes; /* never 0; offset + size_bytes is inside the file */
};

struct prt_gguf_shard {
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
struct prt_gguf_memory {
    const char *name;
    const void *data;
    size_t size_bytes;
};

/* Opens the file at path. Of a split model any shard may be given: all are
 * opened, and a missing one is named. Blocks on reads of the headers. Errors:
 * -EINVAL (not a usable GGUF file), -ENOMEM, or what open/fstat/pread said. */
int prt_gguf_open(const char *path, struct prt_gguf **ret_gguf, struct shm_error *err);

/* The same over n complete files in memory, in shard order. The header bytes
 * are copied; src need not outlive the call. */
int prt_gguf_open_memory(const struct prt_gguf_memory *src, size_t n, struct prt_gguf **ret_gguf,
                         struct shm_error *err);

/* Closes the descriptors and frees everything. Accepts NULL, nulls *gguf. */
void prt_gguf_close(struct prt_gguf **gguf);

uint32_t prt_gguf_shard_count(const struct prt_gguf *gguf);
const struct prt_gguf_shard *prt_gguf_shard(const struct prt_gguf *gguf, uint32_t index);

/* Path of the first shard: what error lines call the model. */
const char *prt_gguf_path(const struct prt_gguf *gguf);

/* XXH3-128 (canonical byte order) over each shard's header bytes, size and
 * modification time: changes when the file was written again, costs no I/O. */
void prt_gguf_fingerprint(const struct prt_gguf *gguf, uint8_t ret_hash[16]);

/* -ESTALE when a file was written since it was opened (another size or modification time than the
 * fingerprint's): what was read of it may be of both. -errno when that can't be told. Names the file. */
int prt_gguf_unchanged(const struct prt_gguf *gguf, struct shm_error *err);

/* Tensors of all shards, in file order. */
uint32_t prt_gguf_tensor_count(const struct prt_gguf *gguf);
const struct prt_gguf_tensor *prt_gguf_tensor(const struct prt_gguf *gguf, uint32_t index);

/* The tensor of that name, or NULL. O(log n). */
const struct prt_gguf_tensor *prt_gguf_find_tensor(const struct prt_gguf *gguf, const char *name);

/* Metadata keys (of the first shard), in file order. */
uint32_t prt_gguf_key_count(const struct prt_gguf *gguf);
struct prt_str prt_gguf_key(const struct prt_gguf *gguf, uint32_t index);
bool prt_gguf_has(const struct prt_gguf *gguf, const char *key);

/* Typed values. All return 0, -ENOENT (no such key) or -EINVAL (another type, or
 * out of range), the latter two with a line that names file, key and what was
 * found. u32 takes any integer type whose value fits; f32 takes f32 and
 * f64. Nothing is written on failure. */
int prt_gguf_u32(const struct prt_gguf *gguf, const char *key, uint32_t *ret_value, struct shm_error *err);
int prt_gguf_f32(const struct prt_gguf *gguf, const char *key, float *ret_value, struct shm_error *err);
int prt_gguf_bool(const struct prt_gguf *gguf, const char *key, bool *ret_value, struct shm_error *err);
int prt_gguf_str(const struct prt_gguf *gguf, const char *key, struct prt_str *ret_value,
                 struct shm_error *err);

/* Walks an array of strings: copy the struct to walk again. */
struct prt_gguf_strings {
    uint64_t count;        /* of the whole array */
    uint64_t left;         /* not yet handed out */
    const uint8_t *cursor; /* private */
    size_t size_bytes;     /* of all strings together, without terminators */
};

int prt_gguf_strings(const struct prt_gguf *gguf, const char *key, struct prt_gguf_strings *ret_strings,
                     struct shm_error *err);

/* The next string, false at the end. Lengths were checked when the file was opened. */
bool prt_gguf_strings_next(struct prt_gguf_strings *strings, struct prt_str *ret_value);

/* An array of 32-bit integers (signed or unsigned elements are both read as
 * int32_t; an unsigned one above INT32_MAX is refused). Elements are little-endian and
 * not aligned: read them through prt_gguf_i32_at(). */
struct prt_gguf_i32s {
    uint64_t count;
    const uint8_t *data;
};

int prt_gguf_i32s(const struct prt_gguf *gguf, const char *key, struct prt_gguf_i32s *ret_array,
                  struct shm_error *err);
int32_t prt_gguf_i32_at(const struct prt_gguf_i32s *array, uint64_t index); /* index < count */

/* Array of 32-bit floats, likewise. */
struct prt_gguf_f32s {
    uint64_t count;
    const uint8_t *data;
};

int prt_gguf_f32s(const struct prt_gguf *gguf, const char *key, struct prt_gguf_f32s *ret_array,
                  struct shm_error *err);
float prt_gguf_f32_at(const struct prt_gguf_f32s *array, uint64_t index); /* index < count */

/* Name of a ggml tensor type ("Q4_K"), also of those we cannot compute with;
 * "type N" is not invented: NULL for a number the format does not define. */
const char *prt_gguf_type_name(uint32_t type);

#endif
