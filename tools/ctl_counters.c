/* SPDX-License-Identifier: MIT */
/* The command `counters`: everything of counters.spec, by the table made of it. */
#include "tools/ctl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static uint64_t age_ns(uint64_t since_ns)
{
    uint64_t now_ns = shm_now_ns();
    return now_ns > since_ns ? now_ns - since_ns : 0;
}

static void look_at_worker(struct ctl_worker *w)
{
    w->link[SHM_LINK_WORD_WORKER_ATTACHED_NS] = age_ns(w->row.attached_ns);
    w->link[SHM_LINK_WORD_WORKER_SUSPENDED] = w->suspended;
    w->link[SHM_LINK_WORD_WORKER_STREAMING] = w->stream_seq != w->done_seq;
    uint64_t progress_ns = w->link[SHM_LINK_WORD_PROGRESS_AT_NS];
    w->link[SHM_LINK_WORD_WORKER_PROGRESS_AGE_NS] = progress_ns ? age_ns(progress_ns) : 0;
    w->link[SHM_LINK_WORD_WORKER_LAYER] = w->layer;
    w->link[SHM_LINK_WORD_ISSUE_LAYER] = w->issue_layer;
    w->link[SHM_LINK_WORD_LINK_OUTSTANDING] = w->issued > w->landed ? w->issued - w->landed : 0;
    w->link[SHM_LINK_WORD_WORKER_DETACHED] = w->detached != 0;
    w->link[SHM_LINK_WORD_DEPTH] = w->depth;
    _Static_assert((unsigned)CTL_SLOT_FREE == SHM_SLOT_STATE_FREE &&
                       (unsigned)CTL_SLOT_ISSUED == SHM_SLOT_STATE_ISSUED &&
                       (unsigned)CTL_SLOT_LANDED == SHM_SLOT_STATE_LANDED &&
                       (unsigned)CTL_SLOT_USED == SHM_SLOT_STATE_USED,
                   "one order");
    memset(&w->link[SHM_LINK_WORD_RING_SLOTS], 0, SHM_SLOT_STATE_COUNT * sizeof(uint64_t));
    for (uint32_t i = 0; w->slots && i < w->geometry.ring; i++)
        w->link[SHM_LINK_WORD_RING_SLOTS + ctl_slot_state(w, w->slots[i])]++;
}

void ctl_counters_look(struct ctl_snapshot *n)
{
    const struct shm_store *s = n->store;
    uint64_t *w = n->counters;
    shm_counters_copy(SHM_BLOCK_STORE, &s->counters, w);
    w[SHM_STORE_WORD_BUILD_INFO] = 1;
    w[SHM_STORE_WORD_UP] = n->liveness == PRT_LIVE;
    w[SHM_STORE_WORD_SUSPENDED] = n->suspended;
    uint32_t state = n->liveness == PRT_LIVE ? atomic_load(&s->state) : SHM_STORE_STOPPED;
    for (uint32_t i = 0; i < SHM_STORE_STATE_COUNT; i++) /* they are numbered from 1 */
        w[SHM_STORE_WORD_STATE + i] = state == i + 1;
    w[SHM_STORE_WORD_HEARTBEAT_AGE_NS] = age_ns(atomic_load(&s->heartbeat_ns));
    w[SHM_STORE_WORD_WORKERS] = n->workers;
    w[SHM_STORE_WORD_BUDGET_HELD_BYTES] = 0;
    for (int i = 0; i < n->claims; i++)
        w[SHM_STORE_WORD_BUDGET_HELD_BYTES] += n->claim[i].held_bytes;
    for (uint32_t i = 0; i < n->workers; i++)
        if (n->worker[i].mapped)
            look_at_worker(&n->worker[i]);
}

/* ---- an earlier look ---- */

struct past {
    uint64_t session;
    uint32_t pid, layers;
    bool serves;
    uint64_t link[SHM_LINK_WORDS], server[SHM_SERVER_WORDS];
    uint64_t *layer;
};

struct ctl_history {
    bool any;
    uint32_t expertd, workers;
    uint64_t counters[SHM_STORE_WORDS];
    struct past worker[SHM_STORE_WORKERS];
};

struct ctl_history *ctl_history_new(void)
{
    return calloc(1, sizeof(struct ctl_history));
}

static void forget(struct ctl_history *h)
{
    for (uint32_t i = 0; i < h->workers; i++)
        free(h->worker[i].layer);
    h->workers = 0;
    h->any = false;
}

void ctl_history_free(struct ctl_history **history)
{
    if (*history)
        forget(*history);
    free(*history);
    *history = NULL;
}

void ctl_history_put(struct ctl_history *h, const struct ctl_snapshot *n)
{
    forget(h);
    h->any = true;
    h->expertd = n->store->header.writer_pid;
    memcpy(h->counters, n->counters, sizeof h->counters);
    for (uint32_t i = 0; i < n->workers; i++) {
        const struct ctl_worker *w = &n->worker[i];
        if (!w->mapped)
            continue;
        struct past *p = &h->worker[h->workers++];
        *p = (struct past){.session = w->row.session,
                           .pid = atomic_load(&w->row.pid),
                           .layers = w->geometry.layers,
                           .serves = w->serves};
        memcpy(p->link, w->link, sizeof p->link);
        memcpy(p->server, w->server, sizeof p->server);
        size_t bytes = (size_t)p->layers * SHM_LAYER_WORDS * sizeof *p->layer;
        p->layer = w->layers ? malloc(bytes) : NULL;
        if (p->layer)
            memcpy(p->layer, w->layers, bytes);
    }
}

const uint64_t *ctl_history_words(const struct ctl_history *h, enum shm_block block,
                                  const struct ctl_worker *worker, uint32_t layer)
{
    if (!h || !h->any)
        return NULL;
    if (!worker)
        return h->counters;
    for (uint32_t i = 0; i < h->workers; i++) {
        const struct past *p = &h->worker[i];
        if (p->session != worker->row.session || p->pid != atomic_load(&worker->row.pid))
            continue;
        if (block == SHM_BLOCK_LINK)
            return p->link;
        if (block == SHM_BLOCK_SERVER)
            return p->serves ? p->server : NULL;
        if (block == SHM_BLOCK_LAYER && p->layer && layer < p->layers)
            return p->layer + (size_t)layer * SHM_LAYER_WORDS;
    }
    return NULL;
}

/* ---- JSON ---- */

static json_t *by_label(const struct shm_counter *c, const uint64_t *words)
{
    json_t *o = json_object();
    uint32_t inner = c->labels[1] ? c->labels[1]->n : 1;
    for (uint32_t i = 0; i < c->labels[0]->n; i++) {
        if (!c->labels[1]) {
            json_object_set_new(o, c->labels[0]->value[i], json_integer((json_int_t)words[c->word + i]));
            continue;
        }
        json_t *row = json_object();
        for (uint32_t j = 0; j < inner; j++)
            if (words[c->word + i * inner + j])
                json_object_set_new(row, c->labels[1]->value[j],
                                    json_integer((json_int_t)words[c->word + i * inner + j]));
        json_object_set_new(o, c->labels[0]->value[i], row);
    }
    return o;
}

static json_t *histogram(const struct shm_counter *c, const uint64_t *words)
{
    json_t *o = json_object(), *buckets = json_array();
    for (uint32_t i = 0; i <= c->n_bounds; i++)
        json_array_append_new(buckets, json_integer((json_int_t)words[c->word + i]));
    json_object_set_new(o, "buckets", buckets);
    json_object_set_new(o, "count", json_integer((json_int_t)shm_counter_total(c, words)));
    json_object_set_new(o, "sum", json_integer((json_int_t)words[c->word + c->n_bounds + 1]));
    return o;
}

json_t *ctl_json_counters(enum shm_block block, const uint64_t *words, const uint64_t *before, bool detail)
{
    json_t *o = json_object();
    const struct shm_block_info *b = &shm_blocks[block];
    for (uint32_t i = b->first; i < b->first + b->n; i++) {
        const struct shm_counter *c = &shm_counters[i];
        double value;
        if ((c->detail && !detail) || c->kind == SHM_KIND_INFO)
            continue;
        if (!c->words)
            json_object_set_new(
                o, c->name, shm_counter_derive(c, words, before, &value) ? json_real(value) : json_null());
        else if (c->kind == SHM_KIND_HISTOGRAM)
            json_object_set_new(o, c->name, histogram(c, words));
        else if (c->labels[0])
            json_object_set_new(o, c->name, by_label(c, words));
        else
            json_object_set_new(o, c->name, json_integer((json_int_t)words[c->word]));
    }
    return o;
}

/* ---- text ---- */

static void print_scaled(const char *unit, double value)
{
    if (strcmp(unit, "ns") == 0)
        printf("%16.6f s", value / 1e9);
    else if (strcmp(unit, "bytes") == 0)
        printf("%16.6f MB", value / 1e6);
    else if (strcmp(unit, "bytes/s") == 0)
        printf("%16.6f GB/s", value / 1e9);
    else
        printf("%16.0f%s%s", value, strcmp(unit, "-") == 0 ? "" : " ", strcmp(unit, "-") == 0 ? "" : unit);
}

static void print_one(const struct shm_counter *c, const char *name, uint64_t now, const uint64_t *before)
{
    printf("  %-40s ", name);
    print_scaled(c->unit, c->kind == SHM_KIND_GAUGE ? (double)(int64_t)now : (double)now);
    if (before && c->kind != SHM_KIND_GAUGE && now > *before)
        printf("  +%" PRIu64, now - *before);
    putchar('\n');
}

static void print_counter(const struct shm_counter *c, const uint64_t *words, const uint64_t *before)
{
    char name[160];
    double value;
    if (!c->words) {
        if (!shm_counter_derive(c, words, before, &value))
            return;
        printf("  %-40s ", c->name);
        if (c->kind == SHM_KIND_SHARE)
            printf("%16.2f %%\n", 100 * value);
        else
            print_scaled(c->unit, value), puts(strcmp(c->unit, "tokens") == 0 ? "/s" : "");
        return;
    }
    if (c->kind == SHM_KIND_HISTOGRAM) {
        uint64_t n = shm_counter_total(c, words), n_before = before ? shm_counter_total(c, before) : 0;
        printf("  %-40s %16" PRIu64 " times", c->name, n);
        if (n)
            printf(", mean %.6f s", (double)words[c->word + c->n_bounds + 1] / (double)n / 1e9);
        if (before && n > n_before)
            printf("  +%" PRIu64, n - n_before);
        putchar('\n');
        return;
    }
    uint32_t inner = c->labels[1] ? c->labels[1]->n : 1;
    for (uint32_t i = 0; i < c->words; i++) {
        const uint64_t *past = before ? &before[c->word + i] : NULL;
        if (c->labels[1] && !words[c->word + i])
            continue;
        if (c->labels[1])
            snprintf(name, sizeof name, "%s{%s,%s}", c->name, c->labels[0]->value[i / inner],
                     c->labels[1]->value[i % inner]);
        else if (c->labels[0])
            snprintf(name, sizeof name, "%s{%s}", c->name, c->labels[0]->value[i]);
        else
            snprintf(name, sizeof name, "%s", c->name);
        print_one(c, name, words[c->word + i], past);
    }
}

static void print_block(enum shm_block block, const uint64_t *words, const uint64_t *before, bool detail)
{
    const struct shm_block_info *b = &shm_blocks[block];
    for (uint32_t i = b->first; i < b->first + b->n; i++)
        if ((detail || !shm_counters[i].detail) && shm_counters[i].kind != SHM_KIND_INFO)
            print_counter(&shm_counters[i], words, before);
}

static json_t *json_layers(const struct ctl_worker *w, const struct ctl_history *past)
{
    json_t *list = json_array();
    for (uint32_t l = 0; w->layers && l < w->geometry.layers; l++)
        json_array_append_new(list,
                              ctl_json_counters(SHM_BLOCK_LAYER, w->layers + (size_t)l * SHM_LAYER_WORDS,
                                                ctl_history_words(past, SHM_BLOCK_LAYER, w, l), true));
    return list;
}

static void json_all(const struct ctl_snapshot *n, const struct ctl_history *past, bool detail)
{
    json_t *o = json_object(), *workers = json_array();
    json_object_set_new(o, "store",
                        ctl_json_counters(SHM_BLOCK_STORE, n->counters,
                                          ctl_history_words(past, SHM_BLOCK_STORE, NULL, 0), detail));
    for (uint32_t i = 0; i < n->workers; i++) {
        const struct ctl_worker *w = &n->worker[i];
        json_t *j = json_object();
        json_object_set_new(j, "pid", json_integer(atomic_load(&w->row.pid)));
        json_object_set_new(j, "name", ctl_json_text(w->row.name, sizeof w->row.name));
        if (!w->mapped) {
            json_object_set_new(j, "unreadable", ctl_json_text(w->why, sizeof w->why));
        } else {
            json_object_set_new(j, "link",
                                ctl_json_counters(SHM_BLOCK_LINK, w->link,
                                                  ctl_history_words(past, SHM_BLOCK_LINK, w, 0), detail));
            json_object_set_new(j, "compute", ctl_json_counters(SHM_BLOCK_COMPUTE, w->compute, NULL, detail));
            if (w->serves)
                json_object_set_new(j, "server",
                                    ctl_json_counters(SHM_BLOCK_SERVER, w->server,
                                                      ctl_history_words(past, SHM_BLOCK_SERVER, w, 0),
                                                      detail));
            if (detail)
                json_object_set_new(j, "layers", json_layers(w, past));
        }
        json_array_append_new(workers, j);
    }
    json_object_set_new(o, "workers", workers);
    ctl_json_print(o);
}

static void print_all(const struct ctl_snapshot *n, const struct ctl_history *past, bool detail)
{
    printf("expertd %u, instance %.64s\n", n->store->header.writer_pid, n->store->instance);
    print_block(SHM_BLOCK_STORE, n->counters, ctl_history_words(past, SHM_BLOCK_STORE, NULL, 0), detail);
    for (uint32_t i = 0; i < n->workers; i++) {
        const struct ctl_worker *w = &n->worker[i];
        printf("worker %u %.64s\n", atomic_load(&w->row.pid), w->row.name);
        if (!w->mapped) {
            printf("  unreadable: %s\n", w->why);
            continue;
        }
        print_block(SHM_BLOCK_LINK, w->link, ctl_history_words(past, SHM_BLOCK_LINK, w, 0), detail);
        print_block(SHM_BLOCK_COMPUTE, w->compute, NULL, detail);
        if (w->serves)
            print_block(SHM_BLOCK_SERVER, w->server, ctl_history_words(past, SHM_BLOCK_SERVER, w, 0), detail);
        for (uint32_t l = 0; detail && w->layers && l < w->geometry.layers; l++) {
            printf(" layer %u\n", l);
            print_block(SHM_BLOCK_LAYER, w->layers + (size_t)l * SHM_LAYER_WORDS,
                        ctl_history_words(past, SHM_BLOCK_LAYER, w, l), true);
        }
    }
}

int ctl_show_counters(const struct ctl_snapshot *n, const struct ctl_options *options)
{
    static struct ctl_history *past; /* of a watch: its last look */
    (options->json ? json_all : print_all)(n, past, options->detail);
    if (options->watch_s > 0) {
        if (!past)
            past = ctl_history_new();
        if (past)
            ctl_history_put(past, n);
    }
    for (uint32_t i = 0; i < n->workers; i++)
        if (!n->worker[i].mapped)
            return CTL_EXIT_PROBLEM;
    return n->liveness == PRT_STALE ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
}

/* ---- the list ---- */

static json_t *json_labels(const struct shm_counter *c)
{
    json_t *o = json_object();
    for (int k = 0; k < 2; k++) {
        if (!c->labels[k])
            continue;
        json_t *values = json_array();
        for (uint32_t i = 0; i < c->labels[k]->n; i++)
            json_array_append_new(values, json_string(c->labels[k]->value[i]));
        json_object_set_new(o, c->labels[k]->label, values);
    }
    return o;
}

int ctl_list_counters(const struct ctl_options *options)
{
    json_t *list = json_array();
    enum shm_block block = SHM_BLOCK_COUNT;
    for (size_t i = 0; i < shm_counters_n; i++) {
        const struct shm_counter *c = &shm_counters[i];
        if (options->json) {
            json_t *o = json_object();
            json_object_set_new(o, "block", json_string(shm_blocks[c->block].name));
            json_object_set_new(o, "name", json_string(c->name));
            json_object_set_new(o, "kind", json_string(shm_kind_name(c->kind)));
            json_object_set_new(o, "unit", json_string(c->unit));
            json_object_set_new(o, "level", json_string(c->detail ? "detail" : "basic"));
            json_object_set_new(o, "look", json_boolean(c->look));
            json_object_set_new(o, "metric", *c->metric ? json_string(c->metric) : json_null());
            json_object_set_new(o, "labels", json_labels(c));
            json_object_set_new(o, "help", json_string(c->help));
            json_object_set_new(o, "text", json_string(c->text));
            json_array_append_new(list, o);
            continue;
        }
        if (c->block != block) {
            block = c->block;
            printf("%s%s: %s\n", i ? "\n" : "", shm_blocks[block].name, shm_blocks[block].text);
        }
        printf("  %-26s %-9s %-11s %s%s\n", c->name, shm_kind_name(c->kind), c->unit, c->help,
               c->detail ? " (detail)" : "");
    }
    if (options->json)
        ctl_json_print(list);
    else
        json_decref(list);
    return CTL_EXIT_OK;
}
