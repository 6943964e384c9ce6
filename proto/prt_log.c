/* SPDX-License-Identifier: MIT */
#include "proto/prt_log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *name;
    int level;
} names[] = {
    {"error", PRT_LOG_ERROR}, {"warning", PRT_LOG_WARNING}, {"info", PRT_LOG_INFO}, {"debug", PRT_LOG_DEBUG}};
#define NAMES (sizeof(names) / sizeof(names[0]))

static const char *name_of_program = "expertd";
static atomic_int level_max = PRT_LOG_INFO;
static atomic_bool bar;

void prt_log_set_name(const char *program)
{
    name_of_program = program;
}

void prt_log_set_level(int level)
{
    atomic_store(&level_max, level);
}

int prt_log_level(void)
{
    return atomic_load(&level_max);
}

int prt_log_parse_level(const char *text)
{
    for (size_t i = 0; i < NAMES; i++)
        if (strcmp(text, names[i].name) == 0)
            return names[i].level;
    return -EINVAL;
}

const char *prt_log_level_name(int level)
{
    for (size_t i = 0; i < NAMES; i++)
        if (level <= names[i].level)
            return names[i].name;
    return "debug";
}

int prt_log_read_level(const char *argument, struct shm_error *err)
{
    char text[64] = "", word[16] = "";
    if (argument[0] != '@') {
        int level = prt_log_parse_level(argument);
        return level >= 0
                   ? level
                   : shm_error_set(err, EINVAL,
                                   "--log-level: '%.40s' is not one of error, warning, info, debug, @FILE",
                                   argument);
    }
    /* a pipe must not be waited for */
    int fd = open(argument + 1, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    int error = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0)
        return shm_error_set(err, error, "--log-level: %.300s: %s", argument + 1, strerror(error));
    sscanf(text, "%15s", word);
    int level = prt_log_parse_level(word);
    if (level < 0)
        return shm_error_set(err, EINVAL,
                             "--log-level: %.300s: its first word is not error, warning, info or debug",
                             argument + 1);
    return level;
}

bool prt_log_reload(const char *argument)
{
    struct shm_error err = {0};
    if (!argument || argument[0] != '@')
        return false;
    int before = prt_log_level(), level = prt_log_read_level(argument, &err);
    if (level < 0) {
        prt_log(PRT_LOG_WARNING, "SIGHUP: log level stays %s: %s", prt_log_level_name(before),
                shm_error_text(&err));
        return true;
    }
    /* shown by the more talkative of the two */
    if (level > before)
        prt_log_set_level(level);
    prt_log(PRT_LOG_NOTICE, "SIGHUP: log level is %s, was %s (%.300s)", prt_log_level_name(level),
            prt_log_level_name(before), argument + 1);
    prt_log_set_level(level);
    return true;
}

void prt_log_set_bar(bool drawn)
{
    atomic_store(&bar, drawn);
}

/* Does stderr lead to the journal? $JOURNAL_STREAM names its device and inode (systemd.exec(5)). */
static bool to_journal(void)
{
    static atomic_int known; /* 0: not asked yet, 1: no, 2: yes */
    if (atomic_load(&known) == 0) {
        const char *stream = getenv("JOURNAL_STREAM");
        unsigned long long dev = 0, ino = 0;
        struct stat st;
        bool yes = stream && sscanf(stream, "%llu:%llu", &dev, &ino) == 2 && fstat(STDERR_FILENO, &st) == 0 &&
                   st.st_dev == dev && st.st_ino == ino;
        atomic_store(&known, yes ? 2 : 1);
    }
    return atomic_load(&known) == 2;
}

void prt_log(int level, const char *fmt, ...)
{
    if (level > prt_log_level())
        return;
    char line[1024];
    size_t head = 0;
    if (to_journal())
        head = (size_t)snprintf(line, sizeof(line), "<%d>", level);
    else if (atomic_exchange(&bar, false))
        head = (size_t)snprintf(line, sizeof(line), "\r\033[K");
    head += (size_t)snprintf(line + head, sizeof(line) - head, "%.32s: %s", name_of_program,
                             level == PRT_LOG_ERROR     ? "error: "
                             : level == PRT_LOG_WARNING ? "warning: "
                                                        : "");
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line + head, sizeof(line) - head - 1, fmt, ap);
    va_end(ap);
    size_t len = head + (n < 0 ? 0 : (size_t)n);
    if (len > sizeof(line) - 2)
        len = sizeof(line) - 2;
    for (size_t i = head; i < len; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
    line[len++] = '\n';
    ssize_t ignored = write(STDERR_FILENO, line, len); /* nobody to tell */
    (void)ignored;
}
