/* SPDX-License-Identifier: MIT */
/*
 * expert-bench: compares settings of the stream by interleaved reads of one
 * prompt. One `inferd measure` does them all, told what to read and how; what
 * it reports is all that the bench knows (processes only, no shared memory).
 *
 * A round reads once with each setting, the first being the baseline, and
 * once more with the baseline; every other round goes the other way round.
 * The ratio baseline / setting is formed within a round, so that a drift of
 * the machine falls on both. The second baseline's ratios are the noise band:
 * a ratio inside it says nothing.
 */
#ifndef BENCH_H
#define BENCH_H

#include "shm/shm_error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define BENCH_ARMS_MAX   16
#define BENCH_ROUNDS_MAX 100
#define BENCH_READS_MAX  16
#define BENCH_HASH_BYTES 32

struct bench_arm {
    char name[48];   /* as given: "routed/predicted/16" */
    char policy[16]; /* full, routed */
    char order[16];  /* index, recent, predicted; "" as configured */
    uint32_t depth;  /* 0: as configured */
    uint32_t floor;  /* 0: as configured; 1: ahead of the router at any size; UINT32_MAX: demand */
    bool known;      /* oracle: the routing of an earlier identical read is told ahead */
};

/* What is read: tokens of the prompt from `at` on, behind those before them. */
struct bench_span {
    uint32_t at, tokens; /* 0 tokens: the whole prompt */
};

enum bench_bits { BENCH_BITS_ALL, BENCH_BITS_LAST, BENCH_BITS_NONE };

struct bench_options {
    const char *runtime_dir, *instance;
    const char *model; /* own instance on this file; NULL: the running one */
    const char *prompt, *prompt_file;
    const char *link_gbps, *link_latency_us, *ring, *threads, *chunk, *ctx,
        *resident;                /* passed on to inferd; NULL: not */
    uint32_t floor;               /* 0: expertd's */
    const char *trace_file;       /* passed on to an own expertd */
    const char *inferd, *expertd; /* programs; NULL: beside this one, else by PATH */
    struct bench_arm arm[BENCH_ARMS_MAX];
    struct bench_span span[BENCH_READS_MAX];
    uint32_t arms, spans;
    uint32_t rounds;
    double seconds;    /* no further round of a read after so long, but three at least; 0: no limit */
    uint32_t generate; /* tokens written behind each read, timed by themselves */
    enum bench_bits bits;
    bool json, quiet;
};

/* One read, from the worker's reply. */
struct bench_sample {
    double read_ms, link_ms, wait_ms, issuer_ms;
    uint64_t entries, routed, copied, dropped, wasted, bytes, bytes_wasted;
    double decode_ms, decode_issuer_ms;
    uint64_t decode_tokens, decode_bytes, decode_copied;
    char hash[BENCH_HASH_BYTES];
};

/* SIGINT, SIGTERM and SIGHUP end what runs and let the bench clean up after itself. */
void bench_catch_signals(void);
bool bench_interrupted(void);

/* Programs that the bench runs (bench_run.c). */
#define BENCH_ARGS_MAX 64
struct bench_args {
    const char *v[BENCH_ARGS_MAX];
    int n;
};
void bench_add(struct bench_args *args, const char *value);
void bench_add_option(struct bench_args *args, const char *name, const char *value); /* not if NULL or "" */
/* Starts it; descriptors below 0: /dev/null for input, left as it is for output. own_group: a Ctrl-C on the
 * terminal doesn't reach it. 0 or -errno. */
int bench_spawn(const struct bench_args *args, int in, int out, int err_fd, bool own_group, int *ret_pid);
const char *bench_program(const char *given, const char *folder, const char *name, char *buffer);
/* Last line that a program wrote to its error file. */
void bench_last_line(void *file, char *line, size_t room);

/* The worker that reads (bench_worker.c). */
struct bench_worker;
struct bench_facts {
    uint64_t prompt_tokens, ring, chunk;
    double peak_gbps; /* of the real link; 0: there is none */
    char device[192];
};
int bench_worker_start(const struct bench_options *options, struct bench_worker **ret_worker,
                       struct bench_facts *ret_facts, struct shm_error *err);
/* One read; all: all logits are computed and hashed, which takes time. */
int bench_worker_read(struct bench_worker *worker, const struct bench_options *options,
                      const struct bench_arm *arm, const struct bench_span *span, bool all,
                      struct bench_sample *ret_sample, struct shm_error *err);
void bench_worker_stop(struct bench_worker **worker); /* accepts NULL */

/* Starts expertd on options->model in a runtime directory of its own and points options at it; waits until it
 * serves. bench_own_stop ends it and removes the directory; safe to call when nothing was started. */
struct bench_own {
    char dir[200], instance[24];
    int pid;
};
int bench_own_start(struct bench_options *options, struct bench_own *ret_own, struct shm_error *err);
void bench_own_stop(struct bench_own *own);

/* All results. Arm number options->arms is the baseline's second read of a round. */
struct bench_read {
    struct bench_span span;
    uint32_t rounds;
    bool same_bits;
    struct bench_sample sample[BENCH_ARMS_MAX + 1][BENCH_ROUNDS_MAX];
};
struct bench_results {
    const struct bench_options *options;
    struct bench_facts facts;
    struct bench_read *read;
    uint32_t reads;
};

bool bench_same_bits(const struct bench_results *results);
void bench_print_table(const struct bench_results *results);
void bench_print_json(const struct bench_results *results);

#endif
