/* SPDX-License-Identifier: MIT */
/*
 * Walk: decides which expert is copied next, and which never (DESIGN 7).
 *
 * A state machine that never blocks, does no I/O and knows no clock: each
 * exd_walk_step() makes one decision through the environment, or says what it
 * waits for. The issuer thread runs it over a real link; the simulation runs
 * the same code over a simulated one.
 *
 * Policies: full walks every streamed expert by index and contains no gate at
 * all; routed drops what the gate (the published routing set) shows to be
 * without a token, and looks at it again at every step, so that no decision
 * outlives a wait; demand (below the floor) is routed without a copy ahead of
 * the gate.
 *
 * What bounds the copies outstanding: depth is for guesses, as what is on the
 * link can't be taken back; under recent and predicted EXD_WALK_BLIND_MAX
 * bounds them too. What is certain (the layer is published and the expert
 * routed), or as good as that (expected by so many tokens that such an
 * expectation was never wrong), is issued up to EXD_WALK_CERTAIN_MAX ahead, so
 * that a link can take it in large batches and never waits for the issuer.
 *
 * Orders: index numbers entries as in the file, dropped ones included, so
 * entry k has the same slot under both policies; recent and predicted choose
 * the expert with the highest expected use as late as possible and number
 * entries as they are issued. Where the expectation is confident (a prediction,
 * or one to come) an expert without expected use is not copied blindly.
 *
 * exd_ring.pml is a model of the walk with what is around it, for spin.
 */
#ifndef EXD_WALK_H
#define EXD_WALK_H

#include "shm/shm_error.h"
#include "shm/shm_mask.h"

#include <stdbool.h>
#include <stdint.h>

enum exd_step {
    EXD_STEP_AGAIN,        /* one decision was made */
    EXD_STEP_WAIT_SLOT,    /* until a group is released */
    EXD_STEP_WAIT_DEPTH,   /* until a copy lands */
    EXD_STEP_WAIT_PUBLISH, /* until the layer is published, or a prediction for it (with the layer before) */
    EXD_STEP_WAIT_BLOB,    /* until the expert is loaded from the file */
    EXD_STEP_DONE,         /* every entry decided, every group signalled */
    EXD_STEP_FAILED,       /* an operation of the environment failed: walk->status */
    EXD_STEP_COUNT
};

const char *exd_step_name(enum exd_step step);

/* How far an expectation can be relied on. */
struct exd_trust {
    bool
        confident; /* an expert with 0 is not worth a blind copy: the walk rather waits for the publication */
    uint32_t sure; /* so many expected tokens are as good as a published routing set; 0: nearly everything is
                      routed, whatever is expected; UINT32_MAX: none are */
};

/* The world as the walk sees it. Each call returns at once. Group numbers are
 * relative to the stream: layer * groups_per_layer + group. */
struct exd_walk_env {
    void *ctx;
    /* Groups released by the consumer so far in this stream. */
    uint64_t (*released)(void *ctx);
    /* Copies landed so far in this stream. */
    uint64_t (*landed)(void *ctx);
    /* The layer's routing set once published (a private copy that no peer can change any more), else NULL. */
    const struct shm_mask *(*published)(void *ctx, uint32_t layer);
    /* Expected tokens per expert of a layer, or NULL. Any values; read anew at each choice. */
    const uint32_t *(*expected)(void *ctx, uint32_t layer, struct exd_trust *ret_trust);
    /* Is the blob in the arena? */
    bool (*loaded)(void *ctx, uint32_t layer, uint32_t expert);
    /* Writes the slot-table entry of an expert: SHM_ENTRY_* with the group within the layer and slot. */
    void (*decide)(void *ctx, uint32_t layer, uint32_t expert, uint32_t state, uint32_t group, uint32_t slot);
    /* Enqueues the copy; certain: no guess, more like it may follow. Returns 0 or a negative errno. */
    int (*issue)(void *ctx, uint32_t layer, uint32_t expert, uint64_t entry, uint32_t slot, uint64_t group,
                 bool certain);
    /* Enqueues the signal "groups below `groups` have landed". Returns 0 or a negative errno. */
    int (*signal)(void *ctx, uint64_t groups);
};

struct exd_walk_config {
    uint32_t layers, experts, ring, group_entries, groups_per_layer;
    uint32_t policy;                 /* SHM_POLICY_FULL, _ROUTED or _DEMAND */
    uint32_t order;                  /* SHM_ORDER_INDEX, _RECENT or _PREDICTED */
    uint32_t depth;                  /* of guesses, >= 1; routed and demand only */
    const struct shm_mask *resident; /* [layers], private to expertd, valid during the stream */
};

/* Most copies outstanding when recent or predicted issue one before its layer
 * is published. What is on the link can't be taken back, and a few keep it
 * busy; under index depth alone decides. */
#define EXD_WALK_BLIND_MAX 4u
/* Most copies outstanding when a certain one is issued, or depth if that is more: two batches of a link, so
 * that one is under way while the next is made up. Not the whole ring: a cancelled stream waits for them. */
#define EXD_WALK_CERTAIN_MAX 32u
/* Fewest entries of a group on demand, where the layer has more than twice as many. */
#define EXD_WALK_SHARE_MIN 4u

struct exd_walk_counts {
    uint64_t entries, issued, dropped, signals;
    uint64_t outstanding_max; /* after a guess; under full after any copy */
};

struct exd_walk; /* opaque; memory for the largest stream is allocated once */

/* Allocates for streams of up to layers x experts over `ring` slots. NULL: no memory. */
struct exd_walk *exd_walk_new(uint32_t layers, uint32_t experts, uint32_t ring);
void exd_walk_free(struct exd_walk **walk); /* accepts NULL, nulls */

/* Begins a stream. Returns 0 or -EINVAL (a field outside what was allocated, named in err). */
int exd_walk_start(struct exd_walk *walk, const struct exd_walk_config *config,
                   const struct exd_walk_env *env, struct shm_error *err);

/* Makes at most one decision. After DONE or FAILED it returns the same again. */
enum exd_step exd_walk_step(struct exd_walk *walk);

/* Where it is: layer being issued and entry number of the next issue. */
void exd_walk_position(const struct exd_walk *walk, uint32_t *ret_layer, uint64_t *ret_entry);
struct exd_walk_counts exd_walk_counts(const struct exd_walk *walk);
int exd_walk_status(const struct exd_walk *walk); /* after FAILED: the environment's negative errno */

#endif
