/* SPDX-License-Identifier: MIT */
/* Events: what is written is read, what was written over is counted, and nothing in a segment is believed. */
#include "shm/shm_bell.h"
#include "shm/shm_event.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

TestSuite(event, .timeout = 60);

#define RINGS 2
static const uint32_t capacities[RINGS] = {8, 16};

static void *make(uint64_t *ret_bytes)
{
    *ret_bytes = shm_event_bytes(capacities, RINGS);
    void *base = aligned_alloc(64, (*ret_bytes + 63) & ~UINT64_C(63));
    cr_assert(base);
    memset(base, 0, *ret_bytes);
    shm_event_init(base, "test", capacities, RINGS, 1, 2);
    shm_header_publish(base, 3);
    return base;
}

static struct shm_event_view open_view(void *base, uint64_t bytes)
{
    struct shm_event_view v;
    struct shm_error err = {0};
    cr_assert_eq(shm_event_open(base, bytes, "segment", &v, &err), 0, "%s", err.text);
    return v;
}

Test(event, what_is_written_is_read)
{
    uint64_t bytes, next = 0, lost = 0;
    void *base = make(&bytes);
    struct shm_event_view v = open_view(base, bytes);
    struct shm_event_owner o;
    struct shm_event got[32];
    cr_expect_eq(shm_event_owner_at(&v, 1, &o), -ENOENT);
    struct shm_event_writer w;
    shm_event_own(base, 1, "thread", "na\"me", 7, 9, &w);
    cr_assert_eq(shm_event_owner_at(&v, 1, &o), 0);
    cr_expect_str_eq(o.thread, "thread");
    cr_expect_str_eq(o.name, "na?me"); /* it goes into JSON and terminals */
    cr_expect(o.pid == 7 && o.session == 9 && o.capacity == 16);
    for (uint32_t i = 0; i < 5; i++)
        shm_event_put(&w, SHM_EVENT_ISSUE, 100 + i, i, ~(uint64_t)i);
    shm_event_put(NULL, SHM_EVENT_ISSUE, 0, 0, 0); /* off: nothing happens */
    cr_assert_eq(shm_event_read(&v, 1, &o, &next, got, 32, &lost), 5);
    for (uint32_t i = 0; i < 5; i++)
        cr_expect(got[i].number == i && got[i].at_ns == 100 + i && got[i].kind == SHM_EVENT_ISSUE &&
                  got[i].field[0] == i && got[i].field[1] == ~(uint64_t)i);
    cr_expect_eq(shm_event_read(&v, 1, &o, &next, got, 32, &lost), 0);
    cr_expect_eq(lost, 0);
    free(base);
}

Test(event, what_was_written_over_is_counted)
{
    uint64_t bytes, next = 0, lost = 0;
    void *base = make(&bytes);
    struct shm_event_view v = open_view(base, bytes);
    struct shm_event_owner o;
    struct shm_event_writer w;
    struct shm_event got[32];
    shm_event_own(base, 0, "a", "", 1, 1, &w);
    cr_assert_eq(shm_event_owner_at(&v, 0, &o), 0);
    for (uint32_t i = 0; i < 20; i++)
        shm_event_put(&w, SHM_EVENT_DROP, i, i, 0);
    cr_assert_eq(shm_event_read(&v, 0, &o, &next, got, 32, &lost), 8);
    cr_expect_eq(got[0].number, 12);
    cr_expect_eq(lost, 12);
    /* an event that is being written: only it is missing */
    for (uint32_t i = 20; i < 24; i++)
        shm_event_put(&w, SHM_EVENT_DROP, i, i, 0);
    atomic_store(&w.events[(22 & 7) * SHM_EVENT_WORDS], 0);
    cr_assert_eq(shm_event_read(&v, 0, &o, &next, got, 32, &lost), 3);
    cr_expect(got[1].number == 21 && got[2].number == 23);
    cr_expect_eq(lost, 13);
    /* no honest writer goes back: nothing is read, and nothing is called lost */
    atomic_store(&w.ring->next, 5);
    cr_expect_eq(shm_event_read(&v, 0, &o, &next, got, 32, &lost), 0);
    cr_expect_eq(lost, 13);
    free(base);
}

Test(event, an_owner_has_its_own_events)
{
    uint64_t bytes, next = 0, lost = 0;
    void *base = make(&bytes);
    struct shm_event_view v = open_view(base, bytes);
    struct shm_event_owner o;
    struct shm_event_writer w;
    struct shm_event got[32];
    shm_event_own(base, 1, "a", "first", 1, 1, &w);
    for (uint32_t i = 0; i < 3; i++)
        shm_event_put(&w, SHM_EVENT_DROP, i, 0, 0);
    shm_event_own(base, 1, "a", "second", 2, 2, &w);
    shm_event_put(&w, SHM_EVENT_ISSUE, 50, 0, 0);
    cr_assert_eq(shm_event_owner_at(&v, 1, &o), 0);
    cr_expect_str_eq(o.name, "second");
    cr_assert_eq(shm_event_read(&v, 1, &o, &next, got, 32, &lost), 1);
    cr_expect(got[0].at_ns == 50 && got[0].number == 3);
    cr_expect_eq(lost, 0);
    free(base);
}

Test(event, a_segment_says_what_its_events_are)
{
    uint64_t bytes;
    void *base = make(&bytes);
    struct shm_event_view v = open_view(base, bytes);
    bool seen[256] = {false};
    uint32_t words = 0;
    for (uint32_t i = 0; i < v.head.infos; i++) {
        struct shm_event_info info;
        shm_event_info_at(&v, i, &info);
        cr_expect_not(seen[info.kind], "%s", info.name);
        seen[info.kind] = true;
        cr_expect_geq(info.fields, 1, "%s", info.name);
        uint32_t taken = 0;
        for (uint32_t k = 0; k < info.fields; k++) {
            const struct shm_event_field *f = &info.field[k];
            uint32_t mask = ((1u << f->bytes) - 1) << f->offset;
            cr_expect_not(taken & mask, "%s.%s lies over another", info.name, f->name);
            cr_expect_eq(f->offset % f->bytes, 0, "%s.%s", info.name, f->name);
            taken |= mask;
            words += f->format == SHM_EVENT_VALUE;
        }
    }
    cr_expect(words > 5 && v.head.values > words);
    struct shm_event_info issue;
    for (uint32_t i = 0; i < v.head.infos; i++) {
        shm_event_info_at(&v, i, &issue);
        if (issue.kind == SHM_EVENT_ISSUE)
            break;
    }
    const struct shm_event e = {.field = {SHM_EVENT_U32(5, 0) | SHM_EVENT_U16(6, 4) | SHM_EVENT_U16(7, 6),
                                          SHM_EVENT_U32(8, 0) | SHM_EVENT_U16(9, 4) | SHM_EVENT_U8(1, 6)}};
    static const char *const names[] = {"stream", "layer", "expert", "slot", "group", "certain"};
    for (uint32_t k = 0; k < 6; k++) {
        cr_expect_str_eq(issue.field[k].name, names[k]);
        cr_expect_eq(shm_event_field(&e, &issue.field[k]), k < 5 ? 5 + k : 1, "%s", names[k]);
    }
    free(base);
}

/* All that a tool does with a segment. */
static void look(const void *base, uint64_t bytes)
{
    struct shm_event_view v;
    struct shm_event got[16];
    if (shm_event_open(base, bytes, "segment", &v, NULL))
        return;
    for (uint32_t i = 0; i < v.head.infos; i++) {
        struct shm_event_info info;
        struct shm_event e = {0};
        shm_event_info_at(&v, i, &info);
        for (uint32_t k = 0; k < info.fields; k++)
            cr_assert_eq(shm_event_field(&e, &info.field[k]), 0);
        cr_assert_lt(strlen(info.name), sizeof info.name);
    }
    for (uint32_t i = 0; i < v.head.values; i++) {
        struct shm_event_value value;
        shm_event_value_at(&v, i, &value);
        cr_assert_lt(strlen(value.name), sizeof value.name);
    }
    for (uint32_t i = 0; i < v.head.rings; i++) {
        struct shm_event_owner o;
        uint64_t next = 0, lost = 0;
        if (shm_event_owner_at(&v, i, &o))
            continue;
        for (int k = 0; k < 4; k++)
            cr_assert_leq(shm_event_read(&v, i, &o, &next, got, 16, &lost), 16);
    }
}

/* Under the address sanitizer this means: no byte outside of the segment is touched. */
Test(event, nothing_in_a_segment_is_believed)
{
    uint64_t bytes, seed = 12345;
    void *base = make(&bytes);
    struct shm_event_writer w;
    for (uint32_t r = 0; r < RINGS; r++) {
        shm_event_own(base, r, "a", "b", 1, 1, &w);
        for (uint32_t i = 0; i < 20; i++)
            shm_event_put(&w, SHM_EVENT_DROP, i, i, i);
    }
    uint8_t *copy = aligned_alloc(64, (bytes + 63) & ~UINT64_C(63));
    cr_assert(copy);
    static const uint64_t evil[] = {0,   1, 7, 8, 0xff, 0x7fffffff, 0xffffffff, UINT64_MAX, UINT64_C(1) << 63,
                                    4096};
    for (int round = 0; round < 20000; round++) {
        memcpy(copy, base, bytes);
        for (int k = 0; k < 3; k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            /* half of them where offsets and counts are */
            uint64_t at = round % 2 ? 80 + (seed >> 33) % 112 : (seed >> 33) % bytes;
            uint64_t value = evil[(seed >> 20) % 10];
            size_t n = 1u << ((seed >> 12) % 4);
            if (at + n <= bytes)
                memcpy(copy + at, &value, n);
        }
        look(copy, bytes - (round % 5 ? 0 : seed >> 40));
    }
    for (uint64_t n = 0; n < 300; n++)
        look(base, n);
    free(copy);
    free(base);
}

Test(event, another_layout_is_named)
{
    uint64_t bytes;
    void *base = make(&bytes);
    struct shm_event_view v;
    struct shm_error err = {0};
    memcpy(base, "EXDEVT99", 8);
    cr_expect_eq(shm_event_open(base, bytes, "segment", &v, &err), -EPROTO);
    cr_expect(strstr(err.text, "EXDEVT99") && strstr(err.text, SHM_EVENT_MAGIC), "%s", err.text);
    memcpy(base, SHM_EVENT_MAGIC, 8);
    ((struct shm_event_segment *)base)->rings = 1000000;
    cr_expect_eq(shm_event_open(base, bytes, "segment", &v, &err), -EBADMSG);
    cr_expect(strstr(err.text, "rings"), "%s", err.text);
    free(base);
}
