/* SPDX-License-Identifier: MIT */
/*
 * A fuzz target is one file that defines this function and aborts when a promise
 * is broken. With -Dfuzz=true (clang) libFuzzer drives it; otherwise fuzz_main.c
 * replays its corpus and a number of mutations, as an ordinary test.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
