/* SPDX-License-Identifier: MIT */
#include "shm/shm_worker.h"

#include <errno.h>
#include <string.h>

static int check_range(const char *field, uint64_t value, uint64_t low, uint64_t high, struct shm_error *err)
{
    if (value >= low && value <= high)
        return 0;
    return shm_error_set(err, EINVAL, "worker geometry: %s is %llu, allowed are %llu to %llu", field,
                         (unsigned long long)value, (unsigned long long)low, (unsigned long long)high);
}

int shm_worker_layout(const struct shm_geometry *g, struct shm_worker_layout *ret_layout,
                      struct shm_error *err)
{
    int rc;
    if ((rc = check_range("layers", g->layers, 1, SHM_LAYERS_MAX, err)) ||
        (rc = check_range("experts", g->experts, 1, SHM_EXPERTS_MAX, err)) ||
        (rc = check_range("ring", g->ring, 1, SHM_RING_MAX, err)) ||
        (rc = check_range("slot_bytes", g->slot_bytes, 256, UINT64_C(1) << 34, err)))
        return rc;
    uint32_t entries = shm_group_entries(g->ring);
    uint32_t groups = shm_groups_per_layer(g->experts, entries);
    if ((rc = check_range("group_entries", g->group_entries, entries, entries, err)) ||
        (rc = check_range("groups_per_layer", g->groups_per_layer, groups, groups, err)))
        return rc;
    if (g->slot_bytes % 256)
        return shm_error_set(err, EINVAL, "worker geometry: slot_bytes %llu is not a multiple of 256",
                             (unsigned long long)g->slot_bytes);

    /* At most 512 * 1024 * 4 bytes a section: no overflow in 64 bits. */
    struct shm_worker_layout l = {.geometry = *g};
    uint64_t at = sizeof(struct shm_worker);
    uint64_t per_expert = ((uint64_t)g->layers * g->experts * 4 + 63) & ~UINT64_C(63);
    l.resident = at, at += (uint64_t)g->layers * sizeof(struct shm_mask);
    l.route = at, at += (uint64_t)g->layers * sizeof(struct shm_route);
    l.tokens = at, at += per_expert;
    l.predicted = at, at += per_expert;
    l.recent = at, at += per_expert;
    l.table = at, at += per_expert;
    l.slot_map = at, at += ((uint64_t)g->ring * 8 + 63) & ~UINT64_C(63);
    l.layer = at, at += (uint64_t)g->layers * sizeof(struct shm_layer_counters);
    l.total_bytes = (at + 4095) & ~UINT64_C(4095);
    *ret_layout = l;
    return 0;
}

void shm_worker_view(void *base, const struct shm_worker_layout *l, struct shm_worker_view *v)
{
    char *p = base;
    v->worker = base;
    v->resident = (struct shm_mask *)(p + l->resident);
    v->route = (struct shm_route *)(p + l->route);
    v->tokens = (uint32_t *)(p + l->tokens);
    v->predicted = (uint32_t *)(p + l->predicted);
    v->recent = (uint32_t *)(p + l->recent);
    v->table = (_Atomic uint32_t *)(p + l->table);
    v->slot_map = (_Atomic uint64_t *)(p + l->slot_map);
    v->layer = (struct shm_layer_counters *)(p + l->layer);
}

/* A report as words, the generation first. Copied word by word with atomics: reader and writer may meet in
 * it. */
#define REPORT_WORDS (sizeof(struct shm_report) / 8)

int shm_report_read(const struct shm_worker *worker, uint64_t seq, struct shm_report *ret_report)
{
    const _Atomic uint64_t *from = (const void *)&worker->report[seq % SHM_REPORTS];
    /* acquire, pairs with the last release in shm_report_write: the report is whole */
    if (atomic_load_explicit(from, memory_order_acquire) != 2 * seq)
        return -EAGAIN;
    uint64_t words[REPORT_WORDS] = {2 * seq};
    /* acquire, pairs with the writer's release of each word: who sees one of the next report sees its odd
     * mark below */
    for (size_t i = 1; i < REPORT_WORDS; i++)
        words[i] = atomic_load_explicit(from + i, memory_order_acquire);
    if (atomic_load_explicit(from, memory_order_relaxed) != 2 * seq)
        return -EAGAIN;
    memcpy(ret_report, words, sizeof words);
    return 0;
}

void shm_report_write(struct shm_worker *worker, const struct shm_report *report)
{
    _Atomic uint64_t *to = (void *)&worker->report[report->seq % SHM_REPORTS];
    uint64_t words[REPORT_WORDS];
    memcpy(words, report, sizeof words);
    atomic_store_explicit(to, 2 * report->seq + 1, memory_order_relaxed);
    for (size_t i = 1; i < REPORT_WORDS; i++) /* release: the odd mark comes before each word */
        atomic_store_explicit(to + i, words[i], memory_order_release);
    /* release, pairs with the first acquire in shm_report_read */
    atomic_store_explicit(to, 2 * report->seq, memory_order_release);
}
