/* SPDX-License-Identifier: MIT */
/*
 * Options of expertd: the command line and the environment, parsed and
 * checked. tools/man/expertd.8.scd describes the same options.
 */
#ifndef EXD_OPTIONS_H
#define EXD_OPTIONS_H

#include "expertd/exd_arena.h"
#include "expertd/exd_device.h"
#include "expertd/exd_issuer.h"
#include "expertd/exd_reader.h"

#include <stdbool.h>

struct exd_options {
    enum exd_device_kind device;
    int device_ordinal;      /* CUDA: -1 all of them */
    const char *model;       /* as given */
    const char *instance;    /* NULL: default */
    const char *runtime_dir; /* NULL: default */
    const char *arena_dir;   /* NULL: the arena module's choice */
    struct exd_stream_settings stream;
    double link_gbps, link_latency_us; /* 0: unpaced, none */
    enum exd_reader_io io;
    uint32_t io_depth; /* 0: default */
    enum exd_pin pin;
    uint64_t park_bytes;    /* budget of parked keys and values; 0: none */
    uint64_t memory_budget; /* of all instances of the runtime directory; 0: none */
    bool park_auto;         /* the budget is chosen at start */
    bool keep, trace, quiet;
    const char *trace_file;
    uint64_t watchdog_ns; /* 0: the issuer's default */
    uint32_t batch;       /* copies in one call of a GPU's driver; 0: the link's default */
    uint32_t drain_ms;    /* on SIGTERM and SIGINT */
    int log_level;
    const char *log_level_given; /* a name or @FILE; NULL: not */
    int ready_fd;                /* -1: none */
};

/* Parses argv and the environment. Prints help, version or a usage error itself and exits for those (0, 0,
 * 2), as argp does. Returns 0, or -EINVAL with a line for a value that is refused. */
int exd_options_parse(int argc, char **argv, struct exd_options *ret_options, struct shm_error *err);

#endif
