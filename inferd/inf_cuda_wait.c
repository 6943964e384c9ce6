/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include <errno.h>
#include <time.h>

#define QUEUE_MAX   512u /* operations under way; drivers block a launch at about a thousand */
#define REPORT_EACH 32u  /* operations between two reports of the stream */
#define REPORT_RARE 256u /* of generated tokens, whose kernels overlap but for reports between them */
#define SLEEP_NS    20000L
#define LOOK_NS     UINT64_C(1000000) /* between two looks at peer and driver */
#define AGAIN_NS    UINT64_C(5000000)
#define QUIESCE_NS  UINT64_C(20000000000)
#define BROKEN_NS   UINT64_C(3000000000) /* the same behind a failure */
#define WATCHDOG_NS UINT64_C(60000000000)

static void doze(void)
{
    const struct timespec t = {.tv_nsec = SLEEP_NS};
    nanosleep(&t, NULL);
}

static int stuck(const struct inf_cuda *c, const struct inf_stream *stream, uint64_t ns,
                 struct shm_error *err)
{
    const struct shm_worker *w = c->control.worker;
    return shm_error_set(
        err, ETIMEDOUT,
        "no progress on the GPU for %llu s: stream %llu, layer %u or before: waits for the "
        "ring's flag, landed_groups is %llu, released_groups %llu: look at 'expertctl rings'",
        (unsigned long long)(ns / 1000000000u), (unsigned long long)(stream ? inf_stream_seq(stream) : 0),
        c->layer_now, c->control_device ? (unsigned long long)atomic_load(&w->landed_groups) : 0,
        c->control_device ? (unsigned long long)atomic_load(&w->released_groups) : 0);
}

/* Other ends of a wait than progress. */
static int look(struct inf_cuda *c, const struct inf_pass *p, struct inf_stream *stream,
                struct shm_error *err)
{
    int rc = stream ? inf_stream_check(stream, err) : 0;
    if (!rc && p->cancel && atomic_load_explicit(p->cancel, memory_order_relaxed))
        rc = shm_error_set(err, ECANCELED, "cancelled");
    if (rc)
        return rc;
    int result = krn_cuda.stream_query(c->stream);
    if (result == KRN_CUDA_SUCCESS || result == KRN_CUDA_NOT_READY)
        return 0;
    return inf_cuda_failed(c, krn_cuda_check(result, "cuStreamQuery"), err);
}

/* Waits until the stream has passed `target` operations. */
static int wait_for(struct inf_cuda *c, const struct inf_pass *p, struct inf_stream *stream, uint32_t target,
                    struct shm_error *err)
{
    /* acquire: what the device wrote before it reported is read after this */
    uint32_t done = atomic_load_explicit(c->done, memory_order_acquire);
    if ((int32_t)(done - target) >= 0)
        return 0;
    uint64_t limit_ns = stream ? inf_stream_watchdog_ns(stream) : WATCHDOG_NS;
    uint64_t start_ns = shm_now_ns(), looked_ns = start_ns, moved_ns = start_ns, now_ns = start_ns;
    int rc = 0;
    while (!rc) {
        doze();
        now_ns = shm_now_ns();
        uint32_t now_done = atomic_load_explicit(c->done, memory_order_acquire);
        if ((int32_t)(now_done - target) >= 0)
            break;
        if (now_done != done) {
            done = now_done;
            moved_ns = now_ns;
        }
        if (now_ns - looked_ns > LOOK_NS) {
            looked_ns = now_ns;
            rc = look(c, p, stream, err);
            if (!rc && now_ns - moved_ns > limit_ns)
                rc = stuck(c, stream, limit_ns, err);
        }
    }
    c->base.times.wait_ns += now_ns - start_ns;
    return rc;
}

static int report(struct inf_cuda *c, struct shm_error *err)
{
    int rc = KRN_CUDA(write_32, c->stream, c->done_device, c->ops, 0);
    if (rc)
        return inf_cuda_failed(c, rc, err);
    c->ops_sent = c->ops;
    return 0;
}

int inf_cuda_spend(struct inf_cuda *c, const struct inf_pass *p, struct inf_stream *stream, uint32_t n,
                   struct shm_error *err)
{
    c->ops += n;
    if (c->ops - c->ops_sent < (p->generated ? REPORT_RARE : REPORT_EACH))
        return 0;
    c->ops++;
    int rc = report(c, err);
    return rc ? rc : wait_for(c, p, stream, c->ops - QUEUE_MAX, err);
}

int inf_cuda_finish(struct inf_cuda *c, const struct inf_pass *p, struct inf_stream *stream,
                    struct shm_error *err)
{
    c->ops++;
    int rc = report(c, err);
    return rc ? rc : wait_for(c, p, stream, c->ops, err);
}

/* Waits in the queue are released by the flag's last value; a copy of expertd's that was under way may write
 * an older one over it, so it is written until the stream is through. The kernels in between read slots that
 * nobody answers for: their results are never used. After a failure too: what is still in the queue writes to
 * memory that is unmapped next. A context that is lost says so at once. */
void inf_cuda_quiesce(struct inf_device *d, uint64_t end_group)
{
    struct inf_cuda *c = inf_cuda_of(d);
    if (!c->ring || krn_cuda_enter(c->gpu))
        return;
    const uint64_t limit_ns = c->broken ? BROKEN_NS : QUIESCE_NS;
    uint64_t start_ns = shm_now_ns(), wrote_ns = 0;
    while (krn_cuda.stream_query(c->stream) == KRN_CUDA_NOT_READY) {
        uint64_t now_ns = shm_now_ns();
        if (now_ns - wrote_ns > AGAIN_NS) {
            wrote_ns = now_ns;
            c->flag_last = (uint32_t)end_group;
            if (krn_cuda.write_32(c->aux, c->flag, c->flag_last, 0))
                krn_cuda.copy_in_async(c->flag, &c->flag_last, sizeof c->flag_last, c->aux);
        }
        if (now_ns - start_ns > limit_ns) {
            c->broken = true;
            return;
        }
        doze();
    }
    krn_cuda.stream_synchronize(c->aux);
    if (c->poison && !krn_cuda.memset_8_async(c->ring, 0xff, c->ring_bytes, c->stream))
        krn_cuda.stream_synchronize(c->stream);
}
