/* SPDX-License-Identifier: MIT */
/*
 * Checker of the simulation: an independent account of one stream that says
 * after every event and every step whether the invariants of DESIGN 7 hold.
 *
 * It knows nothing of how the walk decides; it sees only what goes through
 * the walk's environment and what link, consumer and publisher do. The first
 * violation is kept (invariant number and text), later ones are ignored.
 */
#ifndef SIM_CHECKER_H
#define SIM_CHECKER_H

#include "expertd/exd_walk.h"
#include "shm/shm_worker.h"

#include <stdbool.h>
#include <stdint.h>

#define SIM_LAYERS_MAX  6
#define SIM_EXPERTS_MAX 64 /* one 64-bit word per layer */
#define SIM_RING_MAX    512
#define SIM_ENTRIES_MAX (SIM_LAYERS_MAX * SIM_EXPERTS_MAX)
#define SIM_POISON      0xffffffffu

/* Rules beside the ten invariants. */
#define SIM_RULE_GATE   11 /* the gate was closed at the step's start, still issued */
#define SIM_RULE_FULL   12 /* full policy ran gate code */
#define SIM_RULE_COUNTS 13 /* counters, waits and positions that are not true */

/* A stream's given facts. */
struct sim_stream {
    uint32_t layers, experts, ring, group_entries, groups_per_layer;
    uint32_t policy, order, depth;
    uint32_t number; /* of the stream, part of every stamp */
    uint64_t resident[SIM_LAYERS_MAX];
    uint64_t routed[SIM_LAYERS_MAX];
};

struct sim_slot {
    uint64_t group;
    uint8_t layer, expert;
    bool used, held; /* ever issued to; issued and its group not released */
};

struct sim_checker {
    const struct sim_stream *s;
    /* The walk's doings. */
    uint64_t decided[SIM_LAYERS_MAX], issued[SIM_LAYERS_MAX], dropped[SIM_LAYERS_MAX];
    uint32_t table[SIM_LAYERS_MAX][SIM_EXPERTS_MAX];
    uint32_t issue_slot[SIM_LAYERS_MAX][SIM_EXPERTS_MAX];
    uint64_t issue_group[SIM_LAYERS_MAX][SIM_EXPERTS_MAX];
    uint32_t index_of[SIM_LAYERS_MAX][SIM_EXPERTS_MAX]; /* entry number under the index order */
    uint64_t entry_group[SIM_ENTRIES_MAX];              /* group of entry k, or UINT64_MAX: none (yet) */
    uint8_t group_count[SIM_ENTRIES_MAX];               /* issued entries of a group */
    struct sim_slot slot[SIM_RING_MAX];
    uint64_t entries, n_issued, n_dropped, n_landed, n_signals, outstanding_max;
    uint64_t signalled, last_issue_group;
    uint32_t held;
    /* The world's doings. */
    uint64_t landed_groups, released;
    uint64_t published, visible; /* bit per layer; visible: as of the step's start */
    uint64_t loaded[SIM_LAYERS_MAX];
    uint64_t read[SIM_LAYERS_MAX];
    /* As of the step's start, to judge what a step says it waits for. */
    uint64_t before_released, before_landed;
    uint64_t before_issued, before_decisions;
    bool before_unloaded;
    uint64_t steps, steps_max, decisions;
    uint32_t last_layer;
    bool done;
    /* Verdict. */
    int invariant; /* 0: nothing found */
    char text[256];
};

/* Begins a stream; the verdict of the one before is kept. */
void sim_checker_begin(struct sim_checker *c, const struct sim_stream *s, const uint64_t *loaded);
uint32_t sim_stamp(const struct sim_stream *s, uint32_t layer, uint32_t expert);

/* Around each step of the walk. */
void sim_checker_step_begin(struct sim_checker *c);
void sim_checker_step_end(struct sim_checker *c, enum exd_step step, const struct exd_walk *walk);

/* Calls of the walk. */
void sim_checker_gate_called(struct sim_checker *c, const char *which);
void sim_checker_decide(struct sim_checker *c, uint32_t layer, uint32_t expert, uint32_t state,
                        uint32_t group, uint32_t slot);
/* certain: what the walk says; sure: the expectation is as good as a publication. */
void sim_checker_issue(struct sim_checker *c, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot,
                       uint64_t group, bool certain, bool sure);
void sim_checker_signal(struct sim_checker *c, uint64_t groups);

/* Moves of the world. */
void sim_checker_load(struct sim_checker *c, uint32_t layer, uint32_t expert);
void sim_checker_publish(struct sim_checker *c, uint32_t layer);
void sim_checker_land(struct sim_checker *c);
void sim_checker_land_signal(struct sim_checker *c, uint64_t groups);
void sim_checker_read(struct sim_checker *c, uint32_t layer, uint32_t expert, uint64_t group, uint32_t slot,
                      uint32_t content, bool again);
void sim_checker_layer_end(struct sim_checker *c, uint32_t layer);
void sim_checker_release(struct sim_checker *c, uint64_t group);

/* After the last release of a stream that ran to its end. */
void sim_checker_end(struct sim_checker *c, const struct exd_walk *walk);

void sim_checker_fail(struct sim_checker *c, int invariant, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#endif
