/* SPDX-License-Identifier: MIT */
/*
 * Inside of the fake CUDA driver: what its files share. Each function of the
 * driver's table is fake_FIELD. What it is: fakecuda.c.
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include "kernels/krn_cuda_abi.h"

#include <stdbool.h>

#define DECLARE(field, symbol, version, required, arguments) int fake_##field arguments;
KRN_CUDA_TABLE(DECLARE)
#undef DECLARE

extern _Thread_local void *fake_current; /* context; NULL: none */

/* One line of the log. stream: its number, 0 for none. */
void fake_note(const char *call, int stream, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* The result a call is made to return, or 0. */
int fake_fails(const char *call);

/* A function of the driver begins: its line of the log, and the end where it is made to fail. */
#define FAKE_CALL(call, ...)                                                                                 \
    do {                                                                                                     \
        fake_note(call, __VA_ARGS__);                                                                        \
        int failed = fake_fails(call);                                                                       \
        if (failed)                                                                                          \
            return failed;                                                                                   \
    } while (0)

/* A number from the environment. */
int fake_number(const char *name, int otherwise);

/* Kinds of memory, as bits. */
enum kind { KIND_FREE, KIND_DEVICE, KIND_OPENED, KIND_HOST, KIND_REGISTERED };
#define FAKE_DEVICE (1u << KIND_DEVICE | 1u << KIND_OPENED)
#define FAKE_HOST   (1u << KIND_HOST | 1u << KIND_REGISTERED)

/* Do all these bytes lie in one range of those kinds? */
bool fake_inside(uint64_t address, size_t bytes, unsigned kinds);

int fake_stream_number(void *stream);

/* Kernels: only libemucuda.so has them (emu_library.c); without, a launch does nothing. */
#define FAKE_ARGUMENTS 512
__attribute__((weak)) void *fake_kernel_find(const char *name);
__attribute__((weak)) void fake_kernel_keep(void *function, unsigned grid_x, void **arguments,
                                            void *ret_args);
__attribute__((weak)) void fake_kernel_run(void *function, const unsigned grid[3], unsigned threads,
                                           void *args);
int fake_stream_launch(void *stream, void *function, const unsigned grid[3], unsigned threads,
                       void **arguments);

/* A word written in the stream's order, as a kernel would; not in the log. */
int fake_stream_store(void *stream, uint64_t address, uint32_t value);

#endif
