/* SPDX-License-Identifier: MIT */
#include "expertd/exd_region.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE_BYTES 512
#define SAMPLES    128u
#define NODES      1024

/* Sums over the mappings that lie in the range: a range may have been split by madvise. */
static void look_smaps(uintptr_t from, uintptr_t to, struct exd_region *r)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    if (!f)
        return;
    char line[LINE_BYTES];
    bool inside = false;
    uint64_t present = 0, page = 0, most = 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long long a, b;
        if (sscanf(line, "%llx-%llx ", &a, &b) == 2) {
            if (a >= to)
                break;
            inside = a >= from && b <= to;
            continue;
        }
        if (!inside)
            continue;
        uint64_t value = strtoull(strchr(line, ':') ? strchr(line, ':') + 1 : "", NULL, 10) << 10;
        if (strncmp(line, "KernelPageSize:", 15) == 0) {
            page = value;
        } else if (strncmp(line, "Rss:", 4) == 0) {
            present = value;
            if (!most || present > most)
                r->page_bytes = page, most = present;
        } else if (strncmp(line, "ShmemPmdMapped:", 15) == 0 || strncmp(line, "FilePmdMapped:", 14) == 0) {
            r->huge_bytes += value;
        } else if (strncmp(line, "Shared_Hugetlb:", 15) == 0 || strncmp(line, "Private_Hugetlb:", 16) == 0) {
            r->huge_bytes += value;
            r->locked_bytes += value; /* never swapped */
        } else if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " lo")) {
            r->locked_bytes += present;
        }
    }
    fclose(f);
    if (r->huge_bytes > most / 2 && r->page_bytes < (2u << 20))
        r->page_bytes = 2u << 20;
}

/* Where sampled pages are: asks, moves nothing. */
static void look_nodes(uintptr_t from, uint64_t bytes, struct exd_region *r)
{
    void *page[SAMPLES];
    int status[SAMPLES];
    uint16_t count[NODES] = {0};
    uint64_t step = bytes / SAMPLES & ~UINT64_C(4095);
    uint32_t n = step ? SAMPLES : 1;
    for (uint32_t i = 0; i < n; i++)
        page[i] = (void *)(from + i * step); /* NOLINT: an address to ask about */
    r->node = -1;
    if (syscall(SYS_move_pages, 0, (unsigned long)n, page, NULL, status, 0) != 0)
        return;
    for (uint32_t i = 0; i < n; i++) {
        if (status[i] < 0 || status[i] >= NODES)
            continue; /* not present */
        r->sampled++;
        if (++count[status[i]] > (r->node < 0 ? 0 : count[r->node]))
            r->node = status[i];
    }
    r->away = r->sampled - (r->node < 0 ? 0 : count[r->node]);
}

void exd_region_look(const void *base, uint64_t bytes, struct exd_region *ret_region)
{
    struct exd_region r = {.node = -1};
    look_smaps((uintptr_t)base, (uintptr_t)base + bytes, &r);
    look_nodes((uintptr_t)base, bytes, &r);
    *ret_region = r;
}
