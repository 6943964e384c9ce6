/* SPDX-License-Identifier: MIT */
#include "inferd/serve/srv_sched.h"

#define FADES 0.9 /* an older pass counts this much less with each newer one */

void srv_speed_note(struct srv_speed *s, uint32_t tokens, uint64_t ns)
{
    double t = tokens, y = (double)ns;
    s->n = FADES * s->n + 1;
    s->t = FADES * s->t + t;
    s->tt = FADES * s->tt + t * t;
    s->y = FADES * s->y + y;
    s->ty = FADES * s->ty + t * y;
}

bool srv_speed_fit(const struct srv_speed *s, double *ret_fixed_ns, double *ret_each_ns)
{
    if (s->n <= 0 || s->t <= 0)
        return false;
    double mean = s->t / s->n, spread = s->tt / s->n - mean * mean;
    double each = s->y / s->t, fixed = 0;
    /* Passes of much the same length say nothing about what is fixed. */
    if (spread > 0.0025 * mean * mean) {
        each = (s->ty / s->n - mean * s->y / s->n) / spread;
        fixed = s->y / s->n - each * mean;
        if (fixed < 0) {
            fixed = 0;
            each = s->ty / s->tt;
        } else if (each < 0) {
            fixed = s->y / s->n;
            each = 0;
        }
    }
    *ret_fixed_ns = fixed;
    *ret_each_ns = each;
    return true;
}

/* Most tokens of a read beside answers. */
static uint32_t beside_answers(const struct srv_load *l, const struct srv_speed *speed)
{
    double fixed, each;
    if (!srv_speed_fit(speed, &fixed, &each))
        return SRV_FIRST_TOKENS;
    double left = (double)l->gap_ns - (double)l->step_ns - fixed;
    double tokens = each > 0 ? left / each : left > 0 ? l->chunk : 0;
    /* At least as many as cost what the pass costs anyway; the floor is enough for that on a link. */
    double least = each > 0 ? fixed / each : l->floor;
    if (least > l->floor)
        least = l->floor;
    if (tokens < least)
        tokens = least;
    return tokens < 1 ? 1 : tokens > l->chunk ? l->chunk : (uint32_t)tokens;
}

uint32_t srv_sched_tokens(const struct srv_load *l, const struct srv_speed *speed)
{
    if (!l->rest)
        return 0;
    uint32_t most = l->chunk;
    if (l->answers && l->gap_ns) {
        uint32_t beside = beside_answers(l, speed);
        most = beside < most ? beside : most;
    }
    uint64_t passes = (l->rest + most - 1) / most;
    return (uint32_t)((l->rest + passes - 1) / passes);
}

/* The client among those with something left whose first prompt came first; SRV_PARALLEL_MAX: none. */
static unsigned first_client(const uint64_t *left, const uint64_t *turn, const bool *served)
{
    unsigned best = SRV_PARALLEL_MAX;
    for (unsigned c = 0; c < SRV_PARALLEL_MAX; c++)
        if (left[c] && !served[c] && (best == SRV_PARALLEL_MAX || turn[c] < turn[best]))
            best = c;
    return best;
}

/* Evenly, and what one doesn't need goes to the others. */
static void share_clients(const uint64_t *want, const uint64_t *turn, uint32_t tokens, uint64_t *ret_share)
{
    uint64_t left[SRV_PARALLEL_MAX];
    for (unsigned c = 0; c < SRV_PARALLEL_MAX; c++) {
        left[c] = want[c];
        ret_share[c] = 0;
    }
    for (;;) {
        unsigned clients = 0;
        for (unsigned c = 0; c < SRV_PARALLEL_MAX; c++)
            clients += left[c] > 0;
        if (!clients || !tokens)
            return;
        if (tokens < clients)
            break;
        uint32_t even = tokens / clients;
        for (unsigned c = 0; c < SRV_PARALLEL_MAX; c++) {
            uint32_t take = left[c] < even ? (uint32_t)left[c] : even;
            ret_share[c] += take;
            left[c] -= take;
            tokens -= take;
        }
    }
    bool served[SRV_PARALLEL_MAX] = {false};
    for (unsigned c; tokens && (c = first_client(left, turn, served)) < SRV_PARALLEL_MAX; tokens--) {
        ret_share[c]++;
        served[c] = true;
    }
}

void srv_sched_share(const struct srv_prompt *p, unsigned n, uint32_t tokens, uint32_t *ret_tokens)
{
    uint64_t want[SRV_PARALLEL_MAX] = {0}, turn[SRV_PARALLEL_MAX] = {0}, share[SRV_PARALLEL_MAX];
    for (unsigned i = 0; i < n; i++) {
        unsigned c = p[i].client;
        if (!want[c] || p[i].turn < turn[c])
            turn[c] = p[i].turn;
        want[c] += p[i].rest;
        ret_tokens[i] = 0;
    }
    share_clients(want, turn, tokens, share);
    for (unsigned given = 0; given < n; given++) {
        /* The one that came first among those that got nothing yet. */
        unsigned first = n;
        for (unsigned i = 0; i < n; i++)
            if (!ret_tokens[i] && share[p[i].client] && (first == n || p[i].turn < p[first].turn))
                first = i;
        if (first == n)
            return;
        uint64_t *of = &share[p[first].client];
        ret_tokens[first] = p[first].rest < *of ? p[first].rest : (uint32_t)*of;
        *of -= ret_tokens[first];
    }
}

uint64_t srv_sched_need(uint64_t prompt, uint64_t max_tokens, uint64_t ctx)
{
    uint64_t most = max_tokens < ctx ? max_tokens : ctx;
    uint64_t all = prompt + (most ? most - 1 : 0);
    return all < ctx ? all : ctx;
}
