/* SPDX-License-Identifier: MIT */
/*
 * Memory that may still be taken on this host: what the system has available,
 * and what the cgroups of this process leave (v1 and v2, every ancestor). Only
 * reads /proc and /sys; `root` is put before them, a seam for tests (NULL: "").
 */
#ifndef PRT_MEMORY_H
#define PRT_MEMORY_H

#include "shm/shm_error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What expertd takes by itself, and expertctl doctor tells beforehand: for its park a part of what is
 * available (the rest is for workers and everything else), and, while a model is read, memory beside the
 * arena. */
#define PRT_PARK_SHARE    8u
#define PRT_PARK_AUTO_MAX (UINT64_C(32) << 30)
#define PRT_LOADER_BYTES  (UINT64_C(128) << 20)

/* First bytes of root/path, terminated; false if it cannot be read. */
bool prt_text_read(const char *root, const char *path, char *text, size_t size);

/* The number after key (and a colon or blank) at the start of a line. */
bool prt_text_field(const char *text, const char *key, uint64_t *ret_value);

/* MemAvailable of /proc/meminfo. false: not known. */
bool prt_memory_available(const char *root, uint64_t *ret_bytes);

/* CAP_IPC_LOCK is in effect: locked memory is not limited. */
bool prt_memory_may_lock(const char *root);

/* The cgroup that leaves the least: its limit less what it uses and could not give back. */
struct prt_memory_group {
    char dir[1024]; /* without root */
    bool v2;
    uint64_t limit_bytes, free_bytes;
};
/* false: no group limits memory. */
bool prt_memory_group(const char *root, struct prt_memory_group *ret_group);

/* Name of the file that holds a group's limit. */
const char *prt_memory_group_file(const struct prt_memory_group *group);

/* Free huge pages of one size, in pages: what the pool has and may still take. */
uint64_t prt_huge_pages_free(const char *root, uint64_t page_bytes);

/* Bytes as "12.3 GiB", "512.0 MiB": for messages. */
void prt_size_text(uint64_t bytes, char ret_text[24]);

#endif
