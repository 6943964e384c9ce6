/* SPDX-License-Identifier: MIT */
#include "proto/prt_metrics.h"

#include <inttypes.h>
#include <string.h>

/* Length of the UTF-8 character at s; 0: it is none, or a control byte. */
static size_t character(const unsigned char *s)
{
    if (*s < 0x80)
        return *s >= 0x20 && *s != 0x7f;
    size_t n = *s >= 0xf0 ? 4 : *s >= 0xe0 ? 3 : 2;
    if (*s < 0xc2 || *s > 0xf4)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((*s == 0xe0 && s[1] < 0xa0) || (*s == 0xed && s[1] > 0x9f) || (*s == 0xf0 && s[1] < 0x90) ||
        (*s == 0xf4 && s[1] > 0x8f))
        return 0;
    return n;
}

void prt_metrics_label(char *text, size_t size, const char *name, const char *value)
{
    size_t start = strlen(text), at = start;
    int n = snprintf(text + at, size - at, "%s%s=\"", at ? "," : "", name);
    if (n < 0 || (size_t)n >= size - at)
        goto cut;
    at += (size_t)n;
    for (const unsigned char *s = (const unsigned char *)value; *s;) {
        if (at + 8 > size)
            goto cut;
        size_t bytes = character(s);
        if (!bytes) {
            text[at++] = '?';
            s++;
            continue;
        }
        if (*s == '\\' || *s == '"')
            text[at++] = '\\';
        memcpy(text + at, s, bytes);
        at += bytes;
        s += bytes;
    }
    if (at + 2 > size)
        goto cut;
    text[at++] = '"';
    text[at] = '\0';
    return;
cut:
    text[start] = '\0';
}

static void put_seconds(FILE *f, bool negative, uint64_t ns)
{
    char fraction[16];
    int n = snprintf(fraction, sizeof fraction, "%09" PRIu64, ns % 1000000000u);
    while (n > 0 && fraction[n - 1] == '0')
        fraction[--n] = '\0';
    fprintf(f, "%s%" PRIu64 "%s%s\n", negative ? "-" : "", ns / 1000000000u, n ? "." : "", fraction);
}

static void put_value(FILE *f, const struct shm_counter *c, uint64_t value)
{
    bool negative = c->kind == SHM_KIND_GAUGE && (int64_t)value < 0;
    uint64_t size = negative ? 0 - value : value;
    if (strcmp(c->unit, "ns") == 0)
        put_seconds(f, negative, size);
    else
        fprintf(f, "%s%" PRIu64 "\n", negative ? "-" : "", size);
}

/* metric{labels,more} with a blank after it. */
static void put_name(FILE *f, const char *metric, const char *suffix, const char *labels, const char *more)
{
    bool both = *labels && *more, any = *labels || *more;
    fprintf(f, "%s%s%s%s%s%s%s ", metric, suffix, any ? "{" : "", labels, both ? "," : "", more,
            any ? "}" : "");
}

static void put_histogram(FILE *f, const struct shm_counter *c, const struct prt_series *s)
{
    const uint64_t *words = s->words + c->word;
    uint64_t below = 0;
    char le[40];
    for (uint32_t i = 0; i <= c->n_bounds; i++) {
        below += words[i];
        if (i < c->n_bounds)
            snprintf(le, sizeof le, "le=\"%g\"", (double)c->bounds[i] / 1e9);
        else
            snprintf(le, sizeof le, "le=\"+Inf\"");
        put_name(f, c->metric, "_bucket", s->labels, le);
        fprintf(f, "%" PRIu64 "\n", below);
    }
    put_name(f, c->metric, "_sum", s->labels, "");
    put_seconds(f, false, words[c->n_bounds + 1]);
    put_name(f, c->metric, "_count", s->labels, "");
    fprintf(f, "%" PRIu64 "\n", below);
}

static void put_samples(FILE *f, const struct shm_counter *c, const struct prt_series *s)
{
    uint32_t inner = c->labels[1] ? c->labels[1]->n : 1;
    for (uint32_t w = 0; w < c->words; w++) {
        char more[1024] = "";
        if (c->labels[0])
            prt_metrics_label(more, sizeof more, c->labels[0]->label, c->labels[0]->value[w / inner]);
        if (c->labels[1])
            prt_metrics_label(more, sizeof more, c->labels[1]->label, c->labels[1]->value[w % inner]);
        if (c->labels[1] && !s->words[c->word + w])
            continue;
        put_name(f, c->metric, "", s->labels, c->kind == SHM_KIND_INFO && s->info ? s->info : more);
        put_value(f, c, s->words[c->word + w]);
    }
}

void prt_metrics_block(FILE *f, enum shm_block block, const struct prt_series *series, size_t n, bool detail)
{
    const struct shm_block_info *b = &shm_blocks[block];
    for (uint32_t i = b->first; i < b->first + b->n && n; i++) {
        const struct shm_counter *c = &shm_counters[i];
        if (!c->words || (c->detail && !detail))
            continue;
        fprintf(f, "# HELP %s %s\n# TYPE %s %s\n", c->metric, c->help, c->metric,
                c->kind == SHM_KIND_INFO ? "gauge" : shm_kind_name(c->kind));
        for (size_t k = 0; k < n; k++)
            if (c->kind == SHM_KIND_HISTOGRAM)
                put_histogram(f, c, &series[k]);
            else
                put_samples(f, c, &series[k]);
    }
}
