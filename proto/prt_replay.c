/* SPDX-License-Identifier: MIT */
#include "proto/prt_replay.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    uint64_t epoch, id; /* id 0: free */
    void *reply;
    size_t bytes;
};

struct prt_replay {
    struct entry entry[PRT_REPLAY_ENTRIES];
    size_t next;
};

struct prt_replay *prt_replay_new(void)
{
    return calloc(1, sizeof(struct prt_replay));
}

void prt_replay_free(struct prt_replay **replay)
{
    if (!*replay)
        return;
    for (size_t i = 0; i < PRT_REPLAY_ENTRIES; i++)
        free((*replay)->entry[i].reply);
    free(*replay);
    *replay = NULL;
}

const void *prt_replay_find(struct prt_replay *replay, uint64_t epoch, uint64_t id, size_t *ret_bytes)
{
    for (size_t i = 0; i < PRT_REPLAY_ENTRIES; i++) {
        const struct entry *e = &replay->entry[i];
        if (e->id && e->id == id && e->epoch == epoch) {
            *ret_bytes = e->bytes;
            return e->reply;
        }
    }
    return NULL;
}

int prt_replay_add(struct prt_replay *replay, uint64_t epoch, uint64_t id, const void *reply, size_t bytes)
{
    void *copy = malloc(bytes);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, reply, bytes);
    struct entry *e = &replay->entry[replay->next];
    replay->next = (replay->next + 1) % PRT_REPLAY_ENTRIES;
    free(e->reply);
    *e = (struct entry){.epoch = epoch, .id = id, .reply = copy, .bytes = bytes};
    return 0;
}
