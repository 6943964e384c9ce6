/* SPDX-License-Identifier: MIT */
/*
 * Model of the ring and of the death of either side (Promela, for spin).
 *
 * What the code beside this file does between one worker and expertd, with
 * everything else left out: exd_walk.c (which entry is copied or dropped, the
 * slots, the groups), exd_issuer.c (one stream from its post to done_seq),
 * exd_session.c (how a session is closed), the in-order link, and of inferd's
 * inf_stream.c the consumer. The words are those of shm/shm_worker.h.
 *
 * spin tries every interleaving of these steps, every routing set, and a death,
 * a cancellation or a failing link at every point. Checked, in this order:
 *
 *   in_use    a slot that the worker reads, or has still to read, is not written
 *   routed    what is dropped has no token; each routed expert is read once, whole
 *   depth     never more copies outstanding than allowed
 *   after     nothing is written to ring or segment once the death of the worker (or
 *             its end) is acknowledged: the session's mappings are gone
 *   ends      (under fairness) a worker that waits goes on or is told that the stream
 *             has ended; a session whose worker is gone is closed
 *
 * Not in it: memory order (each step is one sequentially consistent action; tests/race
 * runs the real code under a race detector), wake-ups (a bell's wait is bounded in the
 * code and a waiter looks again), a worker that breaks the protocol (tests/fuzz).
 *
 * tests/sim/spin_model.py builds it, runs it over the settings below and over
 * mutants, each of which must be found. Settings come from the environment so
 * that one compiled model does for all.
 */
#define LAYERS   2
#define EXPERTS  2
#define RING_MAX 4
#define STREAMS  2
#define QUEUE    8

#define NONE    0 /* table */
#define SLOT    1
#define DROPPED 2

#define FULL     0 /* policy */
#define INDEX    1 /* routed, walked by index */
#define EXPECTED 2 /* routed, walked in any order */
#define DEMAND   3

#define RUNNING   0 /* result */
#define OK        1
#define CANCELLED 2
#define FAILED    3

#define MAY_WORKER_DIE  1 /* events */
#define MAY_EXPERTD_DIE 2
#define MAY_CANCEL      4
#define MAY_LINK_FAIL   8
#define MAY_STOP        16

/* Mutants: one for each rule that is easily broken. */
#define M_DROP_BEFORE_PUBLISH  1
#define M_DROP_ROUTED          2
#define M_OVERRUN              3
#define M_SIGNAL_BEFORE_COPY   4
#define M_TABLE_AFTER_SIGNAL   5
#define M_DEPTH_PLUS_ONE       6
#define M_UNUSED_GROUPS        7
#define M_DROPPED_GROUP        8
#define M_UNMAP_BEFORE_JOIN    9
#define M_CANCEL_WITHOUT_DRAIN 10
#define M_KEEP_SLOTS           11
#define M_RELEASE_BEFORE_READ  12
#define M_NO_LOOK_AT_PEER      13
#define M_NO_LOOK_AT_RESULT    14
#define M_NO_LOOK_AT_STOP      15
#define M_READ_AFTER_CANCEL    16
#define M_FORGET_RING_OF_DEAD  17

c_decl {
\#include <stdlib.h>
static unsigned char setting(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return (unsigned char)(text ? atoi(text) : otherwise);
}
}

/* Settings. */
byte mutant, policy, ring, depth, events, streams;
byte group_entries, groups_per_layer;

/* The worker's words. */
byte stream_seq, cancel_seq, released_groups;
byte route_seq[LAYERS];
byte routed[LAYERS]; /* a bit an expert; the truth from the post on, readable once route_seq says so */

/* expertd's words. */
byte landed_groups, done_seq, result;
bit detached;
byte table[LAYERS * EXPERTS], table_slot[LAYERS * EXPERTS], table_group[LAYERS * EXPERTS];

/* The ring. content: 1 + stream, layer and expert of what is whole in a slot, 0: nothing or half of something */
byte content[RING_MAX];
bit needed[RING_MAX];  /* routed, landed or on its way, not yet read: set at the issue, by the truth */
bit reading[RING_MAX]; /* by the worker, now */

/* The link: slot and content, or the groups to signal. */
mtype = { COPY, SIGNAL };
chan link_queue = [QUEUE] of { mtype, byte, byte };
bit link_stop, link_ended, link_failed;
byte issued, landed; /* of the stream; of the link's life */
byte in_flight;      /* the truth */

/* Inside expertd. */
bit stop, issuer_ended, fault, why, mapped, closed;

/* Lives. */
bit worker_dead, expertd_dead, worker_detaches, worker_ended, waiting;

#define IDENTITY(seq, layer, e) (1 + ((seq) - 1) * LAYERS * EXPERTS + (layer) * EXPERTS + (e))
#define BIT(e)                  (1 << (e))
#define AT(layer, e)            ((layer) * EXPERTS + (e))

/* ---- inferd ---- */

/* Something other than progress that ends a wait (check_end). */
#define FAILED_STREAM (mutant != M_NO_LOOK_AT_RESULT && (detached || (done_seq == seq && result != OK)))
#define GONE          (expertd_dead && mutant != M_NO_LOOK_AT_PEER)

proctype worker()
{
    byte seq, base, layer, group, e, read, slot;
    bit cancelled;
    {
        do
        :: seq == streams -> break
        :: else ->
            atomic { /* a chunk: its routing, the descriptor, the post */
                seq++;
                layer = 0;
                cancelled = 0;
                do
                :: layer < LAYERS ->
                    if /* one of the two in the first layer; the last, or both, in the second */
                    :: routed[layer] = 2
                    :: routed[layer] = (layer == 0 -> 1 : 3)
                    fi;
                    layer++
                :: else -> break
                od;
                layer = 0;
                stream_seq = seq
            }
            do
            :: layer == LAYERS -> break
            :: else ->
                atomic {
                    route_seq[layer] = seq; /* published */
                    group = 0;
                    read = 0
                }
                do
                :: group == groups_per_layer -> break
                :: else ->
                    waiting = 1;
                    if
                    :: atomic {
                           landed_groups > base + layer * groups_per_layer + group ->
                           waiting = 0
                       }
                    :: atomic {
                           FAILED_STREAM ->
                           waiting = 0;
                           goto lost
                       }
                    :: atomic {
                           GONE && landed_groups <= base + layer * groups_per_layer + group ->
                           waiting = 0;
                           goto lost
                       }
                    :: atomic {
                           (events & MAY_CANCEL) && !cancelled ->
                           waiting = 0;
                           cancel_seq = seq;
                           cancelled = 1;
                           if
                           :: mutant == M_READ_AFTER_CANCEL
                           :: else -> goto cancel
                           fi
                       }
                    fi;
                    if
                    :: mutant == M_RELEASE_BEFORE_READ ->
                        released_groups = base + layer * groups_per_layer + group + 1
                    :: else
                    fi;
                    do /* runs the experts that the table puts into this group */
                    :: atomic {
                           e = 0;
                           do
                           :: e == EXPERTS -> break
                           :: e < EXPERTS && !(read & BIT(e)) && (routed[layer] & BIT(e)) &&
                                   table[AT(layer, e)] == SLOT && table_group[AT(layer, e)] == group ->
                               break
                           :: else -> e++
                           od;
                           if
                           :: e == EXPERTS -> break
                           :: else
                           fi;
                           slot = table_slot[AT(layer, e)];
                           reading[slot] = 1;
                           assert(content[slot] == IDENTITY(seq, layer, e)) /* in_use, routed: whole, its own */
                       };
                       atomic {
                           assert(content[slot] == IDENTITY(seq, layer, e)); /* in_use */
                           reading[slot] = 0;
                           needed[slot] = 0;
                           read = read | BIT(e);
                           slot = 0;
                           e = 0
                       }
                    od;
                    atomic {
                        e = 0;
                        released_groups = base + layer * groups_per_layer + group + 1;
                        group++
                    }
                od;
                atomic {
                    assert(read == routed[layer]); /* routed: every one of them was there */
                    layer++
                }
            od;
            waiting = 1;
            if
            :: atomic {
                   done_seq == seq ->
                   waiting = 0;
                   if
                   :: result != OK && !cancelled -> goto lost
                   :: else -> goto next
                   fi
               }
            :: atomic {
                   detached || GONE ->
                   waiting = 0;
                   goto lost
               }
            fi;
cancel:
            waiting = 1;
            if
            :: atomic {
                   done_seq == seq ->
                   waiting = 0;
                   if
                   :: result == FAILED -> goto lost
                   :: else
                   fi
               }
            :: atomic {
                   detached || GONE ->
                   waiting = 0;
                   goto lost
               }
            fi;
next:
            skip;
            atomic {
                layer = 0;
                group = 0;
                read = 0;
                base = base + LAYERS * groups_per_layer;
                released_groups = base;
                slot = 0;
                do
                :: slot < RING_MAX ->
                    needed[slot] = 0;
                    slot++
                :: else -> break
                od;
                slot = 0
            }
        od;
        worker_detaches = 1;
        goto end;
lost:
        skip;
        atomic { /* reads nothing any more; leaves, to attach anew */
            slot = 0;
            do
            :: slot < RING_MAX ->
                needed[slot] = 0;
                reading[slot] = 0;
                slot++
            :: else -> break
            od
        }
        worker_detaches = 1;
end:
        skip
    } unless { worker_dead };
    atomic {
        waiting = 0;
        worker_ended = 1
    }
}

/* ---- expertd: issuer and walk ---- */

byte slot_group[RING_MAX]; /* of the walk */

#define RELEASED      (released_groups - base)
#define SLOT_OF       (entry % ring)
#define SLOT_FREE                                                                                            \
    (slot_group[SLOT_OF] == 0 || RELEASED + (mutant == M_OVERRUN -> 1 : 0) >= slot_group[SLOT_OF])
#define CANCEL_SEEN (cancel_seq == seq)
#define STOP_SEEN   (stop && mutant != M_NO_LOOK_AT_STOP)
#define OUTSTANDING (issued - (landed - landed_base))
#define PUBLISHED   (route_seq[layer] == seq)
#define ROOM        (policy == FULL || OUTSTANDING < depth + (mutant == M_DEPTH_PLUS_ONE -> 1 : 0))
#define NONE_LEFT   (todo == 0)

/* Group `group` of the layer and all before it. */
#define SIGNAL_TO(n)                                                                                         \
    if                                                                                                       \
    :: (n) > signalled ->                                                                                    \
        signalled = (n);                                                                                     \
        link_queue ! SIGNAL, base + signalled, 0                                                             \
    :: else                                                                                                  \
    fi

#define FILL_GROUP                                                                                           \
    entry++;                                                                                                 \
    in_group++;                                                                                              \
    if                                                                                                       \
    :: in_group == group_entries ->                                                                          \
        in_group = 0;                                                                                        \
        group++;                                                                                             \
        SIGNAL_TO(layer * groups_per_layer + group)                                                          \
    :: else                                                                                                  \
    fi

proctype issuer()
{
    byte seq = 1, base, landed_base, layer, group, in_group, entry, signalled, todo, e;
    bit open, seen;
    {
        do
        :: stop -> break
        :: stream_seq == seq && !stop ->
            atomic { /* exd_stream_begin, exd_walk_start */
                layer = 0;
                entry = 0;
                signalled = 0;
                issued = 0;
                landed_base = landed;
                open = 0;
                e = 0;
                do
                :: e < RING_MAX ->
                    if
                    :: mutant != M_KEEP_SLOTS -> slot_group[e] = 0
                    :: else
                    fi;
                    e++
                :: else -> break
                od;
                e = 0
            }
            result = RUNNING;
            do
            :: CANCEL_SEEN -> goto cancelled
            :: STOP_SEEN && !CANCEL_SEEN -> goto failed
            :: link_failed -> goto failed
            :: layer == LAYERS && !CANCEL_SEEN && !STOP_SEEN -> break
            :: layer < LAYERS && !CANCEL_SEEN && !STOP_SEEN && !link_failed ->
                atomic {
                    if
                    :: !open -> /* nothing of an earlier stream is read from the layer's row */
                        assert(mapped);
                        e = 0;
                        do
                        :: e < EXPERTS ->
                            table[AT(layer, e)] = NONE;
                            table_slot[AT(layer, e)] = 0;
                            table_group[AT(layer, e)] = 0;
                            e++
                        :: else -> break
                        od;
                        todo = 3;
                        group = 0;
                        in_group = 0;
                        open = 1
                    :: else
                    fi;
                    seen = (policy != FULL && PUBLISHED) /* the gate, for this step only */
                }
                /* One decision by what was seen. It is one step: nobody but this thread changes what it is
                 * made of, except for words that only make more possible. */
                atomic {
                    e = 0;
                    if
                    :: NONE_LEFT ->
                        if
                        :: mutant == M_UNUSED_GROUPS
                        :: else -> SIGNAL_TO((layer + 1) * groups_per_layer)
                        fi;
                        layer++;
                        open = 0;
                        goto step
                    :: else
                    fi;
                    /* Which one: the lowest, or any. */
                    do
                    :: todo & BIT(e) -> break
                    :: (todo & BIT(e)) && policy == EXPECTED && (todo >> (e + 1)) -> e++
                    :: !(todo & BIT(e)) -> e++
                    od;
                    if /* dropped? */
                    :: (seen && !(routed[layer] & BIT(e))) ||
                            (mutant == M_DROP_BEFORE_PUBLISH && policy != FULL && !seen && e == 1) ||
                            (mutant == M_DROP_ROUTED && seen && e == 1) ->
                        assert(!(routed[layer] & BIT(e))); /* routed */
                        assert(PUBLISHED);
                        assert(mapped);
                        todo = todo & ~BIT(e);
                        table[AT(layer, e)] = DROPPED;
                        if
                        :: policy == INDEX -> /* it keeps its number */
                            slot_group[SLOT_OF] = layer * groups_per_layer + group + 1;
                            if
                            :: mutant == M_DROPPED_GROUP && in_group + 1 == group_entries ->
                                entry++;
                                in_group = 0;
                                group++
                            :: else -> FILL_GROUP
                            fi
                        :: else
                        fi;
                        goto step
                    :: else
                    fi
                }
                if /* sleeps until one of these, then looks at everything again */
                :: policy == DEMAND && !seen && (PUBLISHED || CANCEL_SEEN || STOP_SEEN || link_failed) -> goto step
                :: !(policy == DEMAND && !seen) && SLOT_FREE && ROOM
                :: !(policy == DEMAND && !seen) && !(SLOT_FREE && ROOM) && policy != FULL && !seen && PUBLISHED ->
                    goto step
                :: !(policy == DEMAND && !seen) && !(SLOT_FREE && ROOM) &&
                        (CANCEL_SEEN || STOP_SEEN || link_failed) ->
                    goto step
                fi;
                atomic {
                    assert(mapped);
                    todo = todo & ~BIT(e);
                    slot_group[SLOT_OF] = layer * groups_per_layer + group + 1;
                    if
                    :: mutant != M_TABLE_AFTER_SIGNAL ->
                        table[AT(layer, e)] = SLOT;
                        table_slot[AT(layer, e)] = SLOT_OF;
                        table_group[AT(layer, e)] = group
                    :: else
                    fi;
                    /* in_use: by the truth, not by the walk's own bookkeeping */
                    assert(!needed[SLOT_OF] || worker_dead || CANCEL_SEEN);
                    if
                    :: routed[layer] & BIT(e) -> needed[SLOT_OF] = !(worker_dead || worker_detaches)
                    :: else
                    fi;
                    if
                    :: mutant == M_SIGNAL_BEFORE_COPY && in_group + 1 == group_entries ->
                        SIGNAL_TO(layer * groups_per_layer + group + 1)
                    :: else
                    fi;
                    link_queue ! COPY, SLOT_OF, IDENTITY(seq, layer, e);
                    issued++;
                    in_flight++;
                    assert(policy == FULL || in_flight <= depth); /* depth */
                    FILL_GROUP
                };
                if
                :: mutant == M_TABLE_AFTER_SIGNAL ->
                    atomic {
                        table[AT(layer, e)] = SLOT;
                        table_slot[AT(layer, e)] = (entry - 1) % ring;
                        table_group[AT(layer, e)] = (in_group == 0 -> group - 1 : group)
                    }
                :: else
                fi;
step:
                e = 0
            od;
            if /* wait_consumed: everything has landed and was released */
            :: RELEASED == LAYERS * groups_per_layer && OUTSTANDING == 0 ->
                result = OK
            :: CANCEL_SEEN -> goto cancelled
            :: STOP_SEEN || link_failed -> goto failed
            fi;
            goto done;
cancelled:
            if /* wait_landed */
            :: mutant == M_CANCEL_WITHOUT_DRAIN
            :: empty(link_queue) && OUTSTANDING == 0
            :: STOP_SEEN || link_failed -> goto failed
            fi;
            atomic {
                link_queue ! SIGNAL, base + LAYERS * groups_per_layer, 0;
                result = CANCELLED
            }
            if
            :: empty(link_queue) || mutant == M_CANCEL_WITHOUT_DRAIN
            :: stop || link_failed
            fi;
            goto done;
failed:
            result = FAILED;
            if /* the drain, or its time-out */
            :: empty(link_queue)
            :: stop || link_failed
            fi;
done:
            skip;
            atomic {
                assert(mapped); /* after */
                base = base + LAYERS * groups_per_layer;
                done_seq = seq;
                seq++
            }
            if
            :: result == FAILED ->
                if
                :: !stop -> fault = 1
                :: else
                fi;
                break
            :: else
            fi
        od;
        issuer_ended = 1
    } unless { expertd_dead }
}

/* ---- expertd: the link's thread, or the copy engine ---- */

proctype link()
{
    byte slot, what;
    {
        do
        :: link_stop -> break
        :: !link_stop && link_queue ? [COPY, _, _] ->
            atomic { /* begins to write */
                link_queue ? <COPY, slot, what>;
                assert(mapped);                                    /* after */
                assert(!reading[slot] || worker_dead || cancel_seq == stream_seq); /* in_use */
                content[slot] = 0
            }
            if
            :: (events & MAY_LINK_FAIL) && !link_failed -> link_failed = 1
            :: true
            fi;
            if
            :: link_failed -> break
            :: else
            fi;
            atomic { /* has written */
                assert(mapped);
                assert(!reading[slot] || worker_dead || cancel_seq == stream_seq);
                content[slot] = what;
                landed++;
                in_flight--;
                link_queue ? COPY, _, _;
                slot = 0;
                what = 0
            }
        :: !link_stop && link_queue ? [SIGNAL, _, _] ->
            atomic {
                link_queue ? SIGNAL, what, _;
                assert(mapped);
                assert(what >= landed_groups);
                landed_groups = what;
                what = 0
            }
        od;
        link_ended = 1
    } unless { expertd_dead }
}

/* ---- expertd: main loop and closer ---- */

proctype session()
{
    {
        if /* pidfd, DETACH, a fault, or SIGTERM */
        :: worker_dead
        :: worker_detaches && !worker_dead
        :: fault -> why = 1
        :: (events & MAY_STOP) -> why = 1
        fi;
        if
        :: mutant == M_FORGET_RING_OF_DEAD && worker_dead -> goto forgotten
        :: else
        fi;
        stop = 1;
        if
        :: mutant == M_UNMAP_BEFORE_JOIN
        :: issuer_ended
        fi;
        if /* drained, or timed out: a slow link's rest is not copied any more */
        :: empty(link_queue)
        :: true
        fi;
        link_stop = 1;
        if
        :: mutant == M_UNMAP_BEFORE_JOIN
        :: link_ended
        fi;
        if
        :: why -> detached = 1
        :: else
        fi;
        atomic { /* acknowledged */
            mapped = 0;
            closed = 1
        }
forgotten:
        skip
    } unless { expertd_dead }
}

/* ---- fate ---- */

proctype fate()
{
    if
    :: (events & MAY_WORKER_DIE) && !worker_ended -> worker_dead = 1
    :: (events & MAY_EXPERTD_DIE) -> expertd_dead = 1
    :: true
    fi
}

init
{
    atomic {
        c_code {
            now.mutant = setting("MUTANT", 0);
            now.policy = setting("POLICY", 1);
            now.ring = setting("RING", 2);
            now.depth = setting("DEPTH", 1);
            now.events = setting("EVENTS", 0);
            now.streams = setting("STREAMS_RUN", 1);
            now.group_entries = now.ring / 2 ? now.ring / 2 : 1; /* shm_group_entries */
            now.groups_per_layer = (EXPERTS + now.group_entries - 1) / now.group_entries;
        };
        mapped = 1
    }
    atomic {
        run worker();
        run issuer();
        run link();
        run session();
        run fate()
    }
}

/* ends: a wait of the worker's ends; a session whose worker is gone is closed. */
ltl wait_ends { [] (waiting -> <> !waiting) }
ltl closes { [] ((worker_dead || worker_detaches) -> <> (closed || expertd_dead)) }
