/* SPDX-License-Identifier: MIT */
#include "expertd/exd_progress.h"

#include "proto/prt_log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define TEXT_BYTES  512
#define COLUMNS_MIN 40u
#define COLUMNS_MAX 200u
#define BAR_MAX     40u

void exd_progress_init(struct exd_progress *p, int fd, const char *what)
{
    struct winsize w;
    const char *term = getenv("TERM");
    *p = (struct exd_progress){.fd = fd, .what = what, .columns = 80};
    p->terminal = isatty(fd) && !(term && strcmp(term, "dumb") == 0);
    if (p->terminal && ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_col)
        p->columns = w.ws_col;
    if (p->columns < COLUMNS_MIN)
        p->columns = COLUMNS_MIN;
    if (p->columns > COLUMNS_MAX)
        p->columns = COLUMNS_MAX;
}

void exd_progress_text(char *text, size_t size, uint32_t columns, const char *what, uint64_t done,
                       uint64_t total, uint64_t elapsed_ns)
{
    if (done > total)
        done = total;
    double part = total ? (double)done / (double)total : 1;
    double gbps = elapsed_ns ? (double)done / (double)elapsed_ns : 0; /* bytes/ns = GB/s */
    char left[48] = "", numbers[160];
    if (done == total) {
        snprintf(left, sizeof left, "in %.1f s", (double)elapsed_ns / 1e9);
    } else if (gbps > 0) {
        uint64_t s = (uint64_t)((double)(total - done) / gbps / 1e9 + 0.999);
        if (s >= 3600)
            snprintf(left, sizeof left, "%llu:%02u:%02u left", (unsigned long long)(s / 3600),
                     (unsigned)(s / 60 % 60), (unsigned)(s % 60));
        else
            snprintf(left, sizeof left, "%u:%02u left", (unsigned)(s / 60), (unsigned)(s % 60));
    } else {
        snprintf(left, sizeof left, "starting");
    }
    snprintf(numbers, sizeof numbers, "%3u%%  %.2f of %.2f GB  %.2f GB/s  %s", (unsigned)(part * 100),
             (double)done / 1e9, (double)total / 1e9, gbps, left);
    if (columns == 0) {
        const char *n = numbers + strspn(numbers, " ");
        snprintf(text, size, "%s: %s", what, n);
        return;
    }
    size_t used = strlen(what) + strlen(numbers) + 6; /* "what [" "] " and one column free */
    unsigned width = columns > used ? (unsigned)(columns - used) : 0;
    if (width > BAR_MAX)
        width = BAR_MAX;
    if (width < 4) {
        snprintf(text, size, "%.*s", (int)columns - 1, numbers);
        return;
    }
    char bar[BAR_MAX + 1];
    unsigned full = (unsigned)(part * width);
    for (unsigned i = 0; i < width; i++)
        bar[i] = i < full ? '=' : i == full ? '>' : ' ';
    bar[width] = 0;
    snprintf(text, size, "%s [%s] %s", what, bar, numbers);
}

static void put(const struct exd_progress *p, const char *text)
{
    ssize_t rc = write(p->fd, text, strlen(text));
    (void)rc; /* nobody to tell */
}

/* A line; on stderr one as all others of the log. */
static void put_line(const struct exd_progress *p, const char *text)
{
    char line[TEXT_BYTES + 48];
    if (!p->terminal && p->fd == STDERR_FILENO) {
        prt_log(PRT_LOG_INFO, "%s", text);
        return;
    }
    snprintf(line, sizeof line, "%s%s\n", p->drawn ? "\r\033[K" : "", text);
    put(p, line);
}

void exd_progress_update(struct exd_progress *p, uint64_t done, uint64_t total, uint64_t elapsed_ns)
{
    uint64_t pause = p->terminal ? EXD_PROGRESS_BAR_NS : EXD_PROGRESS_LINE_NS;
    if (elapsed_ns < p->last_ns + pause && (p->drawn || !p->terminal))
        return;
    char text[TEXT_BYTES], line[TEXT_BYTES + 16];
    exd_progress_text(text, sizeof text, p->terminal ? p->columns : 0, p->what, done, total, elapsed_ns);
    if (p->terminal) {
        snprintf(line, sizeof line, "\r\033[K%s", text);
        put(p, line);
    } else {
        put_line(p, text);
    }
    p->drawn = p->terminal;
    p->last_ns = elapsed_ns;
}

void exd_progress_finish(struct exd_progress *p, uint64_t done, uint64_t total, uint64_t elapsed_ns, bool ok)
{
    char text[TEXT_BYTES], line[TEXT_BYTES + 32];
    exd_progress_text(text, sizeof text, 0, p->what, done, total, elapsed_ns);
    snprintf(line, sizeof line, "%s%s", text, ok ? "" : " (stopped)");
    put_line(p, line);
    p->drawn = false;
}
