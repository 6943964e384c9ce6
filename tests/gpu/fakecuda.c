/* SPDX-License-Identifier: MIT */
/*
 * A CUDA driver without a device, for tests: EXPERTD_CUDA_LIBRARY names this
 * library. Device memory is a memfd mapped shared, so that an IPC handle opens
 * the same bytes in another process; a device address is the address of the
 * mapping. Each stream is a thread that works its queue in order.
 *
 * It refuses what the real one refuses (copies across registrations, handles
 * of dead processes, double registration) and appends every call to the file
 * FAKECUDA_LOG, one line: pid, call, stream, what.
 *
 *   FAKECUDA_VERSION=12040      driver version
 *   FAKECUDA_MISSING=a,b        functions that it does not have
 *   FAKECUDA_FAIL=call:n:result the nth call and all later ones fail (from 1): any call that the log names
 *   FAKECUDA_FAILED=path        a file that is made when one did
 *   FAKECUDA_REGISTER_MS=n      registering host memory takes so long
 *   FAKECUDA_DELAY_US=n         each copy takes so long
 *   FAKECUDA_DEVICES=n          devices shown (default 1)
 *   FAKECUDA_FREE_MIB=n         memory said to be free (default 8192)
 *   FAKECUDA_LEFT_OUT=kernel    plan (prompts) or token_router (generated tokens) leaves one chosen expert
 * out
 *
 * No kernel runs. One effect of theirs is made up, since a pass fails without it: that each chosen expert was
 * run, as they count it.
 */
#include "fakecuda.h"
#include "kernels/krn_cu_args.h"
#include "tests/gpu/emu_map.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1, calls_until_failure = -1, failure;
static char failing[64];
_Thread_local void *fake_current;

void fake_note(const char *call, int stream, const char *fmt, ...)
{
    const char *path = getenv("FAKECUDA_LOG");
    if (!path)
        return;
    pthread_mutex_lock(&lock);
    if (log_fd < 0)
        log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char line[256];
    int n = snprintf(line, sizeof(line), "%d %s %d ", (int)getpid(), call, stream);
    va_list args;
    va_start(args, fmt);
    n += vsnprintf(line + n, sizeof(line) - (size_t)n - 1, fmt, args);
    va_end(args);
    line[n++] = '\n';
    if (log_fd >= 0 && write(log_fd, line, (size_t)n) < 0)
        abort();
    pthread_mutex_unlock(&lock);
}

/* The result a call is made to return, or 0. */
int fake_fails(const char *call)
{
    static bool parsed;
    int result = 0;
    pthread_mutex_lock(&lock);
    if (!parsed) {
        const char *text = getenv("FAKECUDA_FAIL");
        if (text && sscanf(text, "%63[^:]:%d:%d", failing, &calls_until_failure, &failure) != 3)
            calls_until_failure = -1;
        parsed = true;
    }
    if (calls_until_failure >= 0 && strcmp(call, failing) == 0) {
        if (calls_until_failure > 0)
            calls_until_failure--;
        if (calls_until_failure == 0)
            result = failure;
        const char *told = result ? getenv("FAKECUDA_FAILED") : NULL;
        int fd = told ? open(told, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
        if (fd >= 0)
            close(fd);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int fake_number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text && text[0] ? atoi(text) : otherwise;
}

/* ---- device, modules, errors ---- */

int fake_init(unsigned flags)
{
    FAKE_CALL("cuInit", 0, "%u", flags);
    return 0;
}
int fake_device_count(int *ret_count)
{
    *ret_count = fake_number("FAKECUDA_DEVICES", 1);
    return 0;
}
int fake_device_get(krn_cuda_dev *ret_device, int ordinal)
{
    *ret_device = ordinal;
    return ordinal < fake_number("FAKECUDA_DEVICES", 1) ? 0 : KRN_CUDA_INVALID_DEVICE;
}
int fake_device_name(char *name, int bytes, krn_cuda_dev device)
{
    snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return 0;
}
int fake_device_uuid(struct krn_cuda_uuid *ret_uuid, krn_cuda_dev device)
{
    memset(ret_uuid, 0xfa, sizeof(*ret_uuid));
    ret_uuid->bytes[15] = (uint8_t)device;
    return 0;
}
int fake_device_memory(size_t *ret_bytes, krn_cuda_dev device)
{
    (void)device;
    *ret_bytes = (size_t)1 << 33;
    return 0;
}
int fake_device_attribute(int *ret_value, int attribute, krn_cuda_dev device)
{
    (void)device;
    *ret_value = attribute == KRN_CUDA_ATTR_MAJOR             ? (fake_kernel_find ? 8 : 9)
                 : attribute == KRN_CUDA_ATTR_MULTIPROCESSORS ? 132
                 : attribute == KRN_CUDA_ATTR_SHARED_OPTIN    ? 232448
                                                              : 0;
    return 0;
}
int fake_primary_flags(krn_cuda_dev device, unsigned flags)
{
    (void)device, (void)flags;
    return 0;
}
int fake_primary_retain(void **ret_context, krn_cuda_dev device)
{
    static char contexts[64];
    fake_note("cuDevicePrimaryCtxRetain", 0, "%d", device);
    *ret_context = &contexts[device];
    return fake_fails("cuDevicePrimaryCtxRetain");
}
int fake_primary_release(krn_cuda_dev device)
{
    FAKE_CALL("cuDevicePrimaryCtxRelease", 0, "%d", device);
    return 0;
}
int fake_set_current(void *context)
{
    fake_current = context;
    return 0;
}

/* Kernels that are told apart (without emu_library.c): what they are as handles. */
enum counting { SELECT_128, SELECT_1024, TOKEN_ROUTER, PLAN, COUNTING };
static char counting[COUNTING];
static const char *const counting_names[COUNTING] = {"krn_dev_select_128", "krn_dev_select_1024",
                                                     "krn_dev_token_router", "krn_dev_plan"};

/* The choices of a layer, all counted at the first chance. */
static int count_ran(void *function, unsigned grid_y, void *stream, void **arguments)
{
    static _Thread_local uint32_t choices; /* of the prompt's tokens, until they are planned */
    struct krn_cu_select_args select;
    struct krn_cu_token_router_args router;
    struct krn_cu_plan_args plan = {0};
    if (function == &counting[SELECT_128] || function == &counting[SELECT_1024]) {
        memcpy(&select, arguments[0], sizeof(select));
        choices = select.tokens * select.top_k;
    } else if (function == &counting[TOKEN_ROUTER]) {
        memcpy(&router, arguments[0], sizeof(router));
        choices = grid_y * router.top_k;
        plan.ran = router.ran;
    } else if (function == &counting[PLAN]) {
        memcpy(&plan, arguments[0], sizeof(plan));
    }
    const char *name = getenv("FAKECUDA_LEFT_OUT");
    const bool left_out = name && strcmp(name, function == &counting[PLAN] ? "plan" : "token_router") == 0;
    return plan.ran ? fake_stream_store(stream, plan.ran, choices - left_out) : 0;
}

int fake_module_load(void **ret_module, const void *image)
{
    static char module;
    uint32_t magic;
    memcpy(&magic, image, sizeof(magic));
    FAKE_CALL("cuModuleLoadData", 0, "%x", magic);
    *ret_module = &module;
    return magic == 0xba55ed50u ? 0 : KRN_CUDA_INVALID_IMAGE;
}
int fake_module_unload(void *module)
{
    (void)module;
    return 0;
}
int fake_module_function(void **ret_function, void *module, const char *name)
{
    FAKE_CALL("cuModuleGetFunction", 0, "%s", name);
    *ret_function = fake_kernel_find ? fake_kernel_find(name) : module;
    for (int i = 0; !fake_kernel_find && i < COUNTING; i++)
        if (strcmp(name, counting_names[i]) == 0)
            *ret_function = &counting[i];
    if (!*ret_function)
        return KRN_CUDA_NOT_FOUND;
    return strncmp(name, "krn_", 4) ? KRN_CUDA_NOT_FOUND : 0;
}
int fake_function_attribute(void *function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return 0;
}
int fake_launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                unsigned shared, void *stream, void **arguments, void **extra)
{
    (void)extra, (void)shared;
    FAKE_CALL("cuLaunchKernel", fake_stream_number(stream), "%u %u %u x %u %u %u", gx, gy, gz, bx, by, bz);
    return fake_kernel_run
               ? fake_stream_launch(stream, function, (const unsigned[3]){gx, gy, gz}, bx, arguments)
               : count_ran(function, gy, stream, arguments);
}
int fake_tensor_map(void *ret_map, int type, uint32_t rank, void *data, const uint64_t *extents,
                    const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                    int swizzle, int promotion, int fill)
{
    (void)promotion;
    int rc = fake_fails("cuTensorMapEncodeTiled");
    if (rc)
        return rc;
    if (!fake_inside((uint64_t)(uintptr_t)data, 1, FAKE_DEVICE))
        return KRN_CUDA_INVALID_VALUE;
    return emu_tensor_map(ret_map, type, rank, data, extents, strides, box, steps, interleave, swizzle, fill);
}

int fake_launch_ex(const struct krn_cuda_launch *l, void *function, void **arguments, void **extra)
{
    return fake_launch(function, l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1], l->block[2],
                       l->shared_bytes, l->stream, arguments, extra);
}

int fake_get_error_name(int result, const char **ret_name)
{
    static const struct {
        int result;
        const char *name;
    } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"},
                 {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {100, "CUDA_ERROR_NO_DEVICE"},
                 {201, "CUDA_ERROR_INVALID_CONTEXT"},
                 {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                 {719, "CUDA_ERROR_LAUNCH_FAILED"},
                 {801, "CUDA_ERROR_NOT_SUPPORTED"}};
    *ret_name = "CUDA_ERROR_FAKE";
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].result == result)
            *ret_name = names[i].name;
    return 0;
}
int fake_get_error_string(int result, const char **ret_text)
{
    (void)result;
    *ret_text = "said the fake driver";
    return 0;
}

EXPORT int cuDriverGetVersion(int *ret_version);
EXPORT int cuDriverGetVersion(int *ret_version)
{
    *ret_version = fake_number("FAKECUDA_VERSION", 13000);
    return 0;
}

struct entry {
    const char *symbol;
    int version;
    void (*function)(void);
};
#define ENTRY(field, symbol, version, required, arguments) {#symbol, version, (void (*)(void))fake_##field},
static const struct entry entries[] = {KRN_CUDA_TABLE(ENTRY)};

static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; at && (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || !at[n]))
            return true;
    return false;
}

/* As the real one: the newest variant not above the version that is asked for. */
EXPORT int cuGetProcAddress_v2(const char *symbol, void **ret, int version, uint64_t flags, int *ret_status);
EXPORT int cuGetProcAddress_v2(const char *symbol, void **ret, int version, uint64_t flags, int *ret_status)
{
    (void)flags;
    const struct entry *best = NULL;
    if (!listed(getenv("FAKECUDA_MISSING"), symbol))
        for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++)
            if (strcmp(entries[i].symbol, symbol) == 0 && entries[i].version <= version &&
                entries[i].version <= fake_number("FAKECUDA_VERSION", 13000) &&
                (!best || entries[i].version > best->version))
                best = &entries[i];
    *ret = NULL;
    *ret_status = best ? 0 : 1;
    if (!best)
        return KRN_CUDA_NOT_FOUND;
    memcpy(ret, &best->function, sizeof(best->function));
    return 0;
}
