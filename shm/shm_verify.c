/* SPDX-License-Identifier: MIT */
#include "shm/shm_verify.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#define THREADS_MAX 64u

const uint8_t *shm_unit_bytes(const struct shm_arena_view *view, uint32_t unit, uint64_t *ret_bytes)
{
    uint32_t n_dense = view->catalog->n_dense;
    if (unit < n_dense) {
        *ret_bytes = view->dense[unit].bytes;
        return view->base + view->dense[unit].offset;
    }
    uint32_t experts = view->catalog->hparams.experts;
    uint32_t layer = (unit - n_dense) / experts;
    *ret_bytes = view->layers[layer].blob_bytes;
    return shm_arena_blob(view, layer, (unit - n_dense) % experts);
}

uint64_t shm_unit_sum(const struct shm_arena_view *view, uint32_t unit)
{
    uint64_t bytes;
    const uint8_t *data = shm_unit_bytes(view, unit, &bytes);
    return XXH3_64bits(data, bytes);
}

void shm_unit_name(const struct shm_arena_view *view, uint32_t unit, char ret_name[SHM_UNIT_NAME_BYTES])
{
    uint32_t n_dense = view->catalog->n_dense, experts = view->catalog->hparams.experts;
    if (unit < n_dense)
        snprintf(ret_name, SHM_UNIT_NAME_BYTES, "tensor %s", view->dense[unit].name);
    else
        snprintf(ret_name, SHM_UNIT_NAME_BYTES, "layer %u expert %u", (unit - n_dense) / experts,
                 (unit - n_dense) % experts);
}

struct verify {
    const struct shm_arena_view *view;
    _Atomic uint64_t *done_bytes;
    const atomic_int *cancel;
    _Atomic uint32_t next; /* unit; each is taken by one thread */
    _Atomic uint32_t checked, bad, missing, first_bad;
    _Atomic uint64_t bytes;
};

static void *verify_units(void *arg)
{
    struct verify *v = arg;
    while (!v->cancel || !atomic_load_explicit(v->cancel, memory_order_relaxed)) {
        uint32_t unit = atomic_fetch_add_explicit(&v->next, 1, memory_order_relaxed);
        if (unit >= v->view->units)
            break;
        if (!shm_arena_ready(v->view, unit)) {
            atomic_fetch_add_explicit(&v->missing, 1, memory_order_relaxed);
            continue;
        }
        uint64_t bytes;
        shm_unit_bytes(v->view, unit, &bytes);
        if (shm_unit_sum(v->view, unit) != v->view->sums[unit]) {
            atomic_fetch_add_explicit(&v->bad, 1, memory_order_relaxed);
            uint32_t first = atomic_load_explicit(&v->first_bad, memory_order_relaxed);
            while (unit < first && !atomic_compare_exchange_weak(&v->first_bad, &first, unit))
                ;
        }
        atomic_fetch_add_explicit(&v->checked, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&v->bytes, bytes, memory_order_relaxed);
        if (v->done_bytes)
            atomic_fetch_add_explicit(v->done_bytes, bytes, memory_order_relaxed);
    }
    return NULL;
}

int shm_verify(const struct shm_arena_view *view, uint32_t threads, _Atomic uint64_t *done_bytes,
               const atomic_int *cancel, struct shm_verify_result *ret, struct shm_error *err)
{
    struct verify v = {.view = view, .done_bytes = done_bytes, .cancel = cancel, .first_bad = UINT32_MAX};
    if (threads == 0) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        threads = n < 1 ? 1 : n > 8 ? 8 : (uint32_t)n;
    }
    if (threads > THREADS_MAX)
        threads = THREADS_MAX;
    pthread_t thread[THREADS_MAX];
    uint32_t started = 0;
    while (started + 1 < threads && pthread_create(&thread[started], NULL, verify_units, &v) == 0)
        started++; /* fewer threads than asked for are only slower */
    verify_units(&v);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(thread[i], NULL);

    *ret = (struct shm_verify_result){
        .checked = v.checked, .bad = v.bad, .missing = v.missing, .first_bad = v.first_bad, .bytes = v.bytes};
    if (ret->bad) {
        char name[SHM_UNIT_NAME_BYTES];
        shm_unit_name(view, ret->first_bad, name);
        return shm_error_set(err, EBADMSG,
                             "arena: checksum of %s is wrong (%u of %u checked are): stop expertd, "
                             "remove the arena file and start it again",
                             name, ret->bad, ret->checked);
    }
    if (v.cancel && atomic_load_explicit(v.cancel, memory_order_relaxed))
        return shm_error_set(err, ECANCELED, "arena: verification was cancelled after %u of %u units",
                             ret->checked, view->units);
    return 0;
}
