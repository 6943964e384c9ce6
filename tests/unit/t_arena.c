/* SPDX-License-Identifier: MIT */
/* Plan, place, limits, memory, adoption. */
#include "arena_fixture.h"
#include "expertd/exd_arena_priv.h"
#include "expertd/exd_progress.h"
#include "shm/shm_verify.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct arena_fixture fx;

static void setup(void)
{
    fixture_open(&fx);
}

static void teardown(void)
{
    fixture_close(&fx);
}

TestSuite(arena, .init = setup, .fini = teardown, .timeout = 60);

static bool has(const char *text, const char *part)
{
    return strstr(text, part) != NULL;
}

/* --- plan --- */

Test(arena, plan_is_aligned_disjoint_and_inside)
{
    const struct exd_plan *p = fx.plan;
    const struct shm_catalog *c = (const struct shm_catalog *)p->catalog;
    const struct shm_tensor *dense = (const struct shm_tensor *)(p->catalog + c->dense);
    const struct shm_layer *layer = (const struct shm_layer *)(p->catalog + c->layers);
    cr_assert_eq(p->units, fx.model->n_dense + fx.model->hp.layers * fx.model->hp.experts);
    cr_assert_geq(p->catalog_offset, sizeof(struct shm_arena));
    cr_assert_geq(p->sums_offset, p->catalog_offset + p->catalog_bytes);
    cr_assert_geq(p->ready_offset, p->sums_offset + 8ull * p->units);
    cr_assert_geq(p->data_offset, p->ready_offset + p->units);
    cr_assert_eq(p->data_offset % SHM_ARENA_DATA_ALIGN, 0);
    cr_assert_eq(p->total_bytes % SHM_ARENA_DATA_ALIGN, 0);
    uint64_t end = p->data_offset, load = 0;
    for (uint32_t i = 0; i < c->n_dense; i++) {
        cr_assert_geq(dense[i].offset, end);
        cr_assert_eq(dense[i].offset % SHM_ARENA_ALIGN, 0);
        cr_assert_eq(dense[i].bytes, fx.model->dense[i].tensor->size_bytes);
        end = dense[i].offset + dense[i].bytes;
        load += dense[i].bytes;
    }
    for (uint32_t l = 0; l < c->n_layers; l++) {
        const struct shm_part *part[] = {&layer[l].gate, &layer[l].up, &layer[l].down};
        cr_assert_geq(layer[l].blobs_offset, end);
        cr_assert_eq(layer[l].blobs_offset % 4096, 0);
        cr_assert_eq(layer[l].blob_stride % SHM_ARENA_ALIGN, 0);
        cr_assert_geq(layer[l].blob_stride, layer[l].blob_bytes);
        uint64_t in_blob = 0;
        for (unsigned i = 0; i < 3; i++) {
            cr_assert_geq(part[i]->offset, in_blob);
            cr_assert_eq(part[i]->offset % SHM_ARENA_ALIGN, 0);
            in_blob = part[i]->offset + part[i]->bytes;
            load += part[i]->bytes * fx.model->hp.experts;
        }
        cr_assert_eq(in_blob, layer[l].blob_bytes);
        end = layer[l].blobs_offset + layer[l].blob_stride * fx.model->hp.experts;
    }
    cr_assert_leq(end, p->total_bytes);
    cr_assert_lt(p->total_bytes - end, SHM_ARENA_DATA_ALIGN);
    cr_assert_eq(load, p->load_bytes);
}

static void same_strings(const uint8_t *catalog, const struct shm_strings *s, struct prt_gguf_strings walk)
{
    const uint32_t *offset = (const uint32_t *)(catalog + s->offsets);
    struct prt_str text;
    uint32_t i = 0;
    cr_assert_eq(s->count, walk.count);
    for (; prt_gguf_strings_next(&walk, &text); i++) {
        cr_assert_eq(offset[i + 1] - offset[i], text.len, "string %u", i);
        cr_assert(memcmp(catalog + s->bytes + offset[i], text.data, text.len) == 0, "string %u", i);
    }
    cr_assert_eq(i, s->count);
}

Test(arena, catalog_carries_the_tokenizer_and_the_hyper_parameters)
{
    const struct shm_catalog *c = (const struct shm_catalog *)fx.plan->catalog;
    const struct exd_tokenizer *t = &fx.model->tok;
    same_strings(fx.plan->catalog, &c->tokenizer.tokens, t->tokens);
    same_strings(fx.plan->catalog, &c->tokenizer.merges, t->merges);
    cr_assert_neq(c->tokenizer.types, 0);
    for (uint32_t i = 0; i < t->types.count; i++)
        cr_assert_eq(((const int32_t *)(fx.plan->catalog + c->tokenizer.types))[i],
                     prt_gguf_i32_at(&t->types, i));
    cr_assert_str_eq((const char *)fx.plan->catalog + c->tokenizer.model.offset, "gpt2");
    cr_assert_str_eq((const char *)fx.plan->catalog + c->tokenizer.pre.offset, "qwen2");
    cr_assert_eq(c->tokenizer.chat_template.bytes, t->chat_template.len);
    cr_assert_eq(c->tokenizer.eos, t->eos);
    cr_assert_eq(c->tokenizer.eot, t->eot);
    cr_assert_str_eq(c->hparams.architecture, "qwen3moe");
    cr_assert_eq(c->hparams.hidden, fx.model->hp.hidden);
    cr_assert_eq(c->hparams.experts_used, fx.model->hp.experts_used);
    cr_assert_eq(c->hparams.kv_heads, fx.model->hp.kv_heads);
    cr_assert_eq(c->hparams.rope_base, fx.model->hp.rope_base);
}

/* --- limits --- */

static int limits(const char *root_dir, uint64_t bytes, bool locked, struct shm_error *err)
{
    struct exd_limits_need need = {
        .dir = fx.dir, .file_bytes = bytes, .memory_bytes = 1 << 20, .locked = locked, .root = root_dir};
    *err = (struct shm_error){0};
    return exd_limits_check(&need, err);
}

Test(arena, limits_are_named)
{
    char root[] = "/tmp/exd_limits_XXXXXX", path[512];
    struct shm_error err;
    struct rlimit old, r;
    const uint64_t need = 8ull << 20;
    cr_assert_not_null(mkdtemp(root));
#define FAKE(name, text) (snprintf(path, sizeof path, "%s%s", root, name), fixture_write(path, text))
    cr_assert_eq(limits(root, need, true, &err), 0, "%s", err.text);

    FAKE("/proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n");
    cr_assert_eq(limits(root, need, false, &err), -ENOMEM);
    cr_assert(has(err.text, "MemAvailable") && has(err.text, "8.0 MiB") && has(err.text, "9.0 MiB"), "%s",
              err.text);
    FAKE("/proc/meminfo", "MemAvailable: 9216 kB\n");
    cr_assert_eq(limits(root, need, false, &err), 0, "%s", err.text);

    /* version 2: an ancestor's limit counts, its page cache gives way */
    FAKE("/proc/self/cgroup", "0::/top/leaf\n");
    FAKE("/sys/fs/cgroup/top/leaf/memory.max", "max\n");
    FAKE("/sys/fs/cgroup/top/memory.max", "20971520\n");
    FAKE("/sys/fs/cgroup/top/memory.current", "12582912\n");
    cr_assert_eq(limits(root, need, false, &err), -ENOMEM);
    cr_assert(has(err.text, "/sys/fs/cgroup/top") && has(err.text, "memory.max"), "%s", err.text);
    FAKE("/sys/fs/cgroup/top/memory.stat", "anon 5\nactive_file 1048576\ninactive_file 4194304\n");
    cr_assert_eq(limits(root, need, false, &err), 0, "%s", err.text);

    FAKE("/proc/self/cgroup", "8:pids:/x\n4:cpu,memory:/far/away\n0::/\n");
    FAKE("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4194304\n"); /* the container's own, at the root */
    cr_assert_eq(limits(root, need, false, &err), -ENOMEM);
    cr_assert(has(err.text, "memory.limit_in_bytes"), "%s", err.text);
    FAKE("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    cr_assert_eq(limits(root, need, false, &err), 0, "%s", err.text);

    getrlimit(RLIMIT_FSIZE, &old);
    r = (struct rlimit){need - 1, old.rlim_max};
    setrlimit(RLIMIT_FSIZE, &r);
    cr_assert_eq(limits(root, need, false, &err), -EFBIG);
    cr_assert(has(err.text, "RLIMIT_FSIZE"), "%s", err.text);
    setrlimit(RLIMIT_FSIZE, &old);

    getrlimit(RLIMIT_MEMLOCK, &old);
    r = (struct rlimit){need - 1, old.rlim_max};
    setrlimit(RLIMIT_MEMLOCK, &r);
    cr_assert_eq(limits(root, need, false, &err), 0);
    cr_assert_eq(limits(root, need, true, &err), -EPERM);
    cr_assert(has(err.text, "RLIMIT_MEMLOCK"), "%s", err.text);
    FAKE("/proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
    cr_assert_eq(limits(root, need, true, &err), 0, "%s", err.text);
    setrlimit(RLIMIT_MEMLOCK, &old);

#ifndef __SANITIZE_ADDRESS__ /* which maps terabytes */
    getrlimit(RLIMIT_AS, &old);
    r = (struct rlimit){1ull << 36, old.rlim_max};
    setrlimit(RLIMIT_AS, &r);
    FAKE("/proc/self/statm", "16777000 1 1 1 0 1 0\n");
    cr_assert_eq(limits(root, need, false, &err), -ENOMEM);
    cr_assert(has(err.text, "RLIMIT_AS"), "%s", err.text);
    setrlimit(RLIMIT_AS, &old);
#endif
    cr_assert_eq(limits(root, INT64_MAX / 4, false, &err), -ENOSPC); /* more than any tmpfs */
    cr_assert(has(err.text, fx.dir) && has(err.text, "tmpfs has"), "%s", err.text);
    snprintf(path, sizeof path, "rm -rf %s", root);
    cr_assert_eq(system(path), 0);
}

Test(arena, a_limit_leaves_nothing)
{
    char root[] = "/tmp/exd_limits_XXXXXX", path[512];
    struct exd_arena *arena = NULL;
    struct shm_error err = {0};
    cr_assert_not_null(mkdtemp(root));
    FAKE("/proc/meminfo", "MemAvailable: 100 kB\n");
    fx.config.limits_root = root;
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), -ENOMEM);
    cr_assert_null(arena);
    cr_assert(has(err.text, "MemAvailable") && !strchr(err.text, '\n'));
    cr_assert_eq(fixture_count(fx.dir), 0);
    snprintf(path, sizeof path, "rm -rf %s", root);
    cr_assert_eq(system(path), 0);
}

/* --- memory --- */

static bool small_tmpfs(const char *dir, const char *size)
{
    char option[64];
    mkdir(dir, 0700);
    snprintf(option, sizeof option, "size=%s,mode=0700", size);
    return mount("exd_test", dir, "tmpfs", 0, option) == 0;
}

Test(arena, a_full_tmpfs_is_one_line_and_leaves_nothing)
{
    char dir[] = "/tmp/exd_small_XXXXXX", sub[128];
    struct exd_arena *arena = NULL;
    struct shm_error err = {0};
    cr_assert_not_null(mkdtemp(dir));
    if (!small_tmpfs(dir, "8m")) {
        rmdir(dir);
        cr_skip_test("mounting a tmpfs needs root");
    }
    fx.config.arena_dir = dir;
    int rc = exd_arena_open(&fx.config, fx.plan, &arena, &err);
    unsigned left = fixture_count(dir);

    /* the same when others take the space after it was looked at */
    struct exd_place place = {.fs = EXD_FS_TMPFS};
    struct shm_error late[2] = {0};
    int late_rc[2];
    snprintf(place.dir, sizeof place.dir, "%s", dir);
    snprintf(sub, sizeof sub, "%s/file", dir);
    for (int populate = 0; populate < 2; populate++) {
        int fd = open(sub, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        cr_assert_eq(ftruncate(fd, 16 << 20), 0);
        uint8_t *base = mmap(NULL, 16 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        late_rc[populate] = exd_memory_allocate(&place, fd, base, 16 << 20, populate, NULL, &late[populate]);
        munmap(base, 16 << 20);
        close(fd);
        unlink(sub);
    }
    umount2(dir, MNT_DETACH);
    rmdir(dir);
    cr_assert_eq(rc, -ENOSPC);
    cr_assert(has(err.text, dir) && has(err.text, "--arena-dir") && !strchr(err.text, '\n'), "%s", err.text);
    cr_assert_eq(left, 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(late_rc[i], -ENOSPC, "%s", late[i].text);
        cr_assert(has(late[i].text, "no more memory after"), "%s", late[i].text);
    }
}

Test(arena, allocation_is_complete_and_can_be_cancelled)
{
    struct exd_arena *arena = NULL;
    struct shm_error err = {0};
    struct stat st;
    atomic_int cancel = 1;
    fx.config.cancel = &cancel;
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), -ECANCELED);
    cr_assert_eq(fixture_count(fx.dir), 0);
    cancel = 0;
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    cr_assert_eq(stat(fx.file, &st), 0);
    cr_assert_eq((uint64_t)st.st_size, fx.plan->total_bytes);
    cr_assert_geq((uint64_t)st.st_blocks * 512, fx.plan->total_bytes); /* no hole that could fault later */
    cr_assert_eq(st.st_mode & 07777, 0400);
    exd_arena_close(&arena, true); /* not loaded: kept by nobody */
    cr_assert_eq(fixture_count(fx.dir), 0);
}

Test(arena, huge_pages_where_the_file_system_gives_them)
{
    char dir[] = "/tmp/exd_huge_XXXXXX";
    struct exd_arena *arena = NULL;
    struct exd_arena_info info;
    struct shm_error err = {0};
    cr_assert_not_null(mkdtemp(dir));
    if (mount("exd_test", dir, "tmpfs", 0, "size=64m,mode=0700,huge=advise") != 0) {
        rmdir(dir);
        cr_skip_test("no tmpfs with huge pages to be had");
    }
    fx.config.arena_dir = dir;
    int rc = exd_arena_open(&fx.config, fx.plan, &arena, &err);
    if (!rc)
        exd_arena_info(arena, &info);
    exd_arena_close(&arena, false);
    umount2(dir, MNT_DETACH);
    rmdir(dir);
    cr_assert_eq(rc, 0, "%s", err.text);
    cr_assert(info.huge);
}

Test(arena, huge_pages_of_a_pool_that_is_too_small)
{
    char dir[] = "/tmp/exd_huge_XXXXXX", root[] = "/tmp/exd_limits_XXXXXX", path[512];
    struct exd_arena *arena = NULL;
    struct shm_error err = {0}, err_enough = {0};
    cr_assert_not_null(mkdtemp(dir));
    if (mount("exd_test", dir, "hugetlbfs", 0, "pagesize=2M") != 0) {
        rmdir(dir);
        cr_skip_test("no hugetlbfs to be had");
    }
    cr_assert_not_null(mkdtemp(root));
    FAKE("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "6\n");
    fx.config.arena_dir = dir;
    fx.config.limits_root = root;
    int rc = exd_arena_open(&fx.config, fx.plan, &arena, &err);
    unsigned left = fixture_count(dir);
    struct exd_limits_need need = {.dir = dir, .file_bytes = 12 << 20, .root = root};
    int rc_enough = exd_limits_check(&need, &err_enough);
    umount2(dir, MNT_DETACH);
    rmdir(dir);
    snprintf(path, sizeof path, "rm -rf %s", root);
    cr_assert_eq(system(path), 0);
    cr_assert_eq(rc, -ENOSPC);
    cr_assert(has(err.text, "12.0 MiB of huge pages are free") && has(err.text, "vm.nr_hugepages"), "%s",
              err.text);
    cr_assert_eq(left, 0);
    cr_assert_eq(rc_enough, 0, "%s", err_enough.text);
}

Test(arena, lock_limit_is_a_warning_or_an_error)
{
    struct exd_arena *arena = NULL;
    struct exd_arena_info info;
    struct shm_error err = {0};
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    exd_arena_info(arena, &info);
    cr_assert(info.pinned || has(info.warning, "RLIMIT_MEMLOCK"));
    exd_arena_close(&arena, true);
    if (geteuid() != 0)
        cr_skip_test("the second half becomes another user");
    cr_assert_eq(chown(fx.dir, 65534, 65534), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit r = {65536, 65536};
        if (setrlimit(RLIMIT_MEMLOCK, &r) != 0 || setgid(65534) != 0 || setuid(65534) != 0)
            _exit(10);
        if (exd_arena_open(&fx.config, fx.plan, &arena, &err) != 0)
            _exit(11);
        exd_arena_info(arena, &info);
        int code = info.pinned || !has(info.warning, "RLIMIT_MEMLOCK") ? 12 : 0;
        exd_arena_close(&arena, false);
        fx.config.pin = EXD_PIN_REQUIRE;
        if (exd_arena_open(&fx.config, fx.plan, &arena, &err) != -EPERM || !has(err.text, "RLIMIT_MEMLOCK"))
            code = 13;
        _exit(code);
    }
    int status;
    waitpid(pid, &status, 0);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
    cr_assert_eq(fixture_count(fx.dir), 0);
}

/* --- place --- */

Test(arena, place_is_dev_shm_when_the_instance_is_on_a_disk)
{
    char dir[] = "/tmp/exd_disk_XXXXXX", shm[256], user[64];
    struct exd_arena *arena = NULL;
    struct exd_arena_info info;
    struct shm_error err = {0};
    enum exd_fs fs;
    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(exd_limits_fs(dir, &fs), 0);
    fx.config.instance_dir = dir;
    snprintf(shm, sizeof shm, "/dev/shm/expertd-%u/%s-", (unsigned)geteuid(), fx.instance);
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    exd_arena_info(arena, &info);
    if (fs == EXD_FS_OTHER) {
        cr_assert(strncmp(info.path, shm, strlen(shm)) == 0 && info.fs == EXD_FS_TMPFS, "%s", info.path);
        snprintf(shm, sizeof shm, "%.255s", info.path);
        *strrchr(shm, '/') = 0;
    }
    exd_arena_close(&arena, false);
    cr_assert_neq(access(shm, F_OK), 0);

    /* a directory that others may enter is not used; the fallback says so */
    snprintf(user, sizeof user, "/dev/shm/expertd-%u", (unsigned)geteuid());
    mkdir(user, 0700);
    mkdir(shm, 0755);
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    exd_arena_info(arena, &info);
    if (fs == EXD_FS_OTHER) {
        cr_assert(strncmp(info.path, dir, strlen(dir)) == 0 && info.fs == EXD_FS_OTHER, "%s", info.path);
        cr_assert(has(info.warning, "disk") && has(fx.log, "may enter"), "%s", fx.log);
    }
    exd_arena_close(&arena, false);
    rmdir(shm);
    rmdir(user);
    cr_assert_eq(rmdir(dir), 0);
}

static void *come_and_go(void *arg)
{
    struct exd_arena_config *c = arg;
    uintptr_t failures = 0;
    for (int i = 0; i < 400; i++) {
        struct exd_place place;
        struct shm_error err = {0};
        if (exd_place_open(c, &place, &err) || place.fs != EXD_FS_TMPFS)
            failures++;
        else
            exd_place_close(&place, true);
    }
    return (void *)failures;
}

/* The user's directory goes with the last arena in it, while others make theirs. */
Test(arena, the_users_directory_goes_when_it_is_empty)
{
    char dir[] = "/tmp/exd_disk_XXXXXX", name[3][80];
    struct exd_arena_config config[3];
    pthread_t thread[3];
    void *failures;
    enum exd_fs fs;
    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(exd_limits_fs(dir, &fs), 0);
    for (int i = 0; i < 3 && fs == EXD_FS_OTHER; i++) {
        snprintf(name[i], sizeof name[i], "%s-%d", fx.instance, i);
        config[i] = (struct exd_arena_config){.instance = name[i], .instance_dir = dir};
        cr_assert_eq(pthread_create(&thread[i], NULL, come_and_go, &config[i]), 0);
    }
    for (int i = 0; i < 3 && fs == EXD_FS_OTHER; i++) {
        pthread_join(thread[i], &failures);
        cr_expect_null(failures, "%zu of 400 lost the race", (size_t)(uintptr_t)failures);
    }
    char user[64];
    snprintf(user, sizeof user, "/dev/shm/expertd-%u", (unsigned)geteuid());
    cr_expect(access(user, F_OK) != 0 || fixture_count(user) > 0, "left behind empty");
    cr_assert_eq(rmdir(dir), 0);
}

Test(arena, one_expertd_at_a_time)
{
    struct exd_arena *arena = NULL, *second = NULL;
    struct shm_error err = {0};
    char pid[32];
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &second, &err), -EBUSY);
    snprintf(pid, sizeof pid, "process %d", (int)getpid());
    cr_assert(has(err.text, pid) && has(err.text, "--instance"), "%s", err.text);
    cr_assert_eq(access(fx.file, F_OK), 0);
    exd_arena_close(&arena, true);
    fx.config.instance = "../x";
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &second, &err), -EINVAL);
}

/* --- adoption --- */

static void patch(uint64_t offset, const void *bytes, size_t n)
{
    chmod(fx.file, 0600);
    int fd = open(fx.file, O_RDWR | O_CLOEXEC);
    cr_assert(fd >= 0 && pwrite(fd, bytes, n, (off_t)offset) == (ssize_t)n);
    close(fd);
}

/* Breaks the file, sees it named and built anew, whole. */
static void rebuilt(enum exd_found found, const char *text)
{
    struct exd_arena_info info;
    struct shm_error err = {0};
    fx.log[0] = 0;
    struct exd_arena *arena = fixture_loaded(&fx);
    exd_arena_info(arena, &info);
    cr_assert_eq(info.found, found, "%s instead of %s: %s", exd_found_name(info.found), exd_found_name(found),
                 fx.log);
    cr_assert(has(fx.log, text), "no '%s' in %s", text, fx.log);
    cr_assert_eq(info.generation, found == EXD_FOUND_ADOPTED ? 2 : 1);
    cr_assert_eq(fixture_verify(arena, 2, &err), 0, "%s", err.text);
    exd_arena_close(&arena, false);
    cr_assert_eq(fixture_count(fx.dir), 0);
    arena = fixture_loaded(&fx);
    exd_arena_close(&arena, true);
}

Test(arena, adopted_or_named_and_rebuilt)
{
    struct exd_arena *arena = fixture_loaded(&fx);
    exd_arena_close(&arena, true);
    rebuilt(EXD_FOUND_ADOPTED, "adopted");

    uint8_t byte = 0xee;
    uint32_t word = SHM_ARENA_LOADING;
    uint64_t zero = 0;
    patch(offsetof(struct shm_arena, fingerprint), &byte, 1);
    rebuilt(EXD_FOUND_FOREIGN, "wrong fingerprint");
    patch(offsetof(struct shm_arena, state), &word, 4);
    rebuilt(EXD_FOUND_TORN, "torn");
    patch(offsetof(struct shm_header, epoch), &zero, 8);
    rebuilt(EXD_FOUND_TORN, "not finished");
    patch(0, "EXDARN99", 8);
    rebuilt(EXD_FOUND_LAYOUT, "EXDARN99");
    patch(offsetof(struct shm_header, features), &byte, 1);
    rebuilt(EXD_FOUND_LAYOUT, "feature");
    word = 7;
    patch(offsetof(struct shm_arena, state), &word, 4);
    rebuilt(EXD_FOUND_DAMAGED, "state");
    /* a byte of the tokenizer */
    patch(fx.plan->catalog_offset + fx.plan->catalog_bytes - 200, &byte, 1);
    rebuilt(EXD_FOUND_DAMAGED, "catalog");
    patch(fx.plan->sums_offset + 11, &byte, 1);
    rebuilt(EXD_FOUND_DAMAGED, "checksum of the checksums");
    patch(fx.plan->ready_offset + 3, &zero, 1);
    rebuilt(EXD_FOUND_DAMAGED, "what is loaded");
    patch(offsetof(struct shm_arena, data_offset), &byte, 1);
    rebuilt(EXD_FOUND_DAMAGED, "data section");

    chmod(fx.file, 0600);
    cr_assert_eq(truncate(fx.file, (off_t)fx.plan->total_bytes - 4096), 0);
    rebuilt(EXD_FOUND_TRUNCATED, "truncated");
    chmod(fx.file, 0600);
    cr_assert_eq(truncate(fx.file, (off_t)fx.plan->total_bytes + 4096), 0);
    rebuilt(EXD_FOUND_TRUNCATED, "truncated");
    chmod(fx.file, 0600);
    cr_assert_eq(truncate(fx.file, 100), 0);
    rebuilt(EXD_FOUND_TRUNCATED, "truncated");

    cr_assert_eq(unlink(fx.file), 0);
    cr_assert_eq(symlink("/etc/passwd", fx.file), 0);
    rebuilt(EXD_FOUND_UNUSABLE, "cannot be opened");

    /* whole, but another program version placed things elsewhere */
    fx.plan->catalog_sum ^= 1;
    struct shm_error err = {0};
    cr_assert_eq(exd_arena_open(&fx.config, fx.plan, &arena, &err), 0, "%s", err.text);
    fx.plan->catalog_sum ^= 1;
    struct exd_arena_info info;
    exd_arena_info(arena, &info);
    cr_assert_eq(info.found, EXD_FOUND_LAYOUT);
    exd_arena_close(&arena, false);
}

#ifndef __SANITIZE_ADDRESS__ /* which maps terabytes */
Test(arena, kept_while_memory_is_short)
{
    struct exd_arena *arena = fixture_loaded(&fx);
    struct exd_arena_info info;
    struct shm_error err = {0};
    unsigned long pages = 0;
    exd_arena_close(&arena, true);
    FILE *f = fopen("/proc/self/statm", "re");
    cr_assert(f && fscanf(f, "%lu", &pages) == 1);
    fclose(f);
    struct rlimit old, r;
    getrlimit(RLIMIT_AS, &old);
    r = (struct rlimit){pages * 4096 + fx.plan->total_bytes / 2, old.rlim_max};
    setrlimit(RLIMIT_AS, &r);
    int rc = exd_arena_open(&fx.config, fx.plan, &arena, &err);
    setrlimit(RLIMIT_AS, &old);
    cr_assert_eq(rc, -ENOMEM, "%d %s", rc, err.text);
    cr_assert(has(err.text, "stays"), "%s", err.text);
    arena = fixture_loaded(&fx);
    exd_arena_info(arena, &info);
    cr_assert(info.found == EXD_FOUND_ADOPTED && info.generation == 2, "%s", exd_found_name(info.found));
    exd_arena_close(&arena, false);
}
#endif

Test(arena, left_over_of_a_crash_before_it_was_in_place)
{
    char path[320];
    snprintf(path, sizeof path, "%s/arena.new", fx.dir);
    fixture_write(path, "half");
    struct exd_arena *arena = fixture_loaded(&fx);
    cr_assert_neq(access(path, F_OK), 0);
    exd_arena_close(&arena, false);
    cr_assert_eq(fixture_count(fx.dir), 0);
}

Test(arena, verify_names_the_first_bad_unit)
{
    struct exd_arena *arena = fixture_loaded(&fx);
    const struct shm_arena_view *v = exd_arena_view(arena);
    struct shm_error err = {0};
    uint8_t *base = exd_arena_base(arena);
    uint32_t last = v->catalog->n_layers - 1;
    uint64_t blob = (uint64_t)(shm_arena_blob(v, last, 5) - v->base) + v->layers[last].blob_bytes - 1;
    cr_assert_eq(fixture_verify(arena, 0, &err), 0, "%s", err.text);
    base[blob] ^= 1;
    cr_assert_eq(fixture_verify(arena, 3, &err), -EBADMSG);
    char name[64];
    snprintf(name, sizeof name, "layer %u expert 5 is wrong (1 of", last);
    cr_assert(has(err.text, name), "%s", err.text);
    base[v->dense[4].offset + v->dense[4].bytes / 2] ^= 0x80;
    cr_assert_eq(fixture_verify(arena, 3, &err), -EBADMSG);
    cr_assert(has(err.text, v->dense[4].name) && has(err.text, "(2 of"), "%s", err.text);
    exd_arena_close(&arena, false);
}

Test(arena, a_reader_that_writes_faults)
{
    struct exd_arena *arena = fixture_loaded(&fx);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL);
        struct rlimit r = {0, 0};
        setrlimit(RLIMIT_CORE, &r);
        int fd = open(fx.file, O_RDONLY | O_CLOEXEC);
        volatile uint8_t *p = mmap(NULL, fx.plan->total_bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED || memcmp((const void *)p, SHM_ARENA_MAGIC, 8) != 0)
            _exit(1);
        if (mprotect((void *)p, 4096, PROT_READ | PROT_WRITE) == 0)
            _exit(2);
        p[fx.plan->data_offset] = 1;
        _exit(3);
    }
    int status;
    waitpid(pid, &status, 0);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "status %x", status);
    exd_arena_close(&arena, false);
}

/* --- progress --- */

Test(arena, progress_text)
{
    char text[256];
    exd_progress_text(text, sizeof text, 0, "loading", 5000000000, 20000000000, 2000000000);
    cr_assert_str_eq(text, "loading: 25%  5.00 of 20.00 GB  2.50 GB/s  0:06 left");
    exd_progress_text(text, sizeof text, 0, "loading", 20000000000, 20000000000, 8000000000);
    cr_assert_str_eq(text, "loading: 100%  20.00 of 20.00 GB  2.50 GB/s  in 8.0 s");
    exd_progress_text(text, sizeof text, 80, "loading", 10000000000, 20000000000, 4000000000);
    cr_assert(has(text, "loading [=") && has(text, ">") && has(text, " 50%"), "%s", text);
    for (uint32_t columns = 40; columns < 200; columns += 7)
        for (uint64_t done = 0; done <= 100; done += 10) {
            exd_progress_text(text, sizeof text, columns, "loading", done * 1000000000, 100000000000,
                              done * 7);
            cr_assert_lt(strlen(text), columns);
        }
    exd_progress_text(text, sizeof text, 0, "loading", 0, 0, 0);
    cr_assert(has(text, "100%"));
}
