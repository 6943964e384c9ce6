/* SPDX-License-Identifier: MIT */
#include "inferd/inf_park.h"

#include "proto/prt_file.h"
#include "proto/prt_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define BATCH_BYTES (UINT64_C(32) << 20) /* expertd takes memory for so much at once */

struct inf_park {
    struct inf_park_calls calls;
    uint64_t session;
    struct inf_device *device;
    uint8_t *base;
    uint64_t bytes, slot_bytes;
    uint32_t slots, batch;
    struct krn_pool *pool;
    uint8_t *
        copy; /* [stages][copy_stride]: [SHM_PARK_HEAD_BYTES + block_bytes] each, ours alone, of the device */
    uint64_t copy_bytes, copy_stride;
    uint32_t stages;
    struct fetched {
        const uint64_t *checksum;
        uint32_t slot;
        bool fits;
    } fetched[INF_PARK_STAGES];
};

static int call_open(void *ctx, struct prt_parkopen_request *request, struct prt_parkopen_reply *ret_reply,
                     struct shm_error *err)
{
    return prt_client_parkopen(ctx, request, ret_reply, err);
}
static int call_find(void *ctx, struct prt_parkfind_request *request, struct prt_parkfind_reply *ret_reply,
                     struct shm_error *err)
{
    return prt_client_parkfind(ctx, request, ret_reply, err);
}
static int call_reserve(void *ctx, struct prt_parkreserve_request *request,
                        struct prt_parkreserve_reply *ret_reply, struct shm_error *err)
{
    return prt_client_parkreserve(ctx, request, ret_reply, err);
}
static int call_commit(void *ctx, struct prt_parkcommit_request *request,
                       struct prt_parkcommit_reply *ret_reply, struct shm_error *err)
{
    return prt_client_parkcommit(ctx, request, ret_reply, err);
}
static int call_done(void *ctx, struct prt_parkdone_request *request, struct prt_parkdone_reply *ret_reply,
                     struct shm_error *err)
{
    return prt_client_parkdone(ctx, request, ret_reply, err);
}

struct inf_park_calls inf_park_client_calls(struct prt_client *client)
{
    return (struct inf_park_calls){.ctx = client,
                                   .open = call_open,
                                   .find = call_find,
                                   .reserve = call_reserve,
                                   .commit = call_commit,
                                   .done = call_done};
}

void inf_park_key(const uint64_t *parent, const int32_t *ids, uint32_t tokens, uint64_t *ret_key)
{
    uint64_t text[2 + SHM_PARK_TOKENS / 2];
    memcpy(text, parent, 2 * sizeof *parent);
    memcpy(text + 2, ids, tokens * sizeof *ids);
    XXH128_hash_t h = XXH3_128bits(text, 2 * sizeof *parent + tokens * sizeof *ids);
    ret_key[0] = h.low64 | 1; /* zero is the root's */
    ret_key[1] = h.high64;
}

_Static_assert(INF_KV_BLOCK == SHM_PARK_TOKENS, "a slot holds a block");

/* Which program computed the keys and values: another one may have other kernels, and the same kernels
 * through another compiler or other flags give other bits, too, which no version kept by hand would tell. The
 * file is read once in a process's life, which it is one program in. */
static int name_build(char *text, size_t bytes)
{
    static char name[64];
    XXH128_hash_t h = {0};
    struct stat st;
    if (name[0]) {
        snprintf(text, bytes, "%s", name);
        return 0;
    }
    int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 || fstat(fd, &st) < 0 ? -errno : 0;
    if (!rc) {
        void *file = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (file == MAP_FAILED) {
            rc = -errno;
        } else {
            h = XXH3_128bits(file, (size_t)st.st_size);
            munmap(file, (size_t)st.st_size);
        }
    }
    if (fd >= 0)
        close(fd);
    if (rc)
        return rc;
    snprintf(name, sizeof name, "%.20s %016llx%016llx", EXPERTD_VERSION, (unsigned long long)h.high64,
             (unsigned long long)h.low64);
    snprintf(text, bytes, "%s", name);
    return 0;
}

/* Which kind of processor did: the kernels differ. The number of threads, of the GPU and of the driver don't
 * matter. */
static void name_layout(const struct inf_device *d, bool exact, char *text, size_t bytes)
{
    const char *from = d->kind == PRT_DEVICE_HOST ? strstr(d->text, "kernels ") : strchr(d->text, ','), *end;
    if (!from)
        from = d->text;
    end = strstr(from, ", driver");
    uint64_t hash = XXH3_64bits(from, end ? (size_t)(end - from) : strlen(from));
    snprintf(text, bytes, "%.31s %016llx%s", d->kv_layout, (unsigned long long)hash, exact ? " exact" : "");
}

static int stage_open(struct inf_device *d, uint64_t bytes, void **ret_memory, struct shm_error *err)
{
    if (d->ops->stage_open)
        return d->ops->stage_open(d, bytes, ret_memory, err);
    *ret_memory = malloc(bytes);
    return *ret_memory ? 0 : shm_error_set(err, ENOMEM, "park: no memory for a block's copy; free some");
}

static void stage_close(struct inf_device *d, void *memory)
{
    if (memory && d->ops->stage_close)
        d->ops->stage_close(d, memory);
    else
        free(memory);
}

int inf_park_open(const struct inf_park_config *c, struct inf_park **ret_park, struct shm_error *err)
{
    struct prt_parkopen_request request = {.session = c->session, .block_bytes = c->device->kv_block_bytes};
    struct prt_parkopen_reply reply = {0};
    memcpy(request.model, c->model, sizeof request.model);
    name_layout(c->device, c->exact, request.layout, sizeof request.layout);
    int rc = 0;
    if (c->build)
        snprintf(request.build, sizeof request.build, "%s", c->build);
    else
        rc = name_build(request.build, sizeof request.build);
    if (rc)
        return shm_error_set(err, rc, "park: /proc/self/exe cannot be read: %s", strerror(-rc));
    if ((rc = c->calls.open(c->calls.ctx, &request, &reply, err)))
        return rc;
    if (reply.slot_bytes != shm_park_slot_bytes(request.block_bytes) ||
        reply.slots > reply.park_bytes / reply.slot_bytes)
        return shm_error_set(err, EBADMSG, "park: expertd's slots of %llu bytes do not fit blocks of %llu",
                             (unsigned long long)reply.slot_bytes, (unsigned long long)request.block_bytes);
    struct inf_park *p = calloc(1, sizeof *p);
    void *base = NULL, *copy = NULL;
    const uint32_t threads = c->pool ? krn_pool_threads(c->pool) : 1;
    const uint32_t stages = threads < INF_PARK_STAGES ? threads : INF_PARK_STAGES;
    uint64_t bytes = 0;
    rc = p ? stage_open(c->device, stages * reply.slot_bytes, &copy, err)
           : shm_error_set(err, ENOMEM, "park: no memory: free some");
    if (!rc)
        rc = prt_file_map_path(reply.park_path, reply.park_bytes, true, &base, &bytes, err);
    if (rc) {
        stage_close(c->device, copy);
        free(p);
        return rc;
    }
    madvise(base, bytes, MADV_DONTDUMP);
    prt_guard_add(base, bytes, "park", reply.park_path, "start expertd again, which makes a new one");
    *p = (struct inf_park){.calls = c->calls,
                           .session = c->session,
                           .device = c->device,
                           .base = base,
                           .bytes = bytes,
                           .slot_bytes = reply.slot_bytes,
                           .slots = reply.slots,
                           .pool = c->pool,
                           .copy = copy,
                           .copy_bytes = SHM_PARK_HEAD_BYTES + request.block_bytes,
                           .copy_stride = reply.slot_bytes,
                           .stages = stages};
    uint64_t batch = BATCH_BYTES / p->slot_bytes;
    p->batch = batch < 1 ? 1 : batch > PRT_PARK_BATCH ? PRT_PARK_BATCH : (uint32_t)batch;
    *ret_park = p;
    return 0;
}

void inf_park_close(struct inf_park **park)
{
    struct inf_park *p = *park;
    if (!p)
        return;
    prt_guard_remove(p->base);
    munmap(p->base, p->bytes);
    stage_close(p->device, p->copy);
    free(p);
    *park = NULL;
}

uint64_t inf_park_bytes(const struct inf_park *p)
{
    return p->bytes;
}

uint32_t inf_park_batch(const struct inf_park *p)
{
    return p->batch;
}

static uint8_t *slot_at(const struct inf_park *p, uint32_t slot)
{
    return slot < p->slots ? p->base + slot * p->slot_bytes : NULL;
}

int inf_park_find(struct inf_park *p, const uint64_t *parent, const uint64_t *key, uint32_t keys,
                  struct prt_parkfind_reply *ret_reply, struct shm_error *err)
{
    struct prt_parkfind_request request = {.session = p->session, .keys = keys};
    memcpy(request.parent, parent, sizeof request.parent);
    memcpy(request.key, key, (size_t)keys * 16);
    return p->calls.find(p->calls.ctx, &request, ret_reply, err);
}

int inf_park_done(struct inf_park *p, const uint32_t *wrong_slot, uint32_t wrong, struct shm_error *err)
{
    struct prt_parkdone_request request = {.session = p->session, .wrong = wrong};
    struct prt_parkdone_reply reply = {0};
    memcpy(request.slot, wrong_slot, wrong * sizeof *wrong_slot);
    return p->calls.done(p->calls.ctx, &request, &reply, err);
}

int inf_park_peek(const struct inf_park *p, uint32_t slot, struct shm_park_head *ret_head)
{
    const uint8_t *at = slot_at(p, slot);
    if (!at)
        return -ERANGE;
    memcpy(ret_head, at, sizeof *ret_head);
    if (ret_head->tokens < 1 || ret_head->tokens > SHM_PARK_TOKENS)
        ret_head->tokens = 0;
    return 0;
}

static uint8_t *copy_of(const struct inf_park *p, uint32_t i)
{
    return p->copy + i * p->copy_stride;
}

static void fetch_one(void *arg, uint32_t i, uint32_t thread)
{
    struct inf_park *p = arg;
    struct fetched *f = &p->fetched[i];
    const uint8_t *at = slot_at(p, f->slot);
    (void)thread;
    f->fits = false;
    if (!at)
        return;
    memcpy(copy_of(p, i), at, p->copy_bytes);
    XXH128_hash_t sum = XXH3_128bits(copy_of(p, i), p->copy_bytes);
    f->fits = sum.low64 == f->checksum[0] && sum.high64 == f->checksum[1];
}

uint32_t inf_park_fetch(struct inf_park *p, const uint32_t *slot, const uint64_t *checksum, uint32_t n)
{
    n = n < p->stages ? n : p->stages;
    for (uint32_t i = 0; i < n; i++)
        p->fetched[i] = (struct fetched){.slot = slot[i], .checksum = checksum + 2 * i};
    if (n > 1)
        krn_pool_run(p->pool, n, fetch_one, p);
    else
        fetch_one(p, 0, 0);
    return n;
}

int inf_park_load(struct inf_park *p, uint32_t i, const uint64_t *parent, uint32_t block,
                  struct shm_park_head *ret_head, struct shm_error *err)
{
    const uint32_t slot = p->fetched[i].slot;
    const uint8_t *copy = copy_of(p, i);
    if (!p->fetched[i].fits)
        return shm_error_set(err, EBADMSG, "park: slot %u does not fit its checksum", slot);
    struct shm_park_head head;
    uint64_t key[2];
    memcpy(&head, copy, sizeof head);
    if (head.tokens < 1 || head.tokens > SHM_PARK_TOKENS || head.exact > head.tokens ||
        head.block_bytes != p->copy_bytes - SHM_PARK_HEAD_BYTES ||
        memcmp(head.parent, parent, sizeof head.parent) != 0)
        return shm_error_set(err, EBADMSG, "park: slot %u holds another block", slot);
    inf_park_key(parent, head.ids, head.tokens, key);
    if (memcmp(key, head.key, sizeof key) != 0)
        return shm_error_set(err, EBADMSG, "park: slot %u holds a block under a wrong key", slot);
    int rc = p->device->ops->kv_write(p->device, block, copy + SHM_PARK_HEAD_BYTES, err);
    if (!rc)
        *ret_head = head;
    return rc;
}

int inf_park_reserve(struct inf_park *p, const uint64_t *key, const uint64_t *parent, uint32_t blocks,
                     struct prt_parkreserve_reply *ret_reply, struct shm_error *err)
{
    struct prt_parkreserve_request request = {.session = p->session, .blocks = blocks};
    memcpy(request.key, key, (size_t)blocks * 16);
    memcpy(request.parent, parent, (size_t)blocks * 16);
    return p->calls.reserve(p->calls.ctx, &request, ret_reply, err);
}

int inf_park_store(struct inf_park *p, uint32_t slot, const struct shm_park_head *head, uint32_t block,
                   uint64_t *ret_checksum, struct shm_error *err)
{
    uint8_t *at = slot_at(p, slot);
    if (!at)
        return shm_error_set(err, EBADMSG, "park: there is no slot %u", slot);
    memcpy(p->copy, head, sizeof *head);
    ((struct shm_park_head *)(void *)p->copy)->block_bytes = p->copy_bytes - SHM_PARK_HEAD_BYTES;
    int rc = p->device->ops->kv_read(p->device, block, p->copy + SHM_PARK_HEAD_BYTES, err);
    if (rc)
        return rc;
    XXH128_hash_t sum = XXH3_128bits(p->copy, p->copy_bytes);
    memcpy(at, p->copy, p->copy_bytes);
    ret_checksum[0] = sum.low64;
    ret_checksum[1] = sum.high64;
    return 0;
}

int inf_park_commit(struct inf_park *p, const uint32_t *slot, const uint64_t *checksum, uint32_t blocks,
                    struct shm_error *err)
{
    struct prt_parkcommit_request request = {.session = p->session, .blocks = blocks};
    struct prt_parkcommit_reply reply = {0};
    memcpy(request.slot, slot, blocks * sizeof *slot);
    memcpy(request.checksum, checksum, (size_t)blocks * 16);
    return p->calls.commit(p->calls.ctx, &request, &reply, err);
}
