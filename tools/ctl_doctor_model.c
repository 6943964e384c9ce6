/* SPDX-License-Identifier: MIT */
/* Doctor: what a model needs, and whether memory, file system and disk give it. */
#include "proto/prt_claim.h"
#include "proto/prt_gguf.h"
#include "proto/prt_memory.h"
#include "shm/shm_bell.h"
#include "tools/ctl_doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#define ARENA_PAGE   (2u << 20)
#define SHM_SMALL    (UINT64_C(1) << 30) /* containers get 64 MiB */
#define SAMPLE_NS    UINT64_C(500000000)
#define SAMPLE_PIECE (1u << 20)
#define SAMPLE_READS 4 /* at a time */

/* A number of the model's architecture; 0 where the file has none. */
static uint64_t number(const struct prt_gguf *g, struct prt_str arch, const char *what)
{
    char key[256];
    uint32_t value = 0;
    snprintf(key, sizeof key, "%.*s.%s", PRT_STR(arch), what);
    prt_gguf_u32(g, key, &value, NULL);
    return value;
}

/* What a token's keys and values take, two bytes each; 0 where the file doesn't say. */
static uint64_t token_bytes(const struct prt_gguf *g, struct prt_str arch)
{
    uint64_t heads = number(g, arch, "attention.head_count"), hidden = number(g, arch, "embedding_length");
    uint64_t kv_heads = number(g, arch, "attention.head_count_kv"), dim = heads ? hidden / heads : 0;
    uint64_t key = number(g, arch, "attention.key_length"), value = number(g, arch, "attention.value_length");
    uint64_t both = (key ? key : dim) + (value ? value : dim), n;
    if (__builtin_mul_overflow(number(g, arch, "block_count") * (kv_heads ? kv_heads : heads), both, &n) ||
        __builtin_mul_overflow(n, 2, &n))
        return 0;
    return n;
}

int doctor_read_model(const char *path, struct doctor_model *ret_model, struct shm_error *err)
{
    struct prt_gguf *g;
    struct prt_str arch;
    int rc = prt_gguf_open(path, &g, err);
    if (rc)
        return rc;
    struct doctor_model m = {.shards = prt_gguf_shard_count(g)};
    for (uint32_t i = 0; i < m.shards; i++)
        m.file_bytes += prt_gguf_shard(g, i)->size_bytes;
    if (prt_gguf_str(g, "general.architecture", &arch, NULL) == 0) {
        m.context = number(g, arch, "context_length");
        m.kv_token_bytes = token_bytes(g, arch);
    }
    prt_gguf_close(&g);
    /* Everything of the file goes in; places are rounded up a little. */
    m.arena_bytes = (m.file_bytes / ARENA_PAGE + 2) * ARENA_PAGE;
    *ret_model = m;
    return 0;
}

void doctor_check_model(struct doctor *d)
{
    static const char check[] = "model";
    struct shm_error err = {0};
    char arena[24], kv[24], real[4096];
    if (!d->model_path) {
        doctor_say(d, DOCTOR_OK, check,
                   "none given: with --model FILE its needs are compared with what is there");
        return;
    }
    if (doctor_read_model(d->model_path, &d->model, &err)) {
        doctor_say(d, DOCTOR_PROBLEM, check, "%s", shm_error_text(&err));
        return;
    }
    d->known = true;
    prt_size_text(d->model.arena_bytes, arena);
    prt_size_text(d->model.kv_token_bytes * d->model.context, kv);
    /* This very file, in an arena that is complete or being filled: nothing more is taken. */
    const struct shm_store *s = d->instance ? d->instance->store : NULL;
    if (s && realpath(d->model_path, real) && strncmp(real, s->model_path, sizeof s->model_path) == 0 &&
        s->arena_bytes) {
        char path[SHM_PATH_BYTES];
        struct stat st;
        snprintf(path, sizeof path, "%.1023s", s->arena_path);
        d->held = stat(path, &st) == 0 && (uint64_t)st.st_size == s->arena_bytes;
    }
    if (d->model.kv_token_bytes)
        doctor_say(d, DOCTOR_OK, check,
                   "arena of about %s%s%s; keys and values %.1f KiB a token on a GPU, %s for %llu tokens "
                   "(twice that "
                   "on the host device)",
                   arena, d->model.shards > 1 ? " (all shards)" : "",
                   d->held ? ", which is there already" : "", (double)d->model.kv_token_bytes / 1024, kv,
                   (unsigned long long)d->model.context);
    else
        doctor_say(
            d, DOCTOR_WARNING, check,
            "arena of about %s; the file does not say the size of keys and values: expertd may not know its "
            "architecture",
            arena);
}

static bool in_memory(const struct statfs *s)
{
    unsigned long type = (unsigned long)s->f_type;
    return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

bool doctor_arena_place(const struct doctor *d, char dir[PRT_PATH_BYTES + 512], struct statfs *ret_fs)
{
    size_t n = PRT_PATH_BYTES + 512;
    if (d->arena_dir) {
        snprintf(dir, n, "%s", d->arena_dir);
        return statfs(dir, ret_fs) == 0;
    }
    if (d->paths) {
        snprintf(dir, n, "%s", d->paths->dir);
        if (statfs(dir, ret_fs) != 0) /* not yet made */
            snprintf(dir, n, "%s", d->paths->runtime);
        if (statfs(dir, ret_fs) == 0 && in_memory(ret_fs))
            return true;
    }
    snprintf(dir, n, "%s/dev/shm", d->root);
    return statfs(dir, ret_fs) == 0;
}

void doctor_check_space(struct doctor *d)
{
    static const char check[] = "space";
    struct statfs s, shm;
    char dir[PRT_PATH_BYTES + 512], shm_dir[512], free_text[24], need[24];
    snprintf(shm_dir, sizeof shm_dir, "%.400s/dev/shm", d->root);
    if (statfs(shm_dir, &shm) != 0) {
        doctor_say(d, DOCTOR_PROBLEM, check, "/dev/shm: %s: mount a tmpfs there", strerror(errno));
        return;
    }
    if ((unsigned long)shm.f_type != TMPFS_MAGIC)
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "/dev/shm is not a tmpfs: mount one there (mount -t tmpfs tmpfs /dev/shm)");
    if (!doctor_arena_place(d, dir, &s)) {
        doctor_say(d, DOCTOR_PROBLEM, check, "%.200s: %s: name an existing directory with --arena-dir", dir,
                   strerror(errno));
        return;
    }
    uint64_t have = (uint64_t)s.f_bavail * (uint64_t)s.f_frsize;
    if ((unsigned long)s.f_type == HUGETLBFS_MAGIC) {
        uint64_t pool = prt_huge_pages_free(d->root, (uint64_t)s.f_bsize) * (uint64_t)s.f_bsize;
        have = s.f_blocks == 0 || pool < have ? pool : have;
    }
    bool unlimited = (unsigned long)s.f_type == TMPFS_MAGIC && s.f_blocks == 0;
    prt_size_text(have, free_text);
    prt_size_text(d->model.arena_bytes, need);
    if (!in_memory(&s))
        doctor_say(d, DOCTOR_WARNING, check,
                   "%.200s is on a disk: an arena there is slow; choose a tmpfs with --arena-dir", dir);
    if (access(dir, W_OK | X_OK) != 0)
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "%.200s: %s: let this user write there, or choose another with --arena-dir", dir,
                   strerror(errno));
    else if (d->known && !d->held && !unlimited && have < d->model.arena_bytes)
        doctor_say(
            d, DOCTOR_PROBLEM, check,
            "%.200s: %s free, the arena needs about %s: enlarge it (mount -o remount,size=...; containers: "
            "--shm-size) or choose another with --arena-dir",
            dir, free_text, need);
    else if (!d->held && !unlimited && have < SHM_SMALL && !d->known)
        doctor_say(d, DOCTOR_WARNING, check,
                   "%.200s: only %s free for an arena: enlarge it (mount -o remount,size=...; containers: "
                   "--shm-size)",
                   dir, free_text);
    else
        doctor_say(d, DOCTOR_OK, check, "%.200s: %s free for the arena", dir,
                   unlimited ? "no limit, all" : free_text);
}

void doctor_check_memory(struct doctor *d)
{
    static const char check[] = "memory";
    struct prt_memory_group group;
    uint64_t have;
    char a[24], b[24], c[24];
    if (!prt_memory_available(d->root, &have)) {
        doctor_say(d, DOCTOR_WARNING, check, "/proc/meminfo can't be read: mount /proc");
        return;
    }
    bool limited = prt_memory_group(d->root, &group) && group.free_bytes < have;
    if (limited)
        have = group.free_bytes;
    char whose[256] = "MemAvailable";
    if (limited)
        snprintf(whose, sizeof whose, "%s of cgroup %.180s", prt_memory_group_file(&group), group.dir);
    prt_size_text(have, a);
    if (!d->known) {
        doctor_say(d, DOCTOR_OK, check, "%s may be taken (%s)", a, whose);
        return;
    }
    char dir[PRT_PATH_BYTES + 512];
    struct statfs s;
    /* Huge pages are set aside already; a file on a disk is page cache, which gives way. */
    bool taken = !d->held && (!doctor_arena_place(d, dir, &s) ||
                              (in_memory(&s) && (unsigned long)s.f_type != HUGETLBFS_MAGIC));
    uint64_t need = taken ? d->model.arena_bytes + PRT_LOADER_BYTES : 0;
    uint64_t left = have > need ? have - need : 0,
             park = left / PRT_PARK_SHARE < PRT_PARK_AUTO_MAX ? left / PRT_PARK_SHARE : PRT_PARK_AUTO_MAX;
    /* A worker without a GPU has its keys and values here, in 4 bytes a number. */
    uint64_t kv = d->gpus ? 0 : 2 * d->model.kv_token_bytes * d->model.context;
    prt_size_text(need, b);
    if (have < need)
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "%s may be taken (%s), the arena and its loading need about %s: free memory%s, or use a "
                   "smaller model",
                   a, whose, b, limited ? ", raise that limit (systemd: MemoryMax=)" : "");
    else if (left < park + kv) {
        prt_size_text(kv, b);
        prt_size_text(left, c);
        doctor_say(d, DOCTOR_WARNING, check,
                   "%s may be taken (%s), which leaves %s beside the arena; a full conversation of a worker "
                   "takes %s: "
                   "give it less with inferd --ctx",
                   a, whose, c, b);
    } else {
        prt_size_text(park, c);
        doctor_say(d, DOCTOR_OK, check,
                   "%s may be taken (%s), the arena needs about %s%s; up to %s are parked by --park auto", a,
                   whose, b, d->held ? " more" : "", c);
    }
}

void doctor_check_held(struct doctor *d)
{
    struct prt_claim *claims = d->paths ? calloc(PRT_CLAIM_MAX, sizeof *claims) : NULL;
    char text[320] = "none", size[24];
    int n = claims ? prt_claim_list(d->paths, NULL, claims) : 0;
    uint64_t sum = prt_claim_text(claims, n, text, sizeof text);
    free(claims);
    prt_size_text(sum, size);
    if (n)
        doctor_say(d, DOCTOR_OK, "held", "%s by instances: %s; expertctl evict gives a kept one back", size,
                   text);
    else
        doctor_say(d, DOCTOR_OK, "held", "no instance of this runtime directory holds memory");
}

/* ---- disk ---- */

struct sample {
    int fd;
    uint64_t size, begin_ns;
    _Atomic uint64_t next; /* pieces given out */
    _Atomic uint64_t bytes;
    atomic_int error;
};

static void *read_pieces(void *arg)
{
    struct sample *s = arg;
    void *buffer = aligned_alloc(4096, SAMPLE_PIECE);
    while (buffer && shm_now_ns() - s->begin_ns < SAMPLE_NS && !atomic_load(&s->error)) {
        uint64_t at = atomic_fetch_add(&s->next, 1) * SAMPLE_PIECE;
        if (at >= s->size)
            break;
        ssize_t n = pread(s->fd, buffer, SAMPLE_PIECE, (off_t)at);
        if (n < 0 && errno != EINTR)
            atomic_store(&s->error, errno);
        else if (n > 0)
            atomic_fetch_add(&s->bytes, (uint64_t)n);
    }
    free(buffer);
    return NULL;
}

void doctor_check_disk(struct doctor *d)
{
    static const char check[] = "disk";
    struct stat st;
    if (!d->known)
        return;
    bool direct = true;
    struct sample s = {.fd = open(d->model_path, O_RDONLY | O_DIRECT | O_CLOEXEC)};
    if (s.fd < 0 && errno == EINVAL) {
        direct = false;
        s.fd = open(d->model_path, O_RDONLY | O_CLOEXEC);
    }
    if (s.fd < 0 || fstat(s.fd, &st) != 0) {
        doctor_say(d, DOCTOR_PROBLEM, check, "%.200s: %s: let this user read it", d->model_path,
                   strerror(errno));
        if (s.fd >= 0)
            close(s.fd);
        return;
    }
    s.size = (uint64_t)st.st_size;
    s.begin_ns = shm_now_ns();
    pthread_t thread[SAMPLE_READS];
    unsigned threads = 0;
    while (threads < SAMPLE_READS && pthread_create(&thread[threads], NULL, read_pieces, &s) == 0)
        threads++;
    if (!threads)
        read_pieces(&s);
    for (unsigned i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    double seconds = (double)(shm_now_ns() - s.begin_ns) / 1e9;
    double bytes = (double)atomic_load(&s.bytes), rate = seconds > 0 ? bytes / seconds : 0;
    int error = atomic_load(&s.error);
    close(s.fd);
    if (error || bytes <= 0) {
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "%.200s can't be read: %s: look at the disk and the kernel's log", d->model_path,
                   error ? strerror(error) : "it is empty");
        return;
    }
    bool slow = direct && rate < d->slow_disk_bytes_s && bytes > 16 * SAMPLE_PIECE;
    char left[160] = "";
    if (rate > 0 && (double)d->model.file_bytes > 2 * bytes)
        snprintf(left, sizeof left, ", all of it would take about %.0f s",
                 (double)d->model.file_bytes / rate);
    doctor_say(d, slow ? DOCTOR_WARNING : DOCTOR_OK, check,
               "%.200s: %.2f GB/s%s (a sample: %.0f MB in %.2f s, %u reads at a time%s)%s", d->model_path,
               rate / 1e9, left, bytes / 1e6, seconds, threads ? threads : 1,
               direct ? "" : "; through the page cache, so that it may not be the disk's",
               slow ? ": slow; the first start takes that long, put the file on a faster disk" : "");
}
