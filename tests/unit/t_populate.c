/* SPDX-License-Identifier: MIT */
/* Page tables filled in the background: there when it was waited for, ended by cancel. */
#include "expertd/exd_populate.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES (UINT64_C(50) << 20)
#define PART  (UINT64_C(20) << 20)

TestSuite(populate, .timeout = 30);

/* A mapping whose pages exist and are not mapped yet. */
static uint8_t *map_fresh(void)
{
    int fd = memfd_create("t-populate", MFD_CLOEXEC);
    cr_assert(fd >= 0 && ftruncate(fd, (off_t)BYTES) == 0);
    uint8_t *p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert(p != MAP_FAILED);
    memset(p, 7, BYTES);
    munmap(p, BYTES);
    p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert(p != MAP_FAILED);
    close(fd);
    return p;
}

/* Mapped bytes of the mapping at p, from /proc/self/smaps. */
static uint64_t mapped(const uint8_t *p)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    char line[512];
    unsigned long long a, b, kib = 0;
    bool inside = false;
    cr_assert(f);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%llx-%llx ", &a, &b) == 2)
            inside = a <= (uintptr_t)p && (uintptr_t)p < b;
        else if (inside && sscanf(line, "Rss: %llu kB", &kib) == 1)
            break;
    }
    fclose(f);
    return kib << 10;
}

Test(populate, pages_are_there)
{
    for (int write = 0; write < 2; write++) {
        uint8_t *p = map_fresh();
        cr_assert_lt(mapped(p), PART);
        struct exd_populate *populate = exd_populate_start(p, BYTES, write, NULL);
        cr_assert_not_null(populate);
        exd_populate_wait(populate, PART);
        cr_expect_geq(mapped(p), PART, "write %d: %llu", write, (unsigned long long)mapped(p));
        exd_populate_wait(populate, BYTES + 12345);
        cr_expect_eq(mapped(p), BYTES, "write %d: %llu", write, (unsigned long long)mapped(p));
        exd_populate_end(&populate);
        cr_expect_null(populate);
        exd_populate_end(&populate);
        cr_expect(p[0] == 7 && p[BYTES - 1] == 7);
        munmap(p, BYTES);
    }
}

Test(populate, cancelled)
{
    uint8_t *p = map_fresh();
    atomic_int cancel = 1;
    struct exd_populate *populate = exd_populate_start(p, BYTES, true, &cancel);
    exd_populate_wait(populate, BYTES);
    cr_expect_eq(mapped(p), 0);
    exd_populate_end(&populate);
    munmap(p, BYTES);
}
