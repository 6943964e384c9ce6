/* SPDX-License-Identifier: MIT */
#include "tools/top.h"

#include <stdlib.h>
#include <string.h>

/* An earlier look. */
struct past {
    uint64_t at_ns;
    struct ctl_history *words;
    struct {
        uint64_t session, bytes;
    } live[SHM_STORE_WORKERS];
    uint32_t n;
};

struct top_model {
    const char *runtime_dir, *instance;
    struct prt_client *client; /* of one life of expertd */
    struct past past[TOP_PASTS];
    unsigned next; /* past to write */
    struct top_look look;
};

struct top_model *top_model_new(const char *runtime_dir, const char *instance)
{
    struct top_model *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->runtime_dir = runtime_dir;
    m->instance = instance;
    m->look.now = calloc(1, sizeof *m->look.now);
    bool failed = !m->look.now;
    for (int i = 0; i < TOP_PASTS; i++)
        failed = !(m->past[i].words = ctl_history_new()) || failed;
    if (failed)
        top_model_free(&m);
    return m;
}

void top_model_free(struct top_model **model)
{
    struct top_model *m = *model;
    if (!m)
        return;
    if (m->look.now)
        ctl_snapshot_free(m->look.now);
    free(m->look.now);
    for (int i = 0; i < TOP_PASTS; i++)
        ctl_history_free(&m->past[i].words);
    prt_client_close(&m->client);
    free(m);
    *model = NULL;
}

/* The next expertd's store is another file: once ours has ended, it is looked for. */
static bool open_client(struct top_model *m)
{
    struct shm_error err = {0};
    if (m->client && prt_client_liveness(m->client) == PRT_LIVE)
        return true;
    struct prt_client *fresh = NULL;
    int rc = prt_client_open(m->runtime_dir, m->instance, PRT_OPEN_STALE, &fresh, &err);
    if (rc == 0)
        rc =
            shm_header_check_counters(&prt_client_store(fresh)->header, prt_client_paths(fresh)->store, &err);
    if (rc) {
        prt_client_close(&fresh);
        prt_client_close(&m->client);
        snprintf(m->look.problem, sizeof m->look.problem, "%s", shm_error_text(&err));
        return false;
    }
    prt_client_close(&m->client);
    m->client = fresh;
    return true;
}

/* Bytes copied so far, those of the running stream included: counters are added to at its end. */
static uint64_t live_bytes(const struct ctl_worker *w)
{
    const struct shm_counter *c = shm_counter_find(SHM_BLOCK_LINK, "link_bytes");
    uint64_t bytes = shm_counter_total(c, w->link) - w->link[c->word + SHM_COPY_REASON_RESIDENT];
    uint64_t landed = w->landed < (UINT64_C(1) << 24) ? w->landed : 0; /* no stream has more */
    return bytes + (w->stream_seq != w->done_seq ? landed * w->geometry.slot_bytes : 0);
}

/* The oldest look within the window; NULL: this is the first one. */
static const struct past *before(const struct top_model *m, uint64_t now_ns)
{
    const struct past *best = NULL;
    for (int i = 0; i < TOP_PASTS; i++) {
        const struct past *p = &m->past[i];
        if (p->at_ns && p->at_ns < now_ns && now_ns - p->at_ns <= TOP_WINDOW_NS &&
            (!best || p->at_ns < best->at_ns))
            best = p;
    }
    if (best)
        return best;
    for (int i = 0; i < TOP_PASTS; i++) /* longer delays: the last one */
        if (m->past[i].at_ns && (!best || m->past[i].at_ns > best->at_ns))
            best = &m->past[i];
    return best;
}

static double share(const char *name, const struct ctl_worker *w, const uint64_t *past)
{
    double value;
    /* nothing happened in the window: as it was over the whole time */
    if (shm_counter_derive(shm_counter_find(SHM_BLOCK_LINK, name), w->link, past, &value) ||
        shm_counter_derive(shm_counter_find(SHM_BLOCK_LINK, name), w->link, NULL, &value))
        return value;
    return -1;
}

static void fill_worker(struct top_worker *t, const struct ctl_worker *w, const struct past *p,
                        uint64_t now_ns)
{
    *t = (struct top_worker){
        .w = w, .link = -1, .busy = -1, .waste = -1, .overlap = -1, .wait = -1, .hit = -1, .routed = -1};
    if (!w->mapped)
        return;
    const uint64_t *past = p ? ctl_history_words(p->words, SHM_BLOCK_LINK, w, 0) : NULL;
    t->before = past;
    t->busy = share("link_busy", w, past);
    t->waste = share("waste", w, past);
    t->overlap = share("overlap", w, past);
    t->wait = share("waiting", w, past);
    t->hit = share("resident_hit", w, past);
    t->routed = share("routed", w, past);
    if (w->link[SHM_LINK_WORD_WORKER_STREAMING])
        t->age_s = (double)w->link[SHM_LINK_WORD_WORKER_PROGRESS_AGE_NS] / 1e9;
    if (!past)
        return;
    double seconds = (double)(now_ns - p->at_ns) / 1e9;
    for (uint32_t i = 0; i < p->n && seconds > 0; i++)
        if (p->live[i].session == w->row.session) {
            uint64_t bytes = live_bytes(w);
            t->link_bytes_s = bytes > p->live[i].bytes ? (double)(bytes - p->live[i].bytes) / seconds : 0;
        }
    uint64_t tokens = w->link[SHM_LINK_WORD_STREAM_TOKENS], then = past[SHM_LINK_WORD_STREAM_TOKENS];
    t->tokens_s = seconds > 0 && tokens > then ? (double)(tokens - then) / seconds : 0;
}

static const struct top_state *sorting; /* qsort has no context */

static double sort_key(const struct top_worker *t)
{
    switch (sorting->sort) {
    case TOP_BY_LINK:
        return -t->link_bytes_s;
    case TOP_BY_BUSY:
        return -t->busy;
    case TOP_BY_WASTE:
        return -t->waste;
    case TOP_BY_WAIT:
        return -t->wait;
    case TOP_BY_AGE:
        return -t->age_s;
    case TOP_BY_PID:
    case TOP_BY_NAME:
    case TOP_SORTS:
        break;
    }
    return (double)atomic_load(&t->w->row.pid);
}

static int compare(const void *pa, const void *pb)
{
    const struct top_worker *a = pa, *b = pb;
    int order = sorting->sort == TOP_BY_NAME ? strcmp(a->w->row.name, b->w->row.name) : 0;
    double ka = sort_key(a), kb = sort_key(b);
    if (!order)
        order = ka < kb ? -1 : ka > kb;
    if (!order) /* a fixed order among equals: rows don't jump */
        order = a->w->row.session < b->w->row.session ? -1 : 1;
    return sorting->reverse ? -order : order;
}

static void keep(struct top_model *m, uint64_t now_ns)
{
    /* not more often than the window needs */
    const struct past *last = &m->past[(m->next + TOP_PASTS - 1) % TOP_PASTS];
    if (last->at_ns && now_ns - last->at_ns < TOP_WINDOW_NS / (TOP_PASTS - 2))
        return;
    struct past *p = &m->past[m->next];
    m->next = (m->next + 1) % TOP_PASTS;
    p->at_ns = now_ns;
    p->n = 0;
    ctl_history_put(p->words, m->look.now);
    for (uint32_t i = 0; i < m->look.now->workers; i++) {
        const struct ctl_worker *w = &m->look.now->worker[i];
        if (w->mapped)
            p->live[p->n].session = w->row.session, p->live[p->n++].bytes = live_bytes(w);
    }
}

const struct top_look *top_model_look(struct top_model *m, const struct top_state *state)
{
    struct top_look *l = &m->look;
    l->problem[0] = '\0';
    l->workers = 0;
    ctl_snapshot_free(l->now);
    if (!open_client(m)) {
        for (int i = 0; i < TOP_PASTS; i++)
            m->past[i].at_ns = 0;
        return l;
    }
    ctl_snapshot_take(m->client, 0, l->now);
    uint64_t now_ns = shm_now_ns();
    const struct past *p = before(m, now_ns);
    for (uint32_t i = 0; i < l->now->workers; i++)
        fill_worker(&l->worker[l->workers++], &l->now->worker[i], p, now_ns);
    sorting = state;
    qsort(l->worker, l->workers, sizeof l->worker[0], compare);
    keep(m, now_ns);
    return l;
}

uint32_t top_selected(const struct top_look *look, const struct top_state *state)
{
    for (uint32_t i = 0; i < look->workers; i++)
        if (look->worker[i].w->row.session == state->session)
            return i;
    return 0;
}
