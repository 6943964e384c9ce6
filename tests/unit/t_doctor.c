/* SPDX-License-Identifier: MIT */
/*
 * expertctl doctor: each finding is provoked by a tree of files in place of
 * /proc, /sys and /dev/shm, a fake driver and a made-up instance.
 */
#include "kernels/krn_cuda.h"
#include "tests/unit/gguf_build.h"
#include "tools/ctl_doctor.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)

static char root[] = "/dev/shm/t_doctor_XXXXXX";
static struct doctor d;
static struct shm_store store;
static struct ctl_snapshot snapshot;
static int uring_rc;

static int uring(void)
{
    return uring_rc;
}

static const char *path_of(const char *name)
{
    static char path[1024];
    snprintf(path, sizeof path, "%s%s", root, name);
    for (char *p = path + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        mkdir(path, 0700);
        *p = '/';
    }
    return path;
}

static void put(const char *name, const char *text)
{
    FILE *f = fopen(path_of(name), "we");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
}

static void put_link(const char *name, const char *target)
{
    unlink(path_of(name));
    cr_assert_eq(symlink(target, path_of(name)), 0);
}

static void put_gpu(const char *address, const char *speed, const char *width, const char *node)
{
    static const char *const file[] = {
        "vendor",         "class",          "current_link_speed", "current_link_width",
        "max_link_speed", "max_link_width", "numa_node"};
    const char *const text[] = {"0x10de\n", "0x030200\n", speed, width, "32.0 GT/s PCIe\n", "16\n", node};
    for (int i = 0; i < 7; i++) {
        char name[256];
        snprintf(name, sizeof name, "/sys/bus/pci/devices/%s/%s", address, file[i]);
        put(name, text[i]);
    }
}

/* A host where nothing is wrong. */
static void begin(void)
{
    cr_assert_not_null(mkdtemp(root));
    d = (struct doctor){.root = root, .library = getenv(KRN_CUDA_LIBRARY_ENV), .uring = uring};
    uring_rc = 0;
    put("/dev/shm/x", "");
    put("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
    put("/proc/self/limits",
        "Limit  Soft  Hard  Units\nMax locked memory         unlimited            unlimited  bytes\n");
    put("/proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\nSeccomp:\t0\n");
    put("/proc/self/mounts", "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw,huge=advise 0 0\n");
    put("/proc/sys/kernel/io_uring_disabled", "0\n");
    put("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size [advise] never deny force\n");
    put("/sys/devices/system/node/online", "0-1\n");
    put_link("/proc/self/ns/ipc", "ipc:[4026531839]");
    put_link("/proc/self/ns/pid", "pid:[4026531836]");
    put_gpu("0000:17:00.0", "32.0 GT/s PCIe\n", "16\n", "1\n");
    setenv("CUDA_MPS_PIPE_DIRECTORY", root, 1);
    unsetenv("FAKECUDA_VERSION");
    unsetenv("FAKECUDA_DEVICES");
}

static void end(void)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", root);
    cr_assert_eq(system(command), 0);
}

/* A running instance with one worker, pid 41 and 42. */
static void add_instance(void)
{
    memset(&store, 0, sizeof store);
    memset(&snapshot, 0, sizeof snapshot);
    store.header.writer_pid = 41;
    store.arena_bytes = MIB;
    atomic_store(&store.pinned, 1);
    atomic_store(&store.huge_pages, 1);
    snapshot.store = &store;
    snapshot.liveness = PRT_LIVE;
    snapshot.counters[SHM_STORE_WORD_ARENA_NUMA_NODE] = 1;
    snapshot.counters[SHM_STORE_WORD_ARENA_NUMA_SAMPLED] = 128;
    snapshot.workers = 1;
    snapshot.worker[0].mapped = true;
    atomic_store(&snapshot.worker[0].row.pid, 42);
    put_link("/proc/41/ns/ipc", "ipc:[4026531839]");
    put_link("/proc/41/ns/pid", "pid:[4026531836]");
    put_link("/proc/42/ns/ipc", "ipc:[4026531839]");
    put_link("/proc/42/ns/pid", "pid:[4026531836]");
    d.instance = &snapshot;
}

static void examine(void)
{
    d.findings = d.gpus = 0;
    d.known = d.held = d.driver = false;
    doctor_examine(&d);
}

/* Examines; the worst finding of one check must be of that grade, and hold these words. All others are fine.
 */
static void expect(enum doctor_grade grade, const char *check, const char *const words[])
{
    examine();
    const struct doctor_finding *worst = NULL;
    for (uint32_t i = 0; i < d.findings; i++) {
        const struct doctor_finding *f = &d.finding[i];
        if (strcmp(f->check, check) == 0 && (!worst || f->grade > worst->grade))
            worst = f;
        else if (strcmp(f->check, check) != 0)
            cr_assert_eq(f->grade, DOCTOR_OK, "%s: %s", f->check, f->text);
    }
    cr_assert_not_null(worst, "%s", check);
    cr_assert_eq(worst->grade, grade, "%s: %s", check, worst->text);
    for (; *words; words++)
        cr_assert(strstr(worst->text, *words), "%s: '%s' lacks '%s'", check, worst->text, *words);
}
#define EXPECT(grade, check, ...) expect(grade, check, (const char *const[]){__VA_ARGS__, NULL})

TestSuite(doctor, .init = begin, .fini = end, .timeout = 60);

Test(doctor, nothing_is_wrong)
{
    EXPECT(DOCTOR_OK, "driver", "CUDA driver 13.0", "1 device");
    EXPECT(DOCTOR_OK, "link", "0000:17:00.0", "x16", "63.0 GB/s");
    EXPECT(DOCTOR_OK, "numa", "--preferred=1");
    add_instance();
    EXPECT(DOCTOR_OK, "ipc", "share");
    EXPECT(DOCTOR_OK, "numa", "node 1 of 2", "beside the GPU");
}

Test(doctor, driver)
{
    cr_assert_eq(DOCTOR_DRIVER_MIN, KRN_CUDA_DRIVER_MIN);
    setenv("FAKECUDA_VERSION", "11080", 1);
    EXPECT(DOCTOR_PROBLEM, "driver", "11.8", "12.0", "update");
    setenv("FAKECUDA_VERSION", "12080", 1);
    setenv("FAKECUDA_DEVICES", "0", 1);
    EXPECT(DOCTOR_PROBLEM, "driver", "12.8", "no device", "nvidia-smi");
    d.library = "/nonexistent/libcuda.so.1";
    EXPECT(DOCTOR_PROBLEM, "driver", "0000:17:00.0", "/nonexistent/libcuda.so.1", "install");
    put("/sys/bus/pci/devices/0000:17:00.0/class", "0x040300\n"); /* its sound device */
    EXPECT(DOCTOR_WARNING, "driver", "no NVIDIA GPU");
    put("/sys/bus/pci/devices/0000:17:00.0/class", "0x030200\n");
    d.library = "libm.so.6";
    EXPECT(DOCTOR_PROBLEM, "driver", "no CUDA driver");
}

Test(doctor, ipc)
{
    put_link("/proc/self/ns/pid", "pid:[4026532001]");
    EXPECT(DOCTOR_WARNING, "ipc", "container");
    put_link("/proc/self/ns/pid", "pid:[4026531836]");
    add_instance();
    put_link("/proc/41/ns/ipc", "ipc:[4026532001]");
    put_link("/proc/42/ns/ipc", "ipc:[4026532001]");
    EXPECT(DOCTOR_PROBLEM, "ipc", "expertd (pid 41)", "ipc namespace", "--ipc");
    put_link("/proc/41/ns/ipc", "ipc:[4026531839]");
    EXPECT(DOCTOR_PROBLEM, "ipc", "worker (pid 42)", "than expertd");
    put_link("/proc/42/ns/ipc", "ipc:[4026531839]");
    put_link("/proc/42/ns/pid", "pid:[1]");
    EXPECT(DOCTOR_PROBLEM, "ipc", "worker (pid 42)", "pid namespace");
    unlink(path_of("/proc/42/ns/pid"));
    EXPECT(DOCTOR_WARNING, "ipc", "worker (pid 42)", "root");
    d.instance = NULL;
    unlink(path_of("/proc/self/ns/ipc"));
    EXPECT(DOCTOR_PROBLEM, "ipc", "/proc/self/ns");
}

Test(doctor, memlock)
{
    put("/proc/self/limits",
        "Max locked memory         8388608              8388608              bytes     \n");
    EXPECT(DOCTOR_WARNING, "memlock", "8.0 MiB", "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity");
    put("/proc/self/status", "CapInh:\t0\nCapEff:\t0000000000004000\n");
    EXPECT(DOCTOR_OK, "memlock", "CAP_IPC_LOCK");
    put("/proc/self/status", "CapInh:\t0\nCapEff:\t0000000000003fff\n");
    EXPECT(DOCTOR_WARNING, "memlock", "8.0 MiB");
    put("/proc/self/limits",
        "Max locked memory         17179869184          17179869184          bytes     \n");
    EXPECT(DOCTOR_OK, "memlock", "16.0 GiB");
    put("/proc/self/limits", "");
    EXPECT(DOCTOR_WARNING, "memlock", "/proc/self/limits");
    put("/proc/self/limits",
        "Max locked memory         unlimited            unlimited            bytes     \n");
    add_instance();
    atomic_store(&store.pinned, 0);
    EXPECT(DOCTOR_WARNING, "memlock", "not locked");
}

Test(doctor, pages)
{
    static const char file[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    EXPECT(DOCTOR_OK, "hugepages", "/dev/shm", "huge=advise");
    put(file, "always within_size advise never [deny] force\n");
    EXPECT(DOCTOR_WARNING, "hugepages", "shmem_enabled is deny", "echo never");
    put(file, "always within_size advise never deny [force]\n");
    put("/proc/self/mounts", "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n");
    EXPECT(DOCTOR_OK, "hugepages", "force");
    unlink(path_of(file));
    EXPECT(DOCTOR_WARNING, "hugepages", "can't be read");
}

/* What the kernel's own mounts get says nothing about /dev/shm. */
Test(doctor, pages_are_the_mounts)
{
    static const char file[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    put(file, "always within_size advise [never] deny force\n");
    EXPECT(DOCTOR_OK, "hugepages", "/dev/shm", "huge=advise");
    put(file, "[always] within_size advise never deny force\n");
    put("/proc/self/mounts", "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw,size=1k 0 0\n"
                             "tmpfs /dev/shm/x tmpfs rw,huge=always 0 0\n");
    EXPECT(DOCTOR_WARNING, "hugepages", "/dev/shm is mounted", "remount,huge=advise /dev/shm");
    put("/proc/self/mounts", "tmpfs /dev/shm tmpfs rw 0 0\ntmpfs /dev tmpfs rw 0 0\n"
                             "tmpfs /dev/shm tmpfs rw,huge=within_size 0 0\n");
    EXPECT(DOCTOR_OK, "hugepages", "huge=within_size");
    put("/proc/self/mounts", "none /dev/shm hugetlbfs rw 0 0\n");
    EXPECT(DOCTOR_OK, "hugepages", "hugetlbfs");
    put("/proc/self/mounts", "");
    EXPECT(DOCTOR_OK, "hugepages", "not known");
}

Test(doctor, pages_set_aside)
{
    put("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n");
    put("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "256\n");
    EXPECT(DOCTOR_WARNING, "hugepages", "512 pages", "mount");
    put("/proc/self/mounts", "tmpfs /dev/shm tmpfs rw,huge=advise 0 0\nnone /huge hugetlbfs rw 0 0\n");
    examine();
    bool told = false;
    for (uint32_t i = 0; i < d.findings; i++)
        told |= strstr(d.finding[i].text, "512.0 MiB of pages of 2 MiB are free") && !d.finding[i].grade;
    cr_assert(told);
    add_instance();
    atomic_store(&store.huge_pages, 0);
    EXPECT(DOCTOR_WARNING, "hugepages", "running arena", "expertctl evict");
}

Test(doctor, uring)
{
    put("/proc/sys/kernel/io_uring_disabled", "2\n");
    EXPECT(DOCTOR_WARNING, "io_uring", "io_uring_disabled is 2", "sysctl");
    put("/proc/sys/kernel/io_uring_disabled", "1\n");
    EXPECT(DOCTOR_OK, "io_uring", "works"); /* its group's members may */
    uring_rc = -EPERM;
    EXPECT(DOCTOR_WARNING, "io_uring", "io_uring_disabled is 1", "io_uring_group");
    put("/proc/sys/kernel/io_uring_disabled", "0\n");
    EXPECT(DOCTOR_WARNING, "io_uring", "security module");
    put("/proc/self/status", "Name:\tx\nSeccomp:\t2\n");
    EXPECT(DOCTOR_WARNING, "io_uring", "seccomp", "io_uring_enter");
    uring_rc = -ENOSYS;
    EXPECT(DOCTOR_WARNING, "io_uring", "seccomp");
    put("/proc/self/status", "Name:\tx\nSeccomp:\t0\n");
    EXPECT(DOCTOR_WARNING, "io_uring", "Linux 5.6");
    uring_rc = -ENOMEM;
    EXPECT(DOCTOR_WARNING, "io_uring", "RLIMIT_MEMLOCK");
}

Test(doctor, numa)
{
    add_instance();
    snapshot.counters[SHM_STORE_WORD_ARENA_NUMA_AWAY] = 40;
    EXPECT(DOCTOR_WARNING, "numa", "40 of 128", "--membind=1");
    snapshot.counters[SHM_STORE_WORD_ARENA_NUMA_AWAY] = 3;
    EXPECT(DOCTOR_OK, "numa", "3 of 128");
    snapshot.counters[SHM_STORE_WORD_ARENA_NUMA_NODE] = 0;
    EXPECT(DOCTOR_WARNING, "numa", "arena is on node 0", "GPU 0000:17:00.0 on node 1");
    put("/sys/devices/system/node/online", "0\n");
    EXPECT(DOCTOR_OK, "numa", "one memory node");
}

Test(doctor, mps)
{
    add_instance();
    snapshot.workers = 2;
    atomic_store(&snapshot.worker[1].row.pid, 42);
    snapshot.worker[0].row.device = snapshot.worker[1].row.device = PRT_DEVICE_CUDA;
    EXPECT(DOCTOR_WARNING, "mps", "2 workers share GPU 0", "nvidia-cuda-mps-control -d");
    snapshot.worker[1].row.device_index = 1;
    EXPECT(DOCTOR_OK, "mps", root);
    snapshot.worker[1].row.device_index = 0;
    char pid[16];
    snprintf(pid, sizeof pid, "%d\n", (int)getpid());
    put("/nvidia-cuda-mps-control.pid", pid);
    EXPECT(DOCTOR_OK, "mps", "answers");
}

Test(doctor, link)
{
    put_gpu("0000:18:00.0", "32.0 GT/s PCIe\n", "8\n", "1\n");
    EXPECT(DOCTOR_WARNING, "link", "0000:18:00.0", "x8 of x16", "reseat");
    put_gpu("0000:18:00.0", "2.5 GT/s PCIe\n", "16\n", "1\n");
    EXPECT(DOCTOR_OK, "link", "0000:17:00.0");
    cr_assert_eq(d.gpus, 2);
    put_gpu("0000:18:00.0", "Unknown\n", "16\n", "1\n");
    EXPECT(DOCTOR_WARNING, "link", "0000:18:00.0", "nvidia-smi");
    put_gpu("0000:18:00.0", "32.0 GT/s PCIe\n", "16\n", "1\n");

    add_instance();
    struct ctl_worker *w = &snapshot.worker[0];
    w->row.device = PRT_DEVICE_CUDA;
    w->link[SHM_LINK_WORD_LINK_BUSY_NS] = 1000000000;
    w->link[SHM_LINK_WORD_LINK_BYTES + SHM_COPY_REASON_ROUTED] = 50000000000;
    w->link[SHM_LINK_WORD_LINK_BYTES + SHM_COPY_REASON_RESIDENT] = 70000000000; /* not by the link */
    w->link[SHM_LINK_WORD_LINK_PEAK] = 12000000000;
    w->link[SHM_LINK_WORD_LINK_COPIES + SHM_COPY_REASON_ROUTED] = 1000000;
    w->link[SHM_LINK_WORD_LINK_COPIES + SHM_COPY_REASON_RESIDENT] = 7;
    EXPECT(DOCTOR_OK, "link", "0000:17:00.0");
    cr_assert(strstr(d.finding[d.findings - 2].text, "copies of 49 KiB are too small"));
    w->link[SHM_LINK_WORD_LINK_COPIES + SHM_COPY_REASON_ROUTED] = 25000;
    EXPECT(DOCTOR_WARNING, "link", "worker 42", "50.0 GB/s while busy, 12.0 at its best", "of 63.0");
    w->link[SHM_LINK_WORD_LINK_PACE] = 20000000000;
    EXPECT(DOCTOR_WARNING, "link", "paced to 20 GB/s", "--link-gbps 0");
    w->link[SHM_LINK_WORD_LINK_PACE] = 0;
    w->link[SHM_LINK_WORD_LINK_PEAK] = 54000000000;
    EXPECT(DOCTOR_OK, "link", "0000:17:00.0");
    cr_assert(strstr(d.finding[d.findings - 2].text, "measured 50.00 GB/s"));
}

/* A model, or a shard of one, as a sparse file of that size. */
static void put_shard(const char *name, uint64_t bytes, const struct gb_model *model)
{
    struct gb b;
    gb_init(&b);
    gb_model(&b, model);
    struct gb_bytes file = gb_finish(&b);
    FILE *f = fopen(path_of(name), "we");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(file.data, 1, file.len, f), file.len);
    fclose(f);
    cr_assert_eq(truncate(path_of(name), (off_t)bytes), 0);
    free(file.data);
    gb_free(&b);
}

static void put_model(const char *name, uint64_t bytes)
{
    put_shard(name, bytes, &(struct gb_model){.layers = 4});
}

Test(doctor, a_models_needs)
{
    char model[1024];
    put_model("/model.gguf", 64 * MIB);
    snprintf(model, sizeof model, "%s", path_of("/model.gguf"));
    d.model_path = model;
    EXPECT(DOCTOR_OK, "model", "68.0 MiB", "0.5 KiB a token"); /* 4 layers, 1 head of 32, 2 times 2 bytes */
    EXPECT(DOCTOR_OK, "memory", "8.0 GiB", "196.0 MiB");
    EXPECT(DOCTOR_OK, "disk", "sample", "GB/s");
    d.slow_disk_bytes_s = 1e18;
    examine();
    bool direct = false; /* else it is the page cache that is measured, and never called slow */
    for (uint32_t i = 0; i < d.findings; i++)
        direct |= strcmp(d.finding[i].check, "disk") == 0 && !strstr(d.finding[i].text, "page cache");
    if (direct)
        EXPECT(DOCTOR_WARNING, "disk", "slow", "faster disk");
    d.slow_disk_bytes_s = 0;

    put("/proc/meminfo", "MemAvailable: 131072 kB\n");
    EXPECT(DOCTOR_PROBLEM, "memory", "128.0 MiB may be taken (MemAvailable)", "196.0 MiB");
    put("/proc/meminfo", "MemAvailable: 8388608 kB\n");
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/memory.max", "209715200\n");
    put("/sys/fs/cgroup/a/memory.current", "104857600\n");
    EXPECT(DOCTOR_PROBLEM, "memory", "100.0 MiB may be taken (memory.max of cgroup /sys/fs/cgroup/a)",
           "MemoryMax=");
    unlink(path_of("/proc/self/cgroup"));

    put("/proc/self/limits",
        "Max locked memory         8388608              8388608              bytes     \n");
    EXPECT(DOCTOR_WARNING, "memlock", "8.0 MiB", "the arena has about 68.0 MiB");
    put("/proc/self/limits", "Max locked memory         unlimited  unlimited  bytes\n");

    put_model("/model.gguf", UINT64_C(1) << 42); /* no tmpfs has that */
    put("/proc/meminfo", "MemAvailable: 8589934592 kB\n");
    EXPECT(DOCTOR_PROBLEM, "space", "4.0 TiB", "remount", "--arena-dir");
    cr_assert_eq(truncate(model, 100), 0);
    EXPECT(DOCTOR_PROBLEM, "model", "more than fit in the file", "get the whole file");
    unlink(model);
    EXPECT(DOCTOR_PROBLEM, "model", "No such file", "--model");
}

Test(doctor, an_arena_that_is_there_takes_nothing)
{
    char model[1024];
    put_model("/model.gguf", 64 * MIB);
    snprintf(model, sizeof model, "%s", path_of("/model.gguf"));
    d.model_path = model;
    put("/proc/meminfo", "MemAvailable: 131072 kB\n");
    add_instance();
    snprintf(store.model_path, sizeof store.model_path, "%s", model);
    put("/arena", "");
    cr_assert_eq(truncate(path_of("/arena"), (off_t)MIB), 0);
    snprintf(store.arena_path, sizeof store.arena_path, "%s", path_of("/arena"));
    EXPECT(DOCTOR_OK, "memory", "0 B more");
    cr_assert_eq(truncate(path_of("/arena"), (off_t)MIB / 2), 0);
    EXPECT(DOCTOR_PROBLEM, "memory", "196.0 MiB");
}

Test(doctor, shards)
{
    struct doctor_model m;
    struct shm_error err = {0};
    put_shard("/m-00001-of-00002.gguf", 10 * MIB, &(struct gb_model){.layers = 4, .shard = 0, .shards = 2});
    put_shard("/m-00002-of-00002.gguf", 6 * MIB, &(struct gb_model){.layers = 4, .shard = 1, .shards = 2});
    char path[1024];
    snprintf(path, sizeof path, "%s", path_of("/m-00002-of-00002.gguf"));
    cr_assert_eq(doctor_read_model(path, &m, &err), 0, "%s", err.text);
    cr_assert_eq(m.shards, 2);
    cr_assert_eq(m.file_bytes, 16 * MIB);
    cr_assert_eq(m.kv_token_bytes, 512);
    cr_assert_eq(truncate(path, 2000), 0); /* of the other one all is there */
    snprintf(path, sizeof path, "%s", path_of("/m-00001-of-00002.gguf"));
    cr_assert_eq(doctor_read_model(path, &m, &err), -EINVAL);
    cr_assert(strstr(err.text, "m-00002-of-00002.gguf: ") && strstr(err.text, "get the whole file"), "%s",
              err.text);
    unlink(path_of("/m-00001-of-00002.gguf"));
    cr_assert_eq(doctor_read_model(path, &m, &err), -ENOENT);
    cr_assert_eq(doctor_read_model(root, &m, &err), -EINVAL);
}

/* Cut anywhere, or with any byte of its header changed: an answer or an error, never more. */
Test(doctor, a_damaged_header)
{
    struct gb b;
    gb_init(&b);
    gb_model(&b, &(struct gb_model){0});
    struct gb_bytes file = gb_finish(&b);
    char path[1024];
    snprintf(path, sizeof path, "%s", path_of("/bad.gguf"));
    size_t head = file.len < 1024 ? file.len : 1024;
    for (size_t i = 0; i < 2 * head; i++) {
        size_t n = i < head ? i : file.len;
        uint8_t old = file.data[i % head];
        if (i >= head)
            file.data[i - head] ^= 0xff;
        FILE *f = fopen(path, "we");
        cr_assert_eq(fwrite(file.data, 1, n, f), n);
        fclose(f);
        file.data[i % head] = old;
        struct doctor_model m;
        struct shm_error err = {0};
        int rc = doctor_read_model(path, &m, &err);
        cr_assert(rc == 0 || (rc == -EINVAL && strstr(err.text, path)), "%zu: %d %s", i, rc, err.text);
        if (i < 100)
            cr_assert_eq(rc, -EINVAL);
    }
    free(file.data);
    gb_free(&b);
}

Test(doctor, places)
{
    d.arena_dir = "/nonexistent/arena";
    EXPECT(DOCTOR_PROBLEM, "space", "/nonexistent/arena", "--arena-dir");
    d.arena_dir = "/proc";
    examine();
    bool disk = false;
    for (uint32_t i = 0; i < d.findings; i++)
        disk |=
            strcmp(d.finding[i].check, "space") == 0 && strstr(d.finding[i].text, "tmpfs with --arena-dir");
    cr_assert(disk);
    d.arena_dir = NULL;
    unlink(path_of("/dev/shm/x"));
    cr_assert_eq(rmdir(path_of("/dev/shm")), 0);
    EXPECT(DOCTOR_PROBLEM, "space", "/dev/shm", "mount");
}
