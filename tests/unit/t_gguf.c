/* SPDX-License-Identifier: MIT */
/* The GGUF reader: what it reads, and that each kind of bad file is refused by its own line. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/prt_gguf.h"
#include "tests/unit/gguf_build.h"

TestSuite(gguf, .timeout = 30);

static int open_bytes(struct gb_bytes f, struct prt_gguf **g, struct shm_error *err)
{
    struct prt_gguf_memory src = {"m.gguf", f.data, f.len};

    *err = (struct shm_error){0};
    return prt_gguf_open_memory(&src, 1, g, err);
}

/* The file that b stands for is refused with -EINVAL and a line that has text in it. */
static void refused(struct gb *b, const char *text)
{
    struct gb_bytes f = gb_finish(b);
    struct prt_gguf *g = (void *)1;
    struct shm_error err;

    cr_expect_eq(open_bytes(f, &g, &err), -EINVAL, "expected a refusal: %s", text);
    cr_expect_eq(g, (void *)1, "written on failure");
    cr_expect(strstr(err.text, text) && strstr(err.text, "m.gguf"), "'%s' does not say '%s'", err.text, text);
    free(f.data);
    gb_free(b);
}

static const uint64_t dims_8x2[2] = {8, 2};

/* Two keys and two tensors of 64 bytes. */
static void small(struct gb *b)
{
    gb_init(b);
    gb_u32(b, "a.number", 7);
    gb_str(b, "a.text", "hello");
    gb_tensor(b, "one", 0, 2, dims_8x2);
    gb_tensor(b, "two", 0, 2, dims_8x2);
}

Test(gguf, reads_v2_and_v3)
{
    for (uint32_t version = 2; version <= 3; version++) {
        struct gb b;
        struct gb_bytes f;
        struct prt_gguf *g;
        struct shm_error err;
        const struct prt_gguf_tensor *t;
        const struct prt_gguf_shard *s;

        small(&b);
        b.version = version;
        f = gb_finish(&b);
        cr_assert_eq(open_bytes(f, &g, &err), 0, "%s", err.text);
        cr_expect_eq(prt_gguf_shard_count(g), 1);
        cr_expect_eq(prt_gguf_tensor_count(g), 2);
        cr_expect_eq(prt_gguf_key_count(g), 2);
        s = prt_gguf_shard(g, 0);
        cr_expect_null(prt_gguf_shard(g, 1));
        cr_expect_eq(s->fd, -1);
        cr_expect_eq(s->size_bytes, f.len);
        cr_expect_eq(s->alignment, 32);
        cr_expect_eq(s->data_offset % 32, 0);
        cr_expect_eq(memcmp(s->header, f.data, s->header_bytes), 0);
        t = prt_gguf_find_tensor(g, "two");
        cr_assert_not_null(t);
        cr_expect_eq(t, prt_gguf_tensor(g, 1));
        cr_expect(t->n_dims == 2 && t->dims[0] == 8 && t->dims[1] == 2 && t->dims[2] == 1 && t->dims[3] == 1);
        cr_expect_eq(t->offset, s->data_offset + 64);
        cr_expect_eq(t->size_bytes, 64);
        cr_expect_eq(f.data[t->offset], 1); /* the builder's pattern of tensor 1 */
        cr_expect_null(prt_gguf_find_tensor(g, "tw"));
        cr_expect_null(prt_gguf_find_tensor(g, "two2"));
        prt_gguf_close(&g);
        cr_expect_null(g);
        prt_gguf_close(&g);
        free(f.data);
        gb_free(&b);
    }
}

Test(gguf, typed_values)
{
    static const int32_t ints[3] = {1, -2, 3};
    struct gb b;
    struct gb_bytes f;
    struct prt_gguf *g;
    struct shm_error err = {0};
    struct prt_gguf_strings strs;
    struct prt_gguf_i32s i32s;
    struct prt_str s;
    uint32_t u32 = 99;
    float f32;
    bool flag;
    double big = 1e300, pi = 3.25;

    gb_init(&b);
    gb_key(&b, "u8", PRT_GGUF_U8, "\xff", 1);
    gb_key(&b, "i8", PRT_GGUF_I8, "\x7f", 1);
    gb_key(&b, "neg", PRT_GGUF_I16, "\xfe\xff", 2);
    gb_key(&b, "u64", PRT_GGUF_U64, "\x00\x00\x00\x00\x01\x00\x00\x00", 8);
    gb_key(&b, "i64", PRT_GGUF_I64, "\x05\x00\x00\x00\x00\x00\x00\x00", 8);
    gb_key(&b, "big", PRT_GGUF_F64, &big, 8);
    gb_key(&b, "pi", PRT_GGUF_F64, &pi, 8);
    gb_f32(&b, "f32", 0.5f);
    gb_f32(&b, "nan", __builtin_nanf(""));
    gb_bool(&b, "yes", 1);
    gb_bool(&b, "two", 2);
    gb_str(&b, "str", "hello");
    gb_strs(&b, "strs", "s", 12);
    gb_i32s(&b, "i32s", ints, 3);
    gb_key(&b, "u32s", PRT_GGUF_ARRAY, "\x04\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\x80", 16);
    f = gb_finish(&b);
    cr_assert_eq(open_bytes(f, &g, &err), 0, "%s", err.text);

    cr_expect(prt_gguf_u32(g, "u8", &u32, &err) == 0 && u32 == 255);
    cr_expect(prt_gguf_u32(g, "i8", &u32, &err) == 0 && u32 == 127);
    cr_expect(prt_gguf_u32(g, "i64", &u32, &err) == 0 && u32 == 5);
    cr_expect_eq(prt_gguf_u32(g, "u64", &u32, &err), -EINVAL);
    cr_expect_str_eq(err.text, "m.gguf: key u64 is 4294967296, the most allowed is 4294967295");
    cr_expect_eq(prt_gguf_u32(g, "neg", &u32, &err), -EINVAL);
    cr_expect_str_eq(err.text, "m.gguf: key neg is -2, must not be negative");
    cr_expect_eq(prt_gguf_u32(g, "str", &u32, &err), -EINVAL);
    cr_expect_str_eq(err.text, "m.gguf: key str is of type string, expected an integer");
    cr_expect_eq(prt_gguf_u32(g, "none", &u32, &err), -ENOENT);
    cr_expect_str_eq(err.text, "m.gguf: key none is missing");
    cr_expect_eq(u32, 5, "written on failure");

    cr_expect(prt_gguf_f32(g, "f32", &f32, &err) == 0 && f32 == 0.5f);
    cr_expect(prt_gguf_f32(g, "pi", &f32, &err) == 0 && f32 == 3.25f);
    cr_expect_eq(prt_gguf_f32(g, "big", &f32, &err), -EINVAL);
    cr_expect_eq(prt_gguf_f32(g, "nan", &f32, &err), -EINVAL);
    cr_expect_eq(prt_gguf_f32(g, "u8", &f32, &err), -EINVAL);
    cr_expect(prt_gguf_bool(g, "yes", &flag, &err) == 0 && flag);
    cr_expect_eq(prt_gguf_bool(g, "two", &flag, &err), -EINVAL);
    cr_expect(prt_gguf_str(g, "str", &s, &err) == 0 && s.len == 5 && !memcmp(s.data, "hello", 5));
    cr_expect_eq(prt_gguf_str(g, "strs", &s, &err), -EINVAL);
    cr_expect_str_eq(err.text, "m.gguf: key strs is an array of string, expected a string");

    cr_assert_eq(prt_gguf_strings(g, "strs", &strs, &err), 0);
    cr_expect(strs.count == 12 && strs.size_bytes == 10 * 2 + 2 * 3);
    for (int i = 0; i < 12; i++) {
        char want[8];

        snprintf(want, sizeof(want), "s%d", i);
        cr_assert(prt_gguf_strings_next(&strs, &s));
        cr_expect(s.len == strlen(want) && !memcmp(s.data, want, s.len));
    }
    cr_expect_not(prt_gguf_strings_next(&strs, &s));
    cr_expect_eq(prt_gguf_strings(g, "i32s", &strs, &err), -EINVAL);
    cr_assert_eq(prt_gguf_i32s(g, "i32s", &i32s, &err), 0);
    cr_expect(i32s.count == 3 && prt_gguf_i32_at(&i32s, 1) == -2 && prt_gguf_i32_at(&i32s, 2) == 3);
    cr_expect_eq(prt_gguf_i32s(g, "u32s", &i32s, &err), -EINVAL);
    cr_expect_eq(prt_gguf_i32s(g, "strs", &i32s, &err), -EINVAL);
    prt_gguf_close(&g);
    free(f.data);
    gb_free(&b);
}

Test(gguf, refuses_other_formats)
{
    struct gb b;

    small(&b);
    b.version = 1;
    refused(&b, "GGUF version 1, supported are 2 and 3");
    small(&b);
    b.version = 0x03000000;
    refused(&b, "big-endian");
    small(&b);
    b.n_kv_claim = 1ull << 40;
    refused(&b, "claims 1099511627776 keys");
    small(&b);
    b.n_tensors_claim = UINT64_MAX - 1;
    refused(&b, "claims 18446744073709551614 tensors");
    small(&b);
    b.n_kv_claim = 12;
    refused(&b, "m.gguf");
}

Test(gguf, refuses_bad_keys)
{
    struct gb b;

    small(&b);
    gb_u32(&b, "a.text", 1);
    refused(&b, "key a.text appears twice");
    small(&b);
    gb_key(&b, "odd", 13, "", 1);
    refused(&b, "key odd has value type 13, known are 0 to 12");
    small(&b);
    gb_u32(&b, "", 1);
    refused(&b, "a key at offset 79 has 0 bytes");
    small(&b);
    gb_key(&b, "long", PRT_GGUF_STRING, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
    refused(&b, "file ends inside a string");
    small(&b);
    gb_key(&b, "long", PRT_GGUF_ARRAY, "\x00\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", 12);
    refused(&b, "claims 18446744073709551615 elements");
    small(&b);
    gb_key(&b, "long", PRT_GGUF_ARRAY, "\x0a\0\0\0\x01\0\0\0\0\0\0\x20", 12);
    refused(&b, "claims 2305843009213693953 elements");
    small(&b);
    gb_key(&b, "odd", PRT_GGUF_ARRAY, "\x0d\0\0\0\x01\0\0\0\0\0\0\0", 12);
    refused(&b, "has element type 13");
}

/* depth arrays within each other, the innermost one empty. */
static void nested(struct gb *b, int depth)
{
    small(b);
    gb_key(b, "nest", PRT_GGUF_ARRAY, NULL, 0);
    for (int i = 1; i < depth; i++) {
        gb_put_u32(&b->kv, PRT_GGUF_ARRAY);
        gb_put_u64(&b->kv, 1);
    }
    gb_put_u32(&b->kv, PRT_GGUF_U8);
    gb_put_u64(&b->kv, 0);
}

Test(gguf, bounds_nesting)
{
    struct gb b;
    struct gb_bytes f;
    struct prt_gguf *g;
    struct shm_error err;

    nested(&b, PRT_GGUF_NESTING_MAX);
    f = gb_finish(&b);
    cr_assert_eq(open_bytes(f, &g, &err), 0, "%s", err.text);
    cr_expect_not_null(prt_gguf_find_tensor(g, "two"));
    prt_gguf_close(&g);
    free(f.data);
    gb_free(&b);
    nested(&b, PRT_GGUF_NESTING_MAX + 1);
    refused(&b, "arrays nested deeper than 4");
}

Test(gguf, refuses_bad_tensors)
{
    static const uint64_t dims[5] = {8, 2, 1, 1, 1}, row_33[1] = {33};
    struct gb b;
    char name[300];

    small(&b);
    gb_tensor(&b, "one", 0, 2, dims_8x2);
    refused(&b, "tensor one appears twice");
    small(&b);
    gb_tensor(&b, "three", 0, 5, dims);
    refused(&b, "tensor three has 5 dimensions, supported are 1 to 4");
    small(&b);
    gb_tensor(&b, "three", 0, 0, dims);
    refused(&b, "tensor three has 0 dimensions");
    small(&b);
    gb_tensor(&b, "three", 0, 2, dims_8x2)->dims[1] = 0;
    refused(&b, "tensor three: dimension 1 is 0, must not be 0");
    small(&b);
    gb_tensor(&b, "three", 0, 2, dims_8x2)->dims[1] = 1ull << 62;
    refused(&b, "tensor three: dimension 1 is 4611686018427387904, the number of elements overflows");
    small(&b);
    gb_tensor(&b, "three", 0, 2, dims_8x2)->dims[1] = 1ull << 60;
    refused(&b, "tensor three: its size in bytes overflows");
    small(&b);
    gb_tensor(&b, "three", 4711, 2, dims_8x2);
    refused(&b, "tensor three has type number 4711, not known");
    small(&b);
    gb_tensor(&b, "three", 8, 1, row_33);
    refused(&b, "tensor three: rows of 33 elements do not divide into Q8_0 blocks of 32");
    small(&b);
    memset(name, 'x', sizeof(name));
    name[256] = '\0';
    gb_tensor(&b, name, 0, 2, dims_8x2);
    refused(&b, "has 256 bytes, allowed are 1 to 255");
}

Test(gguf, refuses_bad_ranges)
{
    struct gb b;

    small(&b);
    b.tensor[1].offset = 40;
    refused(&b, "tensor two: data offset 40 is not aligned to 32");
    small(&b);
    b.tensor[1].offset = 32;
    refused(&b, "tensors one and two overlap at data offset 32");
    small(&b);
    b.tensor[0].offset = 64; /* same start, in the other order */
    refused(&b, "overlap at data offset 64");
    small(&b);
    b.tensor[1].offset = 96;
    refused(&b, "tensor two: 64 bytes at data offset 96, but the file holds 128 bytes of data");
    small(&b);
    b.tensor[1].offset = UINT64_MAX - 31;
    refused(&b, "tensor two: 64 bytes at data offset 18446744073709551584");
    small(&b);
    b.tensor[1].dims[1] = 3; /* 32 bytes more than there are */
    refused(&b, "tensor two: 96 bytes at data offset 64");
}

Test(gguf, alignment)
{
    static const uint32_t bad[] = {0, 1, 4, 24, 1u << 21};
    struct gb b;
    struct gb_bytes f;
    struct prt_gguf *g;
    struct shm_error err;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        small(&b);
        gb_u32(&b, "general.alignment", bad[i]);
        refused(&b, "supported are powers of two from 8 to 1048576");
    }
    for (uint32_t a = 8; a <= 1u << 20; a *= 512) {
        small(&b);
        b.alignment = a;
        gb_u32(&b, "general.alignment", a);
        f = gb_finish(&b);
        cr_assert_eq(open_bytes(f, &g, &err), 0, "%s", err.text);
        cr_expect_eq(prt_gguf_tensor(g, 1)->offset % a, 0);
        prt_gguf_close(&g);
        free(f.data);
        gb_free(&b);
    }
}

Test(gguf, every_prefix_is_refused)
{
    struct gb b;
    struct gb_bytes f;
    struct prt_gguf *g;
    struct shm_error err;

    gb_init(&b);
    gb_model(&b, &(struct gb_model){.untied = 1});
    f = gb_finish(&b);
    for (size_t n = 0; n < f.len; n++) {
        /* An exact copy, so that a read beyond it is seen by the sanitizer. */
        struct gb_bytes cut = {malloc(n ? n : 1), n, n};

        memcpy(cut.data, f.data, n);
        cr_assert_eq(open_bytes(cut, &g, &err), -EINVAL, "%zu of %zu bytes", n, f.len);
        cr_assert(err.text[0] && !strchr(err.text, '\n'));
        free(cut.data);
    }
    cr_assert_eq(open_bytes(f, &g, &err), 0, "%s", err.text);
    prt_gguf_close(&g);
    free(f.data);
    gb_free(&b);
}

Test(gguf, tensor_in_two_shards)
{
    struct gb b[2];
    struct gb_bytes f[2];
    struct prt_gguf_memory src[2];
    struct prt_gguf *g;
    struct shm_error err = {0};

    for (uint32_t i = 0; i < 2; i++) {
        gb_init(&b[i]);
        gb_model(&b[i], &(struct gb_model){.shard = i, .shards = 2, .skip_key = "split.tensors.count"});
    }
    gb_tensor(&b[1], "token_embd.weight", 0, 2, dims_8x2);
    for (uint32_t i = 0; i < 2; i++) {
        f[i] = gb_finish(&b[i]);
        src[i] = (struct prt_gguf_memory){i ? "b.gguf" : "a.gguf", f[i].data, f[i].len};
        gb_free(&b[i]);
    }
    cr_expect_eq(prt_gguf_open_memory(src, 2, &g, &err), -EINVAL);
    cr_expect(strstr(err.text, "tensor token_embd.weight appears twice"), "%s", err.text);
    free(f[0].data);
    free(f[1].data);
}

/* A vocabulary of 200,000 tokens and merges: 10 ms or so; the bound is for slow machines and sanitizers. */
Test(gguf, large_vocabulary_is_fast)
{
    struct gb b;
    struct gb_bytes f;
    struct prt_gguf *g;
    struct shm_error err;
    struct timespec t0, t1;

    small(&b);
    gb_strs(&b, "tokens", "token", 200000);
    gb_strs(&b, "merges", "left right", 200000);
    f = gb_finish(&b);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    cr_assert_eq(open_bytes(f, &g, &err), 0, "%s", err.text);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    cr_expect_lt((double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec) / 1e9, 1.0);
    prt_gguf_close(&g);
    free(f.data);
    gb_free(&b);
}
