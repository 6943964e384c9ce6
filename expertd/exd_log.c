/* SPDX-License-Identifier: MIT */
#include "expertd/exd_log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int level_max = EXD_LOG_INFO;
static atomic_bool bar;

void exd_log_set_level(int level)
{
    level_max = level;
}

int exd_log_parse_level(const char *text)
{
    static const struct {
        const char *name;
        int level;
    } names[] = {{"error", EXD_LOG_ERROR},
                 {"warning", EXD_LOG_WARNING},
                 {"info", EXD_LOG_INFO},
                 {"debug", EXD_LOG_DEBUG}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcmp(text, names[i].name) == 0)
            return names[i].level;
    return -EINVAL;
}

void exd_log_set_bar(bool drawn)
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

void exd_log(int level, const char *fmt, ...)
{
    if (level > level_max)
        return;
    char line[1024];
    size_t head = 0;
    if (to_journal())
        head = (size_t)snprintf(line, sizeof(line), "<%d>", level);
    else if (atomic_exchange(&bar, false))
        head = (size_t)snprintf(line, sizeof(line), "\r\033[K");
    head += (size_t)snprintf(line + head, sizeof(line) - head, "expertd: %s",
                             level == EXD_LOG_ERROR     ? "error: "
                             : level == EXD_LOG_WARNING ? "warning: "
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
