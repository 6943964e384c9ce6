/* SPDX-License-Identifier: MIT */
/* Driver loading, errors, capabilities, registration and the copy link, on the fake driver. */
#include "kernels/krn_cuda.h"
#include "kernels/krn_fatbin.h"
#include "kernels/krn_link_cuda.h"
#include "kernels/krn_register.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOB  65536u
#define SLOTS 8u

TestSuite(cuda, .timeout = 30);

static char log_path[64];
static struct krn_cuda_device *device;

static void use_log(void)
{
    snprintf(log_path, sizeof(log_path), "/tmp/t_cuda-%d.log", (int)getpid());
    unlink(log_path);
    setenv("FAKECUDA_LOG", log_path, 1);
}

static void open_device(void)
{
    struct shm_error err = {0};
    use_log();
    cr_assert(krn_cuda_device_open(0, &device, &err) == 0, "%s", err.text);
}

static void close_device(void)
{
    krn_cuda_device_close(&device);
    unlink(log_path);
}

/* The log from `from` on, without pids: "call stream what". Returns the number of lines; *ret_at the end. */
static int read_log(long from, char lines[][96], int room, long *ret_at)
{
    FILE *f = fopen(log_path, "re");
    char line[256];
    int n = 0;
    cr_assert(f);
    fseek(f, from, SEEK_SET);
    while (fgets(line, sizeof(line), f) && n < room) {
        line[strcspn(line, "\n")] = '\0';
        snprintf(lines[n++], 96, "%.95s", strchr(line, ' ') + 1);
    }
    *ret_at = ftell(f);
    fclose(f);
    return n;
}

static long log_end(void)
{
    static char lines[4096][96];
    long at;
    read_log(0, lines, 4096, &at);
    return at;
}

/* ---- loading ---- */

Test(cuda, no_library)
{
    struct shm_error err = {0};
    setenv(KRN_CUDA_LIBRARY_ENV, "/nonexistent/libcuda.so.1", 1);
    cr_expect_eq(krn_cuda_load(&err), -ENOENT);
    cr_expect(strstr(err.text, "no CUDA driver") && strstr(err.text, "/nonexistent/"), "%s", err.text);
    cr_expect_eq(krn_cuda_count(), 0);
    cr_expect_eq(krn_cuda_version(), 0);
    cr_expect_eq(krn_cuda_device_open(0, &device, &err), -ENOENT);
}

Test(cuda, another_library)
{
    struct shm_error err = {0};
    setenv(KRN_CUDA_LIBRARY_ENV, "libm.so.6", 1);
    cr_expect_eq(krn_cuda_load(&err), -ENOSYS);
    cr_expect(strstr(err.text, "no CUDA driver"), "%s", err.text);
}

Test(cuda, old_driver)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_VERSION", "11080", 1);
    cr_expect_eq(krn_cuda_load(&err), -EOPNOTSUPP);
    cr_expect(strstr(err.text, "11.8") && strstr(err.text, "12.0"), "%s", err.text);
}

Test(cuda, required_function_missing)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_MISSING", "cuStreamWriteValue32,cuEventQuery", 1);
    cr_expect_eq(krn_cuda_load(&err), -ENOSYS);
    cr_expect(strstr(err.text, "cuStreamWriteValue32") && strstr(err.text, "11.7"), "%s", err.text);
    cr_expect_null(krn_cuda.init, "a half-filled table was left");
}

Test(cuda, optional_function_missing)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_MISSING", "cuMemcpyBatchAsync", 1);
    cr_assert(krn_cuda_device_open(0, &device, &err) == 0, "%s", err.text);
    cr_expect_not(device->batch_copy);
    krn_cuda_device_close(&device);
}

/* A driver between the two variants of the batch copy has only the older one. */
Test(cuda, older_variant_of_an_optional_function)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_VERSION", "12080", 1);
    cr_assert(krn_cuda_load(&err) == 0, "%s", err.text);
    cr_expect_not_null(krn_cuda.copy_batch_12);
}

Test(cuda, no_device)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_DEVICES", "0", 1);
    cr_expect_eq(krn_cuda_load(&err), -ENODEV);
    cr_expect(strstr(err.text, "nvidia-smi"), "%s", err.text);
}

Test(cuda, init_fails)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_FAIL", "cuInit:1:999", 1);
    cr_expect_eq(krn_cuda_load(&err), -EIO);
    cr_expect(strstr(err.text, "999"), "%s", err.text);
}

Test(cuda, errors_are_ours_and_kept, .init = open_device, .fini = close_device)
{
    struct shm_error err = {0};
    static const struct {
        int result, rc;
    } map[] = {{1, -EINVAL},   {2, -ENOMEM}, {100, -ENODEV},    {600, -EAGAIN},
               {712, -EEXIST}, {719, -EIO},  {801, -EOPNOTSUPP}};
    for (size_t i = 0; i < sizeof(map) / sizeof(map[0]); i++)
        cr_expect_eq(krn_cuda_check(map[i].result, "x"), map[i].rc, "result %d", map[i].result);
    krn_cuda_ptr ptr = 0;
    int rc = KRN_CUDA(mem_free, ptr);
    cr_expect_eq(rc, -EINVAL);
    cr_expect_eq(krn_cuda_detail()->result, 1);
    cr_expect_eq(krn_cuda_explain(rc, "ring", &err), -EINVAL);
    cr_expect(strstr(err.text, "ring: CUDA_ERROR_INVALID_VALUE (1,") && strstr(err.text, "mem_free"), "%s",
              err.text);
}

/* ---- capabilities ---- */

Test(cuda, capabilities, .init = open_device, .fini = close_device)
{
    cr_expect(device->ipc && device->memops && device->host_register && device->register_read_only &&
              device->batch_copy);
    cr_expect_str_eq(device->missing, "");
    cr_expect_eq(krn_cuda_device_open(1, &device, NULL), -ENODEV);
}

static void expect_lacks(const char *fail, const char *text)
{
    struct shm_error err = {0};
    setenv("FAKECUDA_FAIL", fail, 1);
    cr_assert(krn_cuda_device_open(0, &device, &err) == 0, "%s", err.text);
    cr_expect(strstr(device->missing, text), "missing: %s", device->missing);
}

Test(cuda, no_ipc)
{
    expect_lacks("cuIpcGetMemHandle:1:801", "CUDA_ERROR_NOT_SUPPORTED");
    cr_expect_not(device->ipc);
    struct krn_link *link;
    struct shm_error err = {0};
    struct krn_link_cuda_config c = {.device = device, .ring_bytes = 1 << 20, .flag_offset = 1 << 20};
    cr_expect_eq(krn_link_cuda_create(&c, &link, &err), -ENOTSUP);
    cr_expect(strstr(err.text, "sharing device memory"), "%s", err.text);
}

Test(cuda, no_memory_operations)
{
    expect_lacks("cuStreamBatchMemOp:1:801", "stream memory operations");
    cr_expect_not(device->memops);
    cr_expect(device->ipc);
}

Test(cuda, no_registration)
{
    expect_lacks("cuMemHostRegister:1:801", "registration of host memory");
    cr_expect_not(device->host_register);
}

Test(cuda, no_read_only_registration)
{
    expect_lacks("cuMemHostRegister:2:801", "read-only registration");
    cr_expect(device->host_register && !device->register_read_only);
}

Test(cuda, lines_are_given_back, .init = open_device, .fini = close_device)
{
    void *line[KRN_CUDA_LINES], *one;
    krn_cuda_ptr address;
    for (int i = 0; i < KRN_CUDA_LINES; i++)
        cr_assert_eq(krn_cuda_line_take(device, &line[i], &address), 0);
    cr_expect_eq(krn_cuda_line_take(device, &one, &address), -EBUSY);
    krn_cuda_line_give(device, line[77]);
    cr_expect_eq(krn_cuda_line_take(device, &one, &address), 0);
    cr_expect_eq(one, line[77]);
}

/* ---- registration ---- */

/* One layer of 30 experts, 17 pages each with 16 and a bit used, from page 5 on. */
static struct shm_layer layer = {
    .blobs_offset = 5 * 4096, .blob_bytes = 16 * 4096 + 100, .blob_stride = 17 * 4096};
static struct shm_catalog catalog = {.hparams = {.experts = 30}, .n_layers = 1};
static struct shm_arena_view arena = {.catalog = &catalog, .layers = &layer, .mapped_bytes = 1024 * 4096};

Test(cuda, pieces_end_at_blob_borders)
{
    for (uint64_t begin = 0; begin < arena.mapped_bytes;) {
        uint64_t end = krn_register_arena_cut(&arena, begin, begin + 50 * 4096);
        cr_assert(end > begin && end <= arena.mapped_bytes && end % 4096 == 0);
        for (uint32_t e = 0; e < 30; e++) {
            uint64_t at = layer.blobs_offset + e * layer.blob_stride;
            cr_expect(end <= at || end >= at + layer.blob_bytes, "a cut at page %d inside blob %u",
                      (int)(end / 4096), e);
        }
        begin = end;
    }
    /* no border within the limit: the next one above */
    cr_expect_eq(krn_register_arena_cut(&arena, 5 * 4096, 9 * 4096), (5 + 17) * 4096u);
    /* blobs off the page borders: where one falls on it */
    struct shm_layer odd = {.blobs_offset = 4096, .blob_bytes = 40960 + 1024, .blob_stride = 40960 + 1024};
    struct shm_arena_view view = {.catalog = &catalog, .layers = &odd, .mapped_bytes = 1024 * 4096};
    cr_expect_eq(krn_register_arena_cut(&view, 0, 50 * 4096), 4096u + 4 * (40960 + 1024));
    /* blobs that are copied longer than they are: never between them */
    struct shm_layer tiny = {.blobs_offset = 4096, .blob_bytes = 4096, .blob_stride = 4096};
    view.layers = &tiny;
    cr_expect_eq(krn_register_arena_cut(&view, 4096, 20 * 4096), 31 * 4096u);
}

static int pieces_told;
static _Atomic int cancel;
static void told(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    cr_expect_leq(done_bytes, total_bytes);
    if (++pieces_told == 3 && ctx)
        atomic_store(&cancel, 1);
}

static int count_log(const char *call)
{
    static char lines[4096][96];
    long at;
    int n = 0, all = read_log(0, lines, 4096, &at);
    for (int i = 0; i < all; i++)
        n += strncmp(lines[i], call, strlen(call)) == 0;
    return n;
}

static struct krn_register_config registration(void)
{
    void *base = mmap(NULL, arena.mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return (struct krn_register_config){.device = device,
                                        .base = base,
                                        .bytes = arena.mapped_bytes,
                                        .piece_bytes = 100 * 4096,
                                        .cut = krn_register_arena_cut,
                                        .cut_ctx = &arena,
                                        .progress = told};
}

Test(cuda, register_and_release, .init = open_device, .fini = close_device)
{
    struct krn_register_config c = registration();
    struct krn_register *r = NULL;
    struct shm_error err = {0};
    int before = count_log("cuMemHostRegister");
    cr_assert(krn_register_memory(&c, &r, &err) == 0, "%s", err.text);
    uint32_t pieces = krn_register_pieces(r);
    cr_expect_geq(pieces, 10u);
    cr_expect_eq(pieces_told, (int)pieces);
    cr_expect_eq(count_log("cuMemHostRegister") - before, (int)pieces);
    int unregistered = count_log("cuMemHostUnregister");
    krn_register_release(&r);
    cr_expect_null(r);
    cr_expect_eq(count_log("cuMemHostUnregister") - unregistered, (int)pieces);
    c.bytes -= 100;
    cr_expect_eq(krn_register_memory(&c, &r, &err), -EINVAL);
}

Test(cuda, registration_cancelled, .init = open_device, .fini = close_device)
{
    struct krn_register_config c = registration();
    c.cancel = &cancel;
    c.progress_ctx = &c;
    struct krn_register *r = NULL;
    struct shm_error err = {0};
    int unregistered = count_log("cuMemHostUnregister");
    cr_expect_eq(krn_register_memory(&c, &r, &err), -ECANCELED);
    cr_expect_eq(count_log("cuMemHostUnregister") - unregistered, 3);
}

Test(cuda, registration_fails_in_the_middle)
{
    setenv("FAKECUDA_FAIL", "cuMemHostRegister:5:2", 1); /* two trials come first */
    open_device();
    struct krn_register_config c = registration();
    struct krn_register *r = NULL;
    struct shm_error err = {0};
    int unregistered = count_log("cuMemHostUnregister");
    cr_expect_eq(krn_register_memory(&c, &r, &err), -ENOMEM);
    cr_expect(strstr(err.text, "CUDA_ERROR_OUT_OF_MEMORY"), "%s", err.text);
    cr_expect_eq(count_log("cuMemHostUnregister") - unregistered, 2);
    close_device();
}

/* ---- the link ---- */

static uint8_t *source;
static uint64_t source_bytes = 32 * BLOB;
static struct krn_cuda_ipc handle;
static pid_t peer;
static _Atomic uint64_t landed_word;
static struct shm_bell landed_bell;
static char noted[512];

static void on_note(void *ctx, bool warning, const char *line)
{
    (void)ctx, (void)warning;
    snprintf(noted, sizeof(noted), "%s", line);
}

/* The worker: another process, which owns the ring until the test ends. */
static void peer_up(void)
{
    int to[2];
    cr_assert(pipe(to) == 0);
    peer = fork();
    if (peer == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        unsetenv("FAKECUDA_FAIL");
        unsetenv("FAKECUDA_LOG");
        struct krn_cuda_device *d;
        krn_cuda_ptr ring;
        struct krn_cuda_ipc h;
        if (krn_cuda_device_open(0, &d, NULL) || KRN_CUDA(mem_alloc, &ring, 2u << 20) ||
            KRN_CUDA(ipc_get, &h, ring) || write(to[1], &h, sizeof(h)) != (ssize_t)sizeof(h))
            _exit(1);
        for (;;)
            pause();
    }
    cr_assert(read(to[0], &handle, sizeof(handle)) == (ssize_t)sizeof(handle));
    close(to[0]);
    close(to[1]);
    open_device();
    source = mmap(NULL, source_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (uint64_t i = 0; i < source_bytes; i++)
        source[i] = (uint8_t)(i / BLOB + 1);
    cr_assert(KRN_CUDA(host_register, source, source_bytes, 3) == 0);
}

static void peer_down(void)
{
    kill(peer, SIGKILL);
    waitpid(peer, NULL, 0);
    close_device();
}

static struct krn_link_cuda_config link_config(void)
{
    return (struct krn_link_cuda_config){.device = device,
                                         .ring_handle = handle,
                                         .ring_bytes = SLOTS * BLOB,
                                         .slot_bytes = BLOB,
                                         .flag_offset = SLOTS * BLOB,
                                         .source = source,
                                         .source_bytes = source_bytes,
                                         .landed_word = &landed_word,
                                         .landed_bell = &landed_bell,
                                         .batch = 4,
                                         .name = "t",
                                         .note = on_note};
}

static struct krn_link *open_link(void)
{
    struct krn_link_cuda_config c = link_config();
    struct krn_link *link = NULL;
    struct shm_error err = {0};
    cr_assert(krn_link_cuda_create(&c, &link, &err) == 0, "%s", err.text);
    return link;
}

static int put(struct krn_link *link, uint32_t i, bool more)
{
    return krn_link_copy(link, (uint64_t)(i % SLOTS) * BLOB, source + (uint64_t)(i % 32) * BLOB, BLOB, more);
}

/* "B4" a batch of so many, "C" a single copy, "W" a progress write, "S" a signal, since `from`. */
static void sequence(long from, char *text, size_t bytes)
{
    static char lines[4096][96];
    long at;
    int n = read_log(from, lines, 4096, &at), in_batch = 0;
    text[0] = '\0';
    for (int i = 0; i < n; i++) {
        int count = 0;
        size_t used = strlen(text);
        if (sscanf(lines[i], "cuMemcpyBatchAsync %*d %*d of %d", &count) == 1) {
            if (++in_batch == count) {
                snprintf(text + used, bytes - used, "B%d ", count);
                in_batch = 0;
            }
        } else if (strncmp(lines[i], "cuMemcpyHtoDAsync", 17) == 0)
            snprintf(text + used, bytes - used, "C ");
        else if (strncmp(lines[i], "cuStreamWriteValue32", 20) == 0)
            snprintf(text + used, bytes - used, "W ");
        else if (strncmp(lines[i], "cuStreamBatchMemOp", 18) == 0)
            snprintf(text + used, bytes - used, "S ");
        else
            snprintf(text + used, bytes - used, "?%.20s ", lines[i]);
    }
}

Test(cuda, link_start, .init = peer_up, .fini = peer_down)
{
    char lines[64][96];
    long at, from = log_end();
    struct krn_link *link = open_link();
    static const char *const expected[] = {"cuIpcOpenMemHandle", "cuStreamCreate", "cuMemcpyHtoDAsync",
                                           "cuStreamSynchronize", "cuStreamBatchMemOp"};
    cr_assert_eq(read_log(from, lines, 64, &at), 5);
    for (int i = 0; i < 5; i++)
        cr_expect(strncmp(lines[i], expected[i], strlen(expected[i])) == 0, "%d: %s", i, lines[i]);
    cr_expect(strstr(lines[2], " 32768"), "the stream is primed with %s", lines[2]);
    cr_expect_gt(link->poll_ns, 0u, "nothing rings: it must be polled");
    from = log_end();
    krn_link_destroy(&link);
    cr_assert_eq(read_log(from, lines, 64, &at), 2);
    cr_expect(strncmp(lines[0], "cuStreamDestroy", 15) == 0 &&
              strncmp(lines[1], "cuIpcCloseMemHandle", 19) == 0);
}

/* What is certain goes in batches; a guess goes alone and at once; a signal takes all along. */
Test(cuda, link_batches, .init = peer_up, .fini = peer_down)
{
    char text[1024];
    setenv("FAKECUDA_DELAY_US", "3000", 1); /* nothing lands meanwhile */
    struct krn_link *link = open_link();
    long from = log_end();
    for (uint32_t i = 0; i < 11; i++)
        cr_assert_eq(put(link, i, true), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W B4 W B4 ", "the first at once, then fours; two are held: %s", text);
    cr_assert_eq(krn_link_flush(link), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W B4 W B4 ", "nine are under way: the two may wait for company: %s", text);
    cr_expect_eq(link->poll_ns, 100000u, "and the caller need not look soon");
    cr_assert_eq(krn_link_signal(link, 1), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W B4 W B4 W B2 S ", "%s", text);
    cr_assert_eq(krn_link_drain(link, 1000000000), 0);
    from = log_end();
    cr_assert_eq(put(link, 0, true), 0);
    cr_assert_eq(put(link, 1, true), 0);
    cr_assert_eq(put(link, 2, false), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W B2 ", "a guess takes held copies along, in order: %s", text);
    cr_assert_eq(krn_link_flush(link), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W B2 W ", "%s", text);
    cr_assert_eq(krn_link_flush(link), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W B2 W ", "nothing new to tell: %s", text);
    cr_expect_leq(link->poll_ns, 80000u, "three are under way");
    cr_assert_eq(krn_link_drain(link, 1000000000), 0);
    cr_expect_eq(krn_link_landed(link), 14u);
    krn_link_destroy(&link);
}

Test(cuda, link_counts_and_signals, .init = peer_up, .fini = peer_down)
{
    struct krn_link *link = open_link();
    struct krn_link_stats stats;
    cr_expect(strstr(noted, "a flag write t") && strstr(noted, "beside its kernels"), "%s", noted);
    krn_link_mark(link);
    for (uint32_t i = 0; i < 3000; i++) {
        cr_assert_eq(put(link, i, i % 3), 0);
        if (i % 5 == 4)
            cr_assert_eq(krn_link_signal(link, UINT64_C(0xfffffff0) + i / 5), 0); /* passes 2^32 */
        uint64_t landed = krn_link_landed(link);
        cr_assert(landed <= i + 1, "%d landed of %u", (int)landed, i + 1);
    }
    cr_assert_eq(krn_link_drain(link, 10000000000u), 0);
    cr_expect_eq(krn_link_landed(link), 3000u);
    cr_expect_eq(landed_word, UINT64_C(0xfffffff0) + 599);
    krn_link_stats(link, &stats);
    cr_expect(stats.copies == 3000 && stats.bytes == 3000u * BLOB && stats.signals == 600 &&
              stats.mark_bytes == stats.bytes && stats.busy_ns > 0 && stats.first_ns &&
              stats.last_ns >= stats.first_ns);
    krn_link_destroy(&link);
}

/* Under 32 KiB a copy would go through the compute engine: it is made longer where the slot allows it. */
Test(cuda, link_pads, .init = peer_up, .fini = peer_down)
{
    char lines[64][96];
    long at, from;
    struct krn_link_cuda_counts counts;
    struct krn_link *link = open_link();
    from = log_end();
    cr_assert_eq(krn_link_copy(link, BLOB, source, 5000, false), 0);
    cr_assert_eq(read_log(from, lines, 64, &at), 1);
    cr_expect(strstr(lines[0], " 32768"), "%s", lines[0]);
    cr_assert_eq(krn_link_copy(link, BLOB, source + source_bytes - 5000, 5000, false), 0,
                 "the end of the source");
    krn_link_cuda_counts(link, &counts);
    cr_expect(counts.padded == 1 && counts.small == 1);
    cr_assert_eq(krn_link_drain(link, 1000000000), 0);
    krn_link_destroy(&link);
}

Test(cuda, link_refuses, .init = peer_up, .fini = peer_down)
{
    struct krn_link *link = open_link();
    uint64_t end = SLOTS * BLOB;
    cr_expect_eq(krn_link_copy(link, end - BLOB + 1, source, BLOB, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, UINT64_MAX - 5, source, BLOB, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, 0, source - 1, BLOB, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, 0, source + source_bytes - BLOB + 1, BLOB, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, 0, NULL, BLOB, false), -EINVAL);
    cr_expect_eq(krn_link_copy(link, end - BLOB, source + source_bytes - BLOB, BLOB, false), 0);
    krn_link_destroy(&link);
    struct krn_link_cuda_config c = link_config();
    struct shm_error err = {0};
    c.flag_offset = (2u << 20) - 2;
    cr_expect_eq(krn_link_cuda_create(&c, &link, &err), -EINVAL, "off its boundary");
    c.flag_offset = 2u << 20;
    cr_expect_eq(krn_link_cuda_create(&c, &link, &err), -EINVAL);
    cr_expect(strstr(err.text, "allocation of 2097152"), "%s", err.text);
    c.flag_offset = SLOTS * BLOB, c.batch = 17;
    cr_expect_eq(krn_link_cuda_create(&c, &link, &err), -EINVAL);
}

/* A device error ends the link: every later call says so, the line has the driver's words, closing works. */
Test(cuda, link_breaks)
{
    setenv("FAKECUDA_FAIL", "cuMemcpyBatchAsync:3:719", 1);
    peer_up();
    struct krn_link *link = open_link();
    int rc = 0;
    uint32_t n = 0;
    for (; n < 100 && rc == 0; n++)
        rc = put(link, n, true);
    cr_expect_eq(rc, -EIO);
    cr_expect(n > 8 && n < 30, "%u", n);
    cr_expect(strstr(noted, "CUDA_ERROR_LAUNCH_FAILED"), "%s", noted);
    cr_expect_eq(krn_link_flush(link), -EIO);
    cr_expect_eq(krn_link_signal(link, 1), -EIO);
    cr_expect_eq(krn_link_drain(link, 1000000000), -EIO);
    krn_link_destroy(&link);
    cr_expect_null(link);
    peer_down();
}

/* A stream that died while nothing was enqueued shows when somebody waits for it. */
Test(cuda, link_finds_a_dead_stream)
{
    setenv("FAKECUDA_FAIL", "cuStreamQuery:1:719", 1);
    setenv("FAKECUDA_DELAY_US", "400000", 1);
    peer_up();
    struct krn_link *link = open_link();
    cr_assert_eq(put(link, 0, false), 0);
    int rc = 0;
    for (int i = 0; i < 300 && rc == 0; i++) {
        krn_link_landed(link);
        rc = krn_link_flush(link);
        usleep(1000);
    }
    cr_expect_eq(rc, -EIO);
    krn_link_destroy(&link);
    peer_down();
}

Test(cuda, link_without_batch_copies)
{
    char text[1024];
    setenv("FAKECUDA_MISSING", "cuMemcpyBatchAsync", 1);
    peer_up();
    setenv("FAKECUDA_DELAY_US", "3000", 1);
    struct krn_link *link = open_link();
    long from = log_end();
    for (uint32_t i = 0; i < 5; i++)
        cr_assert_eq(put(link, i, true), 0);
    cr_assert_eq(krn_link_signal(link, 1), 0);
    sequence(from, text, sizeof(text));
    cr_expect_str_eq(text, "C W C C C C S ", "%s", text);
    krn_link_destroy(&link);
    peer_down();
}

/* ---- kernels ---- */

Test(cuda, fatbins, .init = open_device, .fini = close_device)
{
    size_t n;
    const struct krn_fatbin *all = krn_fatbins(&n);
    struct shm_error err = {0};
    void *module = NULL, *function = NULL;
    cr_expect_eq(krn_cuda_module("no_such", &module, &err), -ENOENT);
    for (size_t i = 0; i < n; i++) {
        uint32_t magic;
        memcpy(&magic, all[i].begin, 4);
        cr_expect(magic == KRN_FATBIN_MAGIC && all[i].bytes > 1000, "%s", all[i].name);
        cr_expect(krn_cuda_module(all[i].name, &module, &err) == 0, "%s", err.text);
    }
    if (n) {
        cr_expect_eq(krn_cuda_kernel(module, "krn_publish", 100 * 1024, &function, &err), 0);
        cr_expect_eq(krn_cuda_kernel(module, "other", 0, &function, &err), -ENOENT);
    }
}
