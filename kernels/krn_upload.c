/* SPDX-License-Identifier: MIT */
#include "kernels/krn_upload.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS_DEFAULT  2u /* one is filled while the other is on the link */
#define SLOT_DEFAULT   (UINT64_C(1) << 20)
#define THREADS_ENOUGH 8u

struct piece {
    krn_cuda_ptr target;
    const uint8_t *source;
    uint64_t bytes;
};

struct helper {
    struct krn_upload *owner;
    pthread_t thread;
    void *stream;
    void *landed[KRN_UPLOAD_SLOTS_MAX]; /* events */
    uint8_t *slot[KRN_UPLOAD_SLOTS_MAX];
};

struct krn_upload {
    struct krn_upload_config config;
    uint8_t *pinned;
    unsigned started;
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    /* under the lock */
    struct piece *piece;
    size_t n, room, next; /* the next to begin, from piece[next] on */
    unsigned busy;        /* helpers that copy */
    bool stop;
    int result; /* the driver's first failure */
    const char *call;
    struct helper helper[KRN_UPLOAD_THREADS_MAX];
};

/* The next bytes to copy; false: the end. A thread that has nothing to do waits. */
static bool take(struct krn_upload *u, struct piece *ret)
{
    pthread_mutex_lock(&u->lock);
    while (u->next == u->n && !u->stop)
        pthread_cond_wait(&u->work, &u->lock);
    bool more = !u->stop;
    if (more) {
        struct piece *p = &u->piece[u->next];
        *ret = *p;
        if (ret->bytes > u->config.slot_bytes)
            ret->bytes = u->config.slot_bytes;
        p->target += ret->bytes;
        p->source += ret->bytes;
        p->bytes -= ret->bytes;
        if (!p->bytes)
            u->next++;
        u->busy++;
    }
    pthread_mutex_unlock(&u->lock);
    return more;
}

/* Not busy any more. After a failure everything that is left is left out. */
static void give(struct krn_upload *u, int result, const char *call)
{
    pthread_mutex_lock(&u->lock);
    u->busy--;
    if (result && !u->result) {
        u->result = result;
        u->call = call;
    }
    if (u->result)
        u->next = u->n;
    if (!u->busy && u->next == u->n)
        pthread_cond_broadcast(&u->idle);
    pthread_mutex_unlock(&u->lock);
}

static void *help(void *arg)
{
    struct helper *h = arg;
    struct krn_upload *u = h->owner;
    struct piece p;
    krn_cuda_enter(u->config.device);
    for (unsigned i = 0; take(u, &p); i = (i + 1) % u->config.slots) {
        const char *call = "event_synchronize";
        int result = krn_cuda.event_synchronize(h->landed[i]); /* the slot's copy before */
        if (!result) {
            memcpy(h->slot[i], p.source, p.bytes);
            call = "copy_in_async";
            result = krn_cuda.copy_in_async(p.target, h->slot[i], p.bytes, h->stream);
        }
        if (!result) {
            call = "event_record";
            result = krn_cuda.event_record(h->landed[i], h->stream);
        }
        give(u, result, call);
    }
    return NULL;
}

unsigned krn_upload_cpus(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
}

static int start(struct krn_upload *u, struct helper *h, unsigned number)
{
    h->owner = u;
    int rc = KRN_CUDA(stream_create, &h->stream, KRN_CUDA_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < u->config.slots && !rc; i++) {
        h->slot[i] = u->pinned + (number * u->config.slots + i) * u->config.slot_bytes;
        rc = KRN_CUDA(event_create, &h->landed[i], KRN_CUDA_EVENT_NO_TIMING | KRN_CUDA_EVENT_BLOCKING_SYNC);
    }
    return rc;
}

int krn_upload_open(const struct krn_upload_config *config, struct krn_upload **ret_upload,
                    struct shm_error *err)
{
    struct krn_upload *u = calloc(1, sizeof *u);
    if (!u)
        return shm_error_set(err, ENOMEM, "upload: no memory; free some");
    u->config = *config;
    if (!u->config.slot_bytes)
        u->config.slot_bytes = SLOT_DEFAULT;
    if (!u->config.slots || u->config.slots > KRN_UPLOAD_SLOTS_MAX)
        u->config.slots = SLOTS_DEFAULT;
    unsigned want = u->config.threads ? u->config.threads : krn_upload_cpus();
    unsigned most = u->config.threads ? KRN_UPLOAD_THREADS_MAX : THREADS_ENOUGH;
    want = want < 1 ? 1 : want > most ? most : want;
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->work, NULL);
    pthread_cond_init(&u->idle, NULL);
    void *pinned;
    int rc = krn_cuda_enter(config->device);
    if (!rc)
        rc = KRN_CUDA(host_alloc, &pinned, want * u->config.slots * u->config.slot_bytes,
                      KRN_CUDA_HOST_PORTABLE);
    if (!rc)
        u->pinned = pinned;
    for (unsigned i = 0; i < want && !rc; i++)
        rc = start(u, &u->helper[i], i);
    if (rc) {
        krn_cuda_explain(rc, "upload: pinned memory and streams", err);
        krn_upload_close(&u);
        return rc;
    }
    for (unsigned i = 0; i < want; i++) {
        rc = pthread_create(&u->helper[i].thread, NULL, help, &u->helper[i]);
        if (rc)
            break;
        u->started++;
    }
    if (!u->started) {
        krn_upload_close(&u);
        return shm_error_set(err, rc, "upload: no thread: raise the limit on processes (ulimit -u)");
    }
    *ret_upload = u;
    return 0;
}

int krn_upload_put(struct krn_upload *u, krn_cuda_ptr target, const void *source, uint64_t bytes)
{
    int rc = 0;
    if (!bytes)
        return 0;
    pthread_mutex_lock(&u->lock);
    if (u->result) {
        rc = krn_cuda_check(u->result, u->call);
    } else {
        if (u->next == u->n && !u->busy)
            u->next = u->n = 0;
        if (u->n == u->room) {
            size_t room = u->room ? u->room * 2 : 256;
            struct piece *grown = realloc(u->piece, room * sizeof *grown);
            if (grown) {
                u->piece = grown;
                u->room = room;
            }
        }
        if (u->n == u->room) {
            rc = -ENOMEM;
        } else {
            u->piece[u->n++] = (struct piece){target, source, bytes};
            pthread_cond_signal(&u->work);
        }
    }
    pthread_mutex_unlock(&u->lock);
    return rc;
}

int krn_upload_finish(struct krn_upload *u)
{
    pthread_mutex_lock(&u->lock);
    while (u->busy || u->next != u->n)
        pthread_cond_wait(&u->idle, &u->lock);
    int result = u->result;
    const char *call = u->call;
    pthread_mutex_unlock(&u->lock);
    /* the last pieces are enqueued, not there */
    for (unsigned i = 0; i < u->started && !result; i++) {
        call = "stream_synchronize";
        result = krn_cuda.stream_synchronize(u->helper[i].stream);
    }
    return result ? krn_cuda_check(result, call) : 0;
}

void krn_upload_close(struct krn_upload **upload)
{
    struct krn_upload *u = *upload;
    if (!u)
        return;
    pthread_mutex_lock(&u->lock);
    u->stop = true;
    pthread_cond_broadcast(&u->work);
    pthread_mutex_unlock(&u->lock);
    for (unsigned i = 0; i < u->started; i++)
        pthread_join(u->helper[i].thread, NULL);
    if (krn_cuda_enter(u->config.device) == 0) {
        for (unsigned i = 0; i < KRN_UPLOAD_THREADS_MAX; i++) {
            struct helper *h = &u->helper[i];
            if (h->stream) {
                krn_cuda.stream_synchronize(h->stream); /* reads the slots until then */
                krn_cuda.stream_destroy(h->stream);
            }
            for (unsigned s = 0; s < u->config.slots; s++)
                if (h->landed[s])
                    krn_cuda.event_destroy(h->landed[s]);
        }
        if (u->pinned)
            krn_cuda.host_free(u->pinned);
    }
    pthread_cond_destroy(&u->idle);
    pthread_cond_destroy(&u->work);
    pthread_mutex_destroy(&u->lock);
    free(u->piece);
    free(u);
    *upload = NULL;
}
