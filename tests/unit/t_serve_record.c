/* SPDX-License-Identifier: MIT */
/* Records of servers: what is written comes back; what others may have put there is no harm. */
#include "proto/prt_file.h"
#include "proto/prt_mps.h"
#include "proto/prt_serve.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

TestSuite(record, .timeout = 60);

static char top[64];
static struct prt_paths paths;

static void begin(void)
{
    struct shm_error err = {0};
    snprintf(top, sizeof top, "/tmp/xd-record-%d", (int)getpid());
    cr_assert_eq(mkdir(top, 0700), 0);
    cr_assert_eq(prt_paths_make(top, "r", &paths, &err), 0, "%s", err.text);
    cr_assert_eq(prt_paths_create(&paths, &err), 0, "%s", err.text);
}

static void end(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", top);
    cr_assert_eq(system(command), 0);
}

static struct prt_serve own(void)
{
    struct prt_serve r = {.pid = (uint32_t)getpid(), .life = 77, .busy = 3, .state = PRT_SERVE_DRAINING};
    prt_process_start(getpid(), &r.start);
    strcpy(r.url, "http://127.0.0.1:8080");
    return r;
}

static void put(const char *name, const char *text)
{
    char path[PRT_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", paths.dir, name);
    FILE *f = fopen(path, "w");
    cr_assert(f);
    fputs(text, f);
    fclose(f);
}

Test(record, what_is_written_comes_back)
{
    begin();
    struct prt_serve r = own(), back, list[PRT_SERVE_MAX];
    struct shm_error err = {0};
    for (unsigned state = 0; state < PRT_SERVE_STATE_COUNT; state++) {
        r.state = (enum prt_serve_state)state;
        strcpy(r.note, state % 2 ? "it was so, because" : "");
        cr_assert_eq(prt_serve_write(&paths, &r, &err), 0, "%s", err.text);
        cr_assert_eq(prt_serve_read(&paths, r.pid, &back, &err), 0, "%s", err.text);
        cr_assert(back.state == r.state && back.life == 77 && back.busy == 3 && back.start == r.start);
        cr_assert_str_eq(back.url, r.url);
        cr_assert_str_eq(back.note, r.note);
    }
    cr_assert_eq(prt_serve_list(&paths, false, list, &err), 1);
    prt_serve_remove(&paths);
    cr_assert_eq(prt_serve_list(&paths, false, list, &err), 0);
    cr_assert_eq(prt_serve_read(&paths, r.pid, &back, &err), -ENOENT);
    end();
}

Test(record, what_others_put_there_is_no_harm)
{
    static const char *const texts[] = {"",
                                        "serve-1",
                                        "serve-1 1 1 1 ready 0",
                                        "serve-2 %u 1 1 ready 0 http://x \n",
                                        "serve-1 %u 1 1 flying 0 http://x \n",
                                        "serve-1 -1 1 1 ready 0 x\n",
                                        "serve-1 99999999999999999999 1 1 ready 0 x\n",
                                        "\xff\xfe\x01",
                                        "serve-1 %u 1 1 readyreadyreadyreadyreadyready 0 x\n"};
    begin();
    struct prt_serve back, list[PRT_SERVE_MAX];
    struct shm_error err = {0};
    char name[32], text[4096], path[PRT_PATH_BYTES + 64];
    uint32_t pid = (uint32_t)getpid();
    snprintf(name, sizeof name, "serve-%u", pid);
    snprintf(path, sizeof path, "%s/%s", paths.dir, name);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        const char *at = strstr(texts[i], "%u");
        snprintf(text, sizeof text, "%.*s", at ? (int)(at - texts[i]) : 200, texts[i]);
        if (at)
            snprintf(text + strlen(text), 200, "%u%s", pid, at + 2);
        put(name, text);
        cr_assert_eq(prt_serve_read(&paths, pid, &back, &err), -EBADMSG, "text %zu", i);
        cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0);
        cr_assert_eq(access(path, F_OK), 0, "not known to be dead: left alone");
    }
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    put(name, text);
    cr_assert_eq(prt_serve_read(&paths, pid, &back, &err), -EBADMSG);
    unlink(path);
    cr_assert_eq(symlink("/proc/self/status", path), 0);
    cr_assert_eq(prt_serve_read(&paths, pid, &back, &err), -ELOOP);
    unlink(path);
    cr_assert_eq(mkfifo(path, 0600), 0); /* does not block */
    cr_assert_eq(prt_serve_read(&paths, pid, &back, &err), -EBADMSG);
    put("serve-", "");
    put("serve-0", "");
    put("serve-x1", "");
    put("serve-99999999999", "");
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0);
    end();
}

Test(record, a_dead_one_is_swept_and_never_signalled)
{
    begin();
    struct prt_serve r = own(), back, list[PRT_SERVE_MAX];
    struct shm_error err = {0};
    pid_t child = fork();
    if (!child) {
        alarm(60);
        pause();
        _exit(0);
    }
    r.pid = (uint32_t)child;
    prt_process_start(child, &r.start);
    cr_assert_eq(prt_serve_write(&paths, &r, &err), 0);
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 1);
    cr_assert_eq(prt_serve_signal(&list[0], PRT_SERVE_DRAIN, &err), -ENOTSUP, "it would die of it");
    list[0].start++; /* a number used again by another process */
    cr_assert_eq(prt_serve_signal(&list[0], PRT_SERVE_DRAIN, &err), -ESRCH);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    cr_assert_eq(prt_serve_read(&paths, r.pid, &back, &err), -ESRCH);
    cr_assert_eq(prt_serve_list(&paths, false, list, &err), 0);
    cr_assert_eq(prt_serve_read(&paths, r.pid, &back, &err), -ESRCH);
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0);
    cr_assert_eq(prt_serve_read(&paths, r.pid, &back, &err), -ENOENT);
    end();
}

static bool there(const char *name)
{
    char path[PRT_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", paths.dir, name);
    return access(path, F_OK) == 0;
}

/* Killed between open and rename: whole or cut, the file says or its name does whose it was. */
Test(record, what_a_killed_server_had_begun_is_swept)
{
    begin();
    struct prt_serve r = own(), list[PRT_SERVE_MAX];
    struct shm_error err = {0};
    char record[32], begun[40], reused[40], text[128];
    pid_t child = fork();
    if (!child)
        _exit(0);
    waitpid(child, NULL, 0);
    snprintf(begun, sizeof begun, "serve-%d.new", (int)child);
    snprintf(record, sizeof record, "serve-%d", (int)child);
    snprintf(reused, sizeof reused, "serve-%d.new", (int)getpid());
    put(begun, "serve-1 12");
    put(record, "serve-1 12");
    put("serve-1x.new", "");
    cr_assert_eq(prt_serve_list(&paths, false, list, &err), 0);
    cr_assert(there(begun) && there(record), "without sweep all stays");
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0);
    cr_assert(!there(begun) && !there(record) && there("serve-1x.new"));
    put(reused, "serve-1 12"); /* of a live one, which is about to write the rest */
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0);
    cr_assert(there(reused));
    snprintf(text, sizeof text, "serve-1 %u %llu 1 ready 0 x \n", r.pid, (unsigned long long)r.start);
    put(reused, text);
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0, "not a record yet");
    cr_assert(there(reused));
    snprintf(text, sizeof text, "serve-1 %u %llu 1 ready 0 x \n", r.pid, (unsigned long long)r.start + 1);
    put(reused, text); /* of another one before, with this process's number */
    cr_assert_eq(prt_serve_list(&paths, true, list, &err), 0);
    cr_assert(!there(reused));
    end();
}

Test(record, mps_is_found_by_its_daemon)
{
    begin();
    char where[128], text[32];
    setenv("CUDA_MPS_PIPE_DIRECTORY", paths.dir, 1);
    cr_assert_not(prt_mps_found(where, sizeof where));
    cr_assert_str_eq(where, paths.dir);
    put("control", "");
    cr_assert_not(prt_mps_found(where, sizeof where), "a plain file answers nothing");
    snprintf(text, sizeof text, "%d\n", (int)getpid());
    put("nvidia-cuda-mps-control.pid", text);
    cr_assert(prt_mps_found(where, sizeof where));
    put("nvidia-cuda-mps-control.pid", "4194305\n");
    cr_assert_not(prt_mps_found(where, sizeof where), "it has died");
    put("nvidia-cuda-mps-control.pid", "x");
    cr_assert_not(prt_mps_found(where, sizeof where));
    end();
}
