/* SPDX-License-Identifier: MIT */
/*
 * Populate: page tables of a mapping filled by several threads in the
 * background, from its beginning on. A registration with the driver otherwise
 * faults them in one by one, on one thread, ten times slower.
 */
#ifndef EXD_POPULATE_H
#define EXD_POPULATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct exd_populate;

/* Begins. write: the pages may be new and are cleared; false: they are there (adopted), which is twice as
 * fast. NULL: no memory; then pages come as they are needed. Ends early when *cancel (may be NULL) is set. */
struct exd_populate *exd_populate_start(uint8_t *base, uint64_t bytes, bool write, const atomic_int *cancel);

/* Blocks until everything before `end` was tried. */
void exd_populate_wait(struct exd_populate *populate, uint64_t end);

/* Waits for the threads. Accepts NULL, nulls. */
void exd_populate_end(struct exd_populate **populate);

#endif
