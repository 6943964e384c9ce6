/* SPDX-License-Identifier: MIT */
/* Log lines: level, prefix for the journal, bytes that could forge a line; the level of a file. */
#include "proto/prt_log.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char file[] = "/tmp/t_log_XXXXXX";

/* stderr becomes a file; with journal, the environment names it as systemd does. */
static void begin(bool journal)
{
    int fd = mkstemp(file);
    struct stat st;
    char text[64];
    cr_assert(fd >= 0 && fstat(fd, &st) == 0 && dup2(fd, STDERR_FILENO) == STDERR_FILENO);
    /* of another stream: must not be taken for ours */
    snprintf(text, sizeof text, "%llu:%llu", (unsigned long long)st.st_dev,
             (unsigned long long)st.st_ino + !journal);
    setenv("JOURNAL_STREAM", text, 1);
    close(fd);
}

static const char *written(void)
{
    static char text[4096];
    FILE *f = fopen(file, "re");
    cr_assert_not_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    unlink(file);
    return text;
}

TestSuite(log, .timeout = 30);

Test(log, plain_lines)
{
    begin(false);
    prt_log_set_name("inferd");
    prt_log(PRT_LOG_ERROR, "a%d", 1);
    prt_log(PRT_LOG_WARNING, "b\n<3>c\x1b");
    prt_log(PRT_LOG_NOTICE, "d");
    prt_log(PRT_LOG_DEBUG, "left out");
    cr_assert_str_eq(written(), "inferd: error: a1\ninferd: warning: b?<3>c?\ninferd: d\n");
}

Test(log, the_journals_lines)
{
    begin(true);
    prt_log_set_level(PRT_LOG_DEBUG);
    for (int level = PRT_LOG_ERROR; level <= PRT_LOG_DEBUG; level++)
        prt_log(level, "x");
    prt_log_set_level(PRT_LOG_ERROR);
    prt_log(PRT_LOG_WARNING, "left out");
    cr_assert_str_eq(written(), "<3>expertd: error: x\n<4>expertd: warning: x\n<5>expertd: x\n<6>expertd: x\n"
                                "<7>expertd: x\n");
}

static void put(const char *path, const char *text)
{
    FILE *f = fopen(path, "we");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
}

Test(log, level_of_a_file)
{
    char path[64], argument[80];
    struct shm_error err = {0};
    snprintf(path, sizeof path, "/tmp/t_log_level_%d", (int)getpid());
    snprintf(argument, sizeof argument, "@%s", path);
    cr_assert_eq(prt_log_read_level("debug", &err), PRT_LOG_DEBUG);
    cr_assert_eq(prt_log_read_level("loud", &err), -EINVAL);
    cr_assert(strstr(err.text, "loud") && strstr(err.text, "warning"));
    cr_assert_eq(prt_log_read_level(argument, &err), -ENOENT);
    cr_assert(strstr(err.text, path));
    put(path, "  warning\n# for now\n");
    cr_assert_eq(prt_log_read_level(argument, &err), PRT_LOG_WARNING);
    begin(false);
    cr_assert_not(prt_log_reload(NULL));
    cr_assert_not(prt_log_reload("debug"));
    cr_assert(prt_log_reload(argument));
    cr_assert_eq(prt_log_level(), PRT_LOG_WARNING);
    put(path, "debug\n");
    cr_assert(prt_log_reload(argument));
    cr_assert_eq(prt_log_level(), PRT_LOG_DEBUG);
    put(path, "");
    cr_assert(prt_log_reload(argument)); /* and stays */
    cr_assert_eq(prt_log_level(), PRT_LOG_DEBUG);
    unlink(path);
    const char *text = written();
    cr_assert(strstr(text, "log level is warning, was info") &&
                  strstr(text, "log level is debug, was warning") &&
                  strstr(text, "warning: SIGHUP: log level stays debug"),
              "%s", text);
}
