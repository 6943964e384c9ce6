/* SPDX-License-Identifier: MIT */
/*
 * Mutants of the walk: each breaks one rule of exd_walk.c, in test builds
 * only (-DEXD_WALK_MUTANTS). The simulation must notice every one.
 */
#ifndef SIM_MUTANT_H
#define SIM_MUTANT_H

enum sim_mutant {
    SIM_MUTANT_NONE,
    SIM_MUTANT_DROP_BEFORE_PUBLISH,
    SIM_MUTANT_DROP_ROUTED,
    SIM_MUTANT_NO_RECHECK,
    SIM_MUTANT_RING_OVERRUN,
    SIM_MUTANT_DEPTH_PLUS_ONE,
    SIM_MUTANT_WRONG_SLOT,
    SIM_MUTANT_COPY_TWICE,
    SIM_MUTANT_SIGNAL_BEFORE_COPY,
    SIM_MUTANT_DROPPED_GROUP_NOT_SIGNALLED,
    SIM_MUTANT_FORGET_UNUSED_GROUPS,
    SIM_MUTANT_STALE_TABLE,
    SIM_MUTANT_DEMAND_BLIND,
    SIM_MUTANT_FULL_LOOKS_AT_GATE,
    SIM_MUTANT_KEEP_SLOTS,
    SIM_MUTANT_COUNT
};

extern enum sim_mutant sim_mutant;

#endif
