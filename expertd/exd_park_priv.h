/* SPDX-License-Identifier: MIT */
/*
 * Inside of the park: its state, and the index of blocks (exd_park_index.c):
 * lists by key, by parent and by age. Blocks are numbered from 1, 0 is none:
 * zeroed memory is an empty index.
 */
#ifndef EXD_PARK_PRIV_H
#define EXD_PARK_PRIV_H

#include "expertd/exd_park.h"

#include <stdbool.h>
#include <stdint.h>

#define EXD_PARK_CLASSES   (2 * EXD_PARK_SESSIONS)
#define EXD_PARK_SLOTS_MAX (1u << 24)
#define EXD_PARK_LOOK      4096u /* most blocks looked at for others that continue one */

enum exd_block_state {
    EXD_BLOCK_FREE,
    EXD_BLOCK_RESERVED, /* being written; in the index */
    EXD_BLOCK_KEPT,     /* in the index and in the list by age */
    EXD_BLOCK_DEAD      /* in neither; free once the last session lets go */
};

struct exd_block {
    uint64_t key[2], parent[2], checksum[2];
    uint64_t session; /* that reserved it */
    uint32_t class, state, pins;
    uint32_t older, newer; /* by age; free ones: older is the next */
    uint32_t key_next, key_prev, parent_next, parent_prev;
};

struct exd_park_class {
    uint64_t block_bytes;
    char layout[64], build[64];
    uint32_t sessions, blocks; /* in neither: unused */
};

struct exd_park_session {
    uint64_t number; /* 0: unused */
    uint32_t class;
    uint32_t pins, reservations;
    uint32_t pin[PRT_PARK_KEYS + PRT_PARK_OTHERS];
    uint32_t reservation[PRT_PARK_BATCH]; /* 0: committed */
};

struct exd_park {
    char path[1024];
    int fd;
    uint8_t model[16];
    uint64_t bytes, limit_bytes, held_bytes; /* budget; what is left of it after a refusal; taken */
    int (*allocate)(void *ctx, int fd, uint64_t offset, uint64_t bytes);
    void *allocate_ctx;

    uint64_t slot_bytes; /* 0: not laid out yet */
    uint32_t slots, used, free;
    struct exd_block *block;       /* [slots + 1] */
    uint32_t *by_key, *by_parent;  /* [buckets] first of a list */
    uint32_t buckets;              /* power of 2 */
    uint64_t seed;                 /* so that nobody can choose keys of one bucket */
    uint32_t oldest, newest;       /* by age */
    uint32_t kept, reserved, pins; /* blocks, blocks, holds */

    struct exd_park_class class[EXD_PARK_CLASSES];
    struct exd_park_session session[EXD_PARK_SESSIONS];
    uint64_t committed, found, ignored, evicted, wrong;
};

static inline struct exd_block *exd_block(const struct exd_park *p, uint32_t i)
{
    return &p->block[i];
}

/* exd_park_file.c. Memory for the file's bytes up to end: -ENOSPC when there is no more, or the budget ends.
 */
int exd_park_take_memory(struct exd_park *p, uint64_t end);

/* Reserved or kept one of that class, or 0. */
uint32_t exd_index_find(const struct exd_park *p, const uint64_t *key, uint32_t class);
/* First of the list that holds those of this key (or parent), and others. */
uint32_t exd_index_first(const struct exd_park *p, const uint64_t *key);
uint32_t exd_index_first_child(const struct exd_park *p, const uint64_t *parent);
void exd_index_add(struct exd_park *p, uint32_t i);
void exd_index_remove(struct exd_park *p, uint32_t i);
void exd_index_age_add(struct exd_park *p, uint32_t i);
void exd_index_age_remove(struct exd_park *p, uint32_t i);
/* The kept block i was used, and with it all that it continues. */
void exd_index_use(struct exd_park *p, uint32_t i);

#endif
