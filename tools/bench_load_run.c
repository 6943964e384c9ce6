/* SPDX-License-Identifier: MIT */
/* One load on one server: conversations begin, take their turns and end. */
#include "tools/bench_load.h"

#include "shm/shm_bell.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct load;

struct conversation {
    struct load *load;
    struct conversation *next, **at;
    unsigned turn, tries;
    uint64_t random;
    const struct load_url *url;
    json_t *messages;
    char *body; /* of the turn under way */
    struct event *timer;
    struct load_request *request;
    uint64_t asked_ns, first_ns, piece_ns; /* of this turn: first try, first text, last text */
};

struct load {
    const struct load_options *o;
    const struct load_server *server;
    const struct load_point *point;
    struct load_run *run;
    struct event_base *base;
    struct event *arrival, *progress, *interrupt, *term;
    struct conversation *conversations;
    uint64_t start_ns, last_ns, due_ns, random;
    unsigned started, most, at_once, round;
    bool interrupted, no_memory;
    char *system;
};

bool load_series_add(struct load_series *s, double value)
{
    if (s->n == s->cap) {
        size_t cap = 2 * s->cap + 256;
        double *v = realloc(s->v, cap * sizeof *v);
        if (!v)
            return false;
        s->v = v;
        s->cap = cap;
    }
    s->v[s->n++] = value;
    return true;
}

void load_run_clear(struct load_run *r)
{
    free(r->ttft_ms.v);
    free(r->later_ttft_ms.v);
    free(r->itl_ms.v);
    free(r->total_ms.v);
    *r = (struct load_run){0};
}

unsigned load_count(const struct load_options *o, const struct load_point *point)
{
    if (o->count)
        return o->count;
    return point->conversations > 4 ? 2 * point->conversations : point->conversations ? 8 : 32;
}

static void add(struct load *l, struct load_series *s, uint64_t from_ns, uint64_t to_ns)
{
    if (!load_series_add(s, (double)(to_ns - from_ns) / 1e6))
        l->no_memory = true;
}

static struct timeval span(double s)
{
    double whole = floor(s);
    return (struct timeval){.tv_sec = (time_t)whole, .tv_usec = (suseconds_t)((s - whole) * 1e6)};
}

static void count_failure(struct load_run *r, const char *what, const char *why)
{
    unsigned i = 0;
    while (i < r->failures && strcmp(r->failure[i].what, what) != 0)
        i++;
    if (i == r->failures && i < LOAD_STATUS_MAX - 1)
        r->failures++;
    else if (i == LOAD_STATUS_MAX - 1) { /* that many kinds: the last one stands for the rest */
        r->failures = LOAD_STATUS_MAX;
        what = "other";
    }
    snprintf(r->failure[i].what, sizeof r->failure[i].what, "%s", what);
    r->failure[i].n++;
    snprintf(r->why, sizeof r->why, "%s", why);
}

static bool may_begin(const struct load *l)
{
    return l->started < l->most && !l->interrupted &&
           (l->o->seconds <= 0 || (double)(shm_now_ns() - l->start_ns) / 1e9 < l->o->seconds);
}

static void begin(struct load *l);

static void leave(struct conversation *c)
{
    struct load *l = c->load;
    *c->at = c->next;
    if (c->next)
        c->next->at = c->at;
    load_request_cancel(&c->request);
    if (c->timer)
        event_free(c->timer);
    json_decref(c->messages);
    free(c->body);
    free(c);
    l->at_once--;
    l->last_ns = shm_now_ns();
    if (l->point->conversations && may_begin(l))
        begin(l);
    if (!l->conversations && (l->point->conversations || !may_begin(l)))
        event_base_loopbreak(l->base);
}

static void on_piece(void *ctx)
{
    struct conversation *c = ctx;
    uint64_t now_ns = shm_now_ns();
    if (!c->first_ns)
        c->first_ns = now_ns;
    else
        add(c->load, &c->load->run->itl_ms, c->piece_ns, now_ns);
    c->piece_ns = now_ns;
}

static void send_request(struct conversation *c);

/* The next turn's text, and its first try. */
static void ask(struct conversation *c)
{
    struct load *l = c->load;
    const unsigned *range = c->turn || !l->o->prompt[1] ? l->o->turn : l->o->prompt;
    unsigned tokens = range[0] + (unsigned)(load_random(&c->random) % (range[1] - range[0] + 1));
    char *text = load_words(&c->random, load_word_count(l->o, tokens, true));
    if (!text ||
        json_array_append_new(c->messages, json_pack("{s:s, s:s}", "role", "user", "content", text)) ||
        !(c->body = load_body(l->o, l->server, c->messages, l->o->max_tokens))) {
        free(text);
        l->no_memory = true;
        event_base_loopbreak(l->base);
        return;
    }
    free(text);
    c->tries = 0;
    c->asked_ns = shm_now_ns();
    l->run->requests++;
    send_request(c);
}

static void on_timer(evutil_socket_t fd, short what, void *ctx)
{
    struct conversation *c = ctx;
    (void)fd;
    (void)what;
    if (c->body)
        send_request(c); /* again */
    else
        ask(c);
}

static void wait_for(struct conversation *c, double s)
{
    const struct timeval tv = span(s);
    event_add(c->timer, &tv);
}

static void on_end(void *ctx, const struct load_reply *reply)
{
    struct conversation *c = ctx;
    struct load *l = c->load;
    struct load_run *r = l->run;
    uint64_t now_ns = shm_now_ns();
    c->request = NULL;
    if ((reply->status == 429 || reply->status == 503) && c->tries++ < l->o->retries && !l->interrupted) {
        r->retries++;
        wait_for(c, reply->retry_after_s > 0 ? reply->retry_after_s : 1);
        return;
    }
    free(c->body);
    c->body = NULL;
    if (reply->failure) {
        count_failure(r, reply->failure, reply->why);
        leave(c);
        return;
    }
    r->ok++;
    r->prompt_tokens += reply->prompt_tokens;
    r->cached_tokens += reply->cached_tokens;
    r->generated_tokens += reply->generated_tokens;
    if (c->first_ns)
        add(l, c->turn ? &r->later_ttft_ms : &r->ttft_ms, c->asked_ns, c->first_ns);
    add(l, &r->total_ms, c->asked_ns, now_ns);
    if (++c->turn >= l->o->turns || l->interrupted ||
        json_array_append_new(c->messages,
                              json_pack("{s:s, s:s}", "role", "assistant", "content", reply->text))) {
        leave(c);
        return;
    }
    if (l->o->pause_s > 0)
        wait_for(c, l->o->pause_s);
    else
        ask(c);
}

static void send_request(struct conversation *c)
{
    const struct load_handler handler = {.on_piece = on_piece, .on_end = on_end, .ctx = c};
    c->first_ns = c->piece_ns = 0;
    c->request = load_request_start(c->load->base, c->url, c->load->o->key, "/v1/chat/completions", c->body,
                                    c->load->o->timeout_s, &handler);
    if (!c->request) {
        c->load->no_memory = true;
        event_base_loopbreak(c->load->base);
    }
}

/* The next conversation: its number makes its texts and its URL. */
static void begin(struct load *l)
{
    struct conversation *c = calloc(1, sizeof *c);
    if (c)
        c->timer = event_new(l->base, -1, 0, on_timer, c);
    if (!c || !c->timer || !(c->messages = json_array())) {
        if (c && c->timer)
            event_free(c->timer);
        free(c);
        l->no_memory = true;
        event_base_loopbreak(l->base);
        return;
    }
    c->load = l;
    c->url = &l->server->url[l->started % l->server->urls];
    c->random = l->random + 0x632be59bd9b4e019u * ++l->started;
    if (l->system)
        json_array_append_new(c->messages, json_pack("{s:s, s:s}", "role", "system", "content", l->system));
    c->next = l->conversations;
    c->at = &l->conversations;
    if (c->next)
        c->next->at = &c->next;
    l->conversations = c;
    l->run->conversations++;
    if (++l->at_once > l->run->most_at_once)
        l->run->most_at_once = l->at_once;
    ask(c);
}

static void next_arrival(struct load *l)
{
    uint64_t now_ns = shm_now_ns();
    l->due_ns += (uint64_t)(-log(load_uniform(&l->random)) / l->point->rate * 1e9);
    const struct timeval tv = span(l->due_ns > now_ns ? (double)(l->due_ns - now_ns) / 1e9 : 0);
    event_add(l->arrival, &tv);
}

static void on_arrival(evutil_socket_t fd, short what, void *ctx)
{
    struct load *l = ctx;
    (void)fd;
    (void)what;
    if (may_begin(l)) {
        double late_ms = (double)(shm_now_ns() - l->due_ns) / 1e6;
        if (late_ms > l->run->late_ms && late_ms < 1e9)
            l->run->late_ms = late_ms;
        begin(l);
    }
    if (may_begin(l))
        next_arrival(l);
    else if (!l->conversations)
        event_base_loopbreak(l->base);
}

static void on_progress(evutil_socket_t fd, short what, void *ctx)
{
    struct load *l = ctx;
    const struct load_run *r = l->run;
    char name[48];
    (void)fd;
    (void)what;
    uint64_t failed = 0;
    for (unsigned i = 0; i < r->failures; i++)
        failed += r->failure[i].n;
    load_point_name(l->point, name, sizeof name);
    fprintf(stderr, "\r%s, round %u, %.40s: %u of %u begun, %u running, %llu turns done, %llu failed   ",
            name, l->round + 1, l->server->name, l->started, l->most, l->at_once, (unsigned long long)r->ok,
            (unsigned long long)failed);
}

static void on_interrupt(evutil_socket_t fd, short what, void *ctx)
{
    struct load *l = ctx;
    (void)fd;
    (void)what;
    l->interrupted = true;
    event_base_loopbreak(l->base);
}

static int prepare(struct load *l)
{
    const struct load_options *o = l->o;
    if (o->system) { /* the same for all conversations, rounds and loads */
        uint64_t state = o->seed;
        l->system = load_words(&state, load_word_count(o, o->system, false));
    }
    l->base = event_base_new();
    if (!l->base || (o->system && !l->system))
        return -ENOMEM;
    l->arrival = event_new(l->base, -1, 0, on_arrival, l);
    l->progress = event_new(l->base, -1, EV_PERSIST, on_progress, l);
    l->interrupt = evsignal_new(l->base, SIGINT, on_interrupt, l);
    l->term = evsignal_new(l->base, SIGTERM, on_interrupt, l);
    if (!l->arrival || !l->progress || !l->interrupt || !l->term)
        return -ENOMEM;
    event_add(l->interrupt, NULL);
    event_add(l->term, NULL);
    const struct timeval half = {.tv_usec = 500000};
    if (!o->quiet && isatty(STDERR_FILENO))
        event_add(l->progress, &half);
    return 0;
}

int load_run(const struct load_options *o, const struct load_server *server, const struct load_point *point,
             unsigned round, struct load_run *ret_run, struct shm_error *err)
{
    struct load l = {.o = o, .server = server, .point = point, .run = ret_run, .round = round};
    l.most = load_count(o, point);
    /* Not the server's number: each gets the same. Not the same texts again: they might be cached. */
    l.random = o->seed + (uint64_t)round * 1000003 + point->conversations * 7919 +
               (uint64_t)(point->rate * 1e6) * 104729;
    load_random(&l.random);
    int rc = prepare(&l);
    if (!rc) {
        l.start_ns = l.due_ns = shm_now_ns();
        if (point->conversations)
            for (unsigned i = 0; i < point->conversations && may_begin(&l); i++)
                begin(&l);
        else
            next_arrival(&l);
        event_base_loop(l.base, EVLOOP_NO_EXIT_ON_EMPTY);
        ret_run->seconds = (double)((l.last_ns ? l.last_ns : shm_now_ns()) - l.start_ns) / 1e9;
    }
    rc = rc || l.no_memory ? shm_error_set(err, ENOMEM, "no memory")
         : l.interrupted   ? shm_error_set(err, EINTR, "interrupted")
                           : 0;
    l.interrupted = true; /* no further conversation */
    while (l.conversations)
        leave(l.conversations);
    struct event *events[] = {l.arrival, l.progress, l.interrupt, l.term};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i])
            event_free(events[i]);
    if (l.base) {
        /* A connection may have a callback put off, which holds it. */
        while (event_base_get_num_events(l.base, EVENT_BASE_COUNT_ACTIVE) > 0 &&
               event_base_loop(l.base, EVLOOP_NONBLOCK) == 0)
            ;
        event_base_free(l.base);
    }
    free(l.system);
    if (!o->quiet && isatty(STDERR_FILENO))
        fprintf(stderr, "\r%110s\r", "");
    return rc;
}
