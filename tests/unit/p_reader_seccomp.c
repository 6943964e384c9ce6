/* SPDX-License-Identifier: MIT */
/*
 * Where seccomp refuses io_uring_setup (containers: EPERM or ENOSYS), the
 * reader must say so, fall back to pread and deliver the same bytes.
 * Plain program: the filter stays for the life of a process, so each case is a child.
 */
#include "expertd/exd_reader.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FILE_BYTES 2500001u

static unsigned char want[FILE_BYTES], got[FILE_BYTES];
static int done;

static int next_request(void *ctx, struct exd_reader_request *ret_request)
{
    (void)ctx;
    *ret_request = (struct exd_reader_request){.length = FILE_BYTES};
    return !done++;
}

static int consume(void *ctx, uint64_t tag, uint64_t offset, const void *bytes, size_t n)
{
    (void)ctx, (void)tag;
    memcpy(got + offset, bytes, n);
    return 0;
}

static int refuse_io_uring(int code)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ((unsigned)code & SECCOMP_RET_DATA)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = {.len = sizeof filter / sizeof *filter, .filter = filter};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog))
        return 77;
    return syscall(SYS_io_uring_setup, 1, NULL) == -1 && errno == code ? 0 : 77;
}

static int child(const char *path, int code, const char *expect)
{
    struct exd_reader_file file = {path, -1};
    struct exd_reader_job job = {.next = next_request, .consume = consume};
    struct exd_reader_config only_uring = {.io = EXD_READER_URING};
    struct exd_reader *reader = NULL;
    struct shm_error err = {0};
    int r = code ? refuse_io_uring(code) : 0;

    if (r)
        return r;
    if (code && exd_reader_open(&only_uring, &file, 1, &reader, &err) != -code) {
        fprintf(stderr, "demanding io_uring did not fail with %d: %s\n", code, err.text);
        return 1;
    }
    if (exd_reader_open(NULL, &file, 1, &reader, &err) < 0 || exd_reader_run(reader, &job, NULL, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    fprintf(stderr, "%s\n", exd_reader_describe(reader));
    if (!strstr(exd_reader_describe(reader), expect) || memcmp(want, got, FILE_BYTES))
        return 1;
    exd_reader_close(&reader);
    return 0;
}

static int in_child(const char *path, int code, const char *expect)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        alarm(30);
        _exit(child(path, code, expect));
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
        return 1;
    return WEXITSTATUS(status);
}

int main(void)
{
    char path[64];
    FILE *out;
    int r;

    unsetenv("EXPERTD_IO");
    for (unsigned i = 0; i < FILE_BYTES; i++)
        want[i] = (unsigned char)(i * 2654435761u >> 13);
    snprintf(path, sizeof path, "./p_reader_seccomp.%d", (int)getpid());
    out = fopen(path, "wb");
    if (!out || fwrite(want, 1, FILE_BYTES, out) != FILE_BYTES || fclose(out))
        return 1;
    r = in_child(path, EPERM, "io_uring refused (EPERM)");
    if (!r)
        r = in_child(path, ENOSYS, "io_uring refused (ENOSYS)");
    if (!r) /* whatever is the default here, for the thread sanitizer's eyes */
        r = in_child(path, 0, ", ");
    unlink(path);
    return r;
}
