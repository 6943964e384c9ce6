/* SPDX-License-Identifier: MIT */
#include "sim_checker.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define BIT(i) (UINT64_C(1) << (i))

void sim_checker_fail(struct sim_checker *c, int invariant, const char *fmt, ...)
{
    if (c->invariant)
        return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->text, sizeof c->text, fmt, ap);
    va_end(ap);
    c->invariant = invariant;
}

uint32_t sim_stamp(const struct sim_stream *s, uint32_t layer, uint32_t expert)
{
    return (s->number & 0xfff) << 16 | layer << 8 | expert;
}

static uint64_t all(const struct sim_stream *s)
{
    return s->experts == 64 ? ~UINT64_C(0) : BIT(s->experts) - 1;
}

static bool gated(const struct sim_stream *s)
{
    return s->policy != SHM_POLICY_FULL;
}

/* Does a dropped expert take an entry number? Under index it does, so that slots equal the full walk's; but
 * not on demand, where a consumer may hold all of a layer's. */
static bool numbered_by_index(const struct sim_stream *s)
{
    return !gated(s) || (s->order == SHM_ORDER_INDEX && s->policy != SHM_POLICY_DEMAND);
}

/* Most copies outstanding after a copy that is certain, or a guess. */
static uint64_t limit(const struct sim_stream *s, bool certain)
{
    if (certain)
        return s->depth > EXD_WALK_CERTAIN_MAX ? s->depth : EXD_WALK_CERTAIN_MAX;
    return s->order != SHM_ORDER_INDEX && s->depth > EXD_WALK_BLIND_MAX ? EXD_WALK_BLIND_MAX : s->depth;
}

void sim_checker_begin(struct sim_checker *c, const struct sim_stream *s, const uint64_t *loaded)
{
    uint32_t slots = s->ring < SIM_RING_MAX ? s->ring : SIM_RING_MAX;
    uint32_t k = 0;
    c->s = s;
    for (uint32_t l = 0; l < s->layers; l++) {
        c->decided[l] = c->issued[l] = c->dropped[l] = c->read[l] = 0;
        c->loaded[l] = loaded[l];
        for (uint32_t e = 0; e < s->experts; e++) {
            c->index_of[l][e] = k;
            if (!(s->resident[l] & BIT(e)))
                c->entry_group[k++] = UINT64_MAX;
        }
    }
    c->entries = k;
    memset(c->group_count, 0, s->layers * s->groups_per_layer);
    memset(c->slot, 0, slots * sizeof c->slot[0]);
    c->n_issued = c->n_dropped = c->n_landed = c->n_signals = c->outstanding_max = 0;
    c->signalled = c->last_issue_group = 0;
    c->held = 0;
    c->landed_groups = c->released = c->published = c->visible = 0;
    c->steps = c->decisions = 0;
    c->last_layer = 0;
    c->done = false;
    /* Each step that does not wait decides something: an entry, a group's signal or a layer's end. */
    c->steps_max = 4u * s->layers * (s->experts + s->groups_per_layer) + 16;
}

void sim_checker_step_begin(struct sim_checker *c)
{
    c->visible = c->published;
    c->before_released = c->released;
    c->before_landed = c->n_landed;
    c->before_issued = c->n_issued;
    c->before_decisions = c->decisions;
    c->before_unloaded = false;
    for (uint32_t l = 0; l < c->s->layers; l++)
        if (~c->loaded[l] & ~c->decided[l] & ~c->s->resident[l] & all(c->s))
            c->before_unloaded = true;
}

void sim_checker_step_end(struct sim_checker *c, enum exd_step step, const struct exd_walk *walk)
{
    const struct sim_stream *s = c->s;
    uint32_t layer;
    uint64_t entry;
    exd_walk_position(walk, &layer, &entry);

    if (c->held > s->ring)
        sim_checker_fail(c, 4, "%u slots held of %u", c->held, s->ring);
    if (c->released > c->landed_groups || c->landed_groups > c->signalled)
        sim_checker_fail(c, 5, "released %llu, landed %llu, signalled %llu groups",
                         (unsigned long long)c->released, (unsigned long long)c->landed_groups,
                         (unsigned long long)c->signalled);
    if (step == EXD_STEP_AGAIN && ++c->steps > c->steps_max)
        sim_checker_fail(c, 8, "%llu steps that wait for nothing, at most %llu decisions to make",
                         (unsigned long long)c->steps, (unsigned long long)c->steps_max);
    if (layer < c->last_layer || (layer > s->layers))
        sim_checker_fail(c, SIM_RULE_COUNTS, "position: layer %u after layer %u, stream has %u", layer,
                         c->last_layer, s->layers);
    c->last_layer = layer;
    if (c->n_issued - c->before_issued > 1)
        sim_checker_fail(c, SIM_RULE_COUNTS, "%llu copies issued in one step",
                         (unsigned long long)(c->n_issued - c->before_issued));
    bool waits = step >= EXD_STEP_WAIT_SLOT && step <= EXD_STEP_WAIT_BLOB;
    if (waits && c->n_issued != c->before_issued)
        sim_checker_fail(c, SIM_RULE_COUNTS, "%s after issuing a copy", exd_step_name(step));
    /* What a step says it waits for must have been so when the step began or ended. */
    if (step == EXD_STEP_WAIT_SLOT && !c->n_issued && !c->n_dropped)
        sim_checker_fail(c, 8, "waits for a slot, none was ever used");
    if (step == EXD_STEP_WAIT_SLOT && c->before_released >= c->signalled && c->released >= c->signalled)
        sim_checker_fail(c, 9,
                         "the ring does not advance: waits for a slot, all %llu signalled groups released",
                         (unsigned long long)c->signalled);
    uint64_t least = limit(s, c->visible & BIT(layer));
    if (step == EXD_STEP_WAIT_DEPTH && (!gated(s) || c->before_issued - c->before_landed < least))
        sim_checker_fail(c, 8, "waits for room with %llu of %llu outstanding, policy %u",
                         (unsigned long long)(c->before_issued - c->before_landed), (unsigned long long)least,
                         s->policy);
    if (step == EXD_STEP_WAIT_PUBLISH && (!gated(s) || (layer < s->layers && (c->visible & BIT(layer)))))
        sim_checker_fail(c, 8, "waits for the routing set of layer %u, policy %u, published", layer,
                         s->policy);
    if (step == EXD_STEP_WAIT_BLOB && !c->before_unloaded)
        sim_checker_fail(c, 8, "waits for a blob, all are loaded");
    if (step == EXD_STEP_DONE && c->signalled != (uint64_t)s->layers * s->groups_per_layer)
        sim_checker_fail(c, 9, "done with %llu of %u groups signalled", (unsigned long long)c->signalled,
                         s->layers * s->groups_per_layer);
    if (c->done && (step != EXD_STEP_DONE || c->decisions != c->before_decisions))
        sim_checker_fail(c, 8, "did something after the end: %s", exd_step_name(step));
    if (step == EXD_STEP_DONE)
        c->done = true;
}

void sim_checker_gate_called(struct sim_checker *c, const char *which)
{
    if (!gated(c->s))
        sim_checker_fail(c, SIM_RULE_FULL, "full policy called %s()", which);
}

static bool known(struct sim_checker *c, uint32_t layer, uint32_t expert, const char *what)
{
    if (layer < c->s->layers && expert < c->s->experts)
        return true;
    sim_checker_fail(c, 8, "%s of layer %u expert %u, outside the stream", what, layer, expert);
    return false;
}

void sim_checker_decide(struct sim_checker *c, uint32_t layer, uint32_t expert, uint32_t state,
                        uint32_t group, uint32_t slot)
{
    const struct sim_stream *s = c->s;
    if (!known(c, layer, expert, "decision"))
        return;
    if (state == SHM_ENTRY_NONE) { /* the row is reset before it is used */
        if (c->decided[layer] & BIT(expert) || c->signalled > (uint64_t)layer * s->groups_per_layer)
            sim_checker_fail(c, 5, "layer %u expert %u reset while the row is in use", layer, expert);
        c->table[layer][expert] = 0;
        return;
    }
    c->decisions++;
    if (c->decided[layer] & BIT(expert))
        sim_checker_fail(c, 1, "layer %u expert %u decided twice", layer, expert);
    c->decided[layer] |= BIT(expert);
    c->table[layer][expert] = shm_entry_make(state, group, slot);
    bool resident = s->resident[layer] & BIT(expert);
    if (resident != (state == SHM_ENTRY_RESIDENT))
        sim_checker_fail(c, 1, "layer %u expert %u: state %u, resident %d", layer, expert, state, resident);
    if (state == SHM_ENTRY_SLOT) {
        uint64_t number = (uint64_t)layer * s->groups_per_layer + group;
        if (group >= s->groups_per_layer || slot >= s->ring)
            sim_checker_fail(c, 5, "layer %u expert %u: group %u, slot %u", layer, expert, group, slot);
        else if (number < c->signalled)
            sim_checker_fail(c, 5, "layer %u expert %u joins group %u, which was signalled", layer, expert,
                             group);
    }
    if (state == SHM_ENTRY_DROPPED) {
        c->n_dropped++;
        c->dropped[layer] |= BIT(expert);
        if (!gated(s))
            sim_checker_fail(c, 2, "full policy dropped layer %u expert %u", layer, expert);
        if (c->issued[layer] & BIT(expert))
            sim_checker_fail(c, 2, "layer %u expert %u dropped after its copy was issued", layer, expert);
        if (!(c->published & BIT(layer)))
            sim_checker_fail(c, 2, "layer %u expert %u dropped before the layer is published", layer, expert);
        if (s->routed[layer] & BIT(expert))
            sim_checker_fail(c, 2, "layer %u expert %u dropped, it has a token", layer, expert);
    }
}

static void check_entry(struct sim_checker *c, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot)
{
    const struct sim_stream *s = c->s;
    uint64_t expect = numbered_by_index(s) ? c->index_of[layer][expert] : c->n_issued;
    if (entry != expect)
        sim_checker_fail(c, 1, "layer %u expert %u is entry %llu, expected %llu", layer, expert,
                         (unsigned long long)entry, (unsigned long long)expect);
    if (slot != entry % s->ring)
        sim_checker_fail(c, 1, "entry %llu in slot %u, ring %u", (unsigned long long)entry, slot, s->ring);
    /* Strictly by number: entry k - ring issued or dropped, and what it was in released. */
    if (entry >= s->ring && c->entry_group[entry - s->ring] != UINT64_MAX &&
        c->entry_group[entry - s->ring] >= c->released)
        sim_checker_fail(c, 4, "entry %llu issued, but entry %llu of group %llu is not released (%llu are)",
                         (unsigned long long)entry, (unsigned long long)(entry - s->ring),
                         (unsigned long long)c->entry_group[entry - s->ring],
                         (unsigned long long)c->released);
    if (c->slot[slot].held)
        sim_checker_fail(c, 4, "slot %u overwritten by layer %u expert %u while group %llu holds it", slot,
                         layer, expert, (unsigned long long)c->slot[slot].group);
}

void sim_checker_issue(struct sim_checker *c, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot,
                       uint64_t group, bool certain, bool sure)
{
    const struct sim_stream *s = c->s;
    if (!known(c, layer, expert, "copy"))
        return;
    if (entry >= SIM_ENTRIES_MAX || slot >= s->ring || group / s->groups_per_layer != layer) {
        sim_checker_fail(c, 5, "layer %u expert %u: entry %llu, slot %u, group %llu", layer, expert,
                         (unsigned long long)entry, slot, (unsigned long long)group);
        return;
    }
    c->decisions++;
    uint64_t bit = BIT(expert);
    if (c->issued[layer] & bit)
        sim_checker_fail(c, 1, "layer %u expert %u copied twice", layer, expert);
    if (s->resident[layer] & bit)
        sim_checker_fail(c, 1, "layer %u expert %u copied, it is resident", layer, expert);
    if (c->dropped[layer] & bit)
        sim_checker_fail(c, 2, "layer %u expert %u copied after it was dropped", layer, expert);
    if (!(c->loaded[layer] & bit))
        sim_checker_fail(c, 1, "layer %u expert %u copied before it was loaded", layer, expert);
    check_entry(c, layer, expert, entry, slot);
    if (group < c->signalled)
        sim_checker_fail(c, 5, "layer %u expert %u copied into group %llu, which was signalled", layer,
                         expert, (unsigned long long)group);
    if (group < c->last_issue_group)
        sim_checker_fail(c, 5, "group %llu after group %llu", (unsigned long long)group,
                         (unsigned long long)c->last_issue_group);
    if (++c->group_count[group] > s->group_entries || c->group_count[group] > SHM_GROUP_MAX)
        sim_checker_fail(c, 5, "group %llu has %u entries, at most %u", (unsigned long long)group,
                         c->group_count[group], s->group_entries);
    if (gated(s) && (c->visible & BIT(layer)) && !(s->routed[layer] & bit))
        sim_checker_fail(c, SIM_RULE_GATE, "layer %u expert %u copied, though published without a token",
                         layer, expert);
    if (s->policy == SHM_POLICY_DEMAND && !(c->published & BIT(layer)))
        sim_checker_fail(c, 3, "layer %u expert %u copied on demand before the layer is published", layer,
                         expert);
    uint64_t outstanding = c->n_issued - c->n_landed;
    if (certain && gated(s) && !sure && !(c->published & BIT(layer)))
        sim_checker_fail(c, 3, "layer %u expert %u copied as certain, it is a guess", layer, expert);
    if (gated(s) && outstanding >= limit(s, certain))
        sim_checker_fail(c, 3, "layer %u expert %u copied with %llu copies outstanding, at most %llu for %s",
                         layer, expert, (unsigned long long)outstanding,
                         (unsigned long long)limit(s, certain), certain ? "a certain one" : "a guess");
    c->issued[layer] |= bit;
    c->issue_slot[layer][expert] = slot;
    c->issue_group[layer][expert] = group;
    c->entry_group[entry] = group;
    c->last_issue_group = group;
    if (!c->slot[slot].held)
        c->held++;
    c->slot[slot] = (struct sim_slot){group, (uint8_t)layer, (uint8_t)expert, true, true};
    c->n_issued++;
    if (c->n_issued - c->n_landed > c->outstanding_max)
        c->outstanding_max = c->n_issued - c->n_landed;
}

/* A layer all of whose groups are signalled must be wholly told by its table row. */
static void check_row(struct sim_checker *c, uint32_t layer)
{
    const struct sim_stream *s = c->s;
    uint64_t streamed = all(s) & ~s->resident[layer];
    uint64_t told = c->decided[layer];
    if (told != all(s))
        sim_checker_fail(c, 5, "layer %u signalled whole, experts %llx are not in the table", layer,
                         (unsigned long long)(all(s) & ~told));
    uint64_t missing = s->routed[layer] & streamed & ~c->issued[layer];
    if (missing)
        sim_checker_fail(c, 1, "layer %u signalled whole, routed experts %llx were not copied", layer,
                         (unsigned long long)missing);
    if ((c->issued[layer] | c->dropped[layer]) != streamed)
        sim_checker_fail(c, 9, "layer %u signalled whole, experts %llx neither copied nor dropped", layer,
                         (unsigned long long)(streamed & ~c->issued[layer] & ~c->dropped[layer]));
}

void sim_checker_signal(struct sim_checker *c, uint64_t groups)
{
    const struct sim_stream *s = c->s;
    c->decisions++;
    c->n_signals++;
    if (groups <= c->signalled || groups > (uint64_t)s->layers * s->groups_per_layer) {
        sim_checker_fail(c, 5, "signal of %llu groups after %llu, stream has %u", (unsigned long long)groups,
                         (unsigned long long)c->signalled, s->layers * s->groups_per_layer);
        return;
    }
    uint32_t first = (uint32_t)(c->signalled / s->groups_per_layer);
    uint32_t last = (uint32_t)((groups - 1) / s->groups_per_layer);
    for (uint32_t l = first; l <= last; l++) {
        for (uint64_t m = all(s) & ~s->resident[l]; m; m &= m - 1) {
            uint32_t e = (uint32_t)__builtin_ctzll(m);
            uint32_t word = c->table[l][e], state = shm_entry_state(word);
            bool issued = c->issued[l] & BIT(e);
            uint64_t group = (uint64_t)l * s->groups_per_layer + shm_entry_group(word);
            if (issued && c->issue_group[l][e] < groups &&
                (state != SHM_ENTRY_SLOT || group != c->issue_group[l][e] ||
                 shm_entry_slot(word) != c->issue_slot[l][e]))
                sim_checker_fail(c, 5,
                                 "signal of %llu groups: table says state %u group %u slot %u for layer %u "
                                 "expert %u, copied to slot %u",
                                 (unsigned long long)groups, state, shm_entry_group(word),
                                 shm_entry_slot(word), l, e, c->issue_slot[l][e]);
            if (!issued && state == SHM_ENTRY_SLOT && group < groups)
                sim_checker_fail(c, 5,
                                 "signal of %llu groups: the table has layer %u expert %u in group %llu, no "
                                 "copy was issued",
                                 (unsigned long long)groups, l, e, (unsigned long long)group);
        }
        if ((uint64_t)(l + 1) * s->groups_per_layer <= groups)
            check_row(c, l);
    }
    c->signalled = groups;
}

void sim_checker_load(struct sim_checker *c, uint32_t layer, uint32_t expert)
{
    c->loaded[layer] |= BIT(expert);
}

void sim_checker_publish(struct sim_checker *c, uint32_t layer)
{
    c->published |= BIT(layer);
}

void sim_checker_land(struct sim_checker *c)
{
    c->n_landed++;
}

void sim_checker_land_signal(struct sim_checker *c, uint64_t groups)
{
    c->landed_groups = groups;
}

void sim_checker_read(struct sim_checker *c, uint32_t layer, uint32_t expert, uint64_t group, uint32_t slot,
                      uint32_t content, bool again)
{
    const struct sim_stream *s = c->s;
    if (!(s->routed[layer] & BIT(expert)))
        sim_checker_fail(c, 7, "layer %u expert %u read, it has no token", layer, expert);
    if (group >= c->landed_groups)
        sim_checker_fail(c, 5, "group %llu read, %llu landed", (unsigned long long)group,
                         (unsigned long long)c->landed_groups);
    if (content != sim_stamp(s, layer, expert))
        sim_checker_fail(c, 1, "layer %u expert %u in slot %u holds %x%s, expected %x", layer, expert, slot,
                         content, again ? " at the end of its use" : "", sim_stamp(s, layer, expert));
    if (again)
        return;
    if (c->read[layer] & BIT(expert))
        sim_checker_fail(c, 1, "layer %u expert %u run twice", layer, expert);
    c->read[layer] |= BIT(expert);
}

void sim_checker_layer_end(struct sim_checker *c, uint32_t layer)
{
    uint64_t want = c->s->routed[layer] & ~c->s->resident[layer];
    if (c->read[layer] != want)
        sim_checker_fail(c, 1, "layer %u ends, experts %llx ran, %llx have tokens", layer,
                         (unsigned long long)c->read[layer], (unsigned long long)want);
}

void sim_checker_release(struct sim_checker *c, uint64_t group)
{
    for (uint32_t i = 0; i < c->s->ring; i++) {
        if (c->slot[i].held && c->slot[i].group <= group) {
            c->slot[i].held = false;
            c->held--;
        }
    }
    c->released = group + 1;
}

void sim_checker_end(struct sim_checker *c, const struct exd_walk *walk)
{
    struct exd_walk_counts n = exd_walk_counts(walk);
    if (c->held || c->n_landed != c->n_issued)
        sim_checker_fail(c, 10, "stream ended with %u slots held, %llu copies not landed", c->held,
                         (unsigned long long)(c->n_issued - c->n_landed));
    if (c->n_issued + c->n_dropped != c->entries || n.entries != c->entries || n.issued != c->n_issued ||
        n.dropped != c->n_dropped || n.signals != c->n_signals)
        sim_checker_fail(c, SIM_RULE_COUNTS,
                         "counts say %llu entries, %llu issued, %llu dropped, %llu signals; seen %llu, %llu, "
                         "%llu, %llu",
                         (unsigned long long)n.entries, (unsigned long long)n.issued,
                         (unsigned long long)n.dropped, (unsigned long long)n.signals,
                         (unsigned long long)c->entries, (unsigned long long)c->n_issued,
                         (unsigned long long)c->n_dropped, (unsigned long long)c->n_signals);
    /* The walk looks after it issued, when some may have landed. */
    if (n.outstanding_max > c->outstanding_max)
        sim_checker_fail(c, SIM_RULE_COUNTS, "counts say %llu outstanding at most, seen %llu",
                         (unsigned long long)n.outstanding_max, (unsigned long long)c->outstanding_max);
}
