/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: decoders of all control messages. What one accepts must have its
 * size, its type, and texts that end inside their fields; encoded again, it
 * is the same bytes.
 */
#include "proto/prt_control_gen.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

#define MUST(x)                                                                                              \
    do {                                                                                                     \
        if (!(x))                                                                                            \
            abort();                                                                                         \
    } while (0)

#define REQUEST(name, NAME)                                                                                  \
    do {                                                                                                     \
        struct prt_##name##_request m = {0};                                                                 \
        if (prt_##name##_request_decode(data, size, &m, &err) == 0) {                                        \
            MUST(size == sizeof(m) && m.header.type == PRT_##NAME && m.header.epoch && m.header.id);         \
            prt_##name##_request_encode(&m, m.header.epoch, m.header.id);                                    \
            MUST(memcmp(&m, data, size) == 0);                                                               \
        } else {                                                                                             \
            MUST(err.code < 0 && err.text[0]);                                                               \
        }                                                                                                    \
    } while (0)

#define REPLY(name, NAME)                                                                                    \
    do {                                                                                                     \
        struct prt_##name##_reply m = {0};                                                                   \
        if (prt_##name##_reply_decode(data, size, &m, &err) == 0)                                            \
            MUST(m.header.status < 0 || (size == sizeof(m) && m.header.type == PRT_##NAME));                 \
        else                                                                                                 \
            MUST(err.code < 0 && err.text[0]);                                                               \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct shm_error err = {0};
    REQUEST(hello, HELLO);
    REQUEST(attach, ATTACH);
    REQUEST(detach, DETACH);
    REQUEST(configure, CONFIGURE);
    REQUEST(drain, DRAIN);
    REQUEST(stop, STOP);
    REQUEST(parkopen, PARKOPEN);
    REQUEST(parkfind, PARKFIND);
    REQUEST(parkreserve, PARKRESERVE);
    REQUEST(parkcommit, PARKCOMMIT);
    REQUEST(parkdone, PARKDONE);
    REPLY(hello, HELLO);
    REPLY(attach, ATTACH);
    REPLY(detach, DETACH);
    REPLY(configure, CONFIGURE);
    REPLY(drain, DRAIN);
    REPLY(stop, STOP);
    REPLY(parkopen, PARKOPEN);
    REPLY(parkfind, PARKFIND);
    REPLY(parkreserve, PARKRESERVE);
    REPLY(parkcommit, PARKCOMMIT);
    REPLY(parkdone, PARKDONE);
    struct prt_attach_request a = {0};
    struct prt_attach_reply b = {0};
    if (prt_attach_request_decode(data, size, &a, &err) == 0)
        MUST(strlen(a.name) > 0 && strlen(a.name) < sizeof(a.name) && a.link_gbps == a.link_gbps);
    if (prt_attach_reply_decode(data, size, &b, &err) == 0 && b.header.status == 0)
        MUST(strlen(b.arena_path) < sizeof(b.arena_path));
    return 0;
}
