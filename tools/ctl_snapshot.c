/* SPDX-License-Identifier: MIT */
#include "tools/ctl.h"

#include "proto/prt_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NAME(table, value) ((value) < sizeof table / sizeof *table && table[value] ? table[value] : "?")

const char *ctl_state(uint32_t state)
{
    static const char *const names[] = {"?", "starting", "loading", "serving", "draining", "stopped"};
    return NAME(names, state);
}

static uint64_t load64(const _Atomic uint64_t *word)
{
    /* acquire: what the writer stored before is seen with it; nothing more is promised to a looker-on */
    return atomic_load_explicit(word, memory_order_acquire);
}

static uint32_t load32(const _Atomic uint32_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

/* The worker's word for which descriptor it is: what it leads to is checked, then copied. */
static void copy_server(struct ctl_worker *w, uint32_t fd_number)
{
    struct shm_error err = {0};
    void *base;
    int fd;
    if (!fd_number || prt_peer_open((pid_t)atomic_load(&w->row.pid), fd_number, sizeof(struct shm_server),
                                    "server segment", &fd, &err))
        return;
    int rc = prt_file_map(fd, "server segment", sizeof(struct shm_server), false, &base, &err);
    close(fd);
    if (rc)
        return;
    const struct shm_server *s = base;
    if (shm_header_check(&s->header, SHM_SERVER_MAGIC, sizeof *s, "server segment", &err) == 0 &&
        shm_header_check_counters(&s->header, "server segment", &err) == 0) {
        shm_counters_copy(SHM_BLOCK_SERVER, &s->counters, w->server);
        w->server[SHM_SERVER_WORD_QUEUE_OLDEST_NS] = shm_server_oldest_ns(s, shm_now_ns());
        w->serves = true;
    }
    munmap(base, sizeof *s);
}

static void copy_segment(struct ctl_worker *w, const void *base, const struct shm_worker_layout *layout)
{
    struct shm_worker_view v;
    shm_worker_view((void *)base, layout, &v); /* only read below */
    const struct shm_worker *s = v.worker;
    w->geometry = layout->geometry;
    /* Released before landed before issued: no looker-on sees more released than landed. */
    w->released_groups = load64(&s->released_groups);
    w->landed_groups = load64(&s->landed_groups);
    w->landed = load64(&s->landed_entries);
    w->issued = load64(&s->issued_entries);
    w->dropped = load64(&s->dropped_entries);
    w->stream_seq = load64(&s->stream_seq);
    w->done_seq = load64(&s->done_seq);
    w->group_base = s->descriptor.group_base;
    w->tokens = s->descriptor.tokens;
    w->issue_layer = load64(&s->issue_layer);
    w->layer = load64(&s->layer);
    w->policy = load32(&s->policy);
    w->order = load32(&s->order);
    w->depth = load32(&s->depth);
    w->held_off = load32(&s->held_off);
    w->result = load32(&s->result);
    w->detached = load32(&s->detached);
    shm_counters_copy(SHM_BLOCK_LINK, &s->link, w->link);
    shm_counters_copy(SHM_BLOCK_COMPUTE, &s->compute, w->compute);
    w->layers = calloc(w->geometry.layers, SHM_LAYER_WORDS * sizeof *w->layers);
    for (uint32_t i = 0; w->layers && i < w->geometry.layers; i++)
        shm_counters_copy(SHM_BLOCK_LAYER, &v.layer[i], w->layers + (size_t)i * SHM_LAYER_WORDS);
    copy_server(w, s->server_fd);
    w->slots = calloc(w->geometry.ring, sizeof *w->slots);
    for (uint32_t i = 0; w->slots && i < w->geometry.ring; i++)
        w->slots[i] = load64(&v.slot_map[i]);
    /* The issuer counts landings only when it issues; groups are signalled by the link itself. Both are
     * lower bounds of what has landed. */
    uint64_t flying = 0;
    for (uint32_t i = 0; w->slots && i < w->geometry.ring; i++)
        flying += ctl_slot_state(w, w->slots[i]) == CTL_SLOT_ISSUED;
    if (w->slots && w->issued >= flying && w->issued - flying > w->landed)
        w->landed = w->issued - flying;
    /* done_seq is the worker's to scribble: the count bounds the loop, not the number. */
    uint64_t last = w->done_seq, n = last < SHM_REPORTS - 1 ? last : SHM_REPORTS - 1;
    for (uint64_t k = n; k > 0; k--)
        if (shm_report_read(s, last - k + 1, &w->report[w->reports]) == 0)
            w->reports++;
        else
            w->overrun++;
}

void ctl_snapshot_take(struct prt_client *client, uint32_t only_pid, struct ctl_snapshot *ret_snapshot)
{
    struct ctl_snapshot *n = ret_snapshot;
    memset(n, 0, sizeof *n);
    n->store = prt_client_store(client);
    n->paths = prt_client_paths(client);
    n->liveness = prt_client_liveness(client);
    n->suspended = n->liveness == PRT_LIVE && prt_process_stopped((pid_t)n->store->header.writer_pid);
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++) {
        struct ctl_worker *w = &n->worker[n->workers];
        memset(w, 0, sizeof *w);
        int rc = prt_client_worker(client, i, &w->row);
        for (int retry = 0; rc == -EAGAIN && retry < 100; retry++)
            rc = prt_client_worker(client, i, &w->row);
        uint32_t pid = atomic_load(&w->row.pid);
        if (rc || (only_pid && only_pid != pid))
            continue;
        w->alive = prt_process_alive((pid_t)pid, w->row.start);
        w->suspended = w->alive && prt_process_stopped((pid_t)pid);
        struct shm_worker_layout layout;
        struct shm_error err = {0};
        const void *base;
        if (!w->alive)
            snprintf(w->why, sizeof w->why, "process %u is gone", pid);
        else if (prt_client_map_worker(&w->row, &layout, &base, &err)) {
            if (n->liveness == PRT_LIVE)
                snprintf(w->why, sizeof w->why, "%s", shm_error_text(&err));
            else /* it has let go of the segment */
                snprintf(w->why, sizeof w->why,
                         "expertd (pid %u) has ended, this worker waits for the next one",
                         n->store->header.writer_pid);
        } else if (shm_header_check_counters(base, "control segment", &err)) {
            snprintf(w->why, sizeof w->why, "%s", shm_error_text(&err));
            munmap((void *)base, layout.total_bytes);
        } else {
            w->mapped = true;
            copy_segment(w, base, &layout);
            munmap((void *)base, layout.total_bytes);
        }
        n->workers++;
    }
    if (shm_counter_get(&n->store->counters.budget_bytes))
        n->claims = prt_claim_list(n->paths, NULL, n->claim);
    ctl_counters_look(n);
}

void ctl_snapshot_free(struct ctl_snapshot *snapshot)
{
    for (uint32_t i = 0; i < snapshot->workers; i++)
        free(snapshot->worker[i].slots), free(snapshot->worker[i].layers);
    snapshot->workers = 0;
}

enum ctl_slot ctl_slot_state(const struct ctl_worker *w, uint64_t word)
{
    if (!(word >> 63))
        return CTL_SLOT_FREE;
    /* Group numbers are kept to 31 bits: compare by distance. */
    uint32_t group = shm_slot_group(word);
    uint32_t to_released = ((uint32_t)w->released_groups - group) & 0x7fffffff;
    uint32_t to_landed = ((uint32_t)w->landed_groups - group) & 0x7fffffff;
    if (to_released > 0 && to_released < 0x40000000)
        return CTL_SLOT_FREE;
    if (!to_landed || to_landed >= 0x40000000)
        return CTL_SLOT_ISSUED;
    return to_released ? CTL_SLOT_LANDED : CTL_SLOT_USED; /* groups are computed in order: this is the next */
}
