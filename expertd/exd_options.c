/* SPDX-License-Identifier: MIT */
#include "expertd/exd_options.h"

#include "expertd/exd_log.h"
#include "kernels/krn_link_cuda.h"
#include "shm/shm_word.h"
#include "shm/shm_worker.h"

#include <argp.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

const char *argp_program_version = "expertd " EXPERTD_VERSION;

enum key {
    KEY_INSTANCE = 'i',
    KEY_RUNTIME_DIR = 256,
    KEY_ARENA_DIR,
    KEY_DEVICE,
    KEY_STREAM,
    KEY_DEPTH,
    KEY_FLOOR,
    KEY_ORDER,
    KEY_LINK_GBPS,
    KEY_LINK_LATENCY,
    KEY_IO,
    KEY_IO_DEPTH,
    KEY_PIN,
    KEY_NO_KEEP,
    KEY_PARK,
    KEY_BUDGET,
    KEY_TRACE,
    KEY_TRACE_FILE,
    KEY_WATCHDOG,
    KEY_BATCH,
    KEY_DRAIN,
    KEY_LOG_LEVEL,
    KEY_READY_FD,
};

static const struct argp_option option_table[] = {
    {NULL, 0, NULL, 0, "Model and instance:", 1},
    {"model", 'm', "FILE", 0, "GGUF file to serve (of a split model: any shard). Required", 1},
    {"instance", KEY_INSTANCE, "NAME", 0, "Name of this instance (default: default)", 1},
    {"runtime-dir", KEY_RUNTIME_DIR, "DIR", 0,
     "Where socket and store live (default: $XDG_RUNTIME_DIR, or /run for root)", 1},
    {"arena-dir", KEY_ARENA_DIR, "DIR", 0, "Where the arena goes; a tmpfs or hugetlbfs (default: chosen)", 1},
    {"pin", KEY_PIN, "auto|require|off", 0, "Lock the arena in memory (default: auto)", 1},
    {"no-keep", KEY_NO_KEEP, NULL, 0, "Remove the arena at exit instead of keeping it for the next start", 1},
    {"park", KEY_PARK, "SIZE|auto|off", 0,
     "Most memory for keys and values that workers park, for their next life and for each other: bytes, or "
     "with K, M, G, T. Taken as it is used. auto: an eighth of the memory available at start, at most 32G "
     "(default: auto)",
     1},
    {"memory-budget", KEY_BUDGET, "SIZE", 0,
     "Start only if the arenas, kept ones too, and parks of all instances of this runtime directory fit into "
     "SIZE "
     "together: bytes, or with K, M, G, T (default: no budget)",
     1},
    {NULL, 0, NULL, 0, "Stream (each worker may ask for its own):", 2},
    {"device", KEY_DEVICE, "auto|host|cuda[:N]", 0,
     "Device that the links copy to: host memory, or CUDA GPUs (all, or number N). auto: CUDA if there is a "
     "driver (default: auto)",
     2},
    {"stream", KEY_STREAM, "full|routed", 0,
     "Copy every streamed expert, or only routed ones (default: routed; environment: "
     "EXPERTD_ROUTED_STREAM=0 means full)",
     2},
    {"depth", KEY_DEPTH, "N", 0,
     "Most guesses outstanding under the routed policy (default: 16; environment: "
     "EXPERTD_ROUTED_STREAM_DEPTH)",
     2},
    {"floor", KEY_FLOOR, "TOKENS", 0, "Smallest chunk that streams ahead of the router (default: 1024)", 2},
    {"order", KEY_ORDER, "index|recent|predicted", 0, "Order inside a layer (default: predicted)", 2},
    {"link-gbps", KEY_LINK_GBPS, "X", 0, "Pace each host link to X * 1e9 bytes a second (default: unpaced)",
     2},
    {"link-latency-us", KEY_LINK_LATENCY, "X", 0, "Add X microseconds to each copy (default: 0)", 2},
    {"batch", KEY_BATCH, "COPIES", 0,
     "Most copies handed to a GPU's driver in one call, 1 to 16 (default: 16)", 2},
    {"watchdog-ms", KEY_WATCHDOG, "MS", 0, "Longest wait without progress (default: 60000)", 2},
    {NULL, 0, NULL, 0, "Reading the model file:", 3},
    {"io", KEY_IO, "auto|uring|pread", 0, "Reading engine (default: auto)", 3},
    {"io-depth", KEY_IO_DEPTH, "N", 0, "Reads in flight (default: 16)", 3},
    {NULL, 0, NULL, 0, "Running:", 4},
    {"trace", KEY_TRACE, NULL, 0, "One line per chunk", 4},
    {"trace-file", KEY_TRACE_FILE, "FILE", 0, "Append what each chunk's copies did when, for tools/timeline",
     4},
    {"drain-ms", KEY_DRAIN, "MS", 0, "Time for running streams after SIGTERM or SIGINT (default: 5000)", 4},
    {"log-level", KEY_LOG_LEVEL, "error|warning|info|debug|@FILE", 0,
     "Least important lines shown, or a file whose first word says so, read again at SIGHUP (default: info)",
     4},
    {"quiet", 'q', NULL, 0, "Warnings and errors only, no progress", 4},
    {"ready-fd", KEY_READY_FD, "N", 0,
     "Write one line to descriptor N once workers can attach (\"ready\") or the start has failed (\"error: "
     "...\")",
     4},
    {0}};

struct parse {
    struct exd_options options;
    struct shm_error error;
};

static int parse_u32(const char *name, const char *text, uint32_t low, uint32_t high, uint32_t *ret,
                     struct shm_error *err)
{
    uint64_t value;
    int rc = shm_number_parse(name, text, low, high, &value, err);
    if (rc == 0)
        *ret = (uint32_t)value;
    return rc;
}

static int parse_device(const char *text, struct exd_options *o, struct shm_error *err)
{
    uint32_t device;
    int rc = shm_device_parse("--device", text, &device, &o->device_ordinal, err);
    if (rc == 0)
        o->device = (enum exd_device_kind)device;
    return rc;
}

/* A number of bytes, or with K, M, G, T. */
static int parse_size(const char *option, const char *more, const char *text, uint64_t *ret_bytes,
                      struct shm_error *err)
{
    static const char units[] = "KMGT";
    char *end;
    errno = 0;
    unsigned long long n = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : (end = NULL, 0);
    unsigned shift = 0;
    if (end && *end) {
        const char *unit = strchr(units, *end);
        shift = unit ? 10 * (unsigned)(unit - units + 1) : 0;
        if (unit)
            end++;
    }
    if (!end || errno || *end || n > (UINT64_C(1) << 46) >> shift)
        return shm_error_set(err, EINVAL,
                             "%s: '%.40s' is %sa number of bytes up to 64T (K, M, G and T are understood)",
                             option, text, more);
    *ret_bytes = n << shift;
    return 0;
}

static int parse_park(const char *text, struct exd_options *o, struct shm_error *err)
{
    o->park_auto = strcmp(text, "auto") == 0;
    o->park_bytes = 0;
    if (o->park_auto || strcmp(text, "off") == 0)
        return 0;
    return parse_size("--park", "neither auto, off nor ", text, &o->park_bytes, err);
}

static int apply(struct exd_options *o, int key, const char *arg, struct shm_error *err)
{
    uint32_t ms;
    int rc;
    switch (key) {
    case 'm':
        o->model = arg;
        return 0;
    case 'q':
        o->quiet = true;
        return 0;
    case KEY_INSTANCE:
        o->instance = arg;
        return 0;
    case KEY_RUNTIME_DIR:
        o->runtime_dir = arg;
        return 0;
    case KEY_ARENA_DIR:
        o->arena_dir = arg;
        return 0;
    case KEY_DEVICE:
        return parse_device(arg, o, err);
    case KEY_STREAM:
        return shm_policy_parse("--stream", arg, &o->stream.policy, err);
    case KEY_DEPTH:
        return parse_u32("--depth", arg, 1, SHM_RING_MAX, &o->stream.depth, err);
    case KEY_FLOOR:
        /* one token: no chunk is below it. 0 means "keep" further down, so it is no setting */
        return parse_u32("--floor", arg, 1, UINT32_MAX, &o->stream.floor, err);
    case KEY_ORDER:
        return shm_order_parse("--order", arg, &o->stream.order, err);
    case KEY_LINK_GBPS:
        return shm_real_parse("--link-gbps", arg, 0, 1e6, &o->link_gbps, err);
    case KEY_LINK_LATENCY:
        return shm_real_parse("--link-latency-us", arg, 0, 1e6, &o->link_latency_us, err);
    case KEY_IO:
        if (exd_reader_parse_io(arg, &o->io) < 0)
            return shm_error_set(err, EINVAL, "--io: '%.40s' is not one of auto, uring, pread", arg);
        return 0;
    case KEY_IO_DEPTH:
        return parse_u32("--io-depth", arg, 1, EXD_READER_DEPTH_MAX, &o->io_depth, err);
    case KEY_PIN:
        if (exd_pin_parse(arg, &o->pin) < 0)
            return shm_error_set(err, EINVAL, "--pin: '%.40s' is not one of auto, require, off", arg);
        return 0;
    case KEY_NO_KEEP:
        o->keep = false;
        return 0;
    case KEY_PARK:
        return parse_park(arg, o, err);
    case KEY_BUDGET:
        rc = parse_size("--memory-budget", "not ", arg, &o->memory_budget, err);
        return rc || o->memory_budget
                   ? rc
                   : shm_error_set(err, EINVAL,
                                   "--memory-budget: 0 has room for nothing: leave it out for none");
    case KEY_TRACE:
        o->trace = true;
        return 0;
    case KEY_TRACE_FILE:
        o->trace_file = arg;
        return 0;
    case KEY_WATCHDOG:
        rc = parse_u32("--watchdog-ms", arg, 10, 3600000, &ms, err);
        if (rc == 0)
            o->watchdog_ns = (uint64_t)ms * 1000000u;
        return rc;
    case KEY_BATCH:
        return parse_u32("--batch", arg, 1, KRN_LINK_BATCH_MAX, &o->batch, err);
    case KEY_DRAIN:
        return parse_u32("--drain-ms", arg, 0, 3600000, &o->drain_ms, err);
    case KEY_LOG_LEVEL:
        o->log_level = prt_log_read_level(arg, err);
        o->log_level_given = arg;
        return o->log_level < 0 ? o->log_level : 0;
    case KEY_READY_FD:
        rc = parse_u32("--ready-fd", arg, 0, 1 << 20, &ms, err);
        if (rc == 0)
            o->ready_fd = (int)ms;
        return rc;
    default:
        return 1;
    }
}

static error_t on_option(int key, char *arg, struct argp_state *state)
{
    struct parse *p = state->input;
    if (key == ARGP_KEY_ARG)
        argp_error(state, "'%s' is not an option: give the model with --model FILE", arg);
    int rc = apply(&p->options, key, arg, &p->error);
    return rc > 0 ? ARGP_ERR_UNKNOWN : rc < 0 ? EINVAL : 0;
}

/* The two variables set defaults: options win over them. */
static int from_environment(struct exd_options *o, struct shm_error *err)
{
    const char *routed = getenv("EXPERTD_ROUTED_STREAM");
    if (routed && routed[0]) {
        if (strcmp(routed, "0") != 0 && strcmp(routed, "1") != 0)
            return shm_error_set(err, EINVAL, "EXPERTD_ROUTED_STREAM: '%.40s' is neither 0 nor 1", routed);
        o->stream.policy = routed[0] == '0' ? SHM_POLICY_FULL : SHM_POLICY_ROUTED;
    }
    const char *depth = getenv("EXPERTD_ROUTED_STREAM_DEPTH");
    if (depth && depth[0])
        return parse_u32("EXPERTD_ROUTED_STREAM_DEPTH", depth, 1, SHM_RING_MAX, &o->stream.depth, err);
    return 0;
}

int exd_options_parse(int argc, char **argv, struct exd_options *ret_options, struct shm_error *err)
{
    static const struct argp argp = {
        option_table,
        on_option,
        NULL,
        "Serves the expert weights of one mixture-of-experts model to inference workers on this host."
        "\vWorkers (inferd) find the instance by its name. SIGTERM or SIGINT drains and ends; a second one "
        "ends "
        "at once. The arena stays for the next start unless --no-keep is given.",
        NULL,
        NULL,
        NULL};
    struct parse p = {
        .options = {
            .stream = {.policy = SHM_POLICY_ROUTED, .order = SHM_ORDER_PREDICTED, .depth = 16, .floor = 1024},
            .io = EXD_READER_AUTO,
            .pin = EXD_PIN_AUTO,
            .device_ordinal = -1,
            .park_auto = true,
            .keep = true,
            .drain_ms = 5000,
            .log_level = EXD_LOG_INFO,
            .ready_fd = -1}};
    int rc = from_environment(&p.options, err);
    if (rc < 0)
        return rc;
    argp_err_exit_status = 2;
    rc = argp_parse(&argp, argc, argv, 0, NULL, &p);
    if (p.error.code) {
        *err = p.error;
        return p.error.code;
    }
    if (rc)
        return shm_error_set(err, rc, "options: %s", strerror(rc));
    if (!p.options.model)
        return shm_error_set(err, EINVAL, "no model: give one with --model FILE (see expertd --help)");
    /* before anything is opened, so that the number can't be a descriptor of our own */
    if (p.options.ready_fd >= 0 && fcntl(p.options.ready_fd, F_GETFD) < 0)
        return shm_error_set(err, EBADF,
                             "--ready-fd: descriptor %d is not open: give the number of one that the starter "
                             "passes on",
                             p.options.ready_fd);
    if (p.options.quiet && p.options.log_level > EXD_LOG_WARNING)
        p.options.log_level = EXD_LOG_WARNING;
    *ret_options = p.options;
    return 0;
}
