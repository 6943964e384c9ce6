/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: recordings and segments of events, as `expertctl trace` reads
 * them. What is loaded can be shown; what is exported is JSON, an array of
 * events with names.
 */
#include "tests/fuzz/fuzz.h"
#include "tools/ctl_trace.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MUST(x)                                                                                              \
    do {                                                                                                     \
        if (!(x))                                                                                            \
            abort();                                                                                         \
    } while (0)

static char in_path[64], out_path[64];
static int in_fd = -1, out_fd;
static FILE *nowhere;

static void check_json(void)
{
    json_error_t error;
    FILE *f = fopen(out_path, "r");
    MUST(f);
    json_t *o = json_loadf(f, 0, &error), *events = json_object_get(o, "traceEvents"), *e;
    size_t i;
    MUST(o && json_is_array(events));
    json_array_foreach(events, i, e)
    {
        const char *phase = json_string_value(json_object_get(e, "ph"));
        MUST(phase && strlen(json_string_value(json_object_get(e, "name"))) > 0);
        MUST(phase[0] != 'X' || json_number_value(json_object_get(e, "dur")) >= 0);
    }
    json_decref(o);
    fclose(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (in_fd < 0) {
        in_fd = memfd_create("in", 0);
        out_fd = memfd_create("out", 0);
        nowhere = fopen("/dev/null", "w");
        MUST(in_fd >= 0 && out_fd >= 0 && nowhere);
        snprintf(in_path, sizeof in_path, "/proc/self/fd/%d", in_fd);
        snprintf(out_path, sizeof out_path, "/proc/self/fd/%d", out_fd);
    }
    MUST(!ftruncate(in_fd, 0) && pwrite(in_fd, data, size, 0) == (ssize_t)size);
    struct trace t = {0};
    struct shm_error err = {0};
    struct ctl_options o = {.output = out_path, .count = 100};
    if (trace_load(in_path, &t, &err)) {
        MUST(err.code < 0 && err.text[0]);
    } else {
        FILE *out = stdout;
        stdout = nowhere;
        MUST(trace_show(&t, &o) == CTL_EXIT_OK);
        stdout = out;
        MUST(!ftruncate(out_fd, 0));
        MUST(trace_export(&t, &o, &err) == 0);
        check_json();
    }
    trace_free(&t);
    return 0;
}
