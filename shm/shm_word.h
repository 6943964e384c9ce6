/* SPDX-License-Identifier: MIT */
/*
 * Words for the numbers in shared memory: what options, reports and logs call
 * a policy, an order, a result, a reason to hold off, a device. Each word
 * stands here alone; programs parse and print through these functions.
 */
#ifndef SHM_WORD_H
#define SHM_WORD_H

#include "shm/shm_error.h"

#include <stdint.h>

/* Names; "?" for a value that is none. */
const char *shm_policy_name(uint32_t policy);
const char *shm_order_name(uint32_t order);
const char *shm_result_name(uint32_t result);
const char *shm_held_off_name(uint32_t held_off); /* "no" for SHM_HELD_NONE */

/* One clause that says why, and which option decides; NULL for SHM_HELD_NONE. */
const char *shm_held_off_text(uint32_t held_off);

/* A device as options name it. */
#define SHM_DEVICE_AUTO     0u
#define SHM_DEVICE_HOST     1u
#define SHM_DEVICE_CUDA     2u
#define SHM_DEVICE_GPUS_MAX 64 /* cuda:N has N below it */

/* Values of options; `option` goes into the error line, which lists the words. Return 0 or -EINVAL. A policy
 * is full or routed; an order index, recent or predicted; a device auto, host, cuda or cuda:N (gpu -1 without
 * a number). */
int shm_policy_parse(const char *option, const char *text, uint32_t *ret_policy, struct shm_error *err);
int shm_order_parse(const char *option, const char *text, uint32_t *ret_order, struct shm_error *err);
int shm_device_parse(const char *option, const char *text, uint32_t *ret_device, int *ret_gpu,
                     struct shm_error *err);

/* Numbers: a whole one in low .. high (no sign, no space), a finite one in low .. high. 0 or -EINVAL. */
int shm_number_parse(const char *option, const char *text, uint64_t low, uint64_t high, uint64_t *ret_value,
                     struct shm_error *err);
int shm_real_parse(const char *option, const char *text, double low, double high, double *ret_value,
                   struct shm_error *err);

#endif
