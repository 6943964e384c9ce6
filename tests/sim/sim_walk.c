/* SPDX-License-Identifier: MIT */
/* Runs schedules of the production walk by seed; see sim_world.h and sim_checker.h. */
#include "sim_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int usage(const char *name)
{
    fprintf(stderr, "usage: %s [--seed N] [--count N] [--verbose]\n", name);
    return 2;
}

/* Seeds that no longer reach a case would pass for the wrong reason. */
static int check_cover(const struct sim_cover *v)
{
    int missing = 0;
    for (int i = 1; i < 4; i++)
        missing += !v->policy[i] + !v->order[i];
    for (int i = 0; i < EXD_STEP_COUNT; i++)
        missing += !v->wait[i];
    missing += !v->dropped + !v->cancelled + !v->died + !v->failed + !v->compared;
    if (missing)
        fprintf(stderr, "sim_walk: %d kinds of event never happened, see the line above\n", missing);
    return missing;
}

int main(int argc, char **argv)
{
    static struct sim_cover cover;
    uint64_t seed = 1, count = 300000;
    bool verbose = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--verbose"))
            verbose = true;
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--count") && i + 1 < argc)
            count = strtoull(argv[++i], NULL, 10);
        else
            return usage(argv[0]);
    }
    for (uint64_t n = 0; n < count; n++) {
        struct sim_result result;
        if (!sim_schedule(seed + n, verbose, &cover, &result))
            continue;
        fprintf(stderr, "sim_walk: %s\nreplay: %s --seed %llu --count 1 --verbose\n", result.text, argv[0],
                (unsigned long long)(seed + n));
        return 1;
    }
    printf(
        "seeds %llu..%llu: %llu streams (%llu cancelled, %llu died, %llu failed, %llu compared with a new "
        "walk), %llu steps, %llu copies, %llu dropped; waits: slot %llu, depth %llu, publication %llu, "
        "blob %llu\n",
        (unsigned long long)seed, (unsigned long long)(seed + count - 1), (unsigned long long)cover.streams,
        (unsigned long long)cover.cancelled, (unsigned long long)cover.died, (unsigned long long)cover.failed,
        (unsigned long long)cover.compared, (unsigned long long)cover.steps, (unsigned long long)cover.issued,
        (unsigned long long)cover.dropped, (unsigned long long)cover.wait[EXD_STEP_WAIT_SLOT],
        (unsigned long long)cover.wait[EXD_STEP_WAIT_DEPTH],
        (unsigned long long)cover.wait[EXD_STEP_WAIT_PUBLISH],
        (unsigned long long)cover.wait[EXD_STEP_WAIT_BLOB]);
    return count >= 10000 && check_cover(&cover) ? 1 : 0;
}
