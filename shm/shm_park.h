/* SPDX-License-Identifier: MIT */
/*
 * Parked blocks: what workers leave in expertd's memory for their next life
 * and for each other. One file, slots of one size, each a head and then the
 * keys and values of up to 128 tokens in the form of one layout.
 *
 * expertd owns the file and says who may write which slot (PARKRESERVE in
 * proto/control.spec); it never reads it. Every worker of the instance maps it
 * read-write: a slot's bytes prove nothing until they fit the checksum that was
 * given to expertd when they were committed.
 */
#ifndef SHM_PARK_H
#define SHM_PARK_H

#include <stdint.h>

#define SHM_PARK_TOKENS     128u  /* of a block */
#define SHM_PARK_HEAD_BYTES 1024u /* keys and values begin there */
#define SHM_PARK_PAGE       4096u /* slots are a multiple of it */

/* Head of a slot. The key of a block is a hash of its parent's key and its tokens; the checksum (XXH3, 128
 * bits) covers the whole head and the keys and values. */
struct shm_park_head {
    uint64_t key[2], parent[2];
    uint64_t block_bytes;
    uint32_t tokens; /* 1 .. SHM_PARK_TOKENS; fewer: the last block of a sequence */
    uint32_t exact;  /* of them, from the first on: read as part of a prompt */
    int32_t ids[SHM_PARK_TOKENS];
    uint8_t zero[SHM_PARK_HEAD_BYTES - 48 - 4 * SHM_PARK_TOKENS];
};
_Static_assert(sizeof(struct shm_park_head) == SHM_PARK_HEAD_BYTES, "shared layout");

static inline uint64_t shm_park_slot_bytes(uint64_t block_bytes)
{
    return (SHM_PARK_HEAD_BYTES + block_bytes + SHM_PARK_PAGE - 1) & ~(uint64_t)(SHM_PARK_PAGE - 1);
}

#endif
