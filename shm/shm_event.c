/* SPDX-License-Identifier: MIT */
#include "shm/shm_event.h"

#include "shm/shm_bell.h"
#include "shm/shm_store.h"
#include "shm/shm_word.h"
#include "shm/shm_worker.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#define ALIGN(n)  (((n) + 63) & ~UINT64_C(63))
#define PAGE      UINT64_C(4096)
#define EVENT     (SHM_EVENT_WORDS * sizeof(uint64_t))
#define LENGTH(a) (sizeof(a) / sizeof(a)[0])

/* ---- what events are called ---- */

enum set { NO_SET, STATE, POLICY, ORDER, RESULT, HELD_OFF, SLEEP, WAIT, NO_YES, SET_COUNT };

#define NUM(n, o, b)                                                                                         \
    {                                                                                                        \
        .name = n, .offset = o, .bytes = b                                                                   \
    }
#define NS(n, o)                                                                                             \
    {                                                                                                        \
        .name = n, .offset = o, .bytes = 8, .format = SHM_EVENT_NS                                           \
    }
#define SIZE(n, o)                                                                                           \
    {                                                                                                        \
        .name = n, .offset = o, .bytes = 4, .format = SHM_EVENT_BYTES                                        \
    }
#define WORD(n, o, b, s)                                                                                     \
    {                                                                                                        \
        .name = n, .offset = o, .bytes = b, .format = SHM_EVENT_VALUE, .set = s                              \
    }
#define STREAM  NUM("stream", 0, 4)
#define LAYER   NUM("layer", 4, 2)
#define SESSION NUM("session", 0, 4), NUM("pid", 4, 4)
#define KIND(k, n, ...)                                                                                      \
    {                                                                                                        \
        .kind = k, .name = n, __VA_ARGS__                                                                    \
    }

static const struct shm_event_info infos[] = {
    KIND(SHM_EVENT_STATE, "state", .field = {WORD("state", 0, 4, STATE)}),
    KIND(SHM_EVENT_ATTACH, "attach", .field = {SESSION, NUM("slots", 8, 4)}),
    KIND(SHM_EVENT_DETACH, "detach", .field = {SESSION}),
    KIND(SHM_EVENT_DEATH, "death", .field = {SESSION}),
    KIND(SHM_EVENT_FAULT, "fault", .field = {SESSION}),

    KIND(SHM_EVENT_STREAM_BEGIN, "stream_begin", .span = "stream", .phase = SHM_EVENT_BEGIN,
         .field = {STREAM, NUM("tokens", 4, 4), WORD("policy", 8, 1, POLICY), WORD("order", 9, 1, ORDER),
                   WORD("held_off", 10, 1, HELD_OFF), NUM("depth", 12, 4)}),
    KIND(SHM_EVENT_STREAM_END, "stream_end", .span = "stream", .phase = SHM_EVENT_END,
         .field = {STREAM, NUM("copied", 4, 4), NUM("dropped", 8, 4), WORD("result", 12, 1, RESULT)}),
    KIND(SHM_EVENT_ISSUE, "issue",
         .field = {STREAM, LAYER, NUM("expert", 6, 2), NUM("slot", 8, 4), NUM("group", 12, 2),
                   WORD("certain", 14, 1, NO_YES)}),
    KIND(SHM_EVENT_DROP, "drop", .field = {STREAM, LAYER, NUM("expert", 6, 2)}),
    KIND(SHM_EVENT_PUBLISH_SEEN, "publish_seen",
         .field = {STREAM, LAYER, NUM("routed", 6, 2), NS("after", 8)}),
    KIND(SHM_EVENT_LAND_SEEN, "land_seen", .field = {STREAM, NUM("copies", 4, 4)}),
    KIND(SHM_EVENT_RELEASE_SEEN, "release_seen", .field = {STREAM, NUM("groups", 4, 4)}),
    KIND(SHM_EVENT_SLEEP_BEGIN, "sleep_begin", .span = "sleep", .phase = SHM_EVENT_BEGIN,
         .field = {STREAM, WORD("for", 4, 1, SLEEP)}),
    KIND(SHM_EVENT_SLEEP_END, "sleep_end", .span = "sleep", .phase = SHM_EVENT_END, .field = {STREAM}),

    KIND(SHM_EVENT_LAND, "land", .span = "copy", .phase = SHM_EVENT_SPAN,
         .field = {NS("took", 0), NUM("slot", 8, 4), SIZE("bytes", 12)}),

    KIND(SHM_EVENT_JOIN, "join", .field = {NUM("session", 0, 4), NUM("slots", 4, 4)}),
    KIND(SHM_EVENT_PASS_BEGIN, "pass_begin", .span = "pass", .phase = SHM_EVENT_BEGIN,
         .field = {STREAM, NUM("tokens", 4, 4), NUM("position", 8, 4)}),
    KIND(SHM_EVENT_PASS_END, "pass_end", .span = "pass", .phase = SHM_EVENT_END,
         .field = {STREAM, WORD("result", 4, 1, RESULT)}),
    KIND(SHM_EVENT_PUBLISH, "publish", .field = {STREAM, LAYER, NUM("routed", 6, 2)}),
    KIND(SHM_EVENT_RELEASE, "release", .field = {STREAM, LAYER, NUM("groups", 6, 2)}),
    KIND(SHM_EVENT_WAIT_BEGIN, "wait_begin", .span = "wait", .phase = SHM_EVENT_BEGIN,
         .field = {STREAM, LAYER, NUM("group", 6, 2), WORD("for", 8, 1, WAIT)}),
    KIND(SHM_EVENT_WAIT_END, "wait_end", .span = "wait", .phase = SHM_EVENT_END,
         .field = {STREAM, NUM("errno", 4, 4)}),
};

static const char *name_of(uint32_t set, uint32_t value)
{
    static const char *const states[] = {NULL, "starting", "loading", "serving", "draining", "stopped"};
    static const char *const sleeps[] = {NULL,          "a release",       "a landing", "the routing set",
                                         "the loading", "the last release"};
    static const char *const waits[] = {NULL, "a group", "the report"};
    static const char *const no_yes[] = {"no", "yes"};
    switch ((enum set)set) {
    case STATE:
        return value < LENGTH(states) ? states[value] : NULL;
    case POLICY:
        return value <= SHM_POLICY_DEMAND ? shm_policy_name(value) : NULL;
    case ORDER:
        return value <= SHM_ORDER_PREDICTED ? shm_order_name(value) : NULL;
    case RESULT:
        return value <= SHM_RESULT_FAILED ? shm_result_name(value) : NULL;
    case HELD_OFF:
        return value <= SHM_HELD_PREDICTION ? shm_held_off_name(value) : NULL;
    case SLEEP:
        return value < LENGTH(sleeps) ? sleeps[value] : NULL;
    case WAIT:
        return value < LENGTH(waits) ? waits[value] : NULL;
    case NO_YES:
        return value < LENGTH(no_yes) ? no_yes[value] : NULL;
    case NO_SET:
    case SET_COUNT:
        break;
    }
    return NULL;
}

#define SET_VALUES 8 /* looked through in each set */

/* Fills rows (NULL: only counts). */
static uint32_t make_values(struct shm_event_value *rows)
{
    uint32_t n = 0;
    for (uint32_t set = 1; set < SET_COUNT; set++)
        for (uint32_t value = 0; value < SET_VALUES; value++) {
            const char *name = name_of(set, value);
            if (!name)
                continue;
            if (rows) {
                rows[n] = (struct shm_event_value){.set = set, .value = value};
                strncpy(rows[n].name, name, sizeof rows[n].name - 1);
            }
            n++;
        }
    return n;
}

/* ---- layout, writing ---- */

static uint64_t infos_at(void)
{
    return ALIGN(sizeof(struct shm_event_segment));
}
static uint64_t values_at(void)
{
    return ALIGN(infos_at() + sizeof infos);
}
static uint64_t rings_at(void)
{
    return ALIGN(values_at() + make_values(NULL) * sizeof(struct shm_event_value));
}
static uint64_t events_at(uint32_t rings)
{
    return (rings_at() + rings * sizeof(struct shm_event_ring) + PAGE - 1) & ~(PAGE - 1);
}

uint64_t shm_event_bytes(const uint32_t *capacities, uint32_t rings)
{
    uint64_t bytes = events_at(rings);
    for (uint32_t i = 0; i < rings; i++)
        bytes += capacities[i] * EVENT;
    return bytes;
}

void shm_event_init(void *base, const char *program, const uint32_t *capacities, uint32_t rings, uint32_t pid,
                    uint64_t start)
{
    struct shm_event_segment *s = base;
    shm_header_init(&s->header, SHM_EVENT_MAGIC, shm_event_bytes(capacities, rings), pid, start);
    strncpy(s->program, program, sizeof s->program - 1);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    s->realtime_ns = now.tv_sec * INT64_C(1000000000) + now.tv_nsec - (int64_t)shm_now_ns();
    s->infos = LENGTH(infos);
    s->info_bytes = sizeof infos[0];
    s->infos_offset = infos_at();
    s->values = make_values(NULL);
    s->value_bytes = sizeof(struct shm_event_value);
    s->values_offset = values_at();
    s->rings = rings;
    s->ring_bytes = sizeof(struct shm_event_ring);
    s->rings_offset = rings_at();
    s->event_bytes = EVENT;
    struct shm_event_info *info = (void *)((uint8_t *)base + s->infos_offset);
    memcpy(info, infos, sizeof infos);
    for (uint32_t i = 0; i < LENGTH(infos); i++)
        while (info[i].fields < SHM_EVENT_FIELDS && info[i].field[info[i].fields].bytes)
            info[i].fields++;
    make_values((void *)((uint8_t *)base + s->values_offset));
    struct shm_event_ring *ring = (void *)((uint8_t *)base + s->rings_offset);
    uint64_t at = events_at(rings);
    for (uint32_t i = 0; i < rings; i++) {
        ring[i].offset = at;
        ring[i].capacity = capacities[i];
        at += capacities[i] * EVENT;
    }
}

static struct shm_event_ring *own_ring(const void *base, uint32_t ring)
{
    const struct shm_event_segment *s = base;
    return (struct shm_event_ring *)((uint8_t *)base + s->rings_offset) + ring;
}

void shm_event_place(const void *base, uint32_t ring, uint64_t *ret_offset, uint64_t *ret_bytes)
{
    const struct shm_event_ring *r = own_ring(base, ring);
    *ret_offset = r->offset;
    *ret_bytes = r->capacity * EVENT;
}

void shm_event_own(void *base, uint32_t ring, const char *thread, const char *name, uint32_t pid,
                   uint64_t session, struct shm_event_writer *ret_writer)
{
    struct shm_event_ring *r = own_ring(base, ring);
    uint32_t owned = atomic_load_explicit(&r->owned, memory_order_relaxed);
    atomic_store_explicit(&r->owned, owned + 1, memory_order_relaxed);
    /* pairs with the fence in shm_event_owner_at: who saw any of what follows sees the odd number */
    atomic_thread_fence(memory_order_release);
    memset(r->thread, 0, sizeof r->thread);
    memset(r->name, 0, sizeof r->name);
    strncpy(r->thread, thread, sizeof r->thread - 1);
    strncpy(r->name, name, sizeof r->name - 1);
    r->pid = pid;
    r->session = session;
    uint64_t next = atomic_load_explicit(&r->next, memory_order_relaxed);
    atomic_store_explicit(&r->first, next, memory_order_relaxed);
    /* release, pairs with the reader's acquire */
    atomic_store_explicit(&r->owned, owned + 2, memory_order_release);
    *ret_writer = (struct shm_event_writer){.ring = r,
                                            .events = (_Atomic uint64_t *)((uint8_t *)base + r->offset),
                                            .next = next,
                                            .mask = r->capacity - 1};
}

/* ---- reading ---- */

static bool inside(uint64_t offset, uint64_t n, uint64_t each, uint64_t bytes)
{
    return offset <= bytes && offset % 8 == 0 && each % 8 == 0 && n * each <= bytes - offset;
}

int shm_event_open(const void *base, uint64_t bytes, const char *name, struct shm_event_view *ret_view,
                   struct shm_error *err)
{
    struct shm_event_view v = {.base = base, .bytes = bytes};
    if (bytes < sizeof v.head || bytes > SHM_EVENT_SEGMENT_MAX)
        return shm_error_set(err, EBADMSG, "%s: %llu bytes cannot be a segment of events", name,
                             (unsigned long long)bytes);
    int rc = shm_header_check(base, SHM_EVENT_MAGIC, bytes, name, err);
    if (rc)
        return rc;
    memcpy(&v.head, base, sizeof v.head); /* once: the writer may be anybody */
    const struct shm_event_segment *h = &v.head;
    if (h->event_bytes != EVENT)
        return shm_error_set(err, EPROTO,
                             "%s: events of %u bytes, this program knows %zu: use matching versions", name,
                             h->event_bytes, EVENT);
    const char *bad = NULL;
    if (h->infos > SHM_EVENT_KINDS_MAX || h->info_bytes < sizeof(struct shm_event_info) ||
        !inside(h->infos_offset, h->infos, h->info_bytes, bytes))
        bad = "kinds";
    if (h->values > SHM_EVENT_VALUES_MAX || h->value_bytes < sizeof(struct shm_event_value) ||
        !inside(h->values_offset, h->values, h->value_bytes, bytes))
        bad = "values";
    if (h->rings > SHM_EVENT_RINGS_MAX || h->ring_bytes < sizeof(struct shm_event_ring) ||
        !inside(h->rings_offset, h->rings, h->ring_bytes, bytes))
        bad = "rings";
    if (bad)
        return shm_error_set(err, EBADMSG, "%s: its table of %s does not fit in its %llu bytes: damaged",
                             name, bad, (unsigned long long)bytes);
    shm_event_text_check(v.head.program, sizeof v.head.program);
    *ret_view = v;
    return 0;
}

void shm_event_text_check(char *text, size_t capacity)
{
    text[capacity - 1] = '\0';
    for (size_t i = 0; i < capacity && text[i]; i++)
        if (text[i] < 0x20 || text[i] > 0x7e || text[i] == '"' || text[i] == '\\')
            text[i] = '?';
}

void shm_event_info_check(struct shm_event_info *info)
{
    shm_event_text_check(info->name, sizeof info->name);
    shm_event_text_check(info->span, sizeof info->span);
    if (!info->name[0])
        memcpy(info->name, "?", 2);
    if (!info->span[0])
        memcpy(info->span, "?", 2);
    uint32_t n = info->fields < SHM_EVENT_FIELDS ? info->fields : SHM_EVENT_FIELDS, kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct shm_event_field f = info->field[i];
        shm_event_text_check(f.name, sizeof f.name);
        bool size = f.bytes == 1 || f.bytes == 2 || f.bytes == 4 || f.bytes == 8;
        if (size && f.offset + f.bytes <= 16 && f.name[0])
            info->field[kept++] = f;
    }
    info->fields = (uint8_t)kept;
    bool timed = kept && info->field[0].offset == 0 && info->field[0].bytes == 8;
    if (info->phase > SHM_EVENT_SPAN || (info->phase == SHM_EVENT_SPAN && !timed))
        info->phase = SHM_EVENT_INSTANT;
}

void shm_event_info_at(const struct shm_event_view *v, uint32_t index, struct shm_event_info *ret_info)
{
    memcpy(ret_info, v->base + v->head.infos_offset + (uint64_t)index * v->head.info_bytes, sizeof *ret_info);
    shm_event_info_check(ret_info);
}

void shm_event_value_at(const struct shm_event_view *v, uint32_t index, struct shm_event_value *ret_value)
{
    memcpy(ret_value, v->base + v->head.values_offset + (uint64_t)index * v->head.value_bytes,
           sizeof *ret_value);
    shm_event_text_check(ret_value->name, sizeof ret_value->name);
}

static const struct shm_event_ring *ring_at(const struct shm_event_view *v, uint32_t ring)
{
    return (const void *)(v->base + v->head.rings_offset + (uint64_t)ring * v->head.ring_bytes);
}

int shm_event_owner_at(const struct shm_event_view *v, uint32_t ring, struct shm_event_owner *ret_owner)
{
    const struct shm_event_ring *r = ring_at(v, ring);
    /* acquire, pairs with the release at the end of shm_event_own */
    struct shm_event_owner o = {.owned = atomic_load_explicit(&r->owned, memory_order_acquire)};
    if (!o.owned)
        return -ENOENT;
    if (o.owned % 2)
        return -EAGAIN;
    o.offset = r->offset;
    o.capacity = r->capacity;
    o.first = atomic_load_explicit(&r->first, memory_order_relaxed);
    o.session = r->session;
    o.pid = r->pid;
    memcpy(o.thread, r->thread, sizeof o.thread);
    memcpy(o.name, r->name, sizeof o.name);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&r->owned, memory_order_relaxed) != o.owned)
        return -EAGAIN;
    if (!o.capacity || o.capacity & (o.capacity - 1) || o.capacity > SHM_EVENT_RING_MAX ||
        !inside(o.offset, o.capacity, EVENT, v->bytes))
        return -EBADMSG;
    shm_event_text_check(o.thread, sizeof o.thread);
    shm_event_text_check(o.name, sizeof o.name);
    *ret_owner = o;
    return 0;
}

/* Event `number`, if it is still there and whole. */
static bool read_one(const _Atomic uint64_t *events, uint64_t mask, uint64_t number, struct shm_event *ret)
{
    const _Atomic uint64_t *e = events + (number & mask) * SHM_EVENT_WORDS;
    /* acquire, pairs with the last release of the event's words: it is whole */
    uint64_t word = atomic_load_explicit(&e[0], memory_order_acquire);
    if (word >> 8 != ((number + 1) & UINT64_MAX >> 8))
        return false;
    /* acquire, pairs with the writer's release of each: who sees a newer one sees the first word gone */
    ret->at_ns = atomic_load_explicit(&e[1], memory_order_acquire);
    ret->field[0] = atomic_load_explicit(&e[2], memory_order_acquire);
    ret->field[1] = atomic_load_explicit(&e[3], memory_order_acquire);
    ret->number = number;
    ret->kind = word & 0xff;
    return atomic_load_explicit(&e[0], memory_order_relaxed) == word;
}

uint32_t shm_event_read(const struct shm_event_view *v, uint32_t ring, const struct shm_event_owner *o,
                        uint64_t *next, struct shm_event *ret_events, uint32_t n, uint64_t *lost)
{
    const _Atomic uint64_t *events = (const void *)(v->base + o->offset);
    /* acquire, pairs with the writer's release: events below it were written */
    uint64_t end = atomic_load_explicit(&ring_at(v, ring)->next, memory_order_acquire);
    uint64_t at = *next > o->first ? *next : o->first;
    if (at > end) /* no honest writer goes back */
        at = end;
    if (end - at > o->capacity) {
        *lost += end - at - o->capacity;
        at = end - o->capacity;
    }
    uint32_t got = 0;
    for (; at < end && got < n; at++) {
        if (read_one(events, o->capacity - 1, at, &ret_events[got]))
            got++;
        else
            ++*lost;
    }
    *next = at;
    return got;
}

uint64_t shm_event_field(const struct shm_event *e, const struct shm_event_field *f)
{
    uint64_t value = 0;
    memcpy(&value, (const uint8_t *)e->field + f->offset, f->bytes);
    return value;
}
