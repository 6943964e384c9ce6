/* SPDX-License-Identifier: MIT */
/* Uploads through pinned slots, on the fake driver: its device memory can be read here. */
#include "kernels/krn_upload.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BYTES (5u << 20)
#define SLOT  65536u

TestSuite(upload, .timeout = 30);

static struct krn_cuda_device *device;
static uint8_t *source;
static krn_cuda_ptr target;

static void set_up(void)
{
    struct shm_error err = {0};
    cr_assert(krn_cuda_device_open(0, &device, &err) == 0, "%s", err.text);
    cr_assert(KRN_CUDA(mem_alloc, &target, BYTES) == 0);
    source = malloc(BYTES);
    for (uint32_t i = 0, x = 1; i < BYTES; i++) {
        x = x * 1664525u + 1013904223u;
        source[i] = (uint8_t)(x >> 24);
    }
}

static void tear_down(void)
{
    KRN_CUDA(mem_free, target);
    krn_cuda_device_close(&device);
    free(source);
}

static const uint8_t *there(void)
{
    return (const uint8_t *)(uintptr_t)target;
}

static struct krn_upload *open_upload(unsigned threads)
{
    struct shm_error err = {0};
    struct krn_upload *u;
    const struct krn_upload_config config = {.device = device, .threads = threads, .slot_bytes = SLOT};
    cr_assert(krn_upload_open(&config, &u, &err) == 0, "%s", err.text);
    return u;
}

/* Pieces of odd sizes, smaller and larger than a slot; what lies between them stays. */
static void put_pieces(struct krn_upload *u, uint8_t *expect)
{
    uint32_t n = 1;
    for (uint32_t at = 3; at + n < BYTES; at += n + 7, n = n * 2 % 300007 + 1) {
        cr_assert_eq(krn_upload_put(u, target + at, source + at, n), 0);
        memcpy(expect + at, source + at, n);
    }
    cr_assert_eq(krn_upload_put(u, target, source, 0), 0);
}

Test(upload, all_bytes_arrive, .init = set_up, .fini = tear_down)
{
    uint8_t *expect = malloc(BYTES);
    setenv("FAKECUDA_DELAY_US", "200",
           1); /* a slot is filled again while the link reads it, if nobody waits */
    for (unsigned threads = 1; threads <= 5; threads += 2) {
        memset((void *)(uintptr_t)target, 0xee, BYTES);
        memset(expect, 0xee, BYTES);
        struct krn_upload *u = open_upload(threads);
        cr_assert_eq(krn_upload_finish(u), 0, "nothing to do is no reason to wait");
        put_pieces(u, expect);
        cr_assert_eq(krn_upload_finish(u), 0);
        cr_expect(memcmp(there(), expect, BYTES) == 0, "%u threads", threads);
        /* again, after it was empty */
        memset((void *)(uintptr_t)target, 0, BYTES);
        cr_assert_eq(krn_upload_put(u, target, source, BYTES), 0);
        cr_assert_eq(krn_upload_finish(u), 0);
        cr_expect(memcmp(there(), source, BYTES) == 0, "%u threads, second time", threads);
        krn_upload_close(&u);
        cr_expect_null(u);
    }
    free(expect);
}

Test(upload, closed_in_the_middle, .init = set_up, .fini = tear_down)
{
    setenv("FAKECUDA_DELAY_US", "2000", 1);
    struct krn_upload *u = open_upload(3);
    cr_assert_eq(krn_upload_put(u, target, source, BYTES), 0);
    krn_upload_close(&u); /* what is on its way arrives before the slots are freed */
    krn_upload_close(&u);
}

Test(upload, a_copy_fails, .fini = tear_down)
{
    setenv("FAKECUDA_FAIL", "cuMemcpyHtoDAsync:40:719", 1);
    set_up();
    struct krn_upload *u = open_upload(3);
    for (uint32_t at = 0; at < BYTES; at += SLOT)
        krn_upload_put(u, target + at, source + at, SLOT);
    cr_expect_eq(krn_upload_finish(u), -EIO);
    cr_expect_str_eq(krn_cuda_detail()->name, "CUDA_ERROR_LAUNCH_FAILED");
    cr_expect_str_eq(krn_cuda_detail()->call, "copy_in_async");
    cr_expect_eq(krn_upload_put(u, target, source, 1), -EIO, "the first failure stays");
    cr_expect_eq(krn_upload_finish(u), -EIO);
    krn_upload_close(&u);
}

Test(upload, no_pinned_memory, .fini = tear_down)
{
    setenv("FAKECUDA_FAIL", "cuMemHostAlloc:2:2", 1); /* the device's own is the first */
    set_up();
    struct shm_error err = {0};
    struct krn_upload *u = NULL;
    const struct krn_upload_config config = {.device = device};
    cr_expect_eq(krn_upload_open(&config, &u, &err), -ENOMEM);
    cr_expect(strstr(err.text, "pinned") && strstr(err.text, "OUT_OF_MEMORY"), "%s", err.text);
    cr_expect_null(u);
}
