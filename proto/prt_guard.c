/* SPDX-License-Identifier: MIT */
#include "proto/prt_guard.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define GUARDS     8
#define LINE_BYTES 1536

static struct guard {
    _Atomic uintptr_t low, high; /* low 0: free. high before low when set, low first when cleared */
    char line[LINE_BYTES];       /* written whole while low is 0 */
    size_t length;
} guards[GUARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of who adds and removes; the handler takes none */

static void on_sigbus(int sig, siginfo_t *info, void *context)
{
    (void)context;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (size_t i = 0; i < GUARDS; i++) {
        uintptr_t low = atomic_load(&guards[i].low);
        if (!low || at < low || at >= atomic_load(&guards[i].high))
            continue;
        static atomic_flag told = ATOMIC_FLAG_INIT; /* several threads may get here */
        while (atomic_flag_test_and_set(&told))
            pause();
        ssize_t ignored = write(STDERR_FILENO, guards[i].line, guards[i].length);
        (void)ignored;
        _exit(1);
    }
    signal(sig, SIG_DFL); /* touched again on return: dies of it, as without us */
}

void prt_guard_add(const void *base, uint64_t bytes, const char *what, const char *path, const char *remedy)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < GUARDS; i++) {
        struct guard *g = &guards[i];
        if (atomic_load(&g->low))
            continue;
        int n = snprintf(g->line, sizeof(g->line), "%s: %s %s was truncated while it was in use: %s\n",
                         program_invocation_short_name, what, path, remedy);
        g->length = n < 0 ? 0 : (size_t)n < sizeof(g->line) ? (size_t)n : sizeof(g->line) - 1;
        struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, NULL);
        atomic_store(&g->high, (uintptr_t)base + bytes);
        atomic_store(&g->low, (uintptr_t)base);
        break;
    }
    pthread_mutex_unlock(&lock);
}

void prt_guard_remove(const void *base)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < GUARDS; i++)
        if (base && atomic_load(&guards[i].low) == (uintptr_t)base)
            atomic_store(&guards[i].low, 0);
    pthread_mutex_unlock(&lock);
}
