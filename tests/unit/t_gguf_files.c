/* SPDX-License-Identifier: MIT */
/* The GGUF reader on real files: descriptors, fingerprint, shards. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/prt_gguf.h"
#include "tests/unit/gguf_build.h"

TestSuite(gguf_files, .timeout = 30);

static char dir[64];

static void make_dir(void)
{
    snprintf(dir, sizeof(dir), "/tmp/t_gguf.XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static void remove_dir(void)
{
    char cmd[96];

    snprintf(cmd, sizeof(cmd), "rm -rf %s", dir);
    cr_expect_eq(system(cmd), 0);
}

static const char *write_file(const char *name, struct gb_bytes f)
{
    static char path[128];
    FILE *out;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    out = fopen(path, "wb");
    cr_assert_not_null(out);
    cr_assert_eq(fwrite(f.data, 1, f.len, out), f.len);
    fclose(out);
    return path;
}

static void write_model(const char *name, const struct gb_model *opt)
{
    struct gb b;
    struct gb_bytes f;

    gb_init(&b);
    gb_model(&b, opt);
    f = gb_finish(&b);
    write_file(name, f);
    free(f.data);
    gb_free(&b);
}

/* Opening dir/name fails with the code and a line that has text in it. */
static void open_fails(const char *name, int code, const char *text)
{
    char path[128];
    struct prt_gguf *g;
    struct shm_error err = {0};
    int r;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    r = prt_gguf_open(path, &g, &err);
    cr_expect_eq(r, code, "%s: %d", text, r);
    cr_expect(strstr(err.text, text), "'%s' does not say '%s'", err.text, text);
}

Test(gguf_files, file_descriptor_and_size, .init = make_dir, .fini = remove_dir)
{
    struct prt_gguf *g;
    struct shm_error err = {0};
    const struct prt_gguf_shard *s;
    struct stat st;
    char path[128];
    int fd;

    write_model("m.gguf", &(struct gb_model){0});
    snprintf(path, sizeof(path), "%s/m.gguf", dir);
    cr_assert_eq(prt_gguf_open(path, &g, &err), 0, "%s", err.text);
    s = prt_gguf_shard(g, 0);
    cr_assert_eq(fstat(s->fd, &st), 0);
    cr_expect_eq(s->size_bytes, (uint64_t)st.st_size);
    cr_expect_eq(s->mtime_ns, (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec);
    cr_expect(fcntl(s->fd, F_GETFD) & FD_CLOEXEC);
    cr_expect_eq(fcntl(s->fd, F_GETFL) & (O_ACCMODE | O_NONBLOCK), O_RDONLY);
    cr_expect_str_eq(prt_gguf_path(g), path);
    fd = s->fd;
    prt_gguf_close(&g);
    cr_expect_eq(fcntl(fd, F_GETFD), -1, "left open");
}

Test(gguf_files, refuses_what_is_no_file, .init = make_dir, .fini = remove_dir)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/fifo.gguf", dir);
    cr_assert_eq(mkfifo(path, 0600), 0);
    open_fails("fifo.gguf", -EINVAL, "not a regular file"); /* and does not hang */
    open_fails("", -EINVAL, "not a regular file");
    open_fails("none.gguf", -ENOENT, "none.gguf: cannot open: No such file");
    write_file("text.gguf", (struct gb_bytes){(uint8_t *)(uintptr_t) "hello world", 11, 11});
    open_fails("text.gguf", -EINVAL, "not a GGUF file");
}

Test(gguf_files, fingerprint, .init = make_dir, .fini = remove_dir)
{
    struct prt_gguf *g;
    struct shm_error err = {0};
    uint8_t hash[4][16];
    char path[128];
    struct timespec t[2] = {{1000, 0}, {1000, 5}};

    snprintf(path, sizeof(path), "%s/m.gguf", dir);
    for (int i = 0; i < 4; i++) {
        /* as is; again; one nanosecond later; as long, another key. */
        write_model("m.gguf", &(struct gb_model){.skip_key = i == 3 ? "qwen3moe.rope.freq_base" : NULL});
        t[1].tv_nsec = i == 2 ? 6 : 5;
        cr_assert_eq(utimensat(AT_FDCWD, path, t, 0), 0);
        cr_assert_eq(prt_gguf_open(path, &g, &err), 0, "%s", err.text);
        prt_gguf_fingerprint(g, hash[i]);
        prt_gguf_close(&g);
    }
    cr_expect_eq(memcmp(hash[0], hash[1], 16), 0);
    cr_expect_neq(memcmp(hash[0], hash[2], 16), 0);
    cr_expect_neq(memcmp(hash[0], hash[3], 16), 0);
}

static void write_shards(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        char name[64];

        snprintf(name, sizeof(name), "m-%05u-of-%05u.gguf", i + 1, n);
        write_model(name, &(struct gb_model){.shard = i, .shards = n});
    }
}

Test(gguf_files, shards, .init = make_dir, .fini = remove_dir)
{
    struct prt_gguf *g;
    struct shm_error err = {0};
    char path[128];

    write_shards(3);
    for (int given = 1; given <= 3; given++) {
        const struct prt_gguf_tensor *t;

        snprintf(path, sizeof(path), "%s/m-%05d-of-00003.gguf", dir, given);
        cr_assert_eq(prt_gguf_open(path, &g, &err), 0, "%s", err.text);
        cr_expect_eq(prt_gguf_shard_count(g), 3);
        cr_expect_eq(prt_gguf_tensor_count(g), 14);
        cr_expect(prt_gguf_has(g, "general.architecture"));
        t = prt_gguf_find_tensor(g, "output_norm.weight"); /* the second tensor, so in the second shard */
        cr_assert_not_null(t);
        cr_expect_eq(t->shard, 1);
        cr_expect_eq(t->offset, prt_gguf_shard(g, 1)->data_offset);
        cr_expect(prt_gguf_shard(g, 2)->fd >= 0 &&
                  strstr(prt_gguf_shard(g, 2)->path, "m-00003-of-00003.gguf"));
        prt_gguf_close(&g);
    }
}

Test(gguf_files, refuses_bad_shards, .init = make_dir, .fini = remove_dir)
{
    char path[128], other[128];

    write_shards(3);
    snprintf(path, sizeof(path), "%s/m-00002-of-00003.gguf", dir);
    cr_assert_eq(unlink(path), 0);
    open_fails("m-00001-of-00003.gguf", -ENOENT, "m-00002-of-00003.gguf: shard 2 of 3 is missing");
    snprintf(other, sizeof(other), "%s/m-00003-of-00003.gguf", dir);
    cr_assert_eq(link(other, path), 0); /* shard 3 under the name of shard 2 */
    open_fails("m-00001-of-00003.gguf", -EINVAL, "m-00002-of-00003.gguf: key split.no is 2, expected 1");
    unlink(path);
    write_model("m-00002-of-00003.gguf", &(struct gb_model){.shard = 0, .shards = 3});
    open_fails("m-00001-of-00003.gguf", -EINVAL, "m-00002-of-00003.gguf: key split.no is 0, expected 1");
    write_model("m-00002-of-00003.gguf", &(struct gb_model){.shard = 1, .shards = 4});
    open_fails("m-00001-of-00003.gguf", -EINVAL, "key split.count is 4, but the name stands for 3");
    unlink(path);
    write_model("m-00002-of-00003.gguf",
                &(struct gb_model){.shard = 1, .shards = 3, .skip_tensor = "output_norm.weight"});
    open_fails("m-00001-of-00003.gguf", -EINVAL, "key split.tensors.count is 14, but the shards hold 13");
    write_model("x-00001-of-00002.gguf", &(struct gb_model){0});
    write_model("x-00002-of-00002.gguf", &(struct gb_model){0});
    open_fails("x-00002-of-00002.gguf", -EINVAL,
               "x-00001-of-00002.gguf: named as shard 1 of 2, but key split.count is missing");
    write_model("renamed.gguf", &(struct gb_model){.shards = 3});
    open_fails("renamed.gguf", -EINVAL, "shards must be named NAME-00001-of-0000N.gguf");
    write_model("y-00001-of-99999.gguf", &(struct gb_model){0});
    open_fails("y-00001-of-99999.gguf", -EINVAL, "99999 shards, at most 512");
}
