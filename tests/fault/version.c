/* SPDX-License-Identifier: MIT */
/*
 * A program of another version, made of one of this version: a library for
 * LD_PRELOAD. What it can change is what goes over the control channel and the
 * magic text of its control segment, which is where versions meet.
 *
 *   OTHER_PROTOCOL=N   messages leave as those of protocol version N, and come in as a program of version N
 *                      would see them: as of another one
 *   OTHER_LAYOUT=NN    the control segment's magic ends in these two digits (a worker's, at ATTACH)
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VERSION_OFFSET    4 /* control.spec: magic, version, type in every header */
#define TYPE_OFFSET       6
#define ATTACH            2
#define CONTROL_FD_OFFSET 112
#define MAGIC_DIGITS      6

int nn_send(int s, const void *bytes, size_t n, int flags);
int nn_recv(int s, void *bytes, size_t n, int flags);

static uint16_t own; /* of the real program, as it was seen to send or expect */

static uint16_t other(void)
{
    const char *text = getenv("OTHER_PROTOCOL");
    return text ? (uint16_t)atoi(text) : 0;
}

static void patch_segment(const uint8_t *message, size_t n)
{
    const char *digits = getenv("OTHER_LAYOUT");
    uint16_t type;
    uint32_t fd;
    if (!digits || n < CONTROL_FD_OFFSET + sizeof(fd))
        return;
    memcpy(&type, message + TYPE_OFFSET, sizeof(type));
    memcpy(&fd, message + CONTROL_FD_OFFSET, sizeof(fd));
    if (type == ATTACH && pwrite((int)fd, digits, 2, MAGIC_DIGITS) != 2)
        abort();
}

int nn_send(int s, const void *bytes, size_t n, int flags)
{
    int (*real)(int, const void *, size_t, int) =
        (int (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "nn_send");
    uint16_t version = other();
    if (n >= VERSION_OFFSET + sizeof(version)) {
        patch_segment(bytes, n);
        uint8_t *copy = malloc(n);
        if (!copy)
            abort();
        memcpy(copy, bytes, n);
        if (version) {
            memcpy(&own, copy + VERSION_OFFSET, sizeof(own));
            memcpy(copy + VERSION_OFFSET, &version, sizeof(version));
        }
        int sent = real(s, copy, n, flags);
        free(copy);
        return sent;
    }
    return real(s, bytes, n, flags);
}

int nn_recv(int s, void *bytes, size_t n, int flags)
{
    int (*real)(int, void *, size_t, int) = (int (*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "nn_recv");
    int got = real(s, bytes, n, flags);
    uint16_t version = other(), came;
    if (!version || got < (int)(VERSION_OFFSET + sizeof(came)) || (size_t)got > n)
        return got;
    memcpy(&came, (uint8_t *)bytes + VERSION_OFFSET, sizeof(came));
    /* Of this version it is of another one to a program of version N; as far off as it really is. */
    if (!own)
        own = came; /* expertd receives first; both are built together */
    came = came == version ? own : (uint16_t)(own + (came - version));
    memcpy((uint8_t *)bytes + VERSION_OFFSET, &came, sizeof(came));
    return got;
}
