/* SPDX-License-Identifier: MIT */
/* The words of options and reports. */
#include "shm/shm_text.h"
#include "shm/shm_word.h"
#include "shm/shm_worker.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

TestSuite(word, .timeout = 10);

Test(word, what_is_named_is_parsed)
{
    struct shm_error err = {0};
    for (uint32_t v = SHM_POLICY_FULL; v <= SHM_POLICY_ROUTED; v++) {
        uint32_t got = 99;
        cr_expect_eq(shm_policy_parse("--stream", shm_policy_name(v), &got, &err), 0, "%s", err.text);
        cr_expect_eq(got, v);
    }
    for (uint32_t v = SHM_ORDER_INDEX; v <= SHM_ORDER_PREDICTED; v++) {
        uint32_t got = 99;
        cr_expect_eq(shm_order_parse("--order", shm_order_name(v), &got, &err), 0, "%s", err.text);
        cr_expect_eq(got, v);
    }
}

Test(word, wrong_words_name_the_right_ones)
{
    struct shm_error err = {0};
    uint32_t got = 99;
    const char *const wrong[] = {"", "default", "demand", "Full", "full ", "routedx"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_expect_eq(shm_policy_parse("--stream", wrong[i], &got, &err), -EINVAL, "'%s'", wrong[i]);
    cr_expect_str_eq(err.text, "--stream: 'routedx' is not one of full, routed");
    cr_expect_eq(shm_order_parse("--order", "default", &got, &err), -EINVAL);
    cr_expect_str_eq(err.text, "--order: 'default' is not one of index, recent, predicted");
    cr_expect_eq(got, 99u, "written on failure");
}

Test(word, devices)
{
    struct shm_error err = {0};
    uint32_t device = 99;
    int gpu = 99;
    cr_expect(!shm_device_parse("-d", "auto", &device, &gpu, &err) && device == SHM_DEVICE_AUTO && gpu == -1);
    cr_expect(!shm_device_parse("-d", "host", &device, &gpu, &err) && device == SHM_DEVICE_HOST && gpu == -1);
    cr_expect(!shm_device_parse("-d", "cuda", &device, &gpu, &err) && device == SHM_DEVICE_CUDA && gpu == -1);
    cr_expect(!shm_device_parse("-d", "cuda:63", &device, &gpu, &err) && device == SHM_DEVICE_CUDA &&
              gpu == 63);
    const char *const wrong[] = {"cuda:64", "cuda:", "cuda:-1", "cuda: 1", "cuda:1x", "gpu"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_expect_eq(shm_device_parse("-d", wrong[i], &device, &gpu, &err), -EINVAL, "'%s'", wrong[i]);
    cr_expect(device == SHM_DEVICE_CUDA && gpu == 63, "written on failure");
}

Test(word, numbers)
{
    uint64_t n = 7;
    double x = 7;
    cr_expect(!shm_number_parse("-n", "18446744073709551615", 0, UINT64_MAX, &n, NULL) && n == UINT64_MAX);
    const char *const wrong[] = {"", "-1", "+1", " 1", "1 ", "0x1", "18446744073709551616", "11"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_expect_eq(shm_number_parse("-n", wrong[i], 0, 10, &n, NULL), -EINVAL, "'%s'", wrong[i]);
    cr_expect(!shm_real_parse("-x", "-0.5", -1, 1, &x, NULL) && x == -0.5);
    const char *const unreal[] = {"", "nan", "inf", "1.5", "-2", "1x"};
    for (size_t i = 0; i < sizeof unreal / sizeof *unreal; i++)
        cr_expect_eq(shm_real_parse("-x", unreal[i], -1, 1, &x, NULL), -EINVAL, "'%s'", unreal[i]);
    cr_expect_eq(x, -0.5, "written on failure");
}

Test(word, names_of_anything)
{
    uint32_t wrong[] = {4, 100, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_expect_str_eq(shm_policy_name(wrong[i]), "?");
        cr_expect_str_eq(shm_order_name(wrong[i]), "?");
        cr_expect_str_eq(shm_result_name(wrong[i]), "?");
        cr_expect_str_eq(shm_held_off_name(wrong[i]), "?");
        cr_expect_str_eq(shm_held_off_text(wrong[i]), "?");
    }
    cr_expect_null(shm_held_off_text(SHM_HELD_NONE));
    cr_expect(strstr(shm_held_off_text(SHM_HELD_FLOOR), "--floor"));
}

Test(word, a_text_grows_and_keeps_its_first_failure)
{
    struct shm_text t = {0};
    cr_assert(shm_text_add(&t, NULL, 0) == 0 && strcmp(t.bytes, "") == 0);
    for (int i = 0; i < 3000; i++)
        cr_assert_eq(shm_text_add(&t, "ab\0", 3), 0);
    cr_assert(t.n == 9000 && t.bytes[9000] == '\0' && memcmp(t.bytes + 8997, "ab\0", 3) == 0);
    t.n = 1;
    cr_assert(shm_text_add(&t, "c", 1) == 0 && strcmp(t.bytes, "ac") == 0);
    cr_assert_eq(shm_text_add(&t, "d", SIZE_MAX - 1), -ENOMEM);
    cr_assert(shm_text_add(&t, "d", 1) == -ENOMEM && t.rc == -ENOMEM && strcmp(t.bytes, "ac") == 0);
    free(t.bytes);
}
