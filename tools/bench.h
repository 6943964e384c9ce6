/* SPDX-License-Identifier: MIT */
/*
 * expert-bench: compares settings of the stream by interleaved pairs of reads
 * of one prompt. Each read is a fresh `inferd run --json`; what it reports is
 * all that the bench knows (processes only, no shared memory).
 *
 * Every pair is (baseline, arm), the order of the two alternating; the ratio
 * baseline / arm is formed within a pair, so that a drift of the machine falls
 * on both. The last arm is the baseline once more: its ratios are the noise
 * band, and a ratio inside it says nothing.
 */
#ifndef BENCH_H
#define BENCH_H

#include "shm/shm_error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define BENCH_ARMS_MAX  16
#define BENCH_PAIRS_MAX 100

struct bench_arm {
    char name[48];   /* as given: "routed/predicted/16" */
    char policy[16]; /* full, routed */
    char order[16];  /* index, recent, predicted; "" as configured */
    uint32_t depth;  /* 0: as configured */
};

struct bench_options {
    const char *runtime_dir, *instance;
    const char *model; /* own instance on this file; NULL: the running one */
    const char *prompt, *prompt_file;
    const char *link_gbps, *link_latency_us, *ring, *threads, *chunk, *floor,
        *resident;                /* passed on; NULL: not */
    const char *inferd, *expertd; /* programs; NULL: beside this one, else by PATH */
    struct bench_arm arm[BENCH_ARMS_MAX];
    uint32_t arms;
    uint32_t pairs;
    bool json, quiet;
};

/* One read, from inferd's JSON. */
struct bench_sample {
    double read_ms, link_ms, wait_ms;
    uint64_t tokens, ring, depth;
    uint64_t entries, routed, copied, dropped, wasted, bytes, bytes_wasted;
};

/* SIGINT, SIGTERM and SIGHUP end the running read and let the bench clean up after itself. */
void bench_catch_signals(void);

#define BENCH_HASH_BYTES 32

/* Runs one read of the prompt with the arm's settings; blocks until it ended. ret_hash (BENCH_HASH_BYTES):
 * all logits are computed and hashed too, which takes time; NULL: only the last token's are. */
int bench_read(const struct bench_options *options, const struct bench_arm *arm,
               struct bench_sample *ret_sample, char *ret_hash, struct shm_error *err);

/* Starts expertd on options->model in a runtime directory of its own and points options at it; waits until it
 * serves. bench_own_stop ends it and removes the directory; safe to call when nothing was started. */
struct bench_own {
    char dir[200], instance[24];
    int pid;
};
int bench_own_start(struct bench_options *options, struct bench_own *ret_own, struct shm_error *err);
void bench_own_stop(struct bench_own *own);

/* All results: time[arm][pair] and the baseline's of the same pair. */
struct bench_results {
    const struct bench_options *options;
    struct bench_sample base[BENCH_ARMS_MAX + 1][BENCH_PAIRS_MAX];
    struct bench_sample arm[BENCH_ARMS_MAX + 1][BENCH_PAIRS_MAX]; /* [arms] is the identical pair */
    uint32_t pairs;
    char hash[BENCH_ARMS_MAX][BENCH_HASH_BYTES]; /* of all logits, from a read that was not timed */
};

/* One prompt must give the same bits whatever the settings. */
bool bench_same_bits(const struct bench_results *results);

void bench_print_table(const struct bench_results *results);
void bench_print_json(const struct bench_results *results);

#endif
