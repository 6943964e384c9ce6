/* SPDX-License-Identifier: MIT */
#include "shm/shm_word.h"

#include "shm/shm_worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(table)       (sizeof(table) / sizeof *(table))
#define NAME(table, value) ((value) < COUNT(table) ? (table)[value] : "?")

static const char *const policies[] = {"default", "full", "routed", "demand"};
static const char *const orders[] = {"default", "index", "recent", "predicted"};
static const char *const devices[] = {"auto", "host", "cuda"};
_Static_assert(SHM_POLICY_FULL == 1 && SHM_POLICY_ROUTED == 2 && SHM_POLICY_DEMAND == 3 &&
                   SHM_ORDER_INDEX == 1 && SHM_ORDER_RECENT == 2 && SHM_ORDER_PREDICTED == 3,
               "the tables follow these numbers");

const char *shm_policy_name(uint32_t policy)
{
    return NAME(policies, policy);
}

const char *shm_order_name(uint32_t order)
{
    return NAME(orders, order);
}

const char *shm_result_name(uint32_t result)
{
    static const char *const names[] = {"running", "ok", "cancelled", "failed"};
    return NAME(names, result);
}

const char *shm_held_off_name(uint32_t held_off)
{
    static const char *const names[] = {"no", "below the floor", "policy full", "no predictions"};
    return NAME(names, held_off);
}

const char *shm_held_off_text(uint32_t held_off)
{
    static const char *const texts[] = {
        NULL,
        "below the floor only routed experts move, after the router (--floor)",
        "the policy is set to full (--stream)",
        "order predicted needs predictions that this worker does not publish; order recent is used (--order)",
    };
    return NAME(texts, held_off);
}

/* Looks for text among words[first .. end - 1]. */
static int word(const char *option, const char *text, const char *const *words, uint32_t first, uint32_t end,
                const char *more, uint32_t *ret, struct shm_error *err)
{
    char list[128] = "";
    for (uint32_t i = first; i < end; i++) {
        if (strcmp(text, words[i]) == 0) {
            *ret = i;
            return 0;
        }
        strncat(list, i > first ? ", " : "", sizeof list - strlen(list) - 1);
        strncat(list, words[i], sizeof list - strlen(list) - 1);
    }
    return shm_error_set(err, EINVAL, "%s: '%.40s' is not one of %s%s", option, text, list, more);
}

int shm_policy_parse(const char *option, const char *text, uint32_t *ret_policy, struct shm_error *err)
{
    /* demand is a result, never a setting */
    return word(option, text, policies, SHM_POLICY_FULL, SHM_POLICY_DEMAND, "", ret_policy, err);
}

int shm_order_parse(const char *option, const char *text, uint32_t *ret_order, struct shm_error *err)
{
    return word(option, text, orders, SHM_ORDER_INDEX, COUNT(orders), "", ret_order, err);
}

int shm_device_parse(const char *option, const char *text, uint32_t *ret_device, int *ret_gpu,
                     struct shm_error *err)
{
    uint64_t gpu;
    if (strncmp(text, "cuda:", 5) == 0) {
        int rc = shm_number_parse(option, text + 5, 0, SHM_DEVICE_GPUS_MAX - 1, &gpu, NULL);
        if (rc)
            return shm_error_set(err, EINVAL, "%s: '%.40s': the number of a GPU is 0 to %u", option, text,
                                 SHM_DEVICE_GPUS_MAX - 1);
        *ret_device = SHM_DEVICE_CUDA;
        *ret_gpu = (int)gpu;
        return 0;
    }
    int rc = word(option, text, devices, 0, COUNT(devices), ", cuda:N", ret_device, err);
    if (!rc)
        *ret_gpu = -1;
    return rc;
}

int shm_number_parse(const char *option, const char *text, uint64_t low, uint64_t high, uint64_t *ret_value,
                     struct shm_error *err)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end || text[0] < '0' || text[0] > '9' || value < low || value > high)
        return shm_error_set(err, EINVAL, "%s: '%.40s' is not a whole number from %llu to %llu", option, text,
                             (unsigned long long)low, (unsigned long long)high);
    *ret_value = value;
    return 0;
}

int shm_real_parse(const char *option, const char *text, double low, double high, double *ret_value,
                   struct shm_error *err)
{
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (errno || end == text || *end || !(value >= low && value <= high))
        return shm_error_set(err, EINVAL, "%s: '%.40s' is not a number from %g to %g", option, text, low,
                             high);
    *ret_value = value;
    return 0;
}
