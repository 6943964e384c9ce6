/* SPDX-License-Identifier: MIT */
/*
 * Proof that the simulation notices: each mutant of the walk breaks one rule
 * and must be caught by the checker within a number of seeds. Each runs in a
 * process of its own, since a broken walk may crash or spin; that is no catch.
 */
#include "sim_mutant.h"
#include "sim_world.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int sim_mutant;

static const struct {
    const char *name;
    int invariant; /* of DESIGN 7 (or SIM_RULE_*) that it breaks; in some seeds another one shows first */
} mutants[SIM_MUTANT_COUNT] = {
    [SIM_MUTANT_COPY_TWICE] = {"an entry is copied twice", 1},
    [SIM_MUTANT_WRONG_SLOT] = {"an entry is copied into the next slot", 1},
    [SIM_MUTANT_IGNORE_LOADED] = {"an expert is copied before it is loaded", 1},
    [SIM_MUTANT_DROP_BEFORE_PUBLISH] = {"dropped before the layer is published", 2},
    [SIM_MUTANT_DROP_ROUTED] = {"a routed expert is dropped", 2},
    [SIM_MUTANT_NO_RECHECK] = {"the gate is not looked at again after a wait", SIM_RULE_GATE},
    [SIM_MUTANT_DEPTH_PLUS_ONE] = {"one copy more than depth outstanding", 3},
    [SIM_MUTANT_DEMAND_BLIND] = {"demand copies before the publication", 3},
    [SIM_MUTANT_BLIND_PLUS_ONE] = {"one blind copy more than allowed outstanding", 3},
    [SIM_MUTANT_BLIND_UNEXPECTED] = {"copied blind against a confident expectation", 3},
    [SIM_MUTANT_CERTAIN_PLUS_ONE] = {"one certain copy more than allowed outstanding", 3},
    [SIM_MUTANT_GUESS_IS_CERTAIN] = {"a guess is issued as certain", 3},
    [SIM_MUTANT_RING_OVERRUN] = {"the ring is overrun by one group", 4},
    [SIM_MUTANT_SIGNAL_BEFORE_COPY] = {"a group is signalled before its last copy", 5},
    [SIM_MUTANT_TABLE_AFTER_SIGNAL] = {"the table is written after the signal", 5},
    [SIM_MUTANT_GROUP_TOO_LARGE] = {"a group takes one entry too many", 5},
    [SIM_MUTANT_STALE_TABLE] = {"a table row of an earlier stream is not reset", 5},
    [SIM_MUTANT_FORGET_UNUSED_GROUPS] = {"a layer's unused groups are not signalled", 8},
    [SIM_MUTANT_DROPPED_GROUP_NOT_SIGNALLED] = {"a group whose last entry was dropped is not signalled", 9},
    [SIM_MUTANT_KEEP_SLOTS] = {"slots of the stream before count as held", 10},
    [SIM_MUTANT_KEEP_LAYER] = {"the layer of a cancelled stream stays open", 10},
    [SIM_MUTANT_FULL_LOOKS_AT_GATE] = {"full policy looks at the gate", SIM_RULE_FULL},
};

/* In the child: prints the verdict and ends: 0 caught, also by the rule that it breaks; 1 not. */
static void hunt(int mutant, uint64_t seeds)
{
    static struct sim_cover cover;
    struct sim_result result;
    bool first = true;
    sim_mutant = mutant;
    alarm(60);
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        if (!sim_schedule(seed, false, &cover, &result))
            continue;
        if (first)
            printf("mutant %2d: %s\n    first caught by %s\n", mutant, mutants[mutant].name, result.text);
        first = false;
        if (result.invariant != mutants[mutant].invariant)
            continue;
        printf("    by the rule it breaks, %d, with seed %llu\n", result.invariant, (unsigned long long)seed);
        fflush(stdout);
        _exit(0);
    }
    fflush(stdout);
    _exit(1);
}

int main(int argc, char **argv)
{
    uint64_t seeds = argc > 1 ? strtoull(argv[1], NULL, 10) : 20000;
    static struct sim_cover cover;
    struct sim_result result;
    int missed = 0;
    /* The same binary, unbroken: a checker that cries at everything proves nothing. */
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        if (sim_schedule(seed, false, &cover, &result)) {
            fprintf(stderr, "sim_mutants: the unbroken walk: %s\n", result.text);
            return 1;
        }
    }
    for (int m = 1; m < SIM_MUTANT_COUNT; m++) {
        fflush(stdout);
        pid_t pid = fork();
        if (pid < 0)
            return perror("sim_mutants: fork"), 1;
        if (pid == 0)
            hunt(m, seeds);
        int status;
        if (waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        fprintf(stderr, "sim_mutants: NOT CAUGHT in %llu seeds%s: mutant %d, %s\n", (unsigned long long)seeds,
                WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "", m, mutants[m].name);
        missed++;
    }
    printf("%d mutants, %d not caught\n", SIM_MUTANT_COUNT - 1, missed);
    return missed ? 1 : 0;
}
