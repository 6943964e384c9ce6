/* SPDX-License-Identifier: MIT */
/*
 * Inside of the GGUF reader: what the parser of one shard hands to the opener
 * and to the typed accessors. Nothing outside prt_gguf*.c includes it.
 */
#ifndef PRT_GGUF_PRIV_H
#define PRT_GGUF_PRIV_H

#include <endian.h>
#include <string.h>

#include "proto/prt_gguf.h"

/* One metadata entry; offsets are into the shard's header and were checked. */
struct prt_gguf_kv {
    uint64_t key_offset;
    uint32_t key_len;
    uint32_t type;         /* enum prt_gguf_value */
    uint64_t value_offset; /* of the value; of the first element for an array */
    uint64_t value_end;
    uint32_t elem_type;  /* of an array */
    uint64_t elem_count; /* of an array */
};

struct prt_gguf_raw_tensor {
    uint64_t name_offset;
    uint32_t name_len;
    uint32_t type;
    uint32_t n_dims;
    uint64_t dims[PRT_GGUF_DIMS_MAX];
    uint64_t offset; /* relative to the data section */
    uint64_t size_bytes;
};

/* A shard while it is parsed and afterwards. All pointers are owned. */
struct prt_gguf_part {
    struct prt_gguf_shard pub;
    char *path;
    uint8_t *header;
    struct prt_gguf_kv *kv;
    uint32_t *kv_sorted; /* indices into kv, by key */
    uint32_t n_kv;
    struct prt_gguf_raw_tensor *raw;
    uint32_t n_raw;
};

struct prt_gguf {
    struct prt_gguf_part *part;
    uint32_t n_parts;
    struct prt_gguf_tensor *tensor;
    uint32_t *tensor_sorted; /* indices into tensor, by name */
    uint32_t n_tensors;
};

struct prt_gguf_type_info {
    const char *name;
    uint32_t block_elems;
    uint32_t block_bytes;
};

/* Any type the format defines, NULL otherwise. */
const struct prt_gguf_type_info *prt_gguf_type_info(uint32_t type);

/* Bytes of a fixed-size value type; 0 for strings, arrays and unknown numbers. */
uint32_t prt_gguf_value_bytes(uint32_t type);

/* Reads and checks the header of one shard. part->path, pub.fd and
 * pub.size_bytes are set; memory is the file's content or NULL to read from fd;
 * at most budget bytes of header. On failure the caller frees part. */
int prt_gguf_parse(struct prt_gguf_part *part, const uint8_t *memory, uint64_t budget, struct shm_error *err);

/* An integer key of one shard: as prt_gguf_u32(), of 64 bits. */
int prt_gguf_part_u64(const struct prt_gguf_part *part, const char *key, uint64_t *ret_value,
                      struct shm_error *err);
const struct prt_gguf_kv *prt_gguf_part_find(const struct prt_gguf_part *part, const char *key);

static inline int prt_str_cmp(struct prt_str a, struct prt_str b)
{
    int c = memcmp(a.data, b.data, a.len < b.len ? a.len : b.len);

    return c ? c : (a.len > b.len) - (a.len < b.len);
}

static inline struct prt_str prt_gguf_kv_key(const struct prt_gguf_part *part, uint32_t i)
{
    return (struct prt_str){(const char *)part->header + part->kv[i].key_offset, part->kv[i].key_len};
}

static inline uint32_t prt_le32(const uint8_t *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

static inline uint64_t prt_le64(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

#endif
