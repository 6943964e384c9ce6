/* SPDX-License-Identifier: MIT */
/*
 * A worker's process for tests of the CUDA link: owns ring and flag in device
 * memory, checks what lands there, may keep the compute engine busy. Started
 * by running the test program again as "--owner FD".
 */
#ifndef G_OWNER_H
#define G_OWNER_H

#include "kernels/krn_cuda.h"

#include <stdatomic.h>
#include <sys/types.h>

enum owner_command {
    OWNER_OPEN,
    OWNER_CHECK,
    OWNER_BUSY,
    OWNER_IDLE,
    OWNER_PUBLISH,
    OWNER_FREE_BYTES,
    OWNER_END
};

struct owner_message {
    uint32_t command;
    int32_t status;
    uint64_t slots, slot_bytes;          /* OPEN; the flag lies behind them */
    uint64_t first, count, blobs, words; /* CHECK: messages first .. first + count, see stamp_of */
    uint64_t result;                     /* CHECK: wrong words; FREE_BYTES; BUSY: kernels run */
    uint64_t flag_offset;
    int32_t words_fd; /* a page of struct owner_words, the owner's descriptor */
    uint32_t kernels; /* 1: check by kernel, nothing of the host between the waits */
    struct krn_cuda_ipc handle;
    struct krn_cuda_uuid uuid;
    uint64_t open_ns;
};

/* Shared by owner and importer; the device writes it. */
struct owner_words {
    _Atomic uint64_t released; /* messages checked */
    uint64_t pad[7];
    _Atomic uint64_t route_seq;
    uint64_t mask[16];
    uint32_t tokens[1024];
};

/* Message i carries blob i * 7 % blobs, which is filled with its number + 1; so that a slot is never written
 * with what it holds, blobs is no multiple of the ring's slots. */
static inline uint32_t stamp_of(uint64_t i, uint64_t blobs)
{
    return (uint32_t)(i * 7 % blobs) + 1;
}

struct owner {
    pid_t pid;
    int fd;
    struct owner_words *words; /* after OPEN */
    struct owner_message opened;
};

/* Starts argv0 --owner FD with PR_SET_PDEATHSIG. */
int owner_start(const char *argv0, struct owner *ret_owner);
int owner_send(struct owner *o, const struct owner_message *m);
int owner_receive(struct owner *o, struct owner_message *ret_m);
int owner_call(struct owner *o, struct owner_message *m); /* send, receive, status */
/* OPEN, and maps the words. */
int owner_open(struct owner *o, uint64_t slots, uint64_t slot_bytes);
void owner_end(struct owner *o, bool kill_it);

/* The owner's main. */
int owner_main(int fd);

#endif
