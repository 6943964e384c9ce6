/* SPDX-License-Identifier: MIT */
/*
 * What the kernel says of a mapping: how much of it is locked and mapped by
 * huge pages, the size of its pages, the NUMA node that holds most of it.
 * For counters; nothing depends on it.
 */
#ifndef EXD_REGION_H
#define EXD_REGION_H

#include <stdint.h>

struct exd_region {
    uint64_t locked_bytes;  /* present and of a locked mapping */
    uint64_t huge_bytes;    /* mapped by huge pages */
    uint64_t page_bytes;    /* of most of it; 0: not known */
    int64_t node;           /* by sampled pages; -1: not known */
    uint32_t sampled, away; /* pages asked for, and those on other nodes */
};

/* Looks at [base, base + bytes). Walks the page tables: a millisecond or so a gigabyte of small pages.
 * Everything is 0 where /proc can't be read. */
void exd_region_look(const void *base, uint64_t bytes, struct exd_region *ret_region);

#endif
