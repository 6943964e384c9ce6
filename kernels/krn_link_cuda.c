/* SPDX-License-Identifier: MIT */
#include "kernels/krn_link_cuda_priv.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define POLL_MAX_NS   UINT64_C(100000)
#define COPY_GUESS_NS UINT64_C(50000) /* a blob, until it was measured */
#define QUERY_AFTER_NS                                                                                       \
    UINT64_C(100000000) /* without a landing: ask the driver whether the stream is well                      \
                         */
#define DESTROY_WAIT_NS UINT64_C(5000000000)
#define PROBE_LIMIT_NS  UINT64_C(100000000)
#define PROBE_SLOW_NS   UINT64_C(500000)
#define FIRST_TRIES     20
#define PROGRESS_EACH   4u /* copies between two progress writes, at most */

static struct krn_cuda_link *cuda(struct krn_link *link)
{
    return (struct krn_cuda_link *)link;
}

static void note(struct krn_cuda_link *l, bool warning, const char *line)
{
    if (l->config.note)
        l->config.note(l->config.ctx, warning, line);
}

/* The first failure is noted with the driver's words and stays. */
static int broke(struct krn_cuda_link *l, int rc, const char *what)
{
    if (rc < 0 && !l->broken) {
        struct shm_error err = {0};
        char line[SHM_ERROR_TEXT_BYTES];
        krn_cuda_explain(rc, what, &err);
        snprintf(line, sizeof(line), "worker %s: link failed: %.380s", l->name, err.text);
        note(l, true, line);
        l->broken = -EIO;
    }
    return l->broken;
}

static uint64_t enter(struct krn_cuda_link *l)
{
    broke(l, krn_cuda_enter(l->config.device), "context");
    return shm_now_ns();
}

/* ---- to the device ---- */

static int send_progress(struct krn_cuda_link *l)
{
    if (l->progress_sent == l->issued)
        return 0;
    int rc = KRN_CUDA(write_32, l->stream, l->progress_device + offsetof(struct krn_cuda_progress, copies),
                      (uint32_t)l->issued, 0);
    if (rc < 0)
        return broke(l, rc, "progress write");
    l->progress_sent = l->issued;
    l->counts.progress_writes++;
    return 0;
}

/* Copies that may pass before the next progress write. A write between two copies costs the link 2 us, a
 * landing seen late costs an issuer that waits for it more: with a short queue each is reported, with a long
 * one every fourth. */
static uint64_t progress_every(const struct krn_cuda_link *l)
{
    uint64_t queued = (l->issued - l->landed) / 4;
    return queued < 1 ? 1 : queued > PROGRESS_EACH ? PROGRESS_EACH : queued;
}

static int submit_batch(struct krn_cuda_link *l)
{
    struct krn_cuda_copy_attr attr = {.source_order = KRN_CUDA_SOURCE_STREAM};
    size_t first = 0, failed = 0;
    int rc = krn_cuda.copy_batch ? KRN_CUDA(copy_batch, l->held_target, l->held_source, l->held_bytes,
                                            l->held, &attr, &first, 1, l->stream)
                                 : KRN_CUDA(copy_batch_12, l->held_target, l->held_source, l->held_bytes,
                                            l->held, &attr, &first, 1, &failed, l->stream);
    if (rc == 0) {
        l->counts.batches++;
        l->counts.batched_copies += l->held;
    }
    return rc;
}

/* Hands over what is held. */
static int submit(struct krn_cuda_link *l)
{
    if (!l->held)
        return l->broken;
    int rc = 0;
    if (l->issued - l->progress_sent >= progress_every(l))
        rc = send_progress(l);
    if (rc == 0 && l->held > 1 && l->config.device->batch_copy)
        rc = submit_batch(l);
    else
        for (uint32_t i = 0; i < l->held && rc == 0; i++)
            rc = KRN_CUDA(copy_in_async, l->held_target[i], (const void *)(uintptr_t)l->held_source[i],
                          l->held_bytes[i], l->stream);
    if (rc < 0)
        return broke(l, rc, "copy to the ring");
    uint64_t now = shm_now_ns();
    if (!l->busy_since_ns)
        l->busy_since_ns = now;
    if (!l->first_ns)
        l->first_ns = now;
    if (l->issued == l->landed)
        l->moved_ns = now;
    l->issued += l->held;
    l->held = 0;
    return 0;
}

/* Longer, so that a copy engine takes it; what is copied too much lies in the same slot. */
static uint64_t padded(struct krn_cuda_link *l, uint64_t ring_offset, const void *src, size_t bytes)
{
    if (bytes >= KRN_CUDA_COPY_MIN)
        return bytes;
    uint64_t at = (uint64_t)((const uint8_t *)src - (const uint8_t *)l->config.source);
    if (l->config.slot_bytes < KRN_CUDA_COPY_MIN || l->config.ring_bytes - ring_offset < KRN_CUDA_COPY_MIN ||
        l->config.source_bytes - at < KRN_CUDA_COPY_MIN) {
        l->counts.small++;
        return bytes;
    }
    l->counts.padded++;
    return KRN_CUDA_COPY_MIN;
}

static int cuda_copy(struct krn_link *link, uint64_t ring_offset, const void *src, size_t bytes, bool more)
{
    struct krn_cuda_link *l = cuda(link);
    uintptr_t at = (uintptr_t)src - (uintptr_t)l->config.source;
    if (!src || ring_offset > l->config.ring_bytes || bytes > l->config.ring_bytes - ring_offset ||
        at > l->config.source_bytes || bytes > l->config.source_bytes - at)
        return -EINVAL;
    uint64_t begin_ns = enter(l);
    if (l->broken)
        return l->broken;
    l->held_target[l->held] = l->allocation + ring_offset;
    l->held_source[l->held] = (krn_cuda_ptr)(uintptr_t)src;
    l->held_bytes[l->held++] = padded(l, ring_offset, src, bytes);
    l->bytes += bytes;
    /* an idle engine is not kept waiting for a full batch */
    bool idle = l->issued == l->landed;
    int rc = more && !idle && l->held < l->config.batch ? 0 : submit(l);
    l->counts.call_ns += shm_now_ns() - begin_ns;
    return rc;
}

static int cuda_signal(struct krn_link *link, uint64_t value)
{
    struct krn_cuda_link *l = cuda(link);
    uint64_t begin_ns = enter(l);
    if (submit(l) < 0)
        return l->broken;
    struct krn_cuda_memop ops[3] = {
        {.operation = KRN_CUDA_OP_WRITE_32, .address = l->flag, .value = (uint32_t)value},
        {.operation = KRN_CUDA_OP_WRITE_32,
         .address = l->progress_device + offsetof(struct krn_cuda_progress, copies),
         .value = (uint32_t)l->issued},
        {.operation = KRN_CUDA_OP_WRITE_32,
         .address = l->progress_device + offsetof(struct krn_cuda_progress, signalled),
         .value = (uint32_t)value}};
    int rc = KRN_CUDA(memops, l->stream, 3, ops, 0);
    if (rc < 0)
        return broke(l, rc, "signal");
    l->value = value;
    l->progress_sent = l->issued;
    l->signals++;
    l->counts.call_ns += shm_now_ns() - begin_ns;
    return 0;
}

/* How long what is on the link will take, less the copy in progress. */
static uint64_t ahead_ns(const struct krn_cuda_link *l)
{
    uint64_t queued = l->issued - l->landed;
    uint64_t copy_ns = l->landed >= 16 ? l->busy_ns_landed / l->landed : COPY_GUESS_NS;
    return queued > 1 ? (queued - 1) * copy_ns : 0;
}

/* The queue is what makes a late look harmless: with a long one it may be late. */
static void set_poll(struct krn_cuda_link *l)
{
    uint64_t ns = ahead_ns(l) / 4 * 3, least = l->config.poll_ns;
    ns = ns > POLL_MAX_NS ? POLL_MAX_NS : ns;
    l->base.poll_ns = ns < least ? least : ns;
}

static int cuda_flush(struct krn_link *link)
{
    struct krn_cuda_link *l = cuda(link);
    set_poll(l);
    /* enough is under way that these may still become a full batch: the caller is back before it is through
     */
    if (l->held && l->held < l->config.batch && ahead_ns(l) > 2 * POLL_MAX_NS && !l->broken)
        return 0;
    if (!l->held && l->progress_sent == l->issued)
        return l->broken;
    uint64_t begin_ns = enter(l);
    if (submit(l) < 0)
        return l->broken;
    /* none on its way, or enough have passed: the caller waits for landings */
    if (l->progress_sent == l->landed || l->issued - l->progress_sent >= progress_every(l))
        send_progress(l);
    l->counts.call_ns += shm_now_ns() - begin_ns;
    return l->broken;
}

/* ---- from the device ---- */

static void see_signals(struct krn_cuda_link *l)
{
    /* acquire: the copies before it, as far as this process sees them */
    uint32_t word = atomic_load_explicit(&l->progress->signalled, memory_order_acquire);
    uint64_t seen = l->value - (uint32_t)((uint32_t)l->value - word);
    if (seen == l->value_seen)
        return;
    l->value_seen = seen;
    if (l->config.landed_word)
        atomic_store_explicit(l->config.landed_word, seen, memory_order_release);
    if (l->config.landed_bell)
        shm_bell_ring(l->config.landed_bell);
}

static uint64_t cuda_landed(struct krn_link *link)
{
    struct krn_cuda_link *l = cuda(link);
    uint32_t word = atomic_load_explicit(&l->progress->copies, memory_order_acquire);
    uint64_t landed = l->issued - (uint32_t)((uint32_t)l->issued - word);
    if (l->value_seen != l->value)
        see_signals(l);
    if (landed == l->landed) {
        if (landed == l->issued || l->broken)
            return landed;
        uint64_t now = shm_now_ns();
        if (now - l->moved_ns > QUERY_AFTER_NS) {
            l->moved_ns = now;
            enter(l);
            int rc = KRN_CUDA(stream_query, l->stream);
            if (rc < 0 && rc != -EAGAIN)
                broke(l, rc, "copy stream");
        }
        return landed;
    }
    l->moved_ns = l->last_ns = shm_now_ns();
    l->landed = landed;
    l->busy_ns_landed = l->busy_ns + (l->busy_since_ns ? l->last_ns - l->busy_since_ns : 0);
    if (landed == l->issued && l->busy_since_ns) {
        l->busy_ns += l->last_ns - l->busy_since_ns;
        l->busy_since_ns = 0;
    }
    return landed;
}

static void nap(uint64_t ns)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

static int cuda_drain(struct krn_link *link, uint64_t timeout_ns)
{
    struct krn_cuda_link *l = cuda(link);
    uint64_t deadline_ns = shm_now_ns() + timeout_ns;
    enter(l);
    submit(l);
    if (!l->broken)
        send_progress(l);
    for (;;) {
        cuda_landed(link);
        if (l->broken)
            return -EIO;
        if (l->landed == l->issued && l->value_seen == l->value)
            return 0;
        if (shm_now_ns() >= deadline_ns)
            return -ETIMEDOUT;
        nap(l->base.poll_ns);
    }
}

int krn_link_cuda_probe(struct krn_link *link, uint64_t *ret_ns)
{
    struct krn_cuda_link *l = cuda(link);
    uint64_t begin_ns = enter(l), now = begin_ns;
    uint32_t number = ++l->probes;
    struct krn_cuda_memop ops[2] = {
        {.operation = KRN_CUDA_OP_WRITE_32, .address = l->flag, .value = (uint32_t)l->value},
        {.operation = KRN_CUDA_OP_WRITE_32,
         .address = l->progress_device + offsetof(struct krn_cuda_progress, probe),
         .value = number}};
    int rc = l->broken;
    if (rc == 0)
        rc = broke(l, KRN_CUDA(memops, l->stream, 2, ops, 0), "flag write");
    while (rc == 0 && atomic_load_explicit(&l->progress->probe, memory_order_acquire) != number) {
        now = shm_now_ns();
        if (now - begin_ns > PROBE_LIMIT_NS)
            return -ETIMEDOUT;
    }
    if (rc == 0)
        *ret_ns = l->counts.probe_ns = shm_now_ns() - begin_ns;
    return rc;
}

/* The worker keeps its GPU busy while it attaches, so that what a flag write costs beside kernels shows here.
 */
int krn_link_cuda_first_write(struct krn_cuda_link *l)
{
    uint64_t ns = 0;
    char line[256];
    int rc = -ETIMEDOUT;
    for (int i = 0; i < FIRST_TRIES && rc == -ETIMEDOUT; i++) /* a host without a free CPU is slow, too */
        rc = krn_link_cuda_probe(&l->base, &ns);
    if (rc < 0)
        return rc;
    if (ns > PROBE_SLOW_NS)
        snprintf(line, sizeof(line),
                 "worker %s: a flag write took %.0f us beside its kernels: this driver sends it through the "
                 "compute engine; nvidia-cuda-mps-control -d (MPS) avoids the wait",
                 l->name, (double)ns / 1e3);
    else
        snprintf(line, sizeof(line), "worker %s: a flag write takes %.1f us beside its kernels", l->name,
                 (double)ns / 1e3);
    note(l, ns > PROBE_SLOW_NS, line);
    return 0;
}

static void cuda_mark(struct krn_link *link)
{
    struct krn_cuda_link *l = cuda(link);
    l->mark_bytes = l->bytes;
    l->mark_busy_ns = l->busy_ns;
    l->first_ns = l->last_ns = 0;
}

static void cuda_stats(struct krn_link *link, struct krn_link_stats *ret_stats)
{
    struct krn_cuda_link *l = cuda(link);
    uint64_t running = l->busy_since_ns ? shm_now_ns() - l->busy_since_ns : 0;
    *ret_stats = (struct krn_link_stats){
        .copies = l->landed,
        .bytes = l->bytes,
        .signals = l->signals,
        .busy_ns = l->busy_ns + running,
        .first_ns = l->first_ns,
        .last_ns = l->last_ns,
        .mark_bytes = l->bytes - l->mark_bytes,
        .mark_busy_ns = l->busy_ns + running - l->mark_busy_ns,
    };
}

void krn_link_cuda_counts(const struct krn_link *link, struct krn_link_cuda_counts *ret_counts)
{
    *ret_counts = ((const struct krn_cuda_link *)link)->counts;
}

static void cuda_destroy(struct krn_link *link)
{
    struct krn_cuda_link *l = cuda(link);
    l->held = 0;
    if (cuda_drain(link, DESTROY_WAIT_NS) == -ETIMEDOUT) {
        char line[160];
        snprintf(line, sizeof(line), "worker %s: its link does not stop: the ring stays mapped", l->name);
        note(l, true, line);
        return; /* closing under running copies would be worse than what is kept */
    }
    enter(l);
    krn_link_cuda_release(l);
}

const struct krn_link_ops krn_link_cuda_ops = {
    .copy = cuda_copy,
    .flush = cuda_flush,
    .signal = cuda_signal,
    .landed = cuda_landed,
    .drain = cuda_drain,
    .mark = cuda_mark,
    .stats = cuda_stats,
    .destroy = cuda_destroy,
};
