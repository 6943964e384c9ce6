/* SPDX-License-Identifier: MIT */
#include "tools/top.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

int top_screen_resize(struct top_screen *s, int rows, int cols)
{
    rows = rows < 1 ? 1 : rows > 1000 ? 1000 : rows;
    cols = cols < 1 ? 1 : cols > 1000 ? 1000 : cols;
    size_t n = (size_t)rows * (size_t)cols;
    if (rows != s->rows || cols != s->cols) {
        top_screen_free(s);
        s->cell = malloc(n);
        s->attr = malloc(n);
        if (!s->cell || !s->attr) {
            top_screen_free(s);
            return -ENOMEM;
        }
        s->rows = rows;
        s->cols = cols;
    }
    memset(s->cell, ' ', n);
    memset(s->attr, TOP_PLAIN, n);
    return 0;
}

void top_screen_free(struct top_screen *s)
{
    free(s->cell);
    free(s->attr);
    *s = (struct top_screen){0};
}

/* Writes at row and column, clipped; what is no printable ASCII becomes '?'. Returns the column after it. */
static int put(struct top_screen *s, int row, int col, unsigned attr, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static int put(struct top_screen *s, int row, int col, unsigned attr, const char *format, ...)
{
    char text[2048];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    for (const char *c = text; *c; c++, col++)
        if (row >= 0 && row < s->rows && col >= 0 && col < s->cols) {
            size_t at = (size_t)row * (size_t)s->cols + (size_t)col;
            s->cell[at] = *c >= 0x20 && *c < 0x7f ? *c : '?';
            s->attr[at] = (unsigned char)attr;
        }
    return col;
}

static void fill_row(struct top_screen *s, int row, unsigned attr)
{
    if (row >= 0 && row < s->rows)
        memset(s->attr + (size_t)row * (size_t)s->cols, (int)attr, (size_t)s->cols);
}

/* "12.3G": five characters. */
static const char *scaled(double v, char out[16])
{
    static const char units[] = " KMGTP";
    int u = 0;
    if (!(v > 0))
        v = 0;
    for (; v >= 999.5 && u < 5; u++)
        v /= 1000;
    snprintf(out, 16, v < 9.95 && u ? "%.1f%c" : "%.0f%c", v, units[u] == ' ' ? '\0' : units[u]);
    return out;
}

/* "45%": four characters; "-": not known. */
static const char *percent(double share, char out[16])
{
    if (share < 0)
        snprintf(out, 16, "-");
    else
        snprintf(out, 16, "%.0f%%", 100 * share);
    return out;
}

static const char *duration(double s, char out[16])
{
    if (s < 99.5)
        snprintf(out, 16, "%.1fs", s);
    else if (s < 5940)
        snprintf(out, 16, "%.0fm", s / 60);
    else
        snprintf(out, 16, "%.0fh", s / 3600);
    return out;
}

static const char *state_of(const struct top_worker *t)
{
    const struct ctl_worker *w = t->w;
    return !w->alive                      ? "gone"
           : !w->mapped                   ? "?"
           : w->suspended                 ? "stopped"
           : w->detached                  ? "detached"
           : t->age_s > 5                 ? "stalled"
           : w->stream_seq != w->done_seq ? "stream"
                                          : "idle";
}

static bool in_trouble(const struct top_worker *t)
{
    return !t->w->alive || !t->w->mapped || t->w->suspended || t->w->detached || t->age_s > 5;
}

static void draw_store(const struct top_look *l, const struct top_state *state, struct top_screen *s)
{
    const struct ctl_snapshot *n = l->now;
    const struct shm_store *store = n->store;
    const uint64_t *c = n->counters;
    char a[16], b[16], e[16], d[16];
    bool live = n->liveness == PRT_LIVE;
    fill_row(s, 0, TOP_REVERSE);
    int col = put(s, 0, 0, TOP_REVERSE | TOP_BOLD, "expertd %.24s", store->instance);
    col = put(s, 0, col + 2, TOP_REVERSE | (live && !n->suspended ? 0 : TOP_WARN), "%s",
              n->suspended                 ? "STOPPED by a signal"
              : live                       ? ctl_state(atomic_load(&store->state))
              : n->liveness == PRT_STOPPED ? "ended"
                                           : "DEAD");
    col = put(s, 0, col + 2, TOP_REVERSE, "pid %u  life %llu", store->header.writer_pid,
              (unsigned long long)c[SHM_STORE_WORD_ARENA_GENERATION]);
    col = put(s, 0, col + 2, TOP_REVERSE, "%.40s", store->model_name);
    if (state->frozen)
        put(s, 0, s->cols - 8, TOP_REVERSE | TOP_BOLD, " FROZEN ");
    double bytes = (double)c[SHM_STORE_WORD_ARENA_BYTES],
           wanted = (double)c[SHM_STORE_WORD_LOAD_WANTED_BYTES];
    double loaded = (double)c[SHM_STORE_WORD_LOAD_BYTES], ns = (double)c[SHM_STORE_WORD_LOAD_NS];
    col = put(s, 1, 0, 0, "arena %sB", scaled(bytes, a));
    col = put(s, 1, col, 0, "  pinned %s  huge %s  node %lld",
              percent(bytes > 0 ? (double)c[SHM_STORE_WORD_ARENA_PINNED_BYTES] / bytes : -1, b),
              percent(bytes > 0 ? (double)c[SHM_STORE_WORD_ARENA_HUGE_BYTES] / bytes : -1, e),
              (long long)c[SHM_STORE_WORD_ARENA_NUMA_NODE]);
    if (c[SHM_STORE_WORD_ARENA_ADOPTED])
        put(s, 1, col + 2, 0, "adopted");
    else if (wanted > 0)
        put(s, 1, col + 2, 0, "loaded %s of %sB, %sB/s, %llu reads", percent(loaded / wanted, a),
            scaled(wanted, b), scaled(ns > 0 ? loaded / ns * 1e9 : 0, e),
            (unsigned long long)c[SHM_STORE_WORD_IO_IN_FLIGHT]);
    put(s, 2, 0, 0,
        "workers %u  attached %llu  left %llu  died %llu  given up %llu  refused %llu  beat %s ago",
        l->workers, (unsigned long long)c[SHM_STORE_WORD_ATTACHES],
        (unsigned long long)c[SHM_STORE_WORD_DETACHES], (unsigned long long)c[SHM_STORE_WORD_DEATHS],
        (unsigned long long)c[SHM_STORE_WORD_FAULTS], (unsigned long long)c[SHM_STORE_WORD_REFUSED],
        duration((double)c[SHM_STORE_WORD_HEARTBEAT_AGE_NS] / 1e9, d));
}

static int draw_table_head(const struct top_state *state, struct top_screen *s, int row)
{
    static const struct {
        int col, sort;
        const char *text;
    } heads[] = {{0, TOP_BY_PID, "    PID"},
                 {8, TOP_BY_NAME, "NAME"},
                 {21, -1, "STATE"},
                 {30, -1, "LAYER"},
                 {36, TOP_BY_LINK, " LINK/s"},
                 {44, TOP_BY_BUSY, "BUSY"},
                 {49, -1, "OVER"},
                 {54, TOP_BY_WASTE, "WASTE"},
                 {60, TOP_BY_WAIT, "WAIT"},
                 {65, -1, "TOK/s"},
                 {71, -1, "Q"},
                 {74, TOP_BY_AGE, "   AGE"}};
    fill_row(s, row, TOP_BOLD);
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        put(s, row, heads[i].col, TOP_BOLD | (heads[i].sort == (int)state->sort ? TOP_REVERSE : 0), "%s",
            heads[i].text);
    return row + 1;
}

static void draw_worker_row(const struct top_worker *t, struct top_screen *s, int row, bool selected)
{
    const struct ctl_worker *w = t->w;
    char a[16];
    unsigned attr = (selected ? TOP_REVERSE : 0) | (in_trouble(t) ? TOP_WARN : 0);
    fill_row(s, row, attr);
    put(s, row, 0, attr, "%7u %-12.12s %-8.8s", atomic_load(&w->row.pid), w->row.name, state_of(t));
    if (!w->mapped) {
        put(s, row, 30, attr, "%.120s", w->why);
        return;
    }
    put(s, row, 30, attr, "%5u", w->layer < SHM_LAYERS_MAX ? (unsigned)w->layer : SHM_LAYERS_MAX);
    put(s, row, 36, attr, "%6sB", scaled(t->link_bytes_s, a));
    put(s, row, 44, attr, "%4s", percent(t->busy, a));
    put(s, row, 49, attr, "%4s", percent(t->overlap, a));
    put(s, row, 54, attr | (t->waste > 0.3 ? TOP_WARN : 0), "%5s", percent(t->waste, a));
    put(s, row, 60, attr, "%4s", percent(t->wait, a));
    put(s, row, 65, attr, "%5s", scaled(t->tokens_s, a));
    if (w->serves)
        put(s, row, 71, attr, "%2llu", (unsigned long long)(w->server[SHM_SERVER_WORD_QUEUE_WAITING] % 100));
    put(s, row, 74, attr, "%6s", t->age_s > 0 ? duration(t->age_s, a) : "-");
}

static const char slot_marks[CTL_SLOT_COUNT] = {
    [CTL_SLOT_FREE] = '.', [CTL_SLOT_ISSUED] = 'i', [CTL_SLOT_LANDED] = '#', [CTL_SLOT_USED] = '@'};

/* One cell stands for one or more slots and shows the busiest of them. */
static void draw_slots(const struct ctl_worker *w, struct top_screen *s, int row, int col, int width,
                       int rows)
{
    uint64_t cells = (uint64_t)(width > 0 ? width : 1) * (uint64_t)(rows > 0 ? rows : 1);
    uint32_t ring = w->geometry.ring;
    if (cells > ring)
        cells = ring;
    enum ctl_slot shown = CTL_SLOT_FREE;
    for (uint32_t slot = 0; w->slots && slot < ring; slot++) {
        enum ctl_slot state = ctl_slot_state(w, w->slots[slot]);
        uint64_t cell = slot * cells / ring;
        if (slot == 0 || (slot - 1) * cells / ring != cell)
            shown = CTL_SLOT_FREE;
        if (state > shown)
            shown = state;
        put(s, row + (int)(cell / (uint64_t)width), col + (int)(cell % (uint64_t)width),
            shown == CTL_SLOT_FREE   ? TOP_DIM
            : shown == CTL_SLOT_USED ? TOP_BOLD
                                     : 0,
            "%c", slot_marks[shown]);
    }
}

/* 0 .. 9 for a share, '.' where there is none. */
static char digit(const char *name, const uint64_t *words)
{
    double value;
    if (!shm_counter_derive(shm_counter_find(SHM_BLOCK_LAYER, name), words, NULL, &value))
        return '.';
    return (char)('0' + (value >= 0.95 ? 9 : (int)(value * 10)));
}

static void draw_layer_strip(const struct ctl_worker *w, struct top_screen *s, int row, const char *title,
                             const char *name)
{
    put(s, row, 0, 0, "%-8s", title);
    for (uint32_t l = 0; w->layers && l < w->geometry.layers && 8 + (int)l < s->cols; l++)
        put(s, row, 8 + (int)l, l == w->issue_layer && w->stream_seq != w->done_seq ? TOP_REVERSE : 0, "%c",
            digit(name, w->layers + (size_t)l * SHM_LAYER_WORDS));
}

static void draw_footer(const struct top_state *state, struct top_screen *s)
{
    fill_row(s, s->rows - 1, TOP_REVERSE);
    put(s, s->rows - 1, 0, TOP_REVERSE,
        state->view == TOP_WORKER
            ? "q back  up/down scroll  n next worker  space freeze  +/- %.2gs  h help"
            : "q quit  up/down  enter closer  s sort  r reverse  space freeze  +/- %.2gs  h help",
        state->delay_s);
}

static void draw_overview(const struct top_look *l, const struct top_state *state, struct top_screen *s)
{
    draw_store(l, state, s);
    int row = draw_table_head(state, s, 4), last = s->rows - 1;
    uint32_t selected = top_selected(l, state);
    /* the rings below need a row each; the table keeps at least half of the room */
    int room = last - row, rings = (int)l->workers + 1, extra = 4;
    int table = room - rings - extra > (int)l->workers ? (int)l->workers : room / 2 > 0 ? room / 2 : 1;
    if (table > (int)l->workers)
        table = (int)l->workers;
    int first = (int)selected >= table ? (int)selected - table + 1 : 0;
    for (int i = first; i < (int)l->workers && i < first + table && row < last; i++)
        draw_worker_row(&l->worker[i], s, row++, i == (int)selected);
    if (!l->workers)
        put(s, row++, 0, TOP_DIM, "no worker is attached");
    row++;
    if (row < last && l->workers)
        put(s, row++, 0, TOP_BOLD, "rings   . free  i issued  # landed  @ computed");
    for (int i = first; i < (int)l->workers && row < last; i++) {
        const struct ctl_worker *w = l->worker[i].w;
        if (!w->mapped)
            continue;
        put(s, row, 0, 0, "%7u ", atomic_load(&w->row.pid));
        draw_slots(w, s, row++, 8, s->cols - 8, 1);
    }
    if (!l->workers || !l->worker[selected].w->mapped)
        return;
    const struct ctl_worker *w = l->worker[selected].w;
    if (++row < last)
        put(s, row++, 0, TOP_BOLD, "layers of %u, in tenths", atomic_load(&w->row.pid));
    if (row < last)
        draw_layer_strip(w, s, row++, "routed", "layer_routed_share");
    if (row < last)
        draw_layer_strip(w, s, row++, "waste", "layer_waste");
}

static int draw_numbers(const struct top_worker *t, struct top_screen *s, int row)
{
    const struct ctl_worker *w = t->w;
    char a[16], b[16], c[16], d[16], e[16];
    put(s, row++, 0, TOP_BOLD, "worker %u %.40s  %s  stream %llu, %u tokens, %s by %s, depth %u",
        atomic_load(&w->row.pid), w->row.name, state_of(t), (unsigned long long)w->stream_seq, w->tokens,
        shm_policy_name(w->policy), shm_order_name(w->order), w->depth);
    put(s, row++, 0, 0, "link %sB/s  busy %s  overlap %s  waste %s  waits %s", scaled(t->link_bytes_s, a),
        percent(t->busy, b), percent(t->overlap, c), percent(t->waste, d), percent(t->wait, e));
    put(s, row++, 0, 0, "peak %sB/s  paced %sB/s  outstanding %llu  routed %s  resident hits %s",
        scaled((double)w->link[SHM_LINK_WORD_LINK_PEAK], a),
        scaled((double)w->link[SHM_LINK_WORD_LINK_PACE], b),
        (unsigned long long)w->link[SHM_LINK_WORD_LINK_OUTSTANDING], percent(t->routed, c),
        percent(t->hit, d));
    int col = put(s, row, 0, 0, "bytes");
    static const char *const reasons[SHM_COPY_REASON_COUNT] = {"routed", "ahead",    "wasted",
                                                               "demand", "resident", "cut"};
    for (uint32_t r = 0; r < SHM_COPY_REASON_COUNT; r++)
        col = put(s, row, col, 0, "  %s %s", reasons[r],
                  scaled((double)w->link[SHM_LINK_WORD_LINK_BYTES + r], a));
    row++;
    if (w->serves) {
        const uint64_t *v = w->server;
        put(s, row++, 0, 0, "queue %llu of %llu, oldest %s  running %llu  done %llu  refused %llu",
            (unsigned long long)v[SHM_SERVER_WORD_QUEUE_WAITING],
            (unsigned long long)v[SHM_SERVER_WORD_QUEUE_LIMIT],
            duration((double)v[SHM_SERVER_WORD_QUEUE_OLDEST_NS] / 1e9, a),
            (unsigned long long)v[SHM_SERVER_WORD_RUNNING],
            (unsigned long long)shm_counter_total(shm_counter_find(SHM_BLOCK_SERVER, "answers"), v),
            (unsigned long long)v[SHM_SERVER_WORD_QUEUE_REFUSED]);
    }
    return row;
}

static void draw_layer(const struct ctl_worker *w, uint32_t l, struct top_screen *s, int row)
{
    const uint64_t *words = w->layers + (size_t)l * SHM_LAYER_WORDS;
    char a[16], b[16];
    double routed = -1, waste = -1, lag = 0;
    if (!shm_counter_derive(shm_counter_find(SHM_BLOCK_LAYER, "layer_routed_share"), words, NULL, &routed))
        routed = -1;
    if (!shm_counter_derive(shm_counter_find(SHM_BLOCK_LAYER, "layer_waste"), words, NULL, &waste))
        waste = -1;
    shm_counter_derive(shm_counter_find(SHM_BLOCK_LAYER, "layer_lag"), words, NULL, &lag);
    bool running = w->stream_seq != w->done_seq;
    put(s, row, 0, 0, "%5u %c%c %6s %6s %9.3f  ", l, running && l == w->issue_layer ? 'i' : ' ',
        running && l == w->layer ? '@' : ' ', percent(routed, a), percent(waste, b), lag / 1e6);
    int width = s->cols - 36, bar = routed > 0 ? (int)(routed * width) : 0;
    for (int i = 0; i < bar; i++)
        put(s, row, 36 + i, waste > 0 && i >= (int)((double)bar * (1 - waste)) ? TOP_WARN : 0, "=");
}

static void draw_worker(const struct top_look *l, const struct top_state *state, struct top_screen *s)
{
    draw_store(l, state, s);
    if (!l->workers) {
        put(s, 4, 0, TOP_DIM, "no worker is attached");
        return;
    }
    const struct top_worker *t = &l->worker[top_selected(l, state)];
    const struct ctl_worker *w = t->w;
    int last = s->rows - 1;
    if (!w->mapped) {
        put(s, 4, 0, TOP_WARN, "worker %u: %.200s", atomic_load(&w->row.pid), w->why);
        return;
    }
    int row = draw_numbers(t, s, 4);
    const uint64_t *slots = &w->link[SHM_LINK_WORD_RING_SLOTS];
    int width = s->cols,
        ring_rows = width > 0 ? (int)((w->geometry.ring + (uint32_t)width - 1) / (uint32_t)width) : 1;
    int most = (last - row - 6) / 2;
    ring_rows = ring_rows > most ? most : ring_rows;
    ring_rows = ring_rows < 1 ? 1 : ring_rows;
    if (row < last)
        put(s, row++, 0, TOP_BOLD,
            "ring of %u: %llu free (.)  %llu issued (i)  %llu landed (#)  %llu computed (@)",
            w->geometry.ring, (unsigned long long)slots[SHM_SLOT_STATE_FREE],
            (unsigned long long)slots[SHM_SLOT_STATE_ISSUED],
            (unsigned long long)slots[SHM_SLOT_STATE_LANDED], (unsigned long long)slots[SHM_SLOT_STATE_USED]);
    if (row < last)
        draw_slots(w, s, row, 0, width, row + ring_rows < last ? ring_rows : last - row);
    row += ring_rows;
    if (row < last)
        put(s, row++, 0, TOP_BOLD, "LAYER    ROUTED  WASTE    LAG ms");
    uint32_t layers = w->layers ? w->geometry.layers : 0;
    int rows = last - row, scroll = state->scroll;
    if (scroll > (int)layers - rows)
        scroll = (int)layers - rows;
    scroll = scroll < 0 ? 0 : scroll;
    for (uint32_t i = (uint32_t)scroll; i < layers && row < last; i++)
        draw_layer(w, i, s, row++);
}

static void draw_help(struct top_screen *s)
{
    static const char *const lines[] = {
        "expert-top: expertd, its workers and their rings, live",
        "",
        "up, down, k, j   choose a worker; scroll its layers",
        "enter            look closer at the worker        q, esc  back, quit",
        "n                next worker                      Q       quit at once",
        "s                sort by the next column          r       reverse",
        "space, f         freeze, go on                    +, -    less, more often",
        "",
        "LINK/s  bytes copied a second, over the last 3 seconds",
        "BUSY    share of the time that the link was busy",
        "OVER    share of the link's time that the worker computed meanwhile",
        "WASTE   share of the copied bytes that no token used",
        "WAIT    share of the time that the worker waited for experts",
        "TOK/s   tokens read and written a second      Q  requests that wait",
        "AGE     since the worker moved, in the middle of a stream",
        "",
        "Shares are of the last 3 seconds, else since the attach. Any key goes back.",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        put(s, (int)i, 0, i ? 0 : TOP_BOLD, "%s", lines[i]);
}

void top_draw(const struct top_look *l, const struct top_state *state, struct top_screen *s)
{
    if (state->view == TOP_HELP) {
        draw_help(s);
        return;
    }
    if (l->problem[0]) {
        put(s, 0, 0, TOP_BOLD, "expert-top");
        for (int at = 0, row = 2; l->problem[at] && row < s->rows - 1; row++, at += s->cols) {
            put(s, row, 0, TOP_WARN, "%.*s", s->cols, l->problem + at);
            if (strlen(l->problem + at) <= (size_t)s->cols)
                break;
        }
    } else if (state->view == TOP_WORKER) {
        draw_worker(l, state, s);
    } else {
        draw_overview(l, state, s);
    }
    draw_footer(state, s);
}
