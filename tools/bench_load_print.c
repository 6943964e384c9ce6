/* SPDX-License-Identifier: MIT */
#include "tools/bench_load.h"

#include "tools/bench_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tail {
    double p50, p99, max;
    size_t n;
};

/* One server under one load, all rounds together. */
struct summary {
    struct bench_spread seconds, prompt_tps, generated_tps, generated_ratio, ttft_ratio;
    struct tail ttft, later, itl, total;
    uint64_t conversations, requests, ok, retries, prompt_tokens, cached_tokens, generated_tokens, failed;
    struct load_failure failure[LOAD_STATUS_MAX];
    unsigned failures, most_at_once;
    double late_ms;
    const char *why;
};

/* The smallest value that the share of all does not pass. */
static double rank(const double *sorted, size_t n, double share)
{
    size_t i = (size_t)(share * (double)n);
    if ((double)i < share * (double)n)
        i++;
    return sorted[i ? i - 1 : 0];
}

static struct tail tail_of(const struct load_series *const *series, unsigned n)
{
    struct load_series all = {0};
    struct tail t = {0};
    for (unsigned i = 0; i < n; i++)
        for (size_t k = 0; k < series[i]->n; k++)
            load_series_add(&all, series[i]->v[k]);
    if (all.n) {
        qsort(all.v, all.n, sizeof *all.v, bench_compare);
        t = (struct tail){rank(all.v, all.n, 0.5), rank(all.v, all.n, 0.99), all.v[all.n - 1], all.n};
    }
    free(all.v);
    return t;
}

static struct tail tail_at(const struct load_run *runs, unsigned rounds, size_t offset)
{
    const struct load_series *series[LOAD_ROUNDS_MAX] = {0};
    for (unsigned i = 0; i < rounds; i++)
        series[i] = (const struct load_series *)(const void *)((const char *)&runs[i] + offset);
    return tail_of(series, rounds);
}

static double per_second(uint64_t n, double s)
{
    return s > 0 ? (double)n / s : 0;
}

static void add_failures(struct summary *s, const struct load_run *r)
{
    for (unsigned i = 0; i < r->failures; i++) {
        unsigned k = 0;
        while (k < s->failures && strcmp(s->failure[k].what, r->failure[i].what) != 0)
            k++;
        if (k == LOAD_STATUS_MAX)
            k--;
        else if (k == s->failures)
            s->failure[s->failures++] = (struct load_failure){0};
        memcpy(s->failure[k].what, r->failure[i].what, sizeof s->failure[k].what);
        s->failure[k].n += r->failure[i].n;
        s->failed += r->failure[i].n;
        s->why = r->why;
    }
}

static struct summary summarize(const struct load_run *base, const struct load_run *runs, unsigned rounds)
{
    struct summary s = {0};
    double seconds[LOAD_ROUNDS_MAX], prompt[LOAD_ROUNDS_MAX], generated[LOAD_ROUNDS_MAX],
        g_ratio[LOAD_ROUNDS_MAX], t_ratio[LOAD_ROUNDS_MAX];
    unsigned n_g = 0, n_t = 0;
    for (unsigned i = 0; i < rounds; i++) {
        const struct load_run *r = &runs[i];
        const struct load_series *mine = &r->ttft_ms, *theirs = &base[i].ttft_ms;
        seconds[i] = r->seconds;
        prompt[i] = per_second(r->prompt_tokens, r->seconds);
        generated[i] = per_second(r->generated_tokens, r->seconds);
        double g = per_second(base[i].generated_tokens, base[i].seconds);
        if (g > 0)
            g_ratio[n_g++] = generated[i] / g;
        if (mine->n && theirs->n)
            t_ratio[n_t++] = tail_of(&theirs, 1).p50 / tail_of(&mine, 1).p50;
        s.conversations += r->conversations;
        s.requests += r->requests;
        s.ok += r->ok;
        s.retries += r->retries;
        s.prompt_tokens += r->prompt_tokens;
        s.cached_tokens += r->cached_tokens;
        s.generated_tokens += r->generated_tokens;
        s.most_at_once = r->most_at_once > s.most_at_once ? r->most_at_once : s.most_at_once;
        s.late_ms = r->late_ms > s.late_ms ? r->late_ms : s.late_ms;
        add_failures(&s, r);
    }
    s.seconds = bench_spread_of(seconds, rounds);
    s.prompt_tps = bench_spread_of(prompt, rounds);
    s.generated_tps = bench_spread_of(generated, rounds);
    s.generated_ratio = bench_spread_of(g_ratio, n_g);
    s.ttft_ratio = bench_spread_of(t_ratio, n_t);
    s.ttft = tail_at(runs, rounds, offsetof(struct load_run, ttft_ms));
    s.later = tail_at(runs, rounds, offsetof(struct load_run, later_ttft_ms));
    s.itl = tail_at(runs, rounds, offsetof(struct load_run, itl_ms));
    s.total = tail_at(runs, rounds, offsetof(struct load_run, total_ms));
    return s;
}

void load_point_name(const struct load_point *p, char *name, size_t room)
{
    if (p->conversations)
        snprintf(name, room, "%u conversation%s at once", p->conversations, p->conversations > 1 ? "s" : "");
    else
        snprintf(name, room, "%g conversations a second", p->rate);
}

static void print_tail(struct tail t)
{
    if (t.n)
        printf("  %8.1f %8.1f %8.1f", t.p50, t.p99, t.max);
    else
        printf("  %8s %8s %8s", "-", "-", "-");
}

static void print_server(const struct load_options *o, const struct summary *s, const char *name, bool first)
{
    printf("%-26.26s %6llu %6llu %5llu %9.1f %6.1f%% %8.1f", name, (unsigned long long)s->ok,
           (unsigned long long)s->failed, (unsigned long long)s->retries, s->prompt_tps.median,
           s->prompt_tokens ? 100 * (double)s->cached_tokens / (double)s->prompt_tokens : 0,
           s->generated_tps.median);
    print_tail(s->ttft);
    if (o->turns > 1)
        print_tail(s->later);
    print_tail(s->itl);
    if (o->servers > 1 && first)
        printf("  %21s %21s", "1", "1");
    else if (o->servers > 1)
        printf("  %6.3f (%5.3f..%5.3f) %6.3f (%5.3f..%5.3f)", s->generated_ratio.median,
               s->generated_ratio.low, s->generated_ratio.high, s->ttft_ratio.median, s->ttft_ratio.low,
               s->ttft_ratio.high);
    putchar('\n');
}

void load_print_table(const struct load_options *o, const struct load_run *runs)
{
    printf("prompts of %u", o->prompt[0]);
    if (o->prompt[1] > o->prompt[0])
        printf(" to %u", o->prompt[1]);
    printf(" tokens, answers of %s%u", o->may_end ? "at most " : "", o->max_tokens);
    if (o->system)
        printf(", behind %u shared", o->system);
    if (o->turns > 1)
        printf("; %u turns", o->turns);
    printf("; seed %llu\n", (unsigned long long)o->seed);
    for (unsigned p = 0; p < o->points; p++) {
        char name[48];
        load_point_name(&o->point[p], name, sizeof name);
        printf("\n%s: %u round%s of %u conversations\n", name, o->rounds, o->rounds > 1 ? "s" : "",
               load_count(o, &o->point[p]));
        printf("%-26s %6s %6s %5s %9s %7s %8s  %26s", "server", "turns", "failed", "tries", "prompt/s",
               "cached", "answer/s", "first token ms 50% 99% max");
        if (o->turns > 1)
            printf("  %26s", "later turns ms 50% 99% max");
        printf("  %26s", "gaps ms 50% 99% max");
        puts(o->servers > 1 ? "   answer/s ratio (range)  first tok. ratio (..)" : "");
        for (unsigned i = 0; i < o->servers; i++) {
            const struct load_run *at = &runs[(size_t)p * o->servers * o->rounds];
            struct summary s = summarize(at, at + (size_t)i * o->rounds, o->rounds);
            print_server(o, &s, o->server[i]->name, i == 0);
            for (unsigned k = 0; k < s.failures; k++)
                printf("    %llu failed: %s%s%s\n", (unsigned long long)s.failure[k].n, s.failure[k].what,
                       k + 1 == s.failures ? ", the last one: " : "", k + 1 == s.failures ? s.why : "");
            if (o->point[p].rate > 0)
                printf("    %u at once at most; begun up to %.1f ms later than drawn\n", s.most_at_once,
                       s.late_ms);
        }
    }
    printf("\nturns: answered. tries: again after 429 or 503. prompt/s, answer/s: tokens a second, median of "
           "the rounds; "
           "cached: share of the prompts.\nfirst token: from the first try on. gaps: between two pieces of "
           "an answer.%s\n",
           o->servers > 1 ? "\nratios: to the first server within a round, above 1 is better." : "");
}

static json_t *json_spread(struct bench_spread s)
{
    return json_pack("{s:f, s:f, s:f}", "low", s.low, "median", s.median, "high", s.high);
}

static json_t *json_tail(struct tail t)
{
    if (!t.n)
        return json_null();
    return json_pack("{s:f, s:f, s:f, s:I}", "p50", t.p50, "p99", t.p99, "max", t.max, "count",
                     (json_int_t)t.n);
}

static json_t *json_server(const struct load_options *o, const struct load_server *server,
                           const struct summary *s)
{
    json_t *errors = json_object();
    for (unsigned k = 0; k < s->failures; k++)
        json_object_set_new(errors, s->failure[k].what, json_integer((json_int_t)s->failure[k].n));
    json_t *j =
        json_pack("{s:s, s:s, s:I, s:I, s:I, s:o, s:I}", "server", server->name, "model", server->model,
                  "conversations", (json_int_t)s->conversations, "requests", (json_int_t)s->requests, "ok",
                  (json_int_t)s->ok, "errors", errors, "retries", (json_int_t)s->retries);
    json_object_set_new(j, "last_error", s->why ? json_string(s->why) : json_null());
    json_object_set_new(j, "seconds", json_spread(s->seconds));
    json_object_set_new(j, "prompt_tokens", json_integer((json_int_t)s->prompt_tokens));
    json_object_set_new(j, "cached_tokens", json_integer((json_int_t)s->cached_tokens));
    json_object_set_new(j, "generated_tokens", json_integer((json_int_t)s->generated_tokens));
    json_object_set_new(j, "prompt_tokens_per_s", json_spread(s->prompt_tps));
    json_object_set_new(j, "generated_tokens_per_s", json_spread(s->generated_tps));
    json_object_set_new(j, "ttft_ms", json_tail(s->ttft));
    json_object_set_new(j, "later_ttft_ms", json_tail(s->later));
    json_object_set_new(j, "itl_ms", json_tail(s->itl));
    json_object_set_new(j, "total_ms", json_tail(s->total));
    json_object_set_new(j, "most_at_once", json_integer(s->most_at_once));
    json_object_set_new(j, "late_ms", json_real(s->late_ms));
    if (o->servers > 1) {
        json_object_set_new(j, "generated_ratio", json_spread(s->generated_ratio));
        json_object_set_new(j, "ttft_ratio", json_spread(s->ttft_ratio));
    }
    return j;
}

void load_print_json(const struct load_options *o, const struct load_run *runs)
{
    json_t *loads = json_array();
    for (unsigned p = 0; p < o->points; p++) {
        json_t *servers = json_array();
        const struct load_run *at = &runs[(size_t)p * o->servers * o->rounds];
        for (unsigned i = 0; i < o->servers; i++) {
            struct summary s = summarize(at, at + (size_t)i * o->rounds, o->rounds);
            json_array_append_new(servers, json_server(o, o->server[i], &s));
        }
        json_t *load = json_pack("{s:I, s:I, s:o}", "rounds", (json_int_t)o->rounds, "count",
                                 (json_int_t)load_count(o, &o->point[p]), "servers", servers);
        if (o->point[p].conversations)
            json_object_set_new(load, "at_once", json_integer(o->point[p].conversations));
        else
            json_object_set_new(load, "rate", json_real(o->point[p].rate));
        json_array_append_new(loads, load);
    }
    json_t *all = json_pack("{s:I, s:I, s:I, s:I, s:f, s:f, s:o}", "seed", (json_int_t)o->seed, "turns",
                            (json_int_t)o->turns, "system_tokens", (json_int_t)o->system, "max_tokens",
                            (json_int_t)o->max_tokens, "tokens_per_word", o->per_word, "template_tokens",
                            o->base, "loads", loads);
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    putchar('\n');
    json_decref(all);
}
