/* SPDX-License-Identifier: MIT */
#include "tools/ctl.h"

#include "proto/prt_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Words of one of the link block's counters added up. */
static uint64_t total(const struct ctl_worker *w, const char *name)
{
    return shm_counter_total(shm_counter_find(SHM_BLOCK_LINK, name), w->link);
}

static uint64_t outstanding(const struct ctl_worker *w)
{
    return w->issued > w->landed ? w->issued - w->landed : 0;
}

static bool streaming(const struct ctl_worker *w)
{
    return w->stream_seq != w->done_seq;
}

/* Groups of the current stream, relative; 0 when none runs. */
static uint64_t relative(const struct ctl_worker *w, uint64_t groups)
{
    return groups > w->group_base ? groups - w->group_base : 0;
}

static double age_s(uint64_t since_ns)
{
    uint64_t now = shm_now_ns();
    return now > since_ns ? (double)(now - since_ns) / 1e9 : 0;
}

static const char *liveness_text(enum prt_liveness liveness)
{
    static const char *const names[PRT_LIVENESS_COUNT] = {
        [PRT_LIVE] = "live", [PRT_STALE] = "stale: its expertd died", [PRT_STOPPED] = "stopped cleanly"};
    return names[liveness];
}

static uint64_t heartbeat_age_ms(const struct shm_store *s)
{
    return (uint64_t)(age_s(atomic_load(&s->heartbeat_ns)) * 1e3);
}

/* A beat comes about once a second; five missed ones are no scheduling hiccup. */
static bool stalled(const struct ctl_snapshot *n)
{
    return n->suspended || (n->liveness == PRT_LIVE && heartbeat_age_ms(n->store) > 5000);
}

void ctl_json_print(json_t *value)
{
    json_dumpf(value, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(value);
}

/* Text of another process: jansson refuses bad UTF-8, so such bytes become '?'. */
json_t *ctl_json_text(const char *bytes, size_t capacity)
{
    char copy[SHM_PATH_BYTES];
    size_t n = strnlen(bytes, capacity < sizeof copy ? capacity : sizeof copy - 1);
    memcpy(copy, bytes, n);
    json_t *value = json_stringn(copy, n);
    if (value)
        return value;
    for (size_t i = 0; i < n; i++)
        if (copy[i] & 0x80)
            copy[i] = '?';
    return json_stringn(copy, n);
}

static json_t *hex(const uint8_t *bytes, size_t n)
{
    char out[65] = "";
    for (size_t i = 0; i < n && i < 32; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    return json_string(out);
}

static void set_int(json_t *o, const char *key, uint64_t value)
{
    json_object_set_new(o, key, json_integer((json_int_t)value));
}
static void set_real(json_t *o, const char *key, double value)
{
    json_object_set_new(o, key, json_real(value));
}
static void set_text(json_t *o, const char *key, const char *value)
{
    json_object_set_new(o, key, json_string(value));
}
static void set_bool(json_t *o, const char *key, bool value)
{
    json_object_set_new(o, key, json_boolean(value));
}

json_t *ctl_json_report(const struct shm_report *r)
{
    json_t *o = json_object();
    set_int(o, "stream", r->seq);
    set_int(o, "tokens", r->tokens);
    set_text(o, "policy", shm_policy_name(r->policy));
    set_text(o, "order", shm_order_name(r->order));
    set_int(o, "depth", r->depth);
    set_int(o, "ring", r->ring);
    set_text(o, "held_off", shm_held_off_name(r->held_off));
    set_text(o, "result", shm_result_name(r->result));
    set_int(o, "routed", r->routed);
    set_int(o, "entries", r->entries);
    set_int(o, "copied", r->copied);
    set_int(o, "dropped", r->dropped);
    set_int(o, "wasted", r->wasted);
    set_int(o, "bytes_copied", r->bytes);
    set_int(o, "bytes_wasted", r->wasted_bytes);
    set_real(o, "link_ms", (double)r->link_ns / 1e6);
    set_real(o, "span_ms", (double)r->span_ns / 1e6);
    set_real(o, "wait_ms", (double)r->wait_ns / 1e6);
    set_int(o, "outstanding_max", r->outstanding_max);
    return o;
}

json_t *ctl_json_worker(const struct ctl_worker *w)
{
    json_t *o = json_object();
    set_int(o, "pid", atomic_load(&w->row.pid));
    json_object_set_new(o, "name", ctl_json_text(w->row.name, sizeof w->row.name));
    set_int(o, "session", w->row.session);
    set_real(o, "attached_s", age_s(w->row.attached_ns));
    set_bool(o, "alive", w->alive);
    set_int(o, "layers", w->row.layers);
    set_int(o, "experts", w->row.experts);
    set_int(o, "ring", w->row.ring);
    set_int(o, "slot_bytes", w->row.slot_bytes);
    if (!w->mapped) {
        json_object_set_new(o, "unreadable", ctl_json_text(w->why, sizeof w->why));
        return o;
    }
    set_bool(o, "streaming", streaming(w));
    set_int(o, "stream", w->stream_seq);
    set_int(o, "streams", w->done_seq);
    set_int(o, "tokens", w->tokens);
    set_text(o, "policy", shm_policy_name(w->policy));
    set_text(o, "order", shm_order_name(w->order));
    set_int(o, "depth", w->depth);
    set_text(o, "held_off", shm_held_off_name(w->held_off));
    set_text(o, "last_result", shm_result_name(w->result));
    set_bool(o, "detached", w->detached != 0);
    set_int(o, "issue_layer", w->issue_layer);
    set_int(o, "compute_layer", w->layer);
    set_int(o, "issued", w->issued);
    set_int(o, "landed", w->landed);
    set_int(o, "outstanding", outstanding(w));
    set_int(o, "dropped", w->dropped);
    set_int(o, "landed_groups", relative(w, w->landed_groups));
    set_int(o, "released_groups", relative(w, w->released_groups));
    json_object_set_new(o, "counters", ctl_json_counters(SHM_BLOCK_LINK, w->link, NULL, true));
    return o;
}

static json_t *json_workers(const struct ctl_snapshot *n)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < n->workers; i++)
        json_array_append_new(list, ctl_json_worker(&n->worker[i]));
    return list;
}

static json_t *json_budget(const struct ctl_snapshot *n)
{
    json_t *o = json_object(), *list = json_array();
    set_int(o, "bytes", n->counters[SHM_STORE_WORD_BUDGET_BYTES]);
    set_int(o, "bytes_held", n->counters[SHM_STORE_WORD_BUDGET_HELD_BYTES]);
    for (int i = 0; i < n->claims; i++) {
        json_t *one = json_object();
        set_text(one, "instance", n->claim[i].instance);
        set_int(one, "bytes", n->claim[i].held_bytes);
        set_bool(one, "runs", n->claim[i].running);
        json_array_append_new(list, one);
    }
    json_object_set_new(o, "instances", list);
    return o;
}

static json_t *json_status(const struct ctl_snapshot *n)
{
    const struct shm_store *s = n->store;
    json_t *o = json_object();
    json_object_set_new(o, "instance", ctl_json_text(s->instance, sizeof s->instance));
    set_text(o, "state",
             n->liveness == PRT_LIVE      ? ctl_state(atomic_load(&s->state))
             : n->liveness == PRT_STOPPED ? "stopped"
                                          : "stale");
    set_int(o, "pid", s->header.writer_pid);
    set_bool(o, "alive", n->liveness == PRT_LIVE);
    set_bool(o, "suspended", n->suspended);
    set_bool(o, "stalled", stalled(n));
    set_int(o, "heartbeat_age_ms", heartbeat_age_ms(s));
    set_bool(o, "adopted", n->counters[SHM_STORE_WORD_ARENA_ADOPTED] != 0);
    json_t *model = json_object();
    json_object_set_new(model, "path", ctl_json_text(s->model_path, sizeof s->model_path));
    json_object_set_new(model, "name", ctl_json_text(s->model_name, sizeof s->model_name));
    json_object_set_new(model, "fingerprint", hex(s->fingerprint, sizeof s->fingerprint));
    json_object_set_new(o, "model", model);
    json_t *arena = json_object();
    json_object_set_new(arena, "path", ctl_json_text(s->arena_path, sizeof s->arena_path));
    set_int(arena, "bytes", s->arena_bytes);
    set_int(arena, "generation", n->counters[SHM_STORE_WORD_ARENA_GENERATION]);
    set_bool(arena, "pinned", atomic_load(&s->pinned) != 0);
    set_bool(arena, "huge_pages", atomic_load(&s->huge_pages) != 0);
    json_object_set_new(o, "arena", arena);
    json_object_set_new(o, "device", ctl_json_text(s->device, sizeof s->device));
    json_t *park = json_object();
    set_int(park, "bytes", shm_counter_get(&s->counters.park_bytes));
    set_int(park, "bytes_held", shm_counter_get(&s->counters.park_held_bytes));
    set_int(park, "blocks", shm_counter_get(&s->counters.park_blocks));
    set_int(park, "committed", shm_counter_get(&s->counters.park_committed));
    set_int(park, "found", shm_counter_get(&s->counters.park_found));
    set_int(park, "ignored", shm_counter_get(&s->counters.park_ignored));
    set_int(park, "evicted", shm_counter_get(&s->counters.park_evicted));
    set_int(park, "wrong", shm_counter_get(&s->counters.park_wrong));
    json_object_set_new(park, "note", ctl_json_text(s->park_note, sizeof s->park_note));
    json_object_set_new(o, "park", park);
    json_object_set_new(o, "budget", json_budget(n));
    json_t *load = json_object();
    json_object_set_new(load, "reader", ctl_json_text(s->reader, sizeof s->reader));
    set_int(load, "bytes_total", n->counters[SHM_STORE_WORD_LOAD_WANTED_BYTES]);
    set_int(load, "bytes_done", n->counters[SHM_STORE_WORD_LOAD_BYTES]);
    set_real(load, "seconds", (double)n->counters[SHM_STORE_WORD_LOAD_NS] / 1e9);
    set_real(load, "ready_s", (double)n->counters[SHM_STORE_WORD_READY_NS] / 1e9);
    json_object_set_new(o, "load", load);
    json_t *defaults = json_object();
    set_text(defaults, "policy", shm_policy_name(s->policy));
    set_text(defaults, "order", shm_order_name(s->order));
    set_int(defaults, "depth", s->depth);
    set_int(defaults, "floor", s->floor);
    set_real(defaults, "link_gbps", s->link_gbps);
    set_real(defaults, "link_latency_us", s->link_latency_us);
    json_object_set_new(o, "defaults", defaults);
    json_object_set_new(o, "counters", ctl_json_counters(SHM_BLOCK_STORE, n->counters, NULL, true));
    json_object_set_new(o, "detail", ctl_json_text(s->detail, sizeof s->detail));
    json_object_set_new(o, "workers", json_workers(n));
    return o;
}

static void print_load(const struct ctl_snapshot *n)
{
    const struct shm_store *s = n->store;
    double done = (double)n->counters[SHM_STORE_WORD_LOAD_BYTES];
    double all = (double)n->counters[SHM_STORE_WORD_LOAD_WANTED_BYTES];
    double seconds = (double)n->counters[SHM_STORE_WORD_LOAD_NS] / 1e9;
    if (n->counters[SHM_STORE_WORD_ARENA_ADOPTED])
        printf("loaded     nothing: the arena was adopted, ready after %.3f s\n",
               (double)n->counters[SHM_STORE_WORD_READY_NS] / 1e9);
    else if (all > 0)
        printf("loaded     %.1f of %.1f MB in %.2f s (%.2f GB/s), %.128s\n", done / 1e6, all / 1e6, seconds,
               seconds > 0 ? done / 1e9 / seconds : 0, s->reader);
}

static void print_budget(const struct ctl_snapshot *n)
{
    char all[24], held[24], holders[320];
    prt_size_text(n->counters[SHM_STORE_WORD_BUDGET_BYTES], all);
    prt_size_text(prt_claim_text(n->claim, n->claims, holders, sizeof holders), held);
    printf("budget     %s of %s held by instances: %s\n", held, all, holders);
}

int ctl_show_status(const struct ctl_snapshot *n, const struct ctl_options *options)
{
    const struct shm_store *s = n->store;
    int status = n->liveness == PRT_STALE || stalled(n) ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
    if (options->json) {
        ctl_json_print(json_status(n));
        return status;
    }
    printf("instance   %.64s: %s, expertd %u (%s)\n", s->instance, ctl_state(atomic_load(&s->state)),
           s->header.writer_pid, liveness_text(n->liveness));
    if (n->suspended)
        printf("warning    expertd is stopped (SIGSTOP): nothing moves until kill -CONT %u\n",
               s->header.writer_pid);
    else if (n->liveness == PRT_STALE)
        puts("warning    it died: start it again with expertd --model FILE; what follows is as it was then");
    else if (stalled(n))
        printf("warning    its main loop has not moved for %.1f s: it is stuck\n",
               (double)heartbeat_age_ms(s) / 1e3);
    printf("model      %.128s%s%.1024s\n", s->model_name, s->model_name[0] ? ", " : "", s->model_path);
    if (s->arena_bytes)
        printf("arena      %.1f MB, generation %" PRIu64 ", %s, %s, %.1024s\n", (double)s->arena_bytes / 1e6,
               n->counters[SHM_STORE_WORD_ARENA_GENERATION],
               atomic_load(&s->pinned) ? "pinned" : "not pinned",
               atomic_load(&s->huge_pages) ? "huge pages" : "small pages", s->arena_path);
    print_load(n);
    if (s->device[0])
        printf("device     %.128s\n", s->device);
    if (shm_counter_get(&s->counters.park_bytes))
        printf("park       %.1f of %.1f MB, %" PRIu64 " blocks; %" PRIu64 " taken in, %" PRIu64
               " given out, %" PRIu64 " ignored, %" PRIu64 " given up, %" PRIu64 " wrong\n",
               (double)shm_counter_get(&s->counters.park_held_bytes) / 1e6,
               (double)shm_counter_get(&s->counters.park_bytes) / 1e6,
               shm_counter_get(&s->counters.park_blocks), shm_counter_get(&s->counters.park_committed),
               shm_counter_get(&s->counters.park_found), shm_counter_get(&s->counters.park_ignored),
               shm_counter_get(&s->counters.park_evicted), shm_counter_get(&s->counters.park_wrong));
    else if (s->park_note[0])
        printf("park       %.128s\n", s->park_note);
    if (n->counters[SHM_STORE_WORD_BUDGET_BYTES])
        print_budget(n);
    printf("stream     policy %s, order %s, depth %u, floor %u; link %s", shm_policy_name(s->policy),
           shm_order_name(s->order), s->depth, s->floor, s->link_gbps > 0 ? "paced to " : "unpaced\n");
    if (s->link_gbps > 0)
        printf("%g GB/s + %g us a copy\n", s->link_gbps, s->link_latency_us);
    printf("sessions   %u attached; %" PRIu64 " attached so far, %" PRIu64 " left, %" PRIu64 " died, %" PRIu64
           " refused\n",
           n->workers, n->counters[SHM_STORE_WORD_ATTACHES], n->counters[SHM_STORE_WORD_DETACHES],
           n->counters[SHM_STORE_WORD_DEATHS], n->counters[SHM_STORE_WORD_REFUSED]);
    if (s->detail[0])
        printf("last       %.256s\n", s->detail);
    return status;
}

int ctl_show_workers(const struct ctl_snapshot *n, const struct ctl_options *options)
{
    int status = CTL_EXIT_OK;
    for (uint32_t i = 0; i < n->workers; i++)
        if (!n->worker[i].mapped || n->worker[i].detached)
            status = CTL_EXIT_PROBLEM;
    if (options->json) {
        ctl_json_print(json_workers(n));
        return status;
    }
    printf("%8s %-16s %8s %8s %9s %10s %10s %10s %10s %9s\n", "PID", "NAME", "AGE", "STREAMS", "POLICY",
           "COPIED", "DROPPED", "UNROUTED", "MB", "WAIT ms");
    for (uint32_t i = 0; i < n->workers; i++) {
        const struct ctl_worker *w = &n->worker[i];
        printf("%8u %-16.16s %7.0fs ", atomic_load(&w->row.pid), w->row.name, age_s(w->row.attached_ns));
        if (!w->mapped)
            printf("unreadable: %s\n", w->why);
        else
            printf("%8" PRIu64 " %9s %10" PRIu64 " %10" PRIu64 " %10" PRIu64 " %10.1f %9.1f%s\n", w->done_seq,
                   shm_policy_name(w->policy), total(w, "link_copies"), total(w, "stream_drops"),
                   w->link[SHM_LINK_WORD_LINK_COPIES + SHM_COPY_REASON_AHEAD_WASTED],
                   (double)(total(w, "link_bytes") -
                            w->link[SHM_LINK_WORD_LINK_BYTES + SHM_COPY_REASON_RESIDENT]) /
                       1e6,
                   (double)total(w, "worker_wait_ns") / 1e6, w->detached ? " detached" : "");
    }
    if (!n->workers)
        puts("no worker is attached");
    ctl_show_servers(n->paths);
    return status;
}

#define BAR_CELLS 64

/* One cell stands for one or more slots and shows the busiest of them. */
static void slot_bar(const struct ctl_worker *w, char *bar, uint32_t *ret_count)
{
    static const char marks[CTL_SLOT_COUNT] = {
        [CTL_SLOT_FREE] = '.', [CTL_SLOT_ISSUED] = 'i', [CTL_SLOT_LANDED] = '#', [CTL_SLOT_USED] = '@'};
    uint32_t ring = w->geometry.ring, cells = ring < BAR_CELLS ? ring : BAR_CELLS;
    memset(ret_count, 0, CTL_SLOT_COUNT * sizeof *ret_count);
    memset(bar, '.', cells);
    bar[cells] = 0;
    for (uint32_t slot = 0; w->slots && slot < ring; slot++) {
        enum ctl_slot state = ctl_slot_state(w, w->slots[slot]);
        char *cell = &bar[(uint64_t)slot * cells / ring];
        ret_count[state]++;
        enum ctl_slot shown = *cell == '@'   ? CTL_SLOT_USED
                              : *cell == '#' ? CTL_SLOT_LANDED
                              : *cell == 'i' ? CTL_SLOT_ISSUED
                                             : CTL_SLOT_FREE;
        if (state > shown)
            *cell = marks[state];
    }
}

int ctl_show_rings(const struct ctl_snapshot *n, const struct ctl_options *options)
{
    json_t *list = json_array();
    int status = CTL_EXIT_OK;
    for (uint32_t i = 0; i < n->workers; i++) {
        const struct ctl_worker *w = &n->worker[i];
        if (!w->mapped) {
            status = CTL_EXIT_PROBLEM;
            if (options->json)
                json_array_append_new(list, ctl_json_worker(w));
            else
                printf("worker %u %.64s: unreadable: %s\n", atomic_load(&w->row.pid), w->row.name, w->why);
            continue;
        }
        char bar[BAR_CELLS + 1];
        uint32_t count[CTL_SLOT_COUNT];
        slot_bar(w, bar, count);
        if (options->json) {
            json_t *o = ctl_json_worker(w), *slots = json_object();
            set_int(slots, "free", count[CTL_SLOT_FREE]);
            set_int(slots, "issued", count[CTL_SLOT_ISSUED]);
            set_int(slots, "landed", count[CTL_SLOT_LANDED]);
            set_int(slots, "used", count[CTL_SLOT_USED]);
            json_object_set_new(o, "slots", slots);
            set_text(o, "bar", bar);
            json_array_append_new(list, o);
            continue;
        }
        printf("worker %u %.64s: %s stream %" PRIu64 ", %u tokens, %s by %s, depth %u\n",
               atomic_load(&w->row.pid), w->row.name, streaming(w) ? "in" : "idle after", w->stream_seq,
               w->tokens, shm_policy_name(w->policy), shm_order_name(w->order), w->depth);
        printf("  layer      issuing %" PRIu64 ", computing %" PRIu64 " of %u\n", w->issue_layer, w->layer,
               w->geometry.layers);
        printf("  head       %" PRIu64 "  landed %" PRIu64 "  outstanding %" PRIu64 "  dropped %" PRIu64
               "  groups landed %" PRIu64 ", released %" PRIu64 "\n",
               w->issued, w->landed, outstanding(w), w->dropped, relative(w, w->landed_groups),
               relative(w, w->released_groups));
        printf("  ring %5u [%s] %u free, %u issued (i), %u landed (#), %u in use (@)\n", w->geometry.ring,
               bar, count[CTL_SLOT_FREE], count[CTL_SLOT_ISSUED], count[CTL_SLOT_LANDED],
               count[CTL_SLOT_USED]);
    }
    if (options->json)
        ctl_json_print(list);
    else
        json_decref(list);
    if (!n->workers && !options->json)
        puts("no worker is attached");
    return status;
}

static void print_report(const struct shm_report *r)
{
    printf("%6" PRIu64 " %6u %7s %9s %6.1f%% %8" PRIu64 " %8" PRIu64 " %8" PRIu64 " %9.2f %9.2f %9.2f %s\n",
           r->seq, r->tokens, shm_policy_name(r->policy), shm_order_name(r->order),
           r->entries ? 100.0 * (double)r->routed / (double)r->entries : 0, r->copied, r->dropped, r->wasted,
           (double)r->bytes / 1e6, (double)r->link_ns / 1e6, (double)r->wait_ns / 1e6,
           shm_result_name(r->result));
}

int ctl_show_trace(const struct ctl_snapshot *n, const struct ctl_options *options)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < n->workers; i++) {
        const struct ctl_worker *w = &n->worker[i];
        uint32_t count = options->count ? options->count : 16;
        uint32_t first = w->reports > count ? w->reports - count : 0;
        json_t *o = json_object(), *chunks = json_array();
        bool stale = n->liveness != PRT_LIVE || !w->mapped;
        set_int(o, "pid", atomic_load(&w->row.pid));
        set_int(o, "overrun", w->overrun);
        set_bool(o, "stale", stale);
        if (!options->json) {
            printf("worker %u %.64s\n", atomic_load(&w->row.pid), w->row.name);
            if (n->liveness != PRT_LIVE)
                printf("  stale writer: expertd (pid %u) %s, no chunk is added any more\n",
                       n->store->header.writer_pid, n->liveness == PRT_STALE ? "died" : "has ended");
            if (!w->mapped)
                printf("  unreadable: %s\n", w->why);
            if (w->overrun)
                printf("  overrun: %u of its chunks, written over while they were read\n", w->overrun);
            printf("%6s %6s %7s %9s %7s %8s %8s %8s %9s %9s %9s %s\n", "CHUNK", "TOKENS", "POLICY", "ORDER",
                   "ROUTED", "COPIED", "DROPPED", "UNROUTED", "MB", "LINK ms", "WAIT ms", "RESULT");
        }
        for (uint32_t k = first; k < w->reports; k++) {
            if (options->json)
                json_array_append_new(chunks, ctl_json_report(&w->report[k]));
            else
                print_report(&w->report[k]);
        }
        json_object_set_new(o, "chunks", chunks);
        json_array_append_new(list, o);
    }
    if (options->json)
        ctl_json_print(list);
    else
        json_decref(list);
    return CTL_EXIT_OK;
}
